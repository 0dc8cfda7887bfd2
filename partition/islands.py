"""Islands: parts of a cluster whose links to the rest are known, and what these carry at least. The bound on iteration time asks
of them what no plan can do without (`partition.bound`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sim.spec.cluster import Cluster, Node, WideAreaLink, rack_name
from sim.spec.counts import PRECISION_BYTES, boundary_bytes, embedding_parameters, head_parameters, layer_parameter_parts
from sim.spec.gpu import GpuKind
from sim.spec.job import Job
from sim.spec.transformer import Transformer


@dataclass(frozen=True)
class Island:
    """A part of the cluster whose links to the rest are known: the layers that its GPUs do in a second, its links' seconds."""

    counts: tuple[tuple[GpuKind, int], ...]
    rate: float
    crossing_s: float
    """Of the activation of one sequence, in each direction."""
    shared_s: float
    """Of the exchange of one layer's gradients."""
    embedding_s: float
    """Of that of the embedding's, where it is not tied to the head."""
    head_s: float


def partitions(cluster: Cluster, job: Job, rates: Mapping[GpuKind, float]) -> Iterator[list[Island]]:
    """The cluster as islands, by nodes, by racks and by sites, as far as there are several and they limit anything."""
    least_bytes = _least_bytes(cluster, job)
    parts: list[list[tuple[list[Node], float]]] = [[([node], _node_bytes_per_s(cluster, node)) for node in cluster.nodes]]
    racks: dict[object, list[Node]] = {}
    sites: dict[str, list[Node]] = {}
    for node in cluster.nodes:
        racks.setdefault(node.name if node.rack is None else (node.rack, node.site), []).append(node)
        sites.setdefault(node.site, []).append(node)
    if cluster.fabric.oversubscription > 1:
        parts.append([(rack, _rack_bytes_per_s(cluster, rack)) for rack in racks.values()])
    carried = {site: sum(_wan_bytes_per_s(cluster, link) for link in cluster.wan if site in link.between) for site in sites}
    parts.append([(nodes, carried[site]) for site, nodes in sites.items()])
    for islands in parts:
        # Where no GPU has the precision, no plan comes.
        used = [(nodes, bytes_per_s) for nodes, bytes_per_s in islands if any(node.gpu in rates for node in nodes)]
        if len(used) > 1:
            yield [_island(cluster, nodes, bytes_per_s, rates, least_bytes) for nodes, bytes_per_s in used]


def _island(
    cluster: Cluster, nodes: Sequence[Node], bytes_per_s: float, rates: Mapping[GpuKind, float], least_bytes: _LeastBytes
) -> Island:
    """Some nodes, whose links carry so many bytes in a second."""
    names = {node.name for node in nodes}
    counts = Counter(device.gpu for device in cluster.devices if device.node.name in names and device.gpu in rates)
    rate = sum(count * rates[kind] for kind, count in counts.items())
    ordered = tuple(sorted(counts.items(), key=lambda item: item[0].name))
    least = (least_bytes.crossing, least_bytes.shared, least_bytes.embedding, least_bytes.head)
    return Island(ordered, rate, *(num_bytes / bytes_per_s for num_bytes in least))


@dataclass(frozen=True)
class _LeastBytes:
    """Bytes that an island's links carry in each direction at least."""

    crossing: float
    """Of the activation of one sequence."""
    shared: float
    """Of the exchange of one layer."""
    embedding: float
    """Of the exchange of the embedding, where it is not tied to the head; of the head then, too."""
    head: float


def _least_bytes(cluster: Cluster, job: Job) -> _LeastBytes:
    """What a crossing takes, and an exchange; see the head of `partition.bound`."""
    element_bytes, summed_bytes = PRECISION_BYTES[job.precision], PRECISION_BYTES[job.gradient_precision]
    scale = cluster.stack.collective_scale
    model = job.model
    # A group across islands sums an activation at the embedding or the head, of its width, and four for each layer. Of those
    # it saves two crossings at most, by which a visit before or after them enters or leaves.
    crossing = float(boundary_bytes(model, 1, job.sequence_length, element_bytes))
    crossing *= min(1.0, min(1.0, model.embedding_width / model.hidden, _left_by_whole_experts(model)) / scale)
    parts = layer_parameter_parts(model)
    each = min(summed_bytes, (summed_bytes + element_bytes) / 2) / scale
    ends = (0, 0) if model.tied_embeddings else (embedding_parameters(model), head_parameters(model))
    return _LeastBytes(crossing, (parts.total - parts.experts) * each, *(each * parameters for parameters in ends))


def _left_by_whole_experts(model: Transformer) -> float:
    """Crossings each way for half of a layer that a group across islands has at least, but for those that it saves.

    Ranks with whole experts sum two activations for each layer, which may be saved, and send tokens to experts and back, forward
    and backward: of t ranks with a part g of the tokens, and E experts of which a part f is there, g (1 - f) + (1 - g) f of a
    stream, if each goes to one expert. With a rank and an expert at least on either side that is 1 / t + 1 / E - 2 / (t E) or
    more, and t divides E.
    """
    if model.experts is None or model.experts.shared_experts:
        return 1.0
    experts = model.experts.experts
    ranks = [tensor for tensor in range(2, experts + 1) if experts % tensor == 0 and model.heads % tensor == 0]
    return min((1 / tensor + 1 / experts - 2 / (tensor * experts) for tensor in ranks), default=1.0)


def _rack_bytes_per_s(cluster: Cluster, rack: Iterable[Node]) -> float:
    """What the uplink of a rack carries in each direction."""
    nodes = list(rack)
    cards = [(node.nic, node.nic.count * node.nic.bandwidth_bytes_per_s) for node in nodes if node.nic is not None]
    rate = sum(rate * cluster.fabric.efficiency(nic.kind) for nic, rate in cards) / cluster.fabric.oversubscription
    name = rack_name(nodes[0])
    return _carried(cluster, (f"{name}>core", f"core>{name}"), rate)


def _carried(cluster: Cluster, directions: tuple[str, str], bytes_per_s: float) -> float:
    """What the faster direction of a link carries: `bytes_per_s`, or what the cluster overrides."""
    own = {link.name: link.bandwidth_bytes_per_s for link in cluster.link_overrides}
    return max(own.get(name) or bytes_per_s for name in directions)


def _wan_bytes_per_s(cluster: Cluster, link: WideAreaLink) -> float:
    """What a link between sites carries in its faster direction."""
    a, b = link.between
    return _carried(cluster, (f"site:{a}>site:{b}", f"site:{b}>site:{a}"), link.bandwidth_bytes_per_s)


def _node_bytes_per_s(cluster: Cluster, node: Node) -> float:
    """The most that a node's links carry in each direction: its cards, whatever they speak, and the matrix's pairs."""
    nic, efficiency = node.nic, cluster.fabric.efficiency
    if nic is None:  # the only node
        return math.inf
    rate = nic.count * nic.bandwidth_bytes_per_s * max(efficiency(nic.kind), efficiency("tcp"))
    if nic.ethernet_bytes_per_s is not None:
        rate += nic.ethernet_bytes_per_s * efficiency("ethernet")
    if cluster.link_overrides:
        # TCP over a card carries as much more or less of what is overridden as of the card's own rate.
        share = max(1.0, efficiency("tcp") / efficiency(nic.kind))
        cards = [(f"nic{number}", nic.bandwidth_bytes_per_s * efficiency(nic.kind), share) for number in range(nic.count)]
        if nic.ethernet_bytes_per_s is not None:
            cards.append(("ethernet", nic.ethernet_bytes_per_s * efficiency("ethernet"), 1.0))
        rate = sum(
            more * _carried(cluster, (f"{node.name}/{card}>fabric", f"fabric>{node.name}/{card}"), carried)
            for card, carried, more in cards
        )
    matrix = cluster.bandwidth_matrix
    if matrix is not None:
        own = [i for i, name in enumerate(matrix.names) if name.split("/")[0] == node.name]
        others = [i for i in range(len(matrix.names)) if i not in own]
        known = {link.name: link.bandwidth_bytes_per_s for link in cluster.link_overrides}

        def pair(i: int, j: int) -> float:
            return known.get(f"{matrix.names[i]}=>{matrix.names[j]}") or matrix.bytes_per_s[i][j]

        out = sum(pair(i, j) for i in own for j in others)
        into = sum(pair(j, i) for i in own for j in others)
        rate = min(rate, out, into)
    return rate
