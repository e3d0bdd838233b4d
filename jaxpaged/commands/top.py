"""`jaxpaged top URL`: a server's load, latency, page pool and present verdict, drawn anew every second until Ctrl-C."""

import argparse
import os
import shutil
import sys
import time
from collections import deque

from jaxpaged.cli_parser import Parser, add_options, integer, load_options, number
from jaxpaged.options import option_table

CLEAR = "\x1b[H\x1b[2J"
NUM_KEPT = 60
DEFAULT_URL = "http://127.0.0.1:8000"


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("url", nargs="?", metavar="URL", default=DEFAULT_URL, help=f"the server, ours or vLLM's (default: {DEFAULT_URL})")
    parser.add_argument("--interval", type=number, metavar="N", default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--count", type=integer, metavar="N", help="looks in all (default: until Ctrl-C)")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (also JAXPAGED_API_KEY)")
    add_options(parser, [path for path in option_table() if path.startswith("diagnose.")])


def run(args: argparse.Namespace) -> int:
    """See `commands`. The screen is cleared only on a terminal.

    Raises:
        ConfigError: the server cannot be read.
    """
    from jaxpaged.diagnose.read_prometheus import fetch, metrics_url, parse
    from jaxpaged.diagnose.screen import draw
    from jaxpaged.errors import ConfigError

    limits = load_options(args).config.diagnose
    if not 0 < args.interval < 3600:
        raise ConfigError(f"--interval must be over 0 and under 3600, got {args.interval}")
    url, key = metrics_url(args.url), args.api_key or os.environ.get("JAXPAGED_API_KEY")
    scrapes = deque([parse(fetch(url, key), time.time())], maxlen=NUM_KEPT + 1)
    number_of_looks = 1
    while True:
        start = CLEAR if sys.stdout.isatty() else ""
        sys.stdout.write(start + draw(list(scrapes), url, limits, shutil.get_terminal_size((100, 30)).columns))
        sys.stdout.flush()
        if args.count is not None and number_of_looks >= args.count:
            return 0
        time.sleep(args.interval)
        scrapes.append(parse(fetch(url, key), time.time()))
        number_of_looks += 1
