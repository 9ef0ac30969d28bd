"""Belief propagation: sum-product and max-product on any factor graph."""

from bethenet.inference.bp.engine import BeliefPropagation, MessageState

__all__ = ["BeliefPropagation", "MessageState"]
