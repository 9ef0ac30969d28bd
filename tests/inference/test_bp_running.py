"""Belief propagation as an iteration: how it starts, stops, is damped, and what it says about it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bethenet import FactorGraph, LogPotentials, Status
from bethenet.evaluation import accuracy, marginals_of_ones
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.exact import Exact


def ising_grids(size: int, batch: int, seed: int, scale: float = 1.0) -> LogPotentials:
    """Energy ``sum J x_i x_j + sum h_i x_i`` with x = -1, 1, fields N(0, 1), couplings N(0, scale^2)."""
    generator = torch.Generator().manual_seed(seed)
    graph = FactorGraph.grid(size, size)
    spin = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    fields = torch.randn(batch, size * size, 1, generator=generator, dtype=torch.float64)
    couplings = torch.randn(batch, 2 * size * (size - 1), 1, 1, generator=generator, dtype=torch.float64)
    return LogPotentials(graph, [fields * spin, scale * couplings * spin.unsqueeze(1) * spin])


def test_accuracy_on_ising_grids_with_default_settings() -> None:
    potentials = ising_grids(10, 100, seed=0)
    result = BeliefPropagation().run(potentials)
    truth = Exact().run(potentials)
    found = accuracy(marginals_of_ones(result.beliefs).together, marginals_of_ones(truth.beliefs).together)
    assert float(found.correlation.mean()) >= 0.992
    assert float(found.mean_l1.mean()) <= 0.021
    assert float(result.converged.double().mean()) >= 0.95


def test_members_stop_by_themselves_and_stay_where_they_are() -> None:
    potentials = ising_grids(5, 12, seed=1)
    result = BeliefPropagation().run(potentials)
    assert len(set(result.iterations.tolist())) > 1
    member = int(result.iterations.argmin())
    alone = BeliefPropagation().run(potentials[member])
    assert int(alone.iterations) == int(result.iterations[member])
    torch.testing.assert_close(alone.beliefs.node_marginals[0], result.beliefs.node_marginals[member])
    for count in result.iterations[result.converged].unique().tolist():
        stopped = BeliefPropagation(max_iterations=count).run(potentials)
        done = stopped.converged
        assert torch.equal(done, result.converged & (result.iterations <= count))
        assert torch.equal(stopped.state.messages[0][done], result.state.messages[0][done])


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_contiguous():
                self.entries = max(self.entries, tensor.numel())
        return result


@pytest.mark.parametrize("schedule", ["flooding", "sweep", "residual"])
@pytest.mark.parametrize("sharing", ["factors", "batch"])
def test_messages_through_a_shared_table_need_no_copy_of_it(schedule: str, sharing: str) -> None:
    states, factors, batch = 16, 11, 13
    generator = torch.Generator().manual_seed(0)
    graph = FactorGraph.chain(factors + 1, states, unary=False)
    table = torch.randn(1, 1 if sharing == "factors" else factors, states, states, generator=generator)
    terms = [torch.randn(batch, factors + 1, states, generator=generator)]
    engine = BeliefPropagation(schedule=schedule)
    with Largest() as largest:
        problem = engine.prepare(LogPotentials(graph, [table], terms))
        state = engine.init(problem)
        for _ in range(3):
            state, _ = engine.step(problem, state)
    assert largest.entries < factors * batch * states**2 // 4


@pytest.mark.parametrize("schedule", ["flooding", "sweep", "residual"])
def test_warm_start(schedule: str) -> None:
    potentials = ising_grids(5, 3, seed=2, scale=0.5)
    engine = BeliefPropagation(schedule=schedule)
    first = engine.run(potentials)
    again = engine.run(potentials, state=first.state)
    assert again.iterations.tolist() == [1, 1, 1]
    torch.testing.assert_close(again.beliefs.node_marginals, first.beliefs.node_marginals, atol=1e-6, rtol=0)
    # the model moves a little: fewer iterations than from nothing, the same answer
    moved = potentials.map(lambda tensor: tensor * 1.001)
    cold, warm = engine.run(moved), engine.run(moved, state=first.state)
    assert bool((warm.iterations < cold.iterations).all())
    torch.testing.assert_close(warm.beliefs.node_marginals, cold.beliefs.node_marginals, atol=1e-5, rtol=0)


def test_a_warm_start_opens_states_that_were_impossible() -> None:
    graph = FactorGraph.chain(4, 3)
    potentials = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = [table.clone() for table in potentials.tables]
    tables[1][..., 0, :] = -math.inf
    hard = BeliefPropagation().run(LogPotentials(graph, tables))
    warm = BeliefPropagation().run(potentials, state=hard.state)
    torch.testing.assert_close(warm.log_z, Exact().run(potentials).log_z)
    back = BeliefPropagation().run(LogPotentials(graph, tables), state=warm.state)
    torch.testing.assert_close(back.log_z, hard.log_z)


def test_one_state_starts_a_batch_and_other_graphs_are_refused() -> None:
    single = ising_grids(3, 1, seed=0)
    state = BeliefPropagation().run(single).state
    batch = LogPotentials.stack([single, single])
    assert BeliefPropagation().run(batch, state=state).iterations.tolist() == [1, 1]
    with pytest.raises(ValueError, match="another graph"):
        BeliefPropagation().run(ising_grids(4, 1, seed=0), state=state)


def test_statuses() -> None:
    frustrated = ising_grids(6, 4, seed=3, scale=6.0)
    result = BeliefPropagation(adaptive=False, max_iterations=200).run(frustrated)
    assert Status.OSCILLATING in result.member_status
    assert bool((result.residual[~result.converged] > 1e-6).all())
    easy = ising_grids(6, 1, seed=3)
    assert BeliefPropagation(max_iterations=6, damping=0.5).run(easy).status is Status.ITERATION_LIMIT
    assert BeliefPropagation(max_iterations=0).run(easy).status is Status.ITERATION_LIMIT
    assert BeliefPropagation(tolerance=0.0, time_limit=1e-4).run(easy).status is Status.TIME_LIMIT


def test_nothing_that_is_not_finite_converges() -> None:
    graph = FactorGraph.chain(3)
    for poison in (math.nan, math.inf):
        tables = [torch.zeros(2, 3, 2), torch.zeros(2, 2, 2, 2)]
        tables[1][1, 0, 0, 0] = poison
        result = BeliefPropagation().run(LogPotentials(graph, tables))
        assert result.member_status == (Status.CONVERGED, Status.DIVERGED)


@pytest.mark.parametrize("damping", [0.3, 0.8])
def test_damping_leaves_the_fixed_point_where_it_is(damping: float) -> None:
    potentials = ising_grids(4, 2, seed=0, scale=0.5)
    plain = BeliefPropagation(tolerance=1e-10).run(potentials)
    damped = BeliefPropagation(tolerance=1e-10, damping=damping, adaptive=False).run(potentials)
    assert bool((damped.iterations > plain.iterations).all())
    torch.testing.assert_close(damped.beliefs.node_marginals, plain.beliefs.node_marginals)


def test_damping_adapts_where_flooding_oscillates() -> None:
    potentials = ising_grids(10, 30, seed=11)
    fixed, adaptive = BeliefPropagation(adaptive=False).run(potentials), BeliefPropagation().run(potentials)
    assert int(adaptive.converged.sum()) > int(fixed.converged.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "random"}, "schedule"),
        ({"mode": "min"}, "mode"),
        ({"gradient": "none"}, "gradient"),
        ({"damping": 1.0}, "damping"),
        ({"fraction": 0.0}, "fraction"),
        ({"truncate_at": 0}, "truncate_at"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeliefPropagation(**options)  # type: ignore[arg-type]


def test_an_order_must_name_every_variable() -> None:
    with pytest.raises(ValueError, match="order"):
        BeliefPropagation(schedule="sweep", order=(0, 1)).run(ising_grids(2, 1, seed=0))


def test_threads_and_blocks_change_nothing() -> None:
    """A grid long enough to be worked on in blocks, by one thread and by two; and recorded, which is in one block."""
    potentials = LogPotentials.random(FactorGraph.grid(280, 280), generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    results = []
    try:
        for threads, gradient in ((1, "envelope"), (2, "envelope"), (1, "unrolled")):
            torch.set_num_threads(threads)
            results.append(BeliefPropagation(max_iterations=5, gradient=gradient).run(potentials))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(other.beliefs.node_marginals, results[0].beliefs.node_marginals)
        assert torch.equal(other.residual, results[0].residual)


def test_a_million_edges_fit_in_two_hundred_bytes_each() -> None:
    """Counted on a smaller grid: the graph, its wiring, the log-potentials, the prepared model and the messages."""
    size = 100
    edges = 2 * size * (size - 1)
    graph = FactorGraph.grid(size, size)
    potentials = LogPotentials(graph, [torch.zeros(1, size * size, 2), torch.zeros(1, edges, 2, 2)])
    engine = BeliefPropagation()
    problem = engine.prepare(potentials)
    storages: dict[int, int] = {}
    waiting: list[object] = [potentials, problem, engine.init(problem)]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                waiting.extend(item.values())
            elif isinstance(item, (tuple, list)):
                waiting.extend(item)
            elif type(item).__module__.startswith("bethenet"):
                waiting.extend(getattr(item, "__dict__", {}).values())
    assert sum(storages.values()) <= 200 * edges
