"""A cluster on one Linux machine: its nodes as network namespaces, its links as veth pairs of shaped rates.

A node is a namespace with a bridge (`bus`) that its GPUs hang on, and its network card (`nic0`). Every GPU is a namespace beside
it, with one port (`gpu`) on that bridge, of the rate that the cluster gives it inside the node; a rank runs there. The fabric
is a namespace with a bridge for each site, which the nodes' cards lead to. Between two sites stand two TAP devices, and a
process (`runtime.relay`) that keeps what passes for as long as the wide-area link takes. Every rate is of one direction.

Frames find their way by static tables, along the path that the simulator takes (the least latency), so that a link carries
the ranks' own traffic and nothing else; what meets on it shares it in equal parts by sender and receiver (HTB). Nothing of all
this stands in the machine's own network, so that testbeds do not meet. Beside it every GPU's namespace has a second way
(`control`), unshaped, to the fabric, where the launching process listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.spec.cluster import Cluster, Node, read_cluster
from sim.spec.reading import InputError, parse_json, read_text, write_file

FOLDER = Path("/run/motley-testbeds")
"""What is noted of every testbed, beside iproute2's own /run/netns."""

INTERFACE = "gpu"
"""The port of a GPU's namespace that its messages and collectives go through."""

ADDRESS = "10.78.0.1"
"""Where the launching process listens, in the fabric."""

PREFIX = "motley."
SMALLEST_MTU, LARGEST_MTU, FRAME_S = 1500, 9000, 250e-6
"""Bytes of a packet: as many as the slowest link sends in a quarter of a millisecond, within these. The first packet of a message
finds an idle link, which lets it pass at once; large packets leave less to do for each byte, and less of a rate to headers."""

HEADER, ETHERNET_HEADER = 66, 14
"""Bytes of a frame that are no data (Ethernet, IP, TCP with its time stamps), and those that no MTU counts."""

BURST_S = 50e-6
"""How long a link that was idle may go at any rate, lest a late timer cost it some of its own; at least one packet passes so."""

LEAST_WINDOW, WINDOW_PATHS = 131_072, 2.0
"""Bytes that a connection may have under way: so many times what fits in the longest path, and no fewer than these."""

NODE_LATENCY_S = 1e-3
"""A round trip inside a site, for the windows, with workers that wait for a core."""

MOST_DEVICES = 240
"""A link's shaper has fewer than 2^16 classes, one for each pair of devices that meets there."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Testbed:
    """A testbed that is up: its name, the file of its cluster (a copy), and what the user's file was."""

    name: str
    cluster_file: Path
    source: str

    @property
    def fabric(self) -> str:
        """The namespace of what is between the nodes."""
        return PREFIX + self.name

    def node(self, node: str) -> str:
        """The namespace of a node."""
        return f"{PREFIX}{self.name}.{node}"

    def device(self, device: str) -> str:
        """The namespace of a device."""
        return self.node(device.replace("/", "."))


# --- What there is ---------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The names of all testbeds, those that something left behind included."""
    noted = {path.name for path in FOLDER.iterdir() if path.is_dir()} if FOLDER.is_dir() else set()
    return sorted(noted | {namespace.split(".")[1] for namespace in _namespaces()})


def find(name: str) -> Testbed:
    """The testbed of this name. Raises InputError where there is none, or only what is left of one."""
    noted = FOLDER / name / "testbed.json"
    known = names()
    if name not in known:
        raise InputError(f"there is no testbed {name!r}; " + (f"up: {', '.join(known)}" if known else "none is up"))
    if not noted.is_file() or PREFIX + name not in _namespaces():
        raise InputError(f"the testbed {name!r} is not whole; motley testbed down {name} removes what is left of it")
    facts = parse_json(read_text(noted), str(noted))
    assert isinstance(facts, dict)
    return Testbed(name, FOLDER / name / "cluster.yaml", str(facts["file"]))


def device_places(testbed: Testbed, devices: Sequence[str]) -> list[tuple[str, int, int]]:
    """Where devices stand, to be sorted by: those of a site, and of a node, beside each other, as rings are simulated."""
    cluster = read_cluster(testbed.cluster_file)
    numbers = {node.name: number for number, node in enumerate(cluster.nodes)}
    found = [cluster.device(device) for device in devices]
    return [(device.node.site, numbers[device.node.name], device.index) for device in found]


def _namespaces(name: str | None = None) -> list[str]:
    """The network namespaces of a testbed, or of all."""
    folder = Path("/run/netns")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if name is None:
        return [namespace for namespace in found if namespace.startswith(PREFIX)]
    own = PREFIX + name
    return [namespace for namespace in found if namespace == own or namespace.startswith(f"{own}.")]


def broken_links(testbed: Testbed) -> list[str]:
    """The links of a testbed that are down, in words."""
    cluster = read_cluster(testbed.cluster_file)
    of_fabric = {f"node{n}": f"the port of node {node.name}" for n, node in enumerate(cluster.nodes)}
    for w, wan in enumerate(cluster.wan):
        of_fabric |= dict.fromkeys((f"wan{w}a", f"wan{w}b"), f"the wide-area link between {wan.between[0]} and {wan.between[1]}")
    found = [of_fabric[interface] for interface in _down(testbed.fabric) if interface in of_fabric]
    for node in cluster.nodes:
        down = _down(testbed.node(node.name))
        found += [f"nic0 of node {node.name}"] if "nic0" in down else []
        for index in range(node.gpus):
            device = f"{node.name}/{index}"
            if f"gpu{index}" in down or INTERFACE in _down(testbed.device(device)):
                found.append(f"the port of {device}")
    return list(dict.fromkeys(found))


def _down(namespace: str) -> set[str]:
    """The interfaces of a namespace that somebody set down."""
    shown = subprocess.run(["ip", "-n", namespace, "-j", "link"], capture_output=True, text=True, check=False).stdout
    return {link["ifname"] for link in json.loads(shown or "[]") if "UP" not in link["flags"]}


# --- Entering --------------------------------------------------------------------------------------------------------


def enter(namespace: str) -> None:
    """Nothing; moves this thread, and those that it starts, into a network namespace. Raises OSError."""
    with open(f"/run/netns/{namespace}") as file:
        _enter(file.fileno(), namespace)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Has this thread in a network namespace for as long as it lasts. Raises OSError."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _enter(before.fileno(), "the one before")


def _enter(descriptor: int, namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), namespace)


# --- Down ------------------------------------------------------------------------------------------------------------


def down(name: str) -> bool:
    """Whether there was anything of a testbed to remove; its processes are ended, a run's too. Raises InputError."""
    found, noted = _namespaces(name), FOLDER / name
    if not found and not noted.is_dir():
        return False
    _check_tools()
    processes = {int(word) for namespace in found for word in _output("ip", "netns", "pids", namespace).split()} - {os.getpid()}
    _end(processes)
    for namespace in found:
        _call(["ip", "netns", "del", namespace])
    shutil.rmtree(noted, ignore_errors=True)
    return True


def _end(processes: set[int]) -> None:
    """Nothing; ends processes, by force those that take longer than a moment."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    deadline_s = time.monotonic() + 2.0
    while processes and time.monotonic() < deadline_s:
        processes = {process for process in processes if _lives(process)}
        time.sleep(0.01)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- Up --------------------------------------------------------------------------------------------------------------


def up(path: str | Path, name: str | None = None) -> Testbed:
    """The testbed of a cluster file, which it sets up. Nothing is left where that fails.

    It has the cluster's name unless another is given. Raises InputError for a cluster that cannot be one, for a name that is
    taken, and where the machine lacks what is needed.
    """
    cluster = read_cluster(path)
    name = cluster.name if name is None else name
    check_cluster(cluster, name, path)
    _check_tools(tun=bool(cluster.wan))
    if _namespaces(name) or (FOLDER / name).exists():
        raise InputError(f"a testbed {name!r} is there already; motley testbed down {name} removes it")
    testbed = Testbed(name, FOLDER / name / "cluster.yaml", str(Path(path).resolve()))
    try:
        (FOLDER / name).mkdir(parents=True)
        write_file(testbed.cluster_file, read_text(path), replace=True)
    except OSError as error:
        raise InputError(f"{FOLDER / name}: cannot be written ({(error.strerror or str(error)).lower()})") from None
    try:
        _build(testbed, cluster)
        # Last, because it says that all the rest is there.
        write_file(FOLDER / name / "testbed.json", json.dumps({"file": testbed.source}) + "\n", replace=True)
    except BaseException:
        with contextlib.suppress(InputError):
            down(name)
        raise
    return testbed


def check_cluster(cluster: Cluster, name: str, path: str | Path) -> None:
    """Nothing. Raises InputError for a cluster, or a name, that no testbed can have."""
    for word, what in ((name, "a testbed"), *((node.name, "its nodes") for node in cluster.nodes)):
        if not _NAME.fullmatch(word):
            raise InputError(f"{path}: names of {what} become names of namespaces (letters, digits, - and _), but got {word!r}")
    if len(cluster.nodes) > 200 or len(cluster.devices) > MOST_DEVICES:
        raise InputError(
            f"{path}: a testbed has at most 200 nodes and {MOST_DEVICES} GPUs, but got {len(cluster.nodes)} and "
            f"{len(cluster.devices)}"
        )
    if cluster.bandwidth_matrix is not None:
        raise InputError(f"{path}: a testbed shapes links, not pairs: leave bandwidth_matrix out")
    if cluster.fabric.oversubscription > 1:
        raise InputError(
            f"{path}: a testbed has no uplinks of racks, but got oversubscription {cluster.fabric.oversubscription:g}"
        )
    for node in cluster.nodes:
        if node.nic is not None and node.nic.count > 1:
            raise InputError(f"{path}: a node of a testbed has one NIC, but {node.name} has {node.nic.count}")


def _check_tools(tun: bool = False) -> None:
    """Nothing. Raises InputError where this machine, or this user, cannot have a testbed."""
    if not sys.platform.startswith("linux"):
        raise InputError(f"a testbed needs Linux's network namespaces, and this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if missing:
        raise InputError(f"a testbed needs {', '.join(missing)} of the package iproute2, which is not installed")
    if os.geteuid() != 0:
        raise InputError(f"a testbed needs root, or {UNSHARE}")
    if tun and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise InputError("wide-area links of a testbed need /dev/net/tun, which is not there or may not be used")


UNSHARE = "a shell of its own in a user namespace: unshare -Urmn sh -c 'mount -t tmpfs tmpfs /run; exec bash'"


def _call(command: Sequence[str], lines: Sequence[str] = ()) -> None:
    """Nothing; runs a command with lines of input. Raises InputError with what it complains of."""
    done = subprocess.run(list(command), input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "Command failed" not in line and not line.startswith("Warning")]
        why = said[0] if said else f"exit code {done.returncode}"
        hint = f"; a testbed needs root, or {UNSHARE}" if "not permitted" in why.lower() else ""
        raise InputError(f"{' '.join(word for word in command if word != '-')} failed: {why}{hint}")


def _output(*command: str) -> str:
    """What a command prints, whatever its exit code."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@dataclass(frozen=True)
class _Port:
    """A device's place in the network."""

    device: str
    address: str
    control: str
    mac: str


def _ports(cluster: Cluster) -> dict[str, _Port]:
    """The ports of all devices."""
    found = {}
    for n, node in enumerate(cluster.nodes, 1):
        for i in range(node.gpus):
            name = f"{node.name}/{i}"
            found[name] = _Port(name, f"10.77.{n}.{i + 1}", f"10.78.{n}.{i + 1}", f"02:4d:00:00:{n:02x}:{i + 1:02x}")
    return found


def _build(testbed: Testbed, cluster: Cluster) -> None:
    """Makes all namespaces, links and shapers, and starts the relay."""
    ports, fabric = _ports(cluster), testbed.fabric
    sites = list(dict.fromkeys(node.site for node in cluster.nodes))
    mtu = packet_bytes(cluster)
    made = [fabric, *(testbed.node(node.name) for node in cluster.nodes), *(testbed.device(name) for name in ports)]
    _call(["ip", "-batch", "-"], [f"netns add {namespace}" for namespace in made])
    ip: dict[str, list[str]] = {namespace: ["link set lo up"] for namespace in made}
    tc: dict[str, list[str]] = {namespace: [] for namespace in made}
    table: dict[str, list[str]] = {namespace: [] for namespace in made}
    everyone = list(ports.values())
    ip[fabric] += ["link add control type bridge", f"addr add {ADDRESS}/16 dev control", "link set control up"]
    for s in range(len(sites)):
        ip[fabric] += [f"link add site{s} type bridge mcast_snooping 0", f"link set site{s} up mtu {mtu}"]
    for n, node in enumerate(cluster.nodes):
        here, own = testbed.node(node.name), [ports[f"{node.name}/{i}"] for i in range(node.gpus)]
        away = [port for port in everyone if port not in own]
        ip[here] += ["link add bus type bridge mcast_snooping 0", f"link set bus up mtu {mtu}"]
        if node.nic is not None:
            rate = node.nic.bandwidth_bytes_per_s
            ip[fabric] += [f"link add node{n} mtu {mtu} type veth peer name nic0 mtu {mtu} netns {here}"]
            ip[fabric] += _bridged(f"node{n}", f"site{sites.index(node.site)}")
            ip[here] += _bridged("nic0", "bus")
            tc[here] += _shaped("nic0", rate, own, away, mtu)
            tc[fabric] += _shaped(f"node{n}", rate, away, own, mtu)
        for i, port in enumerate(own):
            there = testbed.device(port.device)
            ip[here] += [f"link add gpu{i} mtu {mtu} type veth peer name {INTERFACE} address {port.mac} mtu {mtu} netns {there}"]
            ip[here] += _bridged(f"gpu{i}", "bus")
            ip[fabric] += [f"link add c{n}.{i} type veth peer name control netns {there}", f"link set c{n}.{i} up master control"]
            ip[there] += [f"addr add {port.control}/16 dev control", "link set control up"]
            ip[there] += [f"link set {INTERFACE} up gso_max_segs 1", f"addr add {port.address}/32 dev {INTERFACE}"]
            ip[there] += [
                # All of a window at once, and no giving up: nothing is ever lost here but what a broken link takes.
                f"route add 10.77.0.0/16 dev {INTERFACE} src {port.address} initcwnd 4000 initrwnd 4000 rto_min 3s"
            ]
            ip[there] += [f"neigh add {other.address} lladdr {other.mac} dev {INTERFACE}" for other in everyone if other != port]
            tc[there] += _shaped(INTERFACE, node.intra.bandwidth_bytes_per_s, [port], everyone, mtu)
            tc[here] += _shaped(f"gpu{i}", node.intra.bandwidth_bytes_per_s, everyone, [port], mtu)
            table[here].append(f"fdb add {port.mac} dev gpu{i} master static")
        if node.nic is not None:
            table[here] += [f"fdb add {port.mac} dev nic0 master static" for port in away]
    # What is said of a wide-area link is what it carries of data; of the others it is the rate of the wire.
    framed = (mtu + ETHERNET_HEADER) / (mtu + ETHERNET_HEADER - HEADER)
    for w, wan in enumerate(cluster.wan):
        for end, site in zip("ab", wan.between, strict=True):
            ip[fabric] += [f"tuntap add dev wan{w}{end} mode tap", f"link set wan{w}{end} mtu {mtu} gso_max_segs 1"]
            ip[fabric] += _bridged(f"wan{w}{end}", f"site{sites.index(site)}")
            beyond = [port for port in everyone if _node_of(cluster, port).site != site]
            behind = [port for port in everyone if port not in beyond or len(sites) > 2]
            tc[fabric] += _shaped(f"wan{w}{end}", wan.bandwidth_bytes_per_s * framed, behind, beyond, mtu)
    table[fabric] += _site_tables(cluster, sites, everyone)
    for tool, batches in (("ip", ip), ("tc", tc), ("bridge", table)):
        for namespace, lines in batches.items():
            if lines:
                _call([tool, "-n", namespace, "-batch", "-"], lines)
    window = _window(cluster)
    for namespace in made:
        with inside(namespace):
            _set("ipv6/conf/all/disable_ipv6", "1", needed=False)
            if namespace in made[1 + len(cluster.nodes) :]:
                _set("ipv4/tcp_rmem", f"4096 {8 * window} {8 * window}")
                _set("ipv4/tcp_wmem", f"4096 {window} {window}")
                for key, value in _TCP.items():
                    _set(key, value)
    if cluster.wan:
        _start_relay(testbed, cluster)


_TCP = {
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_early_retrans": "0",
}
"""That a connection goes at the rate of its path, from its first byte on and after every pause: the constancy that the links of a
cluster among GPUs have, and that the simulator takes."""


def _set(key: str, value: str, needed: bool = True) -> None:
    """Nothing; sets a variable of the network of the present namespace. Raises InputError where it must and cannot be."""
    path = Path("/proc/sys/net", key)
    try:
        path.write_text(value)
    except OSError as error:
        if needed:
            raise InputError(f"{path}: cannot be set to {value} ({(error.strerror or str(error)).lower()})") from None


def _bridged(interface: str, bridge: str) -> list[str]:
    """The lines that bring a port of a bridge up, which sends only what its table says."""
    return [
        f"link set {interface} up txqueuelen 20000 master {bridge}",
        f"link set {interface} type bridge_slave learning off flood off mcast_flood off bcast_flood off",
    ]


def packet_bytes(cluster: Cluster) -> int:
    """The bytes of a packet (MTU) in the testbed of a cluster."""
    rates = [wan.bandwidth_bytes_per_s for wan in cluster.wan]
    rates += [node.nic.bandwidth_bytes_per_s for node in cluster.nodes if node.nic is not None]
    rates += [node.intra.bandwidth_bytes_per_s for node in cluster.nodes if node.gpus > 1]
    return max(SMALLEST_MTU, min(LARGEST_MTU, round(min(rates) * FRAME_S))) if rates else SMALLEST_MTU


def _shaped(interface: str, bytes_per_s: float, senders: Sequence[_Port], receivers: Sequence[_Port], mtu: int) -> list[str]:
    """The lines that give an interface a rate for what leaves it, in equal parts by pair of sender and receiver.

    A pair alone has all of it. By senders alone, what one sends to two receivers would stand in one queue, and a short message
    would wait for all that a connection holds ready of a long one.
    """
    pairs = [(sender, receiver) for sender in senders for receiver in receivers if sender != receiver]
    rate = f"{round(bytes_per_s * 8)}bit"
    part = f"{max(8, round(bytes_per_s * 8 / (len(pairs) + 1)))}bit"
    frame = mtu + ETHERNET_HEADER
    burst = max(frame, round(bytes_per_s * BURST_S))
    tail = f"ceil {rate} burst {burst} cburst {burst} quantum {frame}"
    lines = [
        f"qdisc add dev {interface} root handle 1: htb default 1000",
        f"class add dev {interface} parent 1: classid 1:1 htb rate {rate} {tail}",
        f"class add dev {interface} parent 1:1 classid 1:1000 htb rate {part} {tail}",
    ]
    # Acknowledgements without data (52 bytes long) go beside: behind the data of the other direction they would keep their own
    # direction waiting for room in its window, which no link among GPUs does.
    lines += [
        f"class add dev {interface} parent 1: classid 1:2 htb rate 1gbit burst 100000 cburst 100000 quantum {frame}",
        f"filter add dev {interface} parent 1: protocol ip prio 1 u32 match u16 0x0034 0xffff at 2 flowid 1:2",
    ]
    for number, (sender, receiver) in enumerate(pairs, 0x1001):
        lines.append(f"class add dev {interface} parent 1:1 classid 1:{number:x} htb rate {part} {tail}")
        match = f"match ip src {sender.address}/32 match ip dst {receiver.address}/32 flowid 1:{number:x}"
        lines.append(f"filter add dev {interface} parent 1: protocol ip prio 2 u32 {match}")
    return lines


def _node_of(cluster: Cluster, port: _Port) -> Node:
    return cluster.device(port.device).node


def _site_tables(cluster: Cluster, sites: Sequence[str], everyone: Sequence[_Port]) -> list[str]:
    """Where each site's bridge sends the frames for each device."""
    numbers = {node.name: n for n, node in enumerate(cluster.nodes)}
    lines = []
    for site in sites:
        ways = _next_ways(cluster, site)
        for port in everyone:
            node = _node_of(cluster, port)
            if node.nic is not None:
                way = f"node{numbers[node.name]}" if node.site == site else ways[node.site]
                lines.append(f"fdb add {port.mac} dev {way} master static")
    return lines


def _next_ways(cluster: Cluster, start: str) -> Mapping[str, str]:
    """The device by which the path of the least latency to each other site leaves a site (Dijkstra, 1959)."""
    found: dict[str, str] = {}
    heap: list[tuple[float, str, str]] = [(0.0, start, "")]
    while heap:
        latency_s, site, first = heapq.heappop(heap)
        if site in found:
            continue
        found[site] = first
        for w, wan in enumerate(cluster.wan):
            for (a, b), end in ((wan.between, "a"), (wan.between[::-1], "b")):
                if a == site and b not in found:
                    heapq.heappush(heap, (latency_s + wan.latency_s, b, first or f"wan{w}{end}"))
    return found


def _window(cluster: Cluster) -> int:
    """Bytes that a connection may have under way: some more than the longest path holds, lest a queue grow beyond need."""
    fastest = max((wan.bandwidth_bytes_per_s for wan in cluster.wan), default=0.0)
    latency_s = math.fsum(wan.latency_s for wan in cluster.wan)
    inside_site = max((node.nic.bandwidth_bytes_per_s for node in cluster.nodes if node.nic is not None), default=0.0)
    held = max(fastest * (2 * latency_s + NODE_LATENCY_S), inside_site * NODE_LATENCY_S)
    return max(LEAST_WINDOW, round(WINDOW_PATHS * held))


def _start_relay(testbed: Testbed, cluster: Cluster) -> None:
    """Starts the process that makes the wide-area links' latencies. Raises InputError where it does not come up."""
    words = [
        word
        for w, wan in enumerate(cluster.wan)
        for word in (f"wan{w}a", f"wan{w}b", repr(wan.latency_s), repr(wan.bandwidth_bytes_per_s))
    ]
    command = [sys.executable, "-I", str(Path(__file__).with_name("relay.py")), *words]
    log = testbed.cluster_file.with_name("relay.log")
    with inside(testbed.fabric), log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, cwd="/"
        )
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        process.kill()
        said = read_text(log).strip().splitlines()
        raise InputError(f"the relay of the wide-area links did not start: {said[-1] if said else 'it gave no reason'}")
    process.stdout.close()
