"""Mean field and descent on a GPU end where they end on the CPU."""

from __future__ import annotations

import pytest
import torch

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.colouring import colour_classes
from bethenet.inference.coupling import bethe_free_energy
from bethenet.inference.descent import Descent
from bethenet.inference.mean_field import MeanField

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def model() -> LogPotentials:
    graph = FactorGraph([2, 3, 2, 2, 3], [(0,), (1,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 3), (3, 4), ()])
    return LogPotentials.random(graph, batch_size=3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "engine",
    [
        MeanField(),
        MeanField(restarts=3),
        Descent(),
        Descent(restarts=3, first=None),
        Descent(inverse_temperatures=(0.5,)),
    ],
)
@pytest.mark.parametrize("clamped", [False, True])
def test_a_gpu_gives_the_same(engine: MeanField | Descent, clamped: bool) -> None:
    here = model().clamp({4: [0, 1, -1]}) if clamped else model()
    there = here.to("cuda")
    one, other = engine.run(here), engine.run(there)
    assert other.log_z.is_cuda
    torch.testing.assert_close(other.log_z.cpu(), one.log_z, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(other.beliefs.node_marginals.cpu(), one.beliefs.node_marginals, rtol=0, atol=1e-4)
    assert engine.run(there, state=other.state, generator=torch.Generator("cuda").manual_seed(0)).log_z.is_cuda


def test_the_free_energy_and_its_gradients_are_the_same() -> None:
    here = model()
    logits = [torch.zeros(3, len(group.variables), group.states).double() for group in here.graph.variable_groups]
    there = [part.cuda().requires_grad_() for part in logits]
    logits = [part.requires_grad_() for part in logits]
    one, other = bethe_free_energy(here, logits), bethe_free_energy(here.to("cuda"), there)
    torch.testing.assert_close(other.cpu(), one)
    ours, theirs = torch.autograd.grad(one.sum(), logits), torch.autograd.grad(other.sum(), there)
    torch.testing.assert_close([part.cpu() for part in theirs], list(ours))


def test_colour_classes_are_on_the_graphs_device() -> None:
    graph = FactorGraph.grid(4, 4).to("cuda")
    assert all(members.is_cuda for members in colour_classes(graph))
