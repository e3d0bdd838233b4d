"""Which kernels an engine asks for, and what it says of those that it took."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec

from jaxpaged.config import KernelsConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache import CacheShape
from jaxpaged.model_structure import ModelFacts
from pallas_kernels import paged_attention
from pallas_kernels.dispatch import Choice, UnsupportedKernelError, choose


class ToldChoices(NamedTuple):
    """What `EngineStarted` says of the kernels."""

    attention: str
    kernels: tuple[str, ...]
    refused: tuple[str, ...]


def asked_kernels(config: KernelsConfig) -> dict[str, str]:
    """Op -> the implementation that was asked for."""
    return {op: name for op, name in msgspec.structs.asdict(config).items() if name is not None}


def kernel_error(error: UnsupportedKernelError) -> ConfigError:
    """What a user is told."""
    return ConfigError(f"{error}; leave kernels.{error.op} out for what takes them", param=f"kernels.{error.op}")


def check_attention(asked: Mapping[str, str], facts: ModelFacts, cache: CacheShape, num_groups: int) -> None:
    """Refuses what can be refused before the weights are there; tracing a step finds the rest.

    Raises:
        ConfigError: the implementation of `paged_attention` that was asked for does not take this model on this device.
    """
    pages = jax.ShapeDtypeStruct((cache.layers, 2, cache.kv_heads, cache.page_size, cache.head_dim), cache.dtype)
    operands = (
        jax.ShapeDtypeStruct((2, facts.kv_heads, facts.head_dim), facts.dtype),
        pages,
        pages,
        jax.ShapeDtypeStruct((num_groups, 2, 1), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    try:
        choose(paged_attention.OP, asked.get(paged_attention.OP.name), operands, {"layer": 0, "group": 0})
    except UnsupportedKernelError as error:
        raise kernel_error(error) from error


def told_choices(choices: Iterable[Choice]) -> ToldChoices:
    """The choices of all programs in words; programs of one engine may differ."""
    ordered = sorted(choices)
    taken = dict.fromkeys(f"{choice.op} {choice.implementation}" for choice in ordered)
    refused = dict.fromkeys(f"{choice.op} {sentence}" for choice in ordered for sentence in choice.refused)
    attention = dict.fromkeys(choice.implementation for choice in ordered if choice.op == paged_attention.OP.name)
    return ToldChoices(",".join(attention), tuple(taken), tuple(refused))
