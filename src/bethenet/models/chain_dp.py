"""Exact log Z of homogeneous chains of order M, for every length at once, by matrix products.

The message of step t holds, for each tuple of the last M states, the total weight of all that came before. Where the
factors are pairwise, summing z_{t-M} out of it is one ``(K^{M-1}, K) x (K, K)`` matrix product a sentence; where there
is one full table, ``K^{M-1}`` products ``(K, K) x (K, batch)``. Both cost ``K^{M+1}`` multiplications a step.

Messages are kept in the exponential domain, rescaled at each step. Whether that can lose anything is decided
beforehand from the range of the tables (`choose_domain`): float32, then float64, then `logsumexp`. The backward pass
is written by hand and gives the marginals: d log Z / d unary are the states' probabilities, d log Z / d tables the
expected counts.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.models.chain_kernels import Kernel, kernel_for
from bethenet.models.chain_memory import chains_that_fit, check_memory, tracks
from bethenet.models.chain_tables import ChainTables
from bethenet.numerics import log_sum_exp

Domain = Literal["auto", "scaled", "log"]

_DIGITS = 16.0
"""Nats by which everything that underflows must stay below what is kept (e^-16 is float32's resolution)."""


def prefix_log_z(
    unary: Float[Tensor, "batch steps states"],
    tables: ChainTables,
    *,
    domain: Domain = "auto",
    memory_limit: int | None = None,
) -> Float[Tensor, "batch steps"]:
    """Log Z (nats) of the first 1, 2, ..., T steps of each chain; differentiable.

    Where no gradient is asked for, as many chains are taken at a time as fit.

    Args:
        unary: log-potentials of the single states (zeros for an unclamped chain).
        tables: what joins the states.
        domain: ``"scaled"`` (fastest: never looks at the numbers, so never waits for the device), ``"log"`` (slowest,
            always right), or ``"auto"``: the fastest that loses nothing, see `choose_domain`.
        memory_limit: bytes; by default four fifths of the device's memory.

    Raises:
        MemoryLimitError: the messages (with a gradient: of all chains at once) would not fit; nothing has been
            allocated.
    """
    if unary.dim() != 3 or unary.shape[2] != tables.states or unary.shape[1] == 0:
        raise ValueError(f"unary: expected shape [batch, steps, {tables.states}], got {list(unary.shape)}")
    if domain not in ("auto", "scaled", "log"):
        raise ValueError(f"domain: expected 'auto', 'scaled' or 'log', got {domain!r}")
    dtype = unary.dtype
    if domain == "auto":
        domain, dtype = choose_domain(tables, unary.dtype)
    log_domain = domain == "log"
    if tracks(unary, tables):
        check_memory(unary, tables, dtype, keep=True, log_domain=log_domain, limit=memory_limit)
        return _prefixes(unary, tables, dtype, log_domain)
    chains = chains_that_fit(unary, tables, dtype, keep=False, log_domain=log_domain, limit=memory_limit)
    return torch.cat([_prefixes(part, tables, dtype, log_domain) for part in unary.split(max(1, chains))])


def _prefixes(unary: Tensor, tables: ChainTables, dtype: torch.dtype, log_domain: bool) -> Tensor:
    if log_domain:
        return torch.stack([log_sum_exp(message, 1) for message in _log_messages(unary, tables)], 1)
    result: Tensor = _ScaledChain.apply(unary.to(dtype), *(table.to(dtype) for table in tables.tensors))
    return result.to(unary.dtype)


def log_z(
    unary: Float[Tensor, "batch steps states"],
    tables: ChainTables,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    domain: Domain = "auto",
    memory_limit: int | None = None,
) -> Float[Tensor, " batch"]:
    """Log Z (nats) of each chain, of its first ``lengths`` steps where given; differentiable. See `prefix_log_z`."""
    prefixes = prefix_log_z(unary, tables, domain=domain, memory_limit=memory_limit)
    return prefixes[:, -1] if lengths is None else prefixes.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)


def choose_domain(tables: ChainTables, dtype: torch.dtype) -> tuple[Domain, torch.dtype]:
    """The fastest arithmetic that provably loses nothing for these tables. Looks at the numbers once.

    The weights that two tuples of M states lend to the same future differ by at most e^cut, cut being the sum over the
    next M steps of how far their tables' entries lie apart for the same z_t. The largest entry of a message shrinks by
    at most e^-step in one step. So what underflows can be bounded beforehand, and so can the backward pass's largest
    number; a float type whose range is wide enough for both is safe.
    """
    cut, step = _spreads(tables)
    tuples = 2 * tables.order * math.log(tables.states)
    for candidate in (dtype, torch.float64):
        limits = torch.finfo(candidate)
        room = _headroom(candidate) - math.log(limits.tiny) - _DIGITS
        if cut + step <= room - tuples and cut <= math.log(limits.max) - tuples:
            return "scaled", candidate
    return "log", dtype


def _spreads(tables: ChainTables) -> tuple[float, float]:
    """(cut, step) of `choose_domain`, in nats; infinite or NaN where something is impossible."""
    starts = [(table.amax(0) - table.amin(0)).double() for table in tables.detach().starts]
    far = tables.far.detach().flatten(0, -2)
    whole = (far.amax(0) - far.amin(0)).double()
    if tables.factored:
        # ranges add up over independent lags, so the lags that cross a cut s steps back are the rest
        whole = whole + starts[-1]
        crossing = torch.stack([(whole - start).amax() for start in starts])
    else:
        crossing = torch.stack([whole, *starts]).amax().expand(tables.order)
    cut, step = torch.stack([crossing.sum(), crossing.amax()]).tolist()
    return cut, step


def messages(
    unary: Float[Tensor, "batch steps states"],
    tables: ChainTables,
    domain: Domain = "auto",
    memory_limit: int | None = None,
) -> list[Tensor]:
    """For each step the weight of every tuple of the last min(t, M) states, up to a factor a sentence: ``[batch,
    states ** min(t, M)]``, not differentiable.
    """
    with torch.no_grad():
        dtype = unary.dtype
        if domain == "auto":
            domain, dtype = choose_domain(tables, dtype)
        check_memory(unary, tables, dtype, keep=True, log_domain=domain == "log", limit=memory_limit)
        if domain == "log":
            return [(message - _finite_max(message)).exp() for message in _log_messages(unary, tables)]
        run = _Run(unary.to(dtype), tables.to(dtype), keep=True)
        return [run.kernel.by_sentence(message) for message in run.messages]


def _headroom(dtype: torch.dtype) -> float:
    """The log of what a message's entries sum to: well above 1, so that small entries have room, and far enough below
    the largest number for the backward pass, whose messages are as much below 1.
    """
    return 0.45 * math.log(torch.finfo(dtype).max)


def _finite_max(values: Tensor) -> Tensor:
    maximum = values.amax(1, keepdim=True)
    return torch.where(maximum == -math.inf, torch.zeros_like(maximum), maximum)


def _log_messages(unary: Tensor, tables: ChainTables) -> list[Tensor]:
    """Log-messages ``[batch, states ** min(t, M)]`` of all steps, by `log_sum_exp`: for tables of any range."""
    batch, steps, states = unary.shape
    message = unary.new_zeros(batch, 1)
    result = []
    whole = tables.far
    if tables.factored:
        whole = tables.far.unsqueeze(1) + tables.starts[-1].unsqueeze(0)
    for step in range(steps):
        if step < tables.order:
            message = message.unsqueeze(2) + tables.starts[step]
        else:
            message = log_sum_exp(message.reshape(batch, states, -1, 1) + whole, 1)
        message = (message + unary[:, step].unsqueeze(1)).flatten(1)
        result.append(message)
    return result


class _Run:
    """One pass of the scaled messages from left to right."""

    def __init__(self, unary: Tensor, tables: ChainTables, *, keep: bool) -> None:
        batch, steps, _ = unary.shape
        levelled, levels = tables.levelled()
        step_levels = levels[torch.arange(steps, device=unary.device).clamp(max=tables.order)]
        terms = unary + step_levels
        offsets = terms.amax(2)
        offsets = torch.where(offsets == -math.inf, torch.zeros_like(offsets), offsets)
        self.target = math.exp(_headroom(unary.dtype))
        self.kernel: Kernel = kernel_for(levelled)
        self.emissions = self.kernel.arrange((terms - offsets.unsqueeze(2)).exp())
        self.messages: list[Tensor] = []
        self.totals: list[Tensor] = []
        self.scales: list[Tensor] = []
        message = self.kernel.first(batch)
        scale = message.new_full((batch,), self.target)
        # an impossible chain's messages are 0 and stay so; the totals of others are far larger (see `choose_domain`)
        least = math.sqrt(torch.finfo(unary.dtype).tiny)
        for step in range(steps):
            self.scales.append(scale)
            message = self.kernel.advance(step, message, self.emissions[step], scale)
            total = self.kernel.total(message)
            scale = self.target / total.clamp_min(least)
            self.totals.append(total)
            if keep:
                self.messages.append(message)
        # each step was multiplied by target / (the total before it), the first by the target
        gained = (torch.stack(self.totals, 1) / self.target).double().log() + offsets
        self.log_weights = gained.cumsum(1)
        """Log Z of each prefix."""


class _ScaledChain(torch.autograd.Function):
    """`prefix_log_z` in the exponential domain with its backward pass."""

    @staticmethod
    def forward(ctx: Any, unary: Tensor, far: Tensor, *starts: Tensor) -> Tensor:
        keep = any(ctx.needs_input_grad)
        run = _Run(unary, ChainTables(starts, far), keep=keep)
        ctx.run = run if keep else None
        # a tensor of its own: an output that the context held would keep every message alive in a circle
        return run.log_weights.to(unary.dtype, copy=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        run: _Run = ctx.run
        kernel = run.kernel
        kernel.clear()
        marginals: list[Tensor] = []
        adjoint: Tensor | None = None
        totals = torch.stack(run.totals, 1)
        own = torch.where(totals > 0, gradient / totals, torch.zeros_like(totals)).unbind(1)
        for step in reversed(range(len(run.messages))):
            adjoint = kernel.add(adjoint, own[step], run.messages[step])
            previous = run.messages[step - 1] if step else kernel.first(gradient.shape[0])
            adjoint, marginal = kernel.retreat(
                step, adjoint, run.messages[step], previous, run.emissions[step], run.scales[step]
            )
            marginals.append(marginal)
        return (torch.stack(marginals[::-1], 1), *kernel.gradients())
