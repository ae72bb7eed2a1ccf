"""Degenerate signals, numbers at the ends of the range, precisions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.losses import reference
from torchext.losses import FreDFLoss, fredf_loss

COMPONENTS = ["complex", "mag", "phase", "mag-phase", "complex-phase", "complex-mag-phase"]
BASES = ["rfft", "fft", "rfft_variables", "rfft2", "dct", "legendre", "chebyshev", "hermite", "laguerre", "haar"]
METHODS = ["fused", "fft", "matmul"]


def value_and_gradient(input: Tensor, target: Tensor, *rest: Any, **choice: Any) -> tuple[Tensor, Tensor]:
    input = input.detach().clone().requires_grad_()
    loss = fredf_loss(input, target, *rest, **choice)
    (gradient,) = torch.autograd.grad(loss.sum(), input)
    return loss.detach(), gradient


@pytest.mark.parametrize("horizon", [1, 2, 3, 95, 97])
@pytest.mark.parametrize("basis", BASES)
def test_odd_prime_and_tiny_horizons(basis: str, horizon: int) -> None:
    input, target = torch.randn(2, 3, horizon, 2)[0], torch.randn(3, horizon, 2)
    loss, gradient = value_and_gradient(input[:3], target, basis=basis, method="fused")
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [0.0, 1e-42, 1e-30, 1e-12])
def test_error_at_and_near_zero_has_a_finite_gradient(error: float, method: str, dtype: torch.dtype) -> None:
    # PyTorch issue 96543: |z| of a subnormal z has an infinite gradient. A constant error leaves one bin, of phase 0.
    target = torch.randn(2, 12, 3, dtype=dtype) if error == 0 else torch.zeros(2, 12, 3, dtype=dtype)
    for kind in (torch.ones_like(target), torch.randn_like(target)):
        for alpha in (0.8, 1.0):
            loss, gradient = value_and_gradient(target + error * kind, target, alpha=alpha, method=method)
            assert torch.isfinite(loss)
            assert torch.isfinite(gradient).all()
            if error == 0:
                assert loss == 0
                assert (gradient == 0).all()
            else:
                # Of |sum_t e|, the one bin of the constant error: 1 for each t. In general at most K bins add up.
                assert gradient.abs().max() * target.numel() <= 12 * 1.01


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [-36, -25, -12, 12, 18, 25, 30])
def test_values_keep_their_scale_in_float32(exponent: int, method: str) -> None:
    # No square of a coefficient may leave the range.
    input, target = torch.randn(3, 12, 2), torch.randn(3, 12, 2)
    expected = reference.fredf(
        (input * 10.0**exponent).double().numpy(),
        (target * 10.0**exponent).double().numpy(),
        reference.fourier("rfft"),
        time_loss="mae",
    )
    loss, gradient = value_and_gradient(input * 10.0**exponent, target * 10.0**exponent, time_loss="mae", method=method)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    _, unscaled = value_and_gradient(input, target, time_loss="mae", method=method)
    torch.testing.assert_close(gradient, unscaled, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("method", ["fft", "matmul"])
def test_components_of_degenerate_signals_have_finite_gradients(method: str, component: str) -> None:
    x = torch.randn(2, 12, 3)
    zero, constant = torch.zeros_like(x), torch.full_like(x, 2.0)
    for input, target in ((x, x), (x, x.clone() + 1e-7), (zero, zero), (x, zero), (zero, x), (constant, -constant)):
        for scale in (1.0, 1e-42, 1e-20, 1e20):
            loss, gradient = value_and_gradient(input * scale, target * scale, component=component, method=method)
            assert torch.isfinite(gradient).all()
            if input is target:
                assert loss == 0
                assert (gradient == 0).all()


def test_a_target_of_zeros() -> None:
    # auraloss issues 25 and 63: nothing to be relative to.
    input = torch.randn(2, 12, 3, dtype=torch.float64)
    zero = torch.zeros_like(input)
    expected = 0.8 * np.abs(np.fft.rfft(input.numpy(), axis=1)).mean() + 0.2 * (input**2).mean().item()
    assert fredf_loss(input, zero).item() == pytest.approx(expected)
    assert fredf_loss(input, zero, alpha=0.0, time_loss="smape").item() == pytest.approx(200)
    assert fredf_loss(zero, zero, alpha=0.0, time_loss="smape").item() == 0


@pytest.mark.parametrize("method", ["fft", "matmul"])
@pytest.mark.parametrize("component", ["phase", "mag-phase"])
def test_phases_wrap(component: str, method: str) -> None:
    # PyTorch issue 46144. Phases of pi - 0.1 and -pi + 0.1 are 0.2 apart, not 2 pi - 0.2.
    t = torch.arange(12, dtype=torch.float64)
    a, b = (torch.cos(2 * torch.pi * 2 * t / 12 + phase)[None, :, None] for phase in (3.0416, -3.0416))
    expected = (2 * torch.pi - 2 * 3.0416) / 7 / (1 if component == "phase" else 2)
    loss, gradient = value_and_gradient(a, b, alpha=1.0, component=component, method=method)
    assert loss.item() == pytest.approx(expected)
    assert torch.isfinite(gradient).all()


def test_opposite_phases_are_pi_apart() -> None:
    x = torch.randn(1, 9, 1, dtype=torch.float64)
    loss, gradient = value_and_gradient(x, -x, alpha=1.0, component="phase")
    assert loss.item() == pytest.approx(np.pi)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["fft", "matmul"])
@pytest.mark.parametrize("component", ["phase", "complex-phase"])
def test_rounding_noise_has_no_phase(component: str, method: str, dtype: torch.dtype) -> None:
    # The angle of the other bins of a pure tone is noise: it must reach neither loss nor gradient.
    for horizon, cycles in ((12, 2), (48, 4), (97, 4), (720, 7), (720, 30)):
        t = torch.arange(horizon, dtype=dtype)
        tones = torch.stack([torch.cos(2 * torch.pi * cycles * t / horizon + f) for f in (0, 0.3, 1)], dim=-1)
        loss, gradient = value_and_gradient(2 * tones[None], tones[None], alpha=1.0, component=component, method=method)
        # Nothing for "phase", as the tones are in phase; of the difference, one bin's own angle.
        angles = 0 if component == "phase" else 1.3 / 3 / (horizon // 2 + 1)
        assert loss.item() == pytest.approx(angles, rel=1e-4, abs=1e-7)
        assert gradient.abs().max() < 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_nan_and_infinity_that_are_scored_come_out(component: str, reduction: str, bad: float) -> None:
    input, target = torch.randn(2, 12, 3), torch.randn(2, 12, 3)
    target[1, 4, 2] = bad
    for method in ("auto", "fft", "matmul"):
        for alpha in (0.5, 1.0):
            choice = {"component": component, "reduction": reduction, "alpha": alpha, "method": method}
            assert not torch.isfinite(fredf_loss(input, target, **choice)).all()
            assert not torch.isfinite(fredf_loss(target, input, **choice)).all()


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("p", [1, 1.5, 2])
def test_nan_comes_out_of_the_fused_pass_in_value_and_gradient(p: float, basis: str) -> None:
    input, target = torch.randn(2, 12, 3), torch.randn(2, 12, 3)
    target[1, 4, 2] = torch.nan
    for time_loss in ("mse", "mae"):
        for alpha in (0.5, 1.0):
            loss, gradient = value_and_gradient(
                input, target, basis=basis, p=p, alpha=alpha, time_loss=time_loss, method="fused"
            )
            assert torch.isnan(loss)
            assert torch.isnan(gradient[1, 4, 2])


def test_an_overflow_comes_out() -> None:
    input = torch.full((2, 12, 3), 1e30)
    assert not fredf_loss(input, -input).isfinite()  # 1e60 in the squared error
    assert not fredf_loss(input * 1e8, -input * 1e8, time_loss="mae").isfinite()


# ---- precisions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [96, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, horizon: int) -> None:
    # Time-Series-Library issue 761: 192 is no power of two, which half-precision FFTs want.
    input, target = torch.randn(4, horizon, 3).to(dtype), torch.randn(4, horizon, 3).to(dtype)
    for basis in ("rfft", "dct", "haar"):
        loss, gradient = value_and_gradient(input, target, basis=basis)
        exact, exact_gradient = value_and_gradient(input.float(), target.float(), basis=basis)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, exact)
        assert gradient.dtype == dtype
        assert torch.equal(gradient, exact_gradient.to(dtype))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_autocast(basis: str, masked: bool) -> None:
    model = torch.nn.Linear(8, 192)
    history, target = torch.randn(4, 3, 8), torch.randn(4, 3, 192)
    mask = torch.rand(4, 3, 192) > 0.2 if masked else None
    criterion = FreDFLoss(basis=basis, dim=-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forecast = model(history)
        assert forecast.dtype == torch.bfloat16
        loss = criterion(forecast, target, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, criterion(forecast.float(), target, mask), rtol=0, atol=0)
    loss.backward()
    assert torch.isfinite(model.weight.grad).all()


def test_double_stays_double() -> None:
    input, target = torch.randn(2, 12, 3), torch.randn(2, 12, 3, dtype=torch.float64)
    criterion = FreDFLoss(basis="dct")
    assert criterion(input, input).dtype == torch.float32
    for a, b in ((input.double(), target), (input, target), (target, input)):
        loss = criterion(a, b)
        assert loss.dtype == torch.float64
        difference = (a.double() - b.double()).numpy()
        expected = reference.fredf(difference, 0 * difference, reference.matrix(dct_rows(12)))
        assert loss.item() == pytest.approx(expected, rel=1e-12)


def dct_rows(horizon: int) -> np.ndarray[Any, Any]:
    k, t = np.arange(horizon)[:, None], np.arange(horizon)
    return 2 * np.cos(np.pi * k * (2 * t + 1) / (2 * horizon))


def test_float32_is_accurate_on_a_large_batch() -> None:
    input, target = torch.randn(16, 336, 40), torch.randn(16, 336, 40)
    for method in METHODS:
        loss, gradient = value_and_gradient(input, target, method=method)
        exact, exact_gradient = value_and_gradient(input.double(), target.double(), method="fft")
        assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-3, atol=1e-9)
