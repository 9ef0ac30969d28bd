"""`Reduction`: the model that is left once observed variables are removed, and the way back to beliefs about all of it.

Variables with a single state are removed with them.

Tables are sliced at the observed states. What then has no variable left is a constant; what has one is added to that
variable's unary log-table; the rest are the *leaves* that elimination starts from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.graph import FactorGraph
from bethenet.inference.exact.layout import Layout, Leaf
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph


@dataclass(frozen=True, eq=False)
class Part:
    """Those factors of a group in which the same axes are observed."""

    factor_group: int
    rows: Int[Tensor, " factors"]
    kept: tuple[int, ...]
    """Axes whose variables remain."""
    seen: tuple[int, ...]
    """Axes whose variables are observed."""
    whole: bool
    """These are all rows of the group."""
    variables: Int[Tensor, "factors arity"]
    unary_group: int = -1
    """With one axis kept: the variable group of its variable, ..."""
    unary_rows: Int[Tensor, " factors"] | None = None
    """... and the row of each factor's variable among those not observed."""
    one_each: bool = False
    """Every variable of that group has exactly one such factor, in order."""


class Reduction:
    """Which factors and variables remain; everything here depends on the graph and on *what* is observed only.

    Args:
        graph: the structure.
        observed: which variables are observed, or have one state.
    """

    def __init__(self, graph: FactorGraph, observed: Bool[np.ndarray, " variables"]) -> None:
        self.graph = graph
        seen = torch.as_tensor(observed, device=graph.device)
        self.free = [torch.nonzero(~seen[group.variables]).flatten() for group in graph.variable_groups]
        self.fixed = [torch.nonzero(seen[group.variables]).flatten() for group in graph.variable_groups]
        self.parts = [part for number in range(len(graph.factor_groups)) for part in self._split(number, seen)]
        self.constants = [part for part in self.parts if len(part.kept) == 0]
        self.unaries = [part for part in self.parts if len(part.kept) == 1]
        self.joins = [part for part in self.parts if len(part.kept) > 1]
        self.free_groups = [number for number, rows in enumerate(self.free) if rows.numel()]

    def _split(self, number: int, seen: Tensor) -> list[Part]:
        group = self.graph.factor_groups[number]
        if group.arity == 0:
            return [Part(number, torch.arange(len(group), device=seen.device), (), (), True, group.variables)]
        powers = 2 ** torch.arange(group.arity, device=seen.device)
        pattern_of = (seen[group.variables] * powers).sum(1)
        patterns = torch.unique(pattern_of)
        parts = []
        for pattern in patterns.tolist():
            rows = torch.nonzero(pattern_of == pattern).flatten()
            kept = tuple(axis for axis in range(group.arity) if not pattern >> axis & 1)
            away = tuple(axis for axis in range(group.arity) if pattern >> axis & 1)
            part = Part(number, rows, kept, away, len(patterns) == 1, group.variables[rows])
            parts.append(self._unary(part) if len(kept) == 1 else part)
        return parts

    def _unary(self, part: Part) -> Part:
        group = self.graph.factor_groups[part.factor_group]
        reader = group.variable_groups[part.kept[0]]
        free = self.free[reader]
        targets = torch.searchsorted(free, group.rows[part.rows, part.kept[0]].contiguous())
        one_each = targets.numel() == free.numel() and bool(
            (targets == torch.arange(free.numel(), device=free.device)).all()
        )
        return Part(
            part.factor_group, part.rows, part.kept, part.seen, part.whole, part.variables, reader, targets, one_each
        )

    # --- what elimination works on ----------------------------------------------------------------------------------

    def leaf_scopes(self) -> list[list[list[int]]]:
        """The variables of each row of each leaf, as `leaves` lists them."""
        joins = [part.variables[:, list(part.kept)] for part in self.joins]
        groups = self.graph.variable_groups
        unaries = [groups[number].variables[self.free[number]].unsqueeze(1) for number in self.free_groups]
        return [scopes.cpu().numpy().tolist() for scopes in joins + unaries]

    def free_variables(self) -> list[int]:
        """The variables that remain, ascending."""
        groups = self.graph.variable_groups
        free = [group.variables[rows] for group, rows in zip(groups, self.free, strict=True)]
        return sorted(torch.cat(free).tolist()) if free else []

    def leaves(self, potentials: LogPotentials) -> list[Tensor]:
        """Log-tables ``[batch | 1, rows | 1, *table]``: of factors with two or more variables left, then one per group
        of remaining variables with everything that concerns them alone.
        """
        joins = [self._sliced(potentials, part) for part in self.joins]
        return joins + [self._unary_table(potentials, number) for number in self.free_groups]

    def leaf_layouts(self, layout: Layout) -> list[Leaf]:
        """What `leaves` would return, by its shapes alone."""
        result = []
        for part in self.joins:
            batched, separate = self._sliced_layout(layout, part)
            shape = tuple(self.graph.factor_groups[part.factor_group].table_shape[axis] for axis in part.kept)
            fresh = bool(part.seen) or (not part.whole and separate)
            result.append(Leaf(part.rows.numel(), shape, batched, separate, fresh))
        for number in self.free_groups:
            batched, separate = layout.terms[number]
            rows = self.free[number].numel()
            fresh = False
            for part in self.unaries:
                if part.unary_group == number:
                    also_batched, also_separate = self._sliced_layout(layout, part)
                    batched |= also_batched
                    separate |= also_separate or not part.one_each
                    fresh = True
            result.append(Leaf(rows, (self.graph.variable_groups[number].states,), batched, separate, fresh))
        return result

    def _sliced_layout(self, layout: Layout, part: Part) -> tuple[bool, bool]:
        batched, separate = layout.tables[part.factor_group]
        return batched or (bool(part.seen) and layout.observed), separate or bool(part.seen)

    def constant(self, potentials: LogPotentials) -> Float[Tensor, " batch | 1"]:
        """The log-potential (nats) of what the observations decide alone."""
        total = torch.zeros(1, dtype=potentials.dtype, device=potentials.device)
        for part in self.constants:
            table = self._sliced(potentials, part)
            repeats = part.rows.numel() if table.shape[1] == 1 else 1
            total = total + (table.sum(1) * repeats if repeats else table.new_zeros(1))
        for term, group, rows in zip(potentials.node_terms, self.graph.variable_groups, self.fixed, strict=True):
            if rows.numel():
                states = _states(potentials, group.variables[rows])
                total = total + _pick(term if term.shape[1] == 1 else term[:, rows], states).sum(1)
        return total

    def _sliced(self, potentials: LogPotentials, part: Part) -> Tensor:
        table = potentials.tables[part.factor_group]
        if not part.whole and table.shape[1] > 1:
            table = table[:, part.rows]
        if not part.seen:
            return table
        shape = [table.shape[2 + axis] for axis in part.kept]
        order = [2 + axis for axis in (*part.seen, *part.kept)]
        table = table.permute(0, 1, *order).reshape(*table.shape[:2], -1, *shape)
        return _pick(table, self._cells(potentials, part))

    def _cells(self, potentials: LogPotentials, part: Part) -> Int[Tensor, "batch factors"]:
        """The observed states of each factor as one number, the last observed axis fastest."""
        shape = self.graph.factor_groups[part.factor_group].table_shape
        cells: Tensor | None = None
        for axis in part.seen:
            states = _states(potentials, part.variables[:, axis])
            cells = states if cells is None else cells * shape[axis] + states
        assert cells is not None
        return cells

    def _unary_table(self, potentials: LogPotentials, number: int) -> Tensor:
        term, free = potentials.node_terms[number], self.free[number]
        if term.shape[1] > 1 and free.numel() != term.shape[1]:
            term = term[:, free]
        for part in self.unaries:
            if part.unary_group != number:
                continue
            assert part.unary_rows is not None
            table = self._sliced(potentials, part)
            if part.one_each:
                term = term + table
                continue
            batch = max(term.shape[0], table.shape[0])
            term = term.expand(batch, free.numel(), -1)
            table = table.expand(batch, part.rows.numel(), -1)
            term = term.index_add(1, part.unary_rows, table)
        return term

    # --- beliefs about everything -----------------------------------------------------------------------------------

    def beliefs(self, potentials: LogPotentials, marginals: Sequence[Tensor]) -> Beliefs:
        """Beliefs about the whole graph from the log-marginals ``[batch, rows, *table]`` of the leaves."""
        nodes = self._node_beliefs(potentials, marginals[len(self.joins) :])
        joins = dict(zip((id(part) for part in self.joins), marginals, strict=False))
        tables = []
        for number in range(len(self.graph.factor_groups)):
            parts = [part for part in self.parts if part.factor_group == number]
            pieces = [self._part_beliefs(potentials, part, joins, nodes) for part in parts]
            if len(pieces) > 1:
                order = torch.argsort(torch.cat([part.rows for part in parts]))
                pieces = [torch.cat(pieces, dim=1)[:, order]]
            tables.append(pieces[0])
        return Beliefs(RegionGraph.bethe(self.graph), [*tables, *nodes])

    def belief_entries(self, batch: int) -> tuple[int, int]:
        """Entries that `beliefs` adds to the marginals it is given: in its result, and besides that on the way."""
        kept, most = 0, 0
        for number, group in enumerate(self.graph.factor_groups):
            parts = [part for part in self.parts if part.factor_group == number]
            if len(parts) == 1 and parts[0] in self.joins and not parts[0].seen:
                continue
            entries = batch * len(group) * math.prod(group.table_shape)
            most = max(most, 2 * entries if len(parts) > 1 else 0)
            kept += entries
        return kept, most

    def _part_beliefs(
        self, potentials: LogPotentials, part: Part, joins: dict[int, Tensor], nodes: Sequence[Tensor]
    ) -> Tensor:
        if part in self.joins:
            table = joins[id(part)]
        elif part in self.unaries:
            table = nodes[part.unary_group][:, self.free[part.unary_group][part.unary_rows]]
        else:
            table = torch.zeros(
                potentials.batch_size, part.rows.numel(), dtype=potentials.dtype, device=potentials.device
            )
        shape = [self.graph.factor_groups[part.factor_group].table_shape[axis] for axis in part.kept]
        return self._unslice(potentials, part, table, shape)

    def _unslice(self, potentials: LogPotentials, part: Part, table: Tensor, shape: list[int]) -> Tensor:
        """Put a marginal of the remaining variables where the observed states are; elsewhere ``-inf``."""
        if not part.seen:
            return table
        sizes = self.graph.factor_groups[part.factor_group].table_shape
        seen_sizes = [sizes[axis] for axis in part.seen]
        batch, rows = table.shape[:2]
        cells = self._cells(potentials, part).expand(batch, rows).reshape(batch, rows, 1, *([1] * len(shape)))
        blank = table.new_full((batch, rows, math.prod(seen_sizes), *shape), -math.inf)
        full = blank.scatter_(2, cells.expand(batch, rows, 1, *shape), table.unsqueeze(2))
        full = full.reshape(batch, rows, *seen_sizes, *shape)
        order = (*part.seen, *part.kept)
        return full.permute(0, 1, *(2 + order.index(axis) for axis in range(len(order))))

    def _node_beliefs(self, potentials: LogPotentials, marginals: Sequence[Tensor]) -> list[Tensor]:
        nodes = []
        by_group = dict(zip(self.free_groups, marginals, strict=True))
        for number, group in enumerate(self.graph.variable_groups):
            free, fixed = self.free[number], self.fixed[number]
            if not fixed.numel():
                nodes.append(by_group[number])
                continue
            states = _states(potentials, group.variables[fixed])
            some = potentials.node_terms[number]
            known = some.new_full((potentials.batch_size, fixed.numel(), group.states), -math.inf)
            states = states.expand(potentials.batch_size, -1).unsqueeze(-1)
            known.scatter_(2, states, 0.0)
            if free.numel():
                order = torch.argsort(torch.cat([free, fixed]))
                known = torch.cat([by_group[number], known], dim=1)[:, order]
            nodes.append(known)
        return nodes


def _states(potentials: LogPotentials, variables: Tensor) -> Int[Tensor, "batch variables"]:
    if potentials.observed is None:
        return torch.zeros(1, variables.numel(), dtype=torch.long, device=variables.device)
    return potentials.observed[:, variables].clamp(min=0)  # a variable of one state need not have been observed


def _pick(table: Tensor, cells: Int[Tensor, "batch rows"]) -> Tensor:
    """``table`` ``[batch | 1, rows | 1, cells, ...]`` at one cell for each batch member and row."""
    batch = torch.arange(table.shape[0], device=table.device).unsqueeze(1)
    rows = torch.arange(table.shape[1], device=table.device).unsqueeze(0)
    return table[batch, rows, cells]
