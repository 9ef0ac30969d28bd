import itertools

import pytest
import torch

from bethenet.learning import OptimizerOptions, Schedule, Trainer, TrainerOptions
from bethenet.learning.objective import Batch
from bethenet.learning.variational import VariationalUpperBound, log_z_bound
from bethenet.models import RBM
from bethenet.networks.proposals import AutoregressiveNetwork, MixtureOfProducts

STATES = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5)), dtype=torch.float64)


def proposal(kind, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_odds = spread * torch.randn(5, dtype=torch.float64, generator=generator)
    if kind == "mixture":
        return MixtureOfProducts(log_odds, 3, noise=spread, generator=generator)
    return AutoregressiveNetwork(log_odds, 6, scale=spread, generator=generator)


def machine(scale=0.6, seed=0):
    return RBM(5, 4, weight_scale=scale, generator=torch.Generator().manual_seed(seed)).double()


def exact_bound(model, q):
    return 0.5 * torch.logsumexp(2 * model.score(STATES).squeeze(1) - q.log_prob(STATES), 0)


@pytest.mark.parametrize("kind", ["mixture", "network"])
def test_proposals_are_distributions_and_are_sampled(kind):
    q = proposal(kind)
    chances = q.log_prob(STATES).exp()
    assert chances.sum().item() == pytest.approx(1)
    states = q.sample(40_000, torch.Generator().manual_seed(1))
    assert set(states.unique().tolist()) == {0.0, 1.0}
    numbers = (states @ 2.0 ** torch.arange(4, -1, -1, dtype=torch.float64)).long()
    counts = torch.bincount(numbers, minlength=32) / len(states)
    torch.testing.assert_close(counts.double(), chances.detach(), atol=0.01, rtol=0)


@pytest.mark.parametrize("kind", ["mixture", "network"])
def test_the_bound_is_above_log_z_and_estimated_without_bias(kind):
    model, q = machine(), proposal(kind, 0.3)
    exact = exact_bound(model, q)
    assert exact > model.log_z() + 1e-3
    found = log_z_bound(model, q, 20_000, generator=torch.Generator().manual_seed(0))
    assert abs(found.log_z - exact) < 5 * found.standard_error
    assert 0 < found.standard_error < 0.05
    assert 1 < found.effective_sample_size <= 20_000


@pytest.mark.parametrize("kind", ["mixture", "network"])
def test_gradients_are_those_of_the_bound(kind):
    model, q = machine(), proposal(kind, 0.3)
    data = STATES[:7]
    objective = VariationalUpperBound(model, q, samples=100_000)
    losses = {
        update.parts[0]: update.loss for update in objective.updates(Batch(data, 7), torch.Generator().manual_seed(0))
    }
    bound = exact_bound(model, q)
    nll = bound - model.score(data).mean()
    for part, loss, truth in (("model", losses["model"], nll), ("proposal", losses["proposal"], bound)):
        parameters = list(objective.parts()[part].parameters())
        found = torch.autograd.grad(loss, parameters)
        wanted = torch.autograd.grad(truth, parameters, retain_graph=True)
        for mine, true in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, true, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["mixture", "network"])
def test_learns_with_a_bound_that_holds(kind):
    teacher = machine(2.0, seed=4)
    data = teacher.sample_exactly(1000, generator=torch.Generator().manual_seed(1)).double()
    truth = -teacher.log_likelihood(data).mean().item()
    model, q = machine(0.01), proposal(kind, 0.1)
    optimizer = OptimizerOptions(learning_rate=0.02, schedule=Schedule("cosine"))
    options = TrainerOptions(epochs=15, optimizers={"model": optimizer, "proposal": optimizer})
    before = -model.log_likelihood(data).mean().item()
    Trainer(VariationalUpperBound(model, q), options).fit(data, data)
    after = -model.log_likelihood(data).mean().item()
    bound = float(exact_bound(model, q)) - model.score(data).mean().item()
    assert after < bound < after + 0.3
    assert after < truth + 0.3 < before


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="samples"):
        VariationalUpperBound(machine(), proposal("mixture"), samples=0)
    with pytest.raises(ValueError, match="components"):
        MixtureOfProducts(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="hidden"):
        AutoregressiveNetwork(torch.zeros(3), 0)
