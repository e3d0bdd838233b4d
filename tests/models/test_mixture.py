"""Mixtures of experts against numpy, and a mixture made of copies or slices of a dense block against the dense model."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.layers.mixture import Mixture, MixtureMLP, Routing, route, send
from jaxpaged.layers.stack import make_stack, run_stack
from jaxpaged.loading.model_config import settle
from tests.models.cases import FAMILY_CASES, golden_logits
from tests.models.paged_model import PagedModel, load
from tests.tiny_model import Tensors, save_safetensors

pytestmark = pytest.mark.jax

EMBED, FFW = 13, 7


def filled(mixture: Mixture, seed: int = 0) -> MixtureMLP:
    """A block with random weights."""
    random = np.random.default_rng(seed)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MixtureMLP(EMBED, mixture, jnp.float32, activation="silu")))
    drawn = jax.tree.map(lambda like: jnp.asarray(random.standard_normal(like.shape).astype(np.float32)), state)
    return nnx.merge(graphdef, drawn)


def run_block(block: MixtureMLP, x: np.ndarray) -> np.ndarray:
    """One program: op by op it would be dozens."""
    graphdef, state = nnx.split(block)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, jnp.int32(x.shape[0])))(state, x))


def by_loop(block: MixtureMLP, x: np.ndarray) -> np.ndarray:
    """One token and one expert after the other, in float64."""

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    def numbers(array: jax.Array) -> np.ndarray:
        return np.asarray(array, np.float64)

    mixture, experts = block.mixture, block.experts
    gate, up, down = (numbers(weights.get_value()) for weights in (experts.gate, experts.up, experts.down))
    out = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        logits = numbers(block.router.weight[...]) @ row
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-shares)[: mixture.experts_per_token]
        total = shares[chosen].sum() if mixture.renormalizes else 1
        for expert in chosen:
            out[token] += shares[expert] / total * (down[expert] @ (silu(gate[expert] @ row) * (up[expert] @ row)))
        if block.shared is not None and block.shared_gate is not None:
            of_all = block.shared
            inner = silu(numbers(of_all.gate.weight[...]) @ row) * (numbers(of_all.up.weight[...]) @ row)
            opened = 1 / (1 + np.exp(-numbers(block.shared_gate.weight[...]) @ row))
            out[token] += opened * (numbers(of_all.down.weight[...]) @ inner)
    return out


@pytest.mark.parametrize("mixture", [Mixture(5, 2, FFW, True), Mixture(11, 3, FFW, False, shared_ffw=5)], ids=["mixtral", "qwen2"])
def test_equals_a_loop_over_tokens_and_experts(mixture: Mixture) -> None:
    block = filled(mixture)
    x = np.random.default_rng(1).standard_normal((19, EMBED)).astype(np.float32)
    expected = by_loop(block, x)
    np.testing.assert_allclose(run_block(block, x), expected, atol=1e-5 * np.abs(expected).max())


def test_padding_goes_nowhere_and_gives_zero() -> None:
    """Rows of padding hold NaN; no expert is sent one, and the live rows come out as they do alone."""

    class Seen:
        num_experts = num_own = 5
        cut_over = ()
        group_sizes: jax.Array
        rows: jax.Array

        def __call__(self, x: jax.Array, group_sizes: jax.Array, expert_of: jax.Array) -> jax.Array:
            self.group_sizes, self.rows = group_sizes, x
            return x * jnp.minimum(expert_of, 5)[:, None]

    seen = Seen()
    x = np.arange(1, 9, dtype=np.float32)[:, None].repeat(3, axis=1)
    x[5:] = np.nan
    logits = np.random.default_rng(2).standard_normal((8, 5)).astype(np.float32)
    logits[5:] = np.nan

    def run(x: jax.Array, logits: jax.Array) -> tuple[Routing, jax.Array, jax.Array, jax.Array]:
        routing = route(logits, 2, renormalizes=True)
        out = send(x, routing, jnp.int32(5), seen)
        return routing, out, seen.group_sizes, seen.rows

    routing, got, seen.group_sizes, seen.rows = jax.jit(run)(x, logits)
    experts, shares = (np.asarray(part)[:5] for part in routing)
    np.testing.assert_array_equal(seen.group_sizes, np.bincount(experts.ravel(), minlength=5))
    assert np.isfinite(np.asarray(seen.rows)[: int(seen.group_sizes.sum())]).all()
    np.testing.assert_allclose(np.asarray(got)[:5, 0], x[:5, 0] * (experts * shares).sum(1), rtol=1e-6)
    assert (got[5:] == 0).all()


def test_all_tokens_may_go_to_one_expert() -> None:
    """No capacity: a router that always says the same drops nothing."""
    block = filled(Mixture(7, 1, FFW, True))
    always = np.zeros((7, EMBED), np.float32)
    always[3, 0] = 100
    block.router.weight[...] = jnp.asarray(always)
    x = np.abs(np.random.default_rng(3).standard_normal((200, EMBED))).astype(np.float32)
    expected = by_loop(block, x)
    np.testing.assert_allclose(run_block(block, x), expected, atol=1e-5 * np.abs(expected).max())


def test_a_stack_runs_its_layers_without_a_copy_of_their_experts() -> None:
    """Taken out of the stack, one layer's experts would be 3 x 64 x 32 x 48 numbers of temporary memory."""
    mixture = Mixture(64, 2, 48, True)
    layers = make_stack(lambda: MixtureMLP(32, mixture, jnp.float32, activation="silu"), 3)
    graphdef, state = nnx.split(layers)

    def run(state: nnx.State, x: jax.Array) -> jax.Array:
        return run_stack(nnx.merge(graphdef, state), 3, lambda layer, x, index: x + layer(x, jnp.int32(16)), x)

    compiled = jax.jit(run).lower(state, jnp.zeros((16, 32))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 64 * 32 * 48 * 4 / 4


def as_mixture(dense: Tensors, *, copies: int, slices: int, seed: int = 4) -> Tensors:
    """A Mixtral from a Mistral's tensors: every expert a copy of the feed-forward block, or a slice of its width.

    Slices are to count 1 each: the router says the same for all, and what it divides by stands in their weights.
    """
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, tensor in dense.items():
        if ".mlp." not in name:
            tensors[name] = tensor
            continue
        layer, part = name.split(".mlp.")
        axis = 1 if part.startswith("down") else 0
        parts = np.split(tensor, slices, axis) * copies
        if part.startswith("down"):
            parts = [array * np.float32(slices) for array in parts]
            router = random.standard_normal((len(parts), tensor.shape[0])).astype(np.float32)
            tensors[f"{layer}.block_sparse_moe.gate.weight"] = router if slices == 1 else 0 * router
        theirs = {"gate": "w1", "up": "w3", "down": "w2"}[part.split("_")[0]]
        tensors |= {f"{layer}.block_sparse_moe.experts.{expert}.{theirs}.weight": array for expert, array in enumerate(parts)}
    return tensors


@pytest.mark.parametrize(
    ("copies", "slices", "chosen"),
    [(5, 1, 2), pytest.param(1, 4, 4, marks=pytest.mark.tier("long", area="models"))],
    ids=["copies", "slices"],
)
def test_a_mixture_made_of_a_dense_model_is_the_dense_model(copies: int, slices: int, chosen: int, tmp_path: Path) -> None:
    """Through the whole path: checkpoint, router, sorted rows, grouped products. The logits are the dense model's golden ones."""
    case = next(case for case in FAMILY_CASES if case.architecture == "MistralForCausalLM")
    config = {**case.options["config"], "intermediate_size": 52}
    if slices == 1:
        config = case.options["config"]
    dense = case.write(tmp_path, **{**case.options, "config": config})
    save_safetensors(tmp_path / "model.safetensors", as_mixture(dense, copies=copies, slices=slices))
    hf_config = json.loads((tmp_path / "config.json").read_text())
    expected = golden_logits(case) if slices == 1 else None
    if expected is None:
        folder = tmp_path / "dense"
        case.write(folder, **{**case.options, "config": config})
        model = PagedModel(load(folder), context=case.positions[-1] + 1)
        expected = model.feed_all(model.start(case.token_ids), chunk=128, bucket=128)[list(case.positions)]
    hf_config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    hf_config |= {
        "num_local_experts": copies * slices,
        "num_experts_per_tok": chosen,
        "intermediate_size": hf_config["intermediate_size"] // slices,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    model = PagedModel(load(tmp_path), context=case.positions[-1] + 1)
    logits = model.feed_all(model.start(case.token_ids), chunk=128, bucket=128)[list(case.positions)]
    assert np.abs(logits - expected).max() < 1e-4


SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 84,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 131,
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_experts": 0}, "num_experts should be a positive integer, not 0"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is above num_experts 4"),
        ({"num_experts": 10**6}, "num_experts 1000000 is above 4096"),
        ({"moe_intermediate_size": "7"}, "moe_intermediate_size should be a positive integer"),
        ({"norm_topk_prob": 1}, "norm_topk_prob should be true or false"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        settle(SIZES | change, "config.json")


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"use_sliding_window": True}])
def test_layers_without_experts_and_windows_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        settle(SIZES | change, "config.json")
