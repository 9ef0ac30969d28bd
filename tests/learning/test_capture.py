import pytest
import torch

from bethenet.data import SentenceBatches, shipped_text
from bethenet.learning import (
    Batch,
    DirectLikelihood,
    Objective,
    OptimizerOptions,
    PersistentContrastiveDivergence,
    Schedule,
    Trainer,
    TrainerOptions,
    Update,
)
from bethenet.learning.chains import AmortizedChainLikelihood, ChainLikelihood, CouplingPenalty
from bethenet.learning.elbo import EvidenceLowerBound, ImportanceWeightedBound
from bethenet.learning.posteriors import FirstOrderPosterior, InputBaseline, MeanFieldPosterior
from bethenet.models import RBM, ChainBeliefPropagation, ChainKikuchi, DirectedHMM, HMMOptions, UndirectedHMM
from bethenet.networks.marginals import MarginalNetwork
from recording import assert_recordable

TEXT = shipped_text()
WORDS = len(TEXT.vocabulary)
OPTIONS = HMMOptions(5, 3, embedding=6, domain="scaled")

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def exact():
    return DirectLikelihood(UndirectedHMM(WORDS, OPTIONS))


def directed():
    return DirectLikelihood(DirectedHMM(WORDS, OPTIONS))


def persistent():
    return ChainLikelihood(UndirectedHMM(WORDS, OPTIONS), ChainBeliefPropagation("sweeps", 2))


def kikuchi():
    penalty = CouplingPenalty((0.0, 1.0, 1.0), 10.0, 20)
    engine = ChainKikuchi(iterations=2, scaling=2, domain="scaled")
    return ChainLikelihood(UndirectedHMM(WORDS, OPTIONS), engine, unclamped="exact", regularizer=penalty)


def amortized():
    network = MarginalNetwork(WORDS, OPTIONS.states, 40)
    engine = ChainKikuchi(iterations=1, domain="scaled")
    return AmortizedChainLikelihood(UndirectedHMM(WORDS, OPTIONS), network, engine, flooding=2, unclamped="exact")


def mean_field():
    return EvidenceLowerBound(
        DirectedHMM(WORDS, OPTIONS),
        MeanFieldPosterior(WORDS, OPTIONS.states),
        InputBaseline(OPTIONS.states, OPTIONS.order),
    )


def first_order():
    posterior = FirstOrderPosterior(WORDS, OPTIONS.states)
    return EvidenceLowerBound(DirectedHMM(WORDS, OPTIONS), posterior, InputBaseline(OPTIONS.states, OPTIONS.order))


def importance():
    return ImportanceWeightedBound(DirectedHMM(WORDS, OPTIONS), MeanFieldPosterior(WORDS, OPTIONS.states))


SENTENCES = [exact, directed, persistent, kikuchi, amortized, mean_field, first_order, importance]


class Machine(PersistentContrastiveDivergence):
    def __init__(self):
        super().__init__(RBM(20, 6), chains=10)


def data(make):
    if make is Machine:
        return torch.randint(2, (320, 20), generator=torch.Generator().manual_seed(0))
    return SentenceBatches(TEXT.train, 32, shuffle=True)


def trained(make, device, *, fall="cosine", resume=False, **more):
    """(parameters after two epochs, the epochs' records)."""
    torch.manual_seed(0)
    objective = make().to(device)
    rates = OptimizerOptions(learning_rate=3e-3, clip_norm=1.0, schedule=Schedule(fall, 5))
    options = TrainerOptions(
        **{"epochs": 2} | more, optimizers=dict.fromkeys(objective.parts(), rates), log_every=7, batch_size=32
    )
    result = Trainer(objective, options).fit(data(make), resume=resume)
    return list(objective.parameters()), result.history


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("make", [*SENTENCES, Machine])
class TestOnAGpu:
    pytestmark = on_a_gpu

    def test_replayed_steps_learn_what_others_do(self, make):
        plain, records = trained(make, "cuda")
        replayed, others = trained(make, "cuda", capture=True)
        for record, other in zip(records, others, strict=True):
            figures = {name: value for name, value in record.items() if name not in ("kind", "seconds")}
            assert {name: other[name] for name in figures} == pytest.approx(figures, rel=2e-3)
        same(replayed, plain)

    def test_a_run_is_resumed(self, make, tmp_path):
        whole, _ = trained(make, "cuda", fall="constant", capture=True)
        trained(make, "cuda", fall="constant", capture=True, steps=15, directory=tmp_path)
        resumed, _ = trained(make, "cuda", fall="constant", capture=True, directory=tmp_path, resume=True)
        same(resumed, whole)


@pytest.mark.parametrize("make", [*SENTENCES, Machine])
def test_steps_can_be_recorded(make):
    torch.manual_seed(0)
    data_of_one = TEXT.train.words[:24].reshape(4, 6) if make in SENTENCES else data(Machine)[:4].float()
    assert_recordable(make(), Batch(data_of_one, 4))


class Line(Objective):
    """What a test makes of it."""

    def __init__(self, waits=False, replaces=False):
        super().__init__()
        self.model = torch.nn.Linear(9, 1, bias=False)
        self.register_buffer("kept", torch.zeros(9))
        self.waits, self.replaces = waits, replaces

    def updates(self, batch, generator=None):
        loss = (self.model.weight - batch.data.float()).square().mean()
        if self.waits:
            loss = loss * float(loss.detach())
        if self.replaces:
            self.kept = batch.data.float().mean(0)
        yield Update(("model",), loss)

    def evaluate(self, batch, generator=None):
        return {}


def line(device, capture=True, algorithm="adam", **how):
    objective = Line(**how).to(device)
    options = TrainerOptions(
        epochs=2, batch_size=8, capture=capture, optimizers={"model": OptimizerOptions(algorithm, 0.1)}
    )
    rows = torch.randint(2, (80, 9), generator=torch.Generator().manual_seed(0))
    Trainer(objective, options).fit(rows)
    return objective.model.weight.detach().cpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_cannot_be_captured_is_refused():
    with pytest.raises(ValueError, match=r"Line cannot be captured, since a step replaces its buffers \['kept'\]"):
        line("cuda", replaces=True)
    with pytest.raises(ValueError, match="optimised by adam or adamw; \\['model'\\] are not"):
        line("cuda", algorithm="sgd")
    with pytest.raises(ValueError, match="Line cannot be captured, since a step of it waits for the device"):
        line("cuda", waits=True)
    line("cuda")  # the device is as it was


def test_elsewhere_capture_changes_nothing():
    torch.manual_seed(0)
    plain = line("cpu", capture=False, waits=True, replaces=True)
    torch.manual_seed(0)
    assert torch.equal(line("cpu", waits=True, replaces=True), plain)
