"""docs/reliability.md names tests that exist, for each field case of text and sampling."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = [f"O-{number:02}" for number in (*range(1, 24), 38, 55, 56, 57)]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Files and functions in a cell; `::name` belongs to the file before it."""
    found, path = [], ""
    for file, name in re.findall(r"`([\w/.]*)::(\w+)`", cell):
        path = file or path
        found.append((path, name))
    return found


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_named_tests_exist() -> None:
    """In this table and in the others of the document."""
    lines = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    missing = [f"{path}::{name}" for line in lines for path, name in named_tests(line) if name not in functions_of(path)]
    assert missing == []


def test_each_case_has_a_test_or_says_what_it_waits_for() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| O-\d\d \|", line)]
    assert {row[0] for row in rows} >= set(CASES)
    for row in rows:
        assert bool(named_tests(" | ".join(row))) != row[-1].startswith("waits for"), row
