"""Compiling plans: golden programs, the counts of the schedules, and what holds for the program of every plan."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.cluster import Cluster, read_cluster
from sim.spec.compile import common_refinement, compile_plan
from sim.spec.plan import Pipeline, Plan, Replica, Stage, parse_plan, read_plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    GatherParameters,
    OptimizerStep,
    Program,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    dry_run,
    instruction_text,
    parse_program,
    program_text,
)
from sim.spec.reading import InputError
from sim.spec.schedules import SCHEDULES
from sim.spec.transformer import Transformer
from tests.strategies import worlds

PEER_PLANS = Path(__file__).parents[2] / "data" / "peer_plans"


def model(layers: int, hidden: int = 64, tied: bool = False) -> Transformer:
    """A model of which all layers are one gradient bucket, or, with hidden 1536, each two layers (28 million parameters each)."""
    return Transformer("m", layers, hidden, ffn=8 * hidden // 3, heads=8, vocab=96, tied_embeddings=tied)


def stage(start: int, stop: int, *replicas: str | tuple[str, int], sequences: int = 1) -> Stage:
    """A stage of replicas, each of devices in one text, with its sequences beside it where they are not all the same."""
    told = [replica if isinstance(replica, tuple) else (replica, sequences) for replica in replicas]
    return Stage(tuple(Replica(tuple(devices.split()), share) for devices, share in told), ((start, stop),))


def plan(transformer: Transformer, *pipelines: Pipeline, **fields: object) -> Plan:
    values: dict[str, object] = {"zero_stage": 0, "overlap_gradients": False, **fields}
    batch = sum(pipeline.sequences for pipeline in pipelines)
    return Plan("c", transformer, 16, batch, pipelines, **values)  # type: ignore[arg-type]


def pipeline(*stages: Stage, micro_batches: int, micro_batch: int = 1) -> Pipeline:
    return Pipeline(micro_batch, micro_batches, stages)


def column(program: Program, lane: str) -> str:
    """A lane's instructions on one line, without layers and peers."""
    return " ".join(re.split(r"[\[@]", instruction_text(i))[0] for i in program.by_name[lane].instructions)


# --- Golden programs -------------------------------------------------------------------------------------------------

ONE_OF_EACH_CUT = (
    pipeline(stage(0, 6, "a/0 a/1 a/2 a/3"), micro_batches=2),
    pipeline(stage(0, 2, "b/0 b/1"), stage(2, 6, "b/2 b/3"), micro_batches=2),
    pipeline(stage(0, 3, "c/0"), stage(3, 6, "c/1"), micro_batches=2),
)
TWO_ALIKE = (
    pipeline(stage(0, 3, "a/0"), stage(3, 5, "a/1"), micro_batches=2),
    pipeline(stage(0, 3, "b/0"), stage(3, 5, "b/1"), micro_batches=2),
)
GOLDEN = {
    "gpipe-2-stages": plan(
        model(4), pipeline(stage(0, 2, "a/0"), stage(2, 4, "a/1"), micro_batches=3), schedule="gpipe", overlap_gradients=True
    ),
    "gpipe-3-stages": plan(
        model(6), pipeline(stage(0, 2, "a/0"), stage(2, 3, "a/1"), stage(3, 6, "a/2"), micro_batches=2), schedule="gpipe"
    ),
    "1f1b-2-stages": plan(model(4), pipeline(stage(0, 2, "a/0"), stage(2, 4, "a/1"), micro_batches=3)),
    "1f1b-3-stages": plan(model(6), pipeline(stage(0, 2, "a/0"), stage(2, 3, "a/1"), stage(3, 6, "a/2"), micro_batches=4)),
    "slices-2-stages": plan(
        model(4, 1536),
        *(pipeline(stage(0, 2, f"{p}/0"), stage(2, 4, f"{p}/1"), micro_batches=2) for p in "ab"),
        zero_stage=1,
        sequence_slices=2,
        overlap_gradients=True,
    ),
    "different-cuts-and-degrees": plan(model(6), *ONE_OF_EACH_CUT, zero_stage=1),
    "uneven-replicas": plan(
        model(4),
        pipeline(stage(0, 2, ("a/0", 3), ("a/1", 1)), stage(2, 4, "b/0", "b/1", sequences=2), micro_batch=4, micro_batches=2),
    ),
    "tied-embeddings": plan(
        model(3, tied=True),
        pipeline(stage(0, 1, "a/0"), stage(1, 2, "a/1"), stage(2, 3, "a/2"), micro_batches=2),
        zero_stage=1,
        overlap_gradients=True,
    ),
    "empty-end-stages": plan(model(2), pipeline(stage(0, 0, "a/0"), stage(0, 2, "a/1"), stage(2, 2, "a/2"), micro_batches=2)),
    "zero-0-overlap": plan(model(5, 1536), *TWO_ALIKE, overlap_gradients=True),
    "zero-0-no-overlap": plan(model(5, 1536), *TWO_ALIKE),
    "zero-1-overlap": plan(model(5, 1536), *TWO_ALIKE, zero_stage=1, overlap_gradients=True),
    "zero-2-overlap": plan(model(5, 1536), *TWO_ALIKE, zero_stage=2, overlap_gradients=True),
    "zero-3": plan(model(5, 1536), *TWO_ALIKE, zero_stage=3),
    "zero-3-in-three-buckets": plan(
        model(5, 1536), *(pipeline(stage(0, 5, device), micro_batches=1) for device in ("a/0", "b/0")), zero_stage=3
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_small_program_reads_as_it_should(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"programs/{name}.txt", program_text(compile_plan(GOLDEN[name])))


# --- Schedules -------------------------------------------------------------------------------------------------------

# Three stages, four micro-batches; F forward, B backward.
#   p0s0   F0 F1 F2          B0 F3 B1 B2 B3
#   p0s1      F0 F1 B0 F2 B1 F3 B2 B3
#   p0s2         F0 B0 F1 B1 F2 B2 F3 B3


def test_1f1b_warms_up_then_alternates_then_drains() -> None:
    program = compile_plan(GOLDEN["1f1b-3-stages"])
    assert column(program, "p0s0") == "F0 SA0 F1 SA1 F2 SA2 RG0 B0 F3 SA3 RG1 B1 RG2 B2 RG3 B3 STEP"
    order = {x.name: " ".join(text for text in column(program, x.name).split() if text[0] in "FB") for x in program.lanes}
    assert order == {
        "p0s0": "F0 F1 F2 B0 F3 B1 B2 B3",
        "p0s1": "F0 F1 B0 F2 B1 F3 B2 B3",
        "p0s2": "F0 B0 F1 B1 F2 B2 F3 B3",
    }


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_the_warm_up_of_1f1b_is_as_long_as_the_stages_behind(depth: int, micro_batches: int) -> None:
    stages = [stage(s, s + 1, f"a/{s}") for s in range(depth)]
    program = compile_plan(plan(model(depth), pipeline(*stages, micro_batches=micro_batches)))
    for position, lane in enumerate(program.lanes):
        work = [type(i) for i in lane.instructions if isinstance(i, (Forward, Backward))]
        warm_up = min(depth - 1 - position, micro_batches)
        steady = [Forward, Backward] * (micro_batches - warm_up)
        assert work == [Forward] * warm_up + steady + [Backward] * warm_up


# --- What holds for the program of every plan ------------------------------------------------------------------------


@given(worlds())
def test_every_program_can_be_executed_and_its_text_read(world: tuple[Cluster, Plan]) -> None:
    program = compile_plan(world[1])
    dry_run(program)
    assert parse_program(program_text(program)) == program


@given(worlds())
def test_every_send_has_its_receive_and_every_sequence_crosses_once(world: tuple[Cluster, Plan]) -> None:
    _, random = world
    program = compile_plan(random)
    sent: Counter[tuple[object, ...]] = Counter()
    received: Counter[tuple[object, ...]] = Counter()
    crossed: Counter[tuple[int, str, int, int]] = Counter()
    for lane in program.lanes:
        for i in lane.instructions:
            match i:
                case SendActivation(m, layer, peer, share) | SendGradient(m, layer, peer, share):
                    forward = isinstance(i, SendActivation)
                    sent[forward, m, layer, lane.name, peer, share] += 1
                    for sequence in range(*share):
                        crossed[lane.pipeline, f"{m}{forward}", layer, sequence] += 1
                case RecvActivation(m, layer, peer, share) | RecvGradient(m, layer, peer, share):
                    received[isinstance(i, RecvActivation), m, layer, peer, lane.name, share] += 1
    assert sent == received
    assert set(crossed.values()) <= {1}
    # Between layer ranges that follow one another on one stage nothing is sent.
    per_direction = sum(p.sequences * sum(a != b for (a, _), (b, _) in pairwise(p.chunks)) for p in random.pipelines)
    assert len(crossed) == 2 * per_direction * random.sequence_slices


@given(worlds())
def test_every_layer_goes_forward_and_backward_once_for_every_micro_batch(world: tuple[Cluster, Plan]) -> None:
    halves = SCHEDULES[world[1].schedule].splits_backward
    for lane in compile_plan(world[1]).lanes:
        kinds = (Forward, BackwardInput, BackwardWeight) if halves else (Forward, Backward)
        assert {type(i) for i in lane.instructions if isinstance(i, Compute)} == set(kinds)
        held = [layer for layers in lane.layers for layer in range(*layers)]
        numbers = range(lane.micro_batches * lane.sequence_slices)
        for kind in kinds:
            done = Counter((i.micro_batch, layer) for i in lane.instructions if isinstance(i, kind) for layer in range(*i.layers))
            assert done == Counter({(m, layer): 1 for m in numbers for layer in held})
            assert {i.micro_batch for i in lane.instructions if isinstance(i, kind)} == set(numbers)
        assert sum(isinstance(i, OptimizerStep) for i in lane.instructions) == 1


@given(worlds())
def test_what_several_lanes_hold_is_reduced_by_all_of_them(world: tuple[Cluster, Plan]) -> None:
    _, random = world
    program = compile_plan(random)
    n, tied = random.transformer.layers, random.transformer.tied_embeddings
    holders: dict[object, set[str]] = {
        layer: {x.name for x in program.lanes if any(layer in range(*layers) for layers in x.layers)} for layer in range(n)
    }
    holders["embedding"] = {x.name for x in program.lanes if x.embedding or (x.head and tied)}
    holders["head"] = {x.name for x in program.lanes if x.head}
    times = {p: pipe.micro_batches if random.zero_stage >= 2 else 1 for p, pipe in enumerate(random.pipelines)}
    for what, names in holders.items():
        for lane in program.lanes:
            reduced = [
                i
                for i in lane.instructions
                if isinstance(i, ReduceGradients)
                and (
                    what in range(*i.layers) if isinstance(what, int) else i.layers == ((0, 0) if what == "embedding" else (n, n))
                )
            ]
            often = times[lane.pipeline] if isinstance(what, int) else 1  # the ends are summed once, over all micro-batches
            assert len(reduced) == (often if lane.name in names and len(names) * random.context_parallel > 1 else 0)
            assert all(set(program.members[i]) == names for i in reduced)


@given(worlds())
def test_sharded_parameters_are_gathered_before_they_are_used_again(world: tuple[Cluster, Plan]) -> None:
    _, random = world
    n = random.transformer.layers
    for lane in compile_plan(random).lanes:
        reduced = {i.layers for i in lane.instructions if isinstance(i, ReduceGradients)}
        after = [i.layers for i in lane.instructions if isinstance(i, GatherParameters) and i.micro_batch is None]
        before = Counter(
            (i.micro_batch, i.backward, i.layers)
            for i in lane.instructions
            if isinstance(i, GatherParameters) and i.micro_batch is not None
        )
        ends = {layers for layers in reduced if layers in ((0, 0), (n, n))}
        expected = {0: set(), 1: reduced, 2: reduced, 3: ends}[random.zero_stage]
        assert after == sorted(expected)
        at_work = [(m, b, layers) for m in range(lane.micro_batches) for b in (False, True) for layers in reduced - ends]
        assert before == (Counter(at_work) if random.zero_stage == 3 else Counter())


@given(worlds())
def test_all_lanes_come_to_their_common_collectives_in_one_order(world: tuple[Cluster, Plan]) -> None:
    program = compile_plan(world[1])
    orders = [[i for i in lane.instructions if isinstance(i, (ReduceGradients, GatherParameters))] for lane in program.lanes]
    for a, b in combinations(orders, 2):
        assert [i for i in a if i in set(b)] == [i for i in b if i in set(a)]


@given(worlds())
def test_the_buckets_of_a_layer_are_the_same_on_all_lanes_that_hold_it(world: tuple[Cluster, Plan]) -> None:
    _, random = world
    program = compile_plan(random)
    by_layer: dict[int, set[tuple[int, int]]] = {}
    for lane in program.lanes:
        assert all(a[1] <= b[0] for a, b in pairwise(lane.buckets))
        for bucket in lane.buckets:
            for layer in range(*bucket):
                by_layer.setdefault(layer, set()).add(bucket)
    assert all(len(buckets) == 1 for buckets in by_layer.values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair))), min_size=1, max_size=5))
def test_the_common_refinement_is_the_coarsest_that_every_range_is_made_of(cuts: list[tuple[int, int]]) -> None:
    parts = common_refinement(cuts)
    assert all(a < b for a, b in parts) and all(a[1] <= b[0] for a, b in pairwise(parts))
    bounds = {bound for cut in cuts for bound in cut}
    assert {bound for part in parts for bound in part} <= bounds
    for start, stop in cuts:
        inside = [part for part in parts if start <= part[0] and part[1] <= stop]
        assert sorted(layer for part in inside for layer in range(*part)) == list(range(start, stop))


# --- What cannot be compiled -----------------------------------------------------------------------------------------

PLAIN = plan(model(4), pipeline(stage(0, 2, "a/0 a/1"), stage(2, 4, "a/2 a/3"), micro_batches=2))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"expert_parallel": 2}, "expert_parallel divides the experts evenly, but m has none, and it is 2"),
        (
            {"shard_group": 2},
            "shard_group 2 must divide the number of replicas of every layer, but layers 0 to 0 have 1; accepted: null (all "
            "replicas), or a divisor",
        ),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_line(change: dict[str, object], error: str) -> None:
    with pytest.raises(InputError) as caught:
        compile_plan(replace(PLAIN, **change))  # type: ignore[arg-type]
    assert str(caught.value) == error


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_zero_2_and_3_need_pipelines_of_equal_cuts_and_micro_batches(zero_stage: int) -> None:
    first = pipeline(stage(0, 2, "a/0"), stage(2, 4, "a/1"), micro_batches=2)
    other_cut = pipeline(stage(0, 1, "b/0"), stage(1, 4, "b/1"), micro_batches=2)
    other_count = pipeline(stage(0, 2, "b/0"), stage(2, 4, "b/1"), micro_batches=3)
    for second in (other_cut, other_count):
        with pytest.raises(InputError, match=f"^zero_stage {zero_stage} shares .* but they differ; accepted: zero_stage 0 or 1$"):
            compile_plan(plan(model(4), first, second, zero_stage=zero_stage))
    other_degree = pipeline(stage(0, 2, "b/0 b/1", sequences=2), stage(2, 4, "b/2", "b/3"), micro_batch=2, micro_batches=2)
    dry_run(compile_plan(plan(model(4), first, other_degree, zero_stage=zero_stage)))


# --- Plans of other programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PEER_PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_a_plan_that_another_program_found_compiles(path: Path) -> None:
    found = read_plan(path)
    cluster = read_cluster(PEER_PLANS / f"{found.cluster}.yaml")
    assert len({cluster.device(device).name for device in found.devices}) == len(found.devices)
    program = compile_plan(found)
    dry_run(program)
    assert parse_program(program_text(program)) == program
    assert parse_plan(found.to_json()) == found


def test_the_plans_of_other_programs_are_all_there() -> None:
    assert len(list(PEER_PLANS.glob("*.json"))) == 25
    assert {read_plan(path).cluster for path in PEER_PLANS.glob("*.json")} == {path.stem for path in PEER_PLANS.glob("*.yaml")}
