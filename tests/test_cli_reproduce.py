"""`bethenet reproduce`, on an experiment of two additions; and inference by a saved network."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from bethenet import FactorGraph, LogPotentials
from bethenet.cli import app
from bethenet.experiments.catalogue import EXPERIMENTS, experiment
from bethenet.experiments.runner import Cell, Experiment, write_text
from bethenet.formats import write_model
from bethenet.networks import ConsistentHead, InferenceNetwork, RegionNetwork
from bethenet.networks.network import APPROXIMATIONS
from bethenet.networks.storage import save_network


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


class Tiny:
    """An experiment that counts how often its cells are computed, and can be interrupted in the second."""

    def __init__(self):
        self.computed = []
        self.interrupt = False

    def cells(self, settings):
        def cell(number):
            known = {"seeds": settings.seeds or 3, "quick": settings.quick, "number": number}
            return Cell(f"cell-{number}", known, lambda: self.compute(number, known["seeds"]))

        return [cell(number) for number in (1, 2)]

    def compute(self, number, seeds):
        if self.interrupt and number == 2:
            raise KeyboardInterrupt
        self.computed.append(number)
        return {"sum": number + seeds, "none": float("nan")}

    def report(self, settings, figures):
        path = settings.output / "tiny.md"
        write_text(path, " ".join(f"{key}={figures[key]['sum']}" for key in figures))
        return [path]


@pytest.fixture
def tiny(monkeypatch):
    made = Tiny()
    module = SimpleNamespace(TINY=Experiment("tiny", "Two additions", made.cells, made.report))
    monkeypatch.setitem(sys.modules, "tiny_experiment", module)
    monkeypatch.setitem(EXPERIMENTS, "tiny", "tiny_experiment:TINY")
    return made


def test_an_experiment_names_the_files_to_open(tiny, tmp_path):
    result = run("reproduce", "tiny", "--quick", "--seeds", 1, "--output", tmp_path / "out")
    assert result.stdout.splitlines() == [str(tmp_path / "out" / "tiny.md"), str(tmp_path / "out" / "tiny.json")]
    assert (tmp_path / "out" / "tiny.md").read_text() == "cell-1=2 cell-2=3"
    record = json.loads((tmp_path / "out" / "tiny.json").read_text(), parse_constant=pytest.fail)
    assert record["quick"] is True
    cell = record["cells"]["cell-2"]
    assert (cell["sum"], cell["none"]) == (3, None)
    assert cell["settings"] == {"seeds": 1, "quick": True, "number": 2}
    assert cell["environment"]["torch"] == torch.__version__
    assert cell["seconds"] >= 0


def test_the_folder_is_the_experiments_by_default(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("reproduce", "tiny")
    assert (tmp_path / "runs" / "tiny" / "tiny.json").exists()


def test_a_stopped_run_goes_on(tiny, tmp_path):
    command = ("reproduce", "tiny", "--output", tmp_path)
    tiny.interrupt = True
    stopped = run(*command, code=130)
    assert stopped.stdout == ""
    assert f"what is finished is kept in {tmp_path}: go on with --resume" in stopped.stderr.replace("\n", " ")
    tiny.interrupt = False
    run(*command, "--resume")
    assert tiny.computed == [1, 2]
    # other settings, or a file that was not written to its end, are computed again
    run(*command, "--resume", "--seeds", 7)
    assert tiny.computed == [1, 2, 1, 2]
    (tmp_path / "cells" / "tiny" / "cell-1.json").write_text('{"settings"')
    run(*command, "--resume", "--seeds", 7)
    assert tiny.computed == [1, 2, 1, 2, 1]
    run(*command)
    assert tiny.computed == [1, 2, 1, 2, 1, 1, 2]


def test_wrong_use(tiny, tmp_path, monkeypatch):
    def error(*arguments):
        (line,) = run("reproduce", *arguments, code=2).stderr.splitlines()
        return line

    assert error("table0") == f"error: expected an experiment out of {', '.join(EXPERIMENTS)}; got 'table0'"
    (tmp_path / "file").write_text("")
    assert error("tiny", "--output", tmp_path / "file").startswith(f"error: {tmp_path / 'file'}: ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device is available" in error("tiny", "--device", "cuda", "--output", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert "Error" in run("reproduce", "tiny", "--seeds", 0, code=2).stderr
    assert tiny.computed == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_name_leads_to_its_experiment(name):
    assert experiment(name).name == name


# --- infer --method network ---------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    generator = torch.Generator().manual_seed(0)
    write_model(LogPotentials.random(FactorGraph.grid(2, 3), generator=generator), tmp_path / "model.uai")
    network = InferenceNetwork(RegionNetwork(width=4, rounds=3), ConsistentHead(), APPROXIMATIONS["bethe"])
    save_network(network, tmp_path / "network")
    return ("infer", tmp_path / "model.uai", "--method", "network", "--network", tmp_path / "network")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_network_infers(model, dtype):
    result = run(*model, "--factors", "--dtype", dtype)
    found = json.loads(result.stdout)
    fields = {"method", "status", "iterations", "residual", "seconds", "log_z", "node_marginals", "factor_marginals"}
    assert set(found) == fields
    assert (found["method"], found["status"], found["iterations"]) == ("network", "predicted", 1)
    assert result.stderr == ""
    for marginal in found["node_marginals"]:
        assert sum(marginal) == pytest.approx(1, abs=1e-5)
    # the consistent head's beliefs agree
    assert found["residual"] < 1e-5


def test_a_prediction_has_not_converged(model):
    result = run(*model, "--require-convergence", code=4)
    assert "network did not converge: predicted" in result.stderr


def test_sweeps_may_follow_a_network(model):
    found = json.loads(run(*model, "--max-iterations", 200).stdout)
    assert (found["method"], found["status"]) == ("network", "converged")
    assert found["iterations"] > 1


def test_a_network_has_no_tolerance(model):
    assert "--tolerance: the method 'network' has no such option; it has --max-iterations, --network" in (
        run(*model, "--tolerance", 0.1, code=2).stderr.replace("\n", " ")
    )
