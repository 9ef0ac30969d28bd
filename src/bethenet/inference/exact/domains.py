"""The arithmetic of messages: `Scaled` (fast), `Logarithmic` (never underflows) and `Maximum` (for the best state).

`Scaled` keeps tables in the exponential domain with the maximum taken out, where a bucket is an ``einsum``. Entries far
below the maximum may underflow there. It therefore reports whether any entry of a result is so small, compared with
what may have been lost, that it cannot be trusted; the whole computation is then done again in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bethenet.inference.exact.contraction import Contraction
from bethenet.inference.exact.logarithmic import LogSum, log_maximum, log_pull_back
from bethenet.numerics import safe_log


class Message(NamedTuple):
    """A table ``[batch | 1, rows | 1, *table]`` in some domain."""

    value: Tensor
    log_scale: Tensor | None
    """What was taken out of each row, ``[batch | 1, rows | 1]``; a constant, as log Z does not depend on it."""
    lowest: Tensor | None
    """The smallest positive entry of all rows, where the domain cares."""


class Domain:
    """How log-tables are represented, contracted and differentiated."""

    def enter(self, log_table: Tensor) -> Message:
        """A log-table as a message."""
        raise NotImplementedError

    def contract(self, kind: Contraction, operands: Sequence[Message]) -> tuple[Message, Tensor | None]:
        """One round. Also says whether the result is in doubt (a boolean scalar) where that can happen."""
        raise NotImplementedError

    def unscale(self, result: Message, gradient: Tensor) -> Tensor:
        """The derivative of log Z by a round's result before its scale was taken out, from that after."""
        return gradient

    def pull_back(
        self, kind: Contraction, operands: Sequence[Message], result: Message, gradient: Tensor
    ) -> list[Tensor | None]:
        """The derivative of log Z by each operand's value from that by the result's, for every row and batch member."""
        raise NotImplementedError

    def logarithm(self, value: Tensor) -> Tensor:
        """The log-table."""
        raise NotImplementedError

    def seed(self, value: Tensor) -> Tensor:
        """The derivative of `logarithm`."""
        raise NotImplementedError

    def log_marginal(self, value: Tensor, gradient: Tensor) -> Tensor:
        """The log of the derivative of log Z by the log-table."""
        raise NotImplementedError


class Scaled(Domain):
    """Exponentials, each table divided by its largest entry."""

    def enter(self, log_table: Tensor) -> Message:
        """See `Domain.enter`."""
        constant = log_table.detach()
        axes = list(range(2, log_table.dim()))
        top = constant.amax(axes, keepdim=True)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        value = (log_table - top).exp_()
        depth = torch.where(constant == -math.inf, math.inf, constant).amin(axes, keepdim=True) - top
        return Message(value, top.flatten(2).squeeze(2), depth.amin().exp())

    def contract(self, kind: Contraction, operands: Sequence[Message]) -> tuple[Message, Tensor | None]:
        """See `Domain.contract`."""
        value, scale, lowest, doubt = _ScaledSum.apply(
            kind, [operand.lowest for operand in operands], *(operand.value for operand in operands)
        )
        return Message(value, scale, lowest), doubt

    def unscale(self, result: Message, gradient: Tensor) -> Tensor:
        """See `Domain.unscale`."""
        assert result.log_scale is not None
        return _through_scale(result.value, result.log_scale, gradient)

    def pull_back(
        self, kind: Contraction, operands: Sequence[Message], result: Message, gradient: Tensor
    ) -> list[Tensor | None]:
        """See `Domain.pull_back`."""
        return kind.pull_back([operand.value for operand in operands], gradient, [True] * len(operands), full=True)

    def logarithm(self, value: Tensor) -> Tensor:
        """See `Domain.logarithm`."""
        return safe_log(value)

    def seed(self, value: Tensor) -> Tensor:
        """See `Domain.seed`."""
        return torch.where(value > 0, value, torch.ones_like(value)).reciprocal()

    def log_marginal(self, value: Tensor, gradient: Tensor) -> Tensor:
        """See `Domain.log_marginal`."""
        if torch.is_grad_enabled():
            return safe_log(value * gradient.masked_fill(value == 0, 0.0))
        return (value * gradient).masked_fill_(value == 0, 0.0).log_()


class Logarithmic(Domain):
    """Logarithms throughout. Slower: each round goes through the eliminated variable's states one by one."""

    def enter(self, log_table: Tensor) -> Message:
        """See `Domain.enter`."""
        return Message(log_table, None, None)

    def contract(self, kind: Contraction, operands: Sequence[Message]) -> tuple[Message, Tensor | None]:
        """See `Domain.contract`."""
        return Message(LogSum.apply(kind, *(operand.value for operand in operands)), None, None), None

    def pull_back(
        self, kind: Contraction, operands: Sequence[Message], result: Message, gradient: Tensor
    ) -> list[Tensor | None]:
        """See `Domain.pull_back`."""
        tables = [operand.value for operand in operands]
        return log_pull_back(kind, tables, result.value, gradient, [True] * len(tables), full=True)

    def logarithm(self, value: Tensor) -> Tensor:
        """See `Domain.logarithm`."""
        return value

    def seed(self, value: Tensor) -> Tensor:
        """See `Domain.seed`."""
        return torch.ones_like(value)

    def log_marginal(self, value: Tensor, gradient: Tensor) -> Tensor:
        """See `Domain.log_marginal`."""
        return safe_log(gradient.masked_fill(value == -math.inf, 0.0))


class Maximum(Logarithmic):
    """Logarithms, and the largest term in place of the sum. Not differentiable."""

    def contract(self, kind: Contraction, operands: Sequence[Message]) -> tuple[Message, Tensor | None]:
        """See `Domain.contract`."""
        return Message(log_maximum(kind, [operand.value for operand in operands]), None, None), None


class _ScaledSum(torch.autograd.Function):
    """A `Contraction` with its largest entry taken out. Keeps its operands and result for the way back, no more."""

    @staticmethod
    def forward(ctx: Any, kind: Contraction, lows: list[Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
        value = kind.forward(operands)
        axes = list(range(2, value.dim()))
        low = torch.where(value > 0, value, math.inf).amin(axes) if axes else value.clone()
        if axes:
            top = value.amax(axes)
            top = torch.where(top > 0, top, torch.ones_like(top))
            value.div_(top.reshape(*top.shape, *([1] * len(axes))))
            scale = top.log()
        else:
            scale = torch.zeros_like(value)
            top = torch.ones_like(value)
        # A product that underflows loses at most `tiny`, so a sum loses that once a term, and an entry `1 / eps` times
        # larger is exact to rounding. A zero is right only if no product of what is not zero can have underflowed.
        info = torch.finfo(value.dtype)
        floor = info.tiny / info.eps * kind.local_sizes[0] * len(operands)
        possible = torch.stack(lows).prod()
        doubt = (low < floor).any() | ((value == 0).any() & (possible < info.tiny))
        ctx.kind = kind
        ctx.save_for_backward(value, scale, *operands)
        lowest = (low / top).amin().clamp(max=1.0)
        ctx.mark_non_differentiable(scale, lowest, doubt)
        return value, scale, lowest, doubt

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        value, scale, *operands = ctx.saved_tensors
        gradient = _through_scale(value, scale, gradients[0])
        return None, None, *ctx.kind.pull_back(operands, gradient, ctx.needs_input_grad[2:], full=False)


def _through_scale(value: Tensor, log_scale: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of the unscaled result from that of the scaled one.

    An entry that is zero has a zero derivative by every log-potential, whatever its gradient: that may have overflowed.
    """
    factor = (-log_scale).exp()
    factor = factor.reshape(*factor.shape, *([1] * (value.dim() - 2)))
    return (gradient * factor).masked_fill_(value == 0, 0.0)
