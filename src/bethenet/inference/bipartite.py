"""Belief propagation on complete bipartite graphs of binary variables (Boltzmann machines), as matrices.

What `BeliefPropagation` does for any graph, done without index tensors: messages are log-odds ``[batch, left, right]``,
a sweep is a handful of elementwise operations and two sums, memory is O(left * right). Each iteration sends all
messages from the left side to the right and then, from these, all messages back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.graph import FactorGraph
from bethenet.inference.engine import IterativeEngine, State
from bethenet.inference.starts import normal_like
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph


@dataclass(frozen=True, eq=False)
class Machine:
    """A model as matrices: the log-probability is ``x^T W z + x^T b + z^T a`` and a constant."""

    graph: FactorGraph
    weights: Float[Tensor, "batch left right"]
    left_fields: Float[Tensor, "batch left"]
    right_fields: Float[Tensor, "batch right"]

    @property
    def batch_size(self) -> int:
        """How many models."""
        return self.weights.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.weights.device

    def __getitem__(self, members: Tensor) -> Machine:
        """The models of some members; see `bethenet.inference.engine.Problem`."""
        return Machine(self.graph, self.weights[members], self.left_fields[members], self.right_fields[members])

    def message(self, cavities: Float[Tensor, "batch left right"]) -> Float[Tensor, "batch left right"]:
        """``log (1 + exp(cavity + weight)) / (1 + exp(cavity))``: the sender's state summed out.

        To rounding, for weights of at most 80 (float32; 700 in float64) either way; larger ones pass on less than they
        are, about 88 (709) at most.
        """
        negative, growth = self._weight_terms
        return (cavities + negative).sigmoid_().mul_(growth).log1p_().copysign_(self.weights)

    @cached_property
    def _weight_terms(self) -> tuple[Tensor, Tensor]:
        """The weights where they are negative, and ``exp |weight| - 1``."""
        growth = self.weights.abs().expm1_().clamp_(max=torch.finfo(self.dtype).max)
        return self.weights.clamp(max=0), growth


class BipartiteState(NamedTuple):
    """Messages to the left side, as log-odds of the receiver's state 1; those to the right follow from them."""

    to_left: Float[Tensor, "batch left right"]


class BipartiteEngine(IterativeEngine):
    """What engines on complete bipartite graphs have in common: the model as matrices, and the Bethe free energy."""

    def prepare(self, potentials: LogPotentials) -> Machine:
        """The model as matrices.

        Raises:
            ValueError: another graph than a complete bipartite one of binary variables; or impossible configurations
                (hard evidence, say), which the engines for any graph can do.
        """
        layout = Layout.of(potentials.graph)
        if potentials.has_zeros:
            raise ValueError(f"{self.name} needs finite log-potentials: use the engine for any graph")
        batch, terms = potentials.batch_size, potentials.node_terms[0]
        fields = (terms[..., 1] - terms[..., 0]).expand(batch, layout.left + layout.right)
        for number, rows in layout.unary:
            table = potentials.tables[number]
            odds = (table[..., 1] - table[..., 0]).expand(batch, -1)
            fields = fields + odds if rows is None else fields.index_add(1, rows, odds.expand(-1, rows.numel()))
        left_fields, right_fields = fields.split([layout.left, layout.right], 1)
        pairs = potentials.tables[layout.pairs].expand(-1, layout.left * layout.right, 2, 2)
        neither, right, left, both = pairs.reshape(-1, layout.left, layout.right, 4).unbind(-1)
        left_odds, right_odds = left - neither, right - neither
        weights = (both - right - left_odds).expand(batch, -1, -1)
        left_fields, right_fields = left_fields + left_odds.sum(2), right_fields + right_odds.sum(1)
        return Machine(potentials.graph, weights, left_fields, right_fields)

    def log_z(
        self, potentials: LogPotentials, problem: Machine, state: State, beliefs: Beliefs
    ) -> Float[Tensor, " batch"]:
        """Minus the Bethe free energy, each pair's belief exponentiated once."""
        layout = Layout.of(potentials.graph)
        pairs, nodes = beliefs.log_tables[layout.pairs], beliefs.node_log_tables[0]
        with torch.no_grad():
            chances, node_chances = pairs.exp(), nodes.exp()
            joint = (chances * pairs).sum((1, 2, 3))
            left, right = (node_chances * nodes).sum(2).split([layout.left, layout.right], 1)
            entropy = (layout.right - 1) * left.sum(1) + (layout.left - 1) * right.sum(1) - joint
        expected = _expected(potentials.tables[layout.pairs], chances)
        for number, rows in layout.unary:
            read = node_chances if rows is None else node_chances[:, rows]
            expected = expected + _expected(potentials.tables[number], read)
        return entropy + expected + _expected(potentials.node_terms[0], node_chances)

    @staticmethod
    def collect(
        problem: Machine, pairs: Sequence[Float[Tensor, "batch left right"]], odds: Float[Tensor, "batch variables"]
    ) -> Beliefs:
        """Beliefs from the pairs' log-beliefs (entries 00, 01, 10, 11) and the log-odds of single variables."""
        nodes = F.logsigmoid(torch.stack([-odds, odds], dim=-1))
        layout = Layout.of(problem.graph)
        # the entries stay apart in memory: to interleave them takes longer than all else here
        entries = torch.stack(tuple(pairs), 1).flatten(2)
        tables = {layout.pairs: entries.transpose(1, 2).unflatten(2, (2, 2))}
        tables |= {number: nodes if rows is None else nodes[:, rows] for number, rows in layout.unary}
        groups = range(len(problem.graph.factor_groups))
        return Beliefs(RegionGraph.bethe(problem.graph), [*(tables[number] for number in groups), nodes])


@dataclass(frozen=True)
class BipartiteBeliefPropagation(BipartiteEngine):
    """Loopy belief propagation for `RBM`s of binary units, and any other graph of that form.

    The residual is the largest change (nats) of a message to the left side, before damping.

    >>> from bethenet.models.rbm import RBM
    >>> model = RBM(6, 4, generator=torch.Generator().manual_seed(0))
    >>> str(BipartiteBeliefPropagation().run(model.log_potentials()).status)
    'converged'
    """

    name: ClassVar[str] = "bipartite-bp"

    damping: float = 0.0
    """How much of the old message to the left side (of its log-odds) stays: 0 is undamped."""
    noise: float = 0.0
    """Standard deviation of the messages (log-odds) that a cold start begins with; 0: they say nothing. A model with
    several modes has a fixed point for each: without noise every cold start ends at the same one. (Without a generator
    the noise is the same every time.)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise: expected a number of at least 0, got {self.noise}")
        if not 0 <= self.damping < 1:
            raise ValueError(f"damping: expected at least 0 and less than 1, got {self.damping}")

    def init(
        self, problem: Machine, state: BipartiteState | None = None, generator: torch.Generator | None = None
    ) -> BipartiteState:
        """Messages that say nothing (or noise), or those of ``state``."""
        if state is None:
            quiet = torch.zeros_like(problem.weights)
            return BipartiteState(quiet + self.noise * normal_like(quiet, generator) if self.noise else quiet)
        expected = tuple(problem.weights.shape)
        if tuple(state.to_left.shape) != expected:
            raise ValueError(f"state: expected messages {list(expected)}, got {list(state.to_left.shape)}")
        return state

    def step(self, problem: Machine, state: BipartiteState) -> tuple[BipartiteState, Float[Tensor, " batch"]]:
        """All messages to the right, then all to the left."""
        # each side's log-odds without what the receiver of the message said: its cavities
        left = (problem.left_fields + state.to_left.sum(2)).unsqueeze(2) - state.to_left
        to_right = problem.message(left)
        right = (problem.right_fields + to_right.sum(1)).unsqueeze(1) - to_right
        proposed = problem.message(right)
        residual = (proposed - state.to_left).abs().amax((1, 2))
        to_left = torch.lerp(proposed, state.to_left, self.damping) if self.damping else proposed
        return BipartiteState(to_left), residual

    def beliefs(self, problem: Machine, state: BipartiteState) -> Beliefs:
        """The beliefs that the messages amount to, those to the right sent once more."""
        left_odds = problem.left_fields + state.to_left.sum(2)
        left = left_odds.unsqueeze(2) - state.to_left
        to_right = problem.message(left)
        right_odds = problem.right_fields + to_right.sum(1)
        right = right_odds.unsqueeze(1) - to_right
        both = problem.weights + left + right
        # the log of the four entries' sum, (0, 0) being 0: first over the right variable, then over the left one
        total = _softplus(right) + _softplus(left + problem.message(right))
        pairs = (-total, right - total, left - total, both - total)
        return self.collect(problem, pairs, torch.cat([left_odds, right_odds], dim=1))

    def state_from_beliefs(self, problem: Machine, beliefs: Beliefs) -> BipartiteState:
        """Messages that amount to given beliefs, where these are consistent and minimise the free energy given their
        node marginals (as those of a consistent head do): a pair's belief is its table times one cavity a variable.
        """
        pairs = beliefs.log_tables[Layout.of(problem.graph).pairs]
        shape = (-1, *problem.weights.shape[1:])
        right = (pairs[..., 0, 1] - pairs[..., 0, 0]).reshape(shape).expand_as(problem.weights)
        return BipartiteState(problem.message(right))


def _softplus(odds: Tensor) -> Tensor:
    # beyond the threshold it is the identity to the last bit of float64
    return F.softplus(odds, threshold=40.0)


def _expected(table: Tensor, chances: Tensor) -> Float[Tensor, " batch"]:
    """Sum of log-potentials ``[batch | 1, factors | 1, ...]`` weighted by beliefs ``[batch, factors, ...]``."""
    if table.shape[1] == 1:
        chances = chances.sum(1, keepdim=True)
    return (chances * table).sum(tuple(range(1, table.dim())))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the sides and the factors of a bipartite graph are."""

    left: int
    right: int
    pairs: int
    """Number of the factor group of the pairs, in row-major order."""
    unary: tuple[tuple[int, Tensor | None], ...]
    """Numbers of the factor groups of single variables, and their variables; ``None`` for all in order."""

    @classmethod
    def of(cls, graph: FactorGraph) -> Layout:
        """The layout of a graph; compiled once."""
        return graph.compiled(_layout)


def _layout(graph: FactorGraph) -> Layout:
    shapes = [group.table_shape for group in graph.factor_groups]
    pairs = [number for number, shape in enumerate(shapes) if shape == (2, 2)]
    if len(pairs) == 1 and len(graph.variable_groups) == 1 and set(shapes) <= {(2,), (2, 2)}:
        variables = graph.factor_groups[pairs[0]].variables
        left = int(variables[:, 1].min())
        right = graph.num_variables - left
        count = torch.arange(graph.num_variables, device=graph.device)
        if torch.equal(variables, torch.cartesian_prod(count[:left], count[left:])):
            unary: list[tuple[int, Tensor | None]] = []
            for number, group in enumerate(graph.factor_groups):
                if group.arity == 1:
                    rows = group.rows[:, 0]
                    unary.append((number, None if torch.equal(rows, count) else rows))
            return Layout(left, right, pairs[0], tuple(unary))
    raise ValueError(
        "bipartite engines are for graphs as FactorGraph.bipartite makes them, of binary variables: "
        f"got {graph.num_variables} variables and factors of shapes {shapes}"
    )
