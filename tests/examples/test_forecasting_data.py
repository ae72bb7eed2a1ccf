"""The benchmark protocol: which rows go where, on what scale, with which time features, and what is refused."""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path

import forecasting_data
import numpy as np
import pytest
import torch
from forecasting_data import DataError, prepare, read_series, time_features
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parents[2] / "examples" / "data"
ETTH1 = DATA / "ETTh1.csv"
MONTH = 30 * 24


@pytest.fixture(scope="module")
def table_RD() -> np.ndarray:
    """The values of ETTh1, read another way."""
    return np.loadtxt(ETTH1, delimiter=",", skiprows=1, usecols=range(1, 8))


def test_shipped_file_is_the_published_one() -> None:
    stated = re.search(r"SHA-256 `(\w+)`", (DATA / "README.md").read_text())
    assert stated is not None
    assert hashlib.sha256(ETTH1.read_bytes()).hexdigest() == stated[1]


@pytest.mark.parametrize("horizon", [96, 192, 336, 720])
def test_etth1_window_counts_are_those_of_twelve_four_and_four_months(horizon: int) -> None:
    data = prepare(read_series(ETTH1), 96, horizon)
    # A window is counted by where its forecast starts: within the split's own rows, and it must end there too.
    assert len(data.splits["train"]) == 12 * MONTH - 96 - horizon + 1
    assert len(data.splits["val"]) == 4 * MONTH - horizon + 1
    assert len(data.splits["test"]) == 4 * MONTH - horizon + 1


@pytest.mark.parametrize(
    ("split", "first_target", "end"), [("train", 96, 12), ("val", 12 * MONTH, 16), ("test", 16 * MONTH, 20)]
)
def test_windows_hold_the_rows_of_their_split(split: str, first_target: int, end: int, table_RD: np.ndarray) -> None:
    data = prepare(read_series(ETTH1), 96, 24)
    scaled_RD = (table_RD - table_RD[: 12 * MONTH].mean(axis=0)) / table_RD[: 12 * MONTH].std(axis=0)
    windows = data.splits[split]
    for index in (0, 17, len(windows) - 1):
        x_LD, _, y_TD = windows[index]
        start = first_target + index
        np.testing.assert_allclose(x_LD, scaled_RD[start - 96 : start], atol=1e-5)
        np.testing.assert_allclose(y_TD, scaled_RD[start : start + 24], atol=1e-5)
    assert first_target + len(windows) - 1 + 24 == end * MONTH


def test_a_batch_is_its_items_stacked() -> None:
    windows = prepare(read_series(ETTH1), 96, 24).splits["val"]
    indices = [5, 0, 400]
    for gathered, stacked in zip(
        windows.__getitems__(indices), zip(*map(windows.__getitem__, indices), strict=True), strict=True
    ):
        assert torch.equal(gathered, torch.stack(stacked))


def test_scale_comes_from_training_rows_alone(tmp_path: Path) -> None:
    header, *lines = ETTH1.read_text().splitlines()
    for row in range(12 * MONTH, len(lines)):
        lines[row] = lines[row].split(",")[0] + ",1e6" * 7
    changed = tmp_path / "ETTh1.csv"
    changed.write_text("\n".join([header, *lines]))
    data, other = prepare(read_series(ETTH1), 96, 96), prepare(read_series(changed), 96, 96)
    np.testing.assert_array_equal(data.mean_D, other.mean_D)
    np.testing.assert_array_equal(data.std_D, other.std_D)
    assert torch.equal(data.splits["train"].values_BDW, other.splits["train"].values_BDW)
    np.testing.assert_allclose(data.splits["train"].values_BDW[::192].mean(dim=(0, 2)), np.zeros(7), atol=0.03)


def test_other_files_are_split_by_rows_seventy_ten_twenty() -> None:
    assert forecasting_data.split_borders("weather", 1003, 36) == {
        "train": (0, 702),
        "val": (702 - 36, 803),
        "test": (803 - 36, 1003),
    }


def test_quarter_hourly_ett_has_four_times_the_rows() -> None:
    assert forecasting_data.split_borders("ETTm1", 69680, 96) == {
        "train": (0, 34560),
        "val": (34464, 46080),
        "test": (45984, 57600),
    }


def test_training_batches_are_full_shuffled_and_repeatable() -> None:
    data = prepare(read_series(ETTH1), 96, 96)
    first, again = ([y for *_, y in data.loader("train", 32, shuffle=True, seed=1)] for _ in range(2))
    other = next(iter(data.loader("train", 32, shuffle=True, seed=2)))[2]
    assert [len(y) for y in first] == [32] * (8449 // 32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other)
    assert sum(len(y) for *_, y in data.loader("test", 256)) == 2785  # not one left out


# ---- time features -------------------------------------------------------------------------------------------------


def test_hourly_features_of_a_known_hour() -> None:
    dates_R = np.datetime64("2016-07-01T00:00:00") + np.arange(72) * np.timedelta64(3600, "s")
    friday, sunday = 4 / 6 - 0.5, 0.5
    july_1 = 182 / 365 - 0.5  # 2016 is a leap year: 31 + 29 + 31 + 30 + 31 + 30 days before it
    expected = [
        [-0.5, friday, -0.5, july_1],
        [1 / 23 - 0.5, friday, -0.5, july_1],
        [0.5, sunday, 2 / 30 - 0.5, 184 / 365 - 0.5],
    ]
    np.testing.assert_allclose(time_features(dates_R)[[0, 1, 71]], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("step", "num_features"),
    [("30s", 6), ("1m", 5), ("15m", 5), ("1h", 4), ("12h", 4), ("1D", 3), ("7D", 2), ("30D", 1)],
)
def test_number_of_features_follows_the_step(step: str, num_features: int) -> None:
    dates_R = np.datetime64("2020-01-01T00:00:00") + np.arange(10) * np.timedelta64(int(step[:-1]), step[-1])
    assert time_features(dates_R.astype("datetime64[s]")).shape == (10, num_features)


@given(st.datetimes(datetime.datetime(1950, 1, 1), datetime.datetime(2100, 1, 1)))
def test_features_agree_with_the_calendar_of_the_standard_library(moment: datetime.datetime) -> None:
    moment = moment.replace(microsecond=0)

    def last_features(step: datetime.timedelta) -> list[float]:
        dates_R = np.array([moment - 2 * step, moment - step, moment], dtype="datetime64[s]")
        return list(time_features(dates_R)[-1] + 0.5)

    day_of_year = moment.timetuple().tm_yday - 1
    calendar = [moment.weekday() / 6, (moment.day - 1) / 30, day_of_year / 365]
    seconds = [moment.second / 59, moment.minute / 59, moment.hour / 23]
    assert last_features(datetime.timedelta(seconds=1)) == pytest.approx(seconds + calendar, abs=1e-6)
    week = moment.isocalendar().week - 1
    assert last_features(datetime.timedelta(weeks=1)) == pytest.approx([(moment.day - 1) / 30, week / 52], abs=1e-6)
    assert last_features(datetime.timedelta(days=31)) == pytest.approx([(moment.month - 1) / 11], abs=1e-6)


# ---- what is refused -----------------------------------------------------------------------------------------------

ROWS = "".join(f"2020-01-{day:02},{day},{day * day}\n" for day in range(1, 29))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column named 'date' among []"),
        ("time,a,b\n" + ROWS, "no column named 'date' among ['time', 'a', 'b']"),
        ("date\n2020-01-01\n", "only a 'date' column"),
        ("date,a,b\n", "no rows"),
        ("date,a,b\n2020-01-01,1,2\n2020-01-02,1\n", "row 3: 2 values under 3 column names"),
        ("date,a,b\n2020-01-01,1,2\n2020-01-02,1,high\n", "row 3: 'high' in column 'b' is not a number"),
        ("date,a,b\n2020-01-01,1,2\n2020-01-02,,2\n", "row 3: '' in column 'a', 1 of 2 values missing"),
        ("date,a,b\n2020-01-01,nan,2\n2020-01-02,nan,2\n", "row 2: 'nan' in column 'a', 2 of 2 values missing"),
        ("date,a,b\nmonday,1,2\n", "date 'monday' not understood"),
        ("date,a,b\n2020-01-01,1,2\n01/02/2020,1,2\n", "row 3: date '01/02/2020' is not like '2020-01-01'"),
    ],
)
def test_unusable_files_are_refused_with_the_place_and_the_reason(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(message)) as error:
        read_series(path)
    assert str(path) in str(error.value)


def test_too_few_rows_are_refused_with_what_would_be_enough(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("date,a,b\n" + ROWS)
    with pytest.raises(DataError, match=r"short has 28 rows, of which val .* lookback 4 \+ horizon 5 needs 9 rows"):
        prepare(read_series(path), 4, 5)
    with pytest.raises(DataError, match="horizon: got 0, expected at least 1 step"):
        prepare(read_series(path), 4, 0)
    assert len(prepare(read_series(path), 4, 3).splits["val"]) == 2  # rows 19 to 22, and four before them


def test_a_short_file_named_like_ett_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ETTh1.csv"
    path.write_text("date,a,b\n" + ROWS)
    with pytest.raises(DataError, match="ETTh1 is split 12/4/4 months and needs 14400 rows, got 28"):
        prepare(read_series(path), 4, 3)


def test_dates_with_slashes_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("\ufeffdate,a\n1990/1/1 0:00,1\n1990/1/2 0:00,2\n", encoding="utf-8")
    series = read_series(path)
    assert series.columns == ("a",)
    assert series.step_s == 86400
    assert str(series.dates_R[1]) == "1990-01-02T00:00:00"


def test_a_constant_column_becomes_zeros(tmp_path: Path) -> None:
    path = tmp_path / "flat.csv"
    path.write_text("date,a,b\n" + "".join(f"2020-01-{day:02},7,{day}\n" for day in range(1, 29)))
    x_LD, _, y_TD = prepare(read_series(path), 4, 2).splits["train"][0]
    assert torch.equal(torch.cat([x_LD, y_TD])[:, 0], torch.zeros(6))
