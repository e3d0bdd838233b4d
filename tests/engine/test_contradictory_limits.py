"""Limits that contradict the model or the page pool: one sentence with both numbers, and no weight is read before."""

from pathlib import Path

import pytest

from jaxpaged import LLM, build, cli
from jaxpaged.errors import CheckpointError, ConfigError, JaxpagedError, MemoryBudgetError
from tests.tiny_engine import start_tiny
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""Keys and values of 16 tokens: 2 layers, 2 heads of 16, float32."""

CASES = {
    "reserve is the pool": (
        {"memory": 11 * PAGE_BYTES, "reserve_pages": 10},
        ConfigError,
        "reserve_pages 10 leaves nothing .* of 10 pages",
    ),
    "reserve is more": ({"memory": 11 * PAGE_BYTES, "reserve_pages": 11}, ConfigError, "reserve_pages 11 leaves nothing .* of 10 pages"),
    "of a default pool": ({"memory": None, "reserve_pages": 10**7}, ConfigError, r"reserve_pages 10000000 leaves nothing of a page pool"),
    "one page": ({"memory": 2 * PAGE_BYTES - 1}, MemoryBudgetError, f"gets {2 * PAGE_BYTES - 1} bytes and one page needs {PAGE_BYTES}"),
    "long context": ({"max_model_len": 10**6}, ConfigError, "max_model_len 1000000 is longer than the model's context"),
    "many rows": ({"max_num_seqs": 65}, ConfigError, "max_num_seqs 65 is over max_num_batched_tokens 64"),
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_no_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    for name in ("read_ahead", "load"):
        monkeypatch.setattr(build.ModelSource, name, read_no_weights)


@pytest.mark.usefixtures("no_weights")
def test_sampling_values_of_the_model_that_make_no_sense_are_refused_before_weights_are_read(tmp_path: Path, programs: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_llama(folder, generation_config={"temperature": -1})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be between 0 and 1e\+06, got -1"):
        start_tiny(folder, programs=programs)
    with pytest.raises(AssertionError, match="weights were read"):
        start_tiny(folder, programs=programs, generation_config="neutral")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_any_weight_is_read(case: str, tiny_folder: Path, programs: Path) -> None:
    changes, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        start_tiny(tiny_folder, programs=programs, **changes)
    assert isinstance(caught.value, JaxpagedError)
    assert "\n" not in caught.value.message


@pytest.mark.usefixtures("no_weights")
def test_keywords_of_the_library(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="reserve_pages 10 leaves nothing of a page pool of 10 pages"):
        LLM(str(tiny_folder), kv_cache_memory_bytes=11 * PAGE_BYTES, scheduler={"reserve_pages": 10})


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--cache.memory", str(11 * PAGE_BYTES), "--scheduler.reserve-pages", "10"],
            "reserve_pages 10 leaves nothing of a page pool of 10 pages",
        ),
        (["--cache.memory", "1000"], "the page pool gets 1000 bytes and one page needs"),
        (["--max-model-len", "1M"], "max_model_len 1048576 is longer than the model's context"),
        (["--max-num-seqs", "600"], "max_num_seqs 600 is over max_num_batched_tokens 512"),
    ],
)
def test_the_command_line_says_it_in_one_sentence(
    flags: list[str], sentence: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path))
    assert cli.main(["generate", "--model", str(tiny_folder), *flags, "hello"]) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err.splitlines()[-1]
    assert "Traceback" not in err


def test_the_largest_reserve_that_leaves_a_page_is_served(tiny_folder: Path, programs: Path) -> None:
    started = start_tiny(
        tiny_folder, programs=programs, memory=11 * PAGE_BYTES, reserve_pages=9, token_buckets=(16,), max_num_batched_tokens=16
    )
    assert started.engine.pages.num_usable == 10
    started.engine.close()
