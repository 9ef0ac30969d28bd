"""Model files (UAI, libDAI; both perhaps gzipped) and other libraries' models (networkx, pgmpy)."""

from __future__ import annotations

import re
from pathlib import Path

from bethenet.formats.libdai import parse_libdai, read_libdai, write_libdai
from bethenet.formats.networkx import to_networkx
from bethenet.formats.pgmpy import from_pgmpy, to_pgmpy
from bethenet.formats.text import read_text
from bethenet.formats.uai import parse_uai, read_evidence, read_uai, write_evidence, write_uai
from bethenet.potentials import LogPotentials

__all__ = [
    "from_pgmpy",
    "read_evidence",
    "read_libdai",
    "read_model",
    "read_uai",
    "to_networkx",
    "to_pgmpy",
    "write_evidence",
    "write_libdai",
    "write_model",
    "write_uai",
]


def read_model(path: str | Path) -> LogPotentials:
    """A model from a UAI or libDAI file, as float64; which of them, its name says, or else how it begins.

    Raises:
        ModelFileError: the file does not hold what its format promises; file and line are named.
        OSError: the file cannot be read.
    """
    kind, text = _suffix(path), read_text(path)  # once: it may be a pipe
    if kind not in (".uai", ".fg"):
        # a UAI file begins with a word, a libDAI file with a number
        kind = ".fg" if re.match(rb"\s*\d", text) else ".uai"
    return parse_libdai(path, text) if kind == ".fg" else parse_uai(path, text)


def write_model(potentials: LogPotentials, path: str | Path) -> None:
    """Write a model as its name says: ``.uai`` or ``.fg``, then perhaps ``.gz``. The file is there whole or not at all.

    Raises:
        ValueError: another name, a batch of several models, or a log-potential that no number stands for.
        OSError: the file cannot be written.
    """
    kind = _suffix(path)
    if kind not in (".uai", ".fg"):
        raise ValueError(f"{path}: expected a name that ends in .uai, .fg, .uai.gz or .fg.gz")
    (write_libdai if kind == ".fg" else write_uai)(potentials, path)


def _suffix(path: str | Path) -> str:
    name = Path(path)
    return (Path(name.stem) if name.suffix.lower() == ".gz" else name).suffix.lower()
