"""`NetworkInference`: a network behind the interface that every engine has; semi-amortised where sweeps follow."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.free_energy import free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.engine import State
from bethenet.networks.fitting import FitOptions, FitResult, ModelSource, fit
from bethenet.networks.network import InferenceNetwork
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph
from bethenet.result import InferenceResult, Status


@dataclass(frozen=True)
class NetworkInference:
    """One forward pass, and as many sweeps after it as wanted; the network is not changed.

    Without sweeps the residual is the beliefs' inconsistency, and the status says that they were predicted.
    """

    name: ClassVar[str] = "network"

    network: InferenceNetwork
    max_iterations: int = 0
    """Iterations of belief propagation from the network's beliefs on; status and residual are then its own."""

    def __post_init__(self) -> None:
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations: expected at least 0, got {self.max_iterations}")
        if self.max_iterations and self.network.approximation != RegionGraph.bethe:
            raise ValueError("max_iterations: belief propagation can follow a network of Bethe's regions, and no other")

    def fit(self, models: LogPotentials | ModelSource, options: FitOptions | None = None) -> FitResult:
        """Fit the network, in place, to one model, to a batch, or to a stream of models. See `fitting.fit`."""
        return fit(self.network, models, options)

    def run(
        self,
        potentials: LogPotentials,
        *,
        state: State = None,
        generator: torch.Generator | None = None,
        inputs: Int[Tensor, "batch variables"] | None = None,
    ) -> InferenceResult:
        """See `bethenet.inference.Engine.run`."""
        started = time.perf_counter()
        with torch.no_grad():
            beliefs = self.network(potentials.detach(), inputs)
        if self.max_iterations:
            return replace(self._swept(potentials, beliefs), seconds=time.perf_counter() - started)
        log_z = -free_energy(potentials, beliefs)
        finite = torch.isfinite(log_z.detach())
        return InferenceResult(
            method=self.name,
            beliefs=beliefs,
            log_z=log_z,
            member_status=tuple(Status.PREDICTED if fine else Status.DIVERGED for fine in finite.tolist()),
            iterations=torch.ones(log_z.shape[0], dtype=torch.long, device=log_z.device),
            residual=beliefs.inconsistency(),
            seconds=time.perf_counter() - started,
        )

    def _swept(self, potentials: LogPotentials, beliefs: Beliefs) -> InferenceResult:
        """What belief propagation makes of the network's beliefs."""
        engine = BeliefPropagation(max_iterations=self.max_iterations)
        with torch.no_grad():
            start = engine.state_from_beliefs(engine.prepare(potentials.detach()), beliefs)
        return replace(engine.run(potentials, state=start), method=self.name)
