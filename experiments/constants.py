"""Files of fitted constants, in the form of sim/spec/constants.yaml: what they say takes the place of what is shipped."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

import yaml

from sim.spec.cluster import Cluster, Fabric, Intra, Links, links, read_links
from sim.spec.gpu import Efficiency, catalogue, efficiencies, read_gpu_kind
from sim.spec.reading import InputError, Table, nearest, read_yaml
from sim.spec.stack import STACK_UNITS, Stack, read_stack, stacks

Record = TypeVar("Record", Efficiency, Stack)


@dataclass(frozen=True)
class Constants:
    """Efficiency records and stacks by their names in the shipped file, and links; what is left out is as shipped."""

    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    links: Links | None = None

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with these constants in the place of the shipped ones; what it changed of those itself, it keeps."""
        new = self.stacks.get(cluster.stack.name)
        stack = cluster.stack if new is None else _renewed(cluster.stack, stacks().get(new.name, cluster.stack), new)
        kinds = {node.gpu: replace(node.gpu, efficiency=self._efficiency(node.gpu.efficiency)) for node in cluster.nodes}
        nodes = tuple(replace(node, gpu=kinds[node.gpu], intra=self._intra(node.intra)) for node in cluster.nodes)
        return replace(cluster, nodes=nodes, fabric=self._fabric(cluster.fabric), stack=stack)

    def _efficiency(self, record: Efficiency) -> Efficiency:
        """The new record for one that is shipped; any other is left as it is."""
        return next((new for name, new in self.efficiencies.items() if efficiencies().get(name) == record), record)

    def _intra(self, intra: Intra) -> Intra:
        if self.links is None:
            return intra
        shipped, new = links(), self.links
        return replace(
            intra,
            latency_s=new.latency_s[intra.kind] if intra.latency_s == shipped.latency_s[intra.kind] else intra.latency_s,
            step_s=new.step_s if intra.step_s == shipped.step_s else intra.step_s,
        )

    def _fabric(self, fabric: Fabric) -> Fabric:
        if self.links is None:
            return fabric
        efficiency = {**self.links.efficiency, **dict(fabric.protocol_efficiency)}
        return replace(
            fabric,
            protocol_efficiency=tuple(efficiency.items()),
            start_s=self.links.start_s if fabric.start_s == links().start_s else fabric.start_s,
            step_s=self.links.step_s if fabric.step_s == links().step_s else fabric.step_s,
        )


FACTOR_TOLD = "; rates of matmuls and attention x "
"""In the source of an efficiency record, before the factor that runs gave it."""


def rates_measured(record: Efficiency) -> bool:
    """Whether there are micro-benchmarks of a record's matmuls; where there are none, its source says so."""
    return "not measured" not in record.source and re.search(r"nominal: [^;]*matmul_fraction", record.source) is None


def with_factor(record: Efficiency, factor: float) -> Efficiency:
    """The record with matmuls and attention faster by a factor, or by as much of it as makes no fraction more than 1."""
    factor = min(factor, 1 / record.matmul_fraction, 1 / record.attention_fraction)
    return replace(record, matmul_fraction=record.matmul_fraction * factor, attention_fraction=record.attention_fraction * factor)


def told_factor(record: Efficiency, factor: float, stack_name: str) -> Efficiency:
    """The record with a factor that runs of a stack gave it, to two digits after the point, and told of in its source."""
    factor = float(f"{factor:.2f}")
    while factor * max(record.matmul_fraction, record.attention_fraction) > 1:
        factor = round(factor - 0.01, 2)
    return replace(with_factor(record, factor), source=f"{record.source}{FACTOR_TOLD}{factor:.2f} by runs of {stack_name}")


def without_factor(record: Efficiency) -> Efficiency:
    """The record as it was before an earlier fit on runs, whose factor its source tells, so that factors do not pile up."""
    begun, told, rest = record.source.partition(FACTOR_TOLD)
    if not told:
        return record
    factor = float(rest.split()[0])
    # Rounded as the file that it was read from: to four digits.
    rates = {name: float(f"{getattr(record, name) / factor:.4g}") for name in ("matmul_fraction", "attention_fraction")}
    return replace(record, source=begun, **rates)


def _renewed(record: Record, shipped: Record, new: Record) -> Record:
    """The record with those of its fields taken from `new` that are as shipped."""
    names = [f.name for f in fields(record) if getattr(record, f.name) == getattr(shipped, f.name)]
    return replace(record, **{name: getattr(new, name) for name in names})


def read_constants(path: str | Path) -> Constants:
    """The constants of a file. Raises InputError with the file, the key, the value and what is accepted."""
    return _constants(read_yaml(path), str(path))


def parse_constants(text: str, where: str) -> Constants:
    """The constants of a YAML text called `where`. Raises InputError as `read_constants`."""
    try:
        return _constants(yaml.safe_load(text), where)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from None


def _constants(values: object, where: str) -> Constants:
    """The constants of a file's content; a record of a shipped name changes what it mentions, and a stack may also be new."""
    root = Table(values, where)
    families, entries = (root.table(key) if key in root else Table({}, where, key) for key in ("efficiencies", "stacks"))
    found_links = read_links(root.table("links")) if "links" in root else None
    root.close()
    family_names, stack_names = families.keys(), entries.keys()
    return Constants(
        {name: _over_shipped(name, families, where) for name in family_names},
        {name: read_stack(name, entries.table(name), stacks().get(name)) for name in stack_names},
        found_links,
    )


def _over_shipped(family: str, families: Table, where: str) -> Efficiency:
    """The shipped record of a family with what the table changes."""
    if family not in efficiencies():
        hint = nearest(family, efficiencies())
        raise families.error(family, f"is not the name of a record{hint or ';'} known: {', '.join(efficiencies())}")
    # The reader of a GPU kind knows the keys; which kind it is does not matter.
    base = replace(next(iter(catalogue().values())), efficiency=efficiencies()[family])
    value = families.get(family, lambda value: value, "a mapping of constants")
    return read_gpu_kind(base.name, Table({"efficiency": value}, where, f"efficiencies.{family}"), base).efficiency


# --- Writing ---------------------------------------------------------------------------------------------------------

_HEAD = """\
# The constants that are fitted on measurements, as `motley validate --fit --out FILE` writes them: how much of its peaks a GPU
# kind reaches (`efficiencies`: sim/spec/gpu.py, Efficiency), what links carry and the steps of collectives take (`links`:
# sim/spec/cluster.py, Links), and what a software stack adds (`stacks`: sim/spec/stack.py, Stack). docs/fidelity.md says how
# they were found and how far off they are.
"""


LINKS_SOURCE = (
    "nvlink, nvls, pcie, start and step: fitted on the collectives of experiments/fit_links.py; "
    "infiniband, roce, ethernet, tcp and the latencies: nominal"
)


def constants_text(constants: Constants) -> str:
    """The text of a constants file, which `read_constants` reads; each figure to four digits."""
    lines = [_HEAD.rstrip("\n")]
    if constants.efficiencies:
        lines += ["", "efficiencies:"]
    for name, record in constants.efficiencies.items():
        lines += _record_lines(name, _table(record, Efficiency, {"matmul_half_s": "matmul_half", "launch_s": "launch"}))
    if constants.links is not None:
        found = constants.links
        lines += ["", "links:"]
        lines.append(f"  efficiency: {_mapping({key: _figure(value) for key, value in found.efficiency.items()})}")
        lines.append(f"  latency: {_mapping({key: _seconds(value) for key, value in found.latency_s.items()})}")
        lines += [f"  start: {_seconds(found.start_s)}", f"  step: {_seconds(found.step_s)}"]
        lines.append(f"  source: {_quoted(LINKS_SOURCE)}")
    if constants.stacks:
        lines += ["", "stacks:"]
    renamed = {field_name: key for field_name, (key, _) in STACK_UNITS.items()}
    for name, software in constants.stacks.items():
        values = _table(software, Stack, renamed)
        # What is not mentioned is as shipped, or the default: it must be both; but nothing is said by an empty text.
        usual = [_table(record, Stack, renamed) for record in (Stack(name), stacks().get(name, Stack(name)))]
        told = {
            key: value for key, value in values.items() if any(value != table[key] for table in usual) and value != _quoted("")
        }
        lines += _record_lines(name, told)
    return "\n".join(lines) + "\n"


def _table(record: Record, kind: type[Record], renamed: Mapping[str, str]) -> dict[str, str]:
    """The entries of a record as its file has them: times and bytes with their unit."""
    table = {}
    for one in fields(kind):
        value, key = getattr(record, one.name), renamed.get(one.name, one.name)
        if one.name == "name":
            continue
        if isinstance(value, bool):
            table[key] = "true" if value else "false"
        elif isinstance(value, str):
            table[key] = _quoted(value)
        elif one.name.endswith("_s"):
            table[key] = _seconds(value)
        elif one.name == "context_bytes":
            table[key] = f"{value / 2**20:.4g} MiB"
        else:
            table[key] = _figure(value)
    return table


def _record_lines(name: str, table: Mapping[str, str]) -> list[str]:
    """A record on its lines: name, constants, source."""
    constants = _mapping({key: value for key, value in table.items() if key != "source"})[1:-1]
    parts = [text for text in (constants, f"source: {table['source']}" if "source" in table else "") if text]
    body: list[str] = []
    for i, part in enumerate(parts):
        comma = "," if i < len(parts) - 1 else ""
        body += textwrap.wrap(part + comma, 122, break_long_words=False, break_on_hyphens=False)
    return [f"  {name}:", "    {" + "\n     ".join(body) + "}"]


def _mapping(table: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in table.items()) + "}"


def _figure(value: float) -> str:
    text = f"{value:.4g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text  # 1e-05 is a text in YAML 1.1


def _seconds(value: float) -> str:
    """Seconds with the unit that leaves the fewest zeros."""
    if value == 0:
        return "0 s"
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if value >= f), ("ns", 1e-9))
    return f"{value / factor:.4g} {unit}"


def _quoted(text: str) -> str:
    return '"' + " ".join(text.replace("\\", "\\\\").replace('"', '\\"').split()) + '"'
