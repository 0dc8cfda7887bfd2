"""Measures what the runtime costs beside a plain loop. `run.py` writes the table."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from runtime.data import Order, open_data
from runtime.gradients import reduction_ranks
from runtime.settings import Settings, check_runnable
from runtime.training import Trainer
from runtime.watch import Watch
from runtime.world import Connections, World, lane_ranks
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.transformer import Transformer

SMALL = Transformer(name="llama-6x384", layers=6, hidden=384, ffn=1024, heads=6, kv_heads=2, vocab=1024)


# --- A plain loop ----------------------------------------------------------------------------------------------------


class PlainLayer(nn.Module):
    """A layer of Llama as one would write it for one device."""

    def __init__(self, t: Transformer) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = t.heads, t.kv_heads, t.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(t.hidden, 1e-5), nn.RMSNorm(t.hidden, 1e-5)
        self.qkv = nn.Linear(t.hidden, (t.heads + 2 * t.kv_heads) * t.head_dim, bias=False)
        self.output = nn.Linear(t.heads * t.head_dim, t.hidden, bias=False)
        self.up = nn.Linear(t.hidden, 2 * t.ffn, bias=False)
        self.down = nn.Linear(t.ffn, t.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer; batch first."""
        b, s, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.output(read.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads turned by the rotary positions."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainLlama(nn.Module):
    """Llama as one would write it for one device."""

    def __init__(self, t: Transformer, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(t.padded_vocab, t.hidden)
        self.layers = nn.ModuleList(PlainLayer(t) for _ in range(t.layers))
        self.norm, self.head = nn.RMSNorm(t.hidden, 1e-5), nn.Linear(t.hidden, t.padded_vocab, bias=False)
        turns = t.rope_theta ** -(torch.arange(0, t.head_dim, 2) / t.head_dim)
        angles = torch.outer(torch.arange(sequence_length), turns)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, summed over the tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), reduction="sum")


def plain_step(plan: Plan, settings: Settings) -> Callable[[int], float]:
    """A function that does one step of a plain training loop and gives the loss: the same work as the runtime's step."""
    model, size = PlainLlama(plan.transformer, plan.sequence_length), plan.pipelines[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    tokens = open_data(settings.data, "auto", plan.transformer.vocab, plan.sequence_length)
    order = Order(tokens.samples, settings.seed)
    count = plan.global_batch * plan.sequence_length

    def step(number: int) -> float:
        loss = 0.0
        for m in range(size.micro_batches):
            first = number * plan.global_batch + m * size.micro_batch
            windows = [torch.from_numpy(tokens.window(order.sample(first + i))) for i in range(size.micro_batch)]
            batch = torch.stack(windows)
            part = model(batch[:, :-1], batch[:, 1:]) / count
            part.backward()
            loss += part.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# --- The runtime -----------------------------------------------------------------------------------------------------


def one_device_plan(t: Transformer, sequence_length: int, micro_batch: int, micro_batches: int, precision: str) -> Plan:
    """A plan of one stage on one device."""
    stage = Stage((Replica(("n/0",), micro_batch),), ((0, t.layers),))
    pipeline = Pipeline(micro_batch, micro_batches, (stage,))
    return Plan("one", t, sequence_length, pipeline.sequences, (pipeline,), precision=precision, zero_stage=0)


def trainer_of(plan: Plan, settings: Settings, device: torch.device) -> Trainer:
    """The trainer of a one-device plan in this process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    program = check_runnable(plan, settings)
    connections = Connections(device)
    connections.connect(plan, program, reduction_ranks(plan, program, lane_ranks(plan, program)))
    tokens = open_data(settings.data, "auto", plan.transformer.vocab, plan.sequence_length)
    return Trainer(World(plan, program, connections), settings, tokens, Watch(0, "n/0", "p0s0", 60.0, alone=True))


def random_tokens(folder: str, vocab: int, count: int) -> Path:
    """A file of random tokens."""
    path = Path(folder) / "tokens.bin"
    np.random.default_rng(0).integers(0, vocab, count, dtype=np.uint16).tofile(path)
    return path


def interpreter_overhead(rounds: int = 40) -> str:
    """The table of step times of the runtime and of a plain loop, by turns in one process, and of what recording costs."""
    lines = [
        "One stage, one device, against a plain torch loop of the same model: fp32, AdamW, clipping; one step of each by turns,",
        f"{rounds} rounds, torch {torch.__version__}, {torch.get_num_threads()} threads. Per cents are medians over the rounds.",
        "",
        "model         sequence  micro-batches   plain ms   runtime ms   overhead %   unrecorded ms   recording %",
    ]
    for sequence_length, micro_batch, micro_batches in ((256, 2, 4), (512, 4, 2)):
        plan = one_device_plan(SMALL, sequence_length, micro_batch, micro_batches, "fp32")
        with tempfile.TemporaryDirectory() as folder:
            data = random_tokens(folder, SMALL.vocab, 200 * plan.global_batch * sequence_length)
            settings = Settings(steps=10_000, data=f"tokens:{data}")
            trainer, silent = (trainer_of(plan, settings, torch.device("cpu")) for _ in range(2))
            recorder: Any = silent.interpreter._recorder
            for name in ("begin", "end", "started", "finished", "start_step", "finish_step"):
                setattr(recorder, name, lambda *_: 0)
            plain = plain_step(plan, settings)
            steps: dict[str, Callable[[int], object]] = {"plain": plain, "runtime": trainer.step, "unrecorded": silent.step}
            times: dict[str, list[float]] = {name: [] for name in steps}
            for number in range(rounds + 3):
                names = list(steps)
                for name in names[number % 3 :] + names[: number % 3]:  # each is first, second and third equally often
                    began = time.perf_counter()
                    steps[name](number)
                    times[name].append(time.perf_counter() - began)
        medians = {name: 1e3 * statistics.median(found[3:]) for name, found in times.items()}

        def ratio(a: str, b: str, times: dict[str, list[float]] = times) -> float:
            return 100 * (statistics.median(x / y for x, y in zip(times[a][3:], times[b][3:], strict=True)) - 1)

        lines.append(
            f"{SMALL.name:13s} {sequence_length:8d} {micro_batches:6d} x {micro_batch:<5d} {medians['plain']:10.1f} "
            f"{medians['runtime']:12.1f} {ratio('runtime', 'plain'):12.2f} {medians['unrecorded']:15.1f} "
            f"{ratio('runtime', 'unrecorded'):13.2f}"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"
