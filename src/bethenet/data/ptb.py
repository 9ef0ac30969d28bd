"""The Penn Treebank text of section 4.3, from a folder of the user's; and a small text that is shipped.

The text (Mikolov's preprocessing) may not be shipped. `read_ptb` reads it where the user has it.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from bethenet.data.text import Corpus

SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
"""Of the three files of Mikolov's Penn Treebank."""

MAX_LENGTH = 30
"""Words of the longest sentence of the paper's experiment, the end of the sentence counted."""

_log = logging.getLogger(__name__)


def read_ptb(folder: str | Path, *, max_length: int | None = MAX_LENGTH) -> Corpus:
    """Read ``train.txt``, ``valid.txt`` and ``test.txt`` (or ``ptb.train.txt`` and so on) from a folder.

    Files other than the Penn Treebank's are read all the same; a warning is logged, since figures are then not to be
    compared with the paper's.

    Args:
        folder: where the three files are.
        max_length: longer sentences (the end counted) are left out.

    Raises:
        FileNotFoundError: a file is missing; the names that were looked for are said.
        ModelFileError: a file is no text; with file and line.
    """
    paths = [find(Path(folder), split) for split in SHA256]
    for path, (split, expected) in zip(paths, SHA256.items(), strict=True):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            _log.warning(
                "%s is not the Penn Treebank's %s text: its SHA-256 is %s, expected %s", path, split, digest, expected
            )
    return Corpus.read(*paths, max_length=max_length)


def shipped_text(*, max_length: int | None = MAX_LENGTH) -> Corpus:
    """A small text from a random grammar, for tests and quick runs: see ``toy_grammar.py``, which wrote it."""
    folder = Path(__file__).parent / "toy_text"
    return Corpus.read(*(find(folder, split) for split in SHA256), max_length=max_length)


def find(folder: Path, split: str) -> Path:
    """The file of a split under either of its names."""
    names = (f"{split}.txt", f"ptb.{split}.txt")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: expected a file {names[0]} or {names[1]}, found neither")
