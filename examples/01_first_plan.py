"""Find a plan for a model on a mixed cluster, and read what it costs.

python examples/01_first_plan.py
"""

from pathlib import Path

from partition import plan
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer

cluster = read_cluster(Path(__file__).parent / "clusters" / "hexiscale-mixed-b.yaml")
job = Job(transformer("llama-2-7b"), sequence_length=4096, global_batch=64)

result = plan(cluster, job, planner="flashflex", seed=0)
assert result.plan is not None and result.cost is not None

for number, pipeline in enumerate(result.plan.pipelines):
    print(f"pipeline {number}: {pipeline.micro_batches} micro-batches of {pipeline.micro_batch}")
    for stage in pipeline.stages:
        (start, stop), *_ = stage.layers
        print(f"  layers {start:2d} to {stop:2d} on {', '.join(stage.devices)}")
print(f"iteration {result.cost.iteration_s:.2f} s, MFU {100 * result.cost.mfu:.1f} % of all {len(cluster.devices)} GPUs")
