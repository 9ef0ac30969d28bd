"""Regions, counting numbers, and the constraints between them.

A region is a set of variables with a belief (a table of pseudo-marginals) over it. The free energy of a region graph is
the sum over regions of counting number times (minus entropy), minus the expected log-potentials: equation 1 of the
paper when the regions are the factors (counting number 1) and the variables (counting number 1 - degree).

Every region graph here ends with one region per variable, whatever its counting number, grouped as the graph's variable
groups are: node marginals are always there to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.graph import FactorGraph

if TYPE_CHECKING:
    from bethenet.regions.clusters import Clusters


@dataclass(frozen=True, eq=False)
class RegionGroup:
    """All regions of one table shape."""

    table_shape: tuple[int, ...]
    variables: Int[Tensor, "regions arity"]
    counting_numbers: Float[Tensor, " regions"]

    def __len__(self) -> int:
        return self.variables.shape[0]


@dataclass(frozen=True, eq=False)
class Containment:
    """Consistency constraints of one kind: summing each parent over all axes but ``axes`` gives its child's belief."""

    parent_group: int
    child_group: int
    parents: Int[Tensor, " constraints"]
    """Rows in the parent group."""
    children: Int[Tensor, " constraints"]
    """Rows in the child group."""
    axes: tuple[int, ...]
    """The parent's axes that are the child's, in the child's order."""
    covers_parents: bool = False
    """``parents`` are all rows of the parent group, in order: nothing need be gathered."""


@dataclass(frozen=True, eq=False)
class FactorHome:
    """Where some factors of one group live: their scope is the axes ``axes`` of a region, in the factor's order."""

    factor_group: int
    factors: Int[Tensor, " members"]
    """Rows in the factor group."""
    region_group: int
    regions: Int[Tensor, " members"]
    """Rows in the region group."""
    axes: tuple[int, ...]
    whole: bool = False
    """Both groups' rows are all meant, in order: nothing need be gathered."""


@dataclass(frozen=True, eq=False)
class RegionGraph:
    """Regions with counting numbers, the constraints between them, and the home of each factor."""

    graph: FactorGraph
    groups: tuple[RegionGroup, ...]
    containments: tuple[Containment, ...]
    homes: tuple[FactorHome, ...]

    @property
    def node_groups(self) -> tuple[RegionGroup, ...]:
        """The single-variable regions, one group per variable group of the graph."""
        return self.groups[len(self.groups) - len(self.graph.variable_groups) :]

    @classmethod
    def bethe(cls, graph: FactorGraph) -> RegionGraph:
        """One region per factor (counting number 1) and per variable (1 - degree): equation 1 of the paper."""
        return graph.compiled_as("bethe regions", lambda: cls._two_level(graph, None))

    @classmethod
    def mean_field(cls, graph: FactorGraph) -> RegionGraph:
        """Independent variables: factors have counting number 0 (their beliefs are products), variables 1."""
        zeros = [torch.zeros(len(group), device=graph.device) for group in graph.factor_groups]
        return graph.compiled_as("mean field regions", lambda: cls._two_level(graph, zeros))

    @classmethod
    def tree_reweighted(cls, graph: FactorGraph, appearance: Sequence[Float[Tensor, " factors"]]) -> RegionGraph:
        """Each factor counts as often as it appears in a random spanning forest.

        Args:
            graph: the structure.
            appearance: for each factor group the factors' appearance probabilities.
        """
        if len(appearance) != len(graph.factor_groups):
            raise ValueError(f"expected {len(graph.factor_groups)} tensors of probabilities; got {len(appearance)}")
        return cls._two_level(graph, appearance)

    @classmethod
    def kikuchi(
        cls,
        graph: FactorGraph,
        clusters: Clusters = "auto",
        *,
        max_length: int = 6,
        max_table_entries: int = 2**20,
    ) -> RegionGraph:
        """Clusters of variables and all their intersections: the cluster variation method.

        Args:
            graph: the structure. A factor whose scope lies in no cluster makes a cluster of it.
            clusters: the largest regions: lists of variables (numbers or names) or index arrays ``[clusters, size]``;
                ``"plaquettes"``: the chordless cycles of four variables; ``"strips"``: windows of up to ``max_length``
                variables along rows (or columns) of plaquettes; ``"cycles"``: the chordless cycles of up to
                ``max_length`` variables; ``"auto"``: maximal cliques, windows of up to eight variables, and cycles of
                up to four (of up to six where some edge lies in none shorter), all whose tables have at most 4096
                entries (cliques: 65536).
            max_length: the most variables in one of ``"cycles"`` or ``"strips"``.
            max_table_entries: no cluster may have a larger table.

        Raises:
            ValueError: a cluster's table would be too large, or a variable does not exist; the cluster is named.
        """
        from bethenet.regions.kikuchi import kikuchi_regions  # it builds on this module

        def build() -> RegionGraph:
            return kikuchi_regions(graph, clusters, max_length, max_table_entries)

        if not isinstance(clusters, str):
            return build()
        return graph.compiled_as(("kikuchi regions", clusters, max_length, max_table_entries), build)

    @classmethod
    def _two_level(cls, graph: FactorGraph, counting_numbers: Sequence[Tensor] | None) -> RegionGraph:
        """Factors over variables, the factors with given counting numbers (ones by default), the variables with one
        minus the sum of their factors' numbers.
        """
        node_numbers = [
            torch.ones(group.variables.numel(), dtype=torch.float64, device=graph.device)
            for group in graph.variable_groups
        ]
        groups, containments, homes = [], [], []
        for number, factors in enumerate(graph.factor_groups):
            if counting_numbers is None:
                counts = torch.ones(len(factors), dtype=torch.float64, device=graph.device)
            else:
                counts = counting_numbers[number].to(device=graph.device, dtype=torch.float64)
                if counts.shape != (len(factors),):
                    raise ValueError(
                        f"factor group {number}: expected {len(factors)} counting numbers, got {list(counts.shape)}"
                    )
            groups.append(RegionGroup(factors.table_shape, factors.variables, counts))
            rows = torch.arange(len(factors), device=graph.device)
            homes.append(FactorHome(number, rows, number, rows, tuple(range(factors.arity)), whole=True))
            for axis, group in enumerate(factors.variable_groups):
                child = len(graph.factor_groups) + group
                containments.append(
                    Containment(number, child, rows, factors.rows[:, axis], (axis,), covers_parents=True)
                )
                node_numbers[group].index_add_(0, factors.rows[:, axis], -counts)
        for variables, numbers in zip(graph.variable_groups, node_numbers, strict=True):
            groups.append(RegionGroup((variables.states,), variables.variables.unsqueeze(1), numbers))
        return cls(graph, tuple(groups), tuple(containments), tuple(homes))
