"""What a training run is told beside its plan, and what the runtime refuses to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.parameters import check_degree
from sim.spec.compile import compile_plan
from sim.spec.plan import Plan
from sim.spec.program import Program, dry_run
from sim.spec.reading import InputError
from sim.spec.transformer import transformer

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
"""Of parameters and activations, by precision. fp64 is for tests: no plan can say it."""

RATE_SCHEDULES = ("constant", "linear", "cosine")
BACKENDS = ("gloo", "nccl")
DEVICES = ("cpu", "cuda")
TOKEN_TYPES = ("auto", "uint16", "uint32")


@dataclass(frozen=True)
class Settings:
    """How to train what a plan describes. Raises InputError for a value that cannot be."""

    steps: int
    """Optimizer steps of the whole training, those before a resumption included."""
    data: str
    """text:FILE or FOLDER, or tokens:FILE."""
    device: str = "cpu"
    precision: str | None = None
    """In the place of the plan's, where given."""
    seed: int = 0
    learning_rate: float = 3e-4
    final_rate: float = 0.1
    """Of the learning rate that a linear or cosine schedule ends with, as a fraction."""
    rate_schedule: str = "cosine"
    warm_up_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    """The global norm that gradients are clipped to; 0 for not at all."""
    token_type: str = "auto"
    checkpoints: Path | None = None
    """The folder of the run's checkpoints; None for none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 for one at the end alone."""
    keep_checkpoints: int = 0
    """How many of the latest complete checkpoints stay; 0 for all."""
    resume: bool = False
    weights: Path | None = None
    """A Hugging Face folder whose safetensors are the first weights; a run that is resumed has the checkpoint's."""
    save_weights: Path | None = None
    """A folder that the trained weights are written to, as Hugging Face safetensors."""
    timeout_s: float = 60.0
    """How long a worker waits for another before the run is given up."""
    backend: str | None = None
    """gloo or nccl; by default nccl on cuda and gloo on the cpu. With gloo, several workers may share a GPU."""
    compile: bool = False
    """Whether layers are compiled by torch.compile."""
    quiet: bool = False
    """Whether no line is printed for each step."""
    pace: Path | None = None
    """A pace file (`sim.spec.pace`): each instruction waits to take as long as it says; None for the device's own time."""
    testbed: str | None = None
    """The testbed (`runtime.testbed`) in whose namespaces the workers run; None for the machine's own network."""
    results: Path | None = None
    """The folder that the measured trace and the figures are written to (`runtime.results`); None for none."""

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "device": DEVICES,
            "precision": (None, *DTYPES),
            "rate_schedule": RATE_SCHEDULES,
            "token_type": TOKEN_TYPES,
            "backend": (None, *BACKENDS),
        }
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                shown = ", ".join(str(value) for value in accepted if value not in (None, "fp64"))
                raise InputError(f"{name.replace('_', ' ')} is one of {shown}, but got {getattr(self, name)!r}")
        least: dict[str, float] = {"steps": 1, "seed": 0, "warm_up_steps": 0, "checkpoint_every": 0, "keep_checkpoints": 0}
        least |= dict.fromkeys(("learning_rate", "weight_decay", "clip_norm", "final_rate"), 0.0)
        for name, minimum in least.items():
            if not minimum <= getattr(self, name) < float("inf"):
                raise InputError(f"{name.replace('_', ' ')} is at least {minimum:g}, but got {getattr(self, name)}")
        if not 0 < self.timeout_s < float("inf"):
            raise InputError(f"the timeout is above 0 s, but got {self.timeout_s}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is at least 0 and below 1, but got {getattr(self, name)}")
        if not self.epsilon > 0:
            raise InputError(f"epsilon is above 0, but got {self.epsilon}")
        for name in ("pace", "testbed"):
            if getattr(self, name) is not None and self.device != "cpu":
                raise InputError(f"a run with a {name} computes on the cpu, but the device is {self.device}")
        if self.backend == "nccl" and self.device == "cpu":
            raise InputError("backend nccl needs device cuda, but got cpu")
        if self.checkpoints is None and (self.resume or self.checkpoint_every or self.keep_checkpoints):
            raise InputError("to resume, or to save on the way, the folder of the checkpoints (--checkpoints) must be given")
        folders = [folder.resolve() for folder in (self.checkpoints, self.save_weights) if folder is not None]
        if len(set(folders)) < len(folders):
            raise InputError(f"checkpoints and saved weights need a folder each, but got {self.checkpoints} for both")
        if self.final_rate > 1:
            raise InputError(f"final rate is a fraction of the learning rate, at most 1, but got {self.final_rate}")

    @property
    def chosen_backend(self) -> str:
        """The backend of the workers' messages and collectives."""
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")


def with_model(plan: Plan, model: str | None, precision: str | None) -> Plan:
    """The plan with another model, by preset or path, and another precision, where they are given.

    Raises InputError where the model does not fit the plan's layer ranges. fp64, which no plan can say, is passed over.
    """
    if model is not None:
        plan = dataclasses.replace(plan, model=transformer(model))
    if precision is not None and precision != "fp64":
        plan = dataclasses.replace(plan, precision=precision)
    return plan


def check_runnable(plan: Plan, settings: Settings) -> Program:
    """The plan's program. Raises InputError, in one line, for what a plan can say and the runtime cannot run."""
    t = plan.transformer
    if (settings.precision or plan.precision) not in DTYPES:
        shown = ", ".join(name for name in DTYPES if name != "fp64")
        raise InputError(f"the runtime trains in {shown}, but the plan's precision is {plan.precision}")
    refused = {
        "experts with biases": t.experts is not None and t.mlp_bias,
        "alibi positions": t.position == "alibi",
        "an embedding of another width than the layers": t.projected_embeddings,
    }
    for what, present in refused.items():
        if present:
            raise InputError(f"the runtime cannot run {what}, which {t.name} has")
    _check_context(plan)
    program = compile_plan(plan)
    _check_experts(plan)
    _check_shard_group(plan, program)
    for degree in sorted({lane.tensor_parallel for lane in program.lanes}):
        what = "sequence length"
        if plan.sequence_slices > 1 or plan.context_parallel > 1:
            what = f"length of {'a slice' if plan.sequence_slices > 1 else 'the part of a context rank'} of the sequences"
        check_degree(t, degree, plan.slice_length // plan.context_parallel, plan.sequence_parallel, what)
    dry_run(program)
    return program


def _check_shard_group(plan: Plan, program: Program) -> None:
    """Raises InputError where the shard groups of some layers would be of unequal numbers of ranks."""
    if plan.shard_group is None or plan.zero_stage == 0:
        return
    for names in program.members.values():
        lanes = [program.by_name[name] for name in names]
        degrees = sorted({lane.tensor_parallel for lane in lanes})
        if len(degrees) > 1 and plan.shard_group < sum(lane.context_parallel for lane in lanes):
            raise InputError(
                f"for shard_group {plan.shard_group} the runtime needs one tensor-parallel degree of all that hold a layer, "
                f"but got {', '.join(map(str, degrees))}; accepted: null"
            )


def _check_experts(plan: Plan) -> None:
    """Nothing. Raises InputError where lanes that divide experts would not send tokens to one another in one order."""
    fewest = min(len(replica.devices) // plan.context_parallel for _, _, _, replica in plan.replicas())
    if plan.expert_copies(fewest) == 1:
        return
    needs = f"with expert_parallel {plan.expert_parallel} the runtime needs"
    counts = sorted({pipeline.micro_batches for pipeline in plan.pipelines})
    if len(counts) > 1:
        raise InputError(f"{needs} as many micro-batches in every pipeline, but got {', '.join(map(str, counts))}")
    for s, stages in enumerate(zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True)):
        full = sorted({stage.recomputed()["full"] for stage in stages})
        if len(full) > 1:
            raise InputError(
                f"{needs} as many layers of a stage recomputed in full in every pipeline, but those of stage {s} recompute "
                f"{', '.join(map(str, full))}"
            )


def _check_context(plan: Plan) -> None:
    """Nothing. Raises InputError where sequences cannot be divided over context ranks."""
    t, ranks, length = plan.transformer, plan.context_parallel, plan.sequence_length
    if ranks == 1:
        return
    if length % (2 * ranks):
        raise InputError(
            f"context_parallel {ranks} gives each rank two equal stretches of every sequence, but it has {length} tokens; "
            f"accepted: a multiple of {2 * ranks}"
        )
    if t.sliding_window is not None and t.sliding_window < length:
        raise InputError(
            f"the runtime divides sequences (context_parallel {ranks}) no longer than the window of the attention, but that of "
            f"{t.name} is {t.sliding_window} and they have {length} tokens; accepted: context_parallel 1"
        )
