"""The cluster that a machine is: its GPUs, what links them, and its network cards, as the system tells them.

Read are `nvidia-smi -q`, `nvidia-smi topo -m` and `nvidia-smi nvlink -s`, and under /sys/class the network interfaces and the
cards made for RDMA. What cannot be known is left out and told. The rates of a bench of links take the place of nominal ones
(several machines become one cluster in `experiments.joining`).
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import median

from experiments.machine import LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S, machine_bytes
from experiments.parallel import cores
from sim.spec.bench import Bench, LinkMeasurement
from sim.spec.cluster import (
    PCIE_BYTES_PER_S,
    BandwidthMatrix,
    Cluster,
    Fabric,
    Intra,
    Nic,
    Node,
    links,
)
from sim.spec.gpu import CPU, GpuKind, gpu_kind
from sim.spec.reading import InputError

TOOL = "nvidia-smi"

SYSTEM = Path("/sys/class")
"""Where Linux tells of network interfaces (`net`) and of cards made for RDMA (`infiniband`)."""

MEMORY_TOLERANCE = 0.1
"""How far a GPU's memory may be from its kind's before that is told."""

MOST_NVLINKS = 18
"""Of one GPU. Where each pair has so many links that a GPU would need more of them, a switch must be between them."""

INFINIBAND_TYPE = 32
"""The hardware type of an interface of IP over InfiniBand (ARPHRD_INFINIBAND of linux/if_arp.h)."""


@dataclass(frozen=True)
class Found:
    """A cluster, and in one line each what could not be known or said of it."""

    cluster: Cluster
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU as `nvidia-smi -q` tells it; None is what it does not tell."""

    name: str
    memory_bytes: int | None
    pcie_generation: int | None
    pcie_width: int | None


def discover(name: str, run: Callable[..., str | None] | None = None, system: Path = SYSTEM) -> Found:
    """The cluster of this machine: its GPUs, or, where there are none, its CPUs with the peak that is measured here.

    `run` gives the output of `nvidia-smi` with some arguments, or None. Raises InputError for GPUs that a node cannot have:
    several kinds, or one that the catalogue does not know.
    """
    ask = run if run is not None else ask_nvidia
    notes: list[str] = []
    nic = _nic(system, notes)
    query = ask("-q")
    gpus = parse_query(query) if query else []
    if not gpus:
        notes.append("no GPU was found: the devices are CPUs, one for each core, whose peak was measured")
        return Found(_cpus(name, nic), tuple(notes))
    kind = _kind(gpus, notes)
    topology = ask("topo", "-m")
    intra = _intra(kind, gpus, parse_topology(topology) if topology else {}, ask("nvlink", "-s") or "", notes)
    fabric = Fabric(start_s=links().start_s, step_s=links().step_s)
    node = Node(name, kind, len(gpus), intra, nic, host_memory_bytes=machine_bytes())
    return Found(Cluster(name, (node,), fabric), tuple(notes))


def ask_nvidia(*arguments: str) -> str | None:
    """What `nvidia-smi` prints; None where it is not there or fails, as without a driver."""
    if shutil.which(TOOL) is None:
        return None
    try:
        done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# --- nvidia-smi ------------------------------------------------------------------------------------------------------


def parse_query(text: str) -> list[Gpu]:
    """The GPUs that `nvidia-smi -q` tells of: sections by indentation, `Key : Value`, each GPU under a line `GPU BUS-ID`."""
    gpus: list[dict[str, str]] = []
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if re.match(r"GPU\s+[0-9A-Fa-f]+:[0-9A-Fa-f]+:", line):
            gpus.append({})
            above = []
            continue
        key, colon, value = (part.strip() for part in line.partition(" : ")) if " : " in line else (line.strip(), "", "")
        while above and above[-1][0] >= depth:
            above.pop()
        if gpus and colon:
            gpus[-1].setdefault(" / ".join([*(name for _, name in above), key]), value)
        elif not colon:
            above.append((depth, key))
    return [_gpu(facts) for facts in gpus if "Product Name" in facts]


def _gpu(facts: Mapping[str, str]) -> Gpu:
    """One GPU of its lines; the generation is what both the GPU and the host reach."""
    link = "PCI / GPU Link Info"
    generations = [_number(facts.get(f"{link} / PCIe Generation / {key}")) for key in ("Max", "Device Max", "Host Max")]
    memory = facts.get("FB Memory Usage / Total", "")
    megabytes = _number(memory)
    return Gpu(
        name=facts["Product Name"],
        memory_bytes=megabytes * 2**20 if megabytes is not None and memory.endswith("MiB") else None,
        pcie_generation=min((found for found in generations if found is not None), default=None),
        pcie_width=_number(facts.get(f"{link} / Link Width / Max")),
    )


def _number(text: str | None) -> int | None:
    """The whole number that a text begins with, as in 16x or 81559 MiB; None for others, as N/A."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """What `nvidia-smi topo -m` tells of every two GPUs: X, NV and a number of links, PIX, PXB, PHB, NODE or SYS."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line for line in plain.splitlines() if re.search(r"\bGPU\d", line)]
    if not lines:
        return {}
    columns = [int(number) for number in re.findall(r"\bGPU(\d+)", lines[0])]
    found = {}
    for line in lines[1:]:
        words = line.split()
        row = re.fullmatch(r"GPU(\d+)", words[0])
        if row is not None and len(words) > len(columns):
            for column, cell in zip(columns, words[1:], strict=False):
                found[int(row[1]), column] = cell
    return found


def _kind(gpus: Sequence[Gpu], notes: list[str]) -> GpuKind:
    """The catalogue's kind of all GPUs."""
    names = list(dict.fromkeys(gpu.name for gpu in gpus))
    if len(names) > 1:
        counts = Counter(gpu.name for gpu in gpus)
        shown = ", ".join(f"{counts[name]} x {name}" for name in names)
        raise InputError(
            f"the GPUs of a node are of one kind, but this machine has {shown}; describe each kind as a node by hand"
        )
    kind = gpu_kind(names[0])
    memory = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    if memory and abs(min(memory) / kind.memory_bytes - 1) > MEMORY_TOLERANCE:
        shown = f"{min(memory) / 2**30:.1f} GiB, and a {kind.name} {kind.memory_bytes / 2**30:.1f} GiB"
        notes.append(f"{names[0]} has {shown}: correct the kind, or its memory under gpu_kinds")
    return kind


_LINKED = re.compile(r"NV(\d+)")


def _intra(kind: GpuKind, gpus: Sequence[Gpu], topology: Mapping[tuple[int, int], str], status: str, notes: list[str]) -> Intra:
    """How the GPUs hang together: by NVLink where it reaches all of them, else by PCIe."""
    pairs = list(combinations(range(len(gpus)), 2))
    linked = {pair: int(found[1]) for pair in pairs if (found := _LINKED.fullmatch(topology.get(pair, "")))}
    if linked and len(_parts(len(gpus), linked)) == 1:
        rate = kind.nvlink_bytes_per_s or _nvlink_bytes_per_s(status)
        if rate is not None:
            most = max(linked.values())
            switched = len(linked) == len(pairs) and most * (len(gpus) - 1) > MOST_NVLINKS
            if len(linked) < len(pairs):
                notes.append(
                    f"{len(pairs) - len(linked)} of {len(pairs)} pairs of GPUs have no NVLink of their own: all are taken to"
                )
            chosen = "nvswitch" if switched else "nvlink"
            return _joined_by(chosen, rate)
        notes.append(f"the rate of {kind.name}'s NVLink is not known: the GPUs are taken to talk over PCIe")
    elif linked:
        shown = ", ".join(f"{a}-{b}" for a, b in list(linked)[:4])
        notes.append(f"NVLink joins some GPUs only ({shown}), which a cluster file cannot say: all are taken to talk over PCIe")
    elif len(gpus) > 1 and not topology:
        notes.append("nvidia-smi topo -m told nothing: the GPUs are taken to talk over PCIe")
    elif len(gpus) == 1 and kind.nvlink_bytes_per_s is not None:
        return _joined_by("nvlink", kind.nvlink_bytes_per_s)
    return _pcie(gpus, topology, notes)


def _joined_by(kind: str, bytes_per_s: float) -> Intra:
    """An interconnect of this kind and rate, with the constants that a cluster file without them has."""
    return Intra(
        kind,
        bytes_per_s,
        host_bandwidth_bytes_per_s=bytes_per_s,
        latency_s=links().latency_s[kind],
        step_s=links().step_s,
    )


def _nvlink_bytes_per_s(status: str) -> float | None:
    """What all NVLinks of the first GPU carry in one direction, as `nvidia-smi nvlink -s` tells; None where it does not."""
    first = re.split(r"^GPU 1:", status, maxsplit=1, flags=re.MULTILINE)[0]
    rates = [float(rate) for rate in re.findall(r"Link \d+:\s*([\d.]+) GB/s", first)]
    return sum(rates) * 1e9 if rates else None


def _pcie(gpus: Sequence[Gpu], topology: Mapping[tuple[int, int], str], notes: list[str]) -> Intra:
    """PCIe of the generation and width that all GPUs reach, with the switches and sockets that the topology shows."""
    generations = [gpu.pcie_generation for gpu in gpus if gpu.pcie_generation is not None]
    if not generations:
        notes.append("nvidia-smi does not tell the generation of PCIe: 4 is taken")
    generation = min(generations, default=4)
    chosen = f"pcie{min(max(generation, 3), 5)}"
    if chosen != f"pcie{generation}":
        notes.append(f"PCIe of generation {generation} is taken for {chosen}")
    width = min((gpu.pcie_width for gpu in gpus if gpu.pcie_width is not None), default=16)
    rate = PCIE_BYTES_PER_S[chosen] * min(width, 16) / 16
    pairs = list(combinations(range(len(gpus)), 2))
    below = _parts(len(gpus), [pair for pair in pairs if topology.get(pair) in ("PIX", "PXB")])
    apart = _parts(len(gpus), [pair for pair in pairs if topology.get(pair, "SYS") != "SYS"]) if topology else []
    per_switch = _equal_run(below)
    if per_switch is None:
        per_switch = max(1, math.gcd(*(len(part) for part in below)))
        notes.append(f"the GPUs hang under switches of unequal sizes: {per_switch} under each is taken")
    return replace(_joined_by(chosen, rate), gpus_per_switch=per_switch, sockets=len(apart) or 2)


def _parts(count: int, joined: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The numbers from 0 to `count` by what is joined, directly or through others, the first first."""
    part = list(range(count))
    for a, b in joined:
        old, new = max(part[a], part[b]), min(part[a], part[b])
        part = [new if each == old else each for each in part]
    return [[i for i in range(count) if part[i] == number] for number in dict.fromkeys(part)]


def _equal_run(parts: Sequence[Sequence[int]]) -> int | None:
    """The size of all parts, if they are equal, and each of numbers that follow one another."""
    size = len(parts[0])
    whole = all(len(part) == size and part[-1] - part[0] == size - 1 for part in parts)
    return size if whole else None


# --- The network -----------------------------------------------------------------------------------------------------


def _nic(system: Path, notes: list[str]) -> Nic | None:
    """The fastest cards of the machine, those made for RDMA first, and the Ethernet beside them."""
    ethernet, silent = _ethernet(system / "net")
    rdma = _rdma(system / "infiniband")
    for name in silent:
        notes.append(f"{name} does not tell its speed, and is left out: add it under nic")
    plain = {name: rate for name, (rate, card) in ethernet.items() if card is None or card not in rdma}
    beside = max(plain.values(), default=None)
    for kind in ("infiniband", "roce"):
        rates = [rate for rate, found in rdma.values() if found == kind]
        if rates:
            return _fastest(kind, rates, beside, notes)
    if plain:
        return _fastest("ethernet", list(plain.values()), None, notes)
    notes.append("no network card was found whose speed is known: a cluster of several nodes needs one under nic")
    return None


def _fastest(kind: str, rates: Sequence[float], ethernet: float | None, notes: list[str]) -> Nic:
    fastest = max(rates)
    if min(rates) < fastest:
        notes.append(f"{sum(rate < fastest for rate in rates)} slower cards of the kind {kind} are left out")
    return Nic(kind, fastest, sum(rate == fastest for rate in rates), ethernet)


def _ethernet(folder: Path) -> tuple[dict[str, tuple[float, str | None]], list[str]]:
    """The interfaces of cards that are up with their bytes/s, and the card made for RDMA behind each; and those without a speed.

    Interfaces without a card are left out (lo, bridges, tunnels), and so is IP over InfiniBand.
    """
    found: dict[str, tuple[float, str | None]] = {}
    silent = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        card = place / "device"
        if not card.exists() or _read(place / "operstate") not in ("up", "unknown"):
            continue
        if _read(place / "type") == str(INFINIBAND_TYPE):
            continue
        speed = _number(_read(place / "speed"))  # in Mbit/s; -1 or an error where the driver does not know
        behind = card / "infiniband"
        names = sorted(each.name for each in behind.iterdir()) if behind.is_dir() else []
        if speed:
            found[place.name] = (speed * 1e6 / 8, names[0] if names else None)
        else:
            silent.append(place.name)
    return found, silent


def _rdma(folder: Path) -> dict[str, tuple[float, str]]:
    """The cards made for RDMA with a port that is up: bytes/s, and infiniband or roce."""
    found = {}
    for card in sorted(folder.iterdir()) if folder.is_dir() else []:
        for port in sorted((card / "ports").glob("*")):
            rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate") or "")
            if rate is None or not (_read(port / "state") or "").endswith("ACTIVE"):
                continue
            kind = "infiniband" if _read(port / "link_layer") == "InfiniBand" else "roce"
            found[card.name] = (float(rate[1]) * 1e9 / 8, kind)
    return found


def _read(path: Path) -> str | None:
    """The text of a small file, without its ends; None where it cannot be read, as the speed of an interface that is down."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# --- CPUs ------------------------------------------------------------------------------------------------------------


def _cpus(name: str, nic: Nic | None) -> Cluster:
    """The machine's cores as devices that talk through the loopback of its network. Raises InputError where torch is missing."""
    count = cores()
    nominal = gpu_kind(CPU)
    peaks = {precision: rate / count for precision, rate in _cpu_peaks().items()}
    measured = replace(nominal.efficiency, matmul_fraction=1.0, fp32_fraction=1.0, source="nominal; the peak was measured")
    kind = replace(nominal, memory_bytes=machine_bytes() // count, peak_flop_per_s=peaks, efficiency=measured)
    intra = replace(_joined_by("nvlink", LOOPBACK_BYTES_PER_S), latency_s=LOOPBACK_LATENCY_S)
    # A rate that was measured is not lessened once more.
    fabric = Fabric(LOOPBACK_LATENCY_S, protocol_efficiency=(("nvlink", 1.0),), start_s=links().start_s, step_s=links().step_s)
    return Cluster(name, (Node(name, kind, count, intra, nic),), fabric)


def _cpu_peaks(seconds: float = 0.8) -> Mapping[str, float]:
    """The FLOP/s that all cores together reach, in fp32 and bf16, measured for so long each."""
    try:
        from runtime.peak import measured_peak_flop_per_s
        from runtime.settings import DTYPES
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(
            "this machine has no GPU, and to measure its CPUs needs torch, which is not installed; "
            "pip install 'motley[runtime]' installs it"
        ) from None
    return {precision: measured_peak_flop_per_s(DTYPES[precision], seconds) for precision in ("fp32", "bf16")}


# --- Measured links --------------------------------------------------------------------------------------------------


def with_links(cluster: Cluster, bench: Bench, matrix_file: Path) -> Found:
    """The cluster with the rates and latencies of a bench of links in the place of nominal ones.

    Of the messages between two places, the latency and the rate are those of the straight line through their times (least
    squares, weighted so that relative errors count). Inside a node the median of all pairs counts; between nodes the rates
    become a matrix, to be written as `matrix_file`, and the latency that of the fabric. Collectives are left to calibration.
    Raises InputError for a bench without messages, for names that the cluster does not have, and for pairs of nodes without.
    """
    sends = [found for found in bench.links if found.operation == "send"]
    if not sends:
        raise InputError("the bench of links has no messages (operation: send), of which rates could be taken")
    notes = []
    if len(sends) < len(bench.links):
        notes.append(f"{len(bench.links) - len(sends)} measurements of collectives were left to motley calibrate")
    inside: dict[str, dict[tuple[str, str], list[LinkMeasurement]]] = {}
    between: dict[tuple[str, str], list[LinkMeasurement]] = {}
    for sent in sends:
        a, b = _place(cluster, sent.sender), _place(cluster, sent.receiver)
        if a.name == b.name:
            inside.setdefault(a.name, {}).setdefault((sent.sender, sent.receiver), []).append(sent)
        else:
            between.setdefault((a.name, b.name), []).append(sent)
    nodes = []
    for node in cluster.nodes:
        if node.name in inside:
            lines = [_line(found) for found in inside[node.name].values()]
            reached = median(rate for _, rate in lines)
            carried = cluster.fabric.efficiency("nvlink" if node.intra.is_nvlink else "pcie")
            # The file gives nominal rates, of which the protocol's fraction is carried.
            rate, latency_s = reached / carried, max(0.0, median(latency for latency, _ in lines) - cluster.fabric.start_s)
            node = replace(node, intra=replace(node.intra, bandwidth_bytes_per_s=rate, latency_s=latency_s))
        nodes.append(node)
    fabric, matrix = cluster.fabric, cluster.bandwidth_matrix
    if between:
        names = tuple(node.name for node in cluster.nodes)
        for pair in permutations(names, 2):
            if pair not in between:
                raise InputError(f"the bench of links has messages between some nodes, but none from {pair[0]!r} to {pair[1]!r}")
        fitted = {pair: _line(found) for pair, found in between.items()}
        rows = tuple(tuple(math.inf if a == b else fitted[a, b][1] for b in names) for a in names)
        matrix = BandwidthMatrix(names, rows, matrix_file)
        fabric = replace(fabric, latency_s=max(0.0, median(latency for latency, _ in fitted.values()) - fabric.start_s))
        notes.append("the rates between nodes are those of one message at a time: two cards of a node may carry more together")
    return Found(replace(cluster, nodes=tuple(nodes), fabric=fabric, bandwidth_matrix=matrix), tuple(notes))


def _place(cluster: Cluster, name: str) -> Node:
    """The node of a device, of a node, or of a rank, which is the number of a device. Raises InputError for others."""
    nodes = {node.name: node for node in cluster.nodes}
    if name in nodes:
        return nodes[name]
    if name.isdecimal():
        if int(name) >= len(cluster.devices):
            raise InputError(f"the bench of links tells of rank {name}, but the cluster has {len(cluster.devices)} devices")
        return cluster.devices[int(name)].node
    return cluster.device(name).node


def _line(sent: Sequence[LinkMeasurement]) -> tuple[float, float]:
    """The latency in seconds and the rate in bytes/s of messages between two places.

    Where all are of one size, or small ones take no less than large ones, all their time is taken to be the rate's.
    """
    sizes, times = [float(found.num_bytes) for found in sent], [found.seconds for found in sent]
    weights = [1 / time**2 for time in times]
    total = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * time for w, time in zip(weights, times, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
    slope = 0.0
    if spread > 0:
        slope = (
            sum(w * (size - mean_size) * (time - mean_time) for w, size, time in zip(weights, sizes, times, strict=True)) / spread
        )
    if slope > 0 and (latency_s := mean_time - slope * mean_size) >= 0:
        return latency_s, 1 / slope
    largest = max(range(len(sent)), key=lambda i: sizes[i])
    if sizes[largest] == 0:
        raise InputError(
            f"messages of 0 bytes tell no rate, but from {sent[0].sender!r} to {sent[0].receiver!r} there are no others"
        )
    return 0.0, sizes[largest] / times[largest]


def matrix_csv(matrix: BandwidthMatrix) -> str:
    """The text of a matrix file, which `read_bandwidth_matrix` reads back."""

    def cells(row: Sequence[float]) -> Iterator[str]:
        for rate in row:
            yield "" if rate == math.inf else f"{rate / 1e9:.6g}"

    lines = [",".join(["GB/s", *matrix.names])]
    lines += [",".join([name, *cells(row)]) for name, row in zip(matrix.names, matrix.bytes_per_s, strict=True)]
    return "\n".join(lines) + "\n"
