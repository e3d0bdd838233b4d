"""`jaxpaged serve`, and `python -m server`: checks all that can be checked without a model, listens, and only then loads it."""

import argparse
import contextlib
import faulthandler
import functools
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jaxpaged.cli_parser import load_options
from jaxpaged.config import Config, ServerConfig
from jaxpaged.distributed.following import follow
from jaxpaged.distributed.leader import Leader
from jaxpaged.distributed.settings import read_processes
from jaxpaged.distributed.terms import terms_of
from jaxpaged.engine_client import EngineClient
from jaxpaged.events import Sink
from jaxpaged.sinks import open_log
from jaxpaged.startup_progress import open_startup_progress
from jaxpaged.tracing import open_traces
from server.auth import read_keys
from server.listeners import ADMIN_HOST, bind_port, bind_unix, close_all, tls_context

if TYPE_CHECKING:
    from server.asgi_types import App
    from server.service import Service

OTHER_FILES = 256
"""Descriptors beside those of connections: files, logs, libraries."""


def make_async_llm(config: Config, sinks: Sequence[Sink]) -> EngineClient:
    """The real engine."""
    return make_leading_llm(None, config, sinks)


def make_leading_llm(leader: Leader | None, config: Config, sinks: Sequence[Sink]) -> EngineClient:
    """The real engine, with the other processes that share its model."""
    from jaxpaged.async_llm import AsyncLLM

    return AsyncLLM(config=config, sinks=sinks, leader=leader)


def make_app(service: "Service") -> "App":
    """The public app."""
    app: App = import_module("server.app").create_app(service)
    return app


def run(
    args: argparse.Namespace,
    make_engine: Callable[[Config, Sequence[Sink]], EngineClient] = make_async_llm,
    create_app: Callable[["Service"], "App"] = make_app,
) -> int:
    """See `jaxpaged.commands`.

    Raises:
        JaxpagedError: the options, a file or a port are at fault, or the model cannot be loaded.
    """
    config = load_options(args, model=args.model_name).config
    processes = read_processes(config.distributed, os.environ)
    if processes is not None and processes.index:
        return follow(config, processes)
    options = config.server
    keys = read_keys(config)
    tls = tls_context(options)
    public = bind_port(options.host, options.port)
    with contextlib.ExitStack() as stack:
        stack.callback(close_all, public)
        if processes is not None:
            leader = Leader(processes, terms_of(config))
            leader.listen()
            stack.callback(leader.fail, "process 0 could not start")
            make_engine = functools.partial(make_leading_llm, leader)
        admin = bind_port(ADMIN_HOST, options.admin_port, param="server.admin_port") if options.admin_port is not None else []
        stack.callback(close_all, admin)
        if options.admin_socket is not None:
            path = Path(options.admin_socket).expanduser()
            admin.append(bind_unix(path))
            stack.callback(path.unlink, missing_ok=True)
        log = open_log(config.log)
        stack.callback(log.close)
        sinks: list[Sink] = [log]
        if config.tracing.otlp_endpoint is not None:
            traces = open_traces(config.tracing, (config.server.served_model_name or (config.model.model,))[0])
            stack.callback(traces.close)
            sinks.append(traces)
        progress = open_startup_progress() if config.log.file is not None else None
        if progress is not None:
            stack.callback(progress.close)
            sinks.append(progress)
        stacks = stack.enter_context(_open_stacks(config))
        _allow_connections(options)
        # From here on what is imported takes a second, and what is done takes many; the port is ours already.
        from server.service import Service
        from server.serving import Doors, Serving

        _quiet_libraries()
        service = Service(config, sinks=sinks)
        doors = Doors(public, admin, tls, keys)
        return Serving(service, doors, make_engine, create_app, say=_say, stacks=stacks).run()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _open_stacks(config: Config) -> Iterator[IO[str]]:
    """Where stacks of threads go: the log's file, or standard error. Faults of the process itself are written there, too."""
    descriptor = os.open(config.log.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if config.log.file else os.dup(2)
    with os.fdopen(descriptor, "w") as file:
        faulthandler.enable(file)
        try:
            yield file
        finally:
            faulthandler.disable()


def _allow_connections(options: ServerConfig) -> None:
    """Raises the limit of open files as far as the system lets us, so that `max_connections` can be meant."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = options.max_connections * 2 + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _quiet_libraries() -> None:
    """uvicorn says little that our own log does not; what is wrong inside an app still goes to standard error."""
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
