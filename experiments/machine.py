"""The cluster that a measured run is told on: the user's own, or one that stands for the machine it ran on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from experiments.parallel import cores
from sim.cost.memory import host_bytes, lane_parts
from sim.spec.cluster import MOST_NODE_GPUS, PCIE_BYTES_PER_S, Cluster, Fabric, Intra, Nic, Node, links
from sim.spec.counts import PRECISION_BYTES
from sim.spec.gpu import CPU, GpuKind, catalogue, gpu_kind, is_cpu
from sim.spec.judge import Infeasible
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from sim.spec.stack import stack

if TYPE_CHECKING:
    from runtime.results import RunResult  # it would import torch

LOOPBACK_BYTES_PER_S = 2e9
"""What one worker sends another through gloo on the same machine: messages of 4 to 16 MiB go at 1.7 to 2.5 GB/s on a Xeon of
two cores (torch 2.13), and all-reduces of as much at 0.7 to 1.1."""

LOOPBACK_LATENCY_S = 250e-6
"""Of one step through gloo on the same machine, where every worker has a core: a small all-reduce of two takes 0.5 to 0.7 ms
there, a message 0.1 ms. Workers that share cores wait for their turn: with two to a core a step takes 0.5 to 0.8 ms."""


def stand_in(plan: Plan, result: RunResult, device: str, through_host: bool) -> Cluster:
    """A cluster with the plan's nodes that stands for the machine of a run.

    Its kinds are those that the run found; CPUs have the peak that it measured, and each worker an equal share of the memory.
    All devices are linked as workers of one machine are: `through_host` by the loopback of the network, else by NVLink, or
    PCIe where the kind has none. Raises InputError for GPUs that the catalogue does not know, or two kinds in one node.
    """
    nodes: dict[str, list[str]] = {}
    for name in plan.devices:
        nodes.setdefault(_place(name)[0], []).append(name)
    made = []
    for name, devices in nodes.items():
        kind = measured_cpu(gpu_kind(CPU), plan, result, devices) if device == "cpu" else _gpu_kind(name, devices, result)
        if device == "cpu":
            kind = replace(kind, memory_bytes=max(1, machine_bytes() // len(plan.devices)))
        count = 1 + max(_place(device)[1] for device in devices)
        intra = _loopback(plan) if through_host else _intra(kind, count)
        nic = Nic("ethernet", intra.bandwidth_bytes_per_s, count) if len(nodes) > 1 else None
        made.append(Node(name, kind, count, intra, nic))
    # Rates that were measured, or that NVLink and PCIe have already been given, are not lessened once more.
    efficiency = (("nvlink", 1.0), ("ethernet", 1.0)) if through_host else (("ethernet", 1.0),)
    latency_s = max(node.intra.latency_s for node in made)
    return Cluster("this machine", tuple(made), Fabric(latency_s, protocol_efficiency=efficiency))


def _place(device: str) -> tuple[str, int]:
    """The node and index of a device's name. Raises InputError where it has none."""
    node, _, index = device.rpartition("/")
    if not node or not index.isdecimal() or int(index) >= MOST_NODE_GPUS:
        raise InputError(f"a device is named NODE/INDEX, with an index below {MOST_NODE_GPUS}, but got {device!r}")
    return node, int(index)


def _gpu_kind(node: str, devices: Iterable[str], result: RunResult) -> GpuKind:
    """The catalogue's kind of a node's GPUs."""
    kinds = list(dict.fromkeys(result.device_kinds[device] for device in devices))
    if len(kinds) > 1:
        raise InputError(f"the GPUs of the node {node!r} are of several kinds ({', '.join(kinds)}); a node has GPUs of one kind")
    if kinds[0] not in catalogue():
        raise InputError(f"the catalogue does not know the GPU kind {kinds[0]!r}; describe it in a cluster file")
    return gpu_kind(kinds[0])


def _loopback(plan: Plan) -> Intra:
    """How workers of one machine talk through its host: each has a port of its own, as NVLink's are."""
    return Intra("nvlink", LOOPBACK_BYTES_PER_S, latency_s=LOOPBACK_LATENCY_S * _workers_per_core(plan))


def _intra(kind: GpuKind, gpus: int) -> Intra:
    """How the GPUs of one machine talk."""
    link = "pcie4" if kind.nvlink_bytes_per_s is None else "nvlink"
    rate = PCIE_BYTES_PER_S[link] if kind.nvlink_bytes_per_s is None else kind.nvlink_bytes_per_s
    return Intra(link, rate, gpus_per_switch=gpus, host_bandwidth_bytes_per_s=rate, latency_s=links().latency_s[link])


def measured_cpu(kind: GpuKind, plan: Plan, result: RunResult, devices: Iterable[str]) -> GpuKind:
    """The CPU kind with the peak that a run measured on these devices (their mean), at the plan's precision and in fp32.

    A large matmul reaches a peak that was measured with one, so the catalogue's fraction of it becomes 1. The catalogue's
    process has a core for itself: where workers share cores, its other figures are as much slower. An efficiency or a memory
    bandwidth that is not the catalogue's stays.
    """
    measured = [result.peak_flop_per_s[name] for name in devices if name in result.peak_flop_per_s]
    if measured:
        kind = replace(kind, peak_flop_per_s=dict.fromkeys(("fp32", plan.precision), fmean(measured)))
    nominal, share = gpu_kind(CPU), _workers_per_core(plan)
    if kind.memory_bandwidth_bytes_per_s == nominal.memory_bandwidth_bytes_per_s:
        kind = replace(kind, memory_bandwidth_bytes_per_s=nominal.memory_bandwidth_bytes_per_s / share)
    efficiency = kind.efficiency
    if efficiency == nominal.efficiency:
        efficiency = replace(
            efficiency,
            matmul_fraction=1.0 if measured else efficiency.matmul_fraction,
            fp32_fraction=1.0 if measured else efficiency.fp32_fraction,
            matmul_half_s=efficiency.matmul_half_s * share,
            launch_s=efficiency.launch_s * share,
            source="nominal, for workers that share cores; the peak was measured",
        )
    return replace(kind, efficiency=efficiency)


def _workers_per_core(plan: Plan) -> float:
    """How many workers of the plan share a core of this machine, at least 1."""
    return max(1.0, len(plan.devices) / cores())


def with_cpus_apart(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes; where CPUs of one name were measured to differ from node to node, each has a name of its own, as in a file."""

    def named(node: Node) -> Node:
        alike = all(other.gpu == node.gpu for other in nodes if other.gpu.name == node.gpu.name)
        apart = is_cpu(node.gpu) and not alike
        return replace(node, gpu=replace(node.gpu, name=f"{node.gpu.name} {node.name}", aliases=())) if apart else node

    return tuple(map(named, nodes))


def with_measured_peaks(cluster: Cluster, plan: Plan, result: RunResult) -> Cluster:
    """A cluster of CPUs whose nodes have the peaks that a run measured; nodes it did not use have the mean of the others'.

    One that is calibrated stays as it is: its constants were fitted beside the peaks of its file.
    """
    if cluster.calibration is not None:
        return cluster

    def measured(node: Node) -> Node:
        own = [name for name in plan.devices if cluster.device(name).node == node]
        return replace(node, gpu=measured_cpu(node.gpu, plan, result, own or plan.devices)) if is_cpu(node.gpu) else node

    return replace(cluster, nodes=tuple(measured(node) for node in cluster.nodes))


# --- Memory ----------------------------------------------------------------------------------------------------------


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


SOFTMAX_BYTES = 4 * 2**25
"""Of the logits whose softmax the runtime's loss computes at once, in fp32 (`runtime.tensor_parallel.LOSS_NUMBERS`)."""

HELD_BYTES, HELD_SHARE = round(0.16 * 2**30), 0.01
"""What torch's allocator holds on a GPU beside tensors: workspaces of cuBLAS and rests of its segments, whatever the plan, and a
share of what is allocated. By thirty plans on an H200, of 2 to 43 GiB (docs/bench.md). Nothing was short of memory there, where
more is lost: whether a plan fits is asked with the stack's fragmentation."""


def allocated_bytes(plan: Plan, device: str) -> Mapping[str, int]:
    """Bytes at the peak of every device (cpu or cuda) without the CUDA context: what a run can measure, and all that a CPU needs.

    On GPUs, whose peaks are told to the byte, with what the runtime's loss keeps: logits and their gradient in the training
    precision, and of a few at a time the softmax, and these in fp32, where the simulator takes a softmax of all in fp32 for
    granted, and the gradient too.
    """
    own, element_bytes = stack("motley"), PRECISION_BYTES[plan.precision]
    # Of each logit `sim.cost.memory` counts itself and its softmax as kept, and its gradient in fp32 as worked on.
    kept_scale, working_scale = (1.0, 1.0) if device == "cpu" else (element_bytes / (element_bytes + 4), element_bytes / 4)
    scaled = (lane_parts(plan, replace(own, logits_scale=scale)) for scale in (kept_scale, working_scale))
    found = {}
    for (p, s, r, kept), (*_, at_work) in zip(*scaled, strict=True):
        parts = replace(kept, working=at_work.working)
        if device == "cpu":
            num_bytes = round((1 + own.fragmentation) * parts.allocated)
        else:
            softmax = min(SOFTMAX_BYTES, 4 * parts.logits // element_bytes)
            wide = softmax if element_bytes < 4 else 0
            num_bytes = round((1 + HELD_SHARE) * parts.allocated) + softmax + wide + HELD_BYTES
        found.update(dict.fromkeys(plan.pipelines[p].stages[s].replicas[r].devices, num_bytes))
    return found


def too_large(plan: Plan) -> Infeasible | None:
    """Why the workers of the plan, all on this machine's CPUs, do not fit into its memory together; None where they do."""
    need_bytes = sum(allocated_bytes(plan, "cpu").values()) + sum(host_bytes(plan).values())
    have_bytes = machine_bytes()
    if need_bytes <= have_bytes:
        return None
    need, have = (f"{num_bytes / 2**30:.1f} GiB" for num_bytes in (need_bytes, have_bytes))
    message = f"its {len(plan.devices)} workers need {need} of memory together, but this machine has {have}"
    return Infeasible(None, "memory", need_bytes, have_bytes, message)
