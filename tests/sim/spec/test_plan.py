"""Plans: their file, its defaults, and every way in which a plan can contradict itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.cluster import Cluster
from sim.spec.counts import RECOMPUTE
from sim.spec.plan import Pipeline, Plan, Replica, Stage, parse_plan, read_plan
from sim.spec.reading import InputError
from sim.spec.transformer import transformer
from tests.strategies import worlds

TINY: dict[str, Any] = {"name": "tiny", "layers": 8, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100}

ACCEPTED = "none, pointwise, selective, full, {MODE: NUMBER OF LAYERS} or {MODE: NUMBER OF LAYERS, rest: A MODE BEFORE IT}"


def plan_of(*pipelines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The plain values of a plan file; the global batch fits unless it is given."""
    batch = sum(p["micro_batch"] * p["micro_batches"] for p in pipelines)
    head = {"format": "motley-plan/1", "cluster": "c", "model": TINY, "sequence_length": 16, "global_batch": batch}
    return head | {"pipelines": list(pipelines)} | fields


def pipeline_of(*stages: dict[str, Any], micro_batch: int = 2, micro_batches: int = 3, **fields: Any) -> dict[str, Any]:
    return {"micro_batch": micro_batch, "micro_batches": micro_batches, "stages": list(stages)} | fields


def stage_of(devices: str, start: int, stop: int, **fields: Any) -> dict[str, Any]:
    return {"devices": devices.split(), "layers": [start, stop]} | fields


FIRST, SECOND = stage_of("a/0 a/1", 0, 5), stage_of("a/2", 5, 8)
GOOD = plan_of(pipeline_of(FIRST, SECOND))


def refused(values: dict[str, Any]) -> str:
    """The one line that refuses a plan, without the name of the file."""
    with pytest.raises(InputError) as caught:
        parse_plan(json.dumps(values), "plan.json")
    line = str(caught.value)
    assert "\n" not in line and line.startswith("plan.json: ")
    return line.removeprefix("plan.json: ")


# --- Reading and writing ---------------------------------------------------------------------------------------------


def test_a_plan_is_read_with_its_defaults() -> None:
    plan = parse_plan(json.dumps(GOOD))
    tiny = plan.transformer
    assert plan == Plan(
        cluster="c",
        model=tiny,
        sequence_length=16,
        global_batch=6,
        pipelines=(
            Pipeline(
                micro_batch=2,
                micro_batches=3,
                stages=(
                    Stage((Replica(("a/0", "a/1"), 2),), ((0, 5),), "none", None),
                    Stage((Replica(("a/2",), 2),), ((5, 8),), "none", None),
                ),
            ),
        ),
        precision="bf16",
        schedule="1f1b",
        zero_stage=1,
        sequence_parallel=False,
        context_parallel=1,
        expert_parallel=1,
        sequence_slices=1,
        shard_group=None,
        overlap_gradients=True,
        gradient_precision="fp32",
        offload_optimizer=False,
        optimizer="adamw",
    )
    assert (tiny.name, tiny.layers, tiny.kv_heads, tiny.head_dim) == ("tiny", 8, 4, 16)
    assert plan.devices == ("a/0", "a/1", "a/2")
    assert [indices for *indices, _ in plan.replicas()] == [[0, 0, 0], [0, 1, 0]]
    job = plan.job()
    assert (job.model, job.tokens, job.precision, job.optimizer) == (tiny, 96, "bf16", "adamw")


def test_the_plan_of_the_design_is_read() -> None:
    text = """
    {"format": "motley-plan/1", "cluster": "mixed-32", "model": "llama-2-13b", "sequence_length": 4096,
     "global_batch": 256, "precision": "bf16", "schedule": "1f1b", "zero_stage": 1, "sequence_parallel": false,
     "pipelines": [{"micro_batch": 4, "micro_batches": 64,
                    "stages": [{"devices": ["a100/0", "a100/1"], "layers": [0, 24], "recompute": "none"},
                               {"replicas": [{"devices": ["a100/2"], "sequences": 3},
                                             {"devices": ["rtx4090-0/0", "rtx4090-0/1"], "sequences": 1}],
                                "layers": [24, 40], "recompute": {"full": 4}}]}]}"""
    plan = parse_plan(text)
    assert plan.transformer == transformer("llama-2-13b")
    last = plan.pipelines[0].stages[1]
    assert last.replicas == (Replica(("a100/2",), 3), Replica(("rtx4090-0/0", "rtx4090-0/1"), 1))
    assert last.recomputed() == {"none": 12, "pointwise": 0, "selective": 0, "full": 4}
    assert parse_plan(plan.to_json()) == plan


def test_the_file_of_a_plan_has_one_stage_a_line() -> None:
    plan = parse_plan(json.dumps(GOOD | {"model": "llama-7b", "pipelines": [pipeline_of(FIRST, stage_of("a/2", 5, 32))]}))
    assert plan.to_json() == (
        "{\n"
        '  "format": "motley-plan/1",\n'
        '  "cluster": "c",\n'
        '  "model": "llama-7b",\n'
        '  "sequence_length": 16,\n'
        '  "global_batch": 6,\n'
        '  "precision": "bf16",\n'
        '  "schedule": "1f1b",\n'
        '  "zero_stage": 1,\n'
        '  "sequence_parallel": false,\n'
        '  "pipelines": [\n'
        '    {"micro_batch": 2, "micro_batches": 3, "stages": [\n'
        '      {"devices": ["a/0", "a/1"], "layers": [0, 5], "recompute": "none"},\n'
        '      {"devices": ["a/2"], "layers": [5, 32], "recompute": "none"}]}]\n'
        "}\n"
    )


@given(worlds(), st.data())
def test_a_written_plan_is_read_as_the_same_plan(world: tuple[Cluster, Plan], data: st.DataObject) -> None:
    _, plan = world
    optional: dict[str, st.SearchStrategy[object]] = {"shard_group": st.integers(1, 4), "offload_optimizer": st.booleans()}
    optional["expert_tensor_parallel"] = st.sampled_from((None, 1))
    if plan.sequence_slices == 1:
        optional["expert_parallel"] = st.integers(1, 2)
    further = data.draw(st.fixed_dictionaries({}, optional=optional))
    plan = replace(plan, **further)  # type: ignore[arg-type]
    assert parse_plan(plan.to_json()) == plan
    assert parse_plan(plan.to_json()).to_json() == plan.to_json()


def test_layers_may_be_several_ranges() -> None:
    values = plan_of(
        pipeline_of(stage_of("a/0", 0, 0) | {"layers": [[0, 2], [4, 6]]}, stage_of("a/1", 0, 0) | {"layers": [[2, 4], [6, 8]]}),
        schedule="interleaved",
    )
    plan = parse_plan(json.dumps(values))
    assert [stage.layers for stage in plan.pipelines[0].stages] == [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    assert [stage.layer_count for stage in plan.pipelines[0].stages] == [4, 4]
    assert parse_plan(plan.to_json()) == plan


def test_end_stages_may_be_empty() -> None:
    values = plan_of(pipeline_of(stage_of("a/0", 0, 0), stage_of("a/1", 0, 8), stage_of("a/2", 8, 8)))
    assert [stage.layer_count for stage in parse_plan(json.dumps(values)).pipelines[0].stages] == [0, 8, 0]


def test_the_modes_of_a_part_are_those_of_its_layers_in_their_order() -> None:
    """Of layers 0, 1, 2 and 6, 7, 8 the first four are recomputed in full."""
    stage = Stage((Replica(("a/0",), 1),), ((6, 9), (0, 3)), "full", 4, "pointwise")
    none = {"none": 0, "selective": 0}
    assert stage.recomputed() == none | {"full": 4, "pointwise": 2}
    assert stage.recomputed_within((0, 3)) == none | {"full": 3, "pointwise": 0}
    assert stage.recomputed_within((6, 9)) == none | {"full": 1, "pointwise": 2}
    assert stage.recomputed_within((7, 9)) == none | {"full": 0, "pointwise": 2}
    assert stage.recomputing("full", 6, "pointwise") == stage.recomputing("full")
    assert stage.recomputing("full", 0, "pointwise") == stage.recomputing("pointwise")


@pytest.mark.parametrize(
    ("recompute", "counts"),
    [
        ("none", (5, 0, 0, 0)),
        ("pointwise", (0, 5, 0, 0)),
        ("selective", (0, 0, 5, 0)),
        ("full", (0, 0, 0, 5)),
        ({"full": 0}, (5, 0, 0, 0)),
        ({"full": 2}, (3, 0, 0, 2)),
        ({"full": 5}, (0, 0, 0, 5)),
        ({"pointwise": 3}, (2, 3, 0, 0)),
        ({"full": 2, "rest": "pointwise"}, (0, 3, 0, 2)),
        ({"rest": "selective", "full": 1}, (0, 0, 4, 1)),
    ],
)
def test_recomputation_is_of_all_layers_or_of_some(recompute: object, counts: tuple[int, ...]) -> None:
    plan = parse_plan(json.dumps(plan_of(pipeline_of(FIRST | {"recompute": recompute}, SECOND))))
    assert plan.pipelines[0].stages[0].recomputed() == dict(zip(RECOMPUTE, counts, strict=True))
    assert parse_plan(plan.to_json()) == plan


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(GOOD))
    assert read_plan(path) == parse_plan(json.dumps(GOOD))
    path.write_text(json.dumps(GOOD)[:-2])
    with pytest.raises(InputError, match=rf"^{path}, line 1, column \d+: ends too early: "):
        read_plan(path)


def test_every_truncated_plan_is_refused_in_one_line() -> None:
    text = parse_plan(json.dumps(GOOD)).to_json().rstrip()
    for stop in range(0, len(text), 7):
        with pytest.raises(InputError, match=r"^plan, line \d+, column \d+: (ends too early|is not valid JSON): ") as caught:
            parse_plan(text[:stop])
        assert "\n" not in str(caught.value)


# --- Contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipelines", "error"),
    [
        (
            [pipeline_of(FIRST, stage_of("a/0", 5, 8))],
            "pipelines[0].stages[1]: device 'a/0' is used twice; pipelines[0].stages[0] has it already",
        ),
        (
            [pipeline_of(FIRST, SECOND), pipeline_of(stage_of("b/0 a/2", 0, 8))],
            "pipelines[1].stages[0]: device 'a/2' is used twice; pipelines[0].stages[1] has it already",
        ),
        (
            [pipeline_of(stage_of("a/0 a/0", 0, 8))],
            "pipelines[0].stages[0]: device 'a/0' is used twice; pipelines[0].stages[0] has it already",
        ),
        (
            [pipeline_of(FIRST, stage_of("a/2", 6, 8))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but layers 5 to 6 are missing "
            "(the stages have [0, 5], [6, 8])",
        ),
        (
            [pipeline_of(FIRST, stage_of("a/2", 4, 8))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but layers 4 to 5 are held twice "
            "(the stages have [0, 5], [4, 8])",
        ),
        (
            [pipeline_of(stage_of("a/0", 0, 8), stage_of("a/2", 2, 4))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but layers 2 to 4 are held twice "
            "(the stages have [0, 8], [2, 4])",
        ),
        (
            [pipeline_of(FIRST, SECOND), pipeline_of(stage_of("b/0", 0, 7))],
            "pipelines[1]: stage layers must cover 0 to 8 without gap or overlap, but layers 7 to 8 are missing "
            "(the stages have [0, 7])",
        ),
        (
            [pipeline_of(stage_of("a/0", 1, 8))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but layers 0 to 1 are missing "
            "(the stages have [1, 8])",
        ),
        (
            [pipeline_of(stage_of("a/0", 0, 9))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but stage 0 has [0, 9]",
        ),
        (
            [pipeline_of(stage_of("a/0", -1, 8))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but stage 0 has [-1, 8]",
        ),
        (
            [pipeline_of(stage_of("a/0", 8, 0))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but stage 0 has [8, 0]",
        ),
        (
            [pipeline_of(FIRST, stage_of("a/2", 5, 5), stage_of("a/3", 5, 8))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, and only an end stage may be empty, "
            "but stage 1 has [5, 5]",
        ),
        (
            [pipeline_of(stage_of("a/0", 0, 0), stage_of("a/1", 0, 0), stage_of("a/2", 0, 8))],
            "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, "
            "but more than one stage has the empty range [0, 0]",
        ),
        (
            [
                pipeline_of(
                    {"replicas": [{"devices": ["a/0"], "sequences": 2}, {"devices": ["a/1"], "sequences": 1}], "layers": [0, 8]}
                )
            ],
            "pipelines[0].stages[0]: the replicas' sequences must sum to the micro_batch 2, but got 2 + 1 = 3",
        ),
        (
            [pipeline_of({"replicas": [{"devices": ["a/0"], "sequences": 1}], "layers": [0, 8]})],
            "pipelines[0].stages[0]: the replicas' sequences must sum to the micro_batch 2, but got 1 = 1",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(pipelines: list[dict[str, Any]], error: str) -> None:
    assert refused(plan_of(*pipelines)) == error


def test_the_batch_is_the_sum_over_the_pipelines() -> None:
    two = plan_of(pipeline_of(FIRST, SECOND), pipeline_of(stage_of("b/0", 0, 8), micro_batch=1, micro_batches=4), global_batch=11)
    rule = "micro_batch x micro_batches must sum to the global batch"
    assert refused(two) == f"{rule} 11 over the pipelines, but got 2 x 3 + 1 x 4 = 10"
    many = plan_of(*(pipeline_of(stage_of(f"a/{i}", 0, 8), micro_batch=1) for i in range(8)), global_batch=25)
    assert refused(many) == f"{rule} 25 over the pipelines, but got {' + '.join(['1 x 3'] * 6)} + ... = 24"


def test_context_parallelism_divides_every_replica() -> None:
    error = "pipelines[0].stages[1]: the devices of a replica must divide by context_parallel 2, but there are 1"
    assert refused(GOOD | {"context_parallel": 2}) == error


def test_no_more_layers_are_recomputed_than_the_stage_has() -> None:
    error = "pipelines[0].stages[0]: recompute is of at most all layers of the stage, which has 5, but got full: 6"
    assert refused(plan_of(pipeline_of(FIRST | {"recompute": {"full": 6}}, SECOND))) == error


def test_a_sequence_fits_the_learned_positions_of_the_model() -> None:
    values = plan_of(pipeline_of(stage_of("a/0", 0, 24)), model="gpt3-1.3b", sequence_length=2048)
    assert parse_plan(json.dumps(values)).job().sequence_length == 2048
    longer = refused(values | {"sequence_length": 4096})
    assert longer == "gpt3-1.3b has learned positions for 2048 tokens, but the sequence length is 4096"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"sequence_length": 2**26 + 1},
            "the sequence length is a whole number, at least 1 and at most 67,108,864, but got 67108865",
        ),
        (
            {"global_batch": 10**8, "pipelines": [pipeline_of(FIRST, SECOND, micro_batch=1, micro_batches=10**8)]},
            "the global batch is a whole number, at least 1 and at most 1,000,000, but got 100000000",
        ),
        ({"model": TINY | {"layers": 10**8}}, "model: model tiny: `layers` must be at most 10,000, but got 100000000"),
        ({"model": TINY | {"vocab": 10**30}}, f"model: model tiny: `vocab` must be at most 67,108,864, but got {10**30}"),
        (
            {"model": TINY | {"experts": {"experts": 10**9, "top_k": 2}}},
            "model.experts: `experts` of the experts must be at most 65,536, but got 1000000000",
        ),
    ],
)
def test_numbers_beyond_all_reason_are_refused(change: dict[str, Any], error: str) -> None:
    assert refused(GOOD | change) == error


def test_a_model_must_be_known() -> None:
    assert refused(GOOD | {"model": "llama-2-31b"}).startswith("unknown model 'llama-2-31b'")
    assert "hidden=65" in refused(GOOD | {"model": TINY | {"hidden": 65}})
    assert refused(GOOD | {"model": TINY | {"depth": 3}}).startswith("model: unknown key 'depth'; accepted: ")
    assert refused(GOOD | {"model": 13}) == "model: expected a text, but got 13"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"format": "motley-plan/2"},
            "format: expected one of motley-plan/1, but got 'motley-plan/2'; did you mean motley-plan/1?",
        ),
        ({"zero_stage": 4}, "zero_stage: expected one of 0, 1, 2, 3, but got 4"),
        ({"zero_stage": True}, "zero_stage: expected one of 0, 1, 2, 3, but got True"),
        (
            {"schedule": "1F1B"},
            "schedule: expected one of gpipe, 1f1b, split-1f1b, eager-1f1b, interleaved, zb-1p, zb-2p, zb-v, but got '1F1B'; "
            "did you mean 1f1b?",
        ),
        ({"precision": "int4"}, "precision: expected one of fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4, but got 'int4'"),
        ({"sequence_parallel": "no"}, "sequence_parallel: expected true or false, but got 'no'"),
        ({"sequence_length": 0}, "sequence_length: expected a whole number of at least 1, but got 0"),
        ({"global_batch": 6.0}, "global_batch: expected a whole number of at least 1, but got 6.0"),
        ({"expert_tensor_parallel": 0}, "expert_tensor_parallel: expected 1 (whole experts) or null (as all else), but got 0"),
        (
            {"expert_tensor_parallel": True},
            "expert_tensor_parallel: expected 1 (whole experts) or null (as all else), but got True",
        ),
        ({"shard_group": 0}, "shard_group: expected a whole number of at least 1, or null, but got 0"),
        ({"optimizer": "lion"}, "optimizer: expected one of adamw, sgd, but got 'lion'"),
        ({"cluster": ""}, "cluster: expected a text of one line, but got ''"),
        ({"pipelines": []}, "pipelines: expected a list of at least 1 entries, but got []"),
        ({"pipelines": [3]}, "pipelines[0]: expected a mapping of keys to values, but got 3"),
        ({"sequence_lenght": 3}, "unknown key 'sequence_lenght'; accepted: format, pipelines, model, cluster, sequence_length, "),
    ],
)
def test_a_bad_value_is_told_with_its_key_and_what_is_accepted(change: dict[str, Any], error: str) -> None:
    assert refused(GOOD | change).startswith(error)


@pytest.mark.parametrize("key", ["format", "cluster", "model", "sequence_length", "global_batch", "pipelines"])
def test_a_missing_key_is_named(key: str) -> None:
    assert refused({k: v for k, v in GOOD.items() if k != key}).startswith(f"{key}: is missing; expected ")


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ({"layers": [0, 8]}, ".devices: a stage has either devices or replicas, but got neither"),
        (
            {"devices": ["a/0"], "replicas": [{"devices": ["a/1"], "sequences": 2}], "layers": [0, 8]},
            ".devices: a stage has either devices or replicas, but got both",
        ),
        ({"devices": [], "layers": [0, 8]}, ".devices: expected a list of at least 1 entries, but got []"),
        ({"devices": "a/0", "layers": [0, 8]}, ".devices: expected a list of at least 1 entries, but got 'a/0'"),
        ({"devices": [0], "layers": [0, 8]}, ".devices: expected device names such as 'a100/0', but got 0"),
        ({"devices": ["n\n/0"], "layers": [0, 8]}, ".devices: expected device names such as 'a100/0', but got 'n\\n/0'"),
        ({"devices": ["a/0"]}, ".layers: is missing; expected [start, stop] or a list of such ranges"),
        ({"devices": ["a/0"], "layers": []}, ".layers: expected [start, stop] or a list of such ranges, but got []"),
        ({"devices": ["a/0"], "layers": [8]}, ".layers: expected [start, stop] or a list of such ranges, but got [8]"),
        ({"devices": ["a/0"], "layers": [0, 8.0]}, ".layers: expected [start, stop] or a list of such ranges, but got [0, 8.0]"),
        (
            {"devices": ["a/0"], "layers": [False, 8]},
            ".layers: expected [start, stop] or a list of such ranges, but got [False, 8]",
        ),
        (
            {"devices": ["a/0"], "layers": [[0, 4], 4]},
            ".layers: expected [start, stop] or a list of such ranges, but got [[0, 4], 4]",
        ),
        ({"devices": ["a/0"], "layers": [[]]}, ".layers: expected [start, stop] or a list of such ranges, but got [[]]"),
        (
            {"devices": ["a/0"], "layers": [0, 8], "recompute": "all"},
            f".recompute: expected {ACCEPTED}, but got 'all'",
        ),
        (
            {"devices": ["a/0"], "layers": [0, 8], "recompute": {"full": -1}},
            f".recompute: expected {ACCEPTED}, but got {{'full': -1}}",
        ),
        (
            {"devices": ["a/0"], "layers": [0, 8], "recompute": {"full": True}},
            f".recompute: expected {ACCEPTED}, but got {{'full': True}}",
        ),
        (
            {"devices": ["a/0"], "layers": [0, 8], "recompute": {"none": 2}},
            f".recompute: expected {ACCEPTED}, but got {{'none': 2}}",
        ),
        (
            {"devices": ["a/0"], "layers": [0, 8], "recompute": {"pointwise": 2, "rest": "full"}},
            f".recompute: expected {ACCEPTED}, but got {{'pointwise': 2, 'rest': 'full'}}",
        ),
        (
            {"device": ["a/0"], "devices": ["a/0"], "layers": [0, 8]},
            ": unknown key 'device'; accepted: devices, replicas, recompute, ",
        ),
        (
            {"replicas": [{"devices": ["a/0"], "sequences": 0}], "layers": [0, 8]},
            ".replicas[0].sequences: expected a whole number of at least 1, but got 0",
        ),
        (
            {"replicas": [{"devices": ["a/0"], "sequences": 2, "layers": [0, 8]}], "layers": [0, 8]},
            ".replicas[0]: unknown key 'layers'; accepted: devices, sequences",
        ),
    ],
)
def test_a_bad_stage_is_told_with_its_place_and_what_is_accepted(stage: dict[str, Any], error: str) -> None:
    line = refused(plan_of(pipeline_of(stage)))
    assert line.startswith(f"pipelines[0].stages[0]{error}"), line


def test_a_bad_pipeline_is_told_with_its_place() -> None:
    assert refused(plan_of(pipeline_of(FIRST, SECOND, micro=2))).startswith(
        "pipelines[0]: unknown key 'micro'; accepted: micro_batch"
    )
    assert refused(plan_of(pipeline_of(), global_batch=6)).startswith(
        "pipelines[0].stages: expected a list of at least 1 entries"
    )
    zero = plan_of(pipeline_of(FIRST, SECOND, micro_batches=0), global_batch=6)
    assert refused(zero) == "pipelines[0].micro_batches: expected a whole number of at least 1, but got 0"


# --- Plans that were not read from a file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"pipelines": (), "global_batch": 0}, "a plan has at least one pipeline, but got none"),
        (
            {"schedule": "2f2b"},
            "schedule is one of gpipe, 1f1b, split-1f1b, eager-1f1b, interleaved, zb-1p, zb-2p, zb-v, but got '2f2b'",
        ),
        ({"zero_stage": 4}, "zero_stage is one of 0, 1, 2, 3, but got 4"),
        (
            {"sequence_slices": 3},
            "sequence_slices divides the sequence_length 16, at most by 16, but got 3; accepted: 1, 2, 4, 8, 16",
        ),
        (
            {"sequence_slices": 2, "schedule": "zb-1p"},
            "sequence_slices 2 goes with schedule gpipe, 1f1b, split-1f1b, but it is zb-1p; accepted: sequence_slices 1",
        ),
        (
            {"sequence_slices": 4, "zero_stage": 3},
            "sequence_slices 4 goes with zero_stage 0, 1, but it is 3; accepted: sequence_slices 1",
        ),
        (
            {"sequence_slices": 4, "expert_parallel": 2},
            "sequence_slices 4 goes with expert_parallel 1, but it is 2; accepted: sequence_slices 1",
        ),
        (
            {"expert_parallel": 2, "expert_tensor_parallel": 2},
            "expert_tensor_parallel is 1 (whole experts on each tensor rank) or null (as all else), but got 2",
        ),
        ({"precision": "int4"}, "precision is one of fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4, but got 'int4'"),
    ],
)
def test_a_plan_is_checked_when_it_is_made(change: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(parse_plan(json.dumps(GOOD)), **change)
    assert str(caught.value) == error


def test_sequences_may_come_in_slices() -> None:
    plan = parse_plan(json.dumps(GOOD | {"sequence_slices": 4}))
    assert (plan.sequence_slices, plan.slice_length, plan.sequence_length) == (4, 4, 16)
    assert parse_plan(plan.to_json()) == plan
    assert (plan.under("gpipe").sequence_slices, plan.under("zb-2p").sequence_slices) == (4, 1)


def test_stages_say_how_many_micro_batches_they_hold() -> None:
    stages = [stage_of("a/0", 0, 4) | {"in_flight": 5}, stage_of("a/1", 4, 8)]
    plan = parse_plan(json.dumps(plan_of(pipeline_of(*stages))))
    assert [stage.in_flight for stage in plan.pipelines[0].stages] == [5, None]
    assert plan.pipelines[0].in_flight == (5, 1)
    assert parse_plan(plan.to_json()) == plan and plan.to_json().count("in_flight") == 1
    assert plan.under("gpipe").pipelines[0].in_flight == (2, 1) and not plan.under("gpipe").holds_its_own
    assert plan.under("split-1f1b").pipelines[0].in_flight == (5, 1) and plan.holds_its_own


@pytest.mark.parametrize(
    ("counts", "change", "error"),
    [
        ((0, 1), {}, "pipelines[0].stages[0].in_flight: expected a whole number of at least 1, but got 0"),
        (("two", 1), {}, "pipelines[0].stages[0].in_flight: expected a whole number of at least 1, but got 'two'"),
        (
            (2, 3),
            {},
            "pipelines[0].stages[0]: in_flight is at least that of the next stage, or that one waits for ever, but got 2, and "
            "stages[1] has 3",
        ),
        (
            (2, 1),
            {"schedule": "gpipe"},
            "pipelines[0]: in_flight is for the schedules 1f1b and split-1f1b, but the schedule is gpipe",
        ),
    ],
)
def test_counts_that_cannot_be_held_are_refused(counts: tuple[object, object], change: dict[str, Any], error: str) -> None:
    cuts = ((0, 4), (4, 8))
    stages = [stage_of(f"a/{s}", *cut) | {"in_flight": n} for s, (cut, n) in enumerate(zip(cuts, counts, strict=True))]
    assert refused(plan_of(pipeline_of(*stages)) | change) == error


def test_a_pipeline_and_a_stage_are_checked_when_a_plan_is_made_of_them() -> None:
    plan = parse_plan(json.dumps(plan_of(pipeline_of(stage_of("a/0", 0, 8)))))
    stage = plan.pipelines[0].stages[0]

    def error(pipeline: Pipeline) -> str:
        with pytest.raises(InputError) as caught:
            replace(plan, pipelines=(pipeline,), global_batch=pipeline.sequences)
        return str(caught.value)

    assert error(Pipeline(2, 0, (stage,))) == "pipelines[0]: micro_batches is at least 1, but got 0"
    assert error(Pipeline(0, 2, (stage,))) == "pipelines[0]: micro_batch is at least 1, but got 0"
    assert error(Pipeline(2, 3, ())) == (
        "pipelines[0]: stage layers must cover 0 to 8 without gap or overlap, but layers 0 to 8 are missing (the stages have )"
    )
    idle = replace(stage, replicas=(Replica(("a/0",), 2), Replica(("a/1",), 0)))
    what = "pipelines[0].stages[0]: a replica has at least one device and one sequence, but got"
    assert error(Pipeline(2, 3, (idle,))) == f"{what} 1 devices and 0 sequences"
    assert error(Pipeline(2, 3, (replace(stage, replicas=(Replica((), 2),)),))) == f"{what} 0 devices and 2 sequences"
    turned = replace(stage, recompute="selective", recompute_layers=2, recompute_rest="full")
    rule = f"pipelines[0].stages[0]: recompute is {ACCEPTED}, but got"
    assert error(Pipeline(2, 3, (turned,))) == f"{rule} selective: 2, rest: full"
    assert error(Pipeline(2, 3, (replace(stage, recompute_rest="pointwise"),))) == f"{rule} none, rest: pointwise"
    assert error(Pipeline(2, 3, (replace(stage, recompute="some"),))) == f"{rule} some"
