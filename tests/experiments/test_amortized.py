import json

import pytest
import torch

from bethenet.experiments import amortized
from bethenet.experiments.amortized import (
    AMORTIZED,
    QUICK,
    TRAINING_SCALE,
    Recipe,
    evaluate,
    methods_for,
    train,
    training_stream,
)
from bethenet.experiments.amortized import TestSet as Unseen
from bethenet.experiments.runner import Settings, run_experiment

TINY = {
    "bethe": Recipe("bethe", 2, 3, 0.0, batch_size=4, learning_rate=1e-2, seconds=0.3),
    "plaquettes": Recipe("plaquettes", 2, 3, 0.3, 2, 3e-3, 0.3, penalty=30.0, projections=1),
}
SMALL = Unseen("grid", 4, 1.0, 3)


def test_test_sets_are_always_the_same():
    one, same = SMALL.draw(), SMALL.draw()
    for table, again in zip(one.tables, same.tables, strict=True):
        torch.testing.assert_close(table, again)
    regular = Unseen("3-regular", 8, 1.0, 2)
    assert regular.draw().graph.num_variables == 8
    assert len(regular.draw().graph.factor_groups[1]) == 12
    assert SMALL.key != regular.key


def test_training_models_are_fresh_and_within_range():
    stream = training_stream(TINY["bethe"], torch.device("cpu"), seed=3)
    sizes = {stream(step).graph.num_variables for step in range(60)}
    assert sizes == {side**2 for side in range(5, 13)}
    one, other = stream(0), stream(0)
    assert not torch.equal(one.tables[0], other.tables[0])
    couplings = torch.cat([stream(step).tables[1][..., 0, 0].flatten() for step in range(60)])
    # mixed over scales uniform on [0, s], the variance is s^2 / 3
    assert float(couplings.std()) == pytest.approx(TRAINING_SCALE / 3**0.5, rel=0.15)


def test_a_network_is_trained_saved_and_evaluated(tmp_path):
    settings = Settings(tmp_path, quick=True)
    notes = train("bethe", TINY["bethe"], settings)
    assert notes["steps"] > 0
    assert notes["parameters"] == sum(parameter.numel() for parameter in TINY["bethe"].network(0).parameters())
    figures = evaluate("trained-bethe", SMALL, settings)
    json.dumps(figures)
    assert figures["truth"] == "exact"
    assert len(figures["correlation"]) == len(figures["mean_l1"]) == 3
    assert figures["inconsistency"] < 1e-5


def test_converged_engines_are_near_the_truth(tmp_path):
    settings = Settings(tmp_path, quick=True)
    bp, kikuchi = (evaluate(method, SMALL, settings) for method in ("bp", "kikuchi"))
    assert bp["converged"] == 3
    assert max(kikuchi["mean_l1"]) < max(bp["mean_l1"]) < 0.1


def test_plaquettes_are_for_grids_alone():
    assert not any("plaquettes" in name or name == "kikuchi" for name in methods_for(Unseen("3-regular", 8, 1.0, 2)))
    assert "kikuchi" in methods_for(SMALL)
    large = methods_for(Unseen("grid", 30, 1.0, 2))  # Kikuchi stands in for the truth there
    assert "kikuchi" not in large
    assert "trained-plaquettes" in large


def test_experiment_runs_from_end_to_end(tmp_path, monkeypatch):
    assert set(QUICK) == set(TINY)
    monkeypatch.setattr(amortized, "QUICK", TINY)
    monkeypatch.setattr(amortized, "test_sets", lambda settings: [SMALL, Unseen("3-regular", 8, 1.0, 2)])
    settings = Settings(tmp_path, quick=True, resume=True)
    written = run_experiment(AMORTIZED, settings)
    text = written[0].read_text()
    assert "## grid, n = 4, couplings of sd 1" in text
    assert "Network, plaquettes, trained" in text
    before = json.loads(written[-1].read_text())
    assert json.loads(run_experiment(AMORTIZED, settings)[-1].read_text()) == before
