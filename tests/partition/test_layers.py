"""Layer splits, against every split there is."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.layers import even_split, ranges, split_layers


def all_splits(layers: int, stages: int) -> list[list[int]]:
    found = []
    for cuts in combinations(range(1, layers), stages - 1):
        bounds = [0, *cuts, layers]
        found.append([b - a for a, b in pairwise(bounds)])
    return found


def test_an_even_split_spares_the_ends() -> None:
    assert even_split(8, 4) == [2, 2, 2, 2]
    assert even_split(10, 4) == [2, 3, 3, 2]
    assert even_split(3, 3) == [1, 1, 1]


@given(st.integers(1, 60), st.integers(1, 60))
def test_an_even_split_holds_all_layers_and_differs_by_one_at_most(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match="stages"):
            even_split(layers, stages)
        return
    counts = even_split(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_no_other_split_has_a_cheaper_most_expensive_stage(layers: int, stages: list[tuple[float, float, int]]) -> None:
    def cost(stage: int, count: int) -> float:
        fixed, each, most = stages[stage]
        return fixed + each * count if count <= most else math.inf

    best = min(
        (max(cost(s, n) for s, n in enumerate(split)) for split in all_splits(layers, len(stages)) if len(stages) <= layers),
        default=math.inf,
    )
    counts = split_layers(layers, len(stages), cost)
    if math.isinf(best):
        assert counts is None
    else:
        assert counts is not None
        assert sum(counts) == layers
        assert max(cost(s, n) for s, n in enumerate(counts)) == best


def test_a_stage_twice_as_slow_holds_half_the_layers() -> None:
    assert split_layers(9, 2, lambda stage, count: count * (2.0, 1.0)[stage]) == [3, 6]


def test_memory_caps_move_layers_to_slower_stages() -> None:
    def cost(stage: int, count: int) -> float:
        return math.inf if stage == 1 and count > 2 else count * (2.0, 1.0)[stage]

    assert split_layers(9, 2, cost) == [7, 2]


def test_ranges_follow_each_other() -> None:
    assert ranges([2, 3, 1]) == [(0, 2), (2, 5), (5, 6)]
