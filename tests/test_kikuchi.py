"""Kikuchi's regions against sets and loops, and the clusters that are found by themselves."""

from __future__ import annotations

import itertools

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph
from bethenet.regions import RegionGraph
from bethenet.regions.cycles import chordless_cycles


def all_regions(regions):
    """{set of variables: counting number}, without the empty ones."""
    result = {}
    for group in regions.groups:
        for variables, number in zip(group.variables.tolist(), group.counting_numbers.tolist(), strict=True):
            assert tuple(int(regions.graph.state_counts[v]) for v in variables) == group.table_shape
            if variables:
                assert frozenset(variables) not in result
                result[frozenset(variables)] = number
    return result


def expected_regions(variables, clusters):
    """The definition, with loops over sets."""
    maximal = {c for c in clusters if not any(c < other for other in clusters)} | {frozenset([v]) for v in variables}
    regions = set(maximal)
    while True:
        more = regions | {a & b for a, b in itertools.combinations(regions, 2) if a & b}
        if more == regions:
            break
        regions = more
    numbers = {}
    for region in sorted(regions, key=len, reverse=True):
        numbers[region] = 1 - sum(number for other, number in numbers.items() if region < other)
    return numbers


@st.composite
def graphs_with_clusters(draw):
    states = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    variables = st.sampled_from(range(len(states)))
    scopes = draw(st.lists(st.lists(variables, max_size=3, unique=True), max_size=6))
    clusters = draw(st.lists(st.lists(variables, min_size=1, max_size=5, unique=True), max_size=6))
    return FactorGraph(states, scopes), clusters


@settings(deadline=None, max_examples=150)
@given(graphs_with_clusters())
def test_regions_are_the_definition(case):
    graph, clusters = case
    regions = RegionGraph.kikuchi(graph, clusters)
    found = all_regions(regions)
    sets = {frozenset(cluster) for cluster in clusters} | {frozenset(scope) for scope in graph.scopes() if scope}
    assert found == expected_regions(range(graph.num_variables), sets)
    for wanted in [{variable} for variable in range(graph.num_variables)] + [set(s) for s in graph.scopes() if s]:
        assert sum(number for region, number in found.items() if wanted <= region) == 1


@settings(deadline=None, max_examples=100)
@given(graphs_with_clusters())
def test_containments_are_the_direct_ones(case):
    graph, clusters = case
    regions = RegionGraph.kikuchi(graph, clusters)
    found = all_regions(regions)
    direct = {
        (large, small)
        for large, small in itertools.permutations(found, 2)
        if small < large and not any(small < other < large for other in found)
    }
    pairs = set()
    for kind in regions.containments:
        parents = regions.groups[kind.parent_group].variables[kind.parents]
        children = regions.groups[kind.child_group].variables[kind.children]
        assert torch.equal(parents[:, list(kind.axes)], children)
        covers = torch.equal(kind.parents, torch.arange(len(regions.groups[kind.parent_group])))
        assert kind.covers_parents == covers
        new = set(zip(map(frozenset, parents.tolist()), map(frozenset, children.tolist()), strict=True))
        assert len(new) == len(parents)
        assert not new & pairs
        pairs |= new
    assert pairs == direct


@settings(deadline=None, max_examples=100)
@given(graphs_with_clusters())
def test_every_factor_lives_in_the_smallest_region_around_it(case):
    graph, clusters = case
    regions = RegionGraph.kikuchi(graph, clusters)
    found = all_regions(regions)
    seen = []
    for home in regions.homes:
        scopes = graph.factor_groups[home.factor_group].variables[home.factors]
        around = regions.groups[home.region_group].variables[home.regions]
        assert torch.equal(around[:, list(home.axes)], scopes)
        for scope, region in zip(scopes.tolist(), around.tolist(), strict=True):
            assert len(region) == min((len(r) for r in found if set(scope) <= r), default=0) or not scope
        seen += graph.factor_groups[home.factor_group].factors[home.factors].tolist()
    assert sorted(seen) == list(range(graph.num_factors))
    nodes = torch.cat([group.variables for group in regions.node_groups]).flatten()
    assert torch.equal(nodes, torch.cat([group.variables for group in graph.variable_groups]))


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 9), st.integers(0, 10**6), st.floats(0.2, 0.7))
def test_chordless_cycles_are_induced_ones(size, seed, density):
    pairs = networkx.gnp_random_graph(size, density, seed=seed)
    graph = FactorGraph.from_networkx(pairs)
    for cycles in chordless_cycles(graph, 6):
        length = cycles.shape[1]
        expected = set()
        for subset in itertools.combinations(range(size), length):
            induced = pairs.subgraph(subset)
            if networkx.is_connected(induced) and all(degree == 2 for _, degree in induced.degree):
                expected.add(subset)
        assert len(cycles) == len(expected)
        assert {tuple(sorted(cycle)) for cycle in cycles.tolist()} == expected
        for cycle in cycles.tolist():
            assert all(pairs.has_edge(a, b) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def numbers_by_size(regions):
    return {
        (len(group.table_shape), number): int((group.counting_numbers == number).sum())
        for group in regions.groups
        for number in group.counting_numbers.unique().tolist()
    }


def test_plaquettes_of_a_grid():
    regions = RegionGraph.kikuchi(FactorGraph.grid(4, 5), "plaquettes")
    assert numbers_by_size(regions) == {(4, 1): 12, (2, -1): 17, (1, 0): 14, (1, 1): 6}


def test_strips_of_a_grid_run_along_its_longer_side():
    regions = RegionGraph.kikuchi(FactorGraph.grid(3, 5), "strips")
    clusters = {tuple(cluster) for cluster in regions.groups[0].variables.tolist()}
    assert clusters == {(r * 5 + c, r * 5 + c + 1, r * 5 + c + 2, r * 5 + c + 5, r * 5 + c + 6, r * 5 + c + 7)
                        for r in range(2) for c in range(3)}  # fmt: skip
    longer = RegionGraph.kikuchi(FactorGraph.grid(3, 5), "strips", max_length=8)
    assert set(map(tuple, longer.groups[0].variables.tolist())) == {
        tuple(row * 5 + first + offset for row in rows for offset in range(4))
        for rows in ((0, 1), (1, 2))
        for first in range(2)
    }
    tall = RegionGraph.kikuchi(FactorGraph.grid(5, 3), "strips")
    assert numbers_by_size(tall) == numbers_by_size(regions)


def test_what_is_chosen_automatically():
    shapes = {
        name: next(group.table_shape for group in RegionGraph.kikuchi(graph).groups[:1])
        for name, graph in {
            "grid": FactorGraph.grid(4, 4),
            "grid of four states": FactorGraph.grid(4, 4, states=4),
            "grid of eight states": FactorGraph.grid(4, 4, states=8),
            "grid of twenty states": FactorGraph.grid(4, 4, states=20),
            "third-order chain": FactorGraph.chain(7, 3, order=3),
            "third-order chain of many states": FactorGraph.chain(7, 30, order=3),
            "pentagon": FactorGraph.from_networkx(networkx.cycle_graph(5)),
            "tree": FactorGraph.from_networkx(networkx.balanced_tree(2, 3)),
            "large bipartite": FactorGraph.bipartite(30, 40),
        }.items()
    }
    assert shapes == {
        "grid": (2,) * 8,
        "grid of four states": (4,) * 6,
        "grid of eight states": (8,) * 4,
        "grid of twenty states": (20, 20),
        "third-order chain": (3,) * 4,
        "third-order chain of many states": (30, 30),
        "pentagon": (2,) * 5,
        "tree": (2, 2),
        "large bipartite": (2, 2),
    }


def test_clusters_are_given_in_many_ways():
    graph = FactorGraph([2] * 4, [("a", "b"), ("c", "d")], names=["a", "b", "c", "d"])
    wanted = all_regions(RegionGraph.kikuchi(graph, [["c", "b", "a"], [1, 2, 3]]))
    assert wanted == {
        frozenset(region): number
        for region, number in {(0, 1, 2): 1, (1, 2, 3): 1, (1, 2): -1, (0,): 0, (1,): 0, (2,): 0, (3,): 0}.items()
    }
    for clusters in (
        torch.tensor([[0, 1, 2], [3, 2, 1]]),
        np.array([[0, 1, 2], [3, 2, 1]]),
        [np.array([[0, 1, 2]]), [3, 1, 2], [2, 1]],
    ):
        assert all_regions(RegionGraph.kikuchi(graph, clusters)) == wanted


def test_the_same_request_gives_the_same_object():
    graph = FactorGraph.grid(3, 3)
    assert RegionGraph.kikuchi(graph) is RegionGraph.kikuchi(graph)
    assert RegionGraph.kikuchi(graph) is not RegionGraph.kikuchi(graph, "plaquettes")


@pytest.mark.parametrize(
    ("clusters", "options", "message"),
    [
        ([[0, 1, 2, 3]], {"max_table_entries": 15}, r"cluster \[0, 1, 2, 3\] needs a table of 16 entries"),
        ([[0, 9]], {}, "variable 9 does not exist"),
        (np.array([[0, 9]]), {}, r"cluster \[0, 9\]"),
        ([[1, 0, 1]], {}, "stands in it twice"),
        (np.array([[0.0, 1.0]]), {}, "integers"),
        ("square", {}, "expected .*got 'square'"),
        ("cycles", {"max_length": 2}, "at least 3"),
    ],
)
def test_wrong_clusters_are_named(clusters, options, message):
    with pytest.raises(ValueError, match=message):
        RegionGraph.kikuchi(FactorGraph.grid(2, 2), clusters, **options)
