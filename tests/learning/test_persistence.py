import copy

import pytest
import torch

from bethenet import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.learning import Batch, ByEngine, Likelihood
from bethenet.learning.persistence import Samples, StateMemory, advance, graph_key
from bethenet.models import IsingModel, TableModel


def ising(scale=0.4, models=1):
    generator = torch.Generator().manual_seed(0)
    return IsingModel.random(FactorGraph.grid(3, 3), coupling_scale=scale, models=models, generator=generator).double()


def data_batch(count=4, columns=9, indices=None, population=None):
    data = torch.randint(2, (count, columns), generator=torch.Generator().manual_seed(1))
    return Batch(data, count, indices, population)


def log_z(side, potentials, batch, clamped=False):
    return side.estimate(potentials, batch, clamped=clamped).log_z.detach()


def test_a_few_steps_from_the_last_state_converge_over_updates():
    potentials = ising().log_potentials().detach()
    converged = BeliefPropagation(tolerance=1e-12).run(potentials).log_z
    side = ByEngine(BeliefPropagation(), persistent=True, iterations=2)
    cold = ByEngine(BeliefPropagation(), iterations=2)
    errors = [float((log_z(side, potentials, data_batch()) - converged).abs().max()) for _ in range(30)]
    assert errors[-1] < 1e-8 < errors[0]
    assert float((log_z(cold, potentials, data_batch()) - converged).abs().max()) == pytest.approx(errors[0])


def test_evaluation_uses_the_state_and_leaves_it():
    potentials = ising().log_potentials().detach()
    side = ByEngine(BeliefPropagation(), persistent=True, iterations=1)
    log_z(side, potentials, data_batch())
    before = copy.deepcopy(side.state_dict())
    side.eval()
    result = side.estimate(potentials, data_batch(), clamped=False)
    assert result.residual.max() <= 1e-6
    after = side.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_states_are_kept_for_each_sample():
    model = TableModel(FactorGraph.grid(3, 3), observed=[0, 4], scale=0.5, generator=torch.Generator().manual_seed(0))
    side = ByEngine(BeliefPropagation(), persistent=True, iterations=3)
    data = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0, 0]])
    converged = BeliefPropagation(tolerance=1e-6).run(model.clamped(data).detach()).log_z
    orders = [torch.tensor([4, 0, 2]), torch.tensor([1, 3]), torch.tensor([2, 1, 0]), torch.tensor([3, 4])] * 6
    errors = []
    for order in orders:
        batch = Batch(data[order], len(order), order, 5)
        found = log_z(side, model.clamped(data[order]).detach(), batch, clamped=True)
        errors.append(float((found - converged[order]).abs().max()))
    assert max(errors[-4:]) < 1e-4 < max(errors[:2])


def test_models_side_by_side_keep_their_states():
    potentials = ising(models=3).log_potentials().detach()
    side = ByEngine(BeliefPropagation(), persistent=True, iterations=2)
    for _ in range(30):
        found = log_z(side, potentials, data_batch())
    torch.testing.assert_close(found, BeliefPropagation(tolerance=1e-12).run(potentials).log_z)


def test_memory_by_graph_and_sample():
    memory = StateMemory()
    small, large = FactorGraph.chain(2), FactorGraph.chain(3)
    cold = (torch.zeros(2, 4), None, (torch.zeros(2),))
    assert memory.recall(small, cold) is cold
    memory.remember(small, (torch.ones(2, 4), None, (torch.full((2,), 2.0),)))
    found = memory.recall(small, cold)
    assert found[0].eq(1).all()
    assert found[1] is None
    assert found[2][0].eq(2).all()
    assert memory.recall(large, cold) is cold
    assert memory.recall(FactorGraph.chain(2), cold)[0].eq(1).all(), "an equal graph is the same graph"
    three = (torch.zeros(3, 4), None, (torch.zeros(3),))
    assert memory.recall(small, three) is three, "another batch starts cold"

    memory.remember(large, (torch.ones(2, 4),), Samples(torch.tensor([3, 1]), 5))
    rows = memory.recall(large, (torch.zeros(3, 4),), Samples(torch.tensor([0, 1, 3]), 5))[0]
    assert rows[:, 0].tolist() == [0, 1, 1]

    other = StateMemory()
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.recall(large, (torch.zeros(3, 4),), Samples(torch.tensor([0, 1, 3]), 5))[0], rows)
    memory.forget()
    assert memory.recall(small, cold) is cold
    assert other.recall(small, cold)[0].eq(1).all()


def test_graph_keys_tell_structures_apart():
    graphs = [
        FactorGraph.chain(3),
        FactorGraph.chain(3, states=3),
        FactorGraph.chain(3, unary=False),
        FactorGraph([2, 2, 2], [(0,), (1,), (2,), (0, 1), (0, 2)]),
    ]
    assert len({graph_key(graph) for graph in graphs}) == len(graphs)
    assert graph_key(FactorGraph.chain(3)) == graph_key(FactorGraph.chain(3))


def test_a_step_that_is_not_finite_is_not_taken():
    class Wild:
        def step(self, problem, state):
            return (state[0] + 1,), torch.tensor([0.5, torch.nan])

    state, residual = advance(Wild(), None, (torch.zeros(2, 1),), 3)
    assert state[0].flatten().tolist() == [3, 0]
    assert residual[0] == 0.5


def test_gradients_are_those_of_the_beliefs():
    model = ising()
    batch = data_batch()
    objective = Likelihood(model, ByEngine(BeliefPropagation(), persistent=True, iterations=4))
    for _ in range(30):
        (update,) = objective.updates(batch)
    found = torch.autograd.grad(update.loss.sum(), [*model.parameters()])
    (update,) = Likelihood(model, BeliefPropagation(tolerance=1e-12)).updates(batch)
    torch.testing.assert_close(found, torch.autograd.grad(update.loss.sum(), [*model.parameters()]))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="Exact is not iterative"):
        ByEngine(Exact(), persistent=True)
    with pytest.raises(ValueError, match="iterations: expected at least 1"):
        ByEngine(BeliefPropagation(), iterations=0)
    side = ByEngine(BeliefPropagation(), persistent=True)
    potentials = ising().log_potentials().detach()
    with pytest.raises(ValueError, match="samples' indices"):
        side.estimate(potentials, data_batch(), clamped=True)
    with pytest.raises(ValueError, match="population"):
        side.estimate(potentials, data_batch(indices=torch.arange(4)), clamped=True)
