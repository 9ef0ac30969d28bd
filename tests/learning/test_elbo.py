import itertools
import math

import pytest
import torch

from bethenet.learning import OptimizerOptions, Trainer, TrainerOptions
from bethenet.learning.elbo import Annealing, EvidenceLowerBound, ImportanceWeightedBound
from bethenet.learning.objective import Batch, Update
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


def log_prob(q, states):
    return q.conditionals(states).gather(3, states.unsqueeze(3)).squeeze(3).sum(2)


def joint(model, paths=PATHS):
    return model.joint_log_likelihood(WORDS.expand(len(paths), -1), paths)


# --- the distributions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POSTERIORS)
def test_posteriors_are_distributions_with_exact_entropy_and_samples(kind):
    q = posterior(kind)(WORDS)
    log_q = log_prob(q, PATHS.unsqueeze(1)).squeeze(1)
    chances = log_q.exp()
    assert chances.sum().item() == pytest.approx(1)
    assert chances.max() > 0.3
    torch.testing.assert_close(q.entropy(), -(chances * log_q).sum().unsqueeze(0))
    wanted = (chances.reshape(-1, 1, 1) * torch.nn.functional.one_hot(PATHS, STATES)).sum(0, keepdim=True)
    torch.testing.assert_close(q.marginals(), wanted)
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
        torch.testing.assert_close(log_prob(together, states)[:, row], log_prob(alone, states[:, row : row + 1])[:, 0])
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
    found = log_prob(made(WORDS), PATHS.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, total.log_softmax(0))


@pytest.mark.parametrize("kind", POSTERIORS)
def test_sentences_of_one_word(kind):
    q = posterior(kind)(WORDS[:, :1])
    assert q.sample(4).shape == (4, 1, 1)
    chances = log_prob(q, torch.tensor([[[0]], [[1]]])).exp()
    torch.testing.assert_close(chances.sum(), torch.ones((), dtype=torch.float64))


# --- gradients against enumeration ----------------------------------------------------------------------------------


def exact_bounds(model, made, samples, transitions=1.0, entropy=1.0):
    """-ELBO and minus the importance-weighted bound, every tuple of samples enumerated, as they are or annealed."""
    log_q = log_prob(made(WORDS), PATHS.unsqueeze(1)).squeeze(1)
    following = model.next_log_probabilities(PATHS).gather(2, PATHS.unsqueeze(2)).sum((1, 2))
    log_weights = joint(model) + (transitions - 1) * following - entropy * log_q
    tuples = torch.tensor(list(itertools.product(range(len(PATHS)), repeat=samples)))
    chances = log_q[tuples].sum(1).exp()
    weighted = torch.logsumexp(log_weights[tuples], 1) - math.log(samples)
    return -(log_q.exp() * log_weights).sum(), -(chances * weighted).sum()


def objective(name, model, made):
    baseline = InputBaseline(STATES, 2).double()
    match name:
        case "reinforce":
            return EvidenceLowerBound(model, made)
        case "baseline":
            return EvidenceLowerBound(model, made, baseline, samples=2)
    return ImportanceWeightedBound(model, made, samples=3)


def slopes_of(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([slope.flatten() for slope in found if slope is not None])


def check_gradients(learner, truths, value, repeats=150, sentences=300):
    """Means over many samples are within four standard errors of the truths, which are larger than those errors."""
    generator = torch.Generator().manual_seed(0)
    batch = Batch(WORDS.expand(sentences, -1), sentences)
    drawn = {part: [] for part in truths}
    values = []
    for _ in range(repeats):
        for update in learner.updates(batch, generator):
            if (part := update.parts[0]) in drawn:
                drawn[part].append(slopes_of(update.loss, learner.parts()[part]))
                values.append(update.value)
    found = torch.stack(values)
    assert (found.mean() - value).abs() <= 4 * found.std() / math.sqrt(len(found) / len(truths))
    for part, truth in truths.items():
        wanted = slopes_of(truth, learner.parts()[part])
        slopes = torch.stack(drawn[part])
        error = slopes.std(0) / math.sqrt(repeats)
        assert ((slopes.mean(0) - wanted).abs() <= 4 * error + 1e-9).all()
        assert error.norm() < 0.15 * wanted.norm()


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("name", ["reinforce", "baseline", "importance"])
def test_gradients_are_free_of_bias(kind, name):
    model, made = directed(), posterior(kind)
    elbo, weighted = exact_bounds(model, made, 3)
    truth = weighted if name == "importance" else elbo
    check_gradients(objective(name, model, made), {"model": truth, "posterior": truth}, truth)


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("name", ["reinforce", "importance"])
def test_annealed_gradients_are_free_of_bias_and_the_bound_itself_is_reported(kind, name):
    model, made = directed(), posterior(kind)
    learner = objective(name, model, made)
    # so slowly that the weights stay what they are at first
    learner.annealing = Annealing(10**9, transitions=0.3, entropy=0.6)
    place = 1 if name == "importance" else 0
    bound, annealed = exact_bounds(model, made, 3)[place], exact_bounds(model, made, 3, 0.3, 0.6)[place]
    check_gradients(learner, {"model": bound, "posterior": annealed}, bound)


def test_weights_rise_to_those_of_the_bound():
    learner = EvidenceLowerBound(
        directed(), posterior(MeanFieldPosterior), annealing=Annealing(4, transitions=0.2, entropy=0.6)
    )
    batch = Batch(WORDS, 1)
    found = [[float(weight) for weight in learner._weights()] for _ in range(6)]
    wanted = [[0.2, 0.6], [0.4, 0.7], [0.6, 0.8], [0.8, 0.9], [1.0, 1.0], [1.0, 1.0]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))
    assert learner.state_dict()["calls"] == 6
    for _ in learner.updates(batch):
        pass
    learner.evaluate(batch)
    assert learner.state_dict()["calls"] == 7


def variance(learner, repeats=300):
    """Of the posterior's gradient."""
    generator = torch.Generator().manual_seed(1)
    batch = Batch(torch.tensor([[0, 2, 1, 1, 0, 2, 2, 1]]), 1)
    drawn = []
    for _ in range(repeats):
        for update in learner.updates(batch, generator):
            if update.parts == ("posterior",):
                drawn.append(slopes_of(update.loss, learner.posterior))
    return float(torch.stack(drawn).var(0).sum())


@pytest.mark.parametrize("kind", POSTERIORS)
def test_crediting_each_state_with_its_part_leaves_less_noise(kind):
    model, made = directed(order=1), posterior(kind)

    class Plain(EvidenceLowerBound):
        """The whole sentence's reward for every state."""

        def updates(self, batch, generator=None):
            drawn = self._draw(batch, generator)
            log_q = drawn.log_q.gather(3, drawn.states.unsqueeze(3)).sum((2, 3))
            log_p = self.model.joint_log_likelihood(batch.data, drawn.states[0])
            yield Update(("posterior",), -((log_p - log_q).detach() * log_q).mean())

    assert variance(EvidenceLowerBound(model, made)) < 0.5 * variance(Plain(model, made))


@pytest.mark.parametrize("kind", POSTERIORS)
def test_bounds_hold_and_evaluation_estimates_them(kind):
    model, made = directed(), posterior(kind)
    nll = -model.log_likelihood(WORDS)
    elbo, weighted = exact_bounds(model, made, 3)
    assert nll < weighted < elbo
    batch = Batch(WORDS.expand(20_000, -1), 20_000)
    generator = torch.Generator().manual_seed(0)
    for name, truth in (("reinforce", elbo), ("baseline", elbo), ("importance", weighted)):
        found = objective(name, model, made).evaluate(batch, generator)["objective"]
        torch.testing.assert_close(found, truth, atol=0.05, rtol=0)


def test_a_baseline_that_knows_a_first_order_model_expects_its_terms():
    model, made = directed(order=1), posterior(MeanFieldPosterior)
    baseline = InputBaseline(STATES, 1).double()
    with torch.no_grad():
        baseline.tables[0] = model.transition_log_probabilities()
    q = made(WORDS)
    chances = log_prob(q, PATHS.unsqueeze(1)).exp()
    terms = model.next_log_probabilities(PATHS).gather(2, PATHS.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(baseline(q.marginals()), (chances * terms).sum(0, keepdim=True))


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
        else EvidenceLowerBound(model, made, InputBaseline(3, 2).double())
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
    with pytest.raises(ValueError, match="transitions: expected a number between 0 and 1"):
        Annealing(10, transitions=2.0)
    with pytest.raises(ValueError, match="steps: expected at least 0"):
        Annealing(-1)
    padded = Batch((torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2])), 2)
    with pytest.raises(ValueError, match="equal length"):
        EvidenceLowerBound(directed(), made).evaluate(padded)
