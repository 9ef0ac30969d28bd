"""Kikuchi approximations of chains of order M: exact along the short lags, messages along the long ones.

With ``core`` = 2 the regions are the clusters of three consecutive states and the pairs of lag 3 and more. The
clusters by themselves form a junction chain, so their part of the free energy is minimised exactly by the dynamic
programme of order 2 at a cost of K^3 a step; the long pairs send messages to its nodes. ``core`` = 1 joins a
first-order chain with messages along all longer lags; ``core`` = M would be exact.

Free energy: that of the core chain given the messages, plus for every long pair its own term less the negative
entropies of its two nodes. All counting numbers are those of the cluster variation method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.models.chain_bp import ChainBeliefs, ChainMessages, Envelope, Passing, check_iterations
from bethenet.models.chain_dp import Domain, log_z
from bethenet.models.chain_tables import ChainTables


@dataclass(frozen=True)
class ChainKikuchi:
    """Options of `run`, which has the interface of ``ChainBeliefPropagation.run``."""

    core: int = 2
    """Lags up to this one are treated exactly."""
    iterations: int = 5
    damping: float = 0.0
    """Share of the old log-message that is kept."""
    tolerance: float = 0.0
    """Stop once no marginal changes by more. 0: never look, so never wait for the device."""
    scaling: int = 0
    """Iterations of proportional fitting that bring the long pairs' beliefs to agree with the core chain's at the end.
    With agreement log Z is never above what the best beliefs give, so a model cannot raise it by making messages stray.
    """
    domain: Domain = "auto"
    """Arithmetic of the core chain: see ``chain_dp.prefix_log_z``."""
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.core < 1:
            raise ValueError(f"core: expected at least 1, got {self.core}")
        check_iterations(self)
        if self.scaling < 0:
            raise ValueError(f"scaling: expected at least 0, got {self.scaling}")

    def run(
        self,
        unary: Float[Tensor, "batch steps states"],
        transitions: Float[Tensor, "order states states"],
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        messages: ChainMessages | None = None,
    ) -> ChainBeliefs:
        """Infer, from ``messages`` (an earlier result's) where given. See ``ChainBeliefPropagation.run``.

        Raises:
            ValueError: all lags are in the core; ``chain_dp.log_z`` is then exact.
            MemoryLimitError: the core's messages would not fit.
        """
        if self.core >= transitions.shape[0]:
            raise ValueError(f"core: expected less than the chain's order {transitions.shape[0]}, got {self.core}")
        passing = _AroundCore(self, unary.detach(), transitions.detach(), lengths, messages)
        with torch.no_grad():
            nodes, residual = passing.iterate(self, passing.flood)
            received = passing.received()
            for _ in range(self.scaling):
                passing.scale(nodes)
            edges, energy = passing.edge_energy(nodes)
            # the core chain's log Z counts the messages as if they were potentials
            borrowed = (nodes.exp() * received * passing.real).sum((0, 2))
        core = ChainTables.pairwise(transitions[: self.core])
        exact = log_z(
            unary + received.transpose(0, 1), core, lengths, domain=self.domain, memory_limit=self.memory_limit
        )
        around: Tensor = Envelope.apply(-energy - borrowed, None, transitions[self.core :], None, *edges)
        found = ChainMessages(passing.forward, passing.backward)
        return ChainBeliefs(exact + around, nodes.transpose(0, 1), residual, found, edges, passing.order)


class _AroundCore(Passing):
    """Messages along the lags over the core; what a node believes is its marginal in the core chain."""

    def __init__(
        self,
        options: ChainKikuchi,
        unary: Tensor,
        transitions: Tensor,
        lengths: Tensor | None,
        messages: ChainMessages | None,
    ) -> None:
        super().__init__(options.damping, unary, transitions, lengths, messages, options.core)
        self.options = options
        self.lengths = lengths
        self.core = ChainTables.pairwise(transitions[: options.core])

    def node_log_marginals(self) -> Tensor:
        """Log-marginals of the single states in the core chain; zeros where there are none."""
        terms = (self.unary + self.received()).transpose(0, 1).detach().requires_grad_()
        options = self.options
        with torch.enable_grad():
            total = log_z(terms, self.core, self.lengths, domain=options.domain, memory_limit=options.memory_limit)
            marginals = torch.autograd.grad(total.sum(), terms)[0].transpose(0, 1)
        # rounding can leave a tiny negative number
        marginals = marginals.clamp_min(0.0)
        some = marginals.sum(-1, keepdim=True)
        return torch.where(some > 0, (marginals / some).log(), torch.zeros_like(marginals))
