"""Mixtures of experts: each token goes to a few of many feed-forward blocks (Shazeer et al. 2017; Jiang et al. 2024).

No expert has a capacity, and no token is dropped; padding goes nowhere. Tokens are sorted by expert, so that each expert's weights are
read once, and only those of experts that a step has tokens for.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mlp import ACTIVATIONS, GatedMLP
from jaxpaged.layers.stack import OfLayer, WholeStack
from pallas_kernels.grouped_matmul import grouped_matmul


class Mixture(NamedTuple):
    """Sizes of a mixture.

    Attributes:
        experts: how many there are.
        experts_per_token: how many a token goes to.
        ffw: width of an expert.
        renormalizes: whether the shares of a token's experts are made to add up to 1; otherwise they are their shares among all.
        shared_ffw: width of the block that every token goes to as well; None: there is none.
    """

    experts: int
    experts_per_token: int
    ffw: int
    renormalizes: bool
    shared_ffw: int | None = None


class Routing(NamedTuple):
    """Which experts each token goes to, and how much each counts."""

    experts: Int32[Array, "tokens top"]
    shares: Float[Array, "tokens top"]


@runtime_checkable
class Experts(Protocol):
    """All experts of a layer."""

    num_experts: int

    def __call__(
        self, x: Float[Array, "rows embed"], group_sizes: Int32[Array, "experts"], expert_of: Int32[Array, "rows"]
    ) -> Float[Array, "rows embed"]:
        """Rows sorted by expert, `group_sizes` of each, through their own; rows beyond those are padding, of no expert."""
        ...


class GatedExperts(nnx.Module):
    """SwiGLU in each expert."""

    def __init__(self, embed: int, num_experts: int, ffw: int, dtype: jax.typing.DTypeLike, *, activation: str) -> None:
        self.gate = WholeStack(jnp.zeros((num_experts, ffw, embed), dtype))
        self.up = WholeStack(jnp.zeros((num_experts, ffw, embed), dtype))
        self.down = WholeStack(jnp.zeros((num_experts, embed, ffw), dtype))
        self.num_experts, self.activation = num_experts, activation

    def __call__(
        self, x: Float[Array, "rows embed"], group_sizes: Int32[Array, "experts"], expert_of: Int32[Array, "rows"]
    ) -> Float[Array, "rows embed"]:
        gate = expert_matmul(x, self.gate, group_sizes).astype(x.dtype)
        up = expert_matmul(x, self.up, group_sizes).astype(x.dtype)
        return expert_matmul(ACTIVATIONS[self.activation](gate) * up, self.down, group_sizes).astype(x.dtype)


class MixtureMLP(nnx.Module):
    """A router and its experts, and a shared expert where there is one."""

    def __init__(self, embed: int, mixture: Mixture, dtype: jax.typing.DTypeLike, *, activation: str) -> None:
        self.router = Linear(embed, mixture.experts, dtype)
        self.experts = GatedExperts(embed, mixture.experts, mixture.ffw, dtype, activation=activation)
        self.shared = None if mixture.shared_ffw is None else GatedMLP(embed, mixture.shared_ffw, dtype, activation=activation)
        self.shared_gate = None if mixture.shared_ffw is None else Linear(embed, 1, dtype)
        self.mixture = mixture

    def __call__(self, x: Float[Array, "tokens embed"], num_live: Int32[Array, ""]) -> Float[Array, "tokens embed"]:
        """Tokens from `num_live` on are padding."""
        routing = route(self.router(x), self.mixture.experts_per_token, renormalizes=self.mixture.renormalizes)
        out = send(x, routing, num_live, self.experts)
        if self.shared is None or self.shared_gate is None:
            return out
        return out + nnx.sigmoid(self.shared_gate(x)) * self.shared(x)


def route(logits: Float[Array, "tokens experts"], num_chosen: int, *, renormalizes: bool) -> Routing:
    """The likeliest experts of each token; shares are softmax over all experts, in float32."""
    shares, experts = lax.top_k(nnx.softmax(logits.astype(jnp.float32)), num_chosen)
    return Routing(experts, shares / shares.sum(-1, keepdims=True) if renormalizes else shares)


def send(x: Float[Array, "tokens embed"], routing: Routing, num_live: Int32[Array, ""], experts: Experts) -> Float[Array, "tokens embed"]:
    """Each live token through its experts, and the sum of what they give, each times its share; 0 for padding."""
    num_tokens, num_chosen = routing.experts.shape
    is_live = jnp.arange(num_tokens) < num_live
    # Padding is sorted behind the last expert.
    expert_of = jnp.where(is_live[:, None], routing.experts, experts.num_experts).reshape(-1)
    order = jnp.argsort(expert_of, stable=True)
    group_sizes = jnp.zeros(experts.num_experts, jnp.int32).at[expert_of].add(1, mode="drop")
    rows = experts(x[order // num_chosen], group_sizes, expert_of[order])
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype), unique_indices=True)
    shared_out = rows[back].reshape(num_tokens, num_chosen, -1).astype(jnp.float32)
    shares = jnp.where(is_live[:, None], routing.shares, 0)
    return jnp.where(is_live[:, None], jnp.sum(shared_out * shares[..., None], axis=1), 0).astype(x.dtype)


def expert_matmul(x: Float[Array, "rows in"], weights: WholeStack, group_sizes: Int32[Array, "experts"]) -> Float[Array, "rows out"]:
    """`grouped_matmul` with the weights of one layer, whether they lie in a stack of layers or alone."""
    value = weights.get_value()
    if isinstance(value, OfLayer):
        return grouped_matmul(x, value.stacked, group_sizes, layer=value.layer)
    return grouped_matmul(x, value, group_sizes)
