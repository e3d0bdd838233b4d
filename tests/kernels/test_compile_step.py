"""What `scripts/compile_step.py` makes of XLA's words; and a stack of layers is unrolled for a GPU, where a loop would copy weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxpaged.batch import SamplingRows
from jaxpaged.layers.stack import make_stack, run_stack
from jaxpaged.sampling import sample
from tests.kernels.loaded_script import load_script

pytestmark = [pytest.mark.jax]

LAYER = """
    001: kCustomKernel [source] norm
    002: kCustomCall   [source] kCustomCall
    003: kCopy         [source] kCopy
    004: kCustomCall   [source] kCustomCall
    005: kCustomCall   [source] kCustomCall
    009: kConditional  [source]
      false_branch:
        006: kCustomKernel [source] many
        007: kCustomCall [source] kCustomCall
      true_branch:
        008: kCopy [source] kCopy
    010: kCustomKernel [source] product
"""


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("compile_step")


def test_kernels_of_a_layer_and_what_is_outside_are_counted(script: Any) -> None:
    text = f"000: kCommandBuffer [source] {LAYER * 3}011: kConditional [source]\n  true_branch:\n{LAYER}000: kCommandBuffer [sink]\n"
    assert script.parse_thunks(text) == (5, 2, 1)
    with pytest.raises(ValueError, match="6 calls of our kernels, which is less than three layers have"):
        script.parse_thunks(f"000: kCommandBuffer [source] {LAYER * 2}")


def test_each_limit_that_a_step_breaks_is_named(script: Any) -> None:
    good = script.StepReport(16, 1, 0, 54_000_000, 100, 100, 0)
    assert script.beyond(good) == []
    assert script.beyond(good._replace(kernels_per_layer=17, outside=1, aliased_bytes=99, pool_copies=1)) == [
        "17 kernels_per_layer, at most 16",
        "1 outside, at most 0",
        "1 pool_copies, at most 0",
        "99 bytes are updated in place, and the pool has 100",
    ]


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones((3, 3)))


def test_a_stack_is_a_loop_on_the_cpu_and_calls_of_one_function_on_a_gpu() -> None:
    layers, traced = make_stack(Layer, 4), []

    def run(x: jax.Array) -> jax.Array:
        def run_layer(layer: Any, carry: jax.Array, index: jax.Array) -> jax.Array:
            traced.append(index)
            return carry @ layer.weight[...] + index

        return run_stack(layers, 4, run_layer, x * 2)

    x = jnp.eye(3)
    assert "scan" in str(jax.make_jaxpr(run)(x))
    num_traces = len(traced)
    h200 = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(h200):
        unrolled = jax.make_jaxpr(run)(x)
    assert len(traced) - num_traces == 1
    assert "scan" not in str(unrolled)
    assert sum(equation.primitive.name in ("pjit", "jit") and equation.params["name"] == "step" for equation in unrolled.eqns) == 4
    assert (jax.core.eval_jaxpr(unrolled.jaxpr, unrolled.consts, x)[0] == run(x)).all()


def test_the_sampler_has_no_loop_on_a_gpu_and_draws_the_same_ids() -> None:
    """Loops could not be recorded in the step's command buffer."""
    num_rows, vocab, random = 9, 300, np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((num_rows, vocab)).astype(np.float32) * 0.1)
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    fields = {
        "temperature": np.array([0, 1, 1, 1, 0.7, 1, 2, 1, 1], np.float32),
        "top_k": np.array([0, 0, 200, 5, 0, 200, 0, 150, 0], np.int32),
        "top_p": np.array([1, 0.9, 1, 0.5, 0.95, 0.9, 1, 0.99, 0.01], np.float32),
        "min_p": np.array([0, 0, 0, 0, 0.1, 0, 0, 0.2, 0], np.float32),
        **{"presence_penalty": zeros, "frequency_penalty": zeros, "repetition_penalty": ones},
        **{"has_bias": np.zeros(num_rows, np.int32), "num_logprobs": np.zeros(num_rows, np.int32)},
        **{"seed": np.arange(2 * num_rows, dtype=np.uint32).reshape(-1, 2), "position": np.arange(num_rows, dtype=np.int32)},
        "banned_ids": np.full((num_rows, 1), vocab, np.int32),
    }
    rows = SamplingRows(**jax.tree.map(jnp.asarray, fields))

    def run(logits: jax.Array, rows: SamplingRows) -> jax.Array:
        return sample(logits, rows, vocab)

    on_cpu = jax.jit(run)(logits, rows)
    assert "scan[" in str(jax.make_jaxpr(run)(logits, rows))
    h200 = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(h200):
        recorded = jax.make_jaxpr(lambda *args: run(*args))(logits, rows)
    assert not [word for word in ("scan[", "while[") if word in str(recorded)]
    (on_gpu,) = jax.jit(lambda *args: jax.core.eval_jaxpr(recorded.jaxpr, recorded.consts, *args))(logits, *rows)
    np.testing.assert_array_equal(on_gpu, on_cpu)
