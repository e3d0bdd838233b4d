"""`jaxpaged serve`: a door to the server, which is a package beside this one and builds on it."""

import argparse
from importlib import import_module

from jaxpaged.cli_parser import Parser

_COMMAND = "server.command"


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    import_module(_COMMAND).add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    return int(import_module(_COMMAND).run(args))
