"""What an encoder hands to a head: logits for variables and for regions, computed when asked for."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Int
from torch import Tensor

from bethenet.potentials import LogPotentials
from bethenet.regions import RegionGraph


class Encoding(Protocol):
    """A graph as an encoder sees it."""

    def node_logits(self) -> tuple[Tensor, ...]:
        """Scores ``[batch, variables, states]`` per variable group of the graph."""
        ...

    def region_logits(self, group: int) -> Tensor:
        """Scores ``[batch, regions, *table]`` of one region group: f(G, alpha; phi) of equation 5."""
        ...


class Encoder(Protocol):
    """Anything that encodes a graph. Encoders are ``nn.Module``s and own the layers that read logits off them."""

    def __call__(
        self, potentials: LogPotentials, regions: RegionGraph, inputs: Int[Tensor, "batch variables"] | None = None
    ) -> Encoding:
        """Encode the graph of ``potentials`` (and the potentials themselves, where the encoder looks at them).

        Args:
            potentials: the model.
            regions: the regions whose logits may be asked for.
            inputs: what was observed at each variable (words of a sentence, say), where the encoder takes any.
        """
        ...
