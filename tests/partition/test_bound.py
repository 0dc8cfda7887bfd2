"""The lower bound against closed forms worked out by hand, against every plan that anything here makes, and the laws it obeys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

import partition
from partition.bound import Bound, Gap, gap, lower_bound
from sim.cost.feasibility import infeasible
from sim.cost.memory import peak_bytes
from sim.engine import simulate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node, WideAreaLink, read_cluster
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.judge import Cost, Infeasible
from sim.spec.plan import COUNTED_SCHEDULES, SLICED_SCHEDULES, Pipeline, Plan, Replica, Stage, read_plan
from sim.spec.program import OptimizerStep
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer, transformer
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node
from tests.strategies import in_flight, models, plans, worlds
from tests.worlds import LOSSLESS, ethernet_cluster, ideal_gpu

PEERS = Path(__file__).parents[2] / "experiments" / "data" / "peer_plans"
CLOSE = 1 + 1e-9


def bound(on: Cluster, work: Job) -> Bound:
    """The bound, where there is one."""
    found = lower_bound(on, work)
    assert isinstance(found, Bound), found
    parts = found.compute_s + found.host_s + found.bubble_s + found.network_s + found.recompute_s
    assert found.iteration_s == pytest.approx(parts, rel=1e-12)
    assert min(found.compute_s, found.host_s, found.bubble_s, found.network_s, found.recompute_s) >= 0
    return found


# --- Closed forms ----------------------------------------------------------------------------------------------------


def free_memory(kind: str = "A100-80GB-SXM") -> Node:
    """A node of one GPU that reaches its peak, and whose memory takes no time."""
    gpu = replace(ideal_gpu(kind), memory_bandwidth_bytes_per_s=1e30)
    return Node("a", gpu, 1, Intra("nvlink", 1e30), Nic("ethernet", 1e30))


def test_one_gpu_without_overheads_takes_the_flop_over_its_peak() -> None:
    # A GPT without a window: 6 FLOP per parameter of the matmuls and token, and of 4 s h FLOP a token and layer of attention,
    # thrice, the half that the causal mask leaves: forward once, and flash attention's backward three times as long.
    model = Transformer("gpt", layers=3, hidden=256, ffn=1024, heads=4, vocab=1000, activation="gelu")
    work = Job(model, 128, 16, "bf16")
    tokens = 16 * 128
    matmuls = 6 * tokens * (3 * (4 * 256**2 + 2 * 256 * 1024) + 1000 * 256)
    attention = 4 * tokens * 3 * 4 * 128 * 256 / 2
    found = bound(Cluster("one", (free_memory(),)), work)
    assert found.iteration_s == pytest.approx((matmuls + attention) / 312e12, rel=1e-6)
    assert found.compute_s == pytest.approx(found.iteration_s, rel=1e-12)


def test_one_gpu_reaches_the_bound_with_the_whole_batch_at_once_but_for_the_launch_of_its_step() -> None:
    on = cluster(node("a", "A100-80GB-SXM", 1, "nvlink"))
    work = job(batch=8)
    stages = (Stage((Replica(("a/0",), 8),), ((0, 8),)),)
    plan = Plan("world", TINY, work.sequence_length, 8, (Pipeline(8, 1, stages),))
    took_s = simulate(plan, on).iteration_s
    assert bound(on, work).iteration_s == pytest.approx(took_s - gpu_kind("A100-80GB-SXM").efficiency.launch_s, rel=1e-12)


def test_the_bound_takes_for_fused_what_megatrons_softmax_may_take() -> None:
    """Three sequences of two heads are none of its fours; a lane that had two of them would be."""
    model, on = replace(TINY, heads=2, kv_heads=2, head_dim=512), cluster(node("a", "A100-80GB-SXM", 2, "nvlink"))
    plain = replace(on, stack=replace(on.stack, flash_attention=False))
    megatron = replace(plain, stack=replace(plain.stack, megatron_softmax=True))
    work = job(model, batch=3)
    assert bound(megatron, work) == bound(plain, work)
    stages = (Stage((Replica(("a/0",), 2), Replica(("a/1",), 1)), ((0, 8),)),)
    plan = Plan("world", model, work.sequence_length, 3, (Pipeline(3, 1, stages),))
    fused_s, least = simulate(plan, plain).iteration_s, bound(megatron, work)
    trace = simulate(plan, megatron)
    assert least.iteration_s < trace.iteration_s == fused_s
    found = gap(least, trace, megatron)
    assert found.compute + found.host + found.bubble + found.network + found.recompute == pytest.approx(found.total)


@pytest.mark.parametrize(("vocab", "kept"), [(2**13 - 1, False), (2**13 - 3, True), (2**13, True)])
def test_the_bound_takes_for_aligned_what_ranks_may_have_aligned(vocab: int, kept: bool) -> None:
    # Of 8,191 columns two ranks have 4,096 each, of which rows are a multiple of 16 bytes; of 8,189 they have 4,095.
    model, whole = (
        Transformer("odd", layers=1, hidden=64, ffn=256, heads=2, vocab=vocab),
        Node("a", ideal_gpu(), 2, Intra("nvlink", 1e30)),
    )
    ideal = Cluster("two", (replace(whole, gpu=replace(ideal_gpu(), memory_bandwidth_bytes_per_s=1e30)),))
    slow = replace(ideal, stack=replace(ideal.stack, unaligned_scale=0.1))
    work = Job(model, 128, 2, "bf16")
    divided = Plan("two", model, 128, 2, (Pipeline(2, 1, (Stage((Replica(("a/0", "a/1"), 2),), ((0, 1),)),)),))
    alone = (Stage((Replica(("a/0",), 1), Replica(("a/1",), 1)), ((0, 1),)),)
    least_s = min(simulate(plan, slow).iteration_s for plan in (divided, replace(divided, pipelines=(Pipeline(2, 1, alone),))))
    assert bound(slow, work).iteration_s <= least_s * (1 + 1e-12)
    assert (bound(slow, work) == bound(ideal, work)) == (not kept or vocab % 8 == 0)


def test_one_sequence_passes_one_layer_after_the_other() -> None:
    # Alone on four GPUs it cannot keep them all busy, unless they share each layer, which here no heads allow.
    model = Transformer("one head", layers=4, hidden=256, ffn=1024, heads=1, vocab=8, activation="gelu")
    on = Cluster("four", tuple(replace(free_memory(), name=name) for name in "abcd"))
    work = Job(model, 127, 1, "bf16")  # a prime length, so that no context ranks can share it, nor can it come in slices
    forward_s = 2 * 127 * (4 * 256**2 + 2 * 256 * 1024) / 312e12
    attention_s = 4 * 127 * 127 * 256 / 2 / 312e12
    # Twice through four layers, and through the head; the weight halves may be done elsewhere in the meantime.
    ends_s = 2 * (2 * 127 * 8 * 256 / 312e12)
    found = bound(on, work)
    assert found.iteration_s == pytest.approx(4 * (2 * forward_s + 4 * attention_s) + ends_s, rel=1e-6)
    assert found.bubble_s > found.compute_s > 0


def test_the_last_slice_of_a_sequence_passes_all_layers_after_the_others_passed_the_first() -> None:
    model = Transformer("one head", layers=4, hidden=256, ffn=1024, heads=1, vocab=8, activation="gelu")
    on = Cluster("four", tuple(replace(free_memory(), name=name) for name in "abcd"))
    work = Job(model, 129, 1, "bf16")  # three slices of 43 tokens, or one; no context ranks
    forward_s = 2 * 43 * (4 * 256**2 + 2 * 256 * 1024) / 312e12
    attention_s = 4 * 43 * 43 * 256 / 2 / 312e12  # of the first slice; the others take 3 and 5 times as long
    layers_s = 4 * (2 * forward_s + 5 * 4 * attention_s) + 4 * forward_s + (1 + 3) * 4 * attention_s
    ends_s = 2 * (2 * 43 * 8 * 256 / 312e12)
    stages = tuple(Stage((Replica((f"{name}/0",), 1),), ((i, i + 1),)) for i, name in enumerate("abcd"))
    plan = Plan("four", model, 129, 1, (Pipeline(1, 1, stages),), schedule="split-1f1b", sequence_slices=3)
    found = bound(on, work)
    assert found.iteration_s == pytest.approx(layers_s + ends_s, rel=1e-6)
    # A whole sequence takes longer at least: thrice as many tokens, each attending to thrice as many keys.
    whole_s = 4 * (2 * 3 * forward_s + 4 * 9 * attention_s) + 3 * ends_s
    assert found.iteration_s < simulate(plan, on).iteration_s < whole_s


def test_two_nodes_on_a_slow_link_are_as_fast_as_one_alone_and_on_one_that_carries_the_batch_as_two() -> None:
    model = Transformer("wide", layers=2, hidden=1024, ffn=4096, heads=8, vocab=96)
    work = Job(model, 128, 32, "bf16")
    crossing_bytes = 32 * 128 * 1024 * 2  # the activations of the whole batch; all gradients are many times as many bytes
    alone_s = bound(Cluster("one", (free_memory(),)), work).iteration_s

    def two(bytes_per_s: float) -> Bound:
        nodes = tuple(replace(free_memory(), name=name, nic=Nic("ethernet", bytes_per_s)) for name in "ab")
        return bound(Cluster("two", nodes, Fabric(protocol_efficiency=LOSSLESS)), work)

    slow, fast = two(1.0), two(crossing_bytes / (alone_s / 2) * 1.01)
    assert slow.iteration_s == pytest.approx(alone_s, rel=1e-2)
    assert slow.network_s == pytest.approx(alone_s / 2, rel=2e-2)
    assert (fast.iteration_s, fast.network_s) == (pytest.approx(alone_s / 2), 0)
    # A link that takes three quarters of that time for the whole batch: one cut, or a part of the batch in groups over both.
    between = two(crossing_bytes / (0.75 * alone_s))
    assert 0.6 * alone_s < between.iteration_s <= 0.75 * alone_s * CLOSE


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gbit", [1.0, 100.0])
def test_nodes_whose_gpus_lack_the_precision_change_nothing(nodes: int, gbit: float) -> None:
    nic = Nic("ethernet", gbit * 1e9 / 8)
    able = tuple(replace(node(f"a{n}", "A100-40GB-SXM", 2, "nvlink"), nic=nic) for n in range(nodes))
    lacking = tuple(replace(node(f"t{n}", "T4", 2), nic=nic) for n in range(2))
    alone = bound(cluster(*able), job(batch=8))
    assert bound(cluster(*able, *lacking), job(batch=8)) == bound(cluster(*lacking, *able), job(batch=8)) == alone


# --- Bad input and impossible jobs -----------------------------------------------------------------------------------


def test_a_model_that_no_plan_can_hold_is_said_to_be_infeasible() -> None:
    found = lower_bound(mixed(), job(transformer("llama-2-70b")))
    assert isinstance(found, Infeasible)
    assert found.reason == "memory" and found.need_bytes and found.have_bytes
    assert found.need_bytes > 69e9 * 4 and found.have_bytes < 4 * (12 + 24) * 2**30


def test_a_precision_that_no_gpu_has_is_infeasible() -> None:
    found = lower_bound(cluster(node("a", "V100-16GB-SXM", 1, "nvlink")), job())
    assert isinstance(found, Infeasible) and found.reason == "precision"


def test_recomputation_is_counted_where_the_activations_of_one_sequence_do_not_fit() -> None:
    long = job(replace(SMALL, name="deep", layers=48), sequence_length=65536, batch=2)
    small, large = cluster(node("a", "RTX3090", 8)), cluster(node("a", "A100-80GB-SXM", 8, "nvlink"))
    assert bound(large, long).recompute_s == 0
    found = bound(small, long)
    # No more than all layers' forwards again, which are at most half of what the rest takes.
    assert 0 < found.recompute_s < found.compute_s / 2


# --- Below every plan ------------------------------------------------------------------------------------------------


@st.composite
def starved_clusters(draw: DrawFn) -> Cluster:
    """Clusters whose links between nodes, racks and sites may be anything from idle to all that counts."""
    bytes_per_s = 10.0 ** draw(st.integers(6, 10))
    count = draw(st.integers(1, 4))
    sites = draw(st.booleans()) and count > 1
    nodes = tuple(
        Node(
            f"n{i}",
            ideal_gpu(draw(st.sampled_from(("A100-80GB-SXM", "RTX4090")))),
            draw(st.sampled_from((1, 1, 2, 4))),
            Intra("nvlink", 300e9),
            Nic(draw(st.sampled_from(("ethernet", "roce"))), bytes_per_s * draw(st.sampled_from((1, 2, 5)))),
            site=("east", "west")[i % 2] if sites else "",
            rack=None if sites else draw(st.sampled_from((None, "r0"))),
        )
        for i in range(count)
    )
    fabric = Fabric(0.0, draw(st.sampled_from((1.0, 4.0))), protocol_efficiency=LOSSLESS)
    return Cluster("starved", nodes, fabric, (WideAreaLink(("east", "west"), bytes_per_s, 0.0),) if sites else ())


@st.composite
def starved_models(draw: DrawFn) -> Transformer:
    """Models, some with experts, some with narrow embeddings."""
    model = draw(models())
    if draw(st.booleans()):
        model = replace(model, experts=Moe(4, 2, model.hidden))
    return replace(model, embedding_width=model.hidden // draw(st.sampled_from((1, 4))))


@st.composite
def starved(draw: DrawFn) -> tuple[Cluster, Plan]:
    """Such a cluster and a plan for such a model, with context parallelism where it goes."""
    on = draw(starved_clusters())
    plan = draw(plans(on, draw(starved_models())))
    if plan.sequence_slices == 1 and all(len(replica.devices) % 2 == 0 for _, _, _, replica in plan.replicas()):
        plan = replace(plan, context_parallel=draw(st.sampled_from((1, 2))))
    return on, plan


@st.composite
def replicated(draw: DrawFn) -> tuple[Cluster, Plan]:
    """Nodes that each hold all layers, or the first or the last of two halves, of a model whose sequences are long: on links of
    such rates that gradients take up to about as long as the computation, and activations no less."""
    depth, copies, gpus = draw(st.sampled_from((1, 1, 2))), draw(st.integers(2, 3)), draw(st.sampled_from((1, 2, 4)))
    model = Transformer("copied", 8, hidden=1024, ffn=4096, heads=8, vocab=96)
    bytes_per_s = 1e9 * draw(st.sampled_from((0.1, 0.3, 1.0, 3.0, 10.0)))
    kind, nic = ideal_gpu(draw(st.sampled_from(("A100-80GB-SXM", "RTX4090")))), Nic("ethernet", bytes_per_s)
    nodes = tuple(Node(f"n{i}", kind, gpus, Intra("nvlink", 300e9), nic) for i in range(depth * copies))
    on = Cluster("copies", nodes, Fabric(0.0, protocol_efficiency=LOSSLESS))
    mode, share, count = (
        draw(st.sampled_from(("none", "pointwise", "full"))),
        draw(st.integers(1, 4)),
        draw(st.sampled_from((1, 2, 5, 30))),
    )
    cut = draw(st.integers(1, gpus)) if depth == 1 else gpus  # a node is a pipeline of so many stages
    stages = cut * depth
    bounds = [model.layers * s // stages for s in range(stages + 1)]

    def stage(copy: int, s: int) -> Stage:
        device = f"n{copy * depth + s // cut}/{s % cut}"
        return Stage((Replica((device,), share),), ((bounds[s], bounds[s + 1]),), mode)

    pipelines = tuple(Pipeline(share, count, tuple(stage(copy, s) for s in range(stages))) for copy in range(copies))
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "split-1f1b", "eager-1f1b", "zb-2p")))
    if schedule in COUNTED_SCHEDULES:
        counts = draw(st.none() | in_flight(pipelines[0]))
        pipelines = tuple(pipeline.holding(counts) for pipeline in pipelines)
    zero_stage = draw(st.integers(0, 3))
    sliced = schedule in SLICED_SCHEDULES and zero_stage < 2
    plan = Plan(
        "copies",
        model,
        draw(st.sampled_from((4096, 32768))),
        share * count * copies,
        pipelines,
        schedule=schedule,
        sequence_slices=draw(st.sampled_from((1, 2, 4, 16))) if sliced else 1,
        zero_stage=zero_stage,
        gradient_precision=draw(st.sampled_from(("fp32", "bf16"))),
        offload_optimizer=draw(st.booleans()),
        optimizer="sgd",
    )
    return with_memory(on, max(peak_bytes(plan, on).values())), plan


def with_memory(on: Cluster, num_bytes: int) -> Cluster:
    """The cluster if each of its GPUs had so much memory."""
    nodes = (replace(n, gpu=replace(n.gpu, memory_bytes=num_bytes)) for n in on.nodes)
    return replace(on, nodes=tuple(nodes))


def check(on: Cluster, plan: Plan) -> None:
    """Simulates a plan, whether it fits in memory or not, and compares."""
    try:
        trace = simulate(plan, on)
    except InputError:
        return  # what the compiler refuses
    least = bound(on, plan.job())
    assert bound(with_memory(on, 10**18), plan.job()).iteration_s <= trace.iteration_s * CLOSE
    if infeasible(plan, on) is None:
        assert least.iteration_s <= trace.iteration_s * CLOSE
    found = gap(least, trace, on)
    assert found.total == pytest.approx(1 - least.iteration_s / trace.iteration_s, rel=1e-9)
    parts = found.compute + found.host + found.bubble + found.network + found.recompute
    assert parts == pytest.approx(found.total, abs=1e-9)
    assert found.recompute >= -least.recompute_s / trace.iteration_s - 1e-12
    if not plan.offload_optimizer:  # else the bound's GPUs step, where the plan's hosts do
        assert found.compute >= -1e-11  # a sum over thousands of spans is not exact to the last digits


# Of these a test that is slow tries many more, below.
@settings(max_examples=10, deadline=None)
@given(worlds())
def test_the_bound_is_below_random_plans(world: tuple[Cluster, Plan]) -> None:
    check(*world)


@settings(max_examples=10, deadline=None)
@given(starved())
def test_the_bound_is_below_random_plans_where_links_are_slow(world: tuple[Cluster, Plan]) -> None:
    check(*world)


@settings(max_examples=10, deadline=None)
@given(replicated())
def test_the_bound_is_below_plans_that_exchange_gradients_over_slow_links(world: tuple[Cluster, Plan]) -> None:
    check(*world)


@st.composite
def filled(draw: DrawFn) -> tuple[Cluster, Plan]:
    """Sequences so long that activations fill the memory, and micro-batches enough to fill the pipelines."""
    on, plan = draw(st.one_of(worlds(), starved()))
    times, length = draw(st.integers(1, 30)), draw(st.sampled_from((2048, 16384)))
    pipelines = tuple(replace(p, micro_batches=p.micro_batches * times) for p in plan.pipelines)
    plan = replace(plan, sequence_length=length, pipelines=pipelines, global_batch=plan.global_batch * times)
    return with_memory(on, max(peak_bytes(plan, on).values())), plan


@settings(max_examples=3, deadline=None)
@given(filled())
def test_the_bound_is_below_random_plans_that_just_fit(world: tuple[Cluster, Plan]) -> None:
    check(*world)


@pytest.mark.slow
@pytest.mark.parametrize("made", [worlds(), starved(), replicated(), filled()], ids=["any", "slow links", "exchanging", "full"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_bound_is_below_many_random_plans(made: st.SearchStrategy[tuple[Cluster, Plan]], data: st.DataObject) -> None:
    check(*data.draw(made))


@pytest.mark.parametrize("planner", ["random", "megatron", "flashflex"])
@pytest.mark.parametrize("gbit", [0.1, 10])
def test_the_bound_is_below_what_planners_find(planner: str, gbit: float) -> None:
    on = cluster(node("a", "A100-40GB-SXM", 2, "nvlink"), node("b", "RTX4090", 2), node("c", "RTX3080Ti", 2))
    on = replace(on, nodes=tuple(replace(n, nic=Nic("ethernet", gbit * 0.125e9)) for n in on.nodes))
    work = job(batch=8)
    found = partition.plan(on, work, planner, budget_s=5)
    assert found.cost is not None
    assert bound(on, work).iteration_s <= found.cost.iteration_s * CLOSE


@pytest.mark.parametrize(("mbit", "length"), [(100, 1024), (1_000, 1024), (10_000, 1024), (10_000, 32768)])
def test_the_bound_is_below_the_optimum_of_an_exhaustive_search(mbit: int, length: int) -> None:
    on = cluster(node("a", "A100-40GB-SXM", 1, "nvlink"), node("b", "RTX4090", 2))
    on = replace(on, nodes=tuple(replace(n, nic=Nic("ethernet", mbit * 0.125e6)) for n in on.nodes))
    work = job(replace(TINY, name="shallow", layers=4), length, batch=8)
    found = partition.plan(on, work, "exhaustive", budget_s=60)
    assert found.cost is not None and found.stopped == "finished"
    assert bound(on, work).iteration_s <= found.cost.iteration_s * CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(PEERS.glob("*.json")), ids=lambda path: path.stem)
def test_the_bound_is_below_the_plans_of_published_programs(path: Path) -> None:
    plan = read_plan(path)
    check(read_cluster(PEERS / f"{plan.cluster}.yaml"), plan)


# --- Laws ------------------------------------------------------------------------------------------------------------


def jobs() -> SearchStrategy[tuple[Cluster, Job]]:
    """Such clusters with jobs for them."""
    length, batch = st.sampled_from((16, 128, 1024)), st.integers(1, 64)
    precisions = st.sampled_from(("fp16", "fp32")), st.just("adamw"), st.sampled_from(("fp32", "bf16"))
    work = st.builds(Job, starved_models(), length, batch, *precisions)
    return st.tuples(starved_clusters(), work)


def another_gpu_or_node_never_raises_it(world: tuple[Cluster, Job], draw: DrawFn) -> None:
    on, work = world
    at = draw(st.integers(0, len(on.nodes) - 1))
    chosen = on.nodes[at]
    more = replace(on, nodes=(*on.nodes[:at], replace(chosen, gpus=chosen.gpus + 1), *on.nodes[at + 1 :]))
    another = replace(on, nodes=(*on.nodes, replace(chosen, name="another", gpu=ideal_gpu("V100-16GB-SXM"))))
    # Times are halved thirty times, and prices tried that depend on the GPUs: the last digits may be higher.
    least = bound(on, work).iteration_s * (1 + 1e-7)
    assert bound(more, work).iteration_s <= least
    assert bound(another, work).iteration_s <= least


def faster_links_never_raise_it(world: tuple[Cluster, Job], draw: DrawFn) -> None:
    on, work = world
    factor = draw(st.sampled_from((1.1, 3.0, 100.0)))
    nodes = tuple(
        replace(n, nic=replace(n.nic, bandwidth_bytes_per_s=n.nic.bandwidth_bytes_per_s * factor)) for n in on.nodes if n.nic
    )
    wan = tuple(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor) for link in on.wan)
    assert bound(replace(on, nodes=nodes, wan=wan), work).iteration_s <= bound(on, work).iteration_s * CLOSE


def a_larger_batch_never_lowers_it(world: tuple[Cluster, Job], draw: DrawFn) -> None:
    on, work = world
    larger = replace(work, global_batch=work.global_batch + draw(st.integers(1, 40)))
    assert bound(on, larger).iteration_s >= bound(on, work).iteration_s / CLOSE


Law = Callable[[tuple[Cluster, Job], DrawFn], None]
LAWS: tuple[Law, ...] = (another_gpu_or_node_never_raises_it, faster_links_never_raise_it, a_larger_batch_never_lowers_it)
laws = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)


@laws
@settings(max_examples=6, deadline=None)
@given(world=jobs(), data=st.data())
def test_the_bound_obeys_a_law(law: Law, world: tuple[Cluster, Job], data: st.DataObject) -> None:
    law(world, data.draw)


@pytest.mark.slow
@laws
@settings(max_examples=100, deadline=None)
@given(world=jobs(), data=st.data())
def test_the_bound_obeys_a_law_in_many_worlds(law: Law, world: tuple[Cluster, Job], data: st.DataObject) -> None:
    law(world, data.draw)


def test_gradients_in_fp32_never_lower_it() -> None:
    on, work = ethernet_cluster([2, 2, 2], 1e9), job(batch=64)
    bf16, fp32 = (lower_bound(on, replace(work, gradient_precision=precision)) for precision in ("bf16", "fp32"))
    assert isinstance(bf16, Bound) and isinstance(fp32, Bound) and fp32.iteration_s > bf16.iteration_s


# --- The gap ---------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_gap_are_where_a_plan_loses_time() -> None:
    on = cluster(node("a", "A100-80GB-SXM", 2, "nvlink"))
    work = job(batch=2)
    least = bound(on, work)

    def lost(*stages: Stage, micro_batches: int = 2, **fields: str) -> dict[str, float]:
        plan = Plan("world", TINY, work.sequence_length, 2, (Pipeline(2 // micro_batches, micro_batches, stages),), **fields)
        trace = simulate(plan, on)
        verdict = simulation(on, work)(plan)
        assert isinstance(verdict, Cost) and verdict.iteration_s == trace.iteration_s
        return vars(gap(least, trace, on))

    one = (Replica(("a/0",), 1),)
    alone = lost(Stage((Replica(("a/0",), 1),), ((0, 8),)))
    assert alone["compute"] == pytest.approx(alone["total"])  # half of the cluster stands by
    assert alone["compute"] > 0.5
    recomputed = lost(Stage(one, ((0, 8),), "full"))
    # A GPU counts half: a third of the six sevenths or so of its time that are layers' and not the optimizer's.
    assert 0.05 < recomputed["recompute"] < 1 / 6 and alone["recompute"] == 0
    piped = lost(Stage(one, ((0, 4),)), Stage((Replica(("a/1",), 1),), ((4, 8),)))
    assert piped["bubble"] == max(piped["bubble"], piped["compute"], piped["network"], piped["recompute"])
    tensor = lost(Stage((Replica(("a/0", "a/1"), 1),), ((0, 8),)))
    assert tensor["network"] > 0 == tensor["recompute"]
    assert alone["host"] == recomputed["host"] == piped["host"] == tensor["host"] == 0  # the ideal stack has an instant one


def test_what_a_host_takes_is_a_part_of_its_own() -> None:
    """By hand: 20 ms a pass and 50 a step, of one GPU with two micro-batches; then a host that takes 1 ms a launch."""
    on, slow = cluster(node("a", "A100-80GB-SXM", 1)), {"micro_batch_s": 0.02, "step_s": 0.05}
    work = job(batch=2)
    plan = Plan("world", TINY, work.sequence_length, 2, (Pipeline(1, 2, (Stage((Replica(("a/0",), 1),), ((0, 8),)),)),))

    def lost(**fields: float) -> tuple[Bound, Gap, float]:
        slowed = replace(on, stack=replace(on.stack, **fields))
        trace, least = simulate(plan, slowed), bound(slowed, work)
        return least, gap(least, trace, slowed), trace.iteration_s

    (least, found, seconds), (_, without, before_s) = lost(**slow), lost()
    assert least.host_s == 0.05 and seconds - before_s == pytest.approx(4 * 0.02 + 0.05)
    assert found.host * seconds == pytest.approx(4 * 0.02)  # the step's is the bound's, too
    assert without.host == 0 and found.compute * seconds == pytest.approx(without.compute * before_s)
    offloading = replace(plan, offload_optimizer=True)
    trace = simulate(offloading, on)
    (step_s,) = (span.end_s - span.start_s for span in trace.spans if isinstance(span.instruction, OptimizerStep))
    assert gap(bound(on, work), trace, on).host * trace.iteration_s == pytest.approx(step_s)
    least, waiting, seconds = lost(host_s=1e-3)
    assert waiting.host * seconds == pytest.approx(seconds - before_s, rel=1e-6)
    assert waiting.compute * seconds == pytest.approx(without.compute * before_s, rel=1e-6)
