"""Mean field: independent variables, by coordinate ascent on a lower bound of log Z."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.graph import FactorGraph
from bethenet.inference.colouring import colour_classes
from bethenet.inference.engine import IterativeEngine, State
from bethenet.inference.scaling import AXES, add_duals
from bethenet.inference.starts import best_of_restarts, check_state, noisy_start
from bethenet.numerics import log_normalize
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph
from bethenet.result import InferenceResult


@dataclass(frozen=True)
class MeanField(IterativeEngine):
    """Coordinate ascent, all variables of a colour at once (no two of them share a factor).

    The bound never falls. Where an impossible configuration has mass under the other variables, a state is given none;
    where that would leave a variable no state, it keeps those whose impossible mass is least, until the others have
    made room. The bound is ``-inf`` if none is found this way. The residual is the largest change of a marginal.
    """

    name: ClassVar[str] = "mean-field"

    restarts: int = 1
    """Random starts; the one with the best bound is returned. A warm start is the only start."""
    noise: float = 1.0
    """Standard deviation of the noise on the first logits, which are otherwise the local evidence. The first start of
    several, or the only one, gets a tenth of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 1:
            raise ValueError(f"restarts: expected at least 1, got {self.restarts}")
        if not self.noise >= 0:
            raise ValueError(f"noise: expected a number of at least 0, got {self.noise}")

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Ascend from every start. See `Engine.run`."""
        if self.restarts == 1 or state is not None:
            return super().run(potentials, state=state, generator=generator)
        single = super().run
        return best_of_restarts(lambda repeated: single(repeated, generator=generator), potentials, self.restarts)

    def init(
        self, potentials: LogPotentials, state: State = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ...]:
        """Node log-marginals, one tensor per variable group."""
        if state is None:
            return tuple(
                log_normalize(logits, -1) for logits in noisy_start(potentials, self.noise, generator, self.restarts)
            )
        shapes = [(group.variables.numel(), group.states) for group in potentials.graph.variable_groups]
        check_state(state, shapes, potentials.batch_size)
        return tuple(table.expand(potentials.batch_size, -1, -1) for table in state)

    def state_from_beliefs(self, potentials: LogPotentials, beliefs: Beliefs) -> tuple[Tensor, ...]:
        """A state with these beliefs' node marginals."""
        return beliefs.node_log_tables

    def step(
        self, potentials: LogPotentials, state: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, " batch"]]:
        """Update every variable once, colour after colour."""
        updated = list(state)
        for colour in potentials.graph.compiled(_wire):
            for update in colour:
                scores, impossible = _expected_log_potentials(potentials, updated, update)
                if impossible is not None:
                    scores = scores.masked_fill(impossible > impossible.amin(-1, keepdim=True), -math.inf)
                marginals = torch.log_softmax(scores, -1)
                updated[update.variable_group] = updated[update.variable_group].index_copy(1, update.rows, marginals)
        residual = torch.zeros(potentials.batch_size, dtype=potentials.dtype, device=potentials.device)
        for new, old in zip(updated, state, strict=True):
            residual = torch.maximum(residual, (new.exp() - old.exp()).abs().flatten(1).amax(1))
        return tuple(updated), residual

    def beliefs(self, potentials: LogPotentials, state: tuple[Tensor, ...]) -> Beliefs:
        """Node marginals and their products."""
        graph = potentials.graph
        batch = state[0].shape[0] if state else potentials.batch_size
        tables = []
        for group, table in zip(graph.factor_groups, potentials.tables, strict=True):
            nodes = [state[number][:, group.rows[:, axis]] for axis, number in enumerate(group.variable_groups)]
            tables.append(add_duals(table.new_zeros(batch, len(group), *[1] * group.arity), nodes))
        return Beliefs(RegionGraph.mean_field(graph), [*tables, *state])


@dataclass(frozen=True, eq=False)
class _Incoming:
    """Factors of one group whose axis ``axis`` is a variable of the class; each has at most one such axis."""

    factor_group: int
    axis: int
    factors: Int[Tensor, " incoming"]
    targets: Int[Tensor, " incoming"]
    """For each the position of that variable in the class."""


@dataclass(frozen=True, eq=False)
class _Update:
    """The variables of one colour and one state count."""

    variable_group: int
    rows: Int[Tensor, " members"]
    incoming: tuple[_Incoming, ...]


def _wire(graph: FactorGraph) -> tuple[tuple[_Update, ...], ...]:
    """For each colour, what is updated from what."""
    result = []
    for members in colour_classes(graph):
        position = torch.full((graph.num_variables,), -1, device=graph.device)
        updates = []
        for number, variables in enumerate(graph.variable_groups):
            chosen = members[graph.state_counts[members] == variables.states]
            if not chosen.numel():
                continue
            position.fill_(-1)[chosen] = torch.arange(chosen.numel(), device=graph.device)
            incoming = []
            for group_number, group in enumerate(graph.factor_groups):
                for axis in range(group.arity):
                    targets = position[group.variables[:, axis]]
                    factors = torch.nonzero(targets >= 0).flatten()
                    if factors.numel():
                        incoming.append(_Incoming(group_number, axis, factors, targets[factors]))
            updates.append(_Update(number, graph.variable_rows[chosen], tuple(incoming)))
        result.append(tuple(updates))
    return tuple(result)


def _expected_log_potentials(
    potentials: LogPotentials, state: list[Tensor], update: _Update
) -> tuple[Tensor, Tensor | None]:
    """For every state of the variables to update, the expected log-potential of their factors over the possible
    configurations; and the mass on impossible ones (``None`` where nothing is impossible).
    """
    term = potentials.node_terms[update.variable_group]
    term = term[:, update.rows] if term.shape[1] > 1 else term
    old = state[update.variable_group][:, update.rows]
    scores = torch.where(term == -math.inf, 0.0, term).expand_as(old).clone()
    impossible = (term == -math.inf).to(scores.dtype).expand_as(old).clone() if potentials.has_zeros else None
    for incoming in update.incoming:
        group = potentials.graph.factor_groups[incoming.factor_group]
        table = potentials.tables[incoming.factor_group]
        if table.shape[1] > 1 and incoming.factors.numel() < len(group):
            table = table[:, incoming.factors]
        others = [axis for axis in range(group.arity) if axis != incoming.axis]
        weights = [state[group.variable_groups[a]][:, group.rows[incoming.factors, a]].exp() for a in others]
        letters = AXES[: group.arity]
        inputs = ",".join([f"bf{letters}", *(f"bf{letters[axis]}" for axis in others)])
        parts = [(scores, table)]
        if impossible is not None:
            zeros = table == -math.inf
            parts = [(scores, torch.where(zeros, 0.0, table)), (impossible, zeros.to(table.dtype))]
        for total, values in parts:
            expected = torch.einsum(f"{inputs}->bf{letters[incoming.axis]}", values, *weights)
            total.index_add_(1, incoming.targets, expected.expand(len(total), len(incoming.targets), -1))
    return scores, impossible
