"""Starts and the moves between layouts against what layouts are: every GPU once, groups of legal degrees inside nodes."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.deals import Layout
from partition.drafts import degrees
from partition.graph import DeviceGraph
from partition.moves import Moves
from partition.starts import Starts, twins
from sim.cost.network import Network
from sim.spec.cluster import Cluster
from tests.partition.small_worlds import cluster, job, node
from tests.partition.test_deals import deals_of, worlds


def starts_of(world: Cluster, seed: int = 0) -> Starts:
    return Starts(world, job(batch=64), world.nodes, DeviceGraph(Network(world), world.nodes), deals_of(world), seed)


def moves_of(world: Cluster, seed: int) -> Moves:
    devices = [device.name for device in world.devices]
    return Moves(world, job(batch=64), devices, deals_of(world), np.random.default_rng(seed))


def check_legal(layout: Layout, world: Cluster) -> None:
    """The laws of a layout that every planner below it relies on."""
    stand = Counter(name for pipeline in layout.pipelines for group in pipeline for name in group)
    assert set(stand.values()) == {1} and set(stand) <= {device.name for device in world.devices}
    legal = set(degrees(job(batch=64), 8))
    for pipeline in layout.pipelines:
        assert 1 <= len(pipeline) <= job(batch=64).model.layers
        for group in pipeline:
            assert len(group) in legal and len({world.device(name).node.name for name in group}) == 1


@settings(deadline=None, max_examples=30)
@given(worlds)
def test_starts_are_legal_and_come_once_and_in_the_same_order(world: Cluster) -> None:
    first = list(islice(starts_of(world), 60))
    assert first and len(set(first)) == len(first)
    for layout in first:
        check_legal(layout, world)
    assert first == list(islice(starts_of(world), 60))


@settings(deadline=None, max_examples=60)
@given(worlds, st.integers(0, 2**32), st.integers(0, 59))
def test_layouts_stay_legal_whatever_moves_and_the_seed_says_how(world: Cluster, seed: int, number: int) -> None:
    starts = list(islice(starts_of(world), 60))
    walks: list[list[Layout]] = []
    for _ in range(2):
        moves, walk = moves_of(world, seed), [starts[number % len(starts)]]
        for _ in range(40):
            walk.append(moves.moved(walk[-1]) or walk[-1])
            check_legal(walk[-1], world)
        walks.append(walk)
    assert walks[0] == walks[1]


def test_moves_lead_from_one_pipeline_of_all_to_every_number_of_pipelines_and_to_some_of_the_gpus() -> None:
    world = cluster(node("a", "RTX4090", 4), node("b", "RTX3090", 4))
    moves, layout = moves_of(world, 0), next(iter(starts_of(world)))
    pipelines, used = set(), set()
    for _ in range(4000):
        layout = moves.moved(layout) or layout
        pipelines.add(len(layout.pipelines))
        used.add(sum(len(group) for pipeline in layout.pipelines for group in pipeline))
    assert pipelines == used == set(range(1, 9))


def test_as_many_pipelines_as_groups_are_among_their_numbers() -> None:
    assert twins(5) == [1, 2, 3, 4, 5] and twins(1) == [1] and twins(300)[-2:] == [256, 300]
