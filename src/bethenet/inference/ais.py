"""Annealed importance sampling (Neal 2001): estimates of log Z with error bars, for anything that can be annealed.

Chains start at exact samples of an easy distribution with a known partition function (inverse temperature 0) and move
through intermediate distributions to the wanted one (inverse temperature 1). Each chain's importance weight is an
unbiased estimate of the ratio of the two partition functions; its logarithm is too low on average, so the estimate of
log Z is a stochastic lower bound. Annealing *backwards*, from samples of the wanted distribution to the easy one,
gives a stochastic upper bound: the truth lies between the two where the samples are exact, and a small gap says that
both may be believed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.inference.sampling import GibbsSampler, soften
from bethenet.potentials import LogPotentials

State = Any
"""What a path's chains are at: a tensor whose first axis is the chains."""


class AnnealedPath(Protocol):
    """Distributions between an easy one and the wanted one."""

    def log_z_start(self) -> Float[Tensor, "*batch"]:
        """Log partition function (nats) at inverse temperature 0."""
        ...

    def start(self, chains: int, generator: torch.Generator | None) -> State:
        """Exact samples at inverse temperature 0."""
        ...

    def advance(
        self, state: State, old: float, new: float, generator: torch.Generator | None
    ) -> tuple[State, Float[Tensor, "chains ..."]]:
        """By how much (nats) the unnormalised log-probability of each chain's state is greater at ``new`` than at
        ``old``; and states after a transition that leaves the distribution at ``new`` as it is.
        """
        ...


@dataclass(frozen=True)
class LogZEstimate:
    """An estimate of log Z and how far it can be trusted."""

    log_z: Float[Tensor, "*batch"]
    """In nats."""
    standard_error: Float[Tensor, "*batch"]
    """Of ``log_z``, by the delta method from the weights' variance: infinite for a single chain."""
    interval: Float[Tensor, "*batch 2"]
    """Lower and upper end of a bootstrap interval over the chains."""
    effective_sample_size: Float[Tensor, "*batch"]
    """How many equally weighted chains the weights are worth. Where it is a small part of the chains, neither error
    nor interval can be trusted: use more temperatures."""
    log_weights: Float[Tensor, "chains ..."]
    """Each chain's log importance weight: of Z over the easy partition function, or the reverse when run backwards."""
    direction: str
    """``"forward"``: too low on average; ``"backward"``: too high."""


def linear_schedule(temperatures: int) -> Float[Tensor, " temperatures"]:
    """Inverse temperatures from 0 to 1 in equal steps."""
    _check_temperatures(temperatures)
    return torch.linspace(0, 1, temperatures, dtype=torch.float64)


def sigmoid_schedule(temperatures: int, steepness: float = 4.0) -> Float[Tensor, " temperatures"]:
    """Inverse temperatures from 0 to 1 along a logistic curve: small steps near both ends."""
    _check_temperatures(temperatures)
    if not 0 < steepness < math.inf:
        raise ValueError(f"steepness: expected a positive number, got {steepness}")
    curve = torch.linspace(-steepness, steepness, temperatures, dtype=torch.float64).sigmoid()
    return (curve - curve[0]) / (curve[-1] - curve[0])


def annealed_importance_sampling(
    path: AnnealedPath,
    *,
    chains: int = 256,
    schedule: int | Sequence[float] | Tensor = 4000,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> LogZEstimate:
    """Estimate log Z by annealing from the easy distribution to the wanted one.

    Args:
        path: the distributions and their transitions.
        chains: how many independent chains, all moved at once.
        schedule: the inverse temperatures, increasing from 0 to 1; or how many, in equal steps.
        confidence: of the bootstrap interval.
        generator: random numbers for chains and bootstrap.
    """
    if chains < 1:
        raise ValueError(f"chains: expected at least 1, got {chains}")
    betas = _check_schedule(schedule)
    log_weights = _anneal(path, path.start(chains, generator), betas, generator)
    return _estimate(log_weights, path.log_z_start(), "forward", confidence, generator)


def reverse_annealed_importance_sampling(
    path: AnnealedPath,
    samples: State,
    *,
    schedule: int | Sequence[float] | Tensor = 4000,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> LogZEstimate:
    """Estimate log Z by annealing from samples of the wanted distribution to the easy one.

    Args:
        path: as for `annealed_importance_sampling`.
        samples: states as the path keeps them, one a chain. The estimate is a stochastic upper bound if they are exact,
            independent samples; samples from long runs of a sampler, or data under a well fitted model, make it one
            only approximately.
        schedule: the inverse temperatures in increasing order, from 0 to 1; they are run through backwards.
        confidence: of the bootstrap interval.
        generator: random numbers for chains and bootstrap.
    """
    betas = _check_schedule(schedule)[::-1]
    log_weights = _anneal(path, samples, betas, generator)
    return _estimate(log_weights, path.log_z_start(), "backward", confidence, generator)


class GibbsPath:
    """Any factor graph, annealed by block Gibbs sampling from independent variables.

    The states are those of `GibbsSampler`, ``[chains, batch, variables]``, and so is the meaning of ``base``. Evidence
    holds at every temperature. Impossible configurations are made merely improbable on the way, so that chains can
    cross them, and count as impossible at the end.

    Args:
        potentials: the model, or a batch of models or of evidence: one estimate for each.
        base: log-weights of the variables' states at inverse temperature 0 (see `base_rates`); uniform by default.
    """

    def __init__(self, potentials: LogPotentials, base: Sequence[Tensor] | None = None) -> None:
        self.hard = GibbsSampler(potentials, base)
        self.soft = GibbsSampler(soften(potentials.detach()), base) if potentials.has_zeros else self.hard

    def log_z_start(self) -> Float[Tensor, " batch"]:
        """See `AnnealedPath`."""
        return self.hard.base_log_z()

    def start(self, chains: int, generator: torch.Generator | None) -> Int[Tensor, "chains batch variables"]:
        """See `AnnealedPath`."""
        return self.hard.independent(chains, generator=generator)

    def advance(
        self, state: Tensor, old: float, new: float, generator: torch.Generator | None
    ) -> tuple[Int[Tensor, "chains batch variables"], Float[Tensor, "chains batch"]]:
        """See `AnnealedPath`."""
        increment = (new - old) * (self.soft.factor_score(state) - self.soft.base_score(state))
        if new == 1 and self.soft is not self.hard:
            increment = increment.masked_fill(self.hard.factor_score(state) == -math.inf, -math.inf)
        return self.soft.sweep(state, inverse_temperature=new, generator=generator), increment


def base_rates(
    graph: FactorGraph, states: Int[Tensor, "samples variables"], pseudo_count: float = 1.0
) -> list[Float[Tensor, "1 variables states"]]:
    """How often each variable's states occur in data, as log-probabilities per variable group: a base to anneal from.

    Args:
        graph: whose variables.
        states: the data; -1 where a variable was not observed.
        pseudo_count: added to each state's count.
    """
    if states.dim() != 2 or states.shape[1] != graph.num_variables:
        raise ValueError(f"expected states of shape [samples, {graph.num_variables}], got {list(states.shape)}")
    if not pseudo_count > 0:
        raise ValueError(f"pseudo_count: expected a positive number, got {pseudo_count}")
    result = []
    for group in graph.variable_groups:
        members = states[:, group.variables]
        counts = torch.stack([(members == state).sum(0) for state in range(group.states)], dim=-1) + pseudo_count
        result.append((counts / counts.sum(-1, keepdim=True)).log().unsqueeze(0))
    return result


def _anneal(path: AnnealedPath, state: State, betas: list[float], generator: torch.Generator | None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for old, new in itertools.pairwise(betas):
            state, increment = path.advance(state, old, new, generator)
            # in float64, because thousands of small numbers are added up
            total = total.to(increment.device) + increment
    return total


def _estimate(
    log_weights: Tensor, log_z_start: Tensor, direction: str, confidence: float, generator: torch.Generator | None
) -> LogZEstimate:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}")
    chains = log_weights.shape[0]
    if chains == 0:
        raise ValueError("expected at least one sample to anneal from, got none")
    log_ratio = torch.logsumexp(log_weights, 0) - math.log(chains)
    # relative to their mean; zeros where every weight is zero
    weights = torch.nan_to_num((log_weights - log_ratio).exp())
    spread = weights.var(0, correction=1) if chains > 1 else torch.full_like(log_ratio, math.inf)
    error = torch.where(torch.isfinite(log_ratio), (spread / chains).sqrt(), torch.full_like(log_ratio, math.inf))
    squares = weights.square().sum(0)
    size = torch.where(squares > 0, weights.sum(0).square() / squares, torch.zeros_like(squares))
    margin = (1 - confidence) / 2
    ends = log_ratio + _bootstrap(weights.reshape(chains, -1), (margin, 1 - margin), generator).reshape(
        2, *log_ratio.shape
    )
    sign = 1 if direction == "forward" else -1
    log_z = log_z_start.double()
    interval = (log_z + sign * (ends if sign == 1 else ends.flip(0))).movedim(0, -1)
    return LogZEstimate(log_z + sign * log_ratio, error, interval, size, log_weights, direction)


def _bootstrap(
    weights: Float[Tensor, "chains members"], quantiles: tuple[float, float], generator: torch.Generator | None
) -> Float[Tensor, "2 members"]:
    """Quantiles of the log mean weight over resamplings of the chains."""
    chains, resamplings = weights.shape[0], 1000
    picks = torch.randint(chains, (resamplings, chains), device=weights.device, generator=generator)
    counts = torch.zeros(resamplings, chains, dtype=weights.dtype, device=weights.device)
    counts.scatter_add_(1, picks, torch.ones_like(counts))
    logarithms = (counts @ weights / chains).log().sort(0).values
    rows = [min(resamplings - 1, max(0, round(q * (resamplings - 1)))) for q in quantiles]
    return logarithms[rows]


def _check_temperatures(temperatures: int) -> None:
    if temperatures < 2:
        raise ValueError(f"temperatures: expected at least 2 (0 and 1), got {temperatures}")


def _check_schedule(schedule: int | Sequence[float] | Tensor) -> list[float]:
    if isinstance(schedule, int):
        schedule = linear_schedule(schedule)
    betas = torch.as_tensor(schedule, dtype=torch.float64).flatten().tolist()
    if len(betas) < 2 or betas[0] != 0 or betas[-1] != 1 or any(b <= a for a, b in itertools.pairwise(betas)):
        raise ValueError(
            f"schedule: expected inverse temperatures that increase from 0 to 1, got {len(betas)}: {betas[:3]}..."
        )
    return betas
