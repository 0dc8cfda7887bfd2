"""What a plan takes in time, money and energy, which of two is better, and on which GPUs plans are searched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partition.objective import Ledger, Objective, Outlay, dominates, pools
from sim.cost.price import dollars, energy_j
from sim.spec.cluster import BandwidthMatrix, Cluster, Node
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from tests.partition.small_worlds import TINY, cluster, job, mixed, node

JOB = job()


def priced(name: str, kind: str, gpus: int, price: float | None, idle_watts: float = 10.0, busy_watts: float = 100.0) -> Node:
    made = node(name, kind, gpus)
    gpu = replace(made.gpu, dollars_per_hour=price, idle_watts=idle_watts, busy_watts=busy_watts)
    return replace(made, gpu=gpu)


def plan_on(*devices: str) -> Plan:
    """The plan with one stage on each device."""
    bounds = [TINY.layers * i // len(devices) for i in range(len(devices) + 1)]
    stages = tuple(Stage((Replica((name,), 1),), ((bounds[i], bounds[i + 1]),)) for i, name in enumerate(devices))
    return Plan("world", TINY, JOB.sequence_length, JOB.global_batch, (Pipeline(1, JOB.global_batch, stages),))


def cost_of(on: Cluster, iteration_s: float, busy_s: dict[str, float]) -> Cost:
    """What a judge says of an iteration in which these devices are busy for so long: it counts the whole cluster."""
    tokens = JOB.global_batch * JOB.sequence_length
    energy, rent = energy_j(on, iteration_s, busy_s), dollars(on, iteration_s) or 0.0
    return Cost(iteration_s, tokens / iteration_s, 0.1, 0.1, 0.1, 0.0, {}, energy, rent)


# --- What a plan takes -----------------------------------------------------------------------------------------------


def test_the_gpus_that_a_plan_leaves_out_are_neither_rented_nor_switched_on() -> None:
    # 16 x 1024 tokens in 8 s are 2048 tokens/s. Of the GPUs used, a/0 at 2 $/h is busy for 5 s, and b/1 at 3 $/h for 4 s:
    # 5 x 100 + 3 x 10 and 4 x 200 + 4 x 20 J.
    on = cluster(priced("a", "RTX4090", 2, 2.0), priced("b", "RTX3090", 3, 3.0, 20.0, 200.0))
    took = Ledger(on).outlay(plan_on("a/0", "b/1"), cost_of(on, 8.0, {"a/0": 5.0, "b/1": 4.0}))
    assert took.tokens_per_s == 2048
    assert took.dollars_per_hour == 5.0
    assert took.dollars_per_billion_tokens == pytest.approx(5 / 3600 * 1e9 / 2048)
    assert took.joules_per_token == pytest.approx((500 + 30 + 800 + 80) / (16 * 1024))


def test_dollars_are_not_known_where_some_gpu_has_no_price() -> None:
    on = cluster(priced("a", "RTX4090", 1, 2.0), priced("b", "RTX3090", 1, None))
    took = Ledger(on).outlay(plan_on("a/0"), cost_of(on, 8.0, {}))
    assert (took.dollars_per_hour, took.dollars_per_billion_tokens) == (None, None)
    assert took.joules_per_token == pytest.approx(8 * 10 / (16 * 1024))
    for objective in (Objective("cost"), Objective(max_dollars_per_hour=3.0), Objective(max_dollars_per_billion_tokens=3.0)):
        with pytest.raises(InputError, match=r"no price is known of RTX3090: .* gpu_kinds: \{RTX3090: \{price: 1.2 \$/h\}\}"):
            objective.check(on)
    Objective("energy").check(on)


# --- Which is better -------------------------------------------------------------------------------------------------


def outlay(time_s: float, per_billion: float, joules: float, per_hour: float = 1.0) -> Outlay:
    return Outlay(time_s, 1000 / time_s, per_hour, per_billion, joules)


@pytest.mark.parametrize(("name", "first"), [("throughput", 0), ("cost", 1), ("energy", 2)])
def test_plans_are_ordered_by_the_objective_and_then_so_that_none_is_dominated(name: str, first: int) -> None:
    rank = Objective(name).rank
    better, worse = [5.0, 5.0, 5.0], [5.0, 5.0, 5.0]
    better[first], worse[first] = 4.0, 6.0
    assert rank(outlay(*better)) < rank(outlay(5, 5, 5)) < rank(outlay(*worse))
    for other in {0, 1, 2} - {first}:  # equal in the objective: the one that is better elsewhere comes first
        tied = [5.0, 5.0, 5.0]
        tied[other] = 4.0
        assert rank(outlay(*tied)) < rank(outlay(5, 5, 5))


def test_a_plan_dominates_one_that_is_worse_in_something_and_better_in_nothing() -> None:
    assert dominates(outlay(1, 2, 3), outlay(1, 2, 4))
    assert not dominates(outlay(1, 2, 3), outlay(1, 2, 3))
    assert not dominates(outlay(1, 2, 3), outlay(2, 1, 4))


def test_the_constraint_that_is_missed_by_the_largest_factor_is_told() -> None:
    aim = Objective(min_tokens_per_s=500, max_dollars_per_hour=2.0, max_dollars_per_billion_tokens=10.0)
    assert aim.missed(outlay(2, 10, 0, 2.0)) is None  # just met, all three
    slow = aim.missed(outlay(10, 12, 0))
    assert slow is not None and slow == (5.0, "100 tokens/s", "at least 500 tokens/s")
    dear = aim.missed(outlay(1, 10, 0, 8.0))
    assert dear is not None and dear == (4.0, "$8.00 per hour", "at most $2.00 per hour")
    assert aim.missed(outlay(1, 30, 0)) == (3.0, "$30.00 per billion tokens", "at most $10.00 per billion tokens")
    # With as many digits as tell what is asked for, and that it is not met.
    near = Objective(min_tokens_per_s=500.4).missed(outlay(2, 1, 1))
    assert near is not None and near[1:] == ("500.0 tokens/s", "at least 500.4 tokens/s")
    near = Objective(min_tokens_per_s=500.0001).missed(outlay(2, 1, 1))
    assert near is not None and near[1:] == ("500.0000 tokens/s", "at least 500.0001 tokens/s")
    tiny = Objective(max_dollars_per_billion_tokens=0.001).missed(outlay(1, 114.95, 1))
    assert tiny is not None and tiny[1:] == ("$114.950 per billion tokens", "at most $0.001 per billion tokens")


def test_unknown_objectives_and_constraints_that_are_not_above_zero_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown objective 'costs'; accepted: throughput, cost, energy.*did you mean cost"):
        Objective("costs")
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match=r"min_tokens_per_s is a finite number above zero, but got"):
            Objective(min_tokens_per_s=value)


# --- Which GPUs ------------------------------------------------------------------------------------------------------


def counts(parts: list[Cluster]) -> list[dict[str, int]]:
    return [{node.name: node.gpus for node in part.nodes} for part in parts]


# Cheap at 0.01 $/h of 68 TFLOP/s; dear at 2 $/h of 165.
TWO_PRICES = cluster(
    priced("dear", "RTX4090", 4, 2.0), priced("cheap", "RTX3080Ti", 2, 0.01), priced("more", "RTX3080Ti", 2, 0.01)
)


def test_gpus_that_cost_nothing_are_all_offered() -> None:
    assert pools(mixed(), JOB, Objective()) == [mixed()]
    assert pools(mixed(), JOB, Objective(min_tokens_per_s=5.0)) == [mixed()]


def test_where_gpus_cost_parts_of_each_kind_are_tried_too_the_smallest_first() -> None:
    found = counts(pools(TWO_PRICES, JOB, Objective("cost")))
    assert found == [
        {"cheap": 1},
        {"dear": 1},
        {"cheap": 2},
        {"dear": 2},
        {"cheap": 2, "more": 2},
        {"dear": 4},
        {"dear": 4, "cheap": 2, "more": 2},
    ]


def test_parts_that_rent_for_too_much_are_left_out_and_what_is_left_buys_single_gpus() -> None:
    found = counts(pools(TWO_PRICES, JOB, Objective(max_dollars_per_hour=6.5)))
    assert found[-1] == {"dear": 3, "cheap": 2, "more": 2}  # 6.04 $/h: all that the rent allows, the best kind first
    assert {"dear": 3} in found and {"dear": 4} not in found
    assert pools(TWO_PRICES, JOB, Objective(max_dollars_per_hour=0.005)) == []


def test_nodes_whose_gpus_have_a_measured_rate_each_are_not_divided() -> None:
    names = tuple(device.name for device in TWO_PRICES.devices)
    rates = tuple(tuple(1e9 for _ in names) for _ in names)
    measured = replace(TWO_PRICES, bandwidth_matrix=BandwidthMatrix(names, rates))
    found = counts(pools(measured, JOB, Objective(max_dollars_per_hour=6.5)))
    assert found == [{"cheap": 2}, {"cheap": 2, "more": 2}]


def test_kinds_without_the_precision_are_in_no_part_but_the_whole() -> None:
    on = cluster(priced("a", "V100-16GB-SXM", 2, 0.001), priced("b", "RTX4090", 2, 2.0))
    assert counts(pools(on, JOB, Objective("cost"))) == [{"b": 1}, {"b": 2}, {"a": 2, "b": 2}]
