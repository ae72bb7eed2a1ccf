"""The backbones: sizes, gradients, and what the papers' constructions imply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forecasting_models import BACKBONES, DLinear, ITransformer
from torch import Tensor


def random_batch(num_variables: int = 7, lookback: int = 96) -> tuple[Tensor, Tensor]:
    return torch.randn(5, lookback, num_variables) * 3 + 10, torch.rand(5, lookback, 4) - 0.5


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("lookback", "horizon", "num_variables"), [(96, 96, 7), (36, 24, 1), (96, 720, 8)])
def test_forecast_has_the_horizon_and_the_variables(name: str, lookback: int, horizon: int, num_variables: int) -> None:
    x_BLD, marks_BLF = random_batch(num_variables, lookback)
    assert BACKBONES[name](lookback, horizon)(x_BLD, marks_BLF).shape == (5, horizon, num_variables)


def test_parameter_counts() -> None:
    lookback, horizon, width, layers = 96, 192, 128, 2
    attention = 4 * (width * width + width)  # query, key, value, output
    feed_forward = 2 * (width * width + width)
    norms = 2 * 2 * width
    ends = (lookback * width + width) + 2 * width + (width * horizon + horizon)
    expected = ends + layers * (attention + feed_forward + norms)
    assert sum(p.numel() for p in ITransformer(lookback, horizon).parameters()) == expected
    assert sum(p.numel() for p in DLinear(lookback, horizon).parameters()) == 2 * (lookback * horizon + horizon)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = BACKBONES[name](96, 24)
    x_BLD, marks_BLF = random_batch()
    model(x_BLD, marks_BLF).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_dlinear_is_two_matrices_on_a_moving_average_and_its_rest() -> None:
    model = DLinear(30, 8, kernel=5)
    x_BLD, marks_BLF = random_batch(num_variables=2, lookback=30)
    torch.nn.init.normal_(model.seasonal.weight)
    torch.nn.init.normal_(model.trend.weight)
    seasonal_TL, trend_TL = model.seasonal.weight.detach().numpy(), model.trend.weight.detach().numpy()
    bias_T = (model.seasonal.bias + model.trend.bias).detach().numpy()
    expected_BTD = np.empty((5, 8, 2))
    for b in range(5):
        for d in range(2):
            x_L = x_BLD[b, :, d].numpy()
            average_L = np.array([np.mean([x_L[min(max(t + k, 0), 29)] for k in range(-2, 3)]) for t in range(30)])
            expected_BTD[b, :, d] = trend_TL @ average_L + seasonal_TL @ (x_L - average_L) + bias_T
    np.testing.assert_allclose(model(x_BLD, marks_BLF).detach(), expected_BTD, rtol=1e-4, atol=1e-4)


def test_dlinear_starts_as_the_mean_of_the_window() -> None:
    model = DLinear(96, 24)
    x_BLD, marks_BLF = random_batch()
    bias_T = model.seasonal.bias + model.trend.bias
    expected_BTD = x_BLD.mean(dim=1, keepdim=True) + bias_T[:, None]
    torch.testing.assert_close(model(x_BLD, marks_BLF), expected_BTD)


def test_itransformer_follows_the_level_and_scale_of_the_window() -> None:
    model = ITransformer(96, 24).eval()
    x_BLD, marks_BLF = random_batch()
    y_BTD = model(x_BLD, marks_BLF)
    torch.testing.assert_close(model(4 * x_BLD - 7, marks_BLF), 4 * y_BTD - 7, rtol=1e-4, atol=1e-3)


def test_itransformer_treats_variables_alike() -> None:
    model = ITransformer(96, 24).eval()
    x_BLD, marks_BLF = random_batch()
    order = torch.randperm(7)
    torch.testing.assert_close(
        model(x_BLD[..., order], marks_BLF), model(x_BLD, marks_BLF)[..., order], rtol=1e-4, atol=1e-4
    )


def test_itransformer_looks_across_variables_and_at_the_calendar() -> None:
    model = ITransformer(96, 24).eval()
    x_BLD, marks_BLF = random_batch()
    y_BTD = model(x_BLD, marks_BLF)
    other_x_BLD = x_BLD.clone()
    other_x_BLD[..., 1] = torch.randn(5, 96)
    assert not torch.allclose(model(other_x_BLD, marks_BLF)[..., 0], y_BTD[..., 0], atol=1e-4)
    assert not torch.allclose(model(x_BLD, -marks_BLF), y_BTD, atol=1e-4)
