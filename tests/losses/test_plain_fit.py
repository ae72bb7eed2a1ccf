"""Plain torch and plain Lightning take the loss as it is: a short fit of a linear forecaster with each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchext.losses import FreDFLoss

pytestmark = pytest.mark.usefixtures("one_thread")

LOOK_BACK, HORIZON, VARIABLES = 24, 12, 3


def windows() -> TensorDataset:
    """Windows of noisy sines: (N, 24, 3) and what follows, (N, 12, 3)."""
    t = torch.arange(400)[:, None] + torch.tensor([0.0, 3.0, 5.0])
    series = torch.sin(2 * torch.pi * t / 12) + 0.1 * torch.randn(t.shape)
    cut = series.unfold(0, LOOK_BACK + HORIZON, 1).transpose(1, 2)
    return TensorDataset(cut[:, :LOOK_BACK], cut[:, LOOK_BACK:])


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LOOK_BACK, HORIZON)

    def forward(self, past: Tensor) -> Tensor:
        forecast: Tensor = self.linear(past.transpose(1, 2)).transpose(1, 2)
        return forecast


@pytest.mark.parametrize(
    "criterion",
    [FreDFLoss(), FreDFLoss(basis="dct", norm="ortho", time_loss="mae", horizon_weight=torch.ones(HORIZON))],
)
def test_plain_torch(criterion: FreDFLoss) -> None:
    model, data = Forecaster(), windows()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        for past, future in DataLoader(data, batch_size=32, shuffle=True):
            loss = criterion(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    past, future = data[:]
    assert (model(past) - future).square().mean() < 0.05  # the noise alone is 0.01, a forecast of zeros 0.5


# Both depend on the machine, not on what is tested.
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:GPU available but not used")
@pytest.mark.parametrize("basis", ["rfft", "dct", "pca"])
def test_plain_lightning_and_its_checkpoint(basis: str, tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="needs Lightning: pip install 'torchext[lightning]'")
    data = windows()

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Forecaster()
            self.criterion = FreDFLoss(basis=basis)
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            past, future = batch
            loss: Tensor = self.criterion(self.model(past), future)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    module = Module()
    if basis == "pca":
        module.criterion.fit(data[:][1])
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
    assert sum(module.losses[-5:]) < 0.5 * sum(module.losses[:5])

    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "model.ckpt", map_location="cpu")
    past, future = data[:]
    for other in (loaded, copy.deepcopy(module)):
        assert torch.equal(other.criterion(other.model(past), future), module.criterion(module.model(past), future))
