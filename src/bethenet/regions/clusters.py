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
AUTO_ENTRIES = 2**16
"""``"auto"`` passes over clusters with larger tables."""
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
        return [squares, pairs_in_strips(squares)]
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
    counts = graph.state_counts.cpu().numpy()
    edges = neighbours(graph).nnz // 2
    found: list[Integers] = []
    try:
        for cycles in chordless_cycles(graph, AUTO_LENGTH):
            if len(cycles) > AUTO_CLUSTERS * edges:
                break
            # Triangles that share edges, as those of a clique do, count so much with either sign that they are worse
            # than pairs: the whole clique or nothing.
            found += (_cliques(graph) if len(cycles) else []) if cycles.shape[1] == 3 else [cycles]
            if cycles.shape[1] == PLAQUETTE:
                found.append(pairs_in_strips(cycles))
            if cycles.shape[1] >= PLAQUETTE and _edges_covered(graph, found) == edges:
                break
    except TooManyPathsError:
        pass
    return [block[_log_entries(counts, block) <= math.log(AUTO_ENTRIES) + 1e-9] for block in found]


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


def pairs_in_strips(squares: Integers) -> Integers:
    """Unions ``[pairs, 6]`` of neighbours along strips of plaquettes, of which no two cross.

    A strip goes through a plaquette from an edge to the opposite one. Windows of two plaquettes along the rows of a
    grid are much better clusters than single plaquettes, and also than windows along rows *and* columns: strips that
    do not cross keep counting numbers of +-1. Where an edge is in more than two plaquettes there are no strips.

    Args:
        squares: cycles ``[cycles, 4]``, the variables of each in the order in which the cycle goes through them.
    """
    none = np.zeros((0, 6), dtype=np.int64)
    if len(squares) < 2:
        return none
    ends = np.sort(np.stack([squares, np.roll(squares, -1, axis=1)], axis=2), axis=2)
    _, edge_of = np.unique(ends.reshape(-1, 2), axis=0, return_inverse=True)
    edge_of = edge_of.reshape(-1, 4)
    if np.bincount(edge_of.ravel()).max() > 2:
        return none
    size = int(edge_of.max()) + 1
    opposite = (edge_of[:, :2].ravel(), edge_of[:, 2:].ravel())
    links = sparse.coo_array((np.ones(len(opposite[0]), dtype=bool), opposite), shape=(size, size))
    strips, strip_of = csgraph.connected_components(links, directed=False)
    crossing = strip_of[edge_of[:, :2]]
    along = _not_crossing(crossing, strips)
    # Each shared edge of a chosen strip joins the two plaquettes at its ends.
    order = np.argsort(edge_of.ravel(), kind="stable")
    edges, owners = edge_of.ravel()[order], order // 4
    twice = np.flatnonzero((edges[1:] == edges[:-1]) & along[strip_of[edges[1:]]])
    union = np.sort(np.concatenate([squares[owners[twice]], squares[owners[twice + 1]]], axis=1), axis=1)
    first = np.ones(union.shape, dtype=bool)
    first[:, 1:] = union[:, 1:] != union[:, :-1]
    six = first.sum(axis=1) == 6
    return union[six][first[six]].reshape(-1, 6)


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
