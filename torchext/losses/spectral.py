"""The frequency-domain machinery under `FreDFLoss`: transforms, distances and the fused gradient.

A transform acts on the last axes of a real tensor ("trailing axes": one, or two for rfft2), is linear, and
knows its adjoint. Coefficients travel as a pair (real, imaginary or None), so that the same code serves
bases that have no complex numbers.

Shape legend: `...` batch axes, `L` lengths of the trailing axes, `K` numbers of coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

Coefficients = tuple[Tensor, Tensor | None]

_CACHE_BYTES = 1 << 20  # a chunk of the batch and its spectrum then stay in a core's L2 cache


class Transform(Protocol):
    """A linear map over the last `num_axes` axes."""

    @property
    def num_axes(self) -> int: ...

    def num_bins(self, lengths: torch.Size) -> tuple[int, ...] | None:
        """Return K for axes of these lengths, or None if only the result tells."""
        ...

    def analyse(self, x: Tensor) -> Coefficients:
        """Map (..., *L) to coefficients (..., *K); differentiable."""
        ...


class FusedTransform(Transform, Protocol):
    """A transform whose gradient can be built in the forward pass."""

    def num_bins(self, lengths: torch.Size) -> tuple[int, ...]: ...

    def spectrum(self, x: Tensor) -> Tensor:
        """Map (..., *L) to one real or complex tensor (..., *K)."""
        ...

    def adjoint_(self, spectrum: Tensor, lengths: torch.Size) -> tuple[Tensor, float]:
        """Map (..., *K) back to (..., *L) by the transposed map; may overwrite `spectrum`.

        Returns the result as a tensor and a factor still to be applied.
        """
        ...


@dataclass(frozen=True)
class Fourier:
    """Real FFT over the last axis, or the last two."""

    num_axes: int
    norm: str

    def analyse(self, x: Tensor) -> Coefficients:
        spectrum = self.spectrum(x)
        return spectrum.real, spectrum.imag

    def num_bins(self, lengths: torch.Size) -> tuple[int, ...]:
        return (*lengths[:-1], lengths[-1] // 2 + 1)

    def spectrum(self, x: Tensor) -> Tensor:
        spectrum: Tensor = (
            torch.fft.rfft(x, norm=self.norm) if self.num_axes == 1 else torch.fft.rfft2(x, norm=self.norm)
        )
        return spectrum

    def adjoint_(self, spectrum: Tensor, lengths: torch.Size) -> tuple[Tensor, float]:
        # irfft counts every bin but DC and Nyquist twice, for the half of the spectrum that it does not see;
        # the adjoint counts each bin once.
        spectrum[..., 0].mul_(2)  # not `*= 2`, which writes the view back once more
        if lengths[-1] % 2 == 0:
            spectrum[..., -1].mul_(2)
        if self.num_axes == 2:
            spectrum = torch.fft.ifft(spectrum, dim=-2, norm="forward")
        signal = torch.fft.irfft(spectrum, n=lengths[-1], norm="forward")
        return signal, fourier_scale(self.norm, lengths) / 2


@dataclass(frozen=True)
class FourierMatmul:
    """The same map as `Fourier` by cosine and sine matrices: no complex numbers, no FFT kernels."""

    num_axes: int
    norm: str

    def num_bins(self, lengths: torch.Size) -> tuple[int, ...]:
        return (*lengths[:-1], lengths[-1] // 2 + 1)

    def analyse(self, x: Tensor) -> Coefficients:
        lengths = x.shape[-self.num_axes :]
        scale = fourier_scale(self.norm, lengths)
        cos, sin = _dft_matrices(lengths[-1], lengths[-1] // 2 + 1, x)
        real, imag = x @ cos.T * scale, -(x @ sin.T) * scale
        if self.num_axes == 2:
            cos, sin = _dft_matrices(lengths[-2], lengths[-2], x)
            real, imag = cos @ real + sin @ imag, cos @ imag - sin @ real
        return real, imag


@dataclass(frozen=True)
class Matrix:
    """A real basis: coefficients = x @ matrix.T, with `matrix` (K, L)."""

    matrix: Tensor
    num_axes: int = 1

    def analyse(self, x: Tensor) -> Coefficients:
        return self.spectrum(x), None

    def num_bins(self, lengths: torch.Size) -> tuple[int, ...]:
        return (self.matrix.shape[0],)

    def spectrum(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T

    def adjoint_(self, spectrum: Tensor, lengths: torch.Size) -> tuple[Tensor, float]:
        return spectrum @ self.matrix, 1.0


@dataclass(frozen=True)
class Custom:
    """A linear callable of the user's: (..., T) -> (..., K), real or complex."""

    function: Callable[[Tensor], Tensor]
    num_axes: int = 1

    def num_bins(self, lengths: torch.Size) -> None:
        return None

    def analyse(self, x: Tensor) -> Coefficients:
        result = self.function(x)
        if not isinstance(result, Tensor) or result.shape[:-1] != x.shape[:-1]:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"basis: the callable must map (..., T) to (..., K) and keep the other axes; it was given "
                f"{tuple(x.shape)} and returned {got}"
            )
        return (result.real, result.imag) if result.is_complex() else (result, None)


def fourier_scale(norm: str, lengths: torch.Size) -> float:
    """What `torch.fft` multiplies the forward transform by."""
    count = math.prod(lengths)
    return {"backward": 1.0, "ortho": 1 / math.sqrt(count), "forward": 1 / count}[norm]


def _dft_matrices(length: int, num_bins: int, like: Tensor) -> tuple[Tensor, Tensor]:
    # k * t is reduced modulo the length in integers: float32 angles of thousands of radians are not exact.
    k = torch.arange(num_bins, device=like.device)[:, None]
    t = torch.arange(length, device=like.device)[None, :]
    angle = (k * t % length).to(like.dtype) * (2 * math.pi / length)
    return angle.cos(), angle.sin()


# ---- distances between spectra -------------------------------------------------------------------------


def magnitude(coefficients: Coefficients) -> Tensor:
    """|c|, with gradient 0 where c is 0.

    Squares are taken of numbers about 1, as others leave the range of float32 from 1e-19 and 1e19 on: what
    `torch.hypot` does too, which ONNX has not.
    """
    real, imag = coefficients
    if imag is None:
        return real.abs()
    size = torch.maximum(real.detach().abs(), imag.detach().abs())
    zero = size == 0
    size = torch.where(zero, 1.0, size)
    squared = (real / size).square() + (imag / size).square()
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squared).sqrt() * size)


def phase(coefficients: Coefficients, num_axes: int) -> Tensor:
    """Angle of c in (-pi, pi]; 0 with gradient 0 where |c| is rounding noise of its series' spectrum.

    The angle of such a bin is arbitrary, and its gradient, 1 / |c|, would drown all others. Transforms of up to
    a thousand steps err by some ten units of rounding of the largest coefficient.
    """
    real, imag = coefficients
    assert imag is not None
    size = magnitude((real.detach(), imag.detach()))
    floor = size.amax(dim=tuple(range(-num_axes, 0)), keepdim=True) * (32 * torch.finfo(real.dtype).eps)
    # Comparisons that are false for NaN: that must come out as it went in.
    noise = (size < floor) | (size < torch.finfo(real.dtype).tiny ** 0.5)
    angle = torch.atan2(torch.where(noise, 0.0, imag), torch.where(noise, 1.0, real))
    return torch.where(size.isfinite(), angle, torch.nan)


def wrapped(angle: Tensor) -> Tensor:
    """Bring a difference of angles back to [-pi, pi]."""
    return angle - (2 * math.pi) * (angle.detach() / (2 * math.pi)).round()


# ---- fused value and gradient --------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedTerms:
    """What the fused loss adds up: `frequency_scale * sum w_k |T(w^(1/p) d)|^p + time_scale * sum w |d|^q`.

    `q` is 2 or 1, or None for no time term; `bin_weight`, the w_k, is (*K,) or None for ones. `weights`, the w,
    `root`, that is w^(1/p), and `mask`, False where d counts as 0 whatever it is, have the input's shape or
    are None.
    """

    transform: FusedTransform
    p: float
    frequency_scale: float
    bin_weight: Tensor | None
    q: int | None
    time_scale: float
    mask: Tensor | None
    weights: Tensor | None
    root: Tensor | None

    def rows(self, start: int, stop: int) -> FusedTerms:
        """Return the terms of a part of the batch."""
        if self.weights is None:
            return self
        mask, weights, root = (None if t is None else t[start:stop] for t in (self.mask, self.weights, self.root))
        return replace(self, mask=mask, weights=weights, root=root)


def fused_loss(
    input: Tensor, target: Tensor, terms: FusedTerms, differentiable: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the scalar loss of the difference; its gradient is ready when the forward pass ends.

    Args:
        input: (..., *L) float, transformed axes last (a view will do), at least one axis before them.
        target: the same shape.
        terms: what to add up.
        differentiable: the same loss from ordinary operations, used where a second derivative is asked for.

    One transform of the difference, one inverse transform, one buffer of the input's size: the batch is
    worked through in chunks that fit the cache, and the gradient overwrites the difference.
    """
    if torch.is_grad_enabled() and (input.requires_grad or target.requires_grad):
        loss: Tensor = _Fused.apply(input, target, terms, differentiable)  # type: ignore[no-untyped-call]
        return loss
    return _value_and_gradient(input, target, terms, need_gradient=False)[0]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        target: Tensor,
        terms: FusedTerms,
        differentiable: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        value, ctx.gradient = _value_and_gradient(input, target, terms, need_gradient=True)
        ctx.save_for_backward(input, target)
        ctx.terms, ctx.differentiable = terms, differentiable
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        wants_input, wants_target = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True
            # Views cut the two apart where one was computed from the other: partial derivatives are asked for.
            views = [signal.view_as(signal) for signal in ctx.saved_tensors]
            signals = [s for s, wanted in zip(views, (wants_input, wants_target), strict=True) if wanted]
            grads = torch.autograd.grad(ctx.differentiable(*views), signals, grad_output, create_graph=True)
            return grads[0] if wants_input else None, grads[-1] if wants_target else None, None, None
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:  # given away by an earlier backward through the retained graph
            input, target = ctx.saved_tensors
            gradient = _value_and_gradient(input, target, ctx.terms, need_gradient=True)[1]
            assert gradient is not None
        gradient = gradient * grad_output if _is_batched(grad_output) else gradient.mul_(grad_output)
        return gradient if wants_input else None, -gradient if wants_target else None, None, None


def _is_batched(grad_output: Tensor) -> bool:
    """Whether several gradients are asked for at once (vmap, `is_grads_batched`): one buffer cannot hold them."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad_output) or functorch.is_legacy_batchedtensor(grad_output)


def _value_and_gradient(
    input: Tensor, target: Tensor, terms: FusedTerms, need_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    lengths = input.shape[-terms.transform.num_axes :]
    rows = _rows_per_chunk(input)
    values = []
    with torch.no_grad():
        # Laid out as the input is, so that whoever takes the gradient need not copy it.
        gradient = torch.empty_like(input) if need_gradient else None
        scratch = torch.empty_like(input[:rows], memory_format=torch.contiguous_format)
        for start in range(0, input.shape[0], rows):
            of_input, of_target = input[start : start + rows], target[start : start + rows]
            difference = scratch[: of_input.shape[0]]
            if gradient is not None and gradient.is_contiguous():
                difference = gradient[start : start + rows]
            torch.sub(of_input, of_target, out=difference)
            values.append(_chunk_(difference, lengths, terms.rows(start, start + rows), need_gradient))
            if gradient is not None and not gradient.is_contiguous():
                gradient[start : start + rows].copy_(difference)
    return values[0] if len(values) == 1 else torch.stack(values).sum(), gradient


def _rows_per_chunk(input: Tensor) -> int:
    if input.device.type != "cpu":
        return input.shape[0]
    bytes_per_row = input[0].numel() * input.element_size()
    return max(1, _CACHE_BYTES // max(1, bytes_per_row))


def _chunk_(difference: Tensor, lengths: torch.Size, terms: FusedTerms, need_gradient: bool) -> Tensor:
    """Add up one chunk; with `need_gradient`, overwrite `difference` (contiguous) with the gradient."""
    if terms.mask is not None:
        difference.masked_fill_(~terms.mask, 0.0)
    spectrum = terms.transform.spectrum(difference if terms.root is None else difference * terms.root)
    direction = _direction(spectrum, terms.p)
    if terms.bin_weight is not None:
        direction = direction * terms.bin_weight
    value = _inner(spectrum, direction) * terms.frequency_scale
    del spectrum
    if terms.q is not None:
        slope = _direction(difference, terms.q)
        if terms.weights is not None:
            slope = slope * terms.weights
        value += _inner(difference, slope) * terms.time_scale
    if need_gradient:
        if terms.q is not None:
            torch.mul(slope, terms.q * terms.time_scale, out=difference)
        else:
            difference.zero_()
        signal, factor = terms.transform.adjoint_(direction, lengths)
        if terms.root is not None:
            signal = signal * terms.root
        difference.add_(signal, alpha=factor * terms.p * terms.frequency_scale)
    return value


def _direction(x: Tensor, p: float) -> Tensor:
    """x |x|^(p-2): the gradient of |x|^p over p, whose inner product with x is |x|^p."""
    if p == 2:
        return x
    direction = x.sgn()
    if x.is_complex():
        # The sgn of a subnormal number comes out as its reciprocal, infinity, times parts that may be 0.
        torch.view_as_real(direction).nan_to_num_(nan=0.0, posinf=1.0, neginf=-1.0)
    direction.add_(x, alpha=0)  # and that of NaN and infinity not always as NaN: it must not get lost
    return direction if p == 1 else direction * x.abs().pow_(p - 1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Re <a, b>."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.dot(a.reshape(-1), b.reshape(-1))
