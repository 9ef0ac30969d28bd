"""`Trainer`: one loop for every objective.

The loop asks the objective for updates (see `bethenet.learning.objective`), carries each out with the optimiser of its
part, and reports, evaluates, averages, saves and stops as the options say (`bethenet.learning.run`). What it decides at
a step depends on the step's number and on what a checkpoint holds; therefore a run that was interrupted continues, on
the same machine, to the same numbers. Device results are read only when a report is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bethenet.learning.batches import Data, Minibatches
from bethenet.learning.evaluators import Evaluator
from bethenet.learning.objective import Objective
from bethenet.learning.options import TrainerOptions
from bethenet.learning.result import TrainingResult
from bethenet.learning.run import Callback, Run


class Trainer:
    """Trains the parts of an objective.

    Args:
        objective: what to train; its modules are changed in place.
        options: see `TrainerOptions`.
        evaluators: functions that return further figures for the records of evaluated epochs.
        callbacks: told every record as it is made; what they raise ends the run.
    """

    def __init__(
        self,
        objective: Objective,
        options: TrainerOptions | None = None,
        *,
        evaluators: Sequence[Evaluator] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.objective = objective
        self.options = options or TrainerOptions()
        self.evaluators = tuple(evaluators)
        self.callbacks = tuple(callbacks)

    def fit(self, data: Data, validation: Data | None = None, *, resume: bool = False) -> TrainingResult:
        """Train.

        Args:
            data: training data; see `bethenet.learning.batches.Data`.
            validation: held-out data on which the objective is evaluated.
            resume: continue from the newest checkpoint in the options' directory, if there is one.

        Raises:
            ValueError: the directory holds another run's checkpoints and ``resume`` is false; or the options differ
                from those of the checkpoint in a way that changes its numbers.
        """
        options = self.options
        parameter = next(self.objective.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        train = Minibatches(data, options.batch_size, shuffle=options.shuffle, seed=options.seed, device=device)
        held_out = None
        if validation is not None:
            held_out = Minibatches(validation, options.evaluation_batch_size, device=device)
        # dropout draws from torch's global generator: it is seeded inside, and left to the caller as it was
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(options.seed)
            run = Run(self.objective, options, train, held_out, self.evaluators, self.callbacks)
            if options.directory is not None:
                run.open(resume)
            return run.complete()
