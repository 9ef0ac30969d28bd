"""Figures reported during training besides the objective: the true likelihood where an exact engine can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.inference.engine import Engine
from bethenet.learning.batches import Data, Minibatches
from bethenet.models import Model

Evaluator = Callable[[], Mapping[str, float]]
"""Called after an epoch, without gradients, in evaluation mode and under averaged weights if there are any."""


class HeldOutLikelihood:
    """Negative log-likelihood per sample (nats) of some data, log Z by an engine: the true one if that is exact.

    Args:
        model: the model that is being learnt.
        data: complete assignments, or what else the model takes.
        engine: how to get log Z.
        clamped: how to get log Z(x); by default the model's own `Model.score` is asked.
        name: what to report the figure as; ``name_std`` besides, the spread over models, if there are several.
        batch_size: samples scored at a time.
    """

    def __init__(
        self,
        model: Model,
        data: Data,
        engine: Engine,
        clamped: Engine | None = None,
        *,
        name: str = "nll",
        batch_size: int | None = 1024,
    ) -> None:
        self.model = model
        self.data = data
        self.engine = engine
        self.clamped = clamped
        self.name = name
        self.batch_size = batch_size

    def __call__(self) -> dict[str, float]:
        """Evaluate the model as it is now."""
        values = negative_log_likelihood(self.model, self.data, self.engine, self.clamped, batch_size=self.batch_size)
        figures = {self.name: float(values.mean())}
        if values.numel() > 1:
            figures[f"{self.name}_std"] = float(values.std())
        return figures


@torch.no_grad()
def negative_log_likelihood(
    model: Model, data: Data, engine: Engine, clamped: Engine | None = None, *, batch_size: int | None = 1024
) -> Float[Tensor, " models"]:
    """Mean over samples of ``log Z - log P~(x)`` (nats), for each of the model's independent models.

    Args:
        model: the model.
        data: complete assignments, or what else the model takes.
        engine: how to get log Z. One run serves all minibatches of one graph.
        clamped: how to get log Z(x); by default the model's own `Model.score` is asked.
        batch_size: samples scored at a time.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total: Any = 0.0
    samples, log_z = 0, {}
    for batch in Minibatches(data, batch_size, device=device).epoch():
        potentials = model.unclamped(batch.data)
        if potentials.graph not in log_z:
            log_z[potentials.graph] = engine.run(potentials).log_z
        score = model.score(batch.data) if clamped is None else clamped.run(model.clamped(batch.data)).log_z
        total = total + batch.size * (log_z[potentials.graph] - score.mean(0))
        samples += batch.size
    result: Tensor = total / samples
    return result
