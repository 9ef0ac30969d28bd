"""`TreeReweighted`: message passing with edge weights, and an upper bound on log Z.

The free energy is ``-<theta, tau> - sum_v H_v + sum_f rho_f I_f``, with rho_f the probability of factor f in a random
spanning forest and I_f the information its variables have of each other: convex, and its minimum is an upper bound on
log Z with the sign turned (Wainwright, Jaakkola & Willsky, 2005).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs, marginalize
from bethenet.free_energy import expected_log_potential
from bethenet.inference.bp.message_passing import MessagePassing, MessageState
from bethenet.inference.bp.problem import Problem
from bethenet.inference.engine import State
from bethenet.inference.spanning_trees import Appearance, forest_appearance, heaviest_forest
from bethenet.numerics import log_normalize, log_sum_exp, negative_entropy_terms
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph
from bethenet.result import InferenceResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TreeReweighted(MessagePassing):
    """Tree-reweighted belief propagation: an upper bound on log Z, equal to it on trees.

    ``log_z`` is an upper bound at every state of the messages, converged or not (see `upper_bound`); it is tight at
    the fixed point only. Max-product is not offered.

    >>> from bethenet import FactorGraph, LogPotentials
    >>> potentials = LogPotentials.random(FactorGraph.grid(3, 3), generator=torch.Generator().manual_seed(0))
    >>> str(TreeReweighted().run(potentials).status)
    'converged'
    """

    name: ClassVar[str] = "trw"

    appearance: Sequence[Float[Tensor, " factors"]] | None = None
    """For each factor group how likely each factor is to be in a random spanning forest, above 0; those of
    `forest_appearance` by default. The bound holds for no other numbers."""
    optimize: int = 0
    """So many conditional-gradient steps on the appearance probabilities, each lowering the bound (its sum over the
    batch, which shares them)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimize < 0:
            raise ValueError(f"optimize: expected at least 0 steps, got {self.optimize}")

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Pass messages until every member has converged or a limit is reached. See `Engine.run`."""
        if not self.optimize:
            return super().run(potentials, state=state, generator=generator)
        appearance, bounds, state = optimized_appearance(self, potentials, state)
        _log.debug("bounds while optimising the appearance probabilities: %s", bounds)
        return replace(self, appearance=appearance, optimize=0).run(potentials, state=state, generator=generator)

    def weights(self, potentials: LogPotentials) -> Sequence[Float[Tensor, " factors"]]:
        """The appearance probabilities in use."""
        graph = potentials.graph
        if self.appearance is None:
            return forest_appearance(graph)
        if len(self.appearance) != len(graph.factor_groups):
            expected = f"{len(graph.factor_groups)} tensors, one a factor group"
            raise ValueError(f"appearance: expected {expected}; got {len(self.appearance)}")
        for number, (weights, group) in enumerate(zip(self.appearance, graph.factor_groups, strict=True)):
            if weights.shape != (len(group),) or not bool(((weights > 0) & (weights <= 1)).all()):
                raise ValueError(
                    f"appearance: for factor group {number} expected {len(group)} probabilities above 0, got {weights}"
                )
        return [weights.to(graph.device) for weights in self.appearance]

    def regions(self, problem: Problem) -> RegionGraph:
        """Factors counted as often as they appear."""
        assert problem.weights is not None
        counts = [
            weights.flatten().double() if group.arity >= 2 else torch.ones(len(group), device=problem.device)
            for weights, group in zip(problem.weights, problem.graph.factor_groups, strict=True)
        ]
        return RegionGraph.tree_reweighted(problem.graph, counts)

    def log_z(
        self, potentials: LogPotentials, problem: Problem, state: MessageState, beliefs: Beliefs
    ) -> Float[Tensor, " batch"]:
        """An upper bound on log Z (nats). Its gradient is the beliefs."""
        bound = upper_bound(problem, state)
        if bound.requires_grad:
            return bound
        expected = expected_log_potential(potentials, beliefs)
        return bound + (expected - expected.detach())


def upper_bound(problem: Problem, state: MessageState) -> Float[Tensor, " batch"]:
    """An upper bound on log Z from any messages.

    Whatever the messages, the unnormalised beliefs b~ multiply out to the model: ``prod_r b~_r^(c_r)`` over factors and
    variables with their counting numbers. As an average of trees T with probabilities mu(T),

        log Z <= sum_T mu(T) log Z_T = sum_r c_r log sum b~_r + sum_T mu(T) log Z'_T,

    Z'_T the sum over ``prod_v b_v prod_(f in T) b_f / prod_(v in f) b_v`` with the beliefs normalised. Summing out T
    from the leaves costs at each factor at most the largest ratio of the factor's marginal to its variable's belief, so
    the last term is at most ``sum_f rho_f max_v max_x log(b_f(x_v) / b_v(x_v))``: zero once they agree.
    """
    assert problem.weights is not None
    graph = problem.graph
    factors, nodes = problem.logits(problem.open([part.transpose(0, 1) for part in state.messages]))
    log_nodes = [log_normalize(part, -1) for part in nodes]
    counts = [torch.ones(part.shape[1], dtype=problem.dtype, device=problem.device) for part in nodes]
    bound = problem.constant
    for number, group in enumerate(graph.factor_groups):
        if group.arity < 2:
            continue
        weights = problem.weights[number].flatten()
        table_axes = range(2, factors[number].dim())
        bound = bound + log_sum_exp(factors[number], table_axes) @ weights
        log_factors = log_normalize(factors[number], table_axes)
        excess = []
        for axis, reader in enumerate(group.variable_groups):
            counts[reader] = counts[reader].index_add(0, group.rows[:, axis], -weights)
            marginal = marginalize(log_factors, (axis,))
            node = log_nodes[reader].index_select(1, group.rows[:, axis])
            # a state that neither allows costs nothing
            both = (marginal == -math.inf) & (node == -math.inf)
            excess.append((marginal - node.masked_fill(both, 0.0)).amax(-1))
        bound = bound + torch.stack(excess).amax(0) @ weights
    for part, count in zip(nodes, counts, strict=True):
        bound = bound + log_sum_exp(part, -1) @ count
    return bound


def optimized_appearance(
    engine: TreeReweighted, potentials: LogPotentials, state: State = None
) -> tuple[Appearance, list[float], State]:
    """Appearance probabilities that lower the bound, the bounds on the way (sums over the batch), the last messages.

    The derivative of the bound in rho_f is minus the factor's mutual information, so each step goes some way towards
    the forest in which the mutual informations add up to most; as far as the bound falls, and no step is taken if it
    does not.
    """
    graph = potentials.graph
    constant = potentials.detach()
    appearance: Appearance = tuple(weights.double() for weights in engine.weights(constant))
    once = replace(engine, optimize=0, gradient="envelope")
    result = replace(once, appearance=appearance).run(constant, state=state)
    bounds = [float(result.log_z.sum())]
    for number in range(engine.optimize):
        forest = heaviest_forest(graph, mutual_information(result.beliefs))
        length = 2.0 / (number + 3)
        while length > 1e-3:
            trial = tuple((1 - length) * old + length * new for old, new in zip(appearance, forest, strict=True))
            proposal = replace(once, appearance=trial).run(constant, state=result.state)
            if float(proposal.log_z.sum()) < bounds[-1]:
                break
            length /= 2
        else:
            break
        appearance, result = trial, proposal
        bounds.append(float(result.log_z.sum()))
    return appearance, bounds, result.state


def mutual_information(beliefs: Beliefs) -> tuple[Float[Tensor, " factors"], ...]:
    """For each factor group what the factors' variables know of each other (nats), summed over the batch."""
    result = []
    for table in beliefs.factor_log_tables:
        arity = table.dim() - 2
        total = -_entropy(table)
        for axis in range(arity):
            total = total + _entropy(marginalize(table, (axis,)))
        result.append(total.sum(0))
    return tuple(result)


def _entropy(log_tables: Tensor) -> Float[Tensor, "batch regions"]:
    terms = negative_entropy_terms(log_tables)
    return -(terms.flatten(2).sum(-1) if terms.dim() > 2 else terms)
