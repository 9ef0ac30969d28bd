import json
from dataclasses import replace

import pytest
import torch

from bethenet.experiments import ising_inference
from bethenet.experiments.ising_inference import (
    METHODS,
    cells,
    exact_marginals,
    measure,
    models_and_truth,
    random_models,
)
from bethenet.experiments.ising_tables import FIGURE_2, TABLE_1, TABLE_5, write_table
from bethenet.experiments.runner import Settings, run_experiment
from bethenet.inference.bp import BeliefPropagation


@pytest.fixture
def tiny(monkeypatch):
    """Networks that are narrow and hardly trained, on 3 x 3 grids."""
    monkeypatch.setattr(ising_inference, "WIDTH", 8)
    monkeypatch.setattr(ising_inference, "PAPER_FIT", replace(ising_inference.PAPER_FIT, steps=3))
    for module in ("ising_inference", "ising_tables"):
        monkeypatch.setattr(f"bethenet.experiments.{module}.sizes_for", lambda settings: (3,))


def test_models_are_drawn_from_the_seed_alone():
    one, same, other = (random_models(3, 1.0, 2, seed) for seed in (5, 5, 6))
    torch.testing.assert_close(one.tables[1], same.tables[1])
    assert not torch.allclose(one.tables[1], other.tables[1])


def test_couplings_have_the_scale_asked_for():
    tables = random_models(10, 3.0, 20, 0).tables
    assert float(tables[1][..., 0, 0].std()) == pytest.approx(3.0, rel=0.05)
    assert float(tables[0][..., 1].std()) == pytest.approx(1.0, rel=0.1)


def test_the_truth_of_many_models_is_that_of_each():
    potentials = random_models(3, 1.0, 12, 0)  # more than are worked on at a time
    whole = exact_marginals(potentials)
    for member in (0, 11):
        alone = exact_marginals(potentials[member : member + 1])
        torch.testing.assert_close(whole.together[member], alone.together[0])


@pytest.mark.parametrize("method", METHODS)
def test_measure_compares_with_the_truth(method, tiny, tmp_path):
    figures = measure(3, 1.0, method, Settings(tmp_path), 2)
    json.dumps(figures)
    assert len(figures["correlation_all"]) == len(figures["log_z"]) == 2
    assert all(0 <= value <= 1 for value in figures["mean_l1_pairs"])
    assert len(figures["first_model"]["nodes"][0]) == 9
    assert len(figures["first_model"]["pairs"][1]) == 12
    if method in ("bp", "kikuchi"):
        assert min(figures["correlation_all"]) > 0.95
    if method == "consistent":
        assert max(figures["inconsistency"]) < 1e-5


def test_figures_of_belief_propagation_are_right(tmp_path):
    figures = measure(3, 1.0, "bp", Settings(tmp_path), 2)
    potentials, truth = models_and_truth(3, 1.0, 2, 1003)
    found = BeliefPropagation().run(potentials).beliefs.node_marginals[..., 1]
    error = (found.double() - truth.nodes).abs().mean(1)
    torch.testing.assert_close(torch.tensor(figures["mean_l1_nodes"]).double(), error, atol=1e-5, rtol=0)


def test_cells_say_all_that_their_figures_depend_on(tmp_path):
    made = cells(Settings(tmp_path, seeds=4), (1.0, 3.0), (5,), ("bp", "kikuchi"))
    assert [cell.key for cell in made] == ["bp-n5-sd1", "kikuchi-n5-sd1", "bp-n5-sd3", "kikuchi-n5-sd3"]
    assert made[2].settings == {"size": 5, "coupling_scale": 3.0, "method": "bp", "models": 4, "device": "cpu"}


def test_table_shows_means_errors_and_the_papers_figures(tmp_path):
    entry = {f"{name}_{part}": [0.9, 0.94] for name in ("correlation", "mean_l1") for part in ("all", "nodes", "pairs")}
    cell = {**entry, "log_z": [1.0, 2.0], "seconds_per_model": 0.5, "converged": 1}
    figures = {f"{method}-n{size}-sd1": cell for method in METHODS for size in (5, 10, 15)}
    (path,) = write_table(Settings(tmp_path), figures, "table1", (1.0,))
    text = path.read_text()
    entries = [f"0.9200 ± 0.0200 ({paper})" for paper in ("0.950", "0.946", "0.942")]
    assert f"| Loopy BP | {' | '.join(entries)} |" in text
    assert "| Kikuchi | 0.9200 ± 0.0200 | 0.9200 ± 0.0200 | 0.9200 ± 0.0200 |" in text
    assert "1 of 2 | 0.5000 |" in text


@pytest.mark.parametrize(("described", "files"), [(TABLE_1, 5), (TABLE_5, 10), (FIGURE_2, 5)])
def test_experiments_run_from_end_to_end(described, files, tiny, tmp_path):
    settings = Settings(tmp_path, quick=True, seeds=2, resume=True)
    written = run_experiment(described, settings)
    assert all(path.stat().st_size > 0 for path in written)
    assert len(list((tmp_path / "cells" / described.name).iterdir())) == files
    before = json.loads(written[-1].read_text())
    assert json.loads(run_experiment(described, settings)[-1].read_text()) == before
