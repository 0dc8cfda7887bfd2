"""The cluster: nodes, their GPUs and NICs, the fabric between them, and how all that is read from a cluster file.

The record holds what the user wrote, in SI units. Directed links and paths are derived from it in `sim.cost.network`.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path

from sim.spec.gpu import CONSTANTS, SPEEDS, GpuKind, at_speed, catalogue, fold, gpu_kind, read_gpu_kind
from sim.spec.reading import InputError, Table, in_range, nearest, parse_yaml, quantity, range_text, read_own_yaml, read_text
from sim.spec.stack import Stack, read_stack, stack, stacks
from sim.spec.writing import efficiency_entries, kind_entries, quantity_text, stack_entries

INTRA_KINDS = ("nvlink", "nvswitch", "pcie3", "pcie4", "pcie5")
NIC_KINDS = ("ethernet", "roce", "infiniband")
RDMA_KINDS = ("roce", "infiniband")

MOST_GPUS, MOST_NODE_GPUS, MOST_OVERSUBSCRIPTION = 100_000, 1024, 1e6
"""What a cluster file may have at most: GPUs, GPUs of one node, oversubscription of the racks' uplinks."""

PCIE_BYTES_PER_S = {"pcie3": 12e9, "pcie4": 24e9, "pcie5": 50e9}
"""What a PCIe x16 link of generation 3, 4, 5 moves in one direction, as measured by host-device copies (nominal 16, 32, 64)."""

PROTOCOLS = ("nvlink", "nvls", "pcie", "infiniband", "roce", "ethernet", "tcp")
"""What a link may speak. nvls: NVLink where the switch itself reduces (NVLink SHARP); tcp: TCP over a card made for RDMA."""


@dataclass(frozen=True)
class Links:
    """What links carry, and what the steps of a collective take on them: the constants of `links` in constants.yaml."""

    efficiency: Mapping[str, float]
    """By protocol: the fraction of its nominal rate that a link carries. Large transfers; the rest is priced apart."""
    latency_s: Mapping[str, float]
    """By kind of interconnect inside a node: seconds of one step between two GPUs in the protocol of low latency."""
    start_s: float
    """Seconds to start a collective or message: the launch of its kernel, and the meeting of its members."""
    step_s: float
    """Seconds that a step takes longer in the protocol of full bandwidth: its fences and flags."""


@cache
def links() -> Links:
    """The constants of constants.yaml, which is read at the first call."""
    return read_links(Table(read_own_yaml(CONSTANTS), CONSTANTS.name).table("links"))


def read_links(table: Table) -> Links:
    """The constants that a table describes; all are required, and the table is closed. Raises InputError."""
    by_protocol, by_kind = table.table("efficiency"), table.table("latency")
    found = Links(
        efficiency={protocol: by_protocol.number(protocol, minimum=0.01, maximum=1.0) for protocol in PROTOCOLS},
        latency_s={kind: by_kind.quantity(kind, "time", zero=True) for kind in INTRA_KINDS},
        start_s=table.quantity("start", "time", zero=True),
        step_s=table.quantity("step", "time", zero=True),
    )
    table.text("source", "")
    for part in (by_protocol, by_kind, table):
        part.close()
    return found


@dataclass(frozen=True)
class Intra:
    """How the GPUs of a node hang together. `bandwidth_bytes_per_s` is per GPU and direction.

    PCIe: `gpus_per_switch` GPUs share one uplink of that rate to their socket; traffic between sockets shares
    `host_bandwidth_bytes_per_s` per direction.
    """

    kind: str
    bandwidth_bytes_per_s: float
    gpus_per_switch: int = 4
    sockets: int = 2
    host_bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    step_s: float = 0.0

    @property
    def is_nvlink(self) -> bool:
        """Whether the GPUs talk over NVLink, directly or through a switch."""
        return self.kind in ("nvlink", "nvswitch")


@dataclass(frozen=True)
class Nic:
    """The network cards of a node: `count` of them, each of `bandwidth_bytes_per_s` per direction.

    `ethernet_bytes_per_s` is the rate of the node's Ethernet beside an RDMA card; None = TCP runs over the card itself.
    """

    kind: str
    bandwidth_bytes_per_s: float
    count: int = 1
    ethernet_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Node:
    """One machine: `gpus` GPUs of one kind, their interconnect, NICs (None = it cannot talk to others), site and rack."""

    name: str
    gpu: GpuKind
    gpus: int
    intra: Intra
    nic: Nic | None = None
    site: str = ""
    rack: str | None = None
    host_memory_bytes: int | None = None
    """What its host has for the states of offloaded optimizers; None where nobody said, and nothing limits them."""
    host_gpus: int | None = None
    """GPUs that its host serves, where it stands for a part of a machine."""


@dataclass(frozen=True)
class Fabric:
    """The network between nodes: one-way latency end to end, and how many times the racks' uplinks are oversubscribed.

    A node without a rack is a rack of its own. `protocol_efficiency` overrides entries of `Links.efficiency`, `start_s` (which
    counts inside a node too) and `step_s` those of Links.
    """

    latency_s: float = 0.0
    oversubscription: float = 1.0
    protocol_efficiency: tuple[tuple[str, float], ...] = ()
    start_s: float = 0.0
    step_s: float = 0.0

    def efficiency(self, protocol: str) -> float:
        """Fraction of its nominal rate that a link of this protocol carries."""
        return dict(self.protocol_efficiency).get(protocol) or links().efficiency[protocol]


@dataclass(frozen=True)
class WideAreaLink:
    """A link between two sites, of this rate in each direction."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class BandwidthMatrix:
    """Measured rates between senders (rows) and receivers (columns), all nodes or all devices; they cap the pairs."""

    names: tuple[str, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    """By sender, and for each by receiver; the diagonal is infinite."""
    file: Path | None = field(default=None, compare=False, repr=False)
    """The file that it was read from."""


@dataclass(frozen=True)
class LinkOverride:
    """What was found of one directed link, in the place of what follows from the nodes, the fabric and wan; None: as there."""

    name: str
    """As `sim.cost.network` names it, such as `a100/nic0>fabric` or `site:paris>site:oslo`."""
    bandwidth_bytes_per_s: float | None = None
    """What it really carries; no protocol's efficiency is counted again."""
    latency_s: float | None = None
    """What it adds to the latency of each path over it: that of a wan link, else 0 (`fabric.latency` is beside it)."""


@dataclass(frozen=True)
class Calibration:
    """What a cluster's constants were fitted on, and how well plans were then predicted that were held out of the fit."""

    fitted_on: tuple[str, ...]
    """The runs, benchmarks and tables, by the names of their files."""
    origin: str
    """Of the runs: measured or paced."""
    plans: int
    error_before: float
    """Median of |predicted / measured - 1| of the iteration time, with the constants that there were before."""
    error_after: float
    """The same with the fitted ones, over plans that were held out."""
    coverage: float
    """How often measured / predicted - 1 is expected between `low` and `high`."""
    low: float
    high: float
    not_told: tuple[str, ...] = ()
    """Constants that the data do not tell, which are as they were."""

    def interval_s(self, iteration_s: float) -> tuple[float, float]:
        """Between which seconds an iteration that is predicted to take `iteration_s` is expected to take."""
        return iteration_s * (1 + self.low), iteration_s * (1 + self.high)


@dataclass(frozen=True)
class Device:
    """One GPU: its name (`node/index`), its node, its index there, and how many times as fast as its kind it computes."""

    name: str
    node: Node
    index: int
    speed: float = 1.0

    @cached_property
    def gpu(self) -> GpuKind:
        """Its kind, at its speed. Devices of one node and speed have the same object."""
        return self.node.gpu if self.speed == 1 else at_speed(self.node.gpu, self.speed)


@dataclass(frozen=True)
class Cluster:
    """Nodes and the network between them. Raises InputError for names that stand twice and sites without a link."""

    name: str
    nodes: tuple[Node, ...]
    fabric: Fabric = field(default_factory=Fabric)
    wan: tuple[WideAreaLink, ...] = ()
    bandwidth_matrix: BandwidthMatrix | None = None
    stack: Stack = field(default_factory=lambda: stack("motley"))
    """The software that trains on it."""
    device_speeds: tuple[tuple[str, float], ...] = ()
    """Of the devices that compute faster or slower than their kind: how many times as fast."""
    link_overrides: tuple[LinkOverride, ...] = ()
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError(f"cluster {self.name!r}: a cluster has at least one node, but got none")
        for name, times in Counter(node.name for node in self.nodes).items():
            if times > 1:
                raise InputError(f"cluster {self.name!r}: node names are unique, but {name!r} stands {times} times")
        sites = {node.site for node in self.nodes}
        for link in self.wan:
            for site in link.between:
                if site not in sites:
                    known = ", ".join(sorted(known for known in sites if known))
                    but = f"the nodes' sites are {known}" if known else "no node has a site"
                    raise InputError(f"cluster {self.name!r}: wan joins the site {site!r}, but {but}")
            if link.between[0] == link.between[1]:
                raise InputError(f"cluster {self.name!r}: wan joins two sites, but got {link.between[0]!r} twice")
        pairs = Counter(frozenset(link.between) for link in self.wan)
        for link in self.wan:
            if pairs[frozenset(link.between)] > 1:
                raise InputError(f"cluster {self.name!r}: wan joins {link.between[0]!r} and {link.between[1]!r} more than once")
        reached = {self.nodes[0].site}
        while grown := {s for link in self.wan for s in link.between if reached & set(link.between)} - reached:
            reached |= grown
        for node in self.nodes:
            if node.site not in reached:
                where = [f"{site!r}" if site else "no site" for site in (node.site, self.nodes[0].site)]
                raise InputError(
                    f"cluster {self.name!r}: every two sites need a wan path, but node {node.name!r} ({where[0]}) "
                    f"has none to node {self.nodes[0].name!r} ({where[1]})"
                )
            if node.nic is None and len(self.nodes) > 1:
                raise InputError(
                    f"cluster {self.name!r}: node {node.name!r} has no nic, but the cluster has {len(self.nodes)} nodes"
                )
        speeds = dict(self.device_speeds)
        for name, speed in speeds.items():
            if name not in self._by_name:
                raise InputError(
                    f"cluster {self.name!r}: devices: {name!r} is not in it; it has {self._summary()}"
                    f"{nearest(name, self._by_name)}"
                )
            if not SPEEDS[0] <= speed <= SPEEDS[1]:
                raise InputError(
                    f"cluster {self.name!r}: devices: a speed is from {SPEEDS[0]:g} to {SPEEDS[1]:g}, but {name!r} has {speed!r}"
                )
        known_links = link_names(self) if self.link_overrides else set()
        for override in self.link_overrides:
            if override.name not in known_links:
                near = nearest(override.name, known_links)
                raise InputError(f"cluster {self.name!r}: links: there is no link {override.name!r}{near}")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All GPUs, in the order of the file."""
        speeds = dict(self.device_speeds)
        names = ((f"{node.name}/{index}", node, index) for node in self.nodes for index in range(node.gpus))
        return tuple(Device(name, node, index, speeds.get(name, 1.0)) for name, node, index in names)

    @cached_property
    def _by_name(self) -> Mapping[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _node_of(self) -> Mapping[str, str]:
        return {device.name: device.node.name for device in self.devices}

    def nodes_of(self, devices: Sequence[str]) -> int:
        """How many nodes some devices are on. Raises InputError where there is no such device."""
        try:
            return len({self._node_of[name] for name in devices})
        except KeyError:
            return len({self.device(name).node.name for name in devices})

    def device(self, name: str) -> Device:
        """The GPU of this name. Raises InputError where there is none."""
        if name not in self._by_name:
            raise InputError(
                f"device {name!r} is not in cluster {self.name!r}, which has {self._summary()}{nearest(name, self._by_name)}"
            )
        return self._by_name[name]

    def _summary(self) -> str:
        """The devices in short, such as 'a100/0-7, rtx4090-0/0-7 and 2 more nodes'."""
        shown = [f"{node.name}/0-{node.gpus - 1}" if node.gpus > 1 else f"{node.name}/0" for node in self.nodes[:4]]
        more = f" and {len(self.nodes) - 4} more nodes" if len(self.nodes) > 4 else ""
        return ", ".join(shown) + more

    def peak_flop_per_s(self, precision: str, devices: tuple[str, ...] | None = None) -> float:
        """Sum of the peaks at this precision of the given devices, or of all; a kind without the precision adds nothing."""
        chosen = self.devices if devices is None else [self.device(name) for name in devices]
        return sum(device.gpu.peak(precision) or 0.0 for device in chosen)

    def without_nodes(self, names: set[str]) -> Cluster:
        """This cluster without some of its nodes, their rows and columns in the matrix, and sites that have no node left."""
        nodes = tuple(node for node in self.nodes if node.name not in names)
        sites = {node.site for node in nodes}
        wan = tuple(link for link in self.wan if sites.issuperset(link.between))
        matrix = self.bandwidth_matrix
        if matrix is not None:
            kept = [i for i, name in enumerate(matrix.names) if name.split("/")[0] not in names]
            rows = tuple(tuple(matrix.bytes_per_s[i][j] for j in kept) for i in kept)
            matrix = BandwidthMatrix(tuple(matrix.names[i] for i in kept), rows, matrix.file)
        return self.with_nodes(nodes, wan, matrix)

    def with_nodes(
        self, nodes: tuple[Node, ...], wan: tuple[WideAreaLink, ...] = (), matrix: BandwidthMatrix | None = None
    ) -> Cluster:
        """This cluster with other nodes, and what is known of devices and links as far as their nodes, racks and sites remain."""
        gone = _places(self.nodes) - _places(nodes)
        ends = {link: link.name.replace("=>", ">").split(">") for link in self.link_overrides}
        return replace(
            self,
            nodes=nodes,
            wan=wan,
            bandwidth_matrix=matrix,
            device_speeds=tuple((name, speed) for name, speed in self.device_speeds if name not in gone),
            link_overrides=tuple(
                link for link, (a, b) in ends.items() if not gone & {a, b, a.partition("/")[0], b.partition("/")[0]}
            ),
        )


def rack_name(node: Node) -> str:
    """The node's rack, which stands at one site; a node without one is a rack of its own."""
    if node.rack is None:
        return node.name
    return f"rack:{node.rack}" + (f"@{node.site}" if node.site else "")


def link_names(cluster: Cluster) -> set[str]:
    """The names of all links that paths of a cluster may cross."""
    found: set[str] = set()
    matrix = cluster.bandwidth_matrix
    for node in cluster.nodes:
        medium = "nvlink" if node.intra.is_nvlink else "pcie"
        for index in range(node.gpus):
            found |= {f"{node.name}/{index}>{medium}", f"{medium}>{node.name}/{index}"}
        if not node.intra.is_nvlink:
            for number in range(math.ceil(node.gpus / node.intra.gpus_per_switch)):
                found |= {f"{node.name}/switch{number}>host", f"{node.name}/host>switch{number}"}
            found |= {f"{node.name}/socket{a}>socket{b}" for a, b in permutations(range(node.intra.sockets), 2)}
        if node.nic is not None:
            cards = [f"nic{number}" for number in range(node.nic.count)]
            cards += ["ethernet"] if node.nic.ethernet_bytes_per_s is not None else []
            found |= {name for card in cards for name in (f"{node.name}/{card}>fabric", f"fabric>{node.name}/{card}")}
        if cluster.fabric.oversubscription > 1:
            found |= {f"{rack_name(node)}>core", f"core>{rack_name(node)}"}
    for a, b in (wan.between for wan in cluster.wan):
        found |= {f"site:{a}>site:{b}", f"site:{b}>site:{a}"}
    if matrix is not None:
        found |= {f"{a}=>{b}" for a, b in permutations(matrix.names, 2)}
    return found


def _places(nodes: Iterable[Node]) -> set[str]:
    """What names of links speak of: nodes, their GPUs and PCIe switches, racks and sites."""
    found: set[str] = set()
    for node in nodes:
        found |= {node.name, rack_name(node), f"site:{node.site}"}
        found |= {f"{node.name}/{index}" for index in range(node.gpus)}
        found |= {f"{node.name}/switch{number}" for number in range(math.ceil(node.gpus / node.intra.gpus_per_switch))}
    return found


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_cluster(path: str | Path) -> Cluster:
    """The cluster of a YAML file. Raises InputError that names the file, the key, the value and what is accepted."""
    return parse_cluster(read_text(path), path)


def parse_cluster(text: str, path: str | Path) -> Cluster:
    """The cluster of a YAML text, as of a file at `path`. Raises InputError as `read_cluster` does."""
    table = Table(parse_yaml(text, str(path)), str(path))
    name = table.name("name")
    if "/" in name or "\0" in name:
        raise table.error("name", f"a cluster's name becomes part of file names and has no '/', but got {name!r}")
    kinds: dict[str, GpuKind] = {}
    if "gpu_kinds" in table:
        entries = table.table("gpu_kinds")
        for kind_name in entries.keys():  # noqa: SIM118 - Table.keys also marks the keys as asked for
            base = next((kind for kind in catalogue().values() if fold(kind_name) in map(fold, (kind.name, *kind.aliases))), None)
            kind = read_gpu_kind(base.name if base else kind_name, entries.table(kind_name), base)
            spellings = [fold(alias) for alias in (kind.name, *kind.aliases)]
            if any(spelling in kinds for spelling in spellings):
                raise entries.error(kind_name, f"{kind.name} is described twice")
            kinds |= dict.fromkeys(spellings, kind)
        entries.close()
    nodes: list[Node] = []
    gpus = 0
    for entry in table.tables("nodes", minimum=1):
        made = _read_nodes(entry, kinds)
        gpus += sum(node.gpus for node in made)
        if gpus > MOST_GPUS:
            raise table.error("nodes", f"a cluster has at most {MOST_GPUS:,} GPUs, but with {entry.at} it has {gpus:,}")
        nodes += made
    fabric = Fabric(start_s=links().start_s, step_s=links().step_s)
    if "fabric" in table:
        entry = table.table("fabric")
        efficiency: tuple[tuple[str, float], ...] = ()
        if "protocol_efficiency" in entry:
            by_protocol = entry.table("protocol_efficiency")
            found = {key: by_protocol.number(key, None, 0.01, 1.0) for key in PROTOCOLS}
            efficiency = tuple((key, value) for key, value in found.items() if value is not None)
            by_protocol.close()
        fabric = Fabric(
            latency_s=entry.quantity("latency", "time", 0.0, zero=True),
            oversubscription=entry.number("oversubscription", 1.0, 1.0, MOST_OVERSUBSCRIPTION),
            protocol_efficiency=efficiency,
            start_s=entry.quantity("start", "time", fabric.start_s, zero=True),
            step_s=entry.quantity("step", "time", fabric.step_s, zero=True),
        )
        entry.close()
    wan = tuple(_read_wan(entry) for entry in table.tables("wan", []))
    matrix_file = table.text("bandwidth_matrix", None)
    software = _read_software(table)
    speeds = _read_speeds(table)
    overrides = _read_overrides(table)
    calibration = _read_calibration(table.table("calibration")) if "calibration" in table else None
    table.close()
    matrix = None
    if matrix_file is not None:
        matrix = read_bandwidth_matrix(Path(path).parent / matrix_file, tuple(nodes))
    try:
        return Cluster(name, tuple(nodes), fabric, wan, matrix, software, speeds, overrides, calibration)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_software(table: Table) -> Stack:
    """The stack that a cluster file names or describes; Motley's own where it says nothing."""
    if "stack" not in table:
        return stack("motley")
    if not isinstance(table.get("stack", lambda value: value, "the name of a software stack, or its constants"), dict):
        return table.get("stack", lambda value: stack(str(value)), "the name of a software stack, or its constants")
    return read_stack("own", table.table("stack"))


def _read_speeds(table: Table) -> tuple[tuple[str, float], ...]:
    """The speeds that the section `devices` gives; 1 says nothing."""
    if "devices" not in table:
        return ()
    devices, found = table.table("devices"), []
    for name in devices.keys():  # noqa: SIM118 - Table.keys also marks the keys as asked for
        entry = devices.table(name)
        found.append((name, entry.number("speed", 1.0, *SPEEDS)))
        entry.close()
    return tuple((name, speed) for name, speed in found if speed != 1)


def _read_overrides(table: Table) -> tuple[LinkOverride, ...]:
    """What the section `links` says of directed links."""
    if "links" not in table:
        return ()
    entries, found = table.table("links"), []
    for name in entries.keys():  # noqa: SIM118
        entry = entries.table(name)
        found.append(
            LinkOverride(name, entry.quantity("bandwidth", "bandwidth", None), entry.quantity("latency", "time", None, zero=True))
        )
        entry.close()
    return tuple(found)


def _read_calibration(table: Table) -> Calibration:
    """What the section `calibration` says of the fit."""
    interval = table.table("interval")
    found = Calibration(
        fitted_on=tuple(str(name) for name in table.items("fitted_on")),
        origin=table.choice("origin", ("measured", "paced")),
        plans=table.integer("plans", minimum=0),
        error_before=table.number("error_before", minimum=0.0),
        error_after=table.number("error_after", minimum=0.0),
        coverage=interval.number("coverage", minimum=0.0, maximum=1.0),
        low=interval.number("low", minimum=-1.0),
        high=interval.number("high", minimum=-1.0),
        not_told=tuple(str(name) for name in table.items("not_told", [])),
    )
    if found.low > found.high:
        raise interval.error("low", f"is at most high, but got {found.low!r} and {found.high!r}")
    interval.close()
    table.close()
    return found


def _read_nodes(entry: Table, kinds: Mapping[str, GpuKind]) -> list[Node]:
    """The `count` nodes that one entry of `nodes` stands for."""

    def kind(value: object) -> GpuKind:
        if not isinstance(value, str):
            raise ValueError
        return kinds.get(fold(value)) or gpu_kind(value, (kind.name for kind in kinds.values()))

    name = entry.text("name")
    if any(letter in "/," or letter.isspace() for letter in name):
        raise entry.error("name", f"a node name has no '/', comma or space, which separate device names, but got {name!r}")
    count = entry.integer("count", 1, minimum=1, maximum=MOST_GPUS)
    gpu = entry.get("gpu", kind, "the name of a GPU kind")
    gpus = entry.integer("gpus", minimum=1, maximum=MOST_NODE_GPUS)
    node = Node(
        name=name,
        gpu=gpu,
        gpus=gpus,
        intra=_read_intra(entry, gpu),
        nic=_read_nic(entry.table("nic"), gpus) if "nic" in entry else None,
        site=entry.text("site", ""),
        rack=entry.text("rack", None),
        host_memory_bytes=None if (host := entry.quantity("host_memory", "size", None)) is None else round(host),
    )
    entry.close()
    return [node] if count == 1 else [replace(node, name=f"{name}-{i}") for i in range(count)]


def _read_intra(entry: Table, gpu: GpuKind) -> Intra:
    """The interconnect inside a node, with its defaults from the kind of link and of GPU."""
    as_text = isinstance(entry.get("intra", lambda value: value, "an interconnect"), str)
    table = Table({"kind": entry.text("intra")}, entry.where, f"{entry.at}.intra") if as_text else entry.table("intra")
    try:
        kind = table.choice("kind", INTRA_KINDS)
    except InputError as error:
        if as_text:
            raise InputError(str(error).replace(".intra.kind:", ".intra:")) from None
        raise
    default = gpu.nvlink_bytes_per_s if kind in ("nvlink", "nvswitch") else PCIE_BYTES_PER_S[kind]
    if default is None and "bandwidth" not in table:
        raise entry.error(
            "intra",
            f"{gpu.name} has no NVLink rate in the catalogue, but got {kind!r}; "
            "accepted: a pcie kind, or {kind: nvlink, bandwidth: RATE}",
        )
    bandwidth = table.quantity("bandwidth", "bandwidth", default)
    intra = Intra(
        kind=kind,
        bandwidth_bytes_per_s=bandwidth,
        gpus_per_switch=table.integer("gpus_per_switch", 4, minimum=1, maximum=MOST_NODE_GPUS),
        sockets=table.integer("sockets", 2, minimum=1, maximum=MOST_NODE_GPUS),
        host_bandwidth_bytes_per_s=table.quantity("host_bandwidth", "bandwidth", bandwidth),
        latency_s=table.quantity("latency", "time", links().latency_s[kind], zero=True),
        step_s=table.quantity("step", "time", links().step_s, zero=True),
    )
    table.close()
    return intra


def _read_nic(table: Table, gpus: int) -> Nic:
    """The network cards of a node."""
    nic = Nic(
        kind=table.choice("kind", NIC_KINDS),
        bandwidth_bytes_per_s=table.quantity("bandwidth", "bandwidth"),
        count=table.integer("count", 1, minimum=1),
        ethernet_bytes_per_s=table.quantity("ethernet", "bandwidth", None),
    )
    if nic.count > gpus:
        raise table.error("count", f"a NIC serves at least one GPU, but got {nic.count} NICs for {gpus} GPUs")
    if nic.ethernet_bytes_per_s is not None and nic.kind == "ethernet":
        raise table.error("ethernet", "is the rate of the Ethernet beside an RDMA card, but the nic is of kind ethernet itself")
    table.close()
    return nic


def _read_wan(table: Table) -> WideAreaLink:
    """One link between two sites."""
    ends = table.items("between", minimum=2)
    if len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise table.error("between", f"expected the names of two sites, but got {ends!r}")
    link = WideAreaLink(
        between=(ends[0], ends[1]),
        bandwidth_bytes_per_s=table.quantity("bandwidth", "bandwidth"),
        latency_s=table.quantity("latency", "time", 0.0, zero=True),
    )
    table.close()
    return link


def read_bandwidth_matrix(path: str | Path, nodes: tuple[Node, ...]) -> BandwidthMatrix:
    """The matrix of a CSV file whose first row and column are all node names or all device names, row = sender.

    The corner cell is the unit, such as 'GB/s'; the diagonal is empty. Raises InputError for another size, names that are
    not the cluster's, and rates that are missing, zero, negative or no numbers.
    """
    try:
        rows = [row for row in csv.reader(read_text(path).splitlines()) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise InputError(f"{path}: is not valid CSV: {error}") from None
    if not rows:
        raise InputError(f"{path}: is empty; expected a matrix whose first row and column are all node or all device names")
    unit, columns = rows[0][0].strip(), [cell.strip() for cell in rows[0][1:]]
    try:
        factor = quantity(f"1 {unit}", "bandwidth")
    except InputError:
        raise InputError(
            f"{path}: the corner cell is the unit of the rates, such as 'GB/s' or 'Gbit/s', but got {unit!r}"
        ) from None
    names = [row[0].strip() for row in rows[1:]]
    of_nodes = [node.name for node in nodes]
    of_devices = [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)]
    expected = of_devices if any("/" in name for name in columns) else of_nodes
    what = "device" if expected is of_devices else "node"
    known = set(expected)
    for found, place in ((columns, "first row"), (names, "first column")):
        there = Counter(found)
        for name, times in there.items():
            if name not in known:
                raise InputError(
                    f"{path}: the {place} names {name!r}, which is no {what} of the cluster{nearest(name, expected)}"
                )
            if times > 1:
                raise InputError(f"{path}: the {place} names {name!r} {times} times")
        if len(found) != len(expected):
            missing = next(name for name in expected if name not in there)
            raise InputError(
                f"{path}: the {place} names all {len(expected)} {what}s of the cluster, but {len(found)} are there; "
                f"the first missing is {missing!r}"
            )
    by_pair: dict[tuple[str, str], float] = {}
    for row, sender in zip(rows[1:], names, strict=True):
        cells = [cell.strip() for cell in row[1:]]
        if len(cells) != len(columns):
            raise InputError(f"{path}: the row {sender!r} has {len(cells)} rates, but there are {len(columns)} columns")
        for receiver, cell in zip(columns, cells, strict=True):
            if sender == receiver:
                if cell not in ("", "-"):
                    raise InputError(f"{path}: the diagonal is empty, but the cell of {sender!r} to itself holds {cell!r}")
                by_pair[sender, receiver] = math.inf
                continue
            try:
                rate = float(cell)
            except ValueError:
                rate = math.nan
            if not (math.isfinite(rate) and rate > 0):
                raise InputError(
                    f"{path}: every rate is a number above zero, but the one from {sender!r} to {receiver!r} is "
                    f"{cell if cell else 'missing'}"
                )
            if not in_range(rate * factor, "bandwidth"):
                raise InputError(
                    f"{path}: every rate is {range_text('bandwidth')}, but the one from {sender!r} to {receiver!r} is "
                    f"{cell} {unit}"
                )
            by_pair[sender, receiver] = rate * factor
    return BandwidthMatrix(tuple(expected), tuple(tuple(by_pair[a, b] for b in expected) for a in expected), Path(path))


# --- Writing ---------------------------------------------------------------------------------------------------------


def cluster_yaml(cluster: Cluster) -> str:
    """The text of a cluster's file, from which `read_cluster` reads an equal one.

    A bandwidth matrix is written as the path of its file. Raises InputError for what no file can say: two kinds of one name, and
    a matrix without a file.
    """
    lines = [f"name: {_word(cluster.name)}", "nodes:"]
    lines += [f"  - {_flow(entry)}" for entry in _node_entries(cluster.nodes)]
    if (fabric := _fabric_entry(cluster.fabric)) != {}:
        lines.append(f"fabric: {_flow(fabric)}")
    if cluster.wan:
        lines.append("wan:")
    for link in cluster.wan:
        wan = {"between": list(link.between), "bandwidth": _rate(link.bandwidth_bytes_per_s), "latency": _time(link.latency_s)}
        lines.append(f"  - {_flow(wan)}")
    if cluster.bandwidth_matrix is not None:
        if cluster.bandwidth_matrix.file is None:
            raise InputError(f"cluster {cluster.name!r}: its bandwidth matrix was not read from a file, so no file can name it")
        lines.append(f"bandwidth_matrix: {_word(str(cluster.bandwidth_matrix.file.resolve()))}")
    lines += _kind_lines(cluster)
    own = cluster.stack
    if stacks().get(own.name) == own:
        lines += [] if own.name == "motley" else [f"stack: {_word(own.name)}"]
    else:
        entry = stack_entries(own)
        lines.append("stack:" if entry else "stack: {}")
        lines += [f"  {key}: {_word(value)}" for key, value in entry.items()]
    if cluster.device_speeds:
        lines.append("devices:")
    lines += [f"  {_word(name)}: {{speed: {speed!r}}}" for name, speed in cluster.device_speeds]
    if cluster.link_overrides:
        lines.append("links:")
    for override in cluster.link_overrides:
        parts = {
            **({} if (rate := override.bandwidth_bytes_per_s) is None else {"bandwidth": _rate(rate)}),
            **({} if (latency_s := override.latency_s) is None else {"latency": _time(latency_s)}),
        }
        lines.append(f"  {_word(override.name)}: {_flow(parts)}")
    if (found := cluster.calibration) is not None:
        lines += [
            "calibration:",
            f"  fitted_on: {_word(list(found.fitted_on))}",
            f"  origin: {found.origin}",
            f"  plans: {found.plans}",
            f"  error_before: {found.error_before!r}  # median of |predicted / measured - 1|, plans held out of the fit",
            f"  error_after: {found.error_after!r}",
            "  # of measured / predicted - 1",
            f"  interval: {{coverage: {found.coverage!r}, low: {found.low!r}, high: {found.high!r}}}",
            f"  not_told: {_word(list(found.not_told))}",
        ]
    return "\n".join(lines) + "\n"


def _node_entries(nodes: tuple[Node, ...]) -> list[dict[str, object]]:
    """What `nodes` says; nodes that differ in the number at their names' ends alone, from 0 on, are one entry with `count`."""
    found, at = [], 0
    while at < len(nodes):
        node, count = nodes[at], 1
        base = node.name.removesuffix("-0")
        if base != node.name:
            while at + count < len(nodes) and replace(nodes[at + count], name=node.name) == node:
                if nodes[at + count].name != f"{base}-{count}":
                    break
                count += 1
        entry: dict[str, object] = {"name": base if count > 1 else node.name}
        entry |= {"count": count} if count > 1 else {}
        entry |= {"gpu": node.gpu.name, "gpus": node.gpus, "intra": _intra_entry(node.intra)}
        if node.nic is not None:
            nic: dict[str, object] = {"kind": node.nic.kind, "bandwidth": _rate(node.nic.bandwidth_bytes_per_s)}
            nic |= {"count": node.nic.count} if node.nic.count > 1 else {}
            nic |= {} if node.nic.ethernet_bytes_per_s is None else {"ethernet": _rate(node.nic.ethernet_bytes_per_s)}
            entry["nic"] = nic
        entry |= {"site": node.site} if node.site else {}
        entry |= {"rack": node.rack} if node.rack is not None else {}
        entry |= {} if node.host_memory_bytes is None else {"host_memory": f"{node.host_memory_bytes} B"}
        found.append(entry)
        at += count
    return found


def _intra_entry(intra: Intra) -> dict[str, object]:
    """What `intra` says, with what has no other default."""
    entry: dict[str, object] = {"kind": intra.kind, "bandwidth": _rate(intra.bandwidth_bytes_per_s)}
    entry |= {"gpus_per_switch": intra.gpus_per_switch} if intra.gpus_per_switch != 4 else {}
    entry |= {"sockets": intra.sockets} if intra.sockets != 2 else {}
    if intra.host_bandwidth_bytes_per_s not in (intra.bandwidth_bytes_per_s, math.inf):
        entry["host_bandwidth"] = _rate(intra.host_bandwidth_bytes_per_s)
    entry |= {"latency": _time(intra.latency_s)} if intra.latency_s != links().latency_s[intra.kind] else {}
    entry |= {"step": _time(intra.step_s)} if intra.step_s != links().step_s else {}
    return entry


def _fabric_entry(fabric: Fabric) -> dict[str, object]:
    """What `fabric` says, with what has no other default."""
    entry: dict[str, object] = {"latency": _time(fabric.latency_s)} if fabric.latency_s else {}
    entry |= {"oversubscription": fabric.oversubscription} if fabric.oversubscription != 1 else {}
    entry |= {"protocol_efficiency": dict(fabric.protocol_efficiency)} if fabric.protocol_efficiency else {}
    entry |= {"start": _time(fabric.start_s)} if fabric.start_s != links().start_s else {}
    entry |= {"step": _time(fabric.step_s)} if fabric.step_s != links().step_s else {}
    return entry


def _kind_lines(cluster: Cluster) -> list[str]:
    """The section `gpu_kinds`: the kinds that are not as in the catalogue."""
    lines: list[str] = []
    written: dict[str, GpuKind] = {}
    for kind in (node.gpu for node in cluster.nodes):
        if written.setdefault(kind.name, kind) != kind:
            raise InputError(f"cluster {cluster.name!r}: two kinds have the name {kind.name!r}, which a file cannot say")
    for kind in written.values():
        known = catalogue().get(kind.name)
        if known == kind:
            continue
        lines.append(f"  {_word(kind.name)}:")
        lines += [f"    {key}: {_word(value)}" for key, value in kind_entries(kind).items()]
        if known is None or known.efficiency != kind.efficiency:
            lines.append("    efficiency:")
            lines += [f"      {key}: {_word(value)}" for key, value in efficiency_entries(kind.efficiency).items()]
    return ["gpu_kinds:", *lines] if lines else []


def _rate(bytes_per_s: float) -> str:
    return quantity_text(bytes_per_s, "bandwidth")


def _time(seconds: float) -> str:
    return quantity_text(seconds, "time")


def _word(value: object) -> str:
    """A plain value as YAML in one line."""
    return json.dumps(value, ensure_ascii=False) if not _is_plain(value) else str(value)


def _is_plain(value: object) -> bool:
    """Whether a text needs no quotes."""
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None


_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|y|n)\Z)[A-Za-z][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*"
    r"|[0-9][0-9.e+-]* [A-Za-z$]+(?:/[sh])?",
    re.IGNORECASE,
)


def _flow(entry: Mapping[str, object]) -> str:
    """A mapping as YAML in one line."""
    parts = (f"{key}: {_flow(value) if isinstance(value, dict) else _word(value)}" for key, value in entry.items())
    return "{" + ", ".join(parts) + "}"
