"""What a factor does with the messages it receives: the sums (or maxima) over its table, and their fast forms.

Everything here is laid out ``[factors, batch, ...]``, members of the batch side by side, and tables stay shared: a
leading 1 in either axis is never expanded. Messages are logarithms up to a constant. Those of a binary variable are one
number, the log-odds ``log m(1) - log m(0)``, unless the factor tables hold ``-inf`` (`unpack`, `pack`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bethenet.inference.bp.blocks import spare
from bethenet.numerics import log_sum_exp, safe_log

Mode = Literal["sum", "max"]

LOG2_E = math.log2(math.e)

BLOCK_ENTRIES = 2**22
"""Where a whole table per factor must be spread out, it is done for so many entries at a time."""


class Kernel(Protocol):
    """The factors of one group, ready to turn incoming messages into outgoing ones."""

    @property
    def log_table(self) -> Float[Tensor, "factors batch *table"]:
        """What the factors' beliefs are made of, together with the incoming messages."""
        ...

    def message(self, incoming: Sequence[Tensor | None], axis: int, rows: Tensor | None) -> Tensor:
        """The messages ``[members, batch, width]`` to the variables on ``axis``, not normalised.

        Args:
            incoming: for each other axis the messages from its variables, ``[members, batch, width]``.
            axis: where to.
            rows: the factors meant, ``None`` for all.
        """
        ...

    def select(self, members: Tensor) -> Kernel:
        """The kernel of some members of the batch."""
        ...


@dataclass(frozen=True, eq=False)
class CouplingKernel:
    """Binary pairwise factors reduced to their coupling J: table ``J s t`` with s, t = -1, 1, fields taken out.

    In log-odds the message from c is ``2 atanh(tanh(J) tanh(c / 2))``. With R = exp(2J) and E = exp(c) that is
    ``log (R E + 1) / (E + R)``, two transcendental functions a message, which holds while neither overflows: c is cut
    off where the message has long reached its limit of 2J. (Powers of 2 are faster than those of e, twice and more on
    some processors.) For larger couplings it is computed as the maximum's, c limited to [-2J, 2J], plus
    ``log(1 + exp(-|c + 2J|)) - log(1 + exp(-|c - 2J|))``. Log-odds may be infinite.
    """

    coupling: Float[Tensor, "factors batch 1"]
    """``2 J``."""
    strength: Float[Tensor, "factors batch 1"]
    """``exp(2 J)`` in the exponential domain, else ``2 J``."""
    exponential: bool
    mode: Mode

    @classmethod
    def build(cls, coupling: Tensor, mode: Mode) -> CouplingKernel:
        """Look at the numbers and choose the domain."""
        most = exponential_range(coupling.dtype) / 2
        exponential = mode == "sum" and bool((coupling.detach().abs() <= most).all())
        return cls(coupling, coupling.exp() if exponential else coupling, exponential, mode)

    @property
    def silent(self) -> float:
        """The strength of no coupling."""
        return 1.0 if self.exponential else 0.0

    @property
    def log_table(self) -> Float[Tensor, "factors batch 2 2"]:
        """The tables ``J s t``."""
        half = self.coupling.unsqueeze(-1) / 2
        return torch.cat([torch.cat([half, -half], -1), torch.cat([-half, half], -1)], -2)

    def message(self, incoming: Sequence[Tensor | None], axis: int, rows: Tensor | None) -> Tensor:
        """See `Kernel.message`."""
        cavity = incoming[1 - axis]
        assert cavity is not None
        return self.couple(cavity, _select(self.strength, rows))

    def couple(self, cavity: Tensor, strength: Tensor) -> Tensor:
        """The message through couplings of some strengths from log-odds ``cavity``."""
        if self.exponential:
            cut_off = exponential_range(cavity.dtype) * 0.8
            exponent = cavity.clamp(-cut_off, cut_off)
            odds = torch.exp2(torch.mul(exponent, LOG2_E, out=spare(exponent)), out=spare(exponent))
            above = torch.addcmul(odds.new_ones(()), strength, odds)
            ratio = torch.div(above, torch.add(odds, strength, out=spare(odds)), out=spare(above))
            return torch.log(ratio, out=spare(ratio))
        limited = _limited(cavity, strength)
        if self.mode == "max":
            return limited
        return limited + F.softplus(-(cavity + strength).abs()) - F.softplus(-(cavity - strength).abs())

    def select(self, members: Tensor) -> CouplingKernel:
        """See `Kernel.select`."""
        return replace(self, coupling=_members(self.coupling, members), strength=_members(self.strength, members))


@dataclass(frozen=True, eq=False)
class TableKernel:
    """Factors of any shape.

    Sums are matrix products in the exponential domain with the maximum taken out of table and messages. That is safe if
    no table spans more than `exponential_range`: the largest message entry then contributes an ordinary number to every
    sum, whatever underflows beside it. Wider tables, impossible entries among them, are summed in the log domain.
    """

    log_table: Float[Tensor, "factors batch *table"]
    table: Float[Tensor, "factors batch *table"] | None
    """``exp(log_table - its maximum)`` where that is safe."""
    widths: tuple[int, ...]
    """For each axis the width of a message: 1 for log-odds, else the number of states."""
    mode: Mode

    @classmethod
    def build(cls, log_table: Tensor, widths: tuple[int, ...], mode: Mode) -> TableKernel:
        """Look at the numbers and choose the domain."""
        table = None
        if mode == "sum" and log_table.numel():
            axes = list(range(2, log_table.dim()))
            top = log_table.detach().amax(axes, keepdim=True)
            span = (top - log_table.detach().amin(axes, keepdim=True)).max()
            if bool(span <= exponential_range(log_table.dtype)):
                table = (log_table - top).exp()
        return cls(log_table, table, widths, mode)

    def message(self, incoming: Sequence[Tensor | None], axis: int, rows: Tensor | None) -> Tensor:
        """See `Kernel.message`."""
        full = [
            unpack(part) if part is not None and width < states else part
            for part, width, states in zip(incoming, self.widths, self.log_table.shape[2:], strict=True)
        ]
        if self.table is not None:
            result = safe_log(_contract(_select(self.table, rows), full))
        else:
            result = self._in_log_domain(_select(self.log_table, rows), full, axis)
        return pack(result) if self.widths[axis] < self.log_table.shape[2 + axis] else result

    def select(self, members: Tensor) -> TableKernel:
        """See `Kernel.select`."""
        table = None if self.table is None else _members(self.table, members)
        return replace(self, log_table=_members(self.log_table, members), table=table)

    def _in_log_domain(self, table: Tensor, incoming: list[Tensor | None], axis: int) -> Tensor:
        some = next(part for part in incoming if part is not None)
        members, batch = some.shape[0], max(some.shape[1], table.shape[1])
        size = max(1, BLOCK_ENTRIES // max(1, batch * math.prod(table.shape[2:])))
        pieces = []
        for first in range(0, max(members, 1), size):
            block = slice(first, first + size)
            total = table[block] if table.shape[0] > 1 else table
            for other, part in enumerate(incoming):
                if part is not None:
                    total = total + spread(part[block], other, len(incoming))
            axes = [2 + other for other in range(len(incoming)) if other != axis]
            pieces.append(log_sum_exp(total, axes) if self.mode == "sum" else total.amax(axes))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _limited(cavity: Tensor, coupling: Tensor) -> Tensor:
    """The smaller of the two in size, with the product of their signs. Where they are of one size, which happens in
    models of round numbers, the gradient is the mean of both sides'.
    """
    inner, outer = cavity * coupling.sign(), coupling * cavity.sign()
    gap = cavity.abs() - coupling.abs()
    return torch.where(gap < 0, inner, torch.where(gap > 0, outer, (inner + outer) / 2))


def exponential_range(dtype: torch.dtype) -> float:
    """How far (nats) an entry may lie below the maximum for the exponential domain to be used."""
    return 60.0 if torch.finfo(dtype).bits <= 32 else 500.0


def rows_of(values: Float[Tensor, "rows batch width"], rows: Tensor) -> Float[Tensor, "members batch width"]:
    """``values[rows]``; one number a row is gathered as such, which is several times faster."""
    if values.shape[1] * values.shape[2] == 1:
        return values.reshape(-1).index_select(0, rows).reshape(-1, 1, 1)
    return values.index_select(0, rows)


def spread(message: Float[Tensor, "members batch states"], axis: int, arity: int) -> Tensor:
    """A message viewed along its axis of a table ``[members, batch, *table]``."""
    return message.reshape(*message.shape[:2], *(-1 if other == axis else 1 for other in range(arity)))


def unpack(log_odds: Float[Tensor, "*rest 1"]) -> Float[Tensor, "*rest 2"]:
    """The log-message of a binary variable from its log-odds, which may be infinite."""
    certain = log_odds == math.inf
    zero = torch.zeros_like(log_odds)
    return torch.cat([zero.masked_fill(certain, -math.inf), torch.where(certain, zero, log_odds)], -1)


def pack(message: Float[Tensor, "*rest 2"]) -> Float[Tensor, "*rest 1"]:
    """The log-odds of a binary variable's log-message."""
    return message[..., 1:] - message[..., :1]


def _select(table: Tensor, rows: Tensor | None) -> Tensor:
    return table if rows is None or table.shape[0] == 1 else table.index_select(0, rows)


def _members(table: Tensor, members: Tensor) -> Tensor:
    return table if table.shape[1] == 1 else table[:, members]


def _contract(table: Tensor, incoming: list[Tensor | None]) -> Tensor:
    """Sum out every axis that a message comes from. The first sum is a matrix product with the table as it is shared;
    what is left is no longer shared.
    """
    for other in reversed(range(len(incoming))):
        part = incoming[other]
        if part is None:
            continue
        top = part.detach().amax(-1, keepdim=True)
        weights = (part - torch.where(torch.isfinite(top), top, torch.zeros_like(top))).exp()
        matrix = table.movedim(2 + other, 2)
        table = _product(weights, matrix.flatten(3)).unflatten(-1, matrix.shape[3:])
    return table


def _product(weights: Float[Tensor, "members batch k"], matrix: Tensor) -> Float[Tensor, "members batch rest"]:
    """``weights @ matrix`` for a matrix [members | 1, batch | 1, k, rest], whichever way it is shared."""
    if matrix.shape[0] == 1 and matrix.shape[1] == 1:
        return weights @ matrix[0, 0]
    if matrix.shape[1] == 1:
        return weights @ matrix[:, 0]
    if matrix.shape[0] == 1:
        return (weights.transpose(0, 1) @ matrix[0]).transpose(0, 1)
    return (weights.unsqueeze(-2) @ matrix).squeeze(-2)
