"""Pipette's questions (arXiv 2405.18093): what are its latency model, check of memory and placement worth on uneven links?

Clusters are drawn: nodes of eight GPUs, and between every two of them a measured rate in each direction. Five parts, told apart
by the label `part`:

    judged     the planners as they are: they know the rates, nothing that they answer lacks memory, and the best is simulated
    alone      what planners answer by their own models, as the paper compares them: see `Alone`
    scarce     the same where memory is scarce
    estimates  plans on which the latency and the memory models are compared with the simulation
    overhead   how long searches take on more and fewer nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from textwrap import fill
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.papers.experiment import Experiment, markdown
from experiments.plots import BLACK, BLUE, DOTS_PER_INCH, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from experiments.sweep import Label, Run, given
from partition.drafts import Draft, Settings, degrees, judge_in_order, make_plan, usable_nodes
from partition.planners import amp, pipette, varuna
from partition.planners.megatron import grids
from partition.pricing import Pricing
from partition.room import Room
from partition.search import Planner, Search, register
from sim.cost.memory import lane_parts
from sim.spec.cluster import BandwidthMatrix, Cluster, parse_cluster
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Plan
from sim.spec.transformer import transformer

if TYPE_CHECKING:
    import pandas

# --- The clusters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """A node of eight GPUs in short: its GPUs, their interconnect, its InfiniBand card, and the precision that it trains in."""

    gpu: str
    intra: str
    card: str
    precision: str


MACHINES: Mapping[str, Machine] = {
    "V100": Machine("V100-32GB-SXM", "nvlink", "100 Gbit/s", "fp16"),
    "A100": Machine("A100-80GB-SXM", "nvswitch", "200 Gbit/s", "bf16"),
}
SMALL_V100 = replace(MACHINES["V100"], gpu="V100-16GB-SXM")
SMALL_A100 = replace(MACHINES["A100"], gpu="A100-40GB-SXM")

GLOBAL_BATCH = 128


def _jobs() -> dict[str, Job]:
    """The job of each machine. That of A100 is in a script of Pipette's program, but in fp32, where here it is in bf16."""
    wide = replace(
        transformer("gpt3-2.7b"), name="gpt-8.1b", layers=64, hidden=3072, ffn=12288, heads=24, kv_heads=24, head_dim=128
    )
    models = {"V100": transformer("gpt3-2.7b"), "A100": wide}
    return {kind: Job(model, 1024, GLOBAL_BATCH, precision=MACHINES[kind].precision) for kind, model in models.items()}


SCARCE: Sequence[tuple[Machine, str]] = (
    (SMALL_V100, "gpt3-2.7b"),
    (SMALL_V100, "gpt3-6.7b"),
    (MACHINES["V100"], "gpt3-6.7b"),
    (MACHINES["V100"], "gpt3-13b"),
    (SMALL_A100, "gpt3-13b"),
    (SMALL_A100, "megatron-18.4b"),
    (MACHINES["A100"], "megatron-22b"),
    (MACHINES["A100"], "megatron-39.1b"),
)
"""Machines and models of the part `scarce`, with 2048 tokens in a sequence."""

NODES, FEW_NODES = 8, 4
DRAWS = (0, 1, 2)
"""Clusters of the same kind: their rates are drawn with these seeds."""

CHANCES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
ATTAINED: Mapping[str, Sequence[float]] = {
    "logged": (0.671, 0.687, 0.728, 0.744, 0.754, 0.766, 0.792),
    "uneven": (0.20, 0.235, 0.375, 0.55, 0.725, 0.865, 0.90),
}
"""What a link between two nodes attains of its card's nominal rate, at CHANCES of its distribution.

`logged` are the quantiles of 240 directed pairs of 16 nodes of eight A100 on 200 Gbit/s InfiniBand, measured with mpiGraph by
Pipette's authors (github.com/yimjinkyu1/date2024_pipette, Megatron-LM-2.5/mpigraph/vivaldi-master/time_1.json, "0"). `uneven` is
assumed: as likely at 20 per cent of the rate as at 90. What the links of the paper's own clusters attained is not published.
"""


def drawn_cluster(machine: Machine, nodes: int, links: str, draw: int) -> Cluster:
    """The cluster of so many such nodes, with the rate between every two of them drawn, in each direction by itself.

    `links` is one of ATTAINED; equal arguments give equal clusters.
    """
    name = f"{machine.gpu}-{nodes}x8-{links}-{draw}".lower()
    card = f"{{kind: infiniband, bandwidth: {machine.card}}}"
    count = f"{{name: n, count: {nodes}, gpu: {machine.gpu}, gpus: 8, intra: {machine.intra}, nic: {card}}}"
    cluster = parse_cluster(f"name: {name}\nnodes: [{count}]\nfabric: {{latency: 5 us}}\nstack: megatron\n", name)
    rates = np.interp(np.random.default_rng(draw).random((nodes, nodes)), CHANCES, ATTAINED[links])
    np.fill_diagonal(rates, np.inf)
    assert cluster.nodes[0].nic is not None
    rates *= cluster.nodes[0].nic.bandwidth_bytes_per_s
    matrix = BandwidthMatrix(tuple(node.name for node in cluster.nodes), tuple(tuple(row) for row in rates.tolist()))
    return replace(cluster, bandwidth_matrix=matrix)


# --- Planners that are alone with their own models ---------------------------------------------------------------------

MOST_TRIED = 20
"""So many of its recommendations are tried, the one it likes best first, until one has the memory that it needs."""

BOUNDLESS_BYTES = 10**15

SETTINGS = Settings(schedule="1f1b", zero_stage=0, sequence_parallel=False)
"""What Megatron-LM 2.5, on which the paper's plans run, can do: all are tried under it."""

Recommended: TypeAlias = Iterable[tuple[Draft, Settings]]


def naive_bytes(plan: Plan, cluster: Cluster) -> int:
    """Bytes on the fullest GPU, by parameters, gradients, optimizer states and kept activations alone.

    Left out is what a user's arithmetic leaves out: logits, what the layer at work needs, buffers, the library's context,
    fragmentation.
    """
    held = (parts for _, _, _, parts in lane_parts(plan, cluster.stack))
    return max(parts.parameters + parts.gradients + parts.optimizer + parts.activations for parts in held)


class NaiveRoom(Room):
    """The memory as `naive_bytes` has it."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        super().__init__(cluster, job)
        self._naive = cluster, job

    def fits(self, draft: Draft, settings: Settings) -> bool:
        """Whether the draft fits on the smallest GPU, by `naive_bytes`."""
        cluster, job = self._naive
        least = min(node.gpu.memory_bytes for node in cluster.nodes)
        return naive_bytes(make_plan(cluster, job, draft, settings), cluster) <= least


def alone(recommended: Callable[[Search], Recommended], search: Search) -> None:
    """A planner: has what is recommended judged, the first first, until a plan fits.

    So the search's best plan is what a user without a simulator ends up with, and `judged` says how many plans were tried.
    """
    for draft, settings in islice(recommended(search), MOST_TRIED):
        if isinstance(search.consider(make_plan(search.cluster, search.job, draft, settings)), Cost):
            return


def _nominal(search: Search, boundless: bool = False) -> Search:
    """The same search where every link has its nominal rate, and if asked, GPUs all the memory that anyone could want."""
    nodes = search.cluster.nodes
    if boundless:
        nodes = tuple(replace(node, gpu=replace(node.gpu, memory_bytes=BOUNDLESS_BYTES)) for node in nodes)
    return Search(search.cluster.with_nodes(nodes), search.job, search.judge, search.seed, search.budget_s)


def pipette_alone(search: Search, steps: int = pipette.STEPS, whole_nodes: bool = False) -> Recommended:
    """What Pipette's latency model likes best, by the rates as they are measured and the memory as it is judged."""
    for entry in pipette.ranked(search, usable_nodes(search), steps, whole_nodes):
        yield entry.grid.draft(entry.order), SETTINGS


def amp_alone(search: Search, recompute: Sequence[str] = amp.RECOMPUTE) -> Recommended:
    """What AMP's cost model likes best, by nominal rates and without a thought of memory."""
    blind = _nominal(search, boundless=True)
    for strategy in amp.ranked(blind, usable_nodes(blind)):
        if strategy.recompute in recompute:
            yield amp.drafted(blind.job, strategy), SETTINGS


def varuna_alone(search: Search) -> Recommended:
    """What Varuna's simulation finds fastest, by nominal rates and the naive count of memory."""
    blind = _nominal(search)
    room = NaiveRoom(blind.cluster, blind.job)
    for _, draft in varuna.ranked(blind, usable_nodes(blind), room):
        yield draft, SETTINGS


def megatron_alone(search: Search) -> Recommended:
    """Megatron-LM's grids, the fastest by our price first, by nominal rates and the naive count of memory."""
    blind = _nominal(search)
    pricing, room = Pricing(blind.cluster, blind.job), NaiveRoom(blind.cluster, blind.job)
    drafts = [
        draft
        for draft, settings in grids(blind, usable_nodes(blind))
        if settings.zero_stage == 0 or len(draft) == 1  # one pipeline alone has nothing to divide
        if all(part.recompute != "selective" for part in draft[0].stages)
    ]
    prices = [pricing.price_s(draft, SETTINGS) for draft in drafts]
    for n in sorted(range(len(drafts)), key=lambda n: prices[n]):
        if room.fits(drafts[n], SETTINGS):
            yield drafts[n], SETTINGS


def pipette_nodes(search: Search) -> None:
    """The planner `pipette`, but for what it moves: whole nodes, as the published program does, and not single workers."""
    best_first = pipette.ranked(search, usable_nodes(search), whole_nodes=True)
    judge_in_order(search, ((entry.grid.draft(entry.order), pipette.SETTINGS) for entry in best_first[: pipette.JUDGED]))


VARIANTS: Mapping[str, Planner] = {
    "pipette-nodes": pipette_nodes,
    "pipette-nodes-alone": partial(alone, partial(pipette_alone, whole_nodes=True)),
    "pipette-workers-alone": partial(alone, pipette_alone),
    "pipette-ranks-alone": partial(alone, partial(pipette_alone, steps=0)),
    "megatron-alone": partial(alone, megatron_alone),
    "amp-alone": partial(alone, amp_alone),
    "amp-recomputing-alone": partial(alone, partial(amp_alone, recompute=("full",))),
    "varuna-alone": partial(alone, varuna_alone),
}
"""By the name that they are registered under when the runs are made. `ranks`: the workers keep the ranks of Megatron-LM."""


# --- The runs ----------------------------------------------------------------------------------------------------------

JUDGED = ("pipette-nodes", "pipette", "megatron", "amp", "varuna", "motley")
ALONE = tuple(name for name in VARIANTS if name.endswith("-alone"))
RECOMMENDING = ("pipette-nodes-alone", "megatron-alone", "amp-alone", "amp-recomputing-alone", "varuna-alone")
"""Whose recommendations are tried where memory is scarce."""
OVERHEAD_NODES = (4, 16)
"""How long searches take on eight nodes, the part `judged` says."""
BUDGET_S, MOTLEY_BUDGET_S = 30.0, 10.0
"""Long enough for searches to end by themselves; that of `motley`, which is given less, goes on for as long as it may."""

SAMPLED = 4
"""So many grids of each tensor-parallel degree, from the shallowest to the deepest, are taken on each cluster in `estimates`."""


def runs() -> Iterator[Run]:
    """All runs, in their order; the planners of `VARIANTS` are registered with it."""
    for name, variant in VARIANTS.items():
        register(name)(variant)
    jobs = _jobs()
    for kind, machine in MACHINES.items():
        for links in ATTAINED:
            for draw in DRAWS:
                cluster = drawn_cluster(machine, NODES, links, draw)
                for part, planners in (("judged", JUDGED), ("alone", ALONE)):
                    for planner in planners:
                        yield _search(part, cluster, jobs[kind], planner, kind=kind, links=links, draw=draw)
    for machine, model in SCARCE:
        cluster = drawn_cluster(machine, FEW_NODES, "uneven", 0)
        job = Job(transformer(model), 2048, GLOBAL_BATCH, precision=machine.precision)
        for planner in RECOMMENDING:
            yield _search("scarce", cluster, job, planner, kind=machine.gpu, links="uneven", draw=0)
    yield from _estimates(jobs)
    machine = MACHINES["A100"]
    for nodes in OVERHEAD_NODES:
        cluster = drawn_cluster(machine, nodes, "uneven", 0)
        for planner in JUDGED:
            yield _search("overhead", cluster, jobs["A100"], planner, kind="A100", links="uneven", draw=0)


def _search(part: str, cluster: Cluster, job: Job, planner: str, **labels: Label) -> Run:
    budget_s = MOTLEY_BUDGET_S if planner == "motley" else BUDGET_S
    return Run(cluster, job, planner, budget_s=budget_s, labels=(("part", part), *labels.items()))


def _estimates(jobs: Mapping[str, Job]) -> Iterator[Run]:
    """Each sampled plan judged by simulation, with what the models say of it, and judged by the estimate."""
    for kind, machine in MACHINES.items():
        for links in ATTAINED:
            cluster = drawn_cluster(machine, NODES, links, DRAWS[0])
            for case, (plan, labels) in enumerate(_sample(cluster, jobs[kind])):
                told: tuple[tuple[str, Label], ...] = (
                    ("part", "estimates"),
                    ("kind", kind),
                    ("links", links),
                    ("draw", DRAWS[0]),
                    ("case", case),
                    *labels.items(),
                )
                yield given(cluster, plan, "simulate", labels=told)
                yield given(cluster, plan, "estimate", labels=told)


def _sample(cluster: Cluster, job: Job) -> Iterator[tuple[Plan, dict[str, Label]]]:
    """Plans of some of Pipette's grids on all GPUs, in three placements, and what the models say of them.

    `ranks`: as Megatron-LM numbers workers; `nodes`: the nodes drawn; `workers`: each worker drawn.
    """
    pricing, room, nodes = Pricing(cluster, job), Room(cluster, job), cluster.nodes
    measured = amp.CostModel(cluster, job, nodes)
    nominal = amp.CostModel(replace(cluster, bandwidth_matrix=None), job, nodes)
    rng = np.random.default_rng(0)
    sampled = []
    for degree in degrees(job, 8):
        workers = pipette.Workers(pricing, nodes, degree)
        tried = (
            pipette.Grid(workers, pricing, room, pipeline, micro_batch, mode)
            for pipeline, micro_batch in pipette.shapes(job, len(workers))
            for mode in pipette.RECOMPUTE_MODES
        )
        fitting = [grid for grid in tried if grid.start is not None]
        sampled += [fitting[int(n)] for n in np.linspace(0, len(fitting) - 1, SAMPLED).round()]
    for grid in sampled:
        ranks = np.arange(len(grid.workers), dtype=np.int64)
        by_node = rng.permutation(ranks.reshape(len(nodes), -1)).ravel()
        for placement, order in (("ranks", ranks), ("nodes", by_node), ("workers", rng.permutation(ranks))):
            draft = grid.draft(order)
            plan = make_plan(cluster, job, draft, pipette.SETTINGS)
            lanes = tuple(tuple(part.replicas[0].devices for part in line.stages) for line in draft)
            strategy = amp.Strategy(lanes, grid.micro_batch, grid.recompute, tuple(part.layer_count for part in draft[0].stages))
            yield (
                plan,
                {
                    "placement": placement,
                    "degree": len(grid.workers.devices[0]),
                    "stages": grid.pipeline,
                    "pipette_s": grid.latency_s(order),
                    "amp_s": measured.seconds(strategy),
                    "amp_nominal_s": nominal.seconds(strategy),
                    "room_bytes": float(max(grid.need_bytes)),
                    "naive_bytes": float(naive_bytes(plan, cluster)),
                },
            )


# --- What is drawn and told of the rows ----------------------------------------------------------------------------------

NAMES: Mapping[str, str] = {
    "pipette-nodes": "Pipette, nodes moved",
    "pipette-workers": "Pipette, workers moved",
    "pipette-ranks": "Pipette, nothing moved",
    "megatron": "Megatron-LM grid",
    "amp": "AMP",
    "amp-recomputing": "AMP, recomputing",
    "varuna": "Varuna",
    "motley": "Motley",
}
STYLES: Mapping[str, tuple[str, str]] = {
    "pipette-nodes": (BLUE, "o"),
    "pipette-workers": (SKY, "s"),
    "pipette-ranks": (PURPLE, "D"),
    "megatron": (BLACK, "^"),
    "amp": (ORANGE, "v"),
    "amp-recomputing": (ORANGE, "P"),
    "varuna": (VERMILLION, "X"),
    "motley": (GREEN, "*"),
}
"""Colour and marker of each planner."""

PLACEMENTS: Mapping[str, tuple[str, str, str]] = {
    "ranks": ("Megatron-LM's ranks", BLUE, "o"),
    "nodes": ("nodes drawn", ORANGE, "^"),
    "workers": ("workers drawn", VERMILLION, "x"),
}
MODELS: Mapping[str, str] = {
    "pipette_s": "Pipette's latency model",
    "amp_s": "AMP's cost model, measured rates",
    "amp_nominal_s": "AMP's cost model, nominal rates",
    "estimate_s": "Motley's estimate",
}
GIB = 2**30
DEPTHS = (("1 to 4 stages", 1, 4), ("8 or 16", 8, 16), ("32 or 64", 32, 64))


def _frame_of(frame: pandas.DataFrame, *parts: str) -> pandas.DataFrame:
    """The rows of some parts, with the planner's name without what tells variants from planners."""
    found = frame[frame["part"].isin(parts)].copy()
    found["name"] = found["planner"].str.removesuffix("-alone").replace("pipette", "pipette-workers")
    return found


def _ratios(frame: pandas.DataFrame, part: str) -> dict[tuple[str, str], dict[str, tuple[float, float, float]]]:
    """What each planner's plan takes over Pipette's (nodes moved): median, least and most of the draws, by cluster and name."""
    rows = _frame_of(frame, part)
    seconds = rows.pivot_table(index=["kind", "links", "draw"], columns="name", values="iteration_s", sort=False)
    found: dict[tuple[str, str], dict[str, tuple[float, float, float]]] = {}
    for kind, links in dict.fromkeys(zip(rows["kind"], rows["links"], strict=True)):
        own = seconds.xs((kind, links))
        ratios = {name: own[name] / own["pipette-nodes"] for name in NAMES if name in own and name != "pipette-nodes"}
        found[kind, links] = {name: (each.median(), each.min(), each.max()) for name, each in ratios.items()}
    return found


def _estimated(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The sampled plans, with what the simulation and all models say of each."""
    rows = frame[frame["part"] == "estimates"]
    keys = ["kind", "links", "case"]
    estimate = rows[rows["judge"] == "estimate"].set_index(keys)["iteration_s"]
    found = rows[rows["judge"] == "simulate"].set_index(keys)
    return found.assign(estimate_s=estimate).reset_index()


def plot(frame: pandas.DataFrame) -> Mapping[str, Figure]:
    """The figures: speed-ups, errors of latency, errors of memory with what is tried, and seconds of search."""
    return {
        "pipette-speedup": _plot_speedups(frame),
        "pipette-latency": _plot_latency(frame),
        "pipette-memory": _plot_memory(frame),
        "pipette-overhead": _plot_overhead(frame),
    }


def _axes(width_inch: float, height_inch: float, columns: int, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width_inch, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, sharey=sharey, squeeze=False)[0])
    for ax in axes:
        ax.grid(True, color="#E4E4E4", linewidth=0.8)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return figure, axes


def _log_ticks(ax: Axes, which: str, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """A logarithmic axis with these ticks and no others."""
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_ticks(list(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _plot_speedups(frame: pandas.DataFrame) -> Figure:
    """What each planner's plan takes over what Pipette's takes; the dot is the median draw, the line the range."""
    figure, axes = _axes(11.0, 5.2, 2)
    titles = {"alone": "what each answers by its own models", "judged": "measured rates, memory checked, best of those simulated"}
    seen: dict[str, None] = {}
    for ax, (part, title) in zip(axes, titles.items(), strict=True):
        groups = _ratios(frame, part)
        for g, ratios in enumerate(groups.values()):
            for n, (name, (middle, low, high)) in enumerate(ratios.items()):
                x, (colour, marker) = g + 0.8 * ((n + 0.5) / len(ratios) - 0.5), STYLES[name]
                ax.plot([x, x], [low, high], color=colour, linewidth=2)
                ax.plot([x], [middle], color=colour, marker=marker, markersize=9 if marker == "*" else 7, linestyle="none")
            seen |= dict.fromkeys(ratios)
        ax.axhline(1, color=BLUE, linewidth=1.2, linestyle="--")
        ax.set_xticks(range(len(groups)), [f"{kind}\n{links}" for kind, links in groups])
        ax.grid(False, axis="x")
        for g in range(1, len(groups)):
            ax.axvline(g - 0.5, color="#B0B0B0", linewidth=0.8)
        ax.set_title(title, loc="left", fontsize=11)
        _log_ticks(ax, "y", (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2, 2.5, 3), lambda value: f"{value:g}")
    axes[0].set_ylabel("iteration / iteration of Pipette's plan\n(nodes moved)")
    handles = [_mark(NAMES[name], *STYLES[name]) for name in NAMES if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _mark(label: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=8, label=label)


def _plot_latency(frame: pandas.DataFrame) -> Figure:
    """What each model predicts over what is simulated, for the sampled plans."""
    plans = _estimated(frame)
    figure, axes = _axes(11.0, 4.2, len(MODELS))
    for ax, (column, title) in zip(axes, MODELS.items(), strict=True):
        for placement, (_, colour, marker) in PLACEMENTS.items():
            rows = plans[plans["placement"] == placement]
            ratio = rows[column] / rows["iteration_s"]
            ax.scatter(rows["iteration_s"], ratio, s=26, color=colour, marker=marker, linewidths=1.2, alpha=0.85)
        ax.axhline(1, color=BLACK, linewidth=1)
        ax.set_title(fill(title, 20), fontsize=10)
        _log_ticks(ax, "x", (1, 2, 5, 10), lambda value: f"{value:g}")
        _log_ticks(ax, "y", (0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5), lambda value: f"{value:g}")
        ax.set_xlabel("simulated iteration (s)")
    axes[0].set_ylabel("predicted / simulated")
    handles = [_mark(*style) for style in PLACEMENTS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _plot_memory(frame: pandas.DataFrame) -> Figure:
    """Left, the counts of memory over the simulated peak; right, which recommendation is the first that fits."""
    plans = _estimated(frame)
    figure, (left, right) = _axes(11.0, 4.6, 2, sharey=False)
    shown = {"room_bytes": ("Pipette's, as here: exact", BLUE, "o"), "naive_bytes": ("naive sum", VERMILLION, "x")}
    for column, (_, colour, marker) in shown.items():
        left.scatter(plans["peak_bytes"] / GIB, plans[column] / plans["peak_bytes"], s=26, color=colour, marker=marker)
    left.set_xlabel("simulated peak of the fullest GPU (GiB)")
    left.set_ylabel("counted / simulated")
    left.set_ylim(0, 1.1)
    left.set_title("counts of memory", loc="left", fontsize=11)
    left.legend(handles=[_mark(*style) for style in shown.values()], loc="lower right", frameon=False)
    tries = _tries(frame)
    cells = tries.to_numpy(dtype=float)
    right.grid(False)
    right.set_title("which recommendation is the first that fits", loc="left", fontsize=11)
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            colour = "#FFFFFF" if value == 1 else ORANGE if value <= MOST_TRIED else VERMILLION
            right.barh(y, 1, left=x - 0.5, height=1, color=colour, edgecolor="#B0B0B0")
            text = f"{value:.0f}" if value <= MOST_TRIED else f"> {MOST_TRIED}"
            right.text(x, y, text, ha="center", va="center", fontsize=10, fontweight="normal" if value == 1 else "bold")
    right.set_xticks(range(tries.shape[1]), [fill(NAMES[str(name)], 13) for name in tries], fontsize=8)
    right.set_yticks(range(tries.shape[0]), [f"{kind.removesuffix('-SXM')}, {model}" for kind, model in tries.index], fontsize=8)
    right.set_xlim(-0.5, tries.shape[1] - 0.5)
    right.set_ylim(tries.shape[0] - 0.5, -0.5)
    right.tick_params(length=0)
    return figure


def _tries(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Where memory is scarce, the number of the first recommendation that fits; one more than MOST_TRIED where none does."""
    rows = _frame_of(frame, "scarce")
    rows["tries"] = rows["judged"].where(rows["iteration_s"].notna(), MOST_TRIED + 1)
    table = rows.pivot_table(index=["kind", "model"], columns="name", values="tries", sort=False)
    return table[[name for name in NAMES if name in table]]


def _searches(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Seconds of search by planner and GPUs, on the first uneven draw of A100."""
    rows = _frame_of(frame, "judged", "overhead")
    rows = rows[(rows["kind"] == "A100") & (rows["links"] == "uneven") & (rows["draw"] == 0)]
    table = rows.pivot_table(index="name", columns="gpus", values="wall_s")
    return table.loc[[name for name in NAMES if name in table.index]]


def _plot_overhead(frame: pandas.DataFrame) -> Figure:
    """How long searches take, with the simulation of the best plans."""
    figure, (ax,) = _axes(8.5, 4.4, 1)
    seconds = _searches(frame)
    for name, row in seconds.iterrows():
        colour, marker = STYLES[str(name)]
        ax.plot(row.index, row, color=colour, marker=marker, markersize=8, linewidth=1.6, label=NAMES[str(name)])
    _log_ticks(ax, "x", [float(str(gpus)) for gpus in seconds], lambda value: f"{value:g}")
    _log_ticks(ax, "y", (0.5, 1, 2, 5, 10, 20, 30), lambda value: f"{value:g}")
    ax.set_xlabel("GPUs")
    ax.set_ylabel("seconds of search, on one core")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def table(frame: pandas.DataFrame) -> str:
    """Speed-ups, errors of the models, recommendations that do not fit and seconds of search, in Markdown."""
    return "\n".join((_speedup_text(frame), _latency_text(frame), _memory_text(frame), _overhead_text(frame)))


def _speedup_text(frame: pandas.DataFrame) -> str:
    found = {part: _ratios(frame, part) for part in ("alone", "judged")}
    text = "**Iteration of each planner's plan over that of Pipette's (nodes moved): median of the draws, range**\n\n"
    lines = []
    for part, groups in found.items():
        for name in next(iter(groups.values())):
            cells = [ratios[name] for ratios in groups.values()]
            lines.append([f"{NAMES[name]}, {part}", *(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in cells)])
    return text + markdown(["", *(f"{kind}, {links}" for kind, links in found["alone"])], lines)


def _latency_text(frame: pandas.DataFrame) -> str:
    plans = _estimated(frame)
    cells = [rows for _, rows in plans.groupby(["kind", "links"], sort=False)]
    chosen = {style[0]: plans["placement"] == placement for placement, style in PLACEMENTS.items()}
    chosen |= {text: plans["stages"].between(fewest, most) for text, fewest, most in DEPTHS}
    text = f"**Errors of the latency models on {len(plans)} plans, {len(cells[0])} on each of {len(cells)} clusters: MAPE**\n\n"
    errors = {name: plans[column] / plans["iteration_s"] - 1 for column, name in MODELS.items()}
    lines = [
        [
            name,
            *(
                f"{100 * value:.1f} %"
                for value in (error.abs().mean(), *(error[where].abs().mean() for where in chosen.values()))
            ),
        ]
        for name, error in errors.items()
    ]
    text += markdown(["model", "all", *chosen], lines)
    text += "\n**Their errors with the sign, by tensor-parallel degree, and how they rank the plans of a cluster**\n\n"
    degrees_there = sorted(set(plans["degree"]))
    lines = []
    for column, name in MODELS.items():
        means = [errors[name][plans["degree"] == degree].mean() for degree in degrees_there]
        ranks = sorted(rows[column].rank().corr(rows["iteration_s"].rank()) for rows in cells)
        chosen_s = [rows["iteration_s"].iloc[int(rows[column].argmin())] for rows in cells]
        regret = max(seconds / rows["iteration_s"].min() - 1 for seconds, rows in zip(chosen_s, cells, strict=True))
        shown = [f"{100 * value:+.1f} %" for value in means]
        lines.append([name, *shown, f"{np.median(ranks):.3f}", f"{ranks[0]:.3f}", f"{100 * regret:.1f} %"])
    heads = ["model", *(f"degree {degree:g}" for degree in degrees_there)]
    return text + markdown([*heads, "rank correlation", "lowest", "its favourite over the best, at most"], lines)


def _memory_text(frame: pandas.DataFrame) -> str:
    plans = _estimated(frame)
    text = "**Errors of the counts of memory on the same plans, against the simulated peak**\n\n"
    lines = []
    for column, name in {"room_bytes": "Pipette's, as here", "naive_bytes": "naive sum"}.items():
        error = plans[column] / plans["peak_bytes"] - 1
        lines.append([name, f"{100 * error.abs().mean():.1f} %", f"{100 * error.min():.1f} %", f"{100 * error.max():.1f} %"])
    text += markdown(["count", "MAPE", "lowest", "highest"], lines)
    tries = _tries(frame)
    text += f"\n**Recommendations tried until one fits, on {len(tries)} clusters with scarce memory**\n\n"
    lines = []
    for name in map(str, tries):
        misses = int((tries[name] > 1).sum())
        counts = [f"{misses} of {len(tries)}", f"{tries[name].median():g}", f"{tries[name].max():g}"]
        lines.append([NAMES[name], *counts, _slower(frame, name)])
    heads = ["planner", "first does not fit", "median tried", "most tried", "iteration over Pipette's: median, range"]
    return text + markdown(heads, lines)


def _slower(frame: pandas.DataFrame, name: str) -> str:
    """What the plan of a planner that fits takes over Pipette's, where memory is scarce."""
    seconds = _frame_of(frame, "scarce").pivot_table(index=["kind", "model"], columns="name", values="iteration_s", sort=False)
    ratio = (seconds[name] / seconds["pipette-nodes"]).dropna()
    return f"{ratio.median():.2f} ({ratio.min():.2f} to {ratio.max():.2f})"


def _overhead_text(frame: pandas.DataFrame) -> str:
    seconds = _searches(frame)
    text = "**Seconds of search, on one core, with the simulation of the best plans**\n\n"
    lines = ([NAMES[str(name)], *(f"{value:.1f}" for value in row)] for name, row in seconds.iterrows())
    return text + markdown(["planner", *(f"{gpus} GPUs" for gpus in seconds)], lines)


PIPETTE = Experiment(
    name="pipette",
    paper="Pipette, DATE 2024, arXiv 2405.18093",
    question="On uneven links, what are its latency model, its check of memory and its placement worth beside AMP and Varuna?",
    runs=runs,
    plot=plot,
    table=table,
)
