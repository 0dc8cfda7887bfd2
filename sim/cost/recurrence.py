"""The arithmetic of `sim.cost.estimates`, compiled: transfers on paths, the pipelines' recurrence, exchanges of gradients.

Everything is numbers here: devices, links, nodes and lanes by their places in tables, which `sim.cost.estimates` fills from
`sim.cost.network`, `sim.cost.traffic` and `sim.cost.compute`. Rules that are told there are only followed here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class World(NamedTuple):
    """The network by numbers. Devices are numbered in the order in which a ring visits them, and so are their nodes."""

    node: Ints
    """Of each device."""
    nic: Ints
    """Of each device; -1 where its node has none."""
    flags: NDArray[np.bool_]
    """Of each device, whether its collectives have a protocol of low latency."""
    path: Ints
    """[a, b]: the path from device a to device b, -1 where it has not been asked for."""
    first: Ints
    """Of each path: its first entry in `link` and `weight`; the next path's is its end."""
    link: Ints
    weight: Floats
    latency_s: Floats
    step_s: Floats
    capacity: Floats
    """Of each link, bytes/s."""
    asked: Ints
    """How many paths were missing, and then, as far as there is room, between which two devices each."""


class Tables(NamedTuple):
    """What lanes refer to by number."""

    record: Floats
    """[r]: forward_s, backward_s, optimizer_s, bytes at the peak of a stage."""
    part_first: Ints
    """Of each list of parts: its first entry in `part_s`; the next list's is its end."""
    part_s: Floats
    """Seconds of the parts of the last micro-batch's backward, the last layers first."""
    group_first: Ints
    """Of each tensor-parallel group: its first entry in `device`; the next group's is its end."""
    device: Ints
    capacity_bytes: Floats
    """Of each group, on the device that has the least."""


class Sizes(NamedTuple):
    """Bytes of what is sent and exchanged in a plan's job and settings, and what its software stack does to them."""

    layers: int
    boundary_bytes: float
    """Of the activation of one sequence between two layers."""
    layer_gradient_bytes: float
    embedding_gradient_bytes: float
    head_gradient_bytes: float
    layer_parameter_bytes: float
    embedding_parameter_bytes: float
    head_parameter_bytes: float
    start_s: float
    collective_scale: float
    per_bucket: int
    sequence_parallel: bool
    warm_up: int
    """Forwards before the first backward, for each stage that follows; 0: all."""
    overlap: bool
    gathers: bool
    tied: bool


RECORD, GROUP, PARTS, START, STOP, FROM, TO, PLACE = range(8)
"""Columns of a lane: its record, group and list of parts (-1: the backward is not divided), its layers, its share of the
sequences, and the place of its stage in the pipeline."""

FLAGGED_BYTES = 2.0

LEAST_SHARE = 0.03
"""The least share of a link's capacity at which a transfer is seen to use it."""

ATTEMPTS, MANY_EDGES = 3, 32
"""How often pipelines are followed where messages meet; where there are more pairs of neighbours than this, twice."""

STRETCHES, STRETCH = 3, 4.0
"""In how many stretches of time, of how many micro-batches each, it is seen which messages meet."""


# --- Transfers -------------------------------------------------------------------------------------------------------


@njit(cache=True)
def _move(
    paths: Ints,
    first: Ints,
    link: Ints,
    weight: Floats,
    asked: Ints,
    load: Floats,
    touched: Ints,
    count: int,
    a: int,
    b: int,
    num_bytes: float,
) -> tuple[int, int]:
    """Puts the bytes of one move on its links; the new count of touched links, and the path (-1: missing)."""
    path = paths[a, b]
    if path < 0:
        n = asked[0]
        if 2 * n + 2 < len(asked):
            asked[2 * n + 1], asked[2 * n + 2], asked[0] = a, b, n + 1
        return count, 0
    for i in range(first[path], first[path + 1]):
        here = link[i]
        if load[here] == 0.0:
            touched[count] = here
            count += 1
        load[here] += num_bytes * weight[i]
    return count, path


@njit(cache=True)
def _ring(
    node_of: Ints,
    nic_of: Ints,
    paths: Ints,
    first: Ints,
    link: Ints,
    weight: Floats,
    latency: Floats,
    step: Floats,
    asked: Ints,
    load: Floats,
    touched: Ints,
    count: int,
    devices: Ints,
    order: Ints,
    n: int,
    num_bytes: float,
) -> tuple[int, float, float]:
    """Puts a ring in which each byte goes round once on its links, as `sim.cost.collectives`.

    Links touched, latencies of its paths and of its steps. The first n devices are sorted here, and then stand node by node;
    `order` is room for as many.
    """
    for i in range(1, n):
        moved, j = devices[i], i
        while j > 0 and devices[j - 1] > moved:
            devices[j] = devices[j - 1]
            j -= 1
        devices[j] = moved
    nodes, rings, nics, begin = 0, n, 0, 0
    for i in range(n):
        if i == 0 or node_of[devices[i]] != node_of[devices[i - 1]]:
            if nodes:
                rings = min(rings, nics)
            nodes, nics, begin = nodes + 1, 0, i
        new = True
        for j in range(begin, i):
            new = new and nic_of[devices[j]] != nic_of[devices[i]]
        nics += new
    rings = 1 if nodes == 1 else min(rings, nics)
    each = num_bytes * (n - 1) / n / rings
    worst_latency_s, worst_step_s = 0.0, 0.0
    for r in range(rings):
        begin = 0
        while begin < n:
            end = begin + 1
            while end < n and node_of[devices[end]] == node_of[devices[begin]]:
                end += 1
            held = end - begin
            at = r * held // rings if nodes > 1 else 0
            for i in range(held):
                order[begin + i] = devices[begin + (at + i) % held]
            begin = end
        latency_s, step_s, least_latency_s, least_step_s = 0.0, 0.0, np.inf, np.inf
        for i in range(n):
            a, b = order[i], order[i + 1 if i + 1 < n else 0]
            count, path = _move(paths, first, link, weight, asked, load, touched, count, a, b, each)
            hop_s, more_s = latency[path], step[path]
            latency_s, step_s = latency_s + hop_s, step_s + more_s
            least_latency_s, least_step_s = min(least_latency_s, hop_s), min(least_step_s, more_s)
        worst_latency_s = max(worst_latency_s, latency_s - least_latency_s)
        worst_step_s = max(worst_step_s, step_s - least_step_s)
    return count, worst_latency_s, worst_step_s


@njit(cache=True)
def _message(
    node_of: Ints,
    nic_of: Ints,
    paths: Ints,
    first: Ints,
    link: Ints,
    weight: Floats,
    latency: Floats,
    step: Floats,
    asked: Ints,
    load: Floats,
    touched: Ints,
    one: Ints,
    other: Ints,
    room: Ints,
    num_bytes: float,
    start_s: float,
    sequence_parallel: bool,
) -> tuple[int, float]:
    """Puts a message between two groups on its links, as `sim.cost.collectives.between_lanes`; links touched, and latency.

    `room` is for three times as many devices as a group has.
    """
    count, latency_s, step_s = 0, 0.0, 0.0
    have, held = len(one), len(other)
    if sequence_parallel or (have == 1 and held == 1):
        of = have * held // math.gcd(have, held)
        for k in range(of):
            a, b = one[k * have // of], other[k * held // of]
            count, path = _move(paths, first, link, weight, asked, load, touched, count, a, b, num_bytes / of)
            latency_s, step_s = max(latency_s, latency[path]), max(step_s, step[path])
        return count, start_s + latency_s + step_s
    gather_s = 0.0
    third = len(room) // 3
    having, group, order = room[:third], room[third : 2 * third], room[2 * third :]
    for i in range(held):
        node = node_of[other[i]]
        seen = False
        for j in range(i):
            seen = seen or node_of[other[j]] == node
        if seen:
            continue
        here = there = 0
        for j in range(i, held):
            if node_of[other[j]] == node:
                group[there] = other[j]
                there += 1
        for j in range(have):
            if node_of[one[j]] == node:
                having[here] = one[j]
                here += 1
        if here == 0:
            here = have
            for j in range(have):
                having[j] = one[j]
        pieces = here * there // math.gcd(here, there)
        for k in range(pieces):
            a, b = having[k % here], group[k % there]
            count, path = _move(paths, first, link, weight, asked, load, touched, count, a, b, num_bytes / pieces)
            latency_s, step_s = max(latency_s, latency[path]), max(step_s, step[path])
        if there > 1:
            count, hop_s, more_s = _ring(
                node_of,
                nic_of,
                paths,
                first,
                link,
                weight,
                latency,
                step,
                asked,
                load,
                touched,
                count,
                group,
                order,
                there,
                num_bytes,
            )
            gather_s = max(gather_s, start_s + hop_s + more_s)
    return count, start_s + latency_s + step_s + gather_s


@njit(cache=True)
def _across(
    node_of: Ints,
    nic_of: Ints,
    paths: Ints,
    first: Ints,
    link: Ints,
    weight: Floats,
    latency: Floats,
    step: Floats,
    asked: Ints,
    group_first: Ints,
    device: Ints,
    load: Floats,
    touched: Ints,
    groups: Ints,
    members: Ints,
    order: Ints,
    n: int,
) -> tuple[int, float, float]:
    """Puts one byte, scattered or gathered over groups of any degrees, on its links; as `sim.cost.collectives.across_lanes`.

    Links touched; latency in the protocol of low latency, and in that of full bandwidth. `members` and `order` are room for as
    many devices as groups.
    """
    of = 1
    for i in range(n):
        degree = group_first[groups[i] + 1] - group_first[groups[i]]
        of = of * degree // math.gcd(of, degree)
    count, low_s, full_s, at = 0, 0.0, 0.0, 0
    while at < of:
        stop = of
        for i in range(n):
            begin = group_first[groups[i]]
            degree = group_first[groups[i] + 1] - begin
            members[i] = device[begin + at * degree // of]
            piece = of // degree
            stop = min(stop, (at // piece + 1) * piece)
        count, latency_s, step_s = _ring(
            node_of,
            nic_of,
            paths,
            first,
            link,
            weight,
            latency,
            step,
            asked,
            load,
            touched,
            count,
            members,
            order,
            n,
            (stop - at) / of,
        )
        low_s, full_s = max(low_s, latency_s), max(full_s, latency_s + step_s)
        at = stop
    return count, low_s, full_s


@njit(cache=True)
def _exchange_s(
    start_s: float, collective_scale: float, num_bytes: float, byte_s: float, low_s: float, full_s: float, flags: bool
) -> tuple[float, float]:
    """Seconds on the wire, and of latency, of an exchange, as `sim.cost.traffic.exchange`, by the protocol that is faster."""
    wire_s, latency_s = num_bytes * byte_s, start_s + full_s
    if flags and start_s + low_s + FLAGGED_BYTES * wire_s < latency_s + wire_s:
        wire_s, latency_s = FLAGGED_BYTES * wire_s, start_s + low_s
    return wire_s / collective_scale, latency_s


# --- What is on the links --------------------------------------------------------------------------------------------


@njit(cache=True)
def _unloaded(
    capacity: Floats, load: Floats, touched: Ints, count: int, use_at: Ints, use_link: Ints, use_share: Floats, number: int
) -> tuple[float, Ints, Floats]:
    """Takes a transfer off its links, and notes it as the one of this number: for each link, the share of its capacity.

    Seconds on the link that takes longest, and the notes, which may have moved for want of room.
    """
    longest_s = 0.0
    for i in range(count):
        longest_s = max(longest_s, load[touched[i]] / capacity[touched[i]])
    at = use_at[number]
    if at + count > len(use_link):
        more = max(len(use_link), count)
        use_link = np.concatenate((use_link, np.empty(more, np.int64)))
        use_share = np.concatenate((use_share, np.empty(more)))
    for i in range(count):
        here = touched[i]
        share = load[here] / capacity[here] / longest_s
        load[here] = 0.0
        if share > LEAST_SHARE:
            use_link[at], use_share[at] = here, share
            at += 1
    use_at[number + 1] = at
    return longest_s, use_link, use_share


@njit(cache=True)
def _by_link(links: int, count: int, use_at: Ints, use_link: Ints, use_share: Floats) -> tuple[Ints, Ints, Floats]:
    """The notes of `count` transfers, turned round: of each link that they could fill together, who uses it and how much."""
    total, users = np.zeros(links), np.zeros(links + 1, np.int64)
    for i in range(use_at[count]):
        total[use_link[i]] += use_share[i]
        users[use_link[i] + 1] += 1
    for k in range(links):
        if users[k + 1] < 2 or total[k] <= 1 + 1e-12:
            users[k + 1] = 0
        users[k + 1] += users[k]
    who, share = np.empty(users[links], np.int64), np.empty(users[links])
    placed = users[:links].copy()
    for number in range(count):
        for i in range(use_at[number], use_at[number + 1]):
            here = use_link[i]
            if placed[here] < users[here + 1]:
                who[placed[here]], share[placed[here]] = number, use_share[i]
                placed[here] += 1
    return users, who, share


@njit(cache=True)
def _level(shares: Floats, inside: Bools, count: int) -> float:
    """The share of a full link that none of those inside exceeds, where each takes what it can: max-min fairness."""
    left, rising = 1.0, 0
    for i in range(count):
        rising += inside[i]
    level = left / rising
    while True:
        left, more = 1.0, 0
        for i in range(count):
            if inside[i]:
                if shares[i] <= level:
                    left -= shares[i]
                else:
                    more += 1
        if more == 0 or more == rising:
            return level
        rising, level = more, left / more


# --- The pipelines ---------------------------------------------------------------------------------------------------


@njit(cache=True)
def _course(
    record_of: Floats,
    part_first: Ints,
    part_s: Floats,
    eagerness: int,
    lanes: Ints,
    begin: int,
    end: int,
    depth: int,
    micro_batches: int,
    edge_first: Ints,
    entering_first: Ints,
    entering: Ints,
    wire_s: Floats,
    latency_s: Floats,
    flow_at: Ints,
    sent_s: Floats,
    part_end: Floats,
    part_at: Ints,
    back_end: Floats,
) -> None:
    """Follows the lanes `begin` to `end`, of one pipeline, up to the end of their last backwards.

    Edges are the pairs of lanes between which messages go, `wire_s[0, e]` and back `wire_s[1, e]`; `sent_s` gets the moments at
    which each message is sent. Lanes take turns, down the pipeline and up again, each as far as what it needs has been sent.
    """
    low, high = edge_first[begin], edge_first[end]
    sent = np.zeros((2, high - low), np.int64)
    forwards, backwards = np.zeros(end - begin, np.int64), np.zeros(end - begin, np.int64)
    now = np.zeros(end - begin)
    left, turns = end - begin, 0
    while left:
        for i in range(end - begin):
            lane = begin + i if turns % 2 == 0 else end - 1 - i
            here = lane - begin
            ahead, behind = forwards[here], backwards[here]
            if behind == micro_batches:
                continue
            record, parts = lanes[lane, RECORD], lanes[lane, PARTS]
            forward_s, backward_s = record_of[record, 0], record_of[record, 1]
            warm_up = eagerness * (depth - 1 - lanes[lane, PLACE]) if eagerness else micro_batches
            time = now[here]
            while behind < micro_batches:
                # After the warm-up one forward and one backward in turn, as `sim.spec.schedules` says.
                forward = ahead < micro_batches and ahead - behind <= warm_up
                m = ahead if forward else behind
                ready = True
                if forward:
                    for k in range(entering_first[lane], entering_first[lane + 1]):
                        e = entering[k]
                        if sent[0, e - low] <= m:
                            ready = False
                            break
                        time = max(time, sent_s[0, flow_at[e] + m] + latency_s[0, e])
                    if not ready:
                        break
                    time += forward_s
                    for e in range(edge_first[lane], edge_first[lane + 1]):
                        flow = flow_at[e] + m
                        free = time if m == 0 else max(time, sent_s[0, flow - 1])
                        sent_s[0, flow] = free + wire_s[0, e]
                        sent[0, e - low] = m + 1
                    ahead += 1
                else:
                    for e in range(edge_first[lane], edge_first[lane + 1]):
                        if sent[1, e - low] <= m:
                            ready = False
                            break
                        time = max(time, sent_s[1, flow_at[e] + m] + latency_s[1, e])
                    if not ready:
                        break
                    if parts >= 0 and m == micro_batches - 1:
                        for j in range(part_first[parts], part_first[parts + 1]):
                            time += part_s[j]
                            part_end[part_at[lane] + j - part_first[parts]] = time
                    else:
                        time += backward_s
                    for k in range(entering_first[lane], entering_first[lane + 1]):
                        e = entering[k]
                        flow = flow_at[e] + m
                        free = time if m == 0 else max(time, sent_s[1, flow - 1])
                        sent_s[1, flow] = free + wire_s[1, e]
                        sent[1, e - low] = m + 1
                    behind += 1
            left -= behind == micro_batches
            forwards[here], backwards[here], now[here] = ahead, behind, time
        turns += 1
    for lane in range(begin, end):
        back_end[lane] = now[lane - begin]


@njit(cache=True)
def _first_after(sent_s: Floats, start: int, stop: int, moment_s: float) -> int:
    """The first of some messages that is sent after a moment."""
    while start < stop:
        middle = (start + stop) // 2
        if sent_s[middle] > moment_s:
            stop = middle
        else:
            start = middle + 1
    return start


@njit(cache=True)
def _meet(
    pipelines: Ints,
    edge_first: Ints,
    flow_at: Ints,
    wire_s: Floats,
    sent_s: Floats,
    back_end: Floats,
    users: Ints,
    who: Ints,
    share: Floats,
    slowed: Floats,
    again: bool,
) -> bool:
    """How many times longer messages take for meeting others on their links, as far as some stretches of time show.

    Whether any do. A message that meets others is on its way longer by what the meeting takes from it at max-min rates.
    """
    edges, links = len(flow_at) - 1, len(users) - 1
    most, end_s = 1, 0.0
    begin = 0
    for p in range(len(pipelines)):
        most = max(most, pipelines[p, 2])
        for lane in range(begin, pipelines[p, 0]):
            end_s = max(end_s, back_end[lane])
        begin = pipelines[p, 0]
    # What a stretch costs grows with the square of the messages that share a link.
    stretch_s = end_s / most * (STRETCH if edges <= MANY_EDGES else STRETCH / 2)
    widest = 0
    for k in range(links):
        widest = max(widest, users[k + 1] - users[k])
    if widest == 0:
        return False
    at, until = np.empty(widest, np.int64), np.empty(widest, np.int64)
    inside, turn_s = np.zeros(widest, np.bool_), np.empty(widest)
    lost_s, worst_s, busy_s, total_s = np.empty(widest), np.zeros(2 * edges), np.zeros(2 * edges), np.zeros(2 * edges)
    whole = STRETCHES * stretch_s >= end_s
    any_met = False
    for stretch in range(1 if whole else STRETCHES):
        from_s = 0.0 if whole else end_s * (stretch + 1) / (STRETCHES + 1) - stretch_s / 2
        to_s = end_s if whole else from_s + stretch_s
        seen = np.zeros(2 * edges, np.bool_)
        worst_s[:] = 0.0
        for k in range(links):
            count = users[k + 1] - users[k]
            if count == 0:
                continue
            for i in range(count):
                number = who[users[k] + i]
                way, e = number % 2, number // 2
                at[i] = _first_after(sent_s[way], flow_at[e], flow_at[e + 1], from_s)
                until[i] = flow_at[e + 1]
                inside[i] = False
                lost_s[i] = 0.0
                turn_s[i] = (
                    max(from_s, sent_s[way, at[i]] - wire_s[way, e] * (slowed[way, e] if again else 1.0))
                    if at[i] < until[i]
                    else np.inf
                )
            now_s, total, present = from_s, 0.0, 0
            shares = share[users[k] : users[k + 1]]
            while True:
                chosen, next_s = -1, to_s
                for i in range(count):
                    if turn_s[i] < next_s:
                        chosen, next_s = i, turn_s[i]
                if total > 1 + 1e-9 and present > 1 and next_s - now_s > 1e-12 * end_s:
                    level = _level(shares, inside, count)
                    for i in range(count):
                        if inside[i] and shares[i] > level:
                            lost_s[i] += (next_s - now_s) * (1 - level / shares[i] if again else shares[i] / level - 1)
                            any_met = True
                now_s = next_s
                if chosen < 0:
                    break
                number = who[users[k] + chosen]
                way, e = number % 2, number // 2
                if inside[chosen]:
                    inside[chosen], present, total = False, present - 1, total - shares[chosen]
                    at[chosen] += 1
                    if at[chosen] < until[chosen]:
                        turn_s[chosen] = max(
                            sent_s[way, at[chosen]] - wire_s[way, e] * (slowed[way, e] if again else 1.0), next_s
                        )
                    else:
                        turn_s[chosen] = np.inf
                else:
                    inside[chosen], present, total = True, present + 1, total + shares[chosen]
                    turn_s[chosen] = sent_s[way, at[chosen]]
                    if not seen[number]:
                        busy_s[number] += min(turn_s[chosen], to_s) - next_s
            for i in range(count):
                number = who[users[k] + i]
                worst_s[number] = max(worst_s[number], lost_s[i])
                seen[number] = True
        for number in range(2 * edges):
            total_s[number] += worst_s[number]
    for number in range(2 * edges):
        way, e = number % 2, number // 2
        slow = total_s[number] / busy_s[number] if busy_s[number] > 0 else 0.0
        slowed[way, e] = 1 / max(1 - slow, 0.01) if again else 1 + slow
    return any_met


# --- Exchanges -------------------------------------------------------------------------------------------------------


@njit(cache=True)
def _follow(
    items: int,
    seconds: Floats,
    ready_s: Floats,
    least_end_s: Floats,
    segment: Ints,
    members: Ints,
    held_by: Ints,
    back_end: Floats,
    step_s: Floats,
    gathers_from: int,
    use_at: Ints,
    use_link: Ints,
    use_share: Floats,
    links: int,
    free: Floats,
) -> None:
    """Follows exchanges, in the order in which lanes come to them, while they share links at max-min rates.

    All buckets of a segment are one item here, of so many seconds alone. `free` gets the moment from which each lane is free.
    """
    lanes = len(free)
    holds = np.zeros((items, lanes), np.bool_)
    waiting = np.zeros(items, np.int64)
    for i in range(items):
        for j in range(held_by[segment[i]]):
            holds[i, members[segment[i], j]] = True
        waiting[i] = held_by[segment[i]]
    for lane in range(lanes):
        for i in range(items):
            if holds[i, lane]:
                waiting[i] -= 1
                break
    left, rate = seconds.copy(), np.zeros(items)
    state = np.zeros(items, np.int64)  # 0 waits, 1 is under way, 2 has ended
    room, weight, rising_on = np.zeros(links), np.zeros(links), np.zeros(links, np.int64)
    rising = np.zeros(items, np.bool_)
    now_s, unfinished, changed = 0.0, items, False
    while unfinished:
        if changed:
            # Rates rise together, as fractions of a link, until one is full.
            count = 0
            for i in range(items):
                rising[i] = state[i] == 1
                count += rising[i]
                if rising[i]:
                    for k in range(use_at[i], use_at[i + 1]):
                        room[use_link[k]], weight[use_link[k]], rising_on[use_link[k]] = 1.0, 0.0, 0
            for i in range(items):
                if rising[i]:
                    for k in range(use_at[i], use_at[i + 1]):
                        weight[use_link[k]] += use_share[k]
                        rising_on[use_link[k]] += 1
            while count:
                level = 1.0
                for i in range(items):
                    if rising[i]:
                        for k in range(use_at[i], use_at[i + 1]):
                            level = min(level, room[use_link[k]] / weight[use_link[k]])
                level = max(level, 1e-9)
                full = level * (1 + 1e-12)
                for i in range(items):
                    if rising[i]:
                        fixed = level >= 1.0
                        for k in range(use_at[i], use_at[i + 1]):
                            fixed = fixed or room[use_link[k]] <= full * weight[use_link[k]]
                        if fixed:
                            rate[i] = level
                for i in range(items):
                    if rising[i] and rate[i] > 0:
                        rising[i] = False
                        count -= 1
                        for k in range(use_at[i], use_at[i + 1]):
                            room[use_link[k]] = max(0.0, room[use_link[k]] - level * use_share[k])
                            weight[use_link[k]] -= use_share[k]
                            rising_on[use_link[k]] -= 1
                            if rising_on[use_link[k]] == 0:
                                weight[use_link[k]] = 1e-300
            changed = False
        chosen, next_s = -1, np.inf
        for i in range(items):
            if state[i] == 1:
                moment_s = now_s + left[i] / rate[i]
            elif state[i] == 0 and waiting[i] == 0:
                moment_s = max(now_s, ready_s[i])
            else:
                continue
            if moment_s < next_s:
                chosen, next_s = i, moment_s
        for i in range(items):
            if state[i] == 1:
                left[i] = max(0.0, left[i] - rate[i] * (next_s - now_s))
        now_s = next_s
        changed = True
        for i in range(items):
            rate[i] = 0.0
        if state[chosen] == 0:
            state[chosen] = 1
            continue
        state[chosen] = 2
        unfinished -= 1
        end_s = max(now_s, least_end_s[chosen])
        for j in range(held_by[segment[chosen]]):
            lane = members[segment[chosen], j]
            free[lane] = end_s
            following = chosen + 1
            while following < items and not holds[following, lane]:
                following += 1
            if chosen < gathers_from and following >= gathers_from:
                free[lane] = max(end_s, back_end[lane]) + step_s[lane]
            if following < items:
                waiting[following] -= 1
                ready_s[following] = max(ready_s[following], free[lane])


@njit(cache=True)
def _overlap(items: int, segment: Ints, one: int, other: int, buckets_at: Ints, bucket_from: Floats, bucket_to: Floats) -> bool:
    """Whether exchanges of two segments are on their links together at any time."""
    for i in range(items):
        if segment[i] != one:
            continue
        for j in range(items):
            if segment[j] != other:
                continue
            for a in range(buckets_at[i], buckets_at[i + 1]):
                for b in range(buckets_at[j], buckets_at[j + 1]):
                    both_s = min(bucket_to[a], bucket_to[b]) - max(bucket_from[a], bucket_from[b])
                    if both_s > 1e-12 * max(bucket_to[a], bucket_to[b]):
                        return True
    return False


# --- A plan ----------------------------------------------------------------------------------------------------------


@njit(cache=True)
def evaluate(world: World, tables: Tables, sizes: Sizes, pipelines: Ints, lanes: Ints, busy_s: Floats) -> tuple[float, bool]:
    """Seconds of an iteration, infinite where a lane does not fit, and whether paths are missing; fills lanes' busy seconds.

    `pipelines` has a row for each: the lane after its last, its depth, its micro-batches. Lanes stand in layer order.
    """
    count = len(lanes)
    # Taken out of their tuples once: a tuple that is passed on has all its arrays counted anew.
    node_of, nic_of, has_flags, paths, first, link, weight, latency, step, capacity, asked = world
    record_of, part_first, part_s, group_first, device, capacity_bytes = tables
    start_s, collective_scale = sizes.start_s, sizes.collective_scale
    for lane in range(count):
        if record_of[lanes[lane, RECORD], 3] > capacity_bytes[lanes[lane, GROUP]]:
            return np.inf, False
    links = len(capacity)
    load, touched = np.zeros(links), np.empty(links, np.int64)

    # Messages: an edge for each two lanes of neighbouring stages that have sequences in common.
    edge_first, entering_first = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    wire_s, latency_s = np.zeros((2, 2 * count)), np.zeros((2, 2 * count))
    edge_to = np.empty(2 * count, np.int64)
    flow_at = np.zeros(2 * count + 1, np.int64)
    use_at, use_link, use_share = np.zeros(4 * count + 1, np.int64), np.empty(32 * count, np.int64), np.empty(32 * count)
    widest = 1
    for lane in range(count):
        widest = max(widest, group_first[lanes[lane, GROUP] + 1] - group_first[lanes[lane, GROUP]])
    room = np.empty(3 * widest, np.int64)
    last = np.zeros(count, np.bool_)
    begin, edges = 0, 0
    for p in range(len(pipelines)):
        for a in range(begin, pipelines[p, 0]):
            last[a] = lanes[a, PLACE] == pipelines[p, 1] - 1
            one = device[group_first[lanes[a, GROUP]] : group_first[lanes[a, GROUP] + 1]]
            for b in range(a + 1, pipelines[p, 0]):
                if lanes[b, PLACE] > lanes[a, PLACE] + 1:
                    break
                common = min(lanes[a, TO], lanes[b, TO]) - max(lanes[a, FROM], lanes[b, FROM])
                if lanes[b, PLACE] == lanes[a, PLACE] or common <= 0:
                    continue
                other = device[group_first[lanes[b, GROUP]] : group_first[lanes[b, GROUP] + 1]]
                for way in range(2):
                    used, latency_s[way, edges] = _message(
                        node_of,
                        nic_of,
                        paths,
                        first,
                        link,
                        weight,
                        latency,
                        step,
                        asked,
                        load,
                        touched,
                        one if way == 0 else other,
                        other if way == 0 else one,
                        room,
                        common * sizes.boundary_bytes,
                        start_s,
                        sizes.sequence_parallel,
                    )
                    wire_s[way, edges], use_link, use_share = _unloaded(
                        capacity, load, touched, used, use_at, use_link, use_share, 2 * edges + way
                    )
                edge_to[edges] = b
                entering_first[b + 1] += 1
                flow_at[edges + 1] = flow_at[edges] + pipelines[p, 2]
                edges += 1
            edge_first[a + 1] = edges
        begin = pipelines[p, 0]
    for lane in range(count):
        entering_first[lane + 1] += entering_first[lane]
    entering, placed = np.empty(edges, np.int64), entering_first[:count].copy()
    for e in range(edges):
        entering[placed[edge_to[e]]] = e
        placed[edge_to[e]] += 1
    flow_at = flow_at[: edges + 1]
    users, who, share = _by_link(links, 2 * edges, use_at, use_link, use_share)

    # Segments: layers that the same lanes hold, and their exchanges of one byte. The last two are the embedding and the head.
    n = sizes.layers
    cut = np.zeros(n + 1, np.bool_)
    for lane in range(count):
        cut[lanes[lane, START]] = cut[lanes[lane, STOP]] = True
    bounds = np.flatnonzero(cut)
    segments = len(bounds) - 1
    members, held_by = np.empty((segments + 2, count), np.int64), np.zeros(segments + 2, np.int64)
    byte_s, low_s, full_s = np.zeros(segments + 2), np.zeros(segments + 2), np.zeros(segments + 2)
    flags = np.zeros(segments + 2, np.bool_)
    on_at, on_link, on_share = np.zeros(segments + 3, np.int64), np.empty(4 * count, np.int64), np.empty(4 * count)
    groups, member, order = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    # Lanes in the order of their devices, so that rings hardly need sorting.
    leaders = np.empty(count, np.int64)
    for lane in range(count):
        leaders[lane] = device[group_first[lanes[lane, GROUP]]]
    around = np.argsort(leaders)
    for s in range(segments + 2):
        for lane in around:
            if s < segments:
                inside = lanes[lane, START] <= bounds[s] and bounds[s + 1] <= lanes[lane, STOP]
            elif s == segments:
                inside = lanes[lane, PLACE] == 0 or (sizes.tied and last[lane])
            else:
                inside = last[lane]
            if inside:
                groups[held_by[s]] = lanes[lane, GROUP]
                members[s, held_by[s]] = lane
                held_by[s] += 1
        on_at[s + 1] = on_at[s]
        if held_by[s] < 2:
            continue
        used, low_s[s], full_s[s] = _across(
            node_of,
            nic_of,
            paths,
            first,
            link,
            weight,
            latency,
            step,
            asked,
            group_first,
            device,
            load,
            touched,
            groups,
            member,
            order,
            held_by[s],
        )
        byte_s[s], on_link, on_share = _unloaded(capacity, load, touched, used, on_at, on_link, on_share, s)
        flags[s] = True
        for i in range(held_by[s]):
            for k in range(group_first[groups[i]], group_first[groups[i] + 1]):
                flags[s] = flags[s] and has_flags[device[k]]
    if asked[0]:
        return np.inf, True

    # The pipelines: first with messages alone on their links, then with what they lose by meeting.
    part_at = np.zeros(count + 1, np.int64)
    for lane in range(count):
        parts = lanes[lane, PARTS]
        part_at[lane + 1] = part_at[lane] + (part_first[parts + 1] - part_first[parts] if parts >= 0 else 0)
    part_end, back_end = np.empty(part_at[count]), np.empty(count)
    sent_s, slowed = np.empty((2, flow_at[edges])), np.ones((2, 2 * count))
    longer_s = wire_s
    attempts = ATTEMPTS if edges <= MANY_EDGES else 2
    for attempt in range(attempts):
        begin = 0
        for p in range(len(pipelines)):
            _course(
                record_of,
                part_first,
                part_s,
                sizes.warm_up,
                lanes,
                begin,
                pipelines[p, 0],
                pipelines[p, 1],
                pipelines[p, 2],
                edge_first,
                entering_first,
                entering,
                longer_s,
                latency_s,
                flow_at,
                sent_s,
                part_end,
                part_at,
                back_end,
            )
            begin = pipelines[p, 0]
        if attempt < attempts - 1:
            if not _meet(pipelines, edge_first, flow_at, wire_s, sent_s, back_end, users, who, share, slowed, attempt > 0):
                break
            longer_s = wire_s * slowed

    # Exchanges: the reductions, last layers first; then, after the optimizer's step, the gathers, first layers first.
    free, step_s = np.zeros(count), np.empty(count)
    begin = 0
    for p in range(len(pipelines)):
        for lane in range(begin, pipelines[p, 0]):
            record, parts = lanes[lane, RECORD], lanes[lane, PARTS]
            step_s[lane] = record_of[record, 2]
            busy_s[lane] = pipelines[p, 2] * (record_of[record, 0] + record_of[record, 1]) + step_s[lane]
            if parts >= 0:
                busy_s[lane] -= record_of[record, 1]
                for k in range(part_first[parts], part_first[parts + 1]):
                    busy_s[lane] += part_s[k]
        begin = pipelines[p, 0]
    turns, most = 2 if sizes.gathers else 1, segments + 2
    items, gathers_from, total = 0, 0, 0
    segment, seconds = np.empty(2 * most, np.int64), np.zeros(2 * most)
    ready_s, least_end_s, wires_s = np.zeros(2 * most), np.zeros(2 * most), np.zeros(2 * most)
    buckets_at = np.zeros(2 * most + 1, np.int64)
    bucket_from, bucket_to = np.empty(2 * (n + 2)), np.empty(2 * (n + 2))
    reached = part_at[:count].copy()
    for turn in range(turns):
        for position in range(most):
            # Head, segments from the last, embedding; the reverse to gather.
            at = position if turn == 0 else most - 1 - position
            s = segments + 1 if at == 0 else segments if at == segments + 1 else segments - at
            if held_by[s] < 2:
                continue
            if s < segments:
                start, stop = bounds[s], bounds[s + 1]
                unit_bytes = sizes.layer_gradient_bytes if turn == 0 else sizes.layer_parameter_bytes
            else:
                start, stop = 0, 1
                if s == segments:
                    unit_bytes = sizes.embedding_gradient_bytes if turn == 0 else sizes.embedding_parameter_bytes
                else:
                    unit_bytes = sizes.head_gradient_bytes if turn == 0 else sizes.head_parameter_bytes
            # The first layers of a segment are the bucket that gets what is left.
            each = sizes.per_bucket if sizes.overlap else stop - start
            buckets = (stop - start + each - 1) // each
            segment[items] = s
            for bucket in range(buckets):
                size = min(each, stop - start - (bucket if turn == 0 else buckets - 1 - bucket) * each)
                on_wire_s, late_s = _exchange_s(
                    start_s, collective_scale, size * unit_bytes, byte_s[s], low_s[s], full_s[s], flags[s]
                )
                begins, joined = 0.0, 0.0
                for i in range(held_by[s]):
                    lane = members[s, i]
                    begins = max(begins, free[lane])
                    if turn == 0:
                        if lanes[lane, PARTS] < 0 or s == segments:
                            joined = max(joined, back_end[lane])
                        elif s == segments + 1:
                            joined = max(joined, part_end[part_at[lane]])
                        else:
                            joined = max(joined, part_end[reached[lane]])
                            reached[lane] += 1
                begins = max(begins, joined)
                for i in range(held_by[s]):
                    free[members[s, i]] = begins + on_wire_s + late_s
                if bucket == 0:
                    ready_s[items] = joined
                least_end_s[items] = joined + on_wire_s + late_s if turn == 0 else 0.0
                seconds[items] += on_wire_s + late_s
                wires_s[items] += on_wire_s
                bucket_from[total], bucket_to[total] = begins, begins + on_wire_s
                total += 1
            items += 1
            buckets_at[items] = total
        if turn == 0:
            gathers_from = items
            for lane in range(count):
                free[lane] = max(free[lane], back_end[lane]) + step_s[lane]

    # Where exchanges of different layers meet, their rates are followed.
    users, who, share = _by_link(links, most, on_at, on_link, on_share)
    met = False
    asked_for = np.zeros((most, most), np.bool_)
    for k in range(links):
        for i in range(users[k], users[k + 1]):
            for j in range(i + 1, users[k + 1]):
                if not met and share[i] + share[j] > 1 + 1e-9 and not asked_for[who[i], who[j]]:
                    asked_for[who[i], who[j]] = True
                    met = _overlap(items, segment, who[i], who[j], buckets_at, bucket_from, bucket_to)
    if met:
        # What an item puts on a link, latencies included.
        item_at, item_link = np.zeros(items + 1, np.int64), np.empty(2 * len(on_link), np.int64)
        item_share = np.empty(2 * len(on_link))
        for i in range(items):
            item_at[i + 1] = item_at[i]
            for k in range(on_at[segment[i]], on_at[segment[i] + 1]):
                if users[on_link[k]] < users[on_link[k] + 1]:
                    item_link[item_at[i + 1]] = on_link[k]
                    item_share[item_at[i + 1]] = on_share[k] * wires_s[i] / max(seconds[i], 1e-300)
                    item_at[i + 1] += 1
        free[:] = 0.0
        _follow(
            items,
            seconds,
            ready_s,
            least_end_s,
            segment,
            members,
            held_by,
            back_end,
            step_s,
            gathers_from,
            item_at,
            item_link,
            item_share,
            links,
            free,
        )
    end_s = 0.0
    for lane in range(count):
        end_s = max(end_s, free[lane], back_end[lane] + step_s[lane])
    return end_s, False
