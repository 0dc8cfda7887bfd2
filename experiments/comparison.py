"""Planners side by side: the same job, judge, budget and seeds for each, and who found the fastest plan."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from experiments.judges import judge_named
from experiments.parallel import check_interrupt, in_processes
from partition.search import DEFAULT_BUDGET_S, Result, plan, planner_named
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from sim.spec.version import VERSION


@dataclass(frozen=True)
class Cell:
    """One search of a comparison, before it runs."""

    cluster: Cluster
    job: Job
    planner: str
    judge: str = "simulate"
    budget_s: float = DEFAULT_BUDGET_S
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of a cell: the result of its search, or the error that ended it."""

    cell: Cell
    result: Result | None
    error: str | None = None

    @property
    def cost(self) -> Cost | None:
        """The cost of its plan; None where there is none."""
        return self.result.cost if self.result is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan; None where there is none."""
        return self.result.plan if self.result is not None else None

    @property
    def stopped(self) -> str:
        """How the search ended: as its result says, or 'error'."""
        return self.result.stopped if self.result is not None else "error"

    @property
    def why_not(self) -> str | None:
        """Why there is no plan; None where there is one."""
        if self.error is not None or self.result is None:
            return self.error
        return self.result.infeasible.message if self.result.infeasible is not None else None


def run_cell(cell: Cell) -> Outcome:
    """The outcome of a cell. A planner that fails is an outcome too, so that it does not spoil the others' comparison."""
    try:
        judge = judge_named(cell.judge)(cell.cluster, cell.job, cell.seed)
        result = plan(cell.cluster, cell.job, cell.planner, judge, cell.budget_s, cell.seed, check_interrupt)
    except Exception as error:
        what = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return Outcome(cell, None, " ".join(what.split()))
    return Outcome(cell, result)


def compare(
    cells: Sequence[Cell], processes: int | None = None, progress: Callable[[], None] | None = None
) -> tuple[list[Outcome], bool]:
    """The outcomes of the cells that were run, in their order, and whether Ctrl-C ended the comparison early.

    Cells run in parallel processes, as many as there are cores unless `processes` says otherwise. Raises InputError for an
    unknown planner or judge.
    """
    for cell in cells:
        planner_named(cell.planner)
        judge_named(cell.judge)
    found, interrupted = in_processes(run_cell, cells, processes, progress, lambda outcome: outcome.stopped == "interrupted")
    return [outcome for outcome in found if outcome is not None], interrupted


# --- Ranking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """One planner among those of a comparison on one cluster, over all its seeds."""

    planner: str
    outcomes: tuple[Outcome, ...]

    @property
    def found(self) -> tuple[tuple[Plan, Cost], ...]:
        """The plans it found, one for each seed that has any, with their costs."""
        pairs = ((outcome.plan, outcome.cost) for outcome in self.outcomes)
        return tuple((plan, cost) for plan, cost in pairs if plan is not None and cost is not None)

    def median(self, measure: Callable[[Plan, Cost], float]) -> float:
        """The median of a measure over the plans it found; raises statistics.StatisticsError where there are none."""
        return float(median(measure(plan, cost) for plan, cost in self.found))

    @property
    def iteration_s(self) -> float:
        """The median iteration; infinite where half of its seeds or more found no plan."""
        times = [outcome.cost.iteration_s if outcome.cost is not None else float("inf") for outcome in self.outcomes]
        return float(median(times))


def ranking(outcomes: Sequence[Outcome]) -> list[Standing]:
    """The planners of one cluster's outcomes, the one with the fastest plans (in the median over its seeds) first."""
    planners = dict.fromkeys(outcome.cell.planner for outcome in outcomes)
    standings = [Standing(name, tuple(o for o in outcomes if o.cell.planner == name)) for name in planners]
    return sorted(standings, key=lambda standing: standing.iteration_s)


def winner(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The outcome with the fastest plan (of equals the first); None where none has a plan."""
    feasible = [(outcome.cost.iteration_s, i) for i, outcome in enumerate(outcomes) if outcome.cost is not None]
    return outcomes[min(feasible)[1]] if feasible else None


def headroom(plan: Plan, cost: Cost, cluster: Cluster) -> float:
    """The part of its memory that the fullest of the plan's devices has left at its peak, as a fraction."""
    return min(1 - cost.peak_bytes[name] / cluster.device(name).gpu.memory_bytes for name in plan.devices)


# --- Rows ------------------------------------------------------------------------------------------------------------


def row(outcome: Outcome, plan_file: str | None = None) -> dict[str, Any]:
    """The flat row of an outcome: inputs, result, error, version. Measures are None where there is no plan."""
    cell, result, cost = outcome.cell, outcome.result, outcome.cost
    measures = ("iteration_s", "tokens_per_s", "mfu", "mfu_used", "hfu", "bubble", "energy_j", "dollars")
    infeasible = result.infeasible if result is not None else None
    return {
        "cluster": cell.cluster.name,
        "model": cell.job.model.name,
        "sequence_length": cell.job.sequence_length,
        "global_batch": cell.job.global_batch,
        "precision": cell.job.precision,
        "planner": cell.planner,
        "judge": cell.judge,
        "seed": cell.seed,
        "budget_s": cell.budget_s,
        **{name: getattr(cost, name) if cost is not None else None for name in measures},
        "memory_headroom": headroom(outcome.plan, cost, cell.cluster) if outcome.plan is not None and cost is not None else None,
        "judged": result.judged if result is not None else None,
        "search_s": result.seconds if result is not None else None,
        "stopped": outcome.stopped,
        "infeasible": infeasible.message if infeasible is not None else None,
        "error": outcome.error,
        "plan": plan_file,
        "version": VERSION,
    }


def rows_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The CSV text of flat rows that have the same keys; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rows_json(rows: Sequence[dict[str, Any]]) -> str:
    """The JSON text of flat rows: a list with one row a line."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows) + "\n]\n"
