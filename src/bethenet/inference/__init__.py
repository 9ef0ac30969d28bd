"""The verb: engines that minimise a free energy (or compute exactly), one a file."""

from bethenet.inference.engine import Engine, IterativeEngine

__all__ = ["Engine", "IterativeEngine"]
