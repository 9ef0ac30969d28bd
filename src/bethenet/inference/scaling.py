"""Scaling a table to given marginals: ``log b = log psi + sum_a u_a``, solved for the duals ``u_a``. No gradients here.

This is the belief of least free energy among those with the marginals ``q_a`` on each axis ``a`` of a factor. Two
binary variables have it in closed form. Everything else, of any arity and any state counts, climbs the concave dual
``sum_a <q_a, u_a> - log sum exp(log psi + sum_a u_a)``: by sweeps of iterative proportional fitting (Sinkhorn's
iterations when there are two axes), then by Newton steps, because sweeps alone take time exponential in the strength
of the coupling.

Shapes: a table is ``[batch | 1, factors | 1, *states]``, marginals and duals are one ``[batch, factors, states]`` an
axis.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.numerics import log_sum_exp, safe_log

Duals = tuple[Tensor, ...]
"""One ``[batch, factors, states]`` for each axis of a factor."""

AXES = string.ascii_letters.replace("b", "").replace("f", "")
"""What a table's axes are called in an ``einsum``, where ``b`` and ``f`` are the batch and the factors."""


@dataclass(frozen=True)
class Scaling:
    """How hard to try where there is no closed form."""

    sweeps: int = 2
    """Iterations of proportional fitting. They exploit shared tables: one matrix product with the one table each."""
    newton_steps: int = 60
    """At most this many Newton steps after that, each followed by one sweep. Unlike sweeps, they need memory for a
    table a factor and a batch member. With 0 the marginals are met only as well as the sweeps meet them."""
    tolerance: float | None = 1e-12
    """Stop the Newton steps when every marginal is met to this (in probability; never less than rounding allows).
    ``None``: take all steps, never waiting for the device."""

    def __post_init__(self) -> None:
        if self.sweeps < 1 or self.newton_steps < 0:
            raise ValueError(
                f"expected at least 1 sweep and 0 Newton steps, got {self.sweeps} sweeps, {self.newton_steps} steps"
            )
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"tolerance: expected None or a number of at least 0, got {self.tolerance}")


@torch.no_grad()
def solve_duals(
    log_table: Float[Tensor, ...],
    log_marginals: Sequence[Tensor],
    scaling: Scaling,
    start: Sequence[Tensor] | None = None,
) -> Duals:
    """The duals that scale ``log_table`` to the marginals; from ``start`` where there is no closed form."""
    if tuple(log_table.shape[2:]) == (2, 2):
        return _binary_duals(log_table, binary_log_beliefs(log_table, *log_marginals))
    duals = tuple(start) if start is not None else tuple(torch.zeros_like(q) for q in log_marginals)
    kernel = exponential_kernel(log_table, log_marginals[0].shape[:2])
    for _ in range(scaling.sweeps):
        duals = _sweep(log_table, duals, log_marginals, kernel)
    for _ in range(scaling.newton_steps):
        duals, gap = _newton_step(log_table, duals, log_marginals)
        duals = _sweep(log_table, duals, log_marginals, None)
        if scaling.tolerance is not None and bool(gap <= max(scaling.tolerance, 16 * torch.finfo(gap.dtype).eps)):
            break
    return duals


# --- two binary variables -------------------------------------------------------------------------------------------


@torch.no_grad()
def binary_log_beliefs(
    log_table: Float[Tensor, "b f 2 2"],
    log_q: Float[Tensor, "batch factors 2"],
    log_p: Float[Tensor, "batch factors 2"],
) -> Float[Tensor, "batch factors 2 2"]:
    """The closed form of Welling & Teh (2001), "Belief optimization for binary networks", equation for xi.

    With ``w`` the log odds ratio of the table and ``a = exp(w) - 1``, ``b(1, 1) = xi`` is a root of ``a xi^2 - R xi +
    (1 + a) q p``, ``R = 1 + a (q + p)``. Relabelling states makes ``w <= 0`` and ``q + p <= 1``: then every term of the
    root is positive, and nothing cancels, overflows, or loses its last digits, whatever the coupling.
    """
    odds = log_table[..., 0, 0] + log_table[..., 1, 1] - log_table[..., 0, 1] - log_table[..., 1, 0]
    # -inf - -inf: a row or column is impossible, and the marginals alone determine the belief
    odds = odds.nan_to_num(0.0, math.inf, -math.inf)
    attractive = (odds > 0).unsqueeze(-1)
    log_p = torch.where(attractive, log_p.flip(-1), log_p)
    odds = -odds.abs()

    gap = _one_minus_sum(log_q.exp(), log_p.exp())
    heavy = (gap < 0).unsqueeze(-1)
    log_q, log_p, gap = torch.where(heavy, log_q.flip(-1), log_q), torch.where(heavy, log_p.flip(-1), log_p), gap.abs()

    log_q1, log_p1 = log_q[..., 1], log_p[..., 1]
    q1, p1 = log_q1.exp(), log_p1.exp()
    linear = gap + odds.exp() * (q1 + p1)
    root = torch.hypot(linear, 2 * (-odds.expm1()).sqrt() * (0.5 * (odds + log_q1 + log_p1)).exp())
    tiny = torch.finfo(gap.dtype).tiny
    log_both = math.log(2) + odds + log_q1 + log_p1 - (linear + root).clamp_min(tiny).log()
    both = log_both.exp()
    log_neither = torch.logaddexp(safe_log(gap), log_both)
    log_large = safe_log(torch.maximum(q1, p1) - both)
    small = torch.minimum(q1, p1)
    # where subtraction would cancel, the odds ratio gives the fourth cell from the other three
    log_small = torch.where(both <= 0.5 * small, safe_log(small - both), log_both + log_neither - odds - log_large)
    larger_is_q = q1 >= p1
    only_q, only_p = torch.where(larger_is_q, log_large, log_small), torch.where(larger_is_q, log_small, log_large)

    cells = torch.stack([torch.stack([log_neither, only_p], -1), torch.stack([only_q, log_both], -1)], -2)
    cells = torch.where(heavy.unsqueeze(-1), cells.flip(-1, -2), cells)
    return torch.where(attractive.unsqueeze(-1), cells.flip(-1), cells)


def _one_minus_sum(q: Tensor, p: Tensor) -> Tensor:
    """``1 - q_1 - p_1``, from whichever of ``q_0 - p_1`` and ``p_0 - q_1`` subtracts the smaller numbers."""
    first = q[..., 0] + p[..., 1] <= 1
    return torch.where(first, q[..., 0] - p[..., 1], p[..., 0] - q[..., 1])


def _binary_duals(log_table: Tensor, log_beliefs: Tensor) -> Duals:
    """Read ``u`` and ``v`` off ``log b - log psi = u + v``, relative to the most probable cell (x, y).

    The other row's dual stands in column y and the other column's in row x; where that cell is impossible, it follows
    from the cell opposite to (x, y); where both are, only their sum is determined, and each gets half.
    """
    excess = (log_beliefs - log_table).flatten(-2)
    excess = torch.where((log_table == -math.inf).flatten(-2), math.nan, excess)
    best = log_beliefs.flatten(-2).argmax(-1, keepdim=True)
    base, row, column, opposite = (excess.gather(-1, best ^ bits).squeeze(-1) for bits in (0, 2, 1, 3))
    base = base.nan_to_num(0.0)
    row, column, opposite = row - base, column - base, opposite - base
    half = (0.5 * opposite).nan_to_num(0.0)
    row_missing, column_missing = row.isnan(), column.isnan()
    row_filled = torch.where(column_missing, half, (opposite - column).nan_to_num(-math.inf, 0.0))
    column_filled = torch.where(row_missing, half, (opposite - row).nan_to_num(-math.inf, 0.0))
    row, column = torch.where(row_missing, row_filled, row), torch.where(column_missing, column_filled, column)
    first_row, first_column = best.squeeze(-1) < 2, best.squeeze(-1) % 2 == 0
    u = torch.stack([torch.where(first_row, base, base + row), torch.where(first_row, base + row, base)], -1)
    zero = torch.zeros_like(column)
    v = torch.stack([torch.where(first_column, zero, column), torch.where(first_column, column, zero)], -1)
    return u, v


# --- any table ------------------------------------------------------------------------------------------------------


def exponential_kernel(log_table: Tensor, full: torch.Size) -> Tensor | None:
    """``exp(log_table - max)`` of a table that is shared, if sums over it cannot underflow; otherwise ``None``.

    A weighted sum over a row is at least ``exp(min - max)`` of the largest weight, so the entries' range says it all.
    """
    if log_table.shape[:2] == full or log_table.numel() == 0:
        return None
    lowest, highest = log_table.detach().aminmax()
    if not bool(highest - lowest < -0.7 * math.log(torch.finfo(log_table.dtype).tiny)):
        return None
    return (log_table - highest).exp()


def add_duals(log_table: Tensor, duals: Sequence[Tensor]) -> Tensor:
    """``log_table + sum_a u_a``, ``[batch, factors, *states]``."""
    result = log_table
    for axis, dual in enumerate(duals):
        shape = [1] * len(duals)
        shape[axis] = dual.shape[-1]
        result = result + dual.reshape(*dual.shape[:2], *shape)
    return result


def log_axis_sums(log_table: Tensor, duals: Sequence[Tensor], axis: int, kernel: Tensor | None) -> Tensor:
    """``log sum exp(log_table + sum_{c != axis} u_c)`` over all axes but ``axis``: ``[batch, factors, states]``."""
    others = [other for other in range(len(duals)) if other != axis]
    if kernel is None:
        kept = [torch.zeros_like(dual) if number == axis else dual for number, dual in enumerate(duals)]
        return log_sum_exp(add_duals(log_table, kept), [2 + other for other in others])
    letters = AXES[: len(duals)]
    offsets = [duals[other].detach().amax(-1, keepdim=True) for other in others]
    weights = [(duals[other] - offset).exp() for other, offset in zip(others, offsets, strict=True)]
    inputs = ",".join([f"bf{letters}", *(f"bf{letters[other]}" for other in others)])
    sums = torch.einsum(f"{inputs}->bf{letters[axis]}", kernel, *weights)
    return sums.log() + log_table.detach().amax() + sum(offsets)


def _sweep(log_table: Tensor, duals: Duals, log_marginals: Sequence[Tensor], kernel: Tensor | None) -> Duals:
    """Scale each axis in turn to its marginal."""
    result = list(duals)
    for axis, log_marginal in enumerate(log_marginals):
        sums = log_axis_sums(log_table, result, axis, kernel)
        result[axis] = log_marginal - torch.where(torch.isfinite(sums), sums, torch.zeros_like(sums))
    return tuple(result)


def _newton_step(log_table: Tensor, duals: Duals, log_marginals: Sequence[Tensor]) -> tuple[Duals, Tensor]:
    """One damped Newton step on the dual, taken by the factors whose dual it does not lower; and the largest gap
    between a marginal and its target before it.
    """
    log_beliefs = add_duals(log_table, duals)
    beliefs = torch.softmax(log_beliefs.flatten(2), -1).reshape(log_beliefs.shape)
    current = [axis_marginals(beliefs, axis) for axis in range(len(duals))]
    gaps = [target.exp() - marginal for target, marginal in zip(log_marginals, current, strict=True)]
    direction = solve_dual_hessian(beliefs, current, gaps)
    # the dual is self-concordant in the largest change of a log-belief: this step length cannot overshoot
    change = torch.stack([part.abs().amax(-1, keepdim=True) for part in direction]).sum(0)
    length = torch.where(change > 1e-6, change.log1p() / change, torch.ones_like(change))
    proposal = [dual + length * part for dual, part in zip(duals, direction, strict=True)]
    better = dual_value(log_table, proposal, log_marginals, None) >= dual_value(log_table, duals, log_marginals, None)
    better = better.unsqueeze(-1)
    taken = tuple(torch.where(better, new, old) for new, old in zip(proposal, duals, strict=True))
    worst = torch.stack([gap.abs().amax() for gap in gaps]).amax() if beliefs.numel() else beliefs.new_zeros(())
    return taken, worst


def dual_value(
    log_table: Tensor, duals: Sequence[Tensor], log_marginals: Sequence[Tensor], kernel: Tensor | None
) -> Float[Tensor, "batch factors"]:
    """``sum_a <q_a, u_a> - log sum exp(log psi + sum_a u_a)``: at the solution, the belief's free energy (nats).

    Differentiable in the table and the marginals with the duals held constant, which by the envelope theorem gives the
    free energy's own gradients: minus the belief, and the duals.
    """
    sums = log_axis_sums(log_table, duals, 0, kernel)
    result = -log_sum_exp(sums + duals[0], -1)
    for dual, log_marginal in zip(duals, log_marginals, strict=True):
        result = result + (log_marginal.exp() * torch.where(torch.isfinite(dual), dual, torch.zeros_like(dual))).sum(-1)
    return result


@torch.no_grad()
def unmet(log_table: Tensor, duals: Sequence[Tensor], log_marginals: Sequence[Tensor]) -> Float[Tensor, " batch"]:
    """By how much (in probability) the duals miss a marginal at most, beyond what rounding alone can cause."""
    worst = log_marginals[0].new_zeros(len(log_marginals[0]))
    if tuple(log_table.shape[2:]) == (2, 2):  # a closed form
        return worst
    kernel = exponential_kernel(log_table, log_marginals[0].shape[:2])
    for axis, (dual, log_marginal) in enumerate(zip(duals[:-1], log_marginals, strict=False)):
        # a sweep ends with the last axis, which is met
        found = torch.softmax(log_axis_sums(log_table, duals, axis, kernel) + dual, -1)
        gap = (found - log_marginal.exp()).abs().flatten(1)
        worst = torch.maximum(worst, gap.amax(1)) if gap.shape[1] else worst
    return (worst - 64 * torch.finfo(worst.dtype).eps).clamp_min(0)


def solve_dual_hessian(beliefs: Tensor, marginals: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """Solve ``H x = right`` for the dual's (negative) Hessian: the matrix of all pairwise marginals of the beliefs,
    with the single marginals as its diagonal blocks, ``[batch, factors, all states, all states]``.

    It is scaled by the square roots of its diagonal. Its null space, constants added to one axis' duals and taken from
    another's, is filled by a projection that leaves the rest alone.
    """
    sizes = [marginal.shape[-1] for marginal in marginals]
    joined = torch.cat(list(marginals), -1)
    root = torch.where(joined > 0, joined, torch.ones_like(joined)).rsqrt() * (joined > 0)
    blocks = [
        torch.cat([_pair_marginals(beliefs, row, column, marginals) for column in range(len(sizes))], -1)
        for row in range(len(sizes))
    ]
    constants = torch.block_diag(*[joined.new_ones(size, size) for size in sizes]) - 1 / len(sizes)
    scale = root.unsqueeze(-1) * root.unsqueeze(-2)
    weight = joined.sqrt()
    matrix = scale * torch.cat(blocks, -2) + constants * weight.unsqueeze(-1) * weight.unsqueeze(-2)
    ridge = 16 * torch.finfo(joined.dtype).eps
    matrix = matrix + torch.diag_embed(torch.full_like(joined, ridge) + (joined == 0))
    factor, _ = torch.linalg.cholesky_ex(matrix)
    solution = torch.cholesky_solve((root * torch.cat(list(right), -1)).unsqueeze(-1), factor).squeeze(-1)
    return list((root * solution).split(sizes, -1))


def axis_marginals(beliefs: Tensor, axis: int) -> Tensor:
    """Sum a quantity ``[batch, factors, *states]`` over all axes but one."""
    others = [2 + other for other in range(beliefs.dim() - 2) if other != axis]
    return beliefs.sum(others) if others else beliefs


def _pair_marginals(beliefs: Tensor, row: int, column: int, marginals: Sequence[Tensor]) -> Tensor:
    if row == column:
        return torch.diag_embed(marginals[row])
    others = [2 + other for other in range(beliefs.dim() - 2) if other not in (row, column)]
    pair = beliefs.sum(others) if others else beliefs
    return pair if row < column else pair.transpose(-1, -2)
