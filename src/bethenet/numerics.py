"""Arithmetic on log-probabilities in which impossible states (``-inf``) are ordinary values.

Plain expressions turn ``0 * -inf`` and ``-inf - -inf`` into NaN, in the value or in the gradient. The functions here
give such terms the value, and the zero gradient, that their limit has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NEGATIVE_INFINITY = -math.inf


def log_sum_exp(values: Tensor, dim: int | Sequence[int]) -> Tensor:
    """``log sum exp(values)`` over ``dim``: ``-inf`` with a zero gradient where every entry is ``-inf``.

    ``torch.logsumexp`` gives the same value there, but its gradient is NaN.
    """
    axes = [dim] if isinstance(dim, int) else list(dim)
    if not axes:
        return values
    maximum = values.detach().amax(axes, keepdim=True)
    offset = torch.where(torch.isfinite(maximum), maximum, torch.zeros_like(maximum))
    total = (values - offset).exp().sum(axes, keepdim=True)
    positive = total > 0
    logarithm = torch.where(positive, total, torch.ones_like(total)).log() + offset
    result = torch.where(positive, logarithm, torch.full_like(logarithm, NEGATIVE_INFINITY))
    return _squeeze(result, axes)


def log_normalize(values: Tensor, dim: int | Sequence[int]) -> Tensor:
    """Subtract ``log_sum_exp`` over ``dim``; a slice that is ``-inf`` throughout stays so.

    The maximum goes first: what is left sums to one as precisely as numbers of size one can, however large ``values``.
    """
    axes = [dim] if isinstance(dim, int) else list(dim)
    if not axes:
        return torch.zeros_like(values)
    maximum = values.detach().amax(axes, keepdim=True)
    centred = values - torch.where(torch.isfinite(maximum), maximum, torch.zeros_like(maximum))
    total = centred.exp().sum(axes, keepdim=True)
    usable = (total > 0) & torch.isfinite(total)
    return centred - torch.where(usable, total, torch.ones_like(total)).log()


def times_log(weights: Tensor, logarithms: Tensor) -> Tensor:
    """``weights * logarithms`` with ``0 * -inf = 0`` (value and gradient)."""
    safe = torch.where(weights > 0, logarithms, torch.zeros_like(logarithms))
    return weights * safe


def negative_entropy_terms(log_probabilities: Tensor) -> Tensor:
    """``p log p`` entry by entry from ``log p``, zero where ``p`` is zero."""
    finite = torch.where(log_probabilities == NEGATIVE_INFINITY, torch.zeros_like(log_probabilities), log_probabilities)
    return log_probabilities.exp() * finite


def safe_log(probabilities: Tensor) -> Tensor:
    """``log p``: ``-inf`` with a zero gradient at ``p = 0``."""
    positive = probabilities > 0
    logarithm = torch.where(positive, probabilities, torch.ones_like(probabilities)).log()
    return torch.where(positive, logarithm, torch.full_like(logarithm, NEGATIVE_INFINITY))


def _squeeze(values: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted((axis % values.dim() for axis in axes), reverse=True):
        values = values.squeeze(axis)
    return values
