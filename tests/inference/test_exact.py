"""Exact inference against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bethenet import FactorGraph, LogPotentials
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.exact import Exact
from bethenet.inference.exact.domains import Logarithmic
from bethenet.inference.exact.elimination import forward, marginals
from bethenet.inference.exact.planning import MOST_PLANNERS, planner_for
from bethenet.result import Status
from oracle import enumerate_model, models


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(potentials: LogPotentials, engine: Exact | None = None, tolerance: float = 1e-9) -> None:
    """Everything that enumeration can say."""
    engine = engine or Exact()
    truth = enumerate_model(potentials)
    graph = potentials.graph
    result = engine.run(potentials)
    close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    torch.testing.assert_close(result.log_z, truth.log_z, **close)
    assert result.status is Status.CONVERGED
    for factor in range(graph.num_factors):
        torch.testing.assert_close(result.beliefs.factor_marginal(factor), truth.marginal(graph.scope(factor)), **close)
    for variable in range(graph.num_variables):
        torch.testing.assert_close(result.beliefs.node_marginal(variable), truth.marginal((variable,)), **close)
    states, value = engine.map(potentials)
    torch.testing.assert_close(value, truth.map_log_value, **close)
    torch.testing.assert_close(potentials.score(states).diagonal(), truth.map_log_value, **close)


@settings(max_examples=60, deadline=None)
@given(models(max_variables=6, max_factors=10, batch=2, zeros=True))
def test_equals_enumeration(potentials: LogPotentials) -> None:
    check(potentials)


@settings(max_examples=30, deadline=None)
@given(models(max_variables=5, zeros=True), st.randoms(use_true_random=False), st.sampled_from(["min-fill", "given"]))
def test_any_order_gives_the_same(potentials: LogPotentials, random: object, order: str) -> None:
    variables = list(range(potentials.graph.num_variables))
    random.shuffle(variables)  # type: ignore[attr-defined]
    check(potentials, Exact(order=tuple(variables) if order == "given" else order))


@settings(max_examples=40, deadline=None)
@given(models(max_variables=6, max_factors=9), st.data())
def test_evidence(potentials: LogPotentials, data: st.DataObject) -> None:
    """Observed in all members, in some, and softly."""
    evidence = {}
    batch = data.draw(st.sampled_from([1, 3]))
    for variable, states in enumerate(potentials.graph.state_counts.tolist()):
        kind = data.draw(st.sampled_from(["free", "hard", "some", "soft"]))
        if kind == "hard":
            evidence[variable] = [data.draw(st.integers(0, states - 1)) for _ in range(batch)]
        elif kind == "some":
            evidence[variable] = [data.draw(st.integers(-1, states - 1)) for _ in range(batch)]
        elif kind == "soft":
            evidence[variable] = torch.rand(batch, states, dtype=torch.float64, generator=generator(variable)) + 0.1
    check(potentials.clamp(evidence))


@settings(max_examples=30, deadline=None)
@given(models(max_variables=6, max_factors=10, batch=2, zeros=True))
def test_log_domain_equals_scaled_domain(potentials: LogPotentials) -> None:
    assume(potentials.graph.state_counts.max() > 1)  # else nothing is left to eliminate
    planner = planner_for(potentials)
    reduction, plan = planner.reduction, planner.plan("min-fill")
    trace = forward(plan, Logarithmic(), reduction.leaves(potentials), potentials.batch_size, keep=True)
    result = Exact().run(potentials)
    torch.testing.assert_close(reduction.constant(potentials) + trace.log_z, result.log_z)
    beliefs = reduction.beliefs(potentials, marginals(plan, trace, differentiable=False))
    for ours, theirs in zip(beliefs.log_tables, result.beliefs.log_tables, strict=True):
        torch.testing.assert_close(ours.exp(), theirs.exp())


# --- special graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [[], [3], [1], [2, 2, 2], [1, 1], [2, 1, 3]])
def test_graphs_without_factors(states: list[int]) -> None:
    potentials = LogPotentials(FactorGraph(states, []), [])
    result = Exact().run(potentials)
    assert result.log_z.tolist() == pytest.approx([math.log(math.prod(states))])
    for variable, count in enumerate(states):
        torch.testing.assert_close(result.beliefs.node_marginal(variable), torch.full((1, count), 1 / count))
    assert Exact().sample(potentials, 3).shape == (3, 1, len(states))
    assert Exact().map(potentials)[0].shape == (1, len(states))


@pytest.mark.parametrize(
    ("states", "scopes"),
    [
        pytest.param([2], [(0,)], id="one variable"),
        pytest.param([3], [(0,), (0,), (0,)], id="several unary factors"),
        pytest.param([2, 2], [(), (0, 1), ()], id="constants"),
        pytest.param([2], [()], id="only a constant"),
        pytest.param([2, 3, 2, 2], [(0, 1), (2, 3)], id="disconnected"),
        pytest.param([2, 3, 2], [(0, 2)], id="a variable in no factor"),
        pytest.param([1, 3, 1, 2], [(0, 1), (1, 2), (2, 3), (0, 1, 2, 3)], id="one-state variables"),
        pytest.param([1, 1], [(0, 1)], id="only one-state variables"),
        pytest.param([1] * 60, list(itertools.combinations(range(60), 2)), id="many one-state variables"),
        pytest.param([3] + [1] * 60, [(0, i) for i in range(1, 61)], id="one-state variables around one"),
        pytest.param([1] * 47 + [2, 2, 3], [range(50), (49, 0)], id="as many variables in a factor as can be"),
        pytest.param([2, 3], [(0, 1), (1, 0), (0, 1), (0, 1), (1, 0), (0, 1), (0, 1)], id="one scope many times"),
        pytest.param([3] + [2] * 9, [(0, i) for i in range(1, 10)], id="star"),
        pytest.param([2] * 8, [(i, (i + 1) % 8) for i in range(8)], id="ring"),
        pytest.param([2] * 5, list(itertools.permutations(range(5), 3)), id="all triples in all orders"),
    ],
)
def test_special_graphs(states: list[int], scopes: list[tuple[int, ...]]) -> None:
    graph = FactorGraph(states, scopes)
    check(LogPotentials.random(graph, batch_size=2, dtype=torch.float64, generator=generator()))


def test_everything_observed() -> None:
    potentials = LogPotentials.random(FactorGraph.chain(4, 3), dtype=torch.float64, generator=generator())
    states = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    check(potentials.clamp(states))
    assert Exact().sample(potentials.clamp(states), 2)[1].tolist() == states.tolist()


def test_evidence_reduces_the_width() -> None:
    potentials = LogPotentials.random(FactorGraph.grid(6, 6))
    middle = {6 * row + 3: 0 for row in range(6)}
    assert Exact().width(potentials) == 6
    assert Exact().width(potentials.clamp(middle)) <= 3
    assert Exact().predicted_bytes(potentials.clamp(middle)) < Exact().predicted_bytes(potentials)


def test_long_chain_equals_transfer_matrices() -> None:
    length = 3000
    potentials = LogPotentials.random(FactorGraph.chain(length, 3), dtype=torch.float64, generator=generator())
    unary, pair = potentials.tables
    left = [unary[0, 0]]
    for position in range(1, length):
        left.append(torch.logsumexp(left[-1][:, None] + pair[0, position - 1], 0) + unary[0, position])
    right = torch.zeros(3, dtype=torch.float64)
    node_marginals = []
    for position in range(length - 1, -1, -1):
        node_marginals.append(torch.softmax(left[position] + right, 0))
        if position:
            right = torch.logsumexp(pair[0, position - 1] + (unary[0, position] + right)[None, :], 1)
    result = Exact().run(potentials)
    torch.testing.assert_close(result.log_z, torch.logsumexp(left[-1], 0)[None])
    torch.testing.assert_close(result.beliefs.node_marginals[0], torch.stack(node_marginals[::-1]))
    rounds = planner_for(potentials).plan("at once").rounds
    assert len(rounds) <= 6 * math.log2(length)


def test_a_shared_chain_is_computed_once_for_all_rows() -> None:
    potentials = LogPotentials(FactorGraph.chain(513, 2, unary=False), [torch.randn(1, 1, 2, 2, generator=generator())])
    expanded = LogPotentials(potentials.graph, [potentials.tables[0].expand(1, 512, 2, 2)])
    torch.testing.assert_close(Exact().log_z(potentials), Exact().log_z(expanded))
    plan = planner_for(potentials).plan("at once")
    leaves = planner_for(potentials).reduction.leaves(potentials)
    trace = forward(plan, Logarithmic(), leaves, 1, keep=True)
    assert all(result.value.shape[1] == 1 for result in trace.results)


# --- batches and sharing --------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(models(max_variables=5, batch=3))
def test_a_batch_equals_its_members(potentials: LogPotentials) -> None:
    whole = Exact().run(potentials)
    for member in range(potentials.batch_size):
        one = Exact().run(potentials[member])
        torch.testing.assert_close(one.log_z, whole.log_z[member : member + 1])
        for ours, theirs in zip(one.beliefs.log_tables, whole.beliefs.log_tables, strict=True):
            torch.testing.assert_close(ours, theirs[member : member + 1])


def shared_model(kind: str) -> LogPotentials:
    """A hidden Markov model of order 2, its tables shared over the batch, the positions, or both."""
    graph = FactorGraph.chain(7, 3, order=2)
    rows = [1 if "rows" in kind and group.arity == 2 else len(group) for group in graph.factor_groups]
    batches = [3 if group.arity == 1 else 1 if "batch" in kind else 3 for group in graph.factor_groups]
    tables = [
        torch.randn(b, r, *group.table_shape, dtype=torch.float64, generator=generator(b))
        for b, r, group in zip(batches, rows, graph.factor_groups, strict=True)
    ]
    return LogPotentials(graph, tables)


@pytest.mark.parametrize("kind", ["rows", "batch", "rows and batch"])
def test_shared_tables_equal_expanded_ones_with_the_gradients_summed(kind: str) -> None:
    shared = shared_model(kind).map(lambda t: t.clone().requires_grad_())
    sizes = [len(group) for group in shared.graph.factor_groups]
    tables = [
        t.detach().expand(3, size, *t.shape[2:]).clone().requires_grad_()
        for t, size in zip(shared.tables, sizes, strict=True)
    ]
    expanded = LogPotentials(shared.graph, tables)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for potentials in (shared, expanded):
        (Exact().log_z(potentials) * weights).sum().backward()
    torch.testing.assert_close(Exact().log_z(shared), Exact().log_z(expanded))
    for ours, theirs in zip(shared.tables, expanded.tables, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.sum_to_size(ours.shape))
    one, other = Exact().marginals(shared), Exact().marginals(expanded)
    for ours, theirs in zip(one.log_tables, other.log_tables, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- derivatives ----------------------------------------------------------------------------------------------------


def differentiable_model(kind: str) -> LogPotentials:
    if kind == "shared":
        return shared_model("rows and batch")
    graph = FactorGraph([2, 3, 2, 2], [(0,), (0, 1), (1, 2), (2, 3), (3, 0), (0, 2, 3), ()])
    potentials = LogPotentials.random(graph, batch_size=2, dtype=torch.float64, generator=generator(3))
    return potentials.clamp({3: [0, 1]}) if kind == "evidence" else potentials


@pytest.mark.parametrize("kind", ["plain", "evidence", "shared"])
def test_log_z_has_two_derivatives(kind: str) -> None:
    potentials = differentiable_model(kind)
    numbers = tuple(t.clone().requires_grad_() for t in potentials.tables)

    def log_z(*tables: Tensor) -> Tensor:
        return Exact().log_z(LogPotentials(potentials.graph, tables, potentials.node_terms, potentials.observed))

    assert torch.autograd.gradcheck(log_z, numbers)
    assert torch.autograd.gradgradcheck(log_z, numbers)


def test_marginals_are_differentiable_on_request() -> None:
    potentials = differentiable_model("plain")
    numbers = tuple(t.clone().requires_grad_() for t in potentials.tables)

    def tables(*values: Tensor) -> tuple[Tensor, ...]:
        beliefs = Exact().marginals(LogPotentials(potentials.graph, values), differentiable=True)
        return tuple(table.exp() for table in beliefs.log_tables)

    assert torch.autograd.gradcheck(tables, numbers)
    potentials = LogPotentials(potentials.graph, numbers)
    assert not Exact().run(potentials).beliefs.log_tables[0].requires_grad
    assert Exact(differentiable=True).run(potentials).beliefs.log_tables[-1].requires_grad


@settings(max_examples=25, deadline=None)
@given(models(max_variables=5, batch=2, zeros=True))
def test_the_gradient_of_log_z_is_the_marginals(potentials: LogPotentials) -> None:
    potentials = potentials.map(lambda t: t.clone().requires_grad_())
    result = Exact().run(potentials)
    numbers = (*potentials.tables, *potentials.node_terms)
    gradients = torch.autograd.grad(result.log_z.sum(), numbers, allow_unused=True)
    beliefs = (*result.beliefs.factor_marginals, *(table.exp() for table in result.beliefs.node_log_tables))
    for gradient, belief in zip(gradients, beliefs, strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, belief.sum_to_size(gradient.shape))


def test_second_derivatives_in_the_log_domain() -> None:
    potentials = differentiable_model("plain")
    planner = planner_for(potentials)
    plan, reduction = planner.plan("min-fill"), planner.reduction
    numbers = tuple(t.clone().requires_grad_() for t in potentials.tables)

    def log_z(*tables: Tensor) -> Tensor:
        model = LogPotentials(potentials.graph, tables)
        trace = forward(plan, Logarithmic(), reduction.leaves(model), 2, keep=False)
        return reduction.constant(model) + trace.log_z

    assert torch.autograd.gradcheck(log_z, numbers)
    assert torch.autograd.gradgradcheck(log_z, numbers)


# --- range ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("height", [50.0, 200.0, 1000.0])
def test_tables_far_apart_do_not_underflow(height: float, dtype: torch.dtype) -> None:
    """The likely state of each factor is made very unlikely by the others."""
    graph = FactorGraph.chain(6, 2)
    pair = torch.tensor([[0.0, -height], [-height, -3 * height]], dtype=dtype)
    unary = torch.tensor([[-2.0 * height, 0.0], [0.0, -3.0], [0.5, 0.0], [0.0, 2.0], [height, 0.0], [0.0, 0.1]])
    potentials = LogPotentials(graph, [unary.to(dtype)[None], pair.expand(1, 5, 2, 2)])
    check(potentials, tolerance=2e-5 if dtype is torch.float32 else 1e-9)
    numbers = potentials.map(lambda t: t.clone().requires_grad_())
    Exact().log_z(numbers).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in numbers.tables)
    assert Exact().log_z(potentials).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strong_couplings_on_a_grid(dtype: torch.dtype) -> None:
    """Couplings of +-20: within reach of float64, out of reach of float32, in scaled arithmetic."""
    graph = FactorGraph.grid(9, 9)
    sign = torch.randint(0, 2, (1, 144, 1, 1), generator=generator()) * 2.0 - 1.0
    spins = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    fields = torch.randn(1, 81, 2, generator=generator())
    potentials = LogPotentials(graph, [fields.double(), (20 * sign * spins).double()])
    planner = planner_for(potentials)
    leaves = planner.reduction.leaves(potentials)
    truth = forward(planner.plan("min-fill"), Logarithmic(), leaves, 1, keep=False).log_z
    result = Exact().run(potentials.to(dtype=dtype))
    torch.testing.assert_close(result.log_z.double(), truth, rtol=1e-6, atol=1e-6)
    assert result.log_z.dtype is result.beliefs.log_tables[0].dtype is dtype
    assert result.beliefs.inconsistency().item() < 1e-5


def test_a_gradient_past_an_impossible_state_stays_finite() -> None:
    """Given the impossible state of the middle, the rest would be e^2000 times likelier."""
    graph = FactorGraph([2] * 101, [(0,), *((0, i) for i in range(1, 101))])
    pairs = torch.tensor([[0.0, 0.0], [20.0, 20.0]], dtype=torch.float64).expand(1, 100, 2, 2)
    potentials = LogPotentials(graph, [torch.tensor([[[0.0, -math.inf]]], dtype=torch.float64), pairs.clone()])
    potentials = potentials.map(lambda t: t.clone().requires_grad_())
    result = Exact().run(potentials)
    assert result.log_z.item() == pytest.approx(100 * math.log(2))
    result.log_z.sum().backward()
    assert torch.isfinite(potentials.tables[1].grad).all()
    torch.testing.assert_close(potentials.tables[1].grad[0, 0].tolist(), [[0.5, 0.5], [0.0, 0.0]])


def test_impossible_members_are_named() -> None:
    graph = FactorGraph.chain(3)
    potentials = LogPotentials.random(graph, dtype=torch.float64, generator=generator())
    table = potentials.tables[1].clone()
    table[:, 0, 0, 1] = -math.inf
    potentials = LogPotentials(graph, [potentials.tables[0], table])
    evidence = potentials.clamp({0: [0, 0, 1], 1: [0, 1, 0]})
    for call in (Exact().log_z, Exact().run, Exact().marginals, Exact().map, lambda p: Exact().sample(p, 2)):
        with pytest.raises(ImpossibleEvidenceError, match=r"1 of 3 batch members: 1"):
            call(evidence)
    with pytest.raises(ImpossibleEvidenceError, match="1 of 1"):
        Exact().log_z(LogPotentials(graph, [torch.full_like(t, -math.inf) for t in potentials.tables]))


# --- samples --------------------------------------------------------------------------------------------------------


def test_samples_have_the_models_probabilities() -> None:
    graph = FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 3), (3, 0), (0,)])
    potentials = LogPotentials.random(graph, batch_size=2, dtype=torch.float64, generator=generator(1))
    tables = [*potentials.tables]
    tables[1] = tables[1].clone()
    tables[1][:, :, 0, 0] = -math.inf
    potentials = LogPotentials(graph, tables).clamp({3: [0, 1]})
    truth = enumerate_model(potentials)
    n = 20_000
    samples = Exact().sample(potentials, n, generator(2))
    assert samples.shape == (n, 2, 4)
    strides = torch.tensor([12, 4, 2, 1])
    for member in range(2):
        counts = torch.bincount((samples[:, member] * strides).sum(-1), minlength=24).double()
        expected = n * truth.log_probabilities[:, member].exp()
        assert (counts[expected == 0] == 0).all()
        chi_square = ((counts - expected) ** 2 / expected)[expected > 0].sum()
        assert chi_square < 2.5 * int((expected > 0).sum())


def test_samples_follow_their_generator() -> None:
    potentials = LogPotentials.random(FactorGraph.grid(3, 3), generator=generator())
    one, again = (Exact().sample(potentials, 50, generator(5)) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, Exact().sample(potentials, 50, generator(6)))
    assert Exact().sample(potentials, 0).shape == (0, 1, 9)


def test_plans_are_kept_with_the_graph_but_not_for_ever() -> None:
    potentials = LogPotentials.random(FactorGraph.chain(8), generator=generator())
    planner = planner_for(potentials)
    assert planner_for(potentials) is planner
    masks = list(itertools.product([-1, 0], repeat=8))
    for mask in masks[1 : MOST_PLANNERS + 1]:
        planner_for(potentials.clamp(torch.tensor(mask)))
    assert planner_for(potentials) is not planner
    assert planner_for(potentials) is planner_for(potentials.graph)


# --- options --------------------------------------------------------------------------------------------------------


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_limit"):
        Exact(memory_limit=0)
    with pytest.raises(ValueError, match="expected one of"):
        Exact(order="best")
    with pytest.raises(ValueError, match="every variable from 0 to 2 once"):
        Exact(order=(0, 1)).log_z(LogPotentials.random(FactorGraph.chain(3)))
    with pytest.raises(ValueError, match="at least 0 samples"):
        Exact().sample(LogPotentials.random(FactorGraph.chain(3)), -1)
