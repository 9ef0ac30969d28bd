"""Exact inference against enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.exact import Exact
from bethenet.inference.exact.domains import Logarithmic
from bethenet.inference.exact.elimination import forward, marginals
from bethenet.inference.exact.planning import planner_for
from bethenet.result import Status
from oracle import enumerate_model, models


def check(potentials: LogPotentials, engine: Exact | None = None, tolerance: float = 1e-9) -> None:
    """Everything that enumeration can say."""
    truth = enumerate_model(potentials)
    graph = potentials.graph
    result = (engine or Exact()).run(potentials)
    close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    torch.testing.assert_close(result.log_z, truth.log_z, **close)
    assert result.status is Status.CONVERGED
    for factor in range(graph.num_factors):
        torch.testing.assert_close(result.beliefs.factor_marginal(factor), truth.marginal(graph.scope(factor)), **close)
    for variable in range(graph.num_variables):
        torch.testing.assert_close(result.beliefs.node_marginal(variable), truth.marginal((variable,)), **close)
    states, value = (engine or Exact()).map(potentials)
    torch.testing.assert_close(value, truth.map_log_value, **close)
    torch.testing.assert_close(potentials.score(states).diagonal(), truth.map_log_value, **close)


@settings(max_examples=100, deadline=None)
@given(models(max_variables=6, max_factors=10, batch=2, zeros=True))
def test_equals_enumeration(potentials: LogPotentials) -> None:
    check(potentials)


@settings(max_examples=30, deadline=None)
@given(models(max_variables=6, max_factors=10, batch=2, zeros=True))
def test_log_domain_equals_scaled_domain(potentials: LogPotentials) -> None:
    planner = planner_for(potentials)
    reduction, plan = planner.reduction, planner.plan("min-fill")
    trace = forward(plan, Logarithmic(), reduction.leaves(potentials), potentials.batch_size, keep=True)
    result = Exact().run(potentials)
    torch.testing.assert_close(reduction.constant(potentials) + trace.log_z, result.log_z)
    beliefs = reduction.beliefs(potentials, marginals(plan, trace, differentiable=False))
    for ours, theirs in zip(beliefs.log_tables, result.beliefs.log_tables, strict=True):
        torch.testing.assert_close(ours.exp(), theirs.exp())


@pytest.mark.parametrize("states", [[], [3], [1], [2, 2, 2], [1, 1], [2, 1, 3]])
def test_graphs_without_factors(states: list[int]) -> None:
    potentials = LogPotentials(FactorGraph(states, []), [])
    result = Exact().run(potentials)
    assert result.log_z.tolist() == pytest.approx([math.log(math.prod(states))])


def test_impossible_members_are_named() -> None:
    graph = FactorGraph.chain(3)
    potentials = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = potentials.tables[1].clone()
    table[:, 0, 0, 1] = -math.inf
    potentials = LogPotentials(graph, [potentials.tables[0], table])
    with pytest.raises(ImpossibleEvidenceError, match=r"1 of 3 batch members: 1"):
        Exact().log_z(potentials.clamp({0: [0, 0, 1], 1: [0, 1, 0]}))
