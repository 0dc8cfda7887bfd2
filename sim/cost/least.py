"""What an iteration of a plan takes at least, found without laying it out: of many plans, those that cannot be the fastest."""

from __future__ import annotations

from dataclasses import replace

from sim.cost.compute import ComputeCost
from sim.cost.network import Network
from sim.cost.traffic import work
from sim.spec.compile import pipeline_lanes
from sim.spec.plan import LayerRange, Plan
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Compute, Forward, Lane, OptimizerStep
from sim.spec.schedules import SCHEDULES


def least_s(plan: Plan, network: Network) -> float:
    """Seconds that no estimate of a plan on a network's cluster is below: those of the busiest stage of its first pipeline.

    A stage begins when a micro-batch has come through all chunks before its first one, does all its work, and then its last
    gradient goes back through the same chunks. Messages, exchanges of gradients and parameters, and what transfers take from
    one another are left out.
    """
    cost, pipeline = ComputeCost(plan, network.cluster), plan.pipelines[0]
    # Without neighbours, for messages may keep a stage.
    lanes = {lane.stage: replace(lane, previous=(), next=()) for lane in pipeline_lanes(plan, 0) if lane.replica == 0}
    slices = range(plan.sequence_slices)

    def seconds(kind: type[Compute], lane: Lane, chunk: LayerRange) -> list[float]:
        """Of each slice of a micro-batch."""
        return [work(network, cost, lane, kind(place, chunk)).alone_s(network) for place in slices]

    split = SCHEDULES[plan.schedule].splits_backward
    back, rest = (BackwardInput, (BackwardWeight,)) if split else (Backward, ())
    busy_s, waits_s = dict.fromkeys(lanes, 0.0), dict[int, float]()
    through_s = 0.0
    for stage, chunk in pipeline.chunks:
        lane = lanes[stage]
        waits_s.setdefault(stage, through_s)
        forward_s, back_s = seconds(Forward, lane, chunk), seconds(back, lane, chunk)
        through_s += min(forward_s) + (0.0 if split else min(back_s))
        busy_s[stage] += sum(forward_s) + sum(back_s) + sum(sum(seconds(kind, lane, chunk)) for kind in rest)
    steps_s = min(cost.seconds(lane, OptimizerStep()) for lane in lanes.values())
    return steps_s + max(waits_s[stage] + pipeline.micro_batches * busy_s[stage] for stage in lanes)
