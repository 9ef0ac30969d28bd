"""A graph network on a region graph: any regions, any number of states, any graph at run time.

Messages run between every outermost region p and every region r inside it, both ways, with a feature vector of
``width`` channels for each entry of r's table (`bethenet.networks.wiring` has the equations):

    down  m = phi(log sum exp over p's other variables of h_p - a)       up  a = phi'(h_r - m)

where ``h``, a region's features, are its log-potentials and all that was sent to it. Without the learnt maps phi this
is (generalised) belief propagation in as many identical channels as the network is wide, and so it starts: the maps
are residual and their last layers are zero. All entries of all tables share their weights, and features are centred
over each table. Renaming the states of a variable (for an Ising spin: turning it over together with its field and its
couplings) therefore permutes the outputs and changes nothing else. Node features (of role, position, clamped
observations), where they are given, enter the maps of the messages about a region, alike for all entries of its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.networks.features import NodeFeatures
from bethenet.networks.fields import region_log_potentials, spread
from bethenet.networks.wiring import Receiver, Wiring
from bethenet.potentials import LogPotentials
from bethenet.regions import Containment, RegionGraph


class RegionNetwork(nn.Module):
    """Rounds of learnt messages between regions.

    Args:
        width: channels per table entry.
        rounds: how often messages go down and up.
        damping: share of its old value that each message keeps at first (it is learnt).
        features: what else to know of each variable. By default the potentials are all there is, evidence included.
    """

    def __init__(
        self, width: int = 64, rounds: int = 10, damping: float = 0.0, features: NodeFeatures | None = None
    ) -> None:
        super().__init__()
        self.width = width
        self.features = features
        known = 0 if features is None else features.options.width
        self.rounds = nn.ModuleList(Round(width, damping, known) for _ in range(rounds))
        self.scale = nn.Parameter(torch.ones(width))
        self.read = nn.Parameter(torch.full((width,), 1.0 / width))

    def forward(
        self, potentials: LogPotentials, regions: RegionGraph, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> RegionEncoding:
        """See `Encoder`."""
        fields = region_log_potentials(potentials, regions)
        wiring = Wiring.of(regions)
        contexts: list[Tensor] | None = None
        if self.features is not None:
            nodes = self.features(potentials, inputs)
            fields[0] = fields[0].expand(max(nodes.shape[0], fields[0].shape[0]), *fields[0].shape[1:])
            contexts = [_about(nodes, receiver, regions) for receiver in wiring.receivers]
        state = Messages.silent(fields, regions, wiring, self.width)
        for layer in self.rounds:
            state = layer(state, fields, regions, wiring, contexts)
        return RegionEncoding(self, state.gather(fields, regions, wiring, self.scale), regions)


class Round(nn.Module):
    """All messages down, then all messages up."""

    def __init__(self, width: int, damping: float, features: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.down = Update(width, damping, features)
        self.up = Update(width, damping, features)

    def forward(
        self,
        state: Messages,
        fields: list[Tensor],
        regions: RegionGraph,
        wiring: Wiring,
        contexts: Sequence[Tensor] | None = None,
    ) -> Messages:
        """The messages after one round; ``contexts`` are per receiver what is known of the region of each message."""
        known: Sequence[Tensor | None] = contexts or [None] * len(wiring.receivers)
        reduced = Reductions(state.gather(fields, regions, wiring, self.scale))
        down = [
            self.down(torch.cat([reduced.read(kind) for kind in receiver.kinds], dim=1) - up, old, context)
            for receiver, up, old, context in zip(wiring.receivers, state.up, state.down, known, strict=True)
        ]
        features = Messages(down, state.up).gather(fields, regions, wiring, self.scale)
        up = [
            self.up(features[receiver.group][:, receiver.children] - message, old, context)
            for receiver, message, old, context in zip(wiring.receivers, down, state.up, known, strict=True)
        ]
        return Messages(down, up)


class Update(nn.Module):
    """The learnt map of a message: itself and its predecessor, plus a two-layer map of both."""

    def __init__(self, width: int, damping: float, features: int = 0) -> None:
        super().__init__()
        self.new = nn.Linear(width, width, bias=False)
        self.old = nn.Linear(width, width, bias=False)
        self.context = nn.Linear(features, width, bias=False) if features else None
        self.out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        self.keep = nn.Parameter(torch.full((width,), damping))

    def forward(
        self, message: Tensor, old: Tensor, context: Float[Tensor, "batch messages features"] | None = None
    ) -> Tensor:
        """The message to send, centred over the child's table."""
        message = centred(message)
        hidden = self.new(message) + self.old(old)
        if self.context is not None and context is not None:
            entries = [1] * (message.dim() - 3)
            hidden = hidden + self.context(context).unflatten(1, (-1, *entries))
        hidden = torch.tanh(hidden)
        return centred(torch.lerp(message, old, self.keep) + self.out(hidden))


def _about(
    nodes: Float[Tensor, "batch variables features"], receiver: Receiver, regions: RegionGraph
) -> Float[Tensor, "batch messages features"]:
    """The features of the region that each message is about: the mean of its variables'."""
    variables = regions.groups[receiver.group].variables[receiver.children]
    return nodes[:, variables].mean(2)


@dataclass(frozen=True, eq=False)
class Messages:
    """Down and up messages ``[batch, messages, *child table, width]``, one tensor per receiver."""

    down: list[Tensor]
    up: list[Tensor]

    @classmethod
    def silent(cls, fields: list[Tensor], regions: RegionGraph, wiring: Wiring, width: int) -> Messages:
        """No message says anything yet."""
        batch = max((field.shape[0] for field in fields), default=1)
        blank = [
            fields[0].new_zeros(batch, receiver.children.numel(), *regions.groups[receiver.group].table_shape, width)
            for receiver in wiring.receivers
        ]
        return cls(blank, blank)

    def gather(self, fields: list[Tensor], regions: RegionGraph, wiring: Wiring, scale: Tensor) -> list[Tensor]:
        """The features ``[batch, regions, *table, width]`` of every region, its log-potentials times ``scale``."""
        batch = max((field.shape[0] for field in fields), default=1)
        totals = [(field.unsqueeze(-1) * scale).expand(batch, *field.shape[1:], -1) for field in fields]
        for receiver, down, up in zip(wiring.receivers, self.down, self.up, strict=True):
            totals[receiver.group] = totals[receiver.group].index_add(1, receiver.children, down)
            for kind, sent in zip(receiver.kinds, receiver.split(up), strict=True):
                whole = totals[kind.parent_group]
                raised = spread(sent, kind.axes, whole.dim() - 3)
                if kind.covers_parents:
                    totals[kind.parent_group] = whole + raised
                else:
                    raised = raised.expand(-1, -1, *whole.shape[2:-1], -1)
                    totals[kind.parent_group] = whole.index_add(1, kind.parents, raised)
        for number, divisor in enumerate(wiring.divisors):
            if divisor is not None:
                shape = (-1, *[1] * (totals[number].dim() - 2))
                totals[number] = totals[number] / divisor.to(totals[number].dtype).reshape(shape)
        return totals


class Reductions:
    """``log sum exp`` of regions' features over some of their axes, each from the smallest one there is already."""

    def __init__(self, features: list[Tensor]) -> None:
        self.features = features
        self.done: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def read(self, edge: Containment) -> Tensor:
        """The parents' features summed to the children's tables, ``[batch, constraints, *child table, width]``."""
        kept = tuple(sorted(edge.axes))
        key = (edge.parent_group, kept)
        if key not in self.done:
            source, have = self.features[edge.parent_group], tuple(range(self.features[edge.parent_group].dim() - 3))
            for (group, axes), table in self.done.items():
                if group == edge.parent_group and set(kept) <= set(axes) and len(axes) < len(have):
                    source, have = table, axes
            lacking = [2 + position for position, axis in enumerate(have) if axis not in kept]
            self.done[key] = torch.logsumexp(source, lacking) if lacking else source
        table = self.done[key]
        if not edge.covers_parents:
            table = table[:, edge.parents]
        return table.permute(0, 1, *(2 + kept.index(axis) for axis in edge.axes), table.dim() - 1)


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


def centred(features: Tensor) -> Tensor:
    """Subtract the mean over the table's entries from features ``[batch, regions, *table, width]``."""
    axes = list(range(2, features.dim() - 1))
    return features - features.mean(axes, keepdim=True) if axes else features
