"""What a checkpoint of a run holds: everything that its future depends on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bethenet.learning.checkpoint import below_prefix, load_checkpoint, with_prefix

if TYPE_CHECKING:
    from bethenet.learning.run import Run


def tensors(run: Run) -> dict[str, Tensor]:
    """Parameters, buffers, optimisers' moments, averages, best weights, running means and generators."""
    found = with_prefix("objective", run.objective.state_dict())
    for part, optimizer in run.optimizers.items():
        found |= with_prefix(f"optimizer.{part}", optimizer.tensors())
    if run.average is not None:
        found |= with_prefix("average", dict(zip(run.weights, run.average.averages, strict=True)))
    found |= with_prefix("best", run.selection.weights)
    found |= with_prefix("recent", run.recent.sums) | with_prefix("whole_epoch", run.whole_epoch.sums)
    found |= {"generator": run.generator.get_state(), "global_generator": torch.get_rng_state()}
    if run.train.device.type == "cuda":
        found["global_cuda_generator"] = torch.cuda.get_rng_state(run.train.device)
    return found


def state(run: Run) -> dict[str, Any]:
    """The rest, as JSON has it."""
    return {
        "step": run.step,
        "epoch": run.epoch,
        "position": run.position,
        "seconds": run.seconds,
        "history": run.history,
        "selection": run.selection.state(),
        "recent_weights": run.recent.weights,
        "whole_epoch_weights": run.whole_epoch.weights,
        "metrics_bytes": 0 if run.metrics is None else run.metrics.size,
        "settings": settings(run),
        "saved_at": time.time(),
    }


def settings(run: Run) -> dict[str, Any]:
    """The options that a resumed run must share, or its numbers would be another run's."""
    options = run.options
    return {
        "seed": options.seed,
        "batch_size": options.batch_size,
        "shuffle": options.shuffle,
        "parts": sorted(run.optimizers),
        "averaging": options.averaging is not None,
    }


def restore(run: Run, path: Path) -> int:
    """Put a run into the state that a checkpoint holds; returns the length its metrics file then had, in bytes."""
    held, rest = load_checkpoint(path)
    if rest["settings"] != settings(run):
        raise ValueError(f"{path} was made with {rest['settings']}; the run to be resumed has {settings(run)}")
    run.objective.load_state_dict(below_prefix("objective", held))
    run.objective.to(run.train.device)  # buffers that it had not yet made came as they were in the file
    for part, optimizer in run.optimizers.items():
        optimizer.load(below_prefix(f"optimizer.{part}", held))
    device = run.train.device
    if run.average is not None:
        average = below_prefix("average", held)
        for name, tensor in zip(run.weights, run.average.averages, strict=True):
            tensor.copy_(average[name])
    best = {name: tensor.to(device) for name, tensor in below_prefix("best", held).items()}
    run.selection.load(rest["selection"], best)
    for means, name in ((run.recent, "recent"), (run.whole_epoch, "whole_epoch")):
        means.sums = {key: tensor.to(device) for key, tensor in below_prefix(name, held).items()}
        means.weights = rest[f"{name}_weights"]
    run.generator.set_state(held["generator"])
    torch.set_rng_state(held["global_generator"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(held["global_cuda_generator"], device)
    run.step, run.epoch, run.position = rest["step"], rest["epoch"], rest["position"]
    run.seconds, run.history = rest["seconds"], rest["history"]
    run.last_good = {name: weight.detach().clone() for name, weight in run.weights.items()}
    size: int = rest["metrics_bytes"]
    return size
