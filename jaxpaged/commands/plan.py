"""`jaxpaged plan`: how a model would fit in memory, from its config alone; no weight is fetched or read.

Exit status: 0 it fits; 2 it does not, or the input is at fault.
"""

import argparse
import sys

import msgspec

from jaxpaged.cli_parser import Parser, integer
from jaxpaged.commands.answers import plain, write_lines
from jaxpaged.commands.engine_start import add_engine_arguments, terminal_config
from jaxpaged.config import Config
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.loading.sources import ModelFiles, resolve
from jaxpaged.option_values import parse_size


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the model (the same as --model)")
    parser.add_argument(
        "--devices", type=integer, metavar="N", help="devices that share the model, in tensor parallel (default: as the options say)"
    )
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="plan for GPUs with so much memory each, such as 24GiB (default: this machine)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, bytes as numbers")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    config = terminal_config(args, model=args.name)
    files, load_format = _config_files(config)
    from jaxpaged.host_limits import prepare_process

    prepare_process(config)
    from jaxpaged.fit_check import FitCheck, room_here, table
    from jaxpaged.loading.checkpoint import open_checkpoint
    from jaxpaged.memory_plan import Room
    from jaxpaged.model_loader import describe_model
    from jaxpaged.parallel.mesh_config import MeshShape

    if args.device_memory is None:
        room = room_here()
        if room is None:
            raise ConfigError("this system does not tell how much memory it has: give --device-memory")
    else:
        given = _size(args.device_memory)
        room = Room(int(given * config.cache.gpu_memory_utilization))
    with open_checkpoint(files, load_format=load_format) as checkpoint:
        described = describe_model(config.model, checkpoint, is_gpu=room.takes_all)
    mesh = None if args.devices is None else MeshShape(tensor=args.devices)
    plan = FitCheck(config, described.description, room).require(mesh)
    if args.json:
        write_lines(sys.stdout, [msgspec.json.encode(plan).decode()])
        return 0
    rows = list(table(plan))
    width = max(len(name) for name, _ in rows) + 2
    write_lines(sys.stdout, [plain(f"{files.name} fits:"), *(plain(f"  {name:<{width}}{value}") for name, value in rows)])
    return 0


def _config_files(config: Config) -> tuple[ModelFiles, str]:
    """The files to read and the load format to open them with: a config alone where the model has one, else its GGUF file."""
    model = config.model
    if model.load_format in ("auto", "safetensors", "dummy"):
        try:
            return resolve(msgspec.structs.replace(model, load_format="dummy")), "dummy"
        except CheckpointError:
            if model.load_format == "dummy":
                raise
    return resolve(model), model.load_format


def _size(text: str) -> int:
    try:
        return parse_size(text, is_bytes=True)
    except ValueError as error:
        raise ConfigError(f"--device-memory {text[:40]!r}: {error}") from None
