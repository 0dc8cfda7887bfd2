"""Pace files: how long each instruction shall take to compute on each device of a plan, for runs that emulate GPUs.

    {"format": "motley-pace/1", "plan": "sha256:...",
     "seconds": {"a100/0": {"Forward 0:4": 0.012, "Backward 0:4": 0.024, "OptimizerStep": 0.003}, ...}}

Computation alone, without the collectives inside it. The micro-batches of a lane are alike. With context parallelism
"Forward 0:4, beside its ring" are those of an instruction's seconds in which it works while keys and values go round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sim.spec.plan import Plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Lane,
    OptimizerStep,
    Program,
)
from sim.spec.reading import InputError, Table, read_json

FORMAT = "motley-pace/1"

PACED = (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)
"""The instructions that a pace file gives a time to."""


def plan_digest(plan: Plan) -> str:
    """What a pace file knows its plan by: the SHA-256 of its text."""
    return f"sha256:{hashlib.sha256(plan.to_json().encode()).hexdigest()}"


def pace_key(instruction: Compute | OptimizerStep, sequence_slices: int = 1) -> str:
    """The name of a lane's instruction in a pace file, the same for all micro-batches: `Forward 0:4`, `OptimizerStep`.

    Where sequences come in so many slices, these have their places: `Forward 0:4, slice 1`.
    """
    if isinstance(instruction, OptimizerStep):
        return "OptimizerStep"
    start, stop = instruction.layers
    place = f", slice {instruction.micro_batch % sequence_slices}" if sequence_slices > 1 else ""
    return f"{type(instruction).__name__} {start}:{stop}{place}"


def ring_key(key: str) -> str:
    """The name of what of an instruction, of this name, goes on while keys and values come round."""
    return f"{key}, beside its ring"


def has_ring(lane: Lane, instruction: Instruction) -> bool:
    """Whether keys and values go round in an instruction of a lane."""
    return lane.context_parallel > 1 and isinstance(instruction, (Forward, Backward, BackwardInput))


def paced_instructions(lane: Lane) -> Mapping[str, Instruction]:
    """An instruction of a lane for each of its names in a pace file, in the order in which they first come."""
    found: dict[str, Instruction] = {}
    for instruction in lane.instructions:
        if isinstance(instruction, PACED):
            found.setdefault(pace_key(instruction, lane.sequence_slices), instruction)
    return found


@dataclass(frozen=True)
class Pace:
    """Seconds of computation by device and instruction (`pace_key`), for the plan of this digest."""

    plan: str
    seconds: Mapping[str, Mapping[str, float]]

    def to_json(self) -> str:
        """The text of the file that `read_pace` reads."""
        rows = [f"    {json.dumps(device)}: {json.dumps(dict(times))}" for device, times in self.seconds.items()]
        head = f'{{\n  "format": "{FORMAT}",\n  "plan": {json.dumps(self.plan)},\n  "seconds": {{\n'
        return head + ",\n".join(rows) + "\n  }\n}\n"


def read_pace(path: str | Path, plan: Plan, program: Program) -> Pace:
    """The pace of a file, for this plan. Raises InputError for one of another plan, and where an instruction has no time."""
    table = Table(read_json(path), str(path))
    table.choice("format", [FORMAT])
    digest, devices = table.text("plan"), table.table("seconds")
    if digest != plan_digest(plan):
        raise InputError(f"{path}: is the pace of another plan; write it anew for this one")
    seconds: dict[str, dict[str, float]] = {}
    for lane in program.lanes:
        wanted = paced_instructions(lane)
        for device in lane.devices:
            times = devices.table(device)
            found = seconds[device] = {}
            for key, instruction in wanted.items():
                found[key] = times.number(key)
                if has_ring(lane, instruction):
                    found[ring_key(key)] = times.number(ring_key(key), maximum=found[key])
            times.close()
    devices.close()
    table.close()
    return Pace(digest, seconds)
