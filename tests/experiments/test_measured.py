"""What a run measured beside what is simulated of it, and the cluster that both are told on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import machine
from experiments.machine import LOOPBACK_BYTES_PER_S, allocated_bytes, stand_in, too_large
from experiments.measured import RunReport, run_json, run_report
from experiments.tables import run_table, run_titles
from runtime.results import RunResult
from runtime.tensor_parallel import LOSS_NUMBERS
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import Cluster, Node, parse_cluster, read_cluster
from sim.spec.counts import model_flop
from sim.spec.gpu import gpu_kind
from sim.spec.plan import Pipeline, Plan, Replica, Stage, parse_plan, read_plan
from sim.spec.reading import InputError
from sim.spec.trace import parse_trace, trace_json
from sim.spec.transformer import Transformer
from tests.experiments.conftest import ROOT, TINY_PLAN
from tests.experiments.runs import result_of

PLAN = read_plan(ROOT / "examples" / "plans" / "asymmetric-cpu-4.json")
CPUS = read_cluster(ROOT / "examples" / "clusters" / "cpu-4.yaml")
TOKENS = PLAN.global_batch * PLAN.sequence_length
FLOP = model_flop(PLAN.transformer, PLAN.global_batch, PLAN.sequence_length)


def told_on_cpu(result: RunResult, cluster: Cluster | None = None) -> RunReport:
    return run_report(result, cluster, "cpu", through_host=True)


# --- The cluster -----------------------------------------------------------------------------------------------------


def test_the_example_plan_and_cluster_of_four_processes_are_what_their_names_say() -> None:
    first, second = PLAN.pipelines
    assert PLAN.cluster == CPUS.name and PLAN.devices == tuple(device.name for device in CPUS.devices)
    assert [len(stage.devices) for stage in first.stages] == [2] and [len(stage.devices) for stage in second.stages] == [1, 1]
    assert second.stages[0].layer_count != second.stages[1].layer_count
    assert (first.micro_batch, first.micro_batches) != (second.micro_batch, second.micro_batches)


def test_without_a_cluster_the_nodes_of_the_plan_are_cpus_with_the_measured_peak_and_their_share_of_the_memory() -> None:
    peaks = {"cpu/0": 10e9, "cpu/1": 20e9, "cpu/2": 30e9, "cpu/3": 40e9}
    cluster = stand_in(PLAN, result_of(PLAN, CPUS, peaks=peaks), "cpu", through_host=True)
    (node,) = cluster.nodes
    assert (node.name, node.gpus, node.gpu.name) == ("cpu", 4, "CPU")
    assert cluster.peak_flop_per_s("fp32") == pytest.approx(100e9)
    assert node.gpu.memory_bytes == machine.machine_bytes() // 4
    assert node.gpu.efficiency.matmul_fraction == 1.0
    assert node.intra.bandwidth_bytes_per_s == LOOPBACK_BYTES_PER_S


def test_a_cpu_has_the_plans_precision_too_whatever_it_is() -> None:
    plan = replace(PLAN, precision="bf16")
    result = replace(result_of(PLAN, CPUS), trace=replace(result_of(PLAN, CPUS).trace, plan=plan))
    told = told_on_cpu(result)
    assert told.cluster.device("cpu/0").gpu.peak("bf16") == pytest.approx(50e9)
    assert told.simulated is not None and told.why_not is None


def test_workers_that_share_cores_are_as_much_slower_in_all_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(cores: int) -> Node:
        monkeypatch.setattr(machine, "cores", lambda: cores)
        return stand_in(PLAN, result_of(PLAN, CPUS), "cpu", through_host=True).nodes[0]

    assert node(64) == node(4)
    own, shared, nominal = node(4), node(2), gpu_kind("CPU")
    assert own.intra.latency_s == machine.LOOPBACK_LATENCY_S == shared.intra.latency_s / 2
    assert own.gpu.memory_bandwidth_bytes_per_s == nominal.memory_bandwidth_bytes_per_s
    assert shared.gpu.memory_bandwidth_bytes_per_s == nominal.memory_bandwidth_bytes_per_s / 2
    assert own.gpu.efficiency.launch_s == nominal.efficiency.launch_s == shared.gpu.efficiency.launch_s / 2
    assert shared.gpu.peak("fp32") == own.gpu.peak("fp32")  # measured by all workers at once


def test_constants_of_a_cluster_file_stay_as_they_are() -> None:
    efficiency = replace(gpu_kind("CPU").efficiency, launch_s=1e-3)
    kind = replace(gpu_kind("CPU"), efficiency=efficiency, memory_bandwidth_bytes_per_s=1e9)
    told = told_on_cpu(result_of(PLAN, CPUS), replace(CPUS, nodes=(replace(CPUS.nodes[0], gpu=kind),)))
    assert told.cluster.nodes[0].gpu == replace(kind, peak_flop_per_s={"fp32": 50e9})


def test_nodes_of_one_machine_are_linked_as_their_devices_are() -> None:
    text = TINY_PLAN.replace('"bf16"', '"fp32"').replace("box/0", "left/0").replace("box/1", "right/2")
    plan = parse_plan(text)
    cluster = stand_in(plan, result_of(PLAN, CPUS, peaks=dict.fromkeys(plan.devices, 1e9)), "cpu", through_host=True)
    assert [(node.name, node.gpus) for node in cluster.nodes] == [("left", 1), ("right", 3)]
    links = {link.name: link.capacity_bytes_per_s for link in simulate(plan, cluster).links}
    assert links == {"left/nic0>fabric": 2e9, "fabric>right/nic2": 2e9, "right/nic2>fabric": 2e9, "fabric>left/nic0": 2e9}


def test_a_runs_trace_tells_the_cluster_that_is_simulated_whatever_each_node_reached() -> None:
    plan = parse_plan(TINY_PLAN.replace('"bf16"', '"fp32"').replace("box/0", "left/0").replace("box/1", "right/2"))
    peaks = {"left/0": 1e9, "right/2": 3e9}
    world = stand_in(plan, result_of(PLAN, CPUS, peaks=peaks), "cpu", through_host=True)
    told = told_on_cpu(result_of(plan, world, peaks=peaks))
    text = told.result.trace.ran_on
    assert text is not None and told.simulated_trace is not None
    cluster = parse_cluster(text, "trace")
    assert [node.gpu.peak("fp32") for node in cluster.nodes] == [1e9, 3e9]
    assert simulate(plan, cluster).spans == told.simulated_trace.spans
    assert parse_trace(trace_json(told.result.trace)) == told.result.trace


@pytest.mark.parametrize("through_host", [True, False])
def test_gpus_are_of_the_kind_that_the_run_found(through_host: bool) -> None:
    plan = parse_plan(TINY_PLAN)
    result = result_of(plan, gpus(), kind="RTX4090", peaks=dict.fromkeys(plan.devices, 165e12))
    cluster = stand_in(plan, result, "cuda", through_host)
    (node,) = cluster.nodes
    assert node.gpu == gpu_kind("RTX4090") and node.gpus == 2
    assert (node.intra.kind == "pcie4") is not through_host
    nvlink = stand_in(plan, replace(result, device_kinds=dict.fromkeys(plan.devices, "H200")), "cuda", through_host)
    expected = LOOPBACK_BYTES_PER_S if through_host else gpu_kind("H200").nvlink_bytes_per_s
    assert nvlink.nodes[0].intra.bandwidth_bytes_per_s == expected


def gpus() -> Cluster:
    """A node of two RTX 4090s, as the tiny plan has it."""
    plan = parse_plan(TINY_PLAN)
    facts = result_of(PLAN, CPUS, kind="RTX4090")
    return stand_in(plan, replace(facts, device_kinds=dict.fromkeys(plan.devices, "RTX4090")), "cuda", through_host=False)


def test_a_plan_that_this_machine_cannot_hold_is_told_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_large(PLAN) is None
    needed = sum(allocated_bytes(PLAN, "cpu").values())
    monkeypatch.setattr(machine, "machine_bytes", lambda: needed)
    assert too_large(PLAN) is None
    monkeypatch.setattr(machine, "machine_bytes", lambda: needed - 1)
    reason = too_large(PLAN)
    assert reason is not None
    assert (reason.reason, reason.need_bytes, reason.have_bytes) == ("memory", needed, needed - 1)
    assert "4 workers need" in reason.message


# --- The reports -----------------------------------------------------------------------------------------------------


def test_the_figures_of_the_measured_report_are_those_of_the_median_step() -> None:
    step = simulate(PLAN, CPUS).iteration_s
    result = result_of(PLAN, CPUS, iteration_s=1.25 * step)  # a quarter of a step longer than the spans of the traced one
    told = told_on_cpu(result)
    measured = told.measured
    assert measured.iteration_s == told.trace.iteration_s == pytest.approx(1.25 * step)
    assert measured.tokens_per_s == pytest.approx(TOKENS / (1.25 * step)) == pytest.approx(result.tokens_per_s)
    assert measured.mfu == measured.mfu_used == measured.hfu == pytest.approx(FLOP / (1.25 * step * 200e9))
    assert measured.peak_bytes == dict.fromkeys(PLAN.devices, 2**20)
    traced = report(result.trace, CPUS)
    assert measured.bubble is not None and traced.bubble is not None
    assert 1 - measured.bubble == pytest.approx((1 - traced.bubble) / 1.25)  # what the spans do not cover is idle
    for use in measured.devices:
        assert use.busy_s + use.communication_s + use.idle_s == pytest.approx(1.25 * step)


def test_a_trace_of_a_longer_step_than_the_median_is_scaled_to_it() -> None:
    step = simulate(PLAN, CPUS).iteration_s
    result = result_of(PLAN, CPUS, iteration_s=step / 2)
    told = told_on_cpu(result)
    assert max(span.end_s for span in told.trace.spans) == pytest.approx(step / 2)
    assert told.measured.bubble == pytest.approx(report(result.trace, CPUS).bubble)


def test_devices_that_the_plan_leaves_out_do_not_count_where_the_machine_stands_in() -> None:
    text = TINY_PLAN.replace('"bf16"', '"fp32"').replace("box/1", "box/6")
    plan = parse_plan(text)
    eight = replace(CPUS, nodes=(replace(CPUS.nodes[0], name="box", gpus=8),))
    told = told_on_cpu(result_of(plan, eight))
    flop = model_flop(plan.transformer, plan.global_batch, plan.sequence_length)
    assert told.simulated is not None and len(told.cluster.devices) == 7
    for found in (told.measured, told.simulated):
        assert found.iteration_s is not None
        assert found.mfu == found.mfu_used == pytest.approx(flop / (found.iteration_s * 2 * 50e9))


def test_hfu_counts_recomputation_where_the_machine_stands_in() -> None:
    stages = tuple(replace(p, stages=tuple(replace(s, recompute="full") for s in p.stages)) for p in PLAN.pipelines)
    plan = replace(PLAN, pipelines=stages)
    told = told_on_cpu(result_of(plan, CPUS))
    on_cluster = report(told.trace, told.cluster)
    assert told.measured.hfu == pytest.approx(on_cluster.hfu)
    assert told.measured.mfu is not None and told.measured.hfu is not None and told.measured.hfu > told.measured.mfu


@pytest.mark.parametrize(("precision", "element_bytes"), [("bf16", 2), ("fp32", 4)])
def test_the_peak_of_a_gpu_has_logits_and_their_gradient_and_the_softmax_of_a_few(precision: str, element_bytes: int) -> None:
    """Of 2 sequences of 1,024 tokens the logits are far more than all else; the plan has one micro-batch in flight."""
    stage = Stage((Replica(("box/0",), 2),), ((0, 1),))
    model = Transformer(name="narrow", layers=1, hidden=16, ffn=16, heads=1, vocab=50_000)
    plan = Plan("box", model, 1024, 4, (Pipeline(2, 2, (stage,)),), precision=precision)
    on_cpu, on_gpu = (allocated_bytes(plan, device)["box/0"] for device in ("cpu", "cuda"))
    logits = 2 * 1024 * 50_000
    few = 4 * LOSS_NUMBERS * (2 if element_bytes < 4 else 1)  # their softmax, and those of a narrower type in fp32
    less = 1.04 * logits * (element_bytes + 8) - 1.01 * logits * 2 * element_bytes
    assert on_cpu - on_gpu == pytest.approx(less - few - 0.16 * 2**30, rel=0.01)


def test_a_run_that_goes_as_the_simulation_says_has_no_difference() -> None:
    told = told_on_cpu(result_of(PLAN, CPUS))
    exact = told_on_cpu(result_of(PLAN, told.cluster))  # measured on the very machine that stands in
    assert exact.simulated is not None
    for name in ("iteration_s", "tokens_per_s", "mfu", "hfu", "bubble"):
        assert getattr(exact.simulated, name) == pytest.approx(getattr(exact.measured, name)), name
    assert exact.simulated.peak_bytes == allocated_bytes(PLAN, "cpu")


def test_a_cluster_of_cpus_keeps_its_links_and_has_the_measured_peak() -> None:
    told = told_on_cpu(result_of(PLAN, CPUS), CPUS)
    assert not told.stands_in and told.cluster.name == "cpu-4"
    assert told.cluster.nodes[0].intra == CPUS.nodes[0].intra
    assert told.cluster.device("cpu/3").gpu.peak("fp32") == pytest.approx(50e9)
    assert told.cluster.device("cpu/3").gpu.memory_bytes == CPUS.device("cpu/3").gpu.memory_bytes


def test_mfu_counts_all_of_a_clusters_cpus_and_those_that_did_not_run_have_the_mean_peak() -> None:
    more = replace(CPUS, nodes=(replace(CPUS.nodes[0], gpus=8),))
    told = told_on_cpu(result_of(PLAN, CPUS), more)
    assert told.measured.mfu is not None and told.measured.mfu_used is not None
    assert told.measured.mfu == pytest.approx(told.measured.mfu_used / 2)
    assert told.measured.mfu_used == pytest.approx(FLOP / (told.result.iteration_s * 200e9))


def test_a_cluster_of_gpus_says_nothing_of_cpus() -> None:
    node = replace(CPUS.nodes[0], gpu=gpu_kind("H200"))
    told = told_on_cpu(result_of(PLAN, CPUS), replace(CPUS, nodes=(node,)))
    assert told.stands_in and told.cluster.name == "this machine" and told.cluster.device("cpu/0").gpu.name == "CPU"


def test_gpus_on_their_cluster_are_told_on_it_as_it_is() -> None:
    plan, cluster = parse_plan(TINY_PLAN), gpus()
    result = result_of(plan, cluster, kind="RTX4090", peaks=dict.fromkeys(plan.devices, 165e12), slower=1.5)
    told = run_report(result, cluster, "cuda", through_host=False)
    assert told.cluster is cluster and told.simulated is not None
    assert told.simulated.iteration_s == pytest.approx(simulate(plan, cluster).iteration_s)
    assert told.measured.iteration_s == pytest.approx(1.5 * simulate(plan, cluster).iteration_s)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"box/0": "Some GPU", "box/1": "Some GPU"}, "does not know the GPU kind 'Some GPU'"),
        ({"box/0": "RTX4090", "box/1": "RTX3090"}, "of several kinds (RTX4090, RTX3090)"),
    ],
)
def test_the_measured_report_stands_where_nothing_can_be_simulated(kinds: dict[str, str], words: str) -> None:
    plan = parse_plan(TINY_PLAN)
    result = result_of(plan, gpus(), kind="RTX4090", peaks={}, device_kinds=kinds)
    told = run_report(result, None, "cuda", through_host=False)
    assert told.simulated is None and told.simulated_trace is None and told.why_not is not None and words in told.why_not
    assert told.measured.iteration_s == result.iteration_s
    assert [told.measured.mfu, told.measured.hfu, told.measured.energy_j, told.measured.dollars] == [None] * 4
    assert told.measured.bubble == pytest.approx(report(result.trace, gpus()).bubble)
    assert json.loads(run_json(told))["simulated"] is None
    assert words in json.loads(run_json(told))["not_simulated"]
    assert run_titles(told)[1] == ""
    assert told.cluster.device("box/1").gpu.name == " or ".join(dict.fromkeys(kinds.values()))


def test_devices_without_a_node_in_their_name_are_told() -> None:
    plan = parse_plan(TINY_PLAN.replace("box/0", "first"))
    with pytest.raises(InputError, match=r"NODE/INDEX.*'first'"):
        stand_in(plan, result_of(PLAN, CPUS), "cpu", through_host=True)


# --- Files and tables ------------------------------------------------------------------------------------------------


def test_the_file_has_the_keys_of_a_report_and_those_of_a_run() -> None:
    told = told_on_cpu(result_of(PLAN, CPUS, losses=(5.5, math.nan, math.inf)))
    written = json.loads(run_json(told))
    simulated = written.pop("simulated")
    assert set(simulated) < set(written)
    assert {"iteration_s", "tokens_per_s", "mfu", "mfu_used", "hfu", "bubble", "peak_bytes", "infeasible"} < set(simulated)
    assert written["losses"] == [5.5, None, None] and len(written["step_s"]) == 3
    assert written["iteration_s"] == told.measured.iteration_s and simulated["iteration_s"] == told.simulated.iteration_s  # type: ignore[union-attr]
    assert written["infeasible"] is None and written["peak_measured"] is True
    assert len(written["devices"]) == len(simulated["devices"]) == 4


def table_lines(told: RunReport) -> list[list[str]]:
    """The cells of the run's table, by two spaces or more between them."""
    console = Console(width=100, record=True, file=open(Path("/dev/null"), "w"))  # noqa: SIM115
    console.print(run_table(told))
    lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_the_table_tells_how_far_the_simulation_is_from_the_measurement() -> None:
    exact = told_on_cpu(result_of(PLAN, told_on_cpu(result_of(PLAN, CPUS)).cluster, slower=2.0))
    rows = {line[0]: line[1:] for line in table_lines(exact) if line}
    assert rows["iteration"][2] == "-50.0 %" and rows["tokens/s"][2] == "+100.0 %" and rows["bubble"][2] == "+0.0 %"
    assert rows["peak memory of cpu/0"][0] == "1 MiB"
    assert rows["MFU"] == rows["HFU (counts recomputation)"]


def test_the_titles_of_the_pictures_say_what_is_measured_and_what_is_not() -> None:
    told = told_on_cpu(result_of(PLAN, told_on_cpu(result_of(PLAN, CPUS)).cluster, slower=2.0))
    measured, simulated = run_titles(told)
    assert (
        measured.startswith(f"small-llama on cpu-4, {PLAN.global_batch} x {PLAN.sequence_length} tokens, fp32")
        and "one measured iteration of " in measured
    )
    assert simulated.startswith("one simulated iteration of ") and "(-50.0 %), MFU" in simulated
