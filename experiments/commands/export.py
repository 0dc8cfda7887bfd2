"""`motley export`: a plan in the words of another training system."""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.commands.options import PlanFile, errors_about, files_behind
from experiments.exits import NO_ANSWER, tell_error
from experiments.exports import SYSTEMS
from experiments.exports import export as exported
from experiments.output import STANDARD_OUTPUT, outputs
from sim.spec.compile import lanes_of
from sim.spec.plan import read_plan

System = Annotated[str, typer.Option("--to", metavar="SYSTEM", help=f"One of {', '.join(SYSTEMS)}.")]
ExportFile = Annotated[str, typer.Option("--out", metavar="FILE", help="Write it there; '-' is standard output.")]


def export(plan: PlanFile, to: System, out: ExportFile = STANDARD_OUTPUT) -> None:
    """Say a plan in the words of another training system.

    Writes the launch flags or the configuration file of Megatron-LM,
    torchtitan, DeepSpeed or HexiScale. What the system does otherwise than
    the plan, and what has to be set elsewhere, is told in one line each.
    See docs/export.md. Exit code 1: the system has nothing that would be
    this plan; the reasons are told, and nothing is written.

    Example:

      motley export plan.json --to megatron --out launch.sh
    """
    files = outputs({"--out": out}, inputs=[plan])
    what = read_plan(plan)
    files.spare(files_behind(None, what.model))
    with errors_about(plan):
        lanes_of(what)  # a plan that cannot be compiled is nobody's
    found = exported(what, to)
    if found.text is None:
        tell_error(f"{plan} cannot be exported to {to}; nothing was written")
        for reason in found.refused:
            tell_error(reason)
        raise typer.Exit(NO_ANSWER)
    files.write("--out", found.text)
    for line in found.differs:
        files.say(f"differs: {line}")
    for line in found.by_hand:
        files.say(f"by hand: {line}")
    files.finish()
