"""`jaxpaged ls`: the models that have short names and those that are pulled."""

import argparse
import sys
from datetime import UTC, datetime

import msgspec

from jaxpaged.cli_parser import Parser
from jaxpaged.commands.answers import plain, write_lines


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. `num_bytes` and `pulled_at_s` (wall clock) are None for a model that is not pulled."""

    name: str
    num_bytes: int | None
    pulled_at_s: float | None
    path: str | None
    description: str


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    models = listed_models()
    if args.json:
        write_lines(sys.stdout, (msgspec.json.encode(model).decode() for model in models))
        return 0
    from jaxpaged.loading.progress import format_bytes

    rows = [("NAME", "SIZE", "PULLED", "DESCRIPTION")]
    for model in models:
        size = "-" if model.num_bytes is None else format_bytes(model.num_bytes)
        day = "-" if model.pulled_at_s is None else f"{datetime.fromtimestamp(model.pulled_at_s, UTC):%Y-%m-%d}"
        rows.append((model.name, size, day, model.description))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    write_lines(
        sys.stdout,
        (plain("  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]])).rstrip() for row in rows),
    )
    return 0


def listed_models() -> list[ListedModel]:
    """Registry and cache folder together, by name."""
    from jaxpaged.loading.registry import read_registry
    from jaxpaged.loading.sources import list_models

    registry = read_registry()
    listed = {
        name: ListedModel(name=name, num_bytes=None, pulled_at_s=None, path=None, description=entry.description)
        for name, entry in registry.items()
    }
    for model in list_models():
        listed[model.name] = ListedModel(
            name=model.name,
            num_bytes=model.num_bytes,
            pulled_at_s=model.pulled_at_s,
            path=str(model.path),
            description=registry[model.name].description if model.name in registry else model.source,
        )
    return [listed[name] for name in sorted(listed)]
