"""Logs of nccl-tests and iperf3, written by hand in their documented forms, and what must be read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.link_logs import read_link_log, renamed
from sim.spec.bench import LinkMeasurement
from sim.spec.reading import InputError

ALL_REDUCE = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  15784 on     node-a device  0 [0x0f] NVIDIA A100-SXM4-40GB
#  Rank  1 Group  0 Pid  15784 on     node-a device  1 [0x15] NVIDIA A100-SXM4-40GB
#  Rank  2 Group  0 Pid    991 on     node-b device  0 [0x0f] NVIDIA A100-SXM4-40GB
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
           0             0     float     sum      -1     0.10    0.00    0.00      0     0.10    0.00    0.00      0
           8             2     float     sum      -1    22.57    0.00    0.00      0    22.69    0.00    0.00      0
     1048576        262144     float     sum      -1    105.9    9.90   13.20      0    105.7    9.92   13.23    N/A
     2097152        524288     float     sum      -1    177.0   11.85   15.80      7    140.4   14.94   19.92      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 7.1
#
"""  # noqa: W291

NODES = ("node-a/0", "node-a/1", "node-b/0")

IPERF3: dict[str, Any] = {
    "start": {
        "connected": [{"socket": 5, "local_host": "10.0.0.1", "local_port": 4000, "remote_host": "10.0.0.2"}],
        "version": "iperf 3.16",
        "test_start": {"protocol": "TCP", "num_streams": 1, "blksize": 131072, "omit": 1, "duration": 3, "reverse": 0},
    },
    "intervals": [
        {"streams": [], "sum": {"seconds": 1, "bytes": 9, "bits_per_second": 9e9, "omitted": True, "sender": True}},
        {"streams": [], "sum": {"seconds": 1, "bytes": 1, "bits_per_second": 0.8e9, "omitted": False, "sender": True}},
        {"streams": [], "sum": {"seconds": 1, "bytes": 1, "bits_per_second": 1.0e9, "omitted": False, "sender": True}},
        {"streams": [], "sum": {"seconds": 1, "bytes": 1, "bits_per_second": 1.2e9, "omitted": False, "sender": True}},
    ],
    "end": {
        "streams": [
            {
                "sender": {"socket": 5, "bytes": 380000000, "max_rtt": 9000, "min_rtt": 5000, "mean_rtt": 6000, "sender": True},
                "receiver": {"socket": 5, "bytes": 375000000, "sender": True},
            }
        ],
        "sum_sent": {"start": 0, "end": 3.0, "seconds": 3.0, "bytes": 380000000, "bits_per_second": 1.01e9, "retransmits": 0},
        "sum_received": {"start": 0, "end": 3.05, "seconds": 3.05, "bytes": 375000000, "bits_per_second": 0.98e9},
    },
}  # fmt: skip


def log(folder: Path, text: str, name: str = "all_reduce_perf.log") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_nccl_tests_are_read_row_by_row(tmp_path: Path) -> None:
    # 22.57 us and 105.9 us, each the mean of 20 iterations; the row of no bytes and the one with 7 wrong results are left out.
    assert read_link_log(log(tmp_path, ALL_REDUCE)) == [
        LinkMeasurement("all_reduce", NODES, 8, 22.57e-6, 0.0, 20),
        LinkMeasurement("all_reduce", NODES, 1_048_576, 105.9e-6, 0.0, 20),
    ]


def test_several_programs_in_one_log_are_told_apart(tmp_path: Path) -> None:
    second = (
        ALL_REDUCE.replace("sum", "none")
        .replace("node-b", "node-c")
        .replace("iters: 20", "iters: 7")
        .replace("1048576", "4194304")
    )
    text = (
        f"$ ./build/all_reduce_perf -b 8 -e 128M -f 2\n{ALL_REDUCE}"
        f"# nccl-tests version 2.18.2\n# Collective test starting: alltoall_perf\n{second}"
    )
    found = read_link_log(log(tmp_path, text, "out.txt"))
    assert [(link.operation, link.members[2], link.num_bytes, link.repeats) for link in found] == [
        ("all_reduce", "node-b/0", 8, 20),
        ("all_reduce", "node-b/0", 1_048_576, 20),
        ("all_to_all", "node-c/0", 8, 7),
        ("all_to_all", "node-c/0", 4_194_304, 7),
    ]


def test_older_and_tagged_forms_are_read_too(tmp_path: Path) -> None:
    text = """\
#   Rank  0 Pid  21284 on box device  0 [0x2f] Tesla V100
#   Rank  1 Pid  21284 on box device  1 [0x03] Tesla V100
#                                             out-of-place                in-place
#       size         count      type   root     time   algbw   busbw  error     time   algbw   busbw  error
        1024           256     float      0    12.50    0.08    0.08  2e-07    13.00    0.08    0.08  2e-07
"""
    expected = [LinkMeasurement("broadcast", ("box/0", "box/1"), 1024, 12.5e-6)]
    assert read_link_log(log(tmp_path, text, "broadcast_perf.txt")) == expected
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())
    assert read_link_log(log(tmp_path, tagged, "broadcast_perf.2.txt")) == expected


def test_iperf3_is_read_as_the_receiver_counted(tmp_path: Path) -> None:
    # 375 MB in 3.05 s. Rates of 0.8, 1.0 and 1.2: quartiles 0.9 and 1.1 about 1.0; the warm-up is left out. Half of 5000 us.
    assert read_link_log(log(tmp_path, json.dumps(IPERF3), "run.json")) == [
        LinkMeasurement("send", ("10.0.0.1", "10.0.0.2"), 375_000_000, 3.05, 0.2, 3),
        LinkMeasurement("send", ("10.0.0.1", "10.0.0.2"), 1, 0.0025),
    ]


def test_iperf3_in_reverse_and_in_both_directions(tmp_path: Path) -> None:
    values = json.loads(json.dumps(IPERF3))
    values["start"]["test_start"]["reverse"] = 1
    del values["end"]["streams"][0]["sender"]["min_rtt"]  # a client that receives does not know it
    (found,) = read_link_log(log(tmp_path, json.dumps(values), "reverse.json"))
    assert (found.sender, found.receiver) == ("10.0.0.2", "10.0.0.1")
    values = json.loads(json.dumps(IPERF3))
    values["end"]["sum_received_bidir_reverse"] = {"seconds": 3.0, "bytes": 60_000_000, "bits_per_second": 1.6e8}
    found_both = read_link_log(log(tmp_path, json.dumps(values), "both.json"))
    assert [(link.sender, link.num_bytes, link.seconds) for link in found_both] == [
        ("10.0.0.1", 375_000_000, 3.05),
        ("10.0.0.2", 60_000_000, 3.0),
        ("10.0.0.1", 1, 0.0025),
        ("10.0.0.2", 1, 0.0025),
    ]


def test_hosts_are_called_as_a_cluster_calls_them() -> None:
    links = [LinkMeasurement("all_reduce", NODES, 8, 1.0), LinkMeasurement("send", ("10.0.0.1", "10.0.0.2"), 8, 1.0)]
    names = {"node-a": "a100", "node-b/0": "v100/3", "10.0.0.1": "a100/0"}
    assert [link.members for link in renamed(links, names)] == [("a100/0", "a100/1", "v100/3"), ("a100/0", "10.0.0.2")]


ROWS = ALL_REDUCE[ALL_REDUCE.index("           0 ") :]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.txt", "hello\n", "is neither the text of nccl-tests .* nor the JSON of iperf3"),
        ("empty.txt", "", "is neither the text of nccl-tests"),
        ("all_reduce_perf.log", ALL_REDUCE.replace(ROWS, ""), "no measurement that can be used"),
        ("out.txt", ALL_REDUCE, "does not say which program wrote it; name the file after it: all_reduce_perf"),
        ("gather_perf.txt", ALL_REDUCE, "is of gather_perf; accepted are all_reduce_perf"),
        ("all_reduce_perf.log", ALL_REDUCE.replace("Rank", "Runk"), "names 0 ranks"),
        ("run.json", "{}", "is JSON, but not that of iperf3"),
        ("run.json", "{", "ends too early"),
        ("run.json", json.dumps({**IPERF3, "error": "unable to connect"}), "an iperf3 that failed: unable to connect"),
        ("run.json", json.dumps({**IPERF3, "end": {}}), "end.sum_received: is missing"),
        ("run.json", json.dumps({**IPERF3, "start": {"connected": []}}), "start.connected: expected a list of at least 1"),
        ("run.json", json.dumps({**IPERF3, "end": {"sum_received": {"bytes": 0, "seconds": 3}}}), "no measurement"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_told_in_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = log(tmp_path, text, name)
    with pytest.raises(InputError, match=message) as told:
        read_link_log(path)
    assert str(told.value).startswith(str(path)) and str(told.value).count(str(path)) == 1
