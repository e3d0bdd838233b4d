"""What is simulated must not look at a clock, draw lots or start threads of its own: a seed replays exactly only then."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxpaged"

SIMULATED = (
    "admission",
    "admission_limits",
    "detokenizer",
    "counts",
    "kv_groups",
    "output_lengths",
    "page_forecast",
    "page_manager",
    "prefix_index",
    "running_rows",
    "running_set",
    "sample_groups",
    "scheduled_step",
    "scheduler",
    "sequence",
    "step_budget",
    "step_cost",
    "step_draft",
    "stop_strings",
    "waiting_queue",
)

FORBIDDEN = {"time", "datetime", "random", "secrets", "uuid", "asyncio", "threading", "concurrent", "os"}


@pytest.mark.parametrize("module", SIMULATED)
def test_it_imports_neither_clocks_nor_chance_nor_threads(module: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & FORBIDDEN


def test_the_list_is_all_that_the_scheduler_is_made_of() -> None:
    found, waiting = set(), {"scheduler"}
    while waiting:
        module = waiting.pop()
        found.add(module)
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpaged."):
                waiting |= {node.module.split(".")[1]} - found
    assert found - {"config", "errors", "param_limits", "request"} <= set(SIMULATED)


FRONT = ("engine", "engine_control", "engine_driver", "engine_turns", "mailbox", "open_requests", "output", "request_streams")
"""Simulated by `tests/engine/front_worlds.py` and `turn_worlds.py`: they may name loops and locks, whose turns are taken there."""


@pytest.mark.parametrize("module", FRONT)
def test_the_front_starts_no_thread_and_looks_at_no_clock_of_its_own(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"time", "datetime", "random", "secrets", "uuid"}
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not named & {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor"}
