"""The exhaustive planner: its answer is that of judging every plan, its bounds are bounds, and it refuses what is too large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from partition import plan
from partition.drafts import Settings, make_plan, stage
from partition.planners.exhaustive import Bounds, Family, Space, best_plans, cuts
from partition.search import PLANNERS, Search
from sim.cost.estimate import estimation
from sim.cost.feasibility import infeasible
from sim.simulation import simulation
from sim.spec.cluster import BandwidthMatrix, Cluster
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.judge import Cost, Verdict
from sim.spec.plan import Pipeline, Plan
from sim.spec.reading import InputError
from sim.spec.stack import stack
from tests.partition.small_worlds import TINY, cluster, job, mixed, node

WIDE = replace(TINY, name="wide", layers=2, hidden=2048, ffn=5632, heads=16)
TIGHT = replace(gpu_kind("RTX3090"), name="tight", memory_bytes=int(3.1 * 2**30))


def layers(model: int, batch: int = 3) -> Job:
    return job(replace(WIDE, layers=model), 1024, batch)


WORLDS: dict[str, tuple[Cluster, Job]] = {
    "two alike and another": (cluster(node("a", "RTX4090", 2), node("b", "RTX3090", 1)), layers(2)),
    "two nodes": (cluster(node("a", "A100-40GB-SXM", 1, "nvlink"), node("b", "RTX3090", 1)), layers(4, 4)),
    "little memory": (cluster(replace(node("a", "RTX3090", 2), gpu=TIGHT), node("b", "RTX4090", 1)), layers(2)),
    "tied embeddings": (
        cluster(node("a", "RTX4090", 2), node("b", "RTX3090", 1)),
        job(replace(TINY, name="tied", layers=2, tied_embeddings=True), 1024, 2),
    ),
}


def search(on: Cluster, work: Job) -> Search:
    return Search(on, work, estimation(on, work), budget_s=600)


def space(on: Cluster, work: Job) -> Space:
    return Space(search(on, work), [device.name for device in on.devices])


# --- Without pruning, symmetry or bounds ------------------------------------------------------------------------------


def pipelines_on(names: Sequence[str], work: Job, sequences: int) -> Iterator[Pipeline]:
    """All pipelines over exactly these GPUs that take so many sequences."""
    for order in permutations(names):
        for degrees in product(range(1, len(order) + 1), repeat=len(order)):
            for depth in range(1, len(order) + 1):
                if sum(degrees[:depth]) == len(order) and degrees[depth:] == (1,) * (len(order) - depth):
                    yield from _cut(order, degrees[:depth], work, sequences)


def _cut(order: Sequence[str], degrees: Sequence[int], work: Job, sequences: int) -> Iterator[Pipeline]:
    bounds = np.cumsum([0, *degrees])
    groups = [order[a:b] for a, b in pairwise(bounds)]
    if any(len({name.split("/")[0] for name in group}) > 1 or list(group) != sorted(group) for group in groups):
        return
    if any(work.model.heads % len(group) for group in groups):
        return
    depth = len(groups)
    for counts in product(range(work.model.layers + 1), repeat=depth):
        if sum(counts) != work.model.layers or 0 in counts[1:-1]:
            continue
        at = np.cumsum([0, *counts]).tolist()
        for size, modes in product((1, 2), product(("none", "full"), repeat=depth)):
            if sequences % size or any(mode == "full" and n == 0 for mode, n in zip(modes, counts, strict=True)):
                continue
            stages = tuple(stage(groups[s], (at[s], at[s + 1]), size, modes[s]) for s in range(depth))
            yield Pipeline(size, sequences // size, stages)


def groupings(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """All sets of disjoint parts of some names."""
    if not names:
        yield []
        return
    for others in groupings(names[1:]):
        yield others
        yield [[names[0]], *others]
        for i, other in enumerate(others):
            yield [*others[:i], [names[0], *other], *others[i + 1 :]]


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    return (split for split in product(range(1, total + 1), repeat=parts) if sum(split) == total)


@cache
def naive(world: str) -> dict[object, float]:
    """The estimate of every plan that can run, by what is left of it when equal GPUs are exchanged and pipelines reordered."""
    on, work = WORLDS[world]
    judge, names = estimation(on, work), [device.name for device in on.devices]
    alike = [[f"{each.name}/{i}" for i in range(each.gpus)] for each in on.nodes]
    renamings = [
        dict(zip(names, [name for group in order for name in group], strict=True)) for order in product(*map(permutations, alike))
    ]
    found: dict[object, float] = {}
    for grouping in groupings(names):
        for split in splits(work.global_batch, len(grouping)) if grouping else ():
            for draft in product(*(pipelines_on(part, work, n) for part, n in zip(grouping, split, strict=True))):
                several = any(len(stage.devices) > 1 for pipeline in draft for stage in pipeline.stages)
                for parallel in (False, True) if several else (False,):
                    key = (min(_form(draft, renaming) for renaming in renamings), parallel)
                    if key not in found:
                        verdict = judge(make_plan(on, work, draft, Settings(sequence_parallel=parallel)))
                        found[key] = verdict.iteration_s if isinstance(verdict, Cost) else float("inf")
    return found


def _form(draft: Sequence[Pipeline], renaming: dict[str, str]) -> tuple[object, ...]:
    def held(pipeline: Pipeline) -> tuple[object, ...]:
        return tuple((tuple(sorted(renaming[n] for n in part.devices)), part.layers, part.recompute) for part in pipeline.stages)

    return tuple(sorted((pipeline.micro_batch, pipeline.micro_batches, held(pipeline)) for pipeline in draft))


@pytest.mark.parametrize("world", WORLDS)
def test_the_ten_best_are_those_of_judging_every_plan(world: str) -> None:
    estimates = sorted(naive(world).values())
    best = best_plans(search(*WORLDS[world]), space(*WORLDS[world]))
    assert len(estimates) > 90
    assert [seconds for seconds, _ in best] == pytest.approx(estimates[:10], rel=1e-9)


@pytest.mark.parametrize("world", WORLDS)
def test_plans_that_differ_by_equal_gpus_or_the_order_of_pipelines_are_counted_once(world: str) -> None:
    assert space(*WORLDS[world]).size() == len(naive(world))


# --- Bounds ----------------------------------------------------------------------------------------------------------


def picks(family: Family, model: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The recomputation and cut of each pipeline of all plans of a family, of stages without layers without recomputation."""
    each = []
    for line in family.lines:
        held = list(enumerate(cuts(model, len(line))))
        modes = range(2 ** len(line))
        each.append([(m, c) for m in modes for c, cut in held if not any(n == 0 and m >> s & 1 for s, n in enumerate(cut))])
    return product(*each)


def check_bound(bounds: Bounds, family: Family, pick: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The bound and the estimate of a plan, where it can run; says that the bounds are in order and what fits is known."""
    plan = bounds.space.plan(family, pick)
    bound_s = max(float(times[at]) for times, at in zip(bounds.of(family), pick, strict=True))
    verdict = estimation(bounds.cluster, bounds.job)(plan)
    assert (bound_s < float("inf")) == isinstance(verdict, Cost) == (infeasible(plan, bounds.cluster) is None)
    if not isinstance(verdict, Cost):
        return 0.0, 0.0
    assert bounds.floor_s(family) <= bound_s <= verdict.iteration_s
    return bound_s, verdict.iteration_s


@pytest.mark.parametrize("world", ["little memory", "tied embeddings"])
def test_no_plan_is_faster_than_its_bound_and_infinite_ones_do_not_fit(world: str) -> None:
    bounds, fits = Bounds(space(*WORLDS[world])), 0
    for family in list(bounds.space.families())[::3]:
        fits += sum(check_bound(bounds, family, pick)[1] > 0 for pick in picks(family, bounds.layers))
    assert fits > 30


LARGER: dict[str, tuple[Cluster, Job]] = {
    "nvlink and ethernet": (
        cluster(node("a", "A100-40GB-SXM", 2, "nvlink"), node("b", "RTX3080Ti", 3), node("c", "RTX4090", 1)),
        job(replace(WIDE, layers=6), 2048, 8),
    ),
    "buckets of several layers": (
        cluster(node("a", "RTX4090", 2), node("b", "RTX3090", 3)),
        job(replace(TINY, layers=7), 512, 8),
    ),
    "another stack": (
        replace(cluster(node("a", "RTX4090", 3), node("b", "A100-40GB-SXM", 3, "nvlink")), stack=stack("megatron-core")),
        job(replace(WIDE, layers=5), 512, 6),
    ),
}


@pytest.mark.parametrize("world", LARGER)
def test_no_plan_of_a_larger_space_is_faster_than_its_bound(world: str) -> None:
    bounds, rng, tight = Bounds(space(*LARGER[world])), np.random.default_rng(0), 0
    families = list(bounds.space.families())
    for i in rng.choice(len(families), 60, replace=False):
        each = [(2 ** len(line), len(cuts(bounds.layers, len(line)))) for line in families[i].lines]
        pick = []
        for (modes, held), line in zip(each, families[i].lines, strict=True):
            cut = int(rng.integers(held))
            empty = sum(1 << s for s, n in enumerate(cuts(bounds.layers, len(line))[cut]) if n == 0)
            pick.append((int(rng.integers(modes)) & ~empty, cut))
        bound_s, estimate_s = check_bound(bounds, families[i], pick)
        tight += bound_s > 0.8 * estimate_s
    assert tight > 30


def test_the_bound_of_two_stages_is_their_estimate() -> None:
    # Messages there and messages back take different links, so that nothing is shared.
    bounds, seen = Bounds(space(*WORLDS["two nodes"])), 0
    for family in bounds.space.families():
        if [len(line) for line in family.lines] == [2]:
            for pick in picks(family, bounds.layers):
                bound_s, estimate_s = check_bound(bounds, family, pick)
                assert bound_s == pytest.approx(estimate_s, rel=2e-9)
                seen += 1
    assert seen > 50


# --- The planner -----------------------------------------------------------------------------------------------------


def in_space(plan: Plan) -> bool:
    """Whether a plan is one of those that the exhaustive planner tries."""
    return (plan.schedule, plan.zero_stage) == ("1f1b", 1) and all(
        pipeline.micro_batch <= 2
        and all(part.recompute in ("none", "full") and part.recompute_layers is None for part in pipeline.stages)
        for pipeline in plan.pipelines
    )


SMALL_INSTANCES: list[tuple[Cluster, Job]] = [
    (cluster(node("a", "RTX4090", 2), node("b", "RTX3090", 2)), job(replace(WIDE, layers=4), 2048, 8)),
    (cluster(node("a", "A100-40GB-SXM", 2, "nvlink"), node("b", "RTX3080Ti", 1)), job(replace(WIDE, layers=6), 2048, 8)),
    (cluster(node("a", "V100-16GB-SXM", 3, "nvlink"), node("b", "T4", 2)), job(replace(TINY, layers=5), 1024, 8, "fp16")),
    (
        # Messages keep their stages there, of which the bounds know little: so they spare it few plans.
        replace(cluster(node("a", "RTX4090", 2), node("b", "RTX3090", 2)), stack=replace(stack("nanotron"), message_nodes=2)),
        job(replace(WIDE, layers=3), 512, 4),
    ),
]


@pytest.mark.parametrize("instance", range(len(SMALL_INSTANCES)))
def test_no_other_planner_has_a_better_plan_of_the_space(instance: int) -> None:
    on, work = SMALL_INSTANCES[instance]
    judge, seen = estimation(on, work), []

    def recording(plan: Plan) -> Verdict:
        verdict = judge(plan)
        if isinstance(verdict, Cost) and in_space(plan):
            seen.append(verdict.iteration_s)
        return verdict

    for name in ("megatron", "flashflex", "random"):
        plan(on, work, name, judge=recording, budget_s=600)
    best = plan(on, work, "exhaustive", judge=judge, budget_s=600)
    assert best.cost is not None and best.stopped == "finished"
    assert len(seen) > 10
    assert best.cost.iteration_s <= min(seen) * (1 + 1e-9)


def test_a_job_of_fewer_layers_than_gpus_has_its_optimum() -> None:
    on, work = cluster(node("a", "A10G", 4)), job(replace(TINY, name="shallow", layers=1), batch=8)
    found = plan(on, work, "exhaustive", budget_s=60)
    assert found.cost is not None and found.plan is not None
    assert found.cost.iteration_s <= min(cost.iteration_s for _, cost in plan(on, work, "megatron", budget_s=60).front)


def test_the_ten_best_by_estimate_are_judged_again() -> None:
    on, work = SMALL_INSTANCES[0]
    seen: list[Plan] = []
    judge = simulation(on, work)

    def recording(plan: Plan) -> Verdict:
        seen.append(plan)
        return judge(plan)

    result = plan(on, work, "exhaustive", judge=recording, budget_s=600)
    best = [plan for _, plan in best_plans(search(on, work), space(on, work))]
    assert set(best) <= set(seen) and result.judged == len(seen) <= len(best) + 1
    assert result.plan in best


def test_gpus_that_the_network_tells_apart_are_not_exchanged() -> None:
    on, work = cluster(node("a", "RTX4090", 2)), layers(2)
    rows = ((0.0, 1e9), (2e9, 0.0))
    measured = replace(on, bandwidth_matrix=BandwidthMatrix(("a/0", "a/1"), rows))
    assert [len(sort) for sort in space(on, work).sorts] == [2]
    assert [len(sort) for sort in space(measured, work).sorts] == [1, 1]
    assert space(on, work).size() < space(measured, work).size()


def test_instances_that_are_too_large_are_refused() -> None:
    with pytest.raises(InputError, match="exhaustive tries every plan on at most 6 GPUs, but world has 8"):
        plan(mixed(), job(), "exhaustive")
    six = cluster(*(node(f"n{i}", "RTX4090", 1) for i in range(6)))
    with pytest.raises(InputError, match=r"exhaustive tries at most 4,000,000,000 plans, but .* on 6 GPUs has more"):
        plan(six, job(replace(TINY, layers=24)), "exhaustive")


def test_a_search_that_is_cut_has_an_answer() -> None:
    on, work = SMALL_INSTANCES[0]
    judge = estimation(on, work)
    clock: list[Plan] = []

    def once(plan: Plan) -> Verdict:
        if clock:
            raise KeyboardInterrupt
        clock.append(plan)
        return judge(plan)

    result = plan(on, work, "exhaustive", judge=once, budget_s=600)
    assert result.stopped == "interrupted" and result.plan == clock[0]
    assert "exhaustive" in PLANNERS
