"""The command line, as a user meets it."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bethenet
from bethenet import FactorGraph, LogPotentials
from bethenet.cli import app
from bethenet.cli.common import parse_bytes
from bethenet.errors import MemoryLimitError
from bethenet.formats import read_model, write_evidence, write_model
from bethenet.inference.registry import ENGINES, engine_class, make_engine
from oracle import enumerate_model


@pytest.fixture
def model():
    graph = FactorGraph([2, 3, 2, 1], [(0, 1), (2, 1), (2,), (), (1,)])
    return LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(model, tmp_path):
    write_model(model, tmp_path / "model.uai")
    return str(tmp_path / "model.uai")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    if code in (2, 3):
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert isinstance(result.exception, SystemExit)
    return result


def error(*arguments, code=2):
    """The one line on stderr."""
    (line,) = run(*arguments, code=code).stderr.splitlines()
    assert line.startswith("error: ")
    return line


def infer(*arguments):
    return json.loads(run("infer", *arguments).stdout)


# --- infer --------------------------------------------------------------------------------------------------------


def test_marginals_as_json(path, model):
    found = infer(path)
    truth = enumerate_model(model)
    assert set(found) == {"method", "status", "iterations", "residual", "seconds", "log_z", "node_marginals"}
    assert (found["method"], found["status"], found["residual"]) == ("exact", "converged", 0)
    assert found["log_z"] == pytest.approx(truth.log_z.item())
    assert [len(marginal) for marginal in found["node_marginals"]] == [2, 3, 2, 1]
    for variable, marginal in enumerate(found["node_marginals"]):
        assert marginal == pytest.approx(truth.marginal((variable,))[0].tolist())


def test_factor_marginals_have_the_models_axis_order(path, model):
    found = infer(path, "--factors")["factor_marginals"]
    truth = enumerate_model(model)
    assert [factor["scope"] for factor in found] == [[0, 1], [2, 1], [2], [], [1]]
    for factor in found:
        torch.testing.assert_close(
            torch.tensor(factor["table"], dtype=torch.float64), truth.marginal(tuple(factor["scope"]))[0]
        )


def test_log_z_counts_the_evidence(path, model, tmp_path):
    write_evidence({1: 2, 0: 1}, tmp_path / "one.evid")
    found = infer(path, "--evidence", tmp_path / "one.evid", "--task", "log-z")
    assert set(found) == {"method", "status", "iterations", "residual", "seconds", "log_z"}
    assert found["log_z"] == pytest.approx(enumerate_model(model.clamp({1: 2, 0: 1})).log_z.item())


def test_log_z_alone_takes_less_memory_than_marginals(tmp_path):
    generator = torch.Generator().manual_seed(0)
    grid = LogPotentials.random(FactorGraph.grid(8, 8), dtype=torch.float64, generator=generator)
    write_model(grid, tmp_path / "grid.uai")
    with pytest.raises(MemoryLimitError) as refused:
        make_engine("exact", {"memory_limit": 1}).run(grid)
    limit = refused.value.bytes_needed * 9 // 10
    arguments = ("infer", tmp_path / "grid.uai", "--memory-limit", limit)
    error(*arguments, code=3)
    found = json.loads(run(*arguments, "--task", "log-z").stdout)
    assert (found["method"], found["status"], found["iterations"], found["residual"]) == ("exact", "converged", 1, 0)
    assert found["log_z"] == pytest.approx(make_engine("exact", {}).run(grid).log_z.item())


def test_most_probable_state(path, model):
    found = infer(path, "--task", "map")
    truth = enumerate_model(model)
    assert set(found) == {"method", "seconds", "map", "map_log_value"}
    assert found["map"] == truth.assignments[truth.log_probabilities[:, 0].argmax()].tolist()
    assert found["map_log_value"] == pytest.approx(truth.map_log_value.item())


def test_several_samples_of_evidence_are_members(path, model, tmp_path):
    states = torch.tensor([[1, -1, -1, -1], [-1, -1, -1, -1], [-1, 2, 0, -1]])
    write_evidence(states, tmp_path / "many.evid")
    arguments = (path, "--evidence", tmp_path / "many.evid")
    found = infer(*arguments)
    truth = enumerate_model(model.clamp(states))
    assert set(found) == {"method", "status", "seconds", "members"}
    assert [member["log_z"] for member in found["members"]] == pytest.approx(truth.log_z.tolist())
    assert found["members"][2]["node_marginals"][0] == pytest.approx(truth.marginal((0,))[2].tolist())
    assert len(infer(*arguments, "--task", "map")["members"]) == 3
    assert run("infer", *arguments, "--format", "uai").stdout.splitlines()[:2] == ["MAR", "3"]


def test_the_competitions_formats(path, model, tmp_path):
    truth = enumerate_model(model)
    task, line = run("infer", path, "--format", "uai").stdout.splitlines()
    numbers = [float(word) for word in line.split()]
    assert (task, numbers[:2], numbers[4]) == ("MAR", [4, 2], 3)
    assert numbers[2:4] == pytest.approx(truth.marginal((0,))[0].tolist())
    assert len(numbers) == 1 + 4 + 2 + 3 + 2 + 1
    task, line = run("infer", path, "--format", "uai", "--task", "log-z").stdout.splitlines()
    assert (task, float(line)) == ("PR", pytest.approx(truth.log_z.item() / math.log(10)))
    states = infer(path, "--task", "map")["map"]
    assert run("infer", path, "--format", "uai", "--task", "map").stdout == f"MPE\n4 {' '.join(map(str, states))}\n"


def test_a_bayesian_network_gives_the_probability_of_evidence(tmp_path):
    (tmp_path / "a.uai").write_text("BAYES\n2\n2 2\n2\n1 0\n2 0 1\n2\n0.2 0.8\n4\n0.9 0.1\n0.3 0.7\n")
    (tmp_path / "a.evid").write_text("1 1 1\n")
    found = infer(tmp_path / "a.uai", "--evidence", tmp_path / "a.evid", "--task", "log-z")
    assert found["log_z"] == pytest.approx(math.log(0.2 * 0.1 + 0.8 * 0.7))


def test_output_goes_to_a_file(path, tmp_path):
    result = run("infer", path, "--output", tmp_path / "out.json")
    assert result.stdout == ""
    assert json.loads((tmp_path / "out.json").read_text())["method"] == "exact"


def test_float32(path):
    assert infer(path, "--dtype", "float32")["log_z"] == pytest.approx(infer(path)["log_z"], rel=1e-5)


@pytest.mark.parametrize("method", [method for method in ENGINES if method not in ("exact", "network")])
def test_every_method_gives_the_same_object(path, method):
    found = infer(path, "--method", method, "--max-iterations", 200, "--seed", 0)
    assert found["method"] == method
    assert set(found) == {"method", "status", "iterations", "residual", "seconds", "log_z", "node_marginals"}
    for marginal in found["node_marginals"]:
        assert sum(marginal) == pytest.approx(1)


@pytest.mark.parametrize("method", [method for method in ENGINES if method != "network"])
def test_every_method_gives_the_same_object_for_each_sample_of_evidence(path, method, tmp_path):
    write_evidence(torch.tensor([[1, -1, -1, -1], [-1, 2, 0, -1]]), tmp_path / "two.evid")
    found = infer(path, "--method", method, "--evidence", tmp_path / "two.evid", "--factors", "--seed", 0)
    assert set(found) == {"method", "status", "seconds", "members"}
    for member, (variable, marginal) in zip(found["members"], [(0, [0, 1]), (1, [0, 0, 1])], strict=True):
        fields = {"status", "iterations", "residual", "log_z", "node_marginals", "factor_marginals"}
        assert set(member) == fields
        assert member["node_marginals"][variable] == marginal
        assert [factor["scope"] for factor in member["factor_marginals"]] == [[0, 1], [2, 1], [2], [], [1]]


def test_belief_propagation_is_exact_on_this_tree(path):
    assert infer(path, "--method", "bp")["log_z"] == pytest.approx(infer(path)["log_z"])


def test_convergence_can_be_required(tmp_path):
    generator = torch.Generator().manual_seed(0)
    write_model(LogPotentials.random(FactorGraph.grid(4, 4), 3.0, generator=generator), tmp_path / "grid.uai")
    arguments = ("infer", tmp_path / "grid.uai", "--method", "bp", "--max-iterations", 1)
    lenient = run(*arguments)
    assert json.loads(lenient.stdout)["status"] != "converged"
    assert "bp did not converge" in lenient.stderr
    strict = run(*arguments, "--require-convergence", code=4)
    assert json.loads(strict.stdout)["status"] != "converged"
    run("infer", tmp_path / "grid.uai", "--require-convergence")


def test_numbers_that_are_not_finite_are_null(path):
    # no iteration has been made, so there is no residual
    result = run("infer", path, "--method", "bp", "--max-iterations", 0)
    assert json.loads(result.stdout, parse_constant=pytest.fail)["residual"] is None


# --- sample, info, convert ----------------------------------------------------------------------------------------


def test_samples_as_an_array(path, model, tmp_path):
    run("sample", path, "-n", 4000, "--seed", 1, "--output", tmp_path / "out.npy")
    states = np.load(tmp_path / "out.npy")
    assert states.shape == (4000, 4)
    frequency = np.bincount(states[:, 1], minlength=3) / 4000
    assert frequency.tolist() == pytest.approx(enumerate_model(model).marginal((1,))[0].tolist(), abs=0.05)


def test_samples_as_text_depend_on_the_seed_only(path):
    one, again, other = (run("sample", path, "-n", 20, "--seed", seed).stdout for seed in (1, 1, 2))
    assert one == again != other
    assert len(one.splitlines()) == 20


def test_samples_given_several_pieces_of_evidence(path, tmp_path):
    write_evidence(torch.tensor([[1, -1, -1, -1], [0, -1, -1, -1]]), tmp_path / "two.evid")
    arguments = ("sample", path, "-n", 5, "--evidence", tmp_path / "two.evid")
    assert "--output FILE.npy" in error(*arguments)
    run(*arguments, "--output", tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy")[:, :, 0].tolist() == [[1, 0]] * 5


def test_info(path):
    text = run("info", path).stdout
    assert "variables           4\n" in text
    assert "1 variable with 3 states\n" in text
    assert "2 variables with 2 states\n" in text
    assert "treewidth, at most  1\n" in text
    assert "at its peak" in text


def test_convert_keeps_every_bit(path, model, tmp_path):
    run("convert", path, tmp_path / "a.fg.gz")
    run("convert", tmp_path / "a.fg.gz", tmp_path / "b.uai")
    back = read_model(tmp_path / "b.uai")
    for factor in range(model.graph.num_factors):
        assert torch.equal(back.table(factor), model.table(factor))


# --- wrong use ----------------------------------------------------------------------------------------------------


def test_wrong_files(path, tmp_path):
    assert error("infer", tmp_path / "none.uai") == f"error: {tmp_path}/none.uai: No such file or directory"
    assert error("info", tmp_path) == f"error: {tmp_path}: Is a directory"
    (tmp_path / "junk.uai").write_bytes(bytes(range(256)) * 50)
    assert "junk.uai:1: expected MARKOV or BAYES, found" in error("infer", tmp_path / "junk.uai")
    (tmp_path / "bad.evid").write_text("1 9 0")
    assert "bad.evid:1: expected a variable, a whole number from 0 to 3, found '9'" in error(
        "infer", path, "--evidence", tmp_path / "bad.evid"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(path):
    os.chmod(path, 0)
    assert "Permission denied" in error("infer", path)


def test_wrong_output(path, tmp_path):
    assert "there is no directory" in error("infer", path, "--output", tmp_path / "none" / "a.json")
    assert "expected a file to write, found a directory" in error("infer", path, "--output", tmp_path)
    assert "expected a name that ends in .uai" in error("convert", path, tmp_path / "a.txt")


def test_impossible_evidence(tmp_path):
    (tmp_path / "a.uai").write_text("MARKOV\n1\n2\n1\n1 0\n2\n1 0\n")
    (tmp_path / "a.evid").write_text("1 0 1\n")
    for task in ("marginals", "log-z", "map"):
        line = error("infer", tmp_path / "a.uai", "--evidence", tmp_path / "a.evid", "--task", task)
        assert "probability zero" in line
    assert "probability zero" in error("sample", tmp_path / "a.uai", "--evidence", tmp_path / "a.evid")


@pytest.mark.parametrize("method", [method for method in ENGINES if method != "network"])
def test_impossible_evidence_is_never_a_result(tmp_path, method):
    (tmp_path / "a.uai").write_text("MARKOV\n2\n2 2\n1\n2 0 1\n4\n1 0 1 0\n")
    (tmp_path / "a.evid").write_text("1 1 1\n")
    error("infer", tmp_path / "a.uai", "--evidence", tmp_path / "a.evid", "--method", method)


def test_wrong_options(path):
    assert error("infer", path, "--damping", 0.5) == (
        "error: --damping: the method 'exact' has no such option; it has --memory-limit"
    )
    assert "expected a method out of exact, bp" in error("infer", path, "--method", "magic")
    assert "max_iterations: expected at least 0, got -1" in error(
        "infer", path, "--method", "bp", "--max-iterations", -1
    )
    assert "--factors goes with" in error("infer", path, "--factors", "--task", "map")
    assert "--require-convergence goes with" in error("infer", path, "--require-convergence", "--task", "map")
    assert "does not find most probable states" in error("infer", path, "--method", "mean-field", "--task", "map")
    for wrong in (
        ["--task", "x"],
        ["--format", "x"],
        ["--dtype", "x"],
        ["--memory-limit", "x"],
        ["--magic"],
        ["--seed", "-1"],
        ["--seed", "9" * 30],
    ):
        assert "Error" in run("infer", path, *wrong, code=2).stderr


def test_a_network_that_is_not_there(path, tmp_path):
    assert error("infer", path, "--method", "network") == ("error: --method network needs a trained one: --network DIR")
    assert "--network: the method 'exact' has no such option" in error("infer", path, "--network", tmp_path)
    assert str(tmp_path / "none") in error("infer", path, "--method", "network", "--network", tmp_path / "none")
    assert str(tmp_path) in error("infer", path, "--method", "network", "--network", tmp_path)


def test_no_cuda(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device is available" in error("infer", path, "--device", "cuda")


def test_a_memory_limit(path):
    for arguments in (["infer", path], ["sample", path]):
        assert "100 bytes" in error(*arguments, "--memory-limit", "100", code=3)


def test_more_samples_than_there_is_memory_for(path):
    arguments = ("sample", path, "-n", 10**13)
    assert "exact inference (samples) would need" in error(*arguments, code=3)
    assert "not enough memory: you tried to allocate" in error(*arguments, "--memory-limit", "99999T", code=3)


def test_bytes_of_people():
    for text, count in [("100", 100), ("8GiB", 2**33), ("1.5 kb", 1536), ("2T", 2**41), ("7 MiB", 7 * 2**20)]:
        assert parse_bytes(text) == count


def test_version():
    assert run("--version").stdout == f"bethenet {bethenet.__version__}\n"


@pytest.mark.parametrize("method", [method for method in ENGINES if method != "network"])
def test_a_model_of_nothing(tmp_path, method):
    (tmp_path / "empty.uai").write_text("MARKOV\n0\n\n0\n")
    found = infer(tmp_path / "empty.uai", "--method", method, "--factors")
    assert (found["status"], found["node_marginals"], found["factor_marginals"]) == ("converged", [], [])
    assert str(found["log_z"]) == "0.0"


def test_engines_by_name():
    for name in ENGINES:
        assert engine_class(name).name == name
    with pytest.raises(ValueError, match="the method 'exact' has no option 'damping': its options are memory_limit"):
        make_engine("exact", {"damping": 0.1})


# --- as a process -------------------------------------------------------------------------------------------------


def test_the_command_itself(path):
    command = [sys.executable, "-c", "from bethenet.cli import main; main()", "infer", path]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["status"] == "converged"
    assert found.stderr == ""


def test_a_closed_pipe_is_no_traceback(path):
    script = f"{sys.executable} -c 'from bethenet.cli import main; main()' sample {path} -n 200000 | head -n 1"
    found = subprocess.run(script, shell=True, capture_output=True, text=True, check=False)
    assert len(found.stdout.splitlines()) == 1
    assert found.stderr == ""


def test_models_come_and_results_go_through_pipes(path, tmp_path):
    tell = f"{sys.executable} -c 'from bethenet.cli import main; main()' infer --task log-z --output >(cat) "
    found = subprocess.run(["bash", "-c", f"{tell} <(cat {path})"], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["log_z"] == infer(path, "--task", "log-z")["log_z"]


def test_stdout_may_be_closed(path):
    script = f"{sys.executable} -c 'from bethenet.cli import main; main()' infer {path} >&-"
    found = subprocess.run(script, shell=True, capture_output=True, text=True, check=True)
    assert found.stderr == ""
