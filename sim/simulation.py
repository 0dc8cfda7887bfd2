"""The accurate judge: a plan costs what its simulated iteration costs."""

from __future__ import annotations

from sim.cost.feasibility import infeasible
from sim.cost.network import Network
from sim.engine import simulate
from sim.metrics import cost, report
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Forecast, Infeasible, Verdict
from sim.spec.plan import Plan
from sim.spec.reading import InputError


def simulation(cluster: Cluster, job: Job, seed: int = 0) -> Forecast:
    """The judge that simulates plans of one job on one cluster. Raises InputError for the plan of another job."""
    network = Network(cluster)  # its paths serve every plan

    def judge(plan: Plan) -> Verdict:
        if plan.job() != job:
            raise InputError(f"the judge was made for the job {job.summary}, but the plan is for {plan.job().summary}")
        reason = infeasible(plan, cluster)
        if isinstance(reason, Infeasible):
            return reason
        return cost(report(simulate(plan, cluster, seed=seed, network=network), cluster))

    return Forecast(judge)
