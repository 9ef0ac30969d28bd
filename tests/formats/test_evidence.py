"""Evidence files: the older layout (with a number of samples) and the newer one."""

import gzip

import pytest
import torch

from bethenet import FactorGraph, ModelFileError
from bethenet.formats import read_evidence, write_evidence

GRAPH = FactorGraph([2, 3, 2, 4], [])


def read(tmp_path, text):
    path = tmp_path / "model.uai.evid"
    path.write_text(text)
    return read_evidence(path, GRAPH).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 1 0 2 1", [[-1, 0, 1, -1]]),
        ("2\n1 0\n2 1\n", [[-1, 0, 1, -1]]),
        ("0\n", [[-1, -1, -1, -1]]),
        ("1\n2 1 0 2 1\n", [[-1, 0, 1, -1]]),
        ("1\n0\n", [[-1, -1, -1, -1]]),
        ("1 0\n", [[-1, -1, -1, -1]]),
        ("2\n1 0 1\n2 3 2 1 1\n", [[1, -1, -1, -1], [-1, 1, -1, 2]]),
        # these five numbers fit both layouts; the lines decide
        ("2\n0\n1 3 1\n", [[-1, -1, -1, -1], [-1, -1, -1, 1]]),
        ("2 0 1 3 1\n", [[1, -1, -1, 1]]),
        ("# sample\r\n 1 \t 3   2 \r\n\r\n", [[-1, -1, -1, 2]]),
    ],
)
def test_layouts(tmp_path, text, expected):
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "expected the number of samples or of observed variables, found the end of the file"),
        ("x", 1, "expected a number, found 'x'"),
        ("-1", 1, "expected the number of samples or of observed variables, a whole number of at least 0, found '-1'"),
        ("2\n1 0 1\n0.5", 3, "expected the number of observed variables, a whole number of at least 0, found '0.5'"),
        ("1 0 nan", 1, "expected a state, a whole number of at least 0, found 'nan'"),
        ("1 4 0", 1, "expected a variable, a whole number from 0 to 3, found '4'"),
        ("1\n1\n1 3", 3, "expected a state of variable 1, a whole number from 0 to 2, found '3'"),
        ("2\n1 0\n1 0", 3, "expected each variable once in a sample, found variable 1 again"),
        ("3 0 1\n2 1", 2, "expected 6 variables and states, found 4 before the end of the file"),
        ("1 0 1 1", 1, "expected the end of the file, found '1'"),
        ("1000000000000 0 1", 1, "expected 2000000000000 variables and states, found 2"),
    ],
)
def test_wrong_files(tmp_path, text, line, problem):
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'model.uai.evid'}:{line}: ")
    assert problem in str(caught.value)


def test_samples_of_a_large_model_are_counted_before_they_are_held(tmp_path):
    (tmp_path / "a").write_text("1000\n" + "0\n" * 1000)
    large = FactorGraph([2] * 100_000, [])
    with pytest.raises(
        ModelFileError, match="a:1: expected at most 134217728 states of variables in all samples, found "
    ):
        read_evidence(tmp_path / "a", large)


def test_written_evidence_is_read_back(tmp_path):
    for name, evidence, expected, text in [
        ("one", {3: 1, 0: 1}, [[1, -1, -1, 1]], "2 0 1 3 1\n"),
        ("none", {}, [[-1, -1, -1, -1]], "0\n"),
        ("row", torch.tensor([-1, 2, -1, -1]), [[-1, 2, -1, -1]], "1 1 2\n"),
        ("rows", torch.tensor([[-1, -1, -1, -1], [-1, -1, -1, 1]]), [[-1] * 4, [-1, -1, -1, 1]], "2\n0\n1 3 1\n"),
    ]:
        path = tmp_path / name
        write_evidence(evidence, path)
        assert path.read_text() == text
        assert read_evidence(path, GRAPH).tolist() == expected
    write_evidence({0: 1}, tmp_path / "packed.gz")
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"1 0 1\n"
    assert read_evidence(tmp_path / "packed.gz", GRAPH).tolist() == [[1, -1, -1, -1]]


def test_evidence_is_integer_states(tmp_path):
    with pytest.raises(ValueError, match="expected integer states of shape"):
        write_evidence(torch.zeros(3), tmp_path / "a")
