"""Restricted Boltzmann machines of the digits, learnt in every way there is: what table 3 of the paper reports.

A *recipe* is the numbers of one way (epochs, learning rates); a *learner* turns a machine into its objective. The
numbers were chosen on a part of the training rows, never on the rows that are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bethenet.data import BinaryImages, clean_digits, paper_digits
from bethenet.experiments.clock import EpochClock
from bethenet.inference.ais import LogZEstimate, annealed_importance_sampling
from bethenet.inference.bipartite import BipartiteBeliefPropagation
from bethenet.inference.bipartite_descent import BipartiteDescent
from bethenet.inference.minimisers import Adam
from bethenet.learning import (
    Averaging,
    Batch,
    ByEngine,
    ByNetwork,
    ContrastiveDivergence,
    EngineRefinement,
    Likelihood,
    Objective,
    OptimizerOptions,
    PersistentContrastiveDivergence,
    Schedule,
    Trainer,
    TrainerOptions,
    TrainingResult,
)
from bethenet.learning.metrics import Record
from bethenet.learning.variational import VariationalUpperBound, log_z_bound
from bethenet.models.rbm import RBM
from bethenet.models.rbm_chains import RBMPath, move_chains, start_chains
from bethenet.networks import (
    BidirectionalLSTM,
    ConsistentHead,
    FeatureOptions,
    InferenceNetwork,
    NodeFeatures,
    NodeTable,
    PenalizedHead,
    ReadoutOptions,
    SymbolicEncoder,
)
from bethenet.networks.proposals import AutoregressiveNetwork, MixtureOfProducts

HIDDEN = 100
BATCH_SIZE = 32
BOUND_SAMPLES = 100_000
"""Of the proposal, to estimate the bound that neural variational inference ends with."""
SPLITS: dict[str, Callable[[], BinaryImages]] = {"paper": paper_digits, "clean": clean_digits}


@dataclass(frozen=True)
class Recipe:
    """The numbers of one way to learn."""

    label: str
    epochs: int
    learning_rate: float = 4e-3
    """Of the model; it falls along a cosine."""
    final: float = 0.0
    """To this share of it. Beliefs follow the model from mode to mode; a model that comes to rest exploits the last."""
    second_rate: float = 3e-3
    """Of the network or proposal."""
    second_falls: bool = True
    """Whether that one falls alike."""
    second_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decays for the network or proposal."""
    warmup: int = 0
    """Steps over which the model's rate rises at first, so that a network has learnt something before it moves."""
    averaging: float | None = 0.999
    """Decay of the exponential average of all weights, if there is one."""
    clip_norm: float | None = None
    approximates: bool = True
    """Whether its objective is an approximate negative log-likelihood (l_F, or a bound)."""
    slow: bool = False
    """Trained on the paper's split only, and timed by some of its minibatches."""


RECIPES = {
    "pcd": Recipe("PCD, 64 chains", 60, 8e-3, averaging=None, approximates=False),
    "cd": Recipe("CD-1", 60, 1e-2, averaging=None, approximates=False),
    "bp-persistent": Recipe("BP, persistent messages", 80, 6e-3, 0.2),
    "network": Recipe(
        "Inference network, consistent, refined",
        60,
        final=0.2,
        second_rate=2.0,
        second_falls=False,
        second_betas=(0.5, 0.99),
    ),
    "bp-cold": Recipe("Loopy BP, cold from noise, 10 sweeps", 20, 6e-3, 0.4),
    "descent": Recipe("Descent, persistent", 36, 5e-3, 0.2),
    "paper-network": Recipe(
        "Inference network of the paper",
        36,
        2e-3,
        0.3,
        second_rate=1e-3,
        second_falls=False,
        warmup=450,
        clip_norm=1.0,
        slow=True,
    ),
    "nvi-mixture": Recipe("Neural variational inference, mixture", 50, 1e-3, second_rate=5e-3, clip_norm=5.0),
    "nvi-network": Recipe("Neural variational inference, autoregressive", 30, 1e-3, clip_norm=5.0),
}


def learner(name: str, model: RBM, seed: int) -> Objective:
    """The objective of a way to learn.

    Args:
        name: one of `RECIPES`.
        model: what is to be learnt.
        seed: of networks' first weights.
    """
    device, generator = model.weights.device, torch.Generator().manual_seed(seed)
    match name:
        case "pcd":
            return PersistentContrastiveDivergence(model, chains=64)
        case "cd":
            return ContrastiveDivergence(model)
        case "bp-persistent":
            return Likelihood(model, ByEngine(BipartiteBeliefPropagation(damping=0.5), persistent=True, iterations=5))
        case "bp-cold":
            # from silent messages all minibatches end at the same fixed point, and the machine learns to exploit it
            return Likelihood(model, ByEngine(BipartiteBeliefPropagation(damping=0.3, noise=1.0), iterations=10))
        case "descent":
            return Likelihood(model, ByEngine(BipartiteDescent(minimiser=Adam(0.2)), persistent=True, iterations=10))
        case "network":
            return Likelihood(model, consistent_network(model, seed))
        case "paper-network":
            return Likelihood(model, ByNetwork(paper_network(model, seed).to(device)))
        case "nvi-mixture":
            mixture = MixtureOfProducts(model.visible_bias, 200, generator=generator)
            return VariationalUpperBound(model, mixture, samples=400)
        case "nvi-network":
            return VariationalUpperBound(model, AutoregressiveNetwork(model.visible_bias, generator=generator))
    raise ValueError(f"expected a learner out of {', '.join(RECIPES)}; got {name!r}")


def consistent_network(model: RBM, seed: int) -> ByNetwork:
    """A table of node logits, consistent beliefs, and 5 sweeps of belief propagation, towards whose end it learns.

    Its learning rate is large, constant and without much momentum on purpose: a network that lags behind is exploited.
    """
    generator = torch.Generator().manual_seed(seed)
    network = InferenceNetwork(NodeTable.around_zero(model.log_potentials(), generator=generator), ConsistentHead())
    refine = EngineRefinement(BipartiteBeliefPropagation(damping=0.5), iterations=5)
    return ByNetwork(network, refine=refine, learn_from="refined", targets="nodes", reuse=True)


def paper_network(model: RBM, seed: int) -> InferenceNetwork:
    """The paper's network: embeddings of 150 for each unit and of 150 for its side, a bidirectional LSTM of 5 layers
    of 200, a hidden layer, and logits for every pair.

    In two points not the authors'. Their penalty is 1.5 times the mean over its 2 V H terms, which leaves beliefs so
    inconsistent that their free energy is nats below Bethe's minimum; here it is the sum. And the LSTM's input weights
    start ten times larger: it tells the units apart from the start.
    """
    torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
    roles = (torch.arange(model.graph.num_variables) >= model.visible).long()
    features = NodeFeatures(FeatureOptions(node=150, role=150), max_variables=model.graph.num_variables, roles=roles)
    sequence = BidirectionalLSTM(features.options.width, 200, layers=5, gain=10.0)
    encoder = SymbolicEncoder(features, sequence, [model.graph], ReadoutOptions(hidden=200))
    return InferenceNetwork(encoder, PenalizedHead(weight=1.0, distance="kl", per_factor=False))


def train(
    name: str,
    recipe: Recipe,
    data: BinaryImages,
    *,
    seed: int = 0,
    device: str = "cpu",
    evaluate_every: int | None = None,
    callbacks: Sequence[Callable[[Record], None]] = (),
) -> tuple[Objective, TrainingResult]:
    """Train a machine on the digits by one recipe.

    Args:
        name: whose learner.
        recipe: its numbers.
        data: the images.
        seed: of first weights, of the data's order and of all sampling.
        device: where.
        evaluate_every: epochs between rough estimates of the held-out likelihood (`rough_nll` in the records).
        callbacks: told every record.
    """
    model = RBM(data.pixels, HIDDEN, generator=torch.Generator().manual_seed(seed)).initialise_from(data.train)
    model = model.to(device)
    objective = learner(name, model, seed)

    def rough() -> Mapping[str, float]:
        nll, _ = held_out_nll(model, data, chains=100, temperatures=500)
        return {"rough_nll": nll}

    clip = recipe.clip_norm
    schedule = Schedule("cosine", warmup=recipe.warmup, final=recipe.final)
    own = OptimizerOptions(learning_rate=recipe.learning_rate, schedule=schedule, clip_norm=clip)
    second = OptimizerOptions(
        learning_rate=recipe.second_rate,
        schedule=Schedule("cosine") if recipe.second_falls else Schedule(),
        betas=recipe.second_betas,
        clip_norm=clip,
    )
    optimizers = {part: own if part == "model" else second for part in objective.parts()}
    options = TrainerOptions(
        epochs=recipe.epochs,
        batch_size=BATCH_SIZE,
        seed=seed,
        optimizers=optimizers,
        averaging=None if recipe.averaging is None else Averaging(decay=recipe.averaging),
        evaluate_every=evaluate_every or recipe.epochs,
        log_every=10_000,
        capture=True,
    )
    trainer = Trainer(objective, options, evaluators=[rough] if evaluate_every else [], callbacks=callbacks)
    return objective, trainer.fit(data.train.float().to(device))


def time_epoch(name: str, *, device: str = "cpu", repeats: int = 3) -> Record:
    """Seconds of one epoch on the digits, by the clock and of all processors: medians over epochs, nothing evaluated.

    With one thread or with as many as PyTorch would take, whichever is faster: small machines gain nothing by more. Of
    slow learners 20 minibatches are timed and scaled up.
    """
    data, recipe = paper_digits(), shortened(RECIPES[name], repeats + 1)
    whole = len(data.train)
    rows = 20 * BATCH_SIZE if recipe.slow else whole
    data, scale, usual = replace(data, train=data.train[:rows]), whole / rows, torch.get_num_threads()
    found: list[Record] = []
    for threads in sorted({1, usual}):
        torch.set_num_threads(threads)
        clock = EpochClock(device)
        train(name, recipe, data, device=device, callbacks=[clock])
        # in the first one everything is set up
        walls, processors = zip(*clock.seconds()[1:], strict=True)
        found.append({"wall": scale * median(walls), "processors": scale * median(processors), "threads": threads})
    torch.set_num_threads(usual)
    return min(found, key=lambda record: record["wall"])


def held_out_nll(
    model: RBM, data: BinaryImages, *, chains: int = 256, temperatures: int = 4000, seed: int = 0
) -> tuple[float, LogZEstimate]:
    """Mean negative log-likelihood of the test rows (nats) by annealed importance sampling, one log Z for all.

    Args:
        model: the machine.
        data: the annealing starts from the training rows' base rates.
        chains: of the annealing.
        temperatures: of the annealing.
        seed: of the chains.
    """
    device = model.weights.device
    generator = torch.Generator(device).manual_seed(seed)
    path = RBMPath(model, model.base_log_odds(data.train.to(device)))
    estimate = annealed_importance_sampling(path, chains=chains, schedule=temperatures, generator=generator)
    with torch.no_grad():
        score = model.score(data.test.float().to(device)).mean()
    return float(estimate.log_z - score), estimate


def fantasies(model: RBM, count: int, steps: int = 2000, seed: int = 0) -> Tensor:
    """What the machine dreams: visible units ``[count, visible]`` of chains that have run for long."""
    generator = torch.Generator(model.weights.device).manual_seed(seed)
    hidden = start_chains(model, count, generator=generator)
    features, _ = move_chains(model, hidden, steps, generator=generator)
    return model.decode(features).to("cpu", torch.uint8)


def shortened(recipe: Recipe, epochs: int) -> Recipe:
    """The same with fewer epochs."""
    return replace(recipe, epochs=min(epochs, recipe.epochs))


def figures_of(objective: Any, recipe: Recipe, result: TrainingResult, data: BinaryImages, **annealing: Any) -> Record:
    """What table 3 reports of one machine."""
    model = objective.model
    nll, estimate = held_out_nll(model, data, **annealing)
    figures: Record = {
        "status": str(result.status),
        "nll": nll,
        "ais_error": float(estimate.standard_error),
        "ais_interval": [float(end) for end in estimate.interval - estimate.log_z + nll],
        "ais_effective_chains": float(estimate.effective_sample_size),
        "epochs": result.epochs,
        "seconds_per_epoch": result.seconds / max(1, result.epochs),
        "curve": [[record["epoch"], record["rough_nll"]] for record in result.history if "rough_nll" in record],
        "training_objective": [record.get("objective") for record in result.history],
    }
    if isinstance(objective, VariationalUpperBound):
        generator = torch.Generator(model.weights.device).manual_seed(0)
        bound = log_z_bound(model, objective.proposal, BOUND_SAMPLES, generator=generator)
        figures["objective"] = nll + float(bound.log_z - estimate.log_z)
        figures["bound_error"] = float(bound.standard_error)
        figures["bound_effective_samples"] = float(bound.effective_sample_size)
    elif recipe.approximates:
        figures["objective"] = held_out_objective(objective, data)
    return figures


def held_out_objective(objective: Objective, data: BinaryImages) -> float:
    """l_F of the test rows."""
    objective.eval()
    parameter = next(objective.parameters())
    rows = data.test.float().to(parameter.device)
    generator = torch.Generator(parameter.device).manual_seed(0)
    with torch.no_grad():
        return float(objective.evaluate(Batch(rows, len(rows)), generator)["objective"])


@torch.no_grad()
def gibbs_marginals(
    model: RBM, *, chains: int = 500, burn_in: int = 1000, steps: int = 500, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Long-run averages of Gibbs chains: P(unit = 1), visible units first, and P(x = 1, z = 1) ``[visible, hidden]``.

    The hidden units' part is averaged in closed form given the visible units.
    """
    generator = torch.Generator(model.weights.device).manual_seed(seed)
    _, hidden = move_chains(model, start_chains(model, chains, generator=generator), burn_in, generator=generator)
    visible, chances, pairs = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for _ in range(steps):
        features, hidden = move_chains(model, hidden, generator=generator)
        given = model.hidden_logits(features).sigmoid_()
        visible, chances = visible + features.mean(0), chances + given.mean(0)
        pairs = pairs + features.t() @ given / chains
    return torch.cat([visible, chances]) / steps, pairs / steps
