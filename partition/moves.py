"""Random moves from one layout to the next, which annealing tries.

Groups split, join, move, swap, turn, leave and come back; pipelines join, divide, are dealt anew; in one pipeline or in all that
are alike, so that symmetric plans stay symmetric on the way to a better one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from partition.deals import Deals, Layout, changed_offload, changed_zero, micro_batches, shared_out
from partition.drafts import degrees, fits_heads
from sim.spec.cluster import Cluster
from sim.spec.job import Job

Pipes: TypeAlias = list[list[tuple[str, ...]]]
"""A layout's pipelines while a move changes them."""


class Moves:
    """The moves among the layouts of one job on some devices of a cluster."""

    def __init__(self, cluster: Cluster, job: Job, devices: Sequence[str], deals: Deals, rng: np.random.Generator) -> None:
        """`deals` say which schedules and slices there are."""
        self._job, self._devices, self._deals, self._rng = job, devices, deals, rng
        self._kind = {name: cluster.device(name).gpu.name for name in devices}
        self._node = {name: cluster.device(name).node.name for name in devices}

    def moved(self, layout: Layout) -> Layout | None:
        """The layout after a random move; None where that move is not possible."""
        if self._rng.random() < 0.1:
            return self._reset(layout)
        pipes: Pipes = [list(pipe) for pipe in layout.pipelines]
        move = self._MOVES[self._draw(len(self._MOVES))]
        if not move(self, pipes):
            return None
        pipes = [pipe for pipe in pipes if pipe]
        if not pipes or any(len(pipe) > self._job.model.layers for pipe in pipes):
            return None
        return replace(layout, pipelines=tuple(tuple(pipe) for pipe in pipes))

    def _draw(self, count: int) -> int:
        return int(self._rng.integers(count))

    def _reset(self, layout: Layout) -> Layout:
        """The layout with another micro-batch, or other settings."""
        settings = layout.settings
        choice = self._draw(7)
        if choice == 4:
            schedule, ahead = self._deals.schedules[self._draw(len(self._deals.schedules))]
            return replace(layout, settings=settings.under(schedule, ahead))
        if choice == 6:
            others = list(self._deals.resliced(settings))
            return replace(layout, settings=others[self._draw(len(others))]) if others else layout
        if choice == 0:
            return replace(layout, settings=replace(settings, sequence_parallel=not settings.sequence_parallel))
        if choice in (1, 5):
            changed = changed_zero(settings) if choice == 1 else changed_offload(settings)
            return layout if changed is None else replace(layout, settings=changed)
        sizes = micro_batches(self._job, layout.micro_batch)
        return replace(layout, micro_batch=sizes[self._draw(len(sizes))])

    def _some(self, pipes: Pipes) -> list[int]:
        """A random pipeline, alone or with all that are alike."""
        chosen = self._draw(len(pipes))
        if self._rng.random() < 0.3:
            return [chosen]
        sign = self._sign(pipes[chosen])
        return [p for p, pipe in enumerate(pipes) if self._sign(pipe) == sign]

    def _sign(self, pipe: Sequence[tuple[str, ...]]) -> object:
        return tuple((self._kind[group[0]], len(group)) for group in pipe)

    def _split(self, pipes: Pipes) -> bool:
        """A group becomes two stages of half its degree."""
        chosen = self._some(pipes)
        i = self._draw(len(pipes[chosen[0]]))
        half, rest = divmod(len(pipes[chosen[0]][i]), 2)
        if rest or not half or not fits_heads(self._job, half):
            return False
        for p in chosen:
            group = pipes[p][i]
            pipes[p][i : i + 1] = [group[:half], group[half:]]
        return True

    def _join(self, pipes: Pipes) -> bool:
        """Two neighbouring stages of one node become one of both their degrees."""
        chosen = self._some(pipes)
        first = pipes[chosen[0]]
        if len(first) < 2:
            return False
        i = self._draw(len(first) - 1)
        if not fits_heads(self._job, len(first[i]) + len(first[i + 1])):
            return False
        if any(self._node[pipes[p][i][0]] != self._node[pipes[p][i + 1][0]] for p in chosen):
            return False
        for p in chosen:
            pipes[p][i : i + 2] = [pipes[p][i] + pipes[p][i + 1]]
        return True

    def _regroup(self, pipes: Pipes) -> bool:
        """All stages of one kind of GPU get another degree: runs of groups on one node are grouped anew."""
        chosen = self._some(pipes)
        kinds = sorted({self._kind[group[0]] for group in pipes[chosen[0]]})
        kind = kinds[self._draw(len(kinds))]
        degree = 1 << self._draw(4)
        for p in chosen:
            made: list[tuple[str, ...]] = []
            run: list[tuple[str, ...]] = []
            for group in [*pipes[p], ()]:
                if run and (not group or self._node[group[0]] != self._node[run[0][0]]):
                    names = [name for one in run for name in one]
                    if self._kind[names[0]] != kind:
                        made += run
                    elif len(names) % degree or not fits_heads(self._job, degree):
                        return False
                    else:
                        made += [tuple(names[a : a + degree]) for a in range(0, len(names), degree)]
                    run = []
                if group:
                    run.append(group)
            pipes[p] = made
        return True

    def _turn(self, pipes: Pipes) -> bool:
        """A part of the stages in the other order."""
        chosen = self._some(pipes)
        count = len(pipes[chosen[0]])
        a, b = sorted((self._draw(count + 1), self._draw(count + 1)))
        if b - a < 2:
            a, b = 0, count
        for p in chosen:
            pipes[p][a:b] = pipes[p][a:b][::-1]
        return count > 1

    def _shift(self, pipes: Pipes) -> bool:
        """A run of stages goes to another place in its pipeline."""
        chosen = self._some(pipes)
        count = len(pipes[chosen[0]])
        if count < 2:
            return False
        a = self._draw(count)
        b = min(count, a + 1 + self._draw(4))
        to = self._draw(count - (b - a) + 1)
        for p in chosen:
            run = pipes[p][a:b]
            rest = pipes[p][:a] + pipes[p][b:]
            pipes[p] = rest[:to] + run + rest[to:]
        return True

    def _drop(self, pipes: Pipes) -> bool:
        """A stage's GPUs are left out."""
        chosen = self._some(pipes)
        i = self._draw(len(pipes[chosen[0]]))
        for p in chosen:
            del pipes[p][i]
        return True

    def _take(self, pipes: Pipes) -> bool:
        """GPUs that were left out become a stage somewhere, or a pipeline."""
        used = {name for pipe in pipes for group in pipe for name in group}
        by_node: dict[str, list[str]] = {}
        for name in self._devices:
            if name not in used:
                by_node.setdefault(self._node[name], []).append(name)
        if not by_node:
            return False
        left = list(by_node.values())
        names = left[self._draw(len(left))]
        allowed = degrees(self._job, len(names))
        degree = allowed[self._draw(len(allowed))]
        groups = [tuple(names[a : a + degree]) for a in range(0, len(names) - degree + 1, degree)]
        if self._rng.random() < 0.2:
            pipes.append(groups)
            return True
        for group in groups[: 1 + self._draw(len(groups))]:
            pipe = pipes[self._draw(len(pipes))]
            at = [i for i, other in enumerate(pipe) if self._node[other[0]] == self._node[group[0]]]
            pipe.insert(at[0] if at else self._draw(len(pipe) + 1), group)
        return True

    def _two(self, pipes: Pipes) -> tuple[list[int], list[int]] | None:
        """Two pipelines, or two families of pipelines that are alike, pair by pair; None where there are none."""
        if len(pipes) < 2:
            return None
        ones, others = self._some(pipes), self._some(pipes)
        if ones == others:
            half = len(ones) // 2
            return (ones[:half], ones[half : 2 * half]) if half else None
        others = [p for p in others if p not in ones]
        count = min(len(ones), len(others))
        return (ones[:count], others[:count]) if count else None

    def _give(self, pipes: Pipes) -> bool:
        """A stage goes to another pipeline, next to a stage on its node if there is one."""
        pairs = self._two(pipes)
        if pairs is None:
            return False
        i = self._draw(len(pipes[pairs[0][0]]))
        for p, q in zip(*pairs, strict=True):
            if i >= len(pipes[p]):
                return False
            group = pipes[p].pop(i)
            at = [k for k, other in enumerate(pipes[q]) if self._node[other[0]] == self._node[group[0]]]
            pipes[q].insert(at[self._draw(len(at))] if at else self._draw(len(pipes[q]) + 1), group)
        return True

    def _swap(self, pipes: Pipes) -> bool:
        """Stages of two pipelines change places."""
        pairs = self._two(pipes)
        if pairs is None:
            return False
        i, j = self._draw(len(pipes[pairs[0][0]])), self._draw(len(pipes[pairs[1][0]]))
        for p, q in zip(*pairs, strict=True):
            if i >= len(pipes[p]) or j >= len(pipes[q]):
                return False
            pipes[p][i], pipes[q][j] = pipes[q][j], pipes[p][i]
        return True

    def _chain(self, pipes: Pipes) -> bool:
        """Two pipelines become one: one after the other, or their stages node by node."""
        pairs = self._two(pipes)
        if pairs is None:
            return False
        by_node = self._rng.random() < 0.5
        for p, q in zip(*pairs, strict=True):
            joined = pipes[p] + pipes[q]
            if by_node:
                nodes = list(dict.fromkeys(self._node[group[0]] for group in joined))
                joined.sort(key=lambda group: nodes.index(self._node[group[0]]))
            pipes[p], pipes[q] = joined, []
        return True

    def _divide(self, pipes: Pipes) -> bool:
        """A pipeline becomes two: dealt in turn, so that each has a half of every node, or cut at one place."""
        chosen = self._some(pipes)
        count = len(pipes[chosen[0]])
        if count < 2:
            return False
        at = 1 + self._draw(count - 1)
        dealt = self._rng.random() < 0.7
        for p in chosen:
            if dealt:
                runs: list[list[tuple[str, ...]]] = []
                for group in pipes[p]:
                    if runs and self._node[runs[-1][0][0]] == self._node[group[0]]:
                        runs[-1].append(group)
                    else:
                        runs.append([group])
                one, other = (list(pipe) for pipe in (*shared_out(runs, 2), (), ())[:2])
            else:
                one, other = pipes[p][:at], pipes[p][at:]
            pipes[p] = one
            pipes.append(other)
        return True

    def _halve(self, pipes: Pipes) -> bool:
        """A pipeline becomes two with the same stages, each of a half of every group."""
        chosen = self._some(pipes)
        sizes = {len(group) for group in pipes[chosen[0]]}
        if any(size % 2 or not fits_heads(self._job, size // 2) for size in sizes):
            return False
        for p in chosen:
            pipes.append([group[len(group) // 2 :] for group in pipes[p]])
            pipes[p] = [group[: len(group) // 2] for group in pipes[p]]
        return True

    def _fuse(self, pipes: Pipes) -> bool:
        """Two pipelines with stages on the same nodes become one of both their degrees."""
        pairs = self._two(pipes)
        if pairs is None:
            return False
        for p, q in zip(*pairs, strict=True):
            one, other = pipes[p], pipes[q]
            if [self._node[group[0]] for group in one] != [self._node[group[0]] for group in other]:
                return False
            made = [a + b for a, b in zip(one, other, strict=True)]
            if not all(fits_heads(self._job, len(group)) for group in made):
                return False
            pipes[p], pipes[q] = made, []
        return True

    _MOVES: tuple[Callable[[Moves, Pipes], bool], ...] = (
        _split,
        _join,
        _regroup,
        _turn,
        _shift,
        _shift,
        _drop,
        _take,
        _take,
        _give,
        _give,
        _swap,
        _swap,
        _chain,
        _divide,
        _halve,
        _fuse,
    )
