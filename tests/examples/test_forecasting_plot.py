"""The picture is drawn whatever the windows: short horizons have few frequencies, and one step has none."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from forecasting_data import Series, prepare
from forecasting_models import DLinear
from forecasting_plot import Curve, make_sketch, plot


@pytest.mark.parametrize("step", ["1h", "7D"])
@pytest.mark.parametrize("horizon", [1, 2, 3, 24])
def test_a_picture_of_any_horizon(horizon: int, step: str, tmp_path: Path) -> None:
    dates_R = np.datetime64("2020-01-01T00:00:00") + np.arange(300) * np.timedelta64(int(step[:-1]), step[-1])
    series = Series("noise", ("only",), dates_R.astype("datetime64[s]"), np.random.standard_normal((300, 1)), "")
    data = prepare(series, 8, horizon)
    sketch = make_sketch(DLinear(8, horizon), data)
    plot([Curve("MSE", sketch, [0.5], [0.4]), Curve("other", sketch, [0.3], [0.2])], data, "title", tmp_path / "a.png")
    assert matplotlib.image.imread(tmp_path / "a.png")[..., :3].std() > 0.05  # not blank
