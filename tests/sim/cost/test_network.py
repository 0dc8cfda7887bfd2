"""Paths between devices, worked out by hand. All protocols are lossless here, so that the rates are round."""

from dataclasses import replace

import pytest

from sim.cost.network import NOTHING, Network, Transfer, scaled, together
from sim.spec.cluster import PROTOCOLS, BandwidthMatrix, Cluster, Fabric, Intra, Nic, Node, WideAreaLink, links
from sim.spec.gpu import gpu_kind
from sim.spec.reading import InputError

LOSSLESS = tuple((protocol, 1.0) for protocol in PROTOCOLS)
FABRIC = Fabric(latency_s=50e-6, protocol_efficiency=LOSSLESS)
GPU = gpu_kind("RTX4090")
NVLINK = Intra("nvlink", 300e9, latency_s=3e-6)
PCIE = Intra("pcie4", 24e9, gpus_per_switch=4, sockets=2, host_bandwidth_bytes_per_s=16e9, latency_s=6e-6)


def node(
    name: str, gpus: int = 8, intra: Intra = NVLINK, nic: Nic | None = None, rack: str | None = None, site: str = ""
) -> Node:
    return Node(name, GPU, gpus, intra, nic or Nic("ethernet", 1e9), site, rack)


def network(
    *nodes: Node, fabric: Fabric = FABRIC, wan: tuple[WideAreaLink, ...] = (), matrix: BandwidthMatrix | None = None
) -> Network:
    return Network(Cluster("c", nodes, fabric, wan, matrix))


def path(found: Network, sender: str, receiver: str) -> dict[str, float]:
    """The links of a path in order, with their capacity in GB/s for each byte sent."""
    links = found.path(sender, receiver).links
    return {found.links[link].name: found.links[link].capacity_bytes_per_s / weight / 1e9 for link, weight in links}


# --- Inside a node ---------------------------------------------------------------------------------------------------


def test_nvlink_gives_every_gpu_a_port_in_each_direction() -> None:
    inside = network(node("a"))
    assert path(inside, "a/0", "a/5") == {"a/0>nvlink": 300, "nvlink>a/5": 300}
    assert inside.path("a/0", "a/5").latency_s == 3e-6
    back, other = path(inside, "a/5", "a/0"), path(inside, "a/1", "a/2")
    assert not set(path(inside, "a/0", "a/5")) & (set(back) | set(other))


def test_gpus_under_one_pcie_switch_share_nothing_but_their_own_links() -> None:
    inside = network(node("a", intra=PCIE))
    assert path(inside, "a/0", "a/3") == {"a/0>pcie": 24, "pcie>a/3": 24}
    assert inside.path("a/0", "a/3").latency_s == 6e-6


def test_switches_of_one_socket_are_joined_by_their_uplinks() -> None:
    inside = network(node("a", intra=replace(PCIE, sockets=1)))
    assert path(inside, "a/1", "a/6") == {"a/1>pcie": 24, "a/switch0>host": 24, "a/host>switch1": 24, "pcie>a/6": 24}
    four = network(node("a", intra=replace(PCIE, gpus_per_switch=2)))
    assert list(path(four, "a/0", "a/2")) == ["a/0>pcie", "a/switch0>host", "a/host>switch1", "pcie>a/2"]


def test_the_bridge_between_sockets_is_the_bottleneck_where_it_is_slower() -> None:
    inside = network(node("a", intra=PCIE))
    crossing = {"a/0>pcie": 24, "a/switch0>host": 24, "a/socket0>socket1": 16, "a/host>switch1": 24, "pcie>a/7": 24}
    assert path(inside, "a/0", "a/7") == crossing
    assert list(path(inside, "a/7", "a/0"))[2] == "a/socket1>socket0"
    transfer = inside.transfer([("a/0", "a/7", 16e9)])
    assert inside.alone_s(transfer) == pytest.approx(1.0 + 6e-6)
    # Two at once share the bridge, but no other link.
    assert inside.alone_s(inside.transfer([("a/0", "a/7", 16e9), ("a/1", "a/6", 16e9)])) == pytest.approx(2.0 + 6e-6)


@pytest.mark.parametrize(
    ("gpus", "per_switch", "sockets", "on"),
    [
        (8, 4, 2, [0, 1]),
        (8, 2, 2, [0, 0, 1, 1]),
        (8, 4, 1, [0, 0]),
        (4, 4, 2, [0]),
        (6, 2, 2, [0, 0, 1]),
        (8, 2, 4, [0, 1, 2, 3]),
        (10, 4, 2, [0, 0, 1]),
    ],
)
def test_switches_are_divided_over_the_sockets_in_order(gpus: int, per_switch: int, sockets: int, on: list[int]) -> None:
    inside = network(node("a", gpus, replace(PCIE, gpus_per_switch=per_switch, sockets=sockets)))
    for a, socket in enumerate(on):
        for b, other in enumerate(on):
            if a != b:
                links = path(inside, f"a/{a * per_switch}", f"a/{b * per_switch}")
                bridges = [name for name in links if "socket" in name]
                assert bridges == ([f"a/socket{socket}>socket{other}"] if socket != other else [])
    assert len(on) == -(-gpus // per_switch)


def test_nothing_lies_between_a_device_and_itself() -> None:
    inside = network(node("a"))
    assert inside.path("a/0", "a/0").links == () and inside.path("a/0", "a/0").latency_s == 0
    assert inside.transfer([("a/0", "a/0", 1e9)]) == NOTHING


def test_an_unknown_device_has_no_path() -> None:
    with pytest.raises(InputError, match=r"^device 'a/8' is not in cluster 'c', which has a/0-7"):
        network(node("a")).path("a/0", "a/8")


# --- Between nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "count", "nics"),
    [
        (8, 1, [0] * 8),
        (8, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        (8, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 3, [0, 0, 0, 1, 1, 1, 2, 2]),
        (4, 3, [0, 0, 1, 2]),
    ],
)
def test_a_gpu_uses_the_nic_of_its_place(gpus: int, count: int, nics: list[int]) -> None:
    two = network(node("a", gpus, nic=Nic("roce", 1e9, count)), node("b", gpus, nic=Nic("roce", 1e9, count)))
    for index, nic in enumerate(nics):
        assert nic == index * count // gpus
        assert two.nic_of(f"a/{index}") == ("a", nic)
        assert path(two, f"a/{index}", "b/0") == {f"a/nic{nic}>fabric": 1, "fabric>b/nic0": 1}


def test_a_device_without_a_nic_has_none() -> None:
    assert Network(Cluster("c", (Node("a", GPU, 2, NVLINK),))).nic_of("a/1") is None


def test_from_pcie_nodes_a_path_goes_through_the_switches_to_the_nic() -> None:
    two = network(node("a", intra=PCIE, nic=Nic("ethernet", 1e9, 2)), node("b", intra=PCIE, nic=Nic("ethernet", 1e9)))
    near = {"a/0>pcie": 24, "a/nic0>fabric": 1, "fabric>b/nic0": 1, "pcie>b/1": 24}
    assert path(two, "a/0", "b/1") == near
    assert path(two, "a/7", "b/1") == {"a/7>pcie": 24, "a/nic1>fabric": 1, "fabric>b/nic0": 1, "pcie>b/1": 24}
    # The one NIC of b hangs under its first switch; GPU 7 is under the second, at the other socket.
    far = {
        "a/0>pcie": 24,
        "a/nic0>fabric": 1,
        "fabric>b/nic0": 1,
        "b/switch0>host": 24,
        "b/socket0>socket1": 16,
        "b/host>switch1": 24,
        "pcie>b/7": 24,
    }
    assert path(two, "a/0", "b/7") == far
    assert list(path(two, "b/7", "a/0")) == [
        "b/7>pcie",
        "b/switch1>host",
        "b/socket1>socket0",
        "b/host>switch0",
        "b/nic0>fabric",
        "fabric>a/nic0",
        "pcie>a/0",
    ]
    assert two.path("a/0", "b/7").latency_s == 50e-6


def test_a_nic_hangs_under_the_switch_of_the_first_gpu_it_serves() -> None:
    # 3 NICs serve GPUs 0-2, 3-5 and 6-7; with 4 GPUs a switch, NIC 1 hangs under switch 0 and NIC 2 under switch 1.
    two = network(node("a", intra=PCIE, nic=Nic("ethernet", 1e9, 3)), node("b"))
    assert list(path(two, "a/3", "b/0")) == ["a/3>pcie", "a/nic1>fabric", "fabric>b/nic0"]
    assert list(path(two, "a/5", "b/0"))[:4] == ["a/5>pcie", "a/switch1>host", "a/socket1>socket0", "a/host>switch0"]
    assert list(path(two, "a/6", "b/0")) == ["a/6>pcie", "a/nic2>fabric", "fabric>b/nic0"]
    paired = network(node("a", intra=replace(PCIE, gpus_per_switch=2), nic=Nic("ethernet", 1e9, 3)), node("b"))
    assert list(path(paired, "a/6", "b/0")) == ["a/6>pcie", "a/nic2>fabric", "fabric>b/nic0"]


def test_racks_share_their_oversubscribed_uplinks_and_are_not_crossed_inside() -> None:
    # Rack r holds two nodes of 2 x 1 GB/s: 4 GB/s, of which a quarter leaves it. Node c is a rack of its own.
    nodes = [node(name, nic=Nic("roce", 1e9, 2), rack="r") for name in "ab"] + [node("c", nic=Nic("roce", 1e9, 2))]
    racked = network(*nodes, fabric=replace(FABRIC, oversubscription=4.0))
    assert path(racked, "a/0", "b/0") == {"a/nic0>fabric": 1, "fabric>b/nic0": 1}
    assert path(racked, "a/0", "c/0") == {"a/nic0>fabric": 1, "rack:r>core": 1, "core>c": 0.5, "fabric>c/nic0": 1}
    assert path(racked, "c/7", "b/7") == {"c/nic1>fabric": 1, "c>core": 0.5, "core>rack:r": 1, "fabric>b/nic1": 1}
    assert path(network(*nodes), "a/0", "c/0") == {"a/nic0>fabric": 1, "fabric>c/nic0": 1}
    # All of the rack's NICs at once: 4 x 1 GB on an uplink of 1 GB/s.
    moves = [(f"{name}/{index}", f"c/{index}", 1e9) for name in "ab" for index in (0, 7)]
    loads = dict(racked.transfer(moves).loads)
    by_name = {racked.links[link].name: num_bytes for link, num_bytes in loads.items()}
    assert by_name["rack:r>core"] == by_name["core>c"] == 4e9


def test_the_uplink_carries_what_the_nics_really_carry() -> None:
    lossy = Fabric(oversubscription=2.0, protocol_efficiency=(("roce", 0.8),))
    racked = network(node("a", nic=Nic("roce", 10e9, 4)), node("b", nic=Nic("roce", 10e9, 4)), fabric=lossy)
    assert path(racked, "a/0", "b/0") == {"a/nic0>fabric": 8, "a>core": 16, "core>b": 16, "fabric>b/nic0": 8}


# --- Protocols -------------------------------------------------------------------------------------------------------

TCP = replace(FABRIC, protocol_efficiency=(*LOSSLESS[:-1], ("tcp", 0.5), ("infiniband", 0.8)))


def test_nics_of_one_kind_speak_it() -> None:
    for kind, rate in (("infiniband", 20), ("roce", 25), ("ethernet", 25)):
        two = network(node("a", nic=Nic(kind, 25e9)), node("b", nic=Nic(kind, 25e9)), fabric=TCP)
        assert path(two, "a/0", "b/0") == {"a/nic0>fabric": rate, "fabric>b/nic0": rate}


def test_nics_of_two_rdma_kinds_speak_tcp_over_the_cards() -> None:
    two = network(node("a", nic=Nic("infiniband", 25e9)), node("b", nic=Nic("roce", 50e9)), fabric=TCP)
    assert path(two, "a/0", "b/0") == pytest.approx({"a/nic0>fabric": 12.5, "fabric>b/nic0": 25})
    # A card is filled in part by TCP and in part by RDMA: after 1 s with 10 GB each, it has moved 10 / 12.5 + 10 / 20 = 1.3 s.
    three = network(*two.cluster.nodes, node("c", nic=Nic("infiniband", 25e9)), fabric=TCP)
    both = three.transfer([("a/0", "b/0", 10e9), ("a/1", "c/0", 10e9)])
    assert three.alone_s(both) == pytest.approx(1.3 + 50e-6)


def test_nics_of_two_rdma_kinds_use_the_ethernet_beside_them_where_there_is_one() -> None:
    beside = Nic("infiniband", 25e9, 4, ethernet_bytes_per_s=1.25e9)
    two = network(node("a", nic=beside), node("b", nic=Nic("roce", 50e9, 8)), fabric=TCP)
    assert path(two, "a/7", "b/7") == pytest.approx({"a/ethernet>fabric": 1.25, "fabric>b/nic7": 25})
    assert path(two, "b/0", "a/0") == pytest.approx({"b/nic0>fabric": 25, "fabric>a/ethernet": 1.25})
    alike = network(node("a", nic=beside), node("b", nic=beside), fabric=TCP)
    assert path(alike, "a/7", "b/7") == {"a/nic3>fabric": 20, "fabric>b/nic3": 20}


def test_ethernet_and_rdma_cards_speak_tcp() -> None:
    two = network(node("a", nic=Nic("ethernet", 1e9)), node("b", nic=Nic("roce", 50e9)), fabric=TCP)
    assert path(two, "a/0", "b/0") == pytest.approx({"a/nic0>fabric": 1, "fabric>b/nic0": 25})


def test_efficiencies_scale_every_link_and_can_be_overridden() -> None:
    def rates(*overrides: tuple[str, float]) -> tuple[list[float], list[float], list[float]]:
        pcie = node("b", intra=PCIE, nic=Nic("ethernet", 10e9))
        two = network(node("a", nic=Nic("ethernet", 10e9)), pcie, fabric=Fabric(protocol_efficiency=overrides))
        return tuple(list(path(two, *ends).values()) for ends in (("a/0", "a/1"), ("b/0", "b/7"), ("a/0", "b/0")))  # type: ignore[return-value]

    nvlink, pcie, ethernet = (links().efficiency[kind] for kind in ("nvlink", "pcie", "ethernet"))
    switch, host = 24 * pcie, 16 * pcie
    nominal = ([300 * nvlink] * 2, [switch, switch, host, switch, switch], [10 * ethernet, 10 * ethernet, switch])
    for found, expected in zip(rates(), nominal, strict=True):
        assert found == pytest.approx(expected)
    changed = ([150, 150], [18, 18, 12, 18, 18], [5, 5, 18])
    for found, expected in zip(rates(("nvlink", 0.5), ("pcie", 0.75), ("ethernet", 0.5)), changed, strict=True):
        assert found == pytest.approx(expected)


# --- Sites -----------------------------------------------------------------------------------------------------------


def test_sites_are_joined_over_one_or_more_wide_area_links() -> None:
    nodes = [node(name, nic=Nic("ethernet", 10e9), site=site) for name, site in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "z"))]
    wan = (WideAreaLink(("x", "y"), 0.5e9, 10e-3), WideAreaLink(("z", "y"), 0.25e9, 20e-3))
    sites = network(*nodes, wan=wan)
    assert path(sites, "a/0", "b/0") == {"a/nic0>fabric": 10, "fabric>b/nic0": 10}
    assert path(sites, "a/0", "c/0") == {"a/nic0>fabric": 10, "site:x>site:y": 0.5, "fabric>c/nic0": 10}
    assert path(sites, "a/0", "d/0") == {"a/nic0>fabric": 10, "site:x>site:y": 0.5, "site:y>site:z": 0.25, "fabric>d/nic0": 10}
    assert path(sites, "d/0", "a/0") == {"d/nic0>fabric": 10, "site:z>site:y": 0.25, "site:y>site:x": 0.5, "fabric>a/nic0": 10}
    latencies = [sites.path("a/0", other).latency_s for other in ("b/0", "c/0", "d/0")]
    assert latencies == pytest.approx([50e-6, 50e-6 + 10e-3, 50e-6 + 30e-3])


def test_of_several_ways_between_sites_the_one_of_least_latency_is_taken() -> None:
    nodes = [node(name, site=name) for name in "xyz"]
    slow_but_direct = WideAreaLink(("x", "z"), 1e9, 50e-3)
    around = (WideAreaLink(("x", "y"), 1e9, 10e-3), WideAreaLink(("y", "z"), 1e9, 10e-3))
    sites = network(*nodes, wan=(slow_but_direct, *around))
    assert list(path(sites, "x/0", "z/0"))[1:3] == ["site:x>site:y", "site:y>site:z"]


# --- The bandwidth matrix --------------------------------------------------------------------------------------------

INF = float("inf")


def test_a_matrix_of_nodes_caps_all_devices_of_a_pair_together_in_each_direction() -> None:
    matrix = BandwidthMatrix(("a", "b"), ((INF, 0.5e9), (0.25e9, INF)))
    two = network(node("a"), node("b"), matrix=matrix)
    assert path(two, "a/0", "b/1") == {"a/nic0>fabric": 1, "fabric>b/nic0": 1, "a=>b": 0.5}
    assert path(two, "b/1", "a/0") == {"b/nic0>fabric": 1, "fabric>a/nic0": 1, "b=>a": 0.25}
    assert "a=>b" in path(two, "a/7", "b/7")
    assert path(two, "a/0", "a/1") == {"a/0>nvlink": 300, "nvlink>a/1": 300}
    assert two.alone_s(two.transfer([("a/0", "b/0", 1e9), ("b/0", "a/0", 1e9)])) == pytest.approx(4.0 + 50e-6)


def test_a_matrix_of_devices_caps_pairs_inside_nodes_too() -> None:
    names = ("a/0", "a/1", "b/0")
    matrix = BandwidthMatrix(names, ((INF, 100e9, 0.5e9), (90e9, INF, 0.4e9), (0.3e9, 0.2e9, INF)))
    two = network(node("a", 2), node("b", 1), matrix=matrix)
    assert path(two, "a/0", "a/1") == {"a/0>nvlink": 300, "nvlink>a/1": 300, "a/0=>a/1": 100}
    assert path(two, "a/1", "a/0")["a/1=>a/0"] == 90
    assert path(two, "a/1", "b/0") == {"a/nic0>fabric": 1, "fabric>b/nic0": 1, "a/1=>b/0": 0.4}
    assert path(two, "b/0", "a/1")["b/0=>a/1"] == 0.2


# --- Transfers -------------------------------------------------------------------------------------------------------


def test_a_transfer_puts_the_bytes_of_all_its_moves_on_their_links() -> None:
    two = network(node("a"), node("b"))
    transfer = two.transfer(
        [("a/0", "b/0", 3e9), ("a/1", "b/0", 1e9), ("a/0", "a/1", 5e9), ("a/0", "a/0", 9e9), ("a/0", "b/1", 0)]
    )
    loads = {two.links[link].name: num_bytes for link, num_bytes in transfer.loads}
    assert loads == {"a/nic0>fabric": 4e9, "fabric>b/nic0": 4e9, "a/0>nvlink": 5e9, "nvlink>a/1": 5e9}
    assert transfer.num_bytes == 9e9
    assert transfer.latency_s == 50e-6
    assert two.alone_s(transfer) == pytest.approx(4.0 + 50e-6)
    assert [link for link, _ in transfer.loads] == sorted(link for link, _ in transfer.loads)


def test_transfers_in_turn_add_up() -> None:
    first, second = Transfer(((0, 1.0), (2, 3.0)), 0.5, 4), Transfer(((1, 7.0), (2, 1.0)), 0.25, 8)
    assert together([first, second]) == Transfer(((0, 1.0), (1, 7.0), (2, 4.0)), 0.75, 12)
    assert together([first] * 3) == Transfer(((0, 3.0), (2, 9.0)), 1.5, 12)
    assert scaled(Transfer(((0, 0.5), (2, 1.0)), 0.5, 1.5), 8, 3) == Transfer(((0, 12.0), (2, 24.0)), 1.5, 36.0)
    assert together([]) == NOTHING and not NOTHING and bool(first) and bool(Transfer((), 1.0, 0))


def test_links_are_numbered_as_they_are_first_used() -> None:
    inside = network(node("a", 4))
    inside.path("a/2", "a/1")
    inside.path("a/0", "a/1")
    assert [link.name for link in inside.links] == ["a/2>nvlink", "nvlink>a/1", "a/0>nvlink"]
    assert inside.capacities() == [300e9] * 3
    assert inside.path("a/2", "a/1") is inside.path("a/2", "a/1")


def test_racks_of_one_name_at_two_sites_are_two_racks() -> None:
    nodes = [node("a", rack="r", site="x"), node("b", rack="r", site="y")]
    wan = (WideAreaLink(("x", "y"), 1e9, 10e-3),)
    sites = network(*nodes, wan=wan, fabric=replace(FABRIC, oversubscription=4.0))
    assert list(path(sites, "a/0", "b/0"))[1:3] == ["rack:r@x>core", "core>rack:r@y"]
