"""Direct minimisation of Bethe's (or a like) free energy over node marginals; factors' beliefs follow from these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.graph import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.coupling import consistent_beliefs, free_energy_at, node_duals, per_count, unmet_marginals
from bethenet.inference.engine import Engine, IterativeEngine, State, map_tensors
from bethenet.inference.minimisers import Evaluation, LimitedMemory, Minimiser, Vector, select
from bethenet.inference.scaling import Scaling
from bethenet.inference.starts import best_of_restarts, check_state, local_evidence, noisy_start
from bethenet.numerics import log_normalize
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph
from bethenet.result import InferenceResult

PENALTY = 40.0
"""Nats by which an impossible configuration is made less likely than its table's least likely possible one, while
descending: marginals on the way need not admit a belief that avoids it."""

SUREST_START = 10.0
"""Nats: random starts leave every state at least about this chance, however one-sided the local evidence. Nearer to 0
and 1 the free energy is flat in the logits."""


@dataclass(frozen=True)
class Descent(IterativeEngine):
    """Minimise the Bethe free energy of the consistent beliefs over node logits.

    Belief propagation's fixed points are the stationary points of this function; unlike belief propagation, descent
    always ends near one, and its beliefs agree at every step. The residual is the largest change of a marginal, in
    probability, in a full step along the natural gradient (to first order the gradient in the logits; but it is not
    small merely because a marginal is near 0 or 1), or by how much a marginal is missed where a belief of extreme
    couplings cannot be scaled to it. Strong couplings (above about 2 on binary grids) tie marginals together so stiffly
    that the value settles long before the gradient does: expect `Status.ITERATION_LIMIT` there.

    Inside learning, pass the previous result's ``state`` and a small ``max_iterations``: marginals and the minimiser's
    history carry over to the new potentials. (``first=None`` then makes a cold start as cheap as a step.)

    Other free energies of factors and variables (tree-reweighted ones, say) are minimised alike. Those with regions in
    between are not: node marginals do not determine their beliefs.
    """

    name: ClassVar[str] = "descent"

    minimiser: Minimiser = field(default_factory=LimitedMemory)
    """`LimitedMemory` (L-BFGS) or `Adam`, on logits."""
    regions: RegionGraph | None = None
    """Whose free energy: Bethe's by default, else of the models' own graph, the regions being its factors and variables
    and the factors' counting numbers positive."""
    restarts: int = 1
    """Random starts; the one that ends with the least free energy is returned. A warm start is the only start."""
    first: Engine | None = field(default_factory=lambda: BeliefPropagation(max_iterations=500, damping=0.5))
    """Whose node marginals the first start takes; with ``None`` it is random like the others."""
    noise: float = 1.0
    """Standard deviation of the noise on the logits of a random start, which are otherwise the local evidence. The
    first start gets a tenth of it."""
    inverse_temperatures: tuple[float, ...] = ()
    """Annealing of random starts: they descend with the log-potentials times each of these in turn, before the
    log-potentials are taken as they are. ``first`` is not used then."""
    annealing_iterations: int = 50
    """Iterations at each of them."""
    scaling: Scaling = field(default_factory=Scaling)
    """How to find beliefs that have no closed form; each search starts from the one before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 1:
            raise ValueError(f"restarts: expected at least 1, got {self.restarts}")
        if not self.noise >= 0:
            raise ValueError(f"noise: expected a number of at least 0, got {self.noise}")
        if not all(beta > 0 for beta in self.inverse_temperatures):
            raise ValueError(f"inverse_temperatures: expected positive numbers, got {self.inverse_temperatures}")
        if self.annealing_iterations < 0:
            raise ValueError(f"annealing_iterations: expected at least 0, got {self.annealing_iterations}")

    def run(
        self, potentials: LogPotentials, *, state: State = None, generator: torch.Generator | None = None
    ) -> InferenceResult:
        """Descend from every start. See `Engine.run`."""
        if self.restarts == 1 or state is not None:
            return super().run(potentials, state=state, generator=generator)
        single = super().run
        return best_of_restarts(lambda repeated: single(repeated, generator=generator), potentials, self.restarts)

    def prepare(self, potentials: LogPotentials) -> LogPotentials:
        """The log-potentials of each factor by its counting number."""
        return potentials if self.regions is None else per_count(potentials, self.regions)

    def init(self, potentials: LogPotentials, state: State = None, generator: torch.Generator | None = None) -> State:
        """The minimiser's first state; a given state (its point and history) is taken over to these potentials."""
        softened = _soften(potentials)
        if state is not None:
            batch = potentials.batch_size
            entries = sum(group.variables.numel() * group.states for group in potentials.graph.variable_groups)
            check_state([state.point], [(max(entries, 1),)], batch)
            state = map_tensors(lambda tensor: tensor.expand(batch, *tensor.shape[1:]), state)
            evaluation = self._evaluate(softened, state.point, state.evaluation.memory)
            return self.minimiser.init(state.point, evaluation, state)
        if softened is not potentials:
            local_evidence(potentials)  # raises where nothing is possible
        start = noisy_start(softened, self.noise, generator, self.restarts)
        point = _join([log_normalize(logits, -1).clamp_min(-SUREST_START) for logits in start], softened)
        memory = None
        for beta in self.inverse_temperatures:
            heated = softened.map(lambda tensor, beta=beta: beta * tensor)
            annealed = self.minimiser.init(point, self._evaluate(heated, point, memory))
            for _ in range(self.annealing_iterations):
                annealed, _ = self._step(heated, annealed)
            point, memory = annealed.point, annealed.evaluation.memory
        if self.first is not None and not self.inverse_temperatures:
            # restarts of one member lie together in the batch
            firsts = torch.arange(0, potentials.batch_size, self.restarts, device=potentials.device)
            beliefs = self.first.run(softened[firsts]).beliefs
            point[firsts] = _join([table.clamp_min(-PENALTY) for table in beliefs.node_log_tables], softened)
        return self.minimiser.init(point, self._evaluate(softened, point, memory))

    def state_from_beliefs(self, potentials: LogPotentials, beliefs: Beliefs) -> State:
        """A state with these beliefs' node marginals."""
        point = _join([table.clamp_min(-PENALTY) for table in beliefs.node_log_tables], potentials)
        return self.minimiser.init(point, self._evaluate(_soften(potentials), point, None))

    def step(self, potentials: LogPotentials, state: State) -> tuple[State, Float[Tensor, " batch"]]:
        """One evaluation of the free energy and its gradient for every member."""
        return self._step(_soften(potentials), state)

    def beliefs(self, potentials: LogPotentials, state: State) -> Beliefs:
        """The consistent beliefs, without the tiny mass of what is impossible. Where it is not tiny, no marginals were
        found that avoid it; then it stays, and the free energy is infinite.
        """
        nodes = _split(potentials.graph, state.point)
        if not potentials.has_zeros:
            return self._consistent(potentials, nodes, state)
        evidence = local_evidence(potentials)
        nodes = [part.masked_fill(local == -math.inf, -math.inf) for part, local in zip(nodes, evidence, strict=True)]
        softened = self._consistent(_soften(potentials), nodes, state)
        tables, violations = list(softened.log_tables), torch.zeros_like(state.point[:, 0])
        for number, table in enumerate(potentials.tables):
            impossible = (table == -math.inf).expand_as(tables[number])
            violations = violations + (tables[number].exp() * impossible).flatten(1).sum(1)
            possible = tables[number].masked_fill(impossible, -math.inf)
            tables[number] = log_normalize(possible, list(range(2, possible.dim())))
        # on a tree that nothing satisfies, at least one violated factor is expected under any marginals
        satisfied = violations < 0.5
        return Beliefs(softened.regions, select(satisfied, tuple(tables), tuple(softened.log_tables)))

    def _consistent(self, potentials: LogPotentials, nodes: Sequence[Tensor], state: State) -> Beliefs:
        normalized = [log_normalize(part, -1) for part in nodes]
        return consistent_beliefs(potentials, normalized, self.scaling, state.evaluation.memory, self.regions)

    def _step(self, potentials: LogPotentials, state: State) -> tuple[State, Float[Tensor, " batch"]]:
        new = self.minimiser.step(lambda point, memory: self._evaluate(potentials, point, memory), state)
        nodes = [log_normalize(part, -1) for part in _split(potentials.graph, new.point)]
        residual = unmet_marginals(potentials, nodes, new.evaluation.memory)
        for log_q, gradient in zip(nodes, _split(potentials.graph, new.evaluation.gradient), strict=True):
            q = log_q.exp()
            natural = torch.where(q > 0, gradient / q, torch.zeros_like(q))
            moved = (torch.softmax(log_q - natural, -1) - q).abs().flatten(1)
            residual = torch.maximum(residual, moved.amax(1)) if moved.shape[1] else residual
        return new, residual

    def _evaluate(self, potentials: LogPotentials, point: Vector, memory: Any) -> Evaluation:
        """The free energy at logits ``point``, with the duals as memory. The preconditioner makes the gradient the
        natural one: the Fisher information of a node in its logits is ``diag(q) - q q'``, and ``1 / q`` inverts it.
        """
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            nodes = [torch.log_softmax(part, -1) for part in _split(potentials.graph, leaf)]
            duals = node_duals(potentials, nodes, self.scaling, memory)
            value = free_energy_at(potentials, nodes, duals, self.regions)
            gradient = torch.autograd.grad(value.sum(), leaf)[0] if nodes else torch.zeros_like(leaf)
        fisher = _join([node.detach().exp() for node in nodes], potentials)
        return Evaluation(value.detach(), gradient, fisher.clamp_min(1e-6).reciprocal(), duals)


def _join(parts: Sequence[Float[Tensor, "batch variables states"]], potentials: LogPotentials) -> Vector:
    """A node quantity as one vector for each batch member: a single zero where there are no variables."""
    if not parts:
        return torch.zeros(potentials.batch_size, 1, dtype=potentials.dtype, device=potentials.device)
    return torch.cat([part.flatten(1) for part in parts], 1)


def _split(graph: FactorGraph, point: Vector) -> list[Float[Tensor, "batch variables states"]]:
    """The inverse of `_join`."""
    sizes = [group.variables.numel() * group.states for group in graph.variable_groups]
    parts = point.split(sizes, 1) if sizes else ()
    return [
        part.reshape(point.shape[0], -1, group.states) for part, group in zip(parts, graph.variable_groups, strict=True)
    ]


def _soften(potentials: LogPotentials) -> LogPotentials:
    """The same model with impossible configurations made very unlikely ones."""
    if not potentials.has_zeros:
        return potentials

    def soften(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            return tensor
        impossible = tensor == -math.inf
        axes = list(range(2, tensor.dim()))
        lowest = tensor.masked_fill(impossible, math.inf).amin(axes, keepdim=True)
        return torch.where(impossible, torch.where(lowest < math.inf, lowest, 0.0) - PENALTY, tensor)

    return potentials.map(soften)
