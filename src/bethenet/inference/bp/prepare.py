"""From log-potentials to a `Problem`: fields gathered, couplings taken apart, kernels chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.graph import FactorGroup
from bethenet.inference.bp.kernels import CouplingKernel, Kernel, Mode, TableKernel, pack, rows_of
from bethenet.inference.bp.problem import Problem, Weights, message_width, refuse_impossible
from bethenet.inference.bp.wiring import Wiring, compile_wiring
from bethenet.potentials import LogPotentials


def prepare(potentials: LogPotentials, mode: Mode = "sum", weights: Weights | None = None) -> Problem:
    """Everything about a model that stays the same from one iteration to the next.

    Args:
        potentials: the model.
        mode: whether factors sum or maximise.
        weights: for each factor group the factors' weights; all 1 if not given.

    Raises:
        ImpossibleEvidenceError: a constant, or what concerns one variable alone, leaves nothing possible.
    """
    graph, has_zeros = potentials.graph, potentials.has_zeros
    wiring = graph.compiled(compile_wiring)
    hard = has_zeros and any(bool((table == -math.inf).any()) for table in potentials.tables if table.dim() >= 4)
    fields = _Fields(potentials)
    kernels: list[Kernel | None] = []
    for number, group in enumerate(graph.factor_groups):
        table = potentials.tables[number].transpose(0, 1)
        share = None if weights is None else weights[number].to(table).reshape(-1, 1, *([1] * group.arity))
        if group.arity < 2:
            fields.add(group, 0, table) if group.arity else fields.add_constant(group, table)
            kernels.append(None)
        elif group.table_shape == (2, 2) and not hard:
            coupling, parts, left = _reduce(table)
            fields.add(group, 0, parts[0])
            fields.add(group, 1, parts[1])
            fields.add_constant(group, left)
            scaled = coupling if share is None else coupling / share.flatten(2)
            kernels.append(CouplingKernel.build(scaled, mode))
        else:
            scaled = table if share is None else table / share
            widths = tuple(states if hard else message_width(states) for states in group.table_shape)
            kernels.append(TableKernel.build(scaled, widths, mode))
    packed = fields.packed(wiring, hard, has_zeros)
    return Problem(
        graph=graph,
        wiring=wiring,
        kernels=tuple(kernels),
        fields=tuple(packed),
        weights=None if weights is None else tuple(w.to(potentials.dtype).reshape(-1, 1, 1) for w in weights),
        slot_weights=None if weights is None else tuple(_slot_weights(wiring, weights, potentials.dtype)),
        strengths=tuple(_slot_strengths(wiring, kernels)),
        batch_size=potentials.batch_size,
        mode=mode,
        has_impossible_tables=hard,
        has_impossible_states=has_zeros,
        constant=fields.constant,
        rounding=_rounding(potentials),
    )


class _Fields:
    """What concerns one variable alone, ``[nodes | 1, batch | 1, states]`` a variable group; and what concerns none."""

    def __init__(self, potentials: LogPotentials) -> None:
        self.graph = potentials.graph
        self.terms = [term.transpose(0, 1) for term in potentials.node_terms]
        self.constant = torch.zeros(potentials.batch_size, dtype=potentials.dtype, device=potentials.device)

    def add(self, group: FactorGroup, axis: int, values: Float[Tensor, "factors batch states"]) -> None:
        """Add to the fields of the variables on one axis of a group of factors."""
        reader = group.variable_groups[axis]
        field = self.terms[reader]
        batch, states = max(field.shape[1], values.shape[1]), field.shape[2]
        field = field.expand(self.graph.variable_groups[reader].variables.numel(), batch, states)
        self.terms[reader] = field.index_add(0, group.rows[:, axis], values.expand(len(group), batch, states))

    def add_constant(self, group: FactorGroup, values: Float[Tensor, "factors batch"]) -> None:
        """Add a number for each factor of a group."""
        self.constant = self.constant + values.expand(len(group), -1).sum(0)

    def packed(self, wiring: Wiring, hard: bool, has_zeros: bool) -> list[Tensor]:
        """The fields in the layouts' order and the messages' form; what log-odds leave out goes to the constant."""
        result = []
        for field, layout in zip(self.terms, wiring.layouts, strict=True):
            if has_zeros:
                refuse_impossible((field == -math.inf).all(-1).any(0).expand(self.constant.shape))
            if layout.states == 2 and not hard:
                base = torch.where(field[..., 0] == -math.inf, field[..., 1], field[..., 0])
                self.constant = self.constant + base.expand(layout.num_nodes, -1).sum(0)
                field = pack(field)
            result.append(field if field.shape[0] == 1 else field.index_select(0, layout.rows))
        if has_zeros:
            refuse_impossible(self.constant == -math.inf)
        return result


def _reduce(table: Float[Tensor, "factors batch 2 2"]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """A 2 x 2 log-table as ``J s t + a s + b t + c``: ``2 J``, the two fields as log-terms, and ``c``."""
    t00, t01, t10, t11 = table.flatten(2).unbind(-1)
    coupling = (t00 - t01 - t10 + t11) / 2
    first, second = (t10 + t11 - t00 - t01) / 4, (t01 + t11 - t00 - t10) / 4
    return (
        coupling.unsqueeze(-1),
        (torch.stack([-first, first], -1), torch.stack([-second, second], -1)),
        table.mean((2, 3)),
    )


def _slot_weights(wiring: Wiring, weights: Weights, dtype: torch.dtype) -> list[Tensor]:
    result = []
    for layout, edges in zip(wiring.layouts, wiring.edges, strict=True):
        pieces = [weights[group].to(dtype) for group, _ in edges]
        padding = torch.ones(1, dtype=dtype, device=layout.rows.device)
        result.append(torch.cat([*pieces, padding]).index_select(0, layout.edge_of_slot).reshape(-1, 1, 1))
    return result


def _slot_strengths(wiring: Wiring, kernels: Sequence[Kernel | None]) -> list[Tensor | None]:
    result: list[Tensor | None] = []
    for layout, edges, reverse in zip(wiring.layouts, wiring.edges, wiring.reverse, strict=True):
        kernel = kernels[edges[0][0]] if reverse is not None else None
        if not isinstance(kernel, CouplingKernel):
            result.append(None)
            continue
        strength, factors = kernel.strength, wiring.slots[edges[0][0]][0].numel()
        if strength.shape[0] == 1 and layout.num_slots > 2 * factors:
            strength = strength.expand(factors, *strength.shape[1:])
        if strength.shape[0] > 1:
            padding = torch.full_like(strength[:1], kernel.silent)
            strength = rows_of(torch.cat([strength, strength, padding]), layout.edge_of_slot)
        result.append(strength)
    return result


def _rounding(potentials: LogPotentials) -> Tensor:
    """A message's log-ratios are no larger than the widest log-table, so this bounds what rounding does to them."""
    widest = torch.ones((), dtype=potentials.dtype, device=potentials.device)
    for table in potentials.tables:
        if table.dim() >= 4 and table.numel():
            finite = table.detach().masked_fill(~torch.isfinite(table), 0.0)
            widest = torch.maximum(widest, finite.abs().amax())
    return 8 * torch.finfo(potentials.dtype).eps * widest
