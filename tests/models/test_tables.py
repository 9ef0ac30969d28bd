import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.models import TableModel
from oracle import enumerate_model, models

GENERATOR_SEED = 0


def generator():
    return torch.Generator().manual_seed(GENERATOR_SEED)


@settings(deadline=None, max_examples=20)
@given(models(batch=2, zeros=True))
def test_from_potentials_is_the_same_model(potentials):
    model = TableModel.from_potentials(potentials)
    for table, given_table in zip(model.log_potentials().tables, potentials.tables, strict=True):
        assert torch.equal(table, given_table)
    everything = enumerate_model(potentials).assignments
    if potentials.tables:
        torch.testing.assert_close(model.score(everything), potentials.score(everything))


def test_shared_tables_are_one_parameter():
    graph = FactorGraph.chain(5, states=3)
    model = TableModel(graph, shared=True, models=2, generator=generator())
    assert [tuple(p.shape) for p in model.parameters()] == [(2, 1, 3), (2, 1, 3, 3)]
    only_edges = TableModel(graph, shared=[1])
    assert [tuple(p.shape) for p in only_edges.parameters()] == [(1, 5, 3), (1, 1, 3, 3)]


def test_latent_variables_are_clamped_around():
    model = TableModel(FactorGraph([2, 3, 2], [(0, 1), (1, 2)], names=["a", "b", "c"]), observed=["c", "a"])
    data = torch.tensor([[1, 0], [0, 1]])
    assert model.complete(data).tolist() == [[0, -1, 1], [1, -1, 0]]
    assert torch.equal(model.complete(data.to(torch.uint8)), model.complete(data))
    clamped = model.clamped(data)
    assert clamped.observed.tolist() == [[0, -1, 1], [1, -1, 0]]
    whole = torch.tensor([[0, 2, 1], [1, 0, 0]])
    torch.testing.assert_close(clamped.score(whole).diagonal(), model.log_potentials().score(whole)[:, 0])


def test_latent_variables_cannot_be_scored():
    model = TableModel(FactorGraph.chain(3), observed=[0, 1])
    for method in (model.score, model.pseudo_log_likelihood):
        with pytest.raises(ValueError, match="1 variables are latent"):
            method(torch.zeros(2, 2, dtype=torch.long))


def test_a_reordering_of_all_variables_is_not_latent():
    model = TableModel(FactorGraph.chain(3), observed=[2, 0, 1], scale=1.0, generator=generator())
    data = torch.tensor([[1, 0, 0], [0, 1, 1]])
    torch.testing.assert_close(model.score(data), model.log_potentials().score(data[:, [1, 2, 0]]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TableModel(FactorGraph.chain(3), shared=[2]), "expected factor groups from 0 to 1"),
        (lambda: TableModel(FactorGraph.chain(3), observed=[0, 0]), "distinct variables"),
        (lambda: TableModel(FactorGraph.chain(3), observed=[5]), "variable 5 does not exist"),
        (
            lambda: TableModel.from_potentials(LogPotentials.random(FactorGraph.chain(3)).clamp({0: 1})),
            "without evidence",
        ),
        (
            lambda: TableModel(FactorGraph.chain(3), observed=[0]).complete(torch.zeros(2, 3)),
            "expected 1 columns",
        ),
    ],
)
def test_wrong_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
