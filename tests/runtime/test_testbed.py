"""A testbed comes up, keeps its links' rates, and goes without a trace. What needs root is left out where the tests lack it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import testbed
from runtime.launch import RunFailed, launch_locally
from runtime.settings import Settings
from sim.spec.cluster import read_cluster
from sim.spec.plan import parse_plan
from sim.spec.reading import InputError

ROOT = Path(__file__).parents[2]


def _may() -> str | None:
    """Why there can be no testbed here; None where there can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if any(shutil.which(tool) is None for tool in ("ip", "tc", "bridge")):
        return "needs iproute2"
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs root and /dev/net/tun"
    name = f"motley-try-{os.getpid()}"  # other processes of the tests try it at the same time
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if tried.returncode == 0 else "may not make network namespaces"


WHY_NOT = _may()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=f"a testbed {WHY_NOT}")

CLUSTER = """
name: {name}
nodes:
  - {{name: near, gpu: CPU, gpus: 2, intra: {{kind: nvlink, bandwidth: 200 Mbit/s}},
     nic: {{kind: ethernet, bandwidth: 80 Mbit/s}}, site: here}}
  - {{name: far, gpu: CPU, gpus: 1, intra: {{kind: nvlink, bandwidth: 200 Mbit/s}},
     nic: {{kind: ethernet, bandwidth: 80 Mbit/s}}, site: there}}
wan:
  - {{between: [here, there], bandwidth: 40 Mbit/s, latency: 10 ms}}
"""
NAME = f"test-{os.getpid()}"


def cluster_file(folder: Path, name: str = NAME) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(CLUSTER.format(name=name))
    return path


def left(name: str) -> list[str]:
    """What is left of a testbed: namespaces, notes, and relays."""
    found = [entry.name for entry in Path("/run/netns").iterdir() if entry.name.startswith(f"motley.{name}")]
    found += [entry.name for entry in testbed.FOLDER.iterdir() if entry.name == name] if testbed.FOLDER.is_dir() else []
    return found


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[testbed.Testbed]:
    made = testbed.up(cluster_file(tmp_path))
    try:
        yield made
    finally:
        testbed.down(made.name)


ADDRESSES = {"near/0": "10.77.1.1", "near/1": "10.77.1.2", "far/0": "10.77.2.1"}


def message_s(bed: testbed.Testbed, sender: str, receiver: str, num_bytes: int, at_once: int = 1) -> float:
    """Median seconds until messages of this size, sent at once on a connection each, have come and are answered."""
    with testbed.inside(bed.device(receiver)):
        listener = socket.create_server(("0.0.0.0", 0))

    def answer(connection: socket.socket) -> None:
        while True:
            missing = num_bytes
            while missing:
                got = len(connection.recv(min(missing, 1 << 16)))
                if not got:
                    return
                missing -= got
            connection.sendall(b"!")

    connections = []
    for _ in range(at_once):
        with testbed.inside(bed.device(sender)):
            client = socket.create_connection((ADDRESSES[receiver], listener.getsockname()[1]), timeout=10)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
        connections.append(client)
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        senders = [threading.Thread(target=client.sendall, args=(bytes(num_bytes),)) for client in connections]
        for thread in senders:
            thread.start()
        for client in connections:
            client.recv(1)
        times.append(time.perf_counter() - began_s)
    for client in [*connections, listener]:
        client.close()
    return statistics.median(times)


# --- What needs no root ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("name: near", "name: ne.ar", "letters, digits"),
        ("80 Mbit/s}", "80 Mbit/s, count: 2}", "has one NIC"),
        ("wan:", "fabric: {oversubscription: 2}\nwan:", "no uplinks of racks"),
    ],
)
def test_a_cluster_that_cannot_be_a_testbed_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = cluster_file(tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=complaint) as refused:
        testbed.check_cluster(read_cluster(path), NAME, path)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere it is refused for that")
def test_missing_commands_and_rights_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(InputError, match="needs tc of the package iproute2"):
        testbed.up(cluster_file(tmp_path))
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match=r"needs root, or .*unshare"):
        testbed.up(cluster_file(tmp_path))
    assert not left(NAME)


def test_a_testbed_that_is_not_up_is_told() -> None:
    with pytest.raises(InputError, match="there is no testbed 'nowhere'"):
        testbed.find("nowhere")


# --- What does -------------------------------------------------------------------------------------------------------

LATE = 1.6
"""How many times as long as it should a message may take here: links of twice the rate are told apart."""


@needs_root
def test_links_have_the_rates_and_latencies_of_the_cluster(bed: testbed.Testbed) -> None:
    # Of 1514 bytes on a wire 1448 are data; a wide-area link's rate is of data. A busy machine is later, but never sooner.
    data = 1448 / 1514
    assert 0.9 < message_s(bed, "near/0", "near/1", 500_000) / (500_000 / (25e6 * data)) < LATE
    assert 0.9 < message_s(bed, "near/0", "far/0", 250_000) / (250_000 / 5e6 + 0.02) < LATE
    # Two that share the wide-area link take twice as long.
    assert 0.9 < message_s(bed, "near/0", "far/0", 250_000, at_once=2) / (500_000 / 5e6 + 0.02) < LATE


@needs_root
def test_a_short_message_does_not_wait_for_a_long_one_to_another_device(tmp_path: Path) -> None:
    path = cluster_file(tmp_path)
    path.write_text(path.read_text().replace("latency: 10 ms", "latency: 1 ms"))  # so that a window is more than a path holds
    bed = testbed.up(path)
    ended = threading.Event()
    with testbed.inside(bed.device("near/0")):
        listener = socket.create_server(("0.0.0.0", 0))
    with testbed.inside(bed.device("far/0")):
        client = socket.create_connection((ADDRESSES["near/0"], listener.getsockname()[1]), timeout=10)
    taking, _ = listener.accept()

    def send() -> None:
        while not ended.is_set():
            client.sendall(bytes(100_000))
        client.shutdown(socket.SHUT_WR)

    def take() -> None:
        while taking.recv(1 << 16):
            pass

    threads = [threading.Thread(target=send), threading.Thread(target=take)]
    try:
        for thread in threads:
            thread.start()
        time.sleep(0.2)  # until as much is under way as a connection may have: 14 ms of the wide-area link
        took_s = message_s(bed, "far/0", "near/1", 15_000)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for one in (client, taking, listener):
            one.close()
        testbed.down(bed.name)
    assert 0.9 < took_s / (2 * 15_000 / 5e6 + 0.002) < LATE  # it has half of the link, and no queue before it


@needs_root
def test_two_testbeds_stand_side_by_side_and_go_without_a_trace(bed: testbed.Testbed, tmp_path: Path) -> None:
    other = testbed.up(cluster_file(tmp_path, f"{NAME}-b"))
    assert {bed.name, other.name} <= set(testbed.names())
    with pytest.raises(InputError, match="there already"):
        testbed.up(tmp_path / f"{NAME}.yaml")
    assert testbed.down(other.name)
    assert not left(other.name)
    assert not testbed.down(other.name)
    assert testbed.find(bed.name) == bed
    assert message_s(bed, "near/0", "near/1", 1000) < 1


@needs_root
def test_what_fails_halfway_is_undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise InputError("the relay did not start")

    monkeypatch.setattr(testbed, "_start_relay", fail)
    with pytest.raises(InputError, match="the relay did not start"):
        testbed.up(cluster_file(tmp_path))
    assert not left(NAME)


@needs_root
def test_what_a_killed_command_left_is_found_and_removed(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from runtime import testbed
        testbed._start_relay = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        testbed.up({str(cluster_file(tmp_path))!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert left(NAME) and NAME in testbed.names()
    with pytest.raises(InputError, match="is not whole; motley testbed down"):
        testbed.find(NAME)
    assert testbed.down(NAME)
    assert not left(NAME)


@needs_root
def test_a_run_whose_link_goes_down_ends_and_names_it(bed: testbed.Testbed, tmp_path: Path) -> None:
    table = {
        "format": "motley-plan/1",
        "cluster": bed.name,
        "model": {"name": "tiny", "layers": 2, "hidden": 32, "ffn": 16, "heads": 2, "vocab": 256},
        "sequence_length": 64,
        "global_batch": 2,
        "precision": "fp32",
        "pipelines": [
            {
                "micro_batch": 1,
                "micro_batches": 2,
                "stages": [{"devices": ["near/0"], "layers": [0, 1]}, {"devices": ["far/0"], "layers": [1, 2]}],
            }
        ],
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("abcdefgh" * 1000)
    settings = Settings(100_000, f"text:{tmp_path / 'text'}", testbed=bed.name, timeout_s=3.0, quiet=True)

    def received_bytes() -> int:
        shown = subprocess.run(["ip", "-n", bed.node("far"), "-s", "-j", "link", "show", "nic0"], capture_output=True, check=True)
        return int(json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"])

    def cut() -> None:
        while received_bytes() < 500_000:  # so many that it trains
            time.sleep(0.05)
        subprocess.run(["ip", "-n", bed.node("far"), "link", "set", "nic0", "down"], check=True)

    cutting = threading.Thread(target=cut, daemon=True)
    cutting.start()
    with pytest.raises(RunFailed) as failed:
        launch_locally(path, parse_plan(path.read_text()), settings)
    cutting.join()
    assert failed.value.code == 3
    assert "in the testbed nic0 of node far is down" in str(failed.value)
    assert "near/0" in str(failed.value) and "far/0" in str(failed.value)
