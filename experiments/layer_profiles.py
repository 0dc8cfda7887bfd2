"""Layers that were profiled inside a training framework, as runs: of one micro-batch, without stages, on the GPUs of one node.

They are of Sailor's profiles (`data/layer_profiles.csv`), whose layers, embedding, head and optimizer step add up to an iteration
of the code that its runs ran. What is taken for granted of them stands in `data/assumptions.yaml`, as that of published runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.published_rows import Run
from sim.spec.gpu import GpuKind, gpu_kind
from sim.spec.reading import read_rows

SOURCE = "sailor_profiles"
"""Their `source_key`."""

ON_PCIE = ("RTX-2080", "RTX-3090", "Titan-RTX")
"""The GPUs that had no NVLink among all of a node."""


def profiled_runs(path: Path) -> list[Run]:
    """The profiles of whole iterations in a file such as `data/layer_profiles.csv`, as runs. Raises InputError for a bad file.

    They are those of OPT-350M. Left out are those of GPT-Neo, whose head has no product with the vocabulary (0.96 ms for four
    sequences, in which it were 6.3 TFLOP), and of Llama 3, at a third to a tenth of these rates. So are several tensor ranks on
    PCIe: among them a layer's collectives took up to 3.5 times as long as by the rate that Sailor measured of these links.
    """
    return read_rows(path, _run)


def _run(row: Mapping[str, str]) -> Iterator[Run]:
    if not row["source"].startswith("sailor") or row["model"] != "OPT-350":
        return
    kind, ranks, sequences = profiled_kind(row["gpu"]), int(row["tp"]), int(row["mbs"])
    if ranks > 1 and row["gpu"] in ON_PCIE:
        return
    yield Run(
        id=f"{SOURCE}-{kind.name}-{ranks}-{sequences}",
        source_key=SOURCE,
        gpu_type=kind.name,
        num_gpus=ranks,
        gpus_per_node=ranks,
        model_name="OPT-350M",
        num_layers=24,
        hidden=1024,
        ffn_hidden=4096,
        heads=16,
        seq_len=int(row["seq_len"]),
        vocab=50272,
        global_batch=sequences,
        micro_batch=sequences,
        tp=ranks,
        pp=1,
        dp=1,
        precision=profiled_precision(kind),
        iter_time_s=float(row["total_time_ms"]) / 1e3,
    )


def profiled_kind(gpu: str) -> GpuKind:
    """The kind of a profile. Its "RTX-2080" takes 1.06 times as long as TITAN RTX, as RTX 2080 Ti would, and no RTX 2080.

    Sailor's runs are taken to be on the cards that they name: they wait for links.
    """
    return gpu_kind("RTX2080Ti" if gpu == "RTX-2080" else gpu)


def profiled_precision(kind: GpuKind) -> str:
    """The precision that a kind was profiled in: fp32, in tensor cores where it can.

    So say the products of the head, whose rates are 13 TFLOP/s on V100 (of 15.7 in fp32, 125 in fp16), 12 on RTX 2080 Ti (of
    13.4), 81 on A100 (19.5 in fp32, 156 in tf32), and up to 171 on GH200 (66.9, 495).
    """
    return "tf32" if kind.peak("tf32") else "fp32"
