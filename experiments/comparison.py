"""Planners side by side: the same job, judge, objective, budget and seeds for each, and who found the best plan.

Importing this enters the baselines of `experiments.baselines` in the registry, so that they are compared like any planner.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from experiments import baselines  # noqa: F401
from experiments.judges import judge_named
from experiments.parallel import check_interrupt, in_processes
from experiments.repeats import Spread, repeated
from partition.objective import MEASURED_IN, Ledger, Outlay
from partition.search import DEFAULT_BUDGET_S, Result, Search, plan, planner_named
from sim.metrics import cost as cost_of
from sim.metrics import report
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Cost, Infeasible, Verdict
from sim.spec.plan import Plan, parse_plan
from sim.spec.reading import InputError, write_file
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
    objective: str = "throughput"

    @property
    def measure(self) -> str:
        """What its plans are compared in: a field of `Outlay`, and of `Step`."""
        return MEASURED_IN[self.objective]


class Step(NamedTuple):
    """A plan that was the best so far: the seconds of search when it was found, and what training with it takes."""

    seconds: float
    iteration_s: float
    dollars_per_billion_tokens: float | None
    joules_per_token: float


@dataclass(frozen=True)
class Outcome:
    """What came of a cell: the result of its search, why the planner refused it, or the error that ended it.

    Of a plan that a published program found there was no search: `remark` then says how it was judged.
    """

    cell: Cell
    result: Result | None
    error: str | None = None
    refusal: str | None = None
    history: tuple[Step, ...] = ()
    """The best plan so far, each time it became better by the objective."""
    remark: str | None = None
    fits: bool = True
    """False where the plan was judged for its time alone, because it does not fit in memory."""
    in_step_s: float | None = None
    """The iteration on devices of equal speed, where the cost is that of a run on others."""
    spread: Spread | None = None
    """Of these runs, all; the cost is of the one in the middle."""

    @property
    def cost(self) -> Cost | None:
        """The cost of its plan; None where there is none."""
        return self.result.cost if self.result is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan; None where there is none."""
        return self.result.plan if self.result is not None else None

    @property
    def outlay(self) -> Outlay | None:
        """What training with its plan takes; None where there is none."""
        if self.plan is None or self.cost is None:
            return None
        return _ledger(self.cell.cluster).outlay(self.plan, self.cost)

    @property
    def value(self) -> float | None:
        """Its plan's place by the objective, the less the better: s, $ per 1e9 tokens or J per token; None without a plan."""
        value = getattr(self.outlay, self.cell.measure, None)
        return None if value is None else float(value)

    @property
    def searched(self) -> bool:
        """Whether one of our planners searched for the plan; False for a published one."""
        return self.remark is None

    @property
    def stopped(self) -> str:
        """How the search ended: as its result says, 'refused' or 'error'."""
        if self.result is not None:
            return self.result.stopped
        return "refused" if self.refusal is not None else "error"

    @property
    def why_not(self) -> str | None:
        """Why there is no plan; None where there is one."""
        if self.result is None:
            return self.error or self.refusal
        return self.result.infeasible.message if self.result.infeasible is not None else None


_ledger = lru_cache(maxsize=256)(Ledger)


def run_cell(cell: Cell) -> Outcome:
    """The outcome of a cell.

    A planner that raises InputError before its first plan refuses the cell, as one that serves small clusters alone does a large
    one. A planner that fails is an outcome too, so that it does not spoil the others' comparison.
    """
    history = _History(cell)
    try:
        judge = judge_named(cell.judge)(cell.cluster, cell.job, cell.seed)
        result = plan(cell.cluster, cell.job, cell.planner, judge, cell.budget_s, cell.seed, history, cell.objective)
    except Exception as error:
        told = error_text(error)
        if isinstance(error, InputError) and not history.asked:
            return Outcome(cell, None, refusal=told)
        return Outcome(cell, None, told)
    if result.plan is not None and result.cost is not None:
        history.note(result.plan, result.cost)
    return Outcome(cell, result, history=tuple(history.steps))


def error_text(error: BaseException) -> str:
    """What a row says of an error, on one line: the words of a user's mistake, and before others' the kind of the error."""
    told = " ".join(str(error).split())
    return told if isinstance(error, InputError) else f"{type(error).__name__}: {told}"


def judged(name: str, plan: Plan, verdict: Verdict) -> Result:
    """The verdict on a plan that was not searched for, in the form of a search's result."""
    if isinstance(verdict, Infeasible):
        return Result(name, None, None, verdict, 1, 0.0, "finished")
    return Result(name, plan, verdict, None, 1, 0.0, "finished")


@dataclass
class _History:
    """What `partition.search` tells of its progress: it notes each better plan, and ends the search at an interrupt."""

    cell: Cell
    steps: list[Step] = field(default_factory=list)
    asked: bool = False
    """Whether a plan was judged."""
    _noted: Plan | None = None
    _began: float = field(default_factory=time.perf_counter)

    def __call__(self, search: Search) -> None:
        """Nothing, or KeyboardInterrupt; notes the best plan if it is better than the last."""
        self.asked = True
        if search.best is not None:
            self.note(*search.best)
        check_interrupt()

    def note(self, plan: Plan, cost: Cost) -> None:
        """Nothing; adds a step where the plan is better than the last one's."""
        if plan is self._noted:  # of the plans that are judged, few are better
            return
        outlay, self._noted = _ledger(self.cell.cluster).outlay(plan, cost), plan
        step = Step(
            time.perf_counter() - self._began, outlay.iteration_s, outlay.dollars_per_billion_tokens, outlay.joules_per_token
        )
        measure = self.cell.measure
        if not self.steps or getattr(step, measure) < getattr(self.steps[-1], measure):
            self.steps.append(step)


def compare(
    cells: Sequence[Cell],
    processes: int | None = None,
    progress: Callable[[], None] | None = None,
    keep: Path | None = None,
) -> tuple[list[Outcome], bool]:
    """The outcomes of the cells that were run, in their order, and whether Ctrl-C ended the comparison early.

    Cells run in parallel processes, as many as there are cores unless `processes` says otherwise. With the folder `keep` each
    outcome is written there as soon as it is known, and a cell whose outcome lies there is not run again. Raises InputError
    for an unknown planner or judge.
    """
    for cell in cells:
        planner_named(cell.planner)
        judge_named(cell.judge)
    run = partial(_run_once, keep)
    found, interrupted = in_processes(run, cells, processes, progress, lambda outcome: outcome.stopped == "interrupted")
    return [outcome for outcome in found if outcome is not None], interrupted


def with_jitter(
    outcomes: Sequence[Outcome],
    jitter: float,
    repeats: int,
    processes: int | None = None,
    progress: Callable[[], None] | None = None,
) -> tuple[list[Outcome], bool]:
    """The outcomes with their plans simulated on devices whose speeds differ by chance, and whether Ctrl-C ended it early.

    `jitter` is the standard deviation of the speeds, as a fraction. Each plan is simulated `repeats` times, with the speeds that
    its cell's seed and those after it draw, and costs what the run in the middle does: plans of the same seed have the same
    devices. Alike pipelines then no longer send at the same instants, as those of equal devices do.
    """
    found, interrupted = in_processes(partial(jittered, jitter, repeats), outcomes, processes, progress)
    return [outcome for outcome in found if outcome is not None], interrupted


def jittered(jitter: float, repeats: int, outcome: Outcome) -> Outcome:
    """The outcome with the cost of the run in the middle, if it has a plan; see `with_jitter`."""
    cell, result = outcome.cell, outcome.result
    if result is None or result.plan is None or result.cost is None:
        return outcome
    trace, spread = repeated(result.plan, cell.cluster, cell.seed, jitter, repeats)
    middle = replace(result, cost=cost_of(report(trace, cell.cluster)))
    return replace(outcome, result=middle, in_step_s=result.cost.iteration_s, spread=spread)


# --- What is kept of an unfinished comparison ------------------------------------------------------------------------


def kept(cells: Iterable[Cell], folder: Path) -> int:
    """How many of the cells have their outcome in the folder already."""
    return sum(_read_kept(cell, folder) is not None for cell in cells)


def _run_once(folder: Path | None, cell: Cell) -> Outcome:
    """The outcome that the folder keeps of the cell, or else of running it, which the folder then keeps."""
    outcome = _read_kept(cell, folder) if folder is not None else None
    if outcome is None:
        outcome = run_cell(cell)
        if folder is not None and outcome.stopped not in ("error", "interrupted"):
            write_file(_kept_file(cell, folder), json.dumps(_kept_table(outcome), ensure_ascii=False), replace=True)
    return outcome


def cell_digest(cell: Cell) -> str:
    """A name of a cell that changes with everything in it: cluster, constants, job, planner and all else, version."""
    later = ("objective", "jitter")  # as they are by default they go unsaid, for so it was before there was another
    names = [p.name for p in fields(cell) if p.name != "cluster" and (p.name not in later or getattr(cell, p.name) != p.default)]
    told = _said(" ".join(repr(getattr(cell, name)) for name in names))
    return sha256(f"{VERSION} {_cluster_text(cell.cluster)} {told}".encode()).hexdigest()[:16]


UNSAID = (
    ", gradient_precision='fp32'",
    ", qk_norm=False",
    ", megatron_softmax=False",
    ", unaligned_scale=1.0",
    ", sharded_traffic=0.0",
    ", routing_traffic=0.0",
    ", kernel_s=0.0",
    ", backward_traffic=1.0",
    ", node_dispatch=False",
    ", variant_of=''",
    ", mean_of=''",
)
"""What goes without saying: so it was before there was anything else, and names stay."""


def _said(text: str) -> str:
    """The text without what goes without saying."""
    for unsaid in UNSAID:
        text = text.replace(unsaid, "")
    return text


@lru_cache(maxsize=256)
def _cluster_text(cluster: Cluster) -> str:
    """All of a cluster as text, written once for all its cells: with a thousand GPUs it takes milliseconds."""
    return _said(repr(cluster))


def _kept_file(cell: Cell, folder: Path) -> Path:
    """Where the outcome of a cell is kept."""
    return folder / f"{cell.planner}.{cell.seed}.{cell_digest(cell)}.json"


def _kept_table(outcome: Outcome) -> dict[str, Any]:
    """All of an outcome but its cell."""
    table: dict[str, Any] = {"refusal": outcome.refusal, "history": outcome.history, "result": None}
    if outcome.result is not None:
        result = {name: getattr(outcome.result, name) for name in ("planner", "judged", "seconds", "stopped", "stands_in")}
        result["plan"] = outcome.plan.to_json() if outcome.plan is not None else None
        for name in ("cost", "infeasible"):
            value = getattr(outcome.result, name)
            result[name] = asdict(value) if value is not None else None
        table["result"] = result
    return table


def _read_kept(cell: Cell, folder: Path) -> Outcome | None:
    """The outcome that the folder keeps of the cell, or None where it keeps none that can be read."""
    try:
        table = json.loads(_kept_file(cell, folder).read_text(encoding="utf-8"))
        result = table["result"]
        if result is not None:
            result["plan"] = parse_plan(result["plan"], "plan") if result["plan"] is not None else None
            result["cost"] = Cost(**result["cost"]) if result["cost"] is not None else None
            result["infeasible"] = Infeasible(**result["infeasible"]) if result["infeasible"] is not None else None
            result = Result(**result)
        return Outcome(cell, result, refusal=table["refusal"], history=tuple(Step(*step) for step in table["history"]))
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None


# --- Ranking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """One planner, or one published plan, among those of a comparison on one cluster, over all its seeds."""

    planner: str
    outcomes: tuple[Outcome, ...]

    @property
    def found(self) -> tuple[tuple[Plan, Cost], ...]:
        """The plans it found, one for each seed that has any, with their costs."""
        pairs = ((outcome.plan, outcome.cost) for outcome in self.outcomes)
        return tuple((plan, cost) for plan, cost in pairs if plan is not None and cost is not None)

    @property
    def fits(self) -> bool:
        """Whether its plans were judged with their memory."""
        return all(outcome.fits for outcome in self.outcomes)

    def median(self, measure: Callable[[Plan, Cost], float]) -> float:
        """The median of a measure over the plans it found; raises statistics.StatisticsError where there are none."""
        return float(median(measure(plan, cost) for plan, cost in self.found))

    @property
    def value(self) -> float:
        """The median by the objective, the less the better; infinite where half of its seeds or more found no plan."""
        return float(median(float("inf") if outcome.value is None else outcome.value for outcome in self.outcomes))


def ranking(outcomes: Sequence[Outcome]) -> list[Standing]:
    """The planners of one cluster's outcomes, the one with the best plans (in the median over its seeds) first."""
    planners = dict.fromkeys(outcome.cell.planner for outcome in outcomes)
    standings = [Standing(name, tuple(o for o in outcomes if o.cell.planner == name)) for name in planners]
    return sorted(standings, key=lambda standing: standing.value)


def winner(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The outcome with the best plan that fits (of equals the first); None where none has such a plan."""
    feasible = [(o.value, i) for i, o in enumerate(outcomes) if o.value is not None and o.fits]
    return outcomes[min(feasible)[1]] if feasible else None


def ratio_to_best(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """How many times as much as the best plan that fits the outcome's takes, by the objective; None without a plan.

    Compared are the outcomes of the same job on the same cluster.
    """
    same = [o for o in outcomes if (o.cell.cluster, o.cell.job) == (outcome.cell.cluster, outcome.cell.job)]
    best = winner(same)
    if outcome.value is None or best is None or best.value is None:
        return None
    return outcome.value / best.value


def headroom(plan: Plan, cost: Cost, cluster: Cluster) -> float:
    """The part of its memory that the fullest of the plan's devices has left at its peak, as a fraction."""
    return min(1 - cost.peak_bytes[name] / cluster.device(name).gpu.memory_bytes for name in plan.devices)


# --- Rows ------------------------------------------------------------------------------------------------------------


def row(outcome: Outcome, plan_file: str | None = None) -> dict[str, Any]:
    """The flat row of an outcome: inputs, result, error, version. Measures are None where there is no plan."""
    cell, result, cost = outcome.cell, outcome.result, outcome.cost
    measures = ("iteration_s", "tokens_per_s", "mfu", "mfu_used", "hfu", "bubble", "energy_j", "dollars")
    infeasible = result.infeasible if result is not None else None
    searched = result if outcome.searched else None
    return {
        "cluster": cell.cluster.name,
        "stack": cell.cluster.stack.name,
        "gpus": len(cell.cluster.devices),
        "model": cell.job.model.name,
        "sequence_length": cell.job.sequence_length,
        "global_batch": cell.job.global_batch,
        "precision": cell.job.precision,
        "planner": cell.planner,
        "judge": cell.judge,
        "objective": cell.objective,
        "seed": cell.seed,
        "budget_s": cell.budget_s if outcome.searched else None,
        "schedule": outcome.plan.schedule if outcome.plan is not None else None,
        **{name: getattr(cost, name) if cost is not None else None for name in measures},
        **_spread_columns(outcome),
        **{name: getattr(outcome.outlay, name, None) for name in ("dollars_per_billion_tokens", "joules_per_token")},
        "memory_headroom": headroom(outcome.plan, cost, cell.cluster) if outcome.plan is not None and cost is not None else None,
        "judged": searched.judged if searched is not None else None,
        "search_s": searched.seconds if searched is not None else None,
        "found_s": outcome.history[-1][0] if outcome.history else None,
        "stopped": outcome.stopped if outcome.searched else None,
        "stands_in": searched.stands_in if searched is not None else None,
        "infeasible": infeasible.message if infeasible is not None else None,
        "refusal": outcome.refusal,
        "error": outcome.error,
        "judged_as": outcome.remark,
        "plan": plan_file,
        "version": VERSION,
    }


def _spread_columns(outcome: Outcome) -> dict[str, Any]:
    """What a row tells of the runs on devices of different speeds, if there were any."""
    if outcome.spread is None:
        return {}
    times = outcome.spread.iteration_s
    return {
        "in_step_s": outcome.in_step_s,
        "jitter": outcome.spread.jitter,
        "repeats": len(times),
        "middle_seed": outcome.spread.middle_seed,
        "least_s": min(times),
        "most_s": max(times),
    }


def history_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The flat rows of all histories: the best plan after so many seconds of search, each time it became better."""
    return [
        {
            "cluster": outcome.cell.cluster.name,
            "model": outcome.cell.job.model.name,
            "planner": outcome.cell.planner,
            "seed": outcome.cell.seed,
            "objective": outcome.cell.objective,
            **step._asdict(),
        }
        for outcome in outcomes
        for step in outcome.history
    ]


def rows_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The CSV text of flat rows; None, and a key that a row does not have, is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rows_json(rows: Sequence[dict[str, Any]]) -> str:
    """The JSON text of flat rows: a list with one row a line."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows) + "\n]\n"
