"""`jaxpaged diagnose` as a command: sources, exit status, JSON, standard input."""

import io
import json
import sys
from pathlib import Path

import pytest

from jaxpaged.cli import main
from jaxpaged.sinks import json_line
from tests.observability.samples import step
from tests.observability.states import STATES, healthy
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Event logs: one of too few rows, one that is well."""
    folder, tokenizer = tmp_path_factory.mktemp("logs"), byte_level()
    (folder / "bad.jsonl").write_bytes(b"".join(map(json_line, STATES["row_limit"][0](tokenizer, 1))))
    (folder / "good.jsonl").write_bytes(b"".join(map(json_line, healthy(tokenizer, 1))))
    return folder / "bad.jsonl", folder / "good.jsonl"


def test_something_found_is_1_and_nothing_is_0(logs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = logs
    assert main(["diagnose", str(bad)]) == 1
    assert "scheduler.max_num_seqs" in capsys.readouterr().out
    assert main(["diagnose", str(good)]) == 0
    assert "healthy" in capsys.readouterr().out


def test_json(logs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json", str(logs[0])]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["id"] == "row_limit"
    assert main(["diagnose", "--json", str(logs[1])]) == 0
    assert json.loads(capsys.readouterr().out) == {"healthy": True, "findings": []}


def test_thresholds_are_flags(logs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(logs[0]), "--diagnose.lasting-share", "1", "--diagnose.rows-full", "1"]) in (0, 1)
    assert main(["diagnose", str(logs[0]), "--diagnose.lasting-share", "2"]) == 2
    assert "lasting" in capsys.readouterr().err


def test_standard_input(logs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(logs[0].read_bytes())))
    assert main(["diagnose", "-"]) == 1
    assert "row_limit" in capsys.readouterr().out


@pytest.mark.parametrize("text", [b"", b"hello\n", json_line(step(0.0)) + json_line(step(1.5))])
def test_what_cannot_be_read_or_says_too_little_is_2(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(text)
    assert main(["diagnose", str(path)]) == 2
    assert main(["diagnose", str(tmp_path / "missing")]) == 2
    assert main(["diagnose", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().out == ""
