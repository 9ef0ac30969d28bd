"""The data sets of the paper's experiments, and how to bring one's own."""

from bethenet.data.digits import clean_digits, paper_digits
from bethenet.data.images import BinaryImages, binarise

__all__ = ["BinaryImages", "binarise", "clean_digits", "paper_digits"]
