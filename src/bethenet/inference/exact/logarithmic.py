"""A round in the log domain: the eliminated variable's states one after the other, so that nothing larger than the
result is ever held, and nothing underflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bethenet.inference.exact.contraction import BATCH, ROW, Contraction


def log_maximum(kind: Contraction, operands: Sequence[Tensor]) -> Tensor:
    """The largest sum of the operands over the eliminated variable, ``[batch | 1, rows | 1, *table]``."""
    result: Tensor | None = None
    for term in _terms(kind, operands):
        result = term if result is None else torch.maximum(result, term)
    assert result is not None
    return result.reshape(kind.output_shape)


def log_pull_back(
    kind: Contraction,
    operands: Sequence[Tensor],
    result: Tensor,
    gradient: Tensor,
    wanted: Sequence[bool],
    *,
    full: bool,
) -> list[Tensor | None]:
    """The gradients of log-operands from that of the log-sum; see `Contraction.pull_back`."""
    lead = kind.full if full else ()
    top = [axis for axis in _frame(kind) if axis != 0]
    bottom = {axis for axis in top if axis in kind.output or axis in lead}
    shape = [kind.sizes[axis] if axis in bottom else 1 for axis in top]
    gradient = gradient.reshape(shape)
    result = result.reshape([kind.sizes[axis] if axis in kind.output else 1 for axis in top])
    result = torch.where(result == -math.inf, torch.zeros_like(result), result)
    parts: list[list[Tensor]] = [[] for _ in operands]
    for term in _terms(kind, operands):
        weight = (term - result).exp() * gradient
        for number, axes in enumerate(kind.axes):
            if wanted[number]:
                keep = {*lead, *axes}
                over = [place for place, axis in enumerate(top) if axis not in keep]
                parts[number].append(weight.sum(over, keepdim=True) if over else weight)
    gradients: list[Tensor | None] = []
    for number, axes in enumerate(kind.axes):
        if not wanted[number]:
            gradients.append(None)
            continue
        if 0 in axes:
            value = torch.stack(parts[number], dim=_frame(kind).index(0))
        else:
            value = torch.stack(parts[number]).sum(0)
        gradients.append(kind.leave(number, value, full=full))
    return gradients


class LogSum(torch.autograd.Function):
    """``log sum exp`` over the eliminated variable of the sum of the operands. Keeps its operands and result only."""

    @staticmethod
    def forward(ctx: Any, kind: Contraction, *operands: Tensor) -> Tensor:
        """The result."""
        result: Tensor | None = None
        for term in _terms(kind, operands):
            result = term if result is None else torch.logaddexp(result, term)
        assert result is not None
        result = result.reshape(kind.output_shape)
        ctx.kind = kind
        ctx.save_for_backward(result, *operands)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The operands' gradients."""
        result, *operands = ctx.saved_tensors
        return None, *log_pull_back(ctx.kind, operands, result, gradients[0], ctx.needs_input_grad[1:], full=False)


def _frame(kind: Contraction) -> list[int]:
    """All axes, in the order in which every tensor is laid out here."""
    return [BATCH, ROW, *(group[0] for group in kind.merged)]


def _terms(kind: Contraction, operands: Sequence[Tensor]) -> Iterator[Tensor]:
    """The sum of the operands at each state of the eliminated variable."""
    frame = _frame(kind)
    framed = []
    for number, operand in enumerate(operands):
        value = kind.enter(number, operand)
        framed.append(value.reshape([kind.sizes[axis] if axis in kind.axes[number] else 1 for axis in frame]))
    if 0 not in frame:
        yield _total(framed)
        return
    axis = frame.index(0)
    for state in range(kind.sizes[0]):
        yield _total([value.select(axis, state if value.shape[axis] > 1 else 0) for value in framed])


def _total(values: list[Tensor]) -> Tensor:
    # small tables first, so that broadcasting starts late
    ordered = sorted(values, key=Tensor.numel)
    result = ordered[0]
    for value in ordered[1:]:
        result = result + value
    return result
