"""Equation 1: the free energy against a naive sum, on trees against log Z, and its gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import Beliefs, FactorGraph, LogPotentials, RegionGraph, free_energy
from bethenet.free_energy import expected_log_potential, negative_entropy
from oracle import enumerate_model, models
from test_beliefs import exact_beliefs, random_beliefs


def naive_free_energy(model, beliefs, member):
    """Equation 1 as it stands, entry by entry, with 0 log 0 = 0."""
    graph, total = model.graph, 0.0
    degree = [0] * graph.num_variables
    for factor, scope in enumerate(graph.scopes()):
        table = model.table(factor)
        potentials = table[min(member, table.shape[0] - 1)].reshape(-1).tolist()
        for tau, log_psi in zip(beliefs.factor_marginal(factor)[member].reshape(-1).tolist(), potentials, strict=True):
            total += tau * math.log(tau) if tau else 0.0
            total -= tau * log_psi if tau else 0.0
        for variable in scope:
            degree[variable] += 1
    for variable in range(graph.num_variables):
        group, row = graph.locate_variable(variable)
        term = model.node_terms[group]
        evidence = term[min(member, term.shape[0] - 1), min(row, term.shape[1] - 1)].tolist()
        for tau, log_weight in zip(beliefs.node_marginal(variable)[member].tolist(), evidence, strict=True):
            total += (1 - degree[variable]) * tau * math.log(tau) if tau else 0.0
            total -= tau * log_weight if tau else 0.0
    return total


@st.composite
def forests(draw, zeros=False):
    """Models without cycles: each factor joins a new variable to old ones of other trees, or to none."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    scopes, tree = [], list(range(len(counts)))
    for variable in range(1, len(counts)):
        parent = draw(st.none() | st.integers(0, variable - 1))
        if parent is not None:
            scopes.append((parent, variable))
            tree[variable] = tree[parent]
    scopes += [(variable,) for variable in draw(st.lists(st.sampled_from(range(len(counts))), max_size=3))]
    scopes += [()] * draw(st.integers(0, 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    model = LogPotentials.random(FactorGraph(counts, scopes), dtype=torch.float64, generator=generator)
    if zeros:
        model = model.map(lambda t: t.masked_fill((torch.arange(t.numel()).reshape(t.shape) % 7) == 6, -math.inf))
    return model


@settings(deadline=None, max_examples=60)
@given(model=forests())
def test_at_the_marginals_of_a_tree_it_is_minus_log_z(model):
    torch.testing.assert_close(free_energy(model, exact_beliefs(model)), -enumerate_model(model).log_z)


@settings(deadline=None, max_examples=30)
@given(model=forests(), data=st.data())
def test_so_it_is_with_evidence(model, data):
    observed = {
        variable: data.draw(st.integers(0, int(model.graph.state_counts[variable]) - 1))
        for variable in data.draw(st.sets(st.sampled_from(range(model.graph.num_variables))))
    }
    model = model.clamp(observed)
    torch.testing.assert_close(free_energy(model, exact_beliefs(model)), -enumerate_model(model).log_z)


@settings(deadline=None, max_examples=60)
@given(model=models(batch=2), seed=st.integers(0, 1000))
def test_on_inconsistent_beliefs_it_is_equation_1(model, seed):
    beliefs = random_beliefs(RegionGraph.bethe(model.graph), model.batch_size, seed)
    expected = [naive_free_energy(model, beliefs, member) for member in range(model.batch_size)]
    assert free_energy(model, beliefs).tolist() == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(model=models(zeros=True))
def test_impossible_states_cost_nothing_if_the_beliefs_avoid_them(model):
    beliefs = exact_beliefs(model)
    assert free_energy(model, beliefs).item() == pytest.approx(naive_free_energy(model, beliefs, 0))


def test_mass_on_the_impossible_is_infinitely_bad():
    model = LogPotentials.from_factors([2], [((0,), [0.0, -math.inf])], dtype=torch.float64)
    beliefs = random_beliefs(RegionGraph.bethe(model.graph))
    assert free_energy(model, beliefs).item() == math.inf
    assert expected_log_potential(model, beliefs).item() == -math.inf
    # one member only of a batch of evidence
    batch = LogPotentials.from_factors([2], [((0,), [0.0, 0.0])], dtype=torch.float64).clamp({0: [-1, 1]})
    certain = torch.tensor([[[0.0, -math.inf]]], dtype=torch.float64).expand(2, 1, 2)
    found = free_energy(batch, Beliefs(RegionGraph.bethe(batch.graph), [certain, certain]))
    assert found.tolist() == [0.0, math.inf]


@settings(deadline=None, max_examples=40)
@given(model=models(batch=2), seed=st.integers(0, 1000))
def test_the_gradient_in_the_potentials_is_minus_the_beliefs(model, seed):
    tables = [table.clone().requires_grad_() for table in model.tables]
    terms = [term.clone().requires_grad_() for term in model.node_terms]
    grown = LogPotentials(model.graph, tables, terms)
    beliefs = random_beliefs(RegionGraph.bethe(model.graph), model.batch_size, seed)
    free_energy(grown, beliefs).sum().backward()
    for table, marginals in zip(tables, beliefs.factor_marginals, strict=True):
        torch.testing.assert_close(table.grad, -marginals)
    for term, logarithms in zip(terms, beliefs.node_log_tables, strict=True):
        torch.testing.assert_close(term.grad, -logarithms.exp().sum((0, 1), keepdim=True))


def test_the_gradient_of_a_shared_table_is_summed():
    graph = FactorGraph.chain(4, 3)
    tables = [torch.randn(1, 1, *group.table_shape, dtype=torch.float64) for group in graph.factor_groups]
    shared = [table.clone().requires_grad_() for table in tables]
    beliefs = random_beliefs(RegionGraph.bethe(graph), batch=2)
    expanded = LogPotentials(
        graph,
        [t.expand(2, len(g), *g.table_shape) for t, g in zip(tables, graph.factor_groups, strict=True)],
    )
    result = free_energy(LogPotentials(graph, shared), beliefs)
    torch.testing.assert_close(result, free_energy(expanded, beliefs))
    result.sum().backward()
    for table, marginals in zip(shared, beliefs.factor_marginals, strict=True):
        torch.testing.assert_close(table.grad, -marginals.sum((0, 1), keepdim=True))


def test_gradients_by_finite_differences():
    graph = FactorGraph([2, 3, 2], [(0, 1), (1, 2), (2,)])
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    beliefs = random_beliefs(RegionGraph.bethe(graph), batch=2)
    tables = [table.clone().requires_grad_() for table in beliefs.log_tables]

    def of_beliefs(*log_tables):
        return free_energy(model, Beliefs(beliefs.regions, log_tables))

    assert torch.autograd.gradcheck(of_beliefs, tables)

    def of_potentials(*tables):
        return free_energy(LogPotentials(graph, tables), beliefs)

    assert torch.autograd.gradcheck(of_potentials, [table.clone().requires_grad_() for table in model.tables])


@settings(deadline=None, max_examples=30)
@given(model=models(batch=2))
def test_mean_fields_free_energy_bounds_minus_log_z(model):
    graph = model.graph
    regions = RegionGraph.mean_field(graph)
    nodes = random_beliefs(regions, model.batch_size)
    tables = []
    for group in regions.groups[: len(graph.factor_groups)]:
        table = torch.zeros(model.batch_size, len(group), *group.table_shape, dtype=torch.float64)
        for row, scope in enumerate(group.variables.tolist()):
            for axis, variable in enumerate(scope):
                shape = [-1, *(group.table_shape[axis] if other == axis else 1 for other in range(len(scope)))]
                table[:, row] += nodes.node_marginal(variable).log().reshape(shape)
        tables.append(table)
    beliefs = Beliefs(regions, [*tables, *nodes.node_log_tables])
    entropy = sum(-(p * p.log()).sum((1, 2)) for p in (t.exp() for t in nodes.node_log_tables))
    torch.testing.assert_close(-negative_entropy(beliefs), entropy)
    assert (free_energy(model, beliefs) >= -enumerate_model(model).log_z - 1e-9).all()


def test_tree_reweighted_beliefs_count_factors_as_often_as_they_appear():
    graph = FactorGraph.complete(3, unary=False)
    regions = RegionGraph.tree_reweighted(graph, [torch.full((3,), 2 / 3)])
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    beliefs = exact_beliefs(model, regions)
    assert (free_energy(model, beliefs) <= -enumerate_model(model).log_z).all()  # an upper bound of log Z
    with pytest.raises(ValueError, match="factor group 0: expected 3 counting numbers, got"):
        RegionGraph.tree_reweighted(graph, [torch.ones(2)])
    with pytest.raises(ValueError, match="expected 1 tensors of probabilities; got 0"):
        RegionGraph.tree_reweighted(graph, [])


def test_the_empty_model_has_free_energy_zero():
    graph = FactorGraph([], [])
    assert free_energy(LogPotentials(graph, []), Beliefs(RegionGraph.bethe(graph), [])).tolist() == [0.0]


def test_potentials_and_beliefs_of_different_graphs():
    one, other = FactorGraph.chain(2), FactorGraph.chain(2)
    with pytest.raises(ValueError, match="the potentials and the beliefs are about different graphs"):
        free_energy(LogPotentials.random(one), random_beliefs(RegionGraph.bethe(other)))
