"""One group of worker processes that trains many plans, so that the tests start processes once."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sim.spec.plan import Plan
from tests.runtime.processes import soon_started

WORKERS = 6
TIMEOUT_S = 60.0
"""How long a worker waits for another. A busy machine shall not turn a test red."""
ANSWER_S = 150.0
"""How long all of them may take for an order."""


@dataclass(frozen=True)
class Order:
    """One training: a plan, its settings and data, and what shall be done on the way."""

    plan: Plan
    settings: Any
    first: int = 0
    """The steps before which it stops when it resumes none."""
    stop: int | None = None
    """The step after which it ends; the last of the settings by default."""
    save: Path | None = None
    resume: Path | None = None
    program: str | None = None
    """The text of a program in the place of the plan's own."""
    bucket_parameters: int | None = None
    staged: bool = False
    """Whether everything that is sent goes through a copy, as a GPU's tensors do with gloo."""


@dataclass(frozen=True)
class Outcome:
    """What a training gave: losses and gradient norms per step, all weights by canonical name, executed instructions by lane."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, torch.Tensor]
    executed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Workers:
    """WORKERS processes that wait for trainings."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        """Starts the processes."""
        context = soon_started()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, store, there), daemon=True)
            process.start()
            self._connections.append(here)
            self._processes.append(process)

    def train(self, order: Order) -> Outcome:
        """The outcome of a training by as many of the workers as its plan has devices."""
        count = len(order.plan.devices)
        assert count <= WORKERS, f"the plan has {count} devices, but there are {WORKERS} workers"
        for connection in self._connections:  # those that are not in the plan take part in making its groups
            connection.send(order)
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(ANSWER_S):
                self.close()  # its answer would come to the next order
                self._start()
                raise TimeoutError(f"worker {rank} does not answer")
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionError):
                codes = self._ended()
                self._start()
                raise AssertionError(f"worker {rank} ended without an answer; exit codes by rank: {codes}") from None
        wrong = [f"worker {rank}:\n{answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if wrong:
            raise AssertionError("\n".join(wrong))
        first: Outcome = answers[0]
        executed = {lane: texts for outcome in answers[:count] for lane, texts in outcome.executed.items()}
        return Outcome(first.losses, first.norms, first.weights, executed)

    def _ended(self) -> list[int | None]:
        """The exit codes of the processes; those that do not end by themselves are killed."""
        self.close()
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _work(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORKERS), rank=rank, world_size=WORKERS, timeout=timedelta(seconds=TIMEOUT_S)
    )
    kept: dict[str, Any] = {}
    while True:
        try:
            order = connection.recv()
        except (EOFError, ConnectionError):
            break
        try:
            connection.send(_train(rank, order, kept))
        except BaseException:
            connection.send(traceback.format_exc())
    os._exit(0)


class QuietWatch:
    """Stands in the place of the watchdog, and notes the instructions."""

    def __init__(self) -> None:
        self.step, self.phase = 0, ""
        self.instructions: dict[Any, None] = {}
        """Those of the first step, in the order in which they begin; what is waited for later has begun already."""

    def enter(self, instruction: Any, peer: str | None = None) -> None:
        if self.step == 0:
            self.instructions.setdefault(instruction)

    def leave(self) -> None:
        pass


def _train(rank: int, order: Order, kept: dict[str, Any]) -> Outcome:
    """The outcome of a training; `kept` has the connections by device, for later ones, too. On cuda all workers share a GPU."""
    import sim.spec.compile as compiler
    from runtime import collectives
    from runtime.data import open_data
    from runtime.gradients import reduction_ranks
    from runtime.huggingface import load_weights
    from runtime.settings import check_runnable
    from runtime.training import Trainer
    from runtime.world import Connections, World, lane_ranks
    from sim.spec.program import instruction_text, parse_program

    plan, settings = order.plan, order.settings
    is_staged = kept.setdefault("is_staged", collectives.is_staged)
    collectives.is_staged = is_staged if settings.device == "cuda" else lambda *_: order.staged
    usual = compiler.BUCKET_PARAMETERS
    try:
        if order.bucket_parameters is not None:
            compiler.BUCKET_PARAMETERS = order.bucket_parameters
        program = check_runnable(plan, settings)
    finally:
        compiler.BUCKET_PARAMETERS = usual
    if order.program is not None:
        program = parse_program(order.program)
    if settings.device not in kept:
        device = torch.device("cuda", 0) if settings.device == "cuda" else torch.device("cpu")
        kept[settings.device] = Connections(device, "gloo", TIMEOUT_S)
    connections: Connections = kept[settings.device]
    connections.connect(plan, program, *reduction_ranks(plan, program, lane_ranks(plan, program)))
    if rank >= len(plan.devices):
        return Outcome([], [], {})
    world = World(plan, program, connections)
    watch: Any = QuietWatch()
    tokens = open_data(settings.data, settings.token_type, plan.transformer.vocab, plan.sequence_length)
    initial = None if settings.weights is None else load_weights(settings.weights, plan.transformer).rows
    trainer = Trainer(world, settings, tokens, watch, initial)
    first = trainer.resume(order.resume) if order.resume is not None else order.first
    facts = [trainer.step(step) for step in range(first, settings.steps if order.stop is None else order.stop)]
    if order.save is not None:
        trainer.save(order.save, first + len(facts))
    weights = {parameter.name: whole.cpu().clone() for parameter, whole in trainer.weights() if whole is not None}
    texts = [instruction_text(i) for i in watch.instructions]
    executed = {world.lane.name: texts} if world.index == 0 else {}
    return Outcome([f.loss for f in facts], [f.gradient_norm for f in facts], weights, executed)


def token_file(folder: Path, vocab: int, count: int, seed: int = 0) -> Path:
    """A file of random tokens, as nanoGPT writes them."""
    path = folder / f"tokens-{vocab}-{count}-{seed}.bin"
    np.random.default_rng(seed).integers(0, vocab, count, dtype=np.uint16).tofile(path)
    return path
