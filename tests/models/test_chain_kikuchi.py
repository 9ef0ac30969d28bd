import math

import pytest
import torch

from bethenet import Beliefs, FactorGraph, LogPotentials, RegionGraph, free_energy
from bethenet.models.chain_bp import ChainBeliefPropagation
from bethenet.models.chain_dp import log_z
from bethenet.models.chain_kikuchi import ChainKikuchi
from bethenet.models.chain_tables import ChainTables
from chains import potentials_of, random_tables, random_unary
from oracle import enumerate_model


def region_beliefs(found, sent, unary, transitions, core):
    """The result as beliefs of the cluster variation method's regions; the core's by enumeration given messages."""
    _batch, steps, states = unary.shape
    order = transitions.shape[0]
    received = sent.backward[:, order:].sum(0)
    for row in range(order - core):
        received = received + sent.forward[row, row : row + steps]
    chain = potentials_of(unary + received.transpose(0, 1), transitions[:core])
    truth = enumerate_model(chain.detach())
    graph = FactorGraph.chain(steps, states, order, unary=False)
    clusters = [tuple(range(start, start + core + 1)) for start in range(steps - core)]
    regions = RegionGraph.kikuchi(graph, clusters)
    tables = []
    for group in regions.groups:
        members = []
        for scope in group.variables.tolist():
            long = len(scope) == 2 and scope[1] - scope[0] > core
            members.append(
                found.pair_marginals(scope[1] - scope[0])[:, scope[0]] if long else truth.marginal(tuple(scope))
            )
        tables.append(torch.stack(members, 1).log())
    potentials = LogPotentials(graph, potentials_of(unary, transitions).tables, [unary])
    return potentials, Beliefs(regions, tables)


@pytest.mark.parametrize(("order", "core", "steps"), [(3, 2, 6), (2, 1, 6), (3, 1, 5), (4, 2, 6), (4, 3, 6)])
@pytest.mark.parametrize(("iterations", "scaling"), [(0, 0), (2, 0), (2, 2)])
def test_the_free_energy_is_that_of_the_cluster_variation_method(order, core, steps, iterations, scaling):
    transitions, _ = random_tables("pairwise", order, 2)
    unary = random_unary(2, steps, 2)
    found = ChainKikuchi(core, iterations, scaling=scaling).run(unary, transitions)
    # the core's beliefs are by the messages before the long pairs' were scaled
    before = ChainKikuchi(core, iterations).run(unary, transitions)
    potentials, beliefs = region_beliefs(found, before.messages, unary, transitions, core)
    torch.testing.assert_close(found.log_z, -free_energy(potentials, beliefs.detach()), atol=1e-10, rtol=0)
    truth = torch.autograd.grad(-free_energy(potentials, beliefs.detach()).sum(), [unary, transitions])
    gradient = torch.autograd.grad(found.log_z.sum(), [unary, transitions])
    for one, other in zip(gradient, truth, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("order", "core"), [(3, 2), (3, 1), (2, 1)])
def test_at_the_fixed_point_beliefs_agree_and_the_free_energy_is_stationary(order, core):
    transitions, _ = random_tables("pairwise", order, 2, scale=0.7)
    unary = random_unary(2, 7, 2)
    engine = ChainKikuchi(core, 100, damping=0.1, tolerance=1e-12)
    found = engine.run(unary, transitions)
    assert (found.residual <= 1e-12).all()
    for lag in range(core + 1, order + 1):
        pairs = found.pair_marginals(lag)
        torch.testing.assert_close(pairs.sum(3), found.node_marginals[:, :-lag], atol=1e-9, rtol=0)
        torch.testing.assert_close(pairs.sum(2), found.node_marginals[:, lag:], atol=1e-9, rtol=0)
    assert torch.autograd.gradcheck(
        lambda u, w: engine.run(u, w).log_z, (unary[:1, :4].detach().requires_grad_(), transitions), atol=1e-6
    )


def test_scaled_beliefs_agree_and_their_log_z_is_below_the_best_ones():
    transitions, _ = random_tables("pairwise", 3, 3)
    unary = random_unary(30, 9, 3) * 2
    best = ChainKikuchi(iterations=300, damping=0.3, tolerance=1e-12).run(unary, transitions)
    assert (best.residual <= 1e-12).all()
    astray, scaled = (ChainKikuchi(iterations=1, scaling=scaling).run(unary, transitions) for scaling in (0, 100))
    assert astray.inconsistency().amax() > 0.05
    assert scaled.inconsistency().amax() < 1e-8
    assert (astray.log_z > best.log_z).any()
    assert (scaled.log_z < best.log_z + 1e-10).all()


def test_it_is_exact_where_only_the_core_joins_and_nearer_than_bethe_otherwise():
    transitions, _ = random_tables("pairwise", 3, 3)
    unary = random_unary(20, 8, 3)
    with torch.no_grad():
        transitions[2] *= 0.3
        tables = ChainTables.pairwise(transitions)
        errors = [
            (engine.run(unary, transitions).log_z - log_z(unary, tables)).abs().mean()
            for engine in (ChainKikuchi(iterations=50), ChainBeliefPropagation(iterations=50, damping=0.3))
        ]
        assert errors[0] < 0.5 * errors[1]
        transitions[2] = 0
        found = ChainKikuchi(iterations=1).run(unary, transitions)
        torch.testing.assert_close(found.log_z, log_z(unary, ChainTables.pairwise(transitions)), atol=1e-10, rtol=0)


def test_padding_changes_no_number():
    transitions, _ = random_tables("pairwise", 3, 3)
    unary = random_unary(4, 8, 3)
    lengths = torch.tensor([8, 1, 5, 3])
    engine = ChainKikuchi(iterations=3, damping=0.1)
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


def test_messages_go_on_where_they_stopped():
    transitions, _ = random_tables("pairwise", 3, 3)
    unary = random_unary(2, 7, 3)
    first = ChainKikuchi(iterations=2).run(unary, transitions)
    second = ChainKikuchi(iterations=2).run(unary, transitions, messages=first.messages)
    whole = ChainKikuchi(iterations=4).run(unary, transitions)
    torch.testing.assert_close(second.log_z, whole.log_z, atol=1e-12, rtol=0)


def test_impossible_chains_and_strong_couplings_stay_finite():
    transitions = (torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0)) * 20).requires_grad_()
    unary = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(1)) * 20
    unary[0, 3, :4] = -math.inf
    unary[2, 3] = -math.inf
    found = ChainKikuchi().run(unary, transitions)
    assert torch.isfinite(found.log_z[:2]).all()
    assert found.log_z[2] == -math.inf
    assert torch.isfinite(found.node_marginals[:2]).all()
    assert torch.isfinite(torch.autograd.grad(found.log_z[:2].sum(), transitions)[0]).all()


def test_wrong_input():
    transitions, _ = random_tables("pairwise", 2, 3)
    with pytest.raises(ValueError, match="core: expected less than the chain's order 2, got 2"):
        ChainKikuchi(2).run(random_unary(1, 4, 3), transitions)
    with pytest.raises(ValueError, match="scaling: expected at least 0"):
        ChainKikuchi(scaling=-1)
    with pytest.raises(ValueError, match="core: expected at least 1"):
        ChainKikuchi(0)
    with pytest.raises(ValueError, match="lag: expected 2 to 2"):
        ChainKikuchi(1).run(random_unary(1, 4, 3), transitions).pair_marginals(1)
