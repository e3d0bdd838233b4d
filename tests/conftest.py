"""Fixtures and rules of every test run: which tests run, in what order, and the seconds of each area against its budget."""

import ast
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Tests run on the CPU, on a machine with a GPU too; they must be the same tests everywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A run that a script started in its background ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent

# An example may take as long as a busy machine makes it.
hypothesis.settings.register_profile("jaxpaged", deadline=None)
hypothesis.settings.load_profile("jaxpaged")

BUDGETS_S = {
    "engine and main job": 150,
    "scheduler and pages": 90,
    "sampling and text": 60,
    "server": 150,
    "kernels": 100,
    "models and meshes": 100,
    "observability": 30,
    "speed": 40,
}
"""Area -> seconds on 2 cores, in the order in which they run; 12 minutes in all."""

AREAS = {
    "": "engine and main job",
    "cli": "engine and main job",
    "engine": "engine and main job",
    "loading": "models and meshes",
    "scheduler": "scheduler and pages",
    "text": "sampling and text",
    "server": "server",
    "kernels": "kernels",
    "models": "models and meshes",
    "parallel": "models and meshes",
    "distributed": "models and meshes",
    "observability": "observability",
    "speed": "speed",
}
"""Folder of tests/ -> its area; files of tests/ itself belong to ""."""

LONG_AREAS = ("pages", "sampling", "server", "kernels", "models", "diagnose")


def area_of(path: Path) -> str:
    """Returns the budget area of a test file. Raises KeyError for a folder that has none."""
    parts = path.relative_to(TESTS).parts
    return AREAS[parts[0] if len(parts) > 1 else ""]


def file_markers(source: str) -> set[str]:
    """Returns the marker names in a test file's module-level `pytestmark`, read without importing the file."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets):
            names |= {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jaxpaged")
    group.addoption("--fast", action="store_true", help="only tests that need neither jax nor real weights; fails if jax was imported")
    group.addoption(
        "--tier",
        choices=("kernels", "system", "long", "min-jax"),
        help="only the tests marked tier(NAME), which are left out otherwise; min-jax: those marked min_jax",
    )
    group.addoption("--area", choices=LONG_AREAS, help="with --tier long: whose tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files with no test for this run are not even imported: those marked jax or real with --fast, those without the tier with --tier.

    Nor is what a folder of such files shares.
    """
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
        return True if files and all(pytest_ignore_collect(path, config) for path in files) else None
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    source = collection_path.read_text(encoding="utf-8")
    if config.getoption("--fast") and file_markers(source) & {"jax", "real"}:
        return True
    tier = config.getoption("--tier")
    if tier and ("mark.min_jax" if tier == "min-jax" else f'tier("{tier}"') not in source:
        return True
    return None


def _is_wanted(item: pytest.Item, config: pytest.Config) -> bool:
    if config.getoption("--fast") and (item.get_closest_marker("jax") or item.get_closest_marker("real")):
        return False
    if config.getoption("--tier") == "min-jax":
        return item.get_closest_marker("min_jax") is not None
    marker = item.get_closest_marker("tier")
    if marker is None:
        return config.getoption("--tier") is None
    (tier,), area = marker.args, marker.kwargs.get("area")
    assert tier in ("kernels", "system", "long"), f"{item.nodeid}: there is no tier {tier!r}"
    assert (area in LONG_AREAS) if tier == "long" else area is None, f"{item.nodeid}: the tier long has areas, the others none"
    return tier == config.getoption("--tier") and area == config.getoption("--area")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = list(BUDGETS_S)
    items.sort(key=lambda item: order.index(area_of(item.path)))
    unwanted = [item for item in items if not _is_wanted(item, config)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if _is_wanted(item, config)]


class AreaClock:
    """Adds up the seconds of each area: importing its test files, its fixtures, its tests."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(BUDGETS_S, 0.0)
        self.num_skipped = 0
        self.worker_faults: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            if isinstance(collector, pytest.Module):
                self.seconds[area_of(collector.path)] += time.perf_counter() - started

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[area_of(item.path)] += time.perf_counter() - started

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Of tests that run in several processes at once, an area's seconds are those of the clock on the wall."""
        for area, seconds in node.workeroutput["seconds"].items():
            self.seconds[area] += seconds / int(node.workerinput["workercount"])
        self.worker_faults += node.workeroutput["faults"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_skipped += report.skipped

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        try:
            return (yield)
        finally:
            rows = [(area, self.seconds[area], budget) for area, budget in BUDGETS_S.items() if self.seconds[area] > 0]
            rows.append(("all", sum(self.seconds.values()), sum(BUDGETS_S.values())))
            terminalreporter.ensure_newline()
            terminalreporter.section("seconds per area against the budget")
            for area, seconds, budget in rows:
                over = "  OVER BUDGET" if seconds > budget else ""
                terminalreporter.write_line(f"{area:<22}{seconds:7.1f} of {budget:4d} s{over}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AreaClock(), "jaxpaged-area-clock")


def _faults(config: pytest.Config) -> Iterator[str]:
    """What a process did against the rules: no test may depend on what the machine happens to have, and --fast promises to need no jax."""
    clock = config.pluginmanager.getplugin("jaxpaged-area-clock")
    if clock.num_skipped:
        yield "tests were skipped"
    if config.getoption("--fast") and "jax" in sys.modules:
        yield "a test that is not marked jax imported jax"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that broke the rules, and hands what one of several processes measured to the one that reports."""
    config = session.config
    clock = config.pluginmanager.getplugin("jaxpaged-area-clock")
    faults = list(_faults(config))
    if hasattr(config, "workeroutput"):
        config.workeroutput.update(seconds=clock.seconds, faults=faults)
        return
    faults = sorted({*faults, *clock.worker_faults})
    if faults:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line("")
        reporter.write_line(f"FAILED: {', '.join(faults)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the default model, pulled (once per machine) by our own puller."""
    from jaxpaged.config import ModelConfig
    from jaxpaged.loading.sources import resolve

    return resolve(ModelConfig()).path
