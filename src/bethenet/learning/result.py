"""`TrainingResult`: how a run went."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bethenet.learning.metrics import Record


class TrainingStatus(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    """All epochs or steps were done."""
    STOPPED_EARLY = "stopped early"
    """The metric had stopped improving."""
    TIME_LIMIT = "time limit"
    DIVERGED = "diverged"
    """Something was not finite, or the objective fell below its bound. The modules hold the last good weights."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run went. The objective's modules hold the weights of the best evaluation if there was a metric to choose
    by, else the last (averaged) ones.
    """

    status: TrainingStatus
    epochs: int
    steps: int
    seconds: float
    """Of training; evaluation and checkpoints are not counted."""
    history: tuple[Record, ...]
    """One record an epoch: means over its training minibatches, ``validation_...`` and the evaluators' figures."""
    best: Record | None
    """The record of the best evaluation."""
