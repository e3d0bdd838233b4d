"""Activations by their names in config.json."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu": partial(jax.nn.gelu, approximate=False),
    }
)
