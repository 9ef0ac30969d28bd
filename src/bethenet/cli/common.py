"""What the commands share: reading models with evidence, writing results, turning errors into exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path

import torch
import typer
from rich.console import Console

from bethenet.errors import MemoryLimitError
from bethenet.formats import read_evidence, read_model
from bethenet.formats.text import is_special, write_text
from bethenet.potentials import LogPotentials


class ExitCode(IntEnum):
    """How a command ends."""

    DONE = 0
    WRONG_INPUT = 2
    MEMORY = 3
    NOT_CONVERGED = 4


class Device(StrEnum):
    """Where to compute."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """Floating-point type."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Failure(Exception):
    """A command ends here, with an exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.WRONG_INPUT) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def reporting() -> Iterator[None]:
    """Turn what a user can run into into one line on stderr and an exit code."""
    try:
        yield
        return
    except Failure as error:
        message, code = str(error), error.code
    except (MemoryLimitError, MemoryError, torch.OutOfMemoryError) as error:
        message, code = str(error) or "not enough memory", ExitCode.MEMORY
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        message, code = "not enough memory: " + str(error).partition("memory: ")[2], ExitCode.MEMORY
    except BrokenPipeError:
        # whoever read our output has gone; keep the interpreter from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.DONE) from None
    except OSError as error:
        message, code = f"{error.filename or 'output'}: {error.strerror or error}", ExitCode.WRONG_INPUT
    except ValueError as error:
        message, code = str(error), ExitCode.WRONG_INPUT
    say(f"error: {' '.join(message.split())}")
    raise typer.Exit(int(code))


def say(message: str) -> None:
    """Tell the user something, on stderr."""
    Console(stderr=True).print(message, style="bold red" if message.startswith("error") else "", soft_wrap=True,
                               markup=False, highlight=False)  # fmt: skip


def check_device(device: Device) -> None:
    """Refuse a device that is not there."""
    if device is Device.CUDA and not torch.cuda.is_available():
        raise Failure("--device cuda: no CUDA device is available here")


def load(model: Path, evidence: Path | None, device: Device, dtype: Precision) -> LogPotentials:
    """A model with its evidence, where and as it is to be computed with."""
    check_device(device)
    potentials = read_model(model)
    if evidence is not None:
        potentials = potentials.clamp(read_evidence(evidence, potentials.graph))
    return potentials.to(device=device.value, dtype=getattr(torch, dtype.value))


def generator_for(seed: int | None, device: str = "cpu") -> torch.Generator:
    """A generator that is seeded as asked, else by chance."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def check_output(output: Path | None) -> None:
    """Refuse a file that cannot be written before the work for it is done."""
    if output is None:
        return
    if output.is_dir():
        raise Failure(f"{output}: expected a file to write, found a directory")
    if is_special(output):
        return
    folder = Path(os.path.realpath(output)).parent
    if not folder.is_dir():
        raise Failure(f"{output}: there is no directory {folder}")
    if not os.access(folder, os.W_OK):
        raise Failure(f"{output}: the directory {folder} cannot be written to")


def emit(text: str, output: Path | None) -> None:
    """Write a result to a file or to stdout."""
    if output is None:
        print(text, end="", flush=True)
    else:
        write_text(output, text)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """``8GiB``, ``500M`` or a plain number, as bytes; the units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"expected a positive number of bytes such as 8GiB or 500MiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])
