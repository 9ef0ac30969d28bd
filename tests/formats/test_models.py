"""Model files: read what others write, write what is read back bit for bit, refuse what is wrong with a line."""

import gzip
import math
import os
import re
import stat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, LogPotentials, ModelFileError
from bethenet.formats import read_model, write_model
from bethenet.formats import text as text_module
from bethenet.formats.decimals import LONGEST
from oracle import enumerate_model, models

MARKOV = """MARKOV
3
2 2 3
2
2 0 1
2 2 1

4
 4.000 2.400
 1.000 0.000

6
 2.2500 3.2500
 3.7500 0.0000
 0.0000 10.0000
"""

LIBDAI = """# a comment
2

2
0 2
2 3
5
0 0.5
1 0.25   # first variable fastest
2 1
4 2
5 3

1
1
2
2
1 2.5
0 1.5
"""


def same_models(one, other):
    assert one.graph.state_counts.tolist() == other.graph.state_counts.tolist()
    assert one.graph.scopes() == other.graph.scopes()
    for mine, theirs in zip(one.tables, other.tables, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype == torch.float64


def check_table(model, factor, probabilities):
    torch.testing.assert_close(model.table(factor)[0].exp(), torch.tensor(probabilities, dtype=torch.float64))


def test_markov(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text(MARKOV)
    model = read_model(path)
    assert model.graph.scopes() == [(0, 1), (2, 1)]
    check_table(model, 0, [[4.0, 2.4], [1.0, 0.0]])
    check_table(model, 1, [[2.25, 3.25], [3.75, 0.0], [0.0, 10.0]])


def test_libdai_has_the_first_variable_fastest_and_zeros_where_nothing_is_listed(tmp_path):
    path = tmp_path / "model.fg"
    path.write_text(LIBDAI)
    model = read_model(path)
    assert model.graph.scopes() == [(0, 2), (1,)]
    check_table(model, 0, [[0.5, 1.0, 2.0], [0.25, 0.0, 3.0]])
    check_table(model, 1, [1.5, 2.5])


def test_libdai_scope_in_descending_order(tmp_path):
    path = tmp_path / "model.fg"
    path.write_text("1\n2\n5 3\n3 2\n6\n" + "".join(f"{i} {i + 1}\n" for i in range(6)))
    model = read_model(path)
    assert model.graph.names == ("3", "5")
    assert model.graph.state_counts.tolist() == [2, 3]
    assert model.graph.scopes() == [(1, 0)]
    check_table(model, 0, [[1, 4], [2, 5], [3, 6]])


def test_labels_with_gaps_survive(tmp_path):
    (tmp_path / "a.fg").write_text("1\n2\n7 12\n2 2\n1\n3 1.5\n")
    model = read_model(tmp_path / "a.fg")
    write_model(model, tmp_path / "b.fg")
    again = read_model(tmp_path / "b.fg")
    same_models(model, again)
    assert again.graph.names == ("7", "12")


def test_bayes_reads_as_the_product_of_its_tables(tmp_path):
    path = tmp_path / "model.uai"
    path.write_text("BAYES\n2\n2 2\n2\n1 0\n2 0 1\n2\n0.2 0.8\n4\n0.9 0.1\n0.3 0.7\n")
    truth = enumerate_model(read_model(path))
    assert truth.log_z.item() == pytest.approx(0.0, abs=1e-15)
    assert truth.marginal((1,))[0].tolist() == pytest.approx([0.42, 0.58])


@pytest.mark.parametrize(
    "text",
    [
        MARKOV.replace("\n", "\r\n"),
        MARKOV.replace("\n", "  \t\n\n"),
        " ".join(MARKOV.split()),
        "\n\n" + MARKOV.rstrip(),
        "\ufeff" + MARKOV,
        MARKOV.replace("MARKOV", "markov"),
        MARKOV.replace("2\n2 0 1", "2 # factors\n# scopes\n2 0 1"),
    ],
)
def test_white_space_comments_and_case(tmp_path, text):
    (tmp_path / "plain.uai").write_text(MARKOV)
    (tmp_path / "odd.uai").write_bytes(text.encode())
    same_models(read_model(tmp_path / "plain.uai"), read_model(tmp_path / "odd.uai"))


@pytest.mark.parametrize(("text", "suffix"), [(MARKOV, "uai"), (LIBDAI, "fg")])
def test_gzip_is_known_by_its_first_bytes_and_formats_by_their_contents(tmp_path, text, suffix):
    (tmp_path / f"a.{suffix}").write_text(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "plain.txt").write_text(text)
    expected = read_model(tmp_path / f"a.{suffix}")
    same_models(expected, read_model(tmp_path / "packed"))
    same_models(expected, read_model(tmp_path / "plain.txt"))
    write_model(expected, tmp_path / f"b.{suffix}.gz")
    assert (tmp_path / f"b.{suffix}.gz").read_bytes().startswith(b"\x1f\x8b")
    same_models(expected, read_model(tmp_path / f"b.{suffix}.gz"))


@settings(deadline=None, max_examples=60)
@given(
    model=models(zeros=True), suffix=st.sampled_from(["uai", "fg", "uai.gz"]), scale=st.sampled_from([1e-20, 1, 1e3])
)
def test_round_trip_keeps_every_table_bit_for_bit(tmp_path_factory, model, suffix, scale):
    path = tmp_path_factory.mktemp("models") / f"model.{suffix}"
    model = model.map(lambda table: table * scale)
    write_model(model, path)
    back = read_model(path)
    if suffix == "fg":  # which knows variables by their factors only
        free = model.graph.num_variables - len({v for scope in model.graph.scopes() for v in scope})
        assert back.graph.num_factors == model.graph.num_factors + free
        assert torch.equal(back.score(torch.zeros(model.graph.num_variables, dtype=torch.long)),
                           model.score(torch.zeros(model.graph.num_variables, dtype=torch.long)))  # fmt: skip
        for factor in range(model.graph.num_factors):
            assert back.graph.scope(factor) == model.graph.scope(factor)
            assert torch.equal(back.table(factor), model.table(factor))
    else:
        same_models(model, back)


def test_the_empty_model(tmp_path):
    empty = LogPotentials(FactorGraph([], []), [])
    for suffix in ("uai", "fg"):
        write_model(empty, tmp_path / f"a.{suffix}")
        back = read_model(tmp_path / f"a.{suffix}")
        assert (back.graph.num_variables, back.graph.num_factors) == (0, 0)


def test_evidence_becomes_factors(tmp_path):
    graph = FactorGraph([2, 3], [(0, 1)])
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = model.clamp({1: 2, 0: torch.tensor([0.25, 0.75])})
    for suffix in ("uai", "fg"):
        write_model(model, tmp_path / f"a.{suffix}")
        back = read_model(tmp_path / f"a.{suffix}")
        assert back.graph.scopes() == [(0, 1), (0,), (1,)]
        torch.testing.assert_close(enumerate_model(back).log_z, enumerate_model(model).log_z)


def test_shared_tables_are_written_out(tmp_path):
    graph = FactorGraph.chain(4)
    tables = [torch.randn(1, 1, 2, dtype=torch.float64), torch.randn(1, 1, 2, 2, dtype=torch.float64)]
    write_model(LogPotentials(graph, tables), tmp_path / "a.uai")
    back = read_model(tmp_path / "a.uai")
    assert torch.equal(back.tables[1], tables[1].expand(1, 3, 2, 2))


def test_what_cannot_be_written(tmp_path):
    graph = FactorGraph.chain(2)
    with pytest.raises(ValueError, match=r"batch of 3: write potentials\[i\]"):
        write_model(LogPotentials.random(graph, batch_size=3), tmp_path / "a.uai")
    with pytest.raises(ValueError, match=r"expected a name that ends in \.uai"):
        write_model(LogPotentials.random(graph), tmp_path / "a.txt")
    with pytest.raises(ValueError, match="expected log-potentials of at most 2e18"):
        write_model(LogPotentials.random(graph).map(lambda table: table * math.nan), tmp_path / "a.uai")
    assert list(tmp_path.iterdir()) == []


def test_writing_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "a.uai"
    path.write_text("old")
    path.chmod(0o640)
    model = LogPotentials.random(FactorGraph.chain(2))

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_model(model, path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.uai"]
    write_model(model, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    (tmp_path / "link.uai").symlink_to(path)
    write_model(model, tmp_path / "link.uai")
    assert (tmp_path / "link.uai").is_symlink()


WRONG = {
    "empty": ("", 1, "expected MARKOV or BAYES, found the end of the file"),
    "word": ("\nMARKOW 3", 2, "expected MARKOV or BAYES, found 'MARKOW'"),
    "binary": ("\x00\x01\x02", 1, r"expected MARKOV or BAYES, found '\x00\x01\x02'"),
    "no variables": ("MARKOV\n", 1, "expected the number of variables, found the end of the file"),
    "fraction": ("MARKOV\n2.5", 2, "expected the number of variables, a whole number of at least 0, found '2.5'"),
    "negative": ("MARKOV\n-2", 2, "expected the number of variables, a whole number of at least 0, found '-2'"),
    "nan count": ("MARKOV\nnan", 2, "expected the number of variables, a whole number of at least 0, found 'nan'"),
    "few counts": ("MARKOV\n3\n2 2", 3, "expected 3 state counts, found 2 before the end of the file"),
    "no states": ("MARKOV\n2\n2\n0\n0", 4, "expected a state count, a whole number of at least 1, found '0'"),
    "no factors": ("MARKOV\n1\n2\n", 3, "expected the number of factors, found the end of the file"),
    "many variables": ("MARKOV\n1000000000000\n2", 3, "expected 1000000000000 state counts, found 1 before"),
    "many factors": ("MARKOV\n1\n2\n1000000000000\n1 0", 5, "expected 3000000000000 numbers or more"),
    "arity": ("MARKOV\n2\n2 2\n1\n3 0 1\n8 1 1", 5, "factor 0's variables, a whole number from 0 to 2, found '3'"),
    "unknown": ("MARKOV\n2\n2 2\n1\n2 0 2\n4\n1 1 1 1", 5, "a whole number from 0 to 1, found '2'"),
    "repeated": ("MARKOV\n2\n2 2\n1\n2 1 1\n4\n1 1 1 1", 5, "distinct variables in factor 0's scope, found 1 1"),
    "cut scopes": ("MARKOV\n2\n2 2\n2\n2 0 1\n2 0 1\n", 6, "expected the number of factor 0's entries, found the end"),
    "cut scope": ("MARKOV\n2\n2 2\n2\n2 0 1\n1 0 2\n2 0", 6, "expected 4, the number of factor 0's entries, found '2'"),
    "wrong size": ("MARKOV\n2\n2 2\n1\n2 0 1\n3\n1 1 1 1", 6, "4, the number of factor 0's entries, found '3'"),
    "huge table": (
        "MARKOV\n2\n1000000 1000000\n1\n2 0 1\n1000000000000\n1 1", 7,
        "expected 1000000000000 entries of factor 0's table, found 2 before the end of the file",
    ),
    "huge scope": (
        "MARKOV\n48\n" + "9 " * 48 + "\n1\n48 " + " ".join(map(str, range(48))) + "\n1 1", 6, "factor 0's entries",
    ),
    "huge variable": ("MARKOV\n1\n1000000000000\n0", 3, "expected at most 10000000 states of variables that"),
    "cut table": ("MARKOV\n1\n2\n1\n1 0\n2\n0.5\n", 7, "expected 2 entries of factor 0's table, found 1 before"),
    "missing table": ("MARKOV\n1\n2\n2\n1 0\n1 0\n2\n1 1", 8, "expected the number of factor 1's entries, found"),
    "junk": ("MARKOV\n1\n2\n1\n1 0\n2\n1 1\n7", 8, "expected the end of the file, found '7'"),
    "word inside": ("MARKOV\n1\n2\n1\n1 0\n2\n1 one", 7, "expected a number, found 'one'"),
    "underscore": ("MARKOV\n1\n2\n1\n1 0\n2\n1 1_0", 7, "expected a number, found '1_0'"),
    "long": ("MARKOV\n1\n2\n1\n1 0\n2\n1 " + "1" * 2000, 7, "a number of at most 1000 characters, found one of"),
    "nan": ("MARKOV\n1\n2\n1\n1 0\n2\n1\nnan", 8, "expected a finite number of at least 0, found 'nan'"),
    "infinite": ("MARKOV\n1\n2\n1\n1 0\n2\n1\ninf", 8, "expected a finite number of at least 0, found 'inf'"),
    "huge exponent": ("MARKOV\n1\n2\n1\n1 0\n2\n1\n1e" + "9" * 30, 8, "expected a finite number of at least 0, found"),
    "wide": ("MARKOV\n60\n" + "1 " * 60 + "\n1\n60 0 1 2", 5, "a whole number from 0 to 50, found '60'"),
    "negative arity": ("MARKOV\n2\n2 2\n1\n-1\n1 1 1", 5, "a whole number from 0 to 2, found '-1'"),
    "negative entry": ("MARKOV\n1\n2\n1\n1 0\n2\n1\n\n-0.5", 9, "expected a finite number of at least 0, found '-0.5'"),
}  # fmt: skip

WRONG_LIBDAI = {
    "empty": ("", 1, "expected the number of factors, found the end of the file"),
    "word": ("one", 1, "expected a number, found 'one'"),
    "many": ("1000000000000\n1", 2, "expected 2000000000000 numbers or more, for 1000000000000 factors, found 1"),
    "arity": ("1\n1.5\n0\n2\n0", 2, "expected the number of factor 0's variables, a whole number from 0 to 50, found"),
    "arity beyond": ("1\n1000000000000\n0\n2\n0", 2, "a whole number from 0 to 50, found '1000000000000'"),
    "cut scope": ("1\n50\n0\n2\n0", 5, "expected 101 labels, state counts and number of entries of factor 0, found 3"),
    "label": ("1\n1\n-1\n2\n0", 3, "expected a variable's label, a whole number of at least 0, found '-1'"),
    "count": ("1\n1\n0\n0\n0", 4, "expected a state count, a whole number of at least 1, found '0'"),
    "listed": ("1\n1\n0\n2\n0.5", 5, "expected the number of factor 0's entries, a whole number of at least 0, found"),
    "sparse": (
        "1\n40\n" + " ".join(map(str, range(40))) + "\n" + "2 " * 40 + "\n1\n0 1", 3, "at most 67108864 entries",
    ),
    "cut": ("1\n1\n0\n2\n2\n0 1\n1", 7, "expected 4 indices and values of factor 0's entries, found 3 before the end"),
    "too many": ("1\n1\n0\n2\n3\n0 1\n1 1\n0 1", 5, "expected at most 2 entries of factor 0, found 3"),
    "index": ("1\n1\n0\n2\n1\n2 1", 6, "expected an entry's index from 0 to 1, found 2"),
    "twice": ("1\n1\n0\n2\n2\n1 1\n1 1", 7, "expected each entry once, found index 1 again"),
    "conflict": ("2\n1\n4\n2\n1\n0 1\n1\n4\n3\n0\n", 9, "expected 2, the state count of variable 4 above, found 3"),
    "repeated": ("1\n2\n4 4\n2 2\n1\n0 1", 3, "expected distinct variables in factor 0's scope, found 4 4"),
    "negative": ("1\n1\n0\n2\n1\n1 -3", 6, "expected a finite number of at least 0, found '-3'"),
    "junk": ("1\n1\n0\n2\n1\n1 3\n8", 7, "expected the end of the file, found '8'"),
    "next block missing": ("2\n1\n0\n2\n1\n1 3\n", 6, "expected the number of factor 1's variables, found the end"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line", "problem"), WRONG.values(), ids=WRONG)
def test_wrong_uai(tmp_path, text, line, problem):
    check_wrong(tmp_path / "model.uai", text, line, problem)


@pytest.mark.parametrize(("text", "line", "problem"), WRONG_LIBDAI.values(), ids=WRONG_LIBDAI)
def test_wrong_libdai(tmp_path, text, line, problem):
    check_wrong(tmp_path / "model.fg", text, line, problem)


def check_wrong(path, text, line, problem):
    path.write_text(text)
    with pytest.raises(ModelFileError) as caught:
        read_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: expected ")
    assert problem in message
    assert "\n" not in message
    assert caught.value.line == line


@settings(deadline=None, max_examples=150)
@given(data=st.data(), source=st.sampled_from([(MARKOV, "uai"), (LIBDAI, "fg")]))
def test_damaged_files_are_read_or_refused(tmp_path_factory, data, source):
    text, suffix = source
    damaged = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        if not damaged:
            break
        at = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["cut", "drop", "change"]))
        if kind == "cut":
            damaged = damaged[: at + 1]
        elif kind == "drop":
            del damaged[at]
        else:
            damaged[at] = data.draw(st.sampled_from(b"0123456789.-e \n#x\x00\xff"))
    path = tmp_path_factory.mktemp("damaged") / f"model.{suffix}"
    path.write_bytes(damaged or b" ")
    try:
        read_model(path)
    except ModelFileError as error:
        assert "expected" in str(error)  # noqa: PT017


def test_damaged_and_endless_gzip(tmp_path, monkeypatch):
    packed = gzip.compress(MARKOV.encode() * 20)
    (tmp_path / "cut.uai").write_bytes(packed[:-12])
    with pytest.raises(ModelFileError, match=r"cut\.uai:1: expected gzip data, found it damaged"):
        read_model(tmp_path / "cut.uai")
    (tmp_path / "bent.uai").write_bytes(packed[:20] + b"\xff\xff" + packed[22:])
    with pytest.raises(ModelFileError, match="expected gzip data, found it damaged"):
        read_model(tmp_path / "bent.uai")
    monkeypatch.setattr(text_module, "_BLOCK", 1000)
    (tmp_path / "bomb.uai").write_bytes(gzip.compress(b"\n" * 10**6))
    with pytest.raises(ModelFileError, match=r"bomb\.uai:\d+: expected at most 5000 bytes of text, found more"):
        text_module.read_text(tmp_path / "bomb.uai", 5000)


def test_comments_go_wherever_a_block_of_text_ends(tmp_path, monkeypatch):
    text = b"# one\n1 # 2\r3 #\n#\n\n4 # five" * 3
    (tmp_path / "a.uai").write_bytes(text)
    whole = text_module.read_text(tmp_path / "a.uai")
    assert whole == re.sub(rb"#[^\r\n]*", b"", text)
    for size in (1, 2, 7):
        monkeypatch.setattr(text_module, "_BLOCK", size)
        assert text_module.read_text(tmp_path / "a.uai") == whole


def test_the_line_of_an_error_far_down(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_CHUNK", 100)
    states = 500
    lines = ["MARKOV", "1", str(states), "1", "1 0", str(states), *["0.5"] * states]
    lines[400] = "-1"
    (tmp_path / "a.uai").write_text("\n".join(lines))
    with pytest.raises(ModelFileError, match=r":401: expected a finite number of at least 0, found '-1'"):
        read_model(tmp_path / "a.uai")
    lines[400] = "x" * (LONGEST // 2)
    (tmp_path / "a.uai").write_text("\n".join(lines))
    with pytest.raises(ModelFileError, match=r":401: expected a number, found 'xxx"):
        read_model(tmp_path / "a.uai")


def test_chunks_do_not_change_what_is_read(tmp_path, monkeypatch):
    graph = FactorGraph.grid(5, 5, 3)
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    write_model(model, tmp_path / "a.uai")
    for size in (1, 7, 100):
        monkeypatch.setattr(text_module, "_CHUNK", size)
        same_models(model, read_model(tmp_path / "a.uai"))


def test_missing_files_and_directories_are_ordinary_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_model(tmp_path / "none.uai")
    with pytest.raises(IsADirectoryError):
        read_model(tmp_path)


def test_scopes_in_any_order_read_as_written(tmp_path):
    generator = np.random.default_rng(0)
    counts = [2, 3, 4]
    graph = FactorGraph(counts, [(2, 0, 1), (1,), (), (0, 2), (2, 0), (1,)])
    tables = [generator.normal(size=[counts[v] for v in scope]) for scope in graph.scopes()]
    model = LogPotentials.from_tables(graph, tables, dtype=torch.float64)
    for suffix in ("uai", "fg"):
        write_model(model, tmp_path / f"a.{suffix}")
        same_models(model, read_model(tmp_path / f"a.{suffix}"))


def test_a_file_is_read_no_further_than_it_promises(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_CHUNK", 50)
    read = []
    one = text_module.Numbers._read
    monkeypatch.setattr(text_module.Numbers, "_read", lambda self, *arguments: read.append(1) or one(self, *arguments))
    (tmp_path / "a.uai").write_text("MARKOV\n1\n2\n1\n1 0\n2\n" + "0 " * 10_000)
    with pytest.raises(ModelFileError, match=r":7: expected the end of the file, found '0'"):
        read_model(tmp_path / "a.uai")
    assert len(read) == 1


@pytest.mark.parametrize("chunk", [40, 1000, 2**22])
def test_runs_of_like_blocks_are_read_as_one_by_one(tmp_path, monkeypatch, chunk):
    scopes = [*([(0, 1)] * 3), (2,), *([(1, 2)] * 9), (0,), (1,), (), (), *([(2, 0)] * 20), (0, 1, 2), (0, 1)]
    graph = FactorGraph([2, 3, 2], scopes)
    model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    write_model(model, tmp_path / "a.fg")
    monkeypatch.setattr(text_module, "_CHUNK", chunk)
    again = read_model(tmp_path / "a.fg")
    assert again.graph.scopes() == scopes
    assert all(torch.equal(one, other) for one, other in zip(again.tables, model.tables, strict=True))
    text = (tmp_path / "a.fg").read_text().replace("\n2\n1 2\n", "\n2\n1 1\n", 1)
    (tmp_path / "a.fg").write_text(text)
    with pytest.raises(ModelFileError, match=":45: expected 3, the state count of variable 1 above, found 2"):
        read_model(tmp_path / "a.fg")


def test_control_characters_are_not_white_space(tmp_path):
    (tmp_path / "a.uai").write_bytes(b"MARKOV\n1\n2\n1\n1 0\n2\n1\x1c1 1\n")
    with pytest.raises(ModelFileError, match=r":7: expected a number, found '1\\x1c1'"):
        read_model(tmp_path / "a.uai")
