"""Multivariate series from CSV files, cut into look-back and forecast windows by the usual benchmark protocol.

A file has a `date` column and numeric columns. ETT files are split 12/4/4 months, others 0.7/0.1/0.2 by rows;
validation and test windows may look back into the split before theirs; values are z-scored by the statistics of the
training rows.

Shape suffixes: R rows of a file, D variables, F time features, L look-back steps, T forecast steps,
W = L + T steps of a window, B windows in a batch.
"""

from __future__ import annotations

import csv
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SPLITS = ("train", "val", "test")
_DATE_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "%m/%d/%Y %H:%M", "%m/%d/%Y")
_DATE_PARSERS: list[Callable[[str], datetime]] = [datetime.fromisoformat] + [
    functools.partial(lambda text, pattern: datetime.strptime(text, pattern), pattern=pattern)
    for pattern in _DATE_FORMATS
]
_MINUTE, _HOUR, _DAY, _WEEK, _MONTH = 60, 3600, 86400, 7 * 86400, 28 * 86400


class DataError(ValueError):
    """A data file that cannot be used, or cannot be used with the given windows; the message says what would do."""


@dataclass(frozen=True)
class Series:
    """One data file.

    Attributes:
        name: the file's name without its ending; ETTh... and ETTm... select the 12/4/4-month split.
        columns: names of the D variables.
        dates_R: datetime64[s].
        values_RD: float64, as in the file.
        sha256: of the file, so that a result says exactly which data it came from.
    """

    name: str
    columns: tuple[str, ...]
    dates_R: np.ndarray
    values_RD: np.ndarray
    sha256: str

    @property
    def step_s(self) -> int:
        """Seconds between rows: the median, as files have gaps."""
        return _step_s(self.dates_R)


def read_series(path: str | Path) -> Series:
    """Read a CSV file with a header, a `date` column and numeric columns.

    Raises:
        DataError: no such file, no `date` column, no other column, a row of another length, a value or date that
            cannot be read, a missing value.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"data: no file {str(path)!r}; give the path of a CSV file with a 'date' column")
    raw = path.read_bytes()
    rows = [row for row in csv.reader(raw.decode("utf-8-sig").splitlines()) if row]
    header = [name.strip() for name in rows[0]] if rows else []
    if "date" not in header:
        raise DataError(f"{path}: no column named 'date' among {header}; name the column of time stamps 'date'")
    if len(header) < 2:
        raise DataError(f"{path}: only a 'date' column; at least one numeric column is needed")
    if len(rows) < 2:
        raise DataError(f"{path}: a header but no rows")
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise DataError(f"{path}, row {line}: {len(row)} values under {len(header)} column names")
    cells = dict(zip(header, zip(*rows[1:], strict=True), strict=True))
    dates_R = _parse_dates(cells.pop("date"), path)
    values_RD = np.stack([_parse_column(name, column, path) for name, column in cells.items()], axis=1)
    return Series(path.stem, tuple(cells), dates_R, values_RD, hashlib.sha256(raw).hexdigest())


def _parse_column(name: str, column: tuple[str, ...], path: Path) -> np.ndarray:
    values_R = np.empty(len(column))
    for index, cell in enumerate(column):
        try:
            values_R[index] = float(cell) if cell.strip() else np.nan
        except ValueError:
            raise DataError(
                f"{path}, row {index + 2}: {cell!r} in column {name!r} is not a number; drop or encode this column"
            ) from None
    missing = np.flatnonzero(~np.isfinite(values_R))
    if missing.size:
        raise DataError(
            f"{path}, row {missing[0] + 2}: {column[missing[0]]!r} in column {name!r}, {missing.size} of "
            f"{len(column)} values missing or infinite; fill or drop them first"
        )
    return values_R


def _parse_dates(column: tuple[str, ...], path: Path) -> np.ndarray:
    for parse in _DATE_PARSERS:
        try:
            parse(column[0].strip())
        except ValueError:
            continue
        dates = []
        for index, cell in enumerate(column):
            try:
                dates.append(parse(cell.strip()))
            except ValueError:
                raise DataError(f"{path}, row {index + 2}: date {cell!r} is not like {column[0]!r} above") from None
        return np.array(dates, dtype="datetime64[s]")
    raise DataError(f"{path}: date {column[0]!r} not understood; write dates like '2016-07-01 00:00:00'")


def _step_s(dates_R: np.ndarray) -> int:
    return int(np.median(np.diff(dates_R).astype(np.int64))) if len(dates_R) > 1 else _HOUR


def time_features(dates_R: np.ndarray) -> np.ndarray:
    """Calendar features `(R, F)` float32, each scaled to [-0.5, 0.5]; which ones depends on the step between rows.

    Below a minute: second, minute, hour, day of week, of month, of year; below an hour: from the minute; below a day:
    from the hour; below a week: from the day of week; below four weeks: day of month, ISO week of year; else: month.
    """
    days_R = dates_R.astype("datetime64[D]")
    months_R = dates_R.astype("datetime64[M]")
    second_of_day_R = (dates_R - days_R).astype(np.int64)
    day_of_week_R = (days_R.astype(np.int64) + 3) % 7  # Monday is 0; 1970-01-01 was a Thursday
    day_of_month_R = (days_R - months_R).astype(np.int64)
    day_of_year_R = (days_R - dates_R.astype("datetime64[Y]")).astype(np.int64)

    calendar = [
        second_of_day_R % 60 / 59,
        second_of_day_R // 60 % 60 / 59,
        second_of_day_R // 3600 / 23,
        day_of_week_R / 6,
        day_of_month_R / 30,
        day_of_year_R / 365,
    ]
    step_s = _step_s(dates_R)
    if step_s >= _MONTH:
        features = [months_R.astype(np.int64) % 12 / 11]
    elif step_s >= _WEEK:
        thursday_R = days_R + (3 - day_of_week_R)  # the ISO week belongs to the year of its Thursday
        week_R = (thursday_R - thursday_R.astype("datetime64[Y]")).astype(np.int64) // 7
        features = [day_of_month_R / 30, week_R / 52]
    else:
        features = calendar[sum(step_s >= unit_s for unit_s in (_MINUTE, _HOUR, _DAY)) :]
    return (np.stack(features, axis=1) - 0.5).astype(np.float32)


def split_borders(name: str, num_rows: int, lookback: int) -> dict[str, tuple[int, int]]:
    """First and last-plus-one row of each split; validation and test begin `lookback` rows early, as their context."""
    if name.startswith(("ETTh", "ETTm")):
        month = 30 * 24 * (4 if name.startswith("ETTm") else 1)
        train, val, end = 12 * month, 16 * month, 20 * month
        if num_rows < end:
            raise DataError(
                f"data: {name} is split 12/4/4 months and needs {end} rows, got {num_rows}; "
                "use the whole file, or another file name to split it 0.7/0.1/0.2"
            )
    else:
        train, val, end = int(num_rows * 0.7), num_rows - int(num_rows * 0.2), num_rows
    return {"train": (0, train), "val": (train - lookback, val), "test": (val - lookback, end)}


class Windows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Every window of a split, cut on demand, a whole batch at a time.

    Args:
        values_RD, marks_RF: float, the rows of the split and their time features.

    An item is (x `(L, D)`, its time features `(L, F)`, y `(T, D)`); `__getitems__`, which DataLoader calls with the
    indices of a batch, gives the same with B in front. The tensors are time-last in memory.
    """

    def __init__(self, values_RD: Tensor, marks_RF: Tensor, lookback: int, horizon: int) -> None:
        self.lookback = lookback
        # unfold makes views: overlapping windows cost no memory until a batch is gathered
        self.values_BDW = values_RD.unfold(0, lookback + horizon, 1)
        self.marks_BFL = marks_RF[: len(marks_RF) - horizon].unfold(0, lookback, 1)

    def __len__(self) -> int:
        return len(self.values_BDW)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        x_BLD, marks_BLF, y_BTD = self.__getitems__([index])
        return x_BLD[0], marks_BLF[0], y_BTD[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        index_B = torch.tensor(indices)
        values_BWD = self.values_BDW[index_B].mT
        return values_BWD[:, : self.lookback], self.marks_BFL[index_B].mT, values_BWD[:, self.lookback :]

    def targets(self, max_windows: int) -> Tensor:
        """The forecast parts `(N, T, D)` of at most `max_windows` evenly spaced windows."""
        stride = -(-len(self) // max_windows)
        return self.values_BDW[::stride, :, self.lookback :].mT


@dataclass(frozen=True)
class ForecastData:
    """The three splits of a series, normalised, as windows; `mean_D` and `std_D` undo the normalisation."""

    series: Series
    splits: dict[str, Windows]
    mean_D: np.ndarray
    std_D: np.ndarray

    def loader(self, split: str, batch_size: int, *, shuffle: bool = False, seed: int = 0) -> DataLoader:
        """Batches of a split. Shuffled ones are for training: reproducible, and without the incomplete last one."""
        windows = self.splits[split]
        return DataLoader(
            windows,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=shuffle and len(windows) >= batch_size,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=_as_gathered,
        )


def _as_gathered(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch


def prepare(series: Series, lookback: int, horizon: int) -> ForecastData:
    """Split, normalise and window a series.

    Raises:
        DataError: a split has fewer rows than one window, or a window size below one step.
    """
    for name, steps in (("lookback", lookback), ("horizon", horizon)):
        if steps < 1:
            raise DataError(f"{name}: got {steps}, expected at least 1 step")
    num_rows = len(series.values_RD)
    borders = split_borders(series.name, num_rows, lookback)
    for split, (start, stop) in borders.items():
        if start < 0 or stop - start < lookback + horizon:
            raise DataError(
                f"data: {series.name} has {num_rows} rows, of which {split} gets rows {max(start, 0)} to {stop}; "
                f"lookback {lookback} + horizon {horizon} needs {lookback + horizon} rows in each split; "
                "use a longer file or shorter windows"
            )
    train_RD = series.values_RD[slice(*borders["train"])]
    mean_D, std_D = train_RD.mean(axis=0), train_RD.std(axis=0)
    std_D = np.where(std_D > 0, std_D, 1.0)  # a constant column stays, as zeros
    values_RD = torch.from_numpy(((series.values_RD - mean_D) / std_D).astype(np.float32))
    marks_RF = torch.from_numpy(time_features(series.dates_R))
    splits = {
        split: Windows(values_RD[start:stop], marks_RF[start:stop], lookback, horizon)
        for split, (start, stop) in borders.items()
    }
    return ForecastData(series, splits, mean_D, std_D)
