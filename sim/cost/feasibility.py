"""Whether a plan can run on a cluster, and if not, the first reason why: devices, precision, heads, batch, memory, hosts."""

from __future__ import annotations

from dataclasses import asdict

from sim.cost.memory import MemoryParts, host_bytes, host_room_bytes, lane_parts, peak_bytes
from sim.spec.cluster import Cluster
from sim.spec.compile import check_experts
from sim.spec.gpu import is_cpu
from sim.spec.judge import Infeasible
from sim.spec.plan import Plan
from sim.spec.reading import nearest


def infeasible(plan: Plan, cluster: Cluster) -> Infeasible | None:
    """The first reason why the plan cannot run on the cluster, told in one line, or None where it can.

    The reasons are tried in the order devices, precision, heads, batch, memory, memory of hosts. Of the devices, or hosts, whose
    memory is short, the one that lacks the most is named. Raises InputError where experts cannot be divided as the plan says, for
    then there is no memory to be counted.
    """
    check_experts(plan)
    return (
        _devices(plan, cluster)
        or _precision(plan, cluster)
        or _heads(plan)
        or _batch(plan)
        or _memory(plan, cluster)
        or _host_memory(plan, cluster)
    )


def _devices(plan: Plan, cluster: Cluster) -> Infeasible | None:
    """The devices that the cluster does not have."""
    known = {device.name for device in cluster.devices}
    unknown = [name for name in plan.devices if name not in known]
    if not unknown:
        return None
    shown = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
    nodes = [f"{node.name}/0" + (f"-{node.gpus - 1}" if node.gpus > 1 else "") for node in cluster.nodes]
    has = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else "")
    hint = nearest(unknown[0], known)
    message = f"the plan uses {shown}, which cluster {cluster.name!r} does not have (it has {has}){hint}"
    return Infeasible(unknown[0], "devices", None, None, message)


def _precision(plan: Plan, cluster: Cluster) -> Infeasible | None:
    """The first device whose kind lacks the precision."""
    if all(node.gpu.peak(plan.precision) is not None for node in cluster.nodes):
        return None
    for name in plan.devices:
        kind = cluster.device(name).gpu
        if kind.peak(plan.precision) is None:
            has = ", ".join(kind.peak_flop_per_s)
            message = f"{name} is of kind {kind.name}, which does not have {plan.precision} (it has {has})"
            return Infeasible(name, "precision", None, None, message)
    return None


def _heads(plan: Plan) -> Infeasible | None:
    """The first lane whose tensor-parallel degree does not divide the heads."""
    model = plan.transformer
    for p, s, _, replica in plan.replicas():
        degree = len(replica.devices) // plan.context_parallel
        where = f"(pipeline {p}, stage {s})"
        if model.heads % degree:
            message = (
                f"the heads of a layer are divided evenly over its tensor-parallel group, but {model.name} has {model.heads} "
                f"heads and the group {degree} devices {where}"
            )
            return Infeasible(replica.devices[0], "heads", None, None, message)
        if model.kv_heads % degree and degree % model.kv_heads:
            message = (
                f"the key-value heads of a layer and the tensor-parallel degree divide one another, but {model.name} has "
                f"{model.kv_heads} key-value heads and the group {degree} devices {where}"
            )
            return Infeasible(replica.devices[0], "heads", None, None, message)
    return None


def _batch(plan: Plan) -> Infeasible | None:
    """The first lane whose sequences cannot be divided as the plan says."""
    ranks = plan.context_parallel
    for p, s, _, replica in plan.replicas():
        degree = len(replica.devices) // ranks
        # Under a causal mask, each context rank takes two stretches of a sequence, so that all attend to as many keys.
        if ranks > 1 and plan.sequence_length % (2 * ranks):
            message = (
                "context_parallel gives each rank two equal stretches of every sequence, but it has "
                f"{plan.sequence_length} tokens and there are {ranks} ranks (pipeline {p}, stage {s})"
            )
            return Infeasible(replica.devices[0], "batch", None, None, message)
        if plan.sequence_parallel and plan.slice_length // ranks % degree:
            message = (
                "sequence_parallel divides every sequence evenly over the tensor-parallel group, but it has "
                f"{plan.slice_length // ranks} tokens and the group {degree} devices (pipeline {p}, stage {s})"
            )
            return Infeasible(replica.devices[0], "batch", None, None, message)
    return None


def _memory(plan: Plan, cluster: Cluster) -> Infeasible | None:
    """The device that lacks the most memory."""
    worst: tuple[int, str, int, MemoryParts] | None = None
    least_bytes = min(node.gpu.memory_bytes for node in cluster.nodes)
    for p, s, r, parts in lane_parts(plan, cluster.stack):
        need_bytes = parts.total
        if need_bytes <= least_bytes:
            continue
        for name in plan.pipelines[p].stages[s].replicas[r].devices:
            have_bytes = cluster.device(name).gpu.memory_bytes
            excess = need_bytes - have_bytes
            if excess > 0 and (worst is None or excess > worst[0]):
                worst = (excess, name, have_bytes, parts)
    if worst is None:
        return None
    _, name, have_bytes, parts = worst
    shown = ", ".join(f"{part} {_gib(num_bytes)}" for part, num_bytes in asdict(parts).items() if num_bytes)
    message = f"{name} needs {_gib(parts.total)} GiB ({shown}) but has {_gib(have_bytes)} GiB"
    return Infeasible(name, "memory", parts.total, have_bytes, message)


def _host_memory(plan: Plan, cluster: Cluster) -> Infeasible | None:
    """The host that lacks the most memory for offloaded states."""
    have = {node.name: room_bytes for node in cluster.nodes if (room_bytes := host_room_bytes(node)) is not None}
    if not plan.offload_optimizer or not have:
        return None
    need = {name: num_bytes for name, num_bytes in host_bytes(plan).items() if name in have}
    shared = {node.name for node in cluster.nodes if is_cpu(node.gpu)}
    for device, num_bytes in peak_bytes(plan, cluster).items() if shared else ():  # in the same memory
        node = device.rpartition("/")[0]
        if node in shared:
            need[node] += num_bytes
    name = max(need, key=lambda name: need[name] - have[name], default=None)
    if name is None or need[name] <= have[name]:
        return None
    what = "its devices and the optimizer's states" if name in shared else "the optimizer's states"
    message = (
        f"the host of {name} needs {_gib(need[name])} GiB for {what} (offload_optimizer) "
        f"but has {_gib(have[name])} GiB{'' if name in shared else ' (host_memory)'}"
    )
    return Infeasible(None, "memory", need[name], have[name], message)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
