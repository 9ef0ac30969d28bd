"""How long epochs take."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from bethenet.learning.metrics import Record


class EpochClock:
    """A callback: how long each epoch of a run took, what stands between them counted; the device is waited for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.ends: list[tuple[float, float]] = []

    def __call__(self, record: Record) -> None:
        """Note the time."""
        if record["kind"] in ("start", "epoch"):
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)
            self.ends.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> list[tuple[float, float]]:
        """Of each epoch, by the clock and of all processors."""
        return [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(self.ends)]
