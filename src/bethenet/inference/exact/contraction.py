"""One round's arithmetic: an ``einsum`` over stacked tables in the exponential domain, and its derivative.

Axes are numbers: `BATCH`, `ROW`, then the round's local axes (0 is summed out). An operand that is shared over the
batch or over the rows simply lacks that axis, so sharing is exploited and never expanded. Axes that always occur
together are merged into one first: a message over fifteen binary variables is handled as a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import opt_einsum
import torch
from torch import Tensor

BATCH, ROW = -2, -1

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One pairwise product-and-sum; values are numbered, operands first. ``right`` is ``None`` for a sum alone."""

    left: int
    right: int | None
    axes: Axes
    """The axes of the result."""


class Contraction:
    """``sum over axis 0 of the product of the operands``, by the cheapest sequence of pairwise steps.

    Args:
        operands: for each operand its axes in the order of its tensor, where `BATCH` and `ROW` stand only if the
            operand is not shared over them.
        sizes: of each local axis.
        batch: size of the batch axis.
        rows: size of the row axis.
    """

    def __init__(self, operands: tuple[Axes, ...], sizes: tuple[int, ...], batch: int, rows: int) -> None:
        self.operand_axes = operands
        self.local_sizes = sizes
        shared = {axis for axes in operands for axis in axes if axis < 0}
        self.output_axes: Axes = (*sorted(shared), *range(1, len(sizes)))
        self.merged = _merge([*operands, self.output_axes], len(sizes))
        first_of = {axis: group[0] for group in self.merged for axis in group}
        self.sizes: dict[int, int] = {BATCH: batch, ROW: rows}
        self.sizes |= {group[0]: math.prod(sizes[axis] for axis in group) for group in self.merged}
        self.axes = [_distinct(first_of.get(axis, axis) for axis in sorted(axes)) for axes in operands]
        self.output = _distinct(first_of.get(axis, axis) for axis in self.output_axes)
        self.full: Axes = tuple(axis for axis in (BATCH, ROW) if self.sizes[axis] > 1)
        self.letters = {axis: opt_einsum.get_symbol(number) for number, axis in enumerate(self.sizes)}
        self.steps = self._find_steps()

    def _find_steps(self) -> tuple[Step, ...]:
        count = len(self.axes)
        if count == 1:
            return (Step(0, None, self.output),)
        words = ["".join(self.letters[axis] for axis in axes) for axes in (*self.axes, self.output)]
        shapes = [tuple(self.sizes[axis] for axis in axes) for axes in self.axes]
        equation = ",".join(words[:-1]) + "->" + words[-1]
        path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
        values = list(self.axes)
        alive = list(range(count))
        steps = []
        for positions in path:
            left, right = (alive[position] for position in sorted(positions))
            alive = [value for value in alive if value not in (left, right)]
            needed = set(self.output).union(*(values[value] for value in alive))
            axes = tuple(sorted((set(values[left]) | set(values[right])) & needed))
            steps.append(Step(left, right, axes))
            alive.append(len(values))
            values.append(axes)
        return tuple(steps)

    # --- between tables and merged tensors --------------------------------------------------------------------------

    def enter(self, operand: int, table: Tensor) -> Tensor:
        """``[batch | 1, rows | 1, *table]`` as a tensor with the merged axes of an operand."""
        axes = [axis for axis in self.operand_axes[operand] if axis >= 0]
        if axes != sorted(axes):
            table = table.permute(0, 1, *(2 + axes.index(axis) for axis in sorted(axes)))
        return table.reshape([self.sizes[axis] for axis in self.axes[operand]])

    def leave(self, operand: int, value: Tensor, *, full: bool = False) -> Tensor:
        """Back: ``[batch | 1, rows | 1, *table]``; ``full`` where the value has batch and rows whatever is shared."""
        axes = [axis for axis in self.operand_axes[operand] if axis >= 0]
        has = self.full if full else self.axes[operand]
        lead = [self.sizes[axis] if axis in has else 1 for axis in (BATCH, ROW)]
        value = value.reshape([*lead, *(self.local_sizes[axis] for axis in sorted(axes))])
        if axes != sorted(axes):
            value = value.permute(0, 1, *(2 + sorted(axes).index(axis) for axis in axes))
        return value

    @property
    def output_shape(self) -> tuple[int, ...]:
        """``[batch | 1, rows | 1, *table]`` of the result."""
        lead = [self.sizes[axis] if axis in self.output else 1 for axis in (BATCH, ROW)]
        return (*lead, *self.local_sizes[1:])

    # --- arithmetic -------------------------------------------------------------------------------------------------

    def forward(self, operands: Sequence[Tensor]) -> Tensor:
        """The result, ``[batch | 1, rows | 1, *table]``, contiguous."""
        values = self._intermediates(operands, keep=False)
        value = self._step(self.steps[-1], values)
        values.clear()
        return value.reshape(self.output_shape).contiguous()

    def pull_back(
        self, operands: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool], *, full: bool
    ) -> list[Tensor | None]:
        """The gradients of the operands from that of the result.

        Goes back through the pairwise steps, whose results it computes again rather than having kept them. Everything
        is a plain operation on tensors, so it can be differentiated itself.

        Args:
            operands: the tables.
            gradient: of the result; with batch and row axes whatever is shared if ``full``.
            wanted: which operands' gradients.
            full: keep the batch and row axes of every gradient, instead of summing over what is shared. This is how
                marginals of each factor and batch member come from one shared table.
        """
        lead = self.full if full else ()
        values = self._intermediates(operands, keep=True)
        count = len(operands)
        wants = [*wanted]
        for step in self.steps:
            wants.append(wants[step.left] or (step.right is not None and wants[step.right]))
        axes: list[Axes] = [*self.axes, *(step.axes for step in self.steps)]
        gradients: dict[int, tuple[Axes, Tensor]] = {}
        top = _distinct(sorted({*lead, *self.output}))
        gradients[len(wants) - 1] = (top, gradient.reshape([self.sizes[axis] for axis in top]))
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            if not wants[count + number]:
                continue
            known, value = gradients.pop(count + number)
            gradient = value
            for target, other in ((step.left, step.right), (step.right, step.left)):
                if target is None or not wants[target]:
                    continue
                result = tuple(sorted({*lead, *axes[target]}))
                partner = None if other is None else (axes[other], values[other])
                gradients[target] = (result, self._einsum((known, value), partner, result))
            for used in (step.left, step.right):
                if used is not None and used >= count:
                    values[used] = None
        return [
            self.leave(number, gradients[number][1], full=full) if wanted[number] else None for number in range(count)
        ]

    # --- sizes ------------------------------------------------------------------------------------------------------

    def entries(self, axes: Iterable[int]) -> int:
        """Entries of a tensor with these (merged) axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def result_entries(self) -> int:
        """Entries of the result."""
        return self.entries(self.output)

    def gradient_entries(self, operand: int, *, full: bool) -> int:
        """Entries of an operand's gradient."""
        return self.entries({*(self.full if full else ()), *self.axes[operand]})

    def forward_entries(self) -> int:
        """The most that `forward` holds at once, its result included."""
        alive, peak = 0, 0
        for step in self.steps:
            size = self.entries(step.axes)
            peak = max(peak, alive + size)
            alive += size - self._intermediate_entries(step)
        return peak

    def backward_entries(self, *, full: bool) -> int:
        """The most that `pull_back` holds at once, the given gradient and those it returns included."""
        lead = self.full if full else ()
        axes = [*self.axes, *(step.axes for step in self.steps)]
        alive = sum(self.entries(step.axes) for step in self.steps[:-1])
        alive += self.entries({*lead, *self.output})
        peak = alive
        for step in reversed(self.steps):
            for value in (step.left, step.right):
                if value is not None:
                    alive += self.entries({*lead, *axes[value]})
            given = self.entries({*lead, *step.axes})
            # the matrix product copies what does not lie in memory the way it wants it
            peak = max(peak, alive + given)
            alive -= given + self._intermediate_entries(step)
        return peak

    def _intermediate_entries(self, step: Step) -> int:
        used = [value - len(self.axes) for value in (step.left, step.right) if value is not None]
        return sum(self.entries(self.steps[value].axes) for value in used if value >= 0)

    # --- the steps --------------------------------------------------------------------------------------------------

    def _intermediates(self, operands: Sequence[Tensor], keep: bool) -> list[Tensor | None]:
        """The operands and the results of all steps but the last."""
        values: list[Tensor | None] = [self.enter(number, table) for number, table in enumerate(operands)]
        for step in self.steps[:-1]:
            values.append(self._step(step, values))
            if not keep:
                values[step.left] = None
                if step.right is not None:
                    values[step.right] = None
        return values

    def _step(self, step: Step, values: Sequence[Tensor | None]) -> Tensor:
        axes: list[Axes] = [*self.axes, *(step.axes for step in self.steps)]
        left = values[step.left]
        assert left is not None
        right = None if step.right is None else (axes[step.right], values[step.right])
        return self._einsum((axes[step.left], left), right, step.axes)

    def _einsum(self, left: tuple[Axes, Tensor], right: tuple[Axes, Tensor | None] | None, axes: Axes) -> Tensor:
        pairs = [left] if right is None else [left, right]
        known = set().union(*(pair[0] for pair in pairs))
        kept = tuple(axis for axis in axes if axis in known)
        words = ["".join(self.letters[axis] for axis in names) for names in (*(pair[0] for pair in pairs), kept)]
        result: Tensor = torch.einsum(",".join(words[:-1]) + "->" + words[-1], *(pair[1] for pair in pairs))
        if kept != axes:
            shape = [self.sizes[axis] for axis in axes]
            index = tuple(slice(None) if axis in known else None for axis in axes)
            result = result[index].expand(shape)
        return result


@lru_cache(maxsize=4096)
def contraction(operands: tuple[Axes, ...], sizes: tuple[int, ...], batch: int, rows: int) -> Contraction:
    """A `Contraction`, found once for each kind."""
    return Contraction(operands, sizes, batch, rows)


def _merge(terms: Sequence[Axes], local_axes: int) -> list[Axes]:
    """Runs of neighbouring local axes that stand in the same terms."""
    membership = [tuple(axis in term for term in terms) for axis in range(local_axes)]
    groups: list[Axes] = []
    for axis in range(local_axes):
        if not any(membership[axis]):
            continue
        if groups and groups[-1][-1] == axis - 1 and membership[axis] == membership[axis - 1]:
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    return groups


def _distinct(axes: object) -> Axes:
    return tuple(dict.fromkeys(axes))  # type: ignore[call-overload]
