import torch

from bethenet import FactorGraph
from bethenet.inference.exact import Exact
from bethenet.learning import Batch, DirectLikelihood, PseudoLikelihood, Trainer, TrainerOptions
from bethenet.learning.optimization import OptimizerOptions, Schedule
from bethenet.models import IsingModel, TableModel


def test_it_is_the_sum_of_conditionals():
    model = TableModel(FactorGraph([2, 3], [(0, 1), (1,)]), scale=1.0, generator=torch.Generator().manual_seed(0))
    data = torch.tensor([[0, 2], [1, 0]])
    pair, unary = model.tables[1][0, 0], model.tables[0][0, 0]
    truth = [torch.log_softmax(pair[:, b], 0)[a] + torch.log_softmax(pair[a] + unary, 0)[b] for a, b in data.tolist()]
    objective = PseudoLikelihood(model)
    (update,) = objective.updates(Batch(data, 2))
    torch.testing.assert_close(update.loss, -torch.stack(truth).mean().reshape(1))
    torch.testing.assert_close(objective.evaluate(Batch(data, 2))["objective"], update.loss[0])


def test_a_regularizer_is_descended_on_and_not_reported():
    model = IsingModel.grid(2, 2)
    data = torch.tensor([[0, 1, 1, 0]])
    (plain,) = PseudoLikelihood(model).updates(Batch(data, 1))
    (update,) = PseudoLikelihood(model, regularizer=lambda _: torch.tensor(2.0)).updates(Batch(data, 1))
    torch.testing.assert_close(update.loss, plain.loss + 2)
    torch.testing.assert_close(update.value, plain.value)


def test_it_recovers_a_model():
    generator = torch.Generator().manual_seed(0)
    truth = IsingModel.random(FactorGraph.grid(2, 2), coupling_scale=0.5, field_scale=0.5, generator=generator)
    with torch.no_grad():
        data = Exact().sample(truth.log_potentials(), 8000, generator=generator)[:, 0]
    model = IsingModel.grid(2, 2)
    optimizer = OptimizerOptions(learning_rate=0.05, schedule=Schedule("cosine"))
    options = TrainerOptions(epochs=100, batch_size=None, optimizers={"model": optimizer})
    Trainer(PseudoLikelihood(model), options).fit(data)
    assert (model.couplings - truth.couplings).abs().max() < 0.1
    assert (model.fields - truth.fields).abs().max() < 0.1


class Coin(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.log_odds = torch.nn.Parameter(torch.zeros(()))

    def log_likelihood(self, data):
        return torch.nn.functional.logsigmoid(torch.where(data == 1, self.log_odds, -self.log_odds)).squeeze(1)


def test_a_likelihood_of_the_models_own():
    coin = Coin()
    data = torch.tensor([[1], [1], [1], [0]])
    options = TrainerOptions(epochs=200, batch_size=None, optimizers={"model": OptimizerOptions(learning_rate=0.1)})
    result = Trainer(DirectLikelihood(coin), options).fit(data)
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert abs(result.history[-1]["objective"] - float(entropy)) < 1e-4
    flipped = DirectLikelihood(coin, lambda data: coin.log_likelihood(1 - data))
    assert flipped.evaluate(Batch(data, 4))["objective"] > entropy
