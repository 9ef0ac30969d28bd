"""The data sets of the paper's experiments, and how to bring one's own."""

from bethenet.data.digits import clean_digits, paper_digits
from bethenet.data.images import BinaryImages, binarise
from bethenet.data.ptb import read_ptb, shipped_text
from bethenet.data.text import Corpus, SentenceBatches, Sentences, Vocabulary

__all__ = [
    "BinaryImages",
    "Corpus",
    "SentenceBatches",
    "Sentences",
    "Vocabulary",
    "binarise",
    "clean_digits",
    "paper_digits",
    "read_ptb",
    "shipped_text",
]
