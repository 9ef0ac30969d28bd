"""`FactorGraph`: which variables there are, how many states each has, and which factors join them."""

from bethenet.graph.graph import FactorGraph
from bethenet.graph.groups import FactorGroup, VariableGroup

__all__ = ["FactorGraph", "FactorGroup", "VariableGroup"]
