"""Calibrates on half of the plans that ran, and tells how well the other half is predicted.

    python benchmarks/calibration.py --runs results/testbed-runs [--seed 0] [--out benchmarks/results/calibration.txt]
    nice -n -19 python benchmarks/calibration.py --cpu results/cpu-runs [--seed 0] [--out benchmarks/results/calibration.txt]

`--runs` is the folder that benchmarks/testbed_runs.py leaves: paced runs on the two-sites testbed. Its `hidden.json` is read
after the fit, to judge it. `--cpu` measures this machine's CPU with `motley bench`, and trains small models on it, in one process
and in two, each on one thread, before it calibrates on both; what its folder has already is not made again. Each has its own
section of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from run import machine

from experiments.calibration import error_rows, figure, sentences, warnings
from sim.calibrate import Calibrated, calibrate, chosen_fitting, observed
from sim.engine import simulate
from sim.metrics import report
from sim.spec.bench import Bench, read_bench
from sim.spec.cluster import Cluster, cluster_yaml, read_cluster
from sim.spec.plan import Plan, parse_plan
from sim.spec.reading import write_file
from sim.spec.trace import Trace, period_s, read_trace, trace_json

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "testbeds" / "two-sites.yaml"
CPUS = ROOT / "examples" / "clusters" / "cpu-4.yaml"
HEADS = (
    "== Paced devices on the two-sites testbed, hidden factors: benchmarks/calibration.py --runs",
    "== Real computation on CPUs, one and two processes: benchmarks/calibration.py --cpu",
)
"""Of the sections of the file."""

CONTENTION = ("one-uplink", "two-uplinks")
"""Plans that differ only in what shares a link: in the first their messages, in the second the rings of their gradients."""

Stages: TypeAlias = Sequence[tuple[list[str], int, int, str]]
"""Of a pipeline: the devices of each stage, its first layer, the one after its last, and what it recomputes."""


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="Calibrates on half of the plans that ran, and tells of the other half.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--runs", type=Path, help="the folder of runs on the testbed")
    which.add_argument("--cpu", type=Path, help="the folder of runs on CPUs, which are made where they are not there")
    parser.add_argument("--repeats", type=int, default=2, help="of runs on CPUs")
    parser.add_argument("--steps", type=int, default=9, help="of runs on CPUs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    cluster = read_cluster(CPUS if asked.runs is None else CLUSTER)
    benches: list[tuple[str, Bench]] = []
    if asked.runs is None:
        runs = cpu_runs(asked.cpu.resolve(), asked.repeats, asked.steps)
        benches = [("bench", cpu_bench(asked.cpu / "bench.yaml"))]
    else:
        runs = [(path.stem, read_trace(path)) for path in sorted((asked.runs / "traces").glob("*.json"))]
    began_s = time.perf_counter()
    found = calibrate(cluster, runs, benches, holdout=0.5, seed=asked.seed, several_models=True)
    took_s = time.perf_counter() - began_s
    if asked.runs is None:
        judged = [f"one thread for each process; niceness {os.getpriority(os.PRIO_PROCESS, 0)}; with a bench of the CPU"]
    else:
        judged = _judged(runs, cluster, found, asked.runs / "hidden.json", asked.seed)
    lines = [
        f"{len(runs)} {runs[0][1].origin} runs of {len({name.rsplit('.', 1)[0] for name, _ in runs})} plans on {cluster.name}",
        f"{found.how}, drawn with seed {asked.seed}",
        f"{machine()}; the fits took {took_s:.0f} s",
        "",
        f"{'|predicted / measured - 1|':32s}{'before':>26s}{'after':>26s}",
        *(f"{name:32s}{before:>26s}{after:>26s}" for name, before, after in error_rows(found)),
        *sentences(found),
        *warnings(found),
        "",
        *_plans(found),
        "",
        *judged,
        "",
        "constants that the runs tell, fitted on all of them:",
        *(
            f"  {told.name:44s}{figure(told, told.before):>16s}{figure(told, told.after):>16s}"
            for told in found.constants
            if told.told
        ),
        "left as they are: " + ", ".join(told.name for told in found.constants if not told.told),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.out is not None:
        _write_section(asked.out, HEADS[asked.runs is None], text)
        if asked.runs is not None:
            write_file(asked.out.with_suffix(".yaml"), cluster_yaml(found.cluster), replace=True)


def _write_section(path: Path, head: str, text: str) -> None:
    """Nothing; writes a section of a file, and leaves the other as it is."""
    known: dict[str, str] = {}
    for part in re.split(r"^(?=== )", path.read_text() if path.is_file() else "", flags=re.MULTILINE):
        name, _, body = part.partition("\n\n")
        known[name] = body.rstrip() + "\n"
    known[head] = text
    write_file(path, "\n".join(f"{name}\n\n{known[name]}" for name in HEADS if name in known), replace=True)


def _judged(runs: list[tuple[str, Trace]], cluster: Cluster, found: Calibrated, hidden: Path, seed: int) -> list[str]:
    """What else is told of runs on the testbed: how much they communicate, the hidden factors, contention."""
    # The constants of the half alone, which the held-out plans are predicted with.
    out = {name for one in found.predictions for name in one.observation.names}
    kept = [(name, trace) for name, trace in runs if name not in out]
    half = chosen_fitting(cluster, observed(kept, cluster, several_models=True), seed=seed).fit().cluster
    return [
        *_communication(kept + [(name, trace) for name, trace in runs if name in out], cluster),
        "",
        *_hidden(hidden, half, found.cluster),
        "",
        *_contention(runs, cluster, seed),
    ]


def _plans(found: Calibrated) -> list[str]:
    """A line for each plan that was held out."""
    lines = [f"{'held out':32s}{'measured':>12s}{'before':>12s}{'error':>9s}{'after':>12s}{'error':>9s}"]
    for one in sorted(found.predictions, key=lambda one: one.measured_s):
        name = one.observation.names[0].rsplit(".", 1)[0]
        errors = [f"{100 * (seconds / one.measured_s - 1):+.1f} %" for seconds in (one.before_s, one.after_s)]
        lines.append(
            f"{name:32s}{one.measured_s:>10.3f} s{one.before_s:>10.3f} s{errors[0]:>9s}{one.after_s:>10.3f} s{errors[1]:>9s}"
        )
    return lines


def _communication(runs: list[tuple[str, Trace]], cluster: Cluster) -> list[str]:
    """How many of the plans communicate for more than a quarter of their iteration, as measured, on the busiest device."""
    shares: dict[str, list[float]] = {}
    for name, trace in runs:
        devices = report(trace, cluster).devices
        busiest = max(use.communication_s for use in devices if use.lane is not None)
        shares.setdefault(name.rsplit(".", 1)[0], []).append(busiest / trace.iteration_s)
    much = [name for name, some in shares.items() if median(some) > 0.25]
    return [f"{len(much)} of {len(shares)} plans communicate for more than 25 % of the measured iteration (busiest device)"]


def _hidden(path: Path, half: Cluster, whole: Cluster) -> list[str]:
    """How well the factors were recovered that nobody has told the fit of."""
    hidden = json.loads(path.read_text())["seconds_multiplied_by"]
    lines = [f"{'hidden factor of the seconds':32s}{'true':>10s}{'half':>10s}{'error':>9s}{'all':>10s}{'error':>9s}"]
    worst = [0.0, 0.0]
    for name, factor in hidden.items():
        found = [1 / cluster.device(name).gpu.speed for cluster in (half, whole)]
        errors = [one / factor - 1 for one in found]
        worst = [max(w, abs(error)) for w, error in zip(worst, errors, strict=True)]
        shown = "".join(f"{one:>10.3f}{100 * error:>+7.1f} %" for one, error in zip(found, errors, strict=True))
        lines.append(f"{name:32s}{factor:>10.3f}{shown}")
    return [
        *lines,
        f"the largest error of a factor: {100 * worst[0]:.1f} % from half of the plans, {100 * worst[1]:.1f} % from all",
    ]


def _contention(runs: list[tuple[str, Trace]], before: Cluster, seed: int) -> list[str]:
    """By how much a plan that shares a link is slower than its twin, as measured and as predicted by a fit without both."""
    times = {twin: [trace for name, trace in runs if name.rsplit(".", 1)[0] == twin] for twin in CONTENTION}
    if not all(times.values()):
        return ["no runs of plans that differ only in contention"]
    others = [(name, trace) for name, trace in runs if name.rsplit(".", 1)[0] not in CONTENTION]
    apart = chosen_fitting(before, observed(others, before, several_models=True), seed=seed).fit().cluster
    lines = []
    shared, alone = (median(period_s(trace) for trace in times[twin]) for twin in CONTENTION)
    measured = shared / alone
    lines.append(f"contention: {CONTENTION[0]} takes {measured:.3f} times as long as {CONTENTION[1]}, as measured")
    for what, cluster in (("before", before), ("after, by a fit without both", apart)):
        shared, alone = (simulate(times[twin][0].plan, cluster).iteration_s for twin in CONTENTION)
        slower = (shared / alone - 1) / (measured - 1) - 1
        lines.append(
            f"  predicted {what}: {shared / alone:.3f} times ({100 * (shared / alone / measured - 1):+.1f} % of the ratio, "
            f"{100 * slower:+.1f} % of the slow-down)"
        )
    return lines


# --- Real computation on CPUs ------------------------------------------------------------------------------------------


def cpu_plans() -> dict[str, Plan]:
    """Plans of one process and of two, of several shapes of the model, the sequence, the micro-batch, and recomputation."""
    one = ["cpu/0"]
    both = ["cpu/0", "cpu/1"]

    def made(hidden: int, layers: int, length: int, pipelines: Sequence[tuple[int, int, Stages]], **more: Any) -> Plan:
        model = {"name": f"llama-{hidden}-{layers}", "hidden": hidden, "ffn": 11 * hidden // 4, "heads": hidden // 32}
        told = [
            {
                "micro_batch": size,
                "micro_batches": count,
                "stages": [{"devices": names, "layers": [a, b], "recompute": mode} for names, a, b, mode in stages],
            }
            for size, count, stages in pipelines
        ]
        table: dict[str, Any] = {
            "format": "motley-plan/1",
            "cluster": "cpu-4",
            "model": model | {"layers": layers, "vocab": 256},
            "sequence_length": length,
            "global_batch": sum(size * count for size, count, _ in pipelines),
            "precision": "fp32",
            "pipelines": told,
        }
        return parse_plan(json.dumps(table | more))

    def alone(hidden: int, layers: int, length: int, size: int, count: int, mode: str = "none") -> Plan:
        return made(hidden, layers, length, [(size, count, [(one, 0, layers, mode)])])

    def staged(hidden: int, layers: int, cut: int, length: int, size: int, count: int, mode: str = "none", **more: Any) -> Plan:
        stages = [(both[:1], 0, cut, mode), (both[1:], cut, layers, "none")]
        return made(hidden, layers, length, [(size, count, stages)], **more)

    def tensor(hidden: int, layers: int, length: int, size: int, count: int, **more: Any) -> Plan:
        return made(hidden, layers, length, [(size, count, [(both, 0, layers, "none")])], **more)

    def data(hidden: int, layers: int, length: int, sizes: tuple[int, int], count: int, **more: Any) -> Plan:
        pipelines = [(size, count, [([name], 0, layers, "none")]) for size, name in zip(sizes, both, strict=True)]
        return made(hidden, layers, length, pipelines, **more)

    return {
        "one-256-4": alone(256, 4, 256, 4, 2),
        "one-256-8": alone(256, 8, 128, 4, 3),
        "one-256-4-long": alone(256, 4, 1024, 1, 2),
        "one-256-6-small-full": alone(256, 6, 256, 1, 6, "full"),
        "one-384-4-full": alone(384, 4, 256, 2, 3, "full"),
        "one-384-6": alone(384, 6, 128, 2, 4),
        "one-512-4": alone(512, 4, 128, 4, 2),
        "one-512-2-selective": alone(512, 2, 512, 2, 2, "selective"),
        "pipeline-256-8": staged(256, 8, 4, 256, 2, 5),
        "pipeline-384-6-uneven": staged(384, 6, 4, 128, 4, 4),
        "pipeline-512-4-gpipe": staged(512, 4, 2, 128, 4, 3, schedule="gpipe"),
        "pipeline-256-6-full": staged(256, 6, 2, 512, 1, 5, "full"),
        "tensor-256-4": tensor(256, 4, 256, 4, 3),
        "tensor-512-4": tensor(512, 4, 128, 4, 3),
        "tensor-384-4-sequence": tensor(384, 4, 256, 2, 3, sequence_parallel=True),
        "data-256-4": data(256, 4, 256, (4, 4), 2, zero_stage=1),
        "data-384-6": data(384, 6, 128, (4, 4), 2, zero_stage=0),
        "data-512-2-uneven": data(512, 2, 256, (3, 1), 3, zero_stage=1),
    }


def cpu_runs(folder: Path, repeats: int, steps: int) -> list[tuple[str, Trace]]:
    """The traces of the plans' runs, each process on one core; those that the folder does not have are run, all plans once before
    any comes again."""
    from experiments.measured import measured_run
    from runtime.settings import Settings

    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = read_cluster(CPUS)
    settings = Settings(steps=steps, data=f"text:{ROOT / 'docs'}", quiet=True)
    for repeat in range(repeats):
        for name, found in cpu_plans().items():
            path, plan_file = folder / "traces" / f"{name}.{repeat}.json", folder / "plans" / f"{name}.json"
            if path.is_file():
                continue
            write_file(plan_file, found.to_json(), replace=True)
            told = measured_run(plan_file, found, settings, None, cluster)
            write_file(path, trace_json(told.trace))
            shown = " ".join(f"{1e3 * seconds:.0f}" for seconds in told.result.step_s)
            print(f"{name}: {1e3 * told.trace.iteration_s:.0f} ms ({shown})", flush=True)
    return [(path.stem, read_trace(path)) for path in sorted((folder / "traces").glob("*.json"))]


def cpu_bench(path: Path) -> Bench:
    """What `motley bench` measures of this machine's CPU on one thread; what the file has, if there is one."""
    if not path.is_file():
        command = [sys.executable, "-m", "experiments", "bench", "--device", "cpu", "--out", str(path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return read_bench(path)


if __name__ == "__main__":
    main()
