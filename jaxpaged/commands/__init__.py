"""The commands of the command line: this table names them, one module each runs them.

A module has `add_arguments(parser)` and `run(args) -> exit status`, and imports nothing heavy before `run`.
"""

import msgspec


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command: its module below `jaxpaged.commands`, and one line of help."""

    name: str
    module: str
    summary: str
    aliases: tuple[str, ...] = ()


COMMANDS = (
    Command(name="serve", module="serve", summary="serve OpenAI's endpoints over HTTP"),
    Command(name="run-batch", module="run_batch", summary="answer a file of requests in OpenAI's batch format"),
    Command(name="generate", module="generate", summary="complete one or many prompts"),
    Command(name="chat", module="chat", summary="talk with a model in the terminal", aliases=("run",)),
    Command(name="plan", module="plan", summary="say how a model fits in memory, from its config alone"),
    Command(name="pull", module="pull", summary="fetch a model into the cache folder"),
    Command(name="convert", module="convert", summary="write a model as an Orbax checkpoint"),
    Command(name="ls", module="list_models", summary="list the models that are known and pulled"),
    Command(name="rm", module="remove", summary="remove pulled models"),
    Command(name="bench", module="bench", summary="measure throughput, latency, start-up, or any OpenAI server"),
    Command(name="diagnose", module="diagnose", summary="say what is wrong with a server, why, and what to change"),
    Command(name="top", module="top", summary="watch a server in the terminal"),
    Command(name="doctor", module="doctor", summary="look at the machine, the installation and the model, and try the engine"),
    Command(name="config", module="show_config", summary="print the merged options, or list all that there are"),
    Command(name="completion", module="completion", summary="print a completion script for bash, zsh or fish"),
    Command(name="version", module="version", summary="print the versions of jaxpaged, Python and JAX"),
)


def by_name() -> dict[str, Command]:
    """Every command by name and alias."""
    return {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
