import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bethenet import FactorGraph, ImpossibleEvidenceError, LogPotentials
from bethenet.inference.conditionals import Conditionals, colour_blocks
from bethenet.inference.sampling import GibbsSampler, draw, soften
from oracle import enumerate_model, models


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sweep_matrix(sampler: GibbsSampler, assignments: Tensor, inverse_temperature: float) -> Tensor:
    """The transition matrix of one sweep of a batch of one, from the conditionals the sampler draws from."""
    graph = sampler.graph
    strides = torch.ones(graph.num_variables, dtype=torch.long)
    strides[:-1] = graph.state_counts[1:].flip(0).cumprod(0).flip(0)
    total = torch.eye(len(assignments), dtype=torch.float64)
    columns = assignments.T.unsqueeze(-1)
    for block in sampler.blocks:
        logits = block.logits(columns, inverse_temperature)[:, :, 0]
        for position, variable in enumerate(block.variables.tolist()):
            step = torch.zeros_like(total)
            # one variable after another: within a colour their conditionals do not depend on each other
            for state in range(logits.shape[-1]):
                target = (assignments * strides).sum(1) + (state - assignments[:, variable]) * strides[variable]
                chance = torch.softmax(logits[position], -1)[:, state]
                step[torch.arange(len(assignments)), target] += torch.nan_to_num(chance)
            total = total @ step
    return total


@settings(max_examples=60, deadline=None)
@given(models(batch=1), st.sampled_from([0.0, 0.3, 1.0]))
def test_one_sweep_leaves_the_tempered_distribution_alone(potentials: LogPotentials, temperature: float) -> None:
    base = [
        torch.randn(1, len(group.variables), group.states, dtype=torch.float64, generator=generator(1))
        for group in potentials.graph.variable_groups
    ]
    tempered = LogPotentials(
        potentials.graph, [temperature * table for table in potentials.tables], [(1 - temperature) * b for b in base]
    )
    truth = enumerate_model(tempered)
    probabilities = truth.log_probabilities[:, 0].exp()
    matrix = sweep_matrix(GibbsSampler(potentials, base), truth.assignments, temperature)
    torch.testing.assert_close(matrix.sum(1), torch.ones_like(probabilities))
    torch.testing.assert_close(probabilities @ matrix, probabilities, rtol=1e-9, atol=1e-12)
    rates = torch.linalg.matrix_power(matrix, 400)[0]
    torch.testing.assert_close(rates, probabilities, rtol=1e-4, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(models(batch=3, zeros=True))
def test_conditionals_are_those_of_enumeration(potentials: LogPotentials) -> None:
    truth = enumerate_model(potentials)
    possible = truth.log_probabilities > -math.inf
    states = truth.assignments.unsqueeze(1).expand(-1, potentials.batch_size, -1)
    scores = GibbsSampler(potentials).score(states)
    torch.testing.assert_close(scores, truth.log_probabilities + truth.log_z)
    for block in colour_blocks(potentials.graph):
        logits = Conditionals(block, potentials).logits(states.permute(2, 0, 1))
        for position, variable in enumerate(block.variables.tolist()):
            others = [v for v in range(potentials.graph.num_variables) if v != variable]
            conditional = torch.softmax(logits[position], -1)
            for row, assignment in enumerate(truth.assignments):
                same = (truth.assignments[:, others] == assignment[others]).all(1)
                expected = torch.softmax(truth.log_probabilities[same], 0).T
                members = possible[row]
                torch.testing.assert_close(conditional[row][members], expected[members])


def mixed_model(batch: int = 1, dtype: torch.dtype = torch.float32) -> LogPotentials:
    scopes = [(), (0,), (1,), (0, 1), (1, 2), (2, 3), (3, 4, 0), (4, 2)]
    return LogPotentials.random(
        FactorGraph([2, 3, 2, 4, 1], scopes), batch_size=batch, generator=generator(3), dtype=dtype
    )


def test_frequencies_pass_a_chi_square_test() -> None:
    potentials = mixed_model()
    sampler, random = GibbsSampler(potentials), generator(5)
    states = sampler.sweep(sampler.start(20_000, generator=random), 30, generator=random)
    truth = enumerate_model(potentials)
    strides = torch.tensor([24, 8, 4, 1, 1])
    seen = torch.bincount((states[:, 0] * strides).sum(-1), minlength=48).double()
    expected = 20_000 * truth.log_probabilities[:, 0].exp()
    statistic = float(((seen - expected) ** 2 / expected).sum())
    # 47 degrees of freedom: beyond 99 with probability 1e-5
    assert statistic < 99


def test_batch_members_have_their_own_model_and_evidence() -> None:
    potentials = mixed_model(batch=3).clamp({0: [0, 1, -1]})
    sampler, random = GibbsSampler(potentials), generator(6)
    states = sampler.sweep(sampler.start(4000, generator=random), 20, generator=random)
    assert states[:, 0, 0].unique().tolist() == [0]
    assert states[:, 1, 0].unique().tolist() == [1]
    beliefs, after = sampler.beliefs(states, 20, generator=random)
    assert after.shape == states.shape
    truth = enumerate_model(potentials)
    for variable in range(5):
        torch.testing.assert_close(
            beliefs.node_marginal(variable).double(), truth.marginal((variable,)), atol=0.01, rtol=0
        )
    for factor, scope in enumerate(potentials.graph.scopes()):
        torch.testing.assert_close(beliefs.factor_marginal(factor).double(), truth.marginal(scope), atol=0.01, rtol=0)
    assert float(beliefs.inconsistency().max()) < 1e-5


@pytest.mark.parametrize("shared", ["factors", "batch", "neither"])
def test_sharing_changes_nothing(shared: str) -> None:
    graph = FactorGraph.chain(6, states=3, order=2)
    tables = [torch.randn(1, 1, *group.table_shape, generator=generator(1)) for group in graph.factor_groups]
    members = [len(group) for group in graph.factor_groups]
    expanded = [table.expand(2, count, *table.shape[2:]).clone() for table, count in zip(tables, members, strict=True)]
    if shared == "neither":
        expanded = [table * torch.randn(table.shape[:2] + (1,) * (table.dim() - 2)) for table in expanded]
        tables = expanded
    compact = LogPotentials(graph, tables)
    full = LogPotentials(graph, expanded)
    if shared == "batch":
        compact = LogPotentials(graph, [table[:1] for table in expanded])
    evidence = torch.tensor([[-1, -1, 1, -1, -1, -1], [-1, 2, -1, -1, -1, -1]])
    compact, full = compact.clamp(evidence), full.clamp(evidence)
    start = GibbsSampler(full).start(50, generator=generator(2))
    one = GibbsSampler(compact).sweep(start, 5, generator=generator(3))
    two = GibbsSampler(full).sweep(start, 5, generator=generator(3))
    assert torch.equal(one, two)
    assert torch.equal(one[:, 0, 2], torch.ones(50, dtype=torch.long))
    torch.testing.assert_close(GibbsSampler(compact).score(one), GibbsSampler(full).score(one))


def test_sweeping_in_parts_is_sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    potentials = mixed_model()
    sampler, random = GibbsSampler(potentials), generator(7)
    monkeypatch.setattr("bethenet.inference.sampling.CACHED_GATHER", 1000)
    start = sampler.start(3000, generator=random)
    before = start.clone()
    states = sampler.sweep(start, 20, generator=random)
    assert torch.equal(start, before)
    truth = enumerate_model(potentials)
    frequencies = torch.bincount(states[:, 0, 3], minlength=4) / 3000
    torch.testing.assert_close(frequencies.double(), truth.marginal((3,))[0], atol=0.04, rtol=0)


def test_one_generator_one_result() -> None:
    sampler = GibbsSampler(mixed_model())
    runs = [sampler.sweep(sampler.start(9, generator=g), 3, generator=g) for g in (generator(1), generator(1))]
    assert torch.equal(*runs)


def test_impossible_states_are_never_visited() -> None:
    # a proper colouring of a cycle in four colours: a random start is nearly never possible
    graph = FactorGraph([4] * 12, [(i, (i + 1) % 12) for i in range(12)])
    different = torch.zeros(4, 4).fill_diagonal_(-math.inf)
    potentials = LogPotentials(graph, [different.expand(1, 1, 4, 4)]).clamp({0: 1})
    sampler, random = GibbsSampler(potentials), generator(8)
    states = sampler.start(200, generator=random)
    for _ in range(10):
        assert bool((sampler.score(states) == 0).all())
        states = sampler.sweep(states, generator=random)
    assert states[:, 0, 0].unique().tolist() == [1]
    beliefs, _ = sampler.beliefs(states, 200, generator=random)
    assert abs(float(beliefs.node_marginal(6)[0, 1]) - float(exact_cycle_marginal())) < 0.02


def exact_cycle_marginal() -> Tensor:
    step = torch.ones(4, 4, dtype=torch.float64).fill_diagonal_(0)
    walk = torch.linalg.matrix_power(step, 6)[1] ** 2
    return walk[1] / walk.sum()


def test_impossible_evidence_and_models_are_named() -> None:
    potentials = LogPotentials.from_factors([2, 2], [((0, 1), [[0.0, -math.inf], [-math.inf, -math.inf]])])
    with pytest.raises(ImpossibleEvidenceError):
        GibbsSampler(potentials.clamp({0: torch.tensor([0.0, 0.0])})).start(3)
    with pytest.raises(ValueError, match="no possible state"):
        GibbsSampler(potentials.clamp({0: 1})).start(3)
    # whoever starts at impossible states nevertheless gets states, never NaN or an index out of range
    wild = GibbsSampler(potentials.clamp({0: 1})).sweep(torch.ones(5, 1, 2, dtype=torch.long), 3)
    assert int(wild.max()) <= 1


def test_wrong_states_and_bases_are_named() -> None:
    sampler = GibbsSampler(mixed_model())
    with pytest.raises(ValueError, match=r"\[chains, 1, 5\]"):
        sampler.sweep(torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="float32"):
        sampler.sweep(torch.zeros(3, 1, 5))
    with pytest.raises(ValueError, match="node term"):
        GibbsSampler(mixed_model(), [torch.zeros(1, 1, 2)])
    with pytest.raises(ValueError, match="batch sizes differ"):
        GibbsSampler(mixed_model(batch=2), [torch.zeros(3, 1, g.states) for g in mixed_model().graph.variable_groups])
    evidence = mixed_model().clamp({0: [0, 1]})
    with pytest.raises(ValueError, match="batch of 1 or 2, got 3"):
        GibbsSampler(evidence, [torch.zeros(3, 1, group.states) for group in evidence.graph.variable_groups])
    with pytest.raises(ValueError, match="at least one sweep"):
        sampler.beliefs(torch.zeros(3, 1, 5, dtype=torch.long), 0)


@pytest.mark.parametrize(
    "graph",
    [
        FactorGraph([], []),
        FactorGraph([], [()]),
        FactorGraph([3], []),
        FactorGraph([1], [(0,)]),
        FactorGraph([2, 3], [(0,), (1,)]),
        FactorGraph([2] * 4, [(0, 1), (2, 3)]),
    ],
)
def test_edge_cases(graph: FactorGraph) -> None:
    potentials = LogPotentials.random(graph, dtype=torch.float64, generator=generator())
    sampler, random = GibbsSampler(potentials), generator(1)
    states = sampler.sweep(sampler.start(4000, generator=random), 5, generator=random)
    assert states.shape == (4000, 1, graph.num_variables)
    assert sampler.sweep(states[:0]).shape == (0, 1, graph.num_variables)
    for variable in range(graph.num_variables):
        truth = enumerate_model(potentials)
        frequencies = torch.bincount(states[:, 0, variable], minlength=int(graph.state_counts[variable])) / 4000
        torch.testing.assert_close(frequencies.double(), truth.marginal((variable,))[0], atol=0.04, rtol=0)
    torch.testing.assert_close(sampler.base_log_z().double(), graph.state_counts.double().log().sum().reshape(1))


def test_draws_follow_their_probabilities_and_never_hit_the_impossible() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf], [2.0, -math.inf, -math.inf, -math.inf]])
    states = draw(logits.expand(20_000, 2, 4), generator())
    frequencies = torch.bincount(states[:, 0], minlength=4) / 20_000
    torch.testing.assert_close(frequencies, torch.softmax(logits[0], -1), atol=0.015, rtol=0)
    assert frequencies[0] == frequencies[3] == 0
    assert states[:, 1].unique().tolist() == [0]
    binary = draw(torch.tensor([[0.0, 800.0], [-math.inf, 0.0], [0.0, -math.inf]]).expand(1000, 3, 2), generator())
    assert binary.float().mean(0).tolist() == [1.0, 1.0, 0.0]


def test_softened_models_keep_the_score_of_possible_states() -> None:
    potentials = LogPotentials.from_factors([2, 2], [((0, 1), [[0.5, -math.inf], [-3.0, 0.0]])])
    assert soften(potentials).table(0).tolist() == [[[0.5, -13.0], [-3.0, 0.0]]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    potentials = mixed_model(batch=2).to("cuda").clamp({0: [0, -1]})
    random = torch.Generator("cuda").manual_seed(1)
    sampler = GibbsSampler(potentials)
    states = sampler.sweep(sampler.start(20_000, generator=random), 30, generator=random)
    beliefs, _ = sampler.beliefs(states, 5, generator=random)
    truth = enumerate_model(potentials.to("cpu"))
    for factor, scope in enumerate(potentials.graph.scopes()):
        found = beliefs.factor_marginal(factor).cpu().double()
        torch.testing.assert_close(found, truth.marginal(scope), atol=0.01, rtol=0)
