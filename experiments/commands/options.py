"""The options that several commands share, and what their texts mean."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments.exits import tell_error
from experiments.judges import SIMULATE
from partition.objective import OBJECTIVES, Objective
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.gpu import PRECISIONS
from sim.spec.job import GRADIENT_PRECISIONS, Job
from sim.spec.reading import InputError, quantity
from sim.spec.stack import stack as stack_named
from sim.spec.transformer import Transformer, model_file, transformer

MOST_DEFAULT_TOKENS = 4096


def folder(text: object) -> Path:
    """The path of a folder. An empty one, as of a variable that is not set, is refused: it would be the working directory."""
    if not str(text):
        raise typer.BadParameter("expected the name of a folder, but got ''")
    return Path(str(text))


def whole_number(minimum: int) -> Callable[[object], int]:
    """A parser of whole numbers of at least `minimum`, whose error names the value, which typer's own does not."""

    def parse(text: object) -> int:
        try:
            number = int(str(text))
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise typer.BadParameter(f"expected a whole number of at least {minimum}, but got {str(text)!r}")
        return number

    return parse


def fraction(text: object) -> float:
    """The number between 0 and 1 of a text such as 3% or 0.03; its error names the value, which typer's own does not."""
    written = str(text).strip()
    try:
        number = float(written[:-1]) / 100 if written.endswith("%") else float(written)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise typer.BadParameter(f"expected per cent, such as 3%, or a number between 0 and 1, but got {str(text)!r}")
    return number


_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_TOKENS = re.compile(r"(\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?)\s*([KMBTkmbt]?)")
MOST_TOKENS = 1e18


def token_count(text: object) -> float:
    """The number of a text such as 1T, 300B or 1e12. Its error names the value, which typer's own does not."""
    found = _TOKENS.fullmatch(str(text).strip())
    number = float(found[1].replace(",", "")) * _SCALES[found[2].upper()] if found is not None else math.nan
    if not 1 <= number <= MOST_TOKENS:
        raise typer.BadParameter(
            f"expected a number of tokens from 1 to {MOST_TOKENS:g}, with or without K, M, B (1e9) or T (1e12), such as 300B, "
            f"but got {str(text)!r}"
        )
    return number


ClusterFile = Annotated[Path, typer.Option("--cluster", metavar="FILE", help="The cluster, a YAML file.")]
StackName = Annotated[
    str | None,
    typer.Option(
        "--stack",
        metavar="NAME",
        help="The software stack in the place of the cluster's, such as megatron-core: a record of sim/spec/constants.yaml.",
        show_default=False,
    ),
]
ConstantsFile = Annotated[
    Path | None,
    typer.Option(
        "--constants",
        metavar="FILE",
        help="Constants that take the place of the shipped ones, as `motley validate --fit --out FILE` writes them.",
        show_default=False,
    ),
]
ModelName = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="A preset such as llama-2-13b, a Hugging Face config.json, or its folder."),
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", metavar="N", parser=whole_number(1), help="Sequences of one iteration.")
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        metavar="TOKENS",
        parser=whole_number(1),
        help=f"Tokens of a sequence. Default: the model's context length, but at most {MOST_DEFAULT_TOKENS}; "
        f"{MOST_DEFAULT_TOKENS} where the model states none.",
        show_default=False,
    ),
]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help=f"One of {', '.join(PRECISIONS)}.")]
GradientPrecision = Annotated[
    str,
    typer.Option(
        "--gradient-precision",
        metavar="NAME",
        help=f"In which gradients are accumulated and summed, one of {', '.join(GRADIENT_PRECISIONS)}: bf16 takes half the "
        "bytes, and rounds.",
    ),
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="What makes a plan good: throughput, cost (dollars per token) or energy (joules per token). The last two count the "
        "GPUs that a plan uses, and leave out what does not pay.",
    ),
]
JudgeName = Annotated[
    str,
    typer.Option(
        "--judge",
        metavar="NAME",
        help="What says how long a plan takes: simulate, the event simulation, or estimate, which is faster and less exact.",
    ),
]
Budget = Annotated[str, typer.Option("--budget", metavar="TIME", help="How long a search may take: 500ms, 30s, 2min.")]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", parser=whole_number(0), help="Seed of everything that is drawn at random.")
]
Jitter = Annotated[
    float,
    typer.Option(
        "--jitter",
        metavar="FRACTION",
        parser=fraction,
        help="Standard deviation of the devices' speeds, as 3% or 0.03, drawn with --seed.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a JSON file.", show_default=False)]
TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the trace as JSON, which Perfetto opens; '-' is standard output.",
        show_default=False,
    ),
]
TimelineFile = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Draw the timeline: .png, .svg or .pdf.", show_default=False)
]
TokenCount = Annotated[
    float | None,
    typer.Option(
        "--tokens",
        metavar="N",
        parser=token_count,
        help="Also tell the days, dollars and energy of a whole training on so many tokens: 1T, 300B, 1e12.",
        show_default=False,
    ),
]
ReportFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the report as JSON; '-' is standard output.", show_default=False),
]


def budget_s(text: str) -> float:
    """The seconds of a budget such as '30s'. Raises InputError for a bare number, and for none above zero."""
    return duration_s("budget", text)


def duration_s(name: str, text: str) -> float:
    """The seconds of the option `--NAME`, such as '30s'. Raises InputError for a bare number, and for none above zero."""
    try:
        seconds = quantity(text, "time")
    except InputError as error:
        raise InputError(f"--{name}: {error}") from None
    if not 0 < seconds < math.inf:
        raise InputError(f"--{name}: a {name} is above zero seconds, but got {text!r}")
    return seconds


def default_sequence_length(model: Transformer) -> int:
    """The tokens of a sequence where nothing else is said: the model's context length, but at most MOST_DEFAULT_TOKENS.

    Rounded down to a multiple of 64, because OPT's position table has two rows more than it has positions.
    """
    if model.max_positions == 0 or model.max_positions >= MOST_DEFAULT_TOKENS:
        return MOST_DEFAULT_TOKENS
    return model.max_positions // 64 * 64 or model.max_positions


def read_objective(
    name: str, min_tokens_per_s: float | None = None, hourly: float | None = None, per_billion: float | None = None
) -> Objective:
    """The objective that the options describe. Raises InputError that names the option."""
    if name not in OBJECTIVES:
        try:
            Objective(name)
        except InputError as error:
            raise InputError(f"--objective: {error}") from None
    return Objective(name, min_tokens_per_s, hourly, per_billion)


def read_job(model: str, global_batch: int, sequence_length: int | None, precision: str, gradient_precision: str = "fp32") -> Job:
    """The job that the options describe. Raises InputError for a model that is not there, and what does not fit it."""
    shape = transformer(model)
    tokens = default_sequence_length(shape) if sequence_length is None else sequence_length
    return Job(shape, tokens, global_batch, precision, gradient_precision=gradient_precision)


def on_stack(cluster: Cluster, name: str | None, constants: Path | None = None) -> Cluster:
    """The cluster on the stack of the option `--stack`, if one is named, with the constants of a file. Raises InputError."""
    chosen = None
    if constants is not None:
        from experiments.constants import read_constants  # it reads the catalogues

        chosen = read_constants(constants)
    if name is not None:
        try:
            cluster = replace(cluster, stack=chosen.stacks[name] if chosen and name in chosen.stacks else stack_named(name))
        except InputError as error:
            raise InputError(f"--stack: {error}") from None
    if chosen is None:
        return cluster
    if chosen.stacks and cluster.stack.name not in chosen.stacks:
        tell_error(f"warning: --constants: {constants} has no record of the stack {cluster.stack.name!r}, whose figures stay")
    return chosen.applied(cluster)


def files_behind(cluster: Cluster | None, *models: str | Transformer | None) -> list[Path]:
    """The files that were read because others name them: the cluster's matrix, the models' configurations."""
    matrix = cluster.bandwidth_matrix if cluster is not None else None
    files = [matrix.file if matrix is not None else None]
    files += [model_file(model) if isinstance(model, str) else None for model in models]
    return [file for file in files if file is not None]


def read_clusters(paths: list[Path]) -> list[Cluster]:
    """The clusters of the files. Raises InputError where two have one name, which their results would share."""
    clusters = [read_cluster(path) for path in paths]
    for i, cluster in enumerate(clusters):
        for j in range(i):
            if clusters[j].name == cluster.name:
                raise InputError(f"{paths[i]}: the cluster's name {cluster.name!r} is taken by {paths[j]} already")
    return clusters


def check_jitter(judge: str, jitter: float, repeats: int | None) -> None:
    """Nothing. Raises InputError where the judge draws no speeds, or where all repeats would be the same."""
    if jitter > 0 and judge != SIMULATE:
        raise InputError(f"--jitter needs the event simulation; the judge {judge} has none: leave out --judge {judge}")
    if repeats is not None and repeats > 1 and jitter == 0:
        raise InputError(f"--repeats {repeats} needs --jitter: without it all runs are the same")


@contextmanager
def errors_about(path: Path) -> Iterator[None]:
    """Puts the file's name before the errors that know the plan, but not where it was read from."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
