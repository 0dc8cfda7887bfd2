"""What islands can do at most in some seconds, by what their links must carry; see the head of `partition.bound`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from partition.bubble import Division, Filling
from partition.islands import Island
from partition.visits import Visited, most_by_visits
from sim.spec.gpu import GpuKind
from sim.spec.job import Job

STEPS = 40
"""How often the interval of times in which the network's bound lies is halved."""

ROUNDING = 1e-9
"""By how much an exchange is taken to be shorter than so many layers', as a fraction."""

PRICES = 64
"""At how many prices of the joint constraint the Lagrangian is tried; each gives a bound, the least counts."""

EXCHANGED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, math.inf)
"""The ends of the ranges of how long the exchange of an island takes, in layers of the island that takes the shortest."""

PARTS = 4
"""Into how many parts such a range is divided where the program of `partition.visits` is asked."""

Prices: TypeAlias = npt.NDArray[np.float64]


def network_s(islands: Sequence[Island], job: Job, work: float, ends: float, once_s: float, least_s: float) -> float:
    """The least time in which islands can do so much work, no less than `least_s`; see the head of this file."""
    batch, layers = job.global_batch, job.model.layers
    enough_s = max(least_s, 2 * batch * max(island.crossing_s for island in islands))

    def too_short(seconds: float) -> bool:
        return _most_work(islands, seconds, once_s, batch, layers, ends) < work * (1 - 1e-12)

    if not too_short(least_s):
        return least_s
    low, high = least_s, enough_s
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return low


def _most_work(islands: Sequence[Island], seconds: float, once_s: float, batch: int, layers: int, ends: float) -> float:
    """The most layers of sequences, ends counted as so many, that islands can do in some seconds."""
    tight = _tight(islands, seconds, batch)
    free = sum(island.rate for island in islands if island not in tight) * (seconds - once_s)
    capacities = {island: island.rate * (seconds - once_s) for island in tight}
    choices = _choices(tight, capacities, seconds, batch, layers, ends)
    return free + max(sum(island.rate for island in chosen) * (seconds - once_s) + others for chosen, others in choices)


def _tight(islands: Sequence[Island], seconds: float, batch: int) -> Counter[Island]:
    """The islands that not every sequence can enter and leave."""
    return Counter(island for island in islands if 2 * batch * island.crossing_s > seconds)


def _choices(
    tight: Counter[Island],
    capacities: Mapping[Island, float],
    seconds: float,
    batch: int,
    layers: int,
    ends: float,
    most_s: float = math.inf,
    repeated: float = 1.0,
) -> Iterator[tuple[tuple[Island, ...], float]]:
    """Which of some islands are ends, and the most work that the others of them then do.

    Of an exchange that takes an island no longer than `most_s`, or of one that moves so many times the bytes.
    """
    # A price above half of all layers buys nothing: each sequence begun or ended saves one crossing, half a visit.
    prices = np.concatenate([[0.0], np.geomspace(1e-3, (layers + ends) / 2 + 1, PRICES)])
    by_ends = {
        some: {
            island: _shared_work(island, capacities[island], prices, seconds, batch, layers, ends, some, most_s, repeated)
            for island in tight
        }
        for some in (False, True)
    }
    for chosen in _ends(tight):
        shared = by_ends[bool(chosen)]
        needed = [2 * batch - seconds / island.crossing_s for island in chosen]
        left = 2 * batch - sum(needed)
        if left < 0 or (len(chosen) == 2 and any(batch * island.crossing_s > seconds for island in chosen)):
            continue
        counts = tight - Counter(chosen)
        others = np.sum([count * shared[island] for island, count in counts.items()], axis=0) if counts else np.zeros_like(prices)
        yield chosen, float(np.min(others + prices * left))


def _ends(tight: Counter[Island]) -> Iterator[tuple[Island, ...]]:
    """None, one or two of the islands that cannot be visited and left by every sequence."""
    yield ()
    kinds = list(tight)
    for i, one in enumerate(kinds):
        yield (one,)
        yield from ((one, other) for other in kinds[i:] if other is not one or tight[one] > 1)


def _shared_work(
    island: Island,
    capacity: float,
    prices: Prices,
    seconds: float,
    batch: int,
    layers: int,
    ends: float,
    leave: bool,
    most_s: float,
    repeated: float,
) -> Prices:
    """At each price of a sequence begun or ended, the most work of an island, less the price, if its layers are all shared.

    With `leave` all sequences also visit another island, so that each visit has a crossing although it begins and ends here.
    """
    each_s = island.shared_s * repeated
    held = np.arange(1 + min(layers, math.floor(most_s / each_s)) if each_s > 0 and most_s < math.inf else 1 + layers)
    left_s = seconds - each_s * held
    # Of groups that span islands it may have parts: their layers cost as much as two visits, their ends as half a visit.
    each = np.maximum(np.maximum(held, 0.5) + ends, 2 * ends)
    most = np.minimum(capacity, batch * (held + ends) + seconds / (4 * island.crossing_s))
    without = left_s / (2 * island.crossing_s) * each
    unpaid = np.minimum(most, without)
    paid = np.minimum(most - unpaid, without if leave else batch * each)
    gain = np.maximum(0.0, 1 - 2 * prices[:, None] / each)
    done: Prices = np.max(np.where(left_s >= 0, unpaid + paid * gain, 0.0), axis=1)
    return done


@dataclass(frozen=True)
class Steady:
    """Plans that sum gradients, or gather parameters, at every micro-batch, if there are so many micro-batches or more."""

    times: float
    """The bytes that an exchange moves, per byte of one that waits for the last micro-batch."""
    again: float
    """What must be computed a second time, in layers of sequences."""
    most_again: float
    """The same of one layer of a sequence at most, where all of it is recomputed."""


class Divisions:
    """How islands can divide the work: which of them are free or ends, and how long gradients are exchanged."""

    def __init__(
        self, islands: Sequence[Island], job: Job, ends: float, once_s: float, filling: Filling, steady: Sequence[Steady]
    ) -> None:
        self._islands, self._ends, self._once_s, self._filling, self._steady = islands, ends, once_s, filling, steady
        self._batch, self._layers = job.global_batch, job.model.layers

    def __call__(self, seconds: float) -> Iterator[Division]:
        """Those of plans of so many seconds."""
        tight = _tight(self._islands, seconds, self._batch)
        if not tight:
            yield from self._divided(seconds, tight, 0.0, math.inf, 1.0)
            return
        best = self._filling.most(seconds, self._once_s, 0.0)
        most = sum(count * best[kind] for kind, count in self._filling.counts.items())
        for plans in self._steady:
            needed = self._batch * (self._layers + self._filling.head_layers) + plans.again
            for division in self._divided(seconds, tight, 0.0, math.inf, plans.times):
                done = sum(count * best[kind] for kind, count in division.counts.items())
                if min(most, done + division.others * (1 + plans.most_again)) >= needed * (1 - 1e-12):
                    yield division
        unit_s = min(island.shared_s for island in tight)
        if unit_s == 0:
            yield from self._divided(seconds, tight, 0.0, math.inf, 1.0)
            return
        for low, high in pairwise(EXCHANGED):
            if low * unit_s > seconds:
                return
            yield from self._divided(seconds, tight, low * unit_s * (1 - ROUNDING), high * unit_s * (1 - ROUNDING), 1.0)

    def _divided(
        self, seconds: float, tight: Counter[Island], exchange_s: float, most_s: float, times: float
    ) -> Iterator[Division]:
        """Those of plans whose longest exchange takes from `exchange_s` to `most_s`, if it moves so many times the bytes."""
        most = self._filling.most(seconds, self._once_s, exchange_s)
        capacities = {island: sum(count * most[kind] for kind, count in island.counts) for island in tight}
        free = Counter(self._islands) - tight
        for chosen, others in _choices(tight, capacities, seconds, self._batch, self._layers, self._ends, most_s, times):
            counts: Counter[GpuKind] = Counter()
            for island in (*free.elements(), *chosen):
                counts.update(dict(island.counts))
            closer = partial(self._closer, counts, chosen, tight, seconds, exchange_s, most_s, times)
            yield Division(counts, others, exchange_s, closer if tight else None)

    def _closer(
        self,
        counts: Mapping[GpuKind, int],
        chosen: Sequence[Island],
        tight: Counter[Island],
        seconds: float,
        exchange_s: float,
        most_s: float,
        times: float,
    ) -> Iterator[Division]:
        """One of these divisions, as several of shorter ranges of exchanges, without those that no plan can have."""
        lows = [exchange_s] if math.isinf(most_s) else np.linspace(exchange_s, most_s, PARTS, endpoint=False).tolist()
        for low, high in pairwise([*lows, most_s]):
            most = self._filling.most(seconds, self._once_s, low)
            left, visited = Counter(chosen), []
            for island in self._islands:
                own = None
                if island in tight:
                    own = left[island] > 0
                    left[island] -= 1
                capacity = sum(count * most[kind] for kind, count in island.counts)
                head = min(self._filling.head_s(kind) * most[kind] for kind, _ in island.counts) / (seconds - self._once_s)
                visited.append(Visited(island, own, capacity, head))
            others = most_by_visits(visited, seconds, self._batch, self._layers, high, times, self._filling.head_layers)
            if others is not None:
                yield Division(counts, others, low)
