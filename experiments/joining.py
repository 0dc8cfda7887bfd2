"""One cluster of the nodes of several cluster files, such as `motley discover` writes on each machine.

A file tells of its nodes, which are kept as they are, and of what is between and above them. Of that the joined cluster has what
can hold for all nodes, and of what differs the slowest. What cannot be kept is told; what cannot be settled is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from experiments.discover import Found
from experiments.machine import with_cpus_apart
from sim.spec.cluster import Cluster, Fabric, LinkOverride, WideAreaLink
from sim.spec.reading import InputError
from sim.spec.stack import Stack, stack
from sim.spec.writing import quantity_text

UNSAID = stack("motley")
"""The software of a file that names none."""


def joined(name: str, clusters: Sequence[Cluster]) -> Found:
    """One cluster of the nodes of several, and in one line each what it does not have of theirs.

    Raises InputError for a node that stands twice, for a kind of GPU, a link or software that they tell different things of,
    and for sites that nothing joins.
    """
    if len(clusters) == 1:
        return Found(replace(clusters[0], name=name))
    nodes = tuple(node for cluster in clusters for node in cluster.nodes)
    twice = [node for node, times in Counter(node.name for node in nodes).items() if times > 1]
    if twice:
        raise InputError(f"the node {twice[0]!r} stands in several of the clusters that are joined; each machine has one name")
    nodes = with_cpus_apart(nodes)
    kinds = {node.gpu.name: node.gpu for node in nodes}
    differing = next((node for node in nodes if kinds[node.gpu.name] != node.gpu), None)
    if differing is not None:
        raise InputError(
            f"the clusters that are joined describe the GPU kind {differing.gpu.name!r} differently; "
            "give it the same entry under gpu_kinds in each, or a name of its own"
        )
    notes: list[str] = []
    fabric = _fabric(clusters, notes)
    for cluster in clusters:
        if cluster.bandwidth_matrix is not None:
            notes.append(
                f"bandwidth_matrix of {cluster.name} is left out, for it tells of its own nodes alone; "
                "a matrix of all nodes is made from a bench by --links"
            )
        if cluster.calibration is not None:
            notes.append(f"calibration of {cluster.name} is left out, for it tells of its own runs; fit anew by motley calibrate")
    both = Cluster(
        name,
        nodes,
        fabric,
        _wide_area(clusters),
        stack=_stack(clusters, notes),
        device_speeds=tuple(speed for cluster in clusters for speed in cluster.device_speeds),
    )
    return Found(replace(both, link_overrides=_overrides(clusters, notes)), tuple(notes))


def _slowest(
    key: str, clusters: Sequence[Cluster], value: Callable[[Cluster], float], text: Callable[[float], str], notes: list[str]
) -> float:
    """The largest of what clusters have; tells where they differ."""
    values = [value(cluster) for cluster in clusters]
    largest = max(values)
    if min(values) < largest:
        shown = ", ".join(f"{text(found)} in {cluster.name}" for cluster, found in zip(clusters, values, strict=True))
        notes.append(f"{key} is {shown}: {text(largest)} is taken")
    return largest


def _seconds(value: float) -> str:
    return quantity_text(value, "time")


def _fabric(clusters: Sequence[Cluster], notes: list[str]) -> Fabric:
    """The slowest of their fabrics in each of its figures."""
    efficiency = []
    for protocol in dict.fromkeys(protocol for cluster in clusters for protocol, _ in cluster.fabric.protocol_efficiency):
        using = [cluster for cluster in clusters if protocol in _protocols(cluster)]
        using = using or [cluster for cluster in clusters if protocol in dict(cluster.fabric.protocol_efficiency)]
        key = f"fabric.protocol_efficiency.{protocol}"
        lost = _slowest(key, using, lambda c, p=protocol: -c.fabric.efficiency(p), lambda value: f"{-value:g}", notes)  # type: ignore[misc]
        efficiency.append((protocol, -lost))
    return Fabric(
        latency_s=_slowest("fabric.latency", clusters, lambda c: c.fabric.latency_s, _seconds, notes),
        oversubscription=_slowest("fabric.oversubscription", clusters, lambda c: c.fabric.oversubscription, "{:g}".format, notes),
        protocol_efficiency=tuple(sorted(efficiency)),
        start_s=_slowest("fabric.start", clusters, lambda c: c.fabric.start_s, _seconds, notes),
        step_s=_slowest("fabric.step", clusters, lambda c: c.fabric.step_s, _seconds, notes),
    )


def _protocols(cluster: Cluster) -> set[str]:
    """The protocols of the links of its nodes, inside and between them."""
    found = {"nvlink" if node.intra.is_nvlink else "pcie" for node in cluster.nodes}
    for node in cluster.nodes:
        if node.nic is not None:
            found |= {node.nic.kind} | ({"ethernet"} if node.nic.ethernet_bytes_per_s is not None else set())
    return found


def _wide_area(clusters: Sequence[Cluster]) -> tuple[WideAreaLink, ...]:
    """The links between sites of all. Raises InputError where clusters differ on one, and where sites have none."""
    found: dict[frozenset[str], WideAreaLink] = {}
    for link in (link for cluster in clusters for link in cluster.wan):
        known = found.setdefault(frozenset(link.between), link)
        if replace(known, between=link.between) != link:
            a, b = link.between
            raise InputError(f"the clusters that are joined have different wan links between {a!r} and {b!r}; give both the same")
    sites = list(dict.fromkeys(node.site for cluster in clusters for node in cluster.nodes))
    reached = set(sites[:1])
    while grown := {site for ends in found if ends & reached for site in ends} - reached:
        reached |= grown
    apart = [site for site in sites if site not in reached]
    if apart:
        shown = [f"the site {site!r}" if site else "nodes without a site" for site in (sites[0], apart[0])]
        raise InputError(
            f"the clusters that are joined have {shown[0]} and {shown[1]}, and no wan link between them; "
            "write the nodes into one file, and the link under wan"
        )
    return tuple(found.values())


def _stack(clusters: Sequence[Cluster], notes: list[str]) -> Stack:
    """The software that the clusters have. Raises InputError where several name different ones."""
    named = [cluster for cluster in clusters if cluster.stack != UNSAID]
    if not named:
        return UNSAID
    found = named[0].stack
    if any(cluster.stack != found for cluster in named):
        shown = ", ".join(f"{cluster.stack.name} in {cluster.name}" for cluster in named)
        raise InputError(f"a cluster has one stack, but the clusters that are joined have {shown}; give the same in each")
    if len(named) < len(clusters):
        notes.append(f"stack is {found.name} in {', '.join(cluster.name for cluster in named)} alone: it is taken for all")
    return found


def _overrides(clusters: Sequence[Cluster], notes: list[str]) -> tuple[LinkOverride, ...]:
    """What the clusters' files say of links, but of pairs of a matrix. Raises InputError where they differ on one."""
    found: dict[str, LinkOverride] = {}
    left: Counter[str] = Counter()
    for cluster, link in _links(clusters):
        if "=>" in link.name:
            left[cluster.name] += 1
        elif found.setdefault(link.name, link) != link:
            raise InputError(f"the clusters that are joined tell different things of the link {link.name!r}; tell both the same")
    notes += [f"links of the bandwidth_matrix of {name} ({count}) are left out with it" for name, count in left.items()]
    return tuple(found.values())


def _links(clusters: Sequence[Cluster]) -> Iterable[tuple[Cluster, LinkOverride]]:
    return ((cluster, link) for cluster in clusters for link in cluster.link_overrides)
