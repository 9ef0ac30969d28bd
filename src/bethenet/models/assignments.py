"""What log-potentials say of complete assignments: their score, and each variable's conditional distribution.

States are ``[samples, variables]`` (every assignment under every batch member) or ``[samples, batch, variables]`` (each
batch member has its own assignments); results are ``[samples, batch, ...]`` either way.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.graph import FactorGroup
from bethenet.numerics import log_normalize
from bethenet.potentials import LogPotentials


def score(potentials: LogPotentials, states: Int[Tensor, "samples *batch variables"]) -> Float[Tensor, "samples batch"]:
    """Log of the unnormalised probability (nats), evidence counted."""
    states = _with_batch_axis(potentials, states)
    total = states.new_zeros((states.shape[0], potentials.batch_size), dtype=potentials.dtype)
    for table, group in zip(potentials.tables, potentials.graph.factor_groups, strict=True):
        total = total + _look_up(table, _cells(group, states, None)).sum(-1)
    for term, variables in zip(potentials.node_terms, potentials.graph.variable_groups, strict=True):
        total = total + _look_up(term, states[..., variables.variables]).sum(-1)
    return total


def conditional_log_probabilities(
    potentials: LogPotentials, states: Int[Tensor, "samples *batch variables"]
) -> list[Float[Tensor, "samples batch variables states"]]:
    """``log P(x_v = k | all other variables)`` of every variable at once, one tensor per variable group."""
    states = _with_batch_axis(potentials, states)
    shape = (states.shape[0], potentials.batch_size)
    logits = [
        term.unsqueeze(0).expand(*shape, group.variables.numel(), group.states).contiguous()
        for term, group in zip(potentials.node_terms, potentials.graph.variable_groups, strict=True)
    ]
    for table, factors in zip(potentials.tables, potentials.graph.factor_groups, strict=True):
        for axis, group in enumerate(factors.variable_groups):
            entries = _look_up(table, _cells(factors, states, axis))
            entries = entries.expand(*shape, *entries.shape[2:])
            logits[group] = logits[group].index_add(2, factors.rows[:, axis], entries)
    return [log_normalize(group, -1) for group in logits]


def pseudo_log_likelihood(
    potentials: LogPotentials, states: Int[Tensor, "samples *batch variables"]
) -> Float[Tensor, "samples batch"]:
    """Sum over variables of ``log P(x_v | all other variables)`` (nats)."""
    states = _with_batch_axis(potentials, states)
    total = states.new_zeros((states.shape[0], potentials.batch_size), dtype=potentials.dtype)
    conditionals = conditional_log_probabilities(potentials, states)
    for conditional, group in zip(conditionals, potentials.graph.variable_groups, strict=True):
        seen = states[..., group.variables].expand(*conditional.shape[:-1]).unsqueeze(-1)
        total = total + conditional.gather(-1, seen).squeeze(-1).sum(-1)
    return total


def _with_batch_axis(potentials: LogPotentials, states: Tensor) -> Tensor:
    variables, batch = potentials.graph.num_variables, potentials.batch_size
    if states.dim() == 2:
        states = states.unsqueeze(1)
    if states.dim() != 3 or states.shape[2] != variables or states.shape[1] not in (1, batch):
        raise ValueError(
            f"expected states of shape [samples, {variables}] or [samples, {batch}, {variables}]; "
            f"got {list(states.shape)}"
        )
    if states.is_floating_point():
        raise ValueError(f"expected integer states, got {states.dtype}")
    return states.to(potentials.device).long()  # small integers would overflow as addresses


def _cells(group: FactorGroup, states: Tensor, free: int | None) -> Tensor:
    """Where in its flattened table each factor's assignment stands, [S, B | 1, M]; with axis ``free`` at each of its
    states in turn, [S, B | 1, M, states].
    """
    local = states[..., group.variables]
    cells = torch.zeros(local.shape[:-1], dtype=torch.long, device=states.device)
    for axis in range(group.arity):
        if axis != free:
            cells = cells + local[..., axis] * math.prod(group.table_shape[axis + 1 :])
    if free is None:
        return cells
    steps = torch.arange(group.table_shape[free], device=states.device) * math.prod(group.table_shape[free + 1 :])
    return cells.unsqueeze(-1) + steps


def _look_up(table: Tensor, cells: Tensor) -> Tensor:
    """Entries of ``table`` [B | 1, M | 1, *shape] at ``cells`` [S, B | 1, M, ...]; the result is [S, B | 1, M, ...]."""
    batch, members = table.shape[:2]
    flat = table.reshape(batch, -1)
    if members > 1:
        first = torch.arange(members, device=table.device) * (flat.shape[1] // members)
        cells = cells + first.reshape(-1, *([1] * (cells.dim() - 3)))
    by_member = cells.transpose(0, 1)
    if cells.shape[1] == 1 or batch == 1:
        found = flat[:, by_member.flatten()].reshape(max(batch, cells.shape[1]), *by_member.shape[1:])
    else:
        found = flat.gather(1, by_member.flatten(1)).reshape(by_member.shape)
    return found.transpose(0, 1)
