"""Estimates that are prepared beside a search."""

from __future__ import annotations

import math
import os
from hashlib import sha1
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from partition import estimated
from partition.drafts import Settings, make_plan, stage
from partition.estimated import Preparation
from sim.cost.estimates import Estimates
from sim.simulation import simulation
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline
from tests.partition.small_worlds import job, mixed
from tests.partition.test_chunks import chunked_best

WORLD, JOB = mixed(), job()
DRAFT = (Pipeline(1, 16, (stage(("slow/0",), (0, 3), 1, "none"), stage(("fast/0",), (3, 8), 1, "none"))),)
PLAN = make_plan(WORLD, JOB, DRAFT, Settings())


def test_the_estimates_of_a_plan_that_meets_no_other_are_the_simulation_s() -> None:
    preparation = Preparation(WORLD, JOB)
    found = preparation.estimates(math.inf)
    assert found is not None and found is preparation.estimates()
    simulated = simulation(WORLD, JOB, 0)(PLAN)
    assert isinstance(simulated, Cost)
    assert found.iteration_s(PLAN) == pytest.approx(simulated.iteration_s, rel=1e-9)


class Compilation:
    """A process that compiles, and has this exit code."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


@pytest.mark.parametrize(
    ("code", "wait_s", "there"), [(None, 0.1, False), (estimated.BUSY, 0.1, False), (1, 0.1, False), (1, math.inf, True)]
)
def test_until_it_is_compiled_there_are_none(
    monkeypatch: pytest.MonkeyPatch, code: int | None, wait_s: float, there: bool
) -> None:
    monkeypatch.setattr(estimated, "is_compiled", lambda: False)
    monkeypatch.setattr(estimated, "_compile_beside", lambda: Compilation(code))
    assert (Preparation(WORLD, JOB).estimates(wait_s) is not None) == there


def test_it_is_waited_for_until_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(estimated, "is_compiled", lambda: asked.append(0) or len(asked) > 3)
    monkeypatch.setattr(estimated, "_compile_beside", lambda: Compilation(None))
    assert Preparation(WORLD, JOB).estimates(30.0) is not None and len(asked) == 4


@pytest.mark.parametrize(("codes", "left"), [([0], 0), ([estimated.BUSY, estimated.BUSY, 0], 0), ([1, 0], 1)])
def test_whoever_waits_has_it_compiled_or_knows_that_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], left: int
) -> None:
    done: list[int] = []

    class Process:
        def wait(self) -> int:
            done.append(codes.pop(0))
            return done[-1]

    monkeypatch.setattr(estimated, "is_compiled", lambda: 0 in done)
    monkeypatch.setattr(estimated, "_compile_beside", Process)
    estimated.compile_once()
    assert len(codes) == left


def test_one_process_at_a_time_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimated.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(estimated.os, "nice", lambda by: None)
    codes: list[int] = []
    estimated._estimate_once.cache_clear()
    monkeypatch.setattr(estimated, "Estimates", lambda *_: codes.append(estimated.main()) or Estimates(WORLD, JOB))
    monkeypatch.setattr(Estimates, "iteration_s", lambda *_: 1.0)
    assert estimated.main() == 0 and codes == [estimated.BUSY]


def test_what_was_compiled_of_an_older_source_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "recurrence.py"
    source.write_text("")
    monkeypatch.setattr(estimated, "find_spec", lambda name: ModuleSpec(name, None, origin=str(source)))
    assert not estimated.is_compiled()
    kept = tmp_path / "__pycache__" / "recurrence.evaluate-1.py311.nbi"
    kept.parent.mkdir()
    kept.write_text("")
    os.utime(source, (1000, 1000))
    os.utime(kept, (999, 999))
    assert not estimated.is_compiled()
    os.utime(kept, (1001, 1001))
    assert estimated.is_compiled()


def test_what_was_compiled_into_another_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told, home = tmp_path / "cost", tmp_path / "told", tmp_path / "home"
    folder.mkdir()
    (folder / "recurrence.py").write_text("")
    monkeypatch.setattr(estimated, "find_spec", lambda name: ModuleSpec(name, None, origin=str(folder / "recurrence.py")))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    own = f"cost_{sha1(str(folder).encode()).hexdigest()}"  # as numba names it
    for cache in (home / "numba" / own, told / own, told / "cost_of_another_installation"):
        cache.mkdir(parents=True)
    (told / "cost_of_another_installation" / "recurrence.evaluate-1.py311.nbi").write_text("")
    assert not estimated.is_compiled()
    (home / "numba" / own / "recurrence.evaluate-1.py311.nbi").write_text("")
    assert estimated.is_compiled()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(told))
    assert not estimated.is_compiled()
    (told / own / "recurrence.evaluate-1.py311.nbi").write_text("")
    assert estimated.is_compiled()


def test_exact_estimates_are_compiled_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("_estimate_once", "_estimate_exactly"):
        monkeypatch.setattr(estimated, name, lambda name=name: done.append(name))
    monkeypatch.setattr(estimated.os, "nice", lambda by: None)
    assert estimated.main() == 0 and done == ["_estimate_once", "_estimate_exactly"]
    # A machine that has the former alone is given the latter beside a search, which goes on without.
    asked: list[int] = []
    monkeypatch.setattr(estimated, "is_compiled", lambda: True)
    monkeypatch.setattr(estimated, "is_exact_compiled", lambda: False)
    monkeypatch.setattr(estimated, "_compile_beside", lambda: asked.append(0) or Compilation(None))
    assert Preparation(WORLD, JOB).estimates() is not None and asked == [0]


def test_without_exact_estimates_stages_keep_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partition.planners.motley.is_exact_compiled", lambda: False)
    won, search, _ = chunked_best(50e9)
    assert not won and search.cut
