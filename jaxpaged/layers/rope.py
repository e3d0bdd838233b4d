"""Rotary position embedding (Su et al. 2021), the half-split form of Hugging Face checkpoints."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxpaged.layers.rope_frequencies import RopePlan, RopeTable
from jaxpaged.stages import stage


class Rope(NamedTuple):
    """Cosine and sine of every token's angles, times the table's magnitude; and what its queries are multiplied by, if by anything."""

    cos: Float[Array, "tokens half_dim"]
    sin: Float[Array, "tokens half_dim"]
    query_scale: Float[Array, "tokens"] | None = None

    def scale_queries(self, q: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
        """Log-n attention where the model has it: queries that are turned already, times their token's scale."""
        return q if self.query_scale is None else (q * self.query_scale[:, None, None]).astype(q.dtype)


class Ropes(NamedTuple):
    """The angles of all tables of a model, made once per step; each layer takes its own. Data, so that a stack is traced once."""

    cos: Float[Array, "ropes tokens half_dim"]
    sin: Float[Array, "ropes tokens half_dim"]
    table_of: Int32[Array, "layers"]
    query_scale: Float[Array, "tokens"] | None = None

    def of(self, layer: Int32[Array, ""]) -> Rope:
        """The angles of one layer, by its index in the model."""
        if self.cos.shape[0] == 1:
            return Rope(self.cos[0], self.sin[0], self.query_scale)
        table = self.table_of[layer]
        cos, sin = (lax.dynamic_index_in_dim(angles, table, keepdims=False) for angles in (self.cos, self.sin))
        return Rope(cos, sin, self.query_scale)


@stage("rope")
def make_ropes(positions: Int32[Array, "tokens"], plan: RopePlan) -> Ropes:
    """Cosines and sines for every table; all have as many frequencies."""
    ropes = [_make_rope(positions, table) for table in plan.tables]
    cos, sin = jnp.stack([rope.cos for rope in ropes]), jnp.stack([rope.sin for rope in ropes])
    query_scale = None
    if plan.log_n_from is not None:
        query_scale = jnp.maximum(1, jnp.log(positions.astype(jnp.float32) + 1) / np.log(np.float32(plan.log_n_from)))
    return Ropes(cos, sin, jnp.asarray(plan.table_of, jnp.int32), query_scale)


def _make_rope(positions: Int32[Array, "tokens"], table: RopeTable) -> Rope:
    angles = positions.astype(jnp.float32)[:, None] * np.asarray(table.frequencies, np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return Rope(cos, sin) if table.magnitude == 1 else Rope(cos * table.magnitude, sin * table.magnitude)
