"""Linear maps and embeddings, with weights as checkpoints store them: [out, in]."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32


def matmul(x: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    """`x @ weight.T`, accumulated in float32; float32 operands are never rounded to TF32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """A linear map, with a bias or without."""

    def __init__(self, num_in: int, num_out: int, dtype: jax.typing.DTypeLike, *, has_bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if has_bias else None

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        mapped = self.sums(x)
        return (mapped if self.bias is None else mapped + self.bias[...]).astype(x.dtype)

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """The map without its bias, in float32."""
        return matmul(x, self.weight[...])


class Embedding(nnx.Module):
    """Token ids to rows of the residual stream; the same table can serve as the head.

    Args:
        scale: multiplies the rows, rounded to their type first; None: they stay as they are.
    """

    def __init__(self, vocab: int, embed: int, dtype: jax.typing.DTypeLike, *, scale: float | None = None) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab, embed), dtype))
        self.scale = scale

    def __call__(self, token_ids: Int32[Array, "tokens"]) -> Float[Array, "tokens embed"]:
        rows = self.weight[...].at[token_ids].get(mode="fill", fill_value=0)
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)

    def sums(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """The table as a head: each row times each token's, in float32."""
        return matmul(x, self.weight[...])
