"""Measures how many plans a second the fast judge estimates, and how far it is from the simulation where links are contended.

    python benchmarks/estimate_speed.py            # to benchmarks/results/estimate-speed.txt

The plans are drawn as a search draws them: degrees node by node, groups dealt to pipelines, layers and batch divided by speed
and memory, recomputation where memory wants it, and then some random moves. No two are alike. Counted from `Plan` objects, the
memory check included; seconds of the process, on one core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from run import CLUSTERS, HERE, machine
from scipy.stats import kendalltau

from partition.assembly import Assembly
from partition.drafts import Draft, Settings, make_plan
from partition.pricing import Pricing
from sim.cost.estimate import Estimate
from sim.cost.estimates import Estimates
from sim.cost.feasibility import infeasible
from sim.cost.network import Network
from sim.engine import simulate
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan, Stage
from sim.spec.transformer import transformer

# --- Plans -----------------------------------------------------------------------------------------------------------


def drawn_plans(cluster: Cluster, job: Job, seed: int = 0) -> Iterator[Plan]:
    """Plans of a job on a cluster, without end, no two alike; not all of them fit."""
    rng, seen = np.random.default_rng(seed), set()
    assembly = Assembly(cluster, job, Pricing(cluster, job))
    while True:
        settings = Settings(zero_stage=1)
        draft = assembly.draft(_drawn_groups(cluster, job, rng), int(rng.choice([1, 1, 2, 4])), settings)
        if draft is None:
            continue
        for _ in range(int(rng.integers(8))):
            draft = _moved(draft, rng)
            if draft not in seen:
                seen.add(draft)
                yield make_plan(cluster, job, draft, settings)


def _drawn_groups(cluster: Cluster, job: Job, rng: np.random.Generator) -> list[tuple[tuple[str, ...], ...]]:
    """The tensor-parallel groups of each pipeline, in stage order."""
    groups: list[tuple[str, ...]] = []
    usual = int(rng.choice([1, 2, 4, 8]))
    for n in rng.permutation(len(cluster.nodes)):
        node = cluster.nodes[n]
        degree = min(usual if rng.random() < 0.7 else int(rng.choice([1, 2, 4, 8])), node.gpus)
        while job.model.heads % degree or node.gpus % degree:
            degree //= 2
        names = [f"{node.name}/{index}" for index in range(node.gpus)]
        groups += [tuple(names[at : at + degree]) for at in range(0, node.gpus, degree)]
    if rng.random() < 0.3:
        groups = [groups[i] for i in rng.permutation(len(groups))]
    count = int(rng.integers(1, max(2, len(groups) // 2)))
    count = min(count, job.global_batch)
    if rng.random() < 0.5:
        dealt = [groups[p::count] for p in range(count)]
    else:
        bounds = [round(len(groups) * p / count) for p in range(count + 1)]
        dealt = [groups[a:b] for a, b in pairwise(bounds)]
    return [tuple(stages[: job.model.layers]) for stages in dealt]


def _moved(draft: Draft, rng: np.random.Generator) -> Draft:
    """A draft with one thing changed: a layer moved, two groups exchanged, or the micro-batches of two pipelines."""
    pipelines = list(draft)
    what, p, q = rng.integers(3), int(rng.integers(len(draft))), int(rng.integers(len(draft)))
    if what == 0 and len(pipelines[p].stages) > 1:
        pipelines[p] = _shifted(pipelines[p], rng)
    elif what == 1:
        a, b = (int(rng.integers(len(pipelines[i].stages))) for i in (p, q))
        one, other = pipelines[p].stages[a].replicas[0], pipelines[q].stages[b].replicas[0]
        pipelines[p] = _placed(pipelines[p], a, other.devices)
        pipelines[q] = _placed(pipelines[q], b, one.devices)
    elif pipelines[p].micro_batch == pipelines[q].micro_batch and p != q and pipelines[p].micro_batches > 1:
        pipelines[p] = replace(pipelines[p], micro_batches=pipelines[p].micro_batches - 1)
        pipelines[q] = replace(pipelines[q], micro_batches=pipelines[q].micro_batches + 1)
    return tuple(pipelines)


def _shifted(pipeline: Pipeline, rng: np.random.Generator) -> Pipeline:
    """A pipeline with one layer moved from a stage to its neighbour."""
    stages, a = list(pipeline.stages), int(rng.integers(len(pipeline.stages) - 1))
    ((start, cut),), ((_, stop),) = stages[a].layers, stages[a + 1].layers
    cut += 1 if rng.random() < 0.5 else -1
    if not start < cut < stop:
        return pipeline
    for s, layers in ((a, (start, cut)), (a + 1, (cut, stop))):
        full = stages[s].recompute_layers
        held = layers[1] - layers[0]
        stages[s] = replace(stages[s], layers=(layers,), recompute_layers=None if full is None else min(full, held))
    return replace(pipeline, stages=tuple(stages))


def _placed(pipeline: Pipeline, s: int, devices: tuple[str, ...]) -> Pipeline:
    """A pipeline with a stage on other devices."""
    old: Stage = pipeline.stages[s]
    new = replace(old, replicas=(replace(old.replicas[0], devices=devices),))
    return replace(pipeline, stages=(*pipeline.stages[:s], new, *pipeline.stages[s + 1 :]))


# --- Speed -----------------------------------------------------------------------------------------------------------

RUNS = 4


def speed_line(cluster: Cluster, job: Job, before: int, counted: int, worth_s: float = 0.0) -> str:
    """Plans a second: from the first on, and of `counted` plans that come after `before` others.

    Seconds are those of the process, so that others on the machine count only as far as they take its caches and its clock,
    and the least of some runs, each by an Estimates that has seen nothing.
    """
    draw = drawn_plans(cluster, job)
    plans = [next(draw) for _ in range(before + counted)]
    Estimates(cluster, job).many(plans[:1])  # loads the compiled arithmetic

    def run() -> tuple[float, float, float, int]:
        """Seconds of the first plans, of the others, of verdicts on those of them that fit, and how many these are."""
        estimates = Estimates(cluster, job)
        began = time.process_time()
        estimates.many(plans[:before], worth_s)
        cold = time.process_time()
        seconds = estimates.many(plans[before:], worth_s)
        warm = time.process_time()
        fitting = [plan for plan, iteration_s in zip(plans[before:], seconds, strict=True) if math.isfinite(iteration_s)]
        before_verdicts = time.process_time()
        for plan in fitting:
            estimates.judge(plan)
        return cold - began, warm - cold, time.process_time() - before_verdicts, len(fitting)

    cold_s, warm_s, judging_s, fitting = (min(column) for column in zip(*(run() for _ in range(RUNS)), strict=True))
    lanes = sum(len(pipeline.stages) for plan in plans[before:] for pipeline in plan.pipelines) / counted
    return (
        f"{len(cluster.devices):6d} {job.model.name:12s} {before:7d} {before / cold_s:13,.0f} {counted:8d} "
        f"{counted / warm_s:13,.0f} {fitting / judging_s:13,.0f} {100 * fitting / counted:6.0f} {lanes:7.1f}"
    )


def speed() -> Iterator[str]:
    """The table of plans judged a second."""
    yield "Plans a second on one core, from Plan objects, memory check included; all plans differ. First: the first plans that a"
    yield "new Estimates sees; then: others after them; verdicts: once more those of them that fit, with all measures. Messages"
    yield "that meet are slowed by what stretches of time show, or followed one by one; no two pipelines are alike. The best of"
    yield f"{RUNS} runs, as others on the machine slow them."
    yield ""
    yield "  GPUs model          first      plans/s     then       plans/s    verdicts/s  fit %   lanes  messages"
    mixed, equal = read_cluster(CLUSTERS / "hexiscale-mixed-b.yaml"), read_cluster(CLUSTERS / "a100-1024.yaml")
    small, large = (Job(transformer("llama-2-13b"), 4096, batch) for batch in (256, 512))
    for how, worth_s in (("slowed", 0.0), ("followed", math.inf)):
        yield speed_line(mixed, Job(transformer("llama-2-7b"), 4096, 256), 2000, 1000, worth_s) + f"  {how}"
        yield speed_line(mixed, small, 2000, 1000, worth_s) + f"  {how}"
        yield speed_line(_mixed_256(equal), large, 2000, 300, worth_s) + f"  {how}"
        yield speed_line(_first_nodes(equal, 32), large, 2000, 300, worth_s) + f"  {how}"


def _first_nodes(cluster: Cluster, count: int) -> Cluster:
    """The cluster of some of its nodes."""
    return replace(cluster, nodes=cluster.nodes[:count])


def _mixed_256(cluster: Cluster) -> Cluster:
    """Of 32 nodes, every fourth has slower GPUs behind one card."""
    other = read_cluster(CLUSTERS / "hexiscale-mixed-b.yaml")
    slow = next(node for node in other.nodes if node.gpus == 8)
    nic = replace(cluster.nodes[0].nic, count=1) if cluster.nodes[0].nic is not None else None
    nodes = [
        replace(slow, name=f"slow-{i}", nic=nic) if i % 4 == 3 else node for i, node in enumerate(_first_nodes(cluster, 32).nodes)
    ]
    return replace(cluster, name="mixed-256", nodes=tuple(nodes))


# --- Errors ----------------------------------------------------------------------------------------------------------


def error_lines(name: str, cluster: Cluster, job: Job, count: int) -> Iterator[str]:
    """How far drawn plans that fit are from the simulation: here, and by `Estimate`, which takes one plan after the other."""
    estimates, network = Estimates(cluster, job), Network(cluster)
    fitting = (plan for plan in drawn_plans(cluster, job, seed=1) if infeasible(plan, cluster) is None)
    plans = [next(fitting) for _ in range(count)]
    truth = np.array([simulate(plan, cluster, network=network).iteration_s for plan in plans])
    slow = np.array([Estimate(plan, cluster, network).iteration_s() for plan in plans])
    for what, found in (("estimates", estimates.many(plans)), ("followed", estimates.many(plans, math.inf)), ("estimate", slow)):
        error = found / truth - 1
        size = np.abs(error)
        yield (
            f"{name:16s} {job.model.name:12s} {what:10s} {count:5d} {kendalltau(found, truth).statistic:8.3f} "
            f"{100 * error.mean():+8.2f} {100 * size.mean():8.2f} {100 * np.quantile(size, 0.9):8.2f} {100 * size.max():8.2f}"
        )


def errors() -> Iterator[str]:
    """The table of errors on clusters with one slow card a node."""
    yield "Iteration seconds against the simulation, of drawn plans that fit; errors in per cent. estimates: those of the table"
    yield "above, followed: with messages followed; estimate: `Estimate`, one plan at a time."
    yield ""
    yield "cluster          model        judge      plans      tau   mean %  |mean| %  |p90| %  |max| %"
    for name, card in (("hexiscale-mixed-a", 10), ("hexiscale-mixed-b", 10), ("hexiscale-mixed-b", 4), ("hexiscale-mixed-c", 4)):
        cluster = read_cluster(CLUSTERS / f"{name}.yaml")
        nodes = tuple(
            replace(node, nic=replace(node.nic, bandwidth_bytes_per_s=card * 1e9 / 8)) for node in cluster.nodes if node.nic
        )
        job = Job(transformer("llama-2-7b"), 4096, 64)
        yield from error_lines(f"{name[10:]}, {card} Gb", replace(cluster, nodes=nodes), job, 60)


def main() -> None:
    """Writes the tables."""
    lines: list[str] = []
    for rows in (speed(), errors()):
        for line in rows:
            print(line, flush=True)
            lines.append(line)
        lines.append("")
    (HERE / "results" / "estimate-speed.txt").write_text(f"{machine()}\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
