"""Forecasting losses in a transformed domain."""

from torchext.losses.fredf import FreDFLoss, fredf_loss

__all__ = ["FreDFLoss", "fredf_loss"]
