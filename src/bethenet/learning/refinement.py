"""Sweeps of an engine that start from a network's beliefs: the semi-amortised middle way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bethenet.beliefs import Beliefs
from bethenet.inference.engine import IterativeEngine, State
from bethenet.learning.persistence import advance
from bethenet.potentials import LogPotentials


@dataclass(frozen=True)
class EngineRefinement:
    """A few iterations of an engine, without a look at convergence; a refinement for `ByNetwork`.

    >>> from bethenet.inference.bp import BeliefPropagation
    >>> refine = EngineRefinement(BeliefPropagation(), iterations=2)
    """

    engine: IterativeEngine
    iterations: int = 1
    start: Callable[[Any, Beliefs], State] | None = None
    """Turns beliefs into a state of the engine, given what the engine's ``prepare`` made of the potentials; the
    engine's own method ``state_from_beliefs`` by default."""

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")
        if self.start is None and not hasattr(self.engine, "state_from_beliefs"):
            raise ValueError(f"{type(self.engine).__name__} cannot start from beliefs: pass `start`")

    @torch.no_grad()
    def __call__(self, potentials: LogPotentials, beliefs: Beliefs) -> Beliefs:
        """The engine's beliefs after its iterations."""
        engine: Any = self.engine
        problem = engine.prepare(potentials.detach())
        start = self.start or engine.state_from_beliefs
        state, _ = advance(engine, problem, engine.init(problem, start(problem, beliefs.detach())), self.iterations)
        return engine.beliefs(problem, state)
