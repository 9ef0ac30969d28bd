"""Beliefs about chains of order M that agree with given node marginals: what an inference network's output becomes.

Given the nodes' marginals q, the pairs' beliefs of least free energy are the tables scaled to those marginals
(`bethenet.inference.coupling`). In a chain the scaling factors are belief propagation's cavities: an iteration of
proportional fitting is an iteration of flooding in which every node's belief is held at q. So consistent beliefs are
messages, no table per edge is formed, and belief propagation can go on from them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.models.chain_bp import ChainBeliefs, Passing


def consistent_chain_beliefs(
    unary: Float[Tensor, "batch steps states"],
    transitions: Float[Tensor, "order states states"],
    node_log_marginals: Float[Tensor, "batch steps states"],
    iterations: int = 2,
) -> ChainBeliefs:
    """Bethe beliefs with the given node marginals, of least free energy among those that agree.

    ``log_z`` of the result is minus their free energy, differentiable in the log-potentials with the beliefs held
    constant; its ``messages`` are those to start belief propagation from.

    Args:
        unary: log-potentials of the single states.
        transitions: one table a lag, the shortest first.
        node_log_marginals: normalised; constants.
        iterations: of proportional fitting. With each pair's earlier step the beliefs agree exactly after the first,
            with its later step better and better.
    """
    if node_log_marginals.shape != unary.shape:
        raise ValueError(
            f"node_log_marginals: expected shape {list(unary.shape)}, got {list(node_log_marginals.shape)}"
        )
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")
    with torch.no_grad():
        passing = Passing(0.0, unary.detach(), transitions.detach(), None, None)
        known = node_log_marginals.detach().transpose(0, 1).contiguous()
        for _ in range(iterations):
            passing.scale(known)
    return passing.beliefs(unary, transitions, known, unary.new_full((unary.shape[0],), math.inf))
