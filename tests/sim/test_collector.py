"""The garbage collector held back, and as before again, whatever ends what it was held back for."""

from __future__ import annotations

import gc

import pytest

from sim.collector import garbage_collected_seldom, garbage_collector_paused


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def kept_and_dropped() -> int:
    """Full collections while many objects are made that stay, and some that go."""
    before = full_collections()
    kept = [[n] for n in range(200_000)]
    for _ in range(100_000):
        cycle: list[object] = []
        cycle.append(cycle)
    return full_collections() - before + len(kept) - 200_000


def test_full_collections_are_rare_and_young_garbage_is_not_kept() -> None:
    usual = kept_and_dropped()
    young = gc.get_stats()[0]["collected"]
    with garbage_collected_seldom():
        assert kept_and_dropped() < max(usual, 1)
    assert gc.get_stats()[0]["collected"] > young


def test_all_is_as_before_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), garbage_collected_seldom(), garbage_collector_paused():
        assert gc.get_threshold() != before
        assert not gc.isenabled()
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.isenabled()
