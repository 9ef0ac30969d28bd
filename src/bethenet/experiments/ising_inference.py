"""Inference in random Ising grids, approximate against exact: what tables 1 and 5 and figure 2 of the paper report.

Every method gets all models of a cell as one batch; the networks of the paper, which know one model each, are trained
as one batched module.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from bethenet.beliefs import Beliefs
from bethenet.evaluation import Marginals, accuracy, marginals_of_ones
from bethenet.experiments.runner import Cell, Settings
from bethenet.free_energy import free_energy
from bethenet.graph import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.engine import Engine
from bethenet.inference.exact import Exact
from bethenet.inference.gbp import GeneralizedBeliefPropagation
from bethenet.inference.mean_field import MeanField
from bethenet.models.ising import IsingModel
from bethenet.networks import (
    ConsistentHead,
    FeatureOptions,
    IndependentEncoders,
    InferenceNetwork,
    NodeFeatures,
    PenalizedHead,
    ReadoutOptions,
    SymbolicEncoder,
    Transformer,
)
from bethenet.networks.fitting import FitOptions, fit
from bethenet.networks.heads import Head
from bethenet.potentials import LogPotentials

METHODS = {
    "mean-field": "Mean field",
    "bp": "Loopy BP",
    "penalized": "Network (penalised)",
    "consistent": "Network (consistent)",
    "kikuchi": "Kikuchi",
}
WIDTH = 200
"""Of the paper's node embeddings and Transformer."""
PAPER_FIT = FitOptions(steps=200, learning_rate=1e-3, tolerance=1e-5)
PAPER_HEAD = PenalizedHead(weight=10.0, distance="l2", per_factor=False)
"""Ten times the sum of squared differences, as in the authors' code."""


def random_models(size: int, coupling_scale: float, count: int, seed: int) -> LogPotentials:
    """Grids with fields N(0, 1) and couplings N(0, coupling_scale^2), as one batch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return IsingModel.random(
            FactorGraph.grid(size, size), coupling_scale=coupling_scale, models=count, generator=generator
        ).log_potentials()


def exact_marginals(potentials: LogPotentials) -> Marginals:
    """The truth, in float64, a few models at a time."""
    parts = []
    for first in range(0, potentials.batch_size, 10):
        members = potentials[first : first + 10].to(dtype=torch.float64)
        parts.append(marginals_of_ones(Exact().run(members).beliefs))
    return Marginals(torch.cat([part.nodes for part in parts]), torch.cat([part.pairs for part in parts]))


@lru_cache(maxsize=1)
def models_and_truth(size: int, coupling_scale: float, count: int, seed: int) -> tuple[LogPotentials, Marginals]:
    """Random models and their exact marginals; kept, because all methods of a cell are asked in a row."""
    potentials = random_models(size, coupling_scale, count, seed)
    return potentials, exact_marginals(potentials)


def paper_network(graph: FactorGraph, count: int, head: Head) -> InferenceNetwork:
    """The paper's network for Ising models: free node embeddings, one Transformer layer, and, as in the authors' code
    though not in the paper, a hidden layer before the logits (without it 200 steps are too few at n = 15).
    """

    def make() -> SymbolicEncoder:
        features = NodeFeatures(FeatureOptions(node=WIDTH), max_variables=graph.num_variables)
        return SymbolicEncoder(features, Transformer(WIDTH, WIDTH), [graph], ReadoutOptions(hidden=WIDTH))

    return InferenceNetwork(IndependentEncoders(make, count), head)


def infer(method: str, potentials: LogPotentials, seed: int) -> tuple[Beliefs, dict[str, Any]]:
    """Beliefs by one of `METHODS`, and what there is to say about the run."""
    generator = torch.Generator(device=potentials.device).manual_seed(seed)
    if method in ("penalized", "consistent"):
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        head = PAPER_HEAD if method == "penalized" else ConsistentHead()
        network = paper_network(potentials.graph, potentials.batch_size, head).to(potentials.device)
        fitted = fit(network, potentials, PAPER_FIT)
        return fitted.beliefs, {"steps": fitted.steps.tolist()}
    engines: dict[str, Engine] = {
        "mean-field": MeanField(),
        "bp": BeliefPropagation(),
        "kikuchi": GeneralizedBeliefPropagation(clusters="plaquettes"),
    }
    result = engines[method].run(potentials, generator=generator)
    return result.beliefs, {"converged": int(result.converged.sum()), "iterations": result.iterations.tolist()}


def measure(size: int, coupling_scale: float, method: str, settings: Settings, count: int) -> dict[str, Any]:
    """One cell: accuracy of one method on ``count`` models, each model's figures kept."""
    seed = int(1000 * coupling_scale) + size
    potentials, truth = models_and_truth(size, coupling_scale, count, seed)
    device = torch.device(settings.device)
    potentials = potentials.to(device)
    started = time.perf_counter()
    beliefs, notes = infer(method, potentials, seed)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    beliefs = beliefs.detach()
    found = marginals_of_ones(beliefs)
    figures: dict[str, Any] = {"seconds_per_model": seconds / count, **notes}
    for name, ours, true in (
        ("all", found.together, truth.together),
        ("nodes", found.nodes, truth.nodes),
        ("pairs", found.pairs, truth.pairs),
    ):
        correlation, mean_l1 = accuracy(ours.cpu(), true)
        figures[f"correlation_{name}"], figures[f"mean_l1_{name}"] = correlation.tolist(), mean_l1.tolist()
    figures["log_z"] = (-free_energy(potentials, beliefs)).tolist()
    figures["inconsistency"] = beliefs.inconsistency().tolist()
    figures["first_model"] = {
        "nodes": [found.nodes[0].tolist(), truth.nodes[0].tolist()],
        "pairs": [found.pairs[0].tolist(), truth.pairs[0].tolist()],
    }
    return figures


def cells(settings: Settings, scales: Iterable[float], sizes: Iterable[int], methods: Iterable[str]) -> list[Cell]:
    """A cell for every coupling scale, size and method."""
    count = settings.seeds or (8 if settings.quick else 100)
    made = []
    for scale in scales:
        for size in sizes:
            for method in methods:
                key = f"{method}-n{size}-sd{scale:g}"
                parameters = {"size": size, "coupling_scale": scale, "method": method, "models": count}
                parameters["device"] = settings.device

                def run(size: int = size, scale: float = scale, method: str = method) -> dict[str, Any]:
                    return measure(size, scale, method, settings, count)

                made.append(Cell(key, parameters, run))
    return made


def sizes_for(settings: Settings) -> tuple[int, ...]:
    """Grid sizes of the paper; small ones for a quick run."""
    return (5, 8) if settings.quick else (5, 10, 15)
