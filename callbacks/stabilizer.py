"""Checkpoints of a Lightning training at many sites, safe in the sense of a predicate."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn

from torchext.replication.checkpoints import SCHEME, Sent, fetch_checkpoint, send_checkpoint, send_delta
from torchext.replication.errors import ReplicationError, StabilityTimeoutError
from torchext.replication.node import Node

if TYPE_CHECKING:
    from torchext.callbacks.stabilizer_standby import Snapshot, StandbyFollower

_PIECE_BYTES = 64 << 20  # of a restored checkpoint, as rank 0 hands it to the others


class StabilizerReplication(Checkpoint):
    """Sends checkpoints to all sites and follows when they become stable; restores the newest that was.

    The trainer stands still while a checkpoint is written to a file of this machine; what follows happens beside it,
    and the training waits for other sites only with ``on_unstable="wait"``. A failure of the replication is raised by
    the next step; with ``"warn"`` it becomes a warning, and the next checkpoint is sent all the same.

    ``trainer.fit(model, ckpt_path="stabilizer://SITE/latest?predicate=NAME")`` goes on from the newest checkpoint of
    that site that was stable under the predicate: rank 0 restores it and hands it to the others. Strategies
    that read checkpoints by themselves (FSDP, ModelParallel) take a folder that `fetch_checkpoint` has written.

    Next to a `PhantasyCheckpoint`, with ``max_deltas`` and one rank, no file is written and nothing is compared: what
    the standby is told to have changed is copied while the optimizer waits, and sent. It takes the size of the state in
    memory. A step that comes while the one before is still being handed over is left out. What is restored from there
    also has the position in the data and the random number generators; it is pickled, so only from sites to be trusted.

    Example::

        node = Node("site.toml", me="paris")
        trainer = Trainer(callbacks=[StabilizerReplication(node, predicate="safe", every_n_steps=100)])

    Args:
        node: This site; None on ranks other than 0, which share its file system if checkpoints are sharded.
        predicate: Name of a predicate of the node.
        every_n_steps: Send a checkpoint after so many optimizer steps.
        on_unstable: What to do when the newest stable checkpoint is more than ``max_lag`` steps old: ``"wait"`` until
            it is not, ``"warn"`` or ``"raise"``.
        max_lag: In optimizer steps; None means twice ``every_n_steps``.
        keep: How many stable checkpoints all sites keep; older messages of this site are dropped. None keeps all.
        max_deltas: How many checkpoints in a row may be sent as what changed since the one before. For every step of a
            model of which little is trained, or whose gradients are sparse; 0 sends each whole.
        timeout: In seconds: how long ``"wait"`` waits, the end of the training for the last checkpoint, and each
            checkpoint for room in this site's log.

    Raises:
        ReplicationError: An argument is wrong, or the node has no such predicate.
    """

    def __init__(
        self,
        node: Node | None,
        *,
        predicate: str = "safe",
        every_n_steps: int = 100,
        on_unstable: Literal["wait", "warn", "raise"] = "warn",
        max_lag: int | None = None,
        keep: int | None = 2,
        max_deltas: int = 0,
        timeout: float = 600.0,
    ) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ReplicationError(f"every_n_steps: expected at least 1, got {every_n_steps!r}")
        if on_unstable not in ("wait", "warn", "raise"):
            raise ReplicationError(f'on_unstable: expected "wait", "warn" or "raise", got {on_unstable!r}')
        if max_lag is not None and max_lag < every_n_steps:
            raise ReplicationError(f"max_lag: expected at least every_n_steps = {every_n_steps}, got {max_lag!r}")
        if keep is not None and keep < 1:
            raise ReplicationError(f"keep: expected at least 1, or None, got {keep!r}")
        if max_deltas < 0:
            raise ReplicationError(f"max_deltas: expected at least 0, got {max_deltas!r}")
        self.node = node
        self.predicate = predicate
        self.every_n_steps = every_n_steps
        self.on_unstable = on_unstable
        self.max_lag = 2 * every_n_steps if max_lag is None else max_lag
        self.keep = keep
        self.max_deltas = max_deltas
        self.timeout = timeout
        self.sent: list[Sent] = []  # oldest first; guarded by _lock
        self._since: Sent | None = None  # what the next one may be told by; used by the sender alone
        self._places: dict[int, int] | None = None  # in that one, if it was a snapshot; used by the sender alone
        self._follower: StandbyFollower | None = None
        self._due: int | None = None  # the step from which on a snapshot is to be taken
        self._lock = threading.Lock()
        self._last_step = -1  # of which a checkpoint was taken
        self._first_step = 0
        self._stable_step = -1
        self._warned_step = -1
        self._sender: futures.ThreadPoolExecutor | None = None
        self._pending: list[futures.Future[None]] = []
        self.staging: Path | None = None  # folder of checkpoints on their way
        if node is not None:
            node.get_stability_frontier(predicate)  # says if there is none

    @property
    def stable_step(self) -> int:
        """Step of the newest checkpoint that is stable; -1 if none is."""
        if self.node is None:
            return -1
        frontier = self.node.get_stability_frontier(self.predicate)
        with self._lock:
            self._stable_step = max([self._stable_step, *(s.step for s in self.sent if s.seq <= frontier)])
            return self._stable_step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets the trainer read ``stabilizer://`` addresses."""
        del pl_module, stage
        self._take_off(trainer)  # of a run that failed
        trainer.strategy.checkpoint_io = _FromSites(trainer.strategy.checkpoint_io, self, trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves the trainer's way to read checkpoints as it was before."""
        del pl_module, stage
        self._take_off(trainer)

    def _take_off(self, trainer: pl.Trainer) -> None:
        for holder, name, checkpoint_io in _chain(trainer.strategy):
            if isinstance(checkpoint_io, _FromSites) and checkpoint_io.replication is self:
                setattr(holder, name, checkpoint_io.inner)
                return

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to count from the step that the training begins with."""
        del pl_module
        self._first_step = self._last_step = trainer.global_step
        self._sender = futures.ThreadPoolExecutor(1, thread_name_prefix="stabilizer-send")
        staging = tempfile.mkdtemp(prefix="torchext-checkpoints-") if trainer.is_global_zero else ""
        self.staging = Path(trainer.strategy.broadcast(staging))
        self._since = self._places = self._due = None
        if self.node is not None and self.max_deltas and trainer.world_size == 1:
            self._follow(trainer)

    def _follow(self, trainer: pl.Trainer) -> None:
        """Has snapshots taken of what the trainer's standby is told, if it has one."""
        from torchext.callbacks.phantasy import PhantasyCheckpoint
        from torchext.callbacks.stabilizer_standby import StandbyFollower

        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PhantasyCheckpoint) and callback.publisher is not None:
                self._follower = StandbyFollower(callback.publisher, self._wants_snapshot, self._take_snapshot)
                return

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sends a checkpoint if one is due; looks how far the stable one is behind."""
        del pl_module, outputs, batch, batch_idx
        self._raise_failures()
        step = trainer.global_step
        # With several optimizers it moves by more than one.
        if step // self.every_n_steps > self._last_step // self.every_n_steps:
            self._last_step = step
            if self._follower is not None and self._follower.is_connected:
                self._due = step  # told to the standby next, and then handed to `_take_snapshot`
            else:
                self._take(trainer, step)
        if self.node is not None and step - max(self.stable_step, self._first_step) > self.max_lag:
            self._lags(step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sends what is left; waits for it to become stable, unless only warnings are wanted."""
        del pl_module
        if self._due is not None:  # the standby did not get it, or the one before was still being handed over
            self._take(trainer, trainer.global_step)
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown(wait=True)
        self._raise_failures()
        with self._lock:
            last = self.sent[-1] if self.sent else None
        if self.node is not None and last is not None:
            self._forget()
            if self.on_unstable != "warn":
                self.node.waitfor(last.seq, self.predicate, self.timeout)
                self._forget()
        self._clean(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends the sending of checkpoints; those that were taken go out."""
        del pl_module, exception
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown(wait=True)
        self._clean(trainer)

    def _wants_snapshot(self, step: int) -> bool:
        if self._due is None or step < self._due or not all(future.done() for future in self._pending):
            return False
        return self._sender is not None

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        self._due = None
        assert self.node is not None
        assert self._sender is not None
        self._pending.append(self._sender.submit(self._send_snapshot, self.node, snapshot))

    def _send_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        since, places = self._since, self._places
        self._since = self._places = None  # if this fails, the next one is sent whole
        if since is not None and places is not None and since.num_deltas < self.max_deltas:
            sent = send_delta(node, snapshot.delta(places), snapshot.step, since, timeout=self.timeout)
        else:
            assert self.staging is not None
            path = self.staging / "snapshot"
            try:
                snapshot.write(path)
                sent = send_checkpoint(node, path, snapshot.step, timeout=self.timeout)
            finally:
                path.unlink(missing_ok=True)
        self._since, self._places = sent, snapshot.places()
        self._add(sent)

    def _take(self, trainer: pl.Trainer, step: int) -> None:
        assert self.staging is not None
        self._due = None
        path = self.staging / f"{step}.ckpt"
        trainer.save_checkpoint(path)  # by all ranks
        if self.node is not None and self._sender is not None:
            self._pending.append(self._sender.submit(self._send, self.node, path, step))

    def _send(self, node: Node, path: Path, step: int) -> None:
        since = self._since if self._since is not None and self._since.num_deltas < self.max_deltas else None
        if self._places is not None:
            since = self._places = None
        try:
            sent = send_checkpoint(node, path, step, since=since, is_base=self.max_deltas > 0, timeout=self.timeout)
        finally:
            _remove(path)
        self._since = sent if self.max_deltas else None
        self._add(sent)

    def _add(self, sent: Sent) -> None:
        with self._lock:
            self.sent.append(sent)
        self._forget()

    def _forget(self) -> None:
        """Drops checkpoints that newer stable ones make superfluous."""
        if self.node is None or self.keep is None:
            return
        frontier = self.node.get_stability_frontier(self.predicate)
        with self._lock:
            stable = [sent for sent in self.sent if sent.seq <= frontier]
            if len(stable) <= self.keep:
                return
            first_kept = stable[-self.keep]
            self._stable_step = max(self._stable_step, stable[-1].step)
            self.sent = [sent for sent in self.sent if sent.step >= first_kept.step]
        self.node.truncate(first_kept.first - 1)

    def _lags(self, step: int) -> None:
        assert self.node is not None
        behind = max(self.stable_step, self._first_step)
        words = f"step {step}: the newest stable checkpoint is of step {behind}, more than max_lag = {self.max_lag} ago"
        if self.on_unstable == "warn":
            if step >= self._warned_step + self.every_n_steps:
                self._warned_step = step
                rank_zero_warn(f"{words}; {self._why()}")
            return
        if self.on_unstable == "raise":
            raise StabilityTimeoutError(f"{words}; {self._why()}")
        deadline = time.monotonic() + self.timeout
        if futures.wait(self._pending, self.timeout).not_done:
            raise StabilityTimeoutError(f"{words}; the next is still being handed over after {self.timeout:g} s")
        self._raise_failures()
        with self._lock:
            wanted = next((sent for sent in self.sent if step - sent.step <= self.max_lag), None)
        if wanted is not None:
            self.node.waitfor(wanted.seq, self.predicate, max(0.001, deadline - time.monotonic()))

    def _why(self) -> str:
        assert self.node is not None
        with self._lock:
            last = self.sent[-1] if self.sent else None
        if last is None:
            return "none has been sent yet"
        try:
            self.node.waitfor(last.seq, self.predicate, 0)
        except StabilityTimeoutError as error:
            return str(error)
        return "it has just become stable"

    def _raise_failures(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            error = future.exception()
            if error is None:
                continue
            if self.on_unstable == "warn" and isinstance(error, (ReplicationError, OSError)):
                rank_zero_warn(f"a checkpoint could not be sent to the other sites: {error}")
                continue
            raise error

    def _clean(self, trainer: pl.Trainer) -> None:
        if self.staging is not None and trainer.is_global_zero:
            shutil.rmtree(self.staging, ignore_errors=True)
        self.staging = None
        if self._follower is not None:
            self._follower.close()
            self._follower = None


class _FromSites(CheckpointIO):
    """Reads ``stabilizer://`` addresses; leaves all else to what was there before."""

    def __init__(self, inner: CheckpointIO, replication: StabilizerReplication, trainer: pl.Trainer) -> None:
        self.inner = inner
        self.replication = replication
        self._trainer = trainer
        self._plain = TorchCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).parent == self.replication.staging:  # sent next, so it must be whole when this returns
            self._plain.save_checkpoint(checkpoint, path)
        else:
            self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        load: Callable[..., dict[str, Any]] = self.inner.load_checkpoint
        if not str(path).startswith(f"{SCHEME}://"):
            return load(path, *arguments, **options)
        with tempfile.TemporaryDirectory(prefix="torchext-restore-") as folder:
            file = Path(folder) / "restored.ckpt"
            self._fetch(str(path), file)
            return load(file, *arguments, **options)

    def _fetch(self, url: str, file: Path) -> None:
        """Rank 0 fetches the checkpoint and hands its file to the others; all ranks call this, and fail together."""
        is_first, broadcast = self._trainer.is_global_zero, self._trainer.strategy.broadcast
        fault: Exception | None = None
        if is_first:
            try:
                self._fetch_alone(url, file)
            except (ReplicationError, OSError, ValueError) as error:
                fault = error
        words = broadcast("" if fault is None else f"{type(fault).__name__}: {fault}")
        if fault is not None:
            raise fault
        if words:
            raise ReplicationError(f"rank 0 could not restore the checkpoint: {words}")
        if self._trainer.world_size == 1:
            return
        with open(file, "rb" if is_first else "wb") as stream:
            while piece := broadcast(stream.read(_PIECE_BYTES) if is_first else b""):
                if not is_first:
                    stream.write(piece)

    def _fetch_alone(self, url: str, file: Path) -> None:
        node = self.replication.node
        if node is None:
            raise ReplicationError(f"{url} is restored by rank 0, whose StabilizerReplication has no node")
        fetch_checkpoint(node, url, file, timeout=self.replication.timeout)
        if file.is_dir():
            raise ReplicationError(f"{url} is a sharded checkpoint; write it to a folder with fetch_checkpoint")
        from torchext.callbacks.stabilizer_standby import to_checkpoint  # needs the native core, as the node does

        to_checkpoint(file)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()


def _chain(strategy: Strategy) -> Iterator[tuple[object, str, CheckpointIO]]:
    """How a strategy reads and writes checkpoints, from wrapper to wrapped, each with who holds it and by what name."""
    holder: object = strategy
    name: str | None = "checkpoint_io"
    while name is not None:
        checkpoint_io: CheckpointIO = getattr(holder, name)
        yield holder, name, checkpoint_io
        holder = checkpoint_io
        name = next((key for key, value in vars(holder).items() if isinstance(value, CheckpointIO)), None)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
