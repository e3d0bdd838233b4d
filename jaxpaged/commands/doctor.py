"""`jaxpaged doctor`: looks at the machine, the installation and the model, and tries the engine for five seconds.

Exit status: 0 all is well enough, 1 something fails.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable

import msgspec

from jaxpaged.cli_parser import Parser, number
from jaxpaged.commands.answers import plain, write_lines
from jaxpaged.commands.engine_api import MakeEngine
from jaxpaged.commands.engine_start import add_engine_arguments, make_llm, terminal_config
from jaxpaged.examination import Result


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the model to try (the same as --model)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--seconds", type=number, metavar="N", default=5.0, help="how long the engine is tried (default: 5)")
    parser.add_argument("--no-self-test", action="store_true", help="do not start the engine")
    add_engine_arguments(parser)


def run(args: argparse.Namespace, make: MakeEngine = make_llm) -> int:
    """See `commands`."""
    from jaxpaged import examination
    from jaxpaged.gpu_readings import NvmlSource
    from jaxpaged.host_limits import prepare_process
    from jaxpaged.loading.cache_folder import cache_home

    config = terminal_config(args, model=args.name)
    prepare_process(config)
    parts: list[Iterable[Result]] = [
        examination.versions(),
        examination.environment(),
        examination.host(),
        examination.cache_folder(cache_home()),
        examination.devices(NvmlSource().read()),
    ]
    statuses = [_show(result, is_json=args.json) for result in itertools.chain(*parts)]
    found = [_show(result, is_json=args.json) for result in examination.model_files(config)]
    statuses += found
    if not args.no_self_test and "fail" not in found:
        statuses += [_show(result, is_json=args.json) for result in examination.self_test(lambda: make(config, ()), args.seconds)]
    return 1 if "fail" in statuses else 0


def _show(result: Result, *, is_json: bool) -> str:
    """Each as soon as it is known: the last ones take seconds."""
    line = msgspec.json.encode(result).decode() if is_json else plain(f"{result.status:<5}{result.name:<15}{result.text}")
    write_lines(sys.stdout, [line])
    sys.stdout.flush()
    return result.status
