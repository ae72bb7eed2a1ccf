"""FreDF as a metric of the library pytorch-forecasting.

Importing this module needs that library (``pip install 'torchext[pytorch-forecasting]'``); nothing else in torchext
imports it.

Shape legend: `B` batch, `T` decoder steps of the batch (of its longest sample).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchext.losses._adapters import settings_of
from torchext.losses.checks import Basis
from torchext.losses.fredf import FreDFLoss
from torchext.losses.terms import TimeLoss

try:
    from pytorch_forecasting.metrics import MultiHorizonMetric
except ImportError as error:
    raise ImportError(
        f"torchext.losses.pytorch_forecasting needs pytorch-forecasting 1.8 or newer ({error}); install it with "
        "pip install 'torchext[pytorch-forecasting]'",
        name=error.name,
    ) from error

__all__ = ["FreDF"]

Target = Tensor | PackedSequence


class FreDF(MultiHorizonMetric):  # type: ignore[misc]
    """`FreDFLoss` for pytorch-forecasting: `TemporalFusionTransformer.from_dataset(data, loss=FreDF(alpha=0.8))`.

    >>> metric = FreDF(alpha=0.8)
    >>> forecast, target = torch.zeros(32, 24, 1, requires_grad=True), torch.randn(32, 24)
    >>> metric(forecast, target).backward()
    >>> lengths = torch.arange(32) % 24 + 1
    >>> packed = torch.nn.utils.rnn.pack_padded_sequence(target, lengths, batch_first=True, enforce_sorted=False)
    >>> metric(forecast, (packed, None)).isfinite().item()
    True

    For models with one output per step (not DeepAR); several targets take one of these each, in a `MultiLoss`,
    which the models make themselves. Samples may differ in length: steps behind a sample's end count in neither
    term. The library's sample and step weights count in both terms, and as in its other metrics, they and
    `horizon_weight` scale the loss: the mean is over the number of steps, not over the sum of weights.

    Args:
        alpha, basis, component, norm, p, time_loss, freq_weight, horizon_weight, degree, method: see
            `torchext.losses.FreDFLoss`; `dim` is not offered. Batches shorter than a `horizon_weight`, a matrix or
            a "pca" basis are taken as the beginning of a full horizon whose rest is not scored.
        reduction: the library's: "mean", "sqrt-mean" (root of the mean) or "none" ((B, T), NaN behind a sample's
            end).
        kwargs: `name`, and what `torchmetrics.Metric` takes.

    Raises:
        ImportError: (on import of the module) pytorch-forecasting is missing.
        ValueError, TypeError: as `FreDFLoss`.

    Source: FreDF (ICLR 2025), see `FreDFLoss`.
    """

    def __init__(
        self,
        alpha: float = 0.8,
        basis: Basis = "rfft",
        component: str = "complex",
        norm: str = "backward",
        p: float = 1,
        time_loss: TimeLoss = "mse",
        freq_weight: Tensor | None = None,
        horizon_weight: Tensor | None = None,
        degree: int | None = None,
        method: str = "auto",
        reduction: str = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(reduction=reduction, **kwargs)
        self.criterion = FreDFLoss(
            alpha,
            basis,
            component,
            norm,
            p,
            time_loss,
            freq_weight=freq_weight,
            horizon_weight=horizon_weight,
            degree=degree,
            method=method,
            reduction="none",
        )

    @classmethod
    def from_loss(cls, criterion: FreDFLoss, **kwargs: Any) -> FreDF:
        """Return the metric with the settings of `criterion`, as in `FreDF.from_loss(FreDFLoss.paper("ETTh1"))`.

        Its `dim` and `reduction` are left out; components that `criterion` was fitted to come along.

        Args:
            criterion: the loss to be like.
            kwargs: `reduction`, `name`, and what `torchmetrics.Metric` takes.
        """
        metric = cls(**settings_of(criterion), **kwargs)
        metric.criterion.components = criterion.components
        return metric

    def fit(self, train_targets: Tensor) -> FreDF:
        """Learn the basis "pca"; call it once, before training.

        Args:
            train_targets: (N, T) float: windows of the training series as long as the longest prediction, on the
                scale of the data (the models undo their normalisation before the loss).

        Returns:
            self.
        """
        self.criterion.fit(train_targets)
        return self

    def loss(self, y_pred: Tensor, target: Tensor, mask: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Return the losses per step, not reduced; the series' frequency terms are spread over their steps.

        Args:
            y_pred: (B, T, 1) or (B, T) float. The network's output on the scale of the data.
            target: (B, T) float; may be NaN where `mask` is False.
            mask: (B, T) bool; True where a step is scored. None scores all.
            weight: non-negative float, (B, T) or (B, 1).

        Returns:
            (B, T), at least float32, 0 where `mask` is False.
        """
        prediction, horizon = self.to_prediction(y_pred), target.size(1)
        missing = self._full_horizon(horizon) - horizon
        if missing > 0:
            scored = torch.ones_like(target, dtype=torch.bool) if mask is None else mask.expand(target.shape)
            weight = None if weight is None else pad(weight.expand(target.shape), (0, missing))
            prediction, target, mask = (pad(steps, (0, missing)) for steps in (prediction, target, scored))
        losses: Tensor = self.criterion(prediction, target, mask, weight)
        return losses[:, :horizon]

    def update(self, y_pred: Tensor, target: Target | tuple[Target, Tensor | None] | list[Any]) -> None:
        """Add a batch; called by `forward`, which the models call.

        The library's own `update` applies lengths and weights to the losses per step, after the transform. Here
        they must come before it.

        Args:
            y_pred: (B, T, 1) or (B, T) float.
            target: (B, T) float, or packed sequences of at most T steps; or a pair of that and weights, (B, T),
                (B,) or None.
        """
        weight = None
        if isinstance(target, (tuple, list)) and not isinstance(target, PackedSequence):
            target, weight = target
        mask = None
        if isinstance(target, PackedSequence):
            target, lengths = pad_packed_sequence(target, batch_first=True)
            lengths = lengths.to(target.device)
            mask = torch.arange(target.size(1), device=target.device) < lengths[:, None]
        else:
            lengths = torch.full((target.size(0),), target.size(1), device=target.device)
        if weight is not None:
            weight = weight[:, None] if weight.ndim == 1 else weight
            mask = (weight != 0) if mask is None else mask & (weight != 0)
        self._update_losses_and_lengths(self.loss(y_pred, target, mask, weight), lengths)

    def _full_horizon(self, horizon: int) -> int:
        """The number of steps that the settings are made for, or `horizon` if they suit any."""
        criterion = self.criterion
        made_for = [criterion.horizon_weight, criterion.components]
        if criterion.basis == "matrix":
            made_for.append(criterion.matrix)
        return next((setting.shape[-1] for setting in made_for if setting is not None), horizon)
