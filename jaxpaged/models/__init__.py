"""The registry: a checkpoint's architecture -> the file that runs it."""

import importlib
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.errors import UnsupportedModelError
from jaxpaged.kv_cache import KVCache

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
}
"""Name in a checkpoint's `architectures` -> module in this package."""


@runtime_checkable
class ModelShape(Protocol):
    """What the engine must know of any model, whatever its family.

    Attributes:
        windows: for each layer, the positions that a token sees, itself included; None: all.
    """

    vocab: int
    embed: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int
    is_tied: bool
    windows: tuple[int | None, ...]

    @property
    def axis_sizes(self) -> dict[str, int]: ...


@runtime_checkable
class CausalLM(Protocol):
    """A language model over the flat token batch and the paged cache."""

    def __call__(self, cache: KVCache, batch: StepBatch) -> tuple[Float[Array, "tokens embed"], KVCache]: ...

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]: ...


@runtime_checkable
class Family(Protocol):
    """What a model file exports."""

    Config: Any
    Model: Any
    WEIGHTS: dict[str, tuple[str, str]]


def find_family(hf_config: dict[str, Any]) -> Family:
    """The module for a checkpoint. Raises UnsupportedModelError naming its architecture and those we run."""
    names = hf_config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return importlib.import_module(f"{__name__}.{ARCHITECTURES[name]}")
    given = ", ".join(map(str, names)) or "(none named in the config)"
    raise UnsupportedModelError(f"architecture {given} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")


def make_config(family: Family, hf_config: dict[str, Any], dtype: np.dtype) -> Any:
    """The family's `Config` from a Hugging Face config. Raises UnsupportedModelError naming a missing key."""
    try:
        return family.Config.from_hf(hf_config, dtype)
    except KeyError as error:
        raise UnsupportedModelError(f"the model's config lacks {error.args[0]!r}") from error
