"""Tiny worlds for tests: clusters with round rates and no losses, and a cost model whose seconds are given by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sim.cost.compute import TensorCollective
from sim.cost.network import Network
from sim.engine import _Run
from sim.prepared import Prepared
from sim.spec.cluster import PROTOCOLS, Cluster, Fabric, Intra, Nic, Node
from sim.spec.gpu import Efficiency, GpuKind, gpu_kind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Compute, Forward, Lane, OptimizerStep
from sim.spec.stack import Stack
from sim.spec.trace import Trace
from sim.spec.transformer import Transformer

LOSSLESS = tuple((protocol, 1.0) for protocol in PROTOCOLS)
"""Every link carries its nominal rate."""

IDEAL = Efficiency(
    matmul_fraction=1.0,
    fp32_fraction=1.0,
    matmul_half_s=0.0,
    matmul_traffic=0.0,
    attention_fraction=1.0,
    attention_keys=0.0,
    attention_rows=0.0,
    attention_width=0.0,
    memory_fraction=1.0,
    launch_s=0.0,
    source="a test",
)


def ideal_gpu(like: str = "A100-80GB-SXM") -> GpuKind:
    """A kind that reaches its peaks and starts kernels in no time."""
    return replace(gpu_kind(like), efficiency=IDEAL)


def ethernet_cluster(
    gpus: Sequence[int], bytes_per_s: float, latency_s: float = 0.0, intra_bytes_per_s: float = 1e30, kind: str = "nvlink"
) -> Cluster:
    """Nodes n0, n1, ... with these numbers of GPUs, one lossless Ethernet card each, and a fast inside without latency."""
    nodes = tuple(
        Node(f"n{i}", ideal_gpu(), count, Intra(kind, intra_bytes_per_s), Nic("ethernet", bytes_per_s))
        for i, count in enumerate(gpus)
    )
    return Cluster("tiny", nodes, Fabric(latency_s=latency_s, protocol_efficiency=LOSSLESS))


def model(layers: int, tied: bool = False) -> Transformer:
    """A transformer of hidden size 4 whose boundary activation is 8 bytes per token in bf16."""
    return Transformer(name="tiny", layers=layers, hidden=4, ffn=8, heads=4, vocab=8, tied_embeddings=tied)


def stage(devices: str, *layers: tuple[int, int]) -> Stage:
    """A stage of one replica that takes micro-batches of one sequence, on devices named in one text."""
    return Stage((Replica(tuple(devices.split()), 1),), layers)


def plan(stages_of: Sequence[Sequence[Stage]], micro_batches: int, **changes: object) -> Plan:
    """A plan of pipelines with micro-batches of one sequence of one token."""
    layers = max(stop for pipeline in stages_of for s in pipeline for _, stop in s.layers)
    values: dict[str, object] = {
        "cluster": "tiny",
        "model": model(layers),
        "sequence_length": 1,
        "global_batch": micro_batches * len(stages_of),
        "pipelines": tuple(Pipeline(1, micro_batches, tuple(stages)) for stages in stages_of),
        **changes,
    }
    return Plan(**values)  # type: ignore[arg-type]


GIVEN = Stack("given")
"""A stack that loses nothing."""


@dataclass(frozen=True)
class GivenCost:
    """A stand-in for ComputeCost: seconds per layer, by the lane's first device, forward and backward; no collectives."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    optimizer_s: float = 0.0
    weight_s: float | None = None
    """Of the weight half of a backward; as long as the input half if None."""
    stack: Stack = GIVEN

    def __call__(self, plan: Plan, cluster: Cluster) -> GivenCost:
        """Itself, so that it can stand where the class does."""
        return self

    def seconds(self, lane: Lane, instruction: Compute | OptimizerStep) -> float:
        """The given seconds times the layers of the instruction."""
        if isinstance(instruction, OptimizerStep):
            return self.optimizer_s
        count = instruction.layers[1] - instruction.layers[0]
        if isinstance(instruction, Forward):
            return self.forward_s[lane.devices[0]] * count
        assert isinstance(instruction, (Backward, BackwardInput, BackwardWeight))
        if isinstance(instruction, BackwardWeight) and self.weight_s is not None:
            return self.weight_s * count
        return self.backward_s[lane.devices[0]] * count

    def gap_s(self, lane: Lane, instruction: Compute) -> float:
        """None of them."""
        return 0.0

    def filled_s(self, lane: Lane, instruction: Compute, exposed_s: float) -> float:
        """None of them."""
        return 0.0

    def once_s(self, lane: Lane, instruction: Compute | OptimizerStep) -> float:
        """None of them."""
        return 0.0

    def is_hosts(self, lane: Lane, instruction: Compute | OptimizerStep) -> bool:
        return False

    def collectives(self, lane: Lane, instruction: Compute | OptimizerStep) -> tuple[TensorCollective, ...]:
        """None."""
        return ()


def simulate_every_lane(plan: Plan, cluster: Cluster) -> Trace:
    """The simulation in which each lane runs, also those that others could stand for."""
    return _Run(Prepared(plan, Network(cluster), condense=False)).trace()
