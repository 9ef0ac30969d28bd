"""`Beliefs`: reading marginals, and how far regions disagree."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import Beliefs, FactorGraph, LogPotentials, RegionGraph
from bethenet.beliefs import marginalize
from oracle import enumerate_model, models


def exact_beliefs(model, regions=None):
    """The true marginals as beliefs, by enumeration."""
    truth, regions = enumerate_model(model), regions or RegionGraph.bethe(model.graph)
    tables = []
    for group in regions.groups:
        members = [truth.marginal(tuple(scope)) for scope in group.variables.tolist()]
        tables.append(torch.stack(members, dim=1).log())
    return Beliefs(regions, tables)


def random_beliefs(regions, batch=1, seed=0):
    """Normalised, but not consistent."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for group in regions.groups:
        table = torch.randn(batch, len(group), math.prod(group.table_shape), dtype=torch.float64, generator=generator)
        tables.append(table.log_softmax(-1).reshape(batch, len(group), *group.table_shape))
    return Beliefs(regions, tables)


@settings(deadline=None, max_examples=40)
@given(model=models(batch=2, zeros=True))
def test_marginals_are_read_as_they_were_put_in(model):
    truth, beliefs = enumerate_model(model), exact_beliefs(model)
    assert beliefs.graph is model.graph
    assert beliefs.inconsistency().max() < 1e-12
    longest = int(model.graph.state_counts.max())
    assert beliefs.node_marginals.shape[1:] == (model.graph.num_variables, longest)
    for variable in range(model.graph.num_variables):
        expected = truth.marginal((variable,))
        torch.testing.assert_close(beliefs.node_marginal(variable), expected)
        torch.testing.assert_close(beliefs.node_marginals[:, variable, : expected.shape[1]], expected)
        assert not beliefs.node_marginals[:, variable, expected.shape[1] :].any()
    for factor, scope in enumerate(model.graph.scopes()):
        torch.testing.assert_close(beliefs.factor_marginal(factor), truth.marginal(scope))
        group, row = model.graph.locate_factor(factor)
        torch.testing.assert_close(beliefs.factor_marginals[group][:, row], truth.marginal(scope))


@settings(deadline=None, max_examples=40)
@given(model=models(), seed=st.integers(0, 1000))
def test_inconsistency_is_the_largest_disagreement(model, seed):
    graph = model.graph
    beliefs = random_beliefs(RegionGraph.bethe(graph), batch=2, seed=seed)
    worst = torch.zeros(2, dtype=torch.float64)
    for factor, scope in enumerate(graph.scopes()):
        table = beliefs.factor_marginal(factor)
        for axis, variable in enumerate(scope):
            others = [1 + other for other in range(len(scope)) if other != axis]
            summed = table.sum(others) if others else table
            worst = torch.maximum(worst, (summed - beliefs.node_marginal(variable)).abs().amax(1))
    torch.testing.assert_close(beliefs.inconsistency(), worst)


def test_by_name_and_by_slice():
    graph = FactorGraph([2, 3], [(0, 1)], ["a", "b"])
    beliefs = random_beliefs(RegionGraph.bethe(graph), batch=3)
    torch.testing.assert_close(beliefs.node_marginal("b"), beliefs.node_marginal(1))
    part = beliefs[1:]
    assert part.batch_size == 2
    assert torch.equal(part.node_marginal("a"), beliefs.node_marginal("a")[1:])
    grown = Beliefs(beliefs.regions, [table.clone().requires_grad_() for table in beliefs.log_tables])
    assert not any(table.requires_grad for table in grown.detach().log_tables)


def test_beliefs_about_nothing():
    beliefs = Beliefs(RegionGraph.bethe(FactorGraph([], [])), [])
    assert beliefs.batch_size == 1
    assert beliefs.node_marginals.shape == (1, 0, 0)
    assert beliefs.inconsistency().tolist() == [0.0]
    assert beliefs.factor_marginals == ()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_marginalize_sums_and_reorders(data):
    shape = data.draw(st.lists(st.integers(1, 3), max_size=4))
    axes = data.draw(st.permutations(range(len(shape)))) if shape else []
    axes = axes[: data.draw(st.integers(0, len(shape)))]
    table = torch.randn(2, 3, *shape, dtype=torch.float64)
    letters = "".join(chr(ord("a") + axis) for axis in range(len(shape)))
    expected = torch.einsum(f"yz{letters}->yz{''.join(letters[axis] for axis in axes)}", table.exp())
    torch.testing.assert_close(marginalize(table, axes).exp(), expected)


def test_wrong_beliefs():
    regions = RegionGraph.bethe(FactorGraph([2, 3], [(0, 1)]))
    with pytest.raises(ValueError, match="expected 3 log-tables, one a region group; got 1"):
        Beliefs(regions, [torch.zeros(1, 1, 2, 3)])
    with pytest.raises(ValueError, match=r"region group 0: expected shape \[batch, 1, 2, 3\], got \[1, 2, 3\]"):
        Beliefs(regions, [torch.zeros(1, 2, 3), torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)])
    with pytest.raises(ValueError, match="region group 2: expected batch 2 as the first table has, got 1"):
        Beliefs(regions, [torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 2), torch.zeros(1, 1, 3)])
    with pytest.raises(ValueError, match="variable 2 does not exist"):
        random_beliefs(regions).node_marginal(2)
    with pytest.raises(ValueError, match="factor 1 does not exist"):
        random_beliefs(regions).factor_marginal(1)


def test_a_constant_factor_has_a_belief_of_one():
    model = LogPotentials.from_factors([2], [((), 3.0), ((0,), [0.0, 1.0])], dtype=torch.float64)
    beliefs = exact_beliefs(model)
    assert beliefs.factor_marginal(0).tolist() == pytest.approx([1.0])
    assert beliefs.factor_marginal(1)[0].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])
