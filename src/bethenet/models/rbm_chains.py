"""Markov chains of restricted Boltzmann machines: one whole side is drawn at a time, by one matrix product.

What learning by contrastive divergence consists of (a chain's move, the gradient from its samples in closed form), and
the path along which the partition function is annealed. Everything works on features (see `RBM.encode`), and nothing
here is differentiated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bethenet.models.rbm import RBM


class ChainState(NamedTuple):
    """Where the chains of a model are after a move."""

    features: Float[Tensor, "chains features"]
    """The visible units."""
    hidden_chances: Float[Tensor, "chains hidden"]
    """P(z = 1 | visible units)."""
    hidden: Float[Tensor, "chains hidden"]
    """Hidden units drawn from these."""


@torch.no_grad()
def start_chains(
    model: RBM, chains: int, visible: Tensor | None = None, *, generator: torch.Generator | None = None
) -> ChainState:
    """Chains at given visible states ``[chains, visible]``, or at ones drawn from the visible biases alone."""
    if visible is None:
        logits = model.visible_bias.expand(chains, -1).clone()
        features = model.draw_visible(logits, _uniforms(model, chains, model.visible, generator))
    else:
        if visible.shape[0] != chains:
            raise ValueError(f"expected visible states of {chains} chains, got {visible.shape[0]}")
        features = model.encode(visible)
    return draw_hidden(model, features, _uniforms(model, chains, model.hidden, generator))


@torch.no_grad()
def move_chains(
    model: RBM, state: ChainState, steps: int = 1, *, generator: torch.Generator | None = None
) -> ChainState:
    """``steps`` times: the visible units given the hidden ones, then the hidden ones given these.

    Of ``state`` only ``hidden`` is read, so the model may have changed since. Contrastive divergence starts anew from
    data each time; its persistent form keeps the state.
    """
    chains, visible = state.hidden.shape[0], model.visible
    for _ in range(steps):
        uniforms = _uniforms(model, chains, visible + model.hidden, generator)
        features = model.draw_visible(model.visible_logits(state.hidden), uniforms[:, :visible])
        state = draw_hidden(model, features, uniforms[:, visible:])
    return state


def draw_hidden(model: RBM, features: Tensor, uniforms: Float[Tensor, "chains hidden"]) -> ChainState:
    """The hidden units given the visible ones."""
    chances = model.hidden_logits(features).sigmoid_()
    return ChainState(features, chances, torch.gt(chances, uniforms).to(chances.dtype))


@torch.no_grad()
def set_gradient(model: RBM, data: Float[Tensor, "samples features"], samples: ChainState) -> None:
    """Set each parameter's ``grad`` to the gradient of the mean negative log-likelihood of ``data`` (nats a sample),
    with the expectations under the model taken over ``samples`` (positive minus negative statistics, in closed form).

    Args:
        model: whose parameters.
        data: a minibatch as features; a last, shorter one needs no care: means are taken over what there is.
        samples: chains' states, any number of them.
    """
    chances = model.hidden_logits(data).sigmoid_()
    gradient = _buffer(model.weights)
    torch.mm(samples.features.t(), samples.hidden_chances, out=gradient)
    gradient.addmm_(data.t(), chances, beta=1 / samples.features.shape[0], alpha=-1 / data.shape[0])
    torch.sub(samples.features.mean(0), data.mean(0), out=_buffer(model.visible_bias))
    torch.sub(samples.hidden_chances.mean(0), chances.mean(0), out=_buffer(model.hidden_bias))


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


def _buffer(parameter: torch.nn.Parameter) -> Tensor:
    """The parameter's ``grad``, made if there is none: writing into it saves an allocation a step."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad
