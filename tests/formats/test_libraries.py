"""Other libraries' models: networkx and (where it is installed) pgmpy."""

import math

import networkx
import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.formats import from_pgmpy, to_networkx, to_pgmpy
from oracle import enumerate_model, models


def test_networkx_is_the_bipartite_factor_graph():
    graph = FactorGraph([2, 3, 2], [(0, 1), (1,), (0, 1), ()], ["a", "b", "c"])
    result = to_networkx(graph)
    assert dict(result.nodes["b"]) == {"bipartite": 0, "states": 3}
    assert result.nodes[("factor", 2)] == {"bipartite": 1, "scope": ("a", "b")}
    assert {(a, b, axis) for a, b, axis in result.edges(data="axis")} == {
        ("a", ("factor", 0), 0),
        ("b", ("factor", 0), 1),
        ("b", ("factor", 1), 0),
        ("a", ("factor", 2), 0),
        ("b", ("factor", 2), 1),
    }
    assert result.degree["c"] == result.degree[("factor", 3)] == 0
    assert networkx.is_bipartite(result)


def test_networkx_carries_the_tables_of_a_model():
    model = LogPotentials.random(FactorGraph.chain(3))
    result = to_networkx(model)
    assert set(result.nodes) == {0, 1, 2, *(("factor", factor) for factor in range(5))}
    assert torch.equal(result.nodes[("factor", 4)]["log_table"], model.table(4))


def test_networkx_there_and_back():
    original = networkx.petersen_graph()
    graph = FactorGraph.from_networkx(original, unary=False)
    back = networkx.bipartite.projected_graph(to_networkx(graph), [str(node) for node in original])
    assert networkx.utils.edges_equal(
        [tuple(sorted(edge)) for edge in back.edges], [tuple(sorted(map(str, edge))) for edge in original.edges]
    )


@settings(deadline=None, max_examples=25)
@given(model=models(zeros=True))
def test_pgmpy_round_trip_keeps_the_distribution(model):
    pytest.importorskip("pgmpy")
    if model.graph.num_factors and not any(model.graph.scopes()):
        return  # nothing but constants: pgmpy has no factor to put them into
    back = from_pgmpy(to_pgmpy(model))
    names = [str(variable) for variable in range(model.graph.num_variables)]
    order = [back.graph.variable_number(name) for name in names]
    mine, theirs = enumerate_model(model), enumerate_model(back)
    torch.testing.assert_close(theirs.log_z, mine.log_z)
    for variable, number in enumerate(order):
        torch.testing.assert_close(theirs.marginal((number,)), mine.marginal((variable,)))


def test_pgmpy_infers_the_same_marginals():
    inference = pytest.importorskip("pgmpy.inference")
    generator = torch.Generator().manual_seed(0)
    graph = FactorGraph([2, 3, 2, 2], [(0, 1), (2, 1), (2,), (3, 0, 2)], ["a", "b", "c", "d"])
    model = LogPotentials.random(graph, dtype=torch.float64, generator=generator)
    found = inference.VariableElimination(to_pgmpy(model)).query(["b"], show_progress=False)
    torch.testing.assert_close(
        torch.tensor(found.values / found.values.sum()), enumerate_model(model).marginal((1,))[0]
    )


def test_a_bayesian_network_of_pgmpy():
    models_module = pytest.importorskip("pgmpy.models")
    discrete = pytest.importorskip("pgmpy.factors.discrete")
    network = models_module.DiscreteBayesianNetwork([("rain", "wet")])
    network.add_cpds(
        discrete.TabularCPD("rain", 2, [[0.8], [0.2]]),
        discrete.TabularCPD("wet", 2, [[0.9, 0.3], [0.1, 0.7]], ["rain"], [2]),
    )
    model = from_pgmpy(network)
    truth = enumerate_model(model)
    assert truth.log_z.item() == pytest.approx(0, abs=1e-12)
    assert truth.marginal((model.graph.variable_number("wet"),))[0].tolist() == pytest.approx([0.78, 0.22])


def test_pgmpy_cannot_hold_every_potential():
    pytest.importorskip("pgmpy")
    model = LogPotentials.from_factors([2], [((0,), [0.0, 1000.0])])
    with pytest.raises(ValueError, match="a log-potential of 1000 has no float64 to be its exponential"):
        to_pgmpy(model)
    model = LogPotentials.from_factors([2], [((0,), [0.0, -math.inf])])
    assert to_pgmpy(model).get_factors()[0].values.tolist() == [1, 0]
