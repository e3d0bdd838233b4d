"""What holds for every model: its weights, and that pages, chunks, batches and padding do not show in its logits."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.hf_architectures import HF_ARCHITECTURES
from jaxpaged.loading.sources import resolve
from jaxpaged.models import ARCHITECTURES
from jaxpaged.step_program import LoadedModel
from tests.models.cases import FAMILY_CASES, VARIANT_CASES, Case, golden_logits
from tests.models.paged_model import PAGE_SIZE, PagedModel, load, step_program
from tests.tiny_model import Tensors, save_safetensors

pytestmark = pytest.mark.jax

CONTEXT = 160
NUM_PAGES = 64
ATOL = 1e-4
"""Between two ways of computing the same logits in float32; logits here have a root mean square of 1."""

FAR_ATOL = 1e-3
"""Against transformers past position 100: a frequency that differs in the last bit, 6e-8, is an angle of 2.5e-4 at position 4096."""


class Made(NamedTuple):
    """A case's checkpoint on disk and in memory, and its logits for the case's prompt in one chunk."""

    case: Case
    folder: Path
    tensors: Tensors
    loaded: LoadedModel
    whole: np.ndarray


LONG = pytest.mark.tier("long", area="models")
FAMILIES = [pytest.param(case, id=case.name, marks=[] if case.runs == "always" else [LONG]) for case in FAMILY_CASES]
COMPARED_ALONE = [
    *(pytest.param(case, id=case.name, marks=[] if case.runs == "always" else [LONG]) for case in VARIANT_CASES),
    *(pytest.param(case, id=case.name) for case in FAMILY_CASES if case.runs == "logits"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    tensors = case.write(folder, **case.options)
    loaded = load(folder)
    return Made(case, folder, tensors, loaded, logits_alone(loaded, case.token_ids, case.buckets[-1]))


def paged(loaded: LoadedModel, seed: int | None = None, *, gives_back: bool = True) -> PagedModel:
    return PagedModel(loaded, context=CONTEXT, num_pages=NUM_PAGES, seed=seed, gives_back=gives_back)


def logits_alone(loaded: LoadedModel, token_ids: list[int], bucket: int) -> np.ndarray:
    """Logits [tokens, vocab] of one sequence in one chunk."""
    model = paged(loaded)
    return model.feed_all(model.start(token_ids), chunk=bucket, bucket=bucket)


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


def test_every_architecture_has_a_case() -> None:
    encoders = {name for name, line in ARCHITECTURES.items() if line.is_encoder}  # in test_bert.py
    assert {case.architecture for case in FAMILY_CASES} | encoders == set(ARCHITECTURES) == set(HF_ARCHITECTURES)


def test_logits_equal_golden(made: Made) -> None:
    assert largest_difference(made.whole[list(made.case.positions)], golden_logits(made.case)) < ATOL


@pytest.mark.parametrize("case", COMPARED_ALONE)
def test_logits_of_variants_equal_golden(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path, **case.options)
    model = PagedModel(load(tmp_path), context=max(case.positions[-1] + 1 for case in VARIANT_CASES))
    logits = model.feed_all(model.start(case.token_ids), chunk=128, bucket=128)[list(case.positions)]
    golden = golden_logits(case)
    assert largest_difference(logits[:2], golden[:2]) < ATOL
    assert largest_difference(logits, golden) < (FAR_ATOL if case.positions[-1] > 100 else ATOL)


def test_the_weights_table_names_every_tensor_and_parameter(made: Made) -> None:
    loaded = made.loaded
    in_module = parameter_paths(loaded)
    table = {name: path for name, (path, _) in loaded.family.WEIGHTS.items()}
    assert in_module <= set(table.values())
    sizes = loaded.config.axis_sizes
    named = [
        name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        for name, path in table.items()
        if path in in_module
        for layer in (range(sizes["layers"]) if "{layer}" in name else [0])
        for expert in (range(sizes["experts"]) if "{expert}" in name else [0])
    ]
    with open_checkpoint(resolve(ModelConfig(model=str(made.folder)))) as checkpoint:
        assert sorted(named) == sorted(checkpoint.names())


def parameter_paths(loaded: LoadedModel) -> set[str]:
    module = nnx.eval_shape(lambda: loaded.family.Model(loaded.config))
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}


def test_every_number_of_the_checkpoint_is_loaded_exactly_once(made: Made) -> None:
    """As a multiset of numbers; that each went to the right place, the golden logits say."""

    def sorted_numbers(arrays: Any) -> np.ndarray:
        return np.sort(np.concatenate([np.asarray(array, np.float32).ravel() for array in arrays]))

    np.testing.assert_array_equal(sorted_numbers(made.loaded.params), sorted_numbers(made.tensors.values()))


def test_missing_extra_and_misshapen_tensors_are_refused_together(made: Made, tmp_path: Path) -> None:
    tensors = dict(made.tensors)
    missing, *others, misshapen = sorted(tensors)
    extra = missing.replace("weight", "weird")
    tensors[extra] = tensors.pop(missing)
    tensors[misshapen] = np.concatenate([tensors[misshapen], tensors[misshapen][:1]])
    (tmp_path / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    save_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    message = str(refused.value)
    assert all(name in message for name in (missing, extra, misshapen))
    assert not any(name in message for name in others)


def test_a_layer_is_traced_once_a_program(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    block = made.loaded.family.Block  # type: ignore[attr-defined]
    traced = block.__call__
    monkeypatch.setattr(block, "__call__", lambda *args: calls.append(1) or traced(*args))
    layout = paged(made.loaded).layout(made.case.buckets[1])
    step = step_program.__wrapped__(made.loaded.graphdef, made.loaded.treedef, layout, True)
    step.lower(made.loaded.params, paged(made.loaded).cache, jnp.zeros(layout.blob_size, jnp.int32))
    assert made.loaded.config.layers > 1
    assert len(calls) == 1


@pytest.mark.parametrize(("chunk", "kind"), [(1, 0), (7, 1), (16, 1), (64, 2)])
def test_chunked_equals_whole(made: Made, chunk: int, kind: int) -> None:
    model = paged(made.loaded, seed=chunk)
    chunked = model.feed_all(model.start(made.case.token_ids), chunk, made.case.buckets[kind])
    assert largest_difference(chunked, made.whole) < ATOL


def test_the_order_of_pages_does_not_show_at_all(made: Made) -> None:
    in_order, shuffled = paged(made.loaded), paged(made.loaded, seed=5)
    runs = [model.feed_all(model.start(made.case.token_ids), 16, made.case.buckets[1]) for model in (in_order, shuffled)]
    np.testing.assert_array_equal(runs[0], runs[1])


def test_padding_changes_no_logits_and_writes_nothing(made: Made) -> None:
    token_ids = made.case.token_ids[:7]
    for bucket in set(made.case.buckets[1:]):
        model = paged(made.loaded)
        (logits,) = model.feed([(model.start(token_ids), 7)], bucket)
        assert largest_difference(logits, made.whole[:7]) < ATOL
        for pool in model.cache:
            is_written = ~np.isnan(np.asarray(pool)).all(axis=(0, 2, 4))
            assert is_written.sum() == 7 * len(model.groups)
            assert is_written[1 : 1 + len(model.groups), :7].all()


def test_batch_equals_alone(made: Made) -> None:
    """Six sequences in steps that take some of them a random number of tokens further, decodes among prompts, pages mixed up."""
    random = np.random.default_rng(3)
    ids = made.case.token_ids
    prompts = [ids[start : start + length] for start, length in ((0, 1), (9, 2), (20, 16), (31, 17), (40, 70), (3, 105))]
    model = paged(made.loaded, seed=8)
    sequences = [model.start(prompt) for prompt in prompts]
    parts: list[list[np.ndarray]] = [[] for _ in prompts]
    num_mixed = 0
    while unfinished := [index for index, sequence in enumerate(sequences) if sequence.num_uncomputed_tokens]:
        chosen = random.permutation(unfinished)[: random.integers(1, len(unfinished) + 1)]
        bucket = int(random.choice(made.case.buckets[1:]))
        counts = [min(int(random.choice([1, 1, 3, 8, 40])), sequences[index].num_uncomputed_tokens) for index in chosen]
        while sum(counts) > bucket:
            counts[int(np.argmax(counts))] = 1
        num_mixed += 1 in counts and max(counts) > 1
        rows = [(sequences[index], count) for index, count in zip(chosen, counts, strict=True)]
        for index, logits in zip(chosen, model.feed(rows, bucket), strict=True):
            parts[index].append(logits)
    assert num_mixed > 3
    for prompt, own in zip(prompts, parts, strict=True):
        assert largest_difference(np.concatenate(own), logits_alone(made.loaded, prompt, made.case.buckets[-1])) < ATOL


def test_a_shared_prefix_equals_a_prefix_of_ones_own(made: Made) -> None:
    """What the prefix cache relies on: the second sequence computes only what follows the pages it shares, while the first goes on."""
    ids = made.case.token_ids
    num_shared = 3 * PAGE_SIZE
    longer, other = ids[:90], [*ids[:num_shared], *ids[90:110]]
    model = paged(made.loaded, seed=2, gives_back=False)
    first = model.start(longer)
    (start,) = model.feed([(first, 60)], made.case.buckets[-1])
    second = model.start(other, shared=first, num_shared=num_shared)
    parts = [model.feed([(first, 15), (second, 10)], made.case.buckets[-1]) for _ in range(2)]
    assert largest_difference(np.concatenate([start, *(part[0] for part in parts)]), made.whole[:90]) < ATOL
    assert (
        largest_difference(
            np.concatenate([part[1] for part in parts]), logits_alone(made.loaded, other, made.case.buckets[-1])[num_shared:]
        )
        < ATOL
    )


def test_the_second_run_gives_the_same_bits(made: Made) -> None:
    np.testing.assert_array_equal(logits_alone(made.loaded, made.case.token_ids, made.case.buckets[-1]), made.whole)


def test_programs_are_shared_by_models_of_one_config(made: Made) -> None:
    """Guards the time of this suite: one program a bucket and no more."""
    again = load(made.folder)
    layout = paged(made.loaded).layout(2)
    programs = {step_program(loaded.graphdef, loaded.treedef, layout, True) for loaded in (again, made.loaded)}
    assert len(programs) == 1
    assert jax.default_backend() == "cpu"
