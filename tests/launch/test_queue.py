"""The queue with real daemons, agents and workers, killed and told to stop."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.programs import WORKER, Program, children
from tests.launch.queues import Engine, Queue
from torchext import cli
from torchext.launch.errors import LaunchError
from torchext.launch.queue.client import Client

pytestmark = pytest.mark.timeout(300)  # on a slow machine; each wait has its own, shorter one


def _queue(capsys: pytest.CaptureFixture[str], queue: Queue, *words: str) -> tuple[int, str, str]:
    status = cli.main(["queue", words[0], "--queue", str(queue.folder), *words[1:]])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_jobs_are_submitted_run_and_told_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(tmp_path / "q", options=("--listen", "127.0.0.1:0")) as queue, contextlib.ExitStack() as stack:
        go = tmp_path / "go"
        words = ("--nproc-per-node", "2", "--grace", "5", "--name", "hello", WORKER)
        words += ("show", "TORCHEXT_JOB_ID", "say", "hi", "wait", str(go))
        command = [sys.executable, "-m", "torchext", "run", "--queue", str(queue.folder), *words]
        submitting = stack.enter_context(Program(command))  # at its end all ends that descends from it, the job too
        assert (submitting.wait(), submitting.output) == (0, "job 1\n")
        for rank in range(2):
            queue.wait_for_log(1, f"rank {rank} hi")
        monkeypatch.setenv("TORCHEXT_QUEUE", str(queue.folder))
        log = queue.log(1)
        assert "[hello node 0 rank 0]: up 0/2 attempt 0" in log
        assert "[hello node 0 rank 1]: rank 1 hi" in log
        assert "TORCHEXT_JOB_ID=1" in log
        (file,) = queue.folder.glob("machines/node0/1/run-1/node-0/ranks/*/attempt_0/1/stdout.log")
        assert "rank 1 hi" in file.read_text()
        # The socket is the user's alone.
        assert (queue.folder / "queue.sock").stat().st_mode & 0o777 == 0o600
        assert queue.folder.stat().st_mode & 0o777 == 0o700
        queue.submit("--nproc-per-node", "1", "--priority", "3", WORKER)
        _, out, _ = _queue(capsys, queue, "ls")
        assert [line.split()[:2] for line in out.splitlines()] == [["job", "name"], ["1", "hello"], ["2", "worker"]]
        _, out, _ = _queue(capsys, queue, "plan")
        # The score: an hour, as nobody knows better.
        assert re.fullmatch(r"job 2 waits, score 3600: needs 1 GPUs, 1 on each machine; 0 are free, .*\n", out)
        _, out, _ = _queue(capsys, queue, "show", "1")
        assert "lowest that could start; on node0 (2 slots); expected speed 1" in out
        status, out, _ = _queue(capsys, queue, "top", "--once")
        assert status == 0
        assert "node0" in out
        # Over TCP the token is asked for; a wrong one is refused.
        url = queue.daemon.wait_for(r"tcp://\S+")[0][0]
        with Client(url, token="wrong") as client, pytest.raises(LaunchError, match="needs its token"):
            client.call("jobs")
        token = (queue.folder / "token").read_text()
        assert (queue.folder / "token").stat().st_mode & 0o777 == 0o600
        with Client(url, token=token) as client:
            client.call("cancel", job=2)
        status, _, err = _queue(capsys, queue, "cancel", "2")
        assert (status, err) == (1, "torchext queue cancel: job 2 has ended already: cancelled\n")
        assert _queue(capsys, queue, "drain", "node0")[0] == 0
        go.touch()
        queue.wait_for_state(1, "done")
        assert _queue(capsys, queue, "requeue", "1")[0] == 0
        _, out, _ = _queue(capsys, queue, "top", "--once")
        assert "drained" in out
        assert "waiting" in out
        assert queue.job(1)["num_runs"] == 1
        assert _queue(capsys, queue, "undrain", "node0")[0] == 0
        queue.wait_until(lambda: queue.job(1)["num_runs"] == 2)
        status, out, _ = _queue(capsys, queue, "logs", "-f", "1")  # to its end
        assert (status, queue.job(1)["state"]) == (0, "done")
        assert out.count("up 0/2") == out.count("up 1/2") == 1
        assert _queue(capsys, queue, "logs", "--run", "1", "1")[1] == queue.log(1, 1)
        status, _, err = _queue(capsys, queue, "logs", "--run", "3", "1")
        assert (status, err) == (1, "torchext queue logs: job 1 has no run 3, only 2\n")
        status, _, _ = _queue(capsys, queue, "stop")
        assert (status, queue.daemon.wait()) == (0, 0)
        status, _, err = _queue(capsys, queue, "ls")
        assert status == 1
        assert "no queue answers" in err
        assert "torchext queue start" in err


def test_an_urgent_job_stops_another_and_a_killed_daemon_loses_none_and_starts_none_twice(
    engine: Engine, tmp_path: Path
) -> None:
    with engine.queue(tmp_path / "q", "1x2", "--policy", "las") as queue:
        go, low_go = tmp_path / "go", tmp_path / "low"
        saves = ("--nproc-per-node", "1", "--grace", "9", WORKER, "save", "0.1", "show", "TORCHEXT_JOB_FOLDER")
        saves += ("say", "ready")
        running = queue.submit("--priority", "1", *saves, "wait", str(go))
        low = queue.submit(*saves, "wait", str(low_go))
        for job in (running, low):
            queue.wait_for_log(job, "ready")
        urgent = queue.submit("--priority", "2", *saves, "stay")
        queue.wait_for_log(urgent, "ready")
        assert "rank 0 saved" in queue.log(low)
        assert f"; stops job {low}" in queue.job(urgent)["runs"][0]["explanation"]
        keeper = engine.keeper(queue, running)
        with pytest.raises(AssertionError, match=r"a queue runs in .* already"):
            Queue(tmp_path / "q").start()
        queue.kill()
        queue.start()
        assert engine.keeper(queue, running) == keeper
        assert queue.job(low)["state"] == "waiting"
        queue.client.call("cancel", job=urgent)
        queue.wait_for_state(urgent, "cancelled")
        assert "rank 0 saved" in queue.log(urgent)
        queue.wait_for_log(low, "ready", run=2)
        queue.kill()
        for file in (go, low_go):
            file.touch()  # they end while nobody looks
        with pytest.raises(ChildProcessError):
            os.waitpid(keeper, 0)  # not ours: it has outlived its parent
        queue.start()
        for job in (running, low):
            queue.wait_for_state(job, "done")
        assert [run["outcome"] for run in queue.job(low)["runs"]] == ["preempted", "done"]
        assert [queue.job(job)["num_runs"] for job in (running, urgent)] == [1, 1]
        assert queue.log(running).count("up 0/1") == 1
        folder = f"TORCHEXT_JOB_FOLDER={queue.folder / 'jobs' / str(low)}"
        assert folder in queue.log(low, 1)
        assert folder in queue.log(low, 2)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file system that is full")
def test_a_full_disk_loses_nothing_and_is_recovered_from(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    try:
        with Queue(folder) as queue:
            go = tmp_path / "go"
            job = queue.submit(WORKER, "say", "ready", "wait", str(go))
            queue.wait_for_log(job, "ready")
            filler = folder / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            with pytest.raises(LaunchError, match=r"the queue cannot keep this: .*full"):
                queue.submit(WORKER)
            filler.unlink()
            later = queue.submit(WORKER)
            assert later == job + 1
            go.touch()
            for number in (job, later):
                queue.wait_for_state(number, "done")
                assert queue.job(number)["num_runs"] == 1
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow  # the drill of the default run does such things, too
def test_jobs_outlive_what_is_killed_of_them_and_nothing_is_left(engine: Engine, tmp_path: Path) -> None:
    with engine.queue(tmp_path / "q") as queue:
        go = tmp_path / "go"
        job = queue.submit("--grace", "1", WORKER, "spawn", "say", "ready", "wait", str(go))
        queue.wait_for_log(job, "ready", 1)
        started = queue.daemon.processes() - {queue.daemon.pid}
        keeper = engine.keeper(queue, job, 1)
        (agent,) = children(keeper)
        for pid in (keeper, agent):
            os.kill(pid, signal.SIGKILL)  # nobody is left to end the child in a session of its own
        queue.wait_for_log(job, "ready", 2)
        assert not started & queue.daemon.processes()
        (agent,) = children(engine.keeper(queue, job, 2))
        os.kill(agent, signal.SIGKILL)
        queue.wait_for_log(job, "ready", 3)
        go.touch()
        queue.wait_for_state(job, "done")
        outcomes = [run["outcome"] for run in queue.job(job)["runs"]]
        assert outcomes == [
            "a node or agent was lost; requeued",
            "killed from outside (status 137); requeued",
            "done",
        ]
        queue.wait_until(lambda: queue.daemon.processes() == {queue.daemon.pid})
