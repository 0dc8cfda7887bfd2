"""Metis and Sailor: mixed pools of GPUs, their throughput and what a token costs on them. See docs/experiments/pools.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.papers.experiment import Experiment, markdown
from experiments.peers import peers
from experiments.plots import BLACK, BLUE, DOTS_PER_INCH, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from experiments.sweep import Label, Run, given
from partition.objective import Objective, pools
from sim.spec.cluster import PCIE_BYTES_PER_S, Cluster, Fabric, Intra, Nic, Node, WideAreaLink, links
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.transformer import transformer

if TYPE_CHECKING:
    import pandas

NODE_GPUS = 4
LATENCY_S = 50e-6
KINDS: Mapping[str, tuple[str, str, float]] = {
    "H100": ("H100-80GB-SXM", "nvlink", 100e9 / 8),
    "A100": ("A100-40GB-SXM", "nvlink", 50e9 / 8),
    "V100": ("V100-16GB-SXM", "nvlink", 32e9 / 8),
    "T4": ("T4", "pcie3", 32e9 / 8),
    "4090": ("RTX4090", "pcie4", 25e9 / 8),
}
"""By short name: the GPU, what is inside its nodes of four, and the Ethernet of a node. The rates are assumed; those of A100 and
V100 are as in experiments/data/peer_plans."""

Pool = Mapping[str, int]
"""GPUs of each kind."""

GROWING: Mapping[str, tuple[Pool, ...]] = {
    "datacenter": (
        {"A100": 16},
        {"A100": 16, "V100": 8},
        {"A100": 16, "V100": 16},
        {"A100": 16, "V100": 16, "T4": 8},
        {"A100": 16, "V100": 16, "T4": 16},
    ),
    "consumer": (
        {"H100": 8},
        {"H100": 8, "A100": 8},
        {"H100": 8, "A100": 16},
        {"H100": 8, "A100": 16, "4090": 8},
        {"H100": 8, "A100": 16, "4090": 16},
    ),
}
"""Pools that grow, the kind with the fastest GPUs first."""
JOBS = {
    "datacenter": Job(transformer("gpt3-1.3b"), 2048, 512, "fp16"),
    "consumer": Job(transformer("llama-2-7b"), 2048, 256, "bf16"),
}
SHARES = (0, 8, 16, 24, 32)
"""A100 of 32 GPUs, the others V100."""
MOST = 32
APART = {"A100": MOST}
"""The pool whose second half is put at another site."""
WIDE_AREA_BYTES_PER_S = (20e9 / 8, 5e9 / 8, 1e9 / 8)
WIDE_AREA_S = 20e-3
LARGE_BATCH = 2048
"""Sequences, four times as many as else; tried at one of the sites and at both, with the fastest link between them."""

PLANNERS = ("metis", "sailor", "amp", "flashflex", "megatron", "motley")
SINGLE_KIND = "single-kind"
BASELINES = (SINGLE_KIND, "uniform-grid")
RANDOM = ("flashflex", "motley")
SEEDS = (0, 1, 2)
"""Of the planners whose plans depend on it."""
FRONTIER_PLANNER = "sailor"
BUDGET_S, RANDOM_BUDGET_S = 30.0, 5.0
"""Planners that draw nothing end by themselves, most of them within seconds: their plans are the same on every machine."""

CLAIMED_PER_S: Mapping[tuple[str, str], float] = {
    ("sailor", "pool-a100x8-v100x8"): 0.0435,
    ("metis", "pool-a100x8-v100x8"): 0.0403,
    ("amp", "pool-a100x8-v100x8"): 0.0212,
    ("flashflex", "pool-a100x8-v100x8"): 0.0217,
    ("sailor", "pool-a100x32-v100x32"): 0.1351,
    ("metis", "pool-a100x32-v100x32"): 0.1388,
    ("amp", "pool-a100x32-v100x32"): 0.0769,
    ("flashflex", "pool-a100x32-v100x32"): 0.0608,
    ("sailor", "pool-a100x32-v100x96"): 0.17,
    ("amp", "pool-a100x32-v100x96"): 0.1316,
    ("flashflex", "pool-a100x32-v100x96"): 0.1175,
}
"""Iterations per second that Sailor's own simulator gives the published plans (experiments/data/peer_plans, README)."""

PROGRAMS = ("sailor", "metis", "amp", "flashflex")


# --- The runs --------------------------------------------------------------------------------------------------------


def name_of(pool: Pool) -> str:
    """Its kinds and how many of each there are."""
    return " + ".join(f"{count} {kind}" for kind, count in pool.items() if count)


def cluster(pool: Pool) -> Cluster:
    """The pool in nodes of four."""
    nodes = []
    for kind, count in pool.items():
        gpu_name, inside, rate = KINDS[kind]
        gpu = gpu_kind(gpu_name)
        within = PCIE_BYTES_PER_S.get(inside, gpu.nvlink_bytes_per_s)
        assert within is not None and count % NODE_GPUS == 0
        step = links().latency_s[inside], links().step_s
        intra = Intra(inside, within, host_bandwidth_bytes_per_s=within, latency_s=step[0], step_s=step[1])
        nic = Nic("ethernet", rate)
        nodes += [Node(f"{kind.lower()}-{i}", gpu, NODE_GPUS, intra, nic) for i in range(count // NODE_GPUS)]
    fabric = Fabric(LATENCY_S, start_s=links().start_s, step_s=links().step_s)
    return Cluster(name_of(pool), tuple(nodes), fabric)


def apart(on: Cluster, bytes_per_s: float) -> Cluster:
    """The cluster with the second half of its nodes at another site, behind a link of this rate."""
    half = len(on.nodes) // 2
    nodes = tuple(replace(node, site="here" if i < half else "there") for i, node in enumerate(on.nodes))
    link = WideAreaLink(("here", "there"), bytes_per_s, WIDE_AREA_S)
    return replace(on, name=f"{on.name} at two sites", nodes=nodes, wan=(link,))


def with_tensor_cores(on: Cluster) -> Cluster:
    """The cluster whose GPUs do the matmuls of an fp32 job in TF32, where they can."""
    nodes = []
    for node in on.nodes:
        gpu, rate = node.gpu, node.gpu.peak("tf32")
        if rate is not None:
            efficiency = replace(gpu.efficiency, fp32_fraction=gpu.efficiency.matmul_fraction)
            gpu = replace(gpu, peak_flop_per_s={**gpu.peak_flop_per_s, "fp32": rate}, efficiency=efficiency)
        nodes.append(replace(node, gpu=gpu))
    return replace(on, nodes=tuple(nodes))


def runs() -> Iterator[Run]:
    """Growing pools, kinds alone, shares of two kinds, two sites, the parts that an objective of cost tries, published plans."""
    for series, grown in GROWING.items():
        for pool in grown:
            for planner in (*PLANNERS, *BASELINES):
                for seed in SEEDS if planner in RANDOM else SEEDS[:1]:
                    yield _search("growing", series, pool, planner, seed)
        for kind, count in grown[-1].items():
            if kind not in grown[0]:
                yield _search("alone", series, {kind: count}, "megatron")
    for count in SHARES:
        pool = {kind: of_kind for kind, of_kind in (("A100", count), ("V100", MOST - count)) if of_kind}
        for planner in (*PLANNERS, SINGLE_KIND):
            yield _search("shares", "datacenter", pool, planner, labels=(("a100s", count),))
    for rate in WIDE_AREA_BYTES_PER_S:
        for planner in PLANNERS:
            run = _search("sites", "datacenter", APART, planner, labels=(("wide_area_bytes_per_s", rate),))
            yield replace(run, cluster=apart(run.cluster, rate))
    half = {kind: count // 2 for kind, count in APART.items()}
    for pool in (half, APART):
        for planner in PLANNERS:
            run = _search("batch", "datacenter", pool, planner)
            on = run.cluster if pool is half else apart(run.cluster, WIDE_AREA_BYTES_PER_S[0])
            yield replace(run, cluster=on, job=replace(run.job, global_batch=LARGE_BATCH))
    for series, grown in GROWING.items():
        for part in pools(cluster(grown[-1]), JOBS[series], Objective("cost")):
            labels = _labels("frontier", series, _kinds(part))
            yield Run(part, JOBS[series], FRONTIER_PLANNER, budget_s=BUDGET_S, labels=labels)
    for peer in peers():
        labels = (("part", "published"), ("program", peer.program))
        claimed = CLAIMED_PER_S.get((peer.program, peer.cluster.name))
        if claimed is None:
            yield given(peer.cluster, peer.plan, labels=labels)
            continue
        for tensor_cores in (False, True):
            on = with_tensor_cores(peer.cluster) if tensor_cores else peer.cluster
            told = (("claimed_per_s", claimed), ("tensor_cores", tensor_cores))
            yield given(on, peer.plan, labels=(*labels, *told))


def _search(part: str, series: str, pool: Pool, planner: str, seed: int = 0, labels: tuple[tuple[str, Label], ...] = ()) -> Run:
    named = (*_labels(part, series, pool), *labels)
    budget_s = RANDOM_BUDGET_S if planner in RANDOM else BUDGET_S
    return Run(cluster(pool), JOBS[series], planner, budget_s=budget_s, seed=seed, labels=named)


def _labels(part: str, series: str, pool: Pool) -> tuple[tuple[str, Label], ...]:
    return (("part", part), ("series", series), ("pool", name_of(pool)))


def _kinds(on: Cluster) -> Pool:
    """The GPUs of each kind that a cluster has, by short names."""
    short = {gpu: kind for kind, (gpu, _, _) in KINDS.items()}
    found: dict[str, int] = {}
    for node in on.nodes:
        kind = short[node.gpu.name]
        found[kind] = found.get(kind, 0) + node.gpus
    return found


# --- What the rows say -----------------------------------------------------------------------------------------------


def with_dollars(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows with the column `per_billion`, dollars for a billion tokens where all GPUs of the pool are rented.

    Where a symmetric plan stands in for a planner that found none, nothing is known of that planner's plan.
    """
    rows = frame.assign(per_billion=frame.dollars / (frame.global_batch * frame.sequence_length) * 1e9)
    measures = ["tokens_per_s", "per_billion", "gpus_used"]
    rows[measures] = rows[measures].mask(rows.stands_in.eq(True))
    return rows


def _over_seeds(rows: pandas.DataFrame, column: str, **where: Any) -> tuple[float, float, float]:
    """Lowest, median and highest value of a column in the rows where other columns are as given; NaN where there is none."""
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    values = rows[column]
    return float(values.min()), float(values.median()), float(values.max())


# --- What is drawn ---------------------------------------------------------------------------------------------------

STYLES = {
    "metis": (ORANGE, "s", "-"),
    "sailor": (VERMILLION, "^", "-"),
    "amp": (PURPLE, "v", "--"),
    "flashflex": (SKY, "D", "-"),
    "megatron": (GREEN, "P", "--"),
    "motley": (BLUE, "o", "-"),
    SINGLE_KIND: (BLACK, "x", ":"),
}
LABELS = {SINGLE_KIND: "single-kind (the others left out)"}


def _figure(rows: int, columns: int, height_inch: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(10.6, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False, sharex="col")]


def _style(ax: Axes) -> None:
    ax.grid(True, color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _lines(ax: Axes, rows: pandas.DataFrame, column: str, scale: float, key: str, places: Sequence[Any]) -> None:
    """Draws a line over the places for each planner that was tried at all of them, with the range of its seeds."""
    for i, (planner, (colour, marker, dash)) in enumerate(STYLES.items()):
        if set(places) - set(rows[rows.planner == planner][key]):
            continue
        found = [_over_seeds(rows, column, planner=planner, **{key: place}) for place in places]
        low, middle, high = ([scale * value for value in values] for values in zip(*found, strict=True))
        x = [at + 0.02 * (i - 3) for at in range(len(places))]
        errors = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        width = 2.2 if planner == "motley" else 1.4
        ax.errorbar(
            x,
            middle,
            errors,
            linestyle=dash,
            color=colour,
            marker=marker,
            linewidth=width,
            capsize=3,
            label=LABELS.get(planner, planner),
        )
    _style(ax)


def plot(frame: pandas.DataFrame) -> Mapping[str, Figure]:
    """The figures: growing pools, shares of two kinds, two sites, what every part of a pool costs."""
    rows = with_dollars(frame)
    return {
        "pools-growing": _plot_growing(rows[rows.part == "growing"]),
        "pools-shares": _plot_shares(rows[rows.part == "shares"]),
        "pools-sites": _plot_sites(_at_sites(rows), _half(rows)),
        "pools-frontier": _plot_frontier(rows[rows.part == "frontier"]),
    }


def _title(series: str) -> str:
    job = JOBS[series]
    return f"{job.model.name}, {job.precision}"


def _plot_growing(rows: pandas.DataFrame) -> Figure:
    figure, axes = _figure(2, 2, 7.6)
    for (series, grown), (above, below) in zip(GROWING.items(), zip(*axes, strict=True), strict=True):
        own = rows[rows.series == series]
        names = [name_of(pool) for pool in grown]
        _lines(above, own, "tokens_per_s", 1e-3, "pool", names)
        _lines(below, own, "per_billion", 1.0, "pool", names)
        above.set_title(_title(series), loc="left", fontsize=11)
        below.set_xticks(range(len(names)), [name.replace(" + ", "\n+ ") for name in names], fontsize=9)
        for ax in (above, below):
            ax.set_ylim(0, None)
    axes[0][0].set_ylabel("thousand tokens/s")
    axes[1][0].set_ylabel("$ for a billion tokens, whole pool rented")
    _legend(figure, axes[0][0])
    return figure


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _ideal(rows: pandas.DataFrame) -> list[float]:
    """The tokens/s of each share if each GPU gave what it gives in the best plan of its kind alone."""
    best = {count: float(rows[rows.a100s == count].tokens_per_s.max()) for count in (0, MOST)}
    return [(best[0] * (MOST - count) + best[MOST] * count) / MOST for count in SHARES]


def _plot_shares(rows: pandas.DataFrame) -> Figure:
    figure, ((ax,),) = _figure(1, 1, 5.2)
    ideal = [value / 1e3 for value in _ideal(rows)]
    ax.plot(range(len(SHARES)), ideal, color="#909090", linewidth=5, alpha=0.45, label="as fast as the kinds alone")
    _lines(ax, rows, "tokens_per_s", 1e-3, "a100s", SHARES)
    ax.set_xticks(range(len(SHARES)), [f"{count} A100\n{MOST - count} V100" for count in SHARES])
    ax.set_ylim(0, None)
    ax.set_ylabel("thousand tokens/s")
    ax.set_title(f"{_title('datacenter')}, {MOST} GPUs", loc="left", fontsize=11)
    _legend(figure, ax)
    return figure


ONE_SITE = "one site"


def _at_sites(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of the pool at two sites, and of the same pool at one, with the column `between` for what joins the halves."""
    import pandas

    together = rows[(rows.part == "shares") & (rows.a100s == MOST)].assign(between=ONE_SITE)
    separate = rows[rows.part == "sites"]
    return pandas.concat([together, separate.assign(between=separate.wide_area_bytes_per_s.map(_between))])


def _between(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:g} Gbit/s"


def _half(rows: pandas.DataFrame) -> float:
    """Tokens/s of the best plan for half of the pool, alone."""
    half = name_of({kind: count // 2 for kind, count in APART.items()})
    return float(rows[(rows.part == "growing") & (rows.pool == half)].tokens_per_s.max())


def _plot_sites(rows: pandas.DataFrame, half_tokens_per_s: float) -> Figure:
    figure, ((ax,),) = _figure(1, 1, 4.8)
    places = [ONE_SITE, *map(_between, WIDE_AREA_BYTES_PER_S)]
    ax.axhline(half_tokens_per_s / 1e3, color="#909090", linewidth=5, alpha=0.45, label="one of the sites alone")
    _lines(ax, rows, "tokens_per_s", 1e-3, "between", places)
    ax.set_xticks(range(len(places)), [places[0], *(f"two sites,\n{place}" for place in places[1:])])
    ax.set_ylim(0, None)
    ax.set_ylabel("thousand tokens/s")
    ax.set_title(f"{_title('datacenter')}, {name_of(APART)}", loc="left", fontsize=11)
    _legend(figure, ax)
    return figure


_MIX_STYLES = ((BLUE, "o"), (VERMILLION, "^"), (GREEN, "s"), (ORANGE, "D"), (PURPLE, "P"), (BLACK, "X"))


def _mix(pool: str) -> str:
    """The kinds of a pool."""
    return " + ".join(part.split()[1] for part in pool.split(" + "))


def _front(own: pandas.DataFrame) -> pandas.DataFrame:
    """The rows that no other row beats both in tokens/s and in dollars, the fastest first."""
    ordered = own.dropna(subset=["tokens_per_s"]).sort_values(["tokens_per_s", "per_billion"], ascending=[False, True])
    return ordered[ordered.per_billion < ordered.per_billion.cummin().shift(fill_value=float("inf"))]


def _plot_frontier(rows: pandas.DataFrame) -> Figure:
    figure, (axes,) = _figure(1, 2, 5.0)
    for series, ax in zip(GROWING, axes, strict=True):
        own = rows[rows.series == series].dropna(subset=["tokens_per_s"])
        for mix, (colour, marker) in zip(dict.fromkeys(map(_mix, own.pool)), _MIX_STYLES, strict=False):
            points = own[own.pool.map(_mix) == mix]
            ax.plot(points.tokens_per_s / 1e3, points.per_billion, marker, color=colour, markersize=7, label=mix)
            ends = points.sort_values("tokens_per_s").iloc[[-1]]
            for _, end in ends.iterrows():
                ax.annotate(
                    f"{end.gpus}", (end.tokens_per_s / 1e3, end.per_billion), (5, 5), textcoords="offset points", fontsize=8
                )
        ax.set_title(_title(series), loc="left", fontsize=11)
        ax.set_xlabel("thousand tokens/s")
        _style(ax)
        if own.empty:
            ax.text(0.5, 0.5, "no plan was found in the time", ha="center", va="center", transform=ax.transAxes)
            ax.set_xticks([])
            ax.set_yticks([])
            continue
        front = _front(own)
        ax.plot(front.tokens_per_s / 1e3, front.per_billion, color="#606060", linewidth=1.2, linestyle="--", zorder=0.5)
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        ax.margins(0.08)
        ax.legend(fontsize=9, frameon=False)
    axes[0].set_ylabel("$ for a billion tokens")
    return figure


# --- What is told ----------------------------------------------------------------------------------------------------


def _told(value: float, digits: int = 1) -> str:
    return "-" if value != value else f"{value:,.{digits}f}"


def _with_range(found: tuple[float, float, float], scale: float, digits: int = 1) -> str:
    low, middle, high = (scale * value for value in found)
    told = _told(middle, digits)
    return told if low == high or middle != middle else f"{told} ({_told(low, digits)}-{_told(high, digits)})"


def table(frame: pandas.DataFrame) -> str:
    """Tokens/s, dollars and GPUs used by pool and planner; the cheapest and the fastest parts; published plans that fit."""
    rows = with_dollars(frame)
    growing, shares = rows[rows.part == "growing"], rows[rows.part == "shares"]
    heads = ("pool", *PLANNERS, *BASELINES)
    text = []
    for series, grown in GROWING.items():
        own = growing[growing.series == series]
        names = [name_of(pool) for pool in grown]
        text += [f"Thousand tokens/s, {_title(series)}; of {len(SEEDS)} seeds the median and the range:\n\n"]
        text += [markdown(heads, _lines_of(own, "tokens_per_s", 1e-3, "pool", names, names)), "\n"]
        text += [f"$ for a billion tokens, all GPUs of the pool rented, {_title(series)}:\n\n"]
        text += [markdown(heads, _lines_of(own, "per_billion", 1.0, "pool", names, names)), "\n"]
        text += [f"GPUs used, {_title(series)}:\n\n"]
        text += [markdown(heads, _lines_of(own, "gpus_used", 1.0, "pool", names, names, 0)), "\n"]
    alone = rows[(rows.part == "alone") | ((rows.part == "growing") & ~rows.pool.str.contains("+", regex=False))]
    text += ["Each kind alone, planned by megatron:\n\n", _alone_table(alone[alone.planner == "megatron"]), "\n"]
    names = [f"{count} A100, {MOST - count} V100" for count in SHARES]
    text += [f"Thousand tokens/s, {_title('datacenter')}, {MOST} GPUs, by share:\n\n"]
    ideal = [_told(value / 1e3) for value in _ideal(shares)]
    lines = list(_lines_of(shares, "tokens_per_s", 1e-3, "a100s", SHARES, names, planners=(*PLANNERS, SINGLE_KIND)))
    heads = ("pool", *PLANNERS, SINGLE_KIND, "as the kinds alone")
    text += [markdown(heads, [[*line, end] for line, end in zip(lines, ideal, strict=True)]), "\n"]
    places = [ONE_SITE, *map(_between, WIDE_AREA_BYTES_PER_S)]
    names = [place if place == ONE_SITE else f"two sites, {place}" for place in places]
    text += [f"Thousand tokens/s, {_title('datacenter')}, {name_of(APART)} (half of it alone: {_told(_half(rows) / 1e3)}):\n\n"]
    lines = list(_lines_of(_at_sites(rows), "tokens_per_s", 1e-3, "between", places, names, planners=PLANNERS))
    text += [markdown(("pool", *PLANNERS), lines), "\n"]
    large = rows[rows.part == "batch"]
    text += [f"The same with {LARGE_BATCH:,} sequences, thousand tokens/s:\n\n"]
    names = ["one of the sites alone", f"two sites, {_between(WIDE_AREA_BYTES_PER_S[0])}"]
    lines = list(_lines_of(large, "tokens_per_s", 1e-3, "pool", sorted(set(large.pool)), names, planners=PLANNERS))
    text += [markdown(("pool", *PLANNERS), lines), "\n"]
    for series in GROWING:
        front = _front(rows[(rows.part == "frontier") & (rows.series == series)])
        told = [[row.pool, _told(row.tokens_per_s / 1e3), _told(row.per_billion, 2)] for _, row in front.iterrows()]
        text += [f"Parts of the pool that no other part beats, {_title(series)}, planned by {FRONTIER_PLANNER}:\n\n"]
        text += [markdown(("part", "thousand tokens/s", "$ for a billion tokens"), told), "\n"]
    published = rows[rows.part == "published"]
    text += ["Published plans, judged as they are:\n\n", _published_table(published), "\n"]
    text += ["Seconds of an iteration of the published plans for pools of A100 and V100:\n\n", _claimed_table(published)]
    return "".join(text)


def _lines_of(
    rows: pandas.DataFrame,
    column: str,
    scale: float,
    key: str,
    places: Sequence[Any],
    names: Sequence[str],
    digits: int = 1,
    planners: Sequence[str] = (*PLANNERS, *BASELINES),
) -> Iterator[list[str]]:
    for place, name in zip(places, names, strict=True):
        found = [_over_seeds(rows, column, planner=planner, **{key: place}) for planner in planners]
        yield [name, *(_with_range(values, scale, digits) for values in found)]


def _alone_table(rows: pandas.DataFrame) -> str:
    lines = [
        [f"{row.pool}, {row.model}", _told(row.tokens_per_s / 1e3), _told(row.per_billion), _told(100 * row.mfu)]
        for _, row in rows.sort_values(["series", "pool"]).iterrows()
    ]
    return markdown(("GPUs, model", "thousand tokens/s", "$ for a billion tokens", "MFU %"), lines)


def _published_table(rows: pandas.DataFrame) -> str:
    lines = []
    for program in PROGRAMS:
        own = rows[(rows.program == program) & ~rows.tensor_cores.eq(True)]
        lines.append([program, len(own), int(own.iteration_s.notna().sum()), int((own.reason == "memory").sum())])
    return markdown(("program", "plans", "run", "do not fit in memory"), lines)


def _claimed_table(rows: pandas.DataFrame) -> str:
    lines = []
    for (program, pool), own in rows[rows.claimed_per_s.notna()].groupby(["program", "cluster"], sort=False):
        claimed_s = 1 / float(own.claimed_per_s.iloc[0])
        plain_s, tensor_s = (float(own[own.tensor_cores.eq(which)].iteration_s.iloc[0]) for which in (False, True))
        ratios = (_told(claimed_s / ours_s, 2) for ours_s in (plain_s, tensor_s))
        lines.append([f"{pool}, {program}", *(_told(each_s, 2) for each_s in (claimed_s, plain_s, tensor_s)), *ratios])
    lines.sort(key=lambda line: (line[0].split(",")[0], float(line[1])))
    heads = ("pool, program", "Sailor's simulator", "ours, fp32", "ours, TF32", "Sailor's / fp32", "Sailor's / TF32")
    return markdown(heads, lines)


POOLS = Experiment(
    name="pools",
    paper="Metis, USENIX ATC 2024; Sailor, arXiv 2504.17096",
    question="What are pools of several kinds and places of GPUs worth?",
    runs=runs,
    plot=plot,
    table=table,
)
