"""Which clusters of variables are the largest regions: those a user gives, or those found in the graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import networkx
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.regions.cycles import Integers, TooManyPathsError, chordless_cycles, neighbours

Clusters = str | Integers | Tensor | Iterable[Sequence[int | str] | Integers | Tensor]

PLAQUETTE = 4
"""Variables in the shortest cycle of a grid."""
AUTO_LENGTH = 6
"""``"auto"`` follows no longer cycles."""
AUTO_WINDOW = 8
"""``"auto"`` takes windows of strips with up to this many variables: two rows, four columns."""
AUTO_ENTRIES = 2**12
"""``"auto"`` passes over cycles and windows with larger tables."""
AUTO_CLIQUE_ENTRIES = 2**16
"""The same for cliques: they may make the whole graph exact."""
AUTO_CLUSTERS = 4
"""``"auto"`` takes no cycles of a length of which there are more than this many an edge: their counting numbers are
large and of both signs."""


def find_clusters(graph: FactorGraph, clusters: Clusters, max_length: int) -> list[Integers]:
    """The clusters asked for as arrays ``[clusters, size]``; see `RegionGraph.kikuchi`."""
    if not isinstance(clusters, str):
        return list(_given(graph, clusters))
    if clusters == "plaquettes":
        return list(chordless_cycles(graph, PLAQUETTE))[1:]
    if clusters == "strips":
        squares = list(chordless_cycles(graph, PLAQUETTE))[1]
        return [squares, *strip_windows(squares, max_length)]
    if clusters == "cycles":
        if max_length < 3:
            raise ValueError(f"max_length: a cycle has at least 3 variables, got {max_length}")
        return list(chordless_cycles(graph, max_length))
    if clusters == "auto":
        return _automatic(graph)
    raise ValueError(
        f'clusters: expected "auto", "strips", "plaquettes", "cycles" or lists of variables; got {clusters!r}'
    )


def check_table_sizes(graph: FactorGraph, clusters: list[Integers], limit: int) -> None:
    """Raise a `ValueError` that names a cluster whose table has more than ``limit`` entries."""
    counts = graph.state_counts.cpu().numpy()
    for block in clusters:
        sizes = _log_entries(counts, block)
        if len(sizes) and sizes.max() > math.log(limit) + 1e-9:
            worst = block[int(np.argmax(sizes))].tolist()
            entries = math.prod(int(counts[variable]) for variable in worst)
            raise ValueError(
                f"cluster {worst} needs a table of {entries} entries, and max_table_entries is {limit}: "
                "give smaller clusters or a higher limit"
            )


def _given(graph: FactorGraph, clusters: Iterable[Sequence[int | str] | Integers | Tensor]) -> Iterator[Integers]:
    """Index arrays, or lists of numbers and names, as sorted index arrays."""
    blocks = [clusters] if isinstance(clusters, Tensor | np.ndarray) else list(clusters)
    for given in blocks:
        if isinstance(given, Tensor | np.ndarray) and given.ndim != 1:
            block = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
        else:
            block = np.array([[graph.variable_number(variable) for variable in given]], dtype=np.int64)
        if block.ndim != 2 or (block.size and not np.issubdtype(block.dtype, np.integer)):
            raise ValueError(f"an array of clusters is integers [clusters, size]; got {block.dtype} {block.shape}")
        wrong = ((block < 0) | (block >= graph.num_variables)).any(axis=1)
        if wrong.any():
            raise ValueError(
                f"cluster {block[int(np.argmax(wrong))].tolist()}: the graph's variables are numbered "
                f"0 to {graph.num_variables - 1}"
            )
        block = np.sort(block.astype(np.int64), axis=1)
        twice = (block[:, 1:] == block[:, :-1]).any(axis=1)
        if twice.any():
            raise ValueError(f"cluster {block[int(np.argmax(twice))].tolist()}: a variable stands in it twice")
        yield block


# --- found in the graph -------------------------------------------------------------------------------------------


def _automatic(graph: FactorGraph) -> list[Integers]:
    """Maximal cliques, chordless cycles until every edge is covered, strips: those of all these with small tables."""
    edges = neighbours(graph).nnz // 2
    found: list[Integers] = []
    try:
        for cycles in chordless_cycles(graph, AUTO_LENGTH):
            if len(cycles) > AUTO_CLUSTERS * edges:
                break
            length = cycles.shape[1]
            if length > 3:
                found.append(_small(graph, cycles, AUTO_ENTRIES))
            elif len(cycles):
                # Triangles that share edges, as those of a clique do, count so much with either sign that they are
                # worse than pairs: the whole clique or nothing.
                found += [_small(graph, clique, AUTO_CLIQUE_ENTRIES) for clique in _cliques(graph)]
            if length == PLAQUETTE:
                found += [_small(graph, windows, AUTO_ENTRIES) for windows in strip_windows(cycles, AUTO_WINDOW)]
            if length >= PLAQUETTE and _edges_covered(graph, found) == edges:
                break
    except TooManyPathsError:
        pass
    return found


def _small(graph: FactorGraph, clusters: Integers, limit: int) -> Integers:
    return clusters[_log_entries(graph.state_counts.cpu().numpy(), clusters) <= math.log(limit) + 1e-9]


def _cliques(graph: FactorGraph) -> list[Integers]:
    """All maximal sets of three or more variables each joined to each; none at all, if they are too many."""
    pairs = networkx.from_scipy_sparse_array(neighbours(graph))
    cliques = list(itertools.islice(networkx.find_cliques(pairs), AUTO_CLUSTERS * graph.num_variables + 1))
    if len(cliques) > AUTO_CLUSTERS * graph.num_variables:
        return []
    return [np.array([sorted(clique)], dtype=np.int64) for clique in cliques if len(clique) > 2]


def _edges_covered(graph: FactorGraph, clusters: list[Integers]) -> int:
    """How many pairs of neighbours lie in some cluster."""
    matrix = neighbours(graph)
    blocks = [block for block in clusters if len(block)]
    pairs = [block[:, [a, b]] for block in blocks for a, b in itertools.combinations(range(block.shape[1]), 2)]
    if not pairs:
        return 0
    together = np.concatenate(pairs)
    ones = np.ones(len(together), dtype=np.int64)
    covered = sparse.csr_array((ones, (together[:, 0], together[:, 1])), shape=matrix.shape)
    both = (covered + covered.T).multiply(matrix)
    return int(both.nnz) // 2


def strip_windows(squares: Integers, max_length: int) -> list[Integers]:
    """Windows of 6, 8, ... up to ``max_length`` variables along strips of plaquettes, of which no two strips cross.

    A strip goes through a plaquette from an edge to the opposite one. Windows of two or three plaquettes along the rows
    of a grid are much better clusters than single plaquettes, and also than windows along rows *and* columns: strips
    that do not cross keep counting numbers of +-1. Where an edge is in more than two plaquettes there are no strips.

    Args:
        squares: cycles ``[cycles, 4]``, the variables of each in the order in which the cycle goes through them.
        max_length: the most variables in a window.
    """
    if len(squares) < 2:
        return []
    ends = np.sort(np.stack([squares, np.roll(squares, -1, axis=1)], axis=2), axis=2)
    _, edge_of = np.unique(ends.reshape(-1, 2), axis=0, return_inverse=True)
    edge_of = edge_of.reshape(-1, 4)
    if np.bincount(edge_of.ravel()).max() > 2:
        return []
    size = int(edge_of.max()) + 1
    opposite = (edge_of[:, :2].ravel(), edge_of[:, 2:].ravel())
    links = sparse.coo_array((np.ones(len(opposite[0]), dtype=bool), opposite), shape=(size, size))
    strips, strip_of = csgraph.connected_components(links, directed=False)
    along = _not_crossing(strip_of[edge_of[:, :2]], strips)
    # Each shared edge of a chosen strip joins two plaquettes; a window is a path of such pairs.
    order = np.argsort(edge_of.ravel(), kind="stable")
    edges, owners = edge_of.ravel()[order], order // 4
    twice = np.flatnonzero((edges[1:] == edges[:-1]) & along[strip_of[edges[1:]]])
    pairs = np.stack([owners[twice], owners[twice + 1]], axis=1)
    both = np.concatenate([pairs, pairs[:, ::-1]])
    joined = sparse.csr_array((np.ones(len(both), dtype=np.int64), both.T), shape=(len(squares), len(squares)))
    paths, windows = np.arange(len(squares)).reshape(-1, 1), []
    for length in range(PLAQUETTE + 2, max_length + 1, 2):
        ahead = joined[paths[:, -1]].tocoo()
        longer = np.concatenate([paths[ahead.row], ahead.col.astype(np.int64)[:, None]], axis=1)
        paths = longer[(longer[:, :-1] != longer[:, -1:]).all(axis=1)]
        windows.append(_unions(squares, paths[paths[:, 0] < paths[:, -1]], length))
    return windows


def _unions(squares: Integers, paths: Integers, length: int) -> Integers:
    """The variables of each path of plaquettes, where they are ``length``."""
    union = np.sort(squares[paths].reshape(len(paths), PLAQUETTE * paths.shape[1]), axis=1)
    first = np.ones(union.shape, dtype=bool)
    first[:, 1:] = union[:, 1:] != union[:, :-1]
    whole = first.sum(axis=1) == length
    return union[whole][first[whole]].reshape(-1, length)


def _not_crossing(crossing: Integers, strips: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Choose strips, the longest first, none of which crosses a chosen one or itself."""
    lengths = np.bincount(crossing.ravel(), minlength=strips)
    chosen, barred = np.zeros(strips, dtype=bool), np.zeros(strips, dtype=bool)
    barred[crossing[crossing[:, 0] == crossing[:, 1], 0]] = True
    ones = np.ones(len(crossing), dtype=np.int64)
    meets = sparse.csr_array((ones, (crossing[:, 0], crossing[:, 1])), shape=(strips, strips))
    meets = (meets + meets.T).tocsr()
    for strip in np.argsort(-lengths, kind="stable"):
        if not barred[strip]:
            chosen[strip] = True
            barred[meets.indices[meets.indptr[strip] : meets.indptr[strip + 1]]] = True
    return chosen


def _log_entries(counts: Integers, clusters: Integers) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logarithms of table sizes."""
    result: np.ndarray[Any, np.dtype[np.float64]] = np.log(counts.astype(np.float64))[clusters].sum(axis=1)
    return result
