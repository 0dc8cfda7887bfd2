"""Tells which runs of vTrain's two tables recomputed their layers: by what each table tells of the other, and by memory.

    python benchmarks/recomputation.py [--out benchmarks/results/recomputation.txt]

Both tables were measured with one software. Its record is fitted on one of them, beginning from the priors, and predicts both,
with the single node's layers recomputed and not, and its vocabulary padded as the other's. That they were not recomputed is
assumed in `experiments/data/assumptions.yaml`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.assumptions import read_assumptions
from experiments.constants import Constants, parse_constants
from experiments.fidelity import PUBLISHED, measured_s
from experiments.fitting import fit
from experiments.parallel import in_processes
from experiments.published import Modelled, modelled
from experiments.published_rows import Run, read_runs
from sim.cost.estimate import Estimate
from sim.cost.memory import peak_bytes
from sim.spec.reading import write_file

SINGLE, MULTI = "vtrain_single", "vtrain_multi"
FITS = ((SINGLE, "full"), (SINGLE, "none"), (MULTI, "full"))
"""The table that is fitted on, and how its layers are recomputed."""


def table(name: str, recompute: str) -> list[Run]:
    """The runs of a table, with that in their cell. The single node's are named as the other's, of which the cell is believed."""
    return [replace(run, source_key=MULTI, recompute=recompute) for run in read_runs(PUBLISHED) if run.source_key == name]


def worlds(runs: Iterable[Run]) -> list[Modelled]:
    """The runs as plans on clusters."""
    found = [modelled(run, read_assumptions()) for run in runs]
    assert all(isinstance(world, Modelled) for world in found)
    return [world for world in found if isinstance(world, Modelled)]


def fitted(task: tuple[str, str]) -> str:
    """The constants that fit a table, so recomputed, as the text of their file."""
    return fit(table(*task), (), 0, 0.0, processes=1).constants_text


def missed(constants: Constants, runs: Iterable[Run]) -> tuple[float, float, float]:
    """Mean and median of the absolute relative errors of times, and their mean with the sign, in per cent."""
    errors = []
    for world in worlds(runs):
        errors.append(Estimate(world.plan, constants.applied(world.cluster)).iteration_s() / measured_s(world) - 1)
    absolute = np.abs(errors)
    return 100 * float(absolute.mean()), 100 * float(np.median(absolute)), 100 * float(np.mean(errors))


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="Which of vTrain's runs recomputed their layers.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    texts, _ = in_processes(fitted, FITS)
    headings = "".join(f"{heading:>10s}" for heading in ("mean", "median", "bias"))
    lines = [
        "Megatron-DeepSpeed's record fitted on one of vTrain's tables; relative errors of both, %",
        "  products   their rate over what an A100 reaches alone in micro-benchmarks, as fitted",
        "",
        f"{'fitted on':15s}{'recompute':>10s}{'products':>10s}   {'predicted':15s}{'recompute':>10s}{headings}",
    ]
    for (name, how), text in zip(FITS, texts, strict=True):
        constants = parse_constants(text or "", "fitted")
        rate = constants.stacks["megatron-deepspeed"].matmul_scale
        for other, recompute in FITS:
            if name == other == SINGLE and recompute != how:
                continue
            figures = "".join(f"{figure:>10.1f}" for figure in missed(constants, table(other, recompute)))
            lines.append(f"{name:15s}{how:>10s}{rate:>10.2f}   {other:15s}{recompute:>10s}{figures}")
    lines += ["", "predicted peaks of memory without recomputation"]
    for name in (SINGLE, MULTI):
        found = worlds(table(name, "none"))
        peaks = [max(peak_bytes(world.plan, world.cluster).values()) for world in found]
        full = sum(peak > w.cluster.devices[0].gpu.memory_bytes for w, peak in zip(found, peaks, strict=True))
        lines.append(f"{name:15s}{max(peaks) / 2**30:>6.0f} GiB at most; {full} of {len(peaks)} do not fit")
    print("\n".join(lines))
    if asked.out:
        write_file(asked.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
