"""What the directed and the undirected hidden Markov model share: emissions, and everything exact.

*Data* are sentences: an integer tensor ``words`` ``[batch, steps]``, or a pair ``(words, lengths)`` where sentences of
different lengths were padded (with any word: padding changes no number).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bethenet.graph import FactorGraph
from bethenet.models.base import Model
from bethenet.models.chain_dp import Domain, log_z, prefix_log_z
from bethenet.models.chain_paths import best_path, sample_paths
from bethenet.models.chain_tables import ChainTables
from bethenet.potentials import LogPotentials

Sentences = Any
"""``words`` or ``(words, lengths)``."""


class ResidualNorm(nn.Module):
    """``LayerNorm(x + MLP(x))``, the paper's transformation of embeddings."""

    def __init__(self, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.rest = nn.Sequential(nn.ReLU(), nn.Dropout(dropout), nn.Linear(size, size))
        self.norm = nn.LayerNorm(size)

    def forward(self, values: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        """The same shape out."""
        return self.norm(values + self.rest(self.first(values)))

    def of_tuples(self, symbols: Float[Tensor, "symbols part"], arity: int) -> Float[Tensor, "*tuples size"]:
        """The transformation of the concatenation of every ``arity`` symbols: ``[symbols] * arity + [size]``.

        A linear layer of a concatenation is a sum of linear layers, so the first one is done for the symbols alone.
        """
        count, part = symbols.shape
        blocks = self.first.weight.reshape(-1, arity, part)
        hidden: Tensor = self.first.bias
        values = []
        for axis in range(arity):
            shape = [1] * axis + [count] + [1] * (arity - axis - 1) + [-1]
            hidden = hidden + (symbols @ blocks[:, axis].T).reshape(shape)
            values.append(symbols.reshape(shape).expand(*[count] * arity, part))
        return self.norm(torch.cat(values, -1) + self.rest(hidden))


class Emissions(nn.Module):
    """P(word | state) = softmax(W LayerNorm(e_k + MLP(e_k))), over the whole vocabulary."""

    def __init__(self, vocabulary: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.transform = ResidualNorm(size, dropout)
        self.words = nn.Parameter(torch.randn(vocabulary, size) / size**0.5)

    def forward(self, embeddings: Float[Tensor, "states size"]) -> Float[Tensor, "states words"]:
        """Log-probabilities."""
        return functional.log_softmax(self.transform(embeddings) @ self.words.T, dim=1)


@dataclass(frozen=True)
class HMMOptions:
    """Sizes of a hidden Markov model and how its exact inference is done."""

    states: int = 30
    order: int = 3
    embedding: int = 200
    """Size of the state embeddings."""
    dropout: float = 0.0
    length: int = 30
    """Steps of the graph that stands for the model where no sentence is given."""
    domain: Domain = "auto"
    """Arithmetic of exact inference: see ``chain_dp.prefix_log_z``."""
    memory_limit: int | None = None
    """Bytes that exact inference may take; by default four fifths of the device's memory."""

    def __post_init__(self) -> None:
        for name in ("states", "order", "embedding", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.order > 4:
            raise ValueError(f"order: expected 1 to 4, got {self.order}")


class HiddenChain(Model):
    """A chain of hidden states of order M, each of which emits a word."""

    def __init__(self, vocabulary: int, options: HMMOptions) -> None:
        super().__init__()
        if vocabulary < 1:
            raise ValueError(f"vocabulary: expected at least one word, got {vocabulary}")
        self.options = options
        self.vocabulary = vocabulary
        self.state_embeddings = nn.Parameter(torch.randn(options.states, options.embedding))
        self.emissions = Emissions(vocabulary, options.embedding, options.dropout)
        self._graphs: dict[int, FactorGraph] = {}

    # --- the model as potentials ------------------------------------------------------------------------------------

    @abstractmethod
    def tables(self) -> ChainTables:
        """What joins the states, in log-potentials (nats)."""

    @abstractmethod
    def _scopes(self, steps: int) -> FactorGraph: ...

    @abstractmethod
    def _graph_tables(self, graph: FactorGraph) -> list[Tensor]: ...

    def emission_log_probabilities(self) -> Float[Tensor, "states words"]:
        """Log P(word | state)."""
        return self.emissions(self.state_embeddings)

    def unary(self, words: Int[Tensor, "batch steps"]) -> Float[Tensor, "batch steps states"]:
        """Log P(word at t | z_t = k) for each step of each sentence."""
        return functional.embedding(words, self.emission_log_probabilities().T)

    @property
    def graph(self) -> FactorGraph:  # type: ignore[override]
        """The chain of ``options.length`` steps."""
        return self.chain_graph(self.options.length)

    def chain_graph(self, steps: int) -> FactorGraph:
        """The factor graph of the hidden states of a sentence of ``steps`` words."""
        if steps not in self._graphs:
            self._graphs[steps] = self._scopes(steps)
        return self._graphs[steps]

    def log_potentials(self, evidence: Any = None) -> LogPotentials:
        """The chain's log-potentials, for any engine.

        Args:
            evidence: words ``[batch, steps]``, which become terms of the nodes; a number of steps, or nothing (then
                ``options.length``), for the chain with no words observed.
        """
        if evidence is None or isinstance(evidence, int):
            graph = self.chain_graph(self.options.length if evidence is None else evidence)
            return LogPotentials(graph, self._graph_tables(graph), finite=True)
        words, lengths = split(evidence)
        if lengths is not None and bool((lengths != words.shape[1]).any()):
            raise ValueError("log_potentials: a graph has one length; expected sentences of equal length, got padded")
        graph = self.chain_graph(words.shape[1])
        return LogPotentials(graph, self._graph_tables(graph), [self.unary(words)], finite=True)

    def unclamped(self, data: Sentences) -> LogPotentials:
        """The chain as long as the sentences, with no words observed."""
        return self.log_potentials(split(data)[0].shape[1])

    def both(self, data: Sentences) -> tuple[LogPotentials, LogPotentials]:
        """The chain with no words observed and those given the sentences, of one draw of dropout."""
        given = self.log_potentials(data)
        return LogPotentials(given.graph, given.tables, finite=True), given

    # --- exact inference --------------------------------------------------------------------------------------------

    def log_partition(self, steps: int) -> Float[Tensor, " steps"]:
        """Log Z (nats) of the chains of 1, 2, ..., ``steps`` steps with no words observed."""
        tables = self.tables()
        return self._prefixes(tables.far.new_zeros(1, steps, tables.states), tables)[0]

    def score(self, data: Sentences) -> Float[Tensor, " batch"]:
        """Log of the unnormalised probability of each sentence (nats), the states summed out exactly."""
        words, lengths = split(data)
        options = self.options
        return log_z(
            self.unary(words), self.tables(), lengths, domain=options.domain, memory_limit=options.memory_limit
        )

    def log_likelihood(self, data: Sentences) -> Float[Tensor, " batch"]:
        """Log P(sentence | its length) in nats, exact and differentiable.

        The chain without words is one more row of the batch.
        """
        words, lengths = split(data)
        unary = self.unary(words)
        prefixes = self._prefixes(torch.cat([unary, torch.zeros_like(unary[:1])]), self.tables())
        if lengths is None:
            return prefixes[:-1, -1] - prefixes[-1, -1]
        last = lengths - 1
        return prefixes[:-1].gather(1, last.unsqueeze(1)).squeeze(1) - prefixes[-1, last]

    def posterior(self, data: Sentences) -> Float[Tensor, "batch steps states"]:
        """P(z_t = k | sentence); zeros at and after a sentence's length. A constant: no gradient flows through it."""
        words, lengths = split(data)
        with torch.no_grad():
            unary, tables = self.unary(words), self.tables()
        with torch.enable_grad():
            unary.requires_grad_()
            options = self.options
            total = log_z(unary, tables, lengths, domain=options.domain, memory_limit=options.memory_limit).sum()
            return torch.autograd.grad(total, unary)[0]

    def most_likely_states(self, data: Sentences) -> tuple[Int[Tensor, "batch steps"], Float[Tensor, " batch"]]:
        """The most probable sequence of states of each sentence (Viterbi for order M) and log P(states | sentence)."""
        words, lengths = split(data)
        options = self.options
        with torch.no_grad():
            unary, tables = self.unary(words), self.tables()
            states, scores = best_path(unary, tables, lengths, memory_limit=options.memory_limit)
            total = log_z(unary, tables, lengths, domain=options.domain, memory_limit=options.memory_limit)
        return states, scores - total

    def joint_log_likelihood(self, data: Sentences, states: Int[Tensor, "batch steps"]) -> Float[Tensor, " batch"]:
        """Log P(sentence, states | its length) in nats: what learning from tagged sentences maximises."""
        words, lengths = split(data)
        tables = self.tables()
        terms = self.unary(words).gather(2, states.unsqueeze(2)).squeeze(2)
        normaliser = self.log_partition(words.shape[1])
        if lengths is None:
            return tables.score(states) + terms.sum(1) - normaliser[-1]
        real = torch.arange(words.shape[1], device=words.device) < lengths.unsqueeze(1)
        terms = torch.where(real, terms, torch.zeros_like(terms))
        return tables.score(states, lengths) + terms.sum(1) - normaliser[lengths - 1]

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sample_states(
        self, data: Sentences, samples: int = 1, generator: torch.Generator | None = None
    ) -> Int[Tensor, "samples batch steps"]:
        """Exact samples of the states given each sentence."""
        words, lengths = split(data)
        with torch.no_grad():
            unary, tables = self.unary(words), self.tables()
        return self._paths(unary, tables, lengths, samples, generator)

    def sample(
        self, count: int, steps: int, generator: torch.Generator | None = None
    ) -> tuple[Int[Tensor, "count steps"], Int[Tensor, "count steps"]]:
        """Exact samples (states, words) of sentences of ``steps`` words."""
        with torch.no_grad():
            tables, emissions = self.tables(), self.emission_log_probabilities().exp()
            unary = tables.far.new_zeros(1, steps, tables.states)
            states = self._paths(unary, tables, None, count, generator)[:, 0]
            words = torch.multinomial(emissions[states.flatten()], 1, generator=generator)
        return states, words.reshape(count, steps)

    def _paths(
        self,
        unary: Tensor,
        tables: ChainTables,
        lengths: Tensor | None,
        samples: int,
        generator: torch.Generator | None,
    ) -> Tensor:
        options = self.options
        return sample_paths(
            unary,
            tables,
            lengths,
            samples=samples,
            domain=options.domain,
            memory_limit=options.memory_limit,
            generator=generator,
        )

    def _prefixes(self, unary: Tensor, tables: ChainTables) -> Tensor:
        return prefix_log_z(unary, tables, domain=self.options.domain, memory_limit=self.options.memory_limit)


def split(data: Sentences) -> tuple[Int[Tensor, "batch steps"], Int[Tensor, " batch"] | None]:
    """(words, lengths or nothing), checked."""
    words, lengths = (data, None) if isinstance(data, Tensor) else data
    if words.dim() != 2 or words.is_floating_point() or words.shape[1] == 0:
        raise ValueError(f"expected integer words [batch, steps], got {words.dtype} of shape {list(words.shape)}")
    if lengths is not None and lengths.shape != words.shape[:1]:
        raise ValueError(f"expected {words.shape[0]} lengths, one a sentence; got shape {list(lengths.shape)}")
    return words, lengths
