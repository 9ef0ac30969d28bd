"""Exact inference: seconds and peak memory of bucket elimination, beside pgmpy's variable elimination where it can.

    python benchmarks/exact.py [--device cuda] [--threads N] [--json FILE]

Every case runs in a process of its own, so that its peak is its own. *Plan* is the first call's planning (elimination
order, rounds, predicted bytes), done once for a graph; the other times are medians of several calls after a first one.
*Busy* is the processor time of all threads, which other programs disturb less than they do the wall clock.
*Tensors* is the peak of PyTorch's allocations during the call (the profiler's record of the allocator on a CPU, the
allocator's own statistics on a GPU), *process* how much the whole process grew, planning and all.

The peer computes all node marginals of a grid by one query a variable, which is how its interface gives them.
Install it with ``pip install -c constraints.txt -e ".[benchmark]"``; without it that part is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.exact import Exact
from bethenet.inference.exact.memory import human

SEED = 0
REPEATS = 5
PEER_GRIDS = (4, 6, 8, 10, 12)


def grid(size: int) -> LogPotentials:
    return random(FactorGraph.grid(size, size))


def chain() -> LogPotentials:
    return random(FactorGraph.chain(100_000))


def pairwise_third_order() -> LogPotentials:
    """32 sentences of 30 words; the transitions belong to the position, the emissions to the sentence."""
    graph = FactorGraph.chain(30, 30, order=3)
    return random(graph, batches=[32, 1])


def full_third_order() -> LogPotentials:
    """The same with one table over four states, shared by all positions."""
    windows = [(i, i + 1, i + 2, i + 3) for i in range(27)]
    graph = FactorGraph([30] * 30, [*((i,) for i in range(30)), *windows])
    return random(graph, batches=[32, 1], rows=[30, 1])


def random(graph: FactorGraph, batches: list[int] | None = None, rows: list[int] | None = None) -> LogPotentials:
    generator = torch.Generator().manual_seed(SEED)
    shapes = [
        (batches[number] if batches else 1, rows[number] if rows else len(group), *group.table_shape)
        for number, group in enumerate(graph.factor_groups)
    ]
    return LogPotentials(graph, [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes])


def log_z(potentials: LogPotentials) -> object:
    return Exact().log_z(potentials)


def gradient(potentials: LogPotentials) -> object:
    learning = potentials.map(lambda table: table.detach().clone().requires_grad_())
    return torch.autograd.grad(Exact().log_z(learning).sum(), learning.tables)


def marginals(potentials: LogPotentials) -> object:
    return Exact().run(potentials)


def samples(potentials: LogPotentials) -> object:
    return Exact().sample(potentials, 100)


def best_state(potentials: LogPotentials) -> object:
    return Exact().map(potentials)


ALL = (log_z, gradient, marginals, samples, best_state)
CASES: dict[str, tuple[Callable[[], LogPotentials], tuple[Callable[[LogPotentials], object], ...]]] = {
    "15 x 15 binary grid": (lambda: grid(15), ALL),
    "chain of 100,000 binary variables": (chain, ALL),
    "third-order chain, pairwise, 30 states x 30, batch 32": (pairwise_third_order, (log_z, gradient, marginals)),
    "third-order chain, 4-ary, 30 states x 30, batch 32": (full_third_order, (log_z, gradient)),
}


def measure_case(name: str, device: str, threads: int) -> list[dict[str, Any]]:
    """All tasks of one case. Runs in a fresh process."""
    torch.set_num_threads(threads)
    build, tasks = CASES[name]
    Exact().run(grid(3).to(device))
    before = resident()
    potentials = build().to(device)
    planning, planning_busy = timed(Exact().predicted_bytes, potentials)
    rows = []
    for task in tasks:
        first, *times = [timed(task, potentials) for _ in range(1 + REPEATS)]
        rows.append(
            {
                "case": name,
                "task": task.__name__,
                "plan_seconds": planning,
                "plan_busy_seconds": planning_busy,
                "first_seconds": first[0],
                "seconds": statistics.median(wall for wall, _ in times),
                "slowest_seconds": max(wall for wall, _ in times),
                "busy_seconds": statistics.median(busy for _, busy in times),
                "process_bytes": resident() - before,
            }
        )
    for row, task in zip(rows, tasks, strict=True):
        row["tensor_bytes"] = peak_bytes(task, potentials)
    return rows


def timed(task: Callable[[LogPotentials], object], potentials: LogPotentials) -> tuple[float, float]:
    """Seconds by the wall clock, and of processor time."""
    started, busy = time.perf_counter(), time.process_time()
    result = task(potentials)
    if potentials.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started, time.process_time() - busy
    del result
    return seconds


def resident() -> int:
    """The most memory that the process ever had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_bytes(task: Callable[[LogPotentials], object], potentials: LogPotentials) -> int:
    gc.collect()
    if potentials.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        task(potentials)
        return torch.cuda.max_memory_allocated() - before
    from torch._C._profiler import _EventType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        task(potentials)
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    changes = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    total, peak = 0, 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        total += size
        peak = max(peak, total)
    return peak


def compare_with_peer(size: int) -> list[dict[str, Any]]:
    """All node marginals of a grid by both, on one thread each, as the peer uses no more."""
    import numpy as np
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.inference import VariableElimination
    from pgmpy.models import DiscreteMarkovNetwork

    torch.set_num_threads(1)
    Exact().run(grid(3))
    potentials = grid(size)
    graph = potentials.graph
    model = DiscreteMarkovNetwork()
    names = [str(variable) for variable in range(graph.num_variables)]
    model.add_nodes_from(names)
    for factor, scope in enumerate(graph.scopes()):
        if len(scope) == 2:
            model.add_edge(names[scope[0]], names[scope[1]])
        table = potentials.table(factor)[0].exp().numpy()
        model.add_factors(DiscreteFactor([names[v] for v in scope], table.shape, table))
    theirs: list[np.ndarray] = []

    def query(_: LogPotentials) -> None:
        for name in names:
            values = VariableElimination(model).query([name], show_progress=False).values
            theirs.append(values / values.sum())

    peer = timed(query, potentials)
    first, *times = [timed(Exact().marginals, potentials) for _ in range(1 + REPEATS)]
    gap = float(np.abs(Exact().marginals(potentials).node_marginals[0].numpy() - np.array(theirs)).max())
    return [
        {
            "grid": size,
            "peer_seconds": peer[0],
            "peer_busy_seconds": peer[1],
            "first_seconds": first[0],
            "first_busy_seconds": first[1],
            "seconds": statistics.median(wall for wall, _ in times),
            "busy_seconds": statistics.median(busy for _, busy in times),
            "largest_difference": gap,
        }
    ]


def in_own_process(function: Callable[..., list[dict[str, Any]]], *arguments: object) -> list[dict[str, Any]]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def show(console: Console, rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    table = Table("case", "task", "plan s", "first s", "s", "busy s", "tensors", "process")
    table.title = "bucket elimination, float64"
    for row in rows:
        numbers = [f"{row[key]:.3f}" for key in ("plan_seconds", "first_seconds", "seconds", "busy_seconds")]
        table.add_row(row["case"], row["task"], *numbers, human(row["tensor_bytes"]), human(row["process_bytes"]))
    console.print(table)
    if peers:
        table = Table("grid", "pgmpy busy s", "first call busy s", "busy s", "ratio", "first ratio", "difference")
        table.title = "all node marginals beside pgmpy's variable elimination"
        for row in peers:
            columns = ("peer_busy_seconds", "first_busy_seconds", "busy_seconds")
            numbers = [f"{row[key]:.4f}" for key in columns]
            ratio, first = (row["peer_busy_seconds"] / row[key] for key in ("busy_seconds", "first_busy_seconds"))
            size = f"{row['grid']} x {row['grid']}"
            table.add_row(size, *numbers, f"{ratio:.0f}", f"{first:.0f}", f"{row['largest_difference']:.0e}")
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    load = [os.getloadavg()[0]]
    rows = [row for name in CASES for row in in_own_process(measure_case, name, arguments.device, arguments.threads)]
    peers = []
    try:
        import pgmpy
    except ImportError:
        console.print("pgmpy is not installed: the comparison with its variable elimination is left out")
        version = None
    else:
        version = getattr(pgmpy, "__version__", "unknown")
        for size in PEER_GRIDS:
            peers += in_own_process(compare_with_peer, size)
    show(console, rows, peers)
    load.append(os.getloadavg()[0])
    if arguments.json:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor()
        environment = {
            "command": f"python benchmarks/exact.py --device {arguments.device} --threads {arguments.threads}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pgmpy": version,
            "device": device or platform.machine(),
            "cores": os.cpu_count(),
            "threads": arguments.threads,
            "load_before_and_after": load,
            "seed": SEED,
        }
        record = {"environment": environment, "cases": rows, "pgmpy": peers}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
