"""Graph colouring: classes of variables that can be updated at the same time, because no two of them share a factor."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from jaxtyping import Int
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor

from bethenet.graph import FactorGraph


def colour_classes(graph: FactorGraph) -> tuple[Int[Tensor, " variables"], ...]:
    """The variables of each colour, ascending: every variable is in one class, no two of a class share a factor.

    First-fit in breadth-first order, which needs two colours on every bipartite graph (chains, trees, grids, Boltzmann
    machines), at most ``lag + 1`` on a chain of higher order, and never more than one plus the largest number of
    neighbours. Computed once for a graph, in time linear in its edges (seconds for a million variables), and kept with
    it; the tensors are on the graph's device.

    >>> [colour.tolist() for colour in colour_classes(FactorGraph.chain(5))]
    [[0, 2, 4], [1, 3]]
    """
    return graph.compiled(_colour_classes)


def _colour_classes(graph: FactorGraph) -> tuple[Tensor, ...]:
    colours = _first_fit(*_breadth_first(_neighbours(graph)))
    order = torch.from_numpy(np.argsort(colours, kind="stable")).to(graph.device)
    return order.split(np.bincount(colours).tolist()) if len(colours) else ()


def _neighbours(graph: FactorGraph) -> sparse.csr_array:
    """The adjacency matrix: two variables are neighbours if a factor joins them."""
    pairs = [torch.empty(0, 2, dtype=torch.long)]
    for group in graph.factor_groups:
        scopes = group.variables.cpu()
        pairs += [scopes[:, list(axes)] for axes in itertools.permutations(range(group.arity), 2)]
    rows, columns = torch.cat(pairs).T.numpy()
    size = graph.num_variables
    matrix = sparse.coo_array((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(size, size))
    return matrix.tocsr()


def _breadth_first(neighbours: sparse.csr_array) -> tuple[sparse.csr_array, np.ndarray]:
    """The adjacency matrix with its rows and columns renumbered in breadth-first order, and that order."""
    size = neighbours.shape[0]
    if size == 0:
        return neighbours, np.empty(0, dtype=np.int64)
    _, component = csgraph.connected_components(neighbours, directed=False)
    _, first = np.unique(component, return_index=True)
    # a root joined to the first variable of each component lets one search reach everything
    root = sparse.coo_array((np.ones(len(first), dtype=bool), (np.zeros_like(first), first)), shape=(1, size))
    rooted = sparse.csr_array(sparse.block_array([[neighbours, None], [root, sparse.csr_array((1, 1), dtype=bool)]]))
    order = csgraph.breadth_first_order(rooted, size, directed=True, return_predecessors=False)[1:].astype(np.int64)
    return neighbours[order][:, order], order


def _first_fit(neighbours: sparse.csr_array, order: np.ndarray) -> np.ndarray:
    """The least colour that no earlier neighbour has, for each variable in turn.

    The one loop over variables: each colour hangs on the ones before it. Colours are single bits of an integer.
    """
    earlier = sparse.tril(neighbours, format="csr")
    starts, members = earlier.indptr.tolist(), earlier.indices.tolist()
    bits: list[int] = []
    for start, stop in itertools.pairwise(starts):
        taken = 0
        for member in members[start:stop]:
            taken |= bits[member]
        bits.append(~taken & (taken + 1))
    colours = np.empty(len(order), dtype=np.int64)
    colours[order] = [bit.bit_length() - 1 for bit in bits]
    return colours
