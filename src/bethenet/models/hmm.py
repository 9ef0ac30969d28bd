"""`UndirectedHMM`: a hidden Markov model of order M whose factors are all pairwise (section 4.3 of the paper)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.graph import FactorGraph
from bethenet.models.chain_bp import ChainBeliefPropagation, ChainBeliefs, ChainMessages
from bethenet.models.chain_kikuchi import ChainKikuchi
from bethenet.models.chain_tables import ChainTables
from bethenet.models.hidden_chain import HiddenChain, HMMOptions, ResidualNorm, Sentences, split


class BetheLikelihood(NamedTuple):
    """What `UndirectedHMM.bethe_log_likelihood` says of a batch of sentences."""

    log_likelihood: Float[Tensor, " batch"]
    """Approximation of log P(sentence | its length) in nats; differentiable."""
    free: ChainMessages
    """Of the chains without words, to go on from."""
    residual: Float[Tensor, " rows"]
    """Of the sentences, then of the chains without words."""


class UndirectedHMM(HiddenChain):
    """States joined to each of their M predecessors by a table that depends only on the distance; words emitted.

    log Psi_lag(k1, k2) = r_{k2} . LayerNorm([a_lag; e_{k1}] + MLP([a_lag; e_{k1}])): the paper's parameterisation.
    Nothing joins the ends of a sentence to its outside, and the model is normalised for each length by itself.

    >>> model = UndirectedHMM(vocabulary=20, options=HMMOptions(states=4, order=2, embedding=8))
    >>> words = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(0))
    >>> model.log_likelihood(words).shape, model.posterior(words).shape
    (torch.Size([3]), torch.Size([3, 7, 4]))
    """

    def __init__(self, vocabulary: int, options: HMMOptions | None = None) -> None:
        options = HMMOptions() if options is None else options
        super().__init__(vocabulary, options)
        size = 2 * options.embedding
        self.lag_embeddings = nn.Parameter(torch.randn(options.order, options.embedding))
        self.pair_transform = ResidualNorm(size, options.dropout)
        self.target_embeddings = nn.Parameter(torch.randn(options.states, size) / size**0.5)

    def transitions(self) -> Float[Tensor, "order states states"]:
        """Log-potentials (nats) of z_{t-lag} = k1, z_t = k2, lag 1 first."""
        order, states = self.options.order, self.options.states
        lags = self.lag_embeddings.unsqueeze(1).expand(order, states, -1)
        sources = self.state_embeddings.unsqueeze(0).expand(order, states, -1)
        return self.pair_transform(torch.cat([lags, sources], 2)) @ self.target_embeddings.T

    def tables(self) -> ChainTables:
        """See `HiddenChain.tables`."""
        return ChainTables.pairwise(self.transitions())

    def coupling_sizes(self) -> Float[Tensor, " order"]:
        """Standard deviation (nats) of each lag's double-centred log-potentials.

        What rows and columns contribute by themselves joins nothing: a lag of size 0 might as well be absent.
        """
        tables = self.transitions().detach()
        centred = tables - tables.mean(1, keepdim=True) - tables.mean(2, keepdim=True) + tables.mean((1, 2), True)
        return centred.square().mean((1, 2)).sqrt()

    def bethe(
        self,
        words: Int[Tensor, "batch steps"] | None,
        engine: ChainBeliefPropagation | ChainKikuchi,
        *,
        steps: int | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        messages: ChainMessages | None = None,
    ) -> ChainBeliefs:
        """Belief propagation or Kikuchi's in the chains given ``words``, or in one chain of ``steps`` steps without.

        ``log_z`` of the result is differentiable in the model's parameters.
        """
        if words is not None:
            return engine.run(self.unary(words), self.transitions(), lengths, messages=messages)
        transitions = self.transitions()
        unary = transitions.new_zeros(1, self.options.length if steps is None else steps, self.options.states)
        return engine.run(unary, transitions, messages=messages)

    def bethe_log_likelihood(
        self, data: Sentences, engine: ChainBeliefPropagation | ChainKikuchi, free: ChainMessages | None = None
    ) -> BetheLikelihood:
        """Bethe's or Kikuchi's approximation of `log_likelihood` (nats): -l_F of the paper, both log Z by ``engine``.

        Args:
            data: sentences. Of equal length: the chain without words is one more row of the batch. Padded: there is
                one such row for each sentence.
            engine: what infers.
            free: messages to start the rows without words from: an earlier result's ``free``, for the same lengths.
        """
        words, lengths = split(data)
        batch = len(words)
        unary = self.unary(words)
        rows = torch.zeros_like(unary if lengths is not None else unary[:1])
        both = None if lengths is None else torch.cat([lengths, lengths])
        start = None if free is None else free.after(batch)
        found = engine.run(torch.cat([unary, rows]), self.transitions(), both, messages=start)
        return BetheLikelihood(
            found.log_z[:batch] - found.log_z[batch:], found.messages.from_row(batch), found.residual
        )

    def _scopes(self, steps: int) -> FactorGraph:
        return FactorGraph.chain(steps, self.options.states, self.options.order, unary=False)

    def _graph_tables(self, graph: FactorGraph) -> list[Tensor]:
        if not graph.factor_groups:
            return []
        # all pairs have one table shape, so they are one group; its lags one after the other
        steps = graph.num_variables
        reach = range(1, min(self.options.order, steps - 1) + 1)
        device = self.lag_embeddings.device
        lag_of_edge = torch.cat([torch.full((steps - lag,), lag - 1, device=device) for lag in reach])
        return [self.transitions()[lag_of_edge].unsqueeze(0)]
