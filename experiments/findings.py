"""What folders of results hold, read into one list of runs: rows of sweeps and comparisons, reports, plans and traces.

What belongs together is put together: a row and its plan, a trace and the run of the same plan, a measured and a simulated trace
of one plan, a report and the trace with the same peaks of memory. Nothing is taken for granted of a row but its version: whatever
columns it has are kept.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from experiments.journal import CSV, JOURNAL, PARQUET
from experiments.judges import SIMULATE
from experiments.machine import allocated_bytes, with_measured_peaks
from experiments.sweep_files import with_bandwidth
from partition.objective import MEASURED_IN
from sim.cost.feasibility import infeasible
from sim.cost.memory import peak_bytes
from sim.engine import simulate
from sim.metrics import LinkLoad, Report, lane_use, report
from sim.spec.cluster import Cluster, parse_cluster, read_cluster
from sim.spec.gpu import is_cpu
from sim.spec.plan import Plan, parse_plan
from sim.spec.reading import InputError, parse_json, read_text, read_yaml
from sim.spec.stack import stack, stacks
from sim.spec.trace import Trace, parse_trace
from sim.spec.version import VERSION

if TYPE_CHECKING:
    from runtime.results import RunResult  # it would import torch

ENDINGS = (".csv", ".parquet", ".json", ".jsonl", ".yaml", ".yml")
"""Of files that are looked into."""

EXPECTED = "results.csv or .parquet of motley sweep or compare, or reports, plans and traces (.json) of plan, simulate or run"

UNFINISHED = "unfinished"
"""The folder in which `compare` keeps what is not complete; nothing there is a result yet."""

MEASURES = (
    "iteration_s",
    "tokens_per_s",
    "mfu",
    "mfu_used",
    "hfu",
    "bubble",
    "energy_j",
    "dollars",
    "wall_s",
)
"""The numbers of a report that a row has too."""

OF_SEARCH: Mapping[str, str] = {
    **{key: key for key in ("planner", "judge", "seed", "budget_s", "objective", "judged", "stopped", "stands_in")},
    "seconds": "search_s",
    **{key: key for key in ("dollars_per_billion_tokens", "joules_per_token")},
}
"""What a report tells of a search, and the columns of a row that say the same."""

OF_SPREAD: Mapping[str, str] = {
    **{key: key for key in ("jitter", "seed", "middle_seed", "least_s", "most_s")},
    "count": "repeats",
}
"""What a report tells of iterations on devices whose speeds differ, and the columns of a row that say the same."""

SIMULATED, MEASURED = "simulated", "measured"


@dataclass
class Run:
    """One run: its flat row, and what more is known of it. Fractions, seconds and bytes, as in the files."""

    name: str
    """The file it was read from."""
    row: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    cluster: Cluster | None = None
    """None where no file of it was found."""
    ran_on: Cluster | None = None
    """Of a measured run, the cluster that its trace tells, with the peaks that it measured."""
    traces: dict[str, Trace] = field(default_factory=dict)
    """At most one simulated, and one measured (or paced)."""
    peaks: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """Peak bytes by device, simulated and measured."""
    links: Sequence[LinkLoad] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    """The whole report, where one was read."""
    simulated_here: bool = False
    """Whether the simulated trace was made for the page, and not read."""

    @property
    def simulated(self) -> Mapping[str, Any]:
        """The simulated report of a measured run; empty where there is none."""
        return self.told.get(SIMULATED) or {}

    @property
    def outcome(self) -> str:
        """'ok', 'infeasible', 'refused', 'failed', or 'not judged' for a plan alone."""
        for key, name in (("error", "failed"), ("refusal", "refused"), ("infeasible", "infeasible")):
            if self.row.get(key) not in (None, "", False):
                return name
        return "ok" if self.row.get("iteration_s") is not None else "not judged"

    @property
    def why_not(self) -> str:
        """Why it has no result; empty where it has one."""
        return str(next((self.row[key] for key in ("error", "refusal", "infeasible") if self.row.get(key)), ""))

    @property
    def closer(self) -> bool:
        """Whether there is more to show than its row."""
        return bool(self.plan or self.traces or self.peaks or self.links)


@dataclass(frozen=True)
class Findings:
    """All that was found: runs, the histories of searches, validations by file, and the files that told nothing."""

    runs: Sequence[Run]
    history: Sequence[Mapping[str, Any]] = ()
    validations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    read: Sequence[Path] = ()
    passed_over: Sequence[Path] = ()


def findings(paths: Sequence[Path], clusters: Sequence[Cluster] = ()) -> Findings:
    """What the files and folders hold; `clusters` go before those whose files lie there, where they have one name.

    In a folder, files that are nothing of Motley's are passed over; one that is named must be something. Raises InputError for
    those, for damaged files and for results of another version, and where there is nothing at all.
    """
    given = {cluster.name: cluster for cluster in clusters}
    found = _Reader(given, frozenset(given), frozenset(path.resolve() for path in paths))
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: does not exist; expected a folder or file with {EXPECTED}")
        told = False
        for file in _files(path):
            if found.take(file):
                told = True
                if file not in found.read:
                    found.read.append(file)
            elif not path.is_dir():
                raise InputError(f"{path}: is nothing that a report can tell of; expected {EXPECTED}")
            else:
                found.passed_over.append(file)
        if not told:
            raise InputError(f"{path}: holds nothing that a report can tell of; expected {EXPECTED}")
    runs = found.joined()
    if not runs and not found.validations:
        raise InputError(f"{', '.join(map(str, paths))}: there is no run to tell of; expected {EXPECTED}")
    return Findings(runs, found.history, found.validations, found.read, found.passed_over)


def simulate_missing(runs: Iterable[Run], most: int, done: Callable[[], object] | None = None) -> list[str]:
    """Why some could not be simulated; simulates those of the first `most` runs whose plan and cluster are known, and no trace.

    A simulation that does not take as long as the run's row or report says is of another cluster, and left out. Peaks of memory,
    which take no simulation, are computed for all runs that have none. `done` is called after each run.
    """
    others_s, refused = dict[tuple[str, str], list[tuple[float, float]]](), dict[str, list[str]]()
    for i, run in enumerate(runs):
        if run.plan is not None and run.cluster is not None:
            try:
                if run.outcome == "not judged" and (reason := infeasible(run.plan, run.cluster)) is not None:
                    run.row["infeasible"] = reason.message
                if not run.peaks:
                    run.peaks[SIMULATED] = peak_bytes(run.plan, run.cluster)
                missing = i < most and SIMULATED not in run.traces and run.outcome in ("ok", "not judged")
                if missing and (other_s := _simulate(run, run.plan, run.cluster)) is not None:
                    others_s.setdefault((run.name, run.cluster.name), []).append(other_s)
            except InputError as error:
                refused.setdefault(str(error), []).append(run.name)
        if done is not None:
            done()
    remarks = []
    for (name, cluster), apart in others_s.items():
        (simulated_s, told_s), count = apart[0], len(apart)
        whose = "its timeline is not told" if count == 1 else f"the timelines of {count} runs are not told"
        which = "iteration takes" if count == 1 else "iterations take other times: the first one"
        remarks.append(
            f"{name}: {whose}, because on the cluster {cluster!r} that is known here the simulated {which} {simulated_s:.4g} s, "
            f"and not {told_s:.4g} s"
        )
    for why, names in refused.items():
        others = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        remarks.append(f"{names[0]}{others} not simulated: {why}")
    return remarks


def _simulate(run: Run, plan: Plan, cluster: Cluster) -> tuple[float, float] | None:
    """None, and the run has a simulated trace; or the seconds of the iteration here and as they are told, which differ."""
    measured = MEASURED in run.traces or bool(run.told.get("losses"))
    told_s = run.simulated.get("iteration_s") if measured else run.row.get("iteration_s")
    exact = bool(run.simulated) or (not measured and run.row.get("judge", SIMULATE) == SIMULATE and not run.told)
    where = _as_it_ran(run, plan, cluster) if measured else cluster
    jitter, seed = (0.0, 0) if measured else _drawn(run)
    trace = simulate(plan, where, seed, jitter)
    if exact and told_s is not None and not math.isclose(trace.iteration_s, told_s, rel_tol=1e-6):
        return trace.iteration_s, told_s
    run.traces[SIMULATED], run.simulated_here = trace, True
    if not measured:
        _fill(run, report(trace, where))
    else:
        paced = MEASURED in run.traces and run.traces[MEASURED].origin == "paced"
        on_cpus = paced or bool(run.told.get("peak_measured")) or is_cpu(where.device(plan.devices[0]).gpu)
        run.peaks.setdefault(SIMULATED, allocated_bytes(plan, "cpu" if on_cpus else "cuda"))  # what a run can measure
        run.links = run.links or report(trace, where).links
    return None


def _drawn(run: Run) -> tuple[float, int]:
    """How far the speeds of its devices differ, as its row tells, and the seed they were drawn with: of several runs, that of the
    one in the middle. Raises InputError where the row does not tell it."""
    jitter = run.row.get("jitter")
    if not jitter:
        return 0.0, 0
    seed = run.row.get("middle_seed", run.row.get("seed"))
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 < jitter <= 1:
        raise InputError(f"its jitter is {jitter!r}; expected a number between 0 and 1")
    if isinstance(seed, bool) or not isinstance(seed, int | float) or seed < 0 or not float(seed).is_integer():
        raise InputError(f"its jitter was drawn with the seed {seed!r}; expected a whole number of at least 0")
    return jitter, int(seed)


def _as_it_ran(run: Run, plan: Plan, cluster: Cluster) -> Cluster:
    """The cluster with the peaks that the run measured, if it ran on CPUs: as `motley run` simulates it."""
    if cluster == run.ran_on:
        return cluster
    if not run.told.get("peak_measured") or not all(is_cpu(cluster.device(name).gpu) for name in plan.devices):
        return cluster
    told = SimpleNamespace(peak_flop_per_s=run.told["peak_flop_per_s"], device_kinds=run.told["device_kinds"])
    return with_measured_peaks(cluster, plan, cast("RunResult", told))


def _files(path: Path) -> Iterator[Path]:
    """The file, or those below the folder that may tell something, in a fixed order."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        hidden = UNFINISHED in parts[:-1] or any(part.startswith(".") for part in parts)
        if file.suffix.lower() in ENDINGS and file.is_file() and not hidden:
            yield file


# --- Reading ---------------------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Takes file after file, and joins at the end what belongs together."""

    clusters: dict[str, Cluster]
    given: frozenset[str]
    """Names of clusters that the caller has given."""
    named: frozenset[Path] = frozenset()
    """The files and folders that the caller has named."""
    taken: set[Path] = field(default_factory=set)
    rows: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    plans: dict[Path, Plan] = field(default_factory=dict)
    traces: list[tuple[Path, Trace]] = field(default_factory=list)
    reports: list[tuple[Path, Mapping[str, Any]]] = field(default_factory=list)
    history: list[Mapping[str, Any]] = field(default_factory=list)
    validations: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    read: list[Path] = field(default_factory=list)
    passed_over: list[Path] = field(default_factory=list)

    def take(self, path: Path) -> bool:
        """Whether the file is one of Motley's; keeps what it holds, once."""
        if path.resolve() in self.taken:
            return True
        if taken := self._take(path):
            self.taken.add(path.resolve())
        return taken

    def _take(self, path: Path) -> bool:
        ending = path.suffix.lower()
        if ending == ".csv":
            return self._take_rows(path, _csv_rows(path))
        if ending == ".parquet":
            # A sweep writes the same rows twice, and the text is read by everybody.
            return self._stands_in(path, path.with_suffix(".csv").name) or self._take_rows(path, _parquet_rows(path))
        if ending == ".json":
            return self._take_json(path)
        if ending == ".jsonl":
            return self._take_journal(path)
        return ending in (".yaml", ".yml") and self._take_cluster(path)

    def _take_rows(self, path: Path, rows: Sequence[dict[str, Any]]) -> bool:
        keys = set(rows[0]) if rows else set()
        if {"planner", "seconds", "iteration_s"} <= keys:
            for number, row in enumerate(rows, 1):
                if row.get(MEASURED_IN.get(row.get("objective") or "throughput", "objective")) is None:
                    raise InputError(f"{path}: row {number}: has no figure of its objective, {row.get('objective')!r}")
            self.history += rows
            return True
        if "iteration_s" not in keys or not keys & {"planner", "plan", "cluster"}:
            return False
        for number, row in enumerate(rows, 1):
            _check_row(row, f"{path}: row {number}")
            self.rows.append((path, row))
        return True

    def _stands_in(self, path: Path, *others: str) -> bool:
        """Whether one of other files beside this one is read in its place: not where this one is named, and that is not."""
        there = [other.resolve() for name in others if (other := path.with_name(name)).exists()]
        return any(path.resolve() not in self.named or {other, *other.parents} & self.named for other in there)

    def _take_journal(self, path: Path) -> bool:
        """Takes the rows of a sweep that is not finished; of one that is, they stand in its tables too."""
        lines = read_text(path).split("\n")
        if path.name != JOURNAL or not lines[0].startswith('{"format": "motley-sweep/'):
            return False
        if self._stands_in(path, CSV, PARQUET):
            return True
        rows = [parse_json(line, str(path), number) for number, line in enumerate(lines[1:-1], 2)]
        return self._take_rows(path, [row for row in rows if isinstance(row, dict)])

    def _take_json(self, path: Path) -> bool:
        text = read_text(path)
        if '"traceEvents"' in text[:1000]:
            if '"motley"' not in text:
                parse_json(text, str(path))  # which refuses one that was cut off before the place where ours names itself
                return False  # of another program
            self.traces.append((path, parse_trace(text, str(path))))
            return True
        value = parse_json(text, str(path))
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return self._take_rows(path, value)
        if not isinstance(value, dict):
            return False
        if str(value.get("format", "")).startswith("motley-plan/"):
            self.plans[path.resolve()] = parse_plan(text, str(path))
        elif {"iteration_s", "infeasible", "peak_bytes"} <= set(value):
            _check_row(value, str(path))
            self.reports.append((path, value))
        elif {"runs", "sources", "overall"} <= set(value):
            self.validations[str(path)] = value
        else:
            return False
        return True

    def _take_cluster(self, path: Path) -> bool:
        value = read_yaml(path)
        if not isinstance(value, dict) or not {"name", "nodes"} <= set(value):
            return False
        cluster = read_cluster(path)
        if cluster.name in self.given:
            return True
        if self.clusters.setdefault(cluster.name, cluster) != cluster:
            raise InputError(
                f"{path}: another file describes a cluster {cluster.name!r} too, and otherwise; give one by --cluster"
            )
        return True

    # --- Joining -----------------------------------------------------------------------------------------------------

    def joined(self) -> list[Run]:
        """The runs, each with all that belongs to it."""
        runs = [self._run_of_row(path, row) for path, row in self.rows]
        claimed = {id(run.plan) for run in runs if run.plan is not None}
        for path, trace in self.traces:
            self._join_trace(runs, path, trace)
        for path, told in self.reports:
            self._join_report(runs, path, told)
        for path, plan in self.plans.items():
            if id(plan) not in claimed and not any(run.plan == plan for run in runs):
                runs.append(Run(_shown(path), _plan_row(plan), plan))
        jittered = any(run.row.get("jitter") for run in runs)
        for run in runs:
            if not jittered:  # that all devices are equal goes without saying
                run.row.pop("jitter", None)
            elif run.row.get("jitter") is None and run.row.get("origin") == SIMULATED:
                run.row["jitter"] = 0.0
            self._place(run)
        return runs

    def _run_of_row(self, path: Path, row: dict[str, Any]) -> Run:
        """The run of a row, with the plan that it holds or names."""
        run = Run(str(path), row)
        named = row.get("plan")
        if isinstance(named, str) and named.lstrip().startswith("{"):
            run.plan = parse_plan(named, f"{path}: plan")
        elif isinstance(named, str) and named:
            run.plan = self.plans.get((path.parent / named).resolve())
        if run.plan is not None:
            run.row |= {key: value for key, value in _plan_row(run.plan).items() if run.row.get(key) is None}
        if row.get("iteration_s") is not None:
            run.row.setdefault("origin", SIMULATED)
        return run

    def _join_trace(self, runs: list[Run], path: Path, trace: Trace) -> None:
        """Puts a trace to the runs of its plan on its cluster; where there is none, it is a run by itself."""
        side = SIMULATED if trace.origin == SIMULATED else MEASURED
        ran_on = None if trace.ran_on is None else _cluster_of(trace.ran_on, path)
        name = trace.cluster if ran_on is None else ran_on.name
        own = [run for run in runs if run.plan == trace.plan and run.row.get("cluster") in (name, None)]
        open_ones = [run for run in own if side not in run.traces and _may_be_of(run, trace)]
        if not open_ones:
            jitter = {"jitter": trace.jitter} if trace.jitter > 0 else {}
            open_ones = [Run(_shown(path), _plan_row(trace.plan) | {"cluster": name} | jitter, trace.plan)]
            runs.extend(open_ones)
        for run in open_ones:
            run.traces[side] = trace
            run.ran_on = run.ran_on or ran_on
            if trace.peak_bytes:
                run.peaks[side] = trace.peak_bytes

    def _join_report(self, runs: list[Run], path: Path, told: Mapping[str, Any]) -> None:
        """Puts a report to the run whose trace has its peaks of memory, or whose plan beside it has its devices."""
        side = MEASURED if "losses" in told else SIMULATED
        peaks = told["peak_bytes"] or {}
        own = [run for run in runs if peaks and side in run.traces and run.peaks.get(side) == peaks and _near(run, side, told)]
        if not own:
            beside = [plan for place, plan in self.plans.items() if place.parent == path.resolve().parent]
            fitting = [plan for plan in beside if peaks and set(plan.devices) == set(peaks)]
            plan = fitting[0] if len(fitting) == 1 else None
            row = _plan_row(plan) if plan is not None else {}
            own = [Run(_shown(path), row, plan)]
            runs.extend(own)
        for run in own:
            run.row |= {key: told[key] for key in MEASURES if told.get(key) is not None}
            if isinstance(search := told.get("search"), dict):
                run.row |= {column: search[key] for key, column in OF_SEARCH.items() if search.get(key) is not None}
            if isinstance(spread := told.get("repeats"), dict):
                run.row |= {column: spread[key] for key, column in OF_SPREAD.items() if spread.get(key) is not None}
            reason = told["infeasible"]
            run.row["infeasible"] = reason.get("message") if isinstance(reason, dict) else reason
            if told.get("cluster") is not None:
                run.row["cluster"] = told["cluster"]
            run.row["origin"] = side
            if peaks:
                run.peaks[side] = peaks
            if told.get("links"):
                run.links = [LinkLoad(link["name"], link["utilisation"], link["num_bytes"]) for link in told["links"]]
            run.told = told
            if run.simulated.get("peak_bytes"):
                run.peaks.setdefault(SIMULATED, run.simulated["peak_bytes"])

    def _place(self, run: Run) -> None:
        """Gives the run its cluster, if that is known and has its devices, and the measures of its traces."""
        name = run.row.get("cluster")
        if name is None and run.plan is not None:
            name = run.plan.cluster
        cluster = run.ran_on if run.ran_on is not None and run.ran_on.name not in self.given else self.clusters.get(str(name))
        if cluster is not None:
            cluster = _as_in_row(cluster, run)
            known = {device.name for device in cluster.devices}
            used = set(run.plan.devices) if run.plan is not None else set().union(*run.peaks.values())
            run.cluster = cluster if used <= known else None
        trace = run.traces.get(MEASURED) or run.traces.get(SIMULATED)
        if trace is not None:
            run.row.setdefault("origin", trace.origin)
            if run.cluster is not None:
                _fill(run, report(trace, run.cluster))
            else:
                _fill_alone(run, trace)


def _cluster_of(text: str, path: Path) -> Cluster | None:
    """The cluster that the trace of a file tells; None where that cannot be read, as where a bandwidth matrix is elsewhere."""
    try:
        return parse_cluster(text, path)
    except InputError:
        return None


def _as_in_row(cluster: Cluster, run: Run) -> Cluster:
    """The cluster with the stack and the bandwidth that a sweep's row says it had."""
    if isinstance(name := run.row.get("stack"), str) and name != cluster.stack.name and name in stacks():
        cluster = replace(cluster, stack=stack(name))
    if isinstance(rate := run.row.get("bandwidth"), str):
        with contextlib.suppress(InputError):  # a label of that name which means something else
            cluster = with_bandwidth(cluster, rate)
    return cluster


def _near(run: Run, side: str, told: Mapping[str, Any]) -> bool:
    """Whether a run's trace may be of the report: of a simulation to the last bit, of a run, where it is a median, about."""
    told_s, trace_s = told["iteration_s"], run.traces[side].iteration_s
    return told_s is not None and (0.5 < trace_s / told_s < 2 if side == MEASURED else trace_s == told_s)


def _may_be_of(run: Run, trace: Trace) -> bool:
    """Whether a trace may be of the run of a row: one that is simulated takes as long as a row says that was simulated."""
    told_s = run.row.get("iteration_s")
    if trace.origin != SIMULATED or told_s is None or run.row.get("judge", SIMULATE) != SIMULATE:
        return True
    return MEASURED in run.traces or math.isclose(trace.iteration_s, told_s, rel_tol=1e-6)


def _fill(run: Run, told: Report) -> None:
    """Nothing; puts the measures of a report into the row, where it has none yet, and the links."""
    for key in MEASURES:
        value = getattr(told, key)
        if run.row.get(key) is None and value is not None and key != "wall_s":
            run.row[key] = value
    if not run.links:
        run.links = told.links


def _fill_alone(run: Run, trace: Trace) -> None:
    """Nothing; as `_fill`, with what a trace tells where its cluster is not known."""
    plan, lanes = trace.plan, lane_use(trace)
    busy_s = sum(busy for busy, _, _ in lanes.values())
    measures = {
        "iteration_s": trace.iteration_s,
        "tokens_per_s": plan.global_batch * plan.sequence_length / trace.iteration_s,
        "bubble": 1 - busy_s / (len(lanes) * trace.iteration_s) if lanes else None,
    }
    for key, value in measures.items():
        if run.row.get(key) is None:
            run.row[key] = value
    if not run.links:
        run.links = [
            LinkLoad(link.name, link.num_bytes / (link.capacity_bytes_per_s * trace.iteration_s), link.num_bytes)
            for link in trace.links
        ]


def _plan_row(plan: Plan) -> dict[str, Any]:
    """The inputs that a plan tells, as columns of a row; some only where they are not as usual."""
    unusual = {
        "sequence_parallel": True if plan.sequence_parallel else None,
        "context_parallel": plan.context_parallel if plan.context_parallel > 1 else None,
        "expert_parallel": plan.expert_parallel if plan.expert_parallel > 1 else None,
        "expert_tensor_parallel": plan.expert_tensor_parallel,
        "sequence_slices": plan.sequence_slices if plan.sequence_slices > 1 else None,
        "offload_optimizer": True if plan.offload_optimizer else None,
        "gradient_precision": plan.gradient_precision if plan.gradient_precision != "fp32" else None,
    }
    return {
        "cluster": plan.cluster,
        "model": plan.transformer.name,
        "sequence_length": plan.sequence_length,
        "global_batch": plan.global_batch,
        "precision": plan.precision,
        "schedule": plan.schedule,
        "zero_stage": plan.zero_stage,
        **{key: value for key, value in unusual.items() if value is not None},
    }


def _shown(path: Path) -> str:
    """The path as it is told: from here, where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


# --- Rows ------------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, with numbers where cells are numbers and None where they are empty."""
    reader = csv.reader(io.StringIO(read_text(path)))
    try:
        lines = [line for line in reader if line]
    except csv.Error as error:
        raise InputError(f"{path}: is no CSV file ({error})") from None
    if not lines:
        return []
    rows = []
    for number, line in enumerate(lines[1:], 1):
        if len(line) != len(lines[0]):
            raise InputError(f"{path}: row {number} has {len(line)} cells, but the first line names {len(lines[0])} columns")
        rows.append(dict(zip(lines[0], map(_value, line), strict=True)))
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file, with None for what is missing."""
    try:
        import pandas

        table = pandas.read_parquet(path)
    except ImportError as error:
        raise InputError(f"{path}: a Parquet file needs pyarrow ({' '.join(str(error).split())})") from None
    except Exception as error:  # each library has its own
        raise InputError(f"{path}: is no Parquet file ({' '.join(str(error).split())})") from None
    return [{str(key): _plain(value) for key, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """A value as CSV has it: no NaN, no numpy types."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(text: str) -> Any:
    """What a cell of a CSV file says."""
    if text == "":
        return None
    if text in ("True", "False"):
        return text == "True"
    for convert in (int, float):
        try:
            value = convert(text)
        except ValueError:
            continue
        if "_" in text or not math.isfinite(value):  # Python's own way to write numbers, and not anyone else's
            break
        return value
    return text


def _check_row(row: Mapping[str, Any], where: str) -> None:
    """Nothing. Raises InputError for results of another version, and for measures that are no numbers."""
    version = row.get("version")
    if version is not None and str(version) != VERSION:
        raise InputError(
            f"{where} was written by motley {version}, but this is motley {VERSION}, which tells of its own results only; "
            "run it again, or report with that version"
        )
    for key in MEASURES:
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise InputError(f"{where}: {key} is a number, but got {json.dumps(value, default=str)[:80]}")
