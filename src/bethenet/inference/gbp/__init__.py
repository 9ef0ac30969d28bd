"""Generalised belief propagation: the free energy of any region graph, minimised by a convergent double loop."""

from bethenet.inference.gbp.engine import GBPState, GeneralizedBeliefPropagation

__all__ = ["GBPState", "GeneralizedBeliefPropagation"]
