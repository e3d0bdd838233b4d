"""`jaxpaged pull`, `ls` and `rm`, over a cache folder of the test's own; fetching itself is tested with the sources."""

import json
import re
import time
from pathlib import Path

import pytest

from jaxpaged.loading.cache_folder import CacheFolder, Staged, StoredFile
from jaxpaged.loading.registry import read_registry
from tests.cli.scripted_engine import run_cli


@pytest.fixture
def pulled() -> Path:
    """A model `org/small` of 1500 bytes, as a pull leaves it."""
    cache = CacheFolder()
    with cache.lock("org/small"):
        staging = cache.stage("org/small")
        (staging.files / "small.gguf").write_bytes(b"GGUF" + b"\0" * 1496)
        stored = StoredFile(path="small.gguf", num_bytes=1500, sha256="0" * 64)
        staged = Staged(kind="gguf", files=(stored,), source="hub org/small")
        return cache.install("org/small", staging, staged, fingerprint="f").path


def test_ls_shows_what_is_known_and_what_is_pulled(pulled: Path) -> None:
    result = run_cli("ls")
    assert (result.status, result.err) == (0, "")
    rows = [line.split(maxsplit=3) for line in result.out.splitlines()]
    assert rows[0] == ["NAME", "SIZE", "PULLED", "DESCRIPTION"]
    # A size takes two words.
    (small,) = [row for row in rows if row[0] == "org/small"]
    assert small[1:3] == ["1.5", "kB"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d  hub org/small", small[3])
    assert {row[0] for row in rows[1:]} == {"org/small", *read_registry()}
    assert all(row[1] == "-" for row in rows[1:] if row[0] != "org/small")


def test_ls_as_json(pulled: Path) -> None:
    records = {record["name"]: record for record in map(json.loads, run_cli("ls", "--json").out.splitlines())}
    small = records["org/small"]
    assert abs(small.pop("pulled_at_s") - time.time()) < 300
    assert small == {"name": "org/small", "num_bytes": 1500, "path": str(pulled), "description": "hub org/small"}
    assert records["smollm2-135m"]["path"] is None


def test_ls_makes_no_folder(tmp_path: Path) -> None:
    assert run_cli("ls").status == 0
    assert not (tmp_path / "home").exists()


def test_rm_removes(pulled: Path) -> None:
    result = run_cli("rm", "org/small")
    assert (result.status, result.out, result.err) == (0, "removed org/small (1.5 kB)\n", "")
    assert not pulled.exists()
    again = run_cli("rm", "org/small")
    assert (again.status, again.out) == (2, "")
    assert "org/small" in again.sentence


def test_rm_offers_the_nearest(pulled: Path) -> None:
    sentence = run_cli("rm", "org/smal").sentence
    assert "org/small" in sentence
    assert pulled.exists()


def test_pull_of_an_unknown_name_offers_the_nearest_and_leaves_nothing(tmp_path: Path) -> None:
    result = run_cli("pull", "smollm2-135")
    assert (result.status, result.out) == (2, "")
    assert "smollm2-135m" in result.sentence
    assert not list((tmp_path / "home").rglob("*.gguf"))


def test_pull_offline_is_a_contradiction() -> None:
    result = run_cli("pull", "--offline")
    assert (result.status, result.sentence) == (2, "pull needs the network; leave out --offline")
