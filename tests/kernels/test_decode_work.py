"""The shares of persistent CTAs: every block of every one-token sequence exactly once, in even parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.decode_work import (
    BLOCK_TOKENS,
    FIRST_BLOCK,
    FIRST_SEEN,
    KV_LEN,
    NUM_BLOCKS,
    ROW,
    SEQ,
    START,
    DecodeWork,
    by_row_of_q,
    share_out,
)

pytestmark = [pytest.mark.jax]
HOPPER_CTAS = 132
NUM_TOKENS = 40
_jitted = jax.jit(share_out, static_argnames=("num_tokens", "num_kv_heads", "num_ctas"))


def shares(q_lens: list[int], kv_lens: list[int], window: jax.Array | None, num_kv_heads: int, num_ctas: int) -> DecodeWork:
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    work = _jitted(
        jnp.asarray(kv_lens, jnp.int32),
        jnp.asarray(cu_q_lens),
        window,
        num_tokens=NUM_TOKENS,
        num_kv_heads=num_kv_heads,
        num_ctas=num_ctas,
    )
    return DecodeWork(*map(np.asarray, work))


def walk(work: DecodeWork, num_kv_heads: int) -> list[list[tuple[int, int, int, int]]]:
    """What the kernel makes of the shares: for each CTA its (sequence, KV head, block, place of the partial result), in order."""
    visits = []
    for cta, (first_pair, num_pairs, low, high) in enumerate(work.ctas):
        own = []
        for pair in range(first_pair, first_pair + num_pairs):
            seq, kv_head = work.seqs[pair // num_kv_heads], pair % num_kv_heads
            start = seq[START] * num_kv_heads + kv_head * seq[NUM_BLOCKS]
            for step in range(max(low - start, 0), min(high - start, seq[NUM_BLOCKS])):
                own.append((int(seq[SEQ]), kv_head, int(seq[FIRST_BLOCK] + step), pair + cta))
        visits.append(own)
    return visits


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_walked_once_and_parts_of_a_pair_lie_side_by_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_kv_heads, num_ctas = ((1, 1), (3, 5), (2, HOPPER_CTAS))[seed % 3]
    window = None if seed % 2 else jnp.int32(rng.integers(1, 400))
    q_lens = rng.choice([0, 1, 1, 1, 4], 7).tolist()
    kv_lens = [int(rng.integers(q, 1500)) if q else 0 for q in q_lens]
    work = shares(q_lens, kv_lens, window, num_kv_heads, num_ctas)
    visits = walk(work, num_kv_heads)

    wanted = []
    for seq in np.flatnonzero(np.array(q_lens) == 1):
        first_seen = 0 if window is None else max(0, kv_lens[seq] - int(window))
        blocks = range(first_seen // BLOCK_TOKENS, -(-kv_lens[seq] // BLOCK_TOKENS))
        wanted += [(seq, kv_head, block) for kv_head in range(num_kv_heads) for block in blocks]
        row = work.seqs[list(work.seqs[:, SEQ]).index(seq)]
        assert (row[FIRST_SEEN], row[KV_LEN]) == (first_seen, kv_lens[seq])
    assert [visit[:3] for own in visits for visit in own] == wanted

    counts = [len(own) for own in visits]
    assert max(counts) <= -(-len(wanted) // num_ctas)
    # Each CTA's part of each pair has a place of its own, and the pair's own row says which places are its.
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
    places: dict[tuple[int, int], list[int]] = {}
    for own in visits:
        for seq, kv_head, _, place in own:
            parts = places.setdefault((seq, kv_head), [])
            parts += [place] if place not in parts else []
    assert sum(map(len, places.values())) == len({place for parts in places.values() for place in parts})
    for index, (seq, *_) in enumerate(work.seqs):
        assert work.seqs[index][ROW] == (cu_q_lens[seq] if q_lens[seq] == 1 else NUM_TOKENS)
        for kv_head in range(num_kv_heads):
            first, count = work.pairs[index * num_kv_heads + kv_head]
            assert list(range(first, first + count)) == places.get((seq, kv_head), [])
    by_row = np.asarray(by_row_of_q(jax.tree.map(jnp.asarray, work), NUM_TOKENS)).reshape(NUM_TOKENS, num_kv_heads, 2)
    owners = {int(cu_q_lens[seq]): seq for seq in np.flatnonzero(np.array(q_lens) == 1)}
    for row in range(NUM_TOKENS):
        for kv_head in range(num_kv_heads):
            first, count = by_row[row, kv_head]
            assert list(range(first, first + count)) == places.get((owners.get(row, -1), kv_head), [])


def test_the_heaviest_cta_has_a_tenth_more_than_the_mean_at_most() -> None:
    """Batch 32, lengths 1 to 8192: the goal of the design; cutting the line evenly keeps well below it."""
    worst = 0.0
    for seed in range(10):
        kv_lens = np.random.default_rng(seed).integers(1, 8193, 32).tolist()
        counts = [len(own) for own in walk(shares([1] * 32, kv_lens, None, 8, HOPPER_CTAS), 8)]
        worst = max(worst, max(counts) / np.mean(counts))
    assert worst <= 1.1
