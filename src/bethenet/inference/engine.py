"""What engines have in common: the loop of the iterative ones, and how its end is judged.

An iterative engine is a frozen dataclass of options with three methods: ``init -> state``, ``step(state) -> state,
residual`` and ``beliefs(state)``. `IterativeEngine.run` is the loop around them. A state is a tuple (best a
``NamedTuple``), nested at will, of tensors whose first axis is the batch; so the loop can freeze the members that are
done and go on with the others alone. What the three methods work on is the *problem*: the log-potentials themselves,
or what the engine's ``prepare`` makes of them once for the whole run.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.free_energy import free_energy
from bethenet.potentials import LogPotentials
from bethenet.result import InferenceResult, Status, judged

State = Any
"""Nested tuples of tensors ``[batch, ...]`` (or ``None``)."""

Problem = Any
"""``LogPotentials``, or an engine's own form of them: it has ``batch_size``, ``dtype`` and ``device``, and indexing it
by a tensor of members gives the problem of those."""


class Engine(Protocol):
    """Anything that turns log-potentials into beliefs."""

    name: ClassVar[str]

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Infer, starting from ``state`` (a previous result's) where the engine knows what to do with one.

        ``log_z`` of the result is differentiable in the log-potentials: its gradient is the beliefs.
        """
        ...


@dataclass(frozen=True)
class IterativeEngine(ABC):
    """Options every iterative engine has, and its loop."""

    name: ClassVar[str]

    max_iterations: int = 1000
    tolerance: float = 1e-6
    """A member stops when its residual is at most this."""
    time_limit: float | None = None
    """Seconds."""

    def __post_init__(self) -> None:
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations: expected at least 0, got {self.max_iterations}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance: expected a number of at least 0, got {self.tolerance}")
        if self.time_limit is not None and not self.time_limit > 0:
            raise ValueError(f"time_limit: expected a positive number of seconds, got {self.time_limit}")

    def prepare(self, potentials: LogPotentials) -> Problem:
        """What of the model the other methods work on: the log-potentials as they are, unless overridden."""
        return potentials

    @abstractmethod
    def init(self, problem: Problem, state: State = None, generator: torch.Generator | None = None) -> State:
        """The first state; from ``state`` where one is given (warm start)."""

    @abstractmethod
    def step(self, problem: Problem, state: State) -> tuple[State, Float[Tensor, " batch"]]:
        """One iteration: the next state and the residual of each member."""

    @abstractmethod
    def beliefs(self, problem: Problem, state: State) -> Beliefs:
        """What the state says."""

    def log_z(
        self, potentials: LogPotentials, problem: Problem, state: State, beliefs: Beliefs
    ) -> Float[Tensor, " batch"]:
        """The estimate of log Z (nats), differentiable in the log-potentials: minus the free energy of the beliefs."""
        return -free_energy(potentials, beliefs)

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Iterate until every member has converged or a limit is reached. See `Engine.run`."""
        started = time.perf_counter()
        with torch.no_grad():
            problem = self.prepare(potentials.detach())
            loop = Loop(self, problem, self.init(problem, state, generator))
            loop.run(started)
            beliefs = self.beliefs(problem, loop.state)
        log_z = self.log_z(potentials, problem, loop.state, beliefs)
        return InferenceResult(
            method=self.name,
            beliefs=beliefs,
            log_z=log_z,
            member_status=judged(loop.statuses(), log_z.detach()),
            iterations=loop.tally.iterations,
            residual=loop.tally.residual,
            seconds=time.perf_counter() - started,
            state=loop.state,
        )


class Tally(NamedTuple):
    """How far each member has come."""

    residual: Float[Tensor, " batch"]
    iterations: Int[Tensor, " batch"]
    best_early: Float[Tensor, " batch"]
    """The least residual in the first half of the iterations there may be."""
    best_late: Float[Tensor, " batch"]
    """That in the second half."""
    diverged: Bool[Tensor, " batch"]

    def counted(self, moving: Tensor, accepted: Tensor, residual: Tensor, late: bool) -> Tally:
        """After one more iteration of the members that are ``moving``."""
        residual = torch.where(moving, residual.to(self.residual.dtype), self.residual)
        best = torch.minimum(self.best_late if late else self.best_early, residual.nan_to_num(math.inf))
        return Tally(
            residual,
            self.iterations + accepted,
            self.best_early if late else best,
            best if late else self.best_late,
            self.diverged | (moving & ~accepted),
        )


class Loop:
    """Steps an engine over a batch in which each member stops by itself.

    Members that are done keep their state bit for bit. Once at most half of the members worked on still move, the
    others leave the working batch, so that they cost nothing.
    """

    CHECK_EVERY = 4
    """Iterations between looks at the residuals on an accelerator, where each look waits for the device."""

    def __init__(self, engine: IterativeEngine, problem: Problem, state: State) -> None:
        self.engine = engine
        self.problem = problem
        self.state = state
        batch, device = problem.batch_size, problem.device
        self.check_every = 1 if device.type == "cpu" else self.CHECK_EVERY
        unknown = torch.full((batch,), math.inf, dtype=problem.dtype, device=device)
        none = torch.zeros(batch, dtype=torch.long, device=device)
        self.tally = Tally(unknown, none, unknown, unknown, none.bool())
        self.timed_out = False

    def run(self, started: float) -> None:
        """Iterate to the end."""
        engine = self.engine
        members = torch.arange(self.problem.batch_size, device=self.problem.device)
        problem, state, tally = self.problem, self.state, self.tally
        moving = torch.ones_like(members, dtype=torch.bool)
        for iteration in range(engine.max_iterations):
            proposal, residual = engine.step(problem, state)
            accepted = moving & torch.isfinite(residual)
            if self.check_every == 1 and bool(accepted.all()):
                state = proposal
            else:
                state = map_tensors(lambda new, old, a=accepted: _where(a, new, old), proposal, state)
            tally = tally.counted(moving, accepted, residual, late=iteration >= engine.max_iterations // 2)
            moving = accepted & (residual > engine.tolerance)
            if engine.time_limit is not None and time.perf_counter() - started > engine.time_limit:
                self.timed_out = True
                break
            if iteration % self.check_every and iteration + 1 < engine.max_iterations:
                continue
            left = int(moving.sum())
            if left == 0:
                break
            if 2 * left <= members.numel():
                self._store(members, state, tally)
                members, problem = members[moving], problem[torch.nonzero(moving).flatten()]
                state, tally = map_tensors(lambda tensor, m=moving: tensor[m], (state, tally))
                moving = torch.ones_like(members, dtype=torch.bool)
        self._store(members, state, tally)

    def statuses(self) -> tuple[Status, ...]:
        """How each member ended."""
        if self.engine.max_iterations == 0:
            return (Status.ITERATION_LIMIT,) * self.problem.batch_size
        converged = (self.tally.residual <= self.engine.tolerance) & ~self.tally.diverged
        stuck = self.tally.best_late >= self.tally.best_early
        limit = Status.TIME_LIMIT if self.timed_out else Status.ITERATION_LIMIT
        return tuple(
            Status.DIVERGED
            if diverged
            else Status.CONVERGED
            if done
            else Status.OSCILLATING
            if oscillating and not self.timed_out
            else limit
            for diverged, done, oscillating in zip(
                self.tally.diverged.tolist(), converged.tolist(), stuck.tolist(), strict=True
            )
        )

    def _store(self, members: Tensor, state: State, tally: Tally) -> None:
        if members.numel() == self.problem.batch_size:
            self.state, self.tally = state, tally
            return

        def put(whole: Tensor, part: Tensor) -> Tensor:
            whole = whole.clone()
            whole[members] = part
            return whole

        self.state, self.tally = map_tensors(put, (self.state, self.tally), (state, tally))


def map_tensors(change: Callable[..., Any], *trees: State) -> State:
    """Apply ``change`` to corresponding tensors of nested tuples of one structure; ``None`` stays ``None``."""
    first = trees[0]
    if first is None or isinstance(first, Tensor):
        return None if first is None else change(*trees)
    members = [map_tensors(change, *parts) for parts in zip(*trees, strict=True)]
    return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *([1] * (new.dim() - 1))), new, old)
