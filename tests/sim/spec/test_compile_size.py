"""The size of a program before it is compiled: how it is estimated, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan, instruction_estimate
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer
from tests.strategies import worlds

TINY = Transformer("tiny", layers=4, hidden=8, ffn=16, heads=2, vocab=10)


def plan_of(micro_batches: int) -> Plan:
    """Two stages on two GPUs. Each micro-batch has eight instructions: forward, backward, a send and a receive of either."""
    stages = (Stage((Replica(("a/0",), 1),), ((0, 2),)), Stage((Replica(("a/1",), 1),), ((2, 4),)))
    return Plan("c", TINY, 4, micro_batches, (Pipeline(1, micro_batches, stages),))


def test_the_estimate_is_the_number_of_instructions_but_for_the_optimizer() -> None:
    plan = plan_of(5)
    assert instruction_estimate(plan) == 5 * 8 == compile_plan(plan).instruction_count - 2


@given(worlds())
def test_the_estimate_never_leaves_out_what_every_micro_batch_adds(world: tuple[Cluster, Plan]) -> None:
    _, plan = world
    pipelines = tuple(replace(pipeline, micro_batches=pipeline.micro_batches + 1) for pipeline in plan.pipelines)
    longer = replace(plan, pipelines=pipelines, global_batch=sum(pipeline.sequences for pipeline in pipelines))
    added = compile_plan(longer).instruction_count - compile_plan(plan).instruction_count
    assert added <= instruction_estimate(longer) - instruction_estimate(plan)


def test_a_program_that_is_too_large_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(InputError) as caught:
        compile_plan(replace(plan_of(10**6), zero_stage=3))
    assert str(caught.value) == (
        "the plan has about 14,000,000 instructions in its program, but at most 10,000,000 are compiled; "
        "larger micro-batches make fewer of them"
    )
