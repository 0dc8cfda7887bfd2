"""Sets planners beside the optimum of small random instances, which the exhaustive planner finds.

    python benchmarks/small_instances.py --planners motley,megatron --count 60 --budget 30

Every row, one search of one planner on one instance, is appended to benchmarks/results/small-instances.csv as soon as it is
known; what is there already is not searched again, so that a run that was stopped goes on where it was. The ratios are those
of the simulated iterations; the optimum is the best of the ten best plans by estimate. A planner can be below 1: it may use
what the exhaustive one leaves out (selective recomputation, larger micro-batches, other schedules and ZeRO stages).
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

import partition
from partition.search import planner_named
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.counts import total_parameters
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.transformer import Transformer

OPTIMUM, LIMIT_S = "exhaustive", 300.0
"""The planner that the others are measured by, and how many seconds it has; without an end in time there is no optimum."""

RESULTS = Path(__file__).parent / "results" / "small-instances.csv"
COLUMNS = ("instance", "cluster", "job", "planner", "budget_s", "iteration_s", "search_s", "judged", "stopped", "infeasible")

KINDS = {
    "RTX3080Ti": "pcie4",
    "RTX3090": "pcie4",
    "RTX4090": "pcie4",
    "A40": "pcie4",
    "L4": "pcie4",
    "A100-40GB-SXM": "nvlink",
    "A100-80GB-SXM": "nvlink",
    "H100-80GB-SXM": "nvlink",
}
"""GPU kinds that instances are made of, with what joins the GPUs of a node."""

NICS_GBIT_PER_S = (10, 25, 100)
MOST_NODE_GPUS = 3
BYTES_PER_PARAMETER = 24
"""Memory that an instance has at the least: 18 of AdamW in mixed precision, and some of activations."""


def instance(number: int) -> tuple[Cluster, Job]:
    """The instance of this number: 2 to 6 GPUs of two kinds or more, a model of 4 to 8 layers, a batch of 8 sequences."""
    rng = np.random.default_rng([5, number])
    while True:
        gpus, layers = int(rng.integers(2, 7)), int(rng.integers(4, 9))
        hidden = int(rng.choice([2048, 3072, 4096]))
        model = Transformer(f"small-{number}", layers, hidden, ffn=hidden * 11 // 4, heads=hidden // 128, vocab=32000)
        kinds: list[str] = []
        nodes: list[tuple[str, int]] = []
        while sum(count for _, count in nodes) < gpus:
            left = gpus - sum(count for _, count in nodes)
            kinds.append(str(rng.choice(list(KINDS))))
            nodes.append((kinds[-1], int(rng.integers(1, min(left, MOST_NODE_GPUS) + 1))))
        memory_bytes = sum(gpu_kind(kind).memory_bytes * count for kind, count in nodes)
        rates = [int(rng.choice(NICS_GBIT_PER_S)) for _ in nodes]
        if len(set(kinds)) > 1 and memory_bytes >= BYTES_PER_PARAMETER * total_parameters(model):
            break
    lines = [f"name: small-{number}", "nodes:"]
    for i, ((kind, count), rate) in enumerate(zip(nodes, rates, strict=True)):
        nic = f"{{kind: ethernet, bandwidth: {rate} Gbit/s}}"
        lines.append(f"  - {{name: n{i}, gpu: {kind}, gpus: {count}, intra: {KINDS[kind]}, nic: {nic}}}")
    lines.append("fabric: {latency: 50 us}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text("\n".join(lines))
        return read_cluster(path), Job(model, 2048, 8)


def searched(number: int, planner: str, budget_s: float) -> dict[str, object]:
    """The row of a planner's search on an instance."""
    cluster, job = instance(number)
    result = partition.plan(cluster, job, planner, budget_s=budget_s)
    nodes = ", ".join(
        f"{node.gpus} {node.gpu.name} at {node.nic.bandwidth_bytes_per_s * 8 / 1e9:g} Gbit/s"
        for node in cluster.nodes
        if node.nic
    )
    return {
        "instance": number,
        "cluster": nodes,
        "job": f"{job.model.layers} layers of {job.model.hidden}",
        "planner": planner,
        "budget_s": budget_s,
        "iteration_s": result.cost.iteration_s if result.cost is not None else "",
        "search_s": round(result.seconds, 3),
        "judged": result.judged,
        "stopped": result.stopped,
        "infeasible": result.infeasible.message if result.infeasible is not None else "",
    }


def known(path: Path) -> dict[tuple[int, str, float], Mapping[str, str]]:
    """The rows of a file of results, by instance, planner and budget; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(int(row["instance"]), row["planner"], float(row["budget_s"])): row for row in csv.DictReader(file)}


def run(numbers: Iterable[int], planners: Iterable[str], budget_s: float, path: Path) -> None:
    """Appends the rows that a file of results lacks, and prints each; Ctrl-C ends it, without the row under way."""
    there = known(path)
    path.parent.mkdir(exist_ok=True)
    for number in numbers:
        for planner, limit_s in [(OPTIMUM, LIMIT_S), *((planner, budget_s) for planner in planners)]:
            if (number, planner, limit_s) in there:
                continue
            row = searched(number, planner, limit_s)
            if row["stopped"] == "interrupted":
                return
            new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)
            print(f"{number:3d} {planner:12s} {row['iteration_s']!s:22s} {row['search_s']:8.2f} s  {row['stopped']}", flush=True)


def table(numbers: Iterable[int], planners: Iterable[str], budget_s: float, path: Path) -> str:
    """How far planners are from the optima that are known: the share within 1 % and within 5 %, and the worst."""
    rows, found = known(path), list(numbers)
    optima = {}
    for number in found:
        row = rows.get((number, OPTIMUM, LIMIT_S))
        if row is not None and row["stopped"] == "finished" and row["iteration_s"]:
            optima[number] = float(row["iteration_s"])
    slowest_s = max((float(row["search_s"]) for key, row in rows.items() if key[1] == OPTIMUM), default=0.0)
    lines = [f"{len(optima)} optima of {len(found)} instances, found in at most {slowest_s:.0f} s each.", ""]
    lines.append("planner       instances  no plan  within 1 %  within 5 %  geometric mean  worst (instance)")
    for planner in planners:
        ratios, without = {}, 0
        for number, optimum_s in optima.items():
            row = rows.get((number, planner, budget_s))
            if row is not None and row["iteration_s"]:
                ratios[number] = float(row["iteration_s"]) / optimum_s
            elif row is not None:
                without += 1
        if not ratios:
            lines.append(f"{planner:12s} {0:10d} {without:8d}")
            continue
        count, values = len(ratios) + without, np.array(list(ratios.values()))
        worst = max(ratios, key=lambda number: ratios[number])
        within = [100 * float((values <= limit).sum()) / count for limit in (1.01, 1.05)]
        lines.append(
            f"{planner:12s} {count:10d} {without:8d} {within[0]:9.1f} % {within[1]:9.1f} % "
            f"{float(np.exp(np.log(values).mean())):15.4f}  {ratios[worst]:.4f} ({worst})"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs what is not known yet, and prints the table of all that is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planners", default="", help="planners to set beside the optimum, parted by commas")
    parser.add_argument("--first", type=int, default=0, help="the first instance (default 0)")
    parser.add_argument("--count", type=int, default=60, help="how many instances (default 60)")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds that each of the planners has (default 30)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    asked = parser.parse_args()
    planners = [name for name in asked.planners.split(",") if name]
    for name in planners:
        planner_named(name)
    numbers = range(asked.first, asked.first + asked.count)
    run(numbers, planners, asked.budget, asked.out)
    print(f"\n{table(numbers, planners, asked.budget, asked.out)}")


if __name__ == "__main__":
    main()
