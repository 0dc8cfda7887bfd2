"""Metis: the search space against enumeration, both balances against brute force, and the plans that come of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement, permutations, product

import pytest
from scipy.optimize import linprog

from partition import plan
from partition.drafts import Settings, make_plan
from partition.layers import ranges
from partition.planners.metis import Candidate, _copies, _Metis, device_groups, least_pipeline_s, orders
from partition.search import Search
from sim.cost.feasibility import infeasible
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Nic
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Replica, Stage
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node


@pytest.mark.parametrize("gpus", [1, 7, 8, 12, 16])
def test_device_groups_are_all_powers_of_two_that_sum_to_the_gpus_and_are_half_the_mean_or_more(gpus: int) -> None:
    for stages in range(1, gpus + 1):
        sizes = [size for size in (1, 2, 4, 8, 16) if 2 * size >= gpus // stages]
        expected = [groups for groups in combinations_with_replacement(sizes, stages) if sum(groups) == gpus]
        assert sorted(device_groups(gpus, stages)) == sorted(expected)


def test_few_groups_come_in_every_order_and_many_as_blocks() -> None:
    assert orders((1, 2, 4), 4) == sorted(set(permutations((1, 2, 4))))
    assert orders((2, 2, 2, 2), 1) == [(2, 2, 2, 2)]
    # Eight groups as four blocks: the ones in pairs, their pairs, and the fours are joined. Both eights are alike.
    blocks = [(1, 1, 1, 1), (4, 4), (8,), (8,)]
    expected = {tuple(size for block in order for size in block) for order in permutations(blocks)}
    assert len(expected) == 12
    assert orders((1, 1, 1, 1, 4, 4, 8, 8), 4) == sorted(expected)


@pytest.mark.parametrize("speeds", [[1.0], [3.0, 1.0], [1.0, 5.0, 2.0, 2.0], [0.1, 4.0, 4.0]])
@pytest.mark.parametrize("micro_batches", [1, 2, 20])
def test_no_division_of_the_work_takes_less_than_the_least(speeds: list[float], micro_batches: int) -> None:
    """The linear program, solved by another: stage i takes t_i <= t, the t_i x speed_i sum to the work."""
    n, work = len(speeds), 6.0
    solved = linprog(
        [*[1.0] * n, micro_batches - 1.0],
        A_ub=[[float(i == j) for j in range(n)] + [-1.0] for i in range(n)],
        b_ub=[0.0] * n,
        A_eq=[[*speeds, 0.0]],
        b_eq=[work],
    )
    assert least_pipeline_s(work, micro_batches, speeds) == pytest.approx(solved.fun)


def planner(world: Cluster, work: Job) -> _Metis:
    return _Metis(Search(world, work, simulation(world, work)), world.nodes)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_data_are_divided_as_in_the_split_that_simulates_fastest(size: int) -> None:
    """One stage on a fast and a slow GPU; every split of the micro-batch is simulated."""
    world = cluster(node("fast", "RTX4090", 1), node("slow", "RTX3080Ti", 1))
    work = job(TINY, 512, 4 * size)
    judge, seconds = simulation(world, work), {}
    for n in range(1, size):
        replicas = (Replica(("fast/0",), n), Replica(("slow/0",), size - n))
        draft = (Pipeline(size, 4, (Stage(replicas, ((0, TINY.layers),)),)),)
        verdict = judge(make_plan(world, work, draft, Settings()))
        assert isinstance(verdict, Cost)
        seconds[n] = verdict.iteration_s
    metis = planner(world, work)
    shares = metis.shares(metis._replicas(metis.lines[0], (0, 2), 1), 1, size)
    assert seconds[shares[0]] == min(seconds.values())


@pytest.mark.parametrize("size", [6, 9, 13])
def test_data_of_several_kinds_are_divided_as_evenly_in_time_as_whole_numbers_allow(size: int) -> None:
    world = cluster(node("a", "RTX4090", 2), node("b", "RTX3080Ti", 1), node("c", "T4", 1))
    work = job(TINY, 512, size, "fp16")
    metis = planner(world, work)
    replicas = metis._replicas(metis.lines[0], (0, 4), 1)

    def longest_s(shares: tuple[int, ...]) -> float:
        return max(metis._layer_s(kind, 1, n) for kind, n in zip(replicas, shares, strict=True))

    every = [shares for shares in product(range(1, 9), repeat=4) if sum(shares) == size]
    assert longest_s(tuple(metis.shares(replicas, 1, size))) == min(map(longest_s, every))


@pytest.mark.parametrize(("layers", "size", "binds"), [(12, 2, False), (40, 8, True)])
@pytest.mark.parametrize("groups", [(4, 2, 2), (4, 4)])
def test_layers_are_divided_as_in_the_best_of_all_splits_that_fit(
    groups: tuple[int, ...], layers: int, size: int, binds: bool
) -> None:
    """With 40 layers the split by speed alone does not fit, so that the best one that fits is another."""
    metis = planner(mixed(), job(replace(SMALL, name="deep", layers=layers), 2048, 16))
    metis._try(0, groups, size)
    line, bounds = metis.lines[0], ranges(groups)
    bound = []
    for candidate in metis.found:
        tables = [metis._table(line, bounds, s, degree, size, candidate.mode) for s, degree in enumerate(candidate.degrees)]
        best = free = math.inf
        for split in product(range(1, layers), repeat=len(groups)):
            if sum(split) == layers:
                longest_s = max(table.seconds[n] for table, n in zip(tables, split, strict=True))
                free = min(free, longest_s)
                if all(table.room[n] >= 0 for table, n in zip(tables, split, strict=True)):
                    best = min(best, longest_s)
        assert max(table.seconds[n] for table, n in zip(tables, candidate.layers, strict=True)) == best
        assert all(table.room[n] >= 0 for table, n in zip(tables, candidate.layers, strict=True))
        bound.append(best > free)
    assert bound and any(bound) == binds


def test_the_room_of_a_stage_is_that_of_the_feasibility_check() -> None:
    """Mixed replicas, too: one more layer than there is room for, and the plan does not fit."""
    world, work = mixed(), job(SMALL, 2048, 16)
    metis = planner(world, work)
    seen = set()
    for layers in product(range(1, SMALL.layers), repeat=2):
        if sum(layers) == SMALL.layers:
            candidate = Candidate(0, (4, 4), (1, 2), layers, 8, "none")
            tables = [metis._table(metis.lines[0], ranges((4, 4)), s, degree, 8, "none") for s, degree in enumerate((1, 2))]
            fits = all(table.room[n] >= 0 for table, n in zip(tables, layers, strict=True))
            told = infeasible(make_plan(world, work, metis.draft(candidate), metis.settings), world)
            assert fits == (told is None)
            seen.add(fits)
    assert seen == {True, False}


def test_the_estimate_of_a_pipeline_without_contention_is_nearly_what_is_simulated() -> None:
    world = cluster(node("a", "A100-40GB-SXM", 4, "nvlink"))
    work = job(SMALL, 2048, 16)
    metis = planner(world, work)
    for groups, degrees, layers in (((1, 1, 1, 1), (1, 1, 1, 1), (3, 3, 3, 3)), ((2, 2), (1, 2), (5, 7)), ((4,), (4,), (12,))):
        candidate = Candidate(0, groups, degrees, layers, 2, "none")
        verdict = simulation(world, work)(make_plan(world, work, metis.draft(candidate), metis.settings))
        assert isinstance(verdict, Cost)
        assert metis.estimate_s(candidate) == pytest.approx(verdict.iteration_s, rel=0.1)


def test_stages_divide_into_pipelines_where_all_runs_of_replicas_take_as_much() -> None:
    assert _copies([[2, 2, 2, 2], [4, 4]]) == 2
    assert _copies([[1, 1, 1, 1], [1, 1, 1, 1]]) == 4
    assert _copies([[3, 1, 3, 1], [2, 2, 2, 2]]) == 2
    assert _copies([[3, 1], [2, 2]]) == 1
    assert _copies([[5, 3], [8]]) == 1


@pytest.mark.parametrize("batch", [16, 21])
def test_a_plan_uses_all_gpus_in_stages_of_powers_of_two_and_one_degree_each(batch: int) -> None:
    world = mixed()
    result = plan(world, job(SMALL, 2048, batch), "metis", budget_s=600)
    best = result.plan
    assert best is not None
    assert sorted(best.devices) == sorted(device.name for device in world.devices)
    assert len({(p.micro_batch, p.micro_batches) for p in best.pipelines}) == 1
    assert len({tuple(stage.layers for stage in p.stages) for p in best.pipelines}) == 1
    for s in range(len(best.pipelines[0].stages)):
        replicas = [replica for p in best.pipelines for replica in p.stages[s].replicas]
        assert len({len(replica.devices) for replica in replicas}) == 1
        assert sum(len(replica.devices) for replica in replicas) in (1, 2, 4, 8)
        assert all(len({name.rpartition("/")[0] for name in replica.devices}) == 1 for replica in replicas)


def test_a_stage_of_two_kinds_gives_the_slow_one_less() -> None:
    """A fast network and a small model: all data parallel, and both kinds in the one stage."""
    nic = Nic("infiniband", 50e9)
    world = cluster(
        replace(node("a", "A100-40GB-SXM", 2, "nvlink"), nic=nic), replace(node("v", "V100-16GB-SXM", 2, "nvlink"), nic=nic)
    )
    result = plan(world, job(TINY, 2048, 200, "fp16"), "metis", budget_s=600)
    assert result.plan is not None
    shares: dict[str, set[int]] = {}
    for p in result.plan.pipelines:
        for replica in p.stages[0].replicas:
            shares.setdefault(replica.devices[0].split("/")[0], set()).add(replica.sequences)
    assert len(result.plan.pipelines[0].stages) == 1
    assert min(shares["a"]) > max(shares["v"])
