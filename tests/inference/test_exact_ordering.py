"""Elimination orders: valid, as wide as known graphs are, and scored as the definition says."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet.inference.exact import ordering
from bethenet.inference.exact.ordering import adjacency, measure, min_degree, min_fill


def eliminate(neighbours: list[set[int]], variable: int) -> None:
    clique = neighbours[variable]
    for other in clique:
        neighbours[other] |= clique
        neighbours[other] -= {other, variable}
    neighbours[variable] = set()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.floats(0, 1), st.integers(0, 2**31))
def test_min_fill_takes_a_variable_of_least_fill(nodes: int, density: float, seed: int) -> None:
    graph = nx.gnp_random_graph(nodes, density, seed=seed)
    states = [2 + node % 2 for node in range(nodes)]
    order = min_fill(adjacency(nodes, graph.edges), states, range(nodes))
    assert sorted(order) == list(range(nodes))
    now = adjacency(nodes, graph.edges)
    left = set(range(nodes))

    def fill(variable: int) -> int:
        return sum(b not in now[a] for a, b in itertools.combinations(sorted(now[variable]), 2))

    for variable in order:
        assert fill(variable) == min(fill(other) for other in left)
        eliminate(now, variable)
        left.discard(variable)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.floats(0, 1), st.integers(0, 2**31))
def test_min_degree_takes_the_smallest_buckets_of_a_round(nodes: int, density: float, seed: int) -> None:
    graph = nx.gnp_random_graph(nodes, density, seed=seed)
    order = min_degree(adjacency(nodes, graph.edges), [2] * nodes, range(nodes))
    assert sorted(order) == list(range(nodes))
    now = adjacency(nodes, graph.edges)
    left = set(range(nodes))
    touched: set[int] = set(left)
    least = 0
    for variable in order:
        if variable in touched or len(now[variable]) != least:  # a round of variables that are not neighbours ends
            least, touched = min(len(now[other]) for other in left), set()
        assert len(now[variable]) == least
        touched |= now[variable]
        eliminate(now, variable)
        left.discard(variable)


@pytest.mark.parametrize("rule", [min_fill, min_degree])
def test_a_hopeless_graph_is_given_up_after_some_time(rule, monkeypatch) -> None:
    graph = nx.gnp_random_graph(120, 0.7, seed=0)
    patient = rule(adjacency(120, graph.edges), [2] * 120, range(120))
    monkeypatch.setattr(ordering, "PATIENCE", 20_000)
    hasty = rule(adjacency(120, graph.edges), [2] * 120, range(120))
    assert sorted(hasty) == list(range(120))
    taken = next(place for place in range(120) if hasty[place:] == sorted(hasty[place:]))
    assert 0 < taken < 60
    assert hasty[:taken] == patient[:taken]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.floats(0, 1), st.integers(0, 2**31), st.floats(0, 8))
def test_measure_is_what_elimination_makes(nodes: int, density: float, seed: int, at_once: float) -> None:
    graph = nx.gnp_random_graph(nodes, density, seed=seed)
    states = [1 + node % 3 for node in range(nodes)]
    order = min_degree(adjacency(nodes, graph.edges), states, range(nodes), at_once=at_once)
    assert sorted(order) == list(range(nodes))
    shape = measure(order, adjacency(nodes, graph.edges), states)
    now = adjacency(nodes, graph.edges)
    scopes = []
    for variable in order:
        scopes.append((variable, set(now[variable])))
        eliminate(now, variable)
    assert shape.width == max(len(scope) for _, scope in scopes)
    messages = [math.prod(states[other] for other in scope) for _, scope in scopes]
    assert shape.message_entries == sum(messages)
    assert shape.entries == sum(size * states[v] for size, (v, _) in zip(messages, scopes, strict=True))


@pytest.mark.parametrize(
    ("graph", "treewidth"),
    [
        (nx.path_graph(20), 1),
        (nx.cycle_graph(20), 2),
        (nx.random_labeled_tree(40, seed=0), 1),
        (nx.complete_graph(9), 8),
        (nx.complete_bipartite_graph(4, 9), 4),
        (nx.power(nx.path_graph(30), 3), 3),
    ],
)
def test_both_rules_find_the_treewidth_of_easy_graphs(graph: nx.Graph, treewidth: int) -> None:
    nodes = graph.number_of_nodes()
    neighbours = adjacency(nodes, graph.edges)
    for rule in (min_fill, min_degree):
        assert measure(rule(neighbours, [2] * nodes, range(nodes)), neighbours, [2] * nodes).width == treewidth


def test_a_chain_is_halved_in_each_round() -> None:
    neighbours = adjacency(1000, [(i, i + 1) for i in range(999)])
    order = min_degree(neighbours, [2] * 1000, range(1000), at_once=3.0)
    shape = measure(order, neighbours, [2] * 1000)
    assert shape.width == 2
    assert shape.depth <= 11
