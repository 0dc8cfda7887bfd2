"""Files of constants: what is written is read again, and takes the place of the shipped ones, and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.constants import Constants, constants_text, parse_constants
from sim.spec.cluster import Cluster, Fabric, Intra, Links, Node, links
from sim.spec.gpu import Efficiency, efficiencies, gpu_kind
from sim.spec.stack import Stack, stack, stacks


def again(constants: Constants) -> Constants:
    return parse_constants(constants_text(constants), "written.yaml")


# --- Written and read again ------------------------------------------------------------------------------------------


def four_digits(least: float, most: float) -> st.SearchStrategy[float]:
    """Numbers of one digit or of four, of every order of magnitude between two above zero."""
    logarithms = st.floats(math.log(least), math.log(most))
    figures = st.builds(lambda digits, x: float(f"{math.exp(x):.{digits}g}"), st.sampled_from((1, 4)), logarithms)
    return figures.map(lambda value: min(max(value, least), most))


fractions, times = four_digits(1e-6, 1.0), st.just(0.0) | four_digits(1e-9, 1.0)
scales = st.just(1.0) | four_digits(0.01, 100.0)
names = st.sampled_from(tuple(stacks())) | st.just("mine")
sources = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_categories=["Cc", "Zs"]) | st.just(" "), min_size=1
)
said = sources.map(lambda text: " ".join(text.split())).filter(bool)

software = st.builds(
    Stack,
    names,
    flash_attention=st.booleans(),
    matmul_scale=scales,
    unaligned_scale=st.just(1.0) | four_digits(0.01, 1.0),
    attention_scale=scales,
    memory_traffic=scales,
    sharded_traffic=st.just(0.0) | four_digits(0.01, 100.0),
    routing_traffic=st.just(0.0) | four_digits(0.01, 100.0),
    kernel_s=times,
    loss_traffic=scales,
    backward_traffic=scales,
    gradient_bytes=st.just(0.0) | four_digits(1e-6, 1000.0),
    host_s=times,
    tensor_host_s=times,
    ring_step_s=times,
    micro_batch_s=times,
    tensor_overlap=st.just(0.0) | fractions,
    node_collective_scale=scales,
    collective_scale=scales,
    overlap_slowdown=st.just(0.0) | four_digits(1e-6, 10.0),
    optimizer_traffic=scales,
    step_s=times,
    gradient_copy=st.booleans(),
    activation_scale=scales,
    logits_scale=scales,
    context_bytes=st.just(0.0) | four_digits(1.0, 1e6).map(lambda mebibytes: mebibytes * 2**20),
    source=said,
).map(
    lambda written: replace(
        written,
        variant_of=stacks().get(written.name, written).variant_of,
        mean_of=stacks().get(written.name, written).mean_of,
    )
)
records = st.builds(
    Efficiency,
    matmul_fraction=fractions,
    fp32_fraction=fractions,
    matmul_half_s=times,
    matmul_traffic=st.just(0.0) | fractions,
    attention_fraction=fractions,
    attention_keys=st.just(0.0) | four_digits(1.0, 1e9),
    attention_rows=st.just(0.0) | four_digits(1.0, 1e9),
    attention_width=st.just(0.0) | four_digits(1.0, 1e9),
    memory_fraction=fractions,
    launch_s=times,
    source=said,
)


@given(software)
@example(Stack("deepspeed-zero3", flash_attention=True, source="its record has none, and the usual stack has it"))
@example(Stack("mine", overlap_slowdown=1e-5, gradient_bytes=1e-6, source="1e-05 without a point is a text in YAML"))
@example(Stack("mine", source='a "quote", a back\\slash, a colon: and a # that begins no comment'))
@example(Stack("mine", source="words enough for three lines, " * 10 + "and a last"))
def test_a_stack_that_is_written_is_read_again(written: Stack) -> None:
    found = again(Constants(stacks={written.name: written})).stacks
    assert list(found) == [written.name]
    assert_equal(found[written.name], written)


@given(st.sampled_from(tuple(efficiencies())), records)
@example("volta", replace(efficiencies()["volta"], attention_rows=20000.0))
def test_an_efficiency_that_is_written_is_read_again(name: str, written: Efficiency) -> None:
    found = again(Constants(efficiencies={name: written})).efficiencies
    assert list(found) == [name]
    assert_equal(found[name], written)


def assert_equal(found: Stack | Efficiency, written: Stack | Efficiency) -> None:
    """Four digits are kept to the last bit but for that of a unit."""
    for field in fields(written):
        value = getattr(written, field.name)
        assert getattr(found, field.name) == (pytest.approx(value, rel=1e-12) if type(value) is float else value), field.name


@given(st.floats(1e-9, 0.99))
def test_figures_have_four_digits(value: float) -> None:
    written = Stack("mine", host_s=value, tensor_overlap=value, source="any")
    found = again(Constants(stacks={"mine": written})).stacks["mine"]
    # Half a unit of the last digit, where the first is 1.
    assert (found.host_s, found.tensor_overlap) == pytest.approx((value, value), rel=5.001e-4)


def test_links_that_are_written_are_read_again() -> None:
    told = Links({**links().efficiency, "nvlink": 0.7123}, {**links().latency_s, "pcie4": 1.234e-6}, 31e-6, 0.0)
    assert again(Constants(links=told)).links == told
    assert again(Constants(stacks=stacks())).links is None


def test_all_that_is_shipped_is_written_and_read_again() -> None:
    # A written file takes the place of the shipped one: nothing is left out.
    found = again(Constants(efficiencies(), stacks(), links()))
    assert found == Constants(efficiencies(), stacks(), links())


# --- In the place of the shipped -------------------------------------------------------------------------------------


def cluster(stack_of_it: Stack, **efficiency: float) -> Cluster:
    """One node of A100s; with constants of the kind that are the cluster's own, where they are given."""
    gpu = gpu_kind("A100-80GB-SXM")
    if efficiency:
        gpu = replace(gpu, efficiency=replace(gpu.efficiency, **efficiency))  # type: ignore[arg-type]
    node = Node("n", gpu, 8, Intra("nvswitch", 300e9, latency_s=links().latency_s["nvswitch"]))
    return Cluster("one", (node,), Fabric(start_s=links().start_s, step_s=links().step_s), stack=stack_of_it)


def applied(text: str, to: Cluster) -> Cluster:
    return parse_constants(text, "mine.yaml").applied(to)


def test_a_record_changes_what_it_mentions_of_the_shipped_one() -> None:
    here = cluster(stack("deepspeed-zero3"))
    found = applied("stacks: {deepspeed-zero3: {host: 9 us}}", here).stack
    assert found == replace(stack("deepspeed-zero3"), host_s=9e-6)
    found = applied("stacks: {deepspeed-zero3: {like: nemo, host: 9 us}}", here).stack
    assert replace(found, source="") == replace(stack("nemo"), name="deepspeed-zero3", host_s=9e-6, source="")


def test_records_of_other_names_change_nothing() -> None:
    here = cluster(stack("nemo"))
    assert applied("stacks: {maxtext: {host: 9 us}, mine: {host: 9 us}}\nefficiencies: {volta: {launch: 9 us}}", here) == here


def test_kinds_take_their_record_and_keep_what_the_cluster_says_of_them() -> None:
    text = "efficiencies: {ampere-datacenter: {matmul_fraction: 0.25}}"
    assert applied(text, cluster(stack("nemo"))).nodes[0].gpu.efficiency.matmul_fraction == 0.25
    own = cluster(stack("nemo"), launch_s=5e-6)  # which is no shipped record any more
    assert applied(text, own) == own


def test_links_take_the_place_of_the_shipped_but_for_what_the_cluster_says() -> None:
    latency = ", ".join(f"{kind}: 7 us" for kind in links().latency_s)
    efficiency = ", ".join(f"{protocol}: 0.5" for protocol in links().efficiency)
    text = f"links: {{efficiency: {{{efficiency}}}, latency: {{{latency}}}, start: 1 us, step: 2 us}}"
    shipped = cluster(stack("nemo"))
    found = applied(text, shipped)
    assert (found.fabric.start_s, found.fabric.step_s, found.nodes[0].intra.latency_s) == (1e-6, 2e-6, 7e-6)
    assert {found.fabric.efficiency(protocol) for protocol in links().efficiency} == {0.5}
    own = replace(shipped, fabric=Fabric(protocol_efficiency=(("nvlink", 0.9),), start_s=3e-6, step_s=links().step_s))
    own = replace(own, nodes=(replace(own.nodes[0], intra=replace(own.nodes[0].intra, latency_s=4e-6)),))
    found = applied(text, own)
    assert (found.fabric.start_s, found.fabric.step_s, found.nodes[0].intra.latency_s) == (3e-6, 2e-6, 4e-6)
    rates: Mapping[str, float] = {name: found.fabric.efficiency(name) for name in ("nvlink", "pcie")}
    assert rates == {"nvlink": 0.9, "pcie": 0.5}
