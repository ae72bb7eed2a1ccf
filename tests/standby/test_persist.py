"""States on disk: written by the standby, found by a restart, never torn, whatever dies or fills up."""

from __future__ import annotations

import copy
import os
import random
import resource
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standby.processes import build, start_standby, step, undisturbed, until
from torchext.standby import (
    CorruptStateError,
    NoStateError,
    PersistWarning,
    Replicator,
    StandbyError,
    StandbyLostError,
    StandbyLostWarning,
    StateMismatchError,
    cli,
)
from torchext.standby.daemon import Daemon
from torchext.standby.link import remove
from torchext.standby.persist import load, steps

pytestmark = pytest.mark.usefixtures("one_thread")


def _replicator(address: str, model: Any, optimizer: Any, folder: Path, every: int = 1, **options: Any) -> Replicator:
    return Replicator(
        model,
        optimizer,
        standby=address,
        job="a/job",
        persist_dir=folder,
        persist_every_n_commits=every,
        **{"mode": "rpo0", **options},
    )


def _hear(replicator: Replicator) -> None:
    """Waits until the standby has said something."""
    link = replicator._publisher._link
    assert link is not None

    def heard() -> bool:
        link.check()
        return bool(link.notices)

    until(heard)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_restart_goes_on_from_the_disk_when_the_standby_has_lost_all(standby: Any, tmp_path: Path) -> None:
    process, address = standby
    losses, weights = undisturbed(9)
    model, optimizer = build()
    with _replicator(address, model, optimizer, tmp_path, every=2) as replicator:
        for i in range(6):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i)
            if i % 2:
                until(lambda: steps(tmp_path, "a/job")[-1:] == [i])  # noqa: B023
    expected = ["a%2Fjob", *(f"a%2Fjob/step-{i}{end}" for i in (3, 5) for end in ("", "/rank-0"))]
    until(lambda: _files(tmp_path) == expected)  # what is old goes once the new is there
    process.kill()
    process.wait()
    again, address = start_standby()
    try:
        model, optimizer = build(seed=3)
        with _replicator(address, model, optimizer, tmp_path) as replicator:
            found = replicator.restore()
            assert found is not None
            assert found.step == 5
            for i in range(6, 9):
                assert step(model, optimizer) == losses[i]
                replicator.commit(i)
    finally:
        again.kill()
        again.communicate()
    for left, right in zip(model.state_dict().values(), weights.values(), strict=True):
        assert torch.equal(left, right)


def test_the_newer_of_standby_and_disk_is_taken(daemon: Daemon, tmp_path: Path) -> None:
    model, optimizer = build()
    with _replicator(daemon.address, model, optimizer, tmp_path, every=3) as replicator:
        for i in range(5):
            replicator.commit(i)
            if i == 2:
                until(lambda: steps(tmp_path, "a/job") == [2])
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        assert replicator.restore().step == 4  # type: ignore[union-attr]
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        assert replicator.restore(2).step == 2  # type: ignore[union-attr]  # which only the disk has
    remove(daemon.address, "a/job")
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        assert replicator.restore().step == 2  # type: ignore[union-attr]
        replicator.commit(3)
    with _replicator("127.0.0.1:1", model, optimizer, tmp_path) as replicator:
        with pytest.warns(StandbyLostWarning, match="refused"):
            found = replicator.restore()
        assert found is not None
    with (
        _replicator("127.0.0.1:1", model, optimizer, tmp_path, on_standby_loss="raise") as replicator,
        pytest.raises(StandbyLostError, match="refused"),
    ):
        replicator.restore()


def test_going_back_to_a_step_makes_later_ones_on_disk_void(daemon: Daemon, tmp_path: Path) -> None:
    model, optimizer = build()
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        for i in range(4):
            replicator.commit(i)
            until(lambda: steps(tmp_path, "a/job")[-1:] == [i])  # noqa: B023
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        assert replicator.restore(2).step == 2  # type: ignore[union-attr]
        until(lambda: steps(tmp_path, "a/job")[-1:] == [2])
        replicator.commit(10)
        until(lambda: steps(tmp_path, "a/job") == [2, 10])


def test_all_ranks_are_written_together(daemon: Daemon, tmp_path: Path) -> None:
    parts = []
    for rank in range(2):
        model, optimizer = build(seed=rank)
        parts.append(
            (
                model,
                optimizer,
                _replicator(daemon.address, model, optimizer, tmp_path, rank=rank, world_size=2, mode="lag1"),
            )
        )
    with parts[0][2], parts[1][2]:
        for i in range(3):
            expected = [copy.deepcopy(model.state_dict()) for model, *_ in parts]
            for model, optimizer, replicator in parts:
                step(model, optimizer)
                expected[int(model is parts[1][0])] = copy.deepcopy(model.state_dict())
                replicator.commit(i)
            for *_, replicator in parts:
                replicator.gate()
            until(lambda: steps(tmp_path, "a/job")[-1:] == [i])  # noqa: B023
    for rank in range(2):
        state = load(tmp_path, "a/job", rank=rank, world_size=2)
        assert state.step == 2
        for left, right in zip(state.tree["models"]["model"].values(), expected[rank].values(), strict=True):
            assert torch.equal(left, right)
    with pytest.raises(StateMismatchError, match="is of 2 ranks, this program has 1"):
        load(tmp_path, "a/job", rank=0, world_size=1)
    with pytest.raises(StateMismatchError, match="ranks 0 to 1, rank 2 was asked for"):
        load(tmp_path, "a/job", rank=2)
    until(lambda: steps(tmp_path, "a/job") == [1, 2])
    with pytest.raises(NoStateError, match=r"holds no step 7 of job 'a/job', only \[1, 2\]"):
        load(tmp_path, "a/job", rank=0, step=7)


def test_a_file_that_is_not_as_it_was_written_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    model, optimizer = build()
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        replicator.commit(0)
        until(lambda: steps(tmp_path, "a/job") == [0])
    path = tmp_path / "a%2Fjob" / "step-0" / "rank-0"
    good = path.read_bytes()
    random_numbers = random.Random(0)
    for _ in range(40):
        bad = bytearray(good)
        bad[random_numbers.randrange(len(bad))] ^= 1 << random_numbers.randrange(8)
        path.write_bytes(bad)
        # A flip within the words may leave them as good, such as a space.
        with pytest.raises((CorruptStateError, StandbyError)):
            load(tmp_path, "a/job", rank=0)
    for size in (0, 3, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CorruptStateError, match=r"is not as it was written: .*; remove its folder"):
            load(tmp_path, "a/job", rank=0)
    path.write_bytes(good)
    assert load(tmp_path, "a/job", rank=0).step == 0


@pytest.fixture(params=["file size limit", "full disk"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, Path, Any]]:
    """A standby that cannot write a state between two calls of a function; its folder, and as it is seen from here."""
    if request.param == "file size limit":
        process, address = start_standby()

        def set_full(is_full: bool) -> None:
            limit = 1000 if is_full else resource.RLIM_INFINITY
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        seen = tmp_path
    else:
        words = ["unshare", "--mount", "--propagation", "private"]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*words, "true"], check=False, capture_output=True).returncode
        ):
            pytest.skip("a disk of its own for a process needs unshare and the right to mount")
        script = (
            f"mount -t tmpfs -o size=2m none {tmp_path} && head -c 2080000 /dev/zero > {tmp_path}/full && exec $0 $@"
        )
        process, address = start_standby(before=[*words, "sh", "-c", script])
        seen = Path(f"/proc/{process.pid}/root{tmp_path}")

        def set_full(is_full: bool) -> None:
            if is_full:
                (seen / "full").write_bytes(bytes(2_080_000))
            else:
                (seen / "full").unlink()

    yield address, tmp_path, seen, set_full
    process.kill()
    process.communicate()


def test_a_full_disk_is_said_once_within_a_step_and_recovers(small_disk: Any) -> None:
    """h2oai/h2o-llmstudio#214; Lightning's AsyncCheckpointIO stays broken once a disk was full."""
    address, folder, seen, set_full = small_disk
    model, optimizer = build()
    with _replicator(address, model, optimizer, folder, every=3) as replicator:
        for i in range(2):  # both images have their memory, which counts as a file
            step(model, optimizer)
            replicator.commit(i)
        set_full(True)
        replicator.commit(2)
        _hear(replicator)
        with pytest.warns(PersistWarning, match=r"a state of job 'a/job' could not be written to .*; training goes on"):
            replicator.commit(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(4, 12):
                step(model, optimizer)
                replicator.commit(i)
        assert replicator.stats["connected"]
        assert steps(seen, "a/job") == []
        set_full(False)
        i = 12
        while not steps(seen, "a/job"):
            replicator.commit(i)
            i += 1
    written = steps(seen, "a/job")[-1]
    state = load(seen, "a/job", rank=0)
    assert state.step == written >= 11
    until(lambda: not [name for name in _files(seen) if "/.step" in name])


def test_a_full_disk_raises_where_that_is_wanted(tmp_path: Path, standby: Any) -> None:
    """google/orbax#605: a failure in the background reaches the user within one step."""
    process, address = standby
    model, optimizer = build()
    with _replicator(address, model, optimizer, tmp_path, every=3, on_standby_loss="raise") as replicator:
        replicator.commit(0)
        replicator.commit(1)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        replicator.commit(2)
        _hear(replicator)
        with pytest.raises(StandbyError, match="could not be written"):
            replicator.commit(3)


def test_a_standby_that_is_killed_leaves_whole_states_only(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#688, #19970: a torn file after kill -9."""
    random_numbers = random.Random(1)
    model, optimizer = build()
    newest = -1
    number = 0
    for _ in range(4):
        process, address = start_standby()
        try:
            with warnings.catch_warnings(), _replicator(address, model, optimizer, tmp_path) as replicator:
                warnings.simplefilter("ignore", StandbyLostWarning)
                last = number + random_numbers.randrange(3, 12)
                while number < last:
                    step(model, optimizer)
                    replicator.commit(number, state=torch.full((random_numbers.randrange(1 << 20),), float(number)))
                    number += 1
                process.kill()
                process.wait()
        finally:
            process.kill()
            process.communicate()
        if steps(tmp_path, "a/job"):
            state = load(tmp_path, "a/job", rank=0)
            assert newest <= state.step < number
            assert (state.tree["state"] == state.step).all()
            newest = state.step
    assert newest >= 0
    left = [path for path in (tmp_path / "a%2Fjob").iterdir() if path.name.startswith(".")]
    assert len(left) <= 2  # of the last one


def test_a_persisted_state_is_exported(daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build()
    with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
        replicator.commit(3, state="here")
        until(lambda: steps(tmp_path, "a/job") == [3])
    file = tmp_path / "out.ckpt"
    assert cli.main(["export", "latest", str(file), "--persisted", str(tmp_path), "--job", "a/job"]) == 0
    assert torch.load(file, weights_only=True)["state"] == "here"
    with pytest.raises(SystemExit):
        cli.main(["export", "latest", str(file), "--persisted", str(tmp_path)])
    assert "--persisted needs --job" in capsys.readouterr().err


def test_a_copy_that_does_not_fit_the_memory_is_said_and_costs_training_nothing(tmp_path: Path) -> None:
    model, optimizer = build()
    step(model, optimizer)
    state = torch.zeros(50_000, dtype=torch.uint8)
    # Twice the state of about 113 KB, not thrice.
    with Daemon("127.0.0.1:0", memory_bytes=300_000) as daemon:
        thread = threading.Thread(target=daemon.serve)
        thread.start()
        with _replicator(daemon.address, model, optimizer, tmp_path) as replicator:
            replicator.commit(0, state=state)
            _hear(replicator)
            with pytest.warns(PersistWarning, match="out of memory"):
                replicator.commit(1, state=state)
            replicator.commit(2, state=state)
            assert replicator.stats["connected"]
            assert 226_000 <= daemon.budget.used_bytes < 300_000
        daemon.stop()
        thread.join()
        assert daemon.budget.used_bytes == 0


def test_where_and_how_often_go_together(daemon: Daemon, tmp_path: Path) -> None:
    model, optimizer = build()
    for options in ({"persist_dir": tmp_path}, {"persist_every_n_commits": 1}):
        with pytest.raises(ValueError, match=r"persist_dir and persist_every_n_commits .* go together"):
            Replicator(model, optimizer, standby=daemon.address, **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
