"""Figures of a server as text: a dump of one or more scrapes, or asked for again and again."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from jaxpaged.diagnose.scrapes import Key, Scrape, observe
from jaxpaged.diagnose.windows import Observation
from jaxpaged.errors import ConfigError
from jaxpaged.histograms import Spread

TIMEOUT_S = 10.0
TIME = "jaxpaged_scrape_time_seconds"


def parse(text: str, at_s: float) -> Scrape:
    """One scrape. Its own time, if it tells one, goes before `at_s`."""
    values: dict[Key, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for name, labels, value in _samples(text):
        if "le" in labels and name.endswith("_bucket"):
            classes = buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = float(labels["le"])
            classes[bound] = classes.get(bound, 0.0) + value
        elif value == value:
            values[name, tuple(sorted(labels.items()))] = value
    at_s = next((value for (name, _), value in values.items() if name == TIME), at_s)
    spreads = {
        name: _spread(classes, sum(v for (key, _), v in values.items() if key == f"{name}_sum")) for name, classes in buckets.items()
    }
    return Scrape(at_s, values, spreads)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, float(sample.value)
    except ValueError as error:
        raise ConfigError(f"this is no text of Prometheus: {error}") from error


def _spread(classes: dict[float, float], total: float) -> Spread:
    bounds = sorted(bound for bound in classes if bound != float("inf"))
    so_far, counts = 0.0, []
    for bound in (*bounds, float("inf")):
        upto = classes.get(bound, so_far)
        counts.append(max(0.0, upto - so_far))
        so_far = max(so_far, upto)
    return Spread(tuple(bounds) or (0.0,), tuple(counts) if bounds else (0.0, *counts), total)


def split_dump(text: str) -> list[str]:
    """The scrapes of a dump that has several, one after another: a new one begins where the time or the first figure comes again."""
    first = next((line for line in text.splitlines() if line and not line.startswith("#")), "")
    name = TIME if f"\n{TIME} " in f"\n{text}" else first.rpartition(" ")[0]
    # Comments before a figure belong to it.
    parts: list[list[str]] = []
    pending: list[str] = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            pending.append(line)
            continue
        if line.rpartition(" ")[0] == name or not parts:
            parts.append([])
        parts[-1] += [*pending, line]
        pending = []
    return ["\n".join(part) + "\n" for part in parts]


def observe_dump(text: str, interval_s: float) -> Observation:
    """Scrapes that were written one after another, `interval_s` apart where they tell no time of their own."""
    scrapes = [parse(part, number * interval_s) for number, part in enumerate(split_dump(text))]
    return observe(
        scrapes, f"a dump of {len(scrapes)} scrapes", is_dated=any(key == TIME for scrape in scrapes for key, _ in scrape.values)
    )


def observe_url(
    url: str,
    *,
    seconds: float,
    interval_s: float,
    api_key: str | None = None,
    load: Callable[[str, str | None], str] | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Observation:
    """Asks a server for its figures, for some seconds.

    Raises:
        ConfigError: it cannot be reached, or does not tell.
    """
    load = load or fetch
    scrapes: list[Scrape] = []
    end_s = clock() + seconds
    while True:
        scrapes.append(parse(load(url, api_key), clock()))
        rest_s = end_s - clock()
        if rest_s <= 0:
            return observe(scrapes, url)
        sleep(min(interval_s, rest_s))


def fetch(url: str, api_key: str | None) -> str:
    """The text at an address. Raises ConfigError when it cannot be had."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        hint = "; give a key with --api-key" if error.code == 401 else ""
        raise ConfigError(f"{url} answered {error.code}{hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error


def is_url(source: str) -> bool:
    """Whether a source is a server's address."""
    return source.startswith(("http://", "https://"))


def metrics_url(source: str) -> str:
    """The address of the figures of a server whose address is given, with or without a path."""
    _, _, rest = source.partition("://")
    return source if "/" in rest.rstrip("/") else f"{source.rstrip('/')}/metrics"
