"""The simplest encoder there is: logits that are learnt directly. A network then knows one model, and follows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph


class NodeTable(nn.Module):
    """A free logit for every state of every variable, whatever the potentials are. For consistent heads.

    Args:
        logits: where they start, per variable group of the graph.
    """

    def __init__(self, logits: Sequence[Float[Tensor, "batch variables states"]]) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(start.detach().clone()) for start in logits])

    @classmethod
    def around_zero(
        cls, model: LogPotentials, noise: float = 0.01, *, generator: torch.Generator | None = None
    ) -> NodeTable:
        """Normal numbers, which break symmetries."""
        shapes = [(1, group.variables.numel(), group.states) for group in model.graph.variable_groups]
        return cls([noise * torch.randn(shape, generator=generator).to(model.device, model.dtype) for shape in shapes])

    def forward(
        self, potentials: LogPotentials, regions: RegionGraph, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> NodeTable:
        """See `Encoder`."""
        return self

    def node_logits(self) -> tuple[Tensor, ...]:
        """See `Encoding`."""
        return tuple(self.tables)

    def region_logits(self, group: int) -> Tensor:
        """See `Encoding`; there are none."""
        raise ValueError("a table of node logits has none for larger regions: use a consistent head")
