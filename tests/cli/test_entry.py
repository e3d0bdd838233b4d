"""The command's way in: quiet whenever Ctrl-C comes, and honest about outputs that cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged import __main__, cli

ROOT = Path(__file__).parents[2]


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "jaxpaged.cli", Interrupted())
    assert __main__.main() == cli.EXIT_INTERRUPTED


def test_the_command_is_that_entry() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'jaxpaged = "jaxpaged.__main__:main"' in text
    code = "import sys, jaxpaged.__main__; print(sorted(name for name in sys.modules if name.startswith('jaxpaged')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert loaded.strip() == "['jaxpaged', 'jaxpaged.__main__']"


def test_a_full_standard_output_is_not_the_inputs_fault() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "jaxpaged", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == cli.EXIT_FAILED
    assert done.stderr.count("\n") == 1
    assert "space" in done.stderr
