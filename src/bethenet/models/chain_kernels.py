"""The arithmetic of one step of a chain's scaled messages, forwards and backwards.

Two kernels, one for each form of `ChainTables`. They differ in how a message is laid out, which is what makes the
inner product a plain matrix product without a copy:

- `PairwiseKernel`: ``[batch, K, R]`` with R = K^{M-1}; the product is ``(R, K) x (K, K)`` for each sentence.
- `FullKernel`: ``[K, R, batch]``; the product is ``(K, K) x (K, batch)`` for each of the R histories.

Every number here is a probability up to scale: nothing is a logarithm. Gradients that come out are in the logarithms.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.models.chain_tables import ChainTables


class Kernel(Protocol):
    """What a pass over a chain needs of a layout. ``scale`` is one number a sentence."""

    def arrange(self, emissions: Float[Tensor, "batch steps states"]) -> Tensor:
        """Emissions with the step first and the rest as the kernel wants it."""
        ...

    def first(self, batch: int) -> Tensor:
        """The message before the first step: one empty history of weight 1."""
        ...

    def advance(self, step: int, message: Tensor, emission: Tensor, scale: Float[Tensor, " batch"]) -> Tensor:
        """The message of ``step`` from the one before."""
        ...

    def total(self, message: Tensor) -> Float[Tensor, " batch"]:
        """Sum of a message's entries."""
        ...

    def by_sentence(self, message: Tensor) -> Float[Tensor, "batch histories"]:
        """A message with the batch first."""
        ...

    def add(self, adjoint: Tensor | None, own: Float[Tensor, " batch"], message: Tensor) -> Tensor:
        """The adjoint of ``message`` plus ``own`` on each of its entries."""
        ...

    def retreat(
        self, step: int, adjoint: Tensor, message: Tensor, previous: Tensor, emission: Tensor, scale: Tensor
    ) -> tuple[Tensor, Float[Tensor, "batch states"]]:
        """The adjoint of the message before, and the gradient for this step's unary terms; counts are added up."""
        ...

    def clear(self) -> None:
        """Set the counts to zero."""
        ...

    def gradients(self) -> tuple[Tensor, ...]:
        """The counts since `clear`: the gradient for ``ChainTables.tensors``."""
        ...


def kernel_for(tables: ChainTables) -> Kernel:
    """The kernel for these tables, whose entries are at most 0."""
    return PairwiseKernel(tables) if tables.factored and tables.order > 1 else FullKernel(tables)


class PairwiseKernel:
    """Tables over (z_{t-M}, z_t) and (z_{t-M+1}, ..., z_t); order 2 or more."""

    def __init__(self, tables: ChainTables) -> None:
        self.order, self.states = tables.order, tables.states
        self.starts = [table.exp() for table in tables.starts]
        self.far = tables.far.exp()
        # counts of each sentence's far pairs and of its windows: summed over the batch once, at the end
        self.far_counts: Tensor | None = None
        self.window_counts: Tensor | None = None
        self.clear()

    def arrange(self, emissions: Tensor) -> Tensor:
        """See `Kernel`."""
        return emissions.transpose(0, 1).contiguous()

    def first(self, batch: int) -> Tensor:
        """See `Kernel`."""
        return self.far.new_ones(batch, 1)

    def advance(self, step: int, message: Tensor, emission: Tensor, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        local = (emission * scale.unsqueeze(1)).unsqueeze(1)
        if step < self.order:
            return ((message.unsqueeze(2) * self.starts[step]) * local).flatten(1)
        history = message.reshape(message.shape[0], self.states, -1).transpose(1, 2)
        # emission and scale ride on the small factor, so that the large result is written only twice
        product = torch.bmm(history, self.far * local)
        return product.mul_(self.starts[-1]).flatten(1)

    def total(self, message: Tensor) -> Tensor:
        """See `Kernel`."""
        return message.sum(1)

    def by_sentence(self, message: Tensor) -> Tensor:
        """See `Kernel`."""
        return message

    def add(self, adjoint: Tensor | None, own: Tensor, message: Tensor) -> Tensor:
        """See `Kernel`."""
        extra = own.unsqueeze(1)
        return extra.expand_as(message) if adjoint is None else adjoint.add_(extra)

    def retreat(
        self, step: int, adjoint: Tensor, message: Tensor, previous: Tensor, emission: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        batch = message.shape[0]
        local = (emission * scale.unsqueeze(1)).unsqueeze(1)
        if step < self.order:
            shape = (batch, -1, self.states)
            counts = (message * adjoint).reshape(shape)
            self.start_counts[step] += counts.sum(0)
            pulled = (adjoint.reshape(shape) * self.starts[step] * local).sum(2)
            return pulled, counts.sum(1)
        if self.window_counts is None:
            self.window_counts = torch.zeros_like(message)
        self.window_counts.addcmul_(message, adjoint)
        incoming = adjoint.reshape(batch, -1, self.states) * self.starts[-1]
        weighted = self.far * local
        counts = torch.bmm(previous.reshape(batch, self.states, -1), incoming).mul_(weighted)
        self.far_counts = counts if self.far_counts is None else self.far_counts.add_(counts)
        return torch.bmm(weighted, incoming.transpose(1, 2)).flatten(1), counts.sum(1)

    def clear(self) -> None:
        """See `Kernel`."""
        self.start_counts = [torch.zeros_like(table) for table in self.starts]
        self.far_counts = None
        self.window_counts = None

    def gradients(self) -> tuple[Tensor, ...]:
        """See `Kernel`."""
        if self.far_counts is None or self.window_counts is None:
            return (torch.zeros_like(self.far), *self.start_counts)
        starts = [*self.start_counts]
        starts[-1] = starts[-1] + self.window_counts.sum(0).reshape_as(starts[-1])
        return (self.far_counts.sum(0), *starts)


class FullKernel:
    """One table over (z_{t-M}, ..., z_t); or order 1."""

    def __init__(self, tables: ChainTables) -> None:
        self.order, self.states = tables.order, tables.states
        self.starts = [table.exp() for table in tables.starts]
        self.factored = tables.factored
        far = tables.far
        if tables.factored:
            far = (tables.far + tables.starts[-1]).unsqueeze(1)
        # [histories, z_t, z_{t-M}]
        self.far = far.exp().permute(1, 2, 0).contiguous()
        self.clear()

    def arrange(self, emissions: Tensor) -> Tensor:
        """See `Kernel`."""
        return emissions.permute(1, 2, 0).contiguous()

    def first(self, batch: int) -> Tensor:
        """See `Kernel`."""
        return self.far.new_ones(1, batch)

    def advance(self, step: int, message: Tensor, emission: Tensor, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        local = emission * scale
        if step < self.order:
            return ((message.unsqueeze(1) * self.starts[step].unsqueeze(2)) * local).flatten(0, 1)
        product = torch.bmm(self.far, self._by_history(message))
        return product.mul_(local).flatten(0, 1)

    def total(self, message: Tensor) -> Tensor:
        """See `Kernel`."""
        return message.sum(0)

    def by_sentence(self, message: Tensor) -> Tensor:
        """See `Kernel`."""
        return message.T

    def add(self, adjoint: Tensor | None, own: Tensor, message: Tensor) -> Tensor:
        """See `Kernel`."""
        return own.expand_as(message) if adjoint is None else adjoint + own

    def retreat(
        self, step: int, adjoint: Tensor, message: Tensor, previous: Tensor, emission: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        shape = (-1, self.states, message.shape[1])
        local = emission * scale
        counts = (message * adjoint).reshape(shape)
        incoming = adjoint.reshape(shape) * local
        if step < self.order:
            self.start_counts[step] += counts.sum(2)
            return (incoming * self.starts[step].unsqueeze(2)).sum(1), counts.sum(0).T
        self.far_adjoint.baddbmm_(incoming, self._by_history(previous).transpose(1, 2))
        pulled = torch.bmm(self.far.transpose(1, 2), incoming)
        return pulled.transpose(0, 1).reshape_as(previous), counts.sum(0).T

    def clear(self) -> None:
        """See `Kernel`."""
        self.start_counts = [torch.zeros_like(table) for table in self.starts]
        self.far_adjoint = torch.zeros_like(self.far)

    def gradients(self) -> tuple[Tensor, ...]:
        """See `Kernel`."""
        far = (self.far_adjoint * self.far).permute(2, 0, 1)
        starts = [*self.start_counts]
        if self.factored:
            far = far.squeeze(1)
            starts[-1] = starts[-1] + far.sum(0)
        return (far, *starts)

    def _by_history(self, message: Tensor) -> Tensor:
        """A message ``[K, R, batch]`` as R matrices ``[K, batch]``."""
        return message.reshape(self.states, -1, message.shape[1]).transpose(0, 1)
