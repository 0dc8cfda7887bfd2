"""A folder of results whose figures are known: forty rows, searches' histories, and a run that was measured and simulated."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sim.engine import simulate
from sim.metrics import report, report_json
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.plan import parse_plan
from sim.spec.trace import Trace, trace_json
from sim.spec.version import VERSION
from tests.experiments.conftest import TINY_CLUSTER, TINY_PLAN

PLANNERS = ("megatron", "flashflex", "amp", "random")


def row(number: int) -> dict[str, Any]:
    """One of forty rows: four planners on two clusters with five seeds each. MFU is 0.10 and 0.01 for each number; three fail."""
    cluster, planner, seed = f"pool-{number // 20}", PLANNERS[number // 5 % 4], number % 5
    found: dict[str, Any] = {
        "cluster": cluster,
        "model": "llama-2-7b",
        "sequence_length": 4096,
        "global_batch": 64,
        "precision": "bf16",
        "planner": planner,
        "judge": "estimate",
        "seed": seed,
        "iteration_s": 100 / (10 + number),
        "tokens_per_s": 64 * 4096 * (10 + number) / 100,
        "mfu": 0.10 + 0.01 * number,
        "hfu": 0.12 + 0.01 * number,
        "bubble": 0.25,
        "peak_bytes": 2**30 * (8 + number),
        "energy_j": 1000.0 + number,
        "dollars": 0.01,
        "search_s": 5.0,
        "infeasible": None,
        "refusal": None,
        "error": None,
        "plan": None,
        "version": VERSION,
    }
    reasons = {
        7: ("infeasible", "box/0 needs 31.2 GiB, but has 24.0 GiB"),
        8: ("infeasible", "box/1 needs 44.9 GiB, but has 24.0 GiB"),
        21: ("error", "ZeroDivisionError: division by zero"),
    }
    if number in reasons:
        key, why = reasons[number]
        lost = ("iteration_s", "tokens_per_s", "mfu", "hfu", "bubble", "peak_bytes", "energy_j", "dollars")
        found |= dict.fromkeys(lost) | {key: why}
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Nothing; writes the rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def traces() -> tuple[Trace, Trace]:
    """A simulated trace of the tiny plan, and a measured one in which everything takes a quarter longer."""
    simulated = simulate(parse_plan(TINY_PLAN), tiny())
    spans = tuple(span._replace(start_s=1.25 * span.start_s, end_s=1.25 * span.end_s) for span in simulated.spans)
    longer = 1.25 * simulated.iteration_s
    return simulated, replace(simulated, origin="measured", spans=spans, iteration_s=longer, links=())


@cache
def tiny() -> Cluster:
    """The tiny cluster."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.yaml"
        path.write_text(TINY_CLUSTER, encoding="utf-8")
        return read_cluster(path)


def write_run(folder: Path) -> None:
    """Nothing; writes the tiny cluster and plan, both traces, and the report of the measured one."""
    simulated, measured = traces()
    cluster = tiny()
    told = json.loads(report_json(report(measured, cluster)))
    told |= {"losses": [5.0, 4.5], "cluster": "tiny", "simulated": json.loads(report_json(report(simulated, cluster)))}
    for name, text in (
        ("tiny.yaml", TINY_CLUSTER),
        ("plan.json", TINY_PLAN),
        ("simulated.json", trace_json(simulated)),
        ("measured.json", trace_json(measured)),
        ("run.json", json.dumps(told)),
    ):
        (folder / name).write_text(text, encoding="utf-8")


def write_results(folder: Path) -> None:
    """Nothing; writes all of it: rows and histories, and the run in a folder below."""
    (folder / "run").mkdir(parents=True)
    write_rows(folder / "results.csv", [row(number) for number in range(40)])
    history = [
        {"cluster": f"pool-{c}", "model": "llama-2-7b", "planner": p, "seed": s, "seconds": t, "iteration_s": 8.0 / (t + s + 1)}
        for c in range(2)
        for p in PLANNERS
        for s in range(2)
        for t in (0.5, 1.0, 2.0)
    ]
    write_rows(folder / "history.csv", history)
    write_run(folder / "run")
