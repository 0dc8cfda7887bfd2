"""Estimates that are prepared beside a search."""

from __future__ import annotations

import math
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from partition import estimated
from partition.drafts import Settings, make_plan, stage
from partition.estimated import Preparation
from sim.simulation import simulation
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline
from tests.partition.small_worlds import job, mixed

WORLD, JOB = mixed(), job()
DRAFT = (Pipeline(1, 16, (stage(("slow/0",), (0, 3), 1, "none"), stage(("fast/0",), (3, 8), 1, "none"))),)
PLAN = make_plan(WORLD, JOB, DRAFT, Settings())


def test_the_estimates_of_a_plan_that_meets_no_other_are_the_simulation_s() -> None:
    preparation = Preparation(WORLD, JOB, [PLAN])
    found = preparation.estimates(math.inf)
    assert found is not None and found is preparation.estimates()
    simulated = simulation(WORLD, JOB, 0)(PLAN)
    assert isinstance(simulated, Cost)
    assert found.iteration_s(PLAN) == pytest.approx(simulated.iteration_s, rel=1e-9)


def test_a_preparation_that_is_ended_leaves_no_process() -> None:
    preparation = Preparation(WORLD, JOB, [PLAN])
    process = preparation._process
    assert process is not None
    preparation.end()
    assert not process.is_alive()


@pytest.mark.parametrize("compiled", [True, False])
def test_alone_it_compiles_only_in_good_time(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(estimated, "can_fork", lambda: False)
    monkeypatch.setattr(estimated, "_compiled", lambda: compiled)
    assert (Preparation(WORLD, JOB, [PLAN]).estimates(1.0) is not None) == compiled
    assert Preparation(WORLD, JOB, [PLAN]).estimates(100.0) is not None


def test_what_was_compiled_of_an_older_source_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "recurrence.py"
    source.write_text("")
    monkeypatch.setattr(estimated, "find_spec", lambda name: ModuleSpec(name, None, origin=str(source)))
    assert not estimated._compiled()
    kept = tmp_path / "__pycache__" / "recurrence.evaluate-1.py311.nbi"
    kept.parent.mkdir()
    kept.write_text("")
    os.utime(source, (1000, 1000))
    os.utime(kept, (999, 999))
    assert not estimated._compiled()
    os.utime(kept, (1001, 1001))
    assert estimated._compiled()
