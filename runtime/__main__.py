"""`python -m runtime PLAN ...`: starts a plan's workers on this machine, or, under torchrun, is one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from runtime.launch import RunFailed, launch_lines, launch_locally, nodes_of, ranked_devices
from runtime.options import parse
from runtime.settings import Settings, check_runnable, with_model
from runtime.testbed import enter, find
from runtime.watch import Failure, Watch, let_first_tell, tell
from sim.spec.plan import Plan, read_plan
from sim.spec.program import Program
from sim.spec.reading import InputError


def main(words: Sequence[str]) -> int:
    """The exit code of a run with this command line: 0, 2 for bad input, 3 for a failure, 130 for an interruption."""
    is_worker = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        path, model, settings = parse(words)
        plan = with_model(read_plan(path), model, settings.precision)
        if not is_worker:
            launch_locally(path, plan, settings, model)
            return 0
        program = check_runnable(plan, settings)
        _check_world(plan, path, settings, model)
    except InputError as error:
        return _refuse(str(error)) if is_worker else _fail(str(error), 2)
    except RunFailed as failed:
        return _fail(failed.message, failed.code)
    except KeyboardInterrupt:
        return 130
    _work(plan, program, settings)
    return 0


def _work(plan: Plan, program: Program, settings: Settings) -> None:
    """Nothing; trains as the worker of this process's rank."""
    rank = int(os.environ["RANK"])
    device = ranked_devices(plan)[rank]
    if settings.testbed is not None:
        enter(find(settings.testbed).device(device))  # before there are other threads, which would stay behind
    lane = next(lane for lane in program.lanes if device in lane.devices)
    watch = Watch(rank, device, lane.name, settings.timeout_s, alone=len(plan.devices) == 1)
    watch.start()

    def work() -> None:
        from runtime.training import train  # here, so that whatever goes wrong in it is told, too

        train(plan, settings, watch)

    watch.guard(work)


def _check_world(plan: Plan, path: str, settings: Settings, model: str | None) -> None:
    """Nothing. Raises InputError unless there is one worker for each device of the plan."""
    devices, workers = len(plan.devices), os.environ["WORLD_SIZE"]
    if workers != str(devices):
        lines = launch_lines(plan, path, settings, model)
        shown = lines[0][1] if len(lines) == 1 else "; ".join(f"on {node}: {line}" for node, line in lines)
        raise InputError(f"the plan has {devices} device{'s'[: devices > 1]}, but WORLD_SIZE is {workers}; start it with {shown}")
    here, rank = int(os.environ.get("LOCAL_WORLD_SIZE", devices)), int(os.environ["RANK"])
    if here < devices:
        node, held = next((node, held) for node, held in nodes_of(plan) if ranked_devices(plan)[rank] in held)
        if len(held) != here:
            raise InputError(f"the plan has {len(held)} devices on {node}, but {here} workers were started there")


def _refuse(message: str) -> int:
    """The exit code for a mistake that a worker finds before it knows what it is to do."""
    rank = int(os.environ["RANK"])
    let_first_tell(rank)
    tell(Failure(rank, f"rank {rank}", "", 2, message, time.time(), follows=False))
    return 2


def _fail(message: str, code: int) -> int:
    """The exit code, after printing the message."""
    print(f"motley: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if "RANK" in os.environ:
        # All is written; a thread of torch's that outlives its process group may abort a worker that takes itself down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
