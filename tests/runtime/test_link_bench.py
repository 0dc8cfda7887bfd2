"""The bench of links: what it makes of the times it sees, on a clock that only the links move, and what it refuses."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime import link_bench
from runtime.link_bench import Options, launch_links, main, parse
from runtime.watch import FAILURES, read_failures
from sim.spec.bench import LinkMeasurement, read_bench
from sim.spec.reading import InputError


class _Link:
    """A rank that sends over a link of its own latency and bandwidth; what comes back has others."""

    def __init__(self, clock: list[float], latency_s: float, bandwidth: float, back_latency_s: float) -> None:
        self.clock, self.latency_s, self.bandwidth, self.back_latency_s = clock, latency_s, bandwidth, back_latency_s
        self.rank, self.names, self.control = 0, ["a/0", "b/0"], None
        self.sizes, self.limit_s, self.messages = (1, 2**16, 2**20, 2**24), 2.0, 0

    def tensor(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def put(self, tensor: torch.Tensor, to: int) -> None:
        self.messages += 1
        # The first message connects.
        self.clock[0] += self.latency_s + len(tensor) / self.bandwidth + (0.5 if self.messages == 1 else 0.0)

    def take(self, tensor: torch.Tensor, source: int) -> None:
        self.clock[0] += self.back_latency_s


def sent(monkeypatch: pytest.MonkeyPatch, latency_s: float, bandwidth: float, back_latency_s: float) -> list[LinkMeasurement]:
    clock = [0.0]
    monkeypatch.setattr(link_bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(dist, "send", lambda *_, **__: None)
    link: Any = _Link(clock, latency_s, bandwidth, back_latency_s)
    return list(link_bench._send_all(link, 1))


def test_a_message_takes_what_its_own_direction_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sent(monkeypatch, 1e-3, 1e8, 1e-3)
    assert [link.num_bytes for link in found] == [1, 2**16, 2**20, 2**24]
    assert {link.members for link in found} == {("a/0", "b/0")}
    assert [link.seconds for link in found] == pytest.approx([1e-3 + n / 1e8 for n in (1, 2**16, 2**20, 2**24)], rel=1e-4)
    assert all(link.spread < 1e-9 and link.repeats >= 3 for link in found)


def test_of_unlike_latencies_each_direction_has_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sent(monkeypatch, 3e-3, 1e8, 1e-3)
    assert found[0].seconds == pytest.approx(2e-3, rel=1e-3)
    assert found[3].seconds == pytest.approx(2e-3 + 2**24 / 1e8, rel=1e-3)


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 MiB takes 1.05 s at 1 MB/s, so that 16 MiB would take 17 s.
    found = sent(monkeypatch, 1e-3, 1e6, 1e-3)
    assert [link.num_bytes for link in found] == [1, 2**16, 2**20]
    assert found[2].repeats == link_bench.LEAST_REPEATS
    assert found[2].seconds == pytest.approx(1e-3 + 2**20 / 1e6, rel=1e-3)


def test_the_options_survive_their_words() -> None:
    for options in (
        Options(Path("out.yaml")),
        Options(Path("a b.yaml"), "cuda", "gloo", ("a/0", "b/3"), True),
        Options(Path("x"), testbed="two-sites", names=("a/0", "b/0")),
    ):
        assert parse(options.words())[0] == options
    assert parse(["--out", "x", "--workers", "5"])[1] == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --out; see"),
        (["--out", "x", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--out", "x", "--more"], "unrecognized arguments: --more"),
        (["--out", "x", "--workers", "two"], "argument --workers: invalid int value: 'two'"),
    ],
)
def test_words_that_are_of_no_use_are_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=message):
        parse(words)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("motley: error: ") and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "workers", "message"),
    [
        (Options(Path("x")), 1, "links are between at least two workers, but got 1"),
        (Options(Path("x"), names=("a/0", "b/0")), 3, "3 workers have as many names, but got 2: a/0, b/0"),
        (Options(Path("x"), backend="nccl"), 2, "backend nccl needs device cuda, but got cpu"),
        (Options(Path("x"), backend="mpi"), 2, "backend is one of gloo, nccl, but got 'mpi'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(options: Options, workers: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        launch_links(options, workers)


def test_ranks_are_told_when_names_and_ranks_differ_in_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(FAILURES, str(tmp_path))
    assert main(["--out", "x", "--names", "a/0,b/0"]) == 2
    (failure,) = read_failures(tmp_path)
    assert (failure.code, failure.message) == (2, "there are 3 ranks, but 2 names were given for at least two of them")


def test_two_real_workers_measure_one_another(tmp_path: Path) -> None:
    out = tmp_path / "links.yaml"
    launch_links(Options(out, quick=True), 2)
    found = read_bench(out)
    first, second = (f"{socket.gethostname()}/{rank}" for rank in range(2))
    assert found.device == "gloo on cpu"
    sends = [link for link in found.links if link.operation == "send"]
    for members in ((first, second), (second, first)):
        assert [link.num_bytes for link in sends if link.members == members][:2] == [1, 2**16]
    others = [link for link in found.links if link.operation != "send"]
    assert {link.operation for link in others} == set(link_bench.COLLECTIVES)
    assert all(link.members == (first, second) and link.num_bytes % 8 == 0 for link in others)
    # A machine sends to itself, but not at more than a memory's rate, nor in less than a call into the kernel takes.
    assert all(link.seconds > 1e-6 and link.num_bytes / link.seconds < 1e12 for link in found.links)
    assert {link.operation for link in found.links[: len(sends)]} == {"send"}
