"""`LogPotentials`: the numbers of a model, one tensor per factor group, and what has been observed.

A table tensor is ``[batch | 1, factors | 1, *table]``. A leading 1 means *shared*: one table tied over all factors of
the group (a hidden Markov model's transitions), or one model for a whole batch of evidence. Sharing is kept, never
expanded; engines exploit it. Entries may be ``-inf``: that configuration is impossible.

Evidence changes no table. It adds one term per state of a variable, ``[batch | 1, variables | 1, states]`` per variable
group: zero where nothing is known, ``-inf`` at the states that an observation rules out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.potentials.evidence import UNOBSERVED, Evidence, with_evidence


class LogPotentials:
    """Log-potentials of every factor of a graph, and log-terms of its variables where there is evidence.

    Args:
        graph: the structure; moved to the tables' device.
        tables: for each factor group a tensor ``[batch | 1, factors | 1, *table]``.
        node_terms: for each variable group a tensor ``[batch | 1, variables | 1, states]``; zeros by default.
        observed: the state of each variable ``[batch | 1, variables]``, -1 where it is not observed. Only says which of
            the ``node_terms`` are hard observations, so that engines may remove those variables.
        finite: whether it is known that nothing is impossible, so that nobody need look (see `has_zeros`).

    >>> graph = FactorGraph.chain(3)
    >>> potentials = LogPotentials.random(graph, generator=torch.Generator().manual_seed(0))
    >>> [tuple(table.shape) for table in potentials.tables], potentials.batch_size
    ([(1, 3, 2), (1, 2, 2, 2)], 1)
    >>> potentials.clamp({0: [0, 1, 1, 0]}).batch_size
    4
    """

    def __init__(
        self,
        graph: FactorGraph,
        tables: Sequence[Tensor],
        node_terms: Sequence[Tensor] | None = None,
        observed: Int[Tensor, "batch variables"] | None = None,
        *,
        finite: bool = False,
    ) -> None:
        if len(tables) != len(graph.factor_groups):
            raise ValueError(f"expected {len(graph.factor_groups)} tables, one a factor group; got {len(tables)}")
        some = [*tables, *(node_terms or ())]
        device = some[0].device if some else graph.device
        self.dtype = some[0].dtype if some else torch.get_default_dtype()
        self.graph = graph.to(device)
        if node_terms is None:
            node_terms = [
                torch.zeros(1, 1, group.states, dtype=self.dtype, device=device) for group in graph.variable_groups
            ]
        elif len(node_terms) != len(graph.variable_groups):
            raise ValueError(
                f"expected {len(graph.variable_groups)} node terms, one a variable group; got {len(node_terms)}"
            )
        self.tables = tuple(tables)
        self.node_terms = tuple(node_terms)
        self.observed = observed
        for number, (table, factors) in enumerate(zip(self.tables, graph.factor_groups, strict=True)):
            self._check(f"table {number}", table, len(factors), factors.table_shape, "factors")
        for number, (term, group) in enumerate(zip(self.node_terms, graph.variable_groups, strict=True)):
            self._check(f"node term {number}", term, group.variables.numel(), (group.states,), "variables")
        self.batch_size = self._common_batch_size()
        self._zeros_found: list[bool] = [False] if finite else []

    # --- builders ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_tables(
        cls, graph: FactorGraph, tables: Sequence[Any], *, dtype: torch.dtype | None = None
    ) -> LogPotentials:
        """One log-table per factor, in the factors' order (nested lists, arrays or tensors); a batch of one model.

        Raises:
            ValueError: a table is no array of numbers, its shape is not its factor's, or an entry is NaN or ``+inf``;
                the factor is named.
        """
        if len(tables) != graph.num_factors:
            raise ValueError(f"expected {graph.num_factors} tables, one a factor; got {len(tables)}")
        dtype = dtype or torch.get_default_dtype()
        stacked = []
        for group in graph.factor_groups:
            members = []
            for factor in group.factors.tolist():
                try:
                    table = torch.as_tensor(tables[factor], dtype=dtype)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise ValueError(
                        f"factor {factor} over variables {graph.scope(factor)}: expected a table of numbers ({error})"
                    ) from None
                if tuple(table.shape) != group.table_shape:
                    raise ValueError(
                        f"factor {factor} over variables {graph.scope(factor)}: expected a table of shape "
                        f"{group.table_shape}, got {tuple(table.shape)}"
                    )
                members.append(table)
            table = torch.stack(members).unsqueeze(0)
            wrong = torch.isnan(table) | (table == math.inf)
            if wrong.any():
                factor = int(group.factors[torch.nonzero(wrong)[0][1]])
                raise ValueError(
                    f"factor {factor} over variables {graph.scope(factor)}: a log-potential is a number or -inf, "
                    f"got {float(table[wrong][0])}"
                )
            stacked.append(table)
        return cls(graph, stacked, _zero_terms(graph, dtype))

    @classmethod
    def from_factors(
        cls,
        state_counts: Sequence[int],
        factors: Sequence[tuple[Sequence[int | str], Any]],
        names: Sequence[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> LogPotentials:
        """Graph and numbers at once, from pairs (scope, log-table).

        >>> model = LogPotentials.from_factors([2, 2], [(("rain", "wet"), [[0.0, -2.0], [-1.0, 0.5]])], ["rain", "wet"])
        >>> model.graph.num_factors
        1
        """
        graph = FactorGraph(state_counts, [scope for scope, _ in factors], names)
        return cls.from_tables(graph, [table for _, table in factors], dtype=dtype)

    @classmethod
    def random(
        cls,
        graph: FactorGraph,
        scale: float = 1.0,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> LogPotentials:
        """Independent normal log-potentials of standard deviation ``scale`` in every entry of every table."""
        dtype = dtype or torch.get_default_dtype()
        tables = [
            scale * torch.randn(batch_size, len(group), *group.table_shape, dtype=dtype, generator=generator)
            for group in graph.factor_groups
        ]
        return cls(graph, [table.to(graph.device) for table in tables], _zero_terms(graph, dtype))

    @classmethod
    def stack(cls, members: Sequence[LogPotentials]) -> LogPotentials:
        """A batch from models over one and the same graph object."""
        if not members:
            raise ValueError("expected at least one model to stack, got none")
        first = members[0]
        if any(member.graph is not first.graph for member in members):
            raise ValueError("models stack into a batch only if they share one graph object")
        sizes = [member.batch_size for member in members]

        def join(tensors: list[Tensor], spread: bool) -> Tensor:
            widths = [max(tensor.shape[1] for tensor in tensors)] if spread else []
            return torch.cat(
                [t.expand(size, *widths, *t.shape[1 + len(widths) :]) for t, size in zip(tensors, sizes, strict=True)]
            )

        observed = None
        if any(member.observed is not None for member in members):
            blank = torch.full((1, first.graph.num_variables), UNOBSERVED, device=first.device)
            observed = join([blank if m.observed is None else m.observed for m in members], spread=False)
        return cls(
            first.graph,
            [join([m.tables[g] for m in members], spread=True) for g in range(len(first.tables))],
            [join([m.node_terms[g] for m in members], spread=True) for g in range(len(first.node_terms))],
            observed,
        )

    # --- evidence ---------------------------------------------------------------------------------------------------

    def clamp(self, evidence: Evidence) -> LogPotentials:
        """The model given evidence; several calls add up.

        Args:
            evidence: a mapping from variables (numbers or names) to what is known of each: a state; ``[batch]`` states,
                one for each member of a batch (-1: not observed in that member); or soft evidence, a floating-point
                vector ``[states]`` or ``[batch, states]`` of non-negative likelihoods by which the variable's states
                are weighted. Or, for all variables at once, an integer tensor of states ``[variables]`` or
                ``[batch, variables]``, -1 where nothing is observed.

        Raises:
            ValueError: an unknown variable, a state it does not have, or weights that are negative or not finite.
        """
        terms, observed = with_evidence(self.graph, self.node_terms, self.observed, evidence)
        return LogPotentials(self.graph, self.tables, terms, observed)

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.graph.device

    @cached_property
    def has_zeros(self) -> bool:
        """Whether any configuration of any factor or variable is impossible (``-inf``).

        The numbers are looked at once, for an object and those detached from it: each look waits for the device.
        """
        if not self._zeros_found:
            found = [(tensor == -math.inf).any() for tensor in (*self.tables, *self.node_terms)]
            self._zeros_found.append(bool(torch.stack(found).any()) if found else False)
        return self._zeros_found[0]

    def table(self, factor: int) -> Float[Tensor, batch * table]:
        """The log-table(s) of one factor, without evidence."""
        group, row = self.graph.locate_factor(factor)
        table = self.tables[group]
        return table[:, row if table.shape[1] > 1 else 0]

    def score(self, states: Int[Tensor, "*samples variables"]) -> Float[Tensor, "*samples batch"]:
        """Log of the unnormalised probability (nats) of complete assignments, evidence counted.

        The last axis is this object's batch: every assignment is scored under every member.

        Raises:
            ValueError: not integers, another number of variables, or (looked at on the CPU only, where it is free) a
                state that a variable does not have.
        """
        self._check_assignments(states)
        flat = states.reshape(math.prod(states.shape[:-1]), self.graph.num_variables).to(self.device)
        total = torch.zeros(flat.shape[0], self.batch_size, dtype=self.dtype, device=self.device)
        for table, group in zip(self.tables, self.graph.factor_groups, strict=True):
            total = total + _pick(table, flat[:, group.variables])
        for term, variables in zip(self.node_terms, self.graph.variable_groups, strict=True):
            total = total + _pick(term, flat[:, variables.variables].unsqueeze(-1))
        return total.reshape(*states.shape[:-1], self.batch_size)

    def __getitem__(self, member: int | slice | Tensor) -> LogPotentials:
        """One member of the batch (as a batch of one), a slice of it, or those an index tensor names. Whatever is
        shared over the batch stays shared.
        """
        if isinstance(member, int):
            if not -self.batch_size <= member < self.batch_size:
                raise IndexError(f"member {member} of a batch of {self.batch_size}")
            member %= self.batch_size
            member = slice(member, member + 1)

        def cut(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape[0] == 1 else tensor[member]

        observed = None if self.observed is None else cut(self.observed)
        return LogPotentials(self.graph, [cut(t) for t in self.tables], [cut(t) for t in self.node_terms], observed)

    def map(self, change: Any) -> LogPotentials:
        """The same graph and evidence with ``change`` applied to every table and node term."""
        return LogPotentials(
            self.graph, [change(t) for t in self.tables], [change(t) for t in self.node_terms], self.observed
        )

    def detach(self) -> LogPotentials:
        """The same numbers as constants."""
        result = self.map(lambda tensor: tensor.detach())
        result._zeros_found = self._zeros_found
        return result

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LogPotentials:
        """The same model on another device or in another floating-point type."""
        graph = self.graph if device is None else self.graph.to(device)
        observed = None if self.observed is None else self.observed.to(graph.device)
        return LogPotentials(
            graph,
            [table.to(device=graph.device, dtype=dtype or table.dtype) for table in self.tables],
            [term.to(device=graph.device, dtype=dtype or term.dtype) for term in self.node_terms],
            observed,
        )

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(table.shape)) for table in self.tables)
        return f"LogPotentials({self.graph}, batch {self.batch_size}, tables {shapes or 'none'}, {self.dtype})"

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_assignments(self, states: Tensor) -> None:
        variables = self.graph.num_variables
        if states.dim() < 1 or states.shape[-1] != variables or (states.is_floating_point() and states.numel()):
            raise ValueError(
                f"expected integer states of shape [..., {variables}], got {states.dtype} of shape "
                f"{tuple(states.shape)}"
            )
        if self.device.type != "cpu" or states.device.type != "cpu":
            return
        wrong = (states < 0) | (states >= self.graph.state_counts)
        if wrong.any():
            variable = int(torch.nonzero(wrong)[0, -1])
            raise ValueError(
                f"variable {variable}: expected a state from 0 to {int(self.graph.state_counts[variable]) - 1}, "
                f"got {int(states[wrong][0])}"
            )

    def _check(self, what: str, tensor: Tensor, members: int, shape: tuple[int, ...], kind: str) -> None:
        expected = f"[batch or 1, {members} {kind} or 1, {', '.join(map(str, shape))}]"
        if tensor.dim() != 2 + len(shape) or tuple(tensor.shape[2:]) != shape or tensor.shape[1] not in (1, members):
            raise ValueError(f"{what}: expected shape {expected}, got {list(tensor.shape)}")
        if tensor.dtype != self.dtype or not tensor.is_floating_point():
            raise ValueError(f"{what}: expected {self.dtype} as the first table, got {tensor.dtype}")
        if tensor.device != self.graph.device:
            raise ValueError(f"{what}: expected to be on {self.graph.device}, is on {tensor.device}")

    def _common_batch_size(self) -> int:
        tensors: list[Tensor] = [*self.tables, *self.node_terms]
        if self.observed is not None:
            tensors.append(self.observed)
        sizes = {tensor.shape[0] for tensor in tensors} - {1}
        if 0 in sizes:
            raise ValueError("expected at least one batch member, got a batch of none")
        if len(sizes) > 1:
            raise ValueError(f"batch sizes differ: {sorted(sizes)}; each tensor has one common size or 1")
        return sizes.pop() if sizes else 1


def _zero_terms(graph: FactorGraph, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(1, 1, group.states, dtype=dtype, device=graph.device) for group in graph.variable_groups]


def _pick(table: Tensor, states: Tensor) -> Tensor:
    """Sum over members of ``table`` [B | 1, M | 1, *shape] at ``states`` [S, M, arity]; the result is [S, B | 1]."""
    batch, members = table.shape[:2]
    strides = torch.tensor(
        [math.prod(table.shape[3 + axis :]) for axis in range(states.shape[-1])], dtype=torch.long, device=table.device
    )
    cells = (states * strides).sum(-1)
    flat = table.reshape(batch, members, -1)
    entries = flat.shape[-1]
    rows = torch.arange(states.shape[1], device=table.device) * entries if members > 1 else 0
    return flat.reshape(batch, -1)[:, (cells + rows).flatten()].reshape(batch, *cells.shape).sum(-1).T
