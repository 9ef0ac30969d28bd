"""Optimisers of the parts, learning-rate schedules, and averages of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rate.

    How much of a run is done goes by its steps; only if their number cannot be told beforehand (a time limit alone, or
    epochs of unknown length) by the clock, and then the numbers depend on the machine.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls from 1 at the start to ``final`` at the end of the run."""
    warmup: int = 0
    """Steps over which a further factor first rises linearly to 1."""
    final: float = 0.0
    """Where it ends."""

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"kind: expected 'constant', 'linear' or 'cosine', got {self.kind!r}")
        if self.warmup < 0:
            raise ValueError(f"warmup: expected at least 0 steps, got {self.warmup}")

    def factor(self, step: int, progress: float) -> float:
        """The factor at ``step`` (from 0), when a share ``progress`` of the run is done."""
        rise = min(1.0, (step + 1) / (self.warmup + 1))
        if self.kind == "constant":
            return rise
        progress = min(1.0, progress)
        left = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return rise * (self.final + (1 - self.final) * left)


@dataclass(frozen=True)
class OptimizerOptions:
    """How one part is optimised."""

    algorithm: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    learning_rate: float = 1e-3
    schedule: Schedule = field(default_factory=Schedule)
    weight_decay: float = 0.0
    """A term ``weight_decay / 2 * |w|^2`` of the loss (``adamw``: decoupled from the gradient's scaling)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of ``adam`` and ``adamw``."""
    momentum: float = 0.0
    """Of ``sgd`` and ``rmsprop``."""
    clip_norm: float | None = None
    """The gradient of the whole part is scaled down to this norm. (Independent models trained at once share it.)"""

    def __post_init__(self) -> None:
        if self.algorithm not in ("adam", "adamw", "sgd", "rmsprop"):
            raise ValueError(f"algorithm: expected 'adam', 'adamw', 'sgd' or 'rmsprop', got {self.algorithm!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: expected a positive number, got {self.learning_rate}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm: expected a positive number, got {self.clip_norm}")

    def build(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The torch optimiser."""
        common: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        match self.algorithm:
            case "adam":
                return torch.optim.Adam(parameters, betas=self.betas, **common)
            case "adamw":
                return torch.optim.AdamW(parameters, betas=self.betas, **common)
            case "sgd":
                return torch.optim.SGD(parameters, momentum=self.momentum, **common)
            case "rmsprop":
                return torch.optim.RMSprop(parameters, momentum=self.momentum, **common)


class PartOptimizer:
    """One part's parameters, optimiser, schedule and count of steps taken."""

    def __init__(self, parameters: Sequence[Tensor], options: OptimizerOptions) -> None:
        self.parameters = list(parameters)
        self.options = options
        self.adam: FusedAdam | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if FusedAdam.suits(self.parameters, options):
            self.adam = FusedAdam(self.parameters, options)
        elif self.parameters:
            self.optimizer = options.build(self.parameters)

    @property
    def falls(self) -> bool:
        """Whether the schedule must know how long the run is."""
        return self.options.schedule.kind != "constant"

    @property
    def capturable(self) -> bool:
        """Whether `step` can be part of a CUDA graph."""
        return self.optimizer is None

    def schedule(self, step: int, progress: float) -> None:
        """From now on the learning rate is that of training step ``step`` at ``progress`` (0 to 1)."""
        learning_rate = self.options.learning_rate * self.options.schedule.factor(step, progress)
        if self.adam is not None:
            self.adam.set_rate(learning_rate)
        elif self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Move the parameters."""
        if self.adam is not None:
            self.adam.step(gradients)
            return
        if self.optimizer is None:
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.options.clip_norm is not None:
            clip_grad_norm_(self.parameters, self.options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser's moments."""
        if self.adam is not None:
            return self.adam.tensors()
        if self.optimizer is None:
            return {}
        return {
            f"{number}.{name}": value
            for number, state in self.optimizer.state_dict()["state"].items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""
        if self.adam is not None:
            self.adam.load(tensors)
        if self.optimizer is None:
            return
        state: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


class FusedAdam:
    """Adam by PyTorch's fused kernel, without the Python around it: for a small model that is most of a step."""

    def __init__(self, parameters: Sequence[Tensor], options: OptimizerOptions) -> None:
        self.parameters = list(parameters)
        self.options = options
        self.update: Any = torch._fused_adamw_ if options.algorithm == "adamw" else torch._fused_adam_
        self.means = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self.squares = [torch.zeros_like(mean) for mean in self.means]
        self.counts = [torch.zeros((), device=parameter.device) for parameter in parameters]
        """Steps taken with each parameter."""
        self.rate: Tensor | float = options.learning_rate
        if self.parameters[0].is_cuda:
            # where a recorded step reads it
            self.rate = torch.tensor(options.learning_rate, device=self.parameters[0].device)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next steps."""
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            self.rate = rate

    @staticmethod
    def suits(parameters: Sequence[Tensor], options: OptimizerOptions) -> bool:
        """Whether the kernel can be used as it is here: without checks of its own."""
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if options.algorithm not in ("adam", "adamw") or len(kinds) != 1:
            return False
        dtype, device = kinds.pop()
        usable = dtype in (torch.float32, torch.float64) and device.type in ("cpu", "cuda")
        return usable and all(parameter.is_contiguous() for parameter in parameters)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Move the parameters that have gradients."""
        given = [number for number, gradient in enumerate(gradients) if gradient is not None]
        if not given:
            return
        # the kernel reads memory in order, whatever a gradient's strides are
        slopes = [gradient.contiguous() for gradient in gradients if gradient is not None]
        if self.options.clip_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(slopes)))
            slopes = list(torch._foreach_mul(slopes, (self.options.clip_norm / (norm + 1e-6)).clamp(max=1.0)))
        parameters, means, squares, counts = (
            [tensors[number] for number in given]
            for tensors in (self.parameters, self.means, self.squares, self.counts)
        )
        torch._foreach_add_(counts, 1)
        beta1, beta2 = self.options.betas
        self.update(
            parameters, slopes, means, squares, [], counts,
            lr=self.rate, beta1=beta1, beta2=beta2, weight_decay=self.options.weight_decay, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The moments and counts of every parameter."""
        kinds = {"step": self.counts, "exp_avg": self.means, "exp_avg_sq": self.squares}
        return {f"{number}.{name}": tensor for name, kind in kinds.items() for number, tensor in enumerate(kind)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""
        for name, own in self.tensors().items():
            if name in tensors:
                own.copy_(tensors[name])


@dataclass(frozen=True)
class Averaging:
    """Averages of the weights over steps; evaluation and the finished model use them."""

    kind: Literal["exponential", "tail"] = "exponential"
    """An exponential moving average, or the plain mean over the tail of the run."""
    decay: float = 0.999
    """Of the exponential average; at first it is ``(1 + t) / (10 + t)``, so that the first weights are forgotten."""
    start: int = 0
    """The step at which the average begins; until then it is the weights themselves."""

    def __post_init__(self) -> None:
        if self.kind not in ("exponential", "tail"):
            raise ValueError(f"kind: expected 'exponential' or 'tail', got {self.kind!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay: expected at least 0 and less than 1, got {self.decay}")


class WeightAverage:
    """The running average of some parameters."""

    def __init__(self, parameters: Sequence[Tensor], options: Averaging) -> None:
        self.parameters = [parameter.detach() for parameter in parameters]
        self.options = options
        self.averages = [parameter.clone() for parameter in self.parameters]

    def update(self, step: int) -> None:
        """Count in the weights after training step ``step`` (from 0)."""
        taken = step - self.options.start
        if taken <= 0:
            torch._foreach_copy_(self.averages, self.parameters)
            return
        tail = self.options.kind == "tail"
        decay = taken / (taken + 1) if tail else min(self.options.decay, (1 + taken) / (10 + taken))
        torch._foreach_lerp_(self.averages, self.parameters, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters are their averages inside this context."""
        kept = [parameter.clone() for parameter in self.parameters]
        torch._foreach_copy_(self.parameters, self.averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self.parameters, kept)
