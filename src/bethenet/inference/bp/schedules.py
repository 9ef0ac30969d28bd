"""Which messages are renewed when. Here: all at once (flooding), or those that would change most (residual)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.inference.bp.blocks import blocks, spare
from bethenet.inference.bp.kernels import CouplingKernel, rows_of
from bethenet.inference.bp.problem import Messages, Problem

Damping = Float[Tensor, " batch"] | float
Proposal = Callable[[slice], Tensor]
"""What the messages of some slots would be now."""


def flood(problem: Problem, messages: Messages, damping: Damping) -> tuple[Messages, Float[Tensor, " batch"]]:
    """Renew every message from the old ones. Returns the new ones and the largest change, before damping."""
    worst = problem.no_change()
    result = []
    for old, proposal in zip(messages, proposals(problem, messages), strict=True):
        new, change = _renewed(problem, old, proposal, damping)
        result.append(new)
        worst = torch.maximum(worst, change)
    return result, worst


def flood_worst(
    problem: Problem, messages: Messages, damping: Damping, fraction: float
) -> tuple[Messages, Float[Tensor, " batch"]]:
    """Renew, in each member, the ``fraction`` of all messages that would change most."""
    found = [
        relaxed(problem, old, proposal(slice(None)), damping) if old.shape[0] else (old, old)
        for old, proposal in zip(messages, proposals(problem, messages), strict=True)
    ]
    changes = [change.amax(2) for _, change in found]
    every = torch.cat([problem.no_change().unsqueeze(0), *changes])
    threshold = every.topk(max(1, math.ceil(fraction * (every.shape[0] - 1))), dim=0).values[-1]
    chosen = [
        torch.where((change >= threshold).unsqueeze(-1), new, old)
        for change, (new, _), old in zip(changes, found, messages, strict=True)
    ]
    return chosen, every.amax(0)


def proposals(problem: Problem, messages: Messages) -> list[Proposal]:
    """What every message would be now, per variable group."""
    cavities = [problem.cavities(group, part) for group, part in enumerate(messages)]
    sent: dict[tuple[int, int], Tensor] = {}
    for number, kernel in enumerate(problem.kernels):
        group = problem.graph.factor_groups[number]
        readers = group.variable_groups
        if kernel is None or problem.strengths[readers[0]] is not None:
            continue
        incoming = [
            rows_of(cavities[reader], slots)
            for reader, slots in zip(readers, problem.wiring.slots[number], strict=True)
        ]
        for axis in range(len(readers)):
            others = [None if other == axis else part for other, part in enumerate(incoming)]
            message = problem.normalized(kernel.message(others, axis, None), group.table_shape[axis])
            sent[number, axis] = message if problem.weights is None else message * problem.weights[number]
    return [
        _assembled(problem, number, sent) if problem.strengths[number] is None else _coupled(problem, number, part)
        for number, part in enumerate(cavities)
    ]


def _assembled(problem: Problem, group: int, sent: dict[tuple[int, int], Tensor]) -> Proposal:
    """Messages that were computed factor by factor, taken to their slots."""
    # one message more, which says nothing, for the padding slots
    pieces = [sent[edge] for edge in problem.wiring.edges[group]]
    in_edge_order = torch.cat([*pieces, torch.zeros_like(pieces[0][:1])]) if pieces else None

    def proposal(block: slice) -> Tensor:
        if in_edge_order is None:
            raise ValueError("a variable group without messages has none to renew")
        return rows_of(in_edge_order, problem.wiring.layouts[group].edge_of_slot[block])

    return proposal


def _coupled(problem: Problem, group: int, cavities: Tensor) -> Proposal:
    """Messages through couplings: each from the cavity of the opposite slot, with no detour by the factors."""
    strengths, reverse = problem.strengths[group], problem.wiring.reverse[group]
    kernel = problem.kernels[problem.wiring.edges[group][0][0]]
    if strengths is None or reverse is None or not isinstance(kernel, CouplingKernel):
        raise TypeError("couplings by slot need pairwise factors that are couplings")
    weights = None if problem.slot_weights is None else problem.slot_weights[group]

    def proposal(block: slice) -> Tensor:
        strength = strengths[block] if strengths.shape[0] > 1 else strengths
        message = kernel.couple(rows_of(cavities, reverse[block]), strength)
        return message if weights is None else message * weights[block]

    return proposal


def _renewed(problem: Problem, old: Tensor, proposal: Proposal, damping: Damping) -> tuple[Tensor, Tensor]:
    """All messages of a variable group, block by block; and each member's largest change."""
    parts = blocks(old.shape[0], old[:1].numel(), old)
    if not parts:
        return old, problem.no_change()
    # where gradients are recorded there is one block, and it is the result
    result = spare(torch.empty_like(old, memory_format=torch.contiguous_format))

    def renew(block: slice) -> tuple[Tensor, Tensor]:
        place = None if result is None else result[block]
        new, change = relaxed(problem, old[block], proposal(block), damping, place)
        return new, change.amax((0, 2))

    done = problem.workers.each(renew, parts)
    return done[0][0] if result is None else result, torch.stack([change for _, change in done]).amax(0)


def relaxed(
    problem: Problem, old: Tensor, update: Tensor, damping: Damping, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The damped update (written to ``out``, where given), and how far (nats) each entry of the undamped one is from
    the old.
    """
    step = update - old
    if problem.has_impossible_tables:
        step = step.masked_fill(update == old, 0.0)  # -inf stays -inf
    if not isinstance(damping, float):
        new = torch.addcmul(old, step, (1 - damping).reshape(1, -1, 1), out=out)
    elif damping:
        new = torch.add(old, step, alpha=1 - damping, out=out)
    else:
        new = update if out is None else out.copy_(update)
    change = torch.abs(step.detach(), out=spare(step))
    if problem.has_impossible_tables:
        new = torch.where(torch.isinf(change), update, new, out=out)
        # a state that has just become impossible is the largest change there is
        change = change.clamp(max=torch.finfo(change.dtype).max)
    return new, change
