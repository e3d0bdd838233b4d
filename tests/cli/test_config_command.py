"""`jaxpaged config`: the merged options with their origins, without secrets; every option explained."""

import json
from pathlib import Path

import msgspec
import pytest

from jaxpaged import options
from jaxpaged.config import REDACTED, Config
from tests.cli.scripted_engine import run_cli


def test_the_output_is_a_config_file(tmp_path: Path) -> None:
    result = run_cli("config", "--block-size", "8", "--max-model-len", "32K", "--enable-prefix-caching=false")
    assert (result.status, result.err) == (0, "")
    file = tmp_path / "out.yaml"
    file.write_text(result.out, encoding="utf-8")
    assert options.load(config_path=file) == options.from_kwargs(block_size=8, max_model_len=32768, enable_prefix_caching=False)


def test_origins_are_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "in.yaml"
    file.write_text("scheduler: {max_num_seqs: 4}\n", encoding="utf-8")
    monkeypatch.setenv("JAXPAGED_CACHE__MEMORY", "1MiB")
    out = run_cli("config", "--config", str(file), "--block-size", "8", "--no-enable-prefix-caching").out
    assert f"  max_num_seqs: 4  # {file}: scheduler.max_num_seqs\n" in out
    assert "  memory: 1048576  # JAXPAGED_CACHE__MEMORY\n" in out
    assert "  page_size: 8  # --block-size\n" in out
    assert "  enable_prefix_caching: false  # --no-enable-prefix-caching\n" in out
    assert out.count("#") == 4


@pytest.mark.parametrize("form", [[], ["--json"], ["--list"]])
def test_secrets_are_never_printed(form: list[str]) -> None:
    result = run_cli("config", *form, "--hf-token", "hf_abc", "--api-key", "sk-1", "sk-2")
    assert result.status == 0
    assert "hf_abc" not in result.out
    assert "sk-" not in result.out
    assert result.out.count(REDACTED) == (0 if form == ["--list"] else 2)


def test_json() -> None:
    tree = json.loads(run_cli("config", "--json", "--cache.memory", "1GiB", "--served-model-name", "a", "b").out)
    defaults = json.loads(msgspec.json.encode(Config()))
    assert tree == {
        **defaults,
        "cache": {**defaults["cache"], "memory": 2**30},
        "server": {**defaults["server"], "served_model_name": ["a", "b"]},
    }


def test_list_explains_every_option() -> None:
    out = run_cli("config", "--list").out
    for option in options.option_table().values():
        assert f"{option.path}  (default:" in out
        assert option.flag in out
        assert option.env in out
        assert option.doc in out


def test_bad_values_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli("config", "--block-size", "x").sentence == "cache.page_size must be an integer from 1 to 256; got 'x' (--block-size)"
    monkeypatch.setenv("JAXPAGED_CACHE__PAGE_SIZE", "300")
    result = run_cli("config")
    assert (result.status, result.out) == (2, "")
    assert result.sentence == "cache.page_size must be an integer from 1 to 256; got '300' (JAXPAGED_CACHE__PAGE_SIZE)"


def test_a_secret_in_a_bad_place_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_APIKEY", "sk-1")
    sentence = run_cli("config").sentence
    assert "sk-1" not in sentence
    assert "JAXPAGED_API_KEY" in sentence
