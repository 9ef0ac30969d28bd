"""Enumeration of short chains: the truth for the dynamic programmes and for belief propagation."""

import itertools

import torch
from torch import Tensor

from bethenet import FactorGraph, LogPotentials
from bethenet.models.chain_tables import ChainTables


def random_tables(kind: str, order: int, states: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, ChainTables]:
    """(the numbers, the tables made of them); differentiable."""
    generator = torch.Generator().manual_seed(seed)
    shape = (order, states, states) if kind == "pairwise" else (*[states + 1] * order, states)
    numbers = (torch.randn(shape, dtype=torch.float64, generator=generator) * scale).requires_grad_()
    return numbers, ChainTables.pairwise(numbers) if kind == "pairwise" else ChainTables.full(numbers)


def random_unary(batch: int, steps: int, states: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, steps, states, dtype=torch.float64, generator=generator).requires_grad_()


def path_scores(kind: str, numbers: Tensor, unary: Tensor) -> tuple[Tensor, Tensor]:
    """All sequences [sequences, steps] and their log-potentials [batch, sequences], step by step in plain Python."""
    batch, steps, states = unary.shape
    paths = torch.tensor(list(itertools.product(range(states), repeat=steps)))
    order = numbers.shape[0] if kind == "pairwise" else numbers.dim() - 1
    total = torch.zeros(batch, len(paths), dtype=torch.float64)
    for step in range(steps):
        here = paths[:, step]
        total = total + unary[:, step, here]
        if kind == "pairwise":
            for lag in range(1, min(order, step) + 1):
                total = total + numbers[lag - 1, paths[:, step - lag], here]
        else:
            start = torch.full_like(here, states)
            history = [paths[:, step - lag] if lag <= step else start for lag in range(order, 0, -1)]
            total = total + numbers[(*history, here)]
    return paths, total


def potentials_of(unary, transitions):
    """The same chains for the general nouns: lag 1's edges first, as ``FactorGraph.chain`` numbers them."""
    _, steps, states = unary.shape
    order = transitions.shape[0]
    graph = FactorGraph.chain(steps, states, order, unary=False)
    rows = torch.cat([torch.full((steps - lag,), lag - 1) for lag in range(1, min(order, steps - 1) + 1)])
    return LogPotentials(graph, [transitions[rows].unsqueeze(0)], [unary])
