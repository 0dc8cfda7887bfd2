"""What a comparison sets beside the searches: the best grid on all GPUs, the best grid on one kind alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.comparison import Cell, run_cell
from partition.search import plan
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer

MIXED = """\
name: two-kinds
nodes:
  - {name: new, gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: ethernet, bandwidth: RATE}}
  - {name: old, gpu: RTX2080Ti, gpus: 2, intra: pcie3, nic: {kind: ethernet, bandwidth: RATE}}
"""
JOB = Job(transformer("gpt3-125m"), 512, 8, "fp16")


@pytest.fixture(params=["100 Mbit/s", "100 Gbit/s"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    path = tmp_path / "two-kinds.yaml"
    path.write_text(MIXED.replace("RATE", request.param))
    return read_cluster(path)


def test_single_kind_is_the_best_grid_of_the_kinds_each_on_a_cluster_of_its_own(cluster: Cluster) -> None:
    alone = []
    for node in cluster.nodes:
        result = plan(replace(cluster, nodes=(node,)), JOB, "megatron", budget_s=60.0)
        assert result.cost is not None
        alone.append(result.cost.iteration_s)
    outcome = run_cell(Cell(cluster, JOB, "single-kind", budget_s=60.0))
    assert outcome.cost is not None and outcome.plan is not None
    assert outcome.cost.iteration_s == pytest.approx(min(alone), rel=1e-9)
    assert {name.split("/")[0] for name in outcome.plan.devices} == {"new"}


def test_the_uniform_grid_uses_all_gpus_alike(cluster: Cluster) -> None:
    """So that on a slow network between the nodes it loses to one kind alone."""
    outcome = run_cell(Cell(cluster, JOB, "uniform-grid", budget_s=60.0))
    one_kind = run_cell(Cell(cluster, JOB, "single-kind", budget_s=60.0))
    assert outcome.plan is not None and outcome.cost is not None and one_kind.cost is not None
    assert set(outcome.plan.devices) == {device.name for device in cluster.devices}
    forms = {
        (pipeline.sequences, tuple((len(stage.devices), stage.layer_count) for stage in pipeline.stages))
        for pipeline in outcome.plan.pipelines
    }
    assert len(forms) == 1
    if cluster.nodes[0].nic is not None and cluster.nodes[0].nic.bandwidth_bytes_per_s < 1e9:
        assert outcome.cost.iteration_s > one_kind.cost.iteration_s


def test_where_no_grid_has_all_gpus_the_uniform_one_has_as_many_as_can_be(cluster: Cluster) -> None:
    """Five GPUs divide neither twelve heads nor eight sequences, and there are two layers; three GPUs divide the heads."""
    uneven = replace(cluster, nodes=(cluster.nodes[0], replace(cluster.nodes[1], gpus=3)))
    outcome = run_cell(Cell(uneven, replace(JOB, model=replace(JOB.model, layers=2)), "uniform-grid", budget_s=60.0))
    assert outcome.plan is not None and set(outcome.plan.devices) == {"old/0", "old/1", "old/2"}


def test_a_baseline_without_a_plan_says_what_lacks(cluster: Cluster) -> None:
    outcome = run_cell(Cell(cluster, Job(transformer("llama-2-70b"), 512, 8, "fp16"), "uniform-grid", budget_s=60.0))
    assert outcome.plan is None and outcome.why_not is not None and "GiB" in outcome.why_not
