import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.bipartite import BipartiteBeliefPropagation, Machine
from bethenet.inference.bp import BeliefPropagation
from bethenet.models.rbm import RBM
from oracle import enumerate_model


def random_machine(left, right, scale=1.0, seed=0, batch=1, unary=True):
    graph = FactorGraph.bipartite(left, right, unary=unary)
    generator = torch.Generator().manual_seed(seed)
    return LogPotentials.random(graph, scale, batch_size=batch, dtype=torch.float64, generator=generator)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_the_same_as_belief_propagation(left, right, seed, unary):
    potentials = random_machine(left, right, 0.5, seed, batch=2, unary=unary)
    ours = BipartiteBeliefPropagation(tolerance=1e-11).run(potentials)
    theirs = BeliefPropagation(tolerance=1e-11).run(potentials)
    assert ours.converged.all()
    assert theirs.converged.all()
    torch.testing.assert_close(ours.log_z, theirs.log_z)
    for mine, other in zip(ours.beliefs.log_tables, theirs.beliefs.log_tables, strict=True):
        torch.testing.assert_close(mine, other)


def test_exact_on_a_star_however_strong():
    potentials = random_machine(1, 6, 30.0)
    result = BipartiteBeliefPropagation().run(potentials)
    truth = enumerate_model(potentials)
    torch.testing.assert_close(result.log_z, truth.log_z)
    for variable in range(7):
        torch.testing.assert_close(result.beliefs.node_marginals[:, variable], truth.marginal((variable,)))


def test_messages_in_single_precision():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 200, 200, generator=generator) * 160 - 80
    cavities = torch.rand(1, 200, 200, generator=generator) * 160 - 80
    machine = Machine(FactorGraph.bipartite(200, 200), weights, weights[:, 0], weights[:, 0])
    exact = torch.nn.functional.softplus((weights + cavities).double(), threshold=90)
    exact -= torch.nn.functional.softplus(cavities.double(), threshold=90)
    torch.testing.assert_close(machine.message(cavities).double(), exact, rtol=1e-6, atol=1e-4)


def test_messages_over_huge_couplings_are_numbers():
    weights = torch.tensor([[[500.0, -500.0]]])
    machine = Machine(FactorGraph.bipartite(1, 2), weights, weights[:, 0, :1], weights[:, 0])
    limit = torch.tensor([[[88.72, -88.72]]])
    torch.testing.assert_close(machine.message(torch.full_like(weights, 600.0)), limit, rtol=1e-4, atol=0)
    assert machine.message(torch.full_like(weights, -600.0)).tolist() == [[[0, 0]]]


def test_batch_is_its_members_one_by_one():
    potentials = random_machine(4, 3, batch=5)
    together = BipartiteBeliefPropagation(damping=0.2).run(potentials)
    for member in range(5):
        alone = BipartiteBeliefPropagation(damping=0.2).run(potentials[member : member + 1])
        torch.testing.assert_close(together.log_z[member], alone.log_z[0])
        assert together.iterations[member] == alone.iterations[0]


def test_the_gradient_of_log_z_is_the_beliefs():
    potentials = random_machine(4, 3)
    tables = [table.requires_grad_() for table in potentials.tables]
    result = BipartiteBeliefPropagation(tolerance=1e-12).run(LogPotentials(potentials.graph, tables))
    result.log_z.sum().backward()
    for table, belief in zip(tables, result.beliefs.factor_log_tables, strict=True):
        torch.testing.assert_close(table.grad, belief.exp())


def test_soft_evidence_and_shared_tables():
    potentials = RBM(5, 4, weight_scale=0.7, generator=torch.Generator().manual_seed(3)).double().log_potentials()
    weighted = potentials.clamp({0: torch.tensor([[0.2, 0.8], [0.5, 0.1]], dtype=torch.float64)})
    ours = BipartiteBeliefPropagation(tolerance=1e-11).run(weighted)
    theirs = BeliefPropagation(tolerance=1e-11).run(weighted)
    torch.testing.assert_close(ours.log_z, theirs.log_z)
    shared = LogPotentials(FactorGraph.bipartite(3, 2), [torch.randn(1, 1, 2), torch.randn(1, 1, 2, 2)])
    torch.testing.assert_close(BipartiteBeliefPropagation().run(shared).log_z, BeliefPropagation().run(shared).log_z)


def test_starts_from_beliefs_where_they_left_off():
    potentials = random_machine(5, 4, 0.6)
    engine = BipartiteBeliefPropagation(tolerance=1e-11)
    result = engine.run(potentials)
    problem = engine.prepare(potentials)
    state = engine.init(problem, engine.state_from_beliefs(problem, result.beliefs))
    torch.testing.assert_close(state.to_left, result.state.to_left)
    assert engine.run(potentials, state=state).iterations.item() == 1


def test_noise_finds_the_other_fixed_point():
    # all units want to be equal, and neither state is better
    model = RBM(6, 6).double()
    with torch.no_grad():
        model.weights.fill_(4.0)
        model.visible_bias.fill_(-12.0)
        model.hidden_bias.fill_(-12.0)
    potentials = model.log_potentials()
    noisy = BipartiteBeliefPropagation(noise=8.0)

    def end(seed):
        result = noisy.run(potentials, generator=torch.Generator().manual_seed(seed))
        assert result.converged.all()
        return result.beliefs.node_marginals[0, 0, 1].item()

    ends = [end(seed) for seed in range(8)]
    assert min(ends) < 0.01
    assert max(ends) > 0.99
    assert torch.equal(noisy.run(potentials).log_z, noisy.run(potentials).log_z)


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"FactorGraph\.bipartite"):
        BipartiteBeliefPropagation().run(LogPotentials.random(FactorGraph.grid(2, 2)))
    with pytest.raises(ValueError, match=r"FactorGraph\.bipartite"):
        BipartiteBeliefPropagation().run(LogPotentials.random(FactorGraph.bipartite(2, 2, 3, 2)))
    potentials = random_machine(2, 2)
    with pytest.raises(ValueError, match="finite"):
        BipartiteBeliefPropagation().run(potentials.clamp({0: 1}))
    with pytest.raises(ValueError, match="damping"):
        BipartiteBeliefPropagation(damping=1.0)
    with pytest.raises(ValueError, match="noise"):
        BipartiteBeliefPropagation(noise=-1.0)
    other = BipartiteBeliefPropagation().run(random_machine(3, 2)).state
    with pytest.raises(ValueError, match="state"):
        BipartiteBeliefPropagation().run(potentials, state=other)
