"""What requests ask to be added to or taken from logits: biases, allowed ids, bad words, penalties for repeating.

Each slot keeps a row of biases and a row of token counts on the device. The host writes them when a sequence moves in
(`slot_rows.py`); the step program counts the ids that it chooses. Order as in vLLM: biases first, then penalties.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxpaged.batch import SamplingRows
from jaxpaged.slot_rows import PER_OUTPUT


class SlotRows(NamedTuple):
    """Per slot and token: `counts`, in steps of `PER_OUTPUT`, with `IN_PROMPT`; `bias`, -inf for what may not be chosen."""

    counts: Int32[Array, "slots vocab"]
    bias: Float[Array, "slots vocab"]


def shape_logits(
    logits: Float[Array, "rows vocab"], rows: SamplingRows, slots: SlotRows, target_slots: Int32[Array, "rows"]
) -> Float[Array, "rows vocab"]:
    """The logits from which rows choose; those of rows that ask for nothing are as they were, bit for bit.

    Args:
        logits: float32.
        rows: penalties and `has_bias`, row by row.
        slots: of the device's state.
        target_slots: each row's slot; beyond the slots for rows that choose nothing.
    """

    def both(logits: Array, *others: Any) -> Array:
        return _penalize(_add_bias(logits, *others), *others)

    # One choice, not two after another: each keeps the logits that go in beside those that come out.
    index = jnp.any(rows.has_bias != 0) + 2 * jnp.any(_counts_matter(rows))
    branches = (lambda logits, *_: logits, _add_bias, _penalize, both)
    return lax.switch(index, branches, logits, rows, slots, target_slots)


def count_ids(slots: SlotRows, rows: SamplingRows, target_slots: Int32[Array, "rows"], ids: Int32[Array, "rows"]) -> SlotRows:
    """Notes the chosen ids of rows whose counts matter; a failed row's mark (a negative id) is not counted."""
    num_slots, vocab = slots.counts.shape
    at = jnp.where(_counts_matter(rows) & (ids >= 0), target_slots, num_slots)
    return slots._replace(counts=slots.counts.at[at, jnp.clip(ids, 0, vocab - 1)].add(PER_OUTPUT, mode="drop"))


def _counts_matter(rows: SamplingRows) -> Array:
    return (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)


def _add_bias(logits: Array, rows: SamplingRows, slots: SlotRows, target_slots: Array) -> Array:
    bias = slots.bias.at[target_slots].get(mode="fill", fill_value=0)
    return jnp.where(rows.has_bias[:, None] != 0, logits + bias, logits)


def _penalize(logits: Array, rows: SamplingRows, slots: SlotRows, target_slots: Array) -> Array:
    """Repetition over prompt and answer (Keskar et al. 2019), then frequency and presence over the answer (OpenAI)."""
    counts = slots.counts.at[target_slots].get(mode="fill", fill_value=0)
    outputs = counts // PER_OUTPUT
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalized = jnp.where(counts > 0, repeated, logits)
    penalized = penalized - rows.frequency_penalty[:, None] * outputs - rows.presence_penalty[:, None] * (outputs > 0)
    return jnp.where(_counts_matter(rows)[:, None], penalized, logits)
