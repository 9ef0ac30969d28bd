"""The cluster variation method: large clusters of variables, and all their intersections.

The regions are the clusters that lie in no other, everything in which two or more of them meet, and every variable.
Moebius inversion gives the counting numbers, ``c_r = 1 - sum of c_s over the regions s that strictly contain r``: so
each variable and each factor is counted once in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.regions.clusters import Clusters, check_table_sizes, find_clusters
from bethenet.regions.cycles import Integers
from bethenet.regions.regions import Containment, FactorHome, RegionGraph, RegionGroup


def kikuchi_regions(graph: FactorGraph, clusters: Clusters, max_length: int, max_table_entries: int) -> RegionGraph:
    """See `RegionGraph.kikuchi`."""
    found = [block for block in find_clusters(graph, clusters, max_length) if block.shape[1] > 1]
    check_table_sizes(graph, found, max_table_entries)
    scopes = [group.variables.cpu().numpy() for group in graph.factor_groups if group.arity > 1]
    clusters_by_size = _maximal(graph.num_variables, _by_size([*found, *scopes]))
    by_size = _close(graph.num_variables, clusters_by_size)
    by_size[1] = np.arange(graph.num_variables).reshape(-1, 1)
    return _Lattice(graph, by_size).regions()


# --- sets of variables --------------------------------------------------------------------------------------------


def _by_size(blocks: Iterable[Integers]) -> dict[int, Integers]:
    """Distinct sets, each sorted, as one array ``[sets, size]`` a size."""
    collected: dict[int, list[Integers]] = {}
    for block in blocks:
        if len(block):
            collected.setdefault(block.shape[1], []).append(np.sort(block, axis=1))
    return {size: np.unique(np.concatenate(parts), axis=0) for size, parts in sorted(collected.items())}


def _incidence(variables: int, by_size: dict[int, Integers]) -> sparse.csr_array:
    """0/1 matrix: which variables (columns) are in which set (rows, by size and then as in its array)."""
    sizes = [np.full(len(block), size, dtype=np.int64) for size, block in by_size.items()]
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *sizes])
    columns = np.concatenate([np.zeros(0, dtype=np.int64), *(block.ravel() for block in by_size.values())])
    ones = np.ones(len(columns), dtype=np.int64)
    return sparse.csr_array((ones, columns, np.cumsum(lengths)), shape=(len(lengths) - 1, variables))


def _maximal(variables: int, by_size: dict[int, Integers]) -> dict[int, Integers]:
    """The sets that lie in no other."""
    matrix = _incidence(variables, by_size)
    smaller, _ = _strictly_inside(matrix)
    keep = np.ones(matrix.shape[0], dtype=bool)
    keep[smaller] = False
    parts = np.split(keep, np.cumsum([len(block) for block in by_size.values()])[:-1]) if by_size else []
    return {size: block[part] for (size, block), part in zip(by_size.items(), parts, strict=True)}


def _strictly_inside(matrix: sparse.csr_array) -> tuple[Integers, Integers]:
    """Pairs of rows (smaller, larger) such that the first set lies strictly inside the second."""
    sizes = np.diff(matrix.indptr)
    overlaps = (matrix @ matrix.T).tocoo()
    inside = (overlaps.data == sizes[overlaps.row]) & (sizes[overlaps.row] < sizes[overlaps.col])
    return overlaps.row[inside].astype(np.int64), overlaps.col[inside].astype(np.int64)


def _close(variables: int, by_size: dict[int, Integers]) -> dict[int, Integers]:
    """Add every intersection of two or more variables; those of one are regions in any case."""
    known = _by_size(by_size.values())
    frontier = known
    while frontier:
        all_sets, fresh = _incidence(variables, known), _incidence(variables, frontier)
        overlaps = (fresh @ all_sets.T).tocoo()
        smaller = np.minimum(np.diff(fresh.indptr)[overlaps.row], np.diff(all_sets.indptr)[overlaps.col])
        proper = (overlaps.data > 1) & (overlaps.data < smaller)
        meets = (fresh[overlaps.row[proper]] * all_sets[overlaps.col[proper]]).tocsr()
        meets.eliminate_zeros()
        meets.sort_indices()
        sizes = np.diff(meets.indptr)
        found = _by_size(
            meets[sizes == size].indices.astype(np.int64).reshape(-1, size) for size in np.unique(sizes) if size
        )
        joined = _by_size([*known.values(), *found.values()])
        frontier = {size: block for size, block in found.items() if len(joined[size]) > len(known.get(size, ()))}
        known = joined
    return known


class _Lattice:
    """All regions with what lies in what, on the way to a `RegionGraph`."""

    def __init__(self, graph: FactorGraph, by_size: dict[int, Integers]) -> None:
        self.graph = graph
        self.by_size = dict(sorted(by_size.items()))
        self.matrix = _incidence(graph.num_variables, self.by_size)
        self.sizes = np.diff(self.matrix.indptr).astype(np.int64)
        self.smaller, self.larger = _strictly_inside(self.matrix)
        self.numbers = self._counting_numbers()
        self.scalars = sum(len(group) for group in graph.factor_groups if group.arity == 0)
        self._group()

    def _counting_numbers(self) -> Integers:
        """Moebius inversion, from the largest regions down."""
        count = len(self.sizes)
        ones = np.ones(len(self.smaller), dtype=np.int64)
        above = sparse.csr_array((ones, (self.smaller, self.larger)), shape=(count, count))
        numbers = np.zeros(count, dtype=np.int64)
        for size in sorted(self.by_size, reverse=True):
            rows = np.flatnonzero(self.sizes == size)
            numbers[rows] = 1 - above[rows] @ numbers
        if (self.matrix.T @ numbers != 1).any():
            raise RuntimeError("the counting numbers over some variable do not sum to one: the regions are not closed")
        return numbers

    def _group(self) -> None:
        """Sort the regions into groups of one table shape: no variable, then most variables first, one last."""
        counts = self.graph.state_counts.cpu().numpy()
        self.group_of = np.zeros(len(self.sizes), dtype=np.int64)
        self.row_of = np.zeros(len(self.sizes), dtype=np.int64)
        self.shapes: list[tuple[int, ...]] = [()] if self.scalars else []
        self.members: list[Integers] = [np.zeros(0, dtype=np.int64)] if self.scalars else []
        for size in sorted(self.by_size, reverse=True):
            regions = np.flatnonzero(self.sizes == size)
            if not len(regions):
                continue
            shapes, shape_of = np.unique(counts[self.by_size[size]], axis=0, return_inverse=True)
            for number, shape in enumerate(shapes.tolist()):
                members = regions[shape_of.reshape(-1) == number]
                self.group_of[members] = len(self.shapes)
                self.row_of[members] = np.arange(len(members))
                self.shapes.append(tuple(shape))
                self.members.append(members)

    def regions(self) -> RegionGraph:
        device = self.graph.device
        groups = []
        for shape, members in zip(self.shapes, self.members, strict=True):
            if not shape:
                none = torch.zeros(self.scalars, 0, dtype=torch.long, device=device)
                groups.append(RegionGroup((), none, torch.ones(self.scalars, dtype=torch.float64, device=device)))
                continue
            numbers = torch.as_tensor(self.numbers[members], dtype=torch.float64, device=device)
            groups.append(RegionGroup(shape, torch.as_tensor(self._variables(members), device=device), numbers))
        return RegionGraph(self.graph, tuple(groups), tuple(self._containments()), tuple(self._homes()))

    def _variables(self, regions: Integers) -> Integers:
        """The variables ``[regions, size]`` of regions of one size."""
        size = int(self.sizes[regions[0]]) if len(regions) else 1
        return self.by_size[size][regions - int(np.searchsorted(self.sizes, size))]

    def _containments(self) -> Iterator[Containment]:
        """The pairs with nothing in between."""
        count = len(self.sizes)
        inside = sparse.csr_array(
            (np.ones(len(self.smaller), dtype=np.int64), (self.smaller, self.larger)), shape=(count, count)
        )
        between = (inside @ inside).tocsr()
        between.data[:] = 1
        direct = (inside - between.multiply(inside)).tocoo()
        direct.eliminate_zeros()
        children, parents = direct.row.astype(np.int64), direct.col.astype(np.int64)
        for (parent, child, *axes), pairs in self._kinds(parents, children):
            above, below = self.row_of[parents[pairs]], self.row_of[children[pairs]]
            covers = np.array_equal(above, np.arange(len(self.members[parent])))
            yield Containment(parent, child, self._tensor(above), self._tensor(below), tuple(axes), covers)

    def _kinds(self, parents: Integers, children: Integers) -> Iterator[tuple[list[int], Integers]]:
        """Sort pairs by (parent's group, child's group, the child's axes in the parent)."""
        sizes = np.stack([self.sizes[parents], self.sizes[children]], axis=1)
        for parent_size, child_size in np.unique(sizes, axis=0).tolist():
            pairs = np.flatnonzero((sizes == [parent_size, child_size]).all(axis=1))
            above, below = self._variables(parents[pairs]), self._variables(children[pairs])
            axes = (above[:, :, None] == below[:, None, :]).argmax(axis=1)
            groups = np.stack([self.group_of[parents[pairs]], self.group_of[children[pairs]]], axis=1)
            kinds, kind_of = np.unique(np.concatenate([groups, axes], axis=1), axis=0, return_inverse=True)
            for number, kind in enumerate(kinds.tolist()):
                yield kind, pairs[kind_of.reshape(-1) == number]

    def _homes(self) -> Iterator[FactorHome]:
        """Each factor's smallest region. It is unique: regions that meet in the scope meet in a region."""
        for number, group in enumerate(self.graph.factor_groups):
            rows = torch.arange(len(group), device=self.graph.device)
            if group.arity == 0:
                yield FactorHome(number, rows, 0, rows, (), whole=True)
                continue
            scopes = group.variables.cpu().numpy()
            smallest = self._smallest_around(scopes)
            sizes = self.sizes[smallest]
            for size in np.unique(sizes).tolist():
                factors = np.flatnonzero(sizes == size)
                around = self._variables(smallest[factors])
                axes = (around[:, :, None] == scopes[factors][:, None, :]).argmax(axis=1)
                groups = self.group_of[smallest[factors]]
                kinds, kind_of = np.unique(np.column_stack([groups, axes]), axis=0, return_inverse=True)
                for index, (region_group, *kind_axes) in enumerate(kinds.tolist()):
                    chosen = factors[kind_of.reshape(-1) == index]
                    regions = self.row_of[smallest[chosen]]
                    whole = len(chosen) == len(group) and np.array_equal(
                        regions, np.arange(len(self.members[region_group]))
                    )
                    yield FactorHome(
                        number, self._tensor(chosen), region_group, self._tensor(regions), tuple(kind_axes), whole
                    )

    def _smallest_around(self, scopes: Integers) -> Integers:
        factors, arity = scopes.shape
        first = np.arange(factors + 1) * arity
        incidence = sparse.csr_array(
            (np.ones(scopes.size, dtype=np.int64), scopes.ravel(), first), shape=(factors, self.graph.num_variables)
        )
        overlaps = (incidence @ self.matrix.T).tocoo()
        around = overlaps.data == arity
        factor, region = overlaps.row[around], overlaps.col[around].astype(np.int64)
        # Regions are numbered by size: the smallest is the least number.
        result = np.full(factors, len(self.sizes), dtype=np.int64)
        np.minimum.at(result, factor, region)
        return result

    def _tensor(self, values: Integers) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self.graph.device)
