"""The whole table of examples/forecast.py --reproduce: which runs it takes, and the report on them.

Every loss is given the learning rate that is best for it on validation, out of one small grid, and the settings of
FreDF's authors stand beside it, so that neither side wins by tuning.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forecasting_tables import LABELS, Record, best_lr, by_lr, format_markdown, format_relative

Grids = dict[str, Sequence[float]]  # learning rates to choose from, by backbone

HORIZONS = (96, 192, 336, 720)
CELLS = (
    *(("itransformer", "ETTh1", horizon) for horizon in HORIZONS),
    ("itransformer", "ETTh2", 96),
    ("itransformer", "exchange_rate", 96),
    ("itransformer", "national_illness", 24),
    *(("dlinear", "ETTh1", horizon) for horizon in HORIZONS),
    *(("dlinear", "ETTh2", horizon) for horizon in HORIZONS),
    ("dlinear", "ETTm1", 96),
    *(("dlinear", "exchange_rate", horizon) for horizon in (96, 336)),
    *(("dlinear", "national_illness", horizon) for horizon in (24, 48)),
)
LOOKBACKS = {"national_illness": 36}  # weekly data; 96 elsewhere
SOURCES = {
    "ETTh2": "zhouhaoyi/ETDataset",
    "ETTm1": "zhouhaoyi/ETDataset",
    "exchange_rate": "laiguokun/multivariate-time-series-data",
    "national_illness": "the US CDC, as packed by the authors of Autoformer",
}
LOSSES = ("mse", "mae", "fredf", "ours")
SEEDS = (2023, 2024, 2025)
LR_GRIDS: Grids = {"itransformer": (3e-4, 1e-3), "dlinear": (1e-3, 3e-3, 1e-2)}
# Of the authors' scripts: their baselines train with MSE at 1e-4, FreDF on ETT hourly data at 1e-3.
AUTHORS_LR = {"mse": 1e-4, "fredf": 1e-3}


def learning_rates(loss: str, dataset: str, grid: Sequence[float]) -> list[float]:
    """The grid, and the authors' learning rate for the loss if they give one for the data set."""
    return sorted({*grid, *([AUTHORS_LR[loss]] if is_authors(loss, dataset) else [])})


def is_authors(loss: str, dataset: str) -> bool:
    return loss in AUTHORS_LR and dataset.startswith("ETT")


def write_report(records: Sequence[Record], grids: Grids, skipped: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Write `reproduce.md` and `reproduce.json`; give back their paths.

    Args:
        records: finished runs, of the grid and of the authors' settings.
        grids: the learning rates to choose from, by backbone.
        skipped: a sentence for each thing left out.
        folder: where to write.
    """
    rows = by_lr(records)
    losses = list(dict.fromkeys(row.loss for row in rows))
    chosen = best_lr([row for row in rows if row.lr in grids[row.backbone]])
    authors = [row for row in rows if is_authors(row.loss, row.dataset) and AUTHORS_LR[row.loss] == row.lr]
    columns = {LABELS.get(loss, loss): [row for row in chosen if row.loss == loss] for loss in losses}
    columns |= {
        f"{LABELS[loss]}, authors' settings": [row for row in authors if row.loss == loss]
        for loss in losses
        if loss in AUTHORS_LR
    }
    commits = sorted({record.get("commit", "unknown") for record in records})
    about = provenance() | {
        "commit": ", ".join(commits),
        "seeds": sorted({record["seed"] for record in records}),
        "lr_grids": {backbone: list(grids[backbone]) for backbone in dict.fromkeys(row.backbone for row in rows)},
    }
    datasets_of: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        datasets_of.setdefault((record["loss"], record["config"]["criterion"]), {})[record["dataset"]] = None
    criteria = [f"{loss} ({', '.join(datasets)}): `{criterion}`" for (loss, criterion), datasets in datasets_of.items()]

    seeds = ", ".join(map(str, about["seeds"]))
    lrs = " and ".join(
        f"{', '.join(f'{lr:g}' for lr in grid)} ({backbone})" for backbone, grid in about["lr_grids"].items()
    )
    text = [
        "# Forecasting with FreDF: all results",
        "",
        f"Test MSE / MAE on normalised values, mean ± standard deviation over seeds {seeds}; lowest in bold. "
        f"Each loss at its own learning rate, best on validation MSE among {lrs}; "
        "the last columns at the learning rates of FreDF's authors, whatever validation says.",
        "",
        format_markdown(columns),
        "### Over all data sets",
        "",
        "Geometric mean over data sets and horizons of test MSE / MAE relative to training with "
        f"{LABELS.get(losses[0], losses[0])}.",
        "",
        format_relative({heading: rows for heading, rows in columns.items() if "authors" not in heading}),
        "Losses:",
        *(f"- {criterion}" for criterion in criteria),
        "",
        *(f"Left out: {sentence}" for sentence in skipped),
        *([""] if skipped else []),
        f"Command: `{about['command']}`, commit {about['commit']}, {about['date']}.",
        "",
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()) + f", {about['machine']}.",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    markdown, data = folder / "reproduce.md", folder / "reproduce.json"
    markdown.write_text("\n".join(text), encoding="utf-8")
    content = about | {
        "criteria": criteria,
        "skipped": list(skipped),
        "best_lr": [row.as_json() for row in chosen],
        "authors": [row.as_json() for row in authors],
        "every_lr": [row.as_json() for row in rows],
    }
    data.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return markdown, data


def provenance() -> dict[str, Any]:
    """What produced a result: command (absolute paths cut to their last part), versions, machine."""
    packages = ("torchext", "torch", "lightning", "numpy", "einops")
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {
        "command": shlex.join(["python", "examples/forecast.py", *words]),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "machine": f"{platform.machine()}, CPU only",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from the checkout"


@functools.cache
def commit() -> str:
    """The checkout's commit, marked if files differ from it; "unknown" outside a checkout or without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changes.stdout.strip() else "")
