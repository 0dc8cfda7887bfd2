"""Published runs: reading their CSV, and the plans and clusters that are made of them."""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.assumptions import DATA, Assumptions, read_assumptions
from experiments.published import Modelled, NotModelled, modelled
from experiments.published_rows import Run, read_failures, read_runs
from sim.spec.cluster import PCIE_BYTES_PER_S, links
from sim.spec.counts import total_parameters
from sim.spec.gpu import catalogue, is_cpu
from sim.spec.plan import Plan
from sim.spec.reading import InputError

ASSUMED = read_assumptions()
RUNS = {run.id: run for run in read_runs(DATA / "published_runs.csv")}
FAILURES = read_failures(DATA / "failed_runs.csv")

SMALL = Run(
    id="own-1",
    source_key="own",
    gpu_type="A100-80GB-SXM",
    num_gpus=16,
    gpus_per_node=8,
    model_name="Llama tiny",
    num_layers=8,
    hidden=256,
    ffn_hidden=704,
    heads=4,
    vocab=1000,
    seq_len=128,
    global_batch=32,
    micro_batch=2,
    tp=2,
    pp=4,
    dp=2,
    precision="bf16",
)
"""A row that a user may write, of a source that nothing is known of."""


def made(run: Run, assumptions: Assumptions = ASSUMED) -> Modelled:
    found = modelled(run, assumptions)
    assert isinstance(found, Modelled), found
    return found


def reason(run: Run) -> str:
    found = modelled(run, ASSUMED)
    assert isinstance(found, NotModelled)
    assert "\n" not in found.reason and found.reason.startswith("not modelled: ")
    return found.reason.removeprefix("not modelled: ")


def layers_of(plan: Plan) -> list[list[tuple[int, int]]]:
    """The ranges of each stage of the first pipeline."""
    return [list(stage.layers) for stage in plan.pipelines[0].stages]


def refused(text: str, folder: Path, read: Callable[[Path], list[Run]] = read_runs) -> str:
    path = folder / "runs.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read(path)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(str(path))
    return line.removeprefix(str(path))


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_every_cell_of_the_published_runs_is_read() -> None:
    with (DATA / "published_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RUNS) == 1827
    for row in rows:
        run = RUNS[row["id"]]
        for column, text in row.items():
            value = getattr(run, column)
            if not text:
                assert value is None
            elif isinstance(value, str):
                assert value == text.strip()
            else:
                assert value == float(text)


def test_failed_runs_have_names_of_their_own_and_say_what_went_wrong() -> None:
    assert len(FAILURES) == 1078 == len({run.id for run in FAILURES})
    assert FAILURES[0].id == "aleph-failed-0001"
    assert Counter(run.failure for run in FAILURES)["OOM Error"] == 281
    assert {run.zero_stage_or_fsdp for run in FAILURES if run.source_key == "bigscience"} == {"ZeRO-1"}


def test_a_csv_of_the_required_columns_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('\ufeffid,gpu_type,source_key,num_gpus,notes\n\na,T4,own,4.0,"one, two"\n')
    assert read_runs(path) == [Run("a", "own", "T4", 4, notes="one, two")]


def test_a_quoted_cell_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('id,gpu_type,source_key,num_gpus,notes\na,T4,own,4,"one\ntwo"\nb,T4,own,4,form\x0cfeed\u2028\n')
    assert [run.notes for run in read_runs(path)] == ["one\ntwo", "form\x0cfeed"]


HEAD = "id,source_key,gpu_type,num_gpus,iter_time_s,sequence_parallel\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ": is empty; expected a CSV whose first line names the columns (id, source_key, gpu_type, num_gpus, ...)"),
        (
            "\nid,source_key,gpu_type,num_gpus\n",
            ": the first line is empty; expected a CSV whose first line names the columns "
            "(id, source_key, gpu_type, num_gpus, ...)",
        ),
        ("id;source_key;gpu_type;num_gpus\n", ": columns are separated by ';'; expected commas"),
        (HEAD, ": holds no runs; expected one row for each, below the line that names the columns"),
        (HEAD + "a,s,T4,4,1\n", ", line 2: has 5 cells, but there are 6 columns"),
        (HEAD + "a,s,T4,4,1,\na,s,T4,8,1,\n", ", line 3: the id 'a' stands in line 2 already"),
        (HEAD + ",s,T4,4,1,\n", ", line 2: id is a text, but the cell is empty"),
        (HEAD + "a,,T4,4,1,\n", ", line 2: source_key is a text, but the cell is empty"),
        (
            "id,source_key,gpu_type\na,s,T4\n",
            ": the column 'num_gpus' is missing; required are id, source_key, gpu_type, num_gpus, but got id, "
            "source_key, gpu_type",
        ),
        ("id,source_key,gpu_type,num_gpus,id\na,s,T4,4,b\n", ": the column 'id' stands 2 times"),
        (HEAD + 'a,s,T4,4,1,\nb,s,T4,4,1,"8 inch\nc,s,T4,4,1,\n', ", line 4: is not valid CSV: unexpected end of data"),
    ],
)
def test_a_csv_that_is_wrong_is_told_in_one_line(text: str, line: str, tmp_path: Path) -> None:
    assert refused(text, tmp_path) == line


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("4.5,1,", "num_gpus is a whole number of at least 1, or empty, but got '4.5'"),
        ("many,1,", "num_gpus is a whole number of at least 1, or empty, but got 'many'"),
        ("1_0,1,", "num_gpus is a whole number of at least 1, or empty, but got '1_0'"),
        ("0,1,", "num_gpus is a whole number of at least 1, or empty, but got '0'"),
        ("4,-1,", "iter_time_s is a number above 0, or empty, but got '-1'"),
        ("4,0,", "iter_time_s is a number above 0, or empty, but got '0'"),
        ("4,1e-300,", "iter_time_s is a number from 1e-09 to 1e+15, or empty, but got '1e-300'"),
        ("4,1e308,", "iter_time_s is a number from 1e-09 to 1e+15, or empty, but got '1e308'"),
        ("4,inf,", "iter_time_s is a number above 0, or empty, but got 'inf'"),
        ("4,1,2", "sequence_parallel is 0 or 1, but got '2'"),
        ("4,1,maybe", "sequence_parallel is 0 or 1, but got 'maybe'"),
    ],
)
def test_a_cell_that_is_not_of_its_column_is_told_of_its_row_and_spares_the_others(cells: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"{HEAD}a,s,T4,{cells}\nb,s,T4,4,1,0\n")
    odd, fine = read_runs(path)
    assert odd.bad_cells == (said,) and not fine.bad_cells
    assert modelled(odd, read_assumptions()) == NotModelled(odd, f"not modelled: {said}")


def test_more_than_all_of_the_peak_is_no_mfu(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("id,source_key,gpu_type,num_gpus,mfu_pct\na,s,T4,4,420\nb,s,T4,4,42\n")
    odd, fine = read_runs(path)
    assert odd.bad_cells == ("mfu_pct is per cent, at most 100, but got '420'",) and fine.mfu_pct == 42


def test_words_for_empty_cells_and_flags_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    flags = ["TRUE", "yes", "1.0", "False", "off", "0", "n/a", "-", "NaN"]
    path.write_text(HEAD + "".join(f"r{i},s,T4,4,N/A,{flag}\n" for i, flag in enumerate(flags)))
    runs = read_runs(path)
    assert [run.sequence_parallel for run in runs] == [True, True, True, False, False, False, None, None, None]
    assert not any(run.bad_cells or run.iter_time_s for run in runs)


def test_a_run_that_failed_is_none_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("id,gpu_type,source_key,num_gpus,failure\na,T4,own,4,CUDA OOM\nb,T4,own,4,\n")
    failed, ran = read_runs(path)
    assert reason(failed) == "failure 'CUDA OOM', but --runs are those that ended; others are read by --failures"
    assert ran.bad_cells == ()


def test_an_unknown_column_is_told_with_the_nearest(tmp_path: Path) -> None:
    line = refused("id,source_key,gpu_type,num_gpus,microbatch\n", tmp_path)
    assert line.startswith(": unknown column 'microbatch'; did you mean micro_batch?; accepted: id, source_key, ")
    assert "'failure' is missing" in refused("source_key,gpu_type,num_gpus\n", tmp_path, read_failures)


# --- Plans -----------------------------------------------------------------------------------------------------------


def test_ranks_lie_tensor_fastest_then_context_then_data_then_pipeline() -> None:
    # 16 GPUs on two nodes, tp 2, pp 4, dp 2: stage s of pipeline d has ranks 4 s + 2 d and the next.
    plan = made(SMALL).plan
    devices = [[stage.devices for stage in pipeline.stages] for pipeline in plan.pipelines]
    assert devices == [
        [("node-0/0", "node-0/1"), ("node-0/4", "node-0/5"), ("node-1/0", "node-1/1"), ("node-1/4", "node-1/5")],
        [("node-0/2", "node-0/3"), ("node-0/6", "node-0/7"), ("node-1/2", "node-1/3"), ("node-1/6", "node-1/7")],
    ]
    assert layers_of(plan) == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]
    assert [(p.micro_batch, p.micro_batches) for p in plan.pipelines] == [(2, 8), (2, 8)]
    context = made(replace(SMALL, dp=1, cp=2)).plan
    assert context.context_parallel == 2
    assert context.pipelines[0].stages[0].devices == ("node-0/0", "node-0/1", "node-0/2", "node-0/3")


def test_a_source_that_is_not_known_is_taken_to_be_megatron_and_says_so() -> None:
    found = made(SMALL)
    assert found.cluster.stack.name == "megatron"
    assert (found.plan.zero_stage, found.plan.sequence_parallel, found.plan.schedule) == (1, True, "1f1b")
    assert found.plan.transformer.padded_vocab == 1024  # 1000 up to a multiple of 128 x tp 2
    assert "zero_stage_or_fsdp ZeRO-1" in found.assumed and "infiniband at 200 Gbit/s for each 1 GPUs" in found.assumed
    assert not any(line.startswith(("tp", "micro_batch", "precision")) for line in found.assumed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_layers": None}, "num_layers"),
        ({"micro_batch": 3}, "global_batch 32 does not divide by dp 2 x micro_batch 3"),
        ({"dp": 1}, "degrees 2 x 4 x 1 = 8, but num_gpus is 16"),
        ({"cp": 2}, "degrees 2 x 4 x 2 x 2 = 32, but num_gpus is 16"),
        ({"gpu_type": "RTX4091"}, "unknown GPU kind 'RTX4091'; did you mean RTX4090?"),
        ({"gpu_type": "Quux"}, "unknown GPU kind 'Quux'; `motley list gpus` names those known"),
        ({"gpu_type": "8xT4+4xV100"}, "gpu_type '8xT4+4xV100' names 12 GPUs, but num_gpus is 16"),
        ({"num_layers": 9}, "num_layers 9 over pp 4: does not divide, and how it was cut is not published"),
        ({"vpp": 3}, "num_layers 8 over pp 4 x vpp 3: does not divide, and how it was cut is not published"),
        ({"schedule": "DualPipe"},
         "schedule 'DualPipe'; accepted: gpipe, 1f1b, split-1f1b, eager-1f1b, interleaved, zb-1p, zb-2p, zb-v, zb-h1, zb-h2, "
         "none, default, pipedream-flush, afab, zbv, zb1p, zb2p"),
        ({"schedule": "1F1B (async)"},
         "schedule '1F1B (async)'; accepted: gpipe, 1f1b, split-1f1b, eager-1f1b, interleaved, zb-1p, zb-2p, zb-v, zb-h1, zb-h2, "
         "none, default, pipedream-flush, afab, zbv, zb1p, zb2p"),
        ({"schedule": "interleaved 1F1B", "num_layers": 4},
         "vpp, which is not published: 4 layers over pp 4 have no equal chunks"),
        ({"precision": "int4"}, "precision 'int4'; accepted: fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4"),
        (
            {"recompute": "some"},
            "recompute 'some'; accepted: none, pointwise, selective, full, no, off, false, 0, yes, on, true, 1, "
            "attn, attention, core_attn, core attention",
        ),
        ({"zero_stage_or_fsdp": "sharded"},
         "zero_stage_or_fsdp 'sharded'; accepted: 0 to 3, ZeRO-N, FSDP, HSDP, none, no, ddp, no_shard, dist opt, "
         "distributed-optimizer, distributed_optimizer"),
        ({"model_name": "Mamba"}, "layers that are not all of one shape"),
        ({"model_name": "DeepSeek_V3 (dropless)"}, "experts whose sizes have no column"),
        ({"model_name": "Own 30B-A3B"}, "model_name 'Own 30B-A3B', experts whose sizes have no column"),
        ({"model_name": "Llama-8x7B"}, "model_name 'Llama-8x7B', experts whose sizes have no column"),
        ({"model_name": "GPT-MoE 1.3B"}, "model_name 'GPT-MoE 1.3B', experts whose sizes have no column"),
        ({"heads": 3}, "model Llama-tiny: `hidden` must be a multiple of `heads` where `head_dim` is not given, "
                       "but got hidden=256, heads=3"),
        ({"plan_json": '{"stages": 3}'}, 'plan_json, which is of no known form; expected {"partition": [BOUND, ...]} or '
                                         '{"layers_per_stage": [...], "stages": [[{"gpus": [[KIND, COUNT]]}]]}'),
        ({"plan_json": '{"stages": [[{"gpus": [["T4", -1]]}]]}'},
         'plan_json, which is of no known form; expected {"partition": [BOUND, ...]} or '
         '{"layers_per_stage": [...], "stages": [[{"gpus": [[KIND, COUNT]]}]]}'),
        ({"inter_node_GBps_per_node": 0.0}, "inter_node_GBps_per_node 0, but the GPUs are on several nodes"),
        ({"schedule": "non-interleaved 1F1B", "vpp": 2}, "vpp 2, but the schedule 'non-interleaved 1F1B' does not interleave"),
        ({"schedule": "GPipe", "vpp": 2}, "vpp 2, but the schedule 'GPipe' does not interleave"),
        ({"params_b": 7.0}, "params_b 7, but what the row tells of the model makes 0.00695"),
        ({"model_name": "DBRX"}, "experts whose sizes have no column"),
        ({"model_name": "OLMoE-1B-7B"}, "model_name 'OLMoE-1B-7B', experts whose sizes have no column"),
        ({"ep": 8}, "ep 8, but Llama tiny has no experts"),
        ({"ep": 8, "model_name": "Own model"}, "ep 8, experts whose sizes have no column"),
        ({"plan_json": "plans/one.json"}, "plan_json is the text of a JSON object itself, but got 'plans/one.json'"),
        ({"plan_json": "{"}, "plan_json, line 1, column 2: ends too early: Expecting property name enclosed in double quotes"),
        ({"num_gpus": 10**9}, "num_gpus 1000000000, but a cluster has at most 100,000"),
    ],
)  # fmt: skip
def test_what_cannot_be_modelled_says_why(change: dict[str, object], why: str) -> None:
    assert reason(replace(SMALL, **change)) == why  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("InterleavedZeroBubble", "schedule 'InterleavedZeroBubble'; accepted: "),
        ("ZB-V-Half", "schedule 'ZB-V-Half'; accepted: "),
    ],
)
def test_orders_that_only_sound_like_ours_are_refused(schedule: str, said: str) -> None:
    assert reason(replace(SMALL, schedule=schedule)).startswith(said)


def test_whole_numbers_that_a_table_wrote_as_fractions_are_taken_as_such(tmp_path: Path) -> None:
    # As pandas writes a column with gaps.
    path = tmp_path / "own.csv"
    path.write_text(
        "id,gpu_type,source_key,num_gpus,recompute,zero_stage_or_fsdp,vpp,cp,inter_node_GBps_per_node\na,T4,own,4,1.0,3.0,0,0,0\n"
    )
    (read,) = read_runs(path)
    assert (read.recompute, read.zero_stage_or_fsdp, read.vpp, read.cp, read.bad_cells) == ("1", "3", None, None, ())
    assert read.inter_node_GBps_per_node == 0 and made(replace(SMALL, inter_node_GBps_per_node=0.0, num_gpus=8, dp=1)).plan
    found = made(replace(SMALL, recompute=read.recompute, zero_stage_or_fsdp=read.zero_stage_or_fsdp))
    assert (found.plan.zero_stage, found.plan.pipelines[0].stages[0].recompute) == (3, "full")


@pytest.mark.parametrize(
    ("name", "vocab", "position"),
    [
        ("Llama 3 8B", 128256, "rotary"),
        ("LLAMA3_8B [SFT Performance]", 128256, "rotary"),
        ("meta-llama/Llama-3.1-8B", 128256, "rotary"),
        ("Llama-30B", 32000, "rotary"),  # the first Llama's sizes are no third generation
        ("llama 33b", 32000, "rotary"),
        ("Llama-3B", 32000, "rotary"),
        ("GPT3-175B", 50257, "learned"),
        ("Nemotron-3-8B", 256000, "rotary"),
        ("bloom-7b1", 250880, "learned"),
    ],
)
def test_a_models_name_begins_with_its_familys(name: str, vocab: int, position: str) -> None:
    assumed = ASSUMED.of(replace(SMALL, model_name=name))
    assert (assumed.vocab, dict(assumed.model)["position"], assumed.shape) == (vocab, position, None)


@pytest.mark.parametrize(("ffn", "activation", "width"), [(704, "swiglu", 704), (1024, "gelu", 1024), (None, "gelu", 1024)])
def test_a_model_of_no_family_is_what_its_columns_tell(ffn: int | None, activation: str, width: int) -> None:
    found = made(replace(SMALL, model_name="Own model", ffn_hidden=ffn, heads=None))
    model, shape = found.plan.transformer, "gated" if activation == "swiglu" else "plain"
    assert (model.activation, model.ffn, model.heads, model.name) == (activation, width, 2, "Own-model")
    assert f"model {shape}, of no family that is known" in found.assumed
    assert (f"ffn_hidden {width}" in found.assumed) == (ffn is None)
    named = made(replace(SMALL, model_name="Llama tiny" if ffn == 704 else "GPT tiny", ffn_hidden=ffn)).plan
    assert total_parameters(named.transformer) == pytest.approx(total_parameters(model), rel=0.06)  # GPT's head is its embedding


def test_experts_are_whole_where_a_row_divides_them_over_more_than_its_copies() -> None:
    row = replace(SMALL, model_name="Grok1-314B", num_layers=4, hidden=6144, ffn_hidden=32768, heads=48, kv_heads=8, vocab=131072)
    row = replace(row, gpu_type="H100", num_gpus=8, tp=4, pp=1, dp=2, global_batch=8, framework="NeMo (v24.11.1)")
    copies, ranks = made(replace(row, ep=2)).plan, made(replace(row, ep=8)).plan
    assert (copies.expert_parallel, copies.expert_tensor_parallel) == (2, None)
    assert (ranks.expert_parallel, ranks.expert_tensor_parallel) == (8, 1)
    # Of a later release the table of the recipe says so; experts that are not divided are on all of its kinds as all else.
    later = replace(row, source_key="dgxc", framework="NeMo (v25.05.01)", num_gpus=32, dp=8, global_batch=16)
    found = {(kind, ep): made(replace(later, gpu_type=kind, ep=ep)).plan for kind in ("H100", "GB200") for ep in (1, 8)}
    assert {key: plan.expert_tensor_parallel for key, plan in found.items() if plan.whole_experts} == {("H100", 8): 1}
    told = made(replace(later, ep=8))
    assert "expert_tensor_parallel 1" in told.assumed
    # Which gives way to what the row says.
    assert not made(replace(later, ep=8, sequence_parallel=False)).plan.whole_experts
    assert not made(replace(later, ep=2)).plan.whole_experts


@pytest.mark.parametrize(("name", "kv_heads"), [("Llama-3-8B", 8), ("Qwen3-8B", 8), ("Mistral-7B", 8), ("Qwen3-30B-A3B", 4)])
def test_a_family_tells_the_heads_of_keys(name: str, kv_heads: int) -> None:
    row = replace(SMALL, model_name=name, hidden=4096, ffn_hidden=14336, heads=32, tp=2)
    told = made(row)
    assert told.plan.transformer.kv_heads == kv_heads and f"kv_heads {kv_heads}" in told.assumed
    assert made(replace(row, kv_heads=16)).plan.transformer.kv_heads == 16


def test_experts_have_their_own_width_where_the_family_says_so() -> None:
    # config.json of Qwen3-30B-A3B: hidden 2048, 48 layers, 32 heads of 128, 4 of keys and values; 30.5e9 parameters.
    shape = {"num_layers": 48, "hidden": 2048, "ffn_hidden": 6144, "heads": 32, "kv_heads": 4, "vocab": None}
    model = made(replace(SMALL, model_name="Qwen3_30B_a3B", **shape)).plan.transformer  # type: ignore[arg-type]
    assert total_parameters(model) == pytest.approx(30.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp16 mixed", "fp16"),
        ("amp_bf16", "bf16"),
        ("float8 linear + bf16", "fp8"),
        ("fp8 e4m3 matmul", "fp8"),
        ("FP8-CS", "fp8"),
        ("FP8-MX", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("fp32", "fp32"),
        ("bfloat16", "bf16"),
        ("half", "fp16"),
        ("float16", "fp16"),
    ],
)
def test_precisions_are_known_by_many_names(text: str, name: str) -> None:
    assert made(replace(SMALL, precision=text)).plan.precision == name


@pytest.mark.parametrize(
    ("text", "stage", "group"),
    [
        ("ZeRO-0", 0, None),
        ("ZeRO-1 (distributed optimizer)", 1, None),
        ("DDP (distributed optimizer)", 1, None),
        ("FSDP SHARD_GRAD_OP (MP mode DEFAULT)", 2, None),
        ("FSDP (ZeRO-2-like: params not resharded after fwd)", 2, None),
        ("FSDP2 (ZeRO-3)", 3, None),
        ("FSDP FULL_SHARD (MP mode PURE)", 3, None),
        ("FSDP shard 16", 3, None),  # as many as there are replicas
        ("FSDP shard 4", 3, 4),
        ("HSDP", 3, 8),  # the GPUs of a node
        ("ZeRO2", 2, None),
        ("ZeRO 3", 3, None),
        ("3", 3, None),
        ("Stage 2", 2, None),
        ("ZeRO stage-1", 1, None),
        ("DDP", 0, None),
        ("none", 0, None),
        ("distributed-optimizer", 1, None),
        ("no FSDP", 0, None),
        ("not FSDP, distributed optimizer", 1, None),
        ("FSDP, reshard_after_forward=False", 2, None),
        ("HYBRID_SHARD", 3, 8),
        ("ZeRO_3", 3, None),
        ("stage=3", 3, None),
    ],
)
def test_sharding_is_known_by_many_names(text: str, stage: int, group: int | None) -> None:
    plan = made(replace(SMALL, tp=1, pp=1, dp=16, micro_batch=1, zero_stage_or_fsdp=text)).plan
    assert (plan.zero_stage, plan.shard_group) == (stage, group)


def test_hybrid_sharding_is_over_the_replicas_of_a_node() -> None:
    run = replace(SMALL, pp=1, micro_batch=1, zero_stage_or_fsdp="HSDP")
    found = made(replace(run, tp=1, dp=16, gpus_per_node=None))
    assert found.plan.shard_group == 8 and "gpus_per_node 8" in found.assumed  # of the default assumption
    assert made(replace(run, tp=2, dp=8)).plan.shard_group == 4  # two tensor ranks each
    assert made(replace(run, tp=1, dp=8, num_gpus=8)).plan.shard_group is None  # there is one node only


@pytest.mark.parametrize(
    ("text", "vpp", "name", "chunks"),
    [
        ("ZB-1p", None, "zb-1p", 1),
        ("ZB-H1", None, "zb-1p", 1),
        ("ZB-H2", None, "zb-2p", 1),
        ("ZB-V", None, "zb-v", 2),
        ("GPipe", None, "gpipe", 1),
        ("eager-1F1B", None, "eager-1f1b", 1),
        ("DeepSpeed 1F1B", None, "1f1b", 1),
        ("interleaved", 2, "interleaved", 2),
        ("interleaved 1F1B", 2, "interleaved", 2),
        ("1F1B", 2, "interleaved", 2),
        ("non-interleaved 1F1B", None, "1f1b", 1),
        ("PipeDream-Flush", None, "1f1b", 1),
        ("AFAB", None, "gpipe", 1),
        ("ZBV", None, "zb-v", 2),
    ],
)
def test_schedules_are_known_by_many_names(text: str, vpp: int | None, name: str, chunks: int) -> None:
    plan = made(replace(SMALL, schedule=text, vpp=vpp)).plan
    assert (plan.schedule, len(plan.pipelines[0].stages[0].layers)) == (name, chunks)


@pytest.mark.parametrize(("text", "mode"), [("no", "none"), ("False", "none"), ("True", "full"), ("full (all layers)", "full")])
def test_recomputation_is_known_by_many_names(text: str, mode: str) -> None:
    assert made(replace(SMALL, recompute=text)).plan.pipelines[0].stages[0].recompute == mode


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("full", None),
        ("full (uniform, 1 layer)", None),
        ("full (block, 1 layer)", 1),
        ("full, 4 of 8 layers", 1),
        ("full, 99 layers", 2),
    ],
)
def test_full_recomputation_may_be_of_some_layers(text: str, layers: int | None) -> None:
    (stage, *_) = made(replace(SMALL, recompute=text)).plan.pipelines[0].stages  # one of four, of two layers each
    assert (stage.recompute, stage.recompute_layers) == ("full", layers)


def test_a_share_of_all_layers_is_recomputed_wherever_stages_are_cut() -> None:
    for some in range(9):
        counts = [
            s.recompute_layers for s in made(replace(SMALL, recompute=f"full, {some} of 8 layers")).plan.pipelines[0].stages
        ]
        assert len(counts) == 4 and sum(count or 0 for count in counts) == some


@pytest.mark.parametrize(
    ("text", "stage", "offloads"),
    [("ZeRO-3 + CPU offload", 3, True), ("ZeRO-Offload (stage 2)", 2, True), ("ZeRO-3 (no offload)", 3, False)],
)
def test_optimizer_states_are_in_the_host_where_the_row_says_so(text: str, stage: int, offloads: bool) -> None:
    plan = made(replace(SMALL, zero_stage_or_fsdp=text, tp=1, pp=1, dp=16, micro_batch=1)).plan
    assert (plan.zero_stage, plan.offload_optimizer) == (stage, offloads)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (None, "nvswitch"),
        ("NVLink4", "nvswitch"),
        ("NVSwitch3", "nvswitch"),
        ("HGX", "nvswitch"),
        ("SXM4", "nvswitch"),
        ("whatever it was", "nvswitch"),
        ("PCIe", "pcie4"),
        ("PCIe x16", "pcie4"),
        ("PCIe Gen5, no NVLink", "pcie5"),
        ("pcie 3.0 x16", "pcie3"),
        ("PCIe4", "pcie4"),
        ("PCI-E gen 5x16", "pcie5"),
        ("PCI Express 5.0", "pcie5"),
        ("PCIe (Gen3)", "pcie3"),
        ("PCIe v3", "pcie3"),
        ("pcie: 3.0", "pcie3"),
        ("PCIe 5 GB/s", "pcie4"),
        ("pcie 5 switches", "pcie4"),
        ("PCIe, 3 switches", "pcie4"),
        ("PCIe (3090s in pairs)", "pcie4"),
    ],
)
def test_the_links_of_a_node_are_its_kind_s_unless_the_row_says_pcie(text: str | None, kind: str) -> None:
    intra = made(replace(SMALL, intra_node_link=text)).cluster.nodes[0].intra
    assert (intra.kind, intra.bandwidth_bytes_per_s) == (kind, PCIE_BYTES_PER_S.get(kind, 300e9))


@pytest.mark.parametrize(
    ("gpu", "text", "told"),
    [
        ("A100-80GB-SXM", None, "nvswitch between the GPUs of a node"),
        ("A100-80GB-SXM", "NVLink", None),
        ("A100-80GB-SXM", "PCIe 4.0", None),
        ("A100-80GB-SXM", "qwerty", "nvswitch between the GPUs of a node, for intra_node_link 'qwerty' tells nothing more of {}"),
        ("RTX3090", None, "pcie4 between the GPUs of a node"),
        ("RTX3090", "NVLink", "pcie4 between the GPUs of a node, for intra_node_link 'NVLink' tells nothing more of {}"),
    ],
)
def test_what_is_taken_for_the_links_of_a_node_is_told(gpu: str, text: str | None, told: str | None) -> None:
    assumed = made(replace(SMALL, gpu_type=gpu, intra_node_link=text, gpus_per_node=8)).assumed
    assert [line for line in assumed if "between the GPUs" in line] == ([] if told is None else [told.format(gpu)])


def test_a_last_node_with_fewer_gpus_is_told() -> None:
    told = "2 of the 16 A100-80GB-SXM on a node of their own, for 7 are on each other"
    found = made(replace(SMALL, gpus_per_node=7))
    assert told in found.assumed and [node.gpus for node in found.cluster.nodes] == [7, 7, 2]
    assert not any("of their own" in line for per in (4, 16, 32) for line in made(replace(SMALL, gpus_per_node=per)).assumed)


def test_copies_that_are_not_published_follow_from_the_gpus() -> None:
    found = made(replace(SMALL, dp=None))
    assert len(found.plan.pipelines) == 2 and "dp 2" in found.assumed
    assert reason(replace(SMALL, dp=None, num_gpus=18)) == "degrees 2 x 4 do not divide num_gpus 18"


def test_what_is_left_open_becomes_several_plans() -> None:
    # 40 sequences over dp 2: 20 for each pipeline, so that micro-batches of 1, 2 and 4 divide and 8 does not.
    found = made(replace(SMALL, global_batch=40, micro_batch=None))
    assert [plan.pipelines[0].micro_batch for plan in found.candidates] == [1, 2, 4] and found.plan == found.candidates[0]
    assert "micro_batch one of 1, 2, 4" in found.assumed
    # SC21, table 1: 48 layers over 2 stages leave 24, which 2, 3 and 4 chunks divide; 48 sequences for each pipeline.
    found = made(RUNS["sc21-0005"])
    shapes = [(p.pipelines[0].micro_batch, len(p.pipelines[0].stages[0].layers)) for p in found.candidates]
    assert shapes == [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3), (8, 4)]
    assert {p.schedule for p in found.candidates} == {"interleaved"}


def test_interleaved_stages_take_chunks_in_turn() -> None:
    plan = made(RUNS["korth-0005"]).plan  # 105 layers, 35 stages, 3 chunks each
    assert plan.schedule == "interleaved"
    assert layers_of(plan) == [[(s, s + 1), (s + 35, s + 36), (s + 70, s + 71)] for s in range(35)]


def test_first_and_last_part_hold_a_layer_fewer_where_only_so_they_divide() -> None:
    # Zero bubble: 22 layers over 8 stages, of which the notes say that the first and the last hold one fewer.
    sizes = [stop - start for [(start, stop)] in layers_of(made(RUNS["zerobubble-0003"]).plan)]
    assert sizes == [2, 3, 3, 3, 3, 3, 3, 2]
    # ZB-V, 46 layers over 24 stages: a stage's second chunk lies on the way back; stage 0 has the embedding and the head.
    plan = made(RUNS["zerobubble-0052"]).plan
    assert plan.schedule == "zb-v"
    assert layers_of(plan)[0] == [(0, 0), (46, 46)] and layers_of(plan)[1] == [(0, 1), (45, 46)]
    assert layers_of(plan)[23] == [(22, 23), (23, 24)]


def test_nanotron_cuts_by_cost() -> None:
    # 16 layers, whose head costs 4 of them: 20 over 4 stages are 5 each. A stage ends behind the block that exceeds its share:
    # 6 layers > 5, then 11 > 10, then 16 > 15; the head is left.
    run = next(r for r in RUNS.values() if r.source_key == "ultrascale" and (r.num_layers, r.pp) == (16, 4))
    assert layers_of(made(run).plan) == [[(0, 6)], [(6, 11)], [(11, 16)], [(16, 16)]]
    run = next(r for r in RUNS.values() if r.source_key == "ultrascale" and (r.num_layers, r.pp) == (16, 8))
    # Over 8 stages of 2.5: 3 layers, 6 > 5, 8 > 7.5, 11 > 10, 13 > 12.5, 16 > 15; the head reaches 20 > 17.5, so that the loss
    # alone is left for the last stage, whose devices idle. Such a stage has nothing that a plan could name.
    found = made(run)
    assert layers_of(found.plan) == [[(0, 3)], [(3, 6)], [(6, 8)], [(8, 11)], [(11, 13)], [(13, 16)], [(16, 16)]]
    assert run.num_gpus == len(found.cluster.devices) == 16 and len(found.plan.devices) == 14


def test_redistributed_layers_leave_the_last_stage_the_head() -> None:
    # 32 layers of hidden 3072 over 8 stages, vocabulary 65536, 4096 tokens: the head costs
    # 65536 / (12 x 3072 + 2 x 4096) = 1.45 layers, so that 3 + 1.45 there and 5 elsewhere beat 4 + 1.45.
    sizes = [stop - start for [(start, stop)] in layers_of(made(RUNS["vocabparallel-0027"]).plan)]
    assert sizes == [4, 4, 4, 4, 4, 4, 5, 3]
    few = replace(RUNS["vocabparallel-0027"], num_layers=7, params_b=None)
    assert reason(few) == "num_layers 7 over pp 8: does not divide, and how it was cut is not published"
    assert reason(RUNS["vocabparallel-0009"]) == "vocabulary parallelism"


def test_amp_counts_pseudo_layers_and_mixes_nodes() -> None:
    # Boundaries 0, 7, 14, 20, 30 over embedding, no-op, 24 layers and four more; the last node has the T4s.
    found = made(RUNS["amp_het-0001"])
    assert layers_of(found.plan) == [[(0, 5)], [(5, 12)], [(12, 18)], [(18, 24)]]
    kinds = [{found.cluster.device(name).gpu.name for name in stage.devices} for stage in found.plan.pipelines[0].stages]
    assert kinds == [{"V100-16GB-SXM"}] * 3 + [{"T4"}]
    rates = [node.nic.bandwidth_bytes_per_s * node.nic.count for node in found.cluster.nodes if node.nic]
    assert rates == pytest.approx([1.25e9, 1.25e9, 1.25e9, 6.25e9])
    failed = next(run for run in FAILURES if run.source_key == "amp_homo" and "partition=[0, 8, 14, 20, 30]" in str(run.notes))
    assert layers_of(made(failed).plan) == [[(0, 6)], [(6, 12)], [(12, 18)], [(18, 24)]]


def test_sailor_names_the_kinds_of_every_stage() -> None:
    found = made(RUNS["sailor_het-0005"])  # 12 + 14 of 26, which count the embedding and the head
    assert layers_of(found.plan) == [[(0, 11)], [(11, 24)]]
    cluster = found.cluster
    kinds = [[cluster.device(stage.devices[0]).gpu.name for stage in p.stages] for p in found.plan.pipelines]
    assert kinds == [["RTX3090", "TITAN-RTX"], ["RTX2080", "RTX2080"]]
    carried = {n.gpu.name: n.nic.bandwidth_bytes_per_s * cluster.fabric.efficiency("ethernet") for n in cluster.nodes if n.nic}
    assert carried == pytest.approx({"RTX3090": 0.115e9, "RTX2080": 2.86e9, "TITAN-RTX": 2.86e9}, rel=0.01)


@pytest.mark.parametrize("per_node", [1, 3, 4, 8])
@pytest.mark.parametrize("gpu", ["V100-32GB-SXM", "T4", "H100-80GB-SXM"])
def test_a_node_has_the_rate_that_is_published_however_many_gpus_share_a_card(gpu: str, per_node: int) -> None:
    told = {"source_key": "nobody", "gpu_type": gpu, "gpus_per_node": per_node, "num_gpus": 2 * per_node, "dp": 2 * per_node}
    found = made(replace(SMALL, **told, tp=1, pp=1, micro_batch=1, global_batch=2 * per_node, inter_node_GBps_per_node=25.0))  # type: ignore[arg-type]
    rates = [node.nic.bandwidth_bytes_per_s * node.nic.count for node in found.cluster.nodes if node.nic]
    assert rates == pytest.approx([25e9, 25e9])


def test_stages_that_interleave_by_an_unpublished_number_are_tried_with_all_that_divide_the_layers() -> None:
    def chunks(layers: int) -> tuple[list[int], list[str]]:
        found = made(replace(SMALL, schedule="interleaved 1F1B", num_layers=layers))
        assert all(plan.schedule == "interleaved" for plan in found.candidates)
        counts = [len(plan.pipelines[0].stages[0].layers) for plan in found.candidates]
        return counts, [line for line in found.assumed if line.startswith("vpp")]

    assert chunks(48) == ([2, 3, 4, 6, 12], ["vpp one of 2, 3, 4, 6, 12"])
    assert chunks(8) == ([2], ["vpp 2"])
    assert chunks(4 * 14) == ([2, 7], ["vpp one of 2, 7"])  # 14 chunks of a layer each are more than anybody has


def test_what_is_assumed_of_a_kind_it_can_do() -> None:
    for name, kind in catalogue().items():
        row = replace(SMALL, source_key="nobody", gpu_type=name, precision=None)
        assert is_cpu(kind) or kind.peak(made(row).plan.precision) is not None, name
        for alias in kind.aliases:  # it is the same kind, however it is spelled
            assert ASSUMED.of(replace(row, gpu_type=alias)) == ASSUMED.of(row), alias
    assert made(replace(SMALL, gpu_type="8xRTX-6000-Ada+8xT4", precision=None)).plan.precision == "fp16"


def test_a_rack_of_72_is_one_node_of_nvlink() -> None:
    found = made(RUNS["megatronbridge-0085"])  # 256 GB200
    assert [(node.gpus, node.intra.kind) for node in found.cluster.nodes] == [(64, "nvswitch")] * 4
    assert made(RUNS["megatronbridge-0076"]).cluster.nodes[0].nic is None  # 64 of them need no network


def test_selective_recomputation_by_layers_follows_from_what_is_published() -> None:
    # Llama 2 13B of fms-fsdp: HFU 69 % over MFU 61 % is 0.131 of all FLOP again, 0.39 of the forward: 16 of 40 layers.
    plan = next(made(run).plan for run in RUNS.values() if run.source_key == "fmsfsdp" and run.hfu_pct == 69)
    assert plan.pipelines[0].stages[0].recomputed() == {"none": 24, "pointwise": 0, "selective": 0, "full": 16}


# --- All rows --------------------------------------------------------------------------------------------------------


def test_every_modelled_run_uses_all_its_gpus_but_for_stages_of_the_loss_alone_and_has_its_batch() -> None:
    found = [(run, modelled(run, ASSUMED)) for run in [*RUNS.values(), *FAILURES]]
    done = [(run, m) for run, m in found if isinstance(m, Modelled)]
    assert Counter(run.failure is None for run, _ in done) == {True: 1657, False: 1016}
    idle = [run for run, m in done if len(m.plan.devices) < len(m.cluster.devices)]
    assert Counter(run.failure is None for run in idle) == {True: 58, False: 90}
    assert {ASSUMED.of(run).cuts for run in idle} == {"nanotron"}
    for run, m in done:
        assert len(m.cluster.devices) == run.num_gpus
        for plan in m.candidates:
            assert len(set(plan.devices)) == len(plan.devices)
            assert set(plan.devices) <= {device.name for device in m.cluster.devices}
            # The stages that are left out are whole, and of every pipeline the same.
            (stages,) = {len(pipeline.stages) for pipeline in plan.pipelines}
            assert run.num_gpus and run.pp and len(plan.devices) * run.pp == run.num_gpus * stages
            assert stages == run.pp or run in idle
            assert sum(pipeline.sequences for pipeline in plan.pipelines) == run.global_batch


def test_parameters_are_those_published() -> None:
    for run in RUNS.values():
        found = modelled(run, ASSUMED)
        if isinstance(found, Modelled) and run.params_b and run.source_key != "vocabparallel":  # one name for all vocabularies
            assert total_parameters(found.plan.transformer) == pytest.approx(run.params_b * 1e9, rel=0.05), run.id
            if run.source_key == "mosaic":  # which prints what it counts, in units of 100,000
                assert abs(total_parameters(found.plan.transformer) - run.params_b * 1e9) < 51_000, run.id
            if run.source_key == "ultrascale":  # which names its models by three digits
                assert total_parameters(found.plan.transformer) == pytest.approx(run.params_b * 1e9, rel=5e-3), run.id


def test_rows_that_are_alike_share_a_cluster() -> None:
    clusters = {id(made(run).cluster) for run in RUNS.values() if run.source_key == "vtrain_single"}
    assert len(clusters) == 3  # of 2, 4 and 8 GPUs


# --- Assumptions -----------------------------------------------------------------------------------------------------


def test_every_source_and_exception_has_its_reason() -> None:
    for run in [*RUNS.values(), *FAILURES]:
        assert run.source_key in ASSUMED.sources
        assert all(len(text) > 10 for text in ASSUMED.of(run).reasons)


def test_of_a_source_without_an_entry_the_framework_tells_what_it_does() -> None:
    def of(**told: object) -> tuple[str, int, bool]:
        found = ASSUMED.of(replace(SMALL, **told))  # type: ignore[arg-type]
        assert all(len(text) > 10 for text in found.reasons)
        return found.stack, found.zero_stage, found.sequence_parallel

    assert of() == ("megatron", 1, True)
    assert of(gpu_type="H100-80GB", framework="Megatron-LM") == ("megatron-core", 1, True)  # younger than its flash attention
    assert of(gpu_type="H100-80GB") == of(gpu_type="H100-80GB", framework="in-house") == ("typical", 1, True)
    assert of(gpu_type="H100-80GB", framework="nemo 25.02") == ("nemo", 1, True)
    assert of(framework="PyTorch FSDP") == ("typical", 3, False)
    assert of(framework="LLM Foundry (FSDP)") == ("composer-fsdp", 3, False)
    assert of(framework="PyTorch FSDP (torch.compile)") == ("fms-fsdp", 3, False)  # the later exception decides
    # What a framework is built on says less than its own name.
    assert of(gpu_type="H100-80GB", framework="NeMo 2.0 (PyTorch Lightning)") == ("nemo", 1, True)
    assert of(framework="Megatron-LM (PyTorch 2.1)") == ("megatron", 1, True)
    assert of(framework="DeepSpeed + Accelerate") == ("typical", 1, False)
    assert of(framework="HF Trainer, DeepSpeed ZeRO-2") == ("typical", 2, False)
    assert of(gpu_type="H100-80GB", framework="DeepSpeed", zero_stage_or_fsdp="ZeRO-1") == ("typical", 1, False)
    assert of(gpu_type="H100-80GB", framework="Megatron-DeepSpeed")[0] == "megatron-deepspeed"
    assert of(framework="DeepSpeed ZeRO-3") == ("typical", 3, False)
    for cell in ("3", "stage 3", "ZeRO-3 (16 GPUs)"):
        assert of(framework="DeepSpeed", zero_stage_or_fsdp=cell)[0] == "typical"
    assert of(framework="DeepSpeed", zero_stage_or_fsdp="ZeRO-1") == ("megatron-deepspeed", 1, False)
    assert of(framework="PyTorch FSDP2") == of(framework="PyTorch", zero_stage_or_fsdp="FSDP2") == ("torchtitan", 3, False)
    for name in ("LitGPT", "Hugging Face Transformers", "Axolotl", "OLMo", "PyTorch Lightning"):
        assert of(framework=name) == ("typical", 3, False)
        assert of(framework=name, zero_stage_or_fsdp="FSDP2")[0] == "torchtitan"
    assert of(framework="PyTorch DDP") == ("typical", 0, False)
    assert of(framework="TRL", zero_stage_or_fsdp="ZeRO-3") == ("typical", 3, False)
    assert of(framework="GPT-NeoX")[0] == "megatron-deepspeed" and of(framework="Levanter")[0] == "maxtext"
    # Where no framework is named, how the states are divided tells it.
    assert of(zero_stage_or_fsdp="FSDP full_shard")[0] == of(zero_stage_or_fsdp="HSDP (shard 8)")[0] == "typical"
    assert of(framework="Megatron-LM", zero_stage_or_fsdp="FSDP")[0] == "megatron"
    assert of(framework="torchtitan", zero_stage_or_fsdp="FSDP")[0] == "torchtitan"
    assert of(framework="Megatron-LM + FlashAttention") == ("megatron-core", 1, True)  # on A100, too
    assert of(framework="Megatron-LM (no flash attention)")[0] == of(framework="own (without FlashAttention)")[0] == "megatron"
    assert of(framework="DeepSpeed ZeRO-2") == ("megatron-deepspeed", 2, False)
    assert of(framework="DeepSpeed Stage 3") == ("typical", 3, False)
    assert of(framework="Megatron-FSDP")[:2] == ("megatron", 3)
    assert of(framework="Megatron-LM", zero_stage_or_fsdp="not FSDP, distributed optimizer") == ("megatron", 1, True)
    assert of(framework="ctrl-trainer") == ("megatron", 1, True)  # a word begins where none goes on
    assert of(schedule="ZB-2p") == ("megatron-zero-bubble", 1, True)
    assert of(source_key="korth", framework="nanotron") == ("megatron", 0, False)  # a source with an entry says so itself
    assert reason(replace(SMALL, model_name="Llama3-8B (LoRA finetune)")) == "LoRA"


def test_the_name_of_a_model_tells_its_vocabulary_and_its_mlp() -> None:
    def model(**told: object) -> tuple[int, int]:
        transformer = made(replace(SMALL, vocab=None, ffn_hidden=None, **told)).plan.transformer  # type: ignore[arg-type]
        return transformer.vocab, transformer.ffn

    assert model(model_name="Llama-3.1-8B") == (128256, 896)
    assert model(model_name="Llama2-7B") == (32000, 688)
    assert model(model_name="GPT-1B") == (50257, 1024)
    assert {"vocab 32000", "ffn_hidden 688"} <= set(made(replace(SMALL, vocab=None, ffn_hidden=None)).assumed)
    assert model(model_name="GPT l30", source_key="zerobubble", schedule="1F1B")[0] == 32000  # the source's entry comes first


def test_exceptions_hold_for_their_rows() -> None:
    stacks = Counter(ASSUMED.of(run).stack for run in RUNS.values() if run.source_key == "dgxc")
    assert stacks == {"nemo": 84, "maxtext": 14}  # nine rows of MaxText and five of PaxML
    aleph = Counter(ASSUMED.of(run).stack for run in RUNS.values() if run.source_key == "aleph")
    of_kernels = {"": 34, "-flash1": 42, "-rms": 50, "-fused": 7, "-torch": 8}  # by those in their notes
    assert aleph == {f"aleph-megatron{kernel}": count for kernel, count in of_kernels.items()}
    titan = Counter(
        ASSUMED.of(run).stack for run in RUNS.values() if run.source_key == "torchtitan" and "row" in (run.precision or "")
    )
    assert titan == {"torchtitan-rowwise": 4}  # by how many scales their float8 has


def test_nemo_sums_gradients_in_the_training_precision() -> None:
    def of(framework: str) -> str:
        return made(replace(SMALL, source_key="nobody", framework=framework)).plan.gradient_precision

    assert (of("NeMo 25.02"), of("Megatron-Bridge"), of("Megatron-Core")) == ("bf16", "bf16", "fp32")


def test_a_source_may_have_steps_of_its_own_between_nodes(tmp_path: Path) -> None:
    # The micro-benchmarks of EFA in constants.yaml: steps of 110 to 210 us, of a network whose latency is 36 to 96 us.
    fabric = made(next(run for run in RUNS.values() if run.source_key == "ultrascale" and run.num_gpus == 16)).cluster.fabric
    assert (fabric.step_s, fabric.latency_s, fabric.start_s) == pytest.approx((110e-6, 36e-6, links().start_s))
    assert made(SMALL).cluster.fabric.step_s == links().step_s
    path = tmp_path / "assumptions.yaml"
    path.write_text((DATA / "assumptions.yaml").read_text().replace("step: 110 us", "step: 110"))
    with pytest.raises(InputError, match=r"ultrascale\.?.*step: got 110 without a unit"):
        read_assumptions(path)


def test_cells_that_a_source_disregards_count_as_empty_and_are_told() -> None:
    def of(run: Run) -> Modelled:
        return made(run, replace(ASSUMED, sources={"own": {**ASSUMED.default, "disregarded": ["precision", "recompute"]}}))

    told = replace(SMALL, recompute="full", precision="fp16")
    assert (
        of(told).plan
        == of(replace(told, recompute=None, precision=None)).plan
        == made(replace(told, recompute="none", precision="bf16")).plan
    )
    assert made(told).plan.pipelines[0].stages[0].recompute == "full"
    assert of(told).assumed[:2] == ("precision fp16 is disregarded", "recompute full is disregarded")
    assert {"precision bf16", "recompute none"} <= set(of(told).assumed)
    assert not any("disregarded" in text for text in of(replace(told, recompute=None, precision=None)).assumed)


def test_layers_of_a_single_node_of_vtrain_were_not_recomputed() -> None:
    def modes(source: str) -> set[str]:
        plans = [made(run).plan for run in RUNS.values() if run.source_key == source and run.recompute == "full"]
        return {stage.recompute for plan in plans for pipeline in plan.pipelines for stage in pipeline.stages}

    assert (modes("vtrain_single"), modes("vtrain_multi")) == ({"none"}, {"full"})


def test_a_wrong_assumption_is_told_in_one_line(tmp_path: Path) -> None:
    text = (DATA / "assumptions.yaml").read_text()
    for number, (old, new, line) in enumerate(
        [
            ("stack: nanotron", "stack: nanotorn", "unknown software stack 'nanotorn'; did you mean nanotron?"),
            ("cuts: late", "cuts: early", "cuts: expected one of even, ends, late, nanotron, redistribute"),
            ("vocab_multiple: 128\n  precision", "vocab_multiples: 128\n  precision", "vocab_multiple: is missing"),
            ("when: {framework: [nanotron]}", "when: {frame: [nanotron]}", "frame: unknown column; did you mean framework?"),
            ("disregarded: [recompute]", "disregarded: [tp]", "disregarded: expected a list of columns, each one of precision, "),
            ("disregarded: [recompute]", "disregarded: recompute", "disregarded: expected a list, but got 'recompute'"),
        ]
    ):
        path = tmp_path / f"assumptions-{number}.yaml"
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError) as caught:
            read_assumptions(path)
        assert line in str(caught.value) and "\n" not in str(caught.value)
