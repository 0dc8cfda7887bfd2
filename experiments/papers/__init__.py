"""Experiments in the manner of papers: each one file, with its sweep, its plots and its table. Their pages: docs/experiments/."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.papers.experiment import Experiment
from experiments.papers.hexiscale import HEXISCALE
from experiments.papers.holmes import HOLMES
from experiments.papers.motley import MOTLEY
from experiments.papers.pipette import PIPETTE
from experiments.papers.pools import POOLS
from sim.spec.reading import InputError, nearest

EXPERIMENTS: Mapping[str, Experiment] = {each.name: each for each in (HEXISCALE, PIPETTE, HOLMES, POOLS, MOTLEY)}


def experiment_named(name: str) -> Experiment:
    """The experiment of this name. Raises InputError with the nearest name and all of them."""
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}; accepted: {', '.join(EXPERIMENTS)}{nearest(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
