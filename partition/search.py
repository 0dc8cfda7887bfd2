"""The search: what a planner is, the registry of planners, and the one place that keeps budget, best plan and progress.

A planner is one function. It makes plans, in an order that depends on its seed alone, and has each judged by
`Search.consider`, which keeps the best and ends the planner when its budget is spent. See `partition.planners.random` for
the simplest one.

A planner makes fast plans for the cluster that it is given. Where GPUs cost something (`partition.objective`), it is given
parts of the cluster too, one after the other, the best of them again and for longer, and which GPUs to use at all is answered by
what was judged on all of them. One that chooses among GPUs itself, by what they cost, has the whole cluster first.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from partition.objective import Ledger, Missed, Objective, Outlay, dominates, pools
from partition.parallel import News, side_by_side
from sim.collector import garbage_collected_seldom
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Cost, Forecast, Infeasible, Judge, Verdict
from sim.spec.plan import Plan
from sim.spec.reading import InputError, nearest

DEFAULT_BUDGET_S = 30.0

MOST_SHAPES = 8
"""So many plans of different shapes are kept: the best one, and what it is compared with."""

MOST_VERDICTS = 50_000
"""So many verdicts are remembered, for plans that are considered again."""


GLANCE, CHOOSING, SURVEY, LEAST_SHARE = 0.05, 0.75, 0.5, 0.02
"""Where a planner chooses among GPUs, the share of the budget for a first glance at all parts, and that for the whole cluster;
the share of the rest that all other parts have together before the best have what is left; and the share of the budget below
which no part is searched again."""

Rank: TypeAlias = tuple[float, float, float]
"""A plan's place in the order of an objective: the less, the better."""


class _Late(Exception):
    """Some verdicts are there, and the others would take too long."""


class BudgetSpent(Exception):
    """Ends a planner whose budget is spent. Planners let it pass."""


class _Kept(NamedTuple):
    """A plan that was judged, with its place in the order of the objective."""

    rank: Rank
    plan: Plan
    cost: Cost
    outlay: Outlay


@dataclass
class Search:
    """One search of one planner: its inputs, what was found so far, and the clock.

    `judged` counts the plans that a verdict was asked for; `best` is the first by the objective of those that keep its
    constraints; `closest` is the infeasible plan that lacks the fewest bytes, `missed` what the feasible one that came closest
    to the constraints misses.
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
    objective: Objective = field(default_factory=Objective)
    missed: Missed | None = None
    rng: np.random.Generator = field(init=False)
    cut: bool = field(init=False, default=False)
    """Whether the clock ended some of the work on this part of the cluster: elsewhere, or later, the answer may be another."""
    part_rank: Rank = field(init=False, default=(math.inf,) * 3, repr=False)
    """By the objective, of the best plan that was judged since the search, or its work on this part of the cluster, began."""
    _verdicts: dict[Plan, Verdict] = field(init=False, default_factory=dict, repr=False)
    _front: list[_Kept] = field(init=False, default_factory=list, repr=False)
    _shapes: dict[Shape, _Kept] = field(init=False, default_factory=dict, repr=False)
    _began: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if not isinstance(self.budget_s, int | float) or not self.budget_s > 0:
            raise InputError(f"the budget is a number of seconds above zero, but got {self.budget_s!r}")
        self.objective.check(self.cluster)
        self.rng = np.random.default_rng(self.seed)
        self._kinds = {device.name: device.gpu.name for device in self.cluster.devices}
        self._ledger = Ledger(self.cluster)
        self._best_rank = (float("inf"),) * 3

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search, or its work on this part of the cluster, began."""
        return time.perf_counter() - self._began

    def check_budget(self) -> None:
        """Nothing, or BudgetSpent. For planners that think for long between two plans."""
        if self.past(self.budget_s):
            raise BudgetSpent

    def past(self, moment_s: float) -> bool:
        """Whether a moment of the search is past. Then the clock ends what asks for it, and the answer says so."""
        past = self.elapsed_s >= moment_s
        self.cut = self.cut or past
        return past

    def narrow(self, part: Cluster, budget_s: float) -> None:
        """Nothing; the search goes on with a part of its cluster, within a budget that begins now."""
        self.cluster, self.budget_s, self._began = part, budget_s, time.perf_counter()
        self.part_rank, self.cut = (math.inf,) * 3, False

    def consider(self, plan: Plan) -> Verdict:
        """The judge's verdict on a plan, which becomes the best one if it is better. Raises BudgetSpent after the budget."""
        self.check_budget()
        if plan in self._verdicts:
            return self._verdicts[plan]
        return self._note(plan, self.judge(plan))

    def consider_all(self, plans: Sequence[Plan], until_s: float = math.inf) -> list[Verdict | None]:
        """As `consider`, of several plans; a judge that only forecasts works on them in as many processes as there are cores.

        Where it does, there is None for plans without a verdict by a moment of the search, unless all are: it has one at least.
        """
        if not isinstance(self.judge, Forecast):
            return [self.consider(plan) for plan in plans]
        self.check_budget()
        self._judge_beside([plan for plan in dict.fromkeys(plans) if plan not in self._verdicts], until_s)
        return [self._verdicts.get(plan) for plan in plans]

    def _judge_beside(self, plans: Sequence[Plan], until_s: float) -> None:
        """Takes the verdicts on plans down, in their order; where time ends, those that are there."""
        told: dict[int, Verdict] = {}
        news = News[tuple[int, Verdict]](lambda one: told.update([one]))

        def judge(number: int) -> Verdict:
            verdict = self.judge(plans[number])
            news.tell((number, verdict))
            return verdict

        def check() -> None:
            news.hear()
            self.check_budget()
            if told and self.past(until_s):
                raise _Late

        try:
            for plan, verdict in zip(plans, side_by_side(judge, range(len(plans)), check), strict=True):
                self._note(plan, verdict)
        except _Late:
            pass
        finally:
            for number, verdict in sorted(told.items()):
                self.take(plans[number], verdict)

    def take(self, plan: Plan, verdict: Verdict) -> None:
        """Takes a verdict down that a process beside this one has of the judge."""
        if plan not in self._verdicts:
            self._note(plan, verdict)

    @contextmanager
    def ahead(self) -> Iterator[Search]:
        """A copy that takes verdicts as processes tell them, and shows progress in this one's place.

        This one takes them in an order of its own, so that its answer does not depend on who told first. Where it is ended before
        it has them all, as by Ctrl-C, it stands from then on where the copy does.
        """
        other = copy(self)
        other._verdicts, other._front, other._shapes = dict(self._verdicts), list(self._front), dict(self._shapes)
        progress, self.progress = self.progress, None
        try:
            yield other
        except BaseException:
            vars(self).update(vars(other))
            raise
        finally:
            self.progress = progress

    def _note(self, plan: Plan, verdict: Verdict) -> Verdict:
        """Takes a verdict down, and the plan as the best one if it is better."""
        if len(self._verdicts) >= MOST_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[plan] = verdict
        self.judged += 1
        if isinstance(verdict, Cost):
            self._keep(plan, verdict)
        else:
            self.reject(plan, verdict)
        if self.progress is not None:
            self.progress(self)
        return verdict

    def reject(self, plan: Plan, reason: Infeasible) -> None:
        """Notes that the planner itself found a plan infeasible, so that an answer without plan can say what lacked."""
        if self.closest is None or lacking_bytes(reason) < lacking_bytes(self.closest[1]):
            self.closest = (plan, reason)

    def _keep(self, plan: Plan, cost: Cost) -> None:
        """Notes a feasible plan: as the best, on the front, as the best of its shape, or as one that misses a constraint."""
        outlay = self._ledger.outlay(plan, cost)
        missed = self.objective.missed(outlay)
        if missed is not None:
            if self.missed is None or missed.factor < self.missed.factor:
                self.missed = missed
            return
        kept = _Kept(self.objective.rank(outlay), plan, cost, outlay)
        self.part_rank = min(self.part_rank, kept.rank)
        if self.best is None or kept.rank < self._best_rank:
            self.best, self._best_rank = (plan, cost), kept.rank
        if not any(dominates(other.outlay, outlay) or other.outlay.axes() == outlay.axes() for other in self._front):
            self._front = [other for other in self._front if not dominates(outlay, other.outlay)]
            self._front.append(kept)
        if len(self._shapes) < MOST_SHAPES or kept.rank < max(other.rank for other in self._shapes.values()):
            self._keep_shape(kept)

    def _keep_shape(self, kept: _Kept) -> None:
        """Notes a plan that may be the best of its shape, and forgets the worst of too many."""
        shape = shape_of(kept.plan, self._kinds)
        if shape not in self._shapes or kept.rank < self._shapes[shape].rank:
            self._shapes[shape] = kept
        if len(self._shapes) > MOST_SHAPES:
            del self._shapes[max(self._shapes, key=lambda shape: self._shapes[shape].rank)]

    @property
    def front(self) -> tuple[tuple[Plan, Cost], ...]:
        """The plans that no other one dominates in time, dollars and energy, the fastest first; all keep the constraints."""
        return tuple((kept.plan, kept.cost) for kept in sorted(self._front, key=lambda kept: kept.outlay.axes()))

    @property
    def others(self) -> tuple[tuple[Plan, Cost], ...]:
        """The best plans of other shapes than the best plan's, the best first."""
        if self.best is None:
            return ()
        own = shape_of(self.best[0], self._kinds)
        found = [kept for shape, kept in self._shapes.items() if shape != own]
        return tuple((kept.plan, kept.cost) for kept in sorted(found, key=lambda kept: kept.rank))


def lacking_bytes(reason: Infeasible) -> float:
    """Bytes that are missing; infinite where memory is not the reason."""
    if reason.need_bytes is None or reason.have_bytes is None:
        return float("inf")
    return reason.need_bytes - reason.have_bytes


Shape: TypeAlias = frozenset[tuple[object, int]]
"""Pipelines that are alike, and how many of them there are."""


def shape_of(plan: Plan, kinds: Mapping[str, str]) -> Shape:
    """What plans of one shape have in common: how many pipelines there are of which stages, in GPUs of which kinds.

    Cuts, micro-batches, recomputation, and which of the GPUs of a kind a stage has, are not of the shape. `kinds` has the kind of
    every device.
    """
    pipelines: Counter[object] = Counter()
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            groups = [[kinds[name] for name in replica.devices] for replica in stage.replicas]
            stages.append(tuple([(len(group), tuple(sorted(set(group)))) for group in groups]))
        pipelines[tuple(stages)] += 1
    return frozenset(pipelines.items())


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
    front: tuple[tuple[Plan, Cost], ...] = ()
    """The plans that no other plan of this search dominates in time, dollars and energy, the fastest first."""
    others: tuple[tuple[Plan, Cost], ...] = ()
    """The best plans of other shapes, the best first."""
    stands_in: bool = False
    """Whether the planner found no plan within its budget, and this is the best symmetric one, or a small one, in its place."""


Planner: TypeAlias = Callable[[Search], None]

PLANNERS: dict[str, Planner] = {}
"""All registered planners by name."""

ESTIMATING: set[str] = set()
"""The planners that ask estimates, whose arithmetic is compiled once on a machine (`partition.estimated`)."""

CHOOSERS: set[str] = set()
"""The planners that leave GPUs out by what these cost or take, where the objective counts it, and not for speed alone."""


def register(name: str, chooses_gpus: bool = False, estimates: bool = False) -> Callable[[Planner], Planner]:
    """A decorator that enters a planner in the registry. Raises InputError for a name that is taken.

    One that `chooses_gpus` leaves GPUs out by what they cost or take: it has the whole cluster first, and for longest. One that
    `estimates` is quicker, and finds more, once what estimates need is compiled.
    """

    def enter(planner: Planner) -> Planner:
        if name in PLANNERS and PLANNERS[name] is not planner:
            raise InputError(f"a planner named {name!r} is registered already")
        PLANNERS[name] = planner
        if chooses_gpus:
            CHOOSERS.add(name)
        if estimates:
            ESTIMATING.add(name)
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
    planner: str = "motley",
    judge: Judge | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    seed: int = 0,
    progress: Callable[[Search], None] | None = None,
    objective: Objective | str = "throughput",
) -> Result:
    """The best plan that a planner found for a job on a cluster within its budget, judged by simulation unless told otherwise.

    An interrupt (Ctrl-C) ends the search with the best plan so far. Where the budget ends before any plan was found, the best
    symmetric plan stands in, or one that needs least memory. Raises InputError for an unknown planner or objective, a budget that
    is none, and for dollars without prices.
    """
    run = planner_named(planner)
    aim = Objective(objective) if isinstance(objective, str) else objective
    began = time.perf_counter()
    search = Search(cluster, job, judge or simulation(cluster, job, seed), seed, budget_s, progress, objective=aim)
    stopped, stands_in = "finished", False
    try:
        with garbage_collected_seldom():
            ended = _on_parts(search, run, budget_s, planner in CHOOSERS)
        if ended:
            stopped = "budget"
            if search.best is None:
                stands_in = _stand_in(search)
    except KeyboardInterrupt:
        stopped = "interrupted"
    seconds = time.perf_counter() - began
    best, cost = search.best or (None, None)
    reason = None if best is not None else _why_not(search, planner, stopped)
    return Result(planner, best, cost, reason, search.judged, seconds, stopped, search.front, search.others, stands_in)


def _on_parts(search: Search, run: Planner, budget_s: float, chooses_gpus: bool) -> bool:
    """Whether the budget ended the planner on some part of the cluster.

    Where there are several parts, all of them together have a share of the budget first. Of those that had use for all of
    theirs the best then have the rest, the better the more. A planner that chooses among GPUs by what the objective counts has
    the whole cluster before all that, after a glance at the best symmetric plan of each part: what lies near is not missed where
    time is short. Raises the planner's InputError where it refuses every part.
    """
    began, whole = time.perf_counter(), search.cluster
    parts = pools(whole, search.job, search.objective)
    worth: list[Rank] = [(math.inf,) * 3] * len(parts)
    """By part, the rank of the best plan that was judged for it."""
    cut: set[int] = set()
    refusals: dict[int, InputError] = {}

    def left_s(of_s: float) -> float:
        return of_s - (time.perf_counter() - began)

    def search_part(number: int, share_s: float) -> bool:
        """Whether the planner took more than half of its share for a part."""
        search.narrow(parts[number], share_s)
        try:
            run(search)
        except BudgetSpent:
            search.cut = True
        except InputError as error:
            refusals[number] = error
        (cut.add if search.cut else cut.discard)(number)
        worth[number] = min(worth[number], search.part_rank)
        return search.elapsed_s > share_s / 2

    def glance(share_s: float) -> None:
        """Has the best symmetric plan of as many parts judged, the smallest first, as there is time for."""
        from partition.symmetric import symmetric_on  # it is a user of this module

        until = time.perf_counter() + share_s
        for number, part in enumerate(parts):
            if time.perf_counter() > until:
                break
            search.narrow(part, math.inf)
            found = symmetric_on(search, part, until)
            if found is not None:
                search.consider(found)
            worth[number] = search.part_rank

    try:
        later, surveyed = [], parts
        if (
            chooses_gpus
            and search.objective.name != "throughput"
            and len(parts) > 1
            and len(parts[-1].devices) == len(whole.devices)
        ):
            surveyed = parts[:-1]
            glance(GLANCE * budget_s)
            if search_part(len(surveyed), CHOOSING * left_s(budget_s)):
                later.append(len(surveyed))
        first_s = budget_s - left_s(budget_s) * (1 - SURVEY if len(parts) > 1 else 0.0)
        for number, part in enumerate(surveyed):
            # What the small ones leave, the large ones have; they need more time, too.
            share_s = left_s(first_s) * len(part.devices) / sum(len(other.devices) for other in surveyed[number:])
            if share_s <= 0:
                cut.add(number)
            if share_s <= 0 or search_part(number, share_s):
                later.append(number)
        if len(parts) > 1:
            later.sort(key=lambda number: worth[number])
            for n, number in enumerate(later):
                share_s = left_s(budget_s) / (2 if n + 1 < len(later) else 1)
                if share_s <= LEAST_SHARE * budget_s:
                    break
                search_part(number, share_s)
    finally:
        search.narrow(whole, budget_s)
    if refusals and len(refusals) == len(parts):
        raise refusals[0]
    return bool(cut)


def _stand_in(search: Search) -> bool:
    """Whether a plan was found that keeps the constraints, the best symmetric one or else one that needs least memory.

    The search has had it judged.
    """
    from partition.shortage import least_hungry  # these are users of this module
    from partition.symmetric import best_symmetric

    found = best_symmetric(search)
    for offload in (False, True):
        if found is None:
            least = least_hungry(search.cluster, search.job, offload)
            found = least[0] if least is not None and least[1] is None else None
    if found is not None:
        search.narrow(search.cluster, float("inf"))
        search.consider(found)
    return search.best is not None


def _why_not(search: Search, planner: str, stopped: str) -> Infeasible:
    """Why a search ends without a plan: the constraint that was missed by least, or what the least hungry plan lacks."""
    from partition.shortage import shortage  # it is a user of this module

    objective, missed = search.objective, search.missed
    if missed is not None:
        message = f"of the plans that run, the one closest to the constraints has {missed.reached}, but asked for is "
        return Infeasible(None, "devices", None, None, message + missed.asked)
    if not pools(search.cluster, search.job, objective):
        cheapest = min(search.cluster.nodes, key=lambda node: node.gpu.dollars_per_hour or 0.0).gpu
        message = f"no GPU rents for at most ${objective.max_dollars_per_hour:,.2f} per hour: the cheapest, {cheapest.name}, "
        return Infeasible(None, "devices", None, None, message + f"takes ${cheapest.dollars_per_hour:,.2f}")
    closest = search.closest[1] if search.closest is not None else None
    if stopped != "interrupted" and (closest is None or closest.reason == "memory"):
        closest = shortage(search.cluster, search.job, closest) or closest
    return closest or _nothing_tried(planner, search, stopped)


def _nothing_tried(planner: str, search: Search, stopped: str) -> Infeasible:
    """The answer of a search that judged no plan at all, though memory is not what lacks."""
    job, gpus = search.job, len(search.cluster.devices)
    why = f"for {gpus} GPUs, {job.model.layers} layers and a batch of {job.global_batch}: another planner may find one"
    if stopped == "budget":
        why = f"within its budget of {search.budget_s:g} s"
    return Infeasible(None, "devices", None, None, f"the planner {planner} found no plan to judge {why}")
