import pytest
import torch

from bethenet import FactorGraph, LogPotentials, RegionGraph
from bethenet.inference.exact import Exact
from bethenet.networks import (
    BidirectionalLSTM,
    ConsistentHead,
    FeatureOptions,
    IndependentEncoders,
    InferenceNetwork,
    NodeFeatures,
    PenalizedHead,
    ReadoutOptions,
    RegionNetwork,
    SymbolicEncoder,
    Transformer,
)
from bethenet.networks.features import sinusoids
from bethenet.networks.network import plaquettes
from bethenet.networks.symbolic import Readout
from oracle import enumerate_model

ALL_FEATURES = {"node": 3, "position": 5, "role": 2, "size": 2, "states": 2, "inputs": 4, "potentials": 3}
MIXED = FactorGraph([2, 3, 2, 3, 2], [(0, 1), (1, 2), (3, 2), (2, 4), (0,), (3,)])


def node_features(graph, **features):
    roles = torch.arange(graph.num_variables) % 2 if "role" in features else None
    return NodeFeatures(
        FeatureOptions(**features),
        max_variables=graph.num_variables,
        max_states=int(graph.state_counts.max()),
        roles=roles,
        vocabulary=7,
    )


def symbolic(graph, sequence=None, **features):
    made = node_features(graph, **(features or {"node": 5}))
    width = made.options.width
    return SymbolicEncoder(made, sequence or Transformer(width, 8, heads=2), [graph], ReadoutOptions(hidden=6))


@pytest.mark.parametrize("head", [PenalizedHead(), ConsistentHead()])
@pytest.mark.parametrize("sequence", ["transformer", "lstm"])
def test_symbolic_encoders_on_mixed_states(head, sequence):
    torch.manual_seed(0)
    module = Transformer(21, 8) if sequence == "transformer" else BidirectionalLSTM(21, 4, layers=2)
    network = InferenceNetwork(symbolic(MIXED, module, **ALL_FEATURES), head)
    potentials = LogPotentials.random(MIXED, batch_size=3)
    inputs = torch.tensor([[0, 1, 2, 3, 4], [6, -1, -1, 0, 0], [0, 1, 2, 3, 4]])
    loss, beliefs = network.loss(potentials, inputs)
    assert beliefs.batch_size == 3
    loss.sum().backward()
    for name, parameter in network.named_parameters():
        assert "readouts" in name or parameter.grad is not None, name  # each head uses some readouts only
    alone = network(potentials[1], inputs[1:2])
    torch.testing.assert_close(alone.node_marginals, beliefs.node_marginals[1:2])


def test_clamped_inputs_and_evidence_reach_the_network():
    torch.manual_seed(0)
    potentials = LogPotentials.random(MIXED)
    network = InferenceNetwork(symbolic(MIXED, node=3, inputs=4), PenalizedHead())
    changed = network(potentials, torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]))
    assert not torch.equal(changed.node_marginals[0], changed.node_marginals[1])
    network = InferenceNetwork(symbolic(MIXED, node=3, potentials=4), PenalizedHead())
    changed = network(potentials.clamp({0: [0, 1]}))
    assert not torch.equal(changed.node_marginals[0], changed.node_marginals[1])


def test_positions_are_told_apart_wherever_they_are():
    numbers = torch.tensor([0, 1, 2, 100, 101, 5000, 5001])
    for width in (5, 8):
        codes = sinusoids(numbers, width)
        assert codes.shape == (7, width)
        torch.testing.assert_close(codes[0, : (width + 1) // 2], torch.zeros((width + 1) // 2))
        assert torch.pdist(codes).min() > 0.1
    features = node_features(MIXED, position=6)
    assert not list(features.parameters())
    torch.testing.assert_close(features(LogPotentials.random(MIXED))[0], sinusoids(torch.arange(5), 6))


def test_readout_is_a_map_of_the_concatenation():
    torch.manual_seed(0)
    readout = Readout(2, 5, 4, ReadoutOptions())
    nodes, edges = torch.randn(3, 6, 5), torch.tensor([[0, 1], [4, 2]])
    together = torch.cat([nodes[:, edges[:, 0]], nodes[:, edges[:, 1]]], -1)
    weight = torch.cat([layer.weight for layer in readout.positions], 1)
    torch.testing.assert_close(readout(nodes, edges), together @ weight.T + readout.positions[0].bias)


def test_a_graph_with_other_tables_is_refused():
    network = InferenceNetwork(symbolic(FactorGraph.chain(3)), PenalizedHead())
    with pytest.raises(ValueError, match=r"no readout for tables of shape \(3, 3\)"):
        network(LogPotentials.random(FactorGraph.chain(3, 3)))


def test_features_ask_for_what_they_need():
    with pytest.raises(ValueError, match="at least one feature"):
        NodeFeatures(FeatureOptions())
    with pytest.raises(ValueError, match="roles"):
        NodeFeatures(FeatureOptions(role=2))


def test_independent_encoders_are_their_members():
    torch.manual_seed(0)
    graph = FactorGraph.grid(2, 3)
    potentials = LogPotentials.random(graph, batch_size=3)
    kept = []

    def make():
        made = symbolic(graph)
        kept.append({name: value.detach().clone() for name, value in made.state_dict().items()})
        return made

    network = InferenceNetwork(IndependentEncoders(make, 3), PenalizedHead(weight=50.0))
    singles = [InferenceNetwork(symbolic(graph), PenalizedHead(weight=50.0)) for _ in range(3)]
    for single, state in zip(singles, kept, strict=True):
        single.encoder.load_state_dict(state)
    for members in [[network], singles]:
        for number, member in enumerate(members):
            mine = potentials if member is network else potentials[number]
            optimizer = torch.optim.Adam(member.parameters(), 1e-2)
            for _ in range(5):
                optimizer.zero_grad()
                member.loss(mine)[0].sum().backward()
                optimizer.step()
    together = network(potentials)
    for number, single in enumerate(singles):
        alone = single(potentials[number])
        torch.testing.assert_close(together.node_marginals[number], alone.node_marginals[0], atol=1e-5, rtol=1e-4)


def trees():
    generator = torch.Generator().manual_seed(0)
    chain = FactorGraph.chain(6, 3)
    star = FactorGraph([2, 3, 2, 2], [(0, 1), (0, 2), (3, 0), (1,), (2,)])
    triple = FactorGraph([2, 2, 3, 2], [(0, 1, 2), (3, 2), ()])
    return [
        LogPotentials.random(g, batch_size=2, dtype=torch.float64, generator=generator) for g in (chain, star, triple)
    ]


@pytest.mark.parametrize("potentials", trees(), ids=["chain", "star", "triple"])
@pytest.mark.parametrize("head", [ConsistentHead(), PenalizedHead()])
def test_a_fresh_region_network_is_belief_propagation(potentials, head):
    network = InferenceNetwork(RegionNetwork(3, rounds=7), head).double()
    truth = enumerate_model(potentials)
    beliefs = network(potentials)
    for variable in range(potentials.graph.num_variables):
        torch.testing.assert_close(beliefs.node_marginal(variable), truth.marginal((variable,)))
    for factor in range(potentials.graph.num_factors):
        expected = truth.marginal(potentials.graph.scope(factor))
        torch.testing.assert_close(beliefs.factor_marginal(factor), expected)


def test_a_fresh_region_network_on_plaquettes_is_generalised_belief_propagation():
    potentials = LogPotentials.random(FactorGraph.grid(3, 3), batch_size=4, dtype=torch.float64)
    network = InferenceNetwork(RegionNetwork(2, rounds=120, damping=0.5), PenalizedHead(), plaquettes).double()
    beliefs = network(potentials)
    truth = Exact().run(potentials).beliefs
    assert float(beliefs.inconsistency().detach().max()) < 1e-6
    assert float((beliefs.node_marginals - truth.node_marginals).detach().abs().max()) < 0.02


def randomized(width, rounds):
    """A region network whose learnt maps do something."""
    torch.manual_seed(0)
    network = RegionNetwork(width, rounds).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize("approximation", [RegionGraph.bethe, plaquettes])
def test_turning_a_spin_over_changes_nothing_else(approximation):
    graph = FactorGraph.grid(3, 3)
    potentials = LogPotentials.random(graph, dtype=torch.float64)
    nodes, edges = potentials.tables
    turned_edges = edges.clone()
    for row, scope in enumerate(graph.factor_groups[1].variables.tolist()):
        if 4 in scope:
            turned_edges[:, row] = edges[:, row].flip(1 + scope.index(4))
    turned_nodes = nodes.clone()
    turned_nodes[:, 4] = nodes[:, 4].flip(-1)
    network = InferenceNetwork(randomized(4, 3), PenalizedHead(), approximation)
    first = network(potentials).node_marginals
    second = network(LogPotentials(graph, [turned_nodes, turned_edges])).node_marginals.clone()
    second[:, 4] = second[:, 4].flip(-1)
    torch.testing.assert_close(first, second)


def test_region_network_batch_sharing_evidence_and_other_graphs():
    network = InferenceNetwork(randomized(4, 3), ConsistentHead())
    for graph in (
        FactorGraph.grid(2, 4),
        FactorGraph.complete(4, 3),
        MIXED,
        FactorGraph([2], []),
        FactorGraph([2, 2], []),
    ):
        potentials = LogPotentials.random(graph, batch_size=3, dtype=torch.float64)
        together = network(potentials).node_marginals
        for member in range(potentials.batch_size):
            torch.testing.assert_close(
                network(potentials[member]).node_marginals[0], together[member], rtol=1e-4, atol=1e-6
            )
    chain = FactorGraph.chain(5, 3, order=2)
    shared = LogPotentials(chain, [torch.randn(1, 1, *g.table_shape, dtype=torch.float64) for g in chain.factor_groups])
    whole = LogPotentials(
        chain, [t.expand(2, len(g), *g.table_shape) for t, g in zip(shared.tables, chain.factor_groups, strict=True)]
    )
    torch.testing.assert_close(network(shared).node_marginals.expand(2, -1, -1), network(whole).node_marginals)
    seen = network(shared.clamp({1: [0, 2]})).node_marginals
    torch.testing.assert_close(seen[:, 1], torch.eye(3, dtype=torch.float64)[[0, 2]])


@pytest.mark.parametrize("approximation", [RegionGraph.bethe, plaquettes])
def test_a_region_network_knows_node_features_and_inputs(approximation):
    """A fresh network passes them by; the learnt maps use them, and a batch of inputs is its members."""
    graph = FactorGraph.grid(2, 3)
    features = node_features(graph, **ALL_FEATURES)
    encoder = RegionNetwork(4, 3, features=features)
    network = InferenceNetwork(encoder, PenalizedHead(), approximation).double()
    potentials = LogPotentials.random(graph, dtype=torch.float64)
    inputs = torch.tensor([[0, 1, 2, 3, 4, 5], [6, -1, -1, 0, 0, 0]])
    plain = InferenceNetwork(RegionNetwork(4, 3), PenalizedHead(), approximation).double()
    torch.testing.assert_close(
        network(potentials, inputs).node_marginals, plain(potentials).node_marginals.expand(2, -1, -1)
    )
    with torch.no_grad():
        for parameter in encoder.rounds.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    both = network(potentials, inputs).node_marginals
    assert (both[0] - both[1]).abs().max() > 1e-3
    for number in range(2):
        alone = network(potentials, inputs[number : number + 1]).node_marginals
        torch.testing.assert_close(alone[0], both[number])
    network.loss(potentials, inputs)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in features.parameters())
