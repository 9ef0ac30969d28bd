"""Fit a network by free energy alone: to one model, to a batch of models, or to a stream of random ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bethenet.beliefs import Beliefs
from bethenet.networks.network import InferenceNetwork
from bethenet.potentials import LogPotentials

ModelSource = Callable[[int], LogPotentials]
"""The models of one step, given the step's number."""


@dataclass(frozen=True)
class FitOptions:
    """How to fit."""

    steps: int = 200
    learning_rate: float = 1e-3
    schedule: str = "constant"
    """``constant``, or ``cosine``: down to zero at the end, after ``warmup`` steps up."""
    warmup: int = 0
    tolerance: float = 0.0
    """A batch member is done when the mean squared change of its node marginals plus that of its factor marginals is
    below this (the paper's rule, with 1e-5, for a fixed batch of models). 0: never."""
    clip: float | None = None
    """Largest norm of the whole gradient."""
    averaging: float = 0.0
    """Decay of the exponential average of the weights that the network ends with; 0: none."""
    time_limit: float | None = None
    """Seconds; one step is taken however short. The schedule follows whichever of steps and time is further gone."""

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule: expected 'constant' or 'cosine', got {self.schedule!r}")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging: expected a decay from 0 to below 1, got {self.averaging}")

    def rate(self, step: int, progress: float) -> float:
        """The learning rate of a step when a share ``progress`` of all work is done."""
        rate = self.learning_rate * min(1.0, (step + 1) / (self.warmup + 1))
        return rate * 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else rate


@dataclass(frozen=True)
class FitResult:
    """What a fit ended with."""

    beliefs: Beliefs
    """Of the last batch; a member that was done early keeps the beliefs it was done with."""
    steps: Int[Tensor, " batch"]
    """How many steps each member took."""
    losses: list[float] = field(repr=False)
    """Mean free energy plus penalty over the batch, every ``RECORD_EVERY`` steps."""
    seconds: float = 0.0


RECORD_EVERY = 10
"""Steps between looks at the loss: each look waits for the device."""


def fit(
    network: InferenceNetwork,
    models: LogPotentials | ModelSource,
    options: FitOptions | None = None,
    *,
    on_step: Callable[[int, float], None] | None = None,
) -> FitResult:
    """Minimise free energy plus penalty over the network's parameters.

    Args:
        network: changed in place.
        models: a fixed batch of models, or a source that gives a batch for every step.
        options: how.
        on_step: called with (step, mean loss) every few steps.
    """
    options = options or FitOptions()
    started = time.perf_counter()
    parameters = list(network.parameters())
    capturable: dict[str, Any] = {"fused": True} if parameters and parameters[0].is_cuda else {}
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, **capturable)
    average = (
        AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(options.averaging)) if options.averaging else None
    )
    record = _Record(options.tolerance)
    losses: list[float] = []
    for step in range(options.steps):
        elapsed = (time.perf_counter() - started) / options.time_limit if options.time_limit else 0.0
        if step and elapsed >= 1:  # the first step is always taken: something must come back
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step, min(1.0, max(elapsed, step / options.steps)))
        loss, beliefs = network.loss(models if isinstance(models, LogPotentials) else models(step))
        optimizer.zero_grad(set_to_none=True)
        # a fixed batch is many fits at once; of a stream, graphs of all sizes count the same
        total = loss.sum() if isinstance(models, LogPotentials) else loss.mean() / beliefs.graph.num_variables
        total.backward()
        if options.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, options.clip)
        optimizer.step()
        if average is not None:
            average.update_parameters(network)
        record.update(beliefs.detach())
        if step % RECORD_EVERY == 0 or step + 1 == options.steps:
            losses.append(float(loss.detach().mean()))
            if on_step is not None:
                on_step(step, losses[-1])
            if record.finished():
                break
    if average is not None:
        network.load_state_dict(average.module.state_dict())
    return FitResult(*record.result(), losses, time.perf_counter() - started)


class _Record:
    """The beliefs of every member at the step at which it was done; the last ones where nothing ends early."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.count = 0
        self.beliefs: Beliefs | None = None
        self.active: Tensor | None = None
        self.taken: Tensor | None = None

    def update(self, beliefs: Beliefs) -> None:
        self.count += 1
        old, self.beliefs = self.beliefs, beliefs
        if not self.tolerance:
            return
        if old is None or self.active is None or self.taken is None:
            self.active = torch.ones(beliefs.batch_size, dtype=torch.bool, device=beliefs.graph.device)
            self.taken = self.active.long()
            return
        moved = self.active
        self.taken = self.taken + moved
        self.active = moved & (_mean_squared_change(old, beliefs) >= self.tolerance)
        tables = [
            torch.where(moved.reshape(-1, *[1] * (new.dim() - 1)), new, before)
            for new, before in zip(beliefs.log_tables, old.log_tables, strict=True)
        ]
        self.beliefs = Beliefs(beliefs.regions, tables)

    def finished(self) -> bool:
        return self.active is not None and not bool(self.active.any())

    def result(self) -> tuple[Beliefs, Tensor]:
        if self.beliefs is None:
            raise ValueError("expected at least one step to fit, got none")
        everyone = torch.full((self.beliefs.batch_size,), self.count, device=self.beliefs.graph.device)
        return self.beliefs, everyone if self.taken is None else self.taken


def _mean_squared_change(old: Beliefs, new: Beliefs) -> Float[Tensor, " batch"]:
    """Node marginals and factor marginals (those of several variables), each averaged over all their entries."""

    def mean(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        squares = [(a.exp() - b.exp()).square().flatten(1) for a, b in pairs]
        return torch.cat(squares, dim=1).mean(1) if squares else torch.zeros(new.batch_size, device=new.graph.device)

    nodes = list(zip(old.node_log_tables, new.node_log_tables, strict=True))
    regions = [
        (a, b)
        for a, b, group in zip(old.log_tables, new.log_tables, new.regions.groups, strict=True)
        if len(group.table_shape) > 1
    ]
    return mean(nodes) + mean(regions)
