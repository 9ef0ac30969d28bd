"""Node embeddings: what a symbolic encoder knows of each variable before it looks at the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.networks.fields import bounded, unary_log_potentials
from bethenet.potentials import LogPotentials

LONGEST_WAVELENGTH = 1e4
"""Of the sinusoidal codes of positions, over 2 pi: more variables than that are told apart less well."""


@dataclass(frozen=True)
class FeatureOptions:
    """Which features there are and how wide each is; 0 leaves one out. They are concatenated."""

    node: int = 0
    """An embedding learnt for each variable (by its number)."""
    position: int = 0
    """Sines and cosines of each variable's number, which need no learning."""
    role: int = 0
    """An embedding of each variable's role (visible or hidden, say)."""
    size: int = 0
    """An embedding of the number of variables."""
    states: int = 0
    """An embedding of the number of states."""
    inputs: int = 0
    """An embedding of the observed input at each variable."""
    potentials: int = 0
    """A linear map of the variable's own log-potentials (its unary factors and evidence, centred)."""

    @property
    def width(self) -> int:
        """Width of the concatenation."""
        return self.node + self.position + self.role + self.size + self.states + self.inputs + self.potentials


class NodeFeatures(nn.Module):
    """Concatenated embeddings of every variable, ``[batch, variables, width]``.

    Args:
        options: the features wanted.
        max_variables: the most variables a graph may have (for ``node`` and ``size``).
        max_states: the most states a variable may have (for ``states`` and ``potentials``).
        roles: the role of each variable (for ``role``).
        vocabulary: how many different inputs there are (for ``inputs``); the input -1 means none.
    """

    def __init__(
        self,
        options: FeatureOptions,
        *,
        max_variables: int = 0,
        max_states: int = 0,
        roles: Int[Tensor, " variables"] | None = None,
        vocabulary: int = 0,
    ) -> None:
        super().__init__()
        if options.width == 0:
            raise ValueError("expected at least one feature of positive width, got none")
        self.options = options
        self.max_states = max_states
        self.register_buffer("roles", roles)
        self.roles: Tensor | None
        if options.role and roles is None:
            raise ValueError("role features need the variables' roles")
        self.node = nn.Embedding(max_variables, options.node) if options.node else None
        self.role = nn.Embedding(int(roles.max()) + 1, options.role) if options.role and roles is not None else None
        self.size = nn.Embedding(max_variables + 1, options.size) if options.size else None
        self.states = nn.Embedding(max_states + 1, options.states) if options.states else None
        self.inputs = nn.Embedding(vocabulary + 1, options.inputs) if options.inputs else None
        self.potentials = nn.Linear(max_states, options.potentials) if options.potentials else None

    def forward(
        self, potentials: LogPotentials, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> Float[Tensor, "batch variables width"]:
        """Embed every variable; the batch is 1 unless potentials or inputs make it more."""
        graph = potentials.graph
        variables = torch.arange(graph.num_variables, device=graph.device)
        parts: list[Tensor] = []
        if self.node is not None:
            parts.append(self.node(variables).unsqueeze(0))
        if self.options.position:
            parts.append(sinusoids(variables, self.options.position).to(potentials.dtype).unsqueeze(0))
        if self.role is not None and self.roles is not None:
            parts.append(self.role(self.roles).unsqueeze(0))
        if self.size is not None:
            parts.append(self.size(torch.full_like(variables, graph.num_variables)).unsqueeze(0))
        if self.states is not None:
            parts.append(self.states(graph.state_counts).unsqueeze(0))
        if self.inputs is not None:
            given = torch.full_like(variables, -1).unsqueeze(0) if inputs is None else inputs
            parts.append(self.inputs(given + 1))
        if self.potentials is not None:
            parts.append(self.potentials(self._padded(unary_log_potentials(potentials), potentials)))
        batch = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(batch, -1, -1) for part in parts], dim=-1)

    def _padded(self, terms: tuple[Tensor, ...], potentials: LogPotentials) -> Tensor:
        graph = potentials.graph
        batch = max((term.shape[0] for term in terms), default=1)
        result = torch.zeros(
            batch, graph.num_variables, self.max_states, dtype=potentials.dtype, device=potentials.device
        )
        for term, group in zip(terms, graph.variable_groups, strict=True):
            result[:, group.variables, : group.states] = bounded(term)
        return result


def sinusoids(positions: Int[Tensor, " positions"], width: int) -> Float[Tensor, "positions width"]:
    """Sines, then cosines, of wavelengths from 2 pi up to ``LONGEST_WAVELENGTH`` times that, in geometric steps."""
    steps = torch.arange((width + 1) // 2, device=positions.device) / max(1, (width + 1) // 2 - 1)
    angles = positions.unsqueeze(-1) * LONGEST_WAVELENGTH**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]
