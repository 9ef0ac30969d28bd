"""Learning random Ising grids from samples, log Z exact or approximate: what table 2 of the paper reports.

Every method starts from the same random models and sees the same samples. It learns all models of a cell, each under
several strengths of an L2 penalty, as one batch. An Ising model's likelihood depends on its samples through their first
and second moments alone, so every gradient is that of all samples and costs no more than log Z.

How long to learn and how strong a penalty is decided for each model by its validation samples, for all methods alike:
by their exact NLL, and, for comparison, by their pseudo-likelihood, which needs no log Z. Nothing looks at the test
samples before that.

What each method can reach is a matter of its free energy. The optimum of Bethe's (with a penalty or without) has
pairwise beliefs equal to the samples', but an exact NLL well above exact learning's where couplings are strong: beliefs
say little about how much weight each of several modes has. Few iterations an update and early stopping keep away from
it. Kikuchi's free energy leaves nearly nothing to exploit.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrize import register_parametrization

from bethenet.data.ising import IsingData, ising_data
from bethenet.experiments.ising_inference import PAPER_HEAD, paper_network
from bethenet.experiments.runner import Cell, Settings
from bethenet.graph import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.inference.gbp import GeneralizedBeliefPropagation
from bethenet.inference.mean_field import MeanField
from bethenet.learning import (
    Averaging,
    Batch,
    ByEngine,
    ByNetwork,
    EngineRefinement,
    Likelihood,
    LogPartition,
    OptimizerOptions,
    Schedule,
    Trainer,
    TrainerOptions,
    TrainingResult,
    negative_log_likelihood,
)
from bethenet.learning.partition import Estimate
from bethenet.models import Model
from bethenet.models.ising import IsingModel, spins
from bethenet.networks import ConsistentHead, InferenceNetwork, PenalizedHead, RegionNetwork
from bethenet.networks.network import plaquettes

METHODS = {
    "exact": "Exact",
    "mean-field": "Mean field",
    "bp": "Loopy BP, persistent",
    "bp-cold": "Loopy BP, started anew",
    "kikuchi": "Kikuchi, persistent",
    "penalized": "Network (the paper's, penalised)",
    "consistent": "Network (the paper's, consistent, two sweeps)",
    "graph": "Graph network (Bethe, consistent)",
    "plaquettes": "Graph network (plaquettes, penalised)",
}
CRITERIA = ("nll", "pseudo_nll")
"""What a model may be selected by: validation samples' exact NLL, or their pseudo-NLL, which needs no log Z."""
EVALUATIONS = 16
"""How often a run looks at its validation samples."""
LIMIT = 50
"""Iterations of an engine that is asked what it makes of the present model; in training it takes a few an update."""


@dataclass(frozen=True)
class Recipe:
    """How a method learns."""

    steps: int = 400
    learning_rate: float = 0.2
    """Of Adam, for couplings and fields; a cosine to zero."""
    field_pace: float | None = None
    """How many times faster the fields learn; as fast as the couplings if not given."""
    betas: tuple[float, float] = (0.9, 0.99)
    averaging: float = 0.98
    """Decay of the exponential average of all weights."""
    penalties: tuple[float, ...] = (2e-3, 1e-2)
    """Strengths s of the term ``s / 2 * (|J|^2 + |h|^2)`` (nats per sample)."""
    warmup: int = 0
    """Steps over which that rate first rises."""
    network_rate: float = 0.0
    """Of Adam, for the network."""
    network_steps: int = 1
    """I1 of Algorithm 1."""


EAGER = Recipe(steps=120, learning_rate=0.4, betas=(0.8, 0.95), averaging=0.5, penalties=(2e-3,))
"""For free energies that leave nothing to exploit: straight to the optimum."""
BELIEF_PROPAGATION = Recipe(800, 0.1, penalties=(2e-3, 4e-3, 8e-3), field_pace=3.0)
RECIPES = {
    "exact": EAGER,
    "mean-field": Recipe(learning_rate=0.05, penalties=(3e-2, 1e-1, 3e-1), field_pace=10.0),
    "bp": BELIEF_PROPAGATION,
    "bp-cold": BELIEF_PROPAGATION,
    "kikuchi": Recipe(steps=300, averaging=0.9),
    # a model that moves faster than the network can follow exploits its lag, and runs away
    "penalized": Recipe(500, 0.06, averaging=0.9, penalties=(2e-3,), warmup=150, network_rate=3e-3, network_steps=5),
    "consistent": Recipe(300, 0.1, averaging=0.9, penalties=(2e-3,), warmup=50, network_rate=3e-3),
    "graph": Recipe(300, 0.1, averaging=0.9, penalties=(4e-3, 2e-2), network_rate=3e-3, network_steps=3),
    "plaquettes": replace(EAGER, steps=200, averaging=0.9, network_rate=3e-3),
}
"""Tuned on the validation samples of other random models (seeds from 105 on) at n = 5 and n = 10."""


def partition(method: str, graph: FactorGraph, members: int, steps: int = 1) -> LogPartition:
    """How a method gets log Z of ``members`` models over one graph; networks by so many ``steps`` an update."""
    match method:
        case "exact":
            return ByEngine(Exact())
        case "mean-field":
            return ByEngine(MeanField(max_iterations=LIMIT), persistent=True, iterations=2)
        case "bp":
            return ByEngine(BeliefPropagation(damping=0.3, max_iterations=LIMIT), persistent=True, iterations=2)
        case "bp-cold":
            return ByEngine(BeliefPropagation(damping=0.3, max_iterations=LIMIT))
        case "kikuchi":
            engine = GeneralizedBeliefPropagation(clusters="plaquettes", max_iterations=LIMIT)
            return ByEngine(engine, persistent=True, iterations=5)
        case "penalized":
            return ByNetwork(paper_network(graph, members, PAPER_HEAD), steps=steps)
        case "consistent":
            return ByNetwork(
                paper_network(graph, members, ConsistentHead()),
                steps=steps,
                refine=EngineRefinement(BeliefPropagation(damping=0.3), iterations=2),
                learn_from="refined",
                targets="nodes",
            )
        case "graph":
            return ByNetwork(InferenceNetwork(RegionNetwork(width=4, rounds=6), ConsistentHead()), steps=steps)
        case "plaquettes":
            head = PenalizedHead(weight=30.0, per_factor=False, projections=2)
            return ByNetwork(
                InferenceNetwork(RegionNetwork(width=4, rounds=8, damping=0.4), head, plaquettes), steps=steps
            )
    raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")


class Learner(IsingModel):
    """An Ising model whose data are moments of samples: one row, the fields' statistics and then the couplings'.

    Args:
        graph: see `IsingModel`.
        couplings: see `IsingModel`.
        fields: see `IsingModel`.
        field_pace: the fields are so many times a parameter; Adam, whose steps know no scale, moves them that much
            faster.
    """

    def __init__(self, graph: FactorGraph, couplings: Tensor, fields: Tensor, field_pace: float | None = None) -> None:
        super().__init__(graph, couplings, fields)
        if field_pace is not None:
            register_parametrization(self, "fields", _Scaled(field_pace))

    def score(self, data: Float[Tensor, "one models terms"]) -> Float[Tensor, "one models"]:
        """Mean over the samples of ``sum h_i x_i + sum J_ij x_i x_j`` (nats)."""
        return (data * torch.cat([self.fields, self.couplings], dim=1)).sum(-1)


class _Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, parameter: Tensor) -> Tensor:
        return self.factor * parameter

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / self.factor


def moments(graph: FactorGraph, data: Int[Tensor, "samples models variables"]) -> Float[Tensor, "one models terms"]:
    """Mean spins and mean products of neighbours, in the order of a grid's fields and couplings."""
    x = spins(data)
    unary, pairs = (group.variables for group in graph.to(data.device).factor_groups)
    return torch.cat([x[..., unary[:, 0]], x[..., pairs[:, 0]] * x[..., pairs[:, 1]]], dim=-1).mean(0, keepdim=True)


def pseudo_nll(model: IsingModel, data: Int[Tensor, "samples models variables"]) -> Float[Tensor, " models"]:
    """Mean over samples of ``-sum_i log P(x_i | the others)`` (nats), by one matrix product per model."""
    x = spins(data, model.fields.dtype).transpose(0, 1)
    first, second = model.graph.to(x.device).factor_groups[1].variables.unbind(1)
    neighbours = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
    neighbours[:, first, second] = neighbours[:, second, first] = model.couplings
    local = torch.baddbmm(model.fields.unsqueeze(1), x, neighbours)
    return softplus(-2 * x * local).sum(-1).mean(1)


class Selection:
    """Keeps, for each member and criterion, the couplings and fields of the evaluation that was best by it on the
    validation samples, with what the member's method made of them.
    """

    def __init__(self, model: Learner, estimate: Callable[[], tuple[Tensor, Estimate]], validation: Tensor) -> None:
        self.model, self.estimate, self.validation = model, estimate, validation
        self.moments = moments(model.graph, validation)
        self.evaluations = -1
        self.best: dict[str, dict[str, Tensor]] = {}
        self()

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Look at the model as it is now."""
        model = self.model
        self.evaluations += 1
        objective, estimate = self.estimate()
        now = {
            "nll": negative_log_likelihood(model, self.moments, Exact()),
            "pseudo_nll": pseudo_nll(model, self.validation),
            "evaluation": torch.full_like(objective, self.evaluations),
            "objective": objective,
            "inconsistency": estimate.beliefs.inconsistency(),
            "fields": model.fields.clone(),
            "couplings": model.couplings.clone(),
        }
        for criterion in CRITERIA:
            best = self.best.setdefault(criterion, now)
            better = now[criterion] < best[criterion]
            self.best[criterion] = {
                name: torch.where(better.reshape(-1, *[1] * (value.dim() - 1)), value, best[name])
                for name, value in now.items()
            }
        return {}

    def by_model(self, criterion: str, strengths: int) -> dict[str, Tensor]:
        """The best of each model's members (one for every penalty strength; strengths in the first axis)."""
        best = {name: value.unflatten(0, (strengths, -1)) for name, value in self.best[criterion].items()}
        winner = best[criterion].argmin(0)
        models = torch.arange(winner.numel(), device=winner.device)
        return {"strength": winner, **{name: value[winner, models] for name, value in best.items()}}


def learn(method: str, data: IsingData, start: IsingModel, recipe: Recipe) -> tuple[Selection, TrainingResult]:
    """Learn all models from ``start``, each under every penalty strength."""
    graph, (models, _) = start.graph, start.fields.shape
    copies = len(recipe.penalties)
    learner = Learner(graph, start.couplings.repeat(copies, 1), start.fields.repeat(copies, 1), recipe.field_pace)
    strengths = start.fields.new_tensor(recipe.penalties).repeat_interleave(models)

    def penalty(_: Model) -> Tensor:
        return strengths / 2 * (learner.couplings.square().sum(1) + learner.fields.square().sum(1))

    torch.manual_seed(graph.num_variables)  # nn.Module draws its first weights from the global generator
    log_partition = partition(method, graph, copies * models, recipe.network_steps).to(start.fields.device)
    objective = Likelihood(learner, log_partition, regularizer=penalty)
    seen = moments(graph, data.train).repeat(1, copies, 1)

    def estimate() -> tuple[Tensor, Estimate]:
        found = log_partition.estimate(learner.log_potentials(), Batch(seen, 1), clamped=False)
        return found.log_z - learner.score(seen)[0], found

    selection = Selection(learner, estimate, data.validation.repeat(1, copies, 1))
    optimizers = {"model": _adam(recipe.learning_rate, recipe.betas, recipe.warmup)}
    if recipe.network_rate:
        optimizers["network"] = _adam(recipe.network_rate, (0.9, 0.999), 0)
    options = TrainerOptions(
        epochs=recipe.steps,  # all samples are one minibatch
        optimizers=optimizers,
        averaging=Averaging(decay=recipe.averaging),
        evaluate_every=_steps_between_evaluations(recipe),
    )
    return selection, Trainer(objective, options, evaluators=[selection]).fit(seen)


def _adam(learning_rate: float, betas: tuple[float, float], warmup: int) -> OptimizerOptions:
    return OptimizerOptions(learning_rate=learning_rate, betas=betas, schedule=Schedule("cosine", warmup))


def _steps_between_evaluations(recipe: Recipe) -> int:
    return -(-recipe.steps // EVALUATIONS)


@lru_cache(maxsize=1)
def samples_of(size: int, models: int, samples: int) -> tuple[IsingData, IsingModel]:
    """Random models with their samples, and the random models to start from; kept for the methods asked in a row."""
    generator = torch.Generator().manual_seed(1000 + size)
    start = IsingModel.random(FactorGraph.grid(size, size), models=models, generator=generator)
    return ising_data(size, size, samples=samples, models=models, seed=size), start


def measure(method: str, size: int, models: int, samples: int, recipe: Recipe, device: str) -> dict[str, Any]:
    """One cell: held-out NLL of every model that a method has learnt."""
    drawn, start = samples_of(size, models, samples)
    data = IsingData(drawn.model, *(part.to(device) for part in (drawn.train, drawn.validation, drawn.test)))
    started = deepcopy(start).to(device)
    selection, result = learn(method, data, started, recipe)
    test = moments(start.graph, data.test)
    figures: dict[str, Any] = {
        "training_seconds": result.seconds,
        "status": str(result.status),
        "true_nll": _nll(deepcopy(drawn.model).to(device), test).tolist(),
        "initial_nll": _nll(started, test).tolist(),
    }
    for criterion in CRITERIA:
        best = selection.by_model(criterion, len(recipe.penalties))
        figures[f"selected_by_{criterion}"] = {
            "test_nll": _nll(IsingModel(start.graph, best["couplings"], best["fields"]), test).tolist(),
            "validation_nll": best["nll"].tolist(),
            "objective": best["objective"].tolist(),
            "inconsistency": best["inconsistency"].tolist(),
            "steps": (best["evaluation"] * _steps_between_evaluations(recipe)).clamp(max=recipe.steps).long().tolist(),
            "penalty": [recipe.penalties[number] for number in best["strength"].tolist()],
        }
    return figures


def _nll(model: IsingModel, data: Float[Tensor, "one models terms"]) -> Float[Tensor, " models"]:
    return negative_log_likelihood(Learner(model.graph, model.couplings, model.fields), data, Exact())


def sizes_for(settings: Settings) -> tuple[int, ...]:
    """Grid sizes of the paper; a small one for a quick run."""
    return (4,) if settings.quick else (5, 10, 15)


def cells(settings: Settings) -> list[Cell]:
    """A cell for every size and method."""
    models = settings.seeds or (2 if settings.quick else 5)
    samples = 200 if settings.quick else 1000
    made = []
    for size in sizes_for(settings):
        for method, recipe in RECIPES.items():
            if settings.quick:
                recipe = replace(recipe, steps=min(recipe.steps, 60))
            arguments = {"method": method, "size": size, "models": models, "samples": samples}

            def run(arguments: dict[str, Any] = arguments, recipe: Recipe = recipe) -> dict[str, Any]:
                return measure(**arguments, recipe=recipe, device=settings.device)

            given = {name: value for name, value in asdict(recipe).items() if value is not None}
            made.append(Cell(f"{method}-n{size}", {**arguments, **given, "device": settings.device}, run))
    return made
