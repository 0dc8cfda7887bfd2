"""Set five schedules of one model beside one another: how long an iteration takes, how much of it is bubble, and the memory.

python examples/05_schedules.py
"""

from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import read_cluster
from sim.spec.plan import LayerRange, Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "a100-1024.yaml")
groups = [(device.name,) for device in cluster.devices[:8]]  # a stage on each GPU of the first node
once = [[(4 * s, 4 * s + 4)] for s in range(8)]
twice = [[(2 * s, 2 * s + 2), (16 + 2 * s, 18 + 2 * s)] for s in range(8)]  # the second time in the same order,
folded = [[(2 * s, 2 * s + 2), (30 - 2 * s, 32 - 2 * s)] for s in range(8)]  # or back from the last stage to the first


def plan(schedule: str, layers: list[list[LayerRange]]) -> Plan:
    """Sixteen micro-batches of Llama-2 7B through the eight stages."""
    stages = tuple(Stage((Replica(group, sequences=1),), tuple(own)) for group, own in zip(groups, layers, strict=True))
    pipelines = (Pipeline(micro_batch=1, micro_batches=16, stages=stages),)
    return Plan(cluster.name, "llama-2-7b", 4096, 16, pipelines, schedule=schedule)


for schedule, layers in (("1f1b", once), ("interleaved", twice), ("zb-1p", once), ("zb-2p", once), ("zb-v", folded)):
    chosen = plan(schedule, layers)
    assert infeasible(chosen, cluster) is None
    trace = simulate(chosen, cluster)
    bubble, peak = report(trace, cluster).bubble or 0.0, max(trace.peak_bytes.values()) / 2**30
    print(f"{schedule:12s} iteration {trace.iteration_s:.3f} s, bubble {100 * bubble:4.1f} %, peak {peak:.1f} GiB")
