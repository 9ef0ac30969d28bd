"""What the text formats have in common: bounded reading, numbers with their line, atomic writing."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from bethenet.errors import ModelFileError
from bethenet.formats.decimals import LONGEST, Floats, Integers, read_logarithms, read_whole_numbers

MAX_BYTES = 2**28
"""Bytes of text (256 MiB) that are read at most, whatever a compressed file would expand to."""

_BLOCK = 2**20
_CHUNK = 2**22
_GZIP = b"\x1f\x8b"
_TOKEN = re.compile(rb"[^\s]+")
_SPACE = re.compile(rb"\s")
_IS_SPACE = np.array([bytes([byte]).isspace() for byte in range(256)])
_COMMENT = re.compile(rb"#[^\r\n]*")


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """A file's text without its comments (from ``#`` to the end of the line), decompressed if it is gzip's.

    Raises:
        ModelFileError: damaged gzip data, or more than ``max_bytes`` of text.
        OSError: the file cannot be read.
    """
    blocks, size = [], 0
    with open(path, "rb") as file:
        compressed = file.peek(2)[:2] == _GZIP
        stream: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=file) if compressed else file
        try:
            while size <= max_bytes and (block := stream.read(_BLOCK)):
                blocks.append(block)
                size += len(block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ModelFileError(path, 1, f"expected gzip data, found it damaged ({error})") from None
    if size > max_bytes:
        lines = sum(block.count(b"\n") for block in blocks)
        raise ModelFileError(path, lines + 1, f"expected at most {max_bytes} bytes of text, found more")
    text = b"".join(blocks).removeprefix(b"\xef\xbb\xbf")
    return b"".join(_without_comments(text)) if b"#" in text else text


def _without_comments(text: bytes) -> Iterator[bytes]:
    """Some lines after the other, as a substitution takes much memory for each comment it finds."""
    begin = 0
    while begin < len(text):
        newline = text.find(b"\n", begin + _BLOCK)
        end = len(text) if newline < 0 else newline
        yield _COMMENT.sub(b"", text[begin:end])
        begin = end


class Numbers:
    """The numbers in a text, in order, each with its logarithm and (where there is something to say about it) its line.

    Args:
        path: the file's name, for error messages.
        text: what stands in it.
        start: where in the text the numbers begin.
    """

    def __init__(self, path: str | Path, text: bytes, start: int = 0) -> None:
        self.path = path
        self._text = text
        self._start = start
        self._chunks = _split_into_chunks(text, start)
        self._first = [0, *itertools.accumulate(_count_tokens(text[begin:end]) for begin, end in self._chunks)]
        self._chunks_read = 0
        self.values: Floats = np.empty(self._first[-1])
        """Known up to ``numbers_read``."""
        self.logarithms: Floats = np.empty(self._first[-1])
        """Known up to ``numbers_read``."""

    def __len__(self) -> int:
        return self.values.size

    @property
    def numbers_read(self) -> int:
        """How many numbers have been read so far: a file is read no further than its own promises ask for."""
        return self._first[self._chunks_read]

    def read_to(self, position: int) -> int:
        """Read the number at a position, if there is one, and all before it; how many have then been read."""
        while self.numbers_read <= position and self._chunks_read < len(self._chunks):
            begin, end = self._chunks[self._chunks_read]
            place = slice(self.numbers_read, self._first[self._chunks_read + 1])
            self.values[place], self.logarithms[place] = self._read(begin, end)
            self._chunks_read += 1
        return self.numbers_read

    def at(self, positions: Integers) -> Floats:
        """The numbers at positions (any shape) that exist."""
        if positions.size:
            self.read_to(int(positions.max()))
        return self.values[positions]

    def whole(self, position: int, what: str, least: int = 0, most: int | None = None) -> int:
        """The whole number at a position, or an error that says ``what`` was expected there."""
        if position >= len(self):
            raise self.error(position, f"expected {what}, found the end of the file")
        return int(self.wholes(np.array([position]), what, least, most)[0])

    def wholes(self, positions: Integers, what: str, least: int = 0, most: int | None = None) -> Integers:
        """The whole numbers at positions (any shape) that exist."""
        found = self.at(positions)
        wrong = ~((found >= least) & (found <= (2**53 if most is None else most)) & (found == np.floor(found)))
        if wrong.any():
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            position = int(positions[wrong].min())
            raise self.error(position, f"expected {what}, a whole number {limits}, found {self.token(position)}")
        result: Integers = found.astype(np.int64)
        return result

    def require(self, position: int, count: float, what: str) -> None:
        """Refuse a file in which fewer than ``count`` numbers stand from ``position`` on."""
        if len(self) - position < count:
            left = max(len(self) - position, 0)
            raise self.error(len(self), f"expected {count:.0f} {what}, found {left} before the end of the file")

    def require_end(self, position: int) -> None:
        """Refuse a file in which anything stands from ``position`` on."""
        if position < len(self):
            raise self.error(position, f"expected the end of the file, found {self.token(position)}")

    def require_potentials(self, positions: Integers | slice) -> Floats:
        """The logarithms at positions, where every number must be non-negative and finite."""
        if isinstance(positions, slice):
            self.read_to(len(self) - 1)
        else:
            self.at(positions)
        result: Floats = self.logarithms[positions]
        wrong = ~(result < np.inf)
        if wrong.any():
            position = int(np.arange(len(self))[positions][wrong].min())
            raise self.error(position, f"expected a finite number of at least 0, found {self.token(position)}")
        return result

    def token(self, position: int) -> str:
        """What stands at a position, fit to be printed."""
        begin, end = self._span(position)
        return _printable(self._text[begin:end])

    def error(self, position: int, problem: str) -> ModelFileError:
        """An error at a position (the last line, where it is beyond the end)."""
        offset = self._span(position)[0] if position < len(self) else len(self._text.rstrip())
        return ModelFileError(self.path, line_of(self._text, offset), problem)

    def _read(self, begin: int, end: int) -> tuple[Floats, Floats]:
        """Numbers and logarithms of a chunk."""
        starts, lengths = _token_spans(np.frombuffer(self._text, np.uint8, end - begin, begin))
        try:
            if lengths.max(initial=0) <= LONGEST and self._text.find(b"_", begin, end) < 0:  # Python reads 1_0 as 10
                chunk = self._text[begin:end]
                values, whole = read_whole_numbers(chunk, starts, lengths)
                tokens = list(itertools.compress(chunk.split(), (~whole).tolist()))
                values[~whole] = list(map(float, tokens))
                with np.errstate(divide="ignore", invalid="ignore"):
                    logarithms: Floats = np.log(values)
                logarithms[~whole] = read_logarithms(tokens, values[~whole], lengths[~whole])
                return values, logarithms
        except ValueError:
            pass
        for match in _TOKEN.finditer(self._text, begin):
            token, line = match[0], line_of(self._text, match.start())
            if len(token) > LONGEST:
                raise ModelFileError(
                    self.path, line, f"expected a number of at most {LONGEST} characters, found one of {len(token)}"
                )
            if not _is_number(token):
                raise ModelFileError(self.path, line, f"expected a number, found {_printable(token)}")
        raise AssertionError("a chunk that is no array of numbers holds a token that is no number")

    def _span(self, position: int) -> tuple[int, int]:
        chunk = int(np.searchsorted(self._first, position, side="right")) - 1
        begin, _ = self._chunks[chunk]
        for number, match in enumerate(_TOKEN.finditer(self._text, begin), self._first[chunk]):
            if number == position:
                return match.span()
        raise IndexError(position)


def _split_into_chunks(text: bytes, begin: int) -> list[tuple[int, int]]:
    """Spans of a few million bytes that end between two tokens."""
    chunks = []
    while begin < len(text):
        space = _SPACE.search(text, begin + _CHUNK)
        end = space.start() if space else len(text)
        chunks.append((begin, end))
        begin = end
    return chunks


def _count_tokens(text: bytes) -> int:
    white = np.concatenate([[True], _IS_SPACE[np.frombuffer(text, dtype=np.uint8)]])
    return int(np.count_nonzero(white[:-1] & ~white[1:]))


def _token_spans(characters: npt.NDArray[np.uint8]) -> tuple[Integers, Integers]:
    """(where each token begins, how long it is)."""
    white = np.concatenate([[True], _IS_SPACE[characters], [True]])
    edges = np.flatnonzero(white[1:] != white[:-1])
    return edges[::2], edges[1::2] - edges[::2]


def line_of(text: bytes, offset: int) -> int:
    """The number, from 1, of the line that a byte stands in."""
    return text.count(b"\n", 0, offset) + 1


def first_word(path: str | Path, text: bytes) -> tuple[str, int, int]:
    """The first word of a text, where it ends, and its line."""
    match = _TOKEN.search(text)
    if match is None:
        return "", len(text), 1
    return _printable(match[0]), match.end(), line_of(text, match.start())


def _is_number(token: bytes) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return b"_" not in token


def _printable(token: bytes) -> str:
    text = "".join(chr(byte) if 32 < byte < 127 else f"\\x{byte:02x}" for byte in token[:40])
    return f"'{text}...'" if len(token) > 40 else f"'{text}'"


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that it is there whole or not at all; gzip-compressed where its name ends in ``.gz``."""
    data = text.encode()
    write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all: first under another name, which is then changed.

    What is not an ordinary file (``/dev/stdout``, a pipe) is written to directly.
    """
    if is_special(path):
        with open(path, "wb") as file:
            file.write(data)
        return
    target = Path(os.path.realpath(path))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_special(path: str | Path) -> bool:
    """Whether this is there and no ordinary file: a device, a pipe, a directory."""
    # the path as it was given: what /dev/fd/N points to need not have a name
    return os.path.exists(path) and not os.path.isfile(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
