"""Collectives and messages as bytes on links, against the closed forms of rings, by hand, and by laws of conservation."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.collectives import _two_trees, across_lanes, between_lanes, collective, dispatch, ring, ring_exchange, slices
from sim.cost.network import NOTHING, Network, Transfer
from sim.spec.cluster import PROTOCOLS, BandwidthMatrix, Cluster, Fabric, Intra, LinkOverride, Nic, Node, links
from sim.spec.gpu import gpu_kind
from sim.spec.transformer import Moe

LOSSLESS = tuple((protocol, 1.0) for protocol in PROTOCOLS)
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
    # Twice round over three of four hops (3, 50, 3 and 50 us), at worst over both that cross.
    assert transfer.latency_s == pytest.approx(2 * (50e-6 + 3e-6 + 50e-6))
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


# --- Algorithms and protocols ----------------------------------------------------------------------------------------

START_S, STEP_S, LATENCY_S, ACROSS_S, ACROSS_STEP_S = 30e-6, 4e-6, 1e-6, 20e-6, 50e-6
RATE, CARD = 400e9, 50e9
HOPPER = "H100-80GB-SXM"


def machines(
    count: int, gpus: int, gpu: str = HOPPER, kind: str = "nvswitch", card_bytes_per_s: float = CARD, nvls: float = 1.0
) -> Network:
    """Lossless nodes n0, n1, ... with a card for each GPU, where starts and steps take their time."""
    intra = Intra(kind, RATE, latency_s=LATENCY_S, step_s=STEP_S)
    nodes = tuple(Node(f"n{i}", gpu_kind(gpu), gpus, intra, Nic("infiniband", card_bytes_per_s, gpus)) for i in range(count))
    efficiency = tuple({**dict(LOSSLESS), "nvls": nvls}.items())
    return Network(Cluster("c", nodes, Fabric(ACROSS_S, 1.0, efficiency, START_S, ACROSS_STEP_S)))


def all_devices(found: Network) -> list[str]:
    return [device.name for device in found.cluster.devices]


def seconds(found: Network, kind: str, names: list[str], num_bytes: float) -> float:
    return found.alone_s(collective(found, kind, names, num_bytes))


def ways_s(count: int, gpus: int, num_bytes: float, switch: bool) -> list[float]:
    """Seconds of every way to all-reduce over lossless nodes, by hand: ring, trees, switch, switches and trees."""
    n = count * gpus
    if count == 1:
        ring_bytes, hops_s, hop_steps_s = 2 * (n - 1) / n * num_bytes / RATE, (n - 1) * LATENCY_S, (n - 1) * STEP_S
    else:
        # As many rings as cards; the longest chain leaves out a hop inside a node.
        inside = n - count - (gpus > 1)
        across = count - (gpus == 1)
        card_s = 2 * (n - 1) / n * num_bytes / gpus / CARD
        # Of all rings together, a GPU sends on its port in all but the one in which it is the last of its node.
        ring_bytes = max(card_s, 2 * (n - 1) / n * num_bytes * (gpus - 1) / gpus / RATE)
        hops_s = inside * LATENCY_S + across * ACROSS_S
        hop_steps_s = inside * STEP_S + across * ACROSS_STEP_S
    found = [START_S + 2 * (hops_s + hop_steps_s) + ring_bytes, START_S + 2 * hops_s + 2 * ring_bytes]
    if switch and count == 1:
        found.append(START_S + 2 * LATENCY_S + 12 * STEP_S + (n + 1) / n * num_bytes / RATE)
    if count == 2:  # two trees of one edge each: a half goes up and a half comes down, on every card
        card_s, climb = num_bytes / gpus / CARD, 2
        local = 2 * (gpus - 1) / gpus * num_bytes / RATE
        latency_s, step_s = 2 * (gpus - 1) * LATENCY_S + climb * ACROSS_S, 2 * (gpus - 1) * STEP_S + climb * ACROSS_STEP_S
        found += [START_S + latency_s + step_s + max(local, card_s), START_S + latency_s + 2 * max(local, card_s)]
        if switch and gpus > 1:
            local = (gpus + 1) / gpus * num_bytes / RATE
            latency_s, step_s = 2 * LATENCY_S + climb * ACROSS_S, 12 * STEP_S + climb * ACROSS_STEP_S
            found.append(START_S + latency_s + step_s + max(local, card_s))
    return found


@given(
    st.sampled_from((1, 2)),
    st.sampled_from((2, 3, 4, 8)),
    st.floats(1, 1e11),
    st.sampled_from(((HOPPER, "nvswitch", True), (HOPPER, "nvlink", False), ("A100-80GB-SXM", "nvswitch", False))),
)
def test_the_way_chosen_is_the_quickest_of_those_there_are(
    count: int, gpus: int, num_bytes: float, node: tuple[str, str, bool]
) -> None:
    found = machines(count, gpus, node[0], node[1])
    expected = min(ways_s(count, gpus, num_bytes, node[2]))
    assert seconds(found, "all_reduce", all_devices(found), num_bytes) == pytest.approx(expected, rel=1e-9)


@given(
    st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.floats(1, 1e11), min_size=2, max_size=6),
)
def test_more_bytes_never_take_less_time_nor_more_than_in_proportion(
    kind: str, count: int, gpus: int, sizes: list[float]
) -> None:
    found = machines(count, gpus)
    names = all_devices(found)
    taken = [(num_bytes, seconds(found, kind, names, num_bytes)) for num_bytes in sorted(sizes)]
    for (less, less_s), (more, more_s) in itertools.pairwise(taken):
        assert less_s <= more_s * (1 + 1e-9)
        assert more_s <= less_s * more / less * (1 + 1e-9) or not less_s


def test_what_was_asked_before_does_not_decide_the_protocol() -> None:
    # By hand, of 8: the flags cost (14 / 8) x bytes / 400 GB/s and save 14 steps of 4 us, so that they pay up to 12.8 MB.
    found = machines(1, 8, "A100-80GB-SXM")
    names = all_devices(found)
    sent = [sum(loads(found, collective(found, "all_reduce", names, size)).values()) / size for size in (1e3, 1e9, 12e6, 13e6)]
    plain = 2 * 8 * 2 * 7 / 8  # out of and into 8 devices
    assert sent == pytest.approx([2 * plain, plain, 2 * plain, plain])


@given(st.floats(0.1, 10))
def test_rounding_chooses_no_algorithm(scale: float) -> None:
    # Of a byte n2's card takes 2.7 at 1.125 GB/s both ways, and around the ring n1's 2.76 at 1.15: 2.4 ns, but for rounding.
    cards = (("ethernet", 2), ("infiniband", 1), ("roce", 1))
    nodes = tuple(
        Node(f"n{i}", gpu_kind("A100-80GB-SXM"), gpus, Intra("nvlink", 12e9 * scale), Nic(kind, 1.25e9 * scale))
        for i, (kind, gpus) in enumerate(cards)
    )
    found = Network(Cluster("c", nodes, Fabric(0.0)))
    around = ring(found, "all_reduce", all_devices(found), 1e6)
    assert loads(found, collective(found, "all_reduce", all_devices(found), 1e6)) == pytest.approx(loads(found, around))


def test_the_switch_sends_every_device_the_sum_of_its_part_and_all_parts_to_all() -> None:
    # Of 8 parts a device gives 8 to their readers, and the sum of its own to the switch: 9/8 of the tensor either way.
    found = machines(1, 8)
    transfer = collective(found, "all_reduce", all_devices(found), 8e9)
    assert list(loads(found, transfer).values()) == pytest.approx(16 * [9e9])
    assert transfer.latency_s == pytest.approx(START_S + 2 * LATENCY_S + 12 * STEP_S)
    slower = machines(1, 8, nvls=0.75)  # of a port's rate: as if it carried a third more
    weighed = loads(slower, collective(slower, "all_reduce", all_devices(slower), 8e9))
    assert list(weighed.values()) == pytest.approx(16 * [12e9])


@pytest.mark.parametrize(
    ("gpu", "kind", "gpus", "collective_kind", "is_by_switch"),
    [
        (HOPPER, "nvswitch", 8, "all_reduce", True),
        ("H200", "nvswitch", 8, "all_reduce", True),
        ("B200", "nvswitch", 8, "all_reduce", True),
        ("A100-80GB-SXM", "nvswitch", 8, "all_reduce", False),
        (HOPPER, "nvlink", 8, "all_reduce", False),
        (HOPPER, "nvswitch", 2, "all_reduce", False),  # 3/2 of the tensor, where a ring moves it once
        (HOPPER, "nvswitch", 8, "all_gather", False),
    ],
)
def test_only_a_switch_from_hopper_on_reduces_by_itself(
    gpu: str, kind: str, gpus: int, collective_kind: str, is_by_switch: bool
) -> None:
    found = machines(1, gpus, gpu, kind)
    moved = loads(found, collective(found, collective_kind, all_devices(found), 1e10))["n0/0>nvlink"]
    rounds = 2 if collective_kind == "all_reduce" else 1
    assert moved == pytest.approx(1e10 * ((gpus + 1) / gpus if is_by_switch else rounds * (gpus - 1) / gpus))


@pytest.mark.parametrize("n", range(2, 34))
def test_two_trees_reach_every_node_and_none_moves_more_than_twice_the_tensor(n: int) -> None:
    edges = _two_trees(n)
    assert len(edges) == 2 * (n - 1)
    received = [0.0] * n
    for child, parent in edges:
        received[parent] += 0.5
        received[child] += 0.5
    assert max(received) <= 2
    for tree in (edges[: n - 1], edges[n - 1 :]):
        parents = dict(tree)
        assert len(parents) == n - 1
        for node in range(n):
            steps = 0
            while node in parents:
                node, steps = parents[node], steps + 1
            assert steps <= math.ceil(math.log2(n))


def test_trees_save_latency_across_many_nodes_and_bytes_across_two() -> None:
    many = machines(64, 1)
    few_bytes = collective(many, "all_reduce", all_devices(many), 1e4)
    assert few_bytes.latency_s == pytest.approx(START_S + 2 * 6 * ACROSS_S)
    two = machines(2, 8)
    crossing = loads(two, collective(two, "all_reduce", all_devices(two), 8e9), "fabric")
    assert len(crossing) == 2 * 2 * 8
    assert list(crossing.values()) == pytest.approx([1e9] * len(crossing))  # a ring would take 2 x 15/16 of 8e9 over 8 cards


def test_trees_join_nodes_of_unequal_numbers_of_devices() -> None:
    # 3 and 2 devices: sixths. Whoever has a slice sends it and gets it back summed, and every card carries its slices.
    found = machines(2, 3, card_bytes_per_s=1e9)
    transfer = collective(found, "all_reduce", ["n0/0", "n0/1", "n0/2", "n1/0", "n1/1"], 6e9)
    out = {name: num_bytes for name, num_bytes in loads(found, transfer).items() if name.endswith(">fabric")}
    assert out == pytest.approx(
        {"n0/nic0>fabric": 2e9, "n0/nic1>fabric": 2e9, "n0/nic2>fabric": 2e9, "n1/nic0>fabric": 3e9, "n1/nic1>fabric": 3e9}
    )


def test_among_cpus_there_are_rings_alone() -> None:
    found = machines(2, 4, "CPU", "nvlink")
    names = all_devices(found)
    for num_bytes in (1.0, 1e10):
        around, taken = ring(found, "all_reduce", names, num_bytes), collective(found, "all_reduce", names, num_bytes)
        assert taken == replace(around, latency_s=taken.latency_s)


def turned_s(kind: str, latencies_s: Sequence[float], steps_s: Sequence[float]) -> float:
    """Seconds of a ring, step by step: who has received a part, and sent the one before, sends it on."""
    n = len(steps_s)
    received_s, sent_s = [0.0] * n, [0.0] * n
    for _ in range((2 if kind == "all_reduce" else 1) * (n - 1)):
        sent_s = [max(received_s[i], sent_s[i]) + steps_s[i] for i in range(n)]
        received_s = [sent_s[i - 1] + latencies_s[i - 1] for i in range(n)]
    return max(received_s)


@given(
    st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")),
    st.lists(st.tuples(st.sampled_from((0.0, 1e-4, 5e-3)) | st.floats(0, 0.1), st.floats(1e6, 1e8)), min_size=2, max_size=8),
    st.floats(1, 1e8),
)
def test_gloos_ring_takes_what_its_steps_take_one_by_one(kind: str, hops: list[tuple[float, float]], num_bytes: float) -> None:
    nodes = tuple(Node(f"n{i}", gpu_kind("CPU"), 1, NVLINK, Nic("ethernet", 1e12)) for i in range(len(hops)))
    slow = tuple(LinkOverride(f"n{i}/nic0>fabric", rate, latency_s) for i, (latency_s, rate) in enumerate(hops))
    found = Network(Cluster("c", nodes, Fabric(1e-4, start_s=0.01, step_s=1e-5), link_overrides=slow))
    steps_s = [num_bytes / len(hops) / rate for _, rate in hops]
    expected_s = 0.01 + turned_s(kind, [1.1e-4 + latency_s for latency_s, _ in hops], steps_s)
    assert seconds(found, kind, all_devices(found), num_bytes) == pytest.approx(expected_s, rel=1e-8)


def test_two_rings_of_gloo_share_their_links_and_the_slower_counts() -> None:
    # Two lanes of two: a ring between the first devices, and one between the second ones, over the same cards.
    nodes = tuple(Node(name, gpu_kind("CPU"), 2, NVLINK, Nic("ethernet", 1e6)) for name in "ab")
    found = Network(Cluster("c", nodes, Fabric(0.5, protocol_efficiency=LOSSLESS)))
    transfer = across_lanes(found, "all_gather", [devices("a", 2), devices("b", 2)], 4e6)
    assert found.busiest_s(transfer) == pytest.approx(2.0)
    assert found.alone_s(transfer) == pytest.approx(2.5)


def test_the_latencies_of_quick_hops_hide_behind_the_bytes_of_a_slow_one() -> None:
    # Three steps of a ring of four. By hand: of 4 MB, 1 s over a's card and 1 ms over the others, with latencies of 0.1 s.
    nodes = tuple(Node(name, gpu_kind("CPU"), 1, NVLINK, Nic("ethernet", 1e9)) for name in "abcd")
    slow = (LinkOverride("a/nic0>fabric", 1e6, None),)
    found = Network(Cluster("c", nodes, Fabric(0.1, protocol_efficiency=LOSSLESS), link_overrides=slow))
    names = all_devices(found)
    assert seconds(found, "all_gather", names, 4e6) == pytest.approx(3 * 1.0 + 0.1)
    # Of 80 kB 20 ms, less than a latency: each step waits for it.
    assert seconds(found, "all_gather", names, 8e4) == pytest.approx(3 * 0.1 + 0.02 + 2 * 2e-5)


def test_an_all_to_all_sends_every_other_device_its_part_at_once() -> None:
    two = machines(2, 2)
    transfer = collective(two, "all_to_all", all_devices(two), 400.0, count=3)
    expected = dict.fromkeys((f"n{i}/{j}>nvlink" for i in (0, 1) for j in (0, 1)), 3 * 100.0)
    expected |= dict.fromkeys((f"n{i}/nic{j}>fabric" for i in (0, 1) for j in (0, 1)), 3 * 200.0)
    found = loads(two, transfer)
    assert {name: num_bytes for name, num_bytes in found.items() if name in expected} == pytest.approx(expected)
    assert transfer.num_bytes == pytest.approx(3 * 4 * 300)
    assert transfer.latency_s == pytest.approx(3 * (START_S + ACROSS_S + 3 * ACROSS_STEP_S))


def test_tokens_go_to_their_experts_once_each_or_once_a_node() -> None:
    """Against all choices that a token may make, message by message."""
    found, group, experts = network(2, names="ab"), ["a/0", "a/1", "b/0", "b/1"], Moe(experts=8, top_k=3, ffn=1)
    each, once = (dispatch(found, [("a/1", group)], experts, way) for way in (False, True))
    choices = list(itertools.combinations(range(8), 3))  # experts 2 i and 2 i + 1 are on device i
    crossing, inside, copies = 0, 0, 0
    for chosen in choices:
        to_node, to_neighbour, sent_on = any(e >= 4 for e in chosen), any(e < 2 for e in chosen), any(e in (4, 5) for e in chosen)
        crossing += to_node  # to its like there, b/1
        inside += to_neighbour + sent_on
        copies += sum(e not in (2, 3) for e in chosen)
    copy = 1 / 3 / len(choices)  # of a byte of a token's three copies
    assert once.num_bytes == pytest.approx((crossing + inside) * copy)
    assert loads(found, once, "nic") == pytest.approx({"a/nic0>fabric": crossing * copy, "fabric>b/nic0": crossing * copy})
    assert each.num_bytes == pytest.approx(copies * copy)
    assert sum(loads(found, each, "a/nic0>").values()) == pytest.approx(sum(e >= 4 for c in choices for e in c) * copy)
    assert once.latency_s == each.latency_s


def test_keys_and_values_go_round_a_ring_in_as_many_messages_as_steps() -> None:
    found = machines(1, 4)
    transfer = ring_exchange(found, ["n0/2", "n0/0", "n0/1", "n0/3"], 100.0, 3)
    assert list(loads(found, transfer).values()) == pytest.approx(8 * [300.0])
    assert transfer.latency_s == pytest.approx(3 * (START_S + LATENCY_S + STEP_S))
    assert ring_exchange(found, ["n0/0"], 100.0, 3) == NOTHING
    assert ring_exchange(found, ["n0/0", "n0/1"], 100.0, 0) == NOTHING


def test_every_collective_and_message_has_its_start() -> None:
    found = machines(1, 4, "A100-80GB-SXM")
    names = all_devices(found)
    assert collective(found, "all_gather", names, 1.0, 5).latency_s == pytest.approx(5 * (START_S + 3 * LATENCY_S))
    sent = between_lanes(found, names[:1], names[1:2], 1.0, sequence_parallel=False)
    assert sent.latency_s == pytest.approx(START_S + LATENCY_S + STEP_S)


# --- Published measurements ------------------------------------------------------------------------------------------

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("gpu", "intra", "gpus", "kind", "num_bytes", "measured_s", "tolerance"),
    [
        # ml-engineering, network/README.md: bus bandwidths, and 43.83 us
        ("A100-80GB-SXM", "nvswitch", 8, "all_reduce", 16 * GIB, 1.75 * 16 * GIB / 234.89e9, 0.05),
        ("A100-80GB-SXM", "nvswitch", 8, "all_reduce", 32_768, 43.83e-6, 0.10),
        ("H200", "nvswitch", 8, "all_reduce", 16 * GIB, 1.75 * 16 * GIB / 482.26e9, 0.08),
        ("H200", "nvswitch", 8, "all_reduce", 64 * MIB, 1.75 * 64 * MIB / 346.51e9, 0.08),
        ("H200", "nvswitch", 8, "all_gather", 16 * GIB, 0.875 * 16 * GIB / 361.4e9, 0.08),
        # vTrain, trace/a100: AR_GPU2 and AR_GPU4 of 256 MiB
        ("A100-80GB-SXM", "nvswitch", 2, "all_reduce", 256 * MIB, 256 * MIB / 184.39e9, 0.25),
        ("A100-80GB-SXM", "nvswitch", 4, "all_reduce", 256 * MIB, 1.5 * 256 * MIB / 208.73e9, 0.12),
        # tinygrad, open-gpu-kernel-modules 22
        ("RTX4090", "pcie4", 4, "all_reduce", 64 * MIB, 1.5 * 64 * MIB / 12.76e9, 0.10),
    ],
)
def test_the_constants_give_published_times(
    gpu: str, intra: str, gpus: int, kind: str, num_bytes: float, measured_s: float, tolerance: float
) -> None:
    rate = gpu_kind(gpu).nvlink_bytes_per_s or 24e9
    inside = Intra(intra, rate, latency_s=links().latency_s[intra], step_s=links().step_s)
    found = Network(Cluster("c", (Node("a", gpu_kind(gpu), gpus, inside),), Fabric(start_s=links().start_s)))
    assert seconds(found, kind, all_devices(found), num_bytes) == pytest.approx(measured_s, rel=tolerance)


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
