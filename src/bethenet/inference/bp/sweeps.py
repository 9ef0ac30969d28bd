"""Sweeps: messages renewed along an order of the variables, each from the newest ones; and decoding along the way."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.inference.bp.kernels import rows_of, unpack
from bethenet.inference.bp.levels import Level, Sending, Sweep
from bethenet.inference.bp.problem import Messages, Problem, Sums, split
from bethenet.inference.bp.schedules import Damping, relaxed

BEYOND_ANY_COUNT = 2.0**20


def sweep(
    problem: Problem, messages: Messages, damping: Damping, levels: Sweep
) -> tuple[Messages, Float[Tensor, " batch"]]:
    """Renew the messages along the order and back. Returns the new ones and the largest change, before damping."""
    messages, worst = _pass(problem, list(messages), damping, levels.forwards)
    messages, change = _pass(problem, messages, damping, levels.backwards)
    return messages, torch.maximum(worst, change)


def _pass(problem: Problem, messages: Messages, damping: Damping, levels: Iterable[Level]) -> tuple[Messages, Tensor]:
    sums = problem.sums(messages)
    messages = list(messages)
    if not torch.is_grad_enabled():
        messages = [part.clone(memory_format=torch.contiguous_format) for part in messages]
    worst = problem.no_change()
    for level in levels:
        for sending in level.sendings:
            worst = torch.maximum(worst, _send(problem, messages, sums, damping, sending))
    return messages, worst


def _send(problem: Problem, messages: Messages, sums: list[Sums], damping: Damping, sending: Sending) -> Tensor:
    """Renew some messages, and the sums of the variables that receive them. Returns the change of each member."""
    group = problem.graph.factor_groups[sending.group]
    weights = None if problem.weights is None else problem.weights[sending.group].index_select(0, sending.factors)
    kernel = problem.kernels[sending.group]
    assert kernel is not None
    incoming: list[Tensor | None] = []
    for reader, ends in zip(group.variable_groups, sending.incoming, strict=True):
        if ends is None:
            incoming.append(None)
            continue
        slots, nodes = ends
        here = _at(sums[reader], nodes)
        incoming.append(problem.cavity(here, rows_of(messages[reader], slots), weights))
    message = kernel.message(incoming, sending.axis, sending.factors)
    update = problem.normalized(message, group.table_shape[sending.axis])
    if weights is not None:
        update = update * weights
    reader = group.variable_groups[sending.axis]
    old = rows_of(messages[reader], sending.slots)
    new, change = relaxed(problem, old, update, damping)
    sums[reader] = _replaced(sums[reader], sending.nodes, old, new)
    if torch.is_grad_enabled():
        messages[reader] = messages[reader].index_copy(0, sending.slots, new)
    else:
        messages[reader].index_copy_(0, sending.slots, new)
    return change.amax((0, 2))


def _at(sums: Sums, nodes: Tensor) -> Sums:
    zeros = None if sums.zeros is None else rows_of(sums.zeros, nodes)
    return Sums(rows_of(sums.finite, nodes), zeros)


def _replaced(sums: Sums, nodes: Tensor, old: Tensor, new: Tensor) -> Sums:
    """Sums after some of their terms have changed."""
    if sums.zeros is None:
        return Sums(_add(sums.finite, nodes, new - old), None)
    (old_finite, old_zeros), (new_finite, new_zeros) = split(old), split(new)
    return Sums(_add(sums.finite, nodes, new_finite - old_finite), _add(sums.zeros, nodes, new_zeros - old_zeros))


def _add(values: Tensor, rows: Tensor, terms: Tensor) -> Tensor:
    # in place where nothing is recorded: a copy at each level would make a long sweep quadratic
    return values.index_add(0, rows, terms) if torch.is_grad_enabled() else values.index_add_(0, rows, terms)


def decode(problem: Problem, messages: Messages, levels: Sweep) -> list[Int[Tensor, "nodes batch"]]:
    """A single assignment, variables fixed level by level (last level first): each takes its best state given those
    already fixed, which is the most probable assignment on a tree, ties or not. Per variable group, by position.
    """
    sums = problem.sums(messages)
    messages = [part.clone() for part in messages]
    states = [
        torch.zeros(layout.num_nodes, problem.batch_size, dtype=torch.long, device=problem.device)
        for layout in problem.wiring.layouts
    ]
    for level in levels.backwards:
        for sending in level.sendings:
            _send(problem, messages, sums, 0.0, sending)
        for number, nodes in enumerate(level.nodes):
            total = _at(sums[number], nodes).total
            log_odds = total.shape[-1] < problem.wiring.layouts[number].states
            best = (unpack(total) if log_odds else total).argmax(-1)
            states[number][nodes] = best
            sums[number] = _fixed(sums[number], nodes, best, log_odds)
    return states


def _fixed(sums: Sums, nodes: Tensor, best: Int[Tensor, "members batch"], log_odds: bool) -> Sums:
    """Sums in which the variables at ``nodes`` are certain of their best state."""
    if log_odds:
        certain = torch.where(best == 1, math.inf, -math.inf).to(sums.finite.dtype)
        return Sums(sums.finite.index_copy(0, nodes, certain.unsqueeze(-1)), None)
    other = torch.arange(sums.finite.shape[-1], device=best.device) != best.unsqueeze(-1)
    if sums.zeros is None:
        certain = torch.zeros_like(other, dtype=sums.finite.dtype).masked_fill(other, -math.inf)
        return Sums(sums.finite.index_copy(0, nodes, certain), None)
    # counted above every message's, so that taking messages out leaves the others impossible
    return Sums(sums.finite, sums.zeros.index_copy(0, nodes, other.to(sums.zeros.dtype) * BEYOND_ANY_COUNT))
