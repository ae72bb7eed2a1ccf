"""The loss has the value of the authors' formula, for every choice, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from tests.losses import reference
from torchext.losses import FreDFLoss, fredf_loss

HORIZONS = [1, 2, 3, 8, 12, 95, 97]
FOURIER = ["rfft", "fft", "rfft_variables", "rfft2"]
COMPONENTS = ["complex", "mag", "phase", "mag-phase", "complex-phase", "complex-mag-phase"]
POLYNOMIALS = ["legendre", "chebyshev", "hermite", "laguerre"]
AXES = {"rfft": (1,), "fft": (1,), "rfft_variables": (2,), "rfft2": (1, 2)}


def signals(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def check(criterion: FreDFLoss, input: Tensor, target: Tensor, expected: float) -> None:
    assert criterion(input, target).item() == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("method", ["auto", "fused", "fft", "matmul"])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("basis", FOURIER)
def test_fourier_bases(basis: str, norm: str, method: str) -> None:
    for horizon in HORIZONS:
        input, target = signals(3, horizon, 5)
        expected = reference.fredf(
            input.numpy(), target.numpy(), reference.fourier(basis, norm), alpha=0.7, axes=AXES[basis]
        )
        check(FreDFLoss(0.7, basis, norm=norm, method=method), input, target, expected)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
@pytest.mark.parametrize("time_loss", ["mse", "mae", "smape"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_powers_time_losses_and_alpha(alpha: float, time_loss: str, p: float) -> None:
    input, target = signals(4, 12, 3)
    arguments = {"alpha": alpha, "time_loss": time_loss, "p": p}
    expected = reference.fredf(input.numpy(), target.numpy(), reference.fourier("rfft"), **arguments)
    for method in ("auto", "fft", "matmul"):
        check(FreDFLoss(**arguments, method=method), input, target, expected)


@pytest.mark.parametrize("method", ["fft", "matmul"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("basis", FOURIER)
@pytest.mark.parametrize("component", COMPONENTS)
def test_components(component: str, basis: str, p: float, method: str) -> None:
    for horizon in (2, 3, 12, 13):
        input, target = signals(3, horizon, 5)
        expected = reference.fredf(
            input.numpy(), target.numpy(), reference.fourier(basis), component=component, p=p, axes=AXES[basis]
        )
        check(FreDFLoss(component=component, basis=basis, p=p, method=method), input, target, expected)


def test_the_published_loss_is_the_default() -> None:
    input, target = signals(8, 96, 7)
    difference = np.fft.rfft(input.numpy(), axis=1) - np.fft.rfft(target.numpy(), axis=1)
    mse = ((input - target) ** 2).numpy().mean()
    check(FreDFLoss(), input, target, 0.8 * np.abs(difference).mean() + 0.2 * mse)


@pytest.mark.parametrize(
    ("dataset", "alpha"),
    [("ETTh1", 0.8), ("etth2", 0.9), ("ETTm1", 0.8), ("ETTm2", 0.9), ("ECL", 0.9), ("Traffic", 0.07), ("Weather", 0.6)],
)
def test_settings_of_the_paper(dataset: str, alpha: float) -> None:
    input, target = signals(2, 24, 3)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.fourier("rfft"), alpha=alpha)
    check(FreDFLoss.paper(dataset), input, target, expected)


@pytest.mark.parametrize("degree", [None, 0, 2, 5])
@pytest.mark.parametrize("family", POLYNOMIALS)
def test_polynomials_in_the_authors_scaling(family: str, degree: int | None) -> None:
    for horizon in (6, 12, 25):
        rows = reference.polynomial_matrix(family, horizon, horizon - 1 if degree is None else degree)
        input, target = signals(3, horizon, 2)
        expected = reference.fredf(input.numpy(), target.numpy(), reference.matrix(rows))
        check(FreDFLoss(basis=family, degree=degree), input, target, expected)


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@pytest.mark.parametrize("horizon", HORIZONS)
def test_dct_is_that_of_scipy(horizon: int, norm: str) -> None:
    input, target = signals(3, horizon, 2)
    expected = reference.fredf(input.numpy(), target.numpy(), lambda x: scipy.fft.dct(x, norm=norm))
    check(FreDFLoss(basis="dct", norm=norm), input, target, expected)


def test_orthonormal_bases_keep_the_energy() -> None:
    # Parseval: the sum of squared coefficients is that of squared errors, so with p=2 both terms are equal.
    input, target = signals(3, 30, 4)
    mse = ((input - target) ** 2).mean().item()
    for basis in ("fft", "dct", "haar", *POLYNOMIALS):
        norm = "backward" if basis == "haar" else "ortho"
        check(FreDFLoss(1.0, basis, norm=norm, p=2), input, target, mse)


def test_fft_is_rfft_with_inner_bins_twice() -> None:
    input, target = signals(3, 11, 2)
    twice = torch.tensor([1.0, 2, 2, 2, 2, 2]) * 6 / 11
    assert torch.allclose(FreDFLoss(basis="fft")(input, target), FreDFLoss(freq_weight=twice)(input, target))


def test_a_matrix_and_a_callable_are_bases() -> None:
    input, target = signals(3, 10, 2)
    rows = torch.randn(4, 10, dtype=torch.float64)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.matrix(rows.numpy()))
    check(FreDFLoss(basis=rows), input, target, expected)
    check(FreDFLoss(basis=lambda x: x @ rows.T), input, target, expected)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.fourier("fft"), component="mag-phase")
    check(FreDFLoss(basis=torch.fft.fft, component="mag-phase"), input, target, expected)


def test_a_time_loss_may_be_a_callable() -> None:
    input, target = signals(3, 10, 2)
    huber = np.where(np.abs(d := (input - target).numpy()) < 1, d**2 / 2, np.abs(d) - 0.5).mean()
    frequency = np.abs(np.fft.rfft(d, axis=1)).mean()
    criterion = FreDFLoss(0.25, time_loss=torch.nn.SmoothL1Loss(reduction="none"))
    check(criterion, input, target, 0.25 * frequency + 0.75 * huber)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2])
@pytest.mark.parametrize("basis", FOURIER)
def test_any_axis_can_be_time(basis: str, dim: int) -> None:
    input, target = signals(3, 4, 5, 6)
    time = dim % 4
    variables = 2 if time == 3 else 3
    axes = {"rfft_variables": (variables,), "rfft2": (time, variables)}.get(basis, (time,))
    expected = reference.fredf(input.numpy(), target.numpy(), reference.fourier(basis), axes=axes)
    for method in ("auto", "fft", "matmul"):
        check(FreDFLoss(basis=basis, dim=dim, method=method), input, target, expected)


def test_series_without_variables_and_without_a_batch() -> None:
    input, target = signals(3, 10)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.fourier("rfft"))
    check(FreDFLoss(), input, target, expected)
    check(FreDFLoss(dim=-1), input, target, expected)
    one = reference.fredf(input.numpy()[0], target.numpy()[0], reference.fourier("rfft"), axes=(0,))
    check(FreDFLoss(dim=0), input[0], target[0], one)
    both = reference.fredf(input.numpy(), target.numpy(), reference.fourier("rfft2"), axes=(0, 1))
    check(FreDFLoss(basis="rfft2", dim=0), input, target, both)


def layouts() -> dict[str, Tensor]:
    x = torch.randn(4, 10, 6, dtype=torch.float64)
    channels_last = torch.randn(4, 10, 3, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "strided": torch.randn(8, 20, 12, dtype=torch.float64)[::2, ::2, ::2],
        "expanded": torch.randn(1, 10, 1, dtype=torch.float64).expand(4, 10, 6),
        "channels last": channels_last,
        "flipped": x.flip(1),
        "batch last": x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    }


@pytest.mark.parametrize("layout", list(layouts()))
def test_strides_do_not_matter(layout: str) -> None:
    input = layouts()[layout]
    target = torch.randn_like(input, memory_format=torch.contiguous_format)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.fourier("rfft"))
    for a, b in ((input, target), (target, input)):
        check(FreDFLoss(), a, b, expected)
        a = a.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        FreDFLoss()(a, b).backward()
        c = a.detach().contiguous().requires_grad_()
        FreDFLoss(method="fft")(c, b).backward()
        torch.testing.assert_close(a.grad, c.grad)


@pytest.mark.parametrize("shape", [(40, 720, 30), (3, 96, 2000), (5000, 24), (1, 7, 1)])
def test_batches_of_many_chunks(shape: tuple[int, ...]) -> None:
    # More than a chunk of 1 MiB, and single rows larger than that.
    input, target = signals(*shape)
    d = (input - target).numpy()
    expected = 0.8 * np.abs(np.fft.rfft(d, axis=1)).mean() + 0.2 * (d**2).mean()
    check(FreDFLoss(), input, target, expected)
    a = input.clone().requires_grad_()
    FreDFLoss()(a, target).backward()
    b = input.clone().requires_grad_()
    FreDFLoss(method="fft")(b, target).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("basis", ["rfft", "fft", "dct", "legendre"])
def test_orthonormal_alpha_does_not_depend_on_the_horizon(basis: str) -> None:
    # FreDF issue 7: with the authors' scaling the transformed term grows as sqrt(T).
    short, long = (fredf_loss(*signals(400, t), basis=basis, norm="ortho", alpha=1.0).item() for t in (96, 720))
    assert short == pytest.approx(long, rel=0.02)
    grown = [fredf_loss(*signals(400, t), alpha=1.0).item() for t in (96, 720)]
    assert grown[1] / grown[0] == pytest.approx((720 / 96) ** 0.5, rel=0.02)
