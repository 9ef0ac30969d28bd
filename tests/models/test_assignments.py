import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.models import assignments
from oracle import enumerate_model, models


def conditionals_by_enumeration(potentials, states):
    """log P(x_v = k | rest) for one state vector: [batch, variable] -> list of [batch, states]."""
    found = []
    for variable, count in enumerate(potentials.graph.state_counts.tolist()):
        changed = states.repeat(count, 1)
        changed[:, variable] = torch.arange(count)
        found.append(torch.log_softmax(potentials.score(changed), 0).T)
    return found


@settings(deadline=None, max_examples=40)
@given(models(batch=3, zeros=True))
def test_score_and_conditionals_equal_enumeration(potentials):
    states = enumerate_model(potentials).assignments
    scores = potentials.score(states)
    torch.testing.assert_close(assignments.score(potentials, states), scores)
    possible = torch.isfinite(scores).all(1)
    pseudo = assignments.pseudo_log_likelihood(potentials, states)
    for state, found in list(zip(states[possible], pseudo[possible], strict=True))[:10]:
        truth = conditionals_by_enumeration(potentials, state)
        total = sum(table[:, value] for table, value in zip(truth, state.tolist(), strict=True))
        torch.testing.assert_close(found, total)


@settings(deadline=None, max_examples=20)
@given(models(batch=3))
def test_states_of_their_own_are_scored_by_each_member(potentials):
    everything = enumerate_model(potentials).assignments
    states = torch.stack([everything, everything.flip(0), everything.roll(1, 0)], dim=1)[:, : potentials.batch_size]
    for function in (assignments.score, assignments.pseudo_log_likelihood):
        together = function(potentials, states)
        for member in range(potentials.batch_size):
            alone = function(potentials[member], states[:, member])
            torch.testing.assert_close(together[:, member : member + 1], alone)


def test_conditionals_of_shared_tables_and_evidence():
    graph = FactorGraph.chain(4, states=3)
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 1, *g.table_shape, generator=generator, dtype=torch.float64) for g in graph.factor_groups]
    shared = LogPotentials(graph, tables).clamp({1: torch.tensor([0.2, 0.5, 1.0])})
    whole = LogPotentials(
        graph,
        [t.expand(-1, len(g), *g.table_shape) for t, g in zip(tables, graph.factor_groups, strict=True)],
        shared.node_terms,
    )
    states = torch.randint(3, (5, 4), generator=generator)
    found = assignments.conditional_log_probabilities(shared, states)[0]
    assert found.shape == (5, 2, 4, 3)
    torch.testing.assert_close(found, assignments.conditional_log_probabilities(whole, states)[0])
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(5, 2, 4, dtype=torch.float64))


@pytest.mark.parametrize("states", [torch.zeros(5, 3, dtype=torch.long), torch.zeros(5, 2, 4, dtype=torch.long)])
def test_wrong_shapes_are_named(states):
    potentials = LogPotentials.random(FactorGraph.chain(4), batch_size=3)
    with pytest.raises(ValueError, match=r"expected states of shape \[samples, 4\]"):
        assignments.score(potentials, states)


def test_small_integers_do_not_overflow():
    graph = FactorGraph([20, 20, 20], [(0, 1, 2)])
    potentials = LogPotentials.random(graph, generator=torch.Generator().manual_seed(0))
    states = torch.tensor([[19, 18, 17], [3, 19, 1]])
    for function in (assignments.score, assignments.pseudo_log_likelihood):
        torch.testing.assert_close(function(potentials, states.to(torch.uint8)), function(potentials, states))


def test_floating_states_are_refused():
    with pytest.raises(ValueError, match="integer states"):
        assignments.score(LogPotentials.random(FactorGraph.chain(4)), torch.zeros(5, 4))


def test_no_samples_and_no_factors():
    potentials = LogPotentials.random(FactorGraph.chain(3), batch_size=2)
    assert assignments.pseudo_log_likelihood(potentials, torch.zeros(0, 3, dtype=torch.long)).shape == (0, 2)
    empty = LogPotentials(FactorGraph([2, 3], []), [])
    states = torch.tensor([[1, 2]])
    torch.testing.assert_close(assignments.pseudo_log_likelihood(empty, states), -torch.tensor([[6.0]]).log())
