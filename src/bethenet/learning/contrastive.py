"""Contrastive divergence (Hinton 2002) and its persistent form (Tieleman 2008), for restricted Boltzmann machines.

The likelihood's gradient is a difference of two expectations: over the data in closed form, and over the model by
Gibbs chains. The chains of the persistent form go on from one update to the next; those of the other form start at the
minibatch each time. Gradients are closed expressions, so nothing is differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.models.rbm import RBM
from bethenet.models.rbm_chains import Gradient, contrastive_gradient, start_chains


class _Contrastive(Objective):
    """What both forms share.

    Neither descends on a function that could be evaluated, so nothing is reported as ``objective``; held-out figures
    are pseudo-likelihoods (with persistent chains, the one to choose settings by: Boltzmann machines that overfit or
    whose chains lag behind show in it).
    """

    judged_by: ClassVar[str] = "pseudo_nll"

    def __init__(self, model: RBM, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}")
        self.model: Any = model
        self.steps = steps

    def _update(self, gradient: Gradient) -> Update:
        model: RBM = self.model
        parameters = (model.weights, model.visible_bias, model.hidden_bias)
        wanted = [slope for slope, parameter in zip(gradient, parameters, strict=True) if parameter.requires_grad]
        return Update(("model",), gradients=wanted)

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """Minus the pseudo-log-likelihood per sample (nats)."""
        return {"pseudo_nll": -self.model.pseudo_log_likelihood(batch.data).mean()}


class ContrastiveDivergence(_Contrastive):
    """CD-k: a chain a sample, started at the sample.

    Args:
        model: the machine.
        steps: k.

    >>> objective = ContrastiveDivergence(RBM(6, 4), steps=2)
    >>> objective.parts().keys()
    dict_keys(['model'])
    """

    def __init__(self, model: RBM, *, steps: int = 1) -> None:
        super().__init__(model, steps)

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step."""
        hidden = start_chains(self.model, batch.size, batch.data, generator=generator)
        features = self.model.encode(batch.data)
        yield self._update(contrastive_gradient(self.model, features, hidden, self.steps, generator=generator))


class PersistentContrastiveDivergence(_Contrastive):
    """PCD-k: a fixed number of chains, whatever the minibatch's size, that are never started again.

    Args:
        model: the machine.
        chains: how many.
        steps: k.
    """

    hidden: Tensor

    def __init__(self, model: RBM, *, chains: int = 100, steps: int = 1) -> None:
        super().__init__(model, steps)
        if chains < 1:
            raise ValueError(f"chains: expected at least 1, got {chains}")
        # hidden units all 0: the first visible units are drawn from their biases alone
        self.register_buffer("hidden", model.weights.new_zeros(chains, model.hidden, requires_grad=False))

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of the chains, one of the parameters."""
        features = self.model.encode(batch.data)
        yield self._update(contrastive_gradient(self.model, features, self.hidden, self.steps, generator=generator))
