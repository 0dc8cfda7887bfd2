"""Cluster files of several machines become one: nothing that one of them tells is lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.joining import joined
from sim.cost.network import Network
from sim.spec.cluster import Cluster, Fabric, WideAreaLink, cluster_yaml, parse_cluster
from sim.spec.reading import InputError
from sim.spec.stack import stack
from tests.experiments.conftest import Ran, World

Motley = Callable[..., Ran]

RICH = """
name: rich
nodes:
  - {name: n, count: 2, gpu: RTX4090, gpus: 4, intra: {kind: pcie4, host_bandwidth: 10 GB/s}, rack: r1, host_memory: 100 GiB,
     nic: {kind: roce, bandwidth: 100 Gbit/s, count: 2, ethernet: 10 Gbit/s}}
fabric: {latency: 7 us, oversubscription: 4, protocol_efficiency: {roce: 0.5}}
devices: {n-0/1: {speed: 0.8}}
links: {"n-0/nic0>fabric": {bandwidth: 3 Gbit/s}, "rack:r1>core": {latency: 2 us}}
stack: megatron-core
gpu_kinds: {RTX4090: {speed: 1.2}}
"""
PLAIN = """
name: plain
nodes:
  - {name: k, gpu: A100-80GB-SXM, gpus: 8, intra: nvswitch, nic: {kind: ethernet, bandwidth: 1 Gbit/s}}
fabric: {latency: 90 us}
"""


def cluster(text: str, **changes: str) -> Cluster:
    for key, value in changes.items():
        assert key in text
        text = text.replace(key, value)
    return parse_cluster(text, "x.yaml")


def test_what_each_file_tells_is_kept() -> None:
    rich, plain = cluster(RICH), cluster(PLAIN)
    found = joined("lab", [rich, plain])
    both = found.cluster
    assert both.nodes == rich.nodes + plain.nodes
    assert both.device_speeds == rich.device_speeds and both.link_overrides == rich.link_overrides
    assert both.stack == stack("megatron-core")
    assert both.fabric == Fabric(90e-6, 4.0, (("roce", 0.5),), rich.fabric.start_s, rich.fabric.step_s)
    assert found.notes == (
        "fabric.latency is 7 us in rich, 90 us in plain: 90 us is taken",
        "fabric.oversubscription is 4 in rich, 1 in plain: 4 is taken",
        "stack is megatron-core in rich alone: it is taken for all",
    )
    assert parse_cluster(cluster_yaml(both), "y.yaml") == both
    network = Network(both)
    slowed = {network.links[link].name for link, _ in network.path("n-0/0", "n-1/0").links}
    assert "n-0/nic0>fabric" in slowed


def test_cpus_that_were_measured_to_differ_are_named_after_their_machines() -> None:
    text = "name: {0}\nnodes: [{{name: {0}, gpu: CPU, gpus: 1, intra: pcie4, nic: {{kind: ethernet, bandwidth: 1 Gbit/s}}}}]\n"
    peaks = "gpu_kinds: {{CPU: {{peak: {{fp32: {1} GFLOP/s}}}}}}\n"
    one, two, like = (cluster((text + peaks).format(name, rate)) for name, rate in (("a", 90), ("b", 95), ("c", 90)))
    found = joined("lab", [one, two]).cluster
    assert [node.gpu.name for node in found.nodes] == ["CPU a", "CPU b"]
    assert [node.gpu.peak("fp32") for node in found.nodes] == [90e9, 95e9]
    assert parse_cluster(cluster_yaml(found), "y.yaml") == found
    assert {node.gpu.name for node in joined("lab", [one, like]).cluster.nodes} == {"CPU"}


def test_a_cluster_alone_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("GB/s,n-0,n-1\nn-0,,1\nn-1,2,\n")
    one = parse_cluster(RICH + "bandwidth_matrix: m.csv\n", tmp_path / "x.yaml")
    found = joined("rich", [one])
    assert found.cluster == one and found.notes == ()


def test_a_protocol_that_only_one_uses_keeps_its_efficiency() -> None:
    """As the loopback of a machine without GPUs, which is measured, beside nodes whose GPUs talk over PCIe."""
    loopback = cluster(PLAIN, **{"{latency: 90 us}": "{protocol_efficiency: {nvlink: 1.0}}"})
    found = joined("lab", [loopback, cluster(RICH)])
    assert dict(found.cluster.fabric.protocol_efficiency) == {"nvlink": 1.0, "roce": 0.5}
    assert not any("efficiency" in note for note in found.notes)
    other = cluster(PLAIN, **{"name: plain": "name: other", "name: k": "name: l"})
    both = joined("lab", [loopback, other])
    assert both.cluster.fabric.efficiency("nvlink") == other.fabric.efficiency("nvlink") < 1
    assert any("protocol_efficiency.nvlink is 1 in plain" in note for note in both.notes)


def test_what_tells_of_one_file_alone_is_left_out_and_told(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("GB/s,n-0,n-1\nn-0,,1\nn-1,2,\n")
    text = RICH.replace("links: {", 'links: {"n-0=>n-1": {latency: 5 us}, ') + "bandwidth_matrix: m.csv\n"
    text += (
        "calibration: {fitted_on: [a.csv], origin: measured, plans: 3, error_before: 0.2, error_after: 0.1, "
        "interval: {coverage: 0.8, low: -0.1, high: 0.1}, not_told: []}\n"
    )
    found = joined("lab", [parse_cluster(text, tmp_path / "x.yaml"), cluster(PLAIN)])
    assert found.cluster.bandwidth_matrix is None and found.cluster.calibration is None
    assert [link.name for link in found.cluster.link_overrides] == ["n-0/nic0>fabric", "rack:r1>core"]
    for told in ("bandwidth_matrix of rich is left out", "calibration of rich is left out", "bandwidth_matrix of rich (1)"):
        assert sum(told in note for note in found.notes) == 1


def site(name: str, place: str) -> str:
    return (
        f"{{name: {name}, gpu: A100-80GB-SXM, gpus: 8, intra: nvswitch, site: {place}, nic: {{kind: roce, bandwidth: 10 GB/s}}}}"
    )


def sites(name: str, places: dict[str, str], bandwidth: str) -> Cluster:
    nodes = "".join(f"  - {site(node, place)}\n" for node, place in places.items())
    wan = f"wan: [{{between: [paris, oslo], bandwidth: {bandwidth}, latency: 20 ms}}]\n" if len(places) > 1 else ""
    return parse_cluster(f"name: {name}\nnodes:\n{nodes}{wan}", "x.yaml")


def test_links_between_sites_are_kept() -> None:
    far = sites("far", {"a": "paris", "b": "oslo"}, "1 GB/s")
    assert joined("lab", [far, sites("more", {"c": "paris"}, "")]).cluster.wan == far.wan
    again = sites("again", {"d": "paris", "e": "oslo"}, "1 GB/s")
    assert joined("lab", [far, again]).cluster.wan == (WideAreaLink(("paris", "oslo"), 1e9, 0.02),)


@pytest.mark.parametrize(
    ("clusters", "told"),
    [
        ([cluster(PLAIN), cluster(PLAIN)], "the node 'k' stands in several"),
        (
            [cluster(RICH), cluster(PLAIN, **{"A100-80GB-SXM, gpus: 8, intra: nvswitch": "RTX4090, gpus: 2, intra: pcie4"})],
            "describe the GPU kind 'RTX4090' differently",
        ),
        ([cluster(RICH), cluster(PLAIN + "stack: torchtitan\n")], "have megatron-core in rich, torchtitan in plain"),
        (
            [sites("a", {"a": "paris", "b": "oslo"}, "1 GB/s"), sites("b", {"c": "paris", "d": "oslo"}, "2 GB/s")],
            "different wan links between 'paris' and 'oslo'",
        ),
        (
            [sites("a", {"a": "paris"}, ""), sites("b", {"b": "oslo"}, "")],
            "have the site 'paris' and the site 'oslo', and no wan link between them",
        ),
        ([cluster(PLAIN), sites("b", {"b": "oslo"}, "")], "have nodes without a site and the site 'oslo'"),
        (
            [
                cluster(RICH),
                cluster(
                    RICH,
                    **{"name: n,": "name: m,", "n-0/": "m-0/", "latency: 2 us": "latency: 3 us"},
                ),
            ],
            "different things of the link 'rack:r1>core'",
        ),
    ],
)
def test_what_cannot_be_settled_is_refused(clusters: list[Cluster], told: str) -> None:
    with pytest.raises(InputError, match=told.replace("(", r"\(")):
        joined("lab", clusters)


def test_the_command_tells_what_it_settled(motley: Motley, world: World) -> None:
    files = [world.write(f"{name}.yaml", text) for name, text in (("rich", RICH), ("plain", PLAIN))]
    ran = motley("discover", *files, "--name", "lab", "--out", world.folder / "lab.yaml")
    assert ran.code == 0, ran.err
    assert "note: stack is megatron-core in rich alone" in ran.out
    assert parse_cluster((world.folder / "lab.yaml").read_text(), "lab.yaml").fabric.oversubscription == 4
