"""Which evaluation was the best, and how long ago."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bethenet.learning.metrics import Record


class Selection:
    """The best weights so far by one figure of an epoch's record.

    Args:
        metric: the figure's name; nothing is ever selected if ``None``.
        maximize: whether larger is better.
        patience: how many evaluations in a row may pass without a better one.
    """

    def __init__(self, metric: str | None, maximize: bool, patience: int | None) -> None:
        if patience is not None and metric is None:
            raise ValueError("patience needs a metric: give validation data, or name an evaluator's figure")
        self.metric = metric
        self.maximize = maximize
        self.patience = patience
        self.record: Record | None = None
        self.weights: dict[str, Tensor] = {}
        self.stale = 0

    def consider(self, record: Record, weights: Mapping[str, Tensor]) -> bool:
        """Whether this evaluation is the best so far; if so, its weights are copied."""
        if self.metric is None:
            return False
        if self.metric not in record:
            raise ValueError(f"metric: {self.metric!r} is not among the figures of an epoch: {sorted(record)}")
        value = record[self.metric]
        best = -math.inf if self.record is None else self._sign * self.record[self.metric]
        if not self._sign * value > best:
            self.stale += 1
            return False
        self.record, self.stale = record, 0
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}
        return True

    @property
    def exhausted(self) -> bool:
        """Whether patience is at its end."""
        return self.patience is not None and self.stale >= self.patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the weights."""
        return {"record": self.record, "stale": self.stale}

    def load(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self.record, self.stale, self.weights = state["record"], state["stale"], dict(weights)

    @property
    def _sign(self) -> int:
        return 1 if self.maximize else -1
