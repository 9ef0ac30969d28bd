"""Learning undirected hidden Markov models by Bethe's or Kikuchi's approximation: l_{F,z} of the paper (equation 4).

``-log Z(x) + log Z``. With both sides by the same approximation their biases cancel as far as they do; the chain
without words is then one more row of the batch, and its messages are kept from minibatch to minibatch, one set for each
length. Or the chain without words, in which most of the bias is, is treated exactly, for the price of one sentence of
exact learning. The model's gradient is the difference of the two sides' beliefs, summed over steps by matrix products:
no table per edge is formed.

Exact learning needs nothing of this: `bethenet.learning.DirectLikelihood` takes the model's own ``log_likelihood``.
The paper's penalised networks learn by `Likelihood` with a `ByNetwork` on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.learning.objective import Batch, Objective, Update
from bethenet.learning.persistence import StateMemory
from bethenet.models.base import Model
from bethenet.models.chain_bp import ChainBeliefPropagation, ChainBeliefs, ChainMessages
from bethenet.models.chain_consistent import consistent_chain_beliefs
from bethenet.models.chain_kikuchi import ChainKikuchi
from bethenet.models.hidden_chain import split
from bethenet.models.hmm import UndirectedHMM
from bethenet.networks.marginals import MarginalNetwork
from bethenet.numerics import times_log

Regularizer = Callable[[Any], Tensor]
Unclamped = Literal["persistent", "cold", "exact"]


class CouplingPenalty(nn.Module):
    """A term of the loss (nats per sentence): sum over lags of a weight times the square of the coupling's size.

    The size is that of `UndirectedHMM.coupling_sizes`: what a lag's table adds to its two states separately is free.

    Args:
        weights: one a lag, the shortest first.
        factor: the weights are at first so many times larger, and fall geometrically. A model that joins only
            neighbours while its states have no meaning yet does not get lost in couplings that only the approximation
            likes.
        steps: calls in which they fall.
    """

    calls: Tensor

    def __init__(self, weights: Sequence[float], factor: float = 1.0, steps: int = 0) -> None:
        super().__init__()
        if any(not weight >= 0 for weight in weights):
            raise ValueError(f"weights: expected numbers of at least 0, got {list(weights)}")
        if not factor > 0 or steps < 0:
            raise ValueError(f"factor, steps: expected a positive number and at least 0, got {factor} and {steps}")
        self.weights = tuple(weights)
        self.factor = factor
        self.steps = steps
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, model: Model) -> Float[Tensor, ""]:
        """The penalty of a model."""
        if not isinstance(model, UndirectedHMM) or model.options.order != len(self.weights):
            raise ValueError(f"expected an undirected model of order {len(self.weights)}, one weight a lag")
        tables = model.transitions()
        centred = tables - tables.mean(1, keepdim=True) - tables.mean(2, keepdim=True) + tables.mean((1, 2), True)
        squares = centred.square().mean((1, 2))
        # numbers, not a tensor: a copy to the device would wait for it
        total = torch.stack([squares[lag] * weight for lag, weight in enumerate(self.weights)]).sum()
        if not self.steps:
            return total
        left = (1 - self.calls / self.steps).clamp_min(0)
        self.calls += 1
        return total * self.factor**left


class Inferred(NamedTuple):
    """What a minibatch's objective is made of."""

    beliefs: ChainBeliefs
    """About the sentences and, unless that is treated exactly, about the chain without words in the last row."""
    log_z: Float[Tensor, " rows"]
    """Of the sentences, and of the chain without words in the last row."""


class ChainLikelihood(Objective):
    """Negative log-likelihood per sentence (nats), log Z by messages. Sentences in a minibatch are equally long.

    Args:
        model: the model.
        engine: what infers, and how many iterations a minibatch it may take.
        unclamped: whether messages in the chains without words start from where they stopped last, or anew, as they do
            in sentences; or whether these chains are treated exactly. The objective is then hardly too low where the
            engine's log Z of sentences is too low (Kikuchi's); where that is too high (Bethe's), learning runs away.
        regularizer: a term of the model's loss, in nats per sentence, that is not part of the reported objective.
    """

    def __init__(
        self,
        model: UndirectedHMM,
        engine: ChainBeliefPropagation | ChainKikuchi,
        *,
        unclamped: Unclamped = "persistent",
        regularizer: Regularizer | None = None,
    ) -> None:
        super().__init__()
        if unclamped not in get_args(Unclamped):
            raise ValueError(f"unclamped: expected one of {', '.join(get_args(Unclamped))}; got {unclamped!r}")
        self.model: Any = model
        self.engine = engine
        self.unclamped = unclamped
        self.regularizer = regularizer
        self.memory = StateMemory()

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step."""
        found = self._infer(batch)
        self._remember(found.beliefs)
        yield self._model_update(_objective(found.log_z), lambda: _diagnostics(found))

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """The objective, and how inconsistent the beliefs behind it are."""
        found = self._infer(batch)
        return {"objective": _objective(found.log_z), **_diagnostics(found)}

    def _infer(self, batch: Batch) -> Inferred:
        words = _equally_long(batch)
        return self._run(self.model.unary(words), self.model.transitions())

    def _run(self, unary: Tensor, transitions: Tensor, messages: ChainMessages | None = None) -> Inferred:
        """Both sides; ``messages`` are of the sentences, to start from."""
        if self.unclamped == "exact":
            found = self.engine.run(unary, transitions, messages=messages)
            free = self.model.log_partition(unary.shape[1])[-1:]
            return Inferred(found, torch.cat([found.log_z, free]))
        rows = torch.cat([unary, torch.zeros_like(unary[:1])])
        kept = self._free(unary)
        both = kept.after(len(unary)) if messages is None else messages.joined(kept)
        found = self.engine.run(rows, transitions, messages=both)
        return Inferred(found, found.log_z)

    def _free(self, unary: Tensor) -> ChainMessages:
        """Of the chain without words, to start from."""
        steps, states = unary.shape[1:]
        order = self.model.options.order
        cold = unary.new_zeros(order - _core(self.engine), order + steps, 1, states, requires_grad=False)
        messages = ChainMessages(cold, cold)
        if self.unclamped == "cold":
            return messages
        kept: ChainMessages = self.memory.recall(self.model.chain_graph(steps), messages)
        return kept

    def _remember(self, found: ChainBeliefs) -> None:
        if self.unclamped == "persistent":
            steps = found.node_log_marginals.shape[1]
            # a copy: the rows of the sentences would be kept with it
            last = ChainMessages(*(part.clone() for part in found.messages.from_row(-1)))
            self.memory.remember(self.model.chain_graph(steps), last)

    def _model_update(self, value: Tensor, diagnostics: Callable[[], Mapping[str, Tensor]]) -> Update:
        loss = value if self.regularizer is None else value + self.regularizer(self.model)
        return Update(("model",), loss, value.detach(), diagnostics)


class AmortizedChainLikelihood(ChainLikelihood):
    """Semi-amortised: a network says where belief propagation starts in each sentence, and learns from where it ends.

    The network's marginals become consistent beliefs (`bethenet.models.chain_consistent`), a few sweeps start from
    those, and the network descends on the cross-entropy towards the marginals after the sweeps. It cannot lag far
    behind the model, so there is little that the model could exploit. The chain without words has no network.

    Args:
        model: the model.
        network: says the marginals.
        engine: the sweeps, or Kikuchi's iterations, that follow.
        scaling: iterations of proportional fitting that make the marginals consistent beliefs.
        flooding: steps of flooding whose marginals the network is given to improve on; 0: it is given none.
        refined: whether the model learns from the beliefs after the sweeps, or from the network's own.
        unclamped: see `ChainLikelihood`.
        regularizer: a term of the model's loss, in nats per sentence, that is not part of the reported objective.
    """

    def __init__(
        self,
        model: UndirectedHMM,
        network: MarginalNetwork,
        engine: ChainBeliefPropagation | ChainKikuchi | None = None,
        *,
        scaling: int = 2,
        flooding: int = 0,
        refined: bool = True,
        unclamped: Unclamped = "persistent",
        regularizer: Regularizer | None = None,
    ) -> None:
        engine = engine or ChainBeliefPropagation("sweeps", 1)
        if engine.iterations < 1:
            raise ValueError("engine: expected at least 1 iteration: the network learns from what it changes")
        super().__init__(model, engine, unclamped=unclamped, regularizer=regularizer)
        self.network: Any = network
        self.scaling = scaling
        self.flooding = ChainBeliefPropagation("flooding", flooding)
        self.refined = refined

    def parts(self) -> dict[str, nn.Module]:
        """``model`` and ``network``."""
        return {"model": self.model, "network": self.network}

    def updates(self, batch: Batch, generator: torch.Generator | None = None) -> Iterator[Update]:
        """One step of the network, one of the model: Algorithm 1 with I2 = 1, without its steps for the free chain."""
        said, own, found = self._both(batch)
        self._remember(found.beliefs)
        target = found.beliefs.node_marginals[: len(said)]
        yield Update(("network",), -times_log(target, said).sum((1, 2)).mean())
        value = _objective(self._log_z(own, found))
        yield self._model_update(value, lambda: self._figures(own, found))

    def evaluate(self, batch: Batch, generator: torch.Generator | None = None) -> Mapping[str, Tensor]:
        """The objective, and how inconsistent the beliefs behind it are."""
        _, own, found = self._both(batch)
        return {"objective": _objective(self._log_z(own, found)), **self._figures(own, found)}

    def _both(self, batch: Batch) -> tuple[Tensor, ChainBeliefs, Inferred]:
        """The network's log-marginals, its beliefs, and what is inferred from there."""
        words = _equally_long(batch)
        unary, transitions = self.model.unary(words), self.model.transitions()
        start = None
        if self.flooding.iterations:
            start = self.flooding.run(unary.detach(), transitions.detach()).node_log_marginals
        said = self.network(words, start)
        own = consistent_chain_beliefs(unary, transitions, said, self.scaling)
        return said, own, self._run(unary, transitions, own.messages.beyond(_core(self.engine)))

    def _log_z(self, own: ChainBeliefs, found: Inferred) -> Float[Tensor, " rows"]:
        return found.log_z if self.refined else torch.cat([own.log_z, found.log_z[-1:]])

    def _figures(self, own: ChainBeliefs, found: Inferred) -> dict[str, Tensor]:
        swept = found.beliefs.node_marginals[: len(own.node_marginals)]
        moved = (own.node_marginals - swept).abs().sum(2).mean() / 2
        return {**_diagnostics(found), "network_inconsistency": own.inconsistency().amax(), "network_error": moved}


def _objective(log_z: Float[Tensor, " rows"]) -> Float[Tensor, ""]:
    return log_z[-1] - log_z[:-1].mean()


def _core(engine: ChainBeliefPropagation | ChainKikuchi) -> int:
    """Lags up to this one have no messages."""
    return engine.core if isinstance(engine, ChainKikuchi) else 0


def _diagnostics(found: Inferred) -> dict[str, Tensor]:
    return {
        "inconsistency": found.beliefs.inconsistency().amax(),
        "residual": found.beliefs.residual.amax(),
        "free_log_z": found.log_z[-1].detach(),
    }


def _equally_long(batch: Batch) -> Int[Tensor, "batch steps"]:
    words, lengths = split(batch.data)
    if lengths is not None:
        raise ValueError("expected minibatches of sentences of equal length, got padded ones")
    return words
