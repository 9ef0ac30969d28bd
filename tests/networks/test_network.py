import json
from dataclasses import replace

import pytest
import torch

from bethenet import FactorGraph, LogPotentials, Status, free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact
from bethenet.networks import (
    ConsistentHead,
    FeatureOptions,
    IndependentEncoders,
    InferenceNetwork,
    NodeFeatures,
    PenalizedHead,
    RegionNetwork,
    SymbolicEncoder,
    Transformer,
)
from bethenet.networks.engine import NetworkInference
from bethenet.networks.fitting import FitOptions, fit
from bethenet.networks.network import plaquettes
from bethenet.networks.storage import load_network, save_network

GRID = FactorGraph.grid(3, 3)


def models(batch, seed=0):
    return LogPotentials.random(GRID, 0.7, batch_size=batch, generator=torch.Generator().manual_seed(seed))


def paper_network(count):
    def make():
        features = NodeFeatures(FeatureOptions(node=16), max_variables=9)
        return SymbolicEncoder(features, Transformer(16, 16), [GRID])

    torch.manual_seed(0)
    return InferenceNetwork(IndependentEncoders(make, count), PenalizedHead(weight=200.0))


def test_fitting_approaches_the_marginals():
    potentials = models(4)
    truth = Exact().run(potentials)
    network = paper_network(4)
    before = (network(potentials).node_marginals - truth.beliefs.node_marginals).abs().mean()
    result = fit(network, potentials, FitOptions(steps=300, learning_rate=5e-3))
    after = (result.beliefs.node_marginals - truth.beliefs.node_marginals).abs().mean()
    assert float(after) < 0.03 < float(before)
    assert result.losses[-1] < result.losses[0]
    assert result.steps.tolist() == [300] * 4


def test_members_are_done_one_by_one_and_keep_their_beliefs():
    potentials = models(6)
    seen = []
    network = paper_network(6)
    penalty = network.penalty

    def spy(beliefs):
        seen.append(beliefs.node_marginals.detach())
        return penalty(beliefs)

    network.penalty = spy
    result = fit(network, potentials, FitOptions(steps=300, learning_rate=5e-3, tolerance=3e-5))
    steps = result.steps.tolist()
    assert len(set(steps)) > 1
    assert max(steps) < 300
    for member, step in enumerate(steps):
        torch.testing.assert_close(result.beliefs.node_marginals[member], seen[step - 1][member])


def test_fitting_a_stream_of_models_serves_unseen_ones():
    torch.manual_seed(0)
    network = InferenceNetwork(RegionNetwork(8, rounds=3), ConsistentHead())
    unseen = models(20, seed=10_000)

    def gap():
        with torch.no_grad():
            return float(free_energy(unseen, network(unseen)).mean())

    before = gap()
    options = FitOptions(steps=60, learning_rate=1e-2, schedule="cosine", warmup=5, clip=1.0, averaging=0.9)
    result = fit(network, lambda step: models(16, seed=step), options)
    assert gap() < before
    assert result.steps.tolist() == [60] * 16


def test_fit_keeps_to_its_time_limit():
    seen = []
    fit(
        InferenceNetwork(RegionNetwork(4, 1), ConsistentHead()),
        models(2),
        FitOptions(steps=10**6, time_limit=0.3, schedule="cosine"),
        on_step=lambda step, loss: seen.append(step),
    )
    assert 0 < len(seen) < 10**5


def test_fit_takes_one_step_however_short_the_time():
    network = InferenceNetwork(RegionNetwork(4, 1), ConsistentHead())
    assert fit(network, models(2), FitOptions(steps=5, time_limit=1e-9)).steps.tolist() == [1, 1]


@pytest.mark.parametrize(("options", "message"), [({"schedule": "up"}, "schedule"), ({"averaging": 1.0}, "averaging")])
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        FitOptions(**options)


def test_the_engine_is_honest_about_what_it_did():
    potentials = models(3).clamp({0: [0, 1, 1]})
    for head, approximation in ((ConsistentHead(), None), (PenalizedHead(), plaquettes)):
        options = {} if approximation is None else {"approximation": approximation}
        result = NetworkInference(InferenceNetwork(RegionNetwork(4, 2), head, **options)).run(potentials)
        assert result.member_status == (Status.PREDICTED,) * 3
        assert result.iterations.tolist() == [1, 1, 1]
        torch.testing.assert_close(result.residual, result.beliefs.inconsistency())
        torch.testing.assert_close(result.log_z, -free_energy(potentials, result.beliefs))


def test_sweeps_after_the_forward_pass():
    """They end nearer to belief propagation's fixed point, and with enough of them at it."""
    torch.manual_seed(0)
    potentials = models(4)
    fixed = BeliefPropagation(tolerance=1e-7).run(potentials).beliefs.node_marginals
    engine = NetworkInference(InferenceNetwork(RegionNetwork(4, 2), ConsistentHead()))
    engine.fit(potentials, FitOptions(steps=5))
    results = [replace(engine, max_iterations=count).run(potentials) for count in (0, 3, 200)]
    errors = [float((result.beliefs.node_marginals - fixed).abs().max()) for result in results]
    assert errors[0] > 2 * errors[1] > 2 * errors[2]
    assert errors[2] < 1e-4
    assert [result.method for result in results] == ["network"] * 3
    assert results[0].status is Status.PREDICTED
    assert results[2].status is Status.CONVERGED
    assert results[1].iterations.max() <= 3
    with pytest.raises(ValueError, match="expected at least 0, got -1"):
        replace(engine, max_iterations=-1)
    kikuchi = InferenceNetwork(RegionNetwork(2, 1), PenalizedHead(), plaquettes)
    with pytest.raises(ValueError, match="Bethe's regions, and no other"):
        NetworkInference(kikuchi, max_iterations=2)


def test_log_z_has_the_beliefs_as_gradient():
    tables = [table.requires_grad_() for table in models(2).tables]
    result = NetworkInference(InferenceNetwork(RegionNetwork(4, 2), ConsistentHead())).run(LogPotentials(GRID, tables))
    result.log_z.sum().backward()
    for table, marginals in zip(tables, result.beliefs.factor_marginals, strict=True):
        torch.testing.assert_close(table.grad, marginals)


@pytest.mark.parametrize("kind", ["bethe", "plaquettes"])
def test_saved_and_loaded(kind, tmp_path):
    torch.manual_seed(0)
    network = InferenceNetwork(RegionNetwork(4, 2, damping=0.2), ConsistentHead())
    if kind == "plaquettes":
        network = InferenceNetwork(RegionNetwork(4, 2), PenalizedHead(weight=7.0, distance="kl"), plaquettes)
    fit(network, models(4), FitOptions(steps=3))
    save_network(network, tmp_path / "net", notes={"seed": 0})
    again = load_network(tmp_path / "net")
    assert again.head == network.head
    potentials = models(2)
    torch.testing.assert_close(again(potentials).node_marginals, network(potentials).node_marginals, rtol=0, atol=0)
    assert sorted(path.name for path in (tmp_path / "net").iterdir()) == ["network.json", "weights.safetensors"]


def test_what_cannot_be_saved_or_loaded(tmp_path):
    with pytest.raises(ValueError, match="RegionNetwork"):
        save_network(paper_network(1), tmp_path / "a")
    featured = RegionNetwork(2, 1, features=NodeFeatures(FeatureOptions(position=2)))
    with pytest.raises(ValueError, match="has features"):
        save_network(InferenceNetwork(featured, ConsistentHead()), tmp_path / "a")
    with pytest.raises(ValueError, match="approximation"):
        save_network(InferenceNetwork(RegionNetwork(2, 1), ConsistentHead(), lambda graph: None), tmp_path / "a")
    with pytest.raises(ValueError, match=r"expected network\.json"):
        load_network(tmp_path / "missing")
    save_network(InferenceNetwork(RegionNetwork(2, 1), ConsistentHead()), tmp_path / "net")
    description = json.loads((tmp_path / "net" / "network.json").read_text())
    description["encoder"]["width"] = 3
    (tmp_path / "net" / "network.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="not a network this version knows"):
        load_network(tmp_path / "net")
    (tmp_path / "net" / "weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="expected a saved network"):
        load_network(tmp_path / "net")
