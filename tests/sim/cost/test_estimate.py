"""The estimate against the simulation where nothing is contended, closed forms, and sharing worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim.cost.estimate
import sim.engine
import sim.prepared
from sim.cost.estimate import Estimate, estimation
from sim.engine import simulate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node
from sim.spec.counts import embedding_parameters, head_parameters, layer_parameters
from sim.spec.gpu import gpu_kind
from sim.spec.judge import Cost, Infeasible
from sim.spec.plan import LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.program import Compute, Lane, OptimizerStep
from sim.spec.reading import InputError
from sim.spec.stack import Stack, stack
from sim.spec.transformer import Moe, Transformer, transformer
from tests.strategies import worlds
from tests.worlds import GivenCost, ethernet_cluster, plan, simulate_every_lane, stage

SCHEDULES = ("gpipe", "1f1b", "split-1f1b", "eager-1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v")


class Given(GivenCost):
    """The stand-in with a stack that changes nothing."""

    stack = Stack("given")

    def __call__(self, plan: Plan, cluster: Cluster, *constants: object) -> Given:
        return self

    def with_constants(self, *constants: object) -> Given:
        return self

    def shape(self, lane: Lane, instruction: Compute | OptimizerStep) -> object:
        return type(instruction), getattr(instruction, "layers", None)


@pytest.fixture
def every_device_takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """A function that lets every layer take these seconds, forward and backward, on every device of a tiny cluster."""

    def fix(forward_s: float, backward_s: float) -> None:
        names = [f"n{node}/{index}" for node in range(8) for index in range(8)]
        cost = Given(dict.fromkeys(names, forward_s), dict.fromkeys(names, backward_s))
        monkeypatch.setattr(sim.cost.estimate, "ComputeCost", cost)

    return fix


def one_layer_pipeline(depth: int) -> list[Stage]:
    """Stages of one layer, one per node."""
    return [stage(f"n{s}/0", (s, s + 1)) for s in range(depth)]


# --- Agreement -------------------------------------------------------------------------------------------------------


def nearly(estimate: Estimate) -> float:
    """How far, as a fraction, an estimate may be from the simulation: where lanes that are one may have met different others.

    Of 2,015 worlds in which transfers met, one kind was wrong, by 0.03 %.
    """
    return 1e-2 if estimate.contended and any(len(lanes) > 1 for lanes in estimate.alike) else 1e-9


@given(world=worlds())
def test_it_is_the_simulation(world: tuple[Cluster, Plan]) -> None:
    cluster, plan = world
    estimate = Estimate(plan, cluster)
    estimated_s = estimate.iteration_s()
    assert estimated_s == pytest.approx(simulate_every_lane(plan, cluster).iteration_s, rel=nearly(estimate))


@given(world=worlds())
def test_the_causes_sum_to_the_iteration(world: tuple[Cluster, Plan]) -> None:
    cluster, plan = world
    estimate = Estimate(plan, cluster)
    causes = estimate.breakdown()
    assert sum(causes.values()) == pytest.approx(estimate.iteration_s(), rel=1e-9)
    assert all(seconds >= -1e-9 * estimate.iteration_s() for seconds in causes.values())


def server_cluster(nodes: int, kind: str = "A100-80GB-SXM", nics: int = 8, stack: Stack | None = None) -> Cluster:
    """Nodes of eight GPUs behind an NVSwitch."""
    gpu = gpu_kind(kind)
    node = Node("n", gpu, 8, Intra("nvswitch", gpu.nvlink_bytes_per_s or 1e11, latency_s=3e-6), Nic("infiniband", 25e9, nics))
    made = tuple(replace(node, name=f"n{i}") for i in range(nodes))
    return Cluster("servers", made, Fabric(latency_s=5e-6), stack=stack or Stack("plain"))


def symmetric_plan(cluster: Cluster, model: Transformer, tensor: int, depth: int, micro_batches: int, **changes: object) -> Plan:
    """Pipelines of equal stages over all the cluster's GPUs; the pipelines' devices of one stage stand beside each other."""
    names = [device.name for device in cluster.devices]
    schedule = changes.get("schedule", "1f1b")
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    copies = len(names) // (tensor * depth)
    bounds = [round(model.layers * i / (depth * chunks)) for i in range(depth * chunks + 1)]

    def layers(s: int) -> tuple[LayerRange, ...]:
        visits = [s, 2 * depth - 1 - s] if schedule == "zb-v" else [s + depth * chunk for chunk in range(chunks)]
        return tuple((bounds[v], bounds[v + 1]) for v in visits)

    pipelines = []
    for copy in range(copies):
        at = [(s * copies + copy) * tensor for s in range(depth)]
        stages = [Stage((Replica(tuple(names[i : i + tensor]), 1),), layers(s)) for s, i in enumerate(at)]
        pipelines.append(Pipeline(1, micro_batches, tuple(stages)))
    values: dict[str, object] = {
        "cluster": cluster.name,
        "model": model,
        "sequence_length": 512,
        "global_batch": micro_batches * copies,
        "pipelines": tuple(pipelines),
        "precision": "bf16",
        **changes,
    }
    return Plan(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_of_long_schedules_it_lays_out_a_part_and_agrees(schedule: str, zero_stage: int) -> None:
    cluster = server_cluster(2)
    long = symmetric_plan(cluster, transformer("gpt3-1.3b"), 2, 4, 96, schedule=schedule, zero_stage=zero_stage)
    estimate = Estimate(long, cluster)
    assert estimate.iteration_s() == pytest.approx(simulate(long, cluster).iteration_s, rel=1e-3)
    if schedule in ("1f1b", "interleaved"):
        assert estimate.laid_out < 96


@pytest.mark.parametrize(
    "changes",
    [
        {"context_parallel": 2},
        {"context_parallel": 4, "sequence_parallel": True},
        {"expert_parallel": 2},
        {"expert_parallel": 4, "expert_tensor_parallel": 1, "sequence_parallel": True},
        {"expert_parallel": 8, "expert_tensor_parallel": 1, "sequence_parallel": True},
        {"zero_stage": 3, "shard_group": 2},
        {"offload_optimizer": True, "zero_stage": 1},
    ],
)
def test_context_experts_shard_groups_and_offloading_are_as_in_the_simulation(changes: dict[str, object]) -> None:
    cluster = server_cluster(2, stack=Stack("some", tensor_overlap=0.3, collective_scale=0.8))
    model = Transformer("moe", 8, 1024, 4096, 16, 512, experts=Moe(8, 2, 1024))
    chosen = symmetric_plan(cluster, model, 4, 2, 4, **changes)
    assert Estimate(chosen, cluster).iteration_s() == pytest.approx(simulate(chosen, cluster).iteration_s, rel=1e-3)


def test_another_stack_may_send_tokens_otherwise() -> None:
    cluster, model = server_cluster(2), Transformer("moe", 8, 1024, 4096, 16, 512, experts=Moe(16, 4, 1024))
    chosen = symmetric_plan(cluster, model, 1, 1, 2, expert_parallel=16)
    once = replace(cluster.stack, node_dispatch=True)
    other = Estimate(chosen, replace(cluster, stack=once)).iteration_s()
    assert Estimate(chosen, cluster).iteration_s(stack=once) == other < 0.99 * Estimate(chosen, cluster).iteration_s()


@pytest.mark.parametrize(
    ("tensor_parallel", "context_parallel", "nics", "shard_group", "zero_stage"),
    [(1, 1, 1, 3, 2), (1, 1, 1, 3, 3), (1, 1, 1, 6, 1), (2, 1, 8, 3, 2), (2, 2, 1, 3, 2), (1, 1, 1, 8, 2)],
)
def test_shard_groups_that_part_nodes_unlike_are_as_in_the_simulation(
    tensor_parallel: int, context_parallel: int, nics: int, shard_group: int, zero_stage: int
) -> None:
    # Of three nodes of eight, groups of three lie on one, on two, and on two: no node stands for another.
    cluster, model = server_cluster(3, nics=nics), replace(transformer("gpt3-125m"), layers=4)
    changes = {"context_parallel": context_parallel, "shard_group": shard_group, "zero_stage": zero_stage}
    chosen = symmetric_plan(cluster, model, tensor_parallel, 1, 2, **changes)
    assert Estimate(chosen, cluster).iteration_s() == pytest.approx(simulate_every_lane(chosen, cluster).iteration_s, rel=1e-9)


def test_the_verdict_is_that_of_the_simulation() -> None:
    cluster = server_cluster(2)
    chosen = symmetric_plan(cluster, transformer("gpt3-1.3b"), 8, 2, 40, zero_stage=1)
    estimated, simulated = (judge(cluster, chosen.job())(chosen) for judge in (estimation, simulation))
    assert isinstance(estimated, Cost) and isinstance(simulated, Cost)
    assert estimated.peak_bytes == simulated.peak_bytes
    for measure in ("iteration_s", "tokens_per_s", "mfu", "mfu_used", "hfu", "bubble", "energy_j", "dollars"):
        assert getattr(estimated, measure) == pytest.approx(getattr(simulated, measure), rel=1e-9), measure


def test_plans_come_in_the_order_of_the_simulation() -> None:
    cluster, model = server_cluster(2, nics=2), transformer("gpt3-1.3b")
    plans = [
        symmetric_plan(cluster, model, t, p, 32 // (16 // (t * p))) for t, p in ((1, 1), (1, 4), (2, 2), (4, 4), (8, 1), (8, 2))
    ]
    estimated = [Estimate(one, cluster).iteration_s() for one in plans]
    simulated = [simulate(one, cluster).iteration_s for one in plans]
    places = range(len(plans))
    assert sorted(places, key=estimated.__getitem__) == sorted(places, key=simulated.__getitem__)


# --- Closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(depth=st.integers(1, 6), micro_batches=st.integers(1, 80), f=st.floats(0.1, 3), b=st.floats(0.1, 3))
def test_equal_stages_take_m_plus_p_minus_1_rounds(schedule: str, depth: int, micro_batches: int, f: float, b: float) -> None:
    names = [f"n{i}/0" for i in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.cost.estimate, "ComputeCost", Given(dict.fromkeys(names, f), dict.fromkeys(names, b)))
        chosen = plan([one_layer_pipeline(depth)], micro_batches, schedule=schedule)
        estimate = Estimate(chosen, ethernet_cluster([1] * max(depth, 2), bytes_per_s=1e30))
        # Huang et al. (2019), Narayanan et al. (2021): the bubble is (p-1)/(m+p-1) of the iteration.
        assert estimate.iteration_s() == pytest.approx((micro_batches + depth - 1) * (f + b), rel=1e-12)


@given(slow=st.integers(0, 3), micro_batches=st.integers(40, 400), more=st.floats(0.001, 2))
def test_a_stage_that_is_slower_sets_the_pace_however_long_it_takes_to_be_felt(
    slow: int, micro_batches: int, more: float
) -> None:
    # A stage that is slower by a thousandth is waited for only after hundreds of micro-batches: until then nothing has settled.
    names = [f"n{i}/0" for i in range(4)]
    forward, backward = dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0)
    forward[names[slow]] += more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.cost.estimate, "ComputeCost", Given(forward, backward))
        patch.setattr(sim.prepared, "ComputeCost", Given(forward, backward))
        chosen = plan([one_layer_pipeline(4)], micro_batches)
        cluster = ethernet_cluster([1] * 4, bytes_per_s=1e30)
        assert Estimate(chosen, cluster).iteration_s() == pytest.approx(simulate(chosen, cluster).iteration_s, rel=1e-9)


@pytest.mark.parametrize("software", ["megatron", "nanotron", "nemo"])
@pytest.mark.parametrize(("tensor_parallel", "stages"), [(4, 2), (2, 2)])
def test_messages_that_meet_collectives_beside_the_computation_are_slowed(
    software: str, tensor_parallel: int, stages: int
) -> None:
    # A message leaves as the next computation begins, and with it the part of its collectives that goes on beside it, over the
    # same port. The computation is long enough for both, the message takes longer.
    cluster = Cluster("box", (Node("n", gpu_kind("A100-80GB-SXM"), 8, Intra("nvswitch", 300e9)),), stack=stack(software))
    llama = transformer("llama-2-7b")
    cuts = [(s * llama.layers // stages, (s + 1) * llama.layers // stages) for s in range(stages)]

    def pipeline(first: int) -> Pipeline:
        devices = [f"n/{first + i}" for i in range(tensor_parallel * stages)]
        parts = [tuple(devices[s * tensor_parallel : (s + 1) * tensor_parallel]) for s in range(stages)]
        return Pipeline(2, 6, tuple(Stage((Replica(part, 2),), (cut,)) for part, cut in zip(parts, cuts, strict=True)))

    pipelines = tuple(pipeline(first) for first in range(0, 8, tensor_parallel * stages))
    chosen = Plan("box", llama, 2048, 12 * len(pipelines), pipelines, precision="bf16", sequence_parallel=True, zero_stage=0)
    estimate = Estimate(chosen, cluster)
    assert estimate.iteration_s() == pytest.approx(simulate_every_lane(chosen, cluster).iteration_s, rel=1e-9)
    assert estimate.contended


# --- Sharing by hand -------------------------------------------------------------------------------------------------


def test_messages_of_parallel_pipelines_divide_their_card(every_device_takes: Callable[[float, float], None]) -> None:
    # Two pipelines from n0 to n1: 8 bytes each at 16 bytes/s together take 1 s. F [0, 1], sent [1, 2], F [2, 3], B [3, 5],
    # sent [5, 6], B [6, 8]; then the gradients are summed inside the nodes, in no time.
    every_device_takes(1.0, 2.0)
    pipelines = [[stage(f"n0/{i}", (0, 1)), stage(f"n1/{i}", (1, 2))] for i in range(2)]
    estimate = Estimate(plan(pipelines, 1), ethernet_cluster([2, 2], bytes_per_s=16))
    assert estimate.iteration_s() == pytest.approx(8.0, rel=1e-9)
    assert not estimate.contended  # those that stand for one another are known to share


def test_messages_that_overlap_divide_their_card_while_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # As above, but messages take 2 s, and n0/1 takes 2 s forward. The first pipeline sends from 1 s on, alone until 2, with half
    # of the card until 4; the second from 2 to 5. F [4, 5] and [5, 6], B [5, 7] and [6, 8], sent [7, 10] and [8, 11], B [10, 12]
    # and [11, 13].
    names = ("n0/0", "n0/1", "n1/0", "n1/1")
    cost = Given(dict.fromkeys(names, 1.0) | {"n0/1": 2.0}, dict.fromkeys(names, 2.0))
    monkeypatch.setattr(sim.cost.estimate, "ComputeCost", cost)
    cluster = replace(ethernet_cluster([2, 2], bytes_per_s=4), device_speeds=(("n0/1", 0.5),))
    estimate = Estimate(plan([[stage(f"n0/{i}", (0, 1)), stage(f"n1/{i}", (1, 2))] for i in range(2)], 1), cluster)
    assert estimate.iteration_s() == pytest.approx(13.0, rel=1e-9)
    assert estimate.contended


def test_reductions_of_two_stages_that_share_a_card_take_turns(every_device_takes: Callable[[float, float], None]) -> None:
    # Two pipelines, each with both stages on a node of its own. The second stage's gradients begin to be summed at 3 s, as its
    # backward ends, the first's at 4 s. Each direction of a card carries, of a layer and an end stage's embedding or head in
    # fp32, n bytes of either stage: with 2 n / 10 bytes/s in all it is never idle from 3 s on until 3 + 2 n / 10.
    every_device_takes(1.0, 1.0)
    pipelines = [[stage(f"n{n}/0", (0, 1)), stage(f"n{n}/1", (1, 2))] for n in range(2)]
    chosen = plan(pipelines, 1, zero_stage=0, overlap_gradients=False)
    num_bytes = 4 * (layer_parameters(chosen.transformer) + 8 * 4)
    assert embedding_parameters(chosen.transformer) == head_parameters(chosen.transformer) - 4 == 8 * 4
    estimate = Estimate(chosen, ethernet_cluster([2, 2], bytes_per_s=10))
    assert estimate.iteration_s() == pytest.approx(3 + (2 * num_bytes + 4 * 4) / 10, rel=0.02)
    assert estimate.contended


# --- Other constants -------------------------------------------------------------------------------------------------


def test_given_constants_are_those_of_a_cluster_that_has_them() -> None:
    cluster = server_cluster(2)
    (kind,) = {device.gpu for device in cluster.devices}
    slow = replace(kind, efficiency=replace(kind.efficiency, matmul_fraction=0.3, launch_s=2e-5))
    stack = Stack("other", matmul_scale=0.9, tensor_overlap=0.4, collective_scale=0.7, overlap_slowdown=0.1, step_s=0.01)
    other = replace(cluster, nodes=tuple(replace(node, gpu=slow) for node in cluster.nodes), stack=stack)
    chosen = symmetric_plan(cluster, transformer("gpt3-1.3b"), 4, 2, 8, zero_stage=1)
    estimate = Estimate(chosen, cluster)
    before = estimate.iteration_s()
    assert estimate.iteration_s({kind.name: slow}, stack) == pytest.approx(Estimate(chosen, other).iteration_s(), rel=1e-9)
    assert estimate.iteration_s() == before  # what is given changes nothing for those who ask next
    assert estimate.breakdown(stack=stack)["step"] == 0.01


def test_the_causes_of_one_lane_are_its_computation_alone(every_device_takes: Callable[[float, float], None]) -> None:
    every_device_takes(1.0, 2.0)
    causes = Estimate(plan([[stage("n0/0", (0, 1))]], 5), ethernet_cluster([1, 1], bytes_per_s=1)).breakdown()
    assert {cause: seconds for cause, seconds in causes.items() if seconds} == {"forward": 5.0, "backward": 10.0}


# --- Speed, order, refusals ------------------------------------------------------------------------------------------


def test_pipelines_that_cannot_differ_are_one() -> None:
    cluster, model = server_cluster(16), transformer("gpt3-1.3b")
    groups = Estimate(symmetric_plan(cluster, model, 2, 4, 8), cluster).alike
    assert [len(group) for group in groups] == [16] * 4
    assert all(isinstance(lane, Lane) for group in groups for lane in group)


def test_pipelines_of_other_kinds_are_not_one() -> None:
    fast, slow = server_cluster(2), server_cluster(2, "V100-32GB-SXM")
    mixed = replace(fast, nodes=(fast.nodes[0], slow.nodes[1]))
    chosen = symmetric_plan(mixed, transformer("gpt3-1.3b"), 8, 1, 8, precision="fp16")
    estimate = Estimate(chosen, mixed)
    assert [len(group) for group in estimate.alike] == [1, 1]
    assert estimate.iteration_s() == pytest.approx(simulate(chosen, mixed).iteration_s, rel=1e-9)


def test_the_plan_of_another_job_is_refused() -> None:
    cluster = server_cluster(1)
    chosen = symmetric_plan(cluster, transformer("gpt3-1.3b"), 8, 1, 8)
    with pytest.raises(InputError, match=r"the judge was made for the job gpt3-1\.3b, 8 x 512"):
        estimation(cluster, chosen.job())(symmetric_plan(cluster, transformer("gpt3-1.3b"), 8, 1, 4))


def test_a_plan_that_does_not_fit_is_infeasible() -> None:
    cluster = server_cluster(1)
    chosen = symmetric_plan(cluster, transformer("gpt3-175b"), 8, 1, 8)
    verdict = estimation(cluster, chosen.job())(chosen)
    assert isinstance(verdict, Infeasible) and verdict.reason == "memory"


SCRIPT = """
import sys
from sim.cost.estimate import Estimate
from sim.spec.cluster import read_cluster
from sim.spec.plan import parse_plan
estimate = Estimate(parse_plan(open(sys.argv[1]).read()), read_cluster(sys.argv[2]))
print(repr(estimate.iteration_s()), estimate.breakdown())
"""


def test_two_processes_with_other_hash_seeds_give_the_same_seconds() -> None:
    folder = "tests/data/peer_plans"
    files: Sequence[str] = [f"{folder}/flashflex.mixed-a-4gbit.llama-2-7b.json", f"{folder}/mixed-a-4gbit.yaml"]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, *files],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
