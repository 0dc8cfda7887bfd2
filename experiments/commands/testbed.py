"""`motley testbed`: a cluster on one Linux machine, of network namespaces and links of shaped rates; up, down, list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.exits import tell_error
from runtime import testbed as testbeds
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.reading import InputError

testbed = typer.Typer(
    help="Sets up a cluster on this machine, as network namespaces and links of shaped rates.",
    epilog="Example: motley testbed up examples/testbeds/two-sites.yaml",
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The cluster, a YAML file.", show_default=False)]
NewName = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="In the place of the cluster's name.", show_default=False)
]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The testbed's name.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All testbeds, what a crash left included.", show_default=False)]


@testbed.command()
def up(file: File, name: NewName = None) -> None:
    """Set up a testbed: a namespace for each node and GPU, and links with the cluster's rates.

    Needs root, or a user namespace, and the commands ip, tc and bridge.
    motley run --testbed NAME runs there.

    Example:

      motley testbed up examples/testbeds/two-sites.yaml
    """
    made = testbeds.up(file, name)
    cluster = read_cluster(made.cluster_file)
    print(f"{made.name}: {_shape(cluster)}; motley run PLAN --testbed {made.name} runs there")
    for line in left_out(cluster):
        tell_error(f"note: {line}")


@testbed.command()
def down(name: Name = None, everything: All = False) -> None:
    """Remove a testbed, or all, with what runs there.

    Finds what a crash left behind, too.

    Example:

      motley testbed down two-sites
    """
    if everything == (name is not None):
        raise InputError("name the testbed to remove, or say --all" + ("" if name is None else ", but not both"))
    known = testbeds.names()
    for one in known if name is None else [name]:
        if not testbeds.down(one):
            raise InputError(f"there is no testbed {one!r}; " + (f"there are {', '.join(known)}" if known else "there is none"))
        print(f"{one}: removed")
    if everything and not known:
        print("there is no testbed")


@testbed.command("list")
def list_testbeds() -> None:
    """List the testbeds of this machine, what a crash left included."""
    known = testbeds.names()
    for name in known:
        try:
            found = testbeds.find(name)
            broken = testbeds.broken_links(found)
            state = f"down: {', '.join(broken)}; " if broken else ""
            print(f"{name}: {_shape(read_cluster(found.cluster_file))}; {state}from {found.source}")
        except InputError as error:
            print(f"{name}: {error}")
    if not known:
        print("there is no testbed")


def _shape(cluster: Cluster) -> str:
    """The sizes of a cluster, in words."""
    sites = len({node.site for node in cluster.nodes})
    counts = ((len(cluster.devices), "GPU"), (len(cluster.nodes), "node"), (sites, "site"))
    gpus, nodes, places = (f"{count} {word}{'s'[: count != 1]}" for count, word in counts)
    return f"{gpus} on {nodes} at {places}"


FASTEST_BYTES_PER_S = 250e6
"""A rate that TCP holds between processes of a machine of two cores beside their work (2 Gbit/s)."""


def left_out(cluster: Cluster) -> list[str]:
    """What of a cluster its testbed does not have, one line each."""
    lines = []
    fast = [f"{n.name} inside" for n in cluster.nodes if n.gpus > 1 and n.intra.bandwidth_bytes_per_s > FASTEST_BYTES_PER_S]
    fast += [f"nic of {n.name}" for n in cluster.nodes if n.nic is not None and n.nic.bandwidth_bytes_per_s > FASTEST_BYTES_PER_S]
    fast += [f"{' - '.join(wan.between)}" for wan in cluster.wan if wan.bandwidth_bytes_per_s > FASTEST_BYTES_PER_S]
    if fast:
        shown = ", ".join(fast[:3]) + (f" and {len(fast) - 3} more" if len(fast) > 3 else "")
        lines.append(f"TCP on one machine may not reach the rates of {shown}; a testbed is meant for links of up to 2 Gbit/s")
    if any(node.nic is not None and node.nic.kind != "ethernet" for node in cluster.nodes):
        lines.append("all cards are Ethernet here; simulate with the protocol_efficiency of ethernet for the others, too")
    lines.append("latencies inside a site are those of this machine's processes, about 0.2 ms; wide-area links have their own")
    return lines
