"""FreDFLoss as a module: errors, state, copies, threads, settings changed later, the fitted basis."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.losses import reference
from torchext.losses import FreDFLoss, fredf_loss

MATRIX_BASES = ["dct", "legendre", "chebyshev", "hermite", "laguerre", "haar"]


def signals(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def test_module_and_function_have_the_same_settings() -> None:
    module = list(inspect.signature(FreDFLoss).parameters.values())
    function = [p for p in inspect.signature(fredf_loss).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in module] == [(p.name, p.default) for p in function]


# ---- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"alpha": 1.1}, ValueError, r"alpha must lie in \[0, 1\], got 1.1"),
        ({"alpha": float("nan")}, ValueError, r"alpha must lie in \[0, 1\], got nan"),
        ({"alpha": torch.tensor(0.5)}, TypeError, "alpha must be a number, got Tensor"),
        ({"p": 0.5}, ValueError, "p must be at least 1 and finite, got 0.5"),
        ({"p": float("inf")}, ValueError, "p must be at least 1 and finite, got inf"),
        ({"p": "1"}, TypeError, "p must be a number, got str"),
        ({"basis": "wavelet"}, ValueError, "basis must be one of 'rfft', .* linear callable; got 'wavelet'"),
        ({"basis": 3}, TypeError, "basis must be a name, a .* tensor or a callable, got int"),
        ({"basis": torch.ones(3)}, ValueError, r"basis: a matrix must be a float tensor \(K, T\), got torch.float32"),
        ({"basis": torch.ones(3, 3).int()}, ValueError, "basis: a matrix must be a float tensor .* torch.int32"),
        ({"component": "real"}, ValueError, "component must be one of 'complex', .*; got 'real'"),
        (
            {"component": "mag", "basis": "dct"},
            ValueError,
            "component='mag' needs complex .* the basis, 'dct', has not",
        ),
        ({"component": "phase", "basis": torch.eye(6)}, ValueError, "the basis, a Tensor, has not"),
        ({"norm": "unit"}, ValueError, "norm must be one of 'backward', 'ortho', 'forward'; got 'unit'"),
        ({"norm": "forward", "basis": "dct"}, ValueError, "norm=\"forward\" is defined for .* got 'dct'"),
        (
            {"time_loss": "huber"},
            ValueError,
            "time_loss must be one of 'mse', 'mae', 'smape' or a callable; got 'huber'",
        ),
        ({"method": "fast"}, ValueError, "method must be one of .*; got 'fast'"),
        ({"method": "fft", "basis": "haar"}, ValueError, 'method="fft" is for .* got \'haar\'; use "auto"'),
        ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'; got 'avg'"),
        ({"degree": 3}, ValueError, "degree is for the polynomial bases .* got 'rfft'"),
        ({"degree": 2.5, "basis": "hermite"}, TypeError, "degree must be an integer, got float"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FreDFLoss(**settings)
    with pytest.raises(error, match=message):
        fredf_loss(*signals(2, 6, 2), **settings)


@pytest.mark.parametrize("name", ["freq_weight", "horizon_weight"])
def test_weights_in_settings(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must not be negative, got a minimum of -1"):
        FreDFLoss(**{name: torch.tensor([1.0, -1.0])})
    with pytest.raises(ValueError, match=f"{name} must not be negative, got a minimum of nan"):
        FreDFLoss(**{name: torch.tensor([1.0, torch.nan])})
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        FreDFLoss(**{name: [1.0, 2.0]})
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        fredf_loss(*signals(2, 6, 2), **{name: [1.0, 2.0]})
    for settings in ({}, {"method": "fft"}, {"basis": "fft"}, {"basis": "dct"}, {"basis": torch.fft.rfft}):
        with pytest.raises(ValueError, match=rf"{name} must have shape \(\d,\) for this input, got \(9,\)"):
            FreDFLoss(**{name: torch.ones(9)}, **settings)(*signals(2, 6, 2))


def test_low_pass_masks_may_be_bool_or_int() -> None:
    input, target = signals(2, 6, 2)
    expected = fredf_loss(input, target, freq_weight=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    for dtype in (torch.bool, torch.int64):
        weight = torch.tensor([1, 1, 0, 0], dtype=dtype)
        assert torch.equal(FreDFLoss(freq_weight=weight)(input, target), expected)


@pytest.mark.parametrize("settings", [{}, {"basis": "dct"}, {"method": "matmul"}], ids=str)
def test_inputs_that_are_refused(settings: dict[str, Any]) -> None:
    input, target = signals(4, 6, 2)
    criterion = FreDFLoss(**settings)

    def refused(error: type[Exception], message: str, *args: Any) -> None:
        with pytest.raises(error, match=message):
            criterion(*args)

    refused(TypeError, "input must be real floating point, got torch.int64", input.long(), target)
    refused(TypeError, "target must be real floating point, got torch.complex128", input, target + 0j)
    refused(TypeError, "target must be real floating point, got torch.bool", input, target > 0)
    refused(TypeError, "input must be a tensor, got list", input.tolist(), target)
    refused(TypeError, "target must be a tensor, got ndarray", input, target.numpy())
    for other in (target[:1], target[:, :, :1], target[..., 0], target[:, :5], target[None]):
        refused(ValueError, r"must have the same shape .* \(4, 6, 2\) and", input, other)
    for empty in ((0, 6, 2), (4, 0, 2), (4, 6, 0)):
        refused(ValueError, r"input must not be empty, got shape \(", torch.zeros(empty), torch.zeros(empty))
    refused(ValueError, r"dim=1 names no axis of an input of shape \(4,\)", input[:, 0, 0], target[:, 0, 0])
    refused(TypeError, "mask must be bool, .* got torch.float64; grade with weight=", input, target, input)
    refused(TypeError, "mask must be a tensor, got bool", input, target, True)
    refused(TypeError, "weight must be a tensor, got float", input, target, None, 2.0)
    for shape in ((4, 6), (3,), (4, 6, 3), (1, 4, 6, 2)):
        mask = torch.ones(shape, dtype=torch.bool)
        refused(ValueError, r"mask of shape .* does not broadcast to the input's \(4, 6, 2\)", input, target, mask)
        refused(ValueError, "weight of shape .* does not broadcast", input, target, None, mask.float())


def test_bases_that_do_not_fit_are_refused() -> None:
    input, target = signals(4, 6, 2)
    with pytest.raises(ValueError, match=r"shape \(3, 5\) takes a horizon of 5, the input has 6 steps"):
        FreDFLoss(basis=torch.ones(3, 5))(input, target)
    with pytest.raises(ValueError, match=r"basis: the callable must map .* given \(4, 2, 6\) and returned \(4, 2\)"):
        FreDFLoss(basis=lambda x: x.sum(-1))(input, target)
    with pytest.raises(ValueError, match="returned float"):
        FreDFLoss(basis=lambda x: 1.0)(input, target)
    with pytest.raises(ValueError, match="component='phase' needs complex coefficients, the basis returned real"):
        FreDFLoss(basis=lambda x: x, component="phase")(input, target)
    with pytest.raises(ValueError, match="needs an axis of variables besides time"):
        FreDFLoss(basis="rfft2", dim=0)(input[0, :, 0], target[0, :, 0])
    with pytest.raises(ValueError, match=r"degree must lie in 0..5 for a horizon of 6 .* got 6"):
        FreDFLoss(basis="legendre", degree=6)(input, target)


def test_time_losses_that_reduce_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per-element losses of shape \(4, 6, 2\) \(reduction=\"none\"\), got \(\)"):
        FreDFLoss(time_loss=torch.nn.MSELoss())(*signals(4, 6, 2))
    with pytest.raises(ValueError, match="got float"):
        FreDFLoss(time_loss=lambda a, b: 1.0)(*signals(4, 6, 2))


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({"alpha": 0.0}, "nothing to transform"),
        ({"component": "mag"}, "component='mag'"),
        ({"basis": torch.fft.rfft}, "a callable basis"),
        ({"reduction": "none"}, 'reduction="none"'),
    ],
)
def test_fused_says_what_keeps_it_from_working(settings: dict[str, Any], obstacle: str) -> None:
    with pytest.raises(ValueError, match=f'method="fused" does not work with .*{obstacle}.*; use "auto"'):
        FreDFLoss(**settings, method="fused")(*signals(2, 6, 2))


def test_unknown_paper_setting() -> None:
    with pytest.raises(ValueError, match=r"dataset: the authors give settings for etth1, .*; got 'exchange'"):
        FreDFLoss.paper("exchange")


# ---- settings changed after construction ---------------------------------------------------------------


def test_settings_can_be_changed() -> None:
    input, target = signals(3, 8, 2)
    criterion = FreDFLoss()
    criterion(input, target)
    changes: dict[str, Any] = {
        "alpha": 0.3,
        "norm": "ortho",
        "p": 2,
        "time_loss": "mae",
        "reduction": "none",
        "component": "mag",
        "method": "matmul",
        "freq_weight": torch.rand(5),
        "horizon_weight": torch.rand(8),
    }
    for name, value in changes.items():
        setattr(criterion, name, value)
    torch.testing.assert_close(criterion(input, target), fredf_loss(input, target, **changes))
    for basis, degree in (("legendre", 3), ("legendre", None), ("dct", None), ("haar", None)):
        criterion = FreDFLoss(basis="legendre")
        criterion(input, target)
        criterion.basis, criterion.degree, criterion.norm = basis, degree, "ortho"
        expected = fredf_loss(input, target, basis=basis, degree=degree, norm="ortho")
        torch.testing.assert_close(criterion(input, target), expected)
    rows = torch.randn(3, 8)
    criterion = FreDFLoss()
    criterion.basis = rows
    torch.testing.assert_close(criterion(input, target), fredf_loss(input, target, basis=rows))


@pytest.mark.parametrize(
    ("basis", "name", "value"),
    [
        ("rfft", "alpha", 2.0),
        ("rfft", "reduction", "avg"),
        ("dct", "norm", "forward"),
        ("dct", "method", "fft"),
        ("haar", "degree", 2),
        ("legendre", "degree", 8),
    ],
)
def test_changed_settings_are_checked(basis: str, name: str, value: Any) -> None:
    criterion = FreDFLoss(basis=basis)
    criterion(*signals(3, 8, 2))
    setattr(criterion, name, value)
    with pytest.raises(ValueError, match=name):
        criterion(*signals(3, 8, 2))


# ---- state, copies, devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["rfft", *MATRIX_BASES, "pca", "matrix"])
def test_copies_give_the_same_loss(basis: str) -> None:
    input, target = signals(5, 8, 2)
    criterion = FreDFLoss(basis=torch.randn(3, 8) if basis == "matrix" else basis, horizon_weight=torch.rand(8))
    if basis == "pca":
        criterion.fit(target)
    expected = criterion(input, target)
    saved = io.BytesIO()
    torch.save(criterion, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(criterion),
        copy.copy(criterion),
        pickle.loads(pickle.dumps(criterion)),
        torch.load(saved, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(input, target), expected)


def test_only_what_is_learned_is_state() -> None:
    for criterion in (FreDFLoss(basis="dct", freq_weight=torch.ones(8)), FreDFLoss(basis=torch.eye(8))):
        criterion(*signals(2, 8, 2))
        assert criterion.state_dict() == {}
        criterion.load_state_dict({})
        assert list(criterion.parameters()) == []


@pytest.mark.parametrize("basis", ["rfft", *MATRIX_BASES])
def test_conversions_of_the_module_do_not_change_named_bases(basis: str) -> None:
    input, target = signals(3, 8, 2)
    criterion = FreDFLoss(basis=basis)
    expected = criterion(input, target)
    for convert in ("half", "bfloat16", "double", "float"):
        getattr(criterion, convert)()
        assert torch.equal(criterion(input, target), expected)
        torch.testing.assert_close(criterion(input.float(), target.float()), expected.float())
    assert criterion.to("meta")(input.to("meta"), target.to("meta")).is_meta


@pytest.mark.parametrize("basis", ["rfft", "fft", "rfft2", "dct", "legendre"])
def test_meta_and_fake_tensors(basis: str) -> None:
    input, target = signals(3, 8, 2)
    criterion = FreDFLoss(basis=basis)
    for mask in (None, torch.ones(3, 8, 2, dtype=torch.bool)):
        on_meta = criterion(input.to("meta"), target.to("meta"), None if mask is None else mask.to("meta"))
        assert on_meta.is_meta
        assert on_meta.shape == ()
        with FakeTensorMode() as mode:
            fakes = [None if x is None else mode.from_tensor(x) for x in (input, target, mask)]
            assert isinstance(criterion(*fakes), FakeTensor)
        # Nothing fake is kept.
        assert criterion(input, target, mask).item() == pytest.approx(fredf_loss(input, target, basis=basis).item())
        with FakeTensorMode() as mode:
            assert isinstance(criterion(mode.from_tensor(input), mode.from_tensor(target)), FakeTensor)


def test_built_under_another_default_device() -> None:
    input, target = signals(3, 8, 2)
    with torch.device("meta"):
        criterion = FreDFLoss(basis="dct", freq_weight=torch.ones(8))
        assert criterion.freq_weight is not None
        assert criterion.freq_weight.is_meta
        loss = FreDFLoss(basis="dct")(input, target)
    torch.testing.assert_close(loss, fredf_loss(input, target, basis="dct"))


def test_subclasses_take_ordinary_operations() -> None:
    class Tagged(Tensor):
        pass

    input, target = signals(3, 8, 2)
    for basis in ("rfft", "dct"):
        loss = FreDFLoss(basis=basis)(input.as_subclass(Tagged), target)
        assert isinstance(loss, Tagged)
        torch.testing.assert_close(loss.as_subclass(Tensor), fredf_loss(input, target, basis=basis))


def test_parameters_as_inputs() -> None:
    input, target = signals(3, 8, 2)
    parameter = torch.nn.Parameter(input.clone())
    FreDFLoss(method="fused")(parameter, target).backward()
    assert parameter.grad is not None


def test_printing_does_not_print_matrices() -> None:
    text = repr(FreDFLoss(basis=torch.zeros(100, 100)))
    assert "alpha=0.8" in text
    assert len(text) < 300
    with pytest.raises(ValueError, match="needs complex") as caught:
        FreDFLoss(basis=torch.zeros(100, 100), component="mag")
    assert len(str(caught.value)) < 200


# ---- threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_one_module_in_threads_with_different_horizons(basis: str) -> None:
    criterion = FreDFLoss(basis=basis)
    horizons = (7, 8, 9)
    expected = {t: fredf_loss(torch.ones(1, t, 1), torch.zeros(1, t, 1), basis=basis).item() for t in horizons}
    wrong: list[object] = []
    start = threading.Barrier(len(horizons))

    def work(horizon: int) -> None:
        start.wait()
        for _ in range(150):
            input = torch.ones(1, horizon, 1, requires_grad=True)
            try:
                loss = criterion(input, torch.zeros(1, horizon, 1))
                loss.backward()
                if loss.item() != pytest.approx(expected[horizon], rel=1e-5):
                    wrong.append(loss.item())
            except Exception as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(t,), name=f"loss-{t}") for t in horizons]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_what_a_thread_has_looked_up_stays_whole() -> None:
    # The interleaving that the test above may miss: another horizon is built just after this one is looked up.
    criterion = FreDFLoss(basis="dct")
    short, long = torch.randn(1, 7, 1), torch.randn(1, 9, 1)
    criterion(short, torch.zeros_like(short))
    looked_up = criterion._built
    criterion(long, torch.zeros_like(long))
    assert looked_up is not None
    assert looked_up[0][1] == 7
    assert looked_up[1].shape == (7, 7)


def test_replicas_as_data_parallel_makes_them() -> None:
    criterion = FreDFLoss(basis="dct", freq_weight=torch.rand(7))
    x = torch.randn(2, 7, 3)
    for _ in range(2):
        replica = criterion._replicate_for_data_parallel()
        assert torch.equal(replica(x, 0 * x), criterion(x, 0 * x))


# ---- the fitted basis ----------------------------------------------------------------------------------


def targets(num_windows: int = 60, horizon: int = 8, num_variables: int = 3) -> Tensor:
    """Random walks, whose principal components are far from equal."""
    return torch.randn(num_windows, horizon, num_variables, dtype=torch.float64).cumsum(1) + 5


def principal_rows(series: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.linalg.svd(series - series.mean(axis=0))[2]


def test_pca_is_the_singular_vectors_of_the_targets() -> None:
    train = targets()
    rows = principal_rows(train.numpy().transpose(0, 2, 1).reshape(-1, 8))
    input, target = signals(4, 8, 3)
    expected = reference.fredf(input.numpy(), target.numpy(), reference.matrix(rows))
    criterion = FreDFLoss(basis="pca")
    assert criterion.fit(train) is criterion
    assert criterion(input, target).item() == pytest.approx(expected)
    assert criterion(input, target, torch.ones(4, 8, 3, dtype=torch.bool)).item() == pytest.approx(expected)


def test_pca_follows_dim_and_takes_series_without_variables() -> None:
    train = targets()
    input, target = signals(4, 8, 3)
    expected = FreDFLoss(basis="pca").fit(train)(input, target)
    last = FreDFLoss(basis="pca", dim=-1).fit(train.transpose(1, 2))
    torch.testing.assert_close(last(input.transpose(1, 2), target.transpose(1, 2)), expected)
    flat = FreDFLoss(basis="pca").fit(train.transpose(1, 2).reshape(-1, 8))
    torch.testing.assert_close(flat(input, target), expected)
    one = FreDFLoss(basis="pca", dim=0).fit(torch.randn(8))
    assert torch.isfinite(one(input[0, :, 0], target[0, :, 0]))


@pytest.mark.parametrize("num_series", [1, 3])
def test_pca_of_fewer_series_than_steps_keeps_the_energy(num_series: int) -> None:
    criterion = FreDFLoss(1.0, basis="pca", p=2).fit(targets(num_series, 8, 1))
    input, target = signals(4, 8, 3)
    torch.testing.assert_close(criterion(input, target), ((input - target) ** 2).mean())


def test_pca_travels_in_the_state_dict() -> None:
    input, target = signals(4, 8, 3)
    fitted = FreDFLoss(basis="pca").fit(targets())
    state = fitted.state_dict()
    assert list(state) == ["components"]
    for other in (FreDFLoss(basis="pca"), FreDFLoss(basis="pca").fit(targets(horizon=5))):
        other.load_state_dict(state)
        assert torch.equal(other(input, target), fitted(input, target))
    inner = torch.nn.ModuleDict({"loss": FreDFLoss(basis="pca")})
    inner.load_state_dict({"loss.components": state["components"]})
    assert torch.equal(inner["loss"](input, target), fitted(input, target))
    assigned = FreDFLoss(basis="pca")
    assigned.load_state_dict(state, assign=True)
    assert torch.equal(assigned(input, target), fitted(input, target))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*components"):
        FreDFLoss().load_state_dict(state)


def test_pca_in_lower_precision_stays_close() -> None:
    input, target = signals(4, 8, 3)
    criterion = FreDFLoss(basis="pca").fit(targets())
    exact = criterion(input, target).item()
    assert criterion.half()(input.half(), target.half()).item() == pytest.approx(exact, rel=1e-2)


def test_pca_fitted_in_inference_mode_serves_training() -> None:
    with torch.inference_mode():
        criterion = FreDFLoss(basis="pca").fit(targets())
    input, target = signals(4, 8, 3)
    criterion(input.requires_grad_(), target, target > 0).backward()
    assert input.grad is not None


def test_pca_misused() -> None:
    input, target = signals(4, 8, 3)
    with pytest.raises(RuntimeError, match=r'basis "pca" is learned from data: call fit\(train_targets\)'):
        FreDFLoss(basis="pca")(input, target)
    with pytest.raises(ValueError, match=r'use FreDFLoss\(basis="pca"\).fit\(train_targets\)'):
        fredf_loss(input, target, basis="pca")
    with pytest.raises(ValueError, match=r"fit: only basis=\"pca\" is learned from data, this one is 'rfft'"):
        FreDFLoss().fit(target)
    criterion = FreDFLoss(basis="pca")
    for value in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="train_targets must be finite: leave out the windows"):
            criterion.fit(torch.where(target > 1, value, target))
    with pytest.raises(ValueError, match=r"train_targets must be a non-empty float tensor .* torch.int64"):
        criterion.fit(target.long())
    with pytest.raises(ValueError, match="train_targets must be a non-empty float tensor"):
        criterion.fit(target[:0])
    with pytest.raises(TypeError, match="train_targets must be a tensor, got ndarray"):
        criterion.fit(target.numpy())
    criterion.fit(target)
    with pytest.raises(ValueError, match="takes a horizon of 8, the input has 5 steps"):
        criterion(input[:, :5], target[:, :5])
