"""How many micro-batches each pipeline takes, so that pipelines of unequal speed end together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Pace:
    """How fast a pipeline is: m micro-batches of `micro_batch` sequences take fill_s + m x period_s."""

    micro_batch: int
    fill_s: float
    period_s: float


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def split_batch(global_batch: int, paces: Sequence[Pace]) -> list[int] | None:
    """Micro-batches of each pipeline (at least one), so that the last one ends as early as possible; None if no split fits.

    One micro-batch at a time goes to the pipeline that would end first with it. That is optimal where all have the same
    micro-batch size; else it is a good split, whose sequences sum to the global batch exactly too.
    """
    sizes = [pace.micro_batch for pace in paces]
    left = global_batch - sum(sizes)
    if left < 0 or (len(set(sizes)) == 1 and left % sizes[0]):
        return None
    counts = [1] * len(paces)
    reachable = None
    if len(set(sizes)) == 1:
        more = _certain(left // sizes[0], paces)
        counts = [1 + n for n in more]
        left -= sum(more) * sizes[0]
    else:
        # reachable[n]: n sequences are a sum of these sizes, so that a split of what is left never ends in a corner.
        reachable = [True] + [False] * left
        for n in range(1, left + 1):
            reachable[n] = any(size <= n and reachable[n - size] for size in set(sizes))
        if not reachable[left]:
            return None
    queue = [(_end_s(pace, counts[p] + 1), p) for p, pace in enumerate(paces)]
    heapq.heapify(queue)
    while left:
        _, p = queue[0]
        if reachable is not None and (sizes[p] > left or not reachable[left - sizes[p]]):
            heapq.heappop(queue)  # it will not fit later either: what is left only becomes a smaller sum of the sizes
            continue
        left -= sizes[p]
        counts[p] += 1
        heapq.heapreplace(queue, (_end_s(paces[p], counts[p] + 1), p))
    return counts


def _end_s(pace: Pace, micro_batches: int) -> float:
    return pace.fill_s + micro_batches * pace.period_s


def _certain(micro_batches: int, paces: Sequence[Pace]) -> list[int]:
    """Micro-batches after the first that each pipeline takes for certain, which are no more than there are.

    They are those that end before the moment at which all pipelines would end if micro-batches could be divided.
    """
    end_s, rate, work = 0.0, 0.0, float(micro_batches)
    # From the moment when it has ended its first one, a pipeline works at 1 / period_s on those that are left.
    begins = sorted((pace.fill_s + pace.period_s, pace.period_s) for pace in paces)
    for i, (begin_s, period_s) in enumerate(begins):
        rate += 1 / period_s
        until_s = begins[i + 1][0] if i + 1 < len(begins) else float("inf")
        end_s = begin_s + work / rate
        if end_s <= until_s:
            break
        work -= (until_s - begin_s) * rate
    return [max(0, int((end_s * (1 - 1e-9) - pace.fill_s - pace.period_s) / pace.period_s)) for pace in paces]
