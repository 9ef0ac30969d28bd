"""What the experiments with hidden Markov models measure: exact likelihoods, sizes of couplings, and a control."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from bethenet.data import Corpus, SentenceBatches, Sentences
from bethenet.models import DirectedHMM, UndirectedHMM
from bethenet.models.chain_dp import prefix_log_z
from bethenet.models.hidden_chain import HiddenChain


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Float32 matrix products have this precision inside the context, see `torch.set_float32_matmul_precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
@matmul_precision("highest")
def exact_nll(model: HiddenChain, sentences: SentenceBatches) -> float:
    """Mean of -log P(sentence | its length) in nats, by the dynamic programme in arithmetic that is safe for it.

    As many sentences are taken at a time as fit, so that a model of any size of which one sentence fits is evaluated.
    """
    if not sentences.equal_length:
        raise ValueError("expected minibatches of sentences of equal length, got padded ones")
    was_training = model.training
    model.eval()
    device = model.state_embeddings.device
    tables, emissions = model.tables(), model.emission_log_probabilities().T
    longest = int(sentences.sentences.lengths.max())
    limit = model.options.memory_limit
    # of every length; a directed model's are 0
    free = prefix_log_z(emissions.new_zeros(1, longest, tables.states), tables, memory_limit=limit)[0].double()
    total = torch.zeros((), dtype=torch.float64, device=device)
    words: Any
    for words in sentences:
        unary = functional.embedding(words.to(device), emissions)
        given = prefix_log_z(unary, tables, memory_limit=limit)[:, -1].double()
        total += (free[words.shape[1] - 1] - given).sum()
    model.train(was_training)
    return float(total) / len(sentences.sentences)


@torch.no_grad()
def coupling_sizes(model: HiddenChain) -> list[float]:
    """Standard deviation (nats) of each lag's double-centred log-potentials, the shortest lag first.

    Of a directed model: of its log-transitions averaged over the other states of the history.
    """
    if isinstance(model, UndirectedHMM):
        return [float(size) for size in model.coupling_sizes()]
    if not isinstance(model, DirectedHMM):
        raise ValueError(f"expected a directed or an undirected model, got {type(model).__name__}")
    order, states = model.options.order, model.options.states
    table = model.transition_log_probabilities()[(slice(0, states),) * order]
    sizes = []
    for lag in range(1, order + 1):
        others = [axis for axis in range(order) if axis != order - lag]
        pairs = table.mean(others) if others else table
        centred = pairs - pairs.mean(0, keepdim=True) - pairs.mean(1, keepdim=True) + pairs.mean()
        sizes.append(float(centred.square().mean().sqrt()))
    return sizes


def unigram_nll(corpus: Corpus) -> dict[str, Any]:
    """The control that knows how often each word is used, and no more (each word counted once more than it stands)."""
    counts = torch.bincount(corpus.train.words, minlength=len(corpus.vocabulary)).double() + 1
    log_chances = (counts / counts.sum()).log()

    def nll(sentences: Sentences) -> float:
        return float(-log_chances[sentences.words].sum()) / len(sentences)

    return {"nll_validation": nll(corpus.validation), "nll_test": nll(corpus.test)}
