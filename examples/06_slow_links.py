"""Hold more micro-batches where messages are slow, and nowhere else: two nodes with 10 Gbit/s between them.

python examples/06_slow_links.py
"""

from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.spec.cluster import read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "hexiscale-mixed-a.yaml")
devices = [f"rtx4090-{node}/{index}" for node in range(2) for index in range(8)]  # the message in the middle leaves its node
stages = tuple(Stage((Replica((name,), sequences=1),), ((2 * s, 2 * s + 2),), "full", 1) for s, name in enumerate(devices))
pipeline = Pipeline(micro_batch=1, micro_batches=64, stages=stages)
one_more = pipeline.holding([*range(17, 9, -1), *range(8, 0, -1)])  # 1F1B holds 16, 15, ..., 2, 1

print("schedule     the first stage holds  iteration  peak")
for schedule, chosen in (("1f1b", pipeline), ("1f1b", one_more), ("split-1f1b", one_more), ("eager-1f1b", pipeline)):
    plan = Plan(cluster.name, "llama-2-7b", 4096, 64, (chosen,), schedule=schedule, offload_optimizer=True)
    assert infeasible(plan, cluster) is None
    trace = simulate(plan, cluster)
    held = 31 if schedule == "eager-1f1b" else chosen.in_flight[0]
    print(f"{schedule:12s} {held:21d}  {trace.iteration_s:7.2f} s  {max(trace.peak_bytes.values()) / 2**30:.1f} GiB")
