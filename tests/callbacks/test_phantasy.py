"""Lightning jobs that crash and go on: losses, samples, validations and weights are those of an undisturbed run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from tests.callbacks.lightning_jobs import Crashed, Model, TwoOptimizers, fit
from tests.standby.processes import until
from torchext.callbacks import PhantasyCheckpoint
from torchext.standby import NoStateError, cli
from torchext.standby.daemon import Daemon
from torchext.standby.link import fetch, remove
from torchext.standby.persist import steps

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning about the jobs of these tests: few workers, a position that it cannot find.
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),  # on machines of a Slurm cluster
]


def _assert_goes_on(reference: Model, resumed: Model) -> None:
    first = min(resumed.losses)
    assert resumed.losses == {step: loss for step, loss in reference.losses.items() if step >= first}
    assert resumed.samples == {step: samples for step, samples in reference.samples.items() if step >= first}
    assert resumed.validated == [entry for entry in reference.validated if entry[0] > first]
    for (name, left), right in zip(reference.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


def _crash_again_and_again(daemon: Daemon, kind: str, crashes: range, **options: Any) -> None:
    """A job that crashes in each of these steps, and each time goes on from where it was."""
    reference = fit(None, kind, **{name: value for name, value in options.items() if name != "callback"})
    first, path = -1, None
    for crash_at in [*crashes, None]:
        try:
            model = fit(daemon.address, kind, crash_at, path=path, **options)
        except Crashed as crashed:
            model = crashed.model
        if path is not None:
            assert min(model.losses) == first
        last = len(reference.losses) if crash_at is None else crash_at
        assert model.losses == {i: reference.losses[i] for i in range(max(first, 0), last)}
        assert {i: model.samples[i] for i in model.losses} == {i: reference.samples[i] for i in model.losses}
        assert model.validated == [entry for entry in reference.validated if first < entry[0] <= last]
        # Steps count from 0: at most the one before the crash is done again.
        first = last if options.get("callback", {}).get("mode") == "rpo0" else last - 1
        path = f"phantasy://{daemon.address}/latest"
    for (name, left), right in zip(reference.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("kind", ["shuffled", "generator", "stream", "stateful", "sized stateful"])
def test_goes_on_from_every_step(daemon: Daemon, kind: str) -> None:
    """Lightning-AI/pytorch-lightning#20550, #21765, #11029: loaders off by one in the middle of an epoch."""
    _crash_again_and_again(daemon, kind, range(2, 18, 1 if kind == "shuffled" else 3))


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 2},
        {"callback": {"mode": "rpo0", "transport": "tcp"}},
        {"gradient_clip_val": 0.1, "limit_train_batches": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_goes_on_with(daemon: Daemon, options: dict[str, Any]) -> None:
    num_steps = 3 * options.get("limit_train_batches", 6) // options.get("accumulate_grad_batches", 1)
    _crash_again_and_again(daemon, "shuffled", range(2, num_steps, 3), **options)


def test_goes_on_with_workers(daemon: Daemon) -> None:
    _crash_again_and_again(daemon, "workers", range(4, 10, 5))  # in the first epoch and in a later one


def test_goes_on_with_two_optimizers_that_the_model_steps_by_itself(daemon: Daemon) -> None:
    reference = fit(None, "shuffled", model=TwoOptimizers)
    with pytest.raises(Crashed):  # each step of an optimizer counts: 1, 3, 4, 6, ...
        fit(daemon.address, "shuffled", 12, callback={"mode": "rpo0", "audit_every_n_steps": 1}, model=TwoOptimizers)
    resumed = fit(daemon.address, "shuffled", path=f"phantasy://{daemon.address}/latest", model=TwoOptimizers)
    assert min(resumed.losses) == 12
    _assert_goes_on(reference, resumed)


def test_a_commit_every_few_steps_is_what_a_restart_finds(daemon: Daemon) -> None:
    reference = fit(None, "shuffled")
    with pytest.raises(Crashed):
        fit(daemon.address, "shuffled", 12, callback={"every_n_steps": 4})
    resumed = fit(daemon.address, "shuffled", path=f"phantasy://{daemon.address}/latest")
    assert min(resumed.losses) == 8  # 12 was not pulled whole
    _assert_goes_on(reference, resumed)


def test_auto_starts_anew_where_the_standby_holds_nothing_and_latest_does_not(daemon: Daemon) -> None:
    path = f"phantasy://{daemon.address}"
    with pytest.raises(NoStateError, match="holds no complete state of job 'job'"):
        fit(daemon.address, "shuffled", path=f"{path}/latest")
    fit(daemon.address, "shuffled", path=f"{path}/auto", max_epochs=1)
    assert min(fit(daemon.address, "shuffled", path=f"{path}/auto").losses) == 6
    with pytest.raises(ValueError, match=r"expected ckpt_path=phantasy://HOST:PORT/STEP, .* got 'phantasy://latest'"):
        fit(daemon.address, "shuffled", path="phantasy://latest")
    for options in ({"every_n_steps": 0}, {"num_streams": 0}):  # others: see Replicator
        with pytest.raises(ValueError, match="has to be at least 1, got 0"):
            PhantasyCheckpoint(daemon.address, **options)


def test_an_exported_state_is_an_ordinary_checkpoint(daemon: Daemon, tmp_path: Path) -> None:
    trained = fit(daemon.address, "shuffled")
    file = tmp_path / "exported.ckpt"
    assert cli.main(["export", "latest", str(file), "--standby", daemon.address]) == 0
    loaded = Model.load_from_checkpoint(file, weights_only=True)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert fit(None, "shuffled", path=str(file)).losses == {}  # nothing is left to do
    assert len(fit(None, "shuffled", path=str(file), max_epochs=4).losses) == 6


def test_another_model_is_refused_with_names_and_shapes(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(daemon.address, "shuffled", max_epochs=1)
    monkeypatch.setattr(Model, "configure_model", lambda self: setattr(self, "net", torch.nn.Linear(32, 1)))
    with pytest.raises(RuntimeError, match=r"net\.weight"):
        fit(daemon.address, "shuffled", path=f"phantasy://{daemon.address}/latest")


def test_strategies_that_load_checkpoints_by_themselves_are_refused() -> None:
    """Lightning-AI/pytorch-lightning: FSDPStrategy.load_checkpoint, and others like it, use no CheckpointIO."""
    for strategy in (FSDPStrategy(), ModelParallelStrategy()):
        trainer: Any = SimpleNamespace(strategy=strategy)
        with pytest.raises(ValueError, match=rf"{type(strategy).__name__}, which .* use DDPStrategy, or"):
            PhantasyCheckpoint().setup(trainer, Model(), "fit")


def test_the_trainer_is_left_as_it_was(daemon: Daemon) -> None:
    model = fit(daemon.address, "shuffled", max_epochs=1)
    trainer = model.trainer
    assert type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        assert not {"setup_data", "on_advance_start", "on_run_start", "on_advance_end"} & vars(loop).keys()


class _Wrapping(TorchCheckpointIO):
    """What another callback may put around the standby's."""

    def __init__(self, inner: CheckpointIO) -> None:
        self.wrapped = inner


class _WrapsAfterwards(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.checkpoint_io = _Wrapping(trainer.strategy.checkpoint_io)


def test_the_trainer_is_left_as_it_was_where_another_callback_has_wrapped_it(daemon: Daemon) -> None:
    model = fit(daemon.address, "shuffled", max_epochs=1, callbacks=[_WrapsAfterwards()])
    outer = model.trainer.strategy.checkpoint_io
    assert isinstance(outer, _Wrapping)
    assert type(outer.wrapped) is TorchCheckpointIO


def test_no_code_of_a_checkpoint_is_run(daemon: Daemon, tmp_path: Path) -> None:
    fit(daemon.address, "shuffled", max_epochs=1)
    file = tmp_path / "exported.ckpt"
    assert cli.main(["export", "latest", str(file), "--standby", daemon.address]) == 0
    checkpoint = torch.load(file, weights_only=True)
    evil = io.BytesIO()
    torch.save(_Touches(tmp_path / "ran"), evil)
    checkpoint["torchext_standby"]["data"] = torch.frombuffer(bytearray(evil.getvalue()), dtype=torch.uint8)
    torch.save(checkpoint, file)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        fit(daemon.address, "shuffled", path=str(file))
    assert not (tmp_path / "ran").exists()


class _Touches:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


class _ReplacesTheOptimizer(Callback):
    """As callbacks that thaw layers do."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.strategy.optimizers = [torch.optim.SGD(trainer.model.parameters(), lr=0.01, momentum=0.9)]


def test_optimizers_that_a_callback_replaces_are_followed(daemon: Daemon) -> None:
    options: dict[str, Any] = {"mode": "rpo0", "audit_every_n_steps": 1}
    with pytest.raises(Crashed):
        fit(daemon.address, "shuffled", 8, callback=options, callbacks=[_ReplacesTheOptimizer()])
    state = fetch(daemon.address, "job")
    assert state.step == 8
    assert "momentum_buffer" in state.tree["optimizer_states"][0]["state"][0]


def test_raw_and_averaged_weights_are_resumed(daemon: Daemon) -> None:
    """ecmwf/anemoi-core#1373: one of the two was lost."""
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="needs Lightning 2.6")

    def weights(callback: Any, model: Model) -> list[torch.Tensor]:
        return [*callback._average_model.state_dict().values(), *model.state_dict().values()]

    reference_callback, resumed_callback = (averaging.EMAWeightAveraging(decay=0.9) for _ in range(2))
    reference = fit(None, "shuffled", callbacks=[reference_callback], max_epochs=2)
    with pytest.raises(Crashed):
        fit(daemon.address, "shuffled", 8, callbacks=[averaging.EMAWeightAveraging(decay=0.9)], max_epochs=2)
    path = f"phantasy://{daemon.address}/latest"
    resumed = fit(daemon.address, "shuffled", path=path, callbacks=[resumed_callback], max_epochs=2)
    assert resumed.losses == {step: loss for step, loss in reference.losses.items() if step in resumed.losses}
    for left, right in zip(weights(reference_callback, reference), weights(resumed_callback, resumed), strict=True):
        assert torch.equal(left, right)


def test_a_job_goes_on_from_the_disk_when_the_standby_has_lost_all(daemon: Daemon, tmp_path: Path) -> None:
    reference = fit(None, "shuffled")
    options: dict[str, Any] = {"mode": "rpo0", "persist_dir": tmp_path, "persist_every_n_commits": 1}
    with pytest.raises(Crashed):
        fit(daemon.address, "shuffled", 9, callback=options)
    until(lambda: steps(tmp_path, "job")[-1:] == [9])
    remove(daemon.address, "job")
    resumed = fit(daemon.address, "shuffled", path=f"phantasy://{daemon.address}/auto", callback=options)
    assert min(resumed.losses) == 9
    _assert_goes_on(reference, resumed)
