"""Drafts: the pipelines of a plan while a planner still changes them, and what all planners do with them.

A draft is a tuple of `sim.spec.plan.Pipeline`; those are not checked before they become a `Plan`. Every stage of a draft is
one tensor-parallel group, or as many as there are context ranks, and holds one range of layers, in stage order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

from partition.search import Search
from sim.cost.feasibility import infeasible
from sim.spec.cluster import Cluster, Node
from sim.spec.counts import (
    RECOMPUTE,
    embedding_parameters_at,
    head_parameters_at,
    layer_parameters_at,
    tied_copy_parameters_at,
)
from sim.spec.job import Job
from sim.spec.plan import SLICED_SCHEDULES, LayerRange, Pipeline, Plan, Replica, Stage, expert_copies
from sim.spec.transformer import Transformer, presets

Draft: TypeAlias = tuple[Pipeline, ...]

GRANULARITIES = ("none", "selective", "full")
"""The recompute modes of whole stages that Megatron-LM has: its `--recompute-granularity`."""

FEWEST_TOKENS = 4096
"""Of a sequence that one context rank has: there are other ways to divide short ones."""

FEWEST_JUDGED, JUDGED_PLANS = 2, 20
"""Fewest and most plans that a planner has judged, as far as it has that many."""

SLACK = 1.2
"""Planners that price their drafts have those judged whose price is at most so many times the best one's."""

JUDGED_WORK = 450_000
"""Work of those plans together, as `simulation_work` counts it: one to three seconds of simulation on one core."""

CROSSING_WORK = 100
"""Work of a message between nodes. It shares links with others, which the simulation divides anew at each of its ends."""


@dataclass(frozen=True)
class Settings:
    """What a plan says of all its pipelines at once, as far as planners choose it."""

    schedule: str = "1f1b"
    zero_stage: int = 1
    sequence_parallel: bool = False
    offload_optimizer: bool = False
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    ahead: int = 0
    """Micro-batches that stages hold beside those of 1F1B for each message between nodes that is still to come."""
    sequence_slices: int = 1
    context_parallel: int = 1
    """Of each stage's devices, which are as many tensor-parallel groups."""

    @property
    def whole_experts(self) -> bool:
        """As of a plan: `Plan.whole_experts`."""
        return self.expert_tensor_parallel is not None

    def expert_copies(self, tensor_parallel: int) -> int:
        """As of a plan: `Plan.expert_copies`."""
        return expert_copies(self.expert_parallel, self.expert_tensor_parallel, tensor_parallel)

    def under(self, schedule: str, ahead: int = 0) -> Settings:
        """The settings with another schedule; in slices only where it takes them."""
        slices = self.sequence_slices if schedule in SLICED_SCHEDULES else 1
        return replace(self, schedule=schedule, ahead=ahead, sequence_slices=slices)

    def in_flight(self, groups: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
        """The micro-batches that stages of these devices, in stage order, hold at most; None where it is as the schedule says.

        A message between nodes is on its way while both its stages could work: with one micro-batch more in each direction
        they do.
        """
        nodes = [devices[0].rpartition("/")[0] for devices in groups]
        further = [1 + self.ahead * (a != b) for a, b in pairwise(nodes)]
        if not self.ahead or max(further, default=1) == 1:
            return None
        return tuple(accumulate(reversed(further), initial=1))[::-1]


def expert_divisions(model: Transformer, copies: int, tensor_parallel: int) -> list[tuple[int, int | None]]:
    """The degrees of expert parallelism, and of tensor parallelism of experts, that so many alike copies of a stage can have.

    The first is that of experts that are not divided.
    """
    experts = 1 if model.experts is None else model.experts.experts
    found: list[tuple[int, int | None]] = [(1, None)]
    for degree in range(2, experts + 1):
        if experts % degree:
            continue
        if copies % degree == 0:
            found.append((degree, None))
        if tensor_parallel > 1 and degree % tensor_parallel == 0 and copies % (degree // tensor_parallel) == 0:
            found.append((degree, 1))
    return found


def stage(
    devices: Sequence[str],
    layers: LayerRange,
    micro_batch: int,
    recompute: str = "none",
    amount: int = 0,
    in_flight: int | None = None,
) -> Stage:
    """A stage of one replica; with an `amount`, of recomputation as `recomputing` says it."""
    made = Stage((Replica(tuple(devices), micro_batch),), (layers,), recompute, in_flight=in_flight)
    return recomputing(made, amount) if amount else made


# --- Recomputation ---------------------------------------------------------------------------------------------------

# The least that a stage can recompute to save some memory is one number, its amount: of n layers, up to n are recomputed
# pointwise, which costs next to nothing. From there on each layer more is recomputed in full, and all others pointwise.


def recomputed(layers: int, amount: int) -> tuple[int, int, int, int]:
    """How many of so many layers are under each mode, in the order of `RECOMPUTE`, at an amount of recomputation."""
    full = max(0, amount - layers)
    return max(0, layers - amount), min(amount, layers - full), 0, full


def all_under(mode: str, layers: int) -> tuple[int, ...]:
    """The same of layers that are all under one mode."""
    return tuple([layers * (mode == one) for one in RECOMPUTE])


def most_recomputation(layers: int) -> int:
    """The amount at which all layers are recomputed in full."""
    return 2 * layers


def recomputing(stage: Stage, amount: int) -> Stage:
    """The stage with an amount of recomputation."""
    layers = stage.layer_count
    if amount <= layers:
        return stage.recomputing("pointwise", amount)
    return stage.recomputing("full", amount - layers, "pointwise")


def amount_of(stage: Stage) -> int:
    """The amount of recomputation that saves as much memory as the stage's own, or more."""
    counts = stage.recomputed()
    return stage.layer_count + counts["full"] if counts["full"] else counts["pointwise"]


# --- Plans -----------------------------------------------------------------------------------------------------------


def make_plan(cluster: Cluster, job: Job, draft: Draft, settings: Settings) -> Plan:
    """The plan of a draft. Raises InputError where the draft contradicts itself."""
    name = job.model.name
    return Plan(
        cluster=cluster.name,
        model=name if presets().get(name) == job.model else job.model,
        sequence_length=job.sequence_length,
        global_batch=job.global_batch,
        pipelines=draft,
        precision=job.precision,
        gradient_precision=job.gradient_precision,
        schedule=settings.schedule,
        zero_stage=settings.zero_stage,
        sequence_parallel=settings.sequence_parallel,
        expert_parallel=settings.expert_parallel,
        expert_tensor_parallel=settings.expert_tensor_parallel,
        sequence_slices=settings.sequence_slices,
        context_parallel=settings.context_parallel,
        offload_optimizer=settings.offload_optimizer,
        optimizer=job.optimizer,
    )


def settings_of(plan: Plan) -> Settings:
    """What a plan says of all its pipelines at once."""
    return Settings(
        plan.schedule,
        plan.zero_stage,
        plan.sequence_parallel,
        plan.offload_optimizer,
        plan.expert_parallel,
        plan.expert_tensor_parallel,
        sequence_slices=plan.sequence_slices,
        context_parallel=plan.context_parallel,
    )


def rescheduled(draft: Draft, settings: Settings, schedule: str, ahead: int = 0) -> tuple[Draft, Settings]:
    """The draft under another schedule, and the settings for it."""
    changed = settings.under(schedule, ahead)
    counts = [changed.in_flight([part.replicas[0].devices for part in pipeline.stages]) for pipeline in draft]
    return tuple([pipeline.holding(own) for pipeline, own in zip(draft, counts, strict=True)]), changed


def updated_parameters(job: Job, devices: int, layers: int, first: bool, last: bool, copies: int) -> float:
    """Parameters that each device of a stage updates if all of as many pipelines as `copies` divide the update (ZeRO).

    Of a stage with so many devices and layers, at these ends of its pipeline. A tied embedding is held at both ends.
    """
    model = job.model
    parameters = float(layers * layer_parameters_at(model, devices))
    if first:
        parameters += embedding_parameters_at(model, devices) / (2 if model.tied_embeddings and not last else 1)
    if last:
        parameters += head_parameters_at(model, devices)
        parameters += 0 if first else tied_copy_parameters_at(model, devices) / 2
    return parameters / copies


def simulation_work(draft: Draft, slices: int = 1) -> int:
    """How much work the simulation of a draft is, in instructions: six per lane and micro-batch, or slice, more between nodes."""
    total = 0
    for pipeline in draft:
        nodes = [part.devices[0].rpartition("/")[0] for part in pipeline.stages]
        crossings = sum(a != b for a, b in pairwise(nodes))
        replicas = max(len(part.replicas) for part in pipeline.stages)
        total += pipeline.micro_batches * slices * (6 * len(nodes) + CROSSING_WORK * crossings) * replicas
    return total


ROUNDS = 3
"""How often pipelines are told apart by their nodes, and nodes by their pipelines."""


def unlike(draft: Draft, cluster: Cluster) -> Draft:
    """One pipeline of each that are built alike, on nodes that are alike and that have alike pipelines.

    The simulation of a whole draft takes little more work than theirs (`sim.alike`, which looks at every link).
    """
    names = [[part.replicas[0].devices[0].rpartition("/")[0] for part in pipeline.stages] for pipeline in draft]
    sorts = {node.name: replace(node, name="", rack=None) for node in cluster.nodes}
    of_node = dict(zip(sorts, _numbered(sorts.values()), strict=True))
    of_pipeline = _numbered(
        (
            p.micro_batch,
            p.micro_batches,
            tuple([(part.layers, part.recompute, part.in_flight, len(part.devices)) for part in p.stages]),
        )
        for p in draft
    )
    for _ in range(ROUNDS):
        inside: dict[str, list[tuple[int, int]]] = {}
        for own, number in zip(names, of_pipeline, strict=True):
            for place, name in enumerate(own):
                inside.setdefault(name, []).append((number, place))
        told = _numbered((of_node[name], tuple(sorted(entries))) for name, entries in inside.items())
        of_node = dict(zip(inside, told, strict=True))
        of_pipeline = _numbered(
            (number, tuple([of_node[name] for name in own])) for own, number in zip(names, of_pipeline, strict=True)
        )
    return tuple(dict(zip(reversed(of_pipeline), reversed(draft), strict=True)).values())


def _numbered(things: Iterable[Hashable]) -> list[int]:
    """A number for each thing, the same for equals."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(thing, len(known)) for thing in things]


def usable_nodes(search: Search) -> list[Node]:
    """The nodes whose GPUs have the job's precision. Where none has, the search is told so."""
    found = [node for node in search.cluster.nodes if node.gpu.peak(search.job.precision) is not None]
    if not found:
        reject(search, [search.cluster.devices[0].name])
    return found


def reject(search: Search, devices: Sequence[str]) -> None:
    """Tells the search why the simplest plan on these devices, one stage each and all recomputed, cannot run (if it cannot)."""
    layers = search.job.model.layers
    held = devices[: max(1, layers)]
    bounds = [layers * i // len(held) for i in range(len(held) + 1)]
    stages = tuple(stage([name], (bounds[i], bounds[i + 1]), 1, "full") for i, name in enumerate(held))
    draft = (Pipeline(1, search.job.global_batch, stages),)
    plan = make_plan(search.cluster, search.job, draft, Settings())
    reason = infeasible(plan, search.cluster)
    if reason is not None:
        search.reject(plan, reason)


def fits_heads(job: Job, degree: int) -> bool:
    """Whether a tensor-parallel group of this degree can share the heads of the job's model."""
    heads, kv_heads = job.model.heads, job.model.kv_heads
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def degrees(job: Job, gpus: int) -> list[int]:
    """The tensor-parallel degrees that divide a node's GPUs and that the model's heads allow, smallest first."""
    return [degree for degree in range(1, gpus + 1) if gpus % degree == 0 and fits_heads(job, degree)]


def context_degrees(job: Job, most: int) -> list[int]:
    """Over how many ranks, up to so many, a sequence may go, each of which has two equal stretches of it; none for one."""
    tokens = job.sequence_length
    return [ranks for ranks in range(2, min(most, tokens // FEWEST_TOKENS) + 1) if tokens % (2 * ranks) == 0]


def judge_in_order(search: Search, drafts: Iterable[tuple[Draft, Settings]]) -> None:
    """Has drafts judged, the most promising first, until their number or their work reach what a planner may spend.

    Each is judged once, and those that cannot run are told to the search instead. What one spends is the same on every
    machine, so that the answer is, too.
    """
    seen: set[tuple[Draft, Settings]] = set()
    judged = spent = 0
    for draft, settings in drafts:
        if (draft, settings) in seen:
            continue
        seen.add((draft, settings))
        work = simulation_work(draft)
        if judged >= FEWEST_JUDGED and spent + work > JUDGED_WORK:
            continue  # a later one may be cheaper to simulate
        plan = make_plan(search.cluster, search.job, draft, settings)
        reason = infeasible(plan, search.cluster)
        if reason is not None:
            search.reject(plan, reason)
            continue
        search.consider(plan)
        judged, spent = judged + 1, spent + work
        if judged == JUDGED_PLANS:
            return
