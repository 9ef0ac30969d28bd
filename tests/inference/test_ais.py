import math

import pytest
import torch
from hypothesis import given, settings

from bethenet import FactorGraph, ImpossibleEvidenceError, LogPotentials
from bethenet.inference.ais import (
    GibbsPath,
    annealed_importance_sampling,
    base_rates,
    linear_schedule,
    reverse_annealed_importance_sampling,
    sigmoid_schedule,
)
from bethenet.inference.sampling import GibbsSampler
from bethenet.models.rbm import RBM
from bethenet.models.rbm_chains import RBMPath
from oracle import enumerate_model, models


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def machine(visible: int, hidden: int, seed: int, scale: float = 0.7, states: int = 2) -> RBM:
    model, random = RBM(visible, hidden, states), generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=random))
    return model


def test_twenty_machines_of_twelve_hidden_units_within_three_standard_errors() -> None:
    deviations = []
    for seed in range(20):
        model = machine(20, 12, seed)
        exact = float(model.double().log_z().detach())
        model.float()
        base = model.base_log_odds(model.sample_exactly(500, generator=generator(seed)))
        estimate = annealed_importance_sampling(RBMPath(model, base), schedule=400, generator=generator(100 + seed))
        deviations.append((float(estimate.log_z) - exact) / float(estimate.standard_error))
        assert 0 < float(estimate.standard_error) < 0.1
        assert float(estimate.effective_sample_size) > 100
    assert max(abs(d) for d in deviations) < 3
    # an error bar that is too wide is wrong too
    assert 0.4 < math.sqrt(sum(d * d for d in deviations) / 20) < 1.7


def test_backwards_from_exact_samples_bounds_from_above() -> None:
    inside = 0
    for seed in range(10):
        model = machine(20, 12, seed)
        exact = float(model.double().log_z().detach())
        path = RBMPath(model.float())
        samples = model.encode(model.sample_exactly(256, generator=generator(seed)))
        above = reverse_annealed_importance_sampling(path, samples, schedule=400, generator=generator(50 + seed))
        assert above.direction == "backward"
        assert abs(float(above.log_z) - exact) < 3.5 * float(above.standard_error)
        inside += bool(above.interval[0] <= exact <= above.interval[1])
    assert inside >= 7


def test_crude_annealing_errs_to_the_right_side() -> None:
    model = machine(20, 12, 3, scale=1.5)
    exact = float(model.double().log_z().detach())
    path, random = RBMPath(model.float()), generator(1)
    forward = [
        float(annealed_importance_sampling(path, chains=1, schedule=8, generator=random).log_z) for _ in range(80)
    ]
    samples = model.encode(model.sample_exactly(80, generator=random))
    backward = [
        float(reverse_annealed_importance_sampling(path, sample, schedule=8, generator=random).log_z)
        for sample in samples.split(1)
    ]
    assert sum(forward) / 80 < exact - 0.5
    assert sum(backward) / 80 > exact + 0.5


def test_visible_units_of_three_states() -> None:
    model = machine(6, 5, 0, states=3)
    exact = float(model.log_z().detach())
    estimate = annealed_importance_sampling(RBMPath(model), schedule=300, generator=generator(2))
    assert abs(float(estimate.log_z) - exact) < 3.5 * float(estimate.standard_error)
    samples = model.encode(model.sample_exactly(256, generator=generator(3)))
    above = reverse_annealed_importance_sampling(RBMPath(model), samples, schedule=300, generator=generator(4))
    assert abs(float(above.log_z) - exact) < 3.5 * float(above.standard_error)


@settings(max_examples=15, deadline=None)
@given(models(batch=2, zeros=True))
def test_any_factor_graph(potentials: LogPotentials) -> None:
    truth = enumerate_model(potentials)
    estimate = annealed_importance_sampling(GibbsPath(potentials), chains=400, schedule=60, generator=generator(1))
    assert estimate.log_z.shape == (potentials.batch_size,)
    assert estimate.log_weights.shape == (400, potentials.batch_size)
    torch.testing.assert_close(estimate.log_z, truth.log_z, atol=0.25, rtol=0)


def test_grid_by_gibbs_in_both_directions_with_evidence_and_base() -> None:
    graph = FactorGraph.grid(3, 4)
    potentials = LogPotentials.random(graph, dtype=torch.float64, generator=generator(5))
    potentials = potentials.clamp({0: [0, 1, -1]})
    truth = enumerate_model(potentials)
    sampler, random = GibbsSampler(potentials), generator(6)
    samples = sampler.sweep(sampler.start(512, generator=random), 200, generator=random)
    path = GibbsPath(potentials, base_rates(graph, samples[:, 2], pseudo_count=1.0))
    for estimate in (
        annealed_importance_sampling(path, chains=512, schedule=sigmoid_schedule(200), generator=random),
        reverse_annealed_importance_sampling(path, samples, schedule=200, generator=random),
    ):
        deviations = (estimate.log_z - truth.log_z) / estimate.standard_error
        assert float(deviations.abs().max()) < 3.5
        assert float(estimate.standard_error.max()) < 0.05
        assert estimate.interval.shape == (3, 2)
        assert bool((estimate.interval[:, 0] < estimate.log_z).all())
        assert bool((estimate.interval[:, 1] > estimate.log_z).all())
        width = (estimate.interval[:, 1] - estimate.interval[:, 0]) / estimate.standard_error
        assert bool(((width > 3) & (width < 5)).all())


def test_hard_constraints_are_crossed_and_then_hold() -> None:
    # an even number of ones: single flips between possible states do not exist
    parity = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    graph = FactorGraph([2] * 4, [(0, 1), (1, 2), (2, 3), (0,)])
    potentials = LogPotentials.from_tables(graph, [parity, parity, parity, torch.tensor([0.3, -0.4])])
    estimate = annealed_importance_sampling(GibbsPath(potentials), chains=2000, schedule=100, generator=generator(1))
    exact = math.log(math.exp(0.3) + math.exp(-0.4))
    assert abs(float(estimate.log_z[0]) - exact) < 4 * float(estimate.standard_error[0])


def test_models_without_possible_states_have_log_z_minus_infinity() -> None:
    nothing = LogPotentials.from_factors([2, 2], [((0, 1), [[-math.inf] * 2] * 2)])
    estimate = annealed_importance_sampling(GibbsPath(nothing), chains=5, schedule=3, generator=generator())
    assert float(estimate.log_z[0]) == -math.inf
    assert float(estimate.standard_error[0]) == math.inf
    assert float(estimate.effective_sample_size[0]) == 0
    assert not bool(torch.isnan(estimate.interval).any())
    never = LogPotentials.from_factors([2], []).clamp({0: torch.zeros(2)})
    with pytest.raises(ImpossibleEvidenceError):
        annealed_importance_sampling(GibbsPath(never), chains=5, schedule=3)


def test_independent_variables_are_exact_and_a_single_chain_has_no_error_bar() -> None:
    potentials = LogPotentials.random(FactorGraph([2, 3], []), dtype=torch.float64)
    estimate = annealed_importance_sampling(GibbsPath(potentials), chains=1, schedule=2, generator=generator())
    assert abs(float(estimate.log_z[0]) - math.log(6)) < 1e-12
    assert float(estimate.standard_error[0]) == math.inf


def test_one_generator_one_estimate() -> None:
    path = RBMPath(machine(5, 4, 0))
    one, two = (annealed_importance_sampling(path, chains=9, schedule=20, generator=generator(3)) for _ in range(2))
    assert torch.equal(one.log_weights, two.log_weights)
    assert torch.equal(one.interval, two.interval)


def test_schedules() -> None:
    for schedule in (linear_schedule(11), sigmoid_schedule(11)):
        assert schedule[0] == 0
        assert schedule[-1] == 1
        assert bool((schedule.diff() > 0).all())
    steps = sigmoid_schedule(11).diff()
    assert steps[0] < steps[5]


@pytest.mark.parametrize("schedule", [1, [0.0], [0.0, 0.5], [0.1, 1.0], [0.0, 0.7, 0.6, 1.0], [0.0, 0.5, 0.5, 1.0]])
def test_wrong_schedules_are_named(schedule: int | list[float]) -> None:
    with pytest.raises(ValueError, match=r"schedule|temperatures"):
        annealed_importance_sampling(RBMPath(RBM(2, 2)), schedule=schedule)


def test_wrong_options_are_named() -> None:
    path = RBMPath(RBM(2, 2))
    with pytest.raises(ValueError, match="chains"):
        annealed_importance_sampling(path, chains=0)
    with pytest.raises(ValueError, match="confidence"):
        annealed_importance_sampling(path, chains=2, schedule=2, confidence=1.0)
    with pytest.raises(ValueError, match="at least one sample"):
        reverse_annealed_importance_sampling(path, torch.zeros(0, 2), schedule=2)
    with pytest.raises(ValueError, match="base"):
        RBMPath(RBM(2, 2), torch.zeros(3))
    with pytest.raises(ValueError, match="steepness"):
        sigmoid_schedule(5, 0.0)
    graph = FactorGraph([2, 2], [])
    with pytest.raises(ValueError, match="shape"):
        base_rates(graph, torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="pseudo_count"):
        base_rates(graph, torch.zeros(3, 2, dtype=torch.long), 0.0)


def test_base_rates_ignore_what_was_not_observed() -> None:
    graph = FactorGraph([2, 3], [])
    rates = base_rates(graph, torch.tensor([[0, 2], [1, -1], [1, 2], [1, 0]]), pseudo_count=1.0)
    torch.testing.assert_close(rates[0].exp(), torch.tensor([[[2 / 6, 4 / 6]]]))
    torch.testing.assert_close(rates[1].exp(), torch.tensor([[[2 / 6, 1 / 6, 3 / 6]]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    random = torch.Generator("cuda").manual_seed(0)
    model = machine(20, 12, 0).to("cuda")
    exact = model.double().log_z().item()
    model.float()
    samples = model.sample_exactly(256, generator=random)
    path = RBMPath(model, model.base_log_odds(samples))
    grid = LogPotentials.random(FactorGraph.grid(3, 3), generator=generator(1))
    by_gibbs = GibbsPath(grid.to("cuda"))
    for estimate, truth in (
        (annealed_importance_sampling(path, schedule=400, generator=random), exact),
        (reverse_annealed_importance_sampling(path, model.encode(samples), schedule=400, generator=random), exact),
        (annealed_importance_sampling(by_gibbs, schedule=200, generator=random), enumerate_model(grid).log_z.item()),
    ):
        assert abs(estimate.log_z.item() - truth) < 4 * estimate.standard_error.item()
