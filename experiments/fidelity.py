"""Predictions of published runs beside what was measured: a replay of all of them, in parallel processes.

A run is compared in the first figure of its speed that is published (iteration time, else tokens/s, TFLOP/s, MFU, HFU, by the
publication's own counting), and in its peak memory. Runs that cannot be modelled are kept, with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.agreement import (
    MEMORY,
    SPEEDS,
    TIME,
    Comparison,
    FitCheck,
    by_source,
    fit_summary,
    summary,
)
from experiments.assumptions import DATA, read_assumptions
from experiments.constants import Constants
from experiments.judges import ESTIMATE
from experiments.parallel import check_interrupt, in_processes
from experiments.published import Modelled, NotModelled, modelled
from experiments.published_rows import Run
from sim.collector import garbage_collector_paused
from sim.cost.estimate import Estimate
from sim.cost.feasibility import infeasible
from sim.cost.least import least_s
from sim.cost.memory import lane_parts
from sim.cost.network import Network
from sim.metrics import recompute_flop
from sim.spec.cluster import Cluster
from sim.spec.counts import layer_forward_flop, layer_recompute_flop, model_flop, total_parameters
from sim.spec.gpu import PRECISIONS
from sim.spec.judge import Infeasible
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from sim.spec.stack import Stack

PUBLISHED, FAILED = DATA / "published_runs.csv", DATA / "failed_runs.csv"
"""The runs that are shipped: those that were measured, and those that failed."""

OUT_OF_MEMORY = r"\boom\b|out[ _-]?of[ _-]?memory|resource_exhausted|(did|does) ?n[o']t fit"

LARGE_GPUS = 1024
"""Runs on so many GPUs take a second or more each, and go to whichever process is free."""

BYTES = "memory"

SLACK = 1.1
"""A published peak of more than so many times what a device has is a mistake, and not rounding: another unit, or another GPU."""


MOST_APART = 1.5
"""Published speeds of a run whose iterations differ by more than so many times contradict one another. Ways of counting FLOP,
with recomputation or without, make 1.4; of the 1,015 shipped runs that have several speeds, none contradicts itself."""

NEARER = 10.0
"""What is predicted to be more than so many times what is measured is nearer to a hundred times that."""


# --- One run ---------------------------------------------------------------------------------------------------------


def predict(run: Run, constants: Constants | None = None) -> list[Comparison]:
    """The comparisons of one run: its speed and its memory, each where it is published.

    A run that cannot be modelled, or of which nothing is published that could be compared, has one, which says why. Of a run
    whose plan is not published whole, the best of the plans that fit is taken, and its comparisons are marked as assumed.
    """
    quantities = _published(run)
    empty = _comparison(run, quantities[0] if quantities else None)
    if not quantities and not run.bad_cells:
        return [replace(empty, note="nothing to compare is published")]
    world = modelled(run, read_assumptions())
    if isinstance(world, NotModelled):
        return [replace(empty, note=world.reason)]
    try:
        plan, cluster, seconds, unfit = _best(world, constants)
    except _Unmodelled as error:
        return [replace(empty, note=str(error))]
    open_ = unpublished(world)
    doubts = (f"assumed: {', '.join(open_)}" if open_ else "", contradiction(run, plan, cluster), unfit)
    note = "; ".join(filter(None, doubts))
    found = []
    for quantity in quantities:
        comparison = replace(_comparison(run, quantity), note=note, assumed=bool(open_), assumptions=world.assumed)
        if quantity == MEMORY and (wrong := _impossible_peak(run, cluster)) is not None:
            comparison = replace(comparison, note=wrong)
        elif quantity == MEMORY:
            comparison = replace(comparison, predicted=_peak(run, plan, cluster), judge=BYTES)
        else:
            predicted = _speed(quantity, run, plan, cluster, seconds)
            comparison = replace(comparison, predicted=predicted, predicted_s=seconds, judge=ESTIMATE)
            if predicted > NEARER * (comparison.measured or math.inf):  # a hundred times as much is nearer
                notes = "; ".join(filter(None, (note, fraction_in_place_of_per_cent(run))))
                comparison = replace(comparison, note=notes)
        if not math.isfinite(comparison.relative_error or 0.0):
            comparison = replace(_comparison(run, quantity), note="not modelled: predicted and measured are too far apart")
        found.append(comparison)
    return found


def unpublished(world: Modelled) -> list[str]:
    """What is not published of the plan itself, so that several were tried: the micro-batch, and how the stages interleave.

    All else that is assumed is the same for all runs of a source.
    """
    return [what for what in world.assumed if what.startswith(("micro_batch ", "vpp "))]


class _Unmodelled(Exception):
    """Why no plan of a run can be judged."""


def _best(world: Modelled, constants: Constants | None) -> tuple[Plan, Cluster, float, str]:
    """The plan of a run, or the fastest that fits of those it may have had, with its cluster and seconds; and what is odd about
    its memory, if anything is: what was run did fit."""
    fitting: list[tuple[int, Plan, str]] = []
    refusals: dict[int, str] = {}
    network = _network(world.cluster, constants)
    cluster = network.cluster
    for number, plan in enumerate(world.candidates):
        check_interrupt()
        try:
            reason = infeasible(plan, cluster)
        except InputError as error:
            refusals[number] = str(error)
            continue
        # What was run did fit, whatever is said of its memory; of that, other figures tell.
        if reason is not None and (unpublished(world) or reason.reason != "memory"):
            refusals[number] = reason.message
        else:
            fitting.append((number, plan, _far_from_fitting(reason)))
    # What cannot be the fastest is not looked into: a large job takes a second for each plan.
    least = {number: least_s(plan, network) if len(fitting) > 1 else 0.0 for number, plan, _ in fitting}
    found: list[tuple[float, int, Plan, str]] = []
    for number, plan, unfit in sorted(fitting, key=lambda entry: least[entry[0]]):
        if found and least[number] > min(found)[0] * (1 + 1e-9):
            break
        check_interrupt()
        try:
            found.append((Estimate(plan, cluster, network).iteration_s(), number, plan, unfit))
        except InputError as error:  # a plan of which no program is made
            refusals[number] = str(error)
    if not found:
        raise _Unmodelled(f"not modelled: {refusals[min(refusals)]}")
    seconds, _, plan, unfit = min(found)
    return plan, cluster, seconds, unfit


def _far_from_fitting(reason: Infeasible | None) -> str:
    """That a run fitted which is predicted to need far more memory than there is; empty where it is not."""
    if reason is None or not reason.need_bytes or not reason.have_bytes or reason.need_bytes <= SLACK * reason.have_bytes:
        return ""
    need, have = (num_bytes / 2**30 for num_bytes in (reason.need_bytes, reason.have_bytes))
    return f"predicted not to fit: {need:.1f} GiB of {have:.1f}; perhaps recompute or another saver of memory is not in the row"


_latest: list[tuple[Cluster, Constants | None, Network]] = []
"""The cluster that was asked for last, with its network; rows that are alike share their cluster."""


def _network(cluster: Cluster, constants: Constants | None) -> Network:
    """The network of a cluster with these constants; its paths serve every plan, and every row that follows on the same one."""
    if not _latest or _latest[0][0] is not cluster or _latest[0][1] != constants:
        _latest[:] = [(cluster, constants, Network(cluster if constants is None else constants.applied(cluster)))]
    return _latest[0][2]


# --- Figures of a run ------------------------------------------------------------------------------------------------


def _published(run: Run) -> list[str]:
    """The quantities to compare: the first speed that is published, and memory."""
    return [
        quantity for quantity in (published_speed(run), MEMORY) if quantity is not None and _measured(run, quantity) is not None
    ]


def published_speed(run: Run) -> str | None:
    """The first quantity of a run's speed that is published; None where none is."""
    return next((quantity for quantity in SPEEDS if _measured(run, quantity) is not None), None)


def _measured(run: Run, quantity: str) -> float | None:
    """The published figure, in the unit of its column; None where there is none, or 0, to which nothing has a relative error."""
    value = getattr(run, quantity)
    return float(value) if value else None


def _comparison(run: Run, quantity: str | None) -> Comparison:
    """The comparison of one quantity, still without a prediction."""
    return Comparison(
        id=run.id,
        source_key=run.source_key,
        quantity=quantity,
        predicted=None,
        measured=None if quantity is None else _measured(run, quantity),
        table=run.table_or_fig or "",
        schedule=" ".join(str(part) for part in (run.schedule, run.vpp) if part is not None and run.pp != 1),
        parallelisation=(run.tp, run.pp, run.cp, run.ep, run.zero_stage_or_fsdp, run.plan_json),
        setting=(
            *(run.cluster, run.gpu_type, run.num_gpus, run.gpus_per_node, run.inter_node_GBps_per_node),
            *(run.model_name, run.num_layers, run.hidden, run.seq_len, run.vocab, run.precision),
            *(run.tp, run.pp, run.dp, run.cp, run.ep, run.zero_stage_or_fsdp, run.plan_json),
            *(run.micro_batch, run.global_batch, run.recompute, run.sequence_parallel, run.framework),
        ),
    )


def _impossible_peak(run: Run, cluster: Cluster) -> str | None:
    """What is wrong with a published peak that is more than a device has, as in another unit; None where nothing is."""
    most = max(node.gpu.memory_bytes for node in cluster.nodes)
    if measured_peak_bytes(run) <= SLACK * most:
        return None
    has = most / _memory_unit_bytes(run)
    return f"not modelled: peak_mem_gb {run.peak_mem_gb:g} is more than the {has:.1f} GB that a device has"


def contradiction(run: Run, plan: Plan, cluster: Cluster) -> str:
    """Which two published speeds cannot be of the same run; empty where all agree but for how FLOP are counted."""
    published = [(quantity, measured) for quantity in SPEEDS if (measured := _measured(run, quantity)) is not None]
    took = sorted(
        (measured if quantity == TIME else _speed(quantity, run, plan, cluster, 1.0) / measured, quantity, measured)
        for quantity, measured in published
    )
    if len(took) < 2 or took[-1][0] <= MOST_APART * took[0][0]:
        return ""
    told = (
        f"{quantity} {measured:g}" + (f" ({s:.4g} s)" if quantity != TIME else "")
        for s, quantity, measured in (took[0], took[-1])
    )
    return f"{' and '.join(told)} contradict one another"


def fraction_in_place_of_per_cent(run: Run) -> str:
    """What is probably wrong with a speed that is a share below one per cent; empty where nothing is."""
    quantity = published_speed(run)
    measured = None if quantity is None else _measured(run, quantity)
    if quantity is None or measured is None or not quantity.endswith("_pct") or measured >= 1:
        return ""
    return f"{quantity} {measured:g} is less than one per cent; perhaps a fraction, for {100 * measured:g}"


def _peak(run: Run, plan: Plan, cluster: Cluster) -> float:
    """The predicted peak of the fullest device, in the unit of the run's column."""
    return counted_peak_bytes(run, plan, cluster.stack) / _memory_unit_bytes(run)


def counted_peak_bytes(run: Run, plan: Plan, software: Stack) -> int:
    """The predicted peak of the fullest device, of what the run's published one counts."""
    counts = read_assumptions().of(run).memory_counts
    return max(int(getattr(parts, counts)) for _, _, _, parts in lane_parts(plan, software))


def _memory_unit_bytes(run: Run) -> float:
    """The bytes of the unit in which a run's peak memory is given."""
    return read_assumptions().of(run).memory_unit_bytes


def measured_peak_bytes(run: Run) -> float:
    """The measured peak memory of a run that has one. Raises ValueError else."""
    if run.peak_mem_gb is None:
        raise ValueError(f"the run {run.id} has no peak_mem_gb")
    return run.peak_mem_gb * _memory_unit_bytes(run)


def measured_s(world: Modelled) -> float:
    """Seconds of an iteration by the first speed that is published of a run. Raises ValueError where none is, and InputError."""
    quantity = published_speed(world.run)
    measured = None if quantity is None else _measured(world.run, quantity)
    if quantity is None or measured is None:
        raise ValueError(f"the run {world.run.id} has no speed")
    # All others are rates: what an iteration of one second has, over what was measured.
    return measured if quantity == TIME else _speed(quantity, world.run, world.plan, world.cluster, 1.0) / measured


def _speed(quantity: str, run: Run, plan: Plan, cluster: Cluster, seconds: float) -> float:
    """The predicted figure in the unit of the quantity's column, counted as the publication counts it."""
    if quantity == TIME:
        return seconds
    if quantity == "tokens_per_s":
        return plan.global_batch * plan.sequence_length / seconds
    counting = _counting(quantity, run.tflops_counting or "")
    if quantity == "tflops_per_gpu":
        return counted_flop(plan, counting) / seconds / len(cluster.devices) / 1e12
    flop = counted_flop(plan, counting) if quantity == "mfu_pct" else model_flop_of(plan) + recompute_flop(plan)
    return 100 * flop / seconds / _peak_flop_per_s(plan, cluster, counting)


def _counting(quantity: str, text: str) -> str:
    """The part of a publication's words on its counting that is about the quantity, where it tells its rates apart by name.

    'tflops_per_gpu = 96-formula; mfu_pct = 6N+12Lhs' counts the FLOP of the two otherwise.
    """
    named = re.search(rf"\b{quantity}\s*=\s*([^;]*)", text)
    return text if named is None else named[1]


def _peak_flop_per_s(plan: Plan, cluster: Cluster, counting: str) -> float:
    """The peak that an MFU divides by: that of the kinds at the plan's precision, unless the publication names another.

    It may do so by number ('peak 989 TFLOPS') or by precision ('bf16 peak').
    """
    named = re.search(r"peak ([0-9.]+) ?TFLOP(?:S|/s)", counting, re.IGNORECASE)
    if named is not None:
        return float(named[1]) * 1e12 * len(cluster.devices)
    of = re.search(rf"\b({'|'.join(PRECISIONS)}) (?:dense )?peak", counting, re.IGNORECASE)
    return cluster.peak_flop_per_s(plan.precision if of is None else of[1].lower())


def model_flop_of(plan: Plan) -> int:
    """FLOP of one iteration of a plan, without recomputation."""
    return model_flop(plan.transformer, plan.global_batch, plan.sequence_length)


def counted_flop(plan: Plan, counting: str) -> float:
    """FLOP of one iteration of the plan, as a publication counts them that describes its counting in these words.

    '96 B s l h^2 ...' takes full recomputation of every layer for granted (Narayanan et al., 2021, arXiv:2104.04473, section
    5.1); 'incl. recompute' adds what the plan recomputes; '6N + 12 L h s' is per token, N with embeddings (PaLM,
    arXiv:2204.02311, appendix B); 'causal attention counted half' or 'causal halved'; all else is the model's FLOP, without
    recomputation.
    """
    model, tokens = plan.transformer, plan.global_batch * plan.sequence_length
    if re.search(r"\b96( ?B ?s ?l|-formula)", counting):
        return model_flop_of(plan) + model.layers * layer_recompute_flop(model, tokens, plan.sequence_length, "full")
    if re.search(r"\b6N", counting):
        width = model.heads * model.head_dim
        return (6 * total_parameters(model) + 12 * model.layers * width * plan.sequence_length) * tokens
    if re.search(r"\bcausal (attention )?(is |counted )*(half|halved)\b", counting):
        attention = layer_forward_flop(model, tokens, plan.sequence_length).attention
        return model_flop_of(plan) - 3 * model.layers * attention / 2
    if (
        re.search(r"HW flops|(?<!no )\bincl(\.|uding|udes|usive of) (full )?recomput", counting, re.IGNORECASE)
        or counting == "HFU"
    ):
        return model_flop_of(plan) + recompute_flop(plan)
    return model_flop_of(plan)


# --- Memory: did it fit? ---------------------------------------------------------------------------------------------


def check_fit(run: Run, ran: bool, constants: Constants | None = None, exact: bool = True) -> FitCheck:
    """Whether a run is said to fit into its devices' memory, beside whether it `ran`.

    `exact` says whether memory is known to be why a run failed. A run whose plan is not published whole tells nothing, and
    counts as not modelled.
    """
    empty = FitCheck(run.id, run.source_key, ran, None, exact)
    world = modelled(run, read_assumptions())
    if isinstance(world, NotModelled):
        return replace(empty, note=world.reason)
    if open_ := unpublished(world):
        return replace(empty, note=f"assumed: {', '.join(open_)}")
    try:
        reason = infeasible(world.plan, world.cluster if constants is None else constants.applied(world.cluster))
    except InputError as error:
        return replace(empty, note=f"not modelled: {error}")
    if reason is not None and reason.reason != "memory":
        return replace(empty, note=f"not modelled: {reason.message}")
    return replace(empty, fits=reason is None)


def is_out_of_memory(failure: str) -> bool:
    """Whether these words say that a run failed for lack of memory, and for nothing else."""
    words = re.split(r"[/|]", failure.strip())
    return all(re.search(OUT_OF_MEMORY, word, re.IGNORECASE) for word in words)


# --- All runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """All comparisons, in the order of the runs, and what was said of the memory of runs that failed, and of those that ran."""

    comparisons: tuple[Comparison, ...]
    checks: tuple[FitCheck, ...]
    calibration_ids: frozenset[str] = frozenset()
    """The runs that the constants were fitted on just now; they are told of apart."""

    @property
    def held_out(self) -> list[Comparison]:
        """The comparisons that count: all but those of runs that the constants were fitted on."""
        return [c for c in self.comparisons if c.id not in self.calibration_ids]

    @property
    def calibration(self) -> list[Comparison]:
        """The others."""
        return [c for c in self.comparisons if c.id in self.calibration_ids]

    @property
    def held_out_checks(self) -> list[FitCheck]:
        """What was said of the memory of runs that the constants were not fitted on."""
        return [check for check in self.checks if check.id not in self.calibration_ids]

    def summaries(self, calibration: bool = False) -> dict[str, dict[str, Any]]:
        """The summary of each source, in the order of the runs."""
        return {source: summary(own) for source, own in by_source(self.calibration if calibration else self.held_out).items()}


@dataclass(frozen=True)
class _Task:
    """One run of a replay: whether it is to be compared, and whether its memory is to be checked."""

    run: Run
    ran: bool
    checked: bool
    exact: bool
    constants: Constants | None


@garbage_collector_paused()
def _judged(task: _Task) -> tuple[list[Comparison], list[FitCheck]]:
    """What is found of one run. An error of ours is told with the run, so that it does not spoil the replay of the others."""
    run = task.run
    try:
        compared = predict(run, task.constants) if task.ran else []
        checks = [check_fit(run, task.ran, task.constants, task.exact)] if task.checked else []
    except Exception as error:
        note = f"not modelled: {type(error).__name__}: {' '.join(str(error).split())}"
        compared = [replace(_comparison(run, next(iter(_published(run)), None)), note=note)] if task.ran else []
        checks = [FitCheck(run.id, run.source_key, task.ran, None, task.exact, note)] if task.checked else []
    return compared, checks


def _size(run: Run) -> tuple[int, str, str, str]:
    """By what runs are sorted: the number of GPUs, then what else their clusters are made of."""
    return run.num_gpus or 0, run.source_key, str(run.gpu_type), f"{run.gpus_per_node} {run.inter_node_GBps_per_node}"


def _place(task: _Task) -> Hashable:
    """The cluster that a run is on, whose paths the first run there finds for all; None of the largest, which are few."""
    size = _size(task.run)
    return size if size[0] < LARGE_GPUS else None


def replay(
    runs: Sequence[Run],
    failures: Sequence[Run] = (),
    constants: Constants | None = None,
    processes: int | None = None,
    progress: Callable[[], None] | None = None,
) -> tuple[Replay, bool]:
    """What was predicted of all runs, and whether Ctrl-C ended the work early; `progress` is called once for each.

    The memory of failed runs is checked, and that of the runs of those sources whose failures are told to be for memory.
    """
    exact = {run.source_key for run in failures if is_out_of_memory(run.failure or "")}
    tasks = [_Task(run, True, run.source_key in exact, True, constants) for run in runs]
    tasks += [_Task(run, False, True, is_out_of_memory(run.failure or ""), constants) for run in failures]
    # The largest first, so that all processes end together; those on the same cluster follow one another.
    order = sorted(range(len(tasks)), key=lambda i: _size(tasks[i].run), reverse=True)
    found, interrupted = in_processes(_judged, [tasks[i] for i in order], processes, progress, batch=_place)
    done = [judged for _, judged in sorted(zip(order, found, strict=True), key=lambda entry: entry[0]) if judged is not None]
    return Replay(tuple(c for compared, _ in done for c in compared), tuple(c for _, checks in done for c in checks)), interrupted


# --- The file --------------------------------------------------------------------------------------------------------


def replay_json(told: Replay) -> str:
    """The text of a replay's file: `runs`, one a line, `sources`, `overall`, `out_of_memory`, and `calibration` after a fit."""
    runs = [json.dumps(_row(c, told), ensure_ascii=False, allow_nan=False) for c in told.comparisons]
    parts: dict[str, object] = {
        "sources": told.summaries(),
        "overall": summary(told.held_out),
        "out_of_memory": fit_summary(told.held_out_checks),
    }
    if told.calibration_ids:
        parts["calibration"] = {"sources": told.summaries(calibration=True), "overall": summary(told.calibration)}
    rest = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in parts.items()]
    return '{\n  "runs": [\n' + ",\n".join(f"    {row}" for row in runs) + "\n  ],\n" + ",\n".join(rest) + "\n}\n"


def _row(c: Comparison, told: Replay) -> dict[str, Any]:
    """The flat row of one comparison."""
    return {
        "id": c.id,
        "source_key": c.source_key,
        "quantity": c.quantity,
        "predicted": c.predicted,
        "measured": c.measured,
        "relative_error": c.relative_error,
        "note": c.note,
        "judge": c.judge,
        "assumed": c.assumed,
        "assumptions": list(c.assumptions),
        "calibration": c.id in told.calibration_ids,
    }
