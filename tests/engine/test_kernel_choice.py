"""The kernels that an engine asks for and takes: told at the start, forced by an option, refused before the weights are read."""

from pathlib import Path

import pytest

import jaxpaged.build
from jaxpaged import events
from jaxpaged.errors import ConfigError
from pallas_kernels import native
from tests.event_log import EventLog
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax


def test_the_start_says_what_it_took_and_why_not_the_others(tiny_folder: Path, programs: Path) -> None:
    for _ in range(2):  # traced, and read from files
        log = EventLog()
        start_tiny(tiny_folder, programs=programs, sinks=[log]).engine.close()
        (started,) = log.of(events.EngineStarted)
        # Native kernels are there where a compiler was.
        best, other = ("cpu", "xla") if native.library().missing is None else ("xla", "cpu")
        assert started.attention == best
        assert started.kernels == (
            f"dense_matmul {best}",
            f"gated_product {best}",
            f"kv_write {best}",
            f"paged_attention {best}",
            f"rms_norm {best}",
        )
        reason = "it needs an NVIDIA GPU of compute capability {}, and this program is for another device"
        less_good = [words for words in started.kernels_refused if words.split(":")[0].endswith(f" {other}")]
        assert best == "xla" or less_good == [f"{choice.split()[0]} xla: cpu goes first" for choice in started.kernels]
        assert [words for words in started.kernels_refused if words not in less_good] == [
            "kv_write mosaic_gpu: " + reason.format("9.0"),
            "paged_attention mosaic_gpu: " + reason.format("9.0"),
            "paged_attention mosaic_sm80: " + reason.format("8.0, 8.6, 8.7 or 8.9"),
        ]


def test_an_implementation_that_is_asked_for_runs(tiny_folder: Path, programs: Path) -> None:
    log = EventLog()
    asked = ("dense_matmul", "gated_product", "kv_write", "paged_attention", "rms_norm")
    started = start_tiny(
        tiny_folder,
        programs=programs,
        sinks=[log],
        **dict.fromkeys(asked, "reference"),
        token_buckets=(16,),
        max_num_batched_tokens=16,
    )
    started.engine.close()
    (event,) = log.of(events.EngineStarted)
    assert (event.attention, event.kernels) == ("reference", tuple(f"{op} reference" for op in asked))
    assert "paged_attention xla: reference was asked for" in event.kernels_refused


@pytest.mark.parametrize("is_found_by_tracing", [False, True])
def test_one_that_cannot_run_here_is_refused_with_its_reason(
    tiny_folder: Path, programs: Path, is_found_by_tracing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are read where that can be known; a program that is traced finds the rest."""
    if is_found_by_tracing:
        monkeypatch.setattr(jaxpaged.build, "check_attention", lambda *_: None)
    log = EventLog()
    reason = "mosaic_gpu: it needs an NVIDIA GPU .*; leave kernels.paged_attention out for what takes them"
    with pytest.raises(ConfigError, match=reason) as info:
        start_tiny(tiny_folder, programs=programs, sinks=[log], paged_attention="mosaic_gpu")
    assert info.value.param == "kernels.paged_attention"
    assert ("pool" in [event.phase for event in log.of(events.PhaseChanged)]) == is_found_by_tracing
