"""What one training does beside computing: resuming under another plan, the order of instructions, other schedules' programs."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime import optimizer
from runtime.data import Order as SampleOrder
from runtime.data import open_data
from runtime.interpreter import Interpreter
from runtime.optimizer import StepFacts
from runtime.training import _check_facts, divergence
from sim.engine import simulate
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node
from sim.spec.compile import compile_plan
from sim.spec.gpu import gpu_kind
from sim.spec.program import INSTRUCTIONS, Instruction, dry_run, instruction_text, parse_instruction, parse_program, program_text
from sim.spec.reading import InputError
from sim.spec.trace import ACTIVITIES, BACKGROUND
from sim.spec.transformer import to_table, transformer
from tests.runtime.test_equality import GPT, LLAMA, PLANS, assert_equal, pipeline, plan_of, rate_of, reference, settings_of
from tests.runtime.workers import WORKERS, Order, Workers, token_file

TOKENS = 4000

# --- Resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("degree 4 beside 1, sequence parallel", "zero 1, unequal replicas"),
        ("zero 1, unequal replicas", "three stages, gpipe"),
        ("zero 2, unequal degrees", "one device"),
        ("zero 1, tied, sequence parallel", "zero 3, two stages, uneven replicas"),
        ("ends alone", "tied embeddings over stages"),
        ("offloaded, zero 1, tied", "tied embeddings over stages"),
        ("context, zero 3, uneven replicas, pointwise recomputed", "three stages, gpipe"),
        ("unlike cuts", "context, four ranks in any order, recomputed"),
        ("divided experts, four replicas of two parts, zero 1", "experts on one device"),
        ("experts, zero 3, uneven replicas", "divided experts, stages, zero 3, some held twice"),
        ("whole experts, some held twice, zero 3", "experts on one device"),
        ("divided experts, tensor and sequence parallel, zero 2", "whole experts, two groups in any order, recomputed, zero 2"),
        ("shard groups of two, unlike cuts, zero 1", "zero 2, two stages, uneven replicas"),
        ("zero 3, unequal degrees, recomputed", "shard groups of one, tensor and sequence parallel, zero 2"),
    ],
)
def test_a_training_goes_on_under_another_plan(before: str, after: str, workers: Workers, tmp_path: Path) -> None:
    first, second = PLANS[before], PLANS[after]
    data = token_file(tmp_path, first.transformer.vocab, TOKENS)
    chosen = settings_of(first, data, precision="fp64", steps=6)
    begun = workers.train(Order(first, chosen, stop=3, save=tmp_path / "checkpoints"))
    again = dataclasses.replace(chosen, checkpoints=tmp_path / "checkpoints", resume=True)
    ended = workers.train(Order(second, again, resume=tmp_path / "checkpoints" / "step-00000003"))
    # The reference takes the samples of both: three batches of the first plan's size, then three of the second's.
    losses, weights = reference(first, chosen, torch.float64, sizes=[first.global_batch] * 3 + [second.global_batch] * 3)
    assert [*begun.losses, *ended.losses] == pytest.approx(losses, rel=1e-8, abs=1e-8)
    assert_equal(dataclasses.replace(ended, losses=losses), losses, weights, 1e-8)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero 1, unequal replicas", "three stages, gpipe"),
        ("zero 1, tied, sequence parallel", "zero 3, two stages, uneven replicas"),
    ],
)
def test_a_training_that_is_done_gives_its_weights_under_any_plan(
    before: str, after: str, workers: Workers, tmp_path: Path
) -> None:
    first, second = PLANS[before], PLANS[after]
    chosen = settings_of(first, token_file(tmp_path, first.transformer.vocab, TOKENS), precision="bf16", steps=2)
    done = workers.train(Order(first, chosen, save=tmp_path / "checkpoints"))
    again = workers.train(Order(second, chosen, resume=tmp_path / "checkpoints" / "step-00000002"))
    assert again.losses == [] and set(again.weights) == set(done.weights)
    assert all(torch.equal(again.weights[name], whole) for name, whole in done.weights.items())


def test_a_checkpoint_of_another_model_is_refused(workers: Workers, tmp_path: Path) -> None:
    plan = PLANS["one device"]
    chosen = settings_of(plan, token_file(tmp_path, LLAMA.vocab, TOKENS))
    workers.train(Order(plan, chosen, stop=1, save=tmp_path / "checkpoints"))
    wider = plan_of(dataclasses.replace(LLAMA, ffn=64), *plan.pipelines)
    with pytest.raises(AssertionError, match="is of another model: its ffn is 48, but that of small-llama is 64"):
        workers.train(Order(wider, chosen, resume=tmp_path / "checkpoints" / "step-00000001"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"consumed": "abc"}, "facts.consumed: expected a whole number of at least 0, but got 'abc'"),
        ({"consumed": -5}, "facts.consumed: expected a whole number of at least 0, but got -5"),
        ({"updates": None}, "facts.updates: expected a whole number of at least 0, but got nothing"),
        ({"model": []}, "facts.model: expected a mapping of keys to values, but got []"),
        ({"loss_scale": "large", "since_overflow": 0}, "facts.loss_scale: expected a number"),
    ],
)
def test_facts_that_are_damaged_are_told_by_their_names(changes: dict[str, object], told: str, tmp_path: Path) -> None:
    plan = PLANS["one device"]
    chosen = settings_of(plan, tmp_path / "data")
    facts = {"model": to_table(plan.transformer), "optimizer": plan.optimizer, "sequence_length": plan.sequence_length}
    facts |= {"seed": chosen.seed, "tokens": 10, "consumed": 1, "updates": 1, "step": 1, "loss_scale": None}
    _check_facts(tmp_path, facts, plan, chosen, 10)
    with pytest.raises(InputError) as error:
        _check_facts(tmp_path, facts | changes, plan, chosen, 10)
    assert told in str(error.value) and str(error.value).startswith(str(tmp_path / "motley.json"))


# --- Order -----------------------------------------------------------------------------------------------------------


def cluster_of(name: str) -> Cluster:
    """One node of as many A100s as there are workers."""
    node = Node("n", gpu_kind("A100-80GB-SXM"), WORKERS, Intra("nvlink", 300e9), Nic("infiniband", 25e9))
    return Cluster(name, (node,), Fabric(10e-6))


def in_order(instructions: Iterable[Instruction]) -> dict[bool, list[str]]:
    """The texts of the instructions that a lane waits for, and of those that go on beside them, in their order."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for instruction in instructions:
        found[ACTIVITIES[type(instruction)] in BACKGROUND].append(instruction_text(instruction))
    return found


@pytest.mark.parametrize("name", ["unlike cuts", "uneven replicas", "zero 2, two stages, uneven replicas"])
def test_every_lane_executes_the_instructions_in_the_simulators_order(name: str, workers: Workers, tmp_path: Path) -> None:
    plan = PLANS[name]
    outcome = workers.train(Order(plan, settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), steps=1)))
    spans = sorted(simulate(plan, cluster_of("test")).spans, key=lambda span: span.start_s)
    lanes = compile_plan(plan).lanes
    assert set(outcome.executed) == {lane.name for lane in lanes}
    for lane in lanes:
        simulated = in_order(span.instruction for span in spans if span.lane == lane.name)
        executed = in_order(parse_instruction(text) for text in outcome.executed[lane.name])
        assert executed[False] == simulated[False]
        # What begins at one instant of the simulator's clock is in no order there.
        assert sorted(executed[True]) == sorted(simulated[True])


def test_the_interpreter_covers_every_instruction() -> None:
    names = {kind.__name__ for kind in INSTRUCTIONS}
    source = Path(__import__("inspect").getsourcefile(Interpreter) or "").read_text(encoding="utf-8")
    table = source[source.index("self._execute") : source.index("self._peers")]
    assert {line.strip().split(":")[0] for line in table.splitlines() if ": self._" in line} == names


# --- Programs of other schedules -------------------------------------------------------------------------------------


def with_split_backwards(text: str, delayed: bool) -> str:
    """A program with every backward in halves; the weights' half follows the input's, or waits until it is needed."""
    lines: list[str] = []
    waiting: list[str] = []
    for line in text.splitlines():
        word = line.strip()
        if word.startswith("B"):
            lines.append(line.replace("B", "I", 1))
            waiting.append(line.replace("B", "W", 1))
            if not delayed:
                lines += waiting
                waiting = []
            continue
        if word == "STEP" or (word.startswith("R") and not word.startswith(("RA", "RG"))):
            lines += waiting
            waiting = []
        lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", ["three stages, gpipe", "tied embeddings over stages", "degree 4 beside 1, sequence parallel"])
def test_backwards_in_halves_give_the_same_training(name: str, delayed: bool, workers: Workers, tmp_path: Path) -> None:
    plan = PLANS[name]
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), precision="fp64", steps=3)
    program = with_split_backwards(program_text(compile_plan(plan)), delayed)
    dry_run(parse_program(program))
    outcome = workers.train(Order(plan, chosen, program=program))
    assert_equal(outcome, *reference(plan, chosen, torch.float64), tolerance=1e-8)


# --- Precisions ------------------------------------------------------------------------------------------------------


TOLERANCES = {"bf16": 0.03, "fp16": 0.01}
"""Of losses, against those of fp32."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("zero 1, unequal replicas", "fp16"),
        ("zero 1, unequal replicas", "bf16"),
        ("zb-1p, zero 2, two pipelines", "bf16"),
        ("zb-v, zero 3, two pipelines", "bf16"),
        ("slices, split 1f1b, sequence parallel", "bf16"),
        ("divided experts, zb-2p", "bf16"),
        ("context, zb-1p, beside a pipeline of another degree", "bf16"),
    ],
)
def test_half_precision_stays_near_fp32(name: str, precision: str, workers: Workers, tmp_path: Path) -> None:
    check_half(name, precision, workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", PLANS)
def test_half_precision_of_every_plan_stays_near_fp32(name: str, precision: str, workers: Workers, tmp_path: Path) -> None:
    check_half(name, precision, workers, tmp_path)


def test_gradients_in_half_precision_stay_near_fp32(workers: Workers, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLANS["zero 1, unequal replicas"], precision="bf16", gradient_precision="bf16")
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), steps=8, learning_rate=0.32 / LLAMA.hidden)
    losses, _ = reference(plan, chosen, torch.float32)
    assert workers.train(Order(plan, chosen)).losses == pytest.approx(losses, abs=TOLERANCES["bf16"])


def test_an_update_takes_a_gradient_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it takes one that is in fp32 already, whole: to the bit, over three steps of three stretches."""
    monkeypatch.setattr(optimizer, "CHUNK", 8)
    numbers, own = torch.randn(53, generator=torch.Generator().manual_seed(0)), settings_of(PLANS["one device"], Path("data"))

    def updated(dtype: torch.dtype) -> SimpleNamespace:
        gradient = SimpleNamespace(value=numbers.to(torch.bfloat16).to(dtype))
        states, updates = {name: torch.zeros(53) for name in ("a", "b")}, [torch.zeros(()) for _ in range(3)]
        parts = [(0, 20, True), (20, 20, True), (20, 53, True)]
        master = SimpleNamespace(parts=parts, gradient=gradient, values=numbers.clone(), states=states, updates=updates)
        world = SimpleNamespace(plan=SimpleNamespace(offload_optimizer=False, optimizer="adamw"))
        which: Any = SimpleNamespace(_world=world, _settings=own, _staging=None)
        which._move = partial(optimizer.Optimizer._move, which)
        for _ in range(3):
            optimizer.Optimizer._update(which, [(master, n) for n in range(3)], True, 0.5, 1e-2)  # type: ignore[misc]
        return master

    whole, chunked = updated(torch.float32), updated(torch.bfloat16)
    assert torch.equal(chunked.values, whole.values)
    assert not torch.equal(whole.values, numbers)
    assert all(torch.equal(chunked.states[name], state) for name, state in whole.states.items())
    assert [float(n) for n in chunked.updates] == [float(n) for n in whole.updates] == [3.0, 3.0, 3.0]


def check_half(name: str, precision: str, workers: Workers, folder: Path) -> None:
    plan = dataclasses.replace(PLANS[name], precision=precision)
    data = token_file(folder, plan.transformer.vocab, TOKENS)
    chosen = settings_of(plan, data, steps=8, learning_rate=rate_of(plan.transformer))
    outcome = workers.train(Order(plan, chosen))
    losses, _ = reference(plan, chosen, torch.float32)
    # A token between two experts, of which rounding chooses another, is as if rounded far more.
    tolerance = TOLERANCES[precision] * (1 if plan.transformer.experts is None else 2)
    assert outcome.losses == pytest.approx(losses, abs=tolerance)


@pytest.mark.parametrize(
    ("facts", "of_the_last", "of_another"),
    [
        (StepFacts(2.0, 1.0, 0.1), None, None),
        (StepFacts(math.nan, math.nan, 0.1), *["the loss of step 4 is nan"] * 2),
        (StepFacts(math.inf, math.nan, 0.1), *["the loss of step 4 is inf"] * 2),
        (StepFacts(2.0, math.inf, 0.1), *["the gradient norm of step 4 is inf"] * 2),
        # Of fp16, which leaves such a step out: a gradient that overflows is nothing unusual.
        (StepFacts(2.0, math.inf, 0.1, skipped=True), None, None),
        (StepFacts(math.nan, math.nan, 0.1, skipped=True), "the loss of step 4 is nan", None),
    ],
)
def test_a_step_with_what_is_no_number_has_diverged(facts: StepFacts, of_the_last: str | None, of_another: str | None) -> None:
    assert (divergence(3, facts, last=True), divergence(3, facts, last=False)) == (of_the_last, of_another)


@pytest.mark.parametrize(
    "name",
    [
        *("degrees 1 to 4 with sequence parallel", "zero 1, tied, sequence parallel"),
        "context, stages, norms of query and key, zero 1",
    ],
)
def test_what_goes_through_the_hosts_memory_arrives(name: str, workers: Workers, tmp_path: Path) -> None:
    plan = PLANS[name]
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), precision="fp64", steps=2)
    outcome = workers.train(Order(plan, chosen, staged=True))
    assert_equal(outcome, *reference(plan, chosen, torch.float64), tolerance=1e-8)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_hugging_face_model_goes_on_learning_by_a_plan(family: str, workers: Workers, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
        )
        base = PLANS["degrees 2, 1 and 2 for the same layers"]
    elif family == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
        )
        config.num_local_experts = 6
        base = PLANS["divided experts, context ranks, sequence parallel"]
    else:
        config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=64, n_inner=64)
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
        base = PLANS["tied embeddings over stages"]
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "weights")
    plan = dataclasses.replace(base, model=transformer(str(tmp_path / "weights")))
    chosen = settings_of(plan, token_file(tmp_path, 96, TOKENS), steps=4, weights=tmp_path / "weights", clip_norm=0.0)
    chosen = dataclasses.replace(chosen, weight_decay=0.0, rate_schedule="constant", warm_up_steps=0)
    outcome = workers.train(Order(plan, chosen))

    tokens = open_data(chosen.data, "auto", 96, plan.sequence_length)
    order = SampleOrder(tokens.samples, chosen.seed)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=chosen.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(chosen.steps):
        at = range(step * plan.global_batch, (step + 1) * plan.global_batch)
        windows = torch.stack([torch.as_tensor(tokens.window(order.sample(position))) for position in at])
        logits = theirs(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert outcome.losses == pytest.approx(losses, rel=1e-4)


def test_the_learning_is_by_all_tokens_alike(workers: Workers, tmp_path: Path) -> None:
    # One pipeline takes one sequence and the other five: an average of the pipelines' means would weigh the one five times.
    plan = plan_of(GPT, pipeline(1, 1, ((0, 4), (0,))), pipeline(5, 1, ((0, 4), (1,))))
    chosen = settings_of(plan, token_file(tmp_path, GPT.vocab, TOKENS), precision="fp64", steps=3)
    outcome = workers.train(Order(plan, chosen))
    assert_equal(outcome, *reference(plan, chosen, torch.float64), tolerance=1e-8)


def test_a_model_whose_heads_do_not_divide_is_refused_in_one_line(workers: Workers, tmp_path: Path) -> None:
    from runtime.settings import check_runnable

    plan = plan_of(dataclasses.replace(LLAMA, heads=6, kv_heads=6, head_dim=8), pipeline(1, 1, ((0, 4), (0, 1, 2, 3))))
    with pytest.raises(InputError, match="the 6 heads of small-llama do not divide by the tensor-parallel degree 4"):
        check_runnable(plan, settings_of(plan, tmp_path / "none"))


# --- Starting --------------------------------------------------------------------------------------------------------


def test_a_worker_that_compiles_and_saves_nothing_loads_neither_torchs_compiler_nor_its_checkpoints_nor_sympy() -> None:
    # They take longer to load than all else of torch, on every worker.
    script = """if True:
        import sys, torch, runtime.__main__, runtime.training
        from runtime.interpreter import backward
        from runtime.optimizer import adamw
        ones = [torch.ones(1)] * 4
        steps = [torch.zeros(())]
        adamw(*([one.clone()] for one in ones), [], steps, fused=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=0.1,
              weight_decay=0.0, eps=1e-8, maximize=False)
        x = torch.arange(3.0, requires_grad=True)
        backward(2 * x * x, torch.tensor([1.0, 2.0, 3.0]))
        heavy = ("torch._dynamo", "torch.distributed.checkpoint", "sympy")
        print(steps[0].item(), x.grad.tolist(), [name for name in heavy if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1.0 [0.0, 8.0, 24.0] []\n", "")
