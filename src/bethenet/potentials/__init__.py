"""`LogPotentials`: the numbers of a model, one tensor per factor group, and what has been observed."""

from bethenet.potentials.evidence import UNOBSERVED, Evidence
from bethenet.potentials.potentials import LogPotentials

__all__ = ["UNOBSERVED", "Evidence", "LogPotentials"]
