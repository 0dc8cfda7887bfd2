"""Published runs as plans on clusters.

A row (`experiments.published_rows`) becomes a `Modelled` (cluster, plan, and the plans it may also have been), or a `NotModelled`
with the reason. What a source leaves open is assumed (`experiments.assumptions`); nothing here knows a run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from experiments.assumptions import DISREGARDED, Assumption, Assumptions
from experiments.published_rows import Run, gpu_parts
from sim.spec.cluster import MOST_GPUS, PCIE_BYTES_PER_S, Cluster, Fabric, Intra, Nic, Node, links
from sim.spec.counts import RECOMPUTE, head_forward_flop, layer_forward_flop, total_parameters
from sim.spec.gpu import PRECISIONS, GpuKind, gpu_kind
from sim.spec.plan import SCHEDULES, LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError, parse_json
from sim.spec.stack import stack
from sim.spec.transformer import Moe, Transformer

MOST_OFF = 1.5
"""A model that has so many times as many parameters as are published, or as few, is another one: 1.31 with a vocabulary that the
published number leaves out."""

NVLINK_DOMAIN = 72
"""GPUs that one NVLink switch joins in GB200 and GB300 NVL72 racks."""


@dataclass(frozen=True)
class Modelled:
    """A run as a plan on a cluster. `plan` is the first of the `candidates`, which are several where the row leaves it open."""

    run: Run
    plan: Plan
    cluster: Cluster
    assumed: tuple[str, ...]
    """What the row does not say and is assumed, as 'vocab 50257', and what it says that is not believed."""
    candidates: tuple[Plan, ...]


@dataclass(frozen=True)
class NotModelled:
    """A run that no plan is made of; `reason` is a line that begins with 'not modelled: '."""

    run: Run
    reason: str


MUST_BE_PUBLISHED = ("num_layers", "hidden", "global_batch", "tp", "pp", "seq_len")
"""Columns without which nothing is known of a run's time, beside its GPUs."""


class _Refused(Exception):
    """Why a run is not modelled."""


def modelled(run: Run, assumptions: Assumptions) -> Modelled | NotModelled:
    """The plan and the cluster of a run, or why there are none. The same for runs that failed.

    Ranks lie tensor fastest, then context, then data, then pipeline (Megatron-LM's and DeepSpeed's order), node after node,
    unless the row's `plan_json` says otherwise.
    """
    try:
        if run.bad_cells:
            raise _Refused("; ".join(run.bad_cells))
        row = _Row(run, assumptions.of(run))
        plans = tuple(row.plans())
    except (_Refused, InputError) as error:
        return NotModelled(run, f"not modelled: {error}")
    return Modelled(run, plans[0], row.cluster, tuple(row.assumed), plans)


class _Row:
    """One run while it is being modelled: its cells, what stands in for those that are empty, and a list of these."""

    def __init__(self, run: Run, assumption: Assumption) -> None:
        cells = {column: getattr(run, column) for column in assumption.disregarded if getattr(run, column) is not None}
        emptied: dict[str, Any] = dict.fromkeys(cells)
        self.run, self.assumption = replace(run, **emptied), assumption
        self.assumed = [f"{column} {cell} {DISREGARDED}" for column, cell in cells.items()]
        self.gpus = self._gpus()
        if missing := [name for name in MUST_BE_PUBLISHED if getattr(run, name) is None]:
            raise _Refused(", ".join(missing))
        if assumption.not_modelled is not None:
            raise _Refused(assumption.not_modelled)
        self.tp, self.pp, self.cp = self._published("tp"), self._published("pp"), run.cp or 1
        copies, rest = divmod(self._published("num_gpus"), self.tp * self.pp * self.cp)
        if rest and run.dp is None:
            terms = [self.tp, self.pp] + ([self.cp] if self.cp > 1 else [])
            raise _Refused(f"degrees {' x '.join(map(str, terms))} do not divide num_gpus {run.num_gpus}")
        self.dp = int(self._taken("dp", None if rest else copies))
        degrees = self.tp * self.pp * self.dp * self.cp
        if degrees != self._published("num_gpus"):
            terms = [self.tp, self.pp, self.dp] + ([self.cp] if self.cp > 1 else [])
            raise _Refused(f"degrees {' x '.join(map(str, terms))} = {degrees}, but num_gpus is {run.num_gpus}")
        self.transformer = self._transformer()
        self.cluster = self._cluster()
        self._note(f"stack {assumption.stack}")

    def _published(self, name: str) -> int:
        """A number that must be published."""
        value = getattr(self.run, name)
        if value is None:
            raise _Refused(name)
        return int(value)

    def _taken(self, name: str, value: Any) -> Any:
        """The row's own value, else the given one, which is noted; refuses the row where that is None too."""
        own = getattr(self.run, name)
        if own is not None:
            return own
        if value is None:
            raise _Refused(name)
        self._note(f"{name} {value}")
        return value

    def _text(self, name: str, value: str) -> str:
        """The row's own text in lower case, else the given one, which is noted."""
        return str(self._taken(name, value)).strip().casefold()

    def _unknown(self, name: str, accepted: Iterable[str]) -> _Refused:
        """The refusal of a text that is none of those that are accepted."""
        return _Refused(f"{name} {getattr(self.run, name)!r}; accepted: {', '.join(dict.fromkeys(accepted))}")

    def _note(self, assumed: str) -> None:
        if assumed not in self.assumed:
            self.assumed.append(assumed)

    # The model

    def _transformer(self) -> Transformer:
        run, assumption = self.run, self.assumption
        hidden = self._published("hidden")
        heads = self._taken("heads", hidden // assumption.head_dim if assumption.head_dim else None)
        ffn = self._taken("ffn_hidden", round(assumption.ffn_per_hidden * hidden) if assumption.ffn_per_hidden else None)
        vocab = self._taken("vocab", assumption.vocab)
        step = assumption.vocab_multiple * self.tp
        shape = dict(assumption.model)
        if assumption.shape is not None:
            self._note(f"model {assumption.shape}, of no family that is known")
        if shape.get("experts") is not None:
            shape["experts"] = Moe(**({"ffn": ffn} | shape["experts"]))
        elif re.search(_EXPERTS, run.model_name or "", re.IGNORECASE):
            raise _Refused(f"model_name {run.model_name!r}, experts whose sizes have no column")
        elif (run.ep or 1) > 1:
            unknown = assumption.shape is not None
            why = ", experts whose sizes have no column" if unknown else f", but {run.model_name} has no experts"
            raise _Refused(f"ep {run.ep}{why}")
        if shape.get("position") == "learned":
            shape["max_positions"] = self._published("seq_len")
        kv_heads = run.kv_heads
        if kv_heads is None and assumption.kv_heads is not None and heads % assumption.kv_heads == 0:
            kv_heads = self._taken("kv_heads", assumption.kv_heads)
        found = Transformer(
            name=re.sub(r"[\s/]+", "-", run.model_name or run.id).strip("-"),
            layers=self._published("num_layers"),
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            vocab=vocab,
            kv_heads=kv_heads or heads,
            padded_vocab=-(-vocab // step) * step,
            **shape,
        )
        built_b = total_parameters(found) / 1e9
        if run.params_b is not None and not 1 / MOST_OFF < built_b / run.params_b < MOST_OFF:
            raise _Refused(f"params_b {run.params_b:g}, but what the row tells of the model makes {built_b:.3g}")
        return found

    # The cluster

    def _gpus(self) -> tuple[tuple[GpuKind, int], ...]:
        """The kinds with how many there are of each, in the order of the text: '12xV100-16GB+4xT4'."""
        text, total = self.run.gpu_type, self.run.num_gpus
        if text is None or total is None:
            raise _Refused("gpu_type" if text is None else "num_gpus")
        if total > MOST_GPUS:
            raise _Refused(f"num_gpus {total}, but a cluster has at most {MOST_GPUS:,}")
        found = []
        for name, count in gpu_parts(text):
            try:
                found.append((gpu_kind(name), total if count is None else count))
            except InputError as error:
                told = str(error).split(" known:")[0]
                raise _Refused(told + " `motley list gpus` names those known" if told.endswith(";") else told) from None
        if sum(count for _, count in found) != total:
            raise _Refused(f"gpu_type {text!r} names {sum(count for _, count in found)} GPUs, but num_gpus is {total}")
        return tuple(found)

    def _cluster(self) -> Cluster:
        run, assumption = self.run, self.assumption
        total = self._published("num_gpus")
        per_node = int(self._taken("gpus_per_node", assumption.gpus_per_node))
        rate = None if run.inter_node_GBps_per_node is None else run.inter_node_GBps_per_node * 1e9 / per_node
        link = (run.intra_node_link or "").casefold()
        if "nvl72" in link:  # the switch joins the nodes of a rack, which are used equally
            per_node = max(n for n in range(1, min(NVLINK_DOMAIN, total) + 1) if total % n == 0)
        denied = any(word in link for word in _NO_FABRICS)
        fabric = not denied and any(word in link for word in _FABRICS)
        unknown = not (denied or fabric or "pci" in link)
        generation = _PCIE_GENERATION.search(link)
        for kind, count in self.gpus:
            if count > per_node and count % per_node:
                rest = f"{count % per_node} of the {count} {kind.name}"
                self._note(f"{rest} on a node of their own, for {per_node} are on each other")
        groups = []
        for kind, count in self.gpus:
            intra = dict(assumption.intra_of).get(kind.name)
            nvlink = kind.nvlink_bytes_per_s if fabric or (unknown and intra is None) else None
            if intra is None and nvlink is None and generation is not None:
                intra = (f"pcie{generation[1]}", None)
            elif intra is not None or nvlink is None:
                intra = intra or assumption.intra
            else:
                intra = ("nvswitch", nvlink)
            groups.append((kind, count, *intra))
            if per_node > 1 and (unknown or (fabric and intra[0] != "nvswitch")):
                why = f", for intra_node_link {run.intra_node_link!r} tells nothing more of {kind.name}" if link else ""
                self._note(f"{intra[0]} between the GPUs of a node{why}")
        many = any(-(-count // per_node) > 1 for _, count in self.gpus) or len(self.gpus) > 1
        if many and rate == 0:
            raise _Refused("inter_node_GBps_per_node 0, but the GPUs are on several nodes")
        nics: list[tuple[str, float, int] | None] = []
        for kind, _ in self.gpus:
            nic = dict(assumption.nic_of).get(kind.name)
            if not many:
                nics.append(None)
                continue
            own = rate if nic is None else None
            nic = nic or assumption.nic
            if own is None:
                if run.inter_node_GBps_per_node is None:
                    self._note(f"{nic.kind} at {nic.bandwidth_bytes_per_s * 8e-9:g} Gbit/s for each {nic.gpus_per_nic} GPUs")
                nics.append((nic.kind, nic.bandwidth_bytes_per_s, nic.gpus_per_nic))
            else:
                carried = Fabric().efficiency(nic.kind) if assumption.node_rate == "measured" else 1.0
                cards = -(-per_node // nic.gpus_per_nic)  # the last of which may have fewer GPUs
                nics.append((nic.kind, own * per_node / cards / carried, nic.gpus_per_nic))
        name = "+".join(f"{count}x{kind.name}" for kind, count in self.gpus)
        network = (assumption.latency_s, assumption.step_s) if many else (0.0, None)
        return _made_cluster(name, tuple(groups), per_node, tuple(nics), *network, assumption.stack)

    # The plans

    def plans(self) -> Iterator[Plan]:
        """The plan, or all that the row may mean, in the order of the assumption's lists; at least one. Raises _Refused."""
        run, batch = self.run, self._published("global_batch")
        schedule, chunk_counts = self._schedule()
        micro_batches = self.assumption.micro_batch if run.micro_batch is None else (run.micro_batch,)
        refusal: _Refused | None = None
        found: dict[tuple[int, int], Plan] = {}
        for micro_batch, chunks in itertools.product(micro_batches, chunk_counts):
            try:
                count, rest = divmod(batch, self.dp * micro_batch)
                if rest:
                    raise _Refused(f"global_batch {batch} does not divide by dp {self.dp} x micro_batch {micro_batch}")
                if len(chunk_counts) > 1 and chunks > 1 and count % self.pp:
                    raise _Refused(f"{count} micro-batches do not divide by pp {self.pp}, which interleaving needs")
                name = "1f1b" if schedule == "interleaved" and chunks == 1 else schedule
                found[micro_batch, chunks] = self._plan(name, micro_batch, count, chunks)
            except _Refused as refused:
                refusal = refusal or refused
        if refusal is not None and not found:
            raise refusal
        for name, options, axis in (("micro_batch", micro_batches, 0), ("vpp", chunk_counts, 1)):
            if len(options) > 1:
                self._note(f"{name} one of {', '.join(map(str, dict.fromkeys(key[axis] for key in found)))}")
        if run.micro_batch is None and len(micro_batches) == 1:
            self._note(f"micro_batch {micro_batches[0]}")
        yield from found.values()

    def _schedule(self) -> tuple[str, tuple[int, ...]]:
        """The schedule's name, and how many chunks of layers a stage may have."""
        run, options = self.run, self.assumption.vpp
        if self.pp == 1:
            return "1f1b", (1,)
        if run.schedule is None and run.vpp is not None:
            return "interleaved", (run.vpp,)
        text = self._text("schedule", self.assumption.schedule)
        text = _SCHEDULE_WORDS.get(text, text)
        unknown = self._unknown("schedule", (*SCHEDULES, *_HANDCRAFTED, *_SCHEDULE_WORDS))
        if re.search(_NO_FLUSH, text):
            raise unknown
        if "non-interleaved" in text:
            return self._one_chunk("1f1b")
        if "zb-v" in text and "half" not in text and "min" not in text:  # V-Half and V-Min are other orders
            return "zb-v", (2,)
        if (name := _HANDCRAFTED.get(text, text)) in ("zb-1p", "zb-2p", "gpipe", "split-1f1b", "eager-1f1b"):
            return self._one_chunk(name)
        if re.search(r"zero.?bubble|zb", text):
            raise unknown
        if run.vpp is not None and ("1f1b" in text or "interleaved" in text):
            return "interleaved", (run.vpp,)
        if "interleaved" in text or text == "1f1b-i":
            found = tuple(v for v in options if v > 1) or self._chunk_counts()
            if len(found) == 1:
                self._note(f"vpp {found[0]}")
            return "interleaved", found
        if "1f1b" not in text:
            raise unknown
        return "interleaved", (1,) if run.schedule is not None else options

    def _chunk_counts(self) -> tuple[int, ...]:
        """How many chunks of equal numbers of layers a stage that interleaves may have. Raises _Refused where that is none."""
        layers = self.transformer.layers
        found = tuple(v for v in range(2, min(layers // self.pp, _MOST_CHUNKS) + 1) if layers % (self.pp * v) == 0)
        if not found:
            raise _Refused(f"vpp, which is not published: {layers} layers over pp {self.pp} have no equal chunks")
        return found

    def _one_chunk(self, schedule: str) -> tuple[str, tuple[int, ...]]:
        """A schedule whose stages have one chunk of layers each."""
        if (self.run.vpp or 1) > 1:
            raise _Refused(f"vpp {self.run.vpp}, but the schedule {self.run.schedule!r} does not interleave")
        return schedule, (1,)

    def _plan(self, schedule: str, micro_batch: int, micro_batches: int, chunks: int) -> Plan:
        run, assumption = self.run, self.assumption
        zero_stage, shard_group = self._zero()
        offloads = re.search(_OFFLOADS, run.zero_stage_or_fsdp or "", re.IGNORECASE)
        return Plan(
            cluster=self.cluster.name,
            model=self.transformer,
            sequence_length=self._published("seq_len"),
            global_batch=self._published("global_batch"),
            pipelines=self._pipelines(schedule, micro_batch, micro_batches, chunks),
            precision=self._precision(),
            schedule=schedule,
            zero_stage=zero_stage,
            sequence_parallel=self.tp > 1 and bool(self._taken("sequence_parallel", assumption.sequence_parallel)),
            context_parallel=self.cp,
            expert_parallel=run.ep or 1,
            expert_tensor_parallel=self._expert_tensor_parallel(),
            shard_group=shard_group,
            overlap_gradients=assumption.overlap_gradients,
            gradient_precision=assumption.gradient_precision,
            offload_optimizer=offloads is not None or assumption.offload_optimizer,
            optimizer=assumption.optimizer,
        )

    def _expert_tensor_parallel(self) -> int | None:
        """1 where tensor ranks have whole experts: as is assumed, or as a row says that divides them over more than its copies.

        Those that are not divided are as all else, and so are those of more tensor ranks than they are divided over, or without
        sequence parallelism.
        """
        divided = self.run.ep or 1
        if divided > self.dp * self.cp:
            return 1
        as_all_else = divided == 1 or divided % self.tp > 0 or (self.tp > 1 and self.run.sequence_parallel is False)
        found = None if as_all_else else self.assumption.expert_tensor_parallel
        if found is not None and self.tp > 1:
            self._note(f"expert_tensor_parallel {found}")
        return found

    def _zero(self) -> tuple[int, int | None]:
        """The ZeRO stage, and how many devices share its shards (None: all replicas)."""
        text = self._text("zero_stage_or_fsdp", f"ZeRO-{self.assumption.zero_stage}")
        text = re.sub(r"\b(no|not|without) (fsdp|hsdp)\b[,; ]*", "", text) or "none"
        group = None
        if found := re.search(r"shard (\d+)", text):
            group = int(found[1]) if int(found[1]) < self.dp * self.cp else None
        elif re.search(r"hsdp|hybrid.shard", text):  # over the replicas of a node, where there are others
            per_node = int(self._taken("gpus_per_node", self.assumption.gpus_per_node)) // self.tp
            group = per_node if 1 <= per_node < self.dp * self.cp else None
        if re.search(r"shard_grad_op|reshard_after_forward *[=:]? *(false|no|off|0)", text):
            return 2, group
        if found := re.search(r"(?:zero|stage)[-_=: ]*(?:stage)?[-_=: ]*([0-3])", text) or re.fullmatch(r"([0-3])", text):
            return int(found[1]), group
        if re.search(r"fsdp|hsdp|full_shard|hybrid.shard|sharded weights", text):
            return 3, group
        if "distributed optimizer" in text:
            return 1, group
        if text in _ZERO_WORDS:
            return _ZERO_WORDS[text], group
        raise self._unknown("zero_stage_or_fsdp", ("0 to 3", "ZeRO-N", "FSDP", "HSDP", *_ZERO_WORDS))

    def _precision(self) -> str:
        """Our name of the precision."""
        assumed = self.assumption.precision
        if assumed == "bf16" and any(kind.peak(assumed) is None for kind, _ in self.gpus):
            assumed = "fp16"  # as on all kinds before Ampere
        text = re.sub(_DISABLED, "", self._text("precision", assumed))
        for part, name in _PRECISION_WORDS:
            if part in text:
                return name
        raise self._unknown("precision", PRECISIONS)

    def _recompute(self, layers: int, before: int) -> tuple[str, int | None]:
        """The mode of a stage of so many layers, after so many in stages before it, and how many it is for, with 'full'."""
        run, share = self.run, self.assumption.selective_layers
        text = self._text("recompute", self.assumption.recompute)
        text = _RECOMPUTE_WORDS.get(text, text)
        mode = next((mode for mode in RECOMPUTE if text.startswith(mode)), None)
        if mode is None:
            raise self._unknown("recompute", (*RECOMPUTE, *_RECOMPUTE_WORDS))
        if mode == "full" and "uniform" not in text:  # Megatron's 'uniform' is for all layers, so many at a time
            if found := re.search(r"(\d+) *(?:of|/) *(\d+) *layers?", text):
                some = min(1.0, int(found[1]) / max(1, int(found[2])))  # of all layers, wherever stages are cut
                return mode, round(some * (before + layers)) - round(some * before)
            if found := re.search(r"(\d+) *layers?", text):
                return mode, min(layers, int(found[1]))
        if mode == "selective" and share is not None:
            if run.mfu_pct and run.hfu_pct:
                share = min(1.0, max(0.0, 3 * (run.hfu_pct / run.mfu_pct - 1)))  # a layer's forward is a third of its FLOP
            return "full", round(share * layers)
        return mode, None

    def _pipelines(self, schedule: str, micro_batch: int, micro_batches: int, chunks: int) -> tuple[Pipeline, ...]:
        """One pipeline for each data-parallel rank."""
        uneven = _uneven(self.run)
        groups = self._sailor_ranks(uneven) if uneven.stages else self._ranks()
        if uneven.partition:
            layers = self._amp_ranges(uneven.partition)
        elif uneven.layers_per_stage:
            layers = self._sailor_ranges(uneven.layers_per_stage)
        else:
            layers = self._ranges(schedule, chunks)
        pipelines = []
        for d in range(self.dp):
            stages: list[Stage] = []
            before = 0
            for p, ranges in enumerate(layers):
                own = sum(stop - start for start, stop in ranges)
                mode, count = self._recompute(own, before)
                before += own
                stages.append(Stage((Replica(groups[p][d], micro_batch),), ranges, mode, count))
            pipelines.append(Pipeline(micro_batch, micro_batches, tuple(stages)))
        return tuple(pipelines)

    def _ranks(self) -> list[list[tuple[str, ...]]]:
        """The devices of each stage's data-parallel ranks: [stage][rank]."""
        names = [device.name for device in self.cluster.devices]
        size = self.tp * self.cp
        at = [tuple(names[i : i + size]) for i in range(0, len(names), size)]
        return [at[p * self.dp : (p + 1) * self.dp] for p in range(self.pp)]

    def _ranges(self, schedule: str, chunks: int) -> list[tuple[LayerRange, ...]]:
        """The layer ranges of each stage."""
        sizes = self._cut(self.pp * chunks)
        if sizes is None:
            what = f"num_layers {self.run.num_layers} over pp {self.pp}" + (f" x vpp {chunks}" if chunks > 1 else "")
            raise _Refused(f"{what}: {_NO_CUT.get(self.assumption.cuts, 'does not divide, and how it was cut is not published')}")
        bounds = [0, *itertools.accumulate(sizes)]
        ranges = list(itertools.pairwise(bounds))
        if schedule == "zb-v":
            return [(ranges[p], ranges[-1 - p]) for p in range(self.pp)]
        return [tuple(ranges[p :: self.pp]) for p in range(min(self.pp, len(ranges)))]

    def _cut(self, parts: int) -> list[int] | None:
        """How many layers each part has, in layer order; None where the assumed rule does not tell."""
        layers, cuts = self._published("num_layers"), self.assumption.cuts
        if cuts == "nanotron" and parts > 1:
            return self._nanotron_cut(parts)
        if cuts == "redistribute" and 1 < parts <= layers:
            return self._least_slowest(parts)
        if layers % parts == 0:
            return [layers // parts] * parts
        if cuts == "late":
            return _spread(layers, parts)[::-1]
        if (layers + 2) % parts and cuts != "ends":
            return None
        sizes = _spread(layers + 2, parts)
        sizes[0] -= 1
        sizes[-1] -= 1
        return sizes if min(sizes) >= 0 and all(sizes[1:-1]) else None

    def _nanotron_cut(self, stages: int) -> list[int] | None:
        """The stages' layers by nanotron's rule: blocks in order, each stage until its share of the cost is exceeded.

        Stages that the rule leaves nothing but the loss, or nothing at all, are left out, and their devices idle. None where a
        stage before the head's has no layers. Source: nanotron, models/base.py `build_model` and
        `get_block_compute_costs` of its Llama: 4 hidden^2 + 3 hidden x ffn for a layer, vocab x hidden for the head, and
        nothing for the embedding, the final norm, the cast and the loss.
        """
        t = self.transformer
        layer = 4 * t.hidden * t.hidden + 3 * t.hidden * t.ffn
        costs = [0] + [layer] * t.layers + [0, t.vocab * t.hidden, 0, 0]
        total, done, stage = sum(costs), 0, 0
        held: list[list[int]] = [[] for _ in range(stages)]
        for block, cost in enumerate(costs):
            done += cost
            held[stage].append(block)
            if done > total * ((stage + 1) / stages) and stage < stages - 1:
                stage += 1
        sizes = [sum(1 <= block <= t.layers for block in blocks) for blocks in held]
        head = t.layers + 2
        last = next(s for s, blocks in enumerate(held) if head in blocks)
        return sizes[: last + 1] if all(sizes[:last]) else None

    def _least_slowest(self, stages: int) -> list[int]:
        """The stages' layers so that the FLOP of the slowest stage, head included, are the fewest; later stages larger."""
        t, length = self.transformer, self._published("seq_len")
        head = head_forward_flop(t, length) / layer_forward_flop(t, length, length).total
        best = min(range(t.layers // stages, 0, -1), key=lambda last: max(last + head, -(-(t.layers - last) // (stages - 1))))
        return [*_spread(t.layers - best, stages - 1)[::-1], best]

    # Plans that are published as JSON

    def _amp_ranges(self, bounds: Sequence[int]) -> list[tuple[LayerRange, ...]]:
        """The layers of AMP's stages, whose pseudo-layers are embedding, no-op, the transformer's layers, and four more."""
        layers = self._published("num_layers")
        if len(bounds) != self.pp + 1 or bounds[0] != 0 or bounds[-1] != layers + 6:
            raise _Refused(f"plan_json's partition {list(bounds)} does not cut {layers} + 6 pseudo-layers over pp {self.pp}")
        cuts = [min(max(bound - 2, 0), layers) for bound in bounds]
        return [(found,) for found in itertools.pairwise(cuts)]

    def _sailor_ranges(self, counts: Sequence[int]) -> list[tuple[LayerRange, ...]]:
        """The layers of Sailor's stages, which count the embedding and the head."""
        layers = self._published("num_layers")
        if len(counts) != self.pp or sum(counts) != layers + 2:
            raise _Refused(f"plan_json's layers_per_stage {list(counts)} do not sum to {layers} + 2 over pp {self.pp}")
        cuts = [min(max(bound - 1, 0), layers) for bound in (0, *itertools.accumulate(counts))]
        return [(found,) for found in itertools.pairwise(cuts)]

    def _sailor_ranks(self, uneven: _Uneven) -> list[list[tuple[str, ...]]]:
        """The devices of Sailor's replicas, each taken from the next free ones of its kind."""
        free: dict[str, list[str]] = {}
        for device in self.cluster.devices:
            free.setdefault(device.gpu.name, []).append(device.name)
        found = []
        for stage in uneven.stages:
            groups = []
            for replica in stage:
                devices: list[str] = []
                for name, count in replica:
                    kind = gpu_kind(name).name
                    if len(free.get(kind, [])) < count:
                        raise _Refused(f"plan_json uses more of {kind} than gpu_type names")
                    devices += free[kind][:count]
                    free[kind] = free[kind][count:]
                groups.append(tuple(devices))
            found.append(groups)
        if len(found) != self.pp or any(len(groups) != self.dp for groups in found):
            shown = " + ".join(str(len(groups)) for groups in found)
            raise _Refused(f"plan_json has {shown} replicas in its stages, but pp is {self.pp} and dp {self.dp}")
        return found


_FABRICS = ("nvlink", "nvswitch", "nvl", "sxm", "hgx", "dgx", "infinity fabric", "xgmi")
_NO_FABRICS = ("no nvlink", "without nvlink", "non-nvlink", "nvlink disabled", "nvlink off")
"""Words of `intra_node_link` that tell of a kind's own fabric, and that there is none. Words that tell neither say nothing."""

_PCIE_GENERATION = re.compile(
    r"pci[ -]?e(?:xpress)?[ :(.-]*(?:v|gen(?:eration)?)?[ .-]*([345])(?:\.0)?(?![\d.]| *(?:gb|switch|node|card))"
)
"""What a link by PCIe is called where its generation is told: PCIe 4.0, pcie gen3, PCIe4."""

_MOST_CHUNKS = 12
"""The most chunks of layers a stage that are tried where a row does not tell them; of 115 shipped runs that do, 109 have no
more."""

_NO_FLUSH = r"2bw|async(?!.*(p2p|comm|send|tensor|tp\b|all-?reduce))"
"""What a schedule is called whose stages do not wait for the end of a batch: asynchronous, where nothing that is sent is."""

_HANDCRAFTED = {"zb-h1": "zb-1p", "zb-h2": "zb-2p"}
"""The names of zero-bubble orders that are written by hand, and our schedules of these orders (Qi et al., 2024)."""


_SCHEDULE_WORDS = {
    "none": "1f1b",
    "default": "1f1b",
    "pipedream-flush": "1f1b",
    "afab": "gpipe",
    "zbv": "zb-v",
    "zb1p": "zb-1p",
    "zb2p": "zb-2p",
}
_RECOMPUTE_WORDS = {
    **dict.fromkeys(("no", "off", "false", "0"), "none"),
    **dict.fromkeys(("yes", "on", "true", "1"), "full"),
    **dict.fromkeys(("attn", "attention", "core_attn", "core attention"), "selective"),
}
_ZERO_WORDS = {"none": 0, "no": 0, "ddp": 0, "no_shard": 0, "dist opt": 1, "distributed-optimizer": 1, "distributed_optimizer": 1}
"""What else a schedule, a recomputation and a ZeRO stage are called."""

_OFFLOADS = r"(?<!no )(?<!not )(?<!without )(?<!no cpu )offload"
"""What a text on sharding says where the optimizer's states are in the host."""

_PRECISION_WORDS = (
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8-mx", "mxfp8"),
    ("mx-fp8", "mxfp8"),
    ("fp8", "fp8"),
    ("float8", "fp8"),
    ("bf16", "bf16"),
    ("bfloat16", "bf16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("half", "fp16"),
    ("tf32", "tf32"),
    ("fp32", "fp32"),
    ("float32", "fp32"),
)
"""What a text contains, and our name of that precision; the first that fits."""


_DISABLED = r"\b(no|without) (fp8|tf32)\b|\b(fp8|tf32) (is )?(disabled|off)\b"
"""What a text on the precision says that is not of it."""


_EXPERTS = r"(?<![a-z])moe(?![a-z])|(?-i:MoE)(?![a-z])|[-_ ]a\d+(\.\d+)?b(?![a-z0-9])|\d+x\d+(\.\d+)?b(?![a-z])|\d+ ?experts"
"""What the name of a model says that is a mixture of experts: MoE, A3B, 8x7B, 64 experts."""


_NO_CUT = {"nanotron": "nanotron leaves no layers to a stage before the head's"}
"""What it says where a rule gives no cut that a plan can tell, by rule."""


@dataclass(frozen=True)
class _Uneven:
    """The uneven plan that a row tells: AMP's stage boundaries, or Sailor's layers and GPUs of each stage's replicas."""

    partition: tuple[int, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    stages: tuple[tuple[tuple[tuple[str, int], ...], ...], ...] = ()
    """[stage][replica]: names of GPU kinds with how many of each."""


def _uneven(run: Run) -> _Uneven:
    """The uneven plan of a row's `plan_json`; AMP's failed rows have theirs in the notes. Raises InputError and _Refused."""
    if run.plan_json is None:
        noted = re.search(r"partition=\[([\d, ]+)\]", run.notes or "")
        return _Uneven(tuple(int(bound) for bound in noted[1].split(","))) if noted else _Uneven()
    text = run.plan_json.lstrip("\ufeff").lstrip()
    if not text.startswith("{"):
        raise _Refused(f"plan_json is the text of a JSON object itself, but got {text[:60]!r}")
    found: Any = parse_json(text, "plan_json")
    try:
        uneven = _Uneven(
            tuple(int(bound) for bound in found.get("partition", ())),
            tuple(int(count) for count in found.get("layers_per_stage", ())),
            tuple(
                tuple(tuple((str(name), int(count)) for name, count in replica["gpus"]) for replica in stage)
                for stage in found.get("stages", ())
            ),
        )
        if any(count < 1 for stage in uneven.stages for replica in stage for _, count in replica):
            raise ValueError
        return uneven
    except (AttributeError, KeyError, TypeError, ValueError):
        forms = 'expected {"partition": [BOUND, ...]} or {"layers_per_stage": [...], "stages": [[{"gpus": [[KIND, COUNT]]}]]}'
        raise _Refused(f"plan_json, which is of no known form; {forms}") from None


def _spread(count: int, parts: int) -> list[int]:
    """The count over the parts, as even as possible, the first parts larger."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]


@lru_cache(maxsize=256)
def _made_cluster(
    name: str,
    groups: tuple[tuple[GpuKind, int, str, float | None], ...],
    per_node: int,
    nics: tuple[tuple[str, float, int] | None, ...],
    latency_s: float,
    step_s: float | None,
    software: str,
) -> Cluster:
    """The cluster of so many GPUs of each kind, `per_node` to a node; rows that are alike share it."""
    nodes: list[Node] = []
    for (kind, count, link, rate), nic in zip(groups, nics, strict=True):
        intra = Intra(link, rate or PCIE_BYTES_PER_S[link], latency_s=links().latency_s[link])
        intra = replace(intra, host_bandwidth_bytes_per_s=intra.bandwidth_bytes_per_s)
        for first in range(0, count, per_node):
            gpus = min(per_node, count - first)
            cards = None if nic is None else Nic(nic[0], nic[1], max(1, -(-gpus // nic[2])))
            nodes.append(Node(f"node-{len(nodes)}", kind, gpus, intra, cards))
    fabric = Fabric(latency_s=latency_s, start_s=links().start_s, step_s=links().step_s if step_s is None else step_s)
    return Cluster(name, tuple(nodes), fabric, stack=stack(software))
