"""The arithmetic of `sim.cost.estimates`, compiled: transfers on paths, the pipelines' recurrence, exchanges of gradients.

Everything is numbers here: devices, links, nodes and lanes by their places in tables, which `sim.cost.estimates` fills from
`sim.cost.network`, `sim.cost.traffic` and `sim.cost.compute`. Rules that are told there are only followed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.core.types import StructRef, unliteral
from numba.experimental import structref
from numpy.typing import NDArray

from sim.cost.collectives import ALIKE, FLAGGED_BYTES

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
    card: NDArray[np.bool_]
    """Of each link, whether what it carries goes from one node to another."""
    asked: Ints
    """How many paths were missing, and then, as far as there is room, between which two devices each."""


class Transfers(NamedTuple):
    """Messages and exchanges of one byte that plans have had, found again by the groups between which they go."""

    place: Ints
    """Where the row of a key is, by the key's hash; -1 where there is none."""
    key: Ints
    """[row]: of a message its two groups (the second one as -1 - it under sequence parallelism); of an exchange the sums of the
    two random numbers of its groups."""
    seconds: Floats
    """[row]: of the byte on the slowest link; of latency in the protocol of low latency (infinite without one) and in that of
    full bandwidth. Messages have but one, with its start."""
    crosses: NDArray[np.bool_]
    """[row]: whether any of the byte goes from one node to another."""
    first: Ints
    """Of each row: its first entry in `link` and `share`; the next row's is its end."""
    link: Ints
    share: Floats
    """Of the link's capacity, where nothing else is on the links; see `LEAST_SHARE`."""
    first_line: Ints
    """Of each row: its first entry in `line`; the next row's is its end. Only what gloo does has such."""
    line: Floats
    """[k]: seconds that an exchange takes at least, and for each byte, its start apart: it takes what the highest line says."""
    used: Ints
    """How many rows there are."""


class Tables(NamedTuple):
    """What lanes refer to by number."""

    look: Floats
    """[r]: what is the same of all stages that look alike, in the columns below."""
    pass_s: Floats
    """[r, 0, i]: of such a stage, seconds of the forward of slice i of a micro-batch; [r, 1, i]: of its i-th backward, or of the
    input half of that, which is of the last slice but i. Where sequences are not cut, a micro-batch is one slice."""
    step: Floats
    """[r, k]: seconds of an optimizer's step, and of each parameter in it, of stages with this list; the slowest counts."""
    step_first: Ints
    """Of each such list: its first entry in `step`; the next list's is its end."""
    part_first: Ints
    """Of each list of parts: its first entry in `part_s`; the next list's is its end."""
    part_s: Floats
    """Seconds of the parts of the last micro-batch's backward, or of its weight half, the last layers first."""
    input_s: Floats
    """Of each list of parts, seconds of the input half before them, which comes in parts, too; 0 where there are no halves."""
    group_first: Ints
    """Of each tensor-parallel group: its first entry in `device`; the next group's is its end."""
    device: Ints
    capacity_bytes: Floats
    """Of each group, on the device that has the least."""
    group_key: Ints
    """[group]: two random numbers."""
    ring_first: Ints
    """Of each group: its first entry in `ring_link` and `ring_share`, of what collectives use; the next group's is its end."""
    ring_link: Ints
    ring_share: Floats
    """Of the link's capacity, where nothing else is on the links."""


LOOK_COLUMNS = 14
WEIGHT_S, FIXED, KEPT, LOGITS, CONTEXT = range(5)
PER_LAYER, EMBEDDING, HEAD, COPY, SELECTIVE, WHOLLY, STEPS, FORWARD_RING_S, BACKWARD_RING_S = range(5, LOOK_COLUMNS)
"""Columns of a look: seconds of the weight half of a backward in halves, the same for all slices; bytes that it allocates
whatever is in flight, of activations and of logits for each slice in flight, and of context and
communicators but the gradients'; parameters of a layer, of the embedding, of the head and of a tied copy there; layers that
recompute selectively, and in full; its list of steps; seconds of collectives that its forward and its backward wait for."""


class Sizes(NamedTuple):
    """Bytes of what is sent, exchanged and kept in a plan's job and settings, and what its software stack does to them."""

    layers: int
    boundary_bytes: float
    """Of the activation of a slice of one sequence between two layers."""
    layer_gradient_bytes: float
    embedding_gradient_bytes: float
    head_gradient_bytes: float
    layer_parameter_bytes: float
    embedding_parameter_bytes: float
    head_parameter_bytes: float
    state_bytes: float
    """Of the optimizer's state of one parameter."""
    logits_scale: float
    fragmentation: float
    communicator_bytes: float
    start_s: float
    node_collective_scale: float
    collective_scale: float
    per_bucket: int
    sequence_parallel: bool
    eagerness: int
    """Of backwards that come in halves: forwards before the first one, for each stage that follows."""
    halves: bool
    """Whether the backward comes in an input half and a weight half."""
    overlap: bool
    gathers: bool
    tied: bool


class Work(NamedTuple):
    """What the pipelines of a plan do, and where it is noted when. Rows of `forwards_s` and the like are lanes."""

    look: Floats
    part_first: Ints
    part_s: Floats
    input_s: Floats
    """Of `Tables`, as the three before."""
    eagerness: int
    halves: bool
    forwards_s: Floats
    """[lane, i]: of slice i of a micro-batch, collectives included."""
    backwards_s: Floats
    lanes: Ints
    pipelines: Ints
    """Of these and the lanes, see `evaluate`."""
    edge_first: Ints
    """Edges are the pairs of lanes between which messages go. Of each lane: its first edge; the next lane's is its end."""
    latency_s: Floats
    """[0, e]: of edge e; [1, e]: back."""
    flow_at: Ints
    """Of each edge: its first message; the next edge's is its end."""
    sent_s: Floats
    """[0, m] and back [1, m]: gets the moment at which a message is sent."""
    part_end: Floats
    """Gets the ends of the parts of last backwards."""
    part_at: Ints
    """Of each lane: its first part there; the next lane's is its end."""
    back_end: Floats
    """[lane]: gets the end of its last backward."""


LANE_COLUMNS = 11
LOOK, GROUP, PARTS, START, STOP, FROM, TO, PLACE, FLYING, SHARD, SHARED = range(LANE_COLUMNS)
"""Columns of a lane: its look, group and list of parts (-1: the backward is not divided), its layers, its share of the sequences,
the place of its stage in the pipeline, the slices of micro-batches that it has in flight, where the layers are whose state it
keeps, and whether it exchanges gradients."""

DONE, MISSING, FULL = range(3)
"""How an evaluation ends: with the seconds; without paths that were asked for; without room for transfers."""

LEAST_SHARE = 0.03
"""The least share of a link's capacity at which a transfer is seen to use it."""

ATTEMPTS, FEWER_ATTEMPTS, MANY_EDGES, SETTLED = 5, 3, 32, 1e-3
"""How often pipelines are followed at most where messages meet, and where there are more pairs of neighbours than so many; they
are followed no more where no message takes longer or shorter than before by this fraction."""

FOLLOWED = 3500
"""Of more edges and micro-batches than so many messages are not followed one by one, unless it may take any time."""

PERIOD, REPEATS = 8, 1e-12
"""Every so many steps, of each slice, it is seen whether they repeat as many before them, to this fraction. Where stages wait for
messages, steps come two by two or in fours; those that come in threes are all followed."""

STRETCHES, STRETCH = 3, 4.0
"""In how many stretches of time, of how many micro-batches each, it is seen which messages meet."""


def compiled(function: Callable[..., Any]) -> Any:
    """A function that is compiled on first use, and kept on disk. Divisions by zero are infinite in it, as in numpy.

    Constants that it is called with are of their types: numba would compile it once for the constant that a variable starts
    with, and again for what the variable becomes.
    """
    dispatcher: Any = njit(cache=True, error_model="numpy")(function)
    template = dispatcher.get_call_template

    def of_types(arguments: Sequence[Any], named: Any) -> Any:
        return template([unliteral(one) for one in arguments], {name: unliteral(one) for name, one in dict(named).items()})

    dispatcher.get_call_template = of_types
    return dispatcher


# --- What plans have in common ---------------------------------------------------------------------------------------


@structref.register
class _CommonType(StructRef):
    """What numba knows `Common` by."""

    def preprocess_fields(self, fields: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
        """The fields' types, of which none is that of a constant."""
        return tuple([(name, unliteral(kind)) for name, kind in fields])


class Common(structref.StructRefProxy):
    """The World, Transfers, Tables and Sizes of plans, handed over once: fifty arrays and numbers take longer to check at a call
    than a small plan's arithmetic."""


structref.define_proxy(Common, _CommonType, ["world", "transfers", "tables", "sizes"])


@compiled
def common(world: World, transfers: Transfers, tables: Tables, sizes: Sizes) -> Common:
    """Them as one."""
    return Common(world, transfers, tables, sizes)


# --- Transfers -------------------------------------------------------------------------------------------------------


@compiled
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
    """Puts the bytes of one move on its links; the new count of touched links, and the path (0: it is missing)."""
    # Its arrays one by one: a tuple that is passed on has all its arrays counted anew.
    path = paths[a, b]
    if path < 0:
        n = asked[0]
        if 2 * n + 2 < len(asked):
            asked[2 * n + 1], asked[2 * n + 2] = a, b
        asked[0] = n + 1
        return count, 0
    for i in range(first[path], first[path + 1]):
        here = link[i]
        if load[here] == 0.0:
            touched[count] = here
            count += 1
        load[here] += num_bytes * weight[i]
    return count, path


@compiled
def _rings(node_of: Ints, nic_of: Ints, devices: Ints, n: int) -> int:
    """How many rings share the bytes of the first n devices, which are sorted here: they then stand node by node."""
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
    return 1 if nodes == 1 else min(rings, nics)


@compiled
def _turn(node_of: Ints, devices: Ints, order: Ints, n: int, ring: int, rings: int) -> None:
    """Fills in the order in which one of so many rings goes over the first n devices."""
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and node_of[devices[end]] == node_of[devices[begin]]:
            end += 1
        held = end - begin
        at = ring * held // rings
        for i in range(held):
            order[begin + i] = devices[begin + (at + i) % held]
        begin = end


@compiled
def _laps(world: World, load: Floats, order: Ints, n: int, lines: Floats, kept: int) -> tuple[Floats, int]:
    """Adds the lines of a ring that goes round once, whose bytes are on their links, as `sim.cost.collectives`.

    The lines, in a larger table where they were too many, and how many they are.
    """
    latencies_s, steps_s = np.empty(n), np.zeros(n)
    for i in range(n):
        path = world.path[order[i], order[i + 1 if i + 1 < n else 0]]
        latencies_s[i] = world.latency_s[path] + world.step_s[path]
        for k in range(world.first[path], world.first[path + 1]):
            here = world.link[k]
            steps_s[i] = max(steps_s[i], load[here] / world.capacity[here] / (n - 1))
    for i in range(n):
        latency_s = passed_s = slowest_s = 0.0
        for length in range(1, n):
            hop = (i + length - 1) % n
            latency_s, passed_s = latency_s + latencies_s[hop], passed_s + steps_s[hop]
            slowest_s = max(slowest_s, steps_s[hop])
            byte_s = passed_s + (n - 1 - length) * slowest_s
            below = False
            for k in range(kept):
                below = below or (latency_s <= lines[k, 0] * ALIKE and byte_s <= lines[k, 1] * ALIKE)
            if below:
                continue
            others, kept = kept, 0
            for k in range(others):
                if lines[k, 0] > latency_s * ALIKE or lines[k, 1] > byte_s * ALIKE:
                    lines[kept, 0], lines[kept, 1] = lines[k, 0], lines[k, 1]
                    kept += 1
            if kept == len(lines):
                larger = np.empty((2 * kept, 2))
                for k in range(kept):
                    larger[k, 0], larger[k, 1] = lines[k, 0], lines[k, 1]
                lines = larger
            lines[kept, 0], lines[kept, 1] = latency_s, byte_s
            kept += 1
    return lines, kept


@compiled
def _ring(
    world: World, load: Floats, touched: Ints, count: int, devices: Ints, order: Ints, n: int, num_bytes: float
) -> tuple[int, float, float]:
    """Puts a ring in which each byte goes round once on its links, as `sim.cost.collectives`.

    Links touched, latencies of its paths and of its steps. The first n devices are sorted here, and then stand node by node;
    `order` is room for as many.
    """
    node_of, nic_of, _, paths, first, link, weight, latency, step, _, _, asked = world
    rings = _rings(node_of, nic_of, devices, n)
    each = num_bytes * (n - 1) / n / rings
    worst_latency_s, worst_step_s = 0.0, 0.0
    for r in range(rings):
        _turn(node_of, devices, order, n, r, rings)
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


@compiled
def _message(
    world: World, load: Floats, touched: Ints, one: Ints, other: Ints, room: Ints, start_s: float, sequence_parallel: bool
) -> tuple[int, float]:
    """Puts a message of one byte between two groups on its links, as `sim.cost.collectives.between_lanes`.

    Links touched, and latency. `room` is for three times as many devices as a group has.
    """
    node_of, _, _, paths, first, link, weight, latency, step, _, _, asked = world
    count, latency_s, step_s = 0, 0.0, 0.0
    have, held = len(one), len(other)
    if sequence_parallel or (have == 1 and held == 1):
        of = have * held // math.gcd(have, held)
        for k in range(of):
            a, b = one[k * have // of], other[k * held // of]
            count, path = _move(paths, first, link, weight, asked, load, touched, count, a, b, 1 / of)
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
            count, path = _move(paths, first, link, weight, asked, load, touched, count, a, b, 1 / pieces)
            latency_s, step_s = max(latency_s, latency[path]), max(step_s, step[path])
        if there > 1:
            count, hop_s, more_s = _ring(world, load, touched, count, group, order, there, 1.0)
            gather_s = max(gather_s, start_s + hop_s + more_s)
    return count, start_s + latency_s + step_s + gather_s


@compiled
def _slice(group_first: Ints, device: Ints, groups: Ints, members: Ints, n: int, at: int, of: int) -> int:
    """Fills in who of n groups holds a slice of their common refinement, which begins `at` of so many parts; where it ends."""
    stop = of
    for i in range(n):
        begin = group_first[groups[i]]
        degree = group_first[groups[i] + 1] - begin
        members[i] = device[begin + at * degree // of]
        piece = of // degree
        stop = min(stop, (at // piece + 1) * piece)
    return stop


@compiled
def _across(
    world: World, group_first: Ints, device: Ints, load: Floats, touched: Ints, groups: Ints, members: Ints, order: Ints, n: int
) -> tuple[int, float, float, Floats]:
    """Puts one byte, scattered or gathered over groups of any degrees, on its links; as `sim.cost.collectives.across_lanes`.

    Links touched; latency in the protocol of low latency, infinite where a device lacks it, and in that of full bandwidth; where
    a device lacks the former, lines that say what it takes. `members` and `order` are room for as many devices as groups.
    """
    of, flags, before = 1, True, world.asked[0]
    for i in range(n):
        begin, end = group_first[groups[i]], group_first[groups[i] + 1]
        of = of * (end - begin) // math.gcd(of, end - begin)
        for k in range(begin, end):
            flags = flags and world.flags[device[k]]
    count, low_s, full_s, at = 0, 0.0, 0.0, 0
    while at < of:
        stop = _slice(group_first, device, groups, members, n, at, of)
        count, latency_s, step_s = _ring(world, load, touched, count, members, order, n, (stop - at) / of)
        low_s, full_s = max(low_s, latency_s), max(full_s, latency_s + step_s)
        at = stop
    lines, kept, at = np.empty((n, 2)), 0, 0
    if flags or world.asked[0] > before:
        return count, low_s, full_s, lines[:0]
    while at < of:
        at = _slice(group_first, device, groups, members, n, at, of)
        rings = _rings(world.node, world.nic, members, n)
        for r in range(rings):
            _turn(world.node, members, order, n, r, rings)
            lines, kept = _laps(world, load, order, n, lines, kept)
    return count, np.inf, full_s, lines[:kept]


@compiled
def _exchange_s(
    start_s: float, collective_scale: float, num_bytes: float, byte_s: float, low_s: float, full_s: float
) -> tuple[float, float]:
    """Seconds on the wire, and of latency, of an exchange, as `sim.cost.traffic.exchange`, by the protocol that is faster."""
    wire_s, latency_s = num_bytes * byte_s, start_s + full_s
    if (start_s + low_s + FLAGGED_BYTES * wire_s) * ALIKE < latency_s + wire_s:
        wire_s, latency_s = FLAGGED_BYTES * wire_s, start_s + low_s
    return wire_s / collective_scale, latency_s


# --- Transfers that are known ----------------------------------------------------------------------------------------


@compiled
def _place_of(place: Ints, key: Ints, one: int, other: int) -> int:
    """Where the row of a transfer is noted, or where it is to be."""
    mixed = one * 6364136223846793005 ^ other * 1442695040888963407
    at = (mixed ^ (mixed >> 32)) & (len(place) - 1)
    while place[at] >= 0 and not (key[place[at], 0] == one and key[place[at], 1] == other):
        at = (at + 1) & (len(place) - 1)
    return at


@compiled
def _keep(
    transfers: Transfers,
    at: int,
    one: int,
    other: int,
    capacity: Floats,
    card: NDArray[np.bool_],
    load: Floats,
    touched: Ints,
    count: int,
    low_s: float,
    full_s: float,
    lines: Floats,
    missing: bool,
) -> int:
    """Takes a transfer of one byte off its links, and notes it with what it uses of them.

    Its row; -1 where there is no room or something is `missing`, and then nothing is noted.
    """
    place, key, seconds, crosses, first, link, share, first_line, line, used = transfers
    row, byte_s, crossing = int(used[0]), 0.0, False
    for i in range(count):
        byte_s = max(byte_s, load[touched[i]] / capacity[touched[i]])
        crossing = crossing or card[touched[i]]
    noted = not missing and row < len(key) and first[row] + count <= len(link) and first_line[row] + len(lines) <= len(line)
    end = first[row] if noted else 0
    for i in range(count):
        here = touched[i]
        part = load[here] / capacity[here] / byte_s
        load[here] = 0.0
        if noted and part > LEAST_SHARE:
            link[end], share[end] = here, part
            end += 1
    if not noted:
        return -1
    place[at], key[row, 0], key[row, 1] = row, one, other
    seconds[row, 0], seconds[row, 1], seconds[row, 2], crosses[row] = byte_s, low_s, full_s, crossing
    begin = first_line[row]
    first_line[row + 1] = begin + len(lines)
    for i in range(len(lines)):
        line[begin + i, 0], line[begin + i, 1] = lines[i, 0], lines[i, 1]
    first[row + 1], used[0] = end, row + 1
    return row


# --- What is on the links --------------------------------------------------------------------------------------------


@compiled
def _fuller(users: Ints, who: Ints, share: Floats, one: int, other: int) -> bool:
    """Whether all who use one link use as much or more of another one."""
    at, end = users[other], users[other + 1]
    for i in range(users[one], users[one + 1]):
        while at < end and who[at] < who[i]:
            at += 1
        if at == end or who[at] != who[i] or share[at] < share[i] * (1 - 1e-12):
            return False
    return True


@compiled
def _by_link(links: int, rows: Ints, first: Ints, link: Ints, part: Floats) -> tuple[Ints, Ints, Floats]:
    """Some transfers, given by their rows (or -1), turned round: of each link that they could fill together, who uses it, and its
    share.

    A link has no users here if they all use as much or more of another one, which is full before it.
    """
    total, users = np.zeros(links), np.zeros(links + 1, np.int64)
    for row in rows:
        if row < 0:
            continue
        for i in range(first[row], first[row + 1]):
            total[link[i]] += part[i]
            users[link[i] + 1] += 1
    for k in range(links):
        if users[k + 1] < 2 or total[k] <= 1 + 1e-12:
            users[k + 1] = 0
        users[k + 1] += users[k]
    who, share = np.empty(users[links], np.int64), np.empty(users[links])
    placed = users[:links].copy()
    for number in range(len(rows)):
        row = rows[number]
        if row < 0:
            continue
        for i in range(first[row], first[row + 1]):
            here = link[i]
            if placed[here] < users[here + 1]:
                who[placed[here]], share[placed[here]] = number, part[i]
                placed[here] += 1
    stays = np.zeros(links, np.bool_)
    for k in range(links):
        if users[k] == users[k + 1]:
            continue
        stays[k], row = True, rows[who[users[k]]]
        for i in range(first[row], first[row + 1]):
            other = link[i]
            # What all use together tells of most links that they are not fuller, before all are asked.
            if other == k or total[other] < total[k] * (1 - 1e-9) or users[other + 1] - users[other] < users[k + 1] - users[k]:
                continue
            if _fuller(users, who, share, k, other) and (other < k or not _fuller(users, who, share, other, k)):
                stays[k] = False
                break
    kept = begin = 0
    for k in range(links):
        end = users[k + 1]
        if stays[k]:
            for i in range(begin, end):
                who[kept], share[kept] = who[i], share[i]
                kept += 1
        begin, users[k + 1] = end, kept
    return users, who[:kept], share[:kept]


@compiled
def _level(shares: Floats, inside: Ints, count: int) -> float:
    """The share of a full link that none of those inside exceeds, where each takes what it can: max-min fairness.

    The first `count` of `inside` say which they are.
    """
    rising = count
    level = 1.0 / rising
    while True:
        left, more = 1.0, 0
        for n in range(count):
            part = shares[inside[n]]
            if part <= level:
                left -= part
            else:
                more += 1
        if more == 0 or more == rising:
            return level
        rising, level = more, left / more


# --- The pipelines ---------------------------------------------------------------------------------------------------


@compiled
def _last_backward(
    time: float,
    parts: int,
    part_first: Ints,
    part_s: Floats,
    input_s: Floats,
    halves: bool,
    backward_s: float,
    weight_s: float,
    put_off_s: float,
    part_end: Floats,
    at: int,
) -> tuple[float, float]:
    """When a lane's last backward has what it sends, and when it ends; it begins at `time`.

    In `halves` the weight halves that were put off come before its own. Fills in the ends of its parts, if any, from `at` on.
    """
    if not halves and parts < 0:
        return time + backward_s, time + backward_s
    sent = time + (input_s[parts] if parts >= 0 else backward_s)
    time = sent + put_off_s if halves else time
    if parts < 0:
        return sent, time + weight_s
    for j in range(part_first[parts], part_first[parts + 1]):
        time += part_s[j]
        part_end[at + j - part_first[parts]] = time
    return (sent if halves else time), time


@compiled
def _repeats(
    later_s: float,
    now_s: Floats,
    before_s: Floats,
    count: int,
    step: int,
    period: int,
    warm_up: Ints,
    first: Ints,
    forth_s: Floats,
    back_s: Floats,
) -> bool:
    """Whether all that decides the next steps of a pipeline is later by so many seconds than a period before: see `_alone`."""
    within_s = REPEATS * later_s
    for here in range(count):
        if abs(now_s[here] - before_s[here] - later_s) > within_s:
            return False
    for here in range(count - 1):
        sent = first[here] + step - 1
        if abs(forth_s[sent] - forth_s[sent - period] - later_s) > within_s:
            return False
        # Of the messages back those that have not been received yet.
        for back in range(sent - warm_up[here], sent - warm_up[here + 1]):
            if abs(back_s[back] - back_s[back - period] - later_s) > within_s:
                return False
    return True


@compiled
def _alone(work: Work, anew: Bools, wire_s: Floats) -> None:
    """Follows each pipeline that is to be followed `anew` as if it were alone, up to the end of its lanes' last backwards.

    Each lane is a stage.

    Messages take `wire_s[0, e]` of an edge, and back `wire_s[1, e]`, before their latency. In step m each lane does its backward
    before forward m, the last stages first, and then that forward, the first stages first: whatever a pass waits for is known
    then. Once all moments are later than those some steps before by the same, so they are as long as there are forwards, and
    those steps are not followed.
    Where backwards come in `halves`, so many weight halves are put off to the end as `sim.spec.schedules` says of zero bubble.
    Where sequences come in slices, a slice counts as a micro-batch: forwards come in order, and backward m is everywhere of the
    same slice.
    """
    look, part_first, part_s, input_s, eagerness, halves, forwards_s, backwards_s, lanes, pipelines = work[:10]
    edge_first, latency_s, flow_at, sent_s, part_end, part_at, back_end = work[10:]
    slices, forth_s, back_s = forwards_s.shape[1], sent_s[0], sent_s[1]
    period, deepest = PERIOD * slices, pipelines[:, 1].max()
    # By stage, of the pipeline at hand; of an edge at the stage that it leaves.
    now_s, before_s, weight_s, forth_end_s, back_end_s = np.empty((5, deepest))
    warm_up, put_off, first = np.empty((3, deepest), np.int64)
    begin = 0
    for p in range(len(pipelines)):
        lane, count, micro_batches, longest = begin, pipelines[p, 1], pipelines[p, 2], 0
        begin = pipelines[p, 0]
        if not anew[p]:
            continue
        edge = edge_first[lane]
        for here in range(count):
            now_s[here] = forth_end_s[here] = back_end_s[here] = 0.0
            warm_up[here], put_off[here] = lanes[lane + here, FLYING] - 1, 0
            weight_s[here], first[here] = look[lanes[lane + here, LOOK], WEIGHT_S], flow_at[edge + here]
            if eagerness:
                warm_up[here] = min(eagerness * (count - 1 - here), micro_batches)
                put_off[here] = eagerness * here
            longest = max(longest, warm_up[here])
        # From then on all lanes do the same in each step, as long as there are forwards.
        steady = longest + 1 + eagerness * count
        step = 0
        while step <= micro_batches + longest:
            if step >= steady and (step - steady) % period == 0 and step + period < micro_batches:
                later_s = now_s[0] - before_s[0]
                if step > steady and _repeats(later_s, now_s, before_s, count, step, period, warm_up, first, forth_s, back_s):
                    skipped = (micro_batches - step) // period * period
                    for here in range(count):
                        now_s[here] += skipped // period * later_s
                    for here in range(count - 1):
                        there = first[here] + step
                        back = there - 1 - warm_up[here + 1]
                        for k in range(skipped):
                            forth_s[there + k] = forth_s[there + k - period] + later_s
                            back_s[back + k] = back_s[back + k - period] + later_s
                        forth_end_s[here], back_end_s[here] = forth_s[there + skipped - 1], back_s[back + skipped - 1]
                    step += skipped
                    steady = micro_batches  # what is left is less than a period
                for here in range(count):
                    before_s[here] = now_s[here]
            for here in range(count - 1, -1, -1):
                m = step - 1 - warm_up[here]
                if m < 0 or m >= micro_batches:
                    continue
                time, at = now_s[here], m % slices if slices > 1 else 0  # divisions take as long as all else here
                if here < count - 1:
                    time = max(time, back_s[first[here] + m] + latency_s[1, edge + here])
                if m == micro_batches - 1:
                    sent_now, time = _last_backward(
                        time,
                        lanes[lane + here, PARTS],
                        part_first,
                        part_s,
                        input_s,
                        halves,
                        backwards_s[lane + here, at],
                        weight_s[here],
                        min(put_off[here], m) * weight_s[here],
                        part_end,
                        part_at[lane + here],
                    )
                else:
                    sent_now = time + backwards_s[lane + here, at]
                    time = sent_now + (weight_s[here] if halves and m >= put_off[here] else 0.0)
                now_s[here] = time
                if here > 0:
                    sent = max(sent_now, back_end_s[here - 1]) + wire_s[1, edge + here - 1]
                    back_s[first[here - 1] + m] = back_end_s[here - 1] = sent
            if step < micro_batches:
                at, arrives = step % slices if slices > 1 else 0, 0.0
                for here in range(count):
                    time = max(now_s[here], arrives) + forwards_s[lane + here, at]
                    now_s[here] = time
                    if here < count - 1:
                        sent = max(time, forth_end_s[here]) + wire_s[0, edge + here]
                        forth_s[first[here] + step] = forth_end_s[here] = sent
                        arrives = sent + latency_s[0, edge + here]
            step += 1
        for here in range(count):
            back_end[lane + here] = now_s[here]


@compiled
def _least_s(seconds: Floats, count: int) -> float:
    """The least that so many passes take, of slices that take these seconds, in turn."""
    whole, rest = divmod(count, len(seconds))
    least: float = whole * seconds.sum() + rest * seconds.min()
    return least


@compiled
def _passes(
    tables: Tables, pipelines: Ints, lanes: Ints, links: int, closely: bool, forwards_s: Floats, backwards_s: Floats
) -> None:
    """Fills in what forwards and backwards of lanes take, or the input halves of these, with their collectives.

    If `closely`, collectives share the rates of their links with those of lanes of the same layers in other pipelines, which are
    in step with them.
    """
    look, pass_s = tables.look, tables.pass_s
    groups = np.empty(len(lanes), np.int64)
    for lane in range(len(lanes)):
        groups[lane] = lanes[lane, GROUP]
        for i in range(pass_s.shape[2]):
            forwards_s[lane, i], backwards_s[lane, i] = pass_s[lanes[lane, LOOK], 0, i], pass_s[lanes[lane, LOOK], 1, i]
    if not closely or len(pipelines) == 1:
        return
    users, who, share = _by_link(links, groups, tables.ring_first, tables.ring_link, tables.ring_share)
    slowed = np.ones(len(lanes))
    for k in range(links):
        for i in range(users[k], users[k + 1]):
            lane, full = who[i], 0.0
            for j in range(users[k], users[k + 1]):
                other = who[j]
                if lanes[other, START] == lanes[lane, START] and lanes[other, STOP] == lanes[lane, STOP]:
                    full += share[j]
            slowed[lane] = max(slowed[lane], full)
    for lane in range(len(lanes)):
        at = lanes[lane, LOOK]
        for i in range(pass_s.shape[2]):
            forwards_s[lane, i] += (slowed[lane] - 1) * look[at, FORWARD_RING_S]
            backwards_s[lane, i] += (slowed[lane] - 1) * look[at, BACKWARD_RING_S]


@compiled
def _like_earlier(
    pipelines: Ints,
    lanes: Ints,
    edge_first: Ints,
    edge_to: Ints,
    wire_s: Floats,
    latency_s: Floats,
    users: Ints,
    who: Ints,
    share: Floats,
) -> Ints:
    """Of each pipeline the first one that it is like: of the same work, its messages take as long and find links as full."""
    # How full the fullest link of a message would be, if all that may pass over it did so at once.
    full = np.zeros(2 * len(edge_to))
    for k in range(len(users) - 1):
        total = 0.0
        for i in range(users[k], users[k + 1]):
            total += share[i]
        for i in range(users[k], users[k + 1]):
            full[who[i]] = max(full[who[i]], total)
    like = np.arange(len(pipelines))
    for p in range(len(pipelines)):
        begin = pipelines[p - 1, 0] if p else 0
        count, low = pipelines[p, 0] - begin, edge_first[begin]
        high = edge_first[pipelines[p, 0]]
        for other in range(p):
            if like[other] != other or pipelines[other, 1] != pipelines[p, 1] or pipelines[other, 2] != pipelines[p, 2]:
                continue
            first = pipelines[other - 1, 0] if other else 0
            at = edge_first[first]
            same = pipelines[other, 0] - first == count and edge_first[pipelines[other, 0]] - at == high - low
            lane = 0
            while same and lane < count:
                for column in range(LANE_COLUMNS):
                    same = same and (column == GROUP or lanes[begin + lane, column] == lanes[first + lane, column])
                same = same and edge_first[begin + lane] - low == edge_first[first + lane] - at
                lane += 1
            e = 0
            while same and e < high - low:
                same = edge_to[low + e] - begin == edge_to[at + e] - first
                for way in range(2):
                    same = (
                        same
                        and abs(wire_s[way, low + e] - wire_s[way, at + e]) <= 1e-9 * wire_s[way, at + e]
                        and abs(latency_s[way, low + e] - latency_s[way, at + e]) <= 1e-9 * latency_s[way, at + e]
                        and abs(full[2 * (low + e) + way] - full[2 * (at + e) + way]) <= 1e-9 * full[2 * (at + e) + way]
                    )
                e += 1
            if same:
                like[p] = other
                break
    return like


@compiled
def shared_rates(
    count: int, at: Ints, link: Ints, use: Floats, most: Floats, flying: Ints, rate: Floats, left: Floats, load: Floats
) -> None:
    """Fills in the max-min fair rates of `count` messages that are `flying`, in parts of those that they have alone.

    What they use of links stands at `at`: at a level of 1, which no message exceeds that alone has at `most` that level, a part
    `use` of a `link`. `left` and `load` are room for all links. Levels are raised together until a link is full or a message has
    what it has alone, as in `sim.cost.sharing`.
    """
    for i in range(count):
        rate[flying[i]] = -1.0
    fixed = 0
    for i in range(count):
        for k in range(at[flying[i]], at[flying[i] + 1]):
            left[link[k]] = 1.0
    while fixed < count:
        for i in range(count):
            for k in range(at[flying[i]], at[flying[i] + 1]):
                load[link[k]] = 0.0
        level = np.inf
        for i in range(count):
            number = flying[i]
            if rate[number] < 0:
                level = min(level, most[number])
                for k in range(at[number], at[number + 1]):
                    load[link[k]] += use[k]
        for i in range(count):
            number = flying[i]
            if rate[number] < 0:
                for k in range(at[number], at[number + 1]):
                    level = min(level, left[link[k]] / load[link[k]])
        level *= 1 + 1e-9
        for i in range(count):
            number = flying[i]
            if rate[number] >= 0:
                continue
            here = most[number]
            for k in range(at[number], at[number + 1]):
                if left[link[k]] <= level * load[link[k]]:
                    here = min(here, left[link[k]] / load[link[k]])
            if here <= level:
                rate[number] = here / most[number]
                fixed += 1
        for i in range(count):
            number = flying[i]
            for k in range(at[number], at[number + 1]):
                left[link[k]] = 1.0
        for i in range(count):
            number = flying[i]
            if rate[number] >= 0:
                for k in range(at[number], at[number + 1]):
                    left[link[k]] -= use[k] * rate[number] * most[number]


@compiled
def _stand_ins(
    pipelines: Ints, like: Ints, edge_first: Ints, users: Ints, who: Ints, share: Floats, most: Floats
) -> tuple[Ints, Ints, Ints, Floats]:
    """For which message of the first like pipeline each one counts; where what that uses of links begins in two lists, and these.

    It uses what all that count for it do together, in parts of the link for each level (see `shared_rates`). Links that only
    pipelines like earlier ones use do not count.
    """
    edges, links = edge_first[len(edge_first) - 1], len(users) - 1
    stands = np.empty(2 * edges, np.int64)
    for p in range(len(pipelines)):
        begin, first = (pipelines[p - 1, 0] if p else 0), (pipelines[like[p] - 1, 0] if like[p] else 0)
        for e in range(edge_first[begin], edge_first[pipelines[p, 0]]):
            for way in range(2):
                stands[2 * e + way] = 2 * (e - edge_first[begin] + edge_first[first]) + way
    at, counted, together = np.zeros(2 * edges + 1, np.int64), np.zeros(links, np.bool_), np.zeros(2 * edges)
    for step in range(2):
        if step == 1:
            for number in range(2 * edges):
                at[number + 1] += at[number]
            link, use, placed = np.empty(at[2 * edges], np.int64), np.empty(at[2 * edges]), at[: 2 * edges].copy()
        for k in range(links):
            if step == 0:
                for i in range(users[k], users[k + 1]):
                    counted[k] = counted[k] or stands[who[i]] == who[i]
            if not counted[k]:
                continue
            for i in range(users[k], users[k + 1]):
                together[stands[who[i]]] += share[i]
            for i in range(users[k], users[k + 1]):
                number = stands[who[i]]
                if together[number] > 0:
                    if step == 0:
                        at[number + 1] += 1
                    else:
                        link[placed[number]], use[placed[number]] = k, together[number] / most[number]
                        placed[number] += 1
                    together[number] = 0.0
    return stands, at, link, use


@compiled
def _courses(
    work: Work,
    edge_to: Ints,
    entering_first: Ints,
    entering: Ints,
    wire_s: Floats,
    users: Ints,
    who: Ints,
    share: Floats,
    most: Floats,
    like: Ints,
    worth_s: float,
) -> bool:
    """Follows all pipelines together, as `_alone` does each, message by message where some of them share links.

    Whether they end within `worth_s`; where it turns out that they do not, the rest is not followed.

    Links have `users`, as `_by_link` tells them; `most` is what a message has of a link when it is alone, beside others. Of
    pipelines that are `like` an earlier one only that is followed, and its messages stand for those of all.
    """
    look, part_first, part_s, input_s, eagerness, halves, forwards_s, backwards_s, lanes, pipelines = work[:10]
    edge_first, latency_s, flow_at, sent_s, part_end, part_at, back_end = work[10:]
    count, edges, links = len(lanes), len(flow_at) - 1, len(users) - 1
    edge_from = np.empty(edges, np.int64)
    for lane in range(count):
        edge_from[edge_first[lane] : edge_first[lane + 1]] = lane

    stands, at, link, use = _stand_ins(pipelines, like, edge_first, users, who, share, most)
    # What links have to carry yet, in seconds at their capacity.
    carries_s, sharing, shared = np.zeros(links), np.empty(2 * edges, np.int64), 0
    for number in range(2 * edges):
        if at[number] < at[number + 1] and stands[number] == number:
            sharing[shared] = number
            shared += 1
        for k in range(at[number], at[number + 1]):
            e = number // 2
            carries_s[link[k]] += (flow_at[e + 1] - flow_at[e]) * wire_s[number % 2, e] * use[k] * most[number]
    for k in range(links):
        if carries_s[k] > worth_s:
            return False

    slices = forwards_s.shape[1]
    left, load, rate = np.empty(links), np.empty(links), np.zeros(2 * edges)
    made, begun = np.zeros(2 * edges, np.int64), np.zeros(2 * edges, np.int64)
    sent, under_way = np.zeros((2, edges), np.int64), np.zeros(2 * edges, np.bool_)
    made_s, wire_left_s, since_s = np.empty((2, flow_at[edges])), np.zeros(2 * edges), np.zeros(2 * edges)
    next_s, flying = np.full(2 * edges, np.inf), np.empty(2 * edges, np.int64)
    aloft, now_s, changed, ended = 0, 0.0, np.zeros(links, np.bool_), np.empty(at[2 * edges], np.int64)
    forwards, backwards, free_s = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count)
    depth, passes = np.empty(count, np.int64), np.empty(count, np.int64)
    waiting, asked, is_waiting = np.empty(count, np.int64), 0, np.zeros(count, np.bool_)
    begin = 0
    for p in range(len(pipelines)):
        for lane in range(begin, pipelines[p, 0]):
            depth[lane], passes[lane] = pipelines[p, 1], pipelines[p, 2]
            if like[p] == p:
                waiting[asked], is_waiting[lane] = lane, True
                asked += 1
        begin = pipelines[p, 0]
    while True:
        # Lanes go on as far as what they need has been sent; what they send may be sent later than now.
        while asked:
            asked -= 1
            lane = waiting[asked]
            is_waiting[lane] = False
            ahead, behind, time, micro_batches = forwards[lane], backwards[lane], free_s[lane], passes[lane]
            looks, parts = lanes[lane, LOOK], lanes[lane, PARTS]
            warm_up, weight_s, put_off = lanes[lane, FLYING] - 1, look[looks, WEIGHT_S], 0
            if eagerness:
                warm_up, put_off = eagerness * (depth[lane] - 1 - lanes[lane, PLACE]), eagerness * lanes[lane, PLACE]
            while behind < micro_batches:
                forward = ahead < micro_batches and ahead - behind <= warm_up
                m, way = (ahead, 0) if forward else (behind, 1)
                ready, ready_s = True, time
                if forward:
                    for k in range(entering_first[lane], entering_first[lane + 1]):
                        e = entering[k]
                        ready = ready and sent[0, e] > m
                        if ready:
                            ready_s = max(ready_s, sent_s[0, flow_at[e] + m] + latency_s[0, e])
                else:
                    for e in range(edge_first[lane], edge_first[lane + 1]):
                        ready = ready and sent[1, e] > m
                        if ready:
                            ready_s = max(ready_s, sent_s[1, flow_at[e] + m] + latency_s[1, e])
                if not ready:
                    break
                time = ready_s
                if forward:
                    time += forwards_s[lane, m % slices]
                    sent_now = time
                    ahead += 1
                else:
                    backward_s = backwards_s[lane, m % slices]
                    if m == micro_batches - 1:
                        put_off_s = min(put_off, m) * weight_s
                        sent_now, time = _last_backward(
                            time,
                            parts,
                            part_first,
                            part_s,
                            input_s,
                            halves,
                            backward_s,
                            weight_s,
                            put_off_s,
                            part_end,
                            part_at[lane],
                        )
                    else:
                        sent_now = time + backward_s
                        time = sent_now + (weight_s if halves and m >= put_off else 0.0)
                    behind += 1
                first, stop = edge_first[lane], edge_first[lane + 1]
                if not forward:
                    first, stop = entering_first[lane], entering_first[lane + 1]
                for k in range(first, stop):
                    e = k if forward else entering[k]
                    number, flow = 2 * e + way, flow_at[e] + m
                    made[number] = m + 1
                    if at[number] == at[number + 1]:
                        begins_s = sent_now if m == 0 else max(sent_now, sent_s[way, flow - 1])
                        sent_s[way, flow] = begins_s + wire_s[way, e]
                        sent[way, e] = m + 1
                        to = edge_to[e] if forward else edge_from[e]
                        if not is_waiting[to]:
                            waiting[asked], is_waiting[to] = to, True
                            asked += 1
                    else:
                        made_s[way, flow] = sent_now
                        if not under_way[number] and begun[number] == m:
                            next_s[number] = sent_now if m == 0 else max(sent_now, sent_s[way, flow - 1])
            forwards[lane], backwards[lane], free_s[lane] = ahead, behind, time
            left_s = _least_s(forwards_s[lane], micro_batches - ahead) + _least_s(backwards_s[lane], micro_batches - behind)
            if time + left_s > worth_s * (1 + 1e-9):
                return False

        # Whatever happens at the next moment.
        now_s = np.inf
        for i in range(shared):
            now_s = min(now_s, next_s[sharing[i]])
        if now_s == np.inf:
            break
        until_s, over = now_s * (1 + 1e-12), 0
        for one in range(shared):
            number = sharing[one]
            if next_s[number] > until_s:
                continue
            e, way = number // 2, number % 2
            if under_way[number]:
                m = begun[number] - 1
                sent_s[way, flow_at[e] + m] = now_s
                sent[way, e] = m + 1
                under_way[number] = False
                for k in range(at[number], at[number + 1]):
                    changed[link[k]] = True
                    ended[over] = link[k]
                    over += 1
                    carries_s[link[k]] -= wire_s[way, e] * use[k] * most[number]
                    if now_s + carries_s[link[k]] > worth_s * (1 + 1e-9):
                        return False
                to = edge_to[e] if way == 0 else edge_from[e]
                if not is_waiting[to]:
                    waiting[asked], is_waiting[to] = to, True
                    asked += 1
                for i in range(aloft):
                    if flying[i] == number:
                        aloft -= 1
                        flying[i] = flying[aloft]
                        break
                if made[number] == begun[number]:
                    next_s[number] = np.inf
                    continue
                next_s[number] = max(now_s, made_s[way, flow_at[e] + begun[number]])
                if next_s[number] > until_s:
                    continue
            under_way[number], rate[number] = True, 0.0
            wire_left_s[number], since_s[number] = wire_s[way, e], now_s
            begun[number] += 1
            flying[aloft] = number
            aloft += 1
        # Rates change where links are changed, and where these have messages in common with others.
        touched, more = 0, True
        while more:
            more = False
            for i in range(touched, aloft):
                number = flying[i]
                reached = rate[number] == 0.0
                for k in range(at[number], at[number + 1]):
                    reached = reached or changed[link[k]]
                if reached:
                    for k in range(at[number], at[number + 1]):
                        changed[link[k]] = more = True
                    flying[i], flying[touched] = flying[touched], number
                    touched += 1
        for i in range(touched):
            number = flying[i]
            wire_left_s[number] = max(0.0, wire_left_s[number] - (now_s - since_s[number]) * rate[number])
            since_s[number] = now_s
        shared_rates(touched, at, link, use, most, flying, rate, left, load)
        for i in range(touched):
            number = flying[i]
            next_s[number] = now_s + wire_left_s[number] / rate[number]
            for k in range(at[number], at[number + 1]):
                changed[link[k]] = False
        for k in range(over):
            changed[ended[k]] = False
    for p in range(len(pipelines)):
        begin, first = (pipelines[p - 1, 0] if p else 0), (pipelines[like[p] - 1, 0] if like[p] else 0)
        for lane in range(begin, pipelines[p, 0]):
            same = first + lane - begin
            back_end[lane] = free_s[same]
            if same != lane:
                for k in range(part_at[lane + 1] - part_at[lane]):
                    part_end[part_at[lane] + k] = part_end[part_at[same] + k]
    return True


@compiled
def _first_after(sent_s: Floats, way: int, start: int, stop: int, moment_s: float) -> int:
    """The first of some messages of one way that is sent after a moment."""
    while start < stop:
        middle = (start + stop) // 2
        if sent_s[way, middle] > moment_s:
            stop = middle
        else:
            start = middle + 1
    return start


@compiled
def _lost(share: float, level: float, again: bool) -> float:
    """What a message loses in each second that it has but a level of the link of which alone it takes a share: of what it takes
    when nothing meets, or `again` of what it takes as it is."""
    if share <= level:
        return 0.0
    return 1 - level / share if again else share / level - 1


@compiled
def _two_lose(
    sent_s: Floats,
    at: Ints,
    until: Ints,
    ways: Ints,
    shares: Floats,
    each_s: Floats,
    turn_s: Floats,
    to_s: float,
    short_s: float,
    again: bool,
    lost_s: Floats,
) -> None:
    """Adds to `lost_s` what the two users of a link lose by meeting before `to_s`; see `_meet`, of which it is a quicker way."""
    level = max(0.5, 1 - min(shares[0], shares[1]))
    one = _lost(shares[0], level, again)
    other = _lost(shares[1], level, again)
    i, j, i_until, j_until, i_way, j_way = at[0], at[1], until[0], until[1], ways[0], ways[1]
    i_from, j_from, i_each, j_each = turn_s[0], turn_s[1], each_s[0], each_s[1]
    i_to = sent_s[i_way, i] if i < i_until else np.inf
    j_to = sent_s[j_way, j] if j < j_until else np.inf
    while i_from < to_s and j_from < to_s:
        both_s = min(min(i_to, j_to), to_s) - max(i_from, j_from)
        if both_s > short_s:
            lost_s[0] += both_s * one
            lost_s[1] += both_s * other
        if i_to <= j_to:
            i += 1
            if i == i_until:
                break
            i_from = max(sent_s[i_way, i] - i_each, i_to)
            i_to = sent_s[i_way, i]
        else:
            j += 1
            if j == j_until:
                break
            j_from = max(sent_s[j_way, j] - j_each, j_to)
            j_to = sent_s[j_way, j]


@compiled
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

    Whether that has changed. A message that meets others is on its way longer by what the meeting takes from it at max-min rates.
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
    at, until, ways = np.empty(widest, np.int64), np.empty(widest, np.int64), np.empty(widest, np.int64)
    inside, is_inside, turn_s = np.empty(widest, np.int64), np.zeros(widest, np.bool_), np.empty(widest)
    lost_s, each_s, shares = np.empty(widest), np.empty(widest), np.empty(widest)
    worst_s, busy_s, total_s = np.zeros(2 * edges), np.zeros(2 * edges), np.zeros(2 * edges)
    first = np.empty(2 * edges, np.int64)
    whole = STRETCHES * stretch_s >= end_s
    for stretch in range(1 if whole else STRETCHES):
        from_s = 0.0 if whole else end_s * (stretch + 1) / (STRETCHES + 1) - stretch_s / 2
        to_s = end_s if whole else from_s + stretch_s
        first[:], worst_s[:] = -1, 0.0
        for k in range(links):
            base, count = users[k], users[k + 1] - users[k]
            if count == 0:
                continue
            for i in range(count):
                number = who[base + i]
                way, e = number % 2, number // 2
                each_s[i] = wire_s[way, e] * (slowed[way, e] if again else 1.0)
                if first[number] < 0:
                    first[number] = _first_after(sent_s, way, flow_at[e], flow_at[e + 1], from_s)
                    free_s = from_s
                    for m in range(first[number], flow_at[e + 1]):
                        begins_s = max(sent_s[way, m] - each_s[i], free_s)
                        if begins_s >= to_s:
                            break
                        free_s = sent_s[way, m]
                        busy_s[number] += min(free_s, to_s) - begins_s
                at[i], until[i], ways[i], shares[i] = first[number], flow_at[e + 1], way, share[base + i]
                is_inside[i], lost_s[i] = False, 0.0
                turn_s[i] = max(from_s, sent_s[way, at[i]] - each_s[i]) if at[i] < until[i] else np.inf
            now_s, total, present = from_s, 0.0, 0
            if count == 2:
                _two_lose(sent_s, at, until, ways, shares, each_s, turn_s, to_s, 1e-12 * end_s, again, lost_s)
            while count > 2:
                chosen, next_s = -1, to_s
                for i in range(count):
                    if turn_s[i] < next_s:
                        chosen, next_s = i, turn_s[i]
                if total > 1 + 1e-9 and present > 1 and next_s - now_s > 1e-12 * end_s:
                    level = _level(shares, inside, present)
                    for n in range(present):
                        lost_s[inside[n]] += (next_s - now_s) * _lost(shares[inside[n]], level, again)
                now_s = next_s
                if chosen < 0:
                    break
                if is_inside[chosen]:
                    is_inside[chosen], present, total = False, present - 1, total - shares[chosen]
                    n = 0
                    while inside[n] != chosen:
                        n += 1
                    while n < present:
                        inside[n] = inside[n + 1]
                        n += 1
                    at[chosen] += 1
                    turn_s[chosen] = np.inf
                    if at[chosen] < until[chosen]:
                        turn_s[chosen] = max(sent_s[ways[chosen], at[chosen]] - each_s[chosen], next_s)
                else:
                    # In their order, in which they are added up.
                    n = present
                    while n > 0 and inside[n - 1] > chosen:
                        inside[n] = inside[n - 1]
                        n -= 1
                    inside[n] = chosen
                    is_inside[chosen], present, total = True, present + 1, total + shares[chosen]
                    turn_s[chosen] = sent_s[ways[chosen], at[chosen]]
            for i in range(count):
                number = who[base + i]
                worst_s[number] = max(worst_s[number], lost_s[i])
        for number in range(2 * edges):
            total_s[number] += worst_s[number]
    changed = False
    for number in range(2 * edges):
        way, e = number % 2, number // 2
        slow = total_s[number] / busy_s[number] if busy_s[number] > 0 else 0.0
        longer = 1 / max(1 - slow, 0.01) if again else 1 + slow
        changed = changed or abs(longer - slowed[way, e]) > SETTLED * slowed[way, e]
        slowed[way, e] = longer
    return changed


# --- Exchanges -------------------------------------------------------------------------------------------------------


@compiled
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


@compiled
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


@compiled
def _fit(
    tables: Tables, sizes: Sizes, lanes: Ints, shards: Floats, embeddings: int, heads: int, num_bytes: Floats, step_s: Floats
) -> bool:
    """Whether all lanes fit; fills in their bytes at the peak, summed as in `sim.cost.memory`, and seconds of their steps."""
    look, step, step_first, capacity_bytes = tables.look, tables.step, tables.step_first, tables.capacity_bytes
    for lane in range(len(lanes)):
        at, flying = lanes[lane, LOOK], lanes[lane, FLYING]
        ends = look[at, EMBEDDING] / embeddings + look[at, HEAD] / heads + look[at, COPY] / embeddings
        parameters = shards[lanes[lane, SHARD]] * look[at, PER_LAYER] + ends
        allocated = (
            look[at, FIXED]
            + np.rint(flying * look[at, KEPT])
            + np.rint(sizes.logits_scale * flying * look[at, LOGITS])
            + np.rint(parameters * sizes.state_bytes)
        )
        context = look[at, CONTEXT] + lanes[lane, SHARED] * sizes.communicator_bytes
        num_bytes[lane] = allocated + np.rint(sizes.fragmentation * allocated) + context
        if num_bytes[lane] > capacity_bytes[lanes[lane, GROUP]]:
            return False
        steps = int(look[at, STEPS])
        step_s[lane] = 0.0
        for k in range(step_first[steps], step_first[steps + 1]):
            step_s[lane] = max(step_s[lane], step[k, 0] + step[k, 1] * parameters)
    return True


@compiled
def _messages(
    world: World,
    transfers: Transfers,
    tables: Tables,
    sizes: Sizes,
    pipelines: Ints,
    lanes: Ints,
    load: Floats,
    touched: Ints,
    edge_first: Ints,
    entering_first: Ints,
    edge_to: Ints,
    flow_at: Ints,
    row_of: Ints,
    wire_s: Floats,
    latency_s: Floats,
) -> tuple[int, bool]:
    """Fills in the messages, forth and back, of each edge: of two lanes of neighbouring stages with sequences in common.

    How many edges there are, and whether there was no room for a transfer.
    """
    place, key, seconds = transfers.place, transfers.key, transfers.seconds
    group_first, device, asked = tables.group_first, tables.device, world.asked
    capacity, card = world.capacity, world.card
    widest, full = 1, False
    for lane in range(len(lanes)):
        widest = max(widest, group_first[lanes[lane, GROUP] + 1] - group_first[lanes[lane, GROUP]])
    room, no_lines = np.empty(3 * widest, np.int64), np.empty((0, 2))
    begin, edges = 0, 0
    for p in range(len(pipelines)):
        for a in range(begin, pipelines[p, 0]):
            for b in range(a + 1, pipelines[p, 0]):
                if lanes[b, PLACE] > lanes[a, PLACE] + 1:
                    break
                common = min(lanes[a, TO], lanes[b, TO]) - max(lanes[a, FROM], lanes[b, FROM])
                if lanes[b, PLACE] == lanes[a, PLACE] or common <= 0:
                    continue
                for way in range(2):
                    one, other = lanes[a if way == 0 else b, GROUP], lanes[b if way == 0 else a, GROUP]
                    named = -1 - other if sizes.sequence_parallel else other
                    at = _place_of(place, key, one, named)
                    row = place[at]
                    if row < 0:
                        before = asked[0]
                        count, late_s = _message(
                            world,
                            load,
                            touched,
                            device[group_first[one] : group_first[one + 1]],
                            device[group_first[other] : group_first[other + 1]],
                            room,
                            sizes.start_s,
                            sizes.sequence_parallel,
                        )
                        missing = asked[0] > before
                        row = _keep(
                            transfers, at, one, named, capacity, card, load, touched, count, late_s, late_s, no_lines, missing
                        )
                        full = full or (row < 0 and not missing)
                    row_of[2 * edges + way] = row
                    if row >= 0:
                        wire_s[way, edges] = common * sizes.boundary_bytes * seconds[row, 0]
                        latency_s[way, edges] = seconds[row, 2]
                edge_to[edges] = b
                entering_first[b + 1] += 1
                flow_at[edges + 1] = flow_at[edges] + pipelines[p, 2]
                edges += 1
            edge_first[a + 1] = edges
        begin = pipelines[p, 0]
    for lane in range(len(lanes)):
        entering_first[lane + 1] += entering_first[lane]
    return edges, full


@compiled
def _exchanges(
    world: World,
    transfers: Transfers,
    tables: Tables,
    sizes: Sizes,
    pipelines: Ints,
    lanes: Ints,
    load: Floats,
    touched: Ints,
    bounds: Ints,
    segments: int,
    members: Ints,
    held_by: Ints,
    row_of: Ints,
) -> bool:
    """Fills in who holds each segment, and the exchange of one byte among them; the last two are the embedding and the head.

    Whether there was no room for a transfer. Members stand in the order of their devices, so that rings hardly need sorting.
    """
    place, key, asked = transfers.place, transfers.key, world.asked
    group_first, device, group_key = tables.group_first, tables.device, tables.group_key
    count, found, full = len(lanes), 0, False
    at_device, around, last = np.full(len(world.node), -1, np.int64), np.empty(count, np.int64), np.zeros(count, np.bool_)
    begin = 0
    for p in range(len(pipelines)):
        for lane in range(begin, pipelines[p, 0]):
            at_device[device[group_first[lanes[lane, GROUP]]]] = lane
            last[lane] = lanes[lane, PLACE] == pipelines[p, 1] - 1
        begin = pipelines[p, 0]
    for number in range(len(at_device)):
        if at_device[number] >= 0:
            around[found] = at_device[number]
            found += 1
    groups, member, order = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for s in range(segments + 2):
        held, one, other = 0, 0, 0
        for i in range(count):
            lane = around[i]
            if s < segments:
                inside = lanes[lane, START] <= bounds[s] and bounds[s + 1] <= lanes[lane, STOP]
            elif s == segments:
                inside = lanes[lane, PLACE] == 0 or (sizes.tied and last[lane])
            else:
                inside = last[lane]
            if inside:
                group = lanes[lane, GROUP]
                groups[held], members[s, held] = group, lane
                one, other = one + group_key[group, 0], other + group_key[group, 1]
                held += 1
        held_by[s], row_of[s] = held, -1
        if held < 2:
            continue
        at = _place_of(place, key, one, other)
        if place[at] < 0:
            before = asked[0]
            used, low_s, full_s, lines = _across(world, group_first, device, load, touched, groups, member, order, held)
            missing = asked[0] > before
            row_of[s] = _keep(
                transfers, at, one, other, world.capacity, world.card, load, touched, used, low_s, full_s, lines, missing
            )
            full = full or (row_of[s] < 0 and not missing)
        else:
            row_of[s] = place[at]
    return full


@compiled
def evaluate(
    common: Any,
    pipelines: Ints,
    lanes: Ints,
    shards: Floats,
    embeddings: int,
    heads: int,
    worth_s: float,
    busy_s: Floats,
    num_bytes: Floats,
) -> tuple[float, int]:
    """Seconds of an iteration, infinite where a lane does not fit, and how the evaluation ended.

    A micro-batch stands for a slice of one where sequences come in slices, here and below.

    Messages that meet are slowed by what some stretches of time show them to lose. With `worth_s` above 0 they are followed one
    by one, unless they are many and it is finite; where an iteration takes longer than that, the seconds are any that are longer.

    Fills in lanes' busy seconds, and their bytes. `pipelines` has a row for each: the lane after its last, its depth, its
    micro-batches. Lanes stand in layer order. `shards` are the layers whose state a lane keeps, by `SHARD`; the states of the
    embedding and of the head are divided over so many.
    """
    world, transfers, tables, sizes = common.world, common.transfers, common.tables, common.sizes
    count = len(lanes)
    step_s = np.empty(count)
    if not _fit(tables, sizes, lanes, shards, embeddings, heads, num_bytes, step_s):
        return np.inf, DONE
    # Taken out of their tuples once: a tuple that is passed on has all its arrays counted anew.
    look, part_first, part_s, asked = tables.look, tables.part_first, tables.part_s, world.asked
    input_s, halves = tables.input_s, sizes.halves
    row_seconds, row_first, row_link, row_share = transfers.seconds, transfers.first, transfers.link, transfers.share
    first_line, line, capacity = transfers.first_line, transfers.line, world.capacity
    start_s, links, crosses = sizes.start_s, len(world.capacity), transfers.crosses
    load, touched = np.zeros(links), np.empty(links, np.int64)

    slices = tables.pass_s.shape[2]
    forwards_s, backwards_s = np.empty((count, slices)), np.empty((count, slices))
    _passes(tables, pipelines, lanes, links, worth_s > 0, forwards_s, backwards_s)

    # Messages.
    edge_first, entering_first = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    wire_s, latency_s = np.zeros((2, 2 * count)), np.zeros((2, 2 * count))
    edge_to, flow_at, row_of = np.empty(2 * count, np.int64), np.zeros(2 * count + 1, np.int64), np.empty(4 * count, np.int64)
    edges, full = _messages(
        world,
        transfers,
        tables,
        sizes,
        pipelines,
        lanes,
        load,
        touched,
        edge_first,
        entering_first,
        edge_to,
        flow_at,
        row_of,
        wire_s,
        latency_s,
    )
    flow_at = flow_at[: edges + 1]

    # Segments: layers that the same lanes hold. The last two are the embedding and the head.
    n = sizes.layers
    cut = np.zeros(n + 1, np.bool_)
    for lane in range(count):
        cut[lanes[lane, START]] = cut[lanes[lane, STOP]] = True
    bounds, segments = np.empty(n + 1, np.int64), -1
    for layer in range(n + 1):
        if cut[layer]:
            segments += 1
            bounds[segments] = layer
    most = segments + 2
    members, held_by, exchange_of = np.empty((most, count), np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    full = (
        _exchanges(
            world, transfers, tables, sizes, pipelines, lanes, load, touched, bounds, segments, members, held_by, exchange_of
        )
        or full
    )
    if asked[0]:
        return np.inf, MISSING
    if full:
        return np.inf, FULL

    # The pipelines: first with messages alone on their links, then with what they lose by meeting.
    entering, placed = np.empty(edges, np.int64), entering_first[:count].copy()
    for e in range(edges):
        entering[placed[edge_to[e]]] = e
        placed[edge_to[e]] += 1
    users, who, share = _by_link(links, row_of[: 2 * edges], row_first, row_link, row_share)
    part_at = np.zeros(count + 1, np.int64)
    for lane in range(count):
        parts = lanes[lane, PARTS]
        part_at[lane + 1] = part_at[lane] + (part_first[parts + 1] - part_first[parts] if parts >= 0 else 0)
    part_end, back_end = np.empty(part_at[count]), np.empty(count)
    sent_s, slowed = np.empty((2, flow_at[edges])), np.ones((2, 2 * count))
    longer_s = wire_s.copy()
    attempts, closely = ATTEMPTS if edges <= MANY_EDGES else FEWER_ATTEMPTS, worth_s > 0 and len(who) > 0
    like = np.arange(len(pipelines))
    if closely:
        like = _like_earlier(pipelines, lanes, edge_first, edge_to, wire_s, latency_s, users, who, share)
        messages, begin = 0, 0
        for p in range(len(pipelines)):
            if like[p] == p:
                messages += flow_at[edge_first[pipelines[p, 0]]] - flow_at[edge_first[begin]]
            begin = pipelines[p, 0]
        closely = messages <= FOLLOWED or worth_s == np.inf
        attempts = 0 if closely else attempts
    anew, no_users = np.ones(len(pipelines), np.bool_), np.zeros(1, np.int64)
    work = Work(
        *(look, part_first, part_s, input_s, sizes.eagerness, halves, forwards_s, backwards_s, lanes, pipelines),
        *(edge_first, latency_s, flow_at, sent_s, part_end, part_at, back_end),
    )
    for attempt in range(attempts):
        if count == pipelines[:, 1].sum():
            _alone(work, anew, longer_s)
        else:
            alone = np.ones(2 * edges)
            _courses(work, edge_to, entering_first, entering, longer_s, no_users, who[:0], share[:0], alone, like, np.inf)
        if attempt < attempts - 1:
            if not _meet(pipelines, edge_first, flow_at, wire_s, sent_s, back_end, users, who, share, slowed, attempt > 0):
                break
            begin = 0
            for p in range(len(pipelines)):
                anew[p] = False
                for e in range(edge_first[begin], edge_first[pipelines[p, 0]]):
                    for way in range(2):
                        now_s = wire_s[way, e] * slowed[way, e]
                        anew[p] = anew[p] or now_s != longer_s[way, e]
                        longer_s[way, e] = now_s
                begin = pipelines[p, 0]

    if closely:
        most_alone = np.ones(2 * edges)
        for number in range(2 * edges):
            row = row_of[number]
            fullest = 0.0
            for k in range(row_first[row], row_first[row + 1]):
                if row_share[k] > fullest:
                    fullest, most_alone[number] = row_share[k], row_share[k] * capacity[row_link[k]]
        most_alone /= most_alone.max()
        in_time = _courses(work, edge_to, entering_first, entering, wire_s, users, who, share, most_alone, like, worth_s)
        if not in_time:
            return np.nextafter(worth_s, np.inf), DONE

    # Exchanges: the reductions, last layers first; then, after the optimizer's step, the gathers, first layers first.
    free = np.zeros(count)
    begin = 0
    for p in range(len(pipelines)):
        for lane in range(begin, pipelines[p, 0]):
            at, parts = lanes[lane, LOOK], lanes[lane, PARTS]
            both_s = forwards_s[lane].sum() + backwards_s[lane].sum() + slices * look[at, WEIGHT_S]
            busy_s[lane] = pipelines[p, 2] // slices * both_s + step_s[lane]
            if parts >= 0:
                busy_s[lane] += input_s[parts] - backwards_s[lane, slices - 1] - look[at, WEIGHT_S]
                for k in range(part_first[parts], part_first[parts + 1]):
                    busy_s[lane] += part_s[k]
        begin = pipelines[p, 0]
    turns = 2 if sizes.gathers else 1
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
            row = exchange_of[s]
            if row < 0:
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
            scale = sizes.collective_scale if crosses[row] else sizes.node_collective_scale
            segment[items] = s
            for bucket in range(buckets):
                size = min(each, stop - start - (bucket if turn == 0 else buckets - 1 - bucket) * each)
                byte_s, low_s, full_s = row_seconds[row, 0], row_seconds[row, 1], row_seconds[row, 2]
                if first_line[row] < first_line[row + 1]:
                    full_s = 0.0
                    for k in range(first_line[row], first_line[row + 1]):
                        full_s = max(full_s, line[k, 0] - size * unit_bytes * (byte_s - line[k, 1]))
                on_wire_s, late_s = _exchange_s(start_s, scale, size * unit_bytes, byte_s, low_s, full_s)
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
    users, who, share = _by_link(links, exchange_of, row_first, row_link, row_share)
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
        used = 0
        for i in range(items):
            used += row_first[exchange_of[segment[i]] + 1] - row_first[exchange_of[segment[i]]]
        item_at, item_link, item_share = np.zeros(items + 1, np.int64), np.empty(used, np.int64), np.empty(used)
        for i in range(items):
            item_at[i + 1] = item_at[i]
            row = exchange_of[segment[i]]
            for k in range(row_first[row], row_first[row + 1]):
                if users[row_link[k]] < users[row_link[k] + 1]:
                    item_link[item_at[i + 1]] = row_link[k]
                    item_share[item_at[i + 1]] = row_share[k] * wires_s[i] / max(seconds[i], 1e-300)
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
    return end_s, DONE
