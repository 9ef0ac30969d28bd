"""Persistent beliefs: an engine's state kept between parameter updates, so that a few iterations each suffice.

What persistent contrastive divergence is to contrastive divergence, this is to a cold-started engine.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bethenet.graph import FactorGraph
from bethenet.inference.engine import IterativeEngine, State, map_tensors
from bethenet.learning.objective import Batch


class Samples(NamedTuple):
    """Which samples of how many."""

    indices: Int[Tensor, " samples"]
    population: int

    @classmethod
    def of(cls, batch: Batch) -> Samples | None:
        """Those of a batch."""
        if batch.indices is None:
            return None
        if batch.population is None:
            raise ValueError("a batch with indices must also say its population, the number of samples they number")
        return cls(batch.indices, batch.population)


class StateMemory(nn.Module):
    """Engine states by graph and, within a graph, by sample. They are buffers: saved and moved with the module."""

    def recall(self, graph: FactorGraph, cold: State, samples: Samples | None = None) -> State:
        """The states kept for these samples, ``cold`` for those never seen.

        Args:
            graph: the graph that the states are about.
            cold: states to start from otherwise, ``[batch, ...]``.
            samples: what the batch's members are; always the same ones if ``None``.
        """
        key, leaves = graph_key(graph), _leaves(cold)
        seen = self._seen(key)
        rows = samples.population if samples is not None else leaves[0].shape[0] if leaves else 0
        if seen is None or seen.shape[0] != rows:
            return cold
        kept = iter([getattr(self, f"{key}_{number}") for number in range(len(leaves))])
        if samples is None:
            return map_tensors(lambda _: next(kept), cold)
        indices = samples.indices.to(seen.device, non_blocking=True)
        known = seen[indices]
        return map_tensors(lambda fresh: _where(known, next(kept)[indices], fresh), cold)

    def remember(self, graph: FactorGraph, state: State, samples: Samples | None = None) -> None:
        """Keep ``state`` for the next `recall`."""
        key, leaves = graph_key(graph), _leaves(state)
        if not leaves:
            return
        device = leaves[0].device
        if samples is None:
            self._keep(key, torch.ones(leaves[0].shape[0], dtype=torch.bool, device=device), leaves)
            return
        seen = self._seen(key)
        if seen is None or seen.shape[0] != samples.population:
            nobody = torch.zeros(samples.population, dtype=torch.bool, device=device)
            seen = self._keep(key, nobody, [leaf.new_zeros(samples.population, *leaf.shape[1:]) for leaf in leaves])
        indices = samples.indices.to(device, non_blocking=True)
        seen.index_fill_(0, indices, True)  # an assignment of a number would wait for the device
        for number, leaf in enumerate(leaves):
            getattr(self, f"{key}_{number}")[indices] = leaf

    def forget(self) -> None:
        """Start cold again."""
        self._buffers.clear()

    def _seen(self, key: str) -> Bool[Tensor, " rows"] | None:
        return self._buffers.get(f"{key}_seen")

    def _keep(self, key: str, seen: Tensor, leaves: list[Tensor]) -> Tensor:
        """Returns the buffer that ``seen`` is kept in."""
        for name, new in [("seen", seen), *((str(number), leaf) for number, leaf in enumerate(leaves))]:
            old = self._buffers.get(f"{key}_{name}")
            # in place where that can be: a recorded step finds it where it was
            if old is not None and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
                old.copy_(new)
            else:
                self.register_buffer(f"{key}_{name}", new.clone())
        kept: Tensor = getattr(self, f"{key}_seen")
        return kept

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # which buffers there are depends on what has been seen: take those that were saved
        device = next((buffer.device for buffer in self.buffers()), None)
        self.forget()
        for name, tensor in state_dict.items():
            if name.startswith(prefix):
                self.register_buffer(name.removeprefix(prefix), tensor.to(device, copy=True))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def advance(
    engine: IterativeEngine, problem: Any, state: State, iterations: int
) -> tuple[State, Float[Tensor, " batch"]]:
    """Exactly ``iterations`` steps, at least 1, without waiting for the device. A member with a step that is not finite
    stays where it was.
    """
    start, total, residual = state, None, torch.empty(0)
    for _ in range(iterations):
        state, residual = engine.step(problem, state)
        total = residual if total is None else total + residual
    finite = torch.isfinite(residual if total is None else total)
    return map_tensors(lambda new, old: _where(finite, new, old), state, start), residual


def graph_key(graph: FactorGraph) -> str:
    """A name for a graph's structure, the same in every process."""
    return graph.compiled(_fingerprint)


def _fingerprint(graph: FactorGraph) -> str:
    digest = hashlib.sha256(graph.state_counts.cpu().numpy().tobytes())
    for group in graph.factor_groups:
        digest.update(repr(group.table_shape).encode())
        digest.update(group.variables.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _leaves(state: State) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, state)
    return found


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *([1] * (new.dim() - 1))), new, old)
