"""The graph of a cluster's devices, its partition by METIS, and the order of nodes along a pipeline.

Vertices are devices, edges the bandwidth between every two of them. METIS (Karypis & Kumar, 1998) cuts the vertices into
parts of about equal weight such that the edges between parts carry as little as possible: fast links stay inside the parts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat

import pymetis

from sim.cost.network import Network
from sim.spec.cluster import Node

EDGE_LEVELS = 10_000
"""Bandwidths become whole numbers from 1 to this, the fastest link's; METIS takes no fractions."""

VERTEX_LEVELS = 1000
"""So do the vertices' weights."""

MOST_BEGINS = 8
"""So many nodes are tried as the first of a path."""

DENSE = 96
"""Devices up to which every pair has an edge; beyond, those of different nodes are joined through their nodes' first ones."""


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Lets what a C library writes to the standard output go nowhere.

    METIS complains there of parts that it leaves out, in the middle of what a command prints; its answer says so, too.
    """
    c_library = ctypes.CDLL(None)
    c_library.fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        c_library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class DeviceGraph:
    """The bandwidth between any two devices of some nodes."""

    def __init__(self, network: Network, nodes: Sequence[Node]) -> None:
        self._network = network
        self.devices = [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)]
        self._node = {f"{node.name}/{index}": node.name for node in nodes for index in range(node.gpus)}
        cluster = network.cluster
        self._sort: dict[str, object] = dict(zip(self.devices, self.devices, strict=True))
        """What decides a device's rates to those of other nodes: with no figures of single devices or links, its kind of node."""
        if cluster.bandwidth_matrix is None and not cluster.link_overrides:
            sorts = {node: number for number, node in enumerate({replace(node, name=""): None for node in nodes})}
            self._sort = {
                f"{node.name}/{index}": (sorts[replace(node, name="")], index) for node in nodes for index in range(node.gpus)
            }
        self._known: dict[object, float] = {}

    def bandwidth_bytes_per_s(self, a: str, b: str) -> float:
        """What a transfer between two devices gets on links of its own: the slower of both directions."""
        key = self._sort[a], self._sort[b], self._node[a] == self._node[b]
        found = self._known.get(key)
        if found is None:
            links = self._network.links
            found = min(
                links[link].capacity_bytes_per_s / weight
                for path in (self._network.path(a, b), self._network.path(b, a))
                for link, weight in path.links
            )
            self._known[key] = found
        return found

    def between_nodes_bytes_per_s(self, a: str, b: str) -> float:
        """The bandwidth between two nodes, as their first devices have it."""
        return self.bandwidth_bytes_per_s(f"{a}/0", f"{b}/0")

    def partition(self, devices: Sequence[str], parts: int, weights: Sequence[float], seed: int) -> list[list[str]]:
        """The devices in so many parts of about equal weight, cut where links are slow; METIS may leave parts out.

        The result depends on the arguments alone.
        """
        if parts <= 1:
            return [list(devices)]
        if parts >= len(devices):
            return [[device] for device in devices]
        at = {device: i for i, device in enumerate(devices)}
        starts, neighbours, rates = [0], [], []
        for a, joined in zip(devices, self._joined(devices), strict=True):
            for b in joined:
                if a != b:
                    neighbours.append(b)
                    rates.append(self.bandwidth_bytes_per_s(a, b))
            starts.append(len(neighbours))
        fastest, heaviest = max(rates, default=1.0), max(weights)
        with _silent_stdout():
            _, member = pymetis.part_graph(
                parts,
                pymetis.CSRAdjacency(starts, [at[b] for b in neighbours]),
                eweights=[max(1, round(rate / fastest * EDGE_LEVELS)) for rate in rates],
                vweights=[max(1, round(weight / heaviest * VERTEX_LEVELS)) for weight in weights],
                recursive=parts <= 8,
                options=pymetis.Options(seed=seed % (1 << 31)),
            )
        found: list[list[str]] = [[] for _ in range(parts)]
        for device, part in zip(devices, member, strict=True):
            found[part].append(device)
        return [part for part in found if part]

    def _joined(self, devices: Sequence[str]) -> Iterator[Sequence[str]]:
        """For each device those that it has an edge with, itself among them, in the order of the devices."""
        if len(devices) <= DENSE:
            yield from repeat(devices, len(devices))
            return
        by_node: dict[str, list[str]] = {}
        for name in devices:
            by_node.setdefault(self._node[name], []).append(name)
        firsts = [name for name in devices if name.endswith("/0")]
        at = {device: i for i, device in enumerate(devices)}
        for name in devices:
            own = by_node[self._node[name]]
            yield sorted({*own, *firsts}, key=at.__getitem__) if name.endswith("/0") else own

    def tensor_groups(self, devices: Sequence[str], degree: int, seed: int) -> list[tuple[str, ...]]:
        """A node's devices in groups of `degree` with fast links inside; those that are left over are in no group.

        METIS finds the groups. Where one of them has another size, neighbours by number are grouped instead, which in a tree of
        PCIe switches is as good.
        """
        count = len(devices) // degree
        held = devices[: count * degree]
        if degree > 1 and count > 1:
            groups = self.partition(held, count, [1.0] * len(held), seed)
            if len(groups) == count and all(len(group) == degree for group in groups):
                return [tuple(group) for group in sorted(groups, key=lambda group: held.index(group[0]))]
        return [tuple(held[i * degree : (i + 1) * degree]) for i in range(count)]

    def path(self, nodes: Sequence[str], weight: dict[str, float]) -> list[str]:
        """The nodes in an order whose slowest step between neighbours is as fast as it is found; heavier nodes first.

        From every node the next one is the one with the fastest link, the heavier one where links are equal; of these orders
        the one with the fastest bottleneck, then the fastest links together, is kept.
        """
        best: tuple[tuple[float, float, list[float]], list[str]] | None = None
        begins: dict[object, str] = {}  # of nodes that are alike one will do
        for node in sorted(nodes, key=lambda node: -weight[node]):
            begins.setdefault((self._sort[f"{node}/0"], weight[node]), node)
        for begin in list(begins.values())[:MOST_BEGINS]:
            order, left = [begin], [node for node in nodes if node != begin]
            rates = []
            while left:
                here = order[-1]
                following = max(left, key=lambda node: (self.between_nodes_bytes_per_s(here, node), weight[node]))
                rates.append(self.between_nodes_bytes_per_s(here, following))
                left.remove(following)
                order.append(following)
            worth = (min(rates, default=0.0), sum(rates), [weight[node] for node in order])
            if best is None or worth > best[0]:
                best = worth, order
        assert best is not None
        return best[1]
