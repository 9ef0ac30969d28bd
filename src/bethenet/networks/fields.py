"""The log-potentials as a network sees them: per variable and per region, centred and bounded."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bethenet.numerics import NEGATIVE_INFINITY
from bethenet.potentials import LogPotentials
from bethenet.regions import FactorHome, RegionGraph

LARGEST_LOG_POTENTIAL = 30.0
"""Log-potentials are cut to this size as features: beyond it a state is as good as certain or impossible."""


def unary_log_potentials(potentials: LogPotentials) -> tuple[Tensor, ...]:
    """Sum of each variable's unary factors and evidence, ``[batch, variables, states]`` per variable group."""
    graph = potentials.graph
    totals = []
    for number, (term, variables) in enumerate(zip(potentials.node_terms, graph.variable_groups, strict=True)):
        total = term.expand(-1, variables.variables.numel(), -1)
        for table, group in zip(potentials.tables, graph.factor_groups, strict=True):
            if group.arity == 1 and group.variable_groups[0] == number:
                whole = table.expand(-1, len(group), -1)
                batch = max(whole.shape[0], total.shape[0])
                total = total.expand(batch, -1, -1).index_add(1, group.rows[:, 0], whole.expand(batch, -1, -1))
        totals.append(total)
    return tuple(totals)


def bounded(log_potentials: Tensor, axes: int = 1) -> Tensor:
    """Log-potentials as features: centred over their last ``axes`` axes, impossible states at a finite bound."""
    finite = log_potentials.masked_fill(log_potentials == NEGATIVE_INFINITY, -LARGEST_LOG_POTENTIAL)
    last = tuple(range(-axes, 0))
    centred = finite - finite.mean(last, keepdim=True) if axes else finite
    return centred.clamp(-LARGEST_LOG_POTENTIAL, LARGEST_LOG_POTENTIAL)


def region_log_potentials(
    potentials: LogPotentials, regions: RegionGraph
) -> list[Float[Tensor, "batch regions *table"]]:
    """The log-potentials at home in each region, centred and bounded.

    Unary factors and evidence are counted at the variables, and only there.
    """
    nodes = unary_log_potentials(potentials)
    fields: list[Tensor | None] = [None] * (len(regions.groups) - len(nodes))
    fields += [bounded(node) for node in nodes]
    for home in regions.homes:
        table = potentials.tables[home.factor_group]
        arity = table.dim() - 2
        if arity <= 1:
            continue
        placed = place(bounded(table, arity), home, regions)
        old = fields[home.region_group]
        fields[home.region_group] = placed if old is None else old + placed
    zero = torch.zeros((), dtype=potentials.dtype, device=potentials.device)
    return [
        zero.expand(1, len(group), *group.table_shape) if field is None else field
        for field, group in zip(fields, regions.groups, strict=True)
    ]


def impossible_entries(potentials: LogPotentials, regions: RegionGraph) -> list[Bool[Tensor, "batch regions *table"]]:
    """Which entries of each region's table are ruled out by a factor at home in it or by one of its variables."""
    nodes = [(term == NEGATIVE_INFINITY).to(potentials.dtype) for term in unary_log_potentials(potentials)]
    first = len(regions.groups) - len(nodes)
    counts: list[Tensor] = []
    for number, group in enumerate(regions.groups):
        shape = group.table_shape
        count = torch.zeros(1, len(group), *shape, dtype=potentials.dtype, device=potentials.device)
        for axis, states in enumerate(shape):
            reader = [members.states for members in potentials.graph.variable_groups].index(states)
            rows = potentials.graph.variable_rows[group.variables[:, axis]]
            count = count + spread(nodes[reader][:, rows], (axis,), len(shape))
        for home in regions.homes:
            if home.region_group == number and number < first:
                table = potentials.tables[home.factor_group]
                count = count + place((table == NEGATIVE_INFINITY).to(count.dtype), home, regions)
        counts.append(count)
    return [count > 0 for count in counts]


def place(values: Tensor, home: FactorHome, regions: RegionGraph) -> Float[Tensor, "batch regions *table"]:
    """Values of a factor group's tables ``[batch, factors | 1, *table]``, summed into the tables of their regions."""
    group = regions.groups[home.region_group]
    if home.whole:
        return values.expand(-1, len(group), *group.table_shape)
    count = home.factors.numel()
    members = values[:, home.factors] if values.shape[1] > 1 else values.expand(-1, count, *values.shape[2:])
    members = spread(members, home.axes, len(group.table_shape)).expand(-1, count, *group.table_shape)
    blank = values.new_zeros(values.shape[0], len(group), *group.table_shape)
    return blank.index_add(1, home.regions, members)


def spread(values: Tensor, axes: tuple[int, ...], arity: int) -> Tensor:
    """Tables over some axes of a larger table, ``[batch, members, *small, ...]``, with size 1 at the other axes."""
    kept = sorted(axes)
    trailing = range(2 + len(axes), values.dim())
    ordered = values.permute(0, 1, *(2 + axes.index(axis) for axis in kept), *trailing)
    for axis in range(arity):
        if axis not in axes:
            ordered = ordered.unsqueeze(2 + axis)
    return ordered
