"""How far approximate marginals of binary models are from the true ones: the paper's measures."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs


class Marginals(NamedTuple):
    """What the paper compares: single and joint probabilities of state 1."""

    nodes: Float[Tensor, "batch variables"]
    """P(x_i = 1)."""
    pairs: Float[Tensor, "batch edges"]
    """P(x_i = 1, x_j = 1) of every pairwise factor."""

    @property
    def together(self) -> Float[Tensor, "batch entries"]:
        """Nodes, then pairs."""
        return torch.cat([self.nodes, self.pairs], dim=1)


class Accuracy(NamedTuple):
    """Correlation and mean absolute difference, a figure for each batch member."""

    correlation: Float[Tensor, " batch"]
    mean_l1: Float[Tensor, " batch"]


def marginals_of_ones(beliefs: Beliefs) -> Marginals:
    """The paper's marginals of a binary model with pairwise factors."""
    graph = beliefs.graph
    wrong = [group.states for group in graph.variable_groups if group.states != 2]
    if wrong:
        raise ValueError(f"expected binary variables, got variables with {wrong[0]} states")
    pairs = [
        table[..., 1, 1]
        for table, group in zip(beliefs.factor_marginals, graph.factor_groups, strict=True)
        if group.arity == 2
    ]
    nodes = beliefs.node_marginals[..., 1]
    return Marginals(nodes, torch.cat(pairs, dim=1) if pairs else nodes[:, :0])


def accuracy(approximate: Float[Tensor, "batch entries"], true: Float[Tensor, "batch entries"]) -> Accuracy:
    """Pearson's correlation over the entries of each member, and the mean of their absolute differences."""
    approximate, true = approximate.double(), true.double().to(approximate.device)
    a = approximate - approximate.mean(1, keepdim=True)
    b = true - true.mean(1, keepdim=True)
    correlation = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    return Accuracy(correlation, (approximate - true).abs().mean(1))
