"""Generalised belief propagation between clusters and their intersections.

The engine looks for a minimum of a region free energy (equation 1 with Kikuchi's regions). Let alpha be the outer
regions, beta the inner ones on which they must agree, n_beta the number of outer regions around beta, theta_alpha the
log-potentials in alpha. The negative entropy terms of regions with negative counting numbers are not convex; following
Heskes, Albers and Kappen (2003) a part of each is replaced by its tangent at the beliefs b'_beta found so far,

    c_beta b log b  ->  (c_beta + delta_beta) b log b - delta_beta b log b',     delta_beta >= 0,

which bounds the free energy from above and touches it at b'. With enough delta the bound is convex, and it is minimised
under the constraint that beliefs agree by ascent in the multipliers: in turn for each beta

    log b_beta = (s_beta + delta_beta log b'_beta + sum_alpha log b_alpha(x_beta)) / (n_beta + c_beta + delta_beta)
    log b_alpha += log b_beta - log b_alpha(x_beta)      for every alpha around beta
    s_beta -= sum_alpha (log b_beta - log b_alpha(x_beta))

up to a constant, where b_alpha(x_beta) is alpha's belief summed down to beta and s_beta minus the sum of multipliers.
Regions of one colour are updated at once. Minimised to the end before b' is renewed, the bound makes the free energy
fall in every round (*double loop*). Renewed after each sweep with a delta that is only a fraction of what convexity
needs, it is far faster and has the same fixed points, but may oscillate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs, marginalize
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.engine import IterativeEngine, State
from bethenet.inference.gbp.wiring import Colour, Placement, Wiring, compile_wiring
from bethenet.numerics import log_normalize
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph
from bethenet.regions.clusters import Clusters

DOUBLE_LOOP = 2.0
"""The value of ``GBPState.convexity`` at which each convex bound is minimised to the end; up to 1 none is."""
PATIENCE = 100
"""Sweeps in which the residual must halve; else the convexity is doubled."""


class GBPState(NamedTuple):
    """Double precision throughout."""

    outer: Float[Tensor, "batch outer_entries"]
    """log b_alpha"""
    inner: Float[Tensor, "batch inner_entries"]
    """Minus the sum of beta's multipliers."""
    tangent: Float[Tensor, "batch inner_entries"]
    """log b'_beta"""
    potentials: Float[Tensor, "batch outer_entries"]
    """theta_alpha: what ``outer`` was before any message."""
    convexity: Float[Tensor, " batch"]
    """The fraction of the convex bound's delta; `DOUBLE_LOOP` where each bound is minimised to the end."""
    patience: Int[Tensor, " batch"]
    """Sweeps left to halve ``target``."""
    target: Float[Tensor, " batch"]
    progress: Float[Tensor, " batch"]
    """How far, in probability, the last renewal moved b'."""


@dataclass(frozen=True)
class GeneralizedBeliefPropagation(IterativeEngine):
    """Generalised belief propagation (Kikuchi approximation), convergent.

    Every member of a batch starts with fast single-loop updates; one that gets stuck goes on with a more convex bound,
    in the end with the double loop, whose every round lowers the free energy as far as it is minimised to the end
    (``inner_tolerance``). One iteration is one sweep over all regions. The residual is the largest disagreement between
    regions, or change of an intersection's belief, in probability.

    A state is continued (warm start) where neither old nor new tables contain impossible states; members that do start
    afresh. All arithmetic is in double precision.
    """

    name: ClassVar[str] = "gbp"

    clusters: Clusters = "auto"
    """The largest regions; see `RegionGraph.kikuchi`."""
    max_length: int = 6
    """The most variables in a cluster where ``clusters`` is ``"cycles"`` or ``"strips"``."""
    max_table_entries: int = 2**20
    """No cluster may have a larger table."""
    max_iterations: int = 5000
    convexity: float = 0.25
    """The fraction of the convex bound's delta to start with. Its part is that of damping: more is slower and surer. It
    is doubled for each member that gets stuck."""
    double_loop: bool = False
    """Start with the double loop."""
    inner_tolerance: float = 0.1
    """The double loop minimises a bound until regions disagree by at most this fraction of the last round's change."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.convexity <= 1:
            raise ValueError(f"convexity: expected a number in (0, 1], got {self.convexity}")
        if not 0 < self.inner_tolerance <= 1:
            raise ValueError(f"inner_tolerance: expected a number in (0, 1], got {self.inner_tolerance}")
        if not isinstance(self.clusters, str | Tensor | np.ndarray):
            object.__setattr__(self, "clusters", tuple(self.clusters))

    def regions(self, potentials: LogPotentials) -> RegionGraph:
        """The region graph that is used for a model."""
        return self._wiring(potentials).regions

    def _build(self, potentials: LogPotentials) -> RegionGraph:
        return RegionGraph.kikuchi(
            potentials.graph,
            self.clusters,
            max_length=self.max_length,
            max_table_entries=self.max_table_entries,
        )

    def init(
        self, potentials: LogPotentials, state: State = None, generator: torch.Generator | None = None
    ) -> GBPState:
        """The potentials alone, or the messages of an earlier state."""
        wiring = self._wiring(potentials)
        theta = _outer_potentials(wiring, potentials)
        batch, device = potentials.batch_size, potentials.device
        zeros = torch.zeros(wiring.num_inner_entries, batch, dtype=torch.float64, device=device).T
        outer, inner, tangent = theta, zeros, zeros
        if state is not None:
            outer, inner, tangent = _continued(state, theta)
        ones = torch.ones(batch, dtype=torch.float64, device=device)
        convexity = ones * (DOUBLE_LOOP if self.double_loop else self.convexity)
        patience = torch.full((batch,), PATIENCE, device=device)
        return GBPState(outer, inner, tangent, theta, convexity, patience, ones, ones)

    def step(self, potentials: LogPotentials, state: State) -> tuple[GBPState, Float[Tensor, " batch"]]:
        """One sweep over all intersections, and a renewed tangent for the members that are due."""
        wiring = self._wiring(potentials)
        outer, inner = (tensor.T.clone(memory_format=torch.contiguous_format) for tensor in (state.outer, state.inner))
        tangent, added = state.tangent.T, _delta(wiring, self.convexity) * state.convexity.clamp(max=1)
        attraction, weights = added * _finite(tangent), wiring.outer_counts + wiring.counting_numbers + added
        beliefs, gaps = torch.empty_like(inner), [torch.zeros_like(state.progress)]
        for colour in wiring.colours:
            rows = slice(colour.first, colour.last)
            beliefs[rows], gap = _agree(
                colour, outer, inner[rows], attraction[rows], weights[rows], potentials.has_zeros
            )
            gaps.append(gap)
        gap = torch.stack(gaps).amax(0)
        due = (state.convexity < DOUBLE_LOOP) | (gap <= self.inner_tolerance * state.progress)
        moved = (beliefs.exp() - tangent.exp()).abs().amax(0) if len(beliefs) else torch.zeros_like(gap)
        progress = torch.where(due, moved, state.progress)
        residual = torch.maximum(gap, progress)
        tangent = torch.where(due, beliefs, tangent)
        patient = _escalate(state, residual)
        return GBPState(outer.T, inner.T, tangent.T, state.potentials, *patient, progress), residual

    def beliefs(self, potentials: LogPotentials, state: State) -> Beliefs:
        """The outer regions' beliefs, and those of the others summed down from them."""
        wiring = self._wiring(potentials)
        groups, batch = wiring.regions.groups, state.outer.shape[0]
        tables = [state.outer.new_zeros(batch, len(group), *group.table_shape) for group in groups]
        for number, rows, first, last in wiring.outer_groups:
            shape = groups[number].table_shape
            table = state.outer[:, first:last].reshape(batch, len(rows), *shape)
            if bool((table.reshape(batch, len(rows), -1) == -math.inf).all(-1).any()):
                raise ImpossibleEvidenceError("the evidence, or the model itself, rules out every assignment")
            tables[number][:, rows] = log_normalize(table, list(range(2, table.dim())))
        for source in wiring.sources:
            parents = tables[source.parent_group][:, source.parents]
            tables[source.child_group][:, source.children] = marginalize(parents, source.axes)
        return Beliefs(wiring.regions, [table.to(potentials.dtype) for table in tables])

    def _wiring(self, potentials: LogPotentials) -> Wiring:
        # Clusters given as a list are known by identity; keeping them with the wiring keeps the identity theirs.
        clusters = self.clusters if isinstance(self.clusters, str) else id(self.clusters)
        key = ("gbp", clusters, self.max_length, self.max_table_entries)
        return potentials.graph.compiled_as(key, lambda: (self.clusters, compile_wiring(self._build(potentials))))[1]


def _agree(
    colour: Colour, outer: Tensor, inner: Tensor, attraction: Tensor, weights: Tensor, has_zeros: bool
) -> tuple[Tensor, Float[Tensor, " batch"]]:
    """Make the outer regions around each inner region of one colour agree, in place.

    Returns the beliefs on which they agree, and how far they were from it.
    """
    batch = outer.shape[1]
    gathered = [outer.index_select(0, index).view(-1, summands, batch) for index, summands in colour.parts]
    seen = torch.cat([_log_sum(table, has_zeros) for table in gathered])
    padded = torch.cat([seen, seen.new_zeros(1, batch)]).index_select(0, colour.slots_of_entry)
    total = padded.view(len(inner), colour.most, batch).sum(1)
    unnormalized = ((inner + attraction + total) / weights).view(-1, colour.cells, batch)
    belief = log_normalize(unnormalized, 1).view(-1, batch)
    wanted = belief.index_select(0, colour.entry_of_slot)
    if has_zeros:
        message = torch.where(seen == -math.inf, 0.0, wanted - seen)
        inner.copy_(torch.where(belief == -math.inf, belief, inner - colour.outer_counts * belief + total))
    else:
        message = wanted - seen
        inner -= colour.outer_counts * belief - total
    gap = (wanted.exp() - seen.exp()).abs().amax(0)
    first = 0
    for (index, _), table in zip(colour.parts, gathered, strict=True):
        last = first + len(table)
        outer.index_copy_(0, index, table.add_(message[first:last].unsqueeze(1)).view(-1, batch))
        first = last
    return belief, gap


def _log_sum(values: Tensor, has_zeros: bool) -> Tensor:
    """Log-sum-exp over the axis in the middle."""
    maximum = values.amax(1, keepdim=True)
    if has_zeros:
        maximum = maximum.clamp(min=torch.finfo(values.dtype).min)
    return (values - maximum).exp_().sum(1).log_() + maximum.squeeze(1)


def _finite(logarithms: Tensor) -> Tensor:
    """Zero where a state is impossible: it needs no tangent."""
    return logarithms.masked_fill(logarithms == -math.inf, 0.0)


def _delta(wiring: Wiring, convexity: float) -> Float[Tensor, "inner_entries 1"]:
    """What makes the bound convex: no negative counting number, and at the first convexity no weight below one."""
    numbers = wiring.counting_numbers
    lacking = (1 - wiring.outer_counts - numbers) / convexity
    return torch.maximum(-numbers, lacking).clamp(min=0)


def _escalate(state: GBPState, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The convexity, doubled where patience has run out; the patience left; the residual to be halved."""
    halved = residual <= state.target / 2
    patience = torch.where(halved, PATIENCE, state.patience - 1)
    stuck = patience == 0
    convexity = torch.where(stuck, 2 * state.convexity, state.convexity)
    convexity = torch.where(convexity > 1, DOUBLE_LOOP, convexity)
    return convexity, torch.where(stuck, PATIENCE, patience), torch.where(halved | stuck, residual, state.target)


def _outer_potentials(wiring: Wiring, potentials: LogPotentials) -> Float[Tensor, "batch outer_entries"]:
    """theta_alpha: every factor and node term in one outer region, each table normalised."""
    batch = potentials.batch_size
    result = torch.zeros(wiring.num_outer_entries, batch, dtype=torch.float64, device=potentials.device)
    for placement in wiring.placements:
        result.index_add_(0, placement.entries, _spread(placement, potentials).expand(-1, batch))
    for _, rows, first, last in wiring.outer_groups:
        tables = result[first:last].view(len(rows), -1, batch)
        tables.copy_(log_normalize(tables, 1))
    return result.T


def _spread(placement: Placement, potentials: LogPotentials) -> Float[Tensor, "entries batch"]:
    source = potentials.node_terms if placement.is_node else potentials.tables
    table = source[placement.group].double()
    table = table.reshape(*table.shape[:2], -1)
    table = table[:, placement.rows] if table.shape[1] > 1 else table.expand(-1, len(placement.rows), -1)
    return table[:, :, placement.cells].flatten(1).T


def _continued(state: GBPState, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An earlier state's messages on top of new potentials; members with impossible states start afresh."""
    if state.outer.shape[1] != theta.shape[1] or state.outer.shape[0] not in (1, theta.shape[0]):
        raise ValueError(
            f"the state is for {state.outer.shape[0]} models of {state.outer.shape[1]} entries; "
            f"these are {theta.shape[0]} of {theta.shape[1]}"
        )
    messages = state.outer - state.potentials
    warm = (messages + theta).isfinite().all(1, keepdim=True) & state.inner.isfinite().all(1, keepdim=True)
    outer = torch.where(warm, theta + messages, theta)
    zero = torch.zeros((), dtype=theta.dtype, device=theta.device)
    return outer, torch.where(warm, state.inner, zero), torch.where(warm, state.tangent, zero)
