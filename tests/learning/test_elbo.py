import itertools
import math

import pytest
import torch

from bethenet.learning import OptimizerOptions, Trainer, TrainerOptions
from bethenet.learning.elbo import EvidenceLowerBound, ImportanceWeightedBound
from bethenet.learning.objective import Batch
from bethenet.learning.posteriors import FirstOrderPosterior, InputBaseline, MeanFieldPosterior, PosteriorOptions
from bethenet.models import DirectedHMM, HMMOptions, UndirectedHMM

VOCABULARY, STATES, STEPS = 3, 2, 3
PATHS = torch.tensor(list(itertools.product(range(STATES), repeat=STEPS)))
WORDS = torch.tensor([[0, 2, 1]])
POSTERIORS = [MeanFieldPosterior, FirstOrderPosterior]


def directed(seed=0, order=2, vocabulary=VOCABULARY, states=STATES, embedding=3):
    torch.manual_seed(seed)
    return DirectedHMM(vocabulary, HMMOptions(states, order, embedding)).double()


def posterior(kind, seed=0, vocabulary=VOCABULARY, states=STATES, size=3):
    torch.manual_seed(seed)
    made = kind(vocabulary, states, PosteriorOptions(word=size, width=size, layers=1, state=size)).double()
    with torch.no_grad():
        # far from uniform, so that samples matter
        for weight in made.parameters():
            weight.mul_(2.0)
    return made


def joint(model, paths=PATHS):
    return model.joint_log_likelihood(WORDS.expand(len(paths), -1), paths)


# --- the distributions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POSTERIORS)
def test_posteriors_are_distributions_with_exact_entropy_and_samples(kind):
    q = posterior(kind)(WORDS)
    log_q = q.log_prob(PATHS.unsqueeze(1)).squeeze(1)
    chances = log_q.exp()
    assert chances.sum().item() == pytest.approx(1)
    assert chances.max() > 0.3
    torch.testing.assert_close(q.entropy(), -(chances * log_q).sum().unsqueeze(0))
    drawn = q.sample(50_000, torch.Generator().manual_seed(0)).squeeze(1)
    counts = torch.bincount((drawn * 2 ** torch.arange(STEPS - 1, -1, -1)).sum(1), minlength=len(PATHS)) / len(drawn)
    torch.testing.assert_close(counts.double(), chances.detach(), atol=0.01, rtol=0)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_sentences_of_a_batch_do_not_mix(kind):
    made = posterior(kind)
    words = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1], [1, 1, 1, 0]])
    states = torch.randint(STATES, (5, 3, 4), generator=torch.Generator().manual_seed(0))
    together = made(words)
    for row in range(3):
        alone = made(words[row : row + 1])
        torch.testing.assert_close(together.log_prob(states)[:, row], alone.log_prob(states[:, row : row + 1])[:, 0])
        torch.testing.assert_close(together.entropy()[row], alone.entropy()[0])


def test_the_first_order_posterior_is_that_of_its_model():
    made = posterior(FirstOrderPosterior)
    context = made.sequence(made.words(WORDS)).mean(1)
    inputs = torch.cat([made.symbols, context.expand(STATES + 1, -1)], 1)
    transitions = (made.history_transform(inputs) @ made.next_states.T).log_softmax(1)
    emissions = (made.emission_transform(inputs[:STATES]) @ made.emissions.T).log_softmax(1)
    total = torch.zeros(len(PATHS), dtype=torch.float64)
    previous = torch.full((len(PATHS),), STATES)
    for step in range(STEPS):
        total = total + transitions[previous, PATHS[:, step]] + emissions[PATHS[:, step], WORDS[0, step]]
        previous = PATHS[:, step]
    found = made(WORDS).log_prob(PATHS.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, total.log_softmax(0))


@pytest.mark.parametrize("kind", POSTERIORS)
def test_sentences_of_one_word(kind):
    q = posterior(kind)(WORDS[:, :1])
    assert q.sample(4).shape == (4, 1, 1)
    chances = q.log_prob(torch.tensor([[[0]], [[1]]])).exp()
    torch.testing.assert_close(chances.sum(), torch.ones((), dtype=torch.float64))


# --- gradients against enumeration ----------------------------------------------------------------------------------


def exact_bounds(model, made, samples):
    """-ELBO and minus the importance-weighted bound, every tuple of samples enumerated."""
    log_q = made(WORDS).log_prob(PATHS.unsqueeze(1)).squeeze(1)
    log_weights = joint(model) - log_q
    tuples = torch.tensor(list(itertools.product(range(len(PATHS)), repeat=samples)))
    chances = log_q[tuples].sum(1).exp()
    weighted = torch.logsumexp(log_weights[tuples], 1) - math.log(samples)
    return -(log_q.exp() * log_weights).sum(), -(chances * weighted).sum()


def objective(name, model, made):
    torch.manual_seed(5)
    baseline = InputBaseline(VOCABULARY, 4).double()
    match name:
        case "reinforce":
            return EvidenceLowerBound(model, made)
        case "baseline":
            return EvidenceLowerBound(model, made, baseline, samples=2)
        case "entropy":
            return EvidenceLowerBound(model, made, baseline, exact_entropy=True)
    return ImportanceWeightedBound(model, made, samples=3)


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("name", ["reinforce", "baseline", "entropy", "importance"])
def test_gradients_are_free_of_bias(kind, name):
    model, made = directed(), posterior(kind)
    elbo, weighted = exact_bounds(model, made, 3)
    truth = weighted if name == "importance" else elbo
    learner = objective(name, model, made)
    generator = torch.Generator().manual_seed(0)
    repeats, sentences = 150, 300
    batch = Batch(WORDS.expand(sentences, -1), sentences)
    drawn = {"model": [], "posterior": []}
    values = []
    for _ in range(repeats):
        for update in learner.updates(batch, generator):
            if (part := update.parts[0]) in drawn:
                slopes = torch.autograd.grad(update.loss, list(learner.parts()[part].parameters()), allow_unused=True)
                drawn[part].append(torch.cat([slope.flatten() for slope in slopes if slope is not None]))
            if update.parts == ("model",):
                values.append(update.value)
    value = torch.stack(values)
    assert (value.mean() - truth).abs() <= 4 * value.std() / math.sqrt(repeats)
    for part, found in drawn.items():
        wanted = torch.autograd.grad(
            truth, list(learner.parts()[part].parameters()), retain_graph=True, allow_unused=True
        )
        wanted = torch.cat([slope.flatten() for slope in wanted if slope is not None])
        slopes = torch.stack(found)
        error = slopes.std(0) / math.sqrt(repeats)
        assert ((slopes.mean(0) - wanted).abs() <= 4 * error + 1e-9).all()
        # and the errors are small enough for that to say something
        assert error.norm() < 0.15 * wanted.norm()


@pytest.mark.parametrize("kind", POSTERIORS)
def test_bounds_hold_and_evaluation_estimates_them(kind):
    model, made = directed(), posterior(kind)
    nll = -model.log_likelihood(WORDS)
    elbo, weighted = exact_bounds(model, made, 3)
    assert nll < weighted < elbo
    batch = Batch(WORDS.expand(20_000, -1), 20_000)
    generator = torch.Generator().manual_seed(0)
    for name, truth in (("reinforce", elbo), ("entropy", elbo), ("importance", weighted)):
        found = objective(name, model, made).evaluate(batch, generator)["objective"]
        torch.testing.assert_close(found, truth, atol=0.05, rtol=0)


# --- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reinforce", "importance", "first order"])
def test_learning_lowers_the_exact_nll(name):
    teacher = directed(seed=3, vocabulary=8, states=3, embedding=8)
    with torch.no_grad():
        teacher.emissions.words.mul_(3)
    data = teacher.sample(300, 6, torch.Generator().manual_seed(0))[1]
    model = directed(seed=1, vocabulary=8, states=3, embedding=8)
    kind = FirstOrderPosterior if name == "first order" else MeanFieldPosterior
    torch.manual_seed(0)
    made = kind(8, 3, PosteriorOptions(word=8, width=8, layers=1, state=8)).double()
    learner = (
        ImportanceWeightedBound(model, made, samples=5)
        if name == "importance"
        else EvidenceLowerBound(model, made, InputBaseline(8, 8).double(), exact_entropy=name == "first order")
    )
    before = -model.log_likelihood(data).mean()
    rate = OptimizerOptions(learning_rate=0.01)
    options = TrainerOptions(epochs=10, optimizers=dict.fromkeys(learner.parts(), rate))
    result = Trainer(learner, options).fit(data, data)
    after = -model.log_likelihood(data).mean()
    assert after < before - 0.3
    assert after < result.best["validation_objective"] + 0.1


def test_what_cannot_be_is_refused():
    made = posterior(MeanFieldPosterior)
    with pytest.raises(ValueError, match="DirectedHMM"):
        EvidenceLowerBound(UndirectedHMM(3, HMMOptions(2, 2, 3)), made)
    with pytest.raises(ValueError, match="at least 2"):
        ImportanceWeightedBound(directed(), made, samples=1)
    with pytest.raises(ValueError, match="at least 1"):
        EvidenceLowerBound(directed(), made, samples=0)
    padded = Batch((torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2])), 2)
    with pytest.raises(ValueError, match="equal length"):
        EvidenceLowerBound(directed(), made).evaluate(padded)
