"""Learning third-order hidden Markov models of sentences: what table 4 of the paper reports, and more rows beside it.

Each row is trained by the one trainer and evaluated by exact dynamic programming. The epoch (of each seed) is chosen
by exact likelihood on the validation text; the test text chooses nothing. Training can be stopped anywhere: checkpoints
lie in a folder beside the row's figures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bethenet.data import Corpus, SentenceBatches, Sentences, read_ptb, shipped_text
from bethenet.experiments.hmm_methods import Recipe, model_of, objective_of
from bethenet.experiments.runner import Cell, Settings
from bethenet.learning import OptimizerOptions, Schedule, Trainer, TrainerOptions, TrainingResult
from bethenet.models import DirectedHMM, UndirectedHMM
from bethenet.models.chain_dp import prefix_log_z
from bethenet.models.hidden_chain import HiddenChain

logger = logging.getLogger(__name__)

STATES = 30
BATCH = 32
CHECKPOINT_STEPS = 500

RECIPES = {
    "first-order": Recipe("Exact, first order only (control)", "exact", order=1, start=0.3),
    "directed-exact": Recipe("Directed: exact", "exact", directed=True),
    "mean-field": Recipe(
        "Directed: mean-field VAE + BL", "mean field", directed=True, embedding=100, word=100, width=200, layers=3
    ),
    "iwae": Recipe(
        "Directed: mean-field IWAE-10", "importance", directed=True, embedding=100, word=64, width=100, layers=2
    ),
    # a posterior that learns as fast as the model stays at the unigram
    "first-order-vae": Recipe(
        "Directed: first-order HMM VAE", "first order", directed=True, word=64, layers=3, network_rate=3e-4
    ),
    "exact": Recipe("Undirected: exact", "exact", start=0.3),
    "bp": Recipe("Undirected: loopy BP", "bp", embedding=64, iterations=5, persistent=False),
    "network": Recipe(
        "Undirected: inference network",
        "network",
        embedding=64,
        dropout=0.3,
        learning_rate=1e-4,
        network_rate=3e-4,
        clip_norm=1.0,
        schedule="constant",
    ),
    "bp-l2": Recipe("Ours: BP, persistent, L2", "bp", start=0.3, penalties=(0.0, 30.0, 30.0)),
    "kikuchi": Recipe("Ours: Kikuchi, persistent", "kikuchi", start=0.3, iterations=2),
    "amortized": Recipe("Ours: semi-amortised network", "amortized", start=0.3, flooding=3, node=50),
}
"""Rows by name, in the order of the table. The first of each group are the paper's."""
UNIGRAM = "unigram"
UNIGRAM_LABEL = "Unigram (control)"


def cells(settings: Settings) -> list[Cell]:
    """A cell for every row and seed, all rows of a seed together; the unigram once."""
    corpus = _corpus(settings)
    text = _fingerprint(corpus)
    made = [Cell(UNIGRAM, {"text": text}, lambda: unigram(corpus))]
    for seed in seeds_of(settings):
        for name, recipe in recipes_for(settings).items():
            parameters = {
                "seed": seed,
                "states": states_for(settings),
                "text": text,
                "device": settings.device,
                **asdict(recipe),
            }
            # as JSON gives it back, so that a finished cell is recognised
            parameters = json.loads(json.dumps(parameters))
            key = f"{name}-seed{seed}"
            folder = settings.output / "cells" / "table4" / f"{key}-{_digest(parameters)}"

            def run(recipe: Recipe = recipe, seed: int = seed, folder: Path = folder) -> dict[str, Any]:
                return learn(recipe, corpus, seed, settings, folder)

            made.append(Cell(key, parameters, run))
    return made


def learn(recipe: Recipe, corpus: Corpus, seed: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train a row, from its newest checkpoint if it is to be resumed, and evaluate what the validation text chose."""
    if not settings.resume:
        shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
    scaled = settings.device.startswith("cuda")
    model = model_of(recipe, len(corpus.vocabulary), states_for(settings), "scaled" if scaled else "auto")
    objective = objective_of(recipe, model, len(corpus.vocabulary), _longest(corpus)).to(settings.device)
    rates = dict.fromkeys(objective.parts(), recipe.network_rate) | {"model": recipe.learning_rate}
    schedule = Schedule(recipe.schedule, recipe.warmup, final=0.05)
    options = TrainerOptions(
        epochs=recipe.epochs,
        seed=seed,
        optimizers={
            part: OptimizerOptions(learning_rate=rate, clip_norm=recipe.clip_norm, schedule=schedule)
            for part, rate in rates.items()
        },
        metric="nll",
        directory=folder,
        checkpoint_steps=CHECKPOINT_STEPS,
        keep_checkpoints=1,
    )
    batches = SentenceBatches(corpus.train, BATCH, shuffle=True, seed=seed)
    evaluation = SentenceBatches(corpus.validation, 4 * BATCH)
    trainer = Trainer(objective, options, evaluators=[lambda: {"nll": exact_nll(model, evaluation)}])
    result = trainer.fit(batches, evaluation, resume=settings.resume)
    figures = _figures(model, result) | {"nll_test": exact_nll(model, SentenceBatches(corpus.test, 4 * BATCH))}
    for checkpoint in folder.glob("step-*.safetensors"):
        checkpoint.unlink()
    return figures


def _figures(model: HiddenChain, result: TrainingResult) -> dict[str, Any]:
    best: Mapping[str, Any] = result.best or {}
    gaps = [best.get(f"validation_{side}inconsistency") for side in ("", "clamped_")]
    found = [gap for gap in gaps if gap is not None]
    names = ("epoch", "seconds", "objective", "validation_objective", "nll")
    return {
        "status": str(result.status),
        "nll_validation": best.get("nll"),
        "objective_validation": best.get("validation_objective"),
        "best_epoch": best.get("epoch"),
        "epochs": result.epochs,
        "seconds_per_epoch": result.seconds / max(1, result.epochs),
        "inconsistency": max(found, default=None),
        "couplings": coupling_sizes(model),
        "history": [{name: record.get(name) for name in names} for record in result.history],
    }


@torch.no_grad()
def exact_nll(model: HiddenChain, sentences: SentenceBatches) -> float:
    """Mean of -log P(sentence | its length) in nats, by the dynamic programme in arithmetic that is safe for it."""
    was_training = model.training
    model.eval()
    device = model.state_embeddings.device
    tables, emissions = model.tables(), model.emission_log_probabilities().T
    total = torch.zeros((), dtype=torch.float64, device=device)
    for words in _equally_long(sentences):
        unary = torch.nn.functional.embedding(words.to(device), emissions)
        # the last row is the chain without words; a directed model's log Z is 0
        log_z = prefix_log_z(torch.cat([unary, torch.zeros_like(unary[:1])]), tables)[:, -1].double()
        total += (log_z[-1] - log_z[:-1]).sum()
    model.train(was_training)
    return float(total) / len(sentences.sentences)


@torch.no_grad()
def coupling_sizes(model: HiddenChain) -> list[float]:
    """Standard deviation (nats) of each lag's double-centred log-potentials, the shortest lag first.

    Of a directed model: of its log-transitions averaged over the other states of the history.
    """
    if isinstance(model, UndirectedHMM):
        return [float(size) for size in model.coupling_sizes()]
    if not isinstance(model, DirectedHMM):
        raise ValueError(f"expected a directed or an undirected model, got {type(model).__name__}")
    order, states = model.options.order, model.options.states
    table = model.transition_log_probabilities()[(slice(0, states),) * order]
    sizes = []
    for lag in range(1, order + 1):
        others = [axis for axis in range(order) if axis != order - lag]
        pairs = table.mean(others) if others else table
        centred = pairs - pairs.mean(0, keepdim=True) - pairs.mean(1, keepdim=True) + pairs.mean()
        sizes.append(float(centred.square().mean().sqrt()))
    return sizes


def unigram(corpus: Corpus) -> dict[str, Any]:
    """The control that knows how often each word is used, and no more (each word counted once more than it stands)."""
    counts = torch.bincount(corpus.train.words, minlength=len(corpus.vocabulary)).double() + 1
    log_chances = (counts / counts.sum()).log()

    def nll(sentences: Sentences) -> float:
        return float(-log_chances[sentences.words].sum()) / len(sentences)

    return {"nll_validation": nll(corpus.validation), "nll_test": nll(corpus.test)}


# --- settings ---------------------------------------------------------------------------------------------------------


def recipes_for(settings: Settings) -> dict[str, Recipe]:
    """The rows; small ones for a quick run."""
    if not settings.quick:
        return RECIPES
    small: dict[str, Any] = {"embedding": 16, "epochs": 3, "word": 16, "node": 8, "width": 16, "layers": 1}
    small |= {"learning_rate": 0.01, "network_rate": 0.003, "warmup": 10}
    return {name: replace(recipe, **small) for name, recipe in RECIPES.items()}


def seeds_of(settings: Settings) -> range:
    """Three unless said otherwise; one for a quick run."""
    return range(settings.seeds or (1 if settings.quick else 3))


def states_for(settings: Settings) -> int:
    """K."""
    return 6 if settings.quick else STATES


def _corpus(settings: Settings) -> Corpus:
    if settings.data is not None:
        corpus = _read(settings.data)
    elif settings.quick:
        return shipped_text()
    else:
        raise ValueError("table4 needs the Penn Treebank's text: --data FOLDER with train.txt, valid.txt and test.txt")
    if not settings.quick:
        return corpus
    parts = (corpus.train, corpus.validation, corpus.test)
    return Corpus(
        corpus.vocabulary, *(_first(part, number) for part, number in zip(parts, (1600, 200, 200), strict=True))
    )


@lru_cache(maxsize=1)
def _read(folder: Path) -> Corpus:
    return read_ptb(folder)


def _first(sentences: Sentences, count: int) -> Sentences:
    lengths = sentences.lengths[:count]
    return Sentences(sentences.words[: int(lengths.sum())], lengths)


def _fingerprint(corpus: Corpus) -> str:
    digest = hashlib.sha256()
    for part in (corpus.train, corpus.validation, corpus.test):
        digest.update(part.words.numpy().tobytes())
        digest.update(part.lengths.numpy().tobytes())
    return digest.hexdigest()[:16]


def _digest(parameters: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:8]


def _longest(corpus: Corpus) -> int:
    return max(int(part.lengths.max()) for part in (corpus.train, corpus.validation, corpus.test))


def _equally_long(sentences: SentenceBatches) -> Iterator[Tensor]:
    for words in sentences:
        if not isinstance(words, Tensor):
            raise ValueError("expected minibatches of sentences of equal length, got padded ones")
        yield words
