import math
from dataclasses import replace

import pytest
import torch

from bethenet import MemoryLimitError
from bethenet.inference.bp import BeliefPropagation
from bethenet.models.chain_bp import ChainBeliefPropagation
from bethenet.models.chain_kikuchi import ChainKikuchi
from bethenet.models.hidden_chain import HMMOptions
from bethenet.models.hmm import UndirectedHMM
from chains import path_scores
from oracle import enumerate_model

VOCABULARY = 11


def model_of(order: int, states: int = 3, seed: int = 0) -> UndirectedHMM:
    torch.manual_seed(seed)
    return UndirectedHMM(VOCABULARY, HMMOptions(states=states, order=order, embedding=6, length=4)).double()


def words_of(batch: int, steps: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, steps), generator=torch.Generator().manual_seed(seed))


def test_transitions_are_the_papers_formula():
    model = model_of(2)
    table = model.transitions()
    lag, source, target = 1, 2, 0
    inputs = torch.cat([model.lag_embeddings[lag], model.state_embeddings[source]])
    first, last = model.pair_transform.first, model.pair_transform.rest[-1]
    residual = inputs + last.weight @ torch.relu(first.weight @ inputs + first.bias) + last.bias
    normed = (residual - residual.mean()) / (residual.var(unbiased=False) + model.pair_transform.norm.eps).sqrt()
    torch.testing.assert_close(table[lag, source, target], model.target_embeddings[target] @ normed)
    torch.testing.assert_close(model.emission_log_probabilities().exp().sum(1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_log_likelihood_and_gradient_equal_enumeration(order):
    model, words = model_of(order), words_of(3, 5)
    unary, transitions = model.unary(words), model.transitions()
    clamped = path_scores("pairwise", transitions, unary)[1].logsumexp(1)
    free = path_scores("pairwise", transitions, torch.zeros_like(unary[:1]))[1].logsumexp(1)
    found = model.log_likelihood(words)
    torch.testing.assert_close(found, clamped - free, atol=1e-10, rtol=0)
    torch.testing.assert_close(model.score(words), clamped, atol=1e-10, rtol=0)
    torch.testing.assert_close(model.log_partition(5)[-1:], free, atol=1e-10, rtol=0)
    parameters = list(model.parameters())
    expected = torch.autograd.grad((clamped - free).sum(), parameters)
    for one, other in zip(torch.autograd.grad(found.sum(), parameters), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


def test_the_model_is_normalised_over_all_sentences():
    torch.manual_seed(0)
    model = UndirectedHMM(3, HMMOptions(states=2, order=2, embedding=4)).double()
    words = torch.cartesian_prod(*[torch.arange(3)] * 4)
    torch.testing.assert_close(model.log_likelihood(words).logsumexp(0), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize(("order", "steps"), [(1, 4), (2, 5), (3, 4), (3, 2), (4, 5), (2, 1)])
def test_the_graph_says_the_same_as_the_dynamic_programme(order, steps):
    model, words = model_of(order), words_of(2, steps)
    potentials = model.log_potentials(words)
    assert potentials.graph is model.chain_graph(steps)
    truth = enumerate_model(potentials)
    torch.testing.assert_close(truth.log_z, model.score(words), atol=1e-10, rtol=0)
    torch.testing.assert_close(enumerate_model(model.unclamped(words)).log_z, model.log_partition(steps)[-1:])
    posterior = model.posterior(words)
    for step in range(steps):
        torch.testing.assert_close(truth.marginal((step,)), posterior[:, step], atol=1e-10, rtol=0)


def test_the_usual_graph_has_the_options_length():
    model = model_of(2)
    assert model.graph.num_variables == 4
    assert model.log_potentials().batch_size == 1
    assert model.log_potentials(6).graph.num_variables == 6


def test_padded_sentences():
    model, words = model_of(3), words_of(3, 6)
    lengths = torch.tensor([4, 6, 1])
    data = (words, lengths)
    found, states, posterior = model.log_likelihood(data), model.most_likely_states(data), model.posterior(data)
    drawn = model.sample_states(data, 2, torch.Generator().manual_seed(0))
    for row, length in enumerate(lengths.tolist()):
        part = words[row : row + 1, :length]
        torch.testing.assert_close(found[row], model.log_likelihood(part)[0], atol=1e-12, rtol=0)
        assert torch.equal(states[0][row, :length], model.most_likely_states(part)[0][0])
        torch.testing.assert_close(posterior[row, :length], model.posterior(part)[0], atol=1e-12, rtol=0)
        joint = model.joint_log_likelihood(part, drawn[0, row : row + 1, :length])
        torch.testing.assert_close(model.joint_log_likelihood(data, drawn[0])[row], joint[0], atol=1e-12, rtol=0)
    assert (drawn[:, 0, 4:] == 0).all()
    with pytest.raises(ValueError, match="equal length"):
        model.log_potentials(data)


def test_the_best_states_and_their_posterior_probability():
    model, words = model_of(3), words_of(4, 5)
    paths, scores = path_scores("pairwise", model.transitions(), model.unary(words))
    states, value = model.most_likely_states(words)
    assert torch.equal(states, paths[scores.argmax(1)])
    torch.testing.assert_close(value, scores.log_softmax(1).amax(1))
    joint = model.joint_log_likelihood(words, states)
    torch.testing.assert_close(joint - model.log_likelihood(words), value, atol=1e-10, rtol=0)


def test_sampled_sentences_have_the_models_probabilities():
    torch.manual_seed(0)
    model = UndirectedHMM(2, HMMOptions(states=3, order=2, embedding=4)).double()
    count = 40_000
    states, words = model.sample(count, 3, torch.Generator().manual_seed(1))
    assert states.shape == words.shape == (count, 3)
    every = torch.cartesian_prod(*[torch.arange(2)] * 3)
    expected = model.log_likelihood(every).exp()
    share = torch.bincount((words * torch.tensor([4, 2, 1])).sum(1), minlength=8) / count
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_bethe_equals_the_general_engine_and_is_exact_at_order_one():
    words = words_of(2, 5)
    engine = ChainBeliefPropagation(iterations=200, tolerance=1e-12)
    model = model_of(3)
    general = BeliefPropagation(max_iterations=500, tolerance=1e-11)
    expected = general.run(model.log_potentials(words)).log_z - general.run(model.log_potentials(5)).log_z
    torch.testing.assert_close(model.bethe_log_likelihood(words, engine).log_likelihood, expected, atol=1e-7, rtol=0)
    clamped, free = model.bethe(words, engine), model.bethe(None, engine, steps=5)
    torch.testing.assert_close(clamped.log_z - free.log_z, expected, atol=1e-7, rtol=0)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(model.bethe_log_likelihood(words, engine).log_likelihood.sum(), parameters)
    theirs = torch.autograd.grad(expected.sum(), parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    first = model_of(1)
    found = first.bethe_log_likelihood(words, engine)
    torch.testing.assert_close(found.log_likelihood, first.log_likelihood(words))


@pytest.mark.parametrize("engine", [ChainBeliefPropagation(iterations=2), ChainKikuchi(iterations=2)])
def test_bethe_of_padded_sentences_and_persistent_messages(engine):
    model, words = model_of(3), words_of(3, 6)
    lengths = torch.tensor([4, 6, 1])
    padded = model.bethe_log_likelihood((words, lengths), engine)
    for row, length in enumerate(lengths.tolist()):
        alone = model.bethe_log_likelihood(words[row : row + 1, :length], engine)
        torch.testing.assert_close(padded.log_likelihood[row], alone.log_likelihood[0], atol=1e-12, rtol=0)
    first = model.bethe_log_likelihood(words, engine)
    second = model.bethe_log_likelihood(words[:2], engine, first.free)
    assert second.residual[-1] < first.residual[-1]
    torch.testing.assert_close(second.residual[:2], first.residual[:2], atol=1e-12, rtol=0)
    longer = model.bethe(None, replace(engine, iterations=4), steps=6)
    clamped = model.bethe(words[:2], engine)
    torch.testing.assert_close(second.log_likelihood, clamped.log_z - longer.log_z, atol=1e-12, rtol=0)


def test_coupling_sizes_ignore_rows_and_columns():
    model = model_of(3)
    sizes = model.coupling_sizes()
    assert sizes.shape == (3,)
    assert (sizes > 0).all()
    with torch.no_grad():
        model.target_embeddings.copy_(model.target_embeddings[:1].expand_as(model.target_embeddings))
    torch.testing.assert_close(model.coupling_sizes(), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)


def test_training_learns():
    torch.manual_seed(0)
    model = UndirectedHMM(4, HMMOptions(states=4, order=2, embedding=8))
    words = torch.tensor([[0, 1, 2, 3] * 2, [1, 2, 3, 0] * 2])
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        loss = -model.log_likelihood(words).mean()
        loss.backward()
        optimiser.step()
    # two sentences, equally likely: log 2 is the least there is
    assert math.log(2) - 1e-3 < loss.item() < 4.0


def test_memory_limit_and_wrong_input():
    model = UndirectedHMM(VOCABULARY, HMMOptions(states=40, order=4, embedding=4, memory_limit=10**6))
    with pytest.raises(MemoryLimitError, match="belief propagation"):
        model.log_likelihood(words_of(2, 6))
    with pytest.raises(MemoryLimitError, match="over the limit of 1,000,000"):
        model.sample_states(words_of(2, 6))
    with pytest.raises(MemoryLimitError, match="over the limit of 1,000,000"):
        model.sample(2, 6)
    large = UndirectedHMM(VOCABULARY, HMMOptions(states=512, order=4, embedding=4))
    with pytest.raises(MemoryLimitError, match=r"tables of a chain of 512 states and order 4 need .* bytes"):
        large.log_likelihood(words_of(2, 6))
    assert torch.isfinite(large.bethe_log_likelihood(words_of(2, 6), ChainBeliefPropagation()).log_likelihood).all()
    with pytest.raises(ValueError, match="integer words"):
        model.score(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="2 lengths"):
        model.score((words_of(2, 3), torch.tensor([1])))
    with pytest.raises(ValueError, match="order: expected 1 to 4"):
        HMMOptions(order=5)
    with pytest.raises(ValueError, match="states: expected at least 1"):
        HMMOptions(states=0)
    with pytest.raises(ValueError, match="vocabulary"):
        UndirectedHMM(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    model, words = model_of(3), words_of(3, 6)
    lengths = torch.tensor([4, 6, 1])
    twin = UndirectedHMM(VOCABULARY, model.options).double().cuda()
    twin.load_state_dict(model.state_dict())
    there = (words.cuda(), lengths.cuda())
    torch.testing.assert_close(twin.log_likelihood(there).cpu(), model.log_likelihood((words, lengths)))
    torch.testing.assert_close(twin.posterior(there).cpu(), model.posterior((words, lengths)))
    assert torch.equal(twin.most_likely_states(there)[0].cpu(), model.most_likely_states((words, lengths))[0])
    for engine in (ChainBeliefPropagation(), ChainBeliefPropagation("flooding"), ChainKikuchi()):
        ours, theirs = (m.bethe_log_likelihood(d, engine) for m, d in ((twin, there), (model, (words, lengths))))
        torch.testing.assert_close(ours.log_likelihood.cpu(), theirs.log_likelihood)
    torch.testing.assert_close(twin.log_potentials(words.cuda()).tables[0].cpu(), model.log_potentials(words).tables[0])
    states, _ = twin.sample(5, 4, torch.Generator("cuda").manual_seed(0))
    assert states.is_cuda
