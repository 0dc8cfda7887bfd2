"""The optimizer: AdamW or SGD on flat master copies of what this worker updates, under every ZeRO stage.

Masters are in fp32 (or the training precision, where that is no less), one flat tensor for every slice of the common
refinement, or this worker's shard of it. Where the plan offloads the optimizer they are in the host's memory with their states:
gradients come there chunk by chunk, the processors do the step, and parameters go back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from runtime.checkpoints import Stretch
from runtime.collectives import Pending, all_gather, all_reduce, tell_when_done
from runtime.gradients import Gradients, SliceGradient, is_sharded
from runtime.parameters import Parameter, Section
from runtime.settings import Settings
from runtime.staging import CHUNK, Staging
from runtime.world import World
from sim.spec.plan import LayerRange

Initial = Callable[[Parameter, int, int], torch.Tensor]
"""The first values of a parameter's rows `start` to `stop`, flat."""

FIRST_LOSS_SCALE, GROW_AFTER = 2.0**16, 2000
"""Of fp16: the loss is scaled up by this, half of it after an overflow, twice after so many steps without one.

Source: Micikevicius et al. (2018), section 3.2.
"""

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""What an optimizer keeps beside the master copy."""


def learning_rate(settings: Settings, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then constant, or falling to `final_rate` of it."""
    if step < settings.warm_up_steps:
        return settings.learning_rate * (step + 1) / settings.warm_up_steps
    progress = (step - settings.warm_up_steps) / max(1, settings.steps - 1 - settings.warm_up_steps)
    left = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": (1.0 + math.cos(math.pi * min(progress, 1.0))) / 2,
    }[settings.rate_schedule]
    if settings.rate_schedule == "constant":
        return settings.learning_rate
    return settings.learning_rate * (settings.final_rate + (1.0 - settings.final_rate) * max(left, 0.0))


@dataclass(frozen=True)
class StepFacts:
    """What one optimizer step did: the sums over all workers, and the norm of the whole gradient before clipping."""

    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: bool = False
    """Whether the gradient was not finite and the step was left out (fp16 only)."""


class _Master:
    """The master copy of what one worker updates of a slice, and the optimizer's states of it."""

    def __init__(self, gradient: SliceGradient, dtype: torch.dtype, states: Iterable[str], offload: bool) -> None:
        self.gradient = gradient
        start, stop = gradient.own
        values = gradient.section.values
        whole = gradient.runs[0] if len(gradient.runs) == 1 else None
        self.aliased = values.dtype == dtype and whole is not None and not gradient.scattered and not offload
        """Whether the parameters are the master copy."""
        self.values = (
            values[whole.offset : whole.offset + whole.size]
            if self.aliased and whole is not None
            else torch.empty(stop - start, dtype=dtype, device="cpu" if offload else values.device)
        )
        self.states = {name: torch.zeros_like(self.values) for name in states}
        # Numbers that decay and numbers that do not lie apart; each stretch is one parameter for torch's arithmetic.
        self.parts: list[tuple[int, int, bool]] = []
        for piece, low, high, at in gradient.slice.stretches(start, stop):
            begin, end, decays = at - start, at - start + high - low, piece.parameter.decays
            if self.parts and self.parts[-1][2] == decays:
                self.parts[-1] = (self.parts[-1][0], end, decays)
            else:
                self.parts.append((begin, end, decays))
        self.updates = [torch.zeros((), device=self.values.device) for _ in self.parts]
        """Steps that each stretch has had, which torch counts up."""

    def write_back(self, staging: Staging) -> None:
        """Copies the master to the parameters, where these are others and all here."""
        if self.aliased or self.gradient.scattered:
            return
        for run in self.gradient.runs:
            staging.send(
                self.values[run.at : run.at + run.size], self.gradient.section.values[run.offset : run.offset + run.size]
            )

    def initialise(self, initial: Initial) -> None:
        """Draws the first values of the master copy, which may be cut anywhere in a row."""
        start, stop = self.gradient.own
        for piece, low, high, at in self.gradient.slice.stretches(start, stop):
            row = piece.parameter.row_size
            first, last = piece.start + low // row, piece.start + -(-high // row)
            drawn = initial(piece.parameter, first, last)
            skip = low - (first - piece.start) * row
            self.values[at - start : at - start + high - low].copy_(drawn[skip : skip + high - low])

    def stretches(self, part: tuple[int, int]) -> Iterable[Stretch]:
        """Its numbers within `part` of the slice, as a checkpoint knows them."""
        start = self.gradient.own[0]
        for piece, low, high, at in self.gradient.slice.stretches(*part):
            first = piece.start * piece.parameter.row_size + low
            for name, values in {"master": self.values, **self.states}.items():
                saved = values[at - start : at - start + high - low]
                yield Stretch(f"{name}/{piece.parameter.name}", piece.parameter.size, first, saved)


@dataclass(frozen=True, eq=False)
class _Gather:
    """Shards being gathered into `everything`, and whom to tell when they are, and when somebody waits for them."""

    master: _Master
    work: Pending
    everything: torch.Tensor
    done: Callable[[], None] | None
    waits: Callable[[], None]


class Optimizer:
    """Updates what this worker holds of the parameters, once all its gradients are summed."""

    def __init__(
        self, world: World, sections: Mapping[LayerRange, Section], gradients: Gradients, settings: Settings, dtype: torch.dtype
    ) -> None:
        plan = world.plan
        self._world, self._sections, self._gradients, self._settings = world, sections, gradients, settings
        master_dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        self._masters: dict[LayerRange, list[_Master]] = {
            layers: [_Master(gradient, master_dtype, STATES[plan.optimizer], plan.offload_optimizer) for gradient in found]
            for layers, found in gradients.slices.items()
        }
        self._all = [master for found in self._masters.values() for master in found]
        self.updates = 0
        """Optimizer steps that were not skipped."""
        self.loss_scale = FIRST_LOSS_SCALE if dtype == torch.float16 else 1.0
        self._scales = dtype == torch.float16
        self._since_overflow = 0
        self._loss = self._norm = math.nan
        self._gathers: list[_Gather] = []
        self._staging = Staging()
        self._sharded = {layers for layers in sections if is_sharded(plan, world.lane, layers)}
        """Sections whose parameters are here only while they are used (ZeRO 3)."""

    def initialise(self, initial: Initial) -> None:
        """Nothing; draws the first weights, of the master copies and of the parameters."""
        for layers, section in self._sections.items():
            for segment in section.segments if layers not in self._sharded else ():
                drawn = initial(segment.parameter, segment.start, segment.stop)
                section.values[segment.offset : segment.offset + segment.size].copy_(drawn)
        for master in self._all:
            if not master.aliased:
                master.initialise(initial)

    # --- One step ----------------------------------------------------------------------------------------------------

    def agree(self, loss: torch.Tensor) -> None:
        """Nothing; sums the loss, of which each worker has a part, and the norm of the whole gradient over all workers."""
        world = self._world
        squares = [torch.zeros((), dtype=torch.float64, device=world.device)]
        for master in self._all:
            gradient = master.gradient
            assert gradient.value is not None
            start, stop = gradient.share
            shift = gradient.own[0]
            mine = gradient.value[start - shift : stop - shift]
            precision = torch.float64 if mine.dtype == torch.float64 else torch.float32
            squares.append(torch.linalg.vector_norm(mine, dtype=precision).double() ** 2)
        sums = torch.stack([torch.stack(squares).sum(), loss.double()])
        if len(world.everyone) > 1:
            all_reduce(sums, world.group(world.everyone)).wait()
        square, self._loss = sums.tolist()
        self._norm = math.sqrt(square) / self.loss_scale if square >= 0 else math.nan

    def step(self, step: int) -> StepFacts:
        """What the step did, of which `agree` has told the norm."""
        settings, norm, total = self._settings, self._norm, self._loss
        rate = learning_rate(settings, step)
        if self._scales and not math.isfinite(norm):
            self.loss_scale = max(self.loss_scale / 2, 1.0)
            self._since_overflow = 0
            self._gradients.clear()
            return StepFacts(total, norm, rate, skipped=True)
        factor = 1.0 / self.loss_scale
        if settings.clip_norm > 0:
            factor *= min(1.0, settings.clip_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan
        for decays in (True, False):
            self._update([(m, n) for m in self._all for n, part in enumerate(m.parts) if part[2] == decays], decays, factor, rate)
        for master in self._all:
            master.write_back(self._staging)
        self.updates += 1
        if self._scales:
            self._since_overflow += 1
            if self._since_overflow % GROW_AFTER == 0:
                self.loss_scale *= 2
        self._gradients.clear()
        return StepFacts(total, norm, rate)

    @torch.no_grad()
    def _update(self, stretches: Sequence[tuple[_Master, int]], decays: bool, factor: float, rate: float) -> None:
        """Nothing; updates some stretches of masters, given by number, with `factor` times their gradients."""
        values, gradients, states, updates = [], [], [], []
        for master, n in stretches:
            a, b, _ = master.parts[n]
            gradient = master.gradient.value
            assert gradient is not None
            part = gradient[a:b]
            if factor != 1.0:
                part.mul_(factor)
            own = [state[a:b] for state in master.states.values()]
            offloads = self._world.plan.offload_optimizer
            if offloads or part.dtype != master.values.dtype:
                # Chunk by chunk, so that there is no second gradient of everything; offloaded, one is updated while the next
                # one comes down. The count of updates is of the whole stretch.
                for begin, end, chunk in self._staging.brought(part) if offloads else _chunks(part):
                    held = [state[begin:end] for state in own]
                    numbers = master.values[a + begin : a + end]
                    self._move([numbers], [chunk.to(numbers.dtype)], [held], [master.updates[n].clone()], decays, rate)
                master.updates[n] += 1
                continue
            values.append(master.values[a:b])
            gradients.append(part)
            states.append(own)
            updates.append(master.updates[n])
        if values:
            self._move(values, gradients, states, updates, decays, rate)

    def _move(
        self,
        values: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        updates: list[torch.Tensor],
        decays: bool,
        rate: float,
    ) -> None:
        """Nothing; one update of some numbers by their gradients, with their `STATES` and the count of their updates.

        By torch's functions, because its optimizer classes load its compiler, which takes as long as all else of torch.
        """
        settings = self._settings
        weight_decay = settings.weight_decay if decays else 0.0
        if self._world.plan.optimizer == "sgd":
            sgd(
                values,
                gradients,
                [None] * len(values),
                fused=True,
                weight_decay=weight_decay,
                momentum=0.0,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        averages, squares = ([own[i] for own in states] for i in range(len(STATES["adamw"])))
        adamw(
            values,
            gradients,
            averages,
            squares,
            [],
            updates,
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=rate,
            weight_decay=weight_decay,
            eps=settings.epsilon,
            maximize=False,
        )

    # --- ZeRO --------------------------------------------------------------------------------------------------------

    def num_bytes(self, layers: LayerRange) -> int:
        """The bytes of a section's parameters on this device."""
        section = self._sections[layers]
        return section.size * section.values.element_size()

    def gather(self, layers: LayerRange, done: Callable[[], None], waits: Callable[[], None]) -> None:
        """Nothing; begins to gather a section's shards.

        `done` is called when that has ended, by any thread; `waits` when this one begins to wait for it.
        """
        masters = [master for master in self._masters[layers] if master.gradient.scattered]
        last = next((master for master in reversed(masters) if len(master.gradient.shard_group) > 1), None)
        for master in masters:
            gradient = master.gradient
            ranks = gradient.shard_group
            mine = gradient.section.values.new_zeros(gradient.padded // len(ranks))
            self._staging.send(master.values, mine[: len(master.values)])
            if len(ranks) == 1:
                self._spread(master, mine)
                continue
            everything = mine.new_empty(gradient.padded)
            work = all_gather(everything, mine, self._world.group(ranks))
            told = done if master is last else None
            if told is not None:
                tell_when_done(work, told, mine)
            self._gathers.append(_Gather(master, work, everything, told, waits))
        if last is None:  # of divided experts that nobody else has
            done()
        # Gathered numbers exist twice until they are in their places: of two sections, not of all.
        waiting = list(dict.fromkeys(gather.master.gradient.section.layers for gather in self._gathers))
        for oldest in waiting[:-2]:
            self._finish(lambda gather, oldest=oldest: gather.master.gradient.section.layers == oldest)  # type: ignore[misc]

    def _spread(self, master: _Master, everything: torch.Tensor) -> None:
        """Copies the gathered numbers of a slice to their places in the section."""
        section = master.gradient.section
        values = section.restore() if section.layers in self._sharded else section.values
        for run in master.gradient.runs:
            values[run.offset : run.offset + run.size].copy_(everything[run.at : run.at + run.size])

    def finish_gathers(self, within: LayerRange | None = None) -> None:
        """Nothing; waits until the gathered parameters are in their places: all, or those of the layers within a range."""
        self._finish(lambda gather: within is None or _is_within(gather.master.gradient.section.layers, within))

    def _finish(self, wanted: Callable[[_Gather], bool]) -> None:
        """Waits for the gathers of which `wanted` is true, and puts their numbers in their places."""
        finished = [gather for gather in self._gathers if wanted(gather)]
        self._gathers = [gather for gather in self._gathers if not wanted(gather)]
        for gather in finished:
            gather.waits()
            gather.work.wait()
            self._spread(gather.master, gather.everything)
            if gather.done is not None:
                gather.done()

    def release(self, within: LayerRange) -> None:
        """Nothing; forgets those parameters of the layers within a range that are here only while they are used."""
        for layers in self._sharded:
            if _is_within(layers, within):
                self._sections[layers].release()

    def bring(self, layers: LayerRange) -> None:
        """Nothing; brings a section's parameters here, to be read, as all workers that hold it do together."""
        self.gather(layers, _nothing, _nothing)
        self.finish_gathers()

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def saved(self) -> list[Stretch]:
        """What this worker saves: of every slice its equal part, so that all workers together save each number once."""
        return [stretch for master in self._all for stretch in master.stretches(master.gradient.share)]

    def wanted(self) -> list[Stretch]:
        """What this worker needs of a checkpoint: all that it updates."""
        return [stretch for master in self._all for stretch in master.stretches(master.gradient.own)]

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says beside the numbers."""
        scale = self.loss_scale if self._scales else None
        return {"updates": self.updates, "loss_scale": scale, "since_overflow": self._since_overflow}

    def resume(self, facts: Mapping[str, Any]) -> None:
        """Nothing; after the wanted stretches are filled: takes the counts, and brings the parameters to the masters' values."""
        self.updates = int(facts["updates"])
        if self._scales and facts["loss_scale"] is not None:
            self.loss_scale, self._since_overflow = float(facts["loss_scale"]), int(facts["since_overflow"])
        for master in self._all:
            for updates in master.updates:
                updates.fill_(self.updates)
            master.write_back(self._staging)
        for layers in self._masters:
            if layers not in self._sharded:
                self.bring(layers)


def _chunks(source: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Of every chunk of a flat tensor its first place and the one behind it, and its numbers."""
    for begin in range(0, len(source), CHUNK):
        chunk = source[begin : begin + CHUNK]
        yield begin, begin + len(chunk), chunk


def _is_within(layers: LayerRange, within: LayerRange) -> bool:
    """Whether layers, and not an end, are in a range."""
    return layers[0] < layers[1] and within[0] <= layers[0] and layers[1] <= within[1]


def _nothing() -> None:
    pass
