"""A graph network on a region graph: any regions, any number of states, any graph at run time.

Two messages run along every containment of a child region c in a parent p, both with one feature vector per entry of
the *child's* table:

    down  m = phi(log sum exp over the parent's other variables of h_p - a)       up  a = phi'(h_c - m)

where ``h_r``, the features of region r, are its log-potentials plus everything sent to it. Without the learnt maps phi
this is belief propagation, in as many identical channels as the network is wide, and so it starts: the maps are
residual and their last layers are zero. All entries of all tables share their weights, and features are centred over
each table. Renaming the states of a variable (for an Ising spin: turning it over together with its field and its
couplings) therefore permutes the outputs and changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.networks.fields import region_log_potentials, spread
from bethenet.potentials import LogPotentials
from bethenet.regions import Containment, RegionGraph


class RegionNetwork(nn.Module):
    """Rounds of learnt messages between regions.

    Args:
        width: channels per table entry.
        rounds: how often messages go down and up.
    """

    def __init__(self, width: int = 64, rounds: int = 10) -> None:
        super().__init__()
        self.width = width
        self.rounds = nn.ModuleList(Round(width) for _ in range(rounds))
        self.read = nn.Parameter(torch.full((width,), 1.0 / width))

    def forward(
        self, potentials: LogPotentials, regions: RegionGraph, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> RegionEncoding:
        """See `Encoder`; this one looks at nothing but the potentials."""
        fields = region_log_potentials(potentials, regions)
        state = Messages.silent(fields, regions, self.width)
        for layer in self.rounds:
            state = layer(state, fields, regions)
        return RegionEncoding(self, state.gather(fields, regions, None), regions)


class Round(nn.Module):
    """All messages down, then all messages up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.down = Update(width)
        self.up = Update(width)

    def forward(self, state: Messages, fields: list[Tensor], regions: RegionGraph) -> Messages:
        """The messages after one round."""
        features = state.gather(fields, regions, self.scale)
        down = [
            self.down(_sum_out(features[edge.parent_group], edge) - up, old)
            for edge, up, old in zip(regions.containments, state.up, state.down, strict=True)
        ]
        features = Messages(down, state.up).gather(fields, regions, self.scale)
        up = [
            self.up(features[edge.child_group][:, edge.children] - message, old)
            for edge, message, old in zip(regions.containments, down, state.up, strict=True)
        ]
        return Messages(down, up)


class Update(nn.Module):
    """The learnt map of a message: itself, plus a two-layer map of itself and its predecessor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.new = nn.Linear(width, width, bias=False)
        self.old = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        self.keep = nn.Parameter(torch.zeros(width))

    def forward(self, message: Tensor, old: Tensor) -> Tensor:
        """The message to send, centred over the child's table."""
        hidden = torch.tanh(self.new(message) + self.old(old))
        return centred(torch.lerp(message, old, self.keep) + self.out(hidden))


@dataclass(frozen=True, eq=False)
class Messages:
    """Down and up messages ``[batch, constraints, *child table, width]``, one tensor per kind of containment."""

    down: list[Tensor]
    up: list[Tensor]

    @classmethod
    def silent(cls, fields: list[Tensor], regions: RegionGraph, width: int) -> Messages:
        """No message says anything yet."""
        batch = max((field.shape[0] for field in fields), default=1)
        blank = [
            fields[edge.child_group].new_zeros(
                batch, edge.children.numel(), *regions.groups[edge.child_group].table_shape, width
            )
            for edge in regions.containments
        ]
        return cls(blank, blank)

    def gather(self, fields: list[Tensor], regions: RegionGraph, scale: Tensor | None) -> list[Tensor]:
        """The features ``[batch, regions, *table, width]`` of every region: its log-potentials, in every channel
        times ``scale``, plus what its parents and its children sent.
        """
        width = self.down[0].shape[-1] if self.down else 1
        batch = self.down[0].shape[0] if self.down else 1
        factor = torch.ones(width, device=fields[0].device, dtype=fields[0].dtype) if scale is None else scale
        totals = []
        for field in fields:
            start = field.unsqueeze(-1) * factor
            totals.append(start.expand(max(batch, start.shape[0]), *start.shape[1:]))
        for edge, down, up in zip(regions.containments, self.down, self.up, strict=True):
            totals[edge.child_group] = totals[edge.child_group].index_add(1, edge.children, down)
            raised = spread(up, edge.axes, len(regions.groups[edge.parent_group].table_shape))
            whole = totals[edge.parent_group]
            if edge.covers_parents:
                totals[edge.parent_group] = whole + raised
            else:
                raised = raised.expand(-1, -1, *whole.shape[2:-1], -1)
                totals[edge.parent_group] = whole.index_add(1, edge.parents, raised)
        return totals


@dataclass(frozen=True, eq=False)
class RegionEncoding:
    """Features of every region and the linear map that reads logits off them."""

    network: RegionNetwork
    features: list[Tensor]
    regions: RegionGraph

    def node_logits(self) -> tuple[Tensor, ...]:
        """See `Encoding`."""
        first = len(self.features) - len(self.regions.graph.variable_groups)
        return tuple(feature @ self.network.read for feature in self.features[first:])

    def region_logits(self, group: int) -> Tensor:
        """See `Encoding`."""
        return self.features[group] @ self.network.read


def centred(features: Float[Tensor, "batch regions *table width"]) -> Tensor:
    """Subtract the mean over the table's entries."""
    axes = list(range(2, features.dim() - 1))
    return features - features.mean(axes, keepdim=True) if axes else features


def _sum_out(features: Tensor, edge: Containment) -> Tensor:
    """``log sum exp`` of the parents' features over the variables that the children lack."""
    if not edge.covers_parents:
        features = features[:, edge.parents]
    arity = features.dim() - 3
    reduced = features
    lacking = [2 + axis for axis in range(arity) if axis not in edge.axes]
    if lacking:
        reduced = torch.logsumexp(features, lacking)
    kept = sorted(edge.axes)
    return reduced.permute(0, 1, *(2 + kept.index(axis) for axis in edge.axes), reduced.dim() - 1)
