"""Objectives that the model computes by itself: its exact likelihood, where it has one, and the pseudo-likelihood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.models import Model


class DirectLikelihood(Objective):
    """Minus the mean over samples of a log-probability (nats) that the model computes itself.

    For directed models, and for those with a faster normaliser than any engine's.

    Args:
        model: the model.
        log_probability: a function of the data, ``[samples]`` or ``[samples, models]``, differentiable in the model's
            parameters; the model's method ``log_likelihood`` by default.
        regularizer: a term of the loss, in nats per sample, that is not part of the reported objective.
    """

    def __init__(
        self,
        model: Model,
        log_probability: Callable[[Any], Tensor] | None = None,
        *,
        regularizer: Callable[[Model], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        own: Any = model
        self.log_probability: Callable[[Any], Tensor] = log_probability or own.log_likelihood
        self.regularizer = regularizer

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step."""
        value = -self.log_probability(batch.data).mean(0)
        loss = value if self.regularizer is None else value + self.regularizer(self.model)
        yield Update(("model",), loss, value.detach())

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """The objective."""
        return {"objective": -self.log_probability(batch.data).mean()}


class PseudoLikelihood(DirectLikelihood):
    """``-sum_v log P(x_v | the others)`` per sample (nats; not comparable with a likelihood).

    Each variable is predicted from all others, so there is no partition function. For models without latent variables,
    or with a `Model.pseudo_log_likelihood` that sums them out.

    Args:
        model: the model.
        regularizer: a term of the loss, in nats per sample, that is not part of the reported objective.
    """

    def __init__(self, model: Model, *, regularizer: Callable[[Model], Tensor] | None = None) -> None:
        super().__init__(model, model.pseudo_log_likelihood, regularizer=regularizer)
