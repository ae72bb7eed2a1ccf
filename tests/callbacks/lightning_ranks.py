"""One rank of a Lightning job under DDP, in the environment that torchrun makes, for `tests.standby.sharded.Group`."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.callbacks.lightning_jobs import Model, Numbers
from torchext.callbacks import PhantasyCheckpoint


class _Logged(Model):
    """Writes a line for each step once it was committed: when the next one starts, or training ends."""

    def __init__(self, log: IO[str]) -> None:
        super().__init__()
        self._log = log
        self._written: int | None = None

    def on_train_start(self) -> None:
        self._write({"start": self.trainer.global_step})
        self._written = self.trainer.global_step - 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._write_last()

    def on_train_end(self) -> None:
        self._write_last()

    def _write_last(self) -> None:
        last = self.trainer.global_step - 1
        assert self._written is not None
        if last > self._written:
            self._write({"step": last, "loss": [self.losses[last], self.samples[last]]})
            self._written = last

    def _write(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


def train(rank: int, store: Path, log: Path, *, kind: str, address: str | None, mode: Any, job: str) -> None:
    """From where the standby is to the end: two epochs of six steps, with a validation after every four."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(store), 2), rank=rank, world_size=2
    )
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        TORCHELASTIC_RUN_ID=job,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    warnings.simplefilter("ignore")
    pl.seed_everything(7, verbose=False)
    with log.open("a") as file:
        model = _Logged(file)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_epochs=2,
            val_check_interval=4,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[] if address is None else [PhantasyCheckpoint(address, mode=mode)],  # job: that of torchrun
        )
        torch.manual_seed(rank)
        trainer.fit(
            model,
            DataLoader(Numbers(48), batch_size=4, shuffle=True),
            DataLoader(Numbers(16), batch_size=4),
            ckpt_path=None if address is None else f"phantasy://{address}/auto",
        )
        weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        file.write(json.dumps({"weights": weights}) + "\n")
