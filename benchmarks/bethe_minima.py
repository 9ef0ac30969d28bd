"""The least Bethe free energy on 10 x 10 Ising grids: descent beside belief propagation and mean field.

    python benchmarks/bethe_minima.py [--threads N] [--json FILE]

Fields are N(0, 1). At couplings of standard deviation 1: accuracy of each engine against exact marginals, over 100
models (correlation and mean absolute error over the concatenation of P(x_i = 1) and P(x_i = 1, x_j = 1), each model by
itself, then averaged). At standard deviation 3: of those of 600 models on which belief propagation converges, the
share where descent's free energy is no higher than belief propagation's.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bethenet import FactorGraph, LogPotentials
from bethenet.evaluation import accuracy, marginals_of_ones
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.descent import Descent
from bethenet.inference.exact import Exact
from bethenet.inference.mean_field import MeanField
from bethenet.models.ising import IsingModel
from bethenet.result import InferenceResult

SIDE = 10
SLACK = 1e-6


def models(coupling_scale: float, count: int, seed: int) -> LogPotentials:
    graph, generator = FactorGraph.grid(SIDE, SIDE), torch.Generator().manual_seed(seed)
    random = IsingModel.random(graph, coupling_scale=coupling_scale, models=count, generator=generator)
    return random.log_potentials().detach().to(dtype=torch.float64)


def scores(result: InferenceResult, truth: torch.Tensor) -> dict[str, float]:
    """Means over the models, and standard deviations."""
    found = accuracy(marginals_of_ones(result.beliefs).together, truth)
    return {
        "correlation": found.correlation.mean().item(),
        "correlation_sd": found.correlation.std().item(),
        "mean_l1": found.mean_l1.mean().item(),
        "mean_l1_sd": found.mean_l1.std().item(),
    }


def timed(engine: Any, potentials: LogPotentials) -> tuple[InferenceResult, dict[str, Any]]:
    started = time.perf_counter()
    result = engine.run(potentials)
    return result, {
        "engine": repr(engine),
        "seconds": time.perf_counter() - started,
        "converged": result.converged.double().mean().item(),
        "mean_free_energy": -result.log_z.mean().item(),
        "largest_residual": result.residual.max().item(),
    }


def moderate(seed: int) -> dict[str, Any]:
    potentials = models(1.0, 100, seed)
    truth = marginals_of_ones(Exact().run(potentials).beliefs).together
    rows: dict[str, Any] = {"models": 100, "seed": seed}
    engines = {
        "mean field": MeanField(),
        "mean field, 10 restarts": MeanField(restarts=10),
        "belief propagation": BeliefPropagation(),
        "descent, random start": Descent(first=None),
        "descent": Descent(),
    }
    for name, engine in engines.items():
        result, notes = timed(engine, potentials)
        rows[name] = notes | scores(result, truth)
        print(f"{name:24} {rows[name]['correlation']:.4f} {rows[name]['mean_l1']:.4f} {notes['seconds']:.1f} s")
    return rows


def strong(seed: int) -> dict[str, Any]:
    potentials = models(3.0, 600, seed)
    propagated, notes = timed(BeliefPropagation(max_iterations=3000, tolerance=1e-8, damping=0.5), potentials)
    converged = torch.nonzero(propagated.converged).flatten()
    rows: dict[str, Any] = {"models": 600, "seed": seed, "slack": SLACK, "belief propagation": notes}
    for name, engine in {
        "4 restarts": Descent(restarts=4, max_iterations=400),
        "4 random restarts": Descent(restarts=4, max_iterations=400, first=None),
    }.items():
        result, notes = timed(engine, potentials[converged])
        excess = propagated.log_z[converged] - result.log_z
        rows[name] = notes | {
            "compared_on": len(converged),
            "share_no_higher": (excess <= SLACK).double().mean().item(),
            "largest_excess": excess.max().item(),
            "median_excess": excess.median().item(),
        }
        print(f"{name:24} {rows[name]['share_no_higher']:.3f} of {len(converged)}, excess at most {excess.max():.1e}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": arguments.threads,
        },
        "sd 1": moderate(seed=101),
        "sd 3": strong(seed=103),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
