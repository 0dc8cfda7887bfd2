"""Cluster files that are written: what is read back is equal, and what is new in them is checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.spec.cluster import (
    Calibration,
    Cluster,
    Intra,
    LinkOverride,
    Nic,
    Node,
    WideAreaLink,
    cluster_yaml,
    link_names,
    read_cluster,
)
from sim.spec.gpu import gpu_kind
from sim.spec.reading import InputError

EXAMPLES = sorted(
    path for folder in ("clusters", "testbeds") for path in (Path(__file__).parents[3] / "examples" / folder).glob("*.yaml")
)
HEAD = """name: two
nodes:
  - {name: a, count: 2, gpu: A100-80GB-SXM, gpus: 2, intra: nvlink, nic: {kind: ethernet, bandwidth: 10 Gbit/s}}
"""


def read_back(cluster: Cluster, folder: Path) -> Cluster:
    path = folder / "written.yaml"
    path.write_text(cluster_yaml(cluster), encoding="utf-8")
    return read_cluster(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_read_back_equal(path: Path, tmp_path: Path) -> None:
    cluster = read_cluster(path)
    assert read_back(cluster, tmp_path) == cluster


def test_links_between_sites_whose_names_mean_something_in_yaml_are_read_back(tmp_path: Path) -> None:
    nic = Nic("ethernet", 1e9)
    nodes = tuple(
        Node(f"n{i}", gpu_kind("T4"), 1, Intra("pcie3", 1e10, host_bandwidth_bytes_per_s=1e10), nic, site)
        for i, site in enumerate(("a b", ": c #"))
    )
    wan = (WideAreaLink(("a b", ": c #"), 1e8, 1e-3),)
    cluster = Cluster("far", nodes, wan=wan, link_overrides=(LinkOverride("site:a b>site:: c #", 1e9 / 7),))
    assert read_back(cluster, tmp_path) == cluster


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_calibrated_constants_are_read_back_to_the_last_bit(path: Path, tmp_path: Path) -> None:
    cluster = read_cluster(path)
    kinds = {
        node.gpu: replace(node.gpu, speed=1.1 / 3, efficiency=replace(node.gpu.efficiency, launch_s=1e-5 / 7))
        for node in cluster.nodes
    }
    names = sorted(link_names(cluster))
    calibrated = replace(
        cluster,
        nodes=tuple(replace(node, gpu=kinds[node.gpu], intra=replace(node.intra, latency_s=1e-4 / 3)) for node in cluster.nodes),
        fabric=replace(cluster.fabric, start_s=1e-3 / 7, protocol_efficiency=(("ethernet", 2 / 3),)),
        stack=replace(cluster.stack, name="own", micro_batch_s=1e-3 / 7, overlap_slowdown=0.1),
        device_speeds=((cluster.devices[0].name, 1 / 3),),
        link_overrides=(LinkOverride(names[0], 1e9 / 7), LinkOverride(names[-1], None, 1e-5 / 3)),
        calibration=Calibration(("a: b.json", "c.json"), "paced", 12, 0.1, 0.02, 0.9, -0.03, 0.04, ("fabric.start",)),
    )
    assert read_back(calibrated, tmp_path) == calibrated


def test_alike_nodes_are_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(HEAD)
    assert cluster_yaml(read_cluster(path)).count("- {name: a, count: 2, gpu: A100-80GB-SXM") == 1


def test_what_no_file_can_say_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(HEAD)
    one, other = read_cluster(path).nodes
    faster = replace(other, gpu=replace(other.gpu, speed=2.0))
    with pytest.raises(InputError, match="two kinds have the name 'A100-80GB-SXM'"):
        cluster_yaml(Cluster("two", (one, faster)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: {a-0/7: {speed: 1.1}}", r"devices: 'a-0/7' is not in it"),
        ("devices: {a-0/0: {speed: 0}}", r"devices\.a-0/0\.speed: "),
        ("devices: {a-0/0: {sped: 1}}", r"sped"),
        ("links: {a-0/nic0>fabric: {bandwidth: 10}}", r"links\.a-0/nic0>fabric\.bandwidth: got 10 without a unit"),
        ("calibration: {fitted_on: [a], origin: simulated}", r"calibration"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(HEAD + text + "\n")
    with pytest.raises(InputError, match=message) as error:
        read_cluster(path)
    assert "\n" not in str(error.value)
