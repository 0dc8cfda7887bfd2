"""What Motley knows by name: GPU kinds, models, planners and software stacks, as tables, rows and a page of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from experiments import baselines
from experiments.tables import Cells, cells_markdown
from partition.search import PLANNERS
from sim.spec.counts import active_parameters, total_parameters
from sim.spec.gpu import GpuKind, catalogue
from sim.spec.reading import InputError, nearest
from sim.spec.stack import stacks
from sim.spec.transformer import Transformer, presets, to_table

Row = dict[str, Any]

EIGHT_BITS, SIXTEEN_BITS = ("fp8", "mxfp8"), ("bf16", "fp16")


@dataclass(frozen=True)
class Sort:
    """What can be listed: its table's title, what the page says of it, its rows, and its cells."""

    title: str
    about: str
    rows: Callable[[], list[Row]]
    """All that is known, a flat row each."""
    cells: Callable[[], Cells]
    """For people: the figures that they compare."""


def sort_named(name: str) -> Sort:
    """What is listed under a name. Raises InputError with the nearest name and all of them."""
    if name not in SORTS:
        raise InputError(f"unknown list {name!r}; accepted: {', '.join(SORTS)}{nearest(name, SORTS)}")
    return SORTS[name]


def page() -> str:
    """The page docs/catalogue.md."""
    parts = [f"## {sort.title}\n\n{sort.about}\n\n{cells_markdown('', sort.cells())}" for sort in SORTS.values()]
    return "\n".join([_HEAD, *parts])


# --- Sorts -----------------------------------------------------------------------------------------------------------


def _gpu_rows() -> list[Row]:
    return [asdict(kind) | {"peak_flop_per_s": dict(kind.peak_flop_per_s)} for kind in catalogue().values()]


def _gpu_cells() -> Cells:
    head = ("kind", "GiB", "fp32 TFLOP/s", "16 bits TFLOP/s", "8 bits TFLOP/s", "GB/s", "NVLink GB/s", "W", "$/h")
    return [head, *(_gpu_line(kind) for kind in catalogue().values())]


def _gpu_line(kind: GpuKind) -> tuple[str, ...]:
    def peak(names: tuple[str, ...]) -> str:
        rate = next((rate for name in names if (rate := kind.peak(name)) is not None), None)
        return "-" if rate is None else f"{rate / 1e12:,.4g}"

    nvlink, price = kind.nvlink_bytes_per_s, kind.dollars_per_hour
    return (
        kind.name,
        f"{kind.memory_bytes / 2**30:.1f}",
        *(peak(names) for names in (("fp32",), SIXTEEN_BITS, EIGHT_BITS)),
        f"{kind.memory_bandwidth_bytes_per_s / 1e9:,.0f}",
        "-" if nvlink is None else f"{nvlink / 1e9:,.0f}",
        f"{kind.busy_watts:,.0f}",
        "-" if price is None else f"{price:.2f}",
    )


def _model_rows() -> list[Row]:
    return [
        to_table(model) | {"parameters": total_parameters(model), "active_parameters": active_parameters(model)}
        for model in presets().values()
    ]


def _model_cells() -> Cells:
    # Short words, so that 80 columns hold all names and figures.
    head = ("model", "size B", "layers", "hidden", "MLP", "heads", "kv heads", "vocab", "tokens", "experts")
    return [head, *(_model_line(model) for model in presets().values())]


def _model_line(model: Transformer) -> tuple[str, ...]:
    moe = model.experts
    sizes = (model.layers, model.hidden, model.ffn if moe is None else moe.ffn, model.heads, model.kv_heads, model.vocab)
    return (
        model.name,
        f"{billions:,.0f}" if (billions := total_parameters(model) / 1e9) >= 100 else f"{billions:.3g}",
        *(f"{size:,}" for size in sizes),
        f"{model.max_positions:,}" if model.max_positions else "-",
        "-" if moe is None else f"{moe.top_k}/{moe.experts}",
    )


def _planner_rows() -> list[Row]:
    # Not those that a program which imports this has registered.
    here = ("partition.", baselines.__name__)
    own = {name: planner for name, planner in sorted(PLANNERS.items()) if planner.__module__.startswith(here)}
    return [{"name": name, "about": (planner.__doc__ or "").strip().split("\n")[0]} for name, planner in own.items()]


def _stack_rows() -> list[Row]:
    return [asdict(stack) for stack in stacks().values()]


SORTS: Mapping[str, Sort] = {
    "gpus": Sort(
        "GPU kinds",
        "A node's `gpu` in a cluster file and a run's `gpu_type` take these names in any case, with spaces or hyphens, and\n"
        "what drivers call them (`NVIDIA GeForce RTX 4090`). Peaks are dense and summed in fp32, NVLink is in one direction.\n"
        "Memory is what `nvidia-smi` or `rocm-smi` tells; what the driver keeps of it counts with the context of a stack.\n"
        "Rents are nominal: give your own `price`, or another kind, from scratch or `like:` one of these, under `gpu_kinds` of\n"
        "the cluster file. Sources: `sim/spec/gpu_kinds.yaml`.",
        _gpu_rows,
        _gpu_cells,
    ),
    "models": Sort(
        "Models",
        "`--model` takes these names, a Hugging Face `config.json`, or a folder that holds one. Sizes\n"
        "are in billions of parameters. Experts: so many of so many are active, and the MLP's width is that of one.\n"
        "Sources: `sim/spec/presets.yaml`.",
        _model_rows,
        _model_cells,
    ),
    "planners": Sort(
        "Planners",
        "`--planner` takes these names; [Choose a planner](planners.md) has their papers.",
        _planner_rows,
        lambda: [("planner", "about"), *((row["name"], row["about"]) for row in _planner_rows())],
    ),
    "stacks": Sort(
        "Software stacks",
        "`--stack`, and `stack` of a cluster file, take these names; [How far off it is](fidelity.md) says how they were fitted.",
        _stack_rows,
        lambda: [("stack", "constants"), *((name, stack.source) for name, stack in stacks().items())],
    ),
}
"""What can be listed, by its name."""

_HEAD = """\
# What Motley knows by name

    motley list gpus
    motley list models --json models.json

prints these tables; `--json` has all figures, with their sources. `python -m experiments.catalogue` makes this page.
"""


if __name__ == "__main__":
    print(page(), end="")
