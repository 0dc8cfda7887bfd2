"""Which pipelines of a plan, and which links, behave alike, so that one of each is enough to know all.

Data-parallel copies on alike GPUs do the same at the same times, and load links that are loaded alike. That is so wherever the
pipelines and links can be divided into classes such that

    pipelines of a class are built the same, take the same seconds, and of each of their transfers bring equal bytes to equally
    many links of each class;
    links of a class have the same capacity, and carry equal bytes of equally many transfers of each class,

(an equitable partition): at every instant the rates of transfers that were alike so far are then alike, because all that a rate
follows from, the capacity of each link and what it is asked to carry, is. The coarsest such classes are found by refinement:
from classes that are too coarse, what tells two of a class apart divides it, until nothing does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost.network import Transfer

Numbers = npt.NDArray[np.int64]

EQUAL_BITS = 36
"""Bytes that are equal in so many bits are equal: the order in which they were summed may differ."""


def alike(
    kinds: Sequence[Hashable], transfers: Sequence[Sequence[Transfer]], shared: Sequence[Transfer], capacities: Sequence[float]
) -> tuple[list[int], dict[int, int]]:
    """For each pipeline, and for each link that carries anything, the first one that behaves as it does.

    kinds: of each pipeline all that it does by itself; pipelines of a kind have as many transfers, in the same order.
    transfers: by pipeline. shared: transfers that no pipeline has to itself.
    """
    everything = (*transfers, shared)
    if len(set(kinds)) == len(kinds):
        return list(range(len(kinds))), {link: link for some in everything for one in some for link, _ in one.loads}
    entries = [
        (pipeline, place, link)
        for pipeline, some in enumerate(everything)
        for place, transfer in enumerate(some)
        for link, _ in transfer.loads
    ]
    pipelines, places, carrying = np.array(entries, np.int64).reshape(-1, 3).T
    loads = np.array([num_bytes for some in everything for transfer in some for _, num_bytes in transfer.loads], np.float64)
    names, links = np.unique(carrying, return_inverse=True)
    what = _numbered(places, _numbered(_rounded(loads)))
    # What is shared counts as one more pipeline, alone in its class.
    of_pipeline = np.array(_firsts([*kinds, None]))
    of_link = np.array(_firsts([capacities[name] for name in names]), np.int64)
    known = 0
    while known < (known := len(set(of_pipeline)) + len(set(of_link))):
        of_link = _divided(of_link, links, _numbered(of_pipeline[pipelines], what))
        of_pipeline = _divided(of_pipeline, pipelines, _numbered(of_link[links], what))
    return of_pipeline[:-1].tolist(), dict(zip(names.tolist(), names[of_link].tolist(), strict=True))


def _firsts(values: Sequence[Hashable]) -> list[int]:
    """For each value, where it stands first."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, at) for at, value in enumerate(values)]


def _rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The values without what rounding may have made of them."""
    mantissas, exponents = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissas, EQUAL_BITS)), exponents)


def _numbered(values: npt.NDArray[Any], others: Numbers | None = None) -> Numbers:
    """A number for each value, or for each pair of values: equal numbers for equals."""
    numbers: Numbers = np.unique(values, return_inverse=True)[1].astype(np.int64)
    if others is None:
        return numbers
    return _numbered(numbers * (others.max(initial=0) + 1) + others)


def _divided(classes: Numbers, of: Numbers, entries: Numbers) -> Numbers:
    """The classes of some things, divided by the entries that each of them has, however often; told by the first of a class."""
    order = np.lexsort((entries, of))
    bounds = np.searchsorted(of[order], np.arange(len(classes) + 1)).tolist()
    inside = entries[order]
    return np.array(
        _firsts([(name, inside[a:b].tobytes()) for name, (a, b) in zip(classes.tolist(), pairwise(bounds), strict=True)]),
        np.int64,
    )
