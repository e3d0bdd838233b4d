"""What the engine must know of a model, and the module tree that is made only when a program must be traced."""

from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once it is imported)
import msgspec
import numpy as np

from jaxpaged.models import Family


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one model, as JSON if need be.

    Attributes:
        windows: for each layer, the positions that a token sees, itself included; None: all.
        experts: of each layer; 1 where there is no mixture.
        dtype_name: type of weights and activations, as numpy calls it.
        words: the family's config in words, which tell its programs from all others.
        quantization: of the weights of linear maps and embeddings; none: they have the type of activations.
        eight_bit: parameters that keep eight bits although the quantization is "int4".
    """

    vocab: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]
    experts: int
    dtype_name: str
    words: str
    quantization: str | None = None
    eight_bit: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """Type of activations, and of weights that are not quantized."""
        return np.dtype(self.dtype_name)


class ModelStructure(NamedTuple):
    """The module tree of a model without its weights, split as `flax.nnx` does.

    Attributes:
        expected: parameter path -> shape and type, in the order of the leaves.
        quantization, eight_bit: see `ModelFacts`.
    """

    family: Family
    config: Any
    graphdef: Any
    treedef: Any
    expected: dict[str, Any]
    quantization: str | None = None
    eight_bit: tuple[str, ...] = ()


def facts_of(config: Any, quantization: str | None = None, eight_bit: tuple[str, ...] = ()) -> ModelFacts:
    """The facts in a family's `Config`."""
    return ModelFacts(
        vocab=config.vocab,
        embed=config.embed,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_positions=config.max_positions,
        windows=tuple(config.windows),
        experts=config.axis_sizes.get("experts", 1),
        dtype_name=str(config.dtype),
        words=repr((type(config).__module__, config)),
        quantization=quantization,
        eight_bit=eight_bit,
    )


def make_structure(family: Family, config: Any, quantization: str | None = None, eight_bit: tuple[str, ...] = ()) -> ModelStructure:
    """Builds the module tree of shapes alone; raises what `layers.quantized.quantized` does."""
    from flax import nnx  # late: a start that traces nothing needs none of it, and importing it takes half a second

    from jaxpaged.layers.quantized import quantized

    def make() -> nnx.Module:
        model = family.Model(config)
        return model if quantization is None else quantized(model, quantization, eight_bit)

    graphdef, state = nnx.split(nnx.eval_shape(make))
    leaves, treedef = jax.tree.flatten(state)
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    return ModelStructure(family, config, graphdef, treedef, dict(zip(paths, leaves, strict=True)), quantization, eight_bit)
