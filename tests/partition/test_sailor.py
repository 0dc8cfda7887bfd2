"""Sailor's dynamic programming against brute force, its choice of degrees, and the plans that come of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from partition import plan
from partition.drafts import Settings, make_plan, stage
from partition.planners.sailor import Part, Task, _Sailor, allocate, held_bytes
from partition.room import Room
from partition.search import Search
from sim.cost.feasibility import infeasible
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Fabric, WideAreaLink
from sim.spec.plan import Pipeline, Plan
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node


def divisions(data: int, pools: int) -> Iterator[tuple[int, ...]]:
    return (counts for counts in product(range(data + 1), repeat=pools) if sum(counts) == data)


def best_of_all(task: Task) -> float:
    """The measure of the best of all configurations, one by one."""
    depth, pools = len(task.seconds), len(task.capacity)
    best = math.inf
    for chosen in product(list(divisions(task.data, pools)), repeat=depth):
        gpus = [sum(chosen[s][k] * task.degrees[s][k] for s in range(depth)) for k in range(pools)]
        if any(used > have for used, have in zip(gpus, task.capacity, strict=True)):
            continue
        stages = [max(task.seconds[s][k] for k in range(pools) if chosen[s][k]) for s in range(depth)]
        exchange = max(task.exchange_s[s][k] for s in range(depth) for k in range(pools) if chosen[s][k])
        seconds = sum(stages) + (task.micro_batches - 1) * max(stages) + exchange
        rent = sum(used * price for used, price in zip(gpus, task.rent, strict=True)) if task.rent else 1.0
        best = min(best, seconds * rent)
    return best


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_the_dynamic_programming_finds_what_brute_force_finds(objective: str) -> None:
    rng = np.random.default_rng(3)
    feasible = 0
    for _ in range(150):
        depth, pools, data = int(rng.integers(1, 5)), int(rng.integers(1, 3)), int(rng.integers(1, 4))
        seconds = rng.uniform(1, 4, (depth, pools))
        seconds[rng.random((depth, pools)) < 0.15] = math.inf
        task = Task(
            data=data,
            micro_batches=int(rng.integers(1, 9)),
            capacity=tuple(int(n) for n in rng.integers(2, 10, pools)),
            seconds=seconds.tolist(),
            exchange_s=rng.uniform(0, 6, (depth, pools)).tolist(),
            degrees=rng.choice([1, 2], (depth, pools)).tolist(),
            rent=tuple(rng.uniform(1, 5, pools)) if objective == "cost" else (),
        )
        answer, best = allocate(task), best_of_all(task)
        feasible += math.isfinite(best)
        assert (answer[0] if answer else math.inf) == pytest.approx(best)
    assert feasible > 60


def test_many_replicas_of_kinds_that_are_equally_ordered_everywhere_are_divided_best_too() -> None:
    """More ways than are all tried; a stage that takes its slowest kinds first leaves the most to the others."""
    rng = np.random.default_rng(8)
    for _ in range(12):
        seconds = np.sort(rng.uniform(1, 4, (2, 3)), axis=1)
        task = Task(
            data=5,
            micro_batches=int(rng.integers(2, 9)),
            capacity=tuple(int(n) for n in rng.integers(2, 9, 3)),
            seconds=seconds.tolist(),
            exchange_s=np.zeros((2, 3)).tolist(),
            degrees=np.ones((2, 3), dtype=int).tolist(),
        )
        answer, best = allocate(task), best_of_all(task)
        assert (answer[0] if answer else math.inf) == pytest.approx(best)


def test_the_answer_lies_below_the_bound_or_there_is_none() -> None:
    """Two stages of 2 s, three micro-batches: 4 + 2 x 2 = 8 s."""
    task = Task(1, 3, (2,), [[2.0], [2.0]], [[0.0], [0.0]], [[1], [1]])
    assert allocate(task) == (8.0, ((1,), (1,)))
    assert allocate(task, 8.5) == (8.0, ((1,), (1,)))
    assert allocate(task, 7.5) is None


def test_the_cheapest_configuration_is_not_the_fastest() -> None:
    """The fast GPU takes half as long and costs three times as much."""
    fastest = Task(1, 4, (1, 1), [[1.0, 2.0]], [[0.0, 0.0]], [[1, 1]])
    assert allocate(fastest) == (4.0, ((1, 0),))
    assert allocate(replace(fastest, rent=(3.0, 1.0))) == (8.0, ((0, 1),))


def test_stages_go_through_the_sites_in_order_and_pay_for_the_way() -> None:
    """Pool 0 is of site a, pool 1 of site b. The middle stage would be faster at b, but there is no way back to a."""
    seconds = [[1.0, 9.0], [3.0, 1.0], [1.0, 9.0]]
    task = Task(1, 1, (3, 3), seconds, [[0.0, 0.0]] * 3, [[1, 1]] * 3, ("a", "b"), ("a", "b"), 0.25)
    assert allocate(task) == (5.0, ((1, 0), (1, 0), (1, 0)))
    forth = [[1.0, 9.0], [3.0, 1.0], [9.0, 1.0]]
    there = Task(1, 1, (3, 3), forth, [[0.0, 0.0]] * 3, [[1, 1]] * 3, ("a", "b"), ("a", "b"), 0.25)
    assert allocate(there) == (3.5, ((1, 0), (0, 1), (0, 1)))


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("ends", [(True, False), (False, False), (False, True), (True, True)])
def test_bytes_of_many_holders_follow_from_those_of_few(zero_stage: int, ends: tuple[bool, bool]) -> None:
    room, settings = Room(mixed(), job(SMALL)), Settings(zero_stage=zero_stage)
    for holders in (1, 3, 7, 12):
        counted = room.stage(holders, 2, 2, settings, *ends)
        told = held_bytes(room, holders, 2, 2, settings, *ends)
        assert told.total(3, (2, 1, 0, 2)) == pytest.approx(counted.total(3, (2, 1, 0, 2)), abs=100)


def found(world: Cluster, batch: int = 16, objective: str = "throughput") -> Plan:
    result = plan(world, job(SMALL, 2048, batch), "sailor", budget_s=600, objective=objective)
    assert result.plan is not None
    return result.plan


@pytest.mark.parametrize("batch", [16, 21])
def test_a_plan_has_one_depth_one_cut_and_one_micro_batch_and_divides_the_batch_evenly(batch: int) -> None:
    best = found(mixed(), batch)
    assert len({(p.micro_batch, len(p.stages)) for p in best.pipelines}) == 1
    assert len({tuple((stage.layers, stage.recompute) for stage in p.stages) for p in best.pipelines}) == 1
    counts = [p.micro_batches for p in best.pipelines]
    assert max(counts) - min(counts) <= 1
    sizes = [stage.layer_count for stage in best.pipelines[0].stages]
    assert max(sizes) - min(sizes) <= 1


def test_a_group_is_of_one_node_and_replicas_of_a_kind_have_one_degree_at_a_stage() -> None:
    world = mixed()
    best = found(world)
    for s in range(len(best.pipelines[0].stages)):
        degrees: dict[str, set[int]] = {}
        for p in best.pipelines:
            (replica,) = p.stages[s].replicas
            assert len({name.rpartition("/")[0] for name in replica.devices}) == 1
            degrees.setdefault(world.device(replica.devices[0]).gpu.name, set()).add(len(replica.devices))
        assert all(len(found) == 1 for found in degrees.values())


def test_equal_gpus_far_apart_train_on_one_site_or_meet_once() -> None:
    """Two nodes of two sites with a slow line between them: no gradients cross it."""
    world = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 4))
    near, far = world.nodes
    apart = Cluster(
        "apart",
        tuple(type(n)(n.name, n.gpu, n.gpus, n.intra, n.nic, site) for n, site in ((near, "here"), (far, "there"))),
        Fabric(50e-6),
        (WideAreaLink(("here", "there"), 12.5e6, 0.02),),
    )
    best = found(apart)
    for s in range(len(best.pipelines[0].stages)):
        assert len({p.stages[s].devices[0].split("/")[0] for p in best.pipelines}) == 1


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", ["slow", "fast"])
def test_the_least_degree_is_the_least_with_which_the_whole_model_fits(name: str, mode: str) -> None:
    """Two GPUs of 12 GB hold the model, or one of 24 GB."""
    world, work = mixed(), job(SMALL, 2048, 8)
    search = Search(world, work, simulation(world, work))
    planner = _Sailor(search, world.nodes)
    k = [pool.node.name for pool in planner.pools].index(name)
    fitting = []
    for degree in (1, 2, 4):
        stages = (stage([f"{name}/{i}" for i in range(degree)], (0, SMALL.layers), 2, mode),)
        draft = (Pipeline(2, 4, stages),)
        if infeasible(make_plan(world, work, draft, Settings(sequence_parallel=True)), world) is None:
            fitting.append(degree)
    assert planner._least(k, Part(SMALL.layers, True, True), 1, 1, 2, mode) == min(fitting, default=0)


def test_a_single_gpu_is_one_stage_of_all_layers() -> None:
    result = plan(cluster(node("a", "A100-40GB-SXM", 1, "nvlink")), job(TINY), "sailor", budget_s=600)
    assert result.plan is not None
    assert [stage.layers for stage in result.plan.pipelines[0].stages] == [((0, TINY.layers),)]
