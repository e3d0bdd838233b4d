"""Configs with every kind of rope, and what transformers makes of them: the test and `scripts/make_golden_tiny.py` read both from here."""

import json
from typing import Any, NamedTuple

from tests.models.cases import GOLDEN

GOLDEN_ROPE = GOLDEN / "rope_tables.json"
"""Case name -> {"frequencies": [half_dim], "magnitude": number}."""


class RopeCase(NamedTuple):
    """One config. `length`: tokens of the text for which the frequencies are made."""

    config: dict[str, Any]
    length: int = 512


def _rope(length: int = 512, *, theta: float = 10_000.0, head_dim: int = 32, max_positions: int = 512, **scaling: Any) -> RopeCase:
    config = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": head_dim, "max_position_embeddings": max_positions}
    return RopeCase(config | {"rope_parameters": {"rope_theta": theta, **scaling}}, length)


_PAIRS = 16
_LONG = {"short_factor": [1 + 0.05 * pair for pair in range(_PAIRS)], "long_factor": [1.5 + 0.9 * pair for pair in range(_PAIRS)]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

ROPE_CASES = {
    "linear": _rope(rope_type="linear", factor=8.0),
    "dynamic-short": _rope(100, rope_type="dynamic", factor=2.0),
    "dynamic-long": _rope(1000, rope_type="dynamic", factor=2.0),
    "llama-3.1": _rope(theta=500_000.0, head_dim=128, max_positions=131_072, factor=8.0, **_LLAMA3),
    "llama-3.2": _rope(theta=500_000.0, head_dim=64, max_positions=131_072, factor=32.0, **_LLAMA3),
    "yarn": _rope(**_YARN),
    "yarn-qwen2.5": _rope(
        theta=1_000_000.0, head_dim=128, max_positions=32_768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768
    ),
    "yarn-untruncated": _rope(**_YARN, truncate=False, beta_fast=16.0, beta_slow=2.0),
    "yarn-magnitude": _rope(**_YARN, attention_factor=0.7),
    "yarn-mscale": _rope(**_YARN, mscale=0.7, mscale_all_dim=0.5),
    "longrope-short": _rope(64, rope_type="longrope", original_max_position_embeddings=64, **_LONG),
    "longrope-long": _rope(65, rope_type="longrope", original_max_position_embeddings=64, **_LONG),
    "longrope-factor": _rope(rope_type="longrope", original_max_position_embeddings=64, factor=2.0, **_LONG),
    "longrope-magnitude": _rope(rope_type="longrope", original_max_position_embeddings=64, attention_factor=1.25, **_LONG),
}


def golden_rope(name: str) -> dict[str, Any]:
    """What transformers computes for a case."""
    return json.loads(GOLDEN_ROPE.read_text(encoding="utf-8"))[name]
