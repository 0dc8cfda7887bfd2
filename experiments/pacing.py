"""The pace of a plan's devices: what the simulator takes for the computation of each instruction, for runs that emulate GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sim.cost.compute import ComputeCost
from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan
from sim.spec.pace import PACED, Pace, has_ring, paced_instructions, plan_digest, ring_key
from sim.spec.plan import Plan
from sim.spec.program import OptimizerStep
from sim.spec.reading import InputError, write_file


def pace(plan: Plan, cluster: Cluster, factors: Mapping[str, float] | None = None) -> Pace:
    """The pace of a plan on a cluster: seconds of computation of each instruction on each device, without collectives.

    In a lane of several kinds each device has its own time. `factors`, by device, multiply all its seconds (1 where one is not
    named): 1.1 emulates a device that is slower than the simulator takes it to be. Raises InputError for devices that the
    cluster does not have, or that lack the plan's precision.
    """
    factors = factors or {}
    for name, factor in factors.items():
        cluster.device(name)
        if not factor > 0:
            raise InputError(f"a factor of a device's seconds is above 0, but got {factor} for {name}")
    costs: dict[tuple[str, float], ComputeCost] = {}
    seconds: dict[str, dict[str, float]] = {}
    for lane in compile_plan(plan).lanes:
        for device in lane.devices:
            found = cluster.device(device)
            like = found.gpu.name, found.speed
            cost = costs.get(like)
            if cost is None:
                # As if all devices were like this one: of a lane the slowest decides.
                nodes = tuple(replace(node, gpu=found.gpu) for node in cluster.nodes)
                cost = costs[like] = ComputeCost(plan, replace(cluster, nodes=nodes, device_speeds=()))
            factor = factors.get(device, 1.0)
            times = seconds[device] = {}
            for key, instruction in paced_instructions(lane).items():
                assert isinstance(instruction, PACED)
                times[key] = cost.seconds(lane, instruction) * factor
                if has_ring(lane, instruction) and not isinstance(instruction, OptimizerStep):
                    times[ring_key(key)] = cost.beside_ring_s(lane, instruction) * factor
    return Pace(plan_digest(plan), seconds)


def write_pace(found: Pace, path: Path) -> Path:
    """The path, to which it writes a pace file. Raises InputError and OSError as `write_file` does."""
    write_file(path, found.to_json(), replace=True)
    return path
