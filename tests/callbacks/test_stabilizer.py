"""StabilizerReplication on a real Trainer, with real sites."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.replication.sites import ROOT
from tests.replication.test_node import Pair
from torchext.callbacks import StabilizerReplication
from torchext.replication import (
    ReplicationError,
    StabilityTimeoutError,
    StoreError,
    fetch_checkpoint,
    send_checkpoint,
)
from torchext.replication.checkpoints import Address

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    # The data of these tests is a function of the step.
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*"),
]
FROM_PARIS = "stabilizer://paris/latest?predicate=safe"


class Model(pl.LightningModule):
    """Its data is a function of the step, so that runs can be compared bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x: torch.Tensor = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.global_step))
        y: torch.Tensor = self.layer(x)
        return y.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(folder: Path, max_steps: int, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def fit(model: Model, trainer: pl.Trainer, **options: Any) -> None:
    trainer.fit(model, DataLoader(range(100), batch_size=1), **options)  # type: ignore[arg-type]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, predicates={"safe": "MIN($ALLSITES).persisted"})
    yield made
    made.close()


def test_training_goes_on_at_another_site_bit_by_bit(pair: Pair, tmp_path: Path) -> None:
    straight = Model()
    fit(straight, trainer(tmp_path, 10, StabilizerReplication(None)))
    first = Model()
    replication = StabilizerReplication(pair.paris, every_n_steps=2, on_unstable="wait", keep=2)
    fit(first, trainer(tmp_path, 7, replication))
    assert replication.stable_step == 6
    assert [sent.step for sent in replication.sent] == [4, 6]
    assert replication.staging is None
    pair.paris.close()
    second = Model()
    # Restoring in tokyo: all that was stable must have been persisted there too.
    replication = StabilizerReplication(pair.tokyo, every_n_steps=100, on_unstable="warn")
    other = trainer(tmp_path, 10, replication)
    fit(second, other, ckpt_path=FROM_PARIS, weights_only=False)
    assert other.global_step == 10
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_lag_is_warned_of_or_raised(pair: Pair, tmp_path: Path) -> None:
    pair.tokyo.close()
    options = {"every_n_steps": 2, "max_lag": 4, "timeout": 0.2}
    with pytest.warns(UserWarning, match=r"step \d: the newest stable checkpoint is of step 0, more than max_lag = 4"):
        fit(Model(), trainer(tmp_path, 8, StabilizerReplication(pair.paris, on_unstable="warn", **options)))  # type: ignore[arg-type]
    with pytest.raises(StabilityTimeoutError, match=r"step 5: the newest stable checkpoint is of step 0"):
        fit(Model(), trainer(tmp_path, 8, StabilizerReplication(pair.paris, on_unstable="raise", **options)))  # type: ignore[arg-type]
    with pytest.raises(StabilityTimeoutError, match=r"tokyo.persisted is at 0|still being handed over"):
        fit(Model(), trainer(tmp_path, 8, StabilizerReplication(pair.paris, on_unstable="wait", **options)))  # type: ignore[arg-type]


def test_failure_to_send_is_raised_soon_or_warned_of(tmp_path: Path) -> None:
    pair = Pair(tmp_path, predicates={"safe": "MIN($ALLSITES).persisted"}, max_message_bytes=1000)
    try:
        run = trainer(tmp_path, 50, StabilizerReplication(pair.paris, every_n_steps=2, on_unstable="raise", max_lag=49))
        with pytest.raises(StoreError, match="longer than max_message_bytes = 1000"):
            fit(Model(), run)
        assert run.global_step < 50
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Model(), trainer(tmp_path, 6, StabilizerReplication(pair.paris, every_n_steps=2, max_lag=10)))
        words = [str(w.message) for w in caught if "could not be sent to the other sites" in str(w.message)]
        assert len(words) == 3  # the next one was tried all the same
    finally:
        pair.close()


def test_sharded_checkpoint_comes_back_as_a_folder(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    for name, data in {".metadata": b"m", "__0_0.distcp": bytes(3 << 20), "deep/__1_0.distcp": b"1"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    send_checkpoint(pair.paris, folder, 3)
    (folder / ".metadata").write_bytes(b"newer")
    sent = send_checkpoint(pair.paris, folder, 4)
    pair.paris.send(folder / ".metadata")  # of a checkpoint that was never completed
    pair.paris.waitfor(sent.seq, "safe", 30)
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy") == 4
    copies = {p.relative_to(tmp_path / "copy"): p.read_bytes() for p in (tmp_path / "copy").rglob("*") if p.is_file()}
    assert copies == {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_stable_and_wrong_addresses_are_explained(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(
        ReplicationError, match=r"no checkpoint of paris is stable under MIN\(\$ALLSITES\).persisted here"
    ):
        fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "x", timeout=30)
    with pytest.raises(ReplicationError, match=r"there is no predicate 'other' \(there are: safe\)"):
        fetch_checkpoint(pair.tokyo, "stabilizer://paris/latest?predicate=other", tmp_path / "x")
    for url in ("stabilizer://paris/latest", "stabilizer:///latest?predicate=safe", "http://paris/latest?predicate=p"):
        with pytest.raises(ReplicationError, match=r"expected stabilizer://SITE/latest\?predicate=NAME"):
            Address.parse(url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_n_steps": 0}, "every_n_steps: expected at least 1, got 0"),
        ({"on_unstable": "panic"}, 'on_unstable: expected "wait", "warn" or "raise"'),
        ({"max_lag": 3, "every_n_steps": 5}, "max_lag: expected at least every_n_steps = 5, got 3"),
        ({"keep": 0}, "keep: expected at least 1, or None, got 0"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplicationError) as caught:
        StabilizerReplication(None, **options)
    assert words in str(caught.value)


def test_package_imports_no_lightning_until_a_name_is_used() -> None:
    program = "import sys, torchext.callbacks\nassert 'lightning' not in sys.modules\ndir(torchext.callbacks)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)
