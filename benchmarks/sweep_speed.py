"""Measures how long a sweep of 500 runs on 32 GPUs takes.

    python benchmarks/sweep_speed.py            # to benchmarks/results/sweep-speed.txt
    python benchmarks/sweep_speed.py --quick    # without the searches, which take minutes

Each line is the command `motley sweep` as a user calls it, in a new process and folder: the 500 given plans of
examples/sweeps/500-plans.yaml (some of which do not fit), 500 plans drawn as a search draws them (all fit, no two are alike), the
same once more when all is finished, and 500 searches of one second. CPU seconds are of all its processes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from estimate_speed import drawn_plans
from run import CLUSTERS, HERE, machine

from sim.cost.feasibility import infeasible
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer

EXAMPLE = HERE.parent / "examples" / "sweeps" / "500-plans.yaml"
CLUSTER = CLUSTERS / "hexiscale-mixed-b.yaml"
COUNT = 500
TWO = 2
"""Processes of the parallel runs."""


def timed(sweep: Path, out: Path, *options: str) -> tuple[float, float]:
    """Wall seconds and CPU seconds of one call of `motley sweep`. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "experiments", "sweep", str(sweep), "--out", str(out), *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=HERE.parent, check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def drawn_sweep(folder: Path) -> Path:
    """The file of a sweep of COUNT plans that fit, no two alike, in the folder."""
    cluster = read_cluster(CLUSTER)
    plans = drawn_plans(cluster, Job(transformer("llama-2-7b"), 2048, 64))
    for i, plan in enumerate(islice((plan for plan in plans if infeasible(plan, cluster) is None), COUNT)):
        (folder / f"{i:03d}.json").write_text(plan.to_json())
    return written(folder, f"clusters: [{CLUSTER}]\nplans: ['*.json']\n")


def search_sweep(folder: Path) -> Path:
    """The file of a sweep of COUNT searches, in the folder."""
    grid = "models: [llama-2-7b]\nsequence_lengths: [1024, 2048]\nglobal_batches: [32, 64]\n"
    grid += "planners: [motley, flashflex, metis, megatron, random]\n"
    return written(folder, f"clusters: [{CLUSTER}]\n{grid}seeds: {list(range(COUNT // 20))}\n")


def written(folder: Path, text: str) -> Path:
    """The path of a sweep's file with this text."""
    (folder / "sweep.yaml").write_text(text)
    return folder / "sweep.yaml"


def lines(folder: Path, quick: bool) -> Iterator[str]:
    """The table, line by line."""
    yield f"{'sweep of 500 runs, 32 GPUs':38s} {'processes':>9s} {'wall s':>9s} {'CPU s':>9s} {'faster':>9s}"
    drawn = folder / "drawn"
    drawn.mkdir()
    for name, sweep in (("examples/sweeps/500-plans.yaml", EXAMPLE), ("plans drawn, all fit", drawn_sweep(drawn))):
        alone_s = 0.0
        for processes in (1, TWO):
            out = folder / f"{sweep.parent.name}-{processes}"
            wall_s, cpu_s = timed(sweep, out, "--processes", str(processes))
            alone_s = alone_s or wall_s
            faster = "" if processes == 1 else f"{alone_s / wall_s:9.2f}"
            yield f"{name:38s} {processes:9d} {wall_s:9.1f} {cpu_s:9.1f} {faster}"
        wall_s, cpu_s = timed(sweep, out, "--processes", str(TWO))
        yield f"{'  once more, all finished':38s} {TWO:9d} {wall_s:9.1f} {cpu_s:9.1f}"
    if not quick:
        searches = folder / "searches"
        searches.mkdir()
        wall_s, cpu_s = timed(search_sweep(searches), folder / "searched", "--budget", "1s", "--processes", str(TWO))
        yield f"{'searches of --budget 1s':38s} {TWO:9d} {wall_s:9.1f} {cpu_s:9.1f}"


def main() -> None:
    """Writes the table."""
    quick = "--quick" in sys.argv[1:]
    os.environ["PYTHONPATH"] = str(HERE.parent)
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(Path(folder), quick):
            print(line, flush=True)
            found.append(line.rstrip())
    if not quick:
        (HERE / "results" / "sweep-speed.txt").write_text(f"{machine()}\n\n" + "\n".join(found) + "\n")


if __name__ == "__main__":
    main()
