"""`InferenceNetwork`: an encoder, a head and an approximation. Potentials in, beliefs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bethenet.beliefs import Beliefs
from bethenet.free_energy import free_energy
from bethenet.graph import FactorGraph
from bethenet.networks.encoding import Encoder
from bethenet.networks.heads import Head
from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph

Approximation = Callable[[FactorGraph], RegionGraph]


def plaquettes(graph: FactorGraph) -> RegionGraph:
    """Kikuchi's approximation of a grid: clusters of 2 x 2 variables."""
    return RegionGraph.kikuchi(graph, clusters="plaquettes")


APPROXIMATIONS: dict[str, Approximation] = {"bethe": RegionGraph.bethe, "plaquettes": plaquettes}
"""Approximations by name, so that a network that uses one can be saved."""


class InferenceNetwork(nn.Module):
    """Outputs pseudo-marginals tau(phi) in one forward pass.

    Args:
        encoder: see `bethenet.networks.encoding.Encoder`.
        head: penalised or consistent beliefs.
        approximation: the region graph whose free energy is to be minimised; Bethe's by default.
    """

    def __init__(self, encoder: Encoder, head: Head, approximation: Approximation = RegionGraph.bethe) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.approximation = approximation

    def forward(self, potentials: LogPotentials, inputs: Int[Tensor, "batch variables"] | None = None) -> Beliefs:
        """Beliefs about every member of the batch."""
        regions = self.approximation(potentials.graph)
        encoding = self.encoder(potentials, regions, inputs)
        return self.head.beliefs(potentials, regions, encoding)

    def penalty(self, beliefs: Beliefs) -> Float[Tensor, " batch"]:
        """The penalty of equation 7 for these beliefs."""
        return self.head.penalty(beliefs)

    def loss(
        self, potentials: LogPotentials, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> tuple[Float[Tensor, " batch"], Beliefs]:
        """Free energy plus penalty, to be minimised over phi, and the beliefs it is about."""
        beliefs = self(potentials, inputs)
        return free_energy(potentials, beliefs) + self.penalty(beliefs), beliefs


class IndependentEncoders(nn.Module):
    """Many encoders of one architecture and separate parameters, one a batch member, run as one.

    Member b of the batch is encoded by encoder b. For encoders that look at the symbolic graph only. Adam on the
    stacked parameters is Adam on each encoder by itself, because it works entry by entry.

    Args:
        make: makes one encoder with freshly drawn parameters.
        count: how many.
    """

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        made = [make() for _ in range(count)]
        stacked, buffers = torch.func.stack_module_state(made)
        self.names = list(stacked)
        self.stacked = nn.ParameterList([nn.Parameter(value.detach().clone()) for value in stacked.values()])
        self.buffer_values = buffers
        self.template = [_LogitsOf(made[0].to("meta"))]  # in a list: its parameters are not this module's

    def forward(
        self, potentials: LogPotentials, regions: RegionGraph, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> _IndependentEncoding:
        """See `Encoder`."""
        return _IndependentEncoding(self, potentials, regions)

    def logits(self, potentials: LogPotentials, regions: RegionGraph, group: int | None) -> tuple[Tensor, ...]:
        """Node logits (``group`` None) or one region group's, ``[count, ...]``."""
        parameters = {f"encoder.{name}": value for name, value in zip(self.names, self.stacked, strict=True)}
        buffers = {f"encoder.{n}": v.to(potentials.device) for n, v in self.buffer_values.items()}
        template = self.template[0]

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = torch.func.functional_call(
                template, (parameters, buffers), (potentials, regions, group)
            )
            return result

        stacked: tuple[Tensor, ...] = torch.func.vmap(one)(parameters, buffers)
        return tuple(values.flatten(0, 1) for values in stacked)


class _IndependentEncoding:
    def __init__(self, encoders: IndependentEncoders, potentials: LogPotentials, regions: RegionGraph) -> None:
        self.encoders, self.potentials, self.regions = encoders, potentials, regions

    def node_logits(self) -> tuple[Tensor, ...]:
        return self.encoders.logits(self.potentials, self.regions, None)

    def region_logits(self, group: int) -> Tensor:
        return self.encoders.logits(self.potentials, self.regions, group)[0]


class _LogitsOf(nn.Module):
    """An encoder and the reading of its logits as one module, so that both can be mapped over parameters."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, potentials: LogPotentials, regions: RegionGraph, group: int | None) -> tuple[Tensor, ...]:
        encoding: Any = self.encoder(potentials, regions)
        return encoding.node_logits() if group is None else (encoding.region_logits(group),)
