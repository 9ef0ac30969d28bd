"""Which entries of which tables meet in one update of generalised belief propagation; compiled once a region graph.

*Outer* regions lie in no other; *inner* regions are those where outer ones must agree. All tables stand one after
another in one array of *entries* (and the batch is the last axis, so that each entry is a contiguous row): every step
is then a few gathers and sums, whatever the shapes of the regions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor

from bethenet.regions import RegionGraph

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Colour:
    """Inner regions of one table size of which no two lie in one outer region: they are updated at the same time.

    A *slot* is one entry of an inner table as one outer region sees it: the sum of a number of outer entries.
    """

    first: int
    last: int
    """The inner entries ``first .. last`` are those of this colour."""
    cells: int
    """Entries of each inner table."""
    parts: tuple[tuple[Tensor, int], ...]
    """Outer entries ``[slots * summands]``, and the number of summands, for each number that there is."""
    slots_of_entry: Tensor
    """``[entries * most]`` the slots of each inner entry, padded by the number of slots."""
    most: int
    entry_of_slot: Tensor
    outer_counts: Tensor
    """``[entries, 1]``: in how many outer regions each inner one lies."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Outer entries to which the entries of factors (or node terms, where ``is_node``) are added."""

    group: int
    is_node: bool
    rows: Tensor
    entries: Tensor
    """``[members * cells]``"""
    cells: Tensor
    """For each entry of the outer table the entry of the factor's."""


@dataclass(frozen=True, eq=False)
class Source:
    """Inner regions whose beliefs are read off a region around them."""

    parent_group: int
    child_group: int
    parents: Tensor
    children: Tensor
    axes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Wiring:
    """All index tensors of one region graph."""

    regions: RegionGraph
    num_outer_entries: int
    num_inner_entries: int
    outer_groups: tuple[tuple[int, Tensor, int, int], ...]
    """Region group, rows in it, first and last outer entry."""
    colours: tuple[Colour, ...]
    counting_numbers: Tensor
    """``[inner entries, 1]``"""
    outer_counts: Tensor
    """``[inner entries, 1]``"""
    placements: tuple[Placement, ...]
    sources: tuple[Source, ...]


def compile_wiring(regions: RegionGraph) -> Wiring:
    """The wiring of a region graph whose outer regions all have counting number one."""
    return _Compiler(regions).wiring()


class _Compiler:
    def __init__(self, regions: RegionGraph) -> None:
        self.regions = regions
        self.groups = regions.groups
        self.device = regions.graph.device
        sizes = [len(group) for group in self.groups]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.group_of = np.repeat(np.arange(len(sizes)), sizes)
        self.row_of = np.arange(self.first[-1]) - self.first[self.group_of]
        self.variables = [group.variables.cpu().numpy() for group in self.groups]
        self.cells = np.array([math.prod(group.table_shape) for group in self.groups], dtype=np.int64)[self.group_of]
        numbers = [group.counting_numbers.cpu().numpy() for group in self.groups]
        self.numbers = np.concatenate([np.zeros(0), *numbers])
        self.direct = self._direct()
        self.inside = _closure(self.direct)
        parents = np.diff(self.direct.tocsc().indptr)
        self.outer = np.flatnonzero(parents == 0)
        if (self.numbers[self.outer] != 1).any():
            raise ValueError("generalised belief propagation needs a counting number of 1 for regions inside no other")
        self.first_entry = np.zeros(len(self.cells), dtype=np.int64)
        self.first_entry[self.outer] = np.cumsum(self.cells[self.outer]) - self.cells[self.outer]
        self.inner = self._needed(np.flatnonzero((parents > 1) | ((parents == 1) & (self.numbers != 0))))

    def _direct(self) -> sparse.csr_array:
        parents = [self.first[c.parent_group] + c.parents.cpu().numpy() for c in self.regions.containments]
        children = [self.first[c.child_group] + c.children.cpu().numpy() for c in self.regions.containments]
        none = np.zeros(0, dtype=np.int64)
        above, below = np.concatenate([none, *parents]), np.concatenate([none, *children])
        size = int(self.first[-1])
        return sparse.csr_array((np.ones(len(above), dtype=np.int64), (above, below)), shape=(size, size))

    def _needed(self, candidates: Integers) -> Integers:
        """The inner regions without those of counting number zero on which the outer ones agree anyway, because larger
        inner regions connect them.
        """
        idle = candidates[self.numbers[candidates] == 0]
        above = self.inside.tocsc()[:, idle].tocoo()
        # One node for each pair (idle region, region around it), joined where one of the pair's contains the other.
        around, which = above.row.astype(np.int64), above.col.astype(np.int64)
        order = np.lexsort((around, which))
        around, which = around[order], which[order]
        count = len(self.cells)
        keys = which * count + around
        steps = self.direct[around].tocoo()
        wanted = which[steps.row] * count + steps.col
        place = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        joined = keys[place] == wanted if len(keys) else np.zeros(0, dtype=bool)
        links = sparse.coo_array(
            (np.ones(joined.sum(), dtype=bool), (steps.row[joined], place[joined])), shape=(len(keys), len(keys))
        )
        _, component = csgraph.connected_components(links, directed=False)
        pieces = np.zeros(len(idle), dtype=np.int64)
        np.add.at(pieces, which[np.unique(component, return_index=True)[1]], 1)
        return np.setdiff1d(candidates, idle[pieces == 1])

    def wiring(self) -> Wiring:
        colours, order = self._colours()
        sizes = self.cells[order]
        numbers = np.repeat(self.numbers[order], sizes)
        none = torch.zeros(0, 1, dtype=torch.float64, device=self.device)
        return Wiring(
            regions=self.regions,
            num_outer_entries=int(self.cells[self.outer].sum()),
            num_inner_entries=int(sizes.sum()),
            outer_groups=tuple(self._outer_groups()),
            colours=colours,
            counting_numbers=torch.as_tensor(numbers, dtype=torch.float64, device=self.device).unsqueeze(1),
            outer_counts=torch.cat([none, *(colour.outer_counts for colour in colours)]),
            placements=tuple(self._placements()),
            sources=tuple(self._sources()),
        )

    def _outer_groups(self) -> Iterator[tuple[int, Tensor, int, int]]:
        for group in np.unique(self.group_of[self.outer]).tolist():
            members = self.outer[self.group_of[self.outer] == group]
            first = int(self.first_entry[members[0]])
            yield group, self._tensor(self.row_of[members]), first, first + int(self.cells[members].sum())

    # --- agreement ------------------------------------------------------------------------------------------------

    def _colours(self) -> tuple[tuple[Colour, ...], Integers]:
        """The colours, large regions first, and the inner regions in their order."""
        is_outer, is_inner = (np.zeros(len(self.cells), dtype=bool) for _ in range(2))
        is_outer[self.outer], is_inner[self.inner] = True, True
        pairs = self.inside.tocoo()
        chosen = is_outer[pairs.row] & is_inner[pairs.col]
        outer, inner = pairs.row[chosen].astype(np.int64), pairs.col[chosen].astype(np.int64)
        order = np.lexsort((outer, inner))
        outer, inner = outer[order], inner[order]
        classes = _first_fit(outer, inner, self.cells[inner])
        colours, regions, first = [], [np.zeros(0, dtype=np.int64)], 0
        keys, key_of = np.unique(np.stack([-classes[:, 0], classes[:, 1]], axis=1), axis=0, return_inverse=True)
        for number in range(len(keys)):
            members = np.flatnonzero(key_of.reshape(-1) == number)
            colour = self._colour(outer[members], inner[members], first)
            colours.append(colour)
            regions.append(np.unique(inner[members]))
            first = colour.last
        return tuple(colours), np.concatenate(regions)

    def _colour(self, outer: Integers, inner: Integers, first: int) -> Colour:
        regions, region_of = np.unique(inner, return_inverse=True)
        cells = int(self.cells[inner[0]])
        counts = np.bincount(region_of, minlength=len(regions))
        summands = self.cells[outer] // cells
        parts, entry_of_slot = [], []
        for number in np.unique(summands).tolist():
            pairs = np.flatnonzero(summands == number)
            entries = np.zeros((len(pairs), cells, number), dtype=np.int64)
            for kind, members in self._kinds(outer[pairs], inner[pairs]):
                entries[members] = kind.reshape(cells, number)
            entries += self.first_entry[outer[pairs]][:, None, None]
            parts.append((self._tensor(entries.ravel()), number))
            entry_of_slot.append((region_of[pairs][:, None] * cells + np.arange(cells)).ravel())
        entry = np.concatenate(entry_of_slot)
        # The slots of each entry, one after another, padded to the same number.
        order = np.argsort(entry, kind="stable")
        per_entry = np.repeat(counts, cells)
        position = np.arange(len(entry)) - np.repeat(np.cumsum(per_entry) - per_entry, per_entry)
        padded = np.full((len(regions) * cells, int(counts.max())), len(entry), dtype=np.int64)
        padded[entry[order], position] = order
        return Colour(
            first=first,
            last=first + len(regions) * cells,
            cells=cells,
            parts=tuple(parts),
            slots_of_entry=self._tensor(padded.ravel()),
            most=padded.shape[1],
            entry_of_slot=self._tensor(entry),
            outer_counts=torch.as_tensor(per_entry, dtype=torch.float64, device=self.device).unsqueeze(1),
        )

    def _kinds(self, outer: Integers, inner: Integers) -> Iterator[tuple[Integers, Integers]]:
        """For each way in which inner tables lie in outer ones: the outer entries, those of one inner entry one after
        another; and the pairs it is the way of.
        """
        groups = np.stack([self.group_of[outer], self.group_of[inner]], axis=1)
        for above, below in np.unique(groups, axis=0).tolist():
            pairs = np.flatnonzero((groups == [above, below]).all(axis=1))
            large = self.variables[above][self.row_of[outer[pairs]]]
            small = self.variables[below][self.row_of[inner[pairs]]]
            axes = (large[:, :, None] == small[:, None, :]).argmax(axis=1)
            ways, way_of = np.unique(axes, axis=0, return_inverse=True)
            shape = self.groups[above].table_shape
            entries = np.arange(math.prod(shape)).reshape(shape)
            for number, way in enumerate(ways.tolist()):
                rest = [axis for axis in range(len(shape)) if axis not in way]
                yield entries.transpose(*way, *rest).ravel(), pairs[way_of.reshape(-1) == number]

    # --- potentials and beliefs -----------------------------------------------------------------------------------

    def _placements(self) -> Iterator[Placement]:
        """Every factor and node term goes into the first outer region around it."""
        is_outer = np.zeros(len(self.cells), dtype=bool)
        is_outer[self.outer] = True
        around = self.inside.tocoo()
        chosen = is_outer[around.row]
        host = np.arange(len(self.cells))
        inner = np.setdiff1d(host, self.outer)
        host[inner] = len(host)
        np.minimum.at(host, around.col[chosen], around.row[chosen].astype(np.int64))
        for home in self.regions.homes:
            regions = self.first[home.region_group] + home.regions.cpu().numpy()
            rows, scopes = home.factors.cpu().numpy(), self.variables[home.region_group][home.regions.cpu().numpy()]
            yield from self._place(home.factor_group, False, rows, host[regions], scopes[:, list(home.axes)])
        offset = len(self.groups) - len(self.regions.node_groups)
        for number, group in enumerate(self.regions.node_groups):
            regions = self.first[offset + number] + np.arange(len(group))
            yield from self._place(number, True, np.arange(len(group)), host[regions], self.variables[offset + number])

    def _place(
        self, group: int, is_node: bool, rows: Integers, hosts: Integers, scopes: Integers
    ) -> Iterator[Placement]:
        for host_group in np.unique(self.group_of[hosts]).tolist():
            members = np.flatnonzero(self.group_of[hosts] == host_group)
            large = self.variables[host_group][self.row_of[hosts[members]]]
            axes = (large[:, :, None] == scopes[members][:, None, :]).argmax(axis=1) if scopes.shape[1] else scopes
            ways, way_of = np.unique(axes, axis=0, return_inverse=True)
            shape = self.groups[host_group].table_shape
            for number, way in enumerate(ways.tolist()):
                chosen = members[way_of.reshape(-1) == number]
                small = tuple(shape[axis] for axis in way)
                entries = self.first_entry[hosts[chosen]][:, None] + np.arange(math.prod(shape))
                cells = np.zeros(math.prod(shape), dtype=np.int64)
                if way:
                    coordinates = np.indices(shape).reshape(len(shape), -1)[way]
                    cells = np.ravel_multi_index(tuple(coordinates), small)
                yield Placement(
                    group, is_node, self._tensor(rows[chosen]), self._tensor(entries.ravel()), self._tensor(cells)
                )

    def _sources(self) -> Iterator[Source]:
        """One parent of each region that has any; larger regions come first."""
        seen = np.zeros(len(self.cells), dtype=bool)
        containments = sorted(self.regions.containments, key=lambda c: -len(c.axes))
        for c in containments:
            children = c.children.cpu().numpy()
            rows, where = np.unique(children, return_index=True)
            fresh = ~seen[self.first[c.child_group] + rows]
            if not fresh.any():
                continue
            seen[self.first[c.child_group] + rows] = True
            parents = c.parents.cpu().numpy()[where[fresh]]
            yield Source(c.parent_group, c.child_group, self._tensor(parents), self._tensor(rows[fresh]), c.axes)

    def _tensor(self, values: Integers) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self.device)


def _closure(direct: sparse.csr_array) -> sparse.csr_array:
    """0/1: which region (columns) lies strictly inside which (rows), however many steps down."""
    inside = direct
    while True:
        further = (inside + inside @ direct).tocsr()
        further.data[:] = 1
        if further.nnz == inside.nnz:
            return further
        inside = further


def _first_fit(outer: Integers, inner: Integers, cells: Integers) -> Integers:
    """For each pair the class (inner table size, colour) of its inner region; pairs are sorted by inner region.

    Each region in turn gets the first colour that no region of its table size has in any of its outer regions. This is
    the one loop over regions, when the wiring is compiled.
    """
    taken: dict[tuple[int, int], int] = {}
    bits: list[int] = []
    bounds = [*np.flatnonzero(np.diff(inner, prepend=-1)).tolist(), len(inner)]
    for start, stop in itertools.pairwise(bounds):
        keys = [(region, int(cells[start])) for region in outer[start:stop].tolist()]
        used = 0
        for key in keys:
            used |= taken.get(key, 0)
        bit = ~used & (used + 1)
        for key in keys:
            taken[key] = taken.get(key, 0) | bit
        bits += [bit.bit_length()] * (stop - start)
    return np.stack([cells, np.array(bits, dtype=np.int64)], axis=1)
