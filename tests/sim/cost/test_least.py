"""What an iteration takes at least: never more than its estimate, and all of it where nothing is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from sim.cost.estimate import Estimate
from sim.cost.least import least_s
from sim.cost.network import Network
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node
from sim.spec.gpu import gpu_kind
from sim.spec.plan import Plan
from sim.spec.stack import Stack
from sim.spec.transformer import Transformer
from tests.strategies import stacks, worlds
from tests.worlds import plan, stage

DEEP = Transformer("deep", layers=16, hidden=1024, ffn=4096, heads=16, vocab=32_000, kv_heads=16)


@given(world=worlds(), software=stacks())
def test_no_estimate_is_below_it(world: tuple[Cluster, Plan], software: Stack) -> None:
    cluster, plan = replace(world[0], stack=software), world[1]
    assert least_s(plan, Network(cluster)) <= Estimate(plan, cluster).iteration_s() * (1 + 1e-9)


def fast_cluster(nodes: int) -> Cluster:
    """Nodes of two GPUs between which messages take next to nothing."""
    node = Node("n", gpu_kind("A100-80GB-SXM"), 2, Intra("nvlink", 300e9), Nic("infiniband", 1e15))
    return Cluster("fast", tuple(replace(node, name=f"n{i}") for i in range(nodes)), Fabric(latency_s=0.0))


def test_it_is_the_estimate_of_one_stage() -> None:
    alone = plan([[stage("n0/0", (0, 16))]], 6, model=DEEP, sequence_length=1024)
    cluster = fast_cluster(1)
    assert least_s(alone, Network(cluster)) == pytest.approx(Estimate(alone, cluster).iteration_s(), rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_fill_and_drain_count_in_pipelines(schedule: str, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    size = 16 // (4 * chunks)
    stages = [
        stage(f"n{s}/0", *((chunk * 4 * size + s * size, chunk * 4 * size + (s + 1) * size) for chunk in range(chunks)))
        for s in range(4)
    ]
    cluster = fast_cluster(4)
    piped = plan([stages], micro_batches, model=DEEP, sequence_length=1024, schedule=schedule)
    # The head's stage is slower than the others, so that nearly all of the bubble is before it and after it.
    assert least_s(piped, Network(cluster)) == pytest.approx(Estimate(piped, cluster).iteration_s(), rel=0.03)
