"""`BeliefPropagation`: the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.free_energy import free_energy
from bethenet.inference.bp.kernels import Mode
from bethenet.inference.bp.levels import compile_sweep
from bethenet.inference.bp.message_passing import MessagePassing, MessageState
from bethenet.inference.bp.prepare import prepare
from bethenet.inference.bp.problem import Problem
from bethenet.inference.bp.sweeps import decode
from bethenet.potentials import LogPotentials


@dataclass(frozen=True)
class BeliefPropagation(MessagePassing):
    """Loopy belief propagation: a stationary point of the Bethe free energy by passing messages. Exact on trees.

    Works on any factor graph, hard constraints included. A batch is worked on at once, and every member stops by
    itself. With ``mode="max"`` the beliefs are max-marginals and ``log_z`` is the log of the unnormalised probability
    of the state that `map` finds, a lower bound on log Z.

    >>> from bethenet import FactorGraph, LogPotentials
    >>> potentials = LogPotentials.random(FactorGraph.chain(5), generator=torch.Generator().manual_seed(0))
    >>> result = BeliefPropagation().run(potentials)
    >>> str(result.status), tuple(result.beliefs.node_marginals.shape)
    ('converged', (1, 5, 2))
    """

    name: ClassVar[str] = "bp"

    mode: Mode = "sum"  # type: ignore[misc]  # an option here, fixed in the base class
    """``sum``: marginals. ``max``: max-marginals, for the most probable state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {get_args(Mode)}, got {self.mode!r}")

    def map(
        self, potentials: LogPotentials, *, state: MessageState | None = None
    ) -> tuple[Int[Tensor, "batch variables"], Float[Tensor, " batch"]]:
        """A state that is most probable as far as max-product can tell (it is on trees), and its log-value (nats).

        The value is ``potentials.score`` of the state; ties are broken consistently.
        """
        result = replace(self, mode="max").run(potentials.detach(), state=state)
        states = self._decoded(potentials, result.state)
        return states, member_scores(potentials, states)

    def log_z(
        self, potentials: LogPotentials, problem: Problem, state: MessageState, beliefs: Beliefs
    ) -> Float[Tensor, " batch"]:
        """Minus the Bethe free energy; or, where factors maximise, the value of the best state found."""
        if self.mode == "sum":
            return -free_energy(potentials, beliefs)
        return member_scores(potentials, self._decoded(potentials, state))

    @torch.no_grad()
    def _decoded(self, potentials: LogPotentials, state: MessageState) -> Int[Tensor, "batch variables"]:
        problem = prepare(potentials.detach(), "max")
        messages = problem.open([part.transpose(0, 1) for part in state.messages])
        found = decode(problem, messages, compile_sweep(problem.graph, self.order))
        graph = problem.graph
        result = torch.zeros(problem.batch_size, graph.num_variables, dtype=torch.long, device=problem.device)
        for states, group, layout in zip(found, graph.variable_groups, problem.wiring.layouts, strict=True):
            result[:, group.variables] = states.index_select(0, layout.positions).T
        return result


def member_scores(potentials: LogPotentials, states: Int[Tensor, "batch variables"]) -> Float[Tensor, " batch"]:
    """`LogPotentials.score` of one assignment a member, under that member alone."""
    total = torch.zeros(states.shape[0], dtype=potentials.dtype, device=potentials.device)
    graph = potentials.graph
    picked = [
        (table, group.table_shape, states[:, group.variables])
        for table, group in zip(potentials.tables, graph.factor_groups, strict=True)
    ]
    picked += [
        (term, (group.states,), states[:, group.variables].unsqueeze(-1))
        for term, group in zip(potentials.node_terms, graph.variable_groups, strict=True)
    ]
    for table, shape, assigned in picked:
        cells = torch.zeros(assigned.shape[:2], dtype=torch.long, device=potentials.device)
        for axis, size in enumerate(shape):
            cells = cells * size + assigned[..., axis]
        flat = table.reshape(*table.shape[:2], -1).expand(*cells.shape, -1)
        total = total + flat.gather(2, cells.unsqueeze(-1)).squeeze(-1).sum(1)
    return total
