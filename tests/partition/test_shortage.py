"""The least hungry plan, what it lacks, and what is said to make it fit."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import pytest

import partition
from partition.drafts import Settings, make_plan, stage
from partition.shortage import _hungry_least, least_hungry, shortage
from sim.cost.feasibility import infeasible
from sim.spec.cluster import Cluster
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.judge import Infeasible
from sim.spec.plan import Pipeline, tensor_groups
from sim.spec.transformer import transformer
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node

LARGE = replace(SMALL, name="large", layers=10, hidden=4096, ffn=11008, heads=32)
"""About 2.3 billion parameters, 10 layers: 41 GB of state."""


def with_memory(kind_gib: dict[str, float]) -> Cluster:
    """Nodes of one GPU each, of so many GiB."""
    nodes = []
    for name, gib in kind_gib.items():
        made = node(name, "RTX4090", 1)
        nodes.append(replace(made, gpu=replace(gpu_kind("RTX4090"), memory_bytes=int(gib * 2**30))))
    return cluster(*nodes)


def lacking(reason: Infeasible | None) -> int:
    assert reason is not None and reason.need_bytes is not None and reason.have_bytes is not None
    return reason.need_bytes - reason.have_bytes


@pytest.mark.parametrize("gib", [{"a": 12, "b": 12, "c": 12}, {"a": 4, "b": 16, "c": 10}, {"a": 20, "b": 1.5, "c": 2}])
def test_no_cut_and_no_order_of_one_pipeline_lacks_fewer_bytes(gib: dict[str, float]) -> None:
    on, work = with_memory(gib), job(LARGE)
    found = least_hungry(on, work)
    assert found is not None
    names = [device.name for device in on.devices]
    fewest = None
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        for first, second in combinations(range(1, LARGE.layers), 2):
            cuts = ((0, first), (first, second), (second, LARGE.layers))
            stages = tuple(stage([names[i]], cut, 1, "full") for i, cut in zip(order, cuts, strict=True))
            reason = infeasible(make_plan(on, work, (Pipeline(1, work.global_batch, stages),), Settings()), on)
            assert reason is not None
            fewest = lacking(reason) if fewest is None else min(fewest, lacking(reason))
    assert fewest is not None
    # The order of its stages is a rule of thumb: a layer less or more on one of them is as near as it need be.
    assert lacking(found[1]) <= fewest * 1.02


def test_a_job_that_fits_lacks_nothing_and_that_is_told_a_planner_that_found_no_plan() -> None:
    found = least_hungry(mixed(), job(SMALL))
    assert found is not None and found[1] is None and infeasible(found[0], mixed()) is None
    near = Infeasible("slow/0", "memory", 9, 8, "slow/0 needs a byte")
    told = shortage(mixed(), job(SMALL), near)
    assert told is not None and (told.device, told.need_bytes) == ("slow/0", 9)
    assert "slow/0 needs a byte; yet a plan of" in told.message and "another planner may find one" in told.message


def test_what_a_search_found_to_lack_less_is_what_is_told() -> None:
    near = Infeasible("slow/0", "memory", 9, 8, "slow/0 needs a byte")
    told = shortage(mixed(), job(transformer("llama-2-13b"), 4096), near)
    assert told is not None and told.message.startswith("slow/0 needs a byte; it would fit with 2 times the GPUs (16)")


def test_where_no_gpu_has_the_precision_memory_is_not_the_reason() -> None:
    on = cluster(node("a", "V100-16GB-SXM", 2, "nvlink"))
    assert least_hungry(on, job()) is None and shortage(on, job()) is None


def more(on: Cluster, times: int) -> Cluster:
    nodes = [replace(n, name=f"{n.name}x{i}") for i in range(times) for n in on.nodes]
    return replace(on, nodes=tuple(nodes))


def test_the_missing_bytes_are_told_and_what_is_said_to_make_it_fit_does() -> None:
    on, work = mixed(), job(transformer("llama-2-13b"), 4096)
    reason = shortage(on, work)
    assert reason is not None and reason.reason == "memory" and reason.device is not None
    assert reason.have_bytes == on.device(reason.device).gpu.memory_bytes
    missing = lacking(reason) / 2**30
    assert f"{missing:,.1f} GiB are missing there under the least hungry plan" in reason.message
    times = re.search(r"it would fit with (\d+) times the GPUs \((\d+)\)", reason.message)
    assert times is not None and int(times[2]) == int(times[1]) * len(on.devices)
    enough = least_hungry(more(on, int(times[1])), work)
    assert enough is not None and enough[1] is None
    assert "offload_optimizer" in reason.message
    offloaded = least_hungry(on, work, offload=True)
    assert offloaded is not None and offloaded[1] is None and offloaded[0].offload_optimizer


def test_shorter_sequences_are_named_where_activations_are_what_lacks() -> None:
    on = cluster(node("a", "RTX4090", 1))
    work = Job(replace(SMALL, name="long", layers=4), 131072, 1, "bf16")
    reason = shortage(on, work)
    assert reason is not None
    shorter = re.search(r"sequences of (\d+) tokens", reason.message)
    assert shorter is not None
    found = least_hungry(on, replace(work, sequence_length=int(shorter[1])))
    assert found is not None and found[1] is None
    # Of the halves, the longest that fits.
    found = least_hungry(on, replace(work, sequence_length=2 * int(shorter[1])))
    assert found is not None and found[1] is not None


def test_what_nothing_makes_fit_is_told() -> None:
    # A layer of 2.4 billion parameters, of which one GPU holds an eighth at best.
    wide = replace(SMALL, name="wide", layers=2, hidden=16384, ffn=65536, heads=128, kv_heads=1)
    on = cluster(node("a", "RTX3080Ti", 1))
    reason = shortage(on, job(wide))
    assert reason is not None
    assert "neither 64 times the nodes, nor offloading the optimizer, nor shorter sequences would make it fit" in reason.message


def test_a_long_sequence_fits_that_goes_over_several_gpus() -> None:
    """Of one head nothing else divides a sequence: whole it needs four times the memory."""
    model = replace(TINY, name="one head", heads=1, kv_heads=1, head_dim=1024)
    world, work = cluster(node("a", "RTX3090", 4, "nvlink")), job(model, sequence_length=131072, batch=1)
    least = least_hungry(world, work)
    assert least is not None and least[1] is None and least[0].context_parallel > 1
    assert all(
        infeasible(make_plan(world, work, draft, settings), world) is not None
        for draft, settings in _hungry_least(world, work)
        if settings.context_parallel == 1
    )
    found = partition.plan(world, work, budget_s=4.0)
    assert found.plan is not None and found.plan.context_parallel > 1


@pytest.mark.parametrize("sizes", [(8, 2), (2, 1), (4, 2), (3, 4, 6)])
def test_context_ranks_are_groups_of_one_degree_inside_nodes(sizes: tuple[int, ...]) -> None:
    world = cluster(*(node(f"n{i}", "RTX4090", gpus) for i, gpus in enumerate(sizes)))
    work = job(LARGE, sequence_length=131072, batch=2)
    ranks = set()
    for draft, settings in _hungry_least(world, work):
        plan = make_plan(world, work, draft, settings)  # which it can be
        ranks.add(plan.context_parallel)
        for _, _, _, replica in plan.replicas():
            for group in tensor_groups(replica.devices, plan.context_parallel):
                assert len({world.device(name).node.name for name in group}) == 1
    assert max(ranks) > 1
