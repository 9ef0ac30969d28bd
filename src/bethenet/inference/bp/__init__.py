"""Belief propagation: sum-product and max-product on any factor graph."""

from bethenet.inference.bp.bp import BeliefPropagation
from bethenet.inference.bp.message_passing import MessagePassing, MessageState

__all__ = ["BeliefPropagation", "MessagePassing", "MessageState"]
