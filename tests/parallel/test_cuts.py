"""Who has what of a parameter: everything somewhere, each query head beside its own key head, nothing that shifts."""

import itertools
from math import gcd

import numpy as np
import pytest

from jaxpaged.parallel.cuts import EXPERT, GROUP, KV, Cuts, ReplicaShape, cut_parameters, own_part, replica_shape
from jaxpaged.parallel.mesh_config import TABLE, MeshShape

HEAD_DIM = 3
SIZES = {"vocab": 11, "embed": 5, "ffw": 7, "layers": 2, "heads": 12, "kv_heads": 6, "head_dim": HEAD_DIM, "experts": 4, "gate_up": 14}
WEIGHTS = {
    "embed": ("embedding", "vocab embed -> vocab embed"),
    "{layer}.q": ("q", "(heads head_dim) embed -> (heads head_dim) embed"),
    "{layer}.k": ("k", "(kv_heads head_dim) embed -> (kv_heads head_dim) embed"),
    "{layer}.o": ("o", "embed (heads head_dim) -> embed (heads head_dim)"),
    "{layer}.sinks": ("sinks", "heads -> heads"),
    "{layer}.{expert}.up": ("up", "ffw embed -> ffw embed"),
    "{layer}.gate_up": ("gate_up", "experts embed gate_up -> experts gate_up embed"),
    "{layer}.norm": ("norm", "embed -> embed"),
}


def parts_of(array: np.ndarray, cuts: Cuts, replica: ReplicaShape) -> dict[tuple[int, int, int], np.ndarray]:
    """By place along expert, kv and group."""
    places = itertools.product(*map(range, replica.sizes.values()))
    return {place: own_part(array, cuts, dict(zip(replica.sizes, place, strict=True)), replica.sizes) for place in places}


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 4), (8, 2), (8, 1), (12, 6), (12, 4), (12, 3), (30, 6), (6, 2)])
def test_query_heads_lie_with_their_key_heads(heads: int, kv_heads: int) -> None:
    """As attention reads them: query head i of a device belongs to its key head i // (query heads per key head)."""
    for tensor in (size for size in range(1, heads + 1) if heads % size == 0):
        replica = replica_shape(MeshShape(tensor=tensor), kv_heads)
        assert (replica.kv, replica.kv * replica.group) == (gcd(tensor, kv_heads), tensor)
        sizes = {**SIZES, "heads": heads, "kv_heads": kv_heads}
        cuts = cut_parameters(WEIGHTS, sizes, replica)
        q = np.repeat(np.arange(heads), HEAD_DIM)[None, :, None] * np.ones((2, 1, 5), int)
        k = np.repeat(np.arange(kv_heads), HEAD_DIM)[None, :, None] * np.ones((2, 1, 5), int)
        own_q, own_k = parts_of(q, cuts["q"], replica), parts_of(k, cuts["k"], replica)
        seen: list[int] = []
        for place in own_q:
            query, key = own_q[place][0, ::HEAD_DIM, 0], own_k[place][0, ::HEAD_DIM, 0]
            assert len(query) == heads // tensor
            assert (query // (heads // kv_heads)).tolist() == np.repeat(key, len(query) // len(key)).tolist()
            seen += query.tolist()
        assert sorted(seen) == list(range(heads))
        o = parts_of(np.broadcast_to(q[0, :, 0], (2, 5, heads * HEAD_DIM)), cuts["o"], replica)
        sinks = parts_of(np.broadcast_to(np.arange(heads), (2, heads)), cuts["sinks"], replica)
        for place in own_q:
            assert o[place][0, 0].tolist() == own_q[place][0, :, 0].tolist()
            assert sinks[place][0].tolist() == own_q[place][0, ::HEAD_DIM, 0].tolist()


def test_widths_are_filled_up_with_zeros() -> None:
    replica = replica_shape(MeshShape(tensor=4), 2)
    cuts = cut_parameters(WEIGHTS, SIZES, replica)
    table = np.arange(1, 12)[:, None] * np.ones((1, 5), int)
    parts = parts_of(table, cuts["embedding"], replica)
    assert [part[:, 0].tolist() for part in parts.values()] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 0]]
    # More devices than numbers: some have none.
    wide = replica_shape(MeshShape(tensor=8), 1)
    cuts = cut_parameters(WEIGHTS, {**SIZES, "vocab": 5, "heads": 8, "kv_heads": 1}, wide)
    parts = parts_of(table[:5], cuts["embedding"], wide)
    assert [part[:, 0].tolist() for part in parts.values()] == [[1], [2], [3], [4], [5], [0], [0], [0]]


def test_pairs_stay_together_and_experts_whole() -> None:
    replica = replica_shape(MeshShape(tensor=2, expert=2), 6)
    cuts = cut_parameters(WEIGHTS, SIZES, replica)
    gate_up = np.arange(14)[None, None, :, None] + 100 * np.arange(4)[None, :, None, None] + np.zeros((2, 1, 1, 5), int)
    parts = parts_of(gate_up, cuts["gate_up"], replica)
    assert parts[0, 0, 0][0, :, :, 0].tolist() == [list(range(8)), list(range(100, 108))]
    assert parts[1, 1, 0][0, :, :, 0].tolist() == [[*range(208, 214), 0, 0], [*range(308, 314), 0, 0]]
    up = parts_of(np.zeros((2, 4, 7, 5)), cuts["up"], replica)
    assert {part.shape for part in up.values()} == {(2, 2, 4, 5)}


def test_what_the_table_leaves_out_is_whole() -> None:
    table = {word: axis for word, axis in TABLE.items() if word not in ("vocab", "heads", "kv_heads")}
    replica = replica_shape(MeshShape(tensor=4, expert=2, table=table), 6)
    cuts = cut_parameters(WEIGHTS, SIZES, replica)
    assert [name for name, own in cuts.items() if any(own)] == ["up", "gate_up"]
    assert replica.pool_parts == 1
    assert [cut and cut.axes for cut in cuts["up"]] == [None, (EXPERT,), (KV, GROUP), None]
    assert not any(any(own) for own in cut_parameters(WEIGHTS, SIZES, replica_shape(MeshShape(), 6)).values())


def test_an_axis_of_one_is_never_cut() -> None:
    """A layer knows a part by its being smaller than the whole."""
    replica = replica_shape(MeshShape(tensor=2), 6)
    assert cut_parameters(WEIGHTS, {**SIZES, "vocab": 1}, replica)["embedding"] == (None, None)


def test_a_part_is_a_view_where_it_can_be() -> None:
    """So that no second copy of a large parameter is ever on the host."""
    replica = replica_shape(MeshShape(tensor=2), 6)
    cuts = cut_parameters(WEIGHTS, {**SIZES, "vocab": 12}, replica)
    for name, shape in (("embedding", (12, 5)), ("q", (2, 36, 5)), ("o", (2, 5, 36)), ("norm", (2, 5))):
        array = np.zeros(shape)
        assert all(np.shares_memory(part, array) for part in parts_of(array, cuts[name], replica).values()), name
