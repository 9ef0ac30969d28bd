"""Encoders that read a graph as a sequence of its variables: Transformer and bidirectional LSTM (the paper's).

They consume node embeddings, not potentials (unless those are made a feature), and know the graph's edges only through
the regions whose logits are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.graph import FactorGraph
from bethenet.networks.features import NodeFeatures
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward part, each with a residual connection and layer norm before it."""

    def __init__(self, width: int, heads: int = 1, expansion: int = 1) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the width must be a multiple of the number of heads; got {width} and {heads}")
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.combine = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, expansion * width), nn.ReLU(), nn.Linear(expansion * width, width)
        )

    def forward(self, nodes: Float[Tensor, "batch nodes width"]) -> Float[Tensor, "batch nodes width"]:
        """Let every node look at every other."""
        batch, count, width = nodes.shape
        # [3, batch, heads, nodes, width / heads]
        projected = self.project(self.attention_norm(nodes)).reshape(batch, count, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), dim=-1)
        attended = (weights @ value).transpose(1, 2).reshape(batch, count, width)
        nodes = nodes + self.combine(attended)
        return nodes + self.feed_forward(nodes)


class Transformer(nn.Module):
    """Layers of self-attention over node embeddings of the same width."""

    def __init__(self, input_width: int, width: int = 200, layers: int = 1, heads: int = 1, expansion: int = 1) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Identity() if input_width == width else nn.Linear(input_width, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, expansion) for _ in range(layers)))

    def forward(self, nodes: Float[Tensor, "batch nodes input"]) -> Float[Tensor, "batch nodes width"]:
        """Contextual embeddings."""
        return self.layers(self.enter(nodes))


class BidirectionalLSTM(nn.Module):
    """An LSTM over the variables in order and in reverse; ``width`` units each way.

    Args:
        input_width: of the embeddings.
        width: units each way.
        layers: one upon another.
        dropout: between the layers.
        gain: the weights of each layer's inputs start so many times larger than PyTorch's. Through several layers the
            embeddings' differences fade otherwise, and it takes long until the network tells the variables apart.
    """

    def __init__(
        self, input_width: int, width: int = 200, layers: int = 5, dropout: float = 0.0, gain: float = 1.0
    ) -> None:
        super().__init__()
        self.width = 2 * width
        self.lstm = nn.LSTM(
            input_width, width, layers, batch_first=True, bidirectional=True, dropout=dropout if layers > 1 else 0.0
        )
        with torch.no_grad():
            for name, weight in self.lstm.named_parameters():
                if name.startswith("weight_ih"):
                    weight.mul_(gain)

    def forward(self, nodes: Float[Tensor, "batch nodes input"]) -> Float[Tensor, "batch nodes width"]:
        """Contextual embeddings."""
        return self.lstm(nodes)[0]


@dataclass(frozen=True)
class ReadoutOptions:
    """How logits are read off contextual embeddings."""

    hidden: int = 0
    """Width of a hidden ReLU layer; 0: an affine map, as in the paper's Ising experiments."""


class SymbolicEncoder(nn.Module):
    """Node embeddings, a sequence model, and one readout per table shape that may be asked for.

    Args:
        features: embeddings of the variables.
        sequence: a module ``[batch, nodes, input] -> [batch, nodes, width]`` with an attribute ``width``.
        graphs: graphs or region graphs that this will encode: their state counts and table shapes say which readouts
            to make.
        readout: options of the readouts.
    """

    def __init__(
        self,
        features: NodeFeatures,
        sequence: Transformer | BidirectionalLSTM,
        graphs: Sequence[FactorGraph | RegionGraph],
        readout: ReadoutOptions | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.sequence = sequence
        shapes: set[tuple[int, ...]] = set()
        for graph in graphs:
            if isinstance(graph, RegionGraph):
                shapes |= {group.table_shape for group in graph.groups}
                graph = graph.graph
            shapes |= {(group.states,) for group in graph.variable_groups}
            shapes |= {group.table_shape for group in graph.factor_groups}
        options = readout or ReadoutOptions()
        self.readouts = nn.ModuleDict(
            {
                _key(shape): Readout(len(shape), sequence.width, math.prod(shape), options)
                for shape in sorted(shapes)
                if shape
            }
        )

    def forward(
        self, potentials: LogPotentials, regions: RegionGraph, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> SymbolicEncoding:
        """See `Encoder`."""
        nodes = self.sequence(self.features(potentials, inputs))
        return SymbolicEncoding(self, nodes, regions)


@dataclass(frozen=True, eq=False)
class SymbolicEncoding:
    """Contextual node embeddings and the readouts that turn them into logits."""

    encoder: SymbolicEncoder
    nodes: Float[Tensor, "batch nodes width"]
    regions: RegionGraph

    def node_logits(self) -> tuple[Tensor, ...]:
        """See `Encoding`."""
        return tuple(
            self._read(group.variables.unsqueeze(1), (group.states,)) for group in self.regions.graph.variable_groups
        )

    def region_logits(self, group: int) -> Tensor:
        """See `Encoding`: an affine map or MLP of the concatenated embeddings of the region's variables."""
        region = self.regions.groups[group]
        return self._read(region.variables, region.table_shape)

    def _read(self, variables: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not shape:
            return self.nodes.new_zeros(self.nodes.shape[0], variables.shape[0])
        key = _key(shape)
        if key not in self.encoder.readouts:
            known = ", ".join(self.encoder.readouts)
            raise ValueError(f"this network has no readout for tables of shape {shape}; it was made for {known}")
        logits: Tensor = self.encoder.readouts[key](self.nodes, variables)
        return logits.unflatten(-1, shape)


class Readout(nn.Module):
    """An affine map, or an MLP of one hidden layer, of the concatenated embeddings of several variables.

    The first layer of a concatenation is a sum of one linear map per position, so it is applied to each variable once
    and gathered, not to each region: for a Boltzmann machine that saves a factor of the number of edges per node.
    """

    def __init__(self, arity: int, width: int, entries: int, options: ReadoutOptions) -> None:
        super().__init__()
        first = options.hidden or entries
        whole = nn.Linear(arity * width, first)  # one map, so that it is initialised as one
        parts = [nn.Linear(width, first, bias=position == 0) for position in range(arity)]
        with torch.no_grad():
            for part, weight in zip(parts, whole.weight.split(width, dim=1), strict=True):
                part.weight.copy_(weight)
            parts[0].bias.copy_(whole.bias)
        self.positions = nn.ModuleList(parts)
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(first, entries)) if options.hidden else nn.Identity()

    def forward(
        self, nodes: Float[Tensor, "batch nodes width"], variables: Int[Tensor, "regions arity"]
    ) -> Float[Tensor, "batch regions entries"]:
        """Logits of each region's table, flat."""
        total: Tensor | None = None
        for position, layer in enumerate(self.positions):
            part: Tensor = layer(nodes)[:, variables[:, position]]
            total = part if total is None else total + part
        return self.last(total)


def _key(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
