"""`FactorGraph`: which variables there are, how many states each has, and which factors join them."""

from bethenet.graph.graph import FactorGraph
from bethenet.graph.groups import MAX_ARITY, FactorGroup, VariableGroup

__all__ = ["MAX_ARITY", "FactorGraph", "FactorGroup", "VariableGroup"]
