"""The best sequence of states of a chain of order M, and exact samples of sequences.

Both go through the chain once from left to right and then back, following for each sentence the tuple of the last M
states, as one flat number (oldest state slowest).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.errors import ImpossibleEvidenceError
from bethenet.models.chain_dp import Domain, messages
from bethenet.models.chain_memory import check_memory
from bethenet.models.chain_tables import ChainTables

OldestState = Callable[[int, Tensor], Tensor]

_CHUNK = 2**26
"""Entries of the largest temporary table of `best_path`."""


def best_path(
    unary: Float[Tensor, "batch steps states"],
    tables: ChainTables,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    memory_limit: int | None = None,
) -> tuple[Int[Tensor, "batch steps"], Float[Tensor, " batch"]]:
    """The most probable sequence of states of each chain and its log-potential (nats), by the Viterbi algorithm for
    order M. States at and after ``lengths`` are 0.
    """
    with torch.no_grad():
        check_memory(unary, tables, unary.dtype, keep=True, limit=memory_limit)
        batch, steps, states = unary.shape
        value = unary.new_zeros(batch, 1)
        ends: list[tuple[Tensor, Tensor]] = []
        choices: list[Tensor] = []
        for step in range(steps):
            if step < tables.order:
                value = value.unsqueeze(2) + tables.starts[step]
            else:
                value, choice = _best_oldest(value.reshape(batch, states, -1), tables)
                choices.append(choice)
            value = (value + unary[:, step].unsqueeze(1)).flatten(1)
            end = value.max(1)
            ends.append((end.values, end.indices))
        scores, windows = (torch.stack(parts, 1) for parts in zip(*ends, strict=True))
        lasts = _lasts(lengths, batch, steps, unary.device)

        def oldest(step: int, window: Tensor) -> Tensor:
            return choices[step - tables.order].gather(1, window.unsqueeze(1)).squeeze(1).long()

        paths = _follow_back(windows, lasts, tables, oldest)
        return paths, scores.gather(1, lasts.unsqueeze(1)).squeeze(1)


def sample_paths(
    unary: Float[Tensor, "batch steps states"],
    tables: ChainTables,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    samples: int = 1,
    domain: Domain = "auto",
    memory_limit: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "samples batch steps"]:
    """Independent exact samples of the sequence of states of each chain. States at and after ``lengths`` are 0."""
    with torch.no_grad():
        batch, steps, states = unary.shape
        weights = messages(unary, tables, domain, memory_limit)
        lasts = _lasts(lengths, batch, steps, unary.device)
        far = tables.far - tables.far.amax()
        rows = torch.arange(batch, device=unary.device).repeat(samples)
        if bool((torch.stack([weight.sum(1) for weight in weights], 1).gather(1, lasts.unsqueeze(1)) == 0).any()):
            raise ImpossibleEvidenceError("a chain has probability zero: there is nothing to sample from")
        ends = [
            _draw_window(weight, rows, states, generator) if lengths is not None or step == steps - 1 else rows
            for step, weight in enumerate(weights)
        ]

        def oldest(step: int, window: Tensor) -> Tensor:
            history, current = window // states, window % states
            before = weights[step - 1].reshape(batch, states, -1)[rows, :, history]
            # entries at one history and one state; the factors that do not touch the oldest state cancel
            link = far[:, current] if tables.factored else far[:, history, current]
            share = (before.log() + link.T.to(before.dtype)).softmax(1)
            # a chain that ends before this step has no window yet: whatever is drawn for it is thrown away
            return _draw(share.nan_to_num(1.0), generator)

        return _follow_back(torch.stack(ends, 1), lasts[rows], tables, oldest).reshape(samples, batch, steps)


def _best_oldest(value: Tensor, tables: ChainTables) -> tuple[Tensor, Tensor]:
    """Maximum and its place over the oldest state of ``value`` [batch, states, history] plus the step's tables: both
    ``[batch, history, states]`` and ``[batch, history * states]``, a slice of the new state at a time.
    """
    batch, states, histories = value.shape
    width = max(1, _CHUNK // max(1, value.numel()))
    best, choice = [], []
    for first in range(0, states, width):
        link = tables.far[..., first : first + width]
        found = (value.unsqueeze(3) + (link.unsqueeze(1) if tables.factored else link)).max(1)
        best.append(found.values)
        choice.append(found.indices.to(torch.int16))
    result = torch.cat(best, 2)
    if tables.factored:
        result = result + tables.starts[-1]
    return result, torch.cat(choice, 2).reshape(batch, histories * states)


def _follow_back(windows: Tensor, lasts: Tensor, tables: ChainTables, oldest: OldestState) -> Tensor:
    """States ``[members, steps]`` of sequences that end at step ``lasts`` in ``windows[:, lasts]``; ``oldest(step,
    window)`` says which state leaves the window between ``step - 1`` and ``step``.
    """
    states, order = tables.states, tables.order
    steps = windows.shape[1]
    path = torch.zeros_like(windows)
    window = torch.zeros_like(lasts)
    for step in reversed(range(steps)):
        window = torch.where(lasts == step, windows[:, step], window)
        inside = lasts >= step
        path[:, step] = torch.where(inside, window % states, torch.zeros_like(window))
        previous = window // states
        if step >= order:
            previous = previous + oldest(step, window) * states ** (order - 1)
        window = torch.where(inside, previous, torch.zeros_like(window))
    return path


def _draw_window(weights: Tensor, rows: Tensor, states: int, generator: torch.Generator | None) -> Tensor:
    """A tuple of states for each of ``rows`` from ``weights`` [batch, states ** n], one state after the other."""
    # an impossible prefix (of a longer, possible chain there is none) is never used: any tuple will do
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, torch.ones_like(weights))
    table = weights.reshape(weights.shape[0], states, -1)
    drawn = _draw(table.sum(2)[rows], generator)
    window = drawn
    rest = table[rows, drawn]
    while rest.shape[1] > 1:
        rest = rest.reshape(rest.shape[0], states, -1)
        drawn = _draw(rest.sum(2), generator)
        window = window * states + drawn
        rest = rest[torch.arange(rest.shape[0], device=rest.device), drawn]
    return window


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(weights, 1, generator=generator).squeeze(1)


def _lasts(lengths: Tensor | None, batch: int, steps: int, device: torch.device) -> Tensor:
    return torch.full((batch,), steps - 1, device=device) if lengths is None else lengths.to(device) - 1
