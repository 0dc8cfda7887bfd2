"""Divide the experts of a mixture: whole ones or columns of each on two tensor ranks, of 32 A100 on four nodes.

python examples/10_experts.py
"""

from dataclasses import replace
from pathlib import Path

from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage

cluster = read_cluster(Path(__file__).parent / "clusters" / "a100-1024.yaml")
once = replace(cluster, stack=replace(cluster.stack, node_dispatch=True))  # software that sends a token to a node once
devices = [device.name for device in cluster.devices[:32]]
stages = [Stage((Replica((devices[i], devices[i + 1]), sequences=1),), ((0, 48),)) for i in range(0, 32, 2)]
pipelines = tuple(Pipeline(micro_batch=1, micro_batches=8, stages=(stage,)) for stage in stages)

print("experts  over  once a node  iteration    MFU  fullest GPU")
for whole, degree, world in (
    *((False, 4, cluster), (False, 16, cluster), (False, 16, once)),
    *((True, 8, cluster), (True, 32, cluster), (True, 32, once)),
):
    plan = Plan(
        *(cluster.name, "qwen3-30b-a3b", 4096, 128, pipelines),
        sequence_parallel=True,
        expert_parallel=degree,
        expert_tensor_parallel=1 if whole else None,
    )
    assert infeasible(plan, world) is None
    trace = simulate(plan, world)
    mfu, peak_bytes = report(trace, world, wall_s=0.0).mfu_used, max(trace.peak_bytes.values())
    experts, sent = "whole" if whole else "columns", "yes" if world is once else "no"
    print(f"{experts:7s}  {degree:4d}  {sent:>11s}  {trace.iteration_s:7.2f} s  {mfu:5.1%}  {peak_bytes / 2**30:7.1f} GiB")
