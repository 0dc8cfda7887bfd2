"""Training what a plan says: what one worker builds, and the loop of its steps."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runtime import checkpoints, huggingface
from runtime.data import Batches, Order, Tokens, open_data
from runtime.gradients import Gradients, is_sharded, lane_sections, reduction_ranks, section_parameters
from runtime.interpreter import Interpreter
from runtime.launch import ranked_devices, use_interface_to
from runtime.messages import Messages
from runtime.model import ModelPart
from runtime.optimizer import Initial, Optimizer, StepFacts
from runtime.pacer import Lateness, Pacer
from runtime.parameters import Parameter, Section, initial_values, model_parameters, rows_of
from runtime.peak import gpu_kind_name, memory_peak_bytes, peak_flop_per_s, start_memory_watch
from runtime.recorder import WARM_UP, Clocks, Recorder, choose_step, gather_trace, measure_offsets
from runtime.results import RunResult, write_result
from runtime.settings import DTYPES, Settings, check_runnable
from runtime.tensor_parallel import DeferredWeights
from runtime.testbed import device_places, find
from runtime.watch import TrainingFailed, Watch
from runtime.world import Connections, World, expert_rank, lane_ranks
from sim.spec.counts import RECOMPUTE, model_flop
from sim.spec.pace import read_pace
from sim.spec.plan import LayerRange, Plan, Stage
from sim.spec.program import Lane
from sim.spec.reading import InputError, Table
from sim.spec.transformer import Transformer, to_table

Result = TypeVar("Result")

# --- One worker's part of the training -------------------------------------------------------------------------------


def recompute_modes(stage: Stage, layers: LayerRange) -> list[str]:
    """The recompute mode of each layer of a range."""
    counts = stage.recomputed_within(layers)
    return [mode for mode in reversed(RECOMPUTE) for _ in range(counts[mode])]


def model_parts(lane: Lane) -> list[LayerRange]:
    """The ranges of a lane's layers that its model is built in: the finest in which any of its backwards comes."""
    found = {part for chunk in lane.layers for m in (0, lane.last_backward) for part in lane.parts(chunk, m, backward=True)}
    return sorted(
        part for part in found if not any(other != part and part[0] <= other[0] <= other[1] <= part[1] for other in found)
    )


class Trainer:
    """One worker's model, optimizer, messages and data, and the step that all of them take together."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        tokens: Tokens,
        watch: Watch,
        initial: Initial | None = None,
        held: object = None,
    ) -> None:
        """`held` is what keeps other runs from writing into the folder of the checkpoints for as long as this one is there."""
        plan, lane, transformer = world.plan, world.lane, world.plan.transformer
        self.world, self.settings, self.plan = world, settings, plan
        self._held = held
        dtype = DTYPES[settings.precision or plan.precision]
        gradient_dtype = (
            dtype if dtype == torch.float64 else {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.gradient_precision]
        )
        self.sections: dict[LayerRange, Section] = {}
        sections = self.sections
        for layers in lane_sections(transformer, lane):
            held = section_parameters(plan, lane, layers, world.context, world.index)
            sections[layers] = Section(held, layers, world.index, lane.tensor_parallel, dtype, world.device)
            if is_sharded(plan, lane, layers):
                sections[layers].release()
        self.recorder = Recorder(world.device)
        self.pacer: Pacer | None = None
        if settings.pace is not None:
            seconds = read_pace(settings.pace, plan, world.program).seconds[world.device_name]
            self.pacer = Pacer(seconds, plan.sequence_slices)
        self.gradients = Gradients(world, sections, gradient_dtype)
        deferred = DeferredWeights(self.gradients.accumulate) if lane.splits_backward else None
        group = dataclasses.replace(world.tensor_group(plan.sequence_parallel), pacer=self.pacer)
        context, expert_group = world.context_group(self.pacer), world.expert_group()
        stage = plan.pipelines[lane.pipeline].stages[lane.stage]
        parts = {
            layers: ModelPart(
                transformer,
                layers,
                sections,
                group,
                embedding=lane.embedding and layers[0] == 0,
                head=lane.head and layers[1] == transformer.layers,
                recompute=recompute_modes(stage, layers),
                compile_layers=settings.compile,
                deferred=deferred,
                sequence_slices=plan.sequence_slices,
                context=context,
                expert_group=expert_group,
            )
            for layers in model_parts(lane)
        }
        self.gradients.attach()
        self.optimizer = Optimizer(world, sections, self.gradients, settings, dtype)
        self.optimizer.initialise(initial or _drawn(transformer, settings.seed))
        self.consumed = 0
        """Samples used so far."""
        self.tokens = tokens.count
        """Of the data, by which a checkpoint knows it again: a folder may have another name elsewhere."""
        self._order = Order(tokens.samples, settings.seed)
        self.interpreter = Interpreter(
            world,
            parts,
            Batches(tokens, self._order, plan, context),
            Messages(world, dtype),
            self.gradients,
            self.optimizer,
            self.recorder,
            watch,
            deferred,
            self.pacer,
        )

    def prepare(self) -> None:
        """Nothing; shuffles the epoch, which takes long where it has a billion samples, before anybody waits for it."""
        self._order.sample(self.consumed)

    def step(self, step: int) -> StepFacts:
        """What the step of this number, counted from 0, did."""
        facts = self.interpreter.iteration(step, self.consumed)
        self.consumed += self.plan.global_batch
        return facts

    def weights(self) -> Iterator[tuple[Parameter, torch.Tensor | None]]:
        """All parameters, whole, in canonical order, on the first rank; None on the others, which take part."""
        world, here = self.world, None
        for parameter in model_parameters(self.plan.transformer):
            found = self._holding(parameter)
            if found is not None and found.layers != here:
                if here is not None:
                    self.optimizer.release(here)
                here = found.layers
                if is_sharded(self.plan, world.lane, here):
                    self.optimizer.bring(here)
            yield parameter, self._whole(parameter, found)
        if here is not None:
            self.optimizer.release(here)

    @cached_property
    def _first_holders(self) -> Mapping[str, Mapping[tuple[int, int], int]]:
        """By a parameter's name the rows that are in the first tensor-parallel group which holds it, each with the first rank."""
        found: dict[str, dict[tuple[int, int], int]] = {}
        seen = set()
        for lane in self.world.program.lanes:
            for context, group in enumerate(self.world.ranks[lane.name]):
                experts = tuple(expert_rank(self.plan, lane, context, index) for index in range(len(group)))
                alike = lane_sections(self.plan.transformer, lane), lane.embedding, experts
                if alike in seen:  # a group before it holds the same
                    continue
                seen.add(alike)
                own: dict[str, dict[tuple[int, int], int]] = {}
                for index, rank in enumerate(group):
                    for layers in lane_sections(self.plan.transformer, lane):
                        for parameter in section_parameters(self.plan, lane, layers, context, index):
                            own.setdefault(parameter.name, {}).setdefault(rows_of(parameter, index, len(group)), rank)
                found = own | found
        return found

    def _holding(self, parameter: Parameter) -> Section | None:
        """The section that holds a parameter, or None."""
        return next((section for section in self.sections.values() if parameter.name in section.segment_of), None)

    def _whole(self, parameter: Parameter, section: Section | None) -> torch.Tensor | None:
        """A parameter on the first rank, of the rows that the first lane's devices which hold it send there."""
        world, plan = self.world, self.plan
        dtype = DTYPES[self.settings.precision or plan.precision]
        whole = torch.empty(parameter.size, dtype=dtype) if world.rank == 0 else None
        for (start, stop), rank in self._first_holders[parameter.name].items():
            if start == stop or world.rank not in (0, rank):
                continue
            rows = torch.empty((stop - start) * parameter.row_size, dtype=dtype)
            if world.rank == rank:
                assert section is not None
                segment = section.segment_of[parameter.name]
                rows.copy_(section.values[segment.offset : segment.offset + segment.size])
                if rank != 0:
                    dist.send(rows, 0, group=world.control)
            elif whole is not None:
                dist.recv(rows, rank, group=world.control)
            if whole is not None:
                whole[start * parameter.row_size : stop * parameter.row_size] = rows
        if whole is None or parameter.width is None:
            return whole
        return whole.view(parameter.rows, parameter.width)

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path, step: int) -> Path:
        """The checkpoint that it wrote, of a training that has done so many steps."""
        facts = {
            "model": to_table(self.plan.transformer),
            "optimizer": self.plan.optimizer,
            "sequence_length": self.plan.sequence_length,
            "seed": self.settings.seed,
            "tokens": self.tokens,
            "step": step,
            "consumed": self.consumed,
            **self.optimizer.facts(),
        }
        return checkpoints.save(folder, step, self.optimizer.saved(), facts, self.world.control, self.settings.keep_checkpoints)

    def resume(self, checkpoint: Path) -> int:
        """The steps that the training of a checkpoint has done. Raises InputError for one of another model or optimizer."""
        facts = checkpoints.read_facts(checkpoint)
        _check_facts(checkpoint, facts, self.plan, self.settings, self.tokens)
        checkpoints.load(checkpoint, self.optimizer.wanted(), self.world.control)
        self.optimizer.resume(facts)
        self.consumed = int(facts["consumed"])
        return int(facts["step"])


def _drawn(transformer: Transformer, seed: int) -> Initial:
    return lambda parameter, start, stop: initial_values(transformer, parameter, start, stop, seed)


def _check_facts(checkpoint: Path, facts: Mapping[str, Any], plan: Plan, settings: Settings, tokens: int) -> None:
    """Nothing. Raises InputError where a checkpoint is of another training than the plan, the settings and the data say."""
    missing = {"model", "optimizer", "sequence_length", "seed", "tokens", "consumed", "updates", "step"} - set(facts)
    if missing:
        raise InputError(f"{checkpoint}: is no checkpoint of a run; its motley.json has no {', '.join(sorted(missing))}")
    table = Table(facts, str(checkpoint / checkpoints.FACTS), "facts")
    for key in ("consumed", "updates"):
        table.integer(key)
    if facts.get("loss_scale") is not None:  # of fp16
        table.number("loss_scale")
        table.integer("since_overflow")
    table.table("model")
    ours = to_table(plan.transformer)
    theirs = facts["model"]
    unused = {"name", "ffn"} if plan.transformer.experts is not None else {"name"}
    for key in sorted((set(ours) | set(theirs)) - unused):
        if ours.get(key) != theirs.get(key):
            name, wanted = plan.transformer.name, ours.get(key)
            raise InputError(f"{checkpoint}: is of another model: its {key} is {theirs.get(key)}, but that of {name} is {wanted}")
    expected = {
        "optimizer": plan.optimizer,
        "sequence_length": plan.sequence_length,
        "seed": settings.seed,
        "tokens": tokens,
    }
    for key, value in expected.items():
        if facts[key] != value:
            raise InputError(
                f"{checkpoint}: was trained with {key.replace('_', ' ')} {facts[key]}, but this run has {value}: its samples, or "
                "the optimizer's states, would not be the same"
            )


def divergence(step: int, facts: StepFacts, last: bool) -> str | None:
    """What of a step, counted from 0, was not finite, so that nothing can be learned any more; None where all was.

    A step that fp16 left out has changed no parameter, and the next may be better, unless it was the `last`.
    """
    if not math.isfinite(facts.loss):
        return None if facts.skipped and not last else f"the loss of step {step + 1} is {facts.loss}"
    if not math.isfinite(facts.gradient_norm) and not facts.skipped:
        return f"the gradient norm of step {step + 1} is {facts.gradient_norm}"
    return None


LATE = 0.005
"""How late all instructions together may be, as a share of their pace, before a run is said not to keep it."""

LEAST_START_S = 60.0
"""The least time that workers have to find one another."""

# --- The worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """What the launcher tells a worker."""

    rank: int
    local_rank: int
    workers: int


def train(plan: Plan, settings: Settings, watch: Watch) -> None:
    """Nothing; trains, as the worker that the environment says, what the plan says.

    Raises InputError where a user's mistake shows, OSError where the disk fails, RuntimeError where another worker is lost.
    """
    place = _Place(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    watch.phase = "starting"
    if int(os.environ.get("LOCAL_WORLD_SIZE", place.workers)) < place.workers:
        use_interface_to(os.environ["MASTER_ADDR"])
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # else NCCL connects when the GPU may be waiting for a peer
    # Workers start unevenly, on a busy machine by more than they may wait for one another afterwards.
    dist.init_process_group("gloo", timeout=timedelta(seconds=max(settings.timeout_s, LEAST_START_S)))
    _train(plan, settings, watch, place)
    dist.destroy_process_group()  # not after a failure: a group that has lost a member may wait for it


def _device(settings: Settings, place: _Place, plan: Plan) -> torch.device:
    """The torch device of this worker: the GPU that its device names; else by the workers' order, shared where gloo allows it."""
    if settings.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise InputError("this machine has no GPU that torch can use; accepted: --device cpu")
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = place.rank - place.local_rank
    indices = [int(name.rpartition("/")[2]) for name in ranked_devices(plan)[first : first + workers_here]]
    if workers_here > count and settings.chosen_backend == "nccl":
        raise InputError(f"this node has {workers_here} workers, but {count} GPUs; with --backend gloo several may share one")
    # The plan's own numbers, unless there are fewer GPUs, or a plan of several nodes runs on one.
    own = len(set(indices)) == workers_here and max(indices) < count
    device = torch.device("cuda", indices[place.local_rank] if own else place.local_rank % count)
    torch.cuda.set_device(device)
    # Torch's thread for backwards begins with a matmul, and so makes the context, which is no user's matter.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    return device


def _train(plan: Plan, settings: Settings, watch: Watch, place: _Place) -> None:
    program = check_runnable(plan, settings)
    problem: Exception | None = None
    device = torch.device("cpu")
    try:
        device = _device(settings, place, plan)
        _set_precision(settings.precision or plan.precision)
    except InputError as error:
        problem = error
    _agree(problem)
    _compare({"plan": plan.to_json(), **{name: getattr(settings, name) for name in _SHARED_SETTINGS}})
    start_memory_watch()
    places = None if settings.testbed is None else device_places(find(settings.testbed), ranked_devices(plan))
    connections = Connections(device, settings.chosen_backend, settings.timeout_s, places)
    connections.connect(plan, program, *reduction_ranks(plan, program, lane_ranks(plan, program)))
    world = World(plan, program, connections)
    chosen = _together(world, lambda: _chosen_checkpoint(world, settings))
    checkpoint = world.told_by_first(chosen)
    trainer = _together(world, lambda: _built(world, settings, watch, checkpoint))
    done = 0
    if checkpoint is not None:
        watch.phase = f"resuming {checkpoint}"
        done = trainer.resume(checkpoint)
    _compare({"size of the data": trainer.tokens})
    trainer.prepare()
    kind = _kind(device)
    peak, measured = None, False  # of a device that is emulated the peak is the cluster's
    if settings.pace is None and done < settings.steps:
        peak, measured = _peak(world, settings.precision or plan.precision, kind)
    run = _Run(trainer, watch, done, peak, measured, kind)
    run.train()


def _agree(problem: Exception | None) -> None:
    """As `World.agree`, over the default group."""
    problems: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((found for found in problems if found is not None), None)
    if first is not None:
        raise first


START_TOGETHER_S = 0.2
"""How long workers rest before they measure their peaks, all at once."""

_SHARED_SETTINGS = (
    *("steps", "device", "precision", "seed", "learning_rate", "final_rate", "rate_schedule", "warm_up_steps", "weight_decay"),
    *("beta1", "beta2", "epsilon", "clip_norm", "token_type", "checkpoint_every", "resume", "backend", "compile", "testbed"),
)
"""What all workers must have been told alike; folders may have other names on other machines."""


def _compare(facts: Mapping[str, object]) -> None:
    """Nothing. Raises InputError on all workers where one was started with other facts than the first, as a stale file's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(facts))
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                shown = "" if name == "plan" else f": {theirs[name]}, and not {value}"
                raise InputError(f"rank {rank} was started with another {name.replace('_', ' ')} than rank 0{shown}")


def _check_writable(folder: Path) -> None:
    """Nothing. Raises InputError where nothing can be written into a folder, which it makes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def _together(world: World, work: Callable[[], Result]) -> Result:
    """What the work gives, in which no worker waits for another; a mistake that one of them finds, all raise."""
    problem: Exception | None = None
    results: list[Result] = []
    try:
        results.append(work())
    except (InputError, OSError) as error:
        problem = error
    world.agree(problem)
    return results[0]


def _built(world: World, settings: Settings, watch: Watch, checkpoint: Path | None) -> Trainer:
    """The trainer, with its first weights. What can be wrong with a checkpoint is told before they are drawn."""
    plan = world.plan
    tokens = open_data(settings.data, settings.token_type, plan.transformer.vocab, plan.sequence_length)
    if tokens.samples < plan.global_batch:
        raise InputError(
            f"{settings.data}: has {tokens.samples} samples of {plan.sequence_length} tokens, but one batch takes "
            f"{plan.global_batch}"
        )
    for folder in (settings.results, settings.checkpoints):
        if folder is not None and world.rank == 0:
            _check_writable(folder)
    held = checkpoints.hold(settings.checkpoints) if settings.checkpoints is not None and world.rank == 0 else None
    if settings.save_weights is not None and world.rank == 0:
        huggingface.prepare_save(settings.save_weights, plan.transformer)
    initial: Initial | None = None
    if settings.weights is not None and checkpoint is None:
        initial = huggingface.load_weights(settings.weights, plan.transformer).rows
    if checkpoint is not None:
        facts = checkpoints.read_facts(checkpoint)
        _check_facts(checkpoint, facts, plan, settings, tokens.count)
        if int(facts["step"]) + (settings.save_weights is None) > settings.steps:
            raise InputError(
                f"{checkpoint}: has done {facts['step']} steps; --steps counts all, and must be more, or as many where only the "
                f"weights are to be saved (--save-weights), but got {settings.steps}"
            )
    return Trainer(world, settings, tokens, watch, initial, held)


def _chosen_checkpoint(world: World, settings: Settings) -> Path | None:
    """The checkpoint to resume, as the first worker sees it: on a shared file system another may not see the latest yet."""
    found: Path | None = None
    if world.rank == 0 and settings.checkpoints is not None:
        found = checkpoints.latest(settings.checkpoints)
        if settings.resume and found is None:
            raise InputError(f"{settings.checkpoints}: holds no complete checkpoint to resume")
        if found is not None and not settings.resume:
            raise InputError(
                f"{settings.checkpoints}: holds {found.name} of an earlier run; resume it with --resume, or name another folder"
            )
    return found


def _set_precision(precision: str) -> None:
    """fp32 is fp32; only tf32 may use the tensor cores' shorter one."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _kind(device: torch.device) -> str:
    """The GPU kind of a device, by our name or, if it is unknown, torch's; CPU for the CPU."""
    if device.type == "cpu":
        return "CPU"
    facts = torch.cuda.get_device_properties(device)
    return gpu_kind_name(facts.name, facts.total_memory) or str(facts.name)


def _peak(world: World, precision: str, kind: str) -> tuple[float | None, bool]:
    """The peak FLOP/s of this worker's device, and whether it was measured: by all workers at once, as they share the cores."""

    def together() -> None:
        if world.control is not None:
            dist.barrier(group=world.control)
            # Who is let go first must not keep the core from the others while they are.
            time.sleep(START_TOGETHER_S)

    return peak_flop_per_s(world.device, precision, together)


class _Run:
    """The loop of one worker, and what the first rank tells and writes of it."""

    def __init__(self, trainer: Trainer, watch: Watch, done: int, peak: float | None, measured: bool, kind: str) -> None:
        self.trainer, self.watch, self.done = trainer, watch, done
        self.world, self.settings, self.plan = trainer.world, trainer.settings, trainer.plan
        # Where several workers share a GPU, each has a part of its peak.
        card = (socket.gethostname(), str(self.world.device)) if self.world.device.type == "cuda" else None
        mine = (self.world.device_name, peak, kind, measured, card)
        everyone: list[Any] = [mine]
        if self.world.control is not None:
            everyone = [None] * len(self.world.everyone)
            dist.all_gather_object(everyone, mine, group=self.world.control)
        self.kinds = {name: kind for name, _, kind, _, _ in everyone}
        sharing = Counter(card for *_, card in everyone if card is not None)
        known = all(peak is not None for _, peak, *_ in everyone)
        self.peaks: dict[str, float] = {name: peak / sharing.get(card, 1) for name, peak, _, _, card in everyone} if known else {}
        self.measured = any(measured for *_, measured, _ in everyone)
        self.facts: list[StepFacts] = []
        self.step_s: list[float] = []

    @property
    def first(self) -> bool:
        """Whether this worker speaks for all."""
        return self.world.rank == 0

    def train(self) -> None:
        """Nothing; does all steps, with their checkpoints, and leaves the results. Where all are done, it only saves the weights.

        Raises TrainingFailed, on all workers, after a step that diverged: it is the last one, and nothing is saved of it.
        """
        settings, watch, trainer = self.settings, self.watch, self.trainer
        if self.done == settings.steps:
            self._tell(f"all {self.done} steps of {self.plan.transformer.name} are done")
            self._save_weights()
            return
        self._tell_start()
        began = measure_offsets(self.world.control)
        self._synchronise()
        watch.phase = "training"
        if trainer.pacer is not None:
            trainer.pacer.go_first()
        diverged = None
        kept = self.done
        before_s = time.perf_counter()
        for step in range(self.done, settings.steps):
            if trainer.pacer is not None and step == self.done + min(WARM_UP, (settings.steps - self.done) // 2):
                trainer.pacer.forget()
            facts = trainer.step(step)
            self._wait_for_device()
            now_s = time.perf_counter()
            self.facts.append(facts)
            self.step_s.append(now_s - before_s)
            self._tell_step(step, facts, now_s - before_s)
            diverged = divergence(step, facts, last=step + 1 == settings.steps)
            if diverged is not None:
                break
            every = settings.checkpoint_every
            if settings.checkpoints is not None and ((every and (step + 1) % every == 0) or step + 1 == settings.steps):
                watch.phase = f"saving the checkpoint of step {step + 1}"
                saved = trainer.save(settings.checkpoints, step + 1)
                kept = step + 1
                self._tell(f"saved {saved}")
                watch.phase = "training"
                self._synchronise()
            before_s = time.perf_counter()
        watch.phase = "ending"
        if trainer.pacer is not None:
            self._warn_of(trainer.pacer.lateness)
        if diverged is None:
            self._save_weights()
        self._leave_results(Clocks(began, measure_offsets(self.world.control)))
        if diverged is not None:
            self._synchronise()  # for who fails first ends the others, who may be writing the results
            left = f"; the last checkpoint is that of step {kept}" if kept else ""
            raise TrainingFailed(f"{diverged}: the training has diverged and was ended{left}")

    def _wait_for_device(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _synchronise(self) -> None:
        if self.world.control is not None:
            dist.barrier(group=self.world.control)

    # --- What people see ---------------------------------------------------------------------------------------------

    def _tell(self, line: str) -> None:
        if self.first and not self.settings.quiet:
            print(line, flush=True)

    def _tell_start(self) -> None:
        plan, peaks = self.plan, self.peaks
        flop = model_flop(plan.transformer, plan.global_batch, plan.sequence_length)
        where = f"{len(self.kinds)} x {'/'.join(sorted(set(self.kinds.values())))}"
        self._tell(
            f"training {plan.transformer.name} on {where}: {plan.global_batch} sequences of {plan.sequence_length} tokens and "
            f"{flop / 1e12:.4g} TFLOP a step"
        )
        if peaks and self.measured:
            self._tell(
                f"peak of all workers: {sum(peaks.values()) / 1e9:,.0f} GFLOP/s, measured with matmuls; MFU is relative to it"
            )
        elif not peaks and self.settings.pace is None:
            self._tell("the peak FLOP/s of these devices is not known, so there is no MFU")
        if self.done:
            self._tell(f"resumed after step {self.done}, at sample {self.trainer.consumed}")

    def _tell_step(self, step: int, facts: StepFacts, step_s: float) -> None:
        if not self.first:
            return
        plan, settings = self.plan, self.settings
        tokens = plan.global_batch * plan.sequence_length
        mfu = ""
        if self.peaks:
            flop = model_flop(plan.transformer, plan.global_batch, plan.sequence_length)
            mfu = f"  MFU {100 * flop / step_s / sum(self.peaks.values()):5.2f} %"
        skipped = "  skipped: the gradient overflowed" if facts.skipped else ""
        self._tell(
            f"step {step + 1:>{len(str(settings.steps))}}/{settings.steps}  loss {facts.loss:8.5f}  gradient norm "
            f"{facts.gradient_norm:8.4f}  {step_s * 1e3:9.1f} ms  {tokens / step_s:10,.0f} tokens/s{mfu}{skipped}"
        )

    def _warn_of(self, own: Lateness) -> None:
        """Nothing; has the first rank warn where the mathematics took longer than the pace. All ranks call it."""
        everyone: list[Any] = [(self.world.device_name, own)]
        if self.world.control is not None:
            everyone = [None] * len(self.world.everyone)
            dist.all_gather_object(everyone, (self.world.device_name, own), group=self.world.control)
        late_s, paced_s = (sum(getattr(found, name) for _, found in everyone) for name in ("late_s", "paced_s"))
        if self.first and late_s > LATE * paced_s:
            device, worst = max(everyone, key=lambda entry: entry[1].worst_s)
            print(
                f"warning: the mathematics of all instructions took {100 * late_s / paced_s:.3g} % longer than their pace, "
                f"{worst.key} on {device} once {worst.worst_s * 1e3:.3g} ms: this machine is too slow, or too busy, for it",
                file=sys.stderr,
                flush=True,
            )

    # --- What stays --------------------------------------------------------------------------------------------------

    def _save_weights(self) -> None:
        folder = self.settings.save_weights
        if folder is None:
            return
        self.watch.phase = f"saving the weights to {folder}"
        problem: Exception | None = None
        weights = self.trainer.weights()
        if self.first:
            try:
                dtype = self.trainer.sections[next(iter(self.trainer.sections))].values.dtype
                huggingface.save_weights(folder, self.plan.transformer, ((p, w) for p, w in weights if w is not None), dtype)
                self._tell(f"saved the weights in {folder}")
            except (InputError, OSError) as error:
                problem = error
        for _ in weights:  # the other ranks take part; and so does the first for what a failure left
            pass
        self.world.agree(problem)

    def _leave_results(self, clocks: Clocks) -> None:
        settings, world, recorder = self.settings, self.world, self.trainer.recorder
        if settings.results is None:
            return
        kept = recorder.steps
        # Where early steps are forgotten already, there is no warm-up among those kept.
        left_out = WARM_UP if len(kept) == len(self.step_s) else 0
        trace = gather_trace(
            recorder,
            clocks,
            plan=self.plan,
            program=world.program,
            lane=world.lane,
            is_first_of_lane=world.index == world.context == 0,
            cluster_name=self.plan.cluster,
            device_name=world.device_name,
            step=kept[choose_step([self.step_s[step - self.done] for step in kept], left_out)],
            peak_bytes=memory_peak_bytes(world.device),
            process_group=world.control,
            origin="measured" if settings.pace is None else "paced",
        )
        if trace is None:
            return
        iteration_s = self.step_s[choose_step(self.step_s)]
        result = RunResult(
            trace=trace,
            losses=tuple(facts.loss for facts in self.facts),
            step_s=tuple(self.step_s),
            learning_rates=tuple(facts.learning_rate for facts in self.facts),
            gradient_norms=tuple(facts.gradient_norm for facts in self.facts),
            first_step=self.done,
            iteration_s=iteration_s,
            tokens_per_s=self.plan.global_batch * self.plan.sequence_length / iteration_s,
            peak_flop_per_s=self.peaks,
            peak_measured=self.measured,
            device_kinds=self.kinds,
            resumed_from=self.done or None,
        )
        write_result(settings.results, result)
