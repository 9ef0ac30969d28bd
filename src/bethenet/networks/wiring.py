"""Which messages a region network sends: between each outermost region and every region inside it.

With two levels, the stationary points of the region free energy read (c_r the counting number, n_r the number of
outermost regions around r, theta_r the log-potentials at home in r)

    outer p:  log b_p = theta_p + sum over inner r of a_rp          up    a_rp = log b_r - m_pr
    inner r:  log b_r = (theta_r + sum over outer p of m_pr) / (c_r + n_r)   down  m_pr = log sum b_p - a_rp

For Bethe's regions the divisor is 1, and this is belief propagation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.regions import Containment, RegionGraph


@dataclass(frozen=True, eq=False)
class Receiver:
    """One group of inner regions and the messages that it exchanges, of all kinds of containment in one row."""

    group: int
    children: Int[Tensor, " messages"]
    kinds: tuple[Containment, ...]

    def split(self, messages: Tensor) -> tuple[Tensor, ...]:
        """Messages ``[batch, messages, ...]`` by kind."""
        return messages.split([kind.children.numel() for kind in self.kinds], dim=1)


@dataclass(frozen=True, eq=False)
class Wiring:
    """Who exchanges messages, and the inner regions' divisors."""

    receivers: tuple[Receiver, ...]
    """Smaller tables last."""
    divisors: tuple[Float[Tensor, " regions"] | None, ...]
    """Per region group ``c_r + n_r``; ``None`` where it is 1 throughout."""

    @classmethod
    def of(cls, regions: RegionGraph) -> Wiring:
        """The wiring of a region graph, compiled once."""
        return regions.graph.compiled_as(("region network wiring", regions), lambda: _compile(regions))


def _compile(regions: RegionGraph) -> Wiring:
    has_parent = [torch.zeros(len(group), dtype=torch.bool, device=regions.graph.device) for group in regions.groups]
    for edge in regions.containments:
        has_parent[edge.child_group][edge.children] = True
    found: dict[tuple[int, int, tuple[int, ...]], list[Tensor]] = {}
    frontier = []
    for edge in regions.containments:
        outermost = ~has_parent[edge.parent_group][edge.parents]
        pairs = torch.stack([edge.parents[outermost], edge.children[outermost]], dim=1)
        frontier.append(((edge.parent_group, edge.child_group, edge.axes), pairs))
    while frontier:
        (parent, child, axes), pairs = frontier.pop()
        if pairs.shape[0] == 0:
            continue
        found.setdefault((parent, child, axes), []).append(pairs)
        for edge in regions.containments:
            if edge.parent_group == child:
                inner = tuple(axes[axis] for axis in edge.axes)
                frontier.append(((parent, edge.child_group, inner), _join(pairs, edge)))
    divisors = [group.counting_numbers.clone() for group in regions.groups]
    edges = []
    for (parent, child, axes), pieces in found.items():
        parents, children = torch.unique(torch.cat(pieces), dim=0).T
        divisors[child].index_add_(0, children, torch.ones_like(divisors[child])[children])
        if len(regions.groups[parent].table_shape) > 1:  # a factor of one variable has nothing to add to that variable
            size = len(regions.groups[parent])
            whole = parents.numel() == size and bool((parents == torch.arange(size, device=parents.device)).all())
            edges.append(Containment(parent, child, parents, children, axes, covers_parents=whole))
    receivers = []
    for child in sorted(
        {edge.child_group for edge in edges}, key=lambda child: -len(regions.groups[child].table_shape)
    ):
        kinds = tuple(edge for edge in edges if edge.child_group == child)
        receivers.append(Receiver(child, torch.cat([kind.children for kind in kinds]), kinds))
    return Wiring(
        tuple(receivers),
        tuple(
            None if bool(((value == 1) | ~inner).all()) else torch.where(inner & (value > 0), value, 1.0)
            for value, inner in zip(divisors, has_parent, strict=True)
        ),
    )


def _join(pairs: Tensor, edge: Containment) -> Tensor:
    """(outer, inner) pairs continued by ``edge`` to (outer, child of inner)."""
    order = torch.argsort(edge.parents)
    parents = edge.parents[order]
    first = torch.searchsorted(parents, pairs[:, 1].contiguous())
    last = torch.searchsorted(parents, pairs[:, 1].contiguous(), right=True)
    counts = last - first
    outer = pairs[:, 0].repeat_interleave(counts)
    start = (first - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return torch.stack([outer, edge.children[order][start + torch.arange(outer.numel(), device=outer.device)]], dim=1)
