"""What the seconds of an iteration count for in a search by another objective than time.

A search compares seconds: of prices, of estimates, of the judge. Where GPUs cost something (`partition.objective`), these are
charged: under `cost` they count times the part of the whole cluster's rent that the GPUs used have; under `energy` they are the
seconds in which the whole cluster, busy, would take as many joules. So what is charged less is the better answer, and all that
compares seconds may compare charged ones. Under `throughput` nothing is charged, and seconds are what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from partition.drafts import Draft, Settings
from partition.objective import Ledger, Objective
from partition.pricing import Pricing
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Plan


class Charge(NamedTuple):
    """What the seconds of a draft's iteration count for: what it takes however long it waits, and a part of its seconds."""

    once_s: float
    share: float

    def charged_s(self, seconds: float) -> float:
        """What these seconds count for."""
        return self.once_s + self.share * seconds

    def plain_s(self, charged_s: float) -> float:
        """The seconds that count for so many; none where waiting costs nothing or less is left than what it takes at once."""
        return max(0.0, charged_s - self.once_s) / self.share if self.share else 0.0


class Charges:
    """The charges of one job's plans on one cluster."""

    def __init__(self, cluster: Cluster, job: Job, objective: Objective, pricing: Pricing) -> None:
        self.aim = objective.name
        self._pricing, self._ledger = pricing, Ledger(cluster)
        kinds = {device.name: device.gpu for device in cluster.devices}
        waiting = {
            "throughput": {},
            "cost": {name: kind.dollars_per_hour or 0.0 for name, kind in kinds.items()},
            "energy": {name: kind.idle_watts for name, kind in kinds.items()},
        }[self.aim]
        working = {name: kind.busy_watts - kind.idle_watts for name, kind in kinds.items()} if self.aim == "energy" else {}
        total = math.fsum(waiting.values()) + math.fsum(working.values())
        self._waiting = {name: part / total for name, part in waiting.items()} if total > 0 else {}
        self._working = {name: part / total for name, part in working.items()} if total > 0 else {}
        self._total = total
        tokens = job.global_batch * job.sequence_length
        self._tokens = tokens
        self._most_s = math.inf if objective.min_tokens_per_s is None else tokens / objective.min_tokens_per_s

    @property
    def any(self) -> bool:
        """Whether anything is charged."""
        return bool(self._waiting)

    def least_s(self, seconds: float, devices: Iterable[str]) -> float:
        """What the seconds of an iteration on some devices count for at least, whatever these do."""
        if not self._waiting or seconds > self._most_s:
            return seconds
        return seconds * math.fsum([self._waiting[name] for name in devices])

    def of_draft(self, draft: Draft, settings: Settings) -> Charge:
        """What the seconds of a draft count for. Under `energy` its GPUs are taken to be busy as its price says."""
        if not self._waiting:
            return Charge(0.0, 1.0)
        once_s = 0.0
        for pipeline in draft if self._working else ():
            course = self._pricing.course(pipeline, settings)
            for part, forward_s, backward_s in zip(pipeline.stages, course.forward_s, course.backward_s, strict=True):
                working = math.fsum([self._working[name] for name in part.devices])
                once_s += working * course.micro_batches * (forward_s + backward_s)
        devices = (name for pipeline in draft for part in pipeline.stages for name in part.devices)
        return Charge(once_s, math.fsum([self._waiting[name] for name in devices]))

    def drafted_s(self, seconds: float, charge: Charge) -> float:
        """What the seconds of a draft count for; all of them, as on the whole cluster, where they miss a constraint."""
        return seconds if seconds > self._most_s else charge.charged_s(seconds)

    def judged_s(self, plan: Plan, cost: Cost) -> float:
        """What the seconds of a verdict count for."""
        if not self._waiting or cost.iteration_s > self._most_s:
            return cost.iteration_s
        if self.aim == "cost":
            return self.least_s(cost.iteration_s, plan.devices)
        return self._ledger.outlay(plan, cost).joules_per_token * self._tokens / self._total
