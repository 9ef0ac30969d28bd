"""Training hidden Markov models of sentences by recipes: the cells of table 4 and of the experiment beside it.

Each model is trained by the one trainer and evaluated by exact dynamic programming. The epoch (of each seed) is chosen
by exact likelihood on the validation text; the test text chooses nothing. Training can be stopped anywhere: checkpoints
lie in a folder beside the cell's figures.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from bethenet.data import Corpus, SentenceBatches, Sentences, read_ptb, shipped_text
from bethenet.experiments.hmm_evaluation import coupling_sizes, exact_nll, matmul_precision, unigram_nll
from bethenet.experiments.hmm_methods import Recipe, model_of, objective_of
from bethenet.experiments.runner import Cell, Settings
from bethenet.learning import OptimizerOptions, Schedule, Trainer, TrainerOptions, TrainingResult
from bethenet.learning.metrics import Record
from bethenet.models.hidden_chain import HiddenChain

BATCH = 32
CHECKPOINT_STEPS = 500
UNIGRAM = "unigram"
UNIGRAM_LABEL = "Unigram (control)"


def cells_of(experiment: str, recipes: Mapping[str, Recipe], seeds: range, settings: Settings) -> list[Cell]:
    """A cell for every recipe and seed, all recipes of a seed together; the unigram once."""
    corpus = corpus_for(experiment, settings)
    text = _fingerprint(corpus)
    made = [Cell(UNIGRAM, {"text": text}, lambda: unigram_nll(corpus))]
    for seed in seeds:
        for name, recipe in recipes.items():
            # a device changes the rounding alone, and is recorded with the figures
            parameters = {"seed": seed, "text": text, **asdict(recipe)}
            # as JSON gives it back, so that a finished cell is recognised
            parameters = json.loads(json.dumps(parameters))
            key = f"{name}-seed{seed}"
            folder = settings.output / "cells" / experiment / f"{key}-{_digest(parameters)}"

            def run(recipe: Recipe = recipe, seed: int = seed, folder: Path = folder) -> dict[str, Any]:
                return learn(recipe, corpus, seed, settings, folder)

            made.append(Cell(key, parameters, run))
    return made


def learn(recipe: Recipe, corpus: Corpus, seed: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train a model, from its newest checkpoint if it is to be resumed, and evaluate what the validation text chose."""
    if not settings.resume:
        shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
    scaled = settings.device.startswith("cuda")
    model = model_of(recipe, len(corpus.vocabulary), "scaled" if scaled else "auto")
    objective = objective_of(recipe, model, len(corpus.vocabulary), _longest(corpus)).to(settings.device)
    own = {"model": recipe.learning_rate, "baseline": recipe.baseline_rate}
    rates = {part: own.get(part, recipe.network_rate) for part in objective.parts()}
    schedule = Schedule(recipe.schedule, recipe.warmup, final=0.05)
    options = TrainerOptions(
        epochs=recipe.epochs,
        time_limit=recipe.time_limit,
        seed=seed,
        optimizers={
            part: OptimizerOptions(learning_rate=rate, clip_norm=recipe.clip_norm, schedule=schedule)
            for part, rate in rates.items()
        },
        metric="nll",
        evaluate_every=recipe.evaluate_every,
        directory=folder,
        checkpoint_steps=CHECKPOINT_STEPS,
        capture=True,
        keep_checkpoints=1,
    )
    batches = SentenceBatches(corpus.train, BATCH, shuffle=True, seed=seed)
    evaluation = SentenceBatches(corpus.validation, 4 * BATCH)

    def tell(record: Record) -> None:
        if record["kind"] in ("step", "epoch"):
            found = "".join(f", {name} {record[name]:.2f}" for name in ("objective", "nll") if name in record)
            settings.tell(f"epoch {record['epoch']}{found}")

    trainer = Trainer(objective, options, evaluators=[lambda: {"nll": exact_nll(model, evaluation)}], callbacks=[tell])
    with matmul_precision(recipe.precision):
        result = trainer.fit(batches, evaluation, resume=settings.resume)
    figures = _figures(model, result, len(batches))
    figures["nll_test"] = exact_nll(model, SentenceBatches(corpus.test, 4 * BATCH))
    for checkpoint in folder.glob("step-*.safetensors"):
        checkpoint.unlink()
    return figures


def _figures(model: HiddenChain, result: TrainingResult, minibatches: int) -> dict[str, Any]:
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
        "seconds_per_epoch": result.seconds / max(1, result.steps) * minibatches,
        "inconsistency": max(found, default=None),
        "couplings": coupling_sizes(model),
        "history": [{name: record.get(name) for name in names} for record in result.history],
    }


def corpus_for(experiment: str, settings: Settings) -> Corpus:
    """The user's text, or the shipped one; a quick run takes the beginning."""
    if settings.data is not None:
        corpus = _read(settings.data)
    elif settings.quick:
        return shipped_text()
    else:
        raise ValueError(
            f"{experiment} needs the Penn Treebank's text: --data FOLDER with train.txt, valid.txt and test.txt"
        )
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
