"""Measures what Motley promises about its own speed, and writes it with the machine's description.

    make benchmark            # all of it, to benchmarks/results/

Times are wall seconds on one core, the best of several runs in one process; memory is the peak of a process that does
nothing else.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from partition import plan as search_plan
from sim.engine import simulate
from sim.metrics import report
from sim.simulation import simulation
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.compile import compile_plan
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.transformer import transformer

HERE = Path(__file__).parent
CLUSTERS = HERE.parent / "examples" / "clusters"


def machine() -> str:
    """The machine in one line: processor, cores, memory, Python."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
        memory = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except OSError:
        memory = "memory unknown"
    return f"{model}, {os.cpu_count()} cores, {memory}, {platform.system()}, Python {platform.python_version()}"


def best_of(repeats: int, run: Callable[[], object]) -> float:
    """Wall seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        gc.collect()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def gpt3_plan(data_parallel: int) -> tuple[Cluster, Plan]:
    """GPT-3 175B on data_parallel x 64 A100s, TP 8, PP 8, micro-batch 1, 96 micro-batches, and the cluster of that size."""
    cluster = read_cluster(CLUSTERS / "a100-1024.yaml")
    nodes = tuple(replace(cluster.nodes[0], name=f"a100-{i}") for i in range(8 * data_parallel))
    cluster = replace(cluster, name=f"a100-{64 * data_parallel}", nodes=nodes)
    pipelines = tuple(
        Pipeline(
            micro_batch=1,
            micro_batches=96,
            stages=tuple(
                Stage((Replica(tuple(f"a100-{8 * p + s}/{i}" for i in range(8)), 1),), ((12 * s, 12 * s + 12),), "selective")
                for s in range(8)
            ),
        )
        for p in range(data_parallel)
    )
    return cluster, Plan(cluster.name, "gpt3-175b", 2048, 96 * data_parallel, pipelines, sequence_parallel=True)


def simulate_once(data_parallel: int) -> str:
    """One line of the scaling table, measured in this process."""
    cluster, plan = gpt3_plan(data_parallel)
    instructions = compile_plan(plan).instruction_count
    seconds = best_of(3, lambda: simulate(plan, cluster))
    compiling = best_of(3, lambda: compile_plan(plan))
    judge = simulation(cluster, plan.job())
    judging = best_of(3, lambda: judge(plan))
    trace = simulate(plan, cluster)
    mfu = report(trace, cluster).mfu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{64 * data_parallel:6d} {instructions:13,d} {seconds:12.2f} {judging:9.2f} {compiling:12.2f} "
        f"{instructions / seconds:16,.0f} {peak:10.0f} {trace.iteration_s:13.3f} {100 * (mfu or 0):6.1f}"
    )


def simulation_speed() -> str:
    """The table of how the simulation of GPT-3 175B grows with the number of GPUs, each size in a process of its own."""
    lines = [
        "GPT-3 175B, TP 8, PP 8, micro-batch 1, 96 micro-batches per pipeline, 1F1B, network contention on.",
        "simulate: Plan to Trace of all lanes; judge: Plan to Cost, memory check included; compile: what the simulation of every",
        "lane would compile (of pipelines that behave alike one runs). Best of 3; one core.",
        "",
        "  GPUs  instructions   simulate s   judge s  (compile s)   instructions/s   peak MiB   iteration s  MFU %",
    ]
    for data_parallel in (1, 4, 16, 64):
        command = [sys.executable, str(HERE / "run.py"), "--simulate", str(data_parallel)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
        lines.append(done.stdout.rstrip("\n"))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def planning_speed() -> str:
    """The table of how long the planners search on 32 mixed GPUs (mixed-b), until they end by themselves."""
    cluster = read_cluster(CLUSTERS / "hexiscale-mixed-b.yaml")
    lines = [
        f"Planning on {len(cluster.devices)} GPUs ({cluster.name}), sequence 4096, global batch 256, no budget but 60 s.",
        "",
        "planner     model           seconds  plans judged  stopped    iteration s  MFU %",
    ]
    for model in ("llama-2-7b", "llama-2-13b"):
        job = Job(transformer(model), 4096, 256)
        for planner in ("flashflex", "megatron", "random"):
            result = search_plan(cluster, job, planner, budget_s=60.0)
            found = f"{result.cost.iteration_s:11.2f} {100 * result.cost.mfu:6.1f}" if result.cost else "no plan"
            lines.append(f"{planner:11s} {model:14s} {result.seconds:8.2f} {result.judged:13d}  {result.stopped:9s}  {found}")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs all benchmarks and writes their tables."""
    if sys.argv[1:2] == ["--simulate"]:
        print(simulate_once(int(sys.argv[2])))
        return
    from training import interpreter_overhead

    results = HERE / "results"
    results.mkdir(exist_ok=True)
    tables = {"simulation-speed": simulation_speed, "planning-speed": planning_speed, "training-overhead": interpreter_overhead}
    for name, run in tables.items():
        print(f"{name}:", flush=True)
        (results / f"{name}.txt").write_text(f"{machine()}\n\n{run()}")
    print(f"written to {results}")


if __name__ == "__main__":
    main()
