"""`python scripted_program.py ARGUMENTS...` is `jaxpaged serve ARGUMENTS...` over a scripted device, in a process of its own.

In the environment: SCRIPTED_STEP_S, the length of a step; SCRIPTED_LOAD_S, that of the start; SCRIPTED_FAULT, what goes wrong from the
step SCRIPTED_FAULT_STEP on: `raise`, `hang` (for ever), `lock` (for ever, with the interpreter lock held). SCRIPTED_LOCK_GRACE_S is how
much longer than the watchdog's limit that lock may be held. SCRIPTED_MODEL=real: the model of the arguments after all.
"""

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxpaged import cli
from jaxpaged.config import Config
from jaxpaged.engine_client import EngineClient
from jaxpaged.events import PhaseChanged, Sink
from jaxpaged.model_runner import Runner
from server import command, serving
from tests.fakes import FailingRunner
from tests.server.scripted_llm import script_runner, scripted_llm

STEP_S = float(os.environ.get("SCRIPTED_STEP_S", "0"))
LOAD_S = float(os.environ.get("SCRIPTED_LOAD_S", "0"))
FAULT = os.environ.get("SCRIPTED_FAULT", "")
FAULT_STEP = int(os.environ.get("SCRIPTED_FAULT_STEP", "5"))


def before(step: int) -> None:
    """What happens before a step."""
    time.sleep(STEP_S)
    if step < FAULT_STEP:
        return
    if FAULT == "raise":
        raise RuntimeError("the device is on fire")
    if FAULT == "hang":
        time.sleep(10_000)
    if FAULT == "lock":
        ctypes.PyDLL(None).sleep(10_000)


def make_runner(config: Config) -> Runner:
    """The device."""
    return FailingRunner(script_runner(config), before=before)


def make_engine(config: Config, sinks: Sequence[Sink]) -> EngineClient:
    """Takes SCRIPTED_LOAD_S, in tenths."""
    for part in range(10):
        sinks[0](PhaseChanged(time_s=time.time(), phase="load", message=f"loading {part} of 10", done=part, total=10))
        time.sleep(LOAD_S / 10)
    return scripted_llm(config, sinks, make_runner)


def main() -> int:
    """Runs the command."""
    serving.LOCK_GRACE_S = float(os.environ.get("SCRIPTED_LOCK_GRACE_S", serving.LOCK_GRACE_S))
    real_run = command.run
    if os.environ.get("SCRIPTED_MODEL") != "real":
        command.run = lambda args: real_run(args, make_engine)  # type: ignore[assignment]
    return cli.main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
