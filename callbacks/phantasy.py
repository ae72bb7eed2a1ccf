"""The standby for Lightning: `PhantasyCheckpoint`."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from torchext.callbacks.outputs import Outputs
from torchext.standby import persist, rng
from torchext.standby.connect import open_link
from torchext.standby.errors import NoStateError, StandbyError, StandbyLostError
from torchext.standby.link import Identity
from torchext.standby.options import Mode, OnStandbyLoss, Options, Tracking, Transport, check_count
from torchext.standby.promote import await_promotion
from torchext.standby.publisher import Publisher, resume_from
from torchext.standby.replicator import default_job
from torchext.standby.tree import later_states

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

logger = logging.getLogger(__name__)

SCHEME = "phantasy://"
_WITHOUT_CHECKPOINT_IO = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)  # those that load files by themselves
_KEY = "torchext_standby"  # what this adds to a checkpoint


class PhantasyCheckpoint(Callback):
    """Keeps a standby's copy of the training state, as of the last step, while Lightning trains.

    ::

        trainer = Trainer(callbacks=[PhantasyCheckpoint(standby="127.0.0.1:7007")])
        trainer.fit(model, ckpt_path="phantasy://127.0.0.1:7007/auto")

    A step is committed at the end of its iteration, after a validation that belongs to it; the standby pulls it while
    the next step's forward and backward run, and the optimizer waits for that only if need be. A restarted program goes
    on behind the last committed step with equal losses: weights, optimizers, schedulers, callbacks, loops, generators
    and the position in the data, each sample once. Loaders without a ``state_dict`` are brought to their
    position by fetching what was consumed once more.

    ``ckpt_path``: ``phantasy://HOST:PORT/STEP``, or ``phantasy://local/STEP``. STEP is ``latest``; a number that the
    standby still holds; or ``auto``: the latest if there is one, else training starts anew.

    Args:
        standby: ``"host:port"`` of a ``torchext standby``, or ``"local"``: one on this host, started if need be.
        job: Name of the job at the standby; None: `torchext.standby.replicator.default_job`.
        mode: ``"lag1"``: at most one step is done again after a crash; ``"rpo0"``: none, as each step waits until the
            standby holds it.
        every_n_steps: Commit only every so many optimizer steps.
        tracking: See `torchext.standby.Replicator`, as for the following.
        transport: ``"auto"``, ``"local"``, ``"rdma"`` or ``"tcp"``.
        on_standby_loss: ``"degrade"`` or ``"raise"``.
        timeout: How long to wait for the standby before it counts as lost, in seconds.
        num_streams: Connections that carry the state, for TCP.
        huge_pages: Whether to use huge pages of hugetlb; None: if there are some.
        audit_every_n_steps: After how many steps all of the standby's copy is checked; 0: never.
        persist_dir: Where the standby writes states to disk, on its host; ``auto`` takes the newest of both.
        persist_every_n_commits: How often.
        commit_outputs: Whether what loggers are told, and files of `ModelCheckpoint`, wait until their step is
            committed, so that after a crash nothing outside is of a step that never happened; see
            `torchext.callbacks.outputs.Outputs`. Without a standby they do not wait.

    Raises:
        ValueError: An argument cannot be; or, as training starts, the trainer's strategy (FSDP, model parallel,
            DeepSpeed) loads checkpoints past what this can replace.
    """

    def __init__(
        self,
        standby: str = "local",
        *,
        job: str | None = None,
        mode: Mode = "lag1",
        every_n_steps: int = 1,
        tracking: Tracking = "auto",
        transport: Transport = "auto",
        on_standby_loss: OnStandbyLoss = "degrade",
        timeout: float | timedelta = 30.0,
        num_streams: int = 4,
        huge_pages: bool | None = None,
        audit_every_n_steps: int = 0,
        persist_dir: str | Path | None = None,
        persist_every_n_commits: int = 0,
        commit_outputs: bool = False,
    ) -> None:
        super().__init__()
        check_count("every_n_steps", every_n_steps, at_least=1)
        self._job = job
        self._every_n_steps = every_n_steps
        self._options = Options(
            standby=standby,
            mode=mode,
            tracking=tracking,
            transport=transport,
            on_standby_loss=on_standby_loss,
            timeout=timeout,
            num_streams=num_streams,
            huge_pages=huge_pages,
            audit_every_n_steps=audit_every_n_steps,
            persist_dir=persist_dir,
            persist_every_n_commits=persist_every_n_commits,
        )
        self._commit_outputs = commit_outputs
        self._outputs: Outputs | None = None
        self._identity: Identity | None = None
        self._publisher: Publisher | None = None
        self._loops: _Loops | None = None
        self._last_step = 0

    @property
    def publisher(self) -> Publisher | None:
        """What talks to the standby; None outside of training."""
        return self._publisher

    # --- Lightning's hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets the trainer load from a standby."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if isinstance(strategy, _WITHOUT_CHECKPOINT_IO):
            raise ValueError(
                f"PhantasyCheckpoint cannot be used with {type(strategy).__name__}, which loads checkpoints past the "
                "trainer's CheckpointIO; use DDPStrategy, or for sharded models torchext.standby.Replicator in a "
                "loop of your own"
            )
        self._identity = Identity.of_this_process(self._job or default_job(), trainer.global_rank, trainer.world_size)
        if self._commit_outputs:
            self._outputs = Outputs(trainer, self._identity.job)
        strategy.checkpoint_io = _StandbyIO(strategy.checkpoint_io, self._load, self._outputs)
        self._loops = _Loops(trainer, self._commit)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps what is needed to go on in the middle of an epoch."""
        if self._loops is not None and _KEY in checkpoint:
            self._loops.resume_from(checkpoint[_KEY])
            if self._outputs is not None and "outputs" in checkpoint[_KEY]:
                self._outputs.resume_from(checkpoint[_KEY]["outputs"], checkpoint["global_step"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connects."""
        assert self._identity is not None
        self._last_step = trainer.global_step
        self._publisher = Publisher(
            {"module": pl_module},
            list(trainer.optimizers),
            identity=self._identity,
            options=self._options,
            gate_in_optimizers=False,  # Lightning computes the gradients within the optimizer's step
        )
        self._publisher.connect()
        if self._outputs is not None:
            released = self._outputs.forget_released(self._publisher.released)
            self._publisher.note_released(released)
            self._outputs.start()
            self._let_out()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Waits, if need be, until the standby has the step before."""
        if self._publisher is not None:
            self._publisher.gate()
            self._let_out()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets the standby have the last commit."""
        self._end(finished=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until the standby has the last step."""
        self._end(finished=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the trainer as it was."""
        self._end(finished=False)
        if self._loops is not None:
            self._loops.close()
            self._loops = None
            trainer.strategy.checkpoint_io = _without_standby(trainer.strategy.checkpoint_io)

    # --- within ---

    def _commit(self, trainer: Trainer) -> None:
        """At the end of each iteration."""
        publisher, loops = self._publisher, self._loops
        if publisher is None or loops is None or trainer.fit_loop._should_accumulate():
            return
        if trainer.global_step - self._last_step < self._every_n_steps:
            return
        self._last_step = trainer.global_step

        def collect() -> dict[str, Any]:
            checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            loops.correct_loader_states(checkpoint)
            checkpoint["state_dict"] = publisher.ledger.later(checkpoint["state_dict"])
            checkpoint["optimizer_states"] = [later_states(state) for state in checkpoint["optimizer_states"]]
            checkpoint[_KEY] = loops.collect()
            if self._outputs is not None:
                checkpoint[_KEY]["outputs"] = self._outputs.state()
            return checkpoint

        publisher.use_optimizers(list(trainer.optimizers))  # another callback may have replaced them
        if self._outputs is not None:
            self._outputs.tag(trainer.global_step)
        publisher.publish(trainer.global_step, collect)
        self._let_out()

    def _let_out(self) -> None:
        """Outputs whose step is committed."""
        if self._outputs is None or self._publisher is None:
            return
        if self._publisher.is_connected:
            last = self._outputs.release(self._publisher.committed)
        else:
            last = self._outputs.release_all()
        if last is not None:
            self._publisher.note_released(last)

    def _load(self, path: str) -> dict[str, Any]:
        address, _, wanted = path.removeprefix(SCHEME).rpartition("/")
        if not address or not (wanted in ("latest", "auto") or wanted.isdigit()):
            raise ValueError(f"expected ckpt_path={SCHEME}HOST:PORT/STEP, with a number, latest or auto, got {path!r}")
        step = int(wanted) if wanted.isdigit() else None
        try:
            checkpoint: dict[str, Any] = self._state(address, step, try_disk=wanted != "latest").tree
        except NoStateError:
            if wanted != "auto":
                raise
            return _Nothing({"pytorch-lightning_version": lightning.__version__})
        return checkpoint

    def _state(self, address: str, step: int | None, *, try_disk: bool) -> persist.State:
        """The state of a step, or the last one."""
        identity, directory = self._identity, self._options.persist_dir
        assert identity is not None
        on_disk = persist.steps(directory, identity.job) if try_disk and directory is not None else []

        def load(step: int | None) -> persist.State:
            assert directory is not None
            return persist.load(directory, identity.job, rank=identity.rank, world_size=identity.world_size, step=step)

        options = self._options
        try:
            link = open_link(address, identity, transport=options.transport, timeout_s=options.timeout_s)
        except (OSError, StandbyLostError) as error:
            if not on_disk or (step is not None and step not in on_disk):
                raise StandbyLostError(f"the standby at {address} cannot be reached: {error}") from error
            logger.warning("the standby at %s cannot be reached (%s); going on from the disk", address, error)
            return load(step)
        try:
            await_promotion(link, address)
            link.claim(take_over=True, num_streams=0, find=lambda _: torch.empty(0))
            return resume_from(link, step, on_disk, load)
        finally:
            link.close()

    def _end(self, *, finished: bool) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is None:
            return
        try:
            if self._outputs is not None:
                self._end_outputs(self._outputs, publisher, finished=finished)
        finally:
            publisher.close(finished=finished)

    def _end_outputs(self, outputs: Outputs, publisher: Publisher, *, finished: bool) -> None:
        try:
            publisher.settle()
            last = None
            if finished:
                last = outputs.release_all()
            elif publisher.is_connected:  # else the standby could not note it, and the restart would do it once more
                last = outputs.release(publisher.committed)
            if last is not None:
                publisher.note_released(last)
        finally:
            outputs.close()
            self._outputs = None


class _Nothing(dict[str, Any]):
    """A checkpoint that restores nothing: Lightning asks for its truth."""

    def __bool__(self) -> bool:
        return False


class _StandbyIO(CheckpointIO):
    """Loads from a standby what has its scheme, and leaves everything else to the one before."""

    def __init__(
        self, inner: CheckpointIO, load: Callable[[str], dict[str, Any]], outputs: Outputs | None = None
    ) -> None:
        self.inner = inner
        self._load = load
        self._outputs = outputs

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if self._outputs is not None:
            self._outputs.save_checkpoint(self.inner, checkpoint, path, storage_options)
        else:
            self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if str(path).startswith(SCHEME):
            return self._load(str(path))
        return self.inner.load_checkpoint(path, *arguments, **options)

    def remove_checkpoint(self, path: Any) -> None:
        if self._outputs is not None:
            self._outputs.remove_checkpoint(self.inner, path)
        else:
            self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()


def _without_standby(outer: CheckpointIO) -> CheckpointIO:
    """Takes a `_StandbyIO` out of plugins that wrap one another; each holds the next one in an attribute."""
    if isinstance(outer, _StandbyIO):
        return outer.inner
    for name, inner in list(vars(outer).items()):
        if isinstance(inner, CheckpointIO):
            setattr(outer, name, _without_standby(inner))
    return outer


class _Loops:
    """Follows a trainer's loops: the end of each iteration, and how its data is fetched.

    Lightning has no hooks at these points, so methods of the loops are wrapped on their objects, until `close`.

    An iteration's data depends on the generators as of when the loader's iterator was made and as of its first fetch.
    Both are kept for the present epoch; a resumed run makes the iterator under the same and fetches again what was
    consumed.
    """

    def __init__(self, trainer: Trainer, commit: Callable[[Trainer], None]) -> None:
        self._trainer = trainer
        self._commit = commit
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._resume: dict[str, Any] | None = None
        self._setup: dict[str, Any] | None = None  # generators before the loader was made
        self._iterator: dict[str, Any] | None = None  # before its iterator was; None: it was made together with it
        self._first: dict[str, Any] | None = None  # before the first fetch
        self._packed: torch.Tensor | None = None  # these three, as bytes
        self._states_before_fetch: Any = None  # of stateful loaders
        self._wrapped: list[tuple[Any, str]] = []
        self._wrap(self._fit, "setup_data", self._setup_data)
        self._wrap(self._fit, "on_advance_start", self._on_epoch_start)
        self._wrap(self._epoch, "on_run_start", self._on_run_start)
        self._wrap(self._epoch, "on_advance_end", self._on_iteration_end)
        self._wrap(self._epoch, "_on_before_fetch", self._on_before_fetch)

    def close(self) -> None:
        """Takes the wrappers off."""
        for loop, name in self._wrapped:
            vars(loop).pop(name, None)
        self._wrapped.clear()

    def collect(self) -> dict[str, Any]:
        """What a checkpoint needs beside Lightning's own: generators and position in the data."""
        if self._packed is None:
            file = io.BytesIO()
            torch.save((self._setup, self._iterator, self._first), file)
            self._packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        consumed = self._epoch.batch_progress.current.ready
        return {"rng": rng.collect(), "data": self._packed, "consumed": consumed}

    def correct_loader_states(self, checkpoint: dict[str, Any]) -> None:
        """A fetcher that is a batch ahead makes stateful loaders say so: puts the position of what was consumed."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        if "combined_loader" in state and self._prefetches() and self._states_before_fetch is not None:
            state["combined_loader"] = self._states_before_fetch

    def resume_from(self, saved: dict[str, Any]) -> None:
        """The next start of an epoch goes on from there."""
        # It may be anybody's checkpoint: no code of it is run.
        packed = torch.load(io.BytesIO(saved["data"].numpy().tobytes()), weights_only=True)
        self._setup, self._iterator, self._first = packed
        self._resume = saved

    def _wrap(self, loop: Any, name: str, around: Callable[..., None]) -> None:
        original = getattr(loop, name)
        setattr(loop, name, lambda *arguments: around(original, *arguments))
        self._wrapped.append((loop, name))

    def _setup_data(self, original: Callable[[], None]) -> None:
        if self._fit._combined_loader is None or self._fit._should_reload_train_dl:
            if self._resume is not None and self._setup is not None:
                rng.restore(self._setup)  # a split of the data by chance comes out as it did
            else:
                self._setup, self._iterator, self._packed = rng.collect(), None, None
        original()

    def _on_epoch_start(self, original: Callable[[], None]) -> None:
        original()
        if self._resume is not None:
            saved, self._resume = self._resume, None
            self._find_position(saved["consumed"])
            rng.restore(saved["rng"])

    def _on_run_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        resuming = self._fit.is_resuming or self._epoch.restarting
        if not resuming and self._trainer.current_epoch > 0:  # when Lightning makes a new iterator
            self._iterator = {**rng.collect(), "generators": [g.get_state() for g in self._generators()]}
        original(fetcher)
        if not resuming:
            self._first, self._packed = rng.collect(), None

    def _on_iteration_end(self, original: Callable[[Any], None], fetcher: Any) -> None:
        # After a restart behind a validation Lightning goes through an iteration without a batch, and counts it.
        skipped, stepped = self._epoch._skip_next_val, self._epoch._batches_that_stepped
        original(fetcher)
        if skipped:
            self._epoch._batches_that_stepped = stepped
        else:
            self._commit(self._trainer)

    def _on_before_fetch(self, original: Callable[[], None]) -> None:
        if self._prefetches():
            loader = self._fit._combined_loader
            assert loader is not None
            self._states_before_fetch = loader._state_dicts()
        original()

    def _prefetches(self) -> bool:
        fetcher = self._fit._data_fetcher
        return isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None

    def _generators(self) -> list[torch.Generator]:
        """Those that the loaders were given by the user."""
        loader = self._fit._combined_loader
        found: list[torch.Generator] = []
        for each in [] if loader is None else loader.flattened:
            sampler = getattr(each, "sampler", None)
            inner = getattr(getattr(each, "batch_sampler", None), "sampler", None)
            for owner in (each, sampler, inner):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                    found.append(generator)
        return found

    def _find_position(self, consumed: int) -> None:
        """Brings the fetcher behind the batches that were consumed in this epoch."""
        loader, fetcher = self._fit._combined_loader, self._fit._data_fetcher
        assert loader is not None
        assert fetcher is not None
        stateful = [isinstance(each, _Stateful) for each in loader.flattened]
        if all(stateful):
            return  # Lightning has given them their states
        if any(stateful) or isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise StandbyError(
                "cannot find the position in the data again: of several loaders either all need a state_dict or none, "
                "and training_step(dataloader_iter) needs loaders with one"
            )
        if self._iterator is not None:
            rng.restore(self._iterator)
            for generator, state in zip(self._generators(), self._iterator["generators"], strict=True):
                generator.set_state(state)
            iter(fetcher)
        if self._first is not None and not self._prefetches():
            rng.restore(self._first)
        for _ in range(consumed):
            next(fetcher)
        fetcher.fetched -= consumed  # Lightning adds them
