"""The trace's file: lossless, quick to reload, and of a shape that Chrome's and Perfetto's viewers take."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    INSTRUCTIONS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
)
from sim.spec.reading import InputError
from sim.spec.trace import (
    ACTIVITIES,
    LinkUse,
    Span,
    Trace,
    lane_pipelines,
    parse_trace,
    period_s,
    read_trace,
    short_devices,
    trace_json,
)
from sim.spec.transformer import Transformer

MODEL = Transformer("tiny", layers=2, hidden=4, ffn=8, heads=2, vocab=10)
PLAN = Plan(
    cluster="two-nodes",
    model=MODEL,
    sequence_length=5,
    global_batch=4,
    pipelines=(
        Pipeline(1, 3, (Stage((Replica(("a/0", "a/1"), 1),), ((0, 1),)), Stage((Replica(("a/2",), 1),), ((1, 2),)))),
        Pipeline(1, 1, (Stage((Replica(("b/0",), 1),), ((0, 2),)),)),
    ),
)
LANES = {"p0s0": ("a/0", "a/1"), "p0s1": ("a/2",), "p1s0": ("b/0",)}


def trace_of(*spans: Span, **changes: Any) -> Trace:
    made = Trace(
        plan=PLAN,
        cluster="two-nodes",
        origin="simulated",
        iteration_s=9.5,
        lanes=LANES,
        spans=spans,
        peak_bytes={"a/0": 123456789012, "a/1": 5},
        links=(LinkUse("a:nic0>", 1.25e9, 1e9 / 3), LinkUse("b/0>", math.inf, 0.0)),
        versions={"motley": "0.1.0"},
    )
    return replace(made, **changes)


def events(trace: Trace, *phases: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace_json(trace))["traceEvents"] if event["ph"] in phases]


def as_viewer_ns(number: str) -> set[int]:
    """The ns that viewers make of a µs text: some multiply the double by 1000, some the decimals; all drop the rest."""
    return {math.trunc(float(number) * 1000), math.trunc(Fraction(number) * 1000)}


numbers = st.integers(0, 300)
ranges = st.tuples(numbers, numbers)
peers = st.sampled_from(["p0s0", "p0s1r3", "p12s4"])
micro_batches = st.none() | numbers
instructions: st.SearchStrategy[Instruction] = st.one_of(
    *(st.builds(kind, numbers, ranges) for kind in (Forward, Backward, BackwardInput, BackwardWeight)),
    *(st.builds(kind, numbers, numbers, peers, ranges) for kind in (SendActivation, RecvActivation, SendGradient, RecvGradient)),
    st.builds(ReduceGradients, ranges, micro_batches),
    st.builds(GatherParameters, ranges),
    st.builds(GatherParameters, ranges, numbers, st.booleans()),
    st.just(OptimizerStep()),
)
times = st.floats(0, 1e5)
spans = st.builds(
    lambda lane, instruction, ends, num_bytes: Span(lane, instruction, min(ends), max(ends), num_bytes),
    st.sampled_from(list(LANES)),
    instructions,
    st.tuples(times, times),
    st.integers(0, 2**60),
)


@given(st.lists(spans, max_size=30), times)
def test_a_trace_comes_back_equal_in_every_bit_and_in_its_order(made: list[Span], iteration_s: float) -> None:
    trace = trace_of(*made, iteration_s=iteration_s)
    back = parse_trace(trace_json(trace))
    assert back == trace
    assert list(back.lanes) == list(trace.lanes)
    assert [s.start_s.hex() + s.end_s.hex() for s in back.spans] == [s.start_s.hex() + s.end_s.hex() for s in made]


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = trace_of(Span("p0s0", Forward(0, (0, 1)), 0.1, 0.1 + 0.2, 0), origin="measured", links=(), versions={})
    path = tmp_path / "trace.json"
    path.write_text(trace_json(trace), encoding="utf-8")
    assert read_trace(path) == trace


@given(st.none() | times)
def test_what_the_clocks_may_still_differ_by_comes_back_equal(residual_s: float | None) -> None:
    trace = trace_of(origin="measured", clock_residual_s=residual_s)
    assert parse_trace(trace_json(trace)) == trace


def test_a_trace_of_one_clock_is_written_as_before_and_null_is_read_as_one() -> None:
    text = trace_json(trace_of())
    assert "clock_residual_s" not in text
    assert parse_trace(text.replace('"versions":', '"clock_residual_s":null,\n"versions":', 1)) == trace_of()


@given(st.floats(0, 1))
def test_how_far_the_speeds_of_devices_differ_comes_back_and_is_written_where_they_do(jitter: float) -> None:
    trace = trace_of(jitter=jitter)
    text = trace_json(trace)
    assert parse_trace(text) == trace and ("jitter" in text) == (jitter > 0)


def test_a_jitter_that_is_none_is_told_in_one_line() -> None:
    text = trace_json(trace_of(jitter=0.5))
    with pytest.raises(InputError, match=r"jitter: .*1\.5"):
        parse_trace(text.replace('"jitter":0.5', '"jitter":1.5'))


def test_the_period_of_lanes_that_begin_apart_is_that_of_the_longest() -> None:
    #  p0s0  |======|
    #  p0s1      |======|       begins when it is done with the iteration before
    some = [Span("p0s0", Forward(0, (0, 1)), 0.0, 8.0), Span("p0s1", Forward(0, (1, 2)), 2.5, 9.5)]
    assert period_s(trace_of(*some)) == 8.0
    assert period_s(trace_of(*some, iteration_s=10.0)) == 8.5  # half a second of it is beyond the spans
    assert period_s(trace_of(some[0], iteration_s=8.0)) == 8.0
    assert period_s(trace_of()) == 9.5


def test_every_instruction_is_an_activity() -> None:
    assert set(ACTIVITIES) == set(INSTRUCTIONS)


def test_pipelines_are_processes_and_lanes_threads_with_names_and_order() -> None:
    named = {(e["name"], e["pid"], e.get("tid")): e["args"] for e in events(trace_of(), "M")}
    assert named == {
        ("process_name", 1, None): {"name": "pipeline 0"},
        ("process_sort_index", 1, None): {"sort_index": 0},
        ("process_name", 2, None): {"name": "pipeline 1"},
        ("process_sort_index", 2, None): {"sort_index": 1},
        ("thread_name", 1, 1): {"name": "p0s0  a/0-1"},
        ("thread_sort_index", 1, 1): {"sort_index": 0},
        ("thread_name", 1, 2): {"name": "p0s1  a/2"},
        ("thread_sort_index", 1, 2): {"sort_index": 1},
        ("thread_name", 2, 3): {"name": "p1s0  b/0"},
        ("thread_sort_index", 2, 3): {"sort_index": 2},
    }
    assert lane_pipelines(trace_of()) == {"p0s0": 0, "p0s1": 0, "p1s0": 1}


def test_what_a_lane_waits_for_is_a_complete_event_and_what_goes_on_beside_it_an_asynchronous_pair() -> None:
    blocking: list[Instruction] = [
        Forward(0, (0, 1)),
        Backward(0, (0, 1)),
        BackwardInput(0, (0, 1)),
        BackwardWeight(0, (0, 1)),
        RecvActivation(0, 1, "p0s1", (0, 1)),
        RecvGradient(0, 1, "p0s1", (0, 1)),
        OptimizerStep(),
    ]
    beside: list[Instruction] = [
        SendActivation(0, 1, "p0s1", (0, 1)),
        SendGradient(0, 1, "p0s1", (0, 1)),
        ReduceGradients((0, 1)),
        GatherParameters((0, 1)),
    ]
    trace = trace_of(*(Span("p0s0", instruction, 1e-6, 3e-6, 7) for instruction in blocking + beside))
    assert [e["name"] for e in events(trace, "X")] == ["F0[0:1]", "B0[0:1]", "I0[0:1]", "W0[0:1]", *_receives(), "STEP"]
    assert {(e["pid"], e["tid"], round(e["ts"], 3), round(e["dur"], 3)) for e in events(trace, "X")} == {(1, 1, 1.0, 2.0)}
    for phase in "be":
        assert [e["name"] for e in events(trace, phase)] == ["SA0@1>p0s1[0:1]", "SG0@1>p0s1[0:1]", "R[0:1]", "G[0:1]"]
    assert [e["args"]["bytes"] for e in events(trace, "X", "b")] == [7] * len(trace.spans)


def _receives() -> list[str]:
    return ["RA0@1<p0s1[0:1]", "RG0@1<p0s1[0:1]"]


@given(st.lists(spans, max_size=30))
def test_every_asynchronous_event_ends_before_another_begins_on_its_track(made: list[Span]) -> None:
    by_track: dict[tuple[str, str], list[tuple[int, str, str]]] = defaultdict(list)
    for event in events(trace_of(*made), "b", "e"):
        by_track[event["cat"], event["id"]].append((math.trunc(event["ts"] * 1000), event["ph"], event["name"]))
    for track in by_track.values():
        in_time = sorted(track, key=lambda event: event[0])  # stable, as viewers sort
        assert [phase for _, phase, _ in in_time] == ["b", "e"] * (len(track) // 2)
        assert all(in_time[i][2] == in_time[i + 1][2] for i in range(0, len(track), 2))


@given(st.lists(st.floats(1e-7, 2.0), min_size=1, max_size=50), st.floats(0, 1e4))
def test_events_that_follow_one_another_do_not_overlap_by_rounding(durations_s: list[float], start_s: float) -> None:
    made, now_s = [], start_s
    for i, duration_s in enumerate(durations_s):
        made.append(Span("p1s0", Forward(i, (0, 2)), now_s, now_s + duration_s))
        now_s += duration_s
    raw = json.loads(trace_json(trace_of(*made)), parse_float=str)["traceEvents"]
    ended_ns = 0
    for event in (event for event in raw if event["ph"] == "X"):
        (begin_ns,), (length_ns,) = as_viewer_ns(event["ts"]), as_viewer_ns(event["dur"])
        assert begin_ns >= ended_ns
        ended_ns = begin_ns + length_ns
    assert ended_ns == round(now_s * 1e9)


def test_each_track_is_named_by_its_first_event() -> None:
    send = SendActivation(0, 1, "p0s1", (0, 1))
    together = trace_of(Span("p0s0", send, 1.0, 3.0), Span("p0s0", send, 2.0, 4.0), Span("p0s0", send, 3.5, 5.0))
    named = events(together, "n")
    assert [(e["name"], e["id"]) for e in named] == [("p0s0 sends", "p0s0 send 0"), ("p0s0 sends", "p0s0 send 1")]
    assert [e["id"] for e in events(together, "b")] == ["p0s0 send 0", "p0s0 send 1", "p0s0 send 0"]


def test_the_unit_stands_before_the_events_and_what_viewers_do_not_know_after_them() -> None:
    text = trace_json(trace_of())
    assert list(json.loads(text)) == ["displayTimeUnit", "traceEvents", "motley"]
    facts = json.loads(text)["motley"]
    assert facts["format"] == "motley-trace/1"
    assert facts["plan"] == json.loads(PLAN.to_json())
    assert facts["links"][1] == {"name": "b/0>", "capacity_bytes_per_s": None, "bytes": 0.0}


def test_names_beyond_ascii_are_written_as_they_are() -> None:
    trace = trace_of(cluster="Zürich", versions={"motley": "0.1.0"})
    assert '"Zürich"' in trace_json(trace)
    assert parse_trace(trace_json(trace)) == trace


def test_events_of_other_tools_are_passed_over() -> None:
    trace = trace_of(Span("p0s0", Forward(0, (0, 1)), 0.0, 1.0))
    value = json.loads(trace_json(trace))
    value["traceEvents"].insert(3, {"name": "memory", "ph": "C", "ts": 5, "pid": 1, "args": {"bytes": 3}})
    value["otherData"] = {"kept by": "a viewer"}
    assert parse_trace(json.dumps(value)) == trace


def test_times_beyond_the_whole_numbers_of_a_machine_are_written_right() -> None:
    """2**34 s are about 544 years, and more ns than a 64-bit number holds."""
    trace = trace_of(Span("p0s0", Forward(0, (0, 1)), 2.0**33, 2.0**34))
    (event,) = (event for event in events(trace, "X"))
    assert [event["ts"], event["dur"]] == [pytest.approx(2.0**33 * 1e6), pytest.approx(2.0**33 * 1e6)]
    assert parse_trace(trace_json(trace)) == trace


def test_a_time_that_is_not_finite_is_not_written() -> None:
    with pytest.raises(ValueError, match="finite"):
        trace_json(trace_of(Span("p0s0", OptimizerStep(), 0.0, math.inf)))


def one_line(text: str) -> str:
    with pytest.raises(InputError) as raised:
        parse_trace(text, "run/trace.json")
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("run/trace.json")
    return message


def test_a_file_that_ends_too_early_is_told_in_one_line() -> None:
    text = trace_json(trace_of(Span("p0s0", Forward(0, (0, 1)), 0.0, 1.0)))
    for length in (0, 1, 40, len(text) // 2, len(text) - 3):
        one_line(text[:length])
    assert "ends too early" in one_line(text[: len(text) - 3])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("motley-trace/1", "motley-trace/9", "motley.format: expected one of motley-trace/1, but got 'motley-trace/9'"),
        ('"motley":', '"mixed":', "motley: is missing; expected a trace written by Motley (motley-trace/1)"),
        ('"F0[0:1]"', '"Q0[0:1]"', "traceEvents[10].name: 'Q0[0:1]' is no instruction"),
        ('"tid":1,"ph":"X"', '"tid":4,"ph":"X"', "traceEvents[10]: expected an event with name, the tid of one of 3 lanes"),
        ('"start_s":0.0,', "", "traceEvents[10]: expected an event with name"),
        ('"start_s":0.0,', '"start_s":"0",', "traceEvents[10]: expected an event with name"),
        ('"start_s":0.0,', '"start_s":NaN,', "all numbers of a trace are finite, but one is NaN"),
        ('"simulated"', '"guessed"', "motley.origin: expected one of simulated, measured, paced, but got 'guessed'"),
        ('"zero_stage": 1', '"zero_stage": 7', "motley.plan: zero_stage: expected one of 0, 1, 2, 3, but got 7"),
        ('"versions":', '"version":', "motley: unknown key 'version'"),
        (
            '"versions":',
            '"clock_residual_s":-1,"versions":',
            "motley.clock_residual_s: expected a number of at least 0",
        ),
    ],
)
def test_a_damaged_trace_is_told_in_one_line(old: str, new: str, told: str) -> None:
    text = trace_json(trace_of(Span("p0s0", Forward(0, (0, 1)), 0.0, 1.0)))
    assert old in text
    assert told in one_line(text.replace(old, new))


def test_a_file_that_is_no_trace_at_all_is_told_in_one_line() -> None:
    assert "expected a mapping" in one_line("[1, 2]")
    assert "traceEvents: expected a list" in one_line(
        trace_json(trace_of()).replace("[\n{", '{"x":[{', 1).replace("\n],", "]},", 1)
    )


def test_devices_are_shortened_by_node_and_run() -> None:
    assert short_devices(("a/0", "a/1", "a/2", "a/3")) == "a/0-3"
    assert short_devices(("a/0", "a/2", "a/3", "b/7")) == "a/0,2-3 b/7"
    assert short_devices(("cpu",)) == "cpu"
