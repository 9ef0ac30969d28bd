"""Which message goes where: the index arrays of belief propagation, compiled once for each graph.

A *slot* holds the message from one factor to one of its variables. The slots of a variable group lie sorted by the
degree of the variable that receives, and for each degree d as d planes of one slot a variable: the sum over a
variable's messages is then a sum of contiguous planes, and needs no scatter. Variables are renumbered to match;
the new number is called their *position*.

Factors of arity 0 and 1 send no messages: they are constants and fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from scipy.sparse import csr_matrix
from torch import Tensor

from bethenet.graph import FactorGraph

MOST_EXACT_DEGREES = 16
"""With more distinct degrees than this, larger ones are padded to powers of two: at most so many planes each step."""


@dataclass(frozen=True)
class Bucket:
    """The variables of one degree: their slots are ``degree`` planes of ``nodes.stop - nodes.start`` slots."""

    degree: int
    nodes: slice
    slots: slice


@dataclass(frozen=True, eq=False)
class NodeLayout:
    """Where the messages to one variable group lie."""

    states: int
    rows: Int[Tensor, " nodes"]
    """Position -> row in the variable group."""
    positions: Int[Tensor, " nodes"]
    """Row in the variable group -> position."""
    buckets: tuple[Bucket, ...]
    num_slots: int
    edge_of_slot: Int[Tensor, " slots"]
    """Slot -> place of its message in edge order: by factor group, axis, factor. Padding slots name one place more."""

    @property
    def num_nodes(self) -> int:
        """How many variables the group has."""
        return self.rows.numel()

    @cached_property
    def node_of_slot(self) -> Int[Tensor, " slots"]:
        """The position of the variable that receives each slot's message."""
        device = self.rows.device
        pieces = [torch.arange(b.nodes.start, b.nodes.stop, device=device).repeat(b.degree) for b in self.buckets]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long, device=device)


@dataclass(frozen=True, eq=False)
class Wiring:
    """The layouts of all variable groups, and for each factor group (by axis) the slots of its messages."""

    layouts: tuple[NodeLayout, ...]
    slots: tuple[tuple[Int[Tensor, " factors"], ...], ...]
    edges: tuple[tuple[tuple[int, int], ...], ...]
    """For each variable group the (factor group, axis) pairs that send to it, in edge order."""

    @cached_property
    def reverse(self) -> tuple[Int[Tensor, " slots"] | None, ...]:
        """For a variable group all of whose messages come from one group of pairwise factors between its own
        variables: each slot's opposite, the slot of the same factor's other message. ``None`` for other groups.
        """
        result: list[Tensor | None] = []
        for layout, edges in zip(self.layouts, self.edges, strict=True):
            slots = self.slots[edges[0][0]] if edges else ()
            if len(edges) != 2 or len(slots) != 2 or edges[0][0] != edges[1][0]:
                result.append(None)
                continue
            first, second = slots
            reverse = torch.arange(layout.num_slots, dtype=torch.int32, device=first.device)
            reverse[first.long()] = second
            reverse[second.long()] = first
            result.append(reverse)
        return tuple(result)


def compile_wiring(graph: FactorGraph) -> Wiring:
    """The wiring of a graph, on its device. Use as ``graph.compiled(compile_wiring)``."""
    layouts, edges = [], []
    slots: list[list[Tensor]] = [[] for _ in graph.factor_groups]
    for number, variables in enumerate(graph.variable_groups):
        senders = [
            (group, axis)
            for group, factors in enumerate(graph.factor_groups)
            for axis in range(factors.arity)
            if factors.arity >= 2 and factors.variable_groups[axis] == number
        ]
        receivers = [graph.factor_groups[group].rows[:, axis].cpu().numpy() for group, axis in senders]
        layout, edge_slots = _lay_out(variables.states, variables.variables.numel(), receivers, graph.device)
        layouts.append(layout)
        edges.append(tuple(senders))
        for (group, _), piece in zip(senders, edge_slots, strict=True):
            slots[group].append(piece)
    ordered = [_by_axis(graph, group, slots[group]) for group in range(len(graph.factor_groups))]
    return Wiring(tuple(layouts), tuple(ordered), tuple(edges))


def _by_axis(graph: FactorGraph, group: int, found: list[Tensor]) -> tuple[Tensor, ...]:
    """Slots found variable group by variable group, put into the order of the factors' axes."""
    readers = graph.factor_groups[group].variable_groups
    axes = sorted(range(len(readers)), key=lambda axis: (readers[axis], axis))
    by_axis = dict(zip(axes, found, strict=False))
    return tuple(by_axis[axis] for axis in range(len(found)))


def _lay_out(
    states: int, nodes: int, receivers: list[np.ndarray], device: torch.device
) -> tuple[NodeLayout, list[Tensor]]:
    row = np.concatenate(receivers) if receivers else np.zeros(0, dtype=np.int64)
    edges = row.size
    # a counting sort of the edges by receiving node, and each edge's rank among its node's
    grouped = csr_matrix((np.ones(edges, dtype=bool), (row, np.arange(edges))), shape=(nodes, edges))
    degree = np.diff(grouped.indptr).astype(np.int64)
    rank = np.empty(edges, dtype=np.int64)
    rank[grouped.indices] = np.arange(edges) - np.repeat(grouped.indptr[:-1].astype(np.int64), degree)

    width = _padded(degree)
    rows = np.argsort(width, kind="stable")
    positions = np.empty_like(rows)
    positions[rows] = np.arange(nodes)
    widths, counts = np.unique(width, return_counts=True)
    first_node = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    first_slot = np.concatenate([[0], np.cumsum(widths * counts)]).astype(np.int64)
    buckets = tuple(
        Bucket(
            int(w), slice(int(first_node[b]), int(first_node[b + 1])), slice(int(first_slot[b]), int(first_slot[b + 1]))
        )
        for b, w in enumerate(widths)
    )
    bucket = np.searchsorted(widths, width)
    # slot = start of the bucket + plane * nodes in the bucket + place in the bucket
    start = (first_slot[:-1] - first_node[:-1])[bucket] + positions
    slot = start[row] + rank * counts[bucket][row] if edges else rank
    num_slots = int(first_slot[-1])
    edge_of_slot = np.full(num_slots, edges, dtype=np.int32)
    edge_of_slot[slot] = np.arange(edges, dtype=np.int32)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    layout = NodeLayout(states, tensor(rows), tensor(positions), buckets, num_slots, tensor(edge_of_slot))
    sizes = [len(piece) for piece in receivers]
    return layout, list(torch.split(tensor(slot.astype(np.int32)), sizes)) if sizes else []


def _padded(degree: np.ndarray) -> np.ndarray:
    """The number of slots each variable gets."""
    if np.unique(degree).size <= MOST_EXACT_DEGREES:
        return degree
    powers = 2 ** np.ceil(np.log2(np.maximum(degree, 1))).astype(np.int64)
    return np.where(degree > MOST_EXACT_DEGREES // 2, powers, degree)
