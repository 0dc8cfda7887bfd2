"""What the runtime refuses to run."""

from __future__ import annotations

import dataclasses

import pytest

from runtime.settings import Settings, check_runnable
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer

MODEL = Transformer(name="small", layers=2, hidden=32, ffn=48, heads=4, vocab=96)
PLAN = Plan("one", MODEL, 16, 1, (Pipeline(1, 1, (Stage((Replica(("n/0", "n/1"), 1),), ((0, 2),)),)),))


def refusal(plan: Plan, **change: object) -> str:
    """What is said of a plan that can be run when it has been changed so that it cannot."""
    settings = Settings(steps=1, data="tokens:x")
    assert check_runnable(plan, settings).lanes
    with pytest.raises(InputError) as caught:
        check_runnable(dataclasses.replace(plan, **change), settings)  # type: ignore[arg-type]
    return str(caught.value)


def test_shard_groups_are_of_replicas_of_one_degree() -> None:
    alone = Pipeline(1, 1, (Stage((Replica(("n/2",), 1),), ((0, 2),)),))
    plan = dataclasses.replace(PLAN, pipelines=(*PLAN.pipelines, alone), global_batch=2, zero_stage=1)
    assert refusal(plan, shard_group=1) == (
        "for shard_group 1 the runtime needs one tensor-parallel degree of all that hold a layer, but got 1, 2; accepted: null"
    )
    assert check_runnable(dataclasses.replace(plan, zero_stage=0, shard_group=1), Settings(steps=1, data="tokens:x")).lanes


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"sequence_length": 18},
            "context_parallel 2 gives each rank two equal stretches of every sequence, but it has 18 tokens; "
            "accepted: a multiple of 4",
        ),
        (
            {"model": dataclasses.replace(MODEL, sliding_window=15)},
            "the runtime divides sequences (context_parallel 2) no longer than the window of the attention, but that of small is "
            "15 and they have 16 tokens; accepted: context_parallel 1",
        ),
    ],
)
def test_sequences_that_the_runtime_cannot_divide_are_refused(change: dict[str, object], error: str) -> None:
    assert refusal(dataclasses.replace(PLAN, context_parallel=2), **change) == error


@pytest.mark.parametrize(
    ("change", "of"),
    [
        ({"context_parallel": 2, "sequence_length": 20}, "length of the part of a context rank of the sequences 10"),
        ({"sequence_slices": 2, "sequence_length": 20}, "length of a slice of the sequences 10"),
    ],
)
def test_tensor_ranks_that_cannot_divide_their_part_of_the_sequences_are_refused(change: dict[str, object], of: str) -> None:
    devices = tuple(f"n/{index}" for index in range(4 * int(str(change.get("context_parallel", 1)))))
    pipeline = Pipeline(1, 1, (Stage((Replica(devices, 1),), ((0, 2),)),))
    plan = dataclasses.replace(PLAN, pipelines=(pipeline,), sequence_parallel=True, **change)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        check_runnable(plan, Settings(steps=1, data="tokens:x"))
    assert str(caught.value) == f"with sequence parallelism the tensor-parallel degree must divide the {of}, but got 4"


def test_pipelines_that_divide_experts_need_to_take_turns_alike() -> None:
    settings = Settings(steps=1, data="tokens:x")
    model = dataclasses.replace(MODEL, experts=Moe(experts=4, top_k=2, ffn=16))

    def pipeline(device: str, micro_batches: int, layers: int) -> Pipeline:
        stage = Stage((Replica((device,), 1),), ((0, 2),), "full", layers)
        return Pipeline(1, micro_batches, (stage,))

    def check(*pipelines: Pipeline) -> None:
        batch = sum(one.sequences for one in pipelines)
        check_runnable(Plan("one", model, 16, batch, pipelines, expert_parallel=2, zero_stage=0), settings)

    check(pipeline("n/0", 2, 1), pipeline("n/1", 2, 1))
    with pytest.raises(InputError) as caught:
        check(pipeline("n/0", 2, 1), pipeline("n/1", 3, 1))
    assert str(caught.value) == "with expert_parallel 2 the runtime needs as many micro-batches in every pipeline, but got 2, 3"
    with pytest.raises(InputError) as caught:
        check(pipeline("n/0", 2, 0), pipeline("n/1", 2, 1))
    assert str(caught.value) == (
        "with expert_parallel 2 the runtime needs as many layers of a stage recomputed in full in every pipeline, "
        "but those of stage 0 recompute 0, 1"
    )
    stages = (Stage((Replica(("n/1",), 1),), ((0, 1),)), Stage((Replica(("n/2",), 1),), ((1, 2),)))
    with pytest.raises(InputError, match="needs pipelines of equal cuts"):
        check(pipeline("n/0", 2, 0), Pipeline(1, 2, stages))
    with pytest.raises(InputError) as caught:
        biased = dataclasses.replace(model, name="biased", mlp_bias=True)
        check_runnable(dataclasses.replace(PLAN, model=biased), settings)
    assert str(caught.value) == "the runtime cannot run experts with biases, which biased has"
