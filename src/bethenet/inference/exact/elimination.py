"""The passes over a plan: forward to log Z, backward to marginals, backward to samples or the best state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bethenet.inference.exact.contraction import BATCH, ROW, Contraction, contraction
from bethenet.inference.exact.domains import Domain, Message
from bethenet.inference.exact.plan import Plan, Round, Source

Choose = Callable[[Float[Tensor, "samples batch rows states"]], Int[Tensor, "samples batch rows"]]
"""Picks a state from unnormalised log-probabilities."""


@dataclass
class Trace:
    """What a forward pass found, and the messages it went through if they were to be kept."""

    domain: Domain
    batch: int
    log_z: Float[Tensor, " batch | 1"]
    doubt: Bool[Tensor, ""] | None
    """Whether the domain lost something on the way."""
    kinds: list[Contraction] = field(default_factory=list)
    operands: list[list[Message]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def kind_of(step: Round, shared: Sequence[tuple[bool, bool]], batch: int) -> Contraction:
    """A round's contraction, given which operands lack a batch and which a row axis."""
    axes = tuple(
        (*(() if no_batch else (BATCH,)), *(() if no_rows else (ROW,)), *source.axes)
        for source, (no_batch, no_rows) in zip(step.sources, shared, strict=True)
    )
    return contraction(axes, step.sizes, batch, step.rows)


def forward(plan: Plan, domain: Domain, leaves: list[Tensor], batch: int, *, keep: bool) -> Trace:
    """Eliminate everything.

    Args:
        plan: the rounds.
        domain: the arithmetic.
        leaves: log-tables ``[batch | 1, rows | 1, *table]``. The list is emptied, as none is needed for longer.
        batch: how many models.
        keep: keep the messages in the trace, for a backward pass.
    """
    some = leaves[0]
    trace = Trace(domain, batch, torch.zeros(1, dtype=some.dtype, device=some.device), None)
    waiting: dict[tuple[int, int], Message] = {}
    doubts: list[Tensor] = []
    for stack in range(plan.leaves):
        table = leaves.pop(0)
        rows = plan.permutations[stack]
        message = domain.enter(table if rows is None or table.shape[1] == 1 else table[:, rows])
        repeats = sum(_length(plan, use) for use in plan.uses[stack])
        trace.log_z = trace.log_z + _over_rows(message.log_scale, repeats)
        _hand_out(plan, plan.uses[stack], message, waiting)
    del message, table
    for number, step in enumerate(plan.rounds):
        operands = [waiting.pop((number, operand)) for operand in range(len(step.sources))]
        shared = [(message.value.shape[0] == 1, message.value.shape[1] == 1) for message in operands]
        kind = kind_of(step, shared, batch)
        result, doubt = domain.contract(kind, operands)
        if doubt is not None:
            doubts.append(doubt)
        trace.log_z = trace.log_z + _over_rows(result.log_scale, step.rows)
        if len(step.sizes) == 1:
            trace.log_z = trace.log_z + _over_rows(domain.logarithm(result.value), step.rows)
        else:
            _hand_out(plan, plan.uses[plan.leaves + number], result, waiting)
        if keep:
            trace.kinds.append(kind)
            trace.operands.append(operands)
            trace.results.append(result)
    trace.doubt = torch.stack(doubts).any() if doubts else None
    return trace


def marginals(plan: Plan, trace: Trace, *, differentiable: bool) -> list[Float[Tensor, "batch rows *table"]]:
    """Log-marginals of every row of every leaf, by the derivative of log Z. Uses the trace up."""
    domain = trace.domain
    gradients: dict[tuple[int, int], Tensor] = {}
    chunks: list[list[tuple[int, Tensor]]] = [[] for _ in range(plan.leaves)]
    outputs: dict[int, Tensor] = {}
    lengths = _lengths(plan)
    for number in range(len(plan.rounds) - 1, -1, -1):
        step, kind = plan.rounds[number], trace.kinds.pop()
        operands, result = trace.operands.pop(), trace.results.pop()
        if len(step.sizes) == 1:
            gradient = domain.seed(result.value).expand(trace.batch, step.rows)
        else:
            pieces = [gradients.pop(use) for use in plan.uses[plan.leaves + number]]
            gradient = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            del pieces
        gradient = domain.unscale(result, gradient)
        values = domain.pull_back(kind, operands, result, gradient)
        for operand, source in enumerate(step.sources):
            value = values[operand]
            assert value is not None
            if source.stack >= plan.leaves:
                gradients[number, operand] = value
                continue
            table = domain.log_marginal(operands[operand].value, value)
            if differentiable:
                chunks[source.stack].append((source.start, table))
                continue
            values[operand] = None
            shape = (trace.batch, lengths[source.stack], *table.shape[2:])
            rows = plan.permutations[source.stack]
            if source.stack not in outputs:
                outputs[source.stack] = table.new_empty(shape)
            _put(outputs[source.stack], rows, source, table)
            del table
        del gradient, operands, result, value, values
    if not differentiable:
        return [outputs[stack] for stack in range(plan.leaves)]
    return [_assemble(parts, rows) for parts, rows in zip(chunks, plan.permutations, strict=True)]


def choose_states(
    plan: Plan, trace: Trace, states: Int[Tensor, "samples batch variables"], choose: Choose
) -> Int[Tensor, "samples batch variables"]:
    """Go back through the rounds, choosing each variable's state given those chosen before; fills ``states``."""
    for number in range(len(plan.rounds) - 1, -1, -1):
        step = plan.rounds[number]
        if not step.variables.numel():
            continue
        known = states[:, :, step.scope]
        total: Tensor | None = None
        for source, message in zip(step.sources, trace.operands[number], strict=True):
            part = trace.domain.logarithm(_at(message.value, source.axes, step.sizes, known))
            total = part if total is None else total + part
        assert total is not None
        shape = (*states.shape[:2], step.rows, step.sizes[0])
        states[:, :, step.variables] = choose(total.expand(shape))
    return states


def _at(
    value: Tensor, axes: tuple[int, ...], sizes: tuple[int, ...], known: Int[Tensor, "samples batch rows variables"]
) -> Float[Tensor, "samples batch rows states"]:
    """A table at known states of all its variables but the eliminated one."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    value = value.permute(0, 1, *(2 + axis for axis in order))
    value = value.reshape(*value.shape[:2], sizes[0], -1)
    cells = torch.zeros(known.shape[:3], dtype=torch.long, device=known.device)
    for axis in sorted(axes)[1:]:
        cells = cells * sizes[axis] + known[..., axis - 1]
    batch = torch.arange(value.shape[0], device=value.device).reshape(1, -1, 1)
    rows = torch.arange(value.shape[1], device=value.device).reshape(1, 1, -1)
    return value[batch, rows, :, cells]


def _hand_out(
    plan: Plan, uses: Sequence[tuple[int, int]], message: Message, waiting: dict[tuple[int, int], Message]
) -> None:
    """Give each user its slice of a stack."""
    if len(uses) == 1 or message.value.shape[1] == 1:
        waiting.update(dict.fromkeys(uses, message))
        return
    pieces = message.value.split([_length(plan, use) for use in uses], dim=1)
    for use, piece in zip(uses, pieces, strict=True):
        waiting[use] = Message(piece, None, message.lowest)


def _put(whole: Tensor, rows: Tensor | None, source: Source, table: Tensor) -> None:
    """Write some rows of a leaf's marginals where they belong."""
    if rows is None:
        whole[:, source.start : source.stop] = table
    else:
        whole.index_copy_(1, rows[source.start : source.stop], table)


def _length(plan: Plan, use: tuple[int, int]) -> int:
    source = plan.rounds[use[0]].sources[use[1]]
    return source.stop - source.start


def _lengths(plan: Plan) -> list[int]:
    return [sum(_length(plan, use) for use in uses) for uses in plan.uses[: plan.leaves]]


def _over_rows(value: Tensor | None, rows: int) -> Tensor | float:
    """Sum over rows, counting a shared row as often as it stands."""
    if value is None:
        return 0.0
    return value.sum(1) if value.shape[1] == rows else value.sum(1) * rows


def _assemble(parts: list[tuple[int, Tensor]], rows: Tensor | None) -> Tensor:
    tables = [table for _, table in sorted(parts, key=lambda part: part[0])]
    whole = tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)
    return whole if rows is None else whole[:, torch.argsort(rows)]
