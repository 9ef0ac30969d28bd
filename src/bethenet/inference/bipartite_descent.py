"""Descent of the Bethe free energy on complete bipartite graphs of binary variables (Boltzmann machines), as matrices.

What `Descent` does for any graph, in closed form: given the node marginals, the factors' beliefs are roots of one
quadratic equation a pair, and the gradient is a sum over its rows or columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.inference.bipartite import BipartiteEngine, Machine
from bethenet.inference.engine import State
from bethenet.inference.minimisers import Adam, Evaluation, Minimiser, Vector
from bethenet.inference.starts import normal_like


class Duals(NamedTuple):
    """What scales a pair's table to its marginals: the belief is ``exp(W x z + left x + right z)``, normalised."""

    left: Float[Tensor, "batch left right"]
    right: Float[Tensor, "batch left right"]


@dataclass(frozen=True)
class BipartiteDescent(BipartiteEngine):
    """Minimise the Bethe free energy over node log-odds, for `RBM`s of binary units and graphs of that form.

    Beliefs are consistent at every step. The residual is the largest change of a marginal, in probability, in a full
    step along the natural gradient: the step of one sweep of belief propagation.

    >>> from bethenet.models.rbm import RBM
    >>> model = RBM(6, 4, generator=torch.Generator().manual_seed(0))
    >>> str(BipartiteDescent().run(model.log_potentials()).status)
    'converged'
    """

    name: ClassVar[str] = "bipartite-descent"

    minimiser: Minimiser = field(default_factory=Adam)
    """`Adam` or `LimitedMemory`, on log-odds."""
    noise: float = 0.1
    """Standard deviation of the noise that a cold start adds to the fields, which breaks symmetries. (Without a
    generator it is the same every time.)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise: expected a number of at least 0, got {self.noise}")

    def init(self, problem: Machine, state: State = None, generator: torch.Generator | None = None) -> State:
        """Log-odds as the fields alone have them, with noise; or those of ``state``, with what its minimiser learnt."""
        if state is None:
            fields = torch.cat([problem.left_fields, problem.right_fields], 1)
            point, previous = fields + self.noise * normal_like(fields, generator), None
        else:
            point, previous = state.point, state
            expected = (problem.batch_size, sum(problem.weights.shape[1:]))
            if tuple(point.shape) != expected:
                raise ValueError(f"state: expected log-odds {list(expected)}, got {list(point.shape)}")
        return self.minimiser.init(point, evaluate(problem, point), previous)

    def step(self, problem: Machine, state: State) -> tuple[State, Float[Tensor, " batch"]]:
        """One evaluation of the free energy and its gradient for every member."""
        new = self.minimiser.step(lambda point, memory: evaluate(problem, point), state)
        natural = new.evaluation.gradient * new.evaluation.preconditioner
        change = (new.point - natural).sigmoid() - new.point.sigmoid()
        return new, change.abs().amax(1)

    def beliefs(self, problem: Machine, state: State) -> Beliefs:
        """The consistent beliefs."""
        left, right = split(problem, state.point)
        duals = solve(problem.weights, left, right)
        neither = F.logsigmoid(-left).unsqueeze(2) - F.softplus(duals.right)
        both = neither + duals.left + duals.right + problem.weights
        return self.collect(problem, (neither, neither + duals.right, neither + duals.left, both), state.point)


def evaluate(problem: Machine, point: Vector) -> Evaluation:
    """The free energy at log-odds ``point``. By the envelope theorem its derivative by a marginal is the unit's
    log-odds less its field and less the messages that the duals amount to: the step that belief propagation would take.
    """
    left, right = split(problem, point)
    rows, columns = problem.weights.shape[1:]
    duals = solve(problem.weights, left, right)
    left_slopes = duals.left.sum(2) - (columns - 1) * left - problem.left_fields
    right_slopes = duals.right.sum(1) - (rows - 1) * right - problem.right_fields
    slopes, chances = torch.cat([left_slopes, right_slopes], 1), point.sigmoid()
    # a variable's entropy is softplus(A) - q A; of a pair's belief b, sum b log b - b(1, 1) W = log b(0, 0) + q u + p v
    normalisers = (rows - 1) * F.softplus(right).sum(1) - F.softplus(left).sum(1) - F.softplus(duals.right).sum((1, 2))
    spread = chances * (1 - chances)
    value = (chances * slopes).sum(1) + normalisers
    return Evaluation(value, slopes * spread, spread.clamp_min(1e-6).reciprocal(), ())


def solve(
    weights: Float[Tensor, "batch left right"], left: Float[Tensor, "batch left"], right: Float[Tensor, "batch right"]
) -> Duals:
    """Every pair's duals u and v, from its weight W and its variables' log-odds A and B.

    They solve ``A = u + log (1 + e^(v + W)) / (1 + e^v)``, and the like for B: the belief's marginals. For ``e^v`` that
    is a quadratic equation. With w, a, b the halves of W, A, B its positive root is
    ``v = b - w + asinh((e^-w sinh(a + b) - e^w sinh(a - b)) / 2 cosh a)``: Welling & Teh's (2001) closed form in
    log-odds, which keeps its digits near 0 and 1 and at strong couplings.
    """
    weights, left, right = weights / 2, left.unsqueeze(2) / 2, right.unsqueeze(1) / 2
    sums, differences = (-weights).exp() * (left + right).sinh(), weights.exp() * (left - right).sinh()
    return Duals(
        left - weights + _arsinh((sums + differences) * (0.5 / right.cosh())),
        right - weights + _arsinh((sums - differences) * (0.5 / left.cosh())),
    )


def _arsinh(values: Tensor) -> Tensor:
    # PyTorch's own takes several times as long
    size = values.abs()
    return (size + torch.hypot(size, torch.ones_like(size))).log().copysign(values)


def split(problem: Machine, values: Vector) -> tuple[Float[Tensor, "batch left"], Float[Tensor, "batch right"]]:
    """What belongs to the left side's variables, and what to the right side's."""
    left, right = values.split(problem.weights.shape[1:], 1)
    return left, right
