"""Reading model files: seconds for two million table entries, beside the shortest reading that checks nothing.

    python benchmarks/formats.py [--json FILE]

*Read* is by the wall clock, *busy* the processor time, which other programs disturb less; medians of some readings.
The ratio is of processor times.

Three models of two million entries each (pairwise binary factors; a few large tables; tables whose entries are written
with 6 digits, as other programs do), in both formats. The peer is `numpy.fromstring` over the bare text: it finds the
same numbers, but knows no structure, takes no logarithm and names no line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bethenet import FactorGraph, LogPotentials
from bethenet.formats import read_model, write_model

ENTRIES = 2_000_000
REPEATS = 3


def pairwise() -> FactorGraph:
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(0, 100_000, (ENTRIES // 4,), generator=generator)
    step = torch.randint(1, 100_000, (ENTRIES // 4,), generator=generator)
    return FactorGraph.from_arrays([2] * 100_000, [torch.stack([left, (left + step) % 100_000], dim=1)])


def large_tables() -> FactorGraph:
    return FactorGraph([10] * 10, [[(i + j) % 10 for j in range(5)] for i in range(ENTRIES // 10**5)])


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Median seconds by the wall clock, and of processor time."""
    times = []
    for _ in range(REPEATS):
        started, busy = time.perf_counter(), time.process_time()
        action()
        times.append((time.perf_counter() - started, time.process_time() - busy))
    return statistics.median(wall for wall, _ in times), statistics.median(busy for _, busy in times)


def short_numbers(path: Path) -> None:
    """The same file with every number that has a fraction cut to 6 digits."""
    lines = [
        " ".join(f"{float(word):.6g}" if "." in word or "e" in word else word for word in line.split())
        for line in path.read_text().replace("MARKOV\n", "").splitlines()
    ]
    path.write_text("\n".join((["MARKOV"] if path.suffix == ".uai" else []) + lines))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    rows, load = [], [os.getloadavg()[0]]
    print(f"{'model':<28}{'format':<8}{'MB':>6}{'write s':>9}{'read s':>9}{'busy s':>9}{'peer s':>9}{'ratio':>7}")
    for name, graph in [("pairwise", pairwise()), ("large tables", large_tables()), ("pairwise, 6 digits", pairwise())]:
        model = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for suffix in ("uai", "fg"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"model.{suffix}"
                started = time.perf_counter()
                write_model(model, path)
                write_seconds = time.perf_counter() - started
                if "6 digits" in name:
                    short_numbers(path)
                read, read_busy = timed(lambda path=path: read_model(path))
                text = path.read_text().removeprefix("MARKOV")
                peer, peer_busy = timed(lambda text=text: np.fromstring(text, sep=" "))
            rows.append(
                {
                    "model": name,
                    "format": suffix,
                    "entries": ENTRIES,
                    "bytes": len(text),
                    "write_seconds": write_seconds,
                    "read_seconds": read,
                    "read_busy_seconds": read_busy,
                    "peer_seconds": peer,
                    "peer_busy_seconds": peer_busy,
                }
            )
            print(
                f"{name:<28}{suffix:<8}{len(text) / 1e6:>6.0f}{write_seconds:>9.2f}{read:>9.2f}"
                f"{read_busy:>9.2f}{peer_busy:>9.2f}{read_busy / peer_busy:>7.1f}"
            )
    if options.json:
        environment = {
            "command": " ".join(["python", *sys.argv]),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load_before_and_after": [*load, os.getloadavg()[0]],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
