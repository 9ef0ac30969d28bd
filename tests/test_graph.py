"""`FactorGraph`: its groups, its builders, and every way to get it wrong."""

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph


@st.composite
def structures(draw):
    counts = draw(st.lists(st.integers(1, 4), max_size=6))
    scope = st.lists(st.sampled_from(range(len(counts))), max_size=3, unique=True) if counts else st.just([])
    return counts, draw(st.lists(scope, max_size=8))


# --- what a graph says --------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(structure=structures())
def test_groups_say_what_the_scopes_said(structure):
    counts, scopes = structure
    graph = FactorGraph(counts, scopes)
    assert (graph.num_variables, graph.num_factors) == (len(counts), len(scopes))
    assert graph.state_counts.tolist() == counts
    assert graph.scopes() == [tuple(scope) for scope in scopes]
    assert [graph.scope(factor) for factor in range(len(scopes))] == graph.scopes()
    for number, states in enumerate(counts):
        group, row = graph.locate_variable(number)
        assert graph.variable_groups[group].states == states
        assert graph.variable_groups[group].variables[row] == number
        assert graph.variable_rows[number] == row
    for number, scope in enumerate(scopes):
        group, row = graph.locate_factor(number)
        factors = graph.factor_groups[group]
        assert factors.table_shape == tuple(counts[v] for v in scope)
        assert factors.arity == len(scope)
        assert factors.factors[row] == number
        for axis, variable in enumerate(scope):
            read = graph.variable_groups[factors.variable_groups[axis]]
            assert read.variables[factors.rows[row, axis]] == variable
    assert sum(len(group) for group in graph.factor_groups) == len(scopes)
    assert len({group.table_shape for group in graph.factor_groups}) == len(graph.factor_groups)
    assert all((group.factors.diff() > 0).all() for group in graph.factor_groups)
    for group, degrees in zip(graph.variable_groups, graph.degrees, strict=True):
        expected = [sum(v in scope for scope in scopes) for v in group.variables.tolist()]
        assert degrees.tolist() == expected


def test_the_empty_graph():
    graph = FactorGraph([], [])
    assert (graph.num_variables, graph.num_factors, graph.scopes(), graph.degrees) == (0, 0, [], ())
    assert repr(graph) == "FactorGraph(0 variables, 0 factors: none)"


def test_repr_counts_the_groups():
    assert repr(FactorGraph([2, 3], [(0, 1), (), (1, 0)])) == (
        "FactorGraph(2 variables, 3 factors: 1 of 1 entries, 1 of 2x3 entries, 1 of 3x2 entries)"
    )


def test_names():
    graph = FactorGraph([2, 3], [("b", "a"), (1, "a")], ["a", "b"])
    assert graph.scopes() == [(1, 0), (1, 0)]
    assert graph.variable_number("b") == 1
    assert graph.locate_variable("b") == graph.locate_variable(1)
    assert graph.to("cpu").names == ("a", "b")


def test_numbers_may_be_tensors_and_arrays():
    graph = FactorGraph(torch.tensor([2, 2]), torch.tensor([[0, 1], [1, 0]]))
    assert graph.scopes() == [(0, 1), (1, 0)]


def test_compiled_wiring_is_built_once():
    graph, calls = FactorGraph.chain(3), []

    def build(of):
        calls.append(of)
        return len(calls)

    assert [graph.compiled(build), graph.compiled(build)] == [1, 1]
    assert calls == [graph]
    assert graph.compiled_as("key", lambda: 7) == graph.compiled_as("key", lambda: 8) == 7


def test_moving_to_where_it_is_keeps_it_and_elsewhere_is_kept():
    graph = FactorGraph.grid(2, 2)
    assert graph.to("cpu") is graph
    moved = graph.to("meta")
    assert moved is graph.to("meta")
    assert moved.device.type == "meta"
    assert [group.table_shape for group in moved.factor_groups] == [group.table_shape for group in graph.factor_groups]
    assert all(group.rows.device.type == "meta" for group in moved.factor_groups)


# --- builders -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(structure=structures())
def test_from_arrays_is_from_lists(structure):
    counts, scopes = structure
    by_lists = FactorGraph(counts, scopes)
    order = sorted(range(len(scopes)), key=lambda factor: len(scopes[factor]))
    arities = sorted({len(scope) for scope in scopes})
    numbers = [[factor for factor in order if len(scopes[factor]) == arity] for arity in arities]
    arrays = [
        torch.tensor([scopes[factor] for factor in some], dtype=torch.long).reshape(len(some), arity)
        for some, arity in zip(numbers, arities, strict=True)
    ]
    by_arrays = FactorGraph.from_arrays(counts, arrays, numbers=numbers)
    assert by_arrays.scopes() == by_lists.scopes()
    for mine, theirs in zip(by_arrays.factor_groups, by_lists.factor_groups, strict=True):
        assert mine.table_shape == theirs.table_shape
        assert torch.equal(mine.factors, theirs.factors)
        assert torch.equal(mine.variables, theirs.variables)
        assert torch.equal(mine.rows, theirs.rows)
    assert FactorGraph.from_arrays(counts, arrays).scopes() == [tuple(scopes[factor]) for factor in order]


def test_grid():
    graph = FactorGraph.grid(2, 3, 4)
    assert graph.state_counts.tolist() == [4] * 6
    assert graph.scopes()[:6] == [(i,) for i in range(6)]
    assert graph.scopes()[6:] == [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)]
    assert FactorGraph.grid(2, 2, unary=False).scopes() == [(0, 1), (2, 3), (0, 2), (1, 3)]
    assert FactorGraph.grid(0, 3).num_factors == 0
    assert FactorGraph.grid(1, 1).scopes() == [(0,)]


def test_chain():
    assert FactorGraph.chain(4, unary=False).scopes() == [(0, 1), (1, 2), (2, 3)]
    assert FactorGraph.chain(4, order=2).scopes()[4:] == [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]
    assert FactorGraph.chain(2, order=5).scopes() == [(0,), (1,), (0, 1)]
    assert FactorGraph.chain(3, order=0).scopes() == [(0,), (1,), (2,)]
    assert FactorGraph.chain(0).num_variables == 0
    assert FactorGraph.chain(1).scopes() == [(0,)]


def test_bipartite():
    graph = FactorGraph.bipartite(2, 3, 2, 4)
    assert graph.state_counts.tolist() == [2, 2, 4, 4, 4]
    assert graph.scopes()[5:] == [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
    assert FactorGraph.bipartite(0, 2).scopes() == [(0,), (1,)]


def test_complete():
    assert FactorGraph.complete(4, 3, unary=False).scopes() == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert FactorGraph.complete(1).scopes() == [(0,)]
    assert FactorGraph.complete(0).num_factors == 0


def test_from_networkx():
    source = networkx.Graph([("x", "y"), ("y", 7)])
    graph = FactorGraph.from_networkx(source, {"x": 2, "y": 3, 7: 4})
    assert graph.names == ("x", "y", "7")
    assert graph.state_counts.tolist() == [2, 3, 4]
    assert graph.scopes() == [(0,), (1,), (2,), (0, 1), (1, 2)]
    assert FactorGraph.from_networkx(source, unary=False).scopes() == [(0, 1), (1, 2)]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FactorGraph([2, 0], []), "variable 1: expected at least one state, got 0"),
        (lambda: FactorGraph([2.0], []), "state counts are one integer a variable; got torch.float32"),
        (lambda: FactorGraph(torch.ones(2, 2, dtype=torch.long), []), r"one integer a variable; got .* \(2, 2\)"),
        (lambda: FactorGraph([2], [(0, 1)]), "factor 0: variable 1 does not exist: the graph has 1 variables"),
        (lambda: FactorGraph([2], [(0,), (-1,)]), "factor 1: variable -1 does not exist"),
        (lambda: FactorGraph([2, 2], [(0,), 1]), "factor 1: a scope is a sequence of variables; got 1"),
        (lambda: FactorGraph([2, 2], [(0,), (1, 1)]), "factor 1: variable 1 stands in its scope twice"),
        (lambda: FactorGraph([1] * 60, [(), range(60)]), "factor 1: expected at most 50 variables, got 60"),
        (lambda: FactorGraph([2], [(0.5,)]), "factor 0: a variable is a number or a name; got 0.5"),
        (lambda: FactorGraph([2], [("a",)]), "factor 0: no variable is named 'a': its variables have no names"),
        (lambda: FactorGraph([2], [("a",)], ["b"]), r"factor 0: no variable is named 'a': there are \['b'\]"),
        (lambda: FactorGraph([2, 2], [], ["a"]), "expected 2 names, one a variable; got 1"),
        (lambda: FactorGraph([2, 2], [], ["a", "a"]), "variables 0 and 1 are both named 'a'"),
        (lambda: FactorGraph.from_arrays([2], [torch.zeros(3)]), r"\[factors, arity\]; got .* \(3,\)"),
        (lambda: FactorGraph.from_arrays([2], [[[0.5]]]), "an array of scopes is of integers"),
        (lambda: FactorGraph.from_arrays([2], [[[0]], [[1]]]), "factor 1: variable 1 does not exist"),
        (lambda: FactorGraph.from_arrays([2, 2], [[[0, 0]]]), "factor 0: variable 0 stands in its scope twice"),
        (lambda: FactorGraph.from_arrays([2], [[[0]]], numbers=[[1]]), r"each of 0 \.\. 0 once; got \[1\]"),
        (lambda: FactorGraph.from_arrays([2], [[[0]]], numbers=[[0, 0]]), r"expected \[1\] factor numbers"),
        (lambda: FactorGraph([2], []).variable_number(3), "variable 3 does not exist: the graph has 1 variables"),
        (lambda: FactorGraph([2], []).scope(0), "factor 0 does not exist: the graph has 0 factors"),
        (lambda: FactorGraph([2], [(0,)]).locate_factor(-1), "factor -1 does not exist: the graph has 1 factors"),
        (lambda: FactorGraph.grid(-1, 2), "rows: expected at least 0, got -1"),
        (lambda: FactorGraph.grid(1, -2), "columns: expected at least 0, got -2"),
        (lambda: FactorGraph.grid(2, 2, 0), "variable 0: expected at least one state, got 0"),
        (lambda: FactorGraph.chain(-1), "length: expected at least 0, got -1"),
        (lambda: FactorGraph.chain(3, order=-1), "order: expected at least 0, got -1"),
        (lambda: FactorGraph.bipartite(1, -1), "right: expected at least 0, got -1"),
        (lambda: FactorGraph.complete(-1), "variables: expected at least 0, got -1"),
        (lambda: FactorGraph.from_networkx(networkx.Graph([(0, 0)])), "factor 1: variable 0 stands in its scope twice"),
        (lambda: FactorGraph.from_networkx(networkx.Graph([(0, 1)]), {0: 2}), "node 1: no number of states"),
        (lambda: FactorGraph.from_networkx(networkx.DiGraph([(0, 1)])), "expected an undirected graph"),
    ],
)
def test_wrong_graphs(build, message):
    with pytest.raises(ValueError, match=message):
        build()
