"""Generalised belief propagation against enumeration, belief propagation and itself."""

from __future__ import annotations

import itertools
import math

import networkx
import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.errors import ImpossibleEvidenceError
from bethenet.free_energy import free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.inference.gbp import GeneralizedBeliefPropagation
from oracle import enumerate_model, models

ONE = [-1.0, 1.0]


def random_model(graph, scale=1.0, batch_size=1, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return LogPotentials.random(graph, scale, batch_size=batch_size, dtype=dtype, generator=generator)


def ising(graph, sd, batch_size=1, seed=0):
    """Fields N(0, 1), couplings N(0, sd^2), states -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    spin = torch.tensor(ONE, dtype=torch.float64)
    fields = torch.randn(batch_size, graph.num_variables, dtype=torch.float64, generator=generator)
    couplings = sd * torch.randn(batch_size, len(graph.factor_groups[1]), dtype=torch.float64, generator=generator)
    return LogPotentials(graph, [fields[..., None] * spin, couplings[..., None, None] * spin[:, None] * spin])


def marginal_error(result, potentials):
    truth = enumerate_model(potentials)
    gaps = [
        (result.beliefs.factor_marginal(factor) - truth.marginal(potentials.graph.scope(factor))).abs().max()
        for factor in range(potentials.graph.num_factors)
    ]
    gaps += [
        (result.beliefs.node_marginal(variable) - truth.marginal((variable,))).abs().max()
        for variable in range(potentials.graph.num_variables)
    ]
    return float(torch.stack(gaps).max())


# --- exact where the region graph is a junction tree --------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(models(batch=2, zeros=True))
def test_everything_in_one_cluster_is_exact(potentials):
    engine = GeneralizedBeliefPropagation(clusters=[list(range(potentials.graph.num_variables))])
    result = engine.run(potentials)
    assert result.status == "converged"
    assert marginal_error(result, potentials) < 1e-9
    torch.testing.assert_close(result.log_z, enumerate_model(potentials).log_z)


@settings(deadline=None, max_examples=30)
@given(models(batch=2, zeros=True))
def test_the_default_converges_to_consistent_beliefs(potentials):
    result = GeneralizedBeliefPropagation().run(potentials)
    assert result.status == "converged"
    assert (result.beliefs.inconsistency() < 1e-5).all()
    assert all(torch.isfinite(table.exp()).all() for table in result.beliefs.log_tables)


def test_clusters_of_a_junction_tree_are_exact_on_a_third_order_chain():
    graph = FactorGraph.chain(9, 3, order=3)
    potentials = random_model(graph, batch_size=3)
    fours = GeneralizedBeliefPropagation(clusters=[[t, t + 1, t + 2, t + 3] for t in range(6)], tolerance=1e-9)
    result = fours.run(potentials)
    assert result.status == "converged"
    assert marginal_error(result, potentials) < 1e-7
    torch.testing.assert_close(result.log_z, enumerate_model(potentials).log_z, atol=1e-7, rtol=0)
    torch.testing.assert_close(
        GeneralizedBeliefPropagation(tolerance=1e-9).run(potentials).log_z, result.log_z, atol=1e-7, rtol=0
    )


def test_clusters_of_three_are_better_than_belief_propagation_on_a_third_order_chain():
    potentials = random_model(FactorGraph.chain(8, 3, order=3), 0.7, batch_size=5)
    triples = GeneralizedBeliefPropagation(clusters=[[t, t + 1, t + 2] for t in range(6)]).run(potentials)
    bethe = BeliefPropagation(damping=0.3).run(potentials)
    assert triples.status == bethe.status == "converged"
    exact = Exact().run(potentials).beliefs.node_marginals
    error, bethe_error = ((r.beliefs.node_marginals - exact).abs().mean() for r in (triples, bethe))
    assert error < 0.9 * bethe_error


def test_exact_on_a_tree_with_zeros_and_evidence():
    graph = FactorGraph([2, 3, 2, 4, 1], [(0, 1), (2, 1), (1, 3), (3, 4), (3,), (1,), ()])
    tables = random_model(graph, batch_size=2, seed=3).tables
    next(table for table in tables if table.shape[2:] == (2, 3))[0, 0, 0, 1] = -math.inf
    potentials = LogPotentials(graph, tables).clamp({3: [1, -1]}).clamp({0: torch.tensor([0.2, 0.9])})
    result = GeneralizedBeliefPropagation(tolerance=1e-10).run(potentials)
    assert result.status == "converged"
    assert marginal_error(result, potentials) < 1e-8
    torch.testing.assert_close(result.log_z, enumerate_model(potentials).log_z)


# --- approximate --------------------------------------------------------------------------------------------------


def test_grids_against_exact():
    potentials = ising(FactorGraph.grid(6, 6), 1.0, batch_size=8)
    exact = Exact().run(potentials)
    errors = {}
    for clusters in ("strips", "plaquettes"):
        result = GeneralizedBeliefPropagation(clusters=clusters).run(potentials)
        assert result.status == "converged"
        errors[clusters] = float((result.beliefs.node_marginals - exact.beliefs.node_marginals).abs().mean())
    bethe = BeliefPropagation(damping=0.5).run(potentials)
    error = float((bethe.beliefs.node_marginals - exact.beliefs.node_marginals).abs().mean())
    assert errors["plaquettes"] < 0.1 * error
    assert errors["strips"] < 0.5 * errors["plaquettes"]


def test_strong_couplings_converge_where_belief_propagation_does_not():
    potentials = ising(FactorGraph.grid(7, 7), 4.0, batch_size=10)
    assert not BeliefPropagation(max_iterations=300).run(potentials).converged.all()
    assert GeneralizedBeliefPropagation(clusters="plaquettes").run(potentials).converged.all()


def test_short_cycles_of_a_random_regular_graph():
    graph = FactorGraph.from_networkx(networkx.random_regular_graph(3, 14, seed=1))
    potentials = ising(graph, 1.0, batch_size=6)
    cycles = GeneralizedBeliefPropagation(clusters="cycles", max_length=6).run(potentials)
    assert cycles.status == "converged"
    bethe = BeliefPropagation(damping=0.5, max_iterations=2000).run(potentials)
    assert marginal_error(cycles, potentials) < 0.5 * marginal_error(bethe, potentials)


def test_members_that_get_stuck_go_on_with_a_more_convex_bound_and_converge():
    graph = FactorGraph.from_networkx(networkx.grid_2d_graph(4, 4, periodic=True))
    engine = GeneralizedBeliefPropagation(clusters="plaquettes")
    result = engine.run(ising(graph, 3.0, batch_size=4, seed=1))
    assert result.status == "converged"
    assert (result.state.convexity > engine.convexity).any()
    assert (result.state.convexity == engine.convexity).any()
    assert (result.beliefs.inconsistency() < 1e-5).all()


def test_the_factors_as_clusters_are_belief_propagation():
    graph = FactorGraph.from_networkx(networkx.random_regular_graph(3, 10, seed=0))
    potentials = ising(graph, 0.5, batch_size=4)
    pairs = GeneralizedBeliefPropagation(clusters=graph.factor_groups[1].variables, tolerance=1e-9).run(potentials)
    bethe = BeliefPropagation(tolerance=1e-10).run(potentials)
    torch.testing.assert_close(pairs.log_z, bethe.log_z, atol=1e-6, rtol=0)
    for ours, theirs in zip(pairs.beliefs.factor_marginals, bethe.beliefs.factor_marginals, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


# --- the double loop ----------------------------------------------------------------------------------------------


def test_every_round_of_the_double_loop_lowers_the_free_energy():
    potentials = ising(FactorGraph.grid(4, 4), 3.0, batch_size=3)
    engine = GeneralizedBeliefPropagation(clusters="plaquettes", double_loop=True, inner_tolerance=1e-4)
    state, energies = engine.init(potentials), []
    for _ in range(800):
        following, _ = engine.step(potentials, state)
        renewed = (following.tangent != state.tangent).any(1)
        state = following
        energy = free_energy(potentials, engine.beliefs(potentials, state))
        energies.append(torch.where(renewed, energy, torch.nan))
    for member in torch.stack(energies, 1):
        rounds = member[member.isfinite()]
        assert len(rounds) > 5
        assert rounds[0] - rounds[-1] > 1e-3
        assert (rounds.diff() < 1e-6).all()


def test_single_and_double_loop_agree():
    potentials = ising(FactorGraph.grid(4, 5), 2.0, batch_size=4)
    results = [
        GeneralizedBeliefPropagation(clusters="plaquettes", tolerance=1e-8, double_loop=double).run(potentials)
        for double in (False, True)
    ]
    assert all(result.status == "converged" for result in results)
    torch.testing.assert_close(results[0].log_z, results[1].log_z, atol=1e-5, rtol=0)


# --- what every engine owes ---------------------------------------------------------------------------------------


def test_the_gradient_of_log_z_is_the_beliefs_and_agrees_with_differences():
    graph = FactorGraph.grid(2, 3)
    potentials = random_model(graph, batch_size=2)
    tables = [table.requires_grad_() for table in potentials.tables]
    engine = GeneralizedBeliefPropagation(clusters="plaquettes", tolerance=1e-11)

    def log_z(*tables):
        return engine.run(LogPotentials(graph, tables)).log_z

    result = engine.run(LogPotentials(graph, tables))
    gradients = torch.autograd.grad(result.log_z.sum(), tables)
    for gradient, marginals in zip(gradients, result.beliefs.factor_marginals, strict=True):
        torch.testing.assert_close(gradient, marginals)
    assert torch.autograd.gradcheck(log_z, tables, eps=1e-4, atol=1e-4)


def test_a_batch_is_its_members_one_by_one():
    potentials = ising(FactorGraph.grid(4, 4), 2.0, batch_size=5)
    engine = GeneralizedBeliefPropagation()
    together = engine.run(potentials)
    for member in range(5):
        alone = engine.run(potentials[member])
        torch.testing.assert_close(together.log_z[member : member + 1], alone.log_z)
        assert int(together.iterations[member]) == int(alone.iterations)


def test_shared_tables_are_expanded_ones():
    graph = FactorGraph.grid(3, 4, states=3)
    few = random_model(graph)
    shared = [few.tables[0][:, :1], few.tables[1][:, :1]]
    node_terms = [torch.randn(4, 12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]
    expanded = [
        table.expand(4, len(group), *group.table_shape)
        for table, group in zip(shared, graph.factor_groups, strict=True)
    ]
    one, other = (
        GeneralizedBeliefPropagation().run(LogPotentials(graph, tables, node_terms)) for tables in (shared, expanded)
    )
    assert one.status == "converged"
    torch.testing.assert_close(one.log_z, other.log_z)


def test_single_precision_in_single_precision_out():
    potentials = ising(FactorGraph.grid(4, 4), 2.0)
    engine = GeneralizedBeliefPropagation()
    single = engine.run(potentials.to(dtype=torch.float32))
    assert single.status == "converged"
    assert single.beliefs.node_marginals.dtype == single.log_z.dtype == torch.float32
    torch.testing.assert_close(single.log_z.double(), engine.run(potentials).log_z, atol=1e-3, rtol=1e-5)


def test_a_state_is_a_warm_start():
    graph = FactorGraph.grid(5, 5)
    potentials = ising(graph, 1.0, batch_size=3)
    engine = GeneralizedBeliefPropagation()
    cold = engine.run(potentials)
    again = engine.run(potentials, state=cold.state)
    assert (again.iterations <= 3).all()
    assert (cold.iterations > 10).all()
    moved = potentials.map(lambda table: table * 1.05)
    warm, fresh = engine.run(moved, state=cold.state), engine.run(moved)
    assert (warm.iterations < fresh.iterations).all()
    torch.testing.assert_close(warm.log_z, fresh.log_z, atol=1e-5, rtol=0)
    clamped = potentials.clamp({7: 1})
    evidence = engine.run(clamped, state=cold.state)
    torch.testing.assert_close(evidence.log_z, engine.run(clamped).log_z, atol=1e-5, rtol=0)
    released = engine.run(potentials, state=evidence.state)
    torch.testing.assert_close(released.log_z, cold.log_z, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="the state is for 3 models"):
        engine.run(ising(graph, 1.0, batch_size=2), state=cold.state)


@pytest.mark.parametrize(
    ("states", "scopes"),
    [([2], []), ([1], [(0,)]), ([2, 3], [(0,), (1,)]), ([2, 2], [(), (0, 1), (1, 0), (0,)]), ([3, 2, 2], [(2, 0)])],
)
def test_small_graphs_are_exact(states, scopes):
    potentials = random_model(FactorGraph(states, scopes), batch_size=2)
    result = GeneralizedBeliefPropagation().run(potentials)
    assert result.status == "converged"
    assert marginal_error(result, potentials) < 1e-6 if scopes else result.beliefs.node_marginals.shape == (1, 1, 2)
    torch.testing.assert_close(result.log_z, enumerate_model(potentials).log_z)


def test_no_variables_at_all():
    result = GeneralizedBeliefPropagation().run(LogPotentials(FactorGraph([], []), []))
    assert result.status == "converged"
    assert float(result.log_z) == 0.0


def test_impossible_evidence_has_a_name():
    graph = FactorGraph.chain(6, unary=False)
    equal = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]]).expand(1, 5, 2, 2)
    with pytest.raises(ImpossibleEvidenceError):
        GeneralizedBeliefPropagation().run(LogPotentials(graph, [equal]).clamp({0: 0, 5: 1}))


def test_strong_potentials_neither_overflow_nor_underflow():
    potentials = ising(FactorGraph.grid(4, 4), 300.0, batch_size=4)
    result = GeneralizedBeliefPropagation().run(potentials)
    assert torch.isfinite(result.log_z).all()
    states = torch.tensor(list(itertools.product(range(2), repeat=16)))
    best = potentials.score(states).amax(0)
    torch.testing.assert_close(result.log_z, best, atol=5.0, rtol=0.02)


def test_options_are_checked():
    with pytest.raises(ValueError, match="convexity"):
        GeneralizedBeliefPropagation(convexity=0.0)
    with pytest.raises(ValueError, match="inner_tolerance"):
        GeneralizedBeliefPropagation(inner_tolerance=2.0)
    with pytest.raises(ValueError, match="clusters"):
        GeneralizedBeliefPropagation(clusters="squares").run(random_model(FactorGraph.grid(2, 2)))
