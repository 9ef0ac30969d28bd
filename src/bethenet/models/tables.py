"""`TableModel`: every factor's log-table is a free parameter, on any graph, with or without latent variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.graph import FactorGraph
from bethenet.models.base import Model
from bethenet.potentials import UNOBSERVED, LogPotentials


class TableModel(Model):
    """Free log-tables.

    Args:
        graph: the structure.
        models: how many independent models to hold.
        shared: the factor groups (their numbers) whose factors have one table in common, or ``True`` for all.
        observed: the variables that data give, in the order of the data's columns; the others are latent. All, in
            their own order, by default.
        scale: standard deviation of the first log-potentials.
        generator: what they are drawn from.
        dtype: of the parameters.

    >>> model = TableModel(FactorGraph.chain(10, states=3), shared=[1], observed=range(0, 10, 2))
    >>> [tuple(table.shape) for table in model.log_potentials().tables]
    [(1, 10, 3), (1, 1, 3, 3)]
    """

    def __init__(
        self,
        graph: FactorGraph,
        *,
        models: int = 1,
        shared: bool | Collection[int] = (),
        observed: Sequence[int | str] | None = None,
        scale: float = 0.1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.graph = graph
        groups = range(len(graph.factor_groups))
        tied = set(groups) if shared is True else set(shared or ())
        if not tied <= set(groups):
            raise ValueError(f"shared: expected factor groups from 0 to {len(groups) - 1}, got {sorted(tied)}")
        self.tables = nn.ParameterList(
            scale
            * torch.randn(
                models, 1 if number in tied else len(group), *group.table_shape, generator=generator, dtype=dtype
            )
            for number, group in enumerate(graph.factor_groups)
        )
        self.observed: tuple[int, ...] | None = None
        if observed is not None:
            self.observed = tuple(graph.variable_number(variable) for variable in observed)
            if len(set(self.observed)) != len(self.observed):
                raise ValueError(f"observed: expected distinct variables, got {list(observed)}")
        # on the device beforehand, so that no minibatch waits for it
        self.register_buffer("_columns", torch.tensor(self.observed or (), dtype=torch.long), persistent=False)
        self._columns: Tensor

    @classmethod
    def from_potentials(cls, potentials: LogPotentials, observed: Sequence[int | str] | None = None) -> TableModel:
        """Start from given tables, shared where they are. Entries of ``-inf`` stay so: their gradient is zero.

        Raises:
            ValueError: there is evidence; a model has none.
        """
        if potentials.observed is not None or any(bool((term != 0).any()) for term in potentials.node_terms):
            raise ValueError("expected potentials without evidence: a model's evidence comes with its data")
        model = cls(potentials.graph, observed=observed)
        model.tables = nn.ParameterList(table.detach().clone() for table in potentials.tables)
        return model

    def log_potentials(self, evidence: Any = None) -> LogPotentials:
        """The tables. Evidence is anything that `LogPotentials.clamp` takes."""
        potentials = LogPotentials(self.graph, list(self.tables))
        return potentials if evidence is None else potentials.clamp(evidence)

    def clamped(self, data: Int[Tensor, "samples observed"]) -> LogPotentials:
        """The latent variables' model given each sample."""
        return self.log_potentials(self.complete(data))

    def complete(self, data: Int[Tensor, "samples observed"]) -> Int[Tensor, "samples variables"]:
        """The data as states of all variables, -1 at the latent ones."""
        if self.observed is None:
            return data
        if data.shape[-1] != len(self.observed):
            raise ValueError(f"expected {len(self.observed)} columns, one an observed variable; got {data.shape[-1]}")
        whole = data.new_full((*data.shape[:-1], self.graph.num_variables), UNOBSERVED, dtype=torch.long)
        return whole.index_copy(-1, self._columns.to(data.device), data.long())

    def score(self, data: Int[Tensor, "samples *models observed"]) -> Float[Tensor, "samples models"]:
        """See `Model.score`; for models without latent variables."""
        return super().score(self._without_latents(data))

    def pseudo_log_likelihood(self, data: Int[Tensor, "samples *models observed"]) -> Float[Tensor, "samples models"]:
        """See `Model.pseudo_log_likelihood`; for models without latent variables."""
        return super().pseudo_log_likelihood(self._without_latents(data))

    def _without_latents(self, data: Tensor) -> Tensor:
        if self.observed is not None and len(self.observed) < self.graph.num_variables:
            raise ValueError(
                f"{self.graph.num_variables - len(self.observed)} variables are latent: infer them, by giving the "
                "objective a clamped engine or network"
            )
        return self.complete(data)
