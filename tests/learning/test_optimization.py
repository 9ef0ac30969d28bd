import pytest
import torch

from bethenet.learning import Averaging, OptimizerOptions, Schedule
from bethenet.learning.optimization import PartOptimizer, WeightAverage


def test_schedules():
    constant, linear = Schedule(warmup=4), Schedule("linear", final=0.2)
    assert [constant.factor(step, 0.0) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert [linear.factor(step, step / 4) for step in range(6)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = Schedule("cosine", warmup=1)
    assert [cosine.factor(step, step / 4) for step in range(5)] == pytest.approx(
        [0.5, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0], abs=1e-12
    )


def test_the_learning_rate_follows_the_schedule():
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = PartOptimizer([parameter], OptimizerOptions("sgd", 1.0, Schedule("linear")))
    positions = []
    for step in range(4):
        optimizer.schedule(step, step / 4)
        optimizer.step([torch.tensor(-1.0)])
        positions.append(float(parameter.detach()))
    assert positions == pytest.approx([1, 1.75, 2.25, 2.5])
    assert parameter.grad is None


@pytest.mark.parametrize("algorithm", ["adam", "adamw", "sgd", "rmsprop"])
def test_moments_survive_saving(algorithm):
    def run(restart):
        parameter = torch.nn.Parameter(torch.ones(3))
        options = OptimizerOptions(algorithm, 0.1, momentum=0.9)
        optimizer = PartOptimizer([parameter], options)
        for step in range(6):
            if step == restart:
                tensors = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
                optimizer = PartOptimizer([parameter], options)
                optimizer.load(tensors)
            optimizer.schedule(step, 0.0)
            optimizer.step([parameter.detach() * (step + 1)])
        return parameter

    assert torch.equal(run(None), run(3))


def test_a_part_without_parameters():
    optimizer = PartOptimizer([], OptimizerOptions())
    optimizer.schedule(0, 0.0)
    optimizer.step([])
    optimizer.load(optimizer.tensors())


def test_an_average_is_taken_off_again():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    average = WeightAverage([weight], Averaging("tail"))
    for step, value in enumerate([2.0, 4.0, 6.0]):
        weight.data.fill_(value)
        average.update(step)
    with average.applied():
        assert weight.item() == pytest.approx(4.0)
    assert weight.item() == 6.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Schedule("exponential"), "kind: expected"),
        (lambda: Schedule(warmup=-1), "warmup: expected"),
        (lambda: OptimizerOptions("lion"), "algorithm: expected"),
        (lambda: OptimizerOptions(learning_rate=0.0), "learning_rate: expected"),
        (lambda: OptimizerOptions(clip_norm=-1.0), "clip_norm: expected"),
        (lambda: Averaging("ema"), "kind: expected"),
        (lambda: Averaging(decay=1.0), "decay: expected"),
    ],
)
def test_wrong_options_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("algorithm", ["adam", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_the_fused_kernel_does_what_torchs_optimiser_does(algorithm, clip_norm):
    options = OptimizerOptions(algorithm, 0.1, betas=(0.8, 0.9), weight_decay=0.05, clip_norm=clip_norm)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (4,), ())]
    ours = [torch.nn.Parameter(value.clone()) for value in start]
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    optimizer, reference = PartOptimizer(ours, options), options.build(theirs)
    assert optimizer.adam is not None
    for step in range(5):
        # strides that are not those of the parameter, and a parameter that is left out at times
        slope = torch.randn(2, 3, generator=generator, dtype=torch.float64).t()
        level = torch.randn((), generator=generator, dtype=torch.float64).expand(4)
        gradients = [slope, level, None if step == 2 else torch.tensor(1.0, dtype=torch.float64)]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
        reference.step()
        optimizer.schedule(step, 0.0)
        optimizer.step(gradients)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
