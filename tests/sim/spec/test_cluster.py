"""Cluster files: the examples, the defaults, and for every mistake one line with file, key, value and what is accepted."""

import math
from pathlib import Path

import pytest

from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node, WideAreaLink, links, read_cluster
from sim.spec.gpu import gpu_kind
from sim.spec.reading import InputError

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"

GBIT = 1e9 / 8
START_S, STEP_S = links().start_s, links().step_s  # fitted constants, whose values are not this file's business
NIC = "nic: {kind: ethernet, bandwidth: 10 Gbit/s}"
A100 = f"{{name: a, gpu: A100-80GB-SXM, gpus: 2, intra: nvlink, {NIC}}}"


def read(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_cluster(path)


def nodes(folder: Path, *entries: str, rest: str = "") -> Cluster:
    """The cluster of these entries of `nodes`, and what else the file says."""
    return read(folder, "name: c\nnodes:\n" + "".join(f"  - {entry}\n" for entry in entries) + rest)


def node(folder: Path, fields: str) -> Node:
    """The one node of a cluster, of these fields beside its name."""
    return nodes(folder, f"{{name: a, {fields}}}").nodes[0]


def refused(folder: Path, text: str) -> str:
    """The one line that refuses a file, without the folder."""
    with pytest.raises(InputError) as caught:
        read(folder, text)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"{folder}/")
    return line.removeprefix(f"{folder}/")


def nodes_refused(folder: Path, *entries: str, rest: str = "") -> str:
    return refused(folder, "name: c\nnodes:\n" + "".join(f"  - {entry}\n" for entry in entries) + rest)


# --- The examples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "groups"),
    [
        ("hexiscale-homogeneous-16", {"A100-80GB-PCIe": [8, 8]}),
        ("hexiscale-homogeneous-32", {"A100-80GB-PCIe": [8, 8, 8, 8]}),
        ("hexiscale-mixed-a", {"RTX3080Ti": [8], "RTX3090": [8], "RTX4090": [8, 8, 8]}),
        ("hexiscale-mixed-b", {"RTX3080Ti": [8], "RTX3090": [8], "RTX4090": [8], "A100-80GB-SXM": [8]}),
        ("hexiscale-mixed-c", {"RTX3090": [8], "RTX4090": [4, 4, 8, 8, 8, 8], "A100-80GB-SXM": [8]}),
        ("a100-1024", {"A100-80GB-SXM": [8] * 128}),
        ("mixed-nics", {"A100-80GB-SXM": [8, 8], "H100-80GB-SXM": [8, 8]}),
        ("two-sites", {"RTX4090": [4, 4], "A100-80GB-SXM": [8, 8]}),
        ("cpu-4", {"CPU": [4]}),
        ("with-matrix", {"A100-40GB-PCIe": [4], "RTX4090": [4, 4], "RTX3090": [4]}),
    ],
)
def test_an_example_cluster_has_the_gpus_it_tells_of(file: str, groups: dict[str, list[int]]) -> None:
    cluster = read_cluster(EXAMPLES / f"{file}.yaml")
    assert cluster.name == file
    found: dict[str, list[int]] = {}
    for member in cluster.nodes:
        found.setdefault(member.gpu.name, []).append(member.gpus)
    assert found == groups
    assert len(cluster.devices) == sum(sum(gpus) for gpus in groups.values())
    assert cluster.devices[0].name == f"{cluster.nodes[0].name}/0"
    assert all(cluster.device(device.name) is device for device in cluster.devices)


def test_every_example_cluster_is_tested_here() -> None:
    tested = {
        "hexiscale-homogeneous-16",
        "hexiscale-homogeneous-32",
        *(f"hexiscale-mixed-{letter}" for letter in "abc"),
        "a100-1024",
        "cpu-4",
        "mixed-nics",
        "two-sites",
        "with-matrix",
    }
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == tested


def test_the_mixed_cluster_b_is_read_whole() -> None:
    cluster = read_cluster(EXAMPLES / "hexiscale-mixed-b.yaml")
    nic = Nic("ethernet", 10 * GBIT)
    pcie = Intra("pcie4", 24e9, gpus_per_switch=4, sockets=2, host_bandwidth_bytes_per_s=24e9, latency_s=1e-6, step_s=STEP_S)
    nvlink = Intra(
        "nvlink", 300e9, gpus_per_switch=4, sockets=2, host_bandwidth_bytes_per_s=300e9, latency_s=0.6e-6, step_s=STEP_S
    )
    assert cluster == Cluster(
        "hexiscale-mixed-b",
        (
            Node("rtx3080ti", gpu_kind("RTX3080Ti"), 8, pcie, nic),
            Node("rtx3090", gpu_kind("RTX3090"), 8, pcie, nic),
            Node("rtx4090", gpu_kind("RTX4090"), 8, pcie, nic),
            Node("a100", gpu_kind("A100-80GB-SXM"), 8, nvlink, nic),
        ),
        Fabric(latency_s=50e-6, oversubscription=1.0, start_s=START_S, step_s=STEP_S),
    )


def test_the_example_of_two_sites_has_its_link() -> None:
    cluster = read_cluster(EXAMPLES / "two-sites.yaml")
    assert [member.site for member in cluster.nodes] == ["workshop", "workshop", "centre", "centre"]
    assert cluster.wan == (WideAreaLink(("workshop", "centre"), 1 * GBIT, 0.02),)


def test_the_example_matrix_is_read_by_rows_that_send() -> None:
    matrix = read_cluster(EXAMPLES / "with-matrix.yaml").bandwidth_matrix
    assert matrix is not None
    assert matrix.names == ("a100", "rtx4090-0", "rtx4090-1", "rtx3090")
    inf = math.inf
    gbit = [[inf, 9.2, 8.7, 4.1], [8.9, inf, 9.4, 3.8], [8.1, 9.3, inf, 3.6], [2.4, 2.2, 2.3, inf]]
    assert matrix.bytes_per_s == tuple(tuple(pytest.approx(rate * GBIT) for rate in row) for row in gbit)


# --- Defaults and names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "intra", "rate", "latency_s"),
    [
        ("V100-16GB-SXM", "nvlink", 150e9, 0.6e-6),
        ("A100-80GB-SXM", "nvlink", 300e9, 0.6e-6),
        ("A800-80GB-SXM", "nvswitch", 200e9, 0.6e-6),
        ("H800-80GB-SXM", "nvswitch", 200e9, 0.6e-6),
        ("H100-80GB-SXM", "nvswitch", 450e9, 0.6e-6),
        ("RTX3090", "pcie3", 12e9, 1e-6),
        ("RTX4090", "pcie4", 24e9, 1e-6),
        ("H100-80GB-SXM", "pcie5", 50e9, 1e-6),
    ],
)
def test_the_rate_inside_a_node_follows_from_the_link_and_the_gpu(
    tmp_path: Path, gpu: str, intra: str, rate: float, latency_s: float
) -> None:
    found = node(tmp_path, f"gpu: {gpu}, gpus: 8, intra: {intra}").intra
    assert found == Intra(intra, rate, 4, 2, rate, latency_s, STEP_S)
    assert found.is_nvlink == intra.startswith("nv")


def test_an_interconnect_can_be_told_in_full(tmp_path: Path) -> None:
    told = "{kind: pcie4, bandwidth: 20 GB/s, gpus_per_switch: 2, sockets: 1, host_bandwidth: 16 GB/s, latency: 9 us, step: 0 s}"
    assert node(tmp_path, f"gpu: RTX4090, gpus: 8, intra: {told}").intra == Intra("pcie4", 20e9, 2, 1, 16e9, 9e-6, 0.0)
    partly = node(tmp_path, "gpu: RTX4090, gpus: 8, intra: {kind: pcie4, bandwidth: 20 GB/s}").intra
    assert partly == Intra("pcie4", 20e9, 4, 2, 20e9, 1e-6, STEP_S)
    bridged = node(tmp_path, "gpu: RTX3090, gpus: 2, intra: {kind: nvlink, bandwidth: 56 GB/s}").intra
    assert bridged == Intra("nvlink", 56e9, 4, 2, 56e9, 0.6e-6, STEP_S)


def test_a_count_of_one_keeps_the_name_and_a_higher_count_numbers_it(tmp_path: Path) -> None:
    cluster = nodes(
        tmp_path,
        f"{{name: a100, count: 1, gpu: A100-80GB-SXM, gpus: 1, intra: nvlink, {NIC}}}",
        f"{{name: rtx4090, count: 2, gpu: RTX4090, gpus: 2, intra: pcie4, {NIC}}}",
    )
    names = ["a100/0", "rtx4090-0/0", "rtx4090-0/1", "rtx4090-1/0", "rtx4090-1/1"]
    assert [device.name for device in cluster.devices] == names
    assert [device.index for device in cluster.devices] == [0, 0, 1, 0, 1]
    assert cluster.device("rtx4090-1/1").gpu is gpu_kind("RTX4090")


def test_gpu_kinds_are_matched_by_any_spelling(tmp_path: Path) -> None:
    assert node(tmp_path, "gpu: nvidia geforce rtx-4090, gpus: 1, intra: pcie4").gpu is gpu_kind("RTX4090")


def test_a_nic_can_be_told_in_full_and_racks_and_sites_beside_it(tmp_path: Path) -> None:
    found = node(
        tmp_path,
        "gpu: A100-80GB-SXM, gpus: 8, intra: nvswitch, rack: r1, site: s1, "
        "nic: {kind: roce, bandwidth: 200 Gbit/s, count: 4, ethernet: 10 Gbit/s}",
    )
    assert found.nic == Nic("roce", 25e9, 4, 1.25e9)
    assert (found.rack, found.site) == ("r1", "s1")


def test_a_single_node_needs_no_nic_and_a_fabric_has_defaults(tmp_path: Path) -> None:
    cluster = nodes(tmp_path, "{name: a, gpu: RTX4090, gpus: 2, intra: pcie4}")
    assert cluster.nodes[0].nic is None
    assert cluster.fabric == Fabric(latency_s=0.0, oversubscription=1.0, start_s=START_S, step_s=STEP_S)
    assert cluster.fabric.efficiency("infiniband") == 0.92


def test_the_fabric_overrides_protocol_efficiencies_one_by_one(tmp_path: Path) -> None:
    efficiency = "{tcp: 0.25, nvlink: 1}"
    told = f"fabric: {{latency: 5 us, oversubscription: 2.5, start: 10 us, step: 100 us, protocol_efficiency: {efficiency}}}\n"
    fabric = nodes(tmp_path, A100, rest=told).fabric
    assert fabric == Fabric(5e-6, 2.5, (("nvlink", 1.0), ("tcp", 0.25)), 10e-6, 100e-6)
    assert [fabric.efficiency(protocol) for protocol in ("tcp", "nvlink", "roce")] == [0.25, 1.0, 0.90]


def test_gpu_kinds_of_the_file_override_and_extend_the_catalogue(tmp_path: Path) -> None:
    cluster = nodes(
        tmp_path,
        f"{{name: a, gpu: RTX4090, gpus: 1, intra: pcie4, {NIC}}}",
        f"{{name: b, gpu: half-4090, gpus: 1, intra: pcie4, {NIC}}}",
        f"{{name: c, gpu: RTX3090, gpus: 1, intra: pcie4, {NIC}}}",
        rest="gpu_kinds:\n"
        "  rtx-4090: {price: 0.40 $/h, efficiency: {matmul_fraction: 0.5}}\n"
        "  half-4090: {like: RTX4090, memory: 12 GiB}\n",
    )
    ours, half, theirs = (member.gpu for member in cluster.nodes)
    assert (ours.name, ours.dollars_per_hour, ours.efficiency.matmul_fraction) == ("RTX4090", 0.4, 0.5)
    assert ours.peak_flop_per_s == gpu_kind("RTX4090").peak_flop_per_s
    assert (half.name, half.memory_bytes) == ("half-4090", 12 * 2**30)
    assert theirs is gpu_kind("RTX3090")


def test_the_peak_of_a_cluster_is_summed_over_the_devices_that_support_the_precision() -> None:
    cluster = Cluster(
        "c",
        (
            Node("a", gpu_kind("A100-80GB-SXM"), 2, Intra("nvlink", 1e9), Nic("ethernet", 1e9)),
            Node("v", gpu_kind("V100-16GB-SXM"), 3, Intra("nvlink", 1e9), Nic("ethernet", 1e9)),
        ),
    )
    assert cluster.peak_flop_per_s("bf16") == 2 * 312e12
    assert cluster.peak_flop_per_s("fp16") == 2 * 312e12 + 3 * 125e12
    assert cluster.peak_flop_per_s("fp16", ("a/0", "v/2")) == 312e12 + 125e12


def test_an_unknown_device_is_told_with_the_nearest_one() -> None:
    cluster = read_cluster(EXAMPLES / "hexiscale-mixed-c.yaml")
    with pytest.raises(InputError) as caught:
        cluster.device("rtx4090x8-4/0")
    assert str(caught.value) == (
        "device 'rtx4090x8-4/0' is not in cluster 'hexiscale-mixed-c', which has rtx3090/0-7, rtx4090x4-0/0-3, "
        "rtx4090x4-1/0-3, rtx4090x8-0/0-7 and 4 more nodes; did you mean rtx4090x8-3/0?"
    )


# --- Leaving nodes out -----------------------------------------------------------------------------------------------


def test_a_cluster_without_a_node_loses_its_row_and_column() -> None:
    cluster = read_cluster(EXAMPLES / "with-matrix.yaml").without_nodes({"rtx4090-0", "rtx3090"})
    assert [member.name for member in cluster.nodes] == ["a100", "rtx4090-1"]
    matrix = cluster.bandwidth_matrix
    assert matrix is not None and matrix.names == ("a100", "rtx4090-1")
    assert matrix.bytes_per_s == ((math.inf, 8.7 * GBIT), (8.1 * GBIT, math.inf))


def test_a_cluster_without_the_last_node_of_a_site_loses_the_sites_link() -> None:
    cluster = read_cluster(EXAMPLES / "two-sites.yaml")
    assert cluster.without_nodes({"a100-0"}).wan == cluster.wan
    alone = cluster.without_nodes({"a100-0", "a100-1"})
    assert alone.wan == () and {member.site for member in alone.nodes} == {"workshop"}


# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            "gpu: A100-80GB-SMX, gpus: 2, intra: nvlink",
            "gpu: unknown GPU kind 'A100-80GB-SMX'; did you mean A100-80GB-SXM? known: ",
        ),
        ("gpu: 4090, gpus: 2, intra: pcie4", "gpu: expected the name of a GPU kind, but got 4090"),
        ("gpus: 2, intra: pcie4", "gpu: is missing; expected the name of a GPU kind"),
        ("gpu: RTX4090, gpus: 0, intra: pcie4", "gpus: expected a whole number of at least 1 and at most 1,024, but got 0"),
        ("gpu: RTX4090, gpus: two, intra: pcie4", "gpus: expected a whole number of at least 1 and at most 1,024, but got 'two'"),
        ("gpu: RTX4090, gpus: 1025, intra: pcie4", "gpus: expected a whole number of at least 1 and at most 1,024, but got 1025"),
        (
            "gpu: RTX4090, gpus: 2, count: 0, intra: pcie4",
            "count: expected a whole number of at least 1 and at most 100,000, but got 0",
        ),
        (
            f"gpu: RTX4090, gpus: 2, count: {10**30}, intra: pcie4",
            f"count: expected a whole number of at least 1 and at most 100,000, but got {10**30}",
        ),
        (
            "gpu: RTX4090, gpus: 2, intra: {kind: pcie4, bandwidth: 1e-200 bit/s}",
            "intra.bandwidth: got '1e-200 bit/s', but a bandwidth from 1 to 1e21 B/s is accepted",
        ),
        ("gpu: RTX4090, gpus: 2", "intra: is missing; expected an interconnect"),
        (
            "gpu: RTX4090, gpus: 2, intra: pcie6",
            "intra: expected one of nvlink, nvswitch, pcie3, pcie4, pcie5, but got 'pcie6'; did you mean pcie5?",
        ),
        (
            "gpu: RTX4090, gpus: 2, intra: {kind: pci}",
            "intra.kind: expected one of nvlink, nvswitch, pcie3, pcie4, pcie5, but got 'pci'; did you mean pcie5?",
        ),
        ("gpu: RTX4090, gpus: 2, intra: 4", "intra: expected a mapping of keys to values, but got 4"),
        (
            "gpu: RTX4090, gpus: 2, intra: nvlink",
            "intra: RTX4090 has no NVLink rate in the catalogue, but got 'nvlink'; "
            "accepted: a pcie kind, or {kind: nvlink, bandwidth: RATE}",
        ),
        ("gpu: RTX4090, gpus: 2, intra: {kind: pcie4, bandwidth: 24}", "intra.bandwidth: got 24 without a unit, but a bandwidth"),
        (
            "gpu: RTX4090, gpus: 2, intra: {kind: pcie4, bandwidth: 0 GB/s}",
            "intra.bandwidth: got '0 GB/s', but a bandwidth above",
        ),
        ("gpu: RTX4090, gpus: 2, intra: {kind: pcie4, sockets: 0}", "intra.sockets: expected a whole number of at least 1"),
        (
            "gpu: RTX4090, gpus: 2, intra: {kind: pcie4, speed: 1 GB/s}",
            "intra: unknown key 'speed'; accepted: kind, bandwidth, gpus_per_switch, sockets, host_bandwidth, latency",
        ),
        ("gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: ethernet, bandwidth: 10}", "nic.bandwidth: got 10 without a unit"),
        ("gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: ethernet}", "nic.bandwidth: is missing; expected a bandwidth with"),
        (
            "gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: infinband, bandwidth: 10 Gbit/s}",
            "nic.kind: expected one of ethernet, roce, infiniband, but got 'infinband'; did you mean infiniband?",
        ),
        (
            "gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: roce, bandwidth: 10 Gbit/s, count: 3}",
            "nic.count: a NIC serves at least one GPU, but got 3 NICs for 2 GPUs",
        ),
        (
            "gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: ethernet, bandwidth: 10 Gbit/s, ethernet: 1 Gbit/s}",
            "nic.ethernet: is the rate of the Ethernet beside an RDMA card, but the nic is of kind ethernet itself",
        ),
        (
            "gpu: RTX4090, gpus: 2, intra: pcie4, nik: {}",
            ": unknown key 'nik'; accepted: name, count, gpu, gpus, intra, nic, site, rack, host_memory; did you mean nic?",
        ),
    ],
)
def test_a_mistake_in_a_node_is_told_in_one_line(tmp_path: Path, fields: str, error: str) -> None:
    line = nodes_refused(tmp_path, A100.replace("name: a", "name: first"), f"{{name: a, {fields}}}")
    assert line.startswith(f"cluster.yaml: nodes[1]{'' if error.startswith(':') else '.'}{error}"), line


def test_a_name_is_of_one_line(tmp_path: Path) -> None:
    """For it is written into the comments of scripts."""
    path = tmp_path / "cluster.yaml"
    path.write_text('name: "x\\n$(id)"\nnodes:\n  - {name: a, gpu: T4, gpus: 1, intra: pcie3}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"cluster.yaml: name: expected a text of one line, but got 'x\\n\$\(id\)'"):
        read_cluster(path)


@pytest.mark.parametrize("name", ["a/0", "a b", "a,b", "a\\tb"])
def test_a_node_name_cannot_hold_what_separates_devices(tmp_path: Path, name: str) -> None:
    line = nodes_refused(tmp_path, A100.replace("name: a", f'name: "{name}"'))
    assert line.startswith("cluster.yaml: nodes[0].name: a node name has no '/', comma or space, ")


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        ("speed: 1\n", "cluster.yaml: unknown key 'speed'; accepted: name, gpu_kinds, nodes, fabric, wan, bandwidth_matrix"),
        ("fabric: {latency: 5}\n", "cluster.yaml: fabric.latency: got 5 without a unit, but a time with its unit"),
        ("fabric: {latency: 5 GB}\n", "cluster.yaml: fabric.latency: got '5 GB' with the unit 'GB', but a time with its unit"),
        ("fabric: {latency: -5 us}\n", "cluster.yaml: fabric.latency: got '-5 us', but a time of at least zero is accepted"),
        (
            "fabric: {oversubscription: 0.5}\n",
            "cluster.yaml: fabric.oversubscription: expected a number of at least 1 and at most 1e+06, but got 0.5",
        ),
        (
            "fabric: {latncy: 5 us}\n",
            "cluster.yaml: fabric: unknown key 'latncy'; accepted: protocol_efficiency, latency, oversubscription, start, step; "
            "did you mean latency?",
        ),
        ("fabric:\n", "cluster.yaml: fabric: expected a mapping of keys to values, but got nothing"),
        (
            "fabric: {protocol_efficiency: {roce: 1.5}}\n",
            "cluster.yaml: fabric.protocol_efficiency.roce: expected a number of at least 0.01 and at most 1, but got 1.5",
        ),
        (
            "fabric: {protocol_efficiency: {rocee: 1}}\n",
            "cluster.yaml: fabric.protocol_efficiency: unknown key 'rocee'; accepted: nvlink, nvls, pcie, infiniband, roce",
        ),
        ("gpu_kinds: [RTX4090]\n", "cluster.yaml: gpu_kinds: expected a mapping of keys to values, but got ['RTX4090']"),
        ("gpu_kinds: {RTX4090: {memory: 24}}\n", "cluster.yaml: gpu_kinds.RTX4090.memory: got 24 without a unit, but a size"),
        ("gpu_kinds: {RTX4090: {}, rtx-4090: {}}\n", "cluster.yaml: gpu_kinds.rtx-4090: RTX4090 is described twice"),
        ("wan: {between: [a, b]}\n", "cluster.yaml: wan: expected a list, but got {'between': ['a', 'b']}"),
        ("wan: [{between: [a]}]\n", "cluster.yaml: wan[0].between: expected a list of at least 2 entries, but got ['a']"),
        (
            "wan: [{between: [a, b, c]}]\n",
            "cluster.yaml: wan[0].between: expected the names of two sites, but got ['a', 'b', 'c']",
        ),
        ("wan: [{between: [a, no]}]\n", "cluster.yaml: wan[0].between: expected the names of two sites, but got ['a', False]"),
        ("wan: [{between: [a, b]}]\n", "cluster.yaml: wan[0].bandwidth: is missing; expected a bandwidth with its unit"),
        ("bandwidth_matrix: none.csv\n", "none.csv: cannot be read (no such file or directory)"),
        (
            "fabric: {oversubscription: 1e308}\n",
            "cluster.yaml: fabric.oversubscription: expected a number of at least 1 and at most 1e+06, but got '1e308'",
        ),
        (
            "fabric: {oversubscription: 1.0e+308}\n",
            "cluster.yaml: fabric.oversubscription: expected a number of at least 1 and at most 1e+06, but got 1e+308",
        ),
        ("fabric: {latency: 1e300 s}\n", "cluster.yaml: fabric.latency: got '1e300 s', but a time from 0 to 1e7 s is accepted"),
        (
            "gpu_kinds: {RTX4090: {peak: {bf16: 1e-300 FLOP/s}}}\n",
            "cluster.yaml: gpu_kinds.RTX4090.peak.bf16: got '1e-300 FLOP/s', but a rate of work from 1000 to 1e24 FLOP/s",
        ),
        (
            "gpu_kinds: {RTX4090: {memory: 1e30 GiB}}\n",
            "cluster.yaml: gpu_kinds.RTX4090.memory: got '1e30 GiB', but a size from 1 to 1e18 B is accepted",
        ),
        ("name: d\n", "cluster.yaml, line 4, column 1: is not valid YAML: the key 'name' stands twice"),
    ],
)
def test_a_mistake_beside_the_nodes_is_told_in_one_line(tmp_path: Path, rest: str, error: str) -> None:
    line = nodes_refused(tmp_path, A100, rest=rest)
    assert line.startswith(error), line


def test_a_cluster_has_a_name_and_nodes(tmp_path: Path) -> None:
    assert refused(tmp_path, "nodes: []\n") == "cluster.yaml: name: is missing; expected a text of one line"
    assert refused(tmp_path, "name: c\n") == "cluster.yaml: nodes: is missing; expected a list of at least 1 entries"
    assert refused(tmp_path, "name: c\nnodes: []\n").startswith("cluster.yaml: nodes: expected a list of at least 1 entries, but")
    assert refused(tmp_path, "") == "cluster.yaml: expected a mapping of keys to values, but got nothing"


def test_a_node_name_stands_once(tmp_path: Path) -> None:
    line = nodes_refused(tmp_path, A100, A100)
    assert line == "cluster.yaml: cluster 'c': node names are unique, but 'a' stands 2 times"
    numbered = A100.replace("name: a", "name: a-1"), A100.replace("name: a", "name: a, count: 2")
    assert nodes_refused(tmp_path, *numbered) == "cluster.yaml: cluster 'c': node names are unique, but 'a-1' stands 2 times"


def test_many_nodes_are_read_in_little_time(tmp_path: Path) -> None:
    cluster = nodes(tmp_path, A100.replace("gpus: 2", "gpus: 2, count: 20000"))
    assert len(cluster.nodes) == 20_000 and cluster.nodes[-1].name == "a-19999"


def test_a_cluster_has_at_most_a_hundred_thousand_gpus(tmp_path: Path) -> None:
    many, more = (
        A100.replace("gpus: 2", "gpus: 2, count: 49999"),
        A100.replace("name: a", "name: b").replace("gpus: 2", "gpus: 3"),
    )
    line = nodes_refused(tmp_path, many, more)
    assert line == "cluster.yaml: nodes: a cluster has at most 100,000 GPUs, but with nodes[1] it has 100,001"


def test_a_near_miss_of_a_kind_that_the_file_itself_describes_is_named(tmp_path: Path) -> None:
    line = nodes_refused(
        tmp_path,
        "{name: a, gpu: workshop-crad, gpus: 2, intra: pcie4}",
        rest="gpu_kinds: {workshop-card: {like: RTX4090}}\n",
    )
    start = "cluster.yaml: nodes[0].gpu: unknown GPU kind 'workshop-crad'; did you mean workshop-card? known: workshop-card, "
    assert line.startswith(start)


def test_a_node_among_others_needs_a_nic(tmp_path: Path) -> None:
    line = nodes_refused(tmp_path, A100, "{name: b, gpu: RTX4090, gpus: 2, intra: pcie4}")
    assert line == "cluster.yaml: cluster 'c': node 'b' has no nic, but the cluster has 2 nodes"


def site(name: str) -> str:
    """An entry of `nodes` at a site, both of the same name."""
    return f"{{name: {name}, site: {name}, gpu: RTX4090, gpus: 2, intra: pcie4, {NIC}}}"


def wan(*pairs: str) -> str:
    return "wan:\n" + "".join(f"  - {{between: [{pair}], bandwidth: 1 Gbit/s, latency: 1 ms}}\n" for pair in pairs)


def test_every_two_sites_need_a_path(tmp_path: Path) -> None:
    needed = "cluster.yaml: cluster 'c': every two sites need a wan path, but node "
    assert nodes_refused(tmp_path, site("x"), site("y")) == f"{needed}'y' ('y') has none to node 'x' ('x')"
    three = (site("x"), site("y"), site("z"))
    assert nodes_refused(tmp_path, *three, rest=wan("y, z")) == f"{needed}'y' ('y') has none to node 'x' ('x')"
    assert nodes_refused(tmp_path, A100, site("x")) == f"{needed}'x' ('x') has none to node 'a' (no site)"
    assert len(nodes(tmp_path, *three, rest=wan("y, z", "y, x")).wan) == 2


def test_wan_links_join_two_known_sites_once(tmp_path: Path) -> None:
    two = (site("x"), site("y"))
    unknown = "cluster.yaml: cluster 'c': wan joins the site 'z', but the nodes' sites are x, y"
    assert nodes_refused(tmp_path, *two, rest=wan("x, y", "x, z")) == unknown
    nowhere = "cluster.yaml: cluster 'c': wan joins the site 'y', but no node has a site"
    assert nodes_refused(tmp_path, A100, rest=wan("y, z")) == nowhere
    assert nodes_refused(tmp_path, *two, rest=wan("x, x")) == "cluster.yaml: cluster 'c': wan joins two sites, but got 'x' twice"
    twice = "cluster.yaml: cluster 'c': wan joins 'x' and 'y' more than once"
    assert nodes_refused(tmp_path, *two, rest=wan("x, y", "y, x")) == twice


# --- The bandwidth matrix --------------------------------------------------------------------------------------------

TWO = (A100, A100.replace("name: a", "name: b"))
MATRIX = "bandwidth_matrix: m.csv\n"


def test_the_rows_and_columns_of_a_matrix_may_stand_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("\ufeffMB/s, b, a\n\nb, -, 3\na, 2, \n")
    matrix = nodes(tmp_path, *TWO, rest=MATRIX).bandwidth_matrix
    assert matrix is not None
    assert matrix.names == ("a", "b")
    assert matrix.bytes_per_s == ((math.inf, 2e6), (3e6, math.inf))
    assert matrix.file == tmp_path / "m.csv"


def test_a_matrix_may_be_of_devices(tmp_path: Path) -> None:
    names = ["a/0", "a/1", "b/0", "b/1"]
    rows = [
        f"{sender},{','.join(cells)}"
        for sender, cells in zip(names, [[",1,2,3"], ["4,,5,6"], ["7,8,,9"], ["1,2,3,"]], strict=True)
    ]
    (tmp_path / "m.csv").write_text("\n".join(["GB/s," + ",".join(names), *rows]))
    matrix = nodes(tmp_path, *TWO, rest=MATRIX).bandwidth_matrix
    assert matrix is not None
    assert matrix.names == tuple(names)
    assert matrix.bytes_per_s[0] == (math.inf, 1e9, 2e9, 3e9)
    assert matrix.bytes_per_s[2] == (7e9, 8e9, math.inf, 9e9)


@pytest.mark.parametrize(
    ("csv", "error"),
    [
        ("", "is empty; expected a matrix whose first row and column are all node or all device names"),
        ("\n , \n", "is empty; expected a matrix whose first row and column are all node or all device names"),
        ("GB,a,b\na,,1\nb,1,\n", "the corner cell is the unit of the rates, such as 'GB/s' or 'Gbit/s', but got 'GB'"),
        (",a,b\na,,1\nb,1,\n", "the corner cell is the unit of the rates, such as 'GB/s' or 'Gbit/s', but got ''"),
        ("GB/s,a\na,\n", "the first row names all 2 nodes of the cluster, but 1 are there; the first missing is 'b'"),
        ("GB/s,a,b\nb,1,\n", "the first column names all 2 nodes of the cluster, but 1 are there; the first missing is 'a'"),
        ("GB/s,a,b,a\na,,1,1\nb,1,,1\n", "the first row names 'a' 2 times"),
        ("GB/s,a,b\na,,1\na,,1\n", "the first column names 'a' 2 times"),
        ("GB/s,a,bb\na,,1\nbb,1,\n", "the first row names 'bb', which is no node of the cluster; did you mean b?"),
        ("GB/s,a,b\na,,1\nzz,1,\n", "the first column names 'zz', which is no node of the cluster"),
        ("GB/s,a/0,b\na/0,,1\nb,1,\n", "the first row names 'b', which is no device of the cluster; did you mean b/1?"),
        ("GB/s,a,b\na,,1\nb,1\n", "the row 'b' has 1 rates, but there are 2 columns"),
        ("GB/s,a,b\na,,1,2\nb,1,\n", "the row 'a' has 3 rates, but there are 2 columns"),
        ("GB/s,a,b\na,,0\nb,1,\n", "every rate is a number above zero, but the one from 'a' to 'b' is 0"),
        ("GB/s,a,b\na,,1\nb,-2,\n", "every rate is a number above zero, but the one from 'b' to 'a' is -2"),
        ("GB/s,a,b\na,,\nb,1,\n", "every rate is a number above zero, but the one from 'a' to 'b' is missing"),
        ("GB/s,a,b\na,,fast\nb,1,\n", "every rate is a number above zero, but the one from 'a' to 'b' is fast"),
        ("GB/s,a,b\na,,nan\nb,1,\n", "every rate is a number above zero, but the one from 'a' to 'b' is nan"),
        ("GB/s,a,b\na,,1e999\nb,1,\n", "every rate is a number above zero, but the one from 'a' to 'b' is 1e999"),
        ("GB/s,a,b\na,,1e-320\nb,1,\n", "every rate is from 1 to 1e21 B/s, but the one from 'a' to 'b' is 1e-320 GB/s"),
        ("GB/s,a,b\na,,1\nb,1e300,\n", "every rate is from 1 to 1e21 B/s, but the one from 'b' to 'a' is 1e300 GB/s"),
        (f"GB/s,a,b\na,,{'1' * 200_000}\nb,1,\n", "is not valid CSV: field larger than field limit (131072)"),
        ("GB/s,a,b\na,5,1\nb,1,\n", "the diagonal is empty, but the cell of 'a' to itself holds '5'"),
    ],
)
def test_a_mistake_in_a_matrix_is_told_in_one_line(tmp_path: Path, csv: str, error: str) -> None:
    (tmp_path / "m.csv").write_text(csv)
    assert nodes_refused(tmp_path, *TWO, rest=MATRIX) == f"m.csv: {error}"


def test_a_link_that_is_not_there_is_told_with_its_file_and_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    text = (EXAMPLES / "hexiscale-mixed-b.yaml").read_text(encoding="utf-8")
    file.write_text(text + "links:\n  a6000-0/nic7>fabric: {bandwidth: 1 GB/s}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"cluster.yaml: cluster .*: there is no link .a6000-0/nic7>fabric.; did you mean"):
        read_cluster(file)


def test_a_cluster_s_name_has_no_slash_for_it_becomes_part_of_file_names(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: a/b\nnodes: [{name: n, gpu: RTX4090, gpus: 1, intra: pcie4}]\n")
    with pytest.raises(InputError, match=r"cluster.yaml: name: a cluster's name becomes part of file names .* got 'a/b'"):
        read_cluster(file)
