"""The pace that is written for a plan: what the simulator takes for each device's computation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pacing import pace
from sim.engine import simulate
from sim.spec.cluster import read_cluster
from sim.spec.pace import plan_digest
from sim.spec.plan import parse_plan
from sim.spec.program import Forward
from sim.spec.reading import InputError

CLUSTER = Path(__file__).parents[2] / "examples" / "testbeds" / "two-sites.yaml"


def plan_of(*stages: tuple[str, int, int]) -> str:
    table = {
        "format": "motley-plan/1",
        "cluster": "two-sites",
        "model": {"name": "tiny", "layers": 4, "hidden": 32, "ffn": 128, "heads": 4, "vocab": 256},
        "sequence_length": 128,
        "global_batch": 4,
        "precision": "fp32",
        "pipelines": [
            {
                "micro_batch": 2,
                "micro_batches": 2,
                "stages": [{"devices": devices.split(), "layers": [start, stop]} for devices, start, stop in stages],
            }
        ],
    }
    return json.dumps(table)


def test_it_is_what_the_simulation_takes_without_collectives() -> None:
    cluster, plan = read_cluster(CLUSTER), parse_plan(plan_of(("large-0/0", 0, 2), ("small-0/0", 2, 4)))
    found = pace(plan, cluster)
    assert found.plan == plan_digest(plan)
    for span in simulate(plan, cluster).spans:
        if isinstance(span.instruction, Forward):
            (device,) = {"p0s0": ["large-0/0"], "p0s1": ["small-0/0"]}[span.lane]
            start, stop = span.instruction.layers
            assert found.seconds[device][f"Forward {start}:{stop}"] == pytest.approx(span.end_s - span.start_s)


def test_a_factor_is_of_one_device_alone() -> None:
    cluster, plan = read_cluster(CLUSTER), parse_plan(plan_of(("large-0/0 large-0/1", 0, 4)))
    plain, slowed = pace(plan, cluster), pace(plan, cluster, {"large-0/1": 1.25})
    assert slowed.seconds["large-0/0"] == plain.seconds["large-0/0"]
    assert slowed.seconds["large-0/1"] == pytest.approx({key: 1.25 * s for key, s in plain.seconds["large-0/1"].items()})


def test_devices_of_a_lane_of_two_kinds_have_their_own_times() -> None:
    cluster, mixed = read_cluster(CLUSTER), parse_plan(plan_of(("large-0/0 small-0/0", 0, 4)))
    alone = pace(parse_plan(plan_of(("large-0/0 large-0/1", 0, 4))), cluster)
    found = pace(mixed, cluster)
    assert found.seconds["large-0/0"] == pytest.approx(alone.seconds["large-0/0"])
    assert found.seconds["small-0/0"]["Forward 0:4"] > 1.2 * found.seconds["large-0/0"]["Forward 0:4"]


def test_the_speed_of_a_device_counts() -> None:
    cluster, plan = read_cluster(CLUSTER), parse_plan(plan_of(("large-0/0", 0, 2), ("large-0/1", 2, 4)))
    faster = replace(cluster, device_speeds=(("large-0/0", 2.0),))
    before, after = pace(plan, cluster), pace(plan, faster)
    assert after.seconds["large-0/0"]["Forward 0:2"] == pytest.approx(before.seconds["large-0/0"]["Forward 0:2"] / 2)
    assert after.seconds["large-0/1"] == before.seconds["large-0/1"]


def test_beside_a_ring_is_attention_to_the_keys_of_others() -> None:
    cluster, alone = read_cluster(CLUSTER), json.loads(plan_of(("large-0/0 large-0/1", 0, 4)))
    plans = [parse_plan(json.dumps({**alone, "context_parallel": 2, "sequence_length": length})) for length in (1024, 2048)]
    shorter, longer = (pace(plan, cluster).seconds["large-0/1"] for plan in plans)
    assert set(shorter) == {*pace(parse_plan(json.dumps(alone)), cluster).seconds["large-0/1"]} | {
        "Forward 0:4, beside its ring",
        "Backward 0:4, beside its ring",
    }
    for key in ("Forward 0:4", "Backward 0:4"):
        assert 0 < longer[f"{key}, beside its ring"] < longer[key]
        # Attention, and it alone, is four times as much.
        assert longer[f"{key}, beside its ring"] / shorter[f"{key}, beside its ring"] == pytest.approx(4, rel=0.1)


def test_a_factor_of_a_device_that_is_not_there_is_refused() -> None:
    cluster, plan = read_cluster(CLUSTER), parse_plan(plan_of(("large-0/0", 0, 4)))
    with pytest.raises(InputError, match="huge-0/0"):
        pace(plan, cluster, {"huge-0/0": 1.1})
    with pytest.raises(InputError, match="above 0"):
        pace(plan, cluster, {"large-0/0": 0.0})
