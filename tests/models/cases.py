"""Checkpoints that the shared model suite runs on, made on the spot.

A new family adds one entry to `FAMILY_CASES`: everything in `test_every_model.py` then runs on it, and `scripts/make_golden.py` makes
its golden logits. `VARIANT_CASES` are the spellings and shapes of a family's checkpoints whose logits alone are compared. This module
imports neither jax nor torch: the tests and the golden script both read it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.tiny_model import Tensors, write_tiny_llama

GOLDEN = Path(__file__).parent.parent / "golden"


class Case(NamedTuple):
    """One checkpoint.

    Attributes:
        name: of the case, and key of its logits in the golden file.
        family: module in `jaxpaged/models`, and stem of the golden file.
        write: writes the checkpoint to a folder and returns its tensors by name; `options` are its other arguments.
        options: what this checkpoint is; its vocabulary is `options["vocab_size"]`.
        positions: where golden logits are kept, ascending; the prompt ends with the last.
    """

    name: str
    family: str
    write: Callable[..., Tensors]
    options: Mapping[str, Any]
    positions: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        """The prompt: ids drawn evenly, the same for all cases of one vocabulary."""
        return np.random.default_rng(11).integers(self.options["vocab_size"], size=self.positions[-1] + 1).tolist()

    @property
    def golden_path(self) -> Path:
        """The golden file: case name -> float32 logits [positions, vocab]."""
        return GOLDEN / f"{self.family}_logits.npz"


def golden_logits(case: Case) -> np.ndarray:
    """What Hugging Face transformers computes in float32: [positions, vocab]."""
    with np.load(case.golden_path) as file:
        return file[case.name]


# As wide as SmolLM2: at smaller widths the dots of all buckets round alike, which hides faults.
FAMILY_CASES = (
    Case(
        name="llama",
        family="llama",
        write=write_tiny_llama,
        options={
            "vocab_size": 384,
            "hidden": 576,
            "ffw": 768,
            "layers": 3,
            "heads": 9,
            "kv_heads": 3,
            "head_dim": 64,
            "theta": 100_000.0,
            "tie": False,
            "has_tokenizer": False,
        },
        positions=(0, 1, 15, 16, 64, 149),
    ),
)

_TINY = {"vocab_size": 128, "hidden": 64, "ffw": 96, "layers": 2, "context": 8192, "has_tokenizer": False}
_TINY |= {"theta": 100_000.0, "rope_style": "new"}
_SHORT = (0, 1, 16, 63)
_LONG = (1, 64, 1024, 4096)
ROPE_STYLES = ("old", "new", "both", "neither")


def _llama(name: str, positions: tuple[int, ...] = _SHORT, **options: Any) -> Case:
    return Case(name, "llama", write_tiny_llama, _TINY | options, positions)


VARIANT_CASES = (
    # The base of the rotary frequencies shows at long range only.
    *(_llama(f"llama-theta-{style}", _LONG, rope_style=style) for style in ROPE_STYLES),
    _llama("llama-tied", tie=True),
    # The config says tied, and the file has another head: transformers takes the head.
    _llama("llama-tied-with-head", tie=True, head_in_file=True),
    _llama("llama-untied", tie=False),
    # Without the key a Llama is untied.
    _llama("llama-tie-absent", tie=None, head_in_file=True),
    # Groups of 2 query heads per KV head are in all the others. Llama 2's configs name neither KV heads nor head_dim.
    _llama("llama-groups-of-1", kv_heads=4, config={"head_dim": None, "num_key_value_heads": None}),
    # All heads together need not be as wide as the residual stream.
    _llama("llama-groups-of-4", kv_heads=1, head_dim=8),
    _llama("llama-bfloat16", dtype="bfloat16"),
    _llama("llama-float16", dtype="float16"),
)
