"""Log-domain arithmetic: impossible states have a value and a zero gradient, never NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet.numerics import log_normalize, log_sum_exp, negative_entropy_terms, safe_log, times_log

INFINITY = math.inf


def doubles(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4) | st.just(-INFINITY), min_size=1, max_size=6))
def test_log_sum_exp_is_torchs_with_a_gradient_everywhere(values):
    mine, theirs = doubles(values), doubles(values)
    result, expected = log_sum_exp(mine, 0), torch.logsumexp(theirs, 0)
    torch.testing.assert_close(result, expected)
    result.backward()
    if math.isfinite(result.item()):
        expected.backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    else:
        assert mine.grad.tolist() == [0.0] * len(values)


def test_log_sum_exp_over_several_axes_and_none():
    values = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(log_sum_exp(values, [0, 2]), torch.logsumexp(values, (0, 2)))
    torch.testing.assert_close(log_sum_exp(values, [-1, 1]), torch.logsumexp(values, (1, 2)))
    assert log_sum_exp(values, []) is values


def test_gradients_by_finite_differences():
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: log_sum_exp(v, 1), values)
    assert torch.autograd.gradgradcheck(lambda v: log_sum_exp(v, 1), values)
    assert torch.autograd.gradcheck(lambda v: log_normalize(v, [0, 1]), values)
    assert torch.autograd.gradcheck(negative_entropy_terms, values)
    positive = values.detach().exp().requires_grad_()
    assert torch.autograd.gradcheck(safe_log, positive)
    assert torch.autograd.gradcheck(times_log, (positive, values))


def test_log_normalize():
    values = doubles([[0.0, 1.0, -INFINITY], [-INFINITY] * 3, [800.0, 800.0, -800.0]])
    result = log_normalize(values, 1)
    assert result[0].exp().tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e), 0])
    assert result[1].tolist() == [-INFINITY] * 3
    assert result[2].exp().tolist() == pytest.approx([0.5, 0.5, 0])
    result.masked_fill(torch.isneginf(result), 0).sum().backward()
    assert torch.isfinite(values.grad).all()
    assert log_normalize(values, [0, 1]).exp().sum().item() == pytest.approx(1)
    assert torch.equal(log_normalize(values, []), torch.zeros_like(values))


def test_large_logarithms_are_normalized_as_precisely_as_small_ones():
    values = torch.tensor([1e15, 1e15], dtype=torch.float64)
    assert log_normalize(values, 0).tolist() == [-math.log(2)] * 2


def test_zero_times_minus_infinity_is_zero():
    weights, logarithms = doubles([0.0, 0.5, 0.0]), doubles([-INFINITY, -2.0, 3.0])
    result = times_log(weights, logarithms)
    assert result.tolist() == [0.0, -1.0, 0.0]
    result.sum().backward()
    assert logarithms.grad.tolist() == [0.0, 0.5, 0.0]
    assert torch.isfinite(weights.grad).all()


def test_entropy_terms_of_impossible_states_are_zero():
    values = doubles([-INFINITY, 0.0, -1.0])
    result = negative_entropy_terms(values)
    assert result.tolist() == pytest.approx([0.0, 0.0, -math.exp(-1)])
    result.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_the_logarithm_of_zero():
    values = doubles([0.0, 1.0, 2.0])
    result = safe_log(values)
    assert result.tolist() == pytest.approx([-INFINITY, 0.0, math.log(2)])
    result[1:].sum().backward()
    assert values.grad.tolist() == [0.0, 1.0, 0.5]
