"""Tells how far runs are missed whose software nobody measured: by the means over other stacks, and by one of those stacks.

    python benchmarks/unknown_stacks.py [--out benchmarks/results/unknown-stacks.txt]

For each stack of which the record `typical` has the means: the published runs made with it, twenty of a source at most, by lot,
are predicted by the means over all the others, and by each of the others alone; all else is as the runs' sources have it, and as
all runs have it: the rates of two kinds without micro-benchmarks (hopper-500w and GB200's) were set by runs that are among these.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.assumptions import read_assumptions
from experiments.fidelity import PUBLISHED, counted_peak_bytes, measured_peak_bytes, measured_s, published_speed, unpublished
from experiments.fitting import mean_stack
from experiments.parallel import in_processes
from experiments.published import Modelled, modelled
from experiments.published_rows import Run, read_runs
from sim.cost.estimate import Estimate
from sim.cost.network import Network
from sim.spec.reading import write_file
from sim.spec.stack import Stack, stack, stacks

MOST_RUNS = 20


def whole(run: Run) -> Modelled | None:
    """The run as a plan on a cluster, where that is published whole."""
    world = modelled(run, read_assumptions())
    return world if isinstance(world, Modelled) and not unpublished(world) else None


def drawn() -> list[Run]:
    """The runs made with a stack of which `typical` has the means, or a variant of it, so many of each source."""
    members, sources = stack("typical").mean_of.split(", "), dict[str, list[Run]]()
    for run in read_runs(PUBLISHED):
        if stack(read_assumptions().of(run).stack).family in members and (published_speed(run) or run.peak_mem_gb) and whole(run):
            sources.setdefault(run.source_key, []).append(run)
    lot = random.Random(0)
    return [run for runs in sources.values() for run in lot.sample(runs, min(MOST_RUNS, len(runs)))]


def candidates(own: Stack) -> dict[str, Stack]:
    """By name what may stand for a stack: itself, the means over the others, and each of the others."""
    typical = stack("typical")
    others = [name for name in typical.mean_of.split(", ") if name != own.family]
    means = mean_stack(replace(typical, mean_of=", ".join(others)), stacks())
    return {"": own, "typical": means} | {name: stack(name) for name in others}


def missed(run: Run) -> dict[str, tuple[float | None, float | None]]:
    """By what stands for the run's stack: the relative errors of its time and of its memory, where they are published."""
    world, found = whole(run), {}
    assert world is not None
    for name, software in candidates(world.cluster.stack).items():
        cluster = replace(world.cluster, stack=software)
        seconds = Estimate(world.plan, cluster, Network(cluster)).iteration_s() if published_speed(run) else None
        peak_bytes = counted_peak_bytes(run, world.plan, software) if run.peak_mem_gb else None
        found[name] = (
            None if seconds is None else abs(seconds / measured_s(world) - 1),
            None if peak_bytes is None else abs(peak_bytes / measured_peak_bytes(run) - 1),
        )
    return found


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="How far runs are missed whose software nobody measured.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    runs = drawn()
    errors, _ = in_processes(missed, runs)
    lines = [
        "mean absolute relative error, %, of published runs by",
        "  own      the record that was fitted on them (and others of its stack)",
    ]
    lines += ["  typical  the means over the other stacks of:", f"           {stack('typical').mean_of}"]
    lines += ["  one of the others: by each of those alone, the mean, the best and the worst of them", ""]
    lines += [
        f"{'source':16s}{'quantity':10s}{'runs':>9s}{'own':>8s}{'typical':>9s}{'one of the others':>19s}{'best':>8s}{'worst':>8s}"
    ]
    for which, quantity in enumerate(("time", "memory")):
        rows = []
        for source in dict.fromkeys(run.source_key for run in runs):
            by: dict[str, list[float]] = {}
            for run, told in zip(runs, errors, strict=True):
                for name, error in (told or {}).items():
                    if run.source_key == source and error[which] is not None:
                        by.setdefault(name, []).append(100 * float(error[which] or 0.0))
            if by:
                own, typical, *others = (float(np.mean(some)) for some in by.values())
                rows.append((own, typical, float(np.mean(others)), min(others), max(others)))
                lines.append(_line(source, quantity, str(len(by[""])), rows[-1]))
        lines.append(_line("mean of these", quantity, f"{len(rows)} rows", [float(mean) for mean in np.mean(rows, axis=0)]))
    print("\n".join(lines))
    if asked.out:
        write_file(asked.out, "\n".join(lines) + "\n")


def _line(source: str, quantity: str, count: str, figures: tuple[float, ...] | list[float]) -> str:
    """A line of the table."""
    own, typical, other, best, worst = figures
    return f"{source:16s}{quantity:10s}{count:>9s}{own:>8.1f}{typical:>9.1f}{other:>19.1f}{best:>8.1f}{worst:>8.1f}"


if __name__ == "__main__":
    main()
