"""Schedules: orders drawn by hand, what they hold, and what every order and every choice of layer ranges must be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec import plan
from sim.spec.compile import compile_plan
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Program,
    ReduceGradients,
    SendActivation,
    SendGradient,
    dry_run,
    instruction_text,
    parse_program,
    program_text,
)
from sim.spec.reading import InputError
from sim.spec.schedules import SCHEDULES, Step, held_by, in_flight
from sim.spec.transformer import Transformer

Ranges = Sequence[Sequence[tuple[int, int]]]


def plan_of(schedule: str, ranges: Ranges, micro_batches: int, pipelines: int = 1, **fields: object) -> Plan:
    """A plan of equal pipelines whose stages hold these layer ranges, one device each."""
    layers = max(stop for stage in ranges for _, stop in stage)
    tied = bool(fields.pop("tied", False))
    made = tuple(
        Pipeline(1, micro_batches, tuple(Stage((Replica((f"n{p}/{s}",), 1),), tuple(held)) for s, held in enumerate(ranges)))
        for p in range(pipelines)
    )
    model = Transformer("m", layers, 1536, 4096, heads=8, vocab=96, tied_embeddings=tied)
    values: dict[str, object] = {"zero_stage": 0, "overlap_gradients": False, **fields}
    return Plan("c", model, 16, micro_batches * pipelines, made, schedule=schedule, **values)  # type: ignore[arg-type]


def ranges_of(schedule: str, depth: int, chunks: int, each: int = 1) -> list[list[tuple[int, int]]]:
    """The ranges of every stage, `each` layers a range, as a schedule takes them."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    for k in range(depth * chunks):
        back = schedule == "zb-v" and k >= depth
        found[2 * depth - 1 - k if back else k % depth].append((k * each, (k + 1) * each))
    return found


def rows(program: Program) -> list[str]:
    """The work of every lane on one line, its chunks called a, b, ... where there are several."""
    found = []
    for lane in program.lanes:
        texts = []
        for i in lane.instructions:
            if isinstance(i, Compute):
                chunk = "abc"[lane.layers.index(i.layers)] if len(lane.layers) > 1 else ""
                texts.append(instruction_text(i).split("[")[0] + chunk)
        found.append(" ".join(texts))
    return found


def test_every_schedule_that_a_plan_can_name_has_an_order() -> None:
    assert tuple(SCHEDULES) == plan.SCHEDULES


# --- Orders drawn by hand --------------------------------------------------------------------------------------------


def test_eager_1f1b_warms_up_twice_as_long() -> None:
    assert rows(compile_plan(plan_of("eager-1f1b", ranges_of("eager-1f1b", 3, 1), 5))) == [
        "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_a_stage_that_says_how_many_micro_batches_it_holds_warms_up_with_all_but_one_of_them() -> None:
    plan = plan_of("1f1b", ranges_of("1f1b", 3, 1), 5)
    own = replace(plan, pipelines=(plan.pipelines[0].holding([4, 2, 2]),))
    assert rows(compile_plan(own)) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
    ]
    same = replace(plan, pipelines=(plan.pipelines[0].holding([3, 2, 1]),))
    assert program_text(compile_plan(same)) == program_text(compile_plan(plan))
    eager, all_of_them = (plan.pipelines[0].holding(counts) for counts in ([5, 3, 1], [9, 5, 5]))
    for schedule, pipeline in (("eager-1f1b", eager), ("gpipe", all_of_them)):
        drawn = program_text(compile_plan(replace(plan, pipelines=(pipeline,))))
        assert drawn == program_text(compile_plan(plan.under(schedule)))


def test_slices_go_forward_from_the_first_and_back_from_the_last() -> None:
    """Two micro-batches in two slices each: 0 and 1, 2 and 3. Each stage holds one slice more than of whole micro-batches."""
    ranges = ranges_of("1f1b", 2, 1)
    assert rows(compile_plan(plan_of("1f1b", ranges, 2, sequence_slices=2))) == [
        "F0 F1 F2 B1 F3 B0 B3 B2",
        "F0 F1 B1 F2 B0 F3 B3 B2",
    ]
    assert rows(compile_plan(plan_of("gpipe", ranges, 2, sequence_slices=2))) == ["F0 F1 F2 F3 B1 B0 B3 B2"] * 2
    assert rows(compile_plan(plan_of("split-1f1b", ranges, 2, sequence_slices=2))) == [
        "F0 F1 F2 I1 W1 F3 I0 W0 I3 W3 I2 W2",
        "F0 F1 I1 W1 F2 I0 W0 F3 I3 W3 I2 W2",
    ]
    plan = plan_of("1f1b", ranges, 2, sequence_slices=2)
    own = replace(plan, pipelines=(plan.pipelines[0].holding([3, 2]),))
    assert rows(compile_plan(own)) == ["F0 F1 F2 F3 B1 B0 B3 B2", "F0 F1 F2 B1 F3 B0 B3 B2"]


@given(
    schedule=st.sampled_from(plan.SLICED_SCHEDULES),
    depth=st.integers(1, 5),
    micro_batches=st.integers(1, 7),
    slices=st.sampled_from((2, 4, 8)),
    data=st.data(),
)
def test_stages_hold_the_slices_that_are_said_of_them(
    schedule: str, depth: int, micro_batches: int, slices: int, data: st.DataObject
) -> None:
    chosen = plan_of(schedule, ranges_of(schedule, depth, 1), micro_batches, sequence_slices=slices)
    if schedule != "gpipe":
        counts = list(accumulate(data.draw(st.lists(st.integers(0, 2), min_size=depth, max_size=depth)), initial=1))[:0:-1]
        chosen = replace(chosen, pipelines=(chosen.pipelines[0].holding(counts),))
    program = compile_plan(chosen)
    dry_run(program)
    for position, lane in enumerate(program.lanes):
        held = most = 0
        for i in lane.instructions:
            held += isinstance(i, Forward) - isinstance(i, (Backward, BackwardWeight))
            most = max(most, held)
        assert most == held_by(schedule, chosen.pipelines[0], position, slices=slices)


def test_split_1f1b_sends_the_gradient_on_before_the_weight_half_and_holds_no_more_than_1f1b() -> None:
    plan = plan_of("split-1f1b", ranges_of("split-1f1b", 3, 1), 4)
    assert rows(compile_plan(plan)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3",
    ]
    own = replace(plan, pipelines=(plan.pipelines[0].holding([2, 2, 2]),))
    assert rows(compile_plan(own)) == ["F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"] * 3


@given(micro_batches=st.integers(1, 9), more=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_stages_that_hold_no_fewer_than_the_next_never_wait_for_ever(micro_batches: int, more: list[int]) -> None:
    counts = list(accumulate(more, initial=1))[:0:-1]
    plan = plan_of("1f1b", ranges_of("1f1b", len(counts), 1), micro_batches)
    own = replace(plan, pipelines=(plan.pipelines[0].holding(counts),))
    program = compile_plan(own)
    dry_run(program)
    for lane, count in zip(program.lanes, counts, strict=True):
        held = most = 0
        for instruction in lane.instructions:
            held += isinstance(instruction, Forward) - isinstance(instruction, Backward)
            most = max(most, held)
        assert most == min(count, micro_batches)


def test_interleaved_does_groups_of_as_many_micro_batches_as_stages_chunk_by_chunk() -> None:
    # Warm-ups of 2 (p - r - 1) + (v - 1) p = 4 and 2 forwards; then one forward and one backward in turn.
    assert rows(compile_plan(plan_of("interleaved", ranges_of("interleaved", 2, 2), 4))) == [
        "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a",
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a",
    ]


def test_what_fills_the_last_group_of_interleaved_up_is_left_out() -> None:
    assert rows(compile_plan(plan_of("interleaved", ranges_of("interleaved", 2, 2), 3))) == [
        "F0a F1a F0b F1b F2a B0b B1b F2b B0a B1a B2b B2a",
        "F0a F1a F0b B0b F1b B1b F2a B0a B1a F2b B2b B2a",
    ]


def test_interleaved_with_one_range_a_stage_is_1f1b() -> None:
    ranges = ranges_of("interleaved", 3, 1)
    assert rows(compile_plan(plan_of("interleaved", ranges, 5))) == rows(compile_plan(plan_of("1f1b", ranges, 5)))


def test_zb_1p_puts_weight_halves_off_by_the_stages_before() -> None:
    assert rows(compile_plan(plan_of("zb-1p", ranges_of("zb-1p", 3, 1), 4))) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zb_2p_warms_up_for_the_way_there_and_back() -> None:
    assert rows(compile_plan(plan_of("zb-2p", ranges_of("zb-2p", 3, 1), 5))) == [
        "F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4",
        "F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4",
    ]


def test_zb_v_goes_along_the_stages_and_back() -> None:
    # instant  0   1   2   3   4   5   6   7   8   9   10  11  12
    #   p0s0   F0a F1a .   F0b I0b F1b I1b W0b I0a W1b I1a W0a W1a
    #   p0s1   .   F0a F0b F1a F1b I0b I0a I1b I1a W0b W0a W1b W1a
    assert rows(compile_plan(plan_of("zb-v", ranges_of("zb-v", 2, 2), 2))) == [
        "F0a F1a F0b I0b F1b I1b W0b I0a W1b I1a W0a W1a",
        "F0a F0b F1a F1b I0b I0a I1b I1a W0b W0a W1b W1a",
    ]


# --- Messages, ends and reductions of several ranges -----------------------------------------------------------------


def test_every_crossing_of_a_chunk_has_its_own_edges() -> None:
    #   layers  0..2 p0s0, 2..4 p0s1, 4..6 p0s0, 6..8 p0s1
    first, last = compile_plan(plan_of("interleaved", ranges_of("interleaved", 2, 2, each=2), 2)).lanes
    share = (0, 1)
    assert first.previous == (Edge(4, "p0s1", share),)
    assert first.next == (Edge(2, "p0s1", share), Edge(6, "p0s1", share))
    assert last.previous == (Edge(2, "p0s0", share), Edge(6, "p0s0", share))
    assert last.next == (Edge(4, "p0s0", share),)
    assert (first.embedding, first.head, last.embedding, last.head) == (True, False, False, True)


def test_the_fold_of_a_v_sends_nothing_and_the_first_stage_has_both_ends() -> None:
    #   layers  0..2 p0s0, 2..4 p0s1, 4..6 p0s1, 6..8 p0s0
    first, last = compile_plan(plan_of("zb-v", ranges_of("zb-v", 2, 2, each=2), 1)).lanes
    assert [instruction_text(i) for i in last.instructions] == [
        *("RA0@2<p0s0[0:1]", "F0[2:4]", "F0[4:6]", "SA0@6>p0s0[0:1]"),
        *("RG0@6<p0s0[0:1]", "I0[4:6]", "I0[2:4]", "SG0@2>p0s0[0:1]", "W0[4:6]", "W0[2:4]", "STEP"),
    ]
    assert (first.embedding, first.head, last.embedding, last.head) == (True, True, False, False)


@pytest.mark.parametrize("schedule", ["zb-1p", "zb-2p", "zb-v"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_are_sent_after_their_input_half_and_reduced_after_their_weight_half(schedule: str, zero_stage: int) -> None:
    chunks = 2 if schedule == "zb-v" else 1
    ranges = ranges_of(schedule, 2, chunks, each=3)  # of which a bucket has two
    program = compile_plan(plan_of(schedule, ranges, 3, pipelines=2, zero_stage=zero_stage, overlap_gradients=True, tied=True))
    dry_run(program)
    for lane in program.lanes:
        weights: Counter[int] = Counter()
        reduced: Counter[int] = Counter()
        for before, i in pairwise(lane.instructions):
            if isinstance(before, BackwardWeight):
                weights.update(range(*before.layers))
            if isinstance(i, SendGradient):
                assert isinstance(before, BackwardInput) and before.layers[0] == i.layer
            if isinstance(i, ReduceGradients):
                reduced.update(range(*i.layers))
                times = 3 if i.micro_batch is None else i.micro_batch + 1
                assert {weights[layer] for layer in range(*i.layers)} <= {times}
        assert reduced == {layer: 3 if zero_stage >= 2 else 1 for r in lane.layers for layer in range(*r)}
        ends = [i.layers for i in lane.instructions if isinstance(i, ReduceGradients) and i.layers[0] == i.layers[1]]
        assert ends == [end for end, held in (((3 * 2 * chunks,) * 2, lane.head), ((0, 0), lane.head or lane.embedding)) if held]


# --- What an order holds ---------------------------------------------------------------------------------------------


def counted(steps: Sequence[Step], weights: Sequence[float]) -> float:
    """The most that is held at once, by counting."""
    held = most = 0.0
    for step in steps:
        if step.kind is Forward:
            held += weights[step.chunk]
        elif step.kind is not BackwardInput:
            held -= weights[step.chunk]
        most = max(most, held)
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(depth=st.integers(1, 5), chunks=st.integers(1, 3), micro_batches=st.integers(1, 40), data=st.data())
def test_in_flight_is_what_the_order_holds(
    schedule: str, depth: int, chunks: int, micro_batches: int, data: st.DataObject
) -> None:
    chunks = SCHEDULES[schedule].ranges or chunks
    layers = tuple(data.draw(st.lists(st.integers(0, 4), min_size=chunks, max_size=chunks).filter(any)))
    for position in range(depth):
        steps = list(SCHEDULES[schedule].order(depth, position, chunks, micro_batches))
        most = counted(steps, layers) / sum(layers)
        assert in_flight(schedule, depth, position, micro_batches, layers) == pytest.approx(most)


def test_in_flight_of_long_iterations_is_that_of_their_beginning() -> None:
    for schedule, known in SCHEDULES.items():
        for depth in (2, 3, 4, 6):
            chunks = known.ranges or 3
            for position in range(depth):
                steps = list(known.order(depth, position, chunks, 12 * depth + 1))
                for weights in ((1,) * chunks, (0,) * (chunks - 1) + (1,), (1, 3, 2)[:chunks]):
                    most = counted(steps, weights) / sum(weights)
                    assert in_flight(schedule, depth, position, 12 * depth + 1, weights) == pytest.approx(most)
    # What ZB-V holds of a second chunk may grow for longer.
    assert [in_flight("zb-v", 10, 8, many, (0, 1)) for many in (40, 120)] == [9, 10]


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_what_schedules_hold_is_what_their_papers_say(depth: int) -> None:
    many = 5 * depth
    for r in range(depth):
        assert in_flight("gpipe", depth, r, many) == many
        assert in_flight("1f1b", depth, r, many) == depth - r
        assert in_flight("eager-1f1b", depth, r, many) == 2 * (depth - r) - 1
        # Narayanan et al. (2021): a warm-up of 2 (p - r - 1) + (v - 1) p chunks, and one more.
        assert in_flight("interleaved", depth, r, many, (1, 1, 1)) == pytest.approx((2 * (depth - r - 1) + 2 * depth + 1) / 3)
        # Qi et al. (2024): ZB-H1 holds p on every stage, ZB-H2 2p - 1, V-ZB as much as 1F1B's first stage.
        assert in_flight("zb-1p", depth, r, many) == depth
        assert in_flight("zb-2p", depth, r, many) == 2 * depth - 1
        assert in_flight("zb-v", depth, r, many, (1, 1)) <= depth
    # The head's chunk goes back at once.
    assert in_flight("interleaved", depth, depth - 1, many, (0, 0, 1)) == 1


# --- Every order -----------------------------------------------------------------------------------------------------


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    depth=st.integers(1, 6),
    chunks=st.integers(1, 4),
    micro_batches=st.integers(1, 15),
    pipelines=st.integers(1, 2),
    zero_stage=st.integers(0, 3),
    overlaps=st.booleans(),
)
def test_every_order_can_be_executed(
    schedule: str, depth: int, chunks: int, micro_batches: int, pipelines: int, zero_stage: int, overlaps: bool
) -> None:
    chunks = SCHEDULES[schedule].ranges or chunks
    ranges = ranges_of(schedule, depth, chunks, each=3)
    program = compile_plan(plan_of(schedule, ranges, micro_batches, pipelines, zero_stage=zero_stage, overlap_gradients=overlaps))
    dry_run(program)
    assert parse_program(program_text(program)) == program
    for position, lane in enumerate(program.lanes[:depth]):
        steps = list(SCHEDULES[schedule].order(depth, position, chunks, micro_batches))
        halves = (BackwardInput, BackwardWeight) if SCHEDULES[schedule].splits_backward else None
        assert len(set(steps)) == len(steps) == (3 if halves else 2) * micro_batches * chunks
        for kind in {step.kind for step in steps}:
            for chunk in range(chunks):
                of_chunk = [step.micro_batch for step in steps if step.kind is kind and step.chunk == chunk]
                assert of_chunk == list(range(micro_batches))
        # All lanes finish their chunks from the last to the first, so that collectives do not cross.
        last = halves[1] if halves else steps[-1].kind
        ends = [step.chunk for step in steps if step.kind is last and step.micro_batch == micro_batches - 1]
        assert ends == list(range(chunks))[::-1]
        assert sum(isinstance(i, SendActivation) for i in lane.instructions) == len(lane.next) * micro_batches


@pytest.mark.parametrize("chunks", [1, 2])
def test_pipelines_of_other_depths_and_ranges_reduce_together(chunks: int) -> None:
    deep = plan_of("interleaved", ranges_of("interleaved", 4, 2), 3).pipelines[0]
    other = plan_of("interleaved", ranges_of("interleaved", 2, chunks, each=4 // chunks), 5).pipelines[0]
    renamed = tuple(replace(s, replicas=(Replica((f"m/{i}",), 1),)) for i, s in enumerate(other.stages))
    base = plan_of("interleaved", ranges_of("interleaved", 4, 2), 8)
    for tied in (False, True):
        model = replace(base.transformer, tied_embeddings=tied)
        dry_run(compile_plan(replace(base, model=model, pipelines=(deep, replace(other, stages=renamed)), zero_stage=1)))


# --- What cannot be compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ranges", "error"),
    [
        ("1f1b", [[(0, 1), (2, 3)], [(1, 2), (3, 4)]], "pipelines[0].stages[0] has 2 layer ranges, but '1f1b' takes one"),
        ("zb-1p", [[(0, 1)], [(1, 2), (2, 3)]], "pipelines[0].stages[1] has 2 layer ranges, but 'zb-1p' takes one"),
        ("zb-v", [[(0, 2)], [(2, 4)]], "pipelines[0].stages[0] has 1 layer range, but 'zb-v' takes two"),
        (
            "interleaved",
            [[(0, 1), (2, 3)], [(1, 2)]],
            "pipelines[0].stages[1] has 1 layer range, but 'interleaved' takes as many of every stage, and stages[0] has 2",
        ),
        (
            "interleaved",
            [[(0, 1), (3, 4)], [(1, 2), (2, 3)]],
            "pipelines[0]: under 'interleaved' a micro-batch visits the stages in the order 0, 1, 0, 1, but their layers are in "
            "the order 0, 1, 1, 0",
        ),
        (
            "zb-v",
            [[(0, 1), (2, 3)], [(1, 2), (3, 4)]],
            "pipelines[0]: under 'zb-v' a micro-batch visits the stages in the order 0, 1, 1, 0, but their layers are in the "
            "order 0, 1, 0, 1",
        ),
        ("zb-v", [[(0, 0), (0, 4)]], "pipelines[0].stages[0] has the layer ranges [0, 0] and [0, 4], which are one"),
    ],
)
def test_ranges_that_a_schedule_does_not_take_are_refused_in_one_line(schedule: str, ranges: Ranges, error: str) -> None:
    with pytest.raises(InputError) as caught:
        compile_plan(plan_of(schedule, ranges, 2))
    assert str(caught.value) == error


def test_stages_may_stand_in_any_order_and_ends_may_be_empty() -> None:
    for ranges in (
        [[(2, 4), (6, 8)], [(0, 2), (4, 6)]],
        [[(6, 8), (2, 4)], [(4, 6), (0, 2)]],
        [[(0, 0), (2, 4)], [(0, 2), (4, 4)]],
    ):
        dry_run(compile_plan(plan_of("interleaved", ranges, 4)))
    dry_run(compile_plan(plan_of("zb-v", [[(0, 0), (4, 4)], [(0, 2), (2, 4)]], 4, pipelines=2, zero_stage=3)))
