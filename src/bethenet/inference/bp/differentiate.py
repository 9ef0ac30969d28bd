"""Beliefs and log Z as differentiable functions of the log-potentials: three ways, see `MessagePassing.gradient`."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bethenet.inference.bp.problem import Problem
from bethenet.inference.engine import Loop, State, map_tensors
from bethenet.potentials import LogPotentials
from bethenet.result import InferenceResult, judged

if TYPE_CHECKING:
    from bethenet.inference.bp.message_passing import MessagePassing, MessageState

ADJOINT_ITERATIONS = 2000
"""At most so many for the implicit gradient's linear system."""

_log = logging.getLogger(__name__)


def run_differentiably(
    engine: MessagePassing, potentials: LogPotentials, state: State, generator: torch.Generator | None
) -> InferenceResult:
    """`MessagePassing.run` with results that remember how they depend on ``potentials``."""
    started = time.perf_counter()
    recorded = engine.prepare(potentials)
    constant = recorded if engine.gradient == "unrolled" else engine.prepare(potentials.detach())
    with torch.set_grad_enabled(engine.gradient == "unrolled"):
        loop = Loop(engine, constant, engine.init(constant, state, generator))
        loop.run(started)
    last: MessageState = loop.state
    if engine.gradient == "truncated":
        for _ in range(engine.truncate_at):
            last, _ = engine.step(recorded, last)
    elif engine.gradient == "implicit":
        last = _at_fixed_point(engine, recorded, constant, last)
    beliefs = engine.beliefs(recorded, last)
    log_z = engine.log_z(potentials, recorded, last, beliefs)
    return InferenceResult(
        method=engine.name,
        beliefs=beliefs,
        log_z=log_z,
        member_status=judged(loop.statuses(), log_z.detach()),
        iterations=loop.tally.iterations,
        residual=loop.tally.residual,
        seconds=time.perf_counter() - started,
        state=map_tensors(lambda tensor: tensor.detach(), last),
    )


def _at_fixed_point(engine: MessagePassing, recorded: Problem, constant: Problem, state: MessageState) -> MessageState:
    """One more iteration m = f(m*, theta), whose backward pass solves (1 - df/dm)^T x = g at the fixed point m*."""
    # every member's last damping, no longer adapted; and no step that renews only some of the messages
    engine = engine if engine.schedule == "sweep" else replace(engine, schedule="flooding")
    frozen = state._replace(age=torch.full_like(state.age, -(2**31)))
    shapes = [part.shape for part in state.messages]

    def step(problem: Problem, flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        messages = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        return _flat(engine.step(problem, frozen._replace(messages=messages))[0])

    point = _flat(state).detach().requires_grad_()
    again = step(constant, point)

    def adjoint(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else _solve_adjoint(again, point, gradient)

    result = step(recorded, point.detach())
    if result.requires_grad:
        result.register_hook(adjoint)
    parts = torch.split(result, [shape.numel() for shape in shapes])
    return state._replace(messages=tuple(p.reshape(shape) for p, shape in zip(parts, shapes, strict=True)))


def _solve_adjoint(image: Tensor, point: Tensor, gradient: Tensor) -> Tensor:
    """Solve x = gradient + (d image / d point)^T x, by iteration: it contracts where message passing does."""
    if not image.requires_grad:
        return gradient
    scale = torch.finfo(gradient.dtype).eps * (1 + gradient.abs().max())
    solution = gradient
    for _ in range(ADJOINT_ITERATIONS):
        (back,) = torch.autograd.grad(image, point, solution, retain_graph=True)
        following = gradient + back
        change = (following - solution).abs().max()
        solution = following
        if bool(change <= 4 * scale):
            return solution
    _log.warning("the implicit gradient did not settle in %d iterations", ADJOINT_ITERATIONS)
    return solution


def _flat(state: MessageState) -> Tensor:
    return torch.cat([part.reshape(-1) for part in state.messages])
