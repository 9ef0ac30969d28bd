"""Chordless cycles of the graph in which two variables are neighbours when a factor joins them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from bethenet.graph import FactorGraph

Integers = np.ndarray[Any, np.dtype[np.int64]]

MAX_PATHS = 5_000_000
"""Paths followed at once: some hundreds of megabytes."""


class TooManyPathsError(ValueError):
    """There are more paths than can be followed at once."""


def neighbours(graph: FactorGraph) -> sparse.csr_array:
    """The symmetric 0/1 matrix of which variables stand together in some factor's scope."""
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for group in graph.factor_groups:
        scopes = group.variables.cpu().numpy()
        for first in range(group.arity):
            pairs += [scopes[:, [first, second]] for second in range(first + 1, group.arity)]
    edges = np.concatenate(pairs)
    both = np.concatenate([edges, edges[:, ::-1]])
    size = graph.num_variables
    matrix = sparse.csr_array((np.ones(len(both), dtype=np.int64), (both[:, 0], both[:, 1])), shape=(size, size))
    matrix.data[:] = 1
    matrix.sort_indices()
    return matrix


def chordless_cycles(graph: FactorGraph, max_length: int) -> Iterator[Integers]:
    """Cycles of 3, 4, ... ``max_length`` variables none of which is joined to another across the cycle.

    Yields one array ``[cycles, length]`` a length (perhaps with no rows), shortest first, so that a caller may stop.

    Raises:
        TooManyPathsError: there are too many paths to follow; says how long a cycle can be had.
    """
    matrix = neighbours(graph)
    edges = _Edges(matrix)
    starts, ends = matrix.nonzero()
    paths = np.stack([starts, ends], axis=1)[starts < ends].astype(np.int64)
    for length in range(3, max_length + 1):
        degrees = edges.degrees[paths[:, -1]]
        if degrees.sum() > MAX_PATHS:
            raise TooManyPathsError(
                f"there are too many cycles to look at those of {length} variables "
                f"({degrees.sum()} paths); ask for max_length={length - 1}, or name the clusters"
            )
        origin = np.repeat(np.arange(len(paths)), degrees)
        longer = paths[origin]
        last = edges.follow(paths[:, -1], degrees)
        # Each cycle is found from its smallest variable; a chord would join the new variable to one in between.
        fresh = (last > longer[:, 0]) & (longer != last[:, None]).all(axis=1)
        for inner in range(1, length - 2):
            fresh[fresh] = ~edges.contain(last[fresh], longer[fresh, inner])
        longer, last = longer[fresh], last[fresh]
        closes = edges.contain(last, longer[:, 0])
        longer = np.concatenate([longer, last[:, None]], axis=1)
        # ... and in both directions, of which one is kept.
        yield longer[closes & (last > longer[:, 1])]
        paths = longer[~closes]


class _Edges:
    """Adjacency lists with a vectorised test for membership."""

    def __init__(self, matrix: sparse.csr_array) -> None:
        self.first = matrix.indptr.astype(np.int64)
        self.heads = matrix.indices.astype(np.int64)
        self.degrees = np.diff(self.first)
        self.size = max(matrix.shape[0], 1)
        self.keys = np.repeat(np.arange(matrix.shape[0]), self.degrees) * self.size + self.heads

    def follow(self, vertices: Integers, degrees: Integers) -> Integers:
        """The neighbours of each vertex, one after another."""
        offsets = np.arange(degrees.sum()) - np.repeat(np.cumsum(degrees) - degrees, degrees)
        return self.heads[np.repeat(self.first[vertices], degrees) + offsets]

    def contain(self, tails: Integers, heads: Integers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        wanted = tails * self.size + heads
        if not len(self.keys):
            return np.zeros(len(wanted), dtype=bool)
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return self.keys[places] == wanted
