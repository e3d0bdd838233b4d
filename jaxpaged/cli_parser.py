"""Command-line parsers whose option flags come from `config.py`.

Each option has its dotted flag (`--cache.page-size`) and, where vLLM has the option, a flat alias (`--block-size`); underscores
are read as dashes. Flags only note what was typed: `options.py` reads and checks the values, as for every other source.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jaxpaged.errors import ConfigError
from jaxpaged.option_aliases import ALIASES
from jaxpaged.option_values import Kind, to_yaml_value
from jaxpaged.options import Loaded, Option, load_with_origins, nearest, option_table, sections

CONFIG_VARIABLE = "JAXPAGED_CONFIG"


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing the usage, and names the nearest flag for one it does not know."""

    def __init__(self, prog: str, description: str) -> None:
        usage = f"{prog} [options]"
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False, formatter_class=_HelpFormatter)
        self.set_defaults(overrides={})

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses everything.

        Raises:
            ConfigError: an unknown flag, or a flag without what it needs.
        """
        args, unknown = self.parse_known_args(self._spelled(argv))
        if unknown:
            flag = next((word for word in unknown if word.startswith("-") and word != "--"), None)
            if flag is None:
                raise ConfigError(f"{self.prog} takes no argument {unknown[0]!r}; see {self.prog} --help")
            raise self.unknown_flag(flag)
        return args

    def unknown_flag(self, flag: str) -> ConfigError:
        """The sentence for a flag that does not exist."""
        name = flag.partition("=")[0]
        near = nearest(name, self.flags())
        return ConfigError(
            f"{self.prog}: unknown option {name[:80]}" + (f"; the nearest is {near}" if near else f"; see {self.prog} --help")
        )

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Also shows positional arguments in the usage line, which names no flags: there are too many."""
        action = super().add_argument(*names, **settings)
        if not action.option_strings and self.usage is not None:
            word = str(action.metavar or action.dest)
            repeated = {"*": f"[{word} ...]", "+": f"{word} [...]", "?": f"[{word}]"}
            self.usage += " " + repeated.get(str(action.nargs), word)
        return action

    def flags(self) -> list[str]:
        """Every flag, in the order of the help text."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with argparse's message."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")

    def _spelled(self, argv: Sequence[str]) -> list[str]:
        """`--max_model_len` -> `--max-model-len`; `--enable-prefix-caching=false` -> `--no-enable-prefix-caching`."""
        words: list[str] = []
        for i, word in enumerate(argv):
            if word == "--":
                return words + list(argv[i:])
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                name = name.replace("_", "-")
                negative = "--no-" + name[2:]
                if equals and value.lower() in ("true", "false") and negative in self._option_string_actions:
                    name, equals, value = (name if value.lower() == "true" else negative), "", ""
                word = name + equals + value
            words.append(word)
        return words


class _HelpFormatter(argparse.HelpFormatter):
    """Help in two columns, with room for dotted flags; `--x N, --y N` is shown as `--x, --y N`, and `--no-x` as `--[no-]x`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        negatives = {flag for flag in action.option_strings if flag.startswith("--no-")}
        flags = [
            f"--[no-]{flag[2:]}" if f"--no-{flag[2:]}" in negatives else flag for flag in action.option_strings if flag not in negatives
        ]
        values = "" if action.nargs == 0 else " " + self._format_args(action, self._get_default_metavar_for_optional(action))
        return ", ".join(flags) + values


class _NoteOption(argparse.Action):
    """Notes (flag as typed, value) under the option's path; the last flag for a path wins."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        value = not str(option_string).startswith("--no-") if self.nargs == 0 else values
        namespace.overrides = {**namespace.overrides, self.dest: (option_string, value)}


def add_options(parser: Parser, paths: Iterable[str] | None = None) -> None:
    """Adds `--config` and the flags of the options at `paths` (None: all), one help group per section."""
    wanted = set(option_table() if paths is None else paths)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of options (also {CONFIG_VARIABLE})")
    for section, title in sections().items():
        options = [option for option in option_table().values() if option.section == section and option.path in wanted]
        if options:
            group = parser.add_argument_group(f"{section} options", title)
            for option in options:
                _add_option(group, option)


def _add_option(group: Any, option: Option) -> None:
    flags = ["--" + alias.replace("_", "-") for alias in option.aliases] + [option.flag]
    default = to_yaml_value(option.default, option.type, redact=True)
    help_text = f"{option.doc} (default: {'none' if default == 'null' else default})".replace("%", "%%")
    if option.type.kind is Kind.BOOL:
        flags += ["--no-" + flag[2:] for flag in flags]
        group.add_argument(*flags, dest=option.path, action=_NoteOption, nargs=0, default=argparse.SUPPRESS, help=help_text)
        return
    group.add_argument(
        *flags,
        dest=option.path,
        action=_NoteOption,
        # vLLM's spelling: --api-key A B. A list of numbers is one word (2,4,8), so that a prompt may follow it.
        nargs="+" if option.type.item is not None and option.type.item.kind is Kind.TEXT else None,
        default=argparse.SUPPRESS,
        metavar=option.type.metavar,
        help=help_text,
    )


def load_options(args: argparse.Namespace, env: Mapping[str, str] | None = None, **extra: Any) -> Loaded:
    """The options of a command line, merged: defaults < `--config` < environment < flags.

    Args:
        args: from `Parser.parse` of a parser with `add_options`.
        env: None: this process's environment.
        extra: alias -> value of positional arguments, such as `model`; None is not given.

    Raises:
        ConfigError: see `options.load`.
    """
    env = os.environ if env is None else env
    typed: dict[str, tuple[str, Any]] = dict(args.overrides)
    overrides: dict[str, Any] = {}
    for flag, value in typed.values():
        overrides[flag.removeprefix("--no-" if value is False else "--")] = value
    for name, value in extra.items():
        if value is not None:
            if ALIASES[name] in typed:
                raise ConfigError(f"{name} is given twice, as {value!r} and with {typed[ALIASES[name]][0]}", param=ALIASES[name])
            overrides[name] = value
    loaded = load_with_origins(overrides, args.config or env.get(CONFIG_VARIABLE) or None, env)
    return Loaded(config=loaded.config, origins={**loaded.origins, **{path: flag for path, (flag, _) in typed.items()}})


def integer(text: str) -> int:
    """An argparse type: a whole number, with our wording."""
    if not re.fullmatch(r"[+-]?\d{1,30}", text.strip(), re.ASCII):
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:80]!r}")
    return int(text)


def integers(text: str) -> list[int]:
    """An argparse type: `1,2,3`."""
    return [integer(word) for word in text.split(",") if word.strip()]


def number(text: str) -> float:
    """An argparse type: a number (NaN included, which the sampler's own check refuses by name)."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text[:80]!r}") from None
