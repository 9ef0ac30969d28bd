"""A network that reads sentences and says the marginals of a chain's hidden states, one a word."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.networks.symbolic import BidirectionalLSTM


@dataclass(frozen=True)
class MarginalNetworkOptions:
    """Sizes of a `MarginalNetwork`."""

    word: int = 100
    """Of the words' embeddings."""
    node: int = 50
    """Of the places' embeddings."""
    length: int = 50
    """Of the sentence lengths' embeddings."""
    width: int = 100
    """Of the LSTM, each way."""
    layers: int = 1
    dropout: float = 0.0
    """Of the embeddings and of what the LSTM says."""


class MarginalNetwork(nn.Module):
    """A bidirectional LSTM over embeddings of word, place and sentence length; then logits of the states.

    It can be given marginals to improve on; what it says is added to them. Its last layer starts at zero: an untrained
    network repeats what it was given, or says that all states are alike.

    Args:
        vocabulary: how many words there are.
        states: of each hidden variable.
        max_length: of sentences.
        options: sizes.
    """

    def __init__(
        self, vocabulary: int, states: int, max_length: int, options: MarginalNetworkOptions | None = None
    ) -> None:
        super().__init__()
        options = options or MarginalNetworkOptions()
        self.states = states
        self.word = nn.Embedding(vocabulary, options.word)
        self.node = nn.Embedding(max_length, options.node)
        self.length = nn.Embedding(max_length + 1, options.length)
        self.dropout = nn.Dropout(options.dropout)
        self.sequence = BidirectionalLSTM(
            options.word + options.node + options.length, options.width, options.layers, options.dropout
        )
        self.readout = nn.Linear(self.sequence.width, states)
        nn.init.zeros_(self.readout.weight)
        nn.init.zeros_(self.readout.bias)

    def forward(
        self,
        words: Int[Tensor, "batch steps"],
        log_marginals: Float[Tensor, "batch steps states"] | None = None,
    ) -> Float[Tensor, "batch steps states"]:
        """Log-marginals, differentiable in the network's parameters.

        Args:
            words: sentences of equal length.
            log_marginals: what to improve on.
        """
        steps = words.shape[1]
        if steps >= self.length.num_embeddings:
            raise ValueError(f"expected sentences of at most {self.length.num_embeddings - 1} words, got {steps}")
        place = self.node(torch.arange(steps, device=words.device)).expand(len(words), -1, -1)
        length = self.length(torch.full_like(words, steps))
        inputs = self.dropout(torch.cat([self.word(words), place, length], 2))
        logits: Tensor = self.readout(self.dropout(self.sequence(inputs)))
        return (logits if log_marginals is None else logits + log_marginals).log_softmax(2)
