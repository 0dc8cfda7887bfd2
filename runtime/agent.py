"""Torch elastic's agent on one machine, made to end what does not end by itself soon, and to say nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

GRACE_S = 3
"""How long workers that are told to end may take before they are killed. Torch's own agent waits 30 s."""


@dataclass(frozen=True)
class Ending:
    """How the workers of a run ended: the exit codes of those that failed, by rank, minus the signal where one killed them."""

    codes: Mapping[int, int]
    killed: frozenset[int]
    """The ranks that did not end when they were told to, and were killed."""


def run_workers(command: Sequence[str], workers: int, environment: Mapping[str, str], address: str) -> Ending:
    """How a run of this many workers, each a process of this command, ended; none is left.

    The workers find one another at `address`, which is this machine's. Ends them all when one fails. Raises KeyboardInterrupt
    after an interruption, and SystemExit after another signal that asks to end.
    """
    with _variables(environment), _silence(), _handlers_kept():
        # The store takes any free port.
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        spec = WorkerSpec(
            role="worker",
            local_world_size=workers,
            rdzv_handler=_Rendezvous(address, store),
            entrypoint=command[0],
            args=tuple(word.replace("$", "$$") for word in command[1:]),  # the agent takes them for templates
            max_restarts=0,
            monitor_interval=0.1,
            master_addr=address,
            master_port=store.port,
            local_addr=address,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=os.devnull))
        try:
            result = agent.run()
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        finally:
            agent.end()
    return Ending({rank: failure.exitcode for rank, failure in result.failures.items()}, frozenset(agent.killed))


class _Rendezvous(StaticTCPRendezvous):
    """The meeting of one agent with itself, at a store that there is.

    Asked for one on the same port torch would share it, but where this process had another store on that port before: then it
    forgets this one, and finds the port taken.
    """

    def __init__(self, address: str, store: torch.distributed.TCPStore) -> None:  # type: ignore[name-defined]
        super().__init__(address, store.port, rank=0, world_size=1, run_id="motley", timeout=60)
        self._store = store


class _Agent(LocalElasticAgent):
    """The agent, which waits GRACE_S for workers to end, and knows which it had to kill."""

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs_specs)
        self.killed: set[int] = set()
        self.groups: set[int] = set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        self.groups = set(started.values())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Once it has seen a failure, the agent's own monitoring waits 30 s for the others to end.
        if any(code not in (None, 0) for code in self._codes().values()):
            self._shutdown()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        # Always SIGTERM: on SIGINT, a worker that is just starting would print a traceback.
        living = {rank for rank, code in self._codes().items() if code is None}
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, GRACE_S)  # here, because torch 2.11's agent cannot be told how long to wait
        super()._shutdown(signal.SIGTERM)
        self.killed |= {rank for rank in living if self._codes()[rank] == -signal.SIGKILL}

    def _codes(self) -> dict[int, int | None]:
        """The exit codes of the workers by rank, None for those that run."""
        started = getattr(self._pcontext, "subprocess_handlers", {})
        return {rank: handler.proc.poll() for rank, handler in started.items()}

    def end(self) -> None:
        """Nothing; kills what is left of the workers and of the processes that they started."""
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment, which workers inherit, for as long as it lasts."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps torch's warnings and errors about workers that end from the screen; what matters of them is told by others."""
    logger, nothing = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagated = logger.propagate
    logger.addHandler(nothing)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(nothing)
        logger.propagate = propagated


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Gives back the handlers of the signals that the agent takes over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # there the agent takes none
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
