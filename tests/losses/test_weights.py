"""Masks, weights of positions and coefficients, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.losses import reference
from torchext.losses import FreDFLoss, fredf_loss

COMPONENTS = ["complex", "mag", "phase", "mag-phase", "complex-phase", "complex-mag-phase"]
# Choices that take different ways through the code: fused, with a second pass for the time loss, ordinary.
CHOICES: list[dict[str, Any]] = [
    {},
    {"method": "fft"},
    {"method": "matmul"},
    {"p": 2},
    {"p": 1.5, "time_loss": "mae"},
    {"time_loss": "smape"},
    {"basis": "fft"},
    {"basis": "rfft2", "norm": "ortho"},
    {"basis": "rfft_variables"},
    {"basis": "dct"},
    {"alpha": 1.0},
    {"alpha": 0.0},
    *({"component": component} for component in COMPONENTS[1:]),
    {"component": "mag-phase", "p": 2},
]


def name(choice: dict[str, Any]) -> str:
    return ",".join(map(str, choice.values())) or "default"


every_choice = pytest.mark.parametrize("choice", CHOICES, ids=name)


def signals(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def value_and_gradient(input: Tensor, target: Tensor, *rest: Any, **choice: Any) -> tuple[Tensor, Tensor]:
    input = input.detach().clone().requires_grad_()
    loss = fredf_loss(input, target, *rest, **choice)
    (gradient,) = torch.autograd.grad(loss.sum(), input)
    return loss.detach(), gradient


@pytest.mark.parametrize("method", ["fused", "fft", "matmul"])
@pytest.mark.parametrize("time_loss", ["mse", "mae", "smape"])
@pytest.mark.parametrize("p", [1, 1.5, 2])
def test_weighted_value_is_the_formula(p: float, time_loss: str, method: str) -> None:
    input, target = signals(4, 12, 3)
    mask = torch.rand(4, 12, 3) > 0.4
    mask[1] = False
    weight = torch.rand(4, 1, 3, dtype=torch.float64)
    profile = torch.rand(12, dtype=torch.float64)
    weights = mask.numpy() * weight.numpy() * profile.numpy()[:, None]
    expected = reference.weighted_fredf(
        input.numpy(), target.numpy(), weights, reference.fourier("rfft"), p=p, time_loss=time_loss
    )
    criterion = FreDFLoss(p=p, time_loss=time_loss, horizon_weight=profile, method=method)
    assert criterion(input, target.where(mask, torch.nan), mask, weight).item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("basis", ["rfft_variables", "rfft2"])
def test_weighted_value_over_variables(basis: str) -> None:
    input, target = signals(4, 6, 5)
    weights = torch.rand(4, 6, 5, dtype=torch.float64)
    axes = (2,) if basis == "rfft_variables" else (1, 2)
    expected = reference.weighted_fredf(
        input.numpy(), target.numpy(), weights.numpy(), reference.fourier(basis), axes=axes
    )
    assert fredf_loss(input, target, weight=weights, basis=basis).item() == pytest.approx(expected, rel=1e-11)


@every_choice
def test_what_the_mask_hides_does_not_matter(choice: dict[str, Any]) -> None:
    input, target = signals(5, 12, 4)
    mask = torch.rand(5, 12, 4) > 0.3
    mask[2], mask[3, :, 1] = False, False
    zeros = value_and_gradient(input.where(mask, 0.0), target.where(mask, 0.0), mask, **choice)
    for hidden in (torch.nan, torch.inf, 1e300):
        value, gradient = value_and_gradient(input.where(mask, hidden), target.where(mask, hidden), mask, **choice)
        assert torch.equal(value, zeros[0])
        assert torch.equal(gradient, zeros[1])
        assert (gradient[~mask] == 0).all()
    assert torch.isfinite(zeros[1]).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nan_weights_and_odd_time_losses_under_the_mask_do_not_matter(reduction: str) -> None:
    input, target = signals(3, 8, 2)
    mask = torch.rand(3, 8, 2) > 0.3
    target = target.where(mask, torch.nan)

    def relative(a: Tensor, b: Tensor) -> Tensor:  # 0 / 0 where both are filled with 0
        return (a - b).abs() / b.abs()

    loss, gradient = value_and_gradient(
        input, target, mask, 1 / target.abs(), time_loss=relative, reduction=reduction, method="fft"
    )
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


@every_choice
def test_nothing_scored_is_no_loss(choice: dict[str, Any]) -> None:
    input, target = signals(2, 7, 3)
    for weights in ({"mask": torch.zeros(1, 1, 1, dtype=torch.bool)}, {"weight": torch.zeros(3)}):
        loss, gradient = value_and_gradient(input, target, **weights, **choice)
        assert loss == 0
        assert (gradient == 0).all()


@every_choice
def test_padded_series_do_not_dilute(choice: dict[str, Any]) -> None:
    input, target = signals(3, 12, 4)
    if choice.get("basis") in ("rfft2", "rfft_variables"):
        padded = [torch.cat([x, torch.full((2, 12, 4), torch.nan)]) for x in (input, target)]
        mask = torch.arange(5)[:, None, None] < 3
    else:
        padded = [torch.cat([x, torch.full((3, 12, 2), torch.nan)], dim=2) for x in (input, target)]
        mask = torch.arange(6) < 4
    torch.testing.assert_close(fredf_loss(*padded, mask, **choice), fredf_loss(input, target, **choice))


@every_choice
def test_integer_weights_of_samples_are_repetitions(choice: dict[str, Any]) -> None:
    input, target = signals(3, 12, 4)
    counts = torch.tensor([2, 0, 3])
    repeated = [x.repeat_interleave(counts, dim=0) for x in (input, target)]
    weighted = fredf_loss(input, target, weight=counts[:, None, None], **choice)
    torch.testing.assert_close(weighted, fredf_loss(*repeated, **choice))


@every_choice
def test_the_scale_of_weights_does_not_matter(choice: dict[str, Any]) -> None:
    input, target = signals(3, 12, 4)
    weight = torch.rand(3, 12, 4, dtype=torch.float64)
    one = value_and_gradient(input, target, weight=weight, **choice)
    other = value_and_gradient(input, target, weight=weight * 1000, **choice)
    torch.testing.assert_close(one, other)
    plain = value_and_gradient(input, target, **choice)
    torch.testing.assert_close(value_and_gradient(input, target, weight=torch.full((4,), 3.0), **choice), plain)
    everything = torch.ones(3, 12, 4, dtype=torch.bool)
    torch.testing.assert_close(value_and_gradient(input, target, everything, **choice), plain)


def test_weights_of_variables_average_their_losses() -> None:
    input, target = signals(3, 12, 2)
    losses = [fredf_loss(input[..., d], target[..., d]) for d in range(2)]
    weighted = fredf_loss(input, target, weight=torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(weighted, (losses[0] + 3 * losses[1]) / 4)


def test_horizon_weight_is_a_weight_per_step_along_any_dim() -> None:
    input, target = signals(3, 12, 2)
    profile = torch.rand(12)
    expected = fredf_loss(input, target, weight=profile[:, None])
    torch.testing.assert_close(fredf_loss(input, target, horizon_weight=profile), expected)
    moved = fredf_loss(input.movedim(1, 0), target.movedim(1, 0), dim=0, horizon_weight=profile)
    torch.testing.assert_close(moved, expected)


def test_a_mask_in_time_is_a_shorter_horizon_for_the_time_loss() -> None:
    input, target = signals(3, 12, 2)
    expected = ((input[:, :5] - target[:, :5]) ** 2).mean()
    torch.testing.assert_close(fredf_loss(input, target, torch.arange(12)[:, None] < 5, alpha=0.0), expected)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_phase_counts_by_the_mean_weight_of_its_series(component: str) -> None:
    input, target = signals(3, 12, 2)
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)[:, None, None]
    for p in (1, 2):
        each = [fredf_loss(a[None], b[None], component=component, p=p) for a, b in zip(input, target, strict=True)]
        expected = (each[0] + 2 * each[1] + 5 * each[2]) / 8
        torch.testing.assert_close(fredf_loss(input, target, weight=weight, component=component, p=p), expected)


@pytest.mark.parametrize("p", [1, 1.5, 2])
@pytest.mark.parametrize("component", COMPONENTS)
def test_weights_can_be_learned(component: str, p: float) -> None:
    input, target = signals(2, 6, 2)
    mask = torch.rand(2, 6, 2) > 0.2
    weight = (torch.rand(2, 6, 2, dtype=torch.float64) + 0.5).requires_grad_()
    horizon = (torch.rand(6, dtype=torch.float64) + 0.5).requires_grad_()

    def loss(weight: Tensor, horizon: Tensor) -> Tensor:
        return fredf_loss(input, target, mask, weight, horizon_weight=horizon, component=component, p=p)

    assert torch.autograd.gradcheck(loss, (weight, horizon))


def test_learned_frequency_weights_and_bases_get_their_gradient() -> None:
    input, target = signals(2, 6, 2)
    bins = torch.rand(4, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: fredf_loss(input, target, freq_weight=w), (bins,))
    assert torch.autograd.gradcheck(lambda m: fredf_loss(input, target, basis=m), (rows,))
    with pytest.raises(ValueError, match=r'method="fused" does not work with .* requires grad'):
        fredf_loss(input, target, freq_weight=bins, method="fused")


# ---- weights of the coefficients -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fused", "fft", "matmul"])
@pytest.mark.parametrize("basis", ["rfft", "fft", "rfft_variables", "rfft2"])
def test_freq_weight(basis: str, method: str) -> None:
    for horizon, variables in ((6, 5), (7, 4), (2, 2), (1, 3)):
        input, target = signals(3, horizon, variables)
        shape = {"rfft": (horizon // 2 + 1,), "fft": (horizon,), "rfft_variables": (variables // 2 + 1,)}.get(
            basis, (horizon, variables // 2 + 1)
        )
        weight = torch.rand(shape, dtype=torch.float64)
        axes = {"rfft_variables": (2,), "rfft2": (1, 2)}.get(basis, (1,))
        for p in (1, 2):
            expected = reference.fredf(
                input.numpy(),
                target.numpy(),
                reference.fourier(basis),
                p=p,
                axes=axes,
                bin_weight=weight.numpy(),
            )
            loss = FreDFLoss(basis=basis, p=p, freq_weight=weight, method=method)(input, target)
            assert loss.item() == pytest.approx(expected, rel=1e-11)


def test_low_pass_sees_no_high_frequencies() -> None:
    t = torch.arange(96, dtype=torch.float64)
    low, high = (torch.sin(2 * torch.pi * k * t / 96)[None, :, None] for k in (2, 40))
    criterion = FreDFLoss(1.0, freq_weight=(torch.arange(49) < 10))
    assert criterion(high, torch.zeros_like(high)).item() == pytest.approx(0, abs=1e-12)
    # One bin of magnitude T / 2 among 49.
    assert criterion(low, torch.zeros_like(low)).item() == pytest.approx(48 / 49)


@pytest.mark.parametrize("component", COMPONENTS)
def test_freq_weight_with_components(component: str) -> None:
    input, target = signals(3, 9, 2)
    weight = torch.rand(5, dtype=torch.float64)
    expected = reference.fredf(
        input.numpy(), target.numpy(), reference.fourier("rfft"), component=component, bin_weight=weight.numpy()
    )
    loss = fredf_loss(input, target, component=component, freq_weight=weight)
    assert loss.item() == pytest.approx(expected, rel=1e-11)


def test_freq_weight_of_matrices_and_callables() -> None:
    input, target = signals(3, 9, 2)
    rows, weight = torch.randn(4, 9, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.matrix(rows.numpy()), bin_weight=weight.numpy())
    for basis in (rows, lambda x: x @ rows.T):
        assert fredf_loss(input, target, basis=basis, freq_weight=weight).item() == pytest.approx(expected)


# ---- reductions ----------------------------------------------------------------------------------------


@every_choice
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions_belong_together(weighted: bool, choice: dict[str, Any]) -> None:
    input, target = signals(4, 12, 3)
    weights: dict[str, Any] = {}
    total = torch.tensor(4 * 12 * 3.0, dtype=torch.float64)
    if weighted:
        mask, weight = torch.rand(4, 12, 3) > 0.3, torch.rand(3, dtype=torch.float64)
        mask[0] = False
        weights = {"mask": mask, "weight": weight}
        total = (mask * weight).sum()
    parts, parts_gradient = value_and_gradient(input, target, **weights, reduction="none", **choice)
    assert parts.shape == input.shape
    added, added_gradient = value_and_gradient(input, target, **weights, reduction="sum", **choice)
    mean, mean_gradient = value_and_gradient(input, target, **weights, reduction="mean", **choice)
    torch.testing.assert_close(parts.sum(), added)
    torch.testing.assert_close(parts_gradient, added_gradient)
    torch.testing.assert_close(added / total, mean)
    torch.testing.assert_close(added_gradient / total, mean_gradient)
    if weighted:
        assert (parts[~mask] == 0).all()


@pytest.mark.parametrize("shape", [(4, 12), (4, 12, 3)])
def test_unreduced_loss_spreads_the_transformed_term_over_the_series(shape: tuple[int, ...]) -> None:
    input, target = signals(*shape)
    d = (input - target).numpy()
    series = np.abs(np.fft.rfft(d, axis=1)).mean(axis=1, keepdims=True)
    expected = 0.8 * series + 0.2 * d**2
    np.testing.assert_allclose(fredf_loss(input, target, reduction="none").numpy(), expected)


def test_unreduced_loss_of_a_mask_spreads_over_what_is_scored() -> None:
    input, target = signals(2, 6)
    mask = torch.tensor([[True, True, True, False, False, False], [True] * 6])
    d = np.where(mask, (input - target).numpy(), 0)
    series = np.abs(np.fft.rfft(d, axis=1)).mean(axis=1, keepdims=True)
    share = np.where(mask, [[2.0], [1.0]], 0)
    loss = fredf_loss(input, target, mask, reduction="none")
    np.testing.assert_allclose(loss.numpy(), 0.8 * series * share + 0.2 * d**2)
