"""From an encoding to beliefs: either penalised for being inconsistent, or consistent by construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs, marginalize
from bethenet.inference.coupling import consistent_beliefs
from bethenet.networks.encoding import Encoding
from bethenet.networks.fields import impossible_entries, spread, unary_log_potentials
from bethenet.numerics import NEGATIVE_INFINITY, log_normalize, safe_log, times_log
from bethenet.potentials import LogPotentials
from bethenet.regions import Containment, RegionGraph


class Head(Protocol):
    """Turns an encoding into beliefs over a region graph."""

    def beliefs(self, potentials: LogPotentials, regions: RegionGraph, encoding: Encoding) -> Beliefs:
        """Positive and normalised pseudo-marginals of every region."""
        ...

    def penalty(self, beliefs: Beliefs) -> Float[Tensor, " batch"]:
        """What to add to the free energy for beliefs that disagree."""
        ...


@dataclass(frozen=True)
class ConsistentHead:
    """Node logits only; every factor's belief is the free energy's minimiser with those node marginals.

    Any beliefs it gives are exactly consistent, so there is nothing to penalise. It is for Bethe's regions.
    """

    def beliefs(self, potentials: LogPotentials, regions: RegionGraph, encoding: Encoding) -> Beliefs:
        """See `Head`."""
        if regions is not RegionGraph.bethe(potentials.graph):
            raise ValueError("the consistent head outputs beliefs of factors and variables: Bethe's regions")
        return consistent_beliefs(potentials, possible_log_marginals(potentials, encoding.node_logits()))

    def penalty(self, beliefs: Beliefs) -> Float[Tensor, " batch"]:
        """Zero."""
        return torch.zeros(beliefs.batch_size, device=beliefs.graph.device, dtype=beliefs.log_tables[0].dtype)


@dataclass(frozen=True)
class PenalizedHead:
    """Logits for every outermost region (equation 5); what lies inside is the average over its parents (equation 6).

    Args:
        weight: lambda of equation 7.
        distance: d of equation 7 between a region's belief q and what its parent p says of it: ``l2``, the squared
            Euclidean distance; ``kl``, KL(q || p); ``reverse-kl``, KL(p || q).
        per_factor: divide by the number of factors, as equation 7 does. (The authors' Ising code does not.)
        projections: before anything is made of them, scale the larger regions' beliefs to agree with those inside them
            (iterative proportional fitting), so many times over. What disagreement is left is still penalised.

    Factors of a single variable have that variable's belief: they are neither predicted nor averaged over.
    """

    weight: float = 1.0
    distance: Literal["l2", "kl", "reverse-kl"] = "l2"
    per_factor: bool = True
    projections: int = 0

    def __post_init__(self) -> None:
        if self.distance not in _DISTANCES:
            raise ValueError(f"distance: expected one of {', '.join(_DISTANCES)}, got {self.distance!r}")
        if not self.weight >= 0:
            raise ValueError(f"weight: expected a number of at least 0, got {self.weight}")

    def beliefs(self, potentials: LogPotentials, regions: RegionGraph, encoding: Encoding) -> Beliefs:
        """See `Head`."""
        plan = _plan(regions)
        forbidden = impossible_entries(potentials, regions) if potentials.has_zeros else None
        tables: dict[int, Tensor] = {}

        def predicted(number: int) -> Tensor:
            first = len(regions.groups) - len(regions.node_groups)
            logits = encoding.region_logits(number) if number < first else encoding.node_logits()[number - first]
            if forbidden is not None:
                logits = logits.masked_fill(forbidden[number], NEGATIVE_INFINITY)
            return log_normalize(logits, list(range(2, logits.dim())))

        for step in plan.steps:
            if not step.edges:
                tables[step.group] = predicted(step.group)
                continue
            total: Tensor | None = None
            for edge in step.edges:
                said = _said(tables[edge.parent_group], edge).exp()
                start = said.new_zeros(said.shape[0], len(regions.groups[step.group]), *said.shape[2:])
                total = (start if total is None else total).index_add(1, edge.children, said)
            if total is None:
                continue
            average = safe_log(total / step.heard.reshape(-1, *[1] * (total.dim() - 2)))
            if step.orphans is not None:
                alone = step.orphans.reshape(-1, *[1] * (total.dim() - 2))
                average = torch.where(alone, predicted(step.group), average)
            tables[step.group] = average
        if self.projections:
            for step in reversed(plan.steps):
                tables[step.group] = self._project(step.group, tables, regions)
        for edge in plan.unary:
            tables[edge.parent_group] = tables[edge.child_group][:, edge.children]
        batch = max((table.shape[0] for table in tables.values()), default=1)
        return Beliefs(regions, [tables[n].expand(batch, *tables[n].shape[1:]) for n in range(len(regions.groups))])

    def penalty(self, beliefs: Beliefs) -> Float[Tensor, " batch"]:
        """Lambda over the number of factors, times the sum of distances over all containments (equation 7)."""
        total = torch.zeros(beliefs.batch_size, device=beliefs.graph.device, dtype=beliefs.log_tables[0].dtype)
        for step in _plan(beliefs.regions).steps:
            for edge in step.edges:
                said = _said(beliefs.log_tables[edge.parent_group], edge)
                belief = beliefs.log_tables[edge.child_group][:, edge.children]
                total = total + _DISTANCES[self.distance](belief, said).flatten(1).sum(1)
        factors = beliefs.graph.num_factors if self.per_factor else 1
        return self.weight / max(factors, 1) * total

    def _project(self, number: int, tables: dict[int, Tensor], regions: RegionGraph) -> Tensor:
        """A group's beliefs scaled to those of the regions inside, which have been through this already."""
        table = tables[number]
        inside = [edge for edge in regions.containments if edge.parent_group == number]
        for _ in range(self.projections):
            for edge in inside:
                said = _said(table, edge)
                wanted = tables[edge.child_group][:, edge.children]
                factor = torch.where(said == NEGATIVE_INFINITY, torch.zeros_like(said), wanted - said)
                factor = spread(factor, edge.axes, table.dim() - 2)
                if edge.covers_parents:
                    table = table + factor
                else:
                    table = table.index_add(1, edge.parents, factor.expand(-1, -1, *table.shape[2:]))
        return table


@dataclass(frozen=True, eq=False)
class _Step:
    """How one region group's beliefs come about: predicted where it has no parents, averaged where it has."""

    group: int
    edges: list[Containment]
    heard: Tensor
    """How many parents each region has (at least 1)."""
    orphans: Tensor | None
    """Which regions of a group that has parents have none themselves."""


@dataclass(frozen=True, eq=False)
class _Plan:
    steps: list[_Step]
    unary: list[Containment]
    """From factors of one variable to that variable."""


def _plan(regions: RegionGraph) -> _Plan:
    return regions.graph.compiled_as(("penalized head", regions), lambda: _make_plan(regions))


def _make_plan(regions: RegionGraph) -> _Plan:
    sizes = [len(group.table_shape) for group in regions.groups]
    first = len(regions.groups) - len(regions.node_groups)
    steps = []
    for number in sorted(range(len(regions.groups)), key=lambda number: -sizes[number]):
        if sizes[number] == 1 and number < first:
            continue
        edges = [e for e in regions.containments if e.child_group == number and sizes[e.parent_group] > 1]
        heard = torch.zeros(len(regions.groups[number]), device=regions.graph.device)
        for edge in edges:
            heard.index_add_(0, edge.children, torch.ones_like(edge.children, dtype=heard.dtype))
        orphans = heard == 0
        steps.append(_Step(number, edges, heard.clamp(min=1), orphans if bool(orphans.any()) else None))
    unary = [e for e in regions.containments if sizes[e.parent_group] == 1 and e.parent_group < first]
    return _Plan(steps, unary)


def possible_log_marginals(potentials: LogPotentials, logits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Normalised node log-marginals from logits, with no mass on states that a variable cannot have."""
    if not potentials.has_zeros:
        return tuple(torch.log_softmax(values, -1) for values in logits)
    terms = unary_log_potentials(potentials)
    masked = (v.masked_fill(t == NEGATIVE_INFINITY, NEGATIVE_INFINITY) for v, t in zip(logits, terms, strict=True))
    return tuple(log_normalize(values, -1) for values in masked)


def _said(parents: Tensor, edge: Containment) -> Tensor:
    return marginalize(parents if edge.covers_parents else parents[:, edge.parents], edge.axes)


def _squared(belief: Tensor, said: Tensor) -> Tensor:
    return (belief.exp() - said.exp()).square()


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """The terms of KL(p || q)."""
    return times_log(p.exp(), p) - times_log(p.exp(), q)


_DISTANCES = {"l2": _squared, "kl": _divergence, "reverse-kl": lambda belief, said: _divergence(said, belief)}
