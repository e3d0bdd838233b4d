"""`jaxpaged run-batch IN.jsonl OUT.jsonl`: a door to the server's package, which builds on this one."""

import argparse
from importlib import import_module

from jaxpaged.cli_parser import Parser, add_options, integer

DEFAULT_CONCURRENCY = 256


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("input", metavar="IN.jsonl", help="a request a line: custom_id, method, url, body")
    parser.add_argument("output", metavar="OUT.jsonl", help="gets an answer a line, in the same order; replaced if it is there")
    parser.add_argument(
        "--concurrency", type=integer, metavar="N", default=DEFAULT_CONCURRENCY, help="requests at the same time (default: 256)"
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    return int(import_module("server.batch_command").run(args))
