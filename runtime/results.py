"""What a training run leaves behind: its figures in result.json, the measured trace of one step in trace.json beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.spec.reading import InputError, Table, read_json, write_file
from sim.spec.trace import Trace, read_trace, trace_json

FORMAT = "motley-result/1"

_PER_STEP = ("losses", "step_s", "learning_rates", "gradient_norms")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class RunResult:
    """The figures of one run. Raises InputError where the figures of the steps are not of one number.

    A loss or a norm may be infinite or no number at all, as when a training diverges.
    """

    trace: Trace
    losses: tuple[float, ...]
    """Of each step of this run, the mean over all tokens of its batch."""
    step_s: tuple[float, ...]
    learning_rates: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    """Before clipping."""
    first_step: int
    """The number of the first step of this run: 0, or where it was resumed."""
    iteration_s: float
    """Seconds of a step: the median after the warm-up."""
    tokens_per_s: float
    peak_flop_per_s: Mapping[str, float]
    """By device, at the precision of the run; devices whose peak is not known are left out."""
    peak_measured: bool
    """Whether the peaks were measured, and are not those of the catalogue."""
    device_kinds: Mapping[str, str]
    """By device: the name of its kind in the catalogue, or else the name its system gives it."""
    resumed_from: int | None = None
    """The steps that were done when the run was resumed; None where it began anew."""

    def __post_init__(self) -> None:
        counts = {name: len(getattr(self, name)) for name in _PER_STEP}
        if len(set(counts.values())) > 1 or not self.losses:
            shown = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise InputError(f"a run has as many losses as step_s, learning_rates and gradient_norms, and some, but got {shown}")


def write_result(folder: str | Path, result: RunResult) -> None:
    """Nothing; writes trace.json and then result.json into the folder, in the place of earlier ones.

    What JSON has no number for is written as a text: "nan", "inf", "-inf". Raises InputError and OSError as `write_file` does.
    """
    facts: dict[str, Any] = {"format": FORMAT}
    facts |= {name: getattr(result, name) for name in ("first_step", "resumed_from", "iteration_s", "tokens_per_s")}
    facts |= {name: [_plain(number) for number in getattr(result, name)] for name in _PER_STEP}
    facts["peak_measured"] = result.peak_measured
    facts |= {name: dict(getattr(result, name)) for name in ("peak_flop_per_s", "device_kinds")}
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in facts.items()]
    write_file(Path(folder) / "trace.json", trace_json(result.trace), replace=True)
    write_file(Path(folder) / "result.json", "{\n" + ",\n".join(lines) + "\n}\n", replace=True)


def is_written(folder: str | Path) -> bool:
    """Whether `write_result` has left its files in a folder."""
    return (Path(folder) / "result.json").exists()


def read_result(folder: str | Path) -> RunResult:
    """The figures that `write_result` left in a folder. Raises InputError where a file is missing or damaged."""
    path = Path(folder) / "result.json"
    table = Table(read_json(path), str(path))
    table.choice("format", [FORMAT])
    begun_anew = table.get("resumed_from", lambda value: value is None, "a number of steps or null")
    peaks, kinds = table.table("peak_flop_per_s"), table.table("device_kinds")
    values: dict[str, Any] = {
        "first_step": table.integer("first_step"),
        "resumed_from": None if begun_anew else table.integer("resumed_from"),
        "iteration_s": table.number("iteration_s"),
        "tokens_per_s": table.number("tokens_per_s"),
        "peak_measured": table.flag("peak_measured"),
        "peak_flop_per_s": {device: peaks.number(device) for device in peaks.keys()},  # noqa: SIM118
        "device_kinds": {device: kinds.text(device) for device in kinds.keys()},  # noqa: SIM118
    }
    for name in _PER_STEP:
        values[name] = table.get(name, _numbers, 'a list of numbers, "nan", "inf" and "-inf"')
    table.close()
    trace = read_trace(Path(folder) / "trace.json")
    try:
        return RunResult(trace=trace, **values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _plain(number: float) -> float | str:
    """The number, or its name where it is not finite."""
    return float(number) if math.isfinite(number) else repr(float(number))


def _numbers(value: object) -> tuple[float, ...]:
    """The numbers of a list that `_plain` wrote. Raises ValueError for anything else."""
    if not isinstance(value, list):
        raise ValueError
    return tuple(_number(item) for item in value)


def _number(value: object) -> float:
    """The number that `_plain` wrote. Raises ValueError for anything else."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError
    return float(value)
