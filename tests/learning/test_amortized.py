import copy

import pytest
import torch
from torch import nn

from bethenet import Beliefs, FactorGraph, RegionGraph, free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.inference.mean_field import MeanField
from bethenet.learning import (
    Batch,
    ByEngine,
    ByNetwork,
    EngineRefinement,
    Likelihood,
    OptimizerOptions,
    Trainer,
    TrainerOptions,
)
from bethenet.learning.amortized import cross_entropy
from bethenet.models import IsingModel, TableModel
from bethenet.networks import ConsistentHead, InferenceNetwork, NodeTable
from bethenet.numerics import safe_log


class FreeLogits(nn.Module):
    """The simplest network: a logit per entry of every factor's table; nodes are averages, as in equation 6."""

    def __init__(self, graph, weight=1.0, batch=1, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.graph = graph
        self.weight = weight
        self.logits = nn.ParameterList(
            0.1 * torch.randn(batch, len(group), *group.table_shape, generator=generator, dtype=torch.float64)
            for group in graph.factor_groups
        )
        self.seen_inputs = []

    def forward(self, potentials, inputs=None):
        self.seen_inputs.append(inputs)
        regions = RegionGraph.bethe(self.graph)
        tables = [torch.log_softmax(table.flatten(2), -1).reshape(table.shape) for table in self.logits]
        degrees = self.graph.degrees[0].unsqueeze(-1)
        nodes = torch.zeros(tables[0].shape[0], self.graph.num_variables, 2, dtype=torch.float64)
        for table, group in zip(tables, self.graph.factor_groups, strict=True):
            for axis in range(group.arity):
                nodes = nodes.index_add(1, group.rows[:, axis], self._marginal(table, axis))
        return Beliefs(regions, [*tables, safe_log(nodes / degrees)])

    def penalty(self, beliefs):
        total = 0.0
        nodes = beliefs.node_log_tables[0].exp()
        for table, group in zip(beliefs.log_tables, self.graph.factor_groups, strict=False):
            for axis in range(group.arity):
                gap = nodes[:, group.rows[:, axis]] - self._marginal(table, axis)
                total = total + gap.square().flatten(1).sum(1)
        return self.weight / self.graph.num_factors * total

    @staticmethod
    def _marginal(table, axis):
        others = [2 + other for other in range(table.dim() - 2) if other != axis]
        return table.exp().sum(others) if others else table.exp()


def ising(scale=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return IsingModel.random(FactorGraph.grid(3, 3), coupling_scale=scale, generator=generator).double()


def samples(model, count):
    return Exact().sample(model.log_potentials().detach(), count, generator=torch.Generator().manual_seed(1))[:, 0]


def latent_model():
    graph = FactorGraph.complete(4)
    return TableModel(
        graph, observed=[0, 1], scale=0.5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


SGD = OptimizerOptions("sgd", learning_rate=0.1)


def algorithm_1_by_hand(model, network, clamped_network, data, steps, clamped_steps, rate=0.1):
    """Algorithm 1 with plain gradient steps, as it is printed."""

    def descend(loss, parameters):
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data -= rate * gradient

    for _ in range(steps):
        beliefs = network(None)
        descend(
            (free_energy(model.log_potentials(), beliefs) + network.penalty(beliefs)).sum(), [*network.parameters()]
        )
    log_z = -free_energy(model.log_potentials(), network(None).detach())
    if clamped_network is None:
        loss = -model.score(data).mean() + log_z.sum()
    else:
        for _ in range(clamped_steps):
            beliefs = clamped_network(None)
            terms = free_energy(model.clamped(data), beliefs) + clamped_network.penalty(beliefs)
            descend(terms.mean(), [*clamped_network.parameters()])
        loss = free_energy(model.clamped(data), clamped_network(None).detach()).mean() + log_z.sum()
    descend(loss, [*model.parameters()])


@pytest.mark.parametrize(("steps", "batches"), [(1, 3), (4, 2)])
def test_algorithm_1_without_latents_is_as_printed(steps, batches):
    model = ising()
    data = samples(model, 6)
    network = FreeLogits(model.graph)
    by_hand, network_by_hand = copy.deepcopy(model), copy.deepcopy(network)
    options = TrainerOptions(epochs=batches, batch_size=None, shuffle=False, optimizers={"model": SGD, "network": SGD})
    Trainer(Likelihood(model, ByNetwork(network, steps=steps)), options).fit(data)
    for _ in range(batches):
        algorithm_1_by_hand(by_hand, network_by_hand, None, data, steps, 0)
    for found, expected in zip(
        [*model.parameters(), *network.parameters()],
        [*by_hand.parameters(), *network_by_hand.parameters()],
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class SoftClamped(FreeLogits):
    """Beliefs of a clamped model: all mass on the observed states."""

    def __init__(self, graph, data, observed, seed=0):
        super().__init__(graph, batch=data.shape[0], seed=seed)
        self.allowed = []
        for group in graph.factor_groups:
            mask = torch.ones(data.shape[0], len(group), *group.table_shape, dtype=torch.bool)
            for axis in range(group.arity):
                for factor, variable in enumerate(group.variables[:, axis].tolist()):
                    if variable in observed:
                        state = data[:, observed.index(variable)]
                        good = (torch.arange(2) == state.unsqueeze(1)).reshape(
                            -1, *[2 if a == axis else 1 for a in range(group.arity)]
                        )
                        mask[:, factor] &= good
            self.allowed.append(mask)

    def forward(self, potentials, inputs=None):
        free = self.logits
        tables = [table.masked_fill(~mask, -1e30) for table, mask in zip(free, self.allowed, strict=True)]
        self.logits = _Plain(tables)
        try:
            beliefs = super().forward(potentials, inputs)
        finally:
            self.logits = free
        floor = [table.masked_fill(table < -1e20, -torch.inf) for table in beliefs.log_tables]
        return Beliefs(beliefs.regions, floor)


class _Plain(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def __iter__(self):
        return iter(self.tables)


def test_algorithm_1_with_latents_is_as_printed():
    model = latent_model()
    data = torch.tensor([[0, 0], [0, 1], [1, 1]])
    network, clamped = FreeLogits(model.graph), SoftClamped(model.graph, data, [0, 1], seed=1)
    copies = [copy.deepcopy(module) for module in (model, network, clamped)]
    options = TrainerOptions(
        epochs=2,
        batch_size=None,
        shuffle=False,
        optimizers={"model": SGD, "network": SGD, "clamped_network": SGD},
    )
    objective = Likelihood(model, ByNetwork(network, steps=2), ByNetwork(clamped, steps=3))
    assert list(objective.parts()) == ["model", "network", "clamped_network"]
    Trainer(objective, options).fit(data)
    for _ in range(2):
        algorithm_1_by_hand(*copies, data, 2, 3)
    for module, by_hand in zip((model, network, clamped), copies, strict=True):
        for found, expected in zip(module.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(inputs is None for inputs in network.seen_inputs)
    assert all(torch.equal(inputs, data) for inputs in clamped.seen_inputs)


def test_neither_step_moves_or_marks_the_others_parameters():
    model = ising()
    network = FreeLogits(model.graph)
    objective = Likelihood(model, ByNetwork(network, steps=2))
    data = samples(model, 5)
    kinds = []
    for update in objective.updates(Batch(data, 5)):
        moved, still = (network, model) if update.parts == ("network",) else (model, network)
        kinds.append(update.parts)
        theirs = torch.autograd.grad(update.loss.sum(), [*still.parameters()], allow_unused=True, retain_graph=True)
        assert all(gradient is None for gradient in theirs)
        own = torch.autograd.grad(update.loss.sum(), [*moved.parameters()])
        assert all(gradient.abs().max() > 0 for gradient in own)
        assert all(parameter.grad is None for parameter in objective.parameters())
    assert kinds == [("network",), ("network",), ("model",)]


def test_momentum_of_one_part_does_not_drift_the_other():
    """With Adam, a part whose update is not due must not move: the defect of one optimiser for both."""
    model = ising()
    network = FreeLogits(model.graph)
    frozen = [parameter.detach().clone() for parameter in network.parameters()]
    objective = Likelihood(model, ByNetwork(network, steps=0))
    Trainer(objective, TrainerOptions(epochs=3)).fit(samples(model, 20))
    assert all(torch.equal(a, b) for a, b in zip(frozen, network.parameters(), strict=True))


class NodeLogits(nn.Module):
    """The simplest encoder: a free logit per state of every variable."""

    def __init__(self, graph):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(1, graph.num_variables, 2, dtype=torch.float64))

    def forward(self, potentials, regions, inputs=None):
        return self

    def node_logits(self):
        return (self.logits,)


def test_many_inner_steps_tend_to_the_bethe_gradient():
    """With I1 large and consistent beliefs, the model's step is (pseudo-)moments minus the data's."""
    model = ising(scale=0.3)
    batch = Batch(samples(model, 20), 20)
    (update,) = Likelihood(model, BeliefPropagation(tolerance=1e-12)).updates(batch)
    target = torch.autograd.grad(update.loss.sum(), [*model.parameters()])
    errors = []
    for steps in (5, 300):
        network = InferenceNetwork(NodeLogits(model.graph), ConsistentHead())
        optimizer = torch.optim.Adam(network.parameters())
        for step, update in enumerate(Likelihood(model, ByNetwork(network, steps=steps)).updates(batch)):
            if update.parts == ("network",):
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
                optimizer.zero_grad()
                update.loss.sum().backward()
                optimizer.step()
            else:
                gradient = torch.autograd.grad(update.loss.sum(), [*model.parameters()])
                errors.append(max(float((a - b).abs().max()) for a, b in zip(gradient, target, strict=True)))
    assert errors[0] > 0.1
    assert errors[1] < 0.01


def test_refined_beliefs_are_the_networks_target_and_the_models_beliefs():
    model = ising()
    batch = Batch(samples(model, 5), 5)
    network = FreeLogits(model.graph)
    refine = EngineRefinement(MeanField(), iterations=3)
    objective = Likelihood(model, ByNetwork(network, refine=refine, learn_from="refined"))
    potentials = model.log_potentials().detach()
    target = refine(potentials, network(potentials))
    first, second = objective.updates(batch)
    expected = cross_entropy(network(potentials), target) + network.penalty(network(potentials))
    torch.testing.assert_close(first.loss, expected)
    torch.testing.assert_close(second.loss, -free_energy(potentials, target) - model.score(batch.data).mean(0))


def test_reused_beliefs_are_those_that_the_network_was_aimed_at():
    model = IsingModel.grid(2, 3)
    network = InferenceNetwork(NodeTable.around_zero(model.log_potentials()), ConsistentHead())
    refined = []

    def refine(potentials, beliefs):
        refined.append(EngineRefinement(BeliefPropagation(), 2)(potentials, beliefs))
        return refined[-1]

    side = ByNetwork(network, refine=refine, learn_from="refined", targets="nodes", reuse=True)
    objective = Likelihood(model, side)
    batch = Batch(torch.zeros(4, 6, dtype=torch.long), 4)
    _, update = objective.updates(batch)
    assert len(refined) == 1
    expected = -free_energy(model.log_potentials(), refined[0]) - model.score(batch.data).mean(0)
    torch.testing.assert_close(update.loss, expected)
    objective.eval()
    objective.evaluate(batch)
    assert len(refined) == 2
    with pytest.raises(ValueError, match="reuse"):
        ByNetwork(network, refine=refine, reuse=True)


def test_cross_entropy_is_least_at_the_target():
    model = ising()
    potentials = model.log_potentials().detach()
    target = BeliefPropagation().run(potentials).beliefs
    other = FreeLogits(model.graph)(potentials)
    entropy = cross_entropy(target, target)
    assert (cross_entropy(other, target) > entropy).all()
    assert (cross_entropy(other, target, 2) > cross_entropy(target, target, 2)).all()
    nodes = target.node_marginals[0]
    torch.testing.assert_close(cross_entropy(target, target, 2)[0], -(nodes * nodes.log()).sum())


def test_learning_from_refined_beliefs_reaches_them():
    model = ising(scale=0.3)
    network = FreeLogits(model.graph, weight=0.0)
    refine = EngineRefinement(MeanField(), iterations=20)
    side = ByNetwork(network, refine=refine, learn_from="refined", steps=300)
    objective = Likelihood(model, side)
    options = TrainerOptions(steps=1, optimizers={"network": OptimizerOptions(learning_rate=0.05)})
    before = refine(model.log_potentials().detach(), network(None).detach())
    potentials = model.log_potentials().detach()
    Trainer(objective, options).fit(samples(model, 5))
    assert (network(None).node_marginals - before.node_marginals).abs().max() < 0.01
    assert (refine(potentials, network(None)).node_marginals - before.node_marginals).abs().max() < 1e-3


def test_sweeps_of_belief_propagation_bring_a_network_near_its_fixed_point():
    model = ising(scale=0.3)
    potentials = model.log_potentials().detach()
    fixed = BeliefPropagation(tolerance=1e-12).run(potentials).beliefs.node_marginals
    network = InferenceNetwork(NodeLogits(model.graph), ConsistentHead())
    errors = []
    for sweeps in (1, 3, 30):
        refine = EngineRefinement(BeliefPropagation(), iterations=sweeps)
        errors.append(float((refine(potentials, network(potentials)).node_marginals - fixed).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6
    batch = Batch(samples(model, 20), 20)
    side = ByNetwork(network, refine=EngineRefinement(BeliefPropagation(), 30), learn_from="refined", targets="nodes")
    *_, update = Likelihood(model, side).updates(batch)
    (exact,) = Likelihood(model, BeliefPropagation(tolerance=1e-12)).updates(batch)
    gradients = [torch.autograd.grad(part.loss.sum(), [*model.parameters()]) for part in (update, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_an_engine_on_one_side_and_a_network_on_the_other():
    model = latent_model()
    data = torch.tensor([[0, 0], [0, 1], [1, 1]])
    clamped = SoftClamped(model.graph, data, [0, 1])
    objective = Likelihood(model, ByEngine(BeliefPropagation(), persistent=True), ByNetwork(clamped))
    assert list(objective.parts()) == ["model", "clamped_network"]
    result = Trainer(objective, TrainerOptions(epochs=5, batch_size=None, shuffle=False)).fit(data)
    assert result.steps == 5
    assert "clamped_network_loss" in result.history[-1]


def test_one_network_on_both_sides_is_one_part():
    model = latent_model()
    network = FreeLogits(model.graph)
    objective = Likelihood(model, ByNetwork(network), ByNetwork(network))
    assert list(objective.parts()) == ["model", "network"]
    data = torch.tensor([[0, 0], [0, 1]])
    updates = objective.updates(Batch(data, 2))
    assert next(updates).parts == ("network",)


def test_wrong_arguments_are_named():
    network = FreeLogits(FactorGraph.grid(2, 2))
    refine = EngineRefinement(MeanField())
    for arguments, message in [
        ({"steps": -1}, "steps: expected at least 0"),
        ({"learn_from": "refined"}, "needs a refinement"),
        ({"learn_from": "noise"}, "learn_from: expected"),
        ({"targets": "edges", "refine": refine}, "targets: expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            ByNetwork(network, **arguments)
    with pytest.raises(ValueError, match=r"expected an nn\.Module"):
        ByNetwork(lambda potentials: None)
    with pytest.raises(ValueError, match="cannot start from beliefs"):
        EngineRefinement(Exact())
    with pytest.raises(ValueError, match="iterations: expected at least 1"):
        EngineRefinement(MeanField(), 0)
