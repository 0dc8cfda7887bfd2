"""Clusters that machines tell of: nvidia-smi in its documented form, a folder in the place of /sys/class, link benches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import experiments.commands.discover
import experiments.discover
from experiments.discover import Gpu, discover, matrix_csv, parse_query, parse_topology, with_links
from experiments.joining import joined
from sim.cost.network import Network
from sim.spec.bench import Bench, LinkMeasurement
from sim.spec.cluster import BandwidthMatrix, Cluster, Nic, cluster_yaml, links, read_bandwidth_matrix, read_cluster
from sim.spec.gpu import gpu_kind
from sim.spec.reading import InputError
from tests.experiments.conftest import Ran, World

Motley = Callable[..., Ran]

HEAD = """
==============NVSMI LOG==============

Timestamp                                 : Mon Mar  3 10:12:31 2025
Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : {count}
"""

ONE = """GPU 00000000:{bus:02X}:00.0
    Product Name                          : {name}
    Product Brand                         : NVIDIA
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : N/A
        Pending                           : N/A
    PCI
        Bus                               : 0x{bus:02X}
        Bus Id                            : 00000000:{bus:02X}:00.0
        GPU Link Info
            PCIe Generation
                Max                       : {generation}
                Current                   : 1
                Device Current            : 1
                Device Max                : {generation}
                Host Max                  : {host}
            Link Width
                Max                       : {width}
                Current                   : {width}
        Bridge Chip
            Type                          : N/A
    FB Memory Usage
        Total                             : {memory} MiB
        Reserved                          : 535 MiB
        Used                              : 0 MiB
        Free                              : {memory} MiB
    BAR1 Memory Usage
        Total                             : 32768 MiB
    GPU Power Readings
        Power Draw                        : 16.43 W
        Current Power Limit               : 450.00 W
    Processes                             : None

"""


def query(name: str, count: int, memory: int, generation: int = 4, width: str = "16x", host: str | int = "N/A") -> str:
    """What `nvidia-smi -q` tells of GPUs that are alike."""
    parts = [ONE.format(bus=i + 1, name=name, memory=memory, generation=generation, width=width, host=host) for i in range(count)]
    return HEAD.format(count=count) + "".join(parts)


def topology(rows: Sequence[Sequence[str]], nics: int = 0) -> str:
    """What `nvidia-smi topo -m` tells, with its underlined headings, columns of NICs and affinities, and the legend."""
    heads = [f"GPU{i}" for i in range(len(rows))] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t" + "\t".join(f"\x1b[4m{head}" for head in [*heads, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for i, row in enumerate(rows):
        lines.append("\t".join([f"GPU{i}", *(f" {cell}" for cell in row), *["SYS"] * nics, "0-63", "0", "N/A"]))
    for i in range(nics):
        lines.append("\t".join([f"NIC{i}", *["SYS"] * (len(rows) + nics)]))
    lines += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks"]
    return "\n".join([*lines, "", "NIC Legend:", "", *(f"  NIC{i}: mlx5_{i}" for i in range(nics))]) + "\n"


def every_pair(cell: str, count: int) -> list[list[str]]:
    return [["X" if i == j else cell for j in range(count)] for i in range(count)]


def telling(q: str | None = None, topo: str | None = None, nvlink: str | None = None) -> Callable[..., str | None]:
    """A stand-in for nvidia-smi."""
    answers: Mapping[tuple[str, ...], str | None] = {("-q",): q, ("topo", "-m"): topo, ("nvlink", "-s"): nvlink}
    return lambda *arguments: answers[arguments]


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine without a network card."""
    (tmp_path / "class" / "net" / "lo").mkdir(parents=True)
    return tmp_path / "class"


def interface(system: Path, name: str, speed: str, state: str = "up", kind: int = 1, card: str | None = None) -> None:
    """Adds a network interface, and the card made for RDMA behind it, if one is named."""
    place = system / "net" / name
    (place / "device").mkdir(parents=True)
    if card is not None:
        (place / "device" / "infiniband" / card).mkdir(parents=True)
    for file, text in (("speed", speed), ("operstate", state), ("type", str(kind))):
        (place / file).write_text(text + "\n")


def rdma(system: Path, name: str, rate: str, layer: str, state: str = "4: ACTIVE") -> None:
    """Adds a card made for RDMA."""
    port = system / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (("rate", rate), ("link_layer", layer), ("state", state)):
        (port / file).write_text(text + "\n")


def reread(cluster: Cluster, folder: Path) -> Cluster:
    (folder / "again.yaml").write_text(cluster_yaml(cluster))
    return read_cluster(folder / "again.yaml")


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_query_tells_name_memory_and_pcie() -> None:
    found = parse_query(query("NVIDIA GeForce RTX 4090", 2, 24564, generation=4, width="8x", host=3))
    assert found == [Gpu("NVIDIA GeForce RTX 4090", 24564 * 2**20, 3, 8)] * 2
    bare = "GPU 00000000:01:00.0\n    Product Name : Tesla T4\n    FB Memory Usage\n        Total : N/A\n"
    assert parse_query(bare) == [Gpu("Tesla T4", None, None, None)]
    assert parse_query("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []


def test_a_topology_tells_every_pair() -> None:
    rows = [["X", "NV4", "SYS"], ["NV4", "X", "PHB"], ["SYS", "PHB", "X"]]
    found = parse_topology(topology(rows, nics=2))
    assert found == {(i, j): rows[i][j] for i in range(3) for j in range(3)}
    assert parse_topology("No devices were found\n") == {}


@pytest.mark.parametrize(
    ("name", "memory", "cell", "count", "kind", "intra", "gigabytes_per_s"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "NV12", 8, "A100-80GB-SXM", "nvswitch", 300),
        ("NVIDIA A100-SXM4-40GB", 40960, "NV4", 4, "A100-40GB-SXM", "nvlink", 300),
        ("NVIDIA H100 80GB HBM3", 81559, "NV18", 8, "H100-80GB-SXM", "nvswitch", 450),
        ("NVIDIA H100 80GB HBM3", 81559, "NV6", 4, "H100-80GB-SXM", "nvlink", 450),
    ],
)
def test_nvlink_between_all_is_a_switch_where_a_gpu_has_not_so_many_links(
    name: str, memory: int, cell: str, count: int, kind: str, intra: str, gigabytes_per_s: int, system: Path, tmp_path: Path
) -> None:
    found = discover("box", telling(query(name, count, memory), topology(every_pair(cell, count))), system)
    (node,) = found.cluster.nodes
    assert (node.gpu, node.gpus, node.intra.kind) == (gpu_kind(kind), count, intra)
    assert node.intra.bandwidth_bytes_per_s == gigabytes_per_s * 1e9
    assert reread(found.cluster, tmp_path) == found.cluster


def test_a_mesh_that_reaches_all_gpus_is_nvlink_and_the_missing_pairs_are_told(system: Path) -> None:
    ring = [["X" if i == j else "NV2" if abs(i - j) in (1, 3) else "SYS" for j in range(4)] for i in range(4)]
    found = discover("box", telling(query("Tesla V100-SXM2-16GB", 4, 16384, 3), topology(ring)), system)
    assert found.cluster.nodes[0].intra.kind == "nvlink"
    assert any("2 of 6 pairs" in note for note in found.notes)


def test_bridges_of_a_kind_without_nvlink_have_the_rate_that_the_driver_tells(system: Path) -> None:
    status = "".join(
        f"GPU {gpu}: NVIDIA GeForce RTX 3090 (UUID: GPU-1)\n" + "".join(f"\t Link {i}: 14.062 GB/s\n" for i in range(4))
        for gpu in range(2)
    )
    told = query("NVIDIA GeForce RTX 3090", 2, 24576), topology(every_pair("NV4", 2))
    found = discover("box", telling(*told, status), system)
    assert found.cluster.nodes[0].intra.kind == "nvlink"
    assert found.cluster.nodes[0].intra.bandwidth_bytes_per_s == pytest.approx(56.248e9)
    without = discover("box", telling(*told), system)
    assert without.cluster.nodes[0].intra.kind == "pcie4" and any("not known" in note for note in without.notes)


def test_bridges_between_some_gpus_are_told_and_left_out(system: Path) -> None:
    rows = [["X", "NV4", "SYS", "SYS"], ["NV4", "X", "SYS", "SYS"], ["SYS", "SYS", "X", "NV4"], ["SYS", "SYS", "NV4", "X"]]
    found = discover("box", telling(query("NVIDIA RTX A6000", 4, 49140), topology(rows)), system)
    assert found.cluster.nodes[0].intra.kind == "pcie4"
    assert any("0-1, 2-3" in note for note in found.notes)


def test_switches_and_sockets_are_those_of_the_topology(system: Path, tmp_path: Path) -> None:
    # Two GPUs under each switch, two switches on each socket.
    def cell(i: int, j: int) -> str:
        return "X" if i == j else "PIX" if i // 2 == j // 2 else "NODE" if i // 4 == j // 4 else "SYS"

    rows = [[cell(i, j) for j in range(8)] for i in range(8)]
    found = discover("box", telling(query("NVIDIA GeForce RTX 4090", 8, 24564), topology(rows)), system)
    intra = found.cluster.nodes[0].intra
    assert (intra.kind, intra.gpus_per_switch, intra.sockets, intra.bandwidth_bytes_per_s) == ("pcie4", 2, 2, 24e9)
    network = Network(reread(found.cluster, tmp_path))
    crossed = [[network.links[link].name for link, _ in network.path("box/0", f"box/{i}").links] for i in (1, 2, 4)]
    assert [len(path) for path in crossed] == [2, 4, 5]  # under the switch; over the host; over the bridge between sockets
    assert "box/socket0>socket1" in crossed[2]


def test_gpus_at_the_host_itself_have_a_switch_each_and_half_the_lanes_half_the_rate(system: Path) -> None:
    told = query("NVIDIA GeForce RTX 4090", 2, 24564, width="8x"), topology(every_pair("PHB", 2))
    intra = discover("box", telling(*told), system).cluster.nodes[0].intra
    assert (intra.kind, intra.gpus_per_switch, intra.sockets, intra.bandwidth_bytes_per_s) == ("pcie4", 1, 1, 12e9)


@pytest.mark.parametrize(
    ("generation", "kind", "told"), [(3, "pcie3", False), (5, "pcie5", False), (6, "pcie5", True), (2, "pcie3", True)]
)
def test_the_generation_of_pcie_is_the_gpu_s(generation: int, kind: str, told: bool, system: Path) -> None:
    found = discover("box", telling(query("NVIDIA L4", 1, 23034, generation)), system)
    assert found.cluster.nodes[0].intra.kind == kind
    assert any("PCIe of generation" in note for note in found.notes) == told


def test_the_memory_of_the_machine_is_its_host_s(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments.discover, "machine_bytes", lambda: 512 * 2**30)
    found = discover("box", telling(query("NVIDIA GeForce RTX 4090", 2, 24564)), system)
    assert found.cluster.nodes[0].host_memory_bytes == 512 * 2**30


def test_a_memory_that_is_not_the_kind_s_is_told(system: Path) -> None:
    found = discover("box", telling(query("NVIDIA GeForce RTX 4090", 1, 49140)), system)
    assert any("48.0 GiB" in note and "RTX4090" in note for note in found.notes)
    assert not any("GiB" in note for note in discover("box", telling(query("NVIDIA L4", 1, 23034)), system).notes)


def test_two_kinds_and_unknown_ones_are_refused(system: Path) -> None:
    both = query("NVIDIA GeForce RTX 4090", 1, 24564) + query("NVIDIA GeForce RTX 3090", 2, 24576)
    with pytest.raises(InputError, match=r"1 x NVIDIA GeForce RTX 4090, 2 x NVIDIA GeForce RTX 3090"):
        discover("box", telling(both), system)
    with pytest.raises(InputError, match="unknown GPU kind 'NVIDIA GeForce GT 710'"):
        discover("box", telling(query("NVIDIA GeForce GT 710", 1, 2048)), system)


# --- Network cards ---------------------------------------------------------------------------------------------------

GPU = telling(query("NVIDIA L4", 1, 23034))


def nic_of(system: Path) -> tuple[Nic | None, tuple[str, ...]]:
    found = discover("box", GPU, system)
    return found.cluster.nodes[0].nic, found.notes


def test_ethernet_cards_that_are_up_and_equally_fast_are_counted(system: Path) -> None:
    interface(system, "eno1", "1000")
    interface(system, "enp65s0f0", "25000")
    interface(system, "enp65s0f1", "25000")
    interface(system, "enp66s0", "100000", state="down")
    (system / "net" / "docker0").mkdir()  # without a card
    (system / "net" / "docker0" / "speed").write_text("10000")
    nic, notes = nic_of(system)
    assert nic == Nic("ethernet", 25e9 / 8, 2)
    assert any("1 slower" in note for note in notes)


def test_infiniband_comes_before_the_ethernet_beside_it(system: Path) -> None:
    for i in range(4):
        rdma(system, f"mlx5_{i}", "200 Gb/sec (4X HDR)", "InfiniBand")
    rdma(system, "mlx5_4", "100 Gb/sec (4X EDR)", "InfiniBand", state="1: DOWN")
    interface(system, "ib0", "200000", kind=32, card="mlx5_0")
    interface(system, "eno1", "10000")
    nic, _ = nic_of(system)
    assert nic == Nic("infiniband", 25e9, 4, 1.25e9)


def test_roce_is_rdma_over_ethernet_and_no_ethernet_beside_itself(system: Path) -> None:
    rdma(system, "mlx5_0", "100 Gb/sec (4X EDR)", "Ethernet")
    interface(system, "ens1", "100000", card="mlx5_0")
    nic, _ = nic_of(system)
    assert nic == Nic("roce", 12.5e9, 1, None)


@pytest.mark.parametrize("speed", ["-1", ""])
def test_a_card_without_a_speed_is_told_and_left_out(system: Path, speed: str) -> None:
    interface(system, "eth0", speed)
    nic, notes = nic_of(system)
    assert nic is None and any(note.startswith("eth0 does not tell its speed") for note in notes)
    assert any("no network card" in note for note in notes)


# --- CPUs ------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_cores_are_the_devices(system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments.discover, "_cpu_peaks", lambda: {"fp32": 8e10, "bf16": 16e10})
    monkeypatch.setattr(experiments.discover, "cores", lambda: 4)
    found = discover("laptop", telling(), system)
    (node,) = found.cluster.nodes
    assert (node.gpu.name, node.gpus, node.gpu.peak_flop_per_s) == ("CPU", 4, {"fp32": 2e10, "bf16": 4e10})
    assert node.gpu.efficiency.matmul_fraction == 1
    assert any("no GPU was found" in note for note in found.notes)
    assert reread(found.cluster, tmp_path) == found.cluster


def test_the_peak_of_a_cpu_is_measured() -> None:
    pytest.importorskip("torch")
    peaks = experiments.discover._cpu_peaks(seconds=0.02)
    assert set(peaks) == {"fp32", "bf16"} and all(1e8 < peak < 1e14 for peak in peaks.values())


# --- Several machines, and measured links ----------------------------------------------------------------------------


def machine(system: Path, name: str) -> Cluster:
    """Two L4s and a card of 10 Gbit/s."""
    if not (system / "net" / "eth0").exists():
        interface(system, "eth0", "10000")
    return discover(name, telling(query("NVIDIA L4", 2, 23034), topology(every_pair("PHB", 2))), system).cluster


def test_files_of_several_machines_make_one_cluster(system: Path, tmp_path: Path) -> None:
    both = joined("lab", [machine(system, "a"), machine(system, "b")]).cluster
    assert [device.name for device in both.devices] == ["a/0", "a/1", "b/0", "b/1"]
    assert Network(both).path("a/0", "b/1").links
    assert reread(both, tmp_path) == both
    with pytest.raises(InputError, match="'a' stands in several"):
        joined("lab", [machine(system, "a"), machine(system, "a")])


def sends(
    a: str, b: str, latency_s: float, bytes_per_s: float, sizes: Sequence[int] = (0, 2**20, 2**24)
) -> list[LinkMeasurement]:
    return [LinkMeasurement("send", (a, b), size, latency_s + size / bytes_per_s) for size in sizes]


def test_measured_messages_give_rates_between_and_inside_nodes(system: Path, tmp_path: Path) -> None:
    both = joined("lab", [machine(system, "a"), machine(system, "b")]).cluster
    start_s = links().start_s
    measured = [
        *sends("a/0", "b/0", start_s + 1e-3, 1e9),
        *sends("b/1", "a/1", start_s + 3e-3, 0.5e9),
        *sends("0", "1", start_s + 2e-5, 9e9),
        LinkMeasurement("all_reduce", ("a", "b"), 100, 1.0),
    ]
    found = with_links(both, Bench("x", links=tuple(measured)), tmp_path / "m.csv")
    assert found.cluster.bandwidth_matrix is not None
    rates = found.cluster.bandwidth_matrix.bytes_per_s
    assert rates[0][0] == rates[1][1] == math.inf
    assert (rates[0][1], rates[1][0]) == pytest.approx((1e9, 0.5e9))
    assert found.cluster.fabric.latency_s == pytest.approx(2e-3)
    network = Network(found.cluster)
    path = network.path("a/0", "a/1")
    assert min(network.links[link].capacity_bytes_per_s for link, _ in path.links) == pytest.approx(9e9)
    assert path.latency_s == pytest.approx(2e-5)
    assert found.cluster.nodes[1].intra == both.nodes[1].intra  # nothing was measured inside it
    assert any("1 measurements of collectives" in note for note in found.notes)


def test_messages_of_one_size_tell_a_rate_alone(system: Path) -> None:
    one = machine(system, "a")
    found = with_links(one, Bench("x", links=tuple(sends("a/0", "a/1", 0.5, 1e9, [10**9]))), Path("m.csv"))
    network = Network(found.cluster)
    assert min(network.links[i].capacity_bytes_per_s for i, _ in network.path("a/0", "a/1").links) == pytest.approx(1e9 / 1.5)
    assert found.cluster.nodes[0].intra.latency_s == 0


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ([LinkMeasurement("all_reduce", ("a", "b"), 100, 1.0)], "no messages"),
        (sends("a/0", "c/0", 1, 1e9), "device 'c/0' is not in cluster"),
        (sends("0", "9", 1, 1e9), "rank 9, but the cluster has 4"),
        (sends("a", "b", 1, 1e9), "none from 'b' to 'a'"),
        (sends("a", "b", 1, 1e9, [0]) + sends("b", "a", 1, 1e9, [0]), "0 bytes tell no rate"),
    ],
)
def test_benches_that_do_not_tell_are_refused(system: Path, measured: list[LinkMeasurement], told: str) -> None:
    both = joined("lab", [machine(system, "a"), machine(system, "b")]).cluster
    with pytest.raises(InputError, match=told):
        with_links(both, Bench("x", links=tuple(measured)), Path("m.csv"))


def test_a_matrix_file_is_read_back(system: Path, tmp_path: Path) -> None:
    both = joined("lab", [machine(system, "a"), machine(system, "b")]).cluster
    matrix = BandwidthMatrix(("a", "b"), ((math.inf, 1.25e9), (0.5e9, math.inf)))
    (tmp_path / "m.csv").write_text(matrix_csv(matrix))
    assert read_bandwidth_matrix(tmp_path / "m.csv", both.nodes) == matrix


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, system: Path) -> None:
    """This machine has two L4s and a card of 10 Gbit/s."""

    def found(name: str) -> experiments.discover.Found:
        return experiments.discover.Found(machine(system, name), ("a note",))

    monkeypatch.setattr(experiments.commands.discover, "discovered", found)


@pytest.mark.usefixtures("here")
def test_the_command_writes_a_cluster_that_can_be_read(motley: Motley, world: World, system: Path) -> None:
    file = world.folder / "box.yaml"
    ran = motley("discover", "--name", "box", "--out", file)
    assert ran.code == 0 and read_cluster(file) == machine(system, "box")
    assert "box: box: 2 x L4 (pcie4)" in ran.out and "note: a note" in ran.out
    to_pipe = motley("discover", "--name", "box")
    assert to_pipe.out == file.read_text() and "note: a note" in to_pipe.err


@pytest.mark.usefixtures("here")
def test_the_command_joins_files_and_takes_measured_links(motley: Motley, world: World) -> None:
    files = [world.folder / f"{name}.yaml" for name in "ab"]
    for file in files:
        assert motley("discover", "--name", file.stem, "--out", file).code == 0
    entries = "".join(
        f"- {{operation: send, sender: {a}/0, receiver: {b}/0, bytes: {size}, seconds: {1e-3 + size / 1e9}}}\n"
        for a, b in (("a", "b"), ("b", "a"))
        for size in (1000, 10**8)
    )
    bench = world.write("links.yaml", f"format: motley-bench/1\ndevice: gloo\nlinks:\n{entries}")
    out = world.folder / "lab.yaml"
    ran = motley("discover", *files, "--links", bench, "--name", "lab", "--out", out)
    assert ran.code == 0, ran.err
    lab = read_cluster(out)
    assert lab.name == "lab" and lab.bandwidth_matrix is not None
    assert lab.bandwidth_matrix.bytes_per_s[0][1] == pytest.approx(1e9, rel=1e-5)
    assert (world.folder / "lab.bandwidth.csv").exists() and "lab.bandwidth.csv" in ran.out
    piped = motley("discover", *files, "--links", bench)
    assert piped.code == 2 and "name it by --out FILE" in piped.err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--name", "a b"], "no '/', comma or space"),
        (["--links", "nothing.yaml"], "nothing.yaml"),
        (["nothing.yaml"], "nothing.yaml"),
        (["--out", "."], "is a folder"),
    ],
)
def test_bad_input_is_told_in_one_line(motley: Motley, world: World, arguments: list[str], told: str) -> None:
    before = world.names()
    ran = motley("discover", *arguments)
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1
    assert world.names() == before


def test_a_machine_that_cannot_be_a_node_is_one_line(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> experiments.discover.Found:
        raise InputError("the GPUs of a node are of one kind, but this machine has two")

    monkeypatch.setattr(experiments.commands.discover, "discovered", refuse)
    ran = motley("discover", "--out", world.folder / "box.yaml")
    assert ran.code == 2 and ran.err.count("\n") == 1 and not (world.folder / "box.yaml").exists()
