"""What the sampler is compiled to, and where its random numbers come from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling import sample, uniform
from tests.text.test_sampling import rows

pytestmark = pytest.mark.jax

VOCAB = 49152


def test_the_uniform_number_is_that_of_jax() -> None:
    rng = np.random.default_rng(11)
    seeds = jnp.asarray(rng.integers(0, 2**32, (200, 2), dtype=np.uint32))
    positions = jnp.asarray(rng.integers(0, 2**31, 200, dtype=np.int32))

    def of_jax(seed: Any, position: Any) -> Any:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    assert np.array_equal(jax.jit(uniform)(seeds, positions), jax.jit(jax.vmap(of_jax))(seeds, positions))


def test_the_sampler_is_few_kernels() -> None:
    """XLA takes about 10 ms to compile each, and they are in every program."""
    logits, parameters = jnp.zeros((16, VOCAB)), rows(16, vocab=VOCAB)
    program = jax.jit(lambda logits, rows: sample(logits, rows, VOCAB)).lower(logits, parameters).compile()
    assert program.as_text().count(" fusion(") <= 135
