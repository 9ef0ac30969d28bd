"""Variational learning of directed hidden Markov models: the evidence lower bound and the importance-weighted bound.

Hidden states are discrete, so a posterior network's gradient is the score function's (REINFORCE), with a baseline that
does not depend on the sample it is for. Every gradient here is free of bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.learning.posteriors import StateDistribution
from bethenet.models.directed_hmm import DirectedHMM
from bethenet.models.hidden_chain import split


class _Variational(Objective):
    """What both bounds share. Sentences in a minibatch are equally long."""

    def __init__(self, model: DirectedHMM, posterior: nn.Module, samples: int) -> None:
        super().__init__()
        if not isinstance(model, DirectedHMM):
            raise ValueError(f"model: expected a DirectedHMM, whose log Z is 0; got {type(model).__name__}")
        self.model: Any = model
        self.posterior: Any = posterior
        self.samples = samples

    def parts(self) -> dict[str, nn.Module]:
        """``model`` and ``posterior``."""
        return {"model": self.model, "posterior": self.posterior}

    def _draw(
        self, batch: Batch, generator: torch.Generator | None
    ) -> tuple[Int[Tensor, "batch steps"], StateDistribution, Float[Tensor, "samples batch"], Float[Tensor, "s b"]]:
        """(words, q, log p of the samples with the words, log q of the samples)."""
        words, lengths = split(batch.data)
        if lengths is not None:
            raise ValueError("expected minibatches of sentences of equal length, got padded ones")
        q: StateDistribution = self.posterior(words)
        states = q.sample(self.samples, generator)
        log_p = self.model.joint_log_likelihood(words.repeat(self.samples, 1), states.flatten(0, 1))
        return words, q, log_p.reshape(self.samples, -1), q.log_prob(states)


class EvidenceLowerBound(_Variational):
    """-ELBO: E_q[log q(z) - log p(x, z)], nats per sentence.

    Args:
        model: the model.
        posterior: q, a module that makes a `StateDistribution` of words.
        baseline: a module that makes expected rewards of words; it descends on the squared error. Without one, 0.
        samples: of q for each sentence.
        exact_entropy: whether q's entropy is computed, and only the rest estimated from samples.
    """

    def __init__(
        self,
        model: DirectedHMM,
        posterior: nn.Module,
        baseline: nn.Module | None = None,
        *,
        samples: int = 1,
        exact_entropy: bool = False,
    ) -> None:
        super().__init__(model, posterior, samples)
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        self.baseline: Any = baseline
        self.exact_entropy = exact_entropy

    def parts(self) -> dict[str, nn.Module]:
        """``model``, ``posterior`` and, if there is one, ``baseline``."""
        return super().parts() | ({} if self.baseline is None else {"baseline": self.baseline})

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of each part, by the same samples."""
        words, q, log_p, log_q = self._draw(batch, generator)
        reward, entropy = self._terms(q, log_p, log_q)
        value = -(reward.mean(0) + entropy).mean().detach()
        expected = 0.0 if self.baseline is None else self.baseline(words)
        reward = reward.detach()
        surplus = (reward - expected).detach()
        yield Update(("model",), -log_p.mean(), value)
        yield Update(("posterior",), -((surplus * log_q).mean(0) + entropy).mean(), value)
        if self.baseline is not None:
            yield Update(("baseline",), (reward - expected).square().mean())

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """-ELBO, estimated from fresh samples."""
        _, q, log_p, log_q = self._draw(batch, generator)
        reward, entropy = self._terms(q, log_p, log_q)
        return {"objective": -(reward.mean(0) + entropy).mean()}

    def _terms(self, q: StateDistribution, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """What is estimated from samples, and what is added to it."""
        if self.exact_entropy:
            return log_p, q.entropy()
        return log_p - log_q, torch.zeros_like(log_p[0])


class ImportanceWeightedBound(_Variational):
    """Minus the importance-weighted bound: -E[log 1/S sum_s p(x, z_s) / q(z_s)], nats per sentence.

    Each sample's reward is how much it adds to the bound: the bound less what it would be with the sample's
    weight replaced by the geometric mean of the others' (Mnih & Rezende 2016), which does not depend on the sample.

    Args:
        model: the model.
        posterior: q, a module that makes a `StateDistribution` of words.
        samples: S, at least 2.
    """

    def __init__(self, model: DirectedHMM, posterior: nn.Module, *, samples: int = 10) -> None:
        super().__init__(model, posterior, samples)
        if samples < 2:
            raise ValueError(f"samples: expected at least 2, got {samples}; with one the bound is the ELBO")

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of the model, one of the posterior, by the same samples."""
        _, _, log_p, log_q = self._draw(batch, generator)
        log_weights = (log_p - log_q).detach()
        bound = self._bound(log_weights)
        value = -bound.mean()
        shares = log_weights.softmax(0)
        yield Update(("model",), -(shares * log_p).sum(0).mean(), value)
        # the score function's term, and the derivative of the weights themselves
        slopes = bound - self._without_each(log_weights) - shares
        yield Update(("posterior",), -(slopes * log_q).sum(0).mean(), value)

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """Minus the bound, estimated from fresh samples."""
        _, _, log_p, log_q = self._draw(batch, generator)
        return {"objective": -self._bound(log_p - log_q).mean()}

    def _bound(self, log_weights: Float[Tensor, "samples batch"]) -> Float[Tensor, " batch"]:
        return torch.logsumexp(log_weights, 0) - math.log(self.samples)

    def _without_each(self, log_weights: Float[Tensor, "samples batch"]) -> Float[Tensor, "samples batch"]:
        """The bound with each sample's weight replaced by the geometric mean of the others'."""
        others = (log_weights.sum(0) - log_weights) / (self.samples - 1)
        own = torch.eye(self.samples, dtype=torch.bool, device=log_weights.device).unsqueeze(2)
        replaced = torch.where(own, others.unsqueeze(1), log_weights.unsqueeze(0))
        return torch.logsumexp(replaced, 1) - math.log(self.samples)
