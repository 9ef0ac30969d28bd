import json
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from bethenet.data import paper_digits
from bethenet.experiments import demo, rbm_learning, rbm_tables
from bethenet.experiments.catalogue import experiment
from bethenet.experiments.rbm_learning import RECIPES, gibbs_marginals, held_out_nll, learner, shortened, train
from bethenet.experiments.runner import Settings
from bethenet.learning import Batch
from bethenet.models import RBM
from recording import assert_recordable


@pytest.fixture(scope="module")
def few_digits():
    data = paper_digits()
    return replace(data, train=data.train[:128], test=data.test[:64])


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "paper-network"])
def test_every_learner_takes_steps_and_is_judged(name, few_digits):
    objective, result = train(name, shortened(RECIPES[name], 1), few_digits)
    assert result.steps == 4
    assert str(result.status) == "completed"
    nll, estimate = held_out_nll(objective.model, few_digits, chains=20, temperatures=50)
    assert 15 < nll < 60
    assert estimate.standard_error < 1


@pytest.mark.parametrize("name", RECIPES)
def test_steps_of_every_learner_can_be_recorded(name):
    batch = Batch(torch.randint(2, (8, 6), generator=torch.Generator().manual_seed(0)).float(), 8)
    assert_recordable(learner(name, RBM(6, 5), 0), batch)


def test_the_papers_network_is_the_one_described():
    model = RBM(4, 3)
    objective = learner("paper-network", model, 0)
    network = objective.unclamped.network
    assert network.encoder.sequence.lstm.num_layers == 5
    assert network.encoder.sequence.lstm.hidden_size == 200
    assert network.encoder.features.options.width == 300
    assert network.encoder.features.roles.tolist() == [0, 0, 0, 0, 1, 1, 1]
    potentials = model.log_potentials().detach()
    beliefs = network(potentials)
    pairs = next(tables for tables in beliefs.log_tables if tables.dim() == 4)[0].exp()
    ends = next(group for group in model.graph.factor_groups if group.table_shape == (2, 2)).variables
    nodes = beliefs.node_marginals[0]
    said = [(pairs.sum(2 - end), nodes[ends[:, end]]) for end in range(2)]
    wanted = sum((node * (node.log() - pair.log())).sum() for pair, node in said)
    torch.testing.assert_close(network.penalty(beliefs).squeeze(), wanted, rtol=1e-3, atol=1e-6)


def test_an_unknown_learner_is_named():
    with pytest.raises(ValueError, match="guess"):
        learner("guess", RBM(4, 3), 0)


def test_gibbs_marginals_are_the_truth_in_the_long_run():
    model = RBM(5, 4, weight_scale=0.7, generator=torch.Generator().manual_seed(0)).double()
    nodes, pairs = gibbs_marginals(model, chains=2000, burn_in=50, steps=100)
    samples = model.sample_exactly(200_000, generator=torch.Generator().manual_seed(1)).double()
    given = model.hidden_logits(samples).sigmoid()
    truth = torch.cat([samples.mean(0), given.mean(0)])
    torch.testing.assert_close(nodes.double(), truth, atol=5e-3, rtol=0)
    torch.testing.assert_close(pairs.double(), samples.t() @ given / len(samples), atol=5e-3, rtol=0)


def test_pictures_survive_being_written():
    pictures = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    again = rbm_tables.from_text(json.loads(json.dumps(rbm_tables.to_text(pictures))))
    torch.testing.assert_close(again, pictures, atol=float(pictures.abs().max()) / 127, rtol=0)


def test_the_table_has_a_row_for_every_learner(tmp_path):
    assert experiment("table3") is rbm_tables.TABLE_3
    settings = Settings(tmp_path, seeds=2)
    cells = rbm_tables.cells(settings)
    assert len({cell.key for cell in cells}) == len(cells)
    assert sum(cell.key.startswith("pcd-") for cell in cells) == 4
    figures = {}
    for cell in cells:
        if cell.key.startswith("time-"):
            figures[cell.key] = {"wall": 0.25, "processors": 0.5}
            continue
        figures[cell.key] = {
            "nll": 20.0,
            "ais_error": 0.02,
            "seconds_per_epoch": 0.1,
            "epochs": 3,
            "curve": [[1, 25.0]],
        }
        figures[cell.key]["filters"] = figures[cell.key]["samples"] = rbm_tables.to_text(torch.ones(2, 64))
        if cell.settings["approximates"]:
            figures[cell.key]["objective"] = 19.0
    paths = rbm_tables.report(settings, figures)
    assert all(path.stat().st_size > 0 for path in paths)
    text = paths[0].read_text()
    for recipe in RECIPES.values():
        assert f"| {recipe.label} | 20.00 ± 0.00 |" in text
    assert "0.250 | 0.500" in text
    assert "21.24" in text
    assert "Not run" not in text
    del figures["cd-clean-1"]
    rbm_tables.report(settings, figures)
    assert "Not run: cd-clean-1." in paths[0].read_text()


def test_an_epoch_is_timed_as_if_whole(monkeypatch, few_digits):
    monkeypatch.setattr(rbm_learning, "paper_digits", lambda: few_digits)
    seconds = rbm_learning.time_epoch("pcd", repeats=1)
    assert 0 < seconds["wall"] < 60
    assert seconds["processors"] > 0


def test_a_quick_cell(tmp_path, monkeypatch, few_digits):
    monkeypatch.setitem(rbm_tables.SPLITS, "paper", lambda: few_digits)
    settings = Settings(tmp_path, quick=True)
    cell = next(cell for cell in rbm_tables.cells(settings) if cell.key == "pcd-paper-0")
    figures = json.loads(json.dumps(cell.run()))
    assert figures["epochs"] == 10
    assert len(figures["curve"]) == 10
    assert len(figures["filters"]["rows"]) == len(figures["samples"]["rows"]) == 25


def test_the_demo_writes_a_page_that_needs_no_other_file(tmp_path, monkeypatch, capsys, few_digits):
    monkeypatch.setattr(demo, "paper_digits", lambda: few_digits)
    monkeypatch.setattr(sys, "argv", ["demo", "--share", "0.02", "--output", str(tmp_path)])
    demo.main()
    out = capsys.readouterr().out
    assert "report.html" in out
    assert "23.43" in out
    page = (tmp_path / "report.html").read_text()
    sources = []

    class Finder(HTMLParser):
        def handle_starttag(self, tag, attrs):
            sources.extend(value for name, value in attrs if name in ("src", "href"))

    Finder().feed(page)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_pseudo_marginals_are_those_of_the_kept_state(few_digits):
    objective, _ = train("bp-persistent", shortened(RECIPES["bp-persistent"], 1), few_digits)
    nodes, pairs = demo.pseudo_marginals(objective, few_digits)
    batch = Batch(few_digits.test.float(), 64)
    with torch.no_grad():
        beliefs = objective.unclamped.estimate(objective.model.log_potentials(), batch, clamped=False).beliefs
    torch.testing.assert_close(nodes, beliefs.node_marginals[0, :, 1])
    assert bool((pairs <= nodes[:64].unsqueeze(1) + 1e-3).all())
