"""Every implementation of kv_write against the reference: turned, written in place, and nothing else touched."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.kv_write import OP, kv_write, mosaic_gpu, reference
from pallas_kernels.kv_write.cases import CASES, Case, make

pytestmark = [pytest.mark.jax]

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
QUICK = ("primes", "not_turned", "too_large_for_fp8")
"""Of the cases for XLA, those that `make test` runs."""
XLA_CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.tier("kernels"))
    for case in CASES
    if case.tags == ("ci",)
]
FIRST_CASES = [pytest.param(case, id=case.name) for case in CASES if "gpu_first" in case.tags]
OTHER_CASES = [pytest.param(case, id=case.name) for case in CASES if "gpu" in case.tags and "gpu_first" not in case.tags]
H200 = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def on_device(operands: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(jnp.asarray, operands)


def expected(operands: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(array) for array in reference.kv_write(**on_device(operands), layer=None)]


def check(case: Case, operands: dict[str, Any], got: Any) -> None:
    """Pools are NaN where nobody wrote, bit for bit. A turned number is the sum of two float32 products: XLA may fuse one of them into the
    sum, which moves it by half a unit of its last place, and the rounding to a narrower type by a whole unit of that type's."""
    wanted = expected(operands)
    np.testing.assert_array_equal(np.asarray(got.v_pages).astype(np.float32), wanted[2].astype(np.float32))
    narrowest = min(map(jnp.finfo, (case.dtype, case.page_dtype or case.dtype)), key=lambda kind: -kind.eps)
    eps = float(narrowest.eps) if case.dtype != "float32" or case.page_dtype else 4 * float(jnp.finfo(jnp.float32).eps)
    for one, other in zip(got[:2], wanted[:2], strict=True):
        one, other = np.asarray(one).astype(np.float32), other.astype(np.float32)
        np.testing.assert_allclose(one, other, rtol=eps, atol=4 * case.magnitude * 4 * float(jnp.finfo(jnp.float32).eps))
    assert np.isnan(wanted[1].astype(np.float32)).sum() == wanted[1].size - case.num_tokens * case.kv_heads * case.head_dim


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.parametrize("case", XLA_CASES)
def test_equals_the_reference(case: Case, implementation: str) -> None:
    operands = make(case)
    run = jax.jit(functools.partial(kv_write, implementation=implementation))
    if implementation == "cpu" and case.page_dtype == "float16":
        with pytest.raises(UnsupportedKernelError, match="pages are float32, bfloat16 or float8_e4m3fn, not float16"):
            run(**on_device(operands))
        return
    check(case, operands, run(**on_device(operands)))


def test_native_writes_round_to_fp8_as_xla_does() -> None:
    """Every exponent, ties and their neighbours, what is too large, and NaN."""
    near = np.ldexp(np.arange(8, 17, dtype=np.float32)[:, None] / 8, np.arange(-13, 12))
    numbers = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))], axis=None)
    numbers = np.concatenate([numbers, -numbers, np.asarray([0, -0.0, np.inf, -np.inf, np.nan], np.float32)])
    head_dim = -(-len(numbers) // 5)
    v = jnp.asarray(np.resize(numbers, (5, 1, head_dim)))
    pool = jnp.zeros((5, 1, 1, head_dim), jnp.float8_e4m3fn)
    places = jnp.arange(5, dtype=jnp.int32), jnp.zeros(5, jnp.int32)
    wanted, got = (kv_write(v, v, v, pool, pool, *places, implementation=name).v_pages for name in ("xla", "cpu"))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(wanted).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_writes_are_the_same_bits_alone(dtype: str) -> None:
    operands = make(Case("many", 70, 9, 3, 64, 16, 32, dtype))
    run = jax.jit(functools.partial(kv_write, implementation="cpu"))
    together = run(**on_device(operands))
    pages, offsets = operands["write_pages"], operands["write_offsets"]
    for token in (0, 33, 69):
        own = {name: array[token : token + 1] if len(array) == 70 else array for name, array in operands.items()}
        alone = run(**on_device(own))
        np.testing.assert_array_equal(np.asarray(alone.q[0]), np.asarray(together.q[token]))
        for one, whole in zip(alone[1:], together[1:], strict=True):
            place = pages[token], slice(None), offsets[token]
            np.testing.assert_array_equal(np.asarray(one)[place], np.asarray(whole)[place])
            assert np.isnan(np.asarray(one).astype(np.float32)).sum() == one.size - 3 * 64


def test_native_writes_copy_no_pool_in_a_loop() -> None:
    """The pools travel in a loop's carry, as in a stack of layers, and are written where they lie."""
    operands = make(Case("loop", 4, 4, 2, 16, 8, 8))
    pools = {name: np.stack([operands.pop(name)] * 3) for name in ("k_pages", "v_pages")}

    def step(pools: dict[str, jax.Array], operands: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        def layer(index: jax.Array, carry: tuple[jax.Array, dict[str, jax.Array]]) -> tuple[jax.Array, dict[str, jax.Array]]:
            q, pools = carry
            written = kv_write(**operands | pools, layer=index, implementation="cpu")
            return q + written.q, {"k_pages": written.k_pages, "v_pages": written.v_pages}

        return jax.lax.fori_loop(0, 3, layer, (operands["q"], pools))

    compiled = jax.jit(step, donate_argnums=0).lower(pools, operands).compile()
    shape = re.escape("f32[" + ",".join(map(str, pools["k_pages"].shape)) + "]")
    assert not re.findall(rf"= {shape}\S* copy\(.*", compiled.as_text())
    given = on_device(pools)
    addresses = {given[name].unsafe_buffer_pointer() for name in pools}
    _, written = compiled(given, on_device(operands))
    assert {written[name].unsafe_buffer_pointer() for name in pools} == addresses


def test_a_layer_of_a_stack_is_written_and_the_others_keep_their_bits() -> None:
    case = next(case for case in CASES if case.name == "primes")
    operands = make(case)
    pools = {name: np.stack([np.full_like(operands[name], fill) for fill in (1, np.nan, 2)]) for name in ("k_pages", "v_pages")}
    for implementation in ("xla", "cpu", "reference"):
        alone = kv_write(**on_device(operands), implementation=implementation)
        got = kv_write(**on_device(operands | pools), layer=jnp.int32(1), implementation=implementation)
        for one, whole in zip(alone[1:], got[1:], strict=True):
            if implementation != "reference":
                np.testing.assert_array_equal(whole[1], one)
            assert (np.asarray(whole[0]) == 1).all()
            assert (np.asarray(whole[2]) == 2).all()


def interpreted(operands: dict[str, Any], **changes: Any) -> Any:
    return mosaic_gpu.kv_write(**on_device(operands), **({"layer": None, "interpret": INTERPRETER} | changes))


def check_interpreted(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    operands = make(case)
    check(case, operands, interpreted(operands))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.min_jax
@pytest.mark.parametrize("case", FIRST_CASES)
def test_the_mosaic_kernel_equals_the_reference_without_races(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    check_interpreted(case, capfd)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("case", OTHER_CASES)
def test_the_mosaic_kernel_equals_the_reference_on_more_cases(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    check_interpreted(case, capfd)


@pytest.mark.tier("kernels")
def test_a_stack_is_written_by_the_mosaic_kernel_twice_to_equal_bits() -> None:
    operands = make(next(case for case in CASES if case.name == "gpu_fp8_partly_turned"))
    alone = interpreted(operands)
    pools = {name: np.stack([np.full_like(operands[name], fill) for fill in (1, np.nan)]) for name in ("k_pages", "v_pages")}
    for _ in range(2):
        got = interpreted(operands | pools, layer=jnp.int32(1))
        np.testing.assert_array_equal(got.q, alone.q)
        for one, whole in zip(alone[1:], got[1:], strict=True):
            np.testing.assert_array_equal(np.asarray(whole[1]).view(np.uint8), np.asarray(one).view(np.uint8))
            assert (np.asarray(whole[0]).astype(np.float32) == 1).all()


class _WithoutWait:
    """`plgpu` whose barriers are not waited for."""

    def __getattr__(self, name: str) -> Any:
        return (lambda barrier: None) if name == "barrier_wait" else getattr(plgpu, name)


@pytest.mark.tier("kernels")
def test_copies_that_are_not_waited_for_are_noticed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    operands = make(next(case for case in CASES if case.name == "gpu_odd_heads"))
    monkeypatch.setattr(mosaic_gpu, "plgpu", _WithoutWait())
    mosaic_gpu._write.clear_cache()
    try:
        jax.block_until_ready(interpreted(operands))
    except jax.errors.JaxRuntimeError as error:  # jax 0.11 prints a race, jax 0.12 raises it
        report = str(error)
    else:
        report = capfd.readouterr().out
    finally:
        mosaic_gpu._write.clear_cache()
        gpu_callbacks.reset_gpu_interpret_mode_state()
    assert "RACE DETECTED" in report or "no threads observed" in report


def shapes(case: Case) -> dict[str, Any]:
    return {name: None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in make(case).items()}


def chosen(case: Case, implementation: str | None, **changes: Any) -> str:
    operands = shapes(case) | changes
    angles = {name: operands.pop(name) for name in ("cos", "sin")}
    return choose(OP, implementation, tuple(operands.values()), {**angles, "layer": None}).name


@pytest.mark.min_jax
def test_the_kernel_lowers_for_hopper_takes_the_pools_memory_and_is_not_chosen_unasked() -> None:
    case = next(case for case in CASES if case.name == "llama_8b_decode_32")
    with jax.sharding.use_abstract_mesh(H200):
        run = jax.jit(functools.partial(kv_write, implementation="mosaic_gpu"), donate_argnames=("k_pages", "v_pages"))
        text = run.trace(**shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
        assert chosen(case, None) == "xla"
    assert "mosaic_gpu" in text
    assert "output_operand_aliases" in text


SMALL = Case("small", 2, 4, 2, 64, 8, 32, "bfloat16")
BAD = {
    "float32": (SMALL._replace(dtype="float32"), "queries are bfloat16 or float16, not float32"),
    "pages of another type": (SMALL._replace(page_dtype="float16"), "pages are of the queries' dtype or float8_e4m3fn, not float16"),
    "odd head_dim": (SMALL._replace(head_dim=72), "head_dim is a multiple of 16 and at most 256, not 72"),
    "wide head_dim": (SMALL._replace(head_dim=512), "head_dim is a multiple of 16 and at most 256, not 512"),
    "odd angles": (SMALL._replace(half_dim=12), "half_dim is a multiple of 8 and at most half of head_dim, not 12"),
    "many heads": (SMALL._replace(heads=258), "at most 256 heads, not 258"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_lies_outside_the_domain_is_refused_and_left_to_xla(name: str) -> None:
    case, words = BAD[name]
    with jax.sharding.use_abstract_mesh(H200):
        with pytest.raises(UnsupportedKernelError, match=f"takes these operands: mosaic_gpu: {words}"):
            chosen(case, "mosaic_gpu")
        assert chosen(case, None) == "xla"


def test_no_gpu_and_operands_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="it needs an NVIDIA GPU of compute capability 9.0, and this program is for another"):
        chosen(SMALL, "mosaic_gpu")
    bad = {"k_pages": jax.ShapeDtypeStruct((2, 3, 8, 64), jnp.bfloat16), "cos": None}
    with pytest.raises(UnsupportedKernelError, match="differ; 2 heads of 64 for pages of 3 heads of 64; angles are a cosine and a sine"):
        chosen(SMALL, None, **bad)
    with pytest.raises(UnsupportedKernelError, match="33 angles turn 66 dimensions, and a head has 64"):
        chosen(SMALL._replace(half_dim=33), None)
