"""`ChainTables`: the log-potentials of a homogeneous chain of order M, as the dynamic programmes read them.

A state z_t depends on its M predecessors. The first M steps of a chain have fewer: step t < M reads `starts[t]`. Every
later step reads either one full table over (z_{t-M}, ..., z_t), or, where all factors are pairwise, a table `far` over
(z_{t-M}, z_t) and the last start table over (z_{t-M+1}, ..., z_t). The second form is what makes exact inference a
matrix product with a K x K table.

Tuples of states are flattened with the oldest state slowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.models.chain_memory import check_tables

MAX_ORDER = 4


@dataclass(frozen=True, eq=False)
class ChainTables:
    """Log-tables of a chain of order ``len(starts)``."""

    starts: tuple[Float[Tensor, "history states"], ...]
    """For each t < order the table of step t over its t predecessors and z_t: ``[states ** t, states]``."""
    far: Float[Tensor, "*table"]
    """``[states, states]`` over (z_{t-M}, z_t), to be added to ``starts[-1]``; or ``[states, history, states]``."""

    @classmethod
    def pairwise(cls, transitions: Float[Tensor, "order states states"]) -> ChainTables:
        """From one table a lag: ``transitions[l - 1, i, j]`` is the log-potential of z_{t-l} = i, z_t = j."""
        if transitions.dim() != 3 or transitions.shape[1] != transitions.shape[2]:
            raise ValueError(f"transitions: expected shape [order, states, states], got {list(transitions.shape)}")
        order, states = transitions.shape[:2]
        _check_order(order)
        check_tables(3 * states**order, transitions, order, states)
        starts = [transitions.new_zeros(1, states)]
        for lag in range(1, order):
            # the state ``lag`` steps back is the oldest of the history, so its axis comes first
            table = transitions[lag - 1].unsqueeze(1) + starts[-1].unsqueeze(0)
            starts.append(table.reshape(states**lag, states))
        return cls(tuple(starts), transitions[order - 1])

    @classmethod
    def full(cls, table: Float[Tensor, "*table"]) -> ChainTables:
        """From one table ``[states + 1] * order + [states]``, whose last history state stands for "before the start".

        Axis 0 is z_{t-M}; the last axis is z_t.
        """
        states, order = table.shape[-1], table.dim() - 1
        _check_order(order)
        if set(table.shape[:-1]) != {states + 1}:
            raise ValueError(f"table: expected shape {[states + 1] * order + [states]}, got {list(table.shape)}")
        starts = []
        for known in range(order):
            index = [states] * (order - known) + [slice(0, states)] * known
            starts.append(table[tuple(index)].reshape(states**known, states))
        inner = table[(slice(0, states),) * order]
        return cls(tuple(starts), inner.reshape(states, states ** (order - 1), states))

    @property
    def order(self) -> int:
        """How many predecessors a state depends on."""
        return len(self.starts)

    @property
    def states(self) -> int:
        """How many states each variable has."""
        return self.far.shape[-1]

    @property
    def factored(self) -> bool:
        """Whether the oldest predecessor enters through a table of its own."""
        return self.far.dim() == 2

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``far`` and then the start tables."""
        return (self.far, *self.starts)

    def detach(self) -> ChainTables:
        """The same numbers as constants."""
        return ChainTables(tuple(table.detach() for table in self.starts), self.far.detach())

    def to(self, dtype: torch.dtype) -> ChainTables:
        """The same tables in another floating-point type."""
        return ChainTables(tuple(table.to(dtype) for table in self.starts), self.far.to(dtype))

    def levelled(self) -> tuple[ChainTables, Float[Tensor, "steps states"]]:
        """Tables whose largest entry for every z_t is 0, and what was taken out: rows 0 to M of log-terms of z_t.

        Row t is for step t, the last row for every step from M on. A distribution does not change when what is taken
        out is added to the unary terms.
        """
        levels = [_level(table, (0,)) for table in self.starts]
        starts = tuple(table - level for table, level in zip(self.starts, levels, strict=True))
        level = _level(self.far, tuple(range(self.far.dim() - 1)))
        steady = level + levels[-1] if self.factored else level
        return ChainTables(starts, self.far - level), torch.stack([*levels, steady])

    def score(
        self, states: Int[Tensor, "batch steps"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, " batch"]:
        """Sum of the log-tables (nats) along given sequences of states, unary terms left out."""
        batch, steps = states.shape
        total = self.far.new_zeros(batch)
        inside = states.new_full((batch,), steps) if lengths is None else lengths
        for step in range(min(self.order, steps)):
            here = self.starts[step][self._flat(states[:, :step]), states[:, step]]
            total = total + torch.where(inside > step, here, torch.zeros_like(here))
        if steps > self.order:
            windows = states.unfold(1, self.order + 1, 1)
            oldest, recent, current = windows[..., 0], self._flat(windows[..., 1:-1]), windows[..., -1]
            if self.factored:
                later = self.far[oldest, current] + self.starts[-1][recent, current]
            else:
                later = self.far[oldest, recent, current]
            real = inside.unsqueeze(1) > torch.arange(self.order, steps, device=states.device)
            total = total + torch.where(real, later, torch.zeros_like(later)).sum(1)
        return total

    def _flat(self, states: Tensor) -> Tensor:
        """Number of each tuple of states along the last axis."""
        index = torch.zeros_like(states[..., 0]) if states.shape[-1] else states.new_zeros(states.shape[:-1])
        for axis in range(states.shape[-1]):
            index = index * self.states + states[..., axis]
        return index


def _check_order(order: int) -> None:
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order: expected 1 to {MAX_ORDER}, got {order}")


def _level(table: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The maximum over ``axes`` as a constant; 0 where it is ``-inf``."""
    maximum = table.detach().amax(axes)
    return torch.where(maximum == -math.inf, torch.zeros_like(maximum), maximum)
