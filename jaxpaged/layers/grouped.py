"""Linear maps and embeddings whose weights have a scale a group of 32 inputs, of four bits or of eight; see `group_weights`.

They stand where `Linear` and `Embedding` stood: models do not know of them.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.layers.linear import Embedding, Linear
from jaxpaged.layers.stack import OfLayer, WholeStack
from jaxpaged.stages import stage
from pallas_kernels.quantized_matmul import Q4Weights, Q8Weights, quantized_matmul
from pallas_kernels.quantized_matmul.group_weights import GROUP, TILE, embedded_rows, num_tiles


class _Grouped(nnx.Module):
    """Tiles of a matrix [out, in], or of a stack of them, in place of the matrix itself."""

    def __init__(self, path: str, shape: tuple[int, ...], *, is_wide: bool, parameter: type[nnx.Param]) -> None:
        *layers, self.num_out, num_in = shape
        if num_in % GROUP:
            raise UnsupportedModelError(
                f"quantization 'int4' has a scale a group of {GROUP} inputs, and {path} takes {num_in}, which is no multiple of that"
            )
        tiles = (*layers, num_tiles(self.num_out), num_in // GROUP)
        self.is_wide = is_wide
        num_bytes = GROUP * TILE if is_wide else GROUP * TILE // 2
        self.weight = parameter(jnp.zeros((*tiles, num_bytes), jnp.int8 if is_wide else jnp.uint8))
        self.scales = parameter(jnp.zeros((*tiles, TILE), jnp.float16))
        self.minima = None if is_wide else parameter(jnp.zeros((*tiles, TILE), jnp.float16))

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """See `Linear.sums`."""
        parts = [part.get_value() for part in (self.weight, self.scales, self.minima) if part is not None]
        kind, layer = Q8Weights if self.is_wide else Q4Weights, None
        if isinstance(parts[0], OfLayer):
            parts, layer = [part.stacked for part in parts], parts[0].layer
        summed = quantized_matmul(x, kind(*parts), layer=layer)
        return summed[:, : self.num_out]  # without the padding of the last tile


class GroupedLinear(_Grouped):
    """`Linear`, with rows of activations quantized on the way; a stack of layers is never copied out of."""

    def __init__(self, path: str, linear: Linear, *, is_wide: bool) -> None:
        super().__init__(path, linear.weight[...].shape, is_wide=is_wide, parameter=WholeStack)
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        mapped = self.sums(x)
        return (mapped if self.bias is None else mapped + self.bias[...]).astype(x.dtype)


class GroupedEmbedding(_Grouped):
    """`Embedding`: a token is an output, so that the same table serves as the head."""

    def __init__(self, path: str, embedding: Embedding, *, is_wide: bool) -> None:
        weight = embedding.weight[...]
        super().__init__(path, weight.shape, is_wide=is_wide, parameter=nnx.Param)
        self.scale, self.dtype = embedding.scale, weight.dtype

    @stage("embed")
    def __call__(self, token_ids: Int32[Array, "tokens"]) -> Float[Array, "tokens embed"]:
        weights = Q8Weights if self.is_wide else Q4Weights
        parts = [part[...] for part in (self.weight, self.scales, self.minima) if part is not None]
        rows = embedded_rows(weights(*parts), token_ids).astype(self.dtype)
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)
