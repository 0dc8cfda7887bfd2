"""Pace files: what they are read from, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.spec.compile import compile_plan
from sim.spec.pace import Pace, pace_key, plan_digest, read_pace
from sim.spec.plan import Plan, parse_plan
from sim.spec.program import Backward, OptimizerStep
from sim.spec.reading import InputError

TABLE: dict[str, Any] = {
    "format": "motley-plan/1",
    "cluster": "pair",
    "model": {"name": "tiny", "layers": 4, "hidden": 8, "ffn": 16, "heads": 2, "vocab": 256},
    "sequence_length": 4,
    "global_batch": 2,
    "precision": "fp32",
    "overlap_gradients": False,
    "pipelines": [
        {
            "micro_batch": 1,
            "micro_batches": 2,
            "stages": [{"devices": ["a/0"], "layers": [0, 3]}, {"devices": ["a/1"], "layers": [3, 4]}],
        }
    ],
}


@pytest.fixture
def plan() -> Plan:
    return parse_plan(json.dumps(TABLE))


def pace_of(plan: Plan) -> Pace:
    seconds = {
        "a/0": {"Forward 0:3": 0.5, "Backward 0:3": 1.5, "OptimizerStep": 0.25},
        "a/1": {"Forward 3:4": 0.125, "Backward 3:4": 0.375, "OptimizerStep": 0.0},
    }
    return Pace(plan_digest(plan), seconds)


def test_micro_batches_share_a_name() -> None:
    assert pace_key(Backward(0, (0, 3))) == pace_key(Backward(1, (0, 3))) == "Backward 0:3"
    assert pace_key(OptimizerStep()) == "OptimizerStep"


def test_what_is_written_is_read(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    path.write_text(pace_of(plan).to_json())
    assert read_pace(path, plan, compile_plan(plan)) == pace_of(plan)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda table: table.update(plan="sha256:0"), "another plan"),
        (lambda table: table["seconds"]["a/0"].pop("Backward 0:3"), "Backward 0:3"),
        (lambda table: table["seconds"].pop("a/1"), "a/1"),
        (lambda table: table["seconds"]["a/0"].update({"Forward 0:3": -1}), "Forward 0:3"),
        (lambda table: table["seconds"]["a/0"].update({"Forward 0:4": 1}), "Forward 0:4"),
        (lambda table: table["seconds"].update({"b/0": {}}), "b/0"),
        (lambda table: table.update(format="motley-pace/9"), "format"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(plan: Plan, tmp_path: Path, change: Any, complaint: str) -> None:
    table = json.loads(pace_of(plan).to_json())
    change(table)
    path = tmp_path / "pace.json"
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=complaint):
        read_pace(path, plan, compile_plan(plan))


def test_with_context_parallelism_what_goes_on_beside_the_ring_is_told(tmp_path: Path) -> None:
    stage = {"devices": ["a/0", "a/1"], "layers": [0, 4]}
    pipelines = [{"micro_batch": 1, "micro_batches": 2, "stages": [stage]}]
    plan = parse_plan(json.dumps({**TABLE, "context_parallel": 2, "pipelines": pipelines}))
    times = {
        "Forward 0:4": 0.5,
        "Forward 0:4, beside its ring": 0.1,
        "Backward 0:4": 1.5,
        "Backward 0:4, beside its ring": 1.5,
        "OptimizerStep": 0.25,
    }
    path = tmp_path / "pace.json"
    path.write_text(Pace(plan_digest(plan), {"a/0": times, "a/1": times}).to_json())
    assert read_pace(path, plan, compile_plan(plan)).seconds == {"a/0": times, "a/1": times}
    for wrong in (0.6, None):
        changed = {key: value for key, value in times.items() if key != "Forward 0:4, beside its ring" or wrong is not None}
        changed |= {} if wrong is None else {"Forward 0:4, beside its ring": wrong}
        path.write_text(Pace(plan_digest(plan), {"a/0": times, "a/1": changed}).to_json())
        with pytest.raises(InputError, match=r"a/1.*Forward 0:4, beside its ring"):
            read_pace(path, plan, compile_plan(plan))
