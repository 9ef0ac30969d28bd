"""What holds of every engine, over one table of models: each engine by its name and options, as a user makes it."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from bethenet import FactorGraph, LogPotentials
from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError
from bethenet.inference.registry import ENGINES, make_engine
from bethenet.result import Status
from oracle import enumerate_model


@dataclass(frozen=True)
class Case:
    """An engine and what it promises."""

    method: str
    options: dict = field(default_factory=dict)
    exact_on_trees: bool = True
    lower_bound: bool = False
    upper_bound: bool = False
    consistency: float = 1e-6
    """Regions disagree by no more than the residual times 10, or this."""

    def run(self, potentials, seed=0, **arguments):
        engine = make_engine(self.method, self.options)
        return engine.run(potentials, generator=torch.Generator().manual_seed(seed), **arguments)


TIGHT = {"tolerance": 1e-9, "max_iterations": 3000}
CASES = {
    "exact": Case("exact", lower_bound=True, upper_bound=True),
    "bp, flooding": Case("bp", TIGHT),
    "bp, sweep": Case("bp", TIGHT | {"schedule": "sweep"}),
    "bp, residual": Case("bp", TIGHT | {"schedule": "residual"}),
    "trw": Case("trw", TIGHT, upper_bound=True),
    "gbp": Case("gbp", TIGHT),
    "mean-field": Case("mean-field", TIGHT, exact_on_trees=False, lower_bound=True),
    "descent": Case("descent", {"tolerance": 1e-7, "max_iterations": 3000}),
}


def tables(state_counts, scopes, *, seed=0, scale=1.0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    graph = FactorGraph(state_counts, scopes)
    return LogPotentials.random(graph, scale, batch_size=batch, dtype=torch.float64, generator=generator)


def on_graph(graph, *, seed=0, scale=1.0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return LogPotentials.random(graph, scale, batch_size=batch, dtype=torch.float64, generator=generator)


def forbidding(potentials, *cells):
    """The model with single entries of factors impossible: pairs of a factor's number and an index of its table."""
    changed = [potentials.table(factor)[0].clone() for factor in range(potentials.graph.num_factors)]
    for factor, cell in cells:
        changed[factor][cell] = -math.inf
    return LogPotentials.from_tables(potentials.graph, changed, dtype=potentials.dtype)


TREES = {
    "one variable": lambda: tables([3], [(0,)]),
    "chain": lambda: on_graph(FactorGraph.chain(6, 3)),
    "star": lambda: tables([2] * 5, [(0, i) for i in range(1, 5)] + [(0,)]),
    "as many variables in a factor as can be": lambda: tables([1] * 47 + [2, 2, 3], [range(50), (49,)]),
    "mixed states": lambda: tables([2, 3, 4, 2], [(0, 1), (2, 1), (1, 3), (2,)]),
    "arity three, one, nothing": lambda: tables([2, 3, 2, 2], [(0, 1, 2), (2, 3), (), (1,), (3,)]),
    "one-state variables": lambda: tables([1, 2, 1, 3], [(0, 1), (1, 3), (2,), (0,), (3,)]),
    "unconnected variables": lambda: tables([2, 3, 2, 2], [(0,), (2, 3)]),
    "no factors": lambda: tables([2, 3, 1], []),
    "empty": lambda: tables([], []),
    "a constant alone": lambda: tables([], [(), ()]),
    "impossible entries": lambda: forbidding(
        tables([2, 3, 2], [(0, 1), (1, 2), (1,)]), (0, (0, 1)), (0, (1, 2)), (1, (0, 0)), (2, (2,))
    ),
    "evidence": lambda: on_graph(FactorGraph.chain(5, 3)).clamp({1: 2, 4: 0}),
    "soft evidence": lambda: on_graph(FactorGraph.chain(4)).clamp({0: [0.2, 0.8], 2: [1.0, 0.0]}),
    "everything observed": lambda: on_graph(FactorGraph.chain(3)).clamp({0: 1, 1: 0, 2: 1}),
    "shared table": lambda: shared(FactorGraph.chain(5, 3)),
}
LOOPY = {
    "grid": lambda: on_graph(FactorGraph.grid(3, 3), scale=0.7),
    "complete": lambda: on_graph(FactorGraph.complete(5), scale=0.4),
    "three states": lambda: on_graph(FactorGraph.grid(2, 3, 3), scale=0.7),
    "loop of mixed states": lambda: tables([2, 3, 4, 2], [(0, 1), (1, 2), (2, 3), (3, 0), (2,)], scale=0.7),
    "loop of large factors": lambda: tables([2, 3, 2, 2], [(0, 1, 2), (1, 2, 3), (), (3,)], scale=0.7),
    "two factors over one scope": lambda: tables([2, 2, 2], [(0, 1), (1, 0), (1, 2)], scale=0.7),
    "impossible entries in loops": lambda: forbidding(on_graph(FactorGraph.grid(2, 3), scale=0.5), (6, (0, 1))),
    "grid, observed": lambda: on_graph(FactorGraph.grid(3, 3), scale=0.7).clamp({4: 1, 0: 0}),
    "shared table in loops": lambda: shared(FactorGraph.grid(3, 3), scale=0.5),
    "strong": lambda: on_graph(FactorGraph.grid(4, 4), scale=3.0),
}
ALL = TREES | LOOPY


def shared(graph, *, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    made = [
        scale * torch.randn(1, 1, *group.table_shape, dtype=torch.float64, generator=generator)
        for group in graph.factor_groups
    ]
    return LogPotentials(graph, made)


engines = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def over(models):
    return pytest.mark.parametrize("potentials", [make() for make in models.values()], ids=models.keys())


def some(*names):
    return {name: ALL[name] for name in names}


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def assert_same_beliefs(found: Beliefs, expected: Beliefs, tolerance=1e-6):
    close(found.node_marginals.double(), expected.node_marginals.double(), tolerance)
    for one, other in zip(found.factor_marginals, expected.factor_marginals, strict=True):
        close(one.double(), other.double(), tolerance)


def test_every_method_has_a_case():
    assert {case.method for case in CASES.values()} == set(ENGINES) - {"network"}


# --- the truth ----------------------------------------------------------------------------------------------------


@engines
@over(TREES)
def test_trees(case, potentials):
    """Tree reweighting has all weights 1 here, and Kikuchi's largest regions are no larger than the factors."""
    if case.method == "trw":
        for weights in make_engine("trw", {}).weights(potentials):
            close(weights, torch.ones_like(weights))
    if case.method == "gbp":
        largest = max((group.arity for group in potentials.graph.factor_groups), default=1)
        regions = make_engine("gbp", {}).regions(potentials)
        assert max((len(group.table_shape) for group in regions.groups), default=1) <= max(largest, 1)
    result, truth = case.run(potentials), enumerate_model(potentials)
    assert result.status is Status.CONVERGED
    if not case.exact_on_trees:
        return
    close(result.log_z, truth.log_z)
    for variable in range(potentials.graph.num_variables):
        close(result.beliefs.node_marginal(variable), truth.marginal((variable,)))
    for factor, scope in enumerate(potentials.graph.scopes()):
        close(result.beliefs.factor_marginal(factor), truth.marginal(scope))


@engines
@over(LOOPY)
def test_loops(case, potentials):
    """Bounds are on their side; weakly coupled marginals are near the truth wherever variables are not independent."""
    result, truth = case.run(potentials), enumerate_model(potentials)
    if case.lower_bound:
        assert bool((result.log_z <= truth.log_z + 1e-9).all())
    if case.upper_bound:
        assert bool((result.log_z >= truth.log_z - 1e-9).all())
    if potentials.graph.num_variables == 16:
        return
    assert result.status is Status.CONVERGED
    if case.method == "mean-field":
        return
    worst = max(
        float((result.beliefs.node_marginal(v) - truth.marginal((v,))).abs().max())
        for v in range(potentials.graph.num_variables)
    )
    assert worst < (1e-9 if case.method == "exact" else 0.25)


@engines
@over(ALL)
def test_beliefs_are_distributions_that_agree(case, potentials):
    result = case.run(potentials)
    assert bool(torch.isfinite(result.log_z).all())
    tolerance = torch.clamp(10 * result.residual, min=case.consistency)
    assert bool((result.beliefs.inconsistency() <= tolerance).all())
    regions = result.beliefs.regions.groups
    for table, group in zip(result.beliefs.log_tables, regions, strict=True):
        probabilities = table.exp()
        assert bool(torch.isfinite(probabilities).all())
        total = probabilities.flatten(2).sum(-1) if group.table_shape else probabilities
        close(total, torch.ones_like(total))
    assert bool((result.beliefs.node_marginals <= 1 + 1e-9).all())


# --- status and residual ------------------------------------------------------------------------------------------


@engines
@over(LOOPY)
def test_status_says_what_the_residual_does(case, potentials):
    """However early it is stopped."""
    iterations = {} if case.method == "exact" else {"max_iterations": 3}
    for options in ({}, iterations):
        engine = make_engine(case.method, case.options | options)
        result = engine.run(potentials, generator=torch.Generator().manual_seed(0))
        for status, residual in zip(result.member_status, result.residual.tolist(), strict=True):
            within = residual <= getattr(engine, "tolerance", 0)
            assert (status is Status.CONVERGED) == within, (status, residual)
        assert bool((result.iterations <= getattr(engine, "max_iterations", 1)).all())


@engines
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
def test_nothing_that_is_not_finite_has_converged(case, poison):
    """NaN and +inf are no log-potentials; whoever lets them in all the same gets no result that looks like one."""
    graph = FactorGraph.grid(2, 2)
    short = Case(case.method, case.options | ({"max_iterations": 200} if case.options else {}))
    good = on_graph(graph)
    bad = LogPotentials(graph, [good.tables[0], good.tables[1].index_fill(1, torch.tensor([0]), poison)])
    try:
        result = short.run(LogPotentials.stack([good, bad, good]))
    except ValueError:
        return
    finite = torch.stack([torch.isfinite(table.exp()).flatten(1).all(1) for table in result.beliefs.log_tables])
    finite = finite.all(0) & torch.isfinite(result.log_z)
    for status, fine in zip(result.member_status, finite.tolist(), strict=True):
        assert fine or status is not Status.CONVERGED
    assert finite.tolist()[::2] == [True, True]


# --- batches, precision, gradients, warm starts -------------------------------------------------------------------


@engines
@pytest.mark.parametrize(
    "graph", [FactorGraph.grid(3, 3), FactorGraph([2, 3, 2], [(0, 1), (1, 2), (2, 0), ()])], ids=["grid", "mixed"]
)
def test_a_batch_is_its_members(case, graph):
    potentials = on_graph(graph, scale=0.7, batch=3).clamp({0: [1, -1, 0]})
    # random starts differ in a batch: the starts of these cases are as good as equal
    together = case.run(potentials)
    for member in range(3):
        alone = case.run(potentials[member])
        assert alone.beliefs.batch_size == 1
        close(together.log_z[member : member + 1], alone.log_z)
        assert_same_beliefs(together.beliefs[member : member + 1], alone.beliefs, 1e-5)


@engines
@over({name: model for name, model in ALL.items() if name != "strong"})
def test_single_precision(case, potentials):
    options = case.options | ({"tolerance": 1e-5} if case.options else {})
    single = Case(case.method, options).run(potentials.to(dtype=torch.float32))
    double = case.run(potentials)
    assert single.log_z.dtype == torch.float32
    assert all(table.dtype == torch.float32 for table in single.beliefs.log_tables)
    close(single.log_z.double(), double.log_z.double(), 1e-4)
    assert_same_beliefs(single.beliefs, double.beliefs, 2e-3)


@engines
@over(
    {name: LOOPY[name] for name in ("grid", "loop of mixed states", "loop of large factors", "shared table in loops")}
)
def test_the_gradient_of_log_z_is_the_beliefs(case, potentials):
    leaves = [table.clone().requires_grad_() for table in potentials.tables]
    result = case.run(LogPotentials(potentials.graph, leaves))
    gradients = torch.autograd.grad(result.log_z.sum(), leaves)
    for gradient, leaf, marginals in zip(gradients, leaves, result.beliefs.factor_marginals, strict=True):
        expected = marginals.sum(1, keepdim=True) if leaf.shape[1] == 1 < marginals.shape[1] else marginals
        close(gradient, expected)
        assert not marginals.requires_grad


@engines
@over(some("chain", "grid", "three states", "loop of large factors", "grid, observed"))
def test_a_warm_start_is_at_once_where_it_was(case, potentials):
    first = case.run(potentials)
    again = case.run(potentials, seed=1, state=first.state)
    assert again.status is Status.CONVERGED
    # generalised belief propagation takes no messages over where states are impossible
    if not (case.method == "gbp" and potentials.has_zeros):
        assert int(again.iterations.max()) <= 2
    close(again.log_z, first.log_z)
    assert_same_beliefs(again.beliefs, first.beliefs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@engines
@over(some("mixed states", "arity three, one, nothing", "empty", "evidence", "impossible entries", "grid", "complete"))
def test_a_gpu_finds_the_same(case, potentials):
    there, here = case.run(potentials.to("cuda")), case.run(potentials)
    assert there.status is here.status
    assert there.log_z.device.type == "cuda"
    close(there.log_z.cpu(), here.log_z)
    close(there.beliefs.node_marginals.cpu(), here.beliefs.node_marginals, 1e-5)


@engines
def test_a_state_of_another_graph_or_batch_is_refused(case):
    if case.method == "exact":
        return
    large, small = on_graph(FactorGraph.grid(3, 3), batch=2), on_graph(FactorGraph.grid(2, 2))
    state = case.run(large).state
    for other in (small, on_graph(FactorGraph.grid(3, 3), batch=3)):
        with pytest.raises(ValueError, match="state"):
            case.run(other, state=state)


@engines
def test_impossible_models_are_never_a_result(case):
    """The named error, or a log Z of minus infinity; both where one member of a batch only is impossible."""
    graph = FactorGraph([2, 2], [(0, 1)])
    possible = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    impossible = torch.tensor([[[[-math.inf, 0.0], [-math.inf, 0.0]]]], dtype=torch.float64)
    both = LogPotentials(graph, [torch.cat([possible, impossible])]).clamp({1: 0})
    for potentials, member in ((both, 1), (both[1], 0)):
        try:
            result = case.run(potentials)
        except ImpossibleEvidenceError:
            continue
        assert float(result.log_z[member]) == -math.inf
