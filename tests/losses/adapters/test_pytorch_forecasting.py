"""The pytorch-forecasting adapter, against the library itself."""

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
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from torchext.losses import FreDFLoss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "pytorch_forecasting", reason="needs pytorch-forecasting: pip install 'torchext[pytorch-forecasting]'"
    )
    import lightning.pytorch as pl
    import pandas as pd
    import pytorch_forecasting.metrics
    from pytorch_forecasting import (
        MAE,
        DecoderMLP,
        NBeats,
        RecurrentNetwork,
        TemporalFusionTransformer,
        TimeSeriesDataSet,
    )
    from pytorch_forecasting.metrics import MultiHorizonMetric, MultiLoss

    import torchext.losses.pytorch_forecasting as adapter
    from torchext.losses.pytorch_forecasting import FreDF

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # the library's and its dependencies' own
]

T, ENCODER = 8, 16


def sines(length: int = 60, min_prediction_length: int = T, **kwargs: Any) -> TimeSeriesDataSet:
    """Noisy sines of period 12; a `min_prediction_length` below T makes samples of different lengths."""
    rng, t = np.random.default_rng(0), np.arange(length)
    frame = pd.concat(
        [
            pd.DataFrame(
                {
                    "series": f"s{i}",
                    "t": t,
                    "y": np.sin(2 * np.pi * (t + i) / 12) + 0.1 * rng.standard_normal(length),
                    "other": np.cos(2 * np.pi * (t + i) / 12),
                    "importance": np.where(t < length // 2, 0.5, 1.0),
                }
            )
            for i in range(3)
        ],
        ignore_index=True,
    )
    settings: dict[str, Any] = {
        "time_idx": "t",
        "target": "y",
        "group_ids": ["series"],
        "max_encoder_length": ENCODER,
        "max_prediction_length": T,
        "min_prediction_length": min_prediction_length,
        "time_varying_unknown_reals": ["y"],
    }
    return TimeSeriesDataSet(frame, **(settings | kwargs))


def trainer(folder: Path, epochs: int) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


class Losses(pl.Callback):
    """The training losses of a fit."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(outputs["loss"].item())


def fit(model: Any, data: TimeSeriesDataSet, folder: Path, epochs: int) -> list[float]:
    run, losses = trainer(folder, epochs), Losses()
    run.callbacks.append(losses)
    run.fit(model, data.to_dataloader(train=True, batch_size=16, num_workers=0))
    return losses.steps


def predict(model: Any, data: TimeSeriesDataSet) -> Tensor:
    loader = data.to_dataloader(train=False, batch_size=16, num_workers=0)
    return model.predict(loader, trainer_kwargs={"accelerator": "cpu", "logger": False})


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """A network's output, targets, and their lengths."""
    return torch.randn(5, T, 1), torch.randn(5, T), torch.tensor([8, 3, 6, 1, 8])


def packed(target: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(target, lengths, batch_first=True, enforce_sorted=False)


def scored(lengths: Tensor, horizon: int = T) -> Tensor:
    return torch.arange(horizon) < lengths[:, None]


# ---- the metric by itself ------------------------------------------------------------------------------


def test_value_is_that_of_fredf_loss() -> None:
    y_pred, target, _ = batch()
    expected = FreDFLoss(alpha=0.3, basis="dct", norm="ortho")(y_pred[..., 0], target)
    for given in (target, (target, None)):
        torch.testing.assert_close(FreDF(alpha=0.3, basis="dct", norm="ortho")(y_pred, given), expected)
    torch.testing.assert_close(FreDF(alpha=0.3, basis="dct", norm="ortho")(y_pred[..., 0], target), expected)


def test_losses_are_not_reduced_before_the_library_does() -> None:
    y_pred, target, _ = batch()
    losses = FreDF().loss(y_pred, target)
    assert losses.shape == (5, T)
    torch.testing.assert_close(losses.mean(), FreDFLoss()(y_pred[..., 0], target))


@pytest.mark.parametrize("behind", [0.0, 100.0, float("nan")], ids=str)
def test_steps_behind_a_samples_end_do_not_count(behind: float) -> None:
    y_pred, target, lengths = batch()
    y_pred = torch.where(scored(lengths)[..., None], y_pred, behind).requires_grad_()
    loss = FreDF()(y_pred, (packed(target, lengths), None))
    torch.testing.assert_close(loss, FreDFLoss()(y_pred.detach()[..., 0], target, mask=scored(lengths)))
    (gradient,) = torch.autograd.grad(loss, y_pred)
    assert torch.isfinite(gradient).all()
    assert (gradient[..., 0][~scored(lengths)] == 0).all()


def test_lengths_must_come_before_the_transform_as_a_mask_after_it_is_too_late() -> None:
    """What a metric that leaves lengths to the library computes: the frequency term sees the padding."""
    y_pred, target, lengths = batch()
    plain = _per_step_metric(FreDFLoss())
    changed = torch.where(scored(lengths)[..., None], y_pred, 100.0)
    sequences = (packed(target, lengths), None)
    assert plain(changed, sequences) > 10 * plain(y_pred, sequences)
    torch.testing.assert_close(FreDF()(changed, sequences), FreDF()(y_pred, sequences))


def test_weights_scale_both_terms() -> None:
    y_pred, target, _ = batch()
    weight = torch.rand(5, T)
    for alpha in (0.0, 0.5, 1.0):
        expected = FreDFLoss(alpha=alpha, reduction="sum")(y_pred[..., 0], target, weight=weight) / target.numel()
        torch.testing.assert_close(FreDF(alpha=alpha)(y_pred, (target, weight)), expected)
    torch.testing.assert_close(
        FreDF(alpha=1.0)(y_pred, (target, weight[:, 0])), FreDF(alpha=1.0)(y_pred, (target, weight[:, :1].expand(5, T)))
    )
    # with no frequency term it is what the library's own metric does
    torch.testing.assert_close(
        FreDF(alpha=0.0, time_loss="mae")(y_pred, (target, weight)), MAE()(y_pred, (target, weight))
    )


def test_targets_of_no_weight_may_be_missing() -> None:
    y_pred, target, lengths = batch()
    weight = torch.ones(5, T)
    weight[0, 2:5] = 0
    unknown = target.clone()
    unknown[0, 2:5] = torch.nan
    for given in (lambda y: y, lambda y: packed(y, lengths)):
        torch.testing.assert_close(FreDF()(y_pred, (given(unknown), weight)), FreDF()(y_pred, (given(target), weight)))


def test_reductions_are_the_librarys() -> None:
    y_pred, target, lengths = batch()
    sequences = (packed(target, lengths), None)
    mean = FreDF()(y_pred, sequences)
    torch.testing.assert_close(FreDF(reduction="sqrt-mean")(y_pred, sequences), mean.sqrt())
    none = FreDF(reduction="none")(y_pred, sequences)
    assert none.shape == (5, T)
    assert torch.equal(none.isnan(), ~scored(lengths))
    torch.testing.assert_close(none.nansum() / lengths.sum(), mean)


def test_accumulates_over_batches() -> None:
    metric, (y_pred, target, lengths) = FreDF(), batch()
    metric.update(y_pred, (packed(target, lengths), None))
    metric.update(y_pred[:2], (target[:2], None))
    first, second = FreDF()(y_pred, packed(target, lengths)), FreDF()(y_pred[:2], target[:2])
    torch.testing.assert_close(metric.compute(), (first * lengths.sum() + second * 2 * T) / (lengths.sum() + 2 * T))


@pytest.mark.parametrize("fixed", ["horizon_weight", "matrix", "pca"])
def test_a_batch_shorter_than_the_settings_is_the_beginning_of_a_horizon(fixed: str) -> None:
    y_pred, target, lengths = torch.randn(3, 5, 1), torch.randn(3, 5), torch.tensor([5, 2, 4])
    if fixed == "horizon_weight":
        plain = FreDFLoss(horizon_weight=torch.rand(T))
    elif fixed == "matrix":
        plain = FreDFLoss(basis=torch.randn(6, T))
    else:
        plain = FreDFLoss(basis="pca").fit(torch.randn(50, T))
    plain.reduction = "sum"

    def full(steps: Tensor) -> Tensor:
        return nn.functional.pad(steps, (0, T - 5), value=7.0)

    mask = scored(lengths, T)
    expected = plain(full(y_pred[..., 0]), full(target), mask) / lengths.sum()
    torch.testing.assert_close(FreDF.from_loss(plain)(y_pred, (packed(target, lengths), None)), expected)
    weight = torch.tensor([1.0, 0.5, 2.0])
    expected = plain(full(y_pred[..., 0]), full(target), scored(torch.full((3,), 5), T), weight[:, None]) / 15
    torch.testing.assert_close(FreDF.from_loss(plain)(y_pred, (target, weight)), expected)


def test_joins_other_metrics() -> None:
    y_pred, target, _ = batch()
    both = FreDF(alpha=1.0) + 0.5 * MAE()
    expected = FreDF(alpha=1.0)(y_pred, target) + 0.5 * MAE()(y_pred, target)
    torch.testing.assert_close(both(y_pred, target), expected)
    two = MultiLoss([FreDF(), FreDF(alpha=0.2)])
    expected = FreDF()(y_pred, target) + FreDF(alpha=0.2)(y_pred, target)
    torch.testing.assert_close(two([y_pred, y_pred], ([target, target], None)), expected)


def test_predictions_are_points() -> None:
    y_pred, _, _ = batch()
    assert torch.equal(FreDF().to_prediction(y_pred), y_pred[..., 0])
    assert torch.equal(FreDF().to_quantiles(y_pred[..., 0]), y_pred)


def test_takes_the_settings_of_a_loss() -> None:
    y_pred, target, _ = batch()
    for plain in (
        FreDFLoss.paper("ETTh2"),
        FreDFLoss(basis=torch.randn(5, T), p=2, time_loss="smape"),
        FreDFLoss(basis="legendre", degree=3, freq_weight=torch.rand(4)),
        FreDFLoss(basis="pca").fit(torch.randn(50, T)),
    ):
        torch.testing.assert_close(FreDF.from_loss(plain, name="F")(y_pred, target), plain(y_pred[..., 0], target))


def test_offers_every_argument_of_fredf_loss_with_its_default() -> None:
    ours = {n: p.default for n, p in inspect.signature(FreDF).parameters.items() if n != "kwargs"}
    assert ours == {n: p.default for n, p in inspect.signature(FreDFLoss).parameters.items() if n != "dim"}


def test_pickles_and_copies() -> None:
    y_pred, target, lengths = batch()
    metric = FreDF(alpha=0.4, basis="pca", horizon_weight=torch.rand(T)).fit(torch.randn(50, T))
    file = io.BytesIO()
    torch.save(metric, file)
    file.seek(0)
    expected = metric(y_pred, packed(target, lengths))
    for other in (copy.deepcopy(metric), torch.load(file, weights_only=False)):
        assert torch.equal(other(y_pred, packed(target, lengths)), expected)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="alpha must lie in"):
        FreDF(alpha=2)
    with pytest.raises(ValueError, match="horizon_weight"):
        FreDF(horizon_weight=torch.ones(5))(torch.ones(2, T, 1), torch.ones(2, T))


def test_docstring_example() -> None:
    assert doctest.testmod(adapter).failed == 0


# ---- FreDFLoss itself, where the library wraps modules of torch ----------------------------------------


def _per_step_metric(loss: nn.Module) -> MultiHorizonMetric:
    """The library's NNLossAdapter, which came after 1.8, as far as it matters: a copy with reduction="none"."""

    class PerStep(MultiHorizonMetric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._loss = copy.deepcopy(loss)
            self._loss.reduction = "none"

        def loss(self, y_pred: Tensor, target: Tensor) -> Tensor:
            return self._loss(y_pred.squeeze(-1), target)

    return PerStep()


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "real"])
def test_fredf_loss_works_where_modules_of_torch_do(real: bool) -> None:
    wrap = _per_step_metric
    if real:
        wrap = getattr(pytorch_forecasting.metrics, "NNLossAdapter", None)
        if wrap is None:
            pytest.skip(f"pytorch-forecasting {pytorch_forecasting.__version__} has no NNLossAdapter")
    y_pred, target, _ = batch()
    plain = FreDFLoss(alpha=0.4, basis="dct")
    torch.testing.assert_close(wrap(plain)(y_pred, target), plain(y_pred[..., 0], target))
    assert plain.reduction == "mean"


# ---- in the library ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param(DecoderMLP, {"hidden_size": 16}, id="DecoderMLP"),
        pytest.param(RecurrentNetwork, {"hidden_size": 16}, id="RecurrentNetwork"),
        pytest.param(
            TemporalFusionTransformer,
            {"hidden_size": 8, "hidden_continuous_size": 8, "attention_head_size": 1},
            id="TemporalFusionTransformer",
        ),
        pytest.param(NBeats, {"widths": [16, 16], "backcast_loss_ratio": 0.0}, id="NBeats"),
    ],
)
def test_a_short_fit_lowers_the_loss_and_predicts(model: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    known = {} if model in (NBeats, RecurrentNetwork) else {"time_varying_known_reals": ["t"]}
    data = sines(**known)
    network = model.from_dataset(data, loss=FreDF(alpha=0.8), learning_rate=1e-2, **settings)
    losses = fit(network, data, tmp_path, epochs=8)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < 0.85 * np.mean(losses[:4])
    forecast = predict(network, data)
    assert forecast.shape == (len(data), T)
    assert torch.isfinite(forecast).all()


def test_a_fit_on_samples_of_different_lengths_with_weights(tmp_path: Path) -> None:
    data = sines(min_prediction_length=2, weight="importance", time_varying_known_reals=["t"])
    lengths = {x["decoder_lengths"].unique().numel() for x, _ in data.to_dataloader(batch_size=16, num_workers=0)}
    assert max(lengths) > 1
    loss = FreDF(alpha=0.8, basis="dct", horizon_weight=torch.linspace(1, 0.5, T))
    network = TemporalFusionTransformer.from_dataset(
        data, loss=loss, learning_rate=1e-2, hidden_size=8, hidden_continuous_size=8, attention_head_size=1
    )
    losses = fit(network, data, tmp_path, epochs=2)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_the_library_makes_one_for_each_of_several_targets(tmp_path: Path) -> None:
    data = sines(target=["y", "other"], time_varying_unknown_reals=["y", "other"], time_varying_known_reals=["t"])
    network = DecoderMLP.from_dataset(data, loss=FreDF(), hidden_size=8)
    assert isinstance(network.loss, MultiLoss)
    assert np.isfinite(fit(network, data, tmp_path, epochs=1)).all()


@pytest.mark.parametrize("basis", ["rfft", "pca"])
def test_a_checkpoint_keeps_the_loss(basis: str, tmp_path: Path) -> None:
    data = sines(time_varying_known_reals=["t"])
    loss = FreDF(alpha=0.3, basis=basis)
    if basis == "pca":
        loss.fit(torch.randn(50, T))
    network = DecoderMLP.from_dataset(data, loss=loss, hidden_size=8)
    run = trainer(tmp_path, epochs=1)
    run.fit(network, data.to_dataloader(train=True, batch_size=16, num_workers=0))
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = DecoderMLP.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=False)
    y_pred, target, lengths = batch()
    assert type(loaded.loss) is FreDF
    loaded.loss.reset()
    loss.reset()
    assert torch.equal(loaded.loss(y_pred, packed(target, lengths)), loss(y_pred, packed(target, lengths)))
    assert torch.equal(predict(loaded, data), predict(network, data))
