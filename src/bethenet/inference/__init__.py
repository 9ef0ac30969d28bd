"""The verb: engines that minimise a free energy (or compute exactly), one a file."""

from bethenet.inference.engine import Engine, IterativeEngine
from bethenet.inference.exact import Exact

__all__ = ["Engine", "Exact", "IterativeEngine"]
