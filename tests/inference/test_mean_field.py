import math

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from bethenet import FactorGraph, LogPotentials
from bethenet.errors import ImpossibleEvidenceError
from bethenet.free_energy import free_energy
from bethenet.inference.mean_field import MeanField
from bethenet.result import Status
from oracle import enumerate_model, models


def impossible_mass(model: LogPotentials, engine: MeanField, state: tuple[Tensor, ...]) -> Tensor:
    """Expected number of violated factors and variables."""
    beliefs = engine.beliefs(model, state)
    total = torch.zeros(beliefs.batch_size, dtype=torch.float64)
    for log_table, table in zip(beliefs.factor_log_tables, model.tables, strict=True):
        total = total + (log_table.exp() * (table == -math.inf)).flatten(1).sum(1)
    for log_table, term in zip(beliefs.node_log_tables, model.node_terms, strict=True):
        total = total + (log_table.exp() * (term == -math.inf)).flatten(1).sum(1)
    return total


@settings(deadline=None, max_examples=40)
@given(models(batch=2))
def test_bound_rises_at_every_step_and_stays_below_log_z(model: LogPotentials) -> None:
    engine = MeanField()
    state = engine.init(model)
    log_z = enumerate_model(model).log_z
    bound = -free_energy(model, engine.beliefs(model, state))
    for _ in range(8):
        state, _ = engine.step(model, state)
        new = -free_energy(model, engine.beliefs(model, state))
        assert (new >= bound - 1e-10).all()
        assert (new <= log_z + 1e-10).all()
        bound = new


@settings(deadline=None, max_examples=60)
@given(models(batch=2, zeros=True))
def test_with_impossible_configurations_violations_never_grow_and_then_the_bound_rises(model: LogPotentials) -> None:
    engine = MeanField()
    state = engine.init(model)
    log_z = enumerate_model(model).log_z
    mass, bound = impossible_mass(model, engine, state), torch.full((model.batch_size,), -math.inf)
    for _ in range(8):
        state, residual = engine.step(model, state)
        assert torch.isfinite(residual).all()
        assert not any(torch.isnan(table).any() for table in state)
        new_mass = impossible_mass(model, engine, state)
        new = -free_energy(model, engine.beliefs(model, state))
        assert (new_mass <= mass + 1e-10).all()
        assert (new >= bound - 1e-10).all()
        assert (new <= log_z + 1e-10).all()
        mass, bound = new_mass, new


@settings(deadline=None, max_examples=25)
@given(models(batch=2))
def test_fixed_point_is_stationary(model: LogPotentials) -> None:
    """At the end the bound's gradient in the logits vanishes, by autograd of the free energy of products."""
    engine = MeanField(tolerance=1e-10, max_iterations=5000)
    result = engine.run(model)
    assert result.status is Status.CONVERGED
    logits = [table.clone().requires_grad_() for table in result.state]
    energy = free_energy(model, engine.beliefs(model, tuple(part.log_softmax(-1) for part in logits)))
    for gradient in torch.autograd.grad(energy.sum(), logits):
        assert gradient.abs().max() < 1e-6
    assert result.beliefs.inconsistency().max() < 1e-12
    torch.testing.assert_close(-free_energy(model, result.beliefs), result.log_z)


def test_exact_without_interactions() -> None:
    graph = FactorGraph([2, 3, 1, 2], [(0,), (1,), (1,), (3,), ()])
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = MeanField().run(model)
    truth = enumerate_model(model)
    torch.testing.assert_close(result.log_z, truth.log_z)
    torch.testing.assert_close(result.beliefs.node_marginal(1), truth.marginal((1,)))
    assert result.method == "mean-field"


@settings(deadline=None, max_examples=15)
@given(models(batch=3, zeros=True))
def test_batch_equals_members_one_by_one(model: LogPotentials) -> None:
    assume(model.batch_size == 3)
    engine = MeanField(tolerance=1e-9)
    start = engine.init(model)
    together = engine.run(model, state=start)
    for member in range(3):
        alone = engine.run(model[member], state=tuple(table[member : member + 1] for table in start))
        torch.testing.assert_close(together.beliefs[member : member + 1].log_tables, alone.beliefs.log_tables)
        torch.testing.assert_close(together.log_z[member : member + 1], alone.log_z)


@pytest.mark.parametrize("batch", [1, 3])
def test_shared_tables_equal_expanded_ones(batch: int) -> None:
    graph = FactorGraph.grid(3, 4, 3, unary=False)
    table = torch.randn(1, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expanded = table.expand(batch, graph.num_factors, -1, -1)
    start = MeanField().init(LogPotentials(graph, [expanded]))
    first = MeanField().run(LogPotentials(graph, [table]), state=tuple(part[:1] for part in start))
    second = MeanField().run(LogPotentials(graph, [expanded]), state=start)
    torch.testing.assert_close(first.log_z, second.log_z[:1])


def test_restarts_choose_the_best_bound_of_each_member() -> None:
    graph = FactorGraph.grid(7, 7, unary=False)
    model = LogPotentials.random(
        graph, 3.0, batch_size=5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    result = MeanField(restarts=8).run(model)
    single = MeanField().run(model)
    assert result.log_z.shape == (5,)
    assert len(result.member_status) == 5
    assert (result.log_z > single.log_z + 0.1).any()
    engine = MeanField()
    index = torch.arange(5).repeat_interleave(8)
    starts = MeanField(restarts=8).init(model[index])
    everything = engine.run(model[index], state=starts).log_z.reshape(5, 8)
    torch.testing.assert_close(result.log_z, everything.amax(1))
    # a model without a batch axis has restarts as well
    alone = MeanField(restarts=8).run(model[2])
    assert alone.log_z.shape == (1,)
    assert alone.log_z >= single.log_z[2] - 1e-9
    assert MeanField(restarts=3).run(LogPotentials(FactorGraph([], [()]), [torch.ones(1, 1)])).log_z.tolist() == [1.0]


def test_gradient_of_the_bound_is_the_beliefs() -> None:
    graph = FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0, 1, 2)])
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for restarts in (1, 4):
        tables = [table.clone().requires_grad_() for table in model.tables]
        result = MeanField(restarts=restarts).run(LogPotentials(graph, tables))
        gradients = torch.autograd.grad(result.log_z.sum(), tables)
        torch.testing.assert_close(gradients, result.beliefs.factor_marginals)


def test_hard_constraints() -> None:
    equal = torch.eye(3, dtype=torch.float64).log()
    chain = LogPotentials.from_factors(
        [3] * 4, [((i, i + 1), equal) for i in range(3)] + [((0,), [0.0, 2.0, 1.0])], dtype=torch.float64
    )
    result = MeanField(restarts=16).run(chain)
    assert result.log_z.item() == pytest.approx(2.0)
    assert result.beliefs.node_marginals[0, :, 1].tolist() == [1.0] * 4
    clamped = chain.clamp({2: 0})
    result = MeanField().run(clamped)
    assert result.log_z.item() == pytest.approx(0.0)
    with pytest.raises(ImpossibleEvidenceError, match="variable 0 has no possible state"):
        MeanField().run(LogPotentials.from_factors([2], [((0,), [0.0, -math.inf])]).clamp({0: 1}))


def test_single_precision_warm_start_and_options() -> None:
    model = LogPotentials.random(FactorGraph.grid(4, 4), batch_size=2, generator=torch.Generator().manual_seed(0))
    result = MeanField(max_iterations=500, tolerance=1e-5).run(model)
    assert result.log_z.dtype == torch.float32
    assert result.status is Status.CONVERGED
    again = MeanField(tolerance=1e-5).run(model, state=result.state)
    assert int(again.iterations.max()) == 1
    double = MeanField(tolerance=1e-5, max_iterations=500).run(
        model.to(dtype=torch.float64), state=tuple(table.double() for table in result.state)
    )
    torch.testing.assert_close(double.log_z.float(), result.log_z, rtol=1e-4, atol=1e-4)
    other = MeanField().run(model, generator=torch.Generator().manual_seed(3))
    assert other.log_z.shape == (2,)
    with pytest.raises(ValueError, match="restarts: expected at least 1"):
        MeanField(restarts=0)
    with pytest.raises(ValueError, match="noise: expected"):
        MeanField(noise=-1.0)
