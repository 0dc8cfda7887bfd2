"""A worker for the tests of the launcher: rank 1 does what the variable FAULT says, the others wait for it.

It leaves its process id and its arguments in the folder that the variable LEFT names, and trains nothing.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.watch import Watch
from sim.spec.program import Forward, RecvActivation
from sim.spec.reading import InputError

RANK = int(os.environ["RANK"])
FAULT = os.environ.get("FAULT", "none")
LEFT = Path(os.environ["LEFT"])
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "60"))


def leave(name: str, value: object) -> None:
    """Nothing; writes what the test reads."""
    temporary = LEFT / f".{name}"
    temporary.write_text(json.dumps(value))
    temporary.rename(LEFT / name)


def sleep() -> None:
    """Never comes back."""
    while True:
        time.sleep(1)


def misbehave() -> None:
    """What rank 1 does."""
    if FAULT == "mistake":
        raise InputError("corpus.bin: holds no tokens")
    if FAULT == "disk":
        raise OSError(errno.ENOSPC, "No space left on device", "/data/checkpoint")
    if FAULT == "bug":
        raise KeyError("x")
    if FAULT == "exit":
        sys.exit(7)
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "loop":
        while True:
            pass
    if FAULT == "parent":  # of a process that does not end when it is told to
        text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        leave("child", child.pid)
        raise KeyError("x")
    sleep()


def work(watch: Watch) -> None:
    """Rank 1 misbehaves; the others wait for it, through gloo where FAULT begins with 'gloo-'."""
    if FAULT.startswith("gloo-"):
        from datetime import timedelta

        import torch
        import torch.distributed

        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        torch.distributed.barrier()
        if RANK == 0:
            watch.phase = "training"
            watch.step = 3
            watch.enter(RecvActivation(3, 2, "p0s1", (0, 1)), "p0s1 (a100/1)")
            leave("waiting", None)
            torch.distributed.recv(torch.zeros(1), 1)
        while not (LEFT / "waiting").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "gloo-kill" else signal.SIGSTOP)
    watch.phase = "training"
    watch.step = 3
    if FAULT == "none":
        return
    if RANK == 0:
        watch.enter(RecvActivation(3, 2, "p0s1", (0, 1)), "p0s1 (a100/1)")
        leave("waiting", None)
        sleep()
    while not (LEFT / "waiting").exists():
        time.sleep(0.01)
    watch.enter(Forward(3, (2, 4)))
    misbehave()


def main() -> None:
    """The whole worker."""
    leave(f"{RANK}", {"pid": os.getpid(), "arguments": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS")})
    watch = Watch(RANK, f"a100/{RANK}", f"p0s{RANK}", TIMEOUT_S)
    watch.start()
    watch.guard(lambda: work(watch))


if __name__ == "__main__":
    main()
