"""More states than exact learning can pay for: validation likelihood against training time as K grows.

Both methods have the same time to train in. Exact learning costs K^4 a step of a sentence, Kikuchi's K^3 (and one
sentence a minibatch K^4); all are evaluated exactly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bethenet.experiments.hmm_learning import UNIGRAM, UNIGRAM_LABEL, cells_of
from bethenet.experiments.hmm_methods import Recipe
from bethenet.experiments.hmm_tables import RECIPES as ROWS
from bethenet.experiments.runner import Cell, Experiment, Settings, markdown_table, write_text

Figures = dict[str, dict[str, Any]]

SECONDS = {30: 30.0, 128: 40.0, 256: 90.0}
"""Of training, for each K."""
QUICK_SECONDS = {4: 2.0, 6: 2.0, 8: 2.0}
METHODS = {"exact": "-", "kikuchi": "--"}
"""Rows of table 4 and how their curves are drawn."""
NOTE = """
Nats per sentence, exact. Each curve is one seed. Seconds of training, evaluations not counted, are limited alike for
both methods ({limits}); the learning rate falls by the clock, and the epoch was chosen on
the validation text. Matrix products in training have 10 bits of precision on a GPU (TF32). `inconsistency` and the
sizes of the couplings are those of table 4.
"""


def recipes_for(settings: Settings) -> dict[str, Recipe]:
    """A recipe a curve, by name: those of table 4, limited by time."""
    curves = {}
    for method in METHODS:
        row = replace(ROWS[method], epochs=None, precision="high")
        if settings.quick:
            row = replace(row, embedding=16, learning_rate=0.01, warmup=10, penalty_steps=20)
        for states, seconds in limits_for(settings).items():
            label = f"{row.label.rpartition(': ')[2]}, K = {states}"
            every = 4 if states > 200 else 1  # an evaluation costs more than an epoch
            penalties = row.penalties
            if method == "kikuchi":
                # they are on means over pairs of states: a pair that only messages like costs as much whatever K
                penalties = tuple(weight * (states / row.states) ** 2 for weight in penalties)
            curves[f"{method}-{states}"] = replace(
                row, states=states, label=label, time_limit=seconds, evaluate_every=every, penalties=penalties
            )
    return curves


def limits_for(settings: Settings) -> dict[int, float]:
    """Numbers of states, and seconds of training."""
    return QUICK_SECONDS if settings.quick else SECONDS


def seeds_of(settings: Settings) -> range:
    """One unless said otherwise."""
    return range(settings.seeds or 1)


def cells(settings: Settings) -> list[Cell]:
    """A cell for every curve and seed, and the control."""
    return cells_of("states", recipes_for(settings), seeds_of(settings), settings)


def _report(settings: Settings, figures: Figures) -> list[Path]:
    return [_write_table(settings, figures), _draw(settings, figures)]


def _write_table(settings: Settings, figures: Figures) -> Path:
    rows = []
    if control := figures.get(UNIGRAM):
        rows.append([UNIGRAM_LABEL, f"{control['nll_validation']:.2f}", f"{control['nll_test']:.2f}", *["-"] * 6])
    for name, recipe in recipes_for(settings).items():
        for seed in seeds_of(settings):
            rows.append([recipe.label, *_row(figures.get(f"{name}-seed{seed}"))])
    header = ["", "NLL, validation", "NLL, test", "objective", "epochs", "seconds an epoch"]
    header += ["inconsistency", "couplings by lag", "ended"]
    path = settings.output / "states.md"
    limits = ", ".join(f"{seconds:g} for K = {states}" for states, seconds in limits_for(settings).items())
    note = NOTE.format(limits=limits)
    write_text(path, f"# states: more states in the same time\n\n{markdown_table(header, rows)}{note}")
    return path


def _row(cell: dict[str, Any] | None) -> list[str]:
    if cell is None:
        return ["not run", *["-"] * 7]
    sizes = ", ".join(f"{size:.2f}" for size in cell["couplings"])
    return [
        _number(cell["nll_validation"]),
        _number(cell["nll_test"]),
        _number(cell["objective_validation"]),
        f"{cell['epochs']}",
        _number(cell["seconds_per_epoch"], 1),
        _number(cell["inconsistency"], 4),
        sizes,
        cell["status"],
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _draw(settings: Settings, figures: Figures) -> Path:
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axis = figure.subplots()
    states = list(limits_for(settings))
    reached = []
    for name, recipe in recipes_for(settings).items():
        for seed in seeds_of(settings):
            cell = figures.get(f"{name}-seed{seed}")
            points = [] if cell is None else [(r["seconds"], r["nll"]) for r in cell["history"] if r["nll"] is not None]
            if not points:
                continue
            reached += [nll for _, nll in points]
            style, colour = METHODS[name.rpartition("-")[0]], f"C{states.index(recipe.states)}"
            axis.plot(*zip(*points, strict=True), style, color=colour, marker=".", label=recipe.label)
    if reached:
        axis.set_xscale("log")
        axis.set_ylim(0.99 * min(reached), min(1.2 * min(reached), 1.01 * max(reached)))
        axis.legend(fontsize=8)
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("nats per sentence, validation")
    path = settings.output / "states.png"
    figure.savefig(path, dpi=130)
    return path


LARGER = Experiment("states", "Hidden Markov models of more states", cells, _report, partial=True)
