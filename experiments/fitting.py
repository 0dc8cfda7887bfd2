"""Fitting the constants of software stacks on published runs: bounded, robust least squares on logarithms of times and bytes.

A stack's constants are few and shared by all its runs, on every GPU kind. Each is held near its starting point by a prior, so
that what the runs do not tell stays as it was. A stack and its variants, which differ from it in kernels alone
(`Stack.variant_of`), are fitted together: a variant has its own rates of kernels, held near those of the stack, and all other
constants of time in common with it. GPU kinds come first: their efficiency records are fitted on micro-benchmarks
(`experiments.fit_pieces`), and are taken as they are here, but for those of which there is no micro-benchmark: the runs of the
stack that has most of them then decide by what factor their matmul rate is off. Iterations that were profiled in the code of a
stack (`experiments.layer_profiles`) count beside its runs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from experiments.assumptions import DATA, Assumptions, read_assumptions
from experiments.constants import Constants, constants_text, rates_measured, told_factor, with_factor, without_factor
from experiments.fidelity import (
    contradiction,
    counted_peak_bytes,
    fraction_in_place_of_per_cent,
    is_out_of_memory,
    measured_peak_bytes,
    measured_s,
    published_speed,
    unpublished,
)
from experiments.fit_links import fit_links
from experiments.fit_pieces import fit_pieces
from experiments.layer_profiles import SOURCE as PROFILES
from experiments.layer_profiles import profiled_runs
from experiments.parallel import check_interrupt, in_processes
from experiments.published import Modelled, NotModelled, modelled
from experiments.published_rows import Run
from sim.cost.estimate import Estimate
from sim.cost.memory import lane_parts
from sim.spec.compile import instruction_estimate
from sim.spec.counts import aligned
from sim.spec.gpu import Efficiency, GpuKind, efficiencies
from sim.spec.plan import Plan, tensor_groups
from sim.spec.reading import InputError
from sim.spec.stack import Stack, stack, stacks

PRIOR_ERROR = 0.05
"""To move a constant by its width costs as much as to miss one run by this fraction."""

ROBUST_ERROR = 0.1
"""Relative errors well below this count squared; well above it, hardly more the larger they are."""

FEW_ERROR, MANY_RUNS = 0.3, 20
"""The same of a stack with fewer runs and profiles than these: too few to tell which of them something else slowed."""

WIDE_ERROR = 1.0
"""In the first steps of some searches: errors below this count squared, so that no run is given up before it was tried."""

MOST_WORK = 1_300_000
"""The most work of the runs that a fit looks at, the smallest first, where it has FEWEST_RUNS within that."""

RUN_WORK = 1_000
"""Work of a run besides that of its instructions, which is one for each of one pipeline: estimates follow one of those that are
alike."""

FEWEST_RUNS = 10
"""As many runs a fit looks at, the smallest programs first, however large they are."""

RECORD_RUNS = 10
"""As many runs stand for what a shipped record says, where it is fitted on a user's."""

FIRST_STEPS, FURTHER_STEPS = 6, 3
"""Steps of the search from each start, and from each further one, before the best of them is searched to its end. After three
steps the wrong one of two valleys can look better."""

MOST_STEPS = 40
"""The most steps of one search."""

NEAR, NEARER = 1e-3, 1e-5
"""A search is at its end when a step lowers the error by no more than such a part of it: in the first steps from each start, and
in the last search. Valleys are narrow: with the former, fits ended in the middle of one."""

ROUNDS = 2
"""How often a search goes through all further starts: what one of them finds may open the way for another before it."""


_FITTED, _TIMES = "fitted", "times of"
"""What the source of a fitted record begins with, and what stands in it where its times were fitted."""


@dataclass(frozen=True)
class Parameter:
    """A constant of a stack: where its prior has its middle, its bounds, and the factor e^width that the prior lets it go.

    The search starts at the middle, and with this constant at each of `first_starts`: what several constants could explain (a
    slow host, or a long step of the optimizer) is a valley for each. From the best it found, it starts once more at each of
    `further_starts`: what never decides has no slope to follow.
    """

    name: str
    middle: float
    least: float
    most: float
    width: float
    further_starts: tuple[float, ...] = ()
    fewest_runs: int = 0
    """A fit that has no record to stay near leaves it out with fewer runs and profiles: too little to tell it from others."""
    first_starts: tuple[float, ...] = ()

    def near(self, value: float, runs: int) -> Parameter:
        """The parameter with its prior about a record's value, or about its own middle where that is none of its values.

        `runs` of a user's say the less beside what is shipped the fewer they are; fewer than `fewest_runs` half as much.
        """
        width = self.width if runs >= self.fewest_runs else self.width / 2
        if not self.least <= value <= self.most:
            return replace(self, width=width)
        return replace(self, middle=value, width=width * math.sqrt(runs / (runs + RECORD_RUNS)))


TIME_PARAMETERS = (
    Parameter("matmul_scale", 1.0, 0.3, 1.6, 0.1),
    Parameter("unaligned_scale", 0.6, 0.1, 1.0, 0.4),
    Parameter("attention_scale", 1.0, 0.1, 4.0, 0.3),
    Parameter("memory_traffic", 1.2, 0.3, 8.0, 0.4),
    Parameter("routing_traffic", 2.0, 0.3, 20.0, 0.7),
    Parameter("loss_traffic", 1.5, 0.3, 8.0, 0.5),
    Parameter("gradient_bytes", 6.0, 0.1, 40.0, 0.7),
    Parameter("host_s", 60e-6, 1e-7, 1e-3, 1.0, (20e-6,), first_starts=(120e-6,)),
    Parameter("tensor_host_s", 1e-6, 1e-8, 1e-2, 4.0, (200e-6,), 50),
    Parameter("ring_step_s", 1e-6, 1e-8, 1e-2, 4.0, (50e-6,), 50),
    Parameter("micro_batch_s", 1e-4, 1e-6, 0.1, 1.4, (5e-3,)),
    Parameter("message_s", 0.1, 1e-3, 10.0, 2.0),
    Parameter("tensor_overlap", 0.1, 1e-3, 1.0, 1.5),
    Parameter("node_collective_scale", 0.9, 0.03, 1.2, 0.25, (0.2,)),
    Parameter("collective_scale", 0.9, 0.03, 1.2, 1.0, (0.2, 0.1)),
    Parameter("overlap_slowdown", 0.05, 1e-3, 1.0, 1.5),
    Parameter("optimizer_traffic", 1.5, 0.5, 20.0, 1.0),
    Parameter("step_s", 5e-3, 1e-5, 1.0, 2.0),
)
"""What the times of runs decide. Widths are about as far as stacks are apart, chosen by halves held out (docs/fidelity.md)."""

MEMORY_PARAMETERS = (
    Parameter("activation_scale", 1.0, 0.3, 4.0, 0.3),
    Parameter("logits_scale", 1.0, 0.1, 6.0, 0.5),
    Parameter("context_bytes", 1.0 * 2**30, 2.0**26, 8.0 * 2**30, 0.7),
)
"""What the peak memory of runs decides."""


OF_KERNELS = ("matmul_scale", "attention_scale", "memory_traffic")
"""The constants of time that variants of a stack have for themselves."""

MOST_APART = 10.0
"""By what factor they differ from the stack's at most."""


@dataclass(frozen=True)
class Task:
    """What one stack and its variants are fitted on."""

    stack: Stack
    runs: tuple[Run, ...]
    failures: tuple[Run, ...]
    """Runs that ran out of memory."""
    constants: Constants
    """Efficiency records and links, as the micro-benchmarks have them."""
    free: tuple[str, ...] = ()
    """Efficiency records whose matmul rate the runs decide."""
    variants: tuple[Stack, ...] = ()
    anew: bool = True
    """Whether priors are about the middles of their parameters, and not about the values that the stacks have."""
    profiles: tuple[Run, ...] = ()
    """Iterations of the stack that were profiled: their times count beside those of the runs."""


@dataclass(frozen=True)
class FittedStack:
    """A stack with its fitted constants, factors on the matmul rates of the free records, and how well the runs are met.

    Runs of its variants count as its own.
    """

    stack: Stack
    factors: Mapping[str, float]
    timed: int
    time_error: float
    """Mean absolute relative error of the iteration times that it was fitted on. Neither counts profiles."""
    weighed: int
    memory_error: float
    variants: tuple[Stack, ...] = ()
    """Fitted, too."""
    runs: Mapping[str, int] = field(default_factory=dict)
    """How many runs each of these had, by its name: of times or of memory, whichever were more."""


@dataclass(frozen=True)
class Fitted:
    """What `fit` found: the text of a constants file, and the ids of the runs that it was fitted on."""

    constants_text: str
    calibration_ids: frozenset[str]
    timed: int
    """The runs whose times were met; the largest ones are not looked at."""
    weighed: int
    """The runs, failed ones among them, whose memory was met."""
    drawn: int
    """All runs that were not held out, whether they could be fitted on or not."""
    held: int = 0
    """All runs that were held out."""
    doubtful: tuple[str, ...] = ()
    """Those that were left out for figures that are probably in another unit or contradict one another, and why."""
    few: tuple[str, ...] = ()
    """A line for each stack whose record had runs behind it already, and gets these few in their place."""


def fit(
    runs: Sequence[Run],
    failures: Sequence[Run],
    seed: int,
    holdout: float,
    progress: Callable[[], None] | None = None,
    processes: int | None = None,
    by: str = "run",
    anew: bool = True,
) -> Fitted:
    """The constants that fit micro-benchmarks and a part of the runs: efficiency records and links first, then each stack.

    Of the failures those count that ran out of memory. `holdout` is the share of the runs, and failures, that is left out, drawn
    by lot with `seed`; see `split`. What the runs do not tell stands in the middle of its prior, or, unless `anew`, keeps its
    value, near which all others are held then. The shipped ones were fitted on all published runs, which must have no say where
    they are held out. Where it is `anew`, profiles count beside the runs of their stack, and tell of it alone where all its runs
    are held out; they are never held out themselves, and are none of the runs that are counted.
    `progress` is called once for each stack. Raises InputError as `split` and where no run can be fitted on, KeyboardInterrupt
    where Ctrl-C ended the work.
    """
    calibration, held = split(runs, holdout, seed, by)
    out_of_memory, _ = split([run for run in failures if is_out_of_memory(run.failure or "")], holdout, seed, by)
    known = read_assumptions()
    doubtful = {run.id: doubt for run in calibration if (doubt := fraction_in_place_of_per_cent(run))}
    usable, refusals = _usable([run for run in calibration if run.id not in doubtful], known)
    doubtful |= {row.run.id: doubt for row in usable if (doubt := contradiction(row.run, row.plan, row.cluster))}
    usable = [row for row in usable if row.run.id not in doubtful]
    doubts = tuple(f"{run_id}: {doubt}" for run_id, doubt in doubtful.items())
    if not usable:
        raise InputError(f"--fit: no run can be fitted on: {_why_none([*refusals, *doubts])}")
    by_stack, records = _by_stack(usable)
    failed: dict[str, list[Run]] = {}
    for row in _usable(out_of_memory, known)[0]:
        failed.setdefault(row.cluster.stack.family, []).append(row.run)
    variants = _variants(usable, anew)
    held_rows = [row for row in (modelled(run, known) for run in held) if isinstance(row, Modelled)]
    # What is shipped knows the profiles already; and stacks that no run is of are left alone.
    profiles = _profiles(known, by_stack.keys() | {row.cluster.stack.family for row in held_rows}) if anew else {}
    for name in profiles:
        by_stack.setdefault(name, [])
    pieces, found_links = fit_pieces(DATA, seed).efficiencies, fit_links(DATA / "microbench.csv")[0]
    if not anew:  # rates that runs decided belong to the stacks that keep their values, and stay as they are shipped with them
        pieces = {**pieces, **{record: one for record, one in efficiencies().items() if not rates_measured(one)}}
    kinds = dict(efficiencies()) | dict(pieces)
    owners = {record: min(counts, key=lambda name: (-counts[name], name)) for record, counts in records.items()}
    begun = {record: without_factor(kinds[record]) for record in owners}
    told: dict[str, Efficiency] = {}
    # Stacks that run on a kind whose factor another one decides come when that is known.
    later = {name for record, counts in records.items() for name in counts if name != owners[record]}
    fitted: list[FittedStack] = []
    for names in (by_stack.keys() - later, later):
        constants = Constants({**pieces, **begun, **told}, {}, found_links)
        tasks = [
            Task(
                _unfitted(stack(name)) if anew else stack(name),
                tuple(rows),
                tuple(failed.get(name, ())),
                constants,
                tuple(sorted(record for record, owner in owners.items() if owner == name)),
                tuple(variants.get(name, ())),
                anew,
                tuple(profiles.get(name, ())),
            )
            for name, rows in sorted(by_stack.items(), key=lambda entry: -len(entry[1]))
            if name in names
        ]
        found, interrupted = in_processes(fit_stack, tasks, processes, progress)
        if interrupted or None in found:
            raise KeyboardInterrupt
        fitted += [one for one in found if one is not None]
        told |= {
            record: told_factor(begun[record], factor, one.stack.name) for one in fitted for record, factor in one.factors.items()
        }
    timed, weighed = sum(one.timed for one in fitted), sum(one.weighed for one in fitted)
    if not timed + weighed:
        raise InputError(f"--fit: no run can be fitted on: none of {len(calibration)} has a speed or a peak memory to be met")
    held_stacks = {row.cluster.stack.name for row in held_rows}
    kept = {name: _unfitted(one) if anew and name in held_stacks else one for name, one in stacks().items()}
    kept |= {each.name: each for one in fitted for each in (one.stack, *one.variants)}
    kept |= {name: mean_stack(one, kept) for name, one in kept.items() if one.mean_of}
    text = constants_text(Constants({**kinds, **told}, kept, found_links))
    seen = frozenset(run.id for name, rows in by_stack.items() for run in (*rows, *failed.get(name, ())))
    few = () if anew else tuple(line for one in fitted for line in _told_few(one))
    return Fitted(text, seen, timed, weighed, len(calibration) + len(out_of_memory), len(held), doubts, few)


def _told_few(found: FittedStack) -> Iterator[str]:
    """A line for each of a stack and its variants that few runs were fitted on, and whose shipped record has others behind it."""
    for one in (found.stack, *found.variants):
        runs, before = found.runs.get(one.name, 0), stack(one.name).source
        if 0 < runs < RECORD_RUNS and before.startswith(_FITTED):
            yield f"{one.name}: {_runs(runs)}; the shipped record was {before}"


def _runs(count: int) -> str:
    return f"{count} run{'s' if count != 1 else ''}"


def _profiles(known: Assumptions, names: Collection[str]) -> dict[str, list[Run]]:
    """The profiled iterations of each of these stacks that has some."""
    found: dict[str, list[Run]] = {}
    for row in _usable(profiled_runs(DATA / "layer_profiles.csv"), known)[0]:
        if row.cluster.stack.family in names:
            found.setdefault(row.cluster.stack.family, []).append(row.run)
    return found


def _usable(runs: Iterable[Run], known: Assumptions) -> tuple[list[Modelled], list[str]]:
    """The runs whose plans are published whole, and why the others cannot be fitted on."""
    usable: list[Modelled] = []
    refusals = []
    for run in runs:
        row = modelled(run, known)
        if isinstance(row, NotModelled):
            refusals.append(f"{run.id}: {row.reason}")
        elif open_ := unpublished(row):
            refusals.append(f"{run.id}: assumed: {', '.join(open_)}")
        else:
            usable.append(row)
    return usable, refusals


def _why_none(refusals: Sequence[str]) -> str:
    """Why no run can be fitted on, by the first of them."""
    if not refusals:
        return "all are held out"
    return refusals[0] + (f"; and {len(refusals) - 1} more" if len(refusals) > 1 else "")


def _by_stack(rows: Iterable[Modelled]) -> tuple[dict[str, list[Run]], dict[str, Counter[str]]]:
    """The runs of every stack and its variants; and how many of them are on each efficiency record without micro-benchmarks."""
    by_stack: dict[str, list[Run]] = {}
    records: dict[str, Counter[str]] = {}
    names = {record: name for name, record in efficiencies().items()}
    for row in rows:
        name = row.cluster.stack.family
        by_stack.setdefault(name, []).append(row.run)
        for kind in dict.fromkeys(node.gpu for node in row.cluster.nodes):
            if kind.efficiency in names and not rates_measured(kind.efficiency):
                records.setdefault(names[kind.efficiency], Counter())[name] += 1
    return by_stack, records


def _variants(rows: Iterable[Modelled], anew: bool) -> dict[str, list[Stack]]:
    """For each stack those of its variants that some runs were made with, in the order of the file."""
    met = {row.cluster.stack.name for row in rows}
    found: dict[str, list[Stack]] = {}
    for name, software in stacks().items():
        if software.variant_of and name in met:
            found.setdefault(software.variant_of, []).append(_unfitted(software) if anew else software)
    return found


def fit_stack(task: Task) -> FittedStack:
    """The stack of a task and its variants, fitted: times first, then bytes. A constant that no run speaks of keeps its value.

    Profiles tell of times alone, in which they count as the runs of one more source.
    """
    known = read_assumptions()
    variants = {variant.name: variant for variant in task.variants}
    found = [modelled(run, known) for run in (*task.runs, *task.profiles)]
    # Begun from the task's stacks alone, so that the answer is the same whatever is shipped.
    usable = [
        replace(row, cluster=replace(task.constants.applied(row.cluster), stack=variants.get(row.cluster.stack.name, task.stack)))
        for row in found
        if isinstance(row, Modelled)
    ]
    work = {row.run.id: RUN_WORK + instruction_estimate(row.plan) / len(row.plan.pipelines) for row in usable}
    timed = sorted((row for row in usable if published_speed(row.run)), key=lambda row: work[row.run.id])
    within = sum(total <= MOST_WORK for total in accumulate(work[row.run.id] for row in timed))
    timed = timed[: max(within, FEWEST_RUNS)]
    members, factors, errors, of_profiles = _fit_times(task, timed)
    out_of_memory = [row for row in (modelled(run, known) for run in task.failures) if isinstance(row, Modelled)]
    fitted: list[Stack] = []
    weighed, memory_errors, runs = 0, list[float](), dict[str, int]()
    for begun, member in zip((task.stack, *task.variants), members, strict=True):
        own = [row for row in usable if row.cluster.stack == begun and row.run.source_key != PROFILES]
        failed = [row for row in out_of_memory if variants.get(row.cluster.stack.name, task.stack) == begun]
        met = errors.get(begun.name, ())
        if fitted and task.anew:  # a variant whose memory no run speaks of has that of its stack
            member = _with_constants(member, {p.name: getattr(fitted[0], p.name) for p in MEMORY_PARAMETERS})
        member, count, missed = _fit_bytes(member, own, failed, task.anew)
        profiled = of_profiles.get(begun.name, ())
        told = [f"{_TIMES} {_runs(len(met))}, met within {np.mean(met):.3f} on average"] if len(met) else []
        told += [f"{_TIMES} {len(profiled)} profiles, met within {np.mean(profiled):.3f}"] if len(profiled) else []
        if count:
            within_error = f", met within {np.mean(missed):.3f} on average" if missed else ""
            told.append(f"memory of {_runs(count)}{within_error}")
        beside = f" with {begun.variant_of}" if begun.variant_of else " with its variants" if variants else ""
        source = f"{_FITTED}{beside} on {'; '.join(told)}" if told else begun.source
        fitted.append(replace(member, source=source, mean_of="" if told else begun.mean_of))
        weighed, memory_errors = weighed + count, [*memory_errors, *missed]
        runs[begun.name] = max(len(met), count)
    times = [error for met in errors.values() for error in met]
    return FittedStack(
        fitted[0],
        factors,
        len(times),
        float(np.mean(times)) if times else math.nan,
        weighed,
        float(np.mean(memory_errors)) if memory_errors else math.nan,
        tuple(fitted[1:]),
        runs,
    )


_Missed = Mapping[str, Sequence[float]]


def _fit_times(task: Task, rows: Sequence[Modelled]) -> tuple[list[Stack], Mapping[str, float], _Missed, _Missed]:
    """The stack and its variants, factors of the free records, and by how much the runs, and the profiles, of each are missed."""
    members = (task.stack, *task.variants)
    estimates: list[tuple[Estimate, float, dict[str, GpuKind], str, int]] = []
    for row in rows:
        check_interrupt()
        try:
            estimate = Estimate(row.plan, row.cluster)
            estimate.iteration_s()  # only then are the rates of a kind that lacks the precision asked for
            seconds = measured_s(row)
        except InputError:
            continue  # what cannot be modelled is told by `motley validate`
        kinds = {node.gpu.name: node.gpu for node in row.cluster.nodes}
        estimates.append((estimate, seconds, kinds, row.run.source_key, members.index(row.cluster.stack)))
    if not estimates:
        return list(members), {}, {}, {}
    shipped = {name: task.constants.efficiencies.get(name, efficiencies()[name]) for name in task.free}
    free = {name: (record, without_factor(record)) for name, record in shipped.items()}
    # Of a record whose times nobody measured, the values of a stack that loses nothing, the priors know more.
    anew = task.anew or not (_TIMES in task.stack.source or task.stack.mean_of)
    enough = [p for p in TIME_PARAMETERS if not anew or len(estimates) >= p.fewest_runs]
    shared = [p for p in enough if _decides(p.name, task.stack, rows)]
    own = [p for p in shared if p.name in OF_KERNELS]

    def constants(logarithms: Any) -> tuple[list[Stack], dict[Efficiency, Efficiency]]:
        values = iter(np.exp(logarithms).tolist())
        common = {p.name: next(values) for p in shared}
        changed = [_with_constants(task.stack, common)]
        for variant in task.variants:
            apart = {p.name: min(max(common[p.name] * next(values), p.least), p.most) for p in own}
            # What a variant has none of, and its stack some, stays so: routing that it has fused.
            none = {p.name for p in shared if getattr(task.stack, p.name) and not getattr(variant, p.name)}
            changed.append(_with_constants(variant, {name: v for name, v in (common | apart).items() if name not in none}))
        factors = zip(free.values(), values, strict=True)
        return changed, {record: with_factor(begun, factor) for (record, begun), factor in factors}

    def errors(logarithms: Any) -> Any:
        check_interrupt()
        changed, records = constants(logarithms)
        predicted = []
        for estimate, _, kinds, _, member in estimates:
            renewed = {
                name: replace(kind, efficiency=records[kind.efficiency])
                for name, kind in kinds.items()
                if kind.efficiency in records
            }
            predicted.append(estimate.iteration_s(renewed, changed[member]))
        return np.log(predicted) - measured

    measured = np.log([seconds for _, seconds, _, _, _ in estimates])
    # A variant's own constants are told as multiples of the stack's, which they equal before any run says else.
    apart = [replace(p, middle=1.0, least=1 / MOST_APART, most=MOST_APART, further_starts=(), first_starts=()) for p in own]
    factors = tuple(Parameter(name, 1.0, 0.4, 2.5, 0.2) for name in free)
    # All runs of a source together count as the root of their number, so that one of many does not silence the others.
    counts = Counter(source for _, _, _, source, _ in estimates)
    weights = np.array([(len(estimates) / counts[source] / len(counts)) ** 0.25 for _, _, _, source, _ in estimates])
    of_variants = [
        p if anew else p.near(getattr(variant, p.name) / (getattr(task.stack, p.name) or math.inf), len(estimates))
        for variant in task.variants
        for p in apart
    ]
    shared_priors = _about(shared, task.stack, len(estimates), anew)
    solution = _solve(errors, (*shared_priors, *of_variants, *factors), len(estimates), weights)
    changed, _ = constants(solution)
    found = dict(zip(free, np.exp(solution[len(solution) - len(free) :]).tolist(), strict=True))
    missed: dict[str, list[float]] = {}
    profiled: dict[str, list[float]] = {}
    for (_, _, _, source, member), error in zip(estimates, np.abs(np.expm1(errors(solution))).tolist(), strict=True):
        (profiled if source == PROFILES else missed).setdefault(members[member].name, []).append(error)
    return [_rounded(each, shared) for each in changed], found, missed, profiled


def _decides(name: str, software: Stack, rows: Sequence[Modelled]) -> bool:
    """Whether any of the runs can tell a constant: what none of them uses would only follow its prior."""
    plans = [row.plan for row in rows]
    if name == "message_s":
        staged = [row for row in rows if _staged(row.plan)]
        on, spanned = software.message_nodes, software.message_lane_nodes
        return any(
            0 < on <= len(row.cluster.nodes) or 0 < spanned <= row.cluster.nodes_of(_first_lane(row.plan)[0]) for row in staged
        )
    if name in ("tensor_overlap", "tensor_host_s"):
        told = [row for row in rows if name == "tensor_overlap" or (_staged(row.plan) and len(row.cluster.nodes) > 1)]
        return any(len(devices) > row.plan.context_parallel for row in told for devices in _first_lane(row.plan))
    if name == "ring_step_s":
        groups = ((row, tensor_groups(devices, row.plan.context_parallel)) for row in rows for devices in _first_lane(row.plan))
        return any(row.cluster.nodes_of(ranks) > 1 for row, lane in groups for ranks in lane)
    if name == "node_collective_scale":
        return any(row.cluster.nodes_of(ranks) == 1 for row in rows for ranks in _communicating(row.plan))
    if name == "collective_scale":
        return any(row.cluster.nodes_of(ranks) > 1 for row in rows for ranks in _communicating(row.plan))
    if name == "unaligned_scale":
        return not all(all(aligned(plan.transformer, ranks, plan.precision)) for plan in plans for ranks in plan.tensor_degrees)
    if name == "routing_traffic":
        return any(plan.transformer.experts is not None for plan in plans)
    if name == "overlap_slowdown":
        return any(plan.overlap_gradients or plan.zero_stage >= 2 for plan in plans)
    return True


def _staged(plan: Plan) -> bool:
    return any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)


def _first_lane(plan: Plan) -> list[tuple[str, ...]]:
    """The devices of the first lane of a plan."""
    return [replica.devices for _, _, _, replica in islice(plan.replicas(), 1)]


def _communicating(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Devices between which collectives go: of the first stages, those of each lane, and the first ranks that exchange."""
    lanes = [replica.devices for _, stage, _, replica in plan.replicas() if stage == 0]
    first = tuple(devices[0] for devices in lanes)
    size = plan.shard_group or len(first)
    sharing = [first[i : i + size] for i in range(0, len(first), size)]
    yield from (devices for devices in (*lanes, *sharing, first) if len(devices) > 1)


def _fit_bytes(stack: Stack, rows: Sequence[Modelled], failed: Sequence[Modelled], anew: bool) -> tuple[Stack, int, list[float]]:
    """The stack, how many runs there were, and by how much those are missed whose peak memory is published.

    Of a run that went well and says no more, all that is known is that it fitted, and of one that ran out of memory that it did
    not: they miss by what they are on the wrong side. Runs that fitted count as much together as those that did not.
    """
    weighed = [row for row in rows if row.run.peak_mem_gb]
    fitted = [row for row in rows if not row.run.peak_mem_gb] if failed else []
    told = [*weighed, *fitted, *failed]
    if not told:
        return stack, 0, []
    logarithms = np.log([measured_peak_bytes(row.run) for row in weighed])
    capacity = np.log([min(node.gpu.memory_bytes for node in row.cluster.nodes) for row in (*fitted, *failed)])
    sides = np.array([1.0] * len(fitted) + [-1.0] * len(failed))
    weights = np.array([math.sqrt(len(failed) / max(1, len(fitted)))] * len(fitted) + [1.0] * len(failed))

    def constants(values: Any) -> Stack:
        return _with_constants(stack, {p.name: float(v) for p, v in zip(MEMORY_PARAMETERS, np.exp(values), strict=True)})

    def errors(values: Any) -> Any:
        check_interrupt()
        changed = constants(values)
        counted = [counted_peak_bytes(row.run, row.plan, changed) for row in weighed]
        peaks = np.log(counted + [_peak(row.plan, changed) for row in (*fitted, *failed)])
        beyond = np.maximum(0.0, sides * (peaks[len(weighed) :] - capacity)) * weights
        return np.concatenate([peaks[: len(weighed)] - logarithms, beyond])

    solution = _solve(errors, _about(MEMORY_PARAMETERS, stack, len(told), anew), len(told))
    met = errors(solution)[: len(weighed)]
    return _rounded(constants(solution), MEMORY_PARAMETERS), len(told), np.abs(np.expm1(met)).tolist()


def _about(parameters: Sequence[Parameter], software: Stack, runs: int, anew: bool) -> Sequence[Parameter]:
    """The parameters with their priors where they are, for a fit anew, or else about the values that the stack has."""
    return parameters if anew else [p.near(getattr(software, p.name), runs) for p in parameters]


def _peak(plan: Plan, software: Stack) -> int:
    """Bytes at the peak of the fullest device."""
    return max(parts.total for _, _, _, parts in lane_parts(plan, software))


def _solve(errors: Any, parameters: Sequence[Parameter], runs: int, weights: Any = 1.0) -> Any:
    """The logarithms of the parameters at the least robust error, each multiplied by its weight; the best of all starts."""
    middle = np.log([p.middle for p in parameters])
    widths = np.array([p.width for p in parameters])
    bounds = (np.log([p.least for p in parameters]), np.log([p.most for p in parameters]))

    def residuals(logarithms: Any, robust_error: float) -> Any:
        # Cauchy's loss for the runs, so that those that something else slowed do not draw the others away; the prior is a square.
        scaled = errors(logarithms) / robust_error
        robust = weights * np.sign(scaled) * np.sqrt(np.log1p(scaled**2))
        return np.concatenate([robust, (logarithms - middle) / widths * (PRIOR_ERROR / robust_error)])

    def searched(start: Any, steps: int, robust_error: float, least_gain: float = NEAR) -> Any:
        return least_squares(
            residuals,
            start,
            args=(robust_error,),
            bounds=bounds,
            x_scale=widths,
            diff_step=1e-3,
            xtol=least_gain / 10,
            ftol=least_gain,
            max_nfev=steps,
        )

    def moved(logarithms: Any, n: int, value: float) -> Any:
        """The same with another value of one parameter."""
        changed = logarithms.copy()
        changed[n] = math.log(value)
        return changed

    narrow = ROBUST_ERROR if runs >= MANY_RUNS else FEW_ERROR
    places = [(n, start) for n, parameter in enumerate(parameters) for start in parameter.first_starts]
    starts = [middle, *(moved(middle, *place) for place in places)]
    # From each once more without giving up on any run in the first steps: runs far off have no pull else.
    starts += [searched(start, FIRST_STEPS, WIDE_ERROR).x for start in starts]
    best = min((searched(start, FIRST_STEPS, narrow) for start in starts), key=lambda found: float(found.cost))
    for _ in range(ROUNDS):
        for n, parameter in enumerate(parameters):
            for start in parameter.further_starts:
                other = searched(moved(best.x, n, start), FURTHER_STEPS, narrow)
                best = other if other.cost < best.cost else best
    return searched(best.x, MOST_STEPS, narrow, NEARER).x


def _with_constants(stack: Stack, values: Mapping[str, float]) -> Stack:
    """The stack with other values of some constants."""
    return replace(stack, **values)  # type: ignore[arg-type]  # they are those of numbers


def mean_stack(software: Stack, known: Mapping[str, Stack]) -> Stack:
    """The stack with the means of the constants of those that its `mean_of` names: geometric, or arithmetic where one is zero.

    Routing is left out: one stack's runs tell of it, with two experts a token, and what later software fuses takes less.
    """
    members = [known[name] for name in software.mean_of.split(", ")]
    values = {}
    for parameter in (*TIME_PARAMETERS, *MEMORY_PARAMETERS):
        if parameter.name == "routing_traffic":
            continue
        of_members = np.array([getattr(member, parameter.name) for member in members])
        mean = np.exp(np.log(of_members).mean()) if (of_members > 0).all() else of_members.mean()
        values[parameter.name] = float(f"{mean:.3g}")
    return _with_constants(software, values)


def _unfitted(software: Stack) -> Stack:
    """The stack with every constant in the middle of its prior, but those that it does not use."""
    middles = {p.name: p.middle for p in (*TIME_PARAMETERS, *MEMORY_PARAMETERS) if getattr(software, p.name)}
    return replace(_with_constants(software, middles), source="the middles of the priors: no run was fitted on")


def _rounded(stack: Stack, parameters: Sequence[Parameter]) -> Stack:
    """The stack with its constants to three digits."""
    values = {p.name: float(f"{getattr(stack, p.name):.3g}") for p in parameters}
    return _with_constants(stack, values)


def split(runs: Sequence[Run], holdout: float, seed: int, by: str = "run") -> tuple[list[Run], list[Run]]:
    """The runs for the fit and those held out. Raises InputError for a share outside [0, 1).

    By run: that share of each source's runs is held out, drawn by lot. By nodes: of each source the runs on that share of its
    numbers of nodes. By source: all runs of that share of the sources.
    """
    if not 0 <= holdout < 1:
        raise InputError(f"--holdout is a share of the runs from 0 to below 1, but got {holdout!r}")
    calibration, held = [], []
    lot = random.Random(seed)
    strata: dict[str, dict[object, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: (run.source_key, run.id)):
        stratum = "" if by == "source" else run.source_key
        group: object = {"run": run.id, "nodes": _node_count(run), "source": run.source_key}[by]
        strata.setdefault(stratum, {}).setdefault(group, []).append(run)
    for groups in strata.values():
        parts = list(groups.values())
        lot.shuffle(parts)
        count = round(len(parts) * holdout)
        held += [run for part in parts[:count] for run in part]
        calibration += [run for part in parts[count:] for run in part]
    return calibration, held


def _node_count(run: Run) -> int | None:
    """The number of nodes of a run, as far as it is published; else that of its GPUs."""
    if run.num_gpus is None:
        return None
    return math.ceil(run.num_gpus / (run.gpus_per_node or 1))
