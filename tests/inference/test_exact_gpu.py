"""Exact inference on a GPU gives what it gives on the CPU, and takes what it says."""

from __future__ import annotations

import pytest
import torch

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.exact import Exact, memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def model(dtype: torch.dtype) -> LogPotentials:
    generator = torch.Generator().manual_seed(0)
    graph = FactorGraph.grid(9, 9)
    return LogPotentials.random(graph, batch_size=4, dtype=dtype, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_gives_the_same(dtype: torch.dtype) -> None:
    for here in (model(dtype), model(dtype).clamp({0: [0, 1, 1, 0], 4: [1, -1, -1, 0]})):
        there = here.to("cuda")
        one, other = Exact().run(here), Exact().run(there)
        torch.testing.assert_close(other.log_z.cpu(), one.log_z)
        for ours, theirs in zip(other.beliefs.log_tables, one.beliefs.log_tables, strict=True):
            torch.testing.assert_close(ours.exp().cpu(), theirs.exp(), rtol=1e-4, atol=1e-5)
        assert torch.equal(Exact().map(there)[0].cpu(), Exact().map(here)[0])
        for generator in (torch.Generator().manual_seed(1), torch.Generator("cuda").manual_seed(1), None):
            assert Exact().sample(there, 3, generator).device.type == "cuda"


def test_gradients_on_a_gpu() -> None:
    here = model(torch.float64).map(lambda table: table.clone().requires_grad_())
    there = here.to("cuda").map(lambda table: table.detach().requires_grad_())
    Exact().log_z(here).sum().backward()
    Exact().log_z(there).sum().backward()
    for ours, theirs in zip(there.tables, here.tables, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize(
    "graph", [FactorGraph.grid(14, 14), FactorGraph.chain(30, 30, order=3), FactorGraph.chain(100_000)]
)
def test_the_prediction_holds_on_a_gpu(graph: FactorGraph) -> None:
    potentials = LogPotentials.random(graph, 0.5, dtype=torch.float64).to("cuda")
    Exact().run(potentials)
    predicted = Exact().predicted_bytes(potentials)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Exact().run(potentials)
    measured = torch.cuda.max_memory_allocated() - before
    assert measured / 1.5 <= predicted <= 1.5 * measured
    assert 2**20 < memory.free_bytes(potentials.device) <= torch.cuda.get_device_properties(0).total_memory
