"""The transfers of a program's instructions: those inside a computation, the messages between stages, and the exchanges of
gradients and parameters. Both judges take them from here.

A context rank of a lane is, for the exchanges, a copy of the layers like any other: gradients are summed over all of them, and
ZeRO divides over all of them (as Megatron-LM does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from sim.cost.collectives import RING_STEPS, across_lanes, between_lanes, collective, dispatch, ring_exchange
from sim.cost.compute import INNER_GROUPS, ComputeCost, Inside, TensorCollective, busy_s, filled_s
from sim.cost.network import NOTHING, Network, Transfer, at_once, scaled, together
from sim.spec.cluster import Cluster
from sim.spec.counts import (
    PRECISION_BYTES,
    boundary_bytes,
    embedding_parameters,
    head_parameters,
    layer_parameter_parts,
)
from sim.spec.plan import Plan
from sim.spec.program import (
    BackwardWeight,
    Collective,
    Compute,
    Lane,
    OptimizerStep,
    ReduceGradients,
    Send,
    SendActivation,
)
from sim.spec.stack import Stack

Groups = Sequence[tuple[str, ...]]
"""Tensor-parallel groups that hold the same layers."""


# --- Inside a computation --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one instruction takes: its computation and messages that keep it, collectives that hide behind these, and others."""

    seconds: float
    beside: Transfer = NOTHING
    after: Transfer = NOTHING

    def alone_s(self, network: Network) -> float:
        """Seconds of it all where nothing else uses its links."""
        return max(self.seconds, network.alone_s(self.beside)) + network.alone_s(self.after)


Inner: TypeAlias = tuple[Transfer, Transfer, Transfer, Transfer]
"""The transfers inside one instruction, at the rate that they reach alone, by `INNER_GROUPS`."""


def inner(
    network: Network, cost: ComputeCost, lane: Lane, instruction: Compute | OptimizerStep, like: Lane | None = None
) -> Inner:
    """The transfers inside one instruction of a lane, whatever the constants of kinds and stack.

    `like`: a lane built as this one, on other devices, that was asked before.
    """
    found: dict[str, list[Transfer]] = {}
    for one in cost.collectives(like or lane, instruction):
        found.setdefault(one.group, []).append(_inside(network, cost, lane, one))
    if not found:
        return NOTHING, NOTHING, NOTHING, NOTHING
    tensor, context, expert, routed = (together(found[group]) if group in found else NOTHING for group in INNER_GROUPS)
    return tensor, context, expert, routed


def work(
    network: Network, cost: ComputeCost, lane: Lane, instruction: Compute | OptimizerStep, known: Inner | None = None
) -> Work:
    """What one instruction of a lane takes; `known` may be given where `inner` was asked before.

    Of the collectives of tensor ranks the share that the stack overlaps hides behind the computation; the rest is work of the
    GPU as its kernels are, and costs little where the host is behind with all of it. Each but the last of the steps that context
    ranks attend in hides the next one's keys and values: what of their transfer takes longer is exposed, and so are the last
    step of their gradients, and what the steps of rings over nodes take longer. Nothing hides what goes to experts and back.
    Where messages keep a stage, their seconds are in those of the instructions that they come before and after.
    """
    seconds = computing_s(network, cost, lane, instruction)
    transfers = known if known is not None else inner(network, cost, lane, instruction)
    if isinstance(instruction, OptimizerStep) or not any(transfers):
        return Work(seconds)
    tensor, context, expert, routed = (_slowed(network, cost.stack, transfer) for transfer in transfers)
    overlapped, hidden = hidden_shares(cost, lane, instruction, network.alone_s(tensor), network.alone_s(context))
    beside = together([_part(tensor, overlapped), _part(context, hidden)])
    after = _in_turn(network, [_part(tensor, 1 - overlapped), _part(context, 1 - hidden), expert, routed])
    if steps_s := ring_steps_s(network, cost.stack, lane.tensor_groups, cost.collectives(lane, instruction)):
        after = replace(after, latency_s=after.latency_s + steps_s)
    return Work(seconds, beside, after)


def _in_turn(network: Network, transfers: Sequence[Transfer]) -> Transfer:
    """Several transfers of which each waits for the one before, as one, which alone takes as long as all of them.

    One by one they may be held up by different links, such as tensor ranks by NVLink and context ranks by the network, so that
    the bytes on any link tell less than their time.
    """
    joined = together(transfers)
    waits_s = sum(map(network.alone_s, transfers)) - network.alone_s(joined)
    return replace(joined, latency_s=joined.latency_s + max(0.0, waits_s))


def computing_s(network: Network, cost: ComputeCost, lane: Lane, instruction: Compute | OptimizerStep) -> float:
    """Seconds of an instruction without the collectives inside it: its computation, and messages that keep it; see `work`."""
    seconds = cost.seconds(lane, instruction)
    if not isinstance(instruction, OptimizerStep) and cost.stack.keeps_messages(len(network.cluster.nodes)):
        seconds += _blocked_s(network, cost, lane, instruction)
    return seconds


def hidden_shares(cost: ComputeCost, lane: Lane, instruction: Compute, tensor_s: float, context_s: float) -> tuple[float, float]:
    """The shares of an instruction's collectives of tensor ranks, and of context ranks, that hide behind its computation.

    `tensor_s` and `context_s`: what these collectives take alone; see `work`.
    """
    hidden = min(cost.beside_ring(lane, instruction), cost.beside_ring_s(lane, instruction) / context_s) if context_s else 0.0
    exposed_s = (1 - cost.stack.tensor_overlap) * tensor_s
    return _overlapped(cost.stack, tensor_s, cost.filled_s(lane, instruction, exposed_s) if exposed_s else 0.0), hidden


def _overlapped(stack: Stack, tensor_s: float, filled_s: float) -> float:
    """The share that hides of the collectives of tensor ranks, of whose exposed seconds so many pass while the host is behind."""
    return min(1.0, stack.tensor_overlap + filled_s / tensor_s) if filled_s else stack.tensor_overlap


def filled_gap_s(network: Network, cost: ComputeCost, lane: Lane, instruction: Compute) -> float:
    """Of the seconds in which an instruction's GPU waits for the host, those that collectives of tensor ranks fill; see `work`.

    With a host that takes no time these would be as long, and exposed.
    """
    tensor, *_ = inner(network, cost, lane, instruction)
    if not tensor:
        return 0.0
    alone_s = network.alone_s(_slowed(network, cost.stack, tensor))
    return cost.filled_s(lane, instruction, (1 - cost.stack.tensor_overlap) * alone_s)


@dataclass(frozen=True)
class Growth:
    """How what a pass through a part of a stage takes grows with what is inside.

    So it can be asked for any numbers of layers at once, where `work` looks into each of them. Rows have a figure for each of
    `Inside`, of a layer as it is without recomputation, and what the modes add to it.
    """

    stack: Stack
    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    """Of the collectives of tensor ranks."""
    links_s: tuple[tuple[float, ...], ...]
    """Those that these keep each link busy; links that are never the busiest are left out."""
    once_s: float

    def alone_s(self, inside: Inside, once: bool = True, beside_exchange: bool = False) -> tuple[float, float]:
        """Seconds of a pass that has its links alone, as `Work.alone_s` has them, and of the collectives that it waits for.

        `once` says whether what comes once for each pass of a stage comes with this part, `beside_exchange` whether gradients
        are on their way meanwhile.
        """
        layers, full, selective, pointwise, embedding, head = inside

        def of(row: tuple[float, ...]) -> float:
            a, b, c, d, e, f = row
            return layers * a + full * b + selective * c + pointwise * d + embedding * e + head * f

        device_s = of(self.device_s)
        if beside_exchange:
            device_s *= 1 + self.stack.overlap_slowdown
        host_s = of(self.host_s) if any(self.host_s) else 0.0
        seconds = busy_s(device_s, host_s) + once * self.once_s
        if not self.links_s:
            return seconds, 0.0
        tensor_s = of(self.latency_s) + max([of(row) for row in self.links_s])
        exposed_s = (1 - self.stack.tensor_overlap) * tensor_s
        overlapped = _overlapped(self.stack, tensor_s, filled_s(device_s, host_s, exposed_s))
        after_s = (1 - overlapped) * tensor_s
        return max(seconds, overlapped * tensor_s) + after_s, after_s


def growth(network: Network, cost: ComputeCost, lane: Lane, kind: type[Compute], place: int = 0) -> Growth | None:
    """How what passes of a lane take grows, of the slice at a place; None where not everything grows in proportion.

    What messages that keep a stage take, context ranks, experts and steps of rings does not.
    """
    stack, plan = cost.stack, cost.plan
    if stack.ring_step_s or stack.keeps_messages(len(network.cluster.nodes)) or plan.context_parallel * plan.expert_parallel > 1:
        return None
    device, host, latency, links = [], [], [], []
    for inside in _UNITS:
        device_s, kernels = cost.launched(lane, kind, inside, place)
        collectives = cost.collectives_of(lane, kind, inside)
        transfer = _slowed(network, stack, together([_inside(network, cost, lane, one) for one in collectives]))
        device.append(device_s)
        host.append(cost.host_s(lane, kernels, collectives))
        latency.append(transfer.latency_s)
        links.append(network.seconds_by_link(transfer))
    by_link = [tuple([found.get(link, 0.0) for found in links]) for link in dict.fromkeys(chain.from_iterable(links))]
    busiest = [one for one in dict.fromkeys(by_link) if not any(other != one and _covers(other, one) for other in by_link)]
    once_s = 0.0 if kind is BackwardWeight else stack.micro_batch_s
    return Growth(stack, _added(device), _added(host), _added(latency), tuple(map(_added, busiest)), once_s)


_UNITS = (
    Inside(1, 0, 0, 0, False, False),
    Inside(1, 1, 0, 0, False, False),
    Inside(1, 0, 1, 0, False, False),
    Inside(1, 0, 0, 1, False, False),
    Inside(0, 0, 0, 0, True, False),
    Inside(0, 0, 0, 0, False, True),
)
"""A layer, one in each mode of recomputation, the embedding and the head."""


def _added(figures: Sequence[float]) -> tuple[float, ...]:
    """A row of `Growth` of the figures of the units."""
    layer, full, selective, pointwise, embedding, head = figures
    return layer, full - layer, selective - layer, pointwise - layer, embedding, head


def _covers(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether no figure of one is below that of another."""
    return all(a >= b for a, b in zip(one, other, strict=True))


def _blocked_s(network: Network, cost: ComputeCost, lane: Lane, instruction: Compute) -> float:
    """Seconds that the messages before and after an instruction keep a lane; of those that block, what they take alone.

    Where lanes on so many nodes are kept, a message is if its sender or its receiver is one.
    """
    if isinstance(instruction, BackwardWeight):
        return 0.0
    start, stop = instruction.layers
    edges = [edge for edge in lane.previous if edge.layer == start] + [edge for edge in lane.next if edge.layer == stop]
    plan, stack = cost.plan, cost.stack
    cluster, seconds = network.cluster, 0.0
    always, spanned = 0 < stack.message_nodes <= len(cluster.nodes), stack.message_lane_nodes
    for edge in edges:
        if always or (spanned and max(map(cluster.nodes_of, (lane.devices, cost.lane(edge.peer).devices))) >= spanned):
            seconds += stack.message_s
        if stack.blocking_messages:
            sent = SendActivation(0, edge.layer, edge.peer, edge.sequences)
            seconds += network.alone_s(message(network, plan, lane, cost.lane(edge.peer), sent))
    return seconds


def ring_steps_s(network: Network, stack: Stack, groups: Groups, collectives: Iterable[TensorCollective]) -> float:
    """Seconds more that the steps round a ring take of the collectives of tensor ranks, where a group is on several nodes.

    They are reckoned as for a ring, whatever algorithm moves the bytes.
    """
    if not stack.ring_step_s or all(network.cluster.nodes_of(group) < 2 for group in groups):
        return 0.0
    rounds = sum(one.count * RING_STEPS[one.kind] for one in collectives if one.among_tensor_ranks)
    return stack.ring_step_s * rounds * (len(groups[0]) - 1)


def _inside(network: Network, cost: ComputeCost, lane: Lane, one: TensorCollective) -> Transfer:
    """One entry of the collectives inside an instruction, over all groups of the lane at once."""
    num_bytes, count = one.num_bytes, one.count
    if one.group == "expert":
        return scaled(_dispatch(network, cost, lane), num_bytes, count)
    if one.group == "context":
        steps = count * (lane.context_parallel - 1)
        rings = zip(*lane.tensor_groups, strict=True)
        return at_once([ring_exchange(network, devices, num_bytes, steps) for devices in rings])
    return at_once([collective(network, one.kind, devices, num_bytes, count) for devices in lane.tensor_groups])


def _dispatch(network: Network, cost: ComputeCost, lane: Lane) -> Transfer:
    """A lane's part in one all-to-all among the holders of its layers' experts, of one byte a device: what its own send.

    All lanes of the group do the same at the same time, so that their parts together are the whole.
    """
    sharing, plan, once = cost.expert_groups(lane.stage), cost.plan, cost.stack.node_dispatch
    assert plan.transformer.experts is not None
    # A device sends to its like in each group that has a part of the experts; where ranks have whole ones, to all of these ranks.
    groups = tuple(
        (
            device,
            tuple([other for there in sharing[group] for other in (there if plan.whole_experts else there[index : index + 1])]),
        )
        for group in lane.tensor_groups
        for index, device in enumerate(group)
    )
    key = ("dispatch", once, groups)
    unit = network.unit_transfers.get(key)
    if unit is None:
        unit = network.unit_transfers[key] = dispatch(network, groups, plan.transformer.experts, once)
    return unit


def switch_owners(plan: Plan, lanes: Sequence[Lane], cluster: Cluster) -> set[str]:
    """The lanes whose devices share one NVLink node that no other lane has devices on; none where lanes share experts."""
    if plan.expert_parallel > 1:
        return set()
    lanes_on: dict[str, set[str]] = {}
    nodes_of: dict[str, set[str]] = {}
    nvlink: dict[str, bool] = {}
    for lane in lanes:
        for name in lane.devices:
            node = cluster.device(name).node
            lanes_on.setdefault(node.name, set()).add(lane.name)
            nodes_of.setdefault(lane.name, set()).add(node.name)
            nvlink[node.name] = node.intra.is_nvlink
    return {
        name
        for name, nodes in nodes_of.items()
        if len(nodes) == 1 and all(nvlink[node] and len(lanes_on[node]) == 1 for node in nodes)
    }


# --- Between lanes ---------------------------------------------------------------------------------------------------


def message(network: Network, plan: Plan, sender: Lane, receiver: Lane, instruction: Send) -> Transfer:
    """The transfer of an activation, or its gradient, between two lanes; each context rank sends its part of the sequences."""
    start, stop = instruction.sequences
    num_bytes = boundary_bytes(plan.transformer, stop - start, plan.slice_length, PRECISION_BYTES[plan.precision])
    pairs = list(zip(sender.tensor_groups, receiver.tensor_groups, strict=True))
    return at_once([between_lanes(network, a, b, num_bytes / len(pairs), plan.sequence_parallel) for a, b in pairs])


def exchange(
    network: Network, plan: Plan, instruction: Collective, members: Sequence[Lane], stack: Stack | None = None
) -> Transfer:
    """The transfer of a gradient reduction or parameter gather over its members, with the cluster's stack if none is given.

    Experts that expert parallelism divides are exchanged among the groups that hold the same ones, after everything else. With
    shard groups (hybrid sharding: Zhao et al., 2023, arXiv:2304.11277, section 3.2.2) gradients are scattered, and parameters
    gathered, inside each; `sum_of_shards` follows the former.
    """
    stack = stack if stack is not None else network.cluster.stack
    parameters, experts = _exchanged_parameters(plan, instruction), 0
    if plan.expert_parallel > 1:
        start, stop = instruction.layers
        experts = (stop - start) * layer_parameter_parts(plan.transformer).experts
        parameters -= experts
    reduce = isinstance(instruction, ReduceGradients)
    element_bytes = PRECISION_BYTES[plan.gradient_precision if reduce else plan.precision]
    groups = _tensor_groups(members)
    found = _exchanged(network, plan, reduce, groups, parameters * element_bytes)
    if experts:
        copies = plan.expert_copies(len(groups[0]))
        share_bytes = experts * element_bytes / copies
        same = [groups[e::copies] for e in range(copies)]
        found = together([found, at_once([_exchanged(network, plan, reduce, holding, share_bytes) for holding in same])])
    return _slowed(network, stack, found)


def sum_of_shards(
    network: Network, plan: Plan, instruction: Collective, members: Sequence[Lane], stack: Stack | None = None
) -> Transfer | None:
    """What follows the `exchange` of a gradient reduction whose members are several shard groups: each shard's sum over these.

    None of everything else. It has communicators, and so a queue, of its own: the next exchange does not wait for it.
    """
    stack = stack if stack is not None else network.cluster.stack
    if not isinstance(instruction, ReduceGradients) or plan.zero_stage == 0:
        return None
    groups = _tensor_groups(members)
    size = len(_sharding(plan, groups)[0])
    if size == len(groups):
        return None
    num_bytes = _exchanged_parameters(plan, instruction) * PRECISION_BYTES[plan.gradient_precision] / size
    sums = [across_lanes(network, "all_reduce", groups[i::size], num_bytes) for i in range(size)]
    return _slowed(network, stack, at_once(sums))


def _exchanged_parameters(plan: Plan, instruction: Collective) -> int:
    """How many parameters a collective exchanges, experts that are divided included."""
    model, (start, stop) = plan.transformer, instruction.layers
    if start < stop:
        return (stop - start) * layer_parameter_parts(model).total
    return embedding_parameters(model) if start == 0 else head_parameters(model)


def _tensor_groups(members: Sequence[Lane]) -> Groups:
    return [group for lane in members for group in lane.tensor_groups]


def _exchanged(network: Network, plan: Plan, reduce: bool, groups: Groups, num_bytes: float) -> Transfer:
    """A reduction or gather of `num_bytes` over some groups, inside each shard group."""
    if reduce and plan.zero_stage == 0:
        return across_lanes(network, "all_reduce", groups, num_bytes)
    kind = "reduce_scatter" if reduce else "all_gather"
    return at_once([across_lanes(network, kind, part, num_bytes) for part in _sharding(plan, groups)])


def _sharding(plan: Plan, groups: Groups) -> list[Groups]:
    """The groups by those among which ZeRO divides states."""
    size = plan.shard_group or len(groups)
    return [groups[i : i + size] for i in range(0, len(groups), size)]


# --- Transfers -------------------------------------------------------------------------------------------------------


def collective_scale(network: Network, stack: Stack, transfer: Transfer) -> float:
    """The rate of a collective per rate that it reaches alone: of the whole one where any of its bytes goes across nodes."""
    if stack.node_collective_scale == stack.collective_scale or network.crosses_nodes(transfer):
        return stack.collective_scale
    return stack.node_collective_scale


def _slowed(network: Network, stack: Stack, transfer: Transfer) -> Transfer:
    """A collective at the rate that it reaches in training; its bytes take so much more of each link."""
    scale = collective_scale(network, stack, transfer)
    if scale == 1:
        return transfer
    loads = tuple((link, num_bytes / scale) for link, num_bytes in transfer.loads)
    return replace(transfer, loads=loads)


def _part(transfer: Transfer, fraction: float) -> Transfer:
    """A part of a transfer, its latency too."""
    if not 0 < fraction < 1:
        return transfer if fraction else NOTHING
    loads = tuple((link, num_bytes * fraction) for link, num_bytes in transfer.loads)
    return Transfer(loads, transfer.latency_s * fraction, transfer.num_bytes * fraction)
