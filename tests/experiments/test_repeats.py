"""`--tokens`, and `--jitter` with `--repeats`: whole trainings and spreads, against sums done by hand."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.commands.options import token_count
from experiments.repeats import Spread, repeated
from sim.engine import simulate
from sim.metrics import infeasible_report, report, with_training
from sim.spec.cluster import read_cluster
from sim.spec.judge import Infeasible
from sim.spec.plan import read_plan
from sim.spec.trace import read_trace
from tests.experiments.conftest import TINY_PLAN, Ran, World

Motley = Callable[..., Ran]


# --- Whole trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1T", 1e12), ("300B", 3e11), ("1e12", 1e12), ("1.5t", 1.5e12), ("2,000,000", 2e6), ("10 M", 1e7), ("7k", 7e3), ("1", 1)],
)
def test_a_number_of_tokens_may_have_a_letter(text: str, tokens: float) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "0", "-1T", "nan", "inf", "1X", "1 TB", "1e19", "1e400", "much", "0.1"])
def test_other_texts_are_told_with_what_is_accepted(motley: Motley, world: World, text: str) -> None:
    before = world.names()
    ran = motley("simulate", world.plan, "--cluster", world.cluster, f"--tokens={text}")
    assert ran.code == 2 and "T (1e12)" in ran.err and repr(text) in ran.err and ran.err.count("\n") == 1
    assert world.names() == before


def test_a_training_takes_as_many_iterations_as_its_tokens_fill(world: World) -> None:
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    one = report(simulate(plan, cluster), cluster)
    assert one.iteration_s is not None and one.energy_j is not None and one.training is None
    training = with_training(one, plan, 1e9).training  # 512 tokens an iteration: 1,953,125 of them
    assert training is not None and training.iterations == 1_953_125
    assert training.seconds == 1_953_125 * one.iteration_s
    assert training.days == pytest.approx(training.seconds / 24 / 3600)
    price = cluster.devices[0].gpu.dollars_per_hour
    assert price is not None
    assert training.dollars == pytest.approx(2 * price * training.seconds / 3600, rel=1e-12)
    assert training.energy_kwh == pytest.approx(1_953_125 * one.energy_j / 1000 / 3600, rel=1e-12)
    last = with_training(one, plan, 513).training
    assert last is not None and last.iterations == 2  # the last one whole


def test_what_has_no_iteration_has_no_training(world: World) -> None:
    none = infeasible_report(Infeasible("box/0", "memory", 2, 1, "too large"))
    assert with_training(none, read_plan(world.plan), 1e9) == none
    one = report(simulate(read_plan(world.plan), read_cluster(world.cluster)), read_cluster(world.cluster))
    assert with_training(one, read_plan(world.plan), None) == one


def test_a_cluster_without_prices_has_no_dollars(motley: Motley, world: World) -> None:
    cluster = world.write("free.yaml", "gpu_kinds: {RTX4090: {price: null}}\n" + Path(world.cluster).read_text())
    ran = motley("simulate", world.plan, "--cluster", cluster, "--tokens", "1B", "--json", "-")
    assert json.loads(ran.out)["training"]["dollars"] is None and "no price known" in ran.err


def test_simulate_tells_it_under_both_judges_and_only_when_asked(motley: Motley, world: World) -> None:
    for judge in ("simulate", "estimate"):
        told = ("simulate", world.plan, "--cluster", world.cluster, "--judge", judge, "--json", "-")
        asked, plain = motley(*told, "--tokens", "1B"), motley(*told)
        written = json.loads(asked.out)
        assert written["training"]["seconds"] == pytest.approx(1_953_125 * written["iteration_s"])
        assert "1,953,125 iterations" in asked.err and "kWh" in asked.err and "days" in asked.err
        assert "training" not in json.loads(plain.out) and "kWh" not in plain.err


def test_plan_tells_it_too(motley: Motley, world: World) -> None:
    flags: tuple[Any, ...] = ("--model", world.model, "--global-batch", 4, "--planner", "megatron", "--budget", "5s")
    ran = motley("plan", "--cluster", world.cluster, *flags, "--tokens", "1B", "--json", "-")
    written = json.loads(ran.out)
    assert ran.code == 0 and "kWh" in ran.err
    assert written["training"]["days"] == pytest.approx(written["training"]["iterations"] * written["iteration_s"] / 86400)


# --- Spreads ---------------------------------------------------------------------------------------------------------


def test_a_spread_is_that_of_its_runs() -> None:
    spread = Spread(0.1, 0, (4.0, 1.0, 3.0, 10.0))
    assert (spread.median_s, spread.middle) == (3.5, 2)
    assert spread.standard_deviation_s == pytest.approx(math.sqrt((0.25 + 12.25 + 2.25 + 30.25) / 3))
    assert spread.values() == {
        "count": 4,
        "median_s": 3.5,
        "standard_deviation_s": spread.standard_deviation_s,
        "least_s": 1.0,
        "most_s": 10.0,
        "middle_seed": 2,
        "jitter": 0.1,
        "seed": 0,
        "iteration_s": (4.0, 1.0, 3.0, 10.0),
    }
    assert Spread(0.1, 0, (2.0,)).standard_deviation_s == 0


def test_every_run_has_a_seed_of_its_own_and_the_trace_is_of_the_middle_one(world: World) -> None:
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    trace, spread = repeated(plan, cluster, 5, 0.2, 7)
    times = [simulate(plan, cluster, seed, 0.2).iteration_s for seed in range(5, 12)]
    assert spread.iteration_s == tuple(times) and len(set(times)) > 1
    assert trace.iteration_s == statistics.median(times)


def test_the_command_tells_the_spread(motley: Motley, world: World) -> None:
    flags = ("--jitter", "20%", "--repeats", 5, "--seed", 5)
    file = world.folder / "t.json"
    ran = motley("simulate", world.plan, "--cluster", world.cluster, *flags, "--json", "-", "--trace", file)
    written = json.loads(ran.out)
    _, spread = repeated(read_plan(world.plan), read_cluster(world.cluster), 5, 0.2, 5)
    assert written["repeats"] == json.loads(json.dumps(spread.values()))
    assert written["iteration_s"] == spread.median_s == read_trace(file).iteration_s
    assert "5 runs on devices whose speeds differ by 20 %" in ran.err and "median" in ran.err
    once = motley("simulate", world.plan, "--cluster", world.cluster, "--jitter", 0.2, "--seed", 5, "--json", "-")
    alone = json.loads(once.out)  # one run on unequal devices is told from one on equal ones, too
    assert alone["iteration_s"] == spread.iteration_s[0]
    assert (alone["repeats"]["count"], alone["repeats"]["jitter"], alone["repeats"]["seed"]) == (1, 0.2, 5)
    assert "on devices whose speeds differ by 20 %, drawn with the seed 5" in once.err
    in_step = motley("simulate", world.plan, "--cluster", world.cluster, "--json", "-")
    assert "repeats" not in json.loads(in_step.out) and "differ" not in in_step.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--repeats", "3"], "--repeats 3 needs --jitter"),
        (["--repeats", "0", "--jitter", "1%"], "at least 1, but got '0'"),
        (["--repeats", "3", "--jitter", "101%"], "between 0 and 1, but got '101%'"),
        (["--jitter", "%"], "between 0 and 1, but got '%'"),
        (["--repeats", "3", "--jitter", "3%", "--judge", "estimate"], "--jitter needs the event simulation"),
    ],
)
def test_bad_input_is_told_in_one_line(motley: Motley, world: World, flags: list[str], told: str) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster, *flags, "--json", world.folder / "r.json")
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1
    assert not (world.folder / "r.json").exists()


def test_a_plan_that_does_not_fit_has_neither(motley: Motley, world: World) -> None:
    large = world.write("large.json", TINY_PLAN.replace('"hidden": 64', '"hidden": 65536'))
    flags = ("--tokens", "1T", "--jitter", "3%", "--repeats", 3, "--json", world.folder / "r.json")
    ran = motley("simulate", large, "--cluster", world.cluster, *flags)
    assert ran.code == 1
    assert not {"training", "repeats"} & set(json.loads((world.folder / "r.json").read_text()))
