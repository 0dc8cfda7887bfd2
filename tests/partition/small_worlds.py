"""Small clusters and jobs for the tests of planners."""

from __future__ import annotations

from dataclasses import replace

from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.transformer import Transformer

TINY = Transformer(name="tiny", layers=8, hidden=1024, ffn=2816, heads=8, vocab=32000)
"""About 0.17 billion parameters: every GPU of these worlds holds it."""

SMALL = replace(TINY, name="small", layers=12, hidden=2048, ffn=5632, heads=16)
"""About 0.75 billion: 12 GB do not hold it with AdamW."""


def node(name: str, kind: str, gpus: int, intra: str = "pcie4") -> Node:
    rate = {"pcie4": 24e9, "nvlink": 300e9}[intra]
    return Node(name, gpu_kind(kind), gpus, Intra(intra, rate, latency_s=6e-6), Nic("ethernet", 1.25e9))


def cluster(*nodes: Node) -> Cluster:
    return Cluster("world", tuple(nodes), Fabric(50e-6))


def mixed() -> Cluster:
    return cluster(node("slow", "RTX3080Ti", 4), node("fast", "RTX4090", 4))


def job(model: Transformer = TINY, sequence_length: int = 1024, batch: int = 16, precision: str = "bf16") -> Job:
    return Job(model, sequence_length, batch, precision)
