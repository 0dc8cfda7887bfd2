"""Tells how far a few runs of one's own bring predictions of the others, where nobody has measured the software yet.

    python benchmarks/small_fits.py [--out benchmarks/results/small-fits.txt]

For each source of published runs with enough of them, all of one stack: the others are predicted by the means over the stacks
that `typical` has the means of (but that of the source itself), and then by what `motley validate --fit --runs` makes of these
means with three, six and twelve runs drawn by lot, three lots each. Beside it what one factor does, by which those runs are off.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from run import machine

from experiments.assumptions import DATA, read_assumptions
from experiments.constants import Constants
from experiments.fidelity import PUBLISHED, measured_s, published_speed, unpublished
from experiments.fit_links import fit_links
from experiments.fitting import Task, fit_stack, mean_stack
from experiments.parallel import in_processes
from experiments.published import Modelled, modelled
from experiments.published_rows import read_runs
from sim.cost.estimate import Estimate
from sim.spec.gpu import efficiencies
from sim.spec.reading import write_file
from sim.spec.stack import Stack, stack, stacks

SIZES = (3, 6, 12)
LOTS = 3
MOST_JUDGED = 25
"""Runs that are not fitted on and are looked at, by lot."""

FEWEST_JUDGED = 5
MOST_GPUS = 128
"""Larger runs are left out: each fit asks hundreds of times for every run's estimate."""


class Drawn(NamedTuple):
    """A source, how many of its runs a fit sees, and which lot of them."""

    source: str
    size: int
    lot: int


class Missed(NamedTuple):
    """Mean absolute errors, %, of the runs that a fit has not seen."""

    means: float
    """By the means over other stacks."""
    factor: float
    """By these times the factor by which the runs that the fit saw are off."""
    fitted: float


@cache
def worlds() -> dict[str, list[Modelled]]:
    """The runs of each source with a speed and a plan that is published whole, of the stack that most of them have."""
    found: dict[str, list[Modelled]] = {}
    for run in read_runs(PUBLISHED):
        world = modelled(run, read_assumptions())
        whole = isinstance(world, Modelled) and published_speed(run) and not unpublished(world)
        if isinstance(world, Modelled) and whole and len(world.cluster.devices) <= MOST_GPUS:
            found.setdefault(run.source_key, []).append(world)
    for source, rows in found.items():
        (name, _), *_ = Counter(row.cluster.stack.name for row in rows).most_common()
        found[source] = [row for row in rows if row.cluster.stack.name == name]
    return {source: rows for source, rows in found.items() if len(rows) >= SIZES[0] + FEWEST_JUDGED}


def unknown(own: Stack) -> Stack:
    """The stack as it is, with the means over other stacks for all its constants that fits decide."""
    others = [name for name in stack("typical").mean_of.split(", ") if name != own.family]
    return mean_stack(replace(own, variant_of="", mean_of=", ".join(others), routing_traffic=0.0, source="the means"), stacks())


def missed(drawn: Drawn) -> Missed | None:
    """How far the runs that are not drawn are missed; None where too few are left."""
    rows = list(worlds()[drawn.source])
    random.Random(f"{drawn.source} {drawn.lot}").shuffle(rows)
    seen, rest = rows[: drawn.size], rows[drawn.size :][:MOST_JUDGED]
    if len(rest) < FEWEST_JUDGED:
        return None
    begun = unknown(rows[0].cluster.stack)
    constants = Constants(efficiencies(), {}, fit_links(DATA / "microbench.csv")[0])
    fitted = fit_stack(Task(begun, tuple(row.run for row in seen), (), constants, anew=False)).stack

    def ratios(software: Stack, some: list[Modelled]) -> list[float]:
        found = []
        for row in some:
            cluster = replace(constants.applied(row.cluster), stack=software)
            found.append(Estimate(row.plan, cluster).iteration_s() / measured_s(row))
        return found

    def error(some: np.ndarray) -> float:
        return float(100 * np.abs(some - 1).mean())

    of_rest, off = np.array(ratios(begun, rest)), np.exp(np.log(ratios(begun, seen)).mean())
    return Missed(error(of_rest), error(of_rest / off), error(np.array(ratios(fitted, rest))))


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="How far a few runs bring predictions of the others.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    drawn = [Drawn(*one) for one in product(worlds(), SIZES, range(LOTS))]
    errors, _ = in_processes(missed, drawn)
    found: dict[tuple[str, int], list[Missed]] = {}
    for one, told in zip(drawn, errors, strict=True):
        if told is not None:
            found.setdefault((one.source, one.size), []).append(told)
    lines = [
        "mean absolute error of iteration times, %, of runs that no constant was fitted on, by",
        "  means   the means over other stacks",
        "  factor  these, times the factor by which the runs drawn are off",
        "  fitted  what validate --fit --runs makes of the means with the runs drawn; the worst of three lots behind it",
        machine(),
        "",
        f"{'source':16s}{'runs drawn':>12s}{'means':>8s}{'factor':>8s}{'fitted':>8s}{'worst':>8s}",
    ]
    for size in SIZES:
        rows = {source: lots for (source, drawn_size), lots in found.items() if drawn_size == size}
        for source, lots in rows.items():
            lines.append(_line(source, size, np.mean(lots, axis=0), max(lot.fitted for lot in lots)))
        every = np.mean([np.mean(lots, axis=0) for lots in rows.values()], axis=0)
        lines += [_line(f"{len(rows)} sources", size, every, None), ""]
    print("\n".join(lines))
    if asked.out:
        write_file(asked.out, "\n".join(lines).rstrip() + "\n")


def _line(source: str, size: int, figures: np.ndarray, worst: float | None) -> str:
    """A line of the table."""
    end = "" if worst is None else f"{worst:>8.1f}"
    return f"{source:16s}{size:>12d}" + "".join(f"{figure:>8.1f}" for figure in figures) + end


if __name__ == "__main__":
    main()
