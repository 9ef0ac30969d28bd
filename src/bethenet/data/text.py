"""Sentences of words as tensors: vocabulary, length limit, minibatches of equal length or padded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from bethenet.errors import ModelFileError

END = "<eos>"
UNKNOWN = "<unk>"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Distinct words, each with its number; `END` and `UNKNOWN` are among them."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]]) -> Vocabulary:
        """Every word of the sentences in alphabetical order, behind `END` and `UNKNOWN`."""
        found = {word for sentence in sentences for word in sentence}
        return cls((END, UNKNOWN, *sorted(found - {END, UNKNOWN})))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: Sequence[str]) -> list[int]:
        """The words' numbers, `UNKNOWN`'s for those that are not there, and `END`'s at the end."""
        unknown = self.numbers[UNKNOWN]
        return [self.numbers.get(word, unknown) for word in sentence] + [self.numbers[END]]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The words of these numbers."""
        return [self.words[number] for number in numbers]


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences of different lengths, one after the other in one tensor."""

    words: Int[Tensor, " words"]
    lengths: Int[Tensor, " sentences"]

    @classmethod
    def encoded(
        cls, sentences: Iterable[Sequence[str]], vocabulary: Vocabulary, max_length: int | None = None
    ) -> Sentences:
        """Encode sentences; those of more than ``max_length`` words, `END` counted, are left out."""
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length: expected at least 1, got {max_length}")
        numbers = [vocabulary.encode(sentence) for sentence in sentences]
        kept = [line for line in numbers if max_length is None or len(line) <= max_length]
        if len(kept) < len(numbers):
            _log.info(
                "left out %d of %d sentences of over %s words", len(numbers) - len(kept), len(numbers), max_length
            )
        words = torch.tensor([number for line in kept for number in line], dtype=torch.long)
        return cls(words, torch.tensor([len(line) for line in kept], dtype=torch.long))

    def __len__(self) -> int:
        return self.lengths.numel()

    @cached_property
    def starts(self) -> Int[Tensor, " sentences"]:
        """Where each sentence begins in ``words``."""
        return self.lengths.cumsum(0) - self.lengths

    def padded(self, rows: Int[Tensor, " batch"]) -> tuple[Int[Tensor, "batch steps"], Int[Tensor, " batch"]]:
        """Some sentences side by side, zeros behind the shorter ones, and their lengths."""
        lengths = self.lengths[rows]
        steps = torch.arange(int(lengths.max()) if len(rows) else 0)
        inside = steps < lengths.unsqueeze(1)
        places = torch.where(inside, self.starts[rows].unsqueeze(1) + steps, 0)
        return torch.where(inside, self.words[places], 0), lengths


@dataclass(frozen=True, eq=False)
class Corpus:
    """A training, a validation and a test text over the training text's vocabulary."""

    vocabulary: Vocabulary
    train: Sentences
    validation: Sentences
    test: Sentences

    @classmethod
    def read(cls, train: Path, validation: Path, test: Path, *, max_length: int | None = 30) -> Corpus:
        """From three text files: one sentence a line, words separated by blanks.

        Args:
            train: its words, `END` and `UNKNOWN` are the vocabulary; of sentences that are left out, too.
            validation: words that the training text has not are read as `UNKNOWN`.
            test: likewise.
            max_length: longer sentences (`END` counted) are left out.
        """
        texts = [read_lines(path) for path in (train, validation, test)]
        vocabulary = Vocabulary.of(texts[0])
        for path, text in zip((validation, test), texts[1:], strict=True):
            unseen = sum(word not in vocabulary.numbers for line in text for word in line)
            if unseen:
                _log.info("%s: %d words that the training text has not, read as %s", path, unseen, UNKNOWN)
        parts = [Sentences.encoded(text, vocabulary, max_length) for text in texts]
        for path, part in zip((train, validation, test), parts, strict=True):
            if not len(part):
                raise ValueError(
                    f"{path}: expected a sentence of at most {max_length} words, {END} counted; found none"
                )
        return cls(vocabulary, *parts)


def read_lines(path: Path) -> list[list[str]]:
    """The words of each line that is not blank.

    Raises:
        ModelFileError: the file is no UTF-8 text (with the line), or it has no words.
    """
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            words = line.decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise ModelFileError(path, number, f"expected UTF-8 text, found byte {line[error.start]:#04x}") from None
        if words:
            lines.append(words)
    if not lines:
        raise ModelFileError(path, 1, "expected sentences, one a line; found no words")
    return lines


class SentenceBatches:
    """Minibatches of sentences, as an iterable that can be gone through again.

    Of equal length: integer tensors ``[batch, steps]``. Padded: pairs (words ``[batch, steps]``, lengths ``[batch]``)
    of sentences of about the same length.

    Args:
        sentences: what to take them from.
        size: most sentences in a minibatch.
        equal_length: never mix lengths; some minibatches are then smaller.
        shuffle: a new order for each epoch (see `set_epoch`), of the sentences and of the minibatches.
        seed: what the orders are drawn from.
    """

    def __init__(
        self, sentences: Sentences, size: int = 32, *, equal_length: bool = True, shuffle: bool = False, seed: int = 0
    ) -> None:
        if size < 1:
            raise ValueError(f"size: expected at least 1, got {size}")
        self.sentences = sentences
        self.size = size
        self.equal_length = equal_length
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, number: int) -> None:
        """The order depends on the seed and this number alone."""
        self.epoch = number

    def rows(self) -> list[Int[Tensor, " batch"]]:
        """Which sentences stand in each minibatch of this epoch."""
        count = len(self.sentences)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        order = order[torch.argsort(self.sentences.lengths[order], stable=True)]
        if self.equal_length:
            sizes = torch.unique_consecutive(self.sentences.lengths[order], return_counts=True)[1].tolist()
            batches = [rows for group in order.split(sizes) for rows in group.split(self.size)]
        else:
            batches = list(order.split(self.size))
        if self.shuffle:
            batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        return batches

    def __len__(self) -> int:
        if not self.equal_length:
            return -(-len(self.sentences) // self.size)
        counts = torch.unique(self.sentences.lengths, return_counts=True)[1]
        return int((-(-counts // self.size)).sum())

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        for rows in self.rows():
            words, lengths = self.sentences.padded(rows)
            yield words if self.equal_length else (words, lengths)
