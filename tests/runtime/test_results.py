"""What a run leaves comes back as it was, and damage is told in one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.results import RunResult, read_result, write_result
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import Forward
from sim.spec.reading import InputError
from sim.spec.trace import Span, Trace
from sim.spec.transformer import Transformer

PLAN = Plan(
    cluster="two",
    model=Transformer("tiny", layers=2, hidden=4, ffn=8, heads=2, vocab=10),
    sequence_length=5,
    global_batch=1,
    pipelines=(Pipeline(1, 1, (Stage((Replica(("Zürich/0", "b/0"), 1),), ((0, 2),)),)),),
)
TRACE = Trace(
    plan=PLAN,
    cluster="two",
    origin="measured",
    iteration_s=0.3,
    lanes={"p0s0": ("Zürich/0", "b/0")},
    spans=(Span("p0s0", Forward(0, (0, 2)), 0.0, 0.1 + 0.2),),
    peak_bytes={"Zürich/0": 12, "b/0": 13},
    versions={"motley": "0.1.0"},
    clock_residual_s=1e-5,
)
RESULT = RunResult(
    trace=TRACE,
    losses=(2.5, 1 / 3),
    step_s=(0.9, 0.1 + 0.2),
    learning_rates=(0.0, 3e-4),
    gradient_norms=(1.5, 0.25),
    first_step=3,
    iteration_s=0.1 + 0.2,
    tokens_per_s=5 / 0.3,
    peak_flop_per_s={"Zürich/0": 1e11, "b/0": 989.4e12},
    peak_measured=True,
    device_kinds={"Zürich/0": "CPU", "b/0": "H100-80GB-SXM"},
    resumed_from=3,
)


@pytest.mark.parametrize("result", [RESULT, replace(RESULT, resumed_from=None, first_step=0, peak_flop_per_s={})])
def test_a_result_comes_back_equal_from_its_folder(tmp_path: Path, result: RunResult) -> None:
    write_result(tmp_path / "new", result)
    assert read_result(tmp_path / "new") == result
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["result.json", "trace.json"]


def test_a_second_result_takes_the_place_of_the_first(tmp_path: Path) -> None:
    other = replace(RESULT, trace=replace(TRACE, cluster="other"), tokens_per_s=7.0)
    for result in (RESULT, other):
        write_result(tmp_path, result)
    assert read_result(tmp_path) == other
    assert len(list(tmp_path.iterdir())) == 2


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5))
def test_every_loss_comes_back_in_every_bit_one_that_diverged_too(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    numbers = tuple(losses)
    write_result(folder, replace(RESULT, losses=numbers, step_s=numbers, learning_rates=numbers, gradient_norms=numbers))
    back = read_result(folder)
    for read in (back.losses, back.gradient_norms):
        assert [loss.hex() for loss in read] == [loss.hex() for loss in numbers]


def test_what_json_has_no_number_for_is_a_text_in_the_file(tmp_path: Path) -> None:
    write_result(tmp_path, replace(RESULT, losses=(math.nan, math.inf), gradient_norms=(-math.inf, 1.0)))
    value = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"), parse_constant=lambda _: pytest.fail("no JSON"))
    assert (value["losses"], value["gradient_norms"]) == (["nan", "inf"], ["-inf", 1.0])


@pytest.mark.parametrize("name", ["losses", "step_s", "learning_rates", "gradient_norms"])
def test_figures_of_different_numbers_of_steps_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"1 {name}"):
        replace(RESULT, **{name: (1.0,)})  # type: ignore[arg-type]


def test_a_result_of_no_step_is_refused() -> None:
    with pytest.raises(InputError, match="got 0 losses"):
        replace(RESULT, losses=(), step_s=(), learning_rates=(), gradient_norms=())


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("result.json", "motley-result/1", "motley-result/2", "format: expected one of motley-result/1"),
        ("result.json", '"losses": [2.5,', '"losses": [true,', "losses: expected a list of numbers"),
        ("result.json", '"losses": [2.5,', '"losses": ["big",', "losses: expected a list of numbers"),
        ("result.json", '"losses": [2.5,', '"losses": [1e999,', "losses: expected a list of numbers"),
        ("result.json", '"losses": [2.5,', '"losses": [', "as many losses as step_s"),
        ("result.json", '"losses"', '"lost"', "losses: is missing"),
        ("result.json", '"iteration_s": 0.3', '"iteration_s": -0.3', "iteration_s: expected a number of at least 0"),
        ("result.json", '"resumed_from": 3', '"resumed_from": "3"', "resumed_from: expected a whole number"),
        ("result.json", '"peak_measured": true', '"peak_measured": 1', "peak_measured: expected true or false"),
        ("result.json", '"first_step"', '"speed": 1, "first_step"', "unknown key 'speed'"),
        ("result.json", "}\n}", "}", "ends too early"),
        ("trace.json", "motley-trace/1", "motley-trace/2", "motley.format: expected one of motley-trace/1"),
    ],
)
def test_a_damaged_result_is_told_in_one_line(tmp_path: Path, file: str, old: str, new: str, told: str) -> None:
    write_result(tmp_path, RESULT)
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_result(tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path / file))
    assert told in message


@pytest.mark.parametrize("file", ["result.json", "trace.json"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    write_result(tmp_path, RESULT)
    (tmp_path / file).unlink()
    with pytest.raises(InputError, match=rf"{file}: cannot be read"):
        read_result(tmp_path)
