"""Pseudo-likelihood: each variable predicted from all others. No partition function, consistent, often weaker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.models import Model


class PseudoLikelihood(Objective):
    """``-sum_v log P(x_v | the others)`` per sample (nats; not comparable with a likelihood).

    Args:
        model: a model without latent variables, or with a `Model.pseudo_log_likelihood` that sums them out.
        regularizer: a term of the loss, in nats per sample, that is not part of the reported objective.
    """

    def __init__(self, model: Model, *, regularizer: Callable[[Model], Tensor] | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.regularizer = regularizer

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step."""
        value = -self.model.pseudo_log_likelihood(batch.data).mean(0)
        loss = value if self.regularizer is None else value + self.regularizer(self.model)
        yield Update(("model",), loss, value.detach())

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """Minus the pseudo-log-likelihood."""
        return {"objective": -self.model.pseudo_log_likelihood(batch.data).mean()}
