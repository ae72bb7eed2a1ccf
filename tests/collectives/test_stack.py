"""What is built on torch.distributed gives the same over dfccl as over gloo."""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchext  # noqa: F401  registers the backend
from tests.collectives.stack import PROGRAMS, WORLD_SIZE
from tests.ranks import Rank, run_ranks

Tensor = torch.Tensor


def run_all(rank: Rank) -> dict[str, list[Tensor] | str]:
    """The results of each program; of the first that fails, the traceback, and none of those after it."""
    results: dict[str, list[Tensor] | str] = {}
    for name, program in PROGRAMS.items():
        try:
            results[name] = program(rank.rank)
        except Exception:
            results[name] = traceback.format_exc()
            break
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def over_gloo() -> list[dict[str, list[Tensor] | str]]:
    return run_ranks(run_all, WORLD_SIZE, backend="gloo", deadline_s=200)


@pytest.fixture(scope="module")
def over_dfccl() -> list[dict[str, list[Tensor] | str]]:
    return run_ranks(run_all, WORLD_SIZE, backend="dfccl", deadline_s=200)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_the_same_as_over_gloo(name: str, over_gloo: Any, over_dfccl: Any) -> None:
    for rank in range(WORLD_SIZE):
        expected, got = over_gloo[rank].get(name, "not run"), over_dfccl[rank].get(name, "not run")
        assert not isinstance(expected, str), f"rank {rank}, over gloo: {expected}"
        assert not isinstance(got, str), f"rank {rank}: {got}"
        assert got
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


# --- Lightning --------------------------------------------------------------------------------------------------------


def fit(rank: Rank, backend: str) -> list[Tensor]:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("val_loss", self.layer(batch).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(0, verbose=False)
    data = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy=DDPStrategy(process_group_backend=backend, cluster_environment=TorchElasticEnvironment()),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, data, data)
    assert dist.get_backend() == backend
    metrics = [trainer.callback_metrics[name].clone() for name in ("loss", "val_loss")]
    dist.destroy_process_group()
    return [*(p.detach() for p in model.parameters()), *metrics]


def elastic(rank: Rank, backend: str, port: int) -> list[Tensor]:
    """As torchrun starts a rank."""

    os.environ.update(
        {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.rank),
            "WORLD_SIZE": str(rank.world_size),
            "LOCAL_WORLD_SIZE": str(rank.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
        }
    )
    return fit(rank, backend)


def test_lightning_trains_as_over_gloo() -> None:
    pytest.importorskip("lightning", reason="needs the extra torchext[lightning]")
    results = {}
    for backend in ("gloo", "dfccl"):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        results[backend] = run_ranks(elastic, 2, backend, server.port, deadline_s=200)
    for got, expected in zip(results["dfccl"], results["gloo"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
