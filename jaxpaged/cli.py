"""The command line: finds the command, runs it, and turns every failure into one sentence and an exit status.

Exit status: 0 done; 1 the engine or the program failed; 2 the input is at fault; 130 stopped by Ctrl-C; 141 the reader of the
output went away. `serve` has some of its own (`server.serving`).
"""

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from jaxpaged.cli_parser import Parser
from jaxpaged.commands import COMMANDS, Command, by_name
from jaxpaged.errors import ConfigError, EngineDeadError, JaxpagedError, RequestFailedError
from jaxpaged.log_format import MAX_MESSAGE_CHARS, clean
from jaxpaged.options import nearest

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141
ERROR_LOG = "last-error.log"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: the process's own) and returns the exit status. Never raises."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character shows something else instead of ending the answer.
            stream.reconfigure(errors="replace")
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _silence(sys.stdout)
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as e:  # argparse, after printing a help text
        return e.code if isinstance(e.code, int) else EXIT_OK if e.code is None else EXIT_BAD_INPUT
    except (EngineDeadError, RequestFailedError) as e:
        return _say(e.message, EXIT_FAILED)
    except JaxpagedError as e:
        return _say(e.message, EXIT_BAD_INPUT)
    except OSError as e:
        where = f"{os.fsdecode(e.filename)}: " if isinstance(e.filename, str | bytes) else ""
        # Without a name it is an output that cannot be written.
        return _say(f"{where}{e.strerror or e}", EXIT_BAD_INPUT if where else EXIT_FAILED)
    except Exception as e:
        return _unexpected(e, argv)


def build_parser(command: Command) -> Parser:
    """The parser of one command."""
    module = importlib.import_module(f"jaxpaged.commands.{command.module}")
    parser = Parser(f"jaxpaged {command.name}", command.summary[0].upper() + command.summary[1:] + ".")
    module.add_arguments(parser)
    return parser


def help_text() -> str:
    """What `jaxpaged --help` prints."""
    width = max(len(command.name) for command in COMMANDS) + 2
    lines = ["jaxpaged: an LLM inference engine on JAX", "", "usage: jaxpaged COMMAND ...", "", "commands:"]
    for command in COMMANDS:
        also = f" (also: {', '.join(command.aliases)})" if command.aliases else ""
        lines.append(f"  {command.name:<{width}}{command.summary}{also}")
    lines += [
        "",
        "jaxpaged COMMAND --help shows a command's options. Every option is also a key of a YAML file (--config FILE)",
        "and an environment variable (JAXPAGED_CACHE__PAGE_SIZE); jaxpaged config --list names them all.",
    ]
    return "\n".join(lines) + "\n"


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return EXIT_OK
    name, rest = argv[0], argv[1:]
    if name in ("-v", "-V", "--version"):
        name, rest = "version", ["--short"]
    command = by_name().get(name)
    if command is None:
        near = nearest(name, by_name())
        raise ConfigError(f"there is no command {name[:80]!r}" + (f"; the nearest is {near}" if near else "; see jaxpaged --help"))
    args = build_parser(command).parse(rest)
    return int(importlib.import_module(f"jaxpaged.commands.{command.module}").run(args))


def _say(message: str, status: int) -> int:
    """One line on standard error, whatever the message holds."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"jaxpaged: {clean(' '.join(message.split()), MAX_MESSAGE_CHARS)}\n")
        sys.stderr.flush()
    _silence_if_broken()
    return status


def _unexpected(error: Exception, argv: Sequence[str]) -> int:
    """A bug: the traceback on the screen under `--log.level debug`, else in a file that the sentence names."""
    text = "".join(traceback.format_exception(error))
    if _wants_debug(argv):
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
    sentence = f"unexpected {type(error).__name__}: {error}"
    try:
        from jaxpaged.loading.cache_folder import cache_home

        path = cache_home() / ERROR_LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)
        return _say(f"{clean(sentence, 400)}; the traceback is in {path}", EXIT_FAILED)
    except (OSError, JaxpagedError):
        return _say(f"{clean(sentence, 400)}; --log.level debug shows the traceback", EXIT_FAILED)


def _wants_debug(argv: Sequence[str]) -> bool:
    words = " ".join(argv).replace("=", " ")
    return "--log.level debug" in words or os.environ.get("JAXPAGED_LOG__LEVEL", "").lower() == "debug"


def _open_missing_streams() -> None:
    """Python has None for a stream that was closed before it started (`>&-`): what is written there goes nowhere."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _silence_if_broken() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Points a stream whose reader is gone at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())
