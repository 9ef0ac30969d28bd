"""Belief propagation against enumeration: every schedule, both modes, and what it does where there is little to do."""

from __future__ import annotations

import math

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet import FactorGraph, ImpossibleEvidenceError, LogPotentials, Status
from bethenet.inference.bp import BeliefPropagation
from bethenet.inference.bp.levels import leaves_first
from oracle import enumerate_model, models

SCHEDULES = ["flooding", "sweep", "residual"]


def random_tree(seed: int, *, states: tuple[int, ...] = (2, 3), batch: int = 2, zeros: bool = False) -> LogPotentials:
    """Ten variables in a tree of factors of two and three variables, and two components."""
    generator = torch.Generator().manual_seed(seed)
    counts = [states[i] for i in torch.randint(len(states), (10,), generator=generator).tolist()]
    scopes: list[tuple[int, ...]] = [(0,), (3,), ()]
    for child in range(1, 6):
        scopes.append((int(torch.randint(child, (1,), generator=generator)), child))
    scopes += [(6, 3, 7), (8, 9)]
    graph = FactorGraph(counts, scopes)
    potentials = LogPotentials.random(graph, 1.5, batch_size=batch, dtype=torch.float64, generator=generator)
    if not zeros:
        return potentials

    def strike(table: torch.Tensor) -> torch.Tensor:
        hit = torch.rand(table.shape, generator=generator) < 0.3
        hit.reshape(*table.shape[:2], -1)[:, :, 0] = False
        return table.masked_fill(hit, -math.inf)

    return LogPotentials(graph, [strike(table) for table in potentials.tables], potentials.node_terms)


def assert_exact(potentials: LogPotentials, engine: BeliefPropagation) -> None:
    truth, result = enumerate_model(potentials), engine.run(potentials)
    assert result.status is Status.CONVERGED
    torch.testing.assert_close(result.log_z, truth.log_z.expand_as(result.log_z))
    for variable in range(potentials.graph.num_variables):
        torch.testing.assert_close(result.beliefs.node_marginal(variable), truth.marginal((variable,)))
    for factor in range(potentials.graph.num_factors):
        scope = potentials.graph.scope(factor)
        if scope:
            torch.testing.assert_close(result.beliefs.factor_marginal(factor), truth.marginal(scope))
    assert float(result.beliefs.inconsistency().max()) < 1e-7


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("states", [(2,), (3,), (1, 2, 3)])
def test_trees_are_exact(schedule: str, zeros: bool, states: tuple[int, ...]) -> None:
    for seed in range(2):
        assert_exact(random_tree(seed, states=states, zeros=zeros), BeliefPropagation(schedule=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zeros", [False, True])
def test_most_probable_states_of_trees(schedule: str, zeros: bool) -> None:
    for seed in range(3):
        potentials = random_tree(seed, zeros=zeros)
        states, value = BeliefPropagation(schedule=schedule).map(potentials)
        torch.testing.assert_close(value, enumerate_model(potentials).map_log_value)
        torch.testing.assert_close(value, potentials.score(states).diagonal())


@pytest.mark.parametrize("zeros", [False, True])
def test_fixed_points_are_stationary_points_of_the_bethe_free_energy(zeros: bool) -> None:
    """At a fixed point any consistent change of the beliefs leaves the free energy as it is, to first order: in its
    messages the gradient of the dual vanishes, which is that beliefs agree; and the log-potentials reappear as
    the sum over regions of counting number times log-belief, up to a constant.
    """

    @settings(deadline=None, max_examples=25)
    @given(models(max_variables=4, zeros=zeros, batch=2))
    def check(potentials: LogPotentials) -> None:
        result = BeliefPropagation(tolerance=1e-11).run(potentials)
        if not bool(result.converged.all()):
            assert result.status in (Status.OSCILLATING, Status.ITERATION_LIMIT)
            return
        assert float(result.beliefs.inconsistency().max()) < 1e-8
        truth = enumerate_model(potentials)
        scores = potentials.score(truth.assignments)
        rebuilt = torch.zeros_like(scores)
        for table, group in zip(result.beliefs.log_tables, result.beliefs.regions.groups, strict=True):
            for row in range(len(group)):
                index = [truth.assignments[:, v] for v in group.variables[row].tolist()]
                entries = table[:, row][(slice(None), *index)].reshape(table.shape[0], -1).T
                number = float(group.counting_numbers[row])
                rebuilt = rebuilt + (entries * number if number else torch.zeros_like(entries))
        possible = (scores > -math.inf) & torch.isfinite(rebuilt)
        gap = (scores - rebuilt).masked_fill(~possible, 0.0)
        torch.testing.assert_close(gap, result.log_z.expand_as(gap).masked_fill(~possible, 0.0), atol=1e-6, rtol=1e-6)

    check()


@settings(deadline=None, max_examples=20)
@given(models(max_variables=4, zeros=True), st.sampled_from(["sum", "max"]))
def test_nothing_is_ever_nan(potentials: LogPotentials, mode: str) -> None:
    for schedule in SCHEDULES:
        engine = BeliefPropagation(schedule=schedule, mode=mode, max_iterations=12, damping=0.3)
        result = engine.run(potentials)
        for table in result.beliefs.log_tables:
            assert not bool(torch.isnan(table).any())
            assert not bool((table == math.inf).any())
        assert not bool(torch.isnan(result.log_z).any())
        assert result.status is not Status.DIVERGED


@settings(deadline=None, max_examples=15)
@given(models(max_variables=5, batch=3), st.sampled_from(SCHEDULES))
def test_a_batch_is_its_members_one_by_one(potentials: LogPotentials, schedule: str) -> None:
    engine = BeliefPropagation(schedule=schedule, max_iterations=300)
    together = engine.run(potentials)
    for member in range(potentials.batch_size):
        alone = engine.run(potentials[member])
        assert alone.member_status == together.member_status[member : member + 1]
        torch.testing.assert_close(alone.log_z, together.log_z[member : member + 1])
        assert int(alone.iterations[0]) == int(together.iterations[member])


def expanded(potentials: LogPotentials) -> LogPotentials:
    tables = [
        table.expand(potentials.batch_size, len(group), *group.table_shape).clone()
        for table, group in zip(potentials.tables, potentials.graph.factor_groups, strict=True)
    ]
    return LogPotentials(potentials.graph, tables, potentials.node_terms)


@pytest.mark.parametrize("states", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_shared_tables_give_what_their_copies_give(states: int, schedule: str, mode: str) -> None:
    graph = FactorGraph([states] * 6, [*((i,) for i in range(6)), (0, 1), (2, 1), (2, 3), (4, 3), (4, 5), (0, 5)])
    generator = torch.Generator().manual_seed(3)

    def table(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for batch, rows in [(1, 1), (3, 1), (1, 6), (3, 6)]:
        potentials = LogPotentials(graph, [table(3, 6, states), table(batch, rows, states, states)])
        engine = BeliefPropagation(schedule=schedule, mode=mode)
        one, other = engine.run(potentials), engine.run(expanded(potentials))
        for got, expected in zip(one.beliefs.log_tables, other.beliefs.log_tables, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_one_sweep_there_and_back_is_exact_on_trees() -> None:
    for seed in range(3):
        potentials = random_tree(seed)
        result = BeliefPropagation(schedule="sweep", max_iterations=1).run(potentials)
        torch.testing.assert_close(result.log_z, enumerate_model(potentials).log_z)
    graph = FactorGraph.chain(6, 3)
    potentials = LogPotentials.random(graph, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for order in (range(6), range(5, -1, -1)):
        engine = BeliefPropagation(schedule="sweep", max_iterations=1, order=tuple(order))
        torch.testing.assert_close(engine.run(potentials).log_z, enumerate_model(potentials).log_z)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_sweeps_go_left_to_right_on_chains(order: int) -> None:
    assert leaves_first(FactorGraph.chain(17, 2, order=order)).tolist() == list(range(17))
    two = FactorGraph([2] * 8, [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)])
    ranked = leaves_first(two).tolist()
    assert [v for v in ranked if v < 4] == [0, 1, 2, 3]
    assert [v for v in ranked if v >= 4] == [4, 5, 6, 7]


def test_sweeps_need_fewer_iterations_on_a_chain_of_third_order() -> None:
    graph = FactorGraph.chain(30, 3, order=3)
    potentials = LogPotentials.random(graph, 0.5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sweeps = BeliefPropagation(schedule="sweep").run(potentials)
    floods = BeliefPropagation().run(potentials)
    assert sweeps.status is floods.status is Status.CONVERGED
    assert int(sweeps.iterations) < int(floods.iterations)
    torch.testing.assert_close(sweeps.beliefs.node_marginals, floods.beliefs.node_marginals, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("states", [2, 3])
def test_potentials_of_fifty_nats(dtype: torch.dtype, states: int) -> None:
    graph = FactorGraph.chain(5, states)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tables = [
            50 * torch.randint(-1, 2, (1, len(g), *g.table_shape), generator=generator).double()
            + torch.randn(1, len(g), *g.table_shape, generator=generator).double()
            for g in graph.factor_groups
        ]
        potentials = LogPotentials(graph, [table.to(dtype) for table in tables])
        truth, result = enumerate_model(potentials), BeliefPropagation().run(potentials)
        assert result.status is Status.CONVERGED
        for variable in range(5):
            got = result.beliefs.node_marginal(variable).double()
            torch.testing.assert_close(
                got, truth.marginal((variable,)), atol=1e-9 if dtype == torch.float64 else 1e-4, rtol=0
            )


def test_single_and_double_precision_agree() -> None:
    potentials = LogPotentials.random(
        FactorGraph.grid(6, 6), 0.7, batch_size=4, generator=torch.Generator().manual_seed(0)
    )
    single = BeliefPropagation().run(potentials)
    double = BeliefPropagation().run(potentials.to(dtype=torch.float64))
    assert single.status is double.status is Status.CONVERGED
    assert single.log_z.dtype is torch.float32
    torch.testing.assert_close(single.beliefs.node_marginals.double(), double.beliefs.node_marginals, atol=1e-4, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("counts", "scopes"),
    [
        ([], []),
        ([], [()]),
        ([3], []),
        ([2, 3], [(0,), (1,), (0,)]),
        ([1, 1], [(0, 1)]),
        ([2, 1, 2], [(0, 1), (1, 2), (0, 1, 2)]),
        ([2, 2, 2], [(0, 1), ()]),
        ([1, 1, 2], [(0, 1, 2)]),
        ([1, 1, 2], [(0, 1), (1, 0), (1, 2), (0, 2)]),
    ],
)
def test_little_graphs(schedule: str, counts: list[int], scopes: list[tuple[int, ...]]) -> None:
    graph = FactorGraph(counts, scopes)
    potentials = LogPotentials.random(
        graph, batch_size=2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    truth = enumerate_model(potentials)
    for engine in (BeliefPropagation(schedule=schedule), BeliefPropagation(schedule=schedule, gradient="unrolled")):
        result = engine.run(potentials)
        assert result.status is Status.CONVERGED
        torch.testing.assert_close(result.log_z.expand_as(truth.log_z), truth.log_z)
    states, value = BeliefPropagation(schedule=schedule).map(potentials)
    torch.testing.assert_close(value.expand_as(truth.log_z), truth.map_log_value)
    assert states.shape[1] == len(counts)


def test_several_factors_of_one_scope_count_each() -> None:
    generator = torch.Generator().manual_seed(0)
    graph = FactorGraph([2, 2], [(0, 1), (0, 1)])
    result = BeliefPropagation(tolerance=1e-10).run(
        LogPotentials.random(graph, dtype=torch.float64, generator=generator)
    )
    assert result.status is Status.CONVERGED
    assert [group.counting_numbers.tolist() for group in result.beliefs.regions.groups] == [[1, 1], [-1, -1]]


def test_many_degrees_are_padded() -> None:
    """A graph in which every degree from 1 to 30 occurs, so that larger ones are padded to powers of two."""
    network = networkx.Graph()
    for hub in range(30):
        network.add_edges_from((f"hub {hub}", f"leaf {hub} {leaf}") for leaf in range(hub + 1))
    for kind in (0.0, -math.inf):
        graph = FactorGraph.from_networkx(network, 2)
        potentials = LogPotentials.random(graph, 0.5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        tables = [potentials.tables[0], potentials.tables[1].clone()]
        tables[1][:, ::3, 1, 0] += kind
        potentials = LogPotentials(graph, tables)
        padded, swept = BeliefPropagation().run(potentials), BeliefPropagation(schedule="sweep").run(potentials)
        assert padded.status is swept.status is Status.CONVERGED
        torch.testing.assert_close(padded.log_z, swept.log_z)
        # a star at a time: log Z by hand
        unary, pair = potentials.tables
        rest = 0.0
        number = {name: row for row, name in enumerate(graph.names or ())}
        for hub in range(30):
            total = unary[0, number[f"hub {hub}"]].clone()
            for leaf in range(hub + 1):
                scope = (number[f"hub {hub}"], number[f"leaf {hub} {leaf}"])
                factor = (
                    next(f for f in range(graph.num_factors) if graph.scope(f) == scope) if leaf == 0 else factor + 1
                )
                _, row = graph.locate_factor(factor)
                total = total + torch.logsumexp(pair[0, row] + unary[0, scope[1]], -1)
            rest += float(torch.logsumexp(total, 0))
        assert float(padded.log_z) == pytest.approx(rest)


def test_hard_constraints_with_evidence() -> None:
    """Exclusive or over three variables and equality along a chain: two observations fix everything."""
    parity = torch.full((2, 2, 2), -math.inf)
    equal = torch.full((2, 2), -math.inf)
    for a in range(2):
        equal[a, a] = 0.0
        for b in range(2):
            parity[a, b, a ^ b] = 0.0
    model = LogPotentials.from_factors([2] * 5, [((0, 1, 2), parity), ((2, 3), equal), ((3, 4), equal)])
    for schedule in SCHEDULES:
        result = BeliefPropagation(schedule=schedule).run(model.clamp({0: 1, 4: 0}))
        assert result.status is Status.CONVERGED
        assert result.beliefs.node_marginals[0].argmax(-1).tolist() == [1, 1, 0, 0, 0]
        assert float(result.log_z) == pytest.approx(0.0)
        with pytest.raises(ImpossibleEvidenceError):
            BeliefPropagation(schedule=schedule).run(model.clamp({2: 0, 4: 1}))


def test_impossible_fields_are_refused_at_once() -> None:
    model = LogPotentials.from_factors([2, 2], [((0,), [-math.inf, 0.0]), ((0, 1), torch.zeros(2, 2))])
    with pytest.raises(ImpossibleEvidenceError, match="members"):
        BeliefPropagation().run(model.clamp({0: 0}))
    with pytest.raises(ImpossibleEvidenceError):
        BeliefPropagation().run(LogPotentials.from_factors([2], [((), -math.inf)]))


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_evidence_on_binary_models(mode: str) -> None:
    """Observed variables have infinite log-odds, which the fast form for couplings must digest."""
    potentials = LogPotentials.random(
        FactorGraph.chain(6), dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    potentials = potentials.clamp({0: 1, 3: torch.tensor([0, 1, -1])})
    truth, result = enumerate_model(potentials), BeliefPropagation(mode=mode).run(potentials)
    assert result.status is Status.CONVERGED
    if mode == "max":
        torch.testing.assert_close(result.log_z, truth.map_log_value)
        return
    torch.testing.assert_close(result.log_z, truth.log_z)
    for variable in range(6):
        torch.testing.assert_close(result.beliefs.node_marginal(variable), truth.marginal((variable,)))


def test_ties_are_decoded_consistently() -> None:
    """Both uniform assignments are best: per-variable maxima alone could mix them."""
    table = [[1.0, 0.0], [0.0, 1.0]]
    graph = FactorGraph.chain(8, unary=False)
    potentials = LogPotentials.from_tables(graph, [table] * 7, dtype=torch.float64)
    states, value = BeliefPropagation().map(potentials)
    assert float(value) == pytest.approx(7.0)
    assert len(set(states[0].tolist())) == 1
    different = LogPotentials.from_tables(graph, [[[0.0, 1.0], [1.0, 0.0]]] * 7, dtype=torch.float64)
    assert float(BeliefPropagation(schedule="sweep").map(different)[1]) == pytest.approx(7.0)
