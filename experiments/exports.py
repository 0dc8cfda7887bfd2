"""Plans as other training systems take them, and what those systems cannot say.

A system takes a plan as flags or a file. What it does otherwise than the plan is told in one line each (`differs`), and so is
what it takes in another place, such as the code of the model (`by_hand`). Where nothing that it takes would be this plan, there
is no text, and `refused` tells every reason.

The names of flags and keys are those of Megatron-LM (core 0.13 to 0.15, megatron/training/arguments.py), torchtitan 0.1 to 0.2
(torchtitan/config/job_config.py; later versions are configured in Python), DeepSpeed 0.16 to 0.18 (docs/_pages/config-json.md)
and HexiScale, once FlashFlex (llama/arguments.py and hexiscale/process_args.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from sim.spec.counts import PRECISION_BYTES, RECOMPUTE, with_padded_vocabulary
from sim.spec.plan import Pipeline, Plan, Stage
from sim.spec.reading import InputError, nearest
from sim.spec.transformer import Transformer, presets


@dataclass(frozen=True)
class Export:
    """A plan in the words of a system, or every reason why it has none."""

    text: str | None
    differs: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass
class _Notes:
    """What is found out while a plan is put into a system's words."""

    differs: list[str] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def comments(self) -> list[str]:
        """What differs and what is set by hand, for a file that takes comments, which outlives what a command said."""
        return [*(f"# differs: {line}" for line in self.differs), *(f"# by hand: {line}" for line in self.by_hand)]

    def export(self, text: Callable[[], str]) -> Export:
        """The export; its text is asked for where nothing was refused."""
        if self.refused:
            return Export(None, refused=tuple(self.refused))
        made = text()
        return Export(made, tuple(self.differs), tuple(self.by_hand))


# --- Plans that are the same everywhere ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """A plan of pipelines that are all alike, of stages of one tensor-parallel degree."""

    tensor: int
    context: int
    data: int
    stages: tuple[Stage, ...]
    """Of one pipeline."""
    micro_batch: int
    """Sequences of one data-parallel rank."""
    micro_batches: int
    devices: tuple[tuple[tuple[str, ...], ...], ...]
    """[stage][data-parallel rank] -> its devices, tensor ranks fastest, then context ranks."""

    @property
    def pipeline(self) -> int:
        """How many stages a pipeline has."""
        return len(self.stages)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The layer ranges in the order of the layers."""
        return sorted(r for stage in self.stages for r in stage.layers)


def _grid(plan: Plan, system: str, notes: _Notes) -> _Grid | None:
    """The plan as a grid, or None, with every reason among the refusals."""
    refused = len(notes.refused)
    _refuse_slices(plan, notes, system)
    pipelines = [_without_replicas(pipeline) for pipeline in plan.pipelines]
    uneven = [p for p, parts in enumerate(pipelines) if parts is None]
    if uneven:
        notes.refused.append(
            f"stages of unequal data-parallel degrees or shares of a micro-batch (pipeline {uneven[0]}): {system} has one degree"
        )
    columns = [column for parts in pipelines if parts is not None for column in parts]
    first = columns[0] if columns else plan.pipelines[0]
    others: Mapping[str, Callable[[Pipeline], object]] = {
        "numbers of stages": lambda p: len(p.stages),
        "layer cuts": lambda p: tuple(stage.layers for stage in p.stages),
        "micro-batch sizes": lambda p: p.micro_batch,
        "numbers of micro-batches": lambda p: p.micro_batches,
    }
    for name, value in others.items():
        found = [value(column) for column in columns]
        if len(set(found)) > 1:
            shown = " and ".join(map(str, list(dict.fromkeys(found))[:2])) if name != "layer cuts" else "different ones"
            notes.refused.append(f"pipelines of unequal {name} ({shown}): {system} has pipelines that are all alike")
    degrees = sorted({len(stage.devices) // plan.context_parallel for column in columns for stage in column.stages})
    if len(degrees) > 1:
        notes.refused.append(f"unequal tensor-parallel degrees ({', '.join(map(str, degrees))}): {system} has one for all stages")
    if len(notes.refused) > refused:
        return None
    order = first.visiting_order
    return _Grid(
        tensor=degrees[0],
        context=plan.context_parallel,
        data=len(columns),
        stages=tuple(_most_recompute([column.stages[s] for column in columns], notes, system, s) for s in order),
        micro_batch=first.micro_batch,
        micro_batches=first.micro_batches,
        devices=tuple(tuple(tuple(column.stages[s].devices) for column in columns) for s in order),
    )


def _refuse_slices(plan: Plan, notes: _Notes, system: str) -> None:
    """Notes that a program takes no slices of sequences."""
    if plan.sequence_slices > 1:
        notes.refused.append(f"sequences in {plan.sequence_slices} slices: {system} takes them whole (sequence_slices 1)")


def _without_replicas(pipeline: Pipeline) -> list[Pipeline] | None:
    """A pipeline as several that have one replica of every stage each; None where replicas differ in number or share."""
    count = len(pipeline.stages[0].replicas)
    share = pipeline.micro_batch // count
    for stage in pipeline.stages:
        if len(stage.replicas) != count or any(replica.sequences != share for replica in stage.replicas):
            return None
    return [
        replace(
            pipeline,
            micro_batch=share,
            stages=tuple(replace(stage, replicas=(stage.replicas[r],)) for stage in pipeline.stages),
        )
        for r in range(count)
    ]


def _most_recompute(stages: Sequence[Stage], notes: _Notes, system: str, s: int) -> Stage:
    """Of the same stage of all pipelines, that which recomputes most; what differs is told."""
    most = max(stages, key=_recomputed)
    if any(_recomputed(stage) != _recomputed(most) for stage in stages):
        notes.differs.append(f"recomputation of stage {s} differs among pipelines: {system} recomputes as the one that does most")
    return most


def _recomputed(stage: Stage) -> tuple[int, int]:
    """How much a stage recomputes: the mode that recomputes most, as its place in `RECOMPUTE`, and the layers under it."""
    mode = stage.most_recompute
    return RECOMPUTE.index(mode), stage.recomputed()[mode]


def _equal_cuts(grid: _Grid) -> bool:
    """Whether all layer ranges have as many layers."""
    return len({stop - start for start, stop in grid.chunks}) == 1


def _in_turn(plan: Plan, grid: _Grid) -> bool:
    """Whether ranges are dealt to the stages in turn, as interleaving deals them; one range each is."""
    ranges = len(grid.stages[0].layers)
    return plan.schedule != "zb-v" and grid.chunks == [sorted(stage.layers)[i] for i in range(ranges) for stage in grid.stages]


# --- Ranks -----------------------------------------------------------------------------------------------------------


def _nodes(devices: Iterable[str]) -> list[tuple[str, int]]:
    """The nodes of the devices one after another, with how many devices in a row each has."""
    return [(node, len(list(run))) for node, run in groupby(device.rpartition("/")[0] for device in devices)]


def _placement(orders: Mapping[str, Sequence[str]], notes: _Notes) -> tuple[str, list[str]]:
    """Which of a system's orders of ranks, by name, puts each node's ranks in a row, and its devices by rank.

    Where none does, the first; then `torchrun` cannot start it, and that is told.
    """
    for name, devices in orders.items():
        nodes = _nodes(devices)
        if len({node for node, _ in nodes}) == len(nodes):
            counts = sorted({count for _, count in nodes})
            if len(counts) > 1:
                shown = ", ".join(map(str, counts))
                notes.by_hand.append(f"the nodes have unequal numbers of ranks ({shown}): give each its own --nproc-per-node")
            return name, list(devices)
    name, ranks = next(iter(orders.items()))
    notes.by_hand.append(
        "torchrun gives each node ranks in a row, and the plan places them otherwise: start every rank by itself, with RANK, "
        "LOCAL_RANK and WORLD_SIZE as the list of ranks says"
    )
    return name, list(ranks)


def _by_rank(grid: _Grid, pipeline_fastest: bool) -> list[str]:
    """The devices by rank: tensor and context ranks fastest, then data and pipeline, or pipeline and data."""
    if pipeline_fastest:
        return [name for d in range(grid.data) for stage in grid.devices for name in stage[d]]
    return [name for stage in grid.devices for group in stage for name in group]


def _rank_lines(devices: Sequence[str]) -> list[str]:
    """Comments that say which device each rank is, a line a node."""
    lines, rank = [], 0
    for node, count in _nodes(devices):
        names = ",".join(name.rpartition("/")[2] for name in devices[rank : rank + count])
        lines.append(f"# ranks {rank}-{rank + count - 1}: {node}/{names}" if count > 1 else f"# rank {rank}: {node}/{names}")
        rank += count
    return lines


# --- Megatron-LM -----------------------------------------------------------------------------------------------------

_MEGATRON_PRECISION: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "tf32": (),
    "fp16": ("--fp16",),
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format hybrid"),
    "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"),
}

_MEGATRON_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def to_megatron(plan: Plan) -> Export:
    """The launch script of Megatron-LM's pretrain_gpt.py, without data and learning rate, which a plan does not say."""
    notes, system = _Notes(), "Megatron-LM"
    model = plan.transformer
    model_flags = _megatron_model(model, notes)
    grid = _grid(plan, system, notes)
    if grid is None:
        return notes.export(str)
    flags = [
        f"--tensor-model-parallel-size {grid.tensor}",
        f"--pipeline-model-parallel-size {grid.pipeline}",
        f"--micro-batch-size {grid.micro_batch}",
        f"--global-batch-size {plan.global_batch}",
        f"--seq-length {plan.sequence_length}",
        f"--max-position-embeddings {max(model.max_positions, plan.sequence_length)}",
        *_megatron_padding(plan, grid.tensor, notes),
    ]
    if grid.context > 1:
        flags.append(f"--context-parallel-size {grid.context}")
    if plan.expert_parallel > 1:
        flags += [f"--expert-model-parallel-size {plan.expert_parallel}", "--moe-token-dispatcher-type alltoall"]
        if plan.whole_experts:
            flags.append("--expert-tensor-parallel-size 1")
    if grid.tensor > 1 and (plan.sequence_parallel or model.experts is not None):
        flags.append("--sequence-parallel")
        if not plan.sequence_parallel:
            notes.differs.append("tensor parallelism of experts without sequence parallelism: Megatron-LM has both together")
    if plan.expert_parallel > 1 and plan.precision == "fp16":
        notes.refused.append("expert parallelism in fp16: Megatron-LM has it in bf16 and fp32")
    flags += _megatron_schedule(plan, grid, notes)
    flags += _megatron_states(plan, grid, notes)
    grouped = model.experts is not None and PRECISION_BYTES[plan.precision] <= 2
    if grouped:  # the products of all experts in one kernel, as they are counted
        flags.append("--moe-grouped-gemm")
    flags += _megatron_recompute(grid, grouped, notes)
    flags += _MEGATRON_PRECISION[plan.precision]
    if plan.precision == "tf32":
        notes.by_hand.append("TF32 is switched on in torch (torch.backends.cuda.matmul.allow_tf32), not by a flag")
    orders = {"": _by_rank(grid, pipeline_fastest=False)}
    if grid.context == plan.expert_parallel == 1 and plan.zero_stage < 2:  # with these the other order does not go
        orders["--use-tp-pp-dp-mapping"] = _by_rank(grid, pipeline_fastest=True)
    order, devices = _placement(orders, notes)
    flags += [order] if order else []
    notes.by_hand.append(
        "data, tokenizer, learning rate, the number of iterations, and scaled rotary positions (rope_scaling in a config.json): "
        "a plan does not say them"
    )
    in_turn = max(grid.tensor, grid.context) > 1 and plan.zero_stage < 2
    return notes.export(lambda: _megatron_text(plan, devices, [*model_flags, *flags], in_turn, notes.comments))


def _megatron_text(plan: Plan, devices: Sequence[str], flags: Sequence[str], in_turn: bool, comments: Sequence[str]) -> str:
    """The script; with `in_turn` kernels start in the order of the code, as Megatron-LM wants it for what overlaps them."""
    nodes = _nodes(devices)
    lines = [
        "#!/bin/sh",
        f"# {plan.transformer.name} on {plan.cluster}: {len(devices)} GPUs. Run it on every node, with its NODE_RANK.",
        *_rank_lines(devices),
        *comments,
        *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if in_turn else []),
        f"torchrun --nnodes {len(nodes)} --nproc-per-node {nodes[0][1]} --node-rank $NODE_RANK \\",
        "  --master-addr $MASTER_ADDR --master-port ${MASTER_PORT:-6000} pretrain_gpt.py \\",
    ]
    return "\n".join(lines) + "\n" + " \\\n".join(f"  {flag}" for flag in flags) + ' "$@"\n'


def _megatron_model(model: Transformer, notes: _Notes) -> list[str]:
    """The flags that say the model; what Megatron-LM has no layer for is refused."""
    if model.embedding_width != model.hidden:
        notes.refused.append(f"embeddings of width {model.embedding_width} beside a hidden size of {model.hidden}")
    if model.position not in ("rotary", "learned"):
        notes.refused.append(f"positions of the kind {model.position}")
    if model.activation not in ("swiglu", "gelu"):
        notes.refused.append(f"the activation {model.activation} in the MLP")
    biases = {
        ("all", True): [],
        ("none", False): ["--disable-bias-linear"],
        ("qkv", False): ["--disable-bias-linear", "--add-qkv-bias"],
    }
    bias = biases.get((model.attention_bias, model.mlp_bias))
    if bias is None:
        notes.refused.append(
            f"biases of {model.attention_bias} attention matrices {'with' if model.mlp_bias else 'without'} the MLP's"
        )
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        f"--vocab-size {model.vocab}",
        f"--position-embedding-type {'rope' if model.position == 'rotary' else 'learned_absolute'}",
        f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}",
        f"--norm-epsilon {model.norm_epsilon:g}",
        "--attention-dropout 0.0",  # by default Megatron-LM drops a tenth
        "--hidden-dropout 0.0",
        *(bias or ()),
    ]
    if model.position == "rotary":
        flags.append(f"--rotary-base {model.rope_theta:.0f}")
    if model.head_dim * model.heads != model.hidden:
        flags.append(f"--kv-channels {model.head_dim}")
    if model.kv_heads != model.heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.qk_norm:
        flags.append("--qk-layernorm")
    if model.activation == "swiglu":
        flags.append("--swiglu")
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.sliding_window is not None:
        flags.append(f"--window-size '({model.sliding_window}, 0)'")
    if not model.final_norm:
        notes.refused.append("a model without the norm after its last layer")
    if (moe := model.experts) is not None:
        flags += [f"--num-experts {moe.experts}", f"--moe-router-topk {moe.top_k}", f"--moe-ffn-hidden-size {moe.ffn}"]
        if moe.shared_experts:
            flags.append(f"--moe-shared-expert-intermediate-size {moe.shared_experts * moe.shared_ffn}")
    return flags


def _megatron_padding(plan: Plan, tensor: int, notes: _Notes) -> list[str]:
    """The flag of the rows that the embedding is filled up to: multiples of a number, 128 by default, times the tensor ranks."""
    model = plan.transformer
    for multiple in (128, *(2**i for i in range(15))):
        step = multiple * tensor
        if -(-model.vocab // step) * step == model.padded_vocab:
            if with_padded_vocabulary(model, [tensor], plan.precision) is not None:
                notes.by_hand.append(
                    f"a rank's part of the plan's {model.padded_vocab:,} rows of the vocabulary is no multiple of 16 bytes, "
                    "which costs tensor cores time: without --make-vocab-size-divisible-by Megatron-LM makes it a multiple of 128"
                )
            return [] if multiple == 128 else [f"--make-vocab-size-divisible-by {multiple}"]
    notes.differs.append(
        f"{model.padded_vocab:,} rows of the embedding for a vocabulary of {model.vocab:,}: Megatron-LM has others"
    )
    return []


def _note_in_flight(plan: Plan, notes: _Notes, program: str) -> None:
    """Notes that a program does not hold as many micro-batches as the stages of a plan say."""
    if any(stage.in_flight is not None for pipeline in plan.pipelines for stage in pipeline.stages):
        notes.differs.append(f"micro-batches in flight as the stages say: {program}'s hold one, and one for each that follows")


def _megatron_schedule(plan: Plan, grid: _Grid, notes: _Notes) -> list[str]:
    """The flags of layer cuts and schedule."""
    if not _in_turn(plan, grid):
        notes.refused.append(f"stages folded in a V (schedule {plan.schedule}): Megatron-LM deals layers to its stages in turn")
        return []
    ranges = len(grid.stages[0].layers)
    if plan.schedule not in ("1f1b", "interleaved") and grid.pipeline > 1:
        notes.differs.append(
            f"the schedule {plan.schedule}: Megatron-LM runs 1f1b, or interleaved 1f1b where layers are dealt so"
        )
    _note_in_flight(plan, notes, "Megatron-LM")
    if ranges > 1 and grid.micro_batches % grid.pipeline:
        shown = f"{grid.micro_batches} micro-batches over {grid.pipeline} stages"
        notes.refused.append(f"interleaving of {shown}: Megatron-LM interleaves multiples of the stages")
    if not _equal_cuts(grid):
        return [f"--pipeline-model-parallel-layout '{_layout([stop - start for start, stop in grid.chunks])}'"]
    if ranges > 1:
        start, stop = grid.chunks[0]
        return [f"--num-layers-per-virtual-pipeline-stage {stop - start}"]
    return []


def _layout(counts: Sequence[int]) -> str:
    """Layers by stage as --pipeline-model-parallel-layout takes them: E embedding, t a layer, L loss, | the end of a stage."""
    parts = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def _megatron_states(plan: Plan, grid: _Grid, notes: _Notes) -> list[str]:
    """The flags of gradients, optimizer and how both are divided."""
    if plan.offload_optimizer and plan.optimizer != "adamw":
        notes.refused.append(f"the optimizer {plan.optimizer} in host memory: Megatron-LM offloads Adam alone")
    if plan.offload_optimizer and plan.zero_stage == 0:
        notes.differs.append("a whole optimizer in host memory: Megatron-LM divides one that it offloads (ZeRO 1)")
    divided = plan.zero_stage >= 1 or plan.offload_optimizer
    flags = [f"--optimizer {'adam' if plan.optimizer == 'adamw' else 'sgd'}"]
    flags.append("--accumulate-allreduce-grads-in-fp32" if plan.gradient_precision == "fp32" else "--grad-reduce-in-bf16")
    if divided:
        flags.append("--use-distributed-optimizer")
    if plan.zero_stage >= 2:
        flags += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {_MEGATRON_SHARDING[plan.zero_stage]}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
        ]
    if plan.overlap_gradients:
        flags.append("--overlap-grad-reduce")
        flags += ["--overlap-param-gather"] if divided else []
    copies = grid.data * grid.context
    if plan.zero_stage >= 1 and plan.shard_group is not None and plan.shard_group < copies:
        flags.append(f"--num-distributed-optimizer-instances {copies // plan.shard_group}")
    if plan.offload_optimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return flags


def _megatron_recompute(grid: _Grid, grouped: bool, notes: _Notes) -> list[str]:
    """The flags of recomputation: one setting for all stages, that of the stage that recomputes most.

    Activations can be recomputed where experts are `grouped` in one kernel, and nowhere else.
    """
    most = max(grid.stages, key=_recomputed)
    mode, count = _recomputed(most)
    if any(_share(stage) != _share(most) for stage in grid.stages):
        notes.differs.append(
            f"recomputation that differs among stages: Megatron-LM has one setting, and {RECOMPUTE[mode]} is taken"
        )
    if RECOMPUTE[mode] == "none":
        return []
    if mode < RECOMPUTE.index("full") and any(_share(stage)[1] is not None for stage in grid.stages):
        notes.differs.append(
            f"{RECOMPUTE[mode]} recomputation of some layers: Megatron-LM has it for all layers, and here for all"
        )
    if RECOMPUTE[mode] == "selective":
        return ["--recompute-granularity selective"]
    if RECOMPUTE[mode] == "pointwise":
        if not grouped:
            notes.differs.append(
                "pointwise recomputation of the activation: Megatron-LM has it for norms and grouped experts (16 bits) alone"
            )
        modules = "layernorm moe_act" if grouped else "layernorm"
        return ["--recompute-granularity selective", f"--recompute-modules {modules}"]
    if any(stage.recompute_layers is not None and stage.recompute_rest != "none" for stage in grid.stages):
        notes.differs.append("recomputation of the other layers in part: Megatron-LM recomputes nothing of them")
    if all(_recomputed(stage)[1] == stage.layer_count for stage in grid.stages):
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if len(most.layers) > 1:
        count = -(-count // len(most.layers))  # Megatron-LM counts in each virtual stage
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {count}"]


def _share(stage: Stage) -> tuple[int, int | None]:
    """A stage's recomputation such that stages of unequal length that recompute all of their layers are alike."""
    mode, count = _recomputed(stage)
    return mode, None if count == stage.layer_count else count


# --- torchtitan ------------------------------------------------------------------------------------------------------

_TITAN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}

_TITAN_FLAVORS = {"llama-3-8b": "8B", "llama-3-70b": "70B", "llama-3-405b": "405B"}


def to_torchtitan(plan: Plan) -> Export:
    """The TOML file of torchtitan, without data, tokenizer and learning rate, which a plan does not say."""
    notes, system = _Notes(), "torchtitan"
    if plan.precision not in ("fp32", "tf32", "bf16", "fp8"):
        notes.refused.append(f"the precision {plan.precision}: torchtitan trains in float32, bfloat16 or float8")
    if plan.optimizer != "adamw":
        notes.refused.append(f"the optimizer {plan.optimizer}: torchtitan has Adam and AdamW")
    model = plan.transformer
    for what, wrong in _not_llama(model).items():
        if wrong:
            notes.refused.append(f"{what}: torchtitan's llama3 has none")
    grid = _grid(plan, system, notes)
    if grid is None or notes.refused:
        return notes.export(str)
    flavor = _TITAN_FLAVORS.get(model.name) if _is_preset(model) else None
    if flavor is None:
        flavor = model.name
        notes.by_hand.append(f"torchtitan has no flavor of {model.name}: enter one of its sizes under the name {model.name!r}")
    if grid.tensor > 1 and not plan.sequence_parallel:
        notes.differs.append("tensor parallelism without sequence parallelism: torchtitan has both together")
    if plan.gradient_precision != "fp32":
        notes.differs.append(f"gradients in {plan.gradient_precision}: torchtitan reduces them in float32")
    if not plan.overlap_gradients:
        notes.differs.append("reductions after the whole backward: torchtitan overlaps them with it")
    replicas, shards, reshard = _titan_sharding(plan, grid, notes)
    divided = grid.context > 1 or shards > 1
    if plan.offload_optimizer and divided:
        notes.differs.append("the optimizer alone in host memory: torchtitan offloads parameters and gradients, too")
    elif plan.offload_optimizer:
        notes.refused.append("the optimizer in host memory where nothing is divided: torchtitan offloads what FSDP divides")
    if plan.precision in ("bf16", "fp8") and not divided and grid.tensor * grid.pipeline > 1:
        notes.differs.append(
            "bf16 beside tensor or pipeline ranks where nothing is divided: torchtitan's mixed precision is FSDP's, and "
            "without it all is float32 (or training.dtype bfloat16, with states in bf16, too)"
        )
    if plan.precision == "fp8":
        notes.by_hand.append('the converter float8 is called "quantize.linear.float8" since torchtitan 0.2')
    if plan.precision == "tf32":
        notes.by_hand.append("TF32 is switched on in torch (torch.backends.cuda.matmul.allow_tf32), not by a key")
    if plan.schedule not in _TITAN_SCHEDULES and grid.pipeline > 1:
        notes.differs.append(f"the schedule {plan.schedule}: torchtitan runs 1F1B")
    _note_in_flight(plan, notes, "torchtitan")
    local = grid.micro_batch * (grid.micro_batches if grid.pipeline > 1 else 1)
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": reshard,
        "tensor_parallel_degree": grid.tensor,
        "context_parallel_degree": grid.context,
        "pipeline_parallel_degree": grid.pipeline,
    }
    if grid.pipeline > 1:
        parallelism |= {
            "pipeline_parallel_schedule": _TITAN_SCHEDULES.get(plan.schedule, "1F1B"),
            "pipeline_parallel_microbatch_size": grid.micro_batch,
            "module_fqns_per_model_part": _modules(grid.chunks, model.layers),
        }
    tables: dict[str, dict[str, object]] = {
        "model": {"name": "llama3", "flavor": flavor, **({"converters": ["float8"]} if plan.precision == "fp8" else {})},
        "optimizer": {"name": "AdamW"},
        "training": {
            "local_batch_size": local,
            "global_batch_size": plan.global_batch,
            "seq_len": plan.sequence_length,
            "mixed_precision_param": "float32" if plan.precision in ("fp32", "tf32") else "bfloat16",
            "mixed_precision_reduce": "float32",
            **({"enable_cpu_offload": True} if plan.offload_optimizer else {}),
        },
        "parallelism": parallelism,
        "activation_checkpoint": _titan_recompute(grid, notes),
    }
    # The mesh has the pipeline outermost, then data, context and tensor ranks.
    _, devices = _placement({"": _by_rank(grid, pipeline_fastest=False)}, notes)
    notes.by_hand.append("data, tokenizer, learning rate and the number of steps: a plan does not say them")
    return notes.export(lambda: _toml(plan, devices, tables, notes.comments))


def _is_preset(model: Transformer) -> bool:
    """Whether the model is the preset of its name, and not another one of that name."""
    return presets().get(model.name) == model


def _not_llama(model: Transformer) -> Mapping[str, bool]:
    """By what is not of the Llama family, whether the model has it."""
    return {
        f"the activation {model.activation}": model.activation != "swiglu",
        f"the norm {model.norm}": model.norm != "rmsnorm" or not model.final_norm,
        "biases": model.attention_bias != "none" or model.mlp_bias,
        "norms of query and key": model.qk_norm,
        f"positions of the kind {model.position}": model.position != "rotary",
        "a sliding window": model.sliding_window is not None,
        "tied embeddings": model.tied_embeddings,
        f"embeddings of width {model.embedding_width}": model.embedding_width != model.hidden,
        "experts": model.experts is not None,
    }


def _titan_sharding(plan: Plan, grid: _Grid, notes: _Notes) -> tuple[int, int, str]:
    """Copies, shards and what is done after a forward; FSDP2 divides gradients and states always, and parameters if it reshards.

    Context ranks are among the shards of their own accord.
    """
    if plan.zero_stage == 0 and grid.tensor == grid.pipeline == grid.context == 1:
        return grid.data, 1, "default"
    if plan.zero_stage < 2 and grid.data * grid.context > 1:
        divided = "gradients and optimizer states" if plan.zero_stage == 0 else "gradients"
        notes.differs.append(
            f"ZeRO {plan.zero_stage}: torchtitan divides {divided}, too (FSDP2 that keeps the parameters, as ZeRO 2)"
        )
    reshard = "always" if plan.zero_stage == 3 else "never"
    group = plan.shard_group
    if group is None or plan.zero_stage == 0:
        return 1, grid.data, reshard
    if group % grid.context:
        notes.refused.append(
            f"shard_group {group} beside {grid.context} context ranks, which torchtitan divides over in any case"
        )
        return 1, grid.data, reshard
    return grid.data * grid.context // group, group // grid.context, reshard


def _modules(chunks: Sequence[tuple[int, int]], layers: int) -> list[list[str]]:
    """The modules of every chunk, in the order of the layers, by torchtitan's names."""
    parts = [[f"layers.{i}" for i in range(start, stop)] for start, stop in chunks]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _titan_recompute(grid: _Grid, notes: _Notes) -> dict[str, object]:
    """The table of recomputation: one setting for all stages, that of the stage that recomputes most."""
    most = max(grid.stages, key=_recomputed)
    mode, count = _recomputed(most)
    if any(_share(stage) != _share(most) for stage in grid.stages):
        notes.differs.append(
            f"recomputation that differs among stages: torchtitan has one setting, and {RECOMPUTE[mode]} is taken"
        )
        return {"mode": "full"} if RECOMPUTE[mode] == "full" else {"mode": "selective", "selective_ac_option": "op"}
    if RECOMPUTE[mode] in ("selective", "pointwise"):
        of = "of the attention" if RECOMPUTE[mode] == "selective" else "of norms and activation"
        notes.differs.append(f"recomputation {of} alone: torchtitan's keeps the results of costly operations, and no others")
        return {"mode": "selective", "selective_ac_option": "op"}
    if RECOMPUTE[mode] == "full" and count < most.layer_count:
        if most.layer_count % count == 0:
            return {"mode": "selective", "selective_ac_option": str(most.layer_count // count)}
        notes.differs.append(f"{count} of {most.layer_count} layers recomputed: torchtitan takes every n-th, and here all")
    return {"mode": RECOMPUTE[mode]}


def _toml(plan: Plan, devices: Sequence[str], tables: Mapping[str, Mapping[str, object]], comments: Sequence[str]) -> str:
    """The file. Texts, numbers, booleans and lists of them are written in TOML as in JSON."""
    nodes = _nodes(devices)
    lines = [
        f"# {plan.transformer.name} on {plan.cluster}: {len(devices)} GPUs",
        f"# torchrun --nnodes {len(nodes)} --nproc-per-node {nodes[0][1]} ... -m torchtitan.train --job.config_file THIS_FILE",
        *_rank_lines(devices),
        *comments,
    ]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def to_deepspeed(plan: Plan) -> Export:
    """The JSON file of DeepSpeed. Pipelines, experts and recomputation are made in the code of the model: that is told."""
    notes, system = _Notes(), "DeepSpeed"
    if plan.precision not in ("fp32", "tf32", "fp16", "bf16"):
        notes.refused.append(f"the precision {plan.precision}: DeepSpeed's file has fp16 and bf16")
    if plan.context_parallel > 1:
        notes.refused.append("context parallelism in a ring: DeepSpeed divides sequences by heads (Ulysses)")
    grid = _grid(plan, system, notes)
    if grid is None:
        return notes.export(str)
    if grid.pipeline > 1:
        _deepspeed_pipeline(plan, grid, notes)
    if plan.shard_group is not None and plan.zero_stage in (1, 2) and plan.shard_group < grid.data:
        notes.refused.append(
            f"shard_group {plan.shard_group} under ZeRO {plan.zero_stage}: DeepSpeed has groups under ZeRO 3 (MiCS)"
        )
    zero: dict[str, object] = {"stage": plan.zero_stage, "overlap_comm": plan.overlap_gradients}
    if plan.zero_stage == 3 and plan.shard_group is not None:
        zero["mics_shard_size"] = plan.shard_group
    if plan.offload_optimizer and plan.zero_stage == 0:
        notes.refused.append("a whole optimizer in host memory: DeepSpeed offloads under ZeRO 1, 2 and 3")
    if plan.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": grid.micro_batch,
        "gradient_accumulation_steps": grid.micro_batches,
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": plan.gradient_precision},
        "communication_data_type": plan.gradient_precision,
    }
    if plan.precision in ("fp16", "bf16"):
        config[plan.precision] = {"enabled": True}
    if plan.precision == "tf32":
        notes.by_hand.append("TF32 is switched on in torch (torch.backends.cuda.matmul.allow_tf32), not by a key")
    if grid.tensor > 1:
        _deepspeed_tensor(plan, grid, config, notes)
    if plan.expert_parallel > 1:
        notes.by_hand.append(
            f"experts are divided in the model's code: deepspeed.moe.layer.MoE(..., ep_size={plan.expert_parallel})"
        )
        if plan.whole_experts and grid.tensor > 1:
            notes.refused.append("whole experts on each tensor rank: DeepSpeed divides experts over data-parallel ranks alone")
    _deepspeed_recompute(grid, notes)
    _, devices = _placement({"": _by_rank(grid, pipeline_fastest=False)}, notes)
    notes.by_hand.append(f"ranks in this order: {'; '.join(line.removeprefix('# ') for line in _rank_lines(devices))}")
    optimizer = "AdamW" if plan.optimizer == "adamw" else "SGD"
    notes.by_hand.append(f"the optimizer is {optimizer}; its learning rate, the data and the number of steps a plan does not say")
    return notes.export(lambda: json.dumps(config, indent=2) + "\n")


def _deepspeed_pipeline(plan: Plan, grid: _Grid, notes: _Notes) -> None:
    """Notes what DeepSpeed's pipelines cannot say, and how the model's code makes them."""
    if plan.zero_stage >= 2:
        notes.refused.append(f"ZeRO {plan.zero_stage} with pipelines: DeepSpeed takes ZeRO 0 and 1 with them")
    if len(grid.stages[0].layers) > 1:
        notes.refused.append(f"several layer ranges of each stage (schedule {plan.schedule}): DeepSpeed has one")
    elif not _equal_cuts(grid):
        notes.refused.append("unequal numbers of layers: PipelineModule divides layers evenly, or by their parameters")
    if plan.schedule != "1f1b":
        notes.differs.append(f"the schedule {plan.schedule}: DeepSpeed runs 1f1b")
    _note_in_flight(plan, notes, "DeepSpeed")
    notes.by_hand.append(
        "the pipeline is made in the model's code: PipelineModule(layers=..., partition_method='type:YOUR_LAYER', "
        f"topology=PipeModelDataParallelTopology(num_pp={grid.pipeline}, num_mp={grid.tensor}, num_dp={grid.data}))"
    )


def _deepspeed_tensor(plan: Plan, grid: _Grid, config: dict[str, object], notes: _Notes) -> None:
    """Adds tensor parallelism to the file where DeepSpeed makes it, or notes who does."""
    if grid.pipeline > 1 or plan.zero_stage == 3:
        notes.by_hand.append(
            f"the model's layers are divided over {grid.tensor} ranks by its own code (mpu), as Megatron-DeepSpeed's"
        )
    else:
        config["tensor_parallel"] = {"autotp_size": grid.tensor}
        if plan.sequence_parallel:
            notes.differs.append("sequence parallelism: DeepSpeed's tensor parallelism (AutoTP) has none")


def _deepspeed_recompute(grid: _Grid, notes: _Notes) -> None:
    """Notes how the model's code recomputes."""
    if all(_share(stage) == (RECOMPUTE.index("full"), None) for stage in grid.stages):
        how = (
            "PipelineModule(..., activation_checkpoint_interval=1)" if grid.pipeline > 1 else "deepspeed.checkpointing.checkpoint"
        )
        notes.by_hand.append(f"every layer is recomputed: {how}")
    elif any(_recomputed(stage)[0] for stage in grid.stages):
        notes.by_hand.append(
            "recomputation of a part of the layers, or of parts of layers, is up to the model's code: "
            "deepspeed.checkpointing.checkpoint"
        )


# --- HexiScale -------------------------------------------------------------------------------------------------------

_HEXISCALE_MODELS = {
    "llama-7b": "llama-7b",
    "llama-2-7b": "llama-7b",
    "llama-13b": "llama-13b",
    "llama-2-13b": "llama-13b",
    "llama-30b": "llama-30b",
    "llama-2-70b": "llama-70b",
}
_HEXISCALE_SCHEDULES = {"gpipe": "Gpipe", "1f1b": "1F1B"}
_HEXISCALE_SHARDING = {0: "ddp", 2: "zero2", 3: "zero3"}
_HEXISCALE_TOKENS = 4096


def to_hexiscale(plan: Plan) -> Export:
    """The JSON file that HexiScale (FlashFlex) takes as --all_hetero_configs_path; its other arguments are told."""
    notes, name = _Notes(), plan.transformer.name
    if name not in _HEXISCALE_MODELS or not _is_preset(plan.transformer):
        notes.refused.append(f"the model {name}: HexiScale trains {', '.join(dict.fromkeys(_HEXISCALE_MODELS.values()))}")
    for what, degree in (("context", plan.context_parallel), ("expert", plan.expert_parallel)):
        if degree > 1:
            notes.refused.append(f"{what} parallelism: HexiScale has none")
    if plan.precision not in ("fp32", "tf32", "fp16", "bf16"):
        notes.refused.append(f"the precision {plan.precision}: HexiScale trains in tf32, fp16 or bf16")
    stages = [(p, s, stage) for p, pipeline in enumerate(plan.pipelines) for s, stage in enumerate(pipeline.stages)]
    for p, s, stage in stages:
        if len(stage.replicas) > 1:
            notes.refused.append(f"stage {s} of pipeline {p} has replicas: HexiScale's stages are one tensor-parallel group each")
            break
    _refuse_slices(plan, notes, "HexiScale")
    if any(len(stage.layers) > 1 for _, _, stage in stages):
        notes.refused.append(f"several layer ranges of a stage (schedule {plan.schedule}): HexiScale has one")
    elif any(stage.layer_count == 0 for _, _, stage in stages):
        notes.refused.append("a stage without layers")
    degrees = _degrees_by_layer(plan)
    for layer, found in enumerate(degrees):
        if any(max(found) % degree for degree in found):
            shown = ", ".join(map(str, sorted(found)))
            notes.refused.append(
                f"layer {layer} at tensor-parallel degrees {shown}, of which the largest is no multiple of the others"
            )
            break
    if notes.refused:
        return notes.export(str)
    if plan.schedule not in _HEXISCALE_SCHEDULES:
        notes.differs.append(f"the schedule {plan.schedule}: HexiScale runs GPipe or 1F1B, and 1F1B is taken")
    _note_in_flight(plan, notes, "HexiScale")
    if plan.zero_stage not in _HEXISCALE_SHARDING:
        notes.differs.append(
            f"ZeRO {plan.zero_stage}: HexiScale has plain data parallelism, ZeRO 2 and ZeRO 3; the first is taken"
        )
    if plan.sequence_length != _HEXISCALE_TOKENS:
        notes.by_hand.append(
            f"hexiscale/process_args.py sets seq_length to {_HEXISCALE_TOKENS}: set it to {plan.sequence_length}"
        )
    if plan.precision == "fp32":
        notes.differs.append("fp32 without TF32: HexiScale switches TF32 on")
    if plan.offload_optimizer:
        notes.differs.append("the optimizer in host memory: HexiScale keeps it on the GPU")
    if plan.gradient_precision != "fp32":
        notes.differs.append(f"gradients in {plan.gradient_precision}: HexiScale has no setting for it")
    if plan.shard_group is not None and plan.zero_stage >= 1:
        notes.differs.append(f"shard_group {plan.shard_group}: HexiScale divides states over all replicas")
    ordered = [replace(p, stages=tuple(p.stages[s] for s in p.visiting_order)) for p in plan.pipelines]
    recomputing = [_share(stage) for _, _, stage in stages]
    recomputes = any(mode for mode, _ in recomputing)
    if recomputes and set(recomputing) != {(RECOMPUTE.index("full"), None)}:
        notes.differs.append(
            "recomputation of a part of the layers, or of parts of layers: HexiScale recomputes all layers or none, and here all"
        )
    devices = [name for pipeline in ordered for stage in pipeline.stages for name in stage.devices]
    nodes = list(dict.fromkeys(name.rpartition("/")[0] for name in devices))
    used: dict[str, int] = {}
    moved = False
    for node, _, index in (name.rpartition("/") for name in devices):
        moved |= index != str(used.setdefault(node, 0))
        used[node] += 1
    if moved:
        notes.differs.append("which GPU of a machine holds what: HexiScale numbers a machine's GPUs in the order of its ranks")
    _hexiscale_arguments(plan, ordered, nodes, recomputes, notes)
    config = {
        "hetero_configs": [[len(stage.devices) for stage in pipeline.stages] for pipeline in ordered],
        "layer_partitions": [[stage.layer_count for stage in pipeline.stages] for pipeline in ordered],
        "devices_id": [
            [[nodes.index(name.rpartition("/")[0]) for name in stage.devices] for stage in pipeline.stages]
            for pipeline in ordered
        ],
    }
    return notes.export(
        lambda: "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items()) + "\n}\n"
    )


def _degrees_by_layer(plan: Plan) -> list[set[int]]:
    """The tensor-parallel degrees at which each layer is held."""
    found: list[set[int]] = [set() for _ in range(plan.transformer.layers)]
    for p, s, _, replica in plan.replicas():
        for start, stop in plan.pipelines[p].stages[s].layers:
            for layer in range(start, stop):
                found[layer].add(len(replica.devices))
    return found


def _hexiscale_arguments(
    plan: Plan, pipelines: Sequence[Pipeline], nodes: Sequence[str], recomputes: bool, notes: _Notes
) -> None:
    """Notes the arguments that stand beside the file."""
    micro_batches = " ".join(str(pipeline.micro_batches) for pipeline in pipelines)
    sequences = " ".join(str(pipeline.sequences) for pipeline in pipelines)
    training = [
        f"--model_size {_HEXISCALE_MODELS[plan.transformer.name]}",
        "--all_hetero_configs_path THIS_FILE",
        f"--total-layer-num {plan.transformer.layers}",
        f"--chunks {micro_batches}",
        f"--global_bsz_size {sequences}",
        f"--mixed_precision {'fp32' if plan.precision == 'tf32' else plan.precision}",
        f"--pipeline-type {_HEXISCALE_SCHEDULES.get(plan.schedule, '1F1B')}",
        f"--default_dp_type {_HEXISCALE_SHARDING.get(plan.zero_stage, 'ddp')}",
        f"--optimizer-type {'adam' if plan.optimizer == 'adamw' else 'sgd'}",
        "--accum-iter 1",
        *(["--checkpoint-layers"] if recomputes else []),
        *(["--seq-parallel"] if plan.sequence_parallel else []),
    ]
    notes.by_hand.append(f"machines by their numbers in devices_id: {', '.join(f'{i} {node}' for i, node in enumerate(nodes))}")
    notes.by_hand.append(f"every rank runs llama_train.py {' '.join(training)}")


# --- All of them -----------------------------------------------------------------------------------------------------

SYSTEMS: Mapping[str, Callable[[Plan], Export]] = {
    "megatron": to_megatron,
    "torchtitan": to_torchtitan,
    "deepspeed": to_deepspeed,
    "hexiscale": to_hexiscale,
}
"""By name, what puts a plan into a system's words."""


def export(plan: Plan, system: str) -> Export:
    """The plan in the words of a system. Raises InputError for an unknown one."""
    if system not in SYSTEMS:
        raise InputError(f"unknown system {system!r}; accepted: {', '.join(SYSTEMS)}{nearest(system, SYSTEMS)}")
    return SYSTEMS[system](plan)
