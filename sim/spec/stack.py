"""Software stacks: what a training framework adds to the times and bytes of the hardware that it runs on.

The records are those of constants.yaml beside this file. A cluster file names one (`stack: megatron-core`), or describes one of
its own; `efficiency` records (`sim.spec.gpu`) say what a kind of GPU reaches, whatever the framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType

from sim.spec.gpu import CONSTANTS
from sim.spec.reading import InputError, Table, nearest, read_own_yaml


@dataclass(frozen=True)
class Stack:
    """What a software stack's kernels, overlap, optimizer and memory are like. Raises InputError for a figure that cannot be.

    The defaults are those of a stack that loses nothing: fused kernels, flash attention, a host that is never waited for.
    """

    name: str
    flash_attention: bool = True
    """Whether attention is a flash kernel; else its scores go through memory, and are kept for the backward."""
    megatron_softmax: bool = False
    """Whether its softmax without flash attention is Megatron's: one kernel only for scores that `sim.spec.counts.unfused_scores`
    leaves out, and several, over scores in fp32, for others. Else it is always one kernel."""
    matmul_scale: float = 1.0
    """Rate of its matmuls inside a training step per rate that the GPU kind's efficiency record says."""
    unaligned_scale: float = 1.0
    """Rate of its matmuls whose rows are no multiple of 16 bytes per rate of the others, such as the output matmul of a
    vocabulary that is not padded."""
    attention_scale: float = 1.0
    """Rate of its attention kernels per rate that the GPU kind's efficiency record says."""
    memory_traffic: float = 1.0
    """Bytes that its memory-bound kernels move per byte that fused ones move."""
    sharded_traffic: float = 0.0
    """The same of those between the matmuls that tensor parallelism divides: rotary positions, norms of query and key,
    activation; 0: as of all."""
    routing_traffic: float = 0.0
    """The same of those that send tokens to their experts and combine what these make; 0: as of all."""
    kernel_s: float = 0.0
    """Seconds more of the GPU for each kernel, however small: where a fused stack has one, others have several."""
    loss_traffic: float = 1.0
    """Bytes that its cross-entropy moves per byte that a fused one moves."""
    backward_traffic: float = 1.0
    """Bytes that the backward of what memory bounds, the loss included, moves per byte of a fused one, beyond what the scales of
    its forward say."""
    gradient_bytes: float = 0.0
    """Bytes that each backward moves per parameter to sum its gradients, where the matmul does not do it."""
    host_s: float = 0.0
    """Seconds of the host for each kernel and each collective that it launches. A forward or backward takes no less."""
    tensor_host_s: float = 0.0
    """Seconds of the host for each tensor-parallel collective and each rank that takes part, in pipelines of several stages on
    clusters of several nodes, whether or not a pipeline is on several: some stacks take a collective apart there and issue it
    rank by rank."""
    ring_step_s: float = 0.0
    """Seconds more of each step round a ring of a tensor-parallel collective over several nodes; nothing hides them."""
    micro_batch_s: float = 0.0
    """Seconds that each forward and each backward of a stage takes besides its layers: the schedule's bookkeeping, waits for
    messages to be handed over."""
    blocking_messages: bool = False
    """Whether a stage computes nothing while it sends or receives activations and their gradients."""
    message_s: float = 0.0
    """Seconds more that a message between stages keeps its sender and its receiver, where one of the next two figures says so."""
    message_nodes: float = 0.0
    """On clusters of so many nodes or more all messages keep them; 0: no cluster has so many."""
    message_lane_nodes: float = 0.0
    """On any cluster the messages to and from lanes on so many nodes or more keep them; 0: no lane has so many."""
    node_dispatch: bool = False
    """Whether it sends a token once to each node, and there once to each GPU, that has some of its experts, as DeepEP does; else
    once for each of them."""
    tensor_overlap: float = 0.0
    """Fraction of the seconds of tensor-parallel collectives that hides behind matmuls."""
    node_collective_scale: float = 1.0
    """Rate of its collectives among GPUs of one node per rate that they reach alone."""
    collective_scale: float = 1.0
    """The same of those across nodes."""
    overlap_slowdown: float = 0.0
    """How much longer computation takes while gradients or parameters are on their way beside it, as a fraction."""
    optimizer_traffic: float = 1.0
    """Bytes that its optimizer step moves per byte that a fused one moves; the norm and the copies of gradients are in it."""
    step_s: float = 0.0
    """Seconds of each iteration besides: data, logging, synchronisation."""
    gradient_copy: bool = False
    """Whether gradients in the training precision are held beside those that are summed."""
    activation_scale: float = 1.0
    """Bytes of activations kept per byte that fused kernels keep."""
    logits_scale: float = 1.0
    """Bytes of logits and their gradients per byte that the count of `sim.cost.memory` has."""
    fragmentation: float = 0.04
    """What the allocator reserves beyond what is allocated at the peak, as a fraction of that: 2.8 to 9.3 %, and 2.8 to 6.5 %
    with 4,096 tokens a sequence, in the runs of SimuMax (Megatron-LM, B200), which print both."""
    context_bytes: float = 1.0 * 2**30
    """The CUDA context, workspaces of libraries, and what the driver keeps of the memory that `nvidia-smi` and the catalogue
    tell: 0.3 to 0.7 GiB, which torch does not count as the device's. Of a CPU, the process."""
    variant_of: str = ""
    """The stack that it is but for some of its kernels; fits give the two all other constants of time in common."""
    mean_of: str = ""
    """The stacks, with commas between, of whose constants it has the means: what is taken for software that nobody measured."""
    source: str = ""
    """What its constants were fitted on or derived from."""

    @property
    def family(self) -> str:
        """The name of the stack that it is a variant of, or its own."""
        return self.variant_of or self.name

    @property
    def fuses_some_softmax(self) -> bool:
        """Whether its softmax is one kernel for some scores and several for others."""
        return self.megatron_softmax and not self.flash_attention

    def keeps_messages(self, nodes: int) -> bool:
        """Whether messages on a cluster of so many nodes can keep a sender or a receiver from computing."""
        some = 0 < self.message_nodes <= nodes or 0 < self.message_lane_nodes <= nodes
        return self.blocking_messages or (self.message_s > 0 and some)

    def moved_bytes(self, num_bytes: float, sharded_bytes: float, routing_bytes: float = 0) -> float:
        """What its memory-bound kernels move where fused ones move `num_bytes`; of `sharded_bytes` of them `sharded_traffic`
        tells, of `routing_bytes` of them `routing_traffic`."""
        moved = num_bytes * self.memory_traffic
        for own_bytes, traffic in ((sharded_bytes, self.sharded_traffic), (routing_bytes, self.routing_traffic)):
            if traffic:
                moved += own_bytes * (traffic - self.memory_traffic)
        return moved

    def __post_init__(self) -> None:
        """Raises InputError as the class says."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (bool, str)):
                continue
            least, most = _RANGES[field.name]
            if not least <= value <= most:
                raise InputError(f"stack {self.name!r}: {field.name} must be from {least:g} to {most:g}, but got {value!r}")


_SCALE = (0.01, 100.0)
_RANGES: Mapping[str, tuple[float, float]] = {
    "matmul_scale": _SCALE,
    "unaligned_scale": (0.01, 1.0),
    "attention_scale": _SCALE,
    "memory_traffic": _SCALE,
    "sharded_traffic": (0.0, 100.0),
    "routing_traffic": (0.0, 100.0),
    "kernel_s": (0.0, 1.0),
    "loss_traffic": _SCALE,
    "backward_traffic": _SCALE,
    "gradient_bytes": (0.0, 1000.0),
    "host_s": (0.0, 1.0),
    "tensor_host_s": (0.0, 1.0),
    "ring_step_s": (0.0, 1.0),
    "micro_batch_s": (0.0, 10.0),
    "message_s": (0.0, 100.0),
    "message_nodes": (0.0, 1e6),
    "message_lane_nodes": (0.0, 1e6),
    "tensor_overlap": (0.0, 1.0),
    "node_collective_scale": _SCALE,
    "collective_scale": _SCALE,
    "overlap_slowdown": (0.0, 10.0),
    "optimizer_traffic": _SCALE,
    "step_s": (0.0, math.inf),
    "activation_scale": _SCALE,
    "logits_scale": _SCALE,
    "fragmentation": (0.0, 10.0),
    "context_bytes": (0.0, math.inf),
}

STACK_UNITS = {
    "kernel_s": ("kernel", "time"),
    "host_s": ("host", "time"),
    "tensor_host_s": ("tensor_host", "time"),
    "ring_step_s": ("ring_step", "time"),
    "micro_batch_s": ("micro_batch", "time"),
    "message_s": ("message", "time"),
    "step_s": ("step", "time"),
    "context_bytes": ("context", "size"),
}
"""Fields that a file gives with a unit: the key there, and the dimension."""


def stack(name: str) -> Stack:
    """The record of this name. Raises InputError with the nearest known name."""
    known = stacks()
    if name not in known:
        raise InputError(f"unknown software stack {name!r}{nearest(name, known) or ';'} known: {', '.join(known)}")
    return known[name]


@cache
def stacks() -> Mapping[str, Stack]:
    """All known stacks by name, in the order of the file, which is read at the first call."""
    root = Table(read_own_yaml(CONSTANTS), CONSTANTS.name)
    entries = root.table("stacks")
    names = entries.keys()
    return MappingProxyType({name: read_stack(name, entries.table(name)) for name in names})


def read_stack(name: str, table: Table, base: Stack | None = None) -> Stack:
    """The stack that a table describes; what it does not mention is as in `base`, or the default. The table is closed.

    `like: NAME` takes a known stack as the base. Raises InputError with the key, the value and what is accepted.
    """
    if table.text("like", None) is not None:
        base = table.get("like", stack, "the name of a software stack")
    base = base or Stack(name)
    values: dict[str, object] = {}
    for field in fields(Stack):
        # A record that says figures of its own is no mean, unless it says that, too.
        default = getattr(base, field.name) if field.name != "mean_of" else ""
        if field.name == "name":
            continue
        if field.name in STACK_UNITS:
            key, dimension = STACK_UNITS[field.name]
            value = values[field.name] = table.quantity(key, dimension, default, zero=True)
            least, most = _RANGES[field.name]
            if not least <= value <= most:
                raise table.error(key, f"expected a {dimension} of at most {most:g} s, but got {table.text(key)!r}")
        elif isinstance(default, bool):
            values[field.name] = table.flag(field.name, default)
        elif isinstance(default, str):
            values[field.name] = table.text(field.name, default)
        else:
            values[field.name] = table.number(field.name, default, *_RANGES[field.name])
    table.close()
    try:
        return Stack(name, **values)  # type: ignore[arg-type]
    except InputError as error:
        raise table.error("", str(error)) from None
