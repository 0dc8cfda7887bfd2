"""Starting workers: the words they get, what is told when one of them fails, and that none is ever left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.__main__ import main
from runtime.agent import Ending
from runtime.launch import RunFailed, first_cause, launch_lines, launch_locally, nodes_of, ranked_devices
from runtime.options import HELP, arguments, parse
from runtime.settings import BACKENDS, DTYPES, RATE_SCHEDULES, TOKEN_TYPES, Settings
from runtime.watch import Failure
from sim.spec.plan import Plan, parse_plan
from sim.spec.reading import InputError
from tests.runtime.processes import is_running, wait_until

ROOT = Path(__file__).parents[2]

PLAN: dict[str, Any] = {
    "format": "motley-plan/1",
    "cluster": "pair",
    "model": {"name": "tiny", "layers": 4, "hidden": 8, "ffn": 16, "heads": 2, "vocab": 256},
    "sequence_length": 4,
    "global_batch": 2,
    "precision": "fp32",
    "pipelines": [
        {
            "micro_batch": 1,
            "micro_batches": 2,
            "stages": [{"devices": ["a100/0"], "layers": [0, 2]}, {"devices": ["a100/1"], "layers": [2, 4]}],
        }
    ],
}


def plan_on(*stages: str) -> Plan:
    """A plan of one pipeline with a layer for each stage; a stage is named by its devices."""
    table = PLAN | {"model": PLAN["model"] | {"layers": len(stages)}}
    placed = [{"devices": devices.split(), "layers": [s, s + 1]} for s, devices in enumerate(stages)]
    return parse_plan(json.dumps(table | {"pipelines": [PLAN["pipelines"][0] | {"stages": placed}]}))


# --- Words -----------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
paths = st.none() | texts.map(Path)
fractions = st.floats(0, 1, exclude_max=True)
positive = st.floats(0, 1e6)


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    device = draw(st.sampled_from(["cpu", "cuda"]))
    checkpoints = draw(paths)
    return Settings(
        steps=draw(st.integers(1)),
        data=draw(texts),
        device=device,
        precision=draw(st.sampled_from([None, *DTYPES])),
        seed=draw(st.integers(0)),
        learning_rate=draw(positive),
        final_rate=draw(st.floats(0, 1)),
        rate_schedule=draw(st.sampled_from(RATE_SCHEDULES)),
        warm_up_steps=draw(st.integers(0)),
        weight_decay=draw(positive),
        beta1=draw(fractions),
        beta2=draw(fractions),
        epsilon=draw(st.floats(0, 1, exclude_min=True)),
        clip_norm=draw(positive),
        token_type=draw(st.sampled_from(TOKEN_TYPES)),
        checkpoints=checkpoints,
        checkpoint_every=draw(st.integers(0)) if checkpoints else 0,
        keep_checkpoints=draw(st.integers(0)) if checkpoints else 0,
        resume=draw(st.booleans()) if checkpoints else False,
        weights=draw(paths),
        save_weights=draw(paths.filter(lambda path: path is None or path != checkpoints)),
        timeout_s=draw(st.floats(1e-6, 1e6)),
        backend=draw(st.sampled_from([None, *BACKENDS])) if device == "cuda" else "gloo",
        compile=draw(st.booleans()),
        results=draw(paths),
    )


@given(all_settings(), st.none() | texts)
@example(Settings(1, "--data"), "--model")
@example(Settings(1, "-1", seed=1, results=Path("-r")), "-")
def test_the_words_of_settings_are_read_back_as_they_were(settings: Settings, model: str | None) -> None:
    assert parse(["plan.json", *arguments(settings, model)]) == ("plan.json", model, settings)


def test_every_setting_has_an_option_that_the_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(HELP) == [field.name for field in dataclasses.fields(Settings)]
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"--{name.removesuffix('_s').replace('_', '-')} " in told for name in HELP)
    assert "example: python -m runtime plan.json --steps 20 --data text:" in told


def test_settings_at_their_defaults_need_no_words() -> None:
    assert arguments(Settings(20, "text:corpus")) == ["--steps", "20", "--data", "text:corpus"]
    assert arguments(Settings(20, "text:c", timeout_s=90.0, compile=True), "m") == (
        ["--model", "m", "--steps", "20", "--data", "text:c", "--timeout", "90s", "--compile"]
    )


WRONG = [
    ("", "the following arguments are required: PLAN, --steps, --data"),
    ("plan.json --data text:x", "the following arguments are required: --steps"),
    ("plan.json --steps many --data text:x", "argument --steps: expected a whole number, but got 'many'"),
    ("plan.json --steps 0 --data text:x", "steps is at least 1, but got 0"),
    ("plan.json --steps 1 --data text:x --beta1 half", "argument --beta1: expected a number, but got 'half'"),
    ("plan.json --steps 1 --data text:x --timeout 60", "argument --timeout: got '60' without a unit, but a time with its unit"),
    ("plan.json --steps 1 --data text:x --device gpu", "device is one of cpu, cuda, but got 'gpu'"),
    ("plan.json --steps 1 --data text:x --chekpoints y", "unrecognized arguments: --chekpoints y"),
    ("plan.json --steps 1 --data text:x --check y", "unrecognized arguments: --check y"),
    ("missing.json --steps 1 --data text:x", "missing.json: cannot be read (no such file or directory)"),
]


@pytest.mark.parametrize(("words", "told"), WRONG)
def test_wrong_words_are_told_in_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith(f"motley: error: {told}") and errors.count("\n") == 1


# --- Ranks and lines -------------------------------------------------------------------------------------------------


def test_ranks_follow_the_nodes_as_the_plan_names_them_and_then_the_indices() -> None:
    plan = plan_on("v100/1", "a100/2 a100/10", "v100/0")
    assert nodes_of(plan) == [("v100", ["v100/0", "v100/1"]), ("a100", ["a100/2", "a100/10"])]
    assert ranked_devices(plan) == ("v100/0", "v100/1", "a100/2", "a100/10")


@pytest.mark.parametrize("name", ["a100", "/0", "a100/", "a100/x", "a100/-1"])
def test_a_device_without_node_and_index_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"a device is named NODE/INDEX, such as 'a100/0', but the plan has '{name}'"):
        ranked_devices(plan_on(name))


def test_each_node_has_its_line() -> None:
    plan = plan_on("v100/1", "a100/0 a100/1")
    settings = Settings(20, "text:my corpus", seed=3)
    assert launch_lines(plan, "my plan.json", settings, "tiny", "10.0.0.1", 29501) == [
        (
            "v100",
            "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29501 "
            "-m runtime 'my plan.json' --model tiny --steps 20 --data 'text:my corpus' --seed 3",
        ),
        (
            "a100",
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr 10.0.0.1 --master-port 29501 "
            "-m runtime 'my plan.json' --model tiny --steps 20 --data 'text:my corpus' --seed 3",
        ),
    ]


def test_torchrun_gives_the_workers_of_uneven_nodes_the_ranks_and_words_of_the_plan(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import json, os, sys\nprint(json.dumps([os.environ[n] for n in sys.argv[1].split('+')] + sys.argv[2:]))\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    settings = Settings(1, "text:a$b $$HOME 'c'")
    plan = plan_on("v100/1", "a100/0 a100/1")
    started = []
    for _, line in launch_lines(plan, "GROUP_RANK+LOCAL_RANK+RANK+WORLD_SIZE", settings, None, "127.0.0.1", port):
        words = shlex.split(line)
        at = words.index("-m")
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:at], str(script), *words[at + 2 :]]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    ranks = [sorted(json.loads(line)[:4] for line in out.splitlines()) for out, _ in told]
    assert ranks == [[["0", "0", "0", "3"]], [["1", "0", "1", "3"], ["1", "1", "2", "3"]]]
    assert {json.dumps(json.loads(line)[4:]) for out, _ in told for line in out.splitlines()} == {json.dumps(arguments(settings))}


def test_workers_of_another_number_than_the_plans_devices_are_told_how_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main([str(path), "--steps", "2", "--data", "text:x"]) == 2
    assert capsys.readouterr().err == (
        "motley: error: the plan has 2 devices, but WORLD_SIZE is 3; start it with torchrun --nnodes 1 --node-rank 0 "
        f"--nproc-per-node 2 --master-addr HOST --master-port 29500 -m runtime {path} --steps 2 --data text:x\n"
    )


# --- What is told of a run that fails --------------------------------------------------------------------------------


def failure(rank: int, message: str, time_s: float, follows: bool, code: int = 3) -> Failure:
    return Failure(rank, f"a100/{rank}", "p0s0", code, message, time_s, follows)


CAUSES: list[tuple[str, dict[int, int], set[int], list[Failure], str, int]] = [
    ("the first", {0: 3, 1: 3}, set(), [failure(1, "b", 1, False), failure(0, "a", 2, False)], "b", 3),
    ("a mistake", {0: 3, 1: 2}, set(), [failure(0, "lost", 1, True), failure(1, "no file", 2, False, 2)], "no file", 2),
    (
        "a signal",
        {0: 3, 1: -9},
        set(),
        [failure(0, "lost", 1, True)],
        "the worker of a100/1 (rank 1) was killed by SIGKILL; lost",
        3,
    ),
    ("own before silent", {0: 3, 1: -6}, set(), [failure(0, "bug", 1, False)], "bug", 3),
    ("no word", {0: -15, 1: 7}, set(), [], "the worker of a100/1 (rank 1) ended with exit code 7", 3),
    ("ended from outside", {1: -15}, set(), [], "the worker of a100/1 (rank 1) was killed by SIGTERM", 3),
    ("unknown signal", {1: -63}, set(), [], "the worker of a100/1 (rank 1) was killed by signal 63", 3),
    (
        "hung",
        {0: 3, 1: -9},
        {1},
        [failure(0, "timed out", 1, True)],
        "timed out; the worker of a100/1 (rank 1) did not answer and was killed",
        3,
    ),
    ("ended while starting", {0: 3, 1: -15}, set(), [failure(0, "lost", 1, True)], "lost", 3),
]


@pytest.mark.parametrize(
    ("codes", "killed", "failures", "told", "code"), [case[1:] for case in CAUSES], ids=[c[0] for c in CAUSES]
)
def test_the_first_cause_is_told_and_not_what_followed(
    codes: dict[int, int], killed: set[int], failures: list[Failure], told: str, code: int
) -> None:
    failed = first_cause(("a100/0", "a100/1"), Ending(codes, frozenset(killed)), failures)
    assert (failed.message, failed.code, str(failed)) == (told, code, told)


# --- Runs of workers that train nothing ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Launches `faulty_worker` twice, as ranks 0 and 1 of PLAN."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def variables(self) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT), "LEFT": str(self.folder)}

    def launch(self, fault: str, timeout_s: float = 60.0) -> None:
        for name, value in self.variables.items():
            self.monkeypatch.setenv(name, value)
        self.monkeypatch.setenv("FAULT", fault)
        self.monkeypatch.setenv("TIMEOUT_S", str(timeout_s))
        path, settings = self.files()
        launch_locally(path, parse_plan(json.dumps(PLAN)), settings, module="tests.runtime.faulty_worker")

    def failed(self, fault: str, timeout_s: float = 60.0) -> RunFailed:
        """How a run with a fault failed; no worker is left of it."""
        with pytest.raises(RunFailed) as error:
            self.launch(fault, timeout_s)
        assert not any(is_running(pid) for pid in self.pids())
        return error.value

    def files(self) -> tuple[Path, Settings]:
        path, data = self.folder / "plan.json", self.folder / "corpus"
        path.write_text(json.dumps(PLAN))
        data.write_text("to train on " * 20)
        return path, Settings(2, f"text:{data}")

    def left(self, rank: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((self.folder / str(rank)).read_text())
        return found

    def pids(self) -> list[int]:
        return [self.left(rank)["pid"] for rank in (0, 1)]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return Launcher(tmp_path, monkeypatch)


WAITED = "a100/0 (lane p0s0, step 4): waited in RA3@2<p0s1[0:1] for lane p0s1 (a100/1): "


def test_a_run_that_ends_well_leaves_nothing_behind(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    temporary = launcher.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    before = dict(os.environ)
    launcher.launch("none")
    assert not any(is_running(pid) for pid in launcher.pids())
    assert list(temporary.iterdir()) == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)] == handlers
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert changed <= {"PYTHONPATH", "LEFT", "FAULT", "TIMEOUT_S"}
    assert capfd.readouterr() == ("", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert launcher.left(0)["threads"] == str(max(1, cores // 2))


def test_a_run_opens_its_port_once(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second store on the port would be the first one, but where this process had another one there before: there it fails.
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.static_tcp_rendezvous.TCPStore", None)
    launcher.launch("none")
    assert [launcher.left(rank)["arguments"] for rank in (0, 1)]


def test_the_workers_get_the_words_of_the_settings(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = launcher.folder / "${local_rank} $$ 'a b'"
    odd.mkdir()
    launcher = dataclasses.replace(launcher, folder=odd)
    launcher.launch("none")
    path, settings = launcher.files()
    assert [launcher.left(rank)["arguments"] for rank in (0, 1)] == [[str(path), *arguments(settings)]] * 2


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("mistake", 2, "corpus.bin: holds no tokens"),
        ("disk", 3, "a100/1 (lane p0s1, step 4): in F3[2:4]: /data/checkpoint: no space left on device"),
        ("bug", 3, "a100/1 (lane p0s1, step 4): in F3[2:4]: KeyError: 'x'"),
    ],
)
def test_what_a_worker_says_of_itself_is_told(
    fault: str, code: int, told: str, launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = launcher.failed(fault)
    assert (failed.message, failed.code) == (told, code)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("fault", "how"), [("kill", "was killed by SIGKILL"), ("exit", "ended with exit code 7")])
def test_a_worker_that_dies_without_a_word_is_told_with_who_waited_for_it(fault: str, how: str, launcher: Launcher) -> None:
    failed = launcher.failed(fault)
    assert failed.message.startswith(f"the worker of a100/1 (rank 1) {how}; {WAITED}was told to end after ")
    assert failed.code == 3


def test_a_worker_that_loops_for_ever_ends_the_run_at_the_timeout(launcher: Launcher) -> None:
    failed = launcher.failed("loop", timeout_s=0.5)
    assert failed.code == 3
    assert " no end after " in failed.message and failed.message.startswith((WAITED, "a100/1 (lane p0s1, step 4): in F3[2:4]: "))


def test_what_a_worker_started_ends_with_the_run(launcher: Launcher) -> None:
    assert launcher.failed("parent").message.endswith("KeyError: 'x'")
    child = json.loads((launcher.folder / "child").read_text())
    wait_until(lambda: not is_running(child))  # it is killed, but on a busy machine it ends a moment later


def test_a_peer_that_is_killed_is_told_by_the_connection_that_it_closed(launcher: Launcher) -> None:
    failed = launcher.failed("gloo-kill")
    assert failed.code == 3
    assert failed.message.startswith(f"the worker of a100/1 (rank 1) was killed by SIGKILL; {WAITED}")


@pytest.mark.slow
def test_a_peer_that_hangs_is_given_up_after_the_timeout_and_killed(launcher: Launcher) -> None:
    failed = launcher.failed("gloo-stop", timeout_s=12.0)  # within which both must have met, on a busy machine too
    lasted_s = time.time() - (launcher.folder / "waiting").stat().st_mtime
    assert lasted_s < 27  # of which 12 s until the first gives up, and 3 s until the other is killed; torch's agent waits 30 s
    assert failed.message == f"{WAITED}timed out after 12 s; the worker of a100/1 (rank 1) did not answer and was killed"


PARENT = """
import json, sys
from pathlib import Path
from runtime.launch import RunFailed, launch_locally
from runtime.settings import Settings
from sim.spec.plan import read_plan
launch_locally(sys.argv[1], read_plan(sys.argv[1]), Settings(2, sys.argv[2]), module="tests.runtime.faulty_worker")
"""


@pytest.fixture
def parent(launcher: Launcher) -> Iterator[subprocess.Popen[str]]:
    """A process that launches two workers that never end, once both of them run."""
    path, settings = launcher.files()
    script = launcher.folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    process = subprocess.Popen(
        [sys.executable, str(script), str(path), settings.data],
        env=os.environ | launcher.variables | {"FAULT": "sleep", "TMPDIR": str(launcher.folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: all((launcher.folder / name).exists() for name in ("0", "1", "waiting")))
        yield process
    finally:
        process.kill()
        for pid in launcher.pids():  # one that outlives its parent would keep the pipe open, and the test waiting
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_no_worker_outlives_a_launching_process_that_is_killed(launcher: Launcher, parent: subprocess.Popen[str]) -> None:
    os.kill(launcher.pids()[1], signal.SIGSTOP if sys.platform == "linux" else signal.SIGCONT)
    parent.kill()
    wait_until(lambda: not any(is_running(pid) for pid in launcher.pids()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launching_process_that_is_told_to_end_ends_its_workers_first(
    number: signal.Signals, code: int, launcher: Launcher, parent: subprocess.Popen[str]
) -> None:
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=240)
    assert not any(is_running(pid) for pid in launcher.pids())
    # Python itself ends a process that does not catch KeyboardInterrupt by the signal, after a traceback of it.
    assert (parent.returncode, errors) == (code, "") or (number == signal.SIGINT and parent.returncode == -signal.SIGINT)


# --- What is known before any worker starts --------------------------------------------------------------------------


def refused(settings: Settings, plan: Plan) -> str:
    with pytest.raises(InputError) as error:
        launch_locally("plan.json", plan, settings, module="a module that there is not")
    return str(error.value)


def test_what_can_be_known_is_told_before_any_worker_starts(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = launcher.files()
    plan = parse_plan(json.dumps(PLAN))
    assert refused(dataclasses.replace(settings, data="text:missing"), plan).startswith("missing: ")
    of_fp8 = "the runtime trains in fp32, tf32, fp16, bf16, but the plan's precision is fp8"
    assert refused(settings, dataclasses.replace(plan, precision="fp8")) == of_fp8
    on_gpus = dataclasses.replace(settings, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert refused(on_gpus, plan) == "device cuda needs a GPU, but torch finds none on this machine"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert refused(on_gpus, plan) == (
        "the plan needs 2 GPUs, but this machine has 1; with --backend gloo several workers may share a GPU"
    )
