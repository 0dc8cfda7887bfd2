"""The accurate judge: a plan costs what its simulated iteration costs."""

from __future__ import annotations

from dataclasses import replace

from sim.cost.feasibility import infeasible
from sim.cost.network import Network
from sim.engine import condensed
from sim.metrics import cost, report, work_s
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Forecast, Infeasible, Verdict
from sim.spec.plan import Plan
from sim.spec.reading import InputError


def simulation(cluster: Cluster, job: Job, seed: int = 0) -> Forecast:
    """The judge that simulates plans of one job on one cluster; without jitter there is nothing to draw with `seed`.

    Raises InputError for the plan of another job.
    """
    network = Network(cluster)  # its paths serve every plan

    def judge(plan: Plan) -> Verdict:
        if plan.job() != job:
            raise InputError(f"the judge was made for the job {job.summary}, but the plan is for {plan.job().summary}")
        reason = infeasible(plan, cluster)
        if isinstance(reason, Infeasible):
            return reason
        found = condensed(plan, network)
        busy_s, iteration_s = work_s(found.part), found.part.iteration_s
        # A verdict does not tell what of the rest is communication.
        lanes = {lane: (busy_s[first], 0.0, max(iteration_s - busy_s[first], 0.0)) for lane, first in found.like.items()}
        return cost(report(replace(found.part, lanes=found.lanes), cluster, lanes=lanes))

    return Forecast(judge)
