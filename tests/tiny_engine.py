"""TINY: an engine over a real, tiny model on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpaged import events
from jaxpaged.config import (
    MIB,
    CacheConfig,
    CompilationConfig,
    Config,
    KernelsConfig,
    LogConfig,
    ModelConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxpaged.start import Started, start_engine


def tiny_config(folder: Path, *, programs: Path, cache_dtype: str = "auto", **changes: Any) -> Config:
    """Options of a small, quick engine; `changes` are fields of the sections by name, `dtype` and `cache_dtype` of model and cache."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"model": str(folder)},
        "cache": {"memory": 1 * MIB, "dtype": cache_dtype},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        "compilation": {"token_buckets": (4, 16, 64), "cache_dir": str(programs), "max_parallel": 2},
        "sampling": {},
        "kernels": {},
    }
    kinds = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "compilation": CompilationConfig,
        "sampling": SamplingConfig,
        "kernels": KernelsConfig,
    }
    for name, value in changes.items():
        section = next(section for section, kind in kinds.items() if name in kind.__struct_fields__)
        sections[section][name] = value
    return Config(**{section: kind(**sections[section]) for section, kind in kinds.items()}, log=LogConfig(level="error"))


def start_tiny(folder: Path, *, programs: Path, sinks: Sequence[events.Sink] = (), **changes: Any) -> Started:
    """TINY: an engine over the model in `folder` (see `tests.tiny_model`), with compiled programs kept in `programs`."""
    return start_engine(tiny_config(folder, programs=programs, **changes), sinks)
