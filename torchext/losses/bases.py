"""Analysis matrices of the real-valued bases: `coefficients = matrix @ series`.

Built in float64 with numpy and cached; `torchext.losses.fredf` casts them to what it computes in.
`K` is the number of coefficients, `T` the horizon (number of time steps).

Source: FreDF (ICLR 2025), section 4.4 and the authors' code, for the polynomial families and their
scaling; Time-o1 (2025) for the principal components.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.polynomial import chebyshev, laguerre, legendre
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

POLYNOMIALS = ("legendre", "chebyshev", "hermite", "laguerre")
MATRIX_BASES = ("dct", *POLYNOMIALS, "haar")


@lru_cache(maxsize=8)  # a job uses one or two, of 4 MB each at T = 720
def basis_matrix(name: str, horizon: int, norm: str, degree: int | None = None) -> Matrix:
    """Return the (K, T) float64 analysis matrix of a basis.

    Args:
        name: one of `MATRIX_BASES`.
        horizon: T, at least 1.
        norm: "backward" is the family's own scaling (DCT-II as in `scipy.fft`, polynomials as in the
            authors' code); "ortho" makes the rows orthonormal. Haar is orthonormal under both.
        degree: highest polynomial degree, 0 <= degree < T; None means T - 1. Polynomials only.

    Returns:
        The matrix, shared and read-only.

    Raises:
        ValueError: a norm or degree that this basis and horizon do not have.
    """
    if norm not in ("backward", "ortho"):
        raise ValueError(f'norm must be "backward" or "ortho" for basis {name!r}, got {norm!r}')
    if degree is not None and name not in POLYNOMIALS:
        raise ValueError(f"degree is for the polynomial bases {POLYNOMIALS}, got basis {name!r}")
    if name == "dct":
        matrix = _dct(horizon, norm)
    elif name == "haar":
        matrix = _haar(horizon)
    elif norm == "ortho":
        matrix = _orthonormal_polynomials(horizon, _resolve_degree(degree, horizon))
    else:
        matrix = _POLYNOMIAL_BUILDERS[name](horizon, _resolve_degree(degree, horizon))
    matrix.setflags(write=False)
    return matrix


def principal_components(series: Matrix) -> Matrix:
    """Return the (T, T) orthonormal principal axes of `series` (N, T), largest variance first.

    Each axis is signed so that its largest entry is positive, which makes the result reproducible.
    Where there are fewer series than time steps the remaining axes complete the basis.
    """
    centred = series - series.mean(axis=0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    axes = axes.T[::-1]
    peaks = np.take_along_axis(axes, np.abs(axes).argmax(axis=1, keepdims=True), axis=1)
    return np.ascontiguousarray(axes * np.where(peaks < 0, -1.0, 1.0))


def _resolve_degree(degree: int | None, horizon: int) -> int:
    if degree is None:
        return horizon - 1
    if not 0 <= degree < horizon:
        raise ValueError(
            f"degree must lie in 0..{horizon - 1} for a horizon of {horizon} (that many coefficients carry "
            f"all there is to know), got {degree}"
        )
    return degree


def _dct(horizon: int, norm: str) -> Matrix:
    k, t = np.arange(horizon)[:, None], np.arange(horizon)[None, :]
    matrix: Matrix = 2 * np.cos(np.pi * k * (2 * t + 1) / (2 * horizon))
    if norm == "ortho":
        matrix *= np.where(k == 0, np.sqrt(1 / (4 * horizon)), np.sqrt(1 / (2 * horizon)))
    return matrix


def _legendre(horizon: int, degree: int) -> Matrix:
    rows: Matrix = legendre.legvander(np.linspace(-1, 1, horizon), degree).T
    return rows * (2 * np.arange(degree + 1)[:, None] + 1) / horizon


def _chebyshev(horizon: int, degree: int) -> Matrix:
    rows: Matrix = chebyshev.chebvander(np.linspace(-1, 1, horizon), degree).T
    return rows * 2 / (np.pi * horizon)


def _laguerre(horizon: int, degree: int) -> Matrix:
    rows: Matrix = laguerre.lagvander(np.linspace(0, 5, horizon), degree).T
    return rows / horizon


def _hermite(horizon: int, degree: int) -> Matrix:
    """Hermite rows on [-5, 5], each scaled to a root mean square of 1, then divided by T.

    H_n itself leaves float32 at degree 30 and float64 at degree 270, hence the three-term recurrence of
    the normalised polynomials and the scaling per row.
    """
    t = np.linspace(-5, 5, horizon)
    rows = np.empty((degree + 1, horizon))
    rows[0] = 1.0
    if degree > 0:
        rows[1] = np.sqrt(2) * t
    for n in range(1, degree):
        rows[n + 1] = np.sqrt(2 / (n + 1)) * t * rows[n] - np.sqrt(n / (n + 1)) * rows[n - 1]
    rms = np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    return rows / np.where(rms > 0, rms, 1.0) / horizon


_POLYNOMIAL_BUILDERS: dict[str, Callable[[int, int], Matrix]] = {
    "legendre": _legendre,
    "chebyshev": _chebyshev,
    "hermite": _hermite,
    "laguerre": _laguerre,
}


def _orthonormal_polynomials(horizon: int, degree: int) -> Matrix:
    """Polynomials orthonormal over the T equally spaced points, by degree, leading coefficient positive.

    All families span the same spaces on an affine image of the same grid, so this is the answer for each of
    them: the discrete Chebyshev (Gram) polynomials. They come from their three-term recurrence as eigenvectors
    of its tridiagonal matrix, whose eigenvalues are the points. That is orthonormal to rounding at any degree;
    running the recurrence forward, or a QR of the polynomials themselves, loses all digits at high degree.
    """
    n = np.arange(1, horizon)
    jacobi = np.zeros((horizon, horizon))
    jacobi[n, n - 1] = np.sqrt(n**2 * (horizon**2 - n**2) / (4 * (4 * n**2 - 1)))
    _, rows = np.linalg.eigh(jacobi)  # reads the lower triangle
    return np.ascontiguousarray((rows * np.sign(rows[0]))[: degree + 1])


def _haar(horizon: int) -> Matrix:
    """Haar wavelets, coarse to fine; segments of odd length split as evenly as they can (unbalanced Haar)."""
    rows = [np.full(horizon, np.sqrt(1 / horizon))]
    segments = [(0, horizon)]
    while segments:
        halves = []
        for start, stop in segments:
            if stop - start < 2:
                continue
            middle = (start + stop + 1) // 2
            left, right = middle - start, stop - middle
            row = np.zeros(horizon)
            row[start:middle] = np.sqrt(right / (left * (left + right)))
            row[middle:stop] = -np.sqrt(left / (right * (left + right)))
            rows.append(row)
            halves += [(start, middle), (middle, stop)]
        segments = halves
    return np.stack(rows)
