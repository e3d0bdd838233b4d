"""`jaxpaged rm`: remove pulled models from the cache folder."""

import argparse
import sys

from jaxpaged.cli_parser import Parser
from jaxpaged.commands.answers import write_lines


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("names", nargs="+", metavar="MODEL", help="names as jaxpaged ls shows them")


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    from jaxpaged.loading.progress import format_bytes
    from jaxpaged.loading.sources import remove

    for name in dict.fromkeys(args.names):
        removed = remove(name)
        what = f"{removed.name} ({format_bytes(removed.num_bytes)})" if removed is not None else f"what a stopped pull of {name} had left"
        write_lines(sys.stdout, [f"removed {what}"])
    return 0
