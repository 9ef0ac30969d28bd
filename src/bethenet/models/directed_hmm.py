"""`DirectedHMM`: a hidden Markov model of order M in which every factor is a conditional distribution."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bethenet.graph import FactorGraph
from bethenet.models.chain_memory import check_tables
from bethenet.models.chain_tables import ChainTables
from bethenet.models.hidden_chain import HiddenChain, HMMOptions, ResidualNorm, Sentences, split


class DirectedHMM(HiddenChain):
    """P(z_t | z_{t-M}, ..., z_{t-1}) = softmax(U LayerNorm([e; ...; e] + MLP([e; ...; e]))): section 4.3 of the paper.

    Before the first state stands a start symbol, with an embedding of its own. The table has (K + 1)^M rows.

    >>> model = DirectedHMM(vocabulary=20, options=HMMOptions(states=4, order=2, embedding=8))
    >>> model.transition_log_probabilities().shape
    torch.Size([5, 5, 4])
    """

    def __init__(self, vocabulary: int, options: HMMOptions | None = None) -> None:
        options = HMMOptions() if options is None else options
        super().__init__(vocabulary, options)
        size = options.order * options.embedding
        self.start_embedding = nn.Parameter(torch.randn(1, options.embedding))
        self.history_transform = ResidualNorm(size, options.dropout)
        self.next_states = nn.Parameter(torch.randn(options.states, size) / size**0.5)

    def transition_log_probabilities(self) -> Float[Tensor, "*history states"]:
        """Log P(z_t | history), ``[states + 1] * order + [states]``: z_{t-M} first, the start symbol last on each axis.

        Rows with a start symbol after a state are there and never read.

        Raises:
            MemoryLimitError: the table and what its gradient needs would not fit.
        """
        order, states, size = self.options.order, self.options.states, self.next_states.shape[1]
        # a row a history: its embeddings, what the transformation keeps for its gradient, logits and probabilities
        check_tables((states + 1) ** order * (6 * size + 3 * states), self.next_states, order, states)
        symbols = torch.cat([self.state_embeddings, self.start_embedding])
        histories = self.history_transform.of_tuples(symbols, order)
        return functional.log_softmax(histories @ self.next_states.T, -1)

    def tables(self) -> ChainTables:
        """See `HiddenChain.tables`."""
        return ChainTables.full(self.transition_log_probabilities())

    def log_partition(self, steps: int) -> Float[Tensor, " steps"]:
        """Zeros: the model is normalised."""
        return self.next_states.new_zeros(steps)

    def log_likelihood(self, data: object) -> Float[Tensor, " batch"]:
        """Log P(sentence | its length) in nats, exact and differentiable."""
        return self.score(data)

    def next_log_probabilities(self, states: Int[Tensor, "*batch steps"]) -> Float[Tensor, "*batch steps states"]:
        """Log P(z_t = k | the states before t) at each step of given sequences of states. Only the histories that occur
        are transformed, not all (K + 1)^M.
        """
        order, steps = self.options.order, states.shape[-1]
        before = functional.pad(states, (order, 0), value=self.options.states)
        symbols = torch.cat([self.state_embeddings, self.start_embedding])
        histories = functional.embedding(before.unfold(-1, order, 1)[..., :steps, :], symbols).flatten(-2)
        return functional.log_softmax(self.history_transform(histories) @ self.next_states.T, -1)

    def joint_log_likelihood(self, data: Sentences, states: Int[Tensor, "batch steps"]) -> Float[Tensor, " batch"]:
        """Log P(sentence, states | its length) in nats. Only the histories that occur are transformed."""
        words, lengths = split(data)
        terms = self.next_log_probabilities(states) + self.unary(words)
        terms = terms.gather(2, states.unsqueeze(2)).squeeze(2)
        if lengths is not None:
            terms = terms * (torch.arange(words.shape[1], device=words.device) < lengths.unsqueeze(1))
        return terms.sum(1)

    def _scopes(self, steps: int) -> FactorGraph:
        order = self.options.order
        scopes = [list(range(max(0, step - order), step + 1)) for step in range(steps)]
        return FactorGraph([self.options.states] * steps, scopes)

    def _graph_tables(self, graph: FactorGraph) -> list[Tensor]:
        tables, states = self.tables(), self.options.states
        shaped = [table.reshape(1, 1, *[states] * (step + 1)) for step, table in enumerate(tables.starts)]
        shaped.append(tables.far.reshape(1, 1, *[states] * (tables.order + 1)))
        return shaped[: len(graph.factor_groups)]
