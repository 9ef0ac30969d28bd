"""A first experiment: a picture under noise, and what exact inference makes of it.

Each pixel of a 16 x 16 picture is a variable; neighbours prefer to be equal, and each pixel's noisy observation is
soft evidence about it. The marginals are drawn beside the picture, in ``runs/demo/``.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bethenet.formats.text import write_bytes, write_text
from bethenet.graph import FactorGraph
from bethenet.inference.exact import Exact
from bethenet.potentials import LogPotentials

HEART = """
................
................
...###....###...
..#####..#####..
.##############.
.##############.
.##############.
.##############.
..############..
...##########...
....########....
.....######.....
......####......
.......##.......
................
................
"""
FLIPPED = 0.15
"""Probability that a pixel is observed wrongly."""
COUPLING = 0.5
"""Log-odds (nats), halved, of two neighbours being equal."""


def heart() -> Bool[Tensor, "rows columns"]:
    """The picture: true where there is ink."""
    return torch.tensor([[pixel == "#" for pixel in line] for line in HEART.split()])


def model_of(noisy: Bool[Tensor, "rows columns"]) -> LogPotentials:
    """Neighbours that prefer to be equal, and what each noisy pixel says about the true one."""
    rows, columns = noisy.shape
    right, wrong = torch.tensor([1 - FLIPPED, FLIPPED], dtype=torch.float64).log()
    ink = torch.where(noisy, right, wrong)
    paper = torch.where(noisy, wrong, right)
    unary = torch.stack([paper, ink], dim=-1).reshape(1, rows * columns, 2)
    pairs = torch.tensor([[COUPLING, -COUPLING], [-COUPLING, COUPLING]], dtype=torch.float64)
    return LogPotentials(FactorGraph.grid(rows, columns), [unary, pairs.reshape(1, 1, 2, 2)])


def draw(panels: list[tuple[str, Float[Tensor, "rows columns"]]]) -> bytes:
    """A PNG of pictures side by side, and what their greys mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels) + 0.8, 3.6), layout="constrained")
    for axis, (title, picture) in zip(axes, panels, strict=True):
        image = axis.imshow(picture.numpy(), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(title, fontsize=11)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(image, ax=axes, label="probability of ink", shrink=0.85)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    pyplot.close(figure)
    return buffer.getvalue()


def report(picture: bytes, sentences: list[str]) -> str:
    """One HTML page that needs no other file."""
    encoded = base64.b64encode(picture).decode()
    paragraphs = "\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>bethenet: a heart under noise</title>
<style>body {{ font-family: sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.5 }}
img {{ max-width: 100%; height: auto }}</style></head>
<body>
<h1>A heart under noise</h1>
<img src="data:image/png;base64,{encoded}"
 alt="The picture, the picture under noise, and each pixel's probability of ink">
{paragraphs}
</body>
</html>
"""


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description="A heart under noise, restored by exact inference.")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="where the results go (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (%(default)s)")
    options = parser.parse_args()
    picture = heart()
    generator = torch.Generator().manual_seed(options.seed)
    noisy = picture ^ (torch.rand(picture.shape, generator=generator) < FLIPPED)
    model = model_of(noisy)
    result = Exact().run(model)
    marginals = result.beliefs.node_marginals[0, :, 1].reshape(picture.shape)
    restored = marginals > 0.5
    sentences = [
        f"{int((noisy != picture).sum())} of {picture.numel()} pixels were observed wrongly. Taking each pixel's more "
        f"probable colour, {int((restored != picture).sum())} are still wrong.",
        f"The model is a grid of {model.graph.num_variables} binary variables and {model.graph.num_factors} factors. "
        f"Its log partition function is {result.log_z.item():.4f} nats; exact inference took "
        f"{result.seconds:.2f} seconds.",
        f"A pixel is observed wrongly with probability {FLIPPED}; neighbours are coupled with strength {COUPLING}; the "
        f"noise has seed {options.seed}.",
    ]
    panels = [("the picture", picture.double()), ("under noise", noisy.double()), ("exact marginals", marginals)]
    drawing = draw(panels)
    options.output.mkdir(parents=True, exist_ok=True)
    write_bytes(options.output / "marginals.png", drawing)
    write_text(options.output / "index.html", report(drawing, sentences))
    print("\n".join(sentences[:2]))
    print(f"Open {options.output / 'index.html'} to see it.")


if __name__ == "__main__":
    main()
