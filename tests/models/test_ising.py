import networkx
import pytest
import torch

from bethenet import FactorGraph
from bethenet.data.ising import ising_data
from bethenet.models import IsingModel
from bethenet.models.ising import spins, states
from oracle import enumerate_model


def double(model):
    return model.to(torch.float64)


def random_model(graph=None, models=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return double(IsingModel.random(graph or FactorGraph.grid(2, 3), models=models, generator=generator))


def test_spins_and_states():
    assert spins(torch.tensor([0, 1])).tolist() == [-1.0, 1.0]
    assert states(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]


@pytest.mark.parametrize("models", [1, 3])
def test_energy_is_the_papers(models):
    model = random_model(models=models)
    potentials = model.log_potentials()
    everything = enumerate_model(potentials).assignments
    x = spins(everything, torch.float64)
    edges = [scope for scope in model.graph.scopes() if len(scope) == 2]
    energy = x @ model.fields.T + sum(
        (x[:, i] * x[:, j]).unsqueeze(1) * model.couplings[:, number] for number, (i, j) in enumerate(edges)
    )
    torch.testing.assert_close(potentials.score(everything), energy)
    torch.testing.assert_close(model.score(everything), energy)


def test_models_score_data_of_their_own():
    model = random_model(models=3)
    data = torch.randint(2, (7, 3, 6), generator=torch.Generator().manual_seed(1))
    paired = model.score(data)
    for number in range(3):
        torch.testing.assert_close(paired[:, number], model.score(data[:, number])[:, number])
    torch.testing.assert_close(paired, super(IsingModel, model).score(data))


def test_general_graphs_and_missing_kinds_of_factor():
    ring = random_model(FactorGraph.from_networkx(networkx.cycle_graph(5)))
    assert ring.couplings.shape == (1, 5)
    fields_only = random_model(FactorGraph.grid(1, 1))
    assert fields_only.couplings.shape == (1, 0)
    couplings_only = random_model(FactorGraph.complete(4, unary=False))
    assert couplings_only.fields.shape == (1, 0)
    for model in (ring, fields_only, couplings_only):
        everything = enumerate_model(model.log_potentials()).assignments
        torch.testing.assert_close(model.score(everything), model.log_potentials().score(everything))


def test_random_models_depend_on_their_seed_alone():
    first, again, other = random_model(seed=3), random_model(seed=3), random_model(seed=4)
    assert torch.equal(first.couplings, again.couplings)
    assert torch.equal(first.fields, again.fields)
    assert not torch.equal(first.fields, other.fields)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IsingModel(FactorGraph([2, 3], [(0, 1)])), "have 2 states"),
        (lambda: IsingModel(FactorGraph([2, 2, 2], [(0, 1, 2)])), "join 1 or 2 variables"),
        (lambda: IsingModel.grid(2, 2, couplings=torch.zeros(5)), r"couplings: expected shape \[4\]"),
        (lambda: IsingModel.grid(2, 2, torch.zeros(3, 4), torch.zeros(2, 4)), "fields of 2 models, couplings of 3"),
    ],
)
def test_wrong_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_default_has_as_many_models_as_the_other():
    assert IsingModel.grid(2, 2, couplings=torch.zeros(3, 4)).fields.shape == (3, 4)


def test_data_are_seeded_and_distributed_like_the_model():
    data = ising_data(2, 2, samples=4000, seed=5)
    again = ising_data(2, 2, samples=4000, seed=5)
    assert torch.equal(data.train, again.train)
    assert not torch.equal(data.train, data.validation)
    assert not torch.equal(data.train, ising_data(2, 2, samples=4000, seed=6).train)
    truth = enumerate_model(data.model.log_potentials())
    frequencies = torch.stack([data.test[:, v].double().mean() for v in range(4)])
    marginals = torch.stack([truth.marginal((v,))[0, 1] for v in range(4)])
    assert (frequencies - marginals).abs().max() < 0.035  # 4 standard errors at most


def test_data_of_several_models():
    data = ising_data(2, 3, samples=10, models=4, seed=0)
    assert data.train.shape == data.validation.shape == data.test.shape == (10, 4, 6)
    assert data.model.couplings.shape == (4, 7)
    assert not data.model.couplings.requires_grad
