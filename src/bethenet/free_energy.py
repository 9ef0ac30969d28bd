"""The free energy of beliefs, for any region graph: equation 1 of the paper when the regions are Bethe's."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.numerics import negative_entropy_terms
from bethenet.potentials import LogPotentials


def free_energy(potentials: LogPotentials, beliefs: Beliefs) -> Float[Tensor, " batch"]:
    """``F(tau) = sum_r c_r sum tau_r log tau_r - sum_alpha <tau_alpha, log Psi_alpha>`` in nats (equation 1).

    The region graph, with its counting numbers c_r, is the beliefs' own. Its minimum over consistent beliefs
    approximates ``-log Z``. It is ``+inf`` where beliefs put mass on an impossible configuration. Differentiable in
    potentials and beliefs: with the beliefs held constant, the gradient in the log-potentials is minus the beliefs,
    which is all that learning needs of an engine.
    """
    return negative_entropy(beliefs) - expected_log_potential(potentials, beliefs)


def negative_entropy(beliefs: Beliefs) -> Float[Tensor, " batch"]:
    """``sum_r c_r sum tau_r log tau_r``: minus the entropy that the region graph ascribes to the beliefs."""
    total: Tensor | None = None
    for table, group in zip(beliefs.log_tables, beliefs.regions.groups, strict=True):
        terms = negative_entropy_terms(table).flatten(2).sum(-1) if group.table_shape else torch.zeros_like(table)
        part = terms @ group.counting_numbers.to(table.dtype)
        total = part if total is None else total + part
    return torch.zeros(1, device=beliefs.graph.device) if total is None else total


def expected_log_potential(potentials: LogPotentials, beliefs: Beliefs) -> Float[Tensor, " batch"]:
    """``sum_alpha <tau_alpha, log Psi_alpha>``, evidence counted; ``-inf`` where mass is on the impossible.

    Tables that are shared stay shared: the beliefs are summed first.
    """
    graph = beliefs.graph
    if potentials.graph is not graph:
        raise ValueError("the potentials and the beliefs are about different graphs")
    total: Tensor | None = None
    for home in beliefs.regions.homes:
        table = potentials.tables[home.factor_group]
        if table.shape[1] > 1 and not home.whole:
            table = table[:, home.factors]
        part = _expectation(beliefs.factor_table(home).exp(), table, potentials.has_zeros)
        total = part if total is None else total + part
    for log_table, term in zip(beliefs.node_log_tables, potentials.node_terms, strict=True):
        part = _expectation(log_table.exp(), term, potentials.has_zeros)
        total = part if total is None else total + part
    return torch.zeros(1, device=graph.device) if total is None else total


def _expectation(probabilities: Tensor, table: Tensor, has_zeros: bool) -> Tensor:
    """Sum of ``probabilities`` [B, M, ...] times ``table`` [B | 1, M | 1, ...], one number per batch member."""
    if table.shape[1] == 1:
        probabilities = probabilities.sum(1, keepdim=True)
    weights, values = probabilities.flatten(1), table.flatten(1)
    if not has_zeros:
        return _dot(weights, values)
    impossible = values == -math.inf
    result = _dot(weights, values.masked_fill(impossible, 0.0))
    mass = _dot(weights.detach(), impossible.to(weights.dtype))
    return torch.where(mass > 0, torch.full_like(result, -math.inf), result)


def _dot(weights: Tensor, values: Tensor) -> Tensor:
    if values.shape[0] == 1:
        return weights @ values[0]
    if weights.shape[0] == 1:
        return values @ weights[0]
    return torch.einsum("bi,bi->b", weights, values)
