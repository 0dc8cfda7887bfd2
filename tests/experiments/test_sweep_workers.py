"""Sweeps in several processes: killed at any moment, with workers that die, and on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from experiments.journal import JOURNAL
from experiments.workers import Workers
from tests.experiments.conftest import ROOT, Ran, World

Motley = Callable[..., Ran]

SWEEP = """\
import os, signal, time
from pathlib import Path
from experiments.sweep import Run
from partition.search import register
from sim.spec.cluster import read_cluster
from sim.spec.plan import read_plan

HERE = Path(__file__).parent
PLAN = read_plan(HERE / "plan.json")


@register("logged")
def logged(search):
    time.sleep(SECONDS)
    while search.seed >= WAITING and not (HERE / "go").exists():
        time.sleep(0.02)
    if search.seed == FATAL:
        os.kill(os.getpid(), signal.SIGKILL)
    with (HERE / "executed").open("a") as file:
        file.write(f"{search.seed} {os.getpid()}\\n")
    search.consider(PLAN)


def runs():
    cluster = read_cluster(HERE / "tiny.yaml")
    for seed in range(COUNT):
        yield Run(cluster, PLAN.job(), "logged", "estimate", seed=seed)
"""
"""A sweep whose planner, which only its file has, notes every execution."""


def sweep_file(world: World, count: int, seconds: float, fatal: int | None = None, waiting: int | None = None) -> str:
    """The sweep of so many runs that take so long each. Those from `waiting` on wait until there is a file `go`."""
    text = SWEEP.replace("COUNT", str(count)).replace("SECONDS", str(seconds)).replace("FATAL", str(fatal))
    text = text.replace("WAITING", str(count if waiting is None else waiting))
    return world.write("sweep.py", text)


def begin(*arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`motley` with these arguments, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heeding_interrupts,
    )


def _heeding_interrupts() -> None:
    """Undoes that a shell has what it starts in the background ignore Ctrl-C, and all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished_seeds(out: Path) -> list[int]:
    """The seeds of the runs that the journal has, a line that was cut left out."""
    try:
        lines = (out / JOURNAL).read_text().split("\n")[1:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line)["seed"] for line in lines]


def wait_for(true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def executions(world: World) -> list[tuple[int, int]]:
    """The seed of every run that was executed, and the process that did it."""
    lines = (world.folder / "executed").read_text().splitlines()
    return [(int(seed), int(process)) for seed, process in map(str.split, lines)]


def seeds_executed(world: World) -> list[int]:
    return [seed for seed, _ in executions(world)]


def session_is_empty(leader: int) -> bool:
    """Whether no process of a session is left, but for those that nobody has waited for."""
    listed = subprocess.run(["ps", "-o", "stat=", "-s", str(leader)], capture_output=True, text=True).stdout.split()
    return all(state.startswith("Z") for state in listed)


def test_a_sweep_that_was_stopped_twice_goes_on_and_repeats_nothing(world: World) -> None:
    count, out = 18, world.folder / "out"
    path = sweep_file(world, count, 0.1, waiting=14)
    before: list[int] = []
    executed: list[int] = []
    for how, enough in ((signal.SIGKILL, 5), (signal.SIGINT, 11)):
        process = begin("sweep", path, "--out", out, "--processes", 2)
        try:
            wait_for(lambda: len(finished_seeds(out)) >= enough)  # noqa: B023
        finally:
            # kill -9 ends the process that it names, Ctrl-C reaches all processes of a terminal.
            (os.kill if how == signal.SIGKILL else os.killpg)(process.pid, how)
        _, told = process.communicate(timeout=240)
        now = finished_seeds(out)
        assert now[: len(before)] == before and enough <= len(now) < count
        wait_for(lambda: session_is_empty(process.pid), 30)  # noqa: B023 - no process is left behind
        assert not set(before) & set(seeds_executed(world)[len(executed) :])
        before, executed = now, seeds_executed(world)
        assert not list(out.glob("results.*"))
    assert process.returncode == 130 and told.splitlines() == [
        f"motley: interrupted: {len(before)} of {count} runs are finished; the same command continues"
    ]
    world.write("go", "")
    process = begin("sweep", path, "--out", out, "--processes", 2)
    said, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert f"{len(before)} of {count} runs were finished before" in said
    after = finished_seeds(out)
    assert sorted(after) == list(range(count)) and after[: len(before)] == before
    # What was under way when it was stopped is executed again, but nothing that was finished.
    assert sorted(seeds_executed(world)[len(executed) :]) == sorted(set(range(count)) - set(before))


INTERRUPTED_AT_THE_START = """
import os, signal, sys
from contextlib import closing
from joblib.externals.loky.backend.popen_loky_posix import Popen
from experiments.workers import Workers

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test in the background of a shell would begin without
launch, launched = Popen._launch, []

def interrupted(*arguments):
    launch(*arguments)
    launched.append(arguments)
    if len(launched) == int(sys.argv[1]):
        os.killpg(0, signal.SIGINT)

Popen._launch = interrupted

if __name__ == "__main__":
    try:
        with closing(Workers(2).work(hex, list(range(100)))) as work:
            print(*work)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("started", [1, 2])
def test_an_interrupt_while_processes_are_started_ends_them_without_a_word(world: World, started: int) -> None:
    # None of them has come so far that it could ignore the interrupt.
    command = [sys.executable, world.write("interrupted.py", INTERRUPTED_AT_THE_START), str(started)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.communicate(timeout=60) == ("interrupted\n", "") and process.returncode == 0
    wait_for(lambda: session_is_empty(process.pid), 30)


def test_a_run_that_kills_its_process_is_a_row_and_the_others_are_finished(world: World) -> None:
    count, out = 4, world.folder / "out"
    process = begin("sweep", sweep_file(world, count, 0.0, fatal=2), "--out", out, "--processes", 2)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    lines = [json.loads(line) for line in (out / JOURNAL).read_text().splitlines()[1:]]
    errors = {line["seed"]: line["error"] for line in lines}
    assert len(lines) == count == len(errors)
    assert [seed for seed, error in errors.items() if error is not None] == [2]
    assert "the process that worked on it ended" in errors[2]


KEPT: list[bytes] = []


def keeping(task: int) -> int:
    """The task, after a second; its process keeps 320 MB more."""
    KEPT.append(b"kept" * 80_000_000)
    time.sleep(1.1)  # joblib looks once a second
    return task


def test_processes_that_keep_ever_more_memory_are_replaced_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    assert sorted(task for task, done in Workers(2).work(keeping, range(6)) if done == task) == list(range(6))
    assert not list(recwarn)


# --- Ray -------------------------------------------------------------------------------------------------------------

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'motley[ray]'")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@needs_ray
def test_an_address_where_no_ray_answers_is_one_line_within_ten_seconds(world: World) -> None:
    out = world.folder / "out"
    began = time.monotonic()
    process = begin("sweep", sweep_file(world, 2, 0.0), "--out", out, "--on", f"ray://127.0.0.1:{free_port()}")
    _, told = process.communicate(timeout=240)
    assert process.returncode == 2 and told.count("\n") == 1 and "no Ray cluster answers at ray://127.0.0.1" in told
    assert time.monotonic() - began < 30  # Ray by itself waits so long, and Python begins before; some 8 s on an idle machine
    assert finished_seeds(out) == []


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray head with two workers, each of one CPU, which the tests begin and end."""
    folder = Path("/tmp") / f"ray-{os.getpid()}"  # Ray's sockets need a short name
    ray = str(Path(sys.executable).with_name("ray"))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    port, client_port = free_port(), free_port()
    common = ["--block", "--disable-usage-stats", "--num-gpus", "0", "--object-store-memory", str(100 * 2**20)]
    head = ["--head", "--num-cpus", "0", "--port", str(port), "--ray-client-server-port", str(client_port)]
    head += ["--include-dashboard", "false", "--temp-dir", str(folder), "--node-ip-address", "127.0.0.1"]
    worker = ["--address", f"127.0.0.1:{port}", "--num-cpus", "1"]
    log_file = tmp_path_factory.mktemp("ray") / "log"
    log = log_file.open("w")
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> None:
        command = [ray, "start", *common, *options]
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    try:
        start(*head)
        wait_for(lambda: answers(client_port))
        for nodes in (1, 2):
            wait_for(lambda: log_file.read_text().count("Ray runtime started") == nodes)  # noqa: B023
            start(*worker)
        wait_for(lambda: log_file.read_text().count("Ray runtime started") == 3)
        yield f"ray://127.0.0.1:{client_port}"
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@needs_ray
@pytest.mark.slow
def test_on_ray_the_rows_are_those_of_this_machine(world: World, ray_head: str) -> None:
    path = sweep_file(world, 8, 0.2)
    tables = {}
    for name, options in (("here", ["--processes", 1]), ("ray", ["--on", ray_head])):
        process = begin("sweep", path, "--out", world.folder / name, *options)
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
        text = (world.folder / name / "results.csv").read_text()
        tables[name] = re.sub(r",[^,\n]*$", "", text, flags=re.MULTILINE)  # the last column is the wall seconds
    assert tables["here"] == tables["ray"] and tables["here"].count("\n") == 9
    executed = executions(world)
    assert [seed for seed, _ in executed[:8]] == list(range(8)) == sorted(seed for seed, _ in executed[8:])
    assert len({process for _, process in executed[:8]}) == 1
    assert len({process for _, process in executed[8:]}) == 2 and process.pid not in {one for _, one in executed[8:]}
