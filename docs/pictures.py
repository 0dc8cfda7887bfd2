"""Draws the pictures of docs/concepts.md, and writes its program, from small worlds that are planned by hand and simulated.

python docs/pictures.py [FOLDER]      # default: docs/images
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.pictures import draw_plan, draw_timeline, draw_two_timelines
from experiments.plots import BLUE, save_figure
from partition import Search
from partition.search import planner_named
from sim.cost.estimates import Estimates
from sim.engine import simulate
from sim.metrics import report
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node, read_cluster
from sim.spec.compile import compile_plan
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.judge import Cost, Verdict
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import program_text
from sim.spec.reading import write_file
from sim.spec.transformer import transformer

ROOT = Path(__file__).resolve().parents[1]


def mixed() -> tuple[Cluster, Plan]:
    """Two A100s beside four 4090s, and two pipelines that differ in everything."""
    card = Nic("infiniband", 200e9 / 8)
    nodes = (
        Node("a100", gpu_kind("A100-80GB-SXM"), 2, Intra("nvlink", 300e9), card),
        Node("rtx4090", gpu_kind("RTX4090"), 4, Intra("pcie4", 24e9), card),
    )
    cluster = Cluster("two-and-four", nodes, Fabric(latency_s=50e-6))
    whole = Stage((Replica(("a100/0", "a100/1"), 1),), ((0, 24),))
    parts = (
        Stage((Replica(("rtx4090/0", "rtx4090/1"), 1),), ((0, 12),)),
        Stage((Replica(("rtx4090/2",), 1),), ((12, 18),)),
        Stage((Replica(("rtx4090/3",), 1),), ((18, 24),)),
    )
    pipelines = (Pipeline(1, 10, (whole,)), Pipeline(1, 8, parts))
    return cluster, Plan(cluster.name, "gpt3-1.3b", 2048, 18, pipelines, zero_stage=1)


def four_stages(schedule: str) -> tuple[Cluster, Plan]:
    """Eight micro-batches through four equal stages on the GPUs of one node."""
    node = Node("a100", gpu_kind("A100-80GB-SXM"), 4, Intra("nvswitch", 300e9))
    stages = tuple(Stage((Replica((f"a100/{i}",), 1),), ((8 * i, 8 * i + 8),)) for i in range(4))
    cluster = Cluster("four", (node,), Fabric(latency_s=50e-6))
    return cluster, Plan(cluster.name, "llama-2-7b", 2048, 8, (Pipeline(1, 8, stages),), schedule=schedule)


def draw_mixed(folder: Path) -> None:
    """Nothing; the plan, its program and its timeline."""
    cluster, plan = mixed()
    trace = simulate(plan, cluster)
    draw_plan(plan, cluster, trace.peak_bytes, folder / "concept-plan.svg", replace=True)
    draw_timeline(trace, cluster, folder / "concept-lanes.svg", replace=True)
    fewer = tuple(replace(one, micro_batches=2) for one in plan.pipelines)
    shorter = replace(plan, global_batch=4, pipelines=fewer, zero_stage=0, overlap_gradients=False)
    write_file(folder / "concept-program.txt", program_text(compile_plan(shorter)), replace=True)


def draw_bubbles(folder: Path) -> None:
    """Nothing; one model under two schedules, one above the other."""
    cluster, first = four_stages("1f1b")
    _, second = four_stages("zb-2p")
    traces = [simulate(plan, cluster) for plan in (first, second)]
    titles = [
        f"{trace.plan.schedule}: bubble {100 * (report(trace, cluster).bubble or 0):.0f} %, "
        f"peak {max(trace.peak_bytes.values()) / 2**30:.0f} GiB"
        for trace in traces
    ]
    draw_two_timelines(traces[0], traces[1], cluster, folder / "concept-bubble.svg", (titles[0], titles[1]), replace=True)


def draw_judges(folder: Path) -> None:
    """Nothing; what the estimate says of plans, over what the simulation says of them."""
    cluster = read_cluster(ROOT / "examples" / "clusters" / "hexiscale-mixed-b.yaml")
    job = Job(transformer("llama-2-7b"), sequence_length=4096, global_batch=32)
    simulated, estimated = simulation(cluster, job), Estimates(cluster, job).judge
    pairs: list[tuple[float, float]] = []

    def both(plan: Plan) -> Verdict:
        verdict = simulated(plan)
        if isinstance(verdict, Cost) and isinstance(quick := estimated(plan), Cost):
            pairs.append((verdict.iteration_s, quick.iteration_s))
        return verdict

    planner_named("megatron")(Search(cluster, job, both, budget_s=600))
    planner_named("random")(Search(cluster, job, both, budget_s=600))
    figure = Figure(figsize=(5.5, 5.5), layout="constrained")
    ax = figure.subplots()
    ends = (0.9 * min(map(min, pairs)), 1.1 * max(map(max, pairs)))
    ax.plot(ends, ends, color="#909090", linewidth=0.8)
    ax.plot(*zip(*pairs, strict=True), "o", color=BLUE, markersize=3.5, alpha=0.6)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="simulated iteration in s", ylabel="estimated iteration in s")
    ax.set_title(f"{len(pairs)} plans, two judges", loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    save_figure(figure, folder / "concept-judges.svg", replace=True)


def draw(folder: Path) -> None:
    """Nothing; writes all pictures into the folder."""
    draw_mixed(folder)
    draw_bubbles(folder)
    draw_judges(folder)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
