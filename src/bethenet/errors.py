"""The errors a user can meet, each with a name of its own so that callers can tell them apart."""

from __future__ import annotations

from pathlib import Path


class ImpossibleEvidenceError(ValueError):
    """The evidence (or the model itself) has probability zero: there is no distribution to infer."""


class MemoryLimitError(MemoryError):
    """An exact computation was refused before it allocated anything.

    Attributes:
        bytes_needed: the predicted peak.
        bytes_allowed: the limit it was compared with.
        width: the width of the elimination order.
    """

    def __init__(self, message: str, *, bytes_needed: int, bytes_allowed: int, width: int) -> None:
        super().__init__(message)
        self.bytes_needed = bytes_needed
        self.bytes_allowed = bytes_allowed
        self.width = width


class ModelFileError(ValueError):
    """A file does not hold what its format promises. The message reads ``path:line: expected, found``."""

    def __init__(self, path: str | Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path = str(path)
        self.line = line
