"""Micro-benchmarks of links: messages between every two ranks, in both directions, and collectives of all.

    python -m runtime.link_bench --out links.yaml --workers 4                      # on this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... -m runtime.link_bench --out links.yaml --device cuda

One pair measures at a time, so that links are measured alone. A message's seconds are those until an answer of one byte is
there, less that answer's: half of the time of a message of one byte and its answer. So what is found of a direction is of that
direction, but for the latency, of which each has half.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from runtime.bench import relative_spread
from runtime.collectives import all_gather, all_reduce, receive, reduce_scatter, send
from runtime.launch import RunFailed, check_gpus, start_workers, use_interface_to
from runtime.settings import BACKENDS, DEVICES, Settings
from runtime.testbed import enter, find
from runtime.watch import Failure, Watch, control_timeout_s, let_first_tell, tell
from sim.spec.bench import Bench, LinkMeasurement, bench_yaml
from sim.spec.reading import InputError, write_file
from sim.spec.version import VERSION

SIZES = {"cpu": (1, 2**16, 2**20, 2**24), "cuda": (1, 2**16, 2**20, 2**24, 2**28)}
"""Bytes of messages and of collectives' tensors; the first, the smallest, is the latency's."""
QUICK_SIZES = (1, 2**16, 2**20)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")

SIZE_S = 2.0
"""What all repeats of one size may take together; larger sizes are left out where one message of them would take longer."""
QUICK_SIZE_S = 0.05
MOST_REPEATS, LEAST_REPEATS = 15, 3
TIMEOUT_S = 60.0
"""How long a rank waits for another."""
PATIENCE_S = 2.0
"""How long the ranks measure before they tell of their progress."""


@dataclass(frozen=True)
class Options:
    """What a bench of links is told."""

    out: Path
    device: str = "cpu"
    backend: str | None = None
    """gloo or nccl; by default nccl on cuda and gloo on the cpu."""
    names: tuple[str, ...] = ()
    """Of the ranks, in their order; by default host/index."""
    quick: bool = False
    testbed: str | None = None
    """In whose namespaces the ranks run, each in that of the device it is named for; None: in the machine's own network."""

    @property
    def settings(self) -> Settings:
        """The settings of a run on the same device. Raises InputError for what cannot be."""
        return Settings(1, "", device=self.device, backend=self.backend, timeout_s=TIMEOUT_S, testbed=self.testbed)

    def words(self) -> list[str]:
        """The words that `parse` reads them from."""
        words = [f"--out={self.out}", f"--device={self.device}"]
        words += [f"--backend={self.backend}"] if self.backend else []
        words += [f"--names={','.join(self.names)}"] if self.names else []
        words += [f"--testbed={self.testbed}"] if self.testbed else []
        return words + (["--quick"] if self.quick else [])


# --- Starting --------------------------------------------------------------------------------------------------------


def launch_links(options: Options, workers: int) -> None:
    """Nothing, once `options.out` is written by so many ranks on this machine.

    Raises InputError for what can be known before any starts, RunFailed where one fails, and KeyboardInterrupt.
    """
    settings = options.settings
    if workers < 2:
        raise InputError(f"links are between at least two workers, but got {workers}")
    if options.names and len(options.names) != workers:
        raise InputError(f"{workers} workers have as many names, but got {len(options.names)}: {', '.join(options.names)}")
    check_gpus(settings, workers)
    names = options.names or tuple(f"{socket.gethostname()}/{rank}" for rank in range(workers))
    start_workers(["runtime.link_bench", *options.words()], names, settings)


def main(words: Sequence[str]) -> int:
    """The exit code of a bench with this command line: 0, 2 for bad input, 3 for a failure, 130 for an interruption."""
    is_worker = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        options, workers = parse(words)
        if not is_worker:
            launch_links(options, workers)
            return 0
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if count < 2 or (options.names and len(options.names) != count):
            raise InputError(f"there are {count} ranks, but {len(options.names)} names were given for at least two of them")
    except InputError as error:
        if is_worker:
            let_first_tell(int(os.environ["RANK"]))
            tell(Failure(int(os.environ["RANK"]), "", "", 2, str(error), time.time(), follows=False))
        else:
            print(f"motley: error: {error}", file=sys.stderr)
        return 2
    except RunFailed as failed:
        print(f"motley: error: {failed.message}", file=sys.stderr)
        return failed.code
    except KeyboardInterrupt:
        return 130
    if options.testbed is not None:
        enter(find(options.testbed).device(options.names[rank]))  # before there are other threads, which would stay behind
    watch = Watch(rank, options.names[rank] if options.names else f"rank {rank}", "links", TIMEOUT_S)
    watch.start()
    watch.guard(lambda: _work(options, watch))
    return 0


def parse(words: Sequence[str]) -> tuple[Options, int]:
    """The options and the number of workers. Raises InputError for words that are missing or unknown."""
    parser = _Parser(prog="python -m runtime.link_bench", allow_abbrev=False)
    parser.add_argument("--out", metavar="FILE", required=True, type=Path, help="where the first rank writes the bench")
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="ranks to start on this machine (default 2)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="whose memory is sent from and to")
    parser.add_argument("--backend", choices=BACKENDS, help="by default nccl on cuda and gloo on the cpu")
    parser.add_argument("--names", metavar="NAME,...", default="", help="of the ranks; by default host/index")
    parser.add_argument("--testbed", metavar="NAME", help="the testbed in which the ranks run")
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats")
    values = parser.parse_args(list(words))
    names = tuple(name for name in values.names.split(",") if name)
    options = Options(values.out, values.device, values.backend, names, values.quick, values.testbed)
    return options, values.workers


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see python -m runtime.link_bench --help")


# --- One rank --------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank, and how it sends and receives."""

    def __init__(self, options: Options, watch: Watch) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.watch, self.quick = watch, options.quick
        backend = options.settings.chosen_backend
        self.device = _device(options.device, backend)
        self.description = f"{backend} on {options.device}"
        patient = timedelta(seconds=control_timeout_s(TIMEOUT_S))
        everyone = list(range(self.count))
        self.control = _group(everyone, "gloo", patient)
        self.group = _group(everyone, backend, patient if backend == "nccl" else timedelta(seconds=TIMEOUT_S))
        mine = f"{socket.gethostname()}/{os.environ.get('LOCAL_RANK', self.rank)}"
        names: list[str] = [""] * self.count
        dist.all_gather_object(names, options.names[self.rank] if options.names else mine, group=self.control)
        self.names = names
        watch.device = names[self.rank]
        nodes: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            nodes.setdefault(name.rpartition("/")[0], []).append(rank)
        inside = [ranks for ranks in nodes.values() if 1 < len(ranks) < self.count]
        self.teams = [everyone, *inside]
        """Whose collectives are measured: all ranks, and those of each node where there are several."""
        self.team_groups = [self.group, *(_group(ranks, backend, patient) for ranks in inside)]
        self.limit_s = QUICK_SIZE_S if self.quick else SIZE_S
        self.sizes = QUICK_SIZES if self.quick else SIZES[self.device.type]
        self.began_s = time.monotonic()

    def finish(self) -> None:
        """Nothing; returns when the device has done what was begun."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """Random bytes of the device."""
        return torch.randint(256, (num_bytes,), dtype=torch.uint8, device=self.device)

    def put(self, tensor: torch.Tensor, to: int) -> None:
        """Nothing; sends a tensor and returns when it may be used again."""
        send(tensor, to, self.group, 0).wait()
        self.finish()

    def take(self, tensor: torch.Tensor, source: int) -> None:
        """Nothing; receives a tensor."""
        receive(tensor, source, self.group, 0).wait()
        self.finish()

    def tell(self, done: int, of: int) -> None:
        """Nothing; the first rank tells a terminal how far they are."""
        if self.rank == 0 and sys.stderr.isatty() and time.monotonic() - self.began_s > PATIENCE_S:
            print(f"\r{done} of {of} pairs and groups measured", end="" if done < of else "\n", file=sys.stderr, flush=True)


def _group(ranks: Sequence[int], backend: str, timeout: timedelta) -> Any:
    """A process group, which all ranks make alike; of no use to those that are no members."""
    return dist.new_group(list(ranks), backend=backend, timeout=timeout)


def _device(name: str, backend: str) -> torch.device:
    """The device of this rank. Raises InputError where there is none."""
    if name == "cpu":
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if count == 0:
        raise InputError("device cuda needs a GPU, but torch finds none on this machine; accepted: --device cpu")
    if local >= count and backend == "nccl":
        raise InputError(f"rank {local} of this node has no GPU of its own; with --backend gloo several may share one")
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    return device


def _work(options: Options, watch: Watch) -> None:
    """Nothing; measures as one of the ranks, and writes what all have found as the first."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) < int(os.environ["WORLD_SIZE"]):
        use_interface_to(os.environ["MASTER_ADDR"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=control_timeout_s(TIMEOUT_S)))
    rank = _Rank(options, watch)
    pairs = [(i, j) for i in range(rank.count) for j in range(rank.count) if i != j]
    found: list[LinkMeasurement] = []
    steps = len(pairs) + len(rank.teams)
    for done, (sender, receiver) in enumerate(pairs):
        watch.phase = f"measuring {rank.names[sender]} to {rank.names[receiver]}"
        dist.barrier(group=rank.control)
        if rank.rank == sender:
            found += _send_all(rank, receiver)
        elif rank.rank == receiver:
            _receive_all(rank, sender)
        rank.tell(done + 1, steps)
    for done, (team, group) in enumerate(zip(rank.teams, rank.team_groups, strict=True)):
        watch.phase = f"measuring collectives of {', '.join(rank.names[member] for member in team)}"
        dist.barrier(group=rank.control)
        if rank.rank in team:
            measured = list(_collectives(rank, team, group))
            found += measured if rank.rank == team[0] else []
        rank.tell(len(pairs) + done + 1, steps)
    watch.phase = "ending"
    everything: list[Any] = [None] * rank.count
    dist.all_gather_object(everything, found, group=rank.control)
    if rank.rank == 0:
        links = sorted((link for part in everything for link in part), key=lambda link: link.operation != "send")
        versions = {"motley": VERSION, "torch": str(torch.__version__)}
        write_file(options.out, bench_yaml(Bench(rank.description, versions=versions, links=tuple(links))))
    dist.barrier(group=rank.control)
    dist.destroy_process_group()  # not after a failure: a group that has lost a member may wait for it


# --- Messages --------------------------------------------------------------------------------------------------------


def _send_all(rank: _Rank, receiver: int) -> Iterator[LinkMeasurement]:
    """What messages of all sizes take, as their sender. The receiver is told what comes: bytes, and how often; 0 for no more."""
    answer_s, one_s, last_size = 0.0, 0.0, 0
    answer = rank.tensor(1)

    def exchange(payload: torch.Tensor, count: int) -> list[float]:
        """Seconds of a message and its answer, several times."""
        dist.send(torch.tensor([len(payload), count]), receiver, group=rank.control)
        samples = []
        for _ in range(count):
            start_s = time.perf_counter()
            rank.put(payload, receiver)
            rank.take(answer, receiver)
            samples.append(time.perf_counter() - start_s)
        return samples

    for size in rank.sizes:
        if last_size > 1 and one_s * size / last_size > rank.limit_s:  # of one byte the time says nothing of the rate
            break
        payload = rank.tensor(size)
        one_s = exchange(payload, 2)[1]  # the first connects, and touches the memory
        samples = exchange(payload, max(LEAST_REPEATS, min(MOST_REPEATS, round(rank.limit_s / one_s))))
        answer_s = answer_s or statistics.median(samples) / 2
        # A message never takes less than half of it with its answer, whatever the clock says.
        ways = [max(sample - answer_s, sample / 2) for sample in samples]
        names = rank.names[rank.rank], rank.names[receiver]
        yield LinkMeasurement("send", names, size, statistics.median(ways), relative_spread(ways), len(ways))
        last_size, one_s = size, statistics.median(samples)
    dist.send(torch.tensor([0, 0]), receiver, group=rank.control)


def _receive_all(rank: _Rank, sender: int) -> None:
    """Nothing; takes what `_send_all` sends, and answers."""
    answer, order = rank.tensor(1), torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(order, sender, group=rank.control)
        size, count = (int(number) for number in order)
        if not count:
            return
        payload = rank.tensor(size)
        for _ in range(count):
            rank.take(payload, sender)
            rank.put(answer, sender)


# --- Collectives -----------------------------------------------------------------------------------------------------


def _collectives(rank: _Rank, team: Sequence[int], group: Any) -> Iterator[LinkMeasurement]:
    """What collectives of all sizes take, as one of the ranks of a team; all of them find the same."""
    names = tuple(rank.names[member] for member in team)
    for operation in COLLECTIVES:
        one_s, last_size = 0.0, 0
        for size in rank.sizes:
            num_bytes = -(-size // (4 * len(team))) * 4 * len(team)  # equal parts of whole numbers in fp32
            if last_size > 1 and one_s * size / last_size > rank.limit_s:
                break
            run = _collective(rank, operation, num_bytes // 4, len(team), group)
            run()  # connects
            one_s = _agreed(rank, _timed(rank, run, group, 1), group)
            count = max(1, min(20, round(rank.limit_s / MOST_REPEATS / one_s)))
            repeats = max(LEAST_REPEATS, min(MOST_REPEATS, round(rank.limit_s / one_s)))
            samples = [_agreed(rank, _timed(rank, run, group, count), group) for _ in range(repeats)]
            one_s, last_size = statistics.median(samples), size
            yield LinkMeasurement(operation, names, num_bytes, one_s, relative_spread(samples), len(samples))


def _collective(rank: _Rank, operation: str, count: int, ranks: int, group: Any) -> Callable[[], object]:
    """A collective of a tensor of so many fp32 numbers."""
    whole = torch.rand(count, device=rank.device)
    part = torch.rand(count // ranks, device=rank.device)
    run: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole.mul_(0.5), group).wait(),  # halved, so that sums of sums stay finite
        "all_gather": lambda: all_gather(whole, part, group).wait(),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group).wait(),
    }
    return run[operation]


def _timed(rank: _Rank, run: Callable[[], object], group: Any, count: int) -> float:
    """Seconds of one of several runs, which all ranks begin together."""
    rank.finish()
    dist.barrier(group=group)
    rank.finish()
    start_s = time.perf_counter()
    for _ in range(count):
        run()
    rank.finish()
    return (time.perf_counter() - start_s) / count


def _agreed(rank: _Rank, seconds: float, group: Any) -> float:
    """The longest that any of the ranks has found, on all of them, so that they all go on alike."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=rank.device)
    all_reduce(longest, group, dist.ReduceOp.MAX).wait()
    rank.finish()
    return float(longest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
