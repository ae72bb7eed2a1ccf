"""A warm worker that takes over from a training process that is killed, stopped or silent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standby.processes import ROOT, build, start_standby, step, undisturbed, until
from torchext._native import standby as native
from torchext.standby import Replicator, StandbyLostError, cli
from torchext.standby.link import fetch, status
from torchext.standby.promote import Promoter

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 60


class _Jobs:
    """A standby with a warm worker, and trainings that are started beside it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.log.touch()
        worker = f"{sys.executable} -m tests.standby.worker {{}} {self.log} {NUM_STEPS}"
        listen = f"{_loopback()}:7007"
        # A machine that is busy may keep a process waiting for a second.
        words = ["--heartbeat", "5", "--promote", worker.format(listen)]
        self.standby, self.address = start_standby(*words, listen=listen)

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.standby.worker", self.address, str(self.log), str(NUM_STEPS), "wait"]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def lines(self) -> list[dict[str, Any]]:
        whole = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def warm(self) -> int:
        """The process that waits, once it does."""
        until(lambda: status(self.address)["warm"] is not None)
        return int(status(self.address)["warm"])


def _loopback() -> str:
    """An address of this process's own, so that the port may be chosen."""
    pid = os.getpid()
    return f"127.{1 + pid // 62500 % 250}.{1 + pid // 250 % 250}.{1 + pid % 250}"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[_Jobs]:
    jobs = _Jobs(tmp_path)
    yield jobs
    jobs.standby.send_signal(signal.SIGTERM)
    jobs.standby.communicate(timeout=60)
    for line in jobs.lines():  # what was promoted goes on without the standby
        with contextlib.suppress(ProcessLookupError):
            os.kill(line["pid"], signal.SIGKILL)


def _train(first: subprocess.Popen[str], jobs: _Jobs, num_steps: int) -> None:
    before = len(jobs.lines())
    assert first.stdin is not None
    first.stdin.write("\n" * num_steps)
    first.stdin.flush()
    until(lambda: len(jobs.lines()) >= before + num_steps)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_warm_worker_goes_on_bit_for_bit(jobs: _Jobs, how: signal.Signals) -> None:
    warm = jobs.warm()
    first = jobs.start()
    try:
        _train(first, jobs, 8)
        first.send_signal(how)
        until(lambda: jobs.lines()[-1].keys() >= {"weights"})
        losses, weights = undisturbed(NUM_STEPS)
        done = -1
        for line in jobs.lines()[:-1]:
            assert line["loss"] == losses[line["step"]]
            assert line["step"] >= done
            assert line["pid"] in (first.pid, warm)
            done = line["step"]
        assert done == NUM_STEPS - 1
        steps = [line["step"] for line in jobs.lines()[:-1]]
        assert NUM_STEPS <= len(steps) <= NUM_STEPS + 1  # one at most was done again
        for left, right in zip(jobs.lines()[-1]["weights"], weights.values(), strict=True):
            assert torch.equal(torch.tensor(left, dtype=right.dtype), right)
        if how == signal.SIGSTOP:  # the old one comes back, and is told that it is not needed
            first.send_signal(signal.SIGCONT)
            assert first.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                first.stdin.write("\n" * 3)
                first.stdin.close()
            assert first.wait(60) == 1
    finally:
        first.kill()
        first.wait()
        if first.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                first.stdin.close()


def test_a_worker_that_ends_is_started_again_and_one_that_is_not_needed_ends_with_the_standby(jobs: _Jobs) -> None:
    warm = jobs.warm()
    model, optimizer = build()
    with Replicator(model, optimizer, standby=jobs.address, job="job") as replicator:
        step(model, optimizer)
        replicator.commit(0)
    assert status(jobs.address)["warm"] == warm  # the training is over
    os.kill(warm, signal.SIGKILL)
    until(lambda: status(jobs.address)["warm"] not in (None, warm))
    again = status(jobs.address)["warm"]
    jobs.standby.send_signal(signal.SIGTERM)
    jobs.standby.wait(60)
    assert not Path(f"/proc/{again}").exists()
    assert jobs.lines() == []


def test_a_silent_process_is_lost_and_a_busy_one_is_not(tmp_path: Path) -> None:
    process, address = start_standby("--heartbeat", "3")
    try:
        model, optimizer = build()
        with Replicator(model, optimizer, standby=address, job="job", transport="tcp") as replicator:
            replicator.commit(0)
            link = replicator._publisher._link
            assert link is not None
            assert link._heartbeat is not None
            ctypes.PyDLL(None).usleep(4_000_000)  # holds the interpreter for longer than that
            step(model, optimizer)
            replicator.commit(1)
            assert replicator.stats["connected"]
            assert not status(address)["jobs"]["job"]["ranks"][0]["lost"]
            link._heartbeat.stop()
            until(lambda: status(address)["jobs"]["job"]["ranks"][0]["lost"])
    finally:
        process.kill()
        process.communicate()


def test_a_fork_does_not_hold_up_the_loss_of_its_parent() -> None:
    process, address = start_standby()
    script = (
        "import os, sys, time; from tests.standby.processes import build; from torchext.standby import Replicator\n"
        "replicator = Replicator(*build(), standby=sys.argv[1], job='job', mode='rpo0')\n"
        "replicator.commit(0)\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "sys.stdin.read()\n"  # the child keeps all descriptors open
        "os._exit(0)\n"
    )
    try:
        parent = subprocess.Popen(
            [sys.executable, "-c", script, address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        assert parent.stdin is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        until(lambda: not status(address)["jobs"]["job"]["ranks"][0]["connected"])
        assert Path(f"/proc/{child}").exists()
        parent.stdin.close()
        parent.stdout.close()
        until(lambda: not Path(f"/proc/{child}").exists())
        assert fetch(address, "job").step == 0
    finally:
        process.kill()
        process.communicate()


def test_a_heartbeat_beats_until_it_is_stopped() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        heartbeat = native.Heartbeat(theirs.fileno(), 1)
        ours.settimeout(30)
        for _ in range(5):
            assert ours.recv(1) == b"\1"
        heartbeat.stop()
        heartbeat.stop()
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while ours.recv(1 << 16):
                pass
        with pytest.raises(BlockingIOError):
            ours.recv(1)


def test_a_command_that_cannot_be_started_is_said_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    promoter = Promoter("/no/such/program --x", "127.0.0.1:1")
    promoter.start()
    until(lambda: "cannot start the warm worker /no/such/program --x: [Errno 2]" in caplog.text)
    promoter.stop()
    promoter.stop()


def test_a_warm_worker_whose_standby_is_gone_ends(standby: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process, address = standby
    monkeypatch.setenv("TORCHEXT_STANDBY_WARM", address)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="job") as replicator:
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        with pytest.raises(StandbyLostError, match="is gone"):
            replicator.restore()
        timer.join()


def test_a_heartbeat_of_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--heartbeat", "-1"])
    assert "--heartbeat has to be more than 0 s, got -1" in capsys.readouterr().err


def test_the_next_worker_is_not_started_while_one_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the cores that the takeover needs."""
    promoter = Promoter(f"{sys.executable} -c 'import signal; signal.pause()'", "127.0.0.1:1")
    is_held_back, wait = threading.Event(), promoter._settled.wait

    def note_and_wait(timeout: float) -> bool:
        is_held_back.set()
        return wait(timeout)

    monkeypatch.setattr(promoter._settled, "wait", note_and_wait)
    monkeypatch.setattr("torchext.standby.promote._TAKEOVER_S", 60.0)
    promoter.start()
    try:
        until(lambda: promoter.warm_pid is not None)
        promoter.has_promoted()
        assert is_held_back.wait(60)
        assert promoter.warm_pid is None
        promoter.has_settled()
        until(lambda: promoter.warm_pid is not None)
    finally:
        promoter.stop()
        for promoted in promoter._promoted:
            promoted.kill()
            promoted.wait()
