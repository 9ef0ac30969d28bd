"""`Exact`: log Z, marginals, samples and the best state by bucket elimination."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.graph import FactorGraph
from bethenet.inference.engine import State
from bethenet.inference.exact.layout import Layout
from bethenet.inference.exact.memory import Task
from bethenet.inference.exact.planning import ORDERS, Choice, planner_for
from bethenet.inference.exact.problem import Problem
from bethenet.potentials import LogPotentials
from bethenet.result import InferenceResult, Status, judged


@dataclass(frozen=True)
class Exact:
    """Bucket elimination.

    Whatever is asked for, the peak memory is predicted first; a prediction over the limit is a `MemoryLimitError`, and
    evidence (or a model) of probability zero an `ImpossibleEvidenceError`.

    Attributes:
        memory_limit: bytes that a computation may take at its peak; by default four fifths of what the device has free.
        order: ``"auto"``, ``"min-fill"``, ``"min-degree"`` or the variables (numbers) in the order of elimination.
        differentiable: whether the beliefs of a result can be differentiated, and not only its ``log_z``.

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
        if not isinstance(self.order, str):
            object.__setattr__(self, "order", tuple(self.order))
        elif self.order not in ORDERS:
            raise ValueError(f"order: expected one of {ORDERS} or a sequence of variables, got {self.order!r}")

    # --- inference --------------------------------------------------------------------------------------------------

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Exact beliefs and log Z (nats); ``log_z`` is differentiable as often as you like."""
        started = time.perf_counter()
        beliefs, log_z = self._infer(potentials, self.differentiable)
        batch, device = potentials.batch_size, potentials.device
        return InferenceResult(
            method=self.name,
            beliefs=beliefs,
            log_z=log_z,
            member_status=judged((Status.CONVERGED,) * batch, log_z.detach()),
            iterations=torch.ones(batch, dtype=torch.long, device=device),
            residual=torch.zeros(batch, dtype=potentials.dtype, device=device),
            seconds=time.perf_counter() - started,
        )

    def log_z(self, potentials: LogPotentials) -> Float[Tensor, " batch"]:
        """Log partition function in nats, evidence counted; differentiable as often as you like."""
        task = Task.GRADIENT if _is_differentiable(potentials) else Task.LOG_Z
        return self._problem(potentials, task).log_z

    def marginals(self, potentials: LogPotentials, *, differentiable: bool = False) -> Beliefs:
        """Log-marginals of all variables and factors, on the Bethe region graph."""
        return self._infer(potentials if differentiable else potentials.detach(), differentiable)[0]

    def sample(
        self, potentials: LogPotentials, n: int, generator: torch.Generator | None = None
    ) -> Int[Tensor, "n batch variables"]:
        """Independent exact samples of all variables."""
        if n < 0:
            raise ValueError(f"n: expected at least 0 samples, got {n}")
        with torch.no_grad():
            problem = self._problem(potentials.detach(), Task.SAMPLES, n)
            return problem.states(lambda logits: _draw(logits, generator))

    def map(self, potentials: LogPotentials) -> tuple[Int[Tensor, "batch variables"], Float[Tensor, " batch"]]:
        """A most probable state of all variables, and the log of its unnormalised probability (nats)."""
        with torch.no_grad():
            problem = self._problem(potentials.detach(), Task.BEST, 1)
            return problem.states(lambda logits: logits.argmax(-1))[0], problem.log_z

    def _infer(self, potentials: LogPotentials, differentiable: bool) -> tuple[Beliefs, Float[Tensor, " batch"]]:
        task = Task.EVERYTHING if _is_differentiable(potentials) else Task.MARGINALS
        problem = self._problem(potentials, task)
        log_z = problem.log_z
        return problem.beliefs(differentiable and torch.is_grad_enabled()), log_z

    def _problem(self, potentials: LogPotentials, task: Task, samples: int = 0) -> Problem:
        return Problem(potentials, task, self.order, self.memory_limit, samples)

    # --- what it would take -----------------------------------------------------------------------------------------

    def width(self, model: FactorGraph | LogPotentials) -> int:
        """The width of the best elimination order found, an upper bound of the treewidth; evidence reduces it."""
        return planner_for(model).width(self.order)

    def predicted_bytes(
        self, model: FactorGraph | LogPotentials, *, batch_size: int = 1, dtype: torch.dtype | None = None
    ) -> int:
        """Peak bytes that `run` would take besides the potentials. Allocates nothing.

        Args:
            model: a graph, or a model with its evidence.
            batch_size: of a graph: how many models of it at once, each with all tables of its own.
            dtype: of a graph: of the numbers, by default torch's default type.
        """
        return self._choice(model, batch_size, dtype).bytes_needed

    def _choice(self, model: FactorGraph | LogPotentials, batch_size: int, dtype: torch.dtype | None) -> Choice:
        if isinstance(model, LogPotentials):
            layout, dtype = Layout.of(model), model.dtype
            task = Task.EVERYTHING if _is_differentiable(model) else Task.MARGINALS
        else:
            layout, task = Layout.unshared(model, batch_size), Task.MARGINALS
        itemsize = (dtype or torch.get_default_dtype()).itemsize
        limit = self.memory_limit or torch.inf
        return planner_for(model).choose(self.order, layout, task, itemsize, limit)


def _is_differentiable(potentials: LogPotentials) -> bool:
    tensors = (*potentials.tables, *potentials.node_terms)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _draw(logits: Float[Tensor, "*rows states"], generator: torch.Generator | None) -> Int[Tensor, "*rows"]:
    """One state a row, in proportion to ``exp(logits)``; never one of probability zero."""
    cumulative = (logits - logits.amax(-1, keepdim=True)).exp().cumsum(-1)
    place = logits.device if generator is None else generator.device
    uniform = torch.rand(logits.shape[:-1], generator=generator, device=place, dtype=logits.dtype)
    threshold = uniform.to(logits.device).unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp(max=logits.shape[-1] - 1)
