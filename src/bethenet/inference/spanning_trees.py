"""How often each factor appears in a random spanning forest: the edge weights of tree-reweighted message passing.

A *forest* here is a set of factors whose scopes close no cycle (no two of its factors are joined by two ways). Mean
appearances over any random forest are valid weights. Factors of one variable, or none, are in every forest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from torch import Tensor

from bethenet.graph import FactorGraph

DENSE_VARIABLES = 2000
"""Up to so many variables the uniform distribution over spanning trees is computed exactly (by a dense inverse)."""
SAMPLED_FORESTS = 24
"""At least so many forests are drawn where it is not."""

_log = logging.getLogger(__name__)

Appearance = tuple[Float[Tensor, " factors"], ...]


def forest_appearance(graph: FactorGraph) -> Appearance:
    """For each factor group its factors' probabilities in a random spanning forest, all above 0. Kept with the graph.

    For pairwise factors it is the uniform distribution over spanning trees (of each component), by the matrix-tree
    theorem: the probability of an edge is its effective resistance. For larger graphs and larger factors it is the mean
    over drawn forests, each drawn to hold factors that none before it held.
    """
    return graph.compiled(_forest_appearance)


def heaviest_forest(graph: FactorGraph, weights: Sequence[Float[Tensor, " factors"]]) -> Appearance:
    """A forest of great total weight, as zeros and ones: the greatest where no factor joins more than two variables."""
    scopes, places = _joining_factors(graph)
    joined = [weight.detach().double().cpu().numpy() for weight in weights]
    chosen = _forest(scopes, np.concatenate([joined[g][rows] for g, rows in places] or [np.zeros(0)]), graph)
    return _by_group(graph, places, chosen.astype(np.float64))


def _forest_appearance(graph: FactorGraph) -> Appearance:
    scopes, places = _joining_factors(graph)
    if all(scope.shape[1] == 2 for scope in scopes) and graph.num_variables <= DENSE_VARIABLES:
        edges = np.concatenate([np.zeros((0, 2), dtype=np.int64), *scopes])
        return _by_group(graph, places, _effective_resistances(edges, graph.num_variables))
    generator = np.random.default_rng(0)
    count = sum(len(scope) for scope in scopes)
    seen, drawn = np.zeros(count), 0
    while drawn < SAMPLED_FORESTS or (seen == 0).any():
        # factors not yet seen come first, so each forest holds at least one of them
        priority = generator.random(count) + (seen == 0)
        seen += _forest(scopes, priority, graph)
        drawn += 1
    return _by_group(graph, places, seen / drawn)


def _joining_factors(graph: FactorGraph) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray]]]:
    """The scopes of all factors of two variables or more, group by group, and where they come from."""
    scopes, places = [], []
    for number, group in enumerate(graph.factor_groups):
        if group.arity >= 2:
            scopes.append(group.variables.cpu().numpy())
            places.append((number, np.arange(len(group))))
    return scopes, places


def _by_group(graph: FactorGraph, places: list[tuple[int, np.ndarray]], values: np.ndarray) -> Appearance:
    result = [torch.ones(len(group), dtype=torch.float64, device=graph.device) for group in graph.factor_groups]
    first = 0
    for number, rows in places:
        result[number] = torch.from_numpy(values[first : first + rows.size].copy()).to(graph.device)
        first += rows.size
    return tuple(result)


def _effective_resistances(edges: np.ndarray, variables: int) -> np.ndarray:
    """The probability of each edge in a uniformly random spanning tree of its component."""
    laplacian = np.zeros((variables, variables))
    np.add.at(laplacian, (edges[:, 0], edges[:, 0]), 1.0)
    np.add.at(laplacian, (edges[:, 1], edges[:, 1]), 1.0)
    np.add.at(laplacian, (edges[:, 0], edges[:, 1]), -1.0)
    np.add.at(laplacian, (edges[:, 1], edges[:, 0]), -1.0)
    # one variable of each component is grounded: the inverse then exists, and resistances do not change
    adjacency = csr_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(variables, variables))
    _, label = connected_components(adjacency, directed=False)
    grounded = np.unique(label, return_index=True)[1]
    laplacian[grounded, grounded] += 1.0
    inverse = np.linalg.inv(laplacian) if variables else laplacian
    diagonal = inverse.diagonal()
    resistance = diagonal[edges[:, 0]] + diagonal[edges[:, 1]] - 2 * inverse[edges[:, 0], edges[:, 1]]
    return np.minimum(resistance, 1.0)


def _forest(scopes: list[np.ndarray], priority: np.ndarray, graph: FactorGraph) -> np.ndarray:
    """A maximal forest (a mask over the factors), those of high priority first."""
    if all(scope.shape[1] == 2 for scope in scopes):
        return _spanning_tree(
            np.concatenate([np.zeros((0, 2), dtype=np.int64), *scopes]), priority, graph.num_variables
        )
    return _greedy_forest([scope for group in scopes for scope in group.tolist()], priority, graph.num_variables)


def _spanning_tree(edges: np.ndarray, priority: np.ndarray, variables: int) -> np.ndarray:
    chosen = np.zeros(len(edges), dtype=bool)
    if not len(edges):
        return chosen
    # among parallel edges the first in this order stays; its place in the order is its cost (from 1: 0 is no edge)
    order = np.argsort(-priority, kind="stable")
    low, high = edges.min(1)[order], edges.max(1)[order]
    first = np.unique(low * variables + high, return_index=True)[1]
    cost = csr_matrix((first + 1.0, (low[first], high[first])), shape=(variables, variables))
    tree = minimum_spanning_tree(cost)
    chosen[order[tree.data.astype(np.int64) - 1]] = True
    return chosen


def _greedy_forest(scopes: list[list[int]], priority: np.ndarray, variables: int) -> np.ndarray:
    parent = list(range(variables))

    def root(variable: int) -> int:
        while parent[variable] != variable:
            parent[variable] = parent[parent[variable]]
            variable = parent[variable]
        return variable

    chosen = np.zeros(len(scopes), dtype=bool)
    for factor in np.argsort(-priority, kind="stable").tolist():
        roots = {root(variable) for variable in scopes[factor]}
        if len(roots) == len(scopes[factor]):
            chosen[factor] = True
            first = roots.pop()
            for other in roots:
                parent[other] = first
    return chosen
