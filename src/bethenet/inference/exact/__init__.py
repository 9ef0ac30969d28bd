"""Exact inference: bucket elimination in a good order, with the memory it needs predicted before it starts."""

from bethenet.inference.exact.exact import Exact

__all__ = ["Exact"]
