"""`jaxpaged convert`: write a model as an Orbax checkpoint, which every command loads and any mesh restores."""

import argparse
import sys
from pathlib import Path

from jaxpaged.cli_parser import Parser, add_options, load_options
from jaxpaged.commands.answers import write_lines

CONVERT_OPTIONS = (
    "model.tokenizer",
    "model.revision",
    "model.dtype",
    "model.load_format",
    "model.hf_token",
    "model.offline",
)


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("source", metavar="SRC", help="the model: short name, folder, .gguf file, hub id org/name, or pypi:package")
    parser.add_argument("destination", metavar="DST", help="folder to write, which must not be there yet; --model DST loads it")
    add_options(parser, CONVERT_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    from jaxpaged.loading.disk import refuse_taken
    from jaxpaged.loading.progress import format_bytes, progress_on
    from jaxpaged.loading.sources import resolve

    config = load_options(args, model=args.source).config
    destination = Path(args.destination).expanduser()
    refuse_taken(destination)
    progress = progress_on()
    files = resolve(config.model, progress=progress)
    import jax

    # It computes nothing: a GPU would only be taken from others.
    jax.config.update("jax_platforms", "cpu")
    from jaxpaged.convert_model import convert

    try:
        num_bytes = convert(config.model, files, destination, progress)
    finally:
        progress.close()
    write_lines(sys.stdout, [f"{destination} holds {files.name}: {format_bytes(num_bytes)} of weights"])
    return 0
