"""Estimates for a search: `sim.cost.estimates`, whose arithmetic is compiled beside the search, once on a machine.

That takes twenty seconds to a minute, which a search may not have, and that of the exact ones (`sim.cost.estimate`) some more.
So a process of its own does it (`python -m partition.estimated`), which outlives the search where it must: what it compiles is
kept on disk, and the next search has it. The commands wait for it before they search (`compile_once`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from hashlib import sha1, sha256
from importlib.util import find_spec
from pathlib import Path

from partition.parallel import interrupts_held
from sim.cost.estimate import Estimate
from sim.cost.estimates import Estimates
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.gpu import gpu_kind
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.transformer import transformer

POLL_S = 0.05

MOST_WAIT_S = 60.0
"""A search without an end to its budget waits so long; one that has so much time left compiles itself where others fail to."""

BUSY = 3
"""The exit code of a compilation that leaves it to another one."""


class Preparation:
    """The estimates of a job's plans, as soon as their arithmetic is compiled."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster, self._job = cluster, job
        self._estimates: Estimates | None = None
        self._compilation = None if is_compiled() and is_exact_compiled() else _compile_beside()

    @property
    def is_loaded(self) -> bool:
        """Whether this process has loaded the arithmetic before."""
        return _estimate_once.cache_info().currsize > 0

    def estimates(self, wait_s: float = 0.0) -> Estimates | None:
        """The estimates, or None where their arithmetic is not compiled within these seconds."""
        if self._estimates is None:
            end = time.monotonic() + min(max(wait_s, 0.0), MOST_WAIT_S)
            while not is_compiled():
                failed = self._compilation is not None and self._compilation.poll() not in (None, BUSY)
                if failed and wait_s >= MOST_WAIT_S:
                    break
                if failed or time.monotonic() >= end:
                    return None
                time.sleep(POLL_S)
            with interrupts_held():  # the loading of compiled code would swallow Ctrl-C
                _estimate_once()
                if is_exact_compiled():
                    _estimate_exactly()
                self._estimates = Estimates(self._cluster, self._job)
        return self._estimates


def is_compiled() -> bool:
    """Whether the arithmetic of estimates is compiled."""
    return _is_kept(*ESTIMATED)


def is_exact_compiled() -> bool:
    """Whether that of exact estimates is."""
    return _is_kept(*EXACT)


ESTIMATED, EXACT = ("sim.cost.recurrence", "evaluate"), ("sim.cost.meeting", "met_ends_s")
"""The modules of estimates, and of exact ones, with the functions that all is compiled for."""


def _is_kept(module: str, function: str) -> bool:
    """Whether numba has kept a compiled function since its source was last changed."""
    since_s = _source(module).stat().st_mtime
    return any(file.stat().st_mtime >= since_s for file in _kept(module, function))


def _kept(module: str, function: str) -> list[Path]:
    """What numba has kept of a compiled function: where it is told to, beside the source, or where a user's caches are."""
    source = _source(module)
    name = f"{source.stem}.{function}-*.nbi"
    # Of several folders of sources, each has one named so in a common one.
    own = f"{source.parent.name}_{sha1(str(source.parent).encode()).hexdigest()}"
    if told := os.environ.get("NUMBA_CACHE_DIR"):
        return [*Path(told).glob(f"{own}/{name}")]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [*source.parent.glob(f"__pycache__/{name}"), *caches.glob(f"numba/{own}/{name}")]


def _source(module: str) -> Path:
    """The file of a module."""
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin)


def compile_once() -> None:
    """Nothing; returns when the arithmetic is compiled, by whichever process is at it, or cannot be."""
    while not (is_compiled() and is_exact_compiled()):
        if _compile_beside().wait() != BUSY:
            return
        time.sleep(POLL_S)


def _compile_beside() -> subprocess.Popen[bytes]:
    """The process that compiles the arithmetic. It belongs to no terminal, so that Ctrl-C does not end it."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-m", "partition.estimated"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
    )


def main() -> int:
    """The exit code; compiles the arithmetic by the estimate of a plan, unless another process is at it."""
    try:
        import fcntl
    except ImportError:  # elsewhere two may do the same
        pass
    else:
        name = sha256(str(_source("sim.cost.recurrence")).encode()).hexdigest()[:16]
        lock = (Path(tempfile.gettempdir()) / f"motley-{os.getuid()}-{name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return BUSY
        os.nice(5)
    _estimate_once()
    _estimate_exactly()
    # What numba found to be good for the sources is not written anew, though these may be newer: a checkout gives them its time.
    for file in (*_kept(*ESTIMATED), *_kept(*EXACT)):
        file.touch()
    return 0


MODEL = "gpt3-125m"


def _node(name: str) -> Node:
    """A node of the small clusters below."""
    return Node(name, gpu_kind("A100-80GB-SXM"), 4, Intra("nvlink", 300e9), Nic("infiniband", 25e9))


@cache
def _estimate_once() -> None:
    """Nothing; has the arithmetic compiled, or what was compiled loaded, by the estimate of a small plan."""
    job, cluster = Job(transformer(MODEL), 512, 4), Cluster("one", (_node("a"),))
    stages = [[Stage((Replica((f"a/{2 * p + s}",), 1),), ((6 * s, 6 * s + 6),)) for s in range(2)] for p in range(2)]
    pipelines = tuple(Pipeline(1, 2, tuple(own)) for own in stages)
    Estimates(cluster, job).iteration_s(Plan(cluster.name, MODEL, 512, 4, pipelines))


@cache
def _estimate_exactly() -> None:
    """The same for exact estimates, by a plan whose messages meet: forward to one stage and back to another on one way."""
    cluster = Cluster("two", (_node("a"), _node("b")))
    stages = tuple(Stage((Replica((name,), 1),), ((4 * s, 4 * s + 4),)) for s, name in enumerate(("a/0", "b/0", "a/1")))
    Estimate(Plan(cluster.name, MODEL, 512, 4, (Pipeline(1, 4, stages),)), cluster).iteration_s()


if __name__ == "__main__":
    sys.exit(main())
