"""Schedules: in which order a stage works on its micro-batches, and how many of them it holds at once.

A schedule is written once, here, for a pipeline of `depth` stages, of which each holds `chunks` layer ranges. A stage is
known by its `position`, the place at which a micro-batch first visits it, and a chunk by its place in the stage. Messages,
gradient reductions and parameter gathers are added by rules that do not know the schedule (`sim.spec.compile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from sim.spec.plan import Pipeline
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Forward
from sim.spec.reading import InputError

Work: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight


class Step(NamedTuple):
    """One piece of a stage's work: what is done for which micro-batch with which of the stage's layer ranges."""

    kind: type[Work]
    micro_batch: int
    chunk: int


Order: TypeAlias = Callable[[int, int, int, int], Iterable[Step]]
"""The work of one stage, in order, given depth, position, chunks and micro-batches.

Of every chunk each micro-batch has one forward and one backward, or the two halves of one, and comes in order of its number.
"""


def _gpipe(depth: int, position: int, chunks: int, micro_batches: int) -> Iterator[Step]:
    """All forwards, then all backwards (Huang et al., 2019). Backwards in order, so that gradients accumulate as in 1F1B."""
    for kind in (Forward, Backward):
        yield from (Step(kind, m, 0) for m in range(micro_batches))


def _one_forward_one_backward(depth: int, position: int, chunks: int, micro_batches: int) -> Iterable[Step]:
    """Warm-up forwards, then one forward and one backward in turn, then the rest (PipeDream-flush, Narayanan et al., 2021)."""
    return _holding(depth - position, micro_batches)


def _split(depth: int, position: int, chunks: int, micro_batches: int) -> Iterable[Step]:
    """1F1B whose backwards come in halves: the gradient goes on before the weight half, for which nobody waits.

    It holds no more than 1F1B, and a micro-batch is there and back sooner by all weight halves but one.
    """
    return _zero_bubble(depth - position, depth - position, micro_batches)


def _holding(count: int, micro_batches: int) -> Iterable[Step]:
    """1F1B of a stage that holds so many micro-batches at most."""
    forwards, backwards = ([Step(kind, m, 0) for m in range(micro_batches)] for kind in (Forward, Backward))
    return _alternating(forwards, backwards, count - 1)


def _holding_split(count: int, micro_batches: int) -> Iterable[Step]:
    """The same of a stage whose backwards come in halves."""
    return _zero_bubble(count, count, micro_batches)


def _eager(depth: int, position: int, chunks: int, micro_batches: int) -> Iterator[Step]:
    """1F1B with twice the warm-up, so that messages travel while both their stages work (Zhuang et al., 2023, arXiv:2211.05322).

    Between two neighbours two more micro-batches are under way than their stages work on, one in each direction.
    """
    forwards, backwards = ([Step(kind, m, 0) for m in range(micro_batches)] for kind in (Forward, Backward))
    return _alternating(forwards, backwards, 2 * (depth - position - 1))


def _alternating(forwards: list[Step], backwards: list[Step], warm_up: int) -> Iterator[Step]:
    """So many forwards, then one forward and one backward in turn, then the rest of the backwards."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def _interleaved(depth: int, position: int, chunks: int, micro_batches: int) -> Iterator[Step]:
    """1F1B over virtual stages, in groups of `depth` micro-batches (Narayanan et al., 2021, section 2.2; Megatron-LM).

    A group goes through a stage's first chunk, then through its second, and so on, and back in the opposite order. The
    warm-up is of 2 (depth - position - 1) + (chunks - 1) depth forwards. Where the micro-batches are no multiple of the
    depth, the last group is filled up in thought: leaving out some work of an order that can be executed leaves one that can.
    """
    if chunks == 1:
        yield from _one_forward_one_backward(depth, position, chunks, micro_batches)
        return
    forwards, backwards = [], []
    for first in range(0, micro_batches, depth):
        for chunk in range(chunks):
            for m in range(first, first + depth):
                forwards.append(Step(Forward, m, chunk))
                backwards.append(Step(Backward, m, chunks - 1 - chunk))
    order = _alternating(forwards, backwards, 2 * (depth - position - 1) + (chunks - 1) * depth)
    yield from (step for step in order if step.micro_batch < micro_batches)


def _zero_bubble(warm_up: int, kept: int, micro_batches: int) -> Iterator[Step]:
    """Warm-up forwards, then in turn the input half of a backward, a weight half and a forward.

    A weight half is put off as long as no more than `kept` micro-batches are held, so that it fills the bubble at the end.
    """
    delay = kept - warm_up
    yield from (Step(Forward, m, 0) for m in range(min(warm_up, micro_batches)))
    for m in range(micro_batches):
        yield Step(BackwardInput, m, 0)
        if m >= delay:
            yield Step(BackwardWeight, m - delay, 0)
        if m + warm_up < micro_batches:
            yield Step(Forward, m + warm_up, 0)
    yield from (Step(BackwardWeight, m, 0) for m in range(max(0, micro_batches - delay), micro_batches))


def _zero_bubble_1p(depth: int, position: int, chunks: int, micro_batches: int) -> Iterator[Step]:
    """ZB-H1: no more is held anywhere than by 1F1B's first stage; a bubble of (p-1)(F + I - W) (Qi et al., 2024, section 2.1)."""
    return _zero_bubble(depth - position, depth, micro_batches)


def _zero_bubble_2p(depth: int, position: int, chunks: int, micro_batches: int) -> Iterator[Step]:
    """ZB-H2: about twice the warm-up and the memory; a bubble of (p-1)(F + I - 2W), none of equal times (as above, 2.2)."""
    return _zero_bubble(2 * (depth - position) - 1, 2 * depth - 1, micro_batches)


def _zero_bubble_v(depth: int, position: int, chunks: int, micro_batches: int) -> Iterable[Step]:
    """V-ZB: the memory of 1F1B and next to no bubble (Qi et al., 2024, arXiv:2405.15362); the order is our own."""
    return _folded_orders(depth, micro_batches)[position]


FOLDED_TICKS: Mapping[type[Work], int] = {Forward: 8, BackwardInput: 9, BackwardWeight: 8}
"""How long each work of a chunk is taken to last while the order of a folded pipeline is found. Attention has no weights, so
that an input half lasts longest. Were all equal, the order would fit together for equal times alone: where an input half lasts
a tenth longer than a forward, or messages take time, its bubble is one and a half to three times as large."""


@lru_cache(maxsize=4)
def _folded_orders(depth: int, micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    """The work of all stages of a pipeline folded in a V, found by letting every stage do what it can as soon as it can.

    Each work takes its FOLDED_TICKS. What leads back along the V comes first: a forward of the second chunk, an input half of
    the second, a forward of the first, an input half of the first; a weight half fills what time is left. A stage holds at most
    2 `depth` chunks of micro-batches. Its last place is kept for the second chunk, so that the oldest micro-batch can always go
    on.
    """
    last = 2 * depth - 1
    # When the forward or input half of a micro-batch at a virtual stage is done; the last virtual stage is the loss's.
    forward_end: list[list[int]] = [[] for _ in range(2 * depth)]
    input_end: list[list[int]] = [[] for _ in range(2 * depth)]
    put_off: list[list[Step]] = [[] for _ in range(depth)]
    weights = [0] * depth
    orders: list[list[Step]] = [[] for _ in range(depth)]
    free = [0] * depth
    left = 6 * depth * micro_batches
    instants = [(0, i) for i in range(depth)]  # a heap: when a stage becomes free, or something arrives for it

    def chosen(i: int, now: int) -> Step | None:
        held = sum(len(forward_end[v]) for v in (i, last - i)) - weights[i]
        for kind, chunk in ((Forward, 1), (BackwardInput, 1), (Forward, 0), (BackwardInput, 0)):
            v = i if chunk == 0 else last - i
            if kind is Forward:
                m = len(forward_end[v])
                before = forward_end[v - 1] if v > 0 else None
                if m == micro_batches or held + (chunk == 0) >= 2 * depth:
                    continue
            else:
                m = len(input_end[v])
                before = input_end[v + 1] if v < last else None
                if m >= len(forward_end[v]):
                    continue
            if before is None or (m < len(before) and before[m] <= now):
                return Step(kind, m, chunk)
        return put_off[i][weights[i]] if weights[i] < len(put_off[i]) else None

    while left:
        now, woken = instants[0][0], set()
        while instants and instants[0][0] == now:
            woken.add(heappop(instants)[1])
        for i in sorted(i for i in woken if free[i] <= now):
            step = chosen(i, now)
            if step is None:
                continue
            kind, m, chunk = step
            v = i if chunk == 0 else last - i
            end = free[i] = now + FOLDED_TICKS[kind]
            after = v
            if kind is Forward:
                forward_end[v].append(end)
                after = min(v + 1, last)
            elif kind is BackwardInput:
                input_end[v].append(end)
                put_off[i].append(Step(BackwardWeight, m, chunk))
                after = max(v - 1, 0)
            else:
                weights[i] += 1
            orders[i].append(step)
            left -= 1
            for woken_at_end in {i, min(after, last - after)}:
                heappush(instants, (end, woken_at_end))
    return tuple(map(tuple, orders))


@dataclass(frozen=True)
class Schedule:
    """An order, the layer ranges that it takes of every stage, and the micro-batches that a stage of one range holds."""

    order: Order
    ranges: int | None = 1
    """None where it takes any number, but of every stage the same."""
    folded: bool = False
    """Whether the second ranges are visited from the last stage to the first."""
    splits_backward: bool = False
    held: Callable[[int, int, int], int] | None = None
    """Of a stage of one range, given depth, position and micro-batches, so that planners need not count an order."""
    holding: Callable[[int, int], Iterable[Step]] | None = None
    """The order of a stage that says how many micro-batches it holds, given that and how many there are."""


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(_gpipe, held=lambda depth, position, micro_batches: micro_batches),
    "1f1b": Schedule(
        _one_forward_one_backward,
        held=lambda depth, position, micro_batches: min(depth - position, micro_batches),
        holding=_holding,
    ),
    "split-1f1b": Schedule(
        _split,
        splits_backward=True,
        held=lambda depth, position, micro_batches: min(depth - position, micro_batches),
        holding=_holding_split,
    ),
    "eager-1f1b": Schedule(_eager, held=lambda depth, position, micro_batches: min(2 * (depth - position) - 1, micro_batches)),
    "interleaved": Schedule(_interleaved, ranges=None),
    "zb-1p": Schedule(
        _zero_bubble_1p, splits_backward=True, held=lambda depth, position, micro_batches: min(depth, micro_batches)
    ),
    "zb-2p": Schedule(
        _zero_bubble_2p, splits_backward=True, held=lambda depth, position, micro_batches: min(2 * depth - 1, micro_batches)
    ),
    "zb-v": Schedule(_zero_bubble_v, ranges=2, folded=True, splits_backward=True),
}
"""The schedules by their names in a plan."""


def order_of(schedule: str, pipeline: Pipeline, position: int, micro_batches: int, slices: int = 1) -> Iterable[Step]:
    """The work of the stage at a position of a pipeline, in order.

    Where micro-batches come in slices, slice i of micro-batch m is number `m * slices + i`. Forwards are in order; backwards
    begin with the last slice, whose keys and values no other one attends to, so that a stage holds the other slices of one
    micro-batch besides what it holds of slices that are alone (Sun et al., 2024, arXiv:2406.03488).
    """
    stage, known = pipeline.stages[pipeline.visiting_order[position]], SCHEDULES[schedule]
    depth = len(pipeline.stages)
    if slices > 1:
        if known.holding is None:
            order = known.order(depth, position, 1, micro_batches * slices)
        else:
            own = depth - position if stage.in_flight is None else stage.in_flight
            order = known.holding(own + slices - 1, micro_batches * slices)
        return _from_last_slice(order, slices)
    if stage.in_flight is None or known.holding is None:
        return known.order(depth, position, len(stage.layers), micro_batches)
    return known.holding(stage.in_flight, micro_batches)


def _from_last_slice(order: Iterable[Step], slices: int) -> Iterator[Step]:
    """An order of slices whose backwards come, of each micro-batch, from its last slice to its first."""
    for step in order:
        if step.kind is Forward:
            yield step
        else:
            micro_batch, number = divmod(step.micro_batch, slices)
            yield step._replace(micro_batch=micro_batch * slices + slices - 1 - number)


def held_by(schedule: str, pipeline: Pipeline, position: int, chunks: tuple[int, ...] = (1,), slices: int = 1) -> float:
    """The most micro-batches that the stage at a position of a pipeline holds at once; `chunks` as `in_flight` takes them.

    Where micro-batches come in slices, it is of slices.
    """
    own, most = pipeline.stages[pipeline.visiting_order[position]].in_flight, pipeline.micro_batches * slices
    if own is None:
        held = in_flight(schedule, len(pipeline.stages), position, most, chunks)
        return held if slices == 1 else min(held + slices - 1, most)
    return min(own + slices - 1, most)


def check_ranges(schedule: str, pipeline: Pipeline, where: str) -> None:
    """Nothing. Raises InputError, in one line, where a pipeline's layer ranges are not laid as its schedule takes them."""
    known = SCHEDULES[schedule]
    counts = [len(stage.layers) for stage in pipeline.stages]
    wanted = known.ranges or counts[0]
    for s, count in enumerate(counts):
        if count != wanted:
            takes = f"as many of every stage, and stages[0] has {wanted}" if known.ranges is None else ("", "one", "two")[wanted]
            raise InputError(
                f"{where}.stages[{s}] has {count} layer range{'s' if count > 1 else ''}, but {schedule!r} takes {takes}"
            )
    for s, stage in enumerate(pipeline.stages):
        for (a, b), (c, d) in pairwise(sorted(stage.layers)):
            if b == c and (a == b or c == d):
                raise InputError(f"{where}.stages[{s}] has the layer ranges [{a}, {b}] and [{c}, {d}], which are one")
    once = pipeline.visiting_order
    visits = once + once[::-1] if known.folded else once * wanted
    found = [s for s, _ in pipeline.chunks]
    if found != visits:
        raise InputError(
            f"{where}: under {schedule!r} a micro-batch visits the stages in the order {', '.join(map(str, visits))}, "
            f"but their layers are in the order {', '.join(map(str, found))}"
        )


_LONG = 4
"""After so many times `depth` micro-batches all schedules but GPipe and the folded one repeat themselves, and what they hold
grows no more."""


@lru_cache(maxsize=1 << 16)
def in_flight(schedule: str, depth: int, position: int, micro_batches: int, chunks: tuple[int, ...] = (1,)) -> float:
    """The most micro-batches whose activations a stage holds at once, at `position` of a pipeline of `depth` stages.

    `chunks` are the layers of each of the stage's ranges, in layer order; the answer is in activations of all of them, and may
    be a fraction. Activations are held from the forward to the end of the backward (of its weight half, where it has two).
    With (0, 1) it is the most that the second of two ranges holds.
    """
    known = SCHEDULES[schedule]
    if len(chunks) == 1 and known.held is not None:
        return known.held(depth, position, micro_batches)
    parts = chunks if any(chunks) else (1,) * len(chunks)
    held = _held(schedule, depth, position, micro_batches, len(chunks))
    return max([sum([count * part for count, part in zip(counts, parts, strict=True)]) for counts in held]) / sum(parts)


@lru_cache(maxsize=1 << 12)
def _held(schedule: str, depth: int, position: int, micro_batches: int, chunks: int) -> frozenset[tuple[int, ...]]:
    """Of how many micro-batches a stage holds the activations of each of its chunks, after each of its forwards."""
    known = SCHEDULES[schedule]
    held, found = [0] * chunks, set()
    for step in known.order(depth, position, chunks, micro_batches if known.folded else min(micro_batches, _LONG * depth)):
        if step.kind is Forward:
            held[step.chunk] += 1
            found.add(tuple(held))
        elif step.kind is not BackwardInput:
            held[step.chunk] -= 1
    return frozenset(found)
