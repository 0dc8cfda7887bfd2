"""Batch splits, against every split there is."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from partition.batches import Pace, split_batch

paces = st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 5)), min_size=1, max_size=3)


def end_s(chosen: list[Pace], counts: list[int]) -> float:
    return max(pace.fill_s + n * pace.period_s for pace, n in zip(chosen, counts, strict=True))


@given(st.integers(1, 12), st.integers(1, 3), paces)
def test_no_other_split_ends_earlier(micro_batches: int, size: int, drawn: list[tuple[float, float]]) -> None:
    chosen = [Pace(size, fill_s, period_s) for fill_s, period_s in drawn]
    splits = [list(counts) for counts in product(range(1, micro_batches + 1), repeat=len(chosen)) if sum(counts) == micro_batches]
    found = split_batch(micro_batches * size, chosen)
    if not splits:
        assert found is None
        return
    assert found is not None
    assert sum(found) == micro_batches
    assert end_s(chosen, found) <= min(end_s(chosen, counts) for counts in splits) * (1 + 1e-9)


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 5)), min_size=1, max_size=4))
def test_sequences_sum_to_the_batch_whenever_they_can(batch: int, drawn: list[tuple[int, float]]) -> None:
    chosen = [Pace(size, 1.0, period_s) for size, period_s in drawn]
    sums = {0}
    for size in [size for size, _ in drawn]:
        sums = {total + size * n for total in sums for n in range(1, batch // size + 1)}
    found = split_batch(batch, chosen)
    assert (found is not None) == (batch in sums)
    if found is not None:
        assert min(found) >= 1
        assert sum(pace.micro_batch * n for pace, n in zip(chosen, found, strict=True)) == batch


def test_a_pipeline_twice_as_fast_takes_twice_as_many() -> None:
    assert split_batch(12, [Pace(1, 0.0, 2.0), Pace(1, 0.0, 1.0)]) == [4, 8]


def test_a_batch_that_the_micro_batch_does_not_divide_has_no_split() -> None:
    assert split_batch(5, [Pace(2, 0.0, 1.0), Pace(2, 0.0, 1.0)]) is None
