"""`Model`: an `nn.Module` whose only duty is a graph and its log-potentials.

Everything that learns or infers asks a model for `Model.log_potentials`. The other methods have defaults made of it;
a model overrides one where it can do better (a Boltzmann machine sums its hidden units out in closed form) or must
(a chain's graph depends on the length of the sentences in the minibatch).

*Data* are minibatches of observations: by default complete assignments, integers ``[samples, variables]``. A model
may hold several independent models over one graph, as the batch axis of its log-potentials; its data may then be
``[samples, models, variables]`` (each model has its own) or ``[samples, variables]`` (all see the same).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from bethenet.graph import FactorGraph
from bethenet.models import assignments
from bethenet.potentials import LogPotentials


class Model(nn.Module, ABC):
    """Parameters of a Markov random field."""

    graph: FactorGraph
    """The structure; of models whose graph varies with the data, that of the largest or usual case."""

    @abstractmethod
    def log_potentials(self, evidence: Any = None) -> LogPotentials:
        """The log-potentials as functions of the parameters.

        Args:
            evidence: what is observed, by default anything that `LogPotentials.clamp` takes.
        """

    def unclamped(self, data: Any) -> LogPotentials:
        """The model that a minibatch's likelihood is normalised by: nothing clamped, one batch member a model."""
        return self.log_potentials()

    def clamped(self, data: Any) -> LogPotentials:
        """The model of the latent variables given each sample: one batch member a sample."""
        return self.log_potentials(data)

    def both(self, data: Any) -> tuple[LogPotentials, LogPotentials]:
        """`unclamped` and `clamped` together: where potentials are random (dropout), both must come of one draw."""
        return self.unclamped(data), self.clamped(data)

    def score(self, data: Any) -> Float[Tensor, "samples models"]:
        """Log of the unnormalised probability of each sample (nats), latent variables summed out.

        The default takes complete assignments. A model with latent variables that it cannot sum out raises
        `ValueError`; its likelihood then needs inference in the clamped model.
        """
        return assignments.score(self.log_potentials(), data)

    def pseudo_log_likelihood(self, data: Any) -> Float[Tensor, "samples models"]:
        """Sum over variables of ``log P(x_v | the others)`` of each sample (nats)."""
        return assignments.pseudo_log_likelihood(self.log_potentials(), data)
