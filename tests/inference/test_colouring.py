import itertools

import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.colouring import colour_classes
from oracle import models


def colour_of(graph: FactorGraph) -> list[int]:
    colours = [-1] * graph.num_variables
    for colour, members in enumerate(colour_classes(graph)):
        assert members.tolist() == sorted(members.tolist())
        for variable in members.tolist():
            assert colours[variable] == -1
            colours[variable] = colour
    return colours


@settings(deadline=None, max_examples=50)
@given(models(max_variables=8, max_factors=10))
def test_every_variable_has_one_colour_and_no_factor_joins_two_of_a_colour(model: LogPotentials) -> None:
    colours = colour_of(model.graph)
    assert min(colours) >= 0
    for scope in model.graph.scopes():
        for a, b in itertools.combinations(scope, 2):
            assert colours[a] != colours[b]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (FactorGraph.grid(7, 9), 2),
        (FactorGraph.chain(20), 2),
        (FactorGraph.chain(20, order=3), 4),
        (FactorGraph.bipartite(5, 8), 2),
        (FactorGraph.complete(6), 6),
        (FactorGraph([2, 3, 2], []), 1),
        (FactorGraph([2] * 6, [(0, 3), (3, 1), (1, 5), (5, 2), (2, 4)]), 2),  # a path, out of order
        (FactorGraph([2] * 5, [(0, 1), (3, 4), (4, 3), (3, 4), ()]), 2),  # components, duplicates, a constant
    ],
)
def test_number_of_colours(graph: FactorGraph, expected: int) -> None:
    assert len(colour_classes(graph)) == expected
    assert max(colour_of(graph)) == expected - 1


def test_empty_graph_has_no_colours() -> None:
    assert colour_classes(FactorGraph([], [])) == ()


def test_classes_are_kept_with_the_graph() -> None:
    graph = FactorGraph.grid(3, 3)
    assert colour_classes(graph) is colour_classes(graph)
    assert all(members.dtype == torch.long for members in colour_classes(graph))
