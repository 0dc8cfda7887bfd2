"""How transfers that are under way at once share the links: max-min fairness of coupled flows.

A transfer loads several links in fixed proportion and goes at one rate. Rates are raised together until a link is full; the
transfers on it are fixed there, and the others go on rising (progressive filling; Bertsekas & Gallager, Data Networks,
section 6.5.2). For transfers that put the same bytes on every link of a path this is the textbook max-min fairness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sim.cost.network import Transfer


@dataclass(frozen=True)
class Route:
    """A transfer as the sharing sees it. Its rate is in bytes/s on its slowest link, where it has `size_bytes` to move.

    The slowest link is the one that takes longest to carry the transfer's bytes alone: two transfers that meet on the link
    that slows them both get half of it each, whatever they carry on faster ones.

    `shares` are (link, bytes there per byte on the slowest link).
    """

    shares: tuple[tuple[int, float], ...]
    size_bytes: float
    alone_bytes_per_s: float
    latency_s: float

    @cached_property
    def links(self) -> tuple[int, ...]:
        """The links of its shares."""
        return tuple([link for link, _ in self.shares])


def slowest_bytes(transfer: Transfer, capacities: Sequence[float]) -> float:
    """The bytes of a transfer on its slowest link."""
    longest_s = max((num_bytes / capacities[link] for link, num_bytes in transfer.loads), default=0.0)
    # Of links that are equally slow the one with most bytes; nearly equal counts as equal, so that rounding cannot choose.
    nearly_s = longest_s * (1 - 1e-9)
    return max((num_bytes for link, num_bytes in transfer.loads if num_bytes / capacities[link] >= nearly_s), default=0.0)


def routes(transfers: Sequence[Transfer], capacities: Sequence[float], sizes_bytes: Sequence[float] | None = None) -> list[Route]:
    """The routes of all transfers that can be under way together, without the links that can never decide a rate.

    A link is left out where another one is at least as heavily loaded by every transfer, in parts of its capacity: the
    rates that the other allows, it allows too, so that the result stays exactly the same. A transfer may stand for several
    that are alike and under way at the same times; its loads are then of all of them, and `sizes_bytes`, for each transfer,
    what one of them has on its own slowest link.
    """
    if sizes_bytes is None:
        sizes_bytes = [slowest_bytes(transfer, capacities) for transfer in transfers]
    by_link: dict[int, dict[int, float]] = {}
    for t, transfer in enumerate(transfers):
        for link, num_bytes in transfer.loads:
            by_link.setdefault(link, {})[t] = num_bytes / capacities[link]
    heaviest = [max((by_link[link][t] for link, _ in transfer.loads), default=0.0) for t, transfer in enumerate(transfers)]
    kept: list[int] = []
    by_users: dict[frozenset[int], list[int]] = {}
    for link in sorted(by_link):
        by_users.setdefault(frozenset(by_link[link]), []).append(link)
    for users, links in by_users.items():
        if len(users) == 1:  # of one transfer's own links the first of the slowest
            (only,) = users
            kept.append(max(links, key=lambda link: by_link[link][only]))
            continue
        for i, link in enumerate(links):
            load = by_link[link]
            dominated = any(
                all(by_link[other][t] > load[t] or (by_link[other][t] == load[t] and j < i) for t in users)
                for j, other in enumerate(links)
                if j != i
            )
            if not dominated:
                kept.append(link)
    # A link that one transfer alone uses matters only if it is that transfer's slowest.
    single_slowest: set[int] = set()
    decided = {t for link in kept if len(by_link[link]) > 1 for t in by_link[link] if by_link[link][t] >= heaviest[t]}
    for link in kept:
        if len(by_link[link]) == 1:
            ((t, alone_load),) = by_link[link].items()
            if alone_load >= heaviest[t] and t not in decided:
                single_slowest.add(link)
                decided.add(t)
    useful = {link for link in kept if len(by_link[link]) > 1} | single_slowest
    result = []
    for t, transfer in enumerate(transfers):
        size = sizes_bytes[t]
        shares = tuple((link, num_bytes / size) for link, num_bytes in transfer.loads if link in useful)
        alone = size / heaviest[t] if heaviest[t] else float("inf")
        result.append(Route(shares, size, alone, transfer.latency_s))
    return result


def max_min_rates(flows: Sequence[Route], capacities: Sequence[float]) -> list[float]:
    """The max-min fair rate of each flow, in bytes/s on its slowest link."""
    rates = [route.alone_bytes_per_s for route in flows]
    users: dict[int, list[int]] = {}
    weight: dict[int, float] = {}
    for f, route in enumerate(flows):
        for link, share in route.shares:
            if link in users:
                users[link].append(f)
                weight[link] += share
            else:
                users[link], weight[link] = [f], share
    left = {link: capacities[link] for link in users}
    rising_on = {link: len(on_link) for link, on_link in users.items()}
    rising = {f for f, route in enumerate(flows) if route.shares}
    level = 0.0
    while rising:
        levels = {link: left[link] / weight[link] for link, count in rising_on.items() if count}
        # Never below the level before, which only rounding could bring about: no flow may come to a standstill.
        level = max(level, min(levels.values()))
        # Every link that is full at this level fixes its flows; nearly full counts as full, so that rounding cannot loop.
        nearly = level * (1 + 1e-12)
        fixed = sorted({f for link, full_at in levels.items() if full_at <= nearly for f in users[link] if f in rising})
        for f in fixed:
            rate = rates[f] = min(level, rates[f])
            rising.discard(f)
            for link, share in flows[f].shares:
                rising_on[link] -= 1
                left[link] = max(0.0, left[link] - rate * share)
                weight[link] -= share
    return rates
