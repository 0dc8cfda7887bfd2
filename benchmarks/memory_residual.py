"""Tells whether a regressor of what the count of bytes leaves open predicts peak memory better, on published runs held out of it.

    python benchmarks/memory_residual.py [--out benchmarks/results/memory-residual.txt]

As Pipette (arXiv 2405.18093) learns memory: of the logarithm of measured over predicted bytes, from the model's shape, the
degrees and the batch; by ridge regression with the squares and products of the features, its penalty chosen inside the training
runs, and by a small network (two layers of 16, the mean of three). Runs are held out by ten random parts, by GPUs and by model
within a source, and by source; and all but a few runs of one source are, as a user has a few. The plain count has its stacks'
constants fitted on all runs, and so has what it is compared with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from experiments.assumptions import read_assumptions
from experiments.fidelity import PUBLISHED, counted_peak_bytes, measured_peak_bytes, unpublished
from experiments.published import Modelled, modelled
from experiments.published_rows import Run, read_runs
from sim.spec.counts import total_parameters
from sim.spec.plan import Plan
from sim.spec.reading import write_file

Vector: TypeAlias = NDArray[np.float64]
Learner: TypeAlias = Callable[[Vector, Vector, Vector, Sequence[object]], Vector]
"""From features and residuals of training runs, features of others and the training runs' groups to the others' residuals."""

FEATURES = (
    "hidden, layers, heads, vocabulary, sequence, parameters, tensor ranks, stages, pipelines, micro-batch, micro-batches, ZeRO"
)
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
PARTS = 10


def features(plan: Plan, predicted_bytes: float) -> list[float]:
    """What the regressors see of a plan: logarithms, the ZeRO stage as it is."""
    model, pipeline = plan.transformer, plan.pipelines[0]
    tensor = max(len(replica.devices) for stage in pipeline.stages for replica in stage.replicas)
    sizes = [model.hidden, model.layers, model.heads, model.vocab, plan.sequence_length, total_parameters(model)]
    degrees = [tensor, len(pipeline.stages), len(plan.pipelines), pipeline.micro_batch, pipeline.micro_batches]
    return [*np.log([*sizes, *degrees, predicted_bytes]).tolist(), float(plan.zero_stage)]


def ridge(seen: Vector, residuals: Vector, others: Vector, groups: Sequence[object]) -> Vector:
    """The residuals of others by ridge regression on features, squares and products; the penalty by parts of the groups seen."""

    def solved(x: Vector, y: Vector, there: Vector, penalty: float) -> Vector:
        mean, wide = x.mean(0), x.std(0) + 1e-9
        x, there = (x - mean) / wide, np.clip((there - mean) / wide, -4, 4)
        # Penalised as many times as the runs count: the same for few and for many.
        weights = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ (y - y.mean()))
        return there @ weights + y.mean()

    seen, others = _products(seen), _products(others)
    known = list(dict.fromkeys(groups))
    part = np.array([known.index(group) % 5 for group in groups])
    errors = []
    for penalty in PENALTIES:
        left = [
            np.abs(residuals[part == n] - solved(seen[part != n], residuals[part != n], seen[part == n], penalty))
            for n in range(5)
            if 0 < (part == n).sum() < len(part)
        ]
        errors.append(float(np.concatenate(left).mean()) if left else 0.0)
    return solved(seen, residuals, others, PENALTIES[int(np.argmin(errors))])


def _products(x: Vector) -> Vector:
    """The features with their squares and products."""
    first, second = np.triu_indices(x.shape[1])
    return np.concatenate([x, x[:, first] * x[:, second]], axis=1)


def network(seen: Vector, residuals: Vector, others: Vector, groups: Sequence[object]) -> Vector:
    """The residuals of others by the mean of three small networks."""
    import torch

    mean, wide = seen.mean(0), seen.std(0) + 1e-9
    x, there = (torch.tensor(np.clip((one - mean) / wide, -4, 4), dtype=torch.float32) for one in (seen, others))
    y = torch.tensor(residuals - residuals.mean(), dtype=torch.float32)
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        descent = torch.optim.AdamW(layers.parameters(), lr=1e-2, weight_decay=1e-2)
        for _ in range(400):
            descent.zero_grad()
            torch.nn.functional.smooth_l1_loss(layers(x)[:, 0], y, beta=0.1).backward()
            descent.step()
        with torch.no_grad():
            found.append(layers(there)[:, 0].numpy())
    return np.mean(found, axis=0) + residuals.mean()


LEARNERS: dict[str, Learner] = {"ridge": ridge, "network": network}


def held_out(learner: Learner, x: Vector, y: Vector, groups: Sequence[object]) -> Vector:
    """The residuals of all runs, each group predicted by the others."""
    numbers = {group: n for n, group in enumerate(dict.fromkeys(groups))}
    place, found = np.array([numbers[group] for group in groups]), np.zeros(len(y))
    for n in range(len(numbers)):
        seen = np.flatnonzero(place != n)
        found[place == n] = learner(x[seen], y[seen], x[place == n], [groups[i] for i in seen])
    return found


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="Whether a regressor of what the count of bytes leaves open earns its place.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    assumptions, runs, rows, residuals = read_assumptions(), [], [], []
    for run in read_runs(PUBLISHED):
        world = modelled(run, assumptions) if run.peak_mem_gb else None
        if isinstance(world, Modelled) and not unpublished(world):
            predicted = counted_peak_bytes(run, world.plan, world.cluster.stack)
            runs.append(run)
            rows.append(features(world.plan, predicted))
            residuals.append(np.log(measured_peak_bytes(run) / predicted))
    x, y = np.array(rows), np.array(residuals)
    parts = np.random.default_rng(0).permutation(len(y)) % PARTS
    largest = max({run.source_key for run in runs}, key=lambda source: sum(run.source_key == source for run in runs))
    within = np.array([run.source_key == largest for run in runs])

    def told_of(name: str, count: int, groups: int, told: str, errors: Vector) -> str:
        figures = (np.median(errors), errors.mean(), np.quantile(errors, 0.9))
        shown = "".join(f"{100 * figure:>8.1f} %" for figure in figures)
        return f"{name:48s}{count:>6d}{groups:>8d}  {told:14s}{shown}"

    def of(which: Vector | NDArray[np.bool_], name: str, group: Callable[[int, Run], object]) -> list[str]:
        groups = [group(i, run) for i, run in enumerate(runs) if which[i]]
        some, lines = y[which], []
        predictions = {"plain count": np.zeros(len(some))}
        predictions |= {told: held_out(learner, x[which], some, groups) for told, learner in LEARNERS.items()}
        for told, predicted in predictions.items():
            errors = np.abs(np.expm1(predicted - some))
            lines.append(told_of(name, len(some), len(set(groups)), told, errors))
        return lines

    def of_few(count: int) -> list[str]:
        errors: dict[str, list[Vector]] = {"plain count": [], "its mean error": [], **{told: [] for told in LEARNERS}}
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(np.flatnonzero(within))
            seen, others = order[:count], order[count:]
            predictions = {"plain count": np.zeros(len(others)), "its mean error": np.full(len(others), y[seen].mean())}
            for told, learner in LEARNERS.items():
                predictions[told] = learner(x[seen], y[seen], x[others], seen.tolist())
            for told, predicted in predictions.items():
                errors[told].append(np.abs(np.expm1(predicted - y[others])))
        name = f"{largest}, from {count} runs of it, five draws"
        return [told_of(name, len(some[0]), 5, told, np.concatenate(some)) for told, some in errors.items()]

    everything = np.ones(len(y), dtype=bool)
    lines = [
        f"peak memory of {len(y)} published runs of {len({run.source_key for run in runs})} sources",
        f"features: {FEATURES}, predicted bytes",
        "",
        f"{'|predicted / measured - 1|, held out':48s}{'runs':>6s}{'groups':>8s}  {'':14s}"
        f"{'median':>10s}{'mean':>10s}{'90th':>10s}",
        *of(everything, "all, by random tenths", lambda i, run: int(parts[i])),
        *of(everything, "all, by source", lambda i, run: run.source_key),
        *of(within, f"{largest}, by random tenths", lambda i, run: int(parts[i])),
        *of(within, f"{largest}, by GPUs", lambda i, run: run.num_gpus),
        *of(within, f"{largest}, by model", lambda i, run: (run.hidden, run.num_layers)),
        *(line for count in (12, 25, 50, 100) for line in of_few(count)),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if asked.out is not None:
        write_file(asked.out, text, replace=True)


if __name__ == "__main__":
    main()
