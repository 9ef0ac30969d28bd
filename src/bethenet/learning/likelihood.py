"""The likelihood, through any approximation of log Z: one objective for exact, engines and inference networks.

Without latent variables, ``l_F = -log P~(x) + log Z`` (equation 2); with latent variables,
``l_{F,z} = -log Z(x) + log Z`` (equation 4). Each log Z is minus a free energy at beliefs that are held constant, so
the gradient is the difference of (pseudo-)moments under the unclamped and the clamped beliefs. With networks on
both sides `Likelihood.updates` is Algorithm 1, line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bethenet.inference.engine import Engine
from bethenet.learning.objective import Batch, Objective, Update
from bethenet.learning.partition import Estimate, LogPartition, log_partition
from bethenet.models import Model
from bethenet.potentials import LogPotentials

MODEL, NETWORK, CLAMPED_NETWORK = "model", "network", "clamped_network"
"""Names of the parts."""


class Likelihood(Objective):
    """Negative log-likelihood per sample (nats).

    Args:
        model: the model.
        unclamped: how to get log Z: an engine, or a `LogPartition` (`ByEngine`, `ByNetwork`).
        clamped: how to get log Z(x), where latent variables are to be inferred. Without it the model's own
            `Model.score` must sum them out (or there are none). Both sides should be approximated alike, so that their
            biases cancel: exact on one side and Bethe on the other diverges.
        regularizer: a term of the model's loss, in nats per sample, that is not part of the reported objective.

    >>> from bethenet.models.ising import IsingModel
    >>> from bethenet.inference.exact import Exact
    >>> objective = Likelihood(IsingModel.grid(3, 3), Exact())
    >>> objective.parts().keys()
    dict_keys(['model'])
    """

    def __init__(
        self,
        model: Model,
        unclamped: Engine | LogPartition,
        clamped: Engine | LogPartition | None = None,
        *,
        regularizer: Callable[[Model], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.unclamped = log_partition(unclamped)
        self.clamped = None if clamped is None else log_partition(clamped)
        if self.clamped is self.unclamped:
            raise ValueError("the two sides may share a network but not a LogPartition: it keeps states of its own")
        self.regularizer = regularizer

    def parts(self) -> dict[str, nn.Module]:
        """``model``, and where there are networks ``network`` and ``clamped_network`` (one part if they are one)."""
        parts: dict[str, nn.Module] = {MODEL: self.model}
        if self.unclamped.network is not None:
            parts[NETWORK] = self.unclamped.network
        if self.clamped is not None and self.clamped.network is not None:
            parts[self._clamped_part] = self.clamped.network
        return parts

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """Algorithm 1 for one minibatch; with engines in place of networks, its last line alone."""
        potentials, given = self._potentials(batch)
        for _ in range(self.unclamped.steps):
            yield Update((NETWORK,), self.unclamped.loss(potentials.detach(), batch, clamped=False))
        if self.clamped is not None and given is not None:
            for _ in range(self.clamped.steps):
                yield Update((self._clamped_part,), self.clamped.loss(given.detach(), batch, clamped=True).mean(0))
        value, estimates = self._objective(potentials, given, batch, generator)
        loss = value if self.regularizer is None else value + self.regularizer(self.model)
        yield Update((MODEL,), loss, value.detach(), lambda: _diagnostics(estimates))

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """The objective, and how inconsistent the beliefs behind it are."""
        value, estimates = self._objective(*self._potentials(batch), batch, generator)
        return {"objective": value.mean(), **_diagnostics(estimates)}

    def _potentials(self, batch: Batch) -> tuple[LogPotentials, LogPotentials | None]:
        if self.clamped is None:
            return self.model.unclamped(batch.data), None
        both: tuple[LogPotentials, LogPotentials] = self.model.both(batch.data)
        return both

    def _objective(
        self, potentials: LogPotentials, given: LogPotentials | None, batch: Batch, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Estimate]]:
        """l_F or l_{F,z} of each model, and the estimates that it is made of."""
        unclamped = self.unclamped.estimate(potentials, batch, clamped=False, generator=generator)
        estimates = {"": unclamped}
        if self.clamped is None or given is None:
            data_term = self.model.score(batch.data)
        else:
            estimates["clamped_"] = self.clamped.estimate(given, batch, clamped=True, generator=generator)
            data_term = estimates["clamped_"].log_z
        return unclamped.log_z - data_term.mean(0), estimates

    @property
    def _clamped_part(self) -> str:
        shared = self.clamped is not None and self.clamped.network is self.unclamped.network
        return NETWORK if shared else CLAMPED_NETWORK


def _diagnostics(estimates: Mapping[str, Estimate]) -> dict[str, Tensor]:
    figures: dict[str, Tensor] = {}
    for prefix, estimate in estimates.items():
        figures[f"{prefix}log_z"] = estimate.log_z.detach().mean()
        figures.update(estimate.diagnostics(prefix))
    return figures
