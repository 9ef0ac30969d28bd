import copy
import itertools
from dataclasses import replace

import pytest
import torch

from bethenet import free_energy
from bethenet.inference.bp import BeliefPropagation
from bethenet.learning import ByNetwork, Likelihood, OptimizerOptions, Trainer, TrainerOptions
from bethenet.learning.chains import AmortizedChainLikelihood, ChainLikelihood, CouplingPenalty
from bethenet.learning.objective import Batch
from bethenet.models import ChainBeliefPropagation, ChainKikuchi, HMMOptions, UndirectedHMM
from bethenet.models.chain_bp import ChainMessages
from bethenet.networks import (
    BidirectionalLSTM,
    FeatureOptions,
    InferenceNetwork,
    NodeFeatures,
    PenalizedHead,
    SymbolicEncoder,
)
from bethenet.networks.marginals import MarginalNetwork, MarginalNetworkOptions

VOCABULARY = 6
SMALL = MarginalNetworkOptions(word=8, node=4, length=4, width=8)


def hmm(order=3, states=3, seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return UndirectedHMM(VOCABULARY, HMMOptions(states, order, embedding=8, dropout=dropout)).double()


def sentences(batch=4, steps=7, seed=0):
    return torch.randint(VOCABULARY, (batch, steps), generator=torch.Generator().manual_seed(seed))


def network(states=3):
    torch.manual_seed(1)
    return MarginalNetwork(VOCABULARY, states, 12, SMALL).double()


def gradients(objective, words):
    batch = Batch(words, len(words))
    return {
        update.parts[0]: torch.autograd.grad(
            update.loss, list(objective.parts()[update.parts[0]].parameters()), allow_unused=True
        )
        for update in objective.updates(batch)
    }


def compare(found, wanted, atol=1e-8):
    for one, other in zip(found, wanted, strict=True):
        if one is not None or other is not None:
            torch.testing.assert_close(one, other, atol=atol, rtol=0)


# --- belief propagation and Kikuchi ---------------------------------------------------------------------------------


def test_the_general_likelihood_has_the_same_value_and_gradient():
    model, words = hmm(), sentences()
    engine = ChainBeliefPropagation("sweeps", 300, tolerance=1e-12)
    objective = ChainLikelihood(model, engine)
    bp = BeliefPropagation(max_iterations=2000, tolerance=1e-12, damping=0.3)
    general = Likelihood(model, bp, bp)
    batch = Batch(words, len(words))
    value = objective.evaluate(batch)
    torch.testing.assert_close(value["objective"], general.evaluate(batch)["objective"].squeeze(), atol=1e-8, rtol=0)
    assert value["inconsistency"] < 1e-8
    compare(gradients(objective, words)["model"], gradients(general, words)["model"])


def test_first_order_is_exact_and_so_is_its_gradient():
    model, words = hmm(order=1), sentences()
    objective = ChainLikelihood(model, ChainBeliefPropagation("sweeps", 1))
    nll = -model.log_likelihood(words).mean()
    torch.testing.assert_close(objective.evaluate(Batch(words, 4))["objective"], nll, atol=1e-10, rtol=0)
    compare(gradients(objective, words)["model"], torch.autograd.grad(nll, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("engine", [ChainBeliefPropagation("sweeps", 1), ChainKikuchi(iterations=1)])
def test_the_free_chain_goes_on_where_it_stopped(engine):
    model = hmm()
    objective = ChainLikelihood(model, engine)
    residuals = []
    for seed in range(12):
        for steps in (5, 7):
            (update,) = objective.updates(Batch(sentences(steps=steps, seed=seed), 4))
            assert update.loss.requires_grad
        found = objective._infer(Batch(sentences(seed=seed), 4)).beliefs
        residuals.append(float(found.residual[-1]))
    assert residuals[-1] < 1e-3 * residuals[0]
    kept = {key for key in objective.state_dict() if key.startswith("memory")}
    assert len(kept) == 6
    again = ChainLikelihood(model, engine)
    again.load_state_dict(objective.state_dict())
    batch = Batch(sentences(), 4)
    torch.testing.assert_close(again.evaluate(batch)["objective"], objective.evaluate(batch)["objective"])


@pytest.mark.parametrize("engine", [ChainBeliefPropagation("sweeps", 2), ChainKikuchi(iterations=2)])
def test_the_chain_without_words_can_be_exact(engine):
    model, words = hmm(), sentences()
    objective = ChainLikelihood(model, engine, unclamped="exact")
    wanted = model.log_partition(7)[-1] - engine.run(model.unary(words), model.transitions()).log_z.mean()
    (update,) = objective.updates(Batch(words, 4))
    torch.testing.assert_close(update.value, wanted)
    torch.testing.assert_close(objective.evaluate(Batch(words, 4))["free_log_z"], model.log_partition(7)[-1])
    slopes = torch.autograd.grad(wanted, list(model.parameters()), allow_unused=True)
    compare(gradients(objective, words)["model"], slopes, atol=1e-12)
    assert not any(key.startswith("memory") for key in objective.state_dict())
    cold = ChainLikelihood(model, engine, unclamped="cold")
    for _ in range(2):
        (update,) = cold.updates(Batch(words, 4))
        torch.testing.assert_close(update.value, -model.bethe_log_likelihood(words, engine).log_likelihood.mean())
    with pytest.raises(ValueError, match="unclamped: expected one of persistent, cold, exact; got 'warm'"):
        ChainLikelihood(model, engine, unclamped="warm")


def test_kikuchi_is_nearer_to_the_truth_than_bethe():
    model, words = hmm(), sentences(steps=9)
    with torch.no_grad():
        model.target_embeddings.mul_(4)
        model.emissions.words.mul_(3)
    truth = -model.log_likelihood(words).mean()
    errors = [
        abs(ChainLikelihood(model, engine).evaluate(Batch(words, 4))["objective"] - truth)
        for engine in (ChainBeliefPropagation("sweeps", 100), ChainKikuchi(iterations=100))
    ]
    assert errors[1] < 0.5 * errors[0]


def test_the_coupling_penalty_is_of_the_interactions_alone():
    model = hmm()
    sizes = model.coupling_sizes()
    penalty = CouplingPenalty([0.0, 2.0, 5.0])(model)
    torch.testing.assert_close(penalty, 2 * sizes[1] ** 2 + 5 * sizes[2] ** 2)
    words = sentences()
    objective = ChainLikelihood(model, ChainBeliefPropagation(), regularizer=CouplingPenalty([0.0, 2.0, 5.0]))
    (update,) = objective.updates(Batch(words, 4))
    torch.testing.assert_close(update.loss - update.value, penalty)
    with pytest.raises(ValueError, match="order 2"):
        CouplingPenalty([1.0, 1.0])(model)
    with pytest.raises(ValueError, match="factor"):
        CouplingPenalty([1.0], factor=0.0)
    with pytest.raises(ValueError, match="at least 0"):
        CouplingPenalty([-1.0])


def test_the_coupling_penalty_falls_and_goes_on_where_it_stopped():
    model, words = hmm(), sentences()
    last = float(CouplingPenalty([0.0, 2.0, 5.0])(model))
    falling = ChainLikelihood(
        model, ChainBeliefPropagation(), unclamped="exact", regularizer=CouplingPenalty([0.0, 2.0, 5.0], 16.0, 4)
    )
    found = []
    for step in range(6):
        if step == 2:
            state = falling.state_dict()
            regularizer = CouplingPenalty([0.0, 2.0, 5.0], 16.0, 4)
            falling = ChainLikelihood(model, ChainBeliefPropagation(), unclamped="exact", regularizer=regularizer)
            falling.load_state_dict(state)
        falling.evaluate(Batch(words, 4))
        (update,) = falling.updates(Batch(words, 4))
        found.append(float(update.loss - update.value))
    assert found == pytest.approx([16 * last, 8 * last, 4 * last, 2 * last, last, last])


def test_padded_minibatches_are_refused():
    with pytest.raises(ValueError, match="equal length"):
        ChainLikelihood(hmm(), ChainBeliefPropagation()).evaluate(Batch((sentences(), torch.tensor([7, 6, 5, 4])), 4))


# --- the semi-amortised network -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unclamped", ["persistent", "exact"])
@pytest.mark.parametrize("engine", [ChainBeliefPropagation("sweeps", 300), ChainKikuchi(iterations=300)])
def test_a_network_that_says_the_fixed_point_stays_there(engine, unclamped):
    model, words = hmm(), sentences()
    fixed = engine.run(model.unary(words), model.transitions()).node_log_marginals.detach()

    class Knows(MarginalNetwork):
        def forward(self, words, log_marginals=None):
            return super().forward(words) * 0 + fixed

    knows = Knows(VOCABULARY, 3, 12, SMALL).double()
    # what the network says is made consistent by Bethe's pairs: its own free energy is not Kikuchi's
    for refined in (True, False) if isinstance(engine, ChainBeliefPropagation) else (True,):
        objective = AmortizedChainLikelihood(
            model, knows, replace(engine, iterations=1), scaling=100, refined=refined, unclamped=unclamped
        )
        objective.train()
        for _ in range(60):
            list(objective.updates(Batch(words, 4)))
        figures = objective.evaluate(Batch(words, 4))
        converged = ChainLikelihood(model, engine, unclamped=unclamped)
        wanted = converged.evaluate(Batch(words, 4))["objective"]
        torch.testing.assert_close(figures["objective"], wanted, atol=1e-8, rtol=0)
        assert figures["network_error"] < 1e-9
        assert figures["network_inconsistency"] < 1e-8
        compare(gradients(objective, words)["model"], gradients(converged, words)["model"])


def test_the_network_descends_on_the_cross_entropy_towards_the_swept_marginals():
    model, words, net = hmm(), sentences(), network()
    with torch.no_grad():
        net.readout.weight.normal_(generator=torch.Generator().manual_seed(0))
    objective = AmortizedChainLikelihood(model, net, flooding=2)
    unary, transitions = model.unary(words), model.transitions()
    start = ChainBeliefPropagation("flooding", 2).run(unary, transitions).node_log_marginals.detach()
    said = net(words, start)
    # two iterations of proportional fitting, written out over tables
    forward = torch.zeros(3, 3 + 7, 4, 3, dtype=torch.float64)
    messages = ChainMessages(forward, forward.clone())
    for _ in range(2):
        for side in (0, 1):
            for lag, step in itertools.product((1, 2, 3), range(7)):
                if step + lag >= 7:
                    continue
                table = transitions[lag - 1].unsqueeze(0)
                if side == 0:
                    cavity = said[:, step] - messages.backward[3 - lag, 3 + step]
                    sent = torch.logsumexp(cavity.unsqueeze(2) + table, 1)
                else:
                    cavity = said[:, step + lag] - messages.forward[3 - lag, 3 + step]
                    sent = torch.logsumexp(cavity.unsqueeze(1) + table, 2)
                messages[side][3 - lag, 3 + step] = sent.detach()
    target = ChainBeliefPropagation("sweeps", 1).run(unary, transitions, messages=messages).node_marginals
    loss = -(target.detach() * said).sum((1, 2)).mean()
    updates = list(objective.updates(Batch(words, 4)))
    assert [update.parts for update in updates] == [("network",), ("model",)]
    torch.testing.assert_close(updates[0].loss, loss, atol=1e-8, rtol=0)
    assert all(
        gradient is None for gradient in torch.autograd.grad(updates[1].loss, list(net.parameters()), allow_unused=True)
    )


def test_the_semi_amortised_network_learns():
    teacher = hmm(seed=3)
    with torch.no_grad():
        teacher.target_embeddings.mul_(2)
        teacher.emissions.words.mul_(2)
    data = teacher.sample(256, 8, torch.Generator().manual_seed(0))[1]
    model, net = hmm(seed=1), network()
    before = -model.log_likelihood(data).mean()
    objective = AmortizedChainLikelihood(model, net, flooding=1, regularizer=CouplingPenalty([0.0, 1.0, 1.0]))
    rate = OptimizerOptions(learning_rate=0.01)
    trainer = Trainer(objective, TrainerOptions(epochs=12, optimizers={"model": rate, "network": rate}))
    result = trainer.fit(data, data)
    after = -model.log_likelihood(data).mean()
    truth = -teacher.log_likelihood(data).mean()
    assert after - truth < 0.4 * (before - truth)
    assert result.history[-1]["validation_network_error"] < 0.1


def test_networks_and_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least 1 iteration"):
        AmortizedChainLikelihood(hmm(), network(), ChainBeliefPropagation(iterations=0))
    with pytest.raises(ValueError, match="at most 12 words"):
        network()(sentences(steps=13))


# --- the paper's penalised networks, by the general parts -----------------------------------------------------------


def test_the_paper_s_networks_take_algorithm_one_s_steps():
    model, words = hmm(dropout=0.5), sentences()

    def paper(inputs):
        features = FeatureOptions(node=4, size=4, inputs=inputs)
        embeddings = NodeFeatures(features, max_variables=7, vocabulary=VOCABULARY)
        encoder = SymbolicEncoder(embeddings, BidirectionalLSTM(features.width, 6, 1), [model.chain_graph(4)])
        return InferenceNetwork(encoder, PenalizedHead(weight=0.5, distance="kl")).double()

    free, given = paper(0), paper(5)
    objective = Likelihood(model, ByNetwork(free), ByNetwork(given))
    assert set(objective.parts()) == {"model", "network", "clamped_network"}
    objective.eval()
    unclamped, clamped = model.both(words)
    updates = list(objective.updates(Batch(words, 4)))
    assert [update.parts[0] for update in updates] == ["network", "clamped_network", "model"]
    beliefs = given(clamped, words)
    wanted = (free_energy(clamped, beliefs) + given.penalty(beliefs)).mean()
    torch.testing.assert_close(updates[1].loss, wanted)
    value = free_energy(clamped, beliefs).mean() - free_energy(unclamped, free(unclamped))
    torch.testing.assert_close(updates[2].value, value.detach())


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["bp", "kikuchi", "exact", "amortized"])
def test_on_a_gpu(kind):
    model, words = hmm(), sentences()
    made = {
        "bp": lambda: ChainLikelihood(model, ChainBeliefPropagation("sweeps", 2)),
        "kikuchi": lambda: ChainLikelihood(model, ChainKikuchi(iterations=2, domain="scaled")),
        "exact": lambda: ChainLikelihood(model, ChainKikuchi(iterations=2, domain="scaled"), unclamped="exact"),
        "amortized": lambda: AmortizedChainLikelihood(model, network(), flooding=2),
    }[kind]
    here, there = made(), copy.deepcopy(made()).cuda()
    for _ in range(2):
        ours, theirs = gradients(here, words), gradients(there, words.cuda())
        for part, slopes in ours.items():
            compare([slope if slope is None else slope.cpu() for slope in theirs[part]], slopes)
    found = there.evaluate(Batch(words.cuda(), 4))
    torch.testing.assert_close(found["objective"].cpu(), here.evaluate(Batch(words, 4))["objective"])
