"""How an objective gets log Z: by an engine, started cold or from where it stopped last (`ByEngine`), or by an
inference network that learns alongside (`bethenet.learning.amortized.ByNetwork`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bethenet.beliefs import Beliefs
from bethenet.inference.engine import Engine, IterativeEngine
from bethenet.learning.objective import Batch
from bethenet.learning.persistence import Samples, StateMemory, advance
from bethenet.potentials import LogPotentials


@dataclass(frozen=True)
class Estimate:
    """An approximation of log Z."""

    log_z: Float[Tensor, " batch"]
    """In nats; differentiable in the log-potentials, with the beliefs as gradient."""
    beliefs: Beliefs
    """Constants."""
    residual: Float[Tensor, " batch"] | None = None
    """The engine's convergence measure, if there is an engine."""

    def diagnostics(self, prefix: str = "") -> dict[str, Tensor]:
        """How far the beliefs are from consistent, and the engine from converged (largest over the batch)."""
        figures = {f"{prefix}inconsistency": self.beliefs.inconsistency().amax()}
        if self.residual is not None and self.residual.numel():
            figures[f"{prefix}residual"] = self.residual.amax()
        return figures


class LogPartition(nn.Module, ABC):
    """Estimates log Z of whatever potentials it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        """Gradient steps on its own parameters before each step of the model: I1 or I2 of Algorithm 1."""
        self.network: nn.Module | None = None
        """What those steps move."""

    @abstractmethod
    def estimate(
        self,
        potentials: LogPotentials,
        batch: Batch,
        *,
        clamped: bool,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """The log Z of ``potentials``, which were made for ``batch``: one member a sample if ``clamped``, else a model.

        In training mode it may keep a state for the next call; in evaluation mode it keeps nothing.
        """

    def loss(self, potentials: LogPotentials, batch: Batch, *, clamped: bool) -> Float[Tensor, " batch"]:
        """What its own gradient steps descend on, given constant ``potentials``."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to learn")


class ByEngine(LogPartition):
    """log Z by any engine.

    Args:
        engine: the engine, with its limits as options.
        persistent: start from the engine's last state: for the unclamped model, the state after the last update; for
            clamped ones, the state after the same sample was last seen (kept for every sample, so this costs memory in
            proportion to the data set, and batches must carry their samples' indices).
        iterations: in training take exactly so many steps, without looks at convergence and, on a GPU, without waiting
            for the device; in evaluation the engine runs to its own limits. By default persistent engines take
            `PERSISTENT_ITERATIONS`, others run to their own limits.
    """

    PERSISTENT_ITERATIONS = 5

    def __init__(self, engine: Engine, *, persistent: bool = False, iterations: int | None = None) -> None:
        super().__init__()
        if (persistent or iterations is not None) and not isinstance(engine, IterativeEngine):
            raise ValueError(f"{type(engine).__name__} is not iterative: it has no state to keep and no steps to count")
        if iterations is not None and iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {iterations}")
        self.engine = engine
        self.persistent = persistent
        self.iterations = self.PERSISTENT_ITERATIONS if persistent and iterations is None else iterations
        self.memory = StateMemory()

    def estimate(
        self, potentials: LogPotentials, batch: Batch, *, clamped: bool, generator: torch.Generator | None = None
    ) -> Estimate:
        """See `LogPartition.estimate`."""
        if self.training and self.iterations is not None:
            return self._few_steps(potentials, batch, clamped, self.iterations, generator)
        state = None
        # held-out samples have numbers of their own: nothing was kept for them
        if self.persistent and not clamped:
            engine: Any = self.engine
            with torch.no_grad():
                cold = engine.init(engine.prepare(potentials.detach()), None, generator)
                state = self.memory.recall(potentials.graph, cold)
        result = self.engine.run(potentials, state=state, generator=generator)
        return Estimate(result.log_z, result.beliefs, result.residual)

    def _few_steps(
        self, potentials: LogPotentials, batch: Batch, clamped: bool, iterations: int, generator: torch.Generator | None
    ) -> Estimate:
        """The estimate after ``iterations`` steps, from the state kept if there is one."""
        engine: Any = self.engine
        samples = Samples.of(batch) if clamped and self.persistent else None
        if clamped and self.persistent and samples is None:
            raise ValueError("persistent clamped inference needs batches that carry their samples' indices")
        with torch.no_grad():
            problem = engine.prepare(potentials.detach())
            state = engine.init(problem, None, generator)
            if self.persistent:
                state = engine.init(problem, self.memory.recall(potentials.graph, state, samples), generator)
            state, residual = advance(engine, problem, state, iterations)
            if self.persistent:
                self.memory.remember(potentials.graph, state, samples)
            beliefs = engine.beliefs(problem, state)
        return Estimate(engine.log_z(potentials, problem, state, beliefs), beliefs, residual)


def log_partition(method: Any) -> LogPartition:
    """``method`` itself if it is a `LogPartition`; `ByEngine` of it if it is an engine."""
    if isinstance(method, LogPartition):
        return method
    if callable(getattr(method, "run", None)):
        return ByEngine(method)
    raise ValueError(f"expected an engine or a LogPartition such as ByNetwork(...); got {type(method).__name__}")
