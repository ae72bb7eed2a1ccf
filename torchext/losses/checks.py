"""What FreDF's arguments may be, and errors that say what was given and what would be right.

Nothing here looks at values on a device: that would make every training step wait for it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import torch
from torch import Tensor

from torchext.losses.bases import MATRIX_BASES, POLYNOMIALS
from torchext.losses.terms import TimeLoss

Basis = str | Tensor | Callable[[Tensor], Tensor]

FOURIER_BASES = ("rfft", "fft", "rfft_variables", "rfft2")
_BASES = (*FOURIER_BASES, *MATRIX_BASES, "pca")
_COMPONENTS = ("complex", "mag", "phase", "mag-phase", "complex-phase", "complex-mag-phase")
_NORMS = ("backward", "ortho", "forward")
_TIME_LOSSES = ("mse", "mae", "smape")
_METHODS = ("auto", "fused", "fft", "matmul")
_REDUCTIONS = ("mean", "sum", "none")


def check_settings(
    alpha: float,
    basis: Basis,
    component: str,
    norm: str,
    p: float,
    time_loss: TimeLoss,
    degree: int | None,
    method: str,
    reduction: str,
) -> None:
    """Refuse settings that do not exist or do not go together."""
    _check_number("alpha", alpha, numbers.Real)
    _check_number("p", p, numbers.Real)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    if not 1 <= p < math.inf:
        raise ValueError(f"p must be at least 1 and finite, got {p}")
    if isinstance(basis, str):
        _check_choice("basis", basis, _BASES, "or a (K, T) tensor or a linear callable")
    elif isinstance(basis, Tensor):
        if basis.ndim != 2 or not basis.is_floating_point():
            raise ValueError(f"basis: a matrix must be a float tensor (K, T), got {basis.dtype} {tuple(basis.shape)}")
    elif not callable(basis):
        raise TypeError(f"basis must be a name, a (K, T) tensor or a callable, got {type(basis).__name__}")
    _check_choice("component", component, _COMPONENTS)
    _check_choice("norm", norm, _NORMS)
    _check_choice("method", method, _METHODS)
    _check_choice("reduction", reduction, _REDUCTIONS)
    if not callable(time_loss):
        _check_choice("time_loss", time_loss, _TIME_LOSSES, "or a callable")
    fourier = isinstance(basis, str) and basis in FOURIER_BASES
    shown = repr(basis) if isinstance(basis, str) else f"a {type(basis).__name__}"
    if component != "complex" and (isinstance(basis, Tensor) or (isinstance(basis, str) and not fourier)):
        raise ValueError(f"component={component!r} needs complex coefficients, which the basis, {shown}, has not")
    if norm == "forward" and not fourier:
        raise ValueError(f'norm="forward" is defined for {FOURIER_BASES}, got {shown}')
    if method == "fft" and not fourier:
        raise ValueError(f'method="fft" is for {FOURIER_BASES}, got {shown}; use "auto"')
    if degree is not None and not (isinstance(basis, str) and basis in POLYNOMIALS):
        raise ValueError(f"degree is for the polynomial bases {POLYNOMIALS}, got {shown}")
    if degree is not None:
        _check_number("degree", degree, numbers.Integral)


def _check_choice(name: str, value: object, choices: tuple[str, ...], or_else: str = "") -> None:
    if value not in choices:
        listed = f"{', '.join(map(repr, choices))} {or_else}".rstrip()
        raise ValueError(f"{name} must be one of {listed}; got {value!r}")


def _check_number(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        wanted = "an integer" if kind is numbers.Integral else "a number"
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")


def check_tensor(name: str, value: object) -> None:
    """Refuse what is neither a tensor nor None."""
    if value is not None and not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_inputs(input: Tensor, target: Tensor, mask: Tensor | None, weight: Tensor | None) -> None:
    """Refuse signals that do not match, and a mask or weight that does not broadcast to them."""
    for name, value in (("input", input), ("target", target), ("mask", mask), ("weight", weight)):
        check_tensor(name, value)
    for name, signal in (("input", input), ("target", target)):
        if not signal.is_floating_point():
            raise TypeError(f"{name} must be real floating point, got {signal.dtype}")
    if input.shape != target.shape:
        raise ValueError(
            f"input and target must have the same shape (nothing is broadcast), got {tuple(input.shape)} and "
            f"{tuple(target.shape)}"
        )
    if input.numel() == 0:
        raise ValueError(f"input must not be empty, got shape {tuple(input.shape)}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True where a position is scored, got {mask.dtype}; grade with weight=")
    for name, factor in (("mask", mask), ("weight", weight)):
        if factor is not None:
            _check_broadcast(name, factor.shape, input.shape)


def _check_broadcast(name: str, shape: torch.Size, to: torch.Size) -> None:
    padded = (1,) * (len(to) - len(shape)) + tuple(shape)
    if len(padded) != len(to) or any(a not in (1, b) for a, b in zip(padded, to, strict=True)):
        raise ValueError(
            f"{name} of shape {tuple(shape)} does not broadcast to the input's {tuple(to)}: axes are aligned from "
            "the last one, those along which it does not vary have length 1"
        )


def check_weight_shape(name: str, weights: Tensor, expected: tuple[int, ...] | None) -> None:
    """Refuse weights of another shape; `expected` None allows any."""
    if expected is not None and tuple(weights.shape) != expected:
        raise ValueError(f"{name} must have shape {expected} for this input, got {tuple(weights.shape)}")


def time_axis(dim: int, input: Tensor) -> int:
    """Return `dim` as a non-negative axis of the input."""
    if not -input.ndim <= dim < input.ndim:
        raise ValueError(f"dim={dim} names no axis of an input of shape {tuple(input.shape)}")
    return dim % input.ndim
