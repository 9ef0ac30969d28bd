"""Seconds an epoch of third-order hidden Markov models on a text, and where exact and Bethe inference cross as K grows.

    python benchmarks/hmm.py --data FOLDER --threads 2
    python benchmarks/hmm.py --data FOLDER --device cuda --batches 200 --crossover 16,30,64,128

An epoch is every minibatch of equal length (at most 32 sentences): loss, gradient, clipping and one step of Adam, by
the trainer (on a GPU: recorded once and replayed). A sample of minibatches is timed, and the epoch extrapolated by the
number of steps in the chains, to which the time is proportional. The peer is the same model by `logsumexp` and autograd
over the table of M + 1 states, which is how the forward algorithm is usually written; it is timed on a few sentences
and extrapolated by their number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bethenet.data import Corpus, SentenceBatches, read_ptb, shipped_text
from bethenet.experiments.clock import EpochClock
from bethenet.experiments.hmm_methods import Recipe, model_of, objective_of
from bethenet.experiments.hmm_tables import RECIPES
from bethenet.learning import Batch, OptimizerOptions, Trainer, TrainerOptions
from bethenet.models.chain_dp import Domain

EXACT, SWEEPS, KIKUCHI = RECIPES["exact"], replace(RECIPES["bp"], embedding=200), RECIPES["kikuchi"]
ROWS = {
    "undirected, exact": EXACT,
    "directed (embedding 64), exact": replace(RECIPES["directed-exact"], embedding=64),
    "undirected, BP, 1 sweep": replace(SWEEPS, iterations=1, unclamped="persistent"),
    "undirected, BP, 5 sweeps": SWEEPS,
    "undirected, Kikuchi": KIKUCHI,
    "undirected, semi-amortised network": RECIPES["amortized"],
    "undirected, network of the paper": RECIPES["network"],
}
PEER_SENTENCES = 4
REPLAYED = 8
WARM_EPOCHS = 2


def main() -> None:
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    corpus = read_ptb(arguments.data) if arguments.data else shipped_text()
    batches = SentenceBatches(corpus.train, 32, shuffle=True, seed=arguments.seed)
    epoch = list(batches)
    sample = [words.to(arguments.device) for words in epoch[: arguments.batches]]
    share = sum(words.shape[1] for words in epoch) / sum(words.shape[1] for words in sample)
    report = {
        # the folder is the user's own
        "command": " ".join(["python", *("FOLDER" if part == str(arguments.data) else part for part in sys.argv)]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "vocabulary": len(corpus.vocabulary),
        "sentences": len(corpus.train),
        "batches_in_epoch": len(epoch),
        "batches_timed": len(sample),
        "rows": epoch_rows(arguments, corpus, sample, share),
        "crossover": crossover(arguments, corpus, sample),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of train.txt, valid.txt, test.txt (default: shipped text)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batches", type=int, default=20, help="minibatches to time")
    parser.add_argument("--repeats", type=int, default=3, help="times over; the median is reported, and the range")
    parser.add_argument("--states", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crossover", default="8,16,30", help="numbers of states, separated by commas")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def epoch_rows(
    arguments: argparse.Namespace, corpus: Corpus, sample: list[Tensor], share: float
) -> list[dict[str, object]]:
    """Time every kind of training on the sample."""
    longest = max(words.shape[1] for words in sample)
    few = [words[:PEER_SENTENCES] for words in sample[:1]]
    scale = share * sum(words.numel() for words in sample) / sum(words.numel() for words in few)
    results = []
    for name, recipe, domain, batches, factor in (
        *((name, recipe, fast(arguments), sample, share) for name, recipe in ROWS.items()),
        ("peer: logsumexp and autograd", EXACT, "log", few, scale),
    ):
        own = replace(recipe, states=arguments.states)
        times = timed(arguments, own, domain, len(corpus.vocabulary), longest, batches)
        results.append(show(name, times, factor))
    return results


def fast(arguments: argparse.Namespace) -> Domain:
    """The arithmetic that never waits for a GPU."""
    return "scaled" if arguments.device.startswith("cuda") else "auto"


def crossover(arguments: argparse.Namespace, corpus: Corpus, sample: list[Tensor]) -> list[dict[str, object]]:
    """Milliseconds of a training step on one minibatch for growing K: exact, one sweep, two Kikuchi iterations."""
    middle = sorted(sample, key=lambda words: (words.shape[0], words.shape[1]))[len(sample) // 2]
    kinds = {
        "exact": EXACT,
        "one sweep": replace(SWEEPS, iterations=1, unclamped="persistent"),
        "two Kikuchi": replace(KIKUCHI, iterations=2, scaling=0, unclamped="persistent"),
    }
    results: list[dict[str, object]] = []
    for states in (int(part) for part in arguments.crossover.split(",") if part):
        row: dict[str, object] = {"states": states, "sentences": middle.shape[0], "steps": middle.shape[1]}
        for name, recipe in kinds.items():
            own = replace(recipe, states=states)
            batches = [middle] * REPLAYED
            try:
                times = timed(arguments, own, fast(arguments), len(corpus.vocabulary), middle.shape[1], batches)
                row[f"{name}, ms"] = round(1000 * min(seconds for seconds, _ in times) / len(batches), 3)
            except MemoryError as error:
                row[f"{name}, ms"] = str(error)
        print(row, flush=True)
        results.append(row)
    return results


def timed(
    arguments: argparse.Namespace, recipe: Recipe, domain: Domain, vocabulary: int, longest: int, batches: list[Tensor]
) -> list[tuple[float, float]]:
    """Seconds, and seconds of the processor, of training epochs on ``batches``, after some for warming up."""
    torch.manual_seed(arguments.seed)
    model = model_of(recipe, vocabulary, domain)
    objective = objective_of(recipe, model, vocabulary, longest).to(arguments.device)
    rates = OptimizerOptions(learning_rate=1e-4, clip_norm=5.0)
    # epochs in which a GPU's steps are recorded are not timed
    warm = WARM_EPOCHS if arguments.device.startswith("cuda") else 1
    options = TrainerOptions(
        epochs=warm + arguments.repeats,
        optimizers=dict.fromkeys(objective.parts(), rates),
        log_every=10_000,
        capture=True,
    )
    clock = EpochClock(arguments.device)
    Trainer(objective, options, callbacks=[clock]).fit([Batch(words, len(words)) for words in batches])
    return clock.seconds()[warm:]


def show(name: str, times: list[tuple[float, float]], scale: float) -> dict[str, object]:
    wall = [scale * seconds for seconds, _ in times]
    row: dict[str, object] = {
        "name": name,
        "seconds_per_epoch": round(statistics.median(wall), 2),
        "least": round(min(wall), 2),
        "most": round(max(wall), 2),
        "processor_seconds_per_epoch": round(scale * statistics.median(processor for _, processor in times), 2),
    }
    print(
        f"{name:34} {row['seconds_per_epoch']:>9} s/epoch ({row['least']} to {row['most']}; "
        f"processor {row['processor_seconds_per_epoch']})",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
