"""Running an experiment: cells that are computed once, kept as JSON, and skipped when a stopped run goes on.

An experiment is a list of cells (one method on one kind of model, say) and a function that turns their figures into
tables and plots. A cell's figures are written whole or not at all, together with the settings that they depend on; a
run with ``resume`` takes over every cell whose settings are still the same. A run of some of the cells (``only``) takes
over whatever else is finished and says what is missing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import bethenet

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a user can say about a run."""

    output: Path
    quick: bool = False
    """Smaller in every direction, done in minutes on two cores; says nothing about the real figures."""
    seeds: int | None = None
    """How many random models or repetitions; the experiment's own number by default."""
    device: str = "cpu"
    resume: bool = False
    data: Path | None = None
    """A folder with the user's data, for experiments that need one."""
    only: tuple[str, ...] = ()
    """Keys of the cells to compute, as shell patterns; all by default."""
    tell: Callable[[str], None] = field(default=lambda reached: None, repr=False, compare=False)
    """Shows how far the running cell is."""

    def selects(self, cell: Cell) -> bool:
        """Whether a cell is to be computed if it is not there."""
        return not self.only or any(fnmatch(cell.key, pattern) for pattern in self.only)


@dataclass(frozen=True)
class Cell:
    """One piece of an experiment."""

    key: str
    """A file name without ending."""
    settings: Mapping[str, Any]
    """All that its figures depend on; plain JSON."""
    run: Callable[[], dict[str, Any]] = field(repr=False)
    """Computes the figures; plain JSON."""


@dataclass(frozen=True)
class Experiment:
    """Something to reproduce."""

    name: str
    title: str
    cells: Callable[[Settings], list[Cell]]
    report: Callable[[Settings, dict[str, dict[str, Any]]], list[Path]]
    """Writes tables and plots from the figures of the cells by key; says which files a reader should open."""
    partial: bool = False
    """Whether the report can be written while cells are missing, and then says so."""


def run_experiment(experiment: Experiment, settings: Settings) -> list[Path]:
    """Run what is missing, then report. Returns the files to open, the JSON of all figures among them.

    Raises:
        ValueError: ``settings.only`` names no cell.
    """
    display = Display(experiment.name)
    cells = experiment.cells(replace(settings, tell=display.tell))
    if not any(settings.selects(cell) for cell in cells):
        keys = ", ".join(cell.key for cell in cells)
        raise ValueError(f"only: expected patterns of some of {keys}; got {', '.join(settings.only)}")
    settings.output.mkdir(parents=True, exist_ok=True)  # what cannot be a folder is named as the user wrote it
    folder = settings.output / "cells" / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, Any]] = {}
    with display.over(cells):
        for cell in cells:
            display.begin(cell)
            path, chosen = folder / f"{cell.key}.json", settings.selects(cell)
            found = _finished(cell, path) if settings.resume or not chosen else None
            if found is None and chosen:
                found = _compute(cell, path, settings)
            if found is not None:
                figures[cell.key] = found
            display.end()
    missing = [cell.key for cell in cells if cell.key not in figures]
    record = settings.output / f"{experiment.name}.json"
    content = {"experiment": experiment.name, "title": experiment.title, "quick": settings.quick}
    write_json(record, {**content, "missing": missing, "cells": figures})
    if missing and not experiment.partial:
        logger.warning("%s: no report while cells are missing: %s", experiment.name, ", ".join(missing))
        return [record]
    return [*experiment.report(settings, figures), record]


def _identity(cell: Cell) -> dict[str, Any]:
    """By which finished figures are recognised."""
    return {"settings": dict(cell.settings), "version": bethenet.__version__}


def _finished(cell: Cell, path: Path) -> dict[str, Any] | None:
    """The figures that an earlier run wrote for the same settings."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    # as JSON gives it back: a tuple is a list there
    wanted = json.loads(json.dumps(_identity(cell)))
    return kept if all(kept.get(name) == value for name, value in wanted.items()) else None


def _compute(cell: Cell, path: Path, settings: Settings) -> dict[str, Any]:
    started = time.perf_counter()
    computed = cell.run()
    record = {
        **_identity(cell),
        **computed,
        "seconds": time.perf_counter() - started,
        "environment": environment(settings.device),
    }
    write_json(path, record)
    return record


def progress() -> Progress:
    """A progress bar on stderr; silent where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Display:
    """The progress bar of an experiment: how many cells are done, which one is computed, and how far that is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = ""
        self.bar = progress()
        self.task = self.bar.add_task(name)

    def over(self, cells: Sequence[Cell]) -> Progress:
        """The bar, to be shown while ``cells`` are computed."""
        self.bar.update(self.task, total=len(cells))
        return self.bar

    def begin(self, cell: Cell) -> None:
        """Say which cell it is."""
        self.key = cell.key
        self.bar.update(self.task, description=f"{self.name}: {self.key}")

    def tell(self, reached: str) -> None:
        """Say how far it is."""
        self.bar.update(self.task, description=f"{self.name}: {self.key}, {reached}")

    def end(self) -> None:
        """Count it."""
        self.bar.advance(self.task)


def environment(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "bethenet": bethenet.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all; non-finite numbers become null."""
    write_text(path, json.dumps(_finite(content), indent=1) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; the first column to the left, the others to the right."""
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + "|".join([":--", *["--:"] * (len(names) - 1)]) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def mean_and_error(values: Iterable[float | None]) -> tuple[float, float]:
    """Mean and standard error (0 for a single value) of what is not missing; NaN where nothing is there."""
    numbers = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if numbers.numel() == 0:
        return math.nan, math.nan
    error = numbers.std().item() / math.sqrt(numbers.numel()) if numbers.numel() > 1 else 0.0
    return numbers.mean().item(), error


def with_error(values: Sequence[float | None], digits: int = 2) -> str:
    """Mean and standard error as text: a single value without one, ``-`` where nothing is there."""
    if all(value is None for value in values):
        return "-"
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"
