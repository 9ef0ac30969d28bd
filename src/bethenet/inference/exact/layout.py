"""`Layout` and `Leaf`: the shapes of a model's numbers, which are all that memory depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.potentials import LogPotentials


@dataclass(frozen=True)
class Layout:
    """What of a model's numbers has a batch axis and separate rows: all that its memory depends on."""

    batch: int
    tables: tuple[tuple[bool, bool], ...]
    """For each factor group: not shared over the batch, not shared over the factors."""
    terms: tuple[tuple[bool, bool], ...]
    """The same of each variable group's evidence."""
    observed: bool
    """Whether observed states differ between batch members."""

    @classmethod
    def of(cls, potentials: LogPotentials) -> Layout:
        """The layout of given numbers."""

        def flags(tensor: Tensor) -> tuple[bool, bool]:
            return tensor.shape[0] > 1, tensor.shape[1] > 1

        return cls(
            potentials.batch_size,
            tuple(flags(table) for table in potentials.tables),
            tuple(flags(term) for term in potentials.node_terms),
            potentials.observed is not None and potentials.observed.shape[0] > 1,
        )

    @classmethod
    def unshared(cls, graph: FactorGraph, batch: int) -> Layout:
        """Every factor with a table of its own in every batch member, and no evidence."""
        tables = tuple((batch > 1, len(group) > 1) for group in graph.factor_groups)
        return cls(batch, tables, ((False, False),) * len(graph.variable_groups), False)


@dataclass(frozen=True)
class Leaf:
    """The shape of one stack of tables: ``[batch | 1, rows | 1, *table_shape]``."""

    rows: int
    table_shape: tuple[int, ...]
    batched: bool
    separate: bool
    fresh: bool = False
    """It has to be computed first; it is not one of the potentials' own tensors."""

    def entries(self, batch: int) -> int:
        """How many numbers."""
        return (batch if self.batched else 1) * (self.rows if self.separate else 1) * math.prod(self.table_shape)
