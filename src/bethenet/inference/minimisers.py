"""Batched minimisers of smooth functions: every batch member has its own history, step length and line search.

A minimiser is a frozen dataclass of options with ``init`` and ``step``. Each ``step`` evaluates the function once, at
one trial point for every member; a member whose line search rejects its trial stays where it is and tries a shorter
step the next time. So nothing loops or waits inside a step, and members do not hold each other up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bethenet.inference.engine import map_tensors

Vector = Float[Tensor, "batch size"]


class Evaluation(NamedTuple):
    """What a function says at one point of every member."""

    value: Float[Tensor, " batch"]
    gradient: Vector
    preconditioner: Vector
    """A positive diagonal, roughly the inverse curvature."""
    memory: Any
    """Whatever makes the next evaluation near by cheaper: nested tuples of tensors ``[batch, ...]``."""


Function = Callable[[Vector, Any], Evaluation]
"""Evaluates at a point, given the memory of an evaluation near by (``None``: there is none)."""


class Minimiser(Protocol):
    """What `LimitedMemory` and `Adam` have in common; a state has fields ``point`` and ``evaluation``."""

    def init(self, point: Vector, evaluation: Evaluation, previous: Any = None) -> Any:
        """The first state; ``previous``, one of the same function or of a similar one, lends what it has learnt."""
        ...

    def step(self, function: Function, state: Any) -> Any:
        """The next state."""
        ...


class LimitedMemoryState(NamedTuple):
    """Where `LimitedMemory` is: the accepted point, the direction and length of its next trial, and the history."""

    point: Vector
    evaluation: Evaluation
    direction: Vector
    length: Float[Tensor, " batch"]
    steps: Float[Tensor, "batch memory size"]
    changes: Float[Tensor, "batch memory size"]
    """Of the gradient, over the steps."""
    weights: Float[Tensor, "batch memory"]
    """1 / (step . change), newest last; 0 where there is no such pair."""


@dataclass(frozen=True)
class LimitedMemory:
    """L-BFGS (Nocedal & Wright, algorithm 7.4) with a diagonal preconditioner and backtracking (Armijo) line search."""

    memory: int = 20
    """How many steps are remembered."""
    largest_step: float = 4.0
    """No coordinate moves further than this in one step."""

    def __post_init__(self) -> None:
        if self.memory < 1 or not self.largest_step > 0:
            raise ValueError(
                f"expected a memory of at least 1 and a positive largest step, got {self.memory}, {self.largest_step}"
            )

    def init(
        self, point: Vector, evaluation: Evaluation, previous: LimitedMemoryState | None = None
    ) -> LimitedMemoryState:
        """Without a history the first direction is the preconditioned gradient's."""
        if previous is None:
            steps = point.new_zeros(point.shape[0], self.memory, point.shape[1])
            changes, weights = steps.clone(), point.new_zeros(point.shape[0], self.memory)
        else:
            steps, changes, weights = previous.steps, previous.changes, previous.weights
        direction, weights = self._downhill(evaluation, steps, changes, weights)
        return LimitedMemoryState(point, evaluation, direction, point.new_ones(point.shape[0]), steps, changes, weights)

    def step(self, function: Function, state: LimitedMemoryState) -> LimitedMemoryState:
        """Try one point; go there or shorten the step."""
        old = state.evaluation
        move = state.length.unsqueeze(-1) * state.direction
        trial = state.point + move
        new = function(trial, old.memory)
        slope = _dot(old.gradient, move)
        # differences below the rounding error of a long sum say nothing
        noise = 4 * torch.finfo(trial.dtype).eps * (1 + old.value.abs())
        accepted = torch.isfinite(new.value) & (new.value <= old.value + 1e-4 * slope + noise)
        accepted = accepted & torch.isfinite(new.gradient).all(-1)

        steps, changes, weights = self._remember(state, move, new.gradient - old.gradient, accepted)
        point = torch.where(accepted.unsqueeze(-1), trial, state.point)
        evaluation = select(accepted, new, old)
        # the minimum of the parabola through both values and the first slope
        excess = (new.value - old.value - slope).nan_to_num(math.inf, math.inf)
        shrink = (-0.5 * slope / excess.clamp_min(torch.finfo(trial.dtype).tiny)).clamp(0.1, 0.5)
        length = torch.where(accepted, torch.ones_like(state.length), state.length * shrink)
        # a search that has found nothing starts again from the preconditioned gradient
        lost = length < 1e-6
        weights = weights.masked_fill(lost.unsqueeze(-1), 0.0)
        direction, weights = self._downhill(evaluation, steps, changes, weights)
        direction = torch.where((accepted | lost).unsqueeze(-1), direction, state.direction)
        length = torch.where(lost, torch.full_like(length, 0.1), length)
        return LimitedMemoryState(point, evaluation, direction, length, steps, changes, weights)

    def _downhill(
        self, evaluation: Evaluation, steps: Tensor, changes: Tensor, weights: Tensor
    ) -> tuple[Vector, Tensor]:
        """The next direction; where the history points uphill, the preconditioned gradient's, and it is forgotten."""
        direction = self._direction(evaluation, steps, changes, weights)
        uphill = (_dot(direction, evaluation.gradient) >= 0).unsqueeze(-1)
        direction = torch.where(uphill, -evaluation.preconditioner * evaluation.gradient, direction)
        largest = direction.abs().amax(-1, keepdim=True)
        direction = direction * (self.largest_step / largest.clamp_min(self.largest_step))
        return direction, weights.masked_fill(uphill, 0.0)

    def _remember(
        self, state: LimitedMemoryState, move: Vector, change: Vector, accepted: Bool[Tensor, " batch"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The history with the newest pair, where the step was taken and the curvature along it is positive."""
        curvature = _dot(move, change)
        floor = 1e-8 * move.norm(dim=-1) * change.norm(dim=-1)
        kept = accepted & (curvature > floor) & (curvature > torch.finfo(move.dtype).tiny)
        weight = 1 / torch.where(kept, curvature, torch.ones_like(curvature))

        def pushed(history: Tensor, newest: Tensor) -> Tensor:
            longer = torch.cat([history[:, 1:], newest.unsqueeze(1)], 1)
            return torch.where(kept.reshape(-1, *[1] * (history.dim() - 1)), longer, history)

        return pushed(state.steps, move), pushed(state.changes, change), pushed(state.weights, weight)

    def _direction(self, evaluation: Evaluation, steps: Tensor, changes: Tensor, weights: Tensor) -> Vector:
        """Minus the inverse Hessian's estimate times the gradient: the two-loop recursion, every member at once."""
        rest = evaluation.gradient
        shares = []
        for index in reversed(range(self.memory)):
            share = weights[:, index] * _dot(steps[:, index], rest)
            rest = rest - share.unsqueeze(-1) * changes[:, index]
            shares.append(share)
        known = weights[:, -1] > 0
        spread = weights[:, -1] * _dot(changes[:, -1], evaluation.preconditioner * changes[:, -1])
        scale = 1 / torch.where(known & (spread > 0), spread, torch.ones_like(spread))
        result = scale.unsqueeze(-1) * evaluation.preconditioner * rest
        for index, share in enumerate(reversed(shares)):
            correction = share - weights[:, index] * _dot(changes[:, index], result)
            result = result + correction.unsqueeze(-1) * steps[:, index]
        return -result


class AdamState(NamedTuple):
    """Where `Adam` is, with the running means of the gradient and of its square."""

    point: Vector
    evaluation: Evaluation
    mean: Vector
    square: Vector
    updates: Int[Tensor, " batch"]


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015): no line search, so the value may rise; every step moves."""

    learning_rate: float = 0.1
    decay: float = 0.9
    square_decay: float = 0.99

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and 0 <= self.decay < 1 and 0 <= self.square_decay < 1):
            raise ValueError(f"expected a positive learning rate and decays from 0 to below 1, got {self}")

    def init(self, point: Vector, evaluation: Evaluation, previous: AdamState | None = None) -> AdamState:
        """Running means of nothing, or the previous ones."""
        if previous is not None:
            return previous._replace(point=point, evaluation=evaluation)
        updates = torch.zeros(point.shape[0], dtype=torch.long, device=point.device)
        return AdamState(point, evaluation, torch.zeros_like(point), torch.zeros_like(point), updates)

    def step(self, function: Function, state: AdamState) -> AdamState:
        """Take one step."""
        updates = state.updates + 1
        gradient = state.evaluation.gradient
        mean = self.decay * state.mean + (1 - self.decay) * gradient
        square = self.square_decay * state.square + (1 - self.square_decay) * gradient**2
        exponent = updates.to(mean.dtype).unsqueeze(-1)
        corrected = mean / (1 - self.decay**exponent)
        scale = (square / (1 - self.square_decay**exponent)).sqrt() + 1e-8
        point = state.point - self.learning_rate * corrected / scale
        return AdamState(point, function(point, state.evaluation.memory), mean, square, updates)


def select(mask: Bool[Tensor, " batch"], new: Any, old: Any) -> Any:
    """``new`` for the members in ``mask``, ``old`` for the others; nested tuples of tensors."""
    return map_tensors(lambda a, b: torch.where(mask.reshape(-1, *[1] * (a.dim() - 1)), a, b), new, old)


def _dot(left: Tensor, right: Tensor) -> Float[Tensor, " batch"]:
    return (left * right).sum(-1)
