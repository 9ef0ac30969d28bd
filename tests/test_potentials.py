"""`LogPotentials`: scores, evidence, sharing, batches, and every way to get them wrong."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, LogPotentials
from oracle import enumerate_model, models

GRAPH = FactorGraph([2, 3, 2], [(0, 1), (2, 1), (0,)], ["a", "b", "c"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def example(batch=1):
    return LogPotentials.random(GRAPH, batch_size=batch, dtype=torch.float64, generator=seeded())


def naive_score(potentials, assignment, member=0):
    total = 0.0
    for factor, scope in enumerate(potentials.graph.scopes()):
        table = potentials.table(factor)
        total += table[min(member, table.shape[0] - 1)][tuple(assignment[v] for v in scope)].item()
    for term, group in zip(potentials.node_terms, potentials.graph.variable_groups, strict=True):
        term = term.expand(potentials.batch_size, group.variables.numel(), group.states)
        for row, variable in enumerate(group.variables.tolist()):
            total += term[member, row, assignment[variable]].item()
    return total


# --- scores -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(model=models(batch=2, zeros=True), data=st.data())
def test_score_is_the_sum_over_factors(model, data):
    assignments = [
        [data.draw(st.integers(0, int(states) - 1)) for states in model.graph.state_counts] for _ in range(3)
    ]
    scores = model.score(torch.tensor(assignments))
    assert scores.shape == (3, model.batch_size)
    for row, assignment in enumerate(assignments):
        for member in range(model.batch_size):
            assert scores[row, member].item() == pytest.approx(naive_score(model, assignment, member))
    stacked = model.score(torch.tensor(assignments).reshape(1, 3, -1))
    assert torch.equal(stacked[0], scores)


def test_score_counts_soft_and_hard_evidence():
    model = example().clamp({"a": 1, "b": torch.tensor([0.5, 0.25, 0.0])})
    for assignment in ([1, 0, 0], [1, 1, 1]):
        assert model.score(torch.tensor(assignment)).item() == pytest.approx(naive_score(model, assignment))
    assert model.score(torch.tensor([[0, 0, 0], [1, 2, 0]])).tolist() == [[-math.inf], [-math.inf]]


def test_the_empty_model():
    model = LogPotentials(FactorGraph([], []), [])
    assert model.score(torch.empty(0, dtype=torch.long)).tolist() == [0.0]
    assert model.score(torch.empty(3, 0, dtype=torch.long)).shape == (3, 1)
    assert model.clamp({}).batch_size == 1
    assert not model.has_zeros
    assert enumerate_model(model).log_z.item() == 0
    assert repr(model).endswith("batch 1, tables none, torch.float32)")


def test_several_factors_over_the_same_variables_add_up():
    one = LogPotentials.from_factors([2, 2], [((0, 1), [[1.0, 2], [3, 4]]), ((1, 0), [[10.0, 20], [30, 40]])])
    assert one.score(torch.tensor([[0, 1], [1, 0]])).flatten().tolist() == [32.0, 23.0]


def test_constants_one_state_variables_and_variables_in_no_factor():
    model = LogPotentials.from_factors([1, 3], [((), 0.5), ((0,), [2.0])], dtype=torch.float64)
    truth = enumerate_model(model)
    assert truth.log_z.item() == pytest.approx(2.5 + math.log(3))
    assert truth.marginal((1,))[0].tolist() == pytest.approx([1 / 3] * 3)


# --- builders -----------------------------------------------------------------------------------------------------


def test_from_tables_and_table():
    tables = [torch.arange(6.0).reshape(2, 3), [[1.0, 2, 3], [4, 5, 6]], [0.0, -math.inf]]
    model = LogPotentials.from_tables(GRAPH, tables, dtype=torch.float64)
    assert model.dtype == torch.float64
    for factor, table in enumerate(tables):
        assert model.table(factor).tolist() == [torch.as_tensor(table).tolist()]
    assert model.has_zeros
    assert not LogPotentials.from_tables(GRAPH, [*tables[:2], [0.0, 1.0]]).has_zeros


def test_nobody_looks_for_impossible_states_where_none_are_said_to_be(monkeypatch):
    model = LogPotentials(GRAPH, LogPotentials.random(GRAPH).tables, finite=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "any", None)
        assert not model.has_zeros
        assert not model.detach().has_zeros
    assert model.clamp({0: 1}).has_zeros  # evidence is another matter


def test_gradients_reach_the_tables_given():
    table = torch.zeros(2, 3, requires_grad=True)
    model = LogPotentials.from_tables(GRAPH, [table, torch.zeros(2, 3), torch.zeros(2)])
    model.score(torch.tensor([1, 2, 0])).sum().backward()
    assert table.grad.nonzero().tolist() == [[1, 2]]


def test_random_depends_on_the_generator_only():
    assert all(torch.equal(a, b) for a, b in zip(example().tables, example().tables, strict=True))
    other = LogPotentials.random(GRAPH, dtype=torch.float64, generator=seeded(1))
    assert not torch.equal(other.tables[0], example().tables[0])
    wide = LogPotentials.random(GRAPH, 100.0, dtype=torch.float64, generator=seeded())
    torch.testing.assert_close(wide.tables[0], 100 * example().tables[0])


def test_stack_and_index():
    one, two = example(), LogPotentials.random(GRAPH, batch_size=2, dtype=torch.float64, generator=seeded(1))
    states = torch.tensor([[0, 1, 1], [1, 2, 0]])
    stacked = LogPotentials.stack([one, two, one.clamp({"a": 0})])
    assert stacked.batch_size == 4
    expected = torch.cat([one.score(states), two.score(states), one.clamp({"a": 0}).score(states)], dim=1)
    torch.testing.assert_close(stacked.score(states), expected)
    assert stacked.observed.tolist() == [[-1, -1, -1]] * 3 + [[0, -1, -1]]
    for member in range(4):
        torch.testing.assert_close(stacked[member].score(states), expected[:, member : member + 1])
    torch.testing.assert_close(stacked[-1].score(states), expected[:, 3:])
    torch.testing.assert_close(stacked[1:3].score(states), expected[:, 1:3])
    torch.testing.assert_close(stacked[torch.tensor([3, 0])].score(states), expected[:, [3, 0]])


def test_indexing_keeps_what_is_shared():
    model = example().clamp(torch.tensor([[0, -1, -1], [1, -1, -1]]))
    part = model[1]
    assert part.batch_size == 1
    assert part.tables[0] is model.tables[0]
    assert part.observed.tolist() == [[1, -1, -1]]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_shared_tables_score_as_expanded_ones(data):
    graph = FactorGraph.chain(4, 3)
    batch = data.draw(st.sampled_from([1, 3]))
    shapes = [
        (data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, len(group)])), *group.table_shape)
        for group in graph.factor_groups
    ]
    tables = [torch.randn(shape, dtype=torch.float64, generator=seeded()) for shape in shapes]
    shared = LogPotentials(graph, tables)
    expanded = LogPotentials(
        graph,
        [
            table.expand(batch, len(group), *group.table_shape).clone()
            for table, group in zip(tables, graph.factor_groups, strict=True)
        ],
    )
    states = torch.randint(0, 3, (5, 4), generator=seeded(1))
    torch.testing.assert_close(shared.score(states).expand(5, batch), expanded.score(states))
    assert torch.equal(
        shared.table(5).expand(batch, -1, -1),
        expanded.table(5),
    )


def test_types_devices_and_copies():
    model = example().clamp({"a": 0})
    single = model.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    assert single.observed.tolist() == model.observed.tolist()
    assert {tensor.dtype for tensor in (*single.tables, *single.node_terms)} == {torch.float32}
    assert model.to("meta").device.type == "meta"
    grown = LogPotentials(GRAPH, [table.requires_grad_() for table in example().tables])
    assert not any(table.requires_grad for table in grown.detach().tables)
    doubled = model.map(lambda tensor: 2 * tensor)
    assert torch.equal(doubled.tables[0], 2 * model.tables[0])


# --- evidence -----------------------------------------------------------------------------------------------------


def conditional(model, observed, member=0):
    """log Z of the model restricted to assignments that agree with ``observed``, by enumeration."""
    truth = enumerate_model(model)
    scores = truth.log_probabilities[:, member] + truth.log_z[member]
    keep = torch.ones(len(scores), dtype=torch.bool)
    for variable, state in observed.items():
        keep &= truth.assignments[:, variable] == state
    return torch.logsumexp(scores[keep], 0).item()


def test_hard_evidence_by_number_name_and_tensor():
    model = example()
    for evidence in ({0: 1, 1: 2}, {"a": 1, "b": 2}, {"a": torch.tensor(1), 1: [2]}, torch.tensor([1, 2, -1])):
        clamped = model.clamp(evidence)
        assert clamped.batch_size == 1
        assert clamped.observed.tolist() == [[1, 2, -1]]
        assert enumerate_model(clamped).log_z.item() == pytest.approx(conditional(model, {0: 1, 1: 2}))
        assert clamped.tables[0] is model.tables[0]


def test_batches_of_evidence_some_of_it_partial():
    model = example()
    for evidence in (
        {"a": [0, 1, -1], "b": torch.tensor([-1, 2, 1])},
        torch.tensor([[0, -1, -1], [1, 2, -1], [-1, 1, -1]]),
    ):
        clamped = model.clamp(evidence)
        assert clamped.batch_size == 3
        expected = [conditional(model, o) for o in ({0: 0}, {0: 1, 1: 2}, {1: 1})]
        assert enumerate_model(clamped).log_z.tolist() == pytest.approx(expected)
    assert model.clamp({"a": [0, 1], "b": 2}).observed.tolist() == [[0, 2, -1], [1, 2, -1]]


def test_evidence_on_a_batch_of_models():
    model = example(batch=2)
    clamped = model.clamp({"a": [0, 1]})
    expected = [conditional(model, {0: 0}, 0), conditional(model, {0: 1}, 1)]
    assert enumerate_model(clamped).log_z.tolist() == pytest.approx(expected)
    assert enumerate_model(model.clamp({"a": 0})).log_z.tolist() == pytest.approx(
        [conditional(model, {0: 0}, member) for member in range(2)]
    )


def test_soft_evidence_weighs_states():
    model = example()
    weights = torch.tensor([[0.5, 0.25, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    clamped = model.clamp({"b": weights})
    assert clamped.batch_size == 2
    assert clamped.observed is None
    truth = enumerate_model(model)
    marginal = truth.marginal((1,))[0]
    expected = truth.log_z + (weights * marginal).sum(1).log()
    torch.testing.assert_close(enumerate_model(clamped).log_z, expected)
    # a mapping with both kinds is the same as one after the other
    both = model.clamp({"b": weights[0], "a": 1})
    one_by_one = model.clamp({"a": 1}).clamp({"b": weights[0]})
    assert all(torch.equal(a, b) for a, b in zip(both.node_terms, one_by_one.node_terms, strict=True))


def test_evidence_adds_up_and_may_contradict_itself():
    model = example().clamp({"a": 1}).clamp({"b": 2})
    assert model.observed.tolist() == [[1, 2, -1]]
    assert enumerate_model(model).log_z.item() == pytest.approx(conditional(example(), {0: 1, 1: 2}))
    assert example().clamp({"a": 1}).clamp({"a": 0}).score(torch.tensor([[0, 0, 0], [1, 0, 0]])).tolist() == [
        [-math.inf],
        [-math.inf],
    ]


def test_evidence_of_probability_zero():
    model = LogPotentials.from_factors([2], [((0,), [0.0, -math.inf])])
    assert model.clamp({0: 1}).score(torch.tensor([[0], [1]])).tolist() == [[-math.inf], [-math.inf]]
    assert model.clamp({0: 1}).has_zeros


# --- errors -------------------------------------------------------------------------------------------------------

TABLES = [torch.zeros(1, 1, 2), torch.zeros(1, 2, 2, 3)]
PAIRS = FactorGraph([2, 3, 2], [(0, 1), (2, 1), (0,)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LogPotentials(PAIRS, TABLES[:1]), "expected 2 tables, one a factor group; got 1"),
        (lambda: LogPotentials(PAIRS, TABLES, [torch.zeros(1, 1, 2)]), "expected 2 node terms, .* got 1"),
        (
            lambda: LogPotentials(PAIRS, [TABLES[0], torch.zeros(1, 3, 2, 3)]),
            r"table 1: expected shape \[batch or 1, 2 factors or 1, 2, 3\], got \[1, 3, 2, 3\]",
        ),
        (
            lambda: LogPotentials(PAIRS, [TABLES[0], torch.zeros(2, 2, 3)]),
            r"table 1: .* got \[2, 2, 3\]",
        ),
        (
            lambda: LogPotentials(PAIRS, TABLES, [torch.zeros(1, 2, 2), torch.zeros(1, 1, 2)]),
            r"node term 1: expected shape \[batch or 1, 1 variables or 1, 3\], got \[1, 1, 2\]",
        ),
        (lambda: LogPotentials(PAIRS, [TABLES[0], TABLES[1].double()]), "table 1: expected torch.float32 .*float64"),
        (lambda: LogPotentials(PAIRS, [table.long() for table in TABLES]), "table 0: expected .* torch.int64"),
        (lambda: LogPotentials(PAIRS, [TABLES[0], TABLES[1].to("meta")]), "table 1: expected to be on cpu, is on meta"),
        (
            lambda: LogPotentials(PAIRS, [torch.zeros(2, 1, 2), torch.zeros(3, 1, 2, 3)]),
            r"batch sizes differ: \[2, 3\]; each tensor has one common size or 1",
        ),
        (lambda: LogPotentials.from_tables(PAIRS, [[0, 0]]), "expected 3 tables, one a factor; got 1"),
        (
            lambda: LogPotentials.from_tables(PAIRS, [torch.zeros(2, 3), torch.zeros(3, 2), [0, 0]]),
            r"factor 1 over variables \(2, 1\): expected a table of shape \(2, 3\), got \(3, 2\)",
        ),
        (
            lambda: LogPotentials.from_tables(PAIRS, [torch.zeros(2, 3), torch.zeros(2, 3), [0, math.nan]]),
            r"factor 2 over variables \(0,\): a log-potential is a number or -inf, got nan",
        ),
        (
            lambda: LogPotentials.from_tables(PAIRS, [torch.full((2, 3), math.inf), torch.zeros(2, 3), [0, 0]]),
            r"factor 0 over variables \(0, 1\): a log-potential is a number or -inf, got inf",
        ),
        (
            lambda: LogPotentials.from_tables(PAIRS, [[[0.0], [0.0, 1.0]], torch.zeros(2, 3), [0, 0]]),
            r"factor 0 over variables \(0, 1\): expected a table of numbers",
        ),
        (lambda: LogPotentials.random(PAIRS, batch_size=0), "expected at least one batch member, got a batch of none"),
        (lambda: LogPotentials.stack([]), "expected at least one model to stack, got none"),
        (
            lambda: LogPotentials.stack([example(), LogPotentials(PAIRS, TABLES)]),
            "models stack into a batch only if they share one graph object",
        ),
        (lambda: example().clamp({"z": 0}), "no variable is named 'z'"),
        (lambda: example().clamp({7: 0}), "variable 7 does not exist: the graph has 3 variables"),
        (lambda: example().clamp({"b": 3}), r"a state from 0 to 2 \(or -1: not observed\), got 3"),
        (lambda: example().clamp(torch.tensor([0, -2, 0])), "variable 1: expected a state from 0 to 2 .* got -2"),
        (
            lambda: example().clamp({"a": [[0]]}),
            r"variable 0: observed states have shape .* got \(1, 1\)",
        ),
        (lambda: example().clamp({"a": [0, 1], "b": [0, 1, 2]}), "variable 0: expected 1 or 3 observed states, got 2"),
        (lambda: example(2).clamp({"a": [0, 1, 0]}), r"batch sizes differ: \[2, 3\]"),
        (lambda: example().clamp(torch.zeros(3)), r"expected integer states of shape \[3\] or \[batch, 3\]"),
        (lambda: example().clamp(torch.zeros(2, dtype=torch.long)), r"expected integer states .* of shape \(1, 2\)"),
        (
            lambda: example().clamp({"b": torch.ones(2)}),
            r"variable 1: soft evidence has shape \[3\] or \[batch, 3\]",
        ),
        (
            lambda: example().clamp({"a": torch.tensor([-1.0, 1])}),
            "soft evidence is non-negative and finite",
        ),
        (lambda: example().clamp({"a": torch.tensor([math.nan, 1])}), "variable 0: soft evidence is non-negative"),
        (lambda: example().clamp({"a": None}), "variable 0: expected states or soft evidence, got None"),
        (lambda: example().clamp([0, 1]), "evidence is a mapping from variables, or a tensor of states; got list"),
        (lambda: example().clamp({"a": 0.5}), r"variable 0: soft evidence has shape \[2\] or \[batch, 2\], got \(\)"),
        (lambda: example().table(3), "factor 3 does not exist: the graph has 3 factors"),
        (
            lambda: example().score(torch.tensor([0, 0])),
            r"states of shape \[\.\.\., 3\], got .* \(2,\)",
        ),
        (lambda: example().score(torch.zeros(3)), r"states of shape \[\.\.\., 3\], got torch.float32"),
        (lambda: example().score(torch.tensor([0, 3, 0])), "variable 1: expected a state from 0 to 2, got 3"),
        (lambda: example().score(torch.tensor([0, -1, 0])), "variable 1: expected a state from 0 to 2, got -1"),
    ],
)
def test_wrong_potentials(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_members_beyond_the_batch():
    with pytest.raises(IndexError, match="member 2 of a batch of 2"):
        example(2)[2]


@pytest.mark.parametrize("more", [{1: [0, 1, 0]}, {1: torch.ones(3, 2)}, torch.zeros(3, 3, dtype=torch.long)])
def test_evidence_for_batches_of_different_sizes(more):
    potentials = LogPotentials.random(FactorGraph.chain(3)).clamp({0: [0, 1]})
    with pytest.raises(ValueError, match="expected evidence for 1 or 2 batch members, as there was before; got 3"):
        potentials.clamp(more)
