"""Cutting a model's layers into KV groups of one size."""

import random

import pytest

from jaxpaged.kv_groups import KVGroup
from jaxpaged.kv_layout import MOST_PADDING, lay_out


def test_a_model_whose_layers_see_alike_has_one_group() -> None:
    for window in (None, 32):
        layout = lay_out([window] * 30)
        assert layout == ((KVGroup(window),), 30, (0,) * 30, tuple(range(30)))


def test_alternating_layers_make_two_groups() -> None:
    layout = lay_out([32, None] * 3)
    assert layout == ((KVGroup(None), KVGroup(32)), 3, (1, 0) * 3, (0, 0, 1, 1, 2, 2))


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "size", "num_groups"),
    [(13, 13, 13, 2), (4, 22, 4, 7), (5, 29, 5, 7), (10, 52, 11, 6), (1, 5, 1, 6), (8, 9, 9, 2), (2, 3, 1, 5)],
)
def test_groups_are_as_few_as_an_eighth_of_padding_allows(num_full: int, num_windowed: int, size: int, num_groups: int) -> None:
    layout = lay_out([None] * num_full + [512] * num_windowed)
    assert (layout.layers_per_group, len(layout.groups)) == (size, num_groups)


@pytest.mark.parametrize("seed", range(20))
def test_every_layer_has_a_place_of_its_own_among_its_like(seed: int) -> None:
    rng = random.Random(seed)
    windows = [rng.choice((None, 8, 32, 100)) for _ in range(rng.randint(1, 40))]
    layout = lay_out(windows)
    places = list(zip(layout.group_of, layout.pool_layer_of, strict=True))
    assert len(set(places)) == len(windows)
    assert [layout.groups[group].window for group, _ in places] == windows
    assert {layer for _, layer in places} <= set(range(layout.layers_per_group))
    for window in set(windows):
        held = sum(group.window == window for group in layout.groups) * layout.layers_per_group
        assert held <= windows.count(window) * (1 + MOST_PADDING)
