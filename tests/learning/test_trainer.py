import itertools
import json

import pytest
import torch
from torch import nn

from bethenet import FactorGraph
from bethenet.data.ising import ising_data
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.learning import (
    Averaging,
    Batch,
    ByEngine,
    HeldOutLikelihood,
    Likelihood,
    Objective,
    OptimizerOptions,
    Schedule,
    Trainer,
    TrainerOptions,
    TrainingStatus,
    Update,
)
from bethenet.learning.checkpoint import load_weights
from bethenet.models import IsingModel, TableModel

DATA = torch.randint(2, (10, 3), generator=torch.Generator().manual_seed(0))


class Mean(Objective):
    """Learns the mean of the data; records what the trainer does."""

    def __init__(self, size=3):
        super().__init__()
        self.model = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.batches = []
        self.value = None

    def updates(self, batch, generator=None):
        self.batches.append(batch)
        loss = (self.model.weight - batch.data.float()).square().sum(1).mean()
        yield Update(("model",), loss, self.value, lambda: {"spread": batch.data.float().std()})

    def evaluate(self, batch, generator=None):
        assert not self.training
        assert not torch.is_grad_enabled()
        return {"objective": (self.model.weight - batch.data.float()).square().sum(1).mean()}


def fit(objective, data=DATA, validation=None, evaluators=(), callbacks=(), resume=False, **options):
    trainer = Trainer(objective, TrainerOptions(**options), evaluators=evaluators, callbacks=callbacks)
    return trainer.fit(data, validation, resume=resume)


# --- minibatches and limits -------------------------------------------------------------------------------------------


def test_an_epoch_sees_every_sample_once_and_the_last_minibatch_is_short():
    objective = Mean()
    result = fit(objective, epochs=2, batch_size=4)
    assert [batch.size for batch in objective.batches] == [4, 4, 2] * 2
    for first in (0, 3):
        seen = torch.cat([batch.indices for batch in objective.batches[first : first + 3]])
        assert sorted(seen.tolist()) == list(range(10))
    assert objective.batches[0].indices.tolist() != objective.batches[3].indices.tolist()
    assert result.status is TrainingStatus.COMPLETED
    assert (result.epochs, result.steps) == (2, 6)


def test_means_over_an_epoch_weigh_by_samples():
    values = iter([1.0, 1.0, 5.0])

    class Reported(Mean):
        def updates(self, batch, generator=None):
            self.value = torch.tensor(next(values))
            yield from super().updates(batch, generator)

    result = fit(Reported(), epochs=1, batch_size=4)
    assert result.history[0]["objective"] == pytest.approx((4 * 1 + 4 * 1 + 2 * 5) / 10)


@pytest.mark.parametrize(("limits", "steps"), [({"steps": 5}, 5), ({"epochs": 1}, 3), ({"epochs": 4, "steps": 3}, 3)])
def test_limits(limits, steps):
    result = fit(Mean(), batch_size=4, **{"epochs": None, **limits})
    assert result.steps == steps
    assert result.status is TrainingStatus.COMPLETED


def test_a_time_limit_ends_the_run_and_schedules_follow_the_clock():
    class Downhill(Mean):
        def updates(self, batch, generator=None):
            yield Update(("model",), self.model.weight.sum())
            places.append(float(self.model.weight.detach().sum()))

    places = [0.0]
    cosine = OptimizerOptions("sgd", 1.0, Schedule("cosine"))
    result = fit(Downhill(), epochs=None, time_limit=0.3, optimizers={"model": cosine})
    moves = [before - after for before, after in itertools.pairwise(places)]
    assert result.status is TrainingStatus.TIME_LIMIT
    assert 0.3 <= result.seconds < 5
    assert moves[0] == pytest.approx(3)
    assert moves[-1] < 1.5


def test_nothing_to_do():
    objective = Mean()
    assert fit(objective, epochs=0).steps == 0
    assert objective.batches == []


def test_iterables_are_gone_through_each_epoch():
    class Sentences:
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, number):
            self.epochs.append(number)

        def __iter__(self):
            yield DATA[:4]
            yield Batch(DATA[4:9], 5)
            yield (DATA[9:], torch.ones(1))

    class Tupled(Mean):
        def updates(self, batch, generator=None):
            data = batch.data[0] if isinstance(batch.data, tuple) else batch.data
            yield from super().updates(Batch(data, batch.size))

    objective, sentences = Tupled(), Sentences()
    result = fit(objective, sentences, epochs=2)
    assert [batch.size for batch in objective.batches] == [4, 5, 1] * 2
    assert sentences.epochs == [0, 1]
    assert result.steps == 6
    with pytest.raises(ValueError, match="no minibatches"):
        fit(Mean(), iter(()), epochs=1)
    cosine = OptimizerOptions(schedule=Schedule("cosine"))
    with pytest.raises(ValueError, match=r"schedules of \['model'\] need an end"):
        fit(Tupled(), sentences, epochs=1, optimizers={"model": cosine})
    fit(Tupled(), sentences, epochs=1, steps=10, optimizers={"model": cosine})


def test_seeds_decide_the_order_and_nothing_global_does():
    first, second, other = Mean(), Mean(), Mean()
    fit(first, epochs=1, batch_size=2, seed=1)
    torch.manual_seed(8)
    fit(second, epochs=1, batch_size=2, seed=1)
    fit(other, epochs=1, batch_size=2, seed=2)
    orders = [torch.cat([b.indices for b in objective.batches]).tolist() for objective in (first, second, other)]
    assert orders[0] == orders[1] != orders[2]


def test_the_global_generator_is_left_as_it_was():
    class Noisy(Mean):
        def updates(self, batch, generator=None):
            torch.rand(3)
            yield from super().updates(batch, generator)

    objective = Noisy()
    before = torch.get_rng_state()
    fit(objective, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


# --- optimisation -----------------------------------------------------------------------------------------------------


def test_one_step_is_torchs():
    objective = Mean()
    reference = nn.Parameter(torch.zeros(1, 3))
    optimizer = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.3)
    fit(
        objective,
        steps=4,
        batch_size=None,
        optimizers={"model": OptimizerOptions("adamw", learning_rate=0.1, weight_decay=0.3, clip_norm=0.5)},
    )
    for _ in range(4):
        optimizer.zero_grad()
        (reference - DATA.float()).square().sum(1).mean().backward()
        nn.utils.clip_grad_norm_([reference], 0.5)
        optimizer.step()
    torch.testing.assert_close(objective.model.weight, reference)


def test_parts_have_their_own_optimisers_and_frozen_parameters_stay():
    class Two(Objective):
        def __init__(self):
            super().__init__()
            self.model, self.network = nn.Linear(1, 1), nn.Linear(1, 1)
            self.model.bias.requires_grad_(False)

        def parts(self):
            return {"model": self.model, "network": self.network}

        def updates(self, batch, generator=None):
            joint = self.model.weight.sum() + self.network.weight.sum() + self.network.bias.sum()
            yield Update(("network",), joint)
            yield Update(("model", "network"), joint)

        def evaluate(self, batch, generator=None):
            return {}

    objective = Two()
    start = {name: p.detach().clone() for name, p in objective.named_parameters()}
    rates = {"model": OptimizerOptions("sgd", 0.5), "network": OptimizerOptions("sgd", 0.25)}
    result = fit(objective, steps=1, optimizers=rates)
    moved = {name: float((start[name] - p).detach().sum()) for name, p in objective.named_parameters()}
    assert moved["model.weight"] == pytest.approx(0.5)
    assert moved["network.weight"] == pytest.approx(0.5)
    assert moved["network.bias"] == pytest.approx(0.5)
    assert moved["model.bias"] == 0
    assert set(result.history[0]) >= {"objective", "network_loss"}


def test_shared_parameters_and_unknown_parts_are_refused():
    class Shared(Mean):
        def parts(self):
            return {"model": self.model, "network": nn.ModuleList([self.model])}

    with pytest.raises(ValueError, match="are one parameter"):
        fit(Shared())
    with pytest.raises(ValueError, match=r"no parts \['netwrok'\]"):
        fit(Mean(), optimizers={"netwrok": OptimizerOptions()})


# --- evaluation, selection, averaging ---------------------------------------------------------------------------------


def test_the_best_weights_are_kept_and_patience_ends_the_run():
    figures = iter([3.0, 1.0, 2.0, 2.0, 0.0])
    weights = []

    def evaluator():
        weights.append(objective.model.weight.detach().clone())
        return {"figure": next(figures)}

    objective = Mean()
    result = fit(objective, epochs=10, metric="figure", patience=2, evaluators=[evaluator])
    assert result.status is TrainingStatus.STOPPED_EARLY
    assert result.epochs == 4
    assert result.best["epoch"] == 2
    assert torch.equal(objective.model.weight, weights[1])
    assert not torch.equal(weights[1], weights[-1])


def test_a_metric_may_be_maximized_and_must_exist():
    figures = iter([1.0, 3.0, float("nan"), 2.0])
    result = fit(Mean(), epochs=4, metric="figure", maximize=True, evaluators=[lambda: {"figure": next(figures)}])
    assert result.best["figure"] == 3.0
    with pytest.raises(ValueError, match="'nll' is not among the figures"):
        fit(Mean(), epochs=1, metric="nll")
    with pytest.raises(ValueError, match="patience needs a metric"):
        fit(Mean(), patience=2)


def test_validation_is_averaged_over_all_samples_and_chooses():
    objective = Mean()
    result = fit(objective, validation=DATA[:5], epochs=3, evaluation_batch_size=2)
    with torch.no_grad():
        expected = (objective.model.weight - DATA[:5].float()).square().sum(1).mean()
    assert result.best["validation_objective"] == pytest.approx(float(expected))


def test_evaluate_every_and_always_at_the_end():
    calls = []
    fit(Mean(), epochs=5, evaluate_every=2, evaluators=[lambda: calls.append(0) or {}])
    assert len(calls) == 3


@pytest.mark.parametrize(
    "averaging", [Averaging("tail", start=2), Averaging(decay=0.5), Averaging("exponential", decay=0.9, start=3)]
)
def test_averages_are_used_for_evaluation_and_at_the_end(averaging):
    raw, evaluated = [], []

    class Watched(Mean):
        def updates(self, batch, generator=None):
            yield from super().updates(batch, generator)
            raw.append(self.model.weight.detach().clone())

    objective = Watched()
    evaluators = [lambda: evaluated.append(objective.model.weight.detach().clone()) or {}]
    fit(objective, epochs=6, batch_size=None, averaging=averaging, evaluators=evaluators)
    average = raw[0]
    for step, weight in enumerate(raw):
        taken = step - averaging.start
        if taken <= 0:
            average = weight
        elif averaging.kind == "tail":
            average = torch.stack(raw[averaging.start : step + 1]).mean(0)
        else:
            decay = min(averaging.decay, (1 + taken) / (10 + taken))
            average = decay * average + (1 - decay) * weight
        torch.testing.assert_close(evaluated[step], average)
    torch.testing.assert_close(objective.model.weight.detach(), average)
    assert not torch.equal(raw[-1], objective.model.weight)


# --- stability --------------------------------------------------------------------------------------------------------


class Exploding(Mean):
    def __init__(self, after, how):
        super().__init__()
        self.after, self.how = after, how

    def updates(self, batch, generator=None):
        for update in super().updates(batch, generator):
            if len(self.batches) <= self.after:
                yield update
            else:
                yield Update(update.parts, update.loss * self.how)


@pytest.mark.parametrize(("how", "bound"), [(float("nan"), None), (float("inf"), None), (-1e6, -1e3)])
def test_divergence_stops_the_run_with_the_last_good_weights(how, bound, tmp_path):
    objective = Exploding(6, how)
    weights = []
    callbacks = [lambda record: weights.append(objective.model.weight.detach().clone())]
    result = fit(
        objective,
        epochs=10,
        batch_size=4,
        divergence_below=bound,
        directory=tmp_path,
        callbacks=callbacks,
        log_every=50,
    )
    assert result.status is TrainingStatus.DIVERGED
    assert result.epochs == 3
    assert torch.isfinite(objective.model.weight).all()
    assert torch.equal(objective.model.weight, weights[2])  # told at the start, and after each of two good epochs
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    again = Mean()
    resumed = fit(again, epochs=2, batch_size=4, directory=tmp_path, resume=True)
    assert resumed.steps == 6
    assert torch.equal(again.model.weight, objective.model.weight)


def test_divergence_is_seen_at_reports():
    result = fit(Exploding(3, float("nan")), epochs=1, batch_size=1, log_every=2)
    assert result.status is TrainingStatus.DIVERGED
    assert result.steps == 4


# --- records ----------------------------------------------------------------------------------------------------------


def test_records_go_to_callbacks_and_to_the_file(tmp_path):
    records = []
    fit(Mean(), epochs=2, batch_size=4, log_every=2, directory=tmp_path, callbacks=[records.append])
    assert [record["kind"] for record in records] == ["start", "step", "epoch", "step", "step", "epoch", "end"]
    assert records[0]["total_steps"] == 6
    assert records[1]["step"] == 2
    assert records[1]["spread"] > 0
    assert records[-1]["status"] == "completed"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [record for record in records if record["kind"] in ("step", "epoch")]


def test_what_json_cannot_say_is_null(tmp_path):
    fit(Exploding(0, float("nan")), epochs=1, directory=tmp_path)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["objective"] is None


# --- checkpoints and resuming -----------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def kill_after(steps):
    def callback(record):
        if record["kind"] in ("step", "epoch") and record["step"] >= steps:
            raise Killed

    return callback


class Dropout(Mean):
    """Noise from both generators."""

    def updates(self, batch, generator=None):
        self.batches.append(batch)
        kept = nn.functional.dropout(self.model.weight - batch.data.float(), 0.3)
        noise = torch.rand((), generator=generator)
        yield Update(("model",), (kept.square().sum(1) * noise).mean())


def exact_objective():
    return Likelihood(IsingModel.grid(2, 3), Exact())


def persistent_objective():
    graph = FactorGraph.grid(2, 3)
    model = TableModel(graph, observed=[0, 1, 2], generator=torch.Generator().manual_seed(0), scale=0.5)
    sides = [ByEngine(BeliefPropagation(), persistent=True, iterations=2) for _ in range(2)]
    return Likelihood(model, *sides)


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        pytest.param(exact_objective, 6, id="exact"),
        pytest.param(persistent_objective, 3, id="persistent"),
        pytest.param(Dropout, 3, id="noise"),
    ],
)
@pytest.mark.parametrize("kill", [18, 25], ids=["at an epoch's end", "within an epoch"])
def test_a_killed_run_continues_to_the_same_numbers(make, columns, kill, tmp_path):
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(2, (10, columns), generator=generator)
    validation = torch.randint(2, (7, columns), generator=generator)
    options = {
        "epochs": 10,
        "batch_size": 3,
        "averaging": Averaging("tail", start=8),
        "optimizers": {"model": OptimizerOptions(learning_rate=0.05, schedule=Schedule("cosine", warmup=3))},
        "log_every": 3,
        "checkpoint_steps": 5,
        "checkpoint_every": 2,
    }
    whole = make()
    expected = fit(whole, data, validation, directory=tmp_path / "whole", **options)
    killed = make()
    with pytest.raises(Killed):
        fit(killed, data, validation, directory=tmp_path / "killed", callbacks=[kill_after(kill)], **options)
    resumed = make()
    result = fit(resumed, data, validation, directory=tmp_path / "killed", resume=True, **options)

    def without_time(records):
        return [{name: value for name, value in record.items() if name != "seconds"} for record in records]

    assert without_time(result.history) == without_time(expected.history)
    assert result.best["epoch"] == expected.best["epoch"]
    assert result.steps == expected.steps == 40
    state, other = whole.state_dict(), resumed.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    lines = {
        name: without_time(map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()))
        for name in ("whole", "killed")
    }
    assert lines["whole"] == lines["killed"]


def test_more_epochs_can_be_asked_for_later(tmp_path):
    whole, parts = exact_objective(), exact_objective()
    data = torch.randint(2, (10, 6), generator=torch.Generator().manual_seed(3))
    fit(whole, data, epochs=6, averaging=Averaging(), batch_size=4)
    fit(parts, data, epochs=2, averaging=Averaging(), batch_size=4, directory=tmp_path)
    fit(parts, data, epochs=6, averaging=Averaging(), batch_size=4, directory=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_a_directory_is_not_overwritten_and_settings_must_agree(tmp_path):
    fit(Mean(), epochs=1, directory=tmp_path)
    with pytest.raises(ValueError, match="holds a run already"):
        fit(Mean(), epochs=1, directory=tmp_path)
    with pytest.raises(ValueError, match="was made with"):
        fit(Mean(), epochs=1, directory=tmp_path, resume=True, seed=5)
    fresh = tmp_path / "fresh"
    assert fit(Mean(), epochs=1, directory=fresh, resume=True).steps == 1


def test_the_last_checkpoints_and_the_best_weights_stay(tmp_path):
    objective = Mean()
    fit(objective, validation=DATA, epochs=6, batch_size=5, directory=tmp_path, keep_checkpoints=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.safetensors", "metrics.jsonl", "step-000000010.safetensors", "step-000000012.safetensors"]
    other = Mean()
    load_weights(tmp_path / "best.safetensors", other)
    assert torch.equal(other.model.weight, objective.model.weight)
    model = nn.Linear(3, 1, bias=False)
    load_weights(tmp_path / "best.safetensors", model, prefix="model.")
    assert torch.equal(model.weight, objective.model.weight)
    with pytest.raises(ValueError, match=r"no weights for \['weight'\]"):
        load_weights(tmp_path / "best.safetensors", model)


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "side",
    [Exact(), BeliefPropagation(max_iterations=50), ByEngine(BeliefPropagation(), persistent=True)],
    ids=["exact", "bp", "persistent bp"],
)
def test_a_small_ising_model_is_recovered(side):
    data = ising_data(3, 3, samples=1000, seed=0)
    model = IsingModel.grid(3, 3)
    held_out = HeldOutLikelihood(model, data.test, Exact(), name="nll")
    truth = HeldOutLikelihood(data.model, data.test, Exact())()["nll"]
    optimizer = OptimizerOptions(learning_rate=0.1, schedule=Schedule("cosine"))
    result = fit(
        Likelihood(model, side),
        data.train,
        data.validation,
        evaluators=[held_out],
        epochs=10,
        batch_size=100,
        evaluate_every=10,
        optimizers={"model": optimizer},
    )
    assert result.history[-1]["nll"] < 1.05 * truth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": None}, "at least one of epochs, steps and time_limit"),
        ({"epochs": -1}, "epochs: expected at least 0"),
        ({"log_every": 0}, "log_every: expected a positive number"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fit(Mean(), **options)
