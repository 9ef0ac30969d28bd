"""Generalised belief propagation on random Ising grids: accuracy against exact marginals, and seconds a model.

    python benchmarks/gbp.py [--device cuda] [--threads N] [--seed N] [--json FILE]

Fields N(0, 1), couplings of a given standard deviation; Pearson's correlation and the mean absolute difference over
P(x_i = 1) and P(x_i = 1, x_j = 1), per model and then averaged. A batch of models is one call; the seconds are the
median of two calls after a first one, so that compiling the graph's wiring (*plan*, the first call's surplus, once
for a graph) does not count. *CPU s* is the processor time, which other programs disturb less. Damped belief propagation
runs beside it on the same models. No other library is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bethenet import FactorGraph, LogPotentials
from bethenet.evaluation import accuracy, marginals_of_ones
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.inference.gbp import GeneralizedBeliefPropagation
from bethenet.models.ising import IsingModel

CASES = ((5, 100), (10, 100), (15, 20))
"""Grid size and number of models."""
SCALES = (1.0, 3.0, 5.0)
"""Standard deviations of the couplings."""
TRUTH_AT_ONCE = 5
REPEATS = 2

ENGINES = {
    "gbp (default)": GeneralizedBeliefPropagation(),
    "gbp, strips of 6": GeneralizedBeliefPropagation(clusters="strips", max_length=6),
    "gbp, plaquettes": GeneralizedBeliefPropagation(clusters="plaquettes"),
    "bp, damped": BeliefPropagation(damping=0.5),
}


def random_models(size: int, scale: float, count: int, seed: int, device: str) -> LogPotentials:
    generator = torch.Generator().manual_seed(seed)
    graph = FactorGraph.grid(size, size)
    model = IsingModel.random(
        graph, coupling_scale=scale, models=count, generator=generator, dtype=torch.float64
    ).requires_grad_(False)
    return model.log_potentials().to(device)


def true_marginals(potentials: LogPotentials) -> torch.Tensor:
    parts = []
    for first in range(0, potentials.batch_size, TRUTH_AT_ONCE):
        beliefs = Exact().run(potentials[first : first + TRUTH_AT_ONCE]).beliefs
        parts.append(torch.cat(marginals_of_ones(beliefs), dim=1))
    return torch.cat(parts)


def measure(size: int, count: int, scale: float, seed: int, device: str) -> list[dict[str, Any]]:
    potentials = random_models(size, scale, count, seed, device)
    truth, rows = true_marginals(potentials), []
    for name, engine in ENGINES.items():
        seconds, busy = [], []
        for _ in range(1 + REPEATS):
            started, before = time.perf_counter(), time.process_time()
            result = engine.run(potentials)
            if potentials.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            busy.append(time.process_time() - before)
        score = accuracy(torch.cat(marginals_of_ones(result.beliefs), dim=1), truth)
        rows.append(
            {
                "engine": name,
                "grid": size,
                "coupling_scale": scale,
                "models": count,
                "converged": int(result.converged.sum()),
                "correlation": float(score.correlation.mean()),
                "lowest_correlation": float(score.correlation.min()),
                "l1": float(score.mean_l1.mean()),
                "l1_standard_error": float(score.mean_l1.std() / count**0.5),
                "iterations_median": int(result.iterations.median()),
                "iterations_most": int(result.iterations.max()),
                "seconds_per_model": statistics.median(seconds[1:]) / count,
                "processor_seconds_per_model": statistics.median(busy[1:]) / count,
                "slowest_seconds_per_model": max(seconds[1:]) / count,
                "plan_seconds": max(seconds[0] - statistics.median(seconds[1:]), 0.0),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "grid", "sd", "engine", "converged", "correlation", "lowest", "L1", "iterations", "s a model", "CPU s"
    )
    for row in rows:
        table.add_row(
            f"{row['grid']} x {row['grid']}",
            f"{row['coupling_scale']:g}",
            row["engine"],
            f"{row['converged']} / {row['models']}",
            f"{row['correlation']:.5f}",
            f"{row['lowest_correlation']:.4f}",
            f"{row['l1']:.5f} +- {row['l1_standard_error']:.5f}",
            f"{row['iterations_median']} (most {row['iterations_most']})",
            f"{row['seconds_per_model']:.4f}",
            f"{row['processor_seconds_per_model']:.4f}",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = [os.getloadavg()[0]]
    rows = []
    for size, count in CASES:
        for scale in SCALES:
            rows += measure(size, count, scale, arguments.seed, arguments.device)
    load.append(os.getloadavg()[0])
    show(rows)
    if arguments.json:
        device = (
            torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
        )
        environment = {
            "command": f"python benchmarks/gbp.py --device {arguments.device} --threads {arguments.threads} "
            f"--seed {arguments.seed}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": device,
            "cores": os.cpu_count(),
            "load_before_and_after": load,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
