"""Tables 1 and 5 and figure 2 of the paper, from the figures of `bethenet.experiments.ising_inference`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from bethenet.evaluation import accuracy
from bethenet.experiments.ising_inference import METHODS, cells, sizes_for
from bethenet.experiments.runner import Experiment, Settings, markdown_table, mean_and_error, write_text

Figures = dict[str, dict[str, Any]]

PAPER: dict[tuple[float, str], dict[int, tuple[float | None, float | None]]] = {
    (1.0, "mean-field"): {5: (0.835, 0.128), 10: (0.854, 0.123), 15: (0.833, 0.132)},
    (1.0, "bp"): {5: (0.950, 0.057), 10: (0.946, 0.064), 15: (0.942, 0.065)},
    (1.0, "penalized"): {5: (0.988, 0.032), 10: (0.984, 0.037), 15: (0.981, 0.040)},
    (3.0, "mean-field"): {5: (0.415, None), 10: (0.460, None), 15: (0.435, None)},
    (3.0, "bp"): {5: (0.592, None), 10: (0.641, None), 15: (0.665, None)},
    (3.0, "penalized"): {5: (0.761, None), 10: (0.770, None), 15: (0.738, None)},
    (5.0, "mean-field"): {5: (0.302, None), 10: (0.358, None), 15: (0.362, None)},
    (5.0, "bp"): {5: (0.509, None), 10: (0.525, None), 15: (0.459, None)},
    (5.0, "penalized"): {5: (0.614, None), 10: (0.619, None), 15: (0.564, None)},
}
"""Correlation and mean L1 as printed in the paper (tables 1 and 5)."""
NOTE = """
Mean over models with its standard error; in parentheses the paper's figure. Correlation and L1 are over
P(x_i = 1) and P(x_i = 1, x_j = 1) together. The paper's figures for loopy BP come from pairwise marginals
that added messages where their logarithms should have been added: they say nothing about loopy BP.
"""


def write_table(settings: Settings, figures: Figures, name: str, scales: tuple[float, ...]) -> list[Path]:
    """Correlation and mean L1 by method and size beside the paper's, as Markdown."""
    parts = [f"# {name}: marginals of random Ising grids\n"]
    for scale in scales:
        for quantity, title in (("correlation", "Correlation"), ("mean_l1", "Mean L1")):
            rows = [
                [label, *(_entry(figures, method, size, scale, quantity) for size in sizes_for(settings))]
                for method, label in METHODS.items()
            ]
            header = ["method", *(f"n = {size}" for size in sizes_for(settings))]
            parts.append(f"\n## {title}, coupling sd {scale:g}\n\n{markdown_table(header, rows)}")
        parts.append(f"\n## Nodes and pairs apart, coupling sd {scale:g}\n\n{_details(settings, figures, scale)}")
    path = settings.output / f"{name}.md"
    write_text(path, "".join(parts) + NOTE)
    return [path]


def _entry(figures: Figures, method: str, size: int, scale: float, quantity: str) -> str:
    mean, error = mean_and_error(figures[f"{method}-n{size}-sd{scale:g}"][f"{quantity}_all"])
    paper = PAPER.get((scale, method), {}).get(size, (None, None))[quantity == "mean_l1"]
    return f"{mean:.4f} ± {error:.4f}" + (f" ({paper:.3f})" if paper is not None else "")


def _details(settings: Settings, figures: Figures, scale: float) -> str:
    rows = []
    for method, label in METHODS.items():
        for size in sizes_for(settings):
            cell = figures[f"{method}-n{size}-sd{scale:g}"]
            names = [f"{quantity}_{part}" for part in ("nodes", "pairs") for quantity in ("correlation", "mean_l1")]
            entries = [f"{mean_and_error(cell[name])[0]:.4f}" for name in names]
            done = f"{cell['converged']} of {len(cell['log_z'])}" if "converged" in cell else "-"
            rows.append([f"{label}, n = {size}", *entries, done, f"{cell['seconds_per_model']:.4f}"])
    header = ["", "nodes: corr.", "nodes: L1", "pairs: corr.", "pairs: L1", "converged", "seconds a model"]
    return markdown_table(header, rows)


def draw_scatter(settings: Settings, figures: Figures) -> list[Path]:
    """Figure 2: approximate (x) against true (y) marginals of one model, nodes above pairs, a column a method."""
    size = sizes_for(settings)[-1]
    figure = Figure(figsize=(3.1 * len(METHODS), 6.6), layout="constrained")
    axes = figure.subplots(2, len(METHODS), sharex=True, sharey=True)
    for column, (method, label) in enumerate(METHODS.items()):
        marginals = figures[f"{method}-n{size}-sd1"]["first_model"]
        for row, kind in enumerate(("nodes", "pairs")):
            found, true = (torch.tensor(values, dtype=torch.float64) for values in marginals[kind])
            axis = axes[row][column]
            axis.plot([0, 1], [0, 1], color="0.75", linewidth=1, zorder=0)
            axis.scatter(found, true, s=9, alpha=0.5, linewidths=0, color="tab:blue" if row == 0 else "tab:orange")
            correlation = accuracy(found.unsqueeze(0), true.unsqueeze(0)).correlation
            axis.set_title(f"{label}\n{kind}: ρ = {float(correlation):.4f}", fontsize=10)
            axis.set_aspect("equal")
    figure.supxlabel("approximate marginal")
    figure.supylabel("true marginal")
    path = settings.output / "figure2.png"
    figure.savefig(path, dpi=130)
    return [path]


def _table(name: str, title: str, scales: tuple[float, ...]) -> Experiment:
    def report(settings: Settings, figures: Figures) -> list[Path]:
        return write_table(settings, figures, name, scales)

    return Experiment(name, title, lambda settings: cells(settings, scales, sizes_for(settings), METHODS), report)


TABLE_1 = _table("table1", "Marginals of random Ising grids", (1.0,))
TABLE_5 = _table("table5", "Marginals of strongly coupled Ising grids", (3.0, 5.0))
FIGURE_2 = Experiment(
    "figure2",
    "True against approximate marginals of one Ising grid",
    lambda settings: cells(replace(settings, seeds=1), (1.0,), sizes_for(settings)[-1:], METHODS),
    draw_scatter,
)
