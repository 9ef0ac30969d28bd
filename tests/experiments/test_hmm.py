import json
from dataclasses import replace

import pytest
import torch

from bethenet import MemoryLimitError
from bethenet.data import Corpus, SentenceBatches, Sentences, Vocabulary
from bethenet.experiments import hmm_learning, hmm_states, hmm_tables
from bethenet.experiments.catalogue import experiment
from bethenet.experiments.hmm_evaluation import coupling_sizes, exact_nll, unigram_nll
from bethenet.experiments.hmm_learning import corpus_for, learn
from bethenet.experiments.hmm_methods import model_of, objective_of
from bethenet.experiments.hmm_tables import RECIPES
from bethenet.experiments.runner import Settings, run_experiment
from bethenet.learning.objective import Batch
from bethenet.models import DirectedHMM, HMMOptions, UndirectedHMM
from bethenet.models.chain_memory import bytes_needed

TINY = {"states": 3, "embedding": 6, "word": 5, "node": 4, "width": 5, "layers": 1, "epochs": 1}


@pytest.fixture
def folder(tmp_path):
    """A text of 40 + 12 + 12 short sentences."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 40), ("valid", 12), ("test", 12)):
        lines = []
        for _ in range(count):
            length = int(torch.randint(1, 5, (), generator=generator))
            words = torch.randint(6, (length,), generator=generator).tolist()
            lines.append(" ".join(f"w{word}" for word in words))
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def tiny(monkeypatch):
    """Every row as small as can be."""
    recipes = {name: replace(recipe, **TINY) for name, recipe in RECIPES.items()}
    monkeypatch.setattr(hmm_tables, "RECIPES", recipes)
    return recipes


def settings(tmp_path, folder, **others):
    return Settings(tmp_path / "out", data=folder, **others)


@pytest.mark.parametrize("name", RECIPES)
def test_every_row_can_be_trained_and_its_parameters_all_learn(name):
    torch.manual_seed(0)
    recipe = replace(RECIPES[name], **TINY)
    model = model_of(recipe, 9, "auto")
    objective = objective_of(recipe, model, 9, 12)
    assert isinstance(model, DirectedHMM if recipe.directed else UndirectedHMM)
    words = torch.randint(9, (4, 7), generator=torch.Generator().manual_seed(0))
    seen = set()
    for update in objective.updates(Batch(words, 4), torch.Generator().manual_seed(0)):
        seen.update(update.parts)
        for part in update.parts:
            slopes = torch.autograd.grad(
                update.loss, list(objective.parts()[part].parameters()), retain_graph=True, allow_unused=True
            )
            used = [slope for slope in slopes if slope is not None]
            assert used
            assert all(slope.isfinite().all() for slope in used)
            assert any(slope.abs().max() > 0 for slope in used)
    assert seen == set(objective.parts())


def test_methods_refuse_the_other_kind_of_model():
    for name, directed in (("bp", True), ("mean-field", False)):
        recipe = replace(RECIPES[name], directed=directed, **TINY)
        with pytest.raises(ValueError, match="directed models"):
            objective_of(recipe, model_of(recipe, 9, "auto"), 9, 12)


@pytest.mark.parametrize("kind", [UndirectedHMM, DirectedHMM])
def test_exact_nll_is_the_mean_over_sentences(kind):
    torch.manual_seed(0)
    model = kind(5, HMMOptions(3, 2, 6, dropout=0.5))
    text = Sentences(torch.tensor([0, 1, 2, 3, 4, 1, 1, 2, 3]), torch.tensor([2, 4, 1, 2]))
    model.eval()
    alone = [model.log_likelihood(text.padded(torch.tensor([row]))[0]).detach() for row in range(4)]
    wanted = -float(torch.cat(alone).mean())
    model.train()
    assert exact_nll(model, SentenceBatches(text, 3)) == pytest.approx(wanted, abs=1e-5)
    assert model.training
    # one sentence at a time, where no more fit
    needed = bytes_needed(1, 4, model.tables(), torch.float32, keep=False)
    model.options = replace(model.options, memory_limit=needed)
    assert exact_nll(model, SentenceBatches(text, 3)) == pytest.approx(wanted, abs=1e-5)
    model.options = replace(model.options, memory_limit=needed - 1)
    with pytest.raises(MemoryLimitError, match="bytes"):
        exact_nll(model, SentenceBatches(text, 3))
    with pytest.raises(ValueError, match="equal length"):
        exact_nll(model, SentenceBatches(text, 3, equal_length=False))


def test_coupling_sizes_of_a_directed_model():
    torch.manual_seed(0)
    model = DirectedHMM(5, HMMOptions(3, 2, 6))
    with torch.no_grad():
        # the older state's half of every map is cut off
        model.history_transform.first.weight[:, :6] = 0
        model.history_transform.first.weight[:6] = 0
        model.history_transform.rest[2].weight[:6] = 0
        model.next_states[:, :6] = 0
        model.history_transform.norm = torch.nn.Identity()
    sizes = coupling_sizes(model)
    assert sizes[0] > 0.05
    assert sizes[1] < 1e-6


def test_the_unigram_control():
    text = Sentences(torch.tensor([2, 2, 0, 3, 0]), torch.tensor([3, 2]))
    corpus = Corpus(Vocabulary(("a", "b", "c", "d")), text, text, text)
    chances = torch.tensor([3, 1, 3, 2]) / 9
    wanted = -float(chances.log()[text.words].sum()) / 2
    assert unigram_nll(corpus)["nll_test"] == pytest.approx(wanted)


def test_all_rows_are_run_reported_and_taken_over(tmp_path, folder, tiny):
    wanted = settings(tmp_path, folder, seeds=2)
    paths = run_experiment(experiment("table4"), wanted)
    assert [path.name for path in paths] == ["table4.md", "table4.png", "table4.json"]
    table = paths[0].read_text()
    assert all(recipe.label in table for recipe in tiny.values())
    assert "(115.86)" in table
    figures = json.loads(paths[2].read_text())["cells"]
    assert len(figures) == 1 + 2 * len(tiny)
    for name, cell in figures.items():
        assert cell["nll_validation"] > 0
        assert cell["nll_test"] > 0
        if name != "unigram":
            assert len(cell["couplings"]) == cell["settings"]["order"]
            assert cell["nll_validation"] == min(record["nll"] for record in cell["history"])
    assert not list((tmp_path / "out").rglob("step-*"))
    first = (tmp_path / "out/cells/table4/exact-seed0.json").read_text()
    run_experiment(experiment("table4"), replace(wanted, resume=True))
    assert (tmp_path / "out/cells/table4/exact-seed0.json").read_text() == first


@pytest.mark.parametrize("name", ["exact", "kikuchi", "amortized", "mean-field", "network"])
def test_a_row_stopped_anywhere_goes_on_to_the_same_figures(tmp_path, folder, tiny, monkeypatch, name):
    recipe = replace(tiny[name], epochs=3)
    monkeypatch.setattr(hmm_learning, "CHECKPOINT_STEPS", 1)
    corpus = corpus_for("table4", settings(tmp_path, folder))
    whole = learn(recipe, corpus, 0, settings(tmp_path, folder), tmp_path / "whole")

    class Stop(Exception):
        pass

    class Interrupted(SentenceBatches):
        count = 0

        def __iter__(self):
            for words in super().__iter__():
                if self.shuffle and (count := Interrupted.count) == 7:
                    raise Stop(str(count))
                Interrupted.count += self.shuffle
                yield words

    wanted = settings(tmp_path, folder, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(hmm_learning, "SentenceBatches", Interrupted)
        with pytest.raises(Stop):
            learn(recipe, corpus, 0, wanted, tmp_path / "parts")
    assert list((tmp_path / "parts").glob("step-*"))
    parts = learn(recipe, corpus, 0, wanted, tmp_path / "parts")
    for figures in (whole, parts):
        del figures["seconds_per_epoch"]
        for record in figures["history"]:
            del record["seconds"]
    assert parts == whole


def test_the_text_must_be_given_unless_quick(tmp_path):
    with pytest.raises(ValueError, match="--data"):
        hmm_tables.cells(Settings(tmp_path))
    quick = hmm_tables.cells(Settings(tmp_path, quick=True))
    assert len(quick) == 1 + len(RECIPES)


def test_other_settings_are_another_run(tmp_path, folder, tiny):
    keys = [cell.settings for cell in hmm_tables.cells(settings(tmp_path, folder, seeds=1))]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    assert all("seed" in key for key in keys[1:])


def test_a_row_that_never_was_evaluated_is_shown_as_missing(tmp_path, folder, tiny):
    wanted = settings(tmp_path, folder, seeds=1)
    empty = {
        "environment": {"device": "cpu", "threads": 2},
        "nll_validation": None, "nll_test": 9.0, "objective_validation": None, "best_epoch": None,
        "seconds_per_epoch": 1.0, "couplings": [1.0], "inconsistency": None, "status": "diverged", "history": [],
    }  # fmt: skip
    wanted.output.mkdir()
    figures = {"unigram": {"nll_validation": 8.0, "nll_test": 8.0}} | {f"{name}-seed0": empty for name in tiny}
    table, plot = hmm_tables.TABLE_4.report(wanted, figures)
    assert "diverged" in table.read_text()
    assert plot.exists()


def test_rows_that_were_not_run_are_said_to_be_missing(tmp_path, folder, tiny):
    wanted = settings(tmp_path, folder, seeds=2, only=("unigram", "exact-seed0", "bp-seed*"))
    table, _, record = run_experiment(experiment("table4"), wanted)
    lines = {line.split("|")[1].strip(): line for line in table.read_text().splitlines() if line.startswith("| ")}
    assert "not run" in lines["Undirected: inference network"]
    assert lines["Undirected: inference network"].rstrip("| ").endswith("0")
    rows = [line for line in table.read_text().splitlines() if line.startswith("| Undirected: ")]
    assert [line.rstrip("| ").rpartition("| ")[2] for line in rows[:3]] == ["1", "2", "0"]
    missing = json.loads(record.read_text())["missing"]
    assert "exact-seed1" in missing
    assert "bp-seed1" not in missing


def test_more_states_are_trained_for_a_time_and_drawn(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(hmm_states, "QUICK_SECONDS", dict.fromkeys(hmm_states.QUICK_SECONDS, 0.05))
    wanted = settings(tmp_path, folder, quick=True)
    table, plot, record = run_experiment(experiment("states"), replace(wanted, only=("*-4-*",)))
    assert plot.exists()
    assert table.read_text().count("not run") == 4
    table, _, record = run_experiment(experiment("states"), replace(wanted, resume=True))
    assert "not run" not in table.read_text()
    figures = json.loads(record.read_text())["cells"]
    assert len(figures) == 1 + 2 * 3
    for cell in figures.values():
        assert cell["nll_validation"] > 0
    for states in hmm_states.QUICK_SECONDS:
        for method in hmm_states.METHODS:
            cell = figures[f"{method}-{states}-seed0"]
            assert cell["status"] == "time limit"
            assert cell["settings"]["states"] == states
            assert cell["history"][-1]["seconds"] >= 0.05
