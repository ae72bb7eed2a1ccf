"""From single runs to the numbers one quotes: means over seeds at a learning rate chosen on validation, as tables.

A record is what `forecast.train` returns; a row is one data set, horizon, backbone and loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Record = dict[str, Any]
LABELS = {"mse": "MSE", "mae": "MAE", "fredf": "FreDF", "dct": "DCT", "pca": "PCA", "ours": "ours"}
METRICS = ("val_mse", "val_mae", "test_mse", "test_mae", "num_epochs", "seconds")


@dataclass(frozen=True)
class Row:
    """One data set, horizon, backbone, loss and learning rate, over seeds.

    Attributes:
        records: one per seed. A run that diverged has None for its errors, and counts as infinitely bad.
    """

    dataset: str
    horizon: int
    backbone: str
    loss: str
    lr: float
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        return LABELS.get(self.loss, self.loss)

    @property
    def title(self) -> tuple[str, int, str]:
        return self.dataset, self.horizon, self.backbone

    def values(self, metric: str) -> list[float]:
        return [float("inf") if record[metric] is None else record[metric] for record in self.records]

    def mean(self, metric: str) -> float:
        return float(np.mean(self.values(metric)))

    def std(self, metric: str) -> float:
        """The sample standard deviation over seeds; NaN for one seed or a run that diverged."""
        values = self.values(metric)
        return float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else float("nan")

    def as_json(self) -> Record:
        numbers = {name: _finite_or_none(self.mean(name)) for name in METRICS}
        spreads = {f"{name}_std": _finite_or_none(self.std(name)) for name in METRICS[:4]}
        names = ("dataset", "horizon", "backbone", "loss", "lr")
        seeds = [record["seed"] for record in self.records]
        return {name: getattr(self, name) for name in names} | {"seeds": seeds} | numbers | spreads


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def by_lr(records: Sequence[Record]) -> list[Row]:
    """A row for each learning rate tried, in the order of the records."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = tuple(record[name] for name in ("dataset", "horizon", "backbone", "loss", "lr"))
        groups.setdefault(key, []).append(record)
    return [Row(*key, tuple(group)) for key, group in groups.items()]


def best_lr(rows: Sequence[Row]) -> list[Row]:
    """For each data set, horizon, backbone and loss the learning rate whose validation MSE, over seeds, is lowest."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*row.title, row.loss)
        if key not in best or row.mean("val_mse") < best[key].mean("val_mse"):
            best[key] = row
    return list(best.values())


def format_text(rows: Sequence[Row]) -> str:
    """For the terminal: test errors of each loss, a table for each data set, horizon and backbone."""
    lines = []
    for title, group in itertools.groupby(rows, key=lambda row: row.title):
        shown = list(group)
        width = max(14, *(len(row.label) + 2 for row in shown))
        lines.append("\n{}, horizon {}, {}".format(*title))
        lines.append(
            f"{'trained with':<{width}}{'lr':>8}{'val MSE':>10}{'test MSE':>10}{'test MAE':>10}{'epochs':>8}{'s':>7}"
        )
        for row in shown:
            errors = "".join(f"{row.mean(name):>10.4f}" for name in ("val_mse", "test_mse", "test_mae"))
            effort = f"{row.mean('num_epochs'):>8.1f}{row.mean('seconds'):>7.1f}"
            lines.append(f"{row.label:<{width}}{row.lr:>8g}{errors}{effort}")
    return "\n".join(lines)


def format_markdown(columns: dict[str, Sequence[Row]]) -> str:
    """Test MSE / MAE with a column for each entry, a table for each backbone and data set, averages below.

    Args:
        columns: heading to its rows, at most one row for each data set, horizon and backbone. Best values are bold.
    """
    found = {heading: {row.title: row for row in rows} for heading, rows in columns.items()}
    titles = list(dict.fromkeys(title for rows in found.values() for title in rows))
    lines = []
    for (backbone, dataset), group in itertools.groupby(titles, key=lambda title: (title[2], title[0])):
        cells = {title[1]: [found[heading].get(title) for heading in columns] for title in group}
        lines += [
            f"### {backbone}, {dataset}",
            "",
            "| horizon | " + " | ".join(columns) + " |",
            "|---:|" + ":--|" * len(columns),
        ]
        lines += [
            _markdown_line(str(horizon), [[row] if row else [] for row in rows]) for horizon, rows in cells.items()
        ]
        if len(cells) > 1:
            complete = [list(column) if all(column) else [] for column in zip(*cells.values(), strict=True)]
            lines.append(_markdown_line("mean", complete))
        lines.append("")
    return "\n".join(lines)


def format_relative(columns: dict[str, Sequence[Row]]) -> str:
    """Test MSE / MAE relative to the first column's, as geometric means over what all columns have; a line a backbone.

    Within a data set the horizons count together as much as those of any other data set.
    """
    found = {heading: {row.title: row for row in rows} for heading, rows in columns.items()}
    baseline = next(iter(found.values()))
    complete = [title for title in baseline if all(title in rows for rows in found.values())]
    lines = ["| backbone | data sets | " + " | ".join(columns) + " |", "|:--|--:|" + ":--|" * len(columns)]
    for backbone in dict.fromkeys(title[2] for title in complete):
        by_dataset: dict[str, list[tuple[str, int, str]]] = {}
        for title in complete:
            if title[2] == backbone:
                by_dataset.setdefault(title[0], []).append(title)
        texts = []
        for rows in found.values():
            ratios = []
            for metric in ("test_mse", "test_mae"):
                logs = [
                    np.mean([np.log(rows[title].mean(metric) / baseline[title].mean(metric)) for title in titles])
                    for titles in by_dataset.values()
                ]
                ratios.append(f"{np.exp(np.mean(logs)):.4f}")
            texts.append(" / ".join(ratios))
        lines.append(f"| {backbone} | {len(by_dataset)} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, ""])


def _markdown_line(name: str, cells: Sequence[Sequence[Row]]) -> str:
    """One line; a cell is the mean of its rows, with spread and learning rate if it is just one, empty without any."""
    metrics = ("test_mse", "test_mae")
    means = [
        [float(np.mean([row.mean(metric) for row in cell])) for metric in metrics] if cell else None for cell in cells
    ]
    lowest = [min((mean[i] for mean in means if mean), default=None) for i in range(len(metrics))]
    texts = []
    for cell, mean in zip(cells, means, strict=True):
        if mean is None:
            texts.append("")
            continue
        numbers = [
            f"**{value:.4f}**" if value == best else f"{value:.4f}" for value, best in zip(mean, lowest, strict=True)
        ]
        if len(cell) == 1:
            spreads = [f" ±{cell[0].std(metric):.4f}" if len(cell[0].records) > 1 else "" for metric in metrics]
            numbers = [number + spread for number, spread in zip(numbers, spreads, strict=True)]
        lr = f" (lr {cell[0].lr:g})" if len(cell) == 1 else ""
        texts.append(" / ".join(numbers) + lr)
    return f"| {name} | " + " | ".join(texts) + " |"
