"""The program: one instruction stream per lane, what each instruction waits for, and a text form that round-trips.

A lane is one replica of one stage of one pipeline, a tensor-parallel group. It executes its instructions in order. Sends,
gradient reductions and parameter gathers go on beside what follows them; every other instruction ends before the next
begins. The simulator and the torch runtime interpret the same programs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from sim.spec.plan import LayerRange, tensor_groups
from sim.spec.reading import InputError

FORMAT = "motley-program/1"

Sequences = tuple[int, int]
"""`(start, stop)`, a share of every micro-batch's sequences."""


# --- Instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """Roughly: `activation[micro_batch] = layers(activation[micro_batch])`, keeping what the backward needs.

    Where sequences come in slices, `micro_batch` counts slices, here and in all that follows: slice i of micro-batch m is number
    `m * sequence_slices + i`, and attends to the keys and values of those before it, too.
    """

    micro_batch: int
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Backward:
    """Both halves of the backward at once: the gradient of the input, and the weights' gradients accumulated."""

    micro_batch: int
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The gradient of the layers' input alone; includes the recomputation, where there is one."""

    micro_batch: int
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The weights' gradients alone, after the BackwardInput of the same micro-batch."""

    micro_batch: int
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Sends the activation that enters `layer`, of some sequences of a micro-batch, to the peer lane; does not block."""

    micro_batch: int
    layer: int
    peer: str
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class RecvActivation:
    """Waits for the activation that enters `layer`, of some sequences of a micro-batch, from the peer lane."""

    micro_batch: int
    layer: int
    peer: str
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Sends the gradient of the activation that enters `layer` back to the lane it came from; does not block."""

    micro_batch: int
    layer: int
    peer: str
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class RecvGradient:
    """Waits for the gradient of the activation that this lane sent."""

    micro_batch: int
    layer: int
    peer: str
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Sums the gradients of some layers over every lane that holds them (scattered, under ZeRO); does not block.

    `(0, 0)` stands for the embedding, `(n, n)` for the head of a model of n layers. `micro_batch` is None where the
    gradients of all micro-batches are reduced at once. It starts when every lane with an equal instruction has come to it.
    """

    layers: LayerRange
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Gathers the parameters of some layers from the lanes that hold shards of them; does not block.

    After the optimizer step (`micro_batch` None), or, under ZeRO 3, before the forward or backward of a micro-batch.
    """

    layers: LayerRange
    micro_batch: int | None = None
    backward: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Updates the parameters from the reduced gradients (its shard of them, under ZeRO)."""


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Send: TypeAlias = SendActivation | SendGradient
Recv: TypeAlias = RecvActivation | RecvGradient
Collective: TypeAlias = ReduceGradients | GatherParameters
Instruction: TypeAlias = Compute | Send | Recv | Collective | OptimizerStep

INSTRUCTIONS: tuple[type[Instruction], ...] = (
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
    SendActivation,
    RecvActivation,
    SendGradient,
    RecvGradient,
    ReduceGradients,
    GatherParameters,
    OptimizerStep,
)
"""Every instruction type; an interpreter covers all of them."""


WorkKey: TypeAlias = tuple[type[Instruction], LayerRange | None, int]
"""A type of instruction, its layers, and its slice of the sequences."""


def work_key(instruction: Compute | OptimizerStep, sequence_slices: int) -> WorkKey:
    """What decides the work of a compute instruction in its lane: all micro-batches take the same, but not their slices."""
    if isinstance(instruction, OptimizerStep):
        return OptimizerStep, None, 0
    place = instruction.micro_batch % sequence_slices if sequence_slices > 1 else 0
    return instruction.__class__, instruction.layers, place


# --- Lanes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """What crosses from lane to lane at one layer boundary: some sequences of every micro-batch."""

    layer: int
    peer: str
    sequences: Sequences


@dataclass(frozen=True)
class Lane:
    """One tensor-parallel group with its layers, its share of each micro-batch, its neighbours and its instructions.

    With context parallelism it is as many such groups, one after another in `devices`, each with its part of every sequence.
    `buckets` are the layer ranges, in layer order, in which gradients are reduced. `split` says what is emitted bucket by
    bucket: "none", "last" (the backward of the last micro-batch, so that reductions overlap it), "backward" (every backward,
    under ZeRO 2) or "all" (every forward, too, under ZeRO 3).
    """

    name: str
    pipeline: int
    stage: int
    replica: int
    devices: tuple[str, ...]
    layers: tuple[LayerRange, ...]
    sequences: Sequences
    micro_batches: int
    embedding: bool
    head: bool
    previous: tuple[Edge, ...] = ()
    next: tuple[Edge, ...] = ()
    buckets: tuple[LayerRange, ...] = ()
    split: str = "none"
    context_parallel: int = 1
    sequence_slices: int = 1
    instructions: tuple[Instruction, ...] = field(default=(), repr=False)

    @property
    def tensor_parallel(self) -> int:
        """How many devices share each layer."""
        return len(self.devices) // self.context_parallel

    @property
    def tensor_groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each context rank, which share each layer; every one of these groups has the whole layers."""
        return tensor_groups(self.devices, self.context_parallel)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether its backwards come in input and weight halves."""
        return any(isinstance(instruction, BackwardInput) for instruction in self.instructions)

    @property
    def last_backward(self) -> int:
        """The micro-batch, or the slice of one, whose backward is the last: after it gradients are complete."""
        return (self.micro_batches - 1) * self.sequence_slices

    def slice_of(self, micro_batch: int) -> int:
        """The place in its sequences of the slice with this number; 0 where sequences are not cut."""
        return micro_batch % self.sequence_slices if self.sequence_slices > 1 else 0

    def parts(self, layers: LayerRange, micro_batch: int, backward: bool) -> tuple[LayerRange, ...]:
        """The ranges, in layer order, that one chunk's forward or backward of a micro-batch is emitted in."""
        divided = self.split == "all" or (
            backward and (self.split == "backward" or (self.split == "last" and micro_batch == self.last_backward))
        )
        if not divided:
            return (layers,)
        inside = tuple(b for b in self.buckets if layers[0] <= b[0] and b[1] <= layers[1])
        return inside or (layers,)

    def gathers(self, part: LayerRange) -> bool:
        """Whether a part's parameters are gathered before it works: under ZeRO 3; ends without layers stay whole."""
        return self.split == "all" and part[0] < part[1]

    def chunk(self, part: LayerRange) -> LayerRange:
        """The lane's layer range that a part is of."""
        return part if part in self.layers else next(r for r in self.layers if r[0] <= part[0] and part[1] <= r[1])

    def before(self, part: LayerRange, micro_batch: int, backward: bool) -> LayerRange | None:
        """The part of the lane that ends where this one begins, in the forward or backward of a micro-batch, if there is one."""
        return self._beside(part, micro_batch, backward, -1)

    def after(self, part: LayerRange, micro_batch: int, backward: bool) -> LayerRange | None:
        """The part of the lane that begins where this one ends, in the forward or backward of a micro-batch, if there is one."""
        return self._beside(part, micro_batch, backward, 1)

    def _beside(self, part: LayerRange, micro_batch: int, backward: bool, step: int) -> LayerRange | None:
        chunk = self.chunk(part)
        parts = self.parts(chunk, micro_batch, backward)
        at = parts.index(part) + step
        if 0 <= at < len(parts):
            return parts[at]
        end = chunk[0] if step < 0 else chunk[1]
        neighbour = next((r for r in self.layers if r != chunk and end == (r[1] if step < 0 else r[0])), None)
        return None if neighbour is None else self.parts(neighbour, micro_batch, backward)[min(step, 0)]


@dataclass(frozen=True)
class Program:
    """The lanes of a plan, in pipeline, stage and replica order."""

    lanes: tuple[Lane, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Lane]:
        """The lanes by their names."""
        return {lane.name: lane for lane in self.lanes}

    @cached_property
    def members(self) -> Mapping[Collective, tuple[str, ...]]:
        """The lanes that take part in each collective instruction, in lane order."""
        members: dict[Collective, list[str]] = {}
        for lane in self.lanes:
            for instruction in lane.instructions:
                if isinstance(instruction, (ReduceGradients, GatherParameters)):
                    members.setdefault(instruction, []).append(lane.name)
        return {instruction: tuple(lanes) for instruction, lanes in members.items()}

    @property
    def instruction_count(self) -> int:
        """How many instructions all lanes have."""
        return sum(len(lane.instructions) for lane in self.lanes)


# --- The dependency rule ---------------------------------------------------------------------------------------------


def matching_send(receiver: str, instruction: Recv) -> tuple[str, Send]:
    """The lane and its instruction that send what a lane's instruction receives."""
    kind = SendActivation if isinstance(instruction, RecvActivation) else SendGradient
    return instruction.peer, kind(instruction.micro_batch, instruction.layer, receiver, instruction.sequences)


def dependencies(lane: Lane, instruction: Instruction) -> list[tuple[str, Instruction]]:
    """What must have ended before an instruction of this lane can begin, as (lane name, instruction).

    The one rule for the compiler's checks, both interpreters and the plots. It leaves out the lane's own order (see the
    head of this file) and that a collective waits for all its members.
    """
    here = lane.name
    match instruction:
        case Forward(m, (start, _) as part):
            found: list[tuple[str, Instruction]] = []
            earlier = lane.before(part, m, backward=False)
            if earlier is None:
                found += [(here, RecvActivation(m, e.layer, e.peer, e.sequences)) for e in lane.previous if e.layer == start]
            else:
                found.append((here, Forward(m, earlier)))
            if lane.gathers(part):
                found.append((here, GatherParameters(part, m)))
            if lane.slice_of(m):  # it attends to the slice before it
                found.append((here, Forward(m - 1, part)))
            return found
        case Backward(m, (_, stop) as part) | BackwardInput(m, (_, stop) as part):
            found = [(here, Forward(m, lane.parts(lane.chunk(part), m, backward=False)[-1]))]
            later = lane.after(part, m, backward=True)
            if later is None:
                found += [(here, RecvGradient(m, e.layer, e.peer, e.sequences)) for e in lane.next if e.layer == stop]
            else:
                found.append((here, type(instruction)(m, later)))
            if lane.gathers(part):
                found.append((here, GatherParameters(part, m, backward=True)))
            if lane.slice_of(m) < lane.sequence_slices - 1:  # which attends to it
                found.append((here, type(instruction)(m + 1, lane.parts(lane.chunk(part), m + 1, backward=True)[0])))
            return found
        case BackwardWeight(m, layers):
            return [(here, BackwardInput(m, layers))]
        case SendActivation(m, layer):
            chunk = next(r for r in lane.layers if r[1] == layer)
            return [(here, Forward(m, lane.parts(chunk, m, backward=False)[-1]))]
        case SendGradient(m, layer):
            chunk = next(r for r in lane.layers if r[0] == layer)
            return [(here, _input_gradient(lane, m, lane.parts(chunk, m, backward=True)[0]))]
        case RecvActivation() | RecvGradient():
            return [matching_send(here, instruction)]
        case ReduceGradients((start, stop), m):
            last = lane.last_backward if m is None else m
            if start < stop:
                parts = lane.parts(lane.chunk((start, stop)), last, backward=True)
                part = next(r for r in parts if r[0] <= start and stop <= r[1])
            else:
                part = lane.parts(lane.layers[0], last, True)[0] if start == 0 else lane.parts(lane.layers[-1], last, True)[-1]
            return [(here, _weight_gradient(lane, last, part))]
        case OptimizerStep():
            reduced: list[tuple[str, Instruction]] = [(here, i) for i in lane.instructions if isinstance(i, ReduceGradients)]
            return reduced or [
                (here, _weight_gradient(lane, lane.last_backward, lane.parts(r, lane.last_backward, True)[0]))
                for r in lane.layers
            ]
        case GatherParameters(_, m):
            return [(here, OptimizerStep())] if m is None else []
    raise TypeError(f"no dependency rule for {instruction!r}")


def _input_gradient(lane: Lane, micro_batch: int, layers: LayerRange) -> Instruction:
    """The instruction that gives the gradient of these layers' input."""
    return BackwardInput(micro_batch, layers) if lane.splits_backward else Backward(micro_batch, layers)


def _weight_gradient(lane: Lane, micro_batch: int, layers: LayerRange) -> Instruction:
    """The instruction that gives the gradients of these layers' weights."""
    return BackwardWeight(micro_batch, layers) if lane.splits_backward else Backward(micro_batch, layers)


# --- Text ------------------------------------------------------------------------------------------------------------

_COMPUTE: dict[type[Instruction], str] = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
_MOVE: dict[type[Instruction], str] = {
    SendActivation: "SA",
    RecvActivation: "RA",
    SendGradient: "SG",
    RecvGradient: "RG",
}
_LETTERS: dict[str, Any] = {letters: kind for kind, letters in (_COMPUTE | _MOVE).items()}
_TEXT = re.compile(
    r"(?P<compute>[FBIW])(?P<cm>\d+)\[(?P<ca>\d+):(?P<cb>\d+)\]"
    r"|(?P<move>SA|RA|SG|RG)(?P<mm>\d+)@(?P<layer>\d+)(?P<arrow>[<>])(?P<peer>[^\s\[]+)\[(?P<ma>\d+):(?P<mb>\d+)\]"
    r"|R(?P<rm>\d*)\[(?P<ra>\d+):(?P<rb>\d+)\]"
    r"|G(?:(?P<gp>[FB])(?P<gm>\d+))?\[(?P<ga>\d+):(?P<gb>\d+)\]"
    r"|(?P<step>STEP)"
)


def instruction_text(instruction: Instruction) -> str:
    """The text of one instruction, such as `F3[0:8]`, `SA3@8>p0s1[0:1]`, `R[0:8]` or `STEP`. `parse_instruction` reads it."""
    match instruction:
        case Forward(m, (a, b)) | Backward(m, (a, b)) | BackwardInput(m, (a, b)) | BackwardWeight(m, (a, b)):
            return f"{_COMPUTE[type(instruction)]}{m}[{a}:{b}]"
        case SendActivation(m, layer, peer, (a, b)) | SendGradient(m, layer, peer, (a, b)):
            return f"{_MOVE[type(instruction)]}{m}@{layer}>{peer}[{a}:{b}]"
        case RecvActivation(m, layer, peer, (a, b)) | RecvGradient(m, layer, peer, (a, b)):
            return f"{_MOVE[type(instruction)]}{m}@{layer}<{peer}[{a}:{b}]"
        case ReduceGradients((a, b), micro_batch):
            return f"R{'' if micro_batch is None else micro_batch}[{a}:{b}]"
        case GatherParameters((a, b), micro_batch, backward):
            return f"G{'' if micro_batch is None else 'FB'[backward] + str(micro_batch)}[{a}:{b}]"
        case OptimizerStep():
            return "STEP"
    raise TypeError(f"no text form for {instruction!r}")


def parse_instruction(text: str) -> Instruction:
    """The instruction that `instruction_text` wrote. Raises InputError for any other text."""
    found = _TEXT.fullmatch(text)
    if found is None or (found["move"] and found["arrow"] != "><"[found["move"][0] == "R"]):
        raise InputError(f"{text!r} is no instruction; expected a text such as F3[0:8], SA3@8>p0s1[0:1], R[0:8] or STEP")
    if found["compute"]:
        computed: Compute = _LETTERS[found["compute"]](int(found["cm"]), (int(found["ca"]), int(found["cb"])))
        return computed
    if found["move"]:
        share = (int(found["ma"]), int(found["mb"]))
        moved: Send | Recv = _LETTERS[found["move"]](int(found["mm"]), int(found["layer"]), found["peer"], share)
        return moved
    if found["step"]:
        return OptimizerStep()
    if found["ra"]:
        return ReduceGradients((int(found["ra"]), int(found["rb"])), int(found["rm"]) if found["rm"] else None)
    micro_batch = int(found["gm"]) if found["gm"] else None
    return GatherParameters((int(found["ga"]), int(found["gb"])), micro_batch, found["gp"] == "B")


def _ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{a}:{b}" for a, b in ranges) or "-"


def _edges_text(edges: Iterable[Edge]) -> str:
    return ",".join(f"{e.peer}@{e.layer}[{e.sequences[0]}:{e.sequences[1]}]" for e in edges) or "-"


def program_text(program: Program) -> str:
    """The text of a program: a line of facts per lane, then its instructions, one a line. `parse_program` reads it."""
    lines = [FORMAT]
    for lane in program.lanes:
        ends = ",".join(end for end in ("embedding", "head") if getattr(lane, end)) or "-"
        lines.append(
            f"lane {lane.name} pipeline={lane.pipeline} stage={lane.stage} replica={lane.replica} "
            f"devices={','.join(lane.devices)} layers={_ranges_text(lane.layers)} sequences={_ranges_text([lane.sequences])} "
            f"micro_batches={lane.micro_batches} ends={ends} previous={_edges_text(lane.previous)} next={_edges_text(lane.next)} "
            f"buckets={_ranges_text(lane.buckets)} split={lane.split}"
            + (f" context={lane.context_parallel}" if lane.context_parallel > 1 else "")
            + (f" slices={lane.sequence_slices}" if lane.sequence_slices > 1 else "")
        )
        lines += [f"  {instruction_text(instruction)}" for instruction in lane.instructions]
    return "\n".join(lines) + "\n"


def _parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    if text == "-":
        return ()
    return tuple((int(a), int(b)) for a, b in (part.split(":") for part in text.split(",")))


def _parse_edges(text: str) -> tuple[Edge, ...]:
    if text == "-":
        return ()
    found = re.findall(r"([^,\s\[]+)@(\d+)\[(\d+):(\d+)\]", text)
    edges = tuple(Edge(int(layer), peer, (int(a), int(b))) for peer, layer, a, b in found)
    if _edges_text(edges) != text:
        raise ValueError
    return edges


def parse_program(text: str, where: str = "program") -> Program:
    """The program that `program_text` wrote. Raises InputError with the line number for any other text."""
    lines = text.splitlines()
    if not lines or lines[0] != FORMAT:
        raise InputError(f"{where}, line 1: expected {FORMAT!r}, but got {lines[0] if lines else 'nothing'!r}")
    lanes: list[Lane] = []
    instructions: list[Instruction] = []

    def finish() -> None:
        if lanes:
            lanes[-1] = replace(lanes[-1], instructions=tuple(instructions))
        instructions.clear()

    for number, line in enumerate(lines[1:], start=2):
        try:
            if line.startswith("lane "):
                finish()
                _, name, *pairs = line.split()
                facts = dict(pair.split("=", 1) for pair in pairs)
                ends = facts["ends"].split(",")
                lane = Lane(
                    name=name,
                    pipeline=int(facts["pipeline"]),
                    stage=int(facts["stage"]),
                    replica=int(facts["replica"]),
                    devices=tuple(facts["devices"].split(",")),
                    layers=_parse_ranges(facts["layers"]),
                    sequences=_parse_ranges(facts["sequences"])[0],
                    micro_batches=int(facts["micro_batches"]),
                    embedding="embedding" in ends,
                    head="head" in ends,
                    previous=_parse_edges(facts["previous"]),
                    next=_parse_edges(facts["next"]),
                    buckets=_parse_ranges(facts["buckets"]),
                    split=facts["split"],
                    context_parallel=int(facts.get("context", "1")),
                    sequence_slices=int(facts.get("slices", "1")),
                )
                lanes.append(lane)
            elif lanes:
                instructions.append(parse_instruction(line.strip()))
            else:
                raise InputError("expected a line that begins with 'lane'")
        except InputError as error:
            raise InputError(f"{where}, line {number}: {error}") from None
        except (KeyError, ValueError, IndexError):
            raise InputError(f"{where}, line {number}: {line[:80]!r} is not the line of a lane") from None
    finish()
    return Program(tuple(lanes))


# --- The dry run -----------------------------------------------------------------------------------------------------


def dry_run(program: Program) -> None:
    """Nothing, where every instruction of the program can be executed; no clock, only the dependency rule.

    Raises InputError for a send without its receive (or the reverse), and for a deadlock, with the grid of where each lane
    stands and what it waits for.
    """
    _check_peers(program)
    done: set[tuple[str, Instruction]] = set()
    position = {lane.name: 0 for lane in program.lanes}
    streams: dict[str, deque[Collective]] = {lane.name: deque() for lane in program.lanes}
    waiting: dict[tuple[str, Instruction], list[Lane]] = {}
    ready = list(program.lanes)

    def finish(key: tuple[str, Instruction]) -> None:
        done.add(key)
        ready.extend(waiting.pop(key, ()))

    def join(lane: Lane, collective: Collective) -> None:
        """A lane's collectives follow one another; each takes place when it is the next one of all its members."""
        streams[lane.name].append(collective)
        following = [collective]
        while following:
            collective = following.pop()
            members = program.members[collective]
            if all(streams[name] and streams[name][0] == collective for name in members):
                for name in members:
                    streams[name].popleft()
                    finish((name, collective))
                following.extend(streams[name][0] for name in members if streams[name])

    while ready:
        lane = ready.pop()
        while position[lane.name] < len(lane.instructions):
            instruction = lane.instructions[position[lane.name]]
            missing = next((key for key in dependencies(lane, instruction) if key not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(lane)
                break
            position[lane.name] += 1
            if isinstance(instruction, (ReduceGradients, GatherParameters)):
                join(lane, instruction)
            else:
                finish((lane.name, instruction))
    crossed = next(((name, stream[0]) for name, stream in streams.items() if stream), None)
    stuck = [lane for lane in program.lanes if position[lane.name] < len(lane.instructions)]
    if stuck:
        raise InputError(_deadlock_text(program, position, done, stuck))
    if crossed is not None:
        name, collective = crossed
        raise InputError(
            f"deadlock: the collective {instruction_text(collective)} of lane {name} crosses others and never starts"
        )


def _check_peers(program: Program) -> None:
    """Raises InputError for a send that has no receive, or the reverse, and for an instruction that stands twice."""
    everything = {(lane.name, i) for lane in program.lanes for i in lane.instructions}
    if len(everything) != program.instruction_count:
        for lane in program.lanes:
            twice = next((i for i in lane.instructions if lane.instructions.count(i) > 1), None)
            if twice is not None:
                raise InputError(f"lane {lane.name} has the instruction {instruction_text(twice)} twice")
    partner: Mapping[type[Instruction], Any] = {
        SendActivation: RecvActivation,
        RecvActivation: SendActivation,
        SendGradient: RecvGradient,
        RecvGradient: SendGradient,
    }
    for lane in program.lanes:
        for i in lane.instructions:
            if isinstance(i, (SendActivation, SendGradient, RecvActivation, RecvGradient)):
                other = partner[type(i)](i.micro_batch, i.layer, lane.name, i.sequences)
                if (i.peer, other) not in everything:
                    raise InputError(
                        f"lane {lane.name} has {instruction_text(i)}, but lane {i.peer} has no {instruction_text(other)}"
                    )


def _deadlock_text(program: Program, position: Mapping[str, int], done: set[tuple[str, Instruction]], stuck: list[Lane]) -> str:
    """The grid of a deadlock: each lane's last and next instructions, and what the next one waits for."""
    lines = [f"deadlock: {len(stuck)} of {len(program.lanes)} lanes cannot go on"]
    width = max(len(lane.name) for lane in program.lanes)
    for lane in program.lanes:
        at = position[lane.name]
        before = " ".join(instruction_text(i) for i in lane.instructions[max(0, at - 3) : at])
        if at == len(lane.instructions):
            lines.append(f"  {lane.name:<{width}}  {before}  ended")
            continue
        missing = [
            f"{name} {instruction_text(i)}" for name, i in dependencies(lane, lane.instructions[at]) if (name, i) not in done
        ]
        needs = ", ".join(missing[:4])
        lines.append(f"  {lane.name:<{width}}  {before}  {instruction_text(lane.instructions[at])} <-- here, waits for {needs}")
    return "\n".join(lines)
