"""Models: `nn.Module`s that turn their parameters into log-potentials."""

from bethenet.models.base import Model
from bethenet.models.chain_bp import ChainBeliefPropagation
from bethenet.models.chain_kikuchi import ChainKikuchi
from bethenet.models.directed_hmm import DirectedHMM
from bethenet.models.hidden_chain import HMMOptions
from bethenet.models.hmm import UndirectedHMM
from bethenet.models.ising import IsingModel
from bethenet.models.rbm import RBM
from bethenet.models.tables import TableModel

__all__ = [
    "RBM",
    "ChainBeliefPropagation",
    "ChainKikuchi",
    "DirectedHMM",
    "HMMOptions",
    "IsingModel",
    "Model",
    "TableModel",
    "UndirectedHMM",
]
