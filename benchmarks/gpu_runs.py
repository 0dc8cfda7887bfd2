"""Trains plans on one GPU, and tells how far off they were predicted: by the catalogue alone, and by what `motley bench` found.

    motley bench --device cuda --out results/gpu-runs/bench.yaml              # with --compile: .../bench-compiled.yaml
    python benchmarks/gpu_runs.py --out results/gpu-runs [--only NAME ...] [--steps 9] [--compile]    # on a machine with a GPU
    python benchmarks/gpu_runs.py --out results/gpu-runs --table benchmarks/results/gpu-runs-KIND  # anywhere
    python benchmarks/gpu_runs.py --again benchmarks/results/gpu-bench-KIND.yaml --table benchmarks/results/gpu-runs-KIND

A plan's trace and results stay in `runs/NAME/` there (`compiled/NAME/` with `--compile`), as a worker leaves them; what is there
already is kept. The table, as text and CSV, has the measured iteration and peak memory of each plan beside the simulated ones:
with the kind's shipped record and a runtime that loses nothing, and with the record and the stack of the bench, if that is there.
The bench knows none of these plans. Every plan is trained as `motley run` does it, by a worker of its own.

After a change of what the simulator counts, `--again` fits a bench to its measurements once more, and predicts by it the times
that a table has as measured; both are rewritten, but for the peaks.

Plans of several devices are trained by as many workers that share the GPU through gloo: their peaks of memory are as on GPUs of
their own, their times are not, and are left out.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import os
import socket
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forked import forked_worker

from experiments.bench import fit_bench
from experiments.machine import allocated_bytes
from experiments.measured import run_report
from runtime.results import RunResult, is_written, read_result
from runtime.settings import Settings
from sim.engine import simulate
from sim.spec.bench import Bench, bench_yaml, read_bench
from sim.spec.cluster import Cluster, Intra, Node
from sim.spec.gpu import gpu_kind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import write_file
from sim.spec.transformer import Moe, Transformer, transformer

ROOT = Path(__file__).parents[1]

STEPS_FOR_PEAKS = 2
"""Of plans whose times are not looked at: the optimizer's states are there from the second on."""

# --- Plans -----------------------------------------------------------------------------------------------------------


def plan(
    model: Transformer,
    sequence_length: int,
    micro_batch: int,
    micro_batches: int,
    *,
    recompute: str = "none",
    degree: int = 1,
    copies: int = 1,
    cuts: Sequence[Sequence[tuple[int, int]]] | None = None,
    zero_stage: int = 0,
    **more: Any,
) -> Plan:
    """A plan of one stage on one device, or of `copies` pipelines with stages of these layers, each on `degree` devices."""
    devices = (f"gpu/{number}" for number in itertools.count())
    made = []
    for _ in range(copies):
        stages = []
        for layers in cuts or [[(0, model.layers)]]:
            own = tuple(itertools.islice(devices, degree))
            stages.append(Stage((Replica(own, micro_batch),), tuple(layers), recompute))
        made.append(Pipeline(micro_batch, micro_batches, tuple(stages)))
    sequences = sum(one.sequences for one in made)
    return Plan("one", model, sequence_length, sequences, tuple(made), zero_stage=zero_stage, **more)


def plans() -> dict[str, Plan]:
    """The plans by name: of several shapes, lengths and sizes, with what saves memory, and in two precisions."""

    def of(name: str, layers: int) -> Transformer:
        return replace(transformer(name), name=f"{name} of {layers} layers", layers=layers)

    small = Transformer(name="llama-768 of 12 layers", layers=12, hidden=768, ffn=2048, heads=12, vocab=32000)
    whole = Transformer(name="llama-1.5b", layers=24, hidden=2048, ffn=7168, heads=16, vocab=32000)
    middle = replace(whole, name="llama-2048 of 8 layers", layers=8)
    wide, grouped, gpt = of("llama-2-7b", 6), of("llama-3-8b", 4), of("gpt3-1.3b", 8)
    mixture = replace(middle, name="mixtral-2048 of 4 layers", layers=4, experts=Moe(8, 2, 3584))
    fine = replace(middle, name="qwen3-moe-2048 of 3 layers", layers=3, experts=Moe(64, 8, 768))
    shared = replace(middle, name="deepseek-2048 of 3 layers", layers=3, experts=Moe(32, 4, 1024, 2, 1024))
    four, eight = replace(middle, name="llama-2048 of 4 layers", layers=4), replace(small, name="llama-768 of 8 layers", layers=8)
    halves, quarters = [[(0, 2)], [(2, 4)]], [[(0, 1)], [(1, 2)], [(2, 3)], [(3, 4)]]
    return {
        "small-1024": plan(small, 1024, 4, 4),
        "small-256": plan(small, 256, 4, 8),
        "middle-4096-1": plan(middle, 4096, 1, 8),
        "middle-4096-4": plan(middle, 4096, 4, 4),
        "middle-1024-8": plan(middle, 1024, 8, 4),
        "middle-512-1": plan(middle, 512, 1, 16),
        "middle-16384-1": plan(middle, 16384, 1, 4),
        "middle-slices": plan(middle, 16384, 1, 4, sequence_slices=4),
        "middle-recomputed": plan(middle, 4096, 4, 4, recompute="full"),
        "middle-selective": plan(middle, 4096, 4, 4, recompute="selective"),
        "middle-bf16-gradients": plan(middle, 4096, 4, 4, gradient_precision="bf16"),
        "middle-tf32": plan(middle, 4096, 2, 4, precision="tf32"),
        "middle-offloaded": plan(middle, 4096, 4, 4, offload_optimizer=True),
        "whole-4096-2": plan(whole, 4096, 2, 4),
        "wide-2048-4": plan(wide, 2048, 4, 4),
        "wide-4096-1": plan(wide, 4096, 1, 4),
        "grouped-8192-1": plan(grouped, 8192, 1, 4),
        "gpt-2048-4": plan(gpt, 2048, 4, 4),
        "gpt-1024-2": plan(gpt, 1024, 2, 8),
        "experts-4096-2": plan(mixture, 4096, 2, 4),
        "experts-1024-8": plan(mixture, 1024, 8, 4),
        "experts-recomputed": plan(mixture, 4096, 2, 4, recompute="full"),
        "experts-many": plan(fine, 4096, 2, 4),
        "experts-shared": plan(shared, 4096, 2, 4),
        # By workers that share the GPU:
        "tensor-2": plan(four, 4096, 2, 2, degree=2),
        "tensor-2-sequence": plan(four, 4096, 2, 2, degree=2, sequence_parallel=True),
        "stages-4": plan(four, 4096, 1, 6, cuts=quarters),
        "stages-2-zb-1p": plan(four, 4096, 1, 4, cuts=halves, schedule="zb-1p"),
        "stages-2-interleaved": plan(eight, 4096, 1, 4, cuts=[[(0, 2), (4, 6)], [(2, 4), (6, 8)]], schedule="interleaved"),
        "zero-1": plan(four, 4096, 2, 2, copies=2, zero_stage=1),
        "zero-3": plan(eight, 4096, 2, 2, copies=2, zero_stage=3),
        "context-2": plan(four, 16384, 1, 2, degree=2, context_parallel=2),
        "context-4": plan(four, 32768, 1, 2, degree=4, context_parallel=4),
        "context-2-recomputed": plan(four, 16384, 1, 2, degree=2, context_parallel=2, recompute="full"),
        "context-2-tensor-2": plan(four, 16384, 1, 2, degree=4, context_parallel=2, sequence_parallel=True),
        "experts-divided": plan(mixture, 4096, 1, 2, copies=2, expert_parallel=2),
        "experts-divided-tensor-2": plan(mixture, 4096, 1, 2, copies=2, degree=2, expert_parallel=2, sequence_parallel=True),
        "experts-whole-tensor-2": plan(
            mixture, 4096, 1, 2, copies=2, degree=2, expert_parallel=4, expert_tensor_parallel=1, sequence_parallel=True
        ),
    }


# --- Runs ------------------------------------------------------------------------------------------------------------


_RUNS = {False: "runs", True: "compiled"}
"""The folder of the runs of layers as they are, and of compiled ones."""

_BENCHES = {False: "bench.yaml", True: "bench-compiled.yaml"}
"""The benches that predict them."""


def collect(folder: Path, chosen: Mapping[str, Plan], steps: int, device: str, compiled: bool = False) -> None:
    """Nothing; makes the runs that are not there yet."""
    import runtime.training  # noqa: F401 - once for all workers

    for name, found in chosen.items():
        left = folder / _RUNS[compiled] / name
        if is_written(left):
            continue
        path = folder / "plans" / f"{name}.json"
        write_file(path, found.to_json(), replace=True)
        left.mkdir(parents=True, exist_ok=True)
        workers = len(found.devices)
        settings = Settings(
            steps=steps if workers == 1 else STEPS_FOR_PEAKS,
            data=f"text:{ROOT / 'experiments'}",
            device=device,
            backend=None if workers == 1 else "gloo",
            results=left,
            quiet=True,
            compile=compiled,
            timeout_s=300 if compiled else 120,
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(workers)
        )
        started = [forked_worker(path, settings, world | {"RANK": str(rank)}) for rank in range(workers)]
        failed = [process for process in started if os.waitpid(process, 0)[1]]
        if failed or not is_written(left):
            print(f"{name}: the run failed", file=sys.stderr, flush=True)
            continue
        result = read_result(left)
        shown = " ".join(f"{1e3 * s:.0f}" for s in result.step_s)
        print(f"{name}: {1e3 * result.iteration_s:.1f} ms ({shown})", flush=True)


# --- The table -------------------------------------------------------------------------------------------------------


def row(name: str, result: RunResult, found: Bench | None) -> dict[str, Any]:
    """What was measured of a plan, and simulated; of several devices, the memory of the one whose peak is told worst."""
    own, measured, counted = result.trace.plan, result.trace.peak_bytes, allocated_bytes(result.trace.plan, "cuda")
    device = max(measured, key=lambda name: abs(counted[name] / measured[name] - 1))
    pipeline = own.pipelines[0]
    line: dict[str, Any] = {
        "plan": name,
        "model": own.transformer.name,
        "sequence": own.sequence_length,
        "micro_batch": pipeline.micro_batch,
        "micro_batches": pipeline.micro_batches,
        **dict.fromkeys(TIMES),
        "measured_bytes": measured[device],
        "predicted_bytes": counted[device],
    }
    return line if len(measured) > 1 else line | times(name, result, found)


TIMES = ("measured_s", "spread", "mfu", "shipped_s", "benched_s")
"""What is not told of plans whose workers share the GPU."""


def times(name: str, result: RunResult, found: Bench | None) -> dict[str, float | None]:
    """How long a plan of one device took, and takes in simulation."""
    told = run_report(result, None, "cuda", through_host=False)
    if told.simulated is None:
        raise SystemExit(f"{name}: not simulated: {told.why_not}")
    from runtime.recorder import WARM_UP  # here, because it loads torch

    quartiles_s = statistics.quantiles(result.step_s[WARM_UP:], n=4)
    benched_s = None if found is None else benched(told.cluster, result.trace.plan, found)
    spread = (quartiles_s[2] - quartiles_s[0]) / result.iteration_s
    return dict(zip(TIMES, (result.iteration_s, spread, told.measured.mfu, told.simulated.iteration_s, benched_s), strict=True))


def benched(cluster: Cluster, own: Plan, found: Bench) -> float:
    """The seconds of a plan's iteration on the cluster, by what a bench found of its kind."""
    assert found.stack is not None and found.gpu_kind is not None
    nodes = tuple([replace(node, gpu=found.gpu_kind) for node in cluster.nodes])
    return simulate(own, replace(cluster, nodes=nodes, stack=found.stack)).iteration_s


def again(lines: Iterable[Mapping[str, str]], chosen: Mapping[str, Plan], found: Bench) -> list[dict[str, Any]]:
    """The rows of a table's lines, what was measured as it stands there, and the times predicted anew."""
    assert found.gpu_kind is not None
    rows: list[dict[str, Any]] = []
    for line in lines:
        rows.append({name: value if name in ("plan", "model") else number(value) for name, value in line.items()})
        if rows[-1]["measured_s"] is not None:
            own = chosen[line["plan"]]
            name = own.devices[0].rpartition("/")[0]
            alone = Cluster("this machine", (Node(name, gpu_kind(found.gpu_kind.name), 1, Intra("nvlink", 1.0), None),))
            rows[-1] |= {"shipped_s": simulate(own, alone).iteration_s, "benched_s": benched(alone, own, found)}
    return rows


def number(text: str) -> float | int | None:
    """What a field of a table says."""
    return None if not text else int(text) if text.isdecimal() else float(text)


def table(rows: Sequence[Mapping[str, Any]], head: str) -> str:
    """The rows as text."""
    lines = [
        head,
        "",
        f"{'plan':24s}  sequence  micro-batches  measured ms  spread %  MFU %  shipped %  benched %  peak GiB  counted %",
    ]

    def error(line: Mapping[str, Any], predicted: str, measured: str) -> float | None:
        return None if line[predicted] is None else 100 * (line[predicted] / line[measured] - 1)

    def shown(value: float | None, form: str = "+.1f") -> str:
        return "-" if value is None else format(value, form)

    def hundredfold(value: float | None) -> float | None:
        return None if value is None else 100 * value

    pairs = (("shipped_s", "measured_s"), ("benched_s", "measured_s"), ("predicted_bytes", "measured_bytes"))
    for line in rows:
        shipped, benched, counted = (shown(error(line, *pair)) for pair in pairs)
        measured = "-" if line["measured_s"] is None else f"{1e3 * line['measured_s']:.1f}"
        spread, mfu = (shown(hundredfold(line[name]), ".1f") for name in ("spread", "mfu"))
        lines.append(
            f"{line['plan']:25s} {line['sequence']:8d} {line['micro_batches']:7d} x {line['micro_batch']:<3d} {measured:>13s} "
            f"{spread:>9s} {mfu:>6s} {shipped:>10s} {benched:>10s} {line['measured_bytes'] / 2**30:9.2f} {counted:>10s}"
        )
    lines.append("")
    for word, pair in zip(("shipped", "benched", "counted"), pairs, strict=True):
        errors = [abs(e) for line in rows if (e := error(line, *pair)) is not None]
        if errors:
            lines.append(
                f"{word}: absolute error {statistics.mean(errors):.1f} % in the mean, {statistics.median(errors):.1f} % in the "
                f"median, {max(errors):.1f} % at most"
            )
    return "\n".join(lines) + "\n"


def write_table(folder: Path, chosen: Mapping[str, Plan], target: Path, compiled: bool = False) -> None:
    """Nothing; writes the table of the runs that are there, and prints it."""
    path = folder / _BENCHES[compiled]
    found = read_bench(path) if path.is_file() else None
    runs = folder / _RUNS[compiled]
    there = [name for name in chosen if is_written(runs / name)]
    if not there:
        raise SystemExit(f"there are no runs in {runs}")
    rows = [row(name, read_result(runs / name), found) for name in there]
    kind = next(iter(read_result(runs / there[0]).device_kinds.values()))
    write_rows(rows, head(kind, found, compiled), target)


def write_table_again(bench_file: Path, chosen: Mapping[str, Plan], target: Path) -> None:
    """Nothing; fits the bench once more, predicts a table's plans by it, writes both, and prints the table."""
    before = read_bench(bench_file)
    if before.gpu_kind is None:
        raise SystemExit(f"{bench_file} has no measurements of a device")
    try:
        first = target.with_suffix(".txt").read_text(encoding="utf-8").partition("\n")[0]
        with target.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise SystemExit(f"--table: {error.filename}: cannot be read: {error.strerror}") from None
    if not first.startswith(before.device):
        raise SystemExit(f"the bench is of {before.device}, but the table of {first.partition(',')[0]}")
    if unknown := [line["plan"] for line in lines if line["plan"] not in chosen]:
        raise SystemExit(f"{target.with_suffix('.csv')}: there is no plan {', '.join(unknown)} any more")
    if not lines:
        raise SystemExit(f"{target.with_suffix('.csv')} has no rows")
    shipped = replace(before.gpu_kind, efficiency=gpu_kind(before.gpu_kind.name).efficiency)
    found = fit_bench(replace(before, gpu_kind=shipped)).bench
    rows = again(lines, chosen, found)
    write_file(bench_file, bench_yaml(found), replace=True)
    write_rows(rows, first, target)


def head(kind: str, found: Bench | None, compiled: bool) -> str:
    """A table's first line."""
    machine = kind if found is None else ", ".join([found.device, *(f"{k} {v}" for k, v in (found.versions or {}).items())])
    layers = ", layers compiled" if compiled else ""
    return f"{machine}. One GPU, bf16 but where the name says tf32{layers}; errors are predicted / measured - 1."


def write_rows(rows: Sequence[Mapping[str, Any]], first: str, target: Path) -> None:
    """Nothing; writes a table as text and as CSV, and prints it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(target.with_suffix(".csv"), text.getvalue(), replace=True)
    write_file(target.with_suffix(".txt"), table(rows, first), replace=True)
    print(table(rows, first))


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="Trains plans on one GPU, and tells how far off they were predicted.")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, help="where runs are, and go")
    place.add_argument("--again", type=Path, metavar="BENCH", help="fit this bench anew, and predict the plans of --table by it")
    parser.add_argument("--only", nargs="*", help="the plans of these names")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help="compile the layers, as `motley run --compile` does")
    parser.add_argument("--table", type=Path, help="write the table there, .txt and .csv, and train nothing")
    asked = parser.parse_args()
    if asked.again is not None:
        if asked.table is None:
            parser.error("--again needs --table, the table whose plans are predicted")
        if asked.only or asked.compile:
            parser.error("--again is of all plans of a table; leave out --only and --compile")
        write_table_again(asked.again, plans(), asked.table)
        return
    chosen = {name: found for name, found in plans().items() if not asked.only or name in asked.only}
    if asked.table is not None:
        write_table(asked.out.resolve(), chosen, asked.table, asked.compile)
        return
    (asked.out / "plans").mkdir(parents=True, exist_ok=True)
    collect(asked.out.resolve(), chosen, asked.steps, asked.device, asked.compile)


if __name__ == "__main__":
    main()
