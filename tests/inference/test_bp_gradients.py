"""Gradients of belief propagation: by the envelope theorem, through iterations, and at the fixed point."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.trw import TreeReweighted

GRAPHS = [
    FactorGraph([2, 2, 2], [(0, 1), (1, 2), (0, 2), (1,)]),
    FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0, 1, 2), ()]),
]


def model(graph: FactorGraph, scale: float = 0.5) -> LogPotentials:
    generator = torch.Generator().manual_seed(0)
    return LogPotentials.random(graph, scale, dtype=torch.float64, generator=generator)


def parameters(potentials: LogPotentials) -> list[Tensor]:
    return [table.clone().requires_grad_() for table in potentials.tables]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("engine", [BeliefPropagation(tolerance=1e-11), TreeReweighted(tolerance=1e-11)])
def test_the_envelope_gradient_is_the_gradient_of_log_z(graph: FactorGraph, engine: BeliefPropagation) -> None:
    def log_z(*tables: Tensor) -> Tensor:
        return engine.run(LogPotentials(graph, tables)).log_z

    assert torch.autograd.gradcheck(log_z, parameters(model(graph)))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("gradient", ["unrolled", "truncated", "implicit"])
@pytest.mark.parametrize("schedule", ["flooding", "sweep", "residual"])
def test_beliefs_are_differentiable(graph: FactorGraph, gradient: str, schedule: str) -> None:
    engine = BeliefPropagation(schedule=schedule, gradient=gradient, tolerance=1e-11, truncate_at=30)

    def outputs(*tables: Tensor) -> tuple[Tensor, ...]:
        result = engine.run(LogPotentials(graph, tables))
        # those of factors of no variable are the constant 1
        return result.log_z, *(table.exp() for table in result.beliefs.log_tables if table.dim() > 2)

    assert torch.autograd.gradcheck(outputs, parameters(model(graph)), fast_mode=True)


def test_gradients_where_states_are_impossible() -> None:
    graph = GRAPHS[1]
    potentials = model(graph)
    tables = parameters(potentials)
    with torch.no_grad():
        tables[1][..., 1, 0] = -math.inf
    for gradient in ("envelope", "unrolled", "implicit"):
        result = BeliefPropagation(gradient=gradient).run(LogPotentials(graph, tables))
        grads = torch.autograd.grad(result.log_z.sum(), tables)
        for grad in grads:
            assert bool(torch.isfinite(grad).all())
        torch.testing.assert_close(grads[1], result.beliefs.factor_marginals[1].detach(), atol=1e-5, rtol=0)


def test_gradients_of_uniform_models() -> None:
    """Log-odds of exactly zero, where a careless formula loses the derivative."""
    graph = FactorGraph([2, 2, 3], [(0, 1), (1, 2)])
    tables = [
        torch.zeros(1, len(g), *g.table_shape, dtype=torch.float64, requires_grad=True) for g in graph.factor_groups
    ]
    engine = BeliefPropagation(gradient="unrolled", max_iterations=8)

    def marginals(*inputs: Tensor) -> Tensor:
        return engine.run(LogPotentials(graph, inputs)).beliefs.node_marginals

    assert torch.autograd.gradcheck(marginals, tables)


def test_truncation_approaches_the_full_gradient() -> None:
    potentials = model(GRAPHS[0], 1.0)

    def gradient(engine: BeliefPropagation) -> Tensor:
        tables = parameters(potentials)
        result = engine.run(LogPotentials(GRAPHS[0], tables))
        return torch.autograd.grad(result.beliefs.node_marginals[0, 0, 1], tables)[1]

    full = gradient(BeliefPropagation(gradient="implicit", tolerance=1e-12))
    gaps = [
        float((gradient(BeliefPropagation(gradient="truncated", truncate_at=k)) - full).abs().max()) for k in (1, 3, 20)
    ]
    assert gaps[0] > gaps[1] > gaps[2]


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    tables = parameters(model(GRAPHS[0]))
    with torch.no_grad():
        result = BeliefPropagation(gradient="unrolled").run(LogPotentials(GRAPHS[0], tables))
    assert not result.beliefs.node_marginals.requires_grad
    result = BeliefPropagation().run(LogPotentials(GRAPHS[0], tables))
    assert result.log_z.requires_grad
    assert not result.beliefs.node_marginals.requires_grad
