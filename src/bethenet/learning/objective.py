"""The contract between what is learnt and the loop that learns it.

An `Objective` owns modules with parameters, grouped into *parts* ("model", "network", ...), each with an optimiser of
its own. For one minibatch it yields `Update`s, one after the other; the trainer carries each out before it asks for the
next. So a method is written down as its pseudo-code reads: Algorithm 1 of the paper is a loop that yields
network updates followed by one model update (`bethenet.learning.likelihood`).

An update moves the parameters of the parts it names and nothing else: its gradient is taken with respect to those
alone, so no gradient ever accumulates elsewhere. Whatever an objective carries from step to step (the chains of
persistent contrastive divergence, messages, running baselines) it keeps in buffers of its modules: they are saved,
restored and moved with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """A minibatch."""

    data: Any
    """What the model takes as data: a tensor whose first axis is the samples, or a tuple of such tensors."""
    size: int
    """How many samples."""
    indices: Int[Tensor, " samples"] | None = None
    """Which samples these are, for methods that keep something for each (see `population`)."""
    population: int | None = None
    """How many samples ``indices`` number. Where graphs differ between minibatches (sentences of several lengths),
    both count the samples of one graph only."""


@dataclass(frozen=True)
class Update:
    """One gradient step on the parameters of one part, or of several."""

    parts: tuple[str, ...]
    loss: Tensor | None = None
    """What to descend on. Summed if it has several entries, as when independent models are trained at once."""
    value: Tensor | None = None
    """What to report in place of the loss (mean over its entries), where the two differ."""
    diagnostics: Callable[[], Mapping[str, Tensor]] | None = None
    """Further figures to report; called only when a report is due."""
    gradients: Sequence[Tensor] | None = None
    """What to descend along, in place of a loss, where the method has it in closed form: one tensor for each trainable
    parameter of the parts, in their order."""


class Objective(nn.Module, ABC):
    """Something to be learnt. See the module's docstring for the contract."""

    judged_by: ClassVar[str] = "objective"
    """Which of the figures of `evaluate` tells how good the model is."""

    def parts(self) -> dict[str, nn.Module]:
        """The modules whose parameters are learnt, each with its own optimiser; ``model`` by default.

        Frozen parameters (``requires_grad=False``) are left alone. No parameter may be in two parts.
        """
        model = getattr(self, "model", None)
        if not isinstance(model, nn.Module):
            raise NotImplementedError(f"{type(self).__name__} has no attribute `model`: it must name its parts")
        return {"model": model}

    @abstractmethod
    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """The gradient steps that one minibatch calls for, in order.

        This runs as a generator: what stands after a ``yield`` sees the parameters that the update has moved.
        It must not wait for the device (no ``.item()``).
        """

    @abstractmethod
    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """Figures on held-out data, averaged over the batch; ``"objective"`` among them where there is one.

        Called without gradients and in evaluation mode; it changes nothing that the objective carries.
        """
