"""Ising models: ``P(x)`` in proportion to ``exp(sum J_ij x_i x_j + sum h_i x_i)`` with spins ``x_i`` of -1 and +1.

Everywhere else in the library a binary variable has the states 0 and 1: state 0 is spin -1, state 1 is spin +1.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.graph import FactorGraph
from bethenet.models.base import Model
from bethenet.potentials import LogPotentials


def spins(states: Int[Tensor, "*shape"], dtype: torch.dtype | None = None) -> Float[Tensor, "*shape"]:
    """-1 and +1 for the states 0 and 1."""
    return states.to(dtype or torch.get_default_dtype()) * 2 - 1


def states(spins: Tensor) -> Int[Tensor, "*shape"]:
    """0 and 1 for the spins -1 and +1."""
    return (spins > 0).long()


class IsingModel(Model):
    """One or several independent Ising models over one graph.

    Args:
        graph: binary variables joined by unary factors (each has a field) and pairwise ones (each has a coupling).
        couplings: ``J``, one a pairwise factor, ``[models, edges]`` or ``[edges]``; zeros by default.
        fields: ``h``, one a unary factor, ``[models, variables]`` or ``[variables]``; zeros by default.

    >>> model = IsingModel.random(FactorGraph.grid(3, 3), generator=torch.Generator().manual_seed(0), models=5)
    >>> model.couplings.shape, model.fields.shape, model.log_potentials().batch_size
    (torch.Size([5, 12]), torch.Size([5, 9]), 5)
    """

    def __init__(self, graph: FactorGraph, couplings: Tensor | None = None, fields: Tensor | None = None) -> None:
        super().__init__()
        if any(group.states != 2 for group in graph.variable_groups):
            raise ValueError(f"an Ising model's variables have 2 states; got {graph.state_counts.unique().tolist()}")
        if any(group.arity not in (1, 2) for group in graph.factor_groups):
            raise ValueError(f"an Ising model's factors join 1 or 2 variables; got {graph}")
        self.graph = graph
        sizes = {group.arity: len(group) for group in graph.factor_groups}
        self.fields = _parameter("fields", fields, sizes.get(1, 0), couplings)
        self.couplings = _parameter("couplings", couplings, sizes.get(2, 0), fields)
        if self.fields.shape[0] != self.couplings.shape[0]:
            raise ValueError(f"got fields of {self.fields.shape[0]} models, couplings of {self.couplings.shape[0]}")

    @classmethod
    def grid(cls, rows: int, columns: int, couplings: Tensor | None = None, fields: Tensor | None = None) -> IsingModel:
        """On a grid; couplings in the order of `FactorGraph.grid`: horizontal edges row by row, then vertical ones."""
        return cls(FactorGraph.grid(rows, columns), couplings, fields)

    @classmethod
    def random(
        cls,
        graph: FactorGraph,
        *,
        coupling_scale: float = 1.0,
        field_scale: float = 1.0,
        models: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> IsingModel:
        """Independent normal couplings and fields of the given standard deviations (fields are drawn first)."""
        sizes = {group.arity: len(group) for group in graph.factor_groups}
        fields = field_scale * torch.randn(models, sizes.get(1, 0), generator=generator, dtype=dtype)
        couplings = coupling_scale * torch.randn(models, sizes.get(2, 0), generator=generator, dtype=dtype)
        return cls(graph, couplings, fields)

    def log_potentials(self, evidence: Any = None) -> LogPotentials:
        """Tables ``(-h, h)`` and ``((J, -J), (-J, J))``."""
        signs = spins(torch.arange(2, device=self.fields.device), self.fields.dtype)
        tables = [
            self.fields.unsqueeze(-1) * signs
            if group.arity == 1
            else self.couplings[..., None, None] * torch.outer(signs, signs)
            for group in self.graph.factor_groups
        ]
        potentials = LogPotentials(self.graph, tables, finite=True)
        return potentials if evidence is None else potentials.clamp(evidence)

    def score(self, data: Int[Tensor, "samples *models variables"]) -> Float[Tensor, "samples models"]:
        """``sum J_ij x_i x_j + sum h_i x_i`` (nats) of states 0 and 1."""
        x = spins(data, self.fields.dtype)
        total = x.new_zeros(1)
        for group in self.graph.to(x.device).factor_groups:
            if group.arity == 1:
                total = total + _weigh(x[..., group.variables[:, 0]], self.fields)
            else:
                total = total + _weigh(x[..., group.variables[:, 0]] * x[..., group.variables[:, 1]], self.couplings)
        return total.expand(x.shape[0], self.fields.shape[0])


def _weigh(statistics: Tensor, weights: Float[Tensor, "models terms"]) -> Float[Tensor, "samples models"]:
    if statistics.dim() == 2:
        return statistics @ weights.T
    return torch.einsum("smt,mt->sm", statistics, weights)


def _parameter(name: str, values: Tensor | None, size: int, other: Tensor | None) -> nn.Parameter:
    if values is None:
        models = 1 if other is None or other.dim() < 2 else other.shape[0]
        dtype = None if other is None else other.dtype
        return nn.Parameter(torch.zeros(models, size, dtype=dtype))
    if values.dim() not in (1, 2) or values.shape[-1] != size:
        raise ValueError(f"{name}: expected shape [{size}] or [models, {size}], got {list(values.shape)}")
    return nn.Parameter(torch.atleast_2d(values.detach().clone()))
