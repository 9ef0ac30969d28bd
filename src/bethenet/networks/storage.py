"""Save a network that works on any graph, and load it again: a folder with ``network.json`` and the weights."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from bethenet.networks.heads import ConsistentHead, Head, PenalizedHead
from bethenet.networks.network import APPROXIMATIONS, InferenceNetwork
from bethenet.networks.region_network import RegionNetwork

DESCRIPTION, WEIGHTS = "network.json", "weights.safetensors"
FORMAT = 1


def save_network(network: InferenceNetwork, folder: str | Path, notes: dict[str, Any] | None = None) -> None:
    """Write a network into a folder, each file whole or not at all.

    Args:
        network: one with a `RegionNetwork` as its encoder and an approximation of `APPROXIMATIONS`.
        folder: made where it is missing.
        notes: anything to keep beside it: how it was trained, on what.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, save({name: value.contiguous().cpu() for name, value in network.state_dict().items()}))
    description = {"format": FORMAT, **describe(network), "notes": notes or {}}
    _replace(folder / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())


def load_network(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> InferenceNetwork:
    """Read a network from a folder. It computes in ``dtype``, which must be that of the potentials it will be given.

    Raises:
        ValueError: the folder holds no network, or one that this version does not know.
    """
    folder = Path(folder)
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        weights = load((folder / WEIGHTS).read_bytes())
    except OSError as error:
        raise ValueError(f"{folder}: expected {DESCRIPTION} and {WEIGHTS}: {error.strerror or error}") from None
    except Exception as error:
        raise ValueError(f"{folder}: expected a saved network: {error}") from None
    try:
        network = build(description)
        network.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION}: not a network this version knows: {error}") from None
    return network.to(device=device, dtype=dtype)


def describe(network: InferenceNetwork) -> dict[str, Any]:
    """What `build` needs to make a network of the same architecture."""
    encoder = network.encoder
    if not isinstance(encoder, RegionNetwork):
        raise ValueError(f"only networks with a RegionNetwork work on any graph and can be saved; got {type(encoder)}")
    if encoder.features is not None:
        raise ValueError("only networks that look at nothing but the potentials can be saved; this one has features")
    names = [name for name, approximation in APPROXIMATIONS.items() if approximation == network.approximation]
    if not names:
        raise ValueError(f"expected an approximation out of {', '.join(APPROXIMATIONS)}; got {network.approximation}")
    kind = "consistent" if isinstance(network.head, ConsistentHead) else "penalized"
    options = asdict(network.head) if isinstance(network.head, ConsistentHead | PenalizedHead) else {}
    return {
        "encoder": {"width": encoder.width, "rounds": len(encoder.rounds)},
        "head": {"kind": kind, **options},
        "approximation": names[0],
    }


def build(description: dict[str, Any]) -> InferenceNetwork:
    """A network with fresh weights from its description."""
    options = dict(description["head"])
    kind = options.pop("kind")
    head: Head = ConsistentHead(**options) if kind == "consistent" else PenalizedHead(**options)
    return InferenceNetwork(RegionNetwork(**description["encoder"]), head, APPROXIMATIONS[description["approximation"]])


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
