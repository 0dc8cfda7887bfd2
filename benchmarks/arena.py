"""Judges planners and published plans on the clusters that the published plans were made for, and writes who is how fast.

    python benchmarks/arena.py --planners all --seeds 5 --budget 30s

Writes benchmarks/results/arena.csv (a row per search and per published plan) and arena.txt (medians over the seeds, and
geometric means). What stands in arena.csv already is not searched again, and a search that was killed loses only itself: run
the same command to go on, with more planners or seeds to add them. `--again` searches anew, after a planner was changed.
Searches run one at a time unless `--processes` says otherwise, so that a planner has all cores to itself.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from run import machine
from searches import read_rows

from experiments.commands.options import budget_s
from experiments.comparison import Cell, cell_digest, compare, row, rows_csv
from experiments.peers import AS_1F1B, AS_IT_IS, MEMORY_IGNORED, arena, judge_peer, peers_on
from partition.search import PLANNERS, planner_named
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.reading import InputError, write_file

HERE = Path(__file__).parent
MARKS = {AS_IT_IS: "", AS_1F1B: "*", MEMORY_IGNORED: "**"}
CHAMPION = "motley"
Row = Mapping[str, Any]


# --- Searching -------------------------------------------------------------------------------------------------------


def run(
    places: Sequence[tuple[Cluster, Job]],
    planners: Sequence[str],
    seeds: int,
    limit_s: float,
    out: Path,
    again: Iterable[str] = (),
    processes: int | None = 1,
    judge: str = "simulate",
) -> bool:
    """Whether Ctrl-C ended it early. Runs what arena.csv in the folder `out` lacks, and writes it there place by place."""
    table, keep, anew = out / "arena.csv", out / "arena.unfinished", set(again)
    rows = read_rows(table)
    for cluster, job in places:
        cells = [Cell(cluster, job, name, judge, limit_s, seed) for name in planners for seed in range(seeds)]
        here = (cluster.name, job.model.name)
        rows = [
            entry for entry in rows if place_of(entry) != here or (entry["planner"] not in anew and _stands(entry, cluster, job))
        ]
        known = {entry["cell"] for entry in rows}
        missing = [cell for cell in cells if cell_digest(cell) not in known]
        outcomes, interrupted = compare(missing, processes, keep=keep)
        found = [{**row(outcome), "cell": cell_digest(outcome.cell)} for outcome in outcomes if outcome.error is None]
        published = [judge_peer(peer, cluster, judge) for peer in peers_on(cluster, job)]
        found += [{**row(outcome), "cell": cell_digest(outcome.cell)} for outcome in published]
        fresh = {(place_of(entry), entry["planner"], int(entry["seed"])) for entry in found}
        rows = [entry for entry in rows if (place_of(entry), entry["planner"], int(entry["seed"])) not in fresh] + found
        write_file(table, rows_csv(rows), replace=True)
        for outcome in outcomes:
            if outcome.error is not None:
                print(f"{outcome.cell.planner} failed on {cluster.name}: {outcome.error}", file=sys.stderr)
        print(f"{cluster.name} {job.model.name}: {len(outcomes)} of {len(cells)} searches were new", flush=True)
        if interrupted:
            return True
        shutil.rmtree(keep, ignore_errors=True)
    return False


def _stands(entry: Row, cluster: Cluster, job: Job) -> bool:
    """Whether the row of a search was made on this very cluster, with the constants of today. Published plans are judged anew."""
    if not entry["budget_s"]:
        return False
    cell = Cell(cluster, job, entry["planner"], entry["judge"], float(entry["budget_s"]), int(entry["seed"]))
    return bool(cell_digest(cell) == entry["cell"])


# --- Who is how fast -------------------------------------------------------------------------------------------------


def place_of(entry: Row) -> tuple[str, str]:
    """The cluster and the model of a row."""
    return entry["cluster"], entry["model"]


@dataclass(frozen=True)
class Entry:
    """A planner or a published plan at one place: its iterations in seconds, one per seed that has a plan, and its mark."""

    iterations_s: tuple[float, ...]
    mark: str = ""
    published: bool = False
    seeds: int = 1

    @property
    def median_s(self) -> float:
        """The median iteration; infinite where half of its seeds or more have no plan."""
        return float(median([*self.iterations_s, *[float("inf")] * (self.seeds - len(self.iterations_s))]))

    @property
    def slowest_s(self) -> float:
        """The iteration of its slowest seed; infinite where one has no plan."""
        return max(self.iterations_s) if len(self.iterations_s) == self.seeds else float("inf")


def entries(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Entry]]:
    """For each place, the entries by planner."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for entry in rows:
        groups.setdefault(place_of(entry), {}).setdefault(entry["planner"], []).append(entry)
    return {
        place: {
            name: Entry(
                tuple(float(entry["iteration_s"]) for entry in own if entry["iteration_s"] not in ("", None)),
                MARKS.get(own[0]["judged_as"], "") + ("+" if any(entry["stands_in"] in (True, "True") for entry in own) else ""),
                bool(own[0]["judged_as"]),
                len(own),
            )
            for name, own in by_planner.items()
        }
        for place, by_planner in groups.items()
    }


def report(rows: Sequence[Row], champion: str = CHAMPION) -> str:
    """The text of arena.txt: the iterations of every place, and how many times as fast the champion is."""
    places = entries(rows)
    names = list(dict.fromkeys(name for by_name in places.values() for name in by_name))
    names.sort(key=lambda name: (name != champion, any(e[name].published for e in places.values() if name in e)))
    lines = [
        "Seconds of an iteration, the median over the seeds. Published plans: * as 1F1B, because they do not fit in memory as",
        "they are; ** as 1F1B and for time alone, because they do not fit so either. + the budget ended before the planner had",
        "a plan, and the best symmetric one stands in. - no plan.",
        "",
        *_table([["cluster", "model", *names], *(_place_line(place, by_name, names) for place, by_name in places.items())]),
        "",
        *_summary(places, names, champion),
    ]
    return "\n".join(lines) + "\n"


def _place_line(place: tuple[str, str], by_name: Mapping[str, Entry], names: Sequence[str]) -> list[str]:
    shown = []
    for name in names:
        entry = by_name.get(name)
        shown.append(f"{entry.median_s:.2f}{entry.mark}" if entry is not None and entry.median_s < float("inf") else "-")
    return [*place, *shown]


def _summary(places: Mapping[tuple[str, str], Mapping[str, Entry]], names: Sequence[str], champion: str) -> list[str]:
    """How many times as fast the champion is as the best other planner, as each of them, and as each published plan."""
    if champion not in names:
        return [f"There are no rows of {champion}, so that nothing is compared with it."]
    others = [name for name in names if name != champion]
    ratios: dict[str, dict[tuple[str, str], tuple[float, float]]] = {}
    best = "the best other planner"
    for place, by_name in places.items():
        own = by_name.get(champion)
        if own is None or own.median_s == float("inf"):
            continue
        for name in others:
            if name in by_name and by_name[name].median_s < float("inf"):
                time_s = by_name[name].median_s
                ratios.setdefault(name, {})[place] = (time_s / own.median_s, time_s / own.slowest_s)
        planned = [name for name in others if name in by_name and not by_name[name].published]
        rivals = [ratios[name][place] for name in planned if place in ratios.get(name, {})]
        if rivals:
            ratios.setdefault(best, {})[place] = min(rivals)
    lines = [["against", "places", "geometric mean", "lowest", "at", "not slower in", "lowest of its slowest seed"]]
    for name in [best, *others]:
        own_ratios = ratios.get(name, {})
        if own_ratios:
            lowest = min(own_ratios, key=lambda place: own_ratios[place])
            values = [ratio for ratio, _ in own_ratios.values()]
            lines.append(
                [
                    name,
                    str(len(values)),
                    f"{geometric_mean(values):.3f}",
                    f"{min(values):.3f}",
                    " ".join(lowest),
                    f"{sum(value >= 1 for value in values)} of {len(values)}",
                    f"{min(slow for _, slow in own_ratios.values()):.3f}",
                ]
            )
    return [f"How many times as fast {champion} is; places are those where both have a plan.", "", *_table(lines)]


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in columns; the first columns are flush left, those of numbers flush right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = [any(line[i][:1].isalpha() for line in lines[1:]) for i in range(len(widths))]
    return [
        "  ".join(cell.ljust(w) if flush else cell.rjust(w) for cell, w, flush in zip(line, widths, left, strict=True)).rstrip()
        for line in lines
    ]


# --- The command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Runs the arena as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--planners", default="all", help="names parted by commas, or all")
    parser.add_argument("--seeds", type=int, default=5, help="search with the seeds 0 to N-1")
    parser.add_argument("--budget", default="30s", help="how long a search may take")
    parser.add_argument("--places", default="", help="only those whose 'CLUSTER MODEL' contains this")
    parser.add_argument("--again", default="", help="planners whose rows are made anew, parted by commas, or all")
    parser.add_argument("--processes", type=int, default=1, help="searches at one time")
    parser.add_argument("--champion", default=CHAMPION, help="the planner that the others are compared with")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of arena.csv and arena.txt")
    given = parser.parse_args(arguments)
    try:
        names = _names(given.planners)
        chosen = [place for place in arena() if given.places in f"{place[0].name} {place[1].model.name}"]
        again = _names(given.again) if given.again else []
        interrupted = run(chosen, names, given.seeds, budget_s(given.budget), given.out, again, given.processes)
    except InputError as error:
        print(f"arena: {error}", file=sys.stderr)
        return 2
    rows = read_rows(given.out / "arena.csv")
    text = report(rows, given.champion)
    budgets = " or ".join(sorted({f"{float(entry['budget_s']):g} s" for entry in rows if entry["budget_s"]}))
    write_file(
        given.out / "arena.txt", f"{machine()}\nSearches of at most {budgets}, judged by simulation.\n\n{text}", replace=True
    )
    print(text)
    return 130 if interrupted else 0


def _names(text: str) -> list[str]:
    """The planners of a list parted by commas; 'all' is every registered one. Raises InputError for others."""
    names = list(PLANNERS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        planner_named(name)
    return names


if __name__ == "__main__":
    sys.exit(main())
