"""Sets motley beside the best Megatron grid on clusters of equal A100s.

    python benchmarks/homogeneous.py

Clusters of 8 to 64 A100-80GB in nodes of eight: with NVLink and 200 Gbit/s InfiniBand, and on PCIe with 25 Gbit/s Ethernet;
three models each. motley has ten seconds. The planner `megatron` has the best of its grids judged; here all grids of it are,
interleaved ones, too, in the order of their estimates, until these are SLACK times the best one's. Both are judged by simulation.
Writes benchmarks/results/homogeneous.txt; rows of homogeneous.csv are not searched again, unless `--again` says so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from run import machine
from searches import Row, searched, seconds

from experiments.comparison import Cell, row, run_cell
from partition.drafts import make_plan, usable_nodes
from partition.planners.megatron import grids, interleaved_grids
from partition.search import Search, register
from sim.cost.estimates import Estimates
from sim.spec.cluster import Cluster, parse_cluster
from sim.spec.job import Job
from sim.spec.reading import write_file
from sim.spec.transformer import Transformer, transformer

HERE = Path(__file__).parent

LIMIT_S, GRIDS_S = 10.0, 7200.0
"""Seconds that motley and the grids have; the second is so long that all are judged."""

SLACK = 1.3
"""Far more than estimates err on grids."""

SIZES, BATCH, LENGTH = (8, 16, 32, 64), 256, 2048

SORTS = {
    "nvlink": "gpu: A100-80GB-SXM, gpus: 8, intra: nvswitch, nic: {kind: infiniband, bandwidth: 200 Gbit/s}",
    "pcie": "gpu: A100-80GB-PCIe, gpus: 8, intra: pcie4, nic: {kind: ethernet, bandwidth: 25 Gbit/s}",
}
"""What nodes have, by the name of the clusters."""


def models() -> list[Transformer]:
    """Two Llamas, and GPT-3 in the shape of OPT-30B (Zhang et al., 2022, arXiv:2205.01068, table 1)."""
    shape = {"layers": 48, "hidden": 7168, "embedding_width": 7168, "ffn": 28672, "heads": 56, "kv_heads": 56}
    return [transformer("llama-2-7b"), transformer("llama-2-13b"), replace(transformer("gpt3-13b"), name="gpt3-30b", **shape)]


def clusters() -> Iterator[Cluster]:
    """The clusters, the small ones first."""
    for size in SIZES:
        for sort, has in SORTS.items():
            name = f"a100-{sort}-{size}"
            text = f"name: {name}\nnodes: [{{name: a100, count: {size // 8}, {has}}}]\nfabric: {{latency: 5 us}}\n"
            yield parse_cluster(text, f"{name}.yaml")


@register("all-grids")
def all_grids(search: Search) -> None:
    """Has the grids of the planner `megatron` judged in the order of their estimates, as far as they may be the best."""
    estimates = Estimates(search.cluster, search.job)
    found = []
    for grid, own in grids(search, usable_nodes(search)):
        for draft, settings in ((grid, own), *interleaved_grids(grid, own)):
            plan = make_plan(search.cluster, search.job, draft, settings)
            estimated_s = estimates.iteration_s(plan)
            if estimated_s < math.inf:
                found.append((estimated_s, len(found), plan))
    for estimated_s, _, plan in sorted(found):
        if search.best is not None and estimated_s > SLACK * search.best[1].iteration_s:
            break
        search.consider(plan)


def cells() -> Iterator[Cell]:
    """Pairs of searches: the grids and motley on each cluster with each model."""
    for cluster in clusters():
        for model in models():
            job = Job(model, LENGTH, BATCH)
            yield Cell(cluster, job, "all-grids", budget_s=GRIDS_S)
            yield Cell(cluster, job, "motley", budget_s=LIMIT_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches what is missing, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of homogeneous.csv and homogeneous.txt")
    parser.add_argument("--again", action="store_true", help="search anew what stands in homogeneous.csv")
    given = parser.parse_args(arguments)
    rows = searched(list(cells()), given.out / "homogeneous.csv", given.again, lambda cell: row(run_cell(cell)), _tell)
    text = report(rows)
    write_file(given.out / "homogeneous.txt", f"{machine()}\n\n{text}", replace=True)
    print(text)


def _tell(cell: Cell, entry: Row) -> None:
    where = f"{cell.cluster.name} {cell.job.model.name} {cell.planner}"
    print(f"{where}: {seconds(entry):.3f} s, {entry['judged']} judged in {entry['search_s']:.0f} s", flush=True)


def report(rows: Sequence[Row]) -> str:
    """The table: seconds of an iteration of the best grid and of motley's plan, and their ratio."""
    lines = [
        f"Seconds of an iteration by simulation, batch {BATCH}, sequence {LENGTH}: the best Megatron grid, and motley's plan",
        f"after {LIMIT_S:g} s of search, seed 0; and how many times as fast motley's is.",
        "",
        f"{'cluster':16s} {'model':12s} {'grids judged':>12s} {'best grid':>10s} {'motley':>10s} {'ratio':>7s}",
    ]
    ratios = []
    for grid, own in zip(rows[::2], rows[1::2], strict=True):
        start = f"{grid['cluster']:16s} {grid['model']:12s} {grid['judged']:>12}"
        if math.isinf(seconds(grid)):
            lines.append(f"{start} {'no plan':>10s} {seconds(own):10.3f}")
            continue
        ratios.append(seconds(grid) / seconds(own))
        lines.append(f"{start} {seconds(grid):10.3f} {seconds(own):10.3f} {ratios[-1]:7.3f}")
    if ratios:
        slower = sum(ratio < 1 - 1e-9 for ratio in ratios)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines += ["", f"geometric mean {mean:.3f}, lowest {min(ratios):.3f}; motley is slower in {slower} of {len(ratios)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
