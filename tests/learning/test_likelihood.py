import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.learning import Batch, ByEngine, Likelihood, Trainer, TrainerOptions, negative_log_likelihood
from bethenet.models import IsingModel, TableModel
from oracle import enumerate_model, models


def batch_of(data):
    return Batch(data, data.shape[0], torch.arange(data.shape[0]), data.shape[0])


def model_gradients(objective, batch):
    """The loss of the model's update, and its gradients."""
    *others, update = objective.updates(batch)
    assert update.parts == ("model",)
    assert not others
    parameters = list(objective.model.parameters())
    gradients = torch.autograd.grad(update.loss.sum(), parameters, allow_unused=True)
    return update.loss, [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]


def enumerated_log_z(potentials):
    return torch.logsumexp(potentials.score(enumerate_model(potentials.detach()).assignments), 0)


@settings(deadline=None, max_examples=30)
@given(models(max_variables=4), st.integers(0, 1000))
def test_exact_likelihood_equals_autograd_through_enumeration(potentials, seed):
    if not potentials.tables:
        return
    model = TableModel.from_potentials(potentials)
    everything = enumerate_model(potentials).assignments
    data = everything[torch.randint(len(everything), (5,), generator=torch.Generator().manual_seed(seed))]
    loss, gradients = model_gradients(Likelihood(model, Exact()), batch_of(data))
    truth = enumerated_log_z(model.log_potentials()) - model.log_potentials().score(data).mean(0)
    torch.testing.assert_close(loss, truth, rtol=1e-10, atol=1e-10)
    for found, expected in zip(gradients, torch.autograd.grad(truth.sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=30)
@given(models(max_variables=4), st.data())
def test_latent_exact_likelihood_equals_autograd_through_enumeration(potentials, draw):
    if not potentials.tables:
        return
    graph = potentials.graph
    observed = draw.draw(st.lists(st.sampled_from(range(graph.num_variables)), unique=True, min_size=1))
    model = TableModel.from_potentials(potentials, observed=observed)
    everything = enumerate_model(potentials).assignments
    data = everything[torch.tensor([0, len(everything) // 2, len(everything) - 1])][:, observed]
    loss, gradients = model_gradients(Likelihood(model, Exact(), Exact()), batch_of(data))
    scores = model.log_potentials().score(everything)[:, 0]
    matches = (everything[:, observed].unsqueeze(0) == data.unsqueeze(1)).all(-1)
    log_z_given = torch.logsumexp(scores.masked_fill(~matches, -math.inf), 1)
    truth = torch.logsumexp(scores, 0) - log_z_given.mean()
    torch.testing.assert_close(loss[0], truth, rtol=1e-10, atol=1e-10)
    for found, expected in zip(gradients, torch.autograd.grad(truth, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def loopy_model(seed=0, models=1):
    generator = torch.Generator().manual_seed(seed)
    graph = FactorGraph.grid(3, 3)
    return IsingModel.random(graph, coupling_scale=0.4, models=models, generator=generator).double()


def ising_samples(model, count, seed=1):
    with torch.no_grad():
        return Exact().sample(model.log_potentials(), count, generator=torch.Generator().manual_seed(seed))


def test_gradient_is_pseudo_moments_minus_the_datas():
    model = loopy_model()
    data = ising_samples(model, 50)[:, 0]
    engine = BeliefPropagation(tolerance=1e-12)
    loss, (fields, couplings) = model_gradients(Likelihood(model, engine), batch_of(data))
    result = engine.run(model.log_potentials().detach())
    pairs = result.beliefs.factor_marginals[1][0]
    nodes = result.beliefs.node_marginals[0]
    x = 2 * data.double() - 1
    left, right = (model.graph.factor_groups[1].variables[:, axis] for axis in (0, 1))
    moments = pairs[:, 0, 0] + pairs[:, 1, 1] - pairs[:, 0, 1] - pairs[:, 1, 0]
    torch.testing.assert_close(couplings[0], moments - (x[:, left] * x[:, right]).mean(0))
    torch.testing.assert_close(fields[0], nodes[:, 1] - nodes[:, 0] - x.mean(0))
    torch.testing.assert_close(loss, result.log_z - model.score(data).mean(0))


def test_bethe_and_exact_agree_on_a_tree():
    graph = FactorGraph.chain(5, states=3)
    model = TableModel(graph, scale=1.0, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.randint(3, (8, 5), generator=torch.Generator().manual_seed(1))
    exact = model_gradients(Likelihood(model, Exact()), batch_of(data))
    bethe = model_gradients(Likelihood(model, BeliefPropagation(tolerance=1e-13)), batch_of(data))
    torch.testing.assert_close(exact, bethe, rtol=1e-8, atol=1e-8)


def test_independent_models_are_trained_as_if_alone():
    models, samples = 3, 40
    truth = loopy_model(models=models)
    data = ising_samples(truth, samples)
    options = TrainerOptions(epochs=2, batch_size=15, seed=4)
    together = IsingModel(truth.graph, torch.zeros(models, 12, dtype=torch.float64))
    Trainer(Likelihood(together, Exact()), options).fit(data)
    for number in range(models):
        alone = IsingModel(truth.graph, torch.zeros(1, 12, dtype=torch.float64))
        Trainer(Likelihood(alone, Exact()), options).fit(data[:, number])
        torch.testing.assert_close(together.couplings[number], alone.couplings[0])
        torch.testing.assert_close(together.fields[number], alone.fields[0])


def test_a_regularizer_is_descended_on_and_not_reported():
    model = loopy_model()
    batch = batch_of(ising_samples(model, 10)[:, 0])
    plain = next(Likelihood(model, Exact()).updates(batch))
    update = next(Likelihood(model, Exact(), regularizer=lambda m: 3 * m.couplings.square().sum(1)).updates(batch))
    torch.testing.assert_close(update.value, plain.value)
    torch.testing.assert_close(update.loss, plain.loss + 3 * model.couplings.square().sum())


def test_evaluation_reports_objective_and_residuals():
    model = loopy_model()
    data = ising_samples(model, 10)[:, 0]
    objective = Likelihood(model, BeliefPropagation(tolerance=1e-10)).eval()
    figures = objective.evaluate(batch_of(data))
    assert set(figures) == {"objective", "log_z", "inconsistency", "residual"}
    assert figures["inconsistency"] < 1e-8
    exact = negative_log_likelihood(model, data, Exact())
    assert abs(figures["objective"] - exact[0]) < 0.1
    latent = TableModel(FactorGraph.chain(4), observed=[0, 2], generator=torch.Generator().manual_seed(0))
    engine = BeliefPropagation()
    figures = Likelihood(latent, engine, engine).evaluate(batch_of(torch.tensor([[0, 1], [1, 1]])))
    assert {"clamped_log_z", "clamped_inconsistency", "clamped_residual"} <= set(figures)


def test_held_out_likelihood_is_the_mean_over_all_minibatches():
    model = loopy_model()
    data = ising_samples(model, 25)[:, 0]
    truth = enumerated_log_z(model.log_potentials()) - model.score(data).mean(0)
    for size in (None, 10, 25, 1):
        torch.testing.assert_close(negative_log_likelihood(model, data, Exact(), batch_size=size), truth.detach())
    assert not negative_log_likelihood(model, data, Exact()).requires_grad


def test_latent_model_without_a_clamped_side_says_what_to_do():
    model = TableModel(FactorGraph.chain(3), observed=[0])
    with pytest.raises(ValueError, match="clamped engine or network"):
        list(Likelihood(model, Exact()).updates(batch_of(torch.zeros(2, 1, dtype=torch.long))))


def test_wrong_arguments_are_named():
    model = loopy_model()
    with pytest.raises(ValueError, match="expected an engine or a LogPartition"):
        Likelihood(model, "exact")
    side = ByEngine(BeliefPropagation())
    with pytest.raises(ValueError, match="may share a network"):
        Likelihood(model, side, side)


def test_potentials_are_constants_for_nothing_else():
    """A model update leaves no gradient behind."""
    model = loopy_model()
    list(Likelihood(model, Exact()).updates(batch_of(ising_samples(model, 5)[:, 0])))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(model.log_potentials(), LogPotentials)
