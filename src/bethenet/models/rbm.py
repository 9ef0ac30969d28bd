"""Restricted Boltzmann machines: visible units, binary hidden units, and no factor within either side.

``P(x, z) ~ exp(x^T W z + x^T b + z^T a)`` (paper, section 4.2). Visible units may have K states (Potts-Bernoulli): x
is then each unit's one-hot vector without its first entry, one unit after another. So state 0 is the reference with
weight and bias 0; with K = 2 the *features* x are the states themselves, and W is [visible, hidden] as in the paper.
Either side can be summed out in closed form, so that scores, conditionals and gradients cost one matrix product.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bethenet.graph import FactorGraph
from bethenet.models.base import Model
from bethenet.potentials import UNOBSERVED, LogPotentials

CHUNK = 2**22
"""Numbers in the largest temporary tensor of the computations that go through many configurations."""


class RBM(Model):
    """A restricted Boltzmann machine as a factor graph: visible variables first, then the hidden ones.

    Args:
        visible: the number of visible units.
        hidden: the number of hidden units, all binary.
        visible_states: the number of states of each visible unit.
        weight_scale: the weights start as independent normal numbers of this standard deviation; biases at zero.
        generator: what they are drawn with.

    >>> model = RBM(6, 4, generator=torch.Generator().manual_seed(0))
    >>> model.log_potentials().graph.num_factors
    34
    >>> model.score(torch.zeros(3, 6, dtype=torch.long)).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        visible: int,
        hidden: int,
        visible_states: int = 2,
        *,
        weight_scale: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("visible", visible, 1),
            ("hidden", hidden, 1),
            ("visible_states", visible_states, 2),
        ):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self.visible, self.hidden, self.visible_states = visible, hidden, visible_states
        self.features = visible * (visible_states - 1)
        self.weights = nn.Parameter(weight_scale * torch.randn(self.features, hidden, generator=generator))
        """W: row ``v * (K - 1) + k - 1`` is visible unit v in state k."""
        self.visible_bias = nn.Parameter(torch.zeros(self.features))
        """b."""
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        """a."""
        self._graph = FactorGraph.bipartite(visible, hidden, visible_states, 2)

    @torch.no_grad()
    def initialise_from(self, data: Int[Tensor, "samples visible"], pseudo_count: float = 1.0) -> RBM:
        """Set the visible biases so that with zero weights the visible units would have the data's base rates."""
        self.visible_bias.copy_(self.base_log_odds(data, pseudo_count))
        return self

    # --- the factor graph -------------------------------------------------------------------------------------------

    @property
    def graph(self) -> FactorGraph:  # type: ignore[override]
        """Variables 0 .. visible-1, then the hidden ones."""
        return self._graph.to(self.weights.device)

    def log_potentials(self, evidence: Any = None) -> LogPotentials:
        """A unary factor a unit and a pairwise factor a pair, all with zeros where a reference state is.

        Args:
            evidence: visible states ``[samples, visible]``, or anything that `LogPotentials.clamp` takes.
        """
        states = self.visible_states - 1
        pairs = self.weights.reshape(self.visible, states, self.hidden).transpose(1, 2)
        tables: dict[tuple[int, ...], Tensor] = {
            (self.visible_states, 2): F.pad(pairs.reshape(-1, states, 1), (1, 0, 1, 0))
        }
        if states == 1:
            tables[2,] = F.pad(torch.cat([self.visible_bias, self.hidden_bias]).unsqueeze(1), (1, 0))
        else:
            tables[self.visible_states,] = F.pad(self.visible_bias.reshape(self.visible, states), (1, 0))
            tables[2,] = F.pad(self.hidden_bias.unsqueeze(1), (1, 0))
        graph = self.graph
        ordered = [tables[group.table_shape].unsqueeze(0) for group in graph.factor_groups]
        potentials = LogPotentials(graph, ordered, finite=True)
        if evidence is None:
            return potentials
        if isinstance(evidence, Tensor) and evidence.shape[-1] == self.visible:
            evidence = F.pad(evidence.long(), (0, self.hidden), value=UNOBSERVED)
        return potentials.clamp(evidence)

    # --- features and conditionals ----------------------------------------------------------------------------------

    def encode(self, states: Tensor) -> Float[Tensor, "*samples features"]:
        """Visible states ``[*samples, visible]`` (integers, or numbers that are 0 and 1) as features."""
        if states.shape[-1] != self.visible:
            raise ValueError(f"expected {self.visible} visible states a sample, got shape {list(states.shape)}")
        if self.visible_states == 2:
            return states.to(self.weights)
        one_hot = F.one_hot(states.to(self.weights.device).long(), self.visible_states)
        return one_hot[..., 1:].flatten(-2).to(self.weights.dtype)

    def decode(self, features: Float[Tensor, "*samples features"]) -> Int[Tensor, "*samples visible"]:
        """The states that features stand for."""
        if self.visible_states == 2:
            return features.long()
        steps = torch.arange(1, self.visible_states, device=features.device)
        return (features.long().unflatten(-1, (self.visible, -1)) * steps).sum(-1)

    def hidden_logits(self, features: Float[Tensor, "samples features"]) -> Float[Tensor, "samples hidden"]:
        """Log-odds of each hidden unit given the visible ones."""
        return torch.addmm(self.hidden_bias, features, self.weights)

    def visible_logits(self, hidden: Float[Tensor, "samples hidden"]) -> Float[Tensor, "samples features"]:
        """Log-odds of each state of each visible unit against its state 0, given the hidden ones."""
        return torch.addmm(self.visible_bias, hidden, self.weights.t())

    def draw_visible(
        self, logits: Float[Tensor, "samples features"], uniforms: Float[Tensor, "samples visible"]
    ) -> Float[Tensor, "samples features"]:
        """Features drawn from log-odds with uniform numbers; ``logits`` is overwritten."""
        if self.visible_states == 2:
            return logits.sigmoid_().gt_(uniforms)
        chances = F.pad(logits.unflatten(-1, (self.visible, -1)), (1, 0)).softmax(-1)
        passed = (chances.cumsum(-1)[..., :-1] <= uniforms.unsqueeze(-1)).sum(-1)
        return F.one_hot(passed, self.visible_states)[..., 1:].flatten(-2).to(logits.dtype)

    # --- scores -----------------------------------------------------------------------------------------------------

    def score(self, data: Tensor) -> Float[Tensor, "samples 1"]:
        """`visible_score` of visible states ``[samples, visible]``."""
        return self.visible_score(self.encode(data)).unsqueeze(1)

    def visible_score(self, features: Float[Tensor, "samples features"]) -> Float[Tensor, " samples"]:
        """``log sum_z exp(x^T W z + x^T b + z^T a)`` (nats) of each visible configuration."""
        return features @ self.visible_bias + F.softplus(self.hidden_logits(features)).sum(-1)

    def hidden_score(self, hidden: Float[Tensor, "samples hidden"]) -> Float[Tensor, " samples"]:
        """``log sum_x exp(x^T W z + x^T b + z^T a)`` (nats) of each hidden configuration."""
        return hidden @ self.hidden_bias + self.visible_log_normalisers(self.visible_logits(hidden)).sum(-1)

    def pseudo_log_likelihood(self, data: Tensor) -> Float[Tensor, "samples 1"]:
        """Sum over visible units of ``log P(x_v | the other visible units)`` (nats), hidden units summed out."""
        chunk = max(1, CHUNK // (self.features * self.hidden))
        return torch.cat([self._pseudo_log_likelihood(part) for part in data.split(chunk)]).unsqueeze(1)

    def _pseudo_log_likelihood(self, data: Tensor) -> Tensor:
        states, shape = self.visible_states - 1, (self.visible, self.visible_states - 1)
        features = self.encode(data)
        rows = self.weights.reshape(*shape, self.hidden)
        bias = self.visible_bias.reshape(shape)
        here = features.unflatten(-1, shape)
        own_rows = torch.einsum("nvk,vkh->nvh", here, rows)
        # the hidden units' log-odds with each visible unit put to state 0, then to every state
        without = self.hidden_logits(features).unsqueeze(1) - own_rows
        reference = F.softplus(without).sum(-1)
        others = [F.softplus(without + rows[:, k]).sum(-1) + bias[:, k] for k in range(states)]
        scores = torch.stack([reference, *others], dim=-1)
        chosen = torch.cat([1 - here.sum(-1, keepdim=True), here], dim=-1)
        return ((scores * chosen).sum(-1) - scores.logsumexp(-1)).sum(-1)

    def visible_log_normalisers(self, logits: Float[Tensor, "*samples features"]) -> Float[Tensor, "*samples visible"]:
        """Log of each visible unit's sum over states (nats), from the states' log-odds against state 0."""
        if self.visible_states == 2:
            return F.softplus(logits)
        return F.pad(logits.unflatten(-1, (self.visible, -1)), (1, 0)).logsumexp(-1)

    # --- exact computations, where one side is small ----------------------------------------------------------------

    def log_likelihood(self, data: Tensor) -> Float[Tensor, "samples 1"]:
        """Exact log-probability (nats) of each visible configuration, where `log_z` can be had."""
        return self.score(data) - self.log_z()

    def log_z(self, max_units: int = 20) -> Float[Tensor, ""]:
        """Exact log partition function (nats), differentiable, by enumerating the smaller side.

        Args:
            max_units: refuse where both sides have more configurations than this many binary units.
        """
        return torch.stack(
            [checkpoint(self._log_sum, part, use_reentrant=False) for part in self._enumeration(max_units)]
        ).logsumexp(0)

    @torch.no_grad()
    def sample_exactly(
        self, samples: int, *, max_units: int = 20, generator: torch.Generator | None = None
    ) -> Int[Tensor, "samples visible"]:
        """Independent samples of the visible units, by enumerating the smaller side."""
        scores = torch.cat([self._scores(part) for part in self._enumeration(max_units)])
        cumulative = torch.softmax(scores.double(), 0).cumsum(0)
        uniforms = torch.rand(samples, dtype=torch.float64, device=scores.device, generator=generator)
        rows = torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True).clamp_(max=len(scores) - 1)
        chosen = self._configurations(rows)
        if not self._enumerates_hidden:
            return chosen
        uniforms = torch.rand(samples, self.visible, device=scores.device, generator=generator).to(self.weights.dtype)
        return self.decode(self.draw_visible(self.visible_logits(chosen.to(self.weights.dtype)), uniforms))

    @property
    def _enumerates_hidden(self) -> bool:
        return self.hidden <= self.visible * math.log2(self.visible_states)

    def _enumeration(self, max_units: int) -> tuple[Tensor, ...]:
        """Configurations of the smaller side as numbers, in chunks."""
        units = min(float(self.hidden), self.visible * math.log2(self.visible_states))
        if units > max_units:
            raise ValueError(
                f"exact computation goes through all configurations of the smaller side, at most 2^{max_units}; this "
                f"model has 2^{units:g}: estimate log Z by annealed importance sampling, or raise max_units"
            )
        total = 2**self.hidden if self._enumerates_hidden else self.visible_states**self.visible
        numbers = torch.arange(total, device=self.weights.device)
        return numbers.split(max(1, CHUNK // max(self.visible * self.visible_states, self.hidden)))

    def _configurations(self, numbers: Int[Tensor, " samples"]) -> Int[Tensor, "samples units"]:
        states, units = (2, self.hidden) if self._enumerates_hidden else (self.visible_states, self.visible)
        powers = states ** torch.arange(units, device=numbers.device)
        return numbers.unsqueeze(1) // powers % states

    def _scores(self, numbers: Int[Tensor, " samples"]) -> Float[Tensor, " samples"]:
        states = self._configurations(numbers)
        if self._enumerates_hidden:
            return self.hidden_score(states.to(self.weights.dtype))
        return self.visible_score(self.encode(states))

    def _log_sum(self, numbers: Int[Tensor, " samples"]) -> Float[Tensor, ""]:
        return self._scores(numbers).logsumexp(0)

    def base_log_odds(
        self, data: Int[Tensor, "samples visible"], pseudo_count: float = 1.0
    ) -> Float[Tensor, " features"]:
        """Log-odds of each state of each visible unit against its state 0 in data, with smoothed counts."""
        if not pseudo_count > 0:
            raise ValueError(f"pseudo_count: expected a positive number, got {pseudo_count}")
        counts = self.encode(data).double().sum(0).reshape(self.visible, -1)
        reference = data.shape[0] - counts.sum(1, keepdim=True)
        odds = (counts + pseudo_count) / (reference + pseudo_count)
        return odds.log().flatten().to(self.weights.dtype)
