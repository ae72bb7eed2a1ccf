"""A Lightning job whose every step depends on all that a resume has to bring back, and a way to let it crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchext.callbacks import PhantasyCheckpoint


class Crashed(BaseException):
    """Stands for a process that is gone; `model` is what it had done."""

    def __init__(self, model: Model) -> None:
        super().__init__("crashed, as it was told to")
        self.model = model


class Numbers(Dataset[torch.Tensor]):
    """Samples that carry their number, with noise of all generators added, as augmentations do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.cat([torch.tensor([float(i)]), torch.full((31,), noise)])


class Stream(IterableDataset[torch.Tensor]):
    """Without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.size):
            yield torch.cat([torch.tensor([float(i)]), torch.full((31,), i / 10)])


class StatefulLoader:
    """Knows its position; with or without a length."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size, self.position = size, batch_size, 0
        self.restored = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.restored:
            self.position = 0
        self.restored = False
        return self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        data = list(Stream(self.size))
        while self.position < self.size:
            self.position += self.batch_size
            yield torch.stack(data[self.position - self.batch_size : self.position])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.restored = state["position"], True


class SizedStatefulLoader(StatefulLoader):
    def __len__(self) -> int:
        return self.size // self.batch_size


def loader(kind: str) -> Any:
    """Six batches of four."""
    if kind == "stream":
        return DataLoader(Stream(24), batch_size=4)
    if kind == "stateful":
        return StatefulLoader(24, 4)
    if kind == "sized stateful":
        return SizedStatefulLoader(24, 4)
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": False} if kind == "workers" else {}
    return DataLoader(Numbers(24), batch_size=4, shuffle=True, generator=generator, **workers)


class Model(pl.LightningModule):
    """Records its losses and samples; crashes in a step if told to."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(0.3), torch.nn.Linear(40, 1)
        )
        self.crash_at = crash_at
        self.losses: dict[int, float] = {}
        self.samples: dict[int, list[float]] = {}
        self.validated: list[tuple[int, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        step = self.trainer.global_step
        self.samples.setdefault(step, []).extend(batch[:, 0].tolist())
        loss = self.net(batch).square().mean()
        if self.crash_at == step:
            crash(self.trainer)
        self.losses[step] = loss.item()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append((self.trainer.global_step, (self.net(batch).mean() + torch.rand(())).item()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class TwoOptimizers(Model):
    """Steps them by itself, the second one every other time, as adversarial trainings do."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__(crash_at)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers[: 1 + batch_idx % 2]:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[3].parameters()
        return [torch.optim.AdamW(first, lr=1e-2), torch.optim.SGD(last, lr=1e-2, momentum=0.9)], []


def crash(trainer: pl.Trainer) -> None:
    """As a kill: the standby hears nothing any more."""
    for callback in trainer.callbacks:
        if isinstance(callback, PhantasyCheckpoint):
            assert callback.publisher is not None
            callback.publisher._unlink()
    assert isinstance(trainer.lightning_module, Model)
    raise Crashed(trainer.lightning_module)


def fit(
    address: str | None, kind: str, crash_at: int | None = None, *, path: str | None = None, **options: Any
) -> Model:
    """Trains for three epochs, or until the crash."""
    if path is None:
        pl.seed_everything(7, verbose=False)
    callback_options = options.pop("callback", {})
    others = options.pop("callbacks", [])
    model: Model = options.pop("model", Model)(crash_at)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=others if address is None else [PhantasyCheckpoint(address, job="job", **callback_options), *others],
        **{"max_epochs": 3, "num_sanity_val_steps": 1, **options},
    )
    validation = DataLoader(Numbers(8), batch_size=4)
    trainer.fit(model, loader(kind), validation, ckpt_path=path)
    return model
