import logging
import os
from pathlib import Path

import pytest
import torch

from bethenet import ModelFileError
from bethenet.data import toy_grammar
from bethenet.data.ptb import read_ptb, shipped_text
from bethenet.data.text import END, UNKNOWN, SentenceBatches, Sentences, Vocabulary
from bethenet.models.hidden_chain import HMMOptions
from bethenet.models.hmm import UndirectedHMM

PTB = os.environ.get("BETHENET_PTB")


def write(folder: Path, prefix: str = "", **texts: str) -> Path:
    for split in ("train", "valid", "test"):
        (folder / f"{prefix}{split}.txt").write_text(texts.get(split, "a b c\n"), encoding="utf-8")
    return folder


def sentences(lengths: list[int]) -> Sentences:
    words = torch.arange(1, sum(lengths) + 1)
    return Sentences(words, torch.tensor(lengths))


def test_vocabulary_is_the_training_words_and_the_specials(tmp_path):
    corpus = read_ptb(write(tmp_path, train="the dog\n \nthe <unk> ran\n", valid="a dog\n"))
    assert corpus.vocabulary.words == (END, UNKNOWN, "dog", "ran", "the")
    assert corpus.vocabulary.decode(corpus.train.words.tolist()) == ["the", "dog", END, "the", UNKNOWN, "ran", END]
    assert corpus.vocabulary.decode(corpus.validation.words.tolist()) == [UNKNOWN, "dog", END]
    assert corpus.train.lengths.tolist() == [3, 4]


def test_words_of_sentences_left_out_stay_in_the_vocabulary(tmp_path):
    corpus = read_ptb(write(tmp_path, train="a b c d\na b\n", valid="a\n", test="a\n"), max_length=3)
    assert len(corpus.vocabulary) == 6
    assert corpus.train.lengths.tolist() == [3]


def test_either_name_and_a_folder_as_text(tmp_path):
    assert len(read_ptb(str(write(tmp_path, prefix="ptb."))).train) == 1


def test_other_texts_are_read_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        read_ptb(write(tmp_path))
    assert len(caplog.records) == 3
    assert "SHA-256" in caplog.text


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"valid\.txt or ptb\.valid\.txt"):
        read_ptb(tmp_path)


def test_errors_say_file_and_line(tmp_path):
    write(tmp_path)
    (tmp_path / "train.txt").write_bytes(b"a b\nc \xff d\n")
    with pytest.raises(ModelFileError, match=r"train\.txt:2: expected UTF-8 text, found byte 0xff"):
        read_ptb(tmp_path)
    (tmp_path / "train.txt").write_bytes(b" \n\n")
    with pytest.raises(ModelFileError, match="found no words"):
        read_ptb(tmp_path)
    (tmp_path / "train.txt").write_bytes(b"a b c d e\n")
    with pytest.raises(ValueError, match=r"train\.txt: expected a sentence of at most 3 words"):
        read_ptb(tmp_path, max_length=3)
    with pytest.raises(ValueError, match="max_length: expected at least 1"):
        read_ptb(tmp_path, max_length=0)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("equal_length", [False, True])
def test_every_sentence_stands_in_one_minibatch(shuffle, equal_length):
    text = sentences([3, 1, 3, 2, 3, 5, 1, 3, 3])
    batches = SentenceBatches(text, 2, equal_length=equal_length, shuffle=shuffle)
    found = list(batches)
    assert len(found) == len(batches)
    seen = []
    for batch in found:
        words, lengths = (batch, torch.full((len(batch),), batch.shape[1])) if equal_length else batch
        assert words.shape[0] <= 2
        assert words.shape[1] == lengths.max()
        for row, length in zip(words, lengths.tolist(), strict=True):
            seen.append(row[:length].tolist())
            assert (row[length:] == 0).all()
            assert (row[:length] > 0).all()
    assert sorted(seen) == [part.tolist() for part in text.words.split(text.lengths.tolist())]


def test_orders_depend_on_seed_and_epoch_alone():
    text = sentences([2] * 50)
    batches = SentenceBatches(text, 8, shuffle=True, seed=3)

    def order(epoch: int) -> list[int]:
        batches.set_epoch(epoch)
        return torch.cat(batches.rows()).tolist()

    first = order(1)
    assert order(2) != first
    assert order(1) == first
    assert torch.cat(SentenceBatches(text, 8, shuffle=True, seed=4).rows()).tolist() != order(0)


def test_padding_changes_no_number():
    corpus = shipped_text(max_length=9)
    model = UndirectedHMM(len(corpus.vocabulary), HMMOptions(states=4, order=3, embedding=8)).double()
    part = Sentences.encoded(
        [
            corpus.vocabulary.decode(line.tolist())[:-1]
            for line in corpus.test.words.split(corpus.test.lengths.tolist())
        ][:40],
        corpus.vocabulary,
    )

    def total(equal_length: bool) -> torch.Tensor:
        batches = SentenceBatches(part, 8, equal_length=equal_length)
        return sum(model.log_likelihood(batch).sum() for batch in batches)

    equal, padded = total(True), total(False)
    torch.testing.assert_close(equal, padded, atol=1e-10, rtol=0)
    ours, theirs = (torch.autograd.grad(value, list(model.parameters())) for value in (equal, padded))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


def test_the_shipped_text_is_what_the_grammar_writes(tmp_path):
    toy_grammar.write(tmp_path)
    shipped = Path(toy_grammar.__file__).parent / "toy_text"
    for split in toy_grammar.SIZES:
        assert (tmp_path / f"{split}.txt").read_bytes() == (shipped / f"{split}.txt").read_bytes()
    corpus = shipped_text()
    assert len(corpus.train) > 1500
    assert not (corpus.validation.words == corpus.vocabulary.numbers[UNKNOWN]).any()


def test_wrong_batch_size():
    with pytest.raises(ValueError, match="size: expected at least 1"):
        SentenceBatches(sentences([1]), 0)


def test_an_empty_vocabulary_still_has_the_specials():
    assert Vocabulary.of([]).words == (END, UNKNOWN)


@pytest.mark.skipif(PTB is None, reason="set BETHENET_PTB to the folder of the Penn Treebank's text")
def test_the_paper_s_minibatches(caplog):
    with caplog.at_level(logging.WARNING):
        corpus = read_ptb(PTB)
    assert not caplog.records
    assert len(corpus.train) == 33_967
    assert len(SentenceBatches(corpus.train)) == 1075
    assert len(corpus.vocabulary) == 10_000
