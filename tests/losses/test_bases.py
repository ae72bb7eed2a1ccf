"""Matrices of the real bases."""

from __future__ import annotations

import numpy as np
import pytest

from tests.losses import reference
from torchext.losses.bases import MATRIX_BASES, POLYNOMIALS, basis_matrix, principal_components


@pytest.mark.parametrize("horizon", [1, 2, 3, 8, 95, 97, 192])
@pytest.mark.parametrize("name", MATRIX_BASES)
def test_ortho_rows_are_orthonormal(name: str, horizon: int) -> None:
    rows = basis_matrix(name, horizon, "ortho")
    assert rows.shape == (horizon, horizon)
    np.testing.assert_allclose(rows @ rows.T, np.eye(horizon), atol=1e-12)


def test_polynomials_stay_finite_and_orthonormal_at_full_degree_of_the_longest_horizon() -> None:
    for name in POLYNOMIALS:
        assert np.isfinite(basis_matrix(name, 720, "backward").astype(np.float32)).all()
    rows = basis_matrix("legendre", 720, "ortho")
    np.testing.assert_allclose(rows @ rows.T, np.eye(720), atol=1e-11)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_ortho_polynomials_are_gram_schmidt_of_powers(name: str) -> None:
    # QR of the family's own polynomials, low enough in degree for QR to be exact.
    horizon, degree = 40, 8
    q, r = np.linalg.qr(reference.polynomials(name, horizon, degree).T)
    leading = {"laguerre": (-1.0) ** np.arange(degree + 1)}.get(name, 1.0)  # L_n has the sign (-1)^n in front of t^n
    rows = (q * np.sign(np.diag(r)) * leading).T
    np.testing.assert_allclose(basis_matrix(name, horizon, "ortho", degree), rows, atol=1e-10)


def test_polynomials_up_to_a_degree_are_the_first_rows() -> None:
    for name in POLYNOMIALS:
        for norm in ("backward", "ortho"):
            assert np.array_equal(basis_matrix(name, 20, norm, 6), basis_matrix(name, 20, norm)[:7])


def test_hermite_rows_are_those_of_numpy_far_beyond_what_float32_holds() -> None:
    np.testing.assert_allclose(
        basis_matrix("hermite", 96, "backward"), reference.polynomial_matrix("hermite", 96, 95), rtol=1e-7, atol=1e-9
    )


def test_haar_is_the_classic_one_at_eight() -> None:
    s, r = np.sqrt(1 / 8), np.sqrt(1 / 2)
    expected = [
        [s, s, s, s, s, s, s, s],
        [s, s, s, s, -s, -s, -s, -s],
        [0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0.5, 0.5, -0.5, -0.5],
        [r, -r, 0, 0, 0, 0, 0, 0],
        [0, 0, r, -r, 0, 0, 0, 0],
        [0, 0, 0, 0, r, -r, 0, 0],
        [0, 0, 0, 0, 0, 0, r, -r],
    ]
    for norm in ("backward", "ortho"):
        np.testing.assert_allclose(basis_matrix("haar", 8, norm), expected, atol=1e-15)


def test_haar_rows_are_two_steps_each() -> None:
    for row in basis_matrix("haar", 97, "ortho")[1:]:
        assert len(np.unique(row[row != 0])) == 2
        assert abs(row.sum()) < 1e-12


def test_matrices_are_shared_and_cannot_be_changed() -> None:
    assert basis_matrix("dct", 12, "ortho") is basis_matrix("dct", 12, "ortho")
    with pytest.raises(ValueError, match="read-only"):
        basis_matrix("dct", 12, "ortho")[0, 0] = 1


@pytest.mark.parametrize("degree", [-1, 12])
def test_degree_out_of_range_is_refused(degree: int) -> None:
    with pytest.raises(ValueError, match=rf"degree must lie in 0..11 .* got {degree}"):
        basis_matrix("legendre", 12, "backward", degree)


def test_settings_that_a_basis_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="norm must be \"backward\" or \"ortho\" for basis 'dct', got 'forward'"):
        basis_matrix("dct", 12, "forward")
    with pytest.raises(ValueError, match="degree is for the polynomial bases"):
        basis_matrix("haar", 12, "ortho", 3)


def test_principal_components_are_singular_vectors_by_falling_variance() -> None:
    rng = np.random.default_rng(0)
    series = rng.normal(size=(300, 6)) * [9, 7, 5, 3, 2, 1] @ np.linalg.qr(rng.normal(size=(6, 6)))[0] + 4
    _, _, expected = np.linalg.svd(series - series.mean(axis=0))
    axes = principal_components(series)
    np.testing.assert_allclose(np.abs(axes), np.abs(expected), atol=1e-10)
    variances = ((series - series.mean(axis=0)) @ axes.T).var(axis=0)
    assert (np.diff(variances) < 0).all()
    assert (axes[np.arange(6), np.abs(axes).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("num_series", [1, 3])
def test_principal_components_of_few_series_complete_the_basis(num_series: int) -> None:
    axes = principal_components(np.random.default_rng(0).normal(size=(num_series, 10)))
    np.testing.assert_allclose(axes @ axes.T, np.eye(10), atol=1e-12)
