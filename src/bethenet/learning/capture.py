"""Training steps as CUDA graphs: a step on a minibatch of a shape seen before is replayed without its Python.

Small models leave a GPU waiting for Python, which launches thousands of short kernels a step. A graph of those kernels
is launched at once. What a step decides on the host is decided when it is recorded, for good; so an objective may be
captured only if its updates depend on the host through nothing but the minibatch's shape, and keep what they carry
from step to step in buffers that are changed in place.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bethenet.learning.objective import Batch, Objective

Figures = list[tuple[Mapping[str, Tensor], float]]
"""What a step has to report, with weights."""

SEEN_BEFORE = 3
"""Steps of a shape that are taken one kernel at a time before one is recorded: in these, libraries set themselves up
and objectives make their buffers."""


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch
    """Where the graph reads."""
    figures: Figures
    """Where it writes."""


class CapturedSteps:
    """Takes training steps, by replay where that is possible.

    Args:
        objective: what is learnt.
        generator: what steps draw from besides the device's own generator.
    """

    def __init__(self, objective: Objective, generator: torch.Generator) -> None:
        self.objective = objective
        self.generator = generator
        self.seen: Counter[Hashable] = Counter()
        self.recorded: dict[Hashable, _Recorded] = {}
        self.stream = torch.cuda.Stream(generator.device)
        # graphs are replayed one after the other, so they can work in the same memory
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, step: Callable[[Batch], Figures]) -> Figures:
        """One step, as ``step`` takes it. The figures are overwritten by the next one."""
        inputs = _tensors(batch)
        key = (batch.size, batch.population, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if key not in self.recorded:
            self.seen[key] += 1
            if self.seen[key] <= SEEN_BEFORE:
                return step(batch)
            self.recorded[key] = self._record(batch, step)
        recorded = self.recorded[key]
        for own, given in zip(_tensors(recorded.batch), inputs, strict=True):
            own.copy_(given, non_blocking=True)
        recorded.graph.replay()
        return recorded.figures

    def _record(self, batch: Batch, step: Callable[[Batch], Figures]) -> _Recorded:
        """The graph of a step on minibatches like this one; nothing is carried out."""
        device = self.generator.device
        indices = None if batch.indices is None else batch.indices.to(device, copy=True)
        own = Batch(_copied(batch.data), batch.size, indices, batch.population)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        places = self._places()
        name = type(self.objective).__name__
        torch.cuda.synchronize(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        try:
            # a graph that nobody holds any more may not be destroyed meanwhile
            with torch.cuda.stream(self.stream), _no_collection():
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    figures = step(own)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise ValueError(
                f"capture: {name} cannot be captured, since a step of it waits for the device or copies to it; train "
                f"it without. PyTorch says: {error}"
            ) from error
        torch.cuda.current_stream(device).wait_stream(self.stream)
        if moved := sorted(name for name, place in self._places().items() if places.get(name) != place):
            raise ValueError(f"capture: {name} cannot be captured, since a step replaces its buffers {moved}")
        return _Recorded(graph, own, figures)

    def _places(self) -> dict[str, int]:
        return {name: buffer.data_ptr() for name, buffer in self.objective.named_buffers()}


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tensors(batch: Batch) -> list[Tensor]:
    data = [batch.data] if isinstance(batch.data, Tensor) else [*batch.data]
    return data if batch.indices is None else [*data, batch.indices]


def _copied(data: Any) -> Any:
    return data.clone() if isinstance(data, Tensor) else tuple(part.clone() for part in data)
