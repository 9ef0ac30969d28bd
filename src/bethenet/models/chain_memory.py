"""How many bytes exact inference in a chain takes, and the refusal where there are too few."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bethenet.errors import MemoryLimitError

if TYPE_CHECKING:
    from bethenet.models.chain_tables import ChainTables

_WORKING_MESSAGES = 4
"""Messages alive beside those that are kept: the new one, its adjoint, the adjoint before it, the counts."""


_INSTEAD = "take fewer states or a lower order, or infer with belief propagation (ChainBeliefPropagation)"


def bytes_needed(
    batch: int, steps: int, tables: ChainTables, dtype: torch.dtype, *, keep: bool, log_domain: bool = False
) -> int:
    """Predicted peak of a pass over ``batch`` chains; with ``keep`` (for gradients, samples) every message stays."""
    states, order = tables.states, tables.order
    message = states**order
    table_entries = sum(tensor.numel() for tensor in tables.tensors)
    if log_domain:
        # one window more than a message, three times over: the sum, its exponential, its share in the gradient
        live = 3 * message * states * (steps if keep else 1)
        table_entries += message * states
    else:
        live = message * (_WORKING_MESSAGES + (steps if keep else 0))
        table_entries *= 3
    return torch.finfo(dtype).bits // 8 * (batch * live + table_entries)


def tracks(unary: Tensor, tables: ChainTables) -> bool:
    """Whether a pass over ``unary`` has to keep its messages for a gradient."""
    tracked = unary.requires_grad or any(tensor.requires_grad for tensor in tables.tensors)
    return torch.is_grad_enabled() and tracked


def chains_that_fit(
    unary: Tensor,
    tables: ChainTables,
    dtype: torch.dtype,
    *,
    keep: bool,
    log_domain: bool = False,
    limit: int | None = None,
) -> int:
    """How many of the chains ``unary`` [batch, steps, states] fit at a time; all of them, if they do.

    Raises:
        MemoryLimitError: not even one.
    """
    batch, steps, _ = unary.shape
    none, one = (bytes_needed(count, steps, tables, dtype, keep=keep, log_domain=log_domain) for count in (0, 1))
    allowed = device_limit(unary.device) if limit is None else limit
    chains = min(batch, (allowed - none) // (one - none))
    if chains < min(1, batch):
        raise _too_large(1, unary, tables, one, allowed, _INSTEAD)
    return chains


def check_memory(
    unary: Tensor,
    tables: ChainTables,
    dtype: torch.dtype,
    *,
    keep: bool,
    log_domain: bool = False,
    limit: int | None = None,
) -> None:
    """Raise `MemoryLimitError` where a pass over all chains ``unary`` [batch, steps, states] at once would not fit."""
    batch, steps, _ = unary.shape
    chains = chains_that_fit(unary, tables, dtype, keep=keep, log_domain=log_domain, limit=limit)
    if chains < batch:
        needed = bytes_needed(batch, steps, tables, dtype, keep=keep, log_domain=log_domain)
        allowed = device_limit(unary.device) if limit is None else limit
        raise _too_large(batch, unary, tables, needed, allowed, f"take at most {chains} chains at a time")


def _too_large(
    chains: int, unary: Tensor, tables: ChainTables, needed: int, allowed: int, advice: str
) -> MemoryLimitError:
    count = "a chain" if chains == 1 else f"{chains} chains"
    return MemoryLimitError(
        f"exact inference in {count} of {unary.shape[1]} steps, {tables.states} states and order {tables.order} "
        f"needs {needed:,} bytes, over the limit of {allowed:,}; {advice}",
        bytes_needed=needed,
        bytes_allowed=allowed,
        width=tables.order + 1,
    )


def check_tables(entries: int, like: Tensor, order: int, states: int) -> None:
    """Raise `MemoryLimitError` where a chain's tables of so many entries, of the type of ``like``, would not fit."""
    needed, allowed = entries * like.element_size(), device_limit(like.device)
    if needed > allowed:
        raise MemoryLimitError(
            f"the tables of a chain of {states} states and order {order} need {needed:,} bytes, over the limit of "
            f"{allowed:,}; {_INSTEAD}",
            bytes_needed=needed,
            bytes_allowed=allowed,
            width=order + 1,
        )


def device_limit(device: torch.device) -> int:
    """Four fifths of the device's memory, in bytes."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total * 4 // 5
