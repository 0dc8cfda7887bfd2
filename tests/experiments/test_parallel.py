"""Work in several processes: what Ctrl-C does to those that have only begun to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from experiments.parallel import in_processes
from tests.experiments.conftest import ROOT

SCRIPT = """
import os, time
from experiments.parallel import in_processes

if __name__ == "__mp_main__":  # in a worker, which imports this before anything else
    os.write(1, b"importing\\n")  # in one piece, beside the other worker's
    time.sleep(2)  # longer than a busy machine takes to interrupt it

if __name__ == "__main__":
    print(in_processes(abs, [-1, -2, -3, -4], processes=2), flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="has no signals that wait")
def test_processes_that_are_interrupted_as_they_import_say_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which shells have ignored in the background
    )
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == 2 * ["importing\n"]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, told = process.communicate(timeout=240)
    assert (process.returncode, told) == (0, "")
    assert said == "([None, None, None, None], True)\n"


LONG = """
import os, time
from experiments.parallel import in_processes

def work(seconds):
    os.write(1, b"working\\n")
    time.sleep(seconds)

if __name__ == "__main__":
    in_processes(work, [600, 600], processes=2)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no processes that a parent leaves behind")
def test_processes_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONG, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == 2 * ["working\n"]
    process.kill()
    assert process.communicate(timeout=60)[0] == ""  # whose end comes when the last process that could write has ended


def test_a_second_interrupt_while_the_first_is_passed_on_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Event.set

    def interrupted(event: Event) -> None:
        with event._cond:  # type: ignore[attr-defined]  # workers ask for it, too
            os.kill(os.getpid(), signal.SIGINT)
        tell(event)

    def progress() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Event, "set", interrupted)
    before = signal.getsignal(signal.SIGINT)
    results, early = in_processes(abs, [-1, -2, -3], processes=2, progress=progress)
    assert early and set(results) <= {1, 2, 3, None}
    assert signal.getsignal(signal.SIGINT) is before


def test_tasks_of_one_batch_go_to_one_process_and_all_are_counted() -> None:
    counted: list[None] = []
    numbers = list(range(40))
    found, interrupted = in_processes(
        _where, numbers, 2, lambda: counted.append(None), batch=lambda n: n // 20 if n < 30 else None
    )
    assert not interrupted and len(counted) == 40
    assert [number for told in found if told for number in told[:1]] == numbers
    by = [told[1] for told in found if told]
    for part in (range(8), range(8, 16), range(16, 20), range(20, 28), range(28, 30)):
        assert len({by[i] for i in part}) == 1


def _where(number: int) -> tuple[int, int]:
    return number, os.getpid()
