"""`Plan`: bucket elimination of one graph as a list of batched contractions, without numbers.

Eliminating a variable multiplies the tables it stands in (its bucket) and sums it out; the result, a *message*, goes to
the bucket of whichever of its variables comes next. Buckets that do not wait for each other and look alike (the same
table shapes in the same places) are one `Round`: one contraction over stacked tables.

Every table is used exactly once. So the rows of each stack can be put, once and for all, into the order in which they
are used, and a round reads plain slices: no gathering while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

MOST_OF_A_KIND = 4
"""Tables over the same variables in one bucket; beyond this they are first multiplied pair by pair."""

ELIMINATED = 0
"""The local axis of the variable that a round sums out. A round that only multiplies has no such axis."""


@dataclass(frozen=True)
class Source:
    """Where one operand of a round comes from: rows ``start`` to ``stop`` of a stack."""

    stack: int
    """Leaves first, then the rounds' results."""
    start: int
    stop: int
    axes: tuple[int, ...]
    """For each axis of the table the round's local axis: 0 is summed out, i is the i-th variable of the result."""


@dataclass(frozen=True, eq=False)
class Round:
    """Buckets of one kind, computed at once."""

    variables: Int[Tensor, " rows"]
    """The variable that each row sums out; empty in a round that only multiplies."""
    scope: Int[Tensor, "rows variables"]
    """The variables of each row's result."""
    sizes: tuple[int, ...]
    """States of the local axes: of the eliminated variable (1 if there is none), then of the result's variables."""
    sources: tuple[Source, ...]

    @property
    def rows(self) -> int:
        """How many buckets."""
        return self.scope.shape[0]

    @property
    def output_axes(self) -> tuple[int, ...]:
        """The local axes of the result."""
        return tuple(range(1, len(self.sizes)))


@dataclass(frozen=True, eq=False)
class Plan:
    """The rounds, and how the leaves' rows have to be ordered for them."""

    rounds: tuple[Round, ...]
    permutations: tuple[Int[Tensor, " rows"] | None, ...]
    """For each leaf its rows in the order of use; ``None`` where that is the order they have."""
    uses: tuple[tuple[tuple[int, int], ...], ...]
    """For each stack the (round, operand) pairs that use its rows, in the rows' order."""

    @property
    def leaves(self) -> int:
        """How many stacks are given."""
        return len(self.permutations)


@dataclass
class _Bucket:
    variable: int
    entries: list[int]
    result: int
    scope: tuple[int, ...]


class _Builder:
    """Eliminates symbolically. A table is an *entry*: a number, with its scope, stack, row and level by that number."""

    def __init__(self, leaves: Sequence[list[list[int]]], states: Sequence[int]) -> None:
        self.states = states
        self.scopes: list[tuple[int, ...]] = []
        self.stacks: list[int] = []
        self.levels: list[int] = []
        self.first: list[int] = []
        for stack, scopes in enumerate(leaves):
            self.first.append(len(self.scopes))
            self.scopes.extend(map(tuple, scopes))
            self.stacks.extend([stack] * len(scopes))
            self.levels.extend([0] * len(scopes))
        self.num_leaves = len(leaves)
        self.first.append(len(self.scopes))
        self.by_level: dict[int, list[_Bucket]] = {}

    def eliminate(self, order: Sequence[int]) -> None:
        """Make all buckets."""
        place = {variable: number for number, variable in enumerate(order)}.__getitem__
        waiting: dict[int, list[int]] = {variable: [] for variable in order}
        for entry, scope in enumerate(self.scopes):
            waiting[min(scope, key=place)].append(entry)
        for variable in order:
            entries = waiting.pop(variable)
            if len(entries) > MOST_OF_A_KIND:
                entries = self._multiply_alike(entries, place)
            union = set().union(*(self.scopes[entry] for entry in entries))
            union.discard(variable)
            scope = tuple(sorted(union, key=place))
            result = self._add(variable, entries, scope)
            if scope:
                waiting[scope[0]].append(result)

    def _add(self, variable: int, entries: list[int], scope: tuple[int, ...]) -> int:
        result = len(self.scopes)
        level = 1 + max(self.levels[entry] for entry in entries)
        self.scopes.append(scope)
        self.stacks.append(-1)
        self.levels.append(level)
        self.by_level.setdefault(level, []).append(_Bucket(variable, entries, result, scope))
        return result

    def _multiply_alike(self, entries: list[int], place: object) -> list[int]:
        """Multiply entries over the same variables, two by two, until few of a kind are left."""
        kinds: dict[frozenset[int], list[int]] = {}
        for entry in entries:
            kinds.setdefault(frozenset(self.scopes[entry]), []).append(entry)
        remaining: list[int] = []
        for scope, members in kinds.items():
            ordered = tuple(sorted(scope, key=place))  # type: ignore[call-overload]
            while len(members) > MOST_OF_A_KIND:
                members.sort(key=self.levels.__getitem__)
                pairs = [members[at : at + 2] for at in range(0, len(members), 2)]
                members = [self._add(-1, pair, ordered) if len(pair) == 2 else pair[0] for pair in pairs]
            remaining.extend(members)
        return remaining

    def rounds(self) -> list[tuple[tuple[tuple[int, tuple[int, ...]], ...], list[_Bucket]]]:
        """Buckets of one level and kind together, with each operand's stack and axes; entries sorted to fit."""
        result: list[tuple[tuple[tuple[int, tuple[int, ...]], ...], list[_Bucket]]] = []
        for level in sorted(self.by_level):
            kinds: dict[object, list[_Bucket]] = {}
            for bucket in self.by_level[level]:
                local = {variable: axis + 1 for axis, variable in enumerate(bucket.scope)}
                local[bucket.variable] = ELIMINATED
                operands = sorted(
                    (self.stacks[entry], tuple([local[v] for v in self.scopes[entry]]), entry)
                    for entry in bucket.entries
                )
                bucket.entries = [entry for _, _, entry in operands]
                signature = tuple([(stack, axes) for stack, axes, _ in operands])
                own = self.states[bucket.variable] if bucket.variable >= 0 else 0
                shape = tuple([self.states[v] for v in bucket.scope])
                kinds.setdefault((own, shape, signature), []).append(bucket)
            for (_, _, signature), buckets in kinds.items():  # type: ignore[misc]
                stack = self.num_leaves + len(result)
                for bucket in buckets:
                    self.stacks[bucket.result] = stack
                result.append((signature, buckets))
        return result


def make_plan(
    leaves: Sequence[list[list[int]]], states: Sequence[int], order: Sequence[int], device: torch.device
) -> Plan:
    """Plan the elimination of ``order``.

    Args:
        leaves: for each stack of given tables the variables of each row (at least one). Every variable of the order is
            in some row.
        states: the number of states of each variable.
        order: the variables to sum out.
        device: where the index tensors are to be.
    """
    builder = _Builder(leaves, states)
    builder.eliminate(order)
    grouped = builder.rounds()
    # From the last round to the first, so that a round's rows can stand in the order in which they are used later.
    use = np.zeros(len(builder.scopes), dtype=np.int64)
    operand_count = 1 + max((len(signature) for signature, _ in grouped), default=0)
    row_count = 1 + len(builder.scopes)
    for number in range(len(grouped) - 1, -1, -1):
        signature, buckets = grouped[number]
        if len(buckets) > 1:
            buckets.sort(key=lambda bucket: use[bucket.result])
        entries = np.array([bucket.entries for bucket in buckets])
        keys = (number * operand_count + np.arange(len(signature))) * row_count
        use[entries] = keys[None, :] + np.arange(len(buckets))[:, None]

    segments: dict[tuple[int, int], tuple[int, int]] = {}
    uses: list[tuple[tuple[int, int], ...]] = []
    permutations: list[Tensor | None] = []
    members = [np.arange(a, b) for a, b in zip(builder.first, builder.first[1:], strict=False)]
    members += [np.array([bucket.result for bucket in buckets]) for _, buckets in grouped]
    for stack, ids in enumerate(members):
        rows = np.argsort(use[ids], kind="stable")
        if stack < len(leaves):
            ordered = bool((rows == np.arange(len(rows))).all())
            permutations.append(None if ordered else torch.as_tensor(rows, device=device))
        users, starts = np.unique(use[ids[rows]] // row_count, return_index=True)
        if stack >= len(leaves) and not builder.scopes[ids[0]]:
            uses.append(())
            continue
        stops = [*starts[1:].tolist(), len(rows)]
        pairs = [divmod(user, operand_count) for user in users.tolist()]
        uses.append(tuple(pairs))
        segments.update(zip(pairs, zip(starts.tolist(), stops, strict=True), strict=True))

    rounds = []
    for number, (signature, buckets) in enumerate(grouped):
        sources = tuple(
            Source(stack, *segments[number, operand], axes) for operand, (stack, axes) in enumerate(signature)
        )
        variables = [bucket.variable for bucket in buckets if bucket.variable >= 0]
        scope = torch.tensor([bucket.scope for bucket in buckets], dtype=torch.long, device=device)
        own = states[variables[0]] if variables else 1
        sizes = (own, *(states[v] for v in buckets[0].scope))
        rounds.append(
            Round(
                torch.tensor(variables, dtype=torch.long, device=device),
                scope.reshape(len(buckets), len(buckets[0].scope)),
                sizes,
                sources,
            )
        )
    return Plan(tuple(rounds), tuple(permutations), tuple(uses))
