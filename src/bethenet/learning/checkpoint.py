"""Checkpoints: one safetensors file each, tensors in its body and everything else as JSON in its header.

Nothing is pickled, so loading a checkpoint runs no code. A file appears under its name only when it is complete and on
the disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

FORMAT = 1
_NAME = re.compile(r"step-(\d+)\.safetensors")


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able state to ``path``: complete under that name, or not at all."""
    # copies: safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    content = save(plain, {"format": str(FORMAT), "state": json.dumps(state)})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_checkpoint` wrote.

    Raises:
        ValueError: the file is not such a checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a checkpoint ({error})") from None
    if header.get("format") != str(FORMAT):
        raise ValueError(f"{path}: expected a checkpoint of format {FORMAT}, got {header.get('format')}")
    return tensors, json.loads(header["state"])


def load_weights(path: Path | str, module: nn.Module, prefix: str = "") -> None:
    """Copy the weights that a file holds into a module's parameters of the same names.

    Args:
        path: ``best.safetensors`` of a training directory, say.
        module: where the weights go; an objective, or with ``prefix="model."`` its model.
        prefix: what the names in the file begin with.
    """
    tensors, _ = load_checkpoint(Path(path))
    parameters = dict(module.named_parameters())
    missing = [name for name in parameters if prefix + name not in tensors]
    if missing:
        raise ValueError(f"{path}: no weights for {missing}; there are {sorted(tensors)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[prefix + name])


class CheckpointDirectory:
    """The last few checkpoints of a run, by step."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def files(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        found = [(int(match[1]), file) for file in self.path.glob("step-*") if (match := _NAME.fullmatch(file.name))]
        return [file for _, file in sorted(found)]

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write one and remove those that are too many."""
        save_checkpoint(self.path / f"step-{step:09d}.safetensors", tensors, state)
        for old in self.files()[: -self.keep]:
            old.unlink()

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        files = self.files()
        return files[-1] if files else None


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under longer names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def below_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, under their shorter names."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
