"""The spans of a worker, clocks that drift, and the measured trace, all on clocks that the tests turn by hand."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import start_processes

from runtime.peak import hardware_name
from runtime.recorder import Clocks, ClockSample, Recorder, Share, choose_step, gather_trace, measure_offsets, merged
from sim.spec.compile import compile_plan
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    Backward,
    Forward,
    Instruction,
    OptimizerStep,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
)
from sim.spec.trace import ACTIVITIES, BACKGROUND, Trace, read_trace, trace_json
from sim.spec.transformer import Transformer
from sim.spec.version import VERSION
from tests.runtime.processes import soon_started

CPU = torch.device("cpu")
FORWARD, BACKWARD, REDUCE = Forward(0, (0, 1)), Backward(0, (0, 1)), ReduceGradients((0, 1))


class Hand:
    """A clock that shows what it was set to; `rate` and `shift_s` make it one that goes wrong."""

    def __init__(self, rate: float = 1.0, shift_s: float = 0.0) -> None:
        self.true_s, self.rate, self.shift_s = 0.0, rate, shift_s

    def __call__(self) -> float:
        return self.true_s * self.rate + self.shift_s

    def exact(self, first_s: float, last_s: float) -> Clocks:
        """This clock aligned to the true time, by samples without error."""
        samples = []
        for self.true_s in (first_s, last_s):
            samples.append(ClockSample(self(), self.true_s - self(), 0.0))
        return Clocks(*samples)


# --- One worker ------------------------------------------------------------------------------------------------------


def test_spans_are_what_the_clock_showed_foreground_as_it_ended_and_background_as_it_began() -> None:
    hand = Hand()
    recorder = Recorder(CPU, clock=hand)
    recorder.start_step(7)
    hand.true_s = 1.0
    begin = recorder.begin()
    hand.true_s = 2.0
    handle = recorder.started(REDUCE, 64)
    hand.true_s = 3.0
    recorder.end(FORWARD, begin)
    recorder.end(BACKWARD, recorder.begin(), num_bytes=5)
    hand.true_s = 4.5
    recorder.finished(handle)
    recorder.finish_step()
    assert recorder.steps == (7,)
    assert recorder.spans(7) == [(FORWARD, 1.0, 3.0, 0), (BACKWARD, 3.0, 3.0, 5), (REDUCE, 2.0, 4.5, 64)]


def test_the_first_to_end_a_background_span_wins_and_what_has_not_ended_ends_with_the_step() -> None:
    hand = Hand()
    recorder = Recorder(CPU, clock=hand)
    recorder.start_step(0)
    twice, never = recorder.started(REDUCE), recorder.started(FORWARD)
    for hand.true_s in (1.0, 2.0):
        recorder.finished(twice)
    hand.true_s = 3.0
    recorder.finish_step()
    recorder.start_step(1)
    following = recorder.started(BACKWARD)
    hand.true_s = 4.0
    recorder.finished(never)  # too late, and must not end the span of another step
    hand.true_s = 5.0
    recorder.finished(following)
    recorder.finish_step()
    assert recorder.spans(0) == [(REDUCE, 0.0, 1.0, 0), (FORWARD, 0.0, 3.0, 0)]
    assert recorder.spans(1) == [(BACKWARD, 3.0, 5.0, 0)]


def test_many_threads_end_background_spans_at_once() -> None:
    recorder = Recorder(CPU)
    recorder.start_step(0)
    handles = [recorder.started(ReduceGradients((i, i + 1)), i) for i in range(400)]

    def finish_all() -> None:
        for handle in handles:
            recorder.finished(handle)

    threads = [threading.Thread(target=finish_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    all_ended_s = time.perf_counter()
    recorder.finish_step()
    spans = recorder.spans(0)
    assert [(instruction, num_bytes) for instruction, _, _, num_bytes in spans] == [
        (ReduceGradients((i, i + 1)), i) for i in range(400)
    ]
    assert all(start_s <= end_s <= all_ended_s for _, start_s, end_s, _ in spans)


def test_only_the_last_steps_are_kept() -> None:
    recorder = Recorder(CPU, keep_steps=2)
    for step in range(5):
        recorder.start_step(step)
        recorder.end(Forward(step, (0, 1)), recorder.begin())
        recorder.finish_step()
    assert recorder.steps == (3, 4)
    assert [recorder.spans(step)[0][0] for step in (3, 4)] == [Forward(3, (0, 1)), Forward(4, (0, 1))]
    with pytest.raises(KeyError):
        recorder.spans(2)


def test_a_step_that_was_never_started_is_not_finished() -> None:
    with pytest.raises(RuntimeError, match="started before it is finished"):
        Recorder(CPU).finish_step()


# --- A GPU -----------------------------------------------------------------------------------------------------------


class Gpu:
    """A stand-in for CUDA's events: each is passed `lag_s` after it was recorded, and time is told from another zero."""

    def __init__(self, hand: Hand, lag_s: float) -> None:
        gpu = self
        self.made = 0

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                gpu.made += 1

            def record(self) -> None:
                self.passed_s, self.waited_for = hand() + lag_s, False

            def synchronize(self) -> None:
                self.waited_for = True
                hand.true_s = max(hand.true_s, self.passed_s)

            def elapsed_time(self, later: Event) -> float:
                assert self.waited_for and later.waited_for  # CUDA refuses events that have not been passed
                return (later.passed_s - self.passed_s) * 1e3

        self.event = Event


def test_on_a_gpu_spans_are_the_times_at_which_it_passed_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is 0.25 s ahead of the GPU. What another thread ends is on the host's clock."""
    hand = Hand()
    monkeypatch.setattr(torch.cuda, "Event", Gpu(hand, 0.25).event)
    recorder = Recorder(torch.device("cuda", 0), clock=hand)
    recorder.start_step(0)
    assert hand.true_s == 0.25  # it waited until the GPU had passed the reference
    hand.true_s = 1.0
    begin, by_host, by_gpu = recorder.begin(), recorder.started(REDUCE, 8), recorder.started(BACKWARD)
    hand.true_s = 2.0
    recorder.end(FORWARD, begin)
    recorder.finished(by_gpu)
    thread = threading.Thread(target=recorder.finished, args=(by_host,))
    thread.start()
    thread.join()
    hand.true_s = 3.0
    recorder.finish_step()
    assert recorder.spans(0) == [(FORWARD, 1.25, 2.25, 0), (REDUCE, 1.25, 2.0, 8), (BACKWARD, 1.25, 2.25, 0)]


def test_on_a_gpu_the_events_of_forgotten_steps_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    gpu = Gpu(hand, 0.0)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    recorder = Recorder(torch.device("cuda", 0), keep_steps=2, clock=hand)
    for step in range(20):
        recorder.start_step(step)
        for m in range(5):
            hand.true_s += 1.0
            begin, handle = recorder.begin(), recorder.started(SendActivation(m, 1, "p0s1", (0, 1)))
            hand.true_s += 1.0
            recorder.end(Forward(m, (0, 1)), begin)
            recorder.finished(handle)
        recorder.finish_step()
    assert gpu.made == 3 * (5 * 4 + 2)  # two steps kept and one under way; each span has two, each step a first and a last one
    starts_s = [start_s for _, start_s, _, _ in recorder.spans(19)]
    assert starts_s == [19 * 10 + 2.0 * m + 1 for m in range(5)] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_takes_longer_for_more_work_and_its_spans_lie_inside_the_step() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.randn(4096, 4096, device=device)
    a @ a
    recorder = Recorder(device)
    before_s = time.perf_counter()
    recorder.start_step(0)
    for m, count in enumerate((1, 20)):
        begin = recorder.begin()
        for _ in range(count):
            a @ a
        recorder.end(Forward(m, (0, 1)), begin)
    recorder.finish_step()
    torch.cuda.synchronize()
    after_s = time.perf_counter()
    (_, start_s, middle_s, _), (_, second_s, end_s, _) = recorder.spans(0)
    assert before_s <= start_s <= middle_s <= second_s <= end_s <= after_s + 1e-3
    assert end_s - second_s > 5 * (middle_s - start_s)


# --- Clocks ----------------------------------------------------------------------------------------------------------

times = st.floats(0, 1e4)


@given(st.floats(-1e5, 1e5), st.floats(0.9, 1.1), times, st.floats(1.0, 1e4), st.floats(0, 1))
def test_a_clock_that_drifts_evenly_is_aligned_exactly(
    shift_s: float, rate: float, first_s: float, run_s: float, part: float
) -> None:
    hand = Hand(rate, shift_s)
    clocks = hand.exact(first_s, first_s + run_s)
    hand.true_s = first_s + part * run_s
    assert clocks.align(hand()) == pytest.approx(hand.true_s, abs=1e-9 * (1e5 + hand.true_s))


@given(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0), st.floats(0, 1))
def test_an_aligned_time_between_the_samples_is_no_more_wrong_than_the_worse_sample(a: float, b: float, part: float) -> None:
    hand = Hand(1.05, 40.0)
    exact = hand.exact(0.0, 10.0)
    wrong = [
        ClockSample(sample.local_s, sample.offset_s + error_s, abs(error_s))
        for sample, error_s in ((exact.first, a), (exact.last, b))
    ]
    clocks = Clocks(*wrong)
    hand.true_s = 10.0 * part
    assert clocks.residual_s == max(abs(a), abs(b))
    assert abs(clocks.align(hand()) - hand.true_s) <= clocks.residual_s + 1e-9


def test_one_sample_alone_only_shifts() -> None:
    sample = ClockSample(local_s=10.0, offset_s=-3.0, residual_s=0.5)
    assert Clocks(sample, sample).align(20.0) == 17.0


# --- The choice of a step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "chosen"),
    [
        ([5.0], 0),
        ([9.0, 5.0], 1),  # at most half are warm-up
        ([9.0, 5.0, 4.0], 2),  # two of 5 and 4: the lower median
        ([9.0, 9.0, 9.0, 3.0, 1.0, 2.0], 5),
        ([0.0, 0.0, 0.0, 3.0, 1.0, 2.0, 4.0], 5),
        ([9.0, 9.0, 9.0, 2.0, 1.0, 2.0, 2.0, 7.0], 3),  # the earliest of equals
    ],
)
def test_the_chosen_step_has_the_lower_median_time_after_the_warm_up(step_s: list[float], chosen: int) -> None:
    assert choose_step(step_s, warm_up=3) == chosen


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=30), st.integers(0, 5))
def test_as_many_steps_are_faster_as_slower_than_the_chosen_one(step_s: list[float], warm_up: int) -> None:
    chosen = choose_step(step_s, warm_up)
    after = step_s[min(warm_up, len(step_s) // 2) :]
    assert chosen >= len(step_s) - len(after)
    assert sum(s < step_s[chosen] for s in after) <= (len(after) - 1) / 2
    assert sum(s > step_s[chosen] for s in after) <= len(after) / 2


def test_without_a_step_none_is_chosen() -> None:
    with pytest.raises(ValueError, match="got none"):
        choose_step([])


# --- The trace -------------------------------------------------------------------------------------------------------

Timeline = Sequence[tuple[Instruction, float, float, int]]


def plan_of(first: str, second: str) -> Plan:
    """One micro-batch through two stages of one layer, on the devices of two texts."""
    stages = tuple(
        Stage((Replica(tuple(devices.split()), 1),), (layers,)) for devices, layers in ((first, (0, 1)), (second, (1, 2)))
    )
    model = Transformer("tiny", layers=2, hidden=4, ffn=8, heads=2, vocab=10)
    return Plan("three", model, sequence_length=5, global_batch=1, pipelines=(Pipeline(1, 1, stages),), zero_stage=0)


SEND, RECV = SendActivation(0, 1, "p0s1", (0, 1)), RecvActivation(0, 1, "p0s0", (0, 1))
SEND_BACK, RECV_BACK = SendGradient(0, 1, "p0s0", (0, 1)), RecvGradient(0, 1, "p0s1", (0, 1))

TIMELINES: dict[str, Timeline] = {
    "p0s0": [
        (FORWARD, 100.0, 102.0, 0),
        (SEND, 102.0, 105.0, 40),  # the sender asks late whether it is gone; p0s1 has it at 103
        (RECV_BACK, 102.0, 107.0, 0),
        (BACKWARD, 107.0, 109.0, 0),
        (OptimizerStep(), 109.0, 110.0, 0),
    ],
    "p0s1": [
        (RECV, 101.0, 103.0, 0),
        (Forward(0, (1, 2)), 103.0, 104.0, 0),
        (Backward(0, (1, 2)), 104.0, 106.0, 0),
        (SEND_BACK, 106.0, 106.5, 40),  # gone before p0s0 takes note of it
        (OptimizerStep(), 106.0, 108.0, 0),
    ],
}
"""
        100 101 102 103 104 105 106 107 108 109 110
p0s0     F   F   -   -   -   -   -   B   B   S        - waits for the gradient
p0s1         -   -   F   B   B   S   S                - waits for the activation
"""

EXPECTED = [
    ("p0s0", FORWARD, 0.0, 2.0, 0),
    ("p0s0", SEND, 2.0, 3.0, 40),
    ("p0s1", RECV, 1.0, 3.0, 0),
    ("p0s1", Forward(0, (1, 2)), 3.0, 4.0, 0),
    ("p0s1", Backward(0, (1, 2)), 4.0, 6.0, 0),
    ("p0s1", OptimizerStep(), 6.0, 8.0, 0),
    ("p0s1", SEND_BACK, 6.0, 6.5, 40),
    ("p0s0", RECV_BACK, 2.0, 7.0, 0),
    ("p0s0", BACKWARD, 7.0, 9.0, 0),
    ("p0s0", OptimizerStep(), 9.0, 10.0, 0),
]


def played(timeline: Timeline, hand: Hand) -> Recorder:
    """A recorder whose step 4 went as the timeline says, by a clock that may go wrong."""
    recorder = Recorder(CPU, clock=hand)
    recorder.start_step(4)
    for instruction, start_s, end_s, num_bytes in timeline:
        hand.true_s = start_s
        if ACTIVITIES[type(instruction)] in BACKGROUND:
            handle = recorder.started(instruction, num_bytes)
            hand.true_s = end_s
            recorder.finished(handle)
            continue
        begin = recorder.begin()
        hand.true_s = end_s
        recorder.end(instruction, begin, num_bytes)
    recorder.finish_step()
    return recorder


def shown(trace: Trace) -> list[tuple[object, ...]]:
    """The spans of a trace, times rounded to 1 ns."""
    return [(lane, i, round(start_s, 9), round(end_s, 9), num_bytes) for lane, i, start_s, end_s, num_bytes in trace.spans]


def test_a_send_ends_when_its_receiver_has_it_and_the_earliest_start_is_zero() -> None:
    plan = plan_of("c/0", "c/2")
    shares = [
        Share("p0s1", list(TIMELINES["p0s1"]), "c/2", 22, "a CPU", 1e-6),
        Share("p0s0", list(TIMELINES["p0s0"]), "c/0", 20, "a GPU", 2e-6),
    ]
    trace = merged(shares, plan, compile_plan(plan), "three")
    assert shown(trace) == EXPECTED
    assert trace.iteration_s == 10.0
    assert (trace.origin, trace.cluster, trace.plan) == ("measured", "three", plan)
    assert trace.lanes == {"p0s0": ("c/0",), "p0s1": ("c/2",)}
    assert list(trace.peak_bytes.items()) == [("c/0", 20), ("c/2", 22)]
    assert trace.clock_residual_s == 2e-6
    assert trace.versions["device"] == "a CPU, a GPU"


def test_a_send_never_ends_before_it_begins_and_a_transfer_may_end_the_iteration() -> None:
    plan = plan_of("c/0", "c/2")
    first: Timeline = [(FORWARD, 0.0, 2.0, 0), (SEND, 2.0, 4.0, 0), (REDUCE, 2.0, 9.0, 0)]
    second: Timeline = [(RECV, 0.0, 1.5, 0)]  # clocks that do not agree
    shares = [Share("p0s0", list(first), "c/0", 0, "a CPU", 1.0), Share("p0s1", list(second), "c/2", 0, "a CPU", 0.0)]
    trace = merged(shares, plan, compile_plan(plan), "three")
    assert ("p0s0", SEND, 2.0, 2.0, 0) in shown(trace)
    assert trace.iteration_s == 9.0


def test_a_worker_alone_needs_no_group() -> None:
    plan = Plan(
        "one",
        Transformer("tiny", layers=2, hidden=4, ffn=8, heads=2, vocab=10),
        sequence_length=5,
        global_batch=1,
        pipelines=(Pipeline(1, 1, (Stage((Replica(("c/0",), 1),), ((0, 2),)),)),),
    )
    program = compile_plan(plan)
    hand = Hand(shift_s=7.0)
    sample = measure_offsets(None, clock=hand)
    assert sample == ClockSample(7.0, 0.0, 0.0)
    trace = gather_trace(
        played([(FORWARD, 1.0, 2.0, 0), (OptimizerStep(), 2.0, 3.5, 0)], hand),
        Clocks(sample, sample),
        plan=plan,
        program=program,
        lane=program.lanes[0],
        is_first_of_lane=True,
        cluster_name="one",
        device_name="c/0",
        step=4,
        peak_bytes=9,
        process_group=None,
    )
    assert trace is not None
    assert shown(trace) == [("p0s0", FORWARD, 0.0, 1.0, 0), ("p0s0", OptimizerStep(), 1.0, 2.5, 0)]
    assert (trace.iteration_s, trace.peak_bytes, trace.clock_residual_s) == (2.5, {"c/0": 9}, None)


# --- Three processes -------------------------------------------------------------------------------------------------


def _worker(rank: int, folder: str) -> None:
    """One of three processes; an assertion that fails here fails the test."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    late = dist.new_group([1, 2])
    for trace, name in ((_world(rank), "world.json"), (_part(rank, late), "part.json")):
        if trace is not None:
            Path(folder, name).write_text(trace_json(trace), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _world(rank: int) -> Trace | None:
    """The trace of all three, two of which share a lane, on clocks that go wrong in different ways."""
    plan = plan_of("c/0 c/1", "c/2")
    program = compile_plan(plan)
    name = ("p0s0", "p0s0", "p0s1")[rank]
    hand = Hand(1.0 + 0.01 * rank, 1000.0 * rank)
    timeline = [(FORWARD, 90.0, 200.0, 1)] if rank == 1 else TIMELINES[name]  # of a lane's second device nothing is taken
    exact = hand.exact(95.0, 120.0)
    clocks = Clocks(exact.first, ClockSample(exact.last.local_s, exact.last.offset_s, 1e-6 * rank))
    return gather_trace(
        played(timeline, hand),
        clocks,
        plan=plan,
        program=program,
        lane=program.by_name[name],
        is_first_of_lane=rank != 1,
        cluster_name="three",
        device_name=f"c/{rank}",
        step=4 if rank == 0 else 5,  # as if another step had been chosen here
        peak_bytes=20 + rank,
        process_group=dist.group.WORLD,
    )


def _part(rank: int, group: dist.ProcessGroup) -> Trace | None:
    """The trace of the ranks 1 and 2 of the world, whose clocks are measured: they lie 1000 s and 1 % apart."""
    if rank == 0:
        return None

    def clock() -> float:
        return time.perf_counter() * (1 + 0.01 * (rank - 1)) + 1000.0 * (rank - 1)

    first = measure_offsets(group, clock=clock)
    between_s = [(time.perf_counter(), clock(), time.perf_counter()) for _ in range(3)]
    clocks = Clocks(first, measure_offsets(group, clock=clock))
    assert (clocks.residual_s > 0) == (rank == 2)
    assert clocks.residual_s < 10
    for before_s, local_s, after_s in between_s:
        slack_s = clocks.residual_s * 1.02 + 1e-9
        assert before_s - slack_s <= clocks.align(local_s) <= after_s + slack_s

    plan = plan_of("c/1", "c/2")
    program = compile_plan(plan)
    name = ("p0s0", "p0s1")[rank - 1]
    hand = Hand()
    return gather_trace(
        played(TIMELINES[name], hand),
        hand.exact(0.0, 1.0),
        plan=plan,
        program=program,
        lane=program.by_name[name],
        is_first_of_lane=True,
        cluster_name="part",
        device_name=f"c/{rank}",
        step=4,
        peak_bytes=30 + rank,
        process_group=group,
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trace]]:
    """What the three processes wrote."""
    folder = tmp_path_factory.mktemp("traces")
    soon_started()
    start_processes(_worker, (str(folder),), nprocs=3, start_method="forkserver")  # type: ignore[no-untyped-call]
    yield {path.stem: read_trace(path) for path in folder.glob("*.json")}


def test_the_first_worker_has_the_trace_of_all_lanes_on_one_clock(traces: dict[str, Trace]) -> None:
    trace = traces["world"]
    assert shown(trace) == EXPECTED
    assert round(trace.iteration_s, 9) == 10.0
    assert trace.lanes == {"p0s0": ("c/0", "c/1"), "p0s1": ("c/2",)}
    assert trace.peak_bytes == {"c/0": 20, "c/1": 21, "c/2": 22}
    assert trace.clock_residual_s == 2e-6
    assert trace.versions == {
        "motley": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": hardware_name(CPU),
    }


def test_a_part_of_the_workers_measures_its_clocks_and_gathers_a_trace_of_its_own(traces: dict[str, Trace]) -> None:
    trace = traces["part"]
    assert shown(trace) == EXPECTED
    assert (trace.cluster, trace.peak_bytes) == ("part", {"c/1": 31, "c/2": 32})
