"""The torch interpreter of a program: executes one lane's instructions on one of its devices.

The simulator (`sim.engine`) interprets the same programs. Tensors are x_SBH: sequence, batch, hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from runtime.data import Batches
from runtime.gradients import Gradients
from runtime.messages import Messages
from runtime.model import ModelPart
from runtime.optimizer import Optimizer, StepFacts
from runtime.pacer import Pacer
from runtime.recorder import Mark, Recorder
from runtime.tensor_parallel import DeferredWeights
from runtime.watch import Watch
from runtime.world import World
from sim.spec.pace import PACED
from sim.spec.plan import LayerRange
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Recv,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    Send,
    SendActivation,
    SendGradient,
    Sequences,
)

Received = list[tuple[Sequences, torch.Tensor]]
"""Shares of a micro-batch, or of a slice of one, that have arrived."""


class _Seeded(torch.autograd.Function):
    """A scalar whose backward goes on with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


def backward(x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Nothing; adds up the gradients of what a tensor was computed from, given its own.

    As `torch.autograd.backward`, which compares the shapes by symbols, and for that loads sympy: a second of each worker's start.
    """
    _Seeded.apply(x, gradient).backward()  # type: ignore[no-untyped-call]


class Interpreter:
    """Runs iterations of one lane's program. `parts` are the lane's model, cut where any backward is cut."""

    def __init__(
        self,
        world: World,
        parts: Mapping[LayerRange, ModelPart],
        batches: Batches,
        messages: Messages,
        gradients: Gradients,
        optimizer: Optimizer,
        recorder: Recorder,
        watch: Watch,
        deferred: DeferredWeights | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self._world, self._lane, self._parts = world, world.lane, parts
        self._batches, self._messages, self._gradients, self._optimizer = batches, messages, gradients, optimizer
        self._recorder, self._watch, self._deferred, self._pacer = recorder, watch, deferred, pacer
        self._execute: dict[type[Instruction], Callable[[Any], None]] = {
            Forward: self._forward,
            Backward: self._backward,
            BackwardInput: self._backward_input,
            BackwardWeight: self._backward_weight,
            SendActivation: self._send,
            RecvActivation: self._receive,
            SendGradient: self._send,
            RecvGradient: self._receive,
            ReduceGradients: self._reduce,
            GatherParameters: self._gather,
            OptimizerStep: self._step,
        }
        self._peers: dict[Instruction, str | None] = {i: self._peers_of(i) for i in self._lane.instructions}
        self._tokens = world.plan.global_batch * world.plan.sequence_length
        self._received: dict[tuple[type[Instruction], int, int], Received] = {}
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self._input_gradients: dict[tuple[int, int], torch.Tensor] = {}
        self._graphs: dict[tuple[int, LayerRange], tuple[torch.Tensor, torch.Tensor]] = {}
        self._weights: dict[tuple[int, LayerRange], Callable[[], None]] = {}
        self._sends_left: dict[tuple[type[Instruction], int, int], int] = {}
        self._consumed = 0
        self._number = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._facts: StepFacts | None = None
        self._begun: Mark = 0.0

    def _peers_of(self, instruction: Instruction) -> str | None:
        """The lanes with their devices that an instruction may wait for: messages for one, computation for its own devices."""
        world, lane = self._world, self._lane
        match instruction:
            case RecvActivation() | RecvGradient():
                return world.lanes_text([instruction.peer])
            case SendActivation() | SendGradient():
                return None
            case ReduceGradients() | GatherParameters():
                return world.lanes_text([name for name in world.program.members[instruction] if name != lane.name])
            case OptimizerStep():
                return world.lanes_text([other.name for other in world.program.lanes if other != lane]) or None
        if world.plan.expert_parallel > 1 and not isinstance(instruction, BackwardWeight):
            return world.lanes_text(world.lanes_sharing_experts())
        return world.lanes_text([lane.name]) if len(lane.devices) > 1 else None

    def waits_for(self, instruction: Instruction) -> None:
        """Nothing; notes that the worker now waits for the end of an instruction that it began before."""
        self._watch.enter(instruction, self._peers[instruction])

    def iteration(self, step: int, consumed: int) -> StepFacts:
        """What one iteration did, the step's number and the samples used before it given. Raises RuntimeError for a lost peer."""
        self._number, self._consumed, self._facts = step, consumed, None
        self._loss.zero_()
        self._watch.step = step
        self._recorder.start_step(step)
        self._watch.enter(self._lane.instructions[0], self._peers[self._lane.instructions[0]])
        self._messages.start()
        watch, recorder, execute, peers = self._watch, self._recorder, self._execute, self._peers
        for instruction in self._lane.instructions:
            kind = type(instruction)
            watch.enter(instruction, peers[instruction])
            if isinstance(instruction, (Send, Collective)):
                execute[kind](instruction)
                continue
            self._begin(instruction)
            execute[kind](instruction)
            if self._pacer is not None and isinstance(instruction, PACED):
                self._pacer.end()
            recorder.end(instruction, self._begun, self._messages.num_bytes(instruction) if isinstance(instruction, Recv) else 0)
        self._messages.finish()
        self._optimizer.finish_gathers()
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # while the watch still knows what is waited for
        watch.leave()
        recorder.finish_step()
        if self._facts is None:
            raise RuntimeError(f"the program of lane {self._lane.name} has no optimizer step")
        return self._facts

    def _begin(self, instruction: Instruction) -> None:
        """Notes that an instruction begins now."""
        self._begun = self._recorder.begin()
        if self._pacer is not None and isinstance(instruction, PACED):
            self._pacer.begin(instruction)

    # --- Computation -------------------------------------------------------------------------------------------------

    def _forward(self, instruction: Forward) -> None:
        m, (start, stop) = instruction.micro_batch, instruction.layers
        lane, plan = self._lane, self._world.plan
        layers = plan.transformer.layers
        embeds, ends = lane.embedding and start == 0, lane.head and stop == layers
        labels_SB: torch.Tensor | None = None
        if embeds or ends:
            tokens_SB, found_SB = self._batches.micro_batch(self._consumed, lane.pipeline, m, lane.sequences)
            labels_SB = self._on_device(found_SB) if ends else None
        if embeds:
            x = self._on_device(tokens_SB)
        elif (RecvActivation, m, start) in self._received:
            x = self._assembled(RecvActivation, m, start)
        else:
            x = self._outputs.pop((m, start))
        chunk = lane.chunk(instruction.layers)
        for part in lane.parts(chunk, m, backward=True):
            if not (start <= part[0] and part[1] <= stop):
                continue
            if x.is_floating_point():
                x = x.detach().requires_grad_()
            entered = x
            with self._parameters(instruction, part):
                for atom in self._atoms(part):
                    module = self._parts[atom]
                    x = module(x, labels_SB, lane.slice_of(m))
            self._graphs[m, part] = (entered, x)
        if ends:
            if self._world.index == 0:
                self._loss += x.detach() / self._tokens
        else:
            self._outputs[m, stop] = x.detach()

    def _on_device(self, numbers_SB: torch.Tensor) -> torch.Tensor:
        """A batch's numbers on the worker's device. From pinned memory a GPU fetches them while the host goes on."""
        device = self._world.device
        return numbers_SB.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers_SB

    def _atoms(self, part: LayerRange) -> list[LayerRange]:
        """The smallest parts of the model that a part is made of."""
        if part in self._parts:
            return [part]
        return [layers for layers in self._parts if part[0] <= layers[0] and layers[1] <= part[1]]

    @contextmanager
    def _parameters(self, instruction: Instruction, layers: LayerRange) -> Iterator[None]:
        """Has the parameters of some layers here, where they are gathered for each use."""
        if self._pacer is None:
            self._optimizer.finish_gathers(layers)
        else:
            with self._pacer.waiting():
                self._optimizer.finish_gathers(layers)
        self.waits_for(instruction)
        yield
        self._optimizer.release(layers)

    def _backward(self, instruction: Backward | BackwardInput) -> None:
        m, part = instruction.micro_batch, instruction.layers
        entered, left = self._graphs.pop((m, part))
        if left.dim() == 0:
            seed = torch.full_like(left, self._optimizer.loss_scale / self._tokens)
        elif (RecvGradient, m, part[1]) in self._received:
            seed = self._assembled(RecvGradient, m, part[1])
        else:
            seed = self._input_gradients.pop((m, part[1]))
        with self._parameters(instruction, part):
            backward(left, seed)
        if entered.grad is not None:
            self._input_gradients[m, part[0]] = entered.grad

    def _backward_input(self, instruction: BackwardInput) -> None:
        assert self._deferred is not None
        with self._deferred.collecting() as weights:
            self._backward(instruction)
        self._weights[instruction.micro_batch, instruction.layers] = weights

    def _backward_weight(self, instruction: BackwardWeight) -> None:
        self._weights.pop((instruction.micro_batch, instruction.layers))()

    # --- Messages ----------------------------------------------------------------------------------------------------

    def _receive(self, instruction: Recv) -> None:
        x_SBH = self._messages.receive(instruction)
        key = (type(instruction), instruction.micro_batch, instruction.layer)
        self._received.setdefault(key, []).append((instruction.sequences, x_SBH))

    def _assembled(self, kind: type[Instruction], micro_batch: int, layer: int) -> torch.Tensor:
        """The lane's share of a micro-batch, of the shares that came from several lanes."""
        found = sorted(self._received.pop((kind, micro_batch, layer)), key=lambda entry: entry[0])
        return found[0][1] if len(found) == 1 else torch.cat([x_SBH for _, x_SBH in found], dim=1)

    def _send(self, instruction: Send) -> None:
        forward = isinstance(instruction, SendActivation)
        store = self._outputs if forward else self._input_gradients
        edges = self._lane.next if forward else self._lane.previous
        m, layer = instruction.micro_batch, instruction.layer
        key = (type(instruction), m, layer)
        left = self._sends_left.get(key, sum(edge.layer == layer for edge in edges)) - 1
        handle = self._recorder.started(instruction, self._messages.num_bytes(instruction))
        self._messages.send(instruction, store[m, layer], partial(self._recorder.finished, handle))
        self._sends_left[key] = left
        if left == 0:
            del store[m, layer], self._sends_left[key]

    # --- Gradients and parameters ------------------------------------------------------------------------------------

    def _reduce(self, instruction: ReduceGradients) -> None:
        handle = self._recorder.started(instruction, self._gradients.num_bytes(instruction.layers))
        wait = partial(self.waits_for, instruction)
        self._gradients.reduce(instruction.layers, partial(self._recorder.finished, handle), wait)

    def _gather(self, instruction: GatherParameters) -> None:
        handle = self._recorder.started(instruction, self._optimizer.num_bytes(instruction.layers))
        wait = partial(self.waits_for, instruction)
        self._optimizer.gather(instruction.layers, partial(self._recorder.finished, handle), wait)

    def _step(self, instruction: OptimizerStep) -> None:
        self._gradients.finish()
        self.waits_for(instruction)
        self._optimizer.agree(self._loss)
        # To wait for others is no work: the step begins when the whole gradient's norm is known.
        self._begin(instruction)
        self._facts = self._optimizer.step(self._number)
