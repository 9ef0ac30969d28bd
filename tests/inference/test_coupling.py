import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from bethenet import FactorGraph, LogPotentials
from bethenet.free_energy import free_energy
from bethenet.inference.coupling import (
    bethe_free_energy,
    consistent_beliefs,
    factor_log_beliefs,
    pairwise_log_beliefs,
)
from bethenet.inference.scaling import Scaling, binary_log_beliefs, solve_duals
from oracle import models


def random_case(
    shape: tuple[int, ...], scale: float, sharpness: float, factors: int = 50, batch: int = 2, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(batch, factors, *shape, dtype=torch.float64, generator=generator)
    marginals = [
        torch.log_softmax(sharpness * torch.randn(batch, factors, states, dtype=torch.float64, generator=generator), -1)
        for states in shape
    ]
    return table, marginals


def marginal_gap(log_beliefs: Tensor, marginals: list[Tensor]) -> Tensor:
    worst = torch.zeros((), dtype=log_beliefs.dtype)
    for axis, marginal in enumerate(marginals):
        others = [2 + other for other in range(len(marginals)) if other != axis]
        worst = torch.maximum(worst, (log_beliefs.exp().sum(others) - marginal.exp()).abs().max())
    return worst


def interaction(log_beliefs: Tensor, table: Tensor) -> float:
    """How far log b - log psi is from a sum of one function an axis."""
    excess = log_beliefs - table
    axes = list(range(2, excess.dim()))
    additive = -(len(axes) - 1) * excess.mean(axes, keepdim=True)
    for axis in axes:
        additive = additive + excess.mean([other for other in axes if other != axis], keepdim=True)
    return float((excess - additive).abs().max())


def minimise_by_scipy(table: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """The same convex problem through a generic solver, over one table, in the coordinates its constraints leave."""
    rows, columns = table.shape

    def cells(free: Tensor) -> Tensor:
        block = free.reshape(rows - 1, columns - 1)
        last_column = q[:-1] - block.sum(1)
        upper = torch.cat([block, last_column.unsqueeze(1)], 1)
        return torch.cat([upper, (p - upper.sum(0)).unsqueeze(0)], 0)

    def value(free: Tensor) -> Tensor:
        beliefs = cells(free)
        return (beliefs * (beliefs.log() - table)).sum() if bool((beliefs > 0).all()) else torch.tensor(math.inf)

    point = torch.outer(q, p)[:-1, :-1].flatten().clone()
    fun = lambda x: float(value(torch.from_numpy(x)))  # noqa: E731
    jac = lambda x: torch.autograd.functional.jacobian(value, torch.from_numpy(x)).numpy()  # noqa: E731
    hess = lambda x: torch.autograd.functional.hessian(value, torch.from_numpy(x)).numpy()  # noqa: E731
    best = optimize.minimize(fun, point.numpy(), jac=jac, hess=hess, method="trust-exact", options={"gtol": 1e-11})
    # the minimiser stops at the last digits of the value; the root of its gradient has more
    return cells(torch.from_numpy(optimize.root(jac, best.x, jac=hess, tol=1e-14).x))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4, 4), (3, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_beliefs_minimise_the_convex_problem(shape: tuple[int, int], seed: int) -> None:
    table, (q, p) = random_case(shape, 1.5, 1.0, factors=1, batch=1, seed=seed)
    expected = minimise_by_scipy(table[0, 0], q[0, 0].exp(), p[0, 0].exp())
    found = pairwise_log_beliefs(table, q, p)[0, 0].exp()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (2, 5), (1, 3), (1, 1), (2, 2, 2), (3, 2, 4)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 25.0])
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_scaling_meets_the_marginals(shape: tuple[int, ...], scale: float, sharpness: float) -> None:
    table, marginals = random_case(shape, scale, sharpness)
    beliefs = factor_log_beliefs(table, marginals)
    assert marginal_gap(beliefs, marginals) < 1e-10
    assert interaction(beliefs, table) < 1e-7 * max(1.0, scale)


@pytest.mark.parametrize("coupling", [-200.0, -50.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 50.0, 200.0])
def test_binary_closed_form_at_the_extremes(coupling: float) -> None:
    """Every cell of every corner keeps its relative accuracy: the odds ratio and the marginals hold in logs."""
    tails = torch.tensor([1e-12, 1e-6, 0.3, 0.5, 0.7, 1 - 1e-6, 1 - 1e-12], dtype=torch.float64)
    pairs = torch.cartesian_prod(tails, tails).unsqueeze(0)
    q, p = (torch.stack([-column, column], -1) for column in pairs.unbind(-1))
    q, p = torch.log1p(q * torch.tensor([1.0, 0.0])), torch.log1p(p * torch.tensor([1.0, 0.0]))
    q[..., 1], p[..., 1] = pairs[..., 0].log(), pairs[..., 1].log()
    q, p = torch.log_softmax(q, -1), torch.log_softmax(p, -1)
    table = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    table[..., 1, 1] = coupling
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-3)):
        cells = binary_log_beliefs(table.to(dtype), q.to(dtype), p.to(dtype))
        assert torch.isfinite(cells).all()
        odds = cells[..., 0, 0] + cells[..., 1, 1] - cells[..., 0, 1] - cells[..., 1, 0]
        if dtype is torch.float64 or abs(coupling) <= 1:
            torch.testing.assert_close(odds, torch.full_like(odds, coupling), rtol=1e-3, atol=tolerance * 10)
        torch.testing.assert_close(torch.logsumexp(cells, -1), q.to(dtype), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(torch.logsumexp(cells, -2), p.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_stay_finite_at_the_extremes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = 50.0 * torch.sign(torch.randn(1, 40, *shape, dtype=dtype, generator=generator))
    tables[:, :8] = 0
    tables.requires_grad_()
    logits = [
        (27.0 * torch.randn(1, 40, states, dtype=dtype, generator=generator).clamp(-1, 1)).requires_grad_()
        for states in shape
    ]
    beliefs = factor_log_beliefs(tables, [torch.log_softmax(part, -1) for part in logits])
    assert torch.isfinite(beliefs).all()
    # the beliefs' own gradients (probabilities, so that the sum is of ordinary size)
    gradients = torch.autograd.grad((beliefs.exp() * torch.randn_like(beliefs)).sum(), [tables, *logits])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)

    graph = FactorGraph([shape[0]] * len(shape), [tuple(range(len(shape)))] * 40)
    nodes = [torch.stack([part[0, 0] for part in logits]).unsqueeze(0)]
    energy = bethe_free_energy(LogPotentials(graph, [tables]), nodes)
    gradients = torch.autograd.grad(energy.sum(), [tables, *logits])
    assert torch.isfinite(energy).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 2, 2), (2, 3, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_beliefs_gradients(shape: tuple[int, ...], shared: bool) -> None:
    table, marginals = random_case(shape, 1.0, 1.0, factors=2)
    if shared:
        table = table[:1, :1]
    inputs = [part.clone().requires_grad_() for part in (table, *marginals)]

    def beliefs(table: Tensor, *logits: Tensor) -> Tensor:
        return factor_log_beliefs(table, [torch.log_softmax(part, -1) for part in logits])

    assert torch.autograd.gradcheck(beliefs, inputs)


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 2, 2)])
def test_the_binary_and_the_general_gradient_agree(shape: tuple[int, ...]) -> None:
    """Two binary variables as a factor with a third, one-state axis: the same beliefs by the general way."""
    table, marginals = random_case(shape, 3.0, 2.0)
    table.requires_grad_()
    weights = torch.randn(table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    direct = factor_log_beliefs(table, marginals)
    extended = factor_log_beliefs(table.unsqueeze(-1), [*marginals, torch.zeros_like(marginals[0][..., :1])])
    torch.testing.assert_close(extended.squeeze(-1), direct, rtol=1e-9, atol=1e-8)
    (expected,) = torch.autograd.grad((direct * weights).sum(), table)
    (found,) = torch.autograd.grad((extended.squeeze(-1) * weights).sum(), table)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def random_logits(model: LogPotentials, batch: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, group.variables.numel(), group.states, dtype=model.dtype, generator=generator)
        for group in model.graph.variable_groups
    ]


@settings(deadline=None, max_examples=40)
@given(models(batch=2))
def test_free_energy_is_that_of_the_consistent_beliefs(model: LogPotentials) -> None:
    logits = random_logits(model)
    beliefs = consistent_beliefs(model, [torch.log_softmax(part, -1) for part in logits])
    assert beliefs.inconsistency().max() < 1e-10
    torch.testing.assert_close(bethe_free_energy(model, logits), free_energy(model, beliefs), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=10)
@given(models(max_variables=3, max_factors=3, batch=2), st.booleans())
def test_free_energy_gradients(model: LogPotentials, batched_nodes: bool) -> None:
    logits = [part.requires_grad_() for part in random_logits(model, 2 if batched_nodes else 1)]
    tables = [table.clone().requires_grad_() for table in model.tables]

    def energy(*inputs: Tensor) -> Tensor:
        count = len(tables)
        return bethe_free_energy(LogPotentials(model.graph, inputs[:count], model.node_terms), inputs[count:])

    assert torch.autograd.gradcheck(energy, [*tables, *logits])


@settings(deadline=None, max_examples=15)
@given(models(batch=3))
def test_batch_equals_members_one_by_one(model: LogPotentials) -> None:
    assume(model.batch_size == 3)
    logits = random_logits(model, 3)
    together = bethe_free_energy(model, logits)
    alone = [bethe_free_energy(model[member], [part[member : member + 1] for part in logits]) for member in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("states", [2, 4])
@pytest.mark.parametrize("shared", ["factors", "batch", "both"])
def test_shared_tables_equal_expanded_ones(states: int, shared: str) -> None:
    graph = FactorGraph.chain(6, states, unary=False)
    generator = torch.Generator().manual_seed(0)
    sizes = (1 if shared in ("batch", "both") else 3, 1 if shared in ("factors", "both") else 5)
    table = torch.randn(*sizes, states, states, dtype=torch.float64, generator=generator).requires_grad_()
    expanded = table.detach().expand(3, 5, -1, -1).clone().requires_grad_()
    logits = torch.randn(3, 6, states, dtype=torch.float64, generator=generator)
    for scaling in (Scaling(), Scaling(sweeps=40, newton_steps=0)):
        first = bethe_free_energy(LogPotentials(graph, [table]), [logits], scaling)
        second = bethe_free_energy(LogPotentials(graph, [expanded]), [logits], scaling)
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)
        (gradient,) = torch.autograd.grad(first.sum(), table)
        (expected,) = torch.autograd.grad(second.sum(), expanded)
        torch.testing.assert_close(gradient, expected.sum_to_size(table.shape), rtol=1e-9, atol=1e-9)


def test_a_shared_table_with_a_wide_range_falls_back_to_logarithms() -> None:
    table, marginals = random_case((3, 3), 1.0, 1.0)
    shared = table[:1, :1] * 400
    duals = solve_duals(shared, marginals, Scaling(sweeps=3, newton_steps=0))
    expected = solve_duals(shared.expand_as(table), marginals, Scaling(sweeps=3, newton_steps=0))
    for found, other in zip(duals, expected, strict=True):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("states", [2, 3])
def test_impossible_configurations(states: int) -> None:
    """Marginals of a belief that has zeros are feasible by construction; its scaling back is found."""
    generator = torch.Generator().manual_seed(0)
    for zeros in itertools.product([False, True], repeat=4):
        mask = torch.zeros(states, states, dtype=torch.bool)
        mask[:2, :2] = torch.tensor(zeros).reshape(2, 2)
        if bool(mask.all()):
            continue
        table = torch.randn(1, 5, states, states, dtype=torch.float64, generator=generator)
        table = table.masked_fill(mask, -math.inf)
        source = torch.log_softmax(table.flatten(2) + torch.randn(1, 5, states**2, generator=generator), -1)
        source = source.reshape_as(table).exp()
        marginals = [source.sum(3).log(), source.sum(2).log()]
        beliefs = factor_log_beliefs(table, marginals)
        assert not torch.isnan(beliefs).any()
        assert (beliefs.exp().masked_select(mask.expand_as(beliefs)) < 1e-7).all()
        assert marginal_gap(beliefs, marginals) < 1e-7
        graph = FactorGraph([states] * 10, [(axis, 5 + axis) for axis in range(5)])
        energy = bethe_free_energy(LogPotentials(graph, [table]), [torch.cat(marginals, 1)])
        assert torch.isfinite(energy).all()


def test_marginals_of_zero_and_one() -> None:
    table, _ = random_case((2, 2), 2.0, 1.0, factors=4, batch=1)
    certain = torch.tensor([[[-math.inf, 0.0], [0.0, -math.inf], [-math.inf, 0.0], [0.0, -math.inf]]]).double()
    other = torch.log_softmax(torch.tensor([[[0.3, 0.0], [0.1, 2.0], [0.0, -math.inf], [-math.inf, 0.0]]]), -1).double()
    for wide in (False, True):
        pad = torch.full((1, 4, 1), -math.inf, dtype=torch.float64)
        q, p = (torch.cat([certain, pad], -1), torch.cat([other, pad], -1)) if wide else (certain, other)
        psi = torch.nn.functional.pad(table, (0, 1, 0, 1)) if wide else table
        q.requires_grad_(), psi.requires_grad_()
        beliefs = pairwise_log_beliefs(psi, q, p)
        torch.testing.assert_close(beliefs, q.unsqueeze(-1) + p.unsqueeze(-2), rtol=1e-6, atol=1e-6)
        gradients = torch.autograd.grad(torch.where(beliefs > -50, beliefs, 0.0).sum(), [q, psi])
        assert not any(torch.isnan(gradient).any() for gradient in gradients)


def test_edge_cases() -> None:
    empty = LogPotentials(FactorGraph([], []), [])
    assert bethe_free_energy(empty, []).tolist() == [0.0]
    constant = LogPotentials.from_factors([2, 1], [((), 1.5), ((), 0.5)])
    logits = [torch.zeros(1, 1, 1), torch.zeros(1, 1, 2)]
    torch.testing.assert_close(bethe_free_energy(constant, logits), torch.tensor([-2.0 - math.log(2)]))
    assert consistent_beliefs(constant, [part.log_softmax(-1) for part in logits]).inconsistency() == 0
    with pytest.raises(ValueError, match="expected 2 node tensors"):
        bethe_free_energy(constant, logits[:1])
    with pytest.raises(ValueError, match="node tensor 1"):
        bethe_free_energy(constant, [logits[0], torch.zeros(1, 2, 2)])
    with pytest.raises(ValueError, match="at least 1 sweep"):
        Scaling(sweeps=0)
