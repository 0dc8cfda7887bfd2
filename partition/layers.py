"""How many layers each stage of a pipeline holds: the even split, and the split of unequal stages by what they cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence


def even_split(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as even as possible; where they do not divide, stages in the middle hold one more.

    The ends are spared because they hold the embedding and the head besides. Raises ValueError where there are fewer layers
    than stages, for a stage between two others cannot be empty.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"there are 1 to {layers} stages for {layers} layers, but got {stages}")
    each, more = divmod(layers, stages)
    begin = (stages - more) // 2
    return [each + (begin <= stage < begin + more) for stage in range(stages)]


def split_layers(layers: int, stages: int, cost: Callable[[int, int], float]) -> list[int] | None:
    """Layers of each stage (at least one) whose largest cost is the smallest possible, or None where they do not fit.

    `cost(stage, count)` is what `count` layers cost on a stage, infinite where its memory does not hold them; it must not
    fall as the count grows. A layer at a time goes where it costs least, which is optimal: the cost of a stage that is
    chosen is a lower bound of what any other split pays.
    """
    if stages > layers:
        return None
    counts = [1] * stages
    if any(math.isinf(cost(stage, 1)) for stage in range(stages)):
        return None
    queue = [(cost(stage, 2), stage) for stage in range(stages)]
    heapq.heapify(queue)
    for _ in range(layers - stages):
        at, stage = queue[0]
        if math.isinf(at):
            return None
        counts[stage] += 1
        heapq.heapreplace(queue, (cost(stage, counts[stage] + 1), stage))
    return counts


def ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The layer ranges of consecutive stages that hold these numbers of layers."""
    found, at = [], 0
    for count in counts:
        found.append((at, at + count))
        at += count
    return found
