import math

import pytest
import torch

from bethenet.learning import DirectLikelihood, OptimizerOptions, Schedule, Trainer, TrainerOptions
from bethenet.learning.contrastive import ContrastiveDivergence, PersistentContrastiveDivergence
from bethenet.learning.objective import Batch, Update
from bethenet.models.rbm import RBM


def small_machine(seed=0, scale=0.5):
    return RBM(6, 4, weight_scale=scale, generator=torch.Generator().manual_seed(seed)).double()


def samples(count=2000):
    teacher = small_machine(seed=7, scale=1.5)
    return teacher, teacher.sample_exactly(count, generator=torch.Generator().manual_seed(1)).double()


def nll(model, data):
    return -model.log_likelihood(data).mean().item()


def test_many_chains_give_the_likelihoods_gradient():
    model, (_, data) = small_machine(), samples(64)
    objective = PersistentContrastiveDivergence(model, chains=20_000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        (update,) = objective.updates(Batch(data, 64), generator)
    loss = model.log_z() - model.score(data).mean()
    for found, true in zip(update.gradients, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, true, atol=0.02, rtol=0)


@pytest.mark.parametrize("make", [PersistentContrastiveDivergence, ContrastiveDivergence], ids=["pcd", "cd"])
def test_learns_as_well_as_by_exact_likelihood(make):
    teacher, data = samples()
    truth = nll(teacher, data)
    model = small_machine(scale=0.01)
    # 2000 samples in minibatches of 48: the last one has 32
    optimizer = OptimizerOptions(learning_rate=0.02, schedule=Schedule("cosine"))
    options = TrainerOptions(epochs=25, batch_size=48, optimizers={"model": optimizer})
    before = nll(model, data)
    result = Trainer(make(model, steps=3), options).fit(data)
    after = nll(model, data)
    assert result.steps == 25 * math.ceil(2000 / 48)
    assert after < truth + 0.1 < before


@pytest.mark.parametrize("make", [PersistentContrastiveDivergence, ContrastiveDivergence], ids=["pcd", "cd"])
def test_the_best_weights_are_chosen_by_pseudo_likelihood(make):
    _, data = samples(100)
    model = small_machine(scale=0.01)
    options = TrainerOptions(epochs=5, batch_size=20, optimizers={"model": OptimizerOptions(learning_rate=0.05)})
    # the opposite of what is learnt: the longer, the worse
    result = Trainer(make(model), options).fit(data, 1 - data)
    figures = [record["validation_pseudo_nll"] for record in result.history]
    assert result.best["validation_pseudo_nll"] == min(figures) < figures[-1]
    kept = -model.pseudo_log_likelihood(1 - data).mean().item()
    assert kept == pytest.approx(min(figures))


def test_a_short_minibatch_counts_for_its_samples_and_moves_every_chain():
    model, (_, data) = small_machine(), samples(3)
    objective = PersistentContrastiveDivergence(model, chains=50)
    update = next(objective.updates(Batch(data, 3), torch.Generator().manual_seed(5)))
    again = PersistentContrastiveDivergence(model, chains=50)
    doubled = next(again.updates(Batch(torch.cat([data, data]), 6), torch.Generator().manual_seed(5)))
    # the same samples twice have the same mean; the chains move alike whatever the minibatch
    for short, long in zip(update.gradients, doubled.gradients, strict=True):
        torch.testing.assert_close(short, long)
    assert objective.hidden.shape == (50, 4)
    assert torch.equal(objective.hidden, again.hidden)


def test_cd_starts_at_the_minibatch_and_keeps_nothing():
    model, (_, data) = small_machine(), samples(10)
    objective = ContrastiveDivergence(model)
    first, second = (
        next(objective.updates(Batch(data, 10), torch.Generator().manual_seed(5))).gradients for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not list(objective.buffers())


def test_chains_are_saved_and_go_on(tmp_path):
    _, data = samples(96)

    def run(epochs, **options):
        model = small_machine()
        objective = PersistentContrastiveDivergence(model, chains=5)
        Trainer(objective, TrainerOptions(epochs=epochs, directory=tmp_path / options.pop("name"))).fit(data, **options)
        return model.weights.detach(), objective.hidden

    whole = run(4, name="whole")
    run(2, name="parts")
    rest = run(4, name="parts", resume=True)
    assert torch.equal(whole[0], rest[0])
    assert torch.equal(whole[1], rest[1])
    assert whole[1].shape == (5, 4)
    assert 0 < whole[1].mean() < 1


def test_frozen_parameters_stay():
    model, (_, data) = small_machine(), samples(64)
    model.visible_bias.requires_grad_(False)
    weights = model.weights.detach().clone()
    Trainer(PersistentContrastiveDivergence(model), TrainerOptions(epochs=1)).fit(data)
    assert torch.equal(model.visible_bias, torch.zeros(6))
    assert not torch.equal(model.weights, weights)


def test_selection_by_pseudo_likelihood():
    _, data = samples(300)
    model = small_machine()
    result = Trainer(
        PersistentContrastiveDivergence(model), TrainerOptions(epochs=3, metric="validation_pseudo_nll")
    ).fit(data[:200], data[200:])
    expected = -model.pseudo_log_likelihood(data[200:]).mean().item()
    assert result.best["validation_pseudo_nll"] == pytest.approx(expected)


def test_three_visible_states_learn_too():
    teacher = RBM(4, 3, 3, weight_scale=1.5, generator=torch.Generator().manual_seed(2)).double()
    data = teacher.sample_exactly(1000, generator=torch.Generator().manual_seed(1))
    model = RBM(4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    before = nll(model, data)
    options = TrainerOptions(epochs=10, optimizers={"model": OptimizerOptions(learning_rate=0.02)})
    Trainer(PersistentContrastiveDivergence(model), options).fit(data)
    assert nll(model, data) < before - 0.1


def test_exact_likelihood_where_one_side_is_small():
    teacher, data = samples(500)
    model = small_machine(scale=0.01)
    options = TrainerOptions(epochs=20, optimizers={"model": OptimizerOptions(learning_rate=0.03)})
    result = Trainer(DirectLikelihood(model), options).fit(data)
    truth = nll(teacher, data)
    assert result.history[-1]["objective"] < truth + 0.1


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="steps"):
        ContrastiveDivergence(small_machine(), steps=0)
    with pytest.raises(ValueError, match="chains"):
        PersistentContrastiveDivergence(small_machine(), chains=0)


def test_an_update_without_loss_or_with_too_few_gradients_is_refused():
    _, data = samples(8)

    class Broken(ContrastiveDivergence):
        def updates(self, batch, generator=None):
            yield Update(("model",), gradients=self.gradients)

    objective = Broken(small_machine())
    for objective.gradients, message in (([torch.zeros(6, 4)], "3 trainable parameters; got 1"), (None, "loss")):
        with pytest.raises(ValueError, match=message):
            Trainer(objective, TrainerOptions(epochs=1)).fit(data)
