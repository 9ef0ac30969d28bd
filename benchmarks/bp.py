"""Belief propagation on binary grids: edge updates a second, beside PGMax's on the same models in the same run.

    python benchmarks/bp.py [--sizes 100 300 1000] [--own-sizes 2000] [--rounds 3] [--threads 2] [--json FILE]

An edge update renews both messages of one edge. Both sides do the same: float32, flooding, damping 1/2 (of the
logarithms), 100 iterations from uniform messages, on one model with independent normal log-potentials (seed 0). The
rounds of the two alternate; the median is reported, with the least and greatest. Beside the wall clock's figures stand
those of the processor time of all threads (*busy*), which other programs disturb less: updates a second of one core's
time. Building and compiling are reported apart and are in no rate. That both arrive at the same marginals is checked.

*Held* counts the bytes of all tensors that the graph, the log-potentials, the wiring, the prepared model and a state
keep, each storage once.

Install the peer with ``pip install -c constraints.txt -e ".[benchmark]"``; without it that part is left out.
PGMax 0.6.1 needs a JAX that still has ``jax.lib.xla_bridge``: 0.7.2 does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.bp.wiring import compile_wiring
from bethenet.inference.engine import Loop

ITERATIONS = 100
DAMPING = 0.5
SEED = 0

Numbers = tuple[np.ndarray, np.ndarray]
T = TypeVar("T")


def log_potentials(size: int) -> Numbers:
    """Unary [variables, 2] and pairwise [edges, 2, 2], the edges in the order of `FactorGraph.grid`."""
    generator = np.random.default_rng(SEED)
    unary = generator.standard_normal((size * size, 2), dtype=np.float32)
    pairwise = generator.standard_normal((2 * size * (size - 1), 2, 2), dtype=np.float32)
    return unary, pairwise


class Tireless(BeliefPropagation):
    """Goes on where nothing changes any more, as the peer does: every iteration that is counted is done."""

    def step(self, problem: Any, state: Any) -> tuple[Any, torch.Tensor]:
        state, residual = super().step(problem, state)
        return state, 1 + residual


class Ours:
    """This library, set up for one grid."""

    def __init__(self, size: int, numbers: Numbers, device: str) -> None:
        def build() -> FactorGraph:
            graph = FactorGraph.grid(size, size)
            graph.compiled(compile_wiring)
            return graph

        graph, self.build = timed(build)
        self.potentials = LogPotentials(graph, [torch.from_numpy(part).unsqueeze(0).to(device) for part in numbers])
        self.engine = Tireless(damping=DAMPING, adaptive=False, max_iterations=ITERATIONS)
        with torch.no_grad():
            self.problem, self.prepare = timed(lambda: self.engine.prepare(self.potentials))
            self.state = self.engine.init(self.problem)
            self.engine.step(self.problem, self.state)

    @torch.no_grad()
    def iterate(self) -> None:
        loop = Loop(self.engine, self.problem, self.engine.init(self.problem))
        loop.run(time.perf_counter())
        self.state = loop.state
        if self.potentials.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def marginals(self) -> np.ndarray:
        return self.engine.beliefs(self.problem, self.state).node_marginals[0].cpu().numpy()

    def held_bytes(self) -> int:
        return tensor_bytes([self.potentials, self.problem, self.state])


class Peer:
    """PGMax, set up for the same grid."""

    def __init__(self, size: int, numbers: Numbers) -> None:
        import jax
        from pgmax import infer

        self.infer = infer
        self.result: Any = None
        (self.inferer, self.arrays, self.variables), self.build = timed(lambda: self.built(size, numbers))
        self.run = jax.jit(
            lambda arrays: self.inferer.run(arrays, num_iters=ITERATIONS, damping=DAMPING, temperature=1.0)
        )
        self.first = timed(self.iterate)[1]

    @staticmethod
    def built(size: int, numbers: Numbers) -> tuple[Any, Any, Any]:
        from pgmax import fgraph, fgroup, infer, vgroup

        unary, pairwise = numbers
        variables = vgroup.NDVarArray(num_states=2, shape=(size, size))
        scopes = [[variables[i, j], variables[i, j + 1]] for i in range(size) for j in range(size - 1)]
        scopes += [[variables[i, j], variables[i + 1, j]] for i in range(size - 1) for j in range(size)]
        graph = fgraph.FactorGraph(variable_groups=variables)
        graph.add_factors(fgroup.PairwiseFactorGroup(variables_for_factors=scopes, log_potential_matrix=pairwise))
        inferer = infer.build_inferer(graph.bp_state, backend="bp")
        return inferer, inferer.init(evidence_updates={variables: unary.reshape(size, size, 2)}), variables

    def iterate(self) -> None:
        self.result = self.run(self.arrays)
        self.result.ftov_msgs.block_until_ready()

    def marginals(self) -> np.ndarray:
        beliefs = self.inferer.get_beliefs(self.result)
        return np.asarray(self.infer.get_marginals(beliefs)[self.variables]).reshape(-1, 2)


def tensor_bytes(roots: list[Any]) -> int:
    """The bytes of all tensors reachable through attributes, tuples, lists and dictionaries."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                waiting += item.values()
            elif isinstance(item, (tuple, list)):
                waiting += item
            elif hasattr(item, "__dict__") and type(item).__module__.startswith("bethenet"):
                waiting += vars(item).values()
    return sum(storages.values())


class Spent(NamedTuple):
    """Seconds: by the clock, and the processor's, of all threads together."""

    wall: float
    busy: float


def timed(task: Callable[[], T]) -> tuple[T, Spent]:
    wall, busy = time.perf_counter(), time.process_time()
    result = task()
    return result, Spent(time.perf_counter() - wall, time.process_time() - busy)


def rates(rounds: list[Spent], edges: int) -> dict[str, float]:
    """Edge updates a second: the median round's, the slowest's and the fastest's; and a second of processor time."""
    work, wall = edges * ITERATIONS, [spent.wall for spent in rounds]
    return {
        "edge_updates_per_second": work / statistics.median(wall),
        "slowest": work / max(wall),
        "fastest": work / min(wall),
        "edge_updates_per_processor_second": work / statistics.median(spent.busy for spent in rounds),
    }


def measure(size: int, rounds: int, device: str, peer_too: bool) -> dict[str, Any]:
    numbers, edges = log_potentials(size), 2 * size * (size - 1)
    ours = Ours(size, numbers, device)
    peer = Peer(size, numbers) if peer_too else None
    our_times, peer_times = [], []
    for _ in range(rounds):
        our_times.append(timed(ours.iterate)[1])
        if peer is not None:
            peer_times.append(timed(peer.iterate)[1])
    own = rates(our_times, edges)
    row: dict[str, Any] = {
        "size": size,
        "edges": edges,
        "build_seconds": ours.build._asdict(),
        "prepare_seconds": ours.prepare._asdict(),
        "held_bytes_per_edge": ours.held_bytes() / edges,
        "bethenet": own,
    }
    if peer is not None:
        theirs = rates(peer_times, edges)
        row["pgmax"] = theirs | {
            "build_seconds": peer.build._asdict(),
            # the first call compiles; its own iterations are taken off again
            "compile_seconds": peer.first.wall - statistics.median(spent.wall for spent in peer_times),
        }
        row["ratio"] = own["edge_updates_per_second"] / theirs["edge_updates_per_second"]
        row["processor_ratio"] = own["edge_updates_per_processor_second"] / theirs["edge_updates_per_processor_second"]
        row["largest_difference_of_marginals"] = float(np.abs(ours.marginals() - peer.marginals()).max())
    return row


def peer_available() -> bool:
    try:
        import pgmax  # noqa: F401
    except ImportError:
        return False
    return True


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Million edge updates: a second (slowest to fastest round) / a second of processor time")
    for column in (
        "grid",
        "bethenet",
        "PGMax",
        "ratio",
        "build + prepare s (busy)",
        "PGMax build + compile s",
        "bytes",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        peer = row.get("pgmax")

        def span(rate: dict[str, float]) -> str:
            keys = ("edge_updates_per_second", "slowest", "fastest", "edge_updates_per_processor_second")
            typical, slowest, fastest, busy = (rate[key] / 1e6 for key in keys)
            return f"{typical:.1f} ({slowest:.1f} to {fastest:.1f}) / {busy:.1f}"

        def seconds(spent: dict[str, float]) -> str:
            return f"{spent['wall']:.2f} ({spent['busy']:.2f})"

        table.add_row(
            f"{row['size']} x {row['size']}",
            span(row["bethenet"]),
            span(peer) if peer else "-",
            f"{row['ratio']:.1f} / {row['processor_ratio']:.1f}" if peer else "-",
            f"{seconds(row['build_seconds'])} + {seconds(row['prepare_seconds'])}",
            f"{peer['build_seconds']['wall']:.1f} + {peer['compile_seconds']:.1f}" if peer else "-",
            f"{row['held_bytes_per_edge']:.0f}",
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--own-sizes", type=int, nargs="*", default=[2000], help="grids for this library alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="this library's; the peer's is chosen by JAX")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with_peer = peer_available()
    # the first use of each operation is slower than the rest
    Ours(10, log_potentials(10), options.device).iterate()
    rows, load = [], [os.getloadavg()[0]]
    # the peer's last: its runtime stays with the process
    for size, peer_too in [*((n, False) for n in options.own_sizes), *((n, with_peer) for n in options.sizes)]:
        rows.append(measure(size, options.rounds, options.device, peer_too))
        gc.collect()
    rows.sort(key=lambda row: row["size"])
    load.append(os.getloadavg()[0])
    show(rows)
    if options.json:
        environment = {
            "command": " ".join(["python", *sys.argv]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "seed": SEED,
            "load_before_and_after": load,
        }
        if with_peer:
            from importlib.metadata import version

            environment |= {"pgmax": version("pgmax"), "jax": version("jax")}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
