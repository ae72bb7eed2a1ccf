"""Steps go to other sites as what the trainer's standby was told of them, and come back bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.callbacks.test_stabilizer import FROM_PARIS, Model, fit, trainer
from tests.replication.test_node import Pair
from torchext.callbacks import PhantasyCheckpoint, StabilizerReplication
from torchext.callbacks.stabilizer_standby import StandbyFollower, to_checkpoint
from torchext.replication import fetch_checkpoint
from torchext.standby import CorruptStateError, Replicator, StandbyLostWarning
from torchext.standby.daemon import Daemon
from torchext.standby.persist import read_file

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


class Sparse(Model):
    """Of what it trains, each step changes a few rows; it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20_000, 16, sparse=True)
        self.dropout = nn.Dropout(0.5)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        rows = self.embedding(batch * 7)
        loss = super().training_step(batch, batch_idx) + self.dropout(rows).square().mean()
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        dense = torch.optim.Adam(self.layer.parameters(), lr=0.01)
        return [torch.optim.SparseAdam(self.embedding.parameters(), lr=0.01), dense]


class Files(pl.Callback):
    """Counts the checkpoints that are written to files; stops the standby at a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, daemon: Daemon, stops_at: int = -1) -> None:
        self.count = 0
        self._daemon, self._stops_at = daemon, stops_at
        original = pl.Trainer.save_checkpoint

        def save(*arguments: Any, **options: Any) -> None:
            self.count += 1
            original(*arguments, **options)

        monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._stops_at:
            self._daemon.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, predicates={"safe": "MIN($ALLSITES).persisted"})
    yield made
    made.close()


def replicate(pair: Pair, **options: Any) -> StabilizerReplication:
    return StabilizerReplication(pair.paris, every_n_steps=2, max_lag=2, on_unstable="wait", **options)


def test_steps_are_sent_as_the_standby_is_told_of_them(
    pair: Pair, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, first, second = Sparse(), Sparse(), Sparse()
    torch.manual_seed(1)
    fit(straight, trainer(tmp_path, 24, PhantasyCheckpoint(daemon.address, job="straight")))
    files, replication = Files(monkeypatch, daemon), replicate(pair, max_deltas=3, keep=2)
    torch.manual_seed(1)
    fit(first, trainer(tmp_path, 14, PhantasyCheckpoint(daemon.address, job="first"), replication, files))
    assert files.count == 0
    assert [(sent.step, sent.num_deltas) for sent in replication.sent] == [(12, 1), (14, 2)]
    messages = pair.paris.receive("paris", after=replication.sent[0].first - 1, timeout=0)
    whole, _, delta, _, other, _ = (message.size_bytes for message in messages)
    assert whole > 3 * 20_000 * 16 * 4  # the embedding and its two moments
    assert max(delta, other) < whole / 50
    # At the other site, once the first one is gone: weights, optimizers, random numbers, position in the data.
    pair.paris.close()
    elsewhere = StabilizerReplication(pair.tokyo, every_n_steps=100)
    run = trainer(tmp_path, 24, PhantasyCheckpoint(daemon.address, job="second"), elsewhere)
    fit(second, run, ckpt_path=FROM_PARIS, weights_only=False)
    assert run.global_step == 24
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_checkpoints_are_files_once_the_standby_is_gone(
    pair: Pair, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(monkeypatch, daemon, stops_at=4)
    replication = replicate(pair, max_deltas=10, keep=None)
    with pytest.warns(StandbyLostWarning):
        fit(Model(), trainer(tmp_path, 9, PhantasyCheckpoint(daemon.address), replication, files))
    sent = {each.step: each.num_deltas for each in replication.sent}
    assert sent[2] == 0
    assert sent[6] == 0  # not told by what the standby had
    assert sent[8] == 1
    assert files.count >= 2
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy.ckpt") == max(sent)
    assert torch.load(tmp_path / "copy.ckpt", weights_only=False)["global_step"] == max(sent)


def test_the_first_snapshot_is_whole_also_where_steps_came_before_it(daemon: Daemon, tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with Replicator(model, optimizer, standby=daemon.address, job="late") as replicator:
        replicator.commit(0)
        replicator.gate()
        publisher = replicator._publisher
        follower = StandbyFollower(publisher, lambda _: True, lambda snapshot: snapshot.write(tmp_path / "file"))
        replicator.commit(1)  # of which nothing is new
        replicator.gate()
        follower.close()
    assert torch.equal(read_file(tmp_path / "file").tree["models"]["model"]["weight"], model.weight)


def test_damaged_snapshot_is_not_taken(pair: Pair, daemon: Daemon, tmp_path: Path) -> None:
    fit(Model(), trainer(tmp_path, 3, PhantasyCheckpoint(daemon.address), replicate(pair, max_deltas=3)))
    file = tmp_path / "copy"
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, file) == 2
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptStateError, match=r"copy is not as it was written: entry .* has another checksum"):
        to_checkpoint(file)
    data[-1] ^= 1
    file.write_bytes(data)
    to_checkpoint(file)
    to_checkpoint(file)  # which is an ordinary checkpoint by now
    assert torch.load(file, weights_only=False)["global_step"] == 2
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["copy"]
