"""Real training that goes wrong: killed, stopped and interrupted workers, full disks, and what the user is told of them."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoints import hold
from runtime.launch import launch_lines
from runtime.options import arguments
from runtime.settings import Settings
from sim.spec.plan import read_plan
from sim.spec.reading import InputError
from tests.runtime.processes import is_running, wait_until

ROOT = Path(__file__).parents[2]
FOR_EVER = 1_000_000

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")


def plan_table(*devices: str) -> dict[str, Any]:
    """A pipeline with two layers on each of these devices."""
    stages = [{"devices": [device], "layers": [2 * s, 2 * s + 2]} for s, device in enumerate(devices)]
    model = {"name": "tiny", "layers": 2 * len(devices), "hidden": 16, "ffn": 32, "heads": 2, "vocab": 256}
    return {
        "format": "motley-plan/1",
        "cluster": "here",
        "model": model,
        "sequence_length": 8,
        "global_batch": 4,
        "precision": "fp32",
        "pipelines": [{"micro_batch": 1, "micro_batches": 4, "stages": stages}],
    }


class Runs:
    """Processes of `python -m runtime` in a folder with a plan and a text to train on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan, self.corpus = folder / "plan.json", folder / "corpus.txt"
        self.plan.write_text(json.dumps(plan_table("a/0", "a/1")))
        self.corpus.write_text("a text that a small model learns. " * 100)
        self._started: list[subprocess.Popen[str]] = []

    def settings(self, steps: int, **more: Any) -> Settings:
        return Settings(steps, f"text:{self.corpus}", **more)

    def start(self, settings: Settings, file_bytes: int | None = None) -> subprocess.Popen[str]:
        return self.start_words([sys.executable, "-m", "runtime", str(self.plan), *arguments(settings)], file_bytes)

    def start_words(self, words: list[str], file_bytes: int | None = None, **variables: str) -> subprocess.Popen[str]:
        """The process of a command; it may write files of at most `file_bytes`."""

        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        left_out = ("RANK", "WORLD_SIZE", "MOTLEY_FAILURES", "MOTLEY_TRACEBACK")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        self._started.append(process)
        return process

    def training(self, settings: Settings) -> tuple[subprocess.Popen[str], list[int]]:
        """A run that has done its second step, and the process ids of its workers by rank."""
        process = self.start(settings)
        wait_for_line(process, "step +2/")
        return process, workers_of(process.pid)

    def close(self) -> None:
        for process in self._started:
            workers = workers_of(process.pid) if process.poll() is None else []
            process.kill()
            for worker in workers:
                if is_running(worker):
                    os.kill(worker, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.close()


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(pattern, line):
            return
    pytest.fail(f"ended before a line like {pattern!r}: {process.communicate()[1]}")


def workers_of(parent: int) -> list[int]:
    """The process ids of the workers that a process started, by rank."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            facts = (place / "stat").read_text().rpartition(")")[2].split()
            if int(facts[1]) == parent:
                variables = dict(pair.split("=", 1) for pair in (place / "environ").read_text().split("\0") if "=" in pair)
                found[int(variables["RANK"])] = int(place.name)
        except (OSError, KeyError):
            continue
    return [found[rank] for rank in sorted(found)]


def ended(process: subprocess.Popen[str], workers: list[int]) -> tuple[int, str]:
    """The exit code and the errors of a run, of which no worker is left."""
    _, errors = process.communicate(timeout=240)
    assert not any(is_running(worker) for worker in workers)
    return process.returncode, errors


WAITED = r"a/0 \(lane p0s0, step \d+\): (waited in \S+ for lane p0s1 \(a/1\)|in \S+): "  # in a receive, or the norm of a step


def test_a_worker_that_is_killed_ends_the_run_with_one_line_that_names_it(runs: Runs) -> None:
    process, workers = runs.training(runs.settings(FOR_EVER))
    os.kill(workers[1], signal.SIGKILL)
    code, errors = ended(process, workers)
    assert code == 3
    assert re.fullmatch(
        rf"motley: error: the worker of a/1 \(rank 1\) was killed by SIGKILL; {WAITED}"
        r"(connection closed by the peer|was told to end after [\d.e-]+ s)\n",
        errors,
    ), errors


def test_a_worker_that_hangs_is_given_up_after_the_timeout(runs: Runs) -> None:
    process, workers = runs.training(runs.settings(FOR_EVER, timeout_s=3.0))
    os.kill(workers[1], signal.SIGSTOP)
    code, errors = ended(process, workers)
    assert code == 3
    killed = r"the worker of a/1 \(rank 1\) did not answer and was killed"
    assert re.fullmatch(rf"motley: error: {WAITED}(timed out after 3 s|no end after [\d.]+ s); {killed}\n", errors), errors


def test_an_interrupted_run_ends_its_workers_and_says_nothing(runs: Runs) -> None:
    process, workers = runs.training(runs.settings(FOR_EVER))
    process.send_signal(signal.SIGINT)
    assert ended(process, workers) == (130, "")


def test_no_worker_outlives_a_run_that_is_killed(runs: Runs) -> None:
    process, workers = runs.training(runs.settings(FOR_EVER))
    process.kill()
    wait_until(lambda: not any(is_running(worker) for worker in workers))
    assert len(workers) == 2


def test_a_disk_that_is_full_when_a_checkpoint_is_saved_ends_the_run(runs: Runs) -> None:
    # A limit on the size of files stands for the disk: writing fails with EFBIG, as with ENOSPC on a full one.
    process = runs.start(runs.settings(3, checkpoints=runs.folder / "saved", checkpoint_every=1), file_bytes=8192)
    code, errors = ended(process, [])
    assert code == 3
    where = r"a/\d \(lane p0s\d, step 1\), while saving the checkpoint of step 1: "
    assert re.fullmatch(rf"motley: error: {where}\S*saved\S*: (file too large|no space left on device)\n", errors), errors


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"weights": "no-folder"}, "no-folder"),
        pytest.param(
            {"checkpoints": "empty", "resume": True}, "empty: holds no complete checkpoint to resume", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mistake_that_all_workers_find_is_told_once(more: dict[str, Any], told: str, runs: Runs) -> None:
    paths = {name: Path(value) if isinstance(value, str) else value for name, value in more.items()}
    code, errors = ended(runs.start(runs.settings(2, **paths)), [])
    assert code == 2
    assert errors.startswith(f"motley: error: {told}") and errors.count("\n") == 1, errors


def test_a_folder_of_checkpoints_takes_one_run_at_a_time(runs: Runs) -> None:
    folder = runs.folder / "kept"
    folder.mkdir()
    with hold(folder):
        with pytest.raises(InputError, match="kept: another run writes its checkpoints there"):
            hold(folder)
        code, errors = ended(runs.start(runs.settings(2, checkpoints=folder)), [])
    told = "another run writes its checkpoints there; wait for its end, or name another folder"
    assert (code, errors) == (2, f"motley: error: {folder}: {told}\n")
    with hold(folder):  # which is free again
        pass


def test_a_mistake_that_one_worker_finds_in_the_middle_of_a_step_is_told_and_not_what_follows(runs: Runs) -> None:
    tokens = runs.folder / "tokens.bin"
    tokens.write_bytes(bytes([7, 0]) * 1000)
    settings = Settings(FOR_EVER, f"tokens:{tokens}")
    process, workers = runs.training(settings)
    with tokens.open("r+b") as file:  # in place: the workers have mapped it
        file.write(bytes([1, 1]) * 1000)
    code, errors = ended(process, workers)
    assert code == 2
    told = rf"motley: error: {re.escape(str(tokens))}: token \d+ is 257, but the vocabulary has 256 tokens, 0 to 255\n"
    assert re.fullmatch(told, errors), errors


def losses(out: str) -> list[str]:
    return re.findall(r"step +\d+/\d+ +loss +([\d.]+)", out)


@pytest.mark.slow
def test_the_lines_for_several_nodes_train_as_one_machine_does(runs: Runs) -> None:
    runs.plan.write_text(json.dumps(plan_table("b/0", "a/1", "a/0")))
    settings = runs.settings(3)
    here = runs.start(settings).communicate(timeout=240)[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    lines = launch_lines(read_plan(runs.plan), runs.plan, settings, None, "127.0.0.1", port)
    started = [
        runs.start_words([sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]], GLOO_SOCKET_IFNAME="lo")
        for _, line in lines
    ]
    told = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert len(losses(here)) == 3 and losses(told[0][0]) == losses(here) and losses(told[1][0]) == []


def test_workers_that_were_told_different_things_end_before_they_train(runs: Runs) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank, seed in ((0, 3), (1, 4)):
        words = [sys.executable, "-m", "runtime", str(runs.plan), *arguments(runs.settings(2, seed=seed))]
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        started.append(runs.start_words(words, None, **ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
    ended = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert ended[0][1] == "motley: error: rank 1 was started with another seed than rank 0: 4, and not 3\n"
    assert "step" not in ended[0][0]
