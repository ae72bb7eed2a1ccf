"""FreDF: a forecasting loss that also compares forecast and target in a transformed domain.

Source: Wang et al., "FreDF: Learning to Forecast in the Frequency Domain", ICLR 2025. Squared error per time
step treats the steps of the horizon as independent given the input; labels are autocorrelated, so it is
biased (Theorem 3.1). The components of a Fourier transform of the labels are nearly uncorrelated, hence the
loss alpha * mean |T(input) - T(target)| + (1 - alpha) * MSE (equation 4).

Shape legend: `B` batch, `T` horizon (time steps), `D` variables, `K` coefficients of the transform.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchext.losses.bases import MATRIX_BASES, basis_matrix, principal_components
from torchext.losses.checks import (
    FOURIER_BASES,
    Basis,
    check_inputs,
    check_settings,
    check_tensor,
    check_weight_shape,
    time_axis,
)
from torchext.losses.spectral import (
    Custom,
    Fourier,
    FourierMatmul,
    FusedTerms,
    FusedTransform,
    Matrix,
    Transform,
    fused_loss,
)
from torchext.losses.terms import Terms, TimeLoss, fredf_from_terms, root, total_weight

# rec_lambda of the authors' scripts is 1 - alpha; the learning rates are in FreDFLoss.paper's docstring.
_PAPER_ALPHA = {
    "etth1": 0.8,
    "etth2": 0.9,
    "ettm1": 0.8,
    "ettm2": 0.9,
    "ecl": 0.9,
    "traffic": 0.07,
    "weather": 0.6,
}


class FreDFLoss(nn.Module):
    """Forecasting loss in the time and a transformed domain: `criterion(forecast, target)`.

    loss = alpha * mean |T(input - target)|^p + (1 - alpha) * time_loss(input, target)

    >>> criterion = FreDFLoss(alpha=0.8)
    >>> forecast = torch.zeros(32, 96, 7, requires_grad=True)
    >>> criterion(forecast, torch.randn(32, 96, 7)).backward()

    Args:
        alpha: weight of the transformed term, 0 to 1.
        basis: the transform T, over the time axis unless said otherwise.
            "rfft": real FFT, T // 2 + 1 bins; "fft": all T bins (the same as "rfft" with the inner bins
            counted twice); "rfft_variables": real FFT over the variables; "rfft2": over time and variables;
            "dct": DCT-II; "legendre", "chebyshev", "hermite", "laguerre": polynomials up to `degree`;
            "haar": Haar wavelets; "pca": principal components of the training targets, after `fit`;
            a (K, T) tensor: coefficients = tensor @ series; a *linear* callable (..., T) -> (..., K),
            real or complex.
        component: what of complex coefficients is compared. "complex": |difference|; "mag": difference of
            magnitudes; "phase": difference of phases, wrapped to [-pi, pi]; "mag-phase": the mean of both;
            "complex-phase": phase of the difference; "complex-mag-phase": mean of its magnitude and phase.
            All but the first need a complex basis.
        norm: scale of the transform. FFT and DCT: as in `torch.fft` and `scipy.fft`. Polynomials: "backward"
            is the authors' scaling, "ortho" orthonormal rows (then all four families agree). Haar and PCA are
            orthonormal in any case; a tensor or callable is taken as it is. "backward" coefficients grow as
            sqrt(T), so that the same alpha means something else at another horizon; "ortho" ones do not.
            "forward" (FFT bases only) divides by T.
        p: power of the distance, at least 1. The paper's choice is 1.
        time_loss: "mse", "mae", "smape" (200 |a - b| / (|a| + |b|), the denominator held constant), or a
            callable (input, target) -> per-element losses of the same shape.
        dim: the time axis. The variables are the last other axis.
        freq_weight: (K,) non-negative factors of the coefficients; (T,) for "fft", (T, D // 2 + 1) for
            "rfft2". A 0/1 vector is the authors' low-pass mask.
        horizon_weight: (T,) non-negative weights of the time steps.
        degree: highest degree of a polynomial basis, below T; None means T - 1.
        method: "fused": value and gradient in one pass with a transform and its inverse; "fft": ordinary
            operations; "matmul": ordinary operations without complex numbers or FFT kernels (ONNX, MPS),
            in memory for T^2 numbers; "auto" picks, and falls back where the fused pass does not apply:
            components other than "complex", callable bases, reduction "none", weights or bases that require
            grad, `torch.compile`, `torch.func`. All agree to rounding. Second derivatives work with each.
        reduction: "mean", "sum", or "none": the input's shape, with each series' transformed term spread
            evenly over its time steps.

    Weights and masks: with w = mask * weight * horizon_weight, the time term is sum(w l) / sum(w), and the
    transformed term mean |T(w^(1/p) d)|^p / mean(w), that is, positions not scored count as forecast
    without error, and padding does not dilute the mean. "sum" is not divided by w. A component with a phase
    weighs the distance of each series by the mean of w over it, and the signals by w relative to that mean.
    NaN and infinity that are scored come out as NaN or infinity; under the mask they are not looked at.

    Half and bfloat16 input is computed, and the loss returned, in float32, under autocast too.

    Differences from the authors' code: one transform of the difference (T is linear) instead of two; phases
    are wrapped; phases of bins at rounding level are 0 instead of noise; Hermite rows are scaled to a root
    mean square of 1 (theirs overflow from degree 50); their masked variant divides by all positions, this by
    those scored.

    Raises:
        ValueError: an argument that is out of range or not among the choices, shapes that differ, an empty
            batch; the message names the argument, what was given and what would be right.
        TypeError: input or target that is not real floating point, a mask that is not boolean, a number or
            tensor that is something else.
        RuntimeError: "pca" before `fit`.

    Source: FreDF (ICLR 2025), equation 4 and appendix on bases and components; PCA after Time-o1 (2025).
    """

    freq_weight: Tensor | None
    horizon_weight: Tensor | None
    matrix: Tensor | None
    components: Tensor | None

    def __init__(
        self,
        alpha: float = 0.8,
        basis: Basis = "rfft",
        component: str = "complex",
        norm: str = "backward",
        p: float = 1,
        time_loss: TimeLoss = "mse",
        dim: int = 1,
        freq_weight: Tensor | None = None,
        horizon_weight: Tensor | None = None,
        degree: int | None = None,
        method: str = "auto",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_settings(alpha, basis, component, norm, p, time_loss, degree, method, reduction)
        for name, weights in (("freq_weight", freq_weight), ("horizon_weight", horizon_weight)):
            check_tensor(name, weights)
            if weights is not None and not weights.is_meta and not bool((weights >= 0).all()):
                raise ValueError(f"{name} must not be negative, got a minimum of {weights.min().item()}")
        self.alpha = alpha
        self.basis = "matrix" if isinstance(basis, Tensor) else basis
        self.component = component
        self.norm = norm
        self.p = p
        self.time_loss = time_loss
        self.dim = dim
        self.degree = degree
        self.method = method
        self.reduction = reduction
        self.register_buffer("freq_weight", freq_weight, persistent=False)
        self.register_buffer("horizon_weight", horizon_weight, persistent=False)
        self.register_buffer("matrix", basis if isinstance(basis, Tensor) else None, persistent=False)
        self.register_buffer("components", None)
        # The matrix last built for a named basis, behind what it was built for: one attribute, so that threads
        # with different horizons never see the one without the other. No buffer, or `.half()` would round it.
        self._built: tuple[tuple[object, ...], Tensor] | None = None

    @classmethod
    def paper(cls, dataset: str) -> FreDFLoss:
        """Return the authors' setting for a data set: rfft, L1, and their alpha.

        It belongs with Adam and this learning rate (halved every epoch, look-back 96, iTransformer):
        ETTh1 1e-3 (alpha 0.8), ETTh2 1e-3 (0.9), ETTm1 5e-4 (0.8), ETTm2 1e-3 (0.9), ECL 1e-3 (0.9),
        Traffic 1e-3 (0.07), Weather 5e-4 (0.6). At the 1e-4 usual for MSE it can end up worse than MSE.

        Args:
            dataset: one of those names, in any case.
        """
        alpha = _PAPER_ALPHA.get(dataset.lower())
        if alpha is None:
            raise ValueError(
                f"dataset: the authors give settings for {', '.join(_PAPER_ALPHA)}; got {dataset!r}. "
                "For other data start from FreDFLoss.recommended()."
            )
        return cls(alpha=alpha)

    @classmethod
    def recommended(cls) -> FreDFLoss:
        """Return the setting to start from on new data: 0.3 orthonormal rfft + 0.7 MAE.

        Chosen on validation over ETTh1, ETTh2, ETTm1, exchange rate and illness with DLinear and iTransformer, among
        bases, norms, alphas, powers and time losses; its neighbours, Haar or an alpha of 0.15, came out level. On test,
        ahead of plain MAE and of the authors' setting on average over data sets, but not on each: see
        examples/results/forecast.md. Both terms are L1 and of one scale, so its gradients are those of MAE in size, and
        learning rates found for MAE serve.
        """
        return cls(alpha=0.3, norm="ortho", time_loss="mae")

    def fit(self, train_targets: Tensor) -> FreDFLoss:
        """Learn the basis "pca" from the training targets; call it once, before training.

        The result is part of `state_dict`. Every process of a distributed job must fit the same targets.

        Args:
            train_targets: (N, T, D) or (N, T) float, with the same axis order as later inputs; the axis
                `dim` is time. A few thousand windows are enough.

        Returns:
            self.

        Source: after Time-o1 (2025), which projects on the singular vectors of the training labels.
        """
        if self.basis != "pca":
            raise ValueError(f'fit: only basis="pca" is learned from data, this one is {self.basis!r}')
        check_tensor("train_targets", train_targets)
        if not train_targets.is_floating_point() or train_targets.numel() == 0:
            raise ValueError(
                "train_targets must be a non-empty float tensor (N, T, D) or (N, T), got "
                f"{train_targets.dtype} of shape {tuple(train_targets.shape)}"
            )
        time = time_axis(self.dim, train_targets)
        series = train_targets.detach().movedim(time, -1).reshape(-1, train_targets.shape[time])
        if not bool(torch.isfinite(series).all()):
            raise ValueError("train_targets must be finite: leave out the windows with missing values")
        axes = principal_components(series.to("cpu", torch.float64).numpy())
        self.components = _as_tensor(axes, _compute_dtype(train_targets.dtype), train_targets.device)
        return self

    def forward(
        self, input: Tensor, target: Tensor, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Compare a forecast with its target.

        Args:
            input: (B, T, D), (B, T) or any shape in which `dim` is time; float. The forecast.
            target: the same shape; float. No broadcasting. Where `mask` is False it may be NaN.
            mask: bool, broadcastable to the input; True where the position is scored. None scores all.
            weight: non-negative (not checked: that would wait for the device), broadcastable to the input: (D,)
                per variable, (B, 1, 1) per sample.

        Returns:
            A scalar, or with reduction "none" a tensor of the input's shape; at least float32.
        """
        basis: Basis = self.basis
        norm, degree = self.norm, self.degree
        if basis == "pca":
            if self.components is None:
                raise RuntimeError('basis "pca" is learned from data: call fit(train_targets) before the loss')
            basis, norm = self.components, "backward"
        elif basis == "matrix":
            assert self.matrix is not None
            basis = self.matrix
        elif isinstance(basis, str) and basis in MATRIX_BASES:
            check_inputs(input, target, mask, weight)
            if _are_ordinary(input):
                basis, norm, degree = self._built_matrix(basis, input, target), "backward", None
        return fredf_loss(
            input,
            target,
            mask,
            weight,
            alpha=self.alpha,
            basis=basis,
            component=self.component,
            norm=norm,
            p=self.p,
            time_loss=self.time_loss,
            dim=self.dim,
            freq_weight=self.freq_weight,
            horizon_weight=self.horizon_weight,
            degree=degree,
            method=self.method,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return (
            f"alpha={self.alpha}, basis={self.basis!r}, component={self.component!r}, norm={self.norm!r}, "
            f"p={self.p}, time_loss={self.time_loss!r}, dim={self.dim}, reduction={self.reduction!r}"
        )

    def _built_matrix(self, basis: str, input: Tensor, target: Tensor) -> Tensor:
        horizon = input.shape[time_axis(self.dim, input)]
        key = (basis, horizon, self.norm, self.degree, _common_dtype(input, target), input.device)
        built = self._built
        if built is not None and built[0] == key:
            return built[1]
        matrix: Tensor = _named_matrix(*key)
        if _are_ordinary(matrix):
            self._built = (key, matrix)
        return matrix

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        # The components have the shape that the checkpoint says, fitted here or not.
        components = state_dict.get(prefix + "components")
        if components is not None and self.basis == "pca":
            like = components if self.components is None else self.components
            self.components = torch.empty_like(components, device=like.device, dtype=like.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)


def fredf_loss(
    input: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    alpha: float = 0.8,
    basis: Basis = "rfft",
    component: str = "complex",
    norm: str = "backward",
    p: float = 1,
    time_loss: TimeLoss = "mse",
    dim: int = 1,
    freq_weight: Tensor | None = None,
    horizon_weight: Tensor | None = None,
    degree: int | None = None,
    method: str = "auto",
    reduction: str = "mean",
) -> Tensor:
    """Functional form of `FreDFLoss`; see there for arguments, shapes, errors and source.

    "pca" is not among its bases: pass the principal axes as a (K, T) tensor. Weights that are negative are not
    refused here, as to look would wait for the device. The named matrix bases are moved to the input's device
    on every call; the module keeps them there.

    >>> fredf_loss(torch.zeros(8, 24, 3), torch.ones(8, 24, 3), alpha=0.5, basis="dct", norm="ortho").shape
    torch.Size([])
    """
    check_settings(alpha, basis, component, norm, p, time_loss, degree, method, reduction)
    check_inputs(input, target, mask, weight)
    time = time_axis(dim, input)
    axes = _transformed_axes(basis, time, input)
    dtype = _common_dtype(input, target)
    with _no_autocast(input.device.type):
        input, target = input.to(dtype), target.to(dtype)
        mask = None if mask is None else mask.to(input.device)
        transform = _make_transform(basis, norm, degree, method, input, axes)
        terms = Terms(
            alpha=alpha,
            transform=transform,
            axes=axes,
            component=component,
            p=p,
            bin_weight=_bin_weights(basis, freq_weight, transform, input, axes),
            time_loss=time_loss,
            mask=mask,
            weights=_combined_weights(input, mask, weight, horizon_weight, time),
            reduction=reduction,
        )
        obstacle = _obstacle_to_fusing(input, target, terms)
        if method == "fused" and obstacle is not None:
            raise ValueError(f'method="fused" does not work with {obstacle}; use "auto"')
        if method in ("auto", "fused") and obstacle is None:
            return _fused_loss(input, target, terms)
        return fredf_from_terms(input, target, terms)


def _fused_loss(input: Tensor, target: Tensor, terms: Terms) -> Tensor:
    q = {"mse": 2, "mae": 1}.get(terms.time_loss) if isinstance(terms.time_loss, str) else None
    if q is None and terms.alpha < 1:
        frequency = _fused_loss(input, target, replace(terms, alpha=1.0))
        return terms.alpha * frequency + (1 - terms.alpha) * fredf_from_terms(input, target, replace(terms, alpha=0.0))
    transform = cast(FusedTransform, terms.transform)
    last = tuple(range(-transform.num_axes, 0))

    def trailing(x: Tensor) -> Tensor:
        x = x.movedim(terms.axes, last)
        return x[None] if x.ndim == transform.num_axes else x

    mask = None if terms.mask is None else trailing(terms.mask.expand(input.shape))
    weights = None if terms.weights is None else trailing(terms.weights.expand(input.shape))
    input, target = trailing(input), trailing(target)
    lengths = input.shape[-transform.num_axes :]
    # With weights the sum, divided by theirs below.
    reduction = terms.reduction if weights is None else "sum"
    per_element = 1.0 if reduction == "sum" else 1 / input.numel()
    per_coefficient = per_element * math.prod(lengths) / math.prod(transform.num_bins(lengths))
    fused = FusedTerms(
        transform=transform,
        p=terms.p,
        frequency_scale=terms.alpha * per_coefficient,
        bin_weight=terms.bin_weight,
        q=q if terms.alpha < 1 else None,
        time_scale=(1 - terms.alpha) * per_element,
        mask=mask,
        weights=weights,
        root=None if weights is None else root(weights, terms.p),
    )

    def differentiable(input: Tensor, target: Tensor) -> Tensor:
        axes = tuple(range(input.ndim - transform.num_axes, input.ndim))
        moved = replace(terms, axes=axes, mask=mask, weights=weights, reduction=reduction)
        return fredf_from_terms(input, target, moved)

    loss = fused_loss(input, target, fused, differentiable)
    return loss / total_weight(weights) if weights is not None and terms.reduction == "mean" else loss


def _obstacle_to_fusing(input: Tensor, target: Tensor, terms: Terms) -> str | None:
    """Say what keeps the fused pass from this call, or None."""
    if terms.alpha == 0:
        return "alpha=0, which leaves nothing to transform"
    if not hasattr(terms.transform, "adjoint_"):
        return "a callable basis, whose adjoint is unknown"
    if terms.component != "complex":
        return f"component={terms.component!r}"
    if terms.reduction == "none":
        return 'reduction="none"'
    if not _are_ordinary(input, target):
        return "torch.compile, export, torch.func, forward-mode differentiation, meta tensors or tensor subclasses"
    constants = (terms.weights, terms.bin_weight, getattr(terms.transform, "matrix", None))
    if any(constant is not None and constant.requires_grad for constant in constants):
        return "a weight, freq_weight, horizon_weight or basis that requires grad"
    return None


def _are_ordinary(*tensors: Tensor) -> bool:
    """Whether raw buffers may be worked on in place and kept: not under the compiler, functorch and the like."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch.onnx.is_in_onnx_export()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(type(x) not in (Tensor, nn.Parameter) or x.is_meta for x in tensors)
    )


# ---- building the terms --------------------------------------------------------------------------------


def _transformed_axes(basis: Basis, time: int, input: Tensor) -> tuple[int, ...]:
    if not isinstance(basis, str) or basis not in ("rfft_variables", "rfft2"):
        return (time,)
    if input.ndim < 2:
        raise ValueError(f"basis {basis!r} needs an axis of variables besides time, got {tuple(input.shape)}")
    variables = input.ndim - 1 if time != input.ndim - 1 else input.ndim - 2
    return (variables,) if basis == "rfft_variables" else (time, variables)


def _make_transform(
    basis: Basis, norm: str, degree: int | None, method: str, input: Tensor, axes: tuple[int, ...]
) -> Transform:
    horizon = input.shape[axes[0]]
    if isinstance(basis, Tensor):
        if basis.shape[1] != horizon:
            raise ValueError(
                f"basis: a matrix of shape {tuple(basis.shape)} takes a horizon of {basis.shape[1]}, the input "
                f"has {horizon} steps along the time axis"
            )
        return Matrix(basis.to(input.device, input.dtype))
    if not isinstance(basis, str):
        return Custom(basis)
    if basis == "pca":
        raise ValueError('basis "pca" is learned from data: use FreDFLoss(basis="pca").fit(train_targets)')
    if basis not in FOURIER_BASES:
        return Matrix(_named_matrix(basis, _constant_size(input, axes[0]), norm, degree, input.dtype, input.device))
    # FFT kernels are a given on these devices only, and ONNX has no complex numbers.
    if method == "matmul" or (
        method == "auto" and (input.device.type not in ("cpu", "cuda", "meta") or torch.onnx.is_in_onnx_export())
    ):
        return FourierMatmul(len(axes), norm)
    return Fourier(len(axes), norm)


def _named_matrix(
    name: str, horizon: int, norm: str, degree: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return _as_tensor(basis_matrix(name, horizon, norm, degree), dtype, device)


# What torch.compiler.assume_constant_result does, without importing the compiler, which takes seconds.
_named_matrix._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _constant_size(x: Tensor, axis: int) -> int:
    # A compiler that takes sizes for variables must bind this one to its value: a matrix is built for it.
    return len(range(int(x.shape[axis])))


def _as_tensor(matrix: NDArray[np.float64], dtype: torch.dtype, device: torch.device) -> Tensor:
    # What is first needed in validation must serve training too, where an inference tensor would be refused.
    with torch.inference_mode(False):
        return torch.tensor(matrix, dtype=dtype, device=device)


def _bin_weights(
    basis: Basis, freq_weight: Tensor | None, transform: Transform, input: Tensor, axes: tuple[int, ...]
) -> Tensor | None:
    """Return factors of the coefficients such that a plain mean over them is the mean over the basis's bins."""
    check_tensor("freq_weight", freq_weight)
    lengths = torch.Size([input.shape[axis] for axis in axes])
    if freq_weight is not None:
        freq_weight = freq_weight.to(input.device, input.dtype)
    if isinstance(basis, str) and basis == "fft":
        return _folded(freq_weight, lengths[0], input)
    if freq_weight is not None:
        check_weight_shape("freq_weight", freq_weight, transform.num_bins(lengths))
    return freq_weight


def _folded(freq_weight: Tensor | None, horizon: int, like: Tensor) -> Tensor:
    # Bin T - k is the conjugate of bin k and has the same distance: fold it onto bin k, where k is not T - k.
    if freq_weight is None:
        freq_weight = torch.ones(horizon, device=like.device, dtype=like.dtype)
    check_weight_shape("freq_weight", freq_weight, (horizon,))
    own = torch.arange(horizon // 2 + 1, device=like.device)
    mirror = -own % horizon
    folded = freq_weight[own] + torch.where(own == mirror, 0.0, freq_weight[mirror])
    return folded * (len(own) / horizon)


def _combined_weights(
    input: Tensor, mask: Tensor | None, weight: Tensor | None, horizon_weight: Tensor | None, time: int
) -> Tensor | None:
    check_tensor("horizon_weight", horizon_weight)
    combined = None if weight is None else weight.to(input.device, input.dtype)
    if horizon_weight is not None:
        check_weight_shape("horizon_weight", horizon_weight, (input.shape[time],))
        shape = [1] * input.ndim
        shape[time] = -1
        profile = horizon_weight.to(input.device, input.dtype).reshape(shape)
        combined = profile if combined is None else combined * profile
    if mask is None:
        return combined
    return mask.to(input.dtype) if combined is None else torch.where(mask, combined, 0.0)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _common_dtype(input: Tensor, target: Tensor) -> torch.dtype:
    return torch.promote_types(_compute_dtype(input.dtype), _compute_dtype(target.dtype))


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # entering autocast takes 10 us, a twentieth of a small loss
