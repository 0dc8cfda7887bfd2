"""Holmes: training over nodes whose network cards cannot talk RDMA to each other. See docs/experiments/holmes.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.papers.experiment import Experiment, markdown
from experiments.plots import BLACK, BLUE, DOTS_PER_INCH, GREEN, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from experiments.sweep import Run
from partition.planners.holmes import holmes_with
from partition.search import Planner, Search, register
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node, links
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.judge import Verdict
from sim.spec.plan import Plan
from sim.spec.stack import stack
from sim.spec.transformer import transformer

if TYPE_CHECKING:
    import pandas

NODES = (4, 6, 8)
MODELS = ("megatron-3.6b", "megatron-7.5b", "megatron-39.1b")
SEQUENCE_LENGTH = 2048
GLOBAL_BATCH = 768
"""Ours: the sizes of the paper's batches are not in the sources at hand."""

INFINIBAND_CARDS, ROCE_CARDS = 4, 2
"""As many as the program's NCCL configuration lists for a node of either kind (github.com/zhejianglab/Holmes, README)."""
CARD_BYTES_PER_S = 200e9 / 8
ETHERNET_BYTES_PER_S = 25e9 / 8
"""Ours, as the fabric's latency is."""
ETHERNET_SWEPT = (10e9 / 8, 50e9 / 8, 100e9 / 8)
"""The rates besides it, tried with SWEPT_MODEL."""
LATENCY_S = 10e-6
STACK = "megatron"

NETWORKS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "hybrid": "half of each, in order",
    "mingled": "half of each, in turn",
    "ethernet": "Ethernet",
}
PLANNERS = ("holmes", "megatron", "amp", "motley")
BUDGET_S, MOTLEY_BUDGET_S = 60.0, 20.0
"""All but motley end by themselves, in one to six seconds of an idle core, so that their plans are the same on every machine."""
MOST_NODES = NODES[-1]
ABLATED_NODES = (4, 8)
SWEPT_MODEL = "megatron-7.5b"

PUBLISHED_TFLOPS: Mapping[tuple[str, int, str, str], float] = {
    # Of the paper's table, as https://linnk.ai summarises it; GPT of 3.6 billion parameters.
    ("megatron-3.6b", 4, "infiniband", "holmes"): 197.0,
    ("megatron-3.6b", 4, "roce", "holmes"): 160.0,
    ("megatron-3.6b", 4, "ethernet", "holmes"): 122.0,
    ("megatron-3.6b", 8, "infiniband", "holmes"): 148.0,
    ("megatron-3.6b", 8, "roce", "holmes"): 145.0,
    ("megatron-3.6b", 8, "ethernet", "holmes"): 83.0,
    # Of figure 6, read off the bars to within 3 %; GPT of 7.5 billion parameters.
    ("megatron-7.5b", 8, "hybrid", "holmes"): 184.0,
    ("megatron-7.5b", 8, "hybrid", "megatron"): 132.0,
}
"""TFLOP/s of a GPU that are published, by model, nodes, network and planner."""


# --- The planners ----------------------------------------------------------------------------------------------------


def without_overlap(search: Search, by_nic: bool = True, uneven: bool = True) -> None:
    """Has the plans of Holmes judged with their gradients exchanged after the last backward, not beside it."""

    def judge(plan: Plan) -> Verdict:
        return search.consider(replace(plan, overlap_gradients=False))

    inner = Search(search.cluster, search.job, judge, search.seed, search.budget_s)
    holmes_with(inner, by_nic, uneven)
    if inner.closest is not None:
        search.reject(*inner.closest)


VARIANTS: Mapping[str, Planner] = {
    "holmes-without-overlap": without_overlap,
    "holmes-even-split": partial(holmes_with, uneven=False),
    "holmes-file-order": partial(holmes_with, by_nic=False),
    "holmes-without-all": partial(without_overlap, by_nic=False, uneven=False),
}
"""Holmes without one of its parts, and without all three."""

ABLATED = {
    "holmes": "all of Holmes",
    "holmes-without-overlap": "gradients not overlapped",
    "holmes-even-split": "layers split evenly",
    "holmes-file-order": "nodes not grouped by NIC",
    "holmes-without-all": "without all three",
}


# --- The runs --------------------------------------------------------------------------------------------------------


def cluster(network: str, nodes: int, ethernet_bytes_per_s: float = ETHERNET_BYTES_PER_S) -> Cluster:
    """So many nodes of eight A100, with the cards that the network says."""
    infiniband = Nic("infiniband", CARD_BYTES_PER_S, INFINIBAND_CARDS, ethernet_bytes_per_s)
    roce = Nic("roce", CARD_BYTES_PER_S, ROCE_CARDS, ethernet_bytes_per_s)
    cards = {
        "infiniband": [infiniband] * nodes,
        "roce": [roce] * nodes,
        "hybrid": [infiniband] * (nodes // 2) + [roce] * (nodes // 2),
        "mingled": [infiniband, roce] * (nodes // 2),
        "ethernet": [Nic("ethernet", ethernet_bytes_per_s)] * nodes,
    }[network]
    kind, found = gpu_kind("A100-80GB-SXM"), links()
    assert kind.nvlink_bytes_per_s is not None
    inside = Intra("nvswitch", kind.nvlink_bytes_per_s, latency_s=found.latency_s["nvswitch"], step_s=found.step_s)
    made = tuple(Node(f"{nic.kind}-{i}", kind, 8, inside, nic) for i, nic in enumerate(cards))
    fabric = Fabric(LATENCY_S, start_s=found.start_s, step_s=found.step_s)
    return Cluster(f"{network}-{nodes}", made, fabric, stack=stack(STACK))


def paper_flop(job: Job) -> float:
    """FLOP of an iteration as the paper counts them: all layers recomputed, whether they are or not.

    Source: Narayanan et al. (2021), arXiv:2104.04473, equation 3.
    """
    model, tokens = job.model, job.global_batch * job.sequence_length
    layers = 96 * tokens * model.layers * model.hidden**2 * (1 + job.sequence_length / (6 * model.hidden))
    return layers + 6 * tokens * model.hidden * (model.padded_vocab or model.vocab)


def runs() -> Iterator[Run]:
    """All planners on all networks, the parts of Holmes left out in turn, and other rates of the Ethernet."""
    for name, variant in VARIANTS.items():
        register(name)(variant)
    for model in MODELS:
        for nodes in NODES:
            for network in NETWORKS:
                for planner in PLANNERS if nodes == MOST_NODES else PLANNERS[:2]:
                    yield _run("networks", network, nodes, model, planner)
    for model in MODELS:
        for nodes in ABLATED_NODES:
            for planner in VARIANTS:
                yield _run("ablation", "mingled", nodes, model, planner)
    for rate in ETHERNET_SWEPT:
        for network in ("mingled", "ethernet"):
            for planner in PLANNERS[:2]:
                yield _run("ethernet", network, MOST_NODES, SWEPT_MODEL, planner, rate)


def _run(
    part: str, network: str, nodes: int, model: str, planner: str, ethernet_bytes_per_s: float = ETHERNET_BYTES_PER_S
) -> Run:
    job = Job(transformer(model), SEQUENCE_LENGTH, GLOBAL_BATCH)
    labels: list[tuple[str, str | int | float]] = [
        ("part", part),
        ("network", network),
        ("nodes", nodes),
        ("ethernet_bytes_per_s", ethernet_bytes_per_s),
        ("paper_flop", paper_flop(job)),
    ]
    published = PUBLISHED_TFLOPS.get((model, nodes, network, planner))
    if published is not None:
        labels.append(("published_tflops", published))
    on = cluster(network, nodes, ethernet_bytes_per_s)
    budget_s = MOTLEY_BUDGET_S if planner == "motley" else BUDGET_S
    return Run(on, job, planner, budget_s=budget_s, labels=tuple(labels))


# --- What is drawn ---------------------------------------------------------------------------------------------------

NETWORK_STYLES = {
    "infiniband": (BLUE, ""),
    "roce": (SKY, "//"),
    "hybrid": (GREEN, ".."),
    "ethernet": (ORANGE, "xx"),
}
PLANNER_STYLES = {"holmes": (BLUE, ""), "megatron": (SKY, "//"), "amp": (ORANGE, "xx"), "motley": (GREEN, "..")}
ABLATION_STYLES = dict(zip(ABLATED, ((BLUE, ""), (SKY, "//"), (GREEN, ".."), (ORANGE, "xx"), (YELLOW, "\\\\")), strict=True))
CLOSE = 16.0
"""TFLOP/s that lie nearer to each other than this are drawn upon each other."""
TFLOPS_LABEL = "TFLOP/s of a GPU"
SHORT = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "hybrid": "half of each,\nin order",
    "mingled": "half of each,\nin turn",
    "ethernet": "Ethernet",
}


def tflops(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows with the columns `tflops`, TFLOP/s of a GPU as the paper counts them, and `samples_per_s`."""
    return frame.assign(
        tflops=frame.paper_flop / frame.iteration_s / frame.gpus / 1e12, samples_per_s=frame.global_batch / frame.iteration_s
    )


def _value(rows: pandas.DataFrame, column: str, **where: Any) -> float:
    """The one value of a column in the row where other columns are as given; NaN where there is no such row."""
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    values = rows[column].tolist()
    assert len(values) <= 1, where
    return float(values[0]) if values else float("nan")


def _billions(model: str) -> str:
    return "GPT " + model.removeprefix("megatron-").upper()


def _figure(rows: int, height_inch: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure with so many Axes below each other."""
    figure = Figure(figsize=(10.2, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def _bars(
    ax: Axes,
    groups: Sequence[str],
    styles: Mapping[str, tuple[str, str]],
    names: Mapping[str, str],
    value: Callable[[int, str], tuple[float, float]],
) -> None:
    """Draws a bar for each style in each group, its number above it, and a diamond where a value is published."""
    width = 0.84 / len(styles)
    for i, (key, (colour, hatch)) in enumerate(styles.items()):
        at = [g + (i - (len(styles) - 1) / 2) * width for g in range(len(groups))]
        heights, published = zip(*(value(g, key) for g in range(len(groups))), strict=True)
        drawn = [0.0 if height != height else height for height in heights]
        ax.bar(at, drawn, width * 0.94, color=colour, hatch=hatch, edgecolor="#FFFFFF", linewidth=0.5, label=names[key])
        for x, height, known in zip(at, heights, published, strict=True):
            text, y = ("none", 2.0) if height != height else (f"{height:.0f}", height + 2)
            if abs(known - y) < CLOSE:
                y = max(y, known + CLOSE / 2)  # clear of the diamond
            ax.text(x, y, text, ha="center", va="bottom", fontsize=8)
        there = [(x, known) for x, known in zip(at, published, strict=True) if known == known]
        if there:
            ax.plot(*zip(*there, strict=True), "D", color=BLACK, markeredgecolor="#FFFFFF", markersize=7, zorder=5)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlim(-0.5, len(groups) - 0.5)
    ax.grid(True, axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_ylabel(TFLOPS_LABEL)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _legend(figure: Figure, ax: Axes, published: bool) -> None:
    """The legend of the bars, and of the diamonds, below the figure."""
    handles, labels = ax.get_legend_handles_labels()
    if published:
        (diamond,) = ax.plot([], [], "D", color=BLACK, markeredgecolor="#FFFFFF", markersize=7)
        handles, labels = [*handles, diamond], [*labels, "published by Holmes"]
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def plot(frame: pandas.DataFrame) -> Mapping[str, Figure]:
    """The figures: networks, planners, parts of Holmes, rates of the Ethernet."""
    rows = tflops(frame)
    networks = rows[rows.part == "networks"]
    return {
        "holmes-networks": _plot_networks(networks),
        "holmes-planners": _plot_planners(networks),
        "holmes-ablation": _plot_ablation(rows),
        "holmes-ethernet": _plot_ethernet(rows),
    }


def _both(rows: pandas.DataFrame, **where: Any) -> tuple[float, float]:
    """Ours and what is published."""
    return _value(rows, "tflops", **where), _value(rows, "published_tflops", **where)


def _plot_networks(rows: pandas.DataFrame) -> Figure:
    figure, axes = _figure(len(MODELS), 7.8)
    names = {network: "half InfiniBand, half RoCE" if network == "hybrid" else NETWORKS[network] for network in NETWORK_STYLES}
    for model, ax in zip(MODELS, axes, strict=True):
        groups = [f"{nodes} nodes, {8 * nodes} GPUs" for nodes in NODES]
        own = rows[(rows.model == model) & (rows.planner == "holmes")]

        def value(g: int, key: str, own: pandas.DataFrame = own) -> tuple[float, float]:
            return _both(own, nodes=NODES[g], network=key)

        _bars(ax, groups, NETWORK_STYLES, names, value)
        ax.set_title(f"{_billions(model)}, planned by holmes", loc="left", fontsize=11)
    _legend(figure, axes[0], published=True)
    return figure


def _plot_planners(rows: pandas.DataFrame) -> Figure:
    figure, axes = _figure(len(MODELS), 8.2)
    networks = list(NETWORKS)
    for model, ax in zip(MODELS, axes, strict=True):
        own = rows[(rows.model == model) & (rows.nodes == MOST_NODES)]
        names = {planner: planner for planner in PLANNER_STYLES}
        groups = [SHORT[network] for network in networks]

        def value(g: int, key: str, own: pandas.DataFrame = own) -> tuple[float, float]:
            return _both(own, network=networks[g], planner=key)

        _bars(ax, groups, PLANNER_STYLES, names, value)
        ax.set_title(f"{_billions(model)}, {MOST_NODES} nodes", loc="left", fontsize=11)
    _legend(figure, axes[0], published=True)
    return figure


def _ablation(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of the parts of Holmes, and of all of it on the same clusters."""
    whole = (rows.part == "networks") & (rows.network == "mingled") & (rows.planner == "holmes")
    return rows[(rows.part == "ablation") | (whole & rows.nodes.isin(ABLATED_NODES))]


def _plot_ablation(rows: pandas.DataFrame) -> Figure:
    figure, (ax,) = _figure(1, 4.6)
    own = _ablation(rows)
    places = [(model, nodes) for model in MODELS for nodes in ABLATED_NODES]
    groups = [f"{_billions(model)}\n{nodes} nodes" for model, nodes in places]

    def value(g: int, key: str) -> tuple[float, float]:
        model, nodes = places[g]
        return _value(own, "tflops", model=model, nodes=nodes, planner=key), float("nan")

    _bars(ax, groups, ABLATION_STYLES, ABLATED, value)
    ax.set_title("Nodes of InfiniBand and of RoCE in turn", loc="left", fontsize=11)
    _legend(figure, ax, published=False)
    return figure


def _swept(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows at all rates of the Ethernet, those of the other networks at its own."""
    chosen = (rows.model == SWEPT_MODEL) & (rows.nodes == MOST_NODES)
    return rows[chosen & rows.planner.isin(PLANNERS[:2]) & (rows.part != "ablation")]


def _plot_ethernet(rows: pandas.DataFrame) -> Figure:
    figure, (ax,) = _figure(1, 4.6)
    own = _swept(rows)
    lines = (
        ("mingled", "holmes", BLUE, "o", "-"),
        ("mingled", "megatron", VERMILLION, "s", "--"),
        ("ethernet", "holmes", GREEN, "^", "-."),
        ("ethernet", "megatron", ORANGE, "v", ":"),
    )
    for network, planner, colour, marker, dash in lines:
        line = own[(own.network == network) & (own.planner == planner)].sort_values("ethernet_bytes_per_s")
        label = f"{NETWORKS[network]}: {planner}"
        ax.plot(line.ethernet_bytes_per_s * 8e-9, line.tflops, dash, color=colour, marker=marker, label=label)
    for network, colour, lengths in (("infiniband", BLACK, (7, 3)), ("roce", PURPLE, (2, 2))):
        height = _value(own, "tflops", network=network, planner="holmes")
        ax.axhline(height, color=colour, linewidth=1.6, linestyle=(0, lengths), label=f"{NETWORKS[network]}: holmes")
    ax.set_xscale("log")
    rates = sorted(set(own.ethernet_bytes_per_s * 8e-9))
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.minorticks_off()
    ax.set_xlabel("Ethernet of each node, in Gbit/s")
    ax.set_ylabel(TFLOPS_LABEL)
    ax.set_ylim(0, None)
    ax.grid(True, color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_title(f"{_billions(SWEPT_MODEL)}, {MOST_NODES} nodes", loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


# --- What is told ----------------------------------------------------------------------------------------------------


def _told(value: float, digits: int = 0) -> str:
    return "-" if value != value else f"{value:.{digits}f}"


def table(frame: pandas.DataFrame) -> str:
    """TFLOP/s and samples/s by network; planners; what each part of Holmes is good for; ours beside what is published."""
    rows = tflops(frame)
    networks = rows[rows.part == "networks"]
    own = networks[networks.planner == "holmes"]
    parts = [
        "TFLOP/s of a GPU (samples/s of the cluster), planned by holmes:\n\n",
        markdown(("model, nodes", *NETWORKS.values(), "mixed / RoCE"), _network_lines(own)),
        f"\nTFLOP/s of a GPU on {MOST_NODES} nodes, by planner:\n\n",
        markdown(("model, planner", *NETWORKS.values()), _planner_lines(networks)),
        "\nTFLOP/s of a GPU without parts of Holmes, the nodes of both kinds in turn:\n\n",
        markdown(("model, nodes", *ABLATED.values()), _ablation_lines(_ablation(rows))),
        f"\nTFLOP/s of a GPU, {_billions(SWEPT_MODEL)}, {MOST_NODES} nodes, by the rate of the Ethernet:\n\n",
        _ethernet_table(_swept(rows)),
        "\nTFLOP/s of a GPU, published and ours:\n\n",
        markdown(("model, nodes, network, planner", "published", "ours", "ours / published"), _published_lines(networks)),
    ]
    return "".join(parts)


def _network_lines(own: pandas.DataFrame) -> Iterator[list[str]]:
    for model in MODELS:
        for nodes in NODES:
            at = {"model": model, "nodes": nodes}
            found = {network: _value(own, "tflops", network=network, **at) for network in NETWORKS}
            samples = {network: _value(own, "samples_per_s", network=network, **at) for network in NETWORKS}
            cells = [f"{_told(found[network])} ({_told(samples[network], 1)})" for network in NETWORKS]
            yield [f"{_billions(model)}, {nodes}", *cells, _told(found["mingled"] / found["roce"], 2)]


def _planner_lines(networks: pandas.DataFrame) -> Iterator[list[str]]:
    own = networks[networks.nodes == MOST_NODES]
    for model in MODELS:
        for planner in PLANNERS:
            found = [_value(own, "tflops", model=model, planner=planner, network=network) for network in NETWORKS]
            yield [f"{_billions(model)}, {planner}", *map(_told, found)]


def _ablation_lines(own: pandas.DataFrame) -> Iterator[list[str]]:
    for model in MODELS:
        for nodes in ABLATED_NODES:
            found = [_value(own, "tflops", model=model, nodes=nodes, planner=planner) for planner in ABLATED]
            yield [f"{_billions(model)}, {nodes}", *map(_told, found)]


def _ethernet_table(own: pandas.DataFrame) -> str:
    rates = sorted(set(own.ethernet_bytes_per_s))
    lines = []
    for network in ("mingled", "ethernet"):
        for planner in PLANNERS[:2]:
            at = {"network": network, "planner": planner}
            found = [_value(own, "tflops", ethernet_bytes_per_s=rate, **at) for rate in rates]
            lines.append([f"{NETWORKS[network]}, {planner}", *map(_told, found)])
    return markdown(("network, planner", *(f"{rate * 8e-9:g} Gbit/s" for rate in rates)), lines)


def _published_lines(networks: pandas.DataFrame) -> Iterator[list[str]]:
    for row in networks[networks.published_tflops.notna()].to_dict("records"):
        name = f"{_billions(row['model'])}, {row['nodes']}, {NETWORKS[row['network']]}, {row['planner']}"
        ours, published = row["tflops"], row["published_tflops"]
        yield [name, _told(published), _told(ours), _told(ours / published, 2)]


HOLMES = Experiment(
    name="holmes",
    paper="Holmes, arXiv 2312.03549",
    question="What do nodes with different network cards cost, and what wins it back?",
    runs=runs,
    plot=plot,
    table=table,
)
