"""`MessagePassing`: what belief propagation and its reweighted form share. The options, the state and the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.inference.bp.kernels import Mode
from bethenet.inference.bp.levels import compile_sweep
from bethenet.inference.bp.prepare import prepare
from bethenet.inference.bp.problem import Messages, Problem, Weights, message_width
from bethenet.inference.bp.schedules import flood, flood_worst
from bethenet.inference.bp.start import messages_of
from bethenet.inference.bp.sweeps import sweep
from bethenet.inference.engine import IterativeEngine
from bethenet.inference.engine import State as AnyState
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph
from bethenet.result import InferenceResult

Schedule = Literal["flooding", "sweep", "residual"]
Gradient = Literal["envelope", "unrolled", "truncated", "implicit"]


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
class MessagePassing(IterativeEngine):
    """Messages between factors and variables, renewed until they no longer change.

    The residual is the largest change (nats) of a message's logarithm, before damping and beyond what rounding alone
    can cause.
    """

    mode: ClassVar[Mode] = "sum"

    schedule: Schedule = "flooding"
    """``flooding``: all messages at once. ``sweep``: along an order of the variables and back, always from the newest
    messages: fewest iterations on chains and trees (one), and on much that is nearly one. ``residual``: of all messages
    only the ``fraction`` that would change most; it settles some models on which flooding oscillates."""
    damping: float = 0.0
    """How much of the old message (of its logarithm) stays: 0 is undamped."""
    adaptive: bool = True
    """Whether a member's damping grows when its residual stops shrinking."""
    fraction: float = 0.25
    """The fraction of the messages that a step of the ``residual`` schedule renews."""
    order: tuple[int, ...] | None = None
    """The order of the variables in a sweep. By default the farthest from the last one come first: leaves before what
    they hang on, chains from left to right."""
    gradient: Gradient = "envelope"
    """How results depend on the log-potentials. ``envelope``: the gradient of log Z is the beliefs, and the beliefs are
    constants. ``unrolled``: through every iteration. ``truncated``: through the last ``truncate_at`` of them.
    ``implicit``: that of the fixed point, however it was reached. The last three differentiate the beliefs too."""
    truncate_at: int = 5

    STRETCH: ClassVar[int] = 24
    """Iterations after which the damping is reconsidered."""
    SLOWEST: ClassVar[float] = 0.9
    """A residual that shrinks by less than this factor in a stretch asks for more damping; also the most damping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, choices in (("schedule", Schedule), ("gradient", Gradient)):
            if getattr(self, option) not in get_args(choices):
                raise ValueError(f"{option}: expected one of {get_args(choices)}, got {getattr(self, option)!r}")
        if not 0 <= self.damping < 1:
            raise ValueError(f"damping: expected at least 0 and less than 1, got {self.damping}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction: expected more than 0 and at most 1, got {self.fraction}")
        if self.truncate_at < 1:
            raise ValueError(f"truncate_at: expected at least 1 iteration, got {self.truncate_at}")
        if self.order is not None:
            object.__setattr__(self, "order", tuple(self.order))

    def run(
        self, potentials: LogPotentials, *, state: AnyState = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Pass messages until every member has converged or a limit is reached. See `Engine.run`."""
        if self.gradient == "envelope" or not torch.is_grad_enabled():
            return super().run(potentials, state=state, generator=generator)
        from bethenet.inference.bp.differentiate import run_differentiably

        return run_differentiably(self, potentials, state, generator)

    # --- what a subclass may choose -----------------------------------------------------------------------------------

    def weights(self, potentials: LogPotentials) -> Weights | None:
        """The factors' weights; ``None`` for all 1."""
        return None

    def regions(self, problem: Problem) -> RegionGraph:
        """What the beliefs are about."""
        return RegionGraph.bethe(problem.graph)

    # --- the engine's methods -----------------------------------------------------------------------------------------

    def prepare(self, potentials: LogPotentials) -> Problem:
        """The model with its wiring, tables and fields as message passing wants them."""
        return prepare(potentials, self.mode, self.weights(potentials))

    def init(
        self, problem: Problem, state: MessageState | None = None, generator: torch.Generator | None = None
    ) -> MessageState:
        """Messages that say nothing, or those of ``state``: a previous result's, of the same graph."""
        zero = problem.no_change()
        messages = _to_state(problem.uniform()) if state is None else _adopted(problem, state)
        return MessageState(messages, zero + self.damping, zero + math.inf, zero + math.inf, zero.long())

    def state_from_beliefs(self, problem: Problem, beliefs: Beliefs) -> MessageState:
        """A state to start from, given beliefs of any origin. See `messages_of`."""
        return self.init(problem)._replace(messages=messages_of(problem, beliefs))

    def step(self, problem: Problem, state: MessageState) -> tuple[MessageState, Float[Tensor, " batch"]]:
        """One renewal of the messages, as the schedule has it."""
        messages = problem.open([part.transpose(0, 1) for part in state.messages])
        damping = state.damping if self.adaptive else self.damping
        if self.schedule == "sweep":
            new, change = sweep(problem, messages, damping, compile_sweep(problem.graph, self.order))
        elif self.schedule == "residual":
            new, change = flood_worst(problem, messages, damping, self.fraction)
        else:
            new, change = flood(problem, messages, damping)
        residual = (change - problem.rounding).clamp(min=0)
        state = state._replace(messages=_to_state(problem.close(new)))
        return (self._adapted(state, residual) if self.adaptive else state), residual

    def beliefs(self, problem: Problem, state: MessageState) -> Beliefs:
        """The beliefs that the messages amount to."""
        messages = problem.open([part.transpose(0, 1) for part in state.messages])
        return problem.beliefs(messages, self.regions(problem))

    def _adapted(self, state: MessageState, residual: Tensor) -> MessageState:
        """At the end of a stretch in which the residual has hardly shrunk, halve what damping leaves of an update."""
        best, age = torch.minimum(state.best, residual), state.age + 1
        over = age >= self.STRETCH
        more = (1 - (1 - state.damping) / 2).clamp(max=self.SLOWEST)
        return MessageState(
            messages=state.messages,
            damping=torch.where(over & (best > self.SLOWEST * state.reference), more, state.damping),
            best=best.masked_fill(over, math.inf),
            reference=torch.where(over, best, state.reference),
            age=age.masked_fill(over, 0),
        )


def _to_state(messages: Messages) -> tuple[Tensor, ...]:
    return tuple(part.transpose(0, 1) for part in messages)


def _adopted(problem: Problem, state: MessageState) -> tuple[Tensor, ...]:
    """The messages of a previous state. States it held impossible are open again: the model may have changed."""
    layouts = problem.wiring.layouts
    expected = [(layout.num_slots, message_width(layout.states)) for layout in layouts]
    found = [tuple(part.shape[1:]) for part in state.messages]
    if found != expected or any(part.shape[0] not in (1, problem.batch_size) for part in state.messages):
        raise ValueError(
            f"state: expected messages of {expected} numbers for a batch of {problem.batch_size} (or 1), "
            f"got {[tuple(part.shape) for part in state.messages]}: it belongs to another graph or batch"
        )
    result = []
    for part in state.messages:
        usable = torch.isfinite(part).all(-1, keepdim=True)
        part = part.masked_fill(~usable, 0.0).to(dtype=problem.dtype, device=problem.device)
        result.append(part.expand(problem.batch_size, -1, -1).transpose(0, 1).contiguous())
    return _to_state(result)
