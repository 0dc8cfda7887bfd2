"""What a sweep's file says: a grid in YAML, or a Python file whose function `runs` yields the runs."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from experiments.commands.options import default_sequence_length, errors_about, fraction
from experiments.comparison import error_text
from experiments.judges import SIMULATE, judge_named
from experiments.sweep import Label, Run, given
from partition.search import DEFAULT_BUDGET_S, planner_named
from sim.spec.cluster import BandwidthMatrix, Cluster, read_cluster
from sim.spec.gpu import PRECISIONS
from sim.spec.job import GRADIENT_PRECISIONS, Job
from sim.spec.plan import SCHEDULES, ZERO_STAGES, read_plan
from sim.spec.reading import InputError, Table, nearest, quantity, read_yaml
from sim.spec.stack import stack
from sim.spec.transformer import Transformer, model_file, presets, transformer

Value = TypeVar("Value")

MOST_RUNS = 100_000
_FUNCTION = "runs"


def read_sweep(path: Path, seed: int = 0, budget_s: float | None = None) -> tuple[list[Run], list[Path]]:
    """The runs of a sweep's file, and the files that it names, which the sweep reads too.

    `seed` is added to the seed of every run; `budget_s` takes the place of the sweep's own budget. Raises InputError.
    """
    runs, files = _from_python(path) if path.suffix == ".py" else _from_yaml(path)
    if budget_s is not None:
        if runs and all(run.plan is not None for run in runs):
            raise InputError(f"{path}: its plans are given, and no run searches, so that there is no --budget to give")
        runs = [run if run.plan is not None else replace(run, budget_s=budget_s) for run in runs]
    return [replace(run, seed=run.seed + seed) for run in runs], files


# --- YAML ------------------------------------------------------------------------------------------------------------


def _from_yaml(path: Path) -> tuple[list[Run], list[Path]]:
    """The grid of a YAML file: all combinations of its lists, the last key that it may have varying fastest."""
    table = Table(read_yaml(path), str(path))
    grid = _Grid(table, path)
    given_plans = "plans" in table
    if given_plans == ("planners" in table):
        raise InputError(
            f"{path}: a sweep has either planners, which search, or plans, which are given; expected one of the two keys"
        )
    runs = list(itertools.islice(grid.of_plans() if given_plans else grid.of_planners(), MOST_RUNS + 1))
    if len(runs) > MOST_RUNS:
        raise InputError(f"{path}: a sweep has at most {MOST_RUNS:,} runs")
    return runs, grid.files


class _Grid:
    """The lists of a sweep's table. Names of files count from the folder that the sweep's file is in."""

    def __init__(self, table: Table, path: Path) -> None:
        self.table, self.path, self.folder = table, path, path.parent
        self.files: list[Path] = []

    def of_planners(self) -> Iterator[Run]:
        """The searches."""
        for name in ("schedules", *DIVISIONS):
            if name in self.table:
                raise self.table.error(name, "goes with plans only: a planner chooses that itself")
        clusters = self._clusters()
        models = self._list("models", self._model, "a preset, a Hugging Face config.json, or its folder")
        lengths = self._list("sequence_lengths", _whole(1), "a whole number of at least 1", [None])
        batches = self._list("global_batches", _whole(1), "a whole number of at least 1")
        precisions, of_gradients = self._precisions("bf16"), self._gradient_precisions("fp32")
        planners = self._list("planners", _name(planner_named), "the name of a planner")
        budget_s = self.table.quantity("budget", "time", DEFAULT_BUDGET_S)
        drawn = self._judged()
        self.table.close()
        for (cluster, labels), model, length, batch, precision, of_gradient, planner, (judge, jitter, seed) in itertools.product(
            clusters, models, lengths, batches, precisions, of_gradients, planners, drawn
        ):
            tokens = default_sequence_length(model) if length is None else length
            with errors_about(self.path):
                job = Job(model, tokens, batch, precision, gradient_precision=of_gradient)
                run = Run(cluster, job, planner, judge, budget_s, seed, labels=labels, jitter=jitter)
            yield run

    def of_plans(self) -> Iterator[Run]:
        """The judgements of given plans."""
        for name in ("models", "global_batches", "budget"):
            if name in self.table:
                raise self.table.error(name, "goes with planners only: a given plan has its own, and is not searched for")
        clusters = self._clusters()
        plans = [(name, read_plan(path)) for name, path in self._paths("plans")]
        lengths = self._list("sequence_lengths", _whole(1), "a whole number of at least 1", [None])
        precisions, of_gradients = self._precisions(None), self._gradient_precisions(None)
        schedules = self._list("schedules", _one_of("schedule", SCHEDULES), "a schedule", [None])
        divided = self._divisions()
        drawn = self._judged()
        self.table.close()
        # Those of one cluster and job follow one another, for a judge serves them all.
        for (cluster, labels), length, precision, of_gradient, (name, plan), schedule, division, how in itertools.product(
            clusters, lengths, precisions, of_gradients, plans, schedules, divided, drawn
        ):
            judge, jitter, seed = how
            changes = {"sequence_length": length, "precision": precision, "schedule": schedule, "gradient_precision": of_gradient}
            with errors_about(self.path), errors_about(Path(name)):
                changed = replace(plan, **{key: value for key, value in changes.items() if value is not None}, **division)
                told = [(field, value) for field, value in division.items() if value is not None]
                run = given(cluster, changed, judge, seed, (*labels, *told, ("plan_file", name)), jitter)
            yield run

    def _divisions(self) -> list[dict[str, Any]]:
        """What is divided otherwise than in the given plans, by the fields of a plan, in every combination."""
        lists = []
        for key, (field, convert, accepted) in DIVISIONS.items():
            if key in self.table:
                lists.append([(field, value) for value in self._list(key, convert, accepted)])
        return [dict(chosen) for chosen in itertools.product(*lists)]

    def _clusters(self) -> list[tuple[Cluster, tuple[tuple[str, Label], ...]]]:
        """The clusters with the software of `stacks` and the network cards that `bandwidths` wants, each with its labels."""
        clusters = [read_cluster(path) for _, path in self._paths("clusters")]
        self.files += [c.bandwidth_matrix.file for c in clusters if c.bandwidth_matrix and c.bandwidth_matrix.file]
        if "stacks" in self.table:
            known = self._list("stacks", lambda value: stack(_text(value)), "the name of a software stack")
            clusters = [replace(cluster, stack=own) for cluster in clusters for own in known]
        if "bandwidths" not in self.table:
            return [(cluster, ()) for cluster in clusters]

        def convert(value: object) -> list[tuple[Cluster, tuple[tuple[str, Label], ...]]]:
            return [(with_bandwidth(cluster, value), (("bandwidth", str(value)),)) for cluster in clusters]

        by_rate = self._list("bandwidths", convert, "a rate such as '10 Gbit/s', or a factor such as x0.5")
        made: dict[tuple[Cluster, ...], Label] = {}
        for changed in by_rate:
            (_, text) = changed[0][1][0]
            earlier = made.setdefault(tuple(cluster for cluster, _ in changed), text)
            if earlier != text:
                raise self.table.error("bandwidths", f"{earlier!r} and {text!r} make the same clusters")
        return [changed[i] for i in range(len(clusters)) for changed in by_rate]

    def _paths(self, key: str) -> list[tuple[str, Path]]:
        """The files of a list of names and patterns, each as it is called in rows and as it is read."""

        def convert(value: object) -> list[tuple[str, Path]]:
            name = _text(value)
            if not any(letter in name for letter in "*?["):
                return [(name, self.folder / Path(name).expanduser())]
            pattern = Path(name)
            found = sorted(pattern.parent.glob(pattern.name) if pattern.is_absolute() else self.folder.glob(name))
            if not found:
                raise InputError(f"no file is like {name!r}")
            return [(_called(path, self.folder), path) for path in found]

        paths = list(itertools.chain.from_iterable(self._list(key, convert, "the name of a file, or a pattern such as '*.yaml'")))
        self.files += [path for _, path in paths]
        return paths

    def _model(self, value: object) -> Transformer:
        name = _text(value)
        if name.casefold() not in presets() and model_file(str(self.folder / name)) is not None:
            name = str(self.folder / name)
        file = model_file(name)
        self.files += [file] if file is not None else []
        return transformer(name)

    def _precisions(self, default: str | None) -> list[Any]:
        return self._list("precisions", _one_of("precision", PRECISIONS), "a precision", [default])

    def _gradient_precisions(self, default: str | None) -> list[Any]:
        convert = _one_of("gradient precision", GRADIENT_PRECISIONS)
        return self._list("gradient_precisions", convert, "a gradient precision", [default])

    def _judged(self) -> list[tuple[str, float, int]]:
        """How plans are judged, in every combination: the judge, the jitter of the devices' speeds, and the seed."""
        judges = self._list("judges", _name(judge_named), "the name of a judge", [SIMULATE])
        jitters = self._list("jitters", _fraction, "per cent, such as 0.1%, or a number between 0 and 1", [0.0])
        seeds = self._list("seeds", _whole(0, MOST_SEED), "a whole number from 0 to 2^63 - 1", [0])
        return list(itertools.product(judges, jitters, seeds))

    def _list(
        self, key: str, convert: Callable[[object], Value], accepted: str, default: Sequence[Any] | None = None
    ) -> list[Value]:
        """The converted values of a list that is not empty and has each value once. Errors name the key and the place."""
        if default is not None and key not in self.table:
            return list(default)
        values = self.table.items(key, minimum=1)
        found: list[Value] = []
        for i, value in enumerate(values):
            place = Table({key: value}, self.table.where)
            if any(type(value) is type(other) and value == other for other in values[:i]):
                raise place.error(key, f"{value!r} stands twice")
            found.append(place.get(key, convert, accepted))
        return found


def _called(path: Path, folder: Path) -> str:
    """The name of a file that a pattern found."""
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _name(known: Callable[[str], object]) -> Callable[[object], str]:
    """A converter of names, which `known` raises InputError for where they are not."""

    def convert(value: object) -> str:
        known(_text(value))
        return str(value)

    return convert


def _one_of(what: str, accepted: Iterable[str]) -> Callable[[object], str]:
    known = list(accepted)

    def convert(value: object) -> str:
        name = _text(value)
        if name not in known:
            raise InputError(f"unknown {what} {name!r}; accepted: {', '.join(known)}{nearest(name, known)}")
        return name

    return convert


MOST_SEED = 2**63 - 1
"""That the tables of rows can hold."""


def _whole(minimum: int, maximum: int | None = None) -> Callable[[object], int]:
    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum or (maximum is not None and value > maximum):
            raise ValueError
        return value

    return convert


def _fraction(value: object) -> float:
    if isinstance(value, bool):
        raise ValueError
    try:
        return fraction(value)
    except typer.BadParameter:
        raise ValueError from None


def _whole_experts(value: object) -> int | None:
    if value is not None and (type(value) is not int or value != 1):
        raise ValueError
    return None if value is None else 1


DIVISIONS: Mapping[str, tuple[str, Callable[[object], int | None], str]] = {
    "zero_stages": ("zero_stage", _whole(min(ZERO_STAGES), max(ZERO_STAGES)), f"one of {', '.join(map(str, ZERO_STAGES))}"),
    "expert_parallels": ("expert_parallel", _whole(1), "a whole number of at least 1"),
    "expert_tensor_parallels": (
        "expert_tensor_parallel",
        _whole_experts,
        "1 (whole experts on each tensor rank) or null (columns of each)",
    ),
}
"""By the key of a sweep: the field of a given plan that it varies, what converts its values, and what is accepted."""


def with_bandwidth(cluster: Cluster, value: object) -> Cluster:
    """The cluster whose network cards have another rate: '10 Gbit/s' each, or 'x0.5' for half of what they have.

    A factor counts for the Ethernet beside RDMA cards and for the rates between nodes of a bandwidth matrix, too; the links
    between sites stay. Raises InputError for a rate where a matrix says what goes between nodes.
    """
    text = _text(value).strip()
    if text.startswith("x"):
        try:
            factor = float(text[1:])
        except ValueError:
            factor = math.nan
        if not 0 < factor < math.inf:
            raise InputError(f"a factor is x and a number above zero, such as x0.5, but got {text!r}")
        return _scaled(cluster, factor)
    rate = quantity(text, "bandwidth")
    if not rate > 0:
        raise InputError(f"a rate is above zero, but got {text!r}")
    if cluster.bandwidth_matrix is not None:
        raise InputError(
            f"{cluster.name} has a bandwidth matrix, which a rate of its cards does not change; give a factor such as x0.5"
        )
    nodes = [replace(node, nic=node.nic and replace(node.nic, bandwidth_bytes_per_s=rate)) for node in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


def _scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster whose network cards are `factor` times as fast."""
    nodes = []
    for node in cluster.nodes:
        if node.nic is not None:
            beside = node.nic.ethernet_bytes_per_s
            nic = replace(
                node.nic,
                bandwidth_bytes_per_s=factor * node.nic.bandwidth_bytes_per_s,
                ethernet_bytes_per_s=factor * beside if beside is not None else None,
            )
            node = replace(node, nic=nic)
        nodes.append(node)
    matrix = cluster.bandwidth_matrix
    if matrix is not None:
        of_node = [name.split("/")[0] for name in matrix.names]
        rates = tuple(
            tuple(rate if of_node[i] == of_node[j] else factor * rate for j, rate in enumerate(row))
            for i, row in enumerate(matrix.bytes_per_s)
        )
        matrix = BandwidthMatrix(matrix.names, rates, matrix.file)
    return replace(cluster, nodes=tuple(nodes), bandwidth_matrix=matrix)


# --- Python ----------------------------------------------------------------------------------------------------------


def _from_python(path: Path) -> tuple[list[Run], list[Path]]:
    """The runs that the function `runs` of a Python file yields. Raises InputError with what the file raises."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    name = f"_sweep_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
        function = getattr(module, _FUNCTION, None)
        if not callable(function):
            raise InputError(f"expected a function {_FUNCTION}(), which yields the runs of the sweep")
        runs = list(itertools.islice(function(), MOST_RUNS + 1))
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: {error_text(error)}") from None
    finally:
        del sys.modules[name]  # so that a planner of this file goes to other processes as it is, and not by its name
    for i, run in enumerate(runs):
        if not isinstance(run, Run):
            raise InputError(f"{path}: {_FUNCTION}() yields experiments.sweep.Run, but number {i + 1} is {run!r:.80}")
    if len(runs) > MOST_RUNS:
        raise InputError(f"{path}: a sweep has at most {MOST_RUNS:,} runs")
    return runs, [path]
