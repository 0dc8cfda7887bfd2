"""Measures how soon motley's search is near the best plan that any planner finds, and how it fares on larger pools.

    python benchmarks/search_time.py [--long PLANNER ...]

Two tables, in benchmarks/results/search-time.txt, from the rows of search-time.csv, a row per search. What stands there is not
searched again, and a search that was killed loses only itself; `--again` begins anew.

- On 32, 256 and 1,024 GPUs of mixed kinds, motley has 5, 30 and 120 seconds with each of some seeds. The best plan is that of all
  these searches, of those that the other planners, and motley itself, make there in ten minutes, as far as these stand in
  search-time.csv or are asked for, and of those of the arena (arena.csv) at the same place.
- On pools of 256 and 512 GPUs, those of the published plans made larger, each planner has 30 seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from run import machine
from searches import Row, read_rows, searched, seconds

from experiments.comparison import Cell, cell_digest, row, run_cell
from experiments.peers import arena
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.reading import write_file
from sim.spec.transformer import transformer

HERE = Path(__file__).parent
TARGET = 1.02
"""The iteration of a search that is near enough, in iterations of the best plan."""

LIMITS = {32: 5.0, 256: 30.0, 1024: 120.0}
"""Seconds of search by GPUs."""

LONG_S, POOL_S = 600.0, 30.0
RIVALS = ("metis", "sailor", "amp", "flashflex")
LONG = ("motley", "megatron", "varuna", "pipette", "holmes", *RIVALS)
"""The planners that search for ten minutes, if they are asked to."""


@dataclass(frozen=True)
class Place:
    """A cluster and a job, and what the tables call them."""

    name: str
    cluster: Cluster
    job: Job


def enlarged(cluster: Cluster, times: int) -> Cluster:
    """The cluster with every node so many times."""
    gpus = {kind: sum(node.gpus for node in cluster.nodes if node.gpu.name == kind) for kind in _kinds(cluster)}
    name = "-".join(f"{kind.split('-')[0].lower()}x{count * times}" for kind, count in gpus.items())
    nodes = tuple(replace(node, name=f"{node.name}-{n}") for node in cluster.nodes for n in range(times))
    return replace(cluster, name=f"pool-{name}", nodes=nodes)


def _kinds(cluster: Cluster) -> list[str]:
    return list(dict.fromkeys(node.gpu.name for node in cluster.nodes))


def _published(cluster: str, model: str) -> tuple[Cluster, Job]:
    return next((c, job) for c, job in arena() if (c.name, job.model.name) == (cluster, model))


def timed_places() -> Iterator[Place]:
    """Where the time of the search is measured: one place for each number of GPUs in LIMITS."""
    cluster, job = _published("mixed-b-10gbit", "llama-2-13b")
    yield Place("llama-2-13b", cluster, job)
    pool, _ = _published("pool-a100x32-v100x32", "opt-350m")
    for times, batch in ((4, 512), (16, 1024)):
        yield Place("llama-2-7b", enlarged(pool, times), Job(transformer("llama-2-7b"), 2048, batch, "fp16"))


def pools() -> Iterator[Place]:
    """Pools of A100 and V100 that are larger than those of the published plans, with the same model."""
    pool, job = _published("pool-a100x32-v100x32", "opt-350m")
    for times in (4, 8):
        yield Place("opt-350m", enlarged(pool, times), job)


def cells(seeds: int) -> Iterator[tuple[Place, Cell]]:
    """The searches of the tables, but for the long ones."""
    timed = list(timed_places())
    for place in timed:
        for seed in range(seeds):
            yield place, Cell(place.cluster, place.job, "motley", budget_s=LIMITS[len(place.cluster.devices)], seed=seed)
    for place in pools():
        for planner in ("motley", *RIVALS):
            yield place, Cell(place.cluster, place.job, planner, budget_s=POOL_S)


def long_cells() -> Iterator[tuple[Place, Cell]]:
    """The searches of ten minutes."""
    for place in timed_places():
        for planner in LONG:
            yield place, Cell(place.cluster, place.job, planner, budget_s=LONG_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches what is missing, and writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="search with the seeds 0 to N-1")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of search-time.csv and search-time.txt")
    parser.add_argument(
        "--long", nargs="*", choices=LONG, default=LONG, help="the planners that search ten minutes where that is missing"
    )
    parser.add_argument("--again", action="store_true", help="search anew what stands in search-time.csv")
    given = parser.parse_args(arguments)
    table = given.out / "search-time.csv"
    known = {entry["cell"] for entry in read_rows(table)}
    long = [
        (place, cell)
        for place, cell in long_cells()
        if cell.planner in given.long or (not given.again and cell_digest(cell) in known)
    ]
    places = [*cells(given.seeds), *long]
    rows = searched([cell for _, cell in places], table, given.again, lambda cell: row(run_cell(cell)), _tell)
    found = [(place, cell, entry) for (place, cell), entry in zip(places, rows, strict=True)]
    text = report(found, read_rows(given.out / "arena.csv"))
    write_file(given.out / "search-time.txt", f"{machine()}\n\n{text}", replace=True)
    print(text)


def _tell(cell: Cell, entry: Row) -> None:
    where = f"{cell.cluster.name} {cell.job.model.name}"
    shown = seconds(entry), entry["search_s"]
    print(f"{where} {cell.planner} {cell.budget_s:g} s, seed {cell.seed}: {shown}", flush=True)


def _in_arena(place: Place, rows: Sequence[Row]) -> Iterator[tuple[float, str]]:
    """The seconds of the arena's searches at a place, and whose they are."""
    for entry in rows:
        limit_s, seed = float(entry["budget_s"] or 0), int(entry["seed"])
        cell = Cell(place.cluster, place.job, entry["planner"], entry["judge"], limit_s, seed)
        if limit_s and entry["cluster"] == place.cluster.name and cell_digest(cell) == entry["cell"]:
            yield seconds(entry), f"{cell.planner}, {limit_s:g} s, arena"


def report(found: Sequence[tuple[Place, Cell, Row]], arena_rows: Sequence[Row]) -> str:
    """The two tables."""
    lines = [
        "How near motley comes in its seconds to the best plan that it or another planner found there: in these searches, in",
        "those of ten minutes that were made, and in those of the arena.",
        "",
        " GPUs cluster                 model        seconds   best s (of)         iteration / best, by seed",
    ]
    for place in timed_places():
        own = [(cell, seconds(entry)) for at, cell, entry in found if at == place]
        limit_s = LIMITS[len(place.cluster.devices)]
        judged = [(own_s, f"{cell.planner}, {cell.budget_s:g} s") for cell, own_s in own]
        best_s, best = min([*judged, *_in_arena(place, arena_rows)])
        ratios = [own_s / best_s for cell, own_s in own if cell.planner == "motley" and cell.budget_s == limit_s]
        near = sum(ratio <= TARGET for ratio in ratios)
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
        lines.append(
            f"{len(place.cluster.devices):5d} {place.cluster.name:23s} {place.name:12s} {limit_s:7g} {best_s:8.3f} "
            f"({best}) {shown}; {near} of {len(ratios)} within {100 * (TARGET - 1):.0f} %"
        )
    lines += ["", f"Larger pools, {POOL_S:g} s of search: seconds of an iteration.", ""]
    lines.append(f"{'GPUs':>5s} {'cluster':23s} {'model':12s}" + "".join(f"{name:>11s}" for name in ("motley", *RIVALS)))
    for place in pools():
        shown = "".join(
            f"{seconds(entry):11.3f}" for at, _, entry in found if at.cluster == place.cluster and at.job == place.job
        )
        lines.append(f"{len(place.cluster.devices):5d} {place.cluster.name:23s} {place.name:12s}{shown}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
