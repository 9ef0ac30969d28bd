"""`BeliefPropagation`: the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.inference.bp.kernels import Mode
from bethenet.inference.bp.problem import Problem, prepare
from bethenet.inference.bp.schedules import flood, flood_worst
from bethenet.inference.engine import IterativeEngine
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph

Schedule = Literal["flooding", "sweep", "residual"]


class MessageState(NamedTuple):
    """Messages, and what the damping goes by. What a run can be started again from."""

    messages: tuple[Float[Tensor, "batch slots width"], ...]
    """Per variable group, logarithms of the messages to its variables; log-odds for binary ones."""
    damping: Float[Tensor, " batch"]
    best: Float[Tensor, " batch"]
    """The least residual of the present stretch of iterations."""
    reference: Float[Tensor, " batch"]
    """That of the stretch before."""
    age: Int[Tensor, " batch"]
    """Iterations done in the present stretch."""


@dataclass(frozen=True)
class BeliefPropagation(IterativeEngine):
    """Loopy belief propagation: fixed points of the Bethe free energy by message passing; exact on trees."""

    name: ClassVar[str] = "bp"
    mode: Mode = "sum"
    schedule: Schedule = "flooding"
    damping: float = 0.0
    adaptive: bool = True
    fraction: float = 0.25

    STRETCH: ClassVar[int] = 16

    def prepare(self, potentials: LogPotentials) -> Problem:
        return prepare(potentials, self.mode)

    def init(self, problem, state=None, generator=None):
        messages = problem.uniform() if state is None else None
        zero = problem.no_change()
        return MessageState(tuple(m.transpose(0, 1) for m in messages), zero + self.damping, zero + torch.inf, zero + torch.inf, zero.long())

    def step(self, problem: Problem, state: MessageState):
        messages = problem.open([m.transpose(0, 1) for m in state.messages])
        damping = state.damping if self.adaptive else self.damping
        if self.schedule == "residual":
            new, change = flood_worst(problem, messages, damping, self.fraction)
        else:
            new, change = flood(problem, messages, damping)
        residual = (change - problem.rounding).clamp(min=0)
        closed = tuple(m.transpose(0, 1) for m in problem.close(new))
        return self._adapted(state._replace(messages=closed), residual), residual

    def _adapted(self, state, residual):
        if not self.adaptive:
            return state
        best = torch.minimum(state.best, residual)
        age = state.age + 1
        over = age >= self.STRETCH
        slow = over & (best > 0.5 * state.reference)
        damping = torch.where(slow, 1 - (1 - state.damping).clamp(max=.7) * 0.7, state.damping).clamp(max=.95)
        return state._replace(damping=damping, best=torch.where(over, torch.full_like(best, torch.inf), best),
            reference=torch.where(over, best, state.reference), age=torch.where(over, torch.zeros_like(age), age))

    def beliefs(self, problem: Problem, state: MessageState) -> Beliefs:
        messages = problem.open([m.transpose(0, 1) for m in state.messages])
        return problem.beliefs(messages, RegionGraph.bethe(problem.graph))
