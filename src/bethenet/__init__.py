"""Discrete Markov random fields: exact and approximate inference, and learning by minimising region free energies."""

from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError, MemoryLimitError, ModelFileError
from bethenet.free_energy import free_energy
from bethenet.graph import FactorGraph, FactorGroup, VariableGroup
from bethenet.potentials import UNOBSERVED, LogPotentials
from bethenet.regions import RegionGraph
from bethenet.result import InferenceResult, Status

__version__ = "0.1.0"

__all__ = [
    "UNOBSERVED",
    "Beliefs",
    "FactorGraph",
    "FactorGroup",
    "ImpossibleEvidenceError",
    "InferenceResult",
    "LogPotentials",
    "MemoryLimitError",
    "ModelFileError",
    "RegionGraph",
    "Status",
    "VariableGroup",
    "free_energy",
]
