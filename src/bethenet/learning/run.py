"""One run of the training loop: its steps, its evaluations, and how it ends. What it saves is in `run_state`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from bethenet.learning import snapshot
from bethenet.learning.batches import Minibatches
from bethenet.learning.capture import CapturedSteps, Figures
from bethenet.learning.checkpoint import CheckpointDirectory, save_checkpoint
from bethenet.learning.evaluators import Evaluator
from bethenet.learning.metrics import MetricsFile, Record, RunningMean
from bethenet.learning.objective import Batch, Objective, Update
from bethenet.learning.optimization import OptimizerOptions, PartOptimizer, WeightAverage
from bethenet.learning.options import TrainerOptions
from bethenet.learning.result import TrainingResult, TrainingStatus
from bethenet.learning.selection import Selection

logger = logging.getLogger(__name__)

Callback = Callable[[Record], None]
"""Told every record: its ``kind`` is "start", "step", "epoch" or "end"."""


class Run:
    """The state of a run, and the loop that moves it on. Made by `bethenet.learning.trainer.Trainer.fit`."""

    def __init__(
        self,
        objective: Objective,
        options: TrainerOptions,
        train: Minibatches,
        held_out: Minibatches | None,
        evaluators: Sequence[Evaluator],
        callbacks: Sequence[Callback],
    ) -> None:
        self.objective, self.options = objective, options
        self.train, self.held_out = train, held_out
        self.evaluators, self.callbacks = evaluators, callbacks
        parts = objective.parts()
        self.weights = _trainable(parts)
        self.optimizers = _optimizers(parts, options)
        self.average = None
        if options.averaging is not None:
            self.average = WeightAverage(list(self.weights.values()), options.averaging)
        metric = options.metric or (None if held_out is None else f"validation_{objective.judged_by}")
        self.selection = Selection(metric, options.maximize, options.patience)
        self.generator = torch.Generator(train.device).manual_seed(options.seed)
        self.captured = self._capture() if options.capture and train.device.type == "cuda" else None
        self.total = _total_steps(options, train)
        self.step, self.epoch, self.position = 0, 0, 0
        """Steps taken; epochs completed; minibatches of the next one that are done."""
        self.seconds = 0.0
        self.recent, self.whole_epoch = RunningMean(), RunningMean()
        self.history: list[Record] = []
        self.last_good = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.metrics: MetricsFile | None = None
        self.checkpoints: CheckpointDirectory | None = None

    def open(self, resume: bool) -> None:
        """Start writing to the options' directory, or continue what it holds."""
        directory = Path(self.options.directory or ".")
        self.checkpoints = CheckpointDirectory(directory, self.options.keep_checkpoints)
        latest = self.checkpoints.latest()
        if latest is None:
            self.metrics = MetricsFile(directory / "metrics.jsonl")
        elif resume:
            self.metrics = MetricsFile(directory / "metrics.jsonl", snapshot.restore(self, latest))
        else:
            raise ValueError(f"{directory} holds a run already: pass resume=True to continue it, or another directory")

    # --- the loop ---------------------------------------------------------------------------------------------------

    def complete(self) -> TrainingResult:
        """Train to the end."""
        self._tell({"kind": "start", "epoch": self.epoch, "step": self.step, "total_steps": self.total})
        status = TrainingStatus.STOPPED_EARLY if self.selection.exhausted else self._limit()
        while status is None:
            status = self._one_epoch()
        self._finish(status)
        record = {"kind": "end", "status": str(status), "epoch": self.epoch, "step": self.step, "seconds": self.seconds}
        self._tell(record)
        logger.info("training ended after %d steps: %s", self.step, status)
        return TrainingResult(
            status, self.epoch, self.step, self.seconds, tuple(self.history), best=self.selection.record
        )

    def _one_epoch(self) -> TrainingStatus | None:
        """Train to the end of the epoch or of the run; then report, evaluate and save. The status if the run ended."""
        options, first = self.options, self.position
        self.objective.train()
        started = time.perf_counter()
        before = self.seconds
        status = None
        for batch in self.train.epoch(self.epoch, first):
            if (status := self._limit()) is not None:
                break
            self._train(batch)
            self.seconds = before + time.perf_counter() - started
            if self.step % options.log_every == 0 and self._report():
                return TrainingStatus.DIVERGED
            if options.checkpoint_steps is not None and self.step % options.checkpoint_steps == 0:
                paused = time.perf_counter()
                self._save()
                started += time.perf_counter() - paused
        if status is None and self.position == 0:
            raise ValueError("the training data yielded no minibatches")
        if status is None:
            self.epoch, self.position = self.epoch + 1, 0
        if self.position == first and status is not None:
            return status
        self.whole_epoch.absorb(self.recent)
        self.recent.reset()
        means = self.whole_epoch.read()
        if self.train.device.type == "cuda":
            torch.cuda.synchronize(self.train.device)  # a run with nothing to report has not waited yet
        self.seconds = before + time.perf_counter() - started
        return self._close_epoch(means, status)

    def _train(self, batch: Batch) -> None:
        """All updates of one minibatch."""
        progress = self._progress()
        for optimizer in self.optimizers.values():
            optimizer.schedule(self.step, progress)
        due = (self.step + 1) % self.options.log_every == 0
        # a recorded step has no diagnostics
        figures = (
            self._updates(batch, diagnose=due) if due or self.captured is None else self.captured(batch, self._updates)
        )
        for values, weight in figures:
            self.recent.add(values, weight)
        if self.average is not None:
            self.average.update(self.step)
        self.step += 1
        self.position += 1

    def _updates(self, batch: Batch, diagnose: bool = False) -> Figures:
        """Carry out the objective's updates; what there is to report, with weights."""
        figures: Figures = []
        for update in self.objective.updates(batch, self.generator):
            shown = update.loss if update.value is None else update.value
            if shown is not None:
                name = "objective" if "model" in update.parts else f"{'_'.join(update.parts)}_loss"
                figures.append(({name: shown.detach()}, batch.size))
            if diagnose and update.diagnostics is not None:
                figures.append((update.diagnostics(), 1))
            self._apply(update)
        return figures

    def _apply(self, update: Update) -> None:
        """One gradient step on the parameters of the parts that the update names, and on no others."""
        optimizers = [self.optimizers[part] for part in update.parts]
        parameters = [parameter for optimizer in optimizers for parameter in optimizer.parameters]
        if not parameters:
            return
        gradients = iter(_gradients(update, parameters))
        for optimizer in optimizers:
            optimizer.step([next(gradients) for _ in optimizer.parameters])

    def _progress(self) -> float:
        """The share of the run that is done."""
        if self.total is not None:
            return self.step / max(1, self.total)
        if self.options.time_limit is not None:
            return self.seconds / self.options.time_limit
        falling = [part for part, optimizer in self.optimizers.items() if optimizer.falls]
        if falling:
            raise ValueError(f"the schedules of {falling} need an end: limit steps or time, or the data's length")
        return 0.0

    def _capture(self) -> CapturedSteps:
        unfit = [part for part, optimizer in self.optimizers.items() if not optimizer.capturable]
        if unfit:
            raise ValueError(f"capture: expected parts optimised by adam or adamw; {unfit} are not")
        return CapturedSteps(self.objective, self.generator)

    def _limit(self) -> TrainingStatus | None:
        options = self.options
        if options.epochs is not None and self.epoch >= options.epochs:
            return TrainingStatus.COMPLETED
        if options.steps is not None and self.step >= options.steps:
            return TrainingStatus.COMPLETED
        if options.time_limit is not None and self.seconds >= options.time_limit:
            return TrainingStatus.TIME_LIMIT
        return None

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(self) -> bool:
        """Record the means since the last report of this epoch; whether they say that the run has diverged."""
        means = self.recent.read()
        self.whole_epoch.absorb(self.recent)
        self.recent.reset()
        record = {"kind": "step", "epoch": self.epoch + 1, "step": self.step, "seconds": self.seconds, **means}
        self._tell(record, keep=True)
        return self._diverged(means)

    def _close_epoch(self, means: Mapping[str, float], status: TrainingStatus | None) -> TrainingStatus | None:
        """Judge, evaluate, record and save after a whole epoch, or after what was done of the last one."""
        options = self.options
        self.whole_epoch.reset()
        number = self.epoch if self.position == 0 else self.epoch + 1
        record: Record = {"kind": "epoch", "epoch": number, "step": self.step, "seconds": self.seconds, **means}
        diverged = self._diverged(means) or not _finite(self.weights)
        status = TrainingStatus.DIVERGED if diverged else status or self._limit()
        if not diverged and (status is not None or number % options.evaluate_every == 0):
            better = self._evaluate(record)
            if better and self.checkpoints is not None:
                path = self.checkpoints.path / "best.safetensors"
                save_checkpoint(path, self.selection.weights, {"record": record})
            if self.selection.exhausted:
                status = status or TrainingStatus.STOPPED_EARLY
        self.history.append(record)
        self._tell(record, keep=True)
        if not diverged:
            torch._foreach_copy_(list(self.last_good.values()), [weight.detach() for weight in self.weights.values()])
            if status is not None or number % options.checkpoint_every == 0:
                self._save()
        return status

    def _evaluate(self, record: Record) -> bool:
        """Add the figures of an evaluation to the record; whether it is the best so far."""
        with self._evaluating():
            if self.held_out is not None:
                means = RunningMean()
                # the same noise each time, and none of the training's
                generator = torch.Generator(self.train.device).manual_seed(self.options.seed)
                for batch in self.held_out.epoch():
                    means.add(self.objective.evaluate(batch, generator), batch.size)
                record.update({f"validation_{name}": value for name, value in means.read().items()})
            for evaluator in self.evaluators:
                record.update(evaluator())
            return self.selection.consider(record, self.weights)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.objective.eval()
        with torch.no_grad(), nullcontext() if self.average is None else self.average.applied():
            yield
        self.objective.train()

    def _diverged(self, means: Mapping[str, float]) -> bool:
        bound = self.options.divergence_below
        losses = {name: value for name, value in means.items() if name == "objective" or name.endswith("_loss")}
        for name, value in losses.items():
            if not math.isfinite(value):
                logger.warning("step %d: %s is %s: the run has diverged", self.step, name, value)
                return True
        if bound is not None and losses.get("objective", bound) < bound:
            logger.warning("step %d: the objective, %g, is below %g", self.step, losses["objective"], bound)
            return True
        return False

    def _tell(self, record: Record, keep: bool = False) -> None:
        if keep and self.metrics is not None:
            self.metrics.append(record)
        for callback in self.callbacks:
            callback(record)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(self.step, snapshot.tensors(self), snapshot.state(self))

    @torch.no_grad()
    def _finish(self, status: TrainingStatus) -> None:
        """Leave the right weights in the modules."""
        chosen: Mapping[str, Tensor] = self.selection.weights
        if not chosen and status is TrainingStatus.DIVERGED:
            chosen = self.last_good
        elif not chosen and self.average is not None:
            chosen = dict(zip(self.weights, self.average.averages, strict=True))
        for name, weight in chosen.items():
            self.weights[name].copy_(weight)
        self.objective.eval()


def _gradients(update: Update, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Those that the update gives, or those of its loss."""
    if update.gradients is not None:
        if len(update.gradients) != len(parameters):
            raise ValueError(
                f"{update.parts} have {len(parameters)} trainable parameters; got {len(update.gradients)} gradients"
            )
        return update.gradients
    if update.loss is None or not update.loss.requires_grad:
        raise ValueError(f"the loss of {update.parts} does not depend on their parameters")
    return torch.autograd.grad(update.loss.sum(), parameters, allow_unused=True)


def _trainable(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The parameters to be learnt, by part and name."""
    owners: dict[Tensor, str] = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters(prefix=part):
            if parameter in owners:
                raise ValueError(f"{owners[parameter]} and {name} are one parameter: a parameter has one optimiser")
            if parameter.requires_grad:
                owners[parameter] = name
    return {name: parameter for parameter, name in owners.items()}


def _optimizers(parts: Mapping[str, nn.Module], options: TrainerOptions) -> dict[str, PartOptimizer]:
    unknown = sorted(set(options.optimizers) - set(parts))
    if unknown:
        raise ValueError(f"optimizers: there are no parts {unknown}; the objective has {sorted(parts)}")
    return {
        part: PartOptimizer(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            options.optimizers.get(part, OptimizerOptions()),
        )
        for part, module in parts.items()
    }


def _total_steps(options: TrainerOptions, train: Minibatches) -> int | None:
    """How many steps the run will have, if that can be told: what schedules are stretched over."""
    count = train.count()
    limits = [] if options.steps is None else [options.steps]
    if options.epochs is not None and count is not None:
        limits.append(options.epochs * count)
    return min(limits, default=None)


@torch.no_grad()
def _finite(weights: Mapping[str, Tensor]) -> bool:
    if not weights:
        return True
    norms = torch._foreach_norm(list(weights.values()), float("inf"))
    # structural zeros are weights of -inf: only NaN and growth beyond all bounds count
    return not bool(torch.stack([norm.isnan() for norm in norms]).any())
