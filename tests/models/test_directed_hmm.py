import pytest
import torch

from bethenet import MemoryLimitError
from bethenet.models.directed_hmm import DirectedHMM
from bethenet.models.hidden_chain import HMMOptions
from chains import path_scores
from oracle import enumerate_model

VOCABULARY = 7


def model_of(order: int, states: int = 3) -> DirectedHMM:
    torch.manual_seed(0)
    return DirectedHMM(VOCABULARY, HMMOptions(states=states, order=order, embedding=6)).double()


def words_of(batch: int, steps: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, steps), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_transitions_are_distributions_and_the_papers_formula(order):
    model = model_of(order)
    table = model.transition_log_probabilities()
    assert table.shape == (4,) * order + (3,)
    torch.testing.assert_close(table.exp().sum(-1), torch.ones((4,) * order, dtype=torch.float64))
    history = [3] * (order - 1) + [1]
    symbols = torch.cat([model.state_embeddings, model.start_embedding])
    logits = model.next_states @ model.history_transform(symbols[history].flatten())
    torch.testing.assert_close(table[tuple(history)], logits.log_softmax(0))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_log_likelihood_and_gradient_equal_enumeration(order):
    model, words = model_of(order, 2 if order > 2 else 3), words_of(3, 5)
    truth = path_scores("full", model.transition_log_probabilities(), model.unary(words))[1].logsumexp(1)
    found = model.log_likelihood(words)
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(truth.sum(), parameters)
    for one, other in zip(torch.autograd.grad(found.sum(), parameters), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize(("order", "steps"), [(1, 4), (2, 5), (3, 5), (3, 2), (2, 1)])
def test_the_graph_says_the_same_as_the_dynamic_programme(order, steps):
    model, words = model_of(order), words_of(2, steps)
    truth = enumerate_model(model.log_potentials(words))
    torch.testing.assert_close(truth.log_z, model.score(words), atol=1e-10, rtol=0)
    posterior = model.posterior(words)
    for step in range(steps):
        torch.testing.assert_close(truth.marginal((step,)), posterior[:, step], atol=1e-10, rtol=0)
    free = enumerate_model(model.unclamped(words)).log_z
    torch.testing.assert_close(free, model.log_partition(steps)[-1:], atol=1e-10, rtol=0)


def test_the_model_is_normalised_over_all_sentences():
    torch.manual_seed(0)
    model = DirectedHMM(3, HMMOptions(states=2, order=2, embedding=4)).double()
    words = torch.cartesian_prod(*[torch.arange(3)] * 4)
    torch.testing.assert_close(model.log_likelihood(words).logsumexp(0), torch.zeros((), dtype=torch.float64))


def test_padded_sentences_and_best_states():
    model, words = model_of(2), words_of(3, 6)
    lengths = torch.tensor([4, 6, 1])
    found = model.log_likelihood((words, lengths))
    states, value = model.most_likely_states((words, lengths))
    joint = model.joint_log_likelihood((words, lengths), states)
    torch.testing.assert_close(joint - found, value, atol=1e-10, rtol=0)
    for row, length in enumerate(lengths.tolist()):
        part = words[row : row + 1, :length]
        torch.testing.assert_close(found[row], model.log_likelihood(part)[0], atol=1e-12, rtol=0)
        paths, scores = path_scores("full", model.transition_log_probabilities(), model.unary(part))
        assert states[row, :length].tolist() == paths[scores[0].argmax()].tolist()


def test_sampled_sentences_have_the_models_probabilities():
    torch.manual_seed(0)
    model = DirectedHMM(2, HMMOptions(states=3, order=2, embedding=4)).double()
    count = 40_000
    _, words = model.sample(count, 3, torch.Generator().manual_seed(1))
    every = torch.cartesian_prod(*[torch.arange(2)] * 3)
    expected = model.log_likelihood(every).exp()
    share = torch.bincount((words * torch.tensor([4, 2, 1])).sum(1), minlength=8) / count
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_too_large_a_table_is_refused():
    model = DirectedHMM(VOCABULARY, HMMOptions(states=512, order=4, embedding=4))
    with pytest.raises(MemoryLimitError, match=r"tables of a chain of 512 states and order 4 need .* bytes"):
        model.log_likelihood(words_of(2, 6))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [None, [6, 1, 3]])
def test_joint_log_likelihood_is_that_of_the_tables(order, lengths):
    model, words = model_of(order), words_of(3, 6)
    states = torch.randint(3, (3, 6), generator=torch.Generator().manual_seed(2))
    lengths = None if lengths is None else torch.tensor(lengths)
    data = words if lengths is None else (words, lengths)
    found = model.joint_log_likelihood(data, states)
    wanted = super(DirectedHMM, model).joint_log_likelihood(data, states)
    torch.testing.assert_close(found, wanted)
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(one, other)
