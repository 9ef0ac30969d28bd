"""Which plan to use: finds elimination orders, compares what they cost, and keeps it all with the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bethenet.graph import FactorGraph
from bethenet.inference.exact.layout import Layout
from bethenet.inference.exact.memory import Task, predict
from bethenet.inference.exact.ordering import HOPELESS, Shape, adjacency, measure, min_degree, min_fill
from bethenet.inference.exact.plan import Plan, make_plan
from bethenet.inference.exact.reduction import Reduction
from bethenet.potentials import LogPotentials

ORDERS = ("auto", "min-fill", "min-degree")

FEW_VARIABLES = 2000
"""Up to here ``"auto"`` also tries min-fill and the variables' own order."""

STEP_ENTRIES = {"cpu": 1e5, "cuda": 1e7}
"""How many bucket entries are computed in the time that starting a step takes, roughly."""

LARGEST_AT_ONCE = 12.0
"""Binary logarithm of the largest bucket that is worth making larger for the sake of fewer steps."""

MOST_PLANNERS = 64
"""Sets of observed variables whose plans are kept with a graph; the oldest go first."""

Order = str | tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """An order, and the peak bytes that are predicted for it."""

    order: Order
    width: int
    bytes_needed: int


class Planner:
    """The orders of one reduced graph, and the plans made from them."""

    def __init__(self, graph: FactorGraph, observed: np.ndarray) -> None:
        self.graph = graph
        self.reduction = Reduction(graph, observed)
        self.scopes = self.reduction.leaf_scopes()
        self.free = self.reduction.free_variables()
        self.states: list[int] = graph.state_counts.tolist()
        self.neighbours = adjacency(graph.num_variables, (s for leaf in self.scopes for s in leaf))
        self._orders: dict[Order, tuple[list[int], Shape]] = {}
        self._plans: dict[Order, Plan] = {}
        self._predictions: dict[tuple[Order, Layout, Task, int, int], int] = {}

    def choose(
        self, order: Order, layout: Layout, task: Task, itemsize: int, limit: float = math.inf, samples: int = 0
    ) -> Choice:
        """The cheapest order that stays within ``limit`` bytes; if none does, the one that needs least."""
        choices = []
        for name in self._candidates(order, layout.batch):
            choice = Choice(name, self.shape(name).width, self._predict(name, layout, task, itemsize, samples))
            if choice.bytes_needed <= limit:
                return choice
            choices.append(choice)
        return min(choices, key=lambda choice: choice.bytes_needed)

    def width(self, order: Order) -> int:
        """The smallest width of the orders that ``order`` allows: an upper bound of the treewidth."""
        return min(self.shape(name).width for name in self._names(order))

    def plan(self, order: Order) -> Plan:
        """The plan for a named order or a given one."""
        if order not in self._plans:
            sequence = self._order(order)[0]
            self._plans[order] = make_plan(self.scopes, self.states, sequence, self.graph.device)
        return self._plans[order]

    def shape(self, order: Order) -> Shape:
        """What an order costs."""
        return self._order(order)[1]

    def _candidates(self, order: Order, batch: int) -> Iterator[Order]:
        """Names of orders, the cheapest first."""
        if order == "auto":
            first = self.shape("at once")
            if first.entries * batch <= first.depth * self._step_entries:
                # Starting the steps is most of the work, and no other order has fewer of them.
                yield "at once"
        yield from sorted(self._names(order), key=lambda name: self._cost(name, batch))

    def _names(self, order: Order) -> list[Order]:
        if order != "auto":
            return [order]
        few: list[Order] = ["min-fill", "as numbered"] if len(self.free) <= FEW_VARIABLES else []
        return ["at once", "min-degree", *few]

    def _cost(self, name: Order, batch: int) -> float:
        shape = self.shape(name)
        if shape.entries > HOPELESS:
            return math.log2(shape.entries) * HOPELESS * batch
        return shape.depth * self._step_entries + shape.entries * batch

    @property
    def _step_entries(self) -> float:
        return STEP_ENTRIES.get(self.graph.device.type, STEP_ENTRIES["cpu"])

    def _order(self, name: Order) -> tuple[list[int], Shape]:
        if name not in self._orders:
            if name == "min-fill":
                order = min_fill(self.neighbours, self.states, self.free)
            elif name == "as numbered":
                order = self.free
            elif name == "min-degree":
                order = min_degree(self.neighbours, self.states, self.free)
            elif name == "at once":
                order = min_degree(self.neighbours, self.states, self.free, at_once=LARGEST_AT_ONCE)
            else:
                order = self._given(name)
            self._orders[name] = order, measure(order, self.neighbours, self.states)
        return self._orders[name]

    def _given(self, order: Order) -> list[int]:
        if sorted(order) != list(range(self.graph.num_variables)):
            last = self.graph.num_variables - 1
            raise ValueError(f"order: expected every variable from 0 to {last} once, got {list(order)[:8]}...")
        free = set(self.free)
        return [int(variable) for variable in order if variable in free]

    def _predict(self, name: Order, layout: Layout, task: Task, itemsize: int, samples: int) -> int:
        shape = self.shape(name)
        if shape.message_entries > HOPELESS:  # not worth a plan in detail
            return shape.message_entries * layout.batch * itemsize
        key = name, layout, task, itemsize, samples
        if key not in self._predictions:
            self._predictions[key] = predict(self.plan(name), self.reduction, layout, task, itemsize, samples)
        return self._predictions[key]


def planner_for(model: FactorGraph | LogPotentials) -> Planner:
    """The planner for a graph and the variables that are observed in all members of a batch, kept with the graph.

    A variable with a single state counts as observed.
    """
    graph = model if isinstance(model, FactorGraph) else model.graph
    seen = graph.state_counts == 1
    if isinstance(model, LogPotentials) and model.observed is not None:
        seen = seen | (model.observed >= 0).all(0)
    observed = seen.cpu().numpy()
    planners: dict[bytes, Planner] = graph.compiled_as("exact planners", dict)
    key = observed.tobytes()
    planner = planners.pop(key, None) or Planner(graph, observed)
    planners[key] = planner
    if len(planners) > MOST_PLANNERS:
        del planners[next(iter(planners))]
    return planner
