"""The first experiment: a Boltzmann machine of handwritten digits, learnt in three ways, in about two minutes.

By an inference network, by belief propagation whose messages persist, and by persistent contrastive divergence. It
prints a small table beside the paper's figures and writes ``runs/demo/report.html``.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from bethenet.data import BinaryImages, paper_digits
from bethenet.data.digits import near_copies
from bethenet.experiments.rbm_learning import (
    RECIPES,
    fantasies,
    figures_of,
    gibbs_marginals,
    shortened,
    train,
)
from bethenet.experiments.rbm_tables import show_pictures
from bethenet.formats.text import write_text
from bethenet.learning import Batch
from bethenet.learning.metrics import Record

EPOCHS = {"network": 30, "bp-persistent": 40, "pcd": 60}
PAPER = {"network": (23.43, 14), "bp-persistent": (25.47, 21617), "pcd": (21.24, 1)}
"""Negative log-likelihood and seconds an epoch, as printed in the paper: its own network, cold loopy BP, PCD."""
SHORT = {"network": "inference network", "bp-persistent": "persistent BP", "pcd": "PCD"}


@dataclass(frozen=True)
class Trained:
    """A machine and what there is to say about it."""

    objective: Any
    figures: Record


def train_all(data: BinaryImages, seed: int, share: float, console: Console) -> dict[str, Trained]:
    """Train the three machines, with progress bars, and judge them.

    Args:
        data: the digits.
        seed: of everything random.
        share: of the usual number of epochs.
        console: where the bars are drawn.
    """
    trained = {}
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        plans = {name: shortened(RECIPES[name], max(1, round(share * epochs))) for name, epochs in EPOCHS.items()}
        for name, recipe in plans.items():
            task = bars.add_task(SHORT[name], total=recipe.epochs)

            def tell(record: Record, task: Any = task) -> None:
                if record["kind"] == "epoch":
                    bars.advance(task)

            every = max(1, recipe.epochs // 10)
            objective, result = train(name, recipe, data, seed=seed, evaluate_every=every, callbacks=[tell])
            bars.update(task, description=f"{SHORT[name]}: estimating log Z")
            figures = figures_of(objective, recipe, result, data, temperatures=4000 if share == 1 else 500)
            bars.update(task, description=f"{SHORT[name]}: NLL {figures['nll']:.2f}")
            bars.stop_task(task)
            trained[name] = Trained(objective, figures)
    return trained


def rows_of(trained: dict[str, Trained]) -> list[list[str]]:
    """The table's rows as text."""
    rows = []
    for name, one in trained.items():
        figures, (nll, seconds) = one.figures, PAPER[name]
        rows.append(
            [
                SHORT[name],
                f"{figures['nll']:.2f} ± {figures['ais_error']:.2f}",
                f"{figures['seconds_per_epoch']:.2f}",
                str(figures["epochs"]),
                f"{nll:.2f}",
                str(seconds),
            ]
        )
    return rows


HEADER = ["learnt by", "NLL (nats)", "s/epoch", "epochs", "paper: NLL", "paper: s/epoch"]


def draw_curves(trained: dict[str, Trained]) -> Figure:
    """Rough held-out likelihood by epoch."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, one in trained.items():
        axis.plot(*zip(*one.figures["curve"], strict=True), marker="o", markersize=3, label=SHORT[name])
    axis.set_xlabel("epoch")
    axis.set_ylabel("held-out NLL (nats)")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def draw_filters(trained: dict[str, Trained]) -> Figure:
    """The weights of the 25 strongest hidden units of each machine."""
    figure = Figure(figsize=(10, 3.7), layout=ConstrainedLayoutEngine(wspace=0.08))
    for axis, (name, one) in zip(figure.subplots(1, len(trained)), trained.items(), strict=True):
        weights = one.objective.model.weights.detach()
        show_pictures(axis, weights[:, weights.norm(dim=0).argsort(descending=True)[:25]].t(), signed=True)
        axis.set_title(SHORT[name])
    return figure


def draw_samples(trained: dict[str, Trained], data: BinaryImages, steps: int) -> Figure:
    """Data, and samples of each machine."""
    figure = Figure(figsize=(12, 3.5), layout=ConstrainedLayoutEngine(wspace=0.08))
    first, *others = figure.subplots(1, 1 + len(trained))
    show_pictures(first, data.test[:25].float(), signed=False)
    first.set_title("held-out digits")
    for axis, (name, one) in zip(others, trained.items(), strict=True):
        show_pictures(axis, fantasies(one.objective.model, 25, steps).float(), signed=False)
        axis.set_title(f"samples: {SHORT[name]}")
    return figure


def draw_marginals(trained: dict[str, Trained], data: BinaryImages, share: float) -> Figure:
    """What the network and belief propagation say of the machines they taught, against long Gibbs runs."""
    names = [name for name in trained if name != "pcd"]
    figure = Figure(figsize=(8.6, 4.9), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names)), names, strict=True):
        nodes, pairs = pseudo_marginals(trained[name].objective, data)
        true_nodes, true_pairs = gibbs_marginals(
            trained[name].objective.model, burn_in=round(1000 * share), steps=max(1, round(500 * share))
        )
        axis.plot([0, 1], [0, 1], color="0.75", linewidth=1, zorder=0)
        axis.scatter(true_pairs, pairs, s=2, alpha=0.25, linewidths=0, color="tab:orange")
        axis.scatter(true_nodes, nodes, s=12, linewidths=0, color="tab:blue", label="P(unit = 1)")
        axis.set_aspect("equal")
        axis.set_xlabel("long Gibbs run")
        axis.set_title(SHORT[name])
    figure.axes[0].set_ylabel("pseudo-marginal")
    figure.axes[0].scatter([], [], s=12, linewidths=0, color="tab:orange", label="P(x = 1, z = 1)")
    figure.axes[0].legend(loc="upper left", fontsize=8)
    return figure


def pseudo_marginals(objective: Any, data: BinaryImages) -> tuple[Tensor, Tensor]:
    """P(unit = 1) and P(x = 1, z = 1) as the learner has them at the end."""
    objective.eval()
    with torch.no_grad():
        potentials = objective.model.log_potentials()
        batch = Batch(data.test[:1].float(), 1)
        beliefs = objective.unclamped.estimate(potentials, batch, clamped=False).beliefs
    pairs = next(table for table in beliefs.factor_log_tables if table.dim() == 4)
    return beliefs.node_marginals[0, :, 1], pairs[0, :, 1, 1].exp().reshape(objective.model.visible, -1)


def image(figure: Figure, description: str) -> str:
    """A figure as HTML that needs no other file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f'<img src="data:image/png;base64,{encoded}" alt="{html.escape(description)}">'


def report(trained: dict[str, Trained], data: BinaryImages, share: float) -> str:
    """One HTML page."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADER)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(entry)}</td>" for entry in row) + "</tr>" for row in rows_of(trained)
    )
    steps = max(1, round(2000 * share))
    same, near = near_copies(data.test, data.train)
    sections = [
        (
            "How well they explain digits they have not seen",
            f"<table><tr>{head}</tr>{body}</table>",
            f"Mean negative log-likelihood of {len(data.test)} held-out images (lower is better), by annealed "
            "importance sampling with its standard error. The paper's machines have the same size and data; its "
            "network is a recurrent one with a penalty for inconsistency, its loopy BP starts afresh for every "
            "minibatch, and its seconds are a GPU's. Here the network is a table of node logits whose beliefs are "
            "consistent by construction and refined by five sweeps. Because the paper's split shifts images first and "
            f"splits them then, {same} held-out images are also training images, and {near} are a training image moved "
            "by one pixel.",
        ),
        (
            "Learning curves",
            image(draw_curves(trained), "held-out likelihood by epoch"),
            "Rough estimates along the way (100 chains, 500 temperatures).",
        ),
        (
            "Filters",
            image(draw_filters(trained), "weights of hidden units"),
            "Each square is one hidden unit's weights to the 8 x 8 pixels, the 25 strongest of 100. Grey pushes a "
            "pixel towards ink, red away from it.",
        ),
        (
            "Samples",
            image(draw_samples(trained, data, steps), "digits drawn from the machines"),
            f"Where Gibbs chains of each machine are after {steps} steps.",
        ),
        (
            "Pseudo-marginals against the truth",
            image(draw_marginals(trained, data, share), "pseudo-marginals against long-run frequencies"),
            "What each method believes about the machine it taught, against frequencies over long Gibbs runs. A fixed "
            "point of the Bethe free energy describes one of the machine's modes (one kind of digit, say), the "
            "Gibbs runs describe them all: so the points need not lie on the line. While the machine is learning, the "
            "persistent state wanders from mode to mode, which is why it can teach so well all the same.",
        ),
    ]
    content = "\n".join(f"<h2>{title}</h2>\n{figure}\n<p>{html.escape(text)}</p>" for title, figure, text in sections)
    suggestions = "".join(f"<li>{html.escape(text)}<br><code>{html.escape(code)}</code></li>" for text, code in NEXT)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>bethenet: three ways to learn a Boltzmann machine</title>
<style>body {{ font-family: sans-serif; max-width: 58rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.5 }}
img {{ max-width: 100%; height: auto }} table {{ border-collapse: collapse }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ccc }}
th:first-child, td:first-child {{ text-align: left }}
code {{ background: #f2f2f2; padding: .1rem .3rem }}</style></head>
<body>
<h1>Three ways to learn a Boltzmann machine</h1>
<p>A restricted Boltzmann machine of 64 pixels and 100 hidden units, trained on {len(data.train)} handwritten digits.
Its likelihood needs the partition function Z, which cannot be computed; the three ways differ in what they put in its
place: an inference network's beliefs, messages of belief propagation that persist between updates, or samples of Markov
chains.</p>
{content}
<h2>What to try next</h2>
<ul>{suggestions}</ul>
</body>
</html>
"""


NEXT = [
    ("The whole of the paper's table 3, with several seeds and both splits:", ".venv/bin/bethenet reproduce table3"),
    ("Other seeds:", ".venv/bin/python -m bethenet.experiments.demo --seed 1"),
    ("Read how each machine is set up:", "src/bethenet/experiments/rbm_learning.py"),
]


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description="A Boltzmann machine of handwritten digits, learnt in three ways.")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="where the report goes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (%(default)s)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the usual epochs, for a quicker look (%(default)s)"
    )
    options = parser.parse_args()
    if not 0 < options.share <= 1:
        parser.error(f"--share: expected more than 0 and at most 1, got {options.share}")
    console = Console()
    console.print("Learning a Boltzmann machine of handwritten digits in three ways; about two minutes on two cores.")
    data = paper_digits()
    trained = train_all(data, options.seed, options.share, console)
    table = Table(*HEADER, title="Held-out digits")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows_of(trained):
        table.add_row(*row)
    console.print(table)
    console.print("Drawing the report (long Gibbs runs) ...")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "report.html"
    write_text(path, report(trained, data, options.share))
    console.print(f"\nOpen [bold]{path}[/bold] for curves, filters, samples and marginals.")
    console.print("What to try next:")
    for text, code in NEXT:
        console.print(f"  {text}\n    [bold]{code}[/bold]")


if __name__ == "__main__":
    torch.set_num_threads(1)  # at 64 x 100 threads spend more on waiting for each other than they save
    main()
