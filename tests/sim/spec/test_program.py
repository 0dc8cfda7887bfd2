"""Programs: their text, the dependency rule, and the dry run that finds what cannot be executed."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.compile import compile_plan
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    INSTRUCTIONS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Edge,
    Forward,
    GatherParameters,
    Instruction,
    Lane,
    OptimizerStep,
    Program,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    dependencies,
    dry_run,
    instruction_text,
    parse_instruction,
    parse_program,
    program_text,
)
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

# --- Text ------------------------------------------------------------------------------------------------------------

TEXTS: dict[str, Instruction] = {
    "F3[0:8]": Forward(3, (0, 8)),
    "B12[4:8]": Backward(12, (4, 8)),
    "I0[4:8]": BackwardInput(0, (4, 8)),
    "W0[4:8]": BackwardWeight(0, (4, 8)),
    "SA3@8>p0s1[0:1]": SendActivation(3, 8, "p0s1", (0, 1)),
    "RA3@8<p0s0r2[1:4]": RecvActivation(3, 8, "p0s0r2", (1, 4)),
    "SG3@8>p0s0[0:1]": SendGradient(3, 8, "p0s0", (0, 1)),
    "RG3@8<p0s1[0:1]": RecvGradient(3, 8, "p0s1", (0, 1)),
    "R[0:8]": ReduceGradients((0, 8)),
    "R0[0:0]": ReduceGradients((0, 0), 0),
    "R7[8:8]": ReduceGradients((8, 8), 7),
    "G[0:8]": GatherParameters((0, 8)),
    "GF0[0:8]": GatherParameters((0, 8), 0),
    "GB5[0:8]": GatherParameters((0, 8), 5, backward=True),
    "STEP": OptimizerStep(),
}


@pytest.mark.parametrize(("text", "instruction"), TEXTS.items())
def test_an_instruction_has_a_text(text: str, instruction: Instruction) -> None:
    assert instruction_text(instruction) == text
    assert parse_instruction(text) == instruction


def test_every_instruction_type_has_a_text_here() -> None:
    assert {type(instruction) for instruction in TEXTS.values()} == set(INSTRUCTIONS)


NO_INSTRUCTIONS = (
    "", "F", "F3", "F[0:8]", "F-1[0:8]", "X3[0:8]", "F3[0:8] ", "f3[0:8]", "F3[0-8]", "SA3@8<p0s1[0:1]", "RG3@8>p0s1[0:1]",
    "SA3>p0s1[0:1]", "SA3@8>[0:1]", "SA3@8>p0s1", "G3[0:8]", "GX3[0:8]", "RB3[0:8]", "STEP1", "step", "R[0:8]R[0:8]",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    NO_INSTRUCTIONS,
)
def test_any_other_text_is_no_instruction(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_instruction(text)
    assert str(caught.value) == f"{text!r} is no instruction; expected a text such as F3[0:8], SA3@8>p0s1[0:1], R[0:8] or STEP"


def test_what_is_no_instruction_has_no_text() -> None:
    @dataclass(frozen=True)
    class Sleep:
        seconds: int

    with pytest.raises(TypeError, match=r"^no text form for .*Sleep\(seconds=3\)$"):
        instruction_text(Sleep(3))  # type: ignore[arg-type]


small = st.integers(0, 99)
pairs = st.tuples(small, small)
names = st.from_regex(r"\Ap[0-9]{1,2}s[0-9]{1,2}(r[0-9])?\Z")
edges = st.lists(st.builds(Edge, small, names, pairs), max_size=2).map(tuple)
ranges = st.lists(pairs, min_size=1, max_size=3).map(tuple)
lanes = st.builds(
    Lane,
    name=names,
    pipeline=small,
    stage=small,
    replica=small,
    devices=st.lists(st.from_regex(r"\A[a-z0-9.-]{1,9}/[0-9]\Z"), min_size=1, max_size=4).map(tuple),
    layers=ranges,
    sequences=pairs,
    micro_batches=small,
    embedding=st.booleans(),
    head=st.booleans(),
    previous=edges,
    next=edges,
    buckets=st.just(()) | ranges,
    split=st.sampled_from(("none", "last", "all")),
    instructions=st.lists(st.sampled_from(list(TEXTS.values())), max_size=4).map(tuple),
)


@given(st.lists(lanes, max_size=3))
def test_the_text_of_any_program_is_read_as_the_same_program(members: list[Lane]) -> None:
    program = Program(tuple(members))
    assert parse_program(program_text(program)) == program


LANE = (
    "lane p0s0 pipeline=0 stage=0 replica=0 devices=a/0 layers=0:2 sequences=0:1 micro_batches=1 ends=embedding "
    "previous=- next=p0s1@2[0:1] buckets=- split=none"
)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "line 1: expected 'motley-program/1', but got 'nothing'"),
        (["motley-program/2"], "line 1: expected 'motley-program/1', but got 'motley-program/2'"),
        (["motley-program/1", "  F0[0:2]"], "line 2: expected a line that begins with 'lane'"),
        (["motley-program/1", LANE, "  F0[0:2]", "  Q0[0:2]"], "line 4: 'Q0[0:2]' is no instruction; expected a text such as"),
        (["motley-program/1", LANE, "  "], "line 3: '' is no instruction; expected a text such as"),
        (["motley-program/1", "lane p0s0"], "line 2: 'lane p0s0' is not the line of a lane"),
        (["motley-program/1", LANE.replace("stage=0", "stage=x")], "line 2: 'lane p0s0 pipeline=0 stage=x replica=0 "),
        (["motley-program/1", LANE.replace("0:2", "0-2")], "line 2: 'lane p0s0 pipeline=0 "),
        (["motley-program/1", LANE.replace("next=p0s1@2[0:1]", "next=p0s1@2")], "line 2: 'lane p0s0 pipeline=0 "),
        (["motley-program/1", LANE.replace("sequences=0:1", "sequences=-")], "line 2: 'lane p0s0 pipeline=0 "),
        (["motley-program/1", LANE.replace("stage=0", "stage")], "line 2: 'lane p0s0 pipeline=0 "),
    ],
)
def test_a_text_that_is_no_program_is_refused_by_its_line(lines: list[str], error: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_program("\n".join(lines), "p.txt")
    assert str(caught.value).startswith(f"p.txt, {error}") and "\n" not in str(caught.value)


# --- The dependency rule ---------------------------------------------------------------------------------------------

#   p0s0  F0[0:4] SA0 | RG0 B0[2:4] R[2:4] B0[0:2] R[0:2] STEP G
#   p0s1  RA0 F0[4:6] B0[4:6] SG0 ...
FRONT = Lane(
    name="p0s0",
    pipeline=0,
    stage=0,
    replica=0,
    devices=("a/0",),
    layers=((0, 4),),
    sequences=(0, 1),
    micro_batches=2,
    embedding=True,
    head=False,
    next=(Edge(4, "p0s1", (0, 1)),),
    buckets=((0, 2), (2, 4)),
    split="last",
)
BACK = replace(FRONT, name="p0s1", stage=1, layers=((4, 6),), buckets=((4, 6),), embedding=False, head=True, next=())
BACK = replace(BACK, previous=(Edge(4, "p0s0", (0, 1)),))


def needs(lane: Lane, text: str) -> list[str]:
    """What an instruction of a lane depends on, as texts; those of other lanes with the lane's name."""
    found = dependencies(lane, parse_instruction(text))
    return [instruction_text(i) if name == lane.name else f"{name} {instruction_text(i)}" for name, i in found]


def test_a_forward_needs_what_it_receives() -> None:
    assert needs(FRONT, "F0[0:4]") == []
    assert needs(BACK, "F0[4:6]") == ["RA0@4<p0s0[0:1]"]
    two = replace(BACK, previous=(Edge(4, "p0s0r0", (0, 2)), Edge(4, "p0s0r1", (2, 3))))
    assert needs(two, "F1[4:6]") == ["RA1@4<p0s0r0[0:2]", "RA1@4<p0s0r1[2:3]"]


def test_a_backward_needs_its_forward_and_the_gradient_from_behind() -> None:
    assert needs(FRONT, "B0[0:4]") == ["F0[0:4]", "RG0@4<p0s1[0:1]"]
    assert needs(BACK, "B1[4:6]") == ["F1[4:6]"]
    assert needs(FRONT, "B1[2:4]") == ["F1[0:4]", "RG1@4<p0s1[0:1]"]
    assert needs(FRONT, "B1[0:2]") == ["F1[0:4]", "B1[2:4]"]


def test_layer_ranges_that_follow_one_another_on_a_lane_need_each_other_and_no_message() -> None:
    folded = replace(FRONT, layers=((2, 4), (4, 6)), previous=(Edge(2, "p0s9", (0, 1)),), next=(Edge(6, "p0s9", (0, 1)),))
    folded = replace(folded, buckets=(), split="none")
    assert needs(folded, "F0[2:4]") == ["RA0@2<p0s9[0:1]"]
    assert needs(folded, "F0[4:6]") == ["F0[2:4]"]
    assert needs(folded, "B0[4:6]") == ["F0[4:6]", "RG0@6<p0s9[0:1]"]
    assert needs(folded, "B0[2:4]") == ["F0[2:4]", "B0[4:6]"]
    assert needs(folded, "SA0@6>p0s9[0:1]") == ["F0[4:6]"]
    assert needs(folded, "SG0@2>p0s9[0:1]") == ["B0[2:4]"]
    in_parts = replace(folded, buckets=((2, 3), (3, 4), (4, 5), (5, 6)), split="all")
    assert needs(in_parts, "F0[4:5]") == ["F0[3:4]", "GF0[4:5]"]
    assert needs(in_parts, "B0[3:4]") == ["F0[3:4]", "B0[4:5]", "GB0[3:4]"]


def test_messages_need_what_they_carry() -> None:
    assert needs(FRONT, "SA0@4>p0s1[0:1]") == ["F0[0:4]"]
    assert needs(BACK, "RA0@4<p0s0[0:1]") == ["p0s0 SA0@4>p0s1[0:1]"]
    assert needs(BACK, "SG0@4>p0s0[0:1]") == ["B0[4:6]"]
    assert needs(FRONT, "RG0@4<p0s1[0:1]") == ["p0s1 SG0@4>p0s0[0:1]"]


def test_a_gradient_is_sent_after_the_first_layers_of_a_backward_in_parts() -> None:
    middle = replace(FRONT, embedding=False, previous=(Edge(0, "p0s9", (0, 1)),))
    assert needs(middle, "SG0@0>p0s9[0:1]") == ["B0[0:4]"]
    assert needs(middle, "SG1@0>p0s9[0:1]") == ["B1[0:2]"]


def test_a_reduction_needs_the_last_backward_of_its_layers() -> None:
    assert needs(FRONT, "R[2:4]") == ["B1[2:4]"]
    assert needs(FRONT, "R[0:2]") == ["B1[0:2]"]
    assert needs(FRONT, "R[0:0]") == ["B1[0:2]"]
    assert needs(FRONT, "R0[0:2]") == ["B0[0:4]"]
    assert needs(BACK, "R[6:6]") == ["B1[4:6]"]
    assert needs(BACK, "R[0:0]") == ["B1[4:6]"]  # tied
    two_ranges = replace(BACK, layers=((1, 2), (4, 6)), split="none", buckets=())
    assert needs(two_ranges, "R[6:6]") == ["B1[4:6]"]
    assert needs(two_ranges, "R[1:2]") == ["B1[1:2]"]


def test_an_optimizer_step_needs_all_reductions_or_the_last_backward() -> None:
    assert needs(FRONT, "STEP") == ["B1[0:2]"]
    program = (Forward(0, (0, 4)), ReduceGradients((2, 4)), ReduceGradients((0, 2)), ReduceGradients((0, 0)), OptimizerStep())
    assert needs(replace(FRONT, instructions=program), "STEP") == ["R[2:4]", "R[0:2]", "R[0:0]"]


def test_gathered_parameters_come_after_the_step_and_before_their_layers() -> None:
    assert needs(FRONT, "G[0:2]") == ["STEP"]
    sharded = replace(FRONT, split="all")
    assert needs(sharded, "GF0[0:2]") == needs(sharded, "GB0[0:2]") == []
    assert needs(sharded, "F0[0:2]") == ["GF0[0:2]"]
    assert needs(sharded, "F0[2:4]") == ["F0[0:2]", "GF0[2:4]"]
    assert needs(sharded, "B0[2:4]") == ["F0[2:4]", "RG0@4<p0s1[0:1]", "GB0[2:4]"]
    assert needs(sharded, "B0[0:2]") == ["F0[2:4]", "B0[2:4]", "GB0[0:2]"]
    assert needs(sharded, "SA0@4>p0s1[0:1]") == ["F0[2:4]"]


def test_a_backward_in_halves_gives_the_input_first_and_the_weights_later() -> None:
    halves = replace(BACK, split="none", instructions=(BackwardInput(0, (4, 6)), BackwardWeight(0, (4, 6))))
    assert needs(halves, "I1[4:6]") == ["F1[4:6]"]
    assert needs(halves, "W1[4:6]") == ["I1[4:6]"]
    assert needs(halves, "SG1@4>p0s0[0:1]") == ["I1[4:6]"]
    assert needs(halves, "R[4:6]") == ["W1[4:6]"]
    assert needs(halves, "STEP") == ["W1[4:6]"]


def test_empty_end_stages_need_what_full_ones_do() -> None:
    first = replace(FRONT, layers=((0, 0),), next=(Edge(0, "p0s1", (0, 1)),), buckets=(), split="none")
    assert needs(first, "F0[0:0]") == []
    assert needs(first, "SA0@0>p0s1[0:1]") == ["F0[0:0]"]
    assert needs(first, "B0[0:0]") == ["F0[0:0]", "RG0@0<p0s1[0:1]"]
    assert needs(first, "R[0:0]") == ["B1[0:0]"]
    last = replace(BACK, layers=((6, 6),), previous=(Edge(6, "p0s0", (0, 1)),), buckets=(), split="none")
    assert needs(last, "F0[6:6]") == ["RA0@6<p0s0[0:1]"]
    assert needs(last, "SG0@6>p0s0[0:1]") == ["B0[6:6]"]
    assert needs(last, "R[6:6]") == ["B1[6:6]"]
    assert needs(last, "STEP") == ["B1[6:6]"]


@pytest.mark.parametrize("instruction", TEXTS.values(), ids=instruction_text)
def test_the_rule_covers_every_instruction_type(instruction: Instruction) -> None:
    layers = ((0, 8), (4, 8), (8, 8))  # all that are named there
    lane = replace(FRONT, layers=layers, next=(), head=True, micro_batches=13, buckets=(), split="none")
    for name, needed in dependencies(lane, instruction):
        assert isinstance(needed, INSTRUCTIONS) and isinstance(name, str)


def test_an_unknown_instruction_has_no_rule() -> None:
    with pytest.raises(TypeError, match=r"^no dependency rule for 'F0\[0:4\]'$"):
        dependencies(FRONT, "F0[0:4]")  # type: ignore[arg-type]


# --- The dry run -----------------------------------------------------------------------------------------------------


def two_stages() -> Program:
    tiny = Transformer("tiny", layers=4, hidden=64, ffn=256, heads=4, vocab=100)
    stages = (Stage((Replica(("a/0",), 1),), ((0, 2),)), Stage((Replica(("a/1",), 1),), ((2, 4),)))
    return compile_plan(Plan("c", tiny, 16, 2, (Pipeline(1, 2, stages),)))


def reordered(program: Program, lane: str, texts: str) -> Program:
    """The program with other instructions for one lane."""
    instructions = tuple(parse_instruction(text) for text in texts.split())
    return Program(tuple(replace(x, instructions=instructions) if x.name == lane else x for x in program.lanes))


def refused(program: Program) -> str:
    with pytest.raises(InputError) as caught:
        dry_run(program)
    return str(caught.value)


def test_two_lanes_that_each_receive_first_are_a_deadlock_shown_as_a_grid() -> None:
    # p0s0 wants the gradient of micro-batch 1 before it sends that micro-batch; p0s1 waits for the micro-batch.
    program = reordered(
        two_stages(),
        "p0s0",
        "F0[0:2] SA0@2>p0s1[0:1] RG1@2<p0s1[0:1] F1[0:2] SA1@2>p0s1[0:1] RG0@2<p0s1[0:1] B0[0:2] B1[0:2] STEP",
    )
    assert refused(program).splitlines() == [
        "deadlock: 2 of 2 lanes cannot go on",
        "  p0s0  F0[0:2] SA0@2>p0s1[0:1]  RG1@2<p0s1[0:1] <-- here, waits for p0s1 SG1@2>p0s0[0:1]",
        "  p0s1  F0[2:4] B0[2:4] SG0@2>p0s0[0:1]  RA1@2<p0s0[0:1] <-- here, waits for p0s0 SA1@2>p0s1[0:1]",
    ]


def test_a_lane_that_ended_stands_in_the_grid_of_a_deadlock_too() -> None:
    waiting = replace(
        FRONT, next=(), buckets=(), split="none", micro_batches=1, instructions=(Backward(0, (0, 4)), Forward(0, (0, 4)))
    )
    ended = replace(waiting, name="p1s0", pipeline=1, instructions=(Forward(0, (0, 4)), Backward(0, (0, 4)), OptimizerStep()))
    assert refused(Program((waiting, ended))).splitlines() == [
        "deadlock: 1 of 2 lanes cannot go on",
        "  p0s0    B0[0:4] <-- here, waits for p0s0 F0[0:4]",
        "  p1s0  F0[0:4] B0[0:4] STEP  ended",
    ]


def test_a_reduction_that_a_member_does_not_come_to_is_a_deadlock() -> None:
    alone = replace(FRONT, next=(), buckets=(), split="none", micro_batches=1)
    one = replace(
        alone,
        instructions=(
            Forward(0, (0, 4)),
            Backward(0, (0, 4)),
            ReduceGradients((0, 4)),
            OptimizerStep(),
            GatherParameters((0, 4)),
        ),
    )
    other = replace(one, name="p1s0", pipeline=1)
    dry_run(Program((one, other)))
    # Here the other one wants to step before it reduces, and neither reduction can end.
    early = (Forward(0, (0, 4)), Backward(0, (0, 4)), OptimizerStep(), ReduceGradients((0, 4)), GatherParameters((0, 4)))
    lines = refused(Program((one, replace(other, instructions=early)))).splitlines()
    assert lines[0] == "deadlock: 2 of 2 lanes cannot go on"
    assert lines[1] == "  p0s0  F0[0:4] B0[0:4] R[0:4]  STEP <-- here, waits for p0s0 R[0:4]"
    assert lines[2] == "  p1s0  F0[0:4] B0[0:4]  STEP <-- here, waits for p1s0 R[0:4]"


def test_a_send_without_its_receive_is_named() -> None:
    program = two_stages()
    texts = [instruction_text(i) for i in program.lanes[1].instructions]
    without = reordered(program, "p0s1", " ".join(text for text in texts if text != "RA1@2<p0s0[0:1]"))
    assert refused(without) == "lane p0s0 has SA1@2>p0s1[0:1], but lane p0s1 has no RA1@2<p0s0[0:1]"


def test_a_receive_without_its_send_is_named() -> None:
    program = two_stages()
    texts = [instruction_text(i) for i in program.lanes[1].instructions]
    without = reordered(program, "p0s1", " ".join(text for text in texts if text != "SG0@2>p0s0[0:1]"))
    assert refused(without) == "lane p0s0 has RG0@2<p0s1[0:1], but lane p0s1 has no SG0@2>p0s0[0:1]"


def test_a_message_of_other_sequences_is_no_partner() -> None:
    program = two_stages()
    texts = " ".join(instruction_text(i) for i in program.lanes[1].instructions)
    other = reordered(program, "p0s1", texts.replace("RA0@2<p0s0[0:1]", "RA0@2<p0s0[0:2]"))
    assert refused(other) == "lane p0s0 has SA0@2>p0s1[0:1], but lane p0s1 has no RA0@2<p0s0[0:1]"


def test_an_instruction_that_stands_twice_is_named() -> None:
    program = two_stages()
    texts = " ".join(instruction_text(i) for i in program.lanes[0].instructions)
    assert refused(reordered(program, "p0s0", texts + " F1[0:2]")) == "lane p0s0 has the instruction F1[0:2] twice"


def test_a_backward_before_its_forward_cannot_be_executed() -> None:
    program = two_stages()
    texts = " ".join(instruction_text(i) for i in program.lanes[1].instructions)
    early = reordered(program, "p0s1", texts.replace("F0[2:4] B0[2:4]", "B0[2:4] F0[2:4]"))
    assert "p0s1  RA0@2<p0s0[0:1]  B0[2:4] <-- here, waits for p0s1 F0[2:4]" in refused(early)


def test_an_optimizer_step_waits_for_its_reductions() -> None:
    alone = replace(FRONT, next=(), buckets=(), split="none", micro_batches=1)
    early = (Forward(0, (0, 4)), Backward(0, (0, 4)), OptimizerStep(), ReduceGradients((0, 4)))
    lanes = (replace(alone, instructions=early), replace(alone, name="p1s0", instructions=early))
    assert "  p1s0  F0[0:4] B0[0:4]  STEP <-- here, waits for p1s0 R[0:4]" in refused(Program(lanes)).splitlines()


def test_collectives_that_two_lanes_come_to_in_opposite_orders_never_start() -> None:
    # Each lane's collectives follow one another: the one waits with its first for the other's second, and the reverse.
    lane = replace(FRONT, next=(), buckets=((0, 2), (2, 4)), split="none", micro_batches=1)
    reductions = (ReduceGradients((2, 4)), ReduceGradients((0, 2)))
    one = replace(lane, instructions=(Forward(0, (0, 4)), Backward(0, (0, 4)), *reductions))
    other = replace(one, name="p1s0", pipeline=1)
    dry_run(Program((one, other)))
    crossed = replace(other, instructions=(*other.instructions[:2], *reversed(reductions)))
    assert refused(Program((one, crossed))) == "deadlock: the collective R[2:4] of lane p0s0 crosses others and never starts"
