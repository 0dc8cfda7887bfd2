"""What single changes gain, against plans that were changed by hand, and `motley explain`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import sim.critical
import sim.prepared
from experiments.explain import Effect, Explanation, explain, link_class, one_more, with_one_more
from sim.engine import simulate
from sim.spec.cluster import BandwidthMatrix, Cluster, link_names, read_cluster
from sim.spec.plan import Pipeline, Plan, Replica, Stage, read_plan
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer
from tests.experiments.conftest import TINY_PLAN, Ran, World
from tests.worlds import GivenCost, ethernet_cluster, ideal_gpu, plan, stage

Motley = Callable[..., Ran]


def effect_of(told: Explanation, text: str) -> Effect:
    """The one effect whose name begins so."""
    (found,) = [effect for effect in told.effects if effect.name.startswith(text)]
    return found


def two_stages(**changes: object) -> Plan:
    """Two stages of one layer on two nodes, two micro-batches."""
    return plan([[stage("n0/0", (0, 1)), stage("n1/0", (1, 2))]], 2, **changes)


# --- Links and computation -------------------------------------------------------------------------------------------


def test_twice_as_fast_cards_halve_what_messages_take(monkeypatch: pytest.MonkeyPatch) -> None:
    # The slow stage works 18 s; the first message and the last gradient take 1 s each beside 3 s of the other stage.
    cost = GivenCost({"n0/0": 1.0, "n1/0": 3.0}, {"n0/0": 2.0, "n1/0": 6.0})
    for module in (sim.prepared, sim.critical):
        monkeypatch.setattr(module, "ComputeCost", cost)
    told = explain(two_stages(), ethernet_cluster([1, 1], 8.0))
    assert told.trace.iteration_s == 23
    assert effect_of(told, "Ethernet cards 2 times").iteration_s == pytest.approx(22)


def test_faster_pcie_is_faster_to_the_hosts_memory_too() -> None:
    cluster = ethernet_cluster([2], 1e9, intra_bytes_per_s=1e9, kind="pcie4")
    offloading = plan([[stage("n0/0", (0, 1)), stage("n0/1", (1, 2))]], 2, offload_optimizer=True)
    (node,) = cluster.nodes
    twice = replace(cluster, nodes=(replace(node, intra=replace(node.intra, bandwidth_bytes_per_s=2e9)),))
    told = explain(offloading, cluster)
    assert effect_of(told, "PCIe 2 times as fast").iteration_s == pytest.approx(simulate(offloading, twice).iteration_s)
    # More than messages alone gain, which is all where the states are on the GPUs.
    own = explain(replace(offloading, offload_optimizer=False), cluster)
    saved = [one.trace.iteration_s - (effect_of(one, "PCIe 2 times").iteration_s or math.inf) for one in (told, own)]
    assert saved[0] > 1.1 * saved[1] > 0


def test_faster_pcie_is_told_of_where_nothing_but_the_optimizer_goes_over_it() -> None:
    cluster = ethernet_cluster([1], 1e9, intra_bytes_per_s=1e9, kind="pcie4")
    alone = plan([[stage("n0/0", (0, 2))]], 2, offload_optimizer=True)
    told = explain(alone, cluster)
    faster = effect_of(told, "PCIe 2 times as fast").iteration_s
    assert faster is not None and faster < told.trace.iteration_s
    own = explain(replace(alone, offload_optimizer=False), cluster)
    assert not [effect for effect in own.effects if effect.name.startswith("PCIe")]


def test_what_is_all_computation_gains_all_that_a_kind_does() -> None:
    alone = plan([[stage("n0/0", (0, 1))]], 2)
    told = explain(alone, ethernet_cluster([1], 1e9))
    faster = effect_of(told, "all 1 A100-80GB-SXM compute 10 % faster").iteration_s
    assert faster == pytest.approx(told.trace.iteration_s / 1.1, rel=1e-9)


def test_faster_hosts_gain_where_they_are_waited_for() -> None:
    alone, cluster = plan([[stage("n0/0", (0, 1))]], 2), ethernet_cluster([1], 1e9)
    late = replace(cluster, stack=replace(cluster.stack, host_s=1.0))
    told = explain(alone, late)
    assert effect_of(told, "hosts launch 2 times as fast").iteration_s == pytest.approx(told.trace.iteration_s / 2, rel=1e-3)
    assert not [effect for effect in explain(alone, cluster).effects if "hosts" in effect.name]


def test_a_softmax_that_is_not_fused_is_told_of_with_what_it_costs() -> None:
    # Two heads and micro-batches of one sequence are two matrices of scores, of two sequences the four that Megatron takes.
    model = Transformer("two heads", layers=1, hidden=8, ffn=16, heads=2, vocab=10)
    cluster = ethernet_cluster([1], 1e9)
    plain = replace(cluster, stack=replace(cluster.stack, flash_attention=False))
    megatron = replace(cluster, stack=replace(plain.stack, megatron_softmax=True))
    alone, pairs = (
        Plan("tiny", model, 32, 2, (Pipeline(size, 2 // size, (Stage((Replica(("n0/0",), size),), ((0, 1),)),)),))
        for size in (1, 2)
    )
    told = explain(alone, megatron)
    fused = effect_of(told, "softmax fused on all lanes").iteration_s
    assert fused == simulate(alone, plain).iteration_s < told.trace.iteration_s
    for other, on in ((pairs, megatron), (alone, plain), (alone, cluster)):
        assert not [effect for effect in explain(other, on).effects if "softmax" in effect.name]


def test_a_vocabulary_that_is_not_padded_is_told_of_with_what_it_costs() -> None:
    # Rows of 1,004 numbers in 16 bits are 2,008 bytes, of which 16 do not divide; in fp32 that is no matter.
    model = Transformer("odd", layers=1, hidden=1024, ffn=64, heads=2, vocab=1000, padded_vocab=1004)
    cluster = ethernet_cluster([1], 1e9)
    slow = replace(cluster, stack=replace(cluster.stack, unaligned_scale=0.5))
    odd = replace(plan([[stage("n0/0", (0, 1))]], 2), model=model, sequence_length=512)
    padded = replace(odd, model=replace(model, padded_vocab=1024))
    told = explain(odd, slow)
    saved = effect_of(told, "vocabulary padded to 1,024 (was 1,004)").iteration_s
    assert saved == simulate(padded, cluster).iteration_s < told.trace.iteration_s
    narrow = replace(padded, model=replace(padded.transformer, hidden=1020, heads=12, kv_heads=12, head_dim=85))
    for other, on in ((padded, slow), (odd, cluster), (replace(odd, precision="fp32"), slow), (narrow, slow)):
        assert not [effect for effect in explain(other, on).effects if "vocabulary" in effect.name]


def test_a_faster_stage_beside_a_slower_one_gains_next_to_nothing() -> None:
    uneven = plan([[stage("n0/0", (0, 1)), stage("n1/0", (1, 8))]], 64)
    told = explain(uneven, ethernet_cluster([1, 1], 1e15))
    slow, fast = (effect_of(told, f"stage {name} compute").iteration_s for name in ("p0s1", "p0s0"))
    assert slow is not None and fast is not None
    assert told.path.busiest_lane == "p0s1"
    assert told.trace.iteration_s - slow > 20 * (told.trace.iteration_s - fast) > 0


def test_stages_that_are_alike_are_changed_together() -> None:
    alike = plan([[stage(f"n{p}/0", (0, 1)), stage(f"n{p}/1", (1, 2))] for p in range(3)], 2)
    told = explain(alike, ethernet_cluster([2, 2, 2], 1e9))
    assert {effect.name.split(" compute")[0] for effect in told.effects if effect.name.startswith("stage")} == {
        "stage p0s0 and 2 alike",
        "stage p0s1 and 2 alike",
    }


def test_every_link_of_a_cluster_has_a_class() -> None:
    root = Path(__file__).resolve().parents[2] / "examples" / "clusters"
    known = {"NVLink", "PCIe", "Ethernet cards", "InfiniBand cards", "RoCE cards", "uplinks of racks", "wide-area links"}
    seen = set()
    for file in root.glob("*.yaml"):
        cluster = read_cluster(file)
        if len(cluster.devices) <= 64:
            seen |= {link_class(name, cluster) for name in link_names(cluster)}
    assert {"NVLink", "PCIe", "Ethernet cards", "wide-area links"} <= seen <= known
    cluster = read_cluster(root / "mixed-nics.yaml")
    for node in cluster.nodes:
        kind = {"infiniband": "InfiniBand cards", "roce": "RoCE cards", "ethernet": "Ethernet cards"}[node.nic.kind]  # type: ignore[union-attr]
        assert link_class(f"{node.name}/nic0>fabric", cluster) == link_class(f"fabric>{node.name}/nic0", cluster) == kind
        assert link_class(f"{node.name}/ethernet>fabric", cluster) == "Ethernet cards"


# --- Other plans -----------------------------------------------------------------------------------------------------


def test_recomputation_that_memory_does_not_need_is_left_out() -> None:
    cluster = ethernet_cluster([1, 1], 1e9)
    bare = two_stages()
    (pipeline,) = bare.pipelines
    again = replace(bare, pipelines=(replace(pipeline, stages=tuple(replace(s, recompute="full") for s in pipeline.stages)),))
    told = explain(again, cluster)
    assert effect_of(told, "all stages: no recomputation (was full)").iteration_s == simulate(bare, cluster).iteration_s
    or_one = effect_of(told, "stage p0s0: no recomputation").iteration_s
    assert or_one is not None and simulate(bare, cluster).iteration_s < or_one < told.trace.iteration_s


def test_where_memory_is_short_as_little_as_fits_is_recomputed() -> None:
    cluster = ethernet_cluster([1], 1e9)
    shape = replace(two_stages().transformer, layers=4, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64)
    made = plan([[replace(stage("n0/0", (0, 4)), recompute="full")]], 1, model=shape, sequence_length=4096)

    def with_layers(count: int) -> Plan:
        one = replace(made.pipelines[0].stages[0], recompute_layers=count)
        return replace(made, pipelines=(replace(made.pipelines[0], stages=(one,)),))

    peaks = [max(simulate(with_layers(count), cluster).peak_bytes.values()) for count in (4, 3, 2, 1, 0)]
    assert peaks == sorted(peaks)

    def least(memory_bytes: int) -> Effect:
        small = replace(cluster.nodes[0].gpu, memory_bytes=memory_bytes)
        tight = replace(cluster, nodes=(replace(cluster.nodes[0], gpu=small),))
        (effect,) = [effect for effect in explain(made, tight).effects if effect.group == "recompute"]
        return effect

    def recomputing(counts: tuple[int, int]) -> Plan:
        full, pointwise = counts
        mode, some, rest = ("full", full, "pointwise") if full else ("pointwise", pointwise, "none")
        one = made.pipelines[0].stages[0].recomputing(mode, some, rest)
        return replace(made, pipelines=(replace(made.pipelines[0], stages=(one,)),))

    ways = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (2, 2), (3, 1)]  # layers in full and pointwise, the cheapest first
    words = [*(f"pointwise {n}/4" for n in (1, 2, 3)), "pointwise", *(f"full {n}/4, rest pointwise" for n in (1, 2, 3))]
    traces = [simulate(recomputing(counts), cluster) for counts in ways]
    needs = [max(trace.peak_bytes.values()) for trace in traces]
    assert len(set(needs)) > 4
    for memory_bytes in (need for need in needs if need < peaks[-1]):  # of one layer as much comes back as is saved
        first = next(n for n, need in enumerate(needs) if need <= memory_bytes)
        effect = least(memory_bytes)
        assert effect.name == f"stage p0s0: recomputation {words[first]} (was full)"
        assert effect.iteration_s == traces[first].iteration_s
    assert least(peaks[0]).iteration_s is None


def test_micro_batches_are_doubled_and_halved_where_they_can_be() -> None:
    cluster = ethernet_cluster([1, 1], 1e9)
    made = two_stages()
    told = explain(made, cluster)
    (pipeline,) = made.pipelines
    stages = tuple(replace(s, replicas=(replace(s.replicas[0], sequences=2),)) for s in pipeline.stages)
    doubled = replace(made, pipelines=(replace(pipeline, micro_batch=2, micro_batches=1, stages=stages),))
    assert effect_of(told, "micro-batches twice").iteration_s == simulate(doubled, cluster).iteration_s
    refused = effect_of(told, "micro-batches half")
    assert refused.iteration_s is None and "takes 1 sequence of each micro-batch, no even number" in str(refused.reason)
    back = explain(doubled, cluster)
    assert effect_of(back, "micro-batches half").iteration_s == told.trace.iteration_s
    assert "has 1 micro-batch, no even number" in str(effect_of(back, "micro-batches twice").reason)


def test_experts_are_divided_otherwise() -> None:
    mixture = Transformer("mixture", 2, 64, 128, 4, 96, experts=Moe(experts=4, top_k=2, ffn=128))
    cluster = ethernet_cluster([2, 2], 1e9)
    pipelines = tuple(Pipeline(1, 2, (Stage((Replica((f"n{n}/0", f"n{n}/1"), 1),), ((0, 2),)),)) for n in (0, 1))
    made = Plan("tiny", mixture, 32, 4, pipelines, expert_parallel=2, sequence_parallel=True)
    told = explain(made, cluster)
    found = {effect.name: effect for effect in told.effects if effect.group == "experts"}
    assert set(found) == {f"experts {how} (was over 2)" for how in ("not divided", "over 4", "whole, over 4")}
    assert "needs a multiple of 4 copies of a stage" in str(found["experts over 4 (was over 2)"].reason)
    whole = replace(made, expert_parallel=4, expert_tensor_parallel=1)
    assert found["experts whole, over 4 (was over 2)"].iteration_s == simulate(whole, cluster).iteration_s
    back = {effect.name: effect for effect in explain(whole, cluster).effects if effect.group == "experts"}
    assert set(back) == {f"experts {how} (was over 4, whole)" for how in ("whole, over 2", "over 2")}
    alone = replace(whole, expert_parallel=2)
    assert all("over 1" not in effect.name for effect in explain(alone, cluster).effects)  # of two ranks each has one at least
    assert back["experts over 2 (was over 4, whole)"].iteration_s == told.trace.iteration_s


def test_the_other_schedules_are_tried_and_not_its_own() -> None:
    cluster = ethernet_cluster([1, 1], 1e9)
    told = explain(two_stages(), cluster)
    tried = {effect.name.split()[1]: effect.iteration_s for effect in told.effects if effect.group == "schedule"}
    assert set(tried) == {"gpipe", "split-1f1b", "eager-1f1b", "zb-1p", "zb-2p", "micro-batch"}
    ahead = replace(two_stages(), pipelines=(two_stages().pipelines[0].holding([3, 1]),))
    assert tried["micro-batch"] == simulate(ahead, cluster).iteration_s  # one more in flight for each message between nodes
    assert tried["gpipe"] == simulate(two_stages(schedule="gpipe"), cluster).iteration_s
    alone = explain(plan([[stage("n0/0", (0, 1))]], 2), cluster)
    assert not [effect for effect in alone.effects if effect.group == "schedule"]


def test_another_schedule_alone_is_changed_and_what_it_does_not_take_is_told() -> None:
    cluster, own = ethernet_cluster([1, 1], 1e9), two_stages(schedule="split-1f1b")
    own = replace(own, sequence_length=2, sequence_slices=2, pipelines=(own.pipelines[0].holding([5, 2]),))
    told = {effect.name: effect.iteration_s for effect in explain(own, cluster).effects if "(is split" in effect.name}
    dropped = {name.partition(" (is split-1f1b)")[0].split()[-1]: name.partition(" (is split-1f1b)")[2] for name in told}
    held, whole = ", in flight what {} says", ", whole sequences"
    both = {name: whole + held.format(name) for name in ("eager-1f1b", "zb-1p", "zb-2p")}
    assert dropped == {"1f1b": "", "gpipe": held.format("gpipe"), **both}
    assert told["schedule 1f1b (is split-1f1b)"] == simulate(replace(own, schedule="1f1b"), cluster).iteration_s
    bare = replace(own, schedule="zb-1p", sequence_slices=1, pipelines=(own.pipelines[0].holding(None),))
    assert told[f"schedule zb-1p (is split-1f1b){both['zb-1p']}"] == simulate(bare, cluster).iteration_s


def test_effects_stand_by_what_they_save_and_those_that_cannot_be_last() -> None:
    told = explain(two_stages(), ethernet_cluster([1, 1], 1e9))
    times = [effect.iteration_s if effect.iteration_s is not None else math.inf for effect in told.effects]
    assert times == sorted(times)


# --- One more GPU ----------------------------------------------------------------------------------------------------


def test_a_node_with_one_gpu_more_has_its_row_in_the_matrix() -> None:
    names = ("n0/0", "n0/1", "n1/0")
    matrix = BandwidthMatrix(names, ((math.inf, 9.0, 2.0), (8.0, math.inf, 3.0), (4.0, 5.0, math.inf)))
    cluster = replace(ethernet_cluster([2, 1], 1e9), bandwidth_matrix=matrix)
    grown = with_one_more(cluster, "n0")
    assert [device.name for device in grown.devices] == ["n0/0", "n0/1", "n0/2", "n1/0"]
    assert grown.bandwidth_matrix is not None and grown.bandwidth_matrix.names == ("n0/0", "n0/1", "n0/2", "n1/0")
    assert grown.bandwidth_matrix.bytes_per_s == (
        (math.inf, 9.0, 9.0, 2.0),
        (8.0, math.inf, 8.0, 3.0),
        (8.0, 8.0, math.inf, 3.0),
        (4.0, 5.0, 5.0, math.inf),
    )


def test_one_gpu_more_of_a_kind_that_all_work_waits_for_is_worth_its_share() -> None:
    # Data parallelism over links that take no time: three GPUs instead of two share 12 sequences.
    cluster = ethernet_cluster([2], 1e15)
    made = plan([[stage(f"n0/{i}", (0, 1))] for i in range(2)], 6, sequence_length=4096)
    (gpu,) = one_more(made, cluster, "megatron", 20.0)
    assert (gpu.kind, gpu.node, gpu.why_not, gpu.gpus_used) == ("A100-80GB-SXM", "n0", None, 3)
    assert gpu.after_s is not None and gpu.before_s <= simulate(made, cluster).iteration_s
    assert 1.2 < gpu.before_s / gpu.after_s < 1.55


def test_the_gpu_is_added_where_a_kind_has_fewest_and_not_for_what_it_cannot_do() -> None:
    cluster = ethernet_cluster([2, 1], 1e15)
    old = replace(cluster.nodes[0], name="old", gpu=ideal_gpu("V100-32GB-SXM"))
    made = plan([[stage("n0/0", (0, 1))], [stage("n0/1", (0, 1))]], 6, sequence_length=4096)
    found = one_more(made, replace(cluster, nodes=(*cluster.nodes, old)), "megatron", 20.0)
    assert [(gpu.kind, gpu.node) for gpu in found] == [("A100-80GB-SXM", "n1"), ("V100-32GB-SXM", "old")]
    assert (found[1].after_s, found[1].why_not, found[1].gpus_used) == (None, "it has no bf16", 0)


def test_a_plan_found_with_a_gpu_that_it_does_not_use_is_no_gain_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ethernet_cluster([2], 1e15)
    poor = plan([[stage("n0/0", (0, 1))]], 12, sequence_length=4096)
    better = plan([[stage(f"n0/{i}", (0, 1))] for i in range(2)], 6, sequence_length=4096)

    def search(plan: Plan, on: Cluster, *_: object) -> tuple[Plan, None]:
        return (better if on.nodes[0].gpus == 3 else poor), None

    monkeypatch.setattr("experiments.explain._best", search)
    (gpu,) = one_more(poor, cluster, "megatron", 1.0)
    assert gpu.before_s == gpu.after_s == simulate(better, cluster).iteration_s
    # Of two kinds the one that was searched first is no worse by what the search for the second found.
    other = replace(cluster.nodes[0], name="other", gpu=replace(ideal_gpu("H100-80GB-SXM"), name="H100-80GB-SXM"))
    both = replace(cluster, nodes=(other, *cluster.nodes))
    monkeypatch.setattr(
        "experiments.explain._best",
        lambda plan, on, *_: ((better if on.nodes[1].gpus == 3 else poor), None),
    )
    first, second = one_more(poor, both, "megatron", 1.0)
    assert first.before_s == second.before_s == first.after_s == second.after_s == simulate(better, both).iteration_s


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_tells_path_and_changes(motley: Motley, world: World) -> None:
    file = world.folder / "why.json"
    ran = motley("explain", world.plan, "--cluster", world.cluster, "--json", file)
    assert ran.code == 0 and ran.err == ""
    written = json.loads(file.read_text())
    iteration_s = simulate(read_plan(world.plan), read_cluster(world.cluster)).iteration_s
    assert written["iteration_s"] == iteration_s
    path = written["critical_path"]
    assert sum(path["seconds_by_cause"].values()) == pytest.approx(iteration_s, rel=1e-9)
    assert sum(share["seconds"] for share in path["shares"]) == pytest.approx(iteration_s, rel=1e-9)
    assert written["one_more"] is None
    for change in written["changes"]:
        assert (change["iteration_s"] is None) == (change["why_not"] is not None)
    assert "The critical path" in ran.out and "PCIe 2 times as fast" in ran.out and "busiest lane" in ran.out
    tables = [line for line in ran.out.splitlines() if not line.startswith(("in all", "not possible", "wrote"))]
    assert max(map(len, tables)) <= 100


def test_with_a_budget_it_tells_what_one_more_gpu_is_worth(motley: Motley, world: World) -> None:
    ran = motley("explain", world.plan, "--cluster", world.cluster, "--budget", "2s", "--planner", "megatron", "--json", "-")
    assert ran.code == 0
    (gpu,) = json.loads(ran.out)["one_more"]
    assert gpu["kind"] == "RTX4090" and gpu["node"] == "box" and gpu["after_s"] <= gpu["before_s"]
    assert "What one more GPU is worth" in ran.err


def test_a_plan_that_does_not_fit_is_not_explained(motley: Motley, world: World) -> None:
    large = world.write("large.json", TINY_PLAN.replace('"hidden": 64', '"hidden": 65536'))
    ran = motley("explain", large, "--cluster", world.cluster, "--json", world.folder / "why.json")
    assert ran.code == 1 and "is not feasible" in ran.err and ran.err.count("\n") == 1
    assert json.loads((world.folder / "why.json").read_text())["infeasible"]["reason"] == "memory"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--budget", "5"], "--budget: got '5' without a unit"),
        (["--planner", "megatron"], "--planner megatron is who searches what one more GPU is worth; give --budget, too"),
        (["--budget", "0s"], "above zero"),
        (["--budget", "2s", "--planner", "megatorn"], "did you mean megatron?"),
        (["--stack", "nothing"], "--stack"),
        (["--json", "."], "--json: . is a folder"),
    ],
)
def test_bad_input_is_told_in_one_line(motley: Motley, world: World, flags: list[str], told: str) -> None:
    before = world.names()
    ran = motley("explain", world.plan, "--cluster", world.cluster, *flags)
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1
    assert world.names() == before


def test_devices_that_the_cluster_lacks_are_told(motley: Motley, world: World) -> None:
    other = world.write("other.json", TINY_PLAN.replace("box/1", "box/7"))
    ran = motley("explain", other, "--cluster", world.cluster)
    assert ran.code == 2 and "box/7" in ran.err and ran.err.count("\n") == 1


def test_an_unknown_planner_is_an_error_of_the_function_too() -> None:
    cluster: Cluster = ethernet_cluster([1], 1e9)
    with pytest.raises(InputError, match="unknown planner"):
        one_more(plan([[stage("n0/0", (0, 1))]], 2), cluster, "nobody", 1.0)
