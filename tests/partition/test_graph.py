"""The device graph: what METIS cuts, how a node is divided, which way a pipeline takes."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from partition.graph import DeviceGraph
from sim.cost.network import Network
from sim.spec.cluster import Cluster, Fabric, LinkOverride, Nic, read_cluster
from tests.partition.small_worlds import cluster, node

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def graph(world: Cluster) -> DeviceGraph:
    return DeviceGraph(Network(world), world.nodes)


def test_two_parts_of_two_equal_nodes_are_the_nodes() -> None:
    found = graph(cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 4)))
    parts = found.partition(found.devices, 2, [1.0] * 8, seed=3)
    assert sorted(parts) == [["a/0", "a/1", "a/2", "a/3"], ["b/0", "b/1", "b/2", "b/3"]]


def test_heavy_devices_are_balanced_by_many_light_ones() -> None:
    found = graph(cluster(node("a", "A100-80GB-SXM", 1), node("b", "RTX3090", 4)))
    parts = found.partition(found.devices, 2, [4.0, 1.0, 1.0, 1.0, 1.0], seed=0)
    assert sorted(parts) == [["a/0"], ["b/0", "b/1", "b/2", "b/3"]]


def test_the_same_seed_gives_the_same_parts() -> None:
    found = graph(cluster(*(node(f"n{i}", "RTX4090", 3) for i in range(5))))
    weights = [1.0 + i % 3 for i in range(15)]
    assert found.partition(found.devices, 4, weights, 7) == found.partition(found.devices, 4, weights, 7)


def test_every_device_is_in_one_part() -> None:
    found = graph(cluster(*(node(f"n{i}", "RTX4090", 8) for i in range(16))))  # large enough for the sparse graph
    parts = found.partition(found.devices, 5, [1.0] * 128, seed=1)
    assert sorted(name for part in parts for name in part) == sorted(found.devices)


def test_what_metis_says_of_parts_that_stay_empty_is_not_in_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    here, lots = graph(cluster(node("a", "RTX4090", 8))), random.Random(0)
    for parts in range(2, 8):
        for _ in range(20):
            found = here.partition(here.devices, parts, [lots.choice([1.0, 1.0, 50.0, 1000.0]) for _ in here.devices], 0)
            assert sorted(name for part in found for name in part) == sorted(here.devices)
    ctypes.CDLL(None).fflush(None)
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_as_many_parts_as_devices_are_single_devices() -> None:
    found = graph(cluster(node("a", "RTX4090", 2)))
    assert found.partition(found.devices, 2, [1.0, 1.0], 0) == [["a/0"], ["a/1"]]


def test_tensor_groups_lie_under_one_pcie_switch() -> None:
    found = graph(cluster(node("a", "RTX4090", 8)))
    assert found.tensor_groups(found.devices, 4, seed=0) == [
        ("a/0", "a/1", "a/2", "a/3"),
        ("a/4", "a/5", "a/6", "a/7"),
    ]
    pairs = found.tensor_groups(found.devices, 2, seed=0)
    assert len(pairs) == 4
    assert all(int(a[-1]) // 4 == int(b[-1]) // 4 for a, b in pairs)


def test_devices_that_fill_no_group_are_left_over() -> None:
    found = graph(cluster(node("a", "RTX4090", 3)))
    assert found.tensor_groups(found.devices, 2, seed=0) == [("a/0", "a/1")]


def test_the_path_avoids_the_slow_link() -> None:
    # b has a NIC of 1 Gbit/s, so that it stands at an end of a path on which a and c are neighbours.
    slow = replace(node("b", "RTX4090", 1), nic=Nic("ethernet", 0.125e9))
    found = graph(Cluster("w", (node("a", "RTX4090", 1), slow, node("c", "RTX4090", 1)), Fabric(0.0)))
    order = found.path(["a", "b", "c"], {"a": 1.0, "b": 1.0, "c": 1.0})
    assert order in (["a", "c", "b"], ["b", "a", "c"], ["c", "a", "b"], ["b", "c", "a"])


def test_nodes_with_more_memory_come_first_where_links_are_equal() -> None:
    found = graph(cluster(*(node(name, "RTX4090", 1) for name in "abc")))
    assert found.path(["a", "b", "c"], {"a": 1.0, "b": 3.0, "c": 2.0}) == ["b", "c", "a"]


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_rates_are_those_of_the_paths_in_both_directions(path: Path) -> None:
    world = read_cluster(path)
    world = world.with_nodes(world.nodes[:6], world.wan, None) if world.bandwidth_matrix is None else world
    network = Network(world)
    found = graph(world)
    for a, b in combinations(found.devices, 2):
        rates = [network.links[link].capacity_bytes_per_s / w for way in ((a, b), (b, a)) for link, w in network.path(*way).links]
        assert found.bandwidth_bytes_per_s(a, b) == found.bandwidth_bytes_per_s(b, a) == min(rates)


def test_a_link_of_another_rate_is_told_apart_from_those_of_nodes_that_are_alike() -> None:
    world = cluster(*(node(f"n{i}", "RTX4090", 2) for i in range(4)))
    slow = LinkOverride("n2/nic0>fabric", bandwidth_bytes_per_s=1e8)
    found = graph(replace(world, link_overrides=(slow,)))
    assert found.bandwidth_bytes_per_s("n2/0", "n3/0") == pytest.approx(1e8)
    assert found.bandwidth_bytes_per_s("n0/0", "n3/0") > 1e9


def test_a_large_graph_joins_what_is_in_one_node_and_the_first_of_each() -> None:
    found = graph(cluster(*(node(f"n{i}", "RTX4090", 8) for i in range(16))))
    asked = found.devices[3:]  # of the first node its last five, none of which is its first
    at = dict(zip(asked, found._joined(asked), strict=True))
    assert list(at["n0/5"]) == [f"n0/{i}" for i in range(3, 8)]
    assert list(at["n1/2"]) == [f"n1/{i}" for i in range(8)]
    assert list(at["n1/0"]) == [*[f"n1/{i}" for i in range(8)], *[f"n{i}/0" for i in range(2, 16)]]


def test_a_path_begins_with_a_heavy_node_and_takes_the_fast_links_first() -> None:
    fast = Nic("ethernet", 12.5e9)
    nodes = [node("a", "RTX3090", 1), *(replace(node(n, "RTX4090", 1), nic=fast) for n in "bc"), node("d", "RTX3090", 1)]
    assert graph(cluster(*nodes)).path(list("abcd"), {"a": 1.0, "b": 2.0, "c": 2.0, "d": 1.0}) == list("bcad")
