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
from jaxpaged.layers.mlp import GatedMLP
from jaxpaged.layers.shards import EXPERT, TENSOR_AXES, add_up, first_of_part
from jaxpaged.layers.stack import OfLayer, WholeStack
from jaxpaged.stages import stage
from pallas_kernels.gated_product import gated_product
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
    """All experts of a layer, or those of them, and that part of each, that a device has."""

    num_experts: int
    """Of all devices together."""

    @property
    def num_own(self) -> int: ...

    @property
    def cut_over(self) -> tuple[str, ...]:
        """The axes over which what comes out must be added up."""
        ...

    def __call__(
        self, x: Float[Array, "rows embed"], group_sizes: Int32[Array, "experts"], expert_of: Int32[Array, "rows"]
    ) -> Float[Array, "rows embed"]:
        """Rows sorted by expert, `group_sizes` of each, through their own; rows beyond those are padding, of none of our experts."""
        ...


class GatedExperts(nnx.Module):
    """SwiGLU in each expert."""

    def __init__(self, embed: int, num_experts: int, ffw: int, dtype: jax.typing.DTypeLike, *, activation: str) -> None:
        self.gate = WholeStack(jnp.zeros((num_experts, ffw, embed), dtype))
        self.up = WholeStack(jnp.zeros((num_experts, ffw, embed), dtype))
        self.down = WholeStack(jnp.zeros((num_experts, embed, ffw), dtype))
        self.num_experts, self.ffw, self.activation = num_experts, ffw, activation

    @property
    def num_own(self) -> int:
        """Experts of this device."""
        return part_shape(self.gate)[0]

    @property
    def cut_over(self) -> tuple[str, ...]:
        """See `Experts`."""
        return cut_axes(self, is_narrow=part_shape(self.gate)[1] < self.ffw)

    def __call__(
        self, x: Float[Array, "rows embed"], group_sizes: Int32[Array, "experts"], expert_of: Int32[Array, "rows"]
    ) -> Float[Array, "rows embed"]:
        gate, up = (expert_matmul(x, weights, group_sizes) for weights in (self.gate, self.up))
        inner = gated_product(gate, up, activation=self.activation, dtype=x.dtype)
        return expert_matmul(inner, self.down, group_sizes).astype(x.dtype)


class MixtureMLP(nnx.Module):
    """A router and its experts, and a shared expert where there is one; devices with parts of them add up all at once."""

    def __init__(self, embed: int, mixture: Mixture, dtype: jax.typing.DTypeLike, *, activation: str) -> None:
        self.router = Linear(embed, mixture.experts, dtype)
        self.experts = GatedExperts(embed, mixture.experts, mixture.ffw, dtype, activation=activation)
        self.shared = None if mixture.shared_ffw is None else GatedMLP(embed, mixture.shared_ffw, dtype, activation=activation)
        self.shared_gate = None if mixture.shared_ffw is None else Linear(embed, 1, dtype)
        self.mixture = mixture

    @stage("mlp")
    def __call__(self, x: Float[Array, "tokens embed"], num_live: Int32[Array, ""]) -> Float[Array, "tokens embed"]:
        """Tokens from `num_live` on are padding."""
        routing = route(self.router(x), self.mixture.experts_per_token, renormalizes=self.mixture.renormalizes)
        out = send(x, routing, num_live, self.experts)
        parts = [(out, self.experts.cut_over)]
        if self.shared is not None and self.shared_gate is not None:
            parts.append((nnx.sigmoid(self.shared_gate(x)) * self.shared.own_part(x), self.shared.down.cut_over))
        return add_up(parts)


def route(logits: Float[Array, "tokens experts"], num_chosen: int, *, renormalizes: bool) -> Routing:
    """The likeliest experts of each token; shares are softmax over all experts, in float32."""
    shares, experts = lax.top_k(nnx.softmax(logits.astype(jnp.float32)), num_chosen)
    return Routing(experts, shares / shares.sum(-1, keepdims=True) if renormalizes else shares)


def send(x: Float[Array, "tokens embed"], routing: Routing, num_live: Int32[Array, ""], experts: Experts) -> Float[Array, "tokens embed"]:
    """Each live token through its experts, and the sum of what they give, each times its share; 0 for padding.

    Where devices have parts of the experts, this is what those of this one give.
    """
    num_tokens, num_chosen = routing.experts.shape
    is_live = jnp.arange(num_tokens) < num_live
    num_own = experts.num_own
    # Padding is sorted behind the last expert, and so is what goes to experts of other devices.
    if num_own == experts.num_experts:
        expert_of = jnp.where(is_live[:, None], routing.experts, num_own).reshape(-1)
    else:
        own = routing.experts - first_of_part(num_own, (EXPERT,))
        expert_of = jnp.where(is_live[:, None] & (own >= 0) & (own < num_own), own, num_own).reshape(-1)
    order = jnp.argsort(expert_of, stable=True)
    group_sizes = jnp.zeros(num_own, jnp.int32).at[expert_of].add(1, mode="drop")
    rows = experts(x[order // num_chosen], group_sizes, expert_of[order])
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype), unique_indices=True)
    shared_out = rows[back].reshape(num_tokens, num_chosen, -1).astype(jnp.float32)
    shares = jnp.where(is_live[:, None], routing.shares, 0)
    return jnp.where(is_live[:, None], jnp.sum(shared_out * shares[..., None], axis=1), 0).astype(x.dtype)


def part_shape(weights: WholeStack) -> tuple[int, int]:
    """Experts of a layer that there are weights of, and numbers that come out of each."""
    value = weights.get_value()
    shape = value.stacked.shape if isinstance(value, OfLayer) else value.shape
    return shape[-3], shape[-2]


def cut_axes(experts: Experts, *, is_narrow: bool) -> tuple[str, ...]:
    """See `Experts.cut_over`. `is_narrow`: whether this device has a part of each expert's width."""
    return ((EXPERT,) if experts.num_own < experts.num_experts else ()) + (TENSOR_AXES if is_narrow else ())


def expert_matmul(x: Float[Array, "rows in"], weights: WholeStack, group_sizes: Int32[Array, "experts"]) -> Float[Array, "rows out"]:
    """`grouped_matmul` with the weights of one layer, whether they lie in a stack of layers or alone."""
    value = weights.get_value()
    if isinstance(value, OfLayer):
        return grouped_matmul(x, value.stacked, group_sizes, layer=value.layer)
    return grouped_matmul(x, value, group_sizes)
