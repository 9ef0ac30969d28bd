"""`Beliefs`: log pseudo-marginals of every region of a region graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.numerics import log_sum_exp
from bethenet.regions import FactorHome, RegionGraph


class Beliefs:
    """Log pseudo-marginals, one tensor ``[batch, regions, *table]`` per region group.

    Each table sums to one (in probability); whether regions agree where they overlap is what `inconsistency` says.
    """

    def __init__(self, regions: RegionGraph, log_tables: Sequence[Tensor]) -> None:
        if len(log_tables) != len(regions.groups):
            raise ValueError(f"expected {len(regions.groups)} log-tables, one a region group; got {len(log_tables)}")
        for number, (table, group) in enumerate(zip(log_tables, regions.groups, strict=True)):
            if tuple(table.shape[1:]) != (len(group), *group.table_shape):
                expected = f"[batch, {len(group)}, {', '.join(map(str, group.table_shape))}]"
                raise ValueError(f"region group {number}: expected shape {expected}, got {list(table.shape)}")
            if table.shape[0] != log_tables[0].shape[0]:
                raise ValueError(
                    f"region group {number}: expected batch {log_tables[0].shape[0]} as the first table has, "
                    f"got {table.shape[0]}"
                )
        self.regions = regions
        self.log_tables = tuple(log_tables)

    @property
    def graph(self) -> FactorGraph:
        """The factor graph these are beliefs about."""
        return self.regions.graph

    @property
    def batch_size(self) -> int:
        """How many models (or pieces of evidence) these are beliefs about."""
        return self.log_tables[0].shape[0] if self.log_tables else 1

    @property
    def node_log_tables(self) -> tuple[Tensor, ...]:
        """Log-marginals ``[batch, variables, states]`` per variable group of the graph."""
        return self.log_tables[len(self.log_tables) - len(self.graph.variable_groups) :]

    @cached_property
    def factor_log_tables(self) -> tuple[Tensor, ...]:
        """Log-marginals ``[batch, factors, *table]`` per factor group of the graph, read off each factor's region."""
        return tuple(self._assemble(number) for number in range(len(self.graph.factor_groups)))

    @cached_property
    def node_marginals(self) -> Float[Tensor, "batch variables states"]:
        """P(variable = state), all variables in order. Where state counts are mixed, the axis is as long as the largest
        and padded with zeros.
        """
        graph, groups = self.graph, self.graph.variable_groups
        if len(groups) == 1:
            return self.node_log_tables[0].exp()
        longest = max((group.states for group in groups), default=0)
        some = self.log_tables[0] if self.log_tables else torch.empty(1, device=graph.device)
        result = some.new_zeros(self.batch_size, graph.num_variables, longest)
        for table, group in zip(self.node_log_tables, groups, strict=True):
            result[:, group.variables, : group.states] = table.exp()
        return result

    @property
    def factor_marginals(self) -> tuple[Tensor, ...]:
        """P(factor's variables), ``[batch, factors, *table]`` per factor group of the graph."""
        return tuple(table.exp() for table in self.factor_log_tables)

    def node_marginal(self, variable: int | str) -> Float[Tensor, "batch states"]:
        """P(variable = state) of one variable, given by number or name."""
        group, row = self.graph.locate_variable(variable)
        return self.node_log_tables[group][:, row].exp()

    def factor_marginal(self, factor: int) -> Float[Tensor, batch * table]:
        """P(factor's variables) in the order of the factor's scope."""
        group, row = self.graph.locate_factor(factor)
        return self.factor_log_tables[group][:, row].exp()

    def inconsistency(self) -> Float[Tensor, " batch"]:
        """The largest disagreement, in probability, between a region and a region inside it."""
        device = self.graph.device
        worst = torch.zeros(self.batch_size, device=device, dtype=self.log_tables[0].dtype if self.log_tables else None)
        for edge in self.regions.containments:
            parent = marginalize(self.log_tables[edge.parent_group][:, edge.parents], edge.axes)
            child = self.log_tables[edge.child_group][:, edge.children]
            gap = (parent.exp() - child.exp()).abs().flatten(1)
            if gap.shape[1]:
                worst = torch.maximum(worst, gap.amax(1))
        return worst

    def detach(self) -> Beliefs:
        """The same beliefs as constants."""
        return Beliefs(self.regions, [table.detach() for table in self.log_tables])

    def __getitem__(self, member: slice) -> Beliefs:
        """A slice of the batch."""
        return Beliefs(self.regions, [table[member] for table in self.log_tables])

    def _assemble(self, number: int) -> Tensor:
        homes = [home for home in self.regions.homes if home.factor_group == number]
        tables = [self.factor_table(home) for home in homes]
        if len(homes) == 1 and homes[0].whole:
            return tables[0]
        order = torch.argsort(torch.cat([home.factors for home in homes]))
        return torch.cat(tables, dim=1)[:, order]

    def factor_table(self, home: FactorHome) -> Tensor:
        """Log-marginals ``[batch, members, *table]`` of the factors that live at one home."""
        table = self.log_tables[home.region_group]
        return marginalize(table if home.whole else table[:, home.regions], home.axes)


def marginalize(log_tables: Float[Tensor, "batch regions *table"], axes: Sequence[int]) -> Tensor:
    """Sum log-tables over all their axes but ``axes``, and put those into the order given."""
    arity = log_tables.dim() - 2
    reduced = log_sum_exp(log_tables, [2 + axis for axis in range(arity) if axis not in axes])
    kept = sorted(axes)
    return reduced.permute(0, 1, *(2 + kept.index(axis) for axis in axes))
