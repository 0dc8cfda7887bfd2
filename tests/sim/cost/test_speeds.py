"""Devices of their own speeds and links of their own rates, in every judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.bound import Bound, lower_bound
from partition.drafts import Settings
from partition.pricing import Pricing
from sim.cost.compute import ComputeCost
from sim.cost.estimate import Estimate
from sim.cost.estimates import Estimates
from sim.cost.network import Network
from sim.engine import simulate
from sim.spec.cluster import Cluster, LinkOverride, WideAreaLink
from sim.spec.compile import compile_plan
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import Backward, Forward, OptimizerStep
from sim.spec.reading import InputError
from tests.calibration_runs import MIXED, MODEL, random_plans


def one_pipeline(groups: list[tuple[str, ...]], micro_batches: int = 4) -> Plan:
    """A pipeline over groups of devices, in nearly equal parts, whose messages never meet those of another."""
    bounds = [MODEL.layers * i // len(groups) for i in range(len(groups) + 1)]
    stages = tuple(Stage((Replica(group, 1),), ((a, b),)) for group, a, b in zip(groups, bounds, bounds[1:], strict=False))
    return Plan("mixed", MODEL, 64, micro_batches, (Pipeline(1, micro_batches, stages),), precision="fp32")


@pytest.mark.parametrize("instruction", [Forward(0, (0, 4)), Backward(0, (0, 4)), OptimizerStep()])
def test_a_device_of_half_the_speed_computes_twice_as_long(instruction: Forward | Backward | OptimizerStep) -> None:
    plan = one_pipeline([("large-0/0",), ("large-0/1",)])
    slow = replace(MIXED, device_speeds=(("large-0/0", 0.5),))
    lane, other = compile_plan(plan).lanes
    seconds = ComputeCost(plan, MIXED).seconds(lane, instruction)
    assert ComputeCost(plan, slow).seconds(lane, instruction) == pytest.approx(2 * seconds, rel=1e-12)
    if isinstance(instruction, OptimizerStep):
        assert ComputeCost(plan, slow).seconds(other, instruction) == ComputeCost(plan, MIXED).seconds(other, instruction)


def test_a_lane_waits_for_the_slowest_of_its_devices() -> None:
    plan = one_pipeline([("large-0/0", "large-0/1"), ("small-0/0",)])
    lane = compile_plan(plan).lanes[0]
    fast_and_slow = replace(MIXED, device_speeds=(("large-0/0", 1.25), ("large-0/1", 0.8)))
    seconds = ComputeCost(plan, MIXED).seconds(lane, Forward(0, (0, 4)))
    assert ComputeCost(plan, fast_and_slow).seconds(lane, Forward(0, (0, 4))) == pytest.approx(seconds / 0.8, rel=1e-12)


def test_a_link_carries_what_is_overridden_in_its_direction_alone() -> None:
    # centre -> workshop: 200 us of the fabric, and 8 ms in the place of the 5 of wan.
    override = LinkOverride("site:centre>site:workshop", 1e6, 8e-3)
    network = Network(replace(MIXED, link_overrides=(override,)))
    there, back = network.path("large-0/0", "small-0/0"), network.path("small-0/0", "large-0/0")
    assert there.latency_s == pytest.approx(8.2e-3, rel=1e-12) and back.latency_s == pytest.approx(5.2e-3, rel=1e-12)
    assert network.named("site:centre>site:workshop").capacity_bytes_per_s == 1e6
    assert network.named("site:workshop>site:centre").capacity_bytes_per_s == 2.5e6
    assert network.alone_s(network.transfer([("large-0/0", "small-0/0", 1e6)])) == pytest.approx(1 + 8.2e-3, rel=1e-12)


def test_a_card_may_have_a_latency_of_its_own() -> None:
    network = Network(replace(MIXED, link_overrides=(LinkOverride("large-0/nic0>fabric", latency_s=1e-3),)))
    assert network.path("large-0/0", "large-1/0").latency_s == pytest.approx(1.2e-3, rel=1e-12)
    assert network.path("large-1/0", "large-0/0").latency_s == pytest.approx(0.2e-3, rel=1e-12)


def test_a_device_that_is_not_there_has_no_speed() -> None:
    with pytest.raises(InputError, match="devices: 'large-0/2' is not in it"):
        replace(MIXED, device_speeds=(("large-0/2", 1.1),))


def test_a_part_of_a_cluster_keeps_what_is_known_of_its_devices_and_links() -> None:
    known = replace(
        MIXED,
        device_speeds=(("large-0/0", 1.1), ("small-0/0", 0.9)),
        link_overrides=(
            LinkOverride("site:centre>site:workshop", 1e6),
            LinkOverride("large-0/nic0>fabric", 1e6),
            LinkOverride("nvlink>small-1/0", 1e6),
        ),
    )
    part = known.without_nodes({"small-0", "small-1"})
    assert part.device_speeds == (("large-0/0", 1.1),)
    assert [link.name for link in part.link_overrides] == ["large-0/nic0>fabric"]
    Network(part)


speeds = st.floats(0.5, 2.0)


@st.composite
def calibrated(draw: st.DrawFn) -> Cluster:
    """The mixed cluster with speeds of some devices and rates of some links."""
    names = draw(st.sets(st.sampled_from([device.name for device in MIXED.devices]), max_size=5))
    links = ("large-0/nic0>fabric", "fabric>small-0/nic0", "site:centre>site:workshop", "large-0/0>nvlink", "nvlink>small-1/1")
    overridden = draw(st.sets(st.sampled_from(links), max_size=4))
    return replace(
        MIXED,
        device_speeds=tuple((name, draw(speeds)) for name in sorted(names)),
        link_overrides=tuple(
            LinkOverride(name, draw(st.floats(1e6, 1e8)), draw(st.sampled_from([None, 0.0, 3e-3]))) for name in sorted(overridden)
        ),
    )


GROUPS = [
    [("large-0/0",), ("small-1/1",)],
    [("large-0/0",), ("large-0/1",)],
    [("large-0/0", "large-0/1"), ("small-0/0",)],
    [("small-0/0", "small-0/1"), ("large-1/0", "large-1/1")],
    [("large-0/1", "large-1/0")],
]
"""Of two stages, whose messages have each direction to themselves."""


@settings(max_examples=25, deadline=None)
@given(calibrated(), st.sampled_from(GROUPS))
def test_estimate_and_simulation_agree_whatever_the_speeds_and_links(cluster: Cluster, groups: list[tuple[str, ...]]) -> None:
    plan = one_pipeline(groups)
    seconds = simulate(plan, cluster).iteration_s
    assert Estimate(plan, cluster).iteration_s() == pytest.approx(seconds, rel=1e-9)
    assert Estimates(cluster, plan.job()).iteration_s(plan) == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=10, deadline=None)
@given(calibrated(), st.integers(0, 20))
def test_no_plan_beats_the_bound_of_its_cluster(cluster: Cluster, seed: int) -> None:
    (plan,) = random_plans(1, seed)
    bound = lower_bound(cluster, plan.job())
    assert isinstance(bound, Bound)
    assert bound.iteration_s <= simulate(plan, cluster).iteration_s


def test_a_slower_cluster_has_a_higher_bound() -> None:
    job = random_plans(1, 0)[0].job()
    slow = replace(MIXED, device_speeds=tuple((device.name, 0.5) for device in MIXED.devices))
    found = [lower_bound(cluster, job) for cluster in (MIXED, slow)]
    assert all(isinstance(bound, Bound) for bound in found)
    assert found[1].compute_s == pytest.approx(2 * found[0].compute_s, rel=1e-3)  # type: ignore[union-attr]


def test_the_search_prices_devices_by_their_speed() -> None:
    job = random_plans(1, 0)[0].job()
    slow = replace(MIXED, device_speeds=(("large-0/1", 0.5),))
    pricing = Pricing(slow, job)
    fast, half = (pricing.stage((name,), 1, Settings()) for name in ("large-0/0", "large-0/1"))
    assert half.layer_forward_s == pytest.approx(2 * fast.layer_forward_s, rel=1e-12)


def test_links_between_sites_are_overridden_by_the_sites_names() -> None:
    more = replace(MIXED, wan=(WideAreaLink(("workshop", "centre"), 2.5e6, 5e-3),))
    network = Network(replace(more, link_overrides=(LinkOverride("site:centre>site:workshop", 1e6),)))
    assert network.named("site:centre>site:workshop").capacity_bytes_per_s == 1e6
