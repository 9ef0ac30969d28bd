"""Inference networks for variational learning: distributions over a chain's hidden states, given its sentence.

The two of section 4.3 of the paper: `MeanFieldPosterior`, in which states are independent, and `FirstOrderPosterior`,
the posterior of a first-order hidden Markov model whose parameters depend on the sentence. Both are sampled exactly,
and their entropies are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.models.hidden_chain import ResidualNorm
from bethenet.networks.symbolic import BidirectionalLSTM
from bethenet.numerics import negative_entropy_terms


class StateDistribution(Protocol):
    """A distribution over the states of each sentence of a batch."""

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Int[Tensor, "samples batch steps"]:
        """Independent samples; constants."""
        ...

    def log_prob(self, states: Int[Tensor, "samples batch steps"]) -> Float[Tensor, "samples batch"]:
        """Log-probabilities (nats), differentiable in the network's parameters."""
        ...

    def entropy(self) -> Float[Tensor, " batch"]:
        """In nats, exact and differentiable."""
        ...


@dataclass(frozen=True)
class Independent:
    """Independent states."""

    log_marginals: Float[Tensor, "batch steps states"]

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Int[Tensor, "samples batch steps"]:
        """See `StateDistribution`."""
        batch, steps, _ = self.log_marginals.shape
        chances = self.log_marginals.detach().exp().flatten(0, 1)
        drawn = torch.multinomial(chances, samples, replacement=True, generator=generator)
        return drawn.T.reshape(samples, batch, steps)

    def log_prob(self, states: Int[Tensor, "samples batch steps"]) -> Float[Tensor, "samples batch"]:
        """See `StateDistribution`."""
        tables = self.log_marginals.expand(len(states), -1, -1, -1)
        return tables.gather(3, states.unsqueeze(3)).squeeze(3).sum(2)

    def entropy(self) -> Float[Tensor, " batch"]:
        """See `StateDistribution`."""
        return -negative_entropy_terms(self.log_marginals).sum((1, 2))


@dataclass(frozen=True)
class MarkovChain:
    """A chain of states, factored from its end: P(z_T) prod_t P(z_t | z_{t+1})."""

    log_last: Float[Tensor, "batch states"]
    log_previous: Float[Tensor, "batch links states states"]
    """Log P(z_t = i | z_{t+1} = j) at ``[:, t, i, j]``."""

    @classmethod
    def posterior(
        cls,
        log_first: Float[Tensor, "batch states"],
        log_transitions: Float[Tensor, "batch states states"],
        unary: Float[Tensor, "batch steps states"],
    ) -> MarkovChain:
        """Of a first-order hidden Markov model, by the forward algorithm."""
        message = log_first + unary[:, 0]
        links = []
        for step in range(1, unary.shape[1]):
            joint = message.unsqueeze(2) + log_transitions
            total = torch.logsumexp(joint, 1)
            links.append(joint - total.unsqueeze(1))
            message = total + unary[:, step]
        batch, states = log_first.shape
        previous = torch.stack(links, 1) if links else log_first.new_zeros(batch, 0, states, states)
        return cls(message.log_softmax(1), previous)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Int[Tensor, "samples batch steps"]:
        """See `StateDistribution`."""
        batch, links, states = self.log_previous.shape[:3]
        current = torch.multinomial(self.log_last.detach().exp(), samples, replacement=True, generator=generator)
        path = [current]
        chances = self.log_previous.detach().exp().mT
        for link in reversed(range(links)):
            rows = chances[:, link].gather(1, current.unsqueeze(2).expand(-1, -1, states))
            current = torch.multinomial(rows.flatten(0, 1), 1, generator=generator).reshape(batch, samples)
            path.append(current)
        return torch.stack(path[::-1], 2).transpose(0, 1)

    def log_prob(self, states: Int[Tensor, "samples batch steps"]) -> Float[Tensor, "samples batch"]:
        """See `StateDistribution`."""
        samples, count = len(states), self.log_last.shape[1]
        last = self.log_last.expand(samples, -1, -1).gather(2, states[:, :, -1:]).squeeze(2)
        pairs = (states[:, :, :-1] * count + states[:, :, 1:]).unsqueeze(3)
        tables = self.log_previous.flatten(2).expand(samples, -1, -1, -1)
        return last + tables.gather(3, pairs).squeeze(3).sum(2)

    def entropy(self) -> Float[Tensor, " batch"]:
        """See `StateDistribution`."""
        marginals = self.log_last.exp()
        total = -negative_entropy_terms(self.log_last).sum(1)
        chances, entropies = self.log_previous.exp(), -negative_entropy_terms(self.log_previous).sum(2)
        for link in reversed(range(chances.shape[1])):
            total = total + (marginals * entropies[:, link]).sum(1)
            marginals = (chances[:, link] @ marginals.unsqueeze(2)).squeeze(2)
        return total


@dataclass(frozen=True)
class PosteriorOptions:
    """Sizes of a posterior network."""

    word: int = 100
    """Of the words' embeddings."""
    width: int = 100
    """Of the LSTM, each way."""
    layers: int = 2
    dropout: float = 0.0
    """Between the LSTM's layers."""
    state: int = 100
    """Of the states' embeddings (`FirstOrderPosterior`)."""


class MeanFieldPosterior(nn.Module):
    """q(z_t | sentence) = softmax(Q LayerNorm(e_{x_t} + h_t)), h_t from a bidirectional LSTM; independent states.

    Args:
        vocabulary: how many words there are.
        states: of each hidden variable.
        options: sizes. Embeddings not as wide as the LSTM's two ways together are mapped there.
    """

    def __init__(self, vocabulary: int, states: int, options: PosteriorOptions | None = None) -> None:
        super().__init__()
        options = options or PosteriorOptions()
        self.words = nn.Embedding(vocabulary, options.word)
        self.sequence = BidirectionalLSTM(options.word, options.width, options.layers, options.dropout)
        width = self.sequence.width
        self.enter = nn.Identity() if options.word == width else nn.Linear(options.word, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, states, bias=False)

    def forward(self, words: Int[Tensor, "batch steps"]) -> Independent:
        """The posterior of each sentence."""
        embedded = self.words(words)
        hidden = self.norm(self.enter(embedded) + self.sequence(embedded))
        return Independent(self.readout(hidden).log_softmax(2))


class FirstOrderPosterior(nn.Module):
    """The posterior of a first-order neural hidden Markov model (`DirectedHMM`) that is made for the sentence: the mean
    state of a bidirectional LSTM over the sentence is put behind the embedding of each hidden state.

    Args:
        vocabulary: how many words there are.
        states: of each hidden variable.
        options: sizes.
    """

    def __init__(self, vocabulary: int, states: int, options: PosteriorOptions | None = None) -> None:
        super().__init__()
        options = options or PosteriorOptions()
        self.words = nn.Embedding(vocabulary, options.word)
        self.sequence = BidirectionalLSTM(options.word, options.width, options.layers, options.dropout)
        size = options.state + self.sequence.width
        # the last one stands before the start
        self.symbols = nn.Parameter(torch.randn(states + 1, options.state))
        self.history_transform = ResidualNorm(size)
        self.next_states = nn.Parameter(torch.randn(states, size) / size**0.5)
        self.emission_transform = ResidualNorm(size)
        self.emissions = nn.Parameter(torch.randn(vocabulary, size) / size**0.5)

    def forward(self, words: Int[Tensor, "batch steps"]) -> MarkovChain:
        """The posterior of each sentence."""
        context = self.sequence(self.words(words)).mean(1)
        symbols = self.symbols.expand(len(words), -1, -1)
        inputs = torch.cat([symbols, context.unsqueeze(1).expand(-1, symbols.shape[1], -1)], 2)
        transitions = (self.history_transform(inputs) @ self.next_states.T).log_softmax(2)
        hidden = self.emission_transform(inputs[:, :-1])
        normaliser = torch.logsumexp(hidden @ self.emissions.T, 2)
        unary = self.emissions[words] @ hidden.mT - normaliser.unsqueeze(1)
        return MarkovChain.posterior(transitions[:, -1], transitions[:, :-1], unary)


class InputBaseline(nn.Module):
    """What a reward is expected to be, given the sentence alone: a sum over its words.

    Args:
        vocabulary: how many words there are.
        size: of the words' embeddings and of the hidden layer.
    """

    def __init__(self, vocabulary: int, size: int = 64) -> None:
        super().__init__()
        last = nn.Linear(size, 1)
        # at the start every word is as probable as every other
        nn.init.constant_(last.bias, -math.log(vocabulary))
        self.values = nn.Sequential(nn.Embedding(vocabulary, size), nn.Linear(size, size), nn.ReLU(), last)

    def forward(self, words: Int[Tensor, "batch steps"]) -> Float[Tensor, " batch"]:
        """In nats."""
        total: Tensor = self.values(words).sum((1, 2))
        return total
