"""Runs whose truth is known: plans on a small mixed cluster, simulated on one that differs from the file in hidden ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sim.engine import simulate
from sim.spec.cluster import Cluster, Fabric, Intra, LinkOverride, Nic, Node, WideAreaLink
from sim.spec.gpu import Efficiency, GpuKind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.trace import Trace
from sim.spec.transformer import Transformer

EFFICIENCY = Efficiency(0.9, 0.9, 50e-6, 0.0, 0.5, 0.0, 0.0, 0.0, 0.8, 20e-6, source="a test")
LARGE = GpuKind("CPU-large", 2**31, {"fp32": 2e9}, 1e9, None, 30.0, 300.0, None, EFFICIENCY)
SMALL = GpuKind("CPU-small", 2**31, {"fp32": 1.2e9}, 0.8e9, None, 30.0, 300.0, None, EFFICIENCY)
INTRA = Intra("nvlink", 25e6, latency_s=200e-6)
MODEL = Transformer("tiny", 8, 64, 192, 4, 256)

MIXED = Cluster(
    "mixed",
    tuple(Node(f"large-{i}", LARGE, 2, INTRA, Nic("ethernet", 12.5e6), "centre") for i in range(2))
    + tuple(Node(f"small-{i}", SMALL, 2, INTRA, Nic("ethernet", 6.25e6), "workshop") for i in range(2)),
    Fabric(latency_s=200e-6, protocol_efficiency=(("nvlink", 0.956), ("ethernet", 0.956))),
    (WideAreaLink(("centre", "workshop"), 2.5e6, 5e-3),),
)


def random_plans(count: int, seed: int, cluster: Cluster = MIXED, sequence_length: int = 64, batch: int = 16) -> list[Plan]:
    """Different plans, asymmetric ones among them: nodes as one group or two, dealt to one to four pipelines of any cuts."""
    rng = np.random.default_rng(seed)
    found: dict[str, Plan] = {}
    while len(found) < count:
        groups: list[tuple[str, ...]] = []
        for node in cluster.nodes:
            names = tuple(f"{node.name}/{index}" for index in range(node.gpus))
            groups += [names] if rng.random() < 0.4 else [(name,) for name in names]
        if rng.random() < 0.6:
            rng.shuffle(groups)
        pipes = int(rng.integers(1, min(4, len(groups)) + 1))
        dealt = [list(map(tuple, part)) for part in np.array_split(np.array(groups, dtype=object), pipes)]
        micro_batch = int(rng.integers(1, 3))
        shares = [batch // micro_batch // pipes] * pipes
        shares[0] += batch // micro_batch - sum(shares)
        pipelines = []
        for part, share in zip(dealt, shares, strict=True):
            cuts = sorted(rng.choice(np.arange(1, MODEL.layers), len(part) - 1, replace=False).tolist())
            bounds = [0, *cuts, MODEL.layers]
            stages = tuple(
                Stage((Replica(group, micro_batch),), ((a, b),), "full" if rng.random() < 0.2 else "none")
                for group, a, b in zip(part, bounds, bounds[1:], strict=False)
            )
            pipelines.append(Pipeline(micro_batch, share, stages))
        plan = Plan(
            cluster.name,
            MODEL,
            sequence_length,
            batch,
            tuple(pipelines),
            precision="fp32",
            schedule=("1f1b", "gpipe")[int(rng.integers(2))],
            zero_stage=int(rng.integers(2)),
            overlap_gradients=bool(rng.integers(2)),
        )
        found[plan.to_json()] = plan
    return list(found.values())


def hidden_factors(cluster: Cluster, seed: int, least: float = 0.8, most: float = 1.25) -> Mapping[str, float]:
    """How many times as long each device takes than the file says: of its kind, times its own."""
    rng = np.random.default_rng(seed)
    kinds = {node.gpu.name: float(rng.uniform(least, most)) for node in cluster.nodes}
    return {device.name: kinds[device.node.gpu.name] * float(rng.uniform(least, most)) for device in cluster.devices}


def truth(cluster: Cluster, factors: Mapping[str, float], links: Sequence[LinkOverride] = (), start_s: float = 0.0) -> Cluster:
    """The cluster as it is: devices that take longer by their factors, links of their own rates, a start of messages."""
    speeds = tuple((name, 1 / factor) for name, factor in factors.items())
    fabric = replace(cluster.fabric, start_s=start_s)
    return replace(cluster, device_speeds=speeds, link_overrides=tuple(links), fabric=fabric)


def measured(plan: Plan, cluster: Cluster, seed: int, noise: float = 0.005, origin: str = "paced") -> Trace:
    """A run of the plan: its simulation on the true cluster, with devices as much faster or slower as noise makes them."""
    return replace(simulate(plan, cluster, seed=seed, jitter=noise), origin=origin)
