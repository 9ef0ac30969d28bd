import math

import pytest
import torch
from hypothesis import assume, given, settings

from bethenet import FactorGraph, LogPotentials
from bethenet.errors import ImpossibleEvidenceError
from bethenet.free_energy import free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.coupling import bethe_free_energy
from bethenet.inference.descent import Descent
from bethenet.inference.engine import map_tensors
from bethenet.inference.exact import Exact
from bethenet.inference.mean_field import MeanField
from bethenet.inference.minimisers import Adam, LimitedMemory
from bethenet.inference.registry import make_engine
from bethenet.inference.scaling import Scaling
from bethenet.inference.spanning_trees import forest_appearance
from bethenet.inference.trw import TreeReweighted
from bethenet.regions import RegionGraph
from bethenet.result import Status
from oracle import enumerate_model, models


def ising_grid(side: int, coupling: float, batch: int, seed: int = 0) -> LogPotentials:
    graph = FactorGraph.grid(side, side)
    generator = torch.Generator().manual_seed(seed)
    field = torch.randn(batch, graph.num_variables, 1, dtype=torch.float64, generator=generator)
    strength = torch.randn(batch, len(graph.factor_groups[1]), 1, 1, dtype=torch.float64, generator=generator)
    spin = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return LogPotentials(graph, [field * spin, coupling * strength * torch.outer(spin, spin)])


TREE = FactorGraph([2, 3, 2, 3, 1, 2], [(0,), (0, 1), (1, 2), (3, 1), (3, 4), (2,), ()])


@pytest.mark.parametrize("minimiser", [LimitedMemory(), Adam(learning_rate=0.05)])
def test_exact_on_trees(minimiser: LimitedMemory | Adam) -> None:
    model = LogPotentials.random(TREE, batch_size=3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = Descent(minimiser=minimiser, first=None, max_iterations=3000, tolerance=1e-5).run(model)
    truth = enumerate_model(model)
    assert result.status is Status.CONVERGED
    assert result.method == "descent"
    torch.testing.assert_close(result.log_z, truth.log_z, rtol=1e-8, atol=1e-8)
    for factor, scope in enumerate(TREE.scopes()):
        torch.testing.assert_close(result.beliefs.factor_marginal(factor), truth.marginal(scope), rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=15)
@given(models(batch=2))
def test_ends_at_a_stationary_point_with_consistent_beliefs(model: LogPotentials) -> None:
    result = Descent(first=None, max_iterations=2000).run(model)
    assert result.status is Status.CONVERGED
    assert result.beliefs.inconsistency().max() < 1e-9
    torch.testing.assert_close(result.log_z, -free_energy(model, result.beliefs))
    logits = [table.clone().requires_grad_() for table in result.beliefs.node_log_tables]
    energy = bethe_free_energy(model, logits)
    torch.testing.assert_close(energy, -result.log_z, rtol=1e-8, atol=1e-8)
    for gradient in torch.autograd.grad(energy.sum(), logits):
        assert gradient.abs().max() <= 1.01e-6


@settings(deadline=None, max_examples=15)
@given(models(batch=2))
def test_fixed_points_of_belief_propagation_have_no_gradient(model: LogPotentials) -> None:
    result = BeliefPropagation(max_iterations=3000, tolerance=1e-10, damping=0.3).run(model)
    assume(result.status is Status.CONVERGED)
    logits = [table.clone().requires_grad_() for table in result.beliefs.node_log_tables]
    energy = bethe_free_energy(model, logits)
    torch.testing.assert_close(energy, -result.log_z, rtol=1e-7, atol=1e-7)
    for gradient in torch.autograd.grad(energy.sum(), logits):
        assert gradient.abs().max() < 1e-7
    start = Descent().state_from_beliefs(model, result.beliefs)
    again = Descent(first=None).run(model, state=start)
    assert int(again.iterations.max()) == 1


def test_free_energy_falls_at_every_step_with_a_line_search() -> None:
    model = ising_grid(5, 3.0, batch=4)
    engine = Descent(first=None)
    state = engine.init(model)
    value = state.evaluation.value
    for _ in range(40):
        state, residual = engine.step(model, state)
        assert (state.evaluation.value <= value + 1e-9).all()
        value = state.evaluation.value
        torch.testing.assert_close(value, bethe_free_energy(model, [state.point.reshape(4, 25, 2)]))
        assert torch.isfinite(residual).all()


def test_strong_couplings_end_no_higher_than_belief_propagation() -> None:
    model = ising_grid(6, 3.0, batch=60)
    propagated = BeliefPropagation(max_iterations=1000, tolerance=1e-8, damping=0.5).run(model)
    converged = torch.nonzero(propagated.converged).flatten()
    assert len(converged) >= 10
    result = Descent(restarts=3, max_iterations=250).run(model[converged])
    gain = propagated.log_z[converged] - result.log_z
    assert (gain <= 1e-6).double().mean() >= 0.95


def test_least_free_energy_is_accurate_at_moderate_couplings() -> None:
    model = ising_grid(4, 1.0, batch=20)
    truth = enumerate_model(model)
    result = Descent(first=None).run(model)
    assert result.status is Status.CONVERGED
    exact = torch.cat([truth.marginal((variable,)) for variable in range(16)], 1)[:, 1::2]
    error = (result.beliefs.node_marginals[..., 1] - exact).abs().mean()
    mean_field = (MeanField().run(model).beliefs.node_marginals[..., 1] - exact).abs().mean()
    assert error < 0.03
    assert error < 0.3 * mean_field


def test_batch_equals_members_one_by_one() -> None:
    graph = FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 3), (3,)])
    model = LogPotentials.random(graph, batch_size=4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    engine = Descent(first=None)
    start = engine.init(model)
    together = engine.run(model, state=start)
    for member in range(4):
        alone = engine.run(model[member], state=map_tensors(lambda tensor, m=member: tensor[m : m + 1], start))
        torch.testing.assert_close(together.log_z[member : member + 1], alone.log_z, rtol=1e-8, atol=1e-8)
        for first, second in zip(
            together.beliefs[member : member + 1].log_tables, alone.beliefs.log_tables, strict=True
        ):
            torch.testing.assert_close(first.exp(), second.exp(), rtol=0, atol=1e-4)


def test_shared_tables_equal_expanded_ones() -> None:
    graph = FactorGraph.grid(3, 3, 3, unary=False)
    table = torch.randn(1, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shared = Descent(first=None).run(LogPotentials(graph, [table]))
    expanded = Descent(first=None).run(LogPotentials(graph, [table.expand(-1, 12, -1, -1)]))
    torch.testing.assert_close(shared.log_z, expanded.log_z)


@pytest.mark.parametrize("options", [{}, {"restarts": 3}, {"inverse_temperatures": (0.3, 0.6)}, {"first": MeanField()}])
def test_gradient_of_log_z_is_the_beliefs_from_every_start(options: dict) -> None:
    graph = FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0, 2), (0,)])
    model = LogPotentials.random(graph, 2.0, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = [table.clone().requires_grad_() for table in model.tables]
    result = Descent(**options).run(LogPotentials(graph, tables))
    assert result.status is Status.CONVERGED
    gradients = torch.autograd.grad(result.log_z.sum(), tables)
    torch.testing.assert_close(gradients, result.beliefs.factor_marginals)


def test_restarts_choose_the_least_free_energy() -> None:
    model = ising_grid(4, 2.0, batch=3)
    engine = Descent(restarts=4, first=None, max_iterations=100)
    chosen = engine.run(model)
    index = torch.arange(3).repeat_interleave(4)
    single = Descent(first=None, max_iterations=100)
    everything = single.run(model[index], state=engine.init(model[index])).log_z.reshape(3, 4)
    torch.testing.assert_close(chosen.log_z, everything.amax(1))
    assert chosen.residual.shape == (3,)
    assert chosen.state.point.shape[0] == 3
    warm = engine.run(model, state=chosen.state)
    assert (warm.log_z >= chosen.log_z - 1e-9).all()


@pytest.mark.parametrize("field", [20.0, 100.0])
def test_starts_where_local_evidence_is_one_sided_and_wrong(field: float) -> None:
    """Two variables that agree follow the one with the stronger field, however sure the other was."""
    agree = torch.eye(2, dtype=torch.float64) * 4 * field
    model = LogPotentials.from_factors(
        [2, 2], [((0,), [0.0, field]), ((1,), [1.5 * field, 0.0]), ((0, 1), agree)], dtype=torch.float64
    )
    truth = enumerate_model(model)
    result = Descent(first=None, max_iterations=300).run(model)
    torch.testing.assert_close(result.log_z, truth.log_z, rtol=0, atol=1e-4)


def test_near_zero_and_one_nothing_has_converged_that_would_still_move() -> None:
    """In the logits the free energy is flat there; the residual must not be small for that alone."""
    model = LogPotentials.from_factors([2], [((0,), [0.0, 3.0])], dtype=torch.float64)
    engine = Descent(first=None, max_iterations=1)
    sure = engine.init(model)
    for logit in (-20.0, -60.0):
        point = torch.tensor([[0.0, logit]], dtype=torch.float64)
        state = engine.minimiser.init(point, sure.evaluation._replace(gradient=torch.zeros_like(point)))
        _, residual = engine.step(model, engine.init(model, state))
        assert float(residual) > 1e-6


def test_beliefs_that_miss_their_marginals_have_not_converged() -> None:
    model = LogPotentials.random(
        FactorGraph.grid(2, 2, 3), 3.0, batch_size=4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    hasty = Descent(first=None, scaling=Scaling(sweeps=1, newton_steps=0), max_iterations=300).run(model)
    assert float(hasty.beliefs.inconsistency().max()) > 1e-3
    assert bool((hasty.residual >= 0.5 * hasty.beliefs.inconsistency()).all())


@pytest.mark.parametrize("states", [2, 3])
def test_other_free_energies_of_factors_and_variables(states: int) -> None:
    graph = FactorGraph.grid(3, 3, states)
    model = LogPotentials.random(
        graph, batch_size=2, dtype=torch.float64, generator=torch.Generator().manual_seed(states)
    ).clamp({4: [-1, 0]})
    appearance = forest_appearance(graph)
    found = Descent(regions=RegionGraph.tree_reweighted(graph, appearance)).run(model)
    bound = TreeReweighted(appearance=appearance, tolerance=1e-9).run(model)
    assert (bound.log_z > Exact().log_z(model) + 1e-3).all()
    torch.testing.assert_close(found.log_z, bound.log_z, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.beliefs.node_marginals, bound.beliefs.node_marginals, atol=1e-4, rtol=0)
    assert found.beliefs.inconsistency().max() < 1e-9
    for regions, why in [
        (RegionGraph.kikuchi(graph), "node marginals do not determine the beliefs of regions other than factors"),
        (RegionGraph.mean_field(graph), "expected positive counting numbers of the factors"),
        (RegionGraph.bethe(FactorGraph.grid(3, 3, states)), "expected those of the potentials' own graph"),
    ]:
        with pytest.raises(ValueError, match=why):
            Descent(regions=regions).run(model)


def test_persistent_descent_follows_moving_potentials() -> None:
    """A few steps a call, from the state before: the end is where one long run ends."""
    model = ising_grid(4, 0.8, batch=2)
    engine = Descent(first=None, max_iterations=4)
    state = None
    for stage in range(30):
        scale = min(1.0, 0.1 * (stage + 1))
        moved = LogPotentials(model.graph, [scale * table for table in model.tables])
        result = engine.run(moved, state=state)
        state = result.state
    expected = Descent(first=None, max_iterations=1000).run(model)
    torch.testing.assert_close(result.log_z, expected.log_z, rtol=1e-6, atol=1e-6)
    shared = engine.init(model[0])
    assert engine.run(model, state=shared).log_z.shape == (2,)


@settings(deadline=None, max_examples=15)
@given(models(max_variables=4, max_factors=4, zeros=True))
def test_impossible_configurations(model: LogPotentials) -> None:
    result = Descent(max_iterations=300).run(model)
    assert not any(torch.isnan(table).any() for table in result.beliefs.log_tables)
    for log_table, table in zip(result.beliefs.factor_log_tables, model.tables, strict=True):
        assert (log_table.exp() * (table == -math.inf)).sum() == 0
    assert result.beliefs.inconsistency().max() < 1e-3
    assert torch.isfinite(result.log_z).all()


def test_hard_constraints_on_a_tree_are_exact() -> None:
    equal = torch.eye(2, dtype=torch.float64).log()
    exclusive = torch.tensor([[0.0, 0.3], [-0.2, -math.inf]], dtype=torch.float64)
    model = LogPotentials.from_factors(
        [2] * 4, [((0, 1), equal), ((1, 2), exclusive), ((2, 3), equal), ((0,), [0.0, 0.7])], dtype=torch.float64
    )
    truth = enumerate_model(model)
    result = Descent(max_iterations=300).run(model)
    torch.testing.assert_close(result.log_z, truth.log_z, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.beliefs.node_marginal(3), truth.marginal((3,)), rtol=1e-3, atol=1e-3)
    clamped = model.clamp({3: 1})
    result = Descent(max_iterations=300).run(clamped)
    torch.testing.assert_close(result.log_z, enumerate_model(clamped).log_z, rtol=1e-6, atol=1e-6)
    assert result.beliefs.node_marginal(3).tolist() == [[0.0, 1.0]]
    contradiction = model.clamp({0: 1, 3: 1})  # along the chain, not at any one variable
    assert Descent(max_iterations=300).run(contradiction).log_z.item() == -math.inf
    with pytest.raises(ImpossibleEvidenceError):
        Descent().run(LogPotentials.from_factors([2], [((0,), [0.0, -math.inf])]).clamp({0: 1}))


def test_edge_cases() -> None:
    empty = Descent().run(LogPotentials(FactorGraph([], []), []))
    assert empty.log_z.tolist() == [0.0]
    assert empty.status is Status.CONVERGED
    graph = FactorGraph([2, 1, 3], [(0,), (0,), (), ()])
    model = LogPotentials.random(graph, batch_size=2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for restarts in (1, 3):
        torch.testing.assert_close(Descent(restarts=restarts).run(model).log_z, enumerate_model(model).log_z)
    model = ising_grid(3, 1.0, batch=1).to(dtype=torch.float32)
    result = Descent(first=None, tolerance=1e-3).run(model)
    assert result.status is Status.CONVERGED
    assert result.log_z.dtype == torch.float32
    double = Descent(first=None).run(model.to(dtype=torch.float64))
    torch.testing.assert_close(result.log_z.double(), double.log_z, rtol=1e-4, atol=1e-4)
    # an honest status: nothing has converged in two iterations
    short = Descent(first=None, max_iterations=2).run(model)
    assert short.status is not Status.CONVERGED
    assert (short.residual > 1e-3).all()
    assert isinstance(make_engine("descent", {"restarts": 2}), Descent)


@pytest.mark.parametrize(
    "options",
    [{"restarts": 0}, {"noise": -1.0}, {"inverse_temperatures": (0.0,)}, {"annealing_iterations": -1}],
)
def test_wrong_options(options: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        Descent(**options)


def test_wrong_minimisers() -> None:
    with pytest.raises(ValueError, match="memory of at least 1"):
        LimitedMemory(memory=0)
    with pytest.raises(ValueError, match="positive learning rate"):
        Adam(learning_rate=0.0)
