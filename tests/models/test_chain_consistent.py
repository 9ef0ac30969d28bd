import pytest
import torch

from bethenet import free_energy
from bethenet.inference.coupling import consistent_beliefs
from bethenet.models.chain_bp import ChainBeliefPropagation
from bethenet.models.chain_consistent import consistent_chain_beliefs
from chains import potentials_of, random_tables, random_unary


@pytest.mark.parametrize(("order", "steps"), [(1, 5), (3, 7), (3, 2)])
def test_beliefs_are_those_of_the_general_scaling(order, steps):
    transitions, _ = random_tables("pairwise", order, 3)
    unary = random_unary(2, steps, 3)
    log_q = torch.log_softmax(random_unary(2, steps, 3, seed=5).detach(), 2)
    found = consistent_chain_beliefs(unary, transitions, log_q, iterations=200)
    potentials = potentials_of(unary, transitions)
    wanted = consistent_beliefs(potentials.detach(), [log_q])
    pairs = torch.cat([found.pair_marginals(lag) for lag in range(1, order + 1)], 1)
    torch.testing.assert_close(pairs, wanted.log_tables[0].exp(), atol=1e-8, rtol=0)
    value = -free_energy(potentials, wanted)
    torch.testing.assert_close(found.log_z, value, atol=1e-8, rtol=0)
    assert (found.inconsistency() < 1e-8).all()
    gradient = torch.autograd.grad(found.log_z.sum(), [unary, transitions])
    for one, other in zip(gradient, torch.autograd.grad(value.sum(), [unary, transitions]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=0)


def test_belief_propagation_s_marginals_give_its_messages():
    transitions, _ = random_tables("pairwise", 3, 3, scale=0.5)
    unary = random_unary(2, 8, 3)
    fixed = ChainBeliefPropagation("sweeps", 200).run(unary, transitions)
    found = consistent_chain_beliefs(unary, transitions, fixed.node_log_marginals, iterations=200)
    torch.testing.assert_close(found.log_z, fixed.log_z, atol=1e-9, rtol=0)
    more = ChainBeliefPropagation("sweeps", 1).run(unary, transitions, messages=found.messages)
    assert (more.residual < 1e-9).all()


def test_inconsistency_is_the_largest_gap_of_any_pair():
    transitions, _ = random_tables("pairwise", 2, 3)
    unary = random_unary(3, 5, 3)
    found = ChainBeliefPropagation("sweeps", 1).run(unary, transitions, torch.tensor([5, 3, 1]))
    gaps = []
    for lag in (1, 2):
        pairs, nodes = found.pair_marginals(lag), found.node_marginals
        real = pairs.sum((2, 3)) > 0
        for said, node in ((pairs.sum(3), nodes[:, :-lag]), (pairs.sum(2), nodes[:, lag:])):
            gaps.append(((said - node).abs() * real.unsqueeze(2)).amax((1, 2)))
    wanted = torch.stack(gaps).amax(0)
    torch.testing.assert_close(found.inconsistency(), wanted.detach(), atol=1e-12, rtol=0)
    assert wanted[0] > 1e-3
    assert wanted[2] == 0


def test_wrong_input_is_refused():
    transitions, _ = random_tables("pairwise", 2, 3)
    unary = random_unary(3, 5, 3)
    with pytest.raises(ValueError, match="node_log_marginals"):
        consistent_chain_beliefs(unary, transitions, unary[:, :4])
    with pytest.raises(ValueError, match="iterations"):
        consistent_chain_beliefs(unary, transitions, unary, iterations=0)
