"""What leaves a job: nothing of a step that never happened, nothing lost, nothing doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.callbacks.lightning_jobs import Crashed
from tests.callbacks.output_jobs import LineLogger, train
from tests.standby.training import Trainings
from torchext.standby.daemon import Daemon
from torchext.standby.link import status

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of Lightning, about small jobs
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of an undisturbed run without a standby."""
    folder = tmp_path_factory.mktemp("reference")
    train(str(folder), None)
    return folder


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "lines"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _checkpoints(folder: Path) -> dict[str, torch.Tensor]:
    """A weight of each checkpoint file, which has to be whole, by its name."""
    return {
        path.name: torch.load(path, weights_only=False)["state_dict"]["net.0.weight"] for path in folder.glob("*.ckpt")
    }


def _assert_like(folder: Path, reference: Path) -> None:
    assert _lines(folder) == _lines(reference)
    ours, theirs = _checkpoints(folder), _checkpoints(reference)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    assert sorted(os.listdir(folder)) == sorted(os.listdir(reference))  # nothing hidden is left


@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_an_undisturbed_run_has_the_outputs_that_it_has_without(
    daemon: Daemon, reference: Path, tmp_path: Path, mode: str
) -> None:
    train(str(tmp_path), daemon.address, callback={"mode": mode})
    _assert_like(tmp_path, reference)


@pytest.mark.parametrize("every_n_steps", [1, 4])
def test_after_a_crash_nothing_is_of_a_step_that_never_happened_and_nothing_is_lost_or_doubled(
    daemon: Daemon, reference: Path, tmp_path: Path, every_n_steps: int
) -> None:
    """Lightning-AI/pytorch-lightning#17915, where a hook was called before the file was there, among others."""
    for crash_at in (3, 7, 12, 13):
        with pytest.raises(Crashed):
            train(str(tmp_path), daemon.address, crash_at=crash_at, callback={"every_n_steps": every_n_steps})
        committed = status(daemon.address)["jobs"][str(tmp_path)]["step"] or 0
        assert all(int(name[5:-5]) <= committed for name in _checkpoints(tmp_path))
        # A line's step counts from 0.
        assert all(line.get("step", -1) < committed for line in _lines(tmp_path))
    train(str(tmp_path), daemon.address, callback={"every_n_steps": every_n_steps})
    _assert_like(tmp_path, reference)


def test_removals_wait_as_well(daemon: Daemon, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#14035, #1331, #1366: save_top_k and a checkpoint that is written meanwhile."""
    for crash_at in (5, 11):
        with pytest.raises(Crashed):
            train(str(tmp_path), daemon.address, crash_at=crash_at, save_top_k=1)
        assert len(_checkpoints(tmp_path)) == 1
        committed = status(daemon.address)["jobs"][str(tmp_path)]["step"]
        assert int(next(iter(_checkpoints(tmp_path)))[5:-5]) <= committed
    train(str(tmp_path), daemon.address, save_top_k=1)
    assert list(_checkpoints(tmp_path)) == ["step=18.ckpt"]


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    os.environ["TORCHEXT_STANDBY_TOKEN"] = "a secret of the tests"
    running = Trainings("tests.callbacks.output_jobs")
    del os.environ["TORCHEXT_STANDBY_TOKEN"]
    yield running
    running.close()


def _kill_again_and_again(trainings: Trainings, address: str, folder: Path, reference: Path, seed: int) -> int:
    random_numbers = random.Random(seed)
    num_deaths = 0
    while True:
        place = "outputs" if num_deaths < 10 else None
        lines = random_numbers.randrange(100, 2500)
        ended = trainings.run(folder=str(folder), address=address, place=place, lines=lines)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        num_deaths += 1
        jobs = status(address)["jobs"]
        committed = (jobs[str(folder)]["step"] or 0) if str(folder) in jobs else 0
        assert all(int(name[5:-5]) <= committed for name in _checkpoints(folder))
    expected, got = Counter(map(str, _lines(reference))), Counter(map(str, _lines(folder)))
    assert expected.keys() == got.keys()
    # An output in the midst of which it was killed is let out once more.
    assert 0 <= sum((got - expected).values()) <= num_deaths
    assert not expected - got
    ours, theirs = _checkpoints(folder), _checkpoints(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(reference))
    return num_deaths


def test_a_job_killed_at_random_points_of_its_outputs(
    trainings: Trainings, standby: tuple[subprocess.Popen[str], str], reference: Path, tmp_path: Path
) -> None:
    assert _kill_again_and_again(trainings, standby[1], tmp_path, reference, 0) > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_jobs_killed_at_random_points_of_their_outputs(
    trainings: Trainings, standby: tuple[subprocess.Popen[str], str], reference: Path, tmp_path: Path
) -> None:
    for seed in range(1, 11):
        (tmp_path / str(seed)).mkdir()
        _kill_again_and_again(trainings, standby[1], tmp_path / str(seed), reference, seed)


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_loggers_of_lightning_show_each_step_once(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    if kind == "tensorboard":
        pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    folder = tmp_path / "checkpoints"

    def logger() -> Any:
        return CSVLogger(tmp_path / "logs") if kind == "csv" else TensorBoardLogger(tmp_path / "logs")

    for crash_at in (4, 9, None):
        if crash_at is None:
            train(str(folder), daemon.address, logger=logger())
        else:
            with pytest.raises(Crashed):
                train(str(folder), daemon.address, logger=logger(), crash_at=crash_at)
    steps = [step for path in sorted((tmp_path / "logs").rglob("*")) for step in _logged_steps(path)]
    assert sorted(steps) == list(range(18))


def _logged_steps(path: Path) -> list[int]:
    if path.name == "metrics.csv":
        rows = [line.split(",") for line in path.read_text().splitlines()]
        step, loss = rows[0].index("step"), rows[0].index("loss")
        return [int(row[step]) for row in rows[1:] if row[loss]]
    if path.name.startswith("events.out"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(path))
        events.Reload()
        return [event.step for event in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []
    return []


def test_without_a_standby_nothing_waits(standby: Any, reference: Path, tmp_path: Path) -> None:
    process, address = standby

    class KillsTheStandby(LineLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            if step == 5:
                process.kill()
                process.wait()

    train(str(tmp_path), address, logger=KillsTheStandby(tmp_path / "lines"), callback={"timeout": 5})
    _assert_like(tmp_path, reference)


def test_the_trainer_is_left_as_it_was(daemon: Daemon, tmp_path: Path) -> None:
    trainer = train(str(tmp_path), daemon.address).trainer
    assert vars(trainer.loggers[0]).keys() == vars(LineLogger(tmp_path)).keys()
    assert not {"file_exists", "_link_checkpoint"} & vars(trainer.checkpoint_callbacks[0]).keys()


def test_a_checkpoint_io_that_writes_later_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#14035: AsyncCheckpointIO leaves files behind that save_top_k was to remove."""
    with pytest.raises(ValueError, match="needs a CheckpointIO that has written when it returns"):
        train(str(tmp_path), daemon.address, plugins=[AsyncCheckpointIO()])
