"""`motley run`: what it checks before workers start, and what it tells of the run."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from experiments import machine
from experiments.cli import run
from experiments.commands.demo import train
from experiments.commands.run import run as run_command
from experiments.findings import MEASURED, SIMULATED, Run, findings, simulate_missing
from experiments.output import outputs
from runtime import launch
from runtime.launch import RunFailed
from runtime.results import write_result
from runtime.settings import Settings
from sim.spec.cluster import read_cluster
from sim.spec.compile import compile_plan
from sim.spec.counts import model_flop
from sim.spec.plan import Plan, read_plan
from sim.spec.trace import read_trace
from tests.experiments.conftest import ROOT, TINY_CLUSTER, TINY_PLAN, Ran, World
from tests.experiments.runs import result_of

Motley = Callable[..., Ran]

CPUS = ROOT / "examples" / "clusters" / "cpu-4.yaml"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, world: World) -> Iterator[list[tuple[Path, Plan, Settings, str | None]]]:
    """What `launch_locally` was called with; in its place, the run is that of a simulation on two CPUs."""
    calls: list[tuple[Path, Plan, Settings, str | None]] = []

    def launch_locally(path: Path, plan: Plan, settings: Settings, model: str | None) -> None:
        calls.append((path, plan, settings, model))
        assert settings.results is not None and settings.results.is_dir()
        os.write(1, b"step 1/3  loss 5.5\n")
        kind = "CPU" if settings.device == "cpu" else "RTX4090"
        place = world.cluster if settings.device == "cuda" else two_cpus(world) if "box/0" in plan.devices else str(CPUS)
        write_result(settings.results, result_of(plan, read_cluster(place), kind, dict.fromkeys(plan.devices, 5e10)))

    monkeypatch.setattr(launch, "launch_locally", launch_locally)
    yield calls
    assert not any(settings.results.exists() for _, _, settings, _ in calls if settings.results is not None)


def two_cpus(world: World) -> str:
    """The path of a cluster of two CPUs whose names are those of the tiny plan."""
    text = CPUS.read_text().replace("name: cpu-4", "name: tiny").replace("name: cpu,", "name: box,")
    return world.write("cpus.yaml", text.replace("gpus: 4", "gpus: 2"))


def cpu_plan(world: World) -> str:
    """The path of the tiny plan in fp32."""
    return world.write("cpu.json", TINY_PLAN.replace('"bf16"', '"fp32"'))


def arguments(world: World, *more: object, plan: str | None = None) -> list[object]:
    """A command line that is right."""
    return ["run", plan or cpu_plan(world), "--steps", 3, "--data", f"text:{world.folder}", *more]


# --- What it tells ---------------------------------------------------------------------------------------------------


def test_the_measured_report_stands_beside_the_simulated_one(motley: Motley, world: World, launched: list[Any]) -> None:
    ran = motley(*arguments(world, "--json", world.folder / "run.json", "--trace", world.folder / "trace.json"))
    assert ran.code == 0, ran.err
    assert ran.err == ""
    rows = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert ["measured", "simulated", "difference"] in [line.split() for line in ran.out.splitlines()]
    for name in ("iteration", "tokens/s", "MFU", "HFU (counts recomputation)", "bubble", "peak memory of box/0"):
        assert rows[name].rstrip().endswith(" %"), name
    assert "loss 5.5000 in step 1, 3.5000 in step 3" in ran.out
    assert "100.0 GFLOP/s that the 2 workers together reached" in ran.out
    written = json.loads((world.folder / "run.json").read_text())
    assert written["losses"] == [5.5, 4.5, 3.5]
    assert written["iteration_s"] > 0 and written["simulated"]["iteration_s"] > 0
    assert written["mfu"] == written["mfu_used"] and written["cluster_stands_in"]
    trace = read_trace(world.folder / "trace.json")
    assert trace.origin == "measured" and trace.plan == read_plan(cpu_plan(world))
    assert "trace.json" in ran.out and "run.json" in ran.out


def both_timelines(run: Run) -> tuple[float, float]:
    """The seconds of a run's measured and simulated iterations, which a report shows side by side."""
    assert simulate_missing([run], 1) == [] and set(run.traces) == {MEASURED, SIMULATED}
    return run.traces[MEASURED].iteration_s, run.traces[SIMULATED].iteration_s


def test_a_report_of_the_runs_files_simulates_the_cluster_as_it_ran(motley: Motley, world: World, launched: list[Any]) -> None:
    """Also where only the trace was written, and where a cluster is given that is the plan's and not the run's."""
    kept = world.folder / "kept"
    kept.mkdir()
    files = {"json": kept / "run.json", "trace": kept / "trace.json"}
    flags = [part for name, path in files.items() for part in (f"--{name}", path)]
    assert motley(*arguments(world, *flags)).code == 0
    simulated = json.loads(files["json"].read_text())["simulated"]
    for paths in ([kept], [files["trace"]], [files["trace"], Path(world.cluster)]):
        (run,) = [run for run in findings(paths).runs if run.row["cluster"] == "this machine"]
        measured_s, simulated_s = both_timelines(run)
        assert simulated_s == simulated["iteration_s"] and measured_s == read_trace(files["trace"]).iteration_s
        assert run.peaks[SIMULATED] == simulated["peak_bytes"] and set(run.peaks) == {MEASURED, SIMULATED}
    page = world.folder / "page.html"
    assert motley("report", kept, "--out", page).code == 0
    text = page.read_text()
    assert "measured: " in text and ", simulated for this page" in text


def test_a_report_simulates_a_cluster_that_it_is_given_in_the_place_of_that_of_the_run(
    motley: Motley, world: World, launched: list[Any]
) -> None:
    trace, cpus = world.folder / "trace.json", Path(two_cpus(world))
    assert motley(*arguments(world, "--cluster", cpus, "--trace", trace)).code == 0
    (own,) = findings([trace]).runs
    slower = read_cluster(world.write("slower.yaml", cpus.read_text() + "devices: {box/0: {speed: 0.5}}\n"))
    (other,) = findings([trace], [slower]).runs
    assert both_timelines(other)[1] > 1.2 * both_timelines(own)[1]


def test_the_settings_of_the_workers_are_those_of_the_flags(
    motley: Motley, world: World, launched: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("kept")
    plan = world.write("bf16.json", TINY_PLAN)
    flags = {
        "device": "cpu",
        "precision": "fp32",
        "seed": 7,
        "learning-rate": 0.5,
        "final-rate": 0.25,
        "rate-schedule": "linear",
        "warm-up-steps": 2,
        "weight-decay": 0.75,
        "beta1": 0.5,
        "beta2": 0.625,
        "epsilon": 0.125,
        "clip-norm": 3.0,
        "token-type": "uint16",
        "checkpoints": elsewhere / "kept",
        "checkpoint-every": 3,
        "keep-checkpoints": 4,
        "weights": world.folder,
        "save-weights": elsewhere / "weights",
        "backend": "gloo",
    }
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    ran = motley(*arguments(world, *given, "--resume", "--compile", "--quiet", "--timeout", "2min", plan=plan))
    assert ran.code == 0, ran.err
    ((path, made, settings, model),) = launched
    expected = {name.replace("-", "_"): value for name, value in flags.items()}
    expected |= {"steps": 3, "data": f"text:{world.folder}", "resume": True, "compile": True, "quiet": True, "timeout_s": 120.0}
    assert {name: getattr(settings, name) for name in expected} == expected
    assert set(expected) | {"results", "pace", "testbed"} == {field.name for field in fields(Settings)}
    assert (str(path), made.precision, model) == (plan, "fp32", None)


def test_the_defaults_of_the_flags_are_those_of_the_settings() -> None:
    parameters = inspect.signature(run_command).parameters
    for field in fields(Settings):
        if field.name in parameters and field.name not in ("steps", "data"):
            assert parameters[field.name].default == field.default, field.name
    assert parameters["timeout"].default == f"{Settings(1, 'text:x').timeout_s:g}s"


def test_another_model_takes_the_place_of_the_plans(motley: Motley, world: World, launched: list[Any]) -> None:
    ran = motley(*arguments(world, "--model", world.model))
    assert ran.code == 0, ran.err
    ((_, plan, _, model),) = launched
    assert plan.transformer.name == "tiny-llama" and model == world.model


def test_json_on_standard_output_is_nothing_but_json(
    world: World, launched: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([str(part) for part in arguments(world, "--json", "-")]) == 0
    ran = capfd.readouterr()
    assert json.loads(ran.out)["losses"] == [5.5, 4.5, 3.5]
    assert "step 1/3  loss 5.5" in ran.err and "measured" in ran.err  # the workers' lines, and the table


def test_the_timeline_of_the_run_is_drawn_above_the_simulated_one(motley: Motley, world: World, launched: list[Any]) -> None:
    picture = world.folder / "timeline.svg"
    assert motley(*arguments(world, "--timeline", picture)).code == 0
    text = picture.read_text()
    assert text.count("<!-- p0s0") == 2 and text.index("one measured iteration") < text.index("one simulated iteration")


def test_the_users_cluster_of_cpus_is_the_one_it_is_told_on(motley: Motley, world: World, launched: list[Any]) -> None:
    ran = motley(*arguments(world, "--cluster", two_cpus(world), "--json", world.folder / "run.json"))
    assert ran.code == 0 and ran.err == ""
    written = json.loads((world.folder / "run.json").read_text())
    assert written["cluster"] == "tiny" and not written["cluster_stands_in"]
    # The run was the simulation on that cluster, but for the peak, which was measured.
    assert written["simulated"]["bubble"] == pytest.approx(written["bubble"], rel=0.2)


def test_a_cluster_of_gpus_is_not_what_a_run_on_cpus_is_told_on(motley: Motley, world: World, launched: list[Any]) -> None:
    ran = motley(*arguments(world, "--cluster", world.cluster))
    assert ran.code == 0
    assert "tiny has GPUs, and the workers were CPUs: the simulated figures are for the CPUs of this machine" in ran.out


def test_a_run_on_gpus_has_the_peaks_and_links_of_its_cluster(motley: Motley, world: World, launched: list[Any]) -> None:
    file = world.folder / "run.json"
    ran = motley(*arguments(world, "--device", "cuda", "--cluster", world.cluster, "--json", file, plan=world.plan))
    assert ran.code == 0 and ran.err == ""
    written = json.loads(file.read_text())
    assert written["iteration_s"] == pytest.approx(written["simulated"]["iteration_s"])
    assert written["mfu"] == pytest.approx(written["simulated"]["mfu"])


def test_the_simulated_report_is_of_the_stack_that_is_named(motley: Motley, world: World, launched: list[Any]) -> None:
    slow = world.write("slow.yaml", TINY_CLUSTER + "stack: {step: 3 s}\n")
    simulated = []
    for number, more in enumerate(((), ("--stack", "motley"))):
        file = world.folder / f"{number}.json"
        ran = motley(*arguments(world, "--device", "cuda", "--cluster", slow, "--json", file, *more, plan=world.plan))
        assert ran.code == 0, ran.err
        simulated.append(json.loads(file.read_text())["simulated"]["iteration_s"])
    assert simulated[0] > 3 > simulated[1]


def test_a_stack_needs_the_cluster_whose_it_replaces(motley: Motley, world: World, launched: list[Any]) -> None:
    ran = motley(*arguments(world, "--stack", "nemo"))
    assert (ran.code, ran.out) == (2, "") and launched == []
    assert ran.err == "motley: error: --stack nemo takes the place of the stack of --cluster, which was not given\n"
    ran = motley(*arguments(world, "--constants", "c.yaml"))
    assert (ran.code, ran.out) == (2, "") and launched == []
    assert ran.err == "motley: error: --constants c.yaml are for the simulation on --cluster, which was not given\n"


def test_gpus_of_another_kind_than_the_clusters_are_told(motley: Motley, world: World, launched: list[Any]) -> None:
    cluster = world.write("other.yaml", Path(world.cluster).read_text().replace("RTX4090", "RTX3090"))
    ran = motley(*arguments(world, "--device", "cuda", "--cluster", cluster, plan=world.plan))
    assert ran.code == 0
    assert ran.err == "motley: warning: box/0 is of kind RTX3090 in tiny, but ran on RTX4090\n"


def test_more_workers_than_cores_are_told(
    motley: Motley, world: World, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("experiments.machine", "experiments.commands.run"):
        monkeypatch.setattr(f"{module}.cores", lambda: 1)
    assert "they share 1 core, " in motley(*arguments(world)).out
    for module in ("experiments.machine", "experiments.commands.run"):
        monkeypatch.setattr(f"{module}.cores", lambda: 2)
    assert "they share" not in motley(*arguments(world)).out


def test_the_demo_ends_with_a_training_by_the_asymmetric_plan(
    world: World, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = world.folder / "run"
    for _ in range(2):  # the second replaces the files of the first
        train(ROOT / "examples", out, 5, outputs({}))
    (path, plan, settings, _), _ = launched
    assert path == ROOT / "examples" / "plans" / "asymmetric-cpu-4.json" and plan == read_plan(path)
    assert (settings.device, settings.seed, settings.steps) == ("cpu", 5, 20)
    assert Path(settings.data.removeprefix("text:"), "tasks.py").is_file()
    assert {path.name for path in out.iterdir()} == {"run.json", "trace.json", "timeline.png"}
    assert "loss 5.5000 in step 1, 3.5000 in step 3" in capsys.readouterr().out


# --- A real run ------------------------------------------------------------------------------------------------------


def test_two_workers_train_and_their_run_is_told(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.write("text.txt", "All work and no play makes Jack a dull boy.\n" * 200)
    flags = {"data": f"text:{world.folder / 'text.txt'}", "steps": 8, "learning-rate": 0.01}
    files = {"json": world.folder / "run.json", "trace": world.folder / "trace.json", "timeline": world.folder / "two.png"}
    words = [str(part) for name, value in {**flags, **files}.items() for part in (f"--{name}", value)]
    code = run(["run", cpu_plan(world), *words])
    ran = capfd.readouterr()
    assert code == 0, ran.err
    assert [line.split()[1] for line in ran.out.splitlines() if line.startswith("step ")] == [f"{n}/8" for n in range(1, 9)]
    written = json.loads(files["json"].read_text())
    assert written["losses"][0] == pytest.approx(math.log(256), rel=0.2) and written["losses"][-1] < 0.9 * written["losses"][0]
    assert len(written["step_s"]) == 8 and min(written["step_s"]) <= written["iteration_s"] <= max(written["step_s"])
    assert written["tokens_per_s"] == pytest.approx(4 * 128 / written["iteration_s"])
    # Not below 1 where others on the machine were busier while the matmuls were measured than during the steps.
    reached, unit = re.search(r"MFU and HFU are of the ([\d.,]+) ([MGT])FLOP/s", ran.out).groups()  # type: ignore[union-attr]
    rate = float(reached.replace(",", "")) * {"M": 1e6, "G": 1e9, "T": 1e12}[unit]
    flop = model_flop(read_plan(cpu_plan(world)).transformer, 4, 128)
    told_within = 0.5 * 10 ** -len(reached.partition(".")[2]) / float(reached.replace(",", ""))  # as its last digit is rounded
    assert written["mfu"] == written["mfu_used"] == pytest.approx(flop / written["iteration_s"] / rate, rel=1.01 * told_within)
    assert 0 < written["simulated"]["mfu"] < 1
    assert all(written["peak_bytes"][device] > 0 for device in ("box/0", "box/1"))
    trace = read_trace(files["trace"])
    program = compile_plan(read_plan(cpu_plan(world)))
    spans = {lane.name: [span.instruction for span in trace.spans if span.lane == lane.name] for lane in program.lanes}
    assert all(sorted(map(repr, spans[lane.name])) == sorted(map(repr, lane.instructions)) for lane in program.lanes)
    assert files["timeline"].read_bytes().startswith(b"\x89PNG")


def test_a_training_that_diverges_ends_there_with_what_was_measured_and_the_checkpoint_before(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first update is so large that the second step's loss is no number any more."""
    world.write("text.txt", "All work and no play makes Jack a dull boy.\n" * 200)
    kept, told = world.folder / "kept", world.folder / "run.json"
    words = ["--data", f"text:{world.folder / 'text.txt'}", "--steps", "9", "--learning-rate", "1e38", "--save-weights"]
    words += [str(world.folder / "weights"), "--checkpoints", str(kept), "--checkpoint-every", "1", "--json", str(told)]
    code = run(["run", cpu_plan(world), *words])
    ran = capfd.readouterr()
    assert code == 3, ran.err
    assert re.fullmatch(
        r"motley: error: the loss of step 2 is (nan|inf): the training has diverged and was ended; "
        r"the last checkpoint is that of step 1\n",
        ran.err,
    ), ran.err
    assert [line.split()[1] for line in ran.out.splitlines() if line.startswith("step ")] == ["1/9", "2/9"]
    assert {path.name for path in kept.iterdir()} == {".lock", "step-00000001"}
    assert not list((world.folder / "weights").glob("*.safetensors"))
    losses = json.loads(told.read_text())["losses"]
    assert losses == [pytest.approx(math.log(256), rel=0.2), None]


def test_the_weights_of_a_training_that_is_done_are_saved_without_another_step(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same command once more: the second time with --resume, and another folder for the weights."""
    world.write("text.txt", "All work and no play makes Jack a dull boy.\n" * 200)
    plan = re.sub(r'"stages": \[.*\]}\]}', '"stages": [{"devices": ["box/0"], "layers": [0, 4]}]}]}', TINY_PLAN, flags=re.DOTALL)
    alone = world.write("alone.json", plan.replace('"bf16"', '"fp32"'))  # of one worker, which has all weights
    words = ["run", alone, "--data", f"text:{world.folder / 'text.txt'}", "--checkpoints", str(world.folder / "kept")]
    weights = [world.folder / "during", world.folder / "after"]
    assert run([*words, "--steps", "2", "--save-weights", str(weights[0])]) == 0
    capfd.readouterr()
    assert run([*words, "--steps", "2", "--save-weights", str(weights[1]), "--resume"]) == 0
    assert capfd.readouterr() == (f"all 2 steps of toy are done\nsaved the weights in {weights[1]}\n", "")
    during, after = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in weights)
    assert set(during) == {"config.json", "model.safetensors"} and during == after
    told = world.folder / "run.json"
    assert run([*words, "--steps", "2", "--save-weights", str(weights[1]), "--resume", "--json", str(told)]) == 2
    complaint = f"all 2 steps of the training in {world.folder / 'kept'} are done; --json would have nothing to tell of"
    assert capfd.readouterr() == ("", f"motley: error: {complaint}\n") and not told.exists()


# --- What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "tpu"], ["device is one of cpu, cuda", "'tpu'"]),
        (["--steps", "0"], ["--steps", "at least 1", "'0'"]),
        (["--learning-rate", "fast"], ["--learning-rate", "expected a number, but got 'fast'"]),
        (["--learning-rate", "-1"], ["learning rate is at least 0", "-1"]),
        (["--beta2", "1.5"], ["beta2 is at least 0 and below 1"]),
        (["--timeout", "60"], ["--timeout", "without a unit"]),
        (["--timeout", "0s"], ["--timeout", "above zero"]),
        (["--precision", "bf17"], ["precision is one of", "'bf17'"]),
        (["--backend", "nccl"], ["backend nccl needs device cuda"]),
        (["--resume"], ["the folder of the checkpoints (--checkpoints) must be given"]),
        (["--final-rate", "7"], ["final rate is a fraction", "7"]),
        (["--checkpoints", "{other}/kept", "--save-weights", "{other}/x/../kept"], ["--save-weights", "both go to", "kept"]),
        (["--checkpoints", "{other}/kept", "--json", "{other}/kept"], ["--json", "both go to", "kept"]),
        (["--checkpoints", "{folder}/kept"], ["--checkpoints", "kept lies in", "whose texts are trained on"]),
        (["--json", "{plan}.copy"], ["--json", "lies in", "whose texts are trained on"]),
        (["--model", "llama-2-7b"], ["layers 4 to 32 are missing"]),
        (["--cluster", "{cpus}", "--model", "nowhere"], ["error: unknown model 'nowhere'"]),
        (["--timeline", "{folder}/timeline.gif"], ["--timeline", ".png, .svg, .pdf"]),
        (["--json", "{folder}"], ["--json", "is a folder"]),
        (["--json", "{plan}"], ["--json", "is read by this command"]),
        (["--json", "-", "--trace", "-"], ["both go to standard output"]),
        (["--checkpoints", "{plan}"], ["--checkpoints", "is a file"]),
        (["--save-weights", "/proc/motley"], ["--save-weights", "/proc/motley"]),
        (["--print-launch", "--json", "{folder}/r.json"], ["--print-launch starts nothing", "--json"]),
        (["--address", "host"], ["--address", "--print-launch"]),
        (["--cluster", "{small}"], ["'box/1' is not in cluster 'tiny'"]),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_starts(
    motley: Motley, world: World, launched: list[Any], flags: list[str], words: list[str]
) -> None:
    small = world.write("small.yaml", Path(world.cluster).read_text().replace("gpus: 2", "gpus: 1"))
    plan = cpu_plan(world)
    shutil.copy(plan, f"{plan}.copy")
    other = world.folder.with_name("elsewhere")
    places = {"folder": world.folder, "other": other, "plan": plan, "cpus": two_cpus(world), "small": small}
    before = world.names()
    ran = motley(*arguments(world, *(flag.format(**places) for flag in flags)))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("motley: error: ") and ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err, ran.err
    assert not launched and world.names() == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"precision": "bf16"', '"precision": "fp8"', ["the plan's precision is fp8"]),
        ('"vocab": 256', '"vocab": 256, "position": "alibi"', ["cannot run alibi positions"]),
    ],
)
def test_a_plan_that_the_runtime_cannot_run_is_refused_with_its_name(
    motley: Motley, world: World, launched: list[Any], old: str, new: str, words: list[str]
) -> None:
    plan = world.write("wrong.json", TINY_PLAN.replace(old, new))
    ran = motley(*arguments(world, plan=plan))
    assert ran.code == 2 and not launched and "wrong.json: " in ran.err
    for word in words:
        assert word in ran.err


def test_a_plan_too_large_for_its_gpus_is_not_started(motley: Motley, world: World, launched: list[Any]) -> None:
    plan = world.write("large.json", TINY_PLAN.replace('"hidden": 64', '"hidden": 65536'))
    file, trace = world.folder / "run.json", world.folder / "trace.json"
    flags = ["--device", "cuda", "--cluster", world.cluster, "--json", file, "--trace", trace]
    ran = motley(*arguments(world, *flags, plan=plan))
    assert ran.code == 1 and not launched
    (line,) = ran.err.splitlines()
    assert "is not feasible: box/" in line and "GiB" in line and "--trace: nothing was written" in line
    assert json.loads(file.read_text())["infeasible"]["reason"] == "memory" and not trace.exists()


def test_a_plan_too_large_for_this_machines_memory_is_not_started_on_its_cpus(
    motley: Motley, world: World, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine_bytes", lambda: 2**20)
    ran = motley(*arguments(world, "--cluster", two_cpus(world)))
    assert ran.code == 1 and not launched
    assert "its 2 workers need" in ran.err and "this machine has 0.0 GiB" in ran.err


def test_without_torch_it_says_how_to_get_it(world: World) -> None:
    script = "import sys; sys.modules['torch'] = None; from experiments.cli import run; sys.exit(run())"
    command = [sys.executable, "-c", script, *map(str, arguments(world))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and "motley run needs torch" in ran.stderr and "pip install 'motley[runtime]'" in ran.stderr
    assert ran.stderr.count("\n") == 1


# --- How it fails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [2, 3])
def test_a_run_that_fails_is_told_in_one_line_with_its_code(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise RunFailed("the worker of box/1 (rank 1) ended with exit code 9\nin step 2", code)

    monkeypatch.setattr(launch, "launch_locally", fail)
    ran = motley(*arguments(world, "--json", world.folder / "run.json"))
    assert ran.code == code and ran.out == ""
    assert ran.err == "motley: error: the worker of box/1 (rank 1) ended with exit code 9 in step 2\n"
    assert not (world.folder / "run.json").exists()


@pytest.mark.parametrize(
    ("signal", "code", "words"),
    [(KeyboardInterrupt(), 130, "interrupted"), (SystemExit(143), 143, "told to end")],  # Ctrl-C, and SIGTERM
)
def test_a_signal_ends_a_run_with_its_code(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch, signal: BaseException, code: int, words: str
) -> None:
    def end(*_: object) -> None:
        raise signal

    monkeypatch.setattr(launch, "launch_locally", end)
    ran = motley(*arguments(world))
    assert ran.code == code and ran.out == ""
    assert ran.err == f"motley: {words}: the run did not come to its end, and no report was written\n"


# --- Several nodes ---------------------------------------------------------------------------------------------------


def test_the_launch_lines_of_all_nodes_are_printed_and_nothing_is_started(
    motley: Motley, world: World, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine_bytes", lambda: 0)  # the memory of this machine is not what counts
    plan = world.write("two.json", TINY_PLAN.replace("box/0", "left/0").replace("box/1", "right/0"))
    ran = motley(*arguments(world, "--print-launch", "--address", "left.example", "--learning-rate", 0.5, plan=plan))
    assert ran.code == 0 and not launched
    lines = ran.out.splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# on left", "# on right"]
    commands = [line for line in lines if line.startswith("torchrun ")]
    assert len(commands) == 2
    for command in commands:
        assert "left.example" in command and plan in command and "--learning-rate 0.5" in command


# --- Paced devices and testbeds --------------------------------------------------------------------------------------


def test_paced_devices_take_their_time_from_the_cluster(motley: Motley, world: World, launched: list[Any]) -> None:
    ran = motley(*arguments(world, "--devices", "paced", "--cluster", two_cpus(world)))
    assert ran.code == 0, ran.err
    assert launched[0][2].pace is not None and launched[0][2].pace.name == "pace.json"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--devices", "paced"), "paced devices are those of a cluster"),
        (("--devices", "fast"), "--devices is real or paced, but got 'fast'"),
        (("--pace", "pace.json"), "--pace is of paced devices"),
        (("--testbed", "nowhere"), "there is no testbed 'nowhere'"),
    ],
)
def test_what_cannot_be_paced_is_told(motley: Motley, world: World, words: tuple[str, ...], complaint: str) -> None:
    ran = motley(*arguments(world, *words))
    assert ran.code == 2 and complaint in ran.err and ran.err.count("\n") == 1
