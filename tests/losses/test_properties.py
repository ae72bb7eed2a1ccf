"""Laws that hold for all shapes, weights and signals."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchext.losses import fredf_loss

BASES = ["rfft", "fft", "rfft_variables", "rfft2", "dct", "legendre", "chebyshev", "hermite", "laguerre", "haar"]


@st.composite
def signals(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    shape = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    input, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    order = draw(st.permutations(range(len(shape))))
    return input.permute(order), target.permute(order).contiguous() if draw(st.booleans()) else target.permute(order)


choices = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 0.4, 1.0]),
        "basis": st.sampled_from(BASES),
        "norm": st.sampled_from(["backward", "ortho"]),
        "p": st.sampled_from([1, 1.5, 2]),
        "time_loss": st.sampled_from(["mse", "mae"]),
        "dim": st.sampled_from([0, 1, -1]),
        "reduction": st.sampled_from(["mean", "sum"]),
    }
)


def gradients(input: Tensor, target: Tensor, *rest: Any, **choice: Any) -> tuple[Tensor, ...]:
    a, b = input.detach().clone().requires_grad_(), target.detach().clone().requires_grad_()
    loss = fredf_loss(a, b, *rest, **choice)
    return (loss.detach(), *torch.autograd.grad(loss, (a, b)))


@settings(max_examples=80)
@given(signals(), choices, st.booleans(), st.integers(0, 9))
def test_methods_agree(pair: tuple[Tensor, Tensor], choice: dict[str, Any], masked: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(pair[0].shape, generator=generator) > 0.4 if masked else None
    weight = torch.rand(pair[0].shape[-1:], generator=generator, dtype=torch.float64) if masked else None
    methods = ["matmul", "fft"] if choice["basis"] in BASES[:4] else ["matmul"]
    auto = gradients(*pair, mask, weight, **choice)
    for method in methods:
        torch.testing.assert_close(gradients(*pair, mask, weight, **choice, method=method), auto, rtol=1e-9, atol=1e-11)


@settings(max_examples=40)
@given(signals(), choices, st.floats(0.1, 10))
def test_only_the_difference_counts_and_its_scale_comes_out(
    pair: tuple[Tensor, Tensor], choice: dict[str, Any], scale: float
) -> None:
    input, target = pair
    choice["time_loss"] = "mae" if choice["p"] == 1 else "mse"
    choice["p"] = 1 if choice["p"] == 1 else 2
    loss = fredf_loss(input, target, **choice)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(fredf_loss(target, input, **choice), loss, **close)
    torch.testing.assert_close(fredf_loss(input + 3, target + 3, **choice), loss, **close)
    torch.testing.assert_close(fredf_loss(input - target, 0 * target, **choice), loss, **close)
    scaled = fredf_loss(scale * input, scale * target, **choice)
    torch.testing.assert_close(scaled, loss * scale ** choice["p"], **close)


@settings(max_examples=40)
@given(signals(), choices)
def test_distance_to_a_mean_is_at_most_the_mean_distance(pair: tuple[Tensor, Tensor], choice: dict[str, Any]) -> None:
    # Convexity, which both terms have; and no loss without error.
    input, target = pair
    loss = fredf_loss(input, target, **choice)
    assert loss >= 0
    assert fredf_loss((input + target) / 2, target, **choice) <= loss / 2 + 1e-12
    assert fredf_loss(input, input, **choice) == 0


@settings(max_examples=30)
@given(signals(), choices, st.integers(1, 3))
def test_a_batch_is_the_mean_of_its_parts(pair: tuple[Tensor, Tensor], choice: dict[str, Any], parts: int) -> None:
    input, target = (
        x[None].expand(parts, *x.shape) * torch.arange(1.0, parts + 1).reshape(-1, *[1] * x.ndim) for x in pair
    )
    choice["dim"] = choice["dim"] + 1 if choice["dim"] >= 0 else choice["dim"]
    together = fredf_loss(input, target, **choice)
    choice_of_part = {**choice, "dim": choice["dim"] - 1 if choice["dim"] >= 0 else choice["dim"]}
    each = torch.stack([fredf_loss(a, b, **choice_of_part) for a, b in zip(input, target, strict=True)])
    expected = each.mean() if choice["reduction"] == "mean" else each.sum()
    torch.testing.assert_close(together, expected, rtol=1e-9, atol=1e-11)
