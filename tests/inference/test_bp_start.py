import pytest
import torch
from hypothesis import assume, given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.inference.mean_field import MeanField
from oracle import models


def assert_fixed(engine, potentials, beliefs):
    """The messages give the beliefs back, and so do those after another iteration."""
    problem = engine.prepare(potentials)
    first = engine.init(problem, engine.state_from_beliefs(problem, beliefs))
    for state in (first, engine.step(problem, first)[0]):
        for found, expected in zip(engine.beliefs(problem, state).log_tables, beliefs.log_tables, strict=True):
            torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-6, atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(models(batch=2))
def test_beliefs_of_message_passing_are_given_back(potentials):
    engine = BeliefPropagation(tolerance=1e-11, max_iterations=300)
    result = engine.run(potentials)
    assume(bool(result.converged.all()))
    assert_fixed(engine, potentials, result.beliefs)


@pytest.mark.parametrize("shared", [False, True])
def test_exact_beliefs_of_a_tree_are_a_fixed_point(shared):
    graph = FactorGraph.chain(6, states=3)
    generator = torch.Generator().manual_seed(0)
    potentials = LogPotentials.random(graph, batch_size=2, dtype=torch.float64, generator=generator)
    if shared:
        potentials = LogPotentials(graph, [table[:1, :1] for table in potentials.tables]).clamp({0: [0, 1, 2]})
    assert_fixed(BeliefPropagation(), potentials, Exact().run(potentials).beliefs)


@settings(deadline=None, max_examples=20)
@given(models(batch=2, zeros=True))
def test_impossible_states_do_not_mislead(potentials):
    engine = BeliefPropagation(tolerance=1e-10)
    target = engine.run(potentials)
    assume(bool(target.converged.all()))
    problem = engine.prepare(potentials)
    again = engine.run(potentials, state=engine.state_from_beliefs(problem, target.beliefs))
    assert torch.isfinite(again.log_z).all()
    exact = Exact().run(potentials).log_z
    close = (target.log_z - exact).abs() < 1e-8  # trees, where there is one fixed point
    torch.testing.assert_close(again.log_z[close], exact[close])


def test_any_beliefs_are_a_start():
    generator = torch.Generator().manual_seed(0)
    potentials = LogPotentials.random(FactorGraph.grid(3, 3), dtype=torch.float64, generator=generator)
    engine = BeliefPropagation(tolerance=1e-10)
    target = engine.run(potentials)
    problem = engine.prepare(potentials)
    start = engine.state_from_beliefs(problem, MeanField().run(potentials).beliefs)
    result = engine.run(potentials, state=start)
    torch.testing.assert_close(result.log_z, target.log_z)
