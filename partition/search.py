"""The search: what a planner is, the registry of planners, and the one place that keeps budget, best plan and progress.

A planner is one function. It makes plans, in an order that depends on its seed alone, and has each judged by
`Search.consider`, which keeps the best and ends the planner when its budget is spent. See `partition.planners.random` for
the simplest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Cost, Infeasible, Judge, Verdict
from sim.spec.plan import Plan
from sim.spec.reading import InputError, nearest

DEFAULT_BUDGET_S = 30.0


class BudgetSpent(Exception):
    """Ends a planner whose budget is spent. Planners let it pass."""


@dataclass
class Search:
    """One search of one planner: its inputs, the best plan so far, and the clock.

    `judged` counts the plans that a verdict was asked for; `closest` is the infeasible plan that lacks the fewest bytes.
    """

    cluster: Cluster
    job: Job
    judge: Judge
    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S
    progress: Callable[[Search], None] | None = None
    best: tuple[Plan, Cost] | None = None
    closest: tuple[Plan, Infeasible] | None = None
    judged: int = 0
    rng: np.random.Generator = field(init=False)
    _verdicts: dict[Plan, Verdict] = field(init=False, default_factory=dict, repr=False)
    _began: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise InputError(f"the budget is above zero seconds, but got {self.budget_s:g}")
        self.rng = np.random.default_rng(self.seed)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self._began

    @property
    def spent(self) -> bool:
        """Whether the budget is spent."""
        return self.elapsed_s >= self.budget_s

    def check_budget(self) -> None:
        """Nothing, or BudgetSpent. For planners that think for long between two plans."""
        if self.spent:
            raise BudgetSpent

    def consider(self, plan: Plan) -> Verdict:
        """The judge's verdict on a plan, which becomes the best one if it is faster. Raises BudgetSpent after the budget."""
        self.check_budget()
        if plan in self._verdicts:
            return self._verdicts[plan]
        verdict = self._verdicts[plan] = self.judge(plan)
        self.judged += 1
        if isinstance(verdict, Cost):
            if self.best is None or verdict.iteration_s < self.best[1].iteration_s:
                self.best = (plan, verdict)
        elif self.closest is None or _lacking(verdict) < _lacking(self.closest[1]):
            self.closest = (plan, verdict)
        if self.progress is not None:
            self.progress(self)
        return verdict

    def reject(self, plan: Plan, reason: Infeasible) -> None:
        """Notes that the planner itself found a plan infeasible, so that an answer without plan can say what lacked."""
        if self.closest is None or _lacking(reason) < _lacking(self.closest[1]):
            self.closest = (plan, reason)


def _lacking(reason: Infeasible) -> float:
    """Bytes that are missing; infinite where memory is not the reason."""
    if reason.need_bytes is None or reason.have_bytes is None:
        return float("inf")
    return reason.need_bytes - reason.have_bytes


@dataclass(frozen=True)
class Result:
    """The end of a search: the best plan and its cost, or None and the reason why there is none."""

    planner: str
    plan: Plan | None
    cost: Cost | None
    infeasible: Infeasible | None
    judged: int
    seconds: float
    stopped: str
    """"finished", "budget" or "interrupted". Only "finished" is the same on every machine."""


Planner: TypeAlias = Callable[[Search], None]

PLANNERS: dict[str, Planner] = {}
"""All registered planners by name."""


def register(name: str) -> Callable[[Planner], Planner]:
    """A decorator that enters a planner in the registry. Raises InputError for a name that is taken."""

    def enter(planner: Planner) -> Planner:
        if name in PLANNERS and PLANNERS[name] is not planner:
            raise InputError(f"a planner named {name!r} is registered already")
        PLANNERS[name] = planner
        return planner

    return enter


def planner_named(name: str) -> Planner:
    """The registered planner of this name. Raises InputError with the nearest name and all of them."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; accepted: {', '.join(sorted(PLANNERS))}{nearest(name, PLANNERS)}")
    return PLANNERS[name]


def plan(
    cluster: Cluster,
    job: Job,
    planner: str = "flashflex",
    judge: Judge | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    seed: int = 0,
    progress: Callable[[Search], None] | None = None,
) -> Result:
    """The best plan that a planner found for a job on a cluster within its budget, judged by simulation unless told otherwise.

    An interrupt (Ctrl-C) ends the search with the best plan so far. Raises InputError for an unknown planner.
    """
    run = planner_named(planner)
    search = Search(cluster, job, judge or simulation(cluster, job, seed), seed, budget_s, progress)
    stopped = "finished"
    try:
        run(search)
    except BudgetSpent:
        stopped = "budget"
    except KeyboardInterrupt:
        stopped = "interrupted"
    best, cost = search.best or (None, None)
    reason = None
    if best is None:
        reason = search.closest[1] if search.closest is not None else _nothing_tried(planner, stopped, budget_s)
    return Result(planner, best, cost, reason, search.judged, search.elapsed_s, stopped)


def _nothing_tried(planner: str, stopped: str, budget_s: float) -> Infeasible:
    """The answer of a search that judged no plan at all."""
    why = f"within its budget of {budget_s:g} s" if stopped == "budget" else "for this cluster and job"
    return Infeasible(None, "devices", None, None, f"the planner {planner} found no plan to judge {why}")
