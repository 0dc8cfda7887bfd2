"""The demonstration: our planners on the clusters of FlashFlex/HexiScale, beside the MFU that is reported for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.comparison import Cell, Outcome, compare, row, rows_csv, winner
from experiments.parallel import in_processes
from experiments.pictures import draw_mfu_bars, draw_timeline
from experiments.plots import MfuCell
from experiments.tables import timeline_title
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.reading import InputError, Table, read_own_yaml, write_file
from sim.spec.trace import trace_json
from sim.spec.transformer import transformer

PLANNERS = ("motley", "flashflex", "megatron", "random")
BUDGET_S = 4.0
GLOBAL_BATCH = 256
SEQUENCE_LENGTH = 4096

TRACED = ("mixed-a", "llama-2-13b")
"""The cluster and model whose winning plan's trace is written."""

NOTE = (
    "Published (README of FlashFlex/HexiScale): the GPUs and nodes of each cluster, the model, and the reported MFU. That counts "
    "recomputation, so it is compared with HFU at the same peaks (3080 Ti 56.9, 3090 80, 4090 165.2, A100 312 TFLOP/s). "
    f"Ours, because not published: global batch {GLOBAL_BATCH}, sequence length {SEQUENCE_LENGTH}, 10 Gbit/s between the nodes "
    "of the mixed clusters, 25 Gbit/s between the A100 nodes of the homogeneous ones, bf16. All our figures are simulated."
)


# --- The facts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reported:
    """The MFU that a system reports for a cluster and a model: a fraction that counts recomputation."""

    cluster: str
    model: str
    system: str
    mfu: float

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.cluster}.{self.model}"


@dataclass(frozen=True)
class Facts:
    """What is published: the peaks (FLOP/s) that the reported MFU divides by, and the reports."""

    peak_flop_per_s: Mapping[str, float]
    """By the beginning of a GPU kind's name."""
    reports: tuple[Reported, ...]


@cache
def facts() -> Facts:
    """The facts of `data/hexiscale.yaml`, which also says where they are from."""
    path = Path(__file__).with_name("data") / "hexiscale.yaml"
    table = Table(read_own_yaml(path), path.name)
    peaks = table.table("peak_tflops_assumed")
    reports = tuple(
        Reported(entry.text("cluster"), entry.text("model"), entry.text("system"), entry.number("mfu", maximum=100.0) / 100)
        for entry in table.tables("reported_mfu_percent")
    )
    return Facts({name: peaks.number(name) * 1e12 for name in peaks.keys()}, reports)  # noqa: SIM118


def paper_peaks(cluster: Cluster) -> dict[str, float]:
    """The FLOP/s that the publication takes for the peak of each GPU kind of the cluster, by the kind's full name."""
    kinds = dict.fromkeys(node.gpu.name for node in cluster.nodes)
    published = facts().peak_flop_per_s
    return {kind: peak for kind in kinds for name, peak in published.items() if kind == name or kind.startswith(f"{name}-")}


def cluster_folder() -> Path:
    """The folder of the example clusters: below the current directory, or beside the package. Raises InputError for neither."""
    tried = [Path("examples/clusters"), Path(__file__).resolve().parents[1] / "examples" / "clusters"]
    for folder in tried:
        if (folder / "hexiscale-mixed-a.yaml").is_file():
            return folder
    raise InputError(
        "the demo reads examples/clusters/hexiscale-*.yaml of Motley's repository, but they are neither below the current "
        f"directory nor in {tried[1]}; run it in the root of the repository"
    )


def cells(folder: Path, budget_s: float = BUDGET_S, seed: int = 0) -> list[tuple[Reported, list[Cell]]]:
    """One search of each planner for every reported figure, on the cluster files of the folder. Raises InputError."""
    clusters = {report.cluster: read_cluster(folder / f"hexiscale-{report.cluster}.yaml") for report in facts().reports}
    found = []
    for report_ in facts().reports:
        job = Job(transformer(report_.model), SEQUENCE_LENGTH, GLOBAL_BATCH)
        searches = [Cell(clusters[report_.cluster], job, planner, "simulate", budget_s, seed) for planner in PLANNERS]
        found.append((report_, searches))
    return found


# --- Predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prediction:
    """What is to be predicted from one outcome, and the files to draw and write besides."""

    reported: Reported
    outcome: Outcome
    timeline: Path | None
    trace: Path | None


def _predict(task: _Prediction) -> MfuCell:
    """The predicted beside the reported figure; draws the timeline and writes the trace where they are asked for."""
    reported, outcome = task.reported, task.outcome
    names = (reported.cluster, reported.model, reported.system, reported.mfu, outcome.cell.planner)
    if outcome.plan is None:
        return MfuCell(*names, None, None, outcome.why_not or "")
    cluster = outcome.cell.cluster
    trace = simulate(outcome.plan, cluster, seed=outcome.cell.seed)
    at_paper_peaks = report(trace, cluster, peaks=paper_peaks(cluster))
    at_true_peaks = report(trace, cluster)
    if task.timeline is not None:
        title = f"{timeline_title(outcome.plan, at_true_peaks)}, planned by {outcome.cell.planner}"
        draw_timeline(trace, cluster, task.timeline, title, replace=True)
    if task.trace is not None:
        write_file(task.trace, trace_json(trace), replace=True)
    return MfuCell(*names, at_paper_peaks.hfu, at_true_peaks.mfu)


# --- The run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demonstration:
    """The end of the demonstration: what was searched and predicted, in the order of the facts, and whether all of it was."""

    outcomes: tuple[tuple[Reported, Outcome], ...]
    predictions: tuple[MfuCell, ...]
    interrupted: bool


def run(
    out: Path,
    budget_s: float = BUDGET_S,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
    searches: Sequence[tuple[Reported, list[Cell]]] | None = None,
) -> Demonstration:
    """The demonstration, written into the folder `out`, whose files it replaces.

    plans/CELL.PLANNER.json, timelines/CELL.png of each cell's fastest plan, trace.json of one of them, mfu.png, results.csv.
    Searches and drawings run in parallel processes; `progress` is called after each of either. `searches` takes the
    place of the published cells. Raises InputError where the cluster files are missing or `out` cannot be written.
    """
    chosen = cells(cluster_folder(), budget_s, seed) if searches is None else searches
    flat = [(reported, cell) for reported, entries in chosen for cell in entries]
    outcomes, interrupted = compare([cell for _, cell in flat], progress=progress)
    if interrupted:
        return Demonstration((), (), True)
    pairs = [(reported, outcome) for (reported, _), outcome in zip(flat, outcomes, strict=True)]
    for reported, outcome in pairs:
        if outcome.plan is not None:
            write_file(out / _plan_file(reported, outcome), outcome.plan.to_json(), replace=True)
    tasks = [_prediction(reported, outcome, pairs, out) for reported, outcome in pairs]
    found, interrupted = in_processes(_predict, tasks, progress=progress)
    predictions = [prediction for prediction in found if prediction is not None]
    if not interrupted:
        rows = [_row(*pair, prediction) for pair, prediction in zip(pairs, predictions, strict=True)]
        write_file(out / "results.csv", rows_csv(rows), replace=True)
        draw_mfu_bars(predictions, out / "mfu.png", "Reported and predicted utilisation", NOTE, replace=True)
    return Demonstration(tuple(pairs), tuple(predictions), interrupted)


def _plan_file(reported: Reported, outcome: Outcome) -> str:
    return f"plans/{reported.name}.{outcome.cell.planner}.json"


def _prediction(reported: Reported, outcome: Outcome, pairs: Sequence[tuple[Reported, Outcome]], out: Path) -> _Prediction:
    """The task of one outcome: the fastest of its cell is drawn too."""
    if winner([other for whose, other in pairs if whose == reported]) is not outcome:
        return _Prediction(reported, outcome, None, None)
    traced = (reported.cluster, reported.model) == TRACED
    return _Prediction(reported, outcome, out / "timelines" / f"{reported.name}.png", out / "trace.json" if traced else None)


def _row(reported: Reported, outcome: Outcome, prediction: MfuCell) -> dict[str, Any]:
    """The flat row of one search beside what is reported."""
    published = {"reported_system": reported.system, "reported_mfu": reported.mfu, "reported_counts_recomputation": True}
    plan_file = _plan_file(reported, outcome) if outcome.plan is not None else None
    return {**row(outcome, plan_file), **published, "hfu_at_paper_peaks": prediction.hfu_at_paper_peaks}
