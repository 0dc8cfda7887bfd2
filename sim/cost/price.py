"""What an iteration costs besides time: energy and money. All GPUs of the cluster count, also those that a plan leaves unused."""

from __future__ import annotations

from collections.abc import Mapping

from sim.spec.cluster import Cluster


def energy_j(cluster: Cluster, iteration_s: float, busy_s: Mapping[str, float]) -> float:
    """Joules that the cluster's GPUs take in one iteration, given each device's busy seconds (0 where it is not named).

    A GPU takes its kind's busy power while it computes, and its idle power in the rest of the iteration, also while it waits
    for a transfer. Hosts, switches and cooling are left out.
    """
    total = 0.0
    for device in cluster.devices:
        busy = busy_s.get(device.name, 0.0)
        total += device.gpu.busy_watts * busy + device.gpu.idle_watts * (iteration_s - busy)
    return total


def dollars(cluster: Cluster, iteration_s: float) -> float | None:
    """Rent of the cluster's GPUs for one iteration, in $; None where no GPU of it has a price.

    A whole cluster is rented, so unused GPUs are paid for. GPUs without a price count 0, which makes this a lower bound where
    some have one and others have none.
    """
    prices = [device.gpu.dollars_per_hour for device in cluster.devices]
    known = [price for price in prices if price is not None]
    return sum(known) * iteration_s / 3600 if known else None
