"""Learning: objectives (what to descend on) and one trainer for all of them.

>>> from bethenet.data.ising import ising_data
>>> from bethenet.inference.exact import Exact
>>> from bethenet.models.ising import IsingModel
>>> data = ising_data(3, 3, samples=200, seed=0)
>>> trainer = Trainer(Likelihood(IsingModel.grid(3, 3), Exact()), TrainerOptions(epochs=2))
>>> trainer.fit(data.train, data.validation).status
<TrainingStatus.COMPLETED: 'completed'>
"""

from bethenet.learning.amortized import BeliefPredictor, ByNetwork
from bethenet.learning.contrastive import ContrastiveDivergence, PersistentContrastiveDivergence
from bethenet.learning.direct import DirectLikelihood, PseudoLikelihood
from bethenet.learning.evaluators import HeldOutLikelihood, negative_log_likelihood
from bethenet.learning.likelihood import Likelihood
from bethenet.learning.objective import Batch, Objective, Update
from bethenet.learning.optimization import Averaging, OptimizerOptions, Schedule
from bethenet.learning.options import TrainerOptions
from bethenet.learning.partition import ByEngine, LogPartition
from bethenet.learning.refinement import EngineRefinement
from bethenet.learning.result import TrainingResult, TrainingStatus
from bethenet.learning.trainer import Trainer

__all__ = [
    "Averaging",
    "Batch",
    "BeliefPredictor",
    "ByEngine",
    "ByNetwork",
    "ContrastiveDivergence",
    "DirectLikelihood",
    "EngineRefinement",
    "HeldOutLikelihood",
    "Likelihood",
    "LogPartition",
    "Objective",
    "OptimizerOptions",
    "PersistentContrastiveDivergence",
    "PseudoLikelihood",
    "Schedule",
    "Trainer",
    "TrainerOptions",
    "TrainingResult",
    "TrainingStatus",
    "Update",
    "negative_log_likelihood",
]
