"""Profiled iterations as runs: what they are of, and what a fit learns of them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import fitting
from experiments.assumptions import DATA, read_assumptions
from experiments.constants import Constants, parse_constants
from experiments.fidelity import PUBLISHED
from experiments.fitting import MEMORY_PARAMETERS, TIME_PARAMETERS, FittedStack, Task, fit_stack
from experiments.layer_profiles import profiled_kind, profiled_precision, profiled_runs
from experiments.published import Modelled, modelled
from experiments.published_rows import Run, read_runs
from sim.cost.estimate import Estimate
from sim.spec.cluster import links
from sim.spec.reading import InputError
from sim.spec.stack import Stack, stack

FILE = DATA / "layer_profiles.csv"
PROFILES = profiled_runs(FILE)
ROWS = [row for row in csv.DictReader(FILE.open(encoding="utf-8")) if row["source"].startswith("sailor")]


def world(run: Run) -> Modelled:
    found = modelled(run, read_assumptions())
    assert isinstance(found, Modelled), found
    return found


def test_each_is_an_iteration_of_one_micro_batch_on_one_node() -> None:
    assert len(PROFILES) == 75
    assert len({run.id for run in PROFILES}) == 75
    for run in PROFILES:
        plan, cluster = world(run).plan, world(run).cluster
        assert (plan.global_batch, plan.pipelines[0].micro_batches, len(plan.pipelines)) == (run.micro_batch, 1, 1)
        assert (len(cluster.devices), len(cluster.nodes), cluster.stack.name) == (run.tp, 1, "sailor")
    known = {(run.gpu_type, run.tp, run.micro_batch): run.iter_time_s for run in PROFILES}
    assert known["GH200-96GB", 4, 4] == pytest.approx(0.138479, abs=1e-6)
    assert ("RTX2080Ti", 1, 2) in known
    assert ("RTX3090", 8, 2) not in known


def test_layers_embedding_head_and_step_add_up_to_it() -> None:
    for row in ROWS:
        parts = json.loads(row["layer_ms"])
        assert sum(parts) == pytest.approx(float(row["fwd_bwd_time_ms"]), rel=0.001)
        assert sum(parts) + float(row["optimizer_ms"]) == pytest.approx(float(row["total_time_ms"]), rel=0.001)


def test_its_precision_is_one_in_which_no_head_beats_its_kind() -> None:
    """In 16 bits V100 and TITAN RTX were at a tenth of their peaks, where these reach a quarter and more in theirs."""
    for row in ROWS:
        if row["model"] != "OPT-350" or row["tp"] != "1":
            continue
        kind = profiled_kind(row["gpu"])
        rate = 6 * int(row["mbs"]) * 2048 * 1024 * 50272 / (float(row["head_ms"]) / 1e3)
        peak = kind.peak(profiled_precision(kind))
        assert peak is not None
        assert 0.25 * peak < rate < peak
        if kind.name.startswith(("A100", "GH200")):
            assert rate > 2 * kind.peak_flop_per_s["fp32"]
        else:
            assert peak == kind.peak_flop_per_s["fp32"] or kind.name == "RTX3090"
        if kind.name.startswith(("V100", "TITAN")):
            assert rate < 0.11 * kind.peak_flop_per_s["fp16"]


def test_gpt_neos_head_has_no_product_with_the_vocabulary_and_is_left_out() -> None:
    row = next(row for row in ROWS if (row["model"], row["gpu"], row["tp"], row["mbs"]) == ("GPT-Neo-2.7", "GH-96", "1", "4"))
    flop = 6 * 4 * 2048 * 2560 * 50257
    assert flop / (float(row["head_ms"]) / 1e3) > 10 * profiled_kind("GH-96").peak_flop_per_s["tf32"]
    profiled = {float(row["total_time_ms"]) / 1e3 for row in ROWS if row["model"] == "OPT-350"}
    assert {run.iter_time_s for run in PROFILES} < profiled


def test_a_file_that_cannot_be_used_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "profiles.csv"
    with pytest.raises(InputError, match=r"profiles\.csv: cannot be read \(no such file"):
        profiled_runs(path)
    text = FILE.read_text(encoding="utf-8")
    path.write_text(text.replace("total_time_ms", "total_ms", 1), encoding="utf-8")
    with pytest.raises(InputError, match=r"profiles\.csv, line \d+: 'total_time_ms' is missing or unknown"):
        profiled_runs(path)
    path.write_text(text.replace("OPT-350,A100-40,1,", "OPT-350,A100-40,one,", 1), encoding="utf-8")
    with pytest.raises(InputError, match=r"profiles\.csv, line \d+: invalid literal"):
        profiled_runs(path)
    path.write_text(text[: text.index("OPT-350,A100-40,2,") + len("OPT-350,A100-40,2")], encoding="utf-8")
    with pytest.raises(InputError, match=r"profiles\.csv, line \d+: has fewer cells than there are columns"):
        profiled_runs(path)


# --- What a fit learns -----------------------------------------------------------------------------------------------


USUAL = {p.name: p.middle for p in (*TIME_PARAMETERS, *MEMORY_PARAMETERS) if getattr(stack("sailor"), p.name)}
SLOW = replace(stack("sailor"), **(USUAL | {"host_s": 150e-6}))
SOME = tuple(run for run in PROFILES if run.gpu_type == "GH200-96GB" and run.tp == 4)


def made(run: Run, software: Stack) -> Run:
    """The run, if it took what a stack takes."""
    return replace(run, iter_time_s=Estimate(world(run).plan, world(run).cluster).iteration_s(stack=software))


def test_profiles_tell_what_runs_do_not() -> None:
    """Runs of long micro-batches wait for no host; profiles of short ones do. Of a stack without runs they tell all."""
    long = tuple(made(run, SLOW) for run in SOME if (run.micro_batch or 0) >= 32)
    runs = tuple(replace(run, source_key="sailor_gh", peak_mem_gb=10.0) for run in long)
    profiles = tuple(made(run, SLOW) for run in SOME)
    begun = replace(SLOW, host_s=60e-6)
    alone = fit_stack(Task(begun, runs, (), Constants()))
    both = fit_stack(Task(begun, runs, (), Constants(), profiles=profiles))
    assert alone.stack.host_s != pytest.approx(150e-6, rel=0.3)
    assert both.stack.host_s == pytest.approx(150e-6, rel=0.05)
    for run in profiles:
        assert Estimate(world(run).plan, world(run).cluster).iteration_s(stack=both.stack) == pytest.approx(
            run.iter_time_s, rel=0.03
        )
    # They are told apart from runs, and say nothing of memory: layers add up to more than a GPU holds.
    assert (both.timed, both.weighed, both.runs) == (len(runs), len(runs), {"sailor": len(runs)})
    assert f"times of {len(runs)} runs, met within" in both.stack.source
    assert f"times of {len(profiles)} profiles, met within" in both.stack.source
    assert both.stack.context_bytes == alone.stack.context_bytes
    without = fit_stack(Task(begun, (), (), Constants(), profiles=profiles))
    assert without.stack.host_s == pytest.approx(150e-6, rel=0.05)
    assert (without.timed, without.weighed) == (0, 0)


@pytest.mark.parametrize("anew", [True, False])
def test_they_count_where_a_stack_is_fitted_anew_or_all_its_runs_are_held_out(
    anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Task] = []

    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        asked.extend(tasks)
        told = [replace(task.stack, source="fitted", host_s=1e-4) for task in tasks]
        return [
            FittedStack(one, dict.fromkeys(task.free, 1.0), len(task.runs), 0.0, 0, 0.0)
            for one, task in zip(told, tasks, strict=True)
        ], False

    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={}))
    monkeypatch.setattr(fitting, "fit_links", lambda *_: (links(),))
    sources = ("sailor_gh", "fmsfsdp")
    runs = [run for run in read_runs(PUBLISHED) if run.source_key in sources]
    for some, holdout in ((runs, 0.0), (runs, 0.5), (runs[-8:], 0.0)):
        asked.clear()
        seed = next(
            seed
            for seed in range(9)
            if {run.source_key for run in fitting.split(some, holdout, seed, "source")[0]} != {"sailor_gh"}
        )
        told = fitting.fit(some, [], seed, holdout, by="source", anew=anew)
        expected = {name: len(PROFILES) if anew and name == "sailor" else 0 for name in ("sailor", "fms-fsdp")}
        if some != runs or (holdout and not anew):
            del expected["sailor"]
        assert {task.stack.name: len(task.profiles) for task in asked} == expected
        # What was found of a stack that has nothing else is written; and no profile is one of the runs that are told.
        hosts = {name: one.host_s for name, one in parse_constants(told.constants_text, "own.yaml").stacks.items()}
        assert all(hosts[name] == 1e-4 for name in expected)
        assert told.timed == len(told.calibration_ids) == sum(len(task.runs) for task in asked)
