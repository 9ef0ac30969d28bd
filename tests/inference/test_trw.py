"""Tree reweighting: a bound at every state, exact on trees, and weights that are those of random spanning trees."""

from __future__ import annotations

import itertools
import math

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, ImpossibleEvidenceError, LogPotentials, Status, free_energy
from bethenet.inference import spanning_trees
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.spanning_trees import forest_appearance, heaviest_forest
from bethenet.inference.trw import TreeReweighted, mutual_information, optimized_appearance
from oracle import enumerate_model, models


def random_model(graph: FactorGraph, scale: float = 1.0, batch: int = 3, seed: int = 0) -> LogPotentials:
    generator = torch.Generator().manual_seed(seed)
    return LogPotentials.random(graph, scale, batch_size=batch, dtype=torch.float64, generator=generator)


@settings(deadline=None, max_examples=40)
@given(models(batch=2), st.sampled_from([0, 1, 2, 5, 300]), st.sampled_from(["flooding", "sweep"]))
def test_log_z_is_bounded_after_any_number_of_iterations(
    potentials: LogPotentials, iterations: int, schedule: str
) -> None:
    result = TreeReweighted(max_iterations=iterations, schedule=schedule).run(potentials)
    assert bool((result.log_z >= enumerate_model(potentials).log_z - 1e-9).all())


@settings(deadline=None, max_examples=25)
@given(models(batch=2, zeros=True), st.sampled_from([1, 300]))
def test_log_z_is_bounded_where_states_are_impossible(potentials: LogPotentials, iterations: int) -> None:
    try:
        result = TreeReweighted(max_iterations=iterations).run(potentials)
    except ImpossibleEvidenceError:
        assert bool((enumerate_model(potentials).log_z == -math.inf).any())
        return
    assert not bool(torch.isnan(result.log_z).any())
    assert bool((result.log_z >= enumerate_model(potentials).log_z - 1e-9).all())


@pytest.mark.parametrize("graph", [FactorGraph.complete(5), FactorGraph.complete(4, 3), FactorGraph.grid(3, 3)])
def test_at_the_fixed_point_the_bound_is_minus_the_free_energy(graph: FactorGraph) -> None:
    potentials = random_model(graph)
    result = TreeReweighted(tolerance=1e-11).run(potentials)
    assert result.status is Status.CONVERGED
    torch.testing.assert_close(result.log_z, -free_energy(potentials, result.beliefs))
    assert bool((result.log_z > enumerate_model(potentials).log_z).all())
    assert float(result.beliefs.inconsistency().max()) < 1e-8


@pytest.mark.parametrize("states", [2, 3])
def test_on_trees_it_is_belief_propagation(states: int) -> None:
    graph = FactorGraph([states] * 6, [(0,), (0, 1), (1, 2), (1, 3, 4), (), (4, 5)])
    potentials = random_model(graph)
    for weights in forest_appearance(graph):
        assert weights.tolist() == [1.0] * len(weights)
    reweighted, plain = TreeReweighted().run(potentials), BeliefPropagation().run(potentials)
    torch.testing.assert_close(reweighted.log_z, enumerate_model(potentials).log_z)
    for one, other in zip(reweighted.beliefs.log_tables, plain.beliefs.log_tables, strict=True):
        torch.testing.assert_close(one, other)


def test_with_weights_of_one_it_is_belief_propagation_on_any_graph() -> None:
    graph = FactorGraph.grid(3, 3)
    potentials = random_model(graph, 0.5)
    ones = [torch.ones(len(group)) for group in graph.factor_groups]
    reweighted, plain = TreeReweighted(appearance=ones).run(potentials), BeliefPropagation().run(potentials)
    torch.testing.assert_close(reweighted.beliefs.node_marginals, plain.beliefs.node_marginals, atol=1e-6, rtol=0)


def test_a_convex_free_energy_has_one_minimum_whatever_the_schedule_and_start() -> None:
    potentials = random_model(FactorGraph.complete(5), 2.0)
    runs = [TreeReweighted(schedule=schedule).run(potentials) for schedule in ("flooding", "sweep", "residual")]
    runs.append(
        TreeReweighted().run(potentials, state=TreeReweighted().run(random_model(potentials.graph, seed=1)).state)
    )
    for run in runs:
        assert run.status is Status.CONVERGED
        torch.testing.assert_close(run.log_z, runs[0].log_z, atol=1e-5, rtol=0)


def spanning_tree_shares(edges: list[tuple[int, int]], vertices: int) -> list[float]:
    """By listing all maximal forests."""
    rank = vertices - networkx.number_connected_components(_multigraph(edges, vertices))
    forests = [
        chosen
        for chosen in itertools.combinations(range(len(edges)), rank)
        if networkx.number_connected_components(_multigraph([edges[e] for e in chosen], vertices)) == vertices - rank
    ]
    return [sum(edge in forest for forest in forests) / len(forests) for edge in range(len(edges))]


def _multigraph(edges: list[tuple[int, int]], vertices: int) -> networkx.MultiGraph:
    graph = networkx.MultiGraph()
    graph.add_nodes_from(range(vertices))
    graph.add_edges_from(edges)
    return graph


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 1), (1, 2), (2, 0), (2, 3), (4, 5)],
        [(0, 1), (1, 0), (1, 2), (2, 3), (3, 1), (0, 3), (4, 5), (5, 6), (6, 4)],
    ],
)
def test_weights_are_the_shares_of_spanning_trees(edges: list[tuple[int, int]]) -> None:
    graph = FactorGraph([2] * 8, [(0,), *edges])
    weights = forest_appearance(graph)
    assert weights[0].tolist() == [1.0]
    assert weights[1].tolist() == pytest.approx(spanning_tree_shares(edges, 8))


def test_drawn_forests_where_the_graph_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = forest_appearance(FactorGraph.grid(5, 5))[1]
    monkeypatch.setattr(spanning_trees, "DENSE_VARIABLES", 0)
    drawn = forest_appearance(FactorGraph.grid(5, 5))[1]
    assert bool(((drawn > 0) & (drawn <= 1)).all())
    assert float(drawn.sum()) == pytest.approx(24.0)
    assert float((drawn - exact).abs().mean()) < 0.15
    graph = FactorGraph.grid(3, 4)
    potentials = random_model(graph)
    assert bool((TreeReweighted().run(potentials).log_z >= enumerate_model(potentials).log_z - 1e-9).all())


def test_drawn_forests_of_larger_factors_close_no_cycle() -> None:
    graph = FactorGraph([2] * 6, [(0, 1, 2), (1, 2, 3), (2, 3, 4), (4, 5), (3, 4), (0, 5)])
    weights = torch.cat(list(forest_appearance(graph)))
    assert bool(((weights > 0) & (weights <= 1)).all())
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        values = [torch.rand(len(group), generator=generator) for group in graph.factor_groups]
        chosen = heaviest_forest(graph, values)
        incidence = networkx.Graph()
        for group, mask in zip(graph.factor_groups, chosen, strict=True):
            for factor, scope, taken in zip(
                group.factors.tolist(), group.variables.tolist(), mask.tolist(), strict=True
            ):
                if taken:
                    incidence.add_edges_from((f"factor {factor}", variable) for variable in scope)
        assert networkx.is_forest(incidence)


def test_the_heaviest_forest_is_a_maximum_spanning_tree() -> None:
    graph = FactorGraph.complete(7)
    weights = torch.rand(21, generator=torch.Generator().manual_seed(0))
    chosen = heaviest_forest(graph, [torch.zeros(7), weights])[1]
    network = networkx.Graph()
    for (one, other), weight in zip(graph.factor_groups[1].variables.tolist(), weights.tolist(), strict=True):
        network.add_edge(one, other, weight=weight)
    best = networkx.maximum_spanning_tree(network).size(weight="weight")
    assert float((chosen * weights).sum()) == pytest.approx(best)


@pytest.mark.parametrize(
    "graph", [FactorGraph.complete(5), FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (0, 2), (1, 2, 3)])]
)
def test_optimised_weights_lower_the_bound_step_by_step(graph: FactorGraph) -> None:
    potentials = random_model(graph)
    appearance, bounds, _ = optimized_appearance(TreeReweighted(optimize=4), potentials)
    assert len(bounds) > 2
    assert all(later < earlier for earlier, later in itertools.pairwise(bounds))
    truth = enumerate_model(potentials).log_z
    result = TreeReweighted(optimize=4).run(potentials)
    assert float(result.log_z.sum()) == pytest.approx(bounds[-1], abs=1e-4)
    assert bool((result.log_z >= truth).all())
    assert all(bool((weights > 0).all()) for weights in appearance)


def test_the_derivative_of_the_bound_in_a_weight_is_minus_the_mutual_information() -> None:
    graph = FactorGraph.complete(4)
    potentials = random_model(graph, batch=1)
    engine = TreeReweighted(tolerance=1e-12)
    weights = [part.clone() for part in forest_appearance(graph)]
    information = mutual_information(engine.run(potentials).beliefs)[1]
    for edge in range(3):
        values = []
        for shift in (-1e-4, 1e-4):
            moved = [weights[0], weights[1].clone()]
            moved[1][edge] += shift
            values.append(float(TreeReweighted(tolerance=1e-12, appearance=moved).run(potentials).log_z))
        assert (values[1] - values[0]) / 2e-4 == pytest.approx(-float(information[edge]), abs=1e-5)


@pytest.mark.parametrize(
    ("counts", "scopes"), [([], []), ([3], []), ([2, 3], [(0,), (1,)]), ([1, 1], [(0, 1)]), ([2, 2], [(0, 1), (1, 0)])]
)
def test_little_graphs(counts: list[int], scopes: list[tuple[int, ...]]) -> None:
    potentials = random_model(FactorGraph(counts, scopes), batch=2)
    result, truth = TreeReweighted().run(potentials), enumerate_model(potentials)
    assert result.status is Status.CONVERGED
    if (1, 0) in scopes:
        assert bool((result.log_z > truth.log_z).all())
    else:
        torch.testing.assert_close(result.log_z.expand_as(truth.log_z), truth.log_z)


def test_shared_tables_and_batches() -> None:
    graph = FactorGraph.complete(4, 3)
    table = torch.randn(1, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unary = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shared = TreeReweighted().run(LogPotentials(graph, [unary, table]))
    copied = TreeReweighted().run(LogPotentials(graph, [unary, table.expand(2, 6, 3, 3).clone()]))
    torch.testing.assert_close(shared.log_z, copied.log_z)
    for member in range(2):
        alone = TreeReweighted().run(LogPotentials(graph, [unary[member : member + 1], table]))
        torch.testing.assert_close(alone.log_z, shared.log_z[member : member + 1])


@pytest.mark.parametrize(
    "appearance",
    [
        [torch.ones(3)],
        [torch.ones(3), torch.tensor([0.5, 0.0])],
        [torch.ones(3), torch.tensor([0.5, 1.5])],
        [torch.ones(3), torch.ones(3)],
    ],
)
def test_given_weights_are_checked(appearance: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="appearance"):
        TreeReweighted(appearance=appearance).run(random_model(FactorGraph.chain(3)))
    with pytest.raises(ValueError, match="optimize"):
        TreeReweighted(optimize=-1)


def test_weights_of_a_thousand_variables_stay_in_the_polytope() -> None:
    weights = forest_appearance(FactorGraph.grid(30, 33))[1].numpy()
    assert float(weights.sum()) == pytest.approx(30 * 33 - 1)
    assert np.all((weights > 0) & (weights <= 1))
