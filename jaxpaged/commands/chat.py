"""`jaxpaged chat` (= `run`): a conversation in the terminal or through pipes."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from jaxpaged.cli_parser import Parser
from jaxpaged.commands.chat_session import ChatSession
from jaxpaged.commands.engine_api import MakeEngine
from jaxpaged.commands.engine_start import (
    add_engine_arguments,
    add_sampling_arguments,
    make_llm,
    running_engine,
    sampling_params,
    terminal_config,
)

PROMPT = ">>> "


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the model (the same as --model)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--stats", action="store_true", help="after each answer a line with tokens/s, time to first token, cached tokens")
    add_sampling_arguments(parser, max_tokens=None)
    add_engine_arguments(parser)


def run(args: argparse.Namespace, make: MakeEngine = make_llm) -> int:
    """See `commands`."""
    config = terminal_config(args, model=args.name)
    params = sampling_params(args, config)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        # Line editing and history of the terminal; input() uses it once it is imported.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    with running_engine(config, make) as engine:
        session = ChatSession(engine.llm, params, system=args.system, out=sys.stdout, err=sys.stderr, shows_stats=args.stats)
        if is_terminal:
            session.note(f"{config.model.model} is ready; /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        for line in _lines(is_terminal=is_terminal, session=session):
            if not session.take(line):
                break
    return 0


def _lines(*, is_terminal: bool, session: ChatSession) -> Iterator[str]:
    """What the user types, until end of input. Ctrl-C while typing throws the line away and stays."""
    while True:
        try:
            yield input(PROMPT) if is_terminal else _piped_line()
        except EOFError:
            if is_terminal:
                session.note("")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            session.note("\n(/exit or Ctrl-D leaves)")
        except UnicodeDecodeError:
            session.note("that line is not UTF-8 text")


def _piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
