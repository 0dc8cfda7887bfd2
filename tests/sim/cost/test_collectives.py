"""Collectives and messages as bytes on links, against the closed forms of rings, by hand, and by laws of conservation."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.collectives import across_lanes, between_lanes, ring, slices
from sim.cost.network import NOTHING, Network, Transfer
from sim.spec.cluster import PROTOCOL_EFFICIENCY, BandwidthMatrix, Cluster, Fabric, Intra, Nic, Node
from sim.spec.gpu import gpu_kind

LOSSLESS = tuple((protocol, 1.0) for protocol in PROTOCOL_EFFICIENCY)
NVLINK = Intra("nvlink", 300e9, latency_s=3e-6)
ONE_SWITCH = Intra("pcie4", 24e9, gpus_per_switch=16, sockets=1, latency_s=6e-6)
"""All that comes to a GPU, from its node or from others, comes over one link."""


def network(gpus: int, nics: int = 1, intra: Intra = NVLINK, names: str = "abc", pairs: bool = False) -> Network:
    """Equal nodes; `pairs` gives every pair of devices a link of its own, `a/0=>b/1`, to see what goes between them."""
    nodes = tuple(Node(name, gpu_kind("RTX4090"), gpus, intra, Nic("roce", 10e9, nics)) for name in names)
    devices = tuple(f"{name}/{i}" for name in names for i in range(gpus))
    rates = tuple(tuple(math.inf if a == b else 1e12 for b in devices) for a in devices)
    matrix = BandwidthMatrix(devices, rates) if pairs else None
    return Network(Cluster("c", nodes, Fabric(50e-6, protocol_efficiency=LOSSLESS), (), matrix))


def loads(found: Network, transfer: Transfer, having: str = "") -> dict[str, float]:
    """Bytes by the name of the link, of the links whose name holds a text."""
    by_name = {found.links[link].name: num_bytes for link, num_bytes in transfer.loads}
    return {name: num_bytes for name, num_bytes in sorted(by_name.items()) if having in name}


def devices(node: str, count: int, first: int = 0) -> list[str]:
    return [f"{node}/{first + i}" for i in range(count)]


# --- Rings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("kind", "rounds"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_ring_puts_n_minus_1_parts_of_n_on_every_link_in_each_round(n: int, kind: str, rounds: int) -> None:
    inside = network(8)
    transfer = ring(inside, kind, devices("a", n), 1000.0)
    ports = [*(f"a/{i}>nvlink" for i in range(n)), *(f"nvlink>a/{i}" for i in range(n))]
    assert loads(inside, transfer) == pytest.approx({port: rounds * (n - 1) / n * 1000 for port in ports})
    assert transfer.latency_s == pytest.approx(rounds * (n - 1) * 3e-6)
    assert inside.alone_s(ring(inside, kind, devices("a", n), 300e9)) == pytest.approx(
        rounds * ((n - 1) / n + (n - 1) * 3e-6), rel=1e-12
    )


def test_several_rings_in_turn_take_as_often_the_bytes_and_latencies() -> None:
    inside = network(4)
    three = ring(inside, "all_gather", devices("a", 4), 1000.0, count=3)
    assert set(loads(inside, three).values()) == {3 * 750}
    assert three.latency_s == pytest.approx(3 * 3 * 3e-6)


def test_a_ring_of_one_device_or_of_no_bytes_is_nothing() -> None:
    inside = network(4)
    assert ring(inside, "all_reduce", ["a/0"], 1000) == NOTHING
    assert ring(inside, "all_reduce", devices("a", 4), 0) == NOTHING
    assert ring(inside, "all_reduce", devices("a", 4), 1000, count=0) == NOTHING


@pytest.mark.parametrize("order", ["a/0 a/1 b/0 b/1", "a/0 b/0 a/1 b/1", "b/1 a/1 a/0 b/0"])
def test_a_ring_over_two_nodes_crosses_each_nic_once_whatever_the_order_given(order: str) -> None:
    two = network(4)
    transfer = ring(two, "all_reduce", order.split(), 1000.0)
    crossing = {"a/nic0>fabric": 1500, "b/nic0>fabric": 1500, "fabric>a/nic0": 1500, "fabric>b/nic0": 1500}
    assert loads(two, transfer, "fabric") == pytest.approx(crossing)
    assert transfer.latency_s == pytest.approx(6 * 50e-6)
    assert sum(loads(two, transfer, "nvlink").values()) == pytest.approx(2 * 2 * 1500)


@pytest.mark.parametrize("nics", [1, 2, 4, 8])
def test_a_ring_over_nodes_of_several_nics_spreads_evenly_over_them(nics: int) -> None:
    three = network(8, nics)
    transfer = ring(three, "all_reduce", [*devices("a", 8), *devices("b", 8), *devices("c", 8)], 2400.0)
    fabric = loads(three, transfer, "fabric")
    assert len(fabric) == 3 * 2 * nics
    assert list(fabric.values()) == pytest.approx([2 * 23 / 24 * 2400 / nics] * len(fabric))


def test_as_many_rings_are_turned_as_the_node_with_the_fewest_nics_has() -> None:
    two = network(8, 8)
    transfer = ring(two, "all_gather", [*devices("a", 8), *devices("b", 2)], 1000.0)  # of b only NIC 0 and NIC 1
    fabric = loads(two, transfer, "fabric")
    assert {name: num_bytes for name, num_bytes in fabric.items() if "b/" in name} == pytest.approx(
        {name: 450 for name in ("b/nic0>fabric", "b/nic1>fabric", "fabric>b/nic0", "fabric>b/nic1")}
    )
    assert sum(num_bytes for name, num_bytes in fabric.items() if name.startswith("a/")) == pytest.approx(900)


# --- Collectives over lanes ------------------------------------------------------------------------------------------


def test_the_slices_of_degrees_4_2_and_1_are_quarters() -> None:
    assert slices([4, 2, 1]) == [(0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 4, 4)]
    assert slices([2, 3]) == [(0, 2, 6), (2, 3, 6), (3, 4, 6), (4, 6, 6)]
    assert slices([1, 1]) == [(0, 1, 1)]


def test_lanes_of_degrees_4_2_and_1_reduce_in_quarters() -> None:
    # Tensor of 1200 bytes, slices of 300. Lane a: one device each; lane b: b/0 has slices 0 and 1, b/1 has 2 and 3; c/0 has
    # all. Every slice is a ring of three: 2 x 2/3 x 300 = 400 bytes leave and reach each of its devices.
    three = network(4, intra=ONE_SWITCH, pairs=True)
    transfer = across_lanes(three, "all_reduce", [devices("a", 4), devices("b", 2), devices("c", 1)], 1200.0)
    expected = {f"a/{i}=>b/{i // 2}": 400.0 for i in range(4)}
    expected |= {f"b/{i}=>c/0": 800.0 for i in range(2)} | {f"c/0=>a/{i}": 400.0 for i in range(4)}
    assert loads(three, transfer, "=>") == pytest.approx(expected)
    assert transfer.latency_s == pytest.approx(4 * 50e-6)
    assert loads(three, transfer, ">fabric") == pytest.approx({f"{name}/nic0>fabric": 1600 for name in "abc"})


@given(
    st.lists(st.sampled_from((1, 2, 3, 4)), min_size=2, max_size=4),
    st.sampled_from((("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1))),
    st.floats(1, 1e12),
)
def test_every_device_moves_its_share_of_the_tensor_whatever_the_degrees(
    degrees: list[int], kind: tuple[str, int], num_bytes: float
) -> None:
    inside = network(16, names="a")
    firsts = itertools.accumulate(degrees, initial=0)
    lanes = [devices("a", degree, first) for degree, first in zip(degrees, firsts, strict=False)]
    transfer = across_lanes(inside, kind[0], lanes, num_bytes)
    n, found = len(lanes), loads(inside, transfer)
    for lane in lanes:
        for device in lane:
            share = kind[1] * (n - 1) / n * num_bytes / len(lane)
            assert found[f"{device}>nvlink"] == pytest.approx(share) and found[f"nvlink>{device}"] == pytest.approx(share)
    assert sum(found.values()) == pytest.approx(2 * kind[1] * (n - 1) * num_bytes)
    assert transfer.latency_s == pytest.approx(kind[1] * (n - 1) * 3e-6)
    assert transfer.num_bytes == pytest.approx(kind[1] * (n - 1) * num_bytes)


def test_a_collective_of_one_lane_or_of_no_bytes_is_nothing() -> None:
    inside = network(4)
    assert not across_lanes(inside, "all_reduce", [devices("a", 4)], 1000)
    assert not across_lanes(inside, "all_reduce", [devices("a", 2), devices("b", 2)], 0)


def test_a_collective_does_not_depend_on_those_asked_for_before() -> None:
    fresh, used = network(4), network(4)
    lanes = [devices("a", 2), devices("b", 1)]
    across_lanes(used, "all_gather", lanes, 5.0)
    across_lanes(used, "all_reduce", lanes, 5.0)
    ring(used, "all_reduce", ["a/0", "b/0"], 7.0, 3)
    found = across_lanes(used, "all_reduce", lanes, 11.0)
    expected = across_lanes(fresh, "all_reduce", lanes, 11.0)
    assert loads(used, found) == pytest.approx(loads(fresh, expected))
    assert (found.latency_s, found.num_bytes) == pytest.approx((expected.latency_s, expected.num_bytes))


# --- Messages between lanes ------------------------------------------------------------------------------------------


def test_equal_degrees_send_a_part_each_and_gather_it_behind_the_nic() -> None:
    # 4 devices each send a quarter of 1000 bytes; each receiver then gathers the other three quarters from its neighbour.
    two = network(4, pairs=True)
    transfer = between_lanes(two, devices("a", 4), devices("b", 4), 1000.0, sequence_parallel=False)
    sent = {f"a/{i}=>b/{i}": 250.0 for i in range(4)}
    gathered = {f"b/{i}=>b/{(i + 1) % 4}": 750.0 for i in range(4)}
    assert loads(two, transfer, "=>") == pytest.approx(sent | gathered)
    assert loads(two, transfer, "fabric") == pytest.approx({"a/nic0>fabric": 1000, "fabric>b/nic0": 1000})
    assert transfer.latency_s == pytest.approx(50e-6 + 3 * 3e-6)


def test_unequal_degrees_share_the_sending_and_the_receiving() -> None:
    two = network(4, pairs=True)
    wide = between_lanes(two, devices("a", 1), devices("b", 4), 1000.0, sequence_parallel=False)
    assert loads(two, wide, "a/") == pytest.approx({"a/nic0>fabric": 1000} | {f"a/0=>b/{i}": 250 for i in range(4)})
    narrow = between_lanes(two, devices("a", 4), devices("b", 1), 1000.0, sequence_parallel=False)
    assert loads(two, narrow, "=>") == pytest.approx({f"a/{i}=>b/0": 250 for i in range(4)})
    assert narrow.latency_s == 50e-6
    crossed = between_lanes(two, devices("a", 2), devices("b", 3), 1200.0, sequence_parallel=False)
    assert loads(two, crossed, "=>b") == pytest.approx(
        {f"a/{i}=>b/{j}": 200 for i in range(2) for j in range(3)} | {f"b/{j}=>b/{(j + 1) % 3}": 800 for j in range(3)}
    )


def test_a_message_inside_a_node_never_leaves_it() -> None:
    inside = network(4)
    transfer = between_lanes(inside, ["a/0"], ["a/2", "a/3"], 1000.0, sequence_parallel=False)
    assert loads(inside, transfer) == pytest.approx(
        {"a/0>nvlink": 1000, "nvlink>a/2": 1000, "nvlink>a/3": 1000, "a/2>nvlink": 500, "a/3>nvlink": 500}
    )
    assert transfer.latency_s == pytest.approx(2 * 3e-6)


def test_each_of_several_receiving_nodes_gets_every_byte_once_and_they_gather_at_once() -> None:
    three = network(4)
    receivers = [*devices("b", 2), *devices("c", 2)]
    transfer = between_lanes(three, devices("a", 4), receivers, 1000.0, sequence_parallel=False)
    assert loads(three, transfer, "fabric") == pytest.approx(
        {"a/nic0>fabric": 2000, "fabric>b/nic0": 1000, "fabric>c/nic0": 1000}
    )
    assert loads(three, transfer, "nvlink>") == pytest.approx({f"nvlink>{device}": 500 for device in receivers})
    assert transfer.latency_s == pytest.approx(50e-6 + 3e-6)


def test_with_sequence_parallelism_every_device_gets_its_own_part_only() -> None:
    two = network(4, pairs=True)
    equal = between_lanes(two, devices("a", 4), devices("b", 4), 1000.0, sequence_parallel=True)
    assert loads(two, equal, "=>") == pytest.approx({f"a/{i}=>b/{i}": 250 for i in range(4)})
    # Halves to thirds: a/0 has [0, 1/2), of which b/0 needs [0, 1/3) and b/1 [1/3, 1/2).
    uneven = between_lanes(two, devices("a", 2), devices("b", 3), 1200.0, sequence_parallel=True)
    assert loads(two, uneven, "=>") == pytest.approx({"a/0=>b/0": 400, "a/0=>b/1": 200, "a/1=>b/1": 200, "a/1=>b/2": 400})
    assert uneven.latency_s == 50e-6
    one = between_lanes(two, devices("a", 1), devices("b", 4), 1000.0, sequence_parallel=True)
    assert loads(two, one, "=>") == pytest.approx({f"a/0=>b/{i}": 250 for i in range(4)})


@given(st.integers(1, 6), st.integers(1, 6), st.floats(1, 1e12), st.booleans(), st.booleans())
def test_all_bytes_arrive_and_no_byte_crosses_the_slow_link_twice(
    senders: int, receivers: int, num_bytes: float, sequence_parallel: bool, same_node: bool
) -> None:
    two = network(12, intra=ONE_SWITCH, names="ab")
    receiving = devices("a", receivers, 6) if same_node else devices("b", receivers)
    transfer = between_lanes(two, devices("a", senders), receiving, num_bytes, sequence_parallel)
    needed = num_bytes / receivers if sequence_parallel else num_bytes
    found = loads(two, transfer)
    for device in receiving:
        assert found[f"pcie>{device}"] == pytest.approx(needed)
    for device in devices("a", senders):
        assert found[f"{device}>pcie"] == pytest.approx(num_bytes / senders)
    crossing = {} if same_node else {"a/nic0>fabric": num_bytes, "fabric>b/nic0": num_bytes}
    assert loads(two, transfer, "fabric") == pytest.approx(crossing)


def test_a_node_that_has_the_activation_already_gets_it_from_itself() -> None:
    # A group that spans nodes a and b sends to one on a: the copy at a/0 goes there, and no byte crosses a card.
    found = network(gpus=2)
    transfer = between_lanes(found, ["a/0", "b/0"], ["a/1"], 600.0, sequence_parallel=False)
    assert loads(found, transfer) == {"a/0>nvlink": 600, "nvlink>a/1": 600}
