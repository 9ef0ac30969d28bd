"""Which messages are renewed when. Here: all at once (flooding), or those that would change most (residual)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.inference.bp.kernels import CouplingKernel
from bethenet.inference.bp.problem import Messages, Problem, blocks

Damping = Float[Tensor, " batch"] | float
Updates = Iterator[tuple[slice, Tensor]]


def flood(problem: Problem, messages: Messages, damping: Damping) -> tuple[Messages, Float[Tensor, " batch"]]:
    """Renew every message from the old ones. Returns the new ones and the largest change, before damping."""
    worst = problem.no_change()
    result = []
    for old, proposals in zip(messages, updates(problem, messages), strict=True):
        new: Tensor | None = None
        for block, update in proposals:
            part, change = relaxed(problem, old[block], update, damping)
            worst = torch.maximum(worst, change.amax((0, 2)))
            if update.shape[0] == old.shape[0]:
                new = part
            else:
                new = torch.empty_like(old, memory_format=torch.contiguous_format) if new is None else new
                new[block] = part
        result.append(old if new is None else new)
    return result, worst


def flood_worst(
    problem: Problem, messages: Messages, damping: Damping, fraction: float
) -> tuple[Messages, Float[Tensor, " batch"]]:
    """Renew, in each member, the ``fraction`` of all messages that would change most."""
    proposals, changes = [], []
    for old, found in zip(messages, updates(problem, messages), strict=True):
        parts = [relaxed(problem, old[block], update, damping) for block, update in found]
        proposals.append(torch.cat([part for part, _ in parts]) if parts else old)
        changes.append(torch.cat([change.amax(2) for _, change in parts]) if parts else old.new_zeros(old.shape[:2]))
    every = torch.cat([problem.no_change()[None, :][:0], *changes])
    if not every.shape[0]:
        return messages, problem.no_change()
    threshold = every.topk(max(1, math.ceil(fraction * every.shape[0])), dim=0, sorted=True).values[-1]
    chosen = [
        torch.where((change >= threshold).unsqueeze(-1), new, old)
        for change, new, old in zip(changes, proposals, messages, strict=True)
    ]
    return chosen, every.amax(0)


def updates(problem: Problem, messages: Messages) -> list[Updates]:
    """What every message would be now, per variable group, block by block."""
    cavities = [problem.cavities(group, part) for group, part in enumerate(messages)]
    sent: dict[tuple[int, int], Tensor] = {}
    for number, kernel in enumerate(problem.kernels):
        group = problem.graph.factor_groups[number]
        readers = group.variable_groups
        if kernel is None or problem.couplings[readers[0]] is not None:
            continue
        incoming = [
            cavities[reader].index_select(0, slots)
            for reader, slots in zip(readers, problem.wiring.slots[number], strict=True)
        ]
        for axis in range(len(readers)):
            others = [None if other == axis else part for other, part in enumerate(incoming)]
            message = problem.normalized(kernel.message(others, axis, None), group.table_shape[axis])
            sent[number, axis] = message if problem.weights is None else message * problem.weights[number]
    return [_blocks(problem, group, cavities[group], sent) for group in range(len(messages))]


def _blocks(problem: Problem, group: int, cavities: Tensor, sent: dict[tuple[int, int], Tensor]) -> Updates:
    layout, coupling = problem.wiring.layouts[group], problem.couplings[group]
    if layout.num_slots == 0:
        return
    if coupling is None:
        # assembled in edge order, with one message that says nothing for the padding slots
        pieces = [sent[edge] for edge in problem.wiring.edges[group]]
        yield slice(None), torch.cat([*pieces, torch.zeros_like(pieces[0][:1])]).index_select(0, layout.edge_of_slot)
        return
    reverse, kernel = problem.wiring.reverse[group], problem.kernels[problem.wiring.edges[group][0][0]]
    if reverse is None or not isinstance(kernel, CouplingKernel):
        raise TypeError("couplings by slot need pairwise factors that are couplings")
    for block in blocks(layout.num_slots, cavities.shape[1], cavities):
        strength = coupling[block] if coupling.shape[0] > 1 else coupling
        update = kernel.couple(cavities.index_select(0, reverse[block]), strength)
        yield block, update if problem.slot_weights is None else update * problem.slot_weights[group][block]


def relaxed(problem: Problem, old: Tensor, update: Tensor, damping: Damping) -> tuple[Tensor, Tensor]:
    """The damped update, and how far (nats) each entry of the undamped one is from the old."""
    step = update - old
    if problem.has_impossible_tables:
        # -inf stays -inf; a state that has just become impossible is the largest change there is
        step = step.masked_fill(update == old, 0.0)
        change = step.detach().abs().clamp(max=torch.finfo(step.dtype).max)
    else:
        change = step.detach().abs()
    if isinstance(damping, float) and damping == 0:
        return update, change
    keep = 1 - damping if isinstance(damping, float) else (1 - damping).reshape(1, -1, 1)
    new = torch.add(old, step, alpha=keep) if isinstance(keep, float) else old + step * keep
    if problem.has_impossible_tables:
        new = torch.where(torch.isinf(step), update, new)
    return new, change
