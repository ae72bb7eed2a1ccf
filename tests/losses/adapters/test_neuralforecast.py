"""The neuralforecast adapter, against the library itself."""

from __future__ import annotations

import copy
import doctest
import inspect
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchext.losses import FreDFLoss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("neuralforecast", reason="needs neuralforecast: pip install 'torchext[neuralforecast]'")
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.losses.pytorch import MAE
    from neuralforecast.losses.pytorch import FreDF as TheirFreDF
    from neuralforecast.models import LSTM, NHITS, TSMixer

    import torchext.losses.neuralforecast as adapter
    from torchext.losses.neuralforecast import FreDF

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # the library's and its dependencies' own
    pytest.mark.allow_leaks(
        "environment", reason="Lightning's seed_everything, which the models call, sets PL_GLOBAL_SEED"
    ),
]

H, INPUT_SIZE = 12, 24
QUIET: dict[str, Any] = {
    "h": H,
    "input_size": INPUT_SIZE,
    "accelerator": "cpu",
    "devices": 1,
    "random_seed": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
SMALL_NHITS: dict[str, Any] = {**QUIET, "mlp_units": [[16, 16]] * 3, "windows_batch_size": 32, "learning_rate": 1e-2}


def sines(num_series: int = 3, length: int = 160) -> pd.DataFrame:
    """Noisy sines of period 12, in the library's long format."""
    rng, t = np.random.default_rng(0), np.arange(length)
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "unique_id": f"s{i}",
                    "ds": pd.date_range("2024-01-01", periods=length, freq="D"),
                    "y": np.sin(2 * np.pi * (t + i) / 12) + 0.1 * rng.standard_normal(length),
                }
            )
            for i in range(num_series)
        ],
        ignore_index=True,
    )


def fit(model: Any, data: pd.DataFrame, **kwargs: Any) -> NeuralForecast:
    forecaster = NeuralForecast(models=[model], freq="D")
    forecaster.fit(data, **kwargs)
    return forecaster


def train_losses(forecaster: NeuralForecast) -> list[float]:
    return [loss for _, loss in forecaster.models[0].train_trajectories]


def batch(num_series: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """A target, a forecast and a mask that hides a gap and one whole series."""
    y, y_hat = torch.randn(8, H, num_series), torch.randn(8, H, num_series)
    mask = torch.ones_like(y)
    mask[0, 5:] = 0
    mask[3, 2:7, 1] = 0
    mask[6] = 0
    return y, y_hat, mask


# ---- the loss by itself --------------------------------------------------------------------------------


def test_value_is_that_of_fredf_loss() -> None:
    y, y_hat, mask = batch()
    weights = torch.rand(H)
    loss = FreDF(alpha=0.3, basis="dct", norm="ortho", time_loss="mae", horizon_weight=weights)
    plain = FreDFLoss(alpha=0.3, basis="dct", norm="ortho", time_loss="mae", horizon_weight=weights)
    torch.testing.assert_close(loss(y=y, y_hat=y_hat, mask=mask), plain(y_hat, y, mask != 0))
    torch.testing.assert_close(loss(y=y, y_hat=y_hat), plain(y_hat, y))


def test_a_mask_of_ones_is_no_mask() -> None:
    y, y_hat, _ = batch()
    loss = FreDF()
    by_formula = 0.8 * torch.fft.rfft(y_hat - y, dim=1).abs().mean() + 0.2 * (y_hat - y).square().mean()
    torch.testing.assert_close(loss(y=y, y_hat=y_hat, mask=torch.ones_like(y)), by_formula)
    torch.testing.assert_close(loss(y=y, y_hat=y_hat, mask=torch.full_like(y, 0.5)), by_formula)  # the slower path


def test_agrees_with_the_librarys_loss_where_nothing_is_masked() -> None:
    y, y_hat, _ = batch()
    theirs = TheirFreDF(alpha=0.4)(y, y_hat, mask=torch.ones_like(y))
    torch.testing.assert_close(FreDF(alpha=0.4)(y, y_hat, mask=torch.ones_like(y)), theirs)


@pytest.mark.parametrize("hidden", [0.0, 100.0, float("nan")], ids=str)
def test_what_a_mask_hides_does_not_count_but_does_in_the_librarys_loss(hidden: float) -> None:
    y, y_hat, mask = batch()
    y_hat.requires_grad_()
    filled = torch.where(mask == 0, hidden, y)

    def value_and_gradient(loss: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        value = loss(y=y, y_hat=y_hat, mask=mask)
        return value.detach(), torch.autograd.grad(value, y_hat)[0]

    ours, gradient = value_and_gradient(FreDF(), filled)
    expected, expected_gradient = value_and_gradient(FreDF(), torch.where(mask == 0, 0.0, y))
    assert torch.equal(ours, expected)
    assert torch.equal(gradient, expected_gradient)
    assert (gradient[mask == 0] == 0).all()

    theirs, their_gradient = value_and_gradient(TheirFreDF(alpha=0.8), filled)
    untouched, _ = value_and_gradient(TheirFreDF(alpha=0.8), y)
    assert theirs != untouched
    assert not torch.equal(their_gradient[mask == 0], torch.zeros_like(their_gradient[mask == 0]))
    assert theirs.isnan() == np.isnan(hidden)


def test_horizon_weight_counts_in_the_frequency_term_but_not_in_the_librarys() -> None:
    y, y_hat, _ = batch()
    first_half = (torch.arange(H) < H // 2).float()
    changed = torch.where(first_half[:, None] == 0, y + 10, y)

    ours = FreDF(alpha=1.0, horizon_weight=first_half)
    torch.testing.assert_close(ours(y=changed, y_hat=y_hat), ours(y=y, y_hat=y_hat))
    theirs = TheirFreDF(alpha=1.0, horizon_weight=first_half)
    assert (theirs(y=changed, y_hat=y_hat) - theirs(y=y, y_hat=y_hat)).abs() > 1


def test_sample_weights_in_the_mask_weigh_the_samples() -> None:
    y, y_hat, _ = batch()
    weights = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 3.0])[:, None, None]
    loss = FreDF(alpha=0.6)
    alone = [loss(y=y[i : i + 1], y_hat=y_hat[i : i + 1]) for i in (0, 7)]
    torch.testing.assert_close(loss(y=y, y_hat=y_hat, mask=torch.ones_like(y) * weights), (alone[0] + 3 * alone[1]) / 4)


def test_is_zero_where_nothing_is_scored() -> None:
    y, y_hat, _ = batch()
    assert FreDF()(y=y, y_hat=y_hat, mask=torch.zeros_like(y)) == 0


def test_insample_and_mask_cannot_be_mixed_up() -> None:
    y, y_hat, mask = batch()
    with pytest.raises(TypeError, match="positional"):
        FreDF()(y, y_hat, mask)


def test_has_what_the_models_ask_a_point_loss_for() -> None:
    loss = FreDF()
    assert (loss.outputsize_multiplier, loss.output_names, loss.is_distribution_output) == (1, [""], False)
    assert loss.domain_map(y_hat := torch.ones(2, H, 1)) is y_hat


def test_takes_the_settings_of_a_loss() -> None:
    y, y_hat, _ = batch()
    for plain in (
        FreDFLoss.paper("ETTh2"),
        FreDFLoss(basis=torch.randn(5, H), p=2, time_loss="smape", horizon_weight=torch.rand(H)),
        FreDFLoss(basis="legendre", degree=3, freq_weight=torch.rand(4)),
        FreDFLoss(basis="pca").fit(torch.randn(50, H)),
    ):
        torch.testing.assert_close(FreDF.from_loss(plain)(y=y, y_hat=y_hat), plain(y_hat, y))


def test_offers_every_argument_of_fredf_loss_with_its_default() -> None:
    ours = inspect.signature(FreDF).parameters
    expected = {n: p for n, p in inspect.signature(FreDFLoss).parameters.items() if n not in ("dim", "reduction")}
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in expected.items()}


def test_pickles_and_copies() -> None:
    y, y_hat, mask = batch()
    loss = FreDF(alpha=0.4, basis="pca", horizon_weight=torch.rand(H)).fit(torch.randn(50, H))
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    for other in (copy.deepcopy(loss), torch.load(file, weights_only=False)):
        assert torch.equal(other(y=y, y_hat=y_hat, mask=mask), loss(y=y, y_hat=y_hat, mask=mask))


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="alpha must lie in"):
        FreDF(alpha=2)
    with pytest.raises(ValueError, match="horizon_weight"):
        FreDF(horizon_weight=torch.ones(5))(y=torch.ones(2, H, 1), y_hat=torch.ones(2, H, 1))


def test_docstring_example() -> None:
    assert doctest.testmod(adapter).failed == 0


# ---- in the library ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda loss: NHITS(loss=loss, max_steps=40, **SMALL_NHITS), id="NHITS"),
        pytest.param(
            lambda loss: LSTM(
                loss=loss, max_steps=40, learning_rate=1e-2, encoder_hidden_size=16, decoder_hidden_size=16, **QUIET
            ),
            id="LSTM-recurrent",
        ),
        pytest.param(
            lambda loss: TSMixer(loss=loss, n_series=3, max_steps=40, learning_rate=1e-2, **QUIET),
            id="TSMixer-multivariate",
        ),
    ],
)
def test_a_short_fit_lowers_the_loss_and_predicts(model: Any) -> None:
    forecaster = fit(model(FreDF(alpha=0.8)), sines(), val_size=H)
    losses = train_losses(forecaster)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert np.isfinite([loss for _, loss in forecaster.models[0].valid_trajectories]).all()
    forecast = forecaster.predict()
    assert len(forecast) == 3 * H
    assert np.isfinite(forecast.iloc[:, -1]).all()


def test_works_beside_another_validation_loss_and_with_padding_and_weights() -> None:
    data = sines(length=INPUT_SIZE)  # shorter than a window: the library pads it and masks the padding
    loss = FreDF(basis="dct", norm="ortho", horizon_weight=torch.linspace(1, 0.2, H))
    model = NHITS(
        loss=loss, valid_loss=MAE(), start_padding_enabled=True, scaler_type="robust", max_steps=10, **SMALL_NHITS
    )
    assert np.isfinite(train_losses(fit(model, data))).all()


def _masked_targets(hidden: float) -> pd.DataFrame:
    """Series of one window each, some of whose targets are masked and hold `hidden`."""
    data = sines(num_series=8, length=INPUT_SIZE + H)
    step = data.groupby("unique_id").cumcount()
    gone = data["unique_id"].isin(["s0", "s5"]) & (step >= INPUT_SIZE + 4)
    data["available_mask"] = np.where(gone, 0.0, 1.0)
    data["y"] = data["y"].where(~gone, hidden)
    return data


def test_a_fit_does_not_see_masked_targets_but_does_with_the_librarys_loss() -> None:
    def losses(loss: Any, hidden: float) -> list[float]:
        return train_losses(fit(NHITS(loss=loss, max_steps=10, **SMALL_NHITS), _masked_targets(hidden)))

    expected = losses(FreDF(), 0.0)
    assert losses(FreDF(), 100.0) == expected
    assert losses(FreDF(), float("nan")) == expected

    assert losses(TheirFreDF(alpha=0.8), 100.0) != losses(TheirFreDF(alpha=0.8), 0.0)
    with pytest.raises(Exception, match="Loss is NaN"):
        losses(TheirFreDF(alpha=0.8), float("nan"))


@pytest.mark.parametrize("basis", ["rfft", "pca", "matrix"])
def test_save_and_load_keep_the_loss(basis: str, tmp_path: Path) -> None:
    loss = FreDF(alpha=0.3, basis=torch.randn(5, H) if basis == "matrix" else basis, horizon_weight=torch.rand(H))
    if basis == "pca":
        loss.fit(torch.randn(50, H))
    forecaster = fit(NHITS(loss=loss, max_steps=3, **SMALL_NHITS), sines())
    forecaster.save(str(tmp_path), overwrite=True)
    loaded = NeuralForecast.load(str(tmp_path))
    y, y_hat, mask = batch()
    of_loaded = loaded.models[0].loss
    assert type(of_loaded) is FreDF
    assert torch.equal(of_loaded(y=y, y_hat=y_hat, mask=mask), loss(y=y, y_hat=y_hat, mask=mask))
    pd.testing.assert_frame_equal(loaded.predict(), forecaster.predict())
    loaded.fit(sines())  # and it trains on
    assert np.isfinite(train_losses(loaded)).all()


def test_a_callable_basis_trains_but_is_refused_when_saved(tmp_path: Path) -> None:
    forecaster = fit(NHITS(loss=FreDF(basis=torch.fft.rfft), max_steps=3, **SMALL_NHITS), sines())
    with pytest.raises(Exception, match="cannot encode"):
        forecaster.save(str(tmp_path), overwrite=True)
