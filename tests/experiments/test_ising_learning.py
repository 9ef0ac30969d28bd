import itertools
import json
from dataclasses import replace

import pytest
import torch

from bethenet.data.ising import ising_data
from bethenet.experiments.catalogue import experiment
from bethenet.experiments.ising_learning import (
    CRITERIA,
    METHODS,
    RECIPES,
    Learner,
    Recipe,
    Selection,
    cells,
    learn,
    measure,
    moments,
    partition,
    pseudo_nll,
)
from bethenet.experiments.ising_learning_tables import PAPER, TABLE_2, write_table
from bethenet.experiments.runner import Settings, run_experiment
from bethenet.graph import FactorGraph
from bethenet.inference.exact import Exact
from bethenet.learning import negative_log_likelihood
from bethenet.models.ising import IsingModel


def two_models(size=3):
    return IsingModel.random(FactorGraph.grid(size, size), models=2, generator=torch.Generator().manual_seed(0))


def test_moments_score_like_the_samples_they_are_of():
    data = ising_data(3, 3, samples=40, models=2, seed=1).train
    model = two_models()
    learner = Learner(model.graph, model.couplings, model.fields)
    torch.testing.assert_close(learner.score(moments(model.graph, data)), model.score(data).mean(0, keepdim=True))


def test_likelihood_by_moments_is_that_of_the_samples():
    data = ising_data(3, 3, samples=40, models=2, seed=1).train
    model = two_models()
    learner = Learner(model.graph, model.couplings, model.fields)
    torch.testing.assert_close(
        negative_log_likelihood(learner, moments(model.graph, data), Exact()),
        negative_log_likelihood(model, data, Exact()),
    )


def test_pseudo_nll_is_the_models_own():
    data = ising_data(3, 4, samples=30, models=2, seed=2).train
    model = IsingModel.random(FactorGraph.grid(3, 4), models=2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(pseudo_nll(model, data), -model.pseudo_log_likelihood(data).mean(0))


def test_exact_learning_finds_the_penalised_optimum():
    """At the optimum the models' moments are the samples' minus strength times parameters."""
    data = ising_data(2, 3, samples=500, models=2, seed=3)
    start = IsingModel.random(FactorGraph.grid(2, 3), models=2, generator=torch.Generator().manual_seed(4))
    recipe = Recipe(steps=300, learning_rate=0.2, averaging=0.0, penalties=(0.01, 0.1))
    selection, _ = learn("exact", data, start, recipe)
    learner = selection.model
    log_z = Exact().log_z(learner.log_potentials())
    gradients = torch.autograd.grad(log_z.sum(), [learner.fields, learner.couplings])
    strengths = torch.tensor([0.01, 0.01, 0.1, 0.1]).unsqueeze(1)
    parameters = torch.cat([learner.fields, learner.couplings], dim=1)
    wanted = moments(start.graph, data.train)[0].repeat(2, 1) - strengths * parameters
    torch.testing.assert_close(torch.cat(gradients, dim=1), wanted, atol=2e-3, rtol=0)


def test_members_of_different_strengths_do_not_touch_each_other():
    data = ising_data(3, 3, samples=100, models=2, seed=5)
    recipe = Recipe(steps=12, penalties=(0.0, 0.5))
    both, _ = learn("bp", data, two_models(), recipe)
    weak, _ = learn("bp", data, two_models(), replace(recipe, penalties=(0.0,)))
    torch.testing.assert_close(both.model.couplings[:2], weak.model.couplings)
    assert both.model.couplings[2:].norm() < weak.model.couplings.norm()


def test_fields_learn_at_their_own_pace():
    """Adam's first step is its learning rate, whatever the gradient."""
    data = ising_data(3, 3, samples=60, models=2, seed=6)
    recipe = Recipe(steps=1, learning_rate=0.2, averaging=0.0, penalties=(0.0,), field_pace=3.0)
    start = two_models()
    selection, _ = learn("exact", data, start, recipe)
    moved = (selection.model.couplings - start.couplings, selection.model.fields - start.fields)
    for move, size in zip(moved, (0.2, 0.6), strict=True):
        torch.testing.assert_close(move.abs(), torch.full_like(move, size), rtol=1e-3, atol=0)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_selection_keeps_the_best_evaluation_of_every_model(criterion):
    data = ising_data(3, 3, samples=60, models=2, seed=6)
    generator = torch.Generator().manual_seed(7)
    learner = Learner(FactorGraph.grid(3, 3), torch.zeros(4, 12), torch.zeros(4, 9))
    method = partition("exact", learner.graph, 4)

    def estimate():
        found = method.estimate(learner.log_potentials(), None, clamped=False)
        return found.log_z, found

    selection = Selection(learner, estimate, data.validation.repeat(1, 2, 1))
    values, weights = [selection.best[criterion][criterion]], [learner.couplings.detach().clone()]
    for _ in range(4):
        with torch.no_grad():
            learner.couplings.copy_(0.3 * torch.randn(4, 12, generator=generator))
        selection()
        values.append(
            pseudo_nll(learner, selection.validation)
            if criterion == "pseudo_nll"
            else negative_log_likelihood(learner, selection.moments, Exact())
        )
        weights.append(learner.couplings.detach().clone())
    table = torch.stack(values).detach().reshape(5, 2, 2)  # evaluations, strengths, models
    chosen = selection.by_model(criterion, 2)
    for model in range(2):
        step, strength = max(itertools.product(range(5), range(2)), key=lambda at: -table[at[0], at[1], model])
        assert int(chosen["evaluation"][model]) == step
        torch.testing.assert_close(chosen["couplings"][model], weights[step][2 * strength + model])


def test_selection_never_sees_the_test_samples():
    data = ising_data(3, 3, samples=50, models=2, seed=8)
    blind = replace(data, test=torch.zeros_like(data.test))
    recipe = Recipe(steps=5)
    seen, unseen = (learn("bp", part, two_models(), recipe)[0].by_model("nll", 2) for part in (data, blind))
    torch.testing.assert_close(seen["couplings"], unseen["couplings"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method):
    recipe = replace(RECIPES[method], steps=25, warmup=0)
    figures = measure(method, 3, 2, 100, recipe, "cpu")
    json.dumps(figures)
    best = figures["selected_by_nll"]
    assert all(found < initial for found, initial in zip(best["test_nll"], figures["initial_nll"], strict=True))
    assert max(best["inconsistency"]) < (1e-4 if method in ("exact", "graph", "mean-field") else 0.5)
    assert all(len(best[name]) == 2 for name in ("validation_nll", "objective", "steps", "penalty"))
    assert set(best["penalty"]) <= set(recipe.penalties)
    # by its own criterion no other choice is better
    assert sum(best["validation_nll"]) <= sum(figures["selected_by_pseudo_nll"]["validation_nll"]) + 1e-5


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="expected one of exact, "):
        partition("magic", FactorGraph.grid(2, 2), 1)


def test_every_method_starts_from_the_same_models_and_samples():
    one, other = (measure(method, 3, 2, 40, Recipe(steps=1), "cpu") for method in ("exact", "bp"))
    assert one["initial_nll"] == other["initial_nll"]
    assert one["true_nll"] == other["true_nll"]


def test_cells_say_all_that_their_figures_depend_on(tmp_path):
    made = cells(Settings(tmp_path, quick=True, seeds=3))
    assert [cell.key for cell in made] == [f"{method}-n4" for method in METHODS]
    assert all(cell.settings["models"] == 3 for cell in made)
    assert {"steps", "learning_rate", "penalties", "network_rate", "samples", "device"} <= set(made[0].settings)
    assert {cell.settings["size"] for cell in cells(Settings(tmp_path))} == {5, 10, 15}


def figures_of(nll):
    best = {"test_nll": nll, "objective": [1.0, 1.0], "inconsistency": [0.0, 0.5]}
    return {
        "true_nll": [5.0, 5.0],
        "initial_nll": [50.0, 60.0],
        "training_seconds": 2.0,
        "selected_by_nll": best,
        "selected_by_pseudo_nll": best,
    }


def test_table_reports_gaps_to_exact_model_by_model(tmp_path):
    figures = {f"{method}-n{size}": figures_of([11.0, 24.0]) for method in METHODS for size in (5, 10, 15)}
    for size in (5, 10, 15):
        figures[f"exact-n{size}"] = figures_of([10.0, 20.0])
    figures["kikuchi-n5"] = figures_of([10.05, 20.1])
    for size in (5, 10, 15):
        figures[f"plaquettes-n{size}"] = figures_of([10.1, 20.1])
    path, plot = write_table(Settings(tmp_path), figures)
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = path.read_text()
    assert f"- at every n: {METHODS['plaquettes']}\n- at some n only: {METHODS['kikuchi']}: 5\n- at none: Mean" in text
    assert "| Loopy BP, persistent | 17.500 ± 6.500 (7.17) |" in text
    assert "| Loopy BP, persistent | 15.00 ± 5.00 (13.8) | 15.00 ± 5.00 | 1.000 | 5.0e-01 | 2 |" in text
    assert "| Exact | 0.00 ± 0.00 (0.0) |" in text
    assert "| Random start | 55.000 ± 5.000 (45.62) |" in text
    assert set(PAPER) - {"true_nll", "initial_nll"} <= set(METHODS)


def test_catalogue_names_it():
    assert experiment("table2") is TABLE_2


def test_quick_run_from_end_to_end(tmp_path, monkeypatch):
    for method, recipe in RECIPES.items():
        monkeypatch.setitem(RECIPES, method, replace(recipe, steps=2))
    settings = Settings(tmp_path, quick=True, resume=True)
    written = run_experiment(TABLE_2, settings)
    assert [path.name for path in written] == ["table2.md", "table2.png", "table2.json"]
    assert all(label in written[0].read_text() for label in METHODS.values())
    record = json.loads(written[-1].read_text())
    assert set(record["cells"]) == {f"{method}-n4" for method in METHODS}
    assert run_experiment(TABLE_2, settings) == written
    assert json.loads(written[-1].read_text()) == record
