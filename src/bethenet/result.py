"""`InferenceResult`: what every engine returns, and `Status`: how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs


class Status(StrEnum):
    """How an engine ended, from best to worst."""

    CONVERGED = "converged"
    """The residual is within the tolerance, and every number is finite (or an honest ``-inf``)."""
    PREDICTED = "predicted"
    """A network's output in one pass: nothing was iterated, so nothing can have converged."""
    ITERATION_LIMIT = "iteration limit"
    """The iterations were used up while the residual was still shrinking."""
    TIME_LIMIT = "time limit"
    """The time was used up."""
    OSCILLATING = "oscillating"
    """The iterations were used up and the residual had long stopped shrinking."""
    DIVERGED = "diverged"
    """Something became NaN or infinite that must not; the last finite state is returned."""


_BADNESS = {status: badness for badness, status in enumerate(Status)}


@dataclass(frozen=True)
class InferenceResult:
    """Beliefs and how they were reached. Per-member tensors are ``[batch]``."""

    method: str
    beliefs: Beliefs
    log_z: Float[Tensor, " batch"]
    """(Approximate) log partition function in nats, evidence counted."""
    member_status: tuple[Status, ...]
    iterations: Int[Tensor, " batch"]
    residual: Float[Tensor, " batch"]
    """The engine's own convergence measure at the end (0 for exact inference)."""
    seconds: float
    state: Any = field(default=None, repr=False)
    """What the engine can be started again from."""

    @property
    def status(self) -> Status:
        """The worst status of any batch member."""
        return worst(self.member_status)

    @property
    def converged(self) -> Bool[Tensor, " batch"]:
        """Which batch members converged."""
        return torch.tensor([status is Status.CONVERGED for status in self.member_status])


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of several statuses; an empty batch has converged."""
    return max(statuses, key=_BADNESS.__getitem__, default=Status.CONVERGED)


def judged(statuses: Sequence[Status], log_z: Float[Tensor, " batch"]) -> tuple[Status, ...]:
    """The statuses, but diverged wherever log Z is NaN or plus infinity, as only a wrong input makes it."""
    wrong = torch.isnan(log_z) | (log_z == math.inf)
    if not bool(wrong.any()):
        return tuple(statuses)
    return tuple(Status.DIVERGED if bad else status for status, bad in zip(statuses, wrong.tolist(), strict=True))
