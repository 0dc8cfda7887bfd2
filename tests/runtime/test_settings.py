"""What the runtime refuses to run."""

from __future__ import annotations

import dataclasses

import pytest

from runtime.settings import Settings, check_runnable
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

MODEL = Transformer(name="small", layers=2, hidden=32, ffn=48, heads=4, vocab=96)
PLAN = Plan("one", MODEL, 16, 1, (Pipeline(1, 1, (Stage((Replica(("n/0", "n/1"), 1),), ((0, 2),)),)),))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"context_parallel": 2}, "the runtime cannot run context_parallel 2; accepted: 1"),
        ({"expert_parallel": 2}, "the runtime cannot run expert_parallel 2; accepted: 1"),
        ({"shard_group": 1}, "the runtime cannot run shard_group 1; accepted: null"),
    ],
)
def test_what_only_the_simulator_knows_is_refused_in_one_line(change: dict[str, object], error: str) -> None:
    settings = Settings(steps=1, data="tokens:x")
    assert check_runnable(PLAN, settings).lanes
    with pytest.raises(InputError) as caught:
        check_runnable(dataclasses.replace(PLAN, **change), settings)  # type: ignore[arg-type]
    assert str(caught.value) == error
