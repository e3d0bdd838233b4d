"""Programs kept as files: a second start traces nothing, and no change goes unnoticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import source_digest, traced_programs
from jaxpaged.models import llama
from jaxpaged.start import Started
from jaxpaged.traced_programs import TracedPrograms
from pallas_kernels.dispatch import Choice, Implementation, Op, choose
from tests.event_log import EventLog
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax

LIKE = jax.ShapeDtypeStruct((3,), jnp.float32)


class Traced:
    """A function that counts how often it is traced."""

    def __init__(self, factor: float = 2.0) -> None:
        self.num_traces = 0
        self.factor = factor

    def __call__(self, x: Any, y: Any) -> Any:
        self.num_traces += 1
        return x * self.factor + y, y

    def lower(self, programs: TracedPrograms, *, fixed: str = "f", like: Any = LIKE) -> jax.stages.Lowered:
        """Lowers it with its first argument donated."""
        return programs.lower(self, (like, like), donate=0, fixed=fixed)


def result(lowered: jax.stages.Lowered) -> list[float]:
    """What the compiled program makes of 1, 2, 3 and 10."""
    x, y = jnp.array([1.0, 2.0, 3.0]), jnp.full(3, 10.0)
    return [float(value) for value in lowered.compile()(x, y)[0]]


def test_a_second_process_traces_nothing(tmp_path: Path) -> None:
    first, second = Traced(), Traced()
    assert result(first.lower(TracedPrograms(tmp_path))) == [12.0, 14.0, 16.0]
    assert result(second.lower(TracedPrograms(tmp_path))) == [12.0, 14.0, 16.0]
    assert (first.num_traces, second.num_traces) == (1, 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_donated_memory_is_taken_over_by_the_results_traced_or_read(tmp_path: Path) -> None:
    for _ in range(2):
        analysis = Traced().lower(TracedPrograms(tmp_path)).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == 3 * 4


def test_whatever_goes_into_the_tracing_tells_programs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of the caller, shapes, types, JAX's settings, the source: each change is traced anew."""

    def is_traced(**changes: Any) -> bool:
        run = Traced()
        run.lower(TracedPrograms(tmp_path), **changes)
        return run.num_traces == 1

    assert is_traced()
    assert not is_traced()
    assert is_traced(fixed="g")
    assert not is_traced(fixed="g")
    assert is_traced(like=jax.ShapeDtypeStruct((4,), jnp.float32))
    assert is_traced(like=jax.ShapeDtypeStruct((3,), jnp.int32))
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert is_traced()
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    monkeypatch.setattr(traced_programs, "source_digest", lambda: "another line of code")
    assert is_traced()
    assert not is_traced()


def test_the_kernels_of_a_program_are_kept_with_it_and_those_asked_for_tell_programs_apart(tmp_path: Path) -> None:
    run = Implementation("fast", lambda x: x, lambda x: [])
    op = Op("double", {"fast": run, "slow": run._replace(name="slow")}, {"default": ("fast",)})

    def step(x: Any, y: Any) -> Any:
        return choose(op, None, (x,), {}).run(x) * 2, y

    for kernels, name in (({}, "fast"), ({"double": "slow"}, "slow")):
        other = {"fast": "slow: it runs when asked for by name", "slow": "fast: slow was asked for"}[name]
        for _ in range(2):
            programs = TracedPrograms(tmp_path)
            programs.lower(step, (LIKE, LIKE), donate=0, fixed="f", kernels=kernels)
            assert programs.choices == {Choice("double", name, (other,))}
    assert len(list(tmp_path.iterdir())) == 2


def test_the_source_digest_changes_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jaxpaged" / "models").mkdir(parents=True)
    deep = tmp_path / "jaxpaged" / "models" / "llama.py"
    deep.write_text("x = 1\n")
    monkeypatch.setattr(source_digest, "__file__", str(tmp_path / "jaxpaged" / "source_digest.py"))
    digest = source_digest.source_digest.__wrapped__
    before = digest()
    assert digest() == before
    deep.write_text("x = 2\n")
    assert digest() != before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-1],
    "a bit": lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
    "another digest": lambda content: bytes(32) + content[32:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_traced_anew_and_mended(tmp_path: Path, damage: str) -> None:
    Traced().lower(TracedPrograms(tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    run = Traced()
    assert result(run.lower(TracedPrograms(tmp_path))) == [12.0, 14.0, 16.0]
    assert run.num_traces == 1
    again = Traced()
    again.lower(TracedPrograms(tmp_path))
    assert again.num_traces == 0


def test_no_folder_or_one_that_takes_no_files_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "traced"):
        assert result(Traced().lower(TracedPrograms(folder))) == [12.0, 14.0, 16.0]

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(traced_programs.tempfile, "mkstemp", refuse)
    assert result(Traced().lower(TracedPrograms(tmp_path / "full"))) == [12.0, 14.0, 16.0]
    monkeypatch.undo()
    monkeypatch.setattr(traced_programs.os, "replace", refuse)
    assert result(Traced().lower(TracedPrograms(tmp_path / "full"))) == [12.0, 14.0, 16.0]
    assert list((tmp_path / "full").iterdir()) == [], "half a file stays"


def test_a_second_start_traces_no_layer_and_answers_alike(
    tiny: Started, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_traced = 0
    run_block = llama.Block.__call__

    def count_and_run(self: llama.Block, *args: Any) -> Any:
        nonlocal num_traced
        num_traced += 1
        return run_block(self, *args)

    monkeypatch.setattr(llama.Block, "__call__", count_and_run)
    counts, answers = [], []
    for _ in range(2):
        started = start_tiny(tiny_folder, programs=tmp_path, sinks=[EventLog()], token_buckets=(16,), max_num_batched_tokens=16)
        layout = started.engine.runner.layout_for(16)
        answers.append(np.asarray(started.engine.runner.run(layout, started.engine.runner._idle_blob(layout))).tolist())
        counts.append(num_traced)
        started.engine.close()
    assert counts == [1, 1]
    assert answers[0] == answers[1]


def test_what_a_step_is_built_from_is_told_without_addresses(tiny: Started) -> None:
    """An address differs from process to process: nothing would ever be found again."""
    assert " at 0x" not in repr(tiny.engine.runner._step._fixed)
