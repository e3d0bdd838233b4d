"""`python scripted_program.py ARGUMENTS...` is `jaxpaged ARGUMENTS...` with the scripted engine, in a process of its own.

SCRIPTED_DELAY_S in the environment is the time between two pieces of an answer.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxpaged import cli
from jaxpaged.commands import chat, generate
from tests.cli.scripted_engine import ScriptedEngine


def main() -> int:
    """Runs the command line."""
    if os.isatty(0):
        # The leader of a new session takes the first terminal it opens as its own; Ctrl-C then reaches it.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    delay_s = float(os.environ.get("SCRIPTED_DELAY_S", "0"))
    engine = ScriptedEngine(on_piece=lambda _: time.sleep(delay_s))
    for module in (chat, generate):
        real_run = module.run
        module.run = lambda args, real_run=real_run: real_run(args, engine.make)  # type: ignore[misc,assignment]
    status = cli.main()
    if engine.aborted:
        sys.stderr.write(f"aborted {len(engine.aborted)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
