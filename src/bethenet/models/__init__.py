"""Models: `nn.Module`s that turn their parameters into log-potentials."""

from bethenet.models.base import Model
from bethenet.models.ising import IsingModel
from bethenet.models.tables import TableModel

__all__ = ["IsingModel", "Model", "TableModel"]
