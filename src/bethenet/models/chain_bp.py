"""Belief propagation in homogeneous chains of order M with pairwise factors: sweeps or flooding.

The same fixed points and the same Bethe free energy as the general engine's, at the price of matrix products with the
M tables that all steps share: no table per edge is ever formed, neither for the messages nor for the free energy
(equation 1) nor for its gradient, which is ``<q, d unary> + <S, d transitions>`` with S the sums over all steps of the
pairs' beliefs, one product ``(K, steps * batch) x (steps * batch, K)`` a lag.

An edge of lag l between steps t and t + l is stored at ``[M - l, t]`` (its earlier step), behind M columns of padding:
the edges that begin at a step are then a column, and those that end there a diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bethenet.numerics import negative_entropy_terms, times_log

_FLOOR = {torch.float32: 1e-30, torch.float64: 1e-280}
"""Least value of a message's entry beside its largest; smaller ones give infinite updates further on."""


class ChainMessages(NamedTuple):
    """Log-messages in the layout above: what belief propagation starts again from. The batch is the third axis."""

    forward: Float[Tensor, "order columns batch states"]
    """From each edge's earlier step to its later one."""
    backward: Float[Tensor, "order columns batch states"]

    def from_row(self, row: int) -> ChainMessages:
        """Of the batch's members from ``row`` on."""
        return ChainMessages(self.forward[:, :, row:], self.backward[:, :, row:])

    def joined(self, others: ChainMessages) -> ChainMessages:
        """Those of these members and then of others."""
        return ChainMessages(
            torch.cat([self.forward, others.forward], 2), torch.cat([self.backward, others.backward], 2)
        )

    def beyond(self, core: int) -> ChainMessages:
        """Those along the lags over ``core``."""
        lags = len(self.forward) - core
        return ChainMessages(self.forward[:lags], self.backward[:lags])

    def after(self, rows: int) -> ChainMessages:
        """The same behind ``rows`` members with uniform messages."""
        padding = (0, 0, rows, 0)
        return ChainMessages(functional.pad(self.forward, padding), functional.pad(self.backward, padding))


@dataclass(frozen=True, eq=False)
class ChainBeliefs:
    """What belief propagation says of a batch of chains."""

    log_z: Float[Tensor, " batch"]
    """Minus the Bethe free energy (nats), differentiable with the beliefs held constant (envelope theorem)."""
    node_log_marginals: Float[Tensor, "batch steps states"]
    residual: Float[Tensor, " batch"]
    """Largest change of a node's marginal in the last iteration."""
    messages: ChainMessages
    edges: EdgeFactors
    order: int

    @property
    def node_marginals(self) -> Float[Tensor, "batch steps states"]:
        """P(z_t = k); meaningless at and after a chain's length."""
        return self.node_log_marginals.exp()

    def pair_marginals(self, lag: int) -> Float[Tensor, "batch edges states states"]:
        """P(z_t, z_{t+lag}) of each t, formed in full: for small chains and for looking at."""
        edges, row = self.edges, self.order - lag
        if not 0 <= row < len(edges.tables):
            least = self.order - len(edges.tables) + 1
            raise ValueError(f"lag: expected {least} to {self.order}, the lags that messages go along; got {lag}")
        steps = self.node_log_marginals.shape[1]
        pairs = torch.einsum("tbi,ij,tbj->btij", edges.earlier[row], edges.tables[row], edges.later[row])
        return pairs[:, : max(0, steps - lag)]

    def inconsistency(self) -> Float[Tensor, " batch"]:
        """Largest disagreement of a pair's belief with the marginal of one of its steps."""
        edges, nodes = self.edges, self.node_marginals.transpose(0, 1)
        shape, lags = edges.earlier.shape, len(edges.tables)
        reached = torch.bmm(edges.earlier.flatten(1, 2), edges.tables).reshape(shape) * edges.later
        back = torch.bmm(edges.later.flatten(1, 2), edges.tables.transpose(1, 2)).reshape(shape) * edges.earlier
        worst = nodes.new_zeros(shape[2])
        for row, lag in enumerate(range(self.order, self.order - lags, -1)):
            count = max(0, shape[1] - lag)
            real = edges.earlier[row, :count].sum(-1, keepdim=True) > 0
            for said, node in ((back[row, :count], nodes[:count]), (reached[row, :count], nodes[lag:])):
                gap = torch.where(real, (said - node).abs(), torch.zeros_like(said))
                worst = torch.cat([worst.unsqueeze(0), gap.amax(2)]).amax(0)
        return worst

    def pair_sums(self, weights: Float[Tensor, " batch"] | None = None) -> Float[Tensor, "order states states"]:
        """Sum over steps and (weighted) chains of the pairs' beliefs, one table a lag, the shortest first."""
        edges = self.edges
        earlier = edges.earlier if weights is None else edges.earlier * weights.reshape(1, 1, -1, 1)
        return _pair_sums(earlier, edges.later, edges.tables)


class EdgeFactors(NamedTuple):
    """Pair beliefs as products ``earlier_i * tables_ij * later_j``, never multiplied out; zero where no edge is."""

    earlier: Float[Tensor, "order steps batch states"]
    tables: Float[Tensor, "order states states"]
    later: Float[Tensor, "order steps batch states"]


@dataclass(frozen=True)
class ChainBeliefPropagation:
    """Options of belief propagation in chains. `run` does it."""

    schedule: Literal["sweeps", "flooding"] = "sweeps"
    """A sweep goes from left to right and back, each step reading what was just sent; flooding updates all at once."""
    iterations: int = 5
    damping: float = 0.0
    """Share of the old log-message that is kept."""
    tolerance: float = 0.0
    """Stop once no marginal changes by more. 0: never look, so never wait for the device."""

    def __post_init__(self) -> None:
        if self.schedule not in ("sweeps", "flooding"):
            raise ValueError(f"schedule: expected 'sweeps' or 'flooding', got {self.schedule!r}")
        check_iterations(self)

    def run(
        self,
        unary: Float[Tensor, "batch steps states"],
        transitions: Float[Tensor, "order states states"],
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        messages: ChainMessages | None = None,
    ) -> ChainBeliefs:
        """Infer, from ``messages`` (an earlier result's) where given.

        Args:
            unary: log-potentials of the single states; a row of zeros is an unclamped chain.
            transitions: ``transitions[l - 1, i, j]`` is the log-potential of z_{t-l} = i, z_t = j. An impossible pair
                keeps a weight of 1e-30 (float64: 1e-280) in the messages.
            lengths: steps of each chain that are real; the others change nothing.
            messages: of chains as long and as many.
        """
        with torch.no_grad():
            passing = Passing(self.damping, unary.detach(), transitions.detach(), lengths, messages)
            update = passing.flood if self.schedule == "flooding" else lambda nodes: passing.sweep()
            nodes, residual = passing.iterate(self, update)
        return passing.beliefs(unary, transitions, nodes, residual)


class Iterations(Protocol):
    """What the options of the engines have in common."""

    @property
    def iterations(self) -> int:
        """At most so many."""
        ...

    @property
    def damping(self) -> float:
        """Share of the old log-message that is kept."""
        ...

    @property
    def tolerance(self) -> float:
        """Change of the marginals at which to stop; 0: never look."""
        ...


def check_iterations(options: Iterations) -> None:
    """Raise `ValueError` where options cannot be."""
    if options.iterations < 0:
        raise ValueError(f"iterations: expected at least 0, got {options.iterations}")
    if not 0 <= options.damping < 1:
        raise ValueError(f"damping: expected a number from 0 to below 1, got {options.damping}")
    if not options.tolerance >= 0:
        raise ValueError(f"tolerance: expected a number of at least 0, got {options.tolerance}")


class Passing:
    """Messages on their way along the lags over ``core``: belief propagation where that is 0.

    ``unary`` is kept with the steps first, the tables with the longest lag first.
    """

    def __init__(
        self,
        damping: float,
        unary: Tensor,
        transitions: Tensor,
        lengths: Tensor | None,
        messages: ChainMessages | None,
        core: int = 0,
    ) -> None:
        self.damping = damping
        batch, self.steps, states = unary.shape
        self.order = transitions.shape[0]
        if transitions.shape[1:] != (states, states):
            raise ValueError(f"transitions: expected shape [order, {states}, {states}], got {list(transitions.shape)}")
        step = torch.arange(self.steps, device=unary.device)
        real = torch.ones_like(step).unsqueeze(1) if lengths is None else step.unsqueeze(1) < lengths
        self.real = real.unsqueeze(2).to(unary.dtype)
        # where every state is impossible there is nothing to pass on: such a chain's log Z is put right at the end
        hopeless = (unary.amax(2) == -math.inf) & self.real.squeeze(2).T.bool()
        self.unary = unary.masked_fill(hopeless.unsqueeze(2), 0.0).transpose(0, 1).contiguous()
        self.impossible = hopeless.any(1)
        tables = transitions[core:].flip(0)
        self.maxima = tables.amax((1, 2))
        self.tables = (tables - self.maxima.reshape(-1, 1, 1)).exp()
        shape = (self.order - core, self.order + self.steps, batch, states)
        if messages is None:
            messages = ChainMessages(unary.new_zeros(shape), unary.new_zeros(shape))
        elif messages.forward.shape != shape:
            raise ValueError(f"messages: expected shape {list(shape)}, got {list(messages.forward.shape)}")
        self.forward, self.backward = messages.forward.clone(), messages.backward.clone()
        lag = torch.arange(self.order, core, -1, device=unary.device)
        ends = step + lag.unsqueeze(1)
        self.partners = ends.clamp(max=self.steps - 1)
        inside = ends.unsqueeze(2) < self.steps if lengths is None else ends.unsqueeze(2) < lengths
        self.edge_real = inside.unsqueeze(3).to(unary.dtype)
        self.masked = lengths is not None

    def iterate(
        self, options: Iterations, update: Callable[[Tensor], None]
    ) -> tuple[Float[Tensor, "steps batch states"], Float[Tensor, " batch"]]:
        """(log-marginals of the nodes, their largest change in the last iteration). An iteration is an ``update``,
        which is given those before it.
        """
        nodes = self.node_log_marginals()
        residual = self.unary.new_full((self.unary.shape[1],), math.inf)
        for _ in range(options.iterations):
            update(nodes)
            new = self.node_log_marginals()
            change = (new.exp() - nodes.exp()).abs() * self.real
            residual, nodes = change.amax((0, 2)), new
            if options.tolerance and bool((residual <= options.tolerance).all()):
                break
        return nodes, residual

    def _pass(self, cavities: Tensor, tables: Tensor, old: Tensor) -> Tensor:
        """New log-messages ``[order, ..., states]`` from what their senders know."""
        maximum = cavities.amax(-1, keepdim=True)
        sent = torch.bmm((cavities - maximum).exp(), tables).clamp_min_(_FLOOR[cavities.dtype]).log_()
        return sent.lerp_(old, self.damping) if self.damping else sent

    def sweep(self) -> None:
        """All steps from left to right, then from right to left."""
        order, damping = self.order, self.damping
        known = self.unary + self.backward[:, order:].sum(0)
        for step in range(self.steps):
            column = order + step
            arriving = self.forward[:, step:column].diagonal(dim1=0, dim2=1).sum(-1)
            cavities = known[step] + arriving - self.backward[:, column]
            old = self.forward[:, column]
            self.forward[:, column] = self._pass(cavities, self.tables, old)
        known = self.unary + self._arriving()
        tables = self.tables.transpose(1, 2)
        for step in reversed(range(self.steps)):
            column = order + step
            arriving = self.forward[:, step:column].diagonal(dim1=0, dim2=1).permute(2, 0, 1)
            cavities = known[step] + self.backward[:, column].sum(0) - arriving
            target = self.backward[:, step:column].diagonal(dim1=0, dim2=1).permute(2, 0, 1)
            sent = self._pass(cavities, tables, target if damping else arriving)
            target.copy_(sent * self.real[step] if self.masked else sent)

    def flood(self, known: Float[Tensor, "steps batch states"]) -> None:
        """All messages from the previous ones and the nodes' log-beliefs (up to a constant) by them."""
        forward, backward = self._forwards(known), self._backwards(known)
        self.forward[:, self.order :], self.backward[:, self.order :] = forward, backward

    def scale(self, known: Float[Tensor, "steps batch states"]) -> None:
        """All messages that bring the pairs' beliefs nearer to given log-marginals: one iteration of proportional
        fitting, after which they agree with those of the pairs' earlier steps.
        """
        self.forward[:, self.order :] = self._forwards(known)
        self.backward[:, self.order :] = self._backwards(known)

    def _forwards(self, known: Tensor) -> Tensor:
        forward, backward = self.forward[:, self.order :], self.backward[:, self.order :]
        sent = self._pass((known - backward).flatten(1, 2), self.tables, forward.flatten(1, 2))
        return sent.reshape(forward.shape)

    def _backwards(self, known: Tensor) -> Tensor:
        forward, backward = self.forward[:, self.order :], self.backward[:, self.order :]
        later = (known[self.partners] - forward).flatten(1, 2)
        sent = self._pass(later, self.tables.transpose(1, 2), backward.flatten(1, 2))
        return sent.reshape(backward.shape) * self.edge_real

    def _arriving(self) -> Tensor:
        """For each step the sum of what earlier steps sent it."""
        total = torch.zeros_like(self.unary)
        for row in range(len(self.forward)):
            # row M - l holds lag l: what reaches step t left at t - l, that is column t + row
            total += self.forward[row, row : row + self.steps]
        return total

    def received(self) -> Float[Tensor, "steps batch states"]:
        """Sum of all log-messages to each step."""
        return self.backward[:, self.order :].sum(0) + self._arriving()

    def node_log_marginals(self) -> Float[Tensor, "steps batch states"]:
        """Log-beliefs of the single states."""
        return (self.unary + self.received()).log_softmax(-1)

    def edge_energy(self, known: Tensor) -> tuple[EdgeFactors, Float[Tensor, " batch"]]:
        """The pair beliefs as products, given the nodes' log-beliefs, and what the edges add to the free energy
        (equation 1): each its own term, less the negative entropies of its two nodes.

        With log-cavities a, b of an edge's two ends its belief is exp(a_i + W_ij + b_j) / z, so its term, sum belief
        (log belief - W), is <belief_i, a> + <belief_j, b> - log z: no table is formed.
        """
        shape = self.backward[:, self.order :].shape
        first = (known - self.backward[:, self.order :]).log_softmax(-1)
        second = (known[self.partners] - self.forward[:, self.order :]).log_softmax(-1)
        earlier, later = first.exp(), second.exp()
        reached = torch.bmm(earlier.flatten(1, 2), self.tables).reshape(shape)
        back = torch.bmm(later.flatten(1, 2), self.tables.transpose(1, 2)).reshape(shape)
        total = (reached * later).sum(-1, keepdim=True).clamp_min(torch.finfo(known.dtype).tiny)
        share = self.edge_real / total
        terms = times_log(earlier * back, first) + times_log(reached * later, second)
        constants = total.log().squeeze(-1) + self.maxima.reshape(-1, 1, 1)
        edges = (terms * share).sum(-1) - constants * self.edge_real.squeeze(-1)
        degrees = self.edge_real.sum(0)
        degrees = degrees.index_add(0, self.partners.flatten(), self.edge_real.flatten(0, 1))
        nodes = (negative_entropy_terms(known) * degrees).sum((0, 2))
        return EdgeFactors(earlier * share, self.tables, later), edges.sum((0, 1)) - nodes

    def beliefs(self, unary: Tensor, transitions: Tensor, known: Tensor, residual: Tensor) -> ChainBeliefs:
        """What the messages say, given the nodes' log-beliefs. ``log_z`` is differentiable in the first two."""
        with torch.no_grad():
            edges, energy = self.edge_energy(known)
            weights = known.exp() * self.real
            nodes = negative_entropy_terms(known) * self.real - times_log(weights, self.unary)
            value = (-energy - nodes.sum((0, 2))).masked_fill(self.impossible, -math.inf)
        log_z: Tensor = Envelope.apply(value, unary, transitions, weights.transpose(0, 1), *edges)
        messages = ChainMessages(self.forward, self.backward)
        return ChainBeliefs(log_z, known.transpose(0, 1), residual, messages, edges, self.order)


class Envelope(torch.autograd.Function):
    """A value with given gradients: ``marginals`` (if any) in ``unary``, the sums of the pairs' beliefs in
    ``transitions``. The sums are weighted by the incoming gradient, so they are formed only when it is there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        unary: Tensor | None,
        transitions: Tensor,
        marginals: Tensor | None,
        earlier: Tensor,
        tables: Tensor,
        later: Tensor,
    ) -> Tensor:
        """The value."""
        ctx.save_for_backward(marginals, earlier, tables, later)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The beliefs."""
        marginals, earlier, tables, later = ctx.saved_tensors
        unary = None if marginals is None else marginals * gradient.reshape(-1, 1, 1)
        transitions = _pair_sums(earlier * gradient.reshape(1, 1, -1, 1), later, tables)
        return (None, unary, transitions, None, None, None, None)


def _pair_sums(earlier: Tensor, later: Tensor, tables: Tensor) -> Tensor:
    sums = torch.bmm(earlier.flatten(1, 2).transpose(1, 2), later.flatten(1, 2)) * tables
    return sums.flip(0)
