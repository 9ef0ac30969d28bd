"""Seconds an epoch of persistent contrastive divergence, beside scikit-learn's `BernoulliRBM` at the same batch size.

    python benchmarks/rbm.py --threads 2 --output results/benchmark_rbm.json
    python benchmarks/rbm.py --device cuda --threads 8 --output results/benchmark_rbm_cuda.json

Two sizes: the paper's digits with 100 hidden units, and 784 x 500 on random binary images. scikit-learn moves as many
chains as a minibatch has rows and takes plain gradient steps; "sgd" does the same here. "adam" and more chains are what
one would rather use, and "trainer" is that with all of its loop counted. Runs alternate with the peer's, so that both
meet the same machine. Each is timed with one thread and with all, and the faster counts: the median over repeats and
the range are given, with the ratio of medians.

Also: seconds for one estimate of log Z by annealing; seconds an epoch of the learners through the trainer; how long the
trainer takes to reach the best likelihood that scikit-learn's machine reaches in 40 epochs, both judged on training
rows held out for the purpose; and what a step of every learner takes at 784 x 500 and how much memory: by how much a
process of its own grows, or the peak of what is allocated on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import Tensor

try:
    import sklearn
    from sklearn.neural_network import BernoulliRBM
    from threadpoolctl import threadpool_limits
except ImportError as error:
    sys.exit(f"this is a race against scikit-learn, whose digits it is run on too: pip install scikit-learn ({error})")

from bethenet.data import BinaryImages, paper_digits
from bethenet.experiments.clock import EpochClock
from bethenet.experiments.rbm_learning import HIDDEN, RECIPES, held_out_nll, learner, time_epoch
from bethenet.inference.ais import annealed_importance_sampling
from bethenet.learning import (
    OptimizerOptions,
    PersistentContrastiveDivergence,
    Schedule,
    Trainer,
    TrainerOptions,
)
from bethenet.models.rbm import RBM
from bethenet.models.rbm_chains import RBMPath, contrastive_gradient, start_chains

Step = Callable[[list[Tensor], list[Tensor]], None]


def main() -> None:
    arguments = parse()
    if arguments.threads:
        set_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    digits = paper_digits().train
    random_images = (torch.rand(arguments.rows, 784, generator=generator) < 0.2).to(torch.uint8)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "device": torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "batch_size": arguments.batch_size,
        "repeats": arguments.repeats,
        "seconds_per_epoch": {
            "digits, 64 x 100": compare(digits, 100, arguments),
            f"{arguments.rows} random images, 784 x 500": compare(random_images, 500, arguments),
        },
        "annealing, 64 x 100, 256 chains, 4000 temperatures": annealing(digits, arguments),
        "trainer, digits, seconds per epoch": trainer_epochs(arguments),
        "time to the peer's best likelihood": time_to_likelihood(digits, arguments),
        "one step of every learner, 784 x 500": {name: large_step(name, arguments) for name in RECIPES},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where this library runs; the peer has the CPU only")
    parser.add_argument("--threads", type=int, default=0, help="of both")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rows", type=int, default=2000, help="random images of 784 pixels")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def compare(data: Tensor, hidden: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Time one epoch of every kind in turn, several times over; with one thread and with all, the faster counts."""
    batch = arguments.batch_size
    contenders: dict[str, Callable[[], float]] = {
        "scikit-learn": lambda: peer_epoch(data, hidden, arguments),
        f"sgd, {batch} chains": lambda: epoch(data, hidden, batch, sgd(), arguments),
        f"adam, {batch} chains": lambda: epoch(data, hidden, batch, adam(), arguments),
        "adam, 100 chains": lambda: epoch(data, hidden, 100, adam(), arguments),
        f"trainer, adam, {batch} chains": lambda: trainer_epoch(data, hidden, batch, arguments),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    usual = torch.get_num_threads()
    for threads in sorted({1, usual}):
        set_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(arguments.repeats + 1):
            for name, run in contenders.items():
                taken = run()
                if repeat:  # the first is for warming up
                    seconds[name].append(taken)
        for name, times in seconds.items():
            spread = [round(min(times), 5), round(max(times), 5)]
            found[name].append({"median": round(statistics.median(times), 5), "range": spread, "threads": threads})
    set_threads(usual)
    best = {name: min(kinds, key=lambda kind: kind["median"]) for name, kinds in found.items()}
    peer = best["scikit-learn"]["median"]
    return {name: kind | {"ratio": round(kind["median"] / peer, 3)} for name, kind in best.items()}


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    threadpool_limits(threads)


def peer_epoch(data: Tensor, hidden: int, arguments: argparse.Namespace) -> float:
    images = data.numpy().astype("float32")
    peer = BernoulliRBM(hidden, learning_rate=0.05, batch_size=arguments.batch_size, n_iter=1, random_state=0)
    started = time.perf_counter()
    peer.fit(images)
    return time.perf_counter() - started


def epoch(data: Tensor, hidden: int, chains: int, step: Step, arguments: argparse.Namespace) -> float:
    device = torch.device(arguments.device)
    model = RBM(data.shape[1], hidden, generator=torch.Generator().manual_seed(arguments.seed)).to(device)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    states = start_chains(model, chains, generator=generator)
    features = model.encode(data.to(device))
    parameters = [parameter.detach() for parameter in model.parameters()]
    synchronize(device)
    started = time.perf_counter()
    order = torch.randperm(features.shape[0], generator=generator, device=device)
    for rows in features[order].split(arguments.batch_size):
        gradient = contrastive_gradient(model, rows, states, generator=generator)
        step(parameters, list(gradient))
    synchronize(device)
    return time.perf_counter() - started


def trainer_epoch(data: Tensor, hidden: int, chains: int, arguments: argparse.Namespace) -> float:
    """The second epoch of a run: in the first one everything is set up."""
    model = RBM(data.shape[1], hidden, generator=torch.Generator().manual_seed(arguments.seed)).to(arguments.device)
    options = TrainerOptions(epochs=2, batch_size=arguments.batch_size, seed=arguments.seed, capture=True)
    clock = EpochClock(arguments.device)
    rows = data.float().to(arguments.device)
    Trainer(PersistentContrastiveDivergence(model, chains=chains), options, callbacks=[clock]).fit(rows)
    return clock.seconds()[1][0]


def sgd() -> Step:
    return lambda parameters, gradient: torch._foreach_add_(parameters, gradient, alpha=-0.05)


def adam() -> Step:
    """The fused kernel without the Python around it, which costs more than everything else in a step this small."""
    moments: list[list[Tensor]] = []

    def step(parameters: list[Tensor], gradient: list[Tensor]) -> None:
        if not moments:
            steps = [torch.zeros((), device=parameter.device) for parameter in parameters]
            moments.extend(
                [[torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters], steps]
            )
        first, second, steps = moments
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            parameters, gradient, first, second, [], steps,
            lr=3e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def annealing(data: Tensor, arguments: argparse.Namespace) -> float:
    device = torch.device(arguments.device)
    generator = torch.Generator().manual_seed(arguments.seed)
    model = RBM(data.shape[1], 100, weight_scale=0.3, generator=generator).initialise_from(data).to(device)
    path = RBMPath(model, model.base_log_odds(data.to(device)))
    started = time.perf_counter()
    annealed_importance_sampling(path, generator=torch.Generator(device).manual_seed(arguments.seed))
    synchronize(device)
    return round(time.perf_counter() - started, 3)


def trainer_epochs(arguments: argparse.Namespace) -> dict[str, object]:
    """Wall-clock and processor seconds of one epoch of the table's recipes, all of the loop counted."""
    return {
        name: time_epoch(name, device=arguments.device, repeats=arguments.repeats)
        for name in ("pcd", "bp-persistent", "network")
    }


def time_to_likelihood(data: Tensor, arguments: argparse.Namespace) -> dict[str, object]:
    """The peer after 10, 20, 30 and 40 epochs at its best learning rates; the trainer, with as many chains as the peer
    moves, with ever longer schedules.
    """
    learn, judge = data[:-1000], data[-1000:]
    images = learn.numpy().astype("float32")
    split = BinaryImages(learn, judge)
    peers = []
    for rate in (0.1, 0.05):
        for epochs in (10, 20, 30, 40):
            peer = BernoulliRBM(HIDDEN, learning_rate=rate, batch_size=32, n_iter=epochs, random_state=0)
            started = time.perf_counter()
            peer.fit(images)
            seconds = time.perf_counter() - started
            model = RBM(64, HIDDEN)
            with torch.no_grad():
                model.weights.copy_(torch.from_numpy(peer.components_.T))
                model.visible_bias.copy_(torch.from_numpy(peer.intercept_visible_))
                model.hidden_bias.copy_(torch.from_numpy(peer.intercept_hidden_))
            peers.append((held_out_nll(model, split)[0], seconds, rate, epochs))
    goal, seconds, rate, epochs = min(peers)
    report: dict[str, object] = {
        "scikit-learn": {"nll": round(goal, 3), "seconds": round(seconds, 3), "learning_rate": rate, "epochs": epochs}
    }
    optimizer = OptimizerOptions(learning_rate=1.5e-2, schedule=Schedule("cosine"))
    for ours in (6, 8, 10, 12, 15, 20, 30):
        model = RBM(64, HIDDEN, generator=torch.Generator().manual_seed(0)).initialise_from(learn).to(arguments.device)
        options = TrainerOptions(epochs=ours, optimizers={"model": optimizer}, evaluate_every=ours, capture=True)
        chains = PersistentContrastiveDivergence(model, chains=32)
        started = time.perf_counter()
        Trainer(chains, options).fit(learn.float().to(arguments.device))
        taken = time.perf_counter() - started
        nll = held_out_nll(model, split)[0]
        if nll <= goal:
            trainer = {"nll": round(nll, 3), "seconds": round(taken, 3)}
            trainer |= {"learning_rate": optimizer.learning_rate, "epochs": ours}
            return report | {"trainer": trainer, "ratio": round(taken / seconds, 3)}
    return report | {"trainer": "not reached in 30 epochs"}


def large_step(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step after the first, and the memory that both took."""
    if arguments.device != "cpu":
        return two_steps(name, arguments.device, torch.get_num_threads())
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(two_steps, name, arguments.device, torch.get_num_threads()).result()


def two_steps(name: str, device: str, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    rows = (torch.rand(32, 784, generator=generator) < 0.2).float().to(device)
    before = peak_bytes(device, afresh=True)
    model = RBM(784, 500, generator=generator).initialise_from(rows.cpu()).to(device)
    objective = learner(name, model, 0)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        Trainer(objective, TrainerOptions(epochs=1)).fit(rows)
        synchronize(torch.device(device))
        seconds.append(time.perf_counter() - started)
    return {"seconds": round(seconds[1], 3), "mebibytes": round((peak_bytes(device) - before) / 2**20)}


def peak_bytes(device: str, afresh: bool = False) -> int:
    """The most memory in use so far: of this process, or of tensors on a GPU (there only from now on if ``afresh``)."""
    if device != "cpu":
        if afresh:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    # Linux counts kibibytes, macOS bytes
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
