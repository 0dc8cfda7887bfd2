"""Why plans cannot run, and that each reason is told in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.cost.feasibility import infeasible
from sim.cost.memory import host_bytes, peak_bytes
from sim.engine import simulate
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.gpu import gpu_kind
from sim.spec.judge import Infeasible
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.transformer import Transformer

NIC = Nic("ethernet", 1.25e9)
CLUSTER = Cluster(
    "mixed",
    (
        Node("a100", gpu_kind("A100-80GB-SXM"), 8, Intra("nvlink", 3e11), NIC),
        Node("rtx4090-0", gpu_kind("RTX4090"), 8, Intra("pcie4", 2.4e10), NIC),
        Node("v100", gpu_kind("V100-32GB-SXM"), 4, Intra("nvlink", 1.5e11), NIC),
    ),
)
SMALL = Transformer(name="small", layers=4, hidden=768, ffn=2048, heads=12, kv_heads=4, vocab=1000)


def plan(*groups: tuple[str, ...], model: str | Transformer = SMALL, **fields: object) -> Plan:
    """One pipeline with a stage for each group of devices."""
    layers = 4 if isinstance(model, Transformer) else 40
    cuts = [round(i * layers / len(groups)) for i in range(len(groups) + 1)]
    stages = tuple(Stage((Replica(group, 1),), ((cuts[i], cuts[i + 1]),)) for i, group in enumerate(groups))
    values: dict[str, object] = {"sequence_length": 1024, "global_batch": 4, "pipelines": (Pipeline(1, 4, stages),)}
    return Plan("mixed", model, **(values | fields))  # type: ignore[arg-type]


def devices(node: str, count: int) -> tuple[str, ...]:
    return tuple(f"{node}/{i}" for i in range(count))


def why(plan: Plan) -> Infeasible:
    found = infeasible(plan, CLUSTER)
    assert found is not None
    assert "\n" not in found.message
    return found


def test_a_plan_that_fits_has_no_reason() -> None:
    assert infeasible(plan(("a100/0", "a100/1"), ("rtx4090-0/0",)), CLUSTER) is None


def test_offloaded_states_have_to_fit_in_the_host_that_lacks_the_most() -> None:
    offloaded = plan(("a100/0", "a100/1"), ("rtx4090-0/0",), offload_optimizer=True)
    need = host_bytes(offloaded)
    for lack, short in ((0, None), (1, "a100"), (2**20, "a100")):
        have = need | {"a100": need["a100"] - lack}
        nodes = tuple(replace(node, host_memory_bytes=have.get(node.name)) for node in CLUSTER.nodes)
        found = infeasible(offloaded, CLUSTER.with_nodes(nodes))
        if short is None:
            assert found is None
        else:
            assert found is not None and (found.reason, found.device) == ("memory", None)
            assert (found.need_bytes, found.have_bytes) == (need["a100"], need["a100"] - lack)
            assert found.message.startswith("the host of a100 needs 0.2 GiB") and "host_memory" in found.message
    assert infeasible(replace(offloaded, offload_optimizer=False), CLUSTER.with_nodes(nodes)) is None


def test_offloading_gains_neither_room_nor_time_where_devices_are_cpus() -> None:
    """Their memory is the host's: what goes there has to fit beside what is there."""
    offloaded = plan(("cpu/0",), ("cpu/1",), precision="fp32", offload_optimizer=True)
    need = host_bytes(offloaded)["cpu"] + sum(peak_bytes(offloaded, CLUSTER).values())
    for lack in (0, 2):
        kind = replace(gpu_kind("CPU"), memory_bytes=-(-need // 2) - lack)
        world = CLUSTER.with_nodes((Node("cpu", kind, 2, Intra("nvlink", 3e9)),))
        found = infeasible(offloaded, world)
        assert (found is None) == (lack == 0)
        if found is not None:
            assert found.need_bytes == need
            told = f"the host of cpu needs {need / 2**30:.1f} GiB for its devices and the optimizer's states"
            assert found.message.startswith(told)
    assert simulate(offloaded, world).iteration_s == simulate(replace(offloaded, offload_optimizer=False), world).iteration_s


def test_a_group_may_span_nodes() -> None:
    assert infeasible(plan(("a100/0", "rtx4090-0/0")), CLUSTER) is None


def test_devices_that_the_cluster_lacks_are_listed() -> None:
    found = why(plan(("a100/7",), ("a100/8", "h100/0")))
    assert (found.reason, found.device, found.need_bytes, found.have_bytes) == ("devices", "a100/8", None, None)
    assert found.message.startswith(
        "the plan uses a100/8, h100/0, which cluster 'mixed' does not have (it has a100/0-7, rtx4090-0/0-7, v100/0-3)"
    )


def test_a_kind_without_the_precision_is_named_with_what_it_has() -> None:
    found = why(plan(("a100/0",), ("v100/2",)))
    assert (found.reason, found.device) == ("precision", "v100/2")
    assert found.message == "v100/2 is of kind V100-32GB-SXM, which does not have bf16 (it has fp32, fp16)"


def test_heads_that_the_degree_does_not_divide_are_told_with_numbers() -> None:
    found = why(plan(("rtx4090-0/0",), devices("a100", 5)))
    assert (found.reason, found.device) == ("heads", "a100/0")
    assert "small has 12 heads and the group 5 devices (pipeline 0, stage 1)" in found.message


def test_key_value_heads_divide_the_degree_or_are_divided_by_it() -> None:
    assert infeasible(plan(devices("a100", 2)), CLUSTER) is None
    assert infeasible(plan(devices("a100", 8), model=replace(SMALL, heads=16, head_dim=48)), CLUSTER) is None
    found = why(plan(devices("a100", 6)))
    assert found.reason == "heads"
    assert "small has 4 key-value heads and the group 6 devices" in found.message


def test_sequence_parallelism_needs_tokens_that_the_degree_divides() -> None:
    odd = plan(("a100/0", "a100/1"), sequence_length=1023)
    assert infeasible(odd, CLUSTER) is None
    found = why(replace(odd, sequence_parallel=True))
    assert (found.reason, found.device) == ("batch", "a100/0")
    assert "it has 1023 tokens and the group 2 devices" in found.message


def test_context_ranks_take_two_equal_stretches_of_every_sequence() -> None:
    ranks = plan(devices("a100", 4), context_parallel=2)  # two tensor ranks each
    assert infeasible(ranks, CLUSTER) is None
    found = why(replace(ranks, sequence_length=1022))
    assert (found.reason, found.device) == ("batch", "a100/0")
    assert "it has 1022 tokens and there are 2 ranks" in found.message
    # 1028 tokens are 257 in each of 4 stretches, and 514 on a rank, which two tensor ranks divide but four do not.
    assert infeasible(replace(ranks, sequence_length=1028, sequence_parallel=True), CLUSTER) is None
    found = why(replace(plan(devices("a100", 8), context_parallel=2), sequence_length=1028, sequence_parallel=True))
    assert "it has 514 tokens and the group 4 devices" in found.message


def test_heads_are_divided_over_tensor_ranks_and_not_over_context_ranks() -> None:
    assert infeasible(plan(devices("a100", 8), context_parallel=2), CLUSTER) is None  # 12 heads over 4
    assert why(plan(devices("a100", 8))).reason == "heads"


def test_the_device_that_lacks_most_memory_is_named_with_its_parts() -> None:
    uneven = plan(devices("a100", 8), ("rtx4090-0/2",), ("rtx4090-0/3", "rtx4090-0/4"), model="llama-2-13b")
    found = why(uneven)
    peaks = peak_bytes(uneven, CLUSTER)
    assert (found.reason, found.device) == ("memory", "rtx4090-0/2")
    assert (found.need_bytes, found.have_bytes) == (peaks["rtx4090-0/2"], gpu_kind("RTX4090").memory_bytes)
    need, have = peaks["rtx4090-0/2"] / 2**30, gpu_kind("RTX4090").memory_bytes / 2**30
    assert found.message.startswith(f"rtx4090-0/2 needs {need:.1f} GiB (parameters ")
    assert found.message.endswith(f") but has {have:.1f} GiB")


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_llama_2_13b_on_one_24_gb_card_lacks_memory(zero_stage: int) -> None:
    assert why(plan(("rtx4090-0/0",), model="llama-2-13b", zero_stage=zero_stage)).reason == "memory"


def test_the_first_reason_is_told_where_there_are_several() -> None:
    everything = plan((*devices("v100", 4), "nowhere/0"), model="llama-2-13b", sequence_length=1023, sequence_parallel=True)
    assert why(everything).reason == "devices"
    known = plan(
        (*devices("v100", 4), "a100/0", "a100/1", "a100/2"), model="llama-2-13b", sequence_length=1023, sequence_parallel=True
    )
    assert why(known).reason == "precision"
    supported = replace(known, precision="fp16")
    assert why(supported).reason == "heads"
    even = plan(devices("v100", 4), model="llama-2-13b", sequence_length=1023, sequence_parallel=True, precision="fp16")
    assert why(even).reason == "batch"
    assert why(replace(even, sequence_parallel=False)).reason == "memory"
