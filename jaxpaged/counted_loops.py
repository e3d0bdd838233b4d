"""Loops of a number of turns that is known: loops on CPU, and one turn after another on a GPU, which records no loops."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu_target import platform


def counted_loop[C](num_turns: int, turn: Callable[[jax.Array, C], C], carry: C) -> C:
    """Calls `turn(index, carry)` for each index in turn; it is traced once, and compiled once on CPU.

    On a GPU a loop could not be recorded with the rest of a step, which so would wait for the host at every turn, and what it takes out of
    an array at its index would be copied (`docs/kernels.md`, a whole step).
    """
    if platform() != "gpu":
        return lax.fori_loop(0, num_turns, turn, carry)
    turn_once = jax.jit(turn)
    for index in range(num_turns):
        carry = turn_once(jnp.int32(index), carry)
    return carry
