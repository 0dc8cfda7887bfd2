"""Divide long sequences over context ranks, whose keys and values go round a ring: sixteen A100 on two nodes.

python examples/09_long_sequences.py
"""

from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "a100-1024.yaml")
devices = tuple(device.name for device in cluster.devices[:16])
stage = Stage((Replica(devices, sequences=1),), ((0, 32),), "selective")
pipelines = (Pipeline(micro_batch=1, micro_batches=4, stages=(stage,)),)

print("tensor  context  iteration    MFU  fullest GPU")
for context in (1, 2, 4, 8):
    plan = Plan(
        *(cluster.name, "llama-2-7b", 65536, 4, pipelines), zero_stage=1, sequence_parallel=True, context_parallel=context
    )
    assert infeasible(plan, cluster) is None
    trace = simulate(plan, cluster)
    mfu, peak_bytes = report(trace, cluster, wall_s=0.0).mfu_used, max(trace.peak_bytes.values())
    print(f"{16 // context:6d}  {context:7d}  {trace.iteration_s:7.2f} s  {mfu:5.1%}  {peak_bytes / 2**30:7.1f} GiB")
