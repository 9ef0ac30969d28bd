"""One network for Ising grids it has never seen: trained by free energy alone, then one forward pass a model.

The paper's network knows one model and is fitted anew to each. This one reads the potentials. It is trained, without
labels, on a stream of random grids, and compared on fresh ones with belief propagation run to convergence, both as one
batch on one device; inside the range it was trained on and outside of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import networkx
import torch
from torch import Tensor

from bethenet.evaluation import Marginals, accuracy, marginals_of_ones
from bethenet.experiments.ising_inference import exact_marginals
from bethenet.experiments.runner import Cell, Experiment, Settings, markdown_table, mean_and_error, write_text
from bethenet.graph import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.engine import Engine
from bethenet.inference.gbp import GeneralizedBeliefPropagation
from bethenet.models.ising import IsingModel
from bethenet.networks import ConsistentHead, InferenceNetwork, PenalizedHead, RegionNetwork
from bethenet.networks.engine import NetworkInference
from bethenet.networks.fitting import FitOptions, fit
from bethenet.networks.network import APPROXIMATIONS
from bethenet.networks.storage import load_network, save_network
from bethenet.potentials import LogPotentials

TRAINING_SIZES = range(5, 13)
TRAINING_SCALE = 1.2
"""Couplings of each training model have a standard deviation drawn uniformly from 0 to this."""


@dataclass(frozen=True)
class Recipe:
    """A network and how it is trained."""

    approximation: str
    width: int
    rounds: int
    damping: float
    batch_size: int
    learning_rate: float
    seconds: float
    averaging: float = 0.99
    penalty: float = 0.0
    projections: int = 0

    def network(self, seed: int) -> InferenceNetwork:
        """The network before training: belief propagation cut off after ``rounds``."""
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        encoder = RegionNetwork(self.width, self.rounds, self.damping)
        if self.approximation == "bethe":
            return InferenceNetwork(encoder, ConsistentHead())
        head = PenalizedHead(weight=self.penalty, per_factor=False, projections=self.projections)
        return InferenceNetwork(encoder, head, APPROXIMATIONS[self.approximation])


RECIPES = {
    "bethe": Recipe("bethe", 32, 8, 0.0, batch_size=256, learning_rate=3e-3, seconds=100),
    "plaquettes": Recipe(
        "plaquettes", 16, 10, 0.4, batch_size=128, learning_rate=2e-3, seconds=170, penalty=30.0, projections=2
    ),
}
QUICK = {
    "bethe": Recipe("bethe", 4, 4, 0.0, batch_size=8, learning_rate=1e-2, seconds=8),
    "plaquettes": Recipe("plaquettes", 2, 5, 0.3, 4, 3e-3, 12, penalty=30.0, projections=1),
}


@dataclass(frozen=True)
class TestSet:
    """Models that no network has seen."""

    kind: str
    """``grid`` or ``3-regular``."""
    size: int
    """Rows of a square grid, or variables."""
    coupling_scale: float
    models: int

    @property
    def key(self) -> str:
        """A name for files and tables."""
        return f"{self.kind}-n{self.size}-sd{self.coupling_scale:g}"

    @property
    def exact(self) -> bool:
        """Whether exact inference can tell the truth."""
        return self.kind != "grid" or self.size <= 15

    def draw(self) -> LogPotentials:
        """The models, always the same ones."""
        seed = 7_000_000 + 1000 * self.size + int(10 * self.coupling_scale)
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "grid":
            graph = FactorGraph.grid(self.size, self.size)
        else:
            graph = FactorGraph.from_networkx(networkx.random_regular_graph(3, self.size, seed=seed))
        with torch.no_grad():
            return IsingModel.random(
                graph, coupling_scale=self.coupling_scale, models=self.models, generator=generator
            ).log_potentials()


def test_sets(settings: Settings) -> list[TestSet]:
    """Inside the training range, then outside of it."""
    count = settings.seeds or (10 if settings.quick else 100)
    if settings.quick:
        return [TestSet("grid", 8, 1.0, count), TestSet("3-regular", 12, 1.0, count)]
    inside = [TestSet("grid", 10, 1.0, count), TestSet("grid", 15, 1.0, count)]
    strong = [TestSet("grid", 10, 2.0, count), TestSet("grid", 10, 3.0, count)]
    return [*inside, *strong, TestSet("grid", 30, 1.0, min(count, 20)), TestSet("3-regular", 20, 1.0, count)]


def training_stream(recipe: Recipe, device: torch.device, seed: int) -> Callable[[int], LogPotentials]:
    """Fresh random grids of one size for every step, drawn on the device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = torch.randint(len(TRAINING_SIZES), (65_536,), generator=torch.Generator().manual_seed(seed)).tolist()
    graphs = [FactorGraph.grid(size, size).to(device) for size in TRAINING_SIZES]
    signs = torch.tensor([-1.0, 1.0], device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def draw(step: int) -> LogPotentials:
        graph = graphs[sizes[step % len(sizes)]]
        scale = TRAINING_SCALE * torch.rand(recipe.batch_size, 1, 1, 1, device=device, generator=generator)
        fields = normal(recipe.batch_size, graph.num_variables, 1) * signs
        couplings = scale * normal(recipe.batch_size, len(graph.factor_groups[1]), 1, 1) * signs.outer(signs)
        return LogPotentials(graph, [fields, couplings])

    return draw


def train(name: str, recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Train one network, save it, and say what it cost."""
    device = torch.device(settings.device)
    network = recipe.network(seed=0).to(device)
    options = FitOptions(
        steps=10**7,
        learning_rate=recipe.learning_rate,
        schedule="cosine",
        warmup=100,
        clip=1.0,
        averaging=recipe.averaging,
        time_limit=recipe.seconds,
    )
    fitted = fit(network, training_stream(recipe, device, seed=1), options)
    notes = {"recipe": asdict(recipe), "seconds": fitted.seconds, "steps": int(fitted.steps[0])}
    save_network(network, folder(settings, name), notes)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {
        "training_seconds": fitted.seconds,
        "steps": notes["steps"],
        "parameters": parameters,
        "losses": fitted.losses,
    }


def folder(settings: Settings, name: str) -> Path:
    """Where a trained network is kept."""
    return settings.output / "networks" / name


def evaluate(method: str, test: TestSet, settings: Settings) -> dict[str, Any]:
    """Accuracy and time of one method on one set of models."""
    device = torch.device(settings.device)
    potentials, truth, judge = _truth(test, device)
    engine = _engine(method, settings, device)
    potentials = potentials.to(device)
    engine.run(potentials)  # the first run compiles wiring
    seconds = []
    for _ in range(5 if isinstance(engine, NetworkInference) else 1):
        started = time.perf_counter()
        result = engine.run(potentials)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    correlation, mean_l1 = accuracy(marginals_of_ones(result.beliefs).together.cpu(), truth.together)
    return {
        "truth": judge,
        "correlation": correlation.tolist(),
        "mean_l1": mean_l1.tolist(),
        "converged": int(result.converged.sum()),
        "inconsistency": float(result.beliefs.inconsistency().max()),
        "milliseconds": 1000 * sorted(seconds)[len(seconds) // 2],
    }


@lru_cache(maxsize=1)
def _truth(test: TestSet, device: torch.device) -> tuple[LogPotentials, Marginals, str]:
    potentials = test.draw()
    if test.exact:
        return potentials, exact_marginals(potentials), "exact"
    result = GeneralizedBeliefPropagation(clusters="plaquettes").run(potentials.to(device))
    found = marginals_of_ones(result.beliefs)
    return potentials, Marginals(found.nodes.cpu(), found.pairs.cpu()), "kikuchi"


def _engine(method: str, settings: Settings, device: torch.device) -> Engine:
    if method == "bp":
        return BeliefPropagation()
    if method == "kikuchi":
        return GeneralizedBeliefPropagation(clusters="plaquettes")
    kind, name = method.split("-")
    if kind == "trained":
        return NetworkInference(load_network(folder(settings, name), device))
    recipes = QUICK if settings.quick else RECIPES
    return NetworkInference(recipes[name].network(seed=0).to(device))


def methods_for(test: TestSet) -> list[str]:
    """Plaquettes are for grids."""
    grid = ["untrained-plaquettes", "trained-plaquettes", "kikuchi"] if test.kind == "grid" else []
    return ["bp", "untrained-bethe", "trained-bethe", *(name for name in grid if test.exact or name != "kikuchi")]


LABELS = {
    "bp": "Belief propagation, converged",
    "kikuchi": "Kikuchi, converged",
    "untrained-bethe": "Network, Bethe, untrained",
    "trained-bethe": "Network, Bethe, trained",
    "untrained-plaquettes": "Network, plaquettes, untrained",
    "trained-plaquettes": "Network, plaquettes, trained",
}


def _cells(settings: Settings) -> list[Cell]:
    recipes = QUICK if settings.quick else RECIPES
    cells = []
    for name, recipe in recipes.items():

        def run(name: str = name, recipe: Recipe = recipe) -> dict[str, Any]:
            return train(name, recipe, settings)

        cells.append(Cell(f"train-{name}", {"recipe": asdict(recipe), "device": settings.device}, run))
    for test in test_sets(settings):
        for method in methods_for(test):

            def measure(test: TestSet = test, method: str = method) -> dict[str, Any]:
                return evaluate(method, test, settings)

            parameters = {"method": method, **asdict(test), "device": settings.device}
            if method.split("-")[-1] in recipes:
                parameters["recipe"] = asdict(recipes[method.split("-")[-1]])
            cells.append(Cell(f"{method}-{test.key}", parameters, measure))
    return cells


def _report(settings: Settings, figures: dict[str, dict[str, Any]]) -> list[Path]:
    parts = ["# One network for unseen Ising models\n\nTrained by free energy alone, without labels.\n\n"]
    rows = []
    for name in QUICK if settings.quick else RECIPES:
        cell = figures[f"train-{name}"]
        rows.append([name, f"{cell['training_seconds']:.0f}", str(cell["steps"]), str(cell["parameters"])])
    parts.append(markdown_table(["network", "seconds of training", "steps", "parameters"], rows))
    for test in test_sets(settings):
        rows = []
        reference = figures[f"bp-{test.key}"]["milliseconds"]
        for method in methods_for(test):
            cell = figures[f"{method}-{test.key}"]
            correlation, error = mean_and_error(cell["correlation"])
            mean_l1, l1_error = mean_and_error(cell["mean_l1"])
            converged = str(cell["converged"]) if method in ("bp", "kikuchi") else "-"
            rows.append(
                [
                    LABELS[method],
                    f"{correlation:.4f} ± {error:.4f}",
                    f"{mean_l1:.4f} ± {l1_error:.4f}",
                    converged,
                    f"{cell['milliseconds'] / test.models:.3f}",
                    f"{reference / cell['milliseconds']:.1f}",
                ]
            )
        truth = figures[f"bp-{test.key}"]["truth"]
        parts.append(f"\n## {test.kind}, n = {test.size}, couplings of sd {test.coupling_scale:g}\n\n")
        parts.append(f"{test.models} models as one batch, compared with {truth} marginals.\n\n")
        header = ["", "correlation", "mean L1", "converged", "ms a model", "times faster than BP"]
        parts.append(markdown_table(header, rows))
    path = settings.output / "amortized.md"
    write_text(path, "".join(parts))
    return [path]


AMORTIZED = Experiment("amortized", "One network for unseen Ising models", _cells, _report)
