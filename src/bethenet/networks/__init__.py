"""Inference networks: encoders over a symbolic graph, heads that turn encodings into beliefs."""

from bethenet.networks.features import FeatureOptions, NodeFeatures
from bethenet.networks.heads import ConsistentHead, PenalizedHead
from bethenet.networks.network import IndependentEncoders, InferenceNetwork
from bethenet.networks.region_network import RegionNetwork
from bethenet.networks.symbolic import BidirectionalLSTM, ReadoutOptions, SymbolicEncoder, Transformer
from bethenet.networks.table import NodeTable

__all__ = [
    "BidirectionalLSTM",
    "ConsistentHead",
    "FeatureOptions",
    "IndependentEncoders",
    "InferenceNetwork",
    "NodeFeatures",
    "NodeTable",
    "PenalizedHead",
    "ReadoutOptions",
    "RegionNetwork",
    "SymbolicEncoder",
    "Transformer",
]
