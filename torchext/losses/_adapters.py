"""What the adapters to forecasting libraries share."""

from __future__ import annotations

from typing import Any

from torchext.losses.fredf import FreDFLoss

_PASSED_ON = ("alpha", "component", "norm", "p", "time_loss", "freq_weight", "horizon_weight", "degree", "method")


def settings_of(criterion: FreDFLoss) -> dict[str, Any]:
    """Return the arguments that make an adapter's loss like `criterion`: all but `dim` and `reduction`.

    Those two are the library's: it fixes the layout of its tensors and adds up the losses itself.
    """
    basis = criterion.matrix if criterion.basis == "matrix" else criterion.basis
    return {"basis": basis, **{name: getattr(criterion, name) for name in _PASSED_ON}}
