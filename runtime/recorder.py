"""What one worker did when, the clocks of all workers aligned, and the measured trace of one step."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from runtime.peak import hardware_name
from sim.spec.plan import Plan
from sim.spec.program import Collective, Instruction, Lane, Program, Recv, Send, matching_send
from sim.spec.trace import ACTIVITIES, BUSY, Span, Trace
from sim.spec.version import VERSION

Mark: TypeAlias = float | torch.cuda.Event
"""A moment: seconds of the worker's clock, or an event that the GPU passes when it has done what was queued before."""

RecordedSpan: TypeAlias = tuple[Instruction, float, float, int]
"""`(instruction, start_s, end_s, num_bytes)`."""

WARM_UP = 3
"""Steps that a run's typical time leaves out: the first ones load libraries, choose kernels and fill caches."""


# --- One worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """What was recorded of one step, in flat lists: they leave Python's garbage collector nothing to look through."""

    reference: tuple[torch.cuda.Event, float] | None
    """An event and the clock's seconds when the GPU had passed it; None on a CPU."""
    foreground: list[Any]
    """Of each span the instruction, its begin, its end and its bytes."""
    begun: list[Any]
    """Of each background span the handle, the instruction, its begin and its bytes."""
    ended: list[Any]
    """Of each end of a background span the handle and the mark."""
    closed: Mark


class Recorder:
    """The spans of a worker's last `keep_steps` steps, at a cost of a few hundred ns each.

    Marks are only noted while a step runs; what they mean is found when `spans` asks. On CUDA the marks are events,
    taken from a pool, so that a span is the time in which the GPU worked and nobody waits for it. All methods are for the
    thread that made the recorder, but for `finished`.
    """

    def __init__(self, device: torch.device, keep_steps: int = 32, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.keep_steps = device, keep_steps
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._now: Callable[[], Mark] = self._event if self._cuda else clock
        self._thread = threading.get_ident()
        self._pool: list[torch.cuda.Event] = []
        self._kept: dict[int, _Step] = {}
        self._handle = 0
        self._step: int | None = None
        self._reference: tuple[torch.cuda.Event, float] | None = None
        self._clear()

    def _clear(self) -> None:
        """Makes room for the marks of a step."""
        self._foreground: list[Any] = []
        self._begun: list[Any] = []
        self._ended: list[Any] = []

    def _event(self) -> torch.cuda.Event:
        """An event of the pool, recorded on the current stream."""
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start_step(self, step: int) -> None:
        """Nothing; opens a step. On CUDA it waits for the GPU, to read the clock and the GPU's time at one moment."""
        self._clear()
        self._step = step
        if self._cuda:
            event = self._event()
            event.synchronize()
            self._reference = (event, self._clock())

    def begin(self) -> Mark:
        """The present moment, for `end`."""
        return self._now()

    def end(self, instruction: Instruction, begin: Mark, num_bytes: int = 0) -> None:
        """Nothing; records a foreground span that ends now."""
        self._foreground.extend((instruction, begin, self._now(), num_bytes))

    def started(self, instruction: Instruction, num_bytes: int = 0) -> int:
        """The handle of a background span, of a send or a collective, that begins now."""
        self._handle += 1
        self._begun.extend((self._handle, instruction, self._now(), num_bytes))
        return self._handle

    def finished(self, handle: int) -> None:
        """Nothing; ends a background span now, unless it or its step has ended already.

        Any thread may call it: to extend a list needs no lock. Another thread than the recorder's is told by the host
        that bytes have come, so it reads the host's clock, on CUDA too; an event of its own would wait for unrelated work.
        """
        mark = self._now() if threading.get_ident() == self._thread else self._clock()
        self._ended.extend((handle, mark))

    def finish_step(self) -> None:
        """Nothing; closes the step. Background spans that have not ended end now. Forgets the oldest step beyond those kept."""
        if self._step is None:
            raise RuntimeError("a step must be started before it is finished")
        self._kept.pop(self._step, None)
        self._kept[self._step] = _Step(self._reference, self._foreground, self._begun, self._ended, self._now())
        self._step = None
        self._clear()
        if len(self._kept) > self.keep_steps:
            self._recycle(self._kept.pop(next(iter(self._kept))))

    def _recycle(self, step: _Step) -> None:
        """Gives a forgotten step's events back to the pool."""
        marks = [*step.foreground[1::4], *step.foreground[2::4], *step.begun[2::4], *step.ended[1::2], step.closed]
        if step.reference is not None:
            self._pool.append(step.reference[0])
            self._pool.extend(mark for mark in marks if not isinstance(mark, float))

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the kept steps, the oldest first."""
        return tuple(self._kept)

    def spans(self, step: int) -> list[RecordedSpan]:
        """The spans of a kept step in seconds of this worker's clock: foreground as they ended, then background as they began.

        On CUDA it waits for the GPU to pass the step's events. Raises KeyError for a step that is not kept.
        """
        kept = self._kept[step]

        def seconds(mark: Mark) -> float:
            if isinstance(mark, float):
                return mark
            assert kept.reference is not None
            event, reference_s = kept.reference
            mark.synchronize()
            return reference_s + float(event.elapsed_time(mark)) * 1e-3

        ends: dict[int, Mark] = {}
        for handle, mark in _rows(kept.ended, 2):
            ends.setdefault(handle, mark)
        spans: list[RecordedSpan] = []
        for instruction, begin, end, num_bytes in _rows(kept.foreground, 4):
            spans.append((instruction, seconds(begin), seconds(end), num_bytes))
        for handle, instruction, begin, num_bytes in _rows(kept.begun, 4):
            start_s = seconds(begin)
            # The host may be told of an end by its own clock, a hair before the GPU's clock says that it began.
            spans.append((instruction, start_s, max(start_s, seconds(ends.get(handle, kept.closed))), num_bytes))
        return spans


def _rows(flat: list[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """A flat list's rows of this width."""
    return zip(*[iter(flat)] * width, strict=True)


# --- All workers' clocks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockSample:
    """How a worker's clock stood against that of the group's first, at one moment."""

    local_s: float
    """The moment, by the worker's clock."""
    offset_s: float
    """The first worker's clock less this worker's."""
    residual_s: float
    """How wrong the offset may be at most: half of the message's way there and back."""


@dataclass(frozen=True)
class Clocks:
    """A worker's clock aligned to that of the group's first, by samples from the start and the end of a run.

    Between the samples the offset is taken to change evenly, for clocks drift; it is then no more wrong than the worse sample.
    """

    first: ClockSample
    last: ClockSample

    @property
    def residual_s(self) -> float:
        """How wrong an aligned time between the samples may be."""
        return max(self.first.residual_s, self.last.residual_s)

    def align(self, time_s: float) -> float:
        """The first worker's seconds at a moment of this worker's clock."""
        elapsed_s = self.last.local_s - self.first.local_s
        drift = (self.last.offset_s - self.first.offset_s) / elapsed_s if elapsed_s > 0 else 0.0
        return time_s + self.first.offset_s + drift * (time_s - self.first.local_s)


def measure_offsets(
    process_group: dist.ProcessGroup | None, rounds: int = 20, clock: Callable[[], float] = time.perf_counter
) -> ClockSample:
    """This worker's clock against that of the group's first, found by ping-pong. All of a gloo group call it together.

    The group is None where there is only one worker. The first answers one worker after the other with its time. That time
    lies between the asking and the answer, so that the offset is known up to half of what passes between; the quickest of the
    rounds is taken (Cristian, 1989).
    """
    if process_group is None:
        return ClockSample(clock(), 0.0, 0.0)
    message = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank(process_group) == 0:
        for peer in range(1, dist.get_world_size(process_group)):
            for _ in range(rounds):
                dist.recv(message, group=process_group, group_src=peer)
                message[0] = clock()
                dist.send(message, group=process_group, group_dst=peer)
        return ClockSample(clock(), 0.0, 0.0)
    samples = []
    for _ in range(rounds):
        asked_s = clock()
        dist.send(message, group=process_group, group_dst=0)
        dist.recv(message, group=process_group, group_src=0)
        answered_s = clock()
        middle_s = (asked_s + answered_s) / 2
        samples.append(ClockSample(middle_s, float(message) - middle_s, (answered_s - asked_s) / 2))
    return min(samples, key=lambda sample: sample.residual_s)


# --- The trace -------------------------------------------------------------------------------------------------------


def choose_step(step_s: Sequence[float], warm_up: int = WARM_UP) -> int:
    """The index of the step that stands for all: of the (lower) median time after the warm-up, the earliest of equals.

    The first `warm_up` steps are left out, at most half of them. Raises ValueError where there is none.
    """
    if not step_s:
        raise ValueError("a step is chosen among at least one, but got none")
    left_out = min(warm_up, len(step_s) // 2)
    by_time = sorted(range(left_out, len(step_s)), key=lambda i: step_s[i])
    median_s = step_s[by_time[(len(by_time) - 1) // 2]]
    return next(i for i in by_time if step_s[i] == median_s)


def gather_trace(
    recorder: Recorder,
    clocks: Clocks,
    *,
    plan: Plan,
    program: Program,
    lane: Lane,
    is_first_of_lane: bool,
    cluster_name: str,
    device_name: str,
    step: int,
    peak_bytes: int,
    process_group: dist.ProcessGroup | None,
    origin: str = "measured",
) -> Trace | None:
    """The measured trace of one step on the group's first worker, None on the others. All of a gloo group call it together.

    The group is None where there is only one worker. The step is the one that the first worker gives, for others may have
    measured other times and chosen another. A lane's spans are those of its first device. Time 0 is the earliest start.
    `device_name` is this worker's device in the plan, `peak_bytes` its peak. Raises KeyError where the recorder has not kept
    the step.
    """
    if process_group is not None:
        chosen = torch.tensor([step])
        dist.broadcast(chosen, group=process_group, group_src=0)
        step = int(chosen)
    spans = [
        (instruction, clocks.align(start_s), clocks.align(end_s), num_bytes)
        for instruction, start_s, end_s, num_bytes in (recorder.spans(step) if is_first_of_lane else ())
    ]
    own = Share(lane.name, spans, device_name, peak_bytes, hardware_name(recorder.device), clocks.residual_s)
    if process_group is None:
        return merged([own], plan, program, cluster_name, origin)
    is_first = dist.get_rank(process_group) == 0
    shares: list[Share | None] | None = [None] * dist.get_world_size(process_group) if is_first else None
    dist.gather_object(own, shares, group=process_group, group_dst=0)
    if shares is None:
        return None
    return merged([share for share in shares if share is not None], plan, program, cluster_name, origin)


@dataclass(frozen=True)
class Share:
    """What one worker gives to a trace; its spans are aligned, and none where it is not the first of its lane."""

    lane: str
    spans: list[RecordedSpan]
    device: str
    peak_bytes: int
    hardware: str
    residual_s: float


def merged(shares: Sequence[Share], plan: Plan, program: Program, cluster_name: str, origin: str = "measured") -> Trace:
    """The trace of all workers' shares; `origin` is measured or paced.

    A sender is told that a message is gone, or learns that it has come only when it asks; the receiver knows when it had it.
    So a send ends where its receive does, if that is earlier than the sender's own record. A collective begins when the last of
    its lanes has come to it, as in the simulator: before, nothing moves.
    """
    by_lane = {share.lane: share.spans for share in shares if share.spans}
    came_s = {
        matching_send(name, instruction): end_s
        for name, spans in by_lane.items()
        for instruction, _, end_s, _ in spans
        if isinstance(instruction, Recv)
    }
    joined_s: dict[Instruction, float] = {}
    for spans in by_lane.values():
        for instruction, start_s, _, _ in spans:
            if isinstance(instruction, Collective):
                joined_s[instruction] = max(start_s, joined_s.get(instruction, start_s))
    zero_s = min(start_s for spans in by_lane.values() for _, start_s, _, _ in spans)
    found = []
    for lane in program.lanes:
        for instruction, start_s, end_s, num_bytes in by_lane.get(lane.name, ()):
            if isinstance(instruction, Send):
                end_s = max(start_s, min(end_s, came_s.get((lane.name, instruction), end_s)))
            elif isinstance(instruction, Collective):
                start_s = min(end_s, joined_s[instruction])
            found.append(Span(lane.name, instruction, start_s - zero_s, end_s - zero_s, num_bytes))
    # As the simulator records them: computation as it begins, the rest as it ends.
    found.sort(key=lambda span: span.start_s if ACTIVITIES[type(span.instruction)] in BUSY else span.end_s)
    peaks = {share.device: share.peak_bytes for share in shares}
    return Trace(
        plan=plan,
        cluster=cluster_name,
        origin=origin,
        iteration_s=max(span.end_s for span in found),
        lanes={lane.name: lane.devices for lane in program.lanes},
        spans=tuple(found),
        peak_bytes={device: peaks[device] for lane in program.lanes for device in lane.devices if device in peaks},
        versions={
            "motley": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": ", ".join(dict.fromkeys(share.hardware for share in shares)),
        },
        clock_residual_s=max(share.residual_s for share in shares) if len(shares) > 1 else None,
    )
