r"""Train a forecaster with different losses on real data and compare them: FreDF as a drop-in for the MSE.

    python examples/forecast.py

reads 96 hours of a power transformer's seven series and forecasts the next 96, with an iTransformer trained by each
loss in turn. It takes one to two minutes on two cores and prints (other machines differ in the last digits)

    ETTh1, horizon 96, itransformer
    trained with        lr   val MSE  test MSE  test MAE  epochs      s
    MSE              0.001    0.6847    0.3918    0.4086     4.0    ...
    MAE              0.001    0.6842    0.3866    0.3990     6.0    ...
    FreDF            0.001    0.6821    0.3789    0.3983     8.0    ...
    DCT              0.001    0.6898    0.3754    0.3944    10.0    ...
    picture: outputs/forecast/ETTh1-96-itransformer.png

The picture shows forecasts, and where on the frequency axis the losses differ. Your own file: `--data file.csv`, with a
`date` column and numeric ones. Several values of --data, --horizon, --backbone, --losses, --seeds are combined:

    python examples/forecast.py --backbone dlinear --horizon 96 192 --seeds 1 2 3 --lr-sweep 1e-4 1e-3 \
        --losses mse fredf fredf:alpha=0.5,basis=dct,norm=ortho,time_loss=mae

The whole table, resumable (hours on two cores; ETTh2.csv is looked for in --data-dir):

    python examples/forecast.py --reproduce --data-dir DIR

Protocol: 12/4/4 months for training, validation and test, z-scored by the training rows; Adam, batches of 32, at most
10 epochs, the learning rate halved after each; the weights best on validation MSE are tested, on every window.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import itertools
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import forecasting_reproduce as reproduce
import lightning as L
import numpy as np
import torch
from forecasting_data import DataError, ForecastData, prepare, read_series
from forecasting_models import BACKBONES
from forecasting_plot import Curve, Sketch, make_sketch, plot
from forecasting_runs import Journal, Progress, Record, Run, run_all
from forecasting_tables import LABELS, Row, best_lr, by_lr, format_text
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor, nn
from tqdm import tqdm

from torchext.losses import FreDFLoss

HERE = Path(__file__).resolve().parent
PAPER_SETTINGS = ("ETTh1", "ETTh2", "ETTm1", "ETTm2", "ECL", "Traffic", "Weather")  # data the authors tuned alpha on
MAX_BASIS_WINDOWS = 8192  # a PCA basis of the horizon is settled long before every training window was seen
EVAL_BATCH_SIZE = 256
NAMES = {"itransformer": "iTransformer", "dlinear": "DLinear"}


class LossSpecError(ValueError):
    """A loss name or spec that means nothing; the message says what would."""


def make_loss(spec: str, dataset: str) -> nn.Module:
    """The loss that a name or a spec stands for.

    Args:
        spec: `mse`, `mae`, `fredf` (the authors' alpha for the data set), `dct` and `pca` (mean absolute difference
            in that basis alone), `ours` (`FreDFLoss.recommended()`), or `fredf:` and keyword arguments of FreDFLoss,
            as in `fredf:alpha=0.5,basis=dct,norm=ortho,time_loss=mae`.
        dataset: name of the data set, as the authors spell it.
    """
    name, colon, arguments = spec.partition(":")
    if colon and name == "fredf":
        try:
            return FreDFLoss(**_parse_arguments(arguments, spec))
        except (TypeError, ValueError) as error:
            raise LossSpecError(f"losses: {spec!r}: {error}") from error
    match spec:
        case "mse":
            return nn.MSELoss()
        case "mae":
            return nn.L1Loss()
        case "fredf":
            return FreDFLoss.paper(dataset) if dataset in PAPER_SETTINGS else FreDFLoss()
        case "dct":
            return FreDFLoss(alpha=1.0, basis="dct", norm="ortho")
        case "pca":
            return FreDFLoss(alpha=1.0, basis="pca")
        case "ours":
            return FreDFLoss.recommended()
    raise LossSpecError(
        f"losses: got {spec!r}, expected one of {', '.join(LABELS)}, or 'fredf:' and keyword arguments of FreDFLoss, "
        "such as 'fredf:alpha=0.5,basis=dct'"
    )


def _parse_arguments(text: str, spec: str) -> dict[str, Any]:
    arguments = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise LossSpecError(f"losses: {item!r} in {spec!r} is not like 'alpha=0.5'")
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


def train(
    run: Run, progress: Progress, *, num_threads: int = 1, with_sketch: bool = False
) -> tuple[Record, Sketch | None]:
    """Train and test one model: what was run and what came of it, and on request what a picture of it needs.

    The same run gives the same errors, whatever else is running.
    """
    torch.set_num_threads(num_threads)
    _quieten_lightning()
    started = time.perf_counter()
    data = load_data(run.data, run.lookback, run.horizon)
    torch.manual_seed(run.seed)  # of weights and dropout; the loader has its own
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
        found = {**best.errors, **test_errors}
        errors = {name: value if np.isfinite(value := found[name]) else None for name in errors}
    record = {
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
        "commit": reproduce.commit(),
    }
    return record, make_sketch(model.backbone, data) if with_sketch else None


def _quieten_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # windows are gathered, not loaded
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # Lightning's own, with newer torch
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")


def train_missing(
    runs: list[Run], journal: Journal, args: argparse.Namespace
) -> tuple[list[Record], dict[str, Sketch]]:
    """Train what the journal does not hold yet (everything, unless resuming).

    Returns:
        The records in the order of `runs`, and the sketches of those trained now by the key of their config.
    """
    keys = {run: journal.key(full_config(run)) for run in runs}
    finished = journal.load() if args.resume or args.reproduce else {}
    missing = [run for run in keys if keys[run] not in finished]
    if len(missing) < len(keys):
        print(f"{len(keys) - len(missing)} of {len(keys)} runs found finished in {journal.path}")
    sketches: dict[str, Sketch] = {}
    with tqdm(total=sum(run.epochs for run in missing), unit="epoch", disable=not missing) as bar:

        def progress(text: str, num_epochs: int) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update(num_epochs)

        worker = functools.partial(train, num_threads=args.threads, with_sketch=not args.reproduce)
        for run, (record, sketch) in run_all(missing, worker, args.jobs, progress):
            journal.append(record)
            finished[keys[run]] = record
            if sketch is not None:
                sketches[keys[run]] = sketch
    return [finished[key] for key in keys.values()], sketches


def plot_all(rows: list[Row], sketches: dict[str, Sketch], runs: list[Run], folder: Path) -> None:
    """One picture for each data set, horizon and backbone."""
    for title, group in itertools.groupby(rows, key=lambda row: row.title):
        dataset, horizon, backbone = title
        path = folder / f"{dataset}-{horizon}-{backbone}.png"
        shown = [(row, sketches.get(Journal.key(row.records[0]["config"]))) for row in group]
        curves = [
            Curve(row.label, sketch, row.values("test_mse"), row.values("test_mae")) for row, sketch in shown if sketch
        ]
        if not curves:
            print(f"no picture {path}: its runs were found finished; run without --resume to draw it")
            continue
        run = next(run for run in runs if run.dataset == dataset and run.horizon == horizon)
        heading = f"{dataset}, {horizon} steps ahead: {NAMES[backbone]} trained with each loss"
        plot(curves, load_data(run.data, run.lookback, horizon), heading, path)
        print(f"picture: {path}")


def _num_cores() -> int:
    """Of those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a forecaster with several losses and compare them.")
    add = functools.partial(parser.add_argument, metavar="X")
    add("--data", nargs="+", help="CSV files, or names of files in --data-dir (ETTh1)")
    add("--data-dir", type=Path, default=HERE / "data", help="where named data sets lie (examples/data)")
    add("--horizon", nargs="+", type=int, help="steps to forecast (96)")
    add("--lookback", type=int, default=96, help="steps to read (96)")
    add("--backbone", nargs="+", choices=sorted(BACKBONES), help="itransformer or dlinear (itransformer)")
    add("--losses", nargs="+", help=f"of {', '.join(LABELS)}, fredf:alpha=0.5,basis=dct,... (mse mae fredf dct)")
    add("--seeds", nargs="+", type=int, help="one run for each (2023)")
    add("--lr", type=float, default=1e-3, help="first learning rate; it is halved after each epoch (1e-3)")
    add("--lr-sweep", nargs="+", type=float, help="try these instead and report the best on validation")
    add("--epochs", type=int, default=10, help="at most; training stops 3 epochs after the best (10)")
    add("--limit-batches", type=int, help="training batches per epoch, for quick trials (all)")
    add("--jobs", type=int, default=_num_cores(), help="runs trained at the same time, in their own processes (cores)")
    add("--threads", type=int, default=1, help="threads per run; more help only with many variables (1)")
    add("--out", type=Path, default=Path("outputs/forecast"), help="folder for results (outputs/forecast)")
    parser.add_argument("--resume", action="store_true", help="skip runs that --out already holds")
    parser.add_argument(
        "--reproduce", action="store_true", help="the whole table, resumable: reproduce.md and reproduce.json in --out"
    )
    args = parser.parse_args()
    for name in ("lookback", "epochs", "limit_batches", "jobs", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    for lr in (args.lr, *(args.lr_sweep or ())):
        if not 0 < lr < float("inf"):
            parser.error(f"--lr, --lr-sweep: got {lr:g}, expected a positive number")
    return args


def plan(args: argparse.Namespace) -> tuple[list[Run], list[str]]:
    """The runs asked for, and a sentence for each data set that --reproduce leaves out.

    Raises:
        DataError, LossSpecError: found before anything is trained.
    """
    if args.reproduce:
        wanted = (args.backbone, args.data, args.horizon)
        cells = [
            cell
            for cell in reproduce.CELLS
            if all(choice is None or part in choice for part, choice in zip(cell, wanted, strict=True))
        ]
        losses, seeds = args.losses or reproduce.LOSSES, args.seeds or reproduce.SEEDS
        grids = reproduce_grids(args)
        lrs = {
            (cell, loss): reproduce.learning_rates(loss, cell[1], grids[cell[0]]) for cell in cells for loss in losses
        }
    else:
        cells = list(itertools.product(args.backbone or ["itransformer"], args.data or ["ETTh1"], args.horizon or [96]))
        losses, seeds = args.losses or ["mse", "mae", "fredf", "dct"], args.seeds or [2023]
        lrs = {(cell, loss): args.lr_sweep or [args.lr] for cell in cells for loss in losses}
    runs, skipped = [], {}
    for cell in cells:
        backbone, name, horizon = cell
        path = find_data(name, args.data_dir)
        if name in reproduce.SOURCES and not Path(path).is_file():
            source = f"it is not shipped, get it from {reproduce.SOURCES[name]}"
            if not args.reproduce:
                raise DataError(f"data: no file {path!r}; {source}")
            skipped[name] = f"{name}: no {name}.csv in --data-dir; {source}."
            continue
        lookback = reproduce.LOOKBACKS.get(name, args.lookback) if args.reproduce else args.lookback
        load_data(path, lookback, horizon)
        for loss, seed in itertools.product(losses, seeds):
            make_loss(loss, Path(path).stem)
            limits = {"epochs": args.epochs, "limit_batches": args.limit_batches}
            runs += [Run(path, backbone, lookback, horizon, loss, lr, seed, **limits) for lr in lrs[cell, loss]]
    if not runs:
        table = ", ".join(f"{name}/{horizon} {backbone}" for backbone, name, horizon in reproduce.CELLS)
        reason = " ".join(skipped.values()) or f"got a choice that fits no part of the table, which holds {table}"
        raise DataError(f"reproduce: nothing to run: {reason}; other data and horizons run without --reproduce")
    return runs, list(skipped.values())


def reproduce_grids(args: argparse.Namespace) -> reproduce.Grids:
    """The learning rates that --reproduce chooses from, by backbone."""
    return dict.fromkeys(BACKBONES, args.lr_sweep) if args.lr_sweep else reproduce.LR_GRIDS


def find_data(name: str, data_dir: Path) -> str:
    """A path as given, or the file of that name in `data_dir` or among those shipped."""
    if name.endswith(".csv"):
        return name
    shipped, given = HERE / "data" / f"{name}.csv", data_dir / f"{name}.csv"
    return str(shipped if shipped.is_file() and not given.is_file() else given)


def main() -> None:
    args = parse_arguments()
    try:
        runs, skipped = plan(args)
    except (DataError, LossSpecError) as error:
        sys.exit(f"forecast.py: {error}")
    for sentence in skipped:
        print(f"left out: {sentence}")
    records, sketches = train_missing(runs, Journal(args.out / "runs.jsonl"), args)
    rows = by_lr(records)
    if args.reproduce:
        for path in reproduce.write_report(records, reproduce_grids(args), skipped, args.out):
            print(f"report: {path}")
        return
    print(format_text(best_lr(rows)))
    plot_all(best_lr(rows), sketches, runs, args.out)


if __name__ == "__main__":
    main()
