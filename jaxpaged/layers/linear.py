"""Linear maps and embeddings, with weights as checkpoints store them: [out, in]."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.layers.shards import TENSOR_AXES, add_up, first_of_part
from jaxpaged.layers.stack import OfLayer, WholeStack
from jaxpaged.stages import stage
from pallas_kernels.dense_matmul import dense_matmul


class Linear(nnx.Module):
    """A linear map, with a bias or without. Where several devices have parts of its inputs, they add up what those give."""

    def __init__(self, num_in: int, num_out: int, dtype: jax.typing.DTypeLike, *, has_bias: bool = False) -> None:
        self.weight = WholeStack(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if has_bias else None
        self.num_in = num_in

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        mapped = self.sums(x)
        if self.cut_over:
            # In the type of the activations, which is half as much to send where that is bfloat16.
            mapped = add_up([(mapped.astype(x.dtype), self.cut_over)])
        return (mapped if self.bias is None else mapped + self.bias[...]).astype(x.dtype)

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """The map of this device's inputs without its bias, in float32."""
        weight = self.weight.get_value()
        if isinstance(weight, OfLayer):
            return dense_matmul(x, weight.stacked, layer=weight.layer)
        return dense_matmul(x, weight)

    def own_part(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """What this device's inputs give: to be added up over `cut_over`. There is no bias."""
        assert self.bias is None
        return self.sums(x).astype(x.dtype)

    @property
    def cut_over(self) -> tuple[str, ...]:
        """The axes over which the inputs are dealt out."""
        return TENSOR_AXES if self.weight.get_value().shape[-1] < self.num_in else ()


class Embedding(nnx.Module):
    """Token ids to rows of the residual stream; the same table can serve as the head. Several devices may have a part of the rows each.

    Args:
        scale: multiplies the rows, rounded to their type first; None: they stay as they are.
    """

    def __init__(self, vocab: int, embed: int, dtype: jax.typing.DTypeLike, *, scale: float | None = None) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab, embed), dtype))
        self.scale, self.vocab = scale, vocab

    @stage("embed")
    def __call__(self, token_ids: Int32[Array, "tokens"]) -> Float[Array, "tokens embed"]:
        num_own = self.weight.shape[0]
        if num_own < self.vocab:
            own_ids = token_ids - first_of_part(num_own, TENSOR_AXES)
            # A negative index would count from the end; ids of other devices' rows lie behind ours.
            own_rows = self.weight[...].at[jnp.where(own_ids < 0, num_own, own_ids)].get(mode="fill", fill_value=0)
            rows = add_up([(own_rows, TENSOR_AXES)])
        else:
            rows = self.weight[...].at[token_ids].get(mode="fill", fill_value=0)
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """The table as a head: each row times each token's, in float32."""
        return dense_matmul(x, self.weight[...])
