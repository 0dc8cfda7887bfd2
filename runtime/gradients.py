"""Gradients: where they accumulate, and their sums over all devices that hold the same numbers.

Lanes of unequal degrees hold different rows of a parameter. Cut wherever any of them is cut, it falls into pieces that some
set of devices holds; pieces of one set are one slice, and one collective. Within a slice every device has the same numbers in
the same order, so that ZeRO's shards are equal parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from runtime.collectives import Pending, all_reduce, is_staged, reduce_scatter, tell_when_done
from runtime.parameters import Parameter, Section, experts_of, is_partial, range_parameters, rows_of, share
from runtime.world import World, expert_rank
from sim.spec.plan import LayerRange, Plan
from sim.spec.program import Lane, Program, ReduceGradients
from sim.spec.transformer import Transformer

# --- Which devices hold what -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a parameter, which `holders` have, and whose gradient is the sum of the `contributors`'."""

    parameter: Parameter
    start: int
    stop: int
    holders: tuple[int, ...]
    contributors: frozenset[int]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return (self.stop - self.start) * self.parameter.row_size


@dataclass(frozen=True)
class Slice:
    """The pieces of a section that the same devices hold, one after the other.

    ZeRO divides them over each of the `shard_groups`, which together are the `ranks`; there is one, unless the plan has more.
    """

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    shard_groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(piece.size for piece in self.pieces)

    @property
    def equals(self) -> list[tuple[int, ...]]:
        """For each shard the ranks that have it, one of each shard group."""
        return [tuple(sorted(same)) for same in zip(*self.shard_groups, strict=True)]

    def stretches(self, start: int, stop: int) -> Iterable[tuple[Piece, int, int, int]]:
        """What its numbers `start` to `stop` are: (piece, from, to, at), places in the piece and, of the first, in the slice."""
        at = 0
        for piece in self.pieces:
            low, high = max(start, at), min(stop, at + piece.size)
            if low < high:
                yield piece, low - at, high - at, low
            at += piece.size


def lane_sections(transformer: Transformer, lane: Lane) -> tuple[LayerRange, ...]:
    """The layer ranges that a lane's parameters are kept in: its buckets, the layers between them, and its ends.

    `(0, 0)` is the embedding (or its copy, where the output is tied to it), `(n, n)` the head.
    """
    n = transformer.layers
    found: list[LayerRange] = []
    for start, stop in lane.layers:
        at = start
        for bucket in (b for b in lane.buckets if start <= b[0] and b[1] <= stop):
            found += [(at, bucket[0])] if at < bucket[0] else []
            found.append(bucket)
            at = bucket[1]
        found += [(at, stop)] if at < stop else []
    if lane.embedding or (lane.head and transformer.tied_embeddings):
        found.append((0, 0))
    if lane.head:
        found.append((n, n))
    return tuple(sorted(found))


def plan_parameters(plan: Plan, layers: LayerRange) -> tuple[Parameter, ...]:
    """The parameters of a layer range as a plan divides them: experts may be whole where they are."""
    found = range_parameters(plan.transformer, layers)
    if not plan.whole_experts:
        return found
    return tuple(parameter if parameter.expert is None else replace(parameter, divided="in_part") for parameter in found)


def section_parameters(plan: Plan, lane: Lane, layers: LayerRange, context: int, index: int) -> tuple[Parameter, ...]:
    """The parameters that a tensor rank of a context rank of a lane holds of a layer range: of divided experts its own.

    Of a tied embedding the lane of the head has only the tokens' matrix.
    """
    found = plan_parameters(plan, layers)
    if layers == (0, 0) and not lane.embedding:
        return tuple(parameter for parameter in found if parameter.divided == "vocabulary")
    if plan.transformer.experts is None or plan.expert_parallel == 1:
        return found
    own = experts_of(plan.transformer.experts.experts, expert_rank(plan, lane, context, index), plan.expert_parallel)
    return tuple(parameter for parameter in found if parameter.expert is None or parameter.expert in own)


def slices(
    plan: Plan, lanes: Sequence[Lane], ranks: Mapping[str, tuple[tuple[int, ...], ...]], layers: LayerRange
) -> tuple[Slice, ...]:
    """The slices of a layer range that these lanes hold; equal, in the same order, on every device that asks.

    `ranks` are those of each lane's tensor-parallel groups (`runtime.world.lane_ranks`). A copy of the same rows on several
    devices of one counts once, unless each has only its part of the gradient.
    """
    pieces: list[Piece] = []
    groups = [(lane, context, group) for lane in lanes for context, group in enumerate(ranks[lane.name])]
    known: dict[object, set[str]] = {}

    def held_names(lane: Lane, context: int, index: int) -> set[str]:
        part = lane.embedding, expert_rank(plan, lane, context, index)
        if part not in known:
            known[part] = {parameter.name for parameter in section_parameters(plan, lane, layers, context, index)}
        return known[part]

    names = [[held_names(lane, context, index) for index in range(len(group))] for lane, context, group in groups]
    for parameter in sorted(plan_parameters(plan, layers), key=lambda p: (p.copied, not p.decays)):
        held: list[tuple[int, int, int, int, bool]] = []  # rank, number of its group, rows from, to, partial
        for number, (_, _, group) in enumerate(groups):
            degree = len(group)
            partial_sum = is_partial(parameter, degree, plan.sequence_parallel)
            for index, rank in enumerate(group):
                if parameter.name in names[number][index]:
                    held.append((rank, number, *rows_of(parameter, index, degree), partial_sum))
        cuts = sorted({row for _, _, start, stop, _ in held for row in (start, stop)})
        for start, stop in pairwise(cuts):
            here = [entry for entry in held if entry[2] <= start and stop <= entry[3]]
            firsts = {number: rank for rank, number, *_ in reversed(here)}
            contributors = frozenset(rank for rank, number, *_, part in here if part or firsts[number] == rank)
            if here:
                pieces.append(Piece(parameter, start, stop, tuple(sorted(entry[0] for entry in here)), contributors))
    by_holders: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        by_holders.setdefault(piece.holders, []).append(piece)
    return tuple(
        Slice(holders, tuple(found), _shard_groups(plan, holders, [group for _, _, group in groups]))
        for holders, found in sorted(by_holders.items())
    )


def _shard_groups(plan: Plan, holders: tuple[int, ...], groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The holders of a slice by those among whom ZeRO divides it: of so many tensor-parallel groups that follow one another.

    All together where their number is no multiple: of positions, which no copy of a tied embedding has.
    """
    own = [tuple(rank for rank in holders if rank in group) for group in groups]
    own = [group for group in own if group]
    size = plan.shard_group
    if size is None or plan.zero_stage == 0 or len(own) % size:
        return (holders,)
    return tuple(tuple(sorted(rank for group in own[at : at + size] for rank in group)) for at in range(0, len(own), size))


def section_slices(
    plan: Plan, program: Program, ranks: Mapping[str, tuple[tuple[int, ...], ...]], lane: Lane, layers: LayerRange
) -> tuple[tuple[Slice, ...], bool]:
    """The slices of a section of a lane, and whether other lanes share it (then the program reduces it)."""
    members, shared = _members(program, lane, layers)
    return slices(plan, members, ranks, layers), shared


def _members(program: Program, lane: Lane, layers: LayerRange) -> tuple[list[Lane], bool]:
    """The lanes that share a section of a lane, and whether the program reduces it."""
    reduction = next((i for i in lane.instructions if isinstance(i, ReduceGradients) and i.layers == layers), None)
    return [lane] if reduction is None else [program.by_name[name] for name in program.members[reduction]], reduction is not None


def _sums(piece_slice: Slice, shared: bool) -> bool:
    """Whether there is anything to be summed over a slice's ranks."""
    return shared or any(len(piece.contributors) > 1 for piece in piece_slice.pieces)


def reduction_ranks(
    plan: Plan, program: Program, ranks: Mapping[str, tuple[tuple[int, ...], ...]]
) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The sets of ranks that sum, scatter or gather together, of all lanes; and those that sum shards which all of them have."""
    found: set[tuple[int, ...]] = set()
    equals: set[tuple[int, ...]] = set()
    seen: set[tuple[LayerRange, tuple[str, ...]]] = set()
    for lane in program.lanes:
        for layers in lane_sections(plan.transformer, lane):
            members, shared = _members(program, lane, layers)
            key = layers, tuple(member.name for member in members)
            if key in seen:  # all of them have the same slices
                continue
            seen.add(key)
            for one in slices(plan, members, ranks, layers):
                if shared and len(one.shard_groups) > 1:
                    found |= set(one.shard_groups)
                    equals |= set(one.equals)
                elif _sums(one, shared):
                    found.add(one.ranks)
    return found, equals


@dataclass(frozen=True)
class Run:
    """Numbers of a slice that lie side by side in a section: `size` of them, at `at` of the slice and `offset` of the section."""

    at: int
    offset: int
    size: int
    contributes: bool


def runs(section: Section, piece_slice: Slice, rank: int) -> tuple[Run, ...]:
    """Where the numbers of a slice lie in this rank's section."""
    found: list[Run] = []
    at = 0
    for piece in piece_slice.pieces:
        segment = section.segment_of[piece.parameter.name]
        offset = segment.offset + (piece.start - segment.start) * piece.parameter.row_size
        contributes = rank in piece.contributors
        last = found[-1] if found else None
        if last is not None and last.offset + last.size == offset and last.contributes == contributes:
            found[-1] = Run(last.at, last.offset, last.size + piece.size, contributes)
        elif piece.size:
            found.append(Run(at, offset, piece.size, contributes))
        at += piece.size
    return tuple(found)


# --- The numbers -----------------------------------------------------------------------------------------------------


def is_sharded(plan: Plan, lane: Lane, layers: LayerRange) -> bool:
    """Whether a lane has a section's parameters only while it uses them: of the layers it shares, under ZeRO 3."""
    shared = any(isinstance(i, ReduceGradients) and i.layers == layers for i in lane.instructions)
    return plan.zero_stage >= 3 and layers[0] < layers[1] and shared


class SliceGradient:
    """The gradient of one slice on one rank: `value` is, after `Gradients.finish`, what this rank's optimizer takes.

    All of the slice, or this rank's shard of it where it is scattered.
    """

    def __init__(self, section: Section, piece_slice: Slice, rank: int, shared: bool, scattered: bool) -> None:
        self.slice, self.section, self.shared = piece_slice, section, shared
        self.scattered = scattered
        self.runs = runs(section, piece_slice, rank)
        in_groups = scattered and len(piece_slice.shard_groups) > 1
        self.shard_group = next(group for group in piece_slice.shard_groups if rank in group) if in_groups else piece_slice.ranks
        """The ranks that the slice's states are divided over, or among which each answers for an equal part."""
        position = self.shard_group.index(rank)
        self.equals = piece_slice.equals[position] if in_groups else (rank,)
        """The ranks that have the same shard, this one among them."""
        shard = share(piece_slice.size, position, len(self.shard_group))
        self.share = shard if rank == self.equals[0] else (shard[0], shard[0])
        """The numbers that this rank answers for in the norm and the checkpoints."""
        self.own = shard if scattered else (0, piece_slice.size)
        """The numbers that this rank updates."""
        self.sums = _sums(piece_slice, shared)
        """Whether there is anything to be summed over the slice's ranks."""
        self.value: torch.Tensor | None = None

    @property
    def padded(self) -> int:
        """Numbers of the slice, filled up to equal shards."""
        return share(self.slice.size, 0, len(self.shard_group))[1] * len(self.shard_group)

    @property
    def whole(self) -> Run | None:
        """The run that is all of the slice, where it lies in one piece in the section."""
        return self.runs[0] if len(self.runs) == 1 and self.runs[0].contributes else None


class _SumOfShards:
    """The sum of a shard over those that have the same one, which goes on where its scatter has ended."""

    def __init__(self, scatter: Pending | None, whole: torch.Tensor, begun: Future[Pending] | Pending) -> None:
        self._scatter, self._begun = scatter, begun
        self.whole: torch.Tensor | None = whole
        """What is scattered, as long as it is."""

    def end_scatter(self) -> None:
        """Nothing; returns when no more than the shard is under way (on a GPU: for what is queued after it)."""
        if self._scatter is None:
            return  # the shard is the whole
        if isinstance(self._begun, Future):
            self._begun.result()  # the scatter is waited for by one thread alone: gloo copies its result each time
        elif self.whole is not None:
            self._scatter.wait()
        self.whole = None

    def wait(self) -> None:
        """Nothing; returns when the result may be used. Raises what went wrong."""
        work = self._begun.result() if isinstance(self._begun, Future) else self._begun
        work.wait()
        self.whole = None


@dataclass(frozen=True, eq=False)
class _Pending:
    """A sum under way: what it will add to, and whom to tell when it has ended."""

    gradient: SliceGradient
    work: Pending | None
    value: torch.Tensor
    done: Callable[[], None] | None
    waits: Callable[[], None]

    @property
    def is_whole(self) -> bool:
        """Whether more than a shard of the slice is under way."""
        return not isinstance(self.work, _SumOfShards) or self.work.whole is not None


class Gradients:
    """Accumulates the gradients of one worker's sections, and sums them over the devices that hold them.

    They are kept in the gradient precision in one flat tensor per section, which autograd adds to in place where the precisions
    are equal. Where gradients are scattered at every micro-batch (ZeRO 2), they exist only until then.
    """

    def __init__(self, world: World, sections: Mapping[LayerRange, Section], dtype: torch.dtype) -> None:
        plan = world.plan
        self._world, self._sections, self._dtype = world, sections, dtype
        self.slices: dict[LayerRange, tuple[SliceGradient, ...]] = {}
        self._flat: dict[LayerRange, torch.Tensor] = {}
        self._pending: list[_Pending] = []
        self._beside: torch.cuda.Stream | None = None
        self._turns: ThreadPoolExecutor | None = None
        self._views: dict[int, torch.Tensor] = {}
        for layers, section in sections.items():
            found, shared = section_slices(plan, world.program, world.ranks, world.lane, layers)
            mine = [s for s in found if world.rank in s.ranks]
            scattered = shared and plan.zero_stage >= 1
            self.slices[layers] = tuple(SliceGradient(section, s, world.rank, shared, scattered) for s in mine)
            # The ends stay whole under ZeRO 2, too, and are summed once.
            if not (shared and plan.zero_stage >= 2 and layers[0] < layers[1]):
                self._flat[layers] = self._zeros(layers)

    def _zeros(self, layers: LayerRange) -> torch.Tensor:
        """A section's gradient without numbers, with room behind it to fill up the last slice to equal shards."""
        room = max((len(gradient.shard_group) for gradient in self.slices[layers]), default=0)
        return torch.zeros(self._sections[layers].size + room, dtype=self._dtype, device=self._world.device)

    def attach(self) -> None:
        """Nothing; makes autograd accumulate here. Called once, when all parameters of the sections have been made."""
        for layers, section in self._sections.items():
            flat = self._flat.get(layers)
            for names, parameter in section.parameters.items():
                if flat is None:
                    continue
                start, stop = section.spans[names]
                view = flat[start:stop].view_as(parameter)
                if parameter.dtype == self._dtype:
                    parameter.grad = view
                else:
                    self._views[id(parameter)] = view
                    parameter.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]

    def _move(self, parameter: torch.Tensor) -> None:
        """Adds a gradient in the precision of training to the one that is kept."""
        if parameter.grad is None:  # torch tells of a matrix whose gradient was put off, too
            return
        self._views[id(parameter)].add_(parameter.grad)
        parameter.grad = None

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Nothing; adds a gradient that was computed outside of autograd, as autograd would."""
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        if id(parameter) in self._views:
            self._move(parameter)

    def _section_gradient(self, layers: LayerRange) -> torch.Tensor:
        """The gradient of a section, flat; one that lives for a micro-batch is taken out of the parameters."""
        flat = self._flat.get(layers)
        if flat is not None:
            return flat
        section = self._sections[layers]
        flat = self._zeros(layers)
        for names, parameter in section.parameters.items():
            if parameter.grad is not None:
                start, stop = section.spans[names]
                flat[start:stop].copy_(parameter.grad.flatten())
                parameter.grad = None
        return flat

    def num_bytes(self, layers: LayerRange) -> int:
        """The bytes of a section's gradients on this device."""
        return self._sections[layers].size * self._dtype.itemsize

    def reduce(self, layers: LayerRange, done: Callable[[], None], waits: Callable[[], None]) -> None:
        """Nothing; begins to sum a section over all lanes that hold it.

        `done` is called when that has ended, by any thread; `waits` when this one begins to wait for it.
        """
        flat = self._section_gradient(layers)
        found = self.slices[layers]
        last = next((gradient for gradient in reversed(found) if len(gradient.slice.ranks) > 1), None)
        for gradient in found:
            self._begin(gradient, flat, done if gradient is last else None, waits)
        if last is None:  # of divided experts that nobody else has
            done()
        if layers not in self._flat:
            # What is scattered is kept until it is: of no more than two sections, as the simulator's estimate has it.
            sections = list(dict.fromkeys(pending.gradient.section.layers for pending in self._pending if pending.is_whole))
            for oldest in sections[:-2]:
                self._free(lambda pending, oldest=oldest: pending.gradient.section.layers == oldest)  # type: ignore[misc]

    def _begin(
        self, gradient: SliceGradient, flat: torch.Tensor, done: Callable[[], None] | None, waits: Callable[[], None]
    ) -> None:
        # One sum of a slice at a time, so that no more than two vectors of it exist.
        self._free(lambda pending: pending.gradient is gradient)
        whole = vector = self._vector(gradient, flat, padded=gradient.scattered)
        ranks = gradient.shard_group
        work: Pending | None = None
        if len(ranks) > 1 and gradient.scattered:
            shard = vector.new_empty(gradient.padded // len(ranks))
            work = reduce_scatter(shard, vector, self._world.group(ranks))
            vector = shard
        elif len(ranks) > 1:
            work = all_reduce(vector, self._world.group(ranks))
        value = vector[: gradient.own[1] - gradient.own[0]]
        if len(gradient.equals) > 1:
            work = self._sum_of_shards(work, whole, value, gradient.equals, done)
        elif done is not None and work is not None:
            tell_when_done(work, done, vector)
        self._pending.append(_Pending(gradient, work, value, done, waits))

    def _sum_of_shards(
        self,
        scatter: Pending | None,
        whole: torch.Tensor,
        shard: torch.Tensor,
        equals: tuple[int, ...],
        done: Callable[[], None] | None,
    ) -> Pending:
        """The sum of a shard over those that have the same one, which follows its scatter and holds nobody up."""
        group = self._world.sums_group(equals)

        def begin() -> Pending:
            if scatter is not None:
                scatter.wait()
            work = all_reduce(shard, group)
            if done is not None:
                tell_when_done(work, done, shard)
            return work

        if shard.is_cuda and not is_staged(shard, group):
            if scatter is None:
                return begin()
            if self._beside is None:
                self._beside = torch.cuda.Stream(shard.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._beside):  # which waits for the scatter in the place of the computation
                return _SumOfShards(scatter, whole, begin())
        # All of them by one thread, so that those of one group are begun in one order on all ranks.
        if self._turns is None:
            self._turns = ThreadPoolExecutor(1)
        return _SumOfShards(scatter, whole, self._turns.submit(begin))

    def _vector(self, gradient: SliceGradient, flat: torch.Tensor, padded: bool) -> torch.Tensor:
        """The slice's numbers of this rank, zero where another rank of the lane answers for them."""
        size = gradient.padded if padded else gradient.slice.size
        whole = gradient.whole
        if whole is not None and whole.offset + size <= len(flat):
            # No copy: what fills the last shard up may be anything, for nobody takes it.
            return flat[whole.offset : whole.offset + size]
        vector = flat.new_zeros(size)
        for run in gradient.runs:
            if run.contributes:
                vector[run.at : run.at + run.size] = flat[run.offset : run.offset + run.size]
        return vector

    def _free(self, wanted: Callable[[_Pending], bool]) -> None:
        """Waits until of the sums of which `wanted` is true no more than shards are under way."""
        for pending in self._pending:
            if wanted(pending) and isinstance(pending.work, _SumOfShards):
                pending.waits()
                pending.work.end_scatter()
        self._settle(lambda pending: wanted(pending) and pending.is_whole)

    def _settle(self, wanted: Callable[[_Pending], bool]) -> None:
        """Waits for the sums of which `wanted` is true, and takes their values."""
        for pending in [pending for pending in self._pending if wanted(pending)]:
            if pending.work is not None:
                pending.waits()
                pending.work.wait()
            gradient = pending.gradient
            gradient.value = pending.value if gradient.value is None else gradient.value.add_(pending.value)
            if pending.done is not None:
                pending.done()
            self._pending.remove(pending)

    def finish(self) -> None:
        """Nothing; waits for the sums under way, and makes those that no other lane shares: every slice has its `value`."""
        self._settle(lambda pending: True)
        for layers, found in self.slices.items():
            for gradient in found:
                if gradient.shared:
                    continue
                vector = self._vector_of_own(gradient, self._section_gradient(layers))
                if gradient.sums:
                    all_reduce(vector, self._world.group(gradient.slice.ranks)).wait()
                gradient.value = vector

    def _vector_of_own(self, gradient: SliceGradient, flat: torch.Tensor) -> torch.Tensor:
        """As `_vector`; where nothing is summed, every rank takes its own copy."""
        if gradient.sums:
            return self._vector(gradient, flat, padded=False)
        if len(gradient.runs) == 1:
            run = gradient.runs[0]
            return flat[run.offset : run.offset + run.size]
        return torch.cat([flat[run.offset : run.offset + run.size] for run in gradient.runs]) if gradient.runs else flat[:0]

    def clear(self) -> None:
        """Nothing; forgets the gradients of the iteration."""
        for flat in self._flat.values():
            flat.zero_()
        for found in self.slices.values():
            for gradient in found:
                gradient.value = None
