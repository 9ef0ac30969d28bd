"""Variables and factors in groups: all with the same number of states, all with the same table shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

MAX_ARITY = 50
"""Variables of one factor: a tensor has at most 64 axes, and engines need some besides the table's."""


@dataclass(frozen=True, eq=False)
class VariableGroup:
    """All variables with ``states`` states."""

    states: int
    variables: Int[Tensor, " variables"]
    """The variables' numbers in the graph, ascending."""


@dataclass(frozen=True, eq=False)
class FactorGroup:
    """All factors whose tables have one shape."""

    table_shape: tuple[int, ...]
    variables: Int[Tensor, "factors arity"]
    """Which variables each factor joins, in the order of its table's axes."""
    factors: Int[Tensor, " factors"]
    """The factors' numbers in the graph, ascending."""
    variable_groups: tuple[int, ...]
    """For each axis, the variable group it reads from (an index into ``FactorGraph.variable_groups``)."""
    rows: Int[Tensor, "factors arity"]
    """``variables`` as rows within the variable group of each axis."""

    @property
    def arity(self) -> int:
        """How many variables each factor joins."""
        return len(self.table_shape)

    def __len__(self) -> int:
        return self.variables.shape[0]


class Grouping(NamedTuple):
    """The groups of a graph, and where in them each variable and each factor is."""

    variable_groups: tuple[VariableGroup, ...]
    factor_groups: tuple[FactorGroup, ...]
    variable_group: Int[Tensor, " variables"]
    variable_row: Int[Tensor, " variables"]
    factor_group: Int[Tensor, " factors"]
    factor_row: Int[Tensor, " factors"]

    def to(self, device: torch.device) -> Grouping:
        """The same with its tensors on ``device``."""
        return Grouping(
            tuple(VariableGroup(g.states, g.variables.to(device)) for g in self.variable_groups),
            tuple(
                FactorGroup(
                    g.table_shape, g.variables.to(device), g.factors.to(device), g.variable_groups, g.rows.to(device)
                )
                for g in self.factor_groups
            ),
            *(tensor.to(device) for tensor in self[2:]),
        )


def grouped(
    state_counts: Int[Tensor, " variables"], scopes: Sequence[tuple[Int[Tensor, " factors"], Tensor]]
) -> Grouping:
    """Sort variables by state count, and factors by table shape.

    Args:
        state_counts: of each variable.
        scopes: the factors' numbers and their variables ``[factors, arity]``, in any number of parts.

    Raises:
        ValueError: a variable does not exist, or stands in a scope twice, or a scope has more than `MAX_ARITY`
            variables; the factor is named.
    """
    distinct = state_counts[:1] if _all_alike(state_counts) else torch.unique(state_counts)
    variable_groups = tuple(
        VariableGroup(int(states), torch.nonzero(state_counts == states).flatten()) for states in distinct
    )
    variable_row = torch.empty_like(state_counts)
    for group in variable_groups:
        variable_row[group.variables] = torch.arange(group.variables.numel())
    group_of_states = {group.states: number for number, group in enumerate(variable_groups)}

    by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for ids, variables in scopes:
        _check_scopes(ids, variables, state_counts.numel())
        for shape, members in _split_by_shape(state_counts, variables):
            by_shape.setdefault(shape, []).append((ids[members], variables[members]))
    total = sum(ids.numel() for ids, _ in scopes)
    factor_group, factor_row = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    factor_groups: list[FactorGroup] = []
    for shape in sorted(by_shape, key=lambda shape: (len(shape), shape)):
        ids = torch.cat([ids for ids, _ in by_shape[shape]])
        variables = torch.cat([variables for _, variables in by_shape[shape]])
        if bool((ids[1:] < ids[:-1]).any()):
            order = torch.argsort(ids)
            ids, variables = ids[order], variables[order]
        factor_group[ids] = len(factor_groups)
        factor_row[ids] = torch.arange(ids.numel())
        readers = tuple(group_of_states[states] for states in shape)
        factor_groups.append(FactorGroup(shape, variables, ids, readers, variable_row[variables]))
    return Grouping(
        variable_groups,
        tuple(factor_groups),
        torch.searchsorted(distinct, state_counts),
        variable_row,
        factor_group,
        factor_row,
    )


def _check_scopes(ids: Tensor, scopes: Tensor, variables: int) -> None:
    outside = (scopes < 0) | (scopes >= variables)
    if outside.any():
        row, axis = (int(i) for i in torch.nonzero(outside)[0])
        raise no_such_variable(int(scopes[row, axis]), variables, int(ids[row]))
    if scopes.shape[0] and scopes.shape[1] > MAX_ARITY:
        raise ValueError(f"factor {int(ids[0])}: expected at most {MAX_ARITY} variables, got {scopes.shape[1]}")
    if scopes.shape[1] < 2:
        return
    ordered = scopes.sort(dim=1).values if scopes.shape[1] > 2 else scopes
    repeated = ordered[:, 1:] == ordered[:, :-1]
    if repeated.any():
        row, axis = (int(i) for i in torch.nonzero(repeated)[0])
        raise ValueError(f"factor {int(ids[row])}: variable {int(ordered[row, axis])} stands in its scope twice")


def no_such_variable(number: int, variables: int, factor: int | None = None) -> ValueError:
    """The error for a variable's number that is out of range, in a factor's scope or elsewhere."""
    where = "" if factor is None else f"factor {factor}: "
    return ValueError(f"{where}variable {number} does not exist: the graph has {variables} variables")


def _split_by_shape(counts: Tensor, scopes: Tensor) -> list[tuple[tuple[int, ...], Tensor | slice]]:
    """The distinct table shapes of ``scopes`` [factors, arity], each with its members."""
    if scopes.shape[0] == 0:
        return []
    if scopes.shape[1] == 0:
        return [((), slice(None))]
    if _all_alike(counts):  # no need to look at the scopes
        return [((int(counts[0]),) * scopes.shape[1], slice(None))]
    shapes = counts[scopes]
    if _all_alike(shapes):
        return [(tuple(shapes[0].tolist()), slice(None))]
    distinct, member_of = torch.unique(shapes, dim=0, return_inverse=True)
    return [
        (tuple(shape), torch.nonzero(member_of == number).flatten()) for number, shape in enumerate(distinct.tolist())
    ]


def _all_alike(rows: Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def checked_state_counts(state_counts: Sequence[int] | Tensor) -> Int[Tensor, " variables"]:
    """State counts as a tensor on the CPU.

    Raises:
        ValueError: they are not one positive integer a variable.
    """
    counts = torch.as_tensor(state_counts)
    if counts.numel() == 0:
        counts = counts.reshape(0).long()
    if counts.dim() != 1 or counts.is_floating_point():
        raise ValueError(f"state counts are one integer a variable; got {counts.dtype} of shape {tuple(counts.shape)}")
    counts = counts.long().cpu()
    if (counts < 1).any():
        variable = int(torch.nonzero(counts < 1)[0])
        raise ValueError(f"variable {variable}: expected at least one state, got {int(counts[variable])}")
    return counts


def is_permutation(parts: list[Tensor], size: int) -> bool:
    """Whether the parts together are each of ``0 .. size-1`` once."""
    together = torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0, dtype=torch.long)
    return torch.equal(together.sort().values, torch.arange(size))
