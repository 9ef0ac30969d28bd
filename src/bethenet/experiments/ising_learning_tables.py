"""Table 2 of the paper, from the figures of `bethenet.experiments.ising_learning`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bethenet.experiments.ising_learning import METHODS, cells, sizes_for
from bethenet.experiments.runner import Experiment, Settings, markdown_table, mean_and_error, write_text

Figures = dict[str, dict[str, Any]]

PAPER = {
    "true_nll": {5: 6.27, 10: 25.76, 15: 51.80},
    "initial_nll": {5: 45.62, 10: 162.53, 15: 365.36},
    "exact": {5: 6.30, 10: 25.89, 15: 52.24},
    "mean-field": {5: 7.35, 10: 29.70, 15: 60.03},
    "bp": {5: 7.17, 10: 28.34, 15: 59.79},
    "penalized": {5: 6.47, 10: 26.80, 15: 54.91},
}
"""Held-out NLL (nats) as printed in the paper: of random models that are not these ones."""
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
    """Held-out NLL by method and size beside the paper's, then the details of every size, as Markdown."""
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
    for size in sizes:
        parts.append(f"\n## Details, n = {size}\n\n{_details(figures, size)}")
    path = settings.output / "table2.md"
    write_text(path, "".join(parts) + NOTE)
    return [path]


def _details(figures: Figures, size: int) -> str:
    exact = _selected(figures, "exact", size)["test_nll"]
    rows = []
    for method, label in METHODS.items():
        best = _selected(figures, method, size)
        other = _selected(figures, method, size, "pseudo_nll")
        paper = _paper_gap(method, size)
        rows.append(
            [
                label,
                _gap(best["test_nll"], exact) + (f" ({paper:.1f})" if paper is not None else ""),
                _gap(other["test_nll"], exact),
                f"{mean_and_error(best['objective'])[0]:.3f}",
                f"{max(best['inconsistency']):.1e}",
                f"{figures[f'{method}-n{size}']['training_seconds']:.0f}",
            ]
        )
    return markdown_table(["", "gap, %", "gap by pseudo-NLL, %", "l_F", "inconsistency", "seconds"], rows)


def _selected(figures: Figures, method: str, size: int, criterion: str = "nll") -> dict[str, Any]:
    found: dict[str, Any] = figures[f"{method}-n{size}"][f"selected_by_{criterion}"]
    return found


def _nll(values: list[float | None], paper: float | None) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.3f} ± {error:.3f}" + (f" ({paper:.2f})" if paper is not None else "")


def _gap(values: list[float], exact: list[float]) -> str:
    mean, error = mean_and_error([100 * (value - best) / best for value, best in zip(values, exact, strict=True)])
    return f"{mean:.2f} ± {error:.2f}"


def _paper_gap(method: str, size: int) -> float | None:
    found = PAPER.get(method, {}).get(size)
    return None if found is None else 100 * (found / PAPER["exact"][size] - 1)


TABLE_2 = Experiment("table2", "Learning random Ising grids", cells, write_table)
