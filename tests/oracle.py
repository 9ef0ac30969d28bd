"""Enumeration in float64: the truth that every engine is compared with, and random models to compare on."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from bethenet import FactorGraph, LogPotentials


@dataclass(frozen=True)
class Truth:
    """What enumeration says of one batch member after another."""

    assignments: Tensor  # [assignments, variables]
    log_probabilities: Tensor  # [assignments, batch]
    log_z: Tensor  # [batch]
    graph: FactorGraph

    def marginal(self, variables: tuple[int, ...]) -> Tensor:
        """P(variables), [batch, *states]."""
        shape = tuple(int(self.graph.state_counts[v]) for v in variables)
        cells = torch.zeros(len(self.assignments), dtype=torch.long)
        for variable, size in zip(variables, shape, strict=True):
            cells = cells * size + self.assignments[:, variable]
        table = torch.zeros(math.prod(shape), self.log_probabilities.shape[1], dtype=torch.float64)
        table.index_add_(0, cells, self.log_probabilities.exp())
        return table.T.reshape(-1, *shape)

    @property
    def map_log_value(self) -> Tensor:
        return self.log_probabilities.amax(0) + self.log_z


def enumerate_model(potentials: LogPotentials) -> Truth:
    graph = potentials.graph
    ranges = [range(int(k)) for k in graph.state_counts]
    rows = list(itertools.product(*ranges))
    assignments = torch.tensor(rows, dtype=torch.long).reshape(len(rows), graph.num_variables)
    scores = potentials.to(dtype=torch.float64).score(assignments)
    log_z = torch.logsumexp(scores, 0)
    return Truth(assignments, scores - log_z, log_z, graph)


@st.composite
def models(
    draw: st.DrawFn,
    max_variables: int = 5,
    max_states: int = 3,
    max_factors: int = 7,
    max_arity: int = 3,
    batch: int = 1,
    zeros: bool = False,
) -> LogPotentials:
    """Random graphs of mixed arity and state counts with normal log-potentials (some impossible where ``zeros``)."""
    states = draw(st.lists(st.integers(1, max_states), min_size=1, max_size=max_variables))
    variables = list(range(len(states)))
    scopes = draw(
        st.lists(
            st.lists(st.sampled_from(variables), max_size=min(max_arity, len(states)), unique=True),
            max_size=max_factors,
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    graph = FactorGraph(states, scopes)
    potentials = LogPotentials.random(graph, batch_size=batch, dtype=torch.float64, generator=generator)
    if zeros:

        def strike(table: Tensor) -> Tensor:
            # the all-zero assignment stays possible, so that the model is not empty
            hit = torch.rand(table.shape, generator=generator) < 0.25
            hit.reshape(*table.shape[:2], -1)[:, :, 0] = False
            return table.masked_fill(hit, -math.inf)

        potentials = LogPotentials(graph, [strike(table) for table in potentials.tables], potentials.node_terms)
    return potentials
