"""Which reader a source needs: the first lines tell."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.read_events import MARK, read_events
from jaxpaged.diagnose.read_logs import OUR_START, OURS, VLLM_WORDS, read_our_log, read_vllm_log
from jaxpaged.diagnose.read_prometheus import observe_dump
from jaxpaged.diagnose.windows import Observation
from jaxpaged.errors import ConfigError

NUM_LOOKED_AT = 20_000
"""Lines that may come before the first that says what a log is."""
MAX_DUMP_LINES = 5_000_000


def observe_file(path: Path, limits: DiagnoseConfig) -> Observation:
    """See `observe_lines`. Raises ConfigError when the file cannot be read, or is nothing that we know."""
    try:
        with path.open("rb") as file:
            return observe_lines(file, str(path), limits)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def observe_lines(stream: Iterable[bytes] | IO[bytes], name: str, limits: DiagnoseConfig) -> Observation:
    """Reads our event log, our log for people, vLLM's log or a dump of figures.

    Raises:
        ConfigError: it is none of them.
    """
    lines = iter(stream)
    head = list(itertools.islice(lines, NUM_LOOKED_AT))
    whole = itertools.chain(head, lines)
    kind = _kind(head)
    if kind == "events":
        return read_events(whole, limits.window_s)
    if kind == "ours":
        return read_our_log(_texts(whole))
    if kind == "vllm":
        return read_vllm_log(_texts(whole))
    if kind == "prometheus":
        return observe_dump("".join(itertools.islice(_texts(whole), MAX_DUMP_LINES)), limits.window_s)
    raise ConfigError(
        f"{name} is no source that can be read: an event log (log.format json), a log of jaxpaged or vLLM with its lines about the engine, "
        "a dump of /metrics, or the URL of a server"
    )


def _kind(head: Iterable[bytes]) -> str:
    for raw in head:
        if raw.startswith(MARK):
            return "events"
        line = raw.decode("utf-8", "replace")
        if line.startswith("# HELP ") or line.startswith("# TYPE ") or line.startswith(("jaxpaged_", "vllm:")):
            return "prometheus"
        if VLLM_WORDS in line:
            return "vllm"
        if OURS.match(line) or OUR_START.search(line):
            return "ours"
    return ""


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    return (line.decode("utf-8", "replace") for line in lines)
