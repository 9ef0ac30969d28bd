"""Beliefs that agree with their node marginals by construction: the Bethe free energy as a function of nodes alone.

Given the node marginals, the Bethe free energy's minimiser over a factor's belief is the factor's table scaled to those
marginals (`bethenet.inference.scaling`). What is left is a function of node marginals only: descent minimises it, a
network that outputs node marginals is trained on it, and there is no consistency left to penalise. By the envelope
theorem its gradients are read off the solution; nothing is differentiated through iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.graph import FactorGroup
from bethenet.inference.scaling import (
    Duals,
    Scaling,
    add_duals,
    axis_marginals,
    binary_log_beliefs,
    dual_value,
    exponential_kernel,
    solve_dual_hessian,
    solve_duals,
    unmet,
)
from bethenet.numerics import log_normalize, negative_entropy_terms, times_log
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph

NodeTables = Sequence[Float[Tensor, "batch variables states"]]
"""One tensor per variable group of a graph."""

DEFAULT_SCALING = Scaling()


def pairwise_log_beliefs(
    log_table: Float[Tensor, "b f k1 k2"],
    log_q_i: Float[Tensor, "batch factors k1"],
    log_q_j: Float[Tensor, "batch factors k2"],
    scaling: Scaling = DEFAULT_SCALING,
) -> Float[Tensor, "batch factors k1 k2"]:
    """Log-beliefs ``log psi + u_i + v_j`` with the given marginals: closed form for two binary variables.

    Args:
        log_table: the factors' log-tables; leading axes of length 1 are shared.
        log_q_i: normalised log-marginals of the first axis, for every factor.
        log_q_j: those of the second axis.
        scaling: how to solve for the duals where there is no closed form.

    Differentiable in all three (implicitly; along the simplex: pass ``log_softmax`` outputs). A belief cannot be had
    where an impossible configuration (``-inf``) contradicts the marginals; there it disagrees with them.
    """
    return factor_log_beliefs(log_table, (log_q_i, log_q_j), scaling)


def factor_log_beliefs(
    log_table: Tensor, log_marginals: Sequence[Tensor], scaling: Scaling = DEFAULT_SCALING, start: Duals | None = None
) -> Float[Tensor, "batch factors *table"]:
    """`pairwise_log_beliefs` for any number of axes; ``start`` may hold duals of a similar problem."""
    batch, factors = log_marginals[0].shape[:2] if log_marginals else log_table.shape[:2]
    if len(log_marginals) < 2:
        return log_marginals[0] if log_marginals else torch.zeros_like(log_table).expand(batch, factors)
    with torch.no_grad():
        if tuple(log_table.shape[2:]) == (2, 2):
            log_beliefs = binary_log_beliefs(log_table, *log_marginals)
        else:
            log_beliefs = add_duals(log_table, solve_duals(log_table, log_marginals, scaling, start))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (log_table, *log_marginals)):
        result: Tensor = _ImplicitBeliefs.apply(log_beliefs, log_table, *log_marginals)
        return result
    return log_beliefs


def consistent_beliefs(
    potentials: LogPotentials,
    node_log_marginals: NodeTables,
    scaling: Scaling = DEFAULT_SCALING,
    starts: Sequence[Duals] | None = None,
    regions: RegionGraph | None = None,
) -> Beliefs:
    """Beliefs with the given node log-marginals (normalised): of least free energy among those that agree.

    Differentiable in potentials and marginals. They are said to be about ``regions``, Bethe's by default; of others
    the potentials are to be those of `per_count`.
    """
    nodes = _for_batch(potentials, node_log_marginals)
    tables = []
    for number, (group, table) in enumerate(zip(potentials.graph.factor_groups, potentials.tables, strict=True)):
        if group.arity == 0:
            tables.append(table.new_zeros(_batch_size(potentials, nodes), len(group)))
        else:
            start = starts[number] if starts is not None else None
            tables.append(factor_log_beliefs(table, _gather(group, nodes), scaling, start))
    return Beliefs(regions or RegionGraph.bethe(potentials.graph), [*tables, *nodes])


def per_count(potentials: LogPotentials, regions: RegionGraph) -> LogPotentials:
    """Each factor's log-table divided by its counting number: what its belief is the scaling of.

    Raises:
        ValueError: the regions are another graph's, or not the factors and the variables; or a factor's counting number
            is not positive.
    """
    if regions.graph is not potentials.graph:
        raise ValueError("regions: expected those of the potentials' own graph object")
    groups = regions.groups[: len(potentials.graph.factor_groups)]
    if len(regions.groups) != len(groups) + len(regions.node_groups) or not all(home.whole for home in regions.homes):
        raise ValueError("node marginals do not determine the beliefs of regions other than factors and variables")
    if any(bool((group.counting_numbers <= 0).any()) for group in groups):
        raise ValueError("expected positive counting numbers of the factors: with others no belief is the best one")
    tables = [
        table / group.counting_numbers.to(table).reshape(-1, *[1] * len(group.table_shape))
        for table, group in zip(potentials.tables, groups, strict=True)
    ]
    return LogPotentials(potentials.graph, tables, potentials.node_terms, potentials.observed)


def bethe_free_energy(
    potentials: LogPotentials, node_logits: NodeTables, scaling: Scaling = DEFAULT_SCALING
) -> Float[Tensor, " batch"]:
    """The Bethe free energy (nats) of the beliefs consistent with ``softmax(node_logits)``, factors of any arity.

    Its minimum over the logits approximates ``-log Z``; every stationary point is a fixed point of belief propagation.
    Differentiable once in potentials and logits, exactly (envelope theorem).
    """
    marginals = [log_normalize(logits, -1) for logits in node_logits]
    return free_energy_at(potentials, marginals, node_duals(potentials, marginals, scaling))


def node_duals(
    potentials: LogPotentials,
    node_log_marginals: NodeTables,
    scaling: Scaling = DEFAULT_SCALING,
    starts: Sequence[Duals] | None = None,
) -> tuple[Duals, ...]:
    """For each factor group the duals that scale its tables to the marginals; empty for arity 0 and 1."""
    nodes = _for_batch(potentials, node_log_marginals)
    return tuple(
        solve_duals(table, _gather(group, nodes), scaling, starts[number] if starts is not None else None)
        if group.arity > 1
        else ()
        for number, (group, table) in enumerate(zip(potentials.graph.factor_groups, potentials.tables, strict=True))
    )


def free_energy_at(
    potentials: LogPotentials,
    node_log_marginals: NodeTables,
    duals: Sequence[Duals],
    regions: RegionGraph | None = None,
) -> Float[Tensor, " batch"]:
    """The dual form of the free energy (nats): exact at the right duals, and at any others a lower bound on it.

    Bethe's by default; of other ``regions`` the potentials are to be those of `per_count`.
    """
    graph = potentials.graph
    regions = regions or RegionGraph.bethe(graph)
    nodes = _for_batch(potentials, node_log_marginals)
    batch = _batch_size(potentials, nodes)
    total = torch.zeros(batch, dtype=potentials.dtype, device=potentials.device)
    factors = regions.groups[: len(graph.factor_groups)]
    for group, region, table, group_duals in zip(graph.factor_groups, factors, potentials.tables, duals, strict=True):
        counts = region.counting_numbers.to(table)
        if group.arity == 0:
            total = total - (counts * table).sum(1)
            continue
        marginals = _gather(group, nodes)
        if group.arity == 1:
            terms = (negative_entropy_terms(marginals[0]) - times_log(marginals[0].exp(), table)).sum(-1)
        else:
            kernel = exponential_kernel(table, marginals[0].shape[:2])
            terms = dual_value(table, group_duals, marginals, kernel)
        total = total + (counts * terms).sum(1)
    for log_marginal, term, region in zip(nodes, potentials.node_terms, regions.node_groups, strict=True):
        total = total + (negative_entropy_terms(log_marginal).sum(-1) * region.counting_numbers.to(term)).sum(1)
        total = total - times_log(log_marginal.exp(), term).sum((1, 2))
    return total


@torch.no_grad()
def unmet_marginals(
    potentials: LogPotentials, node_log_marginals: NodeTables, duals: Sequence[Duals]
) -> Float[Tensor, " batch"]:
    """By how much (in probability) some factor's belief misses a node's marginal: zero where the scaling succeeded."""
    nodes = _for_batch(potentials, node_log_marginals)
    worst = torch.zeros(_batch_size(potentials, nodes), dtype=potentials.dtype, device=potentials.device)
    for group, table, group_duals in zip(potentials.graph.factor_groups, potentials.tables, duals, strict=True):
        if group.arity > 1:
            worst = torch.maximum(worst, unmet(table, group_duals, _gather(group, nodes)))
    return worst


class _ImplicitBeliefs(torch.autograd.Function):
    """Passes log-beliefs on unchanged, and differentiates them implicitly through the marginals they were scaled to."""

    @staticmethod
    def forward(ctx: Any, log_beliefs: Tensor, log_table: Tensor, *log_marginals: Tensor) -> Tensor:
        ctx.save_for_backward(log_beliefs, *log_marginals)
        ctx.table_shape = log_table.shape
        return log_beliefs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        log_beliefs, *log_marginals = ctx.saved_tensors
        gradient = gradient.masked_fill(log_beliefs == -torch.inf, 0.0)
        backward = _binary_backward if tuple(log_beliefs.shape[2:]) == (2, 2) else _general_backward
        to_table, to_marginals = backward(gradient, log_beliefs)
        scaled = [g * log_marginal.exp() for g, log_marginal in zip(to_marginals, log_marginals, strict=True)]
        return None, to_table.sum_to_size(ctx.table_shape), *scaled


def _general_backward(gradient: Tensor, log_beliefs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """From ``d log b = d log psi + sum_a du_a`` and ``H du = dq - marginals of (b d log psi)``, H the dual Hessian."""
    beliefs = log_beliefs.exp()
    axes = range(log_beliefs.dim() - 2)
    sums = [axis_marginals(gradient, axis) for axis in axes]
    to_marginals = solve_dual_hessian(beliefs, [axis_marginals(beliefs, axis) for axis in axes], sums)
    return gradient - beliefs * add_duals(torch.zeros_like(beliefs), to_marginals), to_marginals


def _binary_backward(gradient: Tensor, log_beliefs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The closed form. With ``xi = b(1, 1)``, w the table's log odds ratio and ``omega = softmax(-log b)``:
    ``dxi = (omega_10 + omega_00) dq + (omega_01 + omega_00) dp + dw / sum(1 / b)``. No term of it cancels.
    """
    log_beliefs = log_beliefs.clamp_min(0.8 * math.log(torch.finfo(log_beliefs.dtype).tiny))
    log_omega = torch.log_softmax(-log_beliefs.flatten(2), -1).reshape(log_beliefs.shape)
    signs = gradient.new_tensor([[1.0, -1.0], [-1.0, 1.0]])
    to_table = signs * (signs * log_omega.exp() * gradient).sum((-1, -2), keepdim=True)

    def to_marginal(log_omega: Tensor, log_beliefs: Tensor, gradient: Tensor) -> Tensor:
        """Along the first axis: moving mass to its state 1 raises its cells and lowers those of state 0."""
        log_columns = torch.logsumexp(log_omega, -2, keepdim=True)
        terms = (log_columns.flip(-1) - log_beliefs).exp() * gradient
        change = (terms[..., 1, :] - terms[..., 0, :]).sum(-1)
        return torch.stack([torch.zeros_like(change), change], -1)

    first = to_marginal(log_omega, log_beliefs, gradient)
    return to_table, [first, to_marginal(log_omega.mT, log_beliefs.mT, gradient.mT)]


def _gather(group: FactorGroup, nodes: Sequence[Tensor]) -> list[Tensor]:
    """What the factors of a group read of a node quantity: one ``[batch, factors, states]`` for each axis."""
    return [nodes[number][:, group.rows[:, axis]] for axis, number in enumerate(group.variable_groups)]


def _batch_size(potentials: LogPotentials, nodes: Sequence[Tensor]) -> int:
    return nodes[0].shape[0] if nodes else potentials.batch_size


def _for_batch(potentials: LogPotentials, nodes: NodeTables) -> list[Tensor]:
    """The node quantity, checked, with as many batch members as there are of it or of the potentials."""
    groups = potentials.graph.variable_groups
    if len(nodes) != len(groups):
        raise ValueError(f"expected {len(groups)} node tensors, one a variable group; got {len(nodes)}")
    batch = max([potentials.batch_size, *(node.shape[0] for node in nodes)])
    for number, (node, group) in enumerate(zip(nodes, groups, strict=True)):
        expected = (group.variables.numel(), group.states)
        if tuple(node.shape[1:]) != expected or batch not in (node.shape[0], node.shape[0] * batch):
            raise ValueError(f"node tensor {number}: expected shape [{batch}, {expected}], got {list(node.shape)}")
    return [node.expand(batch, -1, -1) for node in nodes]
