"""A sweep: many independent runs, each one flat row. What is finished is kept at once, and never done again.

A run is a frozen record, and its digest, which changes with everything in it, is its name: in the journal, in the tables and of
its plan's file. The same code executes it in this process, in others on this machine, and on a Ray cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from experiments.comparison import Cell, Outcome, cell_digest, error_text, jittered, judged, row, run_cell
from experiments.journal import Journal
from experiments.judges import SIMULATE, judge_named
from experiments.workers import Died, Workers
from partition.parallel import stay_alone
from partition.search import PLANNERS, Planner, planner_named
from sim.metrics import cost_report
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Judge, Verdict
from sim.spec.plan import Plan
from sim.spec.reading import InputError

GIVEN = "given"
"""What stands in the place of the planner where a run has its plan already."""

Label: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class Run(Cell):
    """One run of a sweep, before it is executed: a search, or with `plan` the judging of that plan.

    With `jitter`, the standard deviation of the devices' speeds as a fraction, its plan is simulated once more with the speeds
    that `seed` draws, and costs what that says. `labels` are further columns of its row, for what varies in a sweep and is not
    said by the others. Raises InputError for an unknown planner or judge, a plan of another job, a jitter that is no fraction or
    that the judge does not have, and a label that is a column already.
    """

    plan: Plan | None = None
    labels: tuple[tuple[str, Label], ...] = ()
    jitter: float = 0.0

    def __post_init__(self) -> None:
        judge_named(self.judge)
        if isinstance(self.jitter, bool) or not 0 <= self.jitter <= 1:
            raise InputError(f"jitter is a number between 0 and 1, but got {self.jitter!r}")
        object.__setattr__(self, "jitter", float(self.jitter))  # 1 and 1.0 make the same run
        if self.jitter > 0 and self.judge != SIMULATE:
            raise InputError(f"jitter {self.jitter:g} needs the judge {SIMULATE}, but got {self.judge}")
        if self.plan is None:
            planner_named(self.planner)
        elif self.plan.job() != self.job:
            raise InputError(f"the run is of the job {self.job.summary}, but its plan is for {self.plan.job().summary}")
        for name, value in self.labels:
            if name in COLUMNS:
                raise InputError(f"a label is not one of the columns that every row has, but got {name!r}")
            if not isinstance(value, Label):
                raise InputError(f"a label is a text, a number, true or false, but {name!r} is {value!r}")


def given(
    cluster: Cluster,
    plan: Plan,
    judge: str = "simulate",
    seed: int = 0,
    labels: tuple[tuple[str, Label], ...] = (),
    jitter: float = 0.0,
) -> Run:
    """The run that judges a plan on a cluster."""
    return Run(cluster, plan.job(), GIVEN, judge, seed=seed, plan=plan, labels=labels, jitter=jitter)


# --- Rows ------------------------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, type] = {
    "run": str,
    "cluster": str,
    "stack": str,
    "gpus": int,
    "node_bytes_per_s": float,
    "model": str,
    "sequence_length": int,
    "global_batch": int,
    "precision": str,
    "gradient_precision": str,
    "optimizer": str,
    "planner": str,
    "budget_s": float,
    "schedule": str,
    "judge": str,
    "jitter": float,
    "seed": int,
    "iteration_s": float,
    "in_step_s": float,
    "tokens_per_s": float,
    "mfu": float,
    "mfu_used": float,
    "hfu": float,
    "bubble": float,
    "peak_bytes": int,
    "memory_headroom": float,
    "energy_j": float,
    "dollars": float,
    "gpus_used": int,
    "judged": int,
    "stopped": str,
    "stands_in": bool,
    "reason": str,
    "infeasible": str,
    "refusal": str,
    "error": str,
    "plan": str,
    "version": str,
    "wall_s": float,
}
"""What every row has, and of which type; None where it is not known. Labels stand behind `seed`. Explained in docs/sweeps.md."""


def wrong_column(row: Row) -> str | None:
    """The first column that a row lacks, or has something else in than belongs there; None where all is well."""
    for name, kind in COLUMNS.items():
        value = row.get(name)
        belongs = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
        if name not in row or not (value is None or belongs):
            return name
    return None


ADDED: Mapping[str, Any] = {"gradient_precision": "fp32", "jitter": 0.0, "in_step_s": None}
"""What stands in columns that tables of earlier sweeps do not have."""

Row: TypeAlias = dict[str, Any]


def with_added(row: Row) -> Row:
    """The row with the columns that earlier sweeps do not have, where it lacks them."""
    return {**row, **{name: value for name, value in ADDED.items() if name not in row}}


class Finished(NamedTuple):
    """What came of a run: its row, and the text of its plan, if it has one."""

    row: Row
    plan: str | None


def execute(run: Run) -> Finished:
    """The row of a run, and its plan. A run that raises is a row with the error; raises KeyboardInterrupt at Ctrl-C."""
    began = time.perf_counter()
    outcome = run_cell(run) if run.plan is None else _judge_given(run, run.plan)
    if outcome.stopped == "interrupted":
        raise KeyboardInterrupt
    if run.jitter > 0:
        outcome = _jittered(run.jitter, outcome)
    return finished(run, outcome, time.perf_counter() - began)


def _jittered(jitter: float, outcome: Outcome) -> Outcome:
    """The outcome on devices whose speeds differ; where that fails, the plan, which a search may have found, and the error."""
    result = outcome.result
    if result is None or result.cost is None:
        return outcome
    try:
        return jittered(jitter, 1, outcome)
    except Exception as error:
        in_step_s = result.cost.iteration_s
        return replace(outcome, result=replace(result, cost=None), error=error_text(error), in_step_s=in_step_s)


def _judge_given(run: Run, plan: Plan) -> Outcome:
    """The outcome of a run that has its plan already."""
    try:
        verdict = _verdict(run.judge, run.cluster, plan)
    except Exception as error:
        return Outcome(run, None, error_text(error), remark=GIVEN)
    return Outcome(run, judged(GIVEN, plan, verdict), remark=GIVEN)


@lru_cache(maxsize=64)
def _verdict(name: str, cluster: Cluster, plan: Plan) -> Verdict:
    """The verdict on a plan in step, which no seed changes; runs of one plan in seed and jitter follow one another."""
    return _judge(name, cluster, plan.job())(plan)


@lru_cache(maxsize=8)
def _judge(name: str, cluster: Cluster, job: Job) -> Judge:
    """The judge, which serves all plans of a job on a cluster: the paths that it has found once are found."""
    return judge_named(name)(cluster, job, 0)


def finished(run: Run, outcome: Outcome, wall_s: float) -> Finished:
    """The row and the plan of a run's outcome; the columns are those of a comparison's rows, and more."""
    digest, plan = cell_digest(run), outcome.plan or run.plan
    measures = cost_report(outcome.cost) if outcome.cost is not None else None
    infeasible = outcome.result.infeasible if outcome.result is not None else None
    found: Row = {
        **row(outcome, plan_name(digest) if plan is not None else None),
        "run": digest,
        "node_bytes_per_s": node_bytes_per_s(run.cluster),
        "gradient_precision": run.job.gradient_precision,
        "optimizer": run.job.optimizer,
        "jitter": run.jitter,
        "in_step_s": outcome.in_step_s,
        "schedule": plan.schedule if plan is not None else None,  # of a given plan that does not fit, too
        **{name: getattr(measures, name, None) for name in ("mfu", "mfu_used", "hfu", "dollars")},  # None, not 0, if not known
        "peak_bytes": max(outcome.cost.peak_bytes.values(), default=None) if outcome.cost is not None else None,
        "gpus_used": len(set(plan.devices)) if plan is not None else None,
        "reason": infeasible.reason if infeasible is not None else None,
        "wall_s": wall_s,
    }
    ordered = {}
    for name in COLUMNS:
        ordered[name] = found[name]
        if name == "seed":
            ordered |= dict(run.labels)
    return Finished(ordered, plan.to_json() if plan is not None else None)


def plan_name(digest: str) -> str:
    """Where the plan of a run lies below the folder of its sweep."""
    return f"plans/{digest}.json"


def node_bytes_per_s(cluster: Cluster) -> float | None:
    """The rate in one direction of the network cards of the node that has the slowest; None where no node has any."""
    rates = [node.nic.count * node.nic.bandwidth_bytes_per_s for node in cluster.nodes if node.nic is not None]
    return min(rates, default=None)


# --- Execution -------------------------------------------------------------------------------------------------------


def named(runs: Iterable[Run]) -> dict[str, Run]:
    """The runs by their digests, in their order. Raises InputError where there is none, and where two are the same."""
    found: dict[str, Run] = {}
    for i, run in enumerate(runs):
        name = cell_digest(run)
        if name in found:
            raise InputError(f"runs {list(found).index(name) + 1} and {i + 1} of the sweep are the same; every run is there once")
        found[name] = run
    if not found:
        raise InputError("the sweep has no runs; expected at least one")
    return found


def sweep(runs: Mapping[str, Run], journal: Journal, workers: Workers, progress: Callable[[], None] | None = None) -> bool:
    """Whether Ctrl-C ended the sweep early. Executes the runs that the journal does not have, and enters each when it is done.

    `runs` are as `named` gives them. The row of a run that kills its process says so.
    """
    far = workers.on is not None
    tasks = [(run, PLANNERS.get(run.planner), far) for name, run in runs.items() if name not in journal.rows]
    try:
        with closing(workers.work(_execute_with, tasks)) as work:  # its processes end with it
            for (run, *_), done in work:
                if isinstance(done, Died):
                    error = f"the process that worked on it ended ({done.why})"
                    remark = GIVEN if run.plan is not None else None
                    done = finished(run, Outcome(run, None, error, remark=remark), done.seconds)
                journal.enter(*done)
                if progress is not None:
                    progress()
    except KeyboardInterrupt:
        return True
    return False


def _execute_with(task: tuple[Run, Planner | None, bool]) -> Finished:
    """As `execute`; the planner comes along for processes that have not registered it, as one that stands in the sweep's file.

    On another machine, whose cores its other workers have, the planner searches alone, as in one of several processes here.
    """
    run, planner, far = task
    if far:
        stay_alone()
    if planner is not None:
        PLANNERS.setdefault(run.planner, planner)
    return execute(run)
