"""Judges and their verdicts: what a search asks, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sim.spec.plan import Plan

REASONS = ("memory", "precision", "heads", "batch", "devices")


@dataclass(frozen=True)
class Cost:
    """What one iteration of a feasible plan costs. Fractions between 0 and 1; what they count is said in docs/design.md."""

    iteration_s: float
    tokens_per_s: float
    mfu: float
    mfu_used: float
    hfu: float
    bubble: float
    peak_bytes: Mapping[str, int]
    energy_j: float
    dollars: float


@dataclass(frozen=True)
class Infeasible:
    """Why a plan cannot run: an answer, not an error. Bytes are None where memory is not the reason.

    There is no device where no single GPU is the reason, as where a host has too little memory.
    """

    device: str | None
    reason: str
    need_bytes: int | None
    have_bytes: int | None
    message: str

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"a reason is one of {', '.join(REASONS)}, but got {self.reason!r}")


Verdict: TypeAlias = Cost | Infeasible


class Judge(Protocol):
    """Maps a plan to a verdict; made for one cluster and one job."""

    def __call__(self, plan: Plan) -> Verdict:
        """What an iteration of the plan costs, or why it cannot run."""
        ...


@dataclass(frozen=True)
class Forecast:
    """A judge whose verdicts depend on the plan alone, and that leaves no trace: several processes may ask it side by side."""

    verdict: Callable[[Plan], Verdict]

    def __call__(self, plan: Plan) -> Verdict:
        """What an iteration of the plan costs, or why it cannot run."""
        return self.verdict(plan)
