"""Seconds an epoch of third-order hidden Markov models on a text, and where exact and Bethe inference cross as K grows.

    python benchmarks/hmm.py --data FOLDER --threads 2
    python benchmarks/hmm.py --data FOLDER --device cuda --batches 200 --crossover 16,30,64,128

An epoch is every minibatch of equal length (at most 32 sentences): loss, gradient, clipping and one step of Adam. A
sample of minibatches is timed, and the epoch extrapolated by the number of steps in the chains, to which the time is
proportional. The peer is the same model by `logsumexp` and autograd over the table of M + 1 states, which is how the
forward algorithm is usually written; it is timed on a few sentences and extrapolated by their number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bethenet.data import Corpus, SentenceBatches, read_ptb, shipped_text
from bethenet.models import ChainBeliefPropagation, ChainKikuchi, DirectedHMM, HMMOptions, UndirectedHMM

Loss = Callable[[Tensor], Tensor]
PEER_SENTENCES = 4


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
    parser.add_argument("--embedding", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crossover", default="8,16,30", help="numbers of states, separated by commas")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def epoch_rows(
    arguments: argparse.Namespace, corpus: Corpus, sample: list[Tensor], share: float
) -> list[dict[str, object]]:
    """Time every kind of training on the sample."""
    options = HMMOptions(states=arguments.states, embedding=arguments.embedding)
    torch.manual_seed(arguments.seed)
    undirected = UndirectedHMM(len(corpus.vocabulary), options).to(arguments.device)
    directed = DirectedHMM(len(corpus.vocabulary), replace(options, embedding=min(64, arguments.embedding))).to(
        arguments.device
    )
    slow = UndirectedHMM(len(corpus.vocabulary), replace(options, domain="log")).to(arguments.device)
    slow.load_state_dict(undirected.state_dict())
    rows: list[tuple[str, torch.nn.Module, Loss]] = [
        ("undirected, exact", undirected, undirected.log_likelihood),
        ("directed (embedding 64), exact", directed, directed.log_likelihood),
    ]
    for schedule, iterations in (("sweeps", 1), ("sweeps", 5), ("flooding", 10)):
        engine = ChainBeliefPropagation(schedule, iterations)  # type: ignore[arg-type]
        rows.append(
            (f"undirected, BP, {iterations} {schedule}", undirected, bethe_loss(undirected, engine)),
        )
    kikuchi = ChainKikuchi(iterations=2)
    rows.append(("undirected, Kikuchi, 2 iterations", undirected, bethe_loss(undirected, kikuchi)))
    results = []
    for name, model, loss in rows:
        results.append(show(name, [timed(model, loss, sample) for _ in range(arguments.repeats)], share))
    few = [words[:PEER_SENTENCES] for words in sample[:1]]
    scale = share * sum(words.numel() for words in sample) / sum(words.numel() for words in few)
    results.append(show("peer: logsumexp and autograd", [timed(slow, slow.log_likelihood, few)], scale))
    return results


def bethe_loss(model: UndirectedHMM, engine: ChainBeliefPropagation | ChainKikuchi) -> Loss:
    return lambda words: model.bethe_log_likelihood(words, engine).log_likelihood


def crossover(arguments: argparse.Namespace, corpus: Corpus, sample: list[Tensor]) -> list[dict[str, object]]:
    """Milliseconds of a training step on one minibatch for growing K: exact, one sweep, two Kikuchi iterations."""
    middle = sorted(sample, key=lambda words: (words.shape[0], words.shape[1]))[len(sample) // 2]
    sweep, kikuchi = ChainBeliefPropagation("sweeps", 1), ChainKikuchi(iterations=2)
    results: list[dict[str, object]] = []
    for states in (int(part) for part in arguments.crossover.split(",") if part):
        torch.manual_seed(arguments.seed)
        options = HMMOptions(states=states, embedding=arguments.embedding)
        model = UndirectedHMM(len(corpus.vocabulary), options).to(arguments.device)
        row: dict[str, object] = {"states": states, "sentences": middle.shape[0], "steps": middle.shape[1]}
        kinds = {
            "exact": model.log_likelihood,
            "one sweep": bethe_loss(model, sweep),
            "two Kikuchi": bethe_loss(model, kikuchi),
        }
        for name, loss in kinds.items():
            try:
                row[f"{name}, ms"] = round(1000 * min(timed(model, loss, [middle])[0] for _ in range(3)), 2)
            except MemoryError as error:
                row[f"{name}, ms"] = str(error)
        print(row, flush=True)
        results.append(row)
    return results


def timed(model: torch.nn.Module, log_likelihood: Loss, batches: list[Tensor]) -> tuple[float, float]:
    """Seconds, and seconds of the processor, of training on ``batches``; the weights are then put back."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)
    train(model, log_likelihood, batches[:1], optimiser)
    synchronise(batches[0])
    started, processor = time.perf_counter(), time.process_time()
    train(model, log_likelihood, batches, optimiser)
    synchronise(batches[0])
    seconds = time.perf_counter() - started, time.process_time() - processor
    model.load_state_dict(weights)
    return seconds


def train(model: torch.nn.Module, log_likelihood: Loss, batches: list[Tensor], optimiser: torch.optim.Adam) -> None:
    for words in batches:
        optimiser.zero_grad()
        (-log_likelihood(words).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()


def synchronise(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


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
