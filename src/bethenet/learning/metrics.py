"""Running means kept on the device, and records as JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]


class RunningMean:
    """Weighted means of named figures, added up on the device in float64 and read at once.

    A figure with several entries, one for each of several models, counts as their mean.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, float] = {}

    def add(self, values: Mapping[str, Tensor], weight: float) -> None:
        """Count in figures, each with this weight."""
        for name, value in values.items():
            value = value.detach()
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(value, dtype=torch.float64)
                self.weights[name] = 0.0
            self.sums[name] = torch.add(self.sums[name], value, alpha=weight)
            self.weights[name] += weight

    def absorb(self, other: RunningMean) -> None:
        """Count in all that ``other`` has counted."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.weights[name] = self.weights.get(name, 0.0) + other.weights[name]

    def read(self) -> dict[str, float]:
        """The means. Waits for the device, once."""
        if not self.sums:
            return {}
        values = torch.stack([value.mean() for value in self.sums.values()]).tolist()
        return {name: value / self.weights[name] for name, value in zip(self.sums, values, strict=True)}

    def reset(self) -> None:
        """Start again from nothing."""
        self.sums.clear()
        self.weights.clear()


class MetricsFile:
    """Records appended to a file, one JSON object a line. Each is one write, so no reader meets half a line.

    What JSON has no number for (NaN, infinities) becomes ``null``.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        """Continue a file after its first ``size`` bytes; what stands behind them is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        with path.open("ab") as file:
            file.truncate(min(size, file.tell()))

    def append(self, record: Record) -> None:
        """Add a line."""
        line = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.path.stat().st_size


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
