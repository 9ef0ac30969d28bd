"""`NetworkInference`: a fitted network behind the interface that every engine has."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from bethenet.free_energy import free_energy
from bethenet.inference.engine import State
from bethenet.networks.network import InferenceNetwork
from bethenet.potentials import LogPotentials
from bethenet.result import InferenceResult, Status


@dataclass(frozen=True)
class NetworkInference:
    """One forward pass; nothing is optimised.

    The residual is the beliefs' inconsistency, and the status says that they were predicted.
    """

    name: ClassVar[str] = "network"

    network: InferenceNetwork

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
            residual = beliefs.inconsistency()
        log_z = -free_energy(potentials, beliefs)
        finite = torch.isfinite(log_z.detach())
        return InferenceResult(
            method=self.name,
            beliefs=beliefs,
            log_z=log_z,
            member_status=tuple(Status.PREDICTED if fine else Status.DIVERGED for fine in finite.tolist()),
            iterations=torch.ones(log_z.shape[0], dtype=torch.long, device=log_z.device),
            residual=residual,
            seconds=time.perf_counter() - started,
        )
