"""StabilizerReplication on a real Trainer, with real sites."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from tests.ranks import Rank, run_ranks
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
        self.log("loss", y.square().mean())
        return y.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(folder: Path, max_steps: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
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


class MostlyFrozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(500, 500)
        self.frozen.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.layer.parameters(), lr=0.01)


def test_each_step_is_sent_as_what_changed_and_comes_back_whole(pair: Pair, tmp_path: Path) -> None:
    replication = StabilizerReplication(pair.paris, every_n_steps=1, on_unstable="wait", keep=2, max_deltas=4)
    fit(MostlyFrozen(), trainer(tmp_path, 7, replication))
    assert [sent.num_deltas for sent in replication.sent[-2:]] == [0, 1]  # 0 1 2 3 4, 0 1
    # Steps 6 and 7 are kept, and step 6 is whole.
    assert pair.paris.first("paris") <= replication.sent[0].first
    sizes = [m.size_bytes for m in pair.paris.receive("paris", after=replication.sent[0].first - 1, timeout=0)]
    assert sizes[0] > 1_000_000  # a million bytes do not train
    assert sizes[2] < 100_000
    second = MostlyFrozen()
    run = trainer(tmp_path, 12, StabilizerReplication(pair.tokyo, every_n_steps=100))
    fit(second, run, ckpt_path=FROM_PARIS, weights_only=False)
    straight = MostlyFrozen()
    fit(straight, trainer(tmp_path, 12, StabilizerReplication(None)))
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_checkpoint_is_not_taken_without_the_one_that_it_is_told_by(pair: Pair, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1_000_000)
    (tmp_path / "file").write_bytes(data)
    whole = send_checkpoint(pair.paris, tmp_path / "file", 1, is_base=True)
    (tmp_path / "file").write_bytes(b"inserted" + data[:500_000] + data[300_000:])
    told = send_checkpoint(pair.paris, tmp_path / "file", 2, since=whole)
    assert (told.first, told.num_deltas) == (whole.first, 1)
    pair.paris.waitfor(told.seq, "safe", 30)
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy") == 2
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["copy", "file"]
    # One whose base is not among what came is passed over:
    broken = send_checkpoint(pair.paris, tmp_path / "file", 4, since=replace(whole, seq=10**6))
    pair.paris.waitfor(broken.seq, "safe", 30)
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy") == 2


def test_many_checkpoints_in_a_row_are_told_by_the_one_before(pair: Pair, tmp_path: Path) -> None:
    data = bytearray(random.Random(0).randbytes(200_000))
    file = tmp_path / "checkpoint.ckpt"
    sent = None
    for step in range(25):
        data[step] ^= 1
        file.write_bytes(data)
        sent = send_checkpoint(pair.paris, file, step, since=sent, is_base=True)
    assert sent is not None
    assert (sent.first, sent.num_deltas) == (1, 24)
    pair.paris.waitfor(sent.seq, "safe", 30)
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy.ckpt") == 24
    assert (tmp_path / "copy.ckpt").read_bytes() == data
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["checkpoint.ckpt", "copy.ckpt"]


def test_file_that_only_looks_like_a_zip_file_is_sent(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("record", bytes(1000))
    whole = file.read_bytes()
    directory = whole.index(b"PK\1\2")
    misplaced = whole[: directory + 42] + b"\xff\xff\xff\x7f" + whole[directory + 46 :]
    for step, data in enumerate([whole, b"no directory" + whole[-22:], misplaced]):
        file.write_bytes(data)
        sent = send_checkpoint(pair.paris, file, step, is_base=True)
        pair.paris.waitfor(sent.seq, "safe", 30)
        assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy") == step
        assert (tmp_path / "copy").read_bytes() == data


def resume_on_two_ranks(rank: Rank, folder: Path, port: int) -> list[torch.Tensor]:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    numbers = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(TORCHELASTIC_RUN_ID="test")
    pair = Pair(folder, predicates={"safe": "MIN($ALLSITES).persisted"}) if rank.rank == 0 else None

    def on_both(max_steps: int) -> pl.Trainer:
        replication = StabilizerReplication(pair.paris if pair else None, every_n_steps=2, on_unstable="wait")
        strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=TorchElasticEnvironment())
        return trainer(folder, max_steps, replication, strategy=strategy, devices=2)

    fit(Model(), on_both(5))
    second, run = Model(), on_both(8)
    fit(second, run, ckpt_path=FROM_PARIS, weights_only=False)
    assert run.global_step == 8
    with pytest.raises(ReplicationError, match="there is no predicate 'other'"):
        fit(Model(), on_both(8), ckpt_path="stabilizer://paris/latest?predicate=other")
    if pair is not None:
        pair.close()
    torch.distributed.destroy_process_group()
    return [p.detach() for p in second.parameters()]


def test_all_ranks_go_on_from_what_rank_0_restores_or_fail_together(tmp_path: Path) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_ranks(resume_on_two_ranks, 2, tmp_path, server.port, deadline_s=200)
    straight = Model()
    fit(straight, trainer(tmp_path, 8))
    for values in results:  # both ranks have the same data, so as one alone
        torch.testing.assert_close(values, list(straight.parameters()))


def test_checkpoint_io_is_left_as_it_was_found(pair: Pair, tmp_path: Path) -> None:
    class WrapsLater(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            trainer.strategy.checkpoint_io = later = AsyncCheckpointIO(trainer.strategy.checkpoint_io)
            self.later = later

    wraps = WrapsLater()
    run = trainer(tmp_path, 2, StabilizerReplication(pair.paris), wraps)
    before = run.strategy.checkpoint_io
    fit(Model(), run)
    assert run.strategy.checkpoint_io is wraps.later
    assert wraps.later.checkpoint_io is before


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


def test_full_disk_costs_one_checkpoint_and_is_got_over(pair: Pair, tmp_path: Path) -> None:
    """h2oai/h2o-llmstudio#214, google/orbax#605: found out at the next step, and the checkpoint after it is taken."""
    calls = []

    def full_once(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(arguments[0], arguments[2])

    replication = StabilizerReplication(pair.paris, every_n_steps=2, max_lag=10, keep=None)
    pair.paris.send(bytes((2 << 20) - 100_000))  # the next message needs another file
    assert pair.tokyo.wait_received("paris", 1, 30)
    model = Model()
    model.register_buffer("large", torch.zeros(50_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full_once)
        with pytest.warns(UserWarning, match=r"could not be sent to the other sites: .*no room for"):
            fit(model, trainer(tmp_path, 6, replication))
    assert [sent.step for sent in replication.sent] == [4, 6]


def test_other_checkpoints_are_left_alone(pair: Pair, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#14035, #1331, #1366: which of the files stay is for ModelCheckpoint to say."""
    best = ModelCheckpoint(tmp_path / "best", save_top_k=1, monitor="loss", every_n_train_steps=1)
    replication = StabilizerReplication(pair.paris, every_n_steps=1, on_unstable="wait")
    fit(Model(), trainer(tmp_path, 5, best, replication))
    assert [str(path) for path in (tmp_path / "best").iterdir()] == [best.best_model_path]
    assert [sent.step for sent in replication.sent] == [4, 5]


class TwoOptimizers(Model):
    """Each batch moves the trainer's step by two."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.01) for p in self.layer.parameters()]


def test_steps_that_move_by_two_pass_over_no_checkpoint(pair: Pair, tmp_path: Path) -> None:
    replication = StabilizerReplication(pair.paris, every_n_steps=3, on_unstable="wait", keep=None)
    fit(TwoOptimizers(), trainer(tmp_path, 12, replication))
    assert [sent.step for sent in replication.sent] == [4, 6, 10, 12]


def test_training_ends_though_its_last_checkpoint_finds_no_room(tmp_path: Path) -> None:
    pair = Pair(tmp_path, predicates={"safe": "MIN($ALLSITES).persisted"}, max_log_bytes=4 << 20)
    try:
        pair.tokyo.close()
        pair.paris.send(bytes((4 << 20) - 2000))  # is not dropped
        options: dict[str, Any] = {"every_n_steps": 2, "timeout": 0.2}
        with pytest.warns(UserWarning, match=r"could not be sent to the other sites: .*did not find room within"):
            fit(Model(), trainer(tmp_path, 2, StabilizerReplication(pair.paris, **options)))
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_distributed_checkpoint_is_loaded_from_its_copy(pair: Pair, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    state = {"weights": torch.arange(100_000.0), "step": 3}
    checkpoint.save(state, checkpoint_id=tmp_path / "sharded", no_dist=True)
    pair.paris.waitfor(send_checkpoint(pair.paris, tmp_path / "sharded", 3).seq, "safe", 30)
    assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy") == 3
    found = {"weights": torch.zeros(100_000), "step": 0}
    checkpoint.load(found, checkpoint_id=tmp_path / "copy", no_dist=True)
    assert torch.equal(found["weights"], state["weights"])
    assert found["step"] == 3


def test_checkpoint_is_found_behind_more_log_files_than_can_be_open(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"state")
    send_checkpoint(pair.paris, tmp_path / "file", 5)
    for _ in range(30):
        seq = pair.paris.send(bytes(2 << 20))  # each in a log file of its own
    pair.paris.waitfor(seq, "safe", 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")) + 16, hard))
    try:
        assert fetch_checkpoint(pair.tokyo, FROM_PARIS, tmp_path / "copy") == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "copy").read_bytes() == b"state"


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
        ({"max_deltas": -1}, "max_deltas: expected at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplicationError) as caught:
        StabilizerReplication(None, **options)
    assert words in str(caught.value)


def test_package_imports_no_lightning_until_a_name_is_used() -> None:
    program = "import sys, torchext.callbacks\nassert 'lightning' not in sys.modules\ndir(torchext.callbacks)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)
