import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, LogPotentials, RegionGraph, free_energy
from bethenet.networks import ConsistentHead, InferenceNetwork, PenalizedHead, RegionNetwork
from bethenet.networks.network import plaquettes
from oracle import enumerate_model, models


class RandomLogits:
    """An encoding of independent random logits."""

    def __init__(self, potentials, regions, seed=0):
        generator = torch.Generator().manual_seed(seed)
        batch = potentials.batch_size

        def draw(*shape):
            return torch.randn(batch, *shape, generator=generator, dtype=potentials.dtype).requires_grad_()

        self.nodes = tuple(draw(g.variables.numel(), g.states) for g in potentials.graph.variable_groups)
        self.regions = [draw(len(group), *group.table_shape) for group in regions.groups]

    def node_logits(self):
        return self.nodes

    def region_logits(self, group):
        return self.regions[group]


@settings(deadline=None, max_examples=40)
@given(models(batch=2), st.sampled_from(["l2", "kl", "reverse-kl"]))
def test_penalized_beliefs_are_equations_5_to_7(potentials, distance):
    graph, regions = potentials.graph, RegionGraph.bethe(potentials.graph)
    encoding = RandomLogits(potentials, regions)
    head = PenalizedHead(weight=3.0, distance=distance)
    beliefs = head.beliefs(potentials, regions, encoding)
    penalty = torch.zeros(potentials.batch_size, dtype=torch.float64)
    for variable in range(graph.num_variables):
        said = []
        for factor in range(graph.num_factors):
            scope = graph.scope(factor)
            if variable not in scope or len(scope) < 2:
                continue
            group, row = graph.locate_factor(factor)
            table = torch.softmax(encoding.regions[group][:, row].flatten(1), 1).reshape(
                2, *[int(graph.state_counts[v]) for v in scope]
            )
            torch.testing.assert_close(beliefs.factor_marginal(factor), table)
            others = [1 + axis for axis, member in enumerate(scope) if member != variable]
            said.append(table.sum(others))
        group, row = graph.locate_variable(variable)
        node = sum(said) / len(said) if said else torch.softmax(encoding.nodes[group][:, row], -1)
        torch.testing.assert_close(beliefs.node_marginal(variable), node)
        for factor_marginal in said:
            p, q = node, factor_marginal
            penalty += {
                "l2": (p - q).square(),
                "kl": p * (p / q).log(),
                "reverse-kl": q * (q / p).log(),
            }[distance].sum(-1)
    torch.testing.assert_close(head.penalty(beliefs), 3.0 * penalty / max(graph.num_factors, 1))
    for factor in range(graph.num_factors):
        scope = graph.scope(factor)
        if len(scope) == 1:
            torch.testing.assert_close(beliefs.factor_marginal(factor), beliefs.node_marginal(scope[0]))


def test_penalty_without_division_by_the_number_of_factors():
    graph = FactorGraph.grid(2, 3)
    potentials = LogPotentials.random(graph)
    beliefs = PenalizedHead().beliefs(
        potentials, RegionGraph.bethe(graph), RandomLogits(potentials, RegionGraph.bethe(graph))
    )
    whole = PenalizedHead(weight=2.0, per_factor=False).penalty(beliefs)
    torch.testing.assert_close(whole, graph.num_factors * PenalizedHead(weight=2.0).penalty(beliefs))


@settings(deadline=None, max_examples=30)
@given(models(batch=2, zeros=True))
def test_no_mass_where_the_model_has_none(potentials):
    regions = RegionGraph.bethe(potentials.graph)
    beliefs = PenalizedHead().beliefs(potentials, regions, RandomLogits(potentials, regions))
    for table, belief in zip(potentials.tables, beliefs.factor_log_tables, strict=True):
        if table.dim() > 3:  # beliefs of single variables are averages of what their factors allow
            impossible = (table == -math.inf).expand_as(belief)
            assert bool((belief[impossible] == -math.inf).all())
    for table in beliefs.log_tables:
        assert not bool(torch.isnan(table).any())


@settings(deadline=None, max_examples=40)
@given(models(batch=2))
def test_consistent_beliefs_agree_and_have_the_least_free_energy(potentials):
    regions = RegionGraph.bethe(potentials.graph)
    encoding = RandomLogits(potentials, regions)
    head = ConsistentHead()
    beliefs = head.beliefs(potentials, regions, encoding)
    assert float(beliefs.inconsistency().detach().max()) < 1e-6
    assert float(head.penalty(beliefs).detach().abs().max()) == 0.0
    energy = free_energy(potentials, beliefs)
    energy.sum().backward()
    for logits in encoding.nodes:
        assert bool(torch.isfinite(logits.grad).all())


def test_consistent_head_wants_bethe_regions():
    network = InferenceNetwork(RegionNetwork(2, 1), ConsistentHead(), plaquettes)
    with pytest.raises(ValueError, match="Bethe's regions"):
        network(LogPotentials.random(FactorGraph.grid(3, 3)))


@pytest.mark.parametrize(
    ("options", "message"), [({"distance": "l1"}, "one of l2, kl"), ({"weight": -1.0}, "at least 0")]
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        PenalizedHead(**options)


def test_penalized_kikuchi_beliefs_average_over_clusters():
    graph = FactorGraph.grid(3, 4)
    potentials = LogPotentials.random(graph, batch_size=2, dtype=torch.float64)
    regions = plaquettes(graph)
    encoding = RandomLogits(potentials, regions)
    beliefs = PenalizedHead().beliefs(potentials, regions, encoding)
    # variable 5 lies in four plaquettes; each of its edges in two of them
    clusters = [row for row, scope in enumerate(regions.groups[0].variables.tolist()) if 5 in scope]
    assert len(clusters) == 4
    for table in beliefs.log_tables:
        total = table.exp().flatten(2).sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total))
    truth = enumerate_model(potentials)
    node = beliefs.node_marginal(5)
    assert node.shape == truth.marginal((5,)).shape
    said = [
        beliefs.log_tables[0][:, row]
        .exp()
        .sum([1 + a for a, v in enumerate(regions.groups[0].variables[row].tolist()) if v != 5])
        for row in clusters
    ]
    torch.testing.assert_close(node, torch.stack(said).mean(0))
