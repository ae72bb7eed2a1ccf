"""The picture of examples/forecast.py: what the forecasts look like, and where on the frequency axis losses differ.

Shape suffixes: B windows in a batch, L look-back steps, T forecast steps, D variables, K = T // 2 + 1 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import torch
from forecasting_data import ForecastData, Windows
from matplotlib.ticker import MultipleLocator
from torch import Tensor, nn

COLOURS = {
    "MSE": "#7a7a7a",
    "MAE": "#e69f00",
    "FreDF": "#0072b2",
    "DCT": "#d55e00",
    "PCA": "#009e73",
    "ours": "#cc79a7",
}
SPARE_COLOURS = ("#56b4e9", "#8c564b", "#bcbd22", "#6a3d9a", "#17becf", "#e377c2")
TRUTH = "#1a1a1a"


@dataclass(frozen=True)
class Sketch:
    """What the picture needs of one trained model.

    Attributes:
        forecast_TD: forecast of the test window `example_index`, normalised.
        amplitude_K, error_K: mean amplitudes of the forecasts' and of the errors' spectra over all test windows.
    """

    forecast_TD: np.ndarray
    amplitude_K: np.ndarray
    error_K: np.ndarray


@dataclass(frozen=True)
class Curve:
    """One loss in the picture: its label, its first seed's sketch, and each seed's test MSE and MAE."""

    label: str
    sketch: Sketch
    test_mse: Sequence[float]
    test_mae: Sequence[float]


def example_index(windows: Windows) -> int:
    """The window shown: the middle one, so that nobody picks a flattering one."""
    return len(windows) // 2


def make_sketch(backbone: nn.Module, data: ForecastData) -> Sketch:
    windows = data.splits["test"]
    backbone.eval()
    amplitude_K, error_K = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for x_BLD, marks_BLF, y_BTD in data.loader("test", batch_size=256):
            forecast_BTD = backbone(x_BLD, marks_BLF)
            amplitude_K = amplitude_K + _amplitudes(forecast_BTD)
            error_K = error_K + _amplitudes(forecast_BTD - y_BTD)
        x_BLD, marks_BLF, _ = windows.__getitems__([example_index(windows)])
        forecast_TD = backbone(x_BLD, marks_BLF)[0]
    return Sketch(forecast_TD.numpy(), (amplitude_K / len(windows)).numpy(), (error_K / len(windows)).numpy())


def _amplitudes(series_BTD: Tensor) -> Tensor:
    return torch.fft.rfft(series_BTD, dim=1, norm="ortho").abs().mean(dim=2).sum(dim=0)


def plot(curves: Sequence[Curve], data: ForecastData, title: str, path: Path) -> None:
    """Draw forecasts of one test window, spectra, and test errors of each loss, and save them as `path` (PNG)."""
    windows = data.splits["test"]
    spare = iter(SPARE_COLOURS * len(curves))
    colours = [COLOURS.get(curve.label) or next(spare) for curve in curves]

    figure = matplotlib.figure.Figure(figsize=(13, 7.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.05), hspace=0.04)
    _plot_examples(top, curves, colours, data, windows)
    spectrum, error, scores = bottom.subplots(1, 3, width_ratios=(1, 1, 0.8))
    _plot_spectra(spectrum, error, curves, colours, data, windows)
    _plot_scores(scores, curves, colours)
    for axes in figure.findobj(matplotlib.axes.Axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8e8e4", lw=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9, colors="#444444")
        axes.title.set(fontsize=10.5, fontweight="bold", ha="left", x=0)
    figure.suptitle(title, fontsize=14, fontweight="bold", x=0.012, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _plot_examples(
    figure: Any, curves: Sequence[Curve], colours: Sequence[str], data: ForecastData, windows: Windows
) -> None:
    """The example window of the last three variables, in the file's units."""
    x_LD, _, y_TD = windows[example_index(windows)]
    series_WD = torch.cat([x_LD, y_TD]).numpy() * data.std_D + data.mean_D
    step_s = data.series.step_s
    unit, unit_s = ("hours", 3600) if step_s < 86400 else ("days", 86400)
    time_W = (np.arange(len(series_WD)) - len(x_LD)) * step_s / unit_s
    columns = range(len(data.series.columns))[-3:]
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for axes, column in zip(panels, columns, strict=True):
        axes.axvspan(time_W[0], 0, color="#f3f3f0", lw=0)
        axes.plot(time_W, series_WD[:, column], color=TRUTH, lw=1.3, label="measured")
        for curve, colour in zip(curves, colours, strict=True):
            forecast_T = curve.sketch.forecast_TD[:, column] * data.std_D[column] + data.mean_D[column]
            axes.plot(time_W[len(x_LD) :], forecast_T, color=colour, lw=1.6, alpha=0.9, label=curve.label)
        axes.set_title(f"{data.series.columns[column]}: the middle test window")
        axes.set_xlabel(f"{unit} from the start of the forecast", fontsize=9)
        axes.margins(x=0)
        if unit == "hours":
            axes.xaxis.set_major_locator(MultipleLocator(24 * math.ceil((time_W[-1] - time_W[0]) / 24 / 8)))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9.5)


def _plot_spectra(
    spectrum: Any, error: Any, curves: Sequence[Curve], colours: Sequence[str], data: ForecastData, windows: Windows
) -> None:
    """Left the mean spectra of measurements and forecasts, right the errors' spectra relative to the first loss."""
    horizon = curves[0].sketch.forecast_TD.shape[0]
    if horizon == 1:
        for axes in (spectrum, error):
            axes.set_title("One step has no spectrum")
        return
    truth_K = torch.zeros(())
    for *_, y_BTD in data.loader("test", batch_size=256):
        truth_K = truth_K + _amplitudes(y_BTD)
    step_s = data.series.step_s
    unit, unit_s = ("day", 86400) if step_s < 86400 else ("year", 365.25 * 86400)
    # The lowest frequency, zero, is left out: it has no place on a logarithmic axis.
    frequency_K = np.fft.rfftfreq(horizon, d=step_s / unit_s)[1:]

    spectrum.loglog(frequency_K, (truth_K / len(windows))[1:], color=TRUTH, lw=1.3)
    for curve, colour in zip(curves, colours, strict=True):
        spectrum.loglog(frequency_K, curve.sketch.amplitude_K[1:], color=colour, lw=1.6, alpha=0.9)
        ratio_K = curve.sketch.error_K[1:] / curves[0].sketch.error_K[1:]
        error.semilogx(frequency_K, 100 * (ratio_K - 1), color=colour, lw=1.6, alpha=0.9)
    spectrum.set_title("Spectrum of measurements and forecasts")
    spectrum.set_ylabel("mean amplitude (normalised)", fontsize=9)
    error.set_title(f"Spectrum of the error, against {curves[0].label} training")
    error.set_ylabel("% more or less error", fontsize=9)
    for axes in (spectrum, error):
        axes.set_xlabel(f"cycles per {unit}", fontsize=9)
        axes.set_xticks([tick for tick in 2.0 ** np.arange(-6, 12) if frequency_K[0] <= tick <= frequency_K[-1]])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.01)


def _plot_scores(axes: Any, curves: Sequence[Curve], colours: Sequence[str]) -> None:
    """Test MSE (discs) and MAE (diamonds) of each seed, with their means in figures."""
    for row, (curve, colour) in enumerate(zip(curves, colours, strict=True)):
        for marker, values in (("o", curve.test_mse), ("D", curve.test_mae)):
            axes.plot(values, [row] * len(values), marker, color=colour, ms=7, alpha=0.5 if len(values) > 1 else 1)
            axes.annotate(
                f"{np.mean(values):.4f}",
                (np.mean(values), row),
                (0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    axes.set_yticks(range(len(curves)), [curve.label.replace(",", ",\n") for curve in curves])
    axes.set_ylim(len(curves) - 0.5, -0.7)
    axes.set_title("Test MSE (●) and MAE (◆)")
    axes.set_xlabel("lower is better", fontsize=9)
    axes.margins(x=0.15)
