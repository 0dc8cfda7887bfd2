"""Simulate a plan written by hand, and find out what its devices and links did.

python examples/02_read_a_trace.py
"""

from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "hexiscale-mixed-b.yaml")


def stage(node: str, layers: tuple[int, int]) -> Stage:
    """All eight GPUs of a node as one tensor-parallel group."""
    return Stage((Replica(tuple(f"{node}/{i}" for i in range(8)), sequences=1),), (layers,), recompute="selective")


pipeline = Pipeline(micro_batch=1, micro_batches=32, stages=(stage("rtx4090", (0, 12)), stage("a100", (12, 40))))
plan = Plan(cluster.name, "llama-2-13b", sequence_length=4096, global_batch=32, pipelines=(pipeline,), sequence_parallel=True)

print("can it run?", infeasible(plan, cluster) or "yes")
trace = simulate(plan, cluster)
summary = report(trace, cluster)
print(f"iteration {trace.iteration_s:.2f} s, bubble {100 * summary.bubble:.1f} %")
print(f"MFU of the GPUs used {100 * summary.mfu_used:.1f} %, of the whole cluster {100 * summary.mfu:.1f} %")
for use in summary.devices:
    if use.device in ("rtx4090/0", "a100/0"):
        peak = trace.peak_bytes[use.device] / 2**30
        print(f"{use.device:10s} computes {use.busy_s:6.2f} s, communicates {use.communication_s:5.2f} s, peak {peak:.1f} GiB")
for link in sorted(summary.links, key=lambda link: -link.utilisation)[:3]:
    print(f"link {link.name:22s} {100 * link.utilisation:5.1f} % used")
