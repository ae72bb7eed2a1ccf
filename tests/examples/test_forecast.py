"""examples/forecast.py by its command line, and the numbers that come of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import forecast
import matplotlib.image
import numpy as np
import pytest
import torch
from forecasting_runs import Journal, Run
from forecasting_tables import by_lr
from torch import nn

from torchext.losses import FreDFLoss

# Each command imports torch and Lightning anew, in several processes: seconds, but minutes on a busy machine.
# Those that train in this process set its number of threads.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ETTH1 = str(EXAMPLES / "data" / "ETTh1.csv")


def run_command_line(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "forecast.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def short_run(**changes: Any) -> Run:
    settings: dict[str, Any] = {"data": ETTH1, "backbone": "dlinear", "lookback": 96, "horizon": 96, "loss": "mse"}
    settings |= {"lr": 1e-3, "seed": 1, "epochs": 1, "limit_batches": 3}
    return Run(**(settings | changes))


def ignore_progress(text: str, num_epochs: int) -> None:
    pass


@pytest.fixture
def waves(tmp_path: Path) -> str:
    """Two sines with periods of 12 and 8 hours and a little noise: what a linear model can forecast."""
    hour_R = np.arange(900)
    generator = np.random.default_rng(0)
    values_RD = np.stack([np.sin(2 * np.pi * hour_R / 12), 5 + 2 * np.cos(2 * np.pi * hour_R / 8)], axis=1)
    values_RD += 0.05 * generator.standard_normal(values_RD.shape)
    dates_R = np.datetime64("2020-01-01T00") + hour_R
    lines = [f"{date},{a:.6f},{b:.6f}" for date, (a, b) in zip(dates_R, values_RD, strict=True)]
    path = tmp_path / "waves.csv"
    path.write_text("date,sine,cosine\n" + "\n".join(lines) + "\n")
    return str(path)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A short job on the shipped data, in two processes, and its folder."""
    folder = tmp_path_factory.mktemp("forecast")
    done = run_command_line(
        *("--losses", "mse", "fredf:alpha=0.5,norm=ortho", "--seeds", "1", "--epochs", "1", "--limit-batches", "3"),
        *("--jobs", "2", "--out", folder),
    )
    assert done.returncode == 0, done.stderr
    return done, folder


def test_command_leaves_table_records_and_picture(command: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = command
    assert "ETTh1, horizon 96, itransformer" in done.stdout
    assert "2/2" in done.stderr  # the progress bar counted both epochs
    records = read_journal(folder)
    assert {record["loss"] for record in records} == {"mse", "fredf:alpha=0.5,norm=ortho"}
    for record in records:
        assert f"{record['test_mse']:.4f}" in done.stdout
        assert (record["dataset"], record["backbone"], record["horizon"]) == ("ETTh1", "itransformer", 96)
        assert 0 < record["test_mae"] < record["test_mse"] ** 0.5  # Jensen
    picture = matplotlib.image.imread(folder / "ETTh1-96-itransformer.png")
    assert picture.shape[0] > 600
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05  # not blank


def test_parallel_processes_give_the_same_numbers_as_one_process(
    command: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    for record in read_journal(command[1]):
        alone, _ = forecast.train(short_run(backbone="itransformer", loss=record["loss"]), ignore_progress)
        assert alone["config"] == record["config"]
        assert (alone["test_mse"], alone["test_mae"]) == (record["test_mse"], record["test_mae"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.csv"), "no file 'nowhere.csv'"),
        (("--losses", "huber"), "got 'huber', expected one of mse, mae, fredf"),
        (("--losses", "fredf:alpha=2"), "alpha"),
        (("--losses", "fredf:alpha"), "'alpha' in 'fredf:alpha' is not like 'alpha=0.5'"),
        (("--horizon", "5000"), "lookback 96 + horizon 5000 needs 5096 rows"),
        (("--horizon", "0"), "horizon: got 0, expected at least 1"),
        (("--data", "ETTh2"), "ETTh2.csv'; it is not shipped, get it from zhouhaoyi/ETDataset"),
        (("--reproduce", "--data", "ETTh2"), "nothing to run: ETTh2: no ETTh2.csv in --data-dir"),
        (("--reproduce", "--horizon", "7"), "fits no part of the table, which holds ETTh1/96 itransformer, "),
    ],
)
def test_what_cannot_be_run_is_named_before_training_starts(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["forecast.py", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit_info:
        forecast.main()
    assert message in str(exit_info.value)
    assert not (tmp_path / "out").exists()


def test_a_limit_below_one_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["forecast.py", "--limit-batches", "0"])
    with pytest.raises(SystemExit):
        forecast.parse_arguments()
    assert "--limit-batches: got 0, expected at least 1" in capsys.readouterr().err


def test_by_default_four_losses_are_compared_by_the_usual_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["forecast.py"])
    runs, skipped = forecast.plan(forecast.parse_arguments())
    assert [run.loss for run in runs] == ["mse", "mae", "fredf", "dct"]
    assert {(run.data, run.backbone, run.lookback, run.horizon) for run in runs} == {(ETTH1, "itransformer", 96, 96)}
    assert {run.limit_batches for run in runs} == {None}
    assert not skipped


def test_reproduce_goes_on_after_a_torn_line_and_reports_the_same(tmp_path: Path) -> None:
    arguments = (
        *("--reproduce", "--backbone", "dlinear", "--horizon", "96", "--losses", "mse", "fredf", "--seeds", "1", "2"),
        *("--lr-sweep", "1e-3", "--epochs", "1", "--limit-batches", "2", "--jobs", "1", "--out", tmp_path),
    )
    first = run_command_line(*arguments)
    assert first.returncode == 0, first.stderr
    assert "ETTh2: no ETTh2.csv in --data-dir" in first.stdout
    journal = tmp_path / "runs.jsonl"
    text = journal.read_text()
    assert len(text.splitlines()) == 6  # two seeds of: MSE at the grid's and the authors' rate, FreDF at the one rate
    report = json.loads((tmp_path / "reproduce.json").read_text())
    markdown = (tmp_path / "reproduce.md").read_text()
    assert "### dlinear, ETTh1" in markdown
    assert "| horizon | MSE | FreDF | MSE, authors' settings | FreDF, authors' settings |" in markdown
    assert "Left out: ETTh2" in markdown

    journal.write_text(text[: -len(text.splitlines()[-1]) // 2])
    second = run_command_line(*arguments)
    assert second.returncode == 0, second.stderr
    assert "5 of 6 runs found finished" in second.stdout
    again = json.loads((tmp_path / "reproduce.json").read_text())
    for part in ("best_lr", "authors", "every_lr"):
        assert [{**row, "seconds": 0} for row in again[part]] == [{**row, "seconds": 0} for row in report[part]]
    assert {row["lr"] for row in report["best_lr"]} == {1e-3}
    assert [(row["loss"], row["lr"]) for row in report["authors"]] == [("mse", 1e-4), ("fredf", 1e-3)]
    assert report["seeds"] == [1, 2]
    assert report["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in report["command"]


# ---- one training --------------------------------------------------------------------------------------------------


def test_same_seed_gives_the_same_result_and_another_seed_does_not() -> None:
    first, again, other = (
        forecast.train(short_run(backbone="itransformer", seed=seed), ignore_progress)[0] for seed in (1, 1, 2)
    )
    errors = ("val_mse", "val_mae", "test_mse", "test_mae")
    assert [first[name] for name in errors] == [again[name] for name in errors]
    assert first["test_mse"] != other["test_mse"]


@pytest.mark.parametrize("loss", ["mse", "mae", "fredf", "dct", "pca", "ours", "fredf:basis=haar,alpha=0.9"])
def test_every_loss_learns_to_forecast_waves(loss: str, waves: str) -> None:
    run = short_run(data=waves, lookback=24, horizon=12, loss=loss, lr=0.02, epochs=8, limit_batches=None)
    record, _ = forecast.train(run, ignore_progress)
    assert record["test_mse"] < 0.05  # of a variance of 1: the noise and little else
    assert record["config"]["criterion"].startswith(("MSELoss", "L1Loss", "FreDFLoss"))


def test_test_errors_are_those_of_the_epoch_best_on_validation() -> None:
    run = short_run(lr=3e-3, epochs=10, limit_batches=100)
    val_mses: list[float] = []

    def collect(text: str, num_epochs: int) -> None:
        if "val MSE" in text:
            val_mses.append(float(text.rpartition(" ")[2]))

    record, _ = forecast.train(run, collect)
    best_epoch = int(np.argmin(val_mses)) + 1
    assert best_epoch < len(val_mses) == record["num_epochs"]
    assert record["val_mse"] == pytest.approx(min(val_mses), abs=1e-4)
    stopped, _ = forecast.train(short_run(**(vars(run) | {"epochs": best_epoch})), ignore_progress)
    assert stopped["test_mse"] == record["test_mse"]


def test_test_errors_are_means_over_every_window(waves: str) -> None:
    run = short_run(data=waves, lookback=24, horizon=12)
    record, sketch = forecast.train(run, ignore_progress, with_sketch=True)
    # The same model again, its forecasts compared in numpy.
    torch.manual_seed(run.seed)
    data = forecast.load_data(run.data, 24, 12)
    model = forecast.BACKBONES["dlinear"](24, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    for step, (x_BLD, marks_BLF, y_BTD) in enumerate(data.loader("train", run.batch_size, shuffle=True, seed=run.seed)):
        if step == run.limit_batches:
            break
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x_BLD, marks_BLF), y_BTD).backward()
        optimizer.step()
    windows = data.splits["test"]
    with torch.no_grad():
        errors = [
            (model(x[None], marks[None])[0] - y).double().numpy()
            for x, marks, y in map(windows.__getitem__, range(len(windows)))
        ]
    assert record["test_mse"] == pytest.approx(np.mean(np.square(errors)), rel=1e-4)
    assert record["test_mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)
    assert sketch is not None
    spectra = np.abs(np.fft.rfft(errors, axis=1, norm="ortho")).mean(axis=(0, 2))
    np.testing.assert_allclose(sketch.error_K, spectra, rtol=1e-4)


def test_losses_by_name_and_by_spec() -> None:
    assert forecast.make_loss("fredf", "ETTh2").alpha == FreDFLoss.paper("ETTh2").alpha
    assert forecast.make_loss("fredf", "exchange_rate").alpha == FreDFLoss().alpha
    loss = forecast.make_loss("fredf:alpha=0.5,basis=dct,norm=ortho,time_loss=mae", "ETTh1")
    assert repr(loss) == repr(FreDFLoss(alpha=0.5, basis="dct", norm="ortho", time_loss="mae"))


def test_an_untrainable_run_is_recorded_as_diverged_not_as_numbers(waves: str, tmp_path: Path) -> None:
    run = short_run(data=waves, lookback=24, horizon=12, lr=1e30, epochs=3)
    record, _ = forecast.train(run, ignore_progress)
    assert record["test_mse"] is None
    Journal(tmp_path / "runs.jsonl").append(record)
    (row,) = by_lr(read_journal(tmp_path))
    assert row.mean("val_mse") == float("inf")
    assert row.as_json()["test_mse"] is None
