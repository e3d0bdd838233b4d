"""Linear maps and embeddings whose weights are int8 with one scale an output channel (or token); see `pallas_kernels.quantized_matmul`.

They stand where `Linear` and `Embedding` stood: models do not know of them.
"""

from collections.abc import Collection

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.layers.grouped import GroupedEmbedding, GroupedLinear
from jaxpaged.layers.linear import Embedding, Linear
from jaxpaged.layers.stack import OfLayer, WholeStack
from jaxpaged.stages import stage
from pallas_kernels.quantized_matmul import Int8Weights, quantized_matmul


class QuantizedLinear(nnx.Module):
    """`Linear`, with rows of activations quantized on the way; a stack of layers is never copied out of."""

    def __init__(self, linear: Linear) -> None:
        shape = linear.weight[...].shape
        self.weight = WholeStack(jnp.zeros(shape, jnp.int8))
        self.scales = WholeStack(jnp.zeros(shape[:-1], jnp.float32))
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        mapped = self.sums(x)
        return (mapped if self.bias is None else mapped + self.bias[...]).astype(x.dtype)

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """See `Linear.sums`."""
        values, scales = self.weight.get_value(), self.scales.get_value()
        if isinstance(values, OfLayer):
            return quantized_matmul(x, Int8Weights(values.stacked, scales.stacked), layer=values.layer)
        return quantized_matmul(x, Int8Weights(values, scales))


class QuantizedEmbedding(nnx.Module):
    """`Embedding`, with one scale a token: the same table serves as the head."""

    def __init__(self, embedding: Embedding) -> None:
        weight = embedding.weight[...]
        self.weight = nnx.Param(jnp.zeros(weight.shape, jnp.int8))
        self.scales = nnx.Param(jnp.zeros(weight.shape[:-1], jnp.float32))
        self.scale, self.dtype = embedding.scale, weight.dtype

    @stage("embed")
    def __call__(self, token_ids: Int32[Array, "tokens"]) -> Float[Array, "tokens embed"]:
        values = self.weight[...].at[token_ids].get(mode="fill", fill_value=0)
        scales = self.scales[...].at[token_ids].get(mode="fill", fill_value=0)
        rows = (values.astype(jnp.float32) * scales[:, None]).astype(self.dtype)
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """See `Embedding.sums`."""
        return quantized_matmul(x, Int8Weights(self.weight[...], self.scales[...]))


def quantized[M: nnx.Module](model: M, quantization: str, eight_bit: Collection[str] = ()) -> M:
    """The model itself, each of its linear maps and embeddings replaced.

    Args:
        quantization: "int8": one scale an output channel; "int4": one a group of inputs.
        eight_bit: parameter paths of weights that keep eight bits with "int4".

    Raises:
        UnsupportedModelError: a linear map does not fit the quantization, by name.
    """
    for path, module in list(nnx.iter_modules(model)):
        for name, part in list(vars(module).items()):
            own_path = ".".join(map(str, (*path, name)))
            is_wide = f"{own_path}.weight" in eight_bit
            if isinstance(part, Linear):
                setattr(module, name, QuantizedLinear(part) if quantization == "int8" else GroupedLinear(own_path, part, is_wide=is_wide))
            elif isinstance(part, Embedding):
                is_int8 = quantization == "int8"
                setattr(module, name, QuantizedEmbedding(part) if is_int8 else GroupedEmbedding(own_path, part, is_wide=is_wide))
    return model
