"""Table 2 of the paper, from the figures of `bethenet.experiments.ising_learning`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bethenet.experiments.ising_learning import METHODS, cells, sizes_for
from bethenet.experiments.runner import Experiment, Settings, markdown_table, mean_and_error, write_text

Figures = dict[str, dict[str, Any]]

PAPER = {
    "true_nll": {5: 6.27, 10: 25.76, 15: 51.80},
    "initial_nll": {5: 45.62, 10: 162.53, 15: 365.36},
    "exact": {5: 6.30, 10: 25.89, 15: 52.24},
    "mean-field": {5: 7.35, 10: 29.70, 15: 60.03},
    "bp": {5: 7.17, 10: 28.34, 15: 59.79},
    "bp-cold": {5: 7.17, 10: 28.34, 15: 59.79},
    "penalized": {5: 6.47, 10: 26.80, 15: 54.91},
}
"""Held-out NLL (nats) as printed in the paper: of random models that are not these ones."""
GOAL = 1.0
"""The gap to exact learning (per cent) that networks and belief propagation are to keep within."""
NOTE = """
NLL: nats per held-out sample, log Z exact; mean over the models with its standard error, which is mostly the spread of
the models' entropies. Gap: mean over models of (NLL - NLL of exact learning) / NLL of exact learning, with its standard
error; in parentheses the same of the paper's means. Steps and penalty strength were chosen for each model by the exact
NLL of its validation samples, for all methods alike; "by pseudo-NLL": the gap where they are chosen by the validation
samples' pseudo-likelihood, which needs no log Z. l_F: the training objective at the chosen model, as its method sees
it; below the true entropy, the model exploits the approximation. Inconsistency: largest disagreement between beliefs
about a variable or pair. Seconds: of training all models under all penalty strengths at once; on a shared machine
these are rough.
"""


def write_table(settings: Settings, figures: Figures) -> list[Path]:
    """Held-out NLL by method and size beside the paper's, then the details of every size, as Markdown; and a plot."""
    sizes = sizes_for(settings)
    rows = []
    for name, label in (("true_nll", "True model"), ("initial_nll", "Random start")):
        values = {size: figures[f"exact-n{size}"][name] for size in sizes}
        rows.append([label, *(_nll(values[size], PAPER[name].get(size)) for size in sizes)])
    for method, label in METHODS.items():
        values = {size: _selected(figures, method, size)["test_nll"] for size in sizes}
        rows.append([label, *(_nll(values[size], PAPER.get(method, {}).get(size)) for size in sizes)])
    header = ["", *(f"n = {size}" for size in sizes)]
    parts = ["# table2: learning random Ising grids\n\n## Held-out NLL (in parentheses the paper's)\n\n"]
    parts.append(markdown_table(header, rows))
    parts.append(f"\n{_who_reaches_the_goal(figures, sizes)}")
    for size in sizes:
        parts.append(f"\n## Details, n = {size}\n\n{_details(figures, size)}")
    path = settings.output / "table2.md"
    write_text(path, "".join(parts) + NOTE)
    return [path, _draw_gaps(settings, figures)]


def _details(figures: Figures, size: int) -> str:
    rows = []
    for method, label in METHODS.items():
        best = _selected(figures, method, size)
        paper = _paper_gap(method, size)
        rows.append(
            [
                label,
                _gap(figures, method, size) + (f" ({paper:.1f})" if paper is not None else ""),
                _gap(figures, method, size, "pseudo_nll"),
                f"{mean_and_error(best['objective'])[0]:.3f}",
                f"{max(best['inconsistency']):.1e}",
                f"{figures[f'{method}-n{size}']['training_seconds']:.0f}",
            ]
        )
    return markdown_table(["", "gap, %", "gap by pseudo-NLL, %", "l_F", "inconsistency", "seconds"], rows)


def _who_reaches_the_goal(figures: Figures, sizes: Sequence[int]) -> str:
    """Which methods keep within `GOAL` of exact learning, as a list in Markdown."""
    lines: dict[str, list[str]] = {"at every n": [], "at some n only": [], "at none": []}
    for method, label in METHODS.items():
        if method == "exact":
            continue
        reached = [size for size in sizes if mean_and_error(_gaps(figures, method, size))[0] <= GOAL]
        if len(reached) == len(sizes):
            lines["at every n"].append(label)
        elif reached:
            lines["at some n only"].append(f"{label}: {', '.join(map(str, reached))}")
        else:
            lines["at none"].append(label)
    told = "".join(f"- {where}: {'; '.join(labels)}\n" for where, labels in lines.items() if labels)
    return f"Mean NLL within {GOAL:g} % of exact learning's:\n\n{told}"


def _draw_gaps(settings: Settings, figures: Figures) -> Path:
    """The gap to exact learning by size, with standard errors; the paper's as crosses."""
    sizes = sizes_for(settings)
    figure = Figure(figsize=(8.2, 4.4), layout="constrained")
    axis = figure.subplots()
    axis.axhline(GOAL, color="0.75", linewidth=1, zorder=0)
    for number, (method, label) in enumerate(METHODS.items()):
        if method == "exact":
            continue
        gaps = [mean_and_error(_gaps(figures, method, size)) for size in sizes]
        means, errors = zip(*gaps, strict=True)
        axis.errorbar(sizes, means, errors, marker="o", markersize=4, capsize=3, label=label, color=f"C{number}")
        paper = [(size, gap) for size in sizes if (gap := _paper_gap(method, size)) is not None]
        if paper and method != "bp-cold":  # the paper has one row of belief propagation
            axis.plot(*zip(*paper, strict=True), "x", color=f"C{number}")
    axis.set_yscale("log", nonpositive="clip")
    axis.set_xticks(sizes)
    axis.set_xlabel("n")
    axis.set_ylabel("held-out NLL above exact learning's, %")
    figure.legend(loc="outside right upper", fontsize=9, title="crosses: the paper's", title_fontsize=9)
    path = settings.output / "table2.png"
    figure.savefig(path, dpi=130)
    return path


def _gaps(figures: Figures, method: str, size: int, criterion: str = "nll") -> list[float]:
    """How far every model's held-out NLL is above that of exact learning, in per cent of it."""
    ours = _selected(figures, method, size, criterion)["test_nll"]
    exact = _selected(figures, "exact", size)["test_nll"]
    return [100 * (value - best) / best for value, best in zip(ours, exact, strict=True)]


def _selected(figures: Figures, method: str, size: int, criterion: str = "nll") -> dict[str, Any]:
    found: dict[str, Any] = figures[f"{method}-n{size}"][f"selected_by_{criterion}"]
    return found


def _nll(values: list[float | None], paper: float | None) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.3f} ± {error:.3f}" + (f" ({paper:.2f})" if paper is not None else "")


def _gap(figures: Figures, method: str, size: int, criterion: str = "nll") -> str:
    mean, error = mean_and_error(_gaps(figures, method, size, criterion))
    return f"{mean:.2f} ± {error:.2f}"


def _paper_gap(method: str, size: int) -> float | None:
    found = PAPER.get(method, {}).get(size)
    return None if found is None else 100 * (found / PAPER["exact"][size] - 1)


TABLE_2 = Experiment("table2", "Learning random Ising grids", cells, write_table)
