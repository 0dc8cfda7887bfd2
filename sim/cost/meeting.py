"""What transfers that meet take from one another: the chain of an estimate followed from one event to the next, compiled.

Every end is known as soon as the two are that it waits for, and may lie ahead of the moment that has been reached. Transfers that
can meet begin and end at such moments: whenever one does, those that it shares links with, directly or through others, get
their max-min fair rates anew, as in the simulation (`sim.cost.sharing`). Work has a transfer beside its computation, which begins
with it, and one that follows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from sim.cost.network import Transfer
from sim.cost.recurrence import Floats, Ints, compiled, shared_rates
from sim.cost.sharing import routes, slowest_bytes

NONE = -1
"""In the place of the number of a form: there is none."""


class Routes(NamedTuple):
    """What the transfers of each form use of those links that they could fill together, which have numbers of their own here."""

    first: Ints
    """Of each form: its first entry in `link` and `use`; the next form's is its end. A form without any meets no other."""
    link: Ints
    use: Floats
    """The part of the link's capacity for each byte/s of the form's rate."""
    alone_bytes_per_s: Floats
    """Of each form, its rate while it meets no other, on its slowest link."""
    users_first: Ints
    """Of each link: its first entry in `users`, the forms that use it; the next link's is its end."""
    users: Ints


def find_routes(
    members: Sequence[Sequence[Transfer]], streams: Sequence[frozenset[object]], capacities: Sequence[float]
) -> Routes:
    """The routes of some forms, each the same transfer of several lanes at once; those that share a stream never meet."""
    alike: dict[object, list[int]] = {}
    for form, (transfers, stream) in enumerate(zip(members, streams, strict=True)):
        alike.setdefault((stream, *map(id, transfers)), []).append(form)
    firsts = [forms[0] for forms in alike.values()]
    found = routes(
        [_all_of(members[form]) for form in firsts],
        capacities,
        [slowest_bytes(members[form][0], capacities) for form in firsts],
    )
    # How full a link can be: of every stream one form at a time is under way, at most at the rate that it has alone.
    fullest: dict[int, dict[frozenset[object], float]] = {}
    for form, route in zip(firsts, found, strict=True):
        for link, share in route.shares:
            by_stream = fullest.setdefault(link, {})
            part = share * route.alone_bytes_per_s / capacities[link]
            by_stream[streams[form]] = max(by_stream.get(streams[form], 0.0), part)
    full = [link for link, by_stream in fullest.items() if len(by_stream) > 1 and sum(by_stream.values()) > 1 + 1e-9]
    numbers = {link: number for number, link in enumerate(full)}
    parts: list[list[tuple[int, float]]] = [[] for _ in members]
    alone = np.ones(len(members))
    users: list[list[int]] = [[] for _ in full]
    for forms, route in zip(alike.values(), found, strict=True):
        used = [(numbers[link], share / capacities[link]) for link, share in route.shares if link in numbers]
        for form in forms:
            if used:
                parts[form], alone[form] = used, route.alone_bytes_per_s
            for link, _ in used:
                users[link].append(form)
    return Routes(
        _firsts(parts),
        np.array([link for part in parts for link, _ in part], np.int64),
        np.array([use for part in parts for _, use in part]),
        alone,
        _firsts(users),
        np.array([form for forms in users for form in forms], np.int64),
    )


def _all_of(transfers: Sequence[Transfer]) -> Transfer:
    """Some transfers that are under way together, as one."""
    loads: dict[int, float] = {}
    for transfer in transfers:
        for link, num_bytes in transfer.loads:
            loads[link] = loads.get(link, 0.0) + num_bytes
    return Transfer(tuple(loads.items()), transfers[0].latency_s, transfers[0].num_bytes)


def _firsts(lists: Sequence[Sequence[object]]) -> Ints:
    """Where each of some lists begins where they stand one after the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int64)


class Course(NamedTuple):
    """A chain as the compiled arithmetic takes it: of each link the forms of its transfers, and who waits for each end."""

    links: Ints
    """Rows of what `sim.cost.estimate.Link` says."""
    form: Ints
    """Of the transfer that the link stands for, or that follows its work."""
    beside: Ints
    """Of that which goes on beside its work."""
    waiting_first: Ints
    """Of each end: its first entry in `waiting`, the links that wait for it; the next end's is its end."""
    waiting: Ints
    meet: bool
    """Whether any of its transfers can meet others."""


def make_course(
    links: Sequence[tuple[int, int, int, int]],
    flows: Mapping[int, Sequence[int]],
    beside: Sequence[bool],
    found: Routes,
) -> Course:
    """The course of a chain. `flows`: of each form the ends of its transfers; `beside`: whether they go on beside work."""
    rows = np.array(links, np.int64).reshape(-1, 4)
    form, aside = np.full(len(rows), NONE), np.full(len(rows), NONE)
    meeting = np.zeros(len(rows), np.bool_)
    for number, ends in flows.items():
        at = np.array(ends) - 1
        (aside if beside[number] else form)[at] = number
        if found.first[number] < found.first[number + 1]:
            meeting[at] = True
    form[~meeting], aside[~meeting] = NONE, NONE
    order = np.argsort(rows[:, :2].ravel(), kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(rows[:, :2].ravel(), minlength=len(rows) + 1))])
    return Course(rows, form, aside, first.astype(np.int64), order // 2, bool(meeting.any()))


@compiled
def plain_ends_s(links: Ints, durations: Floats) -> Floats:
    """All ends of a chain whose links take what they take alone."""
    ends = np.empty(len(links) + 1)
    ends[0] = 0.0
    for n in range(len(links)):
        ends[n + 1] = max(ends[links[n, 0]] + durations[links[n, 2]], ends[links[n, 1]] + durations[links[n, 3]])
    return ends


@compiled
def met_ends_s(
    course: Course, found: Routes, durations: Floats, computing_s: Floats, wire_s: Floats, late_s: Floats
) -> tuple[Floats, Floats]:
    """All ends of a chain whose transfers share their links with those that they meet; by how much each link takes longer so.

    `durations` and `computing_s` are by number: of a link as if its transfers were alone, and of the computation of its work.
    By form: `wire_s`, what a transfer takes on its links among those that are one with it, and `late_s` from then until the last
    byte has arrived.
    """
    links, form, beside, waiting_first, waiting, _ = course
    route_first, route_link, route_use, alone, users_first, users = found
    count, forms, meeting_links = len(links), len(wire_s), len(users_first) - 1
    ends, further, begun_s = np.full(count + 1, np.nan), np.zeros(count), np.empty(count)
    missing, known, told = np.full(count, 2), np.empty(count + 1, np.int64), 1
    ends[0], known[0] = 0.0, 0
    under_way, rate, left_s, since_s = np.zeros(forms, np.bool_), np.zeros(forms), np.zeros(forms), np.zeros(forms)
    version, at = np.zeros(forms, np.int64), np.zeros(forms, np.int64)
    left, load = np.empty(meeting_links), np.empty(meeting_links)
    together, inside, looked = np.empty(forms, np.int64), np.zeros(forms, np.bool_), np.zeros(meeting_links, np.bool_)
    before = np.empty(forms)
    # Of a transfer that begins: its link, twice, and one more if it goes on beside work; of one that ends: -1 - its form.
    events = [(0.0, 0, 0)]
    heappop(events)
    while True:
        while told:
            told -= 1
            end = known[told]
            for w in range(waiting_first[end], waiting_first[end + 1]):
                n = waiting[w]
                missing[n] -= 1
                if missing[n]:
                    continue
                planned_s = max(ends[links[n, 0]] + durations[links[n, 2]], ends[links[n, 1]] + durations[links[n, 3]])
                if form[n] == NONE and beside[n] == NONE:
                    ends[n + 1] = planned_s
                    known[told] = n + 1
                    told += 1
                    continue
                further[n] = planned_s
                begun_s[n] = planned_s - durations[links[n, 2]]
                if beside[n] != NONE:
                    heappush(events, (begun_s[n], 2 * n + 1, 0))
                else:
                    heappush(events, (begun_s[n] + computing_s[links[n, 2]], 2 * n, 0))
        if len(events) == 0:
            return ends, further
        now_s, met = events[0][0], 0
        while len(events) and events[0][0] <= now_s:
            _, what, made = heappop(events)
            f = (beside[what // 2] if what % 2 else form[what // 2]) if what >= 0 else -1 - what
            if what < 0 and version[f] != made:
                continue
            if (what < 0 or wire_s[f] > 0) and not inside[f]:
                inside[f], together[met] = True, f
                met += 1
            if what >= 0 and wire_s[f] > 0:
                under_way[f], left_s[f], since_s[f], rate[f], at[f] = True, wire_s[f], now_s, 0.0, what
                continue
            if what < 0:
                under_way[f], what = False, at[f]
            n = what // 2
            if what % 2:
                follows_s = max(begun_s[n] + computing_s[links[n, 2]], now_s + late_s[f])
                heappush(events, (follows_s, 2 * n, 0))
                continue
            ends[n + 1] = now_s + late_s[f]
            further[n] = ends[n + 1] - further[n]
            known[told] = n + 1
            told += 1
        # All that shares links with what has begun or ended, directly or through others.
        i = 0
        while i < met:
            for k in range(route_first[together[i]], route_first[together[i] + 1]):
                if not looked[route_link[k]]:
                    looked[route_link[k]] = True
                    for u in range(users_first[route_link[k]], users_first[route_link[k] + 1]):
                        if under_way[users[u]] and not inside[users[u]]:
                            inside[users[u]], together[met] = True, users[u]
                            met += 1
            i += 1
        going = 0
        for i in range(met):
            f = together[i]
            inside[f] = False
            for k in range(route_first[f], route_first[f + 1]):
                looked[route_link[k]] = False
            if under_way[f]:
                together[going], before[going] = f, rate[f]
                going += 1
        if going:
            shared_rates(going, route_first, route_link, route_use, alone, together, rate, left, load)
        for i in range(going):
            f = together[i]
            if rate[f] != before[i]:
                left_s[f] = max(0.0, left_s[f] - before[i] * (now_s - since_s[f]))
                since_s[f] = now_s
                version[f] += 1
                heappush(events, (now_s + left_s[f] / rate[f], -1 - f, version[f]))
