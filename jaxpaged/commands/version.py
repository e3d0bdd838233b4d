"""`jaxpaged version`: what is installed. Reads package metadata; imports none of the packages."""

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import jaxpaged
from jaxpaged.cli_parser import Parser
from jaxpaged.commands.answers import write_lines

PACKAGES = ("jax", "jaxlib", "flax", "transformers", "tokenizers", "numpy")


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("--short", action="store_true", help="only jaxpaged's own")


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    lines = [f"jaxpaged {jaxpaged.__version__}"]
    if not args.short:
        lines.append(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
        lines += [f"{package} {_version(package)}" for package in PACKAGES]
    write_lines(sys.stdout, lines)
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
