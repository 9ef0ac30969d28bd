"""Elimination orders: in which order to sum the variables out, and how large the tables become that way.

Finding the best order is NP-hard. The two greedy rules here are the ones that work: *min-fill* takes the variable whose
elimination joins the fewest new pairs of neighbours, *min-degree* the one with the smallest bucket, which is cheaper to
decide and nearly as good. Min-degree may take many variables at once, as long as they are not neighbours: a chain is
then halved in each round, and a hundred thousand variables need seventeen rounds.

Once buckets are larger than any memory, an order only tells how hopeless a graph is. Either rule then gives up after
some time and takes the variables that are left as they are numbered.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOPELESS = 2**48
"""Entries that no memory holds."""

PATIENCE = 3 * 10**7
"""Pairs of neighbours that are looked at for hopeless buckets: some seconds."""

Adjacency = list[set[int]]


@dataclass(frozen=True)
class Shape:
    """What an order costs, before any number is looked at."""

    width: int
    """Variables in the largest bucket, less the one summed out: an upper bound of the treewidth."""
    entries: int
    """Entries of all buckets together."""
    message_entries: int
    """Entries of all messages together."""
    depth: int
    """Steps that have to come one after the other."""


def adjacency(variables: int, scopes: Iterable[Sequence[int]]) -> Adjacency:
    """For each variable the set of those it shares a scope with."""
    neighbours: Adjacency = [set() for _ in range(variables)]
    for scope in scopes:
        if len(scope) == 2:
            a, b = scope
            neighbours[a].add(b)
            neighbours[b].add(a)
            continue
        for a in scope:
            neighbours[a].update(scope)
    for variable, others in enumerate(neighbours):
        others.discard(variable)
    return neighbours


def min_fill(neighbours: Adjacency, states: Sequence[int], free: Sequence[int]) -> list[int]:
    """Always the variable whose elimination adds the fewest edges; among equals the one with the smallest bucket.

    Neighbourhoods are bit sets, so that counting an edge's common neighbours is one ``and``.
    """
    bits = [sum(1 << other for other in others) for others in neighbours]
    present = [set(others) for others in neighbours]
    logs = [math.log2(count) for count in states]

    def score(variable: int) -> tuple[int, float, int]:
        own, others = bits[variable], present[variable]
        missing = sum(len(others) - 1 - (own & bits[other]).bit_count() for other in others)
        return missing // 2, _log_entries(variable, others, logs), variable

    best = {variable: score(variable) for variable in free}
    heap = sorted(best.values())
    order: list[int] = []
    hopeless, patience = math.log2(HOPELESS), PATIENCE
    while heap:
        entry = heapq.heappop(heap)
        variable = entry[2]
        if best.get(variable) != entry:
            continue
        del best[variable]
        order.append(variable)
        clique = present[variable]
        if len(clique) == len(best):
            # the rest are all joined to each other now: any order is as good
            return order + sorted(clique)
        around = bits[variable]
        if not entry[0]:
            # nothing new is joined: its neighbours lose it, and the pairs that it was part of
            for other in clique:
                present[other].discard(variable)
                bits[other] &= ~(1 << variable)
                fill, size, _ = best[other]
                fill -= (bits[other] & ~around).bit_count()
                best[other] = fill, size - logs[variable], other
                heapq.heappush(heap, best[other])
            continue
        changed = set(clique)
        for other in clique:
            present[other] |= clique
            present[other] -= {other, variable}
            bits[other] = (bits[other] | around) & ~(1 << other) & ~(1 << variable)
        # a new edge changes the fill of everything next to both its ends
        for other in clique:
            changed |= present[other]
        if entry[1] > hopeless:
            patience -= sum(len(present[other]) for other in changed)
            if patience < 0:
                return order + sorted(best)
        for other in changed:
            fresh = score(other)
            if fresh != best[other]:
                best[other] = fresh
                heapq.heappush(heap, fresh)
    return order


def min_degree(
    neighbours: Adjacency, states: Sequence[int], free: Sequence[int], at_once: float = -math.inf
) -> list[int]:
    """Always the variables with the smallest buckets, in rounds of variables that are not neighbours.

    Args:
        neighbours: who shares a factor with whom.
        states: the number of states of each variable.
        free: the variables to eliminate.
        at_once: a round takes every variable it can whose bucket has at most this many binary logarithms of entries,
            not only the smallest ones. That makes few rounds of an order that would be long, and wider.
    """
    present = [set(others) for others in neighbours]
    logs = [math.log2(count) for count in states]
    heap = [(_log_entries(variable, present[variable], logs), variable) for variable in free]
    heapq.heapify(heap)
    current = {variable: cost for cost, variable in heap}
    order: list[int] = []
    hopeless, patience = math.log2(HOPELESS), PATIENCE
    while heap:
        if current.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
            continue
        limit = max(heap[0][0], at_once)
        touched: set[int] = set()
        while heap and heap[0][0] <= limit:
            cost, variable = heapq.heappop(heap)
            if current.get(variable) != cost or variable in touched:
                continue
            del current[variable]
            order.append(variable)
            clique = present[variable]
            if len(clique) == len(current):
                return order + sorted(clique)
            for other in clique:
                present[other] |= clique
                present[other] -= {other, variable}
            touched |= clique
            if cost > hopeless:
                patience -= sum(len(present[other]) for other in clique)
                if patience < 0:
                    return order + sorted(current)
        for variable in touched:
            cost = _log_entries(variable, present[variable], logs)
            current[variable] = cost
            heapq.heappush(heap, (cost, variable))
    return order


def measure(order: Sequence[int], neighbours: Adjacency, states: Sequence[int]) -> Shape:
    """Eliminate in ``order`` without numbers."""
    position = {variable: place for place, variable in enumerate(order)}
    later = {v: {u for u in neighbours[v] if position[u] > position[v]} for v in order}
    depth = dict.fromkeys(order, 1)
    width, entries, message_entries = 0, 0, 0
    for variable in order:
        scope = later.pop(variable)
        width = max(width, len(scope))
        size = math.prod([states[other] for other in scope])
        entries += size * states[variable]
        message_entries += size
        if scope:
            parent = min(scope, key=position.__getitem__)
            scope.discard(parent)
            later[parent] |= scope
            depth[parent] = max(depth[parent], depth[variable] + 1)
    return Shape(width, entries, message_entries, max(depth.values(), default=0))


def _log_entries(variable: int, others: Iterable[int], logs: Sequence[float]) -> float:
    """Binary logarithm of the entries of a variable's bucket."""
    return logs[variable] + math.fsum([logs[other] for other in others])
