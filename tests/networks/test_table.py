import pytest
import torch

from bethenet import LogPotentials
from bethenet.graph import FactorGraph
from bethenet.inference.bp import BeliefPropagation
from bethenet.networks import ConsistentHead, InferenceNetwork, NodeTable, PenalizedHead
from bethenet.networks.fitting import FitOptions, fit


def test_a_table_of_logits_reaches_belief_propagations_fixed_point():
    potentials = LogPotentials.random(FactorGraph.grid(3, 3), generator=torch.Generator().manual_seed(0))
    network = InferenceNetwork(NodeTable.around_zero(potentials), ConsistentHead())
    fitted = fit(network, potentials, FitOptions(steps=300, learning_rate=0.05))
    result = BeliefPropagation().run(potentials)
    torch.testing.assert_close(fitted.beliefs.node_marginals, result.beliefs.node_marginals, atol=1e-2, rtol=0)


def test_it_has_no_logits_for_larger_regions():
    potentials = LogPotentials.random(FactorGraph.chain(3))
    network = InferenceNetwork(NodeTable.around_zero(potentials), PenalizedHead())
    with pytest.raises(ValueError, match="consistent head"):
        network(potentials)
