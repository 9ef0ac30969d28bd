"""`Problem`: one model with its evidence on its way through the passes."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.exact import elimination
from bethenet.inference.exact.domains import Domain, Logarithmic, Maximum, Scaled
from bethenet.inference.exact.elimination import Choose, Trace
from bethenet.inference.exact.layout import Layout
from bethenet.inference.exact.memory import USABLE_SHARE, Task, free_bytes, refuse
from bethenet.inference.exact.planning import Choice, Order, planner_for
from bethenet.potentials import LogPotentials


class Problem:
    """Plans within the memory limit and computes log Z; the rest is asked for afterwards.

    Args:
        potentials: the model and its evidence.
        task: what will be asked for.
        order: the elimination order, or how to find it.
        memory_limit: bytes.
        samples: how many assignments `states` will be asked for.

    Raises:
        MemoryLimitError: no order found stays within the limit; nothing has been allocated.
        ImpossibleEvidenceError: some member of the batch has probability zero.
    """

    def __init__(
        self, potentials: LogPotentials, task: Task, order: Order, memory_limit: int | None, samples: int = 0
    ) -> None:
        self.task = task
        self.samples = samples
        self.dtype = potentials.dtype
        self.potentials = potentials
        self.planner = planner_for(potentials)
        self.reduction = self.planner.reduction
        self.limit = memory_limit or int(USABLE_SHARE * free_bytes(potentials.device))
        self.order = order
        choice = self._choose(potentials.dtype)
        if choice.bytes_needed > self.limit:
            raise refuse(choice.bytes_needed, self.limit, choice.width, task)
        self.plan = self.planner.plan(choice.order)
        self.trace: Trace | None = None
        log_z = self._collect()
        _check_possible(log_z)
        self.log_z: Float[Tensor, " batch"] = log_z.to(self.dtype)

    def beliefs(self, differentiable: bool) -> Beliefs:
        """All marginals; uses up what was kept."""
        with torch.set_grad_enabled(differentiable):
            tables: list[Tensor] = []
            if self.trace is not None:
                tables = elimination.marginals(self.plan, self.trace, differentiable=differentiable)
            beliefs = self.reduction.beliefs(self.potentials, tables)
            if self.potentials.dtype != self.dtype:
                beliefs = Beliefs(beliefs.regions, [table.to(self.dtype) for table in beliefs.log_tables])
        return beliefs

    def states(self, choose: Choose) -> Int[Tensor, "samples batch variables"]:
        """Complete assignments, each variable's state chosen given those it depends on."""
        potentials, samples = self.potentials, self.samples
        shape = (samples, potentials.batch_size, potentials.graph.num_variables)
        states = torch.zeros(shape, dtype=torch.long, device=potentials.device)
        if potentials.observed is not None:
            states = states + potentials.observed.clamp(min=0)
        if self.trace is None or not samples:
            return states
        return elimination.choose_states(self.plan, self.trace, states, choose)

    def _choose(self, dtype: torch.dtype) -> Choice:
        layout = Layout.of(self.potentials)
        return self.planner.choose(self.order, layout, self.task, dtype.itemsize, self.limit, self.samples)

    def _collect(self) -> Float[Tensor, " batch"]:
        """The forward pass, in the fastest arithmetic that the model's range allows."""
        if self.task is Task.BEST:
            return self._forward(Maximum())
        log_z = self._forward(Scaled())
        if not self._in_doubt():
            return log_z
        if self.dtype != torch.float64 and self._choose(torch.float64).bytes_needed <= self.limit:
            self.potentials = self.potentials.to(dtype=torch.float64)
            log_z = self._forward(Scaled())
        return self._forward(Logarithmic()) if self._in_doubt() else log_z

    def _forward(self, domain: Domain) -> Float[Tensor, " batch"]:
        self.trace = None
        keep = self.task not in (Task.LOG_Z, Task.GRADIENT)
        batch = self.potentials.batch_size
        log_z = self.reduction.constant(self.potentials)
        leaves = self.reduction.leaves(self.potentials)
        if leaves:
            self.trace = elimination.forward(self.plan, domain, leaves, batch, keep=keep)
            log_z = log_z + self.trace.log_z
        return log_z.expand(batch)

    def _in_doubt(self) -> bool:
        return self.trace is not None and self.trace.doubt is not None and bool(self.trace.doubt)


def _check_possible(log_z: Float[Tensor, " batch"]) -> None:
    impossible = torch.isneginf(log_z.detach())
    if bool(impossible.any()):
        members = torch.nonzero(impossible).flatten().tolist()
        named = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
        raise ImpossibleEvidenceError(
            f"the model and its evidence have probability zero for {len(members)} of {log_z.numel()} batch members: "
            f"{named}"
        )
