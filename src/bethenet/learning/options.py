"""`TrainerOptions`: everything about a run that is not the objective or the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bethenet.learning.optimization import Averaging, OptimizerOptions


@dataclass(frozen=True)
class TrainerOptions:
    """How to train. At least one of ``epochs``, ``steps`` and ``time_limit`` must be given."""

    epochs: int | None = 10
    steps: int | None = None
    """Minibatches in all."""
    time_limit: float | None = None
    """Seconds of training; evaluation and checkpoints are not counted."""
    batch_size: int | None = 32
    """Samples a minibatch, for data in memory; the last of an epoch may be smaller. ``None``: all at once."""
    shuffle: bool = True
    seed: int = 0
    """Of the data's order, of the objective's generator and of dropout."""
    optimizers: Mapping[str, OptimizerOptions] = field(default_factory=dict)
    """By part ("model", "network", ...); the default options for parts that are not named."""
    averaging: Averaging | None = None
    """Average the weights; evaluation and the finished modules then use the averages."""

    capture: bool = False
    """On a GPU, record a step on minibatches of a shape seen before as a CUDA graph and replay it: small models then
    wait no more for Python. Elsewhere this changes nothing. See `bethenet.learning.capture` for which objectives may
    be; an error tells where it shows that one may not."""

    evaluate_every: int = 1
    """Epochs."""
    evaluation_batch_size: int | None = 1024
    metric: str | None = None
    """The figure of an epoch's record by which the best weights are chosen. If there is validation data, by default
    what the objective is judged by: ``"validation_objective"`` mostly. None otherwise."""
    maximize: bool = False
    """Whether a larger metric is better."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better metric."""

    log_every: int = 100
    """Steps between records of kind "step", and between looks at whether the run has diverged."""
    divergence_below: float | None = None
    """Stop if the mean training objective falls below this bound. 0 suits a likelihood of discrete data, whose true
    value cannot be negative: an approximation that gets there is being exploited. (An untrained network may start
    there.) A figure that is not finite always stops the run."""

    directory: Path | str | None = None
    """Where ``metrics.jsonl``, the checkpoints and ``best.safetensors`` go; nothing is written if ``None``."""
    checkpoint_every: int = 1
    """Epochs."""
    checkpoint_steps: int | None = None
    """Also save after every so many steps."""
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None and self.time_limit is None:
            raise ValueError("expected at least one of epochs, steps and time_limit, got none")
        for name in ("epochs", "steps"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        positive = ("evaluate_every", "patience", "log_every", "checkpoint_every", "checkpoint_steps")
        for name in (*positive, "keep_checkpoints", "time_limit"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
