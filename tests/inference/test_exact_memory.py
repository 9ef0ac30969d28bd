"""What exact inference says it will take, compared with what it takes.

The measure is the peak of PyTorch's own allocations: the profiler records every allocation and release of the CPU
allocator (temporary buffers inside kernels included), and their running sum has a maximum. Nothing else of the process
plays a part, so the figure is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest
import torch
from torch._C._profiler import _EventType

from bethenet import FactorGraph, LogPotentials
from bethenet.errors import MemoryLimitError
from bethenet.inference.exact import Exact, memory
from bethenet.inference.exact.layout import Layout
from bethenet.inference.exact.planning import planner_for


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that was allocated at once during a call, above what there was before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    del result
    assert profile.profiler is not None
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


def test_the_measure_counts_what_is_held_at_once() -> None:
    def call() -> torch.Tensor:
        first = torch.zeros(1000, 1000)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(call) == pytest.approx(8e6, rel=0.01)


MODELS = {
    "6x6 grid": (lambda: FactorGraph.grid(6, 6), 1),
    "12x12 grid": (lambda: FactorGraph.grid(12, 12), 1),
    "10x10 grids": (lambda: FactorGraph.grid(10, 10), 8),
    "7x7 grids of three states": (lambda: FactorGraph.grid(7, 7, 3), 2),
    "chains of order 1": (lambda: FactorGraph.chain(40, 12), 4),
    "chains of order 2": (lambda: FactorGraph.chain(40, 12, order=2), 4),
    "chains of order 3": (lambda: FactorGraph.chain(30, 10, order=3), 4),
    "a long chain": (lambda: FactorGraph.chain(10_000), 1),
    "4-ary tables": (lambda: FactorGraph([6] * 20, [(i, i + 1, i + 2, i + 3) for i in range(17)]), 3),
    "a random regular graph": (lambda: FactorGraph.from_networkx(nx.random_regular_graph(3, 60, seed=0)), 2),
    "a random graph": (lambda: FactorGraph.from_networkx(nx.gnp_random_graph(30, 0.2, seed=1)), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_the_prediction_is_within_half_of_the_measured_peak(name: str, dtype: torch.dtype) -> None:
    build, batch = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    potentials = LogPotentials.random(build(), 0.5, batch_size=batch, dtype=dtype, generator=generator)
    check_prediction(potentials)


def check_prediction(potentials: LogPotentials) -> None:
    engine = Exact()
    predicted = engine.predicted_bytes(potentials)
    measured = peak_bytes(lambda: engine.run(potentials))
    assert measured / 1.5 <= predicted <= 1.5 * measured, f"marginals: predicted {predicted}, measured {measured}"
    learning = potentials.map(lambda table: table.clone().requires_grad_())
    predicted = engine.predicted_bytes(learning)

    def backward() -> object:
        result = engine.run(learning)
        result.log_z.sum().backward()
        return result

    measured = peak_bytes(backward)
    assert measured / 1.5 <= predicted <= 1.5 * measured, f"gradient: predicted {predicted}, measured {measured}"


@pytest.mark.parametrize("name", ["12x12 grid", "chains of order 1", "4-ary tables", "a random graph"])
@pytest.mark.parametrize("samples", [1, 2000])
def test_the_prediction_counts_samples(name: str, samples: int) -> None:
    build, batch = MODELS[name]
    potentials = LogPotentials.random(build(), 0.5, batch_size=batch, dtype=torch.float64)
    layout = Layout.of(potentials)
    for task, call in [
        (memory.Task.SAMPLES, lambda: Exact().sample(potentials, samples)),
        (memory.Task.BEST, lambda: Exact().map(potentials)),
    ]:
        count = 1 if task is memory.Task.BEST else samples
        predicted = planner_for(potentials).choose("auto", layout, task, 8, samples=count).bytes_needed
        measured = peak_bytes(call)
        assert measured / 1.5 <= predicted <= 1.5 * measured, f"{task}: predicted {predicted}, measured {measured}"


def test_too_many_samples_are_refused() -> None:
    potentials = LogPotentials.random(FactorGraph.chain(5))
    with pytest.raises(MemoryLimitError, match=r"exact inference \(samples\) would need .* TiB"):
        Exact().sample(potentials, 10**11)


def test_prediction_with_shared_tables_and_evidence() -> None:
    graph = FactorGraph.chain(30, 12, order=3)
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(16, 30, 12, generator=generator), torch.randn(1, 1, 12, 12, generator=generator)]
    check_prediction(LogPotentials(graph, tables))
    check_prediction(LogPotentials(graph, tables).clamp({i: list(range(8)) * 2 for i in range(0, 30, 4)}))


@pytest.mark.parametrize("tables", ["pairwise", "4-ary"])
def test_a_third_order_chain_is_summed_without_the_joint_table(tables: str) -> None:
    """No tensor of [batch, K^4]: log Z holds a few messages of [batch, K^3], and the one table of K^4."""
    states, positions, batch = 20, 12, 16
    generator = torch.Generator().manual_seed(0)
    if tables == "pairwise":
        graph = FactorGraph.chain(positions, states, order=3)
        shared = [torch.randn(1, len(group), states, states, generator=generator) for group in graph.factor_groups[1:]]
        given = 0
    else:
        windows = [(i, i + 1, i + 2, i + 3) for i in range(positions - 3)]
        graph = FactorGraph([states] * positions, [*((i,) for i in range(positions)), *windows])
        shared = [torch.randn(1, 1, *[states] * 4, generator=generator)]
        given = 4 * states**4
    potentials = LogPotentials(graph, [torch.randn(batch, positions, states, generator=generator), *shared])
    Exact().predicted_bytes(potentials)
    message = 4 * batch * states**3
    assert peak_bytes(lambda: Exact().log_z(potentials)) < 6 * message + 4 * given < 4 * batch * states**4
    learning = potentials.map(lambda table: table.clone().requires_grad_())
    kept = (positions + 6) * message + 6 * given
    assert peak_bytes(lambda: Exact().log_z(learning).sum().backward()) < kept


def test_refused_before_anything_is_allocated() -> None:
    potentials = LogPotentials.random(FactorGraph.grid(40, 40), dtype=torch.float64)
    with pytest.raises(MemoryLimitError, match=r"[PT]iB.*width \d+.*bp, gbp, mean-field, trw, descent") as caught:
        Exact().run(potentials)
    assert caught.value.width >= 40
    assert caught.value.bytes_needed >= 8 * 2**40
    potentials = LogPotentials.random(FactorGraph.grid(10, 10), dtype=torch.float64)
    needed = Exact().predicted_bytes(potentials)
    Exact(memory_limit=needed).run(potentials)
    for call in (Exact(memory_limit=20_000).run, Exact(memory_limit=20_000).map, Exact(memory_limit=20_000).log_z):

        def refused(call: Callable[[LogPotentials], object] = call) -> None:
            with pytest.raises(MemoryLimitError, match=r"may take 19.53 KiB") as caught:
                call(potentials)
            assert caught.value.bytes_allowed == 20_000 < caught.value.bytes_needed

        refused()
        assert peak_bytes(refused) < 5000


def test_hopeless_graphs_are_refused_quickly() -> None:
    graph = FactorGraph.complete(300)
    assert Exact().width(graph) == 299
    assert Exact().predicted_bytes(graph) > 2**300
    with pytest.raises(MemoryLimitError, match=r"10\^9\d bytes.*width 299"):
        Exact().log_z(LogPotentials.random(graph))


def test_a_narrower_order_is_taken_where_the_fastest_does_not_fit() -> None:
    potentials = LogPotentials.random(FactorGraph.chain(2000), dtype=torch.float64)
    engine = Exact()
    fastest = engine.predicted_bytes(potentials)
    narrow = Exact(order="min-degree").predicted_bytes(potentials)
    assert narrow < fastest
    limited = Exact(memory_limit=(narrow + fastest) // 2)
    assert limited.predicted_bytes(potentials) == narrow
    torch.testing.assert_close(limited.log_z(potentials), engine.log_z(potentials))


def test_prediction_from_a_graph_alone() -> None:
    graph = FactorGraph.grid(9, 9)
    potentials = LogPotentials.random(graph, batch_size=3, dtype=torch.float64)
    expected = Exact().predicted_bytes(potentials)
    assert Exact().predicted_bytes(graph, batch_size=3, dtype=torch.float64) == expected
    assert Exact().predicted_bytes(graph, batch_size=3) == pytest.approx(expected / 2, rel=0.1)


def test_free_memory_and_bytes_for_humans() -> None:
    assert 2**20 < memory.free_bytes(torch.device("cpu")) < 2**60
    assert [memory.human(n) for n in (0, 1000, 2048, 1_040_000, 5 << 30, 3 << 60)] == [
        "0 bytes",
        "1000 bytes",
        "2 KiB",
        "1016 KiB",
        "5 GiB",
        "3 EiB",
    ]
    assert memory.human(10**30) == "10^30 bytes"
