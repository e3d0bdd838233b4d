"""What GPU kernels are tested with on machines without a GPU: Pallas' Mosaic GPU interpreter and its race detector.

A jax without them (older than 0.11.2) cannot test our kernels; these tests say so before a kernel's own tests fail in odd ways.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]

NUM_PAGES, PAGE_SIZE, WIDTH = 7, 8, 64
PAGE_TABLES = np.array([[1, 2], [5, 6], [3, 1]], np.int32)


INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def gather_pages(pages: jax.Array, *, has_early_read: bool = False, interpret: plgpu.InterpretGPUParams | None = INTERPRETER) -> jax.Array:
    """Copies each sequence's pages through shared memory; an early read does not wait for the copy to arrive."""

    def kernel(pages_ref, tables_ref, out_ref, staging, arrived):
        seq, slot = jax.lax.axis_index("seq"), jax.lax.axis_index("slot")
        plgpu.copy_gmem_to_smem(pages_ref.at[tables_ref[seq, slot]], staging, arrived)
        if not has_early_read:
            plgpu.barrier_wait(arrived)
        out_ref[seq, slot] = staging[...]
        if has_early_read:
            plgpu.barrier_wait(arrived)

    gather = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*PAGE_TABLES.shape, PAGE_SIZE, WIDTH), pages.dtype),
        scratch_types=[plgpu.SMEM((PAGE_SIZE, WIDTH), pages.dtype), plgpu.Barrier()],
        grid=PAGE_TABLES.shape,
        grid_names=("seq", "slot"),
        interpret=interpret,
    )
    return gather(pages, jnp.asarray(PAGE_TABLES))


@pytest.fixture(scope="module")
def pages() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(NUM_PAGES, PAGE_SIZE, WIDTH)), jnp.float32)


def test_the_interpreter_runs_copies_and_barriers(pages: jax.Array, capfd: pytest.CaptureFixture[str]) -> None:
    np.testing.assert_array_equal(gather_pages(pages), pages[PAGE_TABLES])
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.tier("kernels")
def test_the_interpreter_finds_a_read_that_does_not_wait(pages: jax.Array, capfd: pytest.CaptureFixture[str]) -> None:
    """jax 0.11 prints the race, jax 0.12 raises it."""
    try:
        jax.block_until_ready(gather_pages(pages, has_early_read=True))
        report = capfd.readouterr().out
    except jax.errors.JaxRuntimeError as error:
        report = str(error)
    assert "RACE DETECTED" in report


@pytest.mark.tier("kernels")
def test_mosaic_kernels_lower_for_cuda_without_a_gpu() -> None:
    """Lowering runs layout inference and checks shared memory: the cheapest proof that a kernel can be compiled at all."""

    shape = jax.ShapeDtypeStruct((NUM_PAGES, PAGE_SIZE, WIDTH), jnp.float32)
    lowered = jax.jit(functools.partial(gather_pages, interpret=None)).trace(shape).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
