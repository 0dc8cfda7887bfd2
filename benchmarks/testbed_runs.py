"""Runs many plans on the two-sites testbed at the pace of devices that nobody has told the simulator of, and leaves their traces.

    python benchmarks/testbed_runs.py --out results/testbed-runs [--plans 8] [--repeats 2] [--steps 7]

Every device's seconds are the simulator's, times a factor of the device and one of its kind, drawn by the seed: what a
calibration is to find. They go to `hidden.json` there, which is for judging a calibration and not for it. Of each plan and
repeat stays a trace, `traces/NAME.REPEAT.json`, and its steps' times, `results/NAME.REPEAT.json`; `table.md` and `table.json`
tell the measured iteration, how far the repeats are apart, and the share of the simulated iteration in which its busiest device
communicates. What is there already is kept. The testbed is set up, and removed at the end, unless it is up already. Needs root,
or a user namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from forked import forked_worker

from experiments.pacing import pace, write_pace
from runtime import testbed
from runtime.settings import Settings
from runtime.testbed import Testbed
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.pace import PACED, pace_key
from sim.spec.plan import Plan, parse_plan
from sim.spec.reading import write_file
from sim.spec.trace import trace_json

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "testbeds" / "two-sites.yaml"
FACTOR = (0.8, 1.25)
MODEL = {"name": "tiny", "hidden": 32, "ffn": 128, "heads": 4, "vocab": 256}

# --- Plans -----------------------------------------------------------------------------------------------------------

Stages = Sequence[tuple[str, int]]
"""Of a pipeline: the devices of each stage, short (L for large, S for small, node, index), and its number of layers."""


def plan(pipelines: Sequence[tuple[Stages, int, int]], layers: int = 8, **more: Any) -> Plan:
    """A plan of pipelines, each with its micro-batch and the number of its micro-batches, for a model of so many layers."""
    made = []
    for stages, size, count in pipelines:
        start, told = 0, []
        for devices, held in stages:
            told.append({"devices": [_device(word) for word in devices.split()], "layers": [start, start + held]})
            start += held
        made.append({"micro_batch": size, "micro_batches": count, "stages": told})
    table: dict[str, Any] = {
        "format": "motley-plan/1",
        "cluster": "two-sites",
        "model": MODEL | {"layers": layers},
        "sequence_length": 128,
        "global_batch": sum(size * count for _, size, count in pipelines),
        "precision": "fp32",
        "schedule": "1f1b",
        "pipelines": made,
    }
    return parse_plan(json.dumps(table | more))


def _device(word: str) -> str:
    return f"{'large' if word[0] == 'L' else 'small'}-{word[1]}/{word[2]}"


def plans() -> dict[str, Plan]:
    """The plans by name: symmetric and not, of all devices and of some, of many degrees and of several schedules."""
    four = [("L00", 3), ("L10", 3), ("S00", 1), ("S10", 1)]
    other = [("L01", 3), ("L11", 3), ("S01", 1), ("S11", 1)]
    wide = [("L00 L01", 3), ("L10 L11", 3), ("S00 S01", 1), ("S10 S11", 1)]
    near = [("L00", 4), ("L10", 4)]
    next_to = [("L01", 4), ("L11", 4)]
    far = [("S00", 4), ("S10", 4)]
    farther = [("S01", 4), ("S11", 4)]
    beside = ([("L00", 1), ("L01", 1)], 2, 4)
    contended: dict[str, Any] = {"layers": 2, "schedule": "gpipe", "zero_stage": 0}
    made: dict[str, Plan] = {
        "two-pipelines": plan([(four, 4, 3), (other, 4, 3)]),
        "two-pipelines-gpipe": plan([(four, 4, 3), (other, 4, 3)], schedule="gpipe"),
        "two-pipelines-zero-0": plan([(four, 4, 3), (other, 4, 3)], zero_stage=0),
        "two-pipelines-small-batches": plan([(four, 2, 6), (other, 2, 6)]),
        "tensor-2": plan([(wide, 4, 6)]),
        "tensor-2-gpipe": plan([(wide, 4, 4)], schedule="gpipe"),
        "tensor-2-sequence-parallel": plan([(wide, 4, 6)], sequence_parallel=True),
        "tensor-2-small-batches": plan([(wide, 2, 8)]),
        "four-pipelines": plan([(near, 4, 2), (next_to, 4, 2), (far, 4, 1), (farther, 4, 1)]),
        "four-pipelines-zero-0": plan([(near, 4, 2), (next_to, 4, 2), (far, 4, 1), (farther, 4, 1)], zero_stage=0),
        "four-pipelines-uneven": plan([(near, 4, 3), (next_to, 4, 3), (far, 2, 2), (farther, 2, 2)]),
        "large-alone": plan([(near, 4, 3), (next_to, 4, 3)]),
        "large-alone-gpipe": plan([(near, 4, 3), (next_to, 4, 3)], schedule="gpipe"),
        "large-tensor": plan([([("L00 L01", 4), ("L10 L11", 4)], 4, 4)]),
        "small-alone": plan([(far, 4, 2), (farther, 4, 2)]),
        "mixed-degrees": plan([([("L00 L01", 8)], 4, 3), ([("L10", 3), ("L11", 3), ("S00 S01", 2)], 4, 3)]),
        "mixed-degrees-three": plan(
            [([("L00 L01", 8)], 4, 3), ([("L10", 5), ("L11", 3)], 4, 3), ([("S00 S01", 4), ("S10 S11", 4)], 4, 2)]
        ),
        "one-long": plan([([("L00", 2), ("L01", 1), ("L10", 1), ("L11", 1), ("S00", 1), ("S01", 1), ("S10", 1)], 2, 6)]),
        "one-long-gpipe": plan([([("L00", 2), ("L01", 2), ("L10", 2), ("S00", 1), ("S10", 1)], 4, 4)], schedule="gpipe"),
        "sites-apart": plan([([("L00 L01", 4), ("L10 L11", 4)], 4, 4), ([("S00 S01", 4), ("S10 S11", 4)], 4, 2)]),
        "sites-apart-zero-0": plan(
            [([("L00 L01", 4), ("L10 L11", 4)], 4, 4), ([("S00 S01", 4), ("S10 S11", 4)], 4, 2)], zero_stage=0
        ),
        "no-overlap": plan([(four, 4, 3), (other, 4, 3)], overlap_gradients=False),
        # Two pipelines send their activations by one card, or each by another (and their gradients back). Their stages sum their
        # gradients with the third pipeline's in rings, of which each card carries one, or two.
        "one-uplink": plan([([("S00", 1), ("S10", 1)], 2, 10), ([("S01", 1), ("S11", 1)], 2, 10), beside], **contended),
        "two-uplinks": plan([([("S00", 1), ("S10", 1)], 2, 10), ([("S11", 1), ("S01", 1)], 2, 10), beside], **contended),
        "shared-wide-area": plan([([("L00", 5), ("S00", 3)], 4, 3), ([("L10", 5), ("S10", 3)], 4, 3)], zero_stage=0),
    }
    return made


# --- Factors ---------------------------------------------------------------------------------------------------------


def hidden_factors(cluster: Cluster, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """By which factors the seconds of each device, and of each kind, are not what the simulator takes them to be."""
    rng = np.random.default_rng(seed)
    low, high = np.log(FACTOR)
    kinds = {kind: float(np.exp(rng.uniform(low, high))) for kind in sorted({node.gpu.name for node in cluster.nodes})}
    return {device.name: float(np.exp(rng.uniform(low, high))) for device in cluster.devices}, kinds


def together(cluster: Cluster, devices: Mapping[str, float], kinds: Mapping[str, float]) -> dict[str, float]:
    """The factor of each device in all."""
    return {name: factor * kinds[cluster.device(name).gpu.name] for name, factor in devices.items()}


# --- Runs ------------------------------------------------------------------------------------------------------------


def run(bed: Testbed, path: Path, found: Plan, settings: Settings, port: int, limit_s: float) -> bool:
    """Whether a run ended well."""
    from runtime.launch import nodes_of, ranked_devices

    ranked = ranked_devices(found)
    numbers = {node.name: n for n, node in enumerate(read_cluster(bed.cluster_file).nodes, 1)}
    node, _, index = ranked[0].rpartition("/")
    first = f"10.78.{numbers[node]}.{int(index) + 1}"
    assert nodes_of(found)
    processes = {}
    for rank in range(len(ranked)):
        world = {"MASTER_ADDR": first, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(ranked)), "RANK": str(rank)}
        processes[forked_worker(path, settings, world | {"GLOO_SOCKET_IFNAME": testbed.INTERFACE})] = rank
    well, deadline_s = True, time.monotonic() + limit_s
    while processes:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            processes.pop(process, None)
            well = well and status == 0
        elif time.monotonic() > deadline_s:
            well = False
            for process in processes:
                os.kill(process, 9)
            deadline_s = float("inf")
        else:
            time.sleep(0.02)
    return well


def collect(bed: Testbed, folder: Path, chosen: Mapping[str, Plan], steps: int, repeats: int, seed: int) -> None:
    """Nothing; makes the runs that are not there yet, all plans once before any comes again."""
    import torch

    import runtime.training  # noqa: F401 - once for all workers
    from runtime.results import read_result

    torch.set_num_threads(1)
    cluster = read_cluster(bed.cluster_file)
    devices, kinds = hidden_factors(cluster, seed)
    factors = together(cluster, devices, kinds)
    facts = {"seed": seed, "devices": devices, "kinds": kinds, "seconds_multiplied_by": factors}
    write_file(folder / "hidden.json", json.dumps(facts, indent=2) + "\n", replace=True)
    port, began_s = 20_000 + os.getpid() % 20_000, time.monotonic()
    for repeat in range(repeats):
        for name, found in chosen.items():
            trace = folder / "traces" / f"{name}.{repeat}.json"
            if trace.is_file():
                continue
            path, left = folder / "plans" / f"{name}.json", folder / "workers"
            write_file(path, found.to_json(), replace=True)
            paces = write_pace(pace(found, cluster, factors), folder / "paces" / f"{name}.json")
            settings = Settings(
                steps=steps, data=f"text:{ROOT / 'docs'}", pace=paces, testbed=bed.name, results=left, quiet=True, timeout_s=30
            )
            port += 1
            if not run(bed, path, found, settings, port, 120 + steps * 10):
                print(f"{name}: the run failed", file=sys.stderr, flush=True)
                continue
            result = read_result(left)
            steps_s = list(result.step_s)
            write_file(
                folder / "results" / f"{name}.{repeat}.json",
                json.dumps({"iteration_s": result.iteration_s, "step_s": steps_s}) + "\n",
            )
            write_file(trace, trace_json(result.trace))
            shown = " ".join(f"{1e3 * s:.0f}" for s in steps_s)
            print(f"{time.monotonic() - began_s:5.0f} s  {name}: {1e3 * result.iteration_s:.0f} ms ({shown})", flush=True)


# --- The table -------------------------------------------------------------------------------------------------------


def rows(folder: Path, cluster: Cluster, chosen: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """A row for each plan that was run."""
    told = []
    for name, found in chosen.items():
        files = sorted((folder / "results").glob(f"{name}.[0-9]*.json"))
        if not files:
            continue
        runs_s = [json.loads(file.read_text())["iteration_s"] for file in files]
        simulated = report(simulate(found, cluster), cluster, 0.0)
        middle_s = median(runs_s)
        assert simulated.iteration_s is not None
        told.append(
            {
                "plan": name,
                "measured_s": middle_s,
                "runs": len(runs_s),
                "spread": (max(runs_s) - min(runs_s)) / middle_s if len(runs_s) > 1 else None,
                "simulated_s": simulated.iteration_s,
                "communication": max(communication(found, cluster).values()),
            }
        )
    return told


def communication(found: Plan, cluster: Cluster) -> dict[str, float]:
    """Of each device the share of the simulated iteration in which it communicates."""
    trace, paces = simulate(found, cluster), pace(found, cluster).seconds
    told = report(trace, cluster, 0.0)
    assert told.devices is not None
    inside_s = dict.fromkeys(trace.lanes, 0.0)  # collectives of tensor ranks, which stand inside computation
    for span in trace.spans:
        if isinstance(span.instruction, PACED):
            own_s = max(paces[device][pace_key(span.instruction, found.sequence_slices)] for device in trace.lanes[span.lane])
            inside_s[span.lane] += span.end_s - span.start_s - own_s
    return {
        use.device: (use.communication_s + inside_s[use.lane]) / trace.iteration_s for use in told.devices if use.lane is not None
    }


def table(told: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| plan | measured, ms | runs | spread | simulated before calibration | error | communication |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in told:
        error = row["simulated_s"] / row["measured_s"] - 1
        spread = "" if row["spread"] is None else f"{100 * row['spread']:.1f} %"
        lines.append(
            f"| {row['plan']} | {1e3 * row['measured_s']:.0f} | {row['runs']} | {spread} | {1e3 * row['simulated_s']:.0f} ms "
            f"| {100 * error:+.1f} % | {100 * row['communication']:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="Runs plans on the two-sites testbed, and leaves traces and a table.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=int, help="how many, from the first; by default all")
    parser.add_argument("--only", nargs="*", help="the plans of these names")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    folder = asked.out.resolve()
    for part in ("plans", "paces", "traces", "results"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    cluster = read_cluster(CLUSTER)
    chosen = {name: found for name, found in list(plans().items())[: asked.plans] if not asked.only or name in asked.only}
    there = cluster.name in testbed.names()
    bed = testbed.find(cluster.name) if there else testbed.up(CLUSTER)
    try:
        collect(bed, folder, chosen, asked.steps, asked.repeats, asked.seed)
    finally:
        if not there:
            testbed.down(bed.name)
    told = rows(folder, cluster, plans())
    write_file(folder / "table.json", json.dumps(told, indent=1) + "\n", replace=True)
    write_file(folder / "table.md", table(told), replace=True)
    print(table(told))


if __name__ == "__main__":
    main()
