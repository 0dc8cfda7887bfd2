"""Write a planner of your own (one function) and set it beside the others under one judge.

python examples/03_write_a_planner.py
"""

from pathlib import Path

from partition import Search, plan, register
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.transformer import transformer


@register("one-stage-per-node")
def one_stage_per_node(search: Search) -> None:
    """Tries one pipeline whose stages are whole nodes, with layers in proportion to their peak FLOP/s."""
    job, nodes = search.job, search.cluster.nodes
    peaks = [node.gpus * (node.gpu.peak(job.precision) or 0.0) for node in nodes]
    bounds = [round(job.model.layers * sum(peaks[:i]) / sum(peaks)) for i in range(len(nodes) + 1)]
    for recompute in ("none", "selective", "full"):
        stages = tuple(
            Stage((Replica(tuple(f"{node.name}/{i}" for i in range(node.gpus)), 1),), ((start, stop),), recompute)
            for node, start, stop in zip(nodes, bounds, bounds[1:], strict=False)
        )
        pipelines = (Pipeline(micro_batch=1, micro_batches=job.global_batch, stages=stages),)
        sizes = job.sequence_length, job.global_batch
        search.consider(Plan(search.cluster.name, job.model, *sizes, pipelines, job.precision, optimizer=job.optimizer))


cluster = read_cluster(Path(__file__).parent / "clusters" / "hexiscale-mixed-b.yaml")
job = Job(transformer("llama-2-13b"), sequence_length=4096, global_batch=64)
for name in ("one-stage-per-node", "megatron", "flashflex"):
    result = plan(cluster, job, planner=name, seed=0)
    print(f"{name:18s}", f"{result.cost.iteration_s:6.2f} s" if result.cost else result.infeasible)
