"""Which plan to use for given potentials: finds the orders, compares their costs, and keeps it all with the graph."""

from __future__ import annotations

import math

import numpy as np

from bethenet.graph import FactorGraph
from bethenet.inference.exact.ordering import Adjacency, Shape, adjacency, measure, min_degree, min_fill
from bethenet.inference.exact.plan import Plan, make_plan
from bethenet.inference.exact.reduction import Reduction
from bethenet.potentials import LogPotentials

ORDERS = ("auto", "min-fill", "min-degree")

FEW_VARIABLES = 2000
"""Up to here ``"auto"`` also tries min-fill and the variables' own order."""

STEP_ENTRIES = {"cpu": 1e5, "cuda": 1e7}
"""How many bucket entries are computed in the time that starting a step takes."""

LARGEST_AT_ONCE = 12.0
"""Binary logarithm of the largest bucket that is worth making larger for the sake of fewer steps."""


class Planner:
    """The orders of one reduced graph, and the plans made from them."""

    def __init__(self, graph: FactorGraph, observed: np.ndarray) -> None:
        self.graph = graph
        self.reduction = Reduction(graph, observed)
        self.scopes = self.reduction.leaf_scopes()
        self.free = self.reduction.free_variables()
        self.states: list[int] = graph.state_counts.tolist()
        self.neighbours: Adjacency = adjacency(graph.num_variables, (s for leaf in self.scopes for s in leaf))
        self._orders: dict[str, tuple[list[int], Shape]] = {}
        self._plans: dict[object, Plan] = {}

    def plan(self, order: str | tuple[int, ...], batch: int) -> Plan:
        """The plan for an order, or for the cheapest one where ``order`` leaves the choice."""
        if not isinstance(order, str):
            return self._make(order, self._given(order))
        names = [order]
        if order == "auto":
            names = ["min-degree", "at once"]
            if len(self.free) <= FEW_VARIABLES:
                names += ["min-fill", "as numbered"]
        best = min(names, key=lambda name: self._cost(name, batch))
        return self._make(best, self.order(best)[0])

    def order(self, name: str) -> tuple[list[int], Shape]:
        """A named order and its measure."""
        if name not in self._orders:
            if name == "min-fill":
                order = min_fill(self.neighbours, self.states, self.free)
            elif name == "as numbered":
                order = self.free
            elif name == "min-degree":
                order = min_degree(self.neighbours, self.states, self.free)
            else:
                order = min_degree(self.neighbours, self.states, self.free, at_once=LARGEST_AT_ONCE)
            self._orders[name] = order, measure(order, self.neighbours, self.states)
        return self._orders[name]

    def _cost(self, name: str, batch: int) -> float:
        shape = self.order(name)[1]
        per_step = STEP_ENTRIES.get(self.graph.device.type, STEP_ENTRIES["cpu"])
        if shape.entries.bit_length() > 900:
            return math.inf
        return shape.depth * per_step + shape.entries * batch

    def _given(self, order: tuple[int, ...]) -> list[int]:
        free = set(self.free)
        if sorted(set(order)) != sorted(order) or not free <= set(order):
            missing = sorted(free - set(order))[:8]
            raise ValueError(f"order: expected every variable once; missing {missing}, given {len(order)} numbers")
        return [variable for variable in order if variable in free]

    def _make(self, key: object, order: list[int]) -> Plan:
        if key not in self._plans:
            self._plans[key] = make_plan(self.scopes, self.states, order, self.graph.device)
        return self._plans[key]


def plan_for(potentials: LogPotentials, order: str | tuple[int, ...]) -> tuple[Reduction, Plan]:
    """The reduction and the plan for a model and its evidence."""
    planner = planner_for(potentials.graph, observed_in_all(potentials))
    return planner.reduction, planner.plan(order, potentials.batch_size)


def planner_for(graph: FactorGraph, observed: np.ndarray) -> Planner:
    """The planner for what is observed, kept with the graph."""
    return graph.compiled_as(("exact", observed.tobytes()), lambda: Planner(graph, observed))


def observed_in_all(potentials: LogPotentials) -> np.ndarray:
    """Which variables are observed in every member of the batch."""
    if potentials.observed is None:
        return np.zeros(potentials.graph.num_variables, dtype=bool)
    return (potentials.observed >= 0).all(0).cpu().numpy()
