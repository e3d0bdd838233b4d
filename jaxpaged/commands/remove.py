"""`jaxpaged rm`: remove pulled models from the cache folder."""

import argparse
import sys

from jaxpaged.cli_parser import Parser
from jaxpaged.commands.answers import write_lines
from jaxpaged.errors import ModelNotFoundError
from jaxpaged.options import nearest


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("names", nargs="+", metavar="MODEL", help="names as jaxpaged ls shows them")


def run(args: argparse.Namespace) -> int:
    """See `commands`. Nothing is removed when one of the names is unknown."""
    from jaxpaged.loading.cache_folder import CacheFolder, disk_errors
    from jaxpaged.loading.progress import format_bytes

    cache = CacheFolder()
    pulled = {model.manifest.name: model for model in cache.models()}
    for name in args.names:
        if name not in pulled:
            near = nearest(name, pulled)
            raise ModelNotFoundError(f"{name} is not pulled" + (f"; the nearest is {near}" if near else "; jaxpaged ls lists what is"))
    for name in dict.fromkeys(args.names):
        with disk_errors(cache.home):
            cache.remove(name)
        write_lines(sys.stdout, [f"removed {name} ({format_bytes(pulled[name].num_bytes)})"])
    return 0
