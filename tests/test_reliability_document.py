"""docs/reliability.md names tests; each of them is there."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests of a file."""
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


def missing(text: str) -> list[str]:
    """What a document names and is not there; `::name` goes on with the file named before."""
    found, file = [], ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", text):
        file = path or file
        if path and not (ROOT / path).exists():
            found.append(path)
        elif name and name not in names_in(file):
            found.append(f"{file}::{name}")
    return found


def test_every_test_that_is_named_is_there() -> None:
    assert missing(TEXT) == []
    assert TEXT.count("`tests/") > 50


@pytest.mark.parametrize(
    "text", ["`tests/none.py`", "`tests/test_reliability_document.py::test_none`", "`tests/test_reliability_document.py`, `::test_none`"]
)
def test_a_wrong_name_is_found(text: str) -> None:
    assert len(missing(text)) == 1
