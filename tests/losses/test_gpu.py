"""The loss on a CUDA device is that on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.losses import FreDFLoss

pytestmark = pytest.mark.gpu

CHOICES: list[dict[str, Any]] = [
    {},
    {"method": "fft"},
    {"method": "matmul"},
    {"p": 1.5, "time_loss": "mae"},
    {"basis": "rfft2", "norm": "ortho"},
    {"basis": "fft", "time_loss": "smape"},
    {"basis": "dct"},
    {"basis": "legendre", "degree": 5},
    {"component": "mag-phase"},
    {"reduction": "none"},
]


def value_and_gradient(loss: Any, *signals: Tensor) -> tuple[Tensor, Tensor]:
    input, *rest = signals
    input = input.clone().requires_grad_()
    value = loss(input, *rest)
    (gradient,) = torch.autograd.grad(value.sum(), input)
    return value.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: ",".join(map(str, choice.values())) or "default")
def test_same_as_on_the_cpu(choice: dict[str, Any], masked: bool) -> None:
    signals = [torch.randn(5, 97, 3, dtype=torch.float64), torch.randn(5, 97, 3, dtype=torch.float64)]
    if masked:
        signals.append(torch.rand(5, 97, 3) > 0.3)
    criterion = FreDFLoss(**choice)
    on_cpu = value_and_gradient(criterion, *signals)
    on_gpu = value_and_gradient(criterion.cuda(), *(x.cuda() for x in signals))
    torch.testing.assert_close(on_gpu, on_cpu)


@pytest.mark.parametrize("method", ["fused", "fft", "matmul"])
@pytest.mark.parametrize("error", [0.0, 1e-42, 1e-30])
def test_errors_near_zero_have_finite_gradients(error: float, method: str) -> None:
    for kind in (torch.ones(2, 12, 3), torch.randn(2, 12, 3)):
        input = (kind * error).cuda()
        value, gradient = value_and_gradient(FreDFLoss(method=method), input, 0 * input)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


def test_nan_comes_out() -> None:
    input, target = torch.randn(2, 12, 3, device="cuda"), torch.randn(2, 12, 3, device="cuda")
    target[1, 4, 2] = torch.nan
    for alpha in (0.5, 1.0):
        value, gradient = value_and_gradient(FreDFLoss(alpha), input, target)
        assert value.isnan()
        assert gradient[1, 4, 2].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_length_that_is_no_power_of_two(dtype: torch.dtype) -> None:
    model, criterion = torch.nn.Linear(8, 192).cuda(), FreDFLoss(dim=-1)
    with torch.autocast("cuda", dtype=dtype):
        forecast = model(torch.randn(4, 3, 8, device="cuda"))
        assert forecast.dtype == dtype
        loss = criterion(forecast, torch.randn(4, 3, 192, device="cuda"))
    assert loss.dtype == torch.float32
    loss.backward()
    assert torch.isfinite(model.weight.grad).all()


def test_compiled() -> None:
    criterion = FreDFLoss()
    input, target = torch.randn(5, 3, 96, device="cuda").transpose(1, 2), torch.randn(5, 96, 3, device="cuda")
    compiled = torch.compile(criterion, fullgraph=True)
    torch.testing.assert_close(
        value_and_gradient(compiled, input, target), value_and_gradient(criterion, input, target)
    )


def test_no_wait_for_the_device() -> None:
    criterion = FreDFLoss(freq_weight=torch.rand(49)).cuda()
    input, target = torch.randn(8, 96, 3, device="cuda", requires_grad=True), torch.randn(8, 96, 3, device="cuda")
    mask = target > 0
    criterion(input, target, mask).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        criterion(input, target).backward()
        criterion(input, target, mask).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
