"""Calibration: from measured runs, and measurements of links, to the constants of a cluster that predict them best.

The constants are fitted together, by least squares with bounds and a robust loss: the residuals are the logarithms of measured
over predicted seconds, of each instruction's computation and of each iteration, where the prediction is the simulation's, and of
each message or collective of a bench. An iteration of a paced run is simulated there with the measured seconds of its
instructions: where the model cannot tell these, as of lanes whose collectives wait for a busy host, they bend what they are made
of, and not the links.
Plans held out are predicted by the constants alone. Every constant has a weak prior, its value in the cluster file; computation
has one for each kind of GPU and one beside it for each device, links one for each protocol and one beside it for each direction
of a card or of a wide-area link, so that what several share is told by all of them, and what is its own by its own runs.

A constant is told by the data where they leave less than half of the prior's uncertainty (of a device or link: of what is its
own). Those that are not told stay as they are, the others are fitted once more, and the fit says which are which.

Of a lane only the first device is recorded, and its devices wait for each other in every layer: a lane takes as long as the
slowest of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.calibrate.constants import DEVICE_PRIOR, KIND_PRIOR, PRIORS, Priors, applied, constants_of, rounded
from sim.calibrate.observations import Elsewhere, Observed, median_messages_s, median_spans_s, observed, run_spread
from sim.cost.collectives import between_lanes, collective, ring_exchange
from sim.cost.compute import ComputeCost
from sim.cost.estimate import Estimate
from sim.cost.memory import lane_parts
from sim.cost.network import Network
from sim.cost.traffic import message, switch_owners, work
from sim.engine import simulate
from sim.prepared import SpanKey
from sim.spec.bench import Bench, LinkMeasurement
from sim.spec.cluster import Calibration, Cluster, Node
from sim.spec.compile import compile_plan
from sim.spec.gpu import GpuKind, is_cpu
from sim.spec.plan import Plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    OptimizerStep,
    Program,
    work_key,
)
from sim.spec.reading import InputError
from sim.spec.stack import Stack
from sim.spec.trace import Trace

NEEDED_PLANS = 4
"""Different plans that a fit needs: two to fit, and two to tell how well it predicts."""

ITERATION_ERROR, SPAN_ERROR, LANE_ERROR, MESSAGE_ERROR, LINK_ERROR, ELSEWHERE_ERROR = 0.01, 0.03, 0.06, 0.3, 0.05, 0.15
MEMORY_ERROR = 0.03
"""Standard deviations of what the model leaves open, as fractions: of an iteration, of an instruction on one device, on a lane
whose devices talk inside it, of a message of a run, of what a bench measured of links, of an iteration on another cluster;
and of the bytes at a GPU's peak."""

CLOCK_S = 1e-4
"""Seconds that a recorded span may be off."""

TOLD = 0.5
"""What may be left of the prior's standard deviation of a constant that the data tell."""

LOOSE = 3.0
"""Residuals beyond so many standard deviations pull less and less."""

STEP, STALE = 0.05, 2.0
"""Of derivatives: the difference that finds them, and how far from where they were found they still serve; in priors' standard
deviations."""

MOST_STEPS, MOST_DAMPING = 30, 1e3
"""Of a fit."""

MOST_PARTS = 4
"""In which all plans are held out, a part at a time."""

RESAMPLES = 2000
"""Of the bootstrap."""

COVERAGE = 0.9
"""How often a prediction interval is to hold what is measured."""

Vector: TypeAlias = NDArray[np.float64]


def peaks_bytes(plan: Plan, stack: Stack) -> dict[str, int]:
    """What a run is predicted to reserve at the peak of each device: without the context, which it does not measure."""
    return {
        name: parts.total - parts.context
        for p, s, r, parts in lane_parts(plan, stack)
        for name in plan.pipelines[p].stages[s].replicas[r].devices
    }


@dataclass(frozen=True)
class Told:
    """What a fit says of one constant: where it was and is, how sure, and whether the data tell it."""

    name: str
    before: float
    after: float
    unit: str
    left: float
    """What is left of the prior's standard deviation."""
    told: bool
    at_bound: bool


@dataclass(frozen=True)
class Fit:
    """A calibrated cluster, and what the fit says of its constants."""

    cluster: Cluster
    constants: tuple[Told, ...]
    z: Vector
    """Of the constants, in their priors' standard deviations."""


@dataclass
class _Slopes:
    """Derivatives of the logarithms of predicted seconds: where, of each observation, of the links and the runs elsewhere."""

    at: Vector
    of_plans: dict[int, Vector]
    of_others: Vector


@dataclass(frozen=True)
class _World:
    """A cluster with some constants, and what is predicted there."""

    cluster: Cluster
    network: Network
    logs: dict[int, Vector]
    other_logs: Vector


class Fitting:
    """Fits of one cluster's constants to some observations, measured links and runs elsewhere, with what they share: derivatives
    above all."""

    def __init__(
        self,
        cluster: Cluster,
        observations: Sequence[Observed],
        links: Sequence[LinkMeasurement] = (),
        records: bool = False,
        elsewhere: Sequence[Elsewhere] = (),
        priors: Priors = PRIORS[0],
        near: Fitting | None = None,
    ) -> None:
        """`near`: one of the same constants with other priors, where the fit to all observations begins."""
        self._near = near
        self.cluster, self.observations, self.links = cluster, list(observations), list(links)
        self.elsewhere, self.priors = list(elsewhere), priors
        self.constants = constants_of(cluster, self.observations, self.links, records, self.elsewhere, priors)
        self._estimates = [Estimate(each.plan, each.cluster) for each in self.elsewhere]
        self._elsewhere_logs: dict[frozenset[GpuKind], Vector] = {}
        counts = Counter(each.source for each in self.elsewhere)
        alone = [1 / (ELSEWHERE_ERROR * counts[each.source] ** 0.25) for each in self.elsewhere]
        self._other_weights = np.array([1 / LINK_ERROR] * len(self.links) + alone)
        self._others_measured = np.log([*(one.seconds for one in self.links), *(each.iteration_s for each in self.elsewhere)])
        self._fit: Fit | None = None
        self._derivatives: _Slopes | None = None
        self._known: dict[bytes, _World] = {}
        self._links_used: dict[int, frozenset[str]] = {}
        self._programs: dict[int, Program] = {}
        self._instructions: dict[int, dict[SpanKey, Compute | OptimizerStep]] = {}

    def fit(self) -> Fit:
        """The fit to all observations; found once."""
        if self._fit is None:
            self._fit = self._fitted(range(len(self.observations)), None if self._near is None else self._from(self._near))
        return self._fit

    def fit_without(self, out: Collection[int]) -> Fit:
        """The fit to the observations but these. It begins where the fit to all of them ended, and with its derivatives."""
        start = self.fit()
        kept, self._derivatives = self._derivatives, deepcopy(self._derivatives)
        found = self._fitted([number for number in range(len(self.observations)) if number not in out], start.z)
        self._derivatives = kept
        return found

    def _from(self, other: Fitting) -> Vector:
        """z of what another fitting of these constants found, whose derivatives are taken over."""
        priors = np.array([own.own / its.own for own, its in zip(self.constants, other.constants, strict=True)])
        z: Vector = other.fit().z / priors
        found = other._derivatives
        if found is not None:
            slopes = {number: slopes * priors for number, slopes in found.of_plans.items()}
            self._derivatives = _Slopes(z.copy(), slopes, found.of_others * priors)
        return z

    def _fitted(self, chosen: Sequence[int], start: Vector | None = None) -> Fit:
        """The fit to the observations of these numbers: from `start`, near enough to keep its derivatives, or from the priors."""
        free, anew = np.ones(len(self.constants), dtype=bool), start is None
        z = self._solve(chosen, free, self._start(chosen) if start is None else start, anew)
        if anew and self._derivatives is not None and np.abs(z - self._derivatives.at).max() > 1:
            self._derivatives = None  # what is told is to be judged by derivatives found here
        left = self._left(chosen, free, z, anew)
        while (not_told := np.flatnonzero(free & (left > TOLD))).size:
            # A constant that others of its kind are beside is what they share: it goes only after them.
            free_names = {self.constants[i].beside for i in np.flatnonzero(free)}
            waiting = [i for i in not_told if self.constants[i].name not in free_names]
            if not waiting:
                break
            worst = max(waiting, key=lambda i: left[i])
            free[worst] = False
            left = np.where(free, self._left(chosen, free, z, anew), left)
        if not free.all():
            z = self._solve(chosen, free, np.where(free, z, 0.0), anew)
        after = applied(self.cluster, self.constants, z)
        told = []
        for i, constant in enumerate(self.constants):
            # At an end of what is accepted; a time of nothing is none, nor are no keys.
            at_bound = bool(free[i]) and bool(
                z[i] > constant.highest - 1e-3
                or (constant.unit not in ("s", "keys") and constant.name[:6] != "stack." and z[i] < constant.lowest + 1e-3)
            )
            before, now = constant.value(self.cluster), constant.value(after)
            told.append(Told(constant.name, before, now, constant.unit, float(left[i]), bool(free[i]), at_bound))
        return Fit(after, tuple(told), z)

    def _start(self, chosen: Sequence[int]) -> Vector:
        """Where a fit begins: at the priors, but with the speeds that the devices' own instructions tell without more ado."""
        z = np.zeros(len(self.constants))
        logs, _ = self._logs(chosen, z)
        slower: dict[str, list[float]] = {}
        for number, predicted in zip(chosen, logs, strict=True):
            lanes, measured = self._program(number).by_name, self._measured(number)
            for n, (lane, *_) in enumerate(self.observations[number].spans_s, 1):
                if len(lanes[lane].devices) == 1:
                    slower.setdefault(lanes[lane].devices[0], []).append(float(measured[n] - predicted[n]))
        faster = {f"speed of {name}": -median(some) for name, some in slower.items()}
        index = {constant.name: i for i, constant in enumerate(self.constants)}
        for kind in {constant.beside for constant in self.constants if constant.devices is not None and constant.beside}:
            own = {one.name: faster[one.name] for one in self.constants if one.beside == kind and one.name in faster}
            mean = sum(own.values()) / max(1, len(own))
            z[index[kind]] = mean / KIND_PRIOR
            for name, value in own.items():
                z[index[name]] = (value - mean) / DEVICE_PRIOR
        return z

    def elsewhere_s(self, cluster: Cluster) -> list[float]:
        """Predicted seconds of the iterations elsewhere, with the kinds of a cluster."""
        return [float(seconds) for seconds in np.exp(self._other_logs(cluster)[len(self.links) :])]

    # --- Residuals ---

    def _logs(self, chosen: Iterable[int], z: Vector) -> tuple[list[Vector], Vector]:
        """Logarithms of predicted seconds: of each chosen observation the iteration and its instructions, and of all else."""
        key = z.tobytes()
        if key not in self._known:
            if len(self._known) > 8:
                self._known.clear()
            cluster = applied(self.cluster, self.constants, z)
            self._known[key] = _World(cluster, Network(cluster), {}, self._other_logs(cluster))
        world = self._known[key]
        for number in chosen:
            if number not in world.logs:
                world.logs[number] = self._plan_logs(number, world.cluster, world.network)
        return [world.logs[number] for number in chosen], world.other_logs

    def _plan_logs(self, number: int, cluster: Cluster, network: Network) -> Vector:
        """Logarithms of an observation's predicted seconds: of the iteration, its instructions, messages and peaks.

        The iteration of a paced run is predicted with its instructions' measured seconds: what the model says wrongly of these
        is told by them, and is not to be told once more of all else that the iteration is made of. Of a real run the seconds of
        an instruction vary, and the iteration has their mean, not their median: there the constants answer for them.
        """
        each, program = self.observations[number], self._program(number)
        known_s = each.spans_s if each.origin == "paced" else {}
        trace = simulate(each.plan, cluster, network=network, program=program, known_s=known_s)
        self._links_used.setdefault(number, frozenset(link.name for link in trace.links))
        lanes, sent, spans = program.by_name, median_messages_s(trace), median_spans_s(trace)
        cost, owners = ComputeCost(each.plan, cluster), switch_owners(each.plan, program.lanes, cluster)
        for key in each.spans_s:
            lane = lanes[key[0]]
            taken = work(network, cost, lane, self._instructions[number][key])
            if lane.name in owners or not (taken.beside or taken.after):
                spans[key] = taken.alone_s(network)
        # Where it is not predicted that the receiver waits, the message has its links to itself.
        messages = [
            sent.get(sender) or network.alone_s(message(network, each.plan, lanes[sender[0]], lanes[sender[1].peer], sender[1]))
            for sender in each.messages_s
        ]
        seconds = [trace.iteration_s, *map(spans.__getitem__, each.spans_s), *messages]
        peaks = peaks_bytes(each.plan, cluster.stack) if each.peaks_bytes else {}
        return np.log([*(max(value, 1e-12) for value in seconds), *(peaks[device] for device in each.peaks_bytes)])

    def _program(self, number: int) -> Program:
        """An observation's plan, compiled."""
        if number not in self._programs:
            program = self._programs[number] = compile_plan(self.observations[number].plan)
            self._instructions[number] = {
                (lane.name, *work_key(one, lane.sequence_slices)): one
                for lane in program.lanes
                for one in reversed(lane.instructions)
                if isinstance(one, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep))
            }
        return self._programs[number]

    def _other_logs(self, cluster: Cluster) -> Vector:
        """Logarithms of the predicted seconds of the measured links, and of the runs elsewhere."""
        if not self.links and not self.elsewhere:
            return np.zeros(0)
        network = Network(cluster)
        of_links = np.log([max(link_s(network, one), 1e-12) for one in self.links])
        kinds = {node.gpu.name: node.gpu for node in cluster.nodes}
        key = frozenset(kinds.values())
        if key not in self._elsewhere_logs:
            self._elsewhere_logs[key] = np.log([estimate.iteration_s(kinds) for estimate in self._estimates])
        return np.concatenate([of_links, self._elsewhere_logs[key]])

    def _weights(self, number: int) -> Vector:
        """One over the standard deviations of an observation's residuals."""
        each = self.observations[number]
        repeated = run_spread([each]) or 0.0
        weights = [1 / max(ITERATION_ERROR, repeated / math.sqrt(len(each.iterations_s)))]
        lanes = self._program(number).by_name
        for (lane, *_), seconds in each.spans_s.items():
            alone = len(lanes[lane].devices) == 1
            weights.append(1 / ((SPAN_ERROR if alone else LANE_ERROR) + CLOCK_S / max(seconds, CLOCK_S / 10)))
        weights += [1 / (MESSAGE_ERROR + CLOCK_S / max(seconds, CLOCK_S / 10)) for seconds in each.messages_s.values()]
        weights += [1 / MEMORY_ERROR] * len(each.peaks_bytes)
        return np.array(weights)

    def _residuals(self, chosen: Sequence[int], z: Vector) -> Vector:
        """Residuals of the chosen observations and of all else, in standard deviations; positive where more is predicted."""
        logs, others = self._logs(chosen, z)
        parts = [(logs[n] - self._measured(number)) * self._weights(number) for n, number in enumerate(chosen)]
        parts.append((others - self._others_measured) * self._other_weights)
        return np.concatenate(parts)

    def _measured(self, number: int) -> Vector:
        """Logarithms of what an observation measured, as `_plan_logs` predicts it."""
        each = self.observations[number]
        seconds = [each.iteration_s, *each.spans_s.values(), *each.messages_s.values()]
        return np.log([*(max(value, 1e-12) for value in seconds), *each.peaks_bytes.values()])

    # --- Derivatives ---

    def _slopes(self, chosen: Sequence[int], z: Vector, anew: bool) -> Vector:
        """Derivatives of the residuals, of which those found near by serve too; wherever they were found, if not `anew`."""
        found = self._derivatives
        if found is None or (anew and np.abs(z - found.at).max() > STALE) or not found.of_plans.keys() >= set(chosen):
            found = self._derivatives = self._differentiated(chosen, z)
        parts = [found.of_plans[number] * self._weights(number)[:, None] for number in chosen]
        return np.concatenate([*parts, found.of_others * self._other_weights[:, None]])

    def _learn(self, chosen: Sequence[int], z: Vector, tried: Vector) -> None:
        """Nothing; lets the derivatives say of the way from z to a point what was found there (Broyden, 1965)."""
        move, found = tried - z, self._derivatives
        if found is None or not (length := float(move @ move)):
            return
        (before, others_before), (there, others_there) = self._logs(chosen, z), self._logs(chosen, tried)
        for n, number in enumerate(chosen):
            slopes = found.of_plans[number]
            slopes += np.outer(there[n] - before[n] - slopes @ move, move) / length
        found.of_others += np.outer(others_there - others_before - found.of_others @ move, move) / length

    def _differentiated(self, chosen: Sequence[int], z: Vector) -> _Slopes:
        """Derivatives of `_logs`, by differences; a constant that others are beside moves all of those."""
        base, base_others = self._logs(chosen, z)
        count = len(self.constants)
        of_plans = {number: np.zeros((len(values), count)) for number, values in zip(chosen, base, strict=True)}
        of_others = np.zeros((len(base_others), count))
        summed = {constant.beside for constant in self.constants if constant.devices is not None}
        for i, constant in enumerate(self.constants):
            step = STEP if z[i] + STEP <= constant.highest else -STEP
            moved = z.copy()
            moved[i] += step
            cluster = applied(self.cluster, self.constants, moved)
            of_others[:, i] = (self._other_logs(cluster) - base_others) / step
            if constant.name in summed:
                continue
            network = Network(cluster)
            for number, values in zip(chosen, base, strict=True):
                if constant.devices is not None and constant.devices.isdisjoint(self.observations[number].plan.devices):
                    continue
                if constant.links is not None and constant.links.isdisjoint(self._links_used[number]):
                    continue
                of_plans[number][:, i] = (self._plan_logs(number, cluster, network) - values) / step
        index = {constant.name: i for i, constant in enumerate(self.constants)}
        for i, constant in enumerate(self.constants):
            if constant.beside in summed and constant.beside is not None:
                # The logarithms of the speeds add up.
                shared = index[constant.beside]
                for slopes in of_plans.values():
                    slopes[:, shared] += slopes[:, i] * (self.constants[shared].own / constant.own)
        return _Slopes(z.copy(), of_plans, of_others)

    # --- Solving ---

    def _solve(self, chosen: Sequence[int], free: NDArray[np.bool_], z: Vector, anew: bool) -> Vector:
        """z of the free constants with the least robust squares of the residuals and squares of z; the others stay.

        Derivatives that no longer lead down are found `anew`, or steps get shorter.

        Levenberg-Marquardt steps within the bounds, the residuals weighted so that they pull as those of the robust loss
        sqrt(1 + (residual / LOOSE)^2) do.
        """
        from scipy.optimize import lsq_linear  # half a second, which only fits shall wait for

        lowest = np.array([constant.lowest for constant in self.constants])[free]
        highest = np.array([constant.highest for constant in self.constants])[free]
        z = z.copy()
        z[free] = np.clip(z[free], lowest, highest)
        residuals = self._residuals(chosen, z)
        loss, damping = _loss(residuals, z), 0.1
        for _ in range(MOST_STEPS):
            weights = (1 + (residuals / LOOSE) ** 2) ** -0.25
            slopes = self._slopes(chosen, z, anew)[:, free]
            eye = np.eye(int(free.sum()))
            matrix = np.concatenate([slopes * weights[:, None], eye, math.sqrt(damping) * eye])
            target = -np.concatenate([residuals * weights, z[free], np.zeros(len(eye))])
            room = np.minimum(lowest - z[free], 0.0), np.maximum(highest - z[free], 1e-9)
            tried = z.copy()
            tried[free] += lsq_linear(matrix, target, bounds=room, tol=1e-8).x
            there = self._residuals(chosen, tried)
            gained = loss - _loss(there, tried)
            if gained > 0:
                self._learn(chosen, z, tried)
                z, residuals, loss = tried, there, loss - gained
            if abs(gained) < 1e-3 * (1 + loss) and damping <= 1:
                break
            if gained > 0:
                damping = damping / 10 if damping > 1e-3 else 0.0
            elif anew and self._derivatives is not None and not np.array_equal(self._derivatives.at, z):
                self._derivatives = None
            elif damping > MOST_DAMPING:
                break
            else:
                damping = max(1.0, 10 * damping)
        return z

    def _left(self, chosen: Sequence[int], free: NDArray[np.bool_], z: Vector, anew: bool) -> Vector:
        """What the data leave of each prior's standard deviation.

        Of a constant beside another it is that of the two together, over what the prior says of its own.
        """
        slopes = self._slopes(chosen, z, anew)[:, free]
        covariance = np.linalg.inv(slopes.T @ slopes + np.eye(slopes.shape[1]))
        places = {int(i): n for n, i in enumerate(np.flatnonzero(free))}
        index = {constant.name: i for i, constant in enumerate(self.constants)}
        found = np.ones(len(self.constants))
        for i, n in places.items():
            constant = self.constants[i]
            combined = np.zeros(len(places))
            combined[n] = 1.0
            if constant.beside is not None and (shared := places.get(index[constant.beside])) is not None:
                combined[shared] = self.constants[index[constant.beside]].own / constant.own
            found[i] = math.sqrt(combined @ covariance @ combined)
        return found


def _loss(residuals: Vector, z: Vector) -> float:
    """What a fit makes least."""
    return float((2 * LOOSE**2 * (np.sqrt(1 + (residuals / LOOSE) ** 2) - 1)).sum() + z @ z)


def link_s(network: Network, measured: LinkMeasurement) -> float:
    """Seconds that a measured message or collective is predicted to take. Raises InputError for members not in the cluster."""
    for name in measured.members:
        network.cluster.device(name)
    if measured.operation == "send":
        transfer = between_lanes(network, measured.members[:1], measured.members[1:], measured.num_bytes, False)
    elif measured.operation == "ring":
        transfer = ring_exchange(network, measured.members, measured.num_bytes, 1)
    else:
        transfer = collective(network, measured.operation, measured.members, measured.num_bytes)
    return network.alone_s(transfer)


# --- Held out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One plan that was held out of a fit: what it took, and what was predicted before and after."""

    observation: Observed
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True)
class Errors:
    """|predicted / measured - 1| over plans: median with its bootstrap interval, 90th percentile, and the largest."""

    median: float
    median_low: float
    median_high: float
    p90: float
    largest: float


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found."""

    cluster: Cluster
    """With the constants fitted on all runs, and what they were fitted on."""
    before: Cluster
    constants: tuple[Told, ...]
    predictions: tuple[Prediction, ...]
    """Of the plans that were held out; none where only benchmarks were given."""
    how: str
    """How plans were held out, in words."""
    errors_before: Errors | None
    errors_after: Errors | None
    spread: float | None
    """The relative standard deviation from run to run of one plan; None where none ran twice."""
    tau: float | None
    """Kendall's, over pairs of held-out plans of one job whose times differ by more than twice the spread; None without any."""
    pairs: int
    best_rank: int | None
    """The place, from 1, of the measured best of the held-out plans in the predicted order."""
    elsewhere: tuple[Errors, Errors] | None = None
    """Of the runs elsewhere before and after, on which it was fitted too; None without any."""


def calibrate(
    cluster: Cluster,
    runs: Sequence[tuple[str, Trace]],
    benches: Sequence[tuple[str, Bench]] = (),
    holdout: float | None = None,
    seed: int = 0,
    several_models: bool = False,
    elsewhere: Sequence[Elsewhere] = (),
) -> Calibrated:
    """The cluster with the constants that runs and benchmarks tell, and runs elsewhere; each has the name of its file.

    The constants are fitted on all runs. How well they predict is told by plans held out of a fit: a fraction `holdout` of them,
    drawn with `seed`, out of one fit to the others; else every plan once, a part at a time. A bench gives its kind's figures and
    record, its stack, and its links' measurements. Raises InputError for runs that are not of the cluster, or not of one model
    where not `several_models` are said, too few of them, and a bench of a kind that the cluster does not have.
    """
    start, links = with_benches(cluster, benches), [one for _, bench in benches for one in bench.links]
    names = tuple(dict.fromkeys([*(name for name, _ in (*runs, *benches)), *(each.name for each in elsewhere)]))
    rng = np.random.default_rng(seed)
    if not runs:
        fitting = Fitting(start, [], links, elsewhere=elsewhere)
        fit = fitting.fit()
        errors = _errors_elsewhere(fitting, cluster, fit.cluster, rng)
        return Calibrated(
            fit.cluster, cluster, fit.constants, (), "no runs, no plans to hold out", None, None, None, None, 0, None, errors
        )
    observations = observed(runs, start, several_models)
    if len(observations) < NEEDED_PLANS:
        raise InputError(
            f"a fit needs runs of at least {NEEDED_PLANS} different plans, but there are {len(runs)} of {len(observations)}: "
            f"run {NEEDED_PLANS - len(observations)} more"
        )
    count = len(observations)
    order = [int(i) for i in rng.permutation(count)]
    fitting = chosen_fitting(start, observations, links, elsewhere, seed)
    fit = fitting.fit()
    if holdout is not None:
        out = order[: min(max(2, round(count * holdout)), count - 2)]
        kept = [observations[i] for i in sorted(set(range(count)) - set(out))]
        apart = chosen_fitting(start, kept, links, elsewhere, seed)
        fitted = apart.fit().cluster
        after = dict(zip(out, _simulated(fitted, [observations[i] for i in out]), strict=True))
        how = f"{len(out)} of {count} plans held out of one fit to the others"
    else:
        after, parts = _cross_validated(fitting, order)
        how = f"each of {count} plans held out once, in {parts} parts"
    before = _simulated(cluster, observations)
    found = tuple(Prediction(observations[i], observations[i].iteration_s, before[i], after[i]) for i in sorted(after))
    errors_before = _errors([one.before_s / one.measured_s - 1 for one in found], rng)
    errors_after = _errors([one.after_s / one.measured_s - 1 for one in found], rng)
    low, high = _interval([one.measured_s / one.after_s for one in found])
    calibration = Calibration(
        fitted_on=names,
        origin=observations[0].origin,
        plans=count,
        error_before=rounded(errors_before.median),
        error_after=rounded(errors_after.median),
        coverage=COVERAGE,
        low=rounded(low),
        high=rounded(high),
        not_told=tuple(told.name for told in fit.constants if not told.told),
    )
    spread = run_spread(observations)
    tau, pairs = _kendall(found, spread or 0.0)
    best = min(found, key=lambda one: one.measured_s)
    rank = sorted(found, key=lambda one: one.after_s).index(best) + 1
    calibrated = replace(fit.cluster, calibration=calibration)
    errors = _errors_elsewhere(fitting, cluster, fit.cluster, rng)
    return Calibrated(
        calibrated, cluster, fit.constants, found, how, errors_before, errors_after, spread, tau, pairs, rank, errors
    )


def with_benches(cluster: Cluster, benches: Sequence[tuple[str, Bench]]) -> Cluster:
    """The cluster with the figures and records of its kinds, and the stack, that benches measured.

    Raises InputError for a bench of a kind that the cluster does not have, for links of devices that it does not have, and for
    benches of compiled layers beside others of layers that are not: the cluster has one stack.
    """
    measured_layers = {bench.compiled: name for name, bench in benches if bench.measurements}
    if len(measured_layers) > 1:
        raise InputError(
            f"{measured_layers[True]} is of compiled layers, {measured_layers[False]} is not: take benches of one sort"
        )
    for name, bench in benches:
        if bench.kind and bench.kind not in (kinds := list(dict.fromkeys(node.gpu.name for node in cluster.nodes))):
            raise InputError(f"{name}: the bench is of a {bench.kind}, but the cluster {cluster.name!r} has {', '.join(kinds)}")
        if bench.gpu_kind is not None:
            measured = bench.gpu_kind

            def with_kind(node: Node, measured: GpuKind = measured) -> Node:
                # It says nothing of precisions that it did not measure; and of a CPU the memory of its whole machine, which its
                # devices share.
                kind = replace(measured, peak_flop_per_s={**node.gpu.peak_flop_per_s, **measured.peak_flop_per_s})
                return replace(node, gpu=replace(kind, memory_bytes=node.gpu.memory_bytes) if is_cpu(measured) else kind)

            nodes = tuple(with_kind(node) if node.gpu.name == bench.kind else node for node in cluster.nodes)
            cluster = replace(cluster, nodes=nodes)
        if bench.stack is not None:
            cluster = replace(cluster, stack=replace(bench.stack, name="own"))
        try:
            for device in (member for one in bench.links for member in one.members):
                cluster.device(device)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    return cluster


def chosen_fitting(
    cluster: Cluster,
    observations: Sequence[Observed],
    links: Sequence[LinkMeasurement] = (),
    elsewhere: Sequence[Elsewhere] = (),
    seed: int = 0,
) -> Fitting:
    """The fitting of the constants that predicts plans held out best, in parts drawn with `seed`.

    Several priors are tried; of measured plans also the constants of efficiency records.
    """
    order = [int(i) for i in np.random.default_rng(seed).permutation(len(observations))]

    def tried(records: bool, priors: Priors, near: Fitting | None = None) -> tuple[float, Fitting]:
        fitting = Fitting(cluster, observations, links, records, elsewhere, priors, near)
        after, _ = _cross_validated(fitting, order)
        error = sum(abs(math.log(seconds / observations[i].iteration_s)) for i, seconds in after.items())
        return error, fitting

    first = tried(False, PRIORS[0])
    best = min((first, *(tried(False, priors, first[1]) for priors in PRIORS[1:])), key=lambda one: one[0])
    if observations[0].origin == "measured":
        best = min(best, tried(True, best[1].priors), key=lambda one: one[0])
    return best[1]


def _cross_validated(fitting: Fitting, order: Sequence[int]) -> tuple[dict[int, float], int]:
    """Predicted seconds of each observation by a fit without it, and in how many parts they were left out."""
    parts = min(MOST_PARTS, len(order))
    found: dict[int, float] = {}
    for part in range(parts):
        out = order[part::parts]
        found.update(zip(out, _simulated(fitting.fit_without(out).cluster, [fitting.observations[i] for i in out]), strict=True))
    return found, parts


def _simulated(cluster: Cluster, observations: Iterable[Observed]) -> list[float]:
    """Simulated seconds of iterations."""
    network = Network(cluster)
    return [simulate(each.plan, cluster, network=network).iteration_s for each in observations]


def _errors_elsewhere(
    fitting: Fitting, before: Cluster, after: Cluster, rng: np.random.Generator
) -> tuple[Errors, Errors] | None:
    """The errors of the runs elsewhere with the kinds of two clusters; None without any."""
    if not fitting.elsewhere:
        return None
    errors = []
    for cluster in (before, after):
        predicted = zip(fitting.elsewhere_s(cluster), fitting.elsewhere, strict=True)
        errors.append(_errors([seconds / each.iteration_s - 1 for seconds, each in predicted], rng))
    return errors[0], errors[1]


def _errors(errors: Sequence[float], rng: np.random.Generator) -> Errors:
    """What some relative errors are like."""
    sizes = np.abs(np.array(errors))
    medians = np.median(rng.choice(sizes, (RESAMPLES, len(sizes))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Errors(float(np.median(sizes)), float(low), float(high), float(np.quantile(sizes, 0.9)), float(sizes.max()))


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which of measured / predicted - 1 the next plan's is expected, from those of plans held out: a normal deviate of
    unknown mean and variance, in logarithms (Student's prediction interval)."""
    from scipy.stats import t as student  # another half

    logs = np.log(ratios)
    wide = float(student.ppf((1 + COVERAGE) / 2, len(logs) - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / len(logs)))
    middle = float(logs.mean())
    return math.expm1(middle - wide), math.expm1(middle + wide)


def _kendall(found: Sequence[Prediction], spread: float) -> tuple[float | None, int]:
    """Kendall's tau of measured and predicted times over pairs of one job that differ by more than twice the spread; how many."""
    signs = []
    for i, one in enumerate(found):
        for other in found[:i]:
            apart = math.log(one.measured_s / other.measured_s)
            if one.observation.plan.job() == other.observation.plan.job() and abs(apart) > 2 * spread:
                signs.append(math.copysign(1, apart) * np.sign(one.after_s - other.after_s))
    return (float(np.mean(signs)), len(signs)) if signs else (None, 0)
