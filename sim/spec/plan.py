"""The plan: which devices hold which layers, in which pipelines, and how each iteration's batch flows through them."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import PRECISIONS
from sim.spec.job import GRADIENT_PRECISIONS, OPTIMIZERS, Job
from sim.spec.reading import InputError, Table, parse_json, read_text
from sim.spec.transformer import Transformer, read_transformer, to_table, transformer

FORMAT = "motley-plan/1"
SCHEDULES = ("gpipe", "1f1b", "split-1f1b", "eager-1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v")
COUNTED_SCHEDULES = ("1f1b", "split-1f1b")
"""Those under which stages may say how many micro-batches they hold."""
SLICED_SCHEDULES = ("gpipe", "1f1b", "split-1f1b")
"""Those that can take sequences in slices."""
MOST_SLICES = 16
ZERO_STAGES = (0, 1, 2, 3)

RECOMPUTE_ACCEPTED = f"{', '.join(RECOMPUTE)}, {{MODE: NUMBER OF LAYERS}} or {{MODE: NUMBER OF LAYERS, rest: A MODE BEFORE IT}}"

LayerRange = tuple[int, int]
"""`(start, stop)`, the layers start, start + 1, ..., stop - 1."""


def slice_counts(sequence_length: int) -> list[int]:
    """In how many equal slices a sequence of so many tokens may come."""
    return [slices for slices in range(1, MOST_SLICES + 1) if sequence_length % slices == 0]


def expert_copies(expert_parallel: int, expert_tensor_parallel: int | None, tensor_parallel: int) -> int:
    """Tensor-parallel groups of so many ranks that have all experts of a layer once."""
    return expert_parallel // (1 if expert_tensor_parallel is None else tensor_parallel)


def tensor_groups(devices: tuple[str, ...], context_parallel: int) -> tuple[tuple[str, ...], ...]:
    """The devices of each context rank of a replica, which share each layer: tensor ranks are listed fastest."""
    degree = len(devices) // context_parallel
    return tuple(devices[i : i + degree] for i in range(0, len(devices), degree))


@dataclass(frozen=True)
class Replica:
    """One tensor-parallel group of a stage and how many sequences of every micro-batch it takes."""

    devices: tuple[str, ...]
    """Tensor ranks fastest, then context ranks."""
    sequences: int


@dataclass(frozen=True)
class Stage:
    """Some layers and the replicas that hold them, each all of them.

    The first `recompute_layers` of its layers are under the mode `recompute`, or, if that is None, all; the others under
    `recompute_rest`.
    """

    replicas: tuple[Replica, ...]
    layers: tuple[LayerRange, ...]
    recompute: str = "none"
    recompute_layers: int | None = None
    recompute_rest: str = "none"
    in_flight: int | None = None
    """The most micro-batches that it holds at once, under 1F1B; None for one, and one more for each stage that follows.

    Where sequences come in slices, it is of slices, and the stage holds all but one of a micro-batch's besides: its backwards
    begin with the last one.
    """

    @property
    def layer_count(self) -> int:
        """How many layers the stage holds."""
        return sum(stop - start for start, stop in self.layers)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all its replicas."""
        return tuple(device for replica in self.replicas for device in replica.devices)

    def recomputed(self) -> dict[str, int]:
        """How many of the stage's layers are kept under each recompute mode, as {'none': n, 'pointwise': n, ...}."""
        counts = dict.fromkeys(RECOMPUTE, 0)
        first = self.layer_count if self.recompute_layers is None else self.recompute_layers
        counts[self.recompute] = first
        counts[self.recompute_rest] += self.layer_count - first
        return counts

    def recomputed_within(self, layers: LayerRange) -> dict[str, int]:
        """The same of the layers of a range alone."""
        counts = dict.fromkeys(RECOMPUTE, 0)
        left = self.layer_count if self.recompute_layers is None else self.recompute_layers
        for start, stop in sorted(self.layers):
            middle = start + min(stop - start, left)
            left -= middle - start
            for mode, a, b in ((self.recompute, start, middle), (self.recompute_rest, middle, stop)):
                counts[mode] += max(0, min(layers[1], b) - max(layers[0], a))
        return counts

    @property
    def most_recompute(self) -> str:
        """Of the modes that its layers are under, the one that recomputes most."""
        return [mode for mode, count in self.recomputed().items() if count or mode == "none"][-1]

    def recomputing(self, mode: str, layers: int | None = None, rest: str = "none") -> Stage:
        """The stage with its first `layers` layers under a mode (None: all) and the others under another one."""
        if layers == 0:
            mode, layers = rest, None
        if layers == self.layer_count or rest == mode:
            layers = None
        return replace(self, recompute=mode, recompute_layers=layers, recompute_rest="none" if layers is None else rest)

    @property
    def recompute_words(self) -> str:
        """What it recomputes in words, as in 'full 3/20, rest pointwise'."""
        if self.recompute_layers is None:
            return self.recompute
        rest = "" if self.recompute_rest == "none" else f", rest {self.recompute_rest}"
        return f"{self.recompute} {self.recompute_layers}/{self.layer_count}{rest}"


@dataclass(frozen=True)
class Pipeline:
    """One copy of the model: its stages in layer order, and the micro-batches it takes in one iteration."""

    micro_batch: int
    micro_batches: int
    stages: tuple[Stage, ...]

    @property
    def visiting_order(self) -> list[int]:
        """The indices of its stages in the order that a micro-batch first visits them, which is that of their layers."""
        return sorted(range(len(self.stages)), key=lambda s: min(self.stages[s].layers))

    @cached_property
    def chunks(self) -> tuple[tuple[int, LayerRange], ...]:
        """Every layer range with the index of the stage that holds it, in the order that a micro-batch visits them."""
        return tuple(sorted(((s, r) for s, stage in enumerate(self.stages) for r in stage.layers), key=lambda chunk: chunk[1]))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that its stages hold at once under 1F1B, in the order that a micro-batch first visits them."""
        depth = len(self.stages)
        own = [self.stages[s].in_flight for s in self.visiting_order]
        return tuple(depth - position if count is None else count for position, count in enumerate(own))

    def holding(self, counts: Sequence[int] | None) -> Pipeline:
        """The pipeline whose stages, in their order, hold at most so many micro-batches; None: what the schedule says."""
        own = [None] * len(self.stages) if counts is None else counts
        return replace(self, stages=tuple([replace(stage, in_flight=n) for stage, n in zip(self.stages, own, strict=True)]))

    @property
    def sequences(self) -> int:
        """Sequences it takes in one iteration."""
        return self.micro_batch * self.micro_batches

    @property
    def build(self) -> Hashable:
        """All that it is, but for its devices: pipelines of one build do the same, each on its own."""
        stages = [
            (*(getattr(s, name) for name in _SAID_OF_STAGES), *((len(r.devices), r.sequences) for r in s.replicas))
            for s in self.stages
        ]
        return self.micro_batch, self.micro_batches, tuple(stages)


_SAID_OF_STAGES = tuple(each.name for each in fields(Stage) if each.name != "replicas")


@dataclass(frozen=True)
class Plan:
    """Everything that decides how a job runs on a cluster. Raises InputError where it contradicts itself.

    What needs the cluster or the model to judge (memory, precision, heads) is a judge's answer, not an error here.
    """

    cluster: str
    model: str | Transformer
    sequence_length: int
    global_batch: int
    pipelines: tuple[Pipeline, ...]
    precision: str = "bf16"
    schedule: str = "1f1b"
    zero_stage: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    """1: each tensor rank has whole experts, and counts for `expert_parallel`; None: it has columns of each, as of all else."""
    sequence_slices: int = 1
    """Into how many equal slices each sequence is cut: a micro-batch goes through a pipeline slice by slice, each attending to
    those before it, and its backwards come back from the last one to the first."""
    shard_group: int | None = None
    overlap_gradients: bool = True
    gradient_precision: str = "fp32"
    offload_optimizer: bool = False
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def transformer(self) -> Transformer:
        """The model: the preset of this name, or the fields given inline."""
        return transformer(self.model) if isinstance(self.model, str) else self.model

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """All devices it uses, pipeline by pipeline, stage by stage."""
        return tuple(device for pipeline in self.pipelines for stage in pipeline.stages for device in stage.devices)

    @property
    def tensor_degrees(self) -> frozenset[int]:
        """The tensor-parallel degrees of its lanes."""
        return frozenset(len(replica.devices) // self.context_parallel for *_, replica in self.replicas())

    @property
    def slice_length(self) -> int:
        """The tokens of a slice of a sequence: all of them, where sequences are not cut."""
        return self.sequence_length // self.sequence_slices

    @property
    def whole_experts(self) -> bool:
        """Whether tensor ranks have whole experts, each others of them, and not a part of each."""
        return self.expert_tensor_parallel is not None

    def expert_copies(self, tensor_parallel: int) -> int:
        """Tensor-parallel groups of so many ranks, one after another in the plan, that have all experts of a layer once."""
        return expert_copies(self.expert_parallel, self.expert_tensor_parallel, tensor_parallel)

    def job(self) -> Job:
        """The job it was made for."""
        precisions = {"precision": self.precision, "gradient_precision": self.gradient_precision}
        return Job(self.transformer, self.sequence_length, self.global_batch, optimizer=self.optimizer, **precisions)

    def to_json(self) -> str:
        """The text of its file: every field but those at their defaults, one stage a line."""
        return _written(self)

    @property
    def holds_its_own(self) -> bool:
        """Whether stages say how many micro-batches they hold."""
        return any(stage.in_flight is not None for pipeline in self.pipelines for stage in pipeline.stages)

    def under(self, schedule: str) -> Plan:
        """The plan under a schedule; without slices, and numbers of micro-batches in flight, where it takes none."""
        slices = self.sequence_slices if schedule in SLICED_SCHEDULES else 1
        counted = schedule in COUNTED_SCHEDULES
        pipelines = self.pipelines if counted else tuple([pipeline.holding(None) for pipeline in self.pipelines])
        return replace(self, schedule=schedule, sequence_slices=slices, pipelines=pipelines)

    def replicas(self) -> Iterator[tuple[int, int, int, Replica]]:
        """Every replica with the indices of its pipeline, its stage there, and itself there."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for r, replica in enumerate(stage.replicas):
                    yield p, s, r, replica


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check(plan: Plan) -> None:
    """Raises InputError for the first contradiction inside the plan."""
    if not plan.pipelines:
        raise InputError("a plan has at least one pipeline, but got none")
    choices: dict[str, tuple[object, ...]] = {
        "precision": PRECISIONS,
        "schedule": SCHEDULES,
        "zero_stage": ZERO_STAGES,
        "gradient_precision": GRADIENT_PRECISIONS,
        "optimizer": OPTIMIZERS,
    }
    for name, accepted in choices.items():
        if getattr(plan, name) not in accepted:
            raise InputError(f"{name} is one of {', '.join(map(str, accepted))}, but got {getattr(plan, name)!r}")
    _check_slices(plan)
    if plan.expert_tensor_parallel not in (None, 1):
        raise InputError(
            f"expert_tensor_parallel is 1 (whole experts on each tensor rank) or null (as all else), but got "
            f"{plan.expert_tensor_parallel}"
        )
    layers = plan.transformer.layers
    terms = [f"{p.micro_batch} x {p.micro_batches}" for p in plan.pipelines]
    total = sum(pipeline.sequences for pipeline in plan.pipelines)
    if total != plan.global_batch:
        shown = " + ".join(terms[:6]) + (" + ..." if len(terms) > 6 else "")
        raise InputError(
            f"micro_batch x micro_batches must sum to the global batch {plan.global_batch} over the pipelines, "
            f"but got {shown} = {total}"
        )
    seen: dict[str, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for name in ("micro_batch", "micro_batches"):
            if getattr(pipeline, name) < 1:
                raise InputError(f"pipelines[{p}]: {name} is at least 1, but got {getattr(pipeline, name)}")
        _check_layers(pipeline, layers, p)
        _check_in_flight(plan.schedule, pipeline, p)
        for s, stage in enumerate(pipeline.stages):
            where = f"pipelines[{p}].stages[{s}]"
            shares = sum(replica.sequences for replica in stage.replicas)
            if shares != pipeline.micro_batch:
                raise InputError(
                    f"{where}: the replicas' sequences must sum to the micro_batch {pipeline.micro_batch}, but got "
                    + " + ".join(str(replica.sequences) for replica in stage.replicas)
                    + f" = {shares}"
                )
            if not _is_recompute(stage.recompute, stage.recompute_layers, stage.recompute_rest):
                got = stage.recompute if stage.recompute_layers is None else f"{stage.recompute}: {stage.recompute_layers}"
                got += "" if stage.recompute_rest == "none" else f", rest: {stage.recompute_rest}"
                raise InputError(f"{where}: recompute is {RECOMPUTE_ACCEPTED}, but got {got}")
            if stage.recompute_layers is not None and not 0 <= stage.recompute_layers <= stage.layer_count:
                raise InputError(
                    f"{where}: recompute is of at most all layers of the stage, which has {stage.layer_count}, "
                    f"but got {stage.recompute}: {stage.recompute_layers}"
                )
            for device in stage.devices:
                if device in seen:
                    raise InputError(f"{where}: device {device!r} is used twice; {seen[device]} has it already")
                seen[device] = where
            for replica in stage.replicas:
                if replica.sequences < 1 or not replica.devices:
                    raise InputError(
                        f"{where}: a replica has at least one device and one sequence, but got {len(replica.devices)} devices "
                        f"and {replica.sequences} sequences"
                    )
                if len(replica.devices) % plan.context_parallel:
                    raise InputError(
                        f"{where}: the devices of a replica must divide by context_parallel {plan.context_parallel}, "
                        f"but there are {len(replica.devices)}"
                    )
    plan.job()  # which checks the sizes, against the model's positions too


def _check_layers(pipeline: Pipeline, layers: int, p: int) -> None:
    """Raises InputError unless the stages' layer ranges cover 0..layers once, without a gap."""
    held = sorted((r, s) for s, stage in enumerate(pipeline.stages) for r in stage.layers)
    shown = ", ".join("+".join(f"[{a}, {b}]" for a, b in stage.layers) for stage in pipeline.stages)
    here = f"pipelines[{p}]: stage layers must cover 0 to {layers} without gap or overlap"
    at = 0
    for (start, stop), s in held:
        if not 0 <= start <= stop <= layers:
            raise InputError(f"{here}, but stage {s} has [{start}, {stop}]")
        if start == stop and start not in (0, layers):
            raise InputError(f"{here}, and only an end stage may be empty, but stage {s} has [{start}, {stop}]")
        if start != at:
            what = f"layers {at} to {start} are missing" if start > at else f"layers {start} to {min(at, stop)} are held twice"
            raise InputError(f"{here}, but {what} (the stages have {shown})")
        at = stop
    if at != layers:
        raise InputError(f"{here}, but layers {at} to {layers} are missing (the stages have {shown})")
    for end in (0, layers):
        if sum(r == (end, end) for r, _ in held) > 1:
            raise InputError(f"{here}, but more than one stage has the empty range [{end}, {end}]")


def _check_slices(plan: Plan) -> None:
    """Raises InputError where sequences cannot be cut in slices as the plan says."""
    slices = plan.sequence_slices
    if slices == 1:
        return
    if slices not in slice_counts(plan.sequence_length):
        accepted = ", ".join(map(str, slice_counts(plan.sequence_length)))
        raise InputError(
            f"sequence_slices divides the sequence_length {plan.sequence_length}, at most by {MOST_SLICES}, but got {slices}; "
            f"accepted: {accepted}"
        )
    settings = {
        "schedule": (plan.schedule, SLICED_SCHEDULES),
        "zero_stage": (plan.zero_stage, (0, 1)),
        "context_parallel": (plan.context_parallel, (1,)),
        "expert_parallel": (plan.expert_parallel, (1,)),
    }
    for name, (value, accepted_values) in settings.items():
        if value not in accepted_values:
            raise InputError(
                f"sequence_slices {slices} goes with {name} {', '.join(map(str, accepted_values))}, but it is {value}; "
                "accepted: sequence_slices 1"
            )


def _check_in_flight(schedule: str, pipeline: Pipeline, p: int) -> None:
    """Raises InputError unless the stages that say how many micro-batches they hold can begin: none waits for itself."""
    if all(stage.in_flight is None for stage in pipeline.stages):
        return
    if schedule not in COUNTED_SCHEDULES:
        accepted = " and ".join(COUNTED_SCHEDULES)
        raise InputError(f"pipelines[{p}]: in_flight is for the schedules {accepted}, but the schedule is {schedule}")
    order, counts = pipeline.visiting_order, pipeline.in_flight
    if counts[-1] < 1:
        raise InputError(f"pipelines[{p}].stages[{order[-1]}]: in_flight is at least 1, but got {counts[-1]}")
    for (s, count), (after, more) in pairwise(zip(order, counts, strict=True)):
        if count < more:
            raise InputError(
                f"pipelines[{p}].stages[{s}]: in_flight is at least that of the next stage, or that one waits for ever, "
                f"but got {count}, and stages[{after}] has {more}"
            )


# --- Reading and writing ---------------------------------------------------------------------------------------------


def read_plan(path: str | Path) -> Plan:
    """The plan of a JSON file. Raises InputError that names the file, the key, the value and what is accepted."""
    return parse_plan(read_text(path), str(path))


def parse_plan(text: str, where: str = "plan") -> Plan:
    """The plan of a JSON text. Raises InputError as `read_plan` does."""
    table = Table(parse_json(text, where), where)
    table.choice("format", [FORMAT])
    micro: list[Pipeline] = []
    for entry in table.tables("pipelines", minimum=1):
        micro_batch = entry.integer("micro_batch", minimum=1)
        pipeline = Pipeline(
            micro_batch=micro_batch,
            micro_batches=entry.integer("micro_batches", minimum=1),
            stages=tuple(_read_stage(stage, micro_batch) for stage in entry.tables("stages", minimum=1)),
        )
        entry.close()
        micro.append(pipeline)
    model = table.get("model", lambda value: value, "a preset name or the fields of a transformer")
    model = read_transformer(table.table("model")) if isinstance(model, dict) else table.text("model")
    values: dict[str, Any] = {
        "cluster": table.name("cluster"),
        "model": model,
        "sequence_length": table.integer("sequence_length", minimum=1),
        "global_batch": table.integer("global_batch", minimum=1),
        "precision": table.choice("precision", PRECISIONS, "bf16"),
        "schedule": table.choice("schedule", SCHEDULES, "1f1b"),
        "zero_stage": table.choice("zero_stage", ZERO_STAGES, 1),
        "sequence_parallel": table.flag("sequence_parallel", False),
        "context_parallel": table.integer("context_parallel", 1, minimum=1),
        "expert_parallel": table.integer("expert_parallel", 1, minimum=1),
        "expert_tensor_parallel": table.get(
            "expert_tensor_parallel", _read_whole, "1 (whole experts) or null (as all else)", None
        ),
        "sequence_slices": table.integer("sequence_slices", 1, minimum=1),
        "overlap_gradients": table.flag("overlap_gradients", True),
        "gradient_precision": table.choice("gradient_precision", GRADIENT_PRECISIONS, "fp32"),
        "offload_optimizer": table.flag("offload_optimizer", False),
        "optimizer": table.choice("optimizer", OPTIMIZERS, "adamw"),
    }
    values["shard_group"] = table.optional_integer("shard_group", minimum=1)
    table.close()
    try:
        return Plan(pipelines=tuple(micro), **values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _read_whole(value: object) -> int | None:
    """1, or None."""
    if value is None or (type(value) is int and value == 1):
        return value
    raise ValueError


def _read_stage(table: Table, micro_batch: int) -> Stage:
    """One stage; its `devices` stand for one replica that takes every micro-batch whole."""

    def layers(value: object) -> tuple[LayerRange, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError
        ranges = value if isinstance(value[0], list) else [value]
        for r in ranges:
            if not isinstance(r, list) or len(r) != 2 or any(isinstance(x, bool) or not isinstance(x, int) for x in r):
                raise ValueError
        return tuple((r[0], r[1]) for r in ranges)

    def recompute(value: object) -> tuple[str, int | None, str]:
        if isinstance(value, str) and _is_recompute(value, None, "none"):
            return value, None, "none"
        if isinstance(value, dict):
            rest = value.get("rest", "none")
            counts = [(mode, count) for mode, count in value.items() if mode != "rest"]
            if len(counts) == 1 and type(counts[0][1]) is int and counts[0][1] >= 0 and _is_recompute(*counts[0], rest):
                return *counts[0], rest
        raise ValueError

    if ("devices" in table) == ("replicas" in table):
        both = "both" if "devices" in table else "neither"
        raise table.error("devices", f"a stage has either devices or replicas, but got {both}")
    if "devices" in table:
        replicas = [Replica(_read_devices(table), micro_batch)]
    else:
        replicas = []
        for entry in table.tables("replicas", minimum=1):
            replicas.append(Replica(_read_devices(entry), entry.integer("sequences", minimum=1)))
            entry.close()
    recomputed = table.get("recompute", recompute, RECOMPUTE_ACCEPTED, ("none", None, "none"))
    ranges = table.get("layers", layers, "[start, stop] or a list of such ranges")
    flying = table.integer("in_flight", minimum=1) if "in_flight" in table else None
    stage = Stage(tuple(replicas), ranges, *recomputed, in_flight=flying)
    table.close()
    return stage


def _is_recompute(mode: object, layers: int | None, rest: object) -> bool:
    """Whether a stage can say so of its first layers and of the others, which recompute less."""
    if mode not in RECOMPUTE or rest not in RECOMPUTE:
        return False
    if layers is None:
        return rest == "none"
    return RECOMPUTE.index(str(rest)) < RECOMPUTE.index(str(mode))


def _read_devices(table: Table) -> tuple[str, ...]:
    """The device names of one replica."""
    devices = table.items("devices", minimum=1)
    for device in devices:
        if not isinstance(device, str) or not device.isprintable():
            raise table.error("devices", f"expected device names such as 'a100/0', but got {device!r}")
    return tuple(devices)


def _written(plan: Plan) -> str:
    """The JSON text of a plan."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "cluster": plan.cluster,
        "model": plan.model if isinstance(plan.model, str) else to_table(plan.model),
        "sequence_length": plan.sequence_length,
        "global_batch": plan.global_batch,
        "precision": plan.precision,
        "schedule": plan.schedule,
        "zero_stage": plan.zero_stage,
        "sequence_parallel": plan.sequence_parallel,
    }
    defaults = Plan.__dataclass_fields__
    degrees = ("context_parallel", "expert_parallel", "expert_tensor_parallel", "sequence_slices", "shard_group")
    for name in (*degrees, "overlap_gradients", "gradient_precision", "offload_optimizer", "optimizer"):
        if getattr(plan, name) != defaults[name].default:
            head[name] = getattr(plan, name)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    pipelines = []
    for pipeline in plan.pipelines:
        stages = ",\n".join(f"      {json.dumps(_stage_table(stage))}" for stage in pipeline.stages)
        pipelines.append(
            f'    {{"micro_batch": {pipeline.micro_batch}, "micro_batches": {pipeline.micro_batches}, "stages": [\n{stages}]}}'
        )
    return "{\n" + "\n".join(lines) + '\n  "pipelines": [\n' + ",\n".join(pipelines) + "]\n}\n"


def _stage_table(stage: Stage) -> dict[str, Any]:
    """The plain values of one stage."""
    table: dict[str, Any] = {}
    if len(stage.replicas) == 1:
        table["devices"] = list(stage.replicas[0].devices)
    else:
        table["replicas"] = [{"devices": list(r.devices), "sequences": r.sequences} for r in stage.replicas]
    ranges = [list(r) for r in stage.layers]
    table["layers"] = ranges[0] if len(ranges) == 1 else ranges
    table["recompute"] = stage.recompute
    if stage.recompute_layers is not None:
        rest = {} if stage.recompute_rest == "none" else {"rest": stage.recompute_rest}
        table["recompute"] = {stage.recompute: stage.recompute_layers, **rest}
    if stage.in_flight is not None:
        table["in_flight"] = stage.in_flight
    return table
