"""The folder of compiled programs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpaged.config import CompilationConfig, Config, ModelConfig
from jaxpaged.errors import ConfigError
from jaxpaged.model_runner import ModelRunner
from jaxpaged.programs import CompilationWatch, use_persistent_cache
from jaxpaged.start import start_engine
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax


@pytest.fixture(autouse=True)
def restored_cache() -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir
    yield
    use_persistent_cache(None if before is None else Path(before))


def test_programs_are_kept_in_the_folder(tmp_path: Path) -> None:
    use_persistent_cache(tmp_path / "new" / "programs")
    jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    assert list((tmp_path / "new" / "programs").iterdir())


@pytest.mark.parametrize("is_own", [True, False])
def test_the_oldest_programs_go_when_there_are_too_many(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """In our own folder; what lies in a folder that the user named is not ours to remove."""
    folder = tmp_path / "home" / "programs"
    monkeypatch.setenv("JAXPAGED_HOME", str(folder.parent))
    monkeypatch.setattr("jaxpaged.build.MAX_KEPT_PROGRAM_BYTES", 250)

    def enough(*_: object, **__: object) -> None:
        raise ConfigError("enough")

    monkeypatch.setattr("jaxpaged.build.ModelSource", enough)
    (folder / "traced").mkdir(parents=True)
    names = ["oldest", "traced/older", "newer", "traced/newest"]
    for age, name in enumerate(names):
        (folder / name).write_bytes(b"x" * 100)
        os.utime(folder / name, (age, age))
    (folder / "link").symlink_to(tmp_path)
    config = Config(model=ModelConfig(model=str(tiny_folder)), compilation=CompilationConfig(cache_dir=None if is_own else str(folder)))
    for _ in range(2):
        with pytest.raises(ConfigError, match="enough"):
            start_engine(config, [])
        assert [name for name in names if (folder / name).exists()] == (["newer", "traced/newest"] if is_own else names)
    assert (folder / "link").is_symlink()


def test_a_folder_that_cannot_be_made_stops_nothing_and_warns_of_nothing(tmp_path: Path) -> None:
    """Warnings are errors in tests: JAX's own, one for each program, would show."""
    (tmp_path / "file").write_text("")
    use_persistent_cache(tmp_path / "file" / "programs")
    jax.jit(lambda x: x * 5 + 2).lower(1.0).compile()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_start_that_fails_late_stops_listening(tiny_folder: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step fails, when all programs are there: nobody goes on counting compilations for a runner that does not exist."""
    ends: list[CompilationWatch] = []
    close = CompilationWatch.close

    def fail(*_: Any) -> None:
        raise RuntimeError("no step works")

    def closing(watch: CompilationWatch) -> None:
        ends.append(watch)
        close(watch)

    monkeypatch.setattr(CompilationWatch, "close", closing)
    monkeypatch.setattr(ModelRunner, "run", fail)
    with pytest.raises(RuntimeError, match="no step works"):
        start_tiny(tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    assert len(ends) == 1
