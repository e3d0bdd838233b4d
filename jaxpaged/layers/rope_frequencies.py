"""Frequencies of rotary positions: the plain ones and their scalings to longer contexts, worked out once, on the host.

Keys and values stay in the pool for many steps, so that a model turns by one set of frequencies for the life of the engine. Where a
scaling depends on how long a text is (`dynamic`, `longrope`), it is that of the longest text the engine takes. The numbers are those
of transformers' `ROPE_INIT_FUNCTIONS` for a text of that length, float32 throughout.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.errors import UnsupportedModelError

_TAU = 2 * math.pi


class RopeTable(NamedTuple):
    """One way of turning.

    Attributes:
        frequencies: radians a position for each pair of dimensions; as many pairs are turned, the rest of a head stays as it is.
        magnitude: multiplies cosine and sine.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


class RopePlan(NamedTuple):
    """How each layer of a model turns: `tables[table_of[layer]]`.

    Attributes:
        log_n_from: length behind which queries grow, as in Qwen 1; None: they do not.
    """

    tables: tuple[RopeTable, ...]
    table_of: tuple[int, ...]
    log_n_from: int | None = None


class _Asked(NamedTuple):
    """What a scaling may depend on. `length`: of the longest text that the engine takes."""

    scaling: Mapping[str, Any]
    theta: float
    dims: int
    max_positions: int
    length: int

    def plain(self, theta: float | None = None) -> np.ndarray:
        """`theta ** (-2 i / dims)`, float32 [dims / 2]."""
        return (1.0 / self.powers(theta)).astype(np.float32)

    def powers(self, theta: float | None = None) -> np.ndarray:
        exponents = np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims)
        return np.asarray((self.theta if theta is None else theta) ** exponents, np.float32)


def make_rope_table(
    scaling: Mapping[str, Any] | None, *, theta: float, dims: int, max_positions: int, max_model_len: int | None = None
) -> RopeTable:
    """The table of one kind of layer.

    Args:
        scaling: `rope_scaling` as `loading.rope_config` settles it; None: plain frequencies.
        theta: base of the frequencies.
        dims: of a head, those that are turned; even.
        max_positions: `max_position_embeddings` of the config.
        max_model_len: the longest text that the engine takes; None: what `usable_positions` says.

    Raises:
        UnsupportedModelError: a kind of scaling that is not known, by name.
    """
    if scaling is None:
        return _table(_Asked({}, theta, dims, max_positions, max_positions).plain())
    kind = scaling["rope_type"]
    if kind not in _KINDS:
        raise UnsupportedModelError(f"rope type {kind!r:.60} is not supported; supported: 'default', {', '.join(map(repr, _KINDS))}")
    length = usable_positions(scaling, max_positions) if max_model_len is None else max_model_len
    return _KINDS[kind](_Asked(scaling, theta, dims, max_positions, length))


def unturned(dims: int) -> RopeTable:
    """The table of layers without positions."""
    return RopeTable((0.0,) * (dims // 2))


def usable_positions(scaling: Mapping[str, Any] | None, max_positions: int) -> int:
    """Tokens of the longest text that a model is made for.

    Configs with `dynamic` scaling name the length before scaling, those with `yarn` either; all others the length after it.
    """
    kind = None if scaling is None else scaling["rope_type"]
    if scaling is not None and kind == "dynamic":
        return max(max_positions, int(max_positions * scaling["factor"]))
    if scaling is not None and kind == "yarn":
        return max(max_positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    return max_positions


def _table(frequencies: np.ndarray, magnitude: float = 1.0) -> RopeTable:
    return RopeTable(tuple(frequencies.astype(np.float32).tolist()), magnitude)


def _linear(asked: _Asked) -> RopeTable:
    return _table(asked.plain() / np.float32(asked.scaling["factor"]))


def _dynamic(asked: _Asked) -> RopeTable:
    """NTK-aware: the base grows with the length beyond the one trained for."""
    factor, length = asked.scaling["factor"], max(asked.length, asked.max_positions)
    stretch = factor * length / asked.max_positions - (factor - 1)
    return _table(asked.plain(asked.theta * float(stretch) ** (asked.dims / (asked.dims - 2))))


def _llama3(asked: _Asked) -> RopeTable:
    """Slow frequencies are divided by the factor, fast ones stay, those between are mixed."""
    scaling, plain = asked.scaling, asked.plain()
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = np.float32(scaling["original_max_position_embeddings"] / _TAU) * plain
    share = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return _table((1 - share) * plain / np.float32(scaling["factor"]) + share * plain)


def _yarn(asked: _Asked) -> RopeTable:
    """YaRN (Peng et al. 2023): divided, kept or mixed by how often a pair turns within the length trained for."""
    scaling = asked.scaling
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return asked.dims * math.log(original / (turns * _TAU)) / (2 * math.log(asked.theta))

    low, high = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, asked.dims - 1)
    width = high - low if high != low else 0.001
    divided = np.clip((np.arange(asked.dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    frequencies = asked.plain() * (1 - divided) + divided / (np.float32(factor) * asked.powers())
    return _table(frequencies, _yarn_magnitude(scaling))


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(float(mscale)) / of(float(of_all)) if mscale and of_all else of(1.0)


def _longrope(asked: _Asked) -> RopeTable:
    """LongRoPE (Ding et al. 2024): one divisor a pair, from one of two lists."""
    scaling = asked.scaling
    original = scaling["original_max_position_embeddings"]
    divisors = scaling["long_factor" if asked.length > original else "short_factor"]
    factor = scaling.get("factor") or asked.max_positions / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _table(1.0 / (np.asarray(divisors, np.float32) * asked.powers()), float(magnitude))


_KINDS: Mapping[str, Callable[[_Asked], RopeTable]] = MappingProxyType(
    {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
)
