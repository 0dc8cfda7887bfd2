"""`motley list`: what is known by name, so that nobody has to guess a name or read a catalogue's file."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from experiments.output import outputs
from experiments.tables import cells_table

What = Annotated[str, typer.Argument(metavar="WHAT", help="gpus, models, planners, stacks.", show_default=False)]
RowsFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all figures as JSON, a row each; '-' is standard output.", show_default=False
    ),
]


def list_(what: What, json_file: RowsFile = None) -> None:
    """List what is known by name: GPU kinds, models, planners, stacks.

    Names that clusters, plans and the other commands accept, with their main
    figures. --json has all of them, with sources.

    Examples:

      motley list gpus

      motley list models --json models.json
    """
    from experiments.catalogue import sort_named  # which reads all catalogues

    found = sort_named(what)
    files = outputs({"--json": json_file})
    files.write("--json", "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in found.rows()) + "\n]\n")
    files.console.print(cells_table(found.title, found.cells()))
    files.finish()
