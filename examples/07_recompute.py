"""Recompute what costs next to nothing before anything else: one pipeline of eight GPUs, whatever of its layers is kept.

python examples/07_recompute.py
"""

from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.spec.cluster import read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "hexiscale-homogeneous-16.yaml")
stages = [Stage((Replica((f"a100-0/{s}",), sequences=1),), ((5 * s, 5 * s + 5),)) for s in range(8)]

print("recompute                 iteration  peak")
for mode, layers, rest in (
    ("none", None, "none"),
    ("pointwise", None, "none"),  # the results of norms and of the activation
    ("full", 1, "none"),  # the first layer of each stage
    ("full", 1, "pointwise"),
    ("full", None, "none"),
):
    chosen = tuple(stage.recomputing(mode, layers, rest) for stage in stages)
    plan = Plan(cluster.name, "llama-2-13b", 4096, 64, (Pipeline(1, 64, chosen),), offload_optimizer=True)
    assert infeasible(plan, cluster) is None
    trace = simulate(plan, cluster)
    print(f"{chosen[0].recompute_words:25s} {trace.iteration_s:7.2f} s  {max(trace.peak_bytes.values()) / 2**30:.1f} GiB")
