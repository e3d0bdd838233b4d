"""Commands under test see a cache folder and an environment of their own."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the user's options and cache folder out of the tests."""
    for name in os.environ:
        if name.startswith("JAXPAGED_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
