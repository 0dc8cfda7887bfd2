"""Measures how far the plans that motley finds on the HexiScale clusters are from the proven bound, and what lies between.

    python benchmarks/bound_gap.py

A row per cluster and model, global batch 256: the mixed cells of the demonstration, with 10 Gbit/s between the nodes, and the
clusters of the published plans, with 10 and 4.3 Gbit/s. Writes benchmarks/results/bound-gap.txt; the plans whose seconds stand in
bound-gap.csv are not searched again, unless `--again` says so, but the bounds are always those of the code as it is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from run import machine
from searches import Row, searched, seconds

from experiments.commands.options import budget_s
from experiments.comparison import Cell, run_cell
from experiments.hexiscale import facts
from experiments.peers import arena
from partition.bound import Bound, gap, lower_bound
from sim.engine import simulate
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.reading import write_file
from sim.spec.transformer import transformer

HERE = Path(__file__).parent
CLUSTERS = HERE.parent / "examples" / "clusters"
BATCH, LENGTH = 256, 4096
CAUSES = ("compute", "bubble", "network", "recompute")


def cells(limit_s: float) -> Iterator[Cell]:
    """The searches: the clusters with 10 Gbit/s first."""
    mixed = [(entry.cluster, entry.model) for entry in facts().reports if entry.cluster.startswith("mixed")]
    for name, model in dict.fromkeys(mixed):
        cluster = read_cluster(CLUSTERS / f"hexiscale-{name}.yaml")
        yield Cell(cluster, Job(transformer(model), LENGTH, BATCH), "motley", budget_s=limit_s)
    for rate in ("10gbit", "4gbit"):
        for cluster, job in arena():
            if cluster.name.startswith("mixed") and cluster.name.endswith(f"-{rate}"):
                yield Cell(cluster, replace(job, global_batch=BATCH), "motley", budget_s=limit_s)


def row(cell: Cell) -> Row:
    """What a search found: the seconds of an iteration, and what the GPUs, weighted by what they could do, spend them on."""
    outcome = run_cell(cell)
    bound = lower_bound(cell.cluster, cell.job)
    found: Row = {"cluster": cell.cluster.name, "model": cell.job.model.name}
    if outcome.plan is None or outcome.cost is None or not isinstance(bound, Bound):
        return found | dict.fromkeys(("iteration_s", *(f"{cause}_s" for cause in CAUSES)))
    iteration_s, parts = outcome.cost.iteration_s, asdict(gap(bound, simulate(outcome.plan, cell.cluster), cell.cluster))
    spent = {f"{cause}_s": iteration_s * parts[cause] + getattr(bound, f"{cause}_s") for cause in CAUSES}
    return {**found, "iteration_s": iteration_s, **spent}


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches what is missing, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", default="30s", help="how long a search may take")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of bound-gap.csv and bound-gap.txt")
    parser.add_argument("--again", action="store_true", help="search anew what stands in bound-gap.csv")
    given = parser.parse_args(arguments)
    asked = list(cells(budget_s(given.budget)))
    rows = searched(asked, given.out / "bound-gap.csv", given.again, row, lambda cell, _: print(cell.cluster.name, flush=True))
    head = f"{'cluster':20s} {'model':12s} {'iteration s':>11s} {'bound s':>8s} {'gap %':>6s}"
    text = f"motley, {given.budget} of search, seed 0, batch {BATCH}, sequence {LENGTH}; the gap is 1 - bound / iteration.\n"
    text += "Gradients are summed in fp32.\n"
    text += "Bounds are computed anew for plans that were found before, whose seconds stand in bound-gap.csv.\n\n"
    text += head + "".join(f"{cause + ' %':>12s}" for cause in CAUSES) + "\n"
    text += "\n".join(line(cell, entry) for cell, entry in zip(asked, rows, strict=True)) + "\n"
    write_file(given.out / "bound-gap.txt", f"{machine()}\n\n{text}", replace=True)
    print(text)


def line(cell: Cell, entry: Row) -> str:
    """A row of the table."""
    start, iteration_s = f"{entry['cluster']:20s} {entry['model']:12s} ", seconds(entry)
    bound = lower_bound(cell.cluster, cell.job)
    if math.isinf(iteration_s) or not isinstance(bound, Bound):
        return f"{start} no plan"
    lost = [float(entry[f"{cause}_s"]) - getattr(bound, f"{cause}_s") for cause in CAUSES]
    split = "".join(f"{100 * part / iteration_s:12.1f}" for part in lost)
    return f"{start}{iteration_s:11.2f} {bound.iteration_s:8.2f} {100 * (1 - bound.iteration_s / iteration_s):6.1f}{split}"


if __name__ == "__main__":
    sys.exit(main())
