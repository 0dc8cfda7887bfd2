"""Why the plans that a search did not choose lost: their iteration beside the best one's, and what the difference is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partition.bound import Bound, gap
from partition.objective import Ledger, Objective, Outlay
from sim.engine import simulate
from sim.metrics import cost, report
from sim.spec.cluster import Cluster
from sim.spec.judge import Cost
from sim.spec.plan import Plan
from sim.spec.trace import Trace

MOST_ALTERNATIVES = 3
"""So many are simulated and shown."""

CAUSES = ("compute", "host", "bubble", "network", "recompute")

NO_BOUND = Bound(iteration_s=0.0, compute_s=0.0, host_s=0.0, bubble_s=0.0, network_s=0.0, recompute_s=0.0)


@dataclass(frozen=True)
class Alternative:
    """A plan of another shape that was judged, and the cause that it loses most by, as it is simulated.

    `cause` is one of CAUSES, with the seconds of an iteration that it spends more on it than the best plan; or "rent" or "power",
    with None, where it loses by the GPUs it uses rather than by its time; or None where the simulation does not see it lose.
    """

    plan: Plan
    outlay: Outlay
    cause: str | None
    cause_s: float | None


def seconds_by_cause(trace: Trace, cluster: Cluster) -> dict[str, float]:
    """Seconds of the iteration by CAUSES, which sum to it: in the mean over the GPUs that the plan uses, each counting as much
    as the share of the work that it could do. What belongs to which cause is said by `partition.bound`.
    """
    parts = gap(NO_BOUND, trace, cluster)
    # It counts the GPUs that are left out as losing by compute. Of a trace in which nothing happens, all that is used is bubble.
    used = gap(NO_BOUND, replace(trace, spans=()), cluster).bubble
    of_used = replace(parts, compute=parts.compute - (1 - used))
    return {cause: getattr(of_used, cause) / used * trace.iteration_s for cause in CAUSES}


def alternatives(
    best: Trace, others: Sequence[tuple[Plan, Cost]], cluster: Cluster, objective: Objective, seed: int = 0
) -> list[Alternative]:
    """The first few of the other plans, simulated, with the cause that each loses most by beside the best plan's trace."""
    ledger = Ledger(cluster)
    chosen = ledger.outlay(best.plan, cost(report(best, cluster)))
    own_s = seconds_by_cause(best, cluster)
    shown = []
    for plan, _ in others[:MOST_ALTERNATIVES]:
        trace = simulate(plan, cluster, seed=seed)
        outlay = ledger.outlay(plan, cost(report(trace, cluster)))
        more_s = {cause: spent_s - own_s[cause] for cause, spent_s in seconds_by_cause(trace, cluster).items()}
        cause = max(CAUSES, key=lambda name: more_s[name])
        times = outlay.iteration_s / chosen.iteration_s
        loss = objective.rank(outlay)[0] / objective.rank(chosen)[0] if objective.rank(chosen)[0] else 1.0
        if loss <= 1:
            shown.append(Alternative(plan, outlay, None, None))
        elif objective.name != "throughput" and loss / times > times:  # what its GPUs cost each second counts for more
            shown.append(Alternative(plan, outlay, "rent" if objective.name == "cost" else "power", None))
        else:
            shown.append(Alternative(plan, outlay, cause, more_s[cause]))
    return shown
