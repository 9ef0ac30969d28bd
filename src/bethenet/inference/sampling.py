"""Block Gibbs sampling of any factor graph: all variables of one colour are drawn at once, for all chains at once.

The states of the chains are integers ``[chains, batch, variables]``, one set of chains for each member of the
potentials' batch. They are all there is to a chain: keep them, and go on later from the same or from changed
potentials (persistent chains).

For a colour's variables the conditional log-probabilities are node terms plus, for each factor that touches one of
them, one row of that factor's table: the row at which its other variables stand. Rows are gathered, shared tables are
never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.conditionals import Conditionals, cells_of, colour_blocks, first_cells, look_up
from bethenet.numerics import log_sum_exp
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph

LARGEST_GATHER = 2**26
CACHED_GATHER = 2**20
"""Table entries gathered at a time, the second on a CPU, where staying in its cache is worth a factor of 3. More chains
than fit are swept one block after another."""

SOFT_GAP = 10.0
"""Nats by which a softened impossible entry lies below its table's least possible one."""

REPAIR_SWEEPS = 100
"""Sweeps of the softened model in which `GibbsSampler.start` looks for possible states."""

States = Int[Tensor, "chains batch variables"]


class GibbsSampler:
    """Gibbs sampling from ``P(x) ~ exp(inverse_temperature * log-potentials + (1 - inverse_temperature) * base)``,
    evidence always counted in full.

    Args:
        potentials: the model, or a batch of models or of evidence.
        base: log-weights of each variable's states ``[batch | 1, variables | 1, states]`` per variable group: the
            independent distribution at inverse temperature 0. Uniform by default.

    >>> from bethenet import FactorGraph
    >>> model = LogPotentials.random(FactorGraph.grid(3, 3), generator=torch.Generator().manual_seed(0))
    >>> sampler, generator = GibbsSampler(model), torch.Generator().manual_seed(1)
    >>> states = sampler.sweep(sampler.start(chains=100, generator=generator), 10, generator=generator)
    >>> states.shape
    torch.Size([100, 1, 9])
    """

    def __init__(self, potentials: LogPotentials, base: Sequence[Tensor] | None = None) -> None:
        self.potentials = potentials.detach()
        self.graph = potentials.graph
        self.base: LogPotentials | None = None
        if base is not None:
            # a model of its own, so that shapes are checked and terms can be scored
            base = [term.to(self.potentials.device, self.potentials.dtype) for term in base]
            self.base = LogPotentials(self.graph, self.potentials.tables, base)
            if self.base.batch_size not in (1, potentials.batch_size):
                raise ValueError(f"base: expected a batch of 1 or {potentials.batch_size}, got {self.base.batch_size}")
        self.blocks = [Conditionals(block, self.potentials, self.base) for block in colour_blocks(self.graph)]

    def start(self, chains: int, *, generator: torch.Generator | None = None) -> States:
        """Possible states to start from: each variable drawn by itself, from the base and the evidence.

        Where that gives impossible states, those chains run through a softened model until they stand on possible ones.

        Raises:
            ImpossibleEvidenceError: the evidence leaves a variable no state.
            ValueError: no possible state was found for some chain; give `sweep` states of your own.
        """
        states = self.independent(chains, generator=generator)
        if not self.potentials.has_zeros:
            return states
        softened = GibbsSampler(soften(self.potentials), None if self.base is None else self.base.node_terms)
        for _ in range(REPAIR_SWEEPS):
            impossible = (self.score(states) == -math.inf).unsqueeze(-1)
            if not bool(impossible.any()):
                return states
            states = torch.where(impossible, softened.sweep(states, generator=generator), states)
        raise ValueError(
            f"no possible state found in {REPAIR_SWEEPS} sweeps of a softened model: the constraints are hard to "
            "satisfy, or contradict the evidence; start from states of your own that satisfy them"
        )

    def independent(self, chains: int, *, generator: torch.Generator | None = None) -> States:
        """Exact samples at inverse temperature 0, where the variables are independent."""
        batch = self.potentials.batch_size
        states = torch.empty(chains, batch, self.graph.num_variables, dtype=torch.long, device=self.potentials.device)
        for group, term in zip(self.graph.variable_groups, self._base_terms(), strict=True):
            logits = term.expand(chains, batch, group.variables.numel(), group.states)
            if bool((term == -math.inf).all(-1).any()):
                raise ImpossibleEvidenceError("the evidence leaves a variable no possible state")
            states[..., group.variables] = draw(logits, generator)
        return states

    def sweep(
        self,
        states: States,
        sweeps: int = 1,
        *,
        inverse_temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> States:
        """New states after drawing every variable ``sweeps`` times, colour after colour."""
        expected = (self.potentials.batch_size, self.graph.num_variables)
        if states.dim() != 3 or tuple(states.shape[1:]) != expected or states.dtype != torch.long:
            raise ValueError(
                f"expected integer states of shape [chains, {expected[0]}, {expected[1]}]; "
                f"got {states.dtype} of shape {list(states.shape)}"
            )
        widest = self.potentials.batch_size * max((block.width for block in self.blocks), default=1)
        largest = CACHED_GATHER if states.device.type == "cpu" else LARGEST_GATHER
        # variables first: a factor's other variables are then whole rows to gather
        columns = states.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        for part in columns.split(max(1, largest // max(1, widest)), dim=1):
            for _ in range(sweeps):
                for block in self.blocks:
                    part[block.variables] = draw(block.logits(part, inverse_temperature), generator)
        return columns.permute(1, 2, 0)

    def score(self, states: States) -> Float[Tensor, "chains batch"]:
        """Log of the unnormalised probability (nats) at inverse temperature 1, each chain under its own member."""
        return self.factor_score(states) + _node_score(self.potentials, states)

    def factor_score(self, states: States) -> Float[Tensor, "chains batch"]:
        """Sum of the factors' log-potentials (nats), without evidence."""
        total = torch.zeros(states.shape[:2], dtype=self.potentials.dtype, device=states.device)
        for table, group in zip(self.potentials.tables, self.graph.factor_groups, strict=True):
            total = total + look_up(table, cells_of(states, group.variables, group.table_shape))
        return total

    def base_score(self, states: States) -> Float[Tensor, "chains batch"] | float:
        """Sum of the variables' base log-weights (nats), without evidence."""
        return 0.0 if self.base is None else _node_score(self.base, states)

    def base_log_z(self) -> Float[Tensor, " batch"]:
        """Log partition function (nats) at inverse temperature 0."""
        total = torch.zeros(self.potentials.batch_size, dtype=self.potentials.dtype, device=self.potentials.device)
        for group, term in zip(self.graph.variable_groups, self._base_terms(), strict=True):
            each = log_sum_exp(term, -1)
            total = total + each.expand(-1, group.variables.numel()).sum(1)
        return total

    def beliefs(
        self, states: States, sweeps: int, *, generator: torch.Generator | None = None
    ) -> tuple[Beliefs, States]:
        """How often each factor's and each variable's states come up in ``sweeps`` further sweeps of all chains, and
        the chains' states after them. Sweeps that shall not count, run by `sweep` before.
        """
        if sweeps < 1 or states.shape[0] < 1:
            raise ValueError(f"expected at least one sweep and one chain; got {sweeps} and {states.shape[0]}")
        regions = RegionGraph.bethe(self.graph)
        counts = [
            torch.zeros(states.shape[1], len(group), *group.table_shape, dtype=torch.float64, device=states.device)
            for group in regions.groups
        ]
        for _ in range(sweeps):
            states = self.sweep(states, generator=generator)
            for count, group in zip(counts, regions.groups, strict=True):
                first = first_cells(count.shape[0], len(group), math.prod(group.table_shape), count.device)
                cells = cells_of(states, group.variables, group.table_shape) + first
                count.view(-1).index_add_(0, cells.flatten(), count.new_ones(1).expand(cells.numel()))
        total = sweeps * states.shape[0]
        return Beliefs(regions, [(count / total).log().to(self.potentials.dtype) for count in counts]), states

    def _base_terms(self) -> list[Tensor]:
        if self.base is None:
            return list(self.potentials.node_terms)
        return [term + base for term, base in zip(self.potentials.node_terms, self.base.node_terms, strict=True)]


def draw(logits: Float[Tensor, "*shape states"], generator: torch.Generator | None = None) -> Int[Tensor, "*shape"]:
    """One state for each row of unnormalised log-probabilities. A state of probability zero is never drawn (where all
    have probability zero, the draw means nothing).
    """
    uniforms = torch.rand(logits.shape[:-1], dtype=logits.dtype, device=logits.device, generator=generator)
    if logits.shape[-1] == 2:
        chances = (logits[..., 1] - logits[..., 0]).sigmoid_()
        # NaN (both impossible) compares as false; comparing into integers saves a slow conversion
        return torch.lt(uniforms, chances, out=torch.empty_like(chances, dtype=torch.long))
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - torch.where(torch.isfinite(largest), largest, torch.zeros_like(largest))).exp()
    cumulative = weights.cumsum(-1)
    passed = cumulative <= (uniforms * cumulative[..., -1]).unsqueeze(-1)
    return passed.sum(-1).clamp_(max=logits.shape[-1] - 1)


def soften(potentials: LogPotentials) -> LogPotentials:
    """The model with impossible table entries made merely improbable: `SOFT_GAP` nats below the least possible entry of
    all tables. Evidence stays as it is; possible states keep their score.
    """

    def least(table: Tensor) -> Tensor:
        return torch.where(torch.isfinite(table), table, torch.zeros_like(table)).amin()

    if not any(table.numel() for table in potentials.tables):
        return potentials
    floor = torch.stack([least(table) for table in potentials.tables if table.numel()]).amin() - SOFT_GAP
    tables = [torch.where(table == -math.inf, floor, table) for table in potentials.tables]
    return LogPotentials(potentials.graph, tables, potentials.node_terms, potentials.observed)


def _node_score(potentials: LogPotentials, states: Tensor) -> Tensor:
    total = torch.zeros(states.shape[:2], dtype=potentials.dtype, device=states.device)
    for term, group in zip(potentials.node_terms, potentials.graph.variable_groups, strict=True):
        total = total + look_up(term, states[..., group.variables])
    return total
