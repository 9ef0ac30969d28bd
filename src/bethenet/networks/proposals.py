"""Distributions over binary vectors that are easy to draw from and whose probabilities are known: proposals.

Neural variational inference compares a model with one of these (`bethenet.learning.variational`). They are
``nn.Module``s with two methods, ``log_prob`` (differentiable in the parameters) and ``sample``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Proposal(nn.Module, ABC):
    """A distribution q over binary vectors."""

    @abstractmethod
    def log_prob(self, states: Float[Tensor, "samples variables"]) -> Float[Tensor, " samples"]:
        """``log q(x)`` (nats)."""

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Float[Tensor, "samples variables"]:
        """Independent samples, numbers 0 and 1."""


class MixtureOfProducts(Proposal):
    """A mixture of distributions under which the variables are independent.

    Args:
        log_odds: where every component starts, up to noise: the variables' log-odds in the data, say.
        components: how many.
        noise: standard deviation of what tells the components apart at first.
        generator: what it is drawn with.
    """

    def __init__(
        self,
        log_odds: Float[Tensor, " variables"],
        components: int = 8,
        *,
        noise: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if components < 1:
            raise ValueError(f"components: expected at least 1, got {components}")
        start = log_odds.detach().clone()
        spread = noise * torch.randn(components, start.numel(), generator=generator).to(start)
        self.log_odds = nn.Parameter(start + spread)
        self.weights = nn.Parameter(torch.zeros(components).to(start))
        """Logits of the components' probabilities."""

    def log_prob(self, states: Float[Tensor, "samples variables"]) -> Float[Tensor, " samples"]:
        """See `Proposal`."""
        each = states @ self.log_odds.t() - F.softplus(self.log_odds).sum(1)
        return torch.logsumexp(each + self.weights.log_softmax(0), 1)

    @torch.no_grad()
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Float[Tensor, "samples variables"]:
        """See `Proposal`."""
        chosen = torch.multinomial(self.weights.softmax(0), samples, replacement=True, generator=generator)
        chances = self.log_odds[chosen].sigmoid()
        uniforms = torch.rand(chances.shape, dtype=chances.dtype, device=chances.device, generator=generator)
        return chances.gt_(uniforms)


class AutoregressiveNetwork(Proposal):
    """Each variable given those before it, by a network whose hidden layer is shared (NADE; Larochelle & Murray 2011).

    Args:
        log_odds: where the variables' log-odds start, whatever stands before them.
        hidden: width of the hidden layer.
        scale: standard deviation of the first weights.
        generator: what they are drawn with.
    """

    def __init__(
        self,
        log_odds: Float[Tensor, " variables"],
        hidden: int = 100,
        *,
        scale: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden: expected at least 1, got {hidden}")
        start = log_odds.detach().clone()
        shape = (start.numel(), hidden)
        self.log_odds = nn.Parameter(start)
        self.read = nn.Parameter(scale * torch.randn(*shape, generator=generator).to(start))
        self.write = nn.Parameter(scale * torch.randn(*shape, generator=generator).to(start))
        self.hidden_bias = nn.Parameter(torch.zeros(hidden).to(start))

    def log_prob(self, states: Float[Tensor, "samples variables"]) -> Float[Tensor, " samples"]:
        """See `Proposal`."""
        read = states.unsqueeze(2) * self.read
        before = F.pad(read[:, :-1].cumsum(1), (0, 0, 1, 0)) + self.hidden_bias
        logits = torch.einsum("svh,vh->sv", before.sigmoid(), self.write) + self.log_odds
        return (states * logits - F.softplus(logits)).sum(1)

    @torch.no_grad()
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Float[Tensor, "samples variables"]:
        """See `Proposal`; one variable after the other."""
        variables = self.log_odds.numel()
        weights = self.log_odds
        # of logistic distribution: a variable is 1 where its log-odds are greater
        thresholds = torch.rand(variables, samples, dtype=weights.dtype, device=weights.device, generator=generator)
        thresholds = thresholds.logit_()
        states = torch.empty_like(thresholds)
        before = self.hidden_bias.expand(samples, -1).clone()
        for number in range(variables):
            logits = torch.addmv(self.log_odds[number], before.sigmoid(), self.write[number])
            torch.gt(logits, thresholds[number], out=states[number])
            before.addr_(states[number], self.read[number])
        return states.t().contiguous()
