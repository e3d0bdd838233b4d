"""The tiles of longer query spans: every row in one tile of its own sequence, and the blocks that the tile's rows see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS
from pallas_kernels.paged_attention.prefill_work import (
    FIRST_BLOCK,
    FIRST_POSITION,
    FIRST_SEEN,
    NUM_BLOCKS,
    NUM_TOKENS,
    SEQ,
    PrefillWork,
    cut_into_tiles,
)

pytestmark = [pytest.mark.jax]
NUM_ROWS = 300
_jitted = jax.jit(cut_into_tiles, static_argnames=("num_tokens", "tokens_per_tile"))


@pytest.mark.parametrize("seed", range(16))
def test_every_row_of_a_longer_span_is_in_one_tile(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens_per_tile = (2, 16, 42, 128)[seed % 4]
    window = None if seed % 3 else int(rng.integers(1, 200))
    q_lens = rng.choice([0, 1, 2, 3, int(rng.integers(4, 100))], 6)
    while q_lens.sum() > NUM_ROWS:
        q_lens[np.argmax(q_lens)] //= 2
    kv_lens = np.where(q_lens, q_lens + rng.integers(0, 500, 6), 0)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    operands = jnp.asarray(kv_lens, jnp.int32), jnp.asarray(cu_q_lens), None if window is None else jnp.int32(window)
    work = PrefillWork(*map(np.asarray, _jitted(*operands, num_tokens=NUM_ROWS, tokens_per_tile=tokens_per_tile)))

    tile_of_token = np.full(NUM_ROWS, -1)
    used = []
    for seq in np.flatnonzero(q_lens > 1):
        for begin in range(0, q_lens[seq], tokens_per_tile):
            count = min(tokens_per_tile, q_lens[seq] - begin)
            position = kv_lens[seq] - q_lens[seq] + begin
            first_seen = 0 if window is None else max(0, position - window + 1)
            blocks = range(first_seen // BLOCK_TOKENS, -(-(position + count) // BLOCK_TOKENS))
            row = cu_q_lens[seq] + begin
            tile_of_token[row : row + count] = len(used)
            used.append((seq, position, count, first_seen, blocks[0], len(blocks), row))
    columns = [SEQ, FIRST_POSITION, NUM_TOKENS, FIRST_SEEN, FIRST_BLOCK, NUM_BLOCKS]
    got = np.concatenate([work.tiles[:, columns], work.first_tokens[:, None]], axis=1)
    assert got[: len(used)].tolist() == [list(map(int, row)) for row in used]
    assert not work.tiles[len(used) :, [NUM_TOKENS, NUM_BLOCKS]].any()
    np.testing.assert_array_equal(work.tile_of_token, tile_of_token)


def test_the_worst_step_fits() -> None:
    """All sequences of two rows, none of which shares a tile: as many tiles as there can be."""
    q_lens = np.full(150, 2)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    work = cut_into_tiles(jnp.asarray(q_lens, jnp.int32), jnp.asarray(cu_q_lens), None, num_tokens=NUM_ROWS, tokens_per_tile=128)
    assert np.unique(np.asarray(work.tile_of_token)).tolist() == list(range(150))
    assert int(np.asarray(work.tiles[:, NUM_TOKENS]).sum()) == NUM_ROWS
