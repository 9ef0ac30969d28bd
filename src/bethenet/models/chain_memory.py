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


def check_memory(
    unary: Tensor,
    tables: ChainTables,
    dtype: torch.dtype,
    *,
    log_domain: bool = False,
    keep: bool | None = None,
    limit: int | None = None,
) -> None:
    """Raise `MemoryLimitError` where a pass over ``unary`` [batch, steps, states] would not fit."""
    if keep is None:
        tracked = unary.requires_grad or any(tensor.requires_grad for tensor in tables.tensors)
        keep = torch.is_grad_enabled() and tracked
    batch, steps, _ = unary.shape
    needed = bytes_needed(batch, steps, tables, dtype, keep=keep, log_domain=log_domain)
    allowed = device_limit(unary.device) if limit is None else limit
    if needed > allowed:
        none = bytes_needed(0, steps, tables, dtype, keep=keep, log_domain=log_domain)
        chains = (allowed - none) * batch // (needed - none)
        advice = f"take at most {chains} chains at a time" if chains > 0 else _INSTEAD
        raise MemoryLimitError(
            f"exact inference in {batch} chains of {steps} steps, {tables.states} states and order {tables.order} "
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
