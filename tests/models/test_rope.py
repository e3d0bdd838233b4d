"""Frequencies of rotary positions: each scaling against its paper's formula in float64, and against transformers' own numbers."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.layers.rope import Rope, make_ropes
from jaxpaged.layers.rope_frequencies import RopePlan, RopeTable, make_rope_table, unturned, usable_positions
from jaxpaged.loading.model_config import settle
from pallas_kernels.kv_write.rotation import rotate
from tests.models.paged_model import load
from tests.models.rope_cases import ROPE_CASES, golden_rope
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax

REST = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}


def table_of(name: str) -> tuple[RopeTable, dict[str, Any]]:
    """A case's table, and its settled config."""
    config, length = ROPE_CASES[name]
    hf = settle(config | REST, name)
    max_positions = hf["max_position_embeddings"]
    table = make_rope_table(
        hf["rope_scaling"], theta=hf["rope_theta"], dims=hf["head_dim"], max_positions=max_positions, max_model_len=length
    )
    return table, hf


@pytest.mark.parametrize("name", ROPE_CASES)
def test_tables_are_those_of_transformers(name: str) -> None:
    table, _ = table_of(name)
    golden = golden_rope(name)
    np.testing.assert_allclose(table.frequencies, golden["frequencies"], rtol=1e-6)
    assert table.magnitude == pytest.approx(golden["magnitude"], rel=1e-12)


@pytest.mark.parametrize("name", ROPE_CASES)
def test_tables_are_those_of_the_papers(name: str) -> None:
    table, hf = table_of(name)
    frequencies, magnitude = by_paper(hf, ROPE_CASES[name].length)
    np.testing.assert_allclose(table.frequencies, frequencies, rtol=2e-6)
    assert table.magnitude == pytest.approx(magnitude)


def by_paper(hf: dict[str, Any], length: int) -> tuple[list[float], float]:
    """One pair after another, in float64."""
    scaling, theta, dims, most = hf["rope_scaling"], hf["rope_theta"], hf["head_dim"], hf["max_position_embeddings"]
    kind, original = scaling["rope_type"], scaling.get("original_max_position_embeddings")
    plain = [theta ** (-2 * pair / dims) for pair in range(dims // 2)]
    factor = scaling.get("factor")
    if kind == "linear":
        return [frequency / factor for frequency in plain], 1.0
    if kind == "dynamic":
        # kaiokendev and bloc97: as though the base had always been larger.
        base = theta * (factor * max(length, most) / most - factor + 1) ** (dims / (dims - 2))
        return [base ** (-2 * pair / dims) for pair in range(dims // 2)], 1.0
    turns = [original * frequency / (2 * math.pi) for frequency in plain]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        shares = [min(max((turn - low) / (high - low), 0), 1) for turn in turns]
        return [share * frequency + (1 - share) * frequency / factor for share, frequency in zip(shares, plain, strict=True)], 1.0
    if kind == "longrope":
        divisors = scaling["long_factor" if length > original else "short_factor"]
        magnitude = scaling.get("attention_factor") or math.sqrt(1 + math.log(factor or most / original) / math.log(original))
        return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)], magnitude
    # YaRN: the pair that turns `beta` times within the original length bounds the ramp.
    bounds = [
        dims / 2 * math.log(original / (2 * math.pi * beta), theta) for beta in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    ]
    if scaling.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    first, last = max(bounds[0], 0), min(bounds[1], dims - 1)
    shares = [min(max((pair - first) / (last - first), 0), 1) for pair in range(dims // 2)]
    magnitude = 0.1 * math.log(factor) + 1
    if "mscale" in scaling:
        magnitude = (0.1 * scaling["mscale"] * math.log(factor) + 1) / (0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1)
    magnitude = scaling.get("attention_factor", magnitude)
    return [(1 - share) * frequency + share * frequency / factor for share, frequency in zip(shares, plain, strict=True)], magnitude


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_longest_text_of_the_engine_decides_and_no_other(kind: str) -> None:
    """As many tables as transformers has lengths, of which an engine takes one for its life: that of the context it is started with."""
    short, long = (table_of(f"{kind}-{length}")[0] for length in ("short", "long"))
    assert short.frequencies != long.frequencies
    _, hf = table_of(f"{kind}-long")
    scaling, positions = hf["rope_scaling"], hf["max_position_embeddings"]
    options = {"theta": hf["rope_theta"], "dims": hf["head_dim"], "max_positions": positions}
    whole = usable_positions(scaling, positions)
    assert make_rope_table(scaling, **options) == make_rope_table(scaling, **options, max_model_len=whole) != short


def test_an_engine_for_short_texts_turns_by_the_short_factors(tmp_path: Path) -> None:
    """From the option to the model."""
    scaling = {"rope_type": "longrope", **SCALINGS["longrope"]}
    write_tiny_llama(tmp_path, rope_scaling=scaling, context=512, has_tokenizer=False)
    plain = np.float32(10_000.0) ** (-np.arange(0, 16, 2, dtype=np.float32) / 16)
    for max_model_len, divisor in (("auto", 2), (65, 2), (64, 1)):
        (table,) = load(tmp_path, max_model_len=max_model_len).config.rope.tables  # type: ignore[arg-type]
        np.testing.assert_allclose(table.frequencies, plain / divisor, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "positions"), [("linear", 512), ("dynamic-long", 1024), ("llama-3.1", 131_072), ("yarn", 1024), ("yarn-qwen2.5", 131_072)]
)
def test_how_long_texts_may_be(name: str, positions: int) -> None:
    _, hf = table_of(name)
    assert usable_positions(hf["rope_scaling"], hf["max_position_embeddings"]) == positions


def test_a_part_of_each_head_is_turned_and_the_rest_stays() -> None:
    rope = Rope(*(jnp.asarray(np.random.default_rng(seed).standard_normal((3, 2)), jnp.float32) for seed in (0, 1)))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 5, 10)), jnp.float32)
    turned = np.asarray(rotate(x, rope.cos, rope.sin))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., :4], rotate(x[..., :4], rope.cos, rope.sin))
    first = np.asarray(x[..., 0] * rope.cos[:, None, 0] - x[..., 2] * rope.sin[:, None, 0])
    np.testing.assert_allclose(turned[..., 0], first, rtol=1e-6)


def test_layers_take_the_tables_of_the_plan_and_unturned_ones_change_no_bit() -> None:
    plan = RopePlan((RopeTable((1.0, 0.5)), unturned(4), RopeTable((0.25, 0.125), 3.0)), (0, 2, 1, 0))
    ropes = make_ropes(jnp.asarray([0, 7, 1000], jnp.int32), plan)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 4)), jnp.float32)
    layers = [ropes.of(jnp.asarray(layer, jnp.int32)) for layer in range(4)]
    np.testing.assert_array_equal(rotate(x, layers[2].cos, layers[2].sin), x)
    np.testing.assert_array_equal(layers[0].cos, layers[3].cos)
    np.testing.assert_allclose(layers[1].cos, 3 * np.cos(np.outer([0, 7, 1000], [0.25, 0.125])), rtol=1e-5, atol=1e-5)


SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 2.0},
}


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("linear", {"factor": None}, "factor of rope type 'linear' should be a positive number, not None"),
        ("linear", {"factor": 0}, "factor of rope type 'linear'"),
        ("linear", {"factor": float("nan")}, "factor of rope type 'linear'"),
        ("llama3", {"low_freq_factor": 4.0}, "low_freq_factor of rope type 'llama3' should be below"),
        ("llama3", {"high_freq_factor": "4"}, "high_freq_factor of rope type 'llama3'"),
        ("llama3", {"original_max_position_embeddings": 1}, "original_max_position_embeddings should be an integer above 1"),
        ("longrope", {"short_factor": [1.0] * 7}, "short_factor of rope type 'longrope' should be a list of 8 positive numbers"),
        ("longrope", {"long_factor": [0.0] * 8}, "long_factor of rope type 'longrope'"),
        ("yarn", {"attention_factor": -1}, "attention_factor of rope type 'yarn'"),
    ],
)
def test_numbers_that_make_no_sense_are_named(kind: str, change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, **SCALINGS[kind]} | change
    write_tiny_llama(tmp_path, rope_scaling=scaling, has_tokenizer=False)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


def test_rotary_positions_by_kind_of_layer_are_refused_where_the_family_has_none(tmp_path: Path) -> None:
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}
    write_tiny_llama(tmp_path, config={"rope_parameters": by_kind}, rope_style="neither", has_tokenizer=False)
    with pytest.raises(UnsupportedModelError, match="by kind of layer"):
        load(tmp_path)
