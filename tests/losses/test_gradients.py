"""Derivatives of every order and direction, and what autograd's buffers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from torchext.losses import FreDFLoss, fredf_loss

CHOICES: list[dict[str, Any]] = [
    *(
        {"method": method, "p": p, "time_loss": t}
        for method in ("fused", "fft", "matmul")
        for p, t in ((1, "mse"), (2, "mae"))
    ),
    {"p": 1.5, "time_loss": "smape"},
    {"basis": "fft"},
    {"basis": "rfft2"},
    {"basis": "rfft_variables", "norm": "ortho"},
    {"basis": "dct", "norm": "ortho"},
    {"basis": "legendre", "degree": 3},
    {"basis": "haar"},
    {"basis": torch.fft.rfft},
    {"freq_weight": torch.tensor([0.0, 1, 0.5, 2])},
    {"horizon_weight": torch.arange(6.0)},
    {"reduction": "none"},
    *({"component": c} for c in ("mag", "phase", "mag-phase", "complex-phase", "complex-mag-phase")),
]


def name(choice: dict[str, Any]) -> str:
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in choice.items() if not isinstance(v, Tensor)) or "w"


# torch itself scripts what forward mode needs.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=name)


def signals(*shape: int, requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad) for _ in range(2))
    return a, b


@every_choice
def test_gradient_and_second_derivative(choice: dict[str, Any]) -> None:
    input, target = signals(1, 6, 2)
    if choice.get("time_loss") == "smape":
        # Its denominator is held constant, which finite differences do not do.
        choice = {**choice, "alpha": 1.0}
    assert gradcheck(lambda a, b: fredf_loss(a, b, **choice), (input, target))
    assert gradgradcheck(lambda a, b: fredf_loss(a, b, **choice), (input, target), fast_mode=True)


def test_gradient_of_smape_holds_the_denominator_constant() -> None:
    input, target = signals(2, 5)
    (gradient,) = torch.autograd.grad(fredf_loss(input, target, alpha=0.0, time_loss="smape"), input)
    expected = 200 * (input - target).sign() / (input.abs() + target.abs()) / 10
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("which", ["input", "target", "both"])
def test_either_side_may_require_grad(which: str, masked: bool) -> None:
    input, target = signals(3, 7, 2, requires_grad=False)
    mask = torch.rand(3, 7, 2) > 0.3 if masked else None
    input.requires_grad_(which != "target")
    target.requires_grad_(which != "input")
    wanted = [x for x in (input, target) if x.requires_grad]
    fused = torch.autograd.grad(fredf_loss(input, target, mask, method="fused"), wanted)
    plain = torch.autograd.grad(fredf_loss(input, target, mask, method="fft"), wanted)
    torch.testing.assert_close(fused, plain)
    if which == "both":
        torch.testing.assert_close(fused[0], -fused[1])


def test_a_signal_against_itself() -> None:
    x, _ = signals(3, 7, 2)
    loss = fredf_loss(x, x)
    loss.backward()
    assert loss.item() == 0
    assert (x.grad == 0).all()


def test_backward_twice_through_a_retained_graph() -> None:
    input, target = signals(3, 7, 2)
    loss = fredf_loss(input, target, method="fused")
    first = torch.autograd.grad(loss, (input, target), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (input, target), retain_graph=True)
    third = torch.autograd.grad(3 * loss, (input, target))
    torch.testing.assert_close(first, tuple(kept), rtol=0, atol=0)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(tuple(3 * g for g in first), third)


def test_gradients_are_the_users_own() -> None:
    input, target = signals(3, 7, 2)
    loss = fredf_loss(input, target, method="fused")
    loss.backward(retain_graph=True)
    expected = input.grad.clone()
    input.grad.fill_(123.0)
    target.grad.fill_(-5.0)
    input.grad = target.grad = None
    loss.backward()
    torch.testing.assert_close(input.grad, expected)
    torch.testing.assert_close(target.grad, -expected)


def test_gradients_accumulate_and_scale() -> None:
    input, target = signals(3, 7, 2)
    (once,) = torch.autograd.grad(fredf_loss(input, target), input)
    for _ in range(2):
        (1024 * fredf_loss(input, target)).backward()
    torch.testing.assert_close(input.grad, 2048 * once)


@every_choice
def test_inputs_are_left_alone(choice: dict[str, Any]) -> None:
    input, target = signals(3, 6, 2)
    weight, mask = torch.rand(3, 6, 2, dtype=torch.float64), torch.rand(3, 6, 2) > 0.3
    given = (input, target, weight, mask)
    before = [x.detach().clone() for x in given]
    versions = [x._version for x in given]
    for rest in ((), (mask, weight)):
        fredf_loss(input, target, *rest, **choice).sum().backward()
    assert [x._version for x in given] == versions
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


def test_a_forecast_changed_in_place_after_the_loss_keeps_its_gradient() -> None:
    input, target = signals(3, 7, 2)
    expected = torch.autograd.grad(fredf_loss(input, target), input)
    forecast = input * 1
    loss = fredf_loss(forecast, target)
    forecast.detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(loss, input), expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_value_without_gradients(context: Any) -> None:
    input, target = signals(3, 7, 2)
    with_gradient = fredf_loss(input, target)
    with context():
        for basis in ("rfft", "dct"):
            loss = fredf_loss(input, target, basis=basis)
            assert not loss.requires_grad
        assert torch.equal(fredf_loss(input, target), with_gradient)
        assert torch.equal(fredf_loss(input + 0, target + 0), with_gradient)


@pytest.mark.parametrize("method", ["auto", "matmul"])
@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_first_used_in_inference_mode_then_trained(basis: str, method: str) -> None:
    # As Lightning's sanity check does: a matrix built there must not be an inference tensor.
    input, target = signals(3, 7, 2)
    criterion = FreDFLoss(basis=basis, method=method)
    with torch.inference_mode():
        criterion(input, target)
    criterion(input, target, torch.rand(3, 7, 2) > 0.5).backward()
    assert torch.isfinite(input.grad).all()


@pytest.mark.parametrize("method", ["auto", "fft"])
def test_second_derivative_where_the_target_depends_on_the_input(method: str) -> None:
    x = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        forecast = x.sin()
        return fredf_loss(forecast, 0.5 * forecast + x, method=method)

    assert gradcheck(loss, (x,))
    (once,) = torch.autograd.grad(loss(x), x)
    (differentiable,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(differentiable, once)
    assert gradgradcheck(loss, (x,), fast_mode=True)


@forward_mode
@every_choice
def test_forward_mode(choice: dict[str, Any]) -> None:
    if choice.get("method") == "fused":
        choice = {**choice, "method": "auto"}
    input, target = signals(2, 6, 3)
    tangent = torch.randn_like(input)
    (gradient,) = torch.autograd.grad(fredf_loss(input, target, **choice).sum(), input)
    with forward_ad.dual_level():
        loss = fredf_loss(forward_ad.make_dual(input.detach(), tangent), target.detach(), **choice)
        derivative = forward_ad.unpack_dual(loss).tangent
    torch.testing.assert_close(derivative.sum(), (gradient * tangent).sum())


@forward_mode
@pytest.mark.parametrize("method", ["auto", "matmul"])
def test_functorch(method: str) -> None:
    input, target = (x.detach() for x in signals(4, 6, 3))

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return fredf_loss(a, b, method=method)

    each = torch.func.vmap(lambda a, b: loss(a[None], b[None]))(input, target)
    torch.testing.assert_close(each.mean(), loss(input, target))
    leaf = input.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, target), leaf)
    for derivative in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(derivative(loss)(input, target), expected)
    per_sample = torch.func.vmap(torch.func.grad(lambda a, b: loss(a[None], b[None])))(input, target)
    torch.testing.assert_close(per_sample / 4, expected)
    small = input[:1, :, :1]
    hessian = torch.func.hessian(loss)(small, target[:1, :, :1])
    expected = torch.autograd.functional.hessian(lambda a: loss(a, target[:1, :, :1]), small)
    torch.testing.assert_close(hessian, expected)


def test_many_gradients_at_once() -> None:
    input, target = signals(2, 6, 3)
    loss = fredf_loss(input, target)
    factors = torch.tensor([1.0, -2.0], dtype=torch.float64)
    (batched,) = torch.autograd.grad(loss, input, factors, is_grads_batched=True)
    (one,) = torch.autograd.grad(fredf_loss(input, target), input)
    torch.testing.assert_close(batched, torch.stack([one, -2 * one]))
    jacobian = torch.autograd.functional.jacobian(lambda a: fredf_loss(a, target), input, vectorize=True)
    torch.testing.assert_close(jacobian, one)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    input, target = signals(3, 7, 2)
    (expected,) = torch.autograd.grad(fredf_loss(input, target), input)
    checkpoint(lambda a: fredf_loss(a * 1, target.detach()), input, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(input.grad, expected)


def test_gradient_is_laid_out_like_the_input() -> None:
    for input in (torch.randn(4, 10, 6), torch.randn(4, 6, 10).transpose(1, 2)):
        input.requires_grad_()
        fredf_loss(input, torch.randn(4, 10, 6)).backward()
        assert input.grad.stride() == input.stride()
