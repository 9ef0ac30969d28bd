"""Markov chains of restricted Boltzmann machines: one whole side is drawn at a time, by one matrix product.

What learning by contrastive divergence consists of (a chain's move, the gradient from its samples in closed form), and
the path along which the partition function is annealed. Everything works on features (see `RBM.encode`), and nothing
here is differentiated.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bethenet.models.rbm import RBM


class Gradient(NamedTuple):
    """Derivatives of a mean negative log-likelihood (nats a sample), in the order of the model's parameters."""

    weights: Float[Tensor, "features hidden"]
    visible_bias: Float[Tensor, " features"]
    hidden_bias: Float[Tensor, " hidden"]


@torch.no_grad()
def start_chains(
    model: RBM, chains: int, visible: Tensor | None = None, *, generator: torch.Generator | None = None
) -> Float[Tensor, "chains hidden"]:
    """Hidden units of chains whose visible states ``[chains, visible]`` are given, or drawn from their biases alone.

    The hidden units are all that has to be kept of a chain.
    """
    if visible is None:
        logits = model.visible_bias.expand(chains, -1).clone()
        features = model.draw_visible(logits, _uniforms(model, chains, model.visible, generator))
    elif visible.shape[0] == chains:
        features = model.encode(visible)
    else:
        raise ValueError(f"expected visible states of {chains} chains, got {visible.shape[0]}")
    chances = model.hidden_logits(features).sigmoid_()
    return chances.gt_(_uniforms(model, chains, model.hidden, generator))


@torch.no_grad()
def move_chains(
    model: RBM, hidden: Float[Tensor, "chains hidden"], steps: int = 1, *, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "chains features"], Float[Tensor, "chains hidden"]]:
    """``steps`` times the visible units given the hidden ones and these given the visible ones; the last of both.

    The chains may come from other parameters: they then move on towards the model as it is.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    for _ in range(steps):
        features, uniforms = _draw_features(model, hidden, generator)
        hidden = model.hidden_logits(features).sigmoid_().gt_(uniforms)
    return features, hidden


@torch.no_grad()
def contrastive_gradient(
    model: RBM,
    data: Float[Tensor, "samples features"],
    hidden: Float[Tensor, "chains hidden"],
    steps: int = 1,
    *,
    generator: torch.Generator | None = None,
) -> Gradient:
    """Move the chains, in place, and take the expectations under the model over where they are: PCD-k if they are those
    that the last call moved, CD-k if they are `start_chains` at the data.

    Args:
        model: the machine.
        data: visible features.
        hidden: the chains' hidden units, overwritten.
        steps: k.
        generator: what the chains are moved with.

    Returns:
        The gradient of the mean negative log-likelihood of ``data``.
    """
    before = move_chains(model, hidden, steps - 1, generator=generator)[1] if steps > 1 else hidden
    features, uniforms = _draw_features(model, before, generator)
    gradient, chances = likelihood_gradient(model, data, features)
    torch.gt(chances, uniforms, out=hidden)
    return gradient


@torch.no_grad()
def likelihood_gradient(
    model: RBM, data: Float[Tensor, "samples features"], features: Float[Tensor, "chains features"]
) -> tuple[Gradient, Float[Tensor, "chains hidden"]]:
    """The gradient of the mean negative log-likelihood of ``data``, in closed form, with expectations under the model
    replaced by means over samples of its visible units (any number of them); and these samples' P(z = 1 | x).
    """
    rows = torch.cat([features, data])
    chances = model.hidden_logits(rows).sigmoid_()
    chains = features.shape[0]
    shares = _shares(chains, data.shape[0], rows.dtype, rows.device)
    weighted = rows * shares.unsqueeze(1)
    gradient = Gradient(weighted.t() @ chances, weighted.sum(0), shares @ chances)
    return gradient, chances[:chains]


@cache
def _shares(chains: int, samples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How much each row counts: samples of the model for, data against. Kept for good, since recorded steps read it."""
    shares = torch.full((chains + samples,), 1 / chains, dtype=dtype, device=device)
    shares[chains:] = -1 / samples
    return shares


def _draw_features(model: RBM, hidden: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Visible features given the hidden units, and uniform numbers to draw the hidden units with after them."""
    uniforms = _uniforms(model, hidden.shape[0], model.visible + model.hidden, generator)
    features = model.draw_visible(model.visible_logits(hidden), uniforms[:, : model.visible])
    return features, uniforms[:, model.visible :]


class RBMPath:
    """Annealing of an `RBM` from independent visible units, with the hidden units summed out.

    At inverse temperature t the model has weights tW, hidden biases ta and visible biases tb + (1 - t) base. States are
    visible features; `RBM.encode` makes them from samples, for annealing backwards.

    Args:
        model: whose log Z is wanted.
        base: the visible biases at inverse temperature 0: `RBM.base_log_odds` of data. Zeros by default.
    """

    def __init__(self, model: RBM, base: Float[Tensor, " features"] | None = None) -> None:
        self.model = model
        bias = model.visible_bias.detach()
        self.base = torch.zeros_like(bias) if base is None else base.to(bias)
        if self.base.shape != bias.shape:
            raise ValueError(f"base: expected shape {list(bias.shape)}, got {list(self.base.shape)}")
        self.weights, self.hidden_bias = model.weights.detach(), model.hidden_bias.detach()
        self.slope = bias - self.base

    def log_z_start(self) -> Float[Tensor, ""]:
        """See `AnnealedPath`."""
        return self.model.visible_log_normalisers(self.base).sum() + self.model.hidden * math.log(2)

    def start(self, chains: int, generator: torch.Generator | None) -> Float[Tensor, "chains features"]:
        """See `AnnealedPath`."""
        uniforms = _uniforms(self.model, chains, self.model.visible, generator)
        return self.model.draw_visible(self.base.expand(chains, -1).clone(), uniforms)

    def advance(
        self, state: Tensor, old: float, new: float, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, "chains features"], Float[Tensor, " chains"]]:
        """See `AnnealedPath`."""
        model, visible = self.model, self.model.visible
        logits = torch.addmm(self.hidden_bias, state, self.weights)
        warmer, colder = logits * old, logits.mul_(new)
        increment = (new - old) * (state @ self.slope) + (F.softplus(colder) - F.softplus(warmer)).sum(1)
        uniforms = _uniforms(model, state.shape[0], visible + model.hidden, generator)
        hidden = colder.sigmoid_().gt_(uniforms[:, visible:])
        bias = self.base + new * self.slope
        visible_logits = torch.addmm(bias, hidden, self.weights.t(), alpha=new)
        return model.draw_visible(visible_logits, uniforms[:, :visible]), increment


def _uniforms(model: RBM, rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    weights = model.weights
    return torch.rand(rows, columns, dtype=weights.dtype, device=weights.device, generator=generator)
