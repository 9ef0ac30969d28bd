"""All inference engines on the same models: accuracy against time. Writes the figures of docs/inference.md.

    python benchmarks/engines.py [--report]

10 x 10 binary grids, fields N(0, 1), couplings N(0, sd^2): a batch of 50 models for each sd, in double precision on one
thread. The error is the mean absolute difference from exact marginals over P(x_i = 1) and P(x_i = 1, x_j = 1) of one
model, then averaged over models. Every iterative engine runs with a growing limit of iterations, each time from its
start; a time is the processor's for the whole batch divided by its size, the least of several runs after a first one.
``--report`` measures nothing: it draws the figure and writes the table again from what was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from bethenet import FactorGraph, LogPotentials
from bethenet.evaluation import accuracy, marginals_of_ones
from bethenet.experiments.runner import environment, markdown_table, mean_and_error, write_json, write_text
from bethenet.inference.registry import make_engine
from bethenet.models.ising import IsingModel
from bethenet.result import InferenceResult

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "results" / "engines" / "engines.json"
FIGURE = ROOT / "docs" / "figures" / "engines.png"
PAGE = ROOT / "docs" / "inference.md"
BEGIN, END = "<!-- written by benchmarks/engines.py: begin -->", "<!-- end -->"

SIDE, MODELS, SEED = 10, 50, 11
SCALES = (1.0, 3.0)
LIMITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Iterations; engines go on to the first limit within which all members stop."""
LONGEST = 8.0
"""Seconds: no higher limit is tried after a run that took so long."""

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("exact", {}),
    "bp, flooding": ("bp", {}),
    "bp, sweep": ("bp", {"schedule": "sweep"}),
    "bp, residual": ("bp", {"schedule": "residual"}),
    "trw": ("trw", {}),
    "gbp": ("gbp", {}),
    "gbp, plaquettes": ("gbp", {"clusters": "plaquettes"}),
    "mean field": ("mean-field", {}),
    "mean field, 10 starts": ("mean-field", {"restarts": 10}),
    "descent": ("descent", {}),
}


def models(scale: float) -> LogPotentials:
    graph, generator = FactorGraph.grid(SIDE, SIDE), torch.Generator().manual_seed(SEED)
    random = IsingModel.random(graph, coupling_scale=scale, models=MODELS, generator=generator, dtype=torch.float64)
    return random.requires_grad_(False).log_potentials()


def timed(engine: Any, potentials: LogPotentials) -> tuple[InferenceResult, float]:
    times: list[float] = []
    while len(times) < 2 or (len(times) < 4 and sum(times) < 0.5):
        started = time.process_time()
        result = engine.run(potentials, generator=torch.Generator().manual_seed(0))
        times.append(time.process_time() - started)
        if times[-1] > LONGEST:
            break
    return result, min(times[1:] or times) / potentials.batch_size


def measure(method: str, options: dict[str, Any], potentials: LogPotentials, truth: InferenceResult) -> dict[str, Any]:
    """One engine on one batch: a point for each limit of iterations, and more about the last."""
    true = marginals_of_ones(truth.beliefs).together
    limits: tuple[int | None, ...] = (None,) if method == "exact" else LIMITS
    points = []
    for limit in limits:
        # descent's own first start is belief propagation, which counts among its time
        engine = make_engine(method, options | ({} if limit is None else {"max_iterations": limit}))
        result, seconds = timed(engine, potentials)
        found = accuracy(marginals_of_ones(result.beliefs).together, true)
        points.append({"iterations": limit, "seconds": seconds, "mean_l1": float(found.mean_l1.mean())})
        if bool(result.converged.all()) or seconds * potentials.batch_size > LONGEST:
            break
    return {
        "engine": repr(make_engine(method, options)),
        "points": points,
        "mean_l1": found.mean_l1.tolist(),
        "correlation": found.correlation.tolist(),
        "log_z_excess": (result.log_z - truth.log_z).tolist(),
        "converged": int(result.converged.sum()),
        "inconsistency": float(result.beliefs.inconsistency().max()),
    }


def measure_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment("cpu"),
        "models": {"side": SIDE, "count": MODELS, "seed": SEED},
        "scales": {},
    }
    for scale in SCALES:
        potentials = models(scale)
        truth = make_engine("exact", {}).run(potentials)
        rows = {}
        for name, (method, options) in ENGINES.items():
            started = time.process_time()
            rows[name] = measure(method, options, potentials, truth)
            last = rows[name]["points"][-1]
            taken = time.process_time() - started
            print(f"sd {scale:g} {name:22} L1 {last['mean_l1']:.5f} {1e3 * last['seconds']:8.2f} ms ({taken:.0f} s)")
        record["scales"][f"{scale:g}"] = rows
    return record


# --- the report ---------------------------------------------------------------------------------------------------


def draw(record: dict[str, Any]) -> None:
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    axes = figure.subplots(1, len(SCALES), sharex=True, sharey=True)
    for axis, (scale, rows) in zip(axes, record["scales"].items(), strict=True):
        for number, (name, row) in enumerate(rows.items()):
            times = [1e3 * point["seconds"] for point in row["points"]]
            if name == "exact":
                axis.axvline(times[-1], color="black", linestyle=":", linewidth=1.2, label="exact (no error)")
                continue
            errors = [point["mean_l1"] for point in row["points"]]
            style = "--" if "," in name and "flooding" not in name else "-"
            (line,) = axis.plot(times, errors, style, color=f"C{number - 1}", linewidth=1.4, label=name)
            axis.plot(times[-1:], errors[-1:], "o", color=line.get_color(), markersize=6)
        axis.set(xscale="log", yscale="log", title=f"couplings of standard deviation {scale}")
        axis.grid(True, which="major", linewidth=0.4, alpha=0.6)
    axes[0].set_ylabel("mean absolute error of marginals")
    figure.supxlabel("milliseconds of processor time a model (batch of 50, one thread)", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=130)


def table(record: dict[str, Any]) -> str:
    parts = []
    for scale, rows in record["scales"].items():
        lines = []
        for name, row in rows.items():
            error, spread = mean_and_error(row["mean_l1"])
            excess = [abs(value) for value in row["log_z_excess"] if value is not None and math.isfinite(value)]
            lines.append(
                [
                    name,
                    "0" if name == "exact" else f"{error:.2g} ± {spread:.1g}",
                    f"{mean_and_error(row['correlation'])[0]:.4f}",
                    "0" if name == "exact" else f"{mean_and_error(excess)[0]:.2g}",
                    f"{row['converged']} of {record['models']['count']}",
                    f"{1e3 * row['points'][-1]['seconds']:.1f}",
                ]
            )
        header = ["engine", "mean L1", "correlation", "error of log Z (nats)", "converged", "ms a model"]
        parts.append(f"Couplings of standard deviation {scale}:\n\n{markdown_table(header, lines)}")
    made = record["environment"]
    note = f"PyTorch {made['torch']} on {made['processor']}, {made['date']}; ± is the standard error over models.\n"
    return "\n".join([*parts, note])


def write_page(record: dict[str, Any]) -> None:
    """Put the table between the page's two markers."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    write_text(PAGE, f"{before}{BEGIN}\n{table(record)}{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="measure nothing; draw and write again")
    if not parser.parse_args().report:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        write_json(RECORD, measure_all())
    record = json.loads(RECORD.read_text())
    draw(record)
    if PAGE.exists():
        write_page(record)


if __name__ == "__main__":
    main()
