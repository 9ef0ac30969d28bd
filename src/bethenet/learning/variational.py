"""Neural variational inference and learning in undirected models (Kuleshov & Ermon 2017).

For any distribution q that covers the model's, ``Z^2 <= E_q[(p~(x) / q(x))^2]``, with equality where q is the model: an
upper bound on log Z, hence on the negative log-likelihood, that needs no samples of the model. The logarithm is
linearised, ``log m <= m / c - 1 + log c`` for every c > 0, so that means over samples of q have gradients free of bias;
c is the running mean of the squared ratios. Model and q descend on the bound together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.models import Model
from bethenet.networks.proposals import Proposal

CHUNK = 500
"""Samples scored at a time in an evaluation: an autoregressive proposal holds ``[samples, variables, hidden]``."""


class VariationalUpperBound(Objective):
    """An upper bound on the negative log-likelihood per sample (nats).

    Args:
        model: a model of binary data that can score it (`Model.score`), latent variables summed out.
        proposal: q, over the observed variables.
        samples: how many of q in each update.
        memory: over how many updates, roughly, the running mean of squared ratios goes.
        evaluation_samples: how many of q in each evaluation.
    """

    log_mean_square: Tensor
    seen: Tensor

    def __init__(
        self,
        model: Model,
        proposal: Proposal,
        *,
        samples: int = 100,
        memory: int = 20,
        evaluation_samples: int = 10_000,
    ) -> None:
        super().__init__()
        for name, value in (("samples", samples), ("memory", memory), ("evaluation_samples", evaluation_samples)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.model: Any = model
        self.proposal: Any = proposal
        self.samples, self.memory, self.evaluation_samples = samples, memory, evaluation_samples
        device = next(model.parameters()).device
        self.register_buffer("log_mean_square", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64, device=device))

    def parts(self) -> dict[str, nn.Module]:
        """``model`` and ``proposal``."""
        return {"model": self.model, "proposal": self.proposal}

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of the proposal, one of the model, by the same samples."""
        states = self.proposal.sample(self.samples, generator)
        log_q = self.proposal.log_prob(states)
        scores = self.model.score(states.long()).squeeze(1)
        with torch.no_grad():
            log_squares = 2 * (scores - log_q).double()
            self._remember(log_squares)
            weights = (log_squares - self.log_mean_square).exp().to(log_q.dtype)
        yield Update(("proposal",), -0.5 * (weights * log_q).mean(), self.log_mean_square / 2)
        data = self.model.score(batch.data).mean()
        yield Update(("model",), (weights * scores).mean() - data, (self.log_mean_square / 2 - data).detach())

    def _remember(self, log_squares: Float[Tensor, " samples"]) -> None:
        """The running mean, in which the present samples always count; at first the plain mean."""
        share = (1 / (self.seen + 1)).clamp(min=1 / self.memory)
        newest = torch.logsumexp(log_squares, 0) - math.log(self.samples)
        # -inf where nothing has been seen
        before = self.log_mean_square + torch.log1p(-share)
        self.log_mean_square.copy_(torch.logaddexp(before, newest + share.log()))
        self.seen.add_(1)

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """The bound on the negative log-likelihood, estimated with fresh samples of q."""
        bound = log_z_bound(self.model, self.proposal, self.evaluation_samples, generator=generator)
        return {"objective": bound.log_z.float() - self.model.score(batch.data).mean()}


@dataclass(frozen=True)
class LogZBound:
    """An estimate of an upper bound on log Z."""

    log_z: Float[Tensor, ""]
    """In nats. The bound is in expectation: with few samples the estimate is too low where the ratios' tails are
    heavy, which a small effective sample size tells."""
    standard_error: Float[Tensor, ""]
    effective_sample_size: Float[Tensor, ""]
    """How many equally weighted samples the squared ratios are worth."""


@torch.no_grad()
def log_z_bound(
    model: Model, proposal: Proposal, samples: int = 100_000, *, generator: torch.Generator | None = None
) -> LogZBound:
    """Estimate ``1/2 log E_q[(p~ / q)^2]``.

    Args:
        model: the model.
        proposal: q.
        samples: how many of q.
        generator: what they are drawn with.
    """
    parts = []
    for first in range(0, samples, CHUNK):
        states = proposal.sample(min(CHUNK, samples - first), generator)
        scores: Tensor = model.score(states.long()).squeeze(1)
        parts.append(2 * (scores - proposal.log_prob(states)).double())
    log_squares = torch.cat(parts)
    log_mean = torch.logsumexp(log_squares, 0) - math.log(samples)
    relative = (log_squares - log_mean).exp()
    error = 0.5 * relative.std() / math.sqrt(samples)
    return LogZBound(log_mean / 2, error, relative.sum().square() / relative.square().sum())
