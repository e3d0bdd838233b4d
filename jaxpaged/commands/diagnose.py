"""`jaxpaged diagnose SOURCE`: says what is wrong with a server, why, and what to change.

Exit status: 0 healthy, 1 something was found, 2 the source cannot be read or has fewer than three samples.
"""

import argparse
import os
import sys
from pathlib import Path

import msgspec

from jaxpaged.cli_parser import Parser, add_options, load_options, number
from jaxpaged.commands.answers import write_lines
from jaxpaged.errors import ConfigError
from jaxpaged.options import option_table

MIN_SAMPLES = 3
DEFAULT_SECONDS = 10.0


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument(
        "source", metavar="SOURCE", help="event log, log of jaxpaged or vLLM, dump of /metrics, - for standard input, or a server's URL"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=number, metavar="N", default=DEFAULT_SECONDS, help="how long to watch a server (default: 10)")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (also JAXPAGED_API_KEY)")
    add_options(parser, [path for path in option_table() if path.startswith("diagnose.")])


def run(args: argparse.Namespace) -> int:
    """See `commands`.

    Raises:
        ConfigError: the source cannot be read, or tells too little.
    """
    from jaxpaged.diagnose.read_prometheus import is_url, metrics_url, observe_url
    from jaxpaged.diagnose.report import as_json, as_text
    from jaxpaged.diagnose.rules import diagnose
    from jaxpaged.diagnose.sources import observe_file, observe_lines

    limits = load_options(args).config.diagnose
    if is_url(args.source):
        key = args.api_key or os.environ.get("JAXPAGED_API_KEY")
        seen = observe_url(metrics_url(args.source), seconds=args.seconds, interval_s=min(limits.window_s, args.seconds / 4), api_key=key)
    elif args.source == "-":
        seen = observe_lines(sys.stdin.buffer, "standard input", limits)
    else:
        seen = observe_file(Path(args.source), limits)
    if len(seen.windows) < MIN_SAMPLES:
        raise ConfigError(f"{seen.source} has {len(seen.windows)} samples, and at least {MIN_SAMPLES} are needed: watch it for longer")
    findings = diagnose(seen, limits)
    if args.json:
        write_lines(sys.stdout, [msgspec.json.format(msgspec.json.encode(as_json(findings, seen))).decode()])
    else:
        write_lines(sys.stdout, [as_text(findings, seen).rstrip("\n")])
    return 1 if findings else 0
