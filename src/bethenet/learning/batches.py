"""Minibatches from tensors in memory. The order of an epoch depends on the seed and the epoch's number alone, so a run
can be taken up again anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from bethenet.learning.objective import Batch

Data = Tensor | Sequence[Tensor] | Iterable[Any]
"""A tensor whose first axis is the samples, a tuple or list of such tensors, or an iterable that can be gone through
again and yields minibatches (`Batch`es, tensors, or tuples of tensors). An iterable with a method
``set_epoch(number)`` is told each epoch's number, so that it can shuffle repeatably."""


class Minibatches:
    """Minibatches of one data set.

    Args:
        data: see `Data`.
        batch_size: samples in each but perhaps the last minibatch of tensors; all at once if ``None``.
        shuffle: draw a new order of the tensors' samples for each epoch.
        seed: what the orders are drawn from.
        device: where the minibatches are put.
    """

    def __init__(
        self,
        data: Data,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        self.device = torch.device(device)
        self.tensors: tuple[Tensor, ...] | None = None
        self.iterable: Iterable[Any] = ()
        self.single = isinstance(data, Tensor)
        if isinstance(data, Tensor):
            self.tensors = (data,)
        elif isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
            self.tensors = tuple(data)
        else:
            self.iterable = data
        if self.tensors is not None:
            sizes = {part.shape[0] if part.dim() else 0 for part in self.tensors}
            if len(sizes) != 1 or 0 in sizes:
                raise ValueError(f"expected tensors of one positive number of samples, got {sorted(sizes)}")
            self.samples = sizes.pop()
            self.batch_size = min(batch_size or self.samples, self.samples)
        self.shuffle = shuffle
        self.seed = seed

    def count(self) -> int | None:
        """Minibatches an epoch, if that is known beforehand."""
        if self.tensors is not None:
            return -(-self.samples // self.batch_size)
        return len(self.iterable) if isinstance(self.iterable, Sized) else None

    def epoch(self, number: int = 0, start: int = 0) -> Iterator[Batch]:
        """The minibatches of one epoch, without the first ``start``."""
        if self.tensors is None:
            if hasattr(self.iterable, "set_epoch"):
                self.iterable.set_epoch(number)
            for position, item in enumerate(self.iterable):
                if position >= start:
                    yield self._as_batch(item)
            return
        order = self._order(number)
        for first in range(start * self.batch_size, self.samples, self.batch_size):
            indices = order[first : first + self.batch_size]
            parts = tuple(
                _moved(part.index_select(0, indices.to(part.device, non_blocking=True)), self.device)
                for part in self.tensors
            )
            yield Batch(parts[0] if self.single else parts, indices.numel(), indices, self.samples)

    def _order(self, number: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.samples)
        # the multiplier keeps the seeds of neighbouring runs and epochs apart
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.randperm(self.samples, generator=generator)

    def _as_batch(self, item: Any) -> Batch:
        if isinstance(item, Batch):
            return Batch(_moved(item.data, self.device), item.size, item.indices, item.population)
        first = item if isinstance(item, Tensor) else item[0] if isinstance(item, (tuple, list)) and item else None
        if not isinstance(first, Tensor):
            raise ValueError(f"an iterable yields Batches, tensors or tuples of tensors; got {type(item).__name__}")
        return Batch(_moved(item, self.device), first.shape[0])


def _moved(data: Any, device: torch.device) -> Any:
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, (tuple, list)):
        return tuple(_moved(part, device) for part in data)
    return data
