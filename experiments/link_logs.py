"""Logs of other programs that measure links, as the measurements of a bench file: nccl-tests' text, and iperf3's JSON.

Of nccl-tests (github NVIDIA/nccl-tests, doc/PERFORMANCE.md) the columns are those that the log's own head names; the seconds
are the out-of-place ones. Its sizes are what `LinkMeasurement` has: the larger of what a rank sends and receives. Of iperf3
(`--json`) they are what the receiver counted, and half of the shortest round trip that the sender saw, as the seconds of a
message of one byte.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from sim.spec.bench import LinkMeasurement
from sim.spec.reading import InputError, Table, parse_json, read_text

PROGRAMS: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "sendrecv": "ring",
}
"""The programs of nccl-tests (X_perf), and the operations that they measure; sendrecv sends round a ring."""


def read_link_log(path: str | Path) -> list[LinkMeasurement]:
    """What a log of nccl-tests or iperf3 measured. Raises InputError where it is neither, or nothing can be used of it."""
    text = read_text(path)
    try:
        found = list(_iperf3(text, str(path)) if text.lstrip().startswith("{") else _nccl_tests(text, str(path)))
    except InputError as error:
        message = str(error)
        raise InputError(message if message.startswith(str(path)) else f"{path}: {message}") from None
    if not found:
        raise InputError(f"{path}: holds the head of a log, but no measurement that can be used")
    return found


def renamed(links: Sequence[LinkMeasurement], names: Mapping[str, str]) -> list[LinkMeasurement]:
    """The measurements with the hosts called otherwise: a member is a host, or HOST/INDEX."""

    def new(member: str) -> str:
        host, slash, index = member.rpartition("/") if "/" in member else (member, "", "")
        return names.get(member, names.get(host, host) + slash + index)

    return [replace(link, members=tuple(new(member) for member in link.members)) for link in links]


# --- nccl-tests ------------------------------------------------------------------------------------------------------

_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)")
_ITERATIONS = re.compile(r"\biters: (\d+)")
_OUTPUT_OF = re.compile(r"^\[[\d,]+\]<std(?:out|err)>:")
"""What mpirun --tag-output writes before every line."""


def _nccl_tests(text: str, path: str) -> Iterator[LinkMeasurement]:
    """The measurements of nccl-tests' text, in which several programs may follow one another."""
    program = (_PROGRAM.search(Path(path).name) or [None, None])[1]
    columns: list[str] = []
    ranks: dict[int, str] = {}
    iterations, heads = 1, 0
    for line in text.splitlines():
        line = _OUTPUT_OF.sub("", line)
        words = line.split()
        if found := _PROGRAM.search(line):
            program = found[1]
        elif found := _RANK.search(line):
            ranks = {} if columns else ranks  # those of the next program
            columns = []
            ranks[int(found[1])] = f"{found[2]}/{found[3]}"
        elif line.startswith("#") and "size" in words and "count" in words:
            columns, heads = line.lstrip("#").split(), heads + 1
        elif columns and len(words) == len(columns) and words[0].isdecimal():
            measured = _row(dict(zip(reversed(columns), reversed(words), strict=True)), iterations, program, ranks)
            if measured is not None:
                yield measured
        if found := _ITERATIONS.search(line.replace("warmup iters", "").replace("agg iters", "")):
            iterations = int(found[1])
    if not heads:
        raise InputError("is neither the text of nccl-tests (no line '# size count type ...') nor the JSON of iperf3")


def _row(row: Mapping[str, str], iterations: int, program: str | None, ranks: Mapping[int, str]) -> LinkMeasurement | None:
    """The measurement of one row; None where it is of nothing, or its result was wrong.

    Of columns that come twice, out of place and in place, the row has the first.
    """
    if program is None:
        expected = ", ".join(f"{name}_perf" for name in PROGRAMS)
        raise InputError(f"does not say which program wrote it; name the file after it: {expected}")
    if program not in PROGRAMS:
        raise InputError(f"is of {program}_perf; accepted are {', '.join(f'{name}_perf' for name in PROGRAMS)}")
    if len(ranks) < 2:
        raise InputError(f"names {len(ranks)} ranks ('# Rank 0 ... on HOST device 0'), but a link is between at least two")
    try:
        num_bytes = int(row["size"])
        seconds = float(Decimal(row["time"] if "time" in row else row["cputime"]).scaleb(-6))
        wrong = float(row.get("#wrong", "0").replace("N/A", "0"))
    except (KeyError, ValueError, ArithmeticError):
        return None
    if num_bytes == 0 or seconds <= 0 or wrong:
        return None
    members = tuple(ranks[rank] for rank in sorted(ranks))
    return LinkMeasurement(PROGRAMS[program], members, num_bytes, seconds, repeats=max(1, iterations))


# --- iperf3 ----------------------------------------------------------------------------------------------------------


def _iperf3(text: str, path: str) -> Iterator[LinkMeasurement]:
    """The measurements of iperf3's JSON: of one direction, or of both where it ran with --bidir."""
    values = parse_json(text, path)
    if not isinstance(values, dict) or not {"start", "end"} <= values.keys():
        raise InputError("is JSON, but not that of iperf3, which has 'start' and 'end'")
    if values.get("error"):
        raise InputError(f"is of an iperf3 that failed: {values['error']}")
    start, end = Table(values, path).table("start"), Table(values, path).table("end")
    connected = start.tables("connected", minimum=1)[0]
    client, server = connected.text("local_host"), connected.text("remote_host")
    reverse = bool(start.table("test_start").get("reverse", int, "0 or 1", 0))
    ways = [("sum_received", (server, client) if reverse else (client, server), "sum")]
    if "sum_received_bidir_reverse" in end:
        ways.append(("sum_received_bidir_reverse", (server, client), "sum_bidir_reverse"))
    streams = [stream.get("sender", {}) for stream in end.items("streams", []) if isinstance(stream, dict)]
    for key, members, of_interval in ways:
        total = end.table(key)
        num_bytes, seconds = total.integer("bytes"), total.number("seconds")
        if num_bytes == 0 or seconds == 0:
            continue
        rates = _interval_rates(values.get("intervals"), of_interval)
        yield LinkMeasurement("send", members, num_bytes, seconds, _spread(rates), max(1, len(rates)))
    # Which the kernel of the sending side knows; of the other direction it is the same round trip.
    trips = [float(sender["min_rtt"]) for sender in streams if isinstance(sender.get("min_rtt"), (int, float))]
    if any(trips):
        latency_s = min(trip for trip in trips if trip > 0) / 1e6 / 2
        for _, members, _ in ways:
            yield LinkMeasurement("send", members, 1, latency_s)


def _interval_rates(intervals: Any, key: str) -> list[float]:
    """Bits per second of the intervals that were not left out as a warm-up."""
    sums = [interval.get(key) for interval in intervals or () if isinstance(interval, dict)]
    told = [entry for entry in sums if isinstance(entry, dict) and not entry.get("omitted")]
    return [float(entry["bits_per_second"]) for entry in told if isinstance(entry.get("bits_per_second"), (int, float))]


def _spread(rates: Sequence[float]) -> float:
    """The distance of the quartiles, as a fraction of the median; 0 where that says nothing."""
    if len(rates) < 2 or statistics.median(rates) <= 0:
        return 0.0
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    return (high - low) / middle
