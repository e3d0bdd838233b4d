"""`jaxpaged completion`: scripts that complete commands, flags and choices. They are static: completing starts no Python."""

import argparse
import shlex
import sys
from collections.abc import Callable

import msgspec

from jaxpaged.cli_parser import Parser
from jaxpaged.commands import by_name
from jaxpaged.commands.answers import write_lines
from jaxpaged.option_values import Kind
from jaxpaged.options import option_table


class Flag(msgspec.Struct, frozen=True):
    """A flag, the words that may follow it, and its help."""

    name: str
    choices: tuple[str, ...]
    summary: str


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument(
        "shell", metavar="SHELL", choices=sorted(SCRIPTS), help="for which shell; source the output, or save it where the shell looks"
    )


def run(args: argparse.Namespace) -> int:
    """See `commands`."""
    write_lines(sys.stdout, [SCRIPTS[args.shell]()])
    return 0


def command_flags() -> dict[str, list[Flag]]:
    """Every command (and alias) with its flags."""
    from jaxpaged.cli import build_parser

    flags: dict[str, list[Flag]] = {}
    for name, command in by_name().items():
        found: list[Flag] = []
        for action in build_parser(command)._actions:
            option = option_table().get(action.dest)
            choices = option.type.choices if option is not None and option.type.kind is Kind.CHOICE else tuple(action.choices or ())
            summary = (action.help or "").replace("%%", "%").partition(" (default")[0]
            found += [Flag(flag, choices, summary) for flag in action.option_strings if flag.startswith("--")]
        flags[name] = found
    return flags


def _words(command: str) -> tuple[str, ...]:
    """Positional words of a command."""
    return tuple(sorted(SCRIPTS)) if command == "completion" else ()


def bash_script() -> str:
    """For bash 3.2 and later."""
    cases: list[str] = []
    choices: dict[str, str] = {}
    for name, flags in command_flags().items():
        cases.append(f'    {name}) words="{" ".join([*(flag.name for flag in flags), *_words(name)])}" ;;')
        choices |= {flag.name: " ".join(flag.choices) for flag in flags if flag.choices}
    by_flag = [f'    {flag}) COMPREPLY=($(compgen -W "{words}" -- "$current")); return ;;' for flag, words in choices.items()]
    return "\n".join(
        [
            "_jaxpaged() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""',
            "  COMPREPLY=()",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join(by_name())} --help --version" -- "$current")); return',
            "  fi",
            '  case "$previous" in',
            *by_flag,
            "  esac",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _jaxpaged jaxpaged",
        ]
    )


def zsh_script() -> str:
    """For zsh with compinit."""
    lines = ["#compdef jaxpaged", "_jaxpaged() {", "  local -a commands", "  commands=("]
    lines += [f"    {shlex.quote(name + ':' + _zsh_text(command.summary))}" for name, command in by_name().items()]
    lines += ["  )", "  if (( CURRENT == 2 )); then", "    _describe command commands", "    return", "  fi", '  case "$words[2]" in']
    for name, flags in command_flags().items():
        lines.append(f"    {name})")
        lines.append("      _arguments '1: :' \\")
        for flag in flags:
            values = f":value:({' '.join(flag.choices)})" if flag.choices else ""
            lines.append(f"        {shlex.quote(f'{flag.name}[{_zsh_text(flag.summary)}]{values}')} \\")
        words = _words(name)
        lines.append(f"        {shlex.quote(f'*: :({" ".join(words)})' if words else '*:file:_files')}")
        lines.append("      ;;")
    lines += ["  esac", "}", 'if [ "$funcstack[1]" = "_jaxpaged" ]; then _jaxpaged "$@"; else compdef _jaxpaged jaxpaged; fi']
    return "\n".join(lines)


def _zsh_text(text: str) -> str:
    return "".join(c for c in text if c not in "[]:\\'`$")


def fish_script() -> str:
    """For fish 3 and later."""
    names = " ".join(by_name())
    lines = [
        f"complete -c jaxpaged -n 'not __fish_seen_subcommand_from {names}' -f -a {name} -d {shlex.quote(command.summary)}"
        for name, command in by_name().items()
    ]
    for name, flags in command_flags().items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for flag in flags:
            values = f" -x -a {shlex.quote(' '.join(flag.choices))}" if flag.choices else ""
            summary = flag.summary.replace("\\", "").replace("'", "")
            lines.append(f"complete -c jaxpaged {seen} -l {flag.name[2:]} -d '{summary}'{values}")
        if words := _words(name):
            lines.append(f"complete -c jaxpaged {seen} -f -a {shlex.quote(' '.join(words))}")
    return "\n".join(lines)


SCRIPTS: dict[str, Callable[[], str]] = {"bash": bash_script, "fish": fish_script, "zsh": zsh_script}
