"""`jaxpaged serve`: a door to the server, which is a package beside this one and builds on it."""

import argparse
from importlib import import_module

from jaxpaged.cli_parser import Parser, add_options

_COMMAND = "server.command"


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="what to load (the same as --model)")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    return int(import_module(_COMMAND).run(args))
