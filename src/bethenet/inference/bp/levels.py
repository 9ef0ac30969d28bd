"""An order of the variables, and its levels: what a sweep may renew at the same time.

A sweep visits the variables in an order and renews, at each, the messages from factors that hold an earlier variable.
Variables none of which waits for another form a *level* and are visited together: a grid in row order takes as many
levels as it has diagonals, not as many as it has variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, connected_components
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.inference.bp.wiring import Wiring, compile_wiring


@dataclass(frozen=True, eq=False)
class Sending:
    """Messages of one level from the factors of one group to the variables on one axis."""

    group: int
    axis: int
    factors: Int[Tensor, " members"]
    slots: Int[Tensor, " members"]
    """Where the messages lie."""
    nodes: Int[Tensor, " members"]
    """The receiving variables' positions."""
    incoming: tuple[tuple[Int[Tensor, " members"], Int[Tensor, " members"]] | None, ...]
    """For each other axis of the factors its (slots, positions)."""


@dataclass(frozen=True, eq=False)
class Level:
    """What happens at one level of a sweep."""

    sendings: tuple[Sending, ...]
    nodes: tuple[Int[Tensor, " members"], ...]
    """Per variable group the positions of this level's variables."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep's levels, forwards and backwards."""

    forwards: tuple[Level, ...]
    backwards: tuple[Level, ...]


def compile_sweep(graph: FactorGraph, order: Sequence[int] | None = None) -> Sweep:
    """The levels of a sweep in ``order`` (all variables, each once); by default the `leaves_first` order."""
    key = ("sweep", None if order is None else tuple(order))
    return graph.compiled_as(key, lambda: _compile(graph, order))


def leaves_first(graph: FactorGraph) -> np.ndarray:
    """The farthest from the last variable of each component first, those equally far in ascending order. On a tree
    every variable comes before the one that leads to the root, so that a sweep there and back is exact; on a chain of
    any order it is left to right.
    """
    neighbours = _adjacency(graph)
    count, label = connected_components(neighbours, directed=False)
    roots = np.zeros(count, dtype=np.int64)
    roots[label] = np.arange(graph.num_variables)
    # one search from an extra vertex that is joined to every root
    extra = csr_matrix((np.ones(count), (np.zeros(count, dtype=int), roots)), shape=(1, graph.num_variables))
    joined = csr_matrix(
        (
            np.ones(neighbours.nnz + count),
            np.concatenate([neighbours.indices, extra.indices]),
            np.concatenate([neighbours.indptr, [neighbours.nnz + count]]),
        ),
        shape=(graph.num_variables + 1, graph.num_variables + 1),
    )
    found, before = breadth_first_order(joined, graph.num_variables)
    place = np.empty(found.size, dtype=np.int64)
    place[found] = np.arange(found.size)
    reached_from = place[before[found[1:]]]  # ascending
    layers, first, last = [np.zeros(0, dtype=np.int64)], 0, 1
    while last < found.size:
        first, last = last, 1 + int(np.searchsorted(reached_from, last))
        layers.append(np.sort(found[first:last]).astype(np.int64))
    return np.concatenate(layers[::-1])


def _adjacency(graph: FactorGraph) -> csr_matrix:
    """Which variables share a factor."""
    first, second = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for group in graph.factor_groups:
        scope = group.variables.cpu().numpy()
        for a in range(group.arity):
            for b in range(group.arity):
                if a != b:
                    first.append(scope[:, a])
                    second.append(scope[:, b])
    rows, columns = np.concatenate(first), np.concatenate(second)
    size = graph.num_variables
    matrix = csr_matrix((np.ones(rows.size, dtype=np.int32), (rows, columns)), shape=(size, size))
    matrix.sum_duplicates()
    return matrix


def _levels(graph: FactorGraph, order: np.ndarray) -> np.ndarray:
    """For each variable the length of the longest chain of neighbours that leads to it in ascending order."""
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    matrix = _adjacency(graph).tocoo()
    ahead = rank[matrix.row] < rank[matrix.col]
    later = csr_matrix((np.ones(ahead.sum()), (matrix.row[ahead], matrix.col[ahead])), shape=matrix.shape)
    waiting = np.bincount(later.indices, minlength=order.size)
    level = np.zeros(order.size, dtype=np.int64)
    ready, number = np.flatnonzero(waiting == 0), 0
    while ready.size:
        level[ready] = number
        reached = later[ready].indices
        np.subtract.at(waiting, reached, 1)
        ready = np.unique(reached[waiting[reached] == 0])
        number += 1
    return level


def _compile(graph: FactorGraph, order: Sequence[int] | None) -> Sweep:
    if order is None:
        ranked = leaves_first(graph)
    else:
        ranked = np.asarray(order, dtype=np.int64)
        if ranked.shape != (graph.num_variables,) or not np.array_equal(np.sort(ranked), np.arange(ranked.size)):
            raise ValueError(f"order: expected each of the {graph.num_variables} variables once; got {order!r:.80}")
    wiring = graph.compiled(compile_wiring)
    level = _levels(graph, ranked)
    count = int(level.max(initial=-1)) + 1
    nodes = [
        _split(level[group.variables.cpu().numpy()], count, layout.positions)
        for group, layout in zip(graph.variable_groups, wiring.layouts, strict=True)
    ]
    directions = []
    for forwards in (True, False):
        sendings: list[list[Sending]] = [[] for _ in range(count)]
        for number, group in enumerate(graph.factor_groups):
            levels = level[group.variables.cpu().numpy()]
            for axis in range(group.arity if group.arity >= 2 else 0):
                own = levels[:, axis]
                chosen = own > levels.min(1) if forwards else own < levels.max(1)
                _distribute(sendings, graph, wiring, number, axis, np.flatnonzero(chosen), own)
        parts = [Level(tuple(sendings[at]), tuple(node[at] for node in nodes)) for at in range(count)]
        directions.append(tuple(parts if forwards else parts[::-1]))
    return Sweep(*directions)


def _distribute(
    sendings: list[list[Sending]],
    graph: FactorGraph,
    wiring: Wiring,
    number: int,
    axis: int,
    chosen: np.ndarray,
    own: np.ndarray,
) -> None:
    """Add the messages of the chosen factors to one axis to the levels they belong to."""
    group = graph.factor_groups[number]
    chosen = chosen[np.argsort(own[chosen], kind="stable")]
    starts = np.searchsorted(own[chosen], np.arange(len(sendings) + 1))
    factors = torch.from_numpy(chosen).to(graph.device)
    slots = [slot.long()[factors] for slot in wiring.slots[number]]
    nodes = [
        wiring.layouts[reader].positions[group.rows[factors, other]]
        for other, reader in enumerate(group.variable_groups)
    ]
    for at, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if start == stop:
            continue
        part = slice(start, stop)
        incoming = tuple(
            None if other == axis else (slots[other][part], nodes[other][part]) for other in range(group.arity)
        )
        sendings[at].append(Sending(number, axis, factors[part], slots[axis][part], nodes[axis][part], incoming))


def _split(level: np.ndarray, count: int, positions: Tensor) -> list[Tensor]:
    """The positions of the variables of each level."""
    order = np.argsort(level, kind="stable")
    sizes = np.bincount(level, minlength=count).tolist()
    return list(torch.split(positions[torch.from_numpy(order).to(positions.device)], sizes))
