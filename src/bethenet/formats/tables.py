"""Between the flat lists of tables that files hold and `LogPotentials`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bethenet.formats.decimals import Floats, Integers, write_logarithms
from bethenet.graph import FactorGraph
from bethenet.potentials import LogPotentials

MAX_UNATTACHED = 10**7
"""States, in all, of variables that are in no factor: a file need not spend a byte on each of these."""


def unattached_states(counts: Integers, scopes: Sequence[Integers]) -> str | None:
    """What is wrong with the state counts of variables that are in no factor (None: nothing)."""
    free = np.ones(len(counts), dtype=bool)
    for scope in scopes:
        free[scope] = False
    total = float(counts[free].astype(np.float64).sum())
    if total <= MAX_UNATTACHED:
        return None
    return f"expected at most {MAX_UNATTACHED} states of variables that are in no factor, found {total:.0f}"


def from_flat_tables(
    graph: FactorGraph, logarithms: Floats, starts: Integers, *, first_fastest: bool = False
) -> LogPotentials:
    """A model whose factor ``f`` has its log-table at ``logarithms[starts[f]:]``, last axis fastest unless said."""
    tables = []
    for group in graph.factor_groups:
        shape = group.table_shape
        rows = _rows(logarithms, starts[group.factors.numpy()], math.prod(shape))
        if first_fastest:
            table = rows.reshape(len(group), *reversed(shape)).transpose(0, *range(len(shape), 0, -1))
        else:
            table = rows.reshape(len(group), *shape)
        tables.append(torch.from_numpy(np.array(table, order="C")).unsqueeze(0))
    terms = [torch.zeros(1, 1, group.states, dtype=torch.float64) for group in graph.variable_groups]
    return LogPotentials(graph, tables, terms)


def _rows(numbers: Floats, starts: Integers, length: int) -> Floats:
    """``numbers[start : start + length]`` for each start; where those are evenly spaced, as a view."""
    step = int(starts[1] - starts[0]) if len(starts) > 1 else length
    if step < length or (np.diff(starts) != step).any():
        return numbers[starts[:, None] + np.arange(length)]
    size = numbers.itemsize
    return np.lib.stride_tricks.as_strided(numbers[starts[0] :], (len(starts), length), (step * size, size))


def explicit_factors(potentials: LogPotentials, *, cover: bool = False) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Scopes and float64 log-tables of all factors: the graph's, then one for each variable with evidence.

    Args:
        potentials: a batch of one.
        cover: also give every variable that is in no factor a table of zeros (probability one).
    """
    if potentials.batch_size != 1:
        raise ValueError(f"a file holds one model; this is a batch of {potentials.batch_size}: write potentials[i]")
    graph = potentials.graph
    scopes = graph.scopes()
    tables: list[Tensor] = [torch.empty(0)] * len(scopes)
    for group, stacked in zip(graph.factor_groups, potentials.tables, strict=True):
        double = stacked[0].detach().cpu().double()
        for row, factor in enumerate(group.factors.tolist()):
            tables[factor] = double[row if double.shape[0] > 1 else 0]
    covered = {variable for scope in scopes for variable in scope} if cover else set(range(graph.num_variables))
    extra: dict[int, Tensor] = {}
    for variables, terms in zip(graph.variable_groups, potentials.node_terms, strict=True):
        double = terms[0].detach().cpu().double().expand(variables.variables.numel(), -1)
        informed = (double != 0).any(1).tolist()
        for variable, term, says in zip(variables.variables.tolist(), double, informed, strict=True):
            if says or variable not in covered:
                extra[variable] = term
    for variable, term in sorted(extra.items()):
        scopes.append((variable,))
        tables.append(term)
    return scopes, tables


def tables_as_text(tables: list[Tensor], *, first_fastest: bool = False) -> list[list[str]]:
    """The entries of each table as decimal numbers."""
    if first_fastest:
        tables = [table.permute(tuple(reversed(range(table.dim())))) for table in tables]
    flat = torch.cat([table.reshape(-1) for table in tables]).numpy() if tables else np.empty(0)
    texts = write_logarithms(flat)
    result, position = [], 0
    for table in tables:
        result.append(texts[position : position + table.numel()])
        position += table.numel()
    return result
