"""The most work of islands that not every sequence can enter and leave, as a mixed-integer program.

The Lagrangian of `partition.network` prices one thing that islands share, the sequences begun and ended, and asks it in no time.
What it does not ask is where the layers are that an island shares: what one island saves another has to carry. All of it
together is a small program over the plans of some seconds T, in which no exchange takes W seconds or longer. Whatever a plan
does, its averages are a solution, so that the optimum is an upper bound; and where there is none, there is no such plan.

Let a layer be an island's own if no other holds all that it holds of it: all B sequences then use the island for it. Every
other layer is shared. Of a shared layer each parameter lies on two islands or more, so that all exchanges of it together are
two whole ones at least, wherever groups that span islands hold it in parts. An island does a layer by itself only where it
holds all of it; and no sequence passes a layer twice. So if U layers are shared, and island i exchanges e_i layers,

    sum over islands of e_i >= 2 U,    no e_i > the sum of all others,    what islands without own layers do by themselves <= B U

The same of the embedding: of several islands that hold it whole and begin sequences each exchanges it. So of the head, at the
end, if the two are not tied. With b and z sequences begun and ended, the links of an island, in seconds, carry in T

    own layers       alpha (2 B - b - z) + sigma e + what it exchanges of embedding and head
                     (of two such islands each is entered or left by every sequence: b + z <= B)
    shared layers    alpha max(2 v - b - z, v) + 2 alpha s + sigma e + the same, for v visits, and s layers of sequences in parts,
                     by groups that span islands (alpha v only if others have own layers). If it holds d layers whole, and e >= d,
                     the visits do d v layers of sequences at most, of B d in all

of which the exchanges are less than W. It may be a mixture of such islands, one for each d. And if an island alone holds the
whole embedding, or alone has the whole head, all sequences use it: at least alpha (B - z), or alpha (B - b), in place of the
visits.

Heads. A GPU that computes E seconds at G a layer does E / G layers of sequences, at most C. If it also computes h heads, of at
least H seconds, it does no more than C - h H C / T: for where G <= T / C, the heads take h H / G from E / G <= C, and elsewhere
it does (T - h H) / G at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from partition.islands import Island

TOLERANCE = 1e-6
"""By how much, as a fraction, the optimum may be better than what the solver finds, and the work less than is needed."""

NODES = 1000
"""The solver gives up after so many nodes of its tree, and has an upper bound then, too; most need one."""


@dataclass(frozen=True)
class Visited:
    """An island, and what is known of it."""

    island: Island
    own: bool | None
    """Whether it has own layers; None if it is not known, and its links shall not limit what it computes."""
    capacity: float
    """The layers of sequences that its GPUs do at most."""
    head_layers: float
    """As so many of them a head counts at least."""


@dataclass
class _Program:
    """Variables that are not negative, and sums of them that are at most something."""

    worth: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    sums: list[dict[int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, most: float = math.inf, worth: float = 0.0, whole: bool = False) -> int:
        """A new variable of at most so much."""
        self.worth.append(worth)
        self.most.append(most)
        self.whole.append(whole)
        return len(self.worth) - 1

    def at_most(self, limit: float, terms: Iterable[tuple[int, float]]) -> None:
        """Nothing; adds that the sum of variables, each times a factor, is at most `limit`."""
        total: dict[int, float] = {}
        for variable, factor in terms:
            total[variable] = total.get(variable, 0.0) + factor
        self.sums.append(total)
        self.limits.append(limit)

    def optimum(self) -> float | None:
        """An upper bound, close to the least one, on what the variables are worth; None where they have no values."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, which only a bound shall wait for
        from scipy.sparse import coo_array

        entries = [(row, column, factor) for row, total in enumerate(self.sums) for column, factor in total.items()]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.sums), len(self.worth))).tocsr()
        found = milp(
            -np.array(self.worth),
            integrality=np.array(self.whole, int),
            bounds=Bounds(0.0, np.array(self.most)),
            constraints=LinearConstraint(matrix, -math.inf, np.array(self.limits)),
            options={"mip_rel_gap": TOLERANCE, "node_limit": NODES},
        )
        if found.status == 2:
            return None
        return math.inf if found.mip_dual_bound is None else -float(found.mip_dual_bound)


@dataclass(frozen=True)
class _State:
    """The variables of an island that has own layers, or that holds so many layers whole."""

    share: int
    """How far the island is so."""
    alone: int
    """Layers of sequences that it does by itself; all that it does, if it has own layers."""
    parts: int
    """Those that groups do which span islands."""
    heads: int
    begun: int
    ended: int
    exchanged: int
    """Layers."""
    embedding: int
    """Whether the embedding is exchanged."""
    head: int
    """Whether the head is."""


def most_by_visits(
    visited: Sequence[Visited], seconds: float, batch: int, layers: int, exchange_s: float, repeated: float, head_layers: float
) -> float | None:
    """The most layers of sequences that islands without own layers do, a head counted as `head_layers`; None if no plan can be.

    That is of plans of so many seconds in which no exchange takes `exchange_s` or longer, if that of layers moves `repeated`
    times the bytes. (Embedding and head are summed once, whatever layers are.)
    """
    # In parts of the batch and of the seconds, so that all numbers are of a size that the solver likes.
    program = _Program()
    own = sum(one.own is True for one in visited)
    limit = min(exchange_s / seconds, 1.0)
    islands: list[list[_State]] = []
    carried: list[list[tuple[int, float]]] = []
    """What the links of islands without own layers carry, but for crossings."""
    for one in visited:
        island = one.island
        crossing, sigma = batch * island.crossing_s / seconds, repeated * island.shared_s / seconds
        most = min(float(layers), limit / sigma) if sigma else float(layers)
        states = []
        carried.append([])
        for held in [0] if one.own is not False else _held(layers, limit, exchange_s < seconds, sigma):
            worth = float(one.own is False)
            state = _State(
                share=program.variable(1),
                alone=program.variable(worth=worth),
                parts=program.variable(worth=worth),
                heads=program.variable(worth=worth * head_layers),
                begun=program.variable(1),
                ended=program.variable(1),
                exchanged=program.variable(),
                embedding=program.variable(1),
                head=program.variable(1),
            )
            states.append(state)
            done = [(state.alone, 1.0), (state.parts, 1.0), (state.heads, one.head_layers)]
            program.at_most(0, [*done, (state.share, -one.capacity / batch)])
            exchange = [
                (state.exchanged, sigma),
                (state.embedding, island.embedding_s / seconds),
                (state.head, island.head_s / seconds),
            ]
            program.at_most(0, [(state.exchanged, 1), (state.share, -most)])
            program.at_most(0, [*exchange, (state.share, -limit)])
            if one.own is None:
                continue
            ends = [(state.begun, -crossing), (state.ended, -crossing)]
            if one.own:
                program.at_most(0, [(state.share, 2 * crossing - 1), *ends, *exchange])
                if own > 1:
                    program.at_most(1, [(state.begun, 1), (state.ended, 1)])
                continue
            visits = program.variable()
            besides = [(state.parts, 2 * crossing), *exchange]
            carried[-1] += besides
            program.at_most(0, [(visits, 2 * crossing), *ends, *besides, (state.share, -1)])
            program.at_most(0, [(visits, crossing if own else 0.0), *besides, (state.share, -1)])
            program.at_most(0, [(state.begun, 1), (state.ended, 1), (visits, -2)])
            program.at_most(0, [(state.alone, 1), (visits, -held)])
            program.at_most(0, [(state.alone, 1), (state.share, -held)])
            program.at_most(0, [(state.share, held), (state.exchanged, -1)])
        program.at_most(1, [(state.share, 1) for state in states])
        program.at_most(-1, [(state.share, -1) for state in states])
        islands.append(states)
    every = [state for states in islands for state in states]
    # All of the work is done once, and no shared layer twice.
    done_by_all = [variable for state in every for variable in (state.alone, state.parts)]
    program.at_most(-layers * (1 - TOLERANCE), [(variable, -1) for variable in done_by_all])
    program.at_most(layers * (1 + TOLERANCE), [(variable, 1) for variable in done_by_all])
    program.at_most(-1 + TOLERANCE, [(state.heads, -1) for state in every])
    program.at_most(1, [(state.heads, 1) for state in every])
    without = [states for one, states in zip(visited, islands, strict=True) if one.own is False]
    shared = [(state.alone, 2) for states in without for state in states]
    program.at_most(0, [*shared, *((state.exchanged, -1) for state in every)])
    for states in islands:  # what is shared is elsewhere, too
        elsewhere = [(state.exchanged, -1) for others in islands if others is not states for state in others]
        program.at_most(0, [*((state.exchanged, 1) for state in states), *elsewhere])
    for one_end, other_end, exchange_of in (("begun", "ended", "embedding"), ("ended", "begun", "head")):
        program.at_most(1, [(getattr(state, one_end), 1) for state in every])
        # One island alone may have it without an exchange, but is then used by all sequences.
        only = [program.variable(1, whole=True) for _ in islands]
        program.at_most(1, [(alone, 1) for alone in only])
        for one, alone, states, besides in zip(visited, only, islands, carried, strict=True):
            exchanging = [(getattr(state, exchange_of), -1) for state in states]
            program.at_most(0, [*((getattr(state, one_end), 1) for state in states), *exchanging, (alone, -1)])
            if one.own is False:
                crossing = batch * one.island.crossing_s / seconds
                passing = [(getattr(state, other_end), -crossing) for state in states]
                program.at_most(1, [(alone, crossing), *passing, *besides])
    optimum = program.optimum()
    return None if optimum is None else batch * optimum


def _held(layers: int, limit: float, shorter: bool, sigma: float) -> Iterable[int]:
    """How many layers an island can hold whole, each with an exchange of `sigma`; all of these are `shorter` than the limit."""
    if sigma == 0:
        return range(1 + layers)
    most = math.ceil(limit / sigma * (1 - TOLERANCE)) - 1 if shorter else math.floor(limit / sigma)
    return range(1 + min(layers, most))
