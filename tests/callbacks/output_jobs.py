"""A Lightning job with outputs: a logger that appends lines to a file, and checkpoints of every step."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from tests.callbacks.lightning_jobs import Model, loader
from torchext.callbacks import PhantasyCheckpoint


class LineLogger(Logger):
    """One line, in one write, for each call."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._write({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def log_hyperparams(self, params: Any, *arguments: Any, **options: Any) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self._write({"saved": len(list(self._path.parent.glob("*.ckpt"))) > 0})

    def _write(self, words: dict[str, Any]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, (json.dumps(words) + "\n").encode())
        finally:
            os.close(descriptor)


class LoggingModel(Model):
    """Logs its loss in each step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def train(folder: str, address: str | None, **options: Any) -> LoggingModel:
    """Trains for three epochs of six steps, from where the standby is."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    model = LoggingModel(options.pop("crash_at", None))
    root = Path(folder)
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=options.pop("save_top_k", -1))
    ]
    callback_options = options.pop("callback", {})
    if address is not None:
        callbacks.append(PhantasyCheckpoint(address, job=folder, commit_outputs=True, **callback_options))
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=options.pop("logger", LineLogger(root / "lines")),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        max_epochs=3,
        **options,
    )
    path = None if address is None else f"phantasy://{address}/auto"
    trainer.fit(model, loader("shuffled"), ckpt_path=path)
    return model
