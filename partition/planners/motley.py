"""Motley's own planner: descents and annealing over whole layouts under the fast judge, the simulation judging the finalists.

A layout says which groups of GPUs are the stages of which pipeline, in which order. From it follow, by exact rules, the cut of
the layers under memory limits, what each stage recomputes (`partition.assembly`), and the split of the batch over pipelines
by their speed. So the search is over layouts alone:

    1  Deals (`partition.deals`): equal pipelines, to which rows of alike nodes are dealt. Descents take single changes of the
       rows' order and degrees, of micro-batch, slices of sequences, schedule (1F1B, plain, split or eager, zero bubble) and where
       the optimizer's states are (on the GPUs or in the hosts' memory) while they help: first in few steps from a start for each
       number of pipelines (and from the best again, in slices, too) and from random deals, then all the way from the best of
       these and from the best of many random deals of as many pipelines, then, where there is time, from numbers of pipelines
       that were passed by, then from changes of the best. Where they end is judged. So are those grids that divide gradients,
       parameters, experts or sequences (`partition.grids`), or whose stages hold several ranges of layers (`partition.chunks`),
       and may be better.
    2  Starts (`partition.starts`): symmetric grids, every way to deal the nodes to equal pipelines; and what `flashflex` finds by
       its graph partition.
    3  Annealing from the best of all these, ever longer, by random moves (`partition.moves`).
    4  The best of different shapes are tuned by single changes (`partition.variants`).
    5  The finalists are judged by the search's own judge, then the best shapes with several ranges of layers in each stage where
       exact estimates say that they are better, then changes of the best.

Where GPUs cost something (`partition.charges`), seconds count for what they cost.
All this goes by estimates (`sim.cost.estimates`), which among deals and finalists follow messages that meet; until they are
compiled, once on a machine, prices take their place (`partition.pricing`), a few closed forms. Leaving slow GPUs out is a legal
answer.
Left out: groups that span nodes, stages whose replicas share a micro-batch, ZeRO 2 and 3 but for grids; cuts of the layers that
are made for several ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice, product, zip_longest
from typing import TypeVar

import numpy as np

from partition.assembly import Assembly
from partition.charges import Charges
from partition.chunks import CHUNKS, chunked
from partition.deals import (
    SCHEDULES,
    SPLIT_SCHEDULES,
    Deal,
    Deals,
    Layout,
    micro_batches,
)
from partition.drafts import (
    SLACK,
    Draft,
    Settings,
    make_plan,
    reject,
    rescheduled,
    simulation_work,
    unlike,
    usable_nodes,
)
from partition.estimated import Preparation, is_exact_compiled
from partition.graph import DeviceGraph
from partition.grids import Grids
from partition.moves import Moves
from partition.parallel import News, Team, beside, cores, side_by_side, team
from partition.planners.flashflex import Climb
from partition.planners.megatron import parts
from partition.pricing import Pricing
from partition.room import Room
from partition.search import BudgetSpent, Search, register
from partition.shortage import least_hungry
from partition.starts import Starts, twins
from partition.variants import Variants
from sim.cost.estimate import Estimate
from sim.cost.estimates import Estimates
from sim.cost.feasibility import infeasible
from sim.spec.cluster import Node
from sim.spec.judge import Cost, Forecast, Verdict
from sim.spec.plan import Plan

STEPS_EACH_GPU, STEPS_OF_GPUS, FEWEST_STEPS = 60, 256_000, 200
"""Steps of a walk: so many for each GPU of a small cluster, so many divided by the GPUs of a large one, whose steps take longer.
It is the most that a search thinks, whatever its budget."""

WARM, COLD = 0.03, 0.001
"""Temperatures at the begin and the end of annealing: a layout that takes longer by this fraction is accepted one time in e."""

GENERATIONS, WALKS = 2, 4
"""How often annealing begins anew, and from how many of the best layouts of different shapes."""

MOST_MET = 40
"""So many layouts of different shapes are told of each walk."""

PARTITIONED, BEGUN, DEALT, STARTED, RESETTLED, WALKED, TUNED, JUDGED = 0.05, 0.15, 0.82, 0.825, 0.835, 0.87, 0.93, 0.96
"""The shares of the budget after which the graph partition, starts of deals, deals, other starts, other settings, annealing,
tuning and the judging of finalists end."""

CHUNKED = 0.975
"""That after which the trial of several ranges of layers a stage ends; the rest is for changes of the best."""

SETTLED, AGAIN, RESTARTED, DESCENDED, PASSED = 0.1, 0.4, 0.05, 0.65, 0.83
"""The shares of the time for deals after which end first steps from starts, and those again from the best ones, in slices, too;
the share that first steps from random deals have at least, which take what the ones before leave; and those after which end
descents from where the best of these led, and those from numbers of pipelines that were passed by. The rest is for changes of the
best."""

PASSED_S = 4.0
"""Seconds of the time for deals for each such number, if there are to be any."""

NEAR, FIRSTS = 1.2, 6
MORE_DEALS, PATIENCE, DEALERS = 200, 40, 2
"""Descents begin, so many of them, from the best deals of several numbers of pipelines, and from random ones, where these take at
most so many times as long as the best one; and in each of so many processes from so many changes of the best; it gives up where
so many in a row find nothing better."""

KICKED_RANKS = (0, 0, 1, 2)
"""The ranks, of the best of each number of pipelines, from whose changes descents begin, in turn, as far as they are near the
best."""

ORDERS = 2
"""In so many orders first steps are tried again: it decides where they lead."""

FEW_DRAWN = 20
"""First steps from random deals begin from the one of the best pace of so many."""

QUICK_WORK, WORTH, SLOW_WORTH = 100_000, 1.1, 1.02
"""A simulation is quick that takes no more work than this. A descent whose end is by its score at most so many times the best
one's is judged, if that is quick and there is time, and if not."""

DRAWN, DRAWING, ASKED = 1500, 0.15, 60
"""Of so many random deals of as many pipelines, drawn in this share of a descent's time, so many are estimated in another such
share."""

FOLLOWED, LONGEST = 50, 0.5
"""The judge takes so many times as long as estimates that follow all messages; of the time that is left it may take such a part
for an end whose sequences come in slices."""

TRUSTED = 1.15
"""Estimates of so many pipelines are trusted until an end takes so many times as long by the judge."""

CLOSE = 1.01
"""The judge is not asked for what takes so many times as long by a trusted estimate as another one by the judge."""

SPARED = 0.995
"""Sequences go over several groups where that takes at most so many times as long as without."""

HOPE = 1.04
"""A descent from a change of the best cuts no rows that has not come near enough to the best one by then."""

BY_PACE, BY_LEAST = 1.06, 1.02
"""A deal is not better than another that takes so many times less by its estimate than this one by its pace, or at least."""

LANE_WORK = 40
"""Work of finding out what a lane takes, as `simulation_work` counts it."""

HUNGRY_SETTINGS = tuple(Settings(schedule, ahead=ahead) for schedule, ahead in reversed(SCHEDULES))
SPARING_SETTINGS = (
    Settings("split-1f1b", sequence_slices=4),
    Settings("split-1f1b", offload_optimizer=True),
    Settings("split-1f1b", sequence_parallel=True, offload_optimizer=True),
)
START_SETTINGS = (*HUNGRY_SETTINGS, *SPARING_SETTINGS)
"""Those of starts of deals, in this order: the later ones need less memory."""

FIRST_STARTS, FIRST, FIRST_WORK = 20, 0.04, 50_000
"""So many starts at least are priced, and until this share of the budget is spent, before the first of them is judged, one whose
simulation takes no more work than this where there is such a one."""

DIVIDED = 0.04
"""The share of the budget after which the pricing of grids ends; after another one their estimates do."""

INTERLEAVED = 0.03
"""The share in which grids are tried with several ranges of layers a stage; half of it is for which of them."""

FINALISTS, SCHEDULED = 24, 2
"""So many are judged, and so many of the best are tried with all schedules before."""

TUNINGS, POLISHED = 60, 200
"""The most improvements of a finalist by the fast judge, and the most changes of the best one that the judge is asked for."""

TOGETHER = 4
"""So many drafts are judged before their verdicts are looked at: the same on every machine, so that the answer is."""

CHUNKED_SHAPES, CHUNKED_GRIDS, CHUNKED_NEAR = 6, 12, 1.2
"""So many of the best shapes, if they take at most so many times as long as the best, and so many grids are tried with several
ranges of layers a stage."""

FINAL_SCHEDULES = (*SCHEDULES, ("1f1b", 1), ("zb-1p", 0), ("zb-2p", 0), ("gpipe", 0))


Thing = TypeVar("Thing")
Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


@register("motley", chooses_gpus=True, estimates=True)
def motley(search: Search) -> None:
    """Descends among deals, anneals layouts, tunes the best of different shapes, and has the finalists judged."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    hunt = _Hunt(search, nodes)
    hunt.run()
    if search.best is None:  # a plan of the least hungry ones may fit that no start was near to
        for offload in (False, True):
            least = least_hungry(search.cluster, search.job, offload)
            if least is not None and least[1] is None:
                search.consider(least[0])
                return
    if not hunt.found:
        reject(search, hunt.graph.devices)


@dataclass(frozen=True)
class _Begun:
    """What a process found with which a search begins, as of `_Hunt`."""

    ranked: list[tuple[float, Layout, Draft]]
    firsts: list[Deal]
    partitioned: list[tuple[Draft, Settings]]
    least_s: float
    longest: tuple[int, float]
    cut: bool


@dataclass(frozen=True)
class _Known:
    """What is known of deals when descents begin: as of `_Hunt`, and the verdicts of all rounds of them before."""

    ends: Mapping[int, tuple[float, Deal]]
    errors: Mapping[int, float]
    longest: tuple[int, float]
    judged: Sequence[tuple[Plan, Verdict]]


@dataclass(frozen=True)
class _Descent:
    """What descents begin with: a deal, random deals of certain numbers of pipelines, or changes of the best that were judged."""

    start: Deal | None
    seed: list[int]
    least_s: float = math.inf
    """The best score so far: an end much worse is not judged."""
    cuts: bool = True
    """Whether rows are cut; if not, an end is judged only where that is quick and there are no estimates."""
    reslices: bool = True
    """Whether sequences are cut in other slices than in the deal, or, in random deals, at all."""
    until_s: float = 0.0
    """Of the search; no verdict is to come after the next."""
    verdicts_s: float = 0.0
    numbers: tuple[int, ...] = ()
    """Without a start, the numbers of pipelines of random deals, which take turns; none for changes of the best."""
    known: _Known | None = None
    """What other processes found, for one that has been descending beside them; None for one that knows it."""


@dataclass
class _Descended:
    """What descents found."""

    judged: list[tuple[Plan, Verdict, Deal]] = field(default_factory=list)
    unjudged: list[Deal] = field(default_factory=list)
    """Ends whose verdicts would have come too late."""
    longest: tuple[int, float] = (1, 0.0)
    """The most work that was judged, and the seconds that it took."""
    ends: list[tuple[float, Deal]] = field(default_factory=list)
    """Of the descents from starts, with their seconds by the judge, if they are judged, or by their scores."""
    errors: dict[int, float] = field(default_factory=dict)
    """By the number of pipelines, how many times as long an end took by the judge as by its score, at most."""


@dataclass(frozen=True)
class _Dealers:
    """Processes that descend, what they tell meanwhile, which copies of the search take that, and all verdicts so far."""

    team: Team[_Descent, tuple[_Descended, bool]]
    news: News[tuple[Plan, Verdict]]
    ahead: list[Search]
    judged: list[tuple[Plan, Verdict]] = field(default_factory=list)


class _Hunt:
    """One search: what is known of layouts, and the best of each shape."""

    def __init__(self, search: Search, nodes: Sequence[Node]) -> None:
        self.search, self.job = search, search.job
        self.nodes = {node.name: node for node in nodes}
        self.pricing = Pricing(search.cluster, search.job)
        self.charges = Charges(search.cluster, search.job, search.objective, self.pricing)
        self.assembly = Assembly(search.cluster, search.job, self.pricing)
        self.graph = DeviceGraph(self.pricing.network, nodes)
        self.room = Room(search.cluster, search.job)
        self.variants = Variants(search.cluster, self.job, self.room, self.charges.any)
        self.partitioned: list[tuple[Draft, Settings]] = []
        """The best drafts of the graph partition."""
        self.preparation = Preparation(search.cluster, search.job)
        self.estimates: Estimates | None = None
        self.known: dict[Layout, float] = {}
        memory = {name: float(search.cluster.device(name).gpu.memory_bytes) for name in self.graph.devices}
        self.deals = Deals(self.graph, self.job, nodes, memory, search.seed)
        self.starts = Starts(search.cluster, self.job, nodes, self.graph, self.deals, search.seed)
        self.dealt: dict[Deal, float] = {}
        self.firsts: list[Deal] = []
        self.ends: dict[int, tuple[float, Deal]] = {}
        """By the number of pipelines, the best deal by the judge, and its seconds."""
        self.least_s = math.inf
        """The least that a plan on these GPUs takes by the judge; the search's best may be on others, if they are chosen, too."""
        self._slow: set[Plan] = set()
        """Plans whose verdicts took too long."""
        self._plans: dict[Settings, Plan] = {}
        """One that was met of each settings."""
        self.errors: dict[int, float] = {}
        """By the number of pipelines, how many times as long an end took by the judge as by its score, at most."""
        self.longest = 1, 0.0
        """The most work of a draft that was judged alone in this process, and the seconds that it took."""
        self.found: dict[object, tuple[float, Layout, Draft]] = {}
        """The best layout of each shape."""
        count = len(self.graph.devices)
        self.steps = max(FEWEST_STEPS, min(STEPS_EACH_GPU * count, STEPS_OF_GPUS // count))

    def run(self) -> None:
        """The whole search; see the head of this file."""
        self.begin()
        self.deal()
        self.load()
        self.try_grids()
        self.try_chunked_grids()
        self.start()
        self.resettle()
        self.explore()
        self.finish()
        self.search.cut = self.search.cut or self.estimates is None  # next time they will be compiled

    def begin(self) -> None:
        """Has the best of a few starts judged at once, so that there is an answer whenever the search is interrupted.

        A process beside does that, and takes what the graph partition finds. This one finds starts of deals meanwhile, if it has
        loaded estimates before; if not it loads them, which takes as long, and the other one finds the starts by their prices.
        """
        answered = cores() == 1 or not isinstance(self.search.judge, Forecast)
        if answered:
            self.answer()
        if answered or self.preparation.is_loaded:
            self.load()
        ready = answered or self.estimates is not None

        news = News[tuple[Plan, Verdict]](lambda told: self.search.take(*told))

        def begun() -> _Begun:
            if not answered:
                self.search.progress = None  # what is told is shown where it is heard
                for told in self.answer():
                    news.tell(told)
            with suppress(BudgetSpent):
                self.partition_graph()
                if not ready:
                    self.begin_deals()
            return _Begun(self.ranked(), self.firsts, self.partitioned, self.least_s, self.longest, self.search.cut)

        def own() -> None:
            with suppress(BudgetSpent):
                if ready:
                    self.begin_deals(news.hear)
                else:
                    self.load()

        # However long it takes, and though the time be spent or Ctrl-C come: a search shall have an answer.
        try:
            found = beside(begun, own, news.hear)
        finally:
            news.hear()
        self.partitioned, self.longest = found.partitioned, max(self.longest, found.longest)
        self.least_s = min(self.least_s, found.least_s)
        self.search.cut = self.search.cut or found.cut
        if ready or self.estimates is None:
            for entry in found.ranked:
                self._keep(*entry)
        else:
            for n, (_, layout, _) in enumerate(found.ranked):
                if n >= WALKS and self.late(BEGUN):
                    break
                self.score_s(layout)
        if not ready:
            self.firsts = sorted(found.firsts, key=self.deal_s)

    def answer(self) -> list[tuple[Plan, Verdict]]:
        """Prices some starts, and has one of the best judged; the verdict, if there is one."""
        for n, start in enumerate(self.starts):
            self.score_s(start)
            if n >= FIRST_STARTS and self.late(FIRST):
                break
        return self.judge_soon()

    def judge_soon(self) -> list[tuple[Plan, Verdict]]:
        """Has the best layout so far judged of those that are simulated soon; the verdict, if there is such a layout."""
        ranked = self.ranked()
        quick = [entry for entry in ranked if self._work(entry[2], entry[1].settings) <= FIRST_WORK]
        least = sorted(ranked, key=lambda entry: self._work(entry[2], entry[1].settings))
        told = []
        for _, layout, draft in (quick or least)[:1]:
            plan = make_plan(self.search.cluster, self.job, draft, layout.settings)
            with self._clocked(draft, layout.settings):
                verdict = self.search.consider(plan)
            if isinstance(verdict, Cost):
                self.least_s = min(self.least_s, self.charges.judged_s(plan, verdict))
            told.append((plan, verdict))
        return told

    def load(self, wait_s: float = 0.0, most: int = WALKS) -> None:
        """Takes estimates for prices from now on, if they are there in some seconds; so many of the best have theirs at once."""
        if self.estimates is not None:
            return
        self.estimates = self.preparation.estimates(wait_s)
        if self.estimates is not None:
            priced = self.ranked()[:most]
            for known in (self.known, self.dealt, self.found):
                known.clear()
            for _, layout, _ in priced:
                self.score_s(layout)

    def start(self) -> None:
        """Prices the starts until their share of the budget is spent; descents may have taken more than theirs."""
        until_s = self.search.elapsed_s + max(self._left_s(STARTED), (STARTED - DEALT) * self.search.budget_s)
        for start in self.starts:
            self.score_s(start)
            if self.found and self.search.past(until_s):
                break

    def try_grids(self) -> None:
        """Has those grids judged that divide gradients, parameters or experts and may be better than the best plan so far."""
        least_s = self.least_s
        part_s, now_s = DIVIDED * self.search.budget_s, self.search.elapsed_s
        grids = Grids(self.search.cluster, self.job, list(self.nodes.values()), self.pricing)

        def late(times: int = 1) -> bool:
            self.search.check_budget()
            return self.search.past(now_s + times * part_s)

        found: list[tuple[float, Draft, Settings]] = []

        def add(seconds: float, draft: Draft, settings: Settings) -> None:
            nonlocal least_s
            if self.estimates is not None:
                seconds = self.estimates.iteration_s(make_plan(self.search.cluster, self.job, draft, settings))
            seconds = self.charges.drafted_s(seconds, self.charges.of_draft(draft, settings))
            least_s = min(least_s, seconds)
            found.append((seconds, draft, settings))

        for price_s, grid in grids.priced(late):
            if (price_s >= least_s and not self.charges.any) or late(2):
                break
            devices = [name for pipeline in grid.pipelines for group in pipeline for name in group]
            if self.charges.least_s(price_s, devices) >= least_s:
                continue  # another one, on fewer GPUs, may be charged less
            fitted = grids.fitted(grid)
            if fitted is not None and self.charges.least_s(fitted[0], devices) < least_s:
                add(*fitted, grid.settings)
        if self.estimates is not None:  # which tell the schedules apart
            for _, draft, settings in sorted(found, key=lambda entry: entry[0])[:SCHEDULED]:
                for name in SPLIT_SCHEDULES if settings.zero_stage < 2 and len(draft[0].stages) > 1 else ():
                    add(math.inf, draft, settings.under(name))
                for made in chunked(draft, settings) if settings.expert_parallel > 1 else ():
                    add(math.inf, *made)
        whole_s = min([self.least_s, *[seconds for seconds, _, settings in found if settings.context_parallel == 1]])
        near = [
            (seconds, draft, settings)
            for seconds, draft, settings in sorted(found, key=lambda entry: entry[0])
            if seconds < (CLOSE * least_s if settings.context_parallel == 1 else SPARED * whole_s)
        ]
        self.judged([(draft, settings) for _, draft, settings in near[:TOGETHER]])

    def partition_graph(self) -> None:
        """Takes what `flashflex` finds: the best of each shape, and the best drafts, as few layouts fit where memory is tight."""
        left_s = self._left_s(PARTITIONED)
        if not left_s:
            self.search.cut = True
            return
        part = Search(self.search.cluster, self.job, self.search.judge, self.search.seed, left_s)
        climb = Climb(part, list(self.nodes.values()), np.random.default_rng(self.search.seed))
        with suppress(BudgetSpent):  # what it has found counts
            starts = climb.starts()
            for start in starts:
                climb.improve(start, climb.allowed // (2 * len(starts)))
            climb.explore()
        climb.search = self.search
        for candidate in sorted(climb.priced, key=lambda candidate: climb.priced[candidate][0])[:MOST_MET]:
            self.score_s(Layout(tuple(climb.pipelines(candidate)), candidate.micro_batch, candidate.settings))
        self.partitioned = list(islice(climb.ranked() if climb.priced else (), FINALISTS // 2))
        self.search.cut = self.search.cut or part.cut

    def begin_deals(self, between: Callable[[], None] = lambda: None) -> None:
        """Finds the best start among deals for each number of pipelines, of the first settings under which one can run.

        `between` is called before each number.
        Where links are slow a few nodes of one kind may be better than any that use all, and starts, too.
        Where there is not time for all numbers, it finds as many as there are processes that descend from them.
        """
        firsts: list[tuple[float, Deal]] = []
        gpus = len(self.graph.devices)
        until_s = self.search.elapsed_s + max(self._left_s(BEGUN), (BEGUN - PARTITIONED) * self.search.budget_s)
        # Nearly square layouts are the best guess.
        for number in sorted(twins(gpus), key=lambda number: (abs(math.log(number * number / gpus)), number)):
            if len(firsts) >= DEALERS and self.search.past(until_s):
                break
            between()
            firsts += self._first_start(number)
        self.firsts = [start for _, start in sorted(firsts, key=lambda entry: entry[0])]

    def _first_start(self, number: int) -> list[tuple[float, Deal]]:
        """The best start of so many pipelines under the first settings under which one can run, if there are such.

        Where the very first do not do, the hungry ones are tried only if some of those that need least memory do: that saves
        time on numbers of pipelines that no memory is large enough for. It is no sign where these may fail for another reason:
        sequences that do not come in slices, hosts without room.
        """

        def begun(settings: Settings) -> list[tuple[float, Deal]]:
            found = self._best_start(self.deals.starts(number, settings), math.inf)
            return found + self._best_start(self.deals.few(number, settings), found[0][0] if found else math.inf)

        first, *hungry = HUNGRY_SETTINGS
        if found := begun(first):
            return found
        plain = all(self.job.sequence_length % settings.sequence_slices == 0 for settings in SPARING_SETTINGS)
        last: list[tuple[float, Deal]] = []
        if plain and all(node.host_memory_bytes is None for node in self.nodes.values()):
            last = next(filter(None, map(begun, SPARING_SETTINGS)), [])
            if not last:
                return []
        rest = hungry if last else [*hungry, *SPARING_SETTINGS]
        return next(filter(None, map(begun, rest)), last)

    def _best_start(self, deals: Iterable[Deal], least_s: float) -> list[tuple[float, Deal]]:
        """The best of some deals, if it takes less than so many seconds."""
        best: list[tuple[float, Deal]] = []
        for start in deals:
            if (seconds := self.deal_s(start, least_s)) < least_s:
                best, least_s = [(seconds, start)], seconds
        return best

    def deal(self) -> None:
        """Descends among deals, and has where they end judged, until their share of the budget is spent.

        First in few steps from a start of each number of pipelines, again and in slices, too, from those of the best numbers, and
        from random deals of these; then as far as it goes from the best of these; and then from changes of the best that were
        judged.
        """
        settled: list[tuple[float, Deal]] = []
        if self.firsts:
            with self._dealers() as dealers:
                settled = self._deal(dealers, self.search.seed, self.search.elapsed_s, self._left_s(DEALT))
        if not self.ends:  # there was no time to; what comes now may take the rest of it
            self._judge_one_in_time(settled)
        for _, deal in self.ends.values():  # no start may fit where these do
            layout = self.deals.layout(deal)
            if layout is not None:
                self.score_s(layout)

    def _judge_one_in_time(self, settled: Sequence[tuple[float, Deal]]) -> None:
        """Has the best judged of these deals, and of the layouts that were met, with which the judge may be done in time.

        Where it is with none, it has the best of these layouts.
        """
        met = [(seconds, draft, layout.settings) for seconds, layout, draft in self.ranked() if seconds < self.least_s]
        better = [(seconds, deal) for seconds, deal in settled if seconds < self.least_s]
        drafts = [(seconds, *drafted) for seconds, deal in better if (drafted := self._drafted(deal)) is not None]
        found = self._one_in_time(sorted([*met, *drafts], key=lambda entry: entry[0])) or met
        for _, draft, settings in found[:1]:
            with self._clocked(draft, settings):
                self.judged([(draft, settings)])

    def _deal(self, dealers: _Dealers, seed: int, now_s: float, left_s: float) -> list[tuple[float, Deal]]:
        """See `deal`; all of it within so many seconds from a moment of the search. Where first steps end, by their estimates."""
        least_s = self.deal_s(self.firsts[0])
        # What is best in slices is seldom near to what is best whole, so that both are looked for.
        settling = [_Descent(start, [seed, n], least_s, cuts=False, reslices=False) for n, start in enumerate(self.firsts)]
        settled = self._descend_all(dealers, settling, now_s + SETTLED * left_s)
        if not settled:
            return []
        starts = {start.pipelines: start for start in reversed(self.firsts)}
        nearest = [starts[deal.pipelines] for deal in self._near_ends(settled)[:DEALERS]]
        again = [
            _Descent(start, [seed, n, order], least_s, cuts=False) for order in range(ORDERS) for n, start in enumerate(nearest)
        ]
        settled += self._descend_all(dealers, again, now_s + AGAIN * left_s)
        near = self._near_ends(settled)
        numbers = tuple([near[min(rank, len(near) - 1)].pipelines for rank in KICKED_RANKS])
        drawing = [_Descent(None, [seed, n], least_s, cuts=False, reslices=n % 2 == 0, numbers=numbers) for n in range(DEALERS)]
        settled += self._descend_all(dealers, drawing, max(self.search.elapsed_s + RESTARTED * left_s, now_s + AGAIN * left_s))
        # What is in slices may take the judge too long, and then is nothing that others have to be as good as.
        least_s = min([least_s, *[seconds for seconds, deal in settled if deal.settings.sequence_slices == 1]])
        near = self._near_ends(settled)
        firsts = [_Descent(near[n // 2 % len(near)], [seed, n], least_s, reslices=n % 2 == 0) for n in range(FIRSTS)]
        self._descend_all(dealers, firsts, now_s + DESCENDED * left_s)
        # Rows that are cut may make the best of a number of pipelines that was behind before.
        passed = {
            deal.pipelines: deal
            for deal in reversed(near)
            if deal.pipelines not in {first.start.pipelines for first in firsts if first.start}
        }
        if passed and left_s >= len(passed) * PASSED_S:
            begins = [_Descent(deal, [seed, n], least_s) for n, deal in enumerate(passed.values())]
            self._descend_all(dealers, begins, now_s + PASSED * left_s)
        if self.ends:
            self._descend_all(dealers, [_Descent(None, [seed, n], least_s) for n in range(DEALERS)], now_s + left_s)
        return settled

    def _near_ends(self, settled: Sequence[tuple[float, Deal]]) -> list[Deal]:
        """The best end of first steps for each number of pipelines that is not far behind, the fastest first."""
        found: dict[int, Deal] = {}
        ends = sorted(settled, key=lambda entry: entry[0])
        for seconds, deal in ends:
            if seconds < NEAR * ends[0][0]:
                found.setdefault(deal.pipelines, deal)
        return list(found.values())

    @contextmanager
    def _dealers(self) -> Iterator[_Dealers]:
        """Processes that descend, where there may be some, and keep what they find out of stages from one round to the next."""
        ahead: list[Search] = []
        news = News[tuple[Plan, Verdict]](lambda told: ahead[-1].take(*told))

        def descended(task: _Descent) -> tuple[_Descended, bool]:
            return self.descend(task, news.tell), self.search.cut

        # Only what forecasts may be asked by several processes at once.
        with team(descended, cores() if isinstance(self.search.judge, Forecast) else 1) as together:
            yield _Dealers(together, news, ahead)

    def _descend_all(self, dealers: _Dealers, descents: Sequence[_Descent], until_s: float) -> list[tuple[float, Deal]]:
        """Descends until a moment of the search, side by side where it may; takes what is found, and returns the ends."""
        workers = 1 if dealers.team.alone else cores()
        turns = -(-len(descents) // workers)
        now_s = self.search.elapsed_s
        # A verdict is worth more than annealing, whose time it may take.
        left_s = until_s - now_s, self._left_s(WALKED)
        known = None if dealers.team.alone else _Known(self.ends, self.errors, self.longest, dealers.judged)
        tasks = []
        for n, one in enumerate(descents):
            # From changes of the best it would go on for ever; a descent from a start ends, and lets the next one begin.
            part = 1.0 if one.start is not None else (n // workers + 1) / turns
            tasks.append(replace(one, until_s=now_s + part * left_s[0], verdicts_s=now_s + part * left_s[1], known=known))
        ends = []
        with self.search.ahead() as ahead:
            dealers.ahead.append(ahead)

            def check() -> None:
                dealers.news.hear()
                if not dealers.team.alone:
                    self.search.check_budget()

            for found, cut in dealers.team.answers(tasks, check):
                self.search.cut = self.search.cut or cut
                self.longest = max(self.longest, found.longest)
                for plan, verdict, deal in found.judged:
                    self.search.take(plan, verdict)
                    self.least_s = min(self.least_s, self._note_end(self.ends, plan, verdict, deal))
                    dealers.judged.append((plan, verdict))
                for layout in map(self.deals.layout, found.unjudged):
                    if layout is not None:
                        self.score_s(layout)
                ends += found.ends
                for number, error in found.errors.items():
                    self.errors[number] = max(self.errors.get(number, 1.0), error)
        return ends

    def descend(self, task: _Descent, tell: Callable[[tuple[Plan, Verdict]], None]) -> _Descended:
        """What descents among deals meet: from a deal, or from changes of the best of those that were judged.

        It tells each verdict as soon as it is known. None is asked for that would, by those so far, come too late.
        Estimates leave out what transfers of different sorts take from one another, and a descent finds where they do. So where
        an end was found to take longer, the judge confirms each change, if it is quick.
        """
        rng = np.random.default_rng([*task.seed, task.start is None, task.cuts])
        found = _Descended()
        if task.known is not None:
            self.search.progress = None  # what is told is shown where it is heard
            self.ends, self.errors = dict(task.known.ends), dict(task.known.errors)
            self.longest = max(self.longest, task.known.longest)
            for plan, verdict in task.known.judged:
                self.search.take(plan, verdict)
        ends, least_s = dict(self.ends), task.least_s

        def late() -> bool:
            return self.search.past(task.until_s)

        def judged_s(deal: Deal) -> float:
            drafted = self._drafted(deal)
            if drafted is None or self.search.past(task.verdicts_s - self._expected_s(*drafted)):
                return math.inf
            if late() and self._work(*drafted) > QUICK_WORK:
                return math.inf
            plan = make_plan(self.search.cluster, self.job, *drafted)
            with self._clocked(*drafted):
                verdict = self.search.consider(plan)
            tell((plan, verdict))
            found.judged.append((plan, verdict, deal))
            return self._note_end(ends, plan, verdict, deal)

        def judge_end(seconds: float, deal: Deal) -> float:
            nonlocal least_s
            if seconds < least_s * SLOW_WORTH and deal.settings.sequence_slices > 1 and not self._quick(deal):
                known_s = min([self.least_s, *[end_s for end_s, _ in ends.values()]])
                seconds = self._followed_s(seconds, deal, task.verdicts_s, known_s)
            if math.isinf(seconds) or seconds >= least_s * (WORTH if self._quick(deal) and not late() else SLOW_WORTH):
                return math.inf
            if deal.pipelines in ends and seconds > self._slack(deal.pipelines) * ends[deal.pipelines][0]:
                return math.inf
            judged = judged_s(deal)
            if judged < math.inf:
                least_s = min(least_s, seconds if self.estimates is None else judged)
                self.errors[deal.pipelines] = max(self.errors.get(deal.pipelines, 1.0), judged / seconds)
            else:
                found.unjudged.append(deal)
            return judged

        def confirmed_s(deal: Deal) -> float:
            # Far from the best the judge would say nothing new, and where sequences come in slices it may take too long for that.
            seconds = self.deal_s(deal)
            return judged_s(deal) if seconds < WORTH * least_s and self._quick(deal) else WORTH * seconds

        def descended(begin: Deal, splits: bool = True, cuts: bool = True, hope_s: float = math.inf) -> tuple[float, Deal]:
            confirm = None if self._trusts(begin.pipelines) or not self._quick(begin) else confirmed_s
            seconds, end = self.deals.descended(begin, self.deal_s, rng, late, confirm, splits, cuts, hope_s, task.reslices)
            judged = judge_end(seconds, end) if cuts or (self.estimates is None and self._quick(end)) else math.inf
            return (judged if judged < math.inf else seconds), end

        with suppress(BudgetSpent):  # what it has found counts
            if task.start is not None:
                if task.cuts and task.reslices:  # of two descents that begin there one has it judged, as far as it has come
                    judge_end(self.deal_s(task.start), task.start)
                begins = self._begins(task, task.start, rng) if task.cuts else [task.start]
                for begin in begins:
                    if not found.ends or not late():
                        found.ends.append(descended(begin, task.cuts, task.cuts))
            best_s, since = math.inf, 0
            for number in cycle(task.numbers):
                if late() or since > PATIENCE:
                    break
                drawn = min((self.deals.drawn(number, rng, slices=task.reslices) for _ in range(FEW_DRAWN)), key=self._pace_s)
                found.ends.append(descended(drawn, splits=False, cuts=False))
                best_s, since = min(best_s, found.ends[-1][0]), 0 if found.ends[-1][0] < best_s else since + 1
            best_s, since = math.inf, 0
            for number in range(0 if task.start is not None or task.numbers else MORE_DEALS):
                ranked = sorted(ends.values(), key=lambda entry: entry[0])
                best_s, since = ranked[0][0], 0 if ranked[0][0] < best_s else since + 1
                if late() or since > PATIENCE:
                    break
                near = sum(seconds < WORTH * best_s for seconds, _ in ranked)
                begin = ranked[min(KICKED_RANKS[number % len(KICKED_RANKS)], near - 1)][1]
                descended(self.deals.kicked(begin, self.deal_s, rng), hope_s=HOPE * best_s)
        found.errors = dict(self.errors)
        found.longest = self.longest
        return found

    def _followed_s(self, seconds: float, deal: Deal, until_s: float, known_s: float) -> float:
        """Seconds of a deal whose messages are all followed by the estimates; infinite where the judge would take too long.

        That is, for what is left until a moment of the search, or of the budget where the best that the judge knows takes much
        longer (`known_s`); how long it takes is told by how long following them takes.
        """
        drafted = self._drafted(deal)
        if self.estimates is None or drafted is None:
            return seconds
        began_s = self.search.elapsed_s
        followed_s = self.draft_s(*drafted, math.inf)
        now_s = self.search.elapsed_s
        self.errors[deal.pipelines] = max(self.errors.get(deal.pipelines, 1.0), followed_s / seconds)
        left_s = LONGEST * (until_s - now_s) if known_s < WORTH * followed_s else self._left_s(1.0)
        return followed_s if FOLLOWED * (now_s - began_s) <= left_s else math.inf

    def _begins(self, task: _Descent, deal: Deal, rng: np.random.Generator) -> list[Deal]:
        """Deals of as many pipelines from which to descend, the better one first: this one, and the best of many random ones.

        All of these have their paces asked for, as far as a part of the time until a moment lasts, and those of the best paces
        their estimates.
        """
        now_s, until_s = self.search.elapsed_s, task.until_s
        paces: dict[Deal, float] = {}
        drafted = self._drafted(deal)
        short = drafted is None or _is_short(*drafted)
        for _ in range(DRAWN):
            if self.search.past(now_s + DRAWING * (until_s - now_s)):
                break
            drawn = self.deals.drawn(deal.pipelines, rng, short, task.reslices)
            if drawn not in paces:
                paces[drawn] = self._pace_s(drawn)
        best: tuple[float, Deal] | None = None
        for drawn in sorted(paces, key=lambda drawn: paces[drawn])[:ASKED]:
            least_s = math.inf if best is None else best[0]
            if paces[drawn] > BY_PACE * least_s or self.search.past(now_s + 2 * DRAWING * (until_s - now_s)):
                break
            if (seconds := self.deal_s(drawn, least_s)) < least_s:
                best = seconds, drawn
        if best is None:
            return [deal]
        return [best[1], deal] if best[0] < self.deal_s(deal) else [deal, best[1]]

    def _note_end(self, ends: dict[int, tuple[float, Deal]], plan: Plan, verdict: Verdict, deal: Deal) -> float:
        """The seconds of a verdict, infinite without; takes the deal down if none of as many pipelines is better."""
        if not isinstance(verdict, Cost):
            return math.inf
        seconds = self.charges.judged_s(plan, verdict)
        if deal.pipelines not in ends or seconds < ends[deal.pipelines][0]:
            ends[deal.pipelines] = seconds, deal
        return seconds

    def _pace_s(self, deal: Deal) -> float:
        """Seconds of an iteration of a deal by the pace of its pipelines; infinite where it cannot be cut."""
        layout = self.deals.layout(deal)
        dealt = None if layout is None else self.assembly.dealt(layout.pipelines, layout.micro_batch, layout.settings)
        return math.inf if layout is None or dealt is None else self.charges.least_s(dealt.pace_s, _devices(layout))

    def _expected_s(self, draft: Draft, settings: Settings) -> float:
        """Seconds that the judge may take for a draft, by what it has taken for the one of the most work so far."""
        work, seconds = self.longest
        return seconds * self._work(draft, settings) / work

    def _work(self, draft: Draft, settings: Settings) -> int:
        """How much work the simulation of a draft is, which runs one of the pipelines that behave alike."""
        lanes = sum(len(pipeline.stages) for pipeline in draft)
        return simulation_work(unlike(draft, self.search.cluster), settings.sequence_slices) + LANE_WORK * lanes

    def _soon(self, draft: Draft, settings: Settings) -> bool:
        """Whether the judge may say of a draft what it takes, and there is time to have several of them judged."""
        soon = self._expected_s(draft, settings) <= self._left_s(1.0) * min(cores(), TOGETHER) / TOGETHER
        self.search.cut = self.search.cut or not soon
        return soon

    @contextmanager
    def _clocked(self, draft: Draft, settings: Settings) -> Iterator[None]:
        """Notes how long the judge takes within this for a draft; nothing where that was judged before."""
        judged, began_s = self.search.judged, self.search.elapsed_s
        yield
        if self.search.judged > judged:
            self.longest = max(self.longest, (self._work(draft, settings), self.search.elapsed_s - began_s))

    def _quick(self, deal: Deal) -> bool:
        """Whether a deal is simulated soon."""
        drafted = self._drafted(deal)
        return drafted is not None and self._work(*drafted) <= QUICK_WORK

    def _drafted(self, deal: Deal) -> tuple[Draft, Settings] | None:
        """The draft of a deal, and its settings; None where it has none."""
        layout = self.deals.layout(deal)
        draft = None if layout is None else self.assembly.draft(layout.pipelines, layout.micro_batch, layout.settings)
        return None if draft is None else (draft, deal.settings)

    def deal_s(self, deal: Deal, worth_s: float = math.inf) -> float:
        """Seconds of an iteration of a deal by its estimate, or by its price; infinite where it cannot run.

        Where its pace says that it is not worth the estimate, because it takes longer than `worth_s`, it is the pace's seconds.
        """
        known = self.dealt.get(deal)
        if known is None:
            self.search.check_budget()
            layout = self.deals.layout(deal)
            known = math.inf if layout is None else self._worth_s(layout, worth_s)
            if worth_s < known < math.inf:  # it may be more than what it takes
                return known
            self.dealt[deal] = known
        return known

    def _worth_s(self, layout: Layout, worth_s: float) -> float:
        """Seconds of an iteration of a layout; of one that takes longer than `worth_s`, any that are longer, too."""
        dealt = self.assembly.dealt(layout.pipelines, layout.micro_batch, layout.settings)
        if dealt is None:
            return math.inf
        if self.charges.least_s(dealt.least_s, _devices(layout)) > BY_LEAST * worth_s:
            return BY_LEAST * worth_s
        draft = self.assembly.built(dealt)
        return math.inf if draft is None else self.draft_s(draft, layout.settings, worth_s)

    def resettle(self) -> None:
        """Prices the best layouts with all other settings and micro-batches."""
        until_s = self.search.elapsed_s + max(self._left_s(RESETTLED), (RESETTLED - STARTED) * self.search.budget_s)
        for _, layout, draft in self.ranked()[:WALKS]:
            memory = ((0, False), (1, False), (1, True)) if _is_short(draft, layout.settings) else ((0, False), (1, False))
            parallel = (False, True) if any(len(group) > 1 for pipe in layout.pipelines for group in pipe) else (False,)
            for (schedule, ahead), (zero_stage, offload), sequence_parallel, size in product(
                (*self.deals.schedules, *((name, 0) for name in SPLIT_SCHEDULES)),
                memory,
                parallel,
                micro_batches(self.job, layout.micro_batch),
            ):
                if self.search.past(until_s):
                    return
                settings = replace(
                    layout.settings, zero_stage=zero_stage, sequence_parallel=sequence_parallel, offload_optimizer=offload
                )
                self.score_s(replace(layout, micro_batch=size, settings=settings.under(schedule, ahead)))

    def explore(self) -> None:
        """Anneals from the best layouts."""
        for generation in range(GENERATIONS):
            if self.late(WALKED) or not self.found:
                break
            # Walks take turns on the cores: each has its part of the time.
            rounds = -(-WALKS // cores())
            share = (WALKED - self.search.elapsed_s / self.search.budget_s) / (GENERATIONS - generation) / rounds
            walks = [
                (layout, [self.search.seed, generation, n], share * self.search.budget_s)
                for n, layout in enumerate(self._promising()[:WALKS])
            ]
            for found in self._side_by_side(self.walk, walks, self.search.check_budget):
                for entry in found:
                    self._keep(*entry)

    def _promising(self) -> list[Layout]:
        """The best layouts by their prices, and in turn with them the deals that were judged best."""
        ends = [self.deals.layout(deal) for _, deal in sorted(self.ends.values(), key=lambda entry: entry[0])]
        priced = [layout for _, layout, _ in self.ranked()]
        return list(dict.fromkeys(layout for both in zip_longest(ends, priced) for layout in both if layout is not None))

    # --- Time ---

    def _side_by_side(
        self, function: Callable[[Argument], Answer], arguments: Sequence[Argument], check: Callable[[], None]
    ) -> Iterator[Answer]:
        """As `side_by_side`; whether the clock ended the work of one of the processes is known here, too."""

        def told(argument: Argument) -> tuple[Answer, bool]:
            return function(argument), self.search.cut

        for answer, cut in side_by_side(told, arguments, check):
            self.search.cut = self.search.cut or cut
            yield answer

    def late(self, share: float) -> bool:
        """Whether this share of the budget is spent."""
        return self.search.past(share * self.search.budget_s)

    def _left_s(self, share: float) -> float:
        """Seconds until this share of the budget is spent."""
        return max(0.0, share * self.search.budget_s - self.search.elapsed_s)

    def walk(self, task: tuple[Layout, list[int], float]) -> list[tuple[float, Layout, Draft]]:
        """The best layouts of all shapes that annealing met on its way from one, within some seconds."""
        layout, seed, most_s = task
        with suppress(BudgetSpent):  # what it has met counts
            self.anneal(layout, self.search.elapsed_s + most_s, np.random.default_rng(seed))
        return self.ranked()[:MOST_MET]

    # --- Scores ---

    def score_s(self, layout: Layout) -> float:
        """Seconds of an iteration of the layout by the fast judge; infinite where it cannot be cut so that it fits."""
        known = self.known.get(layout)
        if known is None:
            self.search.check_budget()
            known = math.inf
            draft = self.assembly.draft(layout.pipelines, layout.micro_batch, layout.settings)
            if draft is not None:
                known = self.draft_s(draft, layout.settings)
                self._keep(known, layout, draft)
            self.known[layout] = known
        return known

    def draft_s(self, draft: Draft, settings: Settings, worth_s: float = 0.0) -> float:
        """Seconds of an iteration by the estimate, or by the price where there are no estimates; infinite if it does not fit.

        With `worth_s` messages that meet are followed; where it takes longer than that, it is any seconds that are longer, too.
        They are charged (`partition.charges`), as those of the judge are.
        """
        if not self.charges.any:
            return self._plain_s(draft, settings, worth_s)
        charge = self.charges.of_draft(draft, settings)
        return self.charges.drafted_s(self._plain_s(draft, settings, charge.plain_s(worth_s)), charge)

    def _plain_s(self, draft: Draft, settings: Settings, worth_s: float) -> float:
        """See `draft_s`; nothing is charged."""
        if not self.room.fits_hosts(draft, settings):
            return math.inf
        if self.estimates is None:
            return self.pricing.price_s(draft, settings) if self.room.fits(draft, settings) else math.inf
        holders = len(draft) + self.job.model.tied_embeddings * sum(len(pipeline.stages) > 1 for pipeline in draft)
        if settings.zero_stage == 0 and holders > 1:
            # All-reduces may go along trees, which only the slow estimates follow: a hundred times as long.
            if not self.room.fits(draft, settings):
                return math.inf
            scattered = replace(settings, zero_stage=1)
            ratio = self.pricing.price_s(draft, settings) / self.pricing.price_s(draft, scattered)
            return ratio * self._plain_s(draft, scattered, worth_s / ratio)
        like = self._plans.get(settings)
        if like is None:
            like = self._plans[settings] = make_plan(self.search.cluster, self.job, draft, settings)
        return self.estimates.changed_s(like, draft, worth_s)

    def _keep(self, seconds: float, layout: Layout, draft: Draft) -> None:
        shape = self._shape(layout)
        if shape not in self.found or seconds < self.found[shape][0]:
            self.found[shape] = seconds, layout, draft

    def _shape(self, layout: Layout) -> object:
        """What makes layouts alike enough that only the best of them is a finalist."""
        pipes = sorted((len(pipe), sum(map(len, pipe))) for pipe in layout.pipelines)
        return tuple(pipes), layout.micro_batch, layout.settings

    def ranked(self) -> list[tuple[float, Layout, Draft]]:
        """The best layouts of all shapes, the fastest first."""
        return sorted(self.found.values(), key=lambda entry: entry[0])

    # --- Annealing ---

    def anneal(self, layout: Layout, until_s: float, rng: np.random.Generator) -> None:
        """Walks from a layout by random moves; worse ones are accepted the less often the colder it is.

        It cools down again and again, each time twice as slowly, from the best so far: whenever time ends, most was not in vain.
        """
        moves = Moves(self.search.cluster, self.job, self.graph.devices, self.deals, rng)
        best = self.score_s(layout), layout
        if math.isinf(best[0]):  # as a deal may be whose sequences do not divide, or that no host has room for
            return
        steps, cooling = self.steps, FEWEST_STEPS
        while steps > 0:
            cooling, steps = min(cooling, steps), steps - cooling
            at_s, layout = best
            for step in range(cooling):
                if self.search.past(until_s):
                    return
                heat = WARM * (COLD / WARM) ** (step / cooling)
                changed = moves.moved(layout)
                if changed is None:
                    continue
                changed_s = self.score_s(changed)
                if changed_s < math.inf and math.log(changed_s / at_s) < heat * -math.log(1 - rng.random()):
                    layout, at_s = changed, changed_s
                    if at_s < best[0]:
                        best = at_s, layout
            cooling *= 2

    # --- The end ---

    def finish(self) -> None:
        """Has the best of each shape judged, tunes them, has them judged again, and tunes the best under the judge."""
        self.load(self._left_s(TUNED), 2 * FINALISTS)
        ranked = [(draft, layout.settings) for _, layout, draft in self.ranked()[:FINALISTS]]
        ends = [self._drafted(deal) for _, deal in self.ends.values()]
        drafts = [*(end for end in ends if end is not None), *ranked, *self.partitioned]
        entries = [(self.draft_s(draft, settings, math.inf), draft, settings) for draft, settings in drafts]
        entries.sort(key=lambda entry: entry[0])
        if self.estimates is not None:  # which tell the schedules apart
            others = [
                rescheduled(draft, settings, *schedule)
                for _, draft, settings in entries[:SCHEDULED]
                for schedule in FINAL_SCHEDULES
            ]
            entries += [(self.draft_s(*other, math.inf), *other) for other in others if not self.late(TUNED)]
        entries = sorted(dict.fromkeys(entries), key=lambda entry: entry[0])[:FINALISTS]
        tuned = self._side_by_side(self._tuned, entries, self.search.check_budget)
        entries = [*sorted(tuned, key=lambda entry: entry[0]), *entries]
        best = self._best_judged(entries)
        if best is not None and not self.chunk([best, *entries], best[0]):
            self.polish(*best)

    def try_chunked_grids(self) -> None:
        """Has grids judged whose stages hold several ranges of layers, if they may be better than the best plan so far."""
        now_s, part_s = self.search.elapsed_s, INTERLEAVED * self.search.budget_s
        grids = self._chunked_grids(self.least_s, now_s + part_s / 3, now_s + part_s / 2)
        self._try_chunked(grids, self.least_s, now_s + part_s)

    def chunk(self, entries: Sequence[tuple[float, Draft, Settings]], least_s: float) -> bool:
        """Whether the best of different shapes are better with several ranges of layers in each stage, by the judge."""
        shapes: dict[object, tuple[Draft, Settings]] = {}
        for seconds, draft, settings in entries:
            if seconds < CHUNKED_NEAR * least_s:
                shape = tuple([(len(p.stages), p.micro_batch, sum(len(s.devices) for s in p.stages)) for p in draft])
                shapes.setdefault((shape, settings.sequence_parallel), (draft, settings))
        return self._try_chunked(list(shapes.values())[:CHUNKED_SHAPES], least_s, CHUNKED * self.search.budget_s)

    def _try_chunked(self, drafts: Sequence[tuple[Draft, Settings]], least_s: float, until_s: float) -> bool:
        """Whether some drafts take less than so many seconds with several ranges a stage; judged is what may be."""
        if not is_exact_compiled():  # next time
            self.search.cut = True
            return False
        tasks = [(least_s, until_s, *drafted) for drafted in drafts]
        found = [entry for made in self._side_by_side(self._chunked, tasks, self.search.check_budget) for entry in made]
        found.sort(key=lambda entry: entry[0])
        judged = self.judged([(draft, settings) for _, draft, settings in found[:TOGETHER]])
        return min(judged, default=math.inf) < least_s

    def _chunked_grids(self, most_s: float, paced_until_s: float, until_s: float) -> list[tuple[Draft, Settings]]:
        """The symmetric grids that may take less than some seconds with several ranges of layers a stage, the best first.

        They are ranked by their pace and the filling that is left, until a moment of the search, and drafted until another.
        """
        found: list[tuple[float, Layout]] = []
        for layout in chain.from_iterable(self.starts.gridded(part) for part in parts(list(self.nodes.values()))):
            depth = len(layout.pipelines[0])
            if self.search.past(paced_until_s):
                break
            if depth == 1 or layout.settings.zero_stage == 0:
                continue
            dealt = self.assembly.dealt(layout.pipelines, layout.micro_batch, layout.settings)
            if dealt is not None:
                paced_s = dealt.paced_s(max(1, min(CHUNKS[-1], self.job.model.layers // depth)))
                found.append((self.charges.least_s(paced_s, _devices(layout)), layout))
        found.sort(key=lambda entry: entry[0])
        drafts: list[tuple[Draft, Settings]] = []
        for seconds, layout in found:
            if seconds >= most_s or len(drafts) == CHUNKED_GRIDS or self.search.past(until_s):
                break
            draft = self.assembly.draft(layout.pipelines, layout.micro_batch, layout.settings)
            if draft is not None:  # and fits in memory
                drafts.append((draft, layout.settings))
        return drafts

    def _chunked(self, task: tuple[float, float, Draft, Settings]) -> list[tuple[float, Draft, Settings]]:
        """The drafts of several ranges a stage, made of one, that take less than some seconds by their exact estimates."""
        least_s, until_s, draft, settings = task
        charge = self.charges.of_draft(draft, settings)
        found, last_s = [], math.inf
        for made in chunked(draft, settings):
            if self.search.past(until_s):
                break
            plan = make_plan(self.search.cluster, self.job, *made)
            if infeasible(plan, self.search.cluster) is not None:
                continue
            made_s = self.charges.drafted_s(Estimate(plan, self.search.cluster, self.pricing.network).iteration_s(), charge)
            if made_s < least_s:
                found.append((made_s, *made))
            if made[1].schedule == "interleaved":
                if made_s > last_s:  # messages take more than is saved
                    break
                last_s = made_s
        return found

    def _best_judged(self, entries: Sequence[tuple[float, Draft, Settings]]) -> tuple[float, Draft, Settings] | None:
        """The best by the judge of some drafts, with its judged seconds; None where none can run.

        It asks for them in their order, until they are by their estimates worse than the best so far.
        """
        best: tuple[float, Draft, Settings] | None = None
        entries = [entry for entry in entries if self._soon(*entry[1:])] or self._one_in_time(entries)
        for at in range(0, len(entries), TOGETHER):
            if best is not None and (entries[at][0] > self._slack(len(entries[at][1])) * best[0] or self.late(JUDGED)):
                break
            batch = [(draft, settings) for _, draft, settings in entries[at : at + TOGETHER]]
            for judged_s, (draft, settings) in zip(self.judged(batch), batch, strict=True):
                if judged_s < (best[0] if best is not None else math.inf):
                    best = judged_s, draft, settings
        return best

    def _one_in_time(self, entries: Sequence[tuple[float, Draft, Settings]]) -> Sequence[tuple[float, Draft, Settings]]:
        """The first draft that the judge may be done with in what is left of the budget; all where there is no plan yet."""
        if self.search.best is None:
            return entries
        left_s = self._left_s(1.0)
        return [entry for entry in entries if entry[0] < self.least_s and self._expected_s(*entry[1:]) <= left_s][:1]

    def _trusts(self, pipelines: int) -> bool:
        """Whether no end of so many pipelines was found to take much longer than its score; others say little about them."""
        return self.errors.get(pipelines, 1.0) <= TRUSTED

    def _slack(self, pipelines: int) -> float:
        """If it takes so many times as long by its estimate as another one by the judge, a draft of so many takes longer."""
        return CLOSE if self.estimates is not None and self._trusts(pipelines) else SLACK

    def _tuned(self, entry: tuple[float, Draft, Settings]) -> tuple[float, Draft, Settings]:
        """A finalist after the changes that improve it by its estimate, or by its price where there are no estimates."""
        seconds, draft, settings = entry
        rng = np.random.default_rng(self.search.seed)
        for _ in range(TUNINGS):
            for changed in self.variants.of(draft, settings, rng):
                if self.late(TUNED):
                    return seconds, draft, settings
                changed_s = self.draft_s(changed, settings, seconds)
                if changed_s < seconds * (1 - 1e-6):
                    draft, seconds = changed, changed_s
                    break
            else:
                break
        return seconds, draft, settings

    def polish(self, seconds: float, draft: Draft, settings: Settings) -> None:
        """Has changes of the best draft judged while they help, several side by side, the most promising first."""
        left, rng = POLISHED, np.random.default_rng(self.search.seed)
        better = True
        while better and left > 0:
            better = False
            known = []
            for changed in self.variants.of(draft, settings, rng):
                self.search.check_budget()
                known.append((self.draft_s(changed, settings, seconds), changed))
            known.sort(key=lambda entry: entry[0])
            most_s = self._slack(len(draft)) * seconds
            ranked = [(changed, settings) for changed_s, changed in known[:left] if changed_s < most_s]
            for at in range(0, len(ranked), TOGETHER):
                batch = ranked[at : at + TOGETHER]
                left -= len(batch)
                changed_s, (changed, _) = min(zip(self.judged(batch), batch, strict=True), key=lambda entry: entry[0])
                if changed_s < seconds * (1 - 1e-6):
                    draft, seconds, better = changed, changed_s, True
                    break

    def judged(self, drafts: Sequence[tuple[Draft, Settings]]) -> list[float]:
        """Charged seconds of iterations by the search's judge; infinite where a draft cannot run, or keeps all others waiting."""
        plans: list[Plan | None] = []
        for draft, settings in drafts:
            plan = make_plan(self.search.cluster, self.job, draft, settings)
            reason = infeasible(plan, self.search.cluster)
            if reason is not None:
                self.search.reject(plan, reason)
            plans.append(None if reason is not None else plan)
        feasible = [plan for plan in plans if plan is not None and plan not in self._slow]
        verdicts = dict(
            zip(feasible, self.search.consider_all(feasible, self.search.elapsed_s + self._left_s(1.0) / 2), strict=True)
        )
        self._slow.update(plan for plan, verdict in verdicts.items() if verdict is None)

        def seconds(plan: Plan | None) -> float:
            verdict = None if plan is None else verdicts.get(plan)
            return self.charges.judged_s(plan, verdict) if plan is not None and isinstance(verdict, Cost) else math.inf

        told = [seconds(plan) for plan in plans]
        self.least_s = min([self.least_s, *told])
        return told


def _devices(layout: Layout) -> Iterator[str]:
    """The devices of a layout."""
    return (name for pipeline in layout.pipelines for group in pipeline for name in group)


def _is_short(draft: Draft, settings: Settings) -> bool:
    """Whether memory is so short that layers are recomputed or the optimizer's states offloaded."""
    return settings.offload_optimizer or any(part.recompute != "none" for pipeline in draft for part in pipeline.stages)
