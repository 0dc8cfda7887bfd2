"""HexiScale's questions (arXiv 2409.01143, first named FlashFlex): are mixed GPUs as good as alike ones of the same peak FLOP/s?

Its clusters, models and reported utilisation are those of `experiments.hexiscale`. Four parts, told apart by the label `part`:

    utilisation  what is reported, and what our planners reach there
    network      the same clusters with RDMA between the nodes
    ablation     `flashflex` without one of its phases
    scheduling   how long its search takes on 8 to 256 GPUs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from experiments.hexiscale import GLOBAL_BATCH, SEQUENCE_LENGTH, cluster_folder, facts, paper_peaks
from experiments.papers.experiment import Experiment, markdown
from experiments.plots import BLACK, BLUE, DOTS_PER_INCH, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from experiments.sweep import Label, Run
from partition.planners.flashflex import Phases, in_phases
from partition.search import Planner, register
from sim.spec.cluster import Cluster, Nic, read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer

if TYPE_CHECKING:
    import pandas

MOTLEY_S, OTHERS_S = 5.0, 60.0
"""The budgets: motley searches until its own is spent; the others end by themselves, mostly after two to ten seconds."""
SEEDS = (0, 1, 2)

# --- The runs --------------------------------------------------------------------------------------------------------

MIXED_PLANNERS, ALIKE_PLANNERS = ("flashflex", "motley", "megatron", "metis"), ("megatron", "motley")
SEEDED = ("flashflex", "motley")
"""Planners whose answer on the mixed clusters depends on the seed."""

RDMA = {
    "RoCE, same rate": Nic("roce", 0.0),
    "InfiniBand, 200 Gbit/s": Nic("infiniband", 200e9 / 8),
}
"""The network cards with RDMA; 0 bytes/s stands for the rate that the node's Ethernet has."""

MIXED_NETWORKS = ("Ethernet", "InfiniBand, 200 Gbit/s")
"""What the mixed clusters are searched with."""

RDMA_LATENCY_S = 5e-6
"""One way, end to end; assumed, where the Ethernet of the cluster files has 50 us."""

PLACES = (("mixed-a", "llama-2-13b"), ("mixed-b", "llama-2-13b"), ("mixed-c", "llama-30b"))
"""Where mixed clusters are searched with another network, and where phases are left out: each with its largest model."""

ALIKE = {"mixed-a": "homogeneous-16", "mixed-b": "homogeneous-16", "mixed-c": "homogeneous-32"}
"""The homogeneous cluster that has the peak FLOP/s of a mixed one."""

VARIANTS: Mapping[str, Planner] = {
    "flashflex-graph": partial(in_phases, phases=Phases("graph")),
    "flashflex-random": partial(in_phases, phases=Phases("random")),
    "flashflex-whole": partial(in_phases, phases=Phases("whole")),
    "flashflex-one-degree": partial(in_phases, phases=Phases(uneven_degrees=False)),
    "flashflex-graph-only": partial(in_phases, phases=Phases("graph", local_search=False)),
    "flashflex-random-only": partial(in_phases, phases=Phases("random", local_search=False)),
}
"""`flashflex` without one of its phases, by the name that it is registered under while the experiment has its runs made."""

SIZES = {8: (2, 1), 16: (4, 1), 32: (8, 1), 64: (8, 2), 128: (8, 4), 256: (8, 8)}
"""Mixed-b made smaller and larger, by its number of GPUs: how many a node has, and how many nodes there are of each kind."""

SCHEDULED = {"flashflex": SEEDS, "flashflex-graph-only": SEEDS[:1]}
"""The planners whose search is timed, and their seeds."""
SCHEDULED_PLACE, SCHEDULED_MODEL = "mixed-b", "llama-2-7b"
SEQUENCES_PER_GPU = GLOBAL_BATCH // 32
"""Of the global batch there, which grows with the cluster; as many as mixed-b has of the batch of the other parts."""


def runs() -> Iterator[Run]:
    """All runs, in their order; the planners of the ablation are registered with it."""
    for name, planner in VARIANTS.items():
        register(name)(planner)
    yield from _utilisation()
    yield from _network()
    yield from _ablation()
    yield from _scheduling()


@cache
def _cluster(name: str) -> Cluster:
    return read_cluster(cluster_folder() / f"hexiscale-{name}.yaml")


def peak_over_paper(cluster: Cluster) -> float:
    """The sum of the true peaks over that of the peaks that the publication divides by: so much larger is a utilisation there."""
    peaks = paper_peaks(cluster)
    return cluster.peak_flop_per_s("bf16") / sum(peaks[device.gpu.name] for device in cluster.devices)


def _run(part: str, place: str, cluster: Cluster, model: str, planner: str, seed: int, **labels: Label) -> Run:
    """A run, with labels for what the other columns do not say."""
    told = {"part": part, "place": place, "network": "Ethernet", "peak_over_paper": peak_over_paper(cluster), **labels}
    batch = GLOBAL_BATCH if part != "scheduling" else SEQUENCES_PER_GPU * len(cluster.devices)
    job, budget_s = Job(transformer(model), SEQUENCE_LENGTH, batch), MOTLEY_S if planner == "motley" else OTHERS_S
    return Run(cluster, job, planner, budget_s=budget_s, seed=seed, labels=tuple(told.items()))


def _is_mixed(name: str) -> bool:
    return name in ALIKE


def _utilisation() -> Iterator[Run]:
    """The planners at all places that a figure is reported for."""
    for reported in facts().reports:
        mixed = _is_mixed(reported.cluster)
        for planner in MIXED_PLANNERS if mixed else ALIKE_PLANNERS:
            for seed in SEEDS if mixed and planner in SEEDED else SEEDS[:1]:
                place, model = reported.cluster, reported.model
                yield _run("utilisation", place, _cluster(place), model, planner, seed, reported=reported.mfu)


def with_rdma(cluster: Cluster, nic: Nic) -> Cluster:
    """The cluster with such cards in the place of its own, of the same rates where `nic` has none, and a latency of RDMA."""
    nodes = []
    for node in cluster.nodes:
        assert node.nic is not None
        rate = nic.bandwidth_bytes_per_s or node.nic.bandwidth_bytes_per_s
        nodes.append(replace(node, nic=replace(nic, bandwidth_bytes_per_s=rate)))
    fabric = replace(cluster.fabric, latency_s=RDMA_LATENCY_S)
    return replace(cluster, name=f"{cluster.name}-{nic.kind}", nodes=tuple(nodes), fabric=fabric)


def _network() -> Iterator[Run]:
    """The homogeneous clusters with RDMA of either sort, and a model on each mixed one with the faster."""
    for network, nic in RDMA.items():
        for reported in facts().reports:
            place, model = reported.cluster, reported.model
            if _is_mixed(place) and ((place, model) not in PLACES or network not in MIXED_NETWORKS):
                continue
            for planner in SEEDED if _is_mixed(place) else ALIKE_PLANNERS:
                for seed in SEEDS if planner == "flashflex" else SEEDS[:1]:
                    yield _run("network", place, with_rdma(_cluster(place), nic), model, planner, seed, network=network)


def _ablation() -> Iterator[Run]:
    """The variants; the whole planner's runs are those of the first part."""
    for place, model in PLACES:
        for planner in VARIANTS:
            for seed in SEEDS:
                yield _run("ablation", place, _cluster(place), model, planner, seed)


def resized(gpus: int) -> Cluster:
    """Mixed-b with so many GPUs, as many of each of its kinds; a key of SIZES."""
    cluster, (each, times) = _cluster(SCHEDULED_PLACE), SIZES[gpus]
    nodes = [replace(node, name=f"{node.name}-{i}", gpus=each) for node in cluster.nodes for i in range(times)]
    return replace(cluster, name=f"{cluster.name}-x{gpus}", nodes=tuple(nodes))


def _scheduling() -> Iterator[Run]:
    """Searches on clusters of all sizes."""
    for gpus in SIZES:
        for planner, seeds in SCHEDULED.items():
            for seed in seeds:
                yield _run("scheduling", SCHEDULED_PLACE, resized(gpus), SCHEDULED_MODEL, planner, seed)


# --- What is read out of the rows ------------------------------------------------------------------------------------

PER_CENT = 100.0


def _part(frame: pandas.DataFrame, *parts: str) -> pandas.DataFrame:
    """The rows of these parts, with the HFU that the publication's peaks would give."""
    rows = frame[frame["part"].isin(parts)]
    return rows.assign(hfu_at_paper_peaks=rows["hfu"] * rows["peak_over_paper"])


def _values(rows: pandas.DataFrame, column: str = "hfu_at_paper_peaks", **where: object) -> list[float]:
    """A column of the rows that are so, a value for each seed that found a plan, in order of size."""
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return sorted(rows[column].dropna().astype(float).tolist())


def _middle(values: Sequence[float]) -> float:
    """Their median; not a number where there are none."""
    return float(np.median(values)) if values else float("nan")


def _cells(frame: pandas.DataFrame) -> list[tuple[str, str, float]]:
    """The places, models and reported figures of the first part, in the order of the models, the homogeneous cluster first."""
    rows = _part(frame, "utilisation").drop_duplicates(["place", "model"])
    found = list(zip(rows["place"].tolist(), rows["model"].tolist(), rows["reported"].tolist(), strict=True))
    models = list(dict.fromkeys(model for _, model, _ in found))
    return sorted(found, key=lambda cell: (models.index(cell[1]), _is_mixed(cell[0]), cell[0]))


# --- Figures ---------------------------------------------------------------------------------------------------------

_COLOURS = {"reported": "#4D4D4D", "megatron": SKY, "metis": PURPLE, "flashflex": ORANGE, "motley": BLUE}
_NETWORKS = ("Ethernet", *RDMA)
_NETWORK_HATCHES = dict(zip(_NETWORKS, ("", "////", "...."), strict=True))


def _axes(width_inch: float, height_inch: float, columns: int = 1, share_y: bool = True) -> list[Axes]:
    """The Axes of a new figure, beside each other."""
    figure = Figure(figsize=(width_inch, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return list(figure.subplots(1, columns, sharey=share_y, squeeze=False)[0])


def _bar(
    ax: Axes,
    left: float,
    width: float,
    values: Sequence[float],
    colour: str,
    hatch: str = "",
    scale: float = 1.0,
    decimals: int = 1,
) -> None:
    """A bar at the median, a whisker over the range of several seeds, and the median in words."""
    if not values:
        ax.text(left + width / 2, 0, " no plan", rotation=90, ha="center", va="bottom", fontsize=7.5, color="#404040")
        return
    middle = _middle(values)
    face, edge = ("#FFFFFF", colour) if hatch else (colour, colour)
    ax.bar(left, middle, width * 0.9, align="edge", facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.8)
    at = left + width * 0.45
    if values[-1] > values[0]:
        ax.vlines(at, values[0], values[-1], color=BLACK, linewidth=1.2)
    ax.text(at, values[-1], f"{middle * scale:.{decimals}f}", ha="center", va="bottom", fontsize=7.5)


def _style(ax: Axes, labels: Sequence[str]) -> None:
    """Groups of bars under their labels, apart from each other, on a quiet grid."""
    ax.set_xticks(range(len(labels)), labels, fontsize=8.5)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.55, len(labels) - 0.45)
    for x in range(1, len(labels)):
        ax.axvline(x - 0.5, color="#D8D8D8", linewidth=0.8)
    ax.grid(True, axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _legend(ax: Axes, handles: Sequence[Patch | Line2D], columns: int) -> None:
    """The legend above the Axes of the figure, where no data are."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, frameon=False, fontsize=9)


def _plot_utilisation(frame: pandas.DataFrame) -> Figure:
    """The reported figures beside those of our planners."""
    (ax,) = _axes(11.0, 4.8)
    rows, cells = _part(frame, "utilisation"), _cells(frame)
    for x, (place, model, reported) in enumerate(cells):
        planners = [name for name in _COLOURS if name == "reported" or _values(rows, place=place, model=model, planner=name)]
        width = 0.86 / len(_COLOURS)
        left = x - width * len(planners) / 2
        for i, planner in enumerate(planners):
            values = [reported] if planner == "reported" else _values(rows, place=place, model=model, planner=planner)
            _bar(ax, left + i * width, width, values, _COLOURS[planner], scale=PER_CENT, decimals=0)
    _style(ax, [f"{place}\n{model}" for place, model, _ in cells])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_ylabel("HFU at the publication's peaks")
    told = {"reported": "reported", **{name: f"{name}, simulated" for name in _COLOURS if name != "reported"}}
    _legend(ax, [Patch(facecolor=_COLOURS[name], label=told[name]) for name in told], len(told))
    return _figure(ax)


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


_PAIRINGS = {"megatron": "flashflex", "motley": "motley"}
"""Who plans the homogeneous cluster, and who the mixed one that it is compared with."""


def _networked(
    frame: pandas.DataFrame, place: str, model: str, planner: str, network: str, column: str = "hfu_at_paper_peaks"
) -> list[float]:
    rows = _part(frame, "utilisation", "network")
    return _values(rows, column, place=place, model=model, planner=planner, network=network)


def _plot_network(frame: pandas.DataFrame) -> Figure:
    """Mixed beside homogeneous clusters, with their networks; on the left the paper's planners, on the right ours."""
    axes = _axes(11.0, 4.8, len(_PAIRINGS))
    width = 0.86 / (len(_NETWORKS) + len(MIXED_NETWORKS) + 0.4)
    for ax, (alike, mixed) in zip(axes, _PAIRINGS.items(), strict=True):
        for x, (place, model) in enumerate(PLACES):
            left = x - 0.43
            for where, planner, colour, networks in (
                (ALIKE[place], alike, SKY, _NETWORKS),
                (place, mixed, ORANGE, MIXED_NETWORKS),
            ):
                for network in networks:
                    values = _networked(frame, where, model, planner, network)
                    _bar(ax, left, width, values, colour, _NETWORK_HATCHES[network], PER_CENT)
                    left += width
                left += 0.4 * width
        _style(ax, [f"{place}\nand {ALIKE[place]}\n{model}" for place, model in PLACES])
        ax.set_title(f"homogeneous: {alike}; mixed: {mixed}", loc="left", fontsize=10)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylabel("HFU at the publication's peaks")
    kinds = [Patch(facecolor=SKY, label="homogeneous"), Patch(facecolor=ORANGE, label="mixed")]
    looks: dict[str, Any] = {"facecolor": "#FFFFFF", "edgecolor": "#404040"}
    nets = [Patch(**looks, hatch=hatch) for hatch in _NETWORK_HATCHES.values()]
    nets[0].set_facecolor("#404040")
    for patch, network in zip(nets, _NETWORKS, strict=True):
        patch.set_label(network)
    _legend(axes[0], [*kinds, *nets], len(kinds) + len(nets))
    return _figure(axes[0])


_TOLD = {
    "flashflex": "all phases",
    "flashflex-graph": "graph partition only",
    "flashflex-random": "random partition",
    "flashflex-whole": "no partition",
    "flashflex-one-degree": "one tensor-parallel degree",
    "flashflex-graph-only": "graph partition, no local search",
    "flashflex-random-only": "random partition, no local search",
}
_VARIANT_LOOKS = dict(
    zip(
        _TOLD,
        ((ORANGE, ""), (GREEN, ""), (VERMILLION, ""), (SKY, ""), (PURPLE, ""), (GREEN, "////"), (VERMILLION, "////")),
        strict=True,
    )
)


def _slowdowns(frame: pandas.DataFrame, place: str, model: str, planner: str) -> list[float]:
    """Iterations of a variant, in medians of the whole planner, a value for each seed."""
    rows = _part(frame, "utilisation", "ablation")
    whole = _middle(_values(rows, "iteration_s", place=place, model=model, planner="flashflex"))
    return [value / whole for value in _values(rows, "iteration_s", place=place, model=model, planner=planner)]


def _plot_ablation(frame: pandas.DataFrame) -> Figure:
    """How much slower the plans are without a phase."""
    (ax,) = _axes(11.0, 5.0)
    width = 0.86 / len(_TOLD)
    for x, (place, model) in enumerate(PLACES):
        for i, planner in enumerate(_TOLD):
            values, looks = _slowdowns(frame, place, model, planner), _VARIANT_LOOKS[planner]
            _bar(ax, x - 0.43 + i * width, width, values, *looks, decimals=2)
    _style(ax, [f"{place}, {model}" for place, model in PLACES])
    ax.axhline(1, color=BLACK, linewidth=0.8)
    ax.set_ylabel("iteration / iteration with all phases")
    handles = []
    for planner, told in _TOLD.items():
        colour, hatch = _VARIANT_LOOKS[planner]
        handles.append(Patch(facecolor="#FFFFFF" if hatch else colour, edgecolor=colour, hatch=hatch, label=told))
    _legend(ax, handles, 4)
    return _figure(ax)


_SCHEDULED_LOOKS: Mapping[str, tuple[str, str, tuple[float, tuple[float, ...]]]] = {
    "flashflex": (ORANGE, "o", (0, ())),
    "flashflex-graph-only": (GREEN, "s", (0, (5, 2))),
}


def _plot_scheduling(frame: pandas.DataFrame) -> Figure:
    """How long the searches take over the number of GPUs, and how good their plans are."""
    rows = _part(frame, "scheduling")
    sizes = sorted({int(gpus) for gpus in rows["gpus"]})
    left, right = _axes(11.0, 4.6, 2, share_y=False)
    for planner, (colour, marker, line) in _SCHEDULED_LOOKS.items():
        for ax, column, scale in ((left, "wall_s", 1.0), (right, "mfu", PER_CENT)):
            seeds = [_values(rows, column, planner=planner, gpus=gpus) for gpus in sizes]
            shown = [(gpus, values) for gpus, values in zip(sizes, seeds, strict=True) if values]
            at = [gpus for gpus, _ in shown]
            ax.plot(at, [_middle(values) * scale for _, values in shown], color=colour, marker=marker, linestyle=line)
            ax.vlines(at, [v[0] * scale for _, v in shown], [v[-1] * scale for _, v in shown], color=colour, linewidth=1.2)
    for ax, title in ((left, "until the search ended, in s"), (right, "MFU of its plan, in %")):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(gpus) for gpus in sizes])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("GPUs of the cluster")
        ax.set_ylabel(title)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.grid(True, color="#E4E4E4", linewidth=0.8)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    told = {"flashflex": "flashflex", "flashflex-graph-only": "flashflex: graph partition, no local search"}
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle=line, label=told[name])
        for name, (colour, marker, line) in _SCHEDULED_LOOKS.items()
    ]
    _legend(left, handles, len(handles))
    return _figure(left)


def plot(frame: pandas.DataFrame) -> Mapping[str, Figure]:
    """A figure of each part."""
    return {
        "hexiscale-utilisation": _plot_utilisation(frame),
        "hexiscale-network": _plot_network(frame),
        "hexiscale-ablation": _plot_ablation(frame),
        "hexiscale-scheduling": _plot_scheduling(frame),
    }


# --- The table -------------------------------------------------------------------------------------------------------


def _told(values: Sequence[float], scale: float = 1.0, decimals: int = 1) -> str:
    """The median, and the range behind it where there are several values that differ."""
    if not values:
        return "no plan"
    shown = [f"{value * scale:.{decimals}f}" for value in (_middle(values), values[0], values[-1])]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _table_utilisation(frame: pandas.DataFrame, column: str) -> str:
    rows, lines = _part(frame, "utilisation"), []
    planners = [name for name in _COLOURS if name != "reported"]
    for place, model, reported in _cells(frame):
        told = [f"{place}, {model}", *([f"{reported * PER_CENT:.2f}"] if column != "mfu" else [])]
        for planner in planners:
            asked = _is_mixed(place) or planner in ALIKE_PLANNERS
            told.append(_told(_values(rows, column, place=place, model=model, planner=planner), PER_CENT) if asked else "")
        lines.append(told)
    return markdown(["cluster, model", *(["reported"] if column != "mfu" else []), *planners], lines)


def _table_network(frame: pandas.DataFrame) -> str:
    """How many points the mixed cluster on Ethernet is below the homogeneous one, whatever network that has; and in MFU."""
    lines = []
    reported = {(place, model): value for place, model, value in _cells(frame)}
    for place, model, _ in _cells(frame):
        if not _is_mixed(place):
            continue
        for alike, mixed in _PAIRINGS.items():
            own = _middle(_networked(frame, place, model, mixed, "Ethernet"))
            gaps = [_middle(_networked(frame, ALIKE[place], model, alike, network)) - own for network in _NETWORKS]
            ends = [(ALIKE[place], alike), (place, mixed)]
            useful, less = (_middle(_networked(frame, at, model, by, "Ethernet", "mfu")) for at, by in ends)
            told = (reported[ALIKE[place], model] - reported[place, model]) * PER_CENT
            lines.append(
                [
                    f"{place}, {model}",
                    f"{alike}, {mixed}",
                    f"{told:.2f}",
                    *(f"{gap * PER_CENT:.1f}" for gap in (*gaps, useful - less)),
                ]
            )
    heads = [
        "mixed cluster, model",
        "planners",
        "reported",
        *(f"homogeneous: {network}" for network in _NETWORKS),
        "MFU, Ethernet",
    ]
    return markdown(heads, lines)


def _table_mixed_rdma(frame: pandas.DataFrame) -> str:
    """The mixed clusters themselves with RDMA."""
    lines = []
    for place, model in PLACES:
        for planner in SEEDED:
            values = [_networked(frame, place, model, planner, network) for network in MIXED_NETWORKS]
            lines.append([f"{place}, {model}", planner, *(_told(found, PER_CENT) for found in values)])
    return markdown(["cluster, model", "planner", *MIXED_NETWORKS], lines)


def _table_ablation(frame: pandas.DataFrame) -> str:
    lines = [
        [told, *(_told(_slowdowns(frame, place, model, planner), decimals=2) for place, model in PLACES)]
        for planner, told in _TOLD.items()
    ]
    return markdown(["flashflex with", *(f"{place}, {model}" for place, model in PLACES)], lines)


def _table_scheduling(frame: pandas.DataFrame) -> str:
    rows = _part(frame, "scheduling")
    lines = []
    for gpus in sorted({int(gpus) for gpus in rows["gpus"]}):
        line: list[object] = [gpus]
        for planner in _SCHEDULED_LOOKS:
            line.append(_told(_values(rows, "wall_s", planner=planner, gpus=gpus)))
            line.append(_told(_values(rows, "mfu", planner=planner, gpus=gpus), PER_CENT))
        lines.append(line)
    heads = ["GPUs", *(f"{name}: {what}" for name in _SCHEDULED_LOOKS for what in ("s", "MFU"))]
    return markdown(heads, lines)


def table(frame: pandas.DataFrame) -> str:
    """A table of each part."""
    sections = {
        "HFU at the publication's peaks, in %: the median over the seeds (their range)": _table_utilisation(
            frame, "hfu_at_paper_peaks"
        ),
        "MFU at the true peaks, in %": _table_utilisation(frame, "mfu"),
        "How far a mixed cluster on Ethernet is below a homogeneous, in points of that HFU; at last, of MFU": _table_network(
            frame
        ),
        "HFU of the mixed clusters with other networks, in %": _table_mixed_rdma(frame),
        "Iteration over that with all phases": _table_ablation(frame),
        "Seconds of the search, and MFU of its plan in %, for llama-2-7b on mixed-b made smaller and larger": _table_scheduling(
            frame
        ),
    }
    return "\n".join(f"**{title}**\n\n{text}" for title, text in sections.items())


HEXISCALE = Experiment(
    "hexiscale",
    "HexiScale / FlashFlex, arXiv 2409.01143",
    "Do mixed GPUs train as well as alike ones of the same peak FLOP/s, and what in the planner does it?",
    runs,
    plot,
    table,
)
