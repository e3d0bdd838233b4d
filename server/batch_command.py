"""`jaxpaged run-batch IN.jsonl OUT.jsonl`: OpenAI's batch files, answered by an engine in this process."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpaged.cli_parser import load_options
from jaxpaged.config import Config
from jaxpaged.errors import ConfigError
from jaxpaged.events import Sink
from jaxpaged.sinks import open_log
from server.command import make_async_llm

if TYPE_CHECKING:
    from jaxpaged.engine_client import EngineClient
    from server.batch import BatchCounts


def run(args: argparse.Namespace, make_engine: Callable[[Config, Sequence[Sink]], "EngineClient"] = make_async_llm) -> int:
    """See `jaxpaged.commands`. The status is 0 if every line was answered with 200, else 1.

    Raises:
        JaxpagedError: the options or a file are at fault, or the model cannot be loaded.
    """
    config = load_options(args).config
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}")
    source, target = Path(args.input).expanduser(), Path(args.output).expanduser()
    try:
        if source.exists() and target.exists() and source.samefile(target):
            raise ConfigError(f"{args.output!r} is the file that is read: name another one for the answers")
        with source.open("rb") as file:
            _check_writable(target)
            # All of it, so that a file that cannot be read to its end costs neither the model's loading nor earlier answers.
            lines = file.readlines()
        counts = _answer(config, lines, target, args.concurrency, make_engine)
    except OSError as error:
        raise ConfigError(f"{error.filename or args.output!r}: {error.strerror}") from error
    sys.stderr.write(f"{counts.completed} answered, {counts.failed} failed or refused\n")
    return 0 if counts.failed == 0 else 1


def _check_writable(target: Path) -> None:
    """Raises OSError if answers cannot be written there; what is there stays as it is."""
    if target.exists():
        target.open("ab").close()
    elif not os.access(target.parent, os.W_OK):
        code = errno.EACCES if target.parent.is_dir() else errno.ENOENT
        raise OSError(code, os.strerror(code), str(target))


def _answer(
    config: Config, lines: list[bytes], target: Path, concurrency: int, make_engine: Callable[[Config, Sequence[Sink]], "EngineClient"]
) -> "BatchCounts":
    import asyncio

    from server.app import create_app
    from server.auth import ApiKeys
    from server.batch import run_batch
    from server.front import behind_front
    from server.service import Service

    log = open_log(config.log)
    try:
        service = Service(config, sinks=[log])
        engine = make_engine(config, [service.emit])
        try:
            service.attach(engine)
            app = behind_front(create_app(service), service, ApiKeys(()))
            with target.open("wb") as out:
                return asyncio.run(run_batch(app, lines, out.write, concurrency=concurrency))
        finally:
            engine.close()
    finally:
        log.close()
