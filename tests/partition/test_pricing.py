"""The quick price: exact where nothing contends, near the simulation elsewhere, and of the same order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from partition.drafts import Draft, Settings, make_plan, stage, updated_parameters
from partition.layers import even_split, ranges
from partition.pricing import FEW_STAGES, Course, Message, Pricing, schedule_ends_s, schedule_period_s
from partition.room import Room
from sim.cost.compute import ComputeCost
from sim.cost.memory import host_bytes, host_parameter_bytes
from sim.engine import simulate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Nic
from sim.spec.compile import compile_plan
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline
from sim.spec.program import Backward, Forward
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node


def grid(names: list[str], depth: int, micro_batches: int, layers: int, degree: int = 1, size: int = 1, amount: int = 0) -> Draft:
    """Equal pipelines over consecutive devices, in Megatron-LM's order."""
    data = len(names) // (depth * degree)
    cuts = ranges(even_split(layers, depth))
    return tuple(
        Pipeline(
            size,
            micro_batches,
            tuple(
                stage(
                    names[(s * data + d) * degree : (s * data + d + 1) * degree],
                    cut,
                    size,
                    amount=min(amount, 2 * (cut[1] - cut[0])),
                )
                for s, cut in enumerate(cuts)
            ),
        )
        for d in range(data)
    )


def names(world: Cluster) -> list[str]:
    return [device.name for device in world.devices]


def test_equal_stages_without_messages_take_m_plus_p_minus_1_slots() -> None:
    #   stage 0   F F F F B F B B ...      p = 4 stages, m micro-batches: (m + p - 1) (F + B)
    forward, backward, waits = [1.0] * 4, [2.0] * 4, [0.0] * 3
    assert schedule_period_s("1f1b", forward, backward, waits) == 3.0
    assert schedule_period_s("gpipe", forward, backward, waits) == 3.0


def test_two_stages_of_1f1b_pay_half_of_both_messages_and_gpipe_none() -> None:
    assert schedule_period_s("1f1b", [1.0, 1.0], [2.0, 2.0], [0.5]) == 3.5
    assert schedule_period_s("gpipe", [1.0, 1.0], [2.0, 2.0], [0.5]) == 3.0


def test_a_light_stage_hides_the_message_beside_a_heavy_one() -> None:
    assert schedule_period_s("1f1b", [1.0, 0.5], [2.0, 1.0], [0.5]) == 3.0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_one_pipeline_inside_a_node_costs_what_its_simulation_does(schedule: str, depth: int) -> None:
    world = cluster(node("a", "A100-80GB-SXM", depth, "nvlink"))
    work, settings = job(batch=12), Settings(schedule=schedule)
    draft = grid(names(world), depth, 12, TINY.layers)
    price_s = Pricing(world, work).price_s(draft, settings)
    # The optimizer's step is left out; it is the last thing that the simulation does.
    trace = simulate(make_plan(world, work, draft, settings), world)
    steps = max(span.end_s - span.start_s for span in trace.spans if type(span.instruction).__name__ == "OptimizerStep")
    assert price_s == pytest.approx(trace.iteration_s - steps, rel=0.02)


def test_the_period_is_that_of_a_simulation_across_nodes() -> None:
    # Stages of unequal length and messages as long as their work: 60 more micro-batches take 60 more periods.
    world = cluster(*(node(name, "RTX4090", 1) for name in "abcd"))
    pricing = Pricing(world, job(SMALL))
    cuts = ranges([2, 4, 3, 3])
    took = []
    for micro_batches in (60, 120):
        draft = (Pipeline(1, micro_batches, tuple(stage([n], cut, 1) for n, cut in zip(names(world), cuts, strict=True))),)
        plan = make_plan(world, job(SMALL, batch=micro_batches), draft, Settings())
        took.append(simulate(plan, world).iteration_s)
    period_s = pricing.course(draft[0], Settings()).ends()[1]
    assert (took[1] - took[0]) / 60 == pytest.approx(period_s, rel=0.1)


def test_the_seconds_of_a_stage_are_those_of_the_simulation() -> None:
    world = mixed()
    work, pricing = job(), Pricing(world, job())
    settings = Settings(sequence_parallel=True)
    devices = [("slow/0", "slow/1"), ("fast/0", "fast/1")]
    draft = (Pipeline(2, 8, tuple(stage(d, cut, 2, amount=4) for d, cut in zip(devices, [(0, 3), (3, 8)], strict=True))),)
    plan = make_plan(world, work, draft, settings)
    cost, course = ComputeCost(plan, world), pricing.course(draft[0], settings)
    for s, lane in enumerate(compile_plan(plan).lanes):
        for kind, seconds in ((Forward, course.forward_s[s]), (Backward, course.backward_s[s])):
            instruction = kind(0, lane.layers[0])
            expected = cost.seconds(lane, instruction)
            for collective in cost.collectives(lane, instruction):
                expected += pricing._collective_s(collective, lane.devices)
            assert seconds == pytest.approx(expected, rel=1e-9)


def test_prices_rank_plans_as_their_simulations_do() -> None:
    world = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 4))
    work = job(SMALL, 2048, 32)
    judge, pricing = simulation(world, work), Pricing(world, work)
    prices, simulated = [], []
    for depth, degree, size, amount in [
        (1, 1, 1, 0),
        (2, 1, 1, 0),
        (4, 1, 1, 0),
        (8, 1, 1, 0),
        (8, 1, 4, 3),
        (2, 2, 2, 0),
        (4, 2, 1, 6),
        (2, 4, 1, 0),
        (1, 4, 2, 6),
    ]:
        data = 8 // (depth * degree)
        draft = grid(names(world), depth, 32 // (data * size), SMALL.layers, degree, size, amount)
        verdict = judge(make_plan(world, work, draft, Settings()))
        if isinstance(verdict, Cost):
            prices.append(pricing.price_s(draft, Settings()))
            simulated.append(verdict.iteration_s)
    assert len(prices) >= 7
    ratios = np.array(prices) / np.array(simulated)
    assert ratios.min() > 0.75
    assert ratios.max() < 1.25
    ranks = [np.argsort(np.argsort(values)) for values in (prices, simulated)]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] > 0.85


def test_a_step_in_the_hosts_memory_costs_what_it_does_in_the_simulation() -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX3090", 2)), job(SMALL)
    draft = grid(["a/0", "a/1", "a/2", "b/0"], 2, 8, SMALL.layers)
    prices, simulated = {}, {}
    for offload in (False, True):
        settings = Settings(offload_optimizer=offload)
        prices[offload] = Pricing(world, work).price_s(draft, settings)
        simulated[offload] = simulate(make_plan(world, work, draft, settings), world).iteration_s
    assert simulated[True] - simulated[False] > 0.02
    assert prices[True] - prices[False] == pytest.approx(simulated[True] - simulated[False], rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_what_each_device_updates_is_as_in_the_memory_of_its_host(tied: bool) -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX3090", 4)), job(replace(SMALL, tied_embeddings=tied))
    stages = tuple(stage(names, cut, 1) for names, cut in ((("a/0", "a/1"), (0, 5)), (("b/0",), (5, 9)), (("b/1",), (9, 12))))
    others = tuple(stage(names, cut, 1) for names, cut in ((("a/2",), (0, 2)), (("b/2", "b/3"), (2, 12))))
    draft = (Pipeline(1, 8, stages), Pipeline(1, 8, others))
    need: dict[str, float] = {}
    for pipeline in draft:
        for s, part in enumerate(pipeline.stages):
            first, last = s == 0, s == len(pipeline.stages) - 1
            own = updated_parameters(work, len(part.devices), part.layer_count, first, last, 2)
            for name in part.devices:
                need[name[0]] = need.get(name[0], 0.0) + own * host_parameter_bytes("adamw")
    known = host_bytes(make_plan(world, work, draft, Settings(offload_optimizer=True)))
    assert need == pytest.approx(known, rel=1e-6)
    for lack, fits in ((-1024, False), (1024, True)):
        nodes = tuple(replace(one, host_memory_bytes=known[one.name] + lack) for one in world.nodes)
        limited = world.with_nodes(nodes)
        assert Room(limited, work).fits_hosts(draft, Settings(offload_optimizer=True)) == fits
        assert Room(limited, work).fits_hosts(draft, Settings())


def test_the_gradients_of_tied_embeddings_cost_even_one_pipeline() -> None:
    world = cluster(node("a", "RTX4090", 1), node("b", "RTX4090", 1))
    tied = replace(TINY, name="tied", tied_embeddings=True)
    draft = grid(names(world), 2, 16, TINY.layers)
    prices = {model.name: Pricing(world, job(model)).price_s(draft, Settings()) for model in (TINY, tied)}
    # 32,000 x 1,024 gradients of 4 bytes go half of the way round over 1.15 GB/s, and half as many bytes come back.
    exchange_s = 32_000 * 1_024 * (4 + 2) / 2 / (1.25e9 * 0.92)
    assert prices["tied"] - prices["tiny"] == pytest.approx(exchange_s, rel=0.25)


def test_gradients_between_nodes_cost_more_than_inside_them() -> None:
    world = cluster(node("a", "RTX4090", 2), node("b", "RTX4090", 2))
    a0, a1, b0, b1 = names(world)
    pricing = Pricing(world, job())

    def pair(first: list[str], second: list[str]) -> Draft:
        cuts = [(0, 4), (4, 8)]
        return tuple(
            Pipeline(1, 8, tuple(stage([n], cut, 1) for n, cut in zip(devices, cuts, strict=True))) for devices in (first, second)
        )

    inside = pricing.price_s(pair([a0, b0], [a1, b1]), Settings())
    across = pricing.price_s(pair([a0, a1], [b0, b1]), Settings())
    assert inside < across


@settings(max_examples=30)
@given(data=strategies.data(), zero_stage=strategies.sampled_from([0, 1]))
def test_an_exchange_between_nodes_costs_what_it_does_between_others_like_them(
    data: strategies.DataObject, zero_stage: int
) -> None:
    cards = Nic("infiniband", 12.5e9, count=2)
    nodes = [replace(node(f"n{n}", "RTX4090" if n < 3 else "RTX3080Ti", 4), nic=cards) for n in range(5)]
    world = cluster(*nodes)
    draft = grid(list(data.draw(strategies.permutations(names(world)))), 2, 4, TINY.layers)
    known, alone = Pricing(world, job()), Pricing(world, job())
    alone._sorts = replace(alone._sorts, nodes=())  # every node is of its own sort
    asked = Settings(zero_stage=zero_stage)
    for turned in (draft, draft[::-1]):  # the second time what was found out before is used
        assert known.price_s(turned, asked) == pytest.approx(alone.price_s(turned, asked), rel=1e-3)


@settings(max_examples=30)
@given(data=strategies.data(), parallel=strategies.booleans())
def test_a_message_takes_what_it_does_between_others_like_them(data: strategies.DataObject, parallel: bool) -> None:
    cards = Nic("infiniband", 12.5e9, count=2)
    world = cluster(*(replace(node(f"n{n}", "RTX4090" if n < 2 else "RTX3080Ti", 4), nic=cards) for n in range(4)))
    pricing, alone, asked = Pricing(world, job()), Pricing(world, job()), Settings(sequence_parallel=parallel)
    for _ in range(4):
        order = data.draw(strategies.permutations(names(world)))
        sender, receiver = tuple(order[: data.draw(strategies.sampled_from([1, 2, 4]))]), tuple(order[4:6])
        here, there = pricing.message_alike(sender, receiver, asked), alone.message(sender, receiver, asked)
        assert here.seconds(1e6, 3) == pytest.approx(there.seconds(1e6, 3), rel=1e-12)


@given(
    stages=strategies.lists(strategies.tuples(*[strategies.floats(0.01, 1.0)] * 3), min_size=2, max_size=FEW_STAGES + 6),
    schedule=strategies.sampled_from(["1f1b", "eager-1f1b"]),
    data=strategies.data(),
)
def test_the_period_is_the_largest_mean_over_every_run_of_stages(
    stages: list[tuple[float, float, float]], schedule: str, data: strategies.DataObject
) -> None:
    forward, backward, waits = (list(each) for each in zip(*stages, strict=True))
    each = 2 if schedule == "eager-1f1b" else 1
    more = strategies.lists(strategies.integers(-each, 3), min_size=len(stages) - 1, max_size=len(stages) - 1)
    ahead = data.draw(strategies.just([]) | more)
    largest = max(
        (sum(forward[i:j]) + sum(backward[i:j]) + 2 * sum(waits[i : j - 1])) / (each * (j - i - 1) + sum(ahead[i : j - 1]) + 1)
        for j in range(1, len(stages) + 1)
        for i in range(j)
    )
    assert schedule_period_s(schedule, forward, backward, waits[:-1], ahead) == pytest.approx(largest)


@given(
    stages=strategies.lists(strategies.tuples(*[strategies.floats(0.01, 1.0)] * 4), min_size=2, max_size=FEW_STAGES + 6),
)
def test_gradients_do_not_wait_for_the_weight_halves_of_later_stages(stages: list[tuple[float, float, float, float]]) -> None:
    forward, inputs, weight, waits = (list(each) for each in zip(*stages, strict=True))
    backward = [i + w for i, w in zip(inputs, weight, strict=True)]
    largest = max(
        (sum(forward[i:j]) + sum(inputs[i:j]) + weight[i] + 2 * sum(waits[i : j - 1])) / (j - i)
        for j in range(1, len(stages) + 1)
        for i in range(j)
    )
    assert schedule_period_s("split-1f1b", forward, backward, waits[:-1], (), weight) == pytest.approx(largest)


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "weight_s", "expected_s"),
    [
        ((1.0, 1.0, 3.0), (2.0, 2.0, 6.0), (), 6.0),  # the ways to the last stage, and back from it
        ((3.0, 1.0, 1.0), (6.0, 2.0, 2.0), (), 0.0),  # stages behind the slowest fill and drain beside it
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (), 6.0),
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (1.0, 1.0, 1.0), 4.0),  # gradients go on before weight halves
    ],
)
def test_what_a_pipeline_takes_besides_its_slowest_stage(
    forward_s: tuple[float, ...], backward_s: tuple[float, ...], weight_s: tuple[float, ...], expected_s: float
) -> None:
    schedule = "split-1f1b" if weight_s else "1f1b"
    course = Course(schedule, 10, forward_s, backward_s, ((Message(0.0, 0.0, ()),) * 2,) * 2, 0, (), weight_s)
    assert course.least_fill_s() == pytest.approx(expected_s)
    assert course.least_fill_s() <= course.ends()[0] + 1e-12


def replayed_s(forward: list[float], backward: list[float], waits: list[float], micro_batches: int, weight: list[float]) -> float:
    """When the last backward of 1F1B ends: every pass begins when its stage is free and its message is there."""
    depth, sent, free, done = len(forward), dict[tuple[str, int, int], float](), [0.0] * len(forward), [0] * len(forward)
    orders = []
    for s in range(depth):
        first = min(depth - s - 1, micro_batches)
        order = [("forward", m) for m in range(first)]
        for m in range(micro_batches):
            order += [("forward", first + m)] if first + m < micro_batches else []
            order += [("backward", m)]
        orders.append(order)
    while any(done[s] < len(orders[s]) for s in range(depth)):
        for s, order in enumerate(orders):
            while done[s] < len(order):
                sort, m = order[done[s]]
                other = s - 1 if sort == "forward" else s + 1
                come_s = 0.0
                if 0 <= other < depth:
                    if (sort, other, m) not in sent:
                        break
                    come_s = sent[sort, other, m] + waits[min(s, other)]
                begin_s = max(free[s], come_s)
                free[s] = begin_s + (forward[s] if sort == "forward" else backward[s])
                sent[sort, s, m] = free[s] - (weight[s] if sort == "backward" else 0.0)
                done[s] += 1
    return max(free)


@pytest.mark.parametrize(
    ("halves", "wait_s", "most"), [(False, 0.0, 0.003), (True, 0.0, 0.001), (False, 0.2, 0.003), (True, 0.2, 0.001)]
)
def test_unequal_stages_end_when_a_replay_of_their_passes_does(halves: bool, wait_s: float, most: float) -> None:
    rng, errors = np.random.default_rng(0), []
    for _ in range(300):
        depth = int(rng.integers(2, 9))
        micro_batches = int(rng.integers(depth, 33))
        forward = rng.uniform(0.6, 1.4, depth)
        backward = forward * rng.uniform(2.0, 2.5, depth)
        waits, weight = rng.uniform(0.0, wait_s, depth - 1) if wait_s else np.zeros(depth - 1), halves * backward / 2
        passes = forward.tolist(), backward.tolist(), waits.tolist()
        schedule = "split-1f1b" if halves else "1f1b"
        fill_s, period_s = schedule_ends_s(schedule, micro_batches, *passes, (), weight.tolist() if halves else ())
        errors.append((fill_s + micro_batches * period_s) / replayed_s(*passes, micro_batches, weight.tolist()) - 1)
    assert np.abs(errors).mean() < most


@pytest.mark.parametrize(
    ("forward", "backward", "expected_s"),
    [
        ([3.0, 1.0, 1.0], [6.0, 2.0, 2.0], 90.0),  # both others end while the first does forwards ahead
        ([1.0, 3.0, 1.0], [2.0, 6.0, 2.0], 93.0),  # so does the last; the first fills and drains
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 36.0),
        (
            [2.0, 2.0, 2.0, 1.0],
            [4.0, 4.0, 4.0, 2.0],
            73.0,
        ),  # the last begins with a stage's second forward, and ends a second later
    ],
)
def test_what_lies_behind_the_slowest_stage_is_hidden_by_its_other_passes(
    forward: list[float], backward: list[float], expected_s: float
) -> None:
    waits = [0.0] * (len(forward) - 1)
    fill_s, period_s = schedule_ends_s("1f1b", 10, forward, backward, waits)
    assert fill_s + 10 * period_s == pytest.approx(expected_s)
    assert replayed_s(forward, backward, waits, 10, [*waits, 0.0]) == pytest.approx(expected_s)
