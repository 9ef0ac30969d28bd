import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.bipartite import BipartiteBeliefPropagation
from bethenet.inference.bipartite_descent import BipartiteDescent, evaluate, solve
from bethenet.inference.coupling import bethe_free_energy
from bethenet.inference.minimisers import Adam, LimitedMemory
from oracle import enumerate_model


def random_machine(left, right, scale=1.0, seed=0, batch=1, unary=True):
    graph = FactorGraph.bipartite(left, right, unary=unary)
    generator = torch.Generator().manual_seed(seed)
    return LogPotentials.random(graph, scale, batch_size=batch, dtype=torch.float64, generator=generator)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000), st.booleans(), st.sampled_from([0.3, 2.0, 8.0]))
def test_value_and_gradient_are_those_of_any_graph(left, right, seed, unary, scale):
    potentials = random_machine(left, right, scale, seed, batch=2, unary=unary)
    point = 3 * torch.randn(2, left + right, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    point.requires_grad_()
    expected = bethe_free_energy(potentials, [torch.stack([torch.zeros_like(point), point], -1)])
    (slope,) = torch.autograd.grad(expected.sum(), point)
    engine = BipartiteDescent()
    # tables have constants of their own, which the matrices leave out
    constants = evaluate(engine.prepare(potentials), torch.zeros_like(point)).value - bethe_free_energy(
        potentials, [torch.zeros(2, left + right, 2, dtype=torch.float64)]
    )
    found = evaluate(engine.prepare(potentials), point.detach())
    torch.testing.assert_close(found.value - constants, expected.detach())
    torch.testing.assert_close(found.gradient, slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strength", [0.0, 1e-6, 1.0, 20.0, -20.0])
def test_duals_give_the_marginals_they_were_solved_for(strength, dtype):
    odds = torch.tensor([[-15.0, -4.0, -0.3, 0.0, 0.3, 4.0, 15.0]], dtype=dtype)
    weights = torch.full((1, 7, 7), strength, dtype=dtype)
    duals = solve(weights, odds, odds)
    terms = [torch.zeros_like(weights), duals.right, duals.left, duals.left + duals.right + weights]
    log_beliefs = torch.log_softmax(torch.stack(terms, -1), -1)
    left = torch.logaddexp(log_beliefs[..., 2], log_beliefs[..., 3]).exp()
    right = torch.logaddexp(log_beliefs[..., 1], log_beliefs[..., 3]).exp()
    tolerance = {"rtol": 0.0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(left, odds.sigmoid().unsqueeze(2).expand_as(left), **tolerance)
    torch.testing.assert_close(right, odds.sigmoid().unsqueeze(1).expand_as(right), **tolerance)


@pytest.mark.parametrize("minimiser", [Adam(0.03), LimitedMemory()])
def test_ends_at_a_fixed_point_of_belief_propagation(minimiser):
    potentials = random_machine(5, 4, 0.6, batch=3)
    ours = BipartiteDescent(minimiser=minimiser, max_iterations=3000, tolerance=1e-7).run(potentials)
    theirs = BipartiteBeliefPropagation(tolerance=1e-11).run(potentials)
    assert ours.converged.all()
    torch.testing.assert_close(ours.log_z, theirs.log_z)
    torch.testing.assert_close(ours.beliefs.node_marginals, theirs.beliefs.node_marginals, rtol=0, atol=1e-6)
    for table, other in zip(ours.beliefs.factor_log_tables, theirs.beliefs.factor_log_tables, strict=True):
        torch.testing.assert_close(table.exp(), other.exp(), rtol=0, atol=1e-6)
    assert ours.beliefs.inconsistency().max() < 1e-12


def test_exact_on_a_star():
    potentials = random_machine(1, 6, 2.0)
    result = BipartiteDescent(minimiser=LimitedMemory()).run(potentials)
    torch.testing.assert_close(result.log_z, enumerate_model(potentials).log_z)


def test_a_warm_start_keeps_what_the_minimiser_has_learnt():
    potentials = random_machine(4, 3)
    engine = BipartiteDescent(max_iterations=5)
    problem = engine.prepare(potentials)
    first = engine.run(potentials).state
    again = engine.init(problem, first)
    assert torch.equal(again.point, first.point)
    assert torch.equal(again.square, first.square)
    assert again.updates.item() == 5


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"FactorGraph\.bipartite"):
        BipartiteDescent().run(LogPotentials.random(FactorGraph.grid(2, 2)))
    with pytest.raises(ValueError, match="finite"):
        BipartiteDescent().run(random_machine(2, 2).clamp({0: 1}))
    with pytest.raises(ValueError, match="noise"):
        BipartiteDescent(noise=-1.0)
    other = BipartiteDescent().run(random_machine(3, 2)).state
    with pytest.raises(ValueError, match="state"):
        BipartiteDescent().run(random_machine(2, 2), state=other)
