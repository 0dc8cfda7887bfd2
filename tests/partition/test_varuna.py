"""Varuna's pipelines of equal stages, and the choice among them by its own simulation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import partition
from partition.drafts import all_under, make_plan
from partition.planners.varuna import MICRO_BATCHES, SETTINGS, Configuration, Morphing, simulated_s
from partition.room import Room
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.counts import total_parameters
from sim.spec.job import Job
from sim.spec.judge import Verdict
from sim.spec.plan import Plan
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node


def judged(world: Cluster, work: Job) -> list[Plan]:
    """Every plan that the planner has judged, in its order."""
    judge, seen = simulation(world, work), []

    def recording(plan: Plan) -> Verdict:
        seen.append(plan)
        return judge(plan)

    partition.plan(world, work, "varuna", judge=recording, budget_s=600)
    return seen


# --- The simulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 16])
def test_equal_stages_without_messages_take_m_plus_p_minus_1_slots(depth: int, micro_batches: int) -> None:
    assert simulated_s([(1.0, 3.0)] * depth, [0.0] * (depth - 1), micro_batches) == (micro_batches + depth - 1) * 4.0


def test_a_pipeline_of_two_is_the_one_drawn() -> None:
    # F = 1, B = 2, and messages of 1; three micro-batches. Stage 0 may hold two of them, stage 1 one.
    #   time     0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
    #   stage 0  F F . . . . B B F B B  .  .  .  B  B     gradients come at 6, 9 and 14
    #   stage 1  . . F B B F B B . . F  B  B  .  .  .     activations come at 2, 3 and 10
    assert simulated_s([(1.0, 2.0), (1.0, 2.0)], [1.0], 3) == 16.0


def test_a_stage_that_has_room_goes_on_before_it_goes_back() -> None:
    # The slow stage 0 finds at 9 the gradient of micro-batch 1 and the input of micro-batch 2: 1F1B's turn is forward.
    #   time     0     3     6     9     12    15
    #   stage 0  F F F F F F B B B F F F B B B B B B
    #   stage 1  . . . F B . F B . . . . F B . . . .
    assert simulated_s([(3.0, 3.0), (1.0, 1.0)], [0.0], 3) == 18.0


def test_a_stage_without_input_goes_back_early() -> None:
    # Stage 1 of three may hold two micro-batches, but the second comes at 8 only, and the first one's gradient is there at 6.
    # Were it to wait for its turn, both of its backward passes of 4 would come after 9, and end the iteration at 17.5.
    #   time     0       4       8       12      16
    #   stage 0  F F F F F F F F . . b . . . . . b       half a second each
    #   stage 1  . . . . F . B B B B F . B B B B .
    #   stage 2  . . . . . x . . . . . x . . . . .       half a second there, half back
    assert simulated_s([(4.0, 0.5), (1.0, 4.0), (0.5, 0.5)], [0.0, 0.0], 2) == 16.5


seconds = st.floats(0.1, 5.0)


@given(
    passes=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
    message=st.floats(0.0, 3.0),
    micro_batches=st.integers(1, 9),
)
def test_a_pipeline_takes_no_less_than_its_busiest_stage_and_no_more_than_all_in_turn(
    passes: list[tuple[float, float]], message: float, micro_batches: int
) -> None:
    found = simulated_s(passes, [message] * (len(passes) - 1), micro_batches)
    once = sum(f + b for f, b in passes) + 2 * message * (len(passes) - 1)
    busiest = max(f + b for f, b in passes)
    assert max(once, micro_batches * busiest) * (1 - 1e-9) <= found <= micro_batches * once * (1 + 1e-9)


# --- The choice --------------------------------------------------------------------------------------------------------


def configurations(world: Cluster, work: Job, profiled: str, names: list[str]) -> Iterator[Configuration]:
    """Every depth and every micro-batch on these GPUs, as far as they fit in memory."""
    morphing = Morphing(world, work)
    for depth in range(1, min(work.model.layers, len(names)) + 1):
        for size in (size for size in MICRO_BATCHES if work.global_batch % size == 0):
            data = min(len(names) // depth, work.global_batch // size)
            pipelines = tuple(tuple(names[d * depth + s] for s in range(depth)) for d in range(data))
            found = Configuration(pipelines, morphing.cut(profiled, depth), size, profiled)
            if Room(world, work).fits(morphing.draft(found), SETTINGS):
                yield found


def sequence_s(world: Cluster, work: Job, found: Configuration) -> float:
    """Seconds of the longest forward pass for each sequence."""
    pricing = Morphing(world, work).pricing
    part = pricing.stage((found.profiled,), found.micro_batch, SETTINGS)
    last = len(found.layers) - 1
    return max(part.forward_s(n, s == 0, s == last) for s, n in enumerate(found.layers)) / found.micro_batch


def test_the_first_plan_is_the_fastest_of_all_depths_by_its_own_simulation() -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 3)), job(SMALL, 512, 32)
    names, morphing = [device.name for device in world.devices], Morphing(world, work)
    chosen: dict[int, Configuration] = {}
    fitting = list(configurations(world, work, "a/0", names))
    for found in fitting:
        alike = [other for other in fitting if len(other.layers) == len(found.layers)]
        plateau_s = 1.05 * min(sequence_s(world, work, other) for other in alike)
        depth = len(found.layers)
        if sequence_s(world, work, found) <= plateau_s and depth not in chosen:  # the smallest comes first
            chosen[depth] = found
    assert len(chosen) >= 5
    best = min(chosen.values(), key=morphing.seconds)
    assert judged(world, work)[0] == make_plan(world, work, morphing.draft(best), SETTINGS)


def test_larger_micro_batches_are_taken_only_where_they_speed_a_sequence_up() -> None:
    names = [f"a/{i}" for i in range(4)]
    taken = {}
    for length in (32, 4096):
        world, work = cluster(node("a", "A100-80GB-SXM", 4, "nvlink")), job(SMALL, length, 64)
        configuration = Morphing(world, work).configure(names, 4)
        assert configuration is not None
        taken[length] = configuration.micro_batch
    # 32 tokens leave an A100 idle, which 4,096 do not.
    assert taken[4096] <= 2
    assert taken[32] == 16


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8])
def test_the_longest_forward_pass_is_the_shortest_possible(depth: int) -> None:
    world, work = mixed(), job(TINY)
    part = Morphing(world, work).pricing.stage(("slow/0",), 1, SETTINGS)

    def longest(counts: tuple[int, ...]) -> float:
        return max(part.forward_s(n, s == 0, s == depth - 1) for s, n in enumerate(counts))

    all_cuts = [
        tuple(b - a for a, b in pairwise((0, *bounds, TINY.layers))) for bounds in combinations(range(1, TINY.layers), depth - 1)
    ]
    assert longest(Morphing(world, work).cut("slow/0", depth)) == pytest.approx(min(longest(cut) for cut in all_cuts), rel=1e-12)


def test_stages_are_single_gpus_and_pipelines_follow_the_file() -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 3)), job(SMALL)
    seen = judged(world, work)
    names = [device.name for device in world.devices]
    assert len(seen) >= 2
    for found in seen:
        depth = len(found.pipelines[0].stages)
        assert all(len(stage.devices) == 1 for p in found.pipelines for stage in p.stages)
        assert list(found.devices) == names[: 7 // depth * depth]
        assert len({tuple(stage.layers for stage in p.stages) for p in found.pipelines}) == 1
        assert [stage.recompute for stage in found.pipelines[0].stages] == ["full"] * (depth - 1) + ["none"]
        assert found.zero_stage == 0


def test_micro_batches_that_do_not_divide_go_to_the_first_pipelines() -> None:
    world, work = cluster(node("a", "RTX4090", 3)), job(batch=7)
    morphing = Morphing(world, work)
    configuration = Configuration((("a/0",), ("a/1",), ("a/2",)), (8,), 1, "a/0")
    assert [pipeline.micro_batches for pipeline in morphing.draft(configuration)] == [3, 2, 2]


def test_a_slow_kind_is_left_out_where_it_holds_the_others_up() -> None:
    # Four RTX 4090 of 165 TFLOP/s beside one T4 of 65, over 10 Gbit/s.
    world, work = cluster(node("slow", "T4", 1), node("fast", "RTX4090", 4)), job(TINY, precision="fp16")
    assert list(Morphing(world, work).pools(world.nodes)) == [
        [f"fast/{i}" for i in range(4)],
        ["slow/0", *(f"fast/{i}" for i in range(4))],
    ]
    result = partition.plan(world, work, "varuna", budget_s=600)
    assert result.plan is not None
    assert all(name.startswith("fast/") for name in result.plan.devices)


def test_the_gradients_of_all_stages_share_their_card() -> None:
    world, work = cluster(node("a", "RTX4090", 2), node("b", "RTX4090", 2)), job()
    morphing = Morphing(world, work)
    together = Configuration((("a/0", "a/1"), ("b/0", "b/1")), (4, 4), 1, "a/0")
    # Two rings of two GPUs over a card of 1.15 GB/s: each direction carries every gradient of 4 bytes once.
    expected = 4 * total_parameters(TINY) / (1.25e9 * 0.92)
    assert morphing._gradients_s(together) == pytest.approx(expected, rel=0.02)


def test_an_iteration_takes_the_passes_of_the_longest_pipeline_and_the_gradients() -> None:
    # Seven micro-batches over two pipelines of one stage: four passes there and back, without recomputation.
    world, work = cluster(node("a", "RTX4090", 1), node("b", "RTX4090", 1)), job(batch=7)
    morphing = Morphing(world, work)
    part = morphing.pricing.stage(("a/0",), 1, SETTINGS)
    once = part.forward_s(8, True, True) + part.backward_s(all_under("none", 8), True, True)
    found = morphing.seconds(Configuration((("a/0",), ("b/0",)), (8,), 1, "a/0"))
    assert found == pytest.approx(4 * once + 4 * total_parameters(TINY) / (1.25e9 * 0.92), rel=1e-3)


def test_all_but_the_last_stage_recompute() -> None:
    # One micro-batch goes through both stages and back; the first one's five layers cost a forward pass more.
    world, work = cluster(node("a", "RTX4090", 1), node("b", "RTX4090", 1)), job(batch=1)
    morphing = Morphing(world, work)
    part = morphing.pricing.stage(("a/0",), 1, SETTINGS)
    passes = part.forward_s(5, True, False) + part.forward_s(3, False, True)
    passes += part.backward_s(all_under("full", 5), True, False) + part.backward_s(all_under("none", 3), False, True)
    activation_bytes = 1024 * TINY.hidden * 2
    messages = 2 * activation_bytes / (1.25e9 * 0.92)
    found = morphing.seconds(Configuration((("a/0", "b/0"),), (5, 3), 1, "a/0"))
    assert found == pytest.approx(passes + messages, rel=0.02)
    assert part.backward_s(all_under("full", 5), True, False) > part.backward_s(all_under("none", 5), True, False) * 1.2


def test_the_profile_of_several_kinds_is_that_of_the_slowest() -> None:
    world, work = mixed(), job(SMALL)
    found = Morphing(world, work).configure([device.name for device in world.devices], 4)
    assert found is not None
    assert found.profiled == "slow/0"


def test_the_pipeline_that_leaves_its_node_sets_the_pace() -> None:
    world = cluster(node("a", "RTX4090", 3), node("b", "RTX4090", 1))
    both = Morphing(world, job(batch=2))
    found = Configuration((("a/0", "a/1"), ("a/2", "b/0")), (5, 3), 1, "a/0")
    alone = Morphing(world, job(batch=1)).seconds(Configuration((("a/2", "b/0"),), (5, 3), 1, "a/0"))
    assert both.seconds(found) - both._gradients_s(found) == pytest.approx(alone, rel=1e-9)
