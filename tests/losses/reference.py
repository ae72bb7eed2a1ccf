"""FreDF once more, in float64 numpy and straight from the formulas: what the tests of the loss compare with.

Sums are written out (the Fourier transform is T^2 products); nothing of torchext is used.
Shape legend: `S` the shape of the signals, `L` lengths of the transformed axes, `K` numbers of coefficients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.polynomial import Chebyshev, Hermite, Laguerre, Legendre
from numpy.typing import NDArray

Array = NDArray[np.float64]

FAMILIES = {"legendre": Legendre, "chebyshev": Chebyshev, "hermite": Hermite, "laguerre": Laguerre}
DOMAINS = {"legendre": (-1, 1), "chebyshev": (-1, 1), "hermite": (-5, 5), "laguerre": (0, 5)}


def dft_matrix(length: int) -> NDArray[np.complex128]:
    k = np.arange(length)
    return np.exp(-2j * np.pi * np.outer(k, k) / length)


def fourier(basis: str, norm: str = "backward") -> Callable[[Array], Array]:
    """Return the transform of the last axis, or for "rfft2" the last two."""

    def transform(x: Array) -> Array:
        lengths = x.shape[-2:] if basis == "rfft2" else x.shape[-1:]
        result = x @ dft_matrix(x.shape[-1]).T
        if basis != "fft":
            result = result[..., : x.shape[-1] // 2 + 1]
        if basis == "rfft2":
            result = dft_matrix(x.shape[-2]) @ result
        count = np.prod(lengths)
        return result / {"backward": 1, "ortho": np.sqrt(count), "forward": count}[norm]

    return transform


def polynomials(family: str, horizon: int, degree: int) -> Array:
    """Rows P_0 .. P_degree at equally spaced points of the family's interval."""
    t = np.linspace(*DOMAINS[family], horizon)
    return np.stack([FAMILIES[family].basis(n)(t) for n in range(degree + 1)])


def polynomial_matrix(family: str, horizon: int, degree: int) -> Array:
    """The authors' scaling; for Hermite, rows of root mean square 1 (theirs overflow)."""
    rows = polynomials(family, horizon, degree)
    if family == "legendre":
        rows = rows * (2 * np.arange(degree + 1)[:, None] + 1)
    elif family == "chebyshev":
        rows = rows * 2 / np.pi
    elif family == "hermite":
        rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True))
    return rows / horizon


def matrix(rows: Array) -> Callable[[Array], Array]:
    return lambda x: x @ rows.T


def angle(spectrum: NDArray[np.complex128]) -> Array:
    """The phase, 0 for what is rounding error beside the largest coefficient of its series."""
    loud = np.abs(spectrum) > 1e-12 * np.abs(spectrum).max(axis=-1, keepdims=True)
    return np.where(loud, np.angle(spectrum), 0)


def distance(component: str, a: NDArray[np.complex128], b: NDArray[np.complex128]) -> Array:
    """What the authors take the mean of, before the power; phases wrapped."""
    magnitudes = np.abs(np.abs(a) - np.abs(b))
    phases = np.abs(np.angle(np.exp(1j * (angle(a) - angle(b)))))
    return {
        "complex": np.abs(a - b)[None],
        "mag": magnitudes[None],
        "phase": phases[None],
        "mag-phase": np.stack([magnitudes, phases]),
        "complex-phase": np.abs(angle(a - b))[None],
        "complex-mag-phase": np.stack([np.abs(a - b), np.abs(angle(a - b))]),
    }[component]


def time_losses(name: str, a: Array, b: Array) -> Array:
    if name == "smape":
        return 200 * np.abs(a - b) / (np.abs(a) + np.abs(b))
    return {"mse": (a - b) ** 2, "mae": np.abs(a - b)}[name]


def fredf(
    input: Array,
    target: Array,
    transform: Callable[[Array], Array],
    *,
    alpha: float = 0.8,
    component: str = "complex",
    p: float = 1,
    time_loss: str = "mse",
    axes: tuple[int, ...] = (1,),
    bin_weight: Array | None = None,
) -> float:
    """alpha * mean over all coefficients + (1 - alpha) * mean over all time steps, no weights."""
    last = tuple(range(-len(axes), 0))
    a, b = (transform(np.moveaxis(x, axes, last)) for x in (input, target))
    distances = distance(component, a, b) ** p
    if bin_weight is not None:
        distances = distances * bin_weight
    return float(alpha * distances.mean() + (1 - alpha) * time_losses(time_loss, input, target).mean())


def weighted_fredf(
    input: Array,
    target: Array,
    weights: Array,
    transform: Callable[[Array], Array],
    *,
    alpha: float = 0.8,
    p: float = 1,
    time_loss: str = "mse",
    axes: tuple[int, ...] = (1,),
) -> float:
    """With weights of the signals' shape, 0 where the signals may be NaN."""
    weights = np.broadcast_to(weights, input.shape)
    a, b = (np.where(weights > 0, x, 0) for x in (input, target))
    time = np.where(weights > 0, weights * time_losses(time_loss, np.where(weights > 0, a, 1), b), 0)
    last = tuple(range(-len(axes), 0))
    spectrum = transform(np.moveaxis(weights ** (1 / p) * (a - b), axes, last))
    frequency = (np.abs(spectrum) ** p).mean() / weights.mean()
    return float(alpha * frequency + (1 - alpha) * time.sum() / weights.sum())
