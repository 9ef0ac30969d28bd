"""Conditional distributions of all variables of one colour given all others, gathered from the factors' tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.inference.colouring import colour_classes
from bethenet.potentials import LogPotentials


@dataclass(frozen=True, eq=False)
class Reader:
    """Factors of one group as seen along one axis by the variables of a block."""

    factor_group: int
    axis: int
    factors: Int[Tensor, " factors"]
    """Rows in the factor group."""
    targets: Int[Tensor, " factors"]
    """Which of the block's variables each factor touches with that axis."""
    others: Int[Tensor, "factors others"]
    """The variables on its other axes."""


@dataclass(frozen=True, eq=False)
class ColourBlock:
    """The variables of one colour and one number of states, and all factors that touch them."""

    group: int
    """The variable group they are of."""
    variables: Int[Tensor, " members"]
    rows: Int[Tensor, " members"]
    """Their rows in the variable group."""
    readers: tuple[Reader, ...]


def colour_blocks(graph: FactorGraph) -> tuple[ColourBlock, ...]:
    """Every variable in one block; no factor joins two variables of a block. Kept with the graph."""
    return graph.compiled(_colour_blocks)


def _colour_blocks(graph: FactorGraph) -> tuple[ColourBlock, ...]:
    colours = torch.empty(graph.num_variables, dtype=torch.long, device=graph.device)
    position = torch.empty_like(colours)
    members: dict[tuple[int, int], Tensor] = {}
    classes = colour_classes(graph)
    for colour, variables in enumerate(classes):
        colours[variables] = colour
        for group, same in enumerate(graph.variable_groups):
            chosen = variables[graph.state_counts[variables] == same.states]
            if chosen.numel():
                members[colour, group] = chosen
                position[chosen] = torch.arange(chosen.numel(), device=graph.device)
    readers: dict[tuple[int, int], list[Reader]] = {key: [] for key in members}
    for number, factors in enumerate(graph.factor_groups):
        for axis, group in enumerate(factors.variable_groups):
            touched = factors.variables[:, axis]
            others = torch.cat([factors.variables[:, :axis], factors.variables[:, axis + 1 :]], dim=1)
            order = torch.argsort(colours[touched], stable=True)
            sizes = torch.bincount(colours[touched], minlength=len(classes)).tolist()
            for colour, rows in enumerate(order.split(sizes)):
                if rows.numel():
                    targets = position[touched[rows]]
                    readers[colour, group].append(Reader(number, axis, rows, targets, others[rows]))
    return tuple(
        ColourBlock(number, variables, graph.variable_rows[variables], tuple(readers[colour, number]))
        for (colour, number), variables in members.items()
    )


class Conditionals:
    """A block's conditional distributions under given numbers.

    Args:
        block: whose distributions.
        potentials: the model.
        base: of this only the node terms count: they replace the tables as the inverse temperature goes to 0.
    """

    def __init__(self, block: ColourBlock, potentials: LogPotentials, base: LogPotentials | None = None) -> None:
        def members(model: LogPotentials) -> Tensor:
            term = model.node_terms[block.group]
            chosen = term if term.shape[1] == 1 else term[:, block.rows]
            return chosen.transpose(0, 1).unsqueeze(1)

        self.variables = block.variables
        self.term = members(potentials)
        self.base = None if base is None else members(base)
        self.readers = [_BoundReader(reader, potentials.tables[reader.factor_group]) for reader in block.readers]
        largest = max([block.variables.numel(), *(reader.targets.numel() for reader in block.readers)])
        self.width = largest * self.term.shape[-1]
        """Table entries gathered at a time for each chain of each batch member."""

    def logits(
        self, states: Int[Tensor, "variables chains batch"], inverse_temperature: float = 1.0
    ) -> Float[Tensor, "members chains batch states"]:
        """Conditional log-probabilities (nats) of the block's variables, not normalised."""
        term = self.term if self.base is None else torch.add(self.term, self.base, alpha=1 - inverse_temperature)
        shape = (self.variables.numel(), *states.shape[1:], term.shape[-1])
        logits = term.expand(shape).clone(memory_format=torch.contiguous_format)
        if inverse_temperature == 0:  # 0 * -inf is not to be
            return logits
        for reader in self.readers:
            logits.index_add_(0, reader.targets, reader.entries(states), alpha=inverse_temperature)
        return logits


class _BoundReader:
    """A `Reader` with its table, laid out as rows over the axis that is read."""

    def __init__(self, reader: Reader, table: Tensor) -> None:
        self.targets, self.others = reader.targets, reader.others
        moved = table.movedim(2 + reader.axis, -1)
        self.other_shape = tuple(moved.shape[2:-1])
        self.rows = moved.reshape(-1, moved.shape[-1])
        first = first_cells(table.shape[0], table.shape[1], math.prod(self.other_shape), table.device)
        self.first = (first if table.shape[1] == 1 else first[:, reader.factors]).T.unsqueeze(1)

    def entries(self, states: Tensor) -> Tensor:
        """[factors, chains, batch, states]: each factor's table at its other variables' states."""
        cells = self.first
        for axis in range(len(self.other_shape)):
            neighbours = states.index_select(0, self.others[:, axis])
            cells = torch.add(cells, neighbours, alpha=math.prod(self.other_shape[axis + 1 :]))
        # index_select is several times faster than rows[cells]
        found = self.rows.index_select(0, cells.flatten()).reshape(*cells.shape, self.rows.shape[1])
        return found.expand(self.targets.numel(), *states.shape[1:], -1)


def first_cells(
    batch: int, members: int, cells: int, device: torch.device | None = None
) -> Int[Tensor, "batch members"]:
    """Where each table starts among the flattened entries of a tensor ``[batch, members, *table]``."""
    return torch.arange(batch * members, device=device).reshape(batch, members) * cells


def cells_of(
    states: Int[Tensor, "chains batch variables"], scopes: Int[Tensor, "members arity"], shape: tuple[int, ...]
) -> Int[Tensor, "chains batch members"]:
    """At which entry of its flattened table each member's variables stand."""
    cells = torch.zeros(*states.shape[:2], scopes.shape[0], dtype=torch.long, device=states.device)
    for axis in range(len(shape)):
        cells = cells + states.index_select(2, scopes[:, axis]) * math.prod(shape[axis + 1 :])
    return cells


def look_up(table: Tensor, cells: Int[Tensor, "chains batch members"]) -> Float[Tensor, "chains batch"]:
    """Sum over members of the entries of ``table`` ``[batch | 1, members | 1, *shape]`` at ``cells``."""
    batch, members = table.shape[:2]
    first = first_cells(batch, members, math.prod(table.shape[2:]), table.device)
    cells = first + cells
    return table.reshape(-1).index_select(0, cells.flatten()).reshape(cells.shape).sum(-1)
