import warnings

import pytest
import torch

from bethenet import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.learning import (
    Averaging,
    ByEngine,
    ByNetwork,
    EngineRefinement,
    HeldOutLikelihood,
    Likelihood,
    Objective,
    OptimizerOptions,
    PseudoLikelihood,
    Trainer,
    TrainerOptions,
    Update,
)
from bethenet.learning.batches import Minibatches
from bethenet.learning.run import Run
from bethenet.models import IsingModel, TableModel
from bethenet.networks import ConsistentHead, InferenceNetwork, RegionNetwork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def ising():
    return IsingModel.random(FactorGraph.grid(3, 3), generator=torch.Generator().manual_seed(0), coupling_scale=0.3)


def persistent():
    return Likelihood(ising(), ByEngine(BeliefPropagation(), persistent=True))


def latent():
    graph = FactorGraph.grid(3, 3)
    model = TableModel(graph, observed=range(5), generator=torch.Generator().manual_seed(0))
    return Likelihood(model, *(ByEngine(BeliefPropagation(), persistent=True, iterations=3) for _ in range(2)))


def network():
    torch.manual_seed(0)
    network = InferenceNetwork(RegionNetwork(8, 2), ConsistentHead())
    refine = EngineRefinement(BeliefPropagation(), 2)
    return Likelihood(ising(), ByNetwork(network, refine=refine, learn_from="refined"))


def pseudo():
    return PseudoLikelihood(ising())


OBJECTIVES = [persistent, latent, network, pseudo]


def data(make, count=50):
    return torch.randint(2, (count, 5 if make is latent else 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", OBJECTIVES)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_training_is_that_of_the_cpu_and_is_resumed(make, where, tmp_path):
    options = {"batch_size": 16, "averaging": Averaging(), "optimizers": {"model": OptimizerOptions(clip_norm=1.0)}}
    on_cpu, on_gpu, resumed = make(), make().cuda(), make().cuda()
    Trainer(on_cpu, TrainerOptions(epochs=4, **options)).fit(data(make), data(make, 10))
    Trainer(on_gpu, TrainerOptions(epochs=4, **options)).fit(data(make).to(where), data(make, 10))
    Trainer(resumed, TrainerOptions(epochs=2, directory=tmp_path, **options)).fit(data(make).to(where), data(make, 10))
    resumed = make().cuda()
    again = Trainer(resumed, TrainerOptions(epochs=4, directory=tmp_path, **options))
    assert again.fit(data(make).to(where), data(make, 10), resume=True).epochs == 4
    for cpu, gpu, other in zip(on_cpu.parameters(), on_gpu.parameters(), resumed.parameters(), strict=True):
        assert gpu.is_cuda
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other, gpu, rtol=1e-4, atol=1e-5)


def test_evaluators_follow_the_model():
    model = ising().cuda()
    figures = HeldOutLikelihood(model, data(pseudo), Exact())()
    assert figures["nll"] == pytest.approx(HeldOutLikelihood(model.cpu(), data(pseudo), Exact())()["nll"], rel=1e-4)


class Quadratic(Objective):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(9, 1, bias=False)

    def updates(self, batch, generator=None):
        noise = torch.rand((), generator=generator, device=self.model.weight.device)
        yield Update(("model",), noise * (self.model.weight - batch.data.float()).square().mean())

    def evaluate(self, batch, generator=None):
        return {}


def waits(objective, samples):
    """How often one training step waits for the device, after a first one."""
    options = TrainerOptions(averaging=Averaging(), optimizers={"model": OptimizerOptions(clip_norm=1.0)})
    train = Minibatches(samples, 16, shuffle=True, device="cuda")
    run = Run(objective, options, train, None, (), ())
    batches = train.epoch()
    run._train(next(batches))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run._train(next(batches))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{found.filename}:{found.lineno}" for found in caught if "synchroniz" in str(found.message)]
    return [place for place in places if "torch/cuda/__init__" not in place]  # where the debug mode speaks of itself


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_loop_never_waits_for_the_device(where):
    assert waits(Quadratic().cuda(), data(pseudo).to(where)) == []


@pytest.mark.parametrize("make", OBJECTIVES)
def test_waits_of_objectives(make):
    """Engines look for impossible states in each new model, and evidence is checked; what is learnt never waits."""
    found = waits(make().cuda(), data(make).cuda())
    assert [place for place in found if "/learning/" in place or "/models/" in place] == []
