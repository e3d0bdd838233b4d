"""What `generate` and `chat` share: options, log and engine of a program that runs in a terminal."""

import argparse
import atexit
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from jaxpaged.cli_parser import Parser, add_options, integer, integers, load_options, number
from jaxpaged.commands.engine_api import MakeEngine, TextEngine
from jaxpaged.config import Config
from jaxpaged.events import Sink
from jaxpaged.options import option_table
from jaxpaged.request import SamplingParams
from jaxpaged.sinks import QueueSink, open_log
from jaxpaged.startup_progress import open_startup_progress

SERVER_SECTIONS = frozenset({"server", "limits", "metrics", "tracing", "diagnose", "distributed"})
"""Options that mean nothing without a server."""


def make_llm(config: Config, sinks: Sequence[Sink], /) -> TextEngine:
    """The real engine."""
    from jaxpaged.llm import LLM

    return LLM(config=config, sinks=sinks)


def add_engine_arguments(parser: Parser) -> None:
    """`--verbose` and every option but the server's."""
    parser.add_argument("--verbose", action="store_true", help="show the log on the terminal (the same as --log.level info)")
    add_options(parser, [path for path, option in option_table().items() if option.section not in SERVER_SECTIONS])


def add_sampling_arguments(parser: Parser, *, max_tokens: int | None) -> None:
    """The sampling flags; what is not given is the model's default."""
    group = parser.add_argument_group("sampling", "What is not given comes from the model's own generation settings.")
    group.add_argument("--temperature", type=number, metavar="X", help="0: always the likeliest token")
    group.add_argument("--top-p", type=number, metavar="X", help="keep the likeliest tokens that hold this share, in (0, 1]")
    group.add_argument("--top-k", type=integer, metavar="N", help="keep this many tokens; 0 or -1: all")
    group.add_argument("--min-p", type=number, metavar="X", help="drop tokens under this share of the likeliest one's probability")
    group.add_argument("--presence-penalty", type=number, metavar="X", help="taken off tokens that the answer holds, -2 to 2")
    group.add_argument("--frequency-penalty", type=number, metavar="X", help="taken off as often as the answer holds the token, -2 to 2")
    group.add_argument("--repetition-penalty", type=number, metavar="X", help="over 1: weakens tokens of prompt and answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text (repeatable)")
    group.add_argument("--stop-token-ids", type=integers, metavar="ID,ID", help="end the answer after one of these token ids")
    default = "up to the end of the context" if max_tokens is None else str(max_tokens)
    group.add_argument("--max-tokens", type=integer, metavar="N", default=max_tokens, help=f"tokens at most (default: {default})")
    group.add_argument("--min-tokens", type=integer, metavar="N", help="tokens at least, before the model may end")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)


def sampling_params(
    args: argparse.Namespace, config: Config, *, logprobs: int | None = None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The sampling parameters of a command line; `--seed` seeds each request too, so that a run can be repeated.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    given = {name: vars(args)[name] for name in SAMPLING_FIELDS if vars(args)[name] is not None or name == "max_tokens"}
    seed = config.model.seed if "model.seed" in args.overrides else None
    return SamplingParams(**given, logprobs=logprobs, prompt_logprobs=prompt_logprobs, seed=seed)


def terminal_config(args: argparse.Namespace, model: str | None = None) -> Config:
    """The merged options of a program whose terminal is for its answers: on it the log shows warnings only, unless asked for more.

    Raises:
        ConfigError: see `options.load`.
    """
    loaded = load_options(args, model=model)
    config = loaded.config
    if "log.level" not in loaded.origins and config.log.file is None:
        level = "info" if args.verbose else "warning"
        config = msgspec.structs.replace(config, log=msgspec.structs.replace(config.log, level=level))
    return config


class RunningEngine(msgspec.Struct, frozen=True):
    """An engine and its log."""

    llm: TextEngine
    sinks: tuple[QueueSink, ...]

    def settle(self) -> None:
        """Waits until the terminal shows all that the engine has said so far; call before writing an answer."""
        for sink in self.sinks:
            sink.flush()


@contextmanager
def running_engine(config: Config, make: MakeEngine = make_llm) -> Iterator[RunningEngine]:
    """Starts the engine with its log and closes both.

    Raises:
        JaxpagedError: as `LLM` does.
    """
    log = open_log(config.log)
    shows_log = config.log.file is None and (config.log.level in ("debug", "info") or config.log.format == "json")
    progress = None if shows_log else open_startup_progress()
    sinks = (log,) if progress is None else (log, progress)
    try:
        llm = make(config, sinks)
        # The interpreter's last collections would look through a million objects that go with the process anyway: half a second.
        atexit.register(gc.freeze)
        try:
            engine = RunningEngine(llm, sinks)
            engine.settle()
            yield engine
        finally:
            llm.close()
    finally:
        for sink in reversed(sinks):
            sink.close()
