"""log Z by an inference network: the saddle-point learning of Algorithm 1, and its stabler relatives.

The network's output is a `Beliefs`; the model descends on the free energy with those beliefs held constant, the
network on the free energy plus penalty with the potentials held constant (equations 3, 4 and 7). Neither step touches
the other's parameters. Two departures from the paper can be switched on:

* *refinement*: a few sweeps of an engine, started from the network's output, before the model uses the beliefs;
* *learning from the refined beliefs*: the network descends on the cross-entropy towards where the sweeps ended instead
  of on the free energy. A network that lags behind gets exploited by the model (the objective runs away); targets that
  are already sweeps ahead of it leave less to exploit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bethenet.beliefs import Beliefs
from bethenet.free_energy import free_energy
from bethenet.learning.objective import Batch
from bethenet.learning.partition import Estimate, LogPartition
from bethenet.numerics import times_log
from bethenet.potentials import LogPotentials


class BeliefPredictor(Protocol):
    """What an inference network must be; an ``nn.Module`` with these methods."""

    def __call__(self, potentials: LogPotentials, inputs: Any = None, /) -> Beliefs:
        """Predict beliefs, differentiable in the network's parameters. The batch may be 1 where it is the same for all.

        Args:
            potentials: the model, constant; evidence is in its node terms and ``observed``.
            inputs: the minibatch's data where the model is clamped to it, ``None`` where nothing is clamped.
        """
        ...

    def penalty(self, beliefs: Beliefs, /) -> Float[Tensor, " batch"]:
        """What is added to the free energy for inconsistent beliefs (nats), factor lambda / |F| included (equation 7);
        zero where beliefs are consistent by construction.
        """
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What there is to learn."""
        ...


class Refinement(Protocol):
    """Improves beliefs without gradients: sweeps of an engine started from them."""

    def __call__(self, potentials: LogPotentials, beliefs: Beliefs, /) -> Beliefs:
        """Better beliefs; constants in, constants out."""
        ...


class ByNetwork(LogPartition):
    """log Z by an inference network.

    Args:
        network: an `BeliefPredictor`.
        steps: gradient steps of the network before each of the model: I1 of Algorithm 1 (I2 on the clamped side).
        refine: improves the network's beliefs before the model uses them.
        learn_from: what the network descends on: the ``"free energy"`` (plus penalty) as in the paper, or the
            cross-entropy towards the ``"refined"`` beliefs (plus penalty).
        targets: which beliefs that cross-entropy compares: all ``"regions"`` of the region graph, or single variables
            (``"nodes"``), which suffices where a network's other beliefs follow from those.
        reuse: in training, let the model use the refined beliefs that the network's last step was aimed at, instead of
            predicting and refining once more: half the work, but the network's step shows only in the next update.
    """

    def __init__(
        self,
        network: BeliefPredictor,
        *,
        steps: int = 1,
        refine: Refinement | None = None,
        learn_from: Literal["free energy", "refined"] = "free energy",
        targets: Literal["regions", "nodes"] = "regions",
        reuse: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise ValueError(f"network: expected an nn.Module, got {type(network).__name__}")
        if steps < 0:
            raise ValueError(f"steps: expected at least 0, got {steps}")
        if learn_from not in ("free energy", "refined"):
            raise ValueError(f"learn_from: expected 'free energy' or 'refined', got {learn_from!r}")
        if targets not in ("regions", "nodes"):
            raise ValueError(f"targets: expected 'regions' or 'nodes', got {targets!r}")
        if learn_from == "refined" and refine is None:
            raise ValueError("learning from refined beliefs needs a refinement: pass `refine`")
        if reuse and (learn_from != "refined" or steps == 0):
            raise ValueError("there is something to reuse only where the network takes steps and learns from refined")
        self.network: Any = network
        self.steps = steps
        self.refine = refine
        self.learn_from = learn_from
        self.targets = targets
        self.reuse = reuse
        self.aim: Beliefs | None = None
        """Where the sweeps ended that the network's last step was aimed at."""

    def estimate(
        self,
        potentials: LogPotentials,
        batch: Batch,
        *,
        clamped: bool,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Minus the free energy at the network's (refined) beliefs, held constant."""
        if self.reuse and self.training and self.aim is not None:
            beliefs, self.aim = self.aim, None
            return Estimate(-free_energy(potentials, beliefs), beliefs)
        with torch.no_grad():
            constant = potentials.detach()
            beliefs = self.network(constant, batch.data if clamped else None)
            if self.refine is not None:
                beliefs = self.refine(constant, beliefs)
        return Estimate(-free_energy(potentials, beliefs), beliefs)

    def loss(self, potentials: LogPotentials, batch: Batch, *, clamped: bool) -> Float[Tensor, " batch"]:
        """The network's own objective, to be minimised over its parameters: F + penalty (Algorithm 1), or the
        cross-entropy towards refined beliefs + penalty.
        """
        potentials = potentials.detach()
        beliefs = self.network(potentials, batch.data if clamped else None)
        if self.learn_from == "refined" and self.refine is not None:
            with torch.no_grad():
                target = self.refine(potentials, beliefs.detach())
            self.aim = target if self.reuse else None
            first = len(target.log_tables) - len(target.node_log_tables) if self.targets == "nodes" else 0
            fit = cross_entropy(beliefs, target, first)
        else:
            fit = free_energy(potentials, beliefs)
        return fit + self.network.penalty(beliefs)


def cross_entropy(beliefs: Beliefs, target: Beliefs, first_group: int = 0) -> Float[Tensor, " batch"]:
    """``-sum_r <target_r, log beliefs_r>`` over regions (nats), from region group ``first_group`` on."""
    groups = zip(beliefs.log_tables[first_group:], target.log_tables[first_group:], strict=True)
    parts = [-times_log(aim.exp(), table).flatten(1).sum(1) for table, aim in groups]
    return torch.stack(torch.broadcast_tensors(*parts)).sum(0)
