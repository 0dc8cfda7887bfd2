"""Grids that divide more than states: what they promise of memory, batch and speed, and that `motley` takes the best."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

import partition
from partition.drafts import Draft, Settings, amount_of, make_plan, recomputing, stage
from partition.grids import Grids
from partition.pricing import Pricing
from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.spec.cluster import Cluster, Nic
from sim.spec.job import Job
from sim.spec.plan import Pipeline
from sim.spec.transformer import Moe, Transformer
from tests.partition.small_worlds import SMALL, TINY, cluster, job, node

LARGE = Transformer(name="large", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000)
"""About 6.7 billion parameters: 120 GB with gradients and states."""

NVLINK = cluster(node("a", "A100-40GB-SXM", 8, "nvlink"))
UNLIKE = cluster(
    *(
        replace(node(name, kind, 4, "nvlink"), nic=Nic("infiniband", 100e9))
        for name, kind in (("a", "A100-40GB-SXM"), ("v", "V100-32GB-SXM"))
    )
)


def ranked(world: Cluster, work: Job) -> list[tuple[float, Draft, Settings]]:
    """All grids that fit, the cheapest first."""
    grids = Grids(world, work, world.nodes, Pricing(world, work))
    found = []
    for least_s, grid in grids.priced(lambda: False):
        fitted = grids.fitted(grid)
        if fitted is not None:
            assert fitted[0] >= least_s
            found.append((*fitted, grid.settings))
    return sorted(found, key=lambda entry: entry[0])


@pytest.mark.parametrize(
    ("batch", "numbers"),
    [
        (64, {1, 2, 4, 8, 16, 32}),
        (4096, {16, 32, 64, 128, 256, 512, 1024, 2048}),  # no micro-batch has more than 128 of a pipeline
        (4093, {1}),  # a prime: two pipelines take it at once
        (2 * 2053, {2, 2053}),
    ],
)
def test_a_batch_that_little_divides_is_taken_in_few_large_parts(batch: int, numbers: set[int]) -> None:
    grids = Grids(UNLIKE, work := job(TINY, batch=batch, precision="fp16"), UNLIKE.nodes, Pricing(UNLIKE, work))
    assert {grid.micro_batches for _, grid in grids.priced(lambda: False) if len(grid.pipelines) == 2} == numbers


@pytest.mark.parametrize(
    ("world", "work"),
    [
        (NVLINK, job(LARGE, sequence_length=4096, batch=64)),
        (NVLINK, job(replace(LARGE, name="deep", layers=40), sequence_length=4096, batch=48)),
        (UNLIKE, job(SMALL, sequence_length=2048, batch=48, precision="fp16")),
        (cluster(node("a", "RTX4090", 2), node("b", "RTX4090", 6)), job(TINY, batch=24)),
        (cluster(node("a", "RTX4090", 4)), job(replace(TINY, name="wide", vocab=128256, padded_vocab=128256), batch=32)),
        (NVLINK, job(replace(TINY, name="wide", vocab=128256, padded_vocab=128256), batch=32)),
        (NVLINK, job(replace(TINY, name="mixture", experts=Moe(8, 2, 2816)), batch=64)),
        (NVLINK, job(SMALL, sequence_length=65536, batch=4)),
        (UNLIKE, job(TINY, sequence_length=24576, batch=5, precision="fp16")),
    ],
    ids=[
        "alike",
        "tight",
        "unlike",
        "nodes of two sizes",
        "many words",
        "many words in stages",
        "experts",
        "long",
        "long on unlike",
    ],
)
def test_a_grid_fits_takes_the_batch_and_is_priced_at_best(world: Cluster, work: Job) -> None:
    found = ranked(world, work)
    assert found
    for price_s, draft, settings in [*found[:8], *found[8::7]]:
        plan = make_plan(world, work, draft, settings)
        assert infeasible(plan, world) is None
        assert settings.zero_stage > 1 or settings.expert_parallel > 1 or settings.context_parallel > 1
        assert len({(p.micro_batches, len(p.stages)) for p in draft}) == 1
        assert sum(p.micro_batch * p.micro_batches for p in draft) == work.global_batch
        assert price_s <= simulate(plan, world).iteration_s * (1 + 1e-9)
        for p, pipeline in enumerate(draft):
            for s, part in enumerate(pipeline.stages):
                amount = amount_of(part)
                if amount:  # one layer less has no room
                    less = recomputing(part, amount - 1)
                    stages = (*pipeline.stages[:s], less, *pipeline.stages[s + 1 :])
                    changed = (*draft[:p], replace(pipeline, stages=stages), *draft[p + 1 :])
                    assert infeasible(make_plan(world, work, changed, settings), world) is not None


def test_a_price_is_near_the_simulation_where_links_are_fast() -> None:
    work = job(LARGE, sequence_length=4096, batch=64)
    for price_s, draft, settings in ranked(NVLINK, work)[:4]:
        assert price_s == pytest.approx(simulate(make_plan(NVLINK, work, draft, settings), NVLINK).iteration_s, rel=0.05)


def test_faster_gpus_take_more_of_each_micro_batch() -> None:
    work = job(SMALL, sequence_length=2048, batch=64, precision="fp16")
    _, draft, _ = next(entry for entry in ranked(UNLIKE, work) if len(entry[1]) == 8)
    shares = {pipeline.stages[0].devices[0][0]: pipeline.micro_batch for pipeline in draft}
    assert shares["a"] > shares["v"]


def test_experts_are_divided_among_alike_pipelines() -> None:
    mixture = replace(TINY, name="mixture", experts=Moe(4, 2, 1024))
    world, work = cluster(node("a", "A100-40GB-SXM", 4, "nvlink")), job(mixture, batch=16)
    found = ranked(world, work)
    assert {settings.expert_parallel for _, _, settings in found} > {1, 4}
    for _, draft, settings in found[:4]:
        plan = make_plan(world, work, draft, settings)
        assert plan.expert_parallel == settings.expert_parallel
        assert infeasible(plan, world) is None and simulate(plan, world).iteration_s > 0


def test_tensor_ranks_may_have_whole_experts() -> None:
    mixture = replace(LARGE, name="mixture", layers=8, experts=Moe(8, 2, 2 * LARGE.hidden))
    work = job(mixture, sequence_length=4096, batch=64)
    found = ranked(NVLINK, work)
    whole = [(price_s, draft, settings) for price_s, draft, settings in found if settings.expert_tensor_parallel == 1]
    assert whole
    for price_s, draft, settings in whole[:4]:
        plan = make_plan(NVLINK, work, draft, settings)
        assert infeasible(plan, NVLINK) is None
        # What goes to experts stays in a node, so that the price is what the simulation says, but for exchanges of gradients.
        assert simulate(plan, NVLINK).iteration_s * 0.9 <= price_s <= simulate(plan, NVLINK).iteration_s * (1 + 1e-9)


def test_short_sequences_go_over_one_group_each() -> None:
    found = {settings.context_parallel for _, _, settings in ranked(NVLINK, job(TINY, sequence_length=4096))}
    assert found == {1}
    # 24,576 tokens are six times 4,096, and must come in twice as many equal stretches as there are ranks.
    long = ranked(NVLINK, job(TINY, sequence_length=24576))
    assert {settings.context_parallel for _, _, settings in long} == {1, 2, 4}


@pytest.mark.parametrize("batch", [1, 3])
def test_few_long_sequences_are_divided_as_fast_as_any_grid_by_hand_does(batch: int) -> None:
    """All plans of one stage by hand: pipelines, context and tensor ranks, ZeRO stages, recomputation of all or none."""
    work = job(SMALL, sequence_length=65536, batch=batch)
    names = tuple(f"a/{n}" for n in range(8))
    least_s = {False: math.inf, True: math.inf}
    for tensor, ranks, zero_stage, recompute in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 3), ("none", "full")):
        size = tensor * ranks
        for copies in range(1, min(8 // size, batch) + 1):
            if batch % copies:
                continue
            groups = [names[p * size : (p + 1) * size] for p in range(copies)]
            draft = tuple(Pipeline(1, batch // copies, (stage(group, (0, SMALL.layers), 1, recompute),)) for group in groups)
            settings = Settings(zero_stage=zero_stage, sequence_parallel=tensor > 1, context_parallel=ranks)
            plan = make_plan(NVLINK, work, draft, settings)
            if infeasible(plan, NVLINK) is None:
                least_s[ranks > 1] = min(least_s[ranks > 1], simulate(plan, NVLINK).iteration_s)
    assert least_s[True] < 0.98 * least_s[False]
    found = partition.plan(NVLINK, work, budget_s=6.0)
    assert found.plan is not None and found.cost is not None and found.plan.context_parallel > 1
    assert found.cost.iteration_s <= least_s[True] * (1 + 1e-9)


def test_sequences_are_not_divided_over_a_slow_network() -> None:
    slow = Nic("ethernet", 0.125e9)
    world = cluster(*(replace(node(name, "A100-40GB-SXM", 2, "nvlink"), nic=slow) for name in "ab"))
    found = partition.plan(world, job(SMALL, sequence_length=32768, batch=4), budget_s=6.0)
    assert found.plan is not None
    for _, _, _, replica in found.plan.replicas():
        assert found.plan.context_parallel == 1 or len({name[0] for name in replica.devices}) == 1


def test_motley_shards_where_memory_is_tight_and_links_are_fast() -> None:
    work = job(LARGE, sequence_length=4096, batch=64)
    found = partition.plan(NVLINK, work, budget_s=60.0)  # it ends by itself, well before
    assert found.plan is not None and found.plan.zero_stage >= 2
    assert found.cost is not None
    least_s = min(simulate(make_plan(NVLINK, work, *entry[1:]), NVLINK).iteration_s for entry in ranked(NVLINK, work)[:4])
    assert found.cost.iteration_s == pytest.approx(least_s)
