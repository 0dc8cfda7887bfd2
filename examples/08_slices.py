"""Cut sequences in slices where pipelines are deep: they fill and drain sooner, and hold less. Nodes with 10 Gbit/s between them.

python examples/08_slices.py
"""

from dataclasses import replace
from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "hexiscale-mixed-a.yaml")
devices = [f"rtx4090-{node}/{index}" for node in range(2) for index in range(8)]
stages = tuple(Stage((Replica((name,), sequences=1),), ((2 * s, 2 * s + 2),)) for s, name in enumerate(devices))
pipeline = Pipeline(micro_batch=1, micro_batches=32, stages=stages)
whole = Plan(cluster.name, "llama-2-7b", 4096, 32, (pipeline,), schedule="split-1f1b", offload_optimizer=True)

print("slices  tokens  iteration  bubble  fullest GPU")
for slices in (1, 2, 4, 8, 16):
    plan = replace(whole, sequence_slices=slices)
    assert infeasible(plan, cluster) is None
    trace = simulate(plan, cluster)
    bubble, peak_bytes = report(trace, cluster, wall_s=0.0).bubble, max(trace.peak_bytes.values())
    print(f"{slices:6d}  {plan.slice_length:6d}  {trace.iteration_s:7.2f} s  {bubble:6.1%}  {peak_bytes / 2**30:7.1f} GiB")
