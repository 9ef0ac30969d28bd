import gc
import math
import weakref

import pytest
import torch

from bethenet import MemoryLimitError
from bethenet.models import chain_dp
from bethenet.models.chain_dp import choose_domain, log_z, messages, prefix_log_z
from bethenet.models.chain_memory import bytes_needed
from bethenet.models.chain_tables import ChainTables
from chains import path_scores, random_tables, random_unary

KINDS = ["pairwise", "full"]
SIZES = [(1, 3), (2, 3), (3, 2), (4, 2), (3, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("order", "states"), SIZES)
@pytest.mark.parametrize("domain", ["scaled", "log", "auto"])
def test_every_prefix_and_its_gradient_equal_enumeration(kind, order, states, domain):
    numbers, tables = random_tables(kind, order, states)
    unary = random_unary(3, 6, states)
    weights = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    truth = torch.stack([torch.logsumexp(path_scores(kind, numbers, unary[:, : t + 1])[1], 1) for t in range(6)], 1)
    expected = torch.autograd.grad((truth * weights).sum(), [unary, numbers])
    found = prefix_log_z(unary, tables, domain=domain)
    gradient = torch.autograd.grad((found * weights).sum(), [unary, numbers])
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    numbers, _ = random_tables(kind, 3, 2)
    build = ChainTables.pairwise if kind == "pairwise" else ChainTables.full
    unary = random_unary(2, 5, 2)
    assert torch.autograd.gradcheck(lambda u, w: prefix_log_z(u, build(w), domain="scaled"), (unary, numbers))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("domain", ["scaled", "log"])
def test_padding_changes_no_number(kind, domain):
    numbers, tables = random_tables(kind, 2, 3)
    lengths = torch.tensor([1, 4, 2, 7])
    unary = random_unary(4, 7, 3)
    padded = log_z(unary, tables, lengths, domain=domain)
    gradient = torch.autograd.grad(padded.sum(), [unary, numbers], retain_graph=True)
    alone, counts = [], torch.zeros_like(numbers)
    for row, length in enumerate(lengths.tolist()):
        part = unary[row : row + 1, :length].detach().requires_grad_()
        alone.append(log_z(part, tables, domain=domain))
        marginals, share = torch.autograd.grad(alone[-1].sum(), [part, numbers], retain_graph=True, allow_unused=True)
        counts += 0 if share is None else share
        torch.testing.assert_close(gradient[0][row, :length], marginals[0], atol=1e-14, rtol=0)
        assert (gradient[0][row, length:] == 0).all()
    torch.testing.assert_close(padded, torch.cat(alone), atol=1e-13, rtol=0)
    torch.testing.assert_close(gradient[1], counts, atol=1e-12, rtol=0)
    with torch.no_grad():
        other = torch.where(torch.arange(7).unsqueeze(1) < lengths.reshape(-1, 1, 1), unary, unary * 50 - 3)
    assert torch.equal(log_z(other, tables, lengths, domain=domain), padded)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_at_thirty_steps(kind):
    numbers, _ = random_tables(kind, 3, 12)
    build = ChainTables.pairwise if kind == "pairwise" else ChainTables.full
    unary = random_unary(4, 30, 12).detach() * 2 - 8
    exact = log_z(unary, build(numbers.detach()))
    single = build(numbers.detach().float())
    assert choose_domain(single, torch.float32) == ("scaled", torch.float32)
    assert (log_z(unary.float(), single) - exact).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [3.0, 12.0, 60.0, 400.0])
def test_tables_of_a_range_that_float32_cannot_hold(kind, scale):
    numbers, _ = random_tables(kind, 3, 3, scale=scale)
    build = ChainTables.pairwise if kind == "pairwise" else ChainTables.full
    unary = random_unary(3, 7, 3).detach() * scale
    truth = torch.logsumexp(path_scores(kind, numbers.detach(), unary)[1], 1)
    single, weak = numbers.detach().float().requires_grad_(), unary.float().requires_grad_()
    found = log_z(weak, build(single))
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-3)
    for gradient in torch.autograd.grad(found.sum(), [single, weak]):
        assert torch.isfinite(gradient).all()
        assert gradient.min() > -1e-4


def test_the_domain_follows_the_range():
    expected = [("scaled", torch.float32), ("scaled", torch.float64), ("log", torch.float32)]
    for scale, choice in zip([1.0, 20.0, 500.0], expected, strict=True):
        tables = ChainTables.pairwise(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)) * scale)
        assert choose_domain(tables, torch.float32) == choice


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_states_and_pairs(kind):
    numbers, _ = random_tables(kind, 2, 3)
    build = ChainTables.pairwise if kind == "pairwise" else ChainTables.full
    with torch.no_grad():
        numbers[..., 0, 1] = -math.inf
        numbers[..., 2] = numbers[..., 2] - 200
    unary = random_unary(2, 5, 3)
    with torch.no_grad():
        unary[0, 2, 1] = -math.inf
    truth = torch.logsumexp(path_scores(kind, numbers, unary)[1], 1)
    found = log_z(unary, build(numbers))
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=1e-12)
    marginals, counts = torch.autograd.grad(found.sum(), [unary, numbers])
    torch.testing.assert_close(marginals.sum(2), torch.ones(2, 5, dtype=torch.float64))
    assert marginals[0, 2, 1] == 0
    assert torch.isfinite(counts).all()
    assert (counts[..., 0, 1] == 0).all()


@pytest.mark.parametrize("domain", ["scaled", "log"])
def test_an_impossible_chain_is_minus_infinity_and_leaves_the_others_alone(domain):
    _, tables = random_tables("pairwise", 3, 2)
    unary = random_unary(2, 5, 2)
    alone = log_z(unary[1:], tables, domain=domain)
    with torch.no_grad():
        unary[0, 3] = -math.inf
    found = log_z(unary, tables, domain=domain)
    assert found[0] == -math.inf
    assert torch.equal(found[1:], alone)
    assert torch.isfinite(torch.autograd.grad(found[1], unary, retain_graph=True)[0]).all()
    assert (torch.autograd.grad(found[0], unary)[0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("domain", ["scaled", "log"])
def test_messages_are_the_weights_of_windows(kind, domain):
    numbers, tables = random_tables(kind, 2, 3)
    unary = random_unary(2, 4, 3).detach()
    paths, scores = path_scores(kind, numbers.detach(), unary)
    weights = torch.zeros(2, 9, dtype=torch.float64)
    weights.index_add_(1, paths[:, 2] * 3 + paths[:, 3], scores.exp())
    found = messages(unary, tables.detach(), domain)
    assert [message.shape[1] for message in found] == [3, 9, 9, 9]
    torch.testing.assert_close(found[-1] / found[-1].sum(1, keepdim=True), weights / weights.sum(1, keepdim=True))


def test_too_large_is_refused_with_the_bytes():
    tables = ChainTables.pairwise(torch.zeros(4, 64, 64))
    with pytest.raises(MemoryLimitError, match=r"bytes.*belief propagation") as refused:
        log_z(torch.zeros(2, 9, 64), tables, memory_limit=2**20)
    assert refused.value.bytes_needed > 4 * 2 * 64**4
    small = ChainTables.pairwise(torch.zeros(2, 8, 8))
    unary = torch.zeros(99, 4, 8, requires_grad=True)
    with pytest.raises(MemoryLimitError, match=r"in 99 chains .* at most 9 chains at a time"):
        log_z(unary, small, memory_limit=bytes_needed(9, 4, small, torch.float32, keep=True))
    with pytest.raises(MemoryLimitError, match="in a chain of 4 steps"):
        log_z(unary, small, memory_limit=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("domain", ["scaled", "log"])
def test_without_a_gradient_as_many_chains_are_taken_as_fit(kind, domain, monkeypatch):
    _, tables = random_tables(kind, 2, 3)
    tables = tables.detach()
    unary = random_unary(7, 4, 3).detach()
    sizes = []
    whole = prefix_log_z(unary, tables, domain=domain)
    inner = chain_dp._prefixes
    monkeypatch.setattr(chain_dp, "_prefixes", lambda part, *rest: sizes.append(len(part)) or inner(part, *rest))
    limit = bytes_needed(3, 4, tables, torch.float64, keep=False, log_domain=domain == "log")
    found = prefix_log_z(unary, tables, domain=domain, memory_limit=limit)
    assert sizes == [3, 3, 1]
    torch.testing.assert_close(found, whole, atol=1e-13, rtol=0)


def test_what_is_kept_for_the_gradient_goes_with_the_result():
    _, tables = random_tables("pairwise", 3, 3)
    gc.disable()
    try:
        found = prefix_log_z(random_unary(2, 5, 3), tables, domain="scaled")
        kept = weakref.ref(found.grad_fn.run)
        assert kept() is not None
        del found
        assert kept() is None
    finally:
        gc.enable()


def test_the_prediction_covers_what_is_kept():
    _numbers, tables = random_tables("pairwise", 3, 6)
    random_unary(5, 8, 6)
    kept = sum(5 * 6 ** min(step + 1, 3) for step in range(8)) * 8
    assert kept < bytes_needed(5, 8, tables, torch.float64, keep=True) < 3 * kept
    assert bytes_needed(5, 8, tables, torch.float64, keep=False) < kept


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ChainTables.pairwise(torch.zeros(5, 2, 2)), "order: expected 1 to 4, got 5"),
        (lambda: ChainTables.pairwise(torch.zeros(2, 3, 2)), "transitions: expected shape"),
        (lambda: ChainTables.full(torch.zeros(3, 3, 3)), "table: expected shape"),
        (lambda: log_z(torch.zeros(2, 0, 3), ChainTables.pairwise(torch.zeros(1, 3, 3))), "unary: expected shape"),
        (lambda: log_z(torch.zeros(2, 4, 2), ChainTables.pairwise(torch.zeros(1, 3, 3))), "unary: expected shape"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
