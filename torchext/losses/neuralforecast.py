"""FreDF as a loss of the library neuralforecast.

Importing this module needs that library (``pip install 'torchext[neuralforecast]'``); nothing else in torchext
imports it.
"""

from __future__ import annotations

from torch import Tensor

from torchext.losses._adapters import settings_of
from torchext.losses.checks import Basis
from torchext.losses.fredf import FreDFLoss
from torchext.losses.terms import TimeLoss

try:
    from neuralforecast import register_loss
    from neuralforecast.losses.pytorch import BasePointLoss
except ImportError as error:
    raise ImportError(
        f"torchext.losses.neuralforecast needs neuralforecast 3.3 or newer ({error}); install it with "
        "pip install 'torchext[neuralforecast]'",
        name=error.name,
    ) from error

__all__ = ["FreDF"]


class FreDF(BasePointLoss):  # type: ignore[misc]
    """`FreDFLoss` for the models of neuralforecast: `NHITS(h=12, input_size=36, loss=FreDF(alpha=0.8))`.

    >>> import torch
    >>> loss = FreDF(alpha=0.8, horizon_weight=torch.linspace(1, 0.5, 12))
    >>> y, y_hat = torch.randn(32, 12, 1), torch.zeros(32, 12, 1, requires_grad=True)
    >>> y[0, 6:] = torch.nan  # not observed
    >>> loss(y=y, y_hat=y_hat, mask=torch.isfinite(y).float()).isfinite().item()
    True

    It works as `loss` and as `valid_loss`, for univariate and multivariate models. Masks, horizon weights and
    the library's sample weights count in both terms, where the library's own loss of this name applies them to
    the time term only, so that a value that was never observed moves its frequency term.

    Args:
        alpha, basis, component, norm, p, time_loss, freq_weight, horizon_weight, degree, method: see
            `torchext.losses.FreDFLoss`; `dim` and `reduction` are not offered, since the library fixes the layout
            of its tensors and wants a scalar. T is the model's `h`.

    `NeuralForecast.save` and the models' `save` keep the loss with all its settings, "pca" components included,
    but not a `basis` or `time_loss` that is a callable, which the library refuses to save. In the process that
    loads, import this module first: the library looks losses up by name among those registered.

    Raises:
        ImportError: (on import of the module) neuralforecast is missing or older than 3.3.
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
    ) -> None:
        # Recurrent models read `horizon_weight` off the loss; the one that is applied is the criterion's.
        super().__init__(horizon_weight=horizon_weight, outputsize_multiplier=1, output_names=[""])
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
        )

    @classmethod
    def from_loss(cls, criterion: FreDFLoss) -> FreDF:
        """Return the loss with the settings of `criterion`, as in `FreDF.from_loss(FreDFLoss.paper("ETTh1"))`.

        Its `dim` and `reduction` are left out; components that `criterion` was fitted to come along.
        """
        loss = cls(**settings_of(criterion))
        loss.criterion.components = criterion.components
        return loss

    def fit(self, train_targets: Tensor) -> FreDF:
        """Learn the basis "pca"; call it once, before training.

        Args:
            train_targets: (N, h) or (N, h, n_series) float: windows of the training series, on the scale that
                the model sees (after `scaler_type` and `local_scaler_type`).

        Returns:
            self.
        """
        self.criterion.fit(train_targets)
        return self

    def forward(
        self, y: Tensor, y_hat: Tensor, *, y_insample: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Compare a forecast with its target; neuralforecast calls this, by keywords.

        The losses of neuralforecast disagree about the order of `y_insample` and `mask`: here they are keywords.

        Args:
            y: (B, H, N) float. The target; may be NaN where `mask` is 0.
            y_hat: (B, H, N) float. The forecast.
            y_insample: ignored.
            mask: non-negative float or bool, broadcastable to `y`: 0 where a value is not scored, else 1 or the
                weight of its sample. None scores all.

        Returns:
            A scalar, at least float32; 0 where nothing is scored.
        """
        # neuralforecast always passes a mask and waits for the value of each step's loss, so that the look into the
        # mask costs no more; without one FreDFLoss is 2 to 5 times faster.
        if mask is None or bool((mask == 1).all()):
            loss: Tensor = self.criterion(y_hat, y)
        else:
            loss = self.criterion(y_hat, y, mask != 0, mask)
        return loss


# The library has a loss called "FreDF", which would be found first.
register_loss(FreDF, "torchext.FreDF")
