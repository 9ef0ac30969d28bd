"""Samples of random Ising models: the data of the paper's learning experiment (table 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from bethenet.graph import FactorGraph
from bethenet.inference.exact import Exact
from bethenet.models.ising import IsingModel


@dataclass(frozen=True)
class IsingData:
    """A random Ising model (or several, independent) and exact samples of it. States are 0 (spin -1) and 1 (+1)."""

    model: IsingModel
    """What the samples are drawn from."""
    train: Int[Tensor, "samples *models variables"]
    validation: Int[Tensor, "samples *models variables"]
    test: Int[Tensor, "samples *models variables"]


def ising_data(
    rows: int,
    columns: int,
    *,
    samples: int = 1000,
    models: int = 1,
    coupling_scale: float = 1.0,
    field_scale: float = 1.0,
    seed: int = 0,
) -> IsingData:
    """Training, validation and test samples of a random grid model, drawn exactly.

    Args:
        rows: of the grid.
        columns: of the grid.
        samples: in each of the three parts.
        models: how many random models; more than one gives the samples an axis for them.
        coupling_scale: standard deviation of the couplings.
        field_scale: standard deviation of the fields.
        seed: of the model and its samples.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = IsingModel.random(
        FactorGraph.grid(rows, columns),
        coupling_scale=coupling_scale,
        field_scale=field_scale,
        models=models,
        generator=generator,
    )
    with torch.no_grad():
        drawn = Exact().sample(truth.log_potentials(), 3 * samples, generator=generator)
    drawn = drawn.squeeze(1) if models == 1 else drawn
    return IsingData(truth.requires_grad_(False), *drawn.split(samples))
