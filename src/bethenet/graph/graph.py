"""`FactorGraph`: which variables there are, how many states each has, and which factors join them. No numbers.

Variables and factors are held in *groups*: all variables with the same number of states, and all factors with the same
table shape, sit in one tensor, so that every engine works on a handful of large tensors and never loops over single
factors. A quantity attached to variables (a marginal, say) is one tensor ``[batch, variables, states]`` per variable
group; one attached to factors is one tensor ``[batch, factors, *table]`` per factor group. The axis ``a`` of a factor
group always reads variables of one variable group: the one with ``table_shape[a]`` states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bethenet.graph.groups import (
    FactorGroup,
    Grouping,
    VariableGroup,
    checked_state_counts,
    grouped,
    is_permutation,
    no_such_variable,
)

if TYPE_CHECKING:
    import networkx

T = TypeVar("T")
IntegerArray = Tensor | np.ndarray[Any, Any] | Sequence[Sequence[int]]


class FactorGraph:
    """Variables and factors, frozen after construction.

    Args:
        state_counts: the number of states of each variable, at least 1.
        scopes: for each factor the variables it joins, as numbers or names, in the order of its table's axes. A scope
            may be empty (a constant), and several factors may have the same scope.
        names: a distinct name for each variable, if wanted.

    >>> graph = FactorGraph([2, 2, 3], [(0, 1), (1, 2), (2,)])
    >>> graph.num_variables, graph.num_factors, [group.table_shape for group in graph.factor_groups]
    (3, 3, [(3,), (2, 2), (2, 3)])
    """

    state_counts: Int[Tensor, " variables"]
    names: tuple[str, ...] | None
    _grouping: Grouping

    def __init__(
        self,
        state_counts: Sequence[int] | Tensor,
        scopes: Iterable[Sequence[int | str]],
        names: Sequence[str] | None = None,
    ) -> None:
        self.state_counts = counts = checked_state_counts(state_counts)
        self._set_names(names, counts.numel())
        by_arity: dict[int, tuple[list[int], list[Sequence[int]]]] = {}
        for factor, scope in enumerate(scopes):
            if not isinstance(scope, Iterable):
                raise ValueError(f"factor {factor}: a scope is a sequence of variables; got {scope!r}")
            numbers = [self._number(variable, factor) for variable in scope]
            ids, rows = by_arity.setdefault(len(numbers), ([], []))
            ids.append(factor)
            rows.append(numbers)
        arrays = [
            (torch.tensor(ids), torch.tensor(rows, dtype=torch.long).reshape(len(rows), arity))
            for arity, (ids, rows) in by_arity.items()
        ]
        self._grouping = grouped(counts, arrays)

    @classmethod
    def from_arrays(
        cls,
        state_counts: Sequence[int] | Tensor,
        scopes: Sequence[IntegerArray],
        names: Sequence[str] | None = None,
        *,
        numbers: Sequence[Any] | None = None,
    ) -> FactorGraph:
        """Build from index arrays ``[factors, arity]``, one or more; factors are numbered in the order given.

        This takes no Python step per factor, so a million edges are built in well under a second.

        Args:
            state_counts: the number of states of each variable, at least 1.
            scopes: the index arrays.
            names: a distinct name for each variable, if wanted.
            numbers: for each array the numbers its factors are to have, if it is not the order given.
        """
        graph = cls.__new__(cls)
        graph.state_counts = counts = checked_state_counts(state_counts)
        graph._set_names(names, counts.numel())
        arrays, first = [], 0
        for scope in scopes:
            tensor = torch.as_tensor(scope).cpu()
            if tensor.dim() != 2 or (tensor.is_floating_point() and tensor.numel()):
                raise ValueError(
                    f"an array of scopes is of integers and has shape [factors, arity]; got {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}"
                )
            tensor = tensor.long()
            arrays.append((torch.arange(first, first + tensor.shape[0]), tensor))
            first += tensor.shape[0]
        if numbers is not None:
            chosen = [torch.as_tensor(some, dtype=torch.long).cpu() for some in numbers]
            sizes = [tensor.shape[0] for _, tensor in arrays]
            if [some.numel() for some in chosen] != sizes or not is_permutation(chosen, first):
                raise ValueError(
                    f"expected {sizes} factor numbers for the arrays, each of 0 .. {first - 1} once; got "
                    f"{[some.numel() for some in chosen]}"
                )
            arrays = [(some, tensor) for some, (_, tensor) in zip(chosen, arrays, strict=True)]
        graph._grouping = grouped(counts, arrays)
        return graph

    # --- builders ---------------------------------------------------------------------------------------------------

    @classmethod
    def grid(cls, rows: int, columns: int, states: int = 2, *, unary: bool = True) -> FactorGraph:
        """A rows x columns grid, variables row by row: one unary factor a variable (first, in the variables' order),
        then the horizontal edges row by row, then the vertical ones.
        """
        _check_at_least(rows=(rows, 0), columns=(columns, 0))
        index = torch.arange(rows * columns).reshape(rows, columns)
        right = torch.stack([index[:, :-1].flatten(), index[:, 1:].flatten()], dim=1)
        down = torch.stack([index[:-1].flatten(), index[1:].flatten()], dim=1)
        edges = torch.cat([right, down])
        return cls.from_arrays(_uniform(rows * columns, states), _with_unary(rows * columns, [edges], unary))

    @classmethod
    def chain(cls, length: int, states: int = 2, order: int = 1, *, unary: bool = True) -> FactorGraph:
        """A chain of ``length`` variables in which each is joined to its ``order`` predecessors by pairwise factors:
        unary factors first, then all edges of lag 1, of lag 2, and so on.
        """
        _check_at_least(length=(length, 0), order=(order, 0))
        index = torch.arange(length)
        edges = [torch.stack([index[:-lag], index[lag:]], dim=1) for lag in range(1, min(order, length - 1) + 1)]
        return cls.from_arrays(_uniform(length, states), _with_unary(length, edges, unary))

    @classmethod
    def bipartite(
        cls, left: int, right: int, left_states: int = 2, right_states: int = 2, *, unary: bool = True
    ) -> FactorGraph:
        """Every variable of ``0 .. left-1`` joined to every one of ``left .. left+right-1`` (a Boltzmann machine's
        visible and hidden units): unary factors first, then the edges, right index fastest.
        """
        _check_at_least(left=(left, 0), right=(right, 0))
        edges = torch.cartesian_prod(torch.arange(left), torch.arange(left, left + right)).reshape(-1, 2)
        counts = torch.cat([_uniform(left, left_states), _uniform(right, right_states)])
        return cls.from_arrays(counts, _with_unary(left + right, [edges], unary))

    @classmethod
    def complete(cls, variables: int, states: int = 2, *, unary: bool = True) -> FactorGraph:
        """Every pair of variables joined: unary factors first, then the edges (i, j), i < j, in lexical order."""
        _check_at_least(variables=(variables, 0))
        edges = torch.combinations(torch.arange(variables), 2).reshape(-1, 2)
        return cls.from_arrays(_uniform(variables, states), _with_unary(variables, [edges], unary))

    @classmethod
    def from_networkx(
        cls, graph: networkx.Graph[Any], states: int | Mapping[Any, int] = 2, *, unary: bool = True
    ) -> FactorGraph:
        """One variable a node (named after it) and one pairwise factor an edge, both in networkx's order.

        Args:
            graph: any undirected networkx graph without self-loops.
            states: one number for all, or a mapping from node to number.
            unary: also put a unary factor on every variable, before the edges.
        """
        if graph.is_directed():
            raise ValueError("expected an undirected graph, got a directed one")
        nodes = list(graph.nodes)
        if not isinstance(states, int):
            missing = [node for node in nodes if node not in states]
            if missing:
                raise ValueError(f"node {missing[0]!r}: no number of states was given for it")
        position = {node: number for number, node in enumerate(nodes)}
        counts = [states if isinstance(states, int) else states[node] for node in nodes]
        edges = [(position[a], position[b]) for a, b in graph.edges()]
        scopes: list[tuple[int, ...]] = [(number,) for number in range(len(nodes))] if unary else []
        return cls(counts, [*scopes, *edges], names=[str(node) for node in nodes])

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def num_variables(self) -> int:
        """How many variables there are."""
        return self.state_counts.numel()

    @property
    def num_factors(self) -> int:
        """How many factors there are."""
        return self._grouping.factor_group.numel()

    @property
    def variable_groups(self) -> tuple[VariableGroup, ...]:
        """All variables, those with the same number of states together; by that number."""
        return self._grouping.variable_groups

    @property
    def factor_groups(self) -> tuple[FactorGroup, ...]:
        """All factors, those with the same table shape together; by arity, then shape."""
        return self._grouping.factor_groups

    @property
    def device(self) -> torch.device:
        """Where the index tensors are."""
        return self.state_counts.device

    def scope(self, factor: int) -> tuple[int, ...]:
        """The variables that a factor joins, in the order of its table's axes."""
        group, row = self.locate_factor(factor)
        return tuple(self.factor_groups[group].variables[row].tolist())

    def scopes(self) -> list[tuple[int, ...]]:
        """The scopes of all factors, in their order."""
        result: list[tuple[int, ...]] = [()] * self.num_factors
        for group in self.factor_groups:
            for factor, scope in zip(group.factors.tolist(), group.variables.tolist(), strict=True):
                result[factor] = tuple(scope)
        return result

    def locate_factor(self, factor: int) -> tuple[int, int]:
        """(group, row) of a factor."""
        if not 0 <= factor < self.num_factors:
            raise ValueError(f"factor {factor} does not exist: the graph has {self.num_factors} factors")
        return int(self._grouping.factor_group[factor]), int(self._grouping.factor_row[factor])

    def locate_variable(self, variable: int | str) -> tuple[int, int]:
        """(group, row) of a variable given by number or name."""
        number = self.variable_number(variable)
        return int(self._grouping.variable_group[number]), int(self.variable_rows[number])

    def variable_number(self, variable: int | str) -> int:
        """The number of a variable given by number or name."""
        return self._number(variable, None)

    @property
    def variable_rows(self) -> Int[Tensor, " variables"]:
        """For each variable its row within its variable group."""
        return self._grouping.variable_row

    @cached_property
    def degrees(self) -> tuple[Int[Tensor, " variables"], ...]:
        """How many factors each variable is in, one tensor per variable group."""
        result = [
            torch.zeros(group.variables.numel(), dtype=torch.long, device=self.device) for group in self.variable_groups
        ]
        for factors in self.factor_groups:
            for axis, group in enumerate(factors.variable_groups):
                rows = factors.rows[:, axis]
                result[group].index_add_(0, rows, torch.ones_like(rows))
        return tuple(result)

    def compiled(self, build: Callable[[FactorGraph], T]) -> T:
        """``build(self)``, computed once and kept with the graph: how an engine stores its wiring."""
        return self.compiled_as(build, lambda: build(self))

    def compiled_as(self, key: Hashable, build: Callable[[], T]) -> T:
        """``build()``, computed once for each ``key`` and kept with the graph."""
        if key not in self._compiled:
            self._compiled[key] = build()
        result: T = self._compiled[key]
        return result

    def to(self, device: torch.device | str) -> FactorGraph:
        """The same graph with its index tensors on ``device`` (itself where they are there already)."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        key = ("device", target)
        return self.compiled_as(key, lambda: self._moved(target))

    def __deepcopy__(self, memo: dict[int, Any]) -> FactorGraph:
        # it never changes: copies of a model stay about the same graph
        return self

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{len(group)} of {'x'.join(map(str, group.table_shape)) or '1'} entries" for group in self.factor_groups
        )
        return f"FactorGraph({self.num_variables} variables, {self.num_factors} factors: {shapes or 'none'})"

    # --- construction -----------------------------------------------------------------------------------------------

    def _set_names(self, names: Sequence[str] | None, variables: int) -> None:
        self.names = None if names is None else tuple(names)
        self._numbers: dict[str, int] = {}
        self._compiled: dict[Hashable, Any] = {}
        if self.names is None:
            return
        if len(self.names) != variables:
            raise ValueError(f"expected {variables} names, one a variable; got {len(self.names)}")
        for number, name in enumerate(self.names):
            if name in self._numbers:
                raise ValueError(f"variables {self._numbers[name]} and {number} are both named {name!r}")
            self._numbers[name] = number

    def _number(self, variable: int | str, factor: int | None) -> int:
        where = "" if factor is None else f"factor {factor}: "
        if isinstance(variable, str):
            if variable not in self._numbers:
                known = "its variables have no names" if self.names is None else f"there are {list(self.names[:8])}..."
                raise ValueError(f"{where}no variable is named {variable!r}: {known}")
            return self._numbers[variable]
        try:
            number = variable.__index__()
        except AttributeError:
            raise ValueError(f"{where}a variable is a number or a name; got {variable!r}") from None
        if not 0 <= number < self.num_variables:
            raise no_such_variable(number, self.num_variables, factor)
        return number

    def _moved(self, device: torch.device) -> FactorGraph:
        moved = FactorGraph.__new__(FactorGraph)
        moved.state_counts = self.state_counts.to(device)
        moved._set_names(self.names, self.num_variables)
        moved._grouping = self._grouping.to(device)
        return moved


def _check_at_least(**limits: tuple[int, int]) -> None:
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def _uniform(variables: int, states: int) -> Tensor:
    return torch.full((variables,), states, dtype=torch.long)


def _with_unary(variables: int, edges: list[Tensor], unary: bool) -> list[IntegerArray]:
    return [torch.arange(variables).unsqueeze(1), *edges] if unary else list(edges)
