"""Table 4 of the paper, from the figures of `bethenet.experiments.hmm_learning`, and the curves behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bethenet.experiments.hmm_learning import UNIGRAM, UNIGRAM_LABEL, cells, recipes_for, seeds_of
from bethenet.experiments.runner import Experiment, Settings, markdown_table, mean_and_error, write_text

Figures = dict[str, dict[str, Any]]

PAPER: dict[str, tuple[float, float, int, int]] = {
    "directed-exact": (105.66, 105.66, 20, 137),
    "mean-field": (119.27, 175.46, 14, 82),
    "iwae": (119.20, 167.71, 5, 876),
    "first-order-vae": (118.35, 118.88, 12, 187),
    "exact": (104.07, 104.07, 20, 122),
    "bp": (108.74, 99.89, 20, 247),
    "network": (115.86, 114.75, 11, 70),
}
"""NLL, -ELBO or l_F, epochs to converge and seconds an epoch as printed in the paper."""
NOTE = """
Nats per sentence, mean over seeds with its standard error; in parentheses the paper's figure. NLL is exact, by dynamic
programming. The epoch was chosen on the validation text (the paper's figures are of the set that chose them); the test
text chose nothing. The objective (-ELBO, or l_F; -log-likelihood where learning is exact) is of the validation text at
that epoch. Seconds an epoch are of training alone. Inconsistency is the largest disagreement of a pair's belief with a
single state's, mean over minibatches. Couplings are the standard deviations of the double-centred log-potentials of
each lag: where those of lags 2 and 3 are near 0, the model is one of first order, whatever its name.

The paper's figures for the mean-field VAEs are not of bounds: the authors' code added probabilities where their
logarithms should have been added.
"""


def write_table(settings: Settings, figures: Figures) -> list[Path]:
    """All rows beside the paper's, as Markdown."""
    control = figures[UNIGRAM]
    nll = f"{control['nll_validation']:.2f}"
    rows = [[UNIGRAM_LABEL, nll, f"{control['nll_test']:.2f}", *["-"] * 3]]
    details = []
    for name, recipe in recipes_for(settings).items():
        found = [figures[f"{name}-seed{seed}"] for seed in seeds_of(settings)]
        # a quick run is on another text
        paper = None if settings.quick else PAPER.get(name)
        rows.append(
            [
                recipe.label,
                _entry(found, "nll_validation", paper and paper[0]),
                _entry(found, "nll_test"),
                _entry(found, "objective_validation", paper and paper[1]),
                _entry(found, "best_epoch", paper and paper[2], digits=0),
                _entry(found, "seconds_per_epoch", paper and paper[3], digits=1),
            ]
        )
        lags = [
            _text([cell["couplings"][lag] if lag < len(cell["couplings"]) else None for cell in found], 3)
            for lag in range(3)
        ]
        gap = _text([cell["inconsistency"] for cell in found], 4)
        ended = ", ".join(sorted({cell["status"] for cell in found}))
        details.append([recipe.label, gap, *lags, ended])
    header = ["", "NLL, validation", "NLL, test", "-ELBO or l_F", "epochs", "seconds an epoch"]
    more = ["", "inconsistency", "coupling, lag 1", "lag 2", "lag 3", "ended"]
    title = "# table4: third-order hidden Markov models\n\n"
    path = settings.output / "table4.md"
    write_text(path, f"{title}{markdown_table(header, rows)}\n{markdown_table(more, details)}{NOTE}")
    return [path]


def _entry(found: list[dict[str, Any]], name: str, paper: float | None = None, digits: int = 2) -> str:
    text = _text([cell[name] for cell in found], digits)
    return text if paper is None else f"{text} ({paper:g})"


def _text(values: list[float | None], digits: int) -> str:
    if all(value is None for value in values):
        return "-"
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def draw_curves(settings: Settings, figures: Figures) -> list[Path]:
    """Exact validation NLL, and the objective that was descended on (dashed), against training time; the first seed."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, recipe in recipes_for(settings).items():
        axis = left if recipe.directed else right
        history = figures[f"{name}-seed0"]["history"]
        seconds = [record["seconds"] for record in history]
        lines = axis.plot(seconds, [_number(record["nll"]) for record in history], label=recipe.label)
        values = [_number(record["validation_objective"]) for record in history]
        axis.plot(seconds, values, linestyle="--", linewidth=1, color=lines[0].get_color())
    low = min(cell["nll_validation"] for cell in figures.values() if cell["nll_validation"] is not None)
    for axis in (left, right):
        if any(len(line.get_xdata()) for line in axis.lines):
            axis.set_xscale("log")
        axis.set_ylim(0.95 * low, 1.25 * low)
        axis.set_xlabel("seconds of training")
        axis.axhline(figures[UNIGRAM]["nll_validation"], color="0.75", linewidth=1, zorder=0)
        axis.legend(fontsize=7)
    left.set_ylabel("nats per sentence, validation")
    path = settings.output / "table4.png"
    figure.savefig(path, dpi=130)
    return [path]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _report(settings: Settings, figures: Figures) -> list[Path]:
    return [*write_table(settings, figures), *draw_curves(settings, figures)]


TABLE_4 = Experiment("table4", "Learning third-order hidden Markov models", cells, _report)
