"""The fast form of a factor's messages against their definition, in and beyond the range of the exponential domain."""

from __future__ import annotations

import math

import pytest
import torch

from bethenet.inference.bp.kernels import CouplingKernel, TableKernel, exponential_range, pack, unpack

LOG_ODDS = [-math.inf, -200.0, -60.0, -9.0, -1.0, -1e-3, 0.0, 0.3, 7.0, 55.0, 180.0, math.inf]


def defined(table: torch.Tensor, cavity: torch.Tensor, mode: str) -> torch.Tensor:
    """Log-odds of ``sum_s table[s, t] m(s)`` in float64, from the definition."""
    total = table.double().unsqueeze(0) + unpack(cavity.double()).flatten(0, 1).unsqueeze(-1)
    return pack(torch.logsumexp(total, 1) if mode == "sum" else total.amax(1)).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("coupling", [-700.0, -100.0, -29.0, -2.0, -1e-4, 0.0, 0.5, 29.9, 31.0, 249.0, 600.0])
def test_couplings(coupling: float, mode: str, dtype: torch.dtype) -> None:
    strength = torch.full((1, 1, 1), coupling, dtype=dtype)
    kernel = CouplingKernel.build(strength, mode)
    assert kernel.exponential == (mode == "sum" and abs(coupling) <= exponential_range(dtype) / 2)
    cavity = torch.tensor(LOG_ODDS, dtype=dtype).reshape(-1, 1, 1)
    found = kernel.message([None, cavity], 0, None).flatten()
    expected = defined(kernel.log_table[0, 0], cavity, mode)
    close = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("coupling", [300.0, -300.0, 0.0])
def test_gradients_of_strong_couplings(coupling: float) -> None:
    """Also where log-odds and coupling are of one size, and where there is no coupling at all."""
    cavities = torch.tensor([-400.0, -300.0, -299.5, 0.4, 300.0, 301.0], dtype=torch.float64)

    def message(cavity: torch.Tensor, coupling: torch.Tensor) -> torch.Tensor:
        return CouplingKernel(coupling, coupling, False, "sum").couple(cavity, coupling)

    inputs = (cavities.requires_grad_(), torch.full_like(cavities, coupling).detach().requires_grad_())
    assert torch.autograd.gradcheck(message, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("scale", [1.0, 8.0, 80.0, 800.0])
@pytest.mark.parametrize("shape", [(2, 3), (3, 3), (2, 3, 2)])
def test_tables(shape: tuple[int, ...], scale: float, mode: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    table = scale * torch.randn(4, 1, *shape, generator=generator, dtype=dtype)
    widths = tuple(1 if states == 2 else states for states in shape)
    kernel = TableKernel.build(table, widths, mode)
    assert (kernel.table is not None) == (
        mode == "sum" and float(table.amax() - table.amin()) <= exponential_range(dtype)
    )
    incoming = [scale * torch.randn(4, 5, width, generator=generator, dtype=dtype) for width in widths]
    for axis in range(len(shape)):
        parts = [None if other == axis else part for other, part in enumerate(incoming)]
        found = kernel.message(parts, axis, None)
        total = table.double()
        for other, part in enumerate(parts):
            if part is not None:
                full = unpack(part) if widths[other] < shape[other] else part
                view = [1] * len(shape)
                view[other] = shape[other]
                total = total + full.double().reshape(4, 5, *view)
        axes = [2 + other for other in range(len(shape)) if other != axis]
        expected = torch.logsumexp(total, axes) if mode == "sum" else total.amax(axes)
        if shape[axis] == 2:
            expected = pack(expected)
        else:
            found, expected = found.double().log_softmax(-1), expected.log_softmax(-1)
        close = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found.double(), expected, atol=close * max(1.0, scale), rtol=close)


def test_log_odds_of_certain_states() -> None:
    odds = torch.tensor([[-math.inf], [0.0], [2.0], [math.inf]])
    message = unpack(odds)
    assert message[0].tolist() == [0.0, -math.inf]
    assert message[3].tolist() == [-math.inf, 0.0]
    assert torch.equal(pack(message), odds)
