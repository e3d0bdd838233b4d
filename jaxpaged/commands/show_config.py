"""`jaxpaged config`: the merged options, and where each value that was set came from."""

import argparse
import sys

import msgspec

from jaxpaged.cli_parser import Parser, add_options, load_options
from jaxpaged.commands.answers import write_lines
from jaxpaged.option_values import to_yaml_value
from jaxpaged.options import option_table, sections, to_yaml, value_at


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("--list", action="store_true", help="explain every option: meaning, default, flags, environment variable")
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """See `commands`. Secrets are never printed."""
    loaded = load_options(args)
    if args.list:
        write_lines(sys.stdout, _explained())
    elif args.json:
        tree: dict[str, dict[str, object]] = {section: {} for section in sections()}
        for path, option in option_table().items():
            text = to_yaml_value(value_at(loaded.config, path), option.type, redact=True)
            value = value_at(loaded.config, path)
            tree[option.section][option.name] = msgspec.json.decode(text) if option.type.is_secret else value
        write_lines(sys.stdout, [msgspec.json.format(msgspec.json.encode(tree)).decode()])
    else:
        write_lines(sys.stdout, [to_yaml(loaded.config, origins=loaded.origins).rstrip("\n")])
    return 0


def _explained() -> list[str]:
    lines: list[str] = []
    for section, title in sections().items():
        lines += [f"# {section}: {title}", ""]
        for option in option_table().values():
            if option.section == section:
                flags = ", ".join([option.flag, *("--" + alias.replace("_", "-") for alias in option.aliases)])
                lines += [
                    f"{option.path}  (default: {to_yaml_value(option.default, option.type, redact=True)})",
                    f"    {option.doc}",
                    f"    takes {option.type.expected}",
                    f"    {flags}; {option.env}",
                    "",
                ]
    return lines
