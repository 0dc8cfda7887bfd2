"""The network as directed links, the paths through it, and transfers as the bytes they put on each link.

Inside a node, NVLink gives every GPU a port in each direction; PCIe is a tree of switches whose uplinks, and the bridge
between sockets, are shared. Between nodes a path goes over the sender's NIC, its rack's uplink where that is
oversubscribed, wide-area links between sites, and the receiver's NIC. A measured bandwidth matrix caps pairs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

from sim.spec.cluster import Cluster, Device, LinkOverride, Nic, Node, rack_name
from sim.spec.reading import InputError, nearest

if TYPE_CHECKING:
    import networkx

    from sim.cost.collectives import Option


@dataclass(frozen=True)
class Link:
    """One direction of a wire, port or bridge, with what it really carries (its protocol's efficiency counted).

    `latency_s` is what it adds to the latency of each path over it, beside that of the fabric or of the node's interconnect.
    `node` is the one that it is in, or between which and the fabric it is.
    """

    name: str
    capacity_bytes_per_s: float
    latency_s: float = 0.0
    node: str | None = None


@dataclass(frozen=True)
class Path:
    """The links from one device to another, with the bytes that each byte sent puts on them, and the one-way latency.

    `step_s` is what a step over it takes longer in a collective's protocol of full bandwidth.
    """

    links: tuple[tuple[int, float], ...]
    latency_s: float
    step_s: float


@dataclass(frozen=True)
class Transfer:
    """One fluid transfer: the bytes it puts on each link, all at rates in proportion, and the latency after the last byte."""

    loads: tuple[tuple[int, float], ...]
    latency_s: float
    num_bytes: float

    def __bool__(self) -> bool:
        return bool(self.loads) or self.latency_s > 0


NOTHING = Transfer((), 0.0, 0.0)


class Network:
    """The links of a cluster and the paths between its devices. Links are numbered; `links[i]` is link i."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.links: list[Link] = []
        self._by_name: dict[str, int] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._ways: dict[tuple[str, str, bool], list[tuple[int, float]]] = {}
        """The parts of paths between a device and the fabric, by device, protocol and direction."""
        self._cards: set[int] = set()
        """The links of NICs, one of which every path between nodes crosses on each side."""
        self._overrides: Mapping[str, LinkOverride] = {link.name: link for link in cluster.link_overrides}
        self.unit_transfers: dict[Hashable, Transfer] = {}
        """Transfers of one byte that grow in proportion, kept for the next use of the same devices."""
        self.options: dict[Hashable, tuple[Option, ...]] = {}
        """The ways of doing a collective, kept for its next use."""
        self._matrix: Mapping[tuple[str, str], float] = {}
        if (matrix := cluster.bandwidth_matrix) is not None:
            self._matrix = {
                (a, b): rate
                for a, row in zip(matrix.names, matrix.bytes_per_s, strict=True)
                for b, rate in zip(matrix.names, row, strict=True)
                if a != b
            }
        self._node_numbers = {node.name: number for number, node in enumerate(cluster.nodes)}
        self._rack_bytes_per_s: dict[str, float] = {}
        for node in cluster.nodes:
            if node.nic is not None:
                carried = node.nic.bandwidth_bytes_per_s * node.nic.count * cluster.fabric.efficiency(node.nic.kind)
                rack = rack_name(node)
                self._rack_bytes_per_s[rack] = self._rack_bytes_per_s.get(rack, 0.0) + carried

    @cached_property
    def _sites(self) -> networkx.DiGraph[str]:
        """The sites and the links between them, in both directions."""
        import networkx  # a second or two, which clusters of one site shall not wait for

        sites: networkx.DiGraph[str] = networkx.DiGraph()
        for wan in self.cluster.wan:
            for a, b in (wan.between, wan.between[::-1]):
                sites.add_edge(a, b, latency_s=wan.latency_s, bandwidth_bytes_per_s=wan.bandwidth_bytes_per_s)
        return sites

    def _between_sites(self, a: str, b: str) -> list[str]:
        """The sites on the way from one to another that takes least time, both of them included."""
        import networkx

        return list(networkx.shortest_path(self._sites, a, b, weight="latency_s"))

    def capacities(self) -> list[float]:
        """Bytes/s of every link."""
        return [link.capacity_bytes_per_s for link in self.links]

    def _link(self, name: str, capacity_bytes_per_s: float, latency_s: float = 0.0, node: str | None = None) -> int:
        """The number of the link of this name, made when it is first asked for, with what the cluster overrides of it."""
        if name not in self._by_name:
            self._by_name[name] = len(self.links)
            if (own := self._overrides.get(name)) is not None:
                capacity_bytes_per_s = own.bandwidth_bytes_per_s or capacity_bytes_per_s
                latency_s = latency_s if own.latency_s is None else own.latency_s
            self.links.append(Link(name, capacity_bytes_per_s, latency_s, node))
        return self._by_name[name]

    def named(self, name: str) -> Link:
        """The link of this name. Raises InputError where no path crosses it."""
        for a, b in permutations(self.cluster.devices, 2):
            if name in self._by_name:
                break
            self.path(a.name, b.name)
        if name not in self._by_name:
            raise InputError(f"cluster {self.cluster.name!r}: no path crosses a link {name!r}{nearest(name, self._by_name)}")
        return self.links[self._by_name[name]]

    def path(self, sender: str, receiver: str) -> Path:
        """The path from one device to another. Raises InputError for a device that is not in the cluster."""
        found = self._paths.get((sender, receiver))
        if found is None:
            found = self._paths[sender, receiver] = self._find(self.cluster.device(sender), self.cluster.device(receiver))
        return found

    def _find(self, sender: Device, receiver: Device) -> Path:
        if sender.name == receiver.name:
            return Path((), 0.0, 0.0)
        if sender.node.name == receiver.node.name:
            links = [(link, 1.0) for link in self._inside(sender, receiver)]
            latency_s, step_s = sender.node.intra.latency_s, sender.node.intra.step_s
        else:
            links = self._across(sender, receiver)
            latency_s, step_s = self.cluster.fabric.latency_s, self.cluster.fabric.step_s
        if self._matrix:
            for pair in ((sender.node.name, receiver.node.name), (sender.name, receiver.name)):
                if pair in self._matrix:
                    links.append((self._link(f"{pair[0]}=>{pair[1]}", self._matrix[pair]), 1.0))
        for link, _ in links:
            latency_s += self.links[link].latency_s
        return Path(tuple(links), latency_s, step_s)

    # --- Inside a node ---

    def _inside(self, sender: Device, receiver: Device) -> list[int]:
        node = sender.node
        if node.intra.is_nvlink:
            rate = node.intra.bandwidth_bytes_per_s * self.cluster.fabric.efficiency("nvlink")
            ports = f"{sender.name}>nvlink", f"nvlink>{receiver.name}"
            return [self._link(port, rate, node=node.name) for port in ports]
        up, down = self._pcie(sender)[0], self._pcie(receiver)[1]
        return [up, *self._between_switches(node, _switch(sender), _switch(receiver)), down]

    def _pcie(self, device: Device) -> tuple[int, int]:
        """The links from a GPU to its PCIe switch and back."""
        rate = device.node.intra.bandwidth_bytes_per_s * self.cluster.fabric.efficiency("pcie")
        node = device.node.name
        return self._link(f"{device.name}>pcie", rate, node=node), self._link(f"pcie>{device.name}", rate, node=node)

    def _between_switches(self, node: Node, a: int, b: int) -> list[int]:
        """The shared uplinks, and the bridge between sockets, from one PCIe switch of a node to another."""
        if a == b:
            return []
        rate = node.intra.bandwidth_bytes_per_s * self.cluster.fabric.efficiency("pcie")
        uplinks = f"{node.name}/switch{a}>host", f"{node.name}/host>switch{b}"
        links = [self._link(uplink, rate, node=node.name) for uplink in uplinks]
        sockets = _socket(node, a), _socket(node, b)
        if sockets[0] != sockets[1]:
            host = node.intra.host_bandwidth_bytes_per_s * self.cluster.fabric.efficiency("pcie")
            bridge = f"{node.name}/socket{sockets[0]}>socket{sockets[1]}"
            links.insert(1, self._link(bridge, host, node=node.name))
        return links

    # --- Between nodes ---

    def _across(self, sender: Device, receiver: Device) -> list[tuple[int, float]]:
        a, b = sender.node, receiver.node
        assert a.nic is not None and b.nic is not None  # the cluster checked it
        protocol = _protocol(a.nic, b.nic)
        links = [*self._way(sender, a.nic, protocol, outward=True)]
        oversubscription = self.cluster.fabric.oversubscription
        racks = rack_name(a), rack_name(b)
        if oversubscription > 1 and racks[0] != racks[1]:
            links.append((self._link(f"{racks[0]}>core", self._rack_bytes_per_s[racks[0]] / oversubscription), 1.0))
            links.append((self._link(f"core>{racks[1]}", self._rack_bytes_per_s[racks[1]] / oversubscription), 1.0))
        if a.site != b.site:
            for here, there in pairwise(self._between_sites(a.site, b.site)):
                wan = self._sites.edges[here, there]
                links.append((self._link(f"site:{here}>site:{there}", wan["bandwidth_bytes_per_s"], wan["latency_s"]), 1.0))
        return links + self._way(receiver, b.nic, protocol, outward=False)

    def _way(self, device: Device, nic: Nic, protocol: str, outward: bool) -> list[tuple[int, float]]:
        """The links from a device to the fabric, or back, with the bytes on each per byte sent."""
        found = self._ways.get((device.name, protocol, outward))
        if found is None:
            inside = self._to_nic(device) if outward else self._from_nic(device)
            card, own = self._nic(device.node, nic, device, protocol, outward), [(link, 1.0) for link in inside]
            found = self._ways[device.name, protocol, outward] = [*own, card] if outward else [card, *own]
        return found

    def _nic(self, node: Node, nic: Nic, device: Device, protocol: str, outward: bool) -> tuple[int, float]:
        """The link between a device's NIC and the fabric, and the bytes on it per byte sent."""
        efficiency = self.cluster.fabric.efficiency
        if protocol == "ethernet" and nic.kind != "ethernet" and nic.ethernet_bytes_per_s is not None:
            card, rate = "ethernet", nic.ethernet_bytes_per_s * efficiency("ethernet")
            weight = 1.0
        else:
            card, rate = f"nic{_nic_index(device)}", nic.bandwidth_bytes_per_s * efficiency(nic.kind)
            # TCP over a card made for RDMA fills it sooner than RDMA would.
            weight = 1.0 if protocol == nic.kind else efficiency(nic.kind) / efficiency("tcp")
        name = f"{node.name}/{card}>fabric" if outward else f"fabric>{node.name}/{card}"
        link = self._link(name, rate, node=node.name)
        self._cards.add(link)
        return link, weight

    def _to_nic(self, device: Device) -> list[int]:
        """The PCIe links from a GPU to its NIC, which hangs under the switch of the first GPU that it serves."""
        if device.node.intra.is_nvlink:
            return []  # such nodes give GPU and NIC a PCIe switch of their own, no slower than the NIC
        switches = _switch(device), _nic_switch(device)
        return [self._pcie(device)[0], *self._between_switches(device.node, *switches)]

    def _from_nic(self, device: Device) -> list[int]:
        if device.node.intra.is_nvlink:
            return []
        switches = _nic_switch(device), _switch(device)
        return [*self._between_switches(device.node, *switches), self._pcie(device)[1]]

    # --- Transfers ---

    def transfer(self, moves: Iterable[tuple[str, str, float]]) -> Transfer:
        """The fluid transfer of several moves (sender, receiver, bytes) at once, with the latency of the slowest path."""
        return self.moved((self.path(a, b), num_bytes) for a, b, num_bytes in moves if num_bytes > 0 and a != b)

    def moved(self, moves: Iterable[tuple[Path, float]]) -> Transfer:
        """The same of bytes on paths, none of them from a device to itself."""
        loads: dict[int, float] = {}
        latency_s, total = 0.0, 0.0
        for path, num_bytes in moves:
            total += num_bytes
            if path.latency_s > latency_s:
                latency_s = path.latency_s
            for link, weight in path.links:
                loads[link] = loads.get(link, 0.0) + num_bytes * weight
        return Transfer(tuple(sorted(loads.items())), latency_s, total) if loads else NOTHING

    def alone_s(self, transfer: Transfer) -> float:
        """Seconds of a transfer that shares its links with no other."""
        return self.busiest_s(transfer) + transfer.latency_s

    def busiest_s(self, transfer: Transfer) -> float:
        """Seconds that the bytes of a transfer take on the link where they take longest."""
        links = self.links
        return max((num_bytes / links[link].capacity_bytes_per_s for link, num_bytes in transfer.loads), default=0.0)

    def seconds_by_link(self, transfer: Transfer) -> dict[int, float]:
        """Seconds that the bytes of a transfer take on each of its links."""
        return {link: num_bytes / self.links[link].capacity_bytes_per_s for link, num_bytes in transfer.loads}

    def in_place_of(self, link: int, node: str) -> int:
        """The link of another node that is there what a link of a node is on its own; itself, where no path crosses that."""
        own = self.links[link]
        return link if own.node is None else self._by_name.get(own.name.replace(f"{own.node}/", f"{node}/", 1), link)

    def crosses_nodes(self, transfer: Transfer) -> bool:
        """Whether any byte of a transfer goes from one node to another."""
        return any(self.is_card(link) for link, _ in transfer.loads)

    def is_card(self, link: int) -> bool:
        """Whether a link is one of a node's cards, over which everything goes that leaves the node."""
        return link in self._cards

    def node_number(self, name: str) -> int:
        """The place of a node in the cluster file."""
        return self._node_numbers[name]

    def nic_of(self, device: str) -> tuple[str, int] | None:
        """The node and number of the NIC that a device uses, or None."""
        found = self.cluster.device(device)
        return (found.node.name, _nic_index(found)) if found.node.nic is not None else None

    def way_out(self, device: str) -> tuple[str, int, int]:
        """What decides a device's paths to other nodes: its node, and there its NIC and PCIe switch."""
        found = self.cluster.device(device)
        nic = _nic_index(found) if found.node.nic is not None else 0
        return found.node.name, nic, 0 if found.node.intra.is_nvlink else _switch(found)


def together(transfers: Iterable[Transfer]) -> Transfer:
    """Several transfers one after the other, as one: bytes and latencies summed."""
    some = [transfer for transfer in transfers if transfer]
    if len(some) < 2:
        return some[0] if some else NOTHING
    loads: dict[int, float] = {}
    latency_s, total = 0.0, 0.0
    for transfer in some:
        latency_s += transfer.latency_s
        total += transfer.num_bytes
        for link, num_bytes in transfer.loads:
            loads[link] = loads.get(link, 0.0) + num_bytes
    return Transfer(tuple(sorted(loads.items())), latency_s, total)


def at_once(transfers: Sequence[Transfer]) -> Transfer:
    """Several transfers that begin together, as one: bytes summed, and the slowest latency."""
    if len(transfers) == 1:
        return transfers[0]
    joined = together(transfers)
    return replace(joined, latency_s=max((transfer.latency_s for transfer in transfers), default=0.0))


def scaled(transfer: Transfer, num_bytes: float, count: int = 1, latency_s: float | None = None) -> Transfer:
    """A transfer of one byte made one of `num_bytes`, `count` times one after the other, its latency as it was or as given."""
    factor = num_bytes * count
    loads = tuple((link, load * factor) for link, load in transfer.loads)
    return Transfer(loads, (transfer.latency_s if latency_s is None else latency_s) * count, transfer.num_bytes * factor)


def _protocol(a: Nic, b: Nic) -> str:
    """What two NICs speak: their common kind, or TCP over Ethernet where they have none."""
    return a.kind if a.kind == b.kind else "ethernet"


def _switch(device: Device) -> int:
    return device.index // device.node.intra.gpus_per_switch


def _socket(node: Node, switch: int) -> int:
    """The socket of a PCIe switch: switches are divided over the sockets in order."""
    switches = math.ceil(node.gpus / node.intra.gpus_per_switch)
    return switch * node.intra.sockets // max(switches, node.intra.sockets)


def _nic_index(device: Device) -> int:
    assert device.node.nic is not None
    return device.index * device.node.nic.count // device.node.gpus


def _nic_switch(device: Device) -> int:
    """The PCIe switch that a device's NIC hangs under."""
    node = device.node
    assert node.nic is not None
    first = math.ceil(_nic_index(device) * node.gpus / node.nic.count)
    return first // node.intra.gpus_per_switch
