import math

import pytest
import torch

from bethenet import Beliefs, RegionGraph, free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.models.chain_bp import ChainBeliefPropagation
from bethenet.models.chain_dp import log_z
from bethenet.models.chain_tables import ChainTables
from chains import potentials_of, random_tables, random_unary

SCHEDULES = ["sweeps", "flooding"]


def beliefs_of(found, graph, order):
    pairs = [found.pair_marginals(lag) for lag in range(1, order + 1)]
    tables = [torch.cat(pairs, 1).log(), found.node_log_marginals]
    return Beliefs(RegionGraph.bethe(graph), tables)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_order_is_exact(schedule):
    transitions, tables = random_tables("pairwise", 1, 4)
    unary = random_unary(3, 6, 4)
    iterations = 1 if schedule == "sweeps" else 6
    found = ChainBeliefPropagation(schedule, iterations).run(unary, transitions)
    exact = log_z(unary, tables)
    torch.testing.assert_close(found.log_z, exact, atol=1e-10, rtol=0)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = torch.autograd.grad((exact * weights).sum(), [unary, transitions])
    gradient = torch.autograd.grad((found.log_z * weights).sum(), [unary, transitions])
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    torch.testing.assert_close(found.pair_sums(weights), expected[1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_the_free_energy_is_that_of_the_beliefs_converged_or_not(schedule, order, iterations):
    transitions, _ = random_tables("pairwise", order, 3)
    unary = random_unary(2, 6, 3)
    found = ChainBeliefPropagation(schedule, iterations).run(unary, transitions)
    potentials = potentials_of(unary, transitions)
    beliefs = beliefs_of(found, potentials.graph, order)
    torch.testing.assert_close(found.log_z, -free_energy(potentials, beliefs.detach()), atol=1e-10, rtol=0)
    truth = torch.autograd.grad(-free_energy(potentials, beliefs.detach()).sum(), [unary, transitions])
    gradient = torch.autograd.grad(found.log_z.sum(), [unary, transitions])
    for one, other in zip(gradient, truth, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("order", "steps"), [(2, 7), (3, 9), (4, 6), (3, 2), (2, 1)])
def test_the_fixed_point_is_the_general_engine_s(schedule, order, steps):
    transitions, _ = random_tables("pairwise", order, 3, scale=0.5)
    unary = random_unary(3, steps, 3)
    found = ChainBeliefPropagation(schedule, 300, damping=0.3, tolerance=1e-12).run(unary, transitions)
    assert (found.residual <= 1e-12).all()
    if steps == 1:
        torch.testing.assert_close(found.log_z, unary.logsumexp(2).squeeze(1))
        return
    potentials = potentials_of(unary, transitions)
    general = BeliefPropagation(max_iterations=2000, tolerance=1e-12, damping=0.3).run(potentials)
    torch.testing.assert_close(found.log_z, general.log_z, atol=1e-8, rtol=0)
    torch.testing.assert_close(found.node_marginals, general.beliefs.node_marginals, atol=1e-8, rtol=0)
    for lag in range(1, min(order, steps - 1) + 1):
        pairs = found.pair_marginals(lag)
        torch.testing.assert_close(pairs.sum(3), found.node_marginals[:, :-lag], atol=1e-9, rtol=0)
        torch.testing.assert_close(pairs.sum(2), found.node_marginals[:, lag:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_changes_no_number_and_rows_do_not_mix(schedule):
    transitions, _ = random_tables("pairwise", 3, 3)
    unary = random_unary(4, 8, 3)
    lengths = torch.tensor([8, 1, 5, 3])
    engine = ChainBeliefPropagation(schedule, 3, damping=0.1)
    padded = engine.run(unary, transitions, lengths)
    gradient = torch.autograd.grad(padded.log_z.sum(), [unary, transitions])
    total = torch.zeros_like(transitions)
    for row, length in enumerate(lengths.tolist()):
        part = unary[row : row + 1, :length].detach().requires_grad_()
        alone = engine.run(part, transitions)
        torch.testing.assert_close(padded.log_z[row], alone.log_z[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(padded.residual[row], alone.residual[0], atol=1e-12, rtol=0)
        marginals, counts = torch.autograd.grad(alone.log_z.sum(), [part, transitions])
        torch.testing.assert_close(gradient[0][row, :length], marginals[0], atol=1e-12, rtol=0)
        assert (gradient[0][row, length:] == 0).all()
        total += counts
    torch.testing.assert_close(gradient[1], total, atol=1e-11, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_go_on_where_they_stopped(schedule):
    transitions, _ = random_tables("pairwise", 3, 3)
    unary = random_unary(2, 7, 3)
    halves = ChainBeliefPropagation(schedule, 2)
    first = halves.run(unary, transitions)
    before = first.messages.forward.clone()
    second = halves.run(unary, transitions, messages=first.messages)
    assert torch.equal(first.messages.forward, before)
    whole = ChainBeliefPropagation(schedule, 4).run(unary, transitions)
    torch.testing.assert_close(second.log_z, whole.log_z, atol=1e-12, rtol=0)
    torch.testing.assert_close(second.residual, whole.residual, atol=1e-12, rtol=0)


def test_a_row_of_zeros_is_the_unclamped_chain():
    transitions, tables = random_tables("pairwise", 1, 4)
    unary = torch.cat([random_unary(2, 5, 4), torch.zeros(1, 5, 4, dtype=torch.float64)])
    found = ChainBeliefPropagation().run(unary, transitions)
    torch.testing.assert_close(found.log_z[2:], log_z(unary[2:], tables))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_zeros_and_strong_couplings_stay_finite(schedule):
    transitions = (torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0)) * 30).requires_grad_()
    unary = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(1)) * 30
    unary[0, 3, :4] = -math.inf
    found = ChainBeliefPropagation(schedule, 10).run(unary, transitions)
    assert torch.isfinite(found.log_z).all()
    assert torch.isfinite(found.node_marginals).all()
    assert found.node_marginals[0, 3].tolist() == [0, 0, 0, 0, 1]
    assert torch.isfinite(torch.autograd.grad(found.log_z.sum(), transitions)[0]).all()


def test_first_order_with_impossible_pairs_in_float64_is_exact():
    transitions, _ = random_tables("pairwise", 1, 3)
    with torch.no_grad():
        transitions[0, 0, 1] = -math.inf
    unary = random_unary(2, 5, 3)
    found = ChainBeliefPropagation().run(unary, transitions)
    exact = log_z(unary, ChainTables.pairwise(transitions))
    torch.testing.assert_close(found.log_z, exact, atol=1e-10, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_impossible_chain_leaves_the_others_alone(schedule):
    transitions, _ = random_tables("pairwise", 2, 3)
    unary = random_unary(2, 5, 3).detach()
    alone = ChainBeliefPropagation(schedule).run(unary[1:], transitions)
    unary[0, 2] = -math.inf
    found = ChainBeliefPropagation(schedule).run(unary, transitions)
    assert found.log_z[0] == -math.inf
    torch.testing.assert_close(found.log_z[1:], alone.log_z, atol=1e-13, rtol=0)
    assert torch.isfinite(torch.autograd.grad(found.log_z[1], transitions)[0]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "random"}, "schedule: expected"),
        ({"iterations": -1}, "iterations: expected"),
        ({"damping": 1.0}, "damping: expected"),
        ({"tolerance": -1.0}, "tolerance: expected"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        ChainBeliefPropagation(**options)


def test_messages_of_another_batch_are_refused():
    transitions, _ = random_tables("pairwise", 2, 3)
    found = ChainBeliefPropagation().run(random_unary(2, 5, 3), transitions)
    with pytest.raises(ValueError, match="messages: expected shape"):
        ChainBeliefPropagation().run(random_unary(3, 5, 3), transitions, messages=found.messages)
