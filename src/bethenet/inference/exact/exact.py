"""`Exact`: log Z, marginals, samples and the best state by bucket elimination."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.engine import State
from bethenet.inference.exact import elimination
from bethenet.inference.exact.domains import Domain, Logarithmic, Maximum, Scaled
from bethenet.inference.exact.elimination import Trace
from bethenet.inference.exact.planning import ORDERS, plan_for
from bethenet.potentials import LogPotentials
from bethenet.result import InferenceResult, Status


@dataclass(frozen=True)
class Exact:
    """Bucket elimination.

    Attributes:
        memory_limit: bytes that a computation may take at its peak; by default four fifths of what the device has free.
        order: ``"auto"``, ``"min-fill"``, ``"min-degree"`` or the variables (numbers) in the order of elimination.
        differentiable: whether the beliefs of a result can be differentiated, and not only its ``log_z``.

    >>> from bethenet import FactorGraph, LogPotentials
    >>> model = LogPotentials.from_factors([2, 2], [((0, 1), [[0.0, 1.0], [1.0, 0.0]])])
    >>> Exact().map(model.clamp({0: 1}))[0].tolist()
    [[1, 0]]
    """

    name: ClassVar[str] = "exact"

    memory_limit: int | None = None
    order: str | tuple[int, ...] = "auto"
    differentiable: bool = False

    def __post_init__(self) -> None:
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ValueError(f"memory_limit: expected a positive number of bytes, got {self.memory_limit}")
        if isinstance(self.order, str) and self.order not in ORDERS:
            raise ValueError(f"order: expected one of {ORDERS} or a sequence of variables, got {self.order!r}")
        if not isinstance(self.order, str):
            object.__setattr__(self, "order", tuple(self.order))

    # --- inference --------------------------------------------------------------------------------------------------

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Exact beliefs and log Z (nats), both differentiable in the log-potentials if asked for.

        Raises:
            MemoryLimitError: the prediction is over the limit; nothing was allocated.
            ImpossibleEvidenceError: the evidence or the model has probability zero.
        """
        started = time.perf_counter()
        log_z, beliefs = self._beliefs(potentials, self.differentiable)
        batch, device = potentials.batch_size, potentials.device
        return InferenceResult(
            method=self.name,
            beliefs=beliefs,
            log_z=log_z,
            member_status=(Status.CONVERGED,) * batch,
            iterations=torch.ones(batch, dtype=torch.long, device=device),
            residual=torch.zeros(batch, dtype=potentials.dtype, device=device),
            seconds=time.perf_counter() - started,
        )

    def log_z(self, potentials: LogPotentials) -> Float[Tensor, " batch"]:
        """Log partition function in nats, evidence counted; differentiable as often as you like."""
        return _Problem(self, potentials).collect(keep=False)[0]

    def marginals(self, potentials: LogPotentials, *, differentiable: bool = False) -> Beliefs:
        """Log-marginals of all variables and factors, on the Bethe region graph."""
        return self._beliefs(potentials, differentiable)[1]

    def sample(
        self, potentials: LogPotentials, n: int, generator: torch.Generator | None = None
    ) -> Int[Tensor, "n batch variables"]:
        """Independent exact samples of all variables."""
        if n < 0:
            raise ValueError(f"n: expected at least 0 samples, got {n}")

        def draw(logits: Tensor) -> Tensor:
            top = logits.amax(-1, keepdim=True)
            cumulative = (logits - top).exp().cumsum(-1)
            place = generator.device if generator is not None else logits.device
            uniform = torch.rand(logits.shape[:-1], generator=generator, device=place, dtype=logits.dtype)
            threshold = uniform.to(logits.device).unsqueeze(-1) * cumulative[..., -1:]
            return (cumulative <= threshold).sum(-1).clamp(max=logits.shape[-1] - 1)

        with torch.no_grad():
            problem = _Problem(self, potentials.detach())
            _, trace = problem.collect(keep=True)
            return problem.choose(trace, n, draw)

    def map(self, potentials: LogPotentials) -> tuple[Int[Tensor, "batch variables"], Float[Tensor, " batch"]]:
        """A most probable state of all variables, and the log of its unnormalised probability (nats)."""
        with torch.no_grad():
            problem = _Problem(self, potentials.detach())
            value, trace = problem.collect(keep=True, domain=Maximum())
            return problem.choose(trace, 1, lambda logits: logits.argmax(-1))[0], value

    def _beliefs(self, potentials: LogPotentials, differentiable: bool) -> tuple[Tensor, Beliefs]:
        problem = _Problem(self, potentials)
        log_z, trace = problem.collect(keep=True)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            return log_z, problem.beliefs(trace, differentiable)


class _Problem:
    """One model with its evidence, reduced and planned."""

    def __init__(self, engine: Exact, potentials: LogPotentials) -> None:
        self.potentials = potentials
        self.reduction, self.plan = plan_for(potentials, engine.order)

    def collect(self, *, keep: bool, domain: Domain | None = None) -> tuple[Float[Tensor, " batch"], Trace | None]:
        """The forward pass, in a domain that stands the model's range."""
        potentials = self.potentials
        constant = self.reduction.constant(potentials)
        leaves = self.reduction.leaves(potentials)
        trace: Trace | None = None
        log_z = constant
        if leaves:
            trace = elimination.forward(self.plan, domain or Scaled(), leaves, potentials.batch_size, keep=keep)
            log_z = constant + trace.log_z
            if trace.doubt is not None and bool(trace.doubt):
                trace = elimination.forward(self.plan, Logarithmic(), leaves, potentials.batch_size, keep=keep)
                log_z = constant + trace.log_z
        log_z = log_z.expand(potentials.batch_size)
        _check_possible(log_z)
        return log_z, trace

    def beliefs(self, trace: Trace | None, differentiable: bool) -> Beliefs:
        """The backward pass to marginals."""
        tables = [] if trace is None else elimination.marginals(self.plan, trace, differentiable=differentiable)
        return self.reduction.beliefs(self.potentials, tables)

    def choose(
        self, trace: Trace | None, samples: int, choose: elimination.Choose
    ) -> Int[Tensor, "samples batch variables"]:
        """The backward pass to states."""
        potentials = self.potentials
        shape = (samples, potentials.batch_size, potentials.graph.num_variables)
        states = torch.zeros(shape, dtype=torch.long, device=potentials.device)
        if potentials.observed is not None:
            states = states + potentials.observed.clamp(min=0)
        if trace is None or not samples:
            return states
        return elimination.choose_states(self.plan, trace, states, choose)


def _check_possible(log_z: Float[Tensor, " batch"]) -> None:
    impossible = torch.isneginf(log_z.detach())
    if bool(impossible.any()):
        members = torch.nonzero(impossible).flatten().tolist()
        named = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
        raise ImpossibleEvidenceError(
            f"the model and its evidence have probability zero for {len(members)} of {log_z.numel()} batch members: "
            f"{named}"
        )
