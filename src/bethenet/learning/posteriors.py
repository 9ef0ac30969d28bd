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
from torch.nn import functional

from bethenet.models.hidden_chain import ResidualNorm
from bethenet.networks.symbolic import BidirectionalLSTM
from bethenet.numerics import negative_entropy_terms


class StateDistribution(Protocol):
    """A distribution over the states of each sentence of a batch."""

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Int[Tensor, "samples batch steps"]:
        """Independent samples; constants."""
        ...

    def conditionals(
        self, states: Int[Tensor, "samples batch steps"]
    ) -> Float[Tensor, "samples batch steps hidden_states"]:
        """Log P(z_t = k | the states before t) at each step, differentiable in the network's parameters."""
        ...

    def marginals(self) -> Float[Tensor, "batch steps hidden_states"]:
        """P(z_t = k), differentiable."""
        ...

    def entropy(self) -> Float[Tensor, " batch"]:
        """In nats, exact and differentiable."""
        ...

    def consequences(
        self, terms: Float[Tensor, "samples batch steps"], order: int
    ) -> Float[Tensor, "samples batch steps"]:
        """The sums of the later terms that z_t has a part in.

        Args:
            terms: term t depends on z_t and on the ``order`` states before it.
            order: at least 0.
        """
        ...


@dataclass(frozen=True)
class Independent:
    """Independent states."""

    log_marginals: Float[Tensor, "batch steps hidden_states"]

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Int[Tensor, "samples batch steps"]:
        """See `StateDistribution`."""
        return _race(self.log_marginals.detach().exp().expand(samples, -1, -1, -1), generator)

    def conditionals(
        self, states: Int[Tensor, "samples batch steps"]
    ) -> Float[Tensor, "samples batch steps hidden_states"]:
        """See `StateDistribution`."""
        return self.log_marginals.expand(len(states), -1, -1, -1)

    def marginals(self) -> Float[Tensor, "batch steps hidden_states"]:
        """See `StateDistribution`."""
        return self.log_marginals.exp()

    def entropy(self) -> Float[Tensor, " batch"]:
        """See `StateDistribution`."""
        return -negative_entropy_terms(self.log_marginals).sum((1, 2))

    def consequences(
        self, terms: Float[Tensor, "samples batch steps"], order: int
    ) -> Float[Tensor, "samples batch steps"]:
        """See `StateDistribution`: the ``order`` terms after t."""
        return functional.pad(terms, (0, order)).unfold(2, order + 1, 1)[..., 1:].sum(3)


@dataclass(frozen=True)
class MarkovChain:
    """A chain of states: P(z_1) prod_t P(z_{t+1} | z_t)."""

    log_first: Float[Tensor, "batch hidden_states"]
    log_next: Float[Tensor, "batch links hidden_states hidden_states"]
    """Log P(z_{t+1} = j | z_t = i) at ``[:, t, i, j]``."""

    @classmethod
    def posterior(
        cls,
        log_first: Float[Tensor, "batch hidden_states"],
        log_transitions: Float[Tensor, "batch hidden_states hidden_states"],
        unary: Float[Tensor, "batch steps hidden_states"],
    ) -> MarkovChain:
        """Of a first-order hidden Markov model, by the backward algorithm."""
        message = unary[:, -1]
        links = []
        for step in reversed(range(unary.shape[1] - 1)):
            joint = log_transitions + message.unsqueeze(1)
            total = torch.logsumexp(joint, 2)
            links.append(joint - total.unsqueeze(2))
            message = total + unary[:, step]
        batch, states = log_first.shape
        following = torch.stack(links[::-1], 1) if links else log_first.new_zeros(batch, 0, states, states)
        return cls((log_first + message).log_softmax(1), following)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Int[Tensor, "samples batch steps"]:
        """See `StateDistribution`."""
        current = _race(self.log_first.detach().exp().expand(samples, -1, -1), generator)
        path = [current]
        sentences = torch.arange(len(self.log_first), device=self.log_first.device)
        for chances in self.log_next.detach().exp().unbind(1):
            current = _race(chances[sentences, current], generator)
            path.append(current)
        return torch.stack(path, 2)

    def conditionals(
        self, states: Int[Tensor, "samples batch steps"]
    ) -> Float[Tensor, "samples batch steps hidden_states"]:
        """See `StateDistribution`."""
        samples, _, steps = states.shape
        links, count = self.log_next.expand(samples, -1, -1, -1, -1), self.log_first.shape[1]
        before = states[:, :, : steps - 1, None, None].expand(-1, -1, -1, 1, count)
        first = self.log_first.expand(samples, -1, -1).unsqueeze(2)
        return torch.cat([first, links.gather(3, before).squeeze(3)], 2)

    def marginals(self) -> Float[Tensor, "batch steps hidden_states"]:
        """See `StateDistribution`."""
        current = self.log_first.exp()
        found = [current]
        for chances in self.log_next.exp().unbind(1):
            current = (current.unsqueeze(1) @ chances).squeeze(1)
            found.append(current)
        return torch.stack(found, 1)

    def entropy(self) -> Float[Tensor, " batch"]:
        """See `StateDistribution`."""
        links = -negative_entropy_terms(self.log_next).sum(3)
        return (self.marginals()[:, :-1] * links).sum((1, 2)) - negative_entropy_terms(self.log_first).sum(1)

    def consequences(
        self, terms: Float[Tensor, "samples batch steps"], order: int
    ) -> Float[Tensor, "samples batch steps"]:
        """See `StateDistribution`: all terms after t, since every later state goes back to z_t."""
        return terms.flip(2).cumsum(2).flip(2) - terms


def _race(chances: Float[Tensor, "*batch states"], generator: torch.Generator | None) -> Int[Tensor, "*batch"]:
    """A state drawn from each row: the first to arrive of independent exponential times with these rates.

    `torch.multinomial` does the same, but waits for the device.
    """
    times = torch.empty(chances.shape, dtype=chances.dtype, device=chances.device).exponential_(generator=generator)
    return (chances / times).argmax(-1)


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
    """What the term of each transition is expected to be, given the sentence alone: a sum over lags of bilinear forms
    in what a posterior says about the step and about the one so many steps before.

    It reads the sentence through the posterior's marginals: a network that reads the words learns it more slowly than
    posterior and model change.

    Args:
        states: of each hidden variable.
        order: how many steps back are read.
    """

    def __init__(self, states: int, order: int) -> None:
        super().__init__()
        # before the first step stands a state of its own
        self.tables = nn.Parameter(torch.full((order, states + 1, states), -math.log(states) / order))

    def forward(self, marginals: Float[Tensor, "batch steps states"]) -> Float[Tensor, "batch steps"]:
        """In nats."""
        order, steps = len(self.tables), marginals.shape[1]
        before = functional.pad(functional.pad(marginals, (0, 1)), (0, 0, order, 0))
        before[:, :order, -1].fill_(1)
        terms = [
            ((before[:, order - lag : order - lag + steps] @ table) * marginals).sum(2)
            for lag, table in enumerate(self.tables, start=1)
        ]
        return torch.stack(terms).sum(0)
