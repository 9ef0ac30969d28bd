"""Variational learning of directed hidden Markov models: the evidence lower bound and the importance-weighted bound.

Hidden states are discrete, so a posterior network's gradient is the score function's (REINFORCE), less a baseline that
does not depend on the sample it is for. Whatever has an expectation in closed form is not sampled, and a state's score
is multiplied only by what the state has a part in: that leaves less noise, and no bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.learning.posteriors import StateDistribution
from bethenet.models.directed_hmm import DirectedHMM
from bethenet.models.hidden_chain import split


@dataclass(frozen=True)
class Annealing:
    """Weights of the transitions' term and of the entropy in the bound that the posterior climbs; they rise to 1.

    With less weight on transitions than on the entropy, and less on the entropy than on the words, states first come
    to stand for different words, all states equally often; with all weights 1 from the start nothing keeps the
    posterior from ignoring the sentence.
    """

    steps: int = 0
    """Calls in which the weights rise, linearly."""
    transitions: float = 1.0
    entropy: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps: expected at least 0, got {self.steps}")
        for name in ("transitions", "entropy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number between 0 and 1, got {getattr(self, name)}")


class _Drawn(NamedTuple):
    """Samples of the posterior, and what they are made of."""

    q: StateDistribution
    states: Int[Tensor, "samples batch steps"]
    log_q: Float[Tensor, "samples batch steps hidden_states"]
    """Log q(z_t = k | the states sampled before t)."""
    following: Float[Tensor, "samples batch steps hidden_states"]
    """Log p(z_t = k | the states sampled before t)."""
    emissions: Float[Tensor, "batch steps hidden_states"]
    """Log p(word at t | z_t = k)."""


class _Variational(Objective):
    """What both bounds share. Sentences in a minibatch are equally long."""

    calls: Tensor

    def __init__(self, model: DirectedHMM, posterior: nn.Module, samples: int, annealing: Annealing | None) -> None:
        super().__init__()
        if not isinstance(model, DirectedHMM):
            raise ValueError(f"model: expected a DirectedHMM, whose log Z is 0; got {type(model).__name__}")
        self.model: Any = model
        self.posterior: Any = posterior
        self.samples = samples
        self.annealing = annealing or Annealing()
        self.register_buffer("calls", torch.zeros(()))

    def parts(self) -> dict[str, nn.Module]:
        """``model`` and ``posterior``."""
        return {"model": self.model, "posterior": self.posterior}

    def _draw(self, batch: Batch, generator: torch.Generator | None) -> _Drawn:
        words, lengths = split(batch.data)
        if lengths is not None:
            raise ValueError("expected minibatches of sentences of equal length, got padded ones")
        q: StateDistribution = self.posterior(words)
        states = q.sample(self.samples, generator)
        following = self.model.next_log_probabilities(states)
        return _Drawn(q, states, q.conditionals(states), following, self.model.unary(words))

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Of the transitions and of the entropy; one call later with each call."""
        annealing = self.annealing
        left = (1 - self.calls / max(1, annealing.steps)).clamp(min=0.0) * (annealing.steps > 0)
        self.calls += 1
        return 1 - (1 - annealing.transitions) * left, 1 - (1 - annealing.entropy) * left


def _at(
    tables: Float[Tensor, "samples batch steps hidden_states"], states: Int[Tensor, "samples batch steps"]
) -> Float[Tensor, "samples batch steps"]:
    """The entries of the states that were sampled."""
    return tables.gather(3, states.unsqueeze(3)).squeeze(3)


class _Terms(NamedTuple):
    """What -ELBO is made of, nats."""

    words: Float[Tensor, " batch"]
    """E[log p(words | states)], exact."""
    transitions: Float[Tensor, "samples batch steps"]
    """E[log p(z_t | the states before)] for the states that were sampled before t."""
    entropy: Float[Tensor, " batch"]


class EvidenceLowerBound(_Variational):
    """-ELBO: E_q[log q(z) - log p(x, z)], nats per sentence.

    Of the states, only the histories are sampled: expectations over a transition's last state, over the words and of
    log q are exact.

    Args:
        model: the model.
        posterior: q, a module that makes a `StateDistribution` of words.
        baseline: a module that makes of q's marginals what each transition's term is expected to be,
            ``[batch, steps]``; it descends on the squared error. Without one, 0.
        samples: of q for each sentence.
        annealing: what the posterior descends on at first. Whatever is reported is the bound itself.
    """

    def __init__(
        self,
        model: DirectedHMM,
        posterior: nn.Module,
        baseline: nn.Module | None = None,
        *,
        samples: int = 1,
        annealing: Annealing | None = None,
    ) -> None:
        super().__init__(model, posterior, samples, annealing)
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        self.baseline: Any = baseline

    def parts(self) -> dict[str, nn.Module]:
        """``model``, ``posterior`` and, if there is one, ``baseline``."""
        return super().parts() | ({} if self.baseline is None else {"baseline": self.baseline})

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of each part, by the same samples."""
        drawn = self._draw(batch, generator)
        log_q, marginals, entropy = drawn.log_q, drawn.q.marginals(), drawn.q.entropy()
        learnt = _terms(log_q.detach(), marginals.detach(), drawn.following, drawn.emissions, entropy.detach())
        value = _negative(learnt).detach()
        yield Update(("model",), _negative(learnt), value)
        terms = _terms(log_q, marginals, drawn.following.detach(), drawn.emissions.detach(), entropy)
        rewards = terms.transitions.detach()
        expected = torch.zeros_like(rewards[0]) if self.baseline is None else self.baseline(marginals.detach())
        surplus = drawn.q.consequences(rewards - expected.detach(), self.model.options.order)
        on_transitions, on_entropy = self._weights()
        transitions = on_transitions * (terms.transitions + surplus * _at(log_q, drawn.states))
        climbed = terms._replace(transitions=transitions, entropy=on_entropy * entropy)
        yield Update(("posterior",), _negative(climbed), value)
        if self.baseline is not None:
            yield Update(("baseline",), (rewards - expected).square().mean())

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """-ELBO, estimated from fresh samples."""
        drawn = self._draw(batch, generator)
        terms = _terms(drawn.log_q, drawn.q.marginals(), drawn.following, drawn.emissions, drawn.q.entropy())
        return {"objective": _negative(terms)}


def _terms(log_q: Tensor, marginals: Tensor, following: Tensor, emissions: Tensor, entropy: Tensor) -> _Terms:
    return _Terms((marginals * emissions).sum((1, 2)), (log_q.exp() * following).sum(3), entropy)


def _negative(terms: _Terms) -> Float[Tensor, ""]:
    """Minus the sum of the terms, mean over sentences."""
    return -(terms.words + terms.transitions.sum(2).mean(0) + terms.entropy).mean()


class ImportanceWeightedBound(_Variational):
    """Minus the importance-weighted bound: -E[log 1/S sum_s p(x, z_s) / q(z_s)], nats per sentence.

    A state's reward is how much it adds to the bound: the bound less what it would be if the terms of its sample's
    log-weight that it has a part in were replaced. Its own term is replaced by its expectation, later ones by their
    means over the other samples: a baseline that leaves one out (as in Mnih & Rezende 2016), state by state.

    Args:
        model: the model.
        posterior: q, a module that makes a `StateDistribution` of words.
        samples: S, at least 2.
        annealing: what the posterior descends on at first. Whatever is reported is the bound itself.
    """

    def __init__(
        self, model: DirectedHMM, posterior: nn.Module, *, samples: int = 10, annealing: Annealing | None = None
    ) -> None:
        super().__init__(model, posterior, samples, annealing)
        if samples < 2:
            raise ValueError(f"samples: expected at least 2, got {samples}; with one the bound is the ELBO")

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of the model, one of the posterior, by the same samples."""
        drawn = self._draw(batch, generator)
        log_p, log_q = (_at(tables, drawn.states) for tables in (drawn.following + drawn.emissions, drawn.log_q))
        log_weights = (log_p - log_q).sum(2).detach()
        value = -self._bound(log_weights).mean()
        yield Update(("model",), -(log_weights.softmax(0) * log_p.sum(2)).sum(0).mean(), value)
        yield Update(("posterior",), -(self._slopes(drawn) * log_q).sum((0, 2)).mean(), value)

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """Minus the bound, estimated from fresh samples."""
        drawn = self._draw(batch, generator)
        terms = _at(drawn.following + drawn.emissions - drawn.log_q, drawn.states)
        return {"objective": -self._bound(terms.sum(2)).mean()}

    def _bound(self, log_weights: Float[Tensor, "samples batch"]) -> Float[Tensor, " batch"]:
        return torch.logsumexp(log_weights, 0) - math.log(self.samples)

    @torch.no_grad()
    def _slopes(self, drawn: _Drawn) -> Float[Tensor, "samples batch steps"]:
        """What each state's score is multiplied by: rewards, and the derivative of the weights themselves."""
        on_transitions, on_entropy = self._weights()
        q, states, order = drawn.q, drawn.states, self.model.options.order
        alone = drawn.emissions - on_entropy * drawn.log_q
        following = on_transitions * drawn.following
        expected = (drawn.log_q.exp() * (following + alone)).sum(3)
        transitions, rest = _at(following, states), _at(alone, states)
        log_weights = (transitions + rest).sum(2)
        later = q.consequences(transitions, order) + q.consequences(rest, 0)
        others = (later.sum(0) - later) / (self.samples - 1)
        replaced = log_weights.unsqueeze(2) + (expected - transitions - rest) + (others - later)
        own = torch.eye(self.samples, dtype=torch.bool, device=states.device).unsqueeze(2)
        without = torch.logsumexp(log_weights.unsqueeze(0).masked_fill(own, -math.inf), 1)
        baseline = torch.logaddexp(without.unsqueeze(2), replaced)
        rewards = torch.logsumexp(log_weights, 0).unsqueeze(1) - baseline
        return rewards - on_entropy * log_weights.softmax(0).unsqueeze(2)
