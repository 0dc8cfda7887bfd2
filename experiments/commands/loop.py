"""`motley loop`: plan, run the best plans, calibrate, plan again, until the runs come in the order that was predicted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Table

from experiments.commands.options import (
    Budget,
    ClusterFile,
    GlobalBatch,
    GradientPrecision,
    ModelName,
    Precision,
    Seed,
    SequenceLength,
    budget_s,
    files_behind,
    folder,
    read_job,
    whole_number,
)
from experiments.commands.run import data_folder, needing_torch, run_told
from experiments.compilation import compile_first
from experiments.exits import NO_ANSWER, tell_error
from experiments.output import check_folder, check_outside, console, spare
from experiments.pacing import pace, write_pace
from experiments.progress import search_progress
from experiments.tables import per_cent, plan_title, seconds
from partition.drafts import Settings, make_plan, stage
from partition.search import plan as search_plan
from sim.calibrate import NEEDED_PLANS, calibrate
from sim.engine import simulate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, cluster_yaml, read_cluster
from sim.spec.job import Job
from sim.spec.pace import plan_digest
from sim.spec.plan import Pipeline, Plan, read_plan
from sim.spec.reading import DISK_FAILURES, InputError, parse_json, read_text, write_file
from sim.spec.trace import period_s, read_trace, trace_json

if TYPE_CHECKING:
    from runtime.settings import Settings as RunSettings  # it would import torch

PLANNERS = ("motley", "flashflex", "megatron", "uniform-grid")
"""Who searches, one after the other, until there are plans enough of different shapes."""

FACTS, PLAN, CALIBRATED = "loop.json", "plan.json", "calibrated.yaml"
"""The files of a loop's folder: what it is of, the fastest plan that ran, and the cluster as it was fitted last."""

SAME = 0.02
"""Plans whose measured times differ by no more than this fraction may come in either order."""


@dataclass(frozen=True)
class _Ran:
    """A plan of a round: what was predicted when it was chosen, and what it took."""

    plan: Plan
    predicted_s: float
    measured_s: float


def loop(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch,
    data: Annotated[
        str, typer.Option("--data", metavar="DATA", help="text:FILE, text:FOLDER (tokens are bytes), or tokens:FILE.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", parser=folder, help="The folder of it all; what is there already is not done again."
        ),
    ],
    sequence_length: SequenceLength = None,
    precision: Precision = "fp32",
    gradient_precision: GradientPrecision = "fp32",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="What each worker computes on: cpu or cuda.")] = "cpu",
    devices: Annotated[str, typer.Option("--devices", metavar="NAME", help="real, or paced: as motley run.")] = "real",
    paced_as: Annotated[
        Path | None,
        typer.Option(
            "--paced-as",
            metavar="FILE",
            help="The cluster whose speeds paced devices have; by default that of --cluster.",
            show_default=False,
        ),
    ] = None,
    testbed: Annotated[
        str | None,
        typer.Option("--testbed", metavar="NAME", help="Run in this testbed (motley testbed up).", show_default=False),
    ] = None,
    plans: Annotated[int, typer.Option("--plans", metavar="N", parser=whole_number(2), help="Plans to run in each round.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", parser=whole_number(1), help="Rounds at most.")] = 4,
    steps: Annotated[int, typer.Option("--steps", metavar="N", parser=whole_number(4), help="Steps of each run.")] = 8,
    budget: Budget = "10s",
    seed: Seed = 0,
) -> None:
    """Plan, run the best plans, calibrate, plan again.

    Ends when the plans of a round that calibrated constants have chosen
    come in the order that was predicted (those within 2 %, or predicted to
    take the same, may come in any), or after --rounds. Prints a table for each round; DIR has every plan,
    trace and calibrated cluster, and at the end plan.json, the fastest that
    ran. See docs/calibrate.md.

    Example:

      motley loop --cluster examples/testbeds/two-sites.yaml \\
        --model examples/models/tiny-llama.json --global-batch 16 \\
        --seq-len 64 --data text:examples --testbed two-sites \\
        --devices paced --out results/loop
    """
    limit_s = budget_s(budget)
    if devices not in ("real", "paced"):
        raise InputError(f"--devices is real or paced, but got {devices!r}")
    if paced_as is not None and devices != "paced":
        raise InputError("--paced-as is of paced devices; say --devices paced")
    check_folder("--out", out)
    if (texts := data_folder(data)) is not None:
        check_outside(texts, {"--out": out})
    first = read_cluster(cluster)
    truth = read_cluster(paced_as) if paced_as is not None else first
    job = read_job(model, global_batch, sequence_length, precision, gradient_precision)
    if testbed is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as motley run
    with needing_torch("loop"):
        from runtime.launch import check_startable
        from runtime.settings import Settings as RunSettings
    settings = RunSettings(steps=steps, data=data, device=device, seed=seed, quiet=True, testbed=testbed)
    check_startable(_simplest(first, job), settings)
    inputs = [cluster, *files_behind(first, model), *([paced_as] if paced_as is not None else [])]
    for name in (FACTS, PLAN, CALIBRATED):
        spare({"--out": out / name}, inputs)
    _check_same(out, first, job, settings, devices, truth)
    screen, current = console(), first
    fastest: _Ran | None = None
    for number in range(1, rounds + 1):
        folder = out / f"round-{number}"
        informed = current is not first
        chosen = _chosen(folder, current, job, settings, plans, limit_s, seed + number - 1)
        if isinstance(chosen, str):
            tell_error(f"round {number}: no plan was found within {budget}: {chosen}")
            raise typer.Exit(NO_ANSWER)
        ran = []
        for one in chosen:
            trace_file = out / "runs" / f"{_short(one)}.json"
            if not trace_file.is_file():
                _run(one, trace_file, settings, current, truth if devices == "paced" else None)
            trace = read_trace(trace_file)
            ran.append(_Ran(one, simulate(one, current).iteration_s, period_s(trace)))
        fastest = min([*ran, *([fastest] if fastest is not None else [])], key=lambda one: one.measured_s)
        tau, pairs, wrong = agreement(ran)
        screen.print(_table(number, ran))
        told = "no two differ by more" if tau is None else f"Kendall's tau {tau:.2f} over {pairs} pairs that differ by more"
        screen.print(f"round {number}: {told} than {per_cent(SAME, 0)}", soft_wrap=True, markup=False)
        found = _calibrated(out, number, first, seed)
        if isinstance(found, Cluster):
            current = found
        else:
            told = f"nothing is calibrated: of the {NEEDED_PLANS} plans that it takes {found} have run"
            screen.print(told, soft_wrap=True, markup=False)
        screen.print()
        if informed and not wrong and tau != 0:  # where all are predicted to take the same, there is no order yet
            screen.print("the order is as predicted" if tau in (None, 1.0) else "no order that was predicted is wrong")
            break
    assert fastest is not None
    screen.print(
        _written(out / PLAN, fastest.plan.to_json(), f", {seconds(fastest.measured_s)} as measured"), soft_wrap=True, markup=False
    )
    if current is not first:
        screen.print(_written(out / CALIBRATED, cluster_yaml(current)), soft_wrap=True, markup=False)


def _written(path: Path, text: str, more: str = "") -> str:
    """The line that tells that a file was written, and where its earlier content is kept."""
    kept = write_file(path, text)
    return f"wrote {path}{more}" + (f" (the earlier one is kept as {kept})" if kept else "")


def _simplest(cluster: Cluster, job: Job) -> Plan:
    """The plan of one stage, by which it is seen before any search whether the job can be trained at all."""
    whole = stage((cluster.devices[0].name,), (0, job.model.layers), 1)
    return make_plan(cluster, job, (Pipeline(1, job.global_batch, (whole,)),), Settings())


def _short(plan: Plan) -> str:
    """A name for a plan, of which another has another."""
    return plan_digest(plan).removeprefix("sha256:")[:16]


def agreement(ran: Sequence[_Ran]) -> tuple[float | None, int, int]:
    """Kendall's tau of predicted and measured times over the pairs measured to differ by more than SAME, None without any; how
    many pairs these are; and how many of them are in the wrong order, as one that is predicted to take the same is not."""
    signs = []
    for i, one in enumerate(ran):
        for other in ran[:i]:
            measured_s, predicted_s = one.measured_s - other.measured_s, one.predicted_s - other.predicted_s
            if abs(measured_s) > SAME * min(one.measured_s, other.measured_s):
                signs.append(np.sign(measured_s) * np.sign(predicted_s))
    return (float(np.mean(signs)) if signs else None), len(signs), signs.count(-1.0)


def _check_same(out: Path, cluster: Cluster, job: Job, settings: object, devices: str, truth: Cluster) -> None:
    """Nothing; notes in the folder what the loop is of. Raises InputError where it is that of another."""
    facts = {
        "cluster": _described(cluster),
        "model": str(job.model),
        "job": job.summary,
        "settings": str(settings),
        "devices": devices,
        "paced_as": _described(truth),
    }
    path = out / FACTS
    if path.is_file():
        known = parse_json(read_text(path), str(path))
        for key, value in facts.items():
            there = known.get(key, value if key == "model" else None) if isinstance(known, dict) else None  # once it had no model
            if there != value:
                short = key in ("job", "settings", "devices") and isinstance(there, str)
                both = f" ({there} there, {value} here)" if short else ""
                raise InputError(f"--out: {out} has a loop of another {key.replace('_', ' ')}{both}; take another folder")
        return
    write_file(path, json.dumps(facts, indent=1) + "\n")


def _described(cluster: Cluster) -> str:
    """All of a cluster as text, with the rates of a matrix, which its file only names."""
    return cluster_yaml(cluster) + ("" if cluster.bandwidth_matrix is None else f"{cluster.bandwidth_matrix}\n")


def _is_runnable(plan: Plan, settings: RunSettings) -> bool:
    """Whether the runtime has what the plan asks for: a search may take what it lacks."""
    from runtime.settings import check_runnable

    try:
        check_runnable(plan, settings)
    except InputError:
        return False
    return True


def _chosen(
    folder: Path, cluster: Cluster, job: Job, settings: RunSettings, count: int, limit_s: float, seed: int
) -> list[Plan] | str:
    """The plans of a round, or why there is none.

    They are those in its folder, or else the best of each shape that searches find, which go there.
    """
    known = sorted(folder.glob("plan-*.json"))
    if known:
        return [read_plan(path) for path in known]
    found: dict[str, Plan] = {}
    why = ""
    compile_first(*PLANNERS)
    for planner in PLANNERS:
        with search_progress(limit_s) as progress:
            result = search_plan(cluster, job, planner, simulation(cluster, job, seed), limit_s, seed, progress)
        plans = (result.plan, *(plan for plan, _ in result.others))
        if result.infeasible is not None:
            why = why or result.infeasible.message
        elif not why:
            why = "the runtime can run none of those that fit"
        found |= {_short(plan): plan for plan in plans if plan is not None and _is_runnable(plan, settings)}
        if len(found) >= count:
            break
    chosen = sorted(found.values(), key=lambda plan: simulate(plan, cluster).iteration_s)[:count]
    if not chosen:
        return why
    _write_plans(folder, chosen)
    return chosen


def _write_plans(folder: Path, plans: Sequence[Plan]) -> None:
    """Nothing; writes the plans of a round to its folder, which is there with all of them or not at all, whenever this ends.

    Raises InputError where they cannot be written, and where the folder has other things already.
    """
    unfinished = folder.with_name(f".{folder.name}")
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)  # of a loop that was killed here
        for i, plan in enumerate(plans):
            write_file(unfinished / f"plan-{i + 1:02d}.json", plan.to_json())
        unfinished.rename(folder)
    except OSError as error:
        if error.errno in DISK_FAILURES:
            raise
        raise InputError(f"{folder}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def _run(plan: Plan, trace_file: Path, settings: RunSettings, cluster: Cluster, truth: Cluster | None) -> None:
    """Nothing; runs a plan, on paced devices as fast as those of `truth` if it is given, and writes its trace."""
    with TemporaryDirectory(prefix="motley-loop-") as place:
        path = Path(place) / "plan.json"
        write_file(path, plan.to_json())
        if truth is not None:
            settings = replace(settings, pace=write_pace(pace(plan, truth), Path(place) / "pace.json"))
        told = run_told(path, plan, settings, None, cluster)
    write_file(trace_file, trace_json(told.result.trace), replace=True)


def _calibrated(out: Path, number: int, cluster: Cluster, seed: int) -> Cluster | int:
    """The cluster fitted to the runs of all rounds until this one, which goes to its folder; of too few, how many there are."""
    path = out / f"round-{number}" / CALIBRATED
    if path.is_file():
        return read_cluster(path)
    rounds = [out / f"round-{earlier}" for earlier in range(1, number + 1)]
    names = sorted({_short(read_plan(plan)) for folder in rounds for plan in folder.glob("plan-*.json")})
    runs = [(str(file), read_trace(file)) for file in (out / "runs" / f"{name}.json" for name in names)]
    if len(runs) < NEEDED_PLANS:
        return len(runs)
    found = calibrate(cluster, runs, seed=seed)
    write_file(path, cluster_yaml(found.cluster))
    return found.cluster


def _table(number: int, ran: Sequence[_Ran]) -> Table:
    """The plans of a round, in the order that was predicted."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"round {number}", overflow="fold")
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in sorted(ran, key=lambda one: one.predicted_s):
        error = f"{(one.predicted_s / one.measured_s - 1) * 100:+.1f} %"
        title = " ".join(plan_title(one.plan).split())
        table.add_row(f"{_short(one.plan)[:8]} {title}", seconds(one.predicted_s), seconds(one.measured_s), error)
    return table
