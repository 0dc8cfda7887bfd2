"""Motley's own questions: how soon plans are good, what shared links and uneven plans are worth, and what more hardware would be.

Five parts, told apart by the label `part`, all of one job on mixed clusters A and B of HexiScale.

- TIME: searches of more and more seconds.
- LINKS: the same plans where links are shared, as they are, and where every pair of GPUs has a wire of its own. The plans are
  those that planners found on either network (`examples/plans/wires`; `find_plans` finds them anew).
- EVEN: layouts of the GPUs with layers, and micro-batches, dealt evenly or by speed, and found plans made even.
- RATES: searches with network cards of more and more Gbit/s.
- MORE: searches with one more GPU, or one more node, of each kind, beside the best plan that any search found without
  (`CLUSTER.best.json`, there).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from experiments.explain import with_one_more
from experiments.hexiscale import cluster_folder
from experiments.papers.experiment import Experiment, markdown
from experiments.plots import BLACK, BLUE, DOTS_PER_INCH, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from experiments.sweep import Label, Run, given
from experiments.sweep_files import with_bandwidth
from partition.assembly import Assembly, Groups
from partition.batches import Pace, split_batch
from partition.drafts import Settings, make_plan, most_recomputation, settings_of, stage
from partition.layers import even_split, ranges
from partition.planners.megatron import shapes
from partition.pricing import Pricing
from partition.room import Room
from partition.search import plan as search_plan
from sim.cost.network import Network
from sim.spec.cluster import BandwidthMatrix, Cluster, LinkOverride, link_names, read_cluster
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan, Stage, read_plan
from sim.spec.reading import write_file
from sim.spec.schedules import in_flight as held_at
from sim.spec.transformer import transformer

if TYPE_CHECKING:
    import pandas

CLUSTERS = ("hexiscale-mixed-a", "hexiscale-mixed-b")
TIME, LINKS, EVEN, RATES, MORE = "time", "links", "even", "rates", "more"

BUDGETS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
TIMED = {"motley": 3, "flashflex": 3, "pipette": 3, "random": 3, "metis": 1, "sailor": 1, "amp": 1, "megatron": 1}
"""The planners of TIME, and with how many seeds."""

SHARED, OWN = "shared", "own wires"
WIRED = ("motley", "flashflex", "metis", "pipette", "amp", "megatron")
"""The planners of the plans of LINKS, each on both networks."""
WIRED_BUDGET_S = 5.0
NO_LIMIT_BYTES_PER_S = 1e18
"""Of a link that is shared in truth, where wires are not: it never decides a rate."""

EVENLY, BY_SPEED = "even", "by speed"
ACROSS, INSIDE = "across", "inside"
"""Whether pipelines cross the nodes, as in Megatron's order of ranks, or are made of GPUs that follow one another."""

FOUND = "found by motley"

GBIT_PER_S = (1, 2, 5, 10, 25, 50, 100, 200)
RATED = ("motley", "flashflex", "megatron")
RATES_BUDGET_S = 10.0

MORE_BUDGET_S, MORE_SEEDS = 4.0, 3
NOTHING = "nothing"


def _job() -> Job:
    return Job(transformer("llama-2-7b"), sequence_length=2048, global_batch=64)


def _clusters() -> list[Cluster]:
    return [read_cluster(cluster_folder() / f"{name}.yaml") for name in CLUSTERS]


def runs() -> Iterator[Run]:
    """All runs of the five parts."""
    job = _job()
    for cluster in _clusters():
        yield from _over_time(cluster, job)
        yield from _on_wires(cluster, job)
        yield from _even_or_not(cluster, job)
        yield from _over_rates(cluster, job)
        yield from _with_more(cluster, job)


def _over_time(cluster: Cluster, job: Job) -> Iterator[Run]:
    for planner, seeds in TIMED.items():
        for budget_s in BUDGETS_S:
            for seed in range(seeds):
                labels = (("part", TIME), ("asked_s", budget_s))  # so that another budget for all leaves them apart
                yield Run(cluster, job, planner, budget_s=budget_s, seed=seed, labels=labels)


def _over_rates(cluster: Cluster, job: Job) -> Iterator[Run]:
    for rate in GBIT_PER_S:
        slower = with_bandwidth(cluster, f"{rate} Gbit/s")
        for planner in RATED:
            yield Run(slower, job, planner, budget_s=RATES_BUDGET_S, labels=(("part", RATES), ("gbit_per_s", rate)))


def _with_more(cluster: Cluster, job: Job) -> Iterator[Run]:
    known = read_plan(_plan_file(cluster, "best"))
    yield given(cluster, known, labels=(("part", MORE), ("added", NOTHING), ("added_gpus", 0)))
    for name, gpus, larger in more_hardware(cluster):
        labels: tuple[tuple[str, Label], ...] = (("part", MORE), ("added", name), ("added_gpus", gpus))
        for seed in range(MORE_SEEDS):
            yield Run(larger, job, "motley", budget_s=MORE_BUDGET_S, seed=seed, labels=labels)


def more_hardware(cluster: Cluster) -> list[tuple[str, int, Cluster]]:
    """The kind that is added, how many GPUs of it, and the cluster with them: nothing, then of each kind a GPU and a node."""
    found = [(NOTHING, 0, cluster)]
    for kind in dict.fromkeys(node.gpu.name for node in cluster.nodes):
        node = next(node for node in cluster.nodes if node.gpu.name == kind)
        found.append((kind, 1, with_one_more(cluster, node.name)))
        found.append((kind, node.gpus, replace(cluster, nodes=(*cluster.nodes, replace(node, name=f"{node.name}-more")))))
    return found


# --- Wires that are not shared ---------------------------------------------------------------------------------------


def own_wires(cluster: Cluster) -> Cluster:
    """The cluster whose pairs of GPUs have a wire each, of the rate that the pair has while no other uses its links.

    So the network looks to who measures it pair by pair. What a GPU itself can send and receive stays as it is.
    """
    network = Network(cluster)
    names = tuple(device.name for device in cluster.devices)

    def rate(sender: str, receiver: str) -> float:
        links = network.path(sender, receiver).links
        return min((network.links[link].capacity_bytes_per_s / weight for link, weight in links), default=float("inf"))

    matrix = BandwidthMatrix(names, tuple(tuple(rate(a, b) for b in names) for a in names))
    shared = [name for name in sorted(link_names(cluster)) if not set(name.split(">")) & set(names)]
    overrides = tuple(LinkOverride(name, NO_LIMIT_BYTES_PER_S) for name in shared)
    return replace(cluster, bandwidth_matrix=matrix, link_overrides=overrides)


def _on_wires(cluster: Cluster, job: Job) -> Iterator[Run]:
    networks = {SHARED: cluster, OWN: own_wires(cluster)}
    for planner in WIRED:
        for believed in networks:
            plan = read_plan(_wires_file(cluster, planner, believed))
            for links, network in networks.items():
                labels = (("part", LINKS), ("of", planner), ("believed", believed), ("links", links))
                yield given(network, plan, labels=labels)
    for layout, variants in layouts(cluster, job).items():
        for links, network in networks.items():
            labels = (("part", LINKS), ("of", layout), ("believed", NOTHING), ("links", links))
            yield given(network, variants[BY_SPEED, BY_SPEED], labels=labels)


def _wires_file(cluster: Cluster, planner: str, believed: str) -> Path:
    return _plan_file(cluster, f"{planner}.{believed.replace(' ', '-')}")


def _plan_file(cluster: Cluster, name: str) -> Path:
    return cluster_folder().parent / "plans" / "wires" / f"{cluster.name}.{name}.json"


def find_plans() -> None:
    """Finds the plans of LINKS, and writes them to examples/plans/wires."""
    for cluster in _clusters():
        for believed, network in ((SHARED, cluster), (OWN, own_wires(cluster))):
            for planner in WIRED:
                found = search_plan(network, _job(), planner, budget_s=WIRED_BUDGET_S)
                assert found.plan is not None and found.cost is not None
                path = _wires_file(cluster, planner, believed)
                write_file(path, found.plan.to_json(), replace=True)
                print(f"{path.name}: {found.cost.iteration_s:.4g} s, {found.stopped} after {found.seconds:.1f} s")


# --- Even and uneven -------------------------------------------------------------------------------------------------


Dealt = tuple[str, str]
"""How the layers are dealt, and how the micro-batches."""


def _even_or_not(cluster: Cluster, job: Job) -> Iterator[Run]:
    found = read_plan(_wires_file(cluster, "motley", SHARED))
    for layout, variants in {FOUND: evened(cluster, found), **layouts(cluster, job)}.items():
        for (layers, shares), plan in variants.items():
            yield given(cluster, plan, labels=(("part", EVEN), ("layout", layout), ("layers", layers), ("shares", shares)))


def layouts(cluster: Cluster, job: Job) -> dict[str, dict[Dealt, Plan]]:
    """The plans of each layout of the whole cluster whose layers fit in memory when they are dealt by speed.

    A layout has pipelines of as many stages each, of as many GPUs each; the micro-batch is one sequence. By speed, layers are cut
    by the rule of `partition.assembly`, each pipeline's for itself. There is no even share where the batch does not divide.
    """
    dealer = _Dealer(cluster, job)
    found: dict[str, dict[Dealt, Plan]] = {}
    for crossing in shapes(job, cluster.nodes):
        depth, data, tensor = len(crossing[0]), len(crossing), len(crossing[0][0])
        in_order = [group for stages in zip(*crossing, strict=True) for group in stages]
        inside = tuple(tuple(in_order[at : at + depth]) for at in range(0, len(in_order), depth))
        settings = Settings(sequence_parallel=tensor > 1)
        for way, pipelines in ((ACROSS, crossing), (INSIDE, inside)):
            draft = dealer.assembly.draft(pipelines, 1, settings)
            if draft is None or (way == INSIDE and inside == crossing):
                continue
            by_speed = [[held.layer_count for held in pipeline.stages] for pipeline in draft]
            cuts = {EVENLY: [even_split(job.model.layers, depth)] * data, BY_SPEED: by_speed}
            found[f"{data} x {depth} x {tensor}, {way}"] = {
                (layers, shares): dealer.plan(pipelines, cut, 1, settings, shares)
                for layers, cut in cuts.items()
                for shares in (EVENLY, BY_SPEED)
                if shares == BY_SPEED or job.global_batch % data == 0
            }
    return found


def evened(cluster: Cluster, plan: Plan) -> dict[Dealt, Plan]:
    """The plan as it is, and with its layers, its micro-batches or both made even, as far as they divide.

    Its pipelines have micro-batches of one size, and stages of one replica and one range of layers.
    """
    job, micro_batch = plan.job(), plan.pipelines[0].micro_batch
    settings = settings_of(plan)
    groups = [tuple(held.devices for held in pipeline.stages) for pipeline in plan.pipelines]
    even_cuts = [even_split(job.model.layers, len(stages)) for stages in groups]
    own_cuts = [[held.layer_count for held in pipeline.stages] for pipeline in plan.pipelines]
    dealer, found = _Dealer(cluster, job), {(BY_SPEED, BY_SPEED): plan}
    own_shares = [pipeline.micro_batches for pipeline in plan.pipelines]
    held = [pipeline.in_flight if pipeline.stages[0].in_flight is not None else None for pipeline in plan.pipelines]
    found[EVENLY, BY_SPEED] = dealer.plan(groups, even_cuts, micro_batch, settings, own_shares, held)
    if job.global_batch % (len(groups) * micro_batch) == 0:
        for layers, cuts in ((BY_SPEED, own_cuts), (EVENLY, even_cuts)):
            found[layers, EVENLY] = dealer.plan(groups, cuts, micro_batch, settings, EVENLY, held)
    return found


class _Dealer:
    """Makes plans of pipelines whose layers are cut, with shares of the batch, for one job on one cluster."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster, self._job = cluster, job
        self._pricing, self._room = Pricing(cluster, job), Room(cluster, job)
        self.assembly = Assembly(cluster, job, self._pricing)

    def plan(
        self,
        pipelines: Sequence[Groups],
        cuts: Sequence[Sequence[int]],
        micro_batch: int,
        settings: Settings,
        shares: str | Sequence[int],
        in_flight: Sequence[tuple[int, ...] | None] = (),
    ) -> Plan:
        """The plan whose stages hold so many layers each, and recompute as few of them as memory needs.

        `shares` are the micro-batches of each pipeline, or how they are dealt; `in_flight` is how many the stages of each hold,
        where it is not as the schedule says.
        """
        flying = in_flight or [None] * len(pipelines)
        mean = -(-self._job.global_batch // (micro_batch * len(pipelines)))
        counts = [mean] * len(pipelines) if isinstance(shares, str) else shares
        draft = [
            Pipeline(micro_batch, count, self._stages(groups, cut, micro_batch, count, len(pipelines), settings, held))
            for groups, cut, count, held in zip(pipelines, cuts, counts, flying, strict=True)
        ]
        if shares == BY_SPEED:
            paces = [Pace(micro_batch, *self._pricing.course(pipeline, settings).ends()) for pipeline in draft]
            dealt = split_batch(self._job.global_batch, paces)
            assert dealt is not None
            draft = [replace(pipeline, micro_batches=count) for pipeline, count in zip(draft, dealt, strict=True)]
        return make_plan(self._cluster, self._job, tuple(draft), settings)

    def _stages(
        self,
        groups: Groups,
        cut: Sequence[int],
        micro_batch: int,
        count: int,
        pipelines: int,
        settings: Settings,
        in_flight: tuple[int, ...] | None,
    ) -> tuple[Stage, ...]:
        """The stages of a pipeline of so many micro-batches. Where memory is too small, all layers are recomputed."""
        stages, last = [], len(groups) - 1
        for s, (devices, layers) in enumerate(zip(groups, ranges(cut), strict=True)):
            held = self._room.stage(pipelines, len(devices), micro_batch, settings, s == 0, s == last)
            own = None if in_flight is None else in_flight[s]
            flying = held_at(settings.schedule, len(groups), s, count) if own is None else min(own, count)
            amount = held.least_recomputation(self._room.capacity_bytes(devices), cut[s], flying)
            amount = most_recomputation(cut[s]) if amount is None else amount
            stages.append(stage(devices, layers, micro_batch, amount=amount, in_flight=own))
        return tuple(stages)


# --- Reading the rows ------------------------------------------------------------------------------------------------


_Row = Mapping[Any, Any]


def _rows(frame: pandas.DataFrame, part: str, cluster: str) -> list[_Row]:
    """The rows of a part on a cluster."""
    return [row for row in frame.to_dict("records") if (row["part"], row["cluster"]) == (part, cluster)]


def best_known_s(frame: pandas.DataFrame, cluster: str) -> float:
    """The fastest iteration of all rows of a cluster that is as its file says."""
    as_it_is = [*_rows(frame, TIME, cluster), *_rows(frame, EVEN, cluster)]
    as_it_is += [row for row in _rows(frame, LINKS, cluster) if row["links"] == SHARED]
    as_it_is += [row for row in _rows(frame, MORE, cluster) if row["added_gpus"] == 0]
    return min(float(row["iteration_s"]) for row in as_it_is if row["iteration_s"] > 0)


def _qualities(frame: pandas.DataFrame, cluster: str) -> dict[tuple[str, float], list[float]]:
    """The best known iteration over those that the seeds of each search found, by planner and budget; 0 where one found none.

    The budgets are those that the searches had, of which there is one where it was given for all.
    """
    best_s = best_known_s(frame, cluster)
    found: dict[tuple[str, float], list[float]] = {}
    for row in _rows(frame, TIME, cluster):
        seconds = row["iteration_s"]
        found.setdefault((row["planner"], row["budget_s"]), []).append(best_s / seconds if seconds > 0 else 0.0)
    return found


@dataclass(frozen=True)
class _Wired:
    """A plan of LINKS: whose it is, what its search believed of the links, and its seconds on either network."""

    of: str
    believed: str
    seconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.seconds[SHARED] / self.seconds[OWN]


def _wired(frame: pandas.DataFrame, cluster: str) -> list[_Wired]:
    """The plans of LINKS."""
    seconds: dict[tuple[str, str], dict[str, float]] = {}
    for row in _rows(frame, LINKS, cluster):
        seconds.setdefault((row["of"], row["believed"]), {})[row["links"]] = row["iteration_s"]
    return [_Wired(*key, found) for key, found in seconds.items()]


def _fastest(plans: Sequence[_Wired], links: str) -> _Wired:
    return min(plans, key=lambda plan: plan.seconds[links])


def _dealt_s(frame: pandas.DataFrame, cluster: str) -> dict[str, dict[Dealt, float]]:
    """Seconds of every layout by how it is dealt, the fastest layout first; not a number where it does not fit."""
    found: dict[str, dict[Dealt, float]] = {}
    for row in _rows(frame, EVEN, cluster):
        found.setdefault(row["layout"], {})[row["layers"], row["shares"]] = row["iteration_s"]
    return dict(sorted(found.items(), key=lambda entry: min(s for s in entry[1].values() if s > 0)))


@dataclass(frozen=True)
class _Gain:
    """What was added, and what it gains over the best known without it, as fractions: tokens/s (of each seed), peak and price."""

    kind: str
    gpus: int
    each: tuple[float, ...]
    peak: float
    dollars_per_hour: float
    """Not a number where a price is not known."""

    @property
    def best(self) -> float:
        """Of the best seed; the best known plan without the addition counts as found with it."""
        return max(0.0, *self.each)


def _gains(frame: pandas.DataFrame, cluster: str) -> list[_Gain]:
    """The gain of every addition."""
    groups: dict[tuple[str, int], list[_Row]] = {}
    for row in _rows(frame, MORE, cluster):
        groups.setdefault((row["added"], int(row["added_gpus"])), []).append(row)
    before, before_s = groups.pop((NOTHING, 0)), best_known_s(frame, cluster)
    with_mfu = {key: next((row for row in rows if row["mfu"] > 0), rows[0]) for key, rows in groups.items()}
    bare = next((row for row in before if row["mfu"] > 0), before[0])  # what is known may no longer fit, as GPUs are reckoned now

    def per_peak(row: _Row) -> float:
        return float(row["mfu"] * row["iteration_s"])  # the model's FLOP over the cluster's peak

    def price(row: _Row) -> float:
        return float(row["dollars"] / row["iteration_s"])

    return [
        _Gain(
            kind,
            gpus,
            tuple(before_s / row["iteration_s"] - 1 for row in after),
            per_peak(bare) / per_peak(with_mfu[kind, gpus]) - 1,
            price(with_mfu[kind, gpus]) / price(bare) - 1,
        )
        for (kind, gpus), after in groups.items()
    ]


# --- Figures ---------------------------------------------------------------------------------------------------------

_STYLES: Mapping[str, tuple[str, str, str]] = {
    "motley": (BLUE, "-", "o"),
    "flashflex": (ORANGE, "--", "s"),
    "pipette": (GREEN, "-.", "^"),
    "random": (BLACK, ":", "x"),
    "metis": (PURPLE, "--", "D"),
    "sailor": (SKY, "-", "v"),
    "amp": (VERMILLION, "-.", "P"),
    "megatron": ("#606060", ":", "*"),
}
"""Colour, dashes and marker of each planner."""
_DEALT_STYLES: Mapping[Dealt, tuple[str, str, str]] = {
    (EVENLY, EVENLY): ("all even", BLACK, "o"),
    (EVENLY, BY_SPEED): ("micro-batches by speed", GREEN, "^"),
    (BY_SPEED, EVENLY): ("layers by speed", ORANGE, "s"),
    (BY_SPEED, BY_SPEED): ("both by speed", BLUE, "D"),
}


def _style(planner: str) -> dict[str, Any]:
    colour, dashes, marker = _STYLES[planner]
    return {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 5.5, "linewidth": 1.5}


def plot(frame: pandas.DataFrame) -> dict[str, Figure]:
    """The figures of the five parts, a panel for each cluster."""
    return {
        "motley-time": _plot_time(frame),
        "motley-links": _plot_links(frame),
        "motley-even": _plot_even(frame),
        "motley-rates": _plot_rates(frame),
        "motley-more": _plot_more(frame),
    }


def _panels(height_inch: float, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each cluster, side by side."""
    figure = Figure(figsize=(10.4, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, len(CLUSTERS), sharey=share_y, squeeze=False)[0])
    for cluster, ax in zip(CLUSTERS, axes, strict=True):
        ax.set_title(cluster, loc="left", fontsize=10)
        ax.grid(True, color="#E4E4E4", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=9)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return figure, axes


def _log_axis(ax: Axes, which: str, ticks: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers at these places."""
    getattr(ax, f"set_{which}scale")("log")
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend(figure: Figure, ax: Axes, columns: int) -> None:
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelspacing=0.9)


def _plot_time(frame: pandas.DataFrame) -> Figure:
    """Quality over the budget: medians, from the worst to the best seed."""
    figure, axes = _panels(4.6)
    for cluster, ax in zip(CLUSTERS, axes, strict=True):
        qualities = _qualities(frame, cluster)
        budgets_s = sorted({budget_s for _, budget_s in qualities})
        for planner in TIMED:
            each = [qualities[planner, budget_s] for budget_s in budgets_s]
            style = _style(planner)
            if TIMED[planner] > 1:
                lowest, highest = [min(q) for q in each], [max(q) for q in each]
                ax.fill_between(budgets_s, lowest, highest, color=style["color"], alpha=0.12, linewidth=0)
            ax.plot(budgets_s, [median(q) for q in each], label=planner, **style)
        _log_axis(ax, "x", budgets_s)
        ax.set_ylim(0, 1.03)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.set_xlabel("seconds of search, one core")
    axes[0].set_ylabel("quality: best known iteration / found")
    _legend(figure, axes[0], len(TIMED))
    return figure


def _plot_links(frame: pandas.DataFrame) -> Figure:
    """Seconds on wires that are not shared over seconds on shared links."""
    figure, axes = _panels(5.6)
    plans = {cluster: _wired(frame, cluster) for cluster in CLUSTERS}
    everything = [seconds for found in plans.values() for plan in found for seconds in plan.seconds.values()]
    low, high = min(everything) / 1.1, max(everything) * 1.1
    for cluster, ax in zip(CLUSTERS, axes, strict=True):
        ax.plot([low, high], [low, high], color="#909090", linewidth=1.0, label="equally fast")
        for believed, label, colour, marker in (
            (NOTHING, "layouts, dealt by speed", "#808080", "o"),
            (SHARED, "found where links are shared", BLUE, "s"),
            (OWN, "found where wires are not shared", ORANGE, "^"),
        ):
            own = [plan for plan in plans[cluster] if plan.believed == believed]
            x, y = [plan.seconds[SHARED] for plan in own], [plan.seconds[OWN] for plan in own]
            ax.plot(x, y, marker, color=colour, markersize=5.5, alpha=0.85, label=label)
        for links, label, marker in ((SHARED, "fastest with shared links", "o"), (OWN, "fastest without sharing", "s")):
            best = _fastest(plans[cluster], links).seconds
            ring: dict[str, Any] = {"markersize": 14, "markerfacecolor": "none", "linestyle": "none"}
            ax.plot(best[SHARED], best[OWN], marker, label=label, color=VERMILLION, markeredgewidth=1.6, **ring)
        for which in "xy":
            _log_axis(ax, which, (2, 3, 4, 5, 7, 10, 15, 20, 30))
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        ax.set_xlabel("iteration with shared links, in s")
    axes[0].set_ylabel("the same with a wire for each pair of GPUs, in s")
    _legend(figure, axes[0], 3)
    return figure


def _plot_even(frame: pandas.DataFrame) -> Figure:
    """Seconds of each layout, dealt in four ways."""
    figure, axes = _panels(7.6, share_y=False)
    for cluster, ax in zip(CLUSTERS, axes, strict=True):
        found = list(reversed(_dealt_s(frame, cluster).items()))
        for place, (_, seconds) in enumerate(found):
            fitting = [s for s in seconds.values() if s > 0]
            ax.hlines(place, min(fitting), max(fitting), color="#B0B0B0", linewidth=1.2, zorder=1)
        for dealt, (label, colour, marker) in _DEALT_STYLES.items():
            filled = dealt[0] == dealt[1]
            style: dict[str, Any] = {"markerfacecolor": colour if filled else "none", "markersize": 6 if filled else 8}
            x = [seconds.get(dealt, float("nan")) for _, seconds in found]
            ax.plot(x, range(len(found)), marker, label=label, markeredgecolor=colour, linestyle="none", **style)
        ax.set_yticks(range(len(found)), [layout for layout, _ in found], fontsize=8)
        _log_axis(ax, "x", (3, 4, 5, 7, 10, 15, 20, 30))
        ax.set_xlabel("iteration, in s")
    axes[0].set_ylabel("pipelines x stages x GPUs of a stage, and which GPUs a pipeline has")
    _legend(figure, axes[0], len(_DEALT_STYLES))
    return figure


def _plot_rates(frame: pandas.DataFrame) -> Figure:
    """MFU over the rate of the network cards."""
    figure, axes = _panels(4.4)
    for cluster, ax in zip(CLUSTERS, axes, strict=True):
        for planner in RATED:
            found = [(row["gbit_per_s"], row["mfu"]) for row in _rows(frame, RATES, cluster) if row["planner"] == planner]
            ax.plot(*zip(*found, strict=True), label=planner, **_style(planner))
        _log_axis(ax, "x", GBIT_PER_S)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.set_xlabel("rate of each node's network card, in Gbit/s")
    axes[0].set_ylim(bottom=0)  # once both panels, which share it, are drawn
    axes[0].set_ylabel("MFU of the plan found, all GPUs counted")
    _legend(figure, axes[0], len(RATED))
    return figure


def _plot_more(frame: pandas.DataFrame) -> Figure:
    """The gain in tokens/s of a GPU and of a node more, each beside what it adds to the peak."""
    figure, axes = _panels(4.4)
    for cluster, ax in zip(CLUSTERS, axes, strict=True):
        gains = _gains(frame, cluster)
        kinds = list(dict.fromkeys(gain.kind for gain in gains))
        for gain in gains:
            alone, first = gain.gpus == 1, gain.kind == kinds[0]
            at = kinds.index(gain.kind) + (-0.2 if alone else 0.2)
            face, hatch = (SKY, None) if alone else ("#FFFFFF", "////")
            ax.bar(at, gain.best, 0.36, facecolor=face, edgecolor=BLUE, hatch=hatch, zorder=2)
            if first:  # the legend; a hatch that its handle shows as the bars do
                ax.bar(at, 0, 0.36, facecolor=face, edgecolor=BLUE, hatch=hatch, label=_added(gain.gpus))
            ax.vlines(at, min(gain.each), max(gain.each), color=BLACK, linewidth=1.4, zorder=3)
            ax.hlines(gain.peak, at - 0.2, at + 0.2, color=VERMILLION, linewidth=2.2, zorder=4)
        ax.plot([], [], color=VERMILLION, linewidth=2.2, label="what it adds to the peak FLOP/s")
        ax.plot([], [], color=BLACK, linewidth=1.4, label="from the worst to the best seed")
        ax.axhline(0, color="#606060", linewidth=0.8)
        ax.set_xticks(range(len(kinds)), [kind.removesuffix("-SXM") for kind in kinds])
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylabel("gain in tokens/s over the best known plan")
    _legend(figure, axes[0], 4)
    return figure


def _added(gpus: int) -> str:
    return "one GPU more" if gpus == 1 else f"one node of {gpus} more"


# --- The table -------------------------------------------------------------------------------------------------------


def table(frame: pandas.DataFrame) -> str:
    """The numbers of the five parts, a table each."""
    parts = (
        ("Quality of the plan found (best known iteration / found): medians over seeds, in brackets the worst", _time_lines),
        ("Seconds of the same plans with shared links, and with a wire for each pair of GPUs", _links_lines),
        ("Layers and micro-batches, even or by speed: seconds of an iteration (- does not fit, or does not divide)", _even_lines),
        ("MFU by the rate of the network cards", _rates_lines),
        ("What more GPUs gain over the best known plan without them, which counts as found", _more_lines),
    )
    return "\n".join(f"**{heading}**\n\n{markdown(*lines(frame))}" for heading, lines in parts)


_Lines = tuple[list[str], list[list[str]]]
"""The heads and the lines of a table."""


def _time_lines(frame: pandas.DataFrame) -> _Lines:
    lines, budgets_s = [], sorted({row["budget_s"] for cluster in CLUSTERS for row in _rows(frame, TIME, cluster)})
    for cluster in CLUSTERS:
        qualities = _qualities(frame, cluster)
        for planner in TIMED:
            each = [qualities[planner, budget_s] for budget_s in budgets_s]
            cells = [f"{median(q):.0%}" + (f" ({min(q):.0%})" if len(q) > 1 else "") for q in each]
            lines.append([f"{cluster}, {planner}", *cells])
    return ["cluster, planner", *[f"{budget_s:g} s" for budget_s in budgets_s]], lines


def _links_lines(frame: pandas.DataFrame) -> _Lines:
    from scipy.stats import kendalltau  # half a second, which a list of the experiments does not wait for

    lines = []
    for cluster in CLUSTERS:
        plans = _wired(frame, cluster)
        grids = [plan for plan in plans if plan.believed == NOTHING]
        lines += [[f"{cluster}, {_whose(plan)}", *_seconds(plan)] for plan in plans if plan.believed != NOTHING]
        medians = [median(plan.seconds[links] for plan in grids) for links in (SHARED, OWN)]
        ratio = median(plan.ratio for plan in grids)
        lines.append([f"{cluster}, {len(grids)} layouts, medians", *[f"{s:.2f}" for s in medians], f"{ratio:.2f}"])
        most = max(grids, key=lambda plan: plan.ratio)
        lines.append([f"{cluster}, the layout that gains most: {_whose(most)}", *_seconds(most)])
        for links, what in ((SHARED, "fastest with shared links"), (OWN, "fastest without sharing")):
            best = _fastest(plans, links)
            lines.append([f"{cluster}, {what}: {_whose(best)}", *_seconds(best)])
        tau = kendalltau(*[[plan.seconds[links] for plan in plans] for links in (SHARED, OWN)]).statistic
        lines.append([f"{cluster}, Kendall's tau of the two orders of {len(plans)} plans", "", "", f"{tau:.2f}"])
    return ["plan", "shared links, s", "own wires, s", "ratio"], lines


def _whose(plan: _Wired) -> str:
    beliefs = {NOTHING: "", SHARED: ", found where links are shared", OWN: ", found where they are not"}
    return plan.of + beliefs[plan.believed]


def _seconds(plan: _Wired) -> list[str]:
    return [f"{plan.seconds[SHARED]:.2f}", f"{plan.seconds[OWN]:.2f}", f"{plan.ratio:.2f}"]


def _even_lines(frame: pandas.DataFrame) -> _Lines:
    lines = []
    for cluster in CLUSTERS:
        for layout, seconds in _dealt_s(frame, cluster).items():
            cells = [f"{seconds[dealt]:.2f}" if seconds.get(dealt, 0) > 0 else "-" for dealt in _DEALT_STYLES]
            lines.append([f"{cluster}, {layout}", *cells])
    return ["cluster, pipelines x stages x GPUs of a stage", *[label for label, *_ in _DEALT_STYLES.values()]], lines


def _rates_lines(frame: pandas.DataFrame) -> _Lines:
    lines = []
    for cluster in CLUSTERS:
        for planner in RATED:
            found = [row["mfu"] for row in _rows(frame, RATES, cluster) if row["planner"] == planner]
            lines.append([f"{cluster}, {planner}", *[f"{mfu:.1%}" if mfu > 0 else "no plan" for mfu in found]])
    return ["cluster, planner", *[f"{rate} Gbit/s" for rate in GBIT_PER_S]], lines


def _more_lines(frame: pandas.DataFrame) -> _Lines:
    lines = []
    for cluster in CLUSTERS:
        for gain in _gains(frame, cluster):
            name, seeds = f"{cluster}, {gain.gpus} {gain.kind}", f"{min(gain.each):+.1%} to {max(gain.each):+.1%}"
            lines.append([name, f"{gain.best:+.1%}", seeds, f"{gain.peak:+.1%}", f"{gain.dollars_per_hour:+.1%}"])
    return ["cluster, added", "tokens/s", "by seed", "peak FLOP/s", "dollars per hour"], lines


MOTLEY = Experiment(
    name="motley",
    paper="Motley's own",
    question="How soon are plans good, and what are shared links, uneven plans, faster networks and more GPUs worth?",
    runs=runs,
    plot=plot,
    table=table,
)
