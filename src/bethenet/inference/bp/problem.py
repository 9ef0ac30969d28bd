"""`Problem`: a model made ready for message passing, and what can be read off a set of messages.

Messages here are lists with one tensor ``[slots, batch, width]`` per variable group (`wiring.NodeLayout`); node sums
and fields are ``[nodes, batch, width]``, nodes in the layout's order.

With weights rho (tree reweighting; all 1 in belief propagation) a slot holds ``rho log m``. The belief of a variable is
then its field times its messages, and a factor's belief is ``Psi^(1/rho)`` times, for each of its variables, the
variable's belief divided by ``m``: the *cavity*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError
from bethenet.graph import FactorGraph
from bethenet.inference.bp.blocks import Workers, blocks, spare
from bethenet.inference.bp.kernels import Kernel, Mode, pack, rows_of, spread, unpack
from bethenet.inference.bp.wiring import Bucket, Wiring
from bethenet.numerics import log_normalize
from bethenet.regions import RegionGraph

Messages = list[Tensor]
Weights = Sequence[Float[Tensor, " factors"]]


@dataclass(frozen=True, eq=False)
class Sums:
    """The product (in logarithms) of a variable's field and messages, impossible states counted apart: taking one
    message out again is exact.
    """

    finite: Float[Tensor, "nodes batch width"]
    zeros: Float[Tensor, "nodes batch width"] | None
    """How many of the terms are ``-inf``; ``None`` where messages never are."""

    @property
    def total(self) -> Tensor:
        """The sum."""
        return self.finite if self.zeros is None else self.finite.masked_fill(self.zeros > 0, -math.inf)


@dataclass(frozen=True, eq=False)
class Problem:
    """The numbers of a model as message passing wants them."""

    graph: FactorGraph
    wiring: Wiring
    kernels: tuple[Kernel | None, ...]
    """For each factor group of arity 2 or more."""
    fields: tuple[Float[Tensor, "nodes batch width"], ...]
    """For each variable group everything that concerns one variable alone."""
    weights: tuple[Float[Tensor, "factors 1 1"], ...] | None
    slot_weights: tuple[Float[Tensor, "slots 1 1"], ...] | None
    strengths: tuple[Float[Tensor, "slots batch 1"] | None, ...]
    """By slot, for a variable group all of whose messages go through one `CouplingKernel` between its own variables."""
    batch_size: int
    mode: Mode
    has_impossible_tables: bool
    """Whether messages can hold ``-inf``."""
    has_impossible_states: bool
    """Whether fields can."""
    constant: Float[Tensor, " batch"]
    """What kernels and fields leave out of the model's log-potentials."""
    rounding: Float[Tensor, ""]
    """The change of a message that rounding alone can cause."""
    workers: Workers = field(default_factory=Workers, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of all numbers."""
        return self.rounding.dtype

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.rounding.device

    def __getitem__(self, members: Tensor) -> Problem:
        """The problem of some members of the batch."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape[1] == 1 else tensor[:, members]

        return replace(
            self,
            kernels=tuple(None if kernel is None else kernel.select(members) for kernel in self.kernels),
            fields=tuple(cut(part) for part in self.fields),
            strengths=tuple(None if part is None else cut(part) for part in self.strengths),
            constant=self.constant[members],
            batch_size=members.numel(),
        )

    # --- messages ---------------------------------------------------------------------------------------------------

    def uniform(self) -> Messages:
        """Messages that say nothing."""
        return [
            torch.zeros(
                layout.num_slots, self.batch_size, message_width(layout.states), dtype=self.dtype, device=self.device
            )
            for layout in self.wiring.layouts
        ]

    def no_change(self) -> Float[Tensor, " batch"]:
        """A change of zero for each member."""
        return torch.zeros(self.batch_size, dtype=self.dtype, device=self.device)

    def open(self, messages: Sequence[Tensor]) -> Messages:
        """Messages as a state keeps them, as this problem computes with them."""
        if not self.has_impossible_tables:
            return list(messages)
        return [_unpack_hard(m) if y.states == 2 else m for m, y in zip(messages, self.wiring.layouts, strict=True)]

    def close(self, messages: Messages) -> Messages:
        """The inverse of `open`."""
        if not self.has_impossible_tables:
            return messages
        return [pack(m) if y.states == 2 else m for m, y in zip(messages, self.wiring.layouts, strict=True)]

    def normalized(self, messages: Tensor, states: int) -> Tensor:
        """Messages with their scale fixed: summing to one, or (for binary variables) ``0`` at the first state."""
        if states != 2:
            return log_normalize(messages, -1)
        return _unpack_hard(pack(messages)) if self.has_impossible_tables else messages

    def sums(self, messages: Messages) -> list[Sums]:
        """Per variable group, the field and all messages of each variable."""
        result = []
        for group, part in enumerate(messages):
            pieces = [self._sum(group, part, bucket) for bucket in self.wiring.layouts[group].buckets]
            finite = torch.cat([part[:0], *(piece.finite for piece in pieces)])
            zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
            result.append(Sums(finite, torch.cat([part[:0], *zeros]) if self.has_impossible_tables else None))
        return result

    def _sum(self, group: int, messages: Tensor, bucket: Bucket, block: slice = slice(None)) -> Sums:
        """The sums of the variables of one degree, or of a block of them."""
        planes = planes_of(messages, bucket)[:, block]
        own = self.fields[group]
        own = own[bucket.nodes][block] if own.shape[0] > 1 else own
        if not self.has_impossible_tables:
            total = planes.sum(0)
            return Sums(torch.add(total, own, out=spare(total)), None)
        (finite, zeros), (own_finite, own_zeros) = split(planes), split(own)
        return Sums(finite.sum(0) + own_finite, zeros.sum(0) + own_zeros)

    def cavity(self, sums: Sums, messages: Tensor, weights: Tensor | None, out: Tensor | None = None) -> Tensor:
        """What a variable says to a factor: everything it knows but what the factor told it.

        Args:
            sums: those of the variables, in the order of the messages.
            messages: those from the factors.
            weights: the factors' weights.
            out: where it is to be written, if anywhere.
        """
        if sums.zeros is None:
            return torch.sub(sums.finite, messages if weights is None else messages / weights, out=out)
        finite, zeros = split(messages)
        finite = sums.finite - (finite if weights is None else finite / weights)
        cavity = finite.masked_fill(sums.zeros - zeros > 0, -math.inf)
        return cavity if out is None else out.copy_(cavity)

    def cavities(self, group: int, messages: Tensor) -> Tensor:
        """The cavities of all slots of a variable group."""
        buckets = self.wiring.layouts[group].buckets
        if torch.is_grad_enabled():
            pieces = [self._cavities(group, messages, bucket, slice(None)).flatten(0, 1) for bucket in buckets]
            return torch.cat([messages[:0], *pieces])
        result = torch.empty_like(messages, memory_format=torch.contiguous_format)
        for bucket in buckets:
            planes = planes_of(result, bucket)

            def fill(block: slice, planes: Tensor = planes, bucket: Bucket = bucket) -> None:
                self._cavities(group, messages, bucket, block, planes[:, block])

            self.workers.each(fill, blocks(planes.shape[1], planes[:, :1].numel(), planes))
        return result

    def _cavities(
        self, group: int, messages: Tensor, bucket: Bucket, block: slice, out: Tensor | None = None
    ) -> Tensor:
        """Those of the variables of one degree, or of a block of them, in planes."""
        weights = None if self.slot_weights is None else planes_of(self.slot_weights[group], bucket)[:, block]
        sums = self._sum(group, messages, bucket, block)
        return self.cavity(sums, planes_of(messages, bucket)[:, block], weights, out)

    # --- beliefs ----------------------------------------------------------------------------------------------------

    def logits(self, messages: Messages) -> tuple[list[Tensor], list[Tensor]]:
        """Unnormalised log-beliefs of all factors ``[batch, factors, *table]`` and all variables, per group of each.

        Factors of one variable have that variable's belief; those of none have the number 0.
        """
        sums = self.sums(messages)
        nodes = []
        for part, layout in zip(sums, self.wiring.layouts, strict=True):
            total = unpack(part.total) if part.total.shape[-1] < layout.states else part.total
            nodes.append(rows_of(total, layout.positions).transpose(0, 1))
        cavities = [self.cavities(group, part) for group, part in enumerate(messages)]
        factors = []
        for number, group in enumerate(self.graph.factor_groups):
            kernel = self.kernels[number]
            if kernel is None:
                one = torch.zeros(self.batch_size, len(group), dtype=self.dtype, device=self.device)
                factors.append(
                    nodes[group.variable_groups[0]].index_select(1, group.rows[:, 0]) if group.arity else one
                )
                continue
            logits = kernel.log_table
            for axis, slots in enumerate(self.wiring.slots[number]):
                incoming = rows_of(cavities[group.variable_groups[axis]], slots)
                full = unpack(incoming) if incoming.shape[-1] < group.table_shape[axis] else incoming
                logits = logits + spread(full, axis, group.arity)
            factors.append(logits.transpose(0, 1))
        return factors, nodes

    def beliefs(self, messages: Messages, regions: RegionGraph) -> Beliefs:
        """The beliefs of all factors and variables, normalised.

        Raises:
            ImpossibleEvidenceError: every state of some variable or factor is impossible.
        """
        factors, nodes = self.logits(messages)
        tables = [log_normalize(part, range(2, part.dim())) for part in (*factors, *nodes)]
        if self.has_impossible_tables or self.has_impossible_states:
            for table in tables:
                refuse_impossible((table == -math.inf).flatten(2).all(-1).any(-1) if table.dim() > 2 else None)
        return Beliefs(regions, tables)


def message_width(states: int) -> int:
    """How many numbers a state keeps for a message to a variable of so many states."""
    return 1 if states == 2 else states


def _unpack_hard(log_odds: Tensor) -> Tensor:
    """`unpack`, where the log-odds of a contradiction (both states impossible) are NaN."""
    return torch.where(torch.isnan(log_odds), -math.inf, unpack(log_odds))


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """``values`` with 0 for ``-inf``, and 1 where they are ``-inf``."""
    impossible = values == -math.inf
    return values.masked_fill(impossible, 0.0), impossible.to(values.dtype)


def refuse_impossible(members: Tensor | None) -> None:
    """Raise if any member of the batch is marked."""
    if members is not None and bool(members.any()):
        which = torch.nonzero(members).flatten().tolist()
        raise ImpossibleEvidenceError(f"the evidence has probability zero in members {which[:8]} of the batch")


def planes_of(slots: Tensor, bucket: Bucket) -> Float[Tensor, "degree nodes batch width"]:
    """The slots of the variables of one degree, variables side by side."""
    return slots[bucket.slots].view(bucket.degree, bucket.nodes.stop - bucket.nodes.start, *slots.shape[1:])
