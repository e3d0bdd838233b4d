"""The sampler on the device against a few lines of numpy, and its draws against the distribution they should have."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.batch import MAX_BANNED_IDS, SamplingRows
from jaxpaged.intake import Intake
from jaxpaged.kept_ids import Kept
from jaxpaged.largest_logits import NUM_TOP, block_maxima, find_largest
from jaxpaged.sampling import NO_ID, NUM_FEW, _find_block, _place, is_kept, sample, uniform
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax

COUNT, VOCAB = 64, 1000
"""Shape of most tests, so that one program serves them."""

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
run_sample = jax.jit(sample, static_argnames="num_ids")


def rows(count: int, *, vocab: int, seed: np.ndarray | None = None, position: np.ndarray | int = 3, **fields: object) -> SamplingRows:
    """`count` rows; each field is one value for all or one each."""
    columns = {name: np.broadcast_to(np.asarray(fields.get(name, value)), (count,)) for name, value in OFF.items()}
    seeds = np.arange(count, dtype=np.uint64) if seed is None else np.asarray(seed, np.uint64)
    banned = np.full((count, MAX_BANNED_IDS), vocab, np.int32)
    own = np.asarray(fields.get("banned_ids", np.zeros((count, 0))), np.int32)
    banned[:, : own.shape[1]] = own
    return SamplingRows(
        temperature=jnp.asarray(columns["temperature"], jnp.float32),
        top_k=jnp.asarray(columns["top_k"], jnp.int32),
        top_p=jnp.asarray(columns["top_p"], jnp.float32),
        min_p=jnp.asarray(columns["min_p"], jnp.float32),
        seed=jnp.stack([jnp.asarray(seeds & 0xFFFFFFFF, jnp.uint32), jnp.asarray(seeds >> np.uint64(32), jnp.uint32)], axis=1),
        position=jnp.broadcast_to(jnp.asarray(position, jnp.int32), (count,)),
        has_bias=jnp.zeros(count, jnp.int32),
        num_logprobs=jnp.full(count, -1, jnp.int32),
        banned_ids=jnp.asarray(banned),
        **{name: jnp.full(count, value, jnp.float32) for name, value in NO_PENALTY.items()},
    )


def draw(logits: np.ndarray, rows: SamplingRows, num_ids: int | None = None) -> np.ndarray:
    """Ids of `sample`, as numpy."""
    return np.asarray(run_sample(jnp.asarray(logits, jnp.float32), rows, num_ids=logits.shape[1] if num_ids is None else num_ids))


run_is_kept = jax.jit(is_kept)
weights_of = jax.jit(jnp.exp)
"""The device's own exponential: another one differs in last bits."""


def kept_by_sorting(scaled: np.ndarray, weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which ids min_p, then top_k, then top_p keep."""
    keep = weights >= np.float32(min_p)
    if 0 < top_k < len(scaled):
        keep &= scaled >= np.sort(scaled)[-top_k]
    if top_p < 1:
        order, mass = falling(weights, keep)
        keep &= weights >= order[np.searchsorted(mass, np.float32(top_p) * mass[-1])]
    return keep


def falling(weights: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights of what is kept, the largest first, and their running sum."""
    order = np.sort(np.where(keep, weights, 0).astype(np.float64))[::-1]
    return order, np.cumsum(order)


def clear_top_p(weights: np.ndarray, keep: np.ndarray, top_p: float) -> float:
    """A share near `top_p` that no rounding of sums in float32 could move over to another id: amid a step of the running sum."""
    order, mass = falling(weights, keep)
    wide = np.flatnonzero(order > 8e-6 * mass[-1])
    step = wide[np.abs(wide - np.searchsorted(mass, top_p * mass[-1])).argmin()]
    return float((mass[step] - order[step] / 2) / mass[-1])


def shapes_of_logits(vocab: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Peaked, usual, flat, equal, in two levels, on a grid (many ties), with forbidden ids, with one peak."""
    normal = rng.standard_normal(vocab)
    forbidden = np.where(rng.random(vocab) < 0.3, -np.inf, normal)
    forbidden[0] = 0.5
    one_peak = np.full(vocab, -3.0)
    one_peak[vocab // 2] = 9
    shapes = [5 * normal, normal, 0.01 * normal, np.zeros(vocab), np.where(normal > 0, 1.0, 0.0), np.round(normal, 1), forbidden, one_peak]
    return [(shape - shape.max()).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("vocab", "ks", "ps", "mins"),
    [
        (7, (0, 1, 2, 6, 7, 8), (1.0, 0.99, 0.5, 1e-9), (0.0, 0.05, 1.0)),
        (NUM_TOP, (0, 1, NUM_TOP - 1, NUM_TOP), (1.0, 0.9, 0.3), (0.0, 0.1)),
        (1000, (0, 1, 2, NUM_TOP - 1, NUM_TOP, NUM_TOP + 1, 500, 999, 1000, 1001, 10**9), (1.0, 0.999, 0.95, 0.5, 1e-9), (0.0, 0.05, 1.0)),
        (49152, (0, 40, NUM_TOP + 1, 20_000), (1.0, 0.95, 0.5), (0.0, 0.05)),
    ],
)
def test_masks_equal_the_sorted_reference(vocab: int, ks: tuple[int, ...], ps: tuple[float, ...], mins: tuple[float, ...]) -> None:
    """Bit for bit; k and p may want more ids than `NUM_TOP`."""
    shapes = shapes_of_logits(vocab, np.random.default_rng(vocab))
    cases = [(scaled, k, p, m) for scaled in shapes for k in ks for p in ps for m in mins]
    width = 64
    num_wide = 0
    for start in range(0, len(cases), width):
        block = cases[start : start + width]
        block += block[-1:] * (width - len(block))
        scaled = np.stack([case[0] for case in block])
        weights = np.asarray(weights_of(scaled))
        top_k, top_p, min_p = (np.array([case[column] for case in block]) for column in (1, 2, 3))
        for index in np.flatnonzero(top_p < 1):
            keep = kept_by_sorting(scaled[index], weights[index], top_k[index], 1.0, min_p[index])
            top_p[index] = clear_top_p(weights[index], keep, top_p[index])
        got = np.asarray(run_is_kept(jnp.asarray(scaled), rows(width, vocab=vocab, top_k=top_k, top_p=top_p, min_p=min_p)))
        for own, *case in zip(got, scaled, weights, top_k, top_p, min_p, strict=True):
            expected = kept_by_sorting(*case)
            num_wide += expected.sum() > NUM_TOP
            k, p, m = case[2:]
            assert np.array_equal(own, expected), f"top_k {k}, top_p {p}, min_p {m}: kept {own.sum()} instead of {expected.sum()}"
    assert vocab <= NUM_TOP or num_wide > 10


def exact_powers(count: int) -> np.ndarray:
    """Scaled logits whose weights are 1, 1/2, 1/4 ... to the last bit."""
    near = np.array([[-k * np.log(2) * (1 + 6e-8 * j) for j in range(-8, 9)] for k in range(count)], np.float32)
    is_exact = np.asarray(weights_of(near)) == 0.5 ** np.arange(count)[:, None]
    assert is_exact.any(axis=1).all()
    return near[np.arange(count), is_exact.argmax(axis=1)]


@pytest.mark.parametrize("count", [4, NUM_TOP // 2, NUM_TOP])
def test_top_p_at_the_very_edge_of_a_mass(count: int) -> None:
    """Powers of two, so that no sum rounds: ids whose mass is just what is wanted are enough, and the least bit more takes the next."""
    powers = exact_powers(3)
    scaled = np.full(2 * 11 * NUM_TOP, -np.inf, np.float32)
    scaled[: 11 * count] = np.repeat(powers, [count, 2 * count, 8 * count])  # a quarter of the mass, another, and half of it
    scaled = np.random.default_rng(count).permutation(scaled)
    weights = np.asarray(weights_of(scaled))
    quarter, half = np.float32(0.25), np.float32(0.5)
    least = {quarter: 1, np.nextafter(quarter, half): 0.5, half: 0.5, np.nextafter(half, np.float32(1)): 0.25, 1 - 2**-20: 0.25, 2**-60: 1}
    top_p = np.array(list(least), np.float32)
    got = run_is_kept(jnp.broadcast_to(scaled, (len(top_p), len(scaled))), rows(len(top_p), vocab=len(scaled), top_p=top_p))
    assert np.array_equal(got, weights >= np.array(list(least.values()))[:, None])
    assert np.array_equal(got, [kept_by_sorting(scaled, weights, 0, p, 0.0) for p in top_p])


def critical_chi_square(degrees: int) -> float:
    """What a chi-square variable exceeds once in a thousand times (Wilson and Hilferty 1931)."""
    third = 2 / (9 * degrees)
    return degrees * (1 - third + 3.09 * third**0.5) ** 3


def chi_square(ids: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; ids of probability 0 must not occur."""
    counts = np.bincount(ids, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0, "an id was drawn that is not kept"
    expected = probabilities[probabilities > 0] * len(ids)
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 10, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 40, 0.9, 0.02),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    num_draws, vocab = 20_000, 50
    logits = (0.8 * np.random.default_rng(1).standard_normal(vocab)).astype(np.float32)
    scaled = (logits - logits.max()) / np.float32(temperature)
    kept = kept_by_sorting(scaled, np.asarray(weights_of(scaled)), top_k, top_p, min_p)
    probabilities = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    probabilities /= probabilities.sum()
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    ids = draw(np.broadcast_to(logits, (num_draws, vocab)), rows(num_draws, vocab=vocab, **options))
    statistic, degrees = chi_square(ids, probabilities)
    assert statistic < critical_chi_square(degrees)


def test_one_seed_draws_evenly_over_positions_and_engine_seeds_at_one_position() -> None:
    count, bins = 20_000, 64
    one_seed = uniform(jnp.broadcast_to(jnp.asarray([123, 45], jnp.uint32), (count, 2)), jnp.arange(count, dtype=jnp.int32))
    intake = Intake(byte_level(), generation_config={}, eos_token_ids=frozenset(), vocab=300, seed=0)
    seeds = np.array([intake.request([1], None, arrival_s=0.0).seed for _ in range(count)], np.uint64)
    assert len(set(seeds.tolist())) == count
    one_position = uniform(rows(count, vocab=1, seed=seeds).seed, jnp.full(count, 7, jnp.int32))
    for numbers in (np.asarray(one_seed), np.asarray(one_position)):
        assert 0 <= numbers.min() < numbers.max() < 1
        statistic, degrees = chi_square((numbers * bins).astype(int), np.full(bins, 1 / bins))
        assert statistic < critical_chi_square(degrees)
        # Neighbours in the stream know nothing of each other.
        pairs = (numbers[:-1] * 8).astype(int) * 8 + (numbers[1:] * 8).astype(int)
        statistic, degrees = chi_square(pairs, np.full(64, 1 / 64))
        assert statistic < critical_chi_square(degrees)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    count, vocab = COUNT, VOCAB
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((count, vocab)).astype(np.float32)
    options = {
        "temperature": rng.choice([0.0, 0.7, 1.5], count),
        "top_k": rng.choice([0, 5, 200], count),
        "top_p": rng.choice([1.0, 0.6], count),
        "min_p": rng.choice([0.0, 0.03], count),
        "seed": rng.integers(0, 2**63, count).astype(np.uint64),
        "position": rng.integers(0, 5000, count),
    }
    ids = draw(logits, rows(count, vocab=vocab, **options))
    for _ in range(4):
        order = rng.permutation(count)
        shuffled = {name: values[order] for name, values in options.items()}
        assert np.array_equal(draw(logits[order], rows(count, vocab=vocab, **shuffled)), ids[order])
    # Alone among other rows, and in a batch of another size.
    for row in range(0, count, 7):
        others = {name: np.concatenate([values[row : row + 1], values[:1]]) for name, values in options.items()}
        assert draw(np.stack([logits[row], logits[0]]), rows(2, vocab=vocab, **others))[0] == ids[row]


def test_every_bit_of_the_seed_and_the_position_count() -> None:
    seeds = np.array([0, *(1 << bit for bit in range(63))], np.uint64)
    assert len(np.unique(uniform(rows(64, vocab=1, seed=seeds).seed, jnp.zeros(64, jnp.int32)))) == 64
    assert len(np.unique(uniform(jnp.zeros((64, 2), jnp.uint32), jnp.arange(64, dtype=jnp.int32)))) == 64


def test_greedy_rows_are_exactly_greedy_beside_sampled_ones() -> None:
    count, vocab = COUNT, VOCAB
    logits = np.random.default_rng(4).standard_normal((count, vocab)).astype(np.float32)
    logits[:, 500] = logits.max(axis=1) + 1
    logits[:, 300] = logits[:, 500]  # of equal logits the first is taken
    is_greedy = np.arange(count) % 2 == 0
    ids = draw(logits, rows(count, vocab=vocab, temperature=np.where(is_greedy, 0.0, 1.0)))
    assert (ids[is_greedy] == 300).all()
    assert len(set(ids[~is_greedy].tolist())) > 5
    assert np.array_equal(draw(logits, rows(count, vocab=vocab, temperature=0.0)), np.full(count, 300))


@pytest.mark.parametrize("temperature", [0.0, 1e-10, 1e-8, 1e-6, 9.9e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_equal_greedy(temperature: float) -> None:
    count, vocab = COUNT, VOCAB
    rng = np.random.default_rng(5)
    for scale in (1.0, 30.0, 1e4):
        logits = (scale * rng.standard_normal((count, vocab))).astype(np.float32)
        top = np.sort(logits, axis=1)
        logits[top[:, -1] - top[:, -2] < 0.02, 7] = 2e4  # no near-ties, which a draw may rightly decide otherwise
        assert np.array_equal(draw(logits, rows(count, vocab=vocab, temperature=temperature)), logits.argmax(axis=1))


def test_a_row_of_nan_has_no_id_and_its_neighbours_are_untouched() -> None:
    count, vocab = COUNT, VOCAB
    logits = np.random.default_rng(6).standard_normal((count, vocab)).astype(np.float32)
    for temperature in (0.0, 1.0, np.where(np.arange(count) % 2 == 0, 0.0, 0.9)):
        own = partial(rows, count, vocab=vocab, temperature=temperature, top_p=0.9)
        clean = draw(logits, own())
        spoiled = logits.copy()
        spoiled[2] = np.nan
        spoiled[3, 999] = np.nan  # one is enough
        spoiled[4] = -np.inf
        spoiled[5, 10] = np.inf
        ids = draw(spoiled, own())
        assert (ids[[2, 3, 4, 5]] == NO_ID).all()
        assert np.array_equal(np.delete(ids, [2, 3, 4, 5]), np.delete(clean, [2, 3, 4, 5]))
        assert NO_ID not in clean


@pytest.mark.parametrize("vocab", [5, NUM_TOP, NUM_TOP + 1, 1000, 1009, 5003, 49152])
def test_the_largest_logits_are_those_of_a_sort(vocab: int) -> None:
    """Of vocabularies that no block size divides, too, with ties, forbidden ids and NaN anywhere."""
    rng = np.random.default_rng(vocab)
    shapes = [*shapes_of_logits(vocab, rng), np.full(vocab, -np.inf, np.float32)]
    spoiled = np.repeat(shapes[1][None], 4, axis=0)
    spoiled[range(4), [0, vocab // 2, vocab - 2, vocab - 1]] = [np.nan, -np.nan, np.nan, np.inf]
    logits = np.concatenate([np.stack(shapes), spoiled])
    values, ids, highest = (np.asarray(array) for array in jax.jit(lambda x: find_largest(x, block_maxima(x)))(jnp.asarray(logits)))
    assert np.isnan(highest[-4:-1]).all()
    assert np.array_equal(highest[:-4], logits[:-4].max(axis=1))
    assert np.isposinf(highest[-1])
    for row, own, chosen in zip(logits[:-4], values, ids, strict=False):
        assert np.array_equal(own, np.sort(row)[::-1][:NUM_TOP])
        assert np.array_equal(row[chosen], own)
        assert len(set(chosen.tolist())) == len(chosen)


def test_few_rows_that_need_a_search_get_what_many_do() -> None:
    """Rows whose mass no few ids hold, or that want more than the largest: alone, few and many of them beside others."""
    rng = np.random.default_rng(8)
    logits = (8 * rng.standard_normal((COUNT, VOCAB))).astype(np.float32)
    flat = (0.1 * rng.standard_normal((COUNT, VOCAB))).astype(np.float32)
    options = {"top_p": rng.choice([0.9, 0.99, 1.0], COUNT), "top_k": rng.choice([0, 300], COUNT)}
    expected = draw(flat, rows(COUNT, vocab=VOCAB, **options))
    beside = draw(logits, rows(COUNT, vocab=VOCAB, **options))
    for num_flat in (1, NUM_FEW - 1, NUM_FEW, NUM_FEW + 1):
        at = rng.permutation(COUNT)[:num_flat]
        mixed = logits.copy()
        mixed[at] = flat[at]
        ids = draw(mixed, rows(COUNT, vocab=VOCAB, **options))
        assert np.array_equal(ids[at], expected[at])
        assert np.array_equal(np.delete(ids, at), np.delete(beside, at))


def test_banned_ids_are_never_chosen() -> None:
    count, vocab = COUNT, VOCAB
    logits = np.random.default_rng(7).standard_normal((count, vocab)).astype(np.float32)
    ranking = np.argsort(-logits, axis=1)
    for temperature in (0.0, 1.5):
        own = partial(rows, count, vocab=vocab, temperature=temperature)
        ids = draw(logits, own(banned_ids=ranking[:, :MAX_BANNED_IDS]))
        assert not (ids[:, None] == ranking[:, :MAX_BANNED_IDS]).any()
        if temperature == 0.0:
            assert np.array_equal(ids, ranking[:, MAX_BANNED_IDS])
    # Bans of one row are not those of another.
    banned = np.full((count, 1), vocab)
    banned[::2, 0] = ranking[::2, 0]
    assert np.array_equal(
        draw(logits, rows(count, vocab=vocab, temperature=0.0, banned_ids=banned)), ranking[np.arange(count), 1 - np.arange(count) % 2]
    )


def test_a_row_whose_every_id_is_banned_has_no_id() -> None:
    allowed = 50
    logits = np.full((COUNT, VOCAB), -np.inf, np.float32)
    logits[:, :allowed] = 0
    banned = np.full((COUNT, allowed), VOCAB)
    banned[1] = np.arange(allowed)
    for temperature in (0.0, 1.0):
        ids = draw(logits, rows(COUNT, vocab=VOCAB, temperature=temperature, banned_ids=banned))
        assert np.flatnonzero(ids == NO_ID).tolist() == [1]


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    num_ids = 900
    logits = np.zeros((COUNT, VOCAB), np.float32)
    logits[:, num_ids:] = 5.0
    seen: set[int] = set()
    for position in range(40):
        ids = draw(logits, rows(COUNT, vocab=VOCAB, temperature=np.arange(COUNT) % 3, position=position), num_ids=num_ids)
        seen |= set(ids.tolist())
    assert 0 <= min(seen) <= max(seen) < num_ids
    assert len(seen) > 700


def test_draws_stay_on_ids_that_are_kept_at_the_edges_of_blocks() -> None:
    """The first and last id of all, of a block, and before a stretch of forbidden ones: each is drawn, and nothing beside them."""
    logits = np.full((COUNT, VOCAB), -np.inf, np.float32)
    allowed = [0, 127, 128, 255, 256, 511, 640, VOCAB - 1]
    logits[:, allowed] = 0
    ids = np.concatenate([draw(logits, rows(COUNT, vocab=VOCAB, position=position)) for position in range(60)])
    assert set(ids.tolist()) == set(allowed)
    statistic, degrees = chi_square(np.searchsorted(allowed, ids), np.full(len(allowed), 1 / len(allowed)))
    assert statistic < critical_chi_square(degrees)


@pytest.mark.parametrize("num_kept", [20, 50, 500])
def test_no_draw_lands_on_an_id_without_weight_whatever_rounding_does(num_kept: int) -> None:
    """Draws at the very edges of ids: running sums over blocks are not monotonic to the last bit."""
    rng = np.random.default_rng(num_kept)
    vocab = 49152

    @jax.jit
    def pick(weights: Any, draw: Any) -> Any:
        stretch = _find_block(weights, draw, Kept(draw, draw))
        return stretch.first + _place(stretch.weights, jnp.cumsum(stretch.weights, axis=-1), stretch.rest)

    for _ in range(20):
        weights = np.zeros(vocab, np.float32)
        weights[rng.choice(vocab, num_kept, replace=False)] = np.exp(2 * rng.standard_normal(num_kept))
        sums = np.cumsum(weights[weights > 0].astype(np.float64))
        edges = np.round(sums / sums[-1] * 2**23)[:: num_kept // 20]
        draws = np.clip(np.concatenate([edges - 1, edges, edges + 1]), 0, 2**23 - 1).astype(np.float32) / np.float32(2**23)
        ids = np.asarray(pick(jnp.broadcast_to(weights, (len(draws), vocab)), draws))
        assert (weights[ids] > 0).all()
