"""Train a forecaster with several losses and compare them: FreDF as a drop-in replacement of the MSE.

    python examples/forecast.py

PLACEHOLDER
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import itertools
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from forecasting_data import DataError, ForecastData, prepare, read_series
from forecasting_models import BACKBONES
from forecasting_runs import Journal, Progress, Record, Run, run_all
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor, nn
from tqdm import tqdm

from torchext.losses import FreDFLoss

HERE = Path(__file__).resolve().parent
PAPER_SETTINGS = ("ETTh1", "ETTh2", "ETTm1", "ETTm2", "ECL", "Traffic", "Weather")  # data sets the authors tuned alpha on
LABELS = {"mse": "MSE", "mae": "MAE", "fredf": "FreDF", "dct": "DCT", "pca": "PCA", "ours": "ours"}
MAX_BASIS_WINDOWS = 8192  # a PCA basis of the horizon is settled long before every training window was seen
EVAL_BATCH_SIZE = 256


def make_loss(spec: str, dataset: str) -> nn.Module:
    """The loss that a name or a spec stands for.

    Args:
        spec: `mse`, `mae`, `fredf` (the authors' alpha for the data set), `dct`, `pca`, `ours` (`FreDFLoss.recommended()`),
            or `fredf:` and keyword arguments of FreDFLoss, as in `fredf:alpha=0.5,basis=dct,norm=ortho,time_loss=mae`.
        dataset: name of the data set, as the authors spell it.
    """
    name, colon, arguments = spec.partition(":")
    if colon and name == "fredf":
        return FreDFLoss(**_parse_arguments(arguments, spec))
    match spec:
        case "mse":
            return nn.MSELoss()
        case "mae":
            return nn.L1Loss()
        case "fredf":
            return FreDFLoss.paper(dataset) if dataset in PAPER_SETTINGS else FreDFLoss()
        case "dct":
            return FreDFLoss(basis="dct", norm="ortho")
        case "pca":
            return FreDFLoss(basis="pca")
        case "ours":
            return FreDFLoss.recommended()
    raise ValueError(
        f"losses: got {spec!r}, expected one of {', '.join(LABELS)}, or 'fredf:' and keyword arguments of FreDFLoss, "
        "such as 'fredf:alpha=0.5,basis=dct'"
    )


def _parse_arguments(text: str, spec: str) -> dict[str, Any]:
    arguments = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"losses: {item!r} in {spec!r} is not like 'alpha=0.5'")
        try:
            arguments[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            arguments[name.strip()] = value.strip()  # a word, such as dct
    return arguments


class Forecaster(L.LightningModule):
    """A backbone and a loss. This is all that changes to train with FreDF: the `loss` handed in."""

    def __init__(self, backbone: nn.Module, loss: nn.Module, lr: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.loss = loss
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x_BLD, marks_BLF, y_BTD = batch
        return self.loss(self.backbone(x_BLD, marks_BLF), y_BTD)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self._log_errors(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self._log_errors(batch, "test")

    def _log_errors(self, batch: tuple[Tensor, Tensor, Tensor], split: str) -> None:
        x_BLD, marks_BLF, y_BTD = batch
        error_BTD = self.backbone(x_BLD, marks_BLF) - y_BTD
        errors = {f"{split}_mse": error_BTD.square().mean(), f"{split}_mae": error_BTD.abs().mean()}
        self.log_dict(errors, batch_size=len(y_BTD))  # the epoch's value is the mean over all windows

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)}


class BestWeights(Callback):
    """Keep the weights of the best validation in memory, and put them back when training ends."""

    def __init__(self) -> None:
        self.num_epochs = 0
        self.errors: dict[str, float] | None = None
        self._state: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.num_epochs += 1
        errors = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if np.isfinite(errors["val_mse"]) and (self.errors is None or errors["val_mse"] < self.errors["val_mse"]):
            self.errors = errors
            self._state = {name: value.clone() for name, value in pl_module.backbone.state_dict().items()}

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.errors is not None:
            pl_module.backbone.load_state_dict(self._state)


class ReportEpochs(Callback):
    """Tell `progress` about each epoch, and count the epochs that early stopping saved as done."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run = run
        self.progress = progress
        self.epochs_left = run.epochs

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs_left -= 1
        val_mse = float(trainer.callback_metrics["val_mse"])
        self.progress(f"{self.run}: epoch {self.run.epochs - self.epochs_left}, val MSE {val_mse:.4f}", 1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.progress(f"{self.run}: best weights on the test set", self.epochs_left)


@functools.lru_cache(maxsize=2)
def load_data(path: str, lookback: int, horizon: int) -> ForecastData:
    return prepare(_read(path), lookback, horizon)


_read = functools.lru_cache(maxsize=4)(read_series)


def full_config(run: Run) -> Record:
    """The run, with its names resolved: a result is found again only while the loss and the data are still the same."""
    resolved = {"criterion": repr(make_loss(run.loss, run.dataset)), "sha256": _read(run.data).sha256}
    return dataclasses.asdict(run) | {"data": run.dataset} | resolved


def train(run: Run, progress: Progress, num_threads: int = 1) -> Record:
    """Train and test one model; the record says what was run and what came of it. The same run gives the same errors."""
    torch.set_num_threads(num_threads)
    _quieten_lightning()
    started = time.perf_counter()
    data = load_data(run.data, run.lookback, run.horizon)
    L.seed_everything(run.seed, verbose=False)
    loss = make_loss(run.loss, run.dataset)
    if getattr(loss, "basis", None) == "pca":
        loss.fit(data.splits["train"].targets(MAX_BASIS_WINDOWS))
    model = Forecaster(BACKBONES[run.backbone](run.lookback, run.horizon), loss, run.lr)

    best = BestWeights()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=run.epochs,
        limit_train_batches=run.limit_batches,
        callbacks=[EarlyStopping("val_mse", patience=run.patience), best, ReportEpochs(run, progress)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train_batches = data.loader("train", run.batch_size, shuffle=True, seed=run.seed)
    trainer.fit(model, train_batches, data.loader("val", EVAL_BATCH_SIZE))
    errors: dict[str, float | None] = dict.fromkeys(("val_mse", "val_mae", "test_mse", "test_mae"))
    if best.errors is not None:
        (test_errors,) = trainer.test(model, data.loader("test", EVAL_BATCH_SIZE), verbose=False)
        errors.update(best.errors)
        errors.update(test_errors)
    return {
        "dataset": run.dataset,
        "backbone": run.backbone,
        "horizon": run.horizon,
        "loss": run.loss,
        "lr": run.lr,
        "seed": run.seed,
        "num_epochs": best.num_epochs,
        **errors,
        "seconds": round(time.perf_counter() - started, 2),
        "config": full_config(run),
    }


def _quieten_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # windows are gathered, not loaded
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # Lightning's own, with newer torch
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")


def summarise(records: list[Record]) -> list[Record]:
    """One row for each data set, backbone, horizon and loss: means over seeds, at the learning rate best on validation."""
    cells: dict[tuple[Any, ...], dict[float, list[Record]]] = {}
    for record in records:
        cell = tuple(record[name] for name in ("dataset", "backbone", "horizon", "loss"))
        cells.setdefault(cell, {}).setdefault(record["lr"], []).append(record)
    rows = []
    for cell, by_lr in cells.items():
        lr = min(by_lr, key=lambda lr: _mean(by_lr[lr], "val_mse")[0])
        row = dict(zip(("dataset", "backbone", "horizon", "loss"), cell, strict=True))
        row |= {"lr": lr, "seeds": sorted(record["seed"] for record in by_lr[lr])}
        for name in ("val_mse", "val_mae", "test_mse", "test_mae", "num_epochs", "seconds"):
            row[name], row[f"{name}_std"] = _mean(by_lr[lr], name)
        rows.append(row)
    return rows


def _mean(records: list[Record], name: str) -> tuple[float, float]:
    values = [float("inf") if record[name] is None else record[name] for record in records]  # None: it diverged
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def format_table(rows: list[Record]) -> str:
    lines = []
    for title, group in itertools.groupby(rows, key=lambda row: (row["dataset"], row["horizon"], row["backbone"])):
        lines.append("\n{}, horizon {}, {}".format(*title))
        lines.append(f"{'trained with':<14}{'lr':>8}{'val MSE':>10}{'test MSE':>10}{'test MAE':>10}{'epochs':>8}{'seconds':>9}")
        for row in group:
            label = LABELS.get(row["loss"], row["loss"])
            if len(label) > 14:
                lines.append(label)
                label = ""
            numbers = "".join(f"{row[name]:>10.4f}" for name in ("val_mse", "test_mse", "test_mae"))
            lines.append(f"{label:<14}{row['lr']:>8g}{numbers}{row['num_epochs']:>8.1f}{row['seconds']:>9.1f}")
    return "\n".join(lines)


def run_missing(runs: list[Run], journal: Journal, args: argparse.Namespace) -> list[Record]:
    """Train what the journal does not hold yet (everything, unless resuming); records in the order of `runs`."""
    keys = {run: journal.key(full_config(run)) for run in runs}
    finished = journal.load() if args.resume else {}
    missing = [run for run in keys if keys[run] not in finished]
    if len(missing) < len(keys):
        print(f"{len(keys) - len(missing)} of {len(keys)} runs found finished in {journal.path}")
    with tqdm(total=sum(run.epochs for run in missing), unit="epoch", disable=not missing) as bar:

        def progress(text: str, num_epochs: int) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update(num_epochs)

        worker = functools.partial(train, num_threads=args.threads)
        for run, record in run_all(missing, worker, args.jobs, progress):
            journal.append(record)
            finished[keys[run]] = record
    return [finished[key] for key in keys.values()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["ETTh1"], help="CSV files, or names of files in --data-dir")
    parser.add_argument("--data-dir", type=Path, default=HERE / "data", help="where named data sets lie")
    parser.add_argument("--horizon", nargs="+", type=int, default=[96], help="steps to forecast")
    parser.add_argument("--lookback", type=int, default=96, help="steps to read")
    parser.add_argument("--backbone", nargs="+", choices=sorted(BACKBONES), default=["itransformer"])
    parser.add_argument("--losses", nargs="+", default=["mse", "mae", "fredf", "dct"], help="names or specs, see make_loss")
    parser.add_argument("--seeds", nargs="+", type=int, default=[2023])
    parser.add_argument("--lr", type=float, default=1e-3, help="first learning rate; it is halved after each epoch")
    parser.add_argument("--lr-sweep", nargs="+", type=float, help="try these and report the best on validation")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit-batches", type=int, help="training batches per epoch, for quick trials")
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at the same time, in their own processes")
    parser.add_argument("--threads", type=int, default=1, help="threads per run; more help only with many variables")
    parser.add_argument("--out", type=Path, default=Path("forecast-out"), help="folder for results")
    parser.add_argument("--resume", action="store_true", help="skip runs that --out already holds")
    return parser.parse_args()


def find_data(name: str, data_dir: Path) -> str:
    """A path as given, or the file of that name in `data_dir`."""
    return name if name.endswith(".csv") else str(data_dir / f"{name}.csv")


def main() -> None:
    args = parse_arguments()
    runs = [
        Run(find_data(data, args.data_dir), backbone, args.lookback, horizon, loss, lr, seed,
            epochs=args.epochs, limit_batches=args.limit_batches)
        for data, backbone, horizon, loss, lr, seed in itertools.product(
            args.data, args.backbone, args.horizon, args.losses, args.lr_sweep or [args.lr], args.seeds
        )
    ]
    for path, horizon in dict.fromkeys((run.data, run.horizon) for run in runs):
        load_data(path, args.lookback, horizon)
    records = run_missing(runs, Journal(args.out / "runs.jsonl"), args)
    print(format_table(summarise(records)))


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError) as error:
        sys.exit(f"forecast.py: {error}")
