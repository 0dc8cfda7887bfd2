"""`motley discover`: writes the cluster file of this machine, or of several."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from experiments.discover import discover as discovered
from experiments.discover import matrix_csv, with_links
from experiments.joining import joined
from experiments.output import STANDARD_OUTPUT, outputs
from sim.spec.bench import read_bench
from sim.spec.cluster import cluster_yaml, read_cluster
from sim.spec.reading import InputError, write_file

ClusterFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE]...", help="What it wrote on other machines: instead of this one, join their nodes.", show_default=False
    ),
]
LinksFile = Annotated[
    Path | None,
    typer.Option(
        "--links",
        metavar="FILE",
        help="A bench of links (motley bench --links): its rates in the place of nominal ones.",
        show_default=False,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Of the cluster and its node.  [default: that of the machine]", show_default=False
    ),
]
OutFile = Annotated[str, typer.Option("--out", metavar="FILE", help="Write the cluster there; '-' is standard output.")]

MATRIX_SUFFIX = ".bandwidth.csv"
"""What the file of the rates between nodes ends with, beside the cluster's."""


def discover(files: ClusterFiles = None, links: LinksFile = None, name: Name = None, out: OutFile = STANDARD_OUTPUT) -> None:
    """Write the cluster file of this machine.

    Reads nvidia-smi (its -q, topo -m and nvlink -s) and /sys/class for
    GPUs, NVLink, PCIe and network cards; without GPUs the cores are the
    devices, and their peak is measured. What cannot be known is told. For
    several machines, run it on each and join the files. See docs/discover.md.

    Example:

      motley discover --out node-a.yaml

      motley discover node-a.yaml node-b.yaml --links links.yaml \\
        --name lab --out lab.yaml
    """
    inputs = [*(files or []), *([links] if links is not None else [])]
    matrix_file = Path(f"{Path(out).with_suffix('')}{MATRIX_SUFFIX}") if out != STANDARD_OUTPUT and links is not None else None
    written = outputs({"--out": out, "--out, the matrix beside it": matrix_file}, inputs)
    if name is not None and (not name or any(letter in "/," or letter.isspace() for letter in name)):
        raise InputError(f"--name: a name has no '/', comma or space, but got {name!r}")
    bench = None if links is None else read_bench(links)
    if files:
        clusters = [read_cluster(file) for file in files]
        found = joined(name or (clusters[0].name if len(clusters) == 1 else "joined"), clusters)
    else:
        found = discovered(name or re.sub(r"[/,\s]+", "-", socket.gethostname().partition(".")[0]) or "machine")
    cluster, notes = found.cluster, list(found.notes)
    if bench is not None:
        measured = with_links(cluster, bench, matrix_file or Path("-"))
        notes += measured.notes
        if (matrix := measured.cluster.bandwidth_matrix) is not cluster.bandwidth_matrix and matrix is not None:
            if matrix_file is None:
                raise InputError(
                    "--links: the rates between nodes go into a matrix beside the cluster's file; name it by --out FILE"
                )
            written.tell(matrix_file, write_file(matrix_file, matrix_csv(matrix)))
        cluster = measured.cluster
    written.write("--out", cluster_yaml(cluster))
    gpus = ", ".join(f"{node.name}: {node.gpus} x {node.gpu.name} ({node.intra.kind})" for node in cluster.nodes)
    written.say(f"{cluster.name}: {gpus}")
    for note in notes:
        written.say(f"note: {note}")
    written.finish()
