"""The ways in which the experiments learn a hidden Markov model: what to descend on, and with which networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bethenet.learning import ByNetwork, DirectLikelihood, Likelihood, Objective
from bethenet.learning.chains import AmortizedChainLikelihood, ChainLikelihood, CouplingPenalty, Unclamped
from bethenet.learning.elbo import Annealing, EvidenceLowerBound, ImportanceWeightedBound
from bethenet.learning.posteriors import FirstOrderPosterior, InputBaseline, MeanFieldPosterior, PosteriorOptions
from bethenet.models import ChainBeliefPropagation, ChainKikuchi, DirectedHMM, HMMOptions, UndirectedHMM
from bethenet.models.chain_dp import Domain
from bethenet.models.hidden_chain import HiddenChain
from bethenet.networks import (
    BidirectionalLSTM,
    FeatureOptions,
    InferenceNetwork,
    NodeFeatures,
    PenalizedHead,
    SymbolicEncoder,
)
from bethenet.networks.marginals import MarginalNetwork, MarginalNetworkOptions

Method = Literal["exact", "messages", "network", "amortized", "mean field", "importance", "first order"]


@dataclass(frozen=True)
class Recipe:
    """A row of the table: a model, a method, and all that the figures depend on besides seed and text."""

    label: str
    method: Method
    directed: bool = False
    states: int = 30
    """K."""
    order: int = 3
    embedding: int = 200
    """Of the states."""
    dropout: float = 0.0
    """In the model."""
    start: float = 1.0
    """What the first couplings (of a directed model: log-odds of transitions) are multiplied by. As drawn, the Bethe
    free energy is off by nats; at 0.3, by 0.01."""
    epochs: int | None = 20
    time_limit: float | None = None
    """Seconds of training; the learning rates then fall by the clock unless epochs are given as well."""
    evaluate_every: int = 1
    """Epochs; the best of those evaluated is kept."""
    precision: Literal["highest", "high"] = "highest"
    """Of training's float32 matrix products, see `torch.set_float32_matmul_precision`; evaluation has the highest."""
    learning_rate: float = 1e-3
    network_rate: float = 1e-3
    clip_norm: float = 5.0
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup: int = 100
    """Minibatches over which the learning rates rise."""
    iterations: int = 1
    """Of the engine, a minibatch."""
    unclamped: Unclamped = "persistent"
    """How the chain without words is treated, see `ChainLikelihood`."""
    core: int = 0
    """Lags up to this one are treated exactly: 0 is belief propagation, more is Kikuchi's."""
    damping: float = 0.0
    scaling: int = 0
    """Of Kikuchi's beliefs, see `ChainKikuchi`."""
    penalties: tuple[float, ...] = ()
    """Of the couplings: one weight a lag, see `CouplingPenalty`."""
    penalty_factor: float = 1.0
    penalty_steps: int = 0
    """How much larger they are at first, and the minibatches in which they fall."""
    flooding: int = 0
    """Steps whose marginals the semi-amortised network improves on."""
    consistency: float = 1.0
    """Lambda of the paper's networks, divided by the number of penalty terms."""
    word: int = 150
    node: int = 150
    width: int = 100
    """Of the networks' LSTM, each way."""
    layers: int = 1
    samples: int = 1
    """Of a variational row's posterior, a sentence."""
    baseline_rate: float = 1e-2
    """The learning rate of a variational row's baseline."""
    annealing_steps: int = 0
    annealing_transitions: float = 1.0
    annealing_entropy: float = 1.0
    """In how many minibatches which weights rise to 1, see `Annealing`."""


def model_of(recipe: Recipe, vocabulary: int, domain: Domain) -> HiddenChain:
    """The untrained model; its weights are drawn from the global generator."""
    options = HMMOptions(recipe.states, recipe.order, embedding=recipe.embedding, dropout=recipe.dropout, domain=domain)
    model: HiddenChain
    if recipe.directed:
        model = DirectedHMM(vocabulary, options)
        readout = model.next_states
    else:
        model = UndirectedHMM(vocabulary, options)
        readout = model.target_embeddings
    with torch.no_grad():
        readout.mul_(recipe.start)
    return model


def objective_of(recipe: Recipe, model: HiddenChain, vocabulary: int, longest: int) -> Objective:
    """What a row descends on; its networks are drawn from the global generator.

    Args:
        recipe: the row.
        model: of `model_of`.
        vocabulary: how many words there are.
        longest: words of the longest sentence.
    """
    penalty = None
    if recipe.penalties:
        penalty = CouplingPenalty(recipe.penalties, recipe.penalty_factor, recipe.penalty_steps)
    if recipe.method == "exact":
        return DirectLikelihood(model, regularizer=penalty)
    if isinstance(model, DirectedHMM):
        return _variational(recipe, model, vocabulary)
    if not isinstance(model, UndirectedHMM):
        raise ValueError(f"model: expected a directed or an undirected one, got {type(model).__name__}")
    if recipe.method == "network":
        return _paper(recipe, model, vocabulary, longest)
    engine = _engine(recipe, model.options.domain)
    if recipe.method == "messages":
        return ChainLikelihood(model, engine, unclamped=recipe.unclamped, regularizer=penalty)
    if recipe.method != "amortized":
        raise ValueError(f"method: {recipe.method!r} is for directed models")
    sizes = MarginalNetworkOptions(recipe.word, recipe.node, recipe.node, recipe.width, recipe.layers)
    network = MarginalNetwork(vocabulary, model.options.states, longest, sizes)
    return AmortizedChainLikelihood(
        model, network, engine, flooding=recipe.flooding, unclamped=recipe.unclamped, regularizer=penalty
    )


def _engine(recipe: Recipe, domain: Domain) -> ChainBeliefPropagation | ChainKikuchi:
    if recipe.core == 0:
        return ChainBeliefPropagation("sweeps", recipe.iterations, recipe.damping)
    return ChainKikuchi(recipe.core, recipe.iterations, recipe.damping, scaling=recipe.scaling, domain=domain)


def _variational(recipe: Recipe, model: DirectedHMM, vocabulary: int) -> Objective:
    sizes = PosteriorOptions(recipe.word, recipe.width, recipe.layers, state=recipe.embedding)
    states, order = model.options.states, model.options.order
    annealing = Annealing(recipe.annealing_steps, recipe.annealing_transitions, recipe.annealing_entropy)
    posterior: MeanFieldPosterior | FirstOrderPosterior
    match recipe.method:
        case "importance":
            posterior = MeanFieldPosterior(vocabulary, states, sizes)
            return ImportanceWeightedBound(model, posterior, samples=recipe.samples, annealing=annealing)
        case "mean field" | "first order":
            kind = MeanFieldPosterior if recipe.method == "mean field" else FirstOrderPosterior
            posterior, baseline = kind(vocabulary, states, sizes), InputBaseline(states, order)
            return EvidenceLowerBound(model, posterior, baseline, samples=recipe.samples, annealing=annealing)
    raise ValueError(f"method: {recipe.method!r} is for undirected models")


def _paper(recipe: Recipe, model: UndirectedHMM, vocabulary: int, longest: int) -> Objective:
    """Algorithm 1 with I1 = I2 = 1: f reads place and length, f_x the words besides."""

    def network(word: int) -> InferenceNetwork:
        options = FeatureOptions(node=recipe.node, size=recipe.node, inputs=word)
        features = NodeFeatures(options, max_variables=longest, vocabulary=vocabulary)
        sequence = BidirectionalLSTM(options.width, recipe.width, recipe.layers)
        # tables of pairs have one shape in chains of any length
        encoder = SymbolicEncoder(features, sequence, [model.chain_graph(2)])
        # two terms a factor
        return InferenceNetwork(encoder, PenalizedHead(recipe.consistency / 2, "kl"))

    return Likelihood(model, ByNetwork(network(0)), ByNetwork(network(recipe.word)))
