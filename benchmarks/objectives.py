"""Sets the planners side by side where training shall be cheap, or take little energy.

    python benchmarks/objectives.py

Four places of the arena, three of mixed nodes and a pool of two kinds; each planner minimizes dollars per billion tokens, and
joules per token. motley has ten seconds on two cores, the others twenty on one. Judged by simulation. Writes
benchmarks/results/objectives.txt; rows of objectives.csv are not searched again, unless `--again` names their planner.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from run import machine
from searches import Row, read_rows, searched

from experiments.comparison import Cell, row, rows_csv, run_cell
from experiments.peers import arena
from partition.search import PLANNERS
from sim.spec.reading import write_file

HERE = Path(__file__).parent
CHAMPION = "motley"
PLACES = (
    ("mixed-a-10gbit", "llama-2-13b"),
    ("mixed-b-10gbit", "llama-2-13b"),
    ("mixed-c-10gbit", "llama-30b"),
    ("pool-a100x32-v100x32", "opt-350m"),
)
OBJECTIVES = {
    "cost": ("dollars_per_billion_tokens", "dollars per billion tokens"),
    "energy": ("joules_per_token", "joules per token"),
}
"""The columns that are compared, and their names."""

OWN_S, OTHERS_S = 10.0, 20.0


def cells(planners: Sequence[str]) -> Iterator[Cell]:
    """All searches, by place and objective."""
    known = {(cluster.name, job.model.name): (cluster, job) for cluster, job in arena()}
    for place in PLACES:
        for objective in OBJECTIVES:
            for name in planners:
                yield Cell(*known[place], name, budget_s=OWN_S if name == CHAMPION else OTHERS_S, objective=objective)


def report(rows: Sequence[Row]) -> str:
    """The tables: what the best plan of each planner takes, and how much more than the champion's."""
    lines = []
    for objective, (column, unit) in OBJECTIVES.items():
        found: dict[tuple[str, str], dict[str, float]] = {}
        for entry in rows:
            if entry["objective"] == objective:
                value = float(entry[column]) if entry[column] not in (None, "") else float("inf")
                found.setdefault((entry["cluster"], entry["model"]), {})[entry["planner"]] = value
        names = list(dict.fromkeys(name for by_name in found.values() for name in by_name))
        lines += [f"{unit[0].upper()}{unit[1:]}, where each planner minimizes them; seed 0.", ""]
        heads = " ".join(f"{cluster + ' ' + model:>29s}" for cluster, model in found)
        lines.append(f"{'planner':14s} {heads} {'ratio':>7s}")
        for name in names:
            values = [by_name.get(name, float("inf")) for by_name in found.values()]
            best = [by_name[CHAMPION] for by_name in found.values()]
            ratios = [value / least for value, least in zip(values, best, strict=True) if value < float("inf")]
            mean = f"{geometric_mean(ratios):7.3f}" if ratios else f"{'-':>7s}"
            shown = " ".join(f"{value:29.4g}" if value < float("inf") else f"{'no plan':>29s}" for value in values)
            lines.append(f"{name:14s} {shown} {mean}")
        lines.append("")
    lines.append("ratio: geometric mean, over the places where it has a plan, of its figure to that of motley.")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches what is missing, and writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of objectives.csv and objectives.txt")
    parser.add_argument("--again", nargs="*", default=[], help="planners that search anew")
    given = parser.parse_args(arguments)
    table = given.out / "objectives.csv"
    kept = [entry for entry in read_rows(table) if entry["planner"] not in given.again]
    if given.again and table.exists():
        write_file(table, rows_csv(kept), replace=True)
    planners = [CHAMPION, *(name for name in PLANNERS if name not in (CHAMPION, "exhaustive"))]
    rows = searched(list(cells(planners)), table, False, lambda cell: row(run_cell(cell)), _tell)
    text = report(rows)
    write_file(given.out / "objectives.txt", f"{machine()}\n\n{text}", replace=True)
    print(text)


def _tell(cell: Cell, entry: Row) -> None:
    column, unit = OBJECTIVES[cell.objective]
    print(f"{cell.cluster.name} {cell.job.model.name} {cell.planner}: {entry[column]} {unit}", flush=True)


if __name__ == "__main__":
    main()
