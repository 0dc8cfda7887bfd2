"""Calibration against a known truth: runs simulated on a cluster that differs from the file in hidden ways, with some noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sim.calibrate import Calibrated, Elsewhere, Observed, Prediction, calibrate, observed
from sim.calibrate.constants import constants_of
from sim.calibrate.fit import Fitting, _interval, _kendall, peaks_bytes, with_benches
from sim.calibrate.observations import run_spread
from sim.cost.network import Network
from sim.engine import simulate
from sim.spec.bench import Bench, LinkMeasurement, Measurement
from sim.spec.cluster import LinkOverride
from sim.spec.program import Backward, Forward, work_key
from sim.spec.reading import InputError
from sim.spec.trace import Trace
from tests.calibration_runs import EFFICIENCY, LARGE, MIXED, hidden_factors, measured, random_plans, truth

WORLD = MIXED.without_nodes({"large-1", "small-1"})
"""Two nodes of two devices, at two sites."""

FACTORS = hidden_factors(WORLD, seed=3)
THERE = LinkOverride("site:centre>site:workshop", 1.75e6)
TRUE = truth(WORLD, FACTORS, [THERE])
PLANS = random_plans(14, 5, WORLD, batch=6)


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, Trace]]:
    """Two runs of ten plans."""
    return [(f"{i}-{k}.json", measured(plan, TRUE, 10 * i + k)) for i, plan in enumerate(PLANS[:10]) for k in range(2)]


@pytest.fixture(scope="module")
def found(runs: list[tuple[str, Trace]]) -> Calibrated:
    """What is found from them, with half of the plans held out."""
    return calibrate(WORLD, runs, holdout=0.5, seed=1)


def test_hidden_factors_of_devices_are_recovered(found: Calibrated) -> None:
    for name, factor in FACTORS.items():
        assert found.cluster.device(name).gpu.speed * factor == pytest.approx(1, abs=0.01), name


def test_a_link_that_is_slower_in_one_direction_is_told_from_the_other(found: Calibrated) -> None:
    rates = {told.name: told.after for told in found.constants}
    assert rates["bandwidth of site:centre>site:workshop"] == pytest.approx(1.75e6, rel=0.05)
    assert rates["bandwidth of site:workshop>site:centre"] == pytest.approx(2.5e6, rel=0.05)


def test_lanes_that_the_model_cannot_tell_do_not_bend_links_and_devices() -> None:
    # Lanes of several devices take longer by 60 % than the constants say, in each plan more or less.
    rng = np.random.default_rng(0)
    some = []
    for i, plan in enumerate(PLANS[:10]):
        free = measured(plan, TRUE, i)
        longer = 1.6 * math.exp(rng.normal(0, 0.1))
        known_s = {
            (span.lane, *work_key(span.instruction, 1)): (span.end_s - span.start_s)
            * (longer if len(free.lanes[span.lane]) > 1 else 1.0)
            for span in free.spans
            if isinstance(span.instruction, (Forward, Backward))
        }
        some.append((f"{i}.json", replace(simulate(plan, TRUE, known_s=known_s), origin="paced")))
    several = [any(len(devices) > 1 for devices in trace.lanes.values()) for _, trace in some]
    assert 3 <= sum(several) <= 8
    there = Fitting(TRUE, observed(some, WORLD))
    predicted, _ = there._logs(range(10), np.zeros(len(there.constants)))
    for (_, trace), logs in zip(some, predicted, strict=True):
        assert logs[0] == pytest.approx(math.log(trace.iteration_s), abs=0.005)
    assert sum(simulate(trace.plan, TRUE).iteration_s < 0.95 * trace.iteration_s for _, trace in some) >= 2
    cluster = Fitting(WORLD, observed(some, WORLD)).fit().cluster
    network = Network(cluster)
    for name, rate in (("site:centre>site:workshop", 1.75e6), ("site:workshop>site:centre", 2.5e6)):
        assert network.named(name).capacity_bytes_per_s == pytest.approx(rate, rel=0.05), name
    for node in WORLD.nodes:
        card = f"{node.name}/nic0>fabric"
        assert network.named(card).capacity_bytes_per_s == pytest.approx(
            Network(WORLD).named(card).capacity_bytes_per_s, rel=0.05
        )
    for name, factor in FACTORS.items():
        assert cluster.device(name).gpu.speed * factor == pytest.approx(1, abs=0.03), name


def test_what_messages_take_besides_is_told_where_the_file_says_nothing() -> None:
    # A start a hundred times the link's latency, in plans of few and of many messages.
    slow = truth(WORLD, FACTORS, start_s=4e-3)
    some = [(f"{i}.json", measured(plan, slow, i)) for i, plan in enumerate(PLANS[:10])]
    fit = Fitting(WORLD, observed(some, WORLD)).fit()
    told = {one.name: one for one in fit.constants}
    assert told["fabric.start"].told and told["fabric.start"].after == pytest.approx(4e-3, rel=0.25)


def test_plans_that_no_fit_has_seen_are_predicted(found: Calibrated) -> None:
    errors = [simulate(plan, found.cluster).iteration_s / simulate(plan, TRUE).iteration_s - 1 for plan in PLANS[10:]]
    before = [simulate(plan, WORLD).iteration_s / simulate(plan, TRUE).iteration_s - 1 for plan in PLANS[10:]]
    assert max(map(abs, errors)) < 0.01 and np.median(np.abs(before)) > 0.05
    assert found.errors_after is not None and found.errors_before is not None
    assert found.errors_after.median_low <= found.errors_after.median <= found.errors_after.median_high < 0.02
    assert found.errors_before.median > 0.05


def test_held_out_plans_are_half_and_the_order_is_told(found: Calibrated) -> None:
    assert len(found.predictions) == 5 and found.how == "5 of 10 plans held out of one fit to the others"
    assert found.tau == 1.0 and 0 < found.pairs <= 10
    assert found.best_rank == 1


def test_what_the_data_do_not_tell_is_named_and_stays(found: Calibrated) -> None:
    # The links between sites are a fifth of the cards' rate and never let them work: nothing tells how fast these are.
    told = {one.name: one for one in found.constants}
    card = told["bandwidth of large-0/nic0>fabric"]
    assert not card.told and card.after == card.before
    assert found.cluster.calibration is not None and card.name in found.cluster.calibration.not_told
    assert told["speed of large-0/0"].told and told["bandwidth of site:centre>site:workshop"].told


def test_the_interval_holds_what_was_held_out_and_says_what_it_was_fitted_on(found: Calibrated) -> None:
    calibration = found.cluster.calibration
    assert calibration is not None
    assert calibration.low < 0 < calibration.high < 0.1
    inside = [calibration.low <= one.measured_s / one.after_s - 1 <= calibration.high for one in found.predictions]
    assert np.mean(inside) >= 0.8
    assert calibration.fitted_on[:2] == ("0-0.json", "0-1.json") and calibration.plans == 10 and calibration.origin == "paced"


def test_the_same_seed_gives_the_same_answer(runs: list[tuple[str, Trace]]) -> None:
    few = runs[:8:2]
    once, again = (calibrate(WORLD, few, holdout=0.5, seed=4) for _ in range(2))
    assert once.cluster == again.cluster and once.errors_after == again.errors_after


def test_the_spread_from_run_to_run_is_pooled_over_plans(runs: list[tuple[str, Trace]]) -> None:
    # Of pairs (a, b) the variance is (log a - log b)^2 / 2.
    pairs = [(runs[i][1].iteration_s, runs[i + 1][1].iteration_s) for i in range(0, 20, 2)]
    expected = math.sqrt(np.mean([math.log(a / b) ** 2 / 2 for a, b in pairs]))
    assert run_spread(observed(runs, WORLD)) == pytest.approx(expected, rel=1e-9)
    assert run_spread(observed(runs[::2], WORLD)) is None


def test_links_that_a_bench_measured_are_fitted_without_runs() -> None:
    # 1 MB takes 0.75 s there and 0.4 s back: 5 ms and 0.2 ms are latency.
    sites = [("large-0/0", "small-0/0"), ("small-0/0", "large-0/0")]
    rates = [4 / 3 * 1e6, 2.5e6]
    links = [
        LinkMeasurement("send", pair, num_bytes, num_bytes / rate + 5.2e-3)
        for pair, rate in zip(sites, rates, strict=True)
        for num_bytes in (10_000, 100_000, 1_000_000)
    ]
    cluster = calibrate(WORLD, [], [("links.yaml", Bench("gloo", links=tuple(links)))]).cluster
    told = {link.name: link.bandwidth_bytes_per_s for link in cluster.link_overrides}
    assert told["site:centre>site:workshop"] == pytest.approx(rates[0], rel=0.05)
    assert told.get("site:workshop>site:centre", 2.5e6) == pytest.approx(rates[1], rel=0.05)


def test_a_device_without_a_run_keeps_its_kinds_speed() -> None:
    plans = [plan for plan in random_plans(40, 8, WORLD, batch=8) if len(plan.pipelines) == 1][:1]
    names = [told.name for told in constants_of(WORLD, observed([("a", measured(plans[0], TRUE, 1))], WORLD))]
    assert "speed of CPU-large" in names and "speed of small-0/1" in names


def test_efficiency_records_are_fitted_where_measured_plans_tell_them() -> None:
    # The truth has other fractions than the file, and the plans are of short and of long sequences: no speed stands for both.
    alone = WORLD.without_nodes({"small-0"})
    record = replace(EFFICIENCY, memory_fraction=0.4, attention_fraction=0.15)
    true = replace(alone, nodes=(replace(alone.nodes[0], gpu=replace(LARGE, efficiency=record)),))
    plans = [plan for length, batch in ((64, 6), (512, 2)) for plan in random_plans(4, length, alone, length, batch)]
    some = [(f"{i}.json", measured(plan, true, i, origin="measured")) for i, plan in enumerate(plans)]
    found = calibrate(alone, some)
    after = {told.name: told.after for told in found.constants if told.told}
    assert after["memory_fraction of CPU-large"] == pytest.approx(0.4, rel=0.1)
    assert after["attention_fraction of CPU-large"] == pytest.approx(0.15, rel=0.1)
    assert found.errors_after is not None and found.errors_before is not None
    assert found.errors_after.largest < 0.05 < found.errors_before.median


def test_the_keys_that_attention_computes_beyond_its_mask_are_fitted_and_none_are_no_bound() -> None:
    # Seconds of attention over those without them are 1 + 2 keys / length: of three lengths, no fraction stands for the keys.
    alone = WORLD.without_nodes({"small-0"})
    some = [
        one for length, batch in ((64, 8), (128, 6), (256, 4), (512, 4)) for one in random_plans(3, length, alone, length, batch)
    ]
    for keys in (60.0, 0.0):
        true = replace(
            alone, nodes=(replace(alone.nodes[0], gpu=replace(LARGE, efficiency=replace(EFFICIENCY, attention_keys=keys))),)
        )
        runs = [(f"{i}.json", measured(plan, true, i, origin="measured")) for i, plan in enumerate(some)]
        fit = Fitting(alone, observed(runs, alone), records=True).fit()
        told = {one.name: one for one in fit.constants}["attention_keys of CPU-large"]
        assert told.after == pytest.approx(keys, rel=0.2, abs=2.0) and told.told and not told.at_bound


def test_what_a_gpus_allocator_keeps_is_fitted_to_peaks() -> None:
    gpus = replace(
        WORLD, nodes=tuple(replace(node, gpu=replace(node.gpu, name=node.gpu.name.replace("CPU", "GPU"))) for node in WORLD.nodes)
    )
    stack = replace(gpus.stack, name="own", activation_scale=1.4, fragmentation=0.12)
    plans, rng = [*random_plans(4, 5, gpus, batch=6), *random_plans(4, 6, gpus, 256, 12)], np.random.default_rng(0)
    some = []
    for i, plan in enumerate(plans):
        peaks = {name: round(num_bytes * rng.normal(1, 0.01)) for name, num_bytes in peaks_bytes(plan, stack).items()}
        some.append((f"{i}.json", replace(measured(plan, gpus, i, origin="measured"), peak_bytes=peaks)))
    fit = Fitting(gpus, observed(some, gpus)).fit()
    told = {one.name: one for one in fit.constants if one.told}
    assert told["stack.activation_scale"].after == pytest.approx(1.4, rel=0.05)
    assert told["stack.fragmentation"].after == pytest.approx(0.12, abs=0.02)
    # No bytes of a paced run, nor of a CPU's process.
    assert not any(each.peaks_bytes for each in observed([(name, replace(trace, origin="paced")) for name, trace in some], gpus))
    assert not any(each.peaks_bytes for each in observed([("a", measured(PLANS[0], TRUE, 1, origin="measured"))], WORLD))


def test_runs_elsewhere_tell_the_speed_of_a_kind() -> None:
    # They ran on another cluster with the large kind, 1.25 times as fast as the file says.
    there = replace(WORLD.without_nodes({"small-0"}), name="elsewhere")
    faster = replace(there, nodes=(replace(there.nodes[0], gpu=replace(LARGE, speed=1.25)),))
    some = [Elsewhere("runs.csv", "a", plan, there, simulate(plan, faster).iteration_s) for plan in random_plans(8, 3, there)]
    found = calibrate(WORLD, [], elsewhere=some)
    told = {one.name: one for one in found.constants}
    assert told["speed of CPU-large"].told and told["speed of CPU-large"].after == pytest.approx(1.25, rel=0.03)
    assert "speed of CPU-small" not in told
    assert found.elsewhere is not None
    before, after = found.elsewhere
    assert after.median < 0.03 and before.median > 0.1
    # Runs here weigh more: they say 1.
    here = [(f"{i}.json", measured(plan, WORLD, i)) for i, plan in enumerate(PLANS[:4])]
    together = calibrate(WORLD, here, elsewhere=some, holdout=0.5).cluster
    for device in together.devices:
        assert device.gpu.speed == pytest.approx(1, rel=0.02)
    assert together.calibration is not None and "runs.csv" in together.calibration.fitted_on


# --- Bad input -------------------------------------------------------------------------------------------------------


def test_too_few_plans_are_refused_with_how_many_are_needed(runs: list[tuple[str, Trace]]) -> None:
    with pytest.raises(InputError, match="at least 4 different plans, but there are 4 of 2: run 2 more"):
        calibrate(WORLD, runs[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": "other"}, "^b.json: the run is of the cluster 'other', but the constants to fit are of 'mixed'"),
        ({"origin": "simulated"}, "^b.json: constants are fitted on measured or paced runs, but this one is simulated"),
        ({"origin": "measured"}, "^b.json: runs are all measured or all paced, but this one is measured, and a.json paced"),
        ({"iteration_s": 0.0}, "^b.json: an iteration takes more than 0 s"),
    ],
)
def test_a_trace_of_something_else_is_refused(runs: list[tuple[str, Trace]], change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        observed([("a.json", runs[0][1]), ("b.json", replace(runs[2][1], **change))], WORLD)  # type: ignore[arg-type]


def test_a_trace_of_another_plan_is_refused(runs: list[tuple[str, Trace]]) -> None:
    mixed = replace(runs[0][1], plan=PLANS[-1])
    with pytest.raises(InputError, match=r"^a\.json: its spans are of another plan: there is no "):
        observed([("a.json", mixed)], WORLD)


def test_a_trace_of_another_model_is_refused(runs: list[tuple[str, Trace]]) -> None:
    plan = replace(PLANS[0], model=replace(PLANS[0].transformer, name="wide", ffn=256))
    both = [("a.json", runs[0][1]), ("b.json", measured(plan, TRUE, 1))]
    with pytest.raises(InputError, match=r"^b\.json: all runs are of one model, but this one is of wide \(8 layers of 64\)"):
        observed(both, WORLD)
    assert len(observed(both, WORLD, several_models=True)) == 2


def test_a_trace_of_devices_that_are_not_there_is_refused() -> None:
    trace = measured(random_plans(1, 0)[0], MIXED, 1)
    with pytest.raises(InputError, match=r"^a\.json: device '.*' is not in cluster 'mixed'"):
        observed([("a.json", trace)], WORLD)


def test_a_trace_that_contradicts_itself_is_refused(runs: list[tuple[str, Trace]]) -> None:
    trace = runs[0][1]
    first = trace.spans[0]
    for change, message in (
        ({"spans": (first._replace(end_s=first.start_s - 1.0), *trace.spans[1:])}, "on the lane 'p0s0' ends before it starts"),
        ({"spans": (*trace.spans[:-1], trace.spans[-1]._replace(end_s=1e300))}, "its spans take longer than an iteration, of "),
        ({"lanes": dict.fromkeys(trace.lanes, ("large-0/0",))}, "is none of its plan"),
        ({"peak_bytes": {"foo/0": 1}}, "device 'foo/0' is not in cluster 'mixed'"),
        ({"plan": replace(trace.plan, precision="fp8")}, "the run is in fp8, which CPU-"),
    ):
        with pytest.raises(InputError, match=rf"^a\.json: .*{message}"):
            observed([("a.json", replace(trace, **change))], WORLD)


LAUNCH = Measurement("launch", {"kernels": 10}, "fp32", 1e-4)


def test_a_bench_of_another_kind_is_refused() -> None:
    bench = Bench("NVIDIA H200", "H200", ("bf16",), links=(LinkMeasurement("send", ("large-0/0", "small-0/0"), 1, 1.0),))
    with pytest.raises(InputError, match=r"^h200\.yaml: the bench is of a H200, but the cluster 'mixed' has CPU-large, "):
        calibrate(WORLD, [], [("h200.yaml", bench)])


def test_benches_of_compiled_layers_and_of_others_are_not_mixed() -> None:
    plain = Bench("two cores", WORLD.device("large-0/0").gpu.name, ("fp32",), measurements=(LAUNCH,))
    links = Bench("gloo", links=(LinkMeasurement("send", ("large-0/0", "small-0/0"), 1, 1.0),))
    both = [("plain.yaml", plain), ("compiled.yaml", replace(plain, compiled=True)), ("links.yaml", links)]
    with pytest.raises(InputError, match=r"^compiled\.yaml is of compiled layers, plain\.yaml is not: take benches of one sort$"):
        with_benches(WORLD, both)
    for some in (both[::2], both[1:]):
        assert with_benches(WORLD, some) == WORLD


def test_a_bench_of_a_cpu_says_nothing_of_the_memory_of_its_devices() -> None:
    kind = WORLD.device("large-0/0").gpu
    measured_kind = replace(kind, memory_bytes=2**36, memory_bandwidth_bytes_per_s=3e10)
    sent = LinkMeasurement("send", ("large-0/0", "small-0/0"), 1, 1.0)
    bench = Bench("two cores", kind.name, ("fp32",), links=(sent,), gpu_kind=measured_kind)
    found = with_benches(WORLD, [("cpu.yaml", bench)]).device("large-0/0").gpu
    assert (found.memory_bytes, found.memory_bandwidth_bytes_per_s) == (kind.memory_bytes, 3e10)


def test_precisions_that_a_bench_did_not_measure_stay() -> None:
    kind = WORLD.device("large-0/0").gpu
    node = WORLD.device("large-0/0").node
    both = replace(node, gpu=replace(kind, peak_flop_per_s={"fp32": 1e11, "bf16": 2e11}))
    world = replace(WORLD, nodes=tuple(both if one == node else one for one in WORLD.nodes))
    sent = LinkMeasurement("send", ("large-0/0", "small-0/0"), 1, 1.0)
    bench = Bench("two cores", kind.name, ("fp32",), links=(sent,), gpu_kind=replace(kind, peak_flop_per_s={"fp32": 3e11}))
    found = with_benches(world, [("cpu.yaml", bench)]).device("large-0/0").gpu
    assert found.peak_flop_per_s == {"fp32": 3e11, "bf16": 2e11}


def test_a_constant_at_its_bound_is_marked() -> None:
    # The cards are taken to carry 99 % of their rate at most 100 %, but carry twice of it.
    nodes = tuple(replace(node, nic=replace(node.nic, bandwidth_bytes_per_s=1e5)) for node in WORLD.nodes)  # type: ignore[type-var]
    slow = replace(WORLD, nodes=nodes)
    sites = ("large-0/0", "small-0/0")
    links = [LinkMeasurement("send", sites, num_bytes, num_bytes / 2e5 + 5e-3) for num_bytes in (10**5, 10**6)]
    links += [LinkMeasurement("send", one.members[::-1], one.num_bytes, one.seconds) for one in links]
    told = calibrate(slow, [], [("links.yaml", Bench("gloo", links=tuple(links)))]).constants
    assert [one.name for one in told if one.at_bound] == ["fabric.protocol_efficiency.ethernet"]


# --- Figures ---------------------------------------------------------------------------------------------------------


def predicted(measured_s: float, after_s: float) -> Prediction:
    return Prediction(Observed(PLANS[0], ("a",), "paced", (measured_s,), {}, {}), measured_s, measured_s, after_s)


def test_kendalls_tau_leaves_out_pairs_that_the_spread_may_have_turned() -> None:
    # Of 1, 1.01, 2, 3 predicted as 2, 1, 4, 3: the pair (1, 1.01) is within the spread; of the other five one is turned.
    some = [predicted(*pair) for pair in ((1.0, 2.0), (1.01, 1.0), (2.0, 4.0), (3.0, 3.0))]
    assert _kendall(some, 0.01) == ((4 - 1) / 5, 5)
    assert _kendall(some, 0.0) == ((4 - 2) / 6, 6)
    assert _kendall(some[:1], 0.0) == (None, 0)


def test_the_interval_is_students() -> None:
    # Logarithms -0.01, 0, 0.01: deviation 0.01, and t(0.95, 2) = 2.92 times sqrt(1 + 1/3).
    low, high = _interval([math.exp(-0.01), 1.0, math.exp(0.01)])
    assert high == pytest.approx(math.expm1(2.919986 * 0.01 * math.sqrt(4 / 3)), rel=1e-5)
    assert (1 + low) * (1 + high) == pytest.approx(1, rel=1e-12)
