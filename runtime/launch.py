"""Starting the workers of a plan: all of them on this machine, or the lines that start them on several."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.checkpoints import latest, read_facts
from runtime.data import open_data
from runtime.options import arguments
from runtime.settings import Settings, check_runnable, with_model
from runtime.testbed import ADDRESS, INTERFACE, Testbed, broken_links, find, inside
from runtime.watch import FAILURES, LAUNCHER, Failure, read_failures
from sim.spec.cluster import read_cluster
from sim.spec.pace import read_pace
from sim.spec.plan import Plan
from sim.spec.reading import InputError

if TYPE_CHECKING:
    from runtime.agent import Ending


class RunFailed(Exception):
    """A run that ended early: why, in one line, and the exit code to end with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message, self.code = message, code


# --- Ranks -----------------------------------------------------------------------------------------------------------


def nodes_of(plan: Plan) -> list[tuple[str, list[str]]]:
    """The nodes in the order that the plan first names them, each with those of its devices that the plan uses, by index."""
    nodes: dict[str, list[tuple[int, str]]] = {}
    for device in plan.devices:
        node, slash, index = device.rpartition("/")
        if not (node and slash and index.isdecimal()):
            raise InputError(f"a device is named NODE/INDEX, such as 'a100/0', but the plan has {device!r}")
        nodes.setdefault(node, []).append((int(index), device))
    return [(node, [device for _, device in sorted(devices)]) for node, devices in nodes.items()]


def ranked_devices(plan: Plan) -> tuple[str, ...]:
    """The device of each rank: node after node, and in a node by index."""
    return tuple(device for _, devices in nodes_of(plan) for device in devices)


# --- On this machine -------------------------------------------------------------------------------------------------


def takes_steps(settings: Settings) -> bool:
    """Whether a run of these settings trains: not where it resumes what has done all its steps, only to save the weights.

    Raises InputError where the checkpoint cannot be read.
    """
    if not settings.resume or settings.save_weights is None or settings.checkpoints is None:
        return True
    checkpoint = latest(settings.checkpoints)
    return checkpoint is None or int(read_facts(checkpoint)["step"]) != settings.steps


def launch_locally(
    plan_path: str | Path, plan: Plan, settings: Settings, model: str | None = None, module: str = "runtime"
) -> None:
    """Nothing, once the run has ended well: one worker for each device of the plan, all on this machine.

    A worker is `python -m MODULE PLAN ...`. Raises InputError for what can be known before any worker starts, and RunFailed,
    with the first worker's failure that is no consequence of another's, where the run ends early.
    """
    plan = with_model(plan, model, settings.precision)
    check_startable(plan, settings)
    start_workers([module, plan_argument(plan_path), *arguments(settings, model)], ranked_devices(plan), settings)


def check_startable(plan: Plan, settings: Settings) -> None:
    """Nothing. Raises InputError where it is known before any worker starts that the plan cannot be trained on this machine."""
    program = check_runnable(plan, settings)
    if settings.pace is not None:
        read_pace(settings.pace, plan, program)
    open_data(settings.data, settings.token_type, plan.transformer.vocab, plan.sequence_length)
    check_gpus(settings, len(plan.devices))


def start_workers(words: Sequence[str], devices: Sequence[str], settings: Settings) -> None:
    """Nothing, once one worker for each of these devices, each `python -m WORDS` on this machine, has ended well.

    In the testbed of the settings, where they name one. Raises InputError where it is not up or lacks a device, and RunFailed
    with the first cause where a worker fails.
    """
    testbed = None if settings.testbed is None else _testbed(settings.testbed, devices)
    from runtime.agent import run_workers  # not at the head of the file: workers, which need the ranks only, start faster

    with tempfile.TemporaryDirectory(prefix="motley.") as folder:
        environment = _environment(settings, len(devices)) | {FAILURES: folder, LAUNCHER: str(os.getpid())}
        network: AbstractContextManager[None] = contextlib.nullcontext()
        address = "127.0.0.1"
        if testbed is not None:
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            network, address = inside(testbed.fabric), ADDRESS
        try:
            with network:
                ending = run_workers([sys.executable, "-m", *words], len(devices), environment, address)
        except OSError as error:
            raise RunFailed(f"the workers cannot be started: {error}", 3) from None
        if ending.codes:
            failed = first_cause(devices, ending, read_failures(Path(folder)))
            broken = broken_links(testbed) if testbed is not None else []
            if broken:
                failed = RunFailed(f"{failed.message}; in the testbed {', '.join(broken)} is down", failed.code)
            raise failed


def _testbed(name: str, devices: Sequence[str]) -> Testbed:
    """The testbed of this name. Raises InputError where it is not up, or lacks one of the devices."""
    testbed = find(name)
    cluster = read_cluster(testbed.cluster_file)
    for device in devices:
        cluster.device(device)
    return testbed


def check_gpus(settings: Settings, workers: int) -> None:
    """Nothing. Raises InputError where this machine has too few GPUs for this many workers."""
    if settings.device != "cuda":
        return
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise InputError("device cuda needs a GPU, but torch finds none on this machine")
    if settings.chosen_backend == "nccl" and gpus < workers:
        raise InputError(
            f"the plan needs {workers} GPUs, but this machine has {gpus}; with --backend gloo several workers may share a GPU"
        )


def plan_argument(plan_path: str | Path) -> str:
    """The word for a plan's path, which is never taken for an option."""
    path = str(plan_path)
    return f"./{path}" if path.startswith("-") else path


def _environment(settings: Settings, workers: int) -> dict[str, str]:
    """The variables that workers on one machine get, where the user has not set them."""
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        variables["GLOO_SOCKET_IFNAME"] = loopback  # by default gloo asks for the address of the host's name, which may fail
    if settings.pace is not None:
        variables["OMP_NUM_THREADS"] = "1"  # the others wait most of the time, but all at once do not
    else:  # the forwards of CPU runs, and optimizer steps in the host's memory
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = str(max(1, cores // workers))
    return {name: value for name, value in variables.items() if name not in os.environ}


def use_interface_to(address: str) -> None:
    """Nothing; has gloo use the network that leads to an address, unless the user says which (GLOO_SOCKET_IFNAME).

    By default it takes the address of the host's name, which on many systems is 127.0.1.1: no other node finds that. Where the
    interface cannot be told, as outside of Linux, gloo is left to its default.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # which sends nothing, but chooses the way
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address
                    request = struct.pack("256s", name.encode()[:15])
                    if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]) == own:  # SIOCGIFADDR
                        os.environ["GLOO_SOCKET_IFNAME"] = name
                        return
    except (ImportError, OSError):
        return


def first_cause(devices: Sequence[str], ending: Ending, failures: Sequence[Failure]) -> RunFailed:
    """What made a run end early, from what the workers told, the earliest first, and from how they ended.

    First comes what a worker says of itself, then workers that died without a word, then lost connections and long waits,
    which either of these may have caused.
    """
    own = next((failure for failure in failures if not failure.follows), None)
    if own is not None:
        return RunFailed(own.message, own.code)
    told = {failure.rank for failure in failures}
    silent = {rank: code for rank, code in sorted(ending.codes.items()) if rank not in told | ending.killed}
    # Without a word, SIGTERM is how those end that the launching process ends before their watch began.
    died = {rank: code for rank, code in silent.items() if code != -signal.SIGTERM} or (silent if not failures else {})
    parts = [f"the worker of {devices[rank]} (rank {rank}) {_ended(code)}" for rank, code in died.items()]
    parts += [failure.message for failure in failures[:1]]
    parts += [f"the worker of {devices[rank]} (rank {rank}) did not answer and was killed" for rank in sorted(ending.killed)]
    return RunFailed("; ".join(parts), 3)


def _ended(code: int) -> str:
    """The words for an exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    names: Mapping[int, str] = {int(number): number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


# --- On several machines ---------------------------------------------------------------------------------------------


def launch_lines(
    plan: Plan, plan_path: str | Path, settings: Settings, model: str | None = None, address: str = "HOST", port: int = 29500
) -> list[tuple[str, str]]:
    """For each node of the plan its name and the line that starts its workers there; `address` is the first node's."""
    nodes = nodes_of(plan)
    # torchrun takes what follows the module for templates, in which $$ stands for $.
    words = [word.replace("$", "$$") for word in (plan_argument(plan_path), *arguments(settings, model))]
    lines = []
    for rank, (node, devices) in enumerate(nodes):
        torchrun = f"torchrun --nnodes {len(nodes)} --node-rank {rank} --nproc-per-node {len(devices)}"
        lines.append((node, f"{torchrun} --master-addr {address} --master-port {port} -m runtime {shlex.join(words)}"))
    return lines
