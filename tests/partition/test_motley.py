"""Motley's own planner where the contract of all planners does not look: clusters that it searches by their parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from partition.drafts import usable_nodes
from partition.planners.motley import Layout, _Hunt
from partition.search import BudgetSpent, Search, plan
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from tests.partition.small_worlds import cluster, job, node


def large() -> Cluster:
    return cluster(*(node(f"{kind}-{n}", kind, 8) for n in range(8) for kind in ("RTX4090", "RTX3090")))


def test_what_is_found_for_a_part_stands_on_every_gpu_of_all_parts_once() -> None:
    world = large()
    search = Search(world, job(batch=64), simulation(world, job(batch=64), 0), 0, 4.0)
    hunt = _Hunt(search, usable_nodes(search))
    layouts: list[Layout] = list(hunt._copied(hunt._parted()))
    assert hunt._parted() == [2, 4]
    assert layouts
    for layout in layouts:
        used = [name for pipe in layout.pipelines for group in pipe for name in group]
        assert len(used) == len(set(used))
        assert set(used) <= {device.name for device in world.devices}
        assert len(layout.pipelines) % 2 == 0


def test_a_part_whose_time_is_spent_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = _Hunt.begin
    parts: list[int] = []

    def spent(hunt: _Hunt) -> None:
        if hunt.whole is None:
            begin(hunt)
        else:
            parts.append(len(hunt.whole.parts))
            raise BudgetSpent

    monkeypatch.setattr(_Hunt, "begin", spent)
    found = plan(large(), job(batch=64), "motley", budget_s=3.0)
    assert parts == [2, 4]
    assert found.cost is not None
    assert found.judged > 1


def test_a_cluster_of_different_nodes_has_no_parts() -> None:
    def nodes() -> Iterator[Cluster]:
        yield cluster(*(node(f"n{n}", "RTX4090", 8) for n in range(4)))
        yield cluster(*(node(f"n{n}", "RTX4090", 8) for n in range(13)))  # 13 cannot be divided

    for world in nodes():
        search = Search(world, job(batch=64), simulation(world, job(batch=64), 0), 0, 1.0)
        assert _Hunt(search, usable_nodes(search))._parted() == []
